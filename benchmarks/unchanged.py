"""Is the training step the same in two trees, of which one only moved code?

    git worktree add ../before COMMIT
    python benchmarks/unchanged.py ../before [--rounds=5] [--dump=DIR]     # in the tree after the change

For four layouts of a small model both trees train 20 steps by `python -m hlat_jax.train`, in turn. The hash of every
array of the last checkpoint and the text of the lowered step without locations must be equal, the seconds of a step
and the peak memory of the process at most 1.03 times as large (medians over the rounds of the ratio in one round), and
so the seconds of `import hlat_jax.loop`; the first lines of `--help` must be equal. Both trees then resume a copy of
the run folder of the tree before up to step 24, and keep its rows: a run that begins again would write them again. Only
commands and files are used, so that trees with other module paths compare. `--dump` keeps the texts.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import logging
import os
import pathlib
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable

LAYOUTS = {
    "one device": {"devices": 1},
    "data x tensor": {"devices": 4, "parallel.data": 2, "parallel.tensor": 2},
    "pipe x tensor": {"devices": 4, "parallel.pipe": 2, "parallel.tensor": 2, "train.num_microbatches": 2},
    "fsdp with ZeRO": {"devices": 4, "parallel.data": 2, "parallel.fsdp": 2, "parallel.zero1": "True"},
}
SMALL = {
    "train.num_steps": 20,
    "data.batch_size": 8,
    "checkpoint.every_steps": 20,
    "train.eval_every_steps": 0,
    "train.num_eval_batches": 1,
    "train.eval_loss_low": 0.0,
    "train.eval_loss_high": 0.0,
    "train.sample_prompt": "",
    "metrics.plot": "False",
    "metrics.tensorboard": "False",
    "model.num_layers": 4,
    "precision.policy": "mixed",
    "data.validation": "",
}
LARGEST_RATIO = 1.03


def train(tree: pathlib.Path, folder: pathlib.Path, layout: dict, *, num_steps: int = 20) -> dict:
    """Trains in `folder / "run"`, or resumes the run there; returns hashes, text, seconds and peak bytes."""
    options = SMALL | {key: value for key, value in layout.items() if key != "devices"}
    options["train.num_steps"] = num_steps
    env = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={layout['devices']}",
        "JAX_DUMP_IR_TO": str(folder / "ir"),
        "JAX_INCLUDE_DEBUG_INFO_IN_DUMPS": "0",
        "PYTHONPATH": str(tree),
    }
    words = [f"--config.{key}={value}" for key, value in options.items()]
    command = [sys.executable, "-m", "hlat_jax.train", "--config=tiny", f"--workdir={folder / 'run'}", *words]
    process = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=tree)
    printed = process.stdout.read()
    _, status, used = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(f"{' '.join(command)} failed:\n{printed}")
    rows = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    return {
        "bits": state_hash(folder / "run"),
        "text": step_text(folder / "ir"),
        "step_s": statistics.median(row["step_s"] for row in rows[4:]),
        "peak_bytes": used.ru_maxrss * 1024,
    }


def step_rows(workdir: pathlib.Path) -> list[bytes]:
    """Returns the lines of the steps in the metrics."""
    return [line for line in (workdir / "metrics.jsonl").read_bytes().splitlines() if "step_s" in json.loads(line)]


def step_text(dumped: pathlib.Path) -> str:
    """Returns the lowered step without locations and without the number of its dump."""
    files = sorted(dumped.glob("*train_step*"))
    if not files:
        raise SystemExit(f"no lowered train_step among {sorted(path.name for path in dumped.iterdir())}")
    return re.sub(r"\s*loc\([^\n]*?\)(?=\n|$)|^#loc.*$", "", files[-1].read_text(), flags=re.M)


def state_hash(workdir: pathlib.Path) -> dict[str, str]:
    """Returns name -> hash of the bytes of every array of the newest checkpoint."""
    import jax
    import numpy as np
    import orbax.checkpoint as ocp

    logging.getLogger("absl").setLevel(logging.ERROR)  # orbax warns of its own missing file at each step
    newest = max(
        (path for path in (workdir / "checkpoints").iterdir() if path.name.isdigit()), key=lambda p: int(p.name)
    )
    checkpointer = ocp.PyTreeCheckpointer()
    saved = checkpointer.metadata(newest / "state").item_metadata.tree
    as_numpy = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), saved)
    found = checkpointer.restore(newest / "state", restore_args=as_numpy)
    flat = {}

    def walk(tree, name):
        if isinstance(tree, dict):
            for key in sorted(tree):
                walk(tree[key], f"{name}.{key}")
        else:
            flat[name] = hashlib.sha256(np.asarray(tree).tobytes()).hexdigest()[:16]

    walk(found, "state")
    return flat


def import_s(tree: pathlib.Path) -> float:
    """Returns the seconds of an import of the loop in a process of its own."""
    code = "import time; t = time.perf_counter(); import hlat_jax.loop; print(time.perf_counter() - t)"
    env = {**os.environ, "PYTHONPATH": str(tree)}
    words = [sys.executable, "-c", code]
    return float(subprocess.run(words, env=env, cwd=tree, capture_output=True, text=True, check=True).stdout)


def help_line(tree: pathlib.Path) -> str:
    """Returns the first line of the help of the training command."""
    words = [sys.executable, "-m", "hlat_jax.train", "--help"]
    env = {**os.environ, "PYTHONPATH": str(tree)}
    done = subprocess.run(words, capture_output=True, text=True, env=env, cwd=tree, check=True)
    return done.stdout.strip().splitlines()[0]


def ratio_in_turn(trees: list[pathlib.Path], rounds: int, measure: Callable[[pathlib.Path], dict]) -> dict[str, float]:
    """Returns the median over the rounds of after / before, for each figure; every other round begins with `after`."""
    ratios: dict[str, list[float]] = {}
    for turn in range(rounds):
        found = {tree: measure(tree) for tree in (trees if turn % 2 == 0 else trees[::-1])}
        before, after = (found[tree] for tree in trees)
        for name in before:
            ratios.setdefault(name, []).append(after[name] / before[name])
    return {name: statistics.median(of_rounds) for name, of_rounds in ratios.items()}


def compare_layout(name: str, trees: list[pathlib.Path], *, rounds: int, dump: pathlib.Path | None) -> bool:
    """Prints a line about a layout; returns whether bits and text are equal and no ratio is above the largest."""
    layout = LAYOUTS[name]
    with tempfile.TemporaryDirectory() as folder:
        first = {tree: train(tree, pathlib.Path(folder) / str(i), layout) for i, tree in enumerate(trees)}
        before, after = (first[tree] for tree in trees)
        ends, kept = [], []
        for i, tree in enumerate(trees):
            copy = pathlib.Path(folder) / f"resumed{i}"
            shutil.copytree(pathlib.Path(folder) / "0" / "run", copy / "run")
            ends.append(train(tree, copy, layout, num_steps=24)["bits"])
            kept.append(step_rows(copy / "run")[:20] == step_rows(pathlib.Path(folder) / "0" / "run"))

    def measure(tree: pathlib.Path) -> dict:
        with tempfile.TemporaryDirectory() as folder:
            row = train(tree, pathlib.Path(folder), layout)
        if (row["bits"], row["text"]) != (first[tree]["bits"], first[tree]["text"]):
            raise SystemExit(f"{name}: two runs of {tree} differ")
        return {"step": row["step_s"], "peak memory": row["peak_bytes"]}

    ratios = ratio_in_turn(trees, rounds, measure)
    equal = {"bits": before["bits"] == after["bits"], "text": before["text"] == after["text"]}
    equal["resumed"] = ends[0] == ends[1] and all(kept)
    words = [f"{what} {'same' if same else 'DIFFER'}" for what, same in equal.items()]
    print(f"{name:<16}", ", ".join(words + [f"{what} x {r:.3f}" for what, r in ratios.items()]), flush=True)
    if dump is not None:
        dump.mkdir(parents=True, exist_ok=True)
        for which, row in (("before", before), ("after", after)):
            (dump / f"{name.replace(' ', '_')}.{which}.mlir").write_text(row["text"])
    return all(equal.values()) and max(ratios.values()) <= LARGEST_RATIO


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("before", type=pathlib.Path, help="the tree before the change; the other is the working folder")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dump", type=pathlib.Path)
    args = parser.parse_args()
    trees = [args.before.resolve(), pathlib.Path.cwd()]
    good = [compare_layout(name, trees, rounds=args.rounds, dump=args.dump) for name in LAYOUTS]
    imports = ratio_in_turn(trees, args.rounds, lambda tree: {"import": import_s(tree)})["import"]
    print(f"import           x {imports:.3f}")
    helps = [help_line(tree) for tree in trees]
    print(f"--help           {helps[0]!r}\n              -> {helps[1]!r}")
    return 0 if all(good) and imports <= LARGEST_RATIO and helps[0] == helps[1] else 1


if __name__ == "__main__":
    sys.exit(main())
