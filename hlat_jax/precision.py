"""Precision policies: what is stored, computed, accumulated and rounded, by name.

Owns every dtype decision and every cast of parameters. Refuses to know models: the fp32 islands (norm statistics,
softmax, logits and loss) are part of each op's contract and do not depend on the policy.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True)
class Policy:
    """One precision recipe.

    Attributes:
      param: dtype of the parameters that the forward pass reads.
      compute: dtype of matrix products and activations.
      accumulate: dtype in which gradients of microbatches are summed.
      moment: dtype of the optimizer's moments.
      master: dtype of the weights that the optimizer updates, kept beside the parameters; None: it updates the
        parameters themselves.
      rounding: how a value is written in a narrower dtype. Only round-to-nearest so far.
    """

    param: Any
    compute: Any
    accumulate: Any
    moment: Any
    master: Any
    rounding: str = "nearest"


POLICIES = {
    # Everything in single precision: the reference for every other policy.
    "fp32": Policy(jnp.float32, jnp.float32, jnp.float32, jnp.float32, None),
    # HLAT-70B: bf16 weights and activations, everything that accumulates over steps in fp32.
    "mixed": Policy(jnp.bfloat16, jnp.bfloat16, jnp.float32, jnp.float32, jnp.float32),
    # Everything that is stored is bf16, rounded to nearest: small updates vanish, HLAT saw it diverge.
    "bf16": Policy(jnp.bfloat16, jnp.bfloat16, jnp.bfloat16, jnp.bfloat16, None),
}


def round_to(value: jax.Array, dtype: Any, *, rounding: str) -> jax.Array:
    """Returns `value` in `dtype`; the one place where a stored value loses bits.

    Raises:
      ValueError: a rounding that is not implemented.
    """
    if rounding != "nearest":
        raise ValueError(f"rounding={rounding!r} is not implemented; use 'nearest'.")
    return value.astype(dtype)


def cast_tree(tree: Any, dtype: Any, *, rounding: str = "nearest") -> Any:
    """Returns the tree with every floating-point leaf in `dtype`; other leaves as they are."""

    def cast(leaf):
        return round_to(leaf, dtype, rounding=rounding) if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf

    return jax.tree.map(cast, tree)
