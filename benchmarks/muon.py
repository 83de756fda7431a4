"""Does Muon train better than AdamW on the same tokens? Final validation loss of both, over rates and seeds.

    python benchmarks/muon.py --workdir=FOLDER [--config tiny] [--seeds 3] [--rates 1e-3,2e-3,4e-3,8e-3] [--plot FILE]

Trains `--config` once for each optimizer, peak learning rate and seed, of weights and data; both optimizers on the same
batches and schedule. Prints the mean of the final validation loss over the seeds, the losses of the seeds, and the
median seconds of a step. `--plot` draws the training losses of each optimizer at its best rate, a line for each seed.
The runs lie in `--workdir`: the same command resumes them.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import pathlib
import statistics
import sys

import matplotlib.figure

from hlat_jax.cli import config_files
from hlat_jax.resolve import resolve
from hlat_jax.train import train

OPTIMIZERS = ("adamw", "muon")


def rows_of(config_name: str, name: str, *, rate: float, seed: int, workdir: pathlib.Path) -> list[dict]:
    """Trains one run to its end, unless it is there, and returns its rows of metrics."""
    c = config_files.load(config_name)
    c.optimizer.update(name=name, peak_lr=rate)
    c.data.seed = c.train.seed = seed
    c.train.update(eval_every_steps=0, sample_prompt="", eval_loss_low=0.0, eval_loss_high=0.0)
    c.checkpoint.every_steps = 0
    c.metrics.update(plot=False, tensorboard=False)
    folder = workdir / f"{name}-{rate:g}-{seed}"
    with contextlib.redirect_stdout(sys.stderr):
        train(resolve(c), folder)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    if "eval_loss" not in rows[-1] or rows[-1]["step"] < c.train.num_steps:
        sys.exit(f"{folder} was stopped at step {rows[-1]['step']}; run the same command to resume.")
    return rows


def draw(best: dict[str, tuple[float, float, list]], path: pathlib.Path) -> None:
    """Draws the losses of each optimizer's runs, a mean of 8 steps at each point; `best` has (loss, rate, runs)."""
    figure = matplotlib.figure.Figure(figsize=(7, 3.5), layout="constrained")
    axes = figure.subplots()
    for (name, (_, rate, runs)), color in zip(best.items(), ("C0", "C1"), strict=True):
        for number, rows in enumerate(runs):
            losses = [row["loss"] for row in rows if "loss" in row]
            means = [statistics.mean(losses[start : start + 8]) for start in range(0, len(losses) - 7, 8)]
            label = f"{name}, rate {rate:g}" if not number else None
            axes.plot([8 * part + 4.5 for part in range(len(means))], means, color=color, lw=1, label=label)
    axes.set(xlabel="step", ylabel="training loss, nats per token")
    axes.legend()
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workdir", type=pathlib.Path, required=True)
    parser.add_argument("--config", default="tiny")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rates", default="1e-3,2e-3,4e-3,8e-3")
    parser.add_argument("--plot", type=pathlib.Path)
    args = parser.parse_args()
    best: dict[str, tuple[float, float, list]] = {}
    print(f"{'optimizer':<10}{'peak_lr':>8}{'mean loss':>11}{'s/step':>8}  loss of each seed")
    for name in OPTIMIZERS:
        for rate in map(float, args.rates.split(",")):
            runs = [
                rows_of(args.config, name, rate=rate, seed=seed, workdir=args.workdir) for seed in range(args.seeds)
            ]
            losses = [rows[-1]["eval_loss"] for rows in runs]
            step_s = statistics.median(row["step_s"] for rows in runs for row in rows if "step_s" in row)
            seeds = "  ".join(f"{loss:.4f}" for loss in losses)
            print(f"{name:<10}{rate:>8g}{statistics.mean(losses):>11.4f}{step_s:>8.3f}  {seeds}", flush=True)
            best[name] = min(best.get(name, (float("inf"), rate, runs)), (statistics.mean(losses), rate, runs))
    if args.plot:
        draw(best, args.plot)


if __name__ == "__main__":
    main()
