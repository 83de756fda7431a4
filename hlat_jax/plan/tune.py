"""Times forward and backward pass of every implementation of an op, at the shapes of a run's calls."""

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
from hlat_jax.ops.dialect import CallSpec, Op
from hlat_jax.ops.table import Measurement, as_json

# (name, *arrays) -> output of the implementation, and gradients
ForwardAndBackward = Callable[..., Any]


def measure(
    op: Op,
    call: CallSpec,
    *,
    platform: str,
    num_rounds: int,
    num_rows: int,
    excluded: Mapping[str, str] | None = None,
) -> Measurement:
    """Returns the median seconds of each implementation that can serve a call, on this machine's first device.

    All are compiled and run once; then each round runs all of them, so that other load on the machine affects them
    alike. With `num_rows` only so many rows of the batch are timed; `excluded` is as for `Op.refusals`.

    Raises:
      ValueError: no implementation can serve the call.
    """
    refusals = op.refusals(platform, call, excluded=excluded)
    names = [name for name, why in refusals.items() if not why]
    if not names:
        op.choose("auto", platform, call=call, excluded=excluded)  # raises with the reasons
    rows, both, arrays = CASES[op.key](call, num_rows)
    runs = {}
    for name in names:
        runs[name] = jax.jit(functools.partial(both, name)).lower(*arrays).compile()
        jax.block_until_ready(runs[name](*arrays))
    seconds = {name: statistics.median(times) for name, times in time_in_turn(runs, arrays, num_rounds).items()}
    winner = min(seconds, key=seconds.get)
    passed_over = {name: why for name, why in refusals.items() if why}
    return Measurement(op.key, as_json(call), seconds, winner, passed_over, rows)


def time_in_turn(runs: Mapping[str, Callable], arrays: tuple, num_rounds: int) -> dict[str, list[float]]:
    """Returns name -> seconds in each round; each round starts with another name."""
    names, times = list(runs), {name: [] for name in runs}
    for number in range(num_rounds):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            start = time.perf_counter()
            jax.block_until_ready(runs[name](*arrays))
            times[name].append(time.perf_counter() - start)
    return times


def attention_case(call: CallSpec, num_rows: int) -> tuple[int, ForwardAndBackward, tuple]:
    b, t, n, h = call["q_shape"]
    rows = min(num_rows or b, b)
    heads = (n, call["num_kv_heads"], call["num_kv_heads"], n)
    q, k, v, dout = (_normal(call["dtype"], (rows, t, count, h), seed) for seed, count in enumerate(heads))
    # each row has four documents
    ids = jnp.broadcast_to(jnp.arange(t, dtype=jnp.int32) * 4 // t, (rows, t)) if call["has_segments"] else None

    def both(name, *arrays):
        *arrays, ids = arrays

        def forward(name, *operands):
            q, k, v = operands
            return attention.attention(
                q, k_BSKH=k, v_BSKH=v, segment_ids_BT=ids, implementation=name, window=call["window"]
            )

        return _with_gradients(forward)(name, *arrays)

    return rows, both, (q, k, v, dout, ids)


def cross_entropy_case(call: CallSpec, num_rows: int) -> tuple[int, ForwardAndBackward, tuple]:
    b, t, d = call["hidden_shape"]
    rows, vocab = min(num_rows or b, b), call["vocab_rows"]
    hidden, head = _normal(call["dtype"], (rows, t, d), 0), _normal(call["dtype"], (vocab, d), 1)
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


def rms_norm_case(call: CallSpec, num_rows: int) -> tuple[int, ForwardAndBackward, tuple]:
    rows, x, dout = _random_like_x(call, num_rows, 2)
    both = _with_gradients(lambda name, x, scale: norm.rms_norm(x, scale=scale, eps=1e-5, implementation=name))
    return rows, both, (x, jnp.ones(x.shape[-1:], x.dtype), dout)


def swiglu_case(call: CallSpec, num_rows: int) -> tuple[int, ForwardAndBackward, tuple]:
    rows, *arrays = _random_like_x(call, num_rows, 3)
    both = _with_gradients(lambda name, gate, up: swiglu.swiglu(gate, up=up, implementation=name))
    return rows, both, tuple(arrays)


def rope_case(call: CallSpec, num_rows: int) -> tuple[int, ForwardAndBackward, tuple]:
    rows, x, dout = _random_like_x(call, num_rows, 2)
    positions_BT = jnp.broadcast_to(jnp.arange(x.shape[1], dtype=jnp.int32), x.shape[:2])
    cos, sin = rope.rope_tables(positions_BT, frequencies=rope.rope_frequencies(x.shape[3], theta=1e4))
    both = _with_gradients(lambda name, x: rope.apply_rope(x, cos=cos, sin=sin, implementation=name))
    return rows, both, (x, dout)


# (call, number of rows to time or 0) -> (rows, timed function, its arrays)
CASES = {
    attention.OP.key: attention_case,
    cross_entropy.OP.key: cross_entropy_case,
    norm.OP.key: rms_norm_case,
    swiglu.OP.key: swiglu_case,
    rope.OP.key: rope_case,
}


def _with_gradients(forward: Callable[..., Any]) -> ForwardAndBackward:
    """Returns (name, *operands, cotangent) -> output of `forward(name, *operands)`, and the operands' gradients."""

    def both(name, *arrays):
        *operands, dout = arrays
        out, pullback = jax.vjp(functools.partial(forward, name), *operands)
        return out, pullback(dout)

    return both


def _random_like_x(call: CallSpec, num_rows: int, count: int) -> tuple:
    """Returns the number of timed rows, and `count` arrays of that many rows, in shape and dtype like the call's x."""
    b, *dims = call["x_shape"]
    rows = min(num_rows or b, b)
    return rows, *(_normal(call["dtype"], (rows, *dims), seed) for seed in range(count))


def _normal(dtype: str, shape: tuple[int, ...], seed: int) -> jax.Array:
    values = np.random.default_rng(seed).standard_normal(shape, np.float32)
    return jnp.asarray(values / shape[-1] ** 0.25, dtype)  # dot products of two such rows have variance 1
