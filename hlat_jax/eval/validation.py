"""Loss, perplexity and bits per byte of held-out text. Owns the batches it looks at: the same ones every time."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from hlat_jax.batch import Batch
from hlat_jax.sharding import Layout, shard_batch


@dataclasses.dataclass(frozen=True)
class Validation:
    """A fixed set of batches with the function that sums their losses.

    Attributes:
      batches: NumPy batches of this process.
      num_bytes: UTF-8 bytes of the text that the counted targets stand for.
      eval_step: (params, batch) -> (sum of losses in nats, counted tokens).
      layout: where batches go.
    """

    batches: Sequence[Batch]
    num_bytes: int
    eval_step: Callable[..., Any]
    layout: Layout

    def __call__(self, params: Any) -> dict[str, float]:
        """Returns eval_loss (nats per token), perplexity, bits_per_byte and eval_tokens of the parameters."""
        sums = [self.eval_step(params, shard_batch(batch, self.layout)) for batch in self.batches]
        nats = math.fsum(float(loss) for loss, _ in sums)
        num_tokens = math.fsum(float(tokens) for _, tokens in sums)
        loss = nats / num_tokens
        return {
            "eval_loss": loss,
            # exp overflows a float above 709 nats: a diverged model still gets its row
            "perplexity": math.exp(loss) if loss < 700 else math.inf,
            "bits_per_byte": nats / math.log(2) / self.num_bytes,
            "eval_tokens": int(num_tokens),
        }


def counted_bytes(batches: Sequence[Batch], token_bytes: np.ndarray) -> int:
    """Returns the bytes of text of all targets with a weight; `token_bytes` [V] has the bytes of each token id."""
    return int(sum((token_bytes[batch.targets] * (batch.weights > 0)).sum(dtype=np.int64) for batch in batches))
