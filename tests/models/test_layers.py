"""The pieces of a layer against NumPy in float64, and the layer loop."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax import Array
from numpy.typing import NDArray

from jetserve.models import layers

Numbers = dict[str, int | Array]


def drawn(*shape: int, seed: int = 0) -> NDArray[np.float32]:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def test_linear_contracts_the_last_axis_of_both() -> None:
    x, weight, bias = drawn(5, 7), drawn(3, 7, seed=1), drawn(3, seed=2)

    out = layers.linear(jnp.asarray(x), jnp.asarray(weight), jnp.asarray(bias))

    expected = np.einsum("ti,oi->to", x.astype(np.float64), weight.astype(np.float64)) + bias
    np.testing.assert_allclose(out, expected, rtol=0, atol=1e-5)


def test_linear_of_bfloat16_weights_rounds_the_activation_and_accumulates_in_float32() -> None:
    x, weight = drawn(4, 4096), drawn(3, 4096, seed=1).astype(ml_dtypes.bfloat16)

    out = layers.linear(jnp.asarray(x), jnp.asarray(weight))

    rounded = x.astype(ml_dtypes.bfloat16).astype(np.float64)
    assert out.dtype == jnp.float32
    np.testing.assert_allclose(out, rounded @ weight.astype(np.float64).T, rtol=0, atol=2e-3)


def test_float32_products_ask_for_the_highest_precision() -> None:
    """TPUs multiply float32 in bfloat16 unless told otherwise."""
    equation = jax.make_jaxpr(layers.linear)(drawn(2, 4), drawn(3, 4)).jaxpr.eqns[0]

    assert equation.primitive.name == "dot_general"
    assert set(equation.params["precision"]) == {jax.lax.Precision.HIGHEST}


def test_embedding_scale_is_rounded_to_the_embedding_dtype() -> None:
    """sqrt(3072) = 55.4256 is 55.5 in bfloat16, which Gemma was trained with."""
    embedding = np.ones((2, 4))
    tokens = jnp.array([1, 0])

    for dtype, scale in ((jnp.bfloat16, 55.5), (jnp.float32, np.float32(math.sqrt(3072)))):
        rows = layers.embed(tokens, jnp.asarray(embedding, dtype), math.sqrt(3072))
        assert rows.dtype == jnp.float32
        np.testing.assert_array_equal(rows, np.full((2, 4), scale, np.float32))


@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_norm_is_root_mean_square_of_the_last_axis(offset: float) -> None:
    x, weight = drawn(3, 2, 8), drawn(8, seed=1)

    out = layers.norm(jnp.asarray(x), jnp.asarray(weight), eps=1e-2, offset=offset)

    wide = x.astype(np.float64)
    expected = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + 1e-2) * (weight + offset)
    np.testing.assert_allclose(out, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("biased", [False, True])
def test_mlp_gates_the_up_projection(activation: str, biased: bool) -> None:
    x = drawn(3, 4)
    params = {"gate_proj": drawn(6, 4, seed=1), "up_proj": drawn(6, 4, seed=2), "down_proj": drawn(4, 6, seed=3)}
    if biased:
        params |= {"gate_bias": drawn(6, seed=4), "up_bias": drawn(6, seed=5), "down_bias": drawn(4, seed=6)}

    out = jax.jit(layers.mlp, static_argnums=2)(x, params, activation)

    gate = x @ params["gate_proj"].T + params.get("gate_bias", 0)
    up = x @ params["up_proj"].T + params.get("up_bias", 0)
    if activation == "silu":
        gate = gate / (1 + np.exp(-gate))
    else:
        gate = 0.5 * gate * (1 + np.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)))
    expected = (gate * up) @ params["down_proj"].T + params.get("down_bias", 0)
    np.testing.assert_allclose(out, expected, rtol=0, atol=1e-4)


def test_softcap_squashes_and_none_does_nothing() -> None:
    x = jnp.array([-1000.0, -1.0, 0.0, 1.0, 1000.0])

    np.testing.assert_allclose(layers.softcap(x, 30.0), [-30.0, -0.99963, 0.0, 0.99963, 30.0], rtol=1e-5)
    assert layers.softcap(x, None) is x


def test_layer_loop_runs_layers_in_order_in_both_forms() -> None:
    """carry -> carry * a + b does not commute, so the order shows."""
    each = tuple({"a": jnp.float32(a), "b": jnp.float32(b)} for a, b in ((2, 1), (3, -1), (0.5, 4)))
    stacked = {name: jnp.stack([layer[name] for layer in each]) for name in ("a", "b")}
    data: list[Numbers] = [{"add": 10}, {"add": 20}, {"add": 30}]

    def body(params: layers.Params, numbers: Numbers, carry: Array) -> Array:
        return carry * params["a"] + params["b"] + jnp.float32(numbers["add"])

    assert layers.layer_loop(each, data, body, jnp.float32(1)) == (((1 * 2 + 11) * 3 + 19) * 0.5 + 34)
    assert layers.layer_loop(stacked, data, body, jnp.float32(1)) == (((1 * 2 + 11) * 3 + 19) * 0.5 + 34)


def test_stacked_layer_loop_traces_its_body_once_and_is_one_loop() -> None:
    traced: list[Numbers] = []
    data: list[Numbers] = [{"window": 4, "same": 7}, {"window": 0, "same": 7}]

    def body(params: layers.Params, numbers: Numbers, carry: Array) -> Array:
        traced.append(numbers)
        return carry + params["w"]

    def loop(stacked: Array, carry: Array) -> Array:
        return layers.layer_loop({"w": stacked}, data, body, carry)

    names = [e.primitive.name for e in jax.make_jaxpr(loop)(jnp.ones((2, 3)), jnp.zeros(3)).jaxpr.eqns]

    assert len(traced) == 1
    assert traced[0]["same"] == 7
    assert isinstance(traced[0]["window"], jax.core.Tracer)
    assert [name for name in names if name in ("while", "scan")] in (["while"], ["scan"])
