"""What do the passes make of models that are not ours? The twelve styles and the packages' models of the tests.

    python benchmarks/foreign.py residuals [--models=nanodo,vit] [--xla] [--compile]   # bytes for the backward pass
    python benchmarks/foreign.py steps [--pairs=7]                 # a whole fp32 step with residual selection
    python benchmarks/foreign.py budget [--share=0.6]              # remat_pass.fit at a share of what a step takes
    python benchmarks/foreign.py chunk [--max_bytes=64KiB]         # intermediates in chunks, and the bytes of a step

Each prints one table in Markdown, a row per model, as it goes. Bytes held for the backward pass and FLOPs of products
are counted in the trace; with `--xla` the bytes are those that XLA allocates for the results of the forward pass; with
`--compile` gradients are compared with those of fp32 in norm: under autocast, with selection, and in fp32 from weights
and batch that were rounded to bf16 once. All FLOPs are those of XLA's cost analysis of the program before it is
optimized, which counts the body of a loop once. A step's bytes are XLA's temporaries on CPU, with the scheduler that
minimizes memory, as on accelerators.
"""

import argparse
import pathlib
import statistics
import sys
import time

import jax

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "tests" / "passes"))

from foreign.measured import distance, residual_bytes, rounded, step_for_memory, total_product_flops
from foreign.models import MODELS
from foreign.unchanged import UNCHANGED

from hlat_jax.facts.byte_sizes import format_bytes
from hlat_jax.passes import remat_pass
from hlat_jax.passes.autocast_pass import autocast
from hlat_jax.passes.chunk_pass import chunk
from hlat_jax.passes.residuals import select_residuals

ALL = MODELS | UNCHANGED
MIB = 2**20


def print_row(*cells):
    print("| " + " | ".join(map(str, cells)) + " |", flush=True)


def print_head(*cells):
    print_row(*cells)
    print("|" + "---|" * len(cells), flush=True)


def residuals(name, *, small, by_xla, compiles):
    """Prints the bytes held for the backward pass by fp32, with selection, with autocast, and with both."""
    loss, params, batch = ALL[name](small=small)
    autocasted = autocast(loss, "bf16")
    forms = loss, select_residuals(loss), autocasted, select_residuals(autocasted)
    began = time.monotonic()
    held = [residual_bytes(form, params, batch, by_xla=by_xla) for form in forms]
    seconds = time.monotonic() - began
    products = [total_product_flops(form, params, batch) for form in forms[2:]]
    traces = [step_for_memory(form).trace(params, batch) for form in forms]
    lowered = [trace.lower() for trace in traces]
    flops = [step.cost_analysis()["flops"] for step in lowered[2:]]
    temporaries = [remat_pass.temporaries(traces[at]) for at in (0, 3)]
    cells = []
    if compiles:
        steps = [step.compile() for step in lowered]
        grads = [step(params, batch)[1] for step in steps]
        grads.append(steps[0](rounded(params), rounded(batch))[1])
        cells = [f"{distance(found, grads[0]):.4f}" for found in grads[2:]]
    print_row(
        name,
        f"{held[0] / MIB:.1f}",
        *(f"{bytes_ / MIB:.1f} ({bytes_ / held[0] - 1:+.0%})" for bytes_ in held[1:]),
        f"{products[1] / products[0] - 1:+.1%}",
        f"{flops[1] / flops[0] - 1:+.1%}",
        f"{temporaries[0] / MIB:.1f}",
        f"{temporaries[1] / MIB:.1f} ({temporaries[1] / temporaries[0] - 1:+.0%})",
        f"{seconds:.1f}",
        *cells,
    )
    return [*(bytes_ / held[0] - 1 for bytes_ in held[1:]), temporaries[1] / temporaries[0] - 1]


def steps(name, *, small, pairs):
    """Prints time and temporaries of a jitted fp32 step without and with residual selection."""
    loss, params, batch = ALL[name](small=small)
    programs, compile_times = [], []
    for form in (loss, select_residuals(loss)):
        began = time.monotonic()
        programs.append(jax.jit(jax.value_and_grad(form)).lower(params, batch).compile())
        compile_times.append(time.monotonic() - began)
    seconds = [[], []]
    for number in range(pairs + 1):
        for program, times in zip(programs, seconds, strict=True):
            began = time.monotonic()
            jax.block_until_ready(program(params, batch))
            times += [time.monotonic() - began] if number else []  # the first is not timed
    ratio = statistics.median(after / before for before, after in zip(*seconds, strict=True))
    memory = [program.memory_analysis().temp_size_in_bytes / MIB for program in programs]
    print_row(
        name,
        f"{1e3 * statistics.median(seconds[0]):.0f}",
        f"{ratio:.2f}x",
        f"{memory[0]:.1f}",
        f"{memory[1]:.1f} ({memory[1] / memory[0] - 1:+.0%})",
        f"{compile_times[1] / compile_times[0]:.1f}x",
    )


def budget(name, *, small, share):
    """Prints what `remat.fit` finds for a share of the temporaries of an fp32 step."""
    loss, params, batch = ALL[name](small=small)
    plain = remat_pass.temporaries(step_for_memory(loss).trace(params, batch))
    began = time.monotonic()
    try:
        plan = remat_pass.fit(loss, params, batch, budget_bytes=int(share * plain), step=step_for_memory)
    except remat_pass.BudgetNotMet as refused:
        least = str(refused).split("the program takes ")[1].split(" bytes")[0].replace(",", "")
        found = f"not met: {int(least) / plain:.0%}", "", "", f"{time.monotonic() - began:.0f}"
        print_row(name, format_bytes(plain), *found)
        return
    regions = f"{sum(plan.segments)} segments" if plan.segments else plan.region
    found = (
        f"{plan.measured_bytes / plain:.0%}",
        f"{plan.recompute_share:+.1%}",
        regions,
        f"{plan.seconds:.0f} ({plan.compilations})",
    )
    print_row(" + ".join((name, *plan.passes)), format_bytes(plain), *found)


def in_chunks(name, *, small, max_bytes):
    """Prints which intermediates are computed in chunks, and the temporaries of a step before and after."""
    loss, params, batch = ALL[name](small=small)
    began = time.monotonic()
    found = chunk(loss, max_bytes=max_bytes)
    jax.eval_shape(found, params, batch)
    report, seconds = found.report(), time.monotonic() - began
    plain, ours = (remat_pass.temporaries(step_for_memory(form).trace(params, batch)) for form in (loss, found))
    used = "; ".join(f"{one.facts} x{one.count}" for one in report.replacements)
    apart = max((one.difference for one in report.replacements), default=None)
    held = f"{ours / MIB:.1f} ({ours / plain - 1:+.0%})"
    print_row(
        name, used or "none", "" if apart is None else f"{apart:.0e}", f"{plain / MIB:.1f}", held, f"{seconds:.1f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", choices=("residuals", "steps", "budget", "chunk"))
    parser.add_argument("--models", help="names, with commas; default: all")
    parser.add_argument("--small", action="store_true", help="the sizes of the tests")
    parser.add_argument("--xla", action="store_true", help="bytes that XLA allocates")
    parser.add_argument("--compile", action="store_true", help="compare gradients; minutes")
    parser.add_argument("--share", type=float, default=0.6)
    parser.add_argument("--max_bytes", default="1MiB", help="of `chunk`")
    parser.add_argument("--pairs", type=int, default=7, help="alternating steps of each model")
    args = parser.parse_args()
    names = args.models.split(",") if args.models else list(ALL)
    unknown = sorted({*names} - {*ALL})
    if unknown:
        parser.error(f"--models: {', '.join(unknown)}: there are {', '.join(ALL)}")
    if args.table == "residuals":
        distances = ("autocast apart", "selection apart", "rounded apart") if args.compile else ()
        columns = "autocast", "both", "products", "all FLOPs", "step temporaries, MiB", "both", "s"
        print_head("model", "fp32, MiB", "selection", *columns, *distances)
        shares = [residuals(name, small=args.small, by_xla=args.xla, compiles=args.compile) for name in names]
        *kept, steps_kept = (f"{statistics.median(column):+.0%}" for column in zip(*shares, strict=True))
        print_row("median", "", *kept, "", "", "", steps_kept, *[""] * (1 + len(distances)))
    elif args.table == "steps":
        print_head("model", "ms", "with selection", "temporaries, MiB", "with selection", "compile time")
        for name in names:
            steps(name, small=args.small, pairs=args.pairs)
    elif args.table == "budget":
        print_head("model", "fp32 step", "fit", "products", "regions", "s (programs)")
        for name in names:
            budget(name, small=args.small, share=args.share)
    else:
        print_head("model", "in chunks", "apart", "fp32 step, MiB", "in chunks, MiB", "s")
        for name in names:
            in_chunks(name, small=args.small, max_bytes=args.max_bytes)


if __name__ == "__main__":
    main()
