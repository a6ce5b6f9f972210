"""One model on 1, 2, 4 or 8 emulated devices; prints what came out as JSON. A process of its own, as devices are.

python -m tests.sharding.eight_devices CACHE_FOLDER TENSOR...
"""

from __future__ import annotations

import json
import re
import sys
from collections import Counter

import jax

jax.config.update("jax_num_cpu_devices", 8)  # before anything asks for a device

import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402

from jetserve import config  # noqa: E402
from jetserve.engine import loading  # noqa: E402
from jetserve.engine.engine import Engine  # noqa: E402
from jetserve.engine.executor import DeviceExecutor  # noqa: E402
from jetserve.engine.plan import HostMove, PageCopy, StepPlan  # noqa: E402
from jetserve.errors import ConfigError  # noqa: E402
from jetserve.models import random_init  # noqa: E402
from jetserve.models.spec import Family, ModelConfig  # noqa: E402
from jetserve.request import ModelLimits, Request, SamplingParams  # noqa: E402

MODEL = ModelConfig(
    family=Family.LLAMA,
    vocab_size=97,  # no multiple of 2
    num_layers=2,
    embed_dim=32,
    mlp_dim=48,
    num_heads=8,
    num_kv_heads=2,
    head_dim=8,
    max_position=64,
    rms_norm_eps=1e-5,
    rope_theta=10000.0,
    attention_scale=8**-0.5,
    windows=(0, 7),
)
LIMITS = ModelLimits(MODEL.vocab_size, 64, (), 63)
COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute", "collective-broadcast")


def main(cache: str, sizes: list[int]) -> None:
    """Prints a line for each size."""
    for tensor in sizes:
        try:
            print(json.dumps(measure(cache, tensor)), flush=True)
        except ConfigError as error:
            print(json.dumps({"tensor": tensor, "error": str(error)}), flush=True)


def measure(cache: str, tensor: int) -> dict[str, object]:
    """Answers, collectives and memory on a mesh of `tensor` devices."""
    tree = config.load(
        settings=[
            "model.dtype=float32",
            f"mesh.tensor={tensor}",
            "engine.slots=4",
            "engine.max_length=64",
            "engine.page_size=4",
            "engine.kv_pages=257",
            "engine.prefill_sizes=[32]",
            "engine.prefill_rows=2",
            "engine.generate_rows=[4]",
            f"engine.host_kv_bytes={1 << 20}",
            "engine.strict_compile=true",
            f"engine.compilation_cache={cache}",
        ]
    )
    weights = jax.jit(lambda: random_init.random_weights(MODEL, jnp.float32, 7, stacked=False))()
    engine = loading.build_engine(tree, MODEL, weights)
    answered = answers(engine)
    executor = engine._executor
    step = executor._programs.generate[1, 4]  # type: ignore[attr-defined]
    kv = executor._kv  # type: ignore[attr-defined]
    return {
        "tensor": tensor,
        "answers": answered,
        "collectives": collectives(step.as_text()),
        "cache_shape": kv.shape,
        "cache_bytes_per_device": sorted({shard.data.nbytes for shard in kv.addressable_shards}),
        "cache_heads": [[shard.device.id, *heads(shard.index[2], kv.shape[2])] for shard in kv.addressable_shards],
        "embedding_rows": executor._weights.model["embedding"].shape[0],  # type: ignore[attr-defined]
        "temporary_bytes": step.memory_analysis().temp_size_in_bytes,
        "moves": moves(engine),
    }


def answers(engine: Engine) -> list[list[int]]:
    """Greedy and seeded ones, all at once; the longest goes to the end of the context."""
    rng = np.random.default_rng(3)
    requests = [
        Request.create(
            rng.integers(MODEL.vocab_size, size=length).tolist(),
            SamplingParams(max_tokens=most, seed=length, **kind),  # type: ignore[arg-type]
            LIMITS,
            now=0.0,
        )
        for length, most, kind in (
            (5, 32, {"temperature": 0.0}),
            (31, 32, {"temperature": 0.0}),
            (1, 63, {"temperature": 0.0}),
            (40, 20, {"temperature": 0.0, "repetition_penalty": 1.3}),
            (12, 32, {"temperature": 1.0}),
            (9, 32, {"temperature": 0.9, "top_p": 0.8}),
        )
    ]
    found: dict[str, list[int]] = {request.request_id: [] for request in requests}
    for request in requests:
        engine.add(request)
    while engine.has_work:
        for sequence, tokens, _, _ in engine.step(0.0):
            found[sequence.request.request_id] += tokens
    engine.check()
    return [found[request.request_id] for request in requests]


def moves(engine: Engine) -> dict[str, object]:
    """Copies pages, and sends twelve to host memory and back, past what the answers left in the cache."""
    executor = engine._executor
    assert isinstance(executor, DeviceExecutor)
    there = tuple(HostMove(1 + at, at) for at in range(12))
    back = tuple(HostMove(101 + at, at) for at in range(12))
    before = np.array(executor._kv)
    executor.execute(StepPlan(saves=there, copies=(PageCopy(1, 2), PageCopy(2, 201)))).result()
    executor.execute(StepPlan(loads=back)).result()
    right = before.copy()
    right[:, [2, 201]] = before[:, [1, 2]]
    right[:, 101:113] = before[:, 1:13]
    now = np.array(executor._kv)
    table = executor._programs
    assert table.host is not None
    programs = (table.copy, table.host.save, table.host.load)
    return {
        "page_is_written": bool(before[:, 1:13].any(axis=(0, 2, 3, 4, 5)).all()),
        "is_exact": bool((now[:, 1:] == right[:, 1:]).all()),  # page 0 takes what is unused
        "collectives": [collectives(program.as_text()) for program in programs],  # type: ignore[attr-defined]
    }


def collectives(hlo: str) -> dict[str, int]:
    """How many of each kind a compiled program runs, counted once where they are in a loop."""
    kinds = "|".join(COLLECTIVES)
    return dict(Counter(re.findall(rf" ({kinds})(?:-start)?\(", hlo)))


def heads(part: slice, whole: int) -> tuple[int, int]:
    """First and last (exclusive) head of a shard."""
    return part.start or 0, whole if part.stop is None else part.stop


if __name__ == "__main__":
    main(sys.argv[1], [int(size) for size in sys.argv[2:]])
