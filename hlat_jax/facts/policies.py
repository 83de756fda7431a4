"""Precision policies by name, the one table of their dtypes without JAX, from which `precision.POLICIES` is made."""

from __future__ import annotations

import dataclasses

_BYTES = {"float32": 4, "bfloat16": 2}


@dataclasses.dataclass(frozen=True)
class PolicyFacts:
    """A precision policy with the attributes of `precision.Policy`, and dtypes by name."""

    param: str
    compute: str
    accumulate: str
    moment: str
    master: str | None = None
    rounding: str = "nearest"
    autocast: str | None = None

    @property
    def moment_bytes(self) -> int:
        """The bytes of one moment of a parameter."""
        return _BYTES[self.moment]

    @property
    def state_bytes_per_param(self) -> int:
        """The bytes of a parameter, two moments, and the master weight if the policy keeps one."""
        return _BYTES[self.param] + 2 * self.moment_bytes + _BYTES.get(self.master or "", 0)


_FP32, _BF16 = ("float32",) * 4, ("bfloat16",) * 4
POLICY_FACTS = {
    # Single precision throughout: the reference for every other policy.
    "fp32": PolicyFacts(*_FP32),
    # The fp32 forward pass with each matrix product cast to bf16, as RAF transforms a model, arXiv 2303.04759.
    "autocast": PolicyFacts(*_FP32, autocast="bf16"),
    # HLAT-70B: bf16 weights and activations, all state that accumulates over steps in fp32.
    "mixed": PolicyFacts("bfloat16", "bfloat16", "float32", "float32", master="float32"),
    # HLAT-7B: weights, sums of gradients and moments are stored in bf16 alone, rounded stochastically at every write,
    # so that updates below half a bf16 step are applied in expectation.
    "bf16_sr": PolicyFacts(*_BF16, rounding="stochastic"),
    # All storage is bf16, rounded to nearest: small updates are lost, and HLAT saw training diverge.
    "bf16": PolicyFacts(*_BF16),
}
