"""Leaves out one collective of a program at a time, to see that nothing else makes up for it."""

from __future__ import annotations

import contextlib
import functools
import pathlib
import sys
from collections.abc import Callable
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

_PACKAGE = str(pathlib.Path(__file__).resolve().parents[2] / "hlat_jax")


def _own_part(x, axes, dim, total):
    size = x.shape[dim] // total
    return jax.lax.dynamic_slice_in_dim(x, jax.lax.axis_index(axes) * size, size, dim)


def _without_communication(name, x, axes, **options):
    """Returns what a device has when the others say nothing, in the shape of the collective's result."""
    total = jax.lax.axis_size(axes)
    if name == "psum_scatter":
        return _own_part(x, axes, options["scatter_dimension"], total)
    if name == "all_gather":
        return jnp.concatenate([x] * total, axis=options["axis"])
    return x


def _call_site(name, x, axes):
    """Returns what distinguishes one collective of the source from another: its kind, axes, shape and callers."""
    frames, frame = [], sys._getframe(2)
    while frame is not None:
        if frame.f_code.co_filename.startswith(_PACKAGE):
            frames.append(f"{pathlib.Path(frame.f_code.co_filename).stem}.{frame.f_code.co_qualname.split('.')[-1]}")
        frame = frame.f_back
    shapes = "+".join(str(leaf.shape) for leaf in jax.tree.leaves(x))
    return f"{name} over {axes} of {shapes} in {' < '.join(frames[:6])}"


def traced_with_switches(fn: Callable[..., Any], *args: Any) -> tuple[Any, list[str], np.ndarray]:
    """Returns the trace of fn(*args), the places of its collectives, in order, and a switch for each, all True.

    While the switch of a place is False, its collectives move nothing between devices: one program, compiled once, runs
    with any of them left out. The operations of place i are traced in the scope `scope(i)`.
    """
    seen: dict[str, int] = {}
    is_on = np.ones(200, bool)

    def switched(name):
        original = getattr(jax.lax, name)

        def collective(x, axes, *rest, **options):
            index = seen.setdefault(_call_site(name, x, axes), len(seen))
            with jax.named_scope(scope(index)):
                # read when the program runs; a traced switch would have to get through every loop and checkpoint
                now = jax.pure_callback(lambda: is_on[index], jax.ShapeDtypeStruct((), bool))
                whole = original(x, axes, *rest, **options)
                alone = _without_communication(name, x, axes, **options)
                return jax.tree.map(functools.partial(jax.lax.select, now), whole, alone)

        return mock.patch.object(jax.lax, name, collective)

    jax.clear_caches()  # of functions that were traced without switches, and then of those with switches
    with contextlib.ExitStack() as stack:
        for name in ("psum", "pmax", "psum_scatter", "all_gather", "ppermute"):
            stack.enter_context(switched(name))
        traced = jax.jit(fn).trace(*args)
    jax.clear_caches()
    return traced, list(seen), is_on[: len(seen)]


def scope(index: int) -> str:
    """Returns the name of the scope of a place, which is part of no other."""
    return f"place_{index}_"
