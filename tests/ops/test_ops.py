"""Ops against float64 NumPy, PyTorch and transformers, and between implementations."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from hlat_jax import model as model_lib
from hlat_jax.ops import attention, cross_entropy, norm, rope
from hlat_jax.weights.hf_config import model_config

# One bf16 rounding is 4e-3 of a value; operands, probabilities and results are each rounded once.
BF16 = {"rtol": 2e-2, "atol": 2e-2}


def normal(*shape, seed=0):
    return np.random.default_rng((seed, *shape)).standard_normal(shape).astype(np.float32)


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


YARN = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 32768}


def test_rope_tables_of_linear_and_yarn_scaling_equal_transformers():
    """Frequencies and the factor of both tables, by the import of a config.json."""
    for given in (
        {"rope_type": "linear", "rope_theta": 1e4, "factor": 3.0},
        YARN,
        YARN | {"beta_fast": 16.0, "beta_slow": 2.0, "attention_factor": 0.7},
        YARN | {"factor": 40.0, "mscale": 1.0, "mscale_all_dim": 0.8},
        YARN | {"factor": 0.5},
        YARN | {"rope_theta": 1e4, "original_max_position_embeddings": 8},  # bounds beyond the first pair
    ):
        config = LlamaConfig(hidden_size=256, num_attention_heads=2, rope_parameters=dict(given))
        expected, factor = ROPE_INIT_FUNCTIONS[given["rope_type"]](config, "cpu")
        model = model_config(config.to_dict() | {"architectures": None}, where="config.json")
        scaling = model_lib._scaling(model)
        actual = rope.rope_frequencies(128, theta=model.rope_theta, scaling=scaling)
        np.testing.assert_allclose(actual, expected, rtol=1e-5, err_msg=str(given))  # theirs are fp32
        cos, sin = rope.rope_tables(np.zeros((1, 1), np.int32), frequencies=actual, scaling=scaling)
        np.testing.assert_allclose(cos, factor, rtol=1e-6)
        assert not np.any(sin)


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
