"""Norms and rotary embeddings against transformers."""

import jax.numpy as jnp
import numpy as np
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRMSNorm, LlamaRotaryEmbedding

from hlat_jax import model as model_lib
from hlat_jax.ops import norm, rope
from hlat_jax.weights.hf_config import model_config


def normal(*shape, seed=0):
    return np.random.default_rng((seed, *shape)).standard_normal(shape).astype(np.float32)


def test_rms_norm_of_bf16_rounds_before_the_scale():
    x, scale = normal(64, 16).astype(jnp.bfloat16), normal(16, seed=1).astype(jnp.bfloat16)
    module = LlamaRMSNorm(16, eps=1e-5).bfloat16()
    module.weight.data = torch.tensor(np.asarray(scale, np.float32)).bfloat16()
    expected = module(torch.tensor(np.asarray(x, np.float32)).bfloat16()).detach().float().numpy()
    actual = norm.rms_norm(x, scale=scale, eps=1e-5)
    assert actual.dtype == jnp.bfloat16
    # exact but for elements whose quotient lies on a rounding boundary
    assert np.mean(np.asarray(actual, np.float32) == expected) > 0.99
    np.testing.assert_allclose(np.asarray(actual, np.float32), expected, rtol=2**-7)


def assert_bits(actual, expected):
    """Nine of ten are equal; PyTorch rounds a few powers wrongly, by up to three bits."""
    assert actual.dtype == expected.dtype == np.float32
    bits = np.abs(actual.view(np.int32) - expected.view(np.int32))
    assert np.mean(bits == 0) > 0.9
    assert bits.max() <= 3


def test_rope_frequencies_of_llama3_have_the_bits_of_transformers():
    for original_positions in (32, 8192):
        scaling = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0}
        scaling |= {"high_freq_factor": 4.0, "original_max_position_embeddings": original_positions}
        config = LlamaConfig(hidden_size=256, num_attention_heads=2, rope_parameters=scaling)
        expected, attention_factor = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
        stretch = rope.Llama3Scaling(8.0, 1.0, 4.0, original_positions)
        assert attention_factor == 1.0
        assert_bits(rope.rope_frequencies(128, theta=500000.0, scaling=stretch), expected.numpy())


def test_rope_frequencies_without_scaling_have_the_bits_of_transformers():
    for theta in (1e4, 5e5):
        config = LlamaConfig(num_attention_heads=2, hidden_size=256, rope_parameters={"rope_theta": theta})
        expected = LlamaRotaryEmbedding(config).inv_freq.numpy()
        assert_bits(rope.rope_frequencies(128, theta=theta), expected)


YARN = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 32768}


def test_rope_tables_of_linear_and_yarn_have_the_bits_of_transformers():
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
        assert_bits(actual, expected.numpy())
        cos, sin = rope.rope_tables(np.zeros((1, 1), np.int32), frequencies=actual, scaling=scaling)
        np.testing.assert_allclose(cos, factor, rtol=1e-6)
        assert not np.any(sin)
