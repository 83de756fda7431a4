"""`python -m hlat_jax.run explain RUN@STEP`: what moved first before a step, its documents, and the steps most like it.

It reads the files of the run folder and the text of the run, and compiles nothing.
"""

from __future__ import annotations

import dataclasses
import math
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from hlat_jax.config import DataConfig, count_text
from hlat_jax.data.build.peek import replay
from hlat_jax.data.kept_tokenizer import resolve_tokenizer_path
from hlat_jax.data.loader import batch_hash, make_batch
from hlat_jax.data.tokenizer import Tokenizer
from hlat_jax.run.drift import complete
from hlat_jax.store.metrics import ROWS_FILE, read_rows
from hlat_jax.store.typed_json import read_json

LIMIT = 6.0  # robust deviations from the median, from where a quantity has moved, as train.spike_sigmas
_WINDOW, _LEAST = 32, 8  # steps of the running median before a step; and the fewest
_BEFORE = 10  # steps before STEP in which a quantity may have moved first
_HISTORY = 10_000  # steps among which alike ones are looked for
_LEAST_SPREAD = 1e-4  # of the median: a constant quantity has no spread
_MOST = 1e6  # deviations, also of a value that is not finite
# not `param_norm`, whose trend bends with the learning rate: it leaves a median of earlier steps in ordinary runs
_QUANTITIES = ("loss", "source_loss", "grad_norm", "update_norm")
_FEW = 4  # quantities, up to which the limit is LIMIT
_SHOWN = 12  # quantities
_WORDS = 60  # characters of a document, decoded from as many tokens


class Series(NamedTuple):
    """A quantity of the rows that have it: at `steps`, its `values`, the running medians, and deviations from them."""

    steps: np.ndarray
    values: np.ndarray
    medians: np.ndarray
    deviations: np.ndarray


def explain(workdir: pathlib.Path, step: int, *, num_documents: int = 8) -> None:
    """Prints what moved first, up to `num_documents` of each source of the batch, and the three most alike steps.

    Raises:
      ValueError: a folder without rows, or a step that it does not have or that has too few steps before it.
    """
    rows = {row["step"]: row for row in read_rows(_rows_file(workdir)) if "loss" in row}
    if not rows:
        raise ValueError(f"RUN={workdir} has no row of a step in {ROWS_FILE}. Give a run that has trained.")
    if step not in rows:
        raise ValueError(f"{workdir} has no row of step {step}. It has steps {min(rows)} to {max(rows)}.")
    rows = {each: row for each, row in rows.items() if step - _HISTORY <= each <= step}
    if len(rows) <= _LEAST:
        raise ValueError(
            f"{workdir}@{step} has {count_text(len(rows) - 1, 'row')} before it, and a median needs {_LEAST}. Give a "
            "later step."
        )
    near = (name for each, row in rows.items() if each >= step - _BEFORE for name in row if _is_quantity(name))
    series = {name: _series(rows, name) for name in dict.fromkeys(near)}  # not every row has each
    print("\n".join(_moved(workdir, step, series)))
    print("\n".join(_alike(step, series, rows)))
    _show_documents(workdir, rows[step], num_documents=num_documents)


def _rows_file(workdir: pathlib.Path) -> pathlib.Path:
    for name in (ROWS_FILE, "config.json"):
        if not (workdir / name).is_file():
            raise ValueError(f"RUN={workdir} has no {name}: it is not a run folder, or its run has not begun.")
    return workdir / ROWS_FILE


def _is_quantity(name: str) -> bool:
    return name.partition("/")[0] in _QUANTITIES


def _series(rows: Mapping[int, Mapping[str, Any]], name: str) -> Series:
    """Returns a quantity with its deviations in units of 1.4826 times the median distance from the median.

    That is the standard deviation of normal noise. A step that has not `_LEAST` steps before it deviates by NaN.
    """
    steps = [step for step, row in sorted(rows.items()) if name in row]
    values = np.asarray([rows[step][name] for step in steps], np.float64)
    finite = np.isfinite(values)
    known, num_known = values[finite], np.cumsum(finite) - finite  # before each step; the others are in no median
    medians, spreads = np.full((2, len(known) + 1), np.nan)  # by their number
    for end in range(_LEAST, min(_WINDOW, len(known) + 1)):
        medians[end], spreads[end] = _robust(known[:end])
    if len(known) >= _WINDOW:
        medians[_WINDOW:], spreads[_WINDOW:] = _robust(np.lib.stride_tricks.sliding_window_view(known, _WINDOW))
    medians, spreads = medians[num_known], spreads[num_known]
    spreads = np.maximum(spreads, np.maximum(_LEAST_SPREAD * np.abs(medians), np.finfo(np.float32).tiny))
    deviations = np.clip(np.where(finite, values - medians, np.inf) / spreads, -_MOST, _MOST)
    return Series(np.asarray(steps), values, medians, deviations)


def _robust(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the median and its spread over the last axis."""
    median = np.median(values, -1)
    return median, 1.4826 * np.median(np.abs(values - median[..., None]), -1)


def _moved(workdir: pathlib.Path, step: int, series: Mapping[str, Series]) -> Iterator[str]:
    """Yields lines about the quantities that moved, the first and farthest first."""
    # if a deviation above x has a chance of exp(-x), more quantities than a few move no more often by chance
    limit = LIMIT + math.log(max(1.0, len(series) / _FEW))
    found = []  # (first step, -deviations there, name, index of the first step)
    for name, of in series.items():
        near = np.flatnonzero((of.steps >= step - _BEFORE) & (np.abs(of.deviations) >= limit))
        if len(near):
            found.append((int(of.steps[near[0]]), -abs(of.deviations[near[0]]), name, near[0]))
    if not found:
        yield (
            f"{workdir}@{step}: nothing moved. No loss and no norm of step {step}, or of the {_BEFORE} steps before, "
            f"is {limit:.3g} robust deviations from its running median."
        )
        return
    found.sort()
    first = found[0]
    yield (
        f"{workdir}@{step}: {first[2]} moved first, at step {first[0]}, by {-first[1]:.3g} robust deviations from its "
        "running median."
    )
    yield f"  {'quantity':<24}{'first step':>10}{'value':>13}{'median':>13}{'deviations':>12}{f'at {step}':>12}"
    for at, _, name, index in found[:_SHOWN]:
        of = series[name]
        value, median, deviations = of.values[index], of.medians[index], of.deviations[index]
        now = f"{of.deviations[-1]:+.3g}" if of.steps[-1] == step else "-"
        yield f"  {name:<24}{at:>10}{value:>13.5g}{median:>13.5g}{deviations:>+12.3g}{now:>12}"
    if len(found) > _SHOWN:
        yield f"  and {len(found) - _SHOWN} more quantities"


def _alike(step: int, series: Mapping[str, Series], rows: Mapping[int, Mapping[str, Any]]) -> Iterator[str]:
    """Yields lines about the three earlier steps with the most similar deviations.

    The distance is the root of the mean square difference of asinh(deviations), so that one quantity does not decide.
    """
    steps = sorted(rows)
    scaled = np.full((len(series), len(steps)), np.nan)
    for index, of in enumerate(series.values()):
        scaled[index, np.searchsorted(steps, of.steps)] = np.arcsinh(of.deviations)
    differences = np.square(scaled[:, :-1] - scaled[:, -1:])
    num_known = np.isfinite(differences).sum(0)
    sums = np.where(np.isfinite(differences), differences, 0.0).sum(0)
    distances = np.where(num_known, np.sqrt(sums / np.maximum(num_known, 1)), np.inf)
    nearest = [index for index in np.argsort(distances, kind="stable")[:3] if math.isfinite(distances[index])]
    yield "\nthe most alike steps before it:" if nearest else "\nno step before it has enough rows to be compared."
    for index in nearest:
        row = rows[steps[index]]
        same = ", the same batch" if row.get("batch_hash") == rows[step].get("batch_hash") else ""
        yield (
            f"  step {steps[index]}: distance {distances[index]:.3g}, loss {row['loss']:.4f}, gradient norm "
            f"{row['grad_norm']:.4g}{same}"
        )


def _show_documents(workdir: pathlib.Path, row: Mapping[str, Any], *, num_documents: int) -> None:
    """Prints the documents of the batch of a row by source, or why they cannot be read."""
    config, batch = complete(read_json(workdir / "config.json")), row.get("batch", row["step"])
    print(f"\nbatch {batch}:")
    try:
        if unknown := config["data"].keys() - {field.name for field in dataclasses.fields(DataConfig)}:
            raise ValueError(
                f"its config has data.{min(unknown)}, which this version lacks. Use the version that wrote it."
            )
        data = DataConfig(**config["data"])
        path = resolve_tokenizer_path(data.tokenizer, workdir)
        tokenizer = Tokenizer(path, vocab_size=config["model"]["vocab_size"])
        numbers = list(range(data.batch_size))
        definition, made = replay(data, workdir, tokenizer=tokenizer, step=batch, rows=numbers)
    except (ValueError, OSError) as error:
        print(f"  its documents cannot be read: {error}")
        return
    if row.get("batch_hash", "") != batch_hash(make_batch([packed for _, packed in made]), rows=numbers):
        print("  WARNING: the text has changed since. The run trained on another batch than this one.")
    for source, opened in enumerate(definition.sources):
        packed_by_row = [(index, packed) for index, (of, packed) in enumerate(made) if of == source]
        spans = [(index, packed, span) for index, packed in packed_by_row for span in packed.spans]
        num_tokens = sum(span.stop - span.start for *_, span in spans)
        rows_text, tokens_text = count_text(len(packed_by_row), "row"), count_text(num_tokens, "token")
        print(f"source {opened.name}: {rows_text}, {tokens_text}, documents or parts: {len(spans)}")
        for index, packed, span in spans[:num_documents]:
            document = definition.document(source, row=index, epoch=span.epoch, entry=span.document)
            text = tokenizer.decode_with_control_tokens(packed.tokens.ids[span.start : span.stop][:_WORDS])
            print(f"  row {index}, document {document} ({opened.documents.locate(document)}), from token {span.token}:")
            print(f"    {' '.join(text.split())[:_WORDS]}")
        if len(spans) > num_documents:
            print(f"  and {len(spans) - num_documents} more, see --documents")
