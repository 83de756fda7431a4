"""Vocabulary-parallel embedding lookup."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from hlat_jax.parallel import collectives
from hlat_jax.parallel.collectives import ParallelContext


def lookup(table_VD: jax.Array, tokens_BT: jax.Array, *, ctx: ParallelContext) -> jax.Array:
    """Returns the rows of the embedding table at `tokens_BT` as [B, T, D], sharded as activations between blocks.

    Args:
      table_VD: this device's rows of the table, or all rows without `ctx.vocab`.
      tokens_BT: int32 ids of the whole vocabulary.
      ctx: the devices that hold the other rows. Each looks up its rows, and all but one of the summed terms are zero.

    Source: Shoeybi et al. (Megatron-LM), arXiv 1909.08053, section 3.
    """
    num_rows = table_VD.shape[0]

    def read(rows_BT):
        # clipped explicitly: mode="clip" leaves it to the gather, and on Neuron an out-of-bounds index aborts the run
        return table_VD.at[jnp.clip(rows_BT, 0, num_rows - 1)].get(mode="clip")

    if not ctx.vocab:
        return read(tokens_BT)
    rows_BT = tokens_BT - collectives.axis_index(ctx.vocab) * num_rows
    is_here_BT = (rows_BT >= 0) & (rows_BT < num_rows)
    x_BTD = jnp.where(is_here_BT[..., None], read(rows_BT), 0)
    return collectives.psum(ctx.leave_tensor_region(x_BTD), ctx.pipe)
