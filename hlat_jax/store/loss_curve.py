"""Plots the loss of a run into a file, or live in a notebook.

Does not import pyplot, which would change a notebook's backend.
"""

from __future__ import annotations

import contextlib
import io
import math
import os
import pathlib
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from hlat_jax.host.optional_import import import_optional
from hlat_jax.store.metrics import ROWS_FILE, read_rows

_DRAWING = threading.Lock()  # Matplotlib is not thread-safe
_DPI = 140
_WIDTH = 640  # pixels of the image in a notebook


def plot_loss(rows_path: str | os.PathLike, png_path: str | os.PathLike, *, title: str) -> bool:
    """Plots training and validation loss against tokens. Returns False if there are no rows."""
    train, evals = _curves(pathlib.Path(rows_path))
    if not train and not evals:
        return False
    with _DRAWING:
        _figure(train, evals, title=title).savefig(png_path, dpi=_DPI)
    return True


@contextlib.contextmanager
def live(workdir: str | os.PathLike, *, title: str, every_s: float = 1.0) -> Iterator[None]:
    """Shows the loss of a run below a notebook's cell while the block trains. The run folder may not exist yet.

    Raises:
      ValueError: IPython cannot be imported.
    """
    missing = "the live loss curve needs IPython: pip install 'hlat_jax[notebooks]'."
    shown = import_optional("IPython.display", missing=missing)
    rows_path, over = pathlib.Path(workdir) / ROWS_FILE, threading.Event()
    handle = shown.display(shown.Image(_png(rows_path, title), width=_WIDTH), display_id=True)

    def follow() -> None:
        seen = -1
        while not over.wait(every_s):
            size = rows_path.stat().st_size if rows_path.exists() else -1
            if size != seen:
                seen = size
                handle.update(shown.Image(_png(rows_path, title), width=_WIDTH))

    follower = threading.Thread(target=follow, name="loss-curve", daemon=True)
    follower.start()
    try:
        yield
    finally:
        over.set()
        follower.join()
        # from the main thread, whose output nbclient assigns to the cell
        handle.update(shown.Image(_png(rows_path, title), width=_WIDTH))


def _png(rows_path: pathlib.Path, title: str) -> bytes:
    train, evals = _curves(rows_path)
    png = io.BytesIO()
    with _DRAWING:
        _figure(train, evals, title=title).savefig(png, format="png", dpi=_DPI)
    return png.getvalue()


def _figure(train: list[tuple[int, float]], evals: list[tuple[int, float]], *, title: str) -> Any:
    """Returns a Matplotlib figure of (tokens, loss) in training and validation; either may be empty."""
    from matplotlib import figure as figures  # imported here: training needs it only for the plot
    from matplotlib import ticker

    figure = figures.Figure(figsize=(8, 4.8), layout="constrained")
    axes = figure.subplots()
    if train:
        tokens, losses = zip(*train, strict=True)
        axes.plot(tokens, losses, color="#9ecae1", linewidth=0.7, label="training, each step")
        axes.plot(tokens, smooth(losses), color="#08519c", linewidth=1.6, label="training, smoothed")
    if evals:
        tokens, losses = zip(*evals, strict=True)
        axes.plot(tokens, losses, "o-", color="#d94801", linewidth=1.0, markersize=4.5, label="validation", zorder=3)
        beside = {"textcoords": "offset points", "va": "center", "color": "#d94801"}  # right of the curves
        axes.annotate(f"{losses[-1]:.3f}", (tokens[-1], losses[-1]), (7, 0), **beside)
    axes.set_title(f"{title}: loss", loc="left")
    axes.set_xlabel("tokens trained on")
    axes.set_ylabel("cross-entropy (nats per token)")
    axes.xaxis.set_major_formatter(ticker.EngFormatter(sep=" "))
    axes.margins(x=0.02)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    if train or evals:
        axes.legend(frameon=False)
    return figure


def plot_two(runs: Sequence[tuple[str, Mapping[int, float]]], png_path: str | os.PathLike) -> None:
    """Plots two runs, of a name and losses by step, and below how far they are apart."""
    from matplotlib import figure as figures

    (_, first), (_, second) = runs
    steps = [step for step in first if step in second and math.isfinite(first[step] - second[step])]
    with _DRAWING:
        figure = figures.Figure(figsize=(8, 6), layout="constrained")
        above, below = figure.subplots(2, sharex=True, height_ratios=(2, 1))
        for (name, of_run), style in zip(runs, ("-", "--"), strict=True):
            above.plot([*of_run], [*of_run.values()], style, linewidth=1.0, label=name)
        above.set_ylabel("cross-entropy (nats per token)")
        above.legend(frameon=False)
        below.semilogy(steps, [abs(first[step] - second[step]) or math.nan for step in steps], ".", markersize=3)
        below.set_ylabel("difference, where not 0")
        below.set_xlabel("step")
        figure.savefig(png_path, dpi=_DPI)


def smooth(values: Sequence[float]) -> np.ndarray:
    """Returns centred moving means over a thirtieth of the values, and over fewer near the steep start."""
    middles = np.arange(len(values))
    halves = np.minimum(middles, max(len(values) // 60, 1))
    lows, highs = middles - halves, np.minimum(middles + halves + 1, len(values))
    sums = np.concatenate([[0.0], np.cumsum(values)])
    return (sums[highs] - sums[lows]) / (highs - lows)


def _curves(path: pathlib.Path) -> tuple[list[tuple[int, float]], list[tuple[int, float]]]:
    """Returns (tokens, finite loss) of training rows, and of validation rows at the tokens of their step."""
    rows = read_rows(path)
    train = [row for row in rows if "loss" in row]
    tokens_at = {0: 0} | {row["step"]: row["tokens"] for row in train}
    evals = [row for row in rows if "eval_loss" in row and row["step"] in tokens_at]
    return (
        [(row["tokens"], row["loss"]) for row in train if math.isfinite(row["loss"])],
        [(tokens_at[row["step"]], row["eval_loss"]) for row in evals if math.isfinite(row["eval_loss"])],
    )
