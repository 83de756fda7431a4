"""Times forward and backward pass of every implementation of an op, at the shapes of a run's own calls.

Owns the measurement: what is compiled, and how the clock is read. What is done with the times is in `table`.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hlat_jax.ops import attention, cross_entropy
from hlat_jax.ops.dialect import Op
from hlat_jax.ops.table import Entry, as_json

# (name, *arrays) -> what the implementation gives and its gradients
Both = Callable[..., Any]


def measured(op: Op, facts: Mapping[str, Any], *, platform: str, num_rounds: int, num_rows: int) -> Entry:
    """Returns the median seconds of each implementation that can serve a call on this machine's first device.

    All are compiled and run once; then each round runs every one of them in turn, so that what else the machine does
    falls on all alike.

    Args:
      op: one of `CASES`.
      facts: of the call, see `choices.calls`.
      platform: of the device.
      num_rounds: at least 1.
      num_rows: of the batch that are timed; 0, or more than the call has: all of them.

    Raises:
      ValueError: no implementation can serve the call.
    """
    refusals = op.refusals(platform, facts)
    names = [name for name, why in refusals.items() if not why]
    if not names:
        op.choose("auto", platform, facts=facts)  # says why
    rows, both, arrays = CASES[op.key](facts, num_rows)
    runs = {}
    for name in names:
        runs[name] = jax.jit(functools.partial(both, name)).lower(*arrays).compile()
        jax.block_until_ready(runs[name](*arrays))
    seconds = {name: statistics.median(times) for name, times in interleaved(runs, arrays, num_rounds).items()}
    winner = min(seconds, key=seconds.get)
    passed_over = {name: why for name, why in refusals.items() if why}
    return Entry(op.key, as_json(facts), seconds, winner, passed_over, rows)


def interleaved(runs: Mapping[str, Callable], arrays: tuple, num_rounds: int) -> dict[str, list[float]]:
    """Returns the seconds of every run in every round; each round starts with another one."""
    names, times = list(runs), {name: [] for name in runs}
    for number in range(num_rounds):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            start = time.perf_counter()
            jax.block_until_ready(runs[name](*arrays))
            times[name].append(time.perf_counter() - start)
    return times


def attention_case(facts: Mapping[str, Any], num_rows: int) -> tuple[int, Both, tuple]:
    """Returns (rows, what is timed, its arrays) of a call of attention; documents are a quarter of a row each."""
    b, t, n, h = facts["q_shape"]
    rows = min(num_rows or b, b)
    heads = (n, facts["num_kv_heads"], facts["num_kv_heads"], n)
    q, k, v, dout = (_normal(facts["dtype"], (rows, t, count, h), seed) for seed, count in enumerate(heads))
    ids = jnp.broadcast_to(jnp.arange(t, dtype=jnp.int32) * 4 // t, (rows, t)) if facts["has_segments"] else None

    def both(name, *arrays):
        *operands, dout, ids = arrays

        def forward(q, k, v):
            return attention.attention(
                q, k_BSKH=k, v_BSKH=v, segment_ids_BT=ids, implementation=name, window=facts["window"]
            )

        out, pullback = jax.vjp(forward, *operands)
        return out, pullback(dout)

    return rows, both, (q, k, v, dout, ids)


def cross_entropy_case(facts: Mapping[str, Any], num_rows: int) -> tuple[int, Both, tuple]:
    """Returns (rows, what is timed, its arrays) of a call of the loss."""
    b, t, d = facts["hidden_shape"]
    rows, vocab = min(num_rows or b, b), facts["vocab_rows"]
    hidden, head = _normal(facts["dtype"], (rows, t, d), 0), _normal(facts["dtype"], (vocab, d), 1)
    targets = jnp.asarray(np.random.default_rng(2).integers(0, vocab, (rows, t)), jnp.int32)

    def both(name, *arrays):
        hidden, head, targets, weights = arrays

        def loss(hidden, head):
            options = cross_entropy.LossOptions(name)
            return cross_entropy.cross_entropy(
                hidden, head_VD=head, targets_BT=targets, weights_BT=weights, options=options
            )[0]

        return jax.value_and_grad(loss, argnums=(0, 1))(hidden, head)

    return rows, both, (hidden, head, targets, jnp.ones((rows, t), jnp.float32))


CASES = {attention.OP.key: attention_case, cross_entropy.OP.key: cross_entropy_case}


def _normal(dtype: str, shape: tuple[int, ...], seed: int) -> jax.Array:
    values = np.random.default_rng(seed).standard_normal(shape, np.float32)
    return jnp.asarray(values / shape[-1] ** 0.25, dtype)  # products of two such have a variance of 1
