"""Parameters, FLOPs per token and bytes of state, by formula."""

from __future__ import annotations

import itertools

from hlat_jax.config import Config, ModelConfig, count_text
from hlat_jax.facts.policies import POLICY_FACTS
from hlat_jax.host.console import labelled


def num_params(m: ModelConfig) -> int:
    """Returns the number of parameters. A tied embedding counts once."""
    norms = ((2 + m.out_bias) * m.num_layers + 1) * m.embed_dim  # and the bias of the attention's output
    of_heads = m.qkv_bias * (m.num_heads + 2 * m.num_kv_heads) + m.qk_norm * 2  # biases and norms
    tables = m.vocab_size * m.embed_dim * (1 if m.tie_embeddings else 2)
    return num_hidden_params(m) + m.num_layers * m.head_dim * of_heads + norms + tables


def num_hidden_params(m: ModelConfig) -> int:
    """Returns the number of parameters in the matrices of the layers, which Muon updates."""
    attention = m.embed_dim * m.head_dim * (2 * m.num_heads + 2 * m.num_kv_heads)
    return m.num_layers * (attention + 3 * m.embed_dim * m.mlp_dim)


def flops_per_token_6n(m: ModelConfig) -> float:
    """Returns training FLOPs per token by the 6N rule, 6 * num_params, without attention scores.

    Source: Kaplan et al., arXiv 2001.08361, section 2.1.
    """
    return 6.0 * num_params(m)


def flops_per_token(m: ModelConfig, seq_len: int) -> float:
    """Returns training FLOPs per token, 6N plus 12 * heads * head_dim * keys of each layer (seq_len or its window).

    Source: Chowdhery et al. (PaLM), arXiv 2204.02311, appendix B. Recomputation does not count.
    """
    return flops_per_token_6n(m) + 12.0 * m.num_heads * m.head_dim * sum(m.windows(seq_len))


def policy_state_bytes(m: ModelConfig, policy: str, *, optimizer: str) -> int:
    """Returns the bytes of the training state before sharding, with its two counters and, if kept, a seed."""
    facts = POLICY_FACTS[policy]
    second_moments = facts.moment_bytes * num_hidden_params(m) if optimizer == "muon" else 0  # which Muon does without
    counters = 12 if facts.rounding == "stochastic" else 8
    return facts.state_bytes_per_param * num_params(m) - second_moments + counters


def describe(config: Config) -> str:
    """Returns the parameters, FLOPs, tokens and bytes of state of a config, by formula."""
    model, data, train = config.model, config.data, config.train
    step_tokens = data.batch_size * data.seq_len
    optimizer = config.optimizer
    state_bytes = policy_state_bytes(model, config.precision.policy, optimizer=optimizer.name)
    is_constant = optimizer.schedule == "constant"
    horizon = "constant rate" if is_constant else f"schedule horizon {optimizer.horizon_steps:,}"
    flops_6n, flops = flops_per_token_6n(model), flops_per_token(model, data.seq_len)
    microbatches = "microbatches of one row of each replica"
    if train.num_microbatches != -1:
        microbatches = count_text(train.num_microbatches, "microbatch")
    texts = {
        "parameters": f"{num_params(model):,}",
        "FLOPs per token": f"{flops_6n:.4g} (6N), {flops:.4g} with attention",
        "tokens per step": f"{step_tokens:,} = {data.batch_size} x {data.seq_len}, {microbatches}",
        "steps": f"{train.num_steps:,} ({train.num_steps * step_tokens:,} tokens), {horizon}",
        "state": f"{state_bytes:,} bytes ({config.precision.policy}), before sharding",
    }
    return "\n".join(itertools.starmap(labelled, texts.items()))
