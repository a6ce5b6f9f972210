"""A model small enough that only the engine around it counts: random weights, two layers, no download."""

from __future__ import annotations

import json
from pathlib import Path

from tests.bench.fake_engine import VOCAB_SIZE, write_tokenizer

CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
}


def write_tiny_model(folder: Path) -> None:
    """Writes what `model.random_weights` needs of a Hugging Face folder: config.json and tokenizer.json."""
    (folder / "config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
    write_tokenizer(folder)
