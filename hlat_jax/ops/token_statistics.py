"""Statistics of the logits of each token, from which a cross-entropy follows: contract and two XLA implementations.

For losses in functions of other people (`rewrite.loss`): the cotangents of the tokens are not known in the forward
pass, and a bias, a softcap or other columns may come before the softmax.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from hlat_jax.ops.dialect import CallSpec, Implementation, Op

# Fewest columns of the vocabulary in a block of "blocked", and most bytes of fp32 logits that it holds at once.
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
    implementation: str | Mapping[str, str],
) -> TokenStatistics:
    """Returns the statistics of the logits of each token, from which its loss follows; the logits are not kept.

    The backward pass computes the logits again, which is a fourth product where JAX's derivative has three. Reverse
    mode only. "blocked" holds the logits of all tokens for one block of the vocabulary at a time.

    Args:
      hidden: [..., D], any float dtype.
      head: [V, D] or [D, V], of the same dtype.
      targets: integers [...].
      params: operands of `form.from_product`: arrays [V], which are cut as the vocabulary is, and scalars.
      form: static.
      implementation: a name that `OP.choose` returns, or platform -> name, see `dialect.Op.run`.
    """
    return OP.run(implementation, hidden, head, targets, params, form)


def describe_call(hidden_shape: tuple[int, ...], num_columns: int, *, dtype: Any) -> CallSpec:
    """Returns the spec of a call: the shape [..., D] of the hidden states, size of the vocabulary, dtype of both."""
    return {"hidden_shape": tuple(hidden_shape), "num_columns": num_columns, "dtype": jnp.dtype(dtype).name}


# Blocks of the vocabulary, not of the tokens as in `cross_entropy`: a block completes its columns of the head's
# gradient, so no second array of the head's size is added to for each block, and a batch may be sharded in any way. The
# loss is not fused with the mean after it, to have the gradients in the forward pass with three products instead of
# four: for (2, 512) tokens, D = 256 and V = 50,257 that took 0.84 of the time, but 99 MiB of temporaries, these 80.
def _num_blocks(num_tokens: int, num_columns: int) -> int:
    wanted = max(8, -(-4 * num_tokens * num_columns // BLOCK_BYTES))
    return max(1, min(wanted, num_columns // LEAST_COLUMNS))


def _in_blocks(num_blocks_of: Callable[[int, int], int]) -> Callable[..., TokenStatistics]:
    def _run(hidden, head, targets, params, form):
        num_columns = head.shape[1 - form.contracted]
        num_blocks = num_blocks_of(targets.size, num_columns)
        return TokenStatistics(*_statistics(hidden, head, targets, params, (form, -(-num_columns // num_blocks))))

    return _run


OP = Op("token_statistics")
OP.register(Implementation("dense", _in_blocks(lambda num_tokens, num_columns: 1), {"*": 5}))
OP.register(Implementation("blocked", _in_blocks(_num_blocks), {"*": 10}))


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
    is_float = [jnp.issubdtype(param.dtype, jnp.floating) for param in params]
    axis = 1 - form.contracted
    tokens = tuple(range(targets.ndim))

    def visit(grads, index):
        dhidden, dhead, dparams = grads
        product, params_v, ids, is_new = _block(hidden, head, params, index, static)

        def from_product(product, floats):
            floats = iter(floats)
            whole = [next(floats) if yes else param for param, yes in zip(params_v, is_float, strict=True)]
            return form.from_product(product, *whole).astype(dhidden.dtype)

        floats_v = [param for param, yes in zip(params_v, is_float, strict=True) if yes]
        logits_XV, pullback = jax.vjp(from_product, product, floats_v)
        dlogits_XV = jnp.exp(logits_XV - largest[..., None]) * dexp + dsum
        dlogits_XV += jnp.where(_is_target(ids, targets, is_new), dtarget, 0.0)
        if is_new is not None:
            dlogits_XV = jnp.where(is_new, dlogits_XV, 0.0)
        dproduct_XV, dfloats_v = pullback(dlogits_XV)
        dproduct_XV = dproduct_XV.astype(hidden.dtype)
        head_v = _columns(head, index, axis, size)
        dhidden += _dot(dproduct_XV, head_v, ((targets.ndim,), (axis,)), form)
        operands = (dproduct_XV, hidden) if axis == 0 else (hidden, dproduct_XV)
        dhead = _with_columns(dhead, _dot(*operands, (tokens, tokens), form), index, axis, size)
        dparams = [_with_columns(*each, index, 0, size) for each in zip(dparams, dfloats_v, strict=True)]
        return (dhidden, dhead, dparams), None

    floats = [param for param, yes in zip(params, is_float, strict=True) if yes]
    start = (
        jnp.zeros(hidden.shape, exp_sum.dtype),
        jnp.zeros_like(head),
        [jnp.zeros(param.shape, exp_sum.dtype) for param in floats],
    )
    dhidden, dhead, dfloats = _over_blocks(visit, start, head, static)
    dfloats = iter(dfloats)
    dparams = tuple(next(dfloats).astype(p.dtype) if yes else None for p, yes in zip(params, is_float, strict=True))
    return dhidden.astype(hidden.dtype), dhead, None, dparams


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
