"""A Slurm of this machine, for tests: `sbatch`, `srun` and `scontrol` in a folder that goes first on PATH.

`sbatch` runs a batch script at once, from a spool folder as Slurm does, with what its #SBATCH lines and its own flags
ask for. `scontrol requeue` writes the number of the job into a file `requeued`. `srun` starts the command once for each
node, all of them here, and waits for all. A file `lose` in the folder, with `RANK STEP RUN_FOLDER`, makes it kill that
rank when a checkpoint of that step is there: a lost node. As in Slurm, a job whose --time is nearly over gets the
signal of `--signal=B:USR1@SECONDS`, in the batch script and not in its steps, and one without --time never does; srun
kills its tasks after SIGTERM. With a file `clock`, with `RUN_FOLDER`, the time counts from the first step of that run,
so that a slow machine has trained by then.
"""

import os
import pathlib
import re
import shlex
import signal
import subprocess
import sys
import time


def install(folder: pathlib.Path) -> dict[str, str]:
    """Writes the commands into `folder` and returns the variables that make them found."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("sbatch", "srun", "scontrol"):
        script = folder / name
        script.write_text(f'#!/bin/sh\nexec {sys.executable} {__file__} {name} {folder} "$@"\n')
        script.chmod(0o755)
    return {"PATH": f"{folder}{os.pathsep}{os.environ['PATH']}", "PYTHON": sys.executable}


def _sbatch(folder: pathlib.Path, words: list[str]) -> int:
    given = []
    while words[0].startswith("--"):
        given.append(words.pop(0))
    script, *rest = words
    text = pathlib.Path(script).read_text()
    asked = [line.split()[1] for line in text.splitlines() if line.startswith("#SBATCH")]
    options = dict(word.removeprefix("--").partition("=")[::2] for word in [*asked, *given])
    nodes = int(options["nodes"])
    spool = folder / "slurm_script"
    spool.write_text(text)
    variables = {
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NODELIST": f"node[0-{nodes - 1}]",
        "SLURM_NNODES": str(nodes),
        "SLURM_NTASKS_PER_NODE": options.get("ntasks-per-node", ""),
        "SLURM_CPUS_PER_TASK": options["cpus-per-task"],
        "SLURM_SUBMIT_DIR": os.getcwd(),
    }
    batch = subprocess.Popen(["bash", str(spool), *rest], env=os.environ | variables, cwd="/")
    if "time" in options and "signal" in options:
        name, _, lead = options["signal"].partition("@")
        assert name == "B:USR1"
        parts = map(int, reversed(re.split("[-:]", options["time"])))  # DAYS-HOURS:MINUTES:SECONDS, or the last of them
        seconds = sum(unit * part for unit, part in zip((1, 60, 3600, 86400), parts, strict=False))
        _wait_for_clock(folder, batch)
        try:
            return batch.wait(seconds - int(lead))
        except subprocess.TimeoutExpired:
            batch.send_signal(signal.SIGUSR1)
    return batch.wait()


def _wait_for_clock(folder: pathlib.Path, batch: subprocess.Popen) -> None:
    order = folder / "clock"
    if order.exists():
        rows = pathlib.Path(order.read_text()) / "metrics.jsonl"
        order.unlink()
        while batch.poll() is None and not (rows.exists() and '"loss"' in rows.read_text()):
            time.sleep(0.05)


def _srun(folder: pathlib.Path, words: list[str]) -> int:
    flags = []
    while words[0].startswith("--"):
        flags.append(words.pop(0))
    assert f"--cpus-per-task={os.environ['SLURM_CPUS_PER_TASK']}" in flags  # srun needs it again
    assert "--ntasks-per-node=1" in flags or os.environ["SLURM_NTASKS_PER_NODE"] == "1"
    with open(folder / "srun.log", "a") as log:
        log.write(shlex.join(words) + "\n")
    nodes = range(int(os.environ["SLURM_NNODES"]))
    places = [{"SLURM_NODEID": str(node), "SLURM_PROCID": str(node)} for node in nodes]
    tasks = [subprocess.Popen(words, env=os.environ | place) for place in places]
    signal.signal(signal.SIGTERM, lambda *_: [task.kill() for task in tasks])
    signal.signal(signal.SIGUSR1, lambda *_: [task.send_signal(signal.SIGUSR1) for task in tasks])
    while any(task.poll() is None for task in tasks):
        time.sleep(0.05)
        _kill_requested_task(folder, tasks)
    return max(128 - task.returncode if task.returncode < 0 else task.returncode for task in tasks)


def _kill_requested_task(folder: pathlib.Path, tasks: list[subprocess.Popen]) -> None:
    order = folder / "lose"
    if order.exists():
        rank, step, workdir = order.read_text().split()
        if (pathlib.Path(workdir) / "checkpoints" / step).is_dir():
            order.unlink()
            tasks[int(rank)].kill()


def _scontrol(folder: pathlib.Path, words: list[str]) -> int:
    if words[0] == "requeue":
        (folder / "requeued").write_text(words[1])
        return 0
    assert words[:2] == ["show", "hostnames"], words
    assert words[2].startswith("node[0-"), words
    print("\n".join(["127.0.0.1"] * (int(words[2][7:-1]) + 1)))
    return 0


if __name__ == "__main__":
    commands = {"sbatch": _sbatch, "srun": _srun, "scontrol": _scontrol}
    sys.exit(commands[sys.argv[1]](pathlib.Path(sys.argv[2]), sys.argv[3:]))
