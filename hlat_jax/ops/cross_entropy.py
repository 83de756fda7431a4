"""Cross-entropy of hidden states against target tokens, with its contract and three XLA implementations."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from hlat_jax.batch import SumAndCount
from hlat_jax.ops.dialect import CallSpec, Implementation, Op
from hlat_jax.parallel import collectives
from hlat_jax.parallel.collectives import SINGLE_DEVICE, ParallelContext

# Most positions of each row whose logits "chunked" holds at once, and fewest for long rows.
CHUNK_POSITIONS = 256
LEAST_POSITIONS = 128
PADDING_LOGIT = -1e30  # finite, with an exponential of 0

_is_scaled = jax.make_user_context(False)


@dataclasses.dataclass(frozen=True)
class Vocab:
    """The vocabulary behind the rows of a head.

    Attributes:
      axes: mesh axes that the rows are split over.
      size: number of tokens. More rows are padding, for equal parts. 0 means that every row is a token.
    """

    axes: tuple[str, ...] = ()
    size: int = 0


@contextlib.contextmanager
def scaled_losses() -> Iterator[None]:
    """Context manager that marks the losses differentiated inside it as scaled, see `loss_scale`.

    An op that computes gradients before it has the cotangent computes them unscaled, and then keeps them in fp32.
    """
    with _is_scaled(True):
        yield


def is_loss_scaled() -> bool:
    """Returns whether the loss that is differentiated here is scaled, see `scaled_losses`."""
    return _is_scaled.value


def logits(hidden: jax.Array, head_VD: jax.Array, *, vocab: Vocab = Vocab()) -> jax.Array:
    """Returns fp32 logits [..., V] of `hidden` [..., D], by products in the input dtype that accumulate in fp32.

    Rows that pad the vocabulary have `PADDING_LOGIT`.
    """
    logits_V = _product(hidden, head_VD, (hidden.ndim - 1, 1))
    num_rows = logits_V.shape[-1]
    if not 0 < vocab.size < num_rows * (jax.lax.axis_size(vocab.axes) if vocab.axes else 1):
        return logits_V
    rows_V = jax.lax.broadcasted_iota(jnp.int32, logits_V.shape, logits_V.ndim - 1)
    return jnp.where(rows_V < vocab.size - collectives.axis_index(vocab.axes) * num_rows, logits_V, PADDING_LOGIT)


@dataclasses.dataclass(frozen=True)
class LossOptions:
    """Options of the loss.

    Attributes:
      implementation: "dense" holds the logits of all tokens at once. "chunked" holds the logits of an eighth of every
        row, from `LEAST_POSITIONS` to `CHUNK_POSITIONS` positions. JAX differentiates "reference", which keeps them.
      z_loss_weight: weight of the squared log-normaliser. 0 is the plain cross-entropy.
      ctx: the axes that shard the rows of the head. Each device computes the logits of its rows. Their maximum, the sum
        of exponentials, the target's logit and the gradient of the hidden states are reduced over the axes.
      vocab_size: number of tokens, as in `Vocab.size`.
    """

    implementation: str
    z_loss_weight: float = 0.0
    ctx: ParallelContext = SINGLE_DEVICE
    vocab_size: int = 0


def cross_entropy(
    hidden_BTD: jax.Array,
    *,
    head_VD: jax.Array,
    targets_BT: jax.Array,
    weights_BT: jax.Array,
    options: LossOptions,
) -> SumAndCount:
    """Returns the sums over tokens of weight * (nll + z_loss_weight * log_normaliser^2) and of weight, in fp32.

    With logits z, log_normaliser = log(sum(exp(z))), and nll = log_normaliser - z[target]. Logits, softmax and sums are
    fp32. While the forward pass has the logits, it also computes the gradients of `hidden_BTD` and `head_VD`, in their
    dtypes. The weights have no gradient. This supports reverse mode only. For forward mode, use "reference" on a single
    device. Under `passes.autocast` with a loss scale, the gradient products of an fp32 call stay fp32, because they are
    still unscaled.

    Args:
      hidden_BTD: input of the head, fp32 or bf16, with T sharded as `options.ctx` shards it between layers.
      head_VD: this device's rows of the output projection, or of the embedding table if they are tied.
      targets_BT: int32 ids below V, also at positions of weight 0.
      weights_BT: fp32 weight of each target.
      options: static options.

    Source: for a split vocabulary Shoeybi et al. (Megatron-LM), arXiv 1909.08053, section 3.
    """
    ctx = options.ctx
    if ctx != SINGLE_DEVICE:
        # backward the sum over stages, on other nodes, comes last, when each device holds only its part of T
        hidden_BTD = ctx.enter_tensor_region(collectives.copy_to_tensor_region(hidden_BTD, ctx.pipe))
    vocab = Vocab(ctx.vocab, options.vocab_size)
    arrays = hidden_BTD, head_VD, targets_BT, weights_BT
    loss_sum = OP.run(options.implementation, *arrays, options.z_loss_weight, vocab)
    return SumAndCount(loss_sum, jnp.sum(weights_BT))


def describe_call(hidden_shape: tuple[int, ...], vocab_rows: int, *, dtype: Any) -> CallSpec:
    """Returns the spec of a call.

    Args:
      hidden_shape: shape (B, T, D) of the head's input on one device.
      vocab_rows: number of rows of the head on one device.
      dtype: dtype of both.
    """
    return {"hidden_shape": tuple(hidden_shape), "vocab_rows": vocab_rows, "dtype": jnp.dtype(dtype).name}


def _chunk(seq_len: int) -> int:
    if seq_len <= CHUNK_POSITIONS:
        return seq_len
    return min(max(LEAST_POSITIONS, seq_len // 8), CHUNK_POSITIONS)


def _in_chunks(chunk_of: Callable[[int], int]) -> Callable[..., jax.Array]:
    """Returns a function that sums the losses over chunks of `chunk_of(T)` positions of every row."""

    def _loss(hidden_BTD, head_VD, targets_BT, weights_BT, z_loss_weight, vocab):
        static = (z_loss_weight, chunk_of(hidden_BTD.shape[1]), vocab)
        return _loss_sum(hidden_BTD, head_VD, targets_BT, weights_BT, static)

    return _loss


def _reference(hidden_BTD, head_VD, targets_BT, weights_BT, z_loss_weight, vocab):
    logits_BTV, axes = logits(hidden_BTD, head_VD, vocab=vocab), vocab.axes
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
    z_loss_weight, chunk, vocab = static

    def add(total, rows):
        logits_RV = logits(rows[0], head_VD, vocab=vocab)
        return total + _softmax_loss(logits_RV, rows[1], rows[2], z_loss_weight, vocab.axes)[0], None

    return _over_chunks(add, jnp.float32(0.0), (hidden_BTD, targets_BT, weights_BT), chunk)[0]


def _forward(hidden_BTD, head_VD, targets_BT, weights_BT, static):
    z_loss_weight, chunk, vocab = static
    precision = None
    if is_loss_scaled() and hidden_BTD.dtype == jnp.float32:
        precision = jax.lax.DotAlgorithmPreset.F32_F32_F32  # which autocast does not change

    def add(sums, rows):
        hidden_RD, targets_R, weights_R = rows
        total, dhead_VD = sums
        logits_RV = logits(hidden_RD, head_VD, vocab=vocab)
        loss, dlogits_RV = _softmax_loss(logits_RV, targets_R, weights_R, z_loss_weight, vocab.axes)
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
