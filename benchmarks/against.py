"""The passes against `jax.checkpoint` with its stock policies: memory, FLOPs, and the largest batch at equal memory.

    python benchmarks/against.py [MODEL...]

Every program is compiled for a CPU and not run. Temporaries are XLA's for the loss and its gradients in fp32, with the
scheduler that minimizes memory. A policy is around each layer, or around the whole loss for the U-Net. The budget is
the fewest temporaries of the two policies that save products. The largest batch takes at most the temporaries of the
plain program at the batch of the table, with the same choice. FLOPs are those of products and convolutions. LOSES marks
a row of ours if a policy needs fewer bytes and no more FLOPs, or fewer FLOPs and no more bytes than ours or the budget.
"""

import argparse
import functools
import os
import pathlib
import sys
import time

_FLAGS = "--xla_cpu_scheduler_type=CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED --xla_backend_optimization_level=0"
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_FLAGS}".strip()

import jax
import jax.numpy as jnp

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "tests" / "passes" / "foreign"))

from equinox_styles import unet

from hlat_jax import passes
from hlat_jax.facts.byte_sizes import format_bytes
from hlat_jax.passes import remat_pass
from hlat_jax.passes.products import live_jaxpr, total_flops

POLICIES = ("dots_saveable", "dots_with_no_batch_dims_saveable", "nothing_saveable")
CHUNK = "16MiB"
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


def block(p, x_BTD, *, heads, name):
    """Returns the result of a layer: pre-norm, in Llama's form or in that of the others."""
    is_llama, is_causal = name.startswith("llama"), name.startswith(("llama", "gpt"))
    normalize, (rows, length, width) = norm if is_llama else layer_norm, x_BTD.shape
    q, k, v = jnp.unstack((normalize(p["norm1"], x_BTD) @ p["qkv"]).reshape(rows, length, 3, heads, -1), axis=2)
    if is_llama:
        q, k = rotated(q), rotated(k)
    scores_BNTS = jnp.einsum("BTNH,BSNH->BNTS", q, k) / (width // heads) ** 0.5
    if is_causal:
        scores_BNTS = jnp.where(jnp.tril(jnp.ones((length, length), bool)), scores_BNTS, -1e30)
    mixed_BTNH = jnp.einsum("BNTS,BSNH->BTNH", jax.nn.softmax(scores_BNTS), v)
    x_BTD = x_BTD + mixed_BTNH.reshape(x_BTD.shape) @ p["out"]
    hidden = normalize(p["norm2"], x_BTD)
    gate = jax.nn.silu(hidden @ p["gate"]) * (hidden @ p["up"]) if is_llama else jax.nn.gelu(hidden @ p["up"])
    return x_BTD + gate @ p["down"]


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


def with_rows(batch, rows):
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((rows, *leaf.shape[1:]), leaf.dtype), batch)


def measured(loss, params, batch):
    """Returns (XLA's temporaries, FLOPs of all products) of the loss and its gradients."""
    traced = jax.jit(jax.value_and_grad(loss)).trace(params, batch)
    return traced.lower().compile().memory_analysis().temp_size_in_bytes, total_flops(live_jaxpr(traced))


def largest_batch(loss, params, batch, taken, limit):
    """Returns a number of rows that fits the limit, near the largest: on lines through two programs, in few programs.

    Args:
      loss, params, batch: a loss and the shapes of its arguments.
      taken: temporaries with these rows.
      limit: temporaries that are allowed.
    """
    start = jax.tree.leaves(batch)[0].shape[0]
    found, rows = {start: taken}, int(start * limit / taken)
    while rows not in found and len(found) < 4:
        found[rows] = measured(loss, params, with_rows(batch, rows))[0]
        (one, its), (other, their) = sorted(found.items(), key=lambda pair: abs(pair[1] - limit))[:2]
        rows = max(1, one + int((limit - its) // max(1, (their - its) / (other - one))))
    return max(rows for rows, taken in found.items() if taken <= limit)


def compare(name):
    """Prints the table of one model."""
    of_wrapper, params, batch = diffusion_unet() if name == "unet" else transformer(name)
    loss = of_wrapper(lambda fn: fn)
    plain, flops = measured(loss, params, batch)
    policies = {
        one: of_wrapper(functools.partial(jax.checkpoint, policy=getattr(jax.checkpoint_policies, one)))
        for one in POLICIES
    }
    theirs = {one: measured(fn, params, batch) for one, fn in policies.items()}
    budget = min(theirs[one][0] for one in POLICIES[:2])
    chunked = passes.chunk(loss, max_bytes=CHUNK)

    def fitted(fn):
        return lambda: remat_pass.fit(fn, params, batch, budget_bytes=budget).fn

    ours = {"passes.chunk": lambda: chunked, "passes.remat": fitted(loss), "chunk and remat": fitted(chunked)}
    rows = jax.tree.leaves(batch)[0].shape[0]
    print(f"{name}, {rows} rows: {flops:.3g} FLOP, budget {format_bytes(budget)}")
    print(f"  {'':34} {'temporaries':>12} {'of plain':>9} {'FLOPs more':>11} {'largest batch':>14}  CPU-s")
    for row in ("plain", *POLICIES, *ours):
        began, beaten = time.process_time(), False
        try:
            fn = ours[row]() if row in ours else policies.get(row, loss)
        except passes.BudgetNotMet:
            print(f"  {row:34} {'not met':>12}  LOSES", flush=True)
            continue
        taken, computed = theirs[row] if row in theirs else measured(fn, params, batch)
        if row in ours:
            allowed = taken if row == "passes.chunk" else budget  # fewer bytes than the budget are no advantage
            beaten = any(
                b <= allowed and f <= computed and (b < 0.99 * taken or f < 0.999 * computed)
                for b, f in theirs.values()
            )
        most = largest_batch(fn, params, batch, taken, plain)
        spent = time.process_time() - began
        print(
            f"  {row:34} {format_bytes(taken):>12} {taken / plain:9.2f} {computed / flops - 1:11.1%} {most:14} "
            f"{spent:6.0f}{'  LOSES' if beaten else ''}",
            flush=True,
        )


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=[*MODELS, "unet"], metavar="MODEL")
    for name in parser.parse_args().models:
        compare(name)


if __name__ == "__main__":
    main()
