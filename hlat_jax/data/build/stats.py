"""Counts documents, bytes and tokens of a config's text and the epochs of its run, `python -m hlat_jax.data stats`.

The number of documents is exact. Bytes and tokens are estimated from a sample, unless the sample is all of the text.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import itertools
from collections.abc import Sequence

import numpy as np

from hlat_jax.config import Config, count_text
from hlat_jax.data import mixture, packing, sources, streams
from hlat_jax.data.formats.records import BadRecord
from hlat_jax.data.order import evenly_spread
from hlat_jax.data.tokenizer import Tokenizer
from hlat_jax.facts.byte_sizes import format_bytes
from hlat_jax.resolve import held_out_share
from hlat_jax.store.progress import Status

_BATCH_DOCUMENTS = 64
_HEADER = ("source", "documents", "bytes", "tokens", "tokens/byte", "epochs in num_steps")


@dataclasses.dataclass(frozen=True)
class Counts:
    """The numbers of documents, UTF-8 bytes of text, tokens (EOS counted) and <unk> tokens, and the share of targets.

    If `is_estimate`, all but the number of documents is estimated from a sample.
    """

    documents: int
    bytes: float
    tokens: float
    unknown: float
    trained_share: float
    is_estimate: bool


def report(config: Config, *, sample_bytes: int, status: Status | None = None) -> str:
    """Returns a table with a row for each source of training and validation text, with the epochs of training text.

    Epochs are the tokens that the mixture takes from a source, up to train.num_steps, over the tokens it holds. A
    sample of `sample_bytes` of text of each source is tokenized, or all of it for 0. `status` is updated meanwhile.

    Raises:
      ValueError: bad data (see sources), or a dataset built with another tokenizer.
    """
    data, tokenizer = config.data, Tokenizer(config.data.tokenizer, vocab_size=config.model.vocab_size)
    step_tokens, num_steps = data.batch_size * data.seq_len, config.train.num_steps
    train = mixture.parse_sources(data.train, key="data.train")
    stages = mixture.parse_stages(data.mixture, names=tuple(train), batch_tokens=step_tokens)
    is_share = bool(held_out_share(data.validation))
    held_out = {} if is_share or not data.validation else mixture.parse_sources(data.validation, key="data.validation")
    named = [("data.train", name, spec) for name, spec in train.items()]
    named += [("data.validation", name, spec) for name, spec in held_out.items()]
    taken = [step_tokens * batches for batches in rows_of_steps(stages, num_steps=num_steps)]
    rows, shares, parts, is_estimate = [_HEADER], {}, [], False
    for index, (key, name, spec) in enumerate(named):
        counts = count(
            spec, config=config, key=key, tokenizer=tokenizer, sample_bytes=sample_bytes, status=status or Status()
        )
        about = "~" if counts.is_estimate else ""
        is_validation = key == "data.validation"
        rows.append((
            f"validation: {name}" if is_validation else name,
            f"{counts.documents:,}",
            f"{about}{counts.bytes:,.0f}",
            f"{about}{counts.tokens:,.0f}",
            f"{about}{counts.tokens / max(counts.bytes, 1):.4f}",
            "" if is_validation else f"{about}{taken[index] / max(counts.tokens, 1):,.3g}",
        ))  # fmt: skip
        shares[f"{'validation ' * is_validation}source {name}"] = counts.unknown / max(counts.tokens, 1)
        is_estimate |= counts.is_estimate
        if counts.trained_share < 1:
            parts.append(f"{counts.trained_share:.1%} of the tokens of {name} are answers, which are trained on.")
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in rows]
    sizes = f"{step_tokens:,} tokens = {data.batch_size} x {data.seq_len}"
    lines += ["", f"A step takes {sizes}, and train.num_steps={num_steps:,} take {num_steps * step_tokens:,}."]
    lines += parts
    if is_share:
        lines.append(
            f"{data.validation} of the documents of each source, at most {sources.MAX_HELD_OUT}, are held out."
        )
    if is_estimate:
        lines.append("~ marks estimates from a sample. --sample_mb=0 counts everything.")
    if tokenizer.unk_id < 0:
        return "\n".join([*lines, "No token is <unk>, as the tokenizer has a token for every byte."])
    lines += [f"<unk> is {share:.2%} of the tokens of {name}." for name, share in shares.items()]
    return "\n".join([*lines, *filter(None, itertools.starmap(sources.many_unknown, shares.items()))])


def rows_of_steps(stages: Sequence[mixture.MixtureStage], *, num_steps: int) -> list[float]:
    """Returns the number of rows that the first `num_steps` batches take from each source, in batches."""
    taken, begin = [0.0] * len(stages[0].shares), 0
    for stage in stages:
        end = num_steps if stage.until_step is None else min(stage.until_step, num_steps)
        for index, share in enumerate(stage.shares):
            taken[index] += max(end - begin, 0) * float(share)
        begin = max(begin, end)
    return taken


def count(spec: str, *, config: Config, key: str, tokenizer: Tokenizer, sample_bytes: int, status: Status) -> Counts:
    """Returns the counts of one source, estimated from evenly spread documents with `sample_bytes` bytes in total."""
    data = config.data
    status.share, status.text = 0.0, f"{key}: indexing documents"
    documents = streams.open_documents(spec, data, key=key, tokenizer=tokenizer)
    encode = streams.Encoder(data, tokenizer)

    def measure(index: int) -> tuple[int, int, int, int] | None:
        try:
            document = documents[index]
        except BadRecord:
            if data.on_bad_record == "raise":
                raise
            return None
        tokens = packing.concatenate(list(encode(document)))
        num_bytes = len(document.encode("utf-8")) if isinstance(document, str) else documents.text_bytes(index)
        return num_bytes, len(tokens), np.count_nonzero(tokens.ids == tokenizer.unk_id), np.count_nonzero(tokens.mask())

    sums, num_good, num_seen = np.zeros(4, np.int64), 0, 0
    with concurrent.futures.ThreadPoolExecutor(max(data.num_threads, 1)) as pool:
        order = evenly_spread(len(documents))
        while indices := list(itertools.islice(order, _BATCH_DOCUMENTS)):
            measured = [numbers for numbers in pool.map(measure, indices) if numbers is not None]
            sums += np.sum(measured, axis=0, dtype=np.int64) if measured else 0
            num_good, num_seen = num_good + len(measured), num_seen + len(indices)
            status.share = max(num_seen / len(documents), min(sums[0] / sample_bytes, 1.0) if sample_bytes else 0.0)
            status.text = f"tokenizing, {count_text(num_seen, 'document')}  {format_bytes(int(sums[0]))}"
            if sample_bytes and sums[0] >= sample_bytes:
                break
    scale = len(documents) / num_seen
    return Counts(
        documents=round(num_good * scale),
        bytes=sums[0] * scale,
        tokens=sums[1] * scale,
        unknown=sums[2] * scale,
        trained_share=sums[3] / max(sums[1], 1),
        is_estimate=num_seen < len(documents),
    )
