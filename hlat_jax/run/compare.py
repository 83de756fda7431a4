"""`python -m hlat_jax.run compare A B`: the first step at which two runs differ, in which quantity, and why.

It reads the files of the run folders and imports no JAX.
"""

from __future__ import annotations

import fnmatch
import math
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

from hlat_jax.config import OP_KEYS, count_text
from hlat_jax.run.goodput import read_events
from hlat_jax.store.checkpoint_checks import saved_run, saved_steps
from hlat_jax.store.config_diff import flat
from hlat_jax.store.loss_curve import plot_two
from hlat_jax.store.metrics import ROWS_FILE, read_rows
from hlat_jax.store.typed_json import read_json

# Of a row -> the settings that may explain why it differs first, in the order of cause.
_DATA = ("data.*", "manifest.*", "tokenizer*", "train.skip_steps")
_NO_NUMBERS = ("name", "metrics.*", "checkpoint.*", "data.*", "manifest.*", "train.sample_*", "train.eval_*")
_QUANTITIES = {"batch": _DATA, "batch_hash": _DATA, "tokens": _DATA, "learning_rate": ("optimizer.*",)}
_QUANTITIES |= dict.fromkeys(("loss", "grad_norm", "param_norm", "spike", "nonfinite", "eval_loss"), ("*",))
_SAME_WEIGHTS = tuple(f"model.{key}" for key in (*OP_KEYS, "remat", "layer_loop", "allow_nki_on_trn1"))


def compare(first: pathlib.Path, second: pathlib.Path, *, plot: str = "") -> str:
    """Returns lines about the difference of two runs, and draws their losses into the file `plot`.

    Raises:
      ValueError: a folder is not that of a run, or the runs have different models, or no common step.
    """
    folders = (first, second)
    for folder in folders:
        if not (folder / "config.json").is_file():
            raise ValueError(f"RUN={folder} has no config.json: it is not a run folder, or its run has not begun.")
    rows = [_rows_of(folder) for folder in folders]
    settings = _differences(*(_settings_of(folder) for folder in folders))
    if models := [line for key, line in settings.items() if _matches(key, ("model.*",), _SAME_WEIGHTS)]:
        raise ValueError(f"{first} and {second} are runs of different models: {'; '.join(models[:3])}.")
    steps = sorted(rows[0].keys() & rows[1].keys())
    if not steps:
        raise ValueError(f"{first} and {second} have no step in common. See their {ROWS_FILE}.")
    found = {}  # quantity -> (first step, its two values, the largest difference relative to the first run)
    for name in _QUANTITIES:
        pairs = [(step, rows[0][step].get(name), rows[1][step].get(name)) for step in steps]
        unequal = [(step, a, b) for step, a, b in pairs if a != b and None not in (a, b) and repr(a) != repr(b)]
        if unequal:
            found[name] = (*unequal[0], max(_distance(a, b) for _, a, b in unequal))
    if plot:
        losses = [{step: row["loss"] for step, row in of.items()} for of in rows]
        plot_two([*zip(map(str, folders), losses, strict=True)], plot)
    return "\n".join(_lines(folders, found, settings, num_steps=len(steps)))


def _lines(
    folders: tuple[pathlib.Path, ...], found: dict[str, tuple], settings: Mapping[str, str], *, num_steps: int
) -> Iterator[str]:
    if not found:
        yield f"{folders[0]} and {folders[1]} are equal in the {count_text(num_steps, 'step')} that both have."
        yield from (f"  {line}" for line in settings.values())
        return
    step = min(at for at, *_ in found.values())
    cause = next(name for name, (at, *_) in found.items() if at == step)
    yield f"{folders[0]} and {folders[1]} differ first at step {step}, in {cause}:"
    yield f"  {'quantity':<14}{'first step':>10}  {'first run':>16}  {'second run':>16}  largest difference"
    for name, (at, a, b, most) in found.items():
        short = [str(value)[:12] if isinstance(value, str) else f"{value:.9g}" for value in (a, b)]
        yield f"  {name:<14}{at:>10}  {short[0]:>16}  {short[1]:>16}  {'' if math.isnan(most) else f'{most:.2g}':>18}"
    ignored = () if _QUANTITIES[cause] != ("*",) else _NO_NUMBERS
    reasons = [line for key, line in settings.items() if _matches(key, _QUANTITIES[cause], ignored)]
    yield (
        "settings that may be the reason:"
        if reasons
        else ("no recorded setting explains it: another machine, a device with wrong bits, or text that changed.")
    )
    yield from (f"  {line}" for line in reasons)


def _rows_of(workdir: pathlib.Path) -> dict[int, dict[str, Any]]:
    """Returns step -> row of training, with the loss of a validation at that step."""
    rows: dict[int, dict[str, Any]] = {}
    for row in read_rows(workdir / ROWS_FILE):
        if "loss" in row:
            rows[row["step"]] = {"batch": row["step"]} | row
        elif row["step"] in rows and "eval_loss" in row:
            rows[row["step"]]["eval_loss"] = row["eval_loss"]
    return rows


def _settings_of(workdir: pathlib.Path) -> dict[str, Any]:
    """Returns what a run records of itself, by path: config, data, programs, and the versions at each start."""
    found = flat(read_json(workdir / "config.json"))
    folder = workdir / "checkpoints"
    if steps := saved_steps(folder):
        metadata = saved_run(folder / str(steps[-1]))["metadata"]
        groups = ("manifest", "implementations", "jax", "tokenizer_sha256")
        found |= flat({group: metadata[group] for group in groups if group in metadata})
    if (path := workdir / "programs.json").exists():
        found |= {f"program.{name}": (one["platform"], one["sha256"]) for name, one in read_json(path).items()}
    starts = [event for event in read_events(workdir) if event["event"] == "start"]
    for name in sorted({name for event in starts for name in event.get("versions", {})}):
        found[f"versions.{name}"] = list(dict.fromkeys(event.get("versions", {}).get(name) for event in starts))
    return found


def _differences(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, str]:
    """Returns path -> a line, of settings that differ. What one run does not record is not compared."""
    keys = sorted(first.keys() & second.keys())
    return {key: f"{key}: {first[key]!r:.80} and {second[key]!r:.80}" for key in keys if first[key] != second[key]}


def _matches(key: str, patterns: tuple[str, ...], ignored: tuple[str, ...]) -> bool:
    return any(fnmatch.fnmatchcase(key, each) for each in patterns) and not any(
        fnmatch.fnmatchcase(key, each) for each in ignored
    )


def _distance(first: Any, second: Any) -> float:
    """Returns the difference of two numbers relative to the first, or NaN for other values."""
    if isinstance(first, str) or not math.isfinite(first) or not math.isfinite(second):
        return math.nan
    return abs(first - second) / max(abs(first), 1e-30)
