"""Models of other people at sequence 1,024: time and memory of a gradient, with and without `passes.rewrite`.

    python benchmarks/rewrite.py                       # all transformers of tests/passes/foreign
    python benchmarks/rewrite.py --models=vit,gemma --pairs=9 --seq_len=512

Each model is compiled twice, its source unchanged: under `jax.jit`, and under `jax.jit` after `rewrite`. Their steps
alternate in one process; the ratio of times is the median of the ratios of the pairs. Memory is XLA's temporaries. The
last column is the largest relative difference of a parameter's gradient, by norm; one that is 0 but for rounding, as
that of a bias of all keys, is compared with a thousandth of the largest norm.
"""

from __future__ import annotations

import argparse
import pathlib
import statistics
import sys
import time

import jax
import jax.numpy as jnp

from hlat_jax.passes.rewrite import rewrite

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "tests" / "passes"))
from foreign.models import MODELS, TRANSFORMERS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", default=",".join(TRANSFORMERS), help="names, with commas")
    parser.add_argument("--seq_len", type=int, default=1024)
    parser.add_argument("--pairs", type=int, default=7, help="alternating steps of each model")
    parser.add_argument("--report", action="store_true", help="print what was replaced")
    parser.add_argument("--wait_for", default="", help="file whose existence the timing waits for, after compiling")
    options = parser.parse_args()
    compiled = {name: compile_both(name, options) for name in options.models.split(",")}
    while options.wait_for and not pathlib.Path(options.wait_for).exists():
        time.sleep(0.2)
    print(f"{'model':<18} {'ms':>8} {'ours':>8} {'faster':>7} {'MiB':>8} {'ours':>8} {'less':>6} {'gradients':>10}")
    for name, (programs, args, difference) in compiled.items():
        seconds = measure(programs, args, options.pairs)
        ratio = statistics.median(before / after for before, after in zip(*seconds, strict=True))
        times = [1e3 * statistics.median(one) for one in seconds]
        memory = [program.memory_analysis().temp_size_in_bytes / 2**20 for program in programs]
        row = f"{name:<18} {times[0]:8.0f} {times[1]:8.0f} {ratio:6.2f}x {memory[0]:8.1f} {memory[1]:8.1f}"
        print(f"{row} {memory[0] / memory[1]:5.2f}x {difference:10.1e}", flush=True)


def compile_both(name: str, options: argparse.Namespace) -> tuple:
    """Returns (both programs, their arguments, the largest relative difference of their gradients)."""
    loss, *args = MODELS[name](seq_len=options.seq_len)
    ours = rewrite(loss)
    programs = [jax.jit(jax.value_and_grad(fn)).lower(*args).compile() for fn in (loss, ours)]
    if options.report:
        print(f"{name}: {ours.report()}")
    (_, expected), (_, found) = (program(*args) for program in programs)
    pairs = list(zip(jax.tree.leaves(expected), jax.tree.leaves(found), strict=True))
    least = 1e-3 * max(jnp.linalg.norm(a) for a, _ in pairs)
    differences = [float(jnp.linalg.norm(a - b) / jnp.maximum(jnp.linalg.norm(a), least)) for a, b in pairs]
    return programs, args, max(differences)


def measure(programs: list, args: list, pairs: int) -> tuple[list[float], list[float]]:
    """Returns the seconds of each step of both programs, which alternate."""
    seconds: tuple[list[float], list[float]] = ([], [])
    for _ in range(pairs):
        for program, found in zip(programs, seconds, strict=True):
            start = time.perf_counter()
            jax.block_until_ready(program(*args))
            found.append(time.perf_counter() - start)
    return seconds


if __name__ == "__main__":
    main()
