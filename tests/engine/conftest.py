"""Engines on tiny random models, compiled once for all tests of this folder."""

from __future__ import annotations

import random
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array
from numpy.typing import NDArray

from jetserve import config
from jetserve.engine import loading
from jetserve.engine.engine import Engine
from jetserve.engine.executor import DeviceExecutor
from jetserve.engine.fake import FakeExecutor
from jetserve.engine.plan import PendingStep, StepPlan, StepResult
from jetserve.engine.scheduler import Scheduler
from jetserve.engine.sizing import Sizing
from jetserve.models import random_init
from jetserve.models.spec import Family, ModelConfig
from jetserve.models.transformer import Weights
from jetserve.request import FinishReason, ModelLimits, Request, SamplingParams, TokenLogprobs
from tests.engine.oracle import CachelessModel

MAX_LENGTH = 64
KV_PAGES = 1025  # so many that a copy of the cache would stand out among the temporaries

LLAMA = ModelConfig(
    family=Family.LLAMA,
    vocab_size=97,
    num_layers=2,
    embed_dim=32,
    mlp_dim=48,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    max_position=MAX_LENGTH,
    rms_norm_eps=1e-5,
    rope_theta=10000.0,
    attention_scale=8**-0.5,
    windows=(0, 0),
)
GEMMA = ModelConfig(
    family=Family.GEMMA3,
    vocab_size=131,
    num_layers=3,
    embed_dim=32,
    mlp_dim=48,
    num_heads=4,
    num_kv_heads=1,
    head_dim=8,
    max_position=MAX_LENGTH,
    rms_norm_eps=1e-6,
    rope_theta=1000000.0,
    local_rope_theta=10000.0,
    attention_scale=16**-0.5,
    windows=(5, 0, 9),
    activation="gelu_tanh",
    norm_offset=1.0,
    qk_norm=True,
    post_norms=True,
    embed_scale=32**0.5,
    tied_head=True,
    logits_softcap=30.0,
)
MODELS = {"llama": LLAMA, "gemma3": GEMMA}


def weights_of(model: ModelConfig) -> Weights[Array]:
    """Random ones, scaled so that what comes next hangs on every token before."""
    drawn: Weights[Array] = jax.jit(lambda: random_init.random_weights(model, jnp.float32, 7, stacked=False))()
    scale, shift = {"proj": 1.7}, {"post_attention_norm": 2.0, "post_mlp_norm": 2.0, "k_norm": 1.0}
    layers = tuple(
        {name: values * scale.get(name[-4:], 1.0) + shift.get(name, 0.0) for name, values in layer.items()}
        for layer in drawn.layers
    )
    model_level = {name: values * (4.0 if name == "head" else 1.0) for name, values in drawn.model.items()}
    return replace(drawn, model=model_level, layers=layers)


@dataclass
class Asked:
    """A request, when it comes and when somebody loses interest. Steps of the engine are the clock."""

    request: Request
    arrival: int = 0
    abort: int | None = None
    tokens: dict[int, list[int]] = field(default_factory=dict)
    logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)
    reasons: dict[int, FinishReason] = field(default_factory=dict)


class CheckedExecutor:
    """Runs every plan on the device and, when its result is read, on a strict fake that knows the contract.

    The fake is told what the device sampled, so that its pages hold the same tokens.
    """

    compilations_after_warmup = 0

    def __init__(self, device: DeviceExecutor, sizing: Sizing, vocab_size: int) -> None:
        self._device = device
        self._sampled: dict[int, deque[int]] = {}  # by slot, of the plan that the fake runs
        self.plans: list[StepPlan] = []
        self._fake = FakeExecutor(sizing, vocab_size, next_token=lambda _, a: self._sampled[a.slot].popleft())

    def execute(self, plan: StepPlan) -> PendingStep:
        self.plans.append(plan)
        return _CheckedStep(self, plan, self._device.execute(plan))

    def check(self, plan: StepPlan, result: StepResult) -> None:
        """Raises: ContractViolation."""
        self._sampled = defaultdict(deque)
        for chunk, token in zip(plan.chunks, result.first_tokens.tolist(), strict=False):
            if chunk.is_last:
                self._sampled[chunk.slot].append(token)
        for slot in range(result.counts.size):
            self._sampled[slot].extend(result.tokens[: result.counts[slot], slot].tolist())
        self._fake.execute(plan)
        assert not any(self._sampled.values()), f"the device sampled more than the plan says: {self._sampled}"


class _CheckedStep(NamedTuple):
    executor: CheckedExecutor
    plan: StepPlan
    pending: PendingStep

    def result(self) -> StepResult:
        result = self.pending.result()
        self.executor.check(self.plan, result)
        return result


class Served:
    """A model with its compiled programs. `run` starts a fresh host side over a device that keeps all it had."""

    def __init__(self, model: ModelConfig, weights: Weights[Array], engine: Engine) -> None:
        self.model = model
        self.weights = weights
        self.sizing = engine.scheduler.sizing
        self.executor: DeviceExecutor = engine._executor  # type: ignore[assignment]
        self.truth = CachelessModel(model, weights, MAX_LENGTH)
        self.plans: list[StepPlan] = []
        self.preemptions = 0

    @property
    def limits(self) -> ModelLimits:
        return ModelLimits(self.model.vocab_size, MAX_LENGTH, (), MAX_LENGTH - 1)

    def request(
        self, prompt: Sequence[int], max_tokens: int | None = None, *, eos: Iterable[int] = (), **params: object
    ) -> Request:
        limits = self.limits._replace(eos_token_ids=tuple(eos))
        made = SamplingParams(**{"max_tokens": max_tokens, "temperature": 0.0, **params})  # type: ignore[arg-type]
        return Request.create(prompt, made, limits, now=0.0)

    def prompt(self, chance: random.Random, length: int) -> tuple[int, ...]:
        return tuple(chance.randrange(self.model.vocab_size) for _ in range(length))

    def run(self, asked: Sequence[Asked], between: Callable[[], None] | None = None, **sizes: object) -> None:
        """Serves everything to its end and leaves the answers in `asked`; the host side has these sizes.

        Args:
          between: called once, when the engine has nothing to do for the first time and more is to come.
        """
        sizing = replace(self.sizing, **sizes)  # type: ignore[arg-type]
        executor = CheckedExecutor(self.executor, sizing, self.model.vocab_size)
        engine = Engine(Scheduler(sizing), executor)
        waiting = sorted(asked, key=lambda one: one.arrival)
        by_id = {one.request.request_id: one for one in asked}
        for step in range(100_000):
            while waiting and waiting[0].arrival <= step:
                engine.add(waiting.pop(0).request)
            for one in asked:
                if one.abort == step:
                    engine.abort(one.request.request_id)
            if not waiting and not engine.has_work:
                break
            if between is not None and waiting and not engine.has_work and executor.plans:
                between()
                between = None
            for sequence, tokens, logprobs, reason in engine.step(0.0):
                one = by_id[sequence.request.request_id]
                one.tokens.setdefault(sequence.index, []).extend(tokens)
                one.logprobs.setdefault(sequence.index, []).extend(logprobs)
                if reason is not None:
                    one.reasons[sequence.index] = reason
            engine.check()
        self.plans, self.preemptions = executor.plans, engine.status().preemptions
        assert engine.status().pages_used == 0

    def answers(self, *requests: Request, **sizes: object) -> list[list[int]]:
        """Serves requests that all come at once."""
        asked = [Asked(request) for request in requests]
        self.run(asked, **sizes)
        return [one.tokens[0] for one in asked]

    def solo(self, request: Request) -> list[int]:
        """Its answer with nothing else in the engine."""
        return self.answers(request)[0]

    def poison(self, change: Callable[[NDArray[Any]], NDArray[Any]]) -> None:
        """Changes everything the executor holds of slots and pages, on the device and on the host."""
        self.executor._kv = _changed(self.executor._kv, change)
        self.poison_slots(change)

    def poison_slots(self, change: Callable[[NDArray[Any]], NDArray[Any]]) -> None:
        """Changes everything the executor holds of slots."""
        executor = self.executor
        executor._state = jax.tree.map(lambda array: _changed(array, change), executor._state)
        for array in (executor._page_table, executor._prompt_tokens, executor._wants_logprobs):
            array[...] = change(array)

    def require_right(self, asked: Iterable[Asked]) -> None:
        """Checks answers that were not aborted against the model without a cache."""
        for one in asked:
            for index in range(one.request.params.n):
                tokens = one.tokens.get(index, [])
                if index in one.reasons:
                    self.truth.require_answer(one.request, tokens, index)
                    is_stop = tokens[-1] in one.request.stop_token_ids
                    assert one.reasons[index] is (FinishReason.STOP if is_stop else FinishReason.LENGTH)
                else:
                    assert one.abort is not None, f"{one.request.request_id}/{index} never ended"


def _changed(array: Array, change: Callable[[NDArray[Any]], NDArray[Any]]) -> Array:
    return jax.device_put(change(np.asarray(array)), array.sharding)


Serve = Callable[..., Served]


@pytest.fixture(scope="session")
def serve(request: pytest.FixtureRequest) -> Iterator[Serve]:
    """Compiles an engine for a model and settings, once; in pytest's cache the programs outlive the run."""
    folder = request.config.cache.mkdir("jetserve-programs")
    built: dict[tuple[str, ...], Served] = {}

    def make(name: str, *settings: str) -> Served:
        key = (name, *settings)
        if key not in built:
            model = MODELS[name]
            weights = weights_of(model)
            built[key] = Served(model, weights, loading.build_engine(settings_of(folder, *settings), model, weights))
        return built[key]

    make.folder = folder  # type: ignore[attr-defined]
    yield make
    loading.use_compilation_cache(None)


def settings_of(cache: Path, *settings: str) -> config.Config:
    return config.load(
        settings=[
            "model.dtype=float32",
            "engine.slots=4",
            f"engine.max_length={MAX_LENGTH}",
            "engine.page_size=4",
            f"engine.kv_pages={KV_PAGES}",
            "engine.prefill_rows=3",
            "engine.strict_compile=true",
            f"engine.compilation_cache={cache}",
            *settings,
        ]
    )


LLAMA_SETTINGS = ("engine.prefill_sizes=[8, 32]", "engine.generate_rows=[2, 4]")
GEMMA_SETTINGS = ("engine.prefill_sizes=[16]", "engine.generate_rows=[4]", "engine.generate_steps=[1, 4]")


@pytest.fixture(scope="session")
def llama(serve: Serve) -> Served:
    """Two prefill sizes and two batch sizes, a token at a time."""
    return serve("llama", *LLAMA_SETTINGS)


@pytest.fixture(scope="session")
def gemma(serve: Serve) -> Served:
    """Windows shorter than the sequences; four tokens at a time when nobody waits."""
    return serve("gemma3", *GEMMA_SETTINGS)


@pytest.fixture(params=["llama", "gemma3"])
def served(request: pytest.FixtureRequest) -> Served:
    """Both families in turn."""
    found: Served = request.getfixturevalue("llama" if request.param == "llama" else "gemma")
    return found
