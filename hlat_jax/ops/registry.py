"""The ops with several implementations, by the key of ModelConfig that selects one."""

from __future__ import annotations

from hlat_jax.ops import attention, cross_entropy
from hlat_jax.ops.dialect import Op

OPS: dict[str, Op] = {
    "attention": attention.OP,
    "cross_entropy": cross_entropy.OP,
}
