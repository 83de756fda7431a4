"""Chooses the source of each row by data.train and data.mixture, with accounts of tokens per source.

Every row keeps its own account, so that no process needs the rows of another. Each source has a share of [0, 1). Row r
of batch k selects the source with u = frac(r * a1 + k * a2) in its share. Here (a1, a2) = (1/p, 1/p^2) and p is the
plastic number. This quasirandom R2 sequence is even over every run of rows, of batches, and of both. The selected
source is credited with the tokens of one full row. The row is then taken from the source that is owed most, and its
tokens are debited from that source. Padding is debited from all sources by their shares. The balance stays within a few
rows, so the weight of a source is its share of the tokens, not of the rows. If every row is full, as under `concat`,
the selected source is always owed most, and batch k needs no account. Source: Roberts, "The Unreasonable Effectiveness
of Quasirandom Sequences" (2018), for R2.
"""

from __future__ import annotations

import bisect
import dataclasses
import fractions
import itertools
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from hlat_jax.facts.names import nearest

UNNAMED = "all"

_UNIT = 1 << 64
# 2**64 / p and 2**64 / p**2 of the plastic number p = 1.32471795724474602596..., the real root of p**3 = p + 1
_STEP_ROW = 13925035116211876495
_STEP_BATCH = 10511698010929265437
_NAMED = re.compile(r"\s*([A-Za-z]\w*)\s*=(.*)", re.ASCII | re.DOTALL)
_UNTIL = re.compile(r"(.*?)(?:\s+until_(step|tokens)\s*=\s*(\S+))?\s*", re.DOTALL)


def parse_sources(spec: str, *, key: str) -> dict[str, str]:
    """Returns name -> PATHS in order, from `PATHS` (one source, named "all") or `NAME=PATHS;NAME=PATHS`.

    A path that starts like a name, such as lang=en/a.jsonl, must be written ./lang=en/a.jsonl.
    """
    parts = [part for part in spec.split(";") if part.strip()]
    matches = [_NAMED.fullmatch(part) for part in parts]
    if not any(matches):
        return {UNNAMED: spec}
    named = {match[1]: match[2].strip() for match in matches if match}
    if len(named) < len(parts) or not all(named.values()) or (UNNAMED in named and len(named) > 1):
        raise ValueError(
            f"{key}={spec!r} does not name its sources. Write NAME=PATHS;NAME=PATHS with different names, none of them "
            f"{UNNAMED!r}, and commas between paths."
        )
    return named


@dataclasses.dataclass(frozen=True)
class MixtureStage:
    """A stage of the mixture, with the shares of the batches from the end of the previous stage up to `until_step`.

    Attributes:
      until_step: the first batch of the next stage, or None in the last stage.
      shares: one exact share per source, in the order of the sources. Their sum is 1.
      until_tokens: if rows hold padding, the number of tokens after which the stage ends. `until_step` is then the
        earliest possible first batch of the next stage.
    """

    until_step: int | None
    shares: tuple[fractions.Fraction, ...]
    until_tokens: int | None = None


def parse_stages(
    spec: str, *, names: Sequence[str], batch_tokens: int, has_padding: bool = False
) -> tuple[MixtureStage, ...]:
    """Returns the stages of `NAME=W,NAME=W[ until_step=N| until_tokens=N];...`, or of "" for a single source.

    `batch_tokens` is the largest number of tokens in a batch, which usually holds less with `has_padding`. A stage
    until N tokens ends with the batch that reaches N.
    """
    parts = [part for part in spec.split(";") if part.strip()]
    if not parts and len(names) == 1:
        return (MixtureStage(None, (fractions.Fraction(1),)),)
    if not parts:
        example = ",".join(f"{name}=1" for name in names)
        raise ValueError(f"data.mixture is empty, but data.train has {len(names)} sources. Set it, as in {example}")
    stages, before = [], 0
    for stage_number, part in enumerate(parts, 1):
        where = f"data.mixture, stage {stage_number} ({part.strip()})"
        weights, unit, count = _UNTIL.fullmatch(part).groups()
        shares = _shares(weights, names=names, where=where)
        if (unit is None) != (stage_number == len(parts)):
            raise ValueError(f"{where}: each stage but the last must have an until_step or until_tokens.")
        if unit is None:
            stages.append(MixtureStage(None, shares))
            continue
        amount = _count(count, where=where)
        until = amount if unit == "step" else -(-amount // batch_tokens)
        if until <= before:
            raise ValueError(f"{where} ends with step {until}, but must end after step {before}.")
        stages.append(MixtureStage(until, shares, amount if unit == "tokens" and has_padding else None))
        before = until
    return tuple(stages)


def stages_of(data: Mapping[str, Any], names: Sequence[str]) -> tuple[MixtureStage, ...]:
    """Returns the stages of a DataConfig as a dict, for the sources `names` of its data.train."""
    batch_tokens, has_padding = data["batch_size"] * data["seq_len"], data["packing"] == "documents"
    return parse_stages(data["mixture"], names=names, batch_tokens=batch_tokens, has_padding=has_padding)


def first_stages_of(data: Mapping[str, Any], *, num_batches: int) -> list[tuple[int, list[str]]]:
    """Returns `first_stages` of a DataConfig as a dict."""
    names = list(parse_sources(data["train"], key="data.train"))
    return first_stages(stages_of(data, names), num_batches=num_batches)


def first_stages(stages: Sequence[MixtureStage], *, num_batches: int) -> list[tuple[int, list[str]]]:
    """Returns (end, exact shares) of the stages of the first `num_batches` batches, in a canonical form.

    Consecutive stages of equal shares are merged, and later stages are left out. A stage that ends by tokens has the
    earliest possible end. If that end is within the batches, the tokens of the stage follow its shares.
    """
    ends: list[tuple[int, list[str]]] = []
    for stage in stages:
        begin = ends[-1][0] if ends else 0
        end = num_batches if stage.until_step is None else min(stage.until_step, num_batches)
        shares = [str(share) for share in stage.shares]
        if stage.until_tokens is not None and end < num_batches:
            shares.append(f"{stage.until_tokens} tokens")
        if end > begin:
            if ends and ends[-1][1] == shares:
                ends.pop()
            ends.append((end, shares))
    return ends


def _shares(text: str, *, names: Sequence[str], where: str) -> tuple[fractions.Fraction, ...]:
    weights: dict[str, fractions.Fraction] = {}
    for item in text.split(","):
        match = _NAMED.fullmatch(item)
        if match is None or match[1] not in names:
            meant = nearest(match[1], names) if match else ""
            raise ValueError(f"{where}: {item.strip()!r} is not NAME=WEIGHT of a source in data.train. {meant}")
        try:
            weight = fractions.Fraction(match[2].strip())  # exact: shares do not depend on floating-point rounding
        except (ValueError, ZeroDivisionError):
            weight = fractions.Fraction(-1)
        if weight < 0 or match[1] in weights:
            raise ValueError(f"{where}: {item.strip()!r} must be the one weight of its source, a number of at least 0.")
        weights[match[1]] = weight
    missing = [name for name in names if name not in weights]
    if missing:
        raise ValueError(f"{where} has no weight for {', '.join(missing)}. Write {missing[0]}=0 to leave it out.")
    total = sum(weights.values())
    if total == 0:
        raise ValueError(f"{where}: all weights are 0. Give one above 0.")
    return tuple(weights[name] / total for name in names)


def _count(text: str, *, where: str) -> int:
    """Returns a positive integer, which may be written 1.4e12 or 1_400_000."""
    try:
        count = fractions.Fraction(text)
    except (ValueError, ZeroDivisionError):
        count = fractions.Fraction(0)
    if count <= 0 or count.denominator != 1:
        raise ValueError(f"{where}: {text!r} is not a positive integer.")
    return int(count)


class Mixture:
    """The choice of a source for every row of every batch, by stages, and the account of each row.

    Attributes:
      num_rows: the number of rows of a batch, among which the tokens of a stage are divided evenly.
      row_tokens: the number of tokens of a full row.
    """

    def __init__(self, names: Sequence[str], *, stages: Sequence[MixtureStage], num_rows: int, row_tokens: int):
        self.names, self.stages = tuple(names), tuple(stages)
        self.num_rows, self.row_tokens = num_rows, row_tokens
        # source i has the points from bound i - 1 to below bound i, perhaps none
        self._bounds = [[int(bound * _UNIT) for bound in itertools.accumulate(s.shares)] for s in self.stages]

    def choose(self, row: int, *, batch: int, emitted: Sequence[int], owed: Sequence[int]) -> int:
        """Returns the source of one row of one batch.

        Args:
          row: the number of the row in its batch.
          batch: the number of the batch, from 0.
          emitted: the tokens of each source in row `row` of the earlier batches.
          owed: the tokens owed to each source after them, see `account_after`.
        """
        stage = self._stage(batch, emitted)
        credited = self._credit(stage, row, batch=batch, owed=owed)
        weighted = (source for source, share in enumerate(self.stages[stage].shares) if share)
        return max(weighted, key=lambda source: credited[source])  # the first of equals

    def account_after(
        self, row: int, *, batch: int, emitted: Sequence[int], owed: Sequence[int], num_tokens: int
    ) -> tuple[list[int], list[int]]:
        """Returns (emitted, owed) after a row of `num_tokens` tokens. The sum of `owed` is 0 before and after."""
        stage, source = self._stage(batch, emitted), self.choose(row, batch=batch, emitted=emitted, owed=owed)
        padding = batch * self.row_tokens - sum(emitted)  # in this row of the batches before
        padding_after, paid = padding + self.row_tokens - num_tokens, 0
        emitted, owed = list(emitted), self._credit(stage, row, batch=batch, owed=owed)
        emitted[source] += num_tokens
        owed[source] -= num_tokens
        for index, bound in enumerate(itertools.accumulate(self.stages[stage].shares)):
            # cumulative sums are rounded, so that errors do not accumulate
            until = math.floor(bound * padding_after) - math.floor(bound * padding)
            owed[index] -= until - paid
            paid = until
        return emitted, owed

    def _credit(self, stage: int, row: int, *, batch: int, owed: Sequence[int]) -> list[int]:
        """Returns `owed` with the tokens of a full row for the source that the point of this row selects."""
        point, owed = (row * _STEP_ROW + batch * _STEP_BATCH) % _UNIT, list(owed)
        owed[bisect.bisect_right(self._bounds[stage], point)] += self.row_tokens
        return owed

    def _stage(self, batch: int, emitted: Sequence[int]) -> int:
        num_tokens = sum(emitted) * self.num_rows
        for index, stage in enumerate(self.stages[:-1]):
            if batch < stage.until_step if stage.until_tokens is None else num_tokens < stage.until_tokens:
                return index
        return len(self.stages) - 1

    def describe(self) -> str:
        """Returns the shares of all stages in one line."""
        lines = []
        for stage in self.stages:
            named = zip(self.names, stage.shares, strict=True)
            shares = ", ".join(f"{name} {float(share):.2%}" for name, share in named)
            until = "" if stage.until_step is None else f" until step {stage.until_step:,}"
            until = until if stage.until_tokens is None else f" until {stage.until_tokens:,} tokens"
            lines.append(shares + until)
        return "; then ".join(lines)
