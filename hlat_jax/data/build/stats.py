"""`python -m hlat_jax.data stats`: the text of a config in documents, bytes and tokens, and the epochs of its run.

Counts of stored token ids are exact. Of text, the documents are exact, and bytes and tokens are estimated from a
sample, unless the sample is all of the text.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence

import numpy as np

from hlat_jax.config import Config, counted
from hlat_jax.data import mixture, sources, streams
from hlat_jax.data.formats import built, paths
from hlat_jax.data.formats.records import BadRecord
from hlat_jax.data.order import evenly_spread
from hlat_jax.data.tokenizer import Tokenizer
from hlat_jax.facts.byte_sizes import format_bytes
from hlat_jax.resolve import held_out_share
from hlat_jax.store.progress import Status

_BATCH_DOCUMENTS = 64


@dataclasses.dataclass(frozen=True)
class Counts:
    """Documents, UTF-8 bytes of text and tokens (EOS counted); `error` is the relative standard error of the tokens.

    `unknown` are the tokens that are <unk>, by a sample of stored ids; `num_bad` counts bad records in the sample;
    `ignored` describes the files in folders that are not read.
    """

    documents: int
    bytes: float
    tokens: float
    error: float = 0.0
    unknown: float = 0.0
    num_bad: int = 0
    ignored: tuple[str, ...] = ()

    def __add__(self, other: Counts) -> Counts:
        tokens = self.tokens + other.tokens
        error = math.hypot(self.error * self.tokens, other.error * other.tokens) / tokens if tokens else 0.0
        return Counts(
            self.documents + other.documents,
            bytes=self.bytes + other.bytes,
            tokens=tokens,
            error=error,
            unknown=self.unknown + other.unknown,
            num_bad=self.num_bad + other.num_bad,
            ignored=self.ignored + other.ignored,
        )


def report(config: Config, *, sample_bytes: int, status: Status | None = None) -> str:
    """Returns a table with a row for each source of training and validation text, and epochs for the former.

    Epochs are the tokens that the mixture takes from a source, up to train.num_steps and to optimizer.horizon_steps,
    over the tokens it holds. Of each source, `sample_bytes` of text are tokenized; 0: all of it. `status` is updated
    meanwhile.

    Raises:
      ValueError: bad data (see sources), or a dataset built with another tokenizer.
    """
    data, tokenizer = config.data, Tokenizer(config.data.tokenizer, vocab_size=config.model.vocab_size)
    step_tokens = data.batch_size * data.seq_len
    specs = mixture.parse_sources(data.train, key="data.train")
    stages = mixture.parse_stages(data.mixture, names=tuple(specs), batch_tokens=step_tokens)
    shares_run = rows_of_steps(stages, num_steps=config.train.num_steps)
    shares_all = rows_of_steps(stages, num_steps=config.optimizer.horizon_steps)
    lines, totals, unknown = [_HEADER], Counts(0, 0, 0), {}
    options = {"config": config, "tokenizer": tokenizer, "sample_bytes": sample_bytes}
    options |= {"status": Status() if status is None else status}
    for index, (name, spec) in enumerate(specs.items()):
        counts = unknown[f"source {name}"] = count(spec, key="data.train", **options)
        epochs = [_epochs(shares[index] * step_tokens, counts) for shares in (shares_run, shares_all)]
        lines.append(_row(name, counts, epochs))
        totals += counts
    if len(specs) > 1:
        asked = [step_tokens * steps for steps in (config.train.num_steps, config.optimizer.horizon_steps)]
        lines.append(_row("total", totals, [_epochs(tokens, totals) for tokens in asked]))
    is_share = bool(held_out_share(data.validation))
    held_out = {} if is_share or not data.validation else mixture.parse_sources(data.validation, key="data.validation")
    for name, spec in held_out.items():
        counts = unknown[f"validation source {name}"] = count(spec, key="data.validation", **options)
        lines.append(_row(f"validation: {name}", counts, ["", ""]))
        totals += counts
    notes = [*_notes(config, totals), *_unknown_notes(unknown, tokenizer)]
    return "\n".join([_aligned(lines), "", *notes, *totals.ignored])


def rows_of_steps(stages: Sequence[mixture.MixtureStage], *, num_steps: int) -> list[float]:
    """Returns the rows that the first `num_steps` batches take from each source, as a number of batches."""
    taken, begin = [0.0] * len(stages[0].shares), 0
    for stage in stages:
        end = num_steps if stage.until_step is None else min(stage.until_step, num_steps)
        for index, share in enumerate(stage.shares):
            taken[index] += max(end - begin, 0) * float(share)
        begin = max(begin, end)
    return taken


def count(spec: str, *, config: Config, key: str, tokenizer: Tokenizer, sample_bytes: int, status: Status) -> Counts:
    """Returns the counts of one source: exact for stored ids, estimated from a sample for text."""
    found, texts = paths.find_files(spec, key=key, text_field=config.data.text_field), []
    total = Counts(0, 0, 0, ignored=(f"{key}={spec}: {found.describe_ignored()}.",) if found.ignored else ())
    for file in found.files:
        manifest = built.read_manifest(file) if file.is_built else None
        if manifest is None or manifest.kind == "text":
            texts.append(file)
            continue
        stored = built.open_built(file, key=key, tokenizer_sha256=tokenizer.sha256)  # raises for another tokenizer
        unknown = sources.unknown_share(stored, tokenizer) * manifest.tokens
        total += Counts(manifest.documents, bytes=manifest.bytes, tokens=manifest.tokens, unknown=unknown)
    if texts:
        status.share, status.text = 0.0, f"{key}: indexing documents in {len(texts):,} files"
        documents = streams.open_documents(spec, config.data, key=key, files=texts)
        total += _sampled(documents, config=config, tokenizer=tokenizer, sample_bytes=sample_bytes, status=status)
    return total


def _sampled(
    documents: Sequence[str], *, config: Config, tokenizer: Tokenizer, sample_bytes: int, status: Status
) -> Counts:
    """Returns the counts of texts, estimated from evenly spread documents of `sample_bytes` in all."""

    def measure(index: int) -> tuple[int, int, int] | None:
        try:
            text = documents[index]
        except BadRecord:
            if config.data.on_bad_record == "raise":
                raise
            return None
        counts = [(len(ids), np.count_nonzero(ids == tokenizer.unk_id)) for ids in encode(text)]
        return len(text.encode("utf-8")), *(sum(numbers) for numbers in zip(*counts, strict=True))

    encode = streams.encoder(config.data, tokenizer)
    measured, num_bytes, num_seen = [], 0, 0
    with concurrent.futures.ThreadPoolExecutor(max(config.data.num_threads, 1)) as pool:
        order = evenly_spread(len(documents))
        while indices := list(itertools.islice(order, _BATCH_DOCUMENTS)):
            found = list(pool.map(measure, indices))
            num_seen += len(found)
            measured += [each for each in found if each is not None]
            num_bytes += sum(each[0] for each in found if each is not None)
            status.share = max(num_seen / len(documents), min(num_bytes / sample_bytes, 1.0) if sample_bytes else 0.0)
            status.text = f"tokenizing, {num_seen:,} documents  {format_bytes(num_bytes)}"
            if sample_bytes and num_bytes >= sample_bytes:
                break
    if not measured:
        return Counts(len(documents), bytes=0, tokens=0, num_bad=num_seen)
    sample, is_all = np.asarray(measured, np.float64), num_seen == len(documents)
    good = len(measured) / num_seen * len(documents)  # as in the sample
    spread = sample[:, 1].std() / max(sample[:, 1].mean(), 1e-9) / math.sqrt(len(sample))
    return Counts(
        round(good),
        bytes=sample[:, 0].mean() * good,
        tokens=sample[:, 1].mean() * good,
        error=0.0 if is_all else float(spread),
        unknown=sample[:, 2].mean() * good,
        num_bad=num_seen - len(measured),
    )


_HEADER = ("source", "documents", "bytes", "tokens", "tokens/byte", "epochs in num_steps", "in horizon_steps")


def _row(name: str, counts: Counts, epochs: Sequence[str]) -> tuple[str, ...]:
    about = "~" if counts.error else ""
    per_byte = f"{about}{counts.tokens / counts.bytes:.4f}" if counts.bytes else "-"
    return (
        name,
        f"{counts.documents:,}",
        f"{about}{counts.bytes:,.0f}",
        f"{about}{counts.tokens:,.0f}",
        per_byte,
        *epochs,
    )


def _epochs(tokens: float, counts: Counts) -> str:
    return f"{'~' if counts.error else ''}{tokens / counts.tokens:,.3g}" if counts.tokens else "-"


def _aligned(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if column == 0 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )


def _notes(config: Config, totals: Counts) -> list[str]:
    data, steps = config.data, (config.train.num_steps, config.optimizer.horizon_steps)
    step_tokens = data.batch_size * data.seq_len
    notes = [
        f"A step takes {step_tokens:,} tokens = {data.batch_size} x {data.seq_len}; train.num_steps={steps[0]:,} takes "
        f"{steps[0] * step_tokens:,}, optimizer.horizon_steps={steps[1]:,} takes {steps[1] * step_tokens:,}."
    ]
    if held_out_share(data.validation):
        notes.append(
            f"{data.validation} of the documents of each source, at most {sources.MAX_HELD_OUT}, are held out."
        )
    if totals.error:
        notes.append(
            f"~ marks estimates from a sample; the standard error of the tokens is {totals.error:.1%}. --sample_mb=0 "
            "counts everything."
        )
    if totals.num_bad:
        notes.append(f"skipped {counted(totals.num_bad, 'bad record')}.")
    return notes


def _unknown_notes(counts: Mapping[str, Counts], tokenizer: Tokenizer) -> list[str]:
    if tokenizer.unk_id < 0:
        return ["No token is <unk>: the tokenizer has a token for every byte."]
    shares = {name: each.unknown / each.tokens for name, each in counts.items() if each.tokens}
    notes = [f"<unk> is {share:.2%} of the tokens of {name}." for name, share in shares.items()]
    return notes + [warning for name, share in shares.items() if (warning := sources.many_unknown(name, share))]
