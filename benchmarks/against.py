"""The passes against `jax.checkpoint` and PyTorch: memory, FLOPs, the largest batch at equal memory, and time.

    python benchmarks/against.py [MODEL...] [--run] [--layers=N] [--rounds=3]

Bytes are the most above parameters and batch, for the loss and its gradients in fp32. In JAX they are XLA's temporaries
and results, compiled for a CPU, with the scheduler that minimizes memory, and not run. In PyTorch they are the peak of
the allocator. A policy is around each layer, or around the whole loss for the U-Net. MaxText's order is the policy that
MaxText's estimator would select. The budget is the fewest bytes of the two policies that save products. The largest
batch takes at most the bytes of the plain program at the batch of the table, with the same choice. FLOPs are those of
products and convolutions. LOSES marks a row of ours if another row needs fewer bytes and no more FLOPs, or fewer FLOPs
and no more bytes than ours or the budget.

`--run` adds the rows of PyTorch and a column of time: CPU-seconds of a step with two rows, relative to plain JAX.
Programs take turns. The value is the median over `--rounds`. Loss and norm of the gradients must be equal. `--layers`
makes the transformers smaller. On a GPU the bytes are those of the GPU, and the time is that of a clock (not run).
"""

import argparse
import functools
import os
import pathlib
import statistics
import sys
import time

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # PyTorch shares the GPU
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # time is CPU-seconds: idle threads of PyTorch must not spin

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "tests" / "passes" / "foreign"))
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from equinox_styles import unet

from hlat_jax import passes
from hlat_jax.facts.byte_sizes import format_bytes
from hlat_jax.passes import remat_pass
from hlat_jax.passes.products import live_jaxpr, total_flops

POLICIES = ("dots_saveable", "dots_with_no_batch_dims_saveable", "nothing_saveable")
CHUNK = "16MiB"
TIMED_ROWS = 2
TOLERANCE = 1e-4  # of losses and of norms of gradients in fp32, relative
# layers, width, width of the MLP, heads, vocabulary or classes, positions, rows; ViT has patches in place of tokens
MODELS = {
    "bert-base": (12, 768, 3072, 12, 30522, 128, 16),
    "gpt2": (12, 768, 3072, 12, 50257, 256, 8),
    "vit-base": (12, 768, 3072, 12, 1000, 196, 8),
    "llama-160m": (12, 768, 2048, 12, 32000, 256, 8),
}


def norm(scale, x):
    return x * jax.lax.rsqrt(jnp.mean(jnp.square(x), -1, keepdims=True) + 1e-5) * scale


def layer_norm(scale, x):
    return norm(scale, x - jnp.mean(x, -1, keepdims=True))


def rotated(x_BTNH):
    angles = jnp.arange(x_BTNH.shape[1])[:, None] * 1e4 ** -jnp.linspace(0, 1, x_BTNH.shape[3] // 2)
    sin, cos = jnp.sin(angles)[:, None], jnp.cos(angles)[:, None]
    left, right = jnp.split(x_BTNH, 2, axis=-1)
    return jnp.concatenate([left * cos - right * sin, left * sin + right * cos], -1)


def block(p, x_BTD, *, heads, name, mark=lambda x, _: x):
    """Returns the result of a layer: pre-norm, in Llama's form or the other. `mark` names values as MaxText does."""
    is_llama, is_causal = name.startswith("llama"), name.startswith(("llama", "gpt"))
    normalize, (rows, length, width) = norm if is_llama else layer_norm, x_BTD.shape
    qkv = mark(normalize(p["norm1"], x_BTD) @ p["qkv"], "qkv_proj")
    q, k, v = jnp.unstack(qkv.reshape(rows, length, 3, heads, -1), axis=2)
    if is_llama:
        q, k = rotated(q), rotated(k)
    scores_BNTS = jnp.einsum("BTNH,BSNH->BNTS", q, k) / (width // heads) ** 0.5
    if is_causal:
        scores_BNTS = jnp.where(jnp.tril(jnp.ones((length, length), bool)), scores_BNTS, -1e30)
    mixed_BTNH = jnp.einsum("BNTS,BSNH->BTNH", jax.nn.softmax(scores_BNTS), v)
    x_BTD = x_BTD + mark(mark(mixed_BTNH.reshape(x_BTD.shape), "context") @ p["out"], "out_proj")
    hidden = normalize(p["norm2"], x_BTD)
    gate = jax.nn.silu(mark(hidden @ p["gate"], "mlpwi_0")) if is_llama else None
    up = mark(hidden @ p["up"], "mlpwi_1" if is_llama else "mlpwi")
    return x_BTD + mark((gate * up if is_llama else jax.nn.gelu(up)) @ p["down"], "mlpwo")


def loss_of(name, wrap, params, batch):
    """Returns the mean cross-entropy of a transformer, with `wrap` around each layer of a scan."""
    layer = wrap(functools.partial(block, heads=MODELS[name][3], name=name))
    tokens, targets = batch
    x_BTD = tokens @ params["patches"] if name.startswith("vit") else params["tokens"][tokens]
    x_BTD = x_BTD + params["positions"]
    x_BTD = jax.lax.scan(lambda x, p: (layer(p, x), None), x_BTD, params["layers"])[0]
    if name.startswith("vit"):
        x_BTD = jnp.mean(x_BTD, 1)
    logits = layer_norm(params["norm"], x_BTD) @ params["head"]
    return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits), targets[..., None], -1))


def transformer(name):
    """Returns (function from a wrapper of layers to the loss, shapes of parameters, shapes of a batch)."""
    layers, width, inner, _, vocab, length, rows = MODELS[name]
    shape = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.float32)
    stacked = {"norm1": (width,), "norm2": (width,), "qkv": (width, 3 * width), "out": (width, width)}
    stacked |= {"gate": (width, inner)} if name.startswith("llama") else {}
    stacked |= {"up": (width, inner), "down": (inner, width)}
    params = {"layers": {key: shape((layers, *dims)) for key, dims in stacked.items()}}
    first = {"patches": shape((width, width))} if name.startswith("vit") else {"tokens": shape((vocab, width))}
    params |= first | {"positions": shape((length, width)), "norm": shape((width,)), "head": shape((width, vocab))}
    ids = jax.ShapeDtypeStruct((rows, length), jnp.int32)
    batch = (
        (shape((rows, length, width)), jax.ShapeDtypeStruct((rows,), jnp.int32)) if "patches" in first else (ids, ids)
    )
    return lambda wrap: functools.partial(loss_of, name, wrap), params, batch


def diffusion_unet():
    """As `transformer`, for a U-Net that predicts noise; the wrapper is around the whole loss."""
    loss, params, batch = unet()
    return lambda wrap: wrap(loss), params, batch


def in_maxtexts_order(name, of_wrapper, params, batch, budget):
    """Returns (bytes, FLOPs, function): the first of the policies of MaxText's estimator that fits, or the last.

    The estimator drops one named product after another, the one with the largest dims first. Offloading is left out.

    Source: maxtext 0.2.5, `utils/estimator.py`.
    """
    _, width, inner, _, _, length, _ = MODELS[name]
    scores = {"mlpwo": (inner, width), "qkv_proj": (width, 3 * width), "out_proj": (width, width)}
    scores |= {"context": (length, width)}
    scores |= dict.fromkeys(("mlpwi_0", "mlpwi_1") if name.startswith("llama") else ("mlpwi",), (width, inner))
    order = sorted(scores, key=scores.get, reverse=True)

    def wrap(layer, saved):
        policy = jax.checkpoint_policies.save_only_these_names(*saved)
        return jax.checkpoint(functools.partial(layer, mark=checkpoint_name), policy=policy)

    for start in range(len(order) + 1):
        fn = of_wrapper(functools.partial(wrap, saved=order[start:]))
        taken, flops = measured(fn, params, batch)
        if taken <= budget:
            break
    return taken, flops, fn


def with_rows(batch, rows):
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((rows, *leaf.shape[1:]), leaf.dtype), batch)


def jitted(loss, **options):
    """Returns the program of a loss and its gradients, scheduled for memory as XLA does on accelerators."""
    options |= {"xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED"}
    is_cpu = jax.default_backend() == "cpu"
    return jax.jit(jax.value_and_grad(loss), compiler_options=options if is_cpu else None)


def not_run(loss):
    """As `jitted`, compiled in less time."""
    return jitted(loss, xla_backend_optimization_level=0)


def measured(loss, params, batch):
    """Returns (bytes of XLA's temporaries and results, FLOPs of all products) of the loss and its gradients."""
    traced = not_run(loss).trace(params, batch)
    memory = traced.lower().compile().memory_analysis()
    return memory.temp_size_in_bytes + memory.output_size_in_bytes, total_flops(live_jaxpr(traced))


def largest_batch(loss, params, batch, taken, limit):
    """Returns a number of rows that fits the limit, near the largest: on lines through two programs, in few programs.

    Args:
      loss, params, batch: a loss and the shapes of its arguments.
      taken: bytes with these rows.
      limit: bytes that are allowed.
    """
    start = jax.tree.leaves(batch)[0].shape[0]
    found, rows = {start: taken}, int(start * limit / taken)
    while rows not in found and len(found) < 4:
        found[rows] = measured(loss, params, with_rows(batch, rows))[0]
        (one, its), (other, their) = sorted(found.items(), key=lambda pair: abs(pair[1] - limit))[:2]
        rows = max(1, one + int((limit - its) // max(1, (their - its) / (other - one))))
    return max(rows for rows, taken in found.items() if taken <= limit)


def drawn(name, params, batch):
    """Returns (parameters, function from a number of rows to a batch), with arrays of NumPy."""
    rng = np.random.default_rng(0)

    def weight(leaf):
        return (rng.normal(size=leaf.shape) * 0.02 + (leaf.ndim == 1)).astype(np.float32)

    def array(leaf):
        if leaf.dtype == jnp.int32:
            return rng.integers(0, MODELS[name][4], leaf.shape, np.int32)
        return rng.normal(size=leaf.shape).astype(np.float32)

    return jax.tree.map(weight, params), lambda rows: jax.tree.map(array, with_rows(batch, rows))


def torch_contenders(name, params):
    """Returns name -> step of PyTorch."""
    from benchmarks import against_torch as pytorch

    if name == "unet":
        loss, params = pytorch.unet_loss, pytorch.unet_params(params)
    else:
        loss = functools.partial(pytorch.transformer_loss, heads=MODELS[name][3], name=name)
        params = pytorch.transformer_params(params)
    return {one: pytorch.Contender(loss, params, budget) for one, budget in pytorch.CONTENDERS.items()}


def torch_row(contender, batch_of, rows, limit):
    """Returns (peak bytes, FLOPs, the largest batch on a line through two batches)."""
    from benchmarks.against_torch import as_torch

    taken = contender.peak_bytes(as_torch(batch_of(rows)))
    flops = contender.flops(as_torch(batch_of(rows)))
    other = rows // 2 if rows >= 4 else 2 * rows  # one row would be compiled again
    slope = (taken - contender.peak_bytes(as_torch(batch_of(other)))) / (rows - other)
    return taken, flops, int(rows + (limit - taken) / slope)


def times(programs, params, batch, contenders, *, rounds):
    """Returns name -> CPU-seconds of a step, the median over the rounds, in which all programs take turns.

    Raises:
      ValueError: a loss or norm of gradients differs from the first program's.
    """
    steps = {
        name: functools.partial(jitted(fn).lower(params, batch).compile(), params, batch)
        for name, fn in programs.items()
    }
    if contenders:
        from benchmarks.against_torch import as_torch

        steps |= {name: functools.partial(fn, as_torch(batch)) for name, fn in contenders.items()}
    is_cpu = jax.default_backend() == "cpu"
    clock, spent, first = (time.process_time if is_cpu else time.perf_counter), {name: [] for name in steps}, None
    for number in range(rounds + 1):
        for name, step in steps.items():
            began = clock()
            found = step()
            value = found[0].item()  # waits
            if name not in contenders:
                jax.block_until_ready(found)
            if number:
                spent[name].append(clock() - began)
            else:  # the first calls allocate and compile
                leaves = [
                    np.asarray(leaf if name not in contenders else leaf.cpu()) for leaf in jax.tree.leaves(found[1])
                ]
                result = np.array([value, np.sqrt(sum(np.vdot(leaf, leaf) for leaf in leaves))])
                first = result if first is None else first
                if not np.allclose(result, first, rtol=TOLERANCE, atol=0):
                    raise ValueError(f"loss and norm of gradients of {name} are {result}, and not {first}.")
    return {name: statistics.median(each) for name, each in spent.items()}


def compare(name, *, is_run=False, rounds=3):
    """Prints the table of one model, and returns name of a row -> (bytes, FLOPs, largest batch)."""
    of_wrapper, params, batch = diffusion_unet() if name == "unet" else transformer(name)
    loss, rows = of_wrapper(lambda fn: fn), jax.tree.leaves(batch)[0].shape[0]
    plain, flops = measured(loss, params, batch)
    policies = {
        one: of_wrapper(functools.partial(jax.checkpoint, policy=getattr(jax.checkpoint_policies, one)))
        for one in POLICIES
    }
    found = {one: (*measured(fn, params, batch), fn) for one, fn in policies.items()}
    budget = min(found[one][0] for one in POLICIES[:2])
    if name != "unet":
        found["MaxText's order"] = in_maxtexts_order(name, of_wrapper, params, batch, budget)
    contenders = {}
    if is_run:
        params, batch_of = drawn(name, params, batch)
        contenders = torch_contenders(name, params)
        others = {one: torch_row(fn, batch_of, rows, plain) for one, fn in contenders.items()}
    chunked = passes.chunk(loss, max_bytes=CHUNK)
    grads = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(params))  # in every program's bytes

    def fitted(fn):
        return remat_pass.fit(fn, params, batch, budget_bytes=budget - grads, step=not_run).fn

    ours = {
        "passes.chunk": lambda: chunked,
        "chunk and residuals": lambda: passes.select_residuals(chunked),
        "passes.remat": lambda: fitted(loss),
        "chunk and remat": lambda: fitted(chunked),
    }
    for row, make in ours.items():
        try:
            found[row] = (*measured(fn := make(), params, batch), fn)
        except passes.BudgetNotMet:
            found[row] = None
    found = {"plain": (plain, flops, loss)} | found
    table = {}
    for row, one in found.items():
        table[row] = one and (*one[:2], largest_batch(one[2], params, batch, one[0], plain))
    table |= others if is_run else {}
    spent = {}
    if is_run:
        programs = {row: one[2] for row, one in found.items() if one}
        spent = times(programs, params, batch_of(TIMED_ROWS), contenders, rounds=rounds)
    print(f"{name}, {rows} rows: {flops:.3g} FLOP, budget {format_bytes(budget)}, gradients {format_bytes(grads)}")
    print(f"  {'':34} {'bytes':>12} {'of plain':>9} {'FLOPs more':>11} {'largest batch':>14} {'time':>6}")
    for row, one in table.items():
        if one is None:
            print(f"  {row:34} {'not met':>12}  LOSES")
            continue
        taken, computed, most = one
        allowed = budget if row.endswith("remat") else taken  # fewer bytes than the budget are no advantage
        is_beaten = row in ours and any(
            b <= allowed and f <= computed and (b < 0.99 * taken or f < 0.999 * computed)
            for other, (b, f, _) in ((other, figures) for other, figures in table.items() if figures)
            if other not in ours
        )
        ratio = f"{spent[row] / spent['plain']:6.2f}" if spent else " " * 6
        print(
            f"  {row:34} {format_bytes(taken):>12} {taken / plain:9.2f} {computed / flops - 1:11.1%} {most:14} {ratio}"
            f"{'  LOSES' if is_beaten else ''}",
            flush=True,
        )
    return table


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "models", nargs="*", default=[*MODELS, "unet"], metavar="MODEL", help=", ".join(MODELS) + ", unet"
    )
    parser.add_argument("--run", action="store_true")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    unknown = sorted({*args.models} - {*MODELS, "unet"})
    if unknown:
        parser.error(f"MODEL: {', '.join(unknown)}: there are {', '.join(MODELS)}, unet")
    if args.layers is not None and args.layers < 1:
        parser.error(f"--layers: {args.layers}: at least 1")
    if args.layers:
        MODELS.update({name: (args.layers, *sizes[1:]) for name, sizes in MODELS.items()})
    for name in args.models:
        compare(name, is_run=args.run, rounds=args.rounds)


if __name__ == "__main__":
    main()
