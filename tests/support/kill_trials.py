"""Kills a training run with SIGKILL at random moments, runs the command again, and compares with an uninterrupted run.

    PYTHONPATH=. python tests/support/kill_trials.py --trials 24 --seed 0

prints one line per kill and ends with exit code 1 when any trial differs in a single bit. `test_resume.py` uses the
same functions for the short form.
"""

import argparse
import dataclasses
import pathlib
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time

import micro

from hlat_jax.store.metrics import ROWS_FILE

TMP_MARK = ".orbax-checkpoint-tmp"  # in the name of a checkpoint folder that is being written


@dataclasses.dataclass(frozen=True)
class Kill:
    """Result of one kill.

    Attributes:
      plan: a key of PLANS.
      delay_s: between the event seen and the signal.
      hit: what the run was doing, judged by what it left on the disk; "" when it had ended before the signal.
      rows: rows on the disk.
      resumed_from: the step this process had resumed from; 0: it started from scratch.
    """

    plan: str
    delay_s: float
    hit: str
    rows: int
    resumed_from: int


def _rows_text(workdir):
    path = workdir / ROWS_FILE
    return path.read_text() if path.exists() else ""


def _compiled(workdir, log):
    return "compiled " in log.read_text()


def stepping(workdir: pathlib.Path) -> bool:
    """Returns whether a row of a step is on the disk."""
    return '"loss"' in _rows_text(workdir)


def _stepping(workdir, log):
    return _compiled(workdir, log) and stepping(workdir)


def _saving(workdir, log):
    folder = workdir / "checkpoints"
    return _compiled(workdir, log) and folder.is_dir() and any(TMP_MARK in path.name for path in folder.iterdir())


def _validating(workdir, log):
    return _compiled(workdir, log) and interrupted_phase(workdir) == "validation"


# name -> (event to wait for, longest further delay in seconds)
PLANS = {
    "at any time": (lambda workdir, log: True, 4.0),
    "after the first row": (_stepping, 1.0),
    "while saving": (_saving, 0.05),
    "while validating": (_validating, 0.01),
    "before the first checkpoint": (_stepping, 0.02),
    "after compiling": (_compiled, 1.0),
}


def interrupted_phase(workdir: pathlib.Path) -> str:
    """Returns what a killed run was doing, by what it left: validation is between a due row and its evaluation."""
    if not (workdir / "checkpoints").is_dir():
        return "start"
    if any(TMP_MARK in path.name for path in (workdir / "checkpoints").iterdir()):
        return "asynchronous save"
    last = (_rows_text(workdir).splitlines() or [""])[-1]
    step = re.search(r'"step": (\d+),', last)
    if step and '"loss"' in last and last.endswith("}") and int(step[1]) % micro.EVAL_EVERY == 0:
        return "validation"
    return "before the first checkpoint" if not micro.saved_steps(workdir) else "between saves"


def kill_once(words: list[str], env: dict[str, str], workdir: pathlib.Path, *, plan: str, rng: random.Random) -> Kill:
    """Starts the command, waits for the plan's event and a random while, and kills it."""
    event, longest = PLANS[plan]
    delay_s = rng.uniform(0, longest)
    log = workdir.with_suffix(".log")
    with open(log, "w") as file:
        process = subprocess.Popen(words, env=env, stdout=file, stderr=subprocess.STDOUT)
        while process.poll() is None and not event(workdir, log):
            time.sleep(0.0005)
        time.sleep(delay_s)
        process.kill()
        killed = process.wait() == -9
    if not killed and process.returncode != 0:
        raise AssertionError(f"the run failed by itself:\n{log.read_text()}")
    num_rows = _rows_text(workdir).count("\n")
    return Kill(plan, delay_s, interrupted_phase(workdir) if killed else "", num_rows, resumed_step(log.read_text()))


def resumed_step(output: str) -> int:
    """Returns the step that a run prints it resumes from, or is complete at; 0 when it starts from scratch."""
    said = re.search(r"resuming from step (\d+)|complete: .* is at step (\d+)", output)
    return int(said[1] or said[2]) if said else 0


def differences(config: pathlib.Path, found: pathlib.Path, expected: pathlib.Path) -> list[str]:
    """Returns how the finished run in `found` differs from the one in `expected`, timings apart; [] when in nothing."""
    result = []
    a, b = ([micro.exact(row) for row in micro.rows(workdir)] for workdir in (found, expected))
    if a != b:
        first = next((pair for pair in zip(a, b, strict=False) if pair[0] != pair[1]), "their number")
        result.append(f"rows differ ({len(a)} against {len(b)}): {first}")
    for key in ("loss", "eval_loss"):
        steps = [row["step"] for row in a if key in row]
        if steps != sorted(set(steps)):
            result.append(f"rows with {key} do not stand once per step: {steps}")
    if [row["step"] for row in a if "loss" in row] != list(range(1, micro.NUM_STEPS + 1)):
        result.append("steps are missing")
    x, y = micro.final_checkpoint(config, found), micro.final_checkpoint(config, expected)
    if x[0] != micro.NUM_STEPS or x[0] != y[0]:
        result.append(f"final checkpoint of step {x[0]} against {y[0]}")
    result += [f"{name} differs" for name in sorted(x[1].keys() | y[1].keys()) if x[1].get(name) != y[1].get(name)]
    if x[2] != y[2]:
        result.append(f"data position {x[2]} against {y[2]}")
    if x[3] != y[3]:
        result.append("checkpoint metadata differ")
    return result


def main() -> int:
    """Runs the trials as the command line says; returns the exit code."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--trials", type=int, default=24)
    parser.add_argument("--first", type=int, default=0, help="number of the first trial, to run them in parts")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    plans = list(PLANS)
    num_bad = 0
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        config, env = micro.write_config(folder), micro.environment(folder / "cache")
        reference = folder / "uninterrupted"
        # without the compile cache, so that the cache is part of what is tested
        first = micro.run(micro.command(config, reference), micro.environment())
        if first.returncode:
            raise SystemExit(f"the uninterrupted run failed:\n{first.stdout}{first.stderr}")
        print(f"{'trial':>5}  {'planned':28}{'delay':>8}  {'hit':28}{'rows then':>9}  {'resumed from':>12}  result")
        for trial in range(args.first, args.first + args.trials):
            rng = random.Random(f"{args.seed}/{trial}")
            workdir = folder / f"trial{trial}"
            words = micro.command(config, workdir)
            # each plan leads in its turn, and half of the trials are killed once more
            chosen = [plans[trial % len(plans)], *rng.choices(plans, k=rng.randrange(2))]
            kills = [kill_once(words, env, workdir, plan=chosen[0], rng=rng)]
            while not kills[0].hit:  # it had ended before the signal: no trial, begin again
                shutil.rmtree(workdir)
                kills = [kill_once(words, env, workdir, plan=chosen[0], rng=rng)]
            kills += [kill_once(words, env, workdir, plan=plan, rng=rng) for plan in chosen[1:]]
            last = micro.run(words, env)
            found = differences(config, workdir, reference) if last.returncode == 0 else [last.stderr]
            num_bad += bool(found)
            resume_steps = [kill.resumed_from for kill in kills[1:]] + [resumed_step(last.stdout)]
            for number, (kill, step) in enumerate(zip(kills, resume_steps, strict=True)):
                verdict = "killed again" if number < len(kills) - 1 else "; ".join(found) or "bitwise equal"
                print(
                    f"{trial:5}  {kill.plan:28}{kill.delay_s:7.3f}s  {kill.hit or '(had ended)':28}{kill.rows:9}  "
                    f"{step:>12}  {verdict}",
                    flush=True,
                )
    print(f"{args.trials} trials, {args.trials - num_bad} bitwise equal to the uninterrupted run, {num_bad} not")
    return 1 if num_bad else 0


if __name__ == "__main__":
    sys.exit(main())
