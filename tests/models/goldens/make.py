"""Writes tiny.npz and tiny.json: what transformers computes, in float32, for the models of tiny.py.

Run with torch 2.13.0 and transformers 5.24.0 installed (nothing else here needs them):
    python tests/models/goldens/make.py

tiny.npz holds per case  NAME/prefill  f32[prompt, V]  logits of the prompt, in one forward without a cache;
                         NAME/decode   f32[steps, V]   logits of each further token, one at a time on the cache.
tiny.json holds per case the config as transformers saves it, which differs in form from what tiny.py says.
rope.npz holds per entry of ROPES  NAME/frequencies  f32[R/2]  and  NAME/factor  f32[].
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import tiny
import torch
from transformers import DynamicCache, Gemma3ForCausalLM, Gemma3TextConfig, LlamaConfig, LlamaForCausalLM
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

HERE = Path(__file__).parent


def build(name: str) -> torch.nn.Module:
    """The case's model with its drawn weights."""
    config = tiny.config_json(tiny.CASES[name])
    gemma = config["model_type"] == "gemma3_text"
    # Padding and end tokens change nothing in the numbers, but must lie inside the tiny vocabulary.
    options = {key: value for key, value in config.items() if key not in ("architectures", "model_type")}
    model_config = (Gemma3TextConfig if gemma else LlamaConfig)(**options)
    model_config._attn_implementation = "eager"
    model = (Gemma3ForCausalLM if gemma else LlamaForCausalLM)(model_config).float().eval()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            parameter.copy_(torch.from_numpy(tiny.weight(name, key, tuple(parameter.shape))))
    return model


def run(name: str) -> tuple[dict[str, np.ndarray], dict[str, object]]:
    """Logits of one case, and its saved config."""
    case, model = tiny.CASES[name], build(name)
    ids = torch.from_numpy(tiny.tokens(name)).long()[None]
    with torch.no_grad():
        prefill = model(ids[:, : case.prompt], use_cache=False).logits[0]
        cache = DynamicCache(config=model.config)
        model(ids[:, : case.prompt], cache=cache, use_cache=True)
        steps = [
            model(ids[:, at : at + 1], cache=cache, use_cache=True).logits[0, 0]
            for at in range(case.prompt, case.prompt + case.steps)
        ]
    arrays = {f"{name}/prefill": prefill.numpy(), f"{name}/decode": torch.stack(steps).numpy()}
    return arrays, json.loads(model.config.to_json_string(use_diff=False))


def ropes() -> dict[str, np.ndarray]:
    """Frequencies of published models' rope settings."""
    arrays = {}
    for name, config in tiny.ROPES.items():
        options = {key: value for key, value in config.items() if key != "model_type"}
        model_config = LlamaConfig(**options)
        kind = model_config.rope_parameters["rope_type"]
        frequencies, factor = ROPE_INIT_FUNCTIONS[kind](model_config, "cpu")
        arrays[f"{name}/frequencies"] = frequencies.numpy()
        arrays[f"{name}/factor"] = np.float32(factor)
    return arrays


def main() -> None:
    torch.manual_seed(0)
    arrays: dict[str, np.ndarray] = {}
    configs: dict[str, object] = {}
    for name in tiny.CASES:
        logits, configs[name] = run(name)
        arrays |= logits
        print(name, float(np.abs(logits[f"{name}/decode"]).max()))
    np.savez_compressed(HERE / "tiny.npz", **arrays)
    np.savez_compressed(HERE / "rope.npz", **ropes())
    (HERE / "tiny.json").write_text(json.dumps(configs, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
