"""Which axis goes where, and how heads and vocabularies are made to fit."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from jetserve.errors import ConfigError
from jetserve.models.spec import Family, ModelConfig, parameter_table
from jetserve.sharding import rules
from jetserve.sharding.mesh import make_mesh
from jetserve.sharding.rules import HeadCounts, padded_vocab, partition, place


def mesh(tensor: int) -> AbstractMesh:
    return AbstractMesh((tensor,), ("tensor",))


@pytest.mark.parametrize(
    ("heads", "kv_heads", "tensor", "loaded"),
    [(8, 2, 1, 2), (8, 2, 2, 2), (8, 2, 4, 4), (8, 2, 8, 8), (9, 3, 3, 3), (9, 3, 9, 9), (4, 1, 4, 4), (4, 4, 2, 4)],
)
def test_kv_heads_are_repeated_until_every_chip_has_one(heads: int, kv_heads: int, tensor: int, loaded: int) -> None:
    assert HeadCounts.on(mesh(tensor), heads=heads, kv_heads=kv_heads, head_dim=8).loaded_kv_heads == loaded


@pytest.mark.parametrize(
    ("heads", "kv_heads", "tensor", "fit"),
    [
        (8, 2, 3, "1, 2, 4, 8"),
        (8, 2, 16, "1, 2, 4, 8"),
        (9, 3, 2, "1, 3, 9"),
        (12, 4, 3, "1, 2, 4, 12"),
        (12, 4, 6, "1, 2, 4, 12"),
        (5, 5, 2, "1, 5"),
    ],
)
def test_heads_that_cannot_be_split_are_refused(heads: int, kv_heads: int, tensor: int, fit: str) -> None:
    with pytest.raises(ConfigError, match=f"mesh.tensor={tensor} cannot split .* use one of {fit}$"):
        HeadCounts.on(mesh(tensor), heads=heads, kv_heads=kv_heads, head_dim=8)


@pytest.mark.parametrize(("vocab", "tensor", "rows"), [(97, 1, 97), (97, 2, 98), (97, 8, 104), (96, 8, 96), (1, 8, 8)])
def test_vocabulary_is_padded_to_a_multiple(vocab: int, tensor: int, rows: int) -> None:
    assert padded_vocab(vocab, mesh(tensor)) == rows


def test_every_parameter_is_split_at_most_once_and_only_norms_are_whole() -> None:
    model = ModelConfig(
        family=Family.GEMMA3,
        vocab_size=10,
        num_layers=1,
        embed_dim=8,
        mlp_dim=8,
        num_heads=2,
        num_kv_heads=1,
        head_dim=4,
        max_position=8,
        rms_norm_eps=1e-6,
        rope_theta=1e4,
        attention_scale=1.0,
        windows=(0,),
        qk_norm=True,
        post_norms=True,
        attention_bias=True,
        mlp_bias=True,
    )
    table = parameter_table(model)
    whole = set()
    for name, spec in {**table.model, **table.layer}.items():
        axes = partition(spec.axes)
        assert len(axes) == len(spec.shape)
        assert list(axes).count(rules.TENSOR) <= 1, name
        if rules.TENSOR not in axes:
            whole.add(name)
    # Biases added after a sum over chips are whole as well.
    assert whole == {name for name in (*table.model, *table.layer) if name.endswith("norm")} | {"o_bias", "down_bias"}


def test_placed_parameter_is_what_was_read() -> None:
    values = np.arange(12, dtype=np.float32).reshape(4, 3)
    placed = place(values, ("heads", "embed"), make_mesh(1), HeadCounts(2, 2, 2))
    np.testing.assert_array_equal(placed, values)
    assert placed.sharding.spec == PartitionSpec("tensor", None)


def test_repeated_heads_stay_whole_and_in_order() -> None:
    """Two heads of two dimensions, each for two chips: 0 0 1 1, so that a chip's query heads meet their own."""
    values = np.arange(4, dtype=np.float32)[:, None] * np.ones((1, 3), np.float32)
    one = Mesh(np.array(jax.devices()[:1]), ("tensor",))
    placed = place(values, ("kv_heads", "embed"), one, HeadCounts(8, 2, 2, repeats=2))
    assert np.asarray(placed)[:, 0].tolist() == [0, 1, 0, 1, 2, 3, 2, 3]


def test_meshes_take_the_first_devices_in_order() -> None:
    assert make_mesh(1).devices.flat[0] == jax.devices()[0]
    with pytest.raises(ConfigError, match=r"mesh\.tensor=4096, but this machine has"):
        make_mesh(4096)
