"""Does Muon train better than AdamW on the same tokens? Final validation loss of both, over rates and seeds.

    python benchmarks/muon.py --workdir=FOLDER [--config tiny] [--seeds 3] [--rates 1e-3,2e-3,4e-3,8e-3]

Trains `--config` once for each optimizer, peak learning rate and seed, of weights and data; both optimizers on the same
batches and schedule. Prints the mean of the final validation loss over the seeds, the losses of the seeds, and the
median seconds of a step. The runs lie in `--workdir`: the same command resumes them.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import pathlib
import statistics
import sys

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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workdir", type=pathlib.Path, required=True)
    parser.add_argument("--config", default="tiny")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rates", default="1e-3,2e-3,4e-3,8e-3")
    args = parser.parse_args()
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


if __name__ == "__main__":
    main()
