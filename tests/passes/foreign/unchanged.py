"""Whole models that packages on PyPI ship, with their code as it is: name -> builder as in `models.MODELS`."""

from __future__ import annotations

import equimo.models
import equinox as eqx
import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
from penzai import pz
from penzai.models.transformer.variants import llamalike_common

from foreign.flax_styles import decoder_sizes, image_batch, initialized, token_batch


def haiku_resnet18(*, small=False):
    """`hk.nets.ResNet18`, training: batch norm by the batch's own statistics. Small: fewer and narrower blocks."""
    rows, size = (2, 32) if small else (8, 64)
    batch = image_batch(rows, size, 10)

    def batch_loss(batch):
        tiny = {"bottleneck": False, "channels_per_group": (8, 8, 16, 16)}
        model = hk.nets.ResNet((1, 1, 1, 1), 10, **tiny) if small else hk.nets.ResNet18(10)
        logits = model(batch["images"], is_training=True)
        return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"]))

    transformed = hk.transform_with_state(batch_loss)
    params, state = jax.jit(transformed.init)(jax.random.PRNGKey(0), batch)
    return lambda params, batch: transformed.apply(params, state, None, batch)[0], params, batch


def penzai_llama(*, small=False, seq_len=None):
    """`penzai.models.transformer`: RMSNorm, RoPE, SwiGLU, two query heads for each KV head, blocks in a Python loop."""
    layers, embed_dim, heads, mlp_dim, seq_len, rows, vocab_size = decoder_sizes(small, seq_len)
    config = llamalike_common.LlamalikeTransformerConfig(
        num_kv_heads=heads // 2,
        query_head_multiplier=2,
        embedding_dim=embed_dim,
        projection_dim=embed_dim // heads,
        mlp_hidden_dim=mlp_dim,
        num_decoder_blocks=layers,
        vocab_size=vocab_size,
        mlp_variant="swiglu",
        tie_embedder_and_logits=False,
    )
    model = llamalike_common.build_llamalike_transformer(config, jax.random.key(0))
    model, params = pz.unbind_params(model, freeze=True)
    batch = token_batch(rows, seq_len, vocab_size)

    def loss(params, batch):
        tokens = pz.nx.wrap(batch["inputs"]).tag("batch", "seq")
        logits = pz.bind_variables(model, params)(tokens).unwrap("batch", "seq", "vocabulary")
        return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"]))

    return loss, params, batch


def equimo_vit(*, small=False, seq_len=None):
    """`equimo.models.VisionTransformer`, one image at a time under `vmap`, with class and register tokens."""
    layers, embed_dim, heads, _, seq_len, rows, _ = decoder_sizes(small, seq_len or (16 if small else None))
    size = 4 * round(seq_len**0.5)
    build = eqx.filter_jit(
        lambda key: equimo.models.VisionTransformer(size, 3, embed_dim, 4, heads, [layers], num_classes=10, key=key)
    )
    params, static = eqx.partition(build(jax.random.key(0)), eqx.is_inexact_array)
    batch = image_batch(rows, size, 10)
    batch["images"] = jnp.moveaxis(batch["images"], -1, 1)

    def loss(params, batch):
        logits = jax.vmap(eqx.combine(params, static))(batch["images"])
        return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"]))

    return loss, params, batch


def flax_attention(*, small=False, seq_len=None):
    """`flax.linen.MultiHeadDotProductAttention` alone, causal, with the loss of a regression."""
    _, embed_dim, heads, _, seq_len, rows, _ = decoder_sizes(small, seq_len)
    model = nn.MultiHeadDotProductAttention(heads)
    rng = np.random.default_rng(0)
    x, y = (jnp.asarray(rng.normal(size=(rows, seq_len, embed_dim)).astype(np.float32)) for _ in range(2))

    def loss(params, batch):
        mask = nn.make_causal_mask(batch["x"][..., 0])
        return jnp.mean(jnp.square(model.apply({"params": params}, batch["x"], mask=mask) - batch["y"]))

    return loss, initialized(model, x)["params"], {"x": x, "y": y}


UNCHANGED = {
    "haiku ResNet18": haiku_resnet18,
    "penzai Llama": penzai_llama,
    "equimo ViT": equimo_vit,
    "flax attention": flax_attention,
}
