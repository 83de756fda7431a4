"""Measures loss, perplexity and bits per byte on held-out text, always on the same batches."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from hlat_jax.batch import Batch
from hlat_jax.data.held_out import HeldOut
from hlat_jax.data.mixture import UNNAMED
from hlat_jax.parallel.rows import pad_rows, shard_microbatches
from hlat_jax.parallel.sharding import Layout
from hlat_jax.store.progress import Status


@dataclasses.dataclass(frozen=True)
class Validation:
    """Fixed batches of every source of held-out text, and the function that sums their losses.

    Attributes:
      sources: name of the source -> batches of this process.
      eval_step: (params, batch) -> (sum of losses in nats, counted tokens).
      num_parts: the number of parts of a batch that `eval_step` takes, one after another.
    """

    sources: Mapping[str, HeldOut]
    eval_step: Callable[..., Any]
    layout: Layout
    status: Status = dataclasses.field(default_factory=lambda: Status("evaluating"))
    num_parts: int = 1

    def __call__(self, params: Any) -> dict[str, float]:
        """Returns eval_loss (nats per token), perplexity, bits_per_byte and eval_tokens of the parameters.

        They are over all text; for each named source, eval_loss/NAME and so on are added.
        """
        nats, tokens, num_bytes = {}, {}, {}
        self.status.share = 0.0
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
        """Returns (sum of losses, counted tokens) of one batch, and shows the progress."""
        sums = _sums(self.eval_step, params, batch, layout=self.layout, num_parts=self.num_parts)
        self.status.share += 1 / sum(len(held_out.batches) for held_out in self.sources.values())
        self.status.text = "evaluating"
        return sums


@dataclasses.dataclass(frozen=True)
class SourceLosses:
    """Measures the loss of each source in the batch of a step, by a forward pass of each.

    Attributes:
      names: names of the sources, in the order of data.train.
      eval_step, layout, num_parts: as in `Validation`.
      num_rows: number of rows of the batch of the whole job.
    """

    names: Sequence[str]
    eval_step: Callable[..., Any]
    layout: Layout
    num_parts: int
    num_rows: int

    def __call__(
        self, params: Any, batch: Batch, row_sources: np.ndarray, num_tokens: Mapping[str, float]
    ) -> dict[str, float]:
        """Returns `source_loss/NAME`, in nats per counted token, of each source with tokens in the batch.

        Args:
          params: parameters.
          batch: the rows of this process.
          row_sources: the number of the source of each of these rows.
          num_tokens: `source_tokens/NAME` of the whole batch, the same in all processes.
        """
        losses = {}
        for source, name in enumerate(self.names):
            if num_tokens[f"source_tokens/{name}"]:
                weights = np.where((row_sources == source)[:, None], batch.weights, np.float32(0.0))
                rows = pad_rows(dataclasses.replace(batch, weights=weights), self.layout, num_rows=self.num_rows)
                loss, count = _sums(self.eval_step, params, rows, layout=self.layout, num_parts=self.num_parts)
                losses[f"source_loss/{name}"] = loss / count
        return losses


def _sums(
    eval_step: Callable[..., Any], params: Any, batch: Batch, *, layout: Layout, num_parts: int
) -> tuple[float, float]:
    """Returns (sum of losses, counted tokens) of a batch; blocks until they are computed.

    On CPUs, independent programs may otherwise overlap in a different order in each process, so that their collectives
    deadlock.
    """
    loss = count = 0.0
    for part in shard_microbatches(batch, layout, num_microbatches=num_parts):
        added = eval_step(params, part)
        loss, count = loss + float(added[0]), count + float(added[1])
    return loss, count


@dataclasses.dataclass(frozen=True)
class Best:
    """The validation with the lowest loss so far.

    Attributes:
      step: the step of that validation, or 0 without any.
      num_since: the number of validations since then.
    """

    step: int = 0
    eval_loss: float = math.inf
    num_since: int = 0

    def after(self, row: Mapping[str, Any]) -> Best:
        """Returns the best after a row of the metrics. A loss that is not finite is never the best."""
        if row.get("eval_loss") is None:
            return self
        if row["eval_loss"] < self.eval_loss:
            return Best(row["step"], row["eval_loss"])
        return dataclasses.replace(self, num_since=self.num_since + 1)


def measures(nats: float, num_tokens: float, *, num_bytes: int) -> dict[str, float]:
    """Returns eval_loss, perplexity, bits_per_byte and eval_tokens from the sum of the losses in nats."""
    loss = nats / num_tokens
    return {
        "eval_loss": loss,
        # exp overflows above 709 nats; a diverged model still gets a row
        "perplexity": math.exp(loss) if loss < 700 else math.inf,
        "bits_per_byte": nats / math.log(2) / num_bytes,
        "eval_tokens": int(num_tokens),
    }
