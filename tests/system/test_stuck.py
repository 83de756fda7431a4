"""A run that is alive but makes no progress ends by itself, says where it is stuck, and resumes to the same bits."""

import re
import subprocess
import sys

import jobs
import micro
import pytest

# Trains as the command does, but something happens to process 1, or the only one, at one of its batches.
AT_BATCH = """
import resource, sys, time
from hlat_jax.data import loader
taken, original = [], loader.TrainBatches.__next__
def next_or_wait(batches):
    taken.append(None)
    if len(taken) == %d and "--process_id=0" not in sys.argv:
        %s
    return original(batches)
loader.TrainBatches.__next__ = next_or_wait
from hlat_jax import train
from hlat_jax.cli import flags
flags.main(train.main)
"""
WAITS_FOR_DATA = AT_BATCH % (9, "time.sleep(600)")
HAS_NO_MORE_MEMORY = AT_BATCH % (
    2,
    "resource.setrlimit(resource.RLIMIT_AS, "
    "(int(open('/proc/self/statm').read().split()[0]) * resource.getpagesize() - (256 << 20), -1))",
)


@pytest.fixture
def train(tmp_path):
    """A function that trains in a folder, some processes at once, with a program in place of the command; see Job."""
    micro.write_config(tmp_path)

    def start(workdir, *program, num_processes=1):
        settings = ("train.num_steps=12", "checkpoint.every_steps=4", "data.validation=")
        [python, _, _, *words] = micro.command(tmp_path / "micro.py", workdir, *settings)
        address = jobs.free_address()
        commands = [[python, *program, *words, "--stuck_timeout_s=8"] for _ in range(num_processes)]
        if num_processes > 1:
            for index, command in enumerate(commands):
                command += [f"--coordinator={address}", f"--num_processes={num_processes}", f"--process_id={index}"]
        env = micro.environment(tmp_path / "cache", num_devices=2 // num_processes)
        return jobs.run_job(commands, [env] * num_processes, tmp_path / f"log-{address.rpartition(':')[2]}")

    return start


@pytest.mark.slow
@pytest.mark.parametrize("num_processes", [1, 2])
def test_a_run_that_waits_for_data_or_has_no_more_memory_ends_and_resumes_to_the_same_bits(
    train, tmp_path, num_processes
):
    module = ("-m", "hlat_jax.train")
    with train(tmp_path / "whole", *module) as job:
        assert job.wait() == [0], job.err(0)
    workdir = tmp_path / "stuck"
    with train(workdir, "-c", WAITS_FOR_DATA, num_processes=num_processes) as job:
        assert job.wait() == [124] * num_processes, job.err(0)
        late = num_processes - 1
        for index in range(num_processes):
            [line] = job.error_lines(index)
            assert f"stuck: process {late} of {num_processes} on " in line
            assert re.search(r"while waiting for data, after step 8 \(limit \d+ s\)", line)  # 20 times the longest step
            assert "next_or_wait" in (workdir / f"stuck/process-{late}.txt").read_text()
    if num_processes == 1:  # while it saves, which starts threads: one that has no memory to begin is waited for
        with train(workdir, "-c", HAS_NO_MORE_MEMORY) as job:
            [code] = job.wait(60)
            assert code == -6 or (code == 1 and " out of memory" in job.error_lines(0)[0]), job.err(0)
    with train(workdir, *module, num_processes=num_processes) as job:
        assert job.wait() == [0] * num_processes, job.err(0)
    found, wanted = micro.rows(workdir), micro.rows(tmp_path / "whole")
    assert [row["batch_hash"] for row in found] == [row["batch_hash"] for row in wanted]
    if num_processes == 1:
        assert [row["loss"] for row in found] == [row["loss"] for row in wanted]


PRINTS_WITHOUT_END = """
import sys
from hlat_jax.host import distributed
from hlat_jax.host.watchdog import Watchdog
watchdog = Watchdog(least_s=0.1)
with distributed.joined(None, watchdog=watchdog):
    for _ in range(5):
        watchdog.begin("training")
    while True:
        print("x" * 1000, flush=True)
"""


@pytest.mark.slow
def test_output_that_nobody_reads_does_not_keep_a_stuck_process_alive():
    with subprocess.Popen(
        [sys.executable, "-c", PRINTS_WITHOUT_END], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as p:
        try:
            assert p.wait(600) == 124
        finally:
            p.kill()
        assert "while training" in p.stderr.read().decode()
