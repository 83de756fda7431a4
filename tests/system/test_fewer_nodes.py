"""launch/restart.sh --min_nodes: a run goes on with the nodes that are left, and grows back, as if none were lost."""

import os
import pathlib
import re
import signal
import subprocess
import sys
import time

import jobs
import micro
import pytest

RESTART = jobs.NODE.parent / "restart.sh"
START = pathlib.Path(jobs.__file__).with_name("start_nodes.py")
NUM_STEPS = 40
RELATIVE = 5e-6  # sums in another order
NAMES = ["a", "b", "c", "d"]
# 3 divides neither the rows of a batch nor the width of the model, which is 32
SETTINGS = (
    *(f"train.num_steps={NUM_STEPS}", "train.num_microbatches=-1", "data.batch_size=8", "parallel.zero1=True"),
    *("optimizer.peak_lr=2e-3", "optimizer.eps=1e-5", "data.packing=documents"),  # as in test_distributed
    *("train.eval_every_steps=20", "train.num_eval_batches=3", "checkpoint.every_steps=5"),
)
# Process 0 waits from the step on that is in the file HOLD, while it is there.
HOLD = """
import os, pathlib, time
from hlat_jax.data import positions

positions.EVERY_STEPS, _write, _file = 1, positions.write, pathlib.Path(os.environ["HOLD"])

def _hold_and_write(workdir, step, **given):
    while _file.exists() and step >= int(_file.read_text() or 0):
        time.sleep(0.01)
    return _write(workdir, step, **given)

positions.write = _hold_and_write
"""


def until(is_ready, process, log):
    end_s = time.monotonic() + 600
    while not is_ready():
        assert process.poll() is None, log.read_text()
        assert time.monotonic() < end_s, log.read_text()
        time.sleep(0.05)


@pytest.mark.slow
@pytest.mark.xdist_group("distributed")
def test_a_run_on_4_3_2_and_4_nodes_trains_as_one_without_a_fault(tmp_path):
    config, nodes, hold, log = micro.write_config(tmp_path), tmp_path / "nodes", tmp_path / "hold", tmp_path / "log"
    alone = tmp_path / "alone"
    done = micro.run(micro.command(config, alone, *SETTINGS), micro.environment(tmp_path / "cache"))
    assert done.returncode == 0, done.stderr
    config.write_text(HOLD + config.read_text())
    workdir, last = tmp_path / "run", lambda: max((row["step"] for row in rows() if "loss" in row), default=0)
    rows = lambda: micro.rows(workdir) if micro.has_trained(workdir) else []  # noqa: E731
    env = micro.environment(tmp_path / "cache") | {"HOLD": str(hold), "PYTHON": sys.executable}
    env["PYTHONPATH"] += f"{os.pathsep}{START.parent}"
    [_, _, _, *words] = micro.command(config, workdir, *SETTINGS)
    flags = ["--min_nodes=2", f"--list_nodes=cat {nodes}", "--instance=cpu", "--grow_s=1", "--wait_s=0"]
    nodes.write_text("\n".join(NAMES) + "\n")
    hold.write_text("8")
    command = [str(RESTART), *flags, sys.executable, str(START), "@NODES@", "@NODELIST@", *words, "--peer_timeout_s=15"]
    with open(log, "w") as out:
        process = subprocess.Popen(command, env=env, stdout=out, stderr=out, start_new_session=True)
    try:
        for left, now, then in ((3, 8, 18), (2, 18, 28)):
            until(lambda now=now: last() >= now - 1, process, log)
            nodes.write_text("\n".join(NAMES[:left]) + "\n")
            os.kill(pid_of(workdir, process_id=left), signal.SIGKILL)
            hold.write_text(str(then))
            until(lambda left=left: f"\nnodes            {left} of {left} " in log.read_text(), process, log)
        until(lambda: last() >= 27, process, log)
        nodes.write_text("\n".join(NAMES) + "\n")
        until(lambda: "4 nodes can be used, and 2 are" in log.read_text(), process, log)
        hold.unlink()
        assert process.wait(600) == 0, log.read_text()
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGTERM)
            process.wait()
    printed = log.read_text()
    assert re.findall(r"(?m)^micro: (\d) x cpu", printed) == ["4", "3", "2", "4"], printed
    assert len(re.findall("(?m)^exit code .*, restart", printed)) == 2  # growing is no failure
    found, wanted = micro.rows(workdir), micro.rows(alone)
    assert [row["step"] for row in found] == [row["step"] for row in wanted]
    for row, expected in zip(found, wanted, strict=True):
        assert row.get("batch_hash") == expected.get("batch_hash")
        for key in {"loss", "eval_loss", "grad_norm", "param_norm", "tokens"} & expected.keys():
            assert row[key] == pytest.approx(expected[key], rel=RELATIVE), (row["step"], key)


def pid_of(workdir, *, process_id):
    """Returns the pid of a process that trains in a folder."""
    for path in pathlib.Path("/proc").glob("[0-9]*/cmdline"):
        words = path.read_bytes().decode().split("\0") if path.exists() else []
        if "hlat_jax.train" in words and {f"--workdir={workdir}", f"--process_id={process_id}"} <= set(words):
            return int(path.parent.name)
    raise AssertionError(f"no process {process_id} in {workdir}")
