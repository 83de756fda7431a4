"""The lookup of token vectors. Owns how a table that is split over devices is read; the table belongs to the model."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from hlat_jax.parallel.collectives import Shards, position, summed


def lookup(table_VD: jax.Array, tokens_BT: jax.Array, *, shards: Shards) -> jax.Array:
    """Returns the rows of a table at `tokens_BT` as [B, T, D], T split as `shards` has it between blocks.

    Args:
      table_VD: this device's rows of the table; all of it without `shards.vocab`.
      tokens_BT: int32 ids of the whole vocabulary.
      shards: who has the other rows. Each device looks up its own, and all but one of the terms of the sum are zero.

    Source: Shoeybi et al. (Megatron-LM), arXiv 1909.08053, section 3.
    """
    num_rows = table_VD.shape[0]

    def read(rows_BT):
        # clipped here: mode="clip" leaves an index as it is to the gather, and on Neuron one outside ends the run
        return table_VD.at[jnp.clip(rows_BT, 0, num_rows - 1)].get(mode="clip")

    if not shards.vocab:
        return read(tokens_BT)
    rows_BT = tokens_BT - position(shards.vocab) * num_rows
    is_here_BT = (rows_BT >= 0) & (rows_BT < num_rows)
    x_BTD = jnp.where(is_here_BT[..., None], read(rows_BT), 0)
    return summed(shards.leave(x_BTD), shards.pipe)
