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

from hlat_jax.ops import attention, cross_entropy, norm, rope, swiglu
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
        *arrays, ids = arrays

        def forward(name, *operands):
            q, k, v = operands
            return attention.attention(
                q, k_BSKH=k, v_BSKH=v, segment_ids_BT=ids, implementation=name, window=facts["window"]
            )

        return _with_gradients(forward)(name, *arrays)

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


def rms_norm_case(facts: Mapping[str, Any], num_rows: int) -> tuple[int, Both, tuple]:
    """Returns (rows, what is timed, its arrays) of a call of RMSNorm."""
    rows, x, dout = _like_x(facts, num_rows, 2)

    def forward(name, x, scale):
        return norm.rms_norm(x, scale=scale, eps=1e-5, implementation=name)

    return rows, _with_gradients(forward), (x, jnp.ones(x.shape[-1:], x.dtype), dout)


def swiglu_case(facts: Mapping[str, Any], num_rows: int) -> tuple[int, Both, tuple]:
    """Returns (rows, what is timed, its arrays) of a call of SwiGLU."""
    rows, *arrays = _like_x(facts, num_rows, 3)

    def forward(name, gate, up):
        return swiglu.swiglu(gate, up=up, implementation=name)

    return rows, _with_gradients(forward), tuple(arrays)


def rope_case(facts: Mapping[str, Any], num_rows: int) -> tuple[int, Both, tuple]:
    """Returns (rows, what is timed, its arrays) of a call of RoPE, its tables at hand."""
    rows, x, dout = _like_x(facts, num_rows, 2)
    places_BT = jnp.broadcast_to(jnp.arange(x.shape[1], dtype=jnp.int32), x.shape[:2])
    tables = rope.rope_tables(places_BT, frequencies=rope.rope_frequencies(x.shape[3], theta=1e4))

    def both(name, *arrays):
        x, dout, cos, sin = arrays

        def forward(name, x):
            return rope.apply_rope(x, cos=cos, sin=sin, implementation=name)

        return _with_gradients(forward)(name, x, dout)

    return rows, both, (x, dout, *tables)


CASES = {
    attention.OP.key: attention_case,
    cross_entropy.OP.key: cross_entropy_case,
    norm.OP.key: rms_norm_case,
    swiglu.OP.key: swiglu_case,
    rope.OP.key: rope_case,
}


def _with_gradients(forward: Callable[..., Any]) -> Both:
    """Returns (name, *operands, cotangent) -> what `forward(name, *operands)` gives, and the operands' gradients."""

    def both(name, *arrays):
        *operands, dout = arrays
        out, pullback = jax.vjp(functools.partial(forward, name), *operands)
        return out, pullback(dout)

    return both


def _like_x(facts: Mapping[str, Any], num_rows: int, count: int) -> tuple:
    """Returns the rows that are timed, and so many arrays of them in the shape and dtype of a call's x."""
    b, *dims = facts["x_shape"]
    rows = min(num_rows or b, b)
    return rows, *(_normal(facts["dtype"], (rows, *dims), seed) for seed in range(count))


def _normal(dtype: str, shape: tuple[int, ...], seed: int) -> jax.Array:
    values = np.random.default_rng(seed).standard_normal(shape, np.float32)
    return jnp.asarray(values / shape[-1] ** 0.25, dtype)  # products of two such have a variance of 1
