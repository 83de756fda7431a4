"""A split sequence beside one device: the same training, its memory and its cost, on virtual CPU devices.

    python benchmarks/context.py [--rounds=4] [--memory_seq_len=8192]

`training`: 20 steps of the layouts of tests/parallel/test_context.py, with packed documents, against one device: the
largest relative difference of loss, gradient norm and parameter norm; two layouts without context show what another
order of sums changes. `memory`: XLA's temporaries of a step of 4 layers of `tiny`'s width, compiled and not run.
`cost`: processor seconds and wall time of a step of `tiny` with 4 x 2,048 tokens, all arms in turn, as the median ratio
to one device. Attention is `chunked` everywhere.
"""

from __future__ import annotations

import argparse
import functools
import os
import pathlib
import statistics
import sys
import time
from typing import Any

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import jax
import numpy as np

from hlat_jax.batch import concat_batch
from hlat_jax.cli import config_files
from hlat_jax.parallel.degrees import layout_over
from hlat_jax.parallel.sharding import MESH_AXES
from hlat_jax.program import RunProgram, make_program
from hlat_jax.resolve import resolve

ARMS = {
    "one device": {},
    "all_gather, context 4": {"context": 4},
    "ring, context 4": {"context": 4, "context_exchange": "ring"},
    "data 4": {"data": 4},
}


def program_of(config: Any) -> RunProgram:
    count = int(np.prod([getattr(config.parallel, axis) for axis in MESH_AXES]))
    return make_program(config, layout_over(config, jax.devices()[:count]))


def tiny(parallel: dict, *, rows: int, seq_len: int, num_layers: int = 6) -> RunProgram:
    c = config_files.load("tiny")
    c.model.update(max_positions=seq_len, attention="chunked", num_layers=num_layers)
    c.data.update(batch_size=rows, seq_len=seq_len)
    c.parallel.update({"data": 1} | parallel)
    return program_of(resolve(c))


def training(num_steps: int = 20) -> None:
    sys.path[:0] = [
        str(pathlib.Path(__file__).resolve().parents[1] / "tests" / part) for part in ("parallel", "support")
    ]
    import test_context

    controls = {
        "(data 2 x tensor 2)": {"parallel.data": 2, "parallel.tensor": 2},
        "(data 2, two microbatches)": {"parallel.data": 2, "train.num_microbatches": 2},
    }

    @functools.cache
    def rows_of(changes: tuple) -> np.ndarray:
        program = program_of(test_context.configured(dict(changes)))
        state, rows = program.init_state(), []
        for step in range(num_steps):
            state, metrics = program.run_step(state, program.shard(test_context.drawn(step)), np.float32(1e-3))
            rows.append([float(x) for x in (metrics.loss, metrics.grad_norm, metrics.param_norm)])
        return np.asarray(rows)

    print(f"{num_steps} steps, largest difference from one device of      loss  gradient norm  parameter norm")
    for name, changes in (test_context.LAYOUTS | controls).items():
        alone = tuple((path, value) for path, value in changes.items() if path.startswith("model."))
        errors = np.abs(rows_of(tuple(changes.items())) / rows_of(alone) - 1).max(0)
        print(f"  {name:48}" + "".join(f"{error:>12.1e}" for error in errors), flush=True)


def memory(seq_len: int) -> None:
    print(f"XLA's temporaries of a step of {seq_len:,} tokens")
    base = 0
    for name, parallel in list(ARMS.items())[:3]:
        program = tiny(parallel, rows=1, seq_len=seq_len, num_layers=4)
        used = program.trace_step().lower().compile().memory_analysis().temp_size_in_bytes
        base = base or used
        print(f"  {name:24}{used / 2**20:8.1f} MiB{used / base:8.2f}", flush=True)


def cost(num_rounds: int, *, rows: int = 4, seq_len: int = 2048) -> None:
    programs = {name: tiny(parallel, rows=rows, seq_len=seq_len) for name, parallel in ARMS.items()}
    batch = concat_batch(np.random.default_rng(0).integers(0, 2048, (rows, seq_len)))
    states = {name: program.init_state() for name, program in programs.items()}
    spent: dict[str, list] = {name: [] for name in ARMS}
    for _ in range(num_rounds + 1):  # the first compiles
        for name, program in programs.items():
            began = time.perf_counter(), time.process_time()
            states[name], metrics = program.run_step(states[name], program.shard(batch), np.float32(1e-3))
            jax.block_until_ready((states[name], metrics))
            spent[name].append((time.perf_counter() - began[0], time.process_time() - began[1]))
    print(
        f"a step of {rows} x {seq_len:,} tokens, median of {num_rounds}: wall, processor seconds; ratios to one device"
    )
    for name, rounds in spent.items():
        wall, cpu = (statistics.median(column) for column in zip(*rounds[1:], strict=True))
        ratios = [
            statistics.median(own[at] / one[at] for own, one in zip(rounds[1:], spent["one device"][1:], strict=True))
            for at in (0, 1)
        ]
        print(f"  {name:24}{wall:7.2f}{cpu:7.2f}{ratios[0]:8.2f}{ratios[1]:7.2f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--memory_seq_len", type=int, default=8192)
    values = parser.parse_args()
    training()
    memory(values.memory_seq_len)
    cost(values.rounds)


if __name__ == "__main__":
    main()
