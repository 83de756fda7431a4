"""A model trained on 256 positions, extended to 1,024 by YaRN: its loss by position, before and after, as a figure.

    python benchmarks/long_context.py [--folder=runs/long] [--steps=900] [--more=100] [--out=FILE.png]

Every run is an ordinary `train` command, which an interrupted script resumes. Weights that are not trained further are
evaluated from an export whose config.json names more positions.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import subprocess
import sys

SHORT, LONG = 256, 1024
TOKENS = 2048  # of a step, of both lengths
YARN = ("--config.model.rope_scaling=yarn", f"--config.model.rope_factor={LONG // SHORT}.0")
ARMS = {
    "as trained on 256": "short",
    "YaRN, not trained further": "yarn",
    "no scaling, trained on 1,024": "plain",
    "YaRN, trained on 1,024": "extended",
}


def command(module: str, *words: object) -> None:
    """Runs a command of the package; its output goes to the terminal."""
    subprocess.run([sys.executable, "-m", f"hlat_jax.{module}", *map(str, words)], check=True)


def train(workdir: pathlib.Path, seq_len: int, num_steps: int, *words: str) -> None:
    rate, warmup = (2e-3, 40) if seq_len == SHORT else (5e-4, 10)
    settings = {
        "train.num_steps": num_steps,
        "optimizer.horizon_steps": num_steps,
        "optimizer.peak_lr": rate,
        "optimizer.warmup_steps": warmup,
        "data.seq_len": seq_len,
        "data.batch_size": TOKENS // seq_len,
        "train.num_eval_batches": 8,
        "train.eval_every_steps": num_steps,
        "train.eval_loss_low": 0,
        "train.eval_loss_high": 0,
        "checkpoint.every_steps": 100,
    }
    flags = [f"--config.{key}={value}" for key, value in settings.items()]
    command("train", "--config=tiny", f"--workdir={workdir}", *flags, *words)


def lengthened(short: pathlib.Path, out: pathlib.Path, rope: dict | None) -> pathlib.Path:
    """Returns an export of a run whose config.json names 1,024 positions, and a scaling of RoPE."""
    if not out.exists():
        command("hf", "export", short, f"--out={out}")
    path = out / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"max_position_embeddings": LONG, "rope_scaling": rope}))
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=pathlib.Path, default=pathlib.Path("runs/long"))
    parser.add_argument("--steps", type=int, default=900)
    parser.add_argument("--more", type=int, default=100)
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("docs/images/long-context.png"))
    values = parser.parse_args()
    folder, more = values.folder, values.more
    train(folder / "run-256", SHORT, values.steps)
    longer = (f"--config.train.init_from={folder / 'run-256'}", f"--config.model.max_positions={LONG}")
    train(folder / "plain", LONG, more, *longer)
    train(folder / "extended", LONG, more, *longer, *YARN)
    yarn = {"rope_type": "yarn", "factor": LONG / SHORT, "original_max_position_embeddings": SHORT}
    lengthened(folder / "run-256", folder / "short", None)
    lengthened(folder / "run-256", folder / "yarn", yarn)
    curves = {}
    for name, arm in ARMS.items():
        out = folder / f"{arm}.json"
        text = f"--data={pathlib.Path('hlat_jax/assets/austen_validation.jsonl')}"
        command("evaluate", f"--checkpoint={folder / arm}", text, "--by_position", f"--json={out}")
        curves[name] = json.loads(out.read_text())["by_position"]
    print(f"{'positions':12}" + "".join(f"{name:>30}" for name in curves))
    for parts in zip(*curves.values(), strict=True):
        print(f"{parts[0]['first']:>4}-{parts[0]['last']:<6} ", end="")
        print("".join(f"{part['nats'] / part['num_tokens']:30.4f}" for part in parts))
    plot(curves, values.out)


def plot(curves: dict[str, list[dict]], out: pathlib.Path) -> None:
    from matplotlib import pyplot

    pyplot.style.use("hlat_jax.assets.plots")
    figure, axes = pyplot.subplots(figsize=(7, 4))
    for name, parts in curves.items():
        axes.plot([part["nats"] / part["num_tokens"] for part in parts], marker="o", label=name)
    axes.set_xticks(range(len(parts)), [f"{part['first']}–{part['last']}" for part in parts])
    axes.axvline(parts.index(next(part for part in parts if part["first"] == SHORT)) - 0.5, color="gray", ls=":")
    axes.set(xlabel="position in the window", ylabel="loss (nats per token)", title="Held-out text by position")
    axes.legend()
    figure.savefig(out)


if __name__ == "__main__":
    main()
