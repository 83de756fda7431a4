"""Statistics of the logits of each token, from which a cross-entropy follows.

For losses in functions of other people (`passes.rewrite`): the cotangents of the tokens are not known in the forward
pass, and a bias, a softcap or other columns may come before the softmax.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

# Fewest columns of the vocabulary in a block, and most bytes of fp32 logits that it holds at once.
LEAST_COLUMNS = 512
BLOCK_BYTES = 32 * 2**20


class TokenStatistics(NamedTuple):
    """What the losses of tokens read of their logits; each fp32 of the shape of the targets.

    Attributes:
      log_normaliser: log of the sum of the exponentials of the logits.
      target_logit: logit of the target; of an index outside the vocabulary 0.
      logit_sum: sum of the logits, as label smoothing needs it.
    """

    log_normaliser: Any
    target_logit: Any
    logit_sum: Any


def _unchanged(product, *params):
    return product


@dataclasses.dataclass(frozen=True)
class LogitsForm:
    """How logits are computed from hidden states.

    Attributes:
      contracted: axis of the head that is summed over: 1 for [V, D], 0 for [D, V].
      from_product: (fp32 [..., v], *params) -> logits [..., v], elementwise: bias, scale, softcap. It is called for
        blocks of the vocabulary and differentiated.
      precision: of the products, as for `jax.lax.dot_general`.
    """

    contracted: int = 1
    from_product: Callable[..., jax.Array] = _unchanged
    precision: Any = None


def token_statistics(
    hidden: jax.Array,
    *,
    head: jax.Array,
    targets: jax.Array,
    params: tuple[jax.Array, ...] = (),
    form: LogitsForm = LogitsForm(),
) -> TokenStatistics:
    """Returns the statistics of the logits of each token, from which its loss follows; the logits are not kept.

    The logits of all tokens are held for one block of the vocabulary at a time. The backward pass computes them again,
    which is a fourth product where JAX's derivative has three. Reverse mode only.

    Args:
      hidden: [..., D], any float dtype.
      head: [V, D] or [D, V], of the same dtype.
      targets: integers [...].
      params: operands of `form.from_product`: arrays [V], which are cut as the vocabulary is, and scalars.
      form: static.
    """
    num_columns = head.shape[1 - form.contracted]
    wanted = max(8, -(-4 * targets.size * num_columns // BLOCK_BYTES))
    num_blocks = max(1, min(wanted, num_columns // LEAST_COLUMNS))
    return TokenStatistics(*_statistics(hidden, head, targets, params, (form, -(-num_columns // num_blocks))))


# Blocks of the vocabulary, not of the tokens as in `cross_entropy`: a block completes its columns of the head's
# gradient, so no second array of the head's size is added to for each block, and a batch may be sharded in any way. The
# loss is not fused with the mean after it, to have the gradients in the forward pass with three products instead of
# four: for (2, 512) tokens, D = 256 and V = 50,257 that took 0.84 of the time, but 99 MiB of temporaries, these 80.
@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _statistics(hidden, head, targets, params, static):
    return _statistics_forward(hidden, head, targets, params, static)[0]


def _statistics_forward(hidden, head, targets, params, static):
    def visit(sums, index):
        largest, exp_sum, target_logit, logit_sum = sums
        product, params_v, ids, is_new = _block(hidden, head, params, index, static)
        logits_XV = static[0].from_product(product, *params_v).astype(largest.dtype)
        if is_new is not None:
            logits_XV = jnp.where(is_new, logits_XV, -jnp.inf)
        new_largest = jnp.maximum(largest, logits_XV.max(axis=-1))
        exp_sum = exp_sum * jnp.exp(largest - new_largest) + jnp.exp(logits_XV - new_largest[..., None]).sum(axis=-1)
        target_logit += jnp.where(_is_target(ids, targets, is_new), logits_XV, 0.0).sum(axis=-1)
        logit_sum += (logits_XV if is_new is None else jnp.where(is_new, logits_XV, 0.0)).sum(axis=-1)
        return (new_largest, exp_sum, target_logit, logit_sum), None

    dtype = _sum_dtype(hidden)
    zeros = jnp.zeros(targets.shape, dtype)
    # finite, so that a block of logits of -inf leaves it
    start = jnp.full(targets.shape, jnp.finfo(dtype).min), zeros, zeros, zeros
    largest, exp_sum, target_logit, logit_sum = _over_blocks(visit, start, head, static)
    # kept apart for the backward pass: their sum rounds a normaliser of 100 by 4e-6, and so all probabilities
    residuals = hidden, head, targets, params, largest, exp_sum
    return (largest + jnp.log(exp_sum), target_logit, logit_sum), residuals


def _statistics_backward(static, residuals, cotangents):
    hidden, head, targets, params, largest, exp_sum = residuals
    form, size = static
    dnormaliser, dtarget, dsum = (cotangent[..., None] for cotangent in cotangents)
    dexp = dnormaliser / exp_sum[..., None]
    floats = [place for place, param in enumerate(params) if jnp.issubdtype(param.dtype, jnp.floating)]
    axis = 1 - form.contracted
    tokens = tuple(range(targets.ndim))

    def from_product(product, *params):
        return form.from_product(product, *params).astype(exp_sum.dtype)

    def visit(grads, index):
        dhidden, dhead, dfloats = grads
        product, params_v, ids, is_new = _block(hidden, head, params, index, static)
        logits_XV, pullback = jax.vjp(from_product, product, *params_v)
        dlogits_XV = jnp.exp(logits_XV - largest[..., None]) * dexp + dsum
        dlogits_XV += jnp.where(_is_target(ids, targets, is_new), dtarget, 0.0)
        if is_new is not None:
            dlogits_XV = jnp.where(is_new, dlogits_XV, 0.0)
        dproduct_XV, *dparams_v = pullback(dlogits_XV)
        dproduct_XV = dproduct_XV.astype(hidden.dtype)
        dhidden += _dot(dproduct_XV, _columns(head, index, axis, size), ((targets.ndim,), (axis,)), form)
        operands = (dproduct_XV, hidden) if axis == 0 else (hidden, dproduct_XV)
        dhead = _with_columns(dhead, _dot(*operands, (tokens, tokens), form), index, axis, size)
        dfloats = [
            _with_columns(total, dparams_v[place], index, 0, size) for total, place in zip(dfloats, floats, strict=True)
        ]
        return (dhidden, dhead, dfloats), None

    start = (
        jnp.zeros(hidden.shape, exp_sum.dtype),
        jnp.zeros_like(head),
        [jnp.zeros(params[place].shape, exp_sum.dtype) for place in floats],
    )
    dhidden, dhead, dfloats = _over_blocks(visit, start, head, static)
    dparams = dict(zip(floats, dfloats, strict=True))
    return (
        dhidden.astype(hidden.dtype),
        dhead,
        None,
        tuple(dparams[place].astype(p.dtype) if place in dparams else None for place, p in enumerate(params)),
    )


_statistics.defvjp(_statistics_forward, _statistics_backward)


def _block(hidden, head, params, index, static):
    """Returns (fp32 product, params, indices, which of them no block before has; None if all) of block `index`."""
    form, size = static
    axis = 1 - form.contracted
    num_columns = head.shape[axis]
    product = _dot(hidden, _columns(head, index, axis, size), ((hidden.ndim - 1,), (form.contracted,)), form)
    params = [_columns(param, index, 0, size) if param.ndim else param for param in params]
    ids = _first(index, size, num_columns) + jnp.arange(size, dtype=jnp.int32)
    return product, params, ids, None if num_columns % size == 0 else ids >= index * size


def _first(index, size, num_columns):
    """Returns the first column of a block; the last block overlaps the one before if the blocks are not even."""
    return index * size if num_columns % size == 0 else jnp.minimum(index * size, num_columns - size)


def _columns(array, index, axis, size):
    if size == array.shape[axis]:
        return array
    return jax.lax.dynamic_slice_in_dim(array, _first(index, size, array.shape[axis]), size, axis)


def _with_columns(total, block, index, axis, size):
    """Returns the total with a block's columns added, which are 0 where a block before has added them; or scalars."""
    block = block.astype(total.dtype)
    if not total.ndim or size == total.shape[axis]:
        return total + block
    first = _first(index, size, total.shape[axis])
    if total.shape[axis] % size:
        block += jax.lax.dynamic_slice_in_dim(total, first, size, axis)
    return jax.lax.dynamic_update_slice_in_dim(total, block, first, axis)


def _over_blocks(visit: Callable, start: Any, head: jax.Array, static: tuple) -> Any:
    form, size = static
    num_blocks = -(-head.shape[1 - form.contracted] // size)
    if num_blocks == 1:
        return visit(start, 0)[0]
    return jax.lax.scan(visit, start, jnp.arange(num_blocks))[0]


def _is_target(ids, targets, is_new):
    is_target = ids == targets[..., None]
    return is_target if is_new is None else is_target & is_new


def _sum_dtype(hidden):
    return jnp.promote_types(hidden.dtype, jnp.float32)


def _dot(left, right, contracted, form):
    dtype = _sum_dtype(left)
    dims = (contracted, ((), ()))
    return jax.lax.dot_general(left, right, dims, precision=form.precision, preferred_element_type=dtype)
