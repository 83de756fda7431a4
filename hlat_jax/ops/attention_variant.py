"""What attention of models other than ours may do to its scores and probabilities."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax

# Finite, so that a masked score minus the row's maximum is never inf - inf.
MASKED = -1e30


@dataclasses.dataclass(frozen=True)
class Variant:
    """What attention of other models does to its scores and probabilities; the default is `attention`.

    Arrays are [B or 1, N or 1, T or 1, S or 1].

    Attributes:
      causal: whether a query attends only to its own and earlier positions.
      scale: factor of the scores, 1/sqrt(H) if it is None.
      softcap: c: scores become c * tanh(scores / c), before masks. Source: arXiv 2408.00118, section 2.
      masks: bool, True where a query may attend to a key, in all of them. A query that attends to no key gets the mean
        of all values, as by `where(mask, scores, -1e9)`.
      keep: bool: the probabilities that dropout keeps, after the softmax.
      keep_factor: factor of the kept probabilities: 1 / (1 - rate).
    """

    causal: bool = True
    scale: float | None = None
    softcap: float | None = None
    masks: Sequence[jax.Array] = ()
    keep: jax.Array | None = None
    keep_factor: float = 1.0

    @property
    def features(self) -> tuple[str, ...]:
        """Names of what differs from the default, for a CallSpec and for errors."""
        differs = {
            "bidirectional": not self.causal,
            "scale": self.scale is not None,
            "softcap": self.softcap is not None,
            "mask": bool(self.masks),
            "dropout": self.keep is not None,
        }
        return tuple(name for name, is_set in differs.items() if is_set)
