"""Does the loop cost anything? Tokens per second of `train` against its bare compiled step, in turn in one process.

    python benchmarks/loop_overhead.py [--rounds 5] [--steps 12] [--watch] [--dispatch M]

Each round trains `--steps` steps of `tiny` through the loop (metrics, hashes, data threads; no validation, no plot)
and then runs as many bare steps on one resident batch. Prints the median of the rounds' ratios.

With --watch it compares bare steps with and without train.spikes=skip, one of each in turn, and prints what the watch
and the ledger take of runs through the loop: CPU time of their threads, and their calls in the main thread.

With --dispatch M it compares bare steps of M microbatches in one program with steps whose microbatches are programs of
their own (train.accumulate), likewise, and checks that both end in the same state, bit for bit.
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
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import jax
import numpy as np

from hlat_jax.batch import concat_batch
from hlat_jax.cli import config_files
from hlat_jax.config import Config
from hlat_jax.host import distributed
from hlat_jax.host.watchdog import Watchdog
from hlat_jax.parallel.rows import shard_batch
from hlat_jax.program import RunProgram
from hlat_jax.resolve import resolve
from hlat_jax.run.machine import fitting_program
from hlat_jax.train import train


def loop_step_s(config, workdir, *, watchdog: Watchdog | None = None) -> float:
    """Returns the median seconds of a step as the loop itself records them; the first two fill the pipeline."""
    with contextlib.redirect_stdout(io.StringIO()):
        train(config, workdir, watchdog=watchdog)
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


def step_ratios(plain: RunProgram, other: RunProgram, *, rounds: int) -> tuple[list[float], list[Any]]:
    """Runs steps of two programs in turn, one of each; returns (ratio of each round's medians, the states at the end).

    The data and the initial states are the same. A step waits for its result, and the first two do not count.
    """
    config = plain.config
    shape = (config.data.batch_size, config.data.seq_len)
    batch = concat_batch(np.random.default_rng(0).integers(3, 2048, shape))
    programs, ratios = (plain, other), []
    states = [program.init_state() for program in programs]
    for index in range(rounds):
        seconds = [[], []]
        for _ in range(config.train.num_steps):
            for i, program in enumerate(programs):
                began = time.monotonic()
                states[i], metrics = program.run_step(states[i], program.shard(batch), np.float32(1e-3))
                jax.block_until_ready((states[i], metrics))
                seconds[i].append(time.monotonic() - began)
        first, second = (statistics.median(each[2:]) for each in seconds)
        ratios.append(second / first)
        print(f"round {index}: {first:.4f} s and {second:.4f} s, ratio {ratios[-1]:.4f}")
    return ratios, states


def described(ratios: list[float]) -> str:
    return f"{statistics.median(ratios):.4f} (median of {len(ratios)} rounds, {min(ratios):.4f} to {max(ratios):.4f})"


def compare_dispatched(config: Config, *, rounds: int, num_microbatches: int) -> None:
    """Prints the step times of both values of train.accumulate, in turn in one process.

    Raises:
      SystemExit: the states that the two end in differ.
    """
    programs = []
    for accumulate in ("scan", "programs"):
        train_config = dataclasses.replace(config.train, num_microbatches=num_microbatches, accumulate=accumulate)
        programs.append(fitting_program(dataclasses.replace(config, train=train_config), jax.devices()))
    ratios, states = step_ratios(*programs, rounds=rounds)
    print(f"dispatched / one program: {described(ratios)}")
    scanned, dispatched = (jax.tree.leaves(jax.device_get(state)) for state in states)
    if any(a.tobytes() != b.tobytes() for a, b in zip(scanned, dispatched, strict=True)):
        raise SystemExit("the two ended in different states")
    print("the two ended in the same state, bit for bit")


@contextlib.contextmanager
def looking_after(found: dict[str, float]) -> Iterator[None]:
    """Sets `found` to the seconds of each part of looking after a run: CPU time of its threads, calls in the loop."""
    over = threading.Event()

    def look() -> None:
        while not over.wait(0.2):
            for thread in threading.enumerate():
                if thread.name in ("hlat-watch", "hlat-ledger"):
                    with contextlib.suppress(OSError):  # it has just ended
                        found[thread.name] = time.clock_gettime(time.pthread_getcpuclockid(thread.ident))

    def timed(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                found["in the loop"] = found.get("in the loop", 0.0) + time.perf_counter() - began

        return call

    looker = threading.Thread(target=look, daemon=True)
    looker.start()
    with mock.patch.object(Watchdog, "begin", timed(Watchdog.begin)):
        yield
    over.set()
    looker.join()


def compare_watched(config: Config, *, rounds: int) -> None:
    """Prints what a run that looks after itself costs: the window of spikes in its program, its threads and calls."""
    watched = dataclasses.replace(config, train=dataclasses.replace(config.train, spikes="skip"))
    ratios, _ = step_ratios(*(fitting_program(each, jax.devices()) for each in (config, watched)), rounds=rounds)
    print(f"step with the window / without: {described(ratios)}")
    shares = []
    for _ in range(3):
        watchdog, cost = Watchdog(least_s=300), {}
        with tempfile.TemporaryDirectory() as folder, looking_after(cost):
            began_s, workdir = time.monotonic(), pathlib.Path(folder)
            with distributed.join(None, watchdog=watchdog, stacks=workdir / "stuck"):
                loop_step_s(watched, workdir, watchdog=watchdog)
            shares.append(sum(cost.values()) / (time.monotonic() - began_s))
        print(f"a run through the loop: {', '.join(f'{part} {seconds:.4f} s' for part, seconds in cost.items())}")
    print(f"watch and ledger / wall time: {statistics.median(shares):.5f} (median of 3 runs)")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--watch", action="store_true")
    parser.add_argument("--dispatch", type=int, default=0, metavar="M")
    args = parser.parse_args()
    c = config_files.load("tiny")
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
        compare_watched(config, rounds=args.rounds)
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
