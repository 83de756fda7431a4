"""Six models as they are written with Flax Linen: decoders in the styles of nanodo, lm1b and Gemma, a vision
transformer, a ResNet with batch norm and a speech recognizer with the CTC loss. Blocks are Python loops."""

from __future__ import annotations

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax


def initialized(model, *args, **kwargs):
    """Returns the variables of a Linen module."""
    init = functools.partial(model.init, **kwargs)
    return jax.jit(init)(jax.random.key(0, impl="rbg"), *args)


def token_batch(batch_size, seq_len, vocab_size):
    """Returns {"inputs", "targets"}: random tokens, none of them 0, which pads."""
    tokens = np.random.default_rng(0).integers(1, vocab_size, (batch_size, seq_len + 1), dtype=np.int32)
    return {"inputs": jnp.asarray(tokens[:, :-1]), "targets": jnp.asarray(tokens[:, 1:])}


def decoder_sizes(small, seq_len):
    """Returns (layers, embed_dim, heads, mlp_dim, seq_len, batch size, vocabulary); longer rows are fewer."""
    sizes = (2, 32, 2, 64, 32, 2, 97) if small else (4, 256, 4, 1024, 256, 4, 2048)
    *model, own_len, rows, vocab_size = sizes
    seq_len = seq_len or own_len
    return *model, seq_len, max(1, rows * own_len // seq_len), vocab_size


class NanodoAttention(nn.Module):
    num_heads: int

    @nn.compact
    def __call__(self, x):
        embed_dim, seq_len = x.shape[-1], x.shape[1]
        head_dim = embed_dim // self.num_heads
        project = functools.partial(nn.DenseGeneral, (self.num_heads, head_dim), use_bias=False)
        query, key, value = (project(name=name)(x) for name in ("query", "key", "value"))
        scores = jnp.einsum("...qhd,...khd->...hqk", query / head_dim**0.5, key)
        mask = jnp.tril(jnp.ones((1, 1, seq_len, seq_len), bool))
        scores = jnp.where(mask, scores, jnp.finfo(scores.dtype).min)
        out = jnp.einsum("...hqk,...khd->...qhd", jax.nn.softmax(scores, axis=-1), value)
        return nn.DenseGeneral(embed_dim, axis=(-2, -1), use_bias=False, name="out")(out)


class NanodoBlock(nn.Module):
    num_heads: int
    mlp_dim: int

    @nn.compact
    def __call__(self, x):
        x = x + NanodoAttention(self.num_heads)(nn.LayerNorm(use_bias=False)(x))
        hidden = nn.gelu(nn.Dense(self.mlp_dim, use_bias=False)(nn.LayerNorm(use_bias=False)(x)))
        return x + nn.Dense(x.shape[-1], use_bias=False)(hidden)


class Nanodo(nn.Module):
    """Learned positions, LayerNorm without bias, tied embeddings; `remat` checkpoints each block."""

    num_layers: int
    embed_dim: int
    num_heads: int
    mlp_dim: int
    vocab_size: int
    remat: bool = False

    @nn.compact
    def __call__(self, tokens):
        embed = nn.Embed(self.vocab_size, self.embed_dim)
        positions = nn.Embed(tokens.shape[1], self.embed_dim, name="positions")
        x = embed(tokens) + positions(jnp.arange(tokens.shape[1]))
        block = nn.remat(NanodoBlock) if self.remat else NanodoBlock
        for number in range(self.num_layers):
            x = block(self.num_heads, self.mlp_dim, name=f"block_{number}")(x)
        return embed.attend(nn.LayerNorm(use_bias=False)(x))


def nanodo(*, small=False, seq_len=None, remat=False):
    layers, embed_dim, heads, mlp_dim, seq_len, rows, vocab_size = decoder_sizes(small, seq_len)
    model = Nanodo(layers, embed_dim, heads, mlp_dim, vocab_size, remat)
    batch = token_batch(rows, seq_len, vocab_size)

    def loss(params, batch):
        logits = model.apply({"params": params}, batch["inputs"])
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"])
        weights = (batch["targets"] != 0).astype(jnp.float32)
        return jnp.sum(losses * weights) / jnp.sum(weights)

    return loss, initialized(model, batch["inputs"])["params"], batch


class Lm1bBlock(nn.Module):
    num_heads: int
    mlp_dim: int
    dropout: float

    @nn.compact
    def __call__(self, x, mask, train):
        drop = nn.Dropout(self.dropout, deterministic=not train)
        attention = nn.MultiHeadDotProductAttention(
            self.num_heads, dropout_rate=self.dropout, use_bias=False, broadcast_dropout=False, deterministic=not train
        )
        y = nn.LayerNorm()(x)
        x = x + drop(attention(y, y, mask=mask))
        hidden = drop(nn.relu(nn.Dense(self.mlp_dim)(nn.LayerNorm()(x))))
        return x + drop(nn.Dense(x.shape[-1])(hidden))


class Lm1b(nn.Module):
    """Sinusoidal positions, packed rows whose segments do not see each other, dropout everywhere, logits of their own
    projection."""

    num_layers: int
    embed_dim: int
    num_heads: int
    mlp_dim: int
    vocab_size: int

    @nn.compact
    def __call__(self, tokens, segments, train=True):
        seq_len, half = tokens.shape[1], self.embed_dim // 2
        angles = np.arange(seq_len)[:, None] * np.exp(np.arange(half) * -np.log(1e4) / (half - 1))
        positions = np.concatenate([np.sin(angles), np.cos(angles)], axis=-1).astype(np.float32)
        x = nn.Embed(self.vocab_size, self.embed_dim, embedding_init=nn.initializers.normal(1.0))(tokens) + positions
        x = nn.Dropout(0.1, deterministic=not train)(x)
        same_segment = nn.make_attention_mask(segments, segments, jnp.equal)
        mask = nn.combine_masks(nn.make_causal_mask(tokens), same_segment)
        for _ in range(self.num_layers):
            x = Lm1bBlock(self.num_heads, self.mlp_dim, 0.1)(x, mask, train)
        return nn.Dense(self.vocab_size)(nn.LayerNorm()(x))


def lm1b(*, small=False, seq_len=None):
    layers, embed_dim, heads, mlp_dim, seq_len, rows, vocab_size = decoder_sizes(small, seq_len)
    model = Lm1b(layers, embed_dim, heads, mlp_dim, vocab_size)
    batch = token_batch(rows, seq_len, vocab_size)
    batch["segments"] = jnp.broadcast_to(1 + (jnp.arange(seq_len) >= seq_len * 5 // 8), (rows, seq_len))
    batch["key"] = jax.random.PRNGKey(1)
    smoothing = 0.1
    confidence, low = 1 - smoothing, smoothing / (vocab_size - 1)

    def loss(params, batch):
        variables, rngs = {"params": params}, {"dropout": batch["key"]}
        logits = model.apply(variables, batch["inputs"], batch["segments"], rngs=rngs)
        soft_targets = low + (confidence - low) * jax.nn.one_hot(batch["targets"], vocab_size)
        losses = -jnp.sum(soft_targets * nn.log_softmax(logits), axis=-1)
        least = -(confidence * np.log(confidence) + (vocab_size - 1) * low * np.log(low))
        weights = jnp.where(batch["targets"] > 0, 1, 0).astype(jnp.float32)
        return jnp.sum((losses - least) * weights) / jnp.sum(weights)

    return loss, initialized(model, batch["inputs"], batch["segments"], train=False)["params"], batch


class GemmaNorm(nn.Module):
    @nn.compact
    def __call__(self, x):
        gain = self.param("gain", nn.initializers.zeros, (x.shape[-1],))
        variance = jnp.mean(jnp.square(x), axis=-1, keepdims=True)
        return x * jax.lax.rsqrt(variance + 1e-6) * (1 + gain)


class Einsum(nn.Module):
    equation: str
    shape: tuple[int, ...]

    @nn.compact
    def __call__(self, x):
        init = nn.initializers.variance_scaling(1.0, "fan_in", "normal", in_axis=-2, out_axis=-1)
        return jnp.einsum(self.equation, x, self.param("w", init, self.shape))


def rotated(x, positions):
    """Returns x_BTNH turned by RoPE, with its halves as pairs."""
    half = x.shape[-1] // 2
    timescale = 10_000.0 ** (jnp.arange(half) / half)
    angle = (positions[..., None] / timescale)[..., None, :]
    first, second = jnp.split(x, 2, axis=-1)
    sin, cos = jnp.sin(angle), jnp.cos(angle)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


class GemmaBlock(nn.Module):
    """Two query heads for each KV head, softcap of the scores, GeGLU, a norm before and after each part."""

    num_heads: int
    mlp_dim: int
    window: int | None

    @nn.compact
    def __call__(self, x, positions, mask):
        batch, seq_len, embed_dim = x.shape
        heads, kv_heads, head_dim = self.num_heads, self.num_heads // 2, embed_dim // self.num_heads
        y = GemmaNorm()(x)
        query = Einsum("BTD,NDH->BTNH", (heads, embed_dim, head_dim), name="q")(y)
        key, value = Einsum("BSD,CKDH->CBSKH", (2, kv_heads, embed_dim, head_dim), name="kv")(y)
        query, key = rotated(query, positions) * head_dim**-0.5, rotated(key, positions)
        grouped = query.reshape(batch, seq_len, kv_heads, heads // kv_heads, head_dim)
        scores = jnp.einsum("BTKGH,BSKH->BTKGS", grouped, key)
        scores = jnp.tanh(scores / 50.0) * 50.0
        if self.window is not None:
            far = positions[:, :, None] - positions[:, None, :] >= self.window
            mask = mask & ~far
        scores = jnp.where(mask[:, :, None, None, :], scores, -2.3819763e38)
        out = jnp.einsum("BTKGS,BSKH->BTKGH", jax.nn.softmax(scores, axis=-1), value)
        out = Einsum("BTNH,NHD->BTD", (heads, head_dim, embed_dim), name="out")(out.reshape(query.shape))
        x = x + GemmaNorm()(out)
        gate, up = Einsum("BTD,CDF->CBTF", (2, embed_dim, self.mlp_dim), name="gating")(GemmaNorm()(x))
        return x + GemmaNorm()(Einsum("BTF,FD->BTD", (self.mlp_dim, embed_dim), name="down")(nn.gelu(gate) * up))


class Gemma(nn.Module):
    """Local and global layers in turn, RoPE, tied embeddings, softcap of the logits."""

    num_layers: int
    embed_dim: int
    num_heads: int
    mlp_dim: int
    vocab_size: int
    window: int

    @nn.compact
    def __call__(self, tokens):
        table = self.param("embedding", nn.initializers.normal(0.02), (self.vocab_size, self.embed_dim))
        x = table[tokens] * jnp.sqrt(jnp.float32(self.embed_dim))
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
        mask = jnp.broadcast_to(jnp.tril(jnp.ones((tokens.shape[1],) * 2, bool)), (*tokens.shape, tokens.shape[1]))
        for number in range(self.num_layers):
            window = self.window if number % 2 == 0 else None
            x = GemmaBlock(self.num_heads, self.mlp_dim, window, name=f"layer_{number}")(x, positions, mask)
        logits = GemmaNorm()(x) @ table.T
        return jnp.tanh(logits / 30.0) * 30.0


def gemma(*, small=False, seq_len=None):
    layers, embed_dim, heads, mlp_dim, seq_len, rows, vocab_size = decoder_sizes(small, seq_len)
    model = Gemma(layers, embed_dim, heads, mlp_dim, vocab_size, seq_len // 4)
    batch = token_batch(rows, seq_len, vocab_size)

    def loss(params, batch):
        logits = model.apply({"params": params}, batch["inputs"])
        chosen = jax.nn.one_hot(batch["targets"], logits.shape[-1]) * (batch["targets"] != 0)[..., None]
        return -jnp.sum(jax.nn.log_softmax(logits) * chosen) / (jnp.sum(batch["targets"] != 0) + 1e-8)

    return loss, initialized(model, batch["inputs"])["params"], batch


class ViT(nn.Module):
    """Patches by a convolution, learned positions, Flax's own attention, the mean of all patches."""

    num_layers: int
    embed_dim: int
    num_heads: int
    mlp_dim: int
    patch: int
    num_classes: int

    @nn.compact
    def __call__(self, images):
        patch = (self.patch, self.patch)
        x = nn.Conv(self.embed_dim, patch, strides=patch, padding="VALID", name="embedding")(images)
        x = x.reshape(x.shape[0], -1, self.embed_dim)
        x = x + self.param("positions", nn.initializers.normal(0.02), (1, *x.shape[1:]))
        for _ in range(self.num_layers):
            y = nn.LayerNorm()(x)
            x = x + nn.MultiHeadDotProductAttention(self.num_heads, deterministic=True)(y, y)
            hidden = nn.gelu(nn.Dense(self.mlp_dim)(nn.LayerNorm()(x)))
            x = x + nn.Dense(self.embed_dim)(hidden)
        return nn.Dense(self.num_classes, name="head")(nn.LayerNorm()(x).mean(axis=1))


def image_batch(rows, size, num_classes):
    """Returns {"images", "labels"} of random pixels."""
    rng = np.random.default_rng(0)
    images = rng.normal(size=(rows, size, size, 3)).astype(np.float32)
    return {"images": jnp.asarray(images), "labels": jnp.asarray(rng.integers(0, num_classes, rows, dtype=np.int32))}


def vit(*, small=False, seq_len=None):
    layers, embed_dim, heads, mlp_dim, seq_len, rows, _ = decoder_sizes(small, seq_len or (16 if small else None))
    model = ViT(layers, embed_dim, heads, mlp_dim, 4, 10)
    batch = image_batch(rows, 4 * round(seq_len**0.5), 10)

    def loss(params, batch):
        logits = model.apply({"params": params}, batch["images"])
        return jnp.mean(optax.softmax_cross_entropy(logits, jax.nn.one_hot(batch["labels"], 10)))

    return loss, initialized(model, batch["images"])["params"], batch


class ResNetBlock(nn.Module):
    features: int
    strides: int

    @nn.compact
    def __call__(self, x):
        norm = functools.partial(nn.BatchNorm, use_running_average=False, momentum=0.9)
        conv = functools.partial(nn.Conv, use_bias=False)
        y = nn.relu(norm()(conv(self.features, (1, 1))(x)))
        y = nn.relu(norm()(conv(self.features, (3, 3), strides=self.strides)(y)))
        y = norm(scale_init=nn.initializers.constant(0.5))(conv(self.features * 4, (1, 1))(y))
        if x.shape != y.shape:
            x = norm(name="norm_proj")(conv(self.features * 4, (1, 1), strides=self.strides, name="conv_proj")(x))
        return nn.relu(x + y)


class ResNet(nn.Module):
    """Bottleneck blocks, batch norm with running statistics, max pooling after the first convolution."""

    stages: tuple[int, ...]
    features: int
    num_classes: int

    @nn.compact
    def __call__(self, x):
        x = nn.Conv(self.features, (7, 7), strides=2, use_bias=False)(x)
        x = nn.relu(nn.BatchNorm(use_running_average=False, momentum=0.9)(x))
        x = nn.max_pool(x, (3, 3), strides=(2, 2), padding="SAME")
        for stage, num_blocks in enumerate(self.stages):
            for number in range(num_blocks):
                x = ResNetBlock(self.features * 2**stage, 2 if stage and number == 0 else 1)(x)
        return nn.Dense(self.num_classes)(x.mean(axis=(1, 2)))


def resnet(*, small=False):
    model = ResNet((1, 1) if small else (2, 2, 2), 8 if small else 32, 10)
    batch = image_batch(*((4, 32) if small else (8, 96)), 10)
    variables = initialized(model, batch["images"])
    batch["batch_stats"] = variables["batch_stats"]

    def loss(params, batch):
        variables = {"params": params, "batch_stats": batch["batch_stats"]}
        logits, _ = model.apply(variables, batch["images"], mutable=["batch_stats"])
        decay = 0.5 * 1e-4 * sum(jnp.sum(jnp.square(x)) for x in jax.tree.leaves(params) if x.ndim > 1)
        return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"])) + decay

    return loss, variables["params"], batch


class Recognizer(nn.Module):
    """Convolutions over spectra that halve the time, a GRU in both directions, a feed-forward block, letters."""

    features: int
    num_letters: int

    @nn.compact
    def __call__(self, spectra):
        x = nn.gelu(nn.Conv(self.features, (5,), strides=2)(spectra))
        x = nn.LayerNorm()(nn.gelu(nn.Conv(self.features, (5,))(x)))
        both = nn.Bidirectional(nn.RNN(nn.GRUCell(self.features)), nn.RNN(nn.GRUCell(self.features)))
        x = x + nn.Dense(self.features)(both(x))
        x = x + nn.Dense(self.features)(nn.relu(nn.Dense(4 * self.features)(nn.LayerNorm()(x))))
        return nn.Dense(self.num_letters)(x)


def ctc(*, small=False):
    rows, frames, features = (2, 24, 16) if small else (16, 512, 128)
    rng = np.random.default_rng(0)
    model = Recognizer(features, 29)
    lengths = rng.integers(frames // 4, frames // 2 + 1, rows)
    num_letters = frames // 8
    batch = {
        "spectra": jnp.asarray(rng.normal(size=(rows, frames, 20)).astype(np.float32)),
        "logit_paddings": jnp.asarray((np.arange(frames // 2) >= lengths[:, None]).astype(np.float32)),
        "labels": jnp.asarray(rng.integers(1, 29, (rows, num_letters), dtype=np.int32)),
        "label_paddings": jnp.asarray((np.arange(num_letters) >= lengths[:, None] // 4).astype(np.float32)),
    }

    def loss(params, batch):
        logits = model.apply({"params": params}, batch["spectra"])
        per_row = optax.ctc_loss(logits, batch["logit_paddings"], batch["labels"], batch["label_paddings"])
        return jnp.mean(per_row)

    return loss, initialized(model, batch["spectra"])["params"], batch
