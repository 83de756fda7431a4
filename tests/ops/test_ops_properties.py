"""One suite of properties over every implementation of every op.

NKI's kernel runs as its reference, in its layouts, and Triton's in Pallas's interpret mode. cuDNN cannot be traced
without its library: only its arguments are tested.
"""

import functools
import math
import re
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from hlat_jax.ops import attention, chunked_attention, cross_entropy, norm, rope, swiglu
from hlat_jax.ops.gpu import attention as gpu
from hlat_jax.ops.registry import OPS
from hlat_jax.parallel.collectives import ParallelContext
from hlat_jax.passes.autocast_pass import autocast
from hlat_jax.step import loss_scale as scaling

# One fp32 rounding is 6e-8 of a value; a few hundred of them add up in any order in these sums.
FP32 = {"rtol": 2e-5, "atol": 5e-6}
# One bf16 rounding is 4e-3 of a value; operands, probabilities and results are each rounded once.
BF16 = {"rtol": 2e-2, "atol": 2e-2}


def of_op(name):
    """Returns (q, k, v, segment_ids, window) -> output of an implementation."""

    def run(q, k, v, segment_ids=None, window=None):
        window = jnp.asarray(window) if isinstance(window, np.int32) else window
        return attention.attention(
            q, k_BSKH=k, v_BSKH=v, segment_ids_BT=segment_ids, implementation=name, window=window
        )

    return run


def interpreted(q, k, v, segment_ids=None, window=None):
    assert window is None
    return gpu.triton(q, k, v, segment_ids_BT=segment_ids, interpret=jax.default_backend() == "cpu")


SUBJECTS = {name: of_op(name) for name in attention.OP.names if name != "cudnn"} | {"triton": interpreted}
LENGTHS = {"nki": 512, "triton": 128}  # rows must be a multiple; of the others any will do
WINDOWS = {"nki": (None,), "triton": (None,)}
ANY_WINDOWS = (None, 65, np.int32(65))  # for the others; the last becomes an argument of the program


@pytest.fixture(autouse=True)
def _many_small_blocks(monkeypatch):
    monkeypatch.setattr(chunked_attention, "BLOCK", 64)
    monkeypatch.setattr(cross_entropy, "CHUNK_POSITIONS", 3)


def normal(*shape, seed=0):
    return np.random.default_rng((seed, *shape)).standard_normal(shape).astype(np.float32)


def inputs(num_rows, seq_len, num_heads=4, num_kv_heads=2, head_dim=8):
    """Returns queries, keys, values and the cotangent of the output."""
    heads = (num_heads, num_kv_heads, num_kv_heads, num_heads)
    return [normal(num_rows, seq_len, n, head_dim, seed=seed) for seed, n in enumerate(heads)]


def documents(num_rows, seq_len):
    """Documents of uneven length, other cuts in each row."""
    cuts = [sorted(np.random.default_rng(row).choice(np.arange(1, seq_len), 3, False)) for row in range(num_rows)]
    return np.stack([np.searchsorted(c, np.arange(seq_len), side="right") + 1 for c in cuts]).astype(np.int32)


def value_and_grads(run):
    """Returns (*operands, cotangent) -> (output, *gradients of the operands), compiled."""

    @jax.jit
    def both(*arrays):
        *operands, dout = arrays
        out, pullback = jax.vjp(run, *operands)
        return out, *pullback(dout)

    return both


def with_grads(run, arrays, segment_ids=None, window=None):
    return value_and_grads(lambda *x: run(*x, segment_ids, window))(*arrays)


def float64_attention(arrays, segment_ids=None, window=None):
    """Value and gradients in NumPy, head by head: softmax(S) V and its derivative, written out."""
    q, k, v, dout = (x.astype(np.float64) for x in arrays)
    places = np.arange(q.shape[1])
    ahead = places[:, None] - places[None, :]
    out, dq, dk, dv = (np.zeros_like(x) for x in (q, q, k, v))
    for b in range(q.shape[0]):
        seen = (ahead >= 0) & (ahead < (window or len(places)))
        if segment_ids is not None:
            seen &= segment_ids[b][:, None] == segment_ids[b][None, :]
        for n in range(q.shape[2]):
            kv = n // (q.shape[2] // k.shape[2])
            scores = np.where(seen, q[b, :, n] @ k[b, :, kv].T / math.sqrt(q.shape[3]), -np.inf)
            probs = np.exp(scores - scores.max(-1, keepdims=True))
            probs /= probs.sum(-1, keepdims=True)
            out[b, :, n] = probs @ v[b, :, kv]
            dprobs = dout[b, :, n] @ v[b, :, kv].T
            dscores = probs * (dprobs - (probs * dprobs).sum(-1, keepdims=True)) / math.sqrt(q.shape[3])
            dq[b, :, n] = dscores @ k[b, :, kv]
            dk[b, :, kv] += dscores.T @ q[b, :, n]
            dv[b, :, kv] += probs.T @ dout[b, :, n]
    return out, dq, dk, dv


# The properties. Each takes an implementation and the length of its rows, and raises where it does not hold.


def is_float64(run, seq_len, *, packed, window):
    arrays = inputs(2, seq_len)
    ids = documents(*arrays[0].shape[:2]) if packed else None
    actual = with_grads(run, arrays, ids, window)
    for mine, exact in zip(actual, float64_attention(arrays, ids, window), strict=True):
        np.testing.assert_allclose(mine, exact, **FP32)


def is_right_at_the_end_of_a_long_row(run):
    arrays = inputs(1, 2048, num_heads=1, num_kv_heads=1, head_dim=4)
    q, k, v = arrays[:3]
    out = jax.jit(run)(q, k, v)
    for place in (0, 1023, 1024, 2047):
        scores = k[0, : place + 1, 0].astype(np.float64) @ q[0, place, 0] / 2
        probs = np.exp(scores - scores.max())
        np.testing.assert_allclose(out[0, place, 0], probs @ v[0, : place + 1, 0] / probs.sum(), **FP32)


def is_the_same_over_devices(run, seq_len):
    arrays = inputs(2, seq_len)
    spec = P("data", None, "tensor")
    everywhere = over_devices(lambda *arrays: with_grads(run, arrays), (spec,) * 4, (spec,) * 4)
    for mine, whole in zip(everywhere(*arrays), with_grads(run, arrays), strict=True):
        np.testing.assert_allclose(mine, whole, **FP32)


def over_devices(local, in_specs, out_specs):
    """Returns what each of 2 x 2 devices does with its own part, compiled."""
    mesh = jax.make_mesh((2, 2), ("data", "tensor"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    return jax.jit(jax.shard_map(local, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False))


@pytest.mark.parametrize("name", SUBJECTS)
def test_attention_of_packed_rows_is_that_of_float64(name):
    for window in WINDOWS.get(name, ANY_WINDOWS):
        is_float64(SUBJECTS[name], LENGTHS.get(name, 150), packed=True, window=window)


@pytest.mark.slow
@pytest.mark.parametrize("name", SUBJECTS)
def test_attention_satisfies_the_other_properties(name):
    for window in WINDOWS.get(name, ANY_WINDOWS):
        is_float64(SUBJECTS[name], LENGTHS.get(name, 150), packed=False, window=window)
    is_right_at_the_end_of_a_long_row(SUBJECTS[name])
    is_the_same_over_devices(SUBJECTS[name], LENGTHS.get(name, 150))


def test_attention_of_bf16_is_close_to_float64_and_finite_for_large_scores():
    arrays = [x.astype(jnp.bfloat16) for x in inputs(2, 40, num_heads=6)]
    q, k, v, _ = arrays
    for name in ("einsum", "blocked", "chunked"):
        run = SUBJECTS[name]
        out = jax.jit(run)(q, k, v)
        assert out.dtype == jnp.bfloat16
        np.testing.assert_allclose(np.asarray(out, np.float32), float64_attention(arrays)[0], **BF16)

        def huge(q, run=run):
            return run(q * jnp.bfloat16(1e4), k * jnp.bfloat16(1e4), v).astype(jnp.float32).sum()

        assert np.isfinite(np.asarray(jax.jit(jax.grad(huge))(q), np.float32)).all()


def test_invalid_windows_are_refused():
    q, k, v, _ = inputs(1, 512)
    with pytest.raises(ValueError, match=r"window=0 must be at least 1"):
        of_op("einsum")(q, k, v, None, 0)
    for name in WINDOWS:
        with pytest.raises(ValueError, match=r"cannot serve this call, since the kernel .* a window \(window=65\)"):
            of_op(name)(q, k, v, None, 65)
        with pytest.raises(
            ValueError, match=r"cannot serve this call, since the kernel .* a window \(window=by layer\)"
        ):
            of_op(name)(q, k, v, None, np.int32(65))


# The loss, likewise.


def float64_loss(hidden, head, targets, weights, z_loss_weight):
    """Value and gradients in NumPy."""
    logits = hidden.astype(np.float64) @ head.T.astype(np.float64)
    log_z = np.log(np.exp(logits).sum(-1))
    losses = log_z - np.take_along_axis(logits, targets[..., None], -1)[..., 0] + z_loss_weight * log_z**2
    dlogits = np.exp(logits - log_z[..., None]) * (1 + 2 * z_loss_weight * log_z)[..., None]
    dlogits = (dlogits - np.eye(len(head))[targets]) * weights[..., None]
    return (weights * losses).sum(), dlogits @ head, np.einsum("btv,btd->vd", dlogits, hidden)


def loss_inputs():
    hidden, head = normal(2, 10, 16, seed=5), normal(48, 16, seed=6)
    targets = np.random.default_rng(7).integers(0, 48, (2, 10)).astype(np.int32)
    return hidden, head, targets, np.random.default_rng(8).choice([0.0, 0.5, 1.0], (2, 10)).astype(np.float32)


def loss_and_grads(name, *, z_loss_weight=0.0, axes=()):
    """Returns (hidden, head, targets, weights) -> (loss, two gradients, count): a cotangent of 3, compiled."""
    options = cross_entropy.LossOptions(name, z_loss_weight, ParallelContext(tensor=axes))

    def local(hidden, head, targets, weights):
        def loss(hidden, head):
            fields = {"targets_BT": targets, "weights_BT": weights, "options": options}
            total, count = cross_entropy.cross_entropy(hidden, head_VD=head, **fields)
            return 3 * total, count

        (total, count), grads = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(hidden, head)
        return total, *grads, count

    if axes:
        mesh = jax.make_mesh((4,), axes, axis_types=(jax.sharding.AxisType.Auto,))
        specs = {"in_specs": (P(), P(axes), P(), P()), "out_specs": (P(), P(), P(axes), P())}
        local = jax.shard_map(local, mesh=mesh, **specs, check_vma=False)
    return jax.jit(local)


def loss_is_float64(name, *, z_loss_weight, axes):
    arrays = loss_inputs()
    *found, _ = loss_and_grads(name, z_loss_weight=z_loss_weight, axes=axes)(*arrays)
    for mine, expected in zip(found, float64_loss(*arrays, z_loss_weight), strict=True):
        np.testing.assert_allclose(mine, 3 * expected, rtol=1e-5, atol=3e-5)


@pytest.mark.parametrize("name", cross_entropy.OP.names)
def test_loss_matches_float64(name):
    loss_is_float64(name, z_loss_weight=0.0, axes=())
    for axes in ((), ("tensor",)):
        loss_is_float64(name, z_loss_weight=0.1, axes=axes)


def test_cross_entropy_of_bf16_keeps_logits_in_fp32():
    *exact, targets, weights = loss_inputs()
    low = [x.astype(jnp.bfloat16) for x in exact]
    wanted = float64_loss(*(np.asarray(x, np.float64) for x in low), targets, weights, 0.1)
    for name in ("dense", "chunked"):
        total, *grads, count = loss_and_grads(name, z_loss_weight=0.1)(*low, targets, weights)
        assert total.dtype == count.dtype == jnp.float32
        np.testing.assert_allclose(total, 3 * wanted[0], rtol=1e-6)  # products of bf16 are exact in fp32
        assert {grad.dtype for grad in grads} == {jnp.dtype(jnp.bfloat16)}
        for grad, expected, atol in zip(grads, wanted[1:], (2e-2, 5e-2), strict=True):
            np.testing.assert_allclose(np.asarray(grad, np.float32), 3 * expected, rtol=2e-2, atol=atol)


def test_chunked_cross_entropy_never_holds_all_logits(monkeypatch):
    monkeypatch.setattr(cross_entropy, "CHUNK_POSITIONS", 8)
    shapes = ((2, 64, 16), np.float32), ((1000, 16), np.float32), ((2, 64), np.int32), ((2, 64), np.float32)

    def temp_bytes(name):
        compiled = loss_and_grads(name).lower(*(jax.ShapeDtypeStruct(*shape) for shape in shapes)).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    all_logits_bytes = 2 * 64 * 1000 * 4
    assert temp_bytes("dense") > all_logits_bytes
    assert temp_bytes("chunked") < all_logits_bytes


@pytest.mark.slow
def test_fp16_gradient_reaches_every_row_of_the_head(monkeypatch):
    monkeypatch.setattr(cross_entropy, "CHUNK_POSITIONS", 24)
    hidden, head = normal(1, 64, 16, seed=1), 4 * normal(512, 16, seed=2)
    targets = np.argmax(hidden @ head.T, -1).astype(np.int32)  # every other token has a small probability

    def mean(arrays):
        fields = {"targets_BT": targets, "weights_BT": np.ones((1, 64), np.float32)}
        loss, count = cross_entropy.cross_entropy(
            arrays[0], head_VD=arrays[1], **fields, options=cross_entropy.LossOptions("chunked")
        )
        return loss / count

    exact = jax.grad(mean)((hidden, head))
    for scale in (2.0**-10, 2.0**15):  # the head's gradients are made before the scale comes, and do not depend on it
        _, grads, finite = scaling.value_and_grad(autocast(mean, "fp16"))(scaling.initial(scale=scale), (hidden, head))
        assert finite
        errors = np.linalg.norm(grads[1] - exact[1], axis=1) / np.linalg.norm(exact[1], axis=1)
        # logits of up to 80, rounded to 11 bits as their factors are, are off by up to 0.1; a lost row is off by 1
        assert errors.max() < 0.15


# RMSNorm, SwiGLU and RoPE, likewise.


EPS = 0.1  # large, so that it counts
PLACES = 2**16 - 3 + 7 * np.arange(38)
FREQUENCIES = rope.rope_frequencies(8, theta=1e4)


def run_rms_norm(x, scale, eps=EPS):
    return norm.rms_norm(x, scale=scale, eps=eps)


def run_rope(x, places=PLACES):
    places_BT = jnp.broadcast_to(jnp.asarray(places[: x.shape[1]], jnp.int32), x.shape[:2])
    cos, sin = rope.rope_tables(places_BT, frequencies=FREQUENCIES)
    return rope.apply_rope(x, cos=cos, sin=sin)


def float64_rms_norm(x, scale, dout):
    inverse = 1 / np.sqrt((x**2).mean(-1, keepdims=True) + EPS)
    unit, dunit = x * inverse, dout * scale
    dx = inverse * (dunit - unit * (dunit * unit).mean(-1, keepdims=True))
    return unit * scale, dx, (dout * unit).sum((0, 1))


def float64_swiglu(gate, up, dout):
    sigmoid = 1 / (1 + np.exp(-gate))
    slope = sigmoid * (1 + gate * (1 - sigmoid))
    return gate * sigmoid * up, dout * up * slope, dout * gate * sigmoid


def float64_rope(x, dout, *, angles=None):
    """Pairs as complex numbers, which a rotation multiplies."""
    if angles is None:  # as the contract has them: products in fp32
        angles = (PLACES.astype(np.float32)[:, None] * FREQUENCIES).astype(np.float64)
    turn = np.exp(1j * angles)[:, None]

    def turned(x, turn):
        first, second = np.split(x, 2, axis=-1)
        z = (first + 1j * second) * turn
        return np.concatenate([z.real, z.imag], axis=-1)

    return turned(x, turn), turned(dout, turn.conj())


class LayerOp(NamedTuple):
    """An op that a decoder layer has beside attention."""

    run: Callable  # (*operands) -> output, of the first operand's shape
    exact: Callable  # (*operands, cotangent) -> output and gradients, in NumPy
    shapes: tuple  # of the operands; no power of two, and more than one block of a kernel
    shapes_bf16: tuple  # others, for bf16
    roundings: int  # to bf16 on the longest way to a result, each at most 2^-8 of the largest
    specs: tuple  # of the operands over devices

    def arrays(self, shapes, dtype=np.float32):
        """Returns operands and the cotangent."""
        return [normal(*shape, seed=seed).astype(dtype) for seed, shape in enumerate((*shapes, shapes[0]))]


SPLIT = P("data", None, "tensor")
LAYER_OPS = {
    "rms_norm": LayerOp(
        run_rms_norm,
        float64_rms_norm,
        ((2, 38, 48), (48,)),
        ((1, 3, 4096), (4096,)),  # wide: a sum of squares in bf16 would stop growing at 256
        2,
        (P("data", "tensor"), P()),
    ),
    "swiglu": LayerOp(swiglu.swiglu, float64_swiglu, ((2, 38, 40),) * 2, ((1, 3, 700),) * 2, 3, (SPLIT, SPLIT)),
    "rope": LayerOp(run_rope, float64_rope, ((2, 38, 4, 8),), ((2, 38, 4, 8),), 1, (SPLIT,)),
}


@functools.cache
def compiled(key):
    return value_and_grads(LAYER_OPS[key].run)


def layer_op_is_float64(one, both):
    arrays = one.arrays(one.shapes)
    for mine, exact in zip(both(*arrays), one.exact(*(x.astype(np.float64) for x in arrays)), strict=True):
        np.testing.assert_allclose(mine, exact, **FP32)


def layer_op_of_bf16_is_near_float64(one, both):
    arrays = one.arrays(one.shapes_bf16, jnp.bfloat16)
    for mine, exact in zip(both(*arrays), one.exact(*(x.astype(np.float64) for x in arrays)), strict=True):
        assert mine.dtype == jnp.bfloat16
        bound = one.roundings * 2.0**-8 * np.abs(exact).max()
        np.testing.assert_allclose(np.asarray(mine, np.float64), exact, rtol=0, atol=bound)


def layer_op_keeps_rows_apart(one, both):
    arrays = one.arrays(one.shapes)
    is_of_rows = [x.ndim > 1 for x in arrays]
    lost = [np.concatenate([x[:1], np.full_like(x[1:], np.nan)]) if x.ndim > 1 else x for x in arrays]
    for mine, whole, has_rows in zip(both(*lost), both(*arrays), [True, *is_of_rows[:-1]], strict=True):
        if has_rows:
            np.testing.assert_array_equal(mine[:1], whole[:1])


def layer_op_is_the_same_over_devices(one, both):
    arrays = one.arrays(one.shapes)

    def local(*arrays):
        out, *grads = both(*arrays)
        whole = [jax.lax.psum(g, ("data", "tensor")) if s == P() else g for g, s in zip(grads, one.specs, strict=True)]
        return out, *whole

    everywhere = over_devices(local, (*one.specs, one.specs[0]), (one.specs[0], *one.specs))
    for mine, whole in zip(everywhere(*arrays), both(*arrays), strict=True):
        np.testing.assert_allclose(mine, whole, **FP32)


LAYER_PROPERTIES = (
    layer_op_is_float64,
    layer_op_of_bf16_is_near_float64,
    layer_op_keeps_rows_apart,
    layer_op_is_the_same_over_devices,
)


@pytest.mark.parametrize("key", LAYER_OPS)
def test_layer_op_satisfies_the_properties(key):
    for holds in LAYER_PROPERTIES:
        holds(LAYER_OPS[key], compiled(key))


def test_every_registered_op_is_tested():
    assert set(OPS) == {"attention", "cross_entropy"}


def test_rope_is_accurate_at_positions_above_65536():
    """Against angles without any rounding; that of a product in fp32 is 2^-24 of it."""
    op = LAYER_OPS["rope"]
    arrays = op.arrays(op.shapes)
    angles = PLACES[:, None] * 1e4 ** -(np.arange(4) / 4)
    assert angles.max() > 2**16
    results = compiled("rope")(*arrays)
    for mine, exact, x in zip(results, op.exact(*arrays, angles=angles), arrays, strict=True):
        # of a pair no longer than twice its larger half; the frequency is rounded as well
        np.testing.assert_allclose(mine, exact, rtol=0, atol=2 * 2.0**-24 * angles.max() * 2 * np.abs(x).max())


def test_layer_op_saves_only_its_inputs_for_the_backward_pass():
    for key in ("rms_norm", "swiglu"):
        op = LAYER_OPS[key]
        operands = op.arrays(op.shapes_bf16, jnp.bfloat16)[:-1]
        kept = jax.eval_shape(lambda *x, run=op.run: jax.tree.leaves(jax.vjp(run, *x)[1]), *operands)
        assert sum(x.size * x.dtype.itemsize for x in kept) <= sum(x.nbytes for x in operands), key


def test_mismatched_operands_are_refused_with_their_shapes():
    x, cos = jnp.ones((1, 3, 2, 8)), jnp.ones((1, 3, 4))
    with pytest.raises(ValueError, match=r"model.head_dim=7 must be even, since rotary embeddings rotate pairs"):
        rope.apply_rope(x[..., :7], cos=cos, sin=cos)
    with pytest.raises(ValueError, match=r"cos has width 1 and sin 4, but head_dim=8 has 4 pairs"):
        rope.apply_rope(x, cos=cos[..., :1], sin=cos)


def test_triton_kernels_are_in_the_program_for_cuda():
    arrays, ids = inputs(1, 128), documents(1, 128)
    traced = jax.jit(lambda *x: with_grads(of_op("triton"), x, ids)).trace(*arrays)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("custom_call @__gpu$xla.gpu.triton") == 3  # forward; sums of the backward pass; gradients


@pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs a GPU: JAX_PLATFORMS=cuda,cpu")
@pytest.mark.parametrize("heads", [(4, 4, 64), (8, 2, 128), (6, 2, 32)], ids=["mha", "gqa", "small"])
@pytest.mark.parametrize(
    ("name", "dtype", "packed", "window"),
    [
        ("cudnn", jnp.bfloat16, False, None),
        ("cudnn", jnp.bfloat16, False, 100),
        ("triton", jnp.bfloat16, False, None),
        ("triton", jnp.bfloat16, True, None),
        ("triton", jnp.float32, True, None),
    ],
)
def test_kernels_of_a_gpu_equal_float64(name, dtype, packed, window, heads):
    """Of operands that bf16 holds: what differs is the kernel's own rounding, twice 2^-8 of a value at most."""
    rounded = [jnp.asarray(x, jnp.bfloat16).astype(dtype) for x in inputs(2, 512, *heads)]
    call = attention.describe_call(rounded[0].shape, heads[1], dtype=dtype, has_segments=packed, window=window)
    fastest = "einsum" if dtype == jnp.float32 and heads[2] == 128 else "triton" if packed else "cudnn"
    assert attention.OP.choose("auto", "cuda", call=call).name == fastest
    ids = documents(2, 512) if packed else None
    exact = float64_attention([np.asarray(x, np.float64) for x in rounded], ids, window)
    results = with_grads(of_op("einsum" if fastest == "einsum" else name), rounded, ids, window)
    for mine, whole in zip(results, exact, strict=True):
        assert np.linalg.norm(np.asarray(mine, np.float64) - whole) <= 2**-7 * np.linalg.norm(whole)


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="cuDNN is there")
def test_missing_cudnn_is_skipped_by_auto_and_refused_by_name():
    call = attention.describe_call((1, 128, 4, 64), 2, dtype=jnp.bfloat16, has_segments=False)
    choice = attention.OP.choose("auto", "cuda", call=call)
    assert choice.name == "triton"
    assert re.search("cuDNN is not detected|No supported GPU", choice.passed_over["cudnn"])  # the latter: JAX 0.11
    with pytest.raises(
        ValueError, match=r"model.attention='cudnn' cannot serve this call, since (cuDNN|No supported GPU)"
    ):
        attention.OP.choose("cudnn", "cuda", call=call)


def test_cudnn_receives_the_arguments_of_the_call(monkeypatch):
    asked = []

    def fake(q, k, v, bias, mask, **options):
        asked.append((q.shape, k.shape, q.dtype, options))
        return q

    monkeypatch.setattr(jax.nn, "dot_product_attention", fake)
    call = attention.describe_call((2, 128, 4, 64), 2, dtype=jnp.bfloat16, has_segments=False, window=32)
    assert gpu.cudnn_unsupported_reasons(**call) == []
    options = {"is_causal": True, "scale": None, "local_window_size": (31, 0), "implementation": "cudnn"}
    assert asked == [((2, 128, 4, 64), (2, 128, 2, 64), jnp.bfloat16, options)]
    [reason] = gpu.cudnn_unsupported_reasons(**call | {"has_segments": True})
    assert "supports segment ids (data.packing=documents) only as a T x T mask" in reason


def test_unsupported_triton_calls_are_refused_with_the_reason():
    call = attention.describe_call((1, 128, 4, 64), 2, dtype=jnp.bfloat16, has_segments=True)
    assert gpu.triton_unsupported_reasons(**call) == []
    for change, wanted in (
        ({"q_shape": (1, 100, 4, 64)}, "100 is not a multiple of 128"),
        ({"q_shape": (1, 128, 4, 256)}, "model.head_dim=256 is above 128 in bfloat16"),
        ({"q_shape": (1, 128, 4, 128), "dtype": jnp.float32}, "model.head_dim=128 is above 64 in float32"),
        ({"dtype": "float64"}, "dtype float64 is not one of"),
    ):
        [reason] = gpu.triton_unsupported_reasons(**call | change)
        assert wanted in reason


def test_chunked_attention_never_materializes_full_scores():
    """Scores and probabilities of T x T are what `einsum` keeps for its backward pass; chunked has none of them."""
    b, t, n, h = 1, 1024, 4, 16

    def temp_bytes(name):
        shapes = [jax.ShapeDtypeStruct((b, t, n, h), np.float32)] * 4
        compiled = jax.jit(lambda *x: with_grads(SUBJECTS[name], x)).lower(*shapes).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    scores_bytes = b * n * t * t * 4
    assert temp_bytes("einsum") > 2 * scores_bytes
    assert temp_bytes("chunked") < scores_bytes / 4


def test_saving_named_residuals_avoids_a_second_forward_pass():
    arrays = inputs(1, 150)
    policy = jax.checkpoint_policies.save_only_these_names

    def num_exps(*names):
        run = jax.checkpoint(lambda *x: SUBJECTS["chunked"](*x), policy=policy(*names))
        jaxpr = jax.make_jaxpr(lambda *x: with_grads(lambda q, k, v, *_: run(q, k, v), x))(*arrays)
        return str(jaxpr).count(" exp ")

    assert num_exps("attention_out", "attention_lse") < num_exps()


def test_chunked_attention_visits_only_unmasked_block_pairs():
    places = np.arange(4 * 64)
    ahead = places[:, None] - places[None, :]
    for window in (1, 64, 65, 66, 200, None):
        seen = (ahead >= 0) & (ahead < (window or len(places)))
        cells = seen.reshape(4, 64, 4, 64).any((1, 3))
        pairs = [tuple(pair) for pair in chunked_attention.block_pairs(4, block=64, window=window).tolist()]
        assert len(pairs) == len(set(pairs))
        assert set(pairs) == {(i, j) for i in range(4) for j in range(4) if cells[i, j]}, window
        firsts = dict(reversed(pairs))
        assert firsts == {i: i for i in range(4)}  # its own block first: there a query sees itself
