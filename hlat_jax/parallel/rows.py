"""The rows of a batch that each process has: in microbatches on devices, and values of them gathered."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator, Sequence

import jax
import numpy as np

from hlat_jax.batch import Batch
from hlat_jax.parallel.sharding import Layout, shard_batch


def shard_microbatches(batch: Batch, layout: Layout, *, num_microbatches: int) -> Iterator[Batch]:
    """Yields global microbatches on devices, from this process's rows as for `shard_batch`.

    Their rows are those of `batch.microbatches` on each device.
    """
    parts = layout.rows().addressable_devices_indices_map((layout.row_degree,)).values()
    num_parts = len({str(part) for part in parts})

    def rows_of(field: np.ndarray, number: int) -> np.ndarray:
        rows = field.reshape(num_parts, -1, *field.shape[1:])[:, number::num_microbatches]
        return rows.reshape(-1, *field.shape[1:])

    for number in range(num_microbatches):
        yield shard_batch(jax.tree.map(functools.partial(rows_of, number=number), batch), layout)


def process_rows(layout: Layout, num_rows: int) -> list[int]:
    """Returns the rows of a batch of `num_rows` that this process passes to `shard_batch`, in order."""
    slices = layout.rows().addressable_devices_indices_map((num_rows,)).values()
    return sorted({row for (rows,) in slices for row in range(*rows.indices(num_rows))})


def gather_rows(values: np.ndarray, rows: Sequence[int], num_rows: int) -> np.ndarray:
    """Returns int64[num_rows, n] of all processes from the int64[len(rows), n] of each, whose rows are `rows`.

    Every process calls it at the same point. The values are exchanged between hosts; no device takes part.
    """
    if jax.process_count() == 1:
        return values
    from hlat_jax.host.distributed import exchange  # here: a model under a layout needs no coordination service

    whole = np.zeros((num_rows, values.shape[1]), np.int64)
    for message in exchange(json.dumps([list(rows), values.tolist()])):
        their_rows, their_values = json.loads(message)
        whole[their_rows] = their_values
    return whole
