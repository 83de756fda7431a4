"""launch/restart.sh and launch/slurm: what is started again, what is not, and whole jobs under a fake Slurm."""

import os
import pathlib
import shutil
import signal
import subprocess
import sys

import fake_slurm
import jobs
import micro
import pytest
from refusals import assert_names

LAUNCH = jobs.NODE.parent
# One failure after another: each start takes the next word of `plan`, CODE or CODE:STEP of a checkpoint made before.
PLAYER = """
import pathlib, sys
folder = pathlib.Path(sys.argv[1].removeprefix("--workdir="))
plan = (folder / "plan").read_text().split()
count = len((folder / "starts").read_text()) if (folder / "starts").exists() else 0
(folder / "starts").write_text("x" * (count + 1))
code, _, step = plan[min(count, len(plan) - 1)].partition(":")
if step:
    (folder / "checkpoints" / step).mkdir(parents=True)
sys.exit(int(code))
"""


def restart(*words):
    """Returns the finished process of restart.sh, which does not wait between starts."""
    words = [str(LAUNCH / "restart.sh"), "--wait_s=0", *map(str, words)]
    return subprocess.run(words, capture_output=True, text=True, timeout=600, check=False)


@pytest.fixture
def restarted(tmp_path):
    """A function of a plan of exit codes and the flags of the script: (exit code, number of starts, stderr)."""

    def run(plan, *flags):
        (tmp_path / "starts").unlink(missing_ok=True)
        (tmp_path / "plan").write_text(plan)
        done = restart(*flags, sys.executable, "-c", PLAYER, f"--workdir={tmp_path}")
        starts = tmp_path / "starts"
        return done.returncode, len(starts.read_text()) if starts.exists() else 0, done.stderr

    return run


def test_restart_repeats_what_may_go_better_until_success(restarted):
    for code in (0, 2, 130):  # success, an error of the user, Ctrl-C
        assert restarted(f"{code}") == (code, 1, "")
    assert restarted("124 143 0")[:2] == (0, 3)  # stuck, without an answer to SIGTERM
    code, starts, said = restarted("1:5 137 1 0", "--max_restarts=3")
    assert (code, starts) == (0, 4)
    for number, (line, exit_code) in enumerate(zip(said.splitlines(), (1, 137, 1), strict=True), 1):
        assert_names(line, f" {exit_code},", f"restart {number} of 3", "step 5", "0 s")
    code, starts, said = restarted("1", "--max_restarts=2")
    assert (code, starts) == (1, 3)
    assert_names(said.splitlines()[-1], " 1 ", "2 restarts", "step 5")
    assert restarted("1 1 1:10 1 1:020 1 0", "--max_restarts=2")[:2] == (0, 7)  # a new checkpoint resets the count
    unfinished = "1:29.orbax-checkpoint-tmp"
    assert restarted(f"1:30 1:7 {unfinished} 0", "--max_restarts=2")[:2] == (1, 3)


# The first start beats, then freezes with a child; the second ends. `alive.json` is left behind by a killed process.
FREEZES = """
import json, os, pathlib, signal, subprocess, sys, time
folder = pathlib.Path(sys.argv[1].removeprefix("--workdir="))
with open(folder / "starts", "a") as file:
    file.write("x")
if len((folder / "starts").read_text()) > 1:
    sys.exit(0)
child = subprocess.Popen(["sleep", "60"])
(folder / "child").write_text(str(child.pid))
(folder / "alive.json").write_text("{}")
if "ends" in sys.argv:
    (folder / "alive.json").unlink()
    child.kill()
    time.sleep(6)
    sys.exit(0)
os.kill(os.getpid(), signal.SIGSTOP)
"""


@pytest.mark.slow
def test_restart_repeats_a_frozen_command_and_ends_its_children(tmp_path):
    (tmp_path / "alive.json").write_text("of an earlier process")
    done = restart("--stale_s=2", sys.executable, "-c", FREEZES, f"--workdir={tmp_path}")
    assert done.returncode == 0
    assert (tmp_path / "starts").read_text() == "xx"
    frozen, again = [line for line in done.stderr.splitlines() if not line.startswith(str(LAUNCH))]
    assert_names(frozen, f"error: {tmp_path}/alive.json ", "2 s")
    assert_names(again, " 124,", "restart 1 of 10", "step 0", "0 s")
    status = pathlib.Path(f"/proc/{(tmp_path / 'child').read_text()}/status")
    assert not status.exists() or "State:\tZ" in status.read_text()  # ended, though nobody may have asked


@pytest.mark.slow
def test_restart_leaves_a_slow_command_alone(tmp_path):
    (tmp_path / "alive.json").write_text("of an earlier process")
    for program in ("import time; time.sleep(6)", FREEZES):
        done = restart("--stale_s=2", sys.executable, "-c", program, f"--workdir={tmp_path}", "ends")
        assert (done.returncode, done.stderr) == (0, "")


def test_restart_forwards_a_signal_and_does_not_restart(tmp_path):
    saves = "trap 'sleep 0.3; echo saved; exit 5' USR1; echo ready; while true; do sleep 0.05; done"
    words = [str(LAUNCH / "restart.sh"), "--wait_s=0", "bash", "-c", saves, f"--workdir={tmp_path}"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGTERM)
        assert process.wait(600) == 5
        assert (process.stdout.read(), process.stderr.read()) == ("saved\n", "")


def test_restart_counts_requeues_without_a_new_checkpoint(restarted):
    assert restarted("1", "--max_restarts=3")[:2] == (1, 4)
    code, starts, said = restarted("0", "--max_restarts=3", "--requeued=1")
    assert (code, starts) == (1, 0)
    assert_names(said, "error: ", "3 restarts", "step 0")
    assert restarted("1:5 0", "--max_restarts=3")[:2] == (0, 2)  # another job, which nothing of before ends
    for count in range(1, 6):  # as after each --time, with a new checkpoint
        assert restarted(f"0:{5 + count}", "--max_restarts=3", f"--requeued={count}")[:2] == (0, 1)
    assert [restarted("0", "--max_restarts=3", f"--requeued={count}")[0] for count in range(6, 10)] == [0, 0, 0, 1]
    assert restarted("0:20", "--max_restarts=0")[:2] == (0, 1)
    assert restarted("0", "--max_restarts=0", "--requeued=1")[:2] == (1, 0)


def test_restart_requeues_only_a_job_near_its_time_limit(tmp_path):
    scontrol = tmp_path / "scontrol"
    env = {"PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}

    def stopped(number, code):
        """Returns what restart.sh said and exited with after a signal that its command answered with a code."""
        saves = f"trap 'exit {code}' USR1; echo ready; while true; do sleep 0.05; done"
        words = [str(LAUNCH / "restart.sh"), "--requeue=7", "bash", "-c", saves, f"--workdir={tmp_path}"]
        with subprocess.Popen(words, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
            assert process.stdout.readline() == "ready\n"
            process.send_signal(number)
            assert process.wait(600) == code
            return process.stdout.read() + process.stderr.read()

    for does, is_requeued in (("echo", True), ("false", False)):
        scontrol.write_text(f'#!/bin/sh\n{does} "$@"\n')
        scontrol.chmod(0o755)
        for code in (75, 137):
            *asked, line = stopped(signal.SIGUSR1, code).splitlines()[: 1 + is_requeued]
            assert_names(line, f" {code},", "job 7 ", "step 0")
            assert asked == ["requeue 7"] * is_requeued
            assert ("error: " in stopped(signal.SIGUSR1, code)) != is_requeued
    for number, code in ((signal.SIGUSR1, 0), (signal.SIGUSR1, 2), (signal.SIGTERM, 75)):
        assert stopped(number, code) == ""


def test_restart_refuses_what_is_no_number_without_evaluating_it(tmp_path):
    for words, fact in (
        (["true"], "--workdir=DIR"),
        (["--max_restarts=08", "true", "--workdir=a"], "--max_restarts=08"),
    ):
        done = restart(*words)
        assert done.returncode == 2
        assert_names(done.stderr, fact)
    for name, value in (("SLURM_RESTART_COUNT", "PATH[$(touch x)]"), ("MAX_RESTARTS", "08")):
        env = {"PATH": os.environ["PATH"], "SLURM_SUBMIT_DIR": str(tmp_path), name: value}
        words = ["bash", str(LAUNCH / "slurm" / "train.sbatch")]
        done = subprocess.run(words, env=env, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 2
        assert done.stderr.startswith(f"error: {name}={value} ")
        assert not (tmp_path / "x").exists()


# Whole jobs


@pytest.fixture
def submit(tmp_path):
    """A function of the flags of sbatch, a script and its words, that runs a job to its end: the process that ran."""
    variables = micro.environment() | fake_slurm.install(tmp_path / "bin") | {"WAIT_S": "0"}

    def run(*words, **more):
        env = variables | {name: str(value) for name, value in more.items()}
        words, how = [str(tmp_path / "bin" / "sbatch"), *map(str, words)], {"cwd": micro.REPOSITORY, "env": env}
        return subprocess.run(words, **how, capture_output=True, text=True, timeout=600, check=False)

    return run


@pytest.mark.slow
def test_job_that_loses_a_node_resumes_from_its_last_checkpoint(submit, tmp_path):
    config, workdir = micro.write_config(tmp_path), tmp_path / "run"
    micro.hold_at(config, step=12)
    (tmp_path / "bin" / "lose").write_text(f"1 10 {workdir}")
    port = jobs.free_address().rpartition(":")[2]
    words = (f"--config={config}", f"--workdir={workdir}", f"--port={port}", "--config.train.num_eval_batches=1")
    words += ("--peer_timeout_s=15",)
    done = submit("--nodes=2", LAUNCH / "slurm/train.sbatch", *words, HOLD=tmp_path / "bin" / "lose")
    assert done.returncode == 0, done.stderr
    assert_names(done.stderr, "restart 1 of 10", "step 10")
    assert "step 10 of 24" in done.stdout
    assert [row["step"] for row in micro.rows(workdir) if "loss" in row] == list(range(1, 25))
    assert len((tmp_path / "bin" / "srun.log").read_text().splitlines()) == 2


@pytest.mark.slow
def test_job_saves_before_its_time_is_over_and_continues(submit, tmp_path):
    config, workdir = micro.write_config(tmp_path), tmp_path / "run"
    words = (f"--config={config}", f"--workdir={workdir}", "--config.train.eval_every_steps=0")
    endless = (*words, "--config.train.num_steps=1000000", "--config.checkpoint.every_steps=100000")
    (tmp_path / "bin" / "clock").write_text(str(workdir))  # the signal comes 1 s after the first step
    first = submit("--nodes=1", "--time=10:01", LAUNCH / "slurm/train.sbatch", *endless)
    assert first.returncode == 75, first.stderr
    assert "restart" not in first.stderr
    requeued = tmp_path / "bin" / "requeued"
    assert requeued.read_text() == "7"
    requeued.unlink()
    [saved] = [int(path.name) for path in (workdir / "checkpoints").iterdir() if path.name.isdecimal()]
    assert 0 < saved < 100000
    second = submit("--nodes=1", LAUNCH / "slurm/train.sbatch", *words, f"--config.train.num_steps={saved + 1}")
    assert second.returncode == 0, second.stderr
    assert f"step {saved} of {saved + 1}" in second.stdout
    assert not requeued.exists()


def test_job_with_a_wrong_config_is_not_tried_again(submit, tmp_path):
    words = (f"--config={micro.write_config(tmp_path)}", f"--workdir={tmp_path / 'run'}", "--config.data.batch_size=0")
    done = submit("--nodes=2", LAUNCH / "slurm/train.sbatch", *words)
    assert done.returncode == 2
    assert "data.batch_size=0" in done.stderr
    assert len((tmp_path / "bin" / "srun.log").read_text().splitlines()) == 1


@pytest.mark.slow
def test_precompiled_programs_are_copied_to_the_node_before_the_run(submit, tmp_path):
    config, workdir, shared, local = (tmp_path / name for name in ("micro.py", "run", "shared", "local"))
    micro.write_config(tmp_path)
    variables = {"CACHE": shared, "LOCAL_CACHE": local, "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": 0}
    variables["JAX_ENABLE_COMPILATION_CACHE"] = "true"
    words = (f"--config={config}", "--config.train.num_eval_batches=1", "--config.train.num_steps=3")
    filled = submit("--nodes=1", LAUNCH / "slurm/precompile.sbatch", *words, **variables)
    assert filled.returncode == 0, filled.stderr
    assert os.listdir(shared) == ["jax"]  # and no run folder, and nothing half copied
    programs = compiled(shared)
    assert {name.split("-")[0] for name in programs} >= {"jit_train_step", "jit_eval_step", "jit_initial"}

    shutil.rmtree(local)  # another node, whose folder has another path
    variables["LOCAL_CACHE"] = local = tmp_path / "other"
    run = submit("--nodes=1", LAUNCH / "slurm/train.sbatch", *words, f"--workdir={workdir}", **variables)
    assert run.returncode == 0, run.stderr
    assert compiled(local) == programs


def compiled(folder):
    return {path.name for path in (folder / "jax").iterdir() if path.name.endswith("-cache")}


def min_nodes(tmp_path, *flags, nodes="a b c", words=("@NODES@", "@NODELIST@")):
    """Returns (exit code, what each start was given, stderr) of restart.sh; the second start succeeds."""
    script = 'echo "$@" >> "$0/given"; [ "$(wc -l < "$0/given")" -ge 2 ]'
    (tmp_path / "given").unlink(missing_ok=True)
    command = ["bash", "-c", script, tmp_path, *words, "--config=tiny", "--config.data.batch_size=8", *flags]
    own = ["--min_nodes=2", f"--list_nodes=printf '%s\\n' {nodes}", "--instance=cpu", "--max_restarts=1"]
    done = restart(*own, *command, f"--workdir={tmp_path}")
    given = (
        [line.split()[:2] for line in (tmp_path / "given").read_text().splitlines()] if "nodes  " in done.stderr else []
    )
    return done.returncode, given, done.stderr


@pytest.mark.slow
def test_restart_gives_a_command_the_nodes_that_the_degrees_allow(tmp_path):
    follows = "--config.train.num_microbatches=-1"
    assert min_nodes(tmp_path, follows)[:2] == (0, [["3", "a,b,c"]] * 2)
    assert min_nodes(tmp_path, follows, "--config.parallel.tensor=2")[:2] == (0, [["2", "a,b"]] * 2)
    code, starts, said = min_nodes(tmp_path, follows, "--config.parallel.tensor=2", "--config.parallel.pipe=2")
    assert (code, starts) == (2, [])
    [line] = [line for line in said.splitlines() if "error" in line]
    assert_names(line, "--nodes=3 --min_nodes=2", "a multiple of 4 devices", "4 nodes pass")


def test_restart_refuses_nodes_that_it_cannot_give_and_waits_for_others(tmp_path, monkeypatch):
    monkeypatch.delenv("SLURM_JOB_NODELIST", raising=False)
    assert_names(min_nodes(tmp_path, words=("a", "b"))[2], "--min_nodes=2", "@NODES@")
    assert_names(restart("--min_nodes=2", "x", "@NODES@", "--workdir=w").stderr, "--list_nodes=COMMAND")
    code, starts, said = min_nodes(tmp_path, nodes="a")
    assert (code, starts) == (1, [])
    assert said.count("1 nodes are there, fewer than --min_nodes=2") == 2
