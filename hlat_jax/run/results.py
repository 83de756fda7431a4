"""Plots and prints the results of a run after its last step."""

from __future__ import annotations

import pathlib

from hlat_jax.config import Config
from hlat_jax.store.checkpoint import BEST_LINK
from hlat_jax.store.loss_curve import plot_loss
from hlat_jax.store.metrics import ROWS_FILE, read_rows


def show(config: Config, workdir: pathlib.Path, step: int) -> None:
    """Plots the loss curve and prints the results of the run at `step`, from its metrics file."""
    path = workdir / ROWS_FILE
    if config.metrics.plot and plot_loss(path, workdir / "loss.png", title=config.name):
        print(f"loss curve: {workdir / 'loss.png'}")
    rows = read_rows(path)
    padding = [row["padding_share"] for row in rows if "padding_share" in row]
    if padding:
        print(f"padding: {sum(padding) / len(padding):.2%} of all tokens")
    skipped = [row["skipped_records"] for row in rows if "skipped_records" in row]
    if skipped:
        print(f"bad records skipped: {skipped[-1]:,}")
    if (workdir / BEST_LINK).is_dir():
        print(f"best checkpoint: {workdir / BEST_LINK}, of step {(workdir / BEST_LINK).resolve().name}")
    elif config.checkpoint.keep_best:
        print("best checkpoint: none, as no validation loss was below the loss of the initial weights")
    evals = [row for row in rows if "eval_loss" in row and row["step"] == step]
    if not evals:
        return
    loss, bits = evals[-1]["eval_loss"], evals[-1]["bits_per_byte"]
    print(f"validation loss {loss:.4f} nats per token, {bits:.4f} bits per byte", end="")
    low, high = config.train.eval_loss_low, config.train.eval_loss_high
    if high > 0:
        print(f": {'within' if low <= loss <= high else 'OUTSIDE'} the expected {low:g} to {high:g}", end="")
    print()
