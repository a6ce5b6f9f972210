"""Random and abstract weights."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from jetserve.models import hugging_face
from jetserve.models.random_init import abstract_weights, random_weights

# All matrices are [64, 64]: one shape to compile.
GEMMA = hugging_face.read_config(
    {
        "model_type": "gemma3_text",
        "vocab_size": 64,
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": 16,
        "tie_word_embeddings": False,
    }
)


def test_both_forms_hold_the_same_numbers() -> None:
    unrolled, stacked = (random_weights(GEMMA, jnp.float32, 0, stacked) for stacked in (False, True))

    for name, array in stacked.layers.items():
        np.testing.assert_array_equal(array, np.stack([layer[name] for layer in unrolled.layers]))
    for name, array in stacked.model.items():
        np.testing.assert_array_equal(array, unrolled.model[name])


def test_matrices_are_normal_with_variance_one_over_in_and_norms_neutral() -> None:
    weights = random_weights(GEMMA, jnp.float32, 0, stacked=False)

    down = np.asarray(weights.layers[0]["down_proj"])
    assert abs(down.std() * 8 - 1) < 0.04
    assert abs(down.mean() * 8) < 0.06
    np.testing.assert_array_equal(weights.layers[1]["q_norm"], np.zeros(16, np.float32))
    np.testing.assert_array_equal(weights.model["final_norm"], np.zeros(64, np.float32))


def test_no_two_parameters_and_no_two_seeds_share_numbers() -> None:
    weights = random_weights(GEMMA, jnp.float32, 0, stacked=False)
    other = random_weights(GEMMA, jnp.float32, 1, stacked=False)

    matrices = [leaf for leaf in jax.tree.leaves((weights, other)) if leaf.ndim == 2]
    firsts = [float(matrix[0, 0]) for matrix in matrices]
    assert len(set(firsts)) == len(matrices) == 2 * (2 * 7 + 2)


def test_abstract_weights_have_the_shapes_and_dtypes_of_random_ones() -> None:
    for stacked in (False, True):
        abstract = abstract_weights(GEMMA, jnp.float32, stacked)
        real = random_weights(GEMMA, jnp.float32, 0, stacked)

        assert jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), abstract) == jax.tree.map(
            lambda leaf: (leaf.shape, leaf.dtype), real
        )
