"""L equal layers over parameters stacked on a leading layer axis: scanned or unrolled, with rematerialization.

Layers name the values that a policy may save with `jax.ad_checkpoint.checkpoint_name`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_policies

from hlat_jax.config import Remat
from hlat_jax.host.neuron_lowering import elide_idle_roundings


def run_layers(
    layer: Callable[[Any, jax.Array], jax.Array],
    stacked: Any,
    x: jax.Array,
    *,
    loop: str,
    remat: Remat,
    checkpoint: Callable[..., Callable] | None = None,
) -> jax.Array:
    """Returns `x` after every layer in turn.

    Args:
      layer: function (parameters of one layer, x) -> next x, of the same shape and dtype.
      stacked: parameters of all layers, with the layer axis [L, ...] in front of every leaf.
      x: activations.
      loop: 'scan' (one layer is compiled, a small program) or 'unroll' (L copies, no loop).
      remat: the rematerialization, see `rematerialize`.
      checkpoint: function (layer, *, prevent_cse) -> the layer with another backward pass, in place of `remat`.
    """
    layer = (checkpoint or functools.partial(rematerialize, remat=remat))(layer, prevent_cse=loop == "unroll")
    if loop == "scan":
        return jax.lax.scan(lambda carry, params: (layer(params, carry), None), x, stacked)[0]
    if loop != "unroll":
        raise ValueError(f"model.layer_loop={loop!r} must be scan or unroll.")
    for params in _slices(stacked):
        x = layer(params, x)
    return x


def collect_layers(
    layer: Callable[[Any, jax.Array], tuple[jax.Array, Any]], stacked: Any, x: jax.Array, *, loop: str
) -> tuple[jax.Array, Any]:
    """Returns `x` after every layer in turn, and the aux of all layers, stacked [L, ...], for forward passes only.

    Args:
      layer: function (parameters of one layer, x) -> (next x, aux), with aux a tree of arrays.
      stacked: parameters of all layers, as for `run_layers`.
      x: activations.
      loop: 'scan' or 'unroll', as for `run_layers`.
    """
    if loop == "scan":
        return jax.lax.scan(lambda carry, params: layer(params, carry), x, stacked)
    auxs = []
    for params in _slices(stacked):
        x, aux = layer(params, x)
        auxs.append(aux)
    return x, jax.tree.map(lambda *leaves: jax.numpy.stack(leaves), *auxs)


def rematerialize(layer: Callable, *, remat: Remat, prevent_cse: bool) -> Callable:
    """Returns the layer with its backward pass rematerialized.

    Args:
      layer: function of one layer.
      remat: the values that are saved. A budget, and the values chosen for it, are for a training step, which gives
        `run_layers` a `checkpoint`. In other programs they save only the layer's input.
      prevent_cse: whether to keep the compiler from merging the recomputation with the forward pass. Outside a loop,
        this is needed.
    """
    if remat.kind == "none":
        return layer
    if remat.kind in ("full", "budget", "saved"):
        return jax.checkpoint(layer, prevent_cse=prevent_cse)
    assert remat.kind in ("names", "policy"), f"{remat} is not resolved"
    elide_idle_roundings()
    policy = checkpoint_policies.save_only_these_names(*remat.saved)
    if remat.kind == "policy":
        policy = getattr(checkpoint_policies, remat.policy)
    return jax.checkpoint(layer, policy=policy, prevent_cse=prevent_cse)


def _slices(stacked: Any) -> list[Any]:
    leaves, structure = jax.tree.flatten(stacked)
    # split, not leaf[i]: its gradient is one concatenation, where L slices give L padded sums
    pieces = [[piece[0] for piece in jax.lax.split(leaf, (1,) * leaf.shape[0], axis=0)] for leaf in leaves]
    return [jax.tree.unflatten(structure, layer) for layer in zip(*pieces, strict=True)]
