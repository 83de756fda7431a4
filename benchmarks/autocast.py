"""What does autocast make of our fp32 decoder: products in bf16, bytes kept for the backward pass, the loss curve?

    python benchmarks/autocast.py [--config tiny] [--steps 300] [--policies bf16,fp16]
        [--layers N] [--seq_len N] [--peak_lr F]

Counts the products of the decoder's loss and of its gradient in the trace, by the dtype of their operands. Adds up what
the backward pass keeps (the residuals of `jax.vjp`, the parameters themselves left out), for each choice of `--remats`
and each loop over layers. Then trains for `--steps` on the text of the config, fp32 and autocast in turn on the same
batches from the same weights, and prints the means of the loss over spans of 20 steps. `fp32'` is fp32 from
weights rounded to bf16 once, at the start: how far two curves drift apart by themselves. `--steps 0` leaves that out.
Nothing is timed: XLA on CPU is slower in bf16 than in fp32.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import functools
import itertools
import statistics
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from hlat_jax import config as config_lib
from hlat_jax.batch import abstract_batch
from hlat_jax.cli import config_files
from hlat_jax.data.loader import TrainBatches
from hlat_jax.data.tokenizer import Tokenizer
from hlat_jax.model import abstract_params, init_params
from hlat_jax.ops import loss_scale as scaling
from hlat_jax.ops.choices import chosen_model
from hlat_jax.optimizer import adamw, decay_mask, global_norm, learning_rate
from hlat_jax.parallel.sharding import make_layout
from hlat_jax.passes.autocast import autocast
from hlat_jax.passes.jaxpr import equations
from hlat_jax.precision import NEAREST, POLICIES, cast_tree
from hlat_jax.program import model_loss
from hlat_jax.resolve import resolve

SPAN_STEPS = 20
FP32 = REFERENCE, NUDGED = "fp32", "fp32'"


def fp32_loss(config: config_lib.Config) -> Callable[[Any, Any], tuple[jax.Array, jax.Array]]:
    """Returns our loss in fp32, on one device."""
    layout = make_layout(config_lib.ParallelConfig(), jax.devices()[:1])
    return model_loss(chosen_model(config, layout), layout, compute=jnp.float32, z_loss_weight=0.0)


def product_dtypes(fn: Callable, *args: Any) -> collections.Counter:
    """Returns how many products of a trace have operands of which dtypes."""
    products = (eqn for eqn, _ in equations(jax.make_jaxpr(fn)(*args).jaxpr) if eqn.primitive.name == "dot_general")
    return collections.Counter(" x ".join(str(var.aval.dtype) for var in eqn.invars) for eqn in products)


def residual_bytes(loss: Callable, params: Any, batch: Any) -> int:
    """Returns the bytes that the backward pass of a loss keeps, beside the parameters."""

    def kept_by(params, batch):
        return jax.vjp(lambda params: loss(params, batch)[0], params)[1]

    kept = jax.make_jaxpr(kept_by)(params, batch).jaxpr
    return sum(var.aval.size * var.aval.dtype.itemsize for var in {*kept.outvars} - {*kept.invars})


def print_trace(config: config_lib.Config, policies: list[str], remats: list[str]) -> None:
    """Prints the tables of products and of residuals."""
    params, batch = abstract_params(config.model), abstract_batch(config.data.batch_size, config.data.seq_len)
    print(f"{'products':26}{'forward':>28}{'forward and backward':>28}")
    loss = fp32_loss(config)
    for name in ("fp32", *policies):
        fn = loss if name == "fp32" else autocast(loss, name)
        forward = product_dtypes(fn, params, batch)
        both = product_dtypes(jax.grad(fn, has_aux=True), params, batch)
        cells = [", ".join(f"{count} {dtypes}" for dtypes, count in found.items()) for found in (forward, both)]
        print(f"{name:26}{cells[0]:>28}{cells[1]:>28}", flush=True)
    print(f"\n{'kept for backward, MiB':26}" + "".join(f"{name:>14}" for name in ("fp32", *policies)))
    for loop, remat in itertools.product(("scan", "unroll"), remats):
        model = dataclasses.replace(config.model, layer_loop=loop, remat=remat)
        loss = fp32_loss(dataclasses.replace(config, model=model))
        kept = [residual_bytes(loss, params, batch)]
        kept += [residual_bytes(autocast(loss, name), params, batch) for name in policies]
        cells = [f"{kept[0] / 2**20:14.2f}"]
        cells += [f"{bytes_ / 2**20:8.2f} {bytes_ / kept[0] - 1:+.0%}".rjust(14) for bytes_ in kept[1:]]
        print(f"{loop + ', remat=' + remat:26}" + "".join(cells), flush=True)


def step_of(config: config_lib.Config, policy: str) -> tuple[Callable, Any]:
    """Returns (jitted (state, batch, rate) -> (state, loss), initial state) of fp32 weights and moments.

    fp16 has a loss scale that moves, and steps whose gradients are not finite are skipped.
    """
    sums = fp32_loss(config)
    if policy not in FP32:
        sums = autocast(sums, policy)

    def mean(params, batch):
        total, count = sums(params, batch)
        return total / count

    optimizer = adamw(
        config.optimizer,
        policy=POLICIES["fp32"],
        decays=decay_mask(abstract_params(config.model), config.optimizer.decay),
    )

    @functools.partial(jax.jit, donate_argnums=0)
    def step(state, batch, rate):
        params, inner, scale = state
        if policy == "fp16":
            loss, grads, finite = scaling.value_and_grad(mean)(scale, params, batch)
        else:
            loss, grads = jax.value_and_grad(mean)(params, batch)
            finite = scaling.all_finite((loss, grads))
        extra = {"learning_rate": rate, "grad_norm": global_norm(grads), "finite": finite, "rounding": NEAREST}
        updates, inner = optimizer.update(grads, inner, params, **extra)
        params = scaling.choose(finite, jax.tree.map(jnp.add, params, updates), params)
        return (params, inner, scaling.adjust(scale, finite) if policy == "fp16" else scale), loss

    params = init_params(config.model, jax.random.key(config.train.seed))
    if policy == NUDGED:
        params = cast_tree(cast_tree(params, jnp.bfloat16), jnp.float32)
    return step, (params, optimizer.init(params), scaling.initial(scale=2.0**15 if policy == "fp16" else 1.0))


def curves(config: config_lib.Config, policies: list[str], num_steps: int) -> dict[str, list[float]]:
    """Returns the loss of every step, of each policy on the same batches."""
    runs = {policy: step_of(config, policy) for policy in (*FP32, *policies)}
    losses: dict[str, list[float]] = {policy: [] for policy in runs}
    with contextlib.closing(TrainBatches(config.data, tokenizer=Tokenizer(config.data.tokenizer))) as batches:
        for number in range(num_steps):
            batch, _ = next(batches)
            rate = jnp.float32(learning_rate(number, config.optimizer))
            for policy, (step, state) in runs.items():
                state, loss = step(state, batch, rate)
                runs[policy] = step, state
                losses[policy].append(float(loss))
    return losses


def print_curves(losses: dict[str, list[float]]) -> None:
    """Prints means over spans of steps, each beside its distance from fp32, and the largest distance."""
    policies = [policy for policy in losses if policy != REFERENCE]
    print(f"\n{'loss, mean of steps':26}{'fp32':>14}" + "".join(f"{policy:>18}" for policy in policies))
    worst = dict.fromkeys(policies, 0.0)
    for first in range(0, len(losses["fp32"]), SPAN_STEPS):
        means = {policy: statistics.mean(found[first : first + SPAN_STEPS]) for policy, found in losses.items()}
        away = {policy: means[policy] / means["fp32"] - 1 for policy in policies}
        worst = {policy: max(worst[policy], abs(away[policy])) for policy in policies}
        last = min(first + SPAN_STEPS, len(losses["fp32"]))
        cells = "".join(f"{means[policy]:9.4f} {away[policy]:+8.3%}" for policy in policies)
        print(f"{f'{first} to {last - 1}':26}{means['fp32']:14.4f}{cells}")
    print(f"{'largest distance':40}" + "".join(f"{worst[policy]:18.3%}" for policy in policies))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="tiny")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--layers", type=int, help="of the model that is trained, in place of the config's")
    parser.add_argument("--seq_len", type=int, help="likewise")
    parser.add_argument("--peak_lr", type=float, help="likewise")
    parser.add_argument("--policies", default="bf16")
    parser.add_argument("--remats", default="none,products,selective")
    args = parser.parse_args()
    c = config_files.load(args.config)
    c.precision.policy = "fp32"
    policies = args.policies.split(",")
    print_trace(resolve(c), policies, args.remats.split(",") if args.remats else [])
    if args.steps:
        c.model.num_layers = args.layers or c.model.num_layers
        c.data.seq_len = args.seq_len or c.data.seq_len
        c.optimizer.peak_lr = args.peak_lr or c.optimizer.peak_lr
        print_curves(curves(resolve(c), policies, args.steps))


if __name__ == "__main__":
    main()
