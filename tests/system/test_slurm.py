"""train.sbatch and build.sbatch of launch/slurm under Slurm itself: a controller and two nodes on this machine, with a
configuration of its own.

Debian has Slurm in the packages slurm-wlm and munge. One job has a task killed, gets signals, is requeued and
reaches its time limit; two more continue the same run. The tests read what came of them.
"""

import contextlib
import dataclasses
import getpass
import os
import pathlib
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time

import jobs
import micro
import numpy as np
import pytest
from data_files import write_jsonl
from refusals import assert_names

from hlat_jax.data import sources
from hlat_jax.data.build import build
from hlat_jax.store.metrics import ROWS_FILE

SCRIPT = jobs.NODE.parent / "slurm" / "train.sbatch"
SAVE_EVERY = 20
DAEMONS = ("munged", "slurmctld", "slurmd")
CONFIG = """
ClusterName=hlat
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
AuthType=auth/munge
# how long a requeued job waits, in seconds; 120 by default
AuthInfo=socket={folder}/munge/socket,cred_expire=10
SlurmUser={user}
SlurmdUser={user}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=sched_interval=2,bf_interval=2
NodeName=fake1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=1
NodeName=fake2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=1
PartitionName=all Nodes=fake1,fake2 Default=YES MaxTime=INFINITE State=UP
"""
pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("slurm")]


def daemon(name):
    """Returns the path of a daemon of Slurm, or None; /usr/sbin is not on the PATH of every user."""
    return shutil.which(name, path=f"{os.environ['PATH']}{os.pathsep}/usr/sbin")


def until(ready, what):
    """Waits for `ready()` to be true, and returns it."""
    end_s = time.monotonic() + 300
    while not (found := ready()):
        assert time.monotonic() < end_s, what()
        time.sleep(0.1)
    return found


@dataclasses.dataclass
class Cluster:
    """The commands of a cluster whose files are in `folder`, and jobs of train.sbatch on its two nodes."""

    folder: pathlib.Path
    env: dict[str, str]

    def run(self, *words):
        """Returns the standard output of a command of Slurm."""
        words, how = list(map(str, words)), {"cwd": micro.REPOSITORY, "env": self.env}
        done = subprocess.run(words, **how, capture_output=True, text=True, timeout=600, check=False)
        assert done.returncode == 0, (words, done.stderr)
        return done.stdout

    @property
    def flags(self):
        return "--parsable", "--nodes=2", "--cpus-per-task=1", f"--output={self.folder}/%j.log"

    def submit(self, *words):
        """Returns the number of a new job."""
        return int(self.run("sbatch", *self.flags, SCRIPT, *words))

    def job(self, number, field):
        """Returns a field of a job, such as JobState."""
        return re.search(rf"(?:^| ){field}=(\S*)", self.run("scontrol", "show", "job", "--oneliner", number))[1]

    def log(self, number):
        path = self.folder / f"{number}.log"
        return path.read_text() if path.exists() else ""

    def wait(self, number):
        """Returns (state, "CODE:SIGNAL", restarts) of a job at its end."""
        running = ("PENDING", "RUNNING", "COMPLETING", "CONFIGURING")
        until(lambda: self.job(number, "JobState") not in running, lambda: self.log(number))
        return self.job(number, "JobState"), self.job(number, "ExitCode"), int(self.job(number, "Restarts"))


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    """The Cluster, whose daemons end with the module."""
    if missing := [name for name in (*DAEMONS, "sbatch") if daemon(name) is None]:
        pytest.skip(f"Slurm is not installed here: {', '.join(missing)} missing")
    folder = tmp_path_factory.mktemp("slurm")
    for name in ("state", "spool-fake1", "spool-fake2", "munge"):
        (folder / name).mkdir(mode=0o755)
    key = folder / "munge.key"
    key.write_bytes(secrets.token_bytes(1024))
    key.chmod(0o600)
    ports = [jobs.free_address().rpartition(":")[2] for _ in range(3)]
    host = socket.gethostname().partition(".")[0]
    config = folder / "slurm.conf"
    config.write_text(CONFIG.format(folder=folder, host=host, ports=ports, user=getpass.getuser()))
    files = {"socket": "munge/socket", "key-file": "munge.key", "pid-file": "munged.pid", "log-file": "munged.log"}
    files["seed-file"] = "munged.seed"
    munge = [f"--{flag}={folder / name}" for flag, name in files.items()]
    commands = [["munged", "--foreground", "--force", *munge], ["slurmctld", "-D"]]
    commands += [["slurmd", "-D", "-N", node] for node in ("fake1", "fake2")]
    env = micro.environment(folder / "programs") | {"SLURM_CONF": str(config)}
    env |= {"PYTHON": sys.executable, "WAIT_S": "0", "PATH": f"{os.environ['PATH']}{os.pathsep}/usr/sbin"}
    this = Cluster(folder, env)
    with contextlib.ExitStack() as stack:
        for words in commands:
            with open(folder / f"{words[0]}.out", "ab") as out:
                words[0] = daemon(words[0])
                process = subprocess.Popen(words, env=env, stdout=out, stderr=out)
            stack.callback(process.wait)
            stack.callback(process.terminate)
            if "munged" in words[0]:
                until((folder / "munge" / "socket").exists, (folder / "munged.out").read_text)
        idle = ["sinfo", "--noheader", "--format=%T %D"]
        ready = lambda: subprocess.run(idle, env=env, capture_output=True, text=True).stdout == "idle 2\n"  # noqa: E731
        until(ready, lambda: "".join(path.read_text() for path in folder.glob("*.log")))
        stack.callback(this.run, "scancel", "--user", getpass.getuser())
        yield this


def tasks(workdir):
    """Returns process_id -> pid of the processes that train in a folder."""
    found = {}
    for path in pathlib.Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            words = path.read_bytes().decode().split("\0")
            if "hlat_jax.train" in words and f"--workdir={workdir}" in words:
                found |= {int(word.rpartition("=")[2]): int(path.parent.name) for word in words if "process_id" in word}
    return found


def last_step(workdir):
    """Returns the step of the last whole row of a run, 0 without one."""
    path = workdir / ROWS_FILE
    whole = path.read_bytes().rpartition(b"\n")[0] if path.exists() else b""
    return int((re.findall(rb'(?m)^\{"step": (\d+)', whole) or [0])[-1])


@dataclasses.dataclass
class Story:
    """What became of the jobs of a run.

    Attributes:
      ends: job -> (state, "CODE:SIGNAL", restarts).
      logs: job -> its log.
      starts: job -> the step from which each of its starts resumed, 0 for none.
      saved: what happened -> a step that had been saved before.
      steps: the steps of all rows of training.
    """

    ends: dict[str, tuple[str, str, int]]
    logs: dict[str, str]
    saved: dict[str, int]
    steps: list[int]

    @property
    def starts(self):
        found = {job: re.split("(?m)^micro: ", log)[1:] for job, log in self.logs.items()}
        return {
            job: [int((re.findall(r"(?m)^resuming from step (\d+) of", start) or [0])[0]) for start in starts]
            for job, starts in found.items()
        }


@pytest.fixture(scope="module")
def story(cluster, tmp_path_factory):
    """The Story of a run that jobs train one after the other; the first of them meets all that may happen."""
    folder = tmp_path_factory.mktemp("story")
    workdir, saved, jobs_ = folder / "run", {}, {}
    port = jobs.free_address().rpartition(":")[2]
    words = [f"--config={micro.write_config(folder)}", f"--workdir={workdir}", f"--port={port}"]
    words += ["--config.train.eval_every_steps=0", f"--config.checkpoint.every_steps={SAVE_EVERY}"]
    words += ["--peer_timeout_s=15"]
    endless = [*words, "--config.train.num_steps=1000000"]

    def trains(job, what, *, start):
        """Waits until the given start of the run in this job has trained, before something happens to it."""
        log = lambda: cluster.log(jobs_[job])  # noqa: E731
        until(lambda: len(re.findall("(?m)^micro: ", log())) == start, log)
        last = last_step(workdir)
        until(lambda: last_step(workdir) > max(last + 1, SAVE_EVERY + 1) and micro.saved_steps(workdir), log)
        saved[what] = micro.saved_steps(workdir)[-1]

    first = jobs_["first"] = cluster.submit(*endless)
    trains("first", "killed", start=1)
    os.kill(tasks(workdir)[1], signal.SIGKILL)
    trains("first", "signal to the steps", start=2)
    cluster.run("scancel", "--signal=TERM", first)
    trains("first", "time limit", start=3)
    end = time.localtime(time.time() + 650)  # the signal is due 600 s before
    cluster.run("scontrol", "update", f"JobId={first}", time.strftime("EndTime=%Y-%m-%dT%H:%M:%S", end))
    until(lambda: cluster.job(first, "Restarts") == "1", lambda: cluster.log(first))
    cluster.run("scontrol", "update", f"JobId={first}", "TimeLimit=7-00:00:00")
    trains("first", "requeued", start=4)
    cluster.run("scontrol", "requeue", first)
    trains("first", "signal to the script", start=5)
    cluster.run("scancel", "--batch", "--signal=TERM", first)
    ends = {"first": cluster.wait(first)}
    second = jobs_["second"] = cluster.submit(*endless)
    trains("second", "cancelled", start=1)
    cluster.run("scancel", second)
    ends["second"] = cluster.wait(second)
    saved["all"] = micro.saved_steps(workdir)[-1]
    jobs_["third"] = cluster.submit(*words, f"--config.train.num_steps={saved['all'] + 2}")
    ends["third"] = cluster.wait(jobs_["third"])
    jobs_["wrong"] = cluster.submit(*words, "--config.data.batch_size=0")
    ends["wrong"] = cluster.wait(jobs_["wrong"])
    logs = {name: cluster.log(number) for name, number in jobs_.items()}
    return Story(ends, logs, saved, [row["step"] for row in micro.rows(workdir) if "loss" in row])


def test_a_job_of_which_a_task_is_killed_resumes_by_itself(story):
    [step] = re.findall(r"(?m)^exit code 137, restart 1 of 10, from step (\d+), in 0 s$", story.logs["first"])
    assert story.starts["first"][:2] == [0, int(step)]
    assert int(step) >= story.saved["killed"] >= SAVE_EVERY


def test_a_signal_to_the_tasks_saves_all_and_starts_them_again(story):
    step = story.starts["first"][2]
    assert step > story.saved["signal to the steps"]
    assert_names(
        story.logs["first"], f"SIGTERM after step {step},", f"exit code 75, restart 1 of 10, from step {step},"
    )


def test_a_job_near_its_time_limit_is_saved_and_requeued(story):
    step = story.starts["first"][3]
    assert step > story.saved["time limit"]
    assert_names(story.logs["first"], f"SIGUSR1 after step {step},")
    requeued = re.findall(r"(?m)^exit code 75, job \d+ is requeued .* from step (\d+)$", story.logs["first"])
    assert requeued == [str(step)]


def test_a_job_that_slurm_requeues_is_saved_and_resumes(story):
    step = story.starts["first"][4]
    assert step > story.saved["requeued"]
    # by Slurm's SIGTERM to the tasks, or the signal of restart.sh
    assert re.search(f"SIG(TERM|USR1) after step {step},", story.logs["first"])


def test_a_signal_to_the_batch_script_saves_and_ends_the_job(story):
    assert story.ends["first"] == ("FAILED", "75:0", 2)
    assert len(story.starts["first"]) == 5
    [step] = story.starts["second"]
    assert step > story.saved["signal to the script"]
    assert_names(story.logs["first"], f"SIGUSR1 after step {step},")


def test_a_cancelled_job_is_saved_and_not_requeued(story):
    assert story.ends["second"] == ("CANCELLED", "75:0", 0)
    [step] = story.starts["third"]
    assert step > story.saved["cancelled"]
    assert re.search(f"SIG(TERM|USR1) after step {step},", story.logs["second"])


def test_a_job_that_makes_the_last_step_is_completed(story):
    assert story.ends["third"] == ("COMPLETED", "0:0", 0)
    assert story.steps == list(range(1, story.saved["all"] + 3))  # each once, over all jobs


def test_a_job_with_a_wrong_config_fails_once(story):
    assert story.ends["wrong"] == ("FAILED", "2:0", 0)
    assert "data.batch_size=0" in story.logs["wrong"]
    assert "restart" not in story.logs["wrong"]


def test_an_array_of_jobs_builds_the_parts_of_a_dataset(cluster, tmp_path):
    """One task is requeued after its first shard, one runs again by itself; the parts are those of one build."""
    (tmp_path / "in").mkdir()
    text = " ".join(f"word{number}" for number in range(30_000))
    for name in "abc":
        write_jsonl(tmp_path / "in" / f"{name}.jsonl", [f"{name}{each} {text}" for each in range(20)])
    options = build.BuildOptions(tokenizer="package:austen_2k.model")
    words = [tmp_path / "in", f"--tokenizer={options.tokenizer}", "--shard_mb=1"]
    folders = [tmp_path / "out" / f"part-{number:05d}-of-00003" for number in (1, 2, 3)]

    def submit(array, parts=""):
        env = cluster.env | ({"PARTS": parts} if parts else {})
        flags = ("--parsable", f"--array={array}", "--cpus-per-task=1", f"--output={tmp_path}/%A_%a.log")
        script = SCRIPT.with_name("build.sbatch")
        return dataclasses.replace(cluster, env=env).run("sbatch", *flags, script, *words, f"--out={tmp_path}/out")

    job = int(submit("1-2", parts="3"))
    logs = lambda: "".join(path.read_text() for path in tmp_path.glob("*.log"))  # noqa: E731
    until(lambda: list(folders[1].glob(".building/*.json")), logs)
    cluster.run("scontrol", "requeue", f"{job}_2")
    ends = [cluster.wait(f"{job}_{task}") for task in (1, 2)]
    assert ends == [("COMPLETED", "0:0", 0), ("COMPLETED", "0:0", 1)], logs()
    wrong = int(submit("3"))  # of one task, without the number of parts
    assert cluster.wait(f"{wrong}_3")[:2] == ("FAILED", "2:0")
    assert "--part=3/1" in logs()
    last = int(submit("3", parts="3"))
    assert cluster.wait(f"{last}_3")[:2] == ("COMPLETED", "0:0"), logs()
    build.build([str(words[0])], out=tmp_path / "whole", options=options)
    found, expected = (
        sources.open_corpus(str(tmp_path / name), text_field="text", key="data.train") for name in ("out", "whole")
    )
    assert len(found) == len(expected) == 60
    assert all(np.array_equal(found[index], expected[index]) for index in range(60))


def test_a_job_that_loses_a_node_goes_on_with_the_others(cluster, tmp_path):
    workdir, port = tmp_path / "run", jobs.free_address().rpartition(":")[2]
    words = [f"--config={micro.write_config(tmp_path)}", f"--workdir={workdir}", f"--port={port}"]
    words += ["--peer_timeout_s=15", "--config.train.eval_every_steps=0", "--config.checkpoint.every_steps=5"]
    words += ["--config.train.num_microbatches=-1", "--config.train.num_steps=1000000"]
    few = dataclasses.replace(cluster, env=cluster.env | {"MIN_NODES": "1", "PLAN_FLAGS": "--instance=cpu"})
    job = int(few.run("sbatch", *cluster.flags, "--nodes=1-2", "--no-kill", SCRIPT, *words))
    log = lambda: cluster.log(job)  # noqa: E731
    try:
        until(lambda: micro.saved_steps(workdir), log)
        cluster.run("scontrol", "update", "NodeName=fake2", "State=down", "Reason=lost")
        until(lambda: "nodes            1 of 1 that are there" in log(), log)
        last = last_step(workdir)
        until(lambda: last_step(workdir) > last + 5, log)
    finally:
        cluster.run("scancel", "--batch", "--signal=TERM", job)
        cluster.run("scontrol", "update", "NodeName=fake2", "State=resume")
    assert cluster.wait(job)[1] == "75:0"
    assert re.findall(r"(?m)^micro: (\d) x cpu", log()) == ["2", "1"]
    [step] = re.findall(r"(?m)^resuming from step (\d+) of", log())
    assert int(step) >= 5
    steps = [row["step"] for row in micro.rows(workdir)]
    assert steps == list(range(1, len(steps) + 1))
