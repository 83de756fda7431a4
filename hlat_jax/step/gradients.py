"""Sums the losses and gradients of a batch over its microbatches, and then over the devices."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from hlat_jax.ops.cross_entropy import scaled_losses
from hlat_jax.parallel.rows import microbatches
from hlat_jax.precision import Accumulation, Rounding
from hlat_jax.step.loss_signature import CheckedLossFn, LossAux
from hlat_jax.step.options import StepOptions

Sums = tuple[jax.Array, LossAux]  # of losses, and of what else they return
Reduce = Callable[[Any], Any]  # of the gradients of a microbatch, over devices


def make_value_and_grad(loss_fn: Callable, options: StepOptions) -> Callable[..., tuple[Sums, Any]]:
    """Returns (params, rows, rounding, *, scale, model_state) -> (Sums, gradients) over all devices."""
    replica_sync, local = options.active_replica_sync, make_local_value_and_grad(loss_fn, options)
    if replica_sync is None:
        return local
    mean_shares = replica_sync.mean_shares

    def local_shares(*args: Any, **given: Any) -> tuple[Sums, Any]:
        (loss_sum, loss_aux), grads = local(*args, **given)
        return (loss_sum, dataclasses.replace(loss_aux, model_state=mean_shares(loss_aux.model_state))), grads

    return replica_sync.value_and_grad(local_shares, dtype=options.policy.accumulate)


def make_local_value_and_grad(loss_fn: Callable, options: StepOptions) -> Callable[..., tuple[Sums, Any]]:
    """Returns the same function as `make_value_and_grad`, for the rows of one device."""
    dtype, replica_sync = options.policy.accumulate, options.active_replica_sync
    loss_fn = loss_fn if replica_sync is None else replica_sync.with_gathered_params(loss_fn)

    def local(
        params: Any,
        rows: Any,
        rounding: Rounding,
        *,
        scale: jax.Array | None,
        model_state: Any,
        reduce: Reduce | None = None,
    ) -> tuple[Sums, Any]:
        def scaled_loss(params: Any, *args: Any) -> Sums:
            loss_sum, loss_aux = loss_fn(params, *args)
            return loss_sum * scale, loss_aux

        sums = Accumulation(options.num_microbatches, dtype, rounding, reduce)
        if options.accumulate is not None:
            (loss_sum, count), grads = options.accumulate(loss_fn, params, rows, sums=sums)
            return (loss_sum, LossAux(count)), grads
        if scale is None:
            return accumulate_grads(loss_fn, params, rows, sums=sums, model_state=model_state)
        with scaled_losses():
            return accumulate_grads(scaled_loss, params, rows, sums=sums, model_state=model_state)

    return local


def accumulate_grads(
    loss_fn: CheckedLossFn, params: Any, rows: Any, *, sums: Accumulation, model_state: Any = None
) -> tuple[Sums, Any]:
    """Returns (Sums, gradients) of a batch, with its parts run one after another.

    Args:
      loss_fn: function (params, rows, model_state) -> (loss sum, LossAux).
      params: parameters.
      rows: fields with rows in front.
      sums: number of parts, see `rows.microbatches`, and the summation of their gradients.
      model_state: model state for the first part. Each part returns the state for the next.
    """
    value_and_grad = jax.value_and_grad(loss_fn, has_aux=True)

    def of_part(part: Any, model_state: Any) -> tuple[Sums, Any]:
        sums_of_part, grads = value_and_grad(params, part, model_state)
        return sums_of_part, grads if sums.reduce is None else sums.reduce(grads)

    if sums.num_microbatches == 1:
        return of_part(rows, model_state)

    def add(totals: tuple, indexed: tuple) -> tuple[tuple, LossAux]:
        loss_sum, count, summed, model_state = totals
        index, part = indexed
        (loss, loss_aux), grads = of_part(part, model_state)
        totals = loss_sum + loss, count + loss_aux.count, sums.rounding.at(index).add(summed, grads)
        return (*totals, loss_aux.model_state), dataclasses.replace(loss_aux, count=None, model_state=None)

    shapes = params if sums.reduce is None else jax.eval_shape(sums.reduce, params)
    zeros = jax.tree.map(lambda p: jnp.zeros(p.shape, sums.dtype), shapes)
    start = (jnp.float32(0.0), jnp.float32(0.0), zeros, model_state)
    indexed = jnp.arange(sums.num_microbatches, dtype=jnp.uint32), microbatches(rows, sums.num_microbatches)
    (loss_sum, count, grads, model_state), loss_aux = jax.lax.scan(add, start, indexed)
    loss_aux = jax.tree.map(lambda values: values.sum(0), loss_aux)
    return (loss_sum, dataclasses.replace(loss_aux, count=count, model_state=model_state)), grads
