"""SwiGLU, the gated activation of the feed-forward block: contract and two XLA implementations."""

from __future__ import annotations

import jax

from hlat_jax.ops.dialect import Implementation, Op, describe_array


def swiglu(gate: jax.Array, *, up: jax.Array, implementation: str) -> jax.Array:
    """Returns `silu(gate) * up`, elementwise, in the dtype of the inputs.

    Args:
      gate: any shape and float dtype.
      up: of the same shape and dtype.
      implementation: a name that `OP.choose` returns.

    Raises:
      ValueError: the implementation cannot serve these arguments.

    Source: arXiv 2002.05202, equation 6, as Llama uses it.
    """
    return OP.run(implementation, gate, up, **describe_array(gate.shape, dtype=gate.dtype))


def _reference(gate, up):
    return jax.nn.silu(gate) * up


OP = Op("model.swiglu")
OP.register(Implementation("reference", _reference, {"*": 5}))
# the backward pass keeps only the inputs, which are outputs of the preceding products
OP.register(Implementation("recomputed", jax.checkpoint(_reference), {"*": 10}))
