"""Do the copies of norm weights on tensor-parallel ranks drift apart under stochastic rounding, and does it matter?

    python -m benchmarks.replication.norm_drift [--seeds=3] [--steps=1000] [--jobs=2] [--results=FILE]

A Llama on eight ranks with sequence parallelism, as HLAT's, written out: each rank has its shards of the matrices and
its own copy of the norms' weights, which it applies to its eighth of the sequence; `jax.vmap` with an axis name stands
for the ranks. The embedding is held once. Weights and moments are bf16 and rounded stochastically at each write, as
under `bf16_sr`; arithmetic is fp32. The gradient of a norm's weight is summed over the ranks, so that all ranks have
the same one. Each rounds what it makes of it

- "shared": with the same bits, as hlat_jax does (its bits are a hash of the index in the whole array);
- "own": each with bits of its own, as cores do that round in hardware;
- "resync": with bits of its own, and rank 0's copy is given to all every 100 steps.

Writes a row for each arm and seed: the loss, and every 50 steps, before a copy is given to all, the spread of the
copies (root of the mean over weights of the variance over ranks), the widest difference, and the spread of a random
walk of the roundings: root of the sum of f (1 - f) ulp^2, where an update ends f of an ulp above a number of bf16. Each
run has one core. An interrupted command makes the runs anew that are not recorded.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
import json
import multiprocessing
import os
import pathlib
import signal
import time
from concurrent import futures

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.replication.base import NUM_STEPS, get_config
from hlat_jax import precision
from hlat_jax.data.formats.paths import asset_path
from hlat_jax.data.loader import TrainBatches
from hlat_jax.data.tokenizer import Tokenizer
from hlat_jax.resolve import resolve

RESULTS = pathlib.Path(__file__).resolve().parent / "norm_drift.jsonl"
ARMS = ("shared", "own", "resync")
RANKS, LAYERS, DIM, HEAD, MLP = 8, 4, 128, 16, 352  # a head of 16 and 44 columns of the MLP on each rank
RATE, WARMUP, HORIZON, FLOOR = 3e-3, 50, 1163, 0.1
BETA1, BETA2, EPS, DECAY, CLIP = 0.9, 0.95, 1e-8, 0.1, 1.0
RESYNC_STEPS = 100
SETTINGS = {name: value for name, value in vars().items() if name.isupper() and isinstance(value, (int, float))}
SETTINGS |= {"data": get_config().data.to_dict()}


REPLICATED = ("attention_norm", "mlp_norm", "final_norm")  # [ranks, ...]: a copy on each; of matrices, a shard
NORM_PARTS = ("params", "mean", "square")


def init_params(seed: int) -> dict[str, jax.Array]:
    """Returns bf16 weights: [ranks, layers, ...], the embedding [vocabulary, width]."""
    config = get_config().model
    rng, down = np.random.default_rng(seed), 0.02 / np.sqrt(2 * LAYERS)
    shapes = {
        "qkv": ((LAYERS, DIM, 3, HEAD), 0.02),
        "out": ((LAYERS, HEAD, DIM), down),
        "gate_up": ((LAYERS, DIM, 2, MLP // RANKS), 0.02),
        "down": ((LAYERS, MLP // RANKS, DIM), down),
        "head": ((DIM, config.vocab_size // RANKS), 0.02),
    }
    params = {name: rng.normal(0, std, (RANKS, *shape)) for name, (shape, std) in shapes.items()}
    params |= {name: np.ones((RANKS, LAYERS, DIM)) for name in REPLICATED[:2]} | {"final_norm": np.ones((RANKS, DIM))}
    params["embed"] = rng.normal(0, 0.02, (config.vocab_size, DIM))
    return {name: jnp.asarray(value, jnp.bfloat16) for name, value in params.items()}


def _normalized(x: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-5)


def _rotated(x_BTH: jax.Array) -> jax.Array:
    """Returns queries or keys with RoPE."""
    angles = jnp.arange(x_BTH.shape[1])[:, None] * 10000.0 ** (-jnp.arange(0, HEAD, 2) / HEAD)
    left, right = jnp.split(x_BTH, 2, axis=-1)
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    return jnp.concatenate([left * cos - right * sin, right * cos + left * sin], axis=-1)


def loss_of(params: dict[str, jax.Array], row_BT: jax.Array) -> jax.Array:
    """Returns the mean loss in nats per token of fp32 weights, as eight ranks compute it together."""
    own = dict(params)
    embed, num_tokens = own.pop("embed"), row_BT.shape[1]

    def on_rank(rank: dict[str, jax.Array]) -> jax.Array:
        part = num_tokens // RANKS
        start = jax.lax.axis_index("rank") * part

        def norm(x: jax.Array, scale: jax.Array) -> jax.Array:
            """Normalizes the rank's part of the sequence, and gathers those of all ranks."""
            own_part = _normalized(jax.lax.dynamic_slice_in_dim(x, start, part, axis=1)) * scale
            return jnp.concatenate(list(jax.lax.all_gather(own_part, "rank")), axis=1)

        x = embed[row_BT]
        visible = jnp.tril(jnp.ones((num_tokens, num_tokens), bool))
        for at in range(LAYERS):
            qkv = jnp.einsum("BTD,DcH->cBTH", norm(x, rank["attention_norm"][at]), rank["qkv"][at])
            scores = jnp.einsum("BTH,BSH->BTS", _rotated(qkv[0]), _rotated(qkv[1])) / np.sqrt(HEAD)
            weights = jax.nn.softmax(jnp.where(visible, scores, -jnp.inf))
            x += jax.lax.psum(weights @ qkv[2] @ rank["out"][at], "rank")
            gate, up = jnp.einsum("BTD,DcF->cBTF", norm(x, rank["mlp_norm"][at]), rank["gate_up"][at])
            x += jax.lax.psum(jax.nn.silu(gate) * up @ rank["down"][at], "rank")
        logits_BTV = norm(x, rank["final_norm"])[:, :-1] @ rank["head"]
        logits_BTV = jnp.concatenate(list(jax.lax.all_gather(logits_BTV, "rank")), axis=-1)
        picked = jnp.take_along_axis(logits_BTV, row_BT[:, 1:, None], axis=-1)[..., 0]
        return jnp.mean(jax.nn.logsumexp(logits_BTV, axis=-1) - picked)

    return jax.vmap(on_rank, axis_name="rank", out_axes=None)(own)


def rate_at(step: jax.Array) -> jax.Array:
    """Returns the learning rate of update `step`, from 0: HLAT's schedule."""
    cosine = 0.5 * (1 + jnp.cos(jnp.pi * (step - WARMUP) / (HORIZON - WARMUP)))
    return RATE * jnp.where(step < WARMUP, step / WARMUP, jnp.maximum(FLOOR, cosine))


@functools.partial(jax.jit, static_argnames="arm", donate_argnums=0)
def train_step(state: dict, row_BT: jax.Array, words: tuple, arm: str) -> tuple[dict, jax.Array]:
    """Returns (state, loss). State: params, mean, square, all bf16; walked: variance of the roundings of norms."""
    step, seed = words
    full = {name: value.astype(jnp.float32) for name, value in state["params"].items()}
    loss, grads = jax.value_and_grad(loss_of)(full, row_BT)
    for name in REPLICATED:  # each rank's part of the gradient, summed over the ranks
        grads[name] = jnp.broadcast_to(grads[name].sum(0), grads[name].shape)
    squares = [jnp.sum(grad[0] ** 2 if name in REPLICATED else grad**2) for name, grad in grads.items()]
    scale = jnp.minimum(1.0, CLIP / jnp.sqrt(sum(squares)))
    new: dict = {"params": {}, "mean": {}, "square": {}, "walked": dict(state["walked"])}
    for name, grad in grads.items():

        def write(value: jax.Array, part: str, name: str = name) -> jax.Array:
            shared = arm == "shared" and name in REPLICATED
            bits = precision.random_bits((seed, step), f"{part}/{name}", value.shape[1:] if shared else value.shape)
            return precision.stochastic_round(value, jnp.bfloat16, bits=jnp.broadcast_to(bits, value.shape))

        weight = full[name]
        mean = BETA1 * state["mean"][name].astype(jnp.float32) + (1 - BETA1) * scale * grad
        square = BETA2 * state["square"][name].astype(jnp.float32) + (1 - BETA2) * (scale * grad) ** 2
        count = step.astype(jnp.float32) + 1
        corrected = mean / (1 - BETA1**count) / (jnp.sqrt(square / (1 - BETA2**count)) + EPS)
        update = rate_at(step) * (corrected + DECAY * weight)
        new["params"][name] = write(weight - update, "params")
        new["mean"][name], new["square"][name] = write(mean, "mean"), write(square, "square")
        if name in REPLICATED:
            ulp = 2.0 ** (jnp.floor(jnp.log2(jnp.abs(weight[0] - update[0]))) - 7)
            above = (weight[0] - update[0]) / ulp % 1
            new["walked"][name] += above * (1 - above) * ulp**2
    return new, loss


def spread_of(state: dict) -> dict[str, float]:
    """Returns how far the copies of the norms' weights are apart, and a random walk's expectation of it."""
    copies = {name: np.asarray(state["params"][name], np.float64).reshape(RANKS, -1) for name in REPLICATED}
    values = np.concatenate(list(copies.values()), axis=1)
    walked = np.concatenate([np.asarray(state["walked"][name]).ravel() for name in REPLICATED])
    return {
        "spread": float(np.sqrt(values.var(0, ddof=1).mean())),
        "widest": float(np.ptp(values, axis=0).max()),
        "walk": float(np.sqrt(walked.mean())),
    }


def held_out(tokenizer: Tokenizer, text: str) -> list[np.ndarray]:
    """Returns the held-out documents, one after another, as batches of rows; the last tokens fill none."""
    lines = asset_path(text.removeprefix("package:")).read_text(encoding="utf-8").splitlines()
    ids = np.concatenate([[tokenizer.eos_id, *tokenizer.encode(json.loads(line)["text"])] for line in lines])
    data = get_config().data
    rows = ids[: len(ids) // data.seq_len * data.seq_len].astype(np.int32).reshape(-1, data.seq_len)
    return np.array_split(rows, range(data.batch_size, len(rows), data.batch_size))


def train(arm: str, seed: int, num_steps: int) -> dict:
    """Returns the row of results of one run."""
    config = get_config()
    config.data.seed = 1234 + seed
    settings = resolve(config).data
    tokenizer = Tokenizer(settings.tokenizer)
    params = init_params(seed)
    zeros = {name: jnp.zeros_like(value) for name, value in params.items()}
    walked = {name: jnp.zeros(params[name].shape[1:]) for name in REPLICATED}
    state = {"params": params, "mean": zeros, "square": dict(zeros), "walked": walked}
    state, losses, spreads, began_cpu_s = jax.tree.map(jnp.copy, state), [], [], time.process_time()
    with contextlib.closing(TrainBatches(settings, tokenizer=tokenizer)) as batches:
        for step in range(num_steps):
            batch, _ = next(batches)
            words = (np.uint32(step), np.uint32(seed))
            state, loss = train_step(state, batch.tokens, words, arm)
            losses.append(loss)
            if (step + 1) % 50 == 0:
                spreads.append(spread_of(state))
            if arm == "resync" and (step + 1) % RESYNC_STEPS == 0:
                state["walked"] = {name: jnp.zeros_like(value) for name, value in state["walked"].items()}
                for part, name in itertools.product(NORM_PARTS, REPLICATED):
                    state[part][name] = jnp.broadcast_to(state[part][name][:1], state[part][name].shape)
    evaluate = jax.jit(loss_of)
    full = {name: value.astype(jnp.float32) for name, value in state["params"].items()}
    evaluated = held_out(tokenizer, config.data.validation)
    sums = [float(evaluate(full, rows)) * len(rows) for rows in evaluated]
    eval_loss = sum(sums) / sum(map(len, evaluated))
    losses = np.asarray(losses, np.float64).reshape(-1, 20).mean(1)
    return {
        "arm": arm,
        "seed": seed,
        "steps": num_steps,
        "settings": SETTINGS,
        "eval_loss": eval_loss,
        "loss": [round(float(loss), 4) for loss in losses],
        **{key: [round(spread[key], 6) for spread in spreads] for key in spreads[0]},
        "cpu_s": round(time.process_time() - began_cpu_s),
    }


def read_results(path: pathlib.Path, num_steps: int = NUM_STEPS) -> dict[tuple[str, int], dict]:
    """Returns (arm, seed) -> row. Raises ValueError for a row of other settings or steps."""
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    for row in rows:
        if (row["settings"], row["steps"]) != (SETTINGS, num_steps):
            raise ValueError(f"{path}: {row['arm']}, seed {row['seed']} has other settings; give --results=FILE.")
    return {(row["arm"], row["seed"]): row for row in rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=NUM_STEPS, help="a multiple of 100")
    parser.add_argument(
        "--jobs", type=int, default=len(os.sched_getaffinity(0)), help="runs at once, at most one a core"
    )
    parser.add_argument("--results", type=pathlib.Path, default=RESULTS)
    values = parser.parse_args()
    if values.jobs < 1:
        parser.error(f"--jobs={values.jobs} must be at least 1.")
    if values.steps % RESYNC_STEPS:
        parser.error(f"--steps={values.steps} must be a multiple of {RESYNC_STEPS}.")
    try:
        done = read_results(values.results, values.steps)
    except ValueError as error:
        parser.error(str(error))
    waiting = [one for one in itertools.product(ARMS, range(values.seeds)) if one not in done]
    context, cores = multiprocessing.get_context("spawn"), sorted(os.sched_getaffinity(0))[: values.jobs]
    queue = context.SimpleQueue()
    for core in cores:
        queue.put(core)
    with futures.ProcessPoolExecutor(len(cores), context, initializer=_take_core, initargs=(queue,)) as pool:
        try:
            for future in futures.as_completed([pool.submit(train, *one, values.steps) for one in waiting]):
                row = future.result()
                with values.results.open("a") as out:
                    print(json.dumps(row), file=out)
                name, end = f"{row['arm']}-{row['seed']}", f"{row['eval_loss']:.4f}, spread {row['spread'][-1]:.4f}"
                print(f"{name}: {end}, {row['cpu_s']} CPU-s", flush=True)
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def _take_core(queue: multiprocessing.queues.SimpleQueue) -> None:
    os.sched_setaffinity(0, {queue.get()})  # before JAX makes its threads
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # ends the run, and begins no other


if __name__ == "__main__":
    main()
