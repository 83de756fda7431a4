"""What does it cost to store less? Final validation loss of the precision policies, over seeds of the data's order.

    python benchmarks/precision.py --workdir=FOLDER [--seeds 3] [--tokens 2000000] [--config tiny] [--plot F.png]

Trains `--config` once for each policy and seed, on the same batches for all policies of a seed, with the learning rate
decayed to its floor at the end. Prints the mean of the final validation loss over the seeds, its distance from fp32 and
the spread of the seeds (highest less lowest). The runs lie in `--workdir`: the same command resumes them.
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

POLICIES = ("fp32", "mixed", "bf16_sr", "bf16")


def rows_of(config_name: str, policy: str, *, seed: int, tokens: int, workdir: pathlib.Path) -> list[dict]:
    """Trains one run to its end, unless it is there, and returns its rows of metrics."""
    c = config_files.load(config_name)
    num_steps = tokens // (c.data.batch_size * c.data.seq_len)
    c.precision.policy = policy
    c.data.seed = seed
    c.train.update(num_steps=num_steps, eval_every_steps=num_steps // 10, sample_prompt="")
    c.train.update(eval_loss_low=0.0, eval_loss_high=0.0)
    c.optimizer.horizon_steps = num_steps
    c.checkpoint.every_steps = num_steps // 10
    c.checkpoint.keep_last = 1
    folder = workdir / f"{policy}-{seed}"
    with contextlib.redirect_stdout(sys.stderr):
        train(resolve(c), folder)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    if rows[-1]["step"] < num_steps:
        sys.exit(f"{folder} was stopped at step {rows[-1]['step']} of {num_steps}; run the same command to resume.")
    return rows


def table(losses: dict[str, list[float]]) -> str:
    """Returns the final losses of each policy beside those of fp32."""
    reference = statistics.mean(losses["fp32"])
    lines = [f"{'policy':10}{'mean':>9}{'to fp32':>10}{'spread':>9}  seeds"]
    for policy, found in losses.items():
        mean = statistics.mean(found)
        seeds = "  ".join(f"{loss:.4f}" for loss in found)
        lines.append(f"{policy:10}{mean:9.4f}{mean / reference - 1:+10.2%}{max(found) - min(found):9.4f}  {seeds}")
    return "\n".join(lines)


def plot(curves: dict[str, list[list[dict]]], path: pathlib.Path) -> None:
    """Draws the validation loss over tokens: each policy the mean of its seeds, in a band from lowest to highest."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.5))
    for policy, runs in curves.items():
        rows = [[row for row in run if "eval_loss" in row and row["step"]] for run in runs]
        steps = [row["step"] for row in rows[0]]
        by_step = list(zip(*[[row["eval_loss"] for row in run] for run in rows], strict=True))
        [line] = axes.plot(steps, [statistics.mean(losses) for losses in by_step], label=policy)
        axes.fill_between(steps, list(map(min, by_step)), list(map(max, by_step)), color=line.get_color(), alpha=0.2)
    axes.set(xlabel="step", ylabel="validation loss, nats per token", title="Mean and range of the seeds")
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workdir", type=pathlib.Path, required=True)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=2_000_000)
    parser.add_argument("--config", default="tiny")
    parser.add_argument("--plot", type=pathlib.Path)
    args = parser.parse_args()
    curves: dict[str, list[list[dict]]] = {policy: [] for policy in POLICIES}
    for seed in range(args.seeds):
        for policy, runs in curves.items():
            runs.append(rows_of(args.config, policy, seed=seed, tokens=args.tokens, workdir=args.workdir))
        finals = {policy: [run[-1]["eval_loss"] for run in runs] for policy, runs in curves.items()}
        print(table(finals), flush=True)
    if args.plot:
        plot(curves, args.plot)


if __name__ == "__main__":
    main()
