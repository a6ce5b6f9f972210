"""The packed vector: what the host writes by name is what the device reads by name."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from jetserve.engine.control import Field, Layout

LAYOUT = Layout(
    {
        "whole": Field((3,), fill=-7),
        "real": Field((2, 2), "float", fill=0.5),
        "flag": Field((4,), "bool", fill=1),
        "single": Field((), fill=9),
    }
)


def read(vector: np.ndarray) -> dict[str, np.ndarray]:
    return {name: np.asarray(array) for name, array in jax.jit(LAYOUT.unpack)(jnp.asarray(vector)).items()}


def test_size_is_the_sum_of_the_fields() -> None:
    assert LAYOUT.size == 3 + 4 + 4 + 1
    assert LAYOUT.blank().shape == (12,)
    assert LAYOUT.blank().dtype == np.int32


def test_blank_reads_as_the_fills() -> None:
    found = read(LAYOUT.blank())
    assert found["whole"].tolist() == [-7, -7, -7]
    assert found["real"].tolist() == [[0.5, 0.5], [0.5, 0.5]]
    assert found["flag"].tolist() == [True] * 4
    assert found["single"].tolist() == 9


def test_every_value_arrives_bit_for_bit() -> None:
    vector = LAYOUT.blank()
    fields = LAYOUT.views(vector)
    whole = np.array([2**31 - 1, -(2**31), 0], np.int32)
    real = np.array([[np.nan, -np.inf], [-0.0, 1e-45]], np.float32)
    fields["whole"][...] = whole
    fields["real"][...] = real
    fields["flag"][...] = [0, 1, -1, 2**30]
    fields["single"][...] = -3

    found = read(vector)

    np.testing.assert_array_equal(found["whole"], whole)
    np.testing.assert_array_equal(found["real"].view(np.int32), real.view(np.int32))
    assert found["flag"].tolist() == [False, True, True, True]
    assert found["single"].tolist() == -3
    assert {name: array.dtype.name for name, array in found.items()} == {
        "whole": "int32",
        "real": "float32",
        "flag": "bool",
        "single": "int32",
    }


def test_blanks_share_nothing() -> None:
    one, other = LAYOUT.blank(), LAYOUT.blank()
    LAYOUT.views(one)["whole"][...] = 1
    assert LAYOUT.views(other)["whole"].tolist() == [-7, -7, -7]
    assert LAYOUT.views(LAYOUT.blank())["whole"].tolist() == [-7, -7, -7]
