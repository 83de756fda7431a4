"""Trains the grid of `findings.py`, each run an ordinary `train` command, and records it in `results.jsonl`.

    python -m benchmarks.replication.run --workdir=FOLDER [--jobs=2] [--only=NAME,NAME] [--results=FILE]

Runs that are recorded are not made again; an interrupted command goes on where it was, within a run too. Each run has
one core, of those that this process may use. A recorded run's folder is deleted. Results of other settings than those
of `base.py` and `findings.py` are refused. `norm_drift.py` makes the runs of the remaining finding.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import pathlib
import shutil
import statistics
import subprocess
import sys
import threading

import numpy as np

from benchmarks.replication.base import NUM_STEPS
from benchmarks.replication.findings import AVERAGED, AVERAGED_SEEDS, AVERAGED_STEPS, runs

FOLDER = pathlib.Path(__file__).resolve().parent
RESULTS = FOLDER / "results.jsonl"


def digest_of(overrides: dict[str, object]) -> str:
    """Returns a hash of all settings of a run: another one is another experiment."""
    text = (FOLDER / "base.py").read_text() + json.dumps(overrides, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def read_results(path: pathlib.Path) -> dict[str, dict]:
    """Returns name of a run -> its row. Raises ValueError for a row of other settings."""
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    grid = runs()
    for row in rows:
        name = row["run"]
        if name not in grid or row["settings"] != digest_of(grid[name]):
            raise ValueError(
                f"{path}: {name} was trained with other settings than those of base.py and findings.py; restore these, "
                "or give --results=FILE and train the grid anew."
            )
    return {row["run"]: row for row in rows}


def command(module: str, *words: object, log: pathlib.Path) -> float:
    """Runs a command of the package, on the cores of this thread; returns its CPU seconds."""
    with log.open("a") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", f"hlat_jax.{module}", *map(str, words)], stdout=out, stderr=out
        )
        _, status, usage = os.wait4(process.pid, 0)
    if code := os.waitstatus_to_exitcode(status):
        raise RuntimeError(f"exit code {code}, see {log}: {log.read_text().splitlines()[-1]}")
    return usage.ru_utime + usage.ru_stime


def unchanged_share(run: pathlib.Path) -> float:
    """Returns the share of weights that the last update left as they were."""
    from hlat_jax.weights.trained import leaves_by_name, open_weights

    before, after = (open_weights(run / "checkpoints" / str(step)) for step in (NUM_STEPS - 1, NUM_STEPS))
    names = leaves_by_name(after.arrays)
    same = [np.asarray(before.read(name)) == np.asarray(after.read(name)) for name in names]
    return sum(int(part.sum()) for part in same) / sum(part.size for part in same)


def average_losses(run: pathlib.Path, log: pathlib.Path) -> dict[str, float]:
    """Returns the loss of two checkpoints and of their average, per token of the held-out documents."""
    single = [run / "checkpoints" / str(step) for step in AVERAGED_STEPS]
    mean = run / "average"
    shutil.rmtree(mean, ignore_errors=True)
    command("hf", "average", *single, f"--out={mean}", log=log)
    losses = {}
    for name, folder in (*zip(map(str, AVERAGED_STEPS), single, strict=True), ("average", mean)):
        out = run / f"{name}.json"
        text = "--data=package:austen_validation.jsonl"
        command("evaluate", f"--checkpoint={folder}", text, f"--json={out}", log=log)
        losses[name] = json.loads(out.read_text())["eval_loss"]
    return losses


def spikes_in(norms: list[float]) -> int:
    """Returns how many gradient norms exceed the mean of the 20 before by the median of all: HLAT's rule, to scale."""
    threshold = statistics.median(norms)
    return sum(norm > statistics.mean(norms[at : at + 20]) + threshold for at, norm in enumerate(norms[20:]))


def record(name: str, overrides: dict[str, object], *, workdir: pathlib.Path) -> dict:
    """Trains one run to its end, and returns its row of results; of a run that diverges, with the error."""
    run, log = workdir / name, workdir / f"{name}.log"
    flags = [f"--config.{key}={value}" for key, value in overrides.items()]
    try:
        cpu_s = command("train", f"--config={FOLDER / 'base.py'}", f"--workdir={run}", *flags, log=log)
    except RuntimeError as error:
        if "not finite" not in str(error):
            raise
        return {"run": name, "settings": digest_of(overrides), "diverged": str(error).partition(": ")[2]}
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    if rows[-1]["step"] < NUM_STEPS:
        raise RuntimeError(f"stopped at step {rows[-1]['step']}; the same command resumes it")
    steps = [row for row in rows if "grad_norm" in row]
    losses = [row["loss"] for row in steps]
    row = {
        "run": name,
        "settings": digest_of(overrides),
        "eval_loss": {row["step"]: row["eval_loss"] for row in rows if "eval_loss" in row},
        "loss": [round(statistics.mean(losses[at : at + 20]), 4) for at in range(0, len(losses), 20)],
        "spikes": spikes_in([row["grad_norm"] for row in steps]),
        "nonfinite": sum(bool(row.get("nonfinite")) for row in steps),
        "unchanged": round(unchanged_share(run), 5),
        "cpu_s": round(cpu_s),
    }
    arm, _, seed = name.rpartition("-")
    if arm in {arm.name for arm in AVERAGED} and int(seed) < AVERAGED_SEEDS:
        row["average"] = average_losses(run, log)
    shutil.rmtree(run)
    return row


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workdir", type=pathlib.Path, required=True)
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="runs at once, one a core")
    parser.add_argument("--only", default="", help="names of runs; all by default")
    parser.add_argument("--results", type=pathlib.Path, default=RESULTS)
    values = parser.parse_args()
    values.workdir.mkdir(parents=True, exist_ok=True)
    grid = runs()
    try:
        done = read_results(values.results)
    except ValueError as error:
        parser.error(str(error))
    names = values.only.split(",") if values.only else list(grid)
    waiting = [name for name in names if name not in done]
    failed, lock = {}, threading.Lock()

    def work(core: int) -> None:
        os.sched_setaffinity(0, {core})  # of this thread and of the processes that it starts
        while True:
            with lock:
                if not waiting:
                    return
                name = waiting.pop(0)
            try:
                row = record(name, grid[name], workdir=values.workdir)
            except (RuntimeError, OSError, ValueError) as error:
                failed[name] = str(error)
                print(f"{name}: {error}", flush=True)
                continue
            with lock, values.results.open("a") as out:
                print(json.dumps(row), file=out)
            ended = row.get("diverged") or f"{list(row['eval_loss'].values())[-1]:.4f}, {row['cpu_s']} CPU-s"
            print(f"{name}: {ended}; {len(waiting)} wait", flush=True)

    cores = sorted(os.sched_getaffinity(0))[: values.jobs]
    workers = [threading.Thread(target=work, args=(core,)) for core in cores]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    print(f"{len(failed)} of {len(names)} runs failed" + "".join(f"\n  {name}: {why}" for name, why in failed.items()))
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
