"""Ops against float64 NumPy, PyTorch and transformers, between implementations, and as lowered for Neuron."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

from hlat_jax.ops import attention, cross_entropy, linear, norm, rope, swiglu
from hlat_jax.parallel.collectives import SINGLE_DEVICE

# One fp32 rounding is 6e-8 of a value; a few hundred of them add up in any order in these sums.
FP32 = {"rtol": 2e-5, "atol": 2e-6}
# One bf16 rounding is 4e-3 of a value; operands, probabilities and results are each rounded once.
BF16 = {"rtol": 2e-2, "atol": 2e-2}


def normal(*shape, seed=0):
    return np.random.default_rng((seed, *shape)).standard_normal(shape).astype(np.float32)


EINSUMS = {
    "BTD,DKXH->BTKXH": ((2, 5, 16), (16, 2, 4, 8)),
    "BTD,DCF->BTCF": ((2, 5, 16), (16, 2, 24)),
    "BTNH,NHD->BTD": ((2, 5, 4, 8), (4, 8, 16)),
    "BTF,FD->BTD": ((2, 5, 24), (24, 16)),
}


def test_products_on_one_device_equal_their_einsum():
    for equation, (x_shape, shape) in EINSUMS.items():
        x = normal(*x_shape)
        param = nnx.Param(normal(*shape, seed=1), out_sharding=("embed",) * len(shape), eager_sharding=False)
        wanted = np.einsum(equation, x.astype(np.float64), np.asarray(param[...], np.float64))
        for product in (linear.column_parallel, linear.row_parallel):
            np.testing.assert_allclose(product(equation, x, param, SINGLE_DEVICE), wanted, **FP32)


def attention_inputs():
    b, t, n, k, h = 2, 40, 6, 2, 8
    return normal(b, t, n, h, seed=1), normal(b, t, k, h, seed=2), normal(b, t, k, h, seed=3)


@functools.partial(jax.jit, static_argnames="implementation")
def attend(q, k, v, segment_ids=None, implementation="einsum"):
    return attention.attention(q, k_BSKH=k, v_BSKH=v, segment_ids_BT=segment_ids, implementation=implementation)


def normed(x, scale, *, eps):
    return norm.rms_norm(x, scale=scale, eps=eps, implementation="recomputed")


def test_rms_norm_of_bf16_rounds_before_the_scale():
    x, scale = normal(64, 16).astype(jnp.bfloat16), normal(16, seed=1).astype(jnp.bfloat16)
    module = LlamaRMSNorm(16, eps=1e-5).bfloat16()
    module.weight.data = torch.tensor(np.asarray(scale, np.float32)).bfloat16()
    expected = module(torch.tensor(np.asarray(x, np.float32)).bfloat16()).detach().float().numpy()
    actual = normed(x, scale, eps=1e-5)
    assert actual.dtype == jnp.bfloat16
    # exact but for elements whose quotient lies on a rounding boundary
    assert np.mean(np.asarray(actual, np.float32) == expected) > 0.99
    np.testing.assert_allclose(np.asarray(actual, np.float32), expected, rtol=2**-7)


def test_rope_frequencies_of_llama3_equal_transformers():
    for original_positions in (32, 8192):
        scaling = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0}
        scaling |= {"high_freq_factor": 4.0, "original_max_position_embeddings": original_positions}
        config = LlamaConfig(hidden_size=256, num_attention_heads=2, rope_parameters=scaling)
        expected, attention_factor = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
        stretch = rope.Llama3Scaling(8.0, 1.0, 4.0, original_positions)
        actual = rope.rope_frequencies(128, theta=500000.0, scaling=stretch)
        assert attention_factor == 1.0
        assert actual.dtype == np.float32
        np.testing.assert_allclose(actual, expected, rtol=1e-6)  # transformers computes in fp32, this in float64


def test_apply_rope_matches_transformers_and_its_gradient_rotates_back():
    x_BTNH = normal(2, 7, 3, 16)
    positions_BT = np.stack([np.arange(7), np.arange(7) + 4000]).astype(np.int32)
    cos, sin = rope.rope_tables(positions_BT, frequencies=rope.rope_frequencies(16, theta=10000.0))
    actual, vjp = jax.vjp(lambda x: rope.apply_rope(x, cos=cos, sin=sin, implementation="reference"), x_BTNH)
    cos_torch, sin_torch = (torch.tensor(np.concatenate([x, x], -1)) for x in (cos, sin))
    expected, _ = apply_rotary_pos_emb(
        torch.tensor(x_BTNH), torch.tensor(x_BTNH), cos_torch, sin_torch, unsqueeze_dim=2
    )
    np.testing.assert_allclose(actual, expected, **FP32)
    np.testing.assert_allclose(vjp(actual)[0], x_BTNH, **FP32)  # a rotation's transpose is its inverse
    angles = positions_BT[..., None] * (10000.0 ** -(np.arange(8) / 8))
    # the product of position and frequency is rounded to fp32: 6e-8 of 4006 radians
    np.testing.assert_allclose(cos, np.cos(angles), atol=5e-4)
    np.testing.assert_allclose(sin[0], np.sin(angles[0]), atol=1e-6)


MISFITS = (
    {"k": (1, 128, 2, 8), "v": (1, 128, 2, 8)},
    {"v": (1, 256, 4, 8)},
    {"k": (1, 256, 3, 8), "v": (1, 256, 3, 8)},
    {"ids": (1, 1)},
    {"q": (256, 8, 8)},
)


def test_attention_refuses_arguments_that_do_not_fit_together():
    for changes in MISFITS:
        shapes = {"q": (1, 256, 8, 8), "k": (1, 256, 2, 8), "v": (1, 256, 2, 8), "ids": (1, 256)} | changes
        q, k, v = (jnp.ones(shapes[name]) for name in "qkv")
        with pytest.raises(ValueError, match=r"queries float32.*must be \[B, T, N, H\], \[B, T, K, H\] twice"):
            attend(q, k, v, jnp.zeros(shapes["ids"], jnp.int32), "chunked")


def test_attention_of_bf16_is_close_to_float64_and_finite_for_large_scores():
    q, k, v = (x.astype(jnp.bfloat16) for x in attention_inputs())
    expected = attend(*(x.astype(jnp.float32) for x in (q, k, v)))
    for implementation in ("einsum", "blocked", "chunked"):
        out = attend(q, k, v, None, implementation)
        assert out.dtype == jnp.bfloat16
        np.testing.assert_allclose(np.asarray(out, np.float32), expected, **BF16)

        def huge(q, implementation=implementation):
            large = q * jnp.bfloat16(1e4), k * jnp.bfloat16(1e4)
            return attend(*large, v, None, implementation).astype(jnp.float32).sum()

        assert np.isfinite(np.asarray(jax.jit(jax.grad(huge))(q), np.float32)).all()


def test_auto_resolves_to_the_best_implementation_per_platform():
    for op, on_cpu, elsewhere in (
        (attention.OP, "blocked", "einsum"),
        (cross_entropy.OP, "chunked", "dense"),
        (norm.OP, "recomputed", "recomputed"),
        (swiglu.OP, "recomputed", "recomputed"),
        (rope.OP, "reference", "reference"),
    ):
        chosen = [op.choose("auto", platform).name for platform in ("cpu", "cuda", "neuron")]
        assert chosen == [on_cpu, elsewhere, elsewhere], op.key


def loss_inputs(num_rows=2, seq_len=11):
    hidden, head = normal(num_rows, seq_len, 16, seed=5), normal(50, 16, seed=6)
    targets = np.random.default_rng(7).integers(0, 50, (num_rows, seq_len)).astype(np.int32)
    weights = np.random.default_rng(8).choice([0.0, 0.5, 1.0], (num_rows, seq_len)).astype(np.float32)
    return hidden, head, targets, weights


def loss_and_grads(hidden, head, targets, weights, z_loss_weight, implementation):
    def loss(hidden, head):
        total, count = cross_entropy.cross_entropy(
            hidden,
            head_VD=head,
            targets_BT=targets,
            weights_BT=weights,
            options=cross_entropy.LossOptions(implementation, z_loss_weight),
        )
        return 3.0 * total, count  # a cotangent other than 1

    return jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))(hidden, head)


def test_cross_entropy_of_bf16_keeps_logits_in_fp32():
    hidden, head, targets, weights = loss_inputs()
    low = hidden.astype(jnp.bfloat16), head.astype(jnp.bfloat16)
    exact = [np.asarray(x, np.float32) for x in low]
    (expected, _), grads = loss_and_grads(*exact, targets, weights, 0.1, "dense")
    for implementation in ("dense", "chunked"):
        (total, count), (dhidden, dhead) = loss_and_grads(*low, targets, weights, 0.1, implementation)
        assert total.dtype == count.dtype == jnp.float32
        np.testing.assert_allclose(total, expected, rtol=1e-6)  # products of bf16 are exact in fp32
        assert dhidden.dtype == dhead.dtype == jnp.bfloat16
        np.testing.assert_allclose(np.asarray(dhidden, np.float32), grads[0], **BF16)
        np.testing.assert_allclose(np.asarray(dhead, np.float32), grads[1], rtol=2e-2, atol=5e-2)


def test_chunked_cross_entropy_never_holds_all_logits(monkeypatch):
    monkeypatch.setattr(cross_entropy, "CHUNK_POSITIONS", 8)
    hidden, head = jax.ShapeDtypeStruct((2, 64, 16), np.float32), jax.ShapeDtypeStruct((1000, 16), np.float32)
    ids, weights = jax.ShapeDtypeStruct((2, 64), np.int32), jax.ShapeDtypeStruct((2, 64), np.float32)

    def temp_bytes(implementation):
        step = jax.jit(lambda *args: loss_and_grads(*args, 0.0, implementation))
        return step.lower(hidden, head, ids, weights).compile().memory_analysis().temp_size_in_bytes

    all_logits_bytes = 2 * 64 * 1000 * 4
    assert temp_bytes("dense") > all_logits_bytes
    assert temp_bytes("chunked") < all_logits_bytes


@pytest.mark.parametrize(("attention_name", "loss_name"), [("einsum", "dense"), ("chunked", "chunked")])
def test_ops_lower_for_neuron_without_forbidden_operations(attention_name, loss_name, monkeypatch):
    monkeypatch.setattr(cross_entropy, "CHUNK_POSITIONS", 100)
    cos, sin = rope.rope_tables(np.arange(300)[None], frequencies=rope.rope_frequencies(8, theta=1e4))
    norm_name, rope_name = {"dense": ("recomputed", "reference"), "chunked": ("reference", "paired")}[loss_name]

    def loss(x_BTNH, head_VD, targets_BT, ids_BT):
        x_BTNH = norm.rms_norm(x_BTNH, scale=jnp.ones(8), eps=1e-5, implementation=norm_name)
        x_BTNH = rope.apply_rope(x_BTNH, cos=cos, sin=sin, implementation=rope_name)
        gated_BTNH = swiglu.swiglu(x_BTNH, up=x_BTNH, implementation=norm_name)
        x_BTNH = attend(x_BTNH, x_BTNH, gated_BTNH, ids_BT, attention_name)
        return cross_entropy.cross_entropy(
            x_BTNH.reshape(1, 300, 16),
            head_VD=head_VD,
            targets_BT=targets_BT,
            weights_BT=jnp.ones((1, 300)),
            options=cross_entropy.LossOptions(loss_name, 1e-4),
        )[0]

    ids = jax.ShapeDtypeStruct((1, 300), np.int32)
    x, head = jax.ShapeDtypeStruct((1, 300, 2, 8), np.float32), jax.ShapeDtypeStruct((40, 16), np.float32)
    traced = jax.jit(jax.value_and_grad(loss, argnums=(0, 1))).trace(x, head, ids, ids)
    text = traced.lower(lowering_platforms=("neuron",)).as_text()
    for refused in ("stablehlo.case", "stablehlo.if", "complex<", "stablehlo.custom_call", "xf64>", "dynamic_reshape"):
        assert refused not in text, refused
    # variadic reduce: two initial values
    assert "stablehlo.reduce(" in text
    assert not [line for line in text.splitlines() if "stablehlo.reduce(" in line and line.count("init:") > 1]
    for condition in text.split("cond {")[1:]:  # a loop that Neuron takes compares its counter with a constant
        body = condition.split("} do")[0]
        assert body.count("stablehlo.compare") == 1
        assert "stablehlo.constant" in body


Q, SCALE = normal(1, 12, 4, 8), normal(8, seed=1)
FORWARD_MODE = {
    "attention einsum": lambda x: attend(Q * x, Q * x, Q, implementation="einsum"),
    "attention blocked": lambda x: attend(Q * x, Q * x, Q, implementation="blocked"),
    "rms_norm reference": lambda x: norm.rms_norm(x, scale=SCALE, eps=1e-5, implementation="reference"),
    "rms_norm recomputed": lambda x: norm.rms_norm(x, scale=SCALE, eps=1e-5, implementation="recomputed"),
    "swiglu reference": lambda x: swiglu.swiglu(x, up=Q, implementation="reference"),
    "swiglu recomputed": lambda x: swiglu.swiglu(x, up=Q, implementation="recomputed"),
    "rope reference": lambda x: rotated(x, "reference"),
    "rope paired": lambda x: rotated(x, "paired"),
    "row_parallel": lambda x: linear.row_parallel("BTNH,NHD->BTD", x, OUT, SINGLE_DEVICE),
    "column_parallel": lambda x: linear.column_parallel("BTNH,HD->BTND", x, IN, SINGLE_DEVICE),
    "cross_entropy reference": lambda x: cross_entropy.cross_entropy(
        x[0].reshape(2, 6, 32),
        head_VD=normal(50, 32, seed=6),
        targets_BT=jnp.arange(12).reshape(2, 6),
        weights_BT=jnp.ones((2, 6)),
        options=cross_entropy.LossOptions("reference", 0.1),
    )[0],
}
OUT, IN = (nnx.Param(normal(*s), out_sharding=("heads",) * len(s), eager_sharding=False) for s in ((4, 8, 16), (8, 16)))


def rotated(x, implementation):
    angles = normal(1, 12, 4, seed=9)
    return rope.apply_rope(x, cos=np.cos(angles), sin=np.sin(angles), implementation=implementation)


def test_forward_mode_is_the_transpose_of_reverse_mode():
    direction = normal(*Q.shape, seed=11)
    for name, run in FORWARD_MODE.items():
        out, tangent = jax.jvp(run, (Q,), (direction,))
        cotangent = jnp.asarray(normal(*out.shape, seed=12))
        (grad,) = jax.vjp(run, Q)[1](cotangent)
        scale = np.linalg.norm(tangent) * np.linalg.norm(cotangent)
        assert scale > 0, name
        turned = jnp.vdot(cotangent, tangent), jnp.vdot(grad, direction)
        np.testing.assert_allclose(*turned, atol=1e-5 * scale, err_msg=name)
