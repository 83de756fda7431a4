"""A small Llama, random weights of any such model, and the same model of transformers."""

from __future__ import annotations

import jax
import numpy as np
import torch
from hf_weights import hf_model

from hlat_jax.config import ModelConfig
from hlat_jax.model import abstract_params

GQA = ModelConfig(
    vocab_size=384, num_layers=2, embed_dim=96, mlp_dim=160, num_heads=6, num_kv_heads=2, head_dim=16, norm_eps=1e-5,
    rope_theta=500_000.0,
)  # fmt: skip


def random_params(cfg: ModelConfig, seed: int = 0) -> dict:
    """Returns weights that make every part matter: norm scales away from 1, activations and scores of size 1."""
    rng = np.random.default_rng(seed)

    def draw(path, shape):
        if path[-1].key == "scale":
            return (1 + 0.2 * rng.standard_normal(shape.shape)).astype(np.float32)
        # Embeddings are small: a norm's eps is to be seen beside their mean square of 0.01.
        std = 0.1 if path[-1].key in ("embed", "head") else 1 / np.sqrt(cfg.embed_dim)
        return (std * rng.standard_normal(shape.shape)).astype(np.float32)

    return jax.tree_util.tree_map_with_path(draw, abstract_params(cfg))


def hugging_face(params: dict, cfg: ModelConfig) -> torch.nn.Module:
    """Returns the Hugging Face model of a ModelConfig."""
    rope = {"rope_type": "default", "rope_theta": cfg.rope_theta}
    if cfg.rope_scaling == "llama3":
        rope |= {
            "rope_type": "llama3",
            "factor": cfg.rope_factor,
            "low_freq_factor": cfg.rope_low_freq_factor,
            "high_freq_factor": cfg.rope_high_freq_factor,
            "original_max_position_embeddings": cfg.rope_original_positions,
        }
    return hf_model(
        params,
        vocab_size=cfg.vocab_size,
        hidden_size=cfg.embed_dim,
        intermediate_size=cfg.mlp_dim,
        num_hidden_layers=cfg.num_layers,
        num_attention_heads=cfg.num_heads,
        num_key_value_heads=cfg.num_kv_heads,
        head_dim=cfg.head_dim,
        max_position_embeddings=cfg.max_positions,
        rms_norm_eps=cfg.norm_eps,
        rope_parameters=rope,
        tie_word_embeddings=cfg.tie_embeddings,
        attn_implementation="sdpa",
    )
