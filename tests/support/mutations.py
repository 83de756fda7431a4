"""Leaves out one collective of a program while it is traced, to see that nothing else makes up for it."""

from __future__ import annotations

import contextlib
import pathlib
import sys
from collections.abc import Iterator
from unittest import mock

import jax
import jax.numpy as jnp

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


@contextlib.contextmanager
def recorded_collectives(*, without: str = "") -> Iterator[dict[str, None]]:
    """Gives the places of the collectives that are traced meanwhile, in order; the one called `without` is left out."""
    seen: dict[str, None] = {}

    def watched(name):
        original = getattr(jax.lax, name)

        def collective(x, axes, *rest, **options):
            place = _call_site(name, x, axes)
            seen[place] = None
            if place == without:
                return _without_communication(name, x, axes, **options)
            return original(x, axes, *rest, **options)

        return mock.patch.object(jax.lax, name, collective)

    with contextlib.ExitStack() as stack:
        for name in ("psum", "pmax", "psum_scatter", "all_gather", "ppermute"):
            stack.enter_context(watched(name))
        yield seen
