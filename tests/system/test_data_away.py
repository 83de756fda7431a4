"""Training data that is away for a while: the run waits, or ends with code 1, and the batches are the same."""

import json

import jobs
import micro
import pytest

pytestmark = pytest.mark.slow

# Trains as the command does, but at batch 9 the last process moves the file away; after `away_s` it comes back.
MOVES_AWAY = """
import pathlib, sys, threading
from hlat_jax.data import loader, retries
away_s, wait_s, path = float(sys.argv.pop(1)), float(sys.argv.pop(1)), pathlib.Path(sys.argv.pop(1))
retries.WAITS_S = (wait_s,) * 5
taken, original = [], loader.TrainBatches.__next__
def next_batch(batches):
    taken.append(None)
    if len(taken) == 9 and "--process_id=0" not in sys.argv:
        path.rename(path.with_suffix(".away"))
        if away_s:
            threading.Timer(away_s, path.with_suffix(".away").rename, [path]).start()
    return original(batches)
loader.TrainBatches.__next__ = next_batch
from hlat_jax import train
from hlat_jax.cli import flags
flags.main(train.main)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("away")
    lines = [json.dumps({"text": f"{i} " + "word and word " * (i % 7)}) for i in range(400)]
    (folder / "text.jsonl").write_text("\n".join(lines))
    micro.write_config(folder)
    return folder


@pytest.fixture(scope="module")
def train(folder):
    """A function that trains in `folder / name`, some processes at once, perhaps moving the text away; see Job."""
    text = folder / "text.jsonl"
    own = ("train.num_steps=30", "checkpoint.every_steps=4", "data.mixture=", "data.validation=", f"data.train={text}")
    env = micro.environment(folder / "cache", num_devices=2)

    def start(name, *moved, num_processes=1):
        program = ["-c", MOVES_AWAY, *map(str, moved), str(text)] if moved else ["-m", "hlat_jax.train"]
        [python, _, _, *words] = micro.command(folder / "micro.py", folder / name, *own, "parallel.data=2")
        address = jobs.free_address()
        commands = [[python, *program, *words, "--stuck_timeout_s=3"] for _ in range(num_processes)]
        if num_processes > 1:
            for index, command in enumerate(commands):
                command += [f"--coordinator={address}", f"--num_processes={num_processes}", f"--process_id={index}"]
        env["XLA_FLAGS"] = micro.environment(num_devices=2 // num_processes)["XLA_FLAGS"]
        return jobs.run_job(commands, [env] * num_processes, folder / f"log-{address.rpartition(':')[2]}")

    return start


@pytest.fixture(scope="module")
def whole(folder, train):
    """The rows of a run that read its text without faults."""
    with train("whole") as job:
        assert job.wait() == [0], job.err(0)
    return micro.rows(folder / "whole")


def test_a_file_that_stays_away_is_code_1_in_all_processes_until_it_is_back(train, folder, whole):
    with train("away", 0, 0.1, num_processes=2) as job:
        assert job.wait() == [1, 1], job.err(0)
        for index in range(2):
            [line] = job.error_lines(index)
            assert "text.jsonl" in line
    assert micro.saved_steps(folder / "away")[-1] >= 8
    with train("away") as job:  # at the next start too
        assert job.wait() == [1], job.err(0)
    (folder / "text.away").rename(folder / "text.jsonl")
    with train("away") as job:
        assert job.wait() == [0], job.err(0)
    assert [row["batch_hash"] for row in micro.rows(folder / "away")] == [row["batch_hash"] for row in whole]


def test_a_file_that_was_never_there_is_a_mistake(train, folder):
    (folder / "text.jsonl").rename(folder / "text.away")
    try:
        with train("never") as job:
            assert job.wait() == [2]
            assert "text.jsonl does not exist" in job.err(0)
    finally:
        (folder / "text.away").rename(folder / "text.jsonl")
