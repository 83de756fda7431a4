"""Rematerialization under a budget of bytes, beside JAX's stock policies; and the largest batches, beside RAF's.

    python benchmarks/remat.py goals [--config=160m] [--shares=80,60,45,35]   # the whole training step of a config
    python benchmarks/remat.py batch [--models=bert-base,bert-large,gpt2] [--limit=13GB]
    python benchmarks/remat.py unrolled   # six blocks in a Python loop, beside the same blocks in a lax.scan
    python benchmarks/remat.py changed    # losses that no choice of saved values fits: nested scans, chunks

All compile and run nothing: bytes are XLA's own accounting, FLOPs those of the products that the program executes,
counted in its trace. On CPU the first flag below makes XLA order the program for memory, as it does on accelerators,
and the second saves time; what XLA allocates on an accelerator may differ. A program that several goals tried was
compiled once, and its seconds count for each of them. That gradients stay equal is in tests/passes/test_remat_pass.py.
"""

import argparse
import dataclasses
import functools
import math
import os
import pathlib
import sys
import time

_FLAGS = "--xla_cpu_scheduler_type=CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED --xla_backend_optimization_level=0"
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_FLAGS}".strip()

import jax
import jax.numpy as jnp

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "tests" / "support"))

from losses_over_budget import ARGUMENTS, gru, recurrent_arguments, retention, ssm

from hlat_jax import config as config_lib
from hlat_jax import stack
from hlat_jax.cli import config_files
from hlat_jax.facts.byte_sizes import format_bytes, parse_bytes
from hlat_jax.parallel.degrees import layout_over
from hlat_jax.passes import naming, remat_pass
from hlat_jax.passes.naming import RematChoice
from hlat_jax.passes.products import live_jaxpr, total_flops
from hlat_jax.program import make_program
from hlat_jax.resolve import resolve

STOCK = (
    "dots_saveable",
    "dots_with_no_batch_dims_saveable",
    "nothing_saveable",
    "everything_saveable",
)
# layers, width, vocabulary, positions, causal; RAF's batches without and with, and its relative throughput.
# Source: awslabs/raf wiki, rematerialization.
MODELS = {
    "bert-base": ((12, 768, 30522, 512, False), (16, 32, 0.943)),
    "bert-large": ((24, 1024, 30522, 512, False), (8, 16, 0.965)),
    "gpt2": ((12, 768, 50257, 1024, True), (8, 24, 0.932)),
}


def goals(config, shares):
    """Prints what each goal came to, and the stock policies."""
    config = dataclasses.replace(config, precision=config_lib.PrecisionConfig())
    layout = layout_over(config, jax.devices()[:1])
    compiled, spent = {}, []

    def traced(choice):
        chosen = "none" if choice is None else str(choice)
        model = dataclasses.replace(config.model, remat=chosen)
        return make_program(dataclasses.replace(config, model=model), layout).trace_step()

    def measure(traced):
        key = str(traced.jaxpr)
        if key not in compiled:
            wall, cpu = time.monotonic(), time.process_time()
            compiled[key] = remat_pass.temporaries(traced), time.monotonic() - wall, time.process_time() - cpu
        spent.append(compiled[key][1:])
        return compiled[key][0]

    most = measure(traced(None))
    flops = total_flops(live_jaxpr(traced(None)))
    print(f"{config.name}: {format_bytes(most)} of temporaries and {flops:.4g} FLOP a step without rematerialization")
    print(f"{'':34}  {'of no remat':>11}  {'bytes':>12}  {'FLOPs more':>10}  met  programs  wall s  CPU s")
    rows = []
    for name in STOCK:
        program = stock_step(config, layout, name)
        rows.append((name, measure(program), total_flops(live_jaxpr(program)) / flops - 1))
        print(
            f"{name:34}  {rows[-1][1] / most:11.1%}  {format_bytes(rows[-1][1]):>12}  {rows[-1][2]:10.2%}", flush=True
        )
    for share in shares:
        spent.clear()
        try:
            plan = remat_pass.search(
                traced, budget_bytes=int(share * most), options=remat_pass.RematOptions(measure=measure)
            )
        except ValueError as error:
            print(f"goal {share:.0%}: {error}", flush=True)
            continue
        wall, cpu = map(sum, zip(*spent, strict=True))
        met = "yes" if plan.measured_bytes <= share * most else "NO"
        print(
            f"{f'goal {share:.0%}':34}  {plan.measured_bytes / most:11.1%}  {format_bytes(plan.measured_bytes):>12}  "
            f"{plan.recompute_share:10.2%}  {met:>3}  {plan.compilations:8}  "
            f"{wall:6.0f} {cpu:6.0f}   {plan.choice}"
        )
        for name, num_bytes, more in rows:
            if num_bytes <= plan.measured_bytes and more < plan.recompute_share - 1e-9:
                print(f"    WORSE than {name}", flush=True)


def stock_step(config, layout, name):
    """Returns the trace of the step whose layers are checkpointed under a policy of JAX."""
    ours, policy = stack.rematerialize, getattr(jax.checkpoint_policies, name)
    stack.rematerialize = lambda layer, remat, prevent_cse: jax.checkpoint(
        layer, policy=policy, prevent_cse=prevent_cse
    )
    try:
        return make_program(config, layout).trace_step()
    finally:
        stack.rematerialize = ours


def encoder(params, tokens_BT, *, heads, causal):
    """The mean cross-entropy of a BERT or GPT-2 shaped transformer, in plain JAX, layers by scan."""
    x_BTD = params["tokens"][tokens_BT] + params["positions"][: tokens_BT.shape[1]]
    x_BTD = jax.lax.scan(lambda x, one: (block(one, x, heads=heads, causal=causal), None), x_BTD, params["layers"])[0]
    log_probs = jax.nn.log_softmax(layer_norm(x_BTD, params["norm"]) @ params["tokens"].T)
    return -jnp.mean(jnp.take_along_axis(log_probs, tokens_BT[..., None], -1))


def block(p, x_BTD, *, heads, causal):
    b, t, d = x_BTD.shape
    qkv = (layer_norm(x_BTD, p["norm1"]) @ p["qkv"]).reshape(b, t, 3, heads, d // heads)
    scores = jnp.einsum("BTNH,BSNH->BNTS", qkv[:, :, 0], qkv[:, :, 1]) / (d // heads) ** 0.5
    if causal:
        scores = jnp.where(jnp.tril(jnp.ones((t, t), bool)), scores, -1e30)
    mixed = jnp.einsum("BNTS,BSNH->BTNH", jax.nn.softmax(scores), qkv[:, :, 2])
    x_BTD = x_BTD + mixed.reshape(b, t, d) @ p["out"]
    return x_BTD + jax.nn.gelu(layer_norm(x_BTD, p["norm2"]) @ p["up"]) @ p["down"]


def layer_norm(x, scale):
    centred = x - jnp.mean(x, -1, keepdims=True)
    return centred * jax.lax.rsqrt(jnp.mean(jnp.square(centred), -1, keepdims=True) + 1e-5) * scale


def sgd(loss):
    def step(params, tokens_BT):
        value, grads = jax.value_and_grad(loss)(params, tokens_BT)
        return value, jax.tree.map(lambda p, g: p - 1e-2 * g, params, grads)

    return jax.jit(step, donate_argnums=0)


def batches(names, limit):
    """Prints the largest batch without and with rematerialization, and what RAF's factor costs here."""
    print(f"limit {limit}: parameters, gradients (SGD) and activations, fp32")
    print("model         without  nothing kept  at RAF's factor       bytes  throughput by FLOPs  RAF")
    for name in names:
        raf = MODELS[name][1]

        def make_step(batch, name=name):
            (layers, width, vocab, positions, causal), _ = MODELS[name]
            shape = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.float32)
            stacked = {"norm1": (width,), "qkv": (width, 3 * width), "out": (width, width), "norm2": (width,)}
            stacked |= {"up": (width, 4 * width), "down": (4 * width, width)}
            params = {key: shape((layers, *dims)) for key, dims in stacked.items()}
            tables = {"tokens": shape((vocab, width)), "positions": shape((positions, width)), "norm": shape((width,))}
            tokens = jax.ShapeDtypeStruct((batch, positions), jnp.int32)
            fn = functools.partial(encoder, heads=width // 64, causal=causal)
            return fn, (tables | {"layers": params}, tokens)

        without = largest_batch(make_step, limit, step=sgd)
        most = largest_batch(make_step, limit, step=sgd, keeps_nothing=True)
        batch = min(without * raf[1] // raf[0], most)
        fn, args = make_step(batch)
        options = remat_pass.RematOptions(measure=remat_pass.total_bytes)
        plan = remat_pass.fit(fn, *args, budget_bytes=limit, step=sgd, options=options)
        print(
            f"{name:12}  {without:7}  {most:12}  {batch:15}  {format_bytes(plan.measured_bytes):>10}  "
            f"{1 / (1 + plan.recompute_share):19.1%}  {raf[0]} -> {raf[1]} at {raf[2]:.1%}; {plan.choice}",
            flush=True,
        )


def largest_batch(make_step, limit, *, step, keeps_nothing=False):
    """Returns the largest batch whose program takes at most `limit` bytes; `make_step`: batch -> (fn, args)."""

    def total_bytes(batch):
        fn, args = make_step(batch)
        fn = naming.checkpointed(fn, RematChoice(), region="auto") if keeps_nothing else fn
        program = step(fn)
        program = program if hasattr(program, "trace") else jax.jit(program)
        return remat_pass.total_bytes(program.trace(*args))

    limit = parse_bytes(limit, name="limit")
    low, high, batch = 0, None, 1
    measured = {}
    while high is None or high - low > 1:  # bytes grow about linearly: a line through two of them gives the next batch
        measured[batch] = total_bytes(batch)
        low, high = (batch, high) if measured[batch] <= limit else (low, batch)
        batch = 2 * low if high is None else (low + high) // 2
        if len(measured) > 1 and len(measured) % 3:  # a third of the steps halve, whatever the line says
            (one, its), (other, their) = sorted(measured.items(), key=lambda pair: abs(pair[1] - limit))[:2]
            slope = (their - its) / (other - one)
            guess = one + math.floor((limit - its) / slope) if slope > 0 else batch
            batch = min(max(low + 1, guess), 8 * batch if high is None else high - 1)
    return low


def mlp(p, x):
    return x + jax.nn.gelu(x @ p["up"]) @ p["down"]


def experts(p, x, num_chosen=2):
    weights, chosen = jax.lax.top_k(jax.nn.softmax(x @ p["router"]), num_chosen)
    order, sizes = jnp.argsort(chosen.reshape(-1)), jnp.bincount(chosen.reshape(-1), length=p["up"].shape[0])
    hidden = jax.nn.gelu(jax.lax.ragged_dot(x[order // num_chosen], p["up"], sizes))
    out = jax.lax.ragged_dot(hidden, p["down"], sizes)[jnp.argsort(order)]
    return x + jnp.sum(out.reshape(*weights.shape, -1) * weights[..., None], 1)


_DECODER = {
    "norm1": (128,),
    "qkv": (128, 384),
    "out": (128, 128),
    "norm2": (128,),
    "up": (128, 512),
    "down": (512, 128),
}
BLOCKS = {  # name: block, shapes of its parameters, shape of x
    "MLP": (mlp, {"up": (256, 1024), "down": (1024, 256)}, (1024, 256)),
    "decoder": (functools.partial(block, heads=4, causal=True), _DECODER, (4, 256, 128)),
    "experts": (experts, {"router": (128, 4), "up": (4, 128, 512), "down": (4, 512, 128)}, (512, 128)),
}


def unrolled(num_blocks=6):
    """Prints the bytes of blocks in a Python loop and in a scan, with nothing kept and under budgets."""
    print(
        "block    form    without  checkpoint per block  whole  nothing kept  budgets: bytes, FLOPs more, s of search"
    )
    for name, (one, shapes, x_shape) in BLOCKS.items():
        x = jax.ShapeDtypeStruct(x_shape, jnp.float32)

        def looped(params, x, one=one):
            for layer in params:
                x = one(layer, x)
            return jnp.mean(x**2)

        def rolled(params, x, one=one):
            return jnp.mean(jax.lax.scan(lambda carry, layer: (one(layer, carry), None), x, params)[0] ** 2)

        params = {key: jax.ShapeDtypeStruct(dims, jnp.float32) for key, dims in shapes.items()}
        stacked = {key: jax.ShapeDtypeStruct((num_blocks, *dims), jnp.float32) for key, dims in shapes.items()}
        forms = {"scan": (rolled, stacked), "loop": (looped, [params] * num_blocks)}
        budgets = []
        for form, (fn, arguments) in forms.items():

            def taken(fn, arguments=arguments, x=x):
                return remat_pass.temporaries(jax.jit(jax.value_and_grad(fn)).trace(arguments, x))

            own = functools.partial(looped, one=jax.checkpoint(one)) if form == "loop" else None
            nothing = taken(naming.checkpointed(fn, RematChoice(), region="auto"))
            whole = taken(naming.checkpointed(fn, RematChoice(), region="whole"))
            budgets = budgets or [int(1.2 * nothing), 2 * nothing]
            row = [taken(fn), *([taken(own)] if own else []), whole, nothing]
            print(f"{name:8} {form:5}", *(f"{each / 2**20:10.2f}" for each in row), end="")
            for budget in budgets:
                plan = remat_pass.fit(fn, arguments, x, budget_bytes=budget, step=jax.value_and_grad)
                print(
                    f"   {budget / 2**20:.1f}: {plan.measured_bytes / 2**20:.2f} {plan.recompute_share:+.1%} "
                    f"{plan.seconds:.0f} s",
                    end="",
                    flush=True,
                )
            print()


def changed(shares=(0.6, 0.2)):
    """Prints what a budget comes to for losses whose scans are split or whose intermediates are cut."""
    print("loss              MiB   nothing kept  budgets: share of plain, changed, FLOPs more, programs, CPU-s")
    recurrent = recurrent_arguments(num_steps=1000, rows=8, width=32)  # two nested scans of 31 or 32 steps
    for fn, args in (ARGUMENTS | dict.fromkeys((retention, gru, ssm), recurrent)).items():
        plain, nothing = (
            remat_pass.temporaries(jax.jit(jax.value_and_grad(each)).trace(*args))
            for each in (fn, naming.checkpointed(fn, RematChoice(), region="auto"))
        )
        print(f"{fn.__name__:16} {plain / 2**20:5.2f} {nothing / plain:8.2f}      ", end="")
        for share in shares:
            began = time.process_time()
            try:
                plan = remat_pass.fit(fn, *args, budget_bytes=int(share * plain))
            except remat_pass.BudgetNotMet:
                print(f"   {share}: not met", end="", flush=True)
                continue
            spent = time.process_time() - began
            how = "+".join(plan.passes) or "saving"
            print(
                f"   {share}: {plan.measured_bytes / plain:.2f} {how} {plan.recompute_share:+.0%} "
                f"{plan.compilations} {spent:.0f} s",
                end="",
                flush=True,
            )
        print()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("goals", "batch", "unrolled", "changed"))
    parser.add_argument("--config", default="160m")
    parser.add_argument("--attention", default="einsum", help="of the config's model")
    parser.add_argument("--shares", default="80,60,45,35")
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--limit", default="13GB")
    args = parser.parse_args()
    if args.what == "batch":
        batches(args.models.split(","), args.limit)
        return
    if args.what == "unrolled":
        unrolled()
        return
    if args.what == "changed":
        changed()
        return
    mutable = config_files.load(args.config)
    mutable.model.attention = args.attention
    goals(resolve(mutable), [float(share) / 100 for share in args.shares.split(",")])


if __name__ == "__main__":
    main()
