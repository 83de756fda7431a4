"""Bounds the memory of any loss and any attention: large intermediates are computed in chunks.

    loss = chunk(loss, max_bytes="32MiB")
    value, grads = jax.value_and_grad(loss)(params, batch)
    print(loss.report())

The pass knows no op by name, see `passes.rewrite.chunks`. Chunks are compared with the function first, as what
`passes.rewrite` replaces is, by values and gradients at small sizes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import jax

from hlat_jax.facts.byte_sizes import parse_bytes
from hlat_jax.passes.rewrite import Rewriter, Rewritten, chunks

_Args = ParamSpec("_Args")
_Result = TypeVar("_Result")


def chunk(
    fn: Callable[_Args, _Result], *, max_bytes: int | str = chunks.MAX_BYTES, check: bool = True
) -> Rewritten[_Args, _Result]:
    """Returns a function with the same arguments and results that computes large intermediates in chunks.

    Apply it before `jax.grad` or `jax.jvp`. Each call traces `fn` again: wrap the result, or its caller, in `jax.jit`.
    `report()` says what is computed in chunks, and of what is not, why.

    Args:
      fn: a function that JAX can trace; arguments as for `autocast`.
      max_bytes: "32MiB" or bytes: the size up to which an intermediate is left as it is. Several values of a chunk are
        held at a time, of about so many bytes together.
      check: whether chunks are compared with the function before they are used.

    Raises:
      ValueError: `max_bytes` is no size.
    """
    matcher = functools.partial(chunks.matches, max_bytes=parse_bytes(max_bytes, name="max_bytes"))
    return Rewritten(fn, lambda: Rewriter(jax.default_backend(), check=check, matchers=[matcher]))
