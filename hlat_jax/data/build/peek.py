"""Prints the text that a step trains on, `python -m hlat_jax.data peek --config=NAME --step=N [--row=R]`.

Starts at the nearest position that the run recorded and replays the batches in between. Writes nothing to the run
folder except the line index of a new or changed JSONL file, if the run keeps such indices.
"""

from __future__ import annotations

import dataclasses
import pathlib

import numpy as np

from hlat_jax import config as config_lib
from hlat_jax.config import count_text
from hlat_jax.data import packing, positions
from hlat_jax.data.loader import TrainBatches, batch_hash, make_batch
from hlat_jax.data.streams import Definition
from hlat_jax.data.tokenizer import Tokenizer
from hlat_jax.host.process import INDEX_FOLDER
from hlat_jax.resolve import batch_of_step, skipped_batches
from hlat_jax.store.metrics import ROWS_FILE, read_rows
from hlat_jax.store.progress import show_progress


def peek(config: config_lib.Config, workdir: pathlib.Path, *, step: int, row: int | None) -> int:
    """Prints row `row`, by default all rows, of the batch of `step`. Returns 1 if the run trained on another batch.

    Raises:
      ValueError: data or tokenizer that cannot be opened, or a run folder that belongs to other data.
    """
    if step > batch_of_step(config.train.num_steps, skipped_batches(config.train.skip_steps)):
        raise ValueError(
            f"--step={step} is beyond the last step of the run, train.num_steps={config.train.num_steps}. Give a step "
            "of the run, or set that key."
        )
    data = config.data
    tokenizer = Tokenizer(data.tokenizer, vocab_size=config.model.vocab_size)
    rows = list(range(data.batch_size)) if row is None else [row]
    size = f"{count_text(data.batch_size, 'row')} of {count_text(data.seq_len, 'token')}"
    print(f"step {step} of {config.name}: {size}, packing {data.packing}")
    definition, made = replay(data, workdir, tokenizer=tokenizer, step=step, rows=rows)
    for row_index, (source, packed) in zip(rows, made, strict=True):
        print_row(packed, row=row_index, source=source, definition=definition, tokenizer=tokenizer)
    if row is not None:
        return 0  # the hash of a step covers all its rows
    own_hash, path = batch_hash(make_batch([packed for _, packed in made]), rows=rows), workdir / ROWS_FILE
    recorded = [row for row in read_rows(path) if "batch_hash" in row]
    recorded = [row for row in recorded if row.get("batch", row["step"]) == step]  # `batch` with train.skip_steps
    if not recorded:
        print(f"\nbatch {own_hash}, without a row of step {step} in {path} to compare it with")
        return 0
    is_same = recorded[-1]["batch_hash"] == own_hash
    print(f"\nbatch {own_hash}: {'the same as' if is_same else 'NOT the same as'} in {path} for step {step}")
    return 0 if is_same else 1


def replay(
    data: config_lib.DataConfig, workdir: pathlib.Path, *, tokenizer: Tokenizer, step: int, rows: list[int]
) -> tuple[Definition, list[tuple[int, packing.Row]]]:
    """Returns the opened sources, and (number of its source, row) for each of `rows` of batch `step`.

    It prints the position from which it replays.

    Raises:
      ValueError: data that cannot be opened, or a run folder that belongs to other data.
    """
    index = workdir / INDEX_FOLDER
    batches = TrainBatches(data, tokenizer=tokenizer, rows=rows, index_folder=index if index.is_dir() else None)
    try:
        kept = positions.nearest_position(workdir, step - 1, data_identity=batches.definition.identity)
        num_passed, begins = 0, f"the beginning (none is recorded in {workdir})"
        if kept is not None:
            num_passed, position, path = kept
            batches.set_state(position[list(batches.rows)])
            begins = f"after step {num_passed} ({path})"
        replayed = step - 1 - num_passed
        print(f"position: {begins}, replaying {count_text(replayed, 'batch')}", flush=True)
        with show_progress("replaying") as status:
            for count in range(1, replayed + 1):
                batches.next_rows()
                status.share, status.text = count / replayed, count_text(count, "batch")
        return batches.definition, batches.next_rows()
    finally:
        batches.close()


def print_row(packed: packing.Row, *, row: int, source: int, definition: Definition, tokenizer: Tokenizer) -> None:
    """Prints a line about each document, or part of one, of a row, and its text with control tokens."""
    opened = definition.sources[source]
    padding = len(packed.tokens) - sum(span.stop - span.start for span in packed.spans)
    spans = []
    for span in packed.spans:
        document = definition.document(source, row=row, epoch=span.epoch, entry=span.document)
        spans.append((dataclasses.replace(span, document=document), opened.documents.locate(document)))
    padded = f", {count_text(padding, 'token')} of padding" if padding else ""
    print(f"\nrow {row}, source {opened.name}, documents or parts: {len(spans)}{padded}")
    for span, location in spans:
        tokens = packed.tokens[span.start : span.stop]
        ids, is_target = tokens.ids, tokens.mask()
        last = span.token + len(ids) - 1
        print(
            f"--- document {span.document} ({location}), epoch {span.epoch}, tokens {span.token} to "
            f"{last}, at {span.start} to {span.stop - 1} of the row"
            + ("" if is_target.all() else f", {is_target.sum()} trained on, the others in [[ ]]")
        )
        turns = np.flatnonzero(np.diff(is_target)) + 1
        for part, counts in zip(np.split(ids, turns), np.split(is_target, turns), strict=True):
            text = tokenizer.decode_with_control_tokens(part)  # U+FFFD where a character is not whole
            print(text if counts[0] else f"[[{text}]]", end="")
        print()
