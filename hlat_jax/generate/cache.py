"""The cache of keys and values of generation. A decoder's layers are applied with it, forward only.

Shapes: B rows, T tokens, S slots, D embed, N heads, K kv heads, G heads per kv head, H head, L layers.
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
    """Keys (rotated) and values [L, B, S, K, H] of all layers, in the dtype of the parameters."""

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

    With a cache, T is 1, and the token attends to itself and to slots of its row. `visible` returns these slots, bool
    [B, S], for the window of a layer, or for None without a window.
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
    """Returns [B, T = 1, N, H], the attention of a query to its own key and value `new`, and to visible cached ones.

    `new` [B, T = 1, K, H] is not written to the cache here. `cached` has the keys and values of one layer [B, S, K, H].
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
