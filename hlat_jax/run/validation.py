"""Loss, perplexity and bits per byte on held-out text: the same batches every time."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

from hlat_jax.batch import Batch
from hlat_jax.data.held_out import HeldOut
from hlat_jax.data.mixture import UNNAMED
from hlat_jax.parallel.sharding import Layout, shard_batch


@dataclasses.dataclass(frozen=True)
class Validation:
    """Fixed batches of every source of held-out text, and the function that sums their losses.

    Attributes:
      sources: the batches of this process, by the name of their source.
      eval_step: (params, batch) -> (sum of losses in nats, counted tokens).
      layout: over which batches are sharded.
    """

    sources: Mapping[str, HeldOut]
    eval_step: Callable[..., Any]
    layout: Layout

    def __call__(self, params: Any) -> dict[str, float]:
        """Returns eval_loss (nats per token), perplexity, bits_per_byte and eval_tokens of the parameters.

        They are over all text together; for each source that has a name, eval_loss/NAME and so on follow.
        """
        nats, tokens, num_bytes = {}, {}, {}
        for name, held_out in self.sources.items():
            sums = [self._sums(params, batch) for batch in held_out.batches]
            nats[name] = math.fsum(loss for loss, _ in sums)
            tokens[name] = math.fsum(count for _, count in sums)
            num_bytes[name] = held_out.num_bytes
        row = measures(math.fsum(nats.values()), sum(tokens.values()), num_bytes=sum(num_bytes.values()))
        for name in self.sources:
            if name != UNNAMED:
                of_source = measures(nats[name], tokens[name], num_bytes=num_bytes[name])
                row |= {f"{key}/{name}": value for key, value in of_source.items()}
        return row

    def _sums(self, params: Any, batch: Batch) -> tuple[float, float]:
        """Returns (sum of losses, counted tokens) of one batch, once they are computed.

        On CPUs, programs that do not depend on each other may overlap in another order in each process, and their
        collectives then wait for each other forever.
        """
        loss, count = self.eval_step(params, shard_batch(batch, self.layout))
        return float(loss), float(count)


def measures(nats: float, num_tokens: float, *, num_bytes: int) -> dict[str, float]:
    """Returns eval_loss, perplexity, bits_per_byte and eval_tokens from the sum of the losses in nats."""
    loss = nats / num_tokens
    return {
        "eval_loss": loss,
        # exp overflows a float above 709 nats: a diverged model still gets its row
        "perplexity": math.exp(loss) if loss < 700 else math.inf,
        "bits_per_byte": nats / math.log(2) / num_bytes,
        "eval_tokens": int(num_tokens),
    }
