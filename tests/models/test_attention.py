"""Each kind of attention beside the formula in numpy, and what may not depend on what."""

import numpy as np
import pytest

from models.attention import (
    MASKED_SCORE,
    LinearAttention,
    LocalAttention,
    MaskedAttention,
    RelativePositionBias,
    block_offsets,
    rotate,
)

BATCH, LENGTH, DIM, HEADS = 2, 11, 8, 2
RNG = np.random.default_rng(0)
QUERY, KEY, VALUE = RNG.normal(size=(3, BATCH, LENGTH, DIM)).astype(np.float32)
IS_TOKEN = np.arange(LENGTH) < np.array([[11], [7]])
KINDS = {
    "full": lambda **settings: MaskedAttention(HEADS, **settings),
    "local": lambda **settings: LocalAttention(HEADS, 3, **settings),
    "linear": lambda **settings: LinearAttention(HEADS, **settings),
}


def heads_of(x):
    return x.reshape(BATCH, LENGTH, HEADS, DIM // HEADS).transpose(0, 2, 1, 3)


def joined(x):
    return x.transpose(0, 2, 1, 3).reshape(BATCH, LENGTH, DIM)


def by_scores(allowed, bias=0.0, turn=lambda x: x):
    """Softmax attention where `allowed` `(batch, query, key)` is true."""
    scores = turn(heads_of(QUERY)) @ turn(heads_of(KEY)).transpose(0, 1, 3, 2) / (DIM // HEADS) ** 0.5 + bias
    weights = np.where(allowed[:, None], np.exp(scores), 0)
    return joined(weights / np.maximum(weights.sum(-1, keepdims=True), 1e-30) @ heads_of(VALUE))


def turned(x):
    """Number i and number i + 2 of a head, as a complex number, times e^(i position rate)."""
    rates = 10000.0 ** -(np.arange(2) / 2)
    z = (x[..., :2] + 1j * x[..., 2:]) * np.exp(1j * np.arange(x.shape[2])[:, None] * rates)
    return np.concatenate([z.real, z.imag], axis=-1)


TOKENS = np.broadcast_to(IS_TOKEN[:, None, :], (BATCH, LENGTH, LENGTH))
PLACES = np.arange(LENGTH)
NEAR = np.abs(PLACES[None, :] - PLACES[:, None]) <= 3
PAST = PLACES[None, :] <= PLACES[:, None]


@pytest.mark.parametrize(
    ("kind", "settings", "allowed"),
    [
        ("full", {}, TOKENS),
        ("full", {"causal": True}, TOKENS & PAST),
        ("local", {}, TOKENS & NEAR),
        ("local", {"causal": True}, TOKENS & NEAR & PAST),
    ],
    ids=["full", "full_causal", "local", "local_causal"],
)
@pytest.mark.parametrize("rotary", [False, True])
def test_softmax_attention_is_the_formula(kind, settings, allowed, rotary):
    layer = KINDS[kind](**settings, rotary=rotary)
    found = np.array(layer(QUERY, KEY, VALUE, IS_TOKEN))
    expected = by_scores(allowed, turn=turned if rotary else lambda x: x)
    np.testing.assert_allclose(found[IS_TOKEN], expected[IS_TOKEN], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("rotary", [False, True])
def test_linear_attention_equals_its_quadratic_form(causal, rotary):
    """Weights phi(q) phi(k) with phi(x) = elu(x) + 1, divided by their sum; turned only above the line."""
    phi = [np.where(x > 0, x + 1, np.exp(np.minimum(x, 0))) for x in (heads_of(QUERY), heads_of(KEY))]
    allowed = (TOKENS & PAST if causal else TOKENS)[:, None]
    weights = np.where(allowed, phi[0] @ phi[1].transpose(0, 1, 3, 2), 0)
    above = np.where(allowed, turned(phi[0]) @ turned(phi[1]).transpose(0, 1, 3, 2), 0) if rotary else weights
    expected = joined(above / weights.sum(-1, keepdims=True) @ heads_of(VALUE))
    found = LinearAttention(HEADS, causal=causal, rotary=rotary)(QUERY, KEY, VALUE, IS_TOKEN)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_without_a_mask_all_are_tokens(kind):
    layer = KINDS[kind]()
    everywhere = np.ones((BATCH, LENGTH), bool)
    np.testing.assert_allclose(layer(QUERY, KEY, VALUE), layer(QUERY, KEY, VALUE, everywhere), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_a_mask_hides_exactly_what_it_should(kind):
    """Padding of another content changes nothing; a token of another content changes something."""
    layer = KINDS[kind]()
    before = np.array(layer(QUERY, KEY, VALUE, IS_TOKEN))[IS_TOKEN]
    other = np.where(IS_TOKEN[:, :, None], 0, 5).astype(np.float32)
    np.testing.assert_array_equal(np.array(layer(QUERY, KEY + other, VALUE + other, IS_TOKEN))[IS_TOKEN], before)
    other = (PLACES[:, None] == 4).astype(np.float32)
    assert np.abs(np.array(layer(QUERY, KEY, VALUE + other, IS_TOKEN))[IS_TOKEN] - before).max() > 1e-3


@pytest.mark.parametrize("kind", KINDS)
def test_causal_attention_does_not_see_ahead(kind):
    layer = KINDS[kind](causal=True)
    later = (PLACES[:, None] >= 6).astype(np.float32)
    before, after = (np.array(layer(QUERY, KEY + shift, VALUE + shift)) for shift in (0, later))
    np.testing.assert_allclose(after[:, :6], before[:, :6], rtol=1e-5, atol=1e-6)
    assert np.abs(after[:, 6:] - before[:, 6:]).max() > 1e-3


@pytest.mark.parametrize("rotary", [False, True])
@pytest.mark.parametrize("kind", ["full", "local"])
def test_packed_sequences_do_not_see_each_other(kind, rotary):
    """Three sequences in one row answer as they do each in a row of its own."""
    layer = KINDS[kind](rotary=rotary)
    numbers = np.array([[1] * 4 + [2] * 3 + [3] * 2 + [0] * 2] * BATCH)
    packed = np.array(layer(QUERY, KEY, VALUE, numbers))
    for number in (1, 2, 3):
        part = numbers[0] == number
        alone = layer(QUERY[:, part], KEY[:, part], VALUE[:, part])
        np.testing.assert_allclose(packed[:, part], alone, rtol=1e-4, atol=1e-5)


def test_a_sequence_of_one_attends_to_itself():
    found = LocalAttention(HEADS, 3)(QUERY[:, :1], KEY[:, :1], VALUE[:, :1])
    np.testing.assert_allclose(found, VALUE[:, :1], rtol=1e-5)


@pytest.mark.parametrize("length", [2, 3, 6, 7])
def test_local_attention_takes_any_length(length):
    q, k, v = (x[:, :length] for x in (QUERY, KEY, VALUE))
    found = LocalAttention(HEADS, 3)(q, k, v)
    band = np.where(NEAR[:length, :length], 0, MASKED_SCORE)[None, None]
    np.testing.assert_allclose(found, MaskedAttention(HEADS)(q, k, v, None, band), rtol=1e-4, atol=1e-5)


def test_rotary_products_depend_on_the_difference_of_positions():
    x = np.broadcast_to(RNG.normal(size=(1, 1, 1, 6)), (1, 1, 9, 6)).astype(np.float32)
    y = np.broadcast_to(RNG.normal(size=(1, 1, 1, 6)), (1, 1, 9, 6)).astype(np.float32)
    products = np.array(rotate(x))[0, 0] @ np.array(rotate(y))[0, 0].T
    for offset in range(-8, 9):
        diagonal = np.diagonal(products, offset)
        np.testing.assert_allclose(diagonal, diagonal[0], rtol=1e-4, atol=1e-5)
    assert np.ptp(products) > 0.1


@pytest.mark.parametrize(
    ("offset", "bucket"),
    [
        *[
            (0, 0),
            (-1, 1),
            (-7, 7),
            (-8, 8),
            (-11, 8),
            (-12, 9),
            (-17, 10),
            (-33, 12),
            (-65, 14),
            (-127, 15),
            (-9999, 15),
        ],
        *[(1, 17), (7, 23), (12, 25), (9999, 31)],
    ],
)
def test_buckets_of_relative_positions(offset, bucket):
    """Of 32 buckets up to a distance of 128: T5's defaults, by hand: 8 + floor(8 log(d / 8) / log(128 / 8))."""
    assert int(RelativePositionBias(1)._buckets(np.array(offset))) == bucket


def test_relative_positions_are_added_to_the_scores():
    layer = RelativePositionBias(HEADS, num_buckets=8, max_distance=6)
    layer.build(QUERY.shape)
    layer.table.assign(RNG.normal(size=(8, HEADS)))
    bias = np.array(layer(QUERY))
    assert bias.shape == (1, HEADS, LENGTH, LENGTH)
    np.testing.assert_array_equal(bias[0, :, 5, 4], np.array(layer.table)[1])
    np.testing.assert_array_equal(bias[0, :, 4, 5], np.array(layer.table)[5])
    found = np.array(MaskedAttention(HEADS)(QUERY, KEY, VALUE, IS_TOKEN, bias))
    np.testing.assert_allclose(found, by_scores(TOKENS, bias), rtol=1e-4, atol=1e-5)
    near = RelativePositionBias(HEADS, 3, num_buckets=8, max_distance=6)
    near.build(QUERY.shape)
    near.table.assign(layer.table)
    local = np.array(LocalAttention(HEADS, 3)(QUERY, KEY, VALUE, IS_TOKEN, near(QUERY)))
    np.testing.assert_allclose(local[IS_TOKEN], by_scores(TOKENS & NEAR, bias)[IS_TOKEN], rtol=1e-4, atol=1e-5)


def test_offsets_of_a_block():
    assert block_offsets(2).tolist() == [[-2, -1, 0, 1, 2, 3], [-3, -2, -1, 0, 1, 2]]
