"""Counts the rows of a batch of any structure, makes their random keys, and checks that they divide into parts."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def row_keys(seed: jax.Array, step: jax.Array, num_rows: int) -> jax.Array:
    """Returns a random key for each row of a batch, from (seed, step, index of the row in the batch over all devices).

    The generator is named, because a function that is mapped over keys of `rbg` only draws from the first key.
    """
    key = jax.random.fold_in(jax.random.key(seed, impl="threefry2x32"), step)
    return jax.vmap(functools.partial(jax.random.fold_in, key))(jnp.arange(num_rows, dtype=jnp.uint32))


def check_divides(batch: Any, *, num_devices: int, num_microbatches: int) -> None:
    """Raises ValueError for a batch with rows that do not divide over the devices and into the microbatches.

    If there are several parts, its fields must have the same number of rows.
    """
    multiple = num_devices * num_microbatches
    if multiple == 1:
        return
    split = [f"over {num_devices} devices"] * (num_devices > 1)
    split += [f"into num_microbatches={num_microbatches}"] * (num_microbatches > 1)
    shapes = {_name(path): jnp.shape(field) for path, field in jax.tree_util.tree_leaves_with_path(batch)}
    sizes = {shape[0]: name for name, shape in shapes.items() if shape}
    if len(sizes) > 1:
        (size, name), (other_size, other_name) = list(sizes.items())[:2]
        raise ValueError(
            f"the batch's {name} has {size} rows and its {other_name} has {other_size}, so it cannot be divided "
            f"{' and '.join(split)}. Pad each graph to one size, stack the graphs, and map the loss over them with "
            "jax.vmap, or use one device and no microbatches."
        )
    for name, shape in shapes.items():
        if not shape or shape[0] % multiple:
            below = shape[0] // multiple * multiple if shape else 0
            counts = f"{below} or {below + multiple}" if below else multiple
            raise ValueError(
                f"the batch's {name} of shape {shape} does not divide {' and '.join(split)}. Make the leading "
                f"axis of every field a multiple of {multiple}, such as {counts}."
            )


def check_fields(batch: Any) -> None:
    """Raises ValueError for a field of a batch that JAX cannot take, such as strings."""
    for path, field in jax.tree_util.tree_leaves_with_path(batch):
        dtype = getattr(field, "dtype", None)
        is_number = isinstance(field, (bool, int, float, complex)) or hasattr(field, "__jax_array__")
        kinds = (np.number, np.bool_, jax.dtypes.extended)
        if not is_number and (dtype is None or not any(jnp.issubdtype(dtype, kind) for kind in kinds)):
            kind = f"a {type(field).__name__}" if dtype is None else f"an array of {dtype}"
            raise ValueError(
                f"the batch's {_name(path)} is {kind}, but a step takes arrays of numbers. Make numbers of it before "
                "the step, such as token ids, or bind it to the loss function with functools.partial."
            )


def num_rows(batch: Any) -> int:
    """Returns the number of rows of a batch.

    Raises:
      ValueError: the fields of the batch differ in their number of rows.
    """
    fields = jax.tree_util.tree_leaves_with_path(batch)
    sizes = {_name(path): jnp.shape(field)[:1] for path, field in fields}
    if len(set(sizes.values())) != 1 or () in sizes.values():
        rows_by_field = ", ".join(f"{name} has {size[0] if size else 'no rows'}" for name, size in sizes.items())
        raise ValueError(f"loss_fn takes a key for each row, and the batch's fields differ in rows: {rows_by_field}.")
    return next(iter(sizes.values()))[0]


def _name(path: Any) -> str:
    return jax.tree_util.keystr(path) or "array"
