"""Does the loop cost anything? Tokens per second of `train` against its bare compiled step, in turn in one process.

    python benchmarks/loop_overhead.py [--rounds 5] [--steps 12]

Each round trains `--steps` steps of `tiny` through the loop (metrics, hashes, data threads; no validation, no plot)
and then runs as many bare steps on one resident batch. Prints the median of the rounds' ratios.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import pathlib
import statistics
import tempfile
import time

import jax
import numpy as np

from hlat_jax import config as config_lib
from hlat_jax.batch import concat_batch
from hlat_jax.loop import train
from hlat_jax.parallel.sharding import shard_batch
from hlat_jax.resolve import resolve
from hlat_jax.run.machine import fitting_program


def loop_step_s(config, workdir) -> float:
    """Returns the median seconds of a step as the loop itself records them; the first two fill the pipeline."""
    with contextlib.redirect_stdout(io.StringIO()):
        train(config, workdir)
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=12)
    args = parser.parse_args()
    c = config_lib.load("tiny")
    c.train.num_steps = args.steps
    c.train.eval_every_steps = 0
    c.train.sample_prompt = ""
    c.data.validation = ""
    c.metrics.plot = False
    c.metrics.console = "off"
    config = resolve(c)
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
