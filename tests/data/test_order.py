"""Orders of documents, which are those of Grain, and of the rows of a window."""

import concurrent.futures

import numpy as np
from grain.experimental import index_shuffle
from hypothesis import given
from hypothesis import strategies as st

from hlat_jax.data import order


@given(st.integers(1, 500))
def test_evenly_spread_numbers_are_a_permutation(total):
    assert sorted(order.evenly_spread(total)) == list(range(total))


def test_order_is_the_permutation_of_seed_and_epoch():
    seed = 2**32 - 2
    for num_documents in (1, 9, (1 << 16) + 1):
        made = order.Order(num_documents, seed=seed)
        entries = np.linspace(0, num_documents - 1, 4).astype(int).tolist()
        wanted = [(epoch, entry) for epoch in range(4) for entry in entries]
        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            found = list(pool.map(lambda place, made=made: made.number(*place), wanted))
        for (epoch, entry), number in zip(wanted, found, strict=True):
            expected = index_shuffle(entry, max_index=num_documents - 1, seed=(seed + epoch) % 2**32, rounds=4)
            assert number == expected


def test_algorithm_hash_is_golden_and_changes_with_the_permutation(monkeypatch):
    """Golden: with another permutation, running jobs would lose or repeat text at an upgrade."""
    order.algorithm_hash.cache_clear()
    assert order.algorithm_hash() == "49685eeb"
    monkeypatch.setattr(order.Order, "number", lambda *_: 0)
    order.algorithm_hash.cache_clear()
    assert order.algorithm_hash() != "49685eeb"
    order.algorithm_hash.cache_clear()
