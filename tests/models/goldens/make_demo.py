"""Writes demo.json: what transformers answers, in float32 on the dequantised weights of the two demo models.

Run with torch 2.13.0, transformers 5.24.0, gguf, tokenizers and sentencepiece installed:
    python tests/models/goldens/make_demo.py SMOLLM2.gguf GEMMA3.gguf

demo.json: {MODEL: {"sha256": of the GGUF, "prompts": [{"text", "prompt_token_ids", "token_ids", "gaps"}]}}
  MODEL             "demo" (SmolLM2-135M-Instruct Q4_1) or "demo-gemma" (Gemma 3 270M Q4_K_M)
  text              from demo_prompts.json; encoded with control tokens recognised and, for Gemma, BOS in front
  token_ids         32 greedy tokens; end tokens do not stop it
  gaps              per token, by how much its logit exceeds the next best

Weights are dequantised by the gguf package and put in by name here, then compared with what transformers' own GGUF
loader makes of the file. Tokenizers are built from the file's vocabulary with tokenizers and sentencepiece, because
transformers' conversion of GGUF vocabularies splits some texts differently.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import torch
from gguf.quants import dequantize
from sentencepiece import SentencePieceProcessor, sentencepiece_model_pb2
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, Gemma3ForCausalLM, Gemma3TextConfig, LlamaConfig, LlamaForCausalLM

HERE = Path(__file__).parent
STEPS = 32
NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_norm": "input_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
LLAMA_NAMES = NAMES | {"ffn_norm": "post_attention_layernorm"}
GEMMA_NAMES = NAMES | {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
CONTROL, USER_DEFINED = 3, 4  # token types of GGUF


def field(reader: gguf.GGUFReader, key: str) -> object:
    """A metadata value; the architecture's own keys without its prefix."""
    architecture = reader.fields["general.architecture"].contents()
    return (reader.fields.get(key) or reader.fields[f"{architecture}.{key}"]).contents()


def state(reader: gguf.GGUFReader, names: dict[str, str]) -> dict[str, torch.Tensor]:
    """Dequantised tensors by Hugging Face name, [out, in], as the file orders their rows."""
    out = {}
    for tensor in reader.tensors:
        parts = tensor.name.removesuffix(".weight").split(".")
        name = names[parts[-1]] if parts[0] != "blk" else f"model.layers.{parts[1]}.{names[parts[2]]}"
        out[f"{name}.weight"] = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).astype(np.float32))
    return out


def llama(reader: gguf.GGUFReader) -> torch.nn.Module:
    heads, kv_heads = field(reader, "attention.head_count"), field(reader, "attention.head_count_kv")
    config = LlamaConfig(
        vocab_size=field(reader, "vocab_size"),
        hidden_size=field(reader, "embedding_length"),
        intermediate_size=field(reader, "feed_forward_length"),
        num_hidden_layers=field(reader, "block_count"),
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=field(reader, "context_length"),
        rms_norm_eps=field(reader, "attention.layer_norm_rms_epsilon"),
        rope_parameters={"rope_type": "default", "rope_theta": field(reader, "rope.freq_base")},
        tie_word_embeddings=True,
    )
    tensors = state(reader, LLAMA_NAMES)
    for name, tensor in tensors.items():
        # llama.cpp interleaves the two halves of each head's rotating dimensions.
        rows = heads if "q_proj" in name else kv_heads if "k_proj" in name else 0
        if rows:
            out, width = tensor.shape
            tensors[name] = tensor.reshape(rows, out // rows // 2, 2, width).transpose(1, 2).reshape(out, width)
    return loaded(LlamaForCausalLM(config), tensors)


def gemma(reader: gguf.GGUFReader) -> torch.nn.Module:
    tensors = state(reader, GEMMA_NAMES)
    for name in tensors:
        if "norm" in name:
            tensors[name] -= 1.0  # llama.cpp stores what the norm multiplies with, Hugging Face one less
    config = Gemma3TextConfig(
        vocab_size=tensors["model.embed_tokens.weight"].shape[0],
        hidden_size=field(reader, "embedding_length"),
        intermediate_size=field(reader, "feed_forward_length"),
        num_hidden_layers=field(reader, "block_count"),
        num_attention_heads=field(reader, "attention.head_count"),
        num_key_value_heads=field(reader, "attention.head_count_kv"),
        head_dim=field(reader, "attention.key_length"),
        query_pre_attn_scalar=field(reader, "attention.key_length"),
        sliding_window=field(reader, "attention.sliding_window"),
        max_position_embeddings=field(reader, "context_length"),
        rms_norm_eps=field(reader, "attention.layer_norm_rms_epsilon"),
        rope_theta=field(reader, "rope.freq_base"),
    )
    return loaded(Gemma3ForCausalLM(config), tensors)


def loaded(model: torch.nn.Module, tensors: dict[str, torch.Tensor]) -> torch.nn.Module:
    missing, unexpected = model.load_state_dict(tensors, strict=False)
    assert missing == ["lm_head.weight"], missing
    assert not unexpected, unexpected
    model.tie_weights()
    return model.float().eval()


def compare_with_own_loader(model: torch.nn.Module, path: Path) -> None:
    """Every tensor must be what transformers itself reads from the file."""
    other = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32).state_dict()
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, other[name][: tensor.shape[0]]), f"{name} differs"


def byte_pairs(reader: gguf.GGUFReader) -> Callable[[str], list[int]]:
    """SmolLM2's tokenizer: digits one by one, then GPT-2's byte-level pairs."""
    pieces, types = field(reader, "tokenizer.ggml.tokens"), field(reader, "tokenizer.ggml.token_type")
    merges = [tuple(pair.split(" ")) for pair in field(reader, "tokenizer.ggml.merges")]
    tokenizer = Tokenizer(models.BPE(vocab={piece: index for index, piece in enumerate(pieces)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [
            AddedToken(piece, special=True, normalized=False)
            for piece, kind in zip(pieces, types, strict=True)
            if kind == CONTROL
        ]
    )
    return lambda text: tokenizer.encode(text, add_special_tokens=False).ids


def sentence_pieces(reader: gguf.GGUFReader) -> Callable[[str], list[int]]:
    """Gemma's tokenizer: SentencePiece BPE with byte fallback, no prefix space, BOS in front."""
    proto = sentencepiece_model_pb2.ModelProto()
    columns = [field(reader, f"tokenizer.ggml.{name}") for name in ("tokens", "scores", "token_type")]
    for index, (piece, score, kind) in enumerate(zip(*columns, strict=True)):
        unknown = index == field(reader, "tokenizer.ggml.unknown_token_id")
        if kind == USER_DEFINED:
            piece = piece.replace(" ", "\u2581")  # llama.cpp writes these, runs of spaces among them, unescaped
        proto.pieces.add(piece=piece, score=score, type=2 if unknown else kind)
    proto.trainer_spec.model_type = sentencepiece_model_pb2.TrainerSpec.BPE
    proto.trainer_spec.byte_fallback = True
    proto.trainer_spec.unk_piece = "<unk>"
    proto.normalizer_spec.add_dummy_prefix = False
    proto.normalizer_spec.remove_extra_whitespaces = False
    proto.normalizer_spec.escape_whitespaces = True
    processor = SentencePieceProcessor(model_proto=proto.SerializeToString())
    bos = field(reader, "tokenizer.ggml.bos_token_id")
    return lambda text: [bos, *processor.encode(text)]


def greedy(model: torch.nn.Module, prompt: list[int]) -> tuple[list[int], list[float]]:
    tokens, gaps, cache, ids = [], [], None, torch.tensor([prompt])
    with torch.no_grad():
        for _ in range(STEPS):
            out = model(ids, cache=cache, use_cache=True, logits_to_keep=1)
            cache, top = out.cache, out.logits[0, -1].topk(2)
            # Ties go to the lowest id, which topk does not promise.
            token = int((out.logits[0, -1] == top.values[0]).nonzero()[0, 0])
            tokens.append(token)
            gaps.append(round(float(top.values[0] - top.values[1]), 6))
            ids = torch.tensor([[token]])
    return tokens, gaps


def main() -> None:
    torch.set_num_threads(2)
    prompts = json.loads((HERE / "demo_prompts.json").read_text())
    makers = {"demo": (llama, byte_pairs), "demo-gemma": (gemma, sentence_pieces)}
    answers = {}
    for path, (name, (make_model, make_encode)) in zip(map(Path, sys.argv[1:]), makers.items(), strict=True):
        reader = gguf.GGUFReader(path)
        model, encode = make_model(reader), make_encode(reader)
        compare_with_own_loader(model, path)
        rows = []
        for text in prompts[name]:
            prompt = encode(text)
            tokens, gaps = greedy(model, prompt)
            rows.append({"text": text, "prompt_token_ids": prompt, "token_ids": tokens, "gaps": gaps})
            print(name, len(prompt), min(gaps), flush=True)
        answers[name] = {"sha256": hashlib.sha256(path.read_bytes()).hexdigest(), "prompts": rows}
    text = json.dumps(answers, ensure_ascii=False, separators=(",", ":"))
    (HERE / "demo.json").write_text(text.replace('{"text"', '\n{"text"') + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
