"""The choice of a token, against NumPy: which tokens top-k and top-p leave, and how often each is drawn.

Draws are compared by chi-square with 20,000 of them: a right sampler exceeds the bound in one of 10^6 seeds, and the
seeds are fixed. A temperature that is wrong by a tenth exceeds it several times over.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hlat_jax.generate.sampling import Sampling, _allowed, sample

NUM_DRAWS, VOCAB_SIZE = 20_000, 12
LOGITS_V = (1.2 * np.random.default_rng(3).standard_normal(VOCAB_SIZE)).astype(np.float32)
CASES = {
    "temperature": Sampling(1.0),
    "cold": Sampling(0.5),
    "hot": Sampling(2.0),
    "top_k": Sampling(1.5, top_k=4),
    "top_p": Sampling(1.5, top_p=0.8),
    "all": Sampling(1.3, top_k=7, top_p=0.9, seed=5),
}
drawn = jax.jit(sample)


def draw(logits_BV, sampling, numbers=None, places=None):
    num_rows = len(logits_BV)
    numbers = np.arange(num_rows) if numbers is None else np.full(num_rows, numbers)
    places = np.zeros(num_rows, np.int32) if places is None else np.asarray(places)
    return np.asarray(drawn(logits_BV, sampling.arguments(), draws=(numbers.astype(np.int32), places.astype(np.int32))))


def probabilities(sampling):
    """Returns float64 [V]: written from the words of the rule, with a sort."""
    scaled = LOGITS_V.astype(np.float64) / sampling.temperature
    p = np.exp(scaled - scaled.max())
    order = np.argsort(-p)
    p[order[sampling.top_k or VOCAB_SIZE :]] = 0
    p /= p.sum()
    before = np.cumsum(p[order]) - p[order]
    p[order[before >= sampling.top_p]] = 0
    return p / p.sum()


def test_sample_frequencies_match_probabilities():
    for name, sampling in CASES.items():
        expected = NUM_DRAWS * probabilities(sampling)
        counts = np.bincount(draw(np.tile(LOGITS_V, (NUM_DRAWS, 1)), sampling), minlength=VOCAB_SIZE)
        assert counts[expected == 0].sum() == 0
        possible = expected > 0
        chi_square = np.sum((counts[possible] - expected[possible]) ** 2 / expected[possible])
        d = possible.sum() - 1  # its mean; its variance is 2 d
        assert d > 1
        assert chi_square < d + 7 * np.sqrt(2 * d), (name, counts, expected)


def test_samples_are_independent_across_number_position_and_seed():
    logits = np.zeros((1000, 4), np.float32)
    for tokens in (
        draw(logits, Sampling(1.0)),
        draw(logits, Sampling(1.0), numbers=3, places=np.arange(1000)),
        np.array([draw(logits[:1], Sampling(1.0, seed=seed))[0] for seed in range(1000)]),
    ):
        pairs = np.bincount(tokens[:-1] * 4 + tokens[1:], minlength=16)
        assert np.sum((pairs - 999 / 16) ** 2 / (999 / 16)) < 15 + 7 * np.sqrt(30)


def test_greedy_sample_takes_the_first_most_likely_token():
    rng = np.random.default_rng(0)
    logits = rng.standard_normal((200, 1000)).astype(np.float32)
    for sampling in (Sampling(), Sampling(top_k=3, top_p=0.5, seed=8), Sampling(2.0, top_k=1)):
        np.testing.assert_array_equal(draw(logits, sampling), logits.argmax(axis=1))
    equal = rng.integers(-3, 3, (200, 1000)).astype(np.float32)
    np.testing.assert_array_equal(draw(equal, Sampling()), equal.argmax(axis=1))


def test_truncation_is_exact_and_keeps_ties():
    logits = np.float32(-1e4) + np.random.default_rng(1).permutation(512).astype(np.float32)[None] * np.float32(2**-9)
    tokens = draw(np.tile(logits, (500, 1)), Sampling(1e3, top_k=5))
    assert set(tokens) == set(np.argsort(-logits[0])[:5])
    logits = np.tile(np.float32([3, 1, 1, 1, 0]), (2000, 1))
    assert set(draw(logits, Sampling(1.0, top_k=2))) == {0, 1, 2, 3}
    assert set(draw(logits, Sampling(1.0, top_p=0.75))) == {0, 1, 2, 3}  # the first alone has 0.70
    # e^-17 is below half a step of fp32 at 1: the sum of the probabilities does not see the second token
    logits = jnp.float32([[0.0, -17.0]])
    assert _allowed(logits, Sampling(1.0).arguments()).all()
    assert not _allowed(logits, Sampling(1.0, top_p=0.99).arguments()).all()


def test_sampling_refuses_values_outside_their_range():
    for change in ({"temperature": -1.0}, {"temperature": float("nan")}, {"top_k": -1}, {"top_p": 0.0}, {"top_p": 1.5}):
        [(key, value)] = change.items()
        with pytest.raises(ValueError, match=f"{key}={value}"):
            Sampling(**change).arguments()
