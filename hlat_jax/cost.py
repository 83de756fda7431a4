"""Counts that need no program: parameters, FLOPs per token, bytes of state; and the one table of devices.

Owns the arithmetic and the sources of hardware numbers. Refuses to measure anything.
"""

from __future__ import annotations

import dataclasses

from hlat_jax.config import ModelConfig


@dataclasses.dataclass(frozen=True)
class Device:
    """One JAX device: dense bf16 peak in FLOP/s and memory in bytes, with where the numbers come from."""

    peak_flops: float
    memory_bytes: int
    source: str


GIB = 2**30
DEVICES = {
    "trn1": Device(95e12, 16 * GIB, "AWS Neuron docs, Trainium architecture: 190 TFLOP/s and 32 GiB per chip of 2"),
    "trn2": Device(667e12 / 4, 24 * GIB, "AWS Neuron docs, Trainium2 architecture, LNC 2: a chip's 667 TFLOP/s by 4"),
    "h200": Device(989e12, 141 * 10**9, "NVIDIA H200 data sheet: 989 TFLOP/s bf16 dense, 141 GB"),
    "h100": Device(989e12, 80 * 10**9, "NVIDIA H100 SXM data sheet: 989 TFLOP/s bf16 dense, 80 GB"),
}


def device(kind: str) -> Device | None:
    """Returns the table row for JAX's `device_kind`, or None when the table has no such device."""
    kind = kind.lower()
    if kind.startswith("nc_v3"):
        return DEVICES["trn2"]
    if kind.startswith("nc_v2"):
        return DEVICES["trn1"]
    return next((row for name, row in DEVICES.items() if name in kind), None)


def num_params(m: ModelConfig) -> int:
    """Returns the number of parameters; a tied embedding counts once."""
    attention = m.embed_dim * m.head_dim * (2 * m.num_heads + 2 * m.num_kv_heads)
    mlp = 3 * m.embed_dim * m.mlp_dim
    layer = attention + mlp + 2 * m.embed_dim
    tables = m.vocab_size * m.embed_dim * (1 if m.tie_embeddings else 2)
    return m.num_layers * layer + tables + m.embed_dim


def flops_per_token_6n(m: ModelConfig) -> float:
    """Returns training FLOPs per token by the 6N rule: 6 per parameter, attention scores left out.

    Source: Kaplan et al., arXiv 2001.08361, section 2.1.
    """
    return 6.0 * num_params(m)


def flops_per_token(m: ModelConfig, seq_len: int) -> float:
    """Returns 6N plus attention scores counted over the full square, 12 * layers * heads * head_dim * seq_len.

    Source: Chowdhery et al. (PaLM), arXiv 2204.02311, appendix B. Recomputation never counts.
    """
    return flops_per_token_6n(m) + 12.0 * m.num_layers * m.num_heads * m.head_dim * seq_len


# Bytes of state per parameter: parameters, two moments, and master weights where the policy keeps them.
STATE_BYTES_PER_PARAM = {"fp32": 4 + 2 * 4, "mixed": 2 + 2 * 4 + 4, "bf16": 2 + 2 * 2}


def state_bytes(m: ModelConfig, policy: str) -> int:
    """Returns the bytes of a whole training state, before sharding: per parameter, plus two int32 counters."""
    return STATE_BYTES_PER_PARAM[policy] * num_params(m) + 8
