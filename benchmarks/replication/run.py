"""Trains the grid of `findings.py`, each run an ordinary `train` command, and records it in `results.jsonl`.

    python -m benchmarks.replication.run --workdir=FOLDER [--jobs=2] [--only=NAME,NAME] [--results=FILE]

Runs that are recorded are not made again; an interrupted command goes on where it was, within a run too. Each run has
one core, of those that this process may use. A recorded run's folder is deleted. Results of other settings are refused.
`norm_drift.py` makes the runs of the remaining finding.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import pathlib
import shutil
import signal
import statistics
import subprocess
import sys
import threading

import numpy as np

from benchmarks.replication.base import NUM_STEPS, get_config
from benchmarks.replication.findings import AVERAGED, AVERAGED_SEEDS, AVERAGED_STEPS, runs

FOLDER = pathlib.Path(__file__).resolve().parent
RESULTS = FOLDER / "results.jsonl"


def digest_of(overrides: dict[str, object]) -> str:
    """Returns a hash of all settings of a run, defaults too: another one is another experiment."""
    config = get_config()
    config.update_from_flattened_dict(overrides)
    return hashlib.sha256(json.dumps(config.to_dict(), sort_keys=True).encode()).hexdigest()[:16]


def read_results(path: pathlib.Path) -> dict[str, dict]:
    """Returns name of a run -> its row. Raises ValueError for a row of other settings."""
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    grid = runs()
    for row in rows:
        name = row["run"]
        if name not in grid or row["settings"] != digest_of(grid[name]):
            raise ValueError(
                f"{path}: {name} was trained with other settings than those of base.py, findings.py and the package; "
                "restore these, or give --results=FILE and train the grid anew."
            )
    return {row["run"]: row for row in rows}


class Stopped(Exception):
    """A signal has stopped this command and the runs that it had begun."""


class Commands:
    """Commands of the package, each on the cores of the thread that starts it, until `stop`."""

    def __init__(self) -> None:
        self.is_stopped = False
        self._running: set[subprocess.Popen] = set()

    def run(self, module: str, *words: object, log: pathlib.Path) -> None:
        """Runs a command and adds its CPU seconds, also those of one that fails, to the file beside its log."""
        if self.is_stopped:
            raise Stopped
        with log.open("a") as out:
            call = [sys.executable, "-m", f"hlat_jax.{module}", *map(str, words)]
            process = subprocess.Popen(call, stdout=out, stderr=out)
        self._running.add(process)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        self._running.discard(process)
        with log.with_suffix(".cpu").open("a") as out:
            print(usage.ru_utime + usage.ru_stime, file=out)
        if self.is_stopped:
            raise Stopped
        if process.returncode:
            last = (log.read_text().splitlines() or ["it said nothing"])[-1]
            raise RuntimeError(f"exit code {process.returncode}, see {log}: {last}")

    def stop(self, *_: object) -> None:
        """Lets the runs save and end, and begins no more."""
        self.is_stopped = True
        for process in list(self._running):
            process.terminate()


def unchanged_share(run: pathlib.Path) -> float:
    """Returns the share of weights, of the masters where there are any, that the last update left as they were."""
    from hlat_jax.weights.trained import leaves_by_name, open_weights

    before, after = (open_weights(run / "checkpoints" / str(step), masters=True) for step in (NUM_STEPS - 1, NUM_STEPS))
    names = leaves_by_name(after.arrays)
    same = [np.asarray(before.read(name)) == np.asarray(after.read(name)) for name in names]
    return sum(int(part.sum()) for part in same) / sum(part.size for part in same)


def average_losses(run: pathlib.Path, log: pathlib.Path, commands: Commands) -> dict[str, float]:
    """Returns the loss of two checkpoints and of their average, per token of the held-out documents."""
    single = [run / "checkpoints" / str(step) for step in AVERAGED_STEPS]
    mean = run / "average"
    shutil.rmtree(mean, ignore_errors=True)
    commands.run("hf", "average", *single, f"--out={mean}", log=log)
    losses = {}
    for name, folder in (*zip(map(str, AVERAGED_STEPS), single, strict=True), ("average", mean)):
        out = run / f"{name}.json"
        text = "--data=package:austen_validation.jsonl"
        commands.run("evaluate", f"--checkpoint={folder}", text, f"--json={out}", log=log)
        losses[name] = json.loads(out.read_text())["eval_loss"]
    return losses


def spikes_in(norms: list[float]) -> int:
    """Returns how many gradient norms exceed the mean of the 20 before by the median of all: HLAT's rule, to scale."""
    threshold = statistics.median(norms)
    return sum(norm > statistics.mean(norms[at : at + 20]) + threshold for at, norm in enumerate(norms[20:]))


def record(name: str, overrides: dict[str, object], *, workdir: pathlib.Path, commands: Commands) -> dict:
    """Trains one run to its end, and returns its row of results; of a run that diverges, with the error."""
    run, log = workdir / name, workdir / f"{name}.log"
    flags = [f"--config.{key}={value}" for key, value in overrides.items()]
    row: dict = {"run": name, "settings": digest_of(overrides)}
    try:
        commands.run("train", f"--config={FOLDER / 'base.py'}", f"--workdir={run}", *flags, log=log)
    except RuntimeError as error:
        if "not finite" not in str(error):
            raise
        return row | {"diverged": str(error).partition(": ")[2], "cpu_s": cpu_seconds(log)}
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [one for one in rows if "grad_norm" in one]
    losses = [one["loss"] for one in steps]
    row |= {
        "eval_loss": {one["step"]: one["eval_loss"] for one in rows if "eval_loss" in one},
        "loss": [round(statistics.mean(losses[at : at + 20]), 4) for at in range(0, len(losses), 20)],
        "spikes": spikes_in([one["grad_norm"] for one in steps]),
        "nonfinite": sum(bool(one.get("nonfinite")) for one in steps),
        "unchanged": round(unchanged_share(run), 5),
    }
    arm, _, seed = name.rpartition("-")
    if arm in {arm.name for arm in AVERAGED} and int(seed) < AVERAGED_SEEDS:
        row["average"] = average_losses(run, log, commands)
    return row | {"cpu_s": cpu_seconds(log)}


def cpu_seconds(log: pathlib.Path) -> int:
    """Returns the CPU seconds of all commands of a run, of those before an interruption too."""
    return round(sum(map(float, log.with_suffix(".cpu").read_text().split())))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workdir", type=pathlib.Path, required=True)
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="runs at once, one a core")
    parser.add_argument("--only", default="", help="names of runs; all by default")
    parser.add_argument("--results", type=pathlib.Path, default=RESULTS)
    values = parser.parse_args()
    grid = runs()
    names = values.only.split(",") if values.only else list(grid)
    if unknown := [name for name in names if name not in grid]:
        parser.error(f"--only={','.join(unknown)}: no such run; there are {', '.join(grid)}")
    try:
        done = read_results(values.results)
    except ValueError as error:
        parser.error(str(error))
    for folder in (values.workdir, values.results.parent):
        folder.mkdir(parents=True, exist_ok=True)
    waiting, failed, lock, commands = [name for name in names if name not in done], {}, threading.Lock(), Commands()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, commands.stop)

    def work(core: int) -> None:
        os.sched_setaffinity(0, {core})  # of this thread and of the processes that it starts
        while waiting and not commands.is_stopped:
            name = waiting.pop(0)  # atomic
            try:
                row = record(name, grid[name], workdir=values.workdir, commands=commands)
                with lock, values.results.open("a") as out:
                    print(json.dumps(row), file=out)
            except Stopped:
                return
            except Exception as error:  # whatever it is, the others go on
                failed[name] = f"{type(error).__name__}: {error}"
                print(f"{name}: {failed[name]}", flush=True)
                continue
            shutil.rmtree(values.workdir / name)
            ended = row.get("diverged") or f"{list(row['eval_loss'].values())[-1]:.4f}, {row['cpu_s']} CPU-s"
            print(f"{name}: {ended}; {len(waiting)} wait", flush=True)

    cores = sorted(os.sched_getaffinity(0))[: values.jobs]
    workers = [threading.Thread(target=work, args=(core,)) for core in cores]
    for worker in workers:
        worker.start()
    for worker in workers:
        while worker.is_alive():  # a signal is handled between two waits
            worker.join(1.0)
    left = [name for name in names if name not in read_results(values.results)]
    print(f"{len(left)} of {len(names)} runs are left" + "".join(f"\n  {name}: {failed[name]}" for name in failed))
    return bool(left)


if __name__ == "__main__":
    sys.exit(main())
