"""Two models as they are written with Haiku: a decoder with dropout and a padding mask, and a character LSTM."""

from __future__ import annotations

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np

from foreign.flax_styles import decoder_sizes, token_batch


def decoder(tokens, *, num_layers, embed_dim, num_heads, mlp_dim, vocab_size, dropout):
    """Returns logits_BTV of a pre-norm decoder."""
    seq_len = tokens.shape[1]
    init = hk.initializers.VarianceScaling(2 / num_layers)
    mask = (tokens != 0)[:, None, None, :] & np.tril(np.ones((1, 1, seq_len, seq_len), bool))
    x = hk.Embed(vocab_size, embed_dim, w_init=hk.initializers.TruncatedNormal(0.02))(tokens)
    x = x + hk.get_parameter("positions", [seq_len, embed_dim], init=hk.initializers.TruncatedNormal(0.02))
    for _ in range(num_layers):
        y = hk.LayerNorm(-1, create_scale=True, create_offset=True)(x)
        attention = hk.MultiHeadAttention(num_heads, embed_dim // num_heads, model_size=embed_dim, w_init=init)
        x = x + hk.dropout(hk.next_rng_key(), dropout, attention(y, y, y, mask=mask))
        y = hk.LayerNorm(-1, create_scale=True, create_offset=True)(x)
        mlp = hk.Sequential([hk.Linear(mlp_dim, w_init=init), jax.nn.gelu, hk.Linear(embed_dim, w_init=init)])
        x = x + hk.dropout(hk.next_rng_key(), dropout, mlp(y))
    return hk.Linear(vocab_size)(hk.LayerNorm(-1, create_scale=True, create_offset=True)(x))


def haiku_transformer(*, small=False, seq_len=None):
    layers, embed_dim, heads, mlp_dim, seq_len, rows, vocab_size = decoder_sizes(small, seq_len)
    sizes = {"num_layers": layers, "embed_dim": embed_dim, "num_heads": heads, "mlp_dim": mlp_dim}
    batch = token_batch(rows, seq_len, vocab_size) | {"key": jax.random.PRNGKey(1)}

    def batch_loss(batch):
        logits = decoder(batch["inputs"], **sizes, vocab_size=vocab_size, dropout=0.1)
        log_probs = jax.nn.log_softmax(logits)
        log_likelihood = jnp.sum(jax.nn.one_hot(batch["targets"], vocab_size) * log_probs, axis=-1)
        mask = (batch["inputs"] != 0).astype(jnp.float32)
        return -jnp.sum(log_likelihood * mask) / jnp.sum(mask)

    transformed = hk.transform(batch_loss)
    params = jax.jit(transformed.init)(jax.random.PRNGKey(0), batch)
    return lambda params, batch: transformed.apply(params, batch["key"], batch), params, batch


def haiku_lstm(*, small=False):
    rows, seq_len, hidden, vocab_size = (2, 12, 16, 23) if small else (32, 128, 256, 128)
    batch = {name: tokens.T for name, tokens in token_batch(rows, seq_len, vocab_size).items()}

    def sequence_loss(batch):
        core = hk.DeepRNN([hk.LSTM(hidden), jax.nn.relu, hk.LSTM(hidden), hk.nets.MLP([hidden, vocab_size])])
        inputs = jax.nn.one_hot(batch["inputs"], vocab_size)
        logits, _ = hk.dynamic_unroll(core, inputs, core.initial_state(inputs.shape[1]))
        log_probs = jax.nn.log_softmax(logits)
        return -jnp.sum(jax.nn.one_hot(batch["targets"], vocab_size) * log_probs) / batch["targets"].size

    transformed = hk.without_apply_rng(hk.transform(sequence_loss))
    return transformed.apply, jax.jit(transformed.init)(jax.random.PRNGKey(0), batch), batch
