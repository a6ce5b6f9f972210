"""The decoder stack against transformers' float32 logits, and its own invariants."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from functools import partial
from types import ModuleType

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array
from jax.typing import DTypeLike
from numpy.typing import NDArray

from jetserve.models import hugging_face, transformer
from jetserve.models.random_init import abstract_weights
from jetserve.models.spec import ModelConfig, ParamSpec, parameter_table
from jetserve.models.transformer import Attend, LayerInfo, Weights

LLAMAS = [
    "llama-mha-untied",
    "llama-gqa2-tied",
    "llama-gqa4-wide-heads",
    "llama-rope-default",
    "llama-rope-llama3",
    "llama-rope-llama3-factor16-tied",
    "llama-rope-linear",
    "llama-rope-linear-new",
    "llama-rope-dynamic",
    "llama-rope-yarn",
    "llama-rope-yarn-tuned",
    "llama-rope-yarn-attention-factor",
    "llama-biases",
]
GEMMAS = [
    "gemma3-gqa2",
    "gemma3-mha",
    "gemma3-gqa4-linear",
    "gemma3-logits-softcap",
    "gemma3-layer-types",
    "gemma3-rope-parameters",
    "gemma3-untied-bias",
    "gemma3-window-only",
    "gemma3-default-pattern",
]
# Each takes a second or two to compile, so those that differ from another in numbers alone are among the slow tests.
LIKE_ANOTHER = (
    "llama-rope-default",
    "llama-rope-llama3-factor16-tied",
    "llama-rope-linear",
    "llama-rope-linear-new",
    "llama-rope-yarn-tuned",
    "llama-rope-yarn-attention-factor",
    "gemma3-mha",
    "gemma3-rope-parameters",
    "gemma3-window-only",
    "gemma3-default-pattern",
)
OWN_LOOP = ("llama-biases", "gemma3-gqa2")
BOTH_FORMS = [
    pytest.param(name, False, id=f"{name}-unrolled", marks=[pytest.mark.slow] if name in LIKE_ANOTHER else [])
    for name in LLAMAS + GEMMAS
] + [
    pytest.param(name, True, id=f"{name}-stacked", marks=[] if name in OWN_LOOP else [pytest.mark.slow])
    for name in LLAMAS + GEMMAS
]
# Nothing here runs long enough to repay an optimising compilation.
QUICKLY = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
LENGTH = 64
Cache = tuple[Array, Array]


def attend_dense(config: ModelConfig) -> Attend[Cache]:
    """Attention of one sequence over a cache [L, LENGTH, K, H] of all positions, plainly written."""

    def bind(positions: Array) -> Attend[Cache]:
        def attend(layer: LayerInfo, q: Array, k: Array, v: Array, cache: Cache) -> tuple[Array, Cache]:
            keys, values = (c.at[layer.index, positions].set(new) for c, new in zip(cache, (k, v), strict=True))
            groups = q.shape[1] // k.shape[1]
            k_all, v_all = (jnp.repeat(c[layer.index], groups, axis=1) for c in (keys, values))
            scores = jnp.einsum("tnh,snh->nts", q, k_all, precision="highest") * config.attention_scale
            if config.attention_softcap is not None:
                scores = config.attention_softcap * jnp.tanh(scores / config.attention_softcap)
            distance = positions[:, None] - jnp.arange(LENGTH)[None, :]
            seen = (distance >= 0) & ((layer.window == 0) | (distance < layer.window))
            weights = jax.nn.softmax(jnp.where(seen[None], scores, -jnp.inf), axis=-1)
            return jnp.einsum("nts,snh->tnh", weights, v_all, precision="highest"), (keys, values)

        return attend

    return bind


def run(
    config: ModelConfig, weights: Weights[Array], tokens: NDArray[np.int32], chunks: list[int]
) -> NDArray[np.float32]:
    """Logits of all tokens, run in chunks of the given sizes on one cache."""
    first = weights.layers if isinstance(weights.layers, Mapping) else weights.layers[0]
    num_kv_heads = first["k_proj"].shape[-2] // config.head_dim
    empty = jnp.zeros((config.num_layers, LENGTH, num_kv_heads, config.head_dim))
    bind = attend_dense(config)

    @partial(jax.jit, compiler_options=QUICKLY)
    def step(weights: Weights[Array], tokens: Array, positions: Array, cache: Cache) -> tuple[Array, Cache]:
        hidden, cache = transformer.forward(config, weights, tokens, positions, bind(positions), cache)
        return transformer.logits(config, weights, hidden), cache

    out, cache, at = [], (empty, empty), 0
    for size in chunks:
        positions = np.arange(at, at + size, dtype=np.int32)
        logits, cache = step(weights, tokens[at : at + size], positions, cache)
        out.append(np.asarray(logits))
        at += size
    return np.concatenate(out)


def golden_weights(tiny: ModuleType, name: str, config: ModelConfig, *, stacked: bool) -> Weights[Array]:
    """The case's weights, put in place by the Hugging Face names."""
    table, names = parameter_table(config), hugging_face.weight_names(config)
    model = {ours: jnp.asarray(tiny.weight(name, names.model[ours], spec.shape)) for ours, spec in table.model.items()}
    layers = tuple(
        {
            ours: jnp.asarray(tiny.weight(name, names.layer[ours].format(layer=layer), spec.shape))
            for ours, spec in table.layer.items()
        }
        for layer in range(config.num_layers)
    )
    if not stacked:
        return Weights(model=model, layers=layers)
    return Weights(model=model, layers={ours: jnp.stack([layer[ours] for layer in layers]) for ours in table.layer})


def test_every_golden_is_tested(tiny: ModuleType) -> None:
    assert sorted(tiny.CASES) == sorted(LLAMAS + GEMMAS)


@pytest.mark.parametrize(("name", "stacked"), BOTH_FORMS)
def test_logits_equal_transformers(
    tiny: ModuleType, golden_logits: dict[str, NDArray[np.float32]], name: str, stacked: bool
) -> None:
    """The prompt at once, then token by token: both within 1e-4."""
    case = tiny.CASES[name]
    config = hugging_face.read_config(tiny.config_json(case))
    weights = golden_weights(tiny, name, config, stacked=stacked)

    logits = run(config, weights, tiny.tokens(name), [case.prompt] + [1] * case.steps)

    expected = np.concatenate([golden_logits[f"{name}/prefill"], golden_logits[f"{name}/decode"]])
    np.testing.assert_allclose(logits, expected, rtol=0, atol=1e-4)


TINY_GEMMA = hugging_face.read_config(
    {
        "model_type": "gemma3_text",
        "vocab_size": 61,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "sliding_window": 4,
        "sliding_window_pattern": 3,
    }
)
TINY_LLAMA = hugging_face.read_config(
    {
        "model_type": "llama",
        "vocab_size": 61,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
)


def drawn(config: ModelConfig, dtype: DTypeLike = jnp.float32, *, stacked: bool = False) -> Weights[Array]:
    """Normal weights with variance 1/in and neutral norms, without compiling anything."""
    generator = np.random.default_rng(0)

    def draw(spec: ParamSpec) -> Array:
        if spec.init != "normal":
            return jnp.asarray(np.full(spec.shape, spec.init == "ones"), dtype)
        return jnp.asarray(generator.normal(size=spec.shape) / np.sqrt(spec.shape[-1]), dtype)

    specs = transformer.param_specs(config, stacked=stacked)
    weights: Weights[Array] = jax.tree.map(draw, specs, is_leaf=_is_spec)
    return weights


TOKENS = np.array([5, 60, 0, 17, 33, 8], np.int32)


def spy(seen: list[LayerInfo]) -> Attend[Array]:
    """Notes the layers it is traced for, attends to nothing but the token itself.

    The carry collects what each layer was told in decimal: two digits of index and window per layer.
    """

    def attend(layer: LayerInfo, q: Array, k: Array, v: Array, carry: Array) -> tuple[Array, Array]:
        seen.append(layer)
        told = jnp.asarray(10 * layer.index + layer.window, jnp.int32)
        return jnp.repeat(v, q.shape[1] // v.shape[1], axis=1), 100 * carry + told

    return attend


def logits_of(config: ModelConfig, weights: Weights[Array], attend: Attend[Array]) -> Array:
    hidden, _ = transformer.forward(
        config, weights, jnp.asarray(TOKENS), jnp.arange(6, dtype=jnp.int32), attend, jnp.int32(0)
    )
    return transformer.logits(config, weights, hidden)


@pytest.mark.parametrize("stacked", [False, True], ids=["unrolled", "stacked"])
def test_every_layer_is_told_its_index_and_window(stacked: bool) -> None:
    weights = drawn(TINY_GEMMA, stacked=stacked)

    def told(weights: Weights[Array]) -> Array:
        return transformer.forward(TINY_GEMMA, weights, TOKENS, jnp.arange(6), spy([]), jnp.int32(0))[1]

    assert jax.jit(told, compiler_options=QUICKLY)(weights) == 4_14_20


@pytest.mark.parametrize("stacked", [False, True], ids=["unrolled", "stacked"])
def test_numbers_equal_in_all_layers_stay_python_ints(stacked: bool) -> None:
    """A model without windows must not pay for their mask."""
    seen: list[LayerInfo] = []

    jax.eval_shape(partial(logits_of, TINY_LLAMA, attend=spy(seen)), abstract_weights(TINY_LLAMA, jnp.float32, stacked))

    assert seen[0].window == 0
    assert isinstance(seen[0].window, int)


def test_kv_heads_repeated_in_the_weights_change_nothing() -> None:
    """What a mesh wider than the kv heads loads: each kv head twice."""
    config = TINY_GEMMA
    weights = drawn(config)

    def repeated(layer: dict[str, Array]) -> dict[str, Array]:
        def twice(weight: Array) -> Array:
            heads = weight.reshape(config.num_kv_heads, config.head_dim, -1)
            return jnp.repeat(heads, 2, axis=0).reshape(-1, weight.shape[1])

        return layer | {"k_proj": twice(layer["k_proj"]), "v_proj": twice(layer["v_proj"])}

    wide = weights.replace(layers=tuple(repeated(layer) for layer in weights.layers))

    np.testing.assert_allclose(run(config, wide, TOKENS, [6]), run(config, weights, TOKENS, [6]), rtol=0, atol=1e-5)


def test_queries_are_rotated_but_not_scaled() -> None:
    """At position 0 nothing turns, so a Llama's query is the plain projection of its normed input."""
    config = dataclasses.replace(TINY_LLAMA, num_layers=1, windows=(0,))
    weights = drawn(config)

    def attend(layer: LayerInfo, q: Array, k: Array, v: Array, carry: Array) -> tuple[Array, Array]:
        return jnp.zeros_like(q), q

    def query(weights: Weights[Array]) -> Array:
        start = jnp.zeros((1, 4, 8), jnp.float32)
        return transformer.forward(config, weights, TOKENS[:1], jnp.zeros(1, jnp.int32), attend, start)[1]

    x = np.asarray(weights.model["embedding"])[TOKENS[0]]
    normed = x / np.sqrt(np.mean(x * x) + 1e-6)
    expected = np.asarray(weights.layers[0]["q_proj"]) @ normed
    np.testing.assert_allclose(jax.jit(query)(weights).reshape(-1), expected, rtol=1e-4, atol=1e-5)


def test_logits_cap_bounds_the_logits() -> None:
    capped = dataclasses.replace(TINY_LLAMA, logits_softcap=0.5)
    weights = drawn(capped)
    hidden = 10 * np.random.default_rng(0).normal(size=(3, 32)).astype(np.float32)

    raw, squashed = (np.asarray(transformer.logits(config, weights, hidden)) for config in (TINY_LLAMA, capped))

    np.testing.assert_allclose(squashed, 0.5 * np.tanh(raw / 0.5), rtol=0, atol=1e-6)


@pytest.mark.parametrize("config", [TINY_LLAMA, TINY_GEMMA], ids=["llama", "gemma3"])
def test_bfloat16_is_near_float32_and_never_converts_a_whole_weight(config: ModelConfig) -> None:
    """Only activations are cast: a converted weight is read twice and loses the fast matmul (measured)."""
    exact = drawn(config, jnp.bfloat16)
    logits = partial(logits_of, config, attend=spy([]))

    near = jax.jit(logits, compiler_options=QUICKLY)(exact)
    widened = jax.tree.map(lambda weight: jnp.asarray(np.asarray(weight, np.float32)), exact)
    np.testing.assert_allclose(near, jax.jit(logits, compiler_options=QUICKLY)(widened), rtol=0, atol=0.1)
    assert near.dtype == jnp.float32
    converted = [
        equation.invars[0].aval.shape
        for equation in jax.make_jaxpr(logits)(exact).jaxpr.eqns
        if equation.primitive.name == "convert_element_type" and equation.invars[0].aval.dtype == jnp.bfloat16
    ]
    matrices = {weight.shape for weight in jax.tree.leaves(exact) if weight.ndim == 2}
    assert not matrices & set(converted)


@pytest.mark.parametrize("stacked", [False, True], ids=["unrolled", "stacked"])
def test_no_implicit_promotion(stacked: bool) -> None:
    with jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"):
        for config in (TINY_LLAMA, TINY_GEMMA):
            weights = abstract_weights(config, jnp.bfloat16, stacked)
            out = jax.eval_shape(partial(logits_of, config, attend=spy([])), weights)
            assert (out.shape, out.dtype) == ((6, 61), jnp.float32)


@pytest.mark.parametrize("stacked", [False, True], ids=["unrolled", "stacked"])
def test_donated_cache_is_updated_in_place(stacked: bool) -> None:
    """A cache of 24 MiB goes through all layers with far less than that in temporaries."""
    weights = drawn(TINY_GEMMA, stacked=stacked)

    def attend(layer: LayerInfo, q: Array, k: Array, v: Array, cache: Array) -> tuple[Array, Array]:
        cache = cache.at[layer.index, jnp.arange(6)].set(k)
        return q + cache[layer.index, 3:4].repeat(2, axis=1), cache

    def step(cache: Array) -> tuple[Array, Array]:
        return transformer.forward(TINY_GEMMA, weights, TOKENS, np.arange(6), attend, cache)

    cache = jax.ShapeDtypeStruct((3, 1 << 16, 2, 16), jnp.float32)
    memory = jax.jit(step, donate_argnums=0).lower(cache).compile().memory_analysis()

    assert memory.alias_size_in_bytes == 3 << 23
    assert memory.temp_size_in_bytes < 1 << 20


def test_specs_have_the_shapes_of_the_weights_in_both_forms() -> None:
    for config in (TINY_LLAMA, TINY_GEMMA):
        for stacked in (False, True):
            specs = transformer.param_specs(config, stacked=stacked)
            weights = abstract_weights(config, jnp.float32, stacked)
            shapes = jax.tree.map(lambda spec: spec.shape, specs, is_leaf=_is_spec)
            assert shapes == jax.tree.map(lambda weight: weight.shape, weights)
            assert all(len(spec.shape) == len(spec.axes) for spec in jax.tree.leaves(specs, is_leaf=_is_spec))


def _is_spec(node: object) -> bool:
    return isinstance(node, ParamSpec)
