"""What is known of precision policies without JAX; their dtypes are in `precision.POLICIES`."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class PolicyFacts:
    """Facts of a precision policy.

    Attributes:
      state_bytes_per_param: parameter, two moments, and the master weight if the policy keeps one.
      moment_bytes: one moment of a parameter.
      rounding: how stored values are rounded: "nearest" or "stochastic".
    """

    state_bytes_per_param: int
    moment_bytes: int = 4
    rounding: str = "nearest"


POLICY_FACTS = {
    "fp32": PolicyFacts(state_bytes_per_param=4 + 2 * 4),
    "autocast": PolicyFacts(state_bytes_per_param=4 + 2 * 4),
    "mixed": PolicyFacts(state_bytes_per_param=2 + 2 * 4 + 4),
    "bf16_sr": PolicyFacts(state_bytes_per_param=2 + 2 * 2, moment_bytes=2, rounding="stochastic"),
    "bf16": PolicyFacts(state_bytes_per_param=2 + 2 * 2, moment_bytes=2),
}
