"""Does the loop cost anything? Tokens per second of `train` against its bare compiled step, in turn in one process.

    python benchmarks/loop_overhead.py [--rounds 5] [--steps 12] [--watch] [--dispatch M]

Each round trains `--steps` steps of `tiny` through the loop (metrics, hashes, data threads; no validation, no plot)
and then runs as many bare steps on one resident batch. Prints the median of the rounds' ratios.

With --watch it compares two runs through the loop: with the watch, the ledger and train.spikes=skip, and with none of
them. It also prints the CPU time of their threads as a share of the wall time, which is less noisy.

With --dispatch M it compares bare steps of M microbatches in one program with steps whose microbatches are programs of
their own (train.accumulate), and checks that both end in the same state, bit for bit.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import io
import json
import pathlib
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator
from unittest import mock

import jax
import numpy as np

from hlat_jax import config as config_lib
from hlat_jax.batch import concat_batch
from hlat_jax.host import distributed
from hlat_jax.host.activity import Activity
from hlat_jax.loop import train
from hlat_jax.parallel.sharding import shard_batch
from hlat_jax.resolve import resolve
from hlat_jax.run import open as open_lib
from hlat_jax.run.goodput import SilentLedger
from hlat_jax.run.machine import fitting_program


def loop_step_s(config, workdir, *, activity: Activity | None = None) -> float:
    """Returns the median seconds of a step as the loop itself records them; the first two fill the pipeline."""
    with contextlib.redirect_stdout(io.StringIO()):
        train(config, workdir, activity=activity)
    rows = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    return statistics.median(row["step_s"] for row in rows[2:])


def bare_step_s(program) -> float:
    """Returns the median seconds of a step that waits for its result and does nothing else."""
    config, state = program.config, program.init_state()
    shape = (config.data.batch_size, config.data.seq_len)
    batch = shard_batch(concat_batch(np.random.default_rng(0).integers(3, 2048, shape)), program.layout)
    seconds = []
    for _ in range(config.train.num_steps):
        began = time.monotonic()
        state, metrics = program.step(state, batch, np.float32(1e-3))
        jax.block_until_ready((state, metrics))
        seconds.append(time.monotonic() - began)
    return statistics.median(seconds[2:])


def compare_dispatched(config, *, rounds: int, num_microbatches: int) -> None:
    """Prints the step times of both values of train.accumulate, in turn in one process.

    Raises:
      SystemExit: the states that the two end in differ.
    """
    programs = {}
    for accumulate in ("scan", "dispatch"):
        train_config = dataclasses.replace(config.train, num_microbatches=num_microbatches, accumulate=accumulate)
        programs[accumulate] = fitting_program(dataclasses.replace(config, train=train_config), jax.devices())
    shape = (config.data.batch_size, config.data.seq_len)
    batch = concat_batch(np.random.default_rng(0).integers(3, 2048, shape))
    states = {name: program.init_state() for name, program in programs.items()}
    ratios = []
    for index in range(rounds):
        found = {}
        for name, program in programs.items():
            seconds = []
            for _ in range(config.train.num_steps):
                began = time.monotonic()
                states[name], metrics = program.run_step(states[name], program.shard(batch), np.float32(1e-3))
                jax.block_until_ready((states[name], metrics))
                seconds.append(time.monotonic() - began)
            found[name] = statistics.median(seconds[2:])
        ratios.append(found["dispatch"] / found["scan"])
        print(f"round {index}: {found['scan']:.4f} s in one program, {found['dispatch']:.4f} s dispatched")
    scanned, dispatched = (jax.tree.leaves(jax.device_get(states[name])) for name in ("scan", "dispatch"))
    if any(a.tobytes() != b.tobytes() for a, b in zip(scanned, dispatched, strict=True)):
        raise SystemExit("the two ended in different states")
    spread = f"{min(ratios):.4f} to {max(ratios):.4f}"
    print(f"dispatched / one program: {statistics.median(ratios):.4f} (median of {rounds}, {spread}); the same states")


@contextlib.contextmanager
def cpu_of_threads(found: dict[str, float]) -> Iterator[None]:
    """Sets `found` to the CPU seconds of each thread that looks after the run, by its name."""
    over = threading.Event()

    def look() -> None:
        while not over.wait(0.2):
            for thread in threading.enumerate():
                if thread.name in ("hlat-watch", "hlat-ledger"):
                    with contextlib.suppress(OSError):  # it has just ended
                        found[thread.name] = time.clock_gettime(time.pthread_getcpuclockid(thread.ident))

    looker = threading.Thread(target=look, daemon=True)
    looker.start()
    yield
    over.set()
    looker.join()


def compare_watched(config, rounds: int) -> None:
    """Prints step times with and without what looks after a run, and the CPU time of its threads."""
    watched = dataclasses.replace(config, train=dataclasses.replace(config.train, spikes="skip"))
    ratios, shares = [], []
    for index in range(rounds):
        with (
            tempfile.TemporaryDirectory() as folder,
            mock.patch.object(open_lib, "Ledger", return_value=SilentLedger()),
        ):
            plain_s = loop_step_s(config, pathlib.Path(folder))
        cpu: dict[str, float] = {}
        activity = Activity(least_s=300)
        with tempfile.TemporaryDirectory() as folder, cpu_of_threads(cpu):
            began_s, workdir = time.monotonic(), pathlib.Path(folder)
            with distributed.joined(None, activity=activity, stacks=workdir / "stuck"):
                watched_s = loop_step_s(watched, workdir, activity=activity)
            shares.append(sum(cpu.values()) / (time.monotonic() - began_s))
        ratios.append(watched_s / plain_s)
        print(f"round {index}: {plain_s:.4f} s plain, {watched_s:.4f} s watched; threads {cpu}")
    print(
        f"watched / plain: {statistics.median(ratios):.4f} (median of {rounds}, {min(ratios):.4f} to {max(ratios):.4f})"
    )
    print(f"CPU time of the threads / wall time: {statistics.median(shares):.5f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--watch", action="store_true")
    parser.add_argument("--dispatch", type=int, default=0, metavar="M")
    args = parser.parse_args()
    c = config_lib.load("tiny")
    c.train.num_steps = args.steps
    c.train.eval_every_steps = 0
    c.train.sample_prompt = ""
    c.data.validation = ""
    c.metrics.plot = False
    c.metrics.console = "off"
    config = resolve(c)
    if args.dispatch:
        compare_dispatched(config, rounds=args.rounds, num_microbatches=args.dispatch)
        return
    if args.watch:
        compare_watched(config, args.rounds)
        return
    program = fitting_program(config, jax.devices())
    tokens = config.data.batch_size * config.data.seq_len
    ratios = []
    for index in range(args.rounds):
        with tempfile.TemporaryDirectory() as folder:
            looped = loop_step_s(config, pathlib.Path(folder))
        bare = bare_step_s(program)
        ratios.append(bare / looped)
        print(f"round {index}: train {tokens / looped:8,.0f} tok/s, bare step {tokens / bare:8,.0f} tok/s")
    print(f"train / bare step: {statistics.median(ratios):.3f} (median of {args.rounds})")


if __name__ == "__main__":
    main()
