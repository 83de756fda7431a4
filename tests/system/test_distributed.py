"""Several processes train as one: same batches, same losses, one run folder, one end."""

import errno
import os
import re
import shutil
import signal
import socket
import sys
import time

import jobs
import micro
import numpy as np
import pytest
from refusals import assert_names, refused

from hlat_jax.hf.exporting import export_checkpoint
from hlat_jax.host import distributed
from hlat_jax.weights.trained import open_weights

pytestmark = pytest.mark.xdist_group("distributed")  # its fixtures are costly: one process

NUM_STEPS, NUM_DEVICES = 40, 4
RELATIVE = 5e-6  # sums in another order
SETTINGS = (
    f"train.num_steps={NUM_STEPS}",
    "optimizer.peak_lr=2e-3",  # at the micro config's 1e-2 a few steps magnify rounding a hundred times
    "optimizer.eps=1e-5",
    "train.eval_every_steps=20",
    "train.num_eval_batches=3",
    "train.sample_prompt=It is",
    "train.sample_tokens=2",
    "checkpoint.every_steps=0",
    "data.packing=documents",
    "data.train=a=package:austen_train.jsonl;b=package:austen_validation.jsonl",
    "data.validation=a=package:austen_train.jsonl;b=package:austen_validation.jsonl",
    "data.mixture=a=2,b=1",
    "metrics.tensorboard=True",
    "metrics.layer_norms=True",
    "metrics.source_losses_every_steps=2",
)
SPLIT = ("parallel.data=2", "parallel.tensor=2")  # with four processes, two bring the same rows


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with the config and a compile cache."""
    folder = tmp_path_factory.mktemp("distributed")
    micro.hold_at(micro.write_config(folder), step=6)  # long before the last step
    return folder


@pytest.fixture(scope="module")
def train_job(folder):
    """A function that trains in `workdir` on four devices over some processes, started by launch/node.sh as `launcher`
    would; a context of the Job."""

    def start(workdir, num_processes, *overrides, launcher="flags", flags=(), before_last=(), hold=""):
        address = jobs.free_address()
        logs = folder / f"log-of-{address.rpartition(':')[2]}"  # not beside the run, whose disk may be full
        [_, _, _, *words] = [*micro.command(folder / "micro.py", workdir, *SETTINGS, *overrides), *flags]
        env = micro.environment(folder / "cache", num_devices=NUM_DEVICES // num_processes) | {"HOLD": str(hold)}
        commands, envs = [], []
        for index in range(num_processes):
            commands.append([*jobs.node_command(launcher, address, num_processes, index), *words])
            own = {} if launcher == "flags" else jobs.node_variables(launcher, num_processes, index, folder=logs)
            envs.append(env | own)
        commands[-1] = [*before_last, *commands[-1]]
        return jobs.run_job(commands, envs, logs)

    return start


@pytest.fixture(scope="module")
def alone(folder, train_job):
    """The run folder of one process that was not interrupted."""
    with train_job(folder / "alone", 1, *SPLIT) as job:
        assert job.wait() == [0], job.err(0)
    return folder / "alone"


@pytest.fixture(scope="module")
def stopped(folder, train_job):
    """(run folder, Job) of two processes, of which the second got SIGTERM soon after the first step."""
    workdir, hold = folder / "stopped", folder / "hold"
    hold.touch()
    with train_job(workdir, 2, *SPLIT, launcher="slurm", flags=("--stopped_code=75",), hold=hold) as job:
        while not micro.has_trained(workdir):
            assert all(process.poll() is None for process in job.processes), job.err(0) + job.err(1)
            time.sleep(0.01)
        job.processes[1].send_signal(signal.SIGTERM)
        hold.unlink()
        assert job.wait() == [75, 75], job.err(0) + job.err(1)
        return workdir, job


def assert_same_rows(found, expected):
    assert [row["step"] for row in found] == [row["step"] for row in expected]
    for row, wanted in zip(found, expected, strict=True):
        assert row.keys() == wanted.keys()
        for key, value in wanted.items():
            if key in ("step_s", "data_wait_s", "tokens_per_s", "peak_memory_bytes"):
                continue
            assert row[key] == (pytest.approx(value, rel=RELATIVE) if isinstance(value, float) else value), (row, key)


@pytest.mark.slow
def test_two_processes_train_as_one_until_a_sigterm_saves_all(alone, stopped):
    workdir, job = stopped
    rows, wanted = micro.rows(workdir), micro.rows(alone)
    assert {"loss", "batch_hash", "padding_share", "source_tokens/b", "update_norm/layer_01"} <= rows[1].keys()
    assert {"source_loss/a"} <= rows[2].keys()
    assert {"eval_loss", "bits_per_byte/a", "bits_per_byte/b"} <= rows[0].keys()
    assert_same_rows(rows, wanted[: len(rows)])
    kept, as_one = (np.load(of / "positions/1.npz") for of in (workdir, alone))
    assert kept["identity"] == as_one["identity"]
    np.testing.assert_array_equal(kept["position"], as_one["position"])
    [step] = micro.saved_steps(workdir)
    assert step == rows[-1]["step"] < NUM_STEPS
    # only process 0 prints
    assert_names(job.out(0), "micro: 4 x cpu", "sample ", "SIGTERM", f"step {step}", workdir)
    # Gloo's threads print too, in pieces that may stand between one another
    of_gloo = r"\[Gloo\]|Rank|is|connected|to|peer|ranks|Expected|number|of|[\d.:]"
    assert re.sub(of_gloo, "", job.out(1)).split() == []
    assert job.error_lines(0) == job.error_lines(1) == []


@pytest.mark.slow
def test_a_checkpoint_of_two_processes_resumes_on_one(alone, stopped, train_job, tmp_path):
    workdir = tmp_path / "run"
    shutil.copytree(stopped[0], workdir)
    [step] = micro.saved_steps(workdir)
    add_damaged_checkpoint(workdir / "checkpoints", step)
    leftover = workdir / f"checkpoints/{step + 2}.orbax-checkpoint-tmp-1"
    leftover.mkdir()
    own = ("train.sample_prompt=", "checkpoint.every_steps=10", f"checkpoint.export_every_steps={NUM_STEPS}")
    with train_job(workdir, 1, "parallel.data=1", "parallel.fsdp=4", *own) as job:
        assert job.wait() == [0], job.err(0)
    assert f"step {step} of {NUM_STEPS}" in job.out(0)
    assert job.err(0).count(f"/{step + 1} ") == 1
    assert (workdir / f"checkpoints/{step + 1}.damaged-1").is_dir()
    assert not leftover.exists()
    assert_same_rows(micro.rows(workdir), micro.rows(alone))
    assert {path.name for path in workdir.iterdir()} == {path.name for path in alone.iterdir()} | {"huggingface"}
    assert micro.saved_steps(workdir) == [NUM_STEPS - 10, NUM_STEPS]
    [exported] = (workdir / "huggingface").iterdir()
    export_checkpoint(open_weights(workdir), tmp_path / "expected")
    for path in (tmp_path / "expected").iterdir():
        assert (exported / path.name).read_bytes() == path.read_bytes(), path.name


@pytest.mark.slow
def test_two_processes_share_rows_whose_sequence_is_split(alone, train_job, tmp_path):
    split = ("parallel.data=1", "parallel.context=4", "train.num_steps=2")
    with train_job(tmp_path / "run", 2, *split, "train.eval_every_steps=0") as job:
        assert job.wait() == [0, 0], job.err(0) + job.err(1)
    same = ("step", "loss", "grad_norm", "param_norm", "tokens", "batch_hash")
    rows, wanted = (
        [{key: row[key] for key in same} for row in micro.rows(folder) if "loss" in row and row["step"] <= 2]
        for folder in (tmp_path / "run", alone)
    )
    assert_same_rows(rows, wanted)


def add_damaged_checkpoint(folder, step):
    """Copies the checkpoint of `step` as one of the next step and flips a bit of its largest file."""
    shutil.copytree(folder / str(step), folder / str(step + 1))
    files = [path for path in (folder / str(step + 1)).rglob("*") if path.is_file()]
    largest = max(files, key=lambda path: path.stat().st_size)
    content = bytearray(largest.read_bytes())
    content[len(content) // 2] ^= 1
    largest.write_bytes(content)


@pytest.mark.slow
def test_failed_save_in_one_process_ends_both(train_job, tmp_path):
    small_files = ["bash", "-c", 'ulimit -f 64; exec "$0" "$@"']  # its part of a checkpoint has 900 kB
    with train_job(tmp_path / "run", 2, *SPLIT, "checkpoint.every_steps=2", before_last=small_files) as job:
        # Orbax alone waits for the part that is missing for 20 minutes
        assert job.wait() == [1, 1], job.err(0) + job.err(1)
    [first], [second] = job.error_lines(0), job.error_lines(1)
    assert_names(second, tmp_path / "run/checkpoints", os.strerror(errno.EFBIG))
    assert_names(first, "process 1 of 2", second.removeprefix("error: "))
    assert micro.saved_steps(tmp_path / "run") == []


PROGRAM = """
import pathlib, sys, time
from hlat_jax.host import distributed, process
from hlat_jax.host.watchdog import WAITING, Watchdog
address, num_processes, process_id, last_words = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
job = distributed.resolve_job(address, num_processes, process_id, join_timeout_s=600, peer_timeout_s=int(sys.argv[6]))
watchdog = Watchdog()
process.exit_on_interrupt()
with distributed.join(job, watchdog=watchdog, stacks=pathlib.Path(sys.argv[5]) / "stuck"):
    for turn in range(3):
        said = distributed.exchange(f"{turn}/{process_id}")
        assert said == [f"{turn}/{index}" for index in range(num_processes)], said
    print("met", file=sys.stderr, flush=True)
    watchdog.least_s = 0.2 if "watchdog" in last_words else 0.0  # not before: the start may be slow
    exec(last_words)
print("the end", file=sys.stderr)
"""


@pytest.fixture
def small_job(tmp_path):
    """A function that starts PROGRAM in processes whose last words are given; a context of the Job."""

    def start(*last_words, peer_timeout_s=100):
        address, count = jobs.free_address(), str(len(last_words))
        commands = [
            [sys.executable, "-c", PROGRAM, address, count, str(index), words, str(tmp_path), str(peer_timeout_s)]
            for index, words in enumerate(last_words)
        ]
        return jobs.run_job(commands, [micro.environment()] * len(last_words), tmp_path / "log")

    return start


WAIT = "distributed.barrier()"  # for those who do not come
SLEEP = "time.sleep(1800)"


@pytest.mark.quick_cases("KeyError('a bug')-1-KeyError: 'a bug'")
@pytest.mark.parametrize(
    ("error", "code", "line"),
    [("ValueError('no such file')", 2, "no such file"), ("KeyError('a bug')", 1, "KeyError: 'a bug'")],
)
def test_error_in_one_process_ends_all_with_its_code_and_message(small_job, error, code, line):
    with small_job("pass" if code == 2 else SLEEP, f"time.sleep(1); raise {error}") as job:  # at its end, or busy
        assert job.wait() == [code] * 2
    assert_names(job.error_lines(0)[0], "process 1 of 2", line)
    assert line in job.err(1)
    assert ("Traceback" in job.err(1)) == ("bug" in line)


def test_process_0_ends_after_one_that_is_slow_to_end(small_job):
    """Else JAX would abort the slow one, with a C++ stack, as soon as the service is gone."""
    slow = "sys.stdout.flush = lambda: time.sleep(1.5); "  # as where nobody reads a pipe
    error = "raise OSError('disk')"
    with small_job(error, slow + error) as job:
        assert job.wait() == [1, 1], job.err(1)
    assert job.error_lines(0) == job.error_lines(1) == ["error: disk"]


@pytest.mark.slow
def test_process_0_ends_after_one_whose_disk_hangs(small_job, tmp_path):
    stuck = f"pathlib.Path.mkdir = lambda *_, **__: {SLEEP}; watchdog.begin('waiting for data'); {SLEEP}"
    with small_job(f"watchdog.begin(WAITING); {WAIT}", stuck) as job:
        assert job.wait() == [124, 124], job.err(1)
    assert job.error_lines(0) == job.error_lines(1) != []
    assert (tmp_path / "stuck/process-0.txt").exists()


# Process 1 alone raises at each difference; process 0 continues with the next one.
DIFFERENT = """
from hlat_jax import config
from hlat_jax.resolve import resolve
from hlat_jax.run import step_sync
c = config.default()
c.metrics.console = "on" if process_id else "off"  # may differ
c.data.num_threads = process_id
for key, value in (("train.num_steps", 7), ("optimizer.peak_lr", 0.5), ("manifest", None)):
    ours = resolve(c).to_dict()
    section, _, name = key.partition(".")
    if process_id and name:
        ours[section][name] = value
    settings = {"config": ours, "manifest": {"files": [process_id], "hash": process_id * (not name)}}
    try:
        step_sync.require_same_settings(settings)
    except ValueError as error:
        print(error, file=sys.stderr)
try:
    folder = pathlib.Path(sys.argv[5]) / ("elsewhere" if process_id else "run")
    with step_sync.only_job(folder):
        pass
except ValueError as error:
    print(error, file=sys.stderr)
with step_sync.only_job(pathlib.Path(sys.argv[5]) / "run"):
    distributed.barrier()
"""


@pytest.mark.slow
def test_process_with_other_settings_or_run_folder_is_refused(small_job, tmp_path):
    with small_job(DIFFERENT, DIFFERENT) as job:
        assert job.wait() == [0, 0], job.err(0) + job.err(1)
    facts = ("process 1 of 2", "train.num_steps: 7 ", "optimizer.peak_lr: 0.5 ", "manifest.hash: 1 ")
    assert_names(job.err(1), *facts, tmp_path / "elsewhere")
    assert job.err(1).count(" here, ") == 3
    assert " here, " not in job.err(0)


def test_a_stuck_process_ends_all_with_stacks(small_job, tmp_path):
    late, others = f"watchdog.begin('waiting for data'); {SLEEP}", f"watchdog.begin(WAITING); {WAIT}"
    with small_job(others, late, others) as job:
        assert job.wait() == [124] * 3
    for index in range(3):
        [line] = job.error_lines(index)
        assert_names(line, "process 1 of 3", "data", "step 0")
        assert "process 0" not in line
        stack = (tmp_path / f"stuck/process-{index}.txt").read_text()
        assert '"<string>", line 1' in stack, stack
        assert "exchange" in stack or index == 1


def when_met(job):
    """Waits until each process of a job has met the others."""
    while any("met" not in job.err(index) for index in range(len(job.processes))):
        time.sleep(0.05)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_that_is_not_answered_ends_the_process(small_job, number):
    """Signal handlers of Python do not run while the main thread is in C++ code."""
    stuck = f"""
import hlat_jax.host.watchdog
hlat_jax.host.watchdog._TERM_S = 1
watchdog.begin("training")
with process.StopSignals(watchdog, alone=False):
    {WAIT}
"""
    with small_job(stuck, SLEEP) as job:
        when_met(job)
        job.processes[0].send_signal(number)
        assert job.processes[0].wait(600) == 143
    assert len(job.error_lines(0)) == 1


@pytest.mark.slow
def test_sigterm_ends_a_process_that_waits_for_the_others(folder, train_job, tmp_path):
    """As process 1 of a container, which ignores a signal that it has no handler for."""
    address = jobs.free_address()
    host, _, port = address.rpartition(":")
    words = [*micro.command(folder / "micro.py", tmp_path / "run"), f"--coordinator={address}", "--num_processes=2"]
    words += ["--process_id=0", "--stopped_code=75", "--join_timeout_s=3000"]
    with jobs.run_job([words], [micro.environment()], tmp_path / "logs") as job:
        [process] = job.processes
        while socket.socket().connect_ex((host, int(port))):
            assert process.poll() is None, job.err(0)
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        assert process.wait(600) == 75
    assert "SIGTERM" in job.err(0).splitlines()[-1]


@pytest.mark.slow
@pytest.mark.parametrize("frozen", [0, 1])
def test_a_frozen_process_ends_the_others_with_one_line(small_job, frozen):
    with small_job(*(SLEEP if index == frozen else WAIT for index in range(3)), peer_timeout_s=15) as job:
        when_met(job)
        job.processes[frozen].send_signal(signal.SIGSTOP)
        others = [index for index in range(3) if index != frozen]
        assert [job.processes[index].wait(600) for index in others] == [1, 1]
    for index in others:
        [line] = job.error_lines(index)
        assert_names(line, f"process {frozen} of 3", *["15 s"] * bool(frozen))


def test_job_flags_are_all_given_or_none_and_valid():
    times = {"join_timeout_s": 300, "peer_timeout_s": 60}
    assert distributed.resolve_job("", None, None, **times) is None
    assert distributed.resolve_job("a:1", 1, 0, **times) is None
    assert distributed.resolve_job("a:1", 2, 1, **times) == distributed.Job("a:1", 2, 1, 300, 60)
    for given, more, *facts in (
        (("", 2, 0), {}, "--coordinator", "--num_processes", "--process_id"),
        (("a:0", 2, 0), {}, "--coordinator=a:0", "HOST:PORT"),
        (("a:1", 0, 0), {}, "--num_processes=0"),
        (("a:1", 2, 2), {}, "--process_id=2"),
        (("a:1", 2, 0), {"peer_timeout_s": 1}, "--peer_timeout_s=1", "2"),
    ):
        with refused(*facts):
            distributed.resolve_job(*given, **times | more)
