"""SwiGLU, the gated activation of the feed-forward block, in plain JAX."""

from __future__ import annotations

import jax


@jax.checkpoint  # the backward pass keeps only the inputs, which are outputs of the preceding products
def swiglu(gate: jax.Array, up: jax.Array) -> jax.Array:
    """Returns `silu(gate) * up`, elementwise, in the dtype of the inputs, which have one shape and float dtype.

    Source: arXiv 2002.05202, equation 6, as Llama uses it.
    """
    return jax.nn.silu(gate) * up
