"""The training command: what it refuses and how it says so, what it writes, and what a person sees."""

import json
import os
import pathlib
import re
import shutil
import subprocess
import sys

import jobs
import micro
import pytest
from refusals import assert_names, assert_refused

from hlat_jax import train
from hlat_jax.cli import config_files, flags
from hlat_jax.data.loader import TrainBatches, batch_hash
from hlat_jax.data.tokenizer import Tokenizer
from hlat_jax.optimizer import learning_rate
from hlat_jax.resolve import resolve

pytestmark = pytest.mark.xdist_group("train")  # its fixtures are costly: one process
ROW_KEYS = {
    "step", "loss", "tokens", "grad_norm", "param_norm", "learning_rate", "step_s", "data_wait_s", "batch_hash",
    "tokens_per_s", "nonfinite", "peak_memory_bytes",
}  # fmt: skip
EVAL_KEYS = {"step", "eval_loss", "perplexity", "bits_per_byte", "eval_tokens"}


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """(config, run folder, stdout) of a run that shows and writes everything."""
    folder = tmp_path_factory.mktemp("train")
    config = micro.write_config(folder)
    shows = ("console=on", "log_every_steps=6", "tensorboard=True", "plot=True")
    samples = ("train.sample_prompt=It is", "train.sample_tokens=4")
    words = micro.command(config, folder / "run", *(f"metrics.{word}" for word in shows), *samples)
    done = micro.run(words, micro.environment())
    assert done.returncode == 0, done.stderr
    mutable, _ = flags.parse([word for word in words if word.startswith("--config")])
    return resolve(mutable), folder / "run", done.stdout


def test_train_writes_each_line_to_a_log_file_at_once(monkeypatch, tmp_path):
    log, seen = tmp_path / "log.txt", []
    monkeypatch.setattr(train, "train", lambda *_, **__: print("compiling") or seen.append(log.read_text()) or 0)
    with open(log, "w") as file:
        monkeypatch.setattr(sys, "stdout", file)
        assert train.main(["--config=tiny", f"--workdir={tmp_path / 'run'}"]) == 0
    assert seen == ["compiling\n"]


def test_train_refuses_a_folder_that_cannot_be_written(train_here, tmp_path):
    config = micro.write_config(tmp_path)  # root may write wherever a folder can be
    for workdir in (config / "run", pathlib.Path("/proc/hlat_jax")):
        found = train_here(f"--config={config}", f"--workdir={workdir}")
        assert_refused(found, workdir, "--workdir")
        assert found[2].count("\n") == 1


def test_train_writes_a_complete_row_for_each_step_and_evaluation(finished):
    config, workdir, _ = finished
    rows = micro.rows(workdir)
    steps = [row for row in rows if "loss" in row]
    assert [row["step"] for row in steps] == list(range(1, micro.NUM_STEPS + 1))
    for row in steps:
        assert set(row) >= ROW_KEYS
        assert row["tokens"] == row["step"] * 4 * 31
        assert row["learning_rate"] == learning_rate(row["step"] - 1, config.optimizer)
        assert row["step_s"] > 0
        assert 0 <= row["data_wait_s"] <= row["step_s"]
        assert 2**26 < row["peak_memory_bytes"] < 2**34  # of a process with JAX and a model of a megabyte
    evals = [row for row in rows if "eval_loss" in row]
    assert [row["step"] for row in evals] == [0, 6, 12, 18, 24]
    assert all(set(row) == EVAL_KEYS for row in evals)
    # an evaluation stands behind the row of the step whose weights it looked at
    assert [row["step"] for row in rows] == sorted(row["step"] for row in rows)
    batches = TrainBatches(config.data, tokenizer=Tokenizer(config.data.tokenizer, vocab_size=config.model.vocab_size))
    hashes = [batch_hash(next(batches)[0], rows=batches.rows) for _ in range(micro.NUM_STEPS)]
    batches.close()
    assert [row["batch_hash"] for row in steps] == hashes
    assert len(set(hashes)) == len(hashes)


def test_train_writes_the_expected_run_files_and_prints_a_summary(finished):
    config, workdir, out = finished
    assert {path.name for path in workdir.iterdir()} == {
        ".lock", "checkpoints", "config.json", "environment.json",
        "programs.json", "index", "loss.png", "metrics.jsonl", "metrics.prom", "events.jsonl",
        "tensorboard", "tokenizer",
    }  # fmt: skip
    assert json.loads((workdir / "config.json").read_text()) == config.to_dict()
    assert json.loads((workdir / "environment.json").read_text())["JAX_PLATFORMS"] == "cpu"
    assert (workdir / "loss.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    assert any(path.name.startswith("events.out.tfevents") for path in (workdir / "tensorboard").iterdir())
    assert micro.saved_steps(workdir) == [20, 24]
    covered = r"13 of 13 documents, 12,288 of 46,\d{3} tokens, in 384 rows spread evenly"
    for pattern in (
        r"micro: 1 x cpu \(cpu\), one device",
        "parameters       146,592",
        "tokens per step  128",
        "steps            24 of a horizon of 40",
        r"state +\d+\.\d{2} MiB.*",
        f"validation +{covered}",
        r"compiled +\d+\.\d s.*",
    ):
        assert re.search(rf"^{pattern}", out, re.MULTILINE), pattern
    assert len(re.findall(r"^sample (?:before|after) training: It is", out, re.MULTILINE)) == 2
    loss = [row["eval_loss"] for row in micro.rows(workdir) if "eval_loss" in row][-1]
    assert f" {loss:.4f} " in out.splitlines()[-1]
    assert str(workdir / "loss.png") in out
    lines = out.splitlines()
    [header] = [line for line in lines if "grad norm" in line]
    progress = [line for line in lines if re.match(r" +\d+ +\d+\.\d% ", line)]
    assert [int(line.split()[0]) for line in progress] == [1, 6, 12, 18, 24]
    assert {len(line) for line in progress} == {len(header)}
    assert {len(line.split()) for line in progress} == {11}
    assert progress[-1].split()[:2] == ["24", "100.0%"]
    assert progress[-1].split()[-1] == "0:00:00"


def test_a_model_too_large_for_memory_fails_fast_and_its_config_is_printed(tmp_path, train_here):
    if os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") > 1200 * 2**30:
        pytest.skip("this machine might hold it")
    done = micro.run(micro.command("70b", tmp_path / "run"), micro.environment())
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    message = done.stderr.splitlines()[-1]
    assert_names(message, "error: config 70b: 68,976,648,192 parameters", "1,156.", "1 cpu device")
    assert not (tmp_path / "run").exists()
    code, out, _ = train_here("--config=7b", "--print_config")
    assert code == 0
    for word in (
        "parameters       6,738,415,616\n",
        "FLOPs per token",
        "tokens per step  4,194,304",
        "bytes (bf16_sr)",
    ):
        assert word in out
    mutable = config_files.load("7b")
    config_files.make_text_paths_absolute(mutable)
    assert json.loads(out[: out.index("\n}\n") + 2]) == resolve(mutable).to_dict()


def test_ctrl_c_during_imports_prints_one_line_and_exits_130():
    env = micro.environment() | {"PYTHONPROFILEIMPORTTIME": "1"}
    for words, imported in (
        (["hlat_jax.train", "--config=tiny"], "| hlat_jax"),  # the package itself, the first of our modules
        (["hlat_jax.train", "--config=tiny"], "jax._src.util"),
        (["hlat_jax.evaluate", "--checkpoint=runs/tiny", "--text=a"], "absl.flags"),
    ):
        done = jobs.run_and_interrupt([sys.executable, "-m", *words], after=imported, env=env)
        assert done == (130, ["interrupted"])


PRINT_HANDLER = "import signal, sys, hlat_jax; print(getattr(signal.getsignal(signal.SIGINT), '__name__', 'ignored'))"


def test_ctrl_c_handler_is_installed_only_in_package_commands(tmp_path):
    package = tmp_path / "hlat_jax"
    package.mkdir()
    shutil.copy(micro.REPOSITORY / "hlat_jax" / "__init__.py", package)
    shutil.copytree(micro.REPOSITORY / "hlat_jax" / "host", package / "host")
    (package / "show.py").write_text(PRINT_HANDLER)
    for words, handler in (
        (["-c", PRINT_HANDLER, "-m", "hlat_jax.train"], "default_int_handler"),
        (["-mhlat_jax.show", "pk"], "_end_on_interrupt"),
        (["-X", "dev", "-u", "-W", "error", "-m", "hlat_jax.show", "-m", "pk"], "_end_on_interrupt"),
        (["-uBmhlat_jax.show"], "_end_on_interrupt"),
    ):
        words = ["env", "--default-signal=INT", sys.executable, *words]
        done = subprocess.run(words, cwd=tmp_path, env={"PYTHONPATH": str(tmp_path)}, capture_output=True, text=True)
        assert (done.returncode, done.stdout) == (0, f"{handler}\n"), done.stderr


HANDLED = """
import ctypes, os, pathlib, signal, sys, threading, time
from hlat_jax.host import process
signal.signal(signal.SIGINT, signal.default_int_handler)
process.exit_on_interrupt()

def send():
    os.kill(os.getpid(), signal.SIGINT)

def ctrl_c_while_waiting(in_cpp):
    # In C++ code no handler of Python runs; a locked mutex stands for it.
    mutex, lock = ctypes.create_string_buffer(64), ctypes.CDLL(None).pthread_mutex_lock
    lock(mutex)
    def send_and_unlock():
        time.sleep(0.1)  # the main thread waits by then
        send()
        while not stop.name:
            time.sleep(0.01)
        ctypes.CDLL(None).pthread_mutex_unlock(mutex)
    sender = threading.Thread(target=send_and_unlock)
    sender.start()
    lock(mutex) if in_cpp else sender.join()
    sys.exit(3 if stop.name == "SIGINT" else 4)

"""
HALF_WRITTEN = """
from hlat_jax.hf import exporting
with exporting.whole_folder(pathlib.Path("out")) as partial:
    (partial / "a").write_text("half")
    send()
"""
TWICE = """
with process.StopSignals() as stop:
    stop.unfinished = "this step, then saving a checkpoint"
    send()
    assert stop.name == "SIGINT"
    send()
"""
TAKEN_WAKEUPS = """
signal.set_wakeup_fd(-1)  # as uvloop, which Orbax runs, has one of its own meanwhile
send()
"""
IGNORED = """
signal.signal(signal.SIGINT, signal.SIG_IGN)
with process.StopSignals() as stop:
    send()
    assert stop.name == ""
    os.kill(os.getpid(), signal.SIGTERM)
    assert stop.name == "SIGTERM"
assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
for number in (signal.SIGHUP, signal.SIGUSR1):
    signal.signal(number, signal.SIG_DFL)  # the tests may run under nohup
    with process.StopSignals() as stop:
        os.kill(os.getpid(), number)
        assert stop.name == number.name
signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
with process.StopSignals() as stop:
    os.kill(os.getpid(), signal.SIGHUP)
    assert stop.name == ""
"""
WAITS = """
with process.StopSignals() as stop:
    {}
    ctrl_c_while_waiting({})
"""


def test_ctrl_c_and_the_signals_that_stop_a_run_are_answered_with_a_line(tmp_path):
    again = "Press Ctrl-C again to stop at once"
    for program, code, said in (
        (HALF_WRITTEN, 130, ["interrupted"]),
        (TAKEN_WAKEUPS, 130, ["interrupted"]),
        (IGNORED, 0, []),
        (
            TWICE,
            130,
            [
                f"interrupted, finishing this step, then saving a checkpoint. {again}",
                "interrupted, run the same command to resume from the last checkpoint, or to start again without one",
            ],
        ),
        # at once where nothing is to be saved
        (
            WAITS.format("pass", True),
            130,
            ["interrupted while opening the run with nothing to save, and there is no checkpoint yet"],
        ),
        (
            WAITS.format("stop.watchdog.begin('a'); stop.saved_step = 40", False),
            130,
            ["interrupted while a with nothing to save, and the last checkpoint is step 40"],
        ),
        (WAITS.format("stop.unfinished = 'this step'", True), 3, [f"interrupted, finishing this step. {again}"]),
        (
            WAITS.format("stop._alone = False", False),
            3,
            [f"interrupted while opening the run, all processes stop. {again}"],
        ),
    ):
        words, env = [sys.executable, "-c", HANDLED + program], micro.environment()
        done = subprocess.run(words, cwd=tmp_path, env=env, capture_output=True, text=True)
        assert done.returncode == code, done.stderr
        lines = done.stderr.splitlines()
        assert len(lines) == len(said)
        assert all(line.startswith(start) for line, start in zip(lines, said, strict=True)), done.stderr
        assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR1"])
def test_signal_while_jax_is_imported_gives_the_stopped_code(name, tmp_path):
    (tmp_path / "jax.py").write_text(f"import os, signal; os.kill(os.getpid(), signal.{name})\n")
    env = micro.environment()
    env["PYTHONPATH"] = os.pathsep.join([str(tmp_path), env["PYTHONPATH"]])
    words = ["--config=tiny", "--stopped_code=75", f"--workdir={tmp_path / 'run'}"]
    done = micro.run([sys.executable, "-m", "hlat_jax.train", *words], env)
    assert (done.returncode, name in done.stderr, done.stderr.count("\n")) == (75, True, 1)
