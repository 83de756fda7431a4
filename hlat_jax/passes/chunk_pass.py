"""Bounds the memory of a function: large intermediates, such as logits and scores, are computed in chunks.

    loss = chunk(loss, max_bytes="32MiB")
    value, grads = jax.value_and_grad(loss)(params, batch)
    print(loss.report())

The pass knows no op by name, see `passes.rewrite.chunks`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection
from typing import ParamSpec, TypeVar

from hlat_jax.facts.byte_sizes import parse_bytes
from hlat_jax.passes.rewrite import Rewritten, chunks

_Args = ParamSpec("_Args")
_Result = TypeVar("_Result")


def chunk(
    fn: Callable[_Args, _Result],
    *,
    max_bytes: int | str = chunks.MAX_BYTES,
    rules: Collection[str] = (),
    check: bool = True,
) -> Rewritten[_Args, _Result]:
    """Returns a function with the same arguments and results that computes large intermediates in chunks.

    Apply it before `jax.grad` or `jax.jvp`. Each call traces `fn` again, so wrap the result, or its caller, in
    `jax.jit`. `report()` lists the intermediates in chunks, and why others are not.

    Args:
      fn: a function that JAX can trace, with arguments as for `autocast`.
      max_bytes: largest size of an intermediate that is left as it is, "32MiB" or bytes. A chunk and its neighbors
        take about this many bytes together. If a loss ends in one number, no chunk is computed twice. Logits of more
        than 2 MiB are then computed in chunks too, each of at least 128 rows.
      rules: names of functions with a derivative rule that is the derivative of their body for your arguments, such as
        "cross_entropy_with_logits" of MaxText. Chunks reach through them, if random inputs show no difference.
      check: whether chunks are compared with the function before they are used, on this machine's CPU.

    Raises:
      ValueError: `max_bytes` is not a size.
    """
    limit = parse_bytes(max_bytes, name="max_bytes")
    matchers = [functools.partial(matches, max_bytes=limit) for matches in (chunks.losses, chunks.matches)]
    return Rewritten(fn, name="chunk", matchers=matchers, rules=rules, check=check)
