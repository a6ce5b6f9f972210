"""Rope tables against transformers' frequencies and against formulas written once more in NumPy (R98 to R100)."""

from __future__ import annotations

import math
from types import ModuleType

import jax.numpy as jnp
import numpy as np
import pytest
from numpy.typing import NDArray

from jetserve.errors import CheckpointError
from jetserve.models import hugging_face, rope
from jetserve.models.spec import ModelConfig

LLAMA: dict[str, object] = {
    "model_type": "llama",
    "vocab_size": 61,
    "hidden_size": 256,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 4096,
    "rope_theta": 500000.0,
}
LLAMA3 = {
    "factor": 16.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 1024,
}
YARN = {"factor": 4.0, "original_max_position_embeddings": 1024}
POSITIONS = np.array([0, 1, 2, 500, 4095, 4096, 8191, 131071], np.int32)


def config_of(**changes: object) -> ModelConfig:
    return hugging_face.read_config(LLAMA | changes)


def tables(
    config: ModelConfig, positions: NDArray[np.int32] = POSITIONS, *, local: bool = False
) -> NDArray[np.float32]:
    """cos and sin, [2, T, R/2]."""
    return np.stack([np.asarray(table) for table in rope.rotation(config, jnp.asarray(positions), local=local)])


def expected_tables(
    frequencies: list[float], factor: float = 1.0, positions: NDArray[np.int32] = POSITIONS
) -> NDArray[np.float64]:
    """The same, from frequencies: angles rounded to float32 as everybody's are, cosines in float64."""
    angles = (positions.astype(np.float32)[:, None] * np.array(frequencies, np.float32)[None]).astype(np.float64)
    return factor * np.stack([np.cos(angles), np.sin(angles)])


def plain(theta: float, dim: int) -> list[float]:
    return [1.0 / theta ** (2 * pair / dim) for pair in range(dim // 2)]


def llama3(theta: float, dim: int, settings: dict[str, float]) -> list[float]:
    """By wavelength, the way the model's authors wrote it."""
    low = settings["original_max_position_embeddings"] / settings["low_freq_factor"]
    high = settings["original_max_position_embeddings"] / settings["high_freq_factor"]
    out = []
    for frequency in plain(theta, dim):
        wavelength = 2 * math.pi / frequency
        if wavelength < high:
            out.append(frequency)
        elif wavelength > low:
            out.append(frequency / settings["factor"])
        else:
            smooth = (settings["original_max_position_embeddings"] / wavelength - settings["low_freq_factor"]) / (
                settings["high_freq_factor"] - settings["low_freq_factor"]
            )
            out.append((1 - smooth) * frequency / settings["factor"] + smooth * frequency)
    return out


def yarn(theta: float, dim: int, factor: float, original: int, fast: float = 32, slow: float = 1) -> list[float]:
    """NTK-by-parts: a pair between `fast` and `slow` turns within the original length is blended."""
    first = math.floor(dim * math.log(original / (fast * 2 * math.pi)) / (2 * math.log(theta)))
    last = math.ceil(dim * math.log(original / (slow * 2 * math.pi)) / (2 * math.log(theta)))
    out = []
    for pair, frequency in enumerate(plain(theta, dim)):
        if pair <= first:
            out.append(frequency)
        elif pair >= last:
            out.append(frequency / factor)
        else:
            share = (pair - first) / (last - first)
            out.append(frequency * (1 - share) + frequency / factor * share)
    return out


@pytest.mark.parametrize("key", ["type", "rope_type"])
@pytest.mark.parametrize("place", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize(
    ("kind", "settings", "frequencies", "factor"),
    [
        ("default", {}, plain(500000.0, 64), 1.0),
        ("linear", {"factor": 4.0}, [frequency / 4 for frequency in plain(500000.0, 64)], 1.0),
        ("llama3", LLAMA3, llama3(500000.0, 64, LLAMA3), 1.0),
        ("yarn", YARN, yarn(500000.0, 64, 4.0, 1024), 0.1 * math.log(4) + 1),
    ],
)
def test_tables_follow_the_kind_however_its_keys_are_spelled(
    key: str, place: str, kind: str, settings: dict[str, object], frequencies: list[float], factor: float
) -> None:
    config = config_of(**{place: {key: kind} | settings})

    np.testing.assert_allclose(
        rope.inverse_frequencies(500000.0, 64, config.rope_scaling), frequencies, rtol=2e-7, atol=0
    )
    # One unit in the last place of a frequency is 4e-3 radians at position 131071.
    near = POSITIONS < 5000
    expected = expected_tables(frequencies, factor)
    np.testing.assert_allclose(tables(config)[:, near], expected[:, near], rtol=0, atol=3e-4)
    np.testing.assert_allclose(tables(config), expected, rtol=0, atol=1e-2)


@pytest.mark.parametrize("scaling", [None, {"rope_type": "default"}, {"type": "default"}, {}])
def test_no_scaling_and_default_are_plain_rope(scaling: dict[str, object] | None) -> None:
    config = config_of(rope_scaling=scaling)

    assert config.rope_scaling is None
    assert config.max_position == 4096
    np.testing.assert_allclose(tables(config), tables(config_of()), rtol=0, atol=0)


def test_cosines_are_exact_at_large_angles() -> None:
    config = config_of(rope_theta=10000.0)
    frequencies = rope.inverse_frequencies(10000.0, 64, None)

    np.testing.assert_allclose(tables(config), expected_tables(list(frequencies)), rtol=0, atol=1e-6)


def test_frequencies_equal_transformers_for_published_settings(
    tiny: ModuleType, golden_ropes: dict[str, NDArray[np.float32]]
) -> None:
    for name, settings in tiny.ROPES.items():
        config = hugging_face.read_config(settings)
        dim = config.rotary_dim or config.head_dim

        frequencies = rope.inverse_frequencies(config.rope_theta, dim, config.rope_scaling)

        np.testing.assert_allclose(frequencies, golden_ropes[f"{name}/frequencies"], rtol=1e-6, atol=0, err_msg=name)
        assert rope.attention_factor(config.rope_scaling) == pytest.approx(float(golden_ropes[f"{name}/factor"])), name


def test_llama3_factor_16_slows_the_slowest_pair_16_times() -> None:
    scaled = rope.inverse_frequencies(
        500000.0, 64, config_of(rope_scaling={"rope_type": "llama3"} | LLAMA3).rope_scaling
    )
    unscaled = rope.inverse_frequencies(500000.0, 64, None)

    assert scaled[-1] == pytest.approx(unscaled[-1] / 16, rel=1e-6)
    assert scaled[0] == unscaled[0]


def test_dynamic_is_plain_within_the_original_length() -> None:
    config = config_of(rope_scaling={"type": "dynamic", "factor": 2.0})
    inside = np.arange(4096, dtype=np.int32)

    np.testing.assert_array_equal(tables(config, inside), tables(config_of(), inside))


@pytest.mark.parametrize("position", [4096, 5000, 8191])
def test_dynamic_grows_the_base_with_the_position(position: int) -> None:
    config = config_of(rope_scaling={"type": "dynamic", "factor": 2.0})
    stretch = 2.0 * (position + 1) / 4096 - 1.0
    base = 500000.0 * stretch ** (64 / 62)

    positions = np.array([position], np.int32)
    actual = tables(config, positions)

    np.testing.assert_allclose(actual, expected_tables(plain(base, 64), positions=positions), rtol=0, atol=3e-3)


def test_dynamic_rotation_of_a_position_does_not_depend_on_its_neighbours() -> None:
    config = config_of(rope_scaling={"type": "dynamic", "factor": 2.0})

    together, alone = tables(config), tables(config, POSITIONS[3:4])

    np.testing.assert_array_equal(together[:, 3:4], alone)


def test_yarn_attention_factor_from_config_and_from_mscale() -> None:
    explicit = config_of(rope_scaling={"rope_type": "yarn", "attention_factor": 0.7} | YARN)
    mscale = config_of(rope_scaling={"rope_type": "yarn", "mscale": 2.0, "mscale_all_dim": 1.0} | YARN)

    assert rope.attention_factor(explicit.rope_scaling) == 0.7
    assert rope.attention_factor(mscale.rope_scaling) == pytest.approx(
        (0.2 * math.log(4) + 1) / (0.1 * math.log(4) + 1)
    )


def test_yarn_without_factor_takes_the_ratio_of_the_lengths() -> None:
    config = config_of(rope_scaling={"rope_type": "yarn", "original_max_position_embeddings": 512})

    assert config.rope_scaling is not None
    assert config.rope_scaling.factor == 8.0


@pytest.mark.parametrize(
    ("scaling", "length"),
    [
        ({"type": "linear", "factor": 4.0}, 16384),
        ({"type": "dynamic", "factor": 2.0}, 8192),
        ({"type": "yarn", "factor": 16.0, "original_max_position_embeddings": 1024}, 16384),
        ({"type": "yarn", "factor": 2.0}, 8192),
        ({"type": "llama3"} | LLAMA3, 4096),
    ],
)
def test_context_length_follows_the_factor(scaling: dict[str, object], length: int) -> None:
    """llama3 configs state the stretched length themselves (Llama 3.2: 131072 with factor 32 over 8192)."""
    assert config_of(rope_scaling=scaling).max_position == length


@pytest.mark.parametrize(
    ("scaling", "says"),
    [
        ({"rope_type": "longrope", "factor": 4.0}, "rope type 'longrope' is not supported"),
        ({"type": "mrope"}, "rope type 'mrope' is not supported"),
        ({"type": "linear"}, "has no factor"),
        ({"type": "linear", "scale": 4.0}, "has no factor"),
        ({"type": "linear", "factor": "4"}, "factor is '4'; a number above 0 is needed"),
        ({"type": "linear", "factor": 0.5}, "rope factor is 0.5; at least 1 is needed"),
        ({"type": "llama3", "factor": 8.0}, "has no low_freq_factor"),
        ({"type": "llama3", "factor": 8.0, "low_freq_factor": 4, "high_freq_factor": 4}, "must exceed low_freq_factor"),
        ([4.0], "rope_scaling is [4.0]; a mapping is needed"),
    ],
)
def test_scaling_that_is_not_understood_is_an_error(scaling: object, says: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        config_of(rope_scaling=scaling)

    assert says in str(caught.value)


@pytest.mark.parametrize(("part", "dim"), [(0.25, 16), (0.5, 32)])
@pytest.mark.parametrize("place", ["config", "rope_parameters"])
def test_partial_rotary_turns_only_the_stated_part(part: float, dim: int, place: str) -> None:
    """With the theta of config.json, and frequencies of the rotating part alone."""
    if place == "config":
        config = config_of(rope_theta=123456.0, partial_rotary_factor=part)
    else:
        config = config_of(
            rope_theta=None,
            rope_parameters={"rope_type": "default", "rope_theta": 123456.0, "partial_rotary_factor": part},
        )
    x = np.random.default_rng(0).normal(size=(3, 2, 64)).astype(np.float32)
    positions = np.array([0, 7, 1000], np.int32)

    turned = np.asarray(rope.rotate(jnp.asarray(x), rope.rotation(config, jnp.asarray(positions), local=False)))

    assert config.rotary_dim == dim
    np.testing.assert_array_equal(turned[..., dim:], x[..., dim:])
    expected = x.copy()
    for row, position in enumerate(positions):
        for pair in range(dim // 2):
            angle = position * 123456.0 ** (-2 * pair / dim)
            # As complex numbers: dimension i is real, i + dim/2 imaginary.
            spin = complex(math.cos(angle), math.sin(angle))
            for head in range(2):
                z = complex(x[row, head, pair], x[row, head, pair + dim // 2]) * spin
                expected[row, head, pair], expected[row, head, pair + dim // 2] = z.real, z.imag
    np.testing.assert_allclose(turned, expected, rtol=0, atol=2e-4)


@pytest.mark.parametrize("part", [0.01, 0.05, 1.5])
def test_partial_rotary_that_leaves_no_pairs_is_an_error(part: float) -> None:
    with pytest.raises(CheckpointError, match="partial_rotary_factor"):
        config_of(partial_rotary_factor=part)


def test_local_layers_have_their_own_base_and_no_scaling() -> None:
    config = hugging_face.read_config(
        {"model_type": "gemma3_text", "head_dim": 64, "rope_scaling": {"rope_type": "linear", "factor": 8.0}}
    )
    near = POSITIONS[:5]

    np.testing.assert_allclose(
        tables(config, near, local=True), expected_tables(plain(10000.0, 64), positions=near), rtol=0, atol=3e-4
    )
    np.testing.assert_allclose(
        tables(config, near),
        expected_tables([frequency / 8 for frequency in plain(1000000.0, 64)], positions=near),
        rtol=0,
        atol=3e-4,
    )
