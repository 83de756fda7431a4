"""Cross-entropy of hidden states against target tokens, as a weighted sum and as statistics of each token's logits."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from hlat_jax.batch import SumAndCount
from hlat_jax.ops.dialect import CallSpec, Implementation, Op
from hlat_jax.parallel import collectives
from hlat_jax.parallel.collectives import SINGLE_DEVICE, ParallelContext
from hlat_jax.passes import scaling

# Most positions of each row whose logits "chunked" holds at once, and fewest for long rows.
CHUNK_POSITIONS = 256
LEAST_POSITIONS = 128
# Fewest columns of the vocabulary in a block of "blocked", and most bytes of fp32 logits that it holds at once.
LEAST_COLUMNS = 512
BLOCK_BYTES = 32 * 2**20


def logits(hidden: jax.Array, head_VD: jax.Array) -> jax.Array:
    """Returns fp32 [..., V] from `hidden` [..., D]: products in the input dtype, accumulated and kept in fp32."""
    return _product(hidden, head_VD, (hidden.ndim - 1, 1))


@dataclasses.dataclass(frozen=True)
class LossOptions:
    """How the loss is computed.

    Attributes:
      implementation: "dense" holds the logits of all tokens at once, "chunked" those of an eighth of every row, from
        `LEAST_POSITIONS` to `CHUNK_POSITIONS` positions; "reference", which JAX differentiates, also keeps them. Or
        platform -> name, see `dialect.Op.run`.
      z_loss_weight: of the squared log-normaliser; 0 is the plain cross-entropy.
      ctx: the axes that shard the rows of the head. Each device computes the logits of its own rows; their maximum,
        the sum of exponentials, the target's logit and the gradient of the hidden states are reduced over the axes.
    """

    implementation: str | Mapping[str, str]
    z_loss_weight: float = 0.0
    ctx: ParallelContext = SINGLE_DEVICE


def cross_entropy(
    hidden_BTD: jax.Array,
    *,
    head_VD: jax.Array,
    targets_BT: jax.Array,
    weights_BT: jax.Array,
    options: LossOptions,
) -> SumAndCount:
    """Returns the sums over tokens of weight * (nll + z_loss_weight * log_normaliser^2) and of weight, in fp32.

    Logits, softmax and sums are fp32. The forward pass also computes the gradients of `hidden_BTD` and `head_VD`,
    while it has the logits, in the dtypes of these; the weights have no gradient. That is reverse mode only; forward
    mode is "reference" on a single device. Under `passes.autocast` with a loss scale, the gradient products of an fp32
    call stay fp32: they are still unscaled.

    Args:
      hidden_BTD: input of the head, fp32 or bf16; T sharded as `options.ctx` shards it between layers.
      head_VD: this device's rows of the output projection, or of the embedding table when tied.
      targets_BT: int32 below V, also at positions of weight 0.
      weights_BT: fp32; weight of each target.
      options: static.

    Source: for a split vocabulary Shoeybi et al. (Megatron-LM), arXiv 1909.08053, section 3.
    """
    ctx = options.ctx
    if ctx != SINGLE_DEVICE:
        hidden_BTD = collectives.copy_to_tensor_region(ctx.enter_tensor_region(hidden_BTD), ctx.pipe)
    loss_sum = OP.run(
        options.implementation, hidden_BTD, head_VD, targets_BT, weights_BT, options.z_loss_weight, ctx.vocab
    )
    return SumAndCount(loss_sum, jnp.sum(weights_BT))


def describe_call(hidden_shape: tuple[int, ...], vocab_rows: int, *, dtype: Any) -> CallSpec:
    """Returns the spec of a call.

    Args:
      hidden_shape: (B, T, D) of the head's input on one device.
      vocab_rows: rows of the head on one device.
      dtype: of both.
    """
    return {"hidden_shape": tuple(hidden_shape), "vocab_rows": vocab_rows, "dtype": jnp.dtype(dtype).name}


def _chunk(seq_len: int) -> int:
    if seq_len <= CHUNK_POSITIONS:
        return seq_len
    return min(max(LEAST_POSITIONS, seq_len // 8), CHUNK_POSITIONS)


def _in_chunks(chunk_of: Callable[[int], int]) -> Callable[..., jax.Array]:
    """Returns a function that sums the losses over chunks of `chunk_of(T)` positions of every row."""

    def _loss(hidden_BTD, head_VD, targets_BT, weights_BT, z_loss_weight, axes):
        static = (z_loss_weight, chunk_of(hidden_BTD.shape[1]), axes)
        return _loss_sum(hidden_BTD, head_VD, targets_BT, weights_BT, static)

    return _loss


def _reference(hidden_BTD, head_VD, targets_BT, weights_BT, z_loss_weight, axes):
    logits_BTV = logits(hidden_BTD, head_VD)
    largest_BT1 = jax.lax.stop_gradient(logits_BTV).max(axis=-1, keepdims=True)
    if axes:
        largest_BT1 = jax.lax.pmax(largest_BT1, axes)
        targets_BT = targets_BT - collectives.axis_index(axes) * logits_BTV.shape[-1]
    shifted_BTV = logits_BTV - largest_BT1
    is_target_BTV = jax.lax.broadcasted_iota(jnp.int32, logits_BTV.shape, 2) == targets_BT[..., None]
    sum_BT = jnp.exp(shifted_BTV).sum(axis=-1)
    target_logit_BT = jnp.where(is_target_BTV, shifted_BTV, 0.0).sum(axis=-1)
    if axes:
        sum_BT, target_logit_BT = collectives.psum(sum_BT, axes), collectives.psum(target_logit_BT, axes)
    losses_BT = jnp.log(sum_BT) - target_logit_BT
    log_normaliser_BT = jnp.log(sum_BT) + largest_BT1[..., 0]
    return jnp.sum(jax.lax.stop_gradient(weights_BT) * (losses_BT + z_loss_weight * jnp.square(log_normaliser_BT)))


OP = Op("model.cross_entropy")
# one large product, no loop
OP.register(Implementation("dense", _in_chunks(lambda seq_len: seq_len), {"*": 10}))
# on cpu, newly allocated memory for the logits costs more than a second pass over the head's gradient
OP.register(Implementation("chunked", _in_chunks(_chunk), {"cpu": 20, "*": 5}))
# differentiated by JAX, in any mode and order; the backward pass keeps the probabilities of all tokens
OP.register(Implementation("reference", _reference, {"*": 1}))


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _loss_sum(hidden_BTD, head_VD, targets_BT, weights_BT, static):
    z_loss_weight, chunk, axes = static

    def add(total, rows):
        logits_RV = logits(rows[0], head_VD)
        return total + _softmax_loss(logits_RV, rows[1], rows[2], z_loss_weight, axes)[0], None

    return _over_chunks(add, jnp.float32(0.0), (hidden_BTD, targets_BT, weights_BT), chunk)[0]


def _forward(hidden_BTD, head_VD, targets_BT, weights_BT, static):
    z_loss_weight, chunk, axes = static
    precision = None
    if scaling.is_applied() and hidden_BTD.dtype == jnp.float32:
        precision = jax.lax.DotAlgorithmPreset.F32_F32_F32  # which autocast does not change

    def add(sums, rows):
        hidden_RD, targets_R, weights_R = rows
        total, dhead_VD = sums
        loss, dlogits_RV = _softmax_loss(logits(hidden_RD, head_VD), targets_R, weights_R, z_loss_weight, axes)
        dlogits_RV = dlogits_RV.astype(hidden_RD.dtype)
        dhidden_RD = _product(dlogits_RV, head_VD, (1, 0), precision=precision).astype(hidden_RD.dtype)
        grad_VD = _product(dlogits_RV, hidden_RD, (0, 0), precision=precision)
        # a single chunk needs no array of zeros to add to
        return (total + loss, grad_VD if dhead_VD is None else dhead_VD + grad_VD), dhidden_RD

    single = chunk == hidden_BTD.shape[1]
    start = jnp.float32(0.0), None if single else jnp.zeros(head_VD.shape, jnp.float32)
    (total, dhead_VD), dhidden_BTD = _over_chunks(add, start, (hidden_BTD, targets_BT, weights_BT), chunk)
    return total, (dhidden_BTD, dhead_VD.astype(head_VD.dtype))


def _backward(static, grads, cotangent):
    dhidden_BTD, dhead_VD = ((grad * cotangent).astype(grad.dtype) for grad in grads)
    return dhidden_BTD, dhead_VD, None, None


_loss_sum.defvjp(_forward, _backward)


def _softmax_loss(
    logits_RV: jax.Array, targets_R: jax.Array, weights_R: jax.Array, z_loss_weight: float, axes: tuple[str, ...]
) -> tuple[jax.Array, jax.Array]:
    """Returns the weighted sum of the losses of R tokens, and its gradient with respect to this device's logits."""
    largest_R = jnp.max(logits_RV, axis=-1)
    if axes:
        largest_R = jax.lax.pmax(largest_R, axes)
        targets_R = targets_R - collectives.axis_index(axes) * logits_RV.shape[1]
    exp_RV = jnp.exp(logits_RV - largest_R[:, None])
    sum_R = jnp.sum(exp_RV, axis=-1)
    # clipped explicitly: mode="clip" leaves it to the gather, and on Neuron an out-of-bounds index aborts the run
    rows_R = jnp.clip(targets_R, 0, logits_RV.shape[1] - 1)
    target_logit_R = jnp.take_along_axis(logits_RV, rows_R[:, None], axis=-1, mode="clip")[:, 0]
    if axes:
        is_here_R = (targets_R >= 0) & (targets_R < logits_RV.shape[1])
        sum_R, target_logit_R = jax.lax.psum(jnp.stack([sum_R, jnp.where(is_here_R, target_logit_R, 0.0)]), axes)
    log_normaliser_R = jnp.log(sum_R) + largest_R
    losses_R = log_normaliser_R - target_logit_R + z_loss_weight * jnp.square(log_normaliser_R)
    softmax_weight_R = weights_R * (1.0 + 2.0 * z_loss_weight * log_normaliser_R) / sum_R
    # compare and select, not a scatter: it fuses with the pass that writes the gradient
    is_target_RV = jax.lax.broadcasted_iota(jnp.int32, logits_RV.shape, 1) == targets_R[:, None]
    dlogits_RV = exp_RV * softmax_weight_R[:, None] - jnp.where(is_target_RV, weights_R[:, None], 0.0)
    return jnp.sum(weights_R * losses_R), dlogits_RV


def _over_chunks(add: Callable, start: Any, fields_BT: tuple, chunk: int) -> tuple[Any, jax.Array | None]:
    """Returns the final sums and the stacked outputs [B, T, ...] of `add(sums, fields of R = B * chunk tokens)`.

    T is padded to whole chunks with zeros, which are weights of 0. Chunks are cut along T, so that every chunk stays
    sharded over B.
    """
    b, t = fields_BT[0].shape[:2]
    num_chunks = -(-t // chunk)

    def split(field):
        field = jnp.pad(field, [(0, 0), (0, num_chunks * chunk - t)] + [(0, 0)] * (field.ndim - 2))
        field = field.reshape(b, num_chunks, chunk, *field.shape[2:]).swapaxes(0, 1)
        return field.reshape(num_chunks, b * chunk, *field.shape[3:])

    chunks = tuple(split(field) for field in fields_BT)
    if num_chunks == 1:
        sums, out_RX = add(start, tuple(field[0] for field in chunks))
        return sums, None if out_RX is None else out_RX.reshape(b, t, *out_RX.shape[1:])
    sums, out_CRX = jax.lax.scan(add, start, chunks)
    if out_CRX is None:
        return sums, None
    out_BTX = out_CRX.reshape(num_chunks, b, chunk, *out_CRX.shape[2:]).swapaxes(0, 1)
    return sums, out_BTX.reshape(b, num_chunks * chunk, *out_CRX.shape[2:])[:, :t]


def _product(left: jax.Array, right: jax.Array, axes: tuple[int, int], *, precision: Any = None) -> jax.Array:
    dims = (((axes[0],), (axes[1],)), ((), ()))
    return jax.lax.dot_general(left, right, dims, precision=precision, preferred_element_type=jnp.float32)


# The same from any product with any loss after it, as in models of other people (`ops.dispatch_loss`).


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
      contracted: axis of the head that is summed over: 1 for [V, D], as `logits` has it, 0 for [D, V].
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
      implementation: a name that `TOKEN_OP.choose` returns, or platform -> name, see `dialect.Op.run`.
    """
    return TOKEN_OP.run(implementation, hidden, head, targets, params, form)


# Blocks of the vocabulary, not of the tokens: a block completes its rows of the head's gradient, so no second array of
# the head's size is added to for each block, and the rows of a batch may be sharded in any way.
def _num_blocks(num_tokens: int, num_columns: int) -> int:
    wanted = max(8, -(-4 * num_tokens * num_columns // BLOCK_BYTES))
    return max(1, min(wanted, num_columns // LEAST_COLUMNS))


def _in_blocks(num_blocks_of: Callable[[int, int], int]) -> Callable[..., TokenStatistics]:
    def _run(hidden, head, targets, params, form):
        num_columns = head.shape[1 - form.contracted]
        num_blocks = num_blocks_of(targets.size, num_columns)
        return TokenStatistics(*_statistics(hidden, head, targets, params, (form, -(-num_columns // num_blocks))))

    return _run


TOKEN_OP = Op("token_statistics")
TOKEN_OP.register(Implementation("dense", _in_blocks(lambda num_tokens, num_columns: 1), {"*": 5}))
TOKEN_OP.register(Implementation("blocked", _in_blocks(_num_blocks), {"*": 10}))


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
    log_normaliser = largest + jnp.log(exp_sum)
    return (log_normaliser, target_logit, logit_sum), (hidden, head, targets, params, log_normaliser)


def _statistics_backward(static, residuals, cotangents):
    hidden, head, targets, params, log_normaliser = residuals
    form, size = static
    dnormaliser, dtarget, dsum = (cotangent[..., None] for cotangent in cotangents)
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
        dlogits_XV = jnp.exp(logits_XV - log_normaliser[..., None]) * dnormaliser + dsum
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
        jnp.zeros(hidden.shape, log_normaliser.dtype),
        jnp.zeros_like(head),
        [jnp.zeros(param.shape, log_normaliser.dtype) for param in floats],
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
