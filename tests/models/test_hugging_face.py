"""config.json and generation_config.json to ModelConfig, and the names of weights."""

from __future__ import annotations

import dataclasses
import math
from types import ModuleType

import pytest

from jetserve.errors import CheckpointError
from jetserve.models import hugging_face
from jetserve.models.hugging_face import read_config, text_name, weight_names
from jetserve.models.spec import Family, ModelConfig, RopeScaling, parameter_table

# As published by Meta and Google; keys that change nothing are left out.
LLAMA_3_2_1B: dict[str, object] = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "bos_token_id": 128000,
    "eos_token_id": [128001, 128008, 128009],
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 16,
    "num_key_value_heads": 8,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 32.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "vocab_size": 128256,
}
GEMMA_3_4B_IT: dict[str, object] = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "eos_token_id": [1, 106],
    "model_type": "gemma3",
    "text_config": {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    },
    "vision_config": {"hidden_size": 1152},
}


def llama(**changes: object) -> dict[str, object]:
    return LLAMA_3_2_1B | changes


def test_llama_3_2_1b_is_read_whole() -> None:
    assert read_config(LLAMA_3_2_1B) == ModelConfig(
        family=Family.LLAMA,
        vocab_size=128256,
        num_layers=16,
        embed_dim=2048,
        mlp_dim=8192,
        num_heads=32,
        num_kv_heads=8,
        head_dim=64,
        max_position=131072,
        rms_norm_eps=1e-5,
        rope_theta=500000.0,
        attention_scale=0.125,
        windows=(0,) * 16,
        rope_scaling=RopeScaling("llama3", 32.0, 8192, low_freq_factor=1.0, high_freq_factor=4.0),
        tied_head=True,
        eos_token_ids=(128001, 128008, 128009),
        bos_token_id=128000,
    )


def test_gemma_3_4b_is_read_from_its_text_part_with_the_class_defaults() -> None:
    assert read_config(GEMMA_3_4B_IT, {"eos_token_id": [1, 106]}) == ModelConfig(
        family=Family.GEMMA3,
        vocab_size=262208,
        num_layers=34,
        embed_dim=2560,
        mlp_dim=10240,
        num_heads=8,
        num_kv_heads=4,
        head_dim=256,
        max_position=131072,
        rms_norm_eps=1e-6,
        rope_theta=1000000.0,
        local_rope_theta=10000.0,
        attention_scale=1 / 16,
        windows=((1024,) * 5 + (0,)) * 5 + (1024,) * 4,
        activation="gelu_tanh",
        rope_scaling=RopeScaling("linear", 8.0, 131072),
        norm_offset=1.0,
        qk_norm=True,
        post_norms=True,
        embed_scale=math.sqrt(2560),
        tied_head=True,
        eos_token_ids=(1, 106),
        bos_token_id=2,
    )


def test_llama_2_defaults() -> None:
    config = read_config(
        {
            "architectures": ["LlamaForCausalLM"],
            "vocab_size": 32000,
            "hidden_size": 4096,
            "intermediate_size": 11008,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": None,
            "head_dim": None,
            "rope_scaling": None,
        }
    )

    assert (config.num_kv_heads, config.head_dim, config.rope_theta, config.tied_head) == (32, 128, 10000.0, False)
    assert (config.eos_token_ids, config.bos_token_id, config.max_position) == ((2,), 1, 2048)


def test_the_form_transformers_5_saves_reads_the_same(
    tiny: ModuleType, saved_configs: dict[str, dict[str, object]]
) -> None:
    for name, case in tiny.CASES.items():
        assert read_config(saved_configs[name]) == read_config(tiny.config_json(case)), name


@pytest.mark.parametrize(
    ("config_eos", "generation_eos", "union"),
    [
        (2, None, (2,)),
        (2, 2, (2,)),
        (128001, [128001, 128008, 128009], (128001, 128008, 128009)),
        ([1, 106], 1, (1, 106)),
        (None, 7, (7,)),
        (None, None, ()),
    ],
)
def test_end_tokens_are_the_union_of_both_files(
    config_eos: object, generation_eos: object, union: tuple[int, ...]
) -> None:
    config = read_config(llama(eos_token_id=config_eos), {"eos_token_id": generation_eos})

    assert config.eos_token_ids == union


def test_generation_config_without_end_tokens_adds_none() -> None:
    assert read_config(LLAMA_3_2_1B, {"temperature": 0.6}).eos_token_ids == (128001, 128008, 128009)


@pytest.mark.parametrize("outside", [True, False])
def test_tied_head_of_the_multimodal_file_wins(outside: bool) -> None:
    assert read_config(GEMMA_3_4B_IT | {"tie_word_embeddings": outside}).tied_head is outside


def test_layer_types_win_over_the_pattern() -> None:
    types = ["full_attention", "sliding_attention", "full_attention"]
    text = {"model_type": "gemma3_text", "num_hidden_layers": 3, "sliding_window_pattern": 2, "sliding_window": 9}

    assert read_config(text | {"layer_types": types}).windows == (0, 9, 0)
    assert read_config(text).windows == (9, 0, 9)


def test_rope_in_both_forms_at_once_is_their_union() -> None:
    nested = {
        "full_attention": {"rope_type": "default", "rope_theta": 5e5},
        "sliding_attention": {"rope_type": "default", "rope_theta": 9e3},
    }
    gemma = read_config(
        {"model_type": "gemma3_text", "rope_parameters": nested, "rope_scaling": {"type": "linear", "factor": 8.0}}
    )
    llama_like = read_config(
        llama(rope_parameters={"rope_type": "default", "rope_theta": 7e5}, rope_scaling={"type": "linear", "factor": 2})
    )

    assert (gemma.rope_theta, gemma.local_rope_theta) == (5e5, 9e3)
    assert gemma.rope_scaling == RopeScaling("linear", 8.0, 131072)
    assert llama_like.rope_scaling == RopeScaling("linear", 2.0, 131072)


def test_soft_caps_and_query_scale_are_read() -> None:
    config = read_config(
        {
            "model_type": "gemma3_text",
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30,
            "query_pre_attn_scalar": 144,
        }
    )

    assert (config.attention_softcap, config.logits_softcap, config.attention_scale) == (50.0, 30.0, 1 / 12)


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"architectures": ["MistralForCausalLM"], "model_type": "mistral"}, "MistralForCausalLM"),
        ({"architectures": ["LlamaForSequenceClassification"], "model_type": "llama"}, "LlamaForSequenceClass"),
        ({"model_type": "qwen3"}, "'qwen3'"),
        ({}, "supported are LlamaForCausalLM, Gemma3ForCausalLM, Gemma3ForConditionalGeneration"),
        (llama(hidden_size=None), "config.json has no hidden_size"),
        (llama(num_hidden_layers=0), "num_hidden_layers is 0; a whole number of at least 1 is needed"),
        (llama(vocab_size="32000"), "vocab_size is '32000'"),
        (llama(vocab_size=True), "vocab_size is True"),
        (llama(num_key_value_heads=5), "num_attention_heads=32 is not a multiple of num_key_value_heads=5"),
        (llama(hidden_act="relu"), "hidden_act is 'relu'; supported are silu"),
        (llama(rms_norm_eps=-1.0), "rms_norm_eps is -1.0; a number above 0 is needed"),
        (llama(rope_theta=float("nan")), "rope_theta is nan"),
        (llama(tie_word_embeddings="yes"), "tie_word_embeddings is 'yes'; true or false is needed"),
        (llama(eos_token_id="</s>"), "eos_token_id is '</s>'; a token id or a list of them is needed"),
        (llama(quantization_config={"quant_method": "awq"}), "quantization_config"),
        (GEMMA_3_4B_IT | {"text_config": None}, "text_config is None"),
        ({"model_type": "gemma3_text", "use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ({"model_type": "gemma3_text", "num_hidden_layers": 2, "layer_types": ["full_attention"]}, "layer_types"),
        ({"model_type": "gemma3_text", "num_hidden_layers": 1, "layer_types": ["chunked_attention"]}, "chunked"),
        ({"model_type": "gemma3_text", "sliding_window": 0}, "sliding_window is 0"),
        (
            {"model_type": "gemma3_text", "rope_parameters": {"sliding_attention": {"rope_type": "yarn"}}},
            "sliding_attention has rope_type 'yarn'",
        ),
    ],
)
def test_config_that_cannot_be_served_is_an_error_that_names_it(config: dict[str, object], says: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        read_config(config)

    assert says in str(caught.value)


def test_error_in_generation_config_names_that_file() -> None:
    with pytest.raises(CheckpointError, match=r"generation_config\.json: eos_token_id is -1"):
        read_config(LLAMA_3_2_1B, {"eos_token_id": -1})


@pytest.mark.parametrize("config", [LLAMA_3_2_1B, GEMMA_3_4B_IT])
def test_every_parameter_has_its_own_name(config: dict[str, object]) -> None:
    model = dataclasses.replace(read_config(config), attention_bias=True, mlp_bias=True, tied_head=False)
    table, names = parameter_table(model), weight_names(model)

    assert names.model.keys() == table.model.keys()
    assert names.layer.keys() == table.layer.keys()
    assert len(set(names.layer.values())) == len(names.layer)
    assert all(name.format(layer=3).startswith("model.layers.3.") for name in names.layer.values())


def test_the_norm_called_post_attention_is_another_one_in_each_family() -> None:
    by_family = [weight_names(read_config(config)).layer for config in (LLAMA_3_2_1B, GEMMA_3_4B_IT)]

    name = "model.layers.{layer}.post_attention_layernorm.weight"
    assert by_family[0]["mlp_norm"] == name
    assert by_family[1]["post_attention_norm"] == name
    assert by_family[1]["mlp_norm"] == "model.layers.{layer}.pre_feedforward_layernorm.weight"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("model.norm.weight", "model.norm.weight"),
        ("lm_head.weight", "lm_head.weight"),
        ("language_model.model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.up_proj.weight"),
        ("language_model.lm_head.weight", "lm_head.weight"),
        ("model.language_model.norm.weight", "model.norm.weight"),
        ("vision_tower.vision_model.embeddings.position_embedding.weight", None),
        ("model.vision_tower.vision_model.head.weight", None),
        ("multi_modal_projector.mm_input_projection_weight", None),
        ("model.layers.3.self_attn.rotary_emb.inv_freq", None),
        ("model.layers.0.mlp.experts.weight", "model.layers.0.mlp.experts.weight"),
    ],
)
def test_text_names_are_the_same_in_every_nesting(name: str, text: str | None) -> None:
    assert text_name(name) == text


def test_module_imports_no_jax() -> None:
    assert "jax" not in vars(hugging_face)
