"""The gated activation of the feed-forward block. Owns no projection."""

from __future__ import annotations

import jax


@jax.checkpoint
def swiglu(gate: jax.Array, up: jax.Array) -> jax.Array:
    """Returns `silu(gate) * up`, elementwise, in the dtype of the inputs. The backward pass keeps those alone.

    Source: arXiv 2002.05202, equation 6, as Llama uses it.
    """
    return jax.nn.silu(gate) * up
