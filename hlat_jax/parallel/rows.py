"""Places the rows of a batch that each process has on devices, in microbatches too, and gathers values of rows."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from hlat_jax.batch import Batch
from hlat_jax.config import Config
from hlat_jax.parallel.sharding import CONTEXT, Layout


def num_microbatches(config: Config, layout: Layout) -> int:
    """Returns the number of microbatches of a step. If `train.num_microbatches` is -1, each row of a replica is one."""
    asked = config.train.num_microbatches
    return replica_rows(config.data.batch_size, layout) if asked == -1 else asked


def replica_rows(num_rows: int, layout: Layout) -> int:
    """Returns the number of rows that each replica has of a batch, with padding, see `pad_rows`."""
    return -(-num_rows // layout.row_degree)


def pad_rows(batch: Batch, layout: Layout, *, num_rows: int) -> Batch:
    """Returns this process's rows of a batch of `num_rows`, from `process_rows`, with the same number on each replica.

    If replicas do not divide the batch, some have one row less, and get a last row of zeros. Its targets have weight
    zero, so that it adds nothing to the loss or to gradients.
    """
    if num_rows % layout.row_degree == 0:
        return batch
    sizes = [len(_rows_of(part, layout, num_rows)) for part in _parts(layout)]
    most = replica_rows(num_rows, layout)

    def pad(field: np.ndarray) -> np.ndarray:
        parts = np.split(field, np.cumsum(sizes)[:-1])
        more = [(0, 0)] * (field.ndim - 1)
        return np.concatenate([np.pad(part, [(0, most - len(part)), *more]) for part in parts])

    return jax.tree.map(pad, batch)


def shard_batch(batch: Batch, layout: Layout) -> Batch:
    """Returns the global batch on devices, from this process's rows (NumPy, [B / num_processes, T]).

    If the sequence is split, the tokens of a row are in the order of `zigzag`.
    """
    sharding, degree = NamedSharding(layout.mesh, layout.batch_spec), layout.size(CONTEXT)

    def place(rows: np.ndarray) -> jax.Array:
        if degree == 1:
            return jax.make_array_from_process_local_data(sharding, rows)
        shape = rows.shape[0] * layout.row_degree // len(_parts(layout)), rows.shape[1]
        return jax.make_array_from_process_local_data(sharding, rows[:, zigzag(rows.shape[1], degree)], shape)

    return jax.tree.map(place, batch)


def zigzag(seq_len: int, degree: int) -> np.ndarray:
    """Returns the positions int64[T] of a row's tokens in the order of C = `degree` devices.

    A row has 2C chunks, and device i has chunks i and 2C - 1 - i. Under a causal mask all devices have the same work.
    """
    chunks = np.arange(seq_len).reshape(2 * degree, -1)
    return chunks[[chunk for i in range(degree) for chunk in (i, 2 * degree - 1 - i)]].reshape(-1)


def microbatches(batch: Any, num_microbatches: int) -> Any:
    """Returns fields [B, ...] as [M, B / M, ...], in which part m has rows m, m + M, m + 2M, ...

    Raises:
      ValueError: M does not divide the number of rows, or a field is a scalar.
    """
    for path, field in jax.tree_util.tree_leaves_with_path(batch):
        if not field.shape or num_microbatches < 1 or field.shape[0] % num_microbatches:
            raise ValueError(
                f"the batch's {jax.tree_util.keystr(path) or 'array'} of shape {field.shape} (on one device) does not "
                f"divide into num_microbatches={num_microbatches}. Make the leading axis of every field a multiple."
            )
    return jax.tree.map(lambda field: field.reshape(-1, num_microbatches, *field.shape[1:]).swapaxes(0, 1), batch)


def shard_microbatches(batch: Batch, layout: Layout, *, num_microbatches: int) -> Iterator[Batch]:
    """Yields global microbatches on devices, from this process's rows as for `shard_batch`.

    On each device they have the same rows as in `microbatches`.
    """
    num_parts = len(_parts(layout))

    def rows_of(field: np.ndarray, index: int) -> np.ndarray:
        rows = field.reshape(num_parts, -1, *field.shape[1:])[:, index::num_microbatches]
        return rows.reshape(-1, *field.shape[1:])

    for index in range(num_microbatches):
        yield shard_batch(jax.tree.map(functools.partial(rows_of, index=index), batch), layout)


def process_rows(layout: Layout, num_rows: int) -> list[int]:
    """Returns the rows of a batch of `num_rows` that this process passes to `pad_rows`, in order."""
    return [row for part in _parts(layout) for row in _rows_of(part, layout, num_rows)]


def gather_rows(values: np.ndarray, rows: Sequence[int], num_rows: int) -> np.ndarray:
    """Returns the values int64[num_rows, n] of all processes, each from int64[len(rows), n] for its `rows`.

    Every process must call it at the same point. The values are exchanged between hosts, without a device.
    """
    if jax.process_count() == 1:
        return values
    from hlat_jax.host.distributed import exchange  # here: a model under a layout needs no coordination service

    whole = np.zeros((num_rows, values.shape[1]), np.int64)
    for message in exchange(json.dumps([list(rows), values.tolist()])):
        their_rows, their_values = json.loads(message)
        whole[their_rows] = their_values
    return whole


def _parts(layout: Layout) -> list[int]:
    """Returns which of the `row_degree` parts of a batch this process has, in order."""
    slices = layout.rows().addressable_devices_indices_map((layout.row_degree,)).values()
    return sorted({part for (parts,) in slices for part in range(*parts.indices(layout.row_degree))})


def _rows_of(part: int, layout: Layout, num_rows: int) -> range:
    """Returns the rows of a part of a batch. Parts differ by at most one row."""
    return range(part * num_rows // layout.row_degree, (part + 1) * num_rows // layout.row_degree)
