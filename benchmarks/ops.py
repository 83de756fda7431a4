"""What do the implementations of the loss and of attention take, in memory and in time? Is a table's pick the fastest?

    python benchmarks/ops.py [--rows 1] [--seq_len 2048] [--width 256] [--rounds 15] [--json F.json]
    python benchmarks/ops.py --table benchmarks/tuned/cpu-amd-epyc.json [--seq_len_at_most 1024]

Forward and backward pass, fp32. Memory is what XLA allocates for temporaries; seconds are medians of rounds in which
every variant runs in turn, and so are ratios: of each round, then their median. The loss has limits, at a
vocabulary of 32,000: against logits that are materialised and differentiated by JAX, "chunked" takes at most a quarter
of the memory and 1.1 times the time. With --table every call of the table is timed again, as many rows as it was made
with. Exit code 1 where a bar is missed, or a pick is more than 5 % behind.
"""

from __future__ import annotations

import argparse
import functools
import json
import pathlib
import statistics
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from hlat_jax.ops import attention, cross_entropy, table
from hlat_jax.ops.registry import OPS
from hlat_jax.plan import tune

VOCAB = 32_000
LEAST_MEMORY_RATIO, MOST_TIME_RATIO, BEHIND = 4.0, 1.1, 1.05


def in_turn(compiled: dict[str, Callable], arrays: tuple, *, num_rounds: int) -> dict[str, list[float]]:
    """Returns the seconds of each variant in each round, after one call that is not counted."""
    for one in compiled.values():
        jax.block_until_ready(one(*arrays))
    return tune.time_in_turn(compiled, arrays, num_rounds)


def time_ratio(seconds: list[float], base: list[float]) -> float:
    """Returns the median of the ratios of each round."""
    return statistics.median(a / b for a, b in zip(seconds, base, strict=True))


def measured(runs: dict[str, Callable], arrays: tuple, *, base: str, num_rounds: int) -> dict[str, dict[str, float]]:
    """Returns of each variant the temporaries in MiB, the median milliseconds, and its ratios to `base`."""
    compiled = {name: jax.jit(run).lower(*arrays).compile() for name, run in runs.items()}
    mib = {name: one.memory_analysis().temp_size_in_bytes / 2**20 for name, one in compiled.items()}
    times = in_turn(compiled, arrays, num_rounds=num_rounds)
    return {
        name: {
            "mib": mib[name],
            "memory_ratio": mib[base] / mib[name],
            "ms": 1e3 * statistics.median(seconds),
            "time_ratio": time_ratio(seconds, times[base]),
        }
        for name, seconds in times.items()
    }


def materialised(hidden_BTD: jax.Array, head_VD: jax.Array, targets_BT: jax.Array, weights_BT: jax.Array) -> Any:
    """Returns loss and gradients of the plain form: all logits, Optax's cross-entropy, JAX's derivative."""

    def loss(hidden_BTD, head_VD):
        logits_BTV = jnp.einsum("BTD,VD->BTV", hidden_BTD, head_VD, preferred_element_type=jnp.float32)
        return jnp.sum(weights_BT * optax.softmax_cross_entropy_with_integer_labels(logits_BTV, targets_BT))

    return jax.value_and_grad(loss, argnums=(0, 1))(hidden_BTD, head_VD)


def losses(rows: int, seq_len: int, width: int, *, num_rounds: int) -> dict[str, dict[str, float]]:
    """Returns `measured` of the loss; its base is the plain form."""
    _, both, arrays = tune.cross_entropy_case(
        cross_entropy.describe_call((rows, seq_len, width), VOCAB, dtype="float32"), 0
    )
    runs = {"materialised": materialised} | {name: functools.partial(both, name) for name in cross_entropy.OP.names}
    return measured(runs, arrays, base="materialised", num_rounds=num_rounds)


def attentions(rows: int, seq_len: int, *, num_rounds: int) -> dict[str, dict[str, float]]:
    """Returns `measured` of causal attention with 8 heads of 64; its base is `einsum`."""
    call = attention.describe_call((rows, seq_len, 8, 64), 8, dtype="float32", has_segments=False)
    _, both, arrays = tune.attention_case(call, 0)
    able = [name for name, why in attention.OP.refusals(jax.default_backend(), call).items() if not why]
    return measured(
        {name: functools.partial(both, name) for name in able}, arrays, base="einsum", num_rounds=num_rounds
    )


def retimed(entry: table.Measurement, *, num_rounds: int) -> dict[str, float]:
    """Returns implementation -> time over that of the entry's winner, the call timed again."""
    op = OPS[entry.op.removeprefix("model.")]
    _, both, arrays = tune.CASES[entry.op](entry.call, entry.rows_measured)
    able = [name for name, why in op.refusals(jax.default_backend(), entry.call).items() if not why]
    compiled = {name: jax.jit(functools.partial(both, name)).lower(*arrays).compile() for name in able}
    times = in_turn(compiled, arrays, num_rounds=num_rounds)
    return {name: time_ratio(seconds, times[entry.winner]) for name, seconds in times.items()}


def show(title: str, found: dict[str, dict[str, float]]) -> None:
    """Prints one measurement."""
    print(f"\n{title}\n{'':14}{'temp MiB':>10}{'less by':>9}{'ms':>10}{'time':>7}")
    for name, row in found.items():
        print(
            f"{name:14}{row['mib']:10.1f}{row['memory_ratio']:9.2f}{row['ms']:10.1f}{row['time_ratio']:7.2f}",
            flush=True,
        )


def check_table(path: str, *, num_rounds: int, longest: int) -> int:
    """Times the calls of a table again; returns the exit code."""
    device = jax.devices()[0]
    known = table.read_for(path, platform=device.platform, kind=table.device_kind(device))
    code = 0
    for entry in known.entries:
        shape = next(fact for name, fact in entry.call.items() if name.endswith("_shape"))
        if shape[1] > longest:
            print(f"{entry.op} {shape}: not timed again")
            continue
        ratios = retimed(entry, num_rounds=num_rounds)
        behind = min(ratios.values()) * BEHIND < 1
        code |= behind
        others = ", ".join(f"{name} {ratio:.2f}" for name, ratio in ratios.items() if name != entry.winner)
        print(f"{entry.op} {shape}: {entry.winner} 1{'' if not behind else ', BEHIND'}; {others}", flush=True)
    return code


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for flag, default in (("rows", 1), ("seq_len", 2048), ("width", 256), ("rounds", 15)):
        parser.add_argument(f"--{flag}", type=int, default=default)
    parser.add_argument("--table", help="time the calls of this table again, and nothing else")
    parser.add_argument("--seq_len_at_most", type=int, default=1 << 30, help="of the calls of --table")
    parser.add_argument("--json", help="also write what was measured to this file")
    args = parser.parse_args()
    print(f"{table.device_kind(jax.devices()[0])}, JAX {jax.__version__}, {args.rounds} rounds")
    if args.table:
        return check_table(args.table, num_rounds=args.rounds, longest=args.seq_len_at_most)
    loss = losses(args.rows, args.seq_len, args.width, num_rounds=args.rounds)
    show(f"loss, {args.rows} x {args.seq_len} tokens of {args.width}, vocabulary {VOCAB:,}; over materialised", loss)
    found = {"loss": loss}
    for seq_len in (512, 1024, 2048):
        rows = max(1, args.rows * args.seq_len // seq_len // 2)
        found[f"attention {rows} x {seq_len}"] = attentions(rows, seq_len, num_rounds=args.rounds)
        show(
            f"attention, {rows} x {seq_len} tokens, 8 heads of 64; over einsum", found[f"attention {rows} x {seq_len}"]
        )
    if args.json:
        pathlib.Path(args.json).write_text(json.dumps(found, indent=1) + "\n")
    chunked = loss["chunked"]
    met = chunked["memory_ratio"] >= LEAST_MEMORY_RATIO and chunked["time_ratio"] <= MOST_TIME_RATIO
    print(
        f"\nbars of the loss: memory less by {chunked['memory_ratio']:.2f} (at least {LEAST_MEMORY_RATIO:g}), time "
        f"{chunked['time_ratio']:.2f} (at most {MOST_TIME_RATIO:g}): {'met' if met else 'MISSED'}"
    )
    return 0 if met else 1


if __name__ == "__main__":
    raise SystemExit(main())
