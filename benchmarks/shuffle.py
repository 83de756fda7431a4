"""What does the order of the data do to the loss? Documents read end to end beside shuffled rows, on long books.

    python benchmarks/shuffle.py --workdir=FOLDER [--steps 300] [--seeds 2] [--batch_size 4]
        [--books F.jsonl --held_out G.jsonl]

Without --books, the books are parts of Jane Austen's novels and as many of the longest modules of Python's standard
library, up to 60,000 characters each, of which the last 5% are held out. Trains a small model for each order
(data.shuffle_by) and seed on the same number of tokens, by rows both from texts and from token ids stored ahead.
Prints, over the second half of the steps: the standard deviation of the difference between the losses of neighboring
steps, that of the mean loss of 16 consecutive steps (how far the curve wanders, without its trend), and the final
validation loss.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import pathlib
import sys
import sysconfig

import numpy as np

from hlat_jax.cli import config_files
from hlat_jax.data.build import build as build_lib
from hlat_jax.data.formats.paths import asset_path
from hlat_jax.loop import train
from hlat_jax.resolve import resolve

_CHARS = 60_000
_WINDOW_STEPS = 16


def write_books(train_path: pathlib.Path, held_out_path: pathlib.Path) -> None:
    """Writes long texts as JSONL, a book a line, and their last parts as another."""
    novels: dict[str, str] = {}
    for line in asset_path("austen_train.jsonl").read_text(encoding="utf-8").splitlines():
        chapter = json.loads(line)
        novels[chapter["title"]] = novels.get(chapter["title"], "") + chapter["text"] + "\n\n"
    stories = [novel[start : start + _CHARS] for novel in novels.values() for start in range(0, len(novel), _CHARS)]
    modules = sorted(pathlib.Path(sysconfig.get_paths()["stdlib"]).glob("*.py"), key=lambda path: -path.stat().st_size)
    books = [*stories, *(path.read_text(encoding="utf-8")[:_CHARS] for path in modules[: len(stories)])]
    for path, texts in (
        (train_path, [book[: len(book) * 19 // 20] for book in books]),
        (held_out_path, [book[len(book) * 19 // 20 :] for book in books]),
    ):
        path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")


def losses(
    paths: dict[str, str], *, order: str, seed: int, steps: int, batch_size: int, folder: pathlib.Path
) -> tuple[np.ndarray, float]:
    """Trains one run to its end, unless it is there; returns the training losses and the final validation loss."""
    c = config_files.load("tiny")
    c.model.update(num_layers=2, embed_dim=96, mlp_dim=256, num_heads=3, num_kv_heads=3)
    c.data.update(paths | {"shuffle_by": order, "seed": seed, "batch_size": batch_size})
    c.optimizer.horizon_steps = steps
    c.train.update(num_steps=steps, eval_every_steps=0, sample_prompt="", eval_loss_low=0.0, eval_loss_high=0.0)
    c.checkpoint.every_steps = steps
    c.metrics.update(plot=False, tensorboard=False)
    with contextlib.redirect_stdout(sys.stderr):
        train(resolve(c), folder)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    found = np.asarray([row["loss"] for row in rows if "loss" in row])
    return found, [row["eval_loss"] for row in rows if "eval_loss" in row][-1]


def spread(found: np.ndarray) -> tuple[float, float]:
    """Returns the two standard deviations that the table has, over the second half of the steps."""
    half = found[len(found) // 2 :]
    steps = np.arange(len(half))
    flat = half - np.polyval(np.polyfit(steps, half, 1), steps)
    means = np.convolve(flat, np.ones(_WINDOW_STEPS) / _WINDOW_STEPS, mode="valid")
    return float(np.diff(half).std()), float(means.std())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workdir", type=pathlib.Path, required=True)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch_size", type=int, default=4)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--books", default="")
    parser.add_argument("--held_out", default="")
    options = parser.parse_args()
    options.workdir.mkdir(parents=True, exist_ok=True)
    books, held_out = options.books, options.held_out
    if not books:
        books, held_out = str(options.workdir / "books.jsonl"), str(options.workdir / "held_out.jsonl")
        if not pathlib.Path(held_out).exists():
            write_books(pathlib.Path(books), pathlib.Path(held_out))
    ids = options.workdir / "ids"
    tokenizer = build_lib.BuildOptions(tokenizer=str(asset_path("austen_2k.model")))
    build_lib.build([books], out=ids, options=tokenizer)
    print(f"{'data':6}{'order':10}{'between steps':>15}{'wander':>9}{'validation':>12}  seeds", flush=True)
    orders = (("text", books, "document"), ("text", books, "row"), ("ids", str(ids), "row"))  # ids, document: as text
    for kind, path, order in orders:
        runs = [
            losses(
                {"train": path, "validation": held_out},
                order=order,
                seed=seed,
                steps=options.steps,
                batch_size=options.batch_size,
                folder=options.workdir / f"{kind}-{order}-{seed}",
            )
            for seed in range(options.seeds)
        ]
        between, wander = np.mean([spread(found) for found, _ in runs], axis=0)
        finals = [final for _, final in runs]
        seeds = "  ".join(f"{final:.4f}" for final in finals)
        print(f"{kind:6}{order:10}{between:15.4f}{wander:9.4f}{np.mean(finals):12.4f}  {seeds}", flush=True)


if __name__ == "__main__":
    main()
