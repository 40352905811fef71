import keras
import numpy as np

from models.attention import MaskedAttention
from models.layers import MaskedMean, PositionEmbedding, SinusoidalPositions, gelu_tanh


def test_attention_by_hand():
    """Two heads of one dimension: each is a softmax over the tokens of query times key."""
    rng = np.random.default_rng(0)
    query, key, value = rng.normal(size=(3, 1, 4, 2)).astype(np.float32)
    is_token = np.array([[True, True, True, False]])
    actual = MaskedAttention(2, name="attention")(query, key, value, is_token)
    expected = np.zeros((4, 2))
    for head in range(2):
        weights = np.exp(np.outer(query[0, :, head], key[0, :3, head]))
        expected[:, head] = weights @ value[0, :3, head] / weights.sum(axis=1)
    np.testing.assert_allclose(actual[0], expected, rtol=1e-5)


def test_attention_scales_by_the_size_of_a_head():
    """With one head of 4 dimensions, scores are halved."""
    query = np.ones((1, 1, 4), np.float32)
    key = np.array([[[1, 1, 1, 1], [0, 0, 0, 0]]], np.float32)
    weights = MaskedAttention(1, name="attention")(query, key, key, np.array([[True, True]]))
    np.testing.assert_allclose(weights[0, 0, 0], 1 / (1 + np.exp(-2)), rtol=1e-5)


def test_softmax_is_float32_under_mixed_precision():
    """Scores of 1000 and 1001 are one number in bfloat16, whose spacing there is 4."""
    query = np.array([[[1.0]]], np.float32)
    key = np.array([[[8.0], [9.0]]], np.float32)
    layer = MaskedAttention(1, dtype="mixed_bfloat16", name="attention")
    attended = layer(query * 128, key, key, np.array([[True, True]]))
    assert keras.backend.standardize_dtype(attended.dtype) == "bfloat16"
    np.testing.assert_allclose(float(attended[0, 0, 0]), 9.0)


def test_pools_the_tokens():
    inputs = np.array([[[1.0], [3.0], [50.0]], [[4.0], [5.0], [6.0]]], np.float32)
    is_token = np.array([[True, True, False], [False, False, False]])
    np.testing.assert_array_equal(MaskedMean(name="pool")(inputs, is_token), [[2.0], [0.0]])


def test_positions_are_added():
    layer = PositionEmbedding(5, name="positions")
    added = layer(np.ones((2, 3, 4), np.float32)) - 1
    np.testing.assert_allclose(added[1], layer.positions[:3], atol=1e-6)


def test_sinusoidal_positions():
    added = np.array(SinusoidalPositions(name="positions")(np.ones((1, 7, 6), np.float32)))[0] - 6**0.5
    for position in (0, 1, 6):
        for place in range(6):
            angle = position / 10000 ** ((place - place % 2) / 6)
            assert abs(added[position, place] - (np.cos if place % 2 else np.sin)(angle)) < 1e-5


def test_gelu():
    np.testing.assert_allclose(gelu_tanh(np.array([0.0, 1.0, -1.0])), [0.0, 0.841192, -0.158808], atol=1e-5)
