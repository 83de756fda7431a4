"""What do the passes make of models that are not ours? The twelve styles and the packages' models of the tests.

    python benchmarks/foreign.py residuals [--models=nanodo,vit] [--xla] [--compile]   # bytes for the backward pass
    python benchmarks/foreign.py steps [--pairs=7]                 # a whole fp32 step with residual selection
    python benchmarks/foreign.py budget [--share=0.6]              # remat_pass.fit at a share of what a step takes
    python benchmarks/foreign.py chunk [--max_bytes=64KiB]         # intermediates in chunks, and the bytes of a step
    python benchmarks/foreign.py choice [--models=loop,scan] [--share=0.6]   # CPU-seconds of a program under a budget

Each prints one table in Markdown, a row per model, as it goes. Bytes held for the backward pass and FLOPs of products
are counted in the trace; with `--xla` the bytes are those that XLA allocates for the results of the forward pass; with
`--compile` gradients are compared with those of fp32 in norm: under autocast, with selection, and in fp32 from weights
and batch that were rounded to bf16 once. All FLOPs are those of XLA's cost analysis of the program before it is
optimized, which counts the body of a loop once. A step's bytes are XLA's temporaries on CPU, with the scheduler that
minimizes memory, as on accelerators. `choice` is a transformer of width 64 with 12 blocks in a Python loop or 24 in a
scan, under all passes and a share of the temporaries of its plain fp32 gradients.
"""

import argparse
import pathlib
import statistics
import sys
import time

import jax
import jax.numpy as jnp
import optax

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "tests" / "passes"))

from foreign.measured import distance, residual_bytes, rounded, step_for_memory, total_product_flops
from foreign.models import MODELS
from foreign.unchanged import UNCHANGED

from hlat_jax.facts.byte_sizes import format_bytes
from hlat_jax.passes import remat_pass
from hlat_jax.passes.autocast_pass import autocast
from hlat_jax.passes.chunk_pass import chunk
from hlat_jax.passes.compile import training_program
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


def transformer(kind):
    """Returns the loss, parameters and batch of 12 blocks in a Python loop, or of 24 in a scan."""
    num_blocks, width, rows, length, heads = {"loop": 12, "scan": 24}[kind], 64, 4, 64, 4

    def norm(x, scale):
        centered = x - x.mean(-1, keepdims=True)
        return scale * centered * jax.lax.rsqrt((centered**2).mean(-1, keepdims=True) + 1e-5)

    def block(x, p):
        h = norm(x, p["g1"])
        q, k, v = ((h @ p[name]).reshape(rows, length, heads, -1) for name in "qkv")
        scores = jnp.einsum("bthd,bshd->bhts", q, k) / (width // heads) ** 0.5
        shares = jax.nn.softmax(jnp.where(jnp.tril(jnp.ones((length, length), bool)), scores, -1e9))
        x = x + jnp.einsum("bhts,bshd->bthd", shares, v).reshape(rows, length, width) @ p["o"]
        return x + jax.nn.gelu(norm(x, p["g2"]) @ p["up"]) @ p["down"], None

    def loss(params, batch):
        x = params["embed"][batch["x"]]
        if kind == "scan":
            x, _ = jax.lax.scan(block, x, params["blocks"])
        for p in params["blocks"] if kind == "loop" else ():
            x, _ = block(x, p)
        logits = x @ params["embed"].T
        return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]))

    shapes = dict.fromkeys("qkvo", (width, width)) | {"up": (width, 4 * width), "down": (4 * width, width)}
    stacked = (num_blocks,) if kind == "scan" else ()
    one = {name: jnp.full((*stacked, *shape), 0.1) for name, shape in shapes.items()}
    one |= {name: jnp.ones((*stacked, width)) for name in ("g1", "g2")}
    params = {"embed": jnp.full((256, width), 0.1), "blocks": one if stacked else [one] * num_blocks}
    return loss, params, {name: jnp.ones((rows, length), jnp.int32) for name in "xy"}


def choice(kind, *, share):
    """Prints the CPU-seconds of a training program under all passes and a budget, and of its first step."""
    loss, params, batch = transformer(kind)
    plain = remat_pass.temporaries(jax.jit(jax.value_and_grad(loss)).trace(params, batch))
    passes = {"autocast": "bf16", "kernels": True, "chunk": "64KiB", "residuals": True}
    shapes = {"params": params, "batch": batch, "memory_budget": int(share * plain)}
    began = time.process_time()
    try:
        program = training_program(loss, optax.adam(1e-3), **passes, **shapes)
    except remat_pass.BudgetNotMet:
        spent = time.process_time() - began
        print_row(kind, format_bytes(plain), f"not met of {share:.0%}", "", "", f"{spent:.1f}", "")
        return
    chosen = time.process_time()
    jax.block_until_ready(program.step(program.init(params), batch))
    print_row(
        kind,
        format_bytes(plain),
        f"{program.plan.measured_bytes / plain:.0%} of {share:.0%}",
        f"{program.plan.recompute_share:+.1%}",
        program.plan.compilations,
        f"{chosen - began:.1f}",
        f"{time.process_time() - chosen:.1f}",
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", choices=("residuals", "steps", "budget", "chunk", "choice"))
    parser.add_argument("--models", help="names, with commas; default: all")
    parser.add_argument("--small", action="store_true", help="the sizes of the tests")
    parser.add_argument("--xla", action="store_true", help="bytes that XLA allocates")
    parser.add_argument("--compile", action="store_true", help="compare gradients; minutes")
    parser.add_argument("--share", type=float, default=0.6)
    parser.add_argument("--max_bytes", default="1MiB", help="of `chunk`")
    parser.add_argument("--pairs", type=int, default=7, help="alternating steps of each model")
    args = parser.parse_args()
    known = ["loop", "scan"] if args.table == "choice" else list(ALL)
    names = args.models.split(",") if args.models else known
    unknown = sorted({*names} - {*known})
    if unknown:
        parser.error(f"--models: {', '.join(unknown)}: there are {', '.join(known)}")
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
    elif args.table == "choice":
        print_head("model", "fp32 gradients", "met", "products", "programs", "choice, CPU-s", "first step, CPU-s")
        for name in names:
            choice(name, share=args.share)
    else:
        print_head("model", "in chunks", "apart", "fp32 step, MiB", "in chunks, MiB", "s")
        for name in names:
            in_chunks(name, small=args.small, max_bytes=args.max_bytes)


if __name__ == "__main__":
    main()
