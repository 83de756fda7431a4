"""The cache of keys and values that generation keeps, and a decoder's layers applied with it; forward only.

Shapes: B rows, T new tokens, S slots of the cache, D embed, N heads, K kv heads, G heads per kv head, H head, L layers.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from hlat_jax import stack
from hlat_jax.model import Decoder, causal_attention
from hlat_jax.parallel.collectives import SINGLE_DEVICE, ParallelContext

_MASKED = -1e30  # finite, so that a masked score minus the maximum of a row is never inf - inf


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KVCache:
    """Keys (rotated) and values [L, B, S, K, H] of all layers, in the dtype of the parameters: the policy's."""

    keys: Any
    values: Any


def apply_layers_with_cache(
    decoder: Decoder,
    x_BTD: jax.Array,
    positions_BT: jax.Array,
    *,
    cache: KVCache | None = None,
    visible: Callable[[Any], jax.Array] | None = None,
    ctx: ParallelContext = SINGLE_DEVICE,
) -> tuple[jax.Array, KVCache]:
    """Returns `Decoder.apply_layers`, and the keys and values [L, B, T, K, H] of these tokens.

    With a cache, T is 1 and the token attends to itself and to slots of its row: `visible` is a function of the window
    of a layer, None without one, that returns which, bool [B, S].
    """
    num_keys = None if cache is None else cache.keys.shape[2]
    apply_layer, stacked = decoder.split_layers(positions_BT, num_keys=num_keys, ctx=ctx)
    attend_to_tokens = causal_attention(decoder.cfg, None)

    def layer(layer_and_cached: tuple[Any, KVCache | None], x_BTD: jax.Array) -> tuple[jax.Array, KVCache]:
        of_layer, cached = layer_and_cached

        def attend(
            q_BTNH: jax.Array, k_BTKH: jax.Array, v_BTKH: jax.Array, *, window: Any
        ) -> tuple[jax.Array, KVCache]:
            new = KVCache(k_BTKH, v_BTKH)
            if cached is None:
                return attend_to_tokens(q_BTNH, k_BTKH, v_BTKH, window=window)[0], new
            return _attend_to_cache(q_BTNH, new, cached=cached, visible_BS=visible(window)), new

        return apply_layer(of_layer, x_BTD, attend)

    return stack.collect_layers(layer, (stacked, cache), x_BTD, loop=decoder.cfg.layer_loop)


def _attend_to_cache(q_BTNH: jax.Array, new: KVCache, *, cached: KVCache, visible_BS: jax.Array) -> jax.Array:
    """Returns [B, T = 1, N, H]: attention of the last token of rows whose earlier ones are cached.

    Args:
      q_BTNH: its query.
      new: its key and value [B, T = 1, K, H], which are not written to the cache here.
      cached: those of one layer [B, S, K, H], read as they are stored.
      visible_BS: bool, which slots the query attends to.
    """
    b, t, n, h = q_BTNH.shape
    q_BTKGH = q_BTNH.reshape(b, t, new.keys.shape[2], -1, h)
    product = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)
    past_BKGTS = product("BTKGH,BSKH->BKGTS", q_BTKGH, cached.keys)
    past_BKGTS = jnp.where(visible_BS[:, None, None, None], past_BKGTS / math.sqrt(h), _MASKED)
    own_BKGTT = product("BTKGH,BSKH->BKGTS", q_BTKGH, new.keys) / math.sqrt(h)
    probs = jax.nn.softmax(jnp.concatenate([past_BKGTS, own_BKGTT], axis=-1), axis=-1).astype(new.values.dtype)
    past_BKGTS, own_BKGTT = jnp.split(probs, (cached.keys.shape[1],), axis=-1)
    out_BTKGH = product("BKGTS,BSKH->BTKGH", past_BKGTS, cached.values)
    out_BTKGH = out_BTKGH + product("BKGTS,BSKH->BTKGH", own_BKGTT, new.values)
    return out_BTKGH.astype(q_BTNH.dtype).reshape(b, t, n, h)
