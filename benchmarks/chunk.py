"""Losses and attentions as training code has them: memory and time of a gradient under jit and `chunk`.

    python benchmarks/chunk.py
    python benchmarks/chunk.py --tokens=1024 --vocab_size=8000 --pairs=3 --only=focal,clip

Logits are of 2,048 tokens and 32,000 columns, scores of 2,048 queries and keys and 4 heads. Each function is compiled
twice, its source unchanged; the steps alternate in one process. Memory is XLA's temporaries; the difference is the
largest of a parameter's gradient, by norm. The last row compares a plain loss in chunks, under "jit", with the
trainer's own loss, under "ours".
"""

from __future__ import annotations

import argparse
import functools
import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax

from hlat_jax.ops.cross_entropy import LossOptions, cross_entropy
from hlat_jax.passes.chunk_pass import chunk

HEADS = 4


def by_label(p, t):
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(p["hidden"] @ p["head"], t))


def of_next_tokens(p, t):
    """All logits but the last, flat: 2,047 rows."""
    logits = (p["hidden"] @ p["head"])[:, :-1].reshape(-1, p["head"].shape[1])
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, t[:, 1:].reshape(-1)))


def smoothed_with_bias(p, t):
    """As in Flax's lm1b."""
    logits = p["hidden"] @ p["head"] + p["bias"]
    return jnp.mean(optax.softmax_cross_entropy(logits, 1e-6 + 0.9 * jax.nn.one_hot(t, logits.shape[-1])))


def softcapped(p, t):
    """As in Gemma."""
    logits = 30.0 * jnp.tanh(p["hidden"] @ p["head"] / 30.0)
    return -jnp.sum(jax.nn.log_softmax(logits) * jax.nn.one_hot(t, logits.shape[-1])) / t.size


def with_z_loss(p, t):
    logits = p["hidden"] @ p["head"]
    log_z = jax.nn.logsumexp(logits, axis=-1)
    return jnp.mean(log_z - jnp.take_along_axis(logits, t[..., None], -1)[..., 0] + 1e-4 * log_z**2)


def with_accuracy(p, t):
    logits = p["hidden"] @ p["head"]
    correct = jnp.mean(jnp.argmax(logits, axis=-1) == t)
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, t)) + 0 * jax.lax.stop_gradient(correct)


def soft_labels(p, t):
    labels = jax.nn.softmax(p["hidden"][..., ::-1] @ p["teacher"])
    return jnp.mean(optax.softmax_cross_entropy(p["hidden"] @ p["head"], jax.lax.stop_gradient(labels)))


def given_labels(p, labels):
    return jnp.mean(optax.softmax_cross_entropy(p["hidden"] @ p["head"], labels))


def many_labels(p, labels):
    return jnp.mean(optax.sigmoid_binary_cross_entropy(p["hidden"] @ p["head"], labels > 1e-4))


def mixup(p, t):
    log_probs = jax.nn.log_softmax(p["hidden"] @ p["head"])
    one, other = (jnp.take_along_axis(log_probs, label[..., None], -1)[..., 0] for label in (t, t[..., ::-1]))
    return -jnp.mean(0.7 * one + 0.3 * other)


def distillation(p, t):
    teacher = jax.lax.stop_gradient(jax.nn.log_softmax(p["hidden"] @ p["teacher"] / 2))
    student = jax.nn.log_softmax(p["hidden"] @ p["head"] / 2)
    return jnp.mean(jnp.sum(jnp.exp(teacher) * (teacher - student), axis=-1))


def focal(p, t):
    chosen = jnp.take_along_axis(jax.nn.log_softmax(p["hidden"] @ p["head"]), t[..., None], -1)
    return -jnp.mean((1 - jnp.exp(chosen)) ** 2 * chosen)


def two_targets(p, t):
    labels = 0.6 * jax.nn.one_hot(t, p["head"].shape[1]) + 0.4 * jax.nn.one_hot(t // 2, p["head"].shape[1])
    return -jnp.mean(jnp.sum(labels * jax.nn.log_softmax(p["hidden"] @ p["head"]), axis=-1))


def scores_of(p):
    rows = p["hidden"].reshape(-1, p["hidden"].shape[-1])
    return (rows @ p["q"]) @ (rows @ p["k"]).T / 16


def clip(p, t):
    """Both sides: a softmax over the rows and one over the columns."""
    scores, loss = scores_of(p), optax.softmax_cross_entropy_with_integer_labels
    labels = jnp.arange(len(scores))
    return (jnp.mean(loss(scores, labels)) + jnp.mean(loss(scores.T, labels))) / 2


def clip_of_diagonal(p, t):
    scores = scores_of(p)
    return -sum(jnp.mean(jnp.diagonal(jax.nn.log_softmax(scores, axis))) for axis in (0, 1)) / 2


def clip_by_mask(p, t):
    scores = scores_of(p)
    is_own = jnp.eye(len(scores))
    return -sum(jnp.mean(jnp.sum(jax.nn.log_softmax(scores, axis) * is_own, axis)) for axis in (0, 1)) / 2


def siglip(p, t):
    """A sigmoid for each pair."""
    scores = scores_of(p)
    return -jnp.mean(jnp.sum(jax.nn.log_sigmoid((2 * jnp.eye(len(scores)) - 1) * scores), axis=-1))


def attention(p, softmax, change=lambda scores: scores):
    hidden = p["hidden"]
    q, k, v = ((hidden @ p[key]).reshape(*hidden.shape[:2], HEADS, -1) for key in "qkv")
    scores = change(jnp.einsum("btnh,bsnh->bnts", q, k) / 8)
    scores = jnp.where(jnp.tril(jnp.ones(scores.shape[-2:], bool)), scores, -1e30)
    return jnp.mean(jnp.einsum("bnts,bsnh->btnh", softmax(scores), v) ** 2)


def with_sinks(p, t):
    """As in gpt-oss: one more column of each head."""

    def softmax(scores):
        sinks = jnp.broadcast_to(p["scale"][:, None, None], (*scores.shape[:-1], 1))
        return jax.nn.softmax(jnp.concatenate([scores, sinks], axis=-1), axis=-1)[..., :-1]

    return attention(p, softmax)


def by_learned_scale(p, t):
    return attention(p, jax.nn.softmax, lambda scores: scores * p["scale"][:, None, None])


def plus_one(p, t):
    def softmax(scores):
        highest = jax.lax.stop_gradient(jnp.maximum(jnp.max(scores, axis=-1, keepdims=True), 0))
        weights = jnp.exp(scores - highest)
        return weights / (jnp.sum(weights, axis=-1, keepdims=True) + jnp.exp(-highest))

    return attention(p, softmax)


def by_distance(p, t):
    """A bias for each head that grows with the distance, as in ALiBi, with learned slopes."""
    position = jnp.arange(p["hidden"].shape[1])
    return attention(
        p, jax.nn.softmax, lambda scores: scores - p["scale"][:, None, None] * (position[:, None] - position)
    )


def additive(p, t):
    """As in Bahdanau's: a hidden layer of each query and key; of 8 features."""
    q, k = (p["hidden"] @ p[key][:, :8] for key in "qk")
    scores = jnp.tanh(q[:, :, None] + k[:, None]) @ p["q"][0, :8]
    return jnp.mean((jax.nn.softmax(scores, axis=-1) @ p["hidden"]) ** 2)


def by_hand(p, t):
    """The trainer's own loss; compared with `by_label` in chunks."""
    options = LossOptions("chunked")
    ones = jnp.ones(t.shape)
    total, count = cross_entropy(p["hidden"], head_VD=p["head"].T, targets_BT=t, weights_BT=ones, options=options)
    return total / count


LOSSES = (by_label, of_next_tokens, smoothed_with_bias, softcapped, with_z_loss)
CONTRASTIVE = (clip, clip_of_diagonal, clip_by_mask, siglip)
GIVEN = (given_labels, many_labels)  # of all columns, for all tokens
CHUNKED = (with_accuracy, soft_labels, *GIVEN, mixup, distillation, focal, two_targets, *CONTRASTIVE)
CHUNKED += (with_sinks, by_learned_scale, plus_one, by_distance, additive)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--vocab_size", type=int, default=32_000)
    parser.add_argument("--pairs", type=int, default=5, help="steps of each, alternating; 0 prints the memory only")
    parser.add_argument("--only", default="", help="names, with commas")
    args = parser.parse_args()
    generator = np.random.default_rng(0)
    normal = functools.partial(generator.standard_normal, dtype=np.float32)
    p = {"hidden": normal((1, args.tokens, 256)), "scale": np.ones(HEADS, np.float32)}
    p |= {key: 0.05 * normal((256, args.vocab_size)) for key in ("head", "teacher")}
    p |= {key: 0.05 * normal((256, 256)) for key in "qkv"} | {"bias": 0.05 * normal(args.vocab_size)}
    p = jax.tree.map(jnp.asarray, p)
    t = jnp.asarray(generator.integers(0, args.vocab_size, (1, args.tokens)), jnp.int32)
    labels = jax.nn.softmax(normal((1, args.tokens, args.vocab_size)))
    print("| function | limit | MiB, jit | MiB, ours | times less | ms, jit | ms, ours | times as fast | difference |")
    print("|---|---|---|---|---|---|---|---|---|")
    for fn in (*LOSSES, *CHUNKED):
        if not args.only or fn.__name__ in args.only.split(","):
            # plain losses in chunks of 128 rows; scores of contrastive losses take 16 MiB
            limit = "128MiB" if fn in LOSSES else "8MiB" if fn in CONTRASTIVE else "32MiB"
            targets = labels if fn in GIVEN else t
            fns = fn, chunk(fn, max_bytes=limit)
            print_row(fn.__name__, limit, fns, read_by(fn, p, targets), targets, pairs=args.pairs)
    fns = chunk(by_label, max_bytes="128MiB"), by_hand
    print_row("by_label", "by hand", fns, read_by(by_label, p, t), t, pairs=args.pairs)


def read_by(fn, p, t):
    """Returns the parameters that a function reads: to write zeros, the gradients of others, takes time too."""
    jaxpr = jax.make_jaxpr(fn)(p, t).jaxpr
    read = {id(var) for eqn in jaxpr.eqns for var in eqn.invars}
    return {key: p[key] for key, var in zip(sorted(p), jaxpr.invars, strict=False) if id(var) in read}


def print_row(name, limit, fns, *args, pairs):
    programs = [jax.jit(jax.value_and_grad(one)).lower(*args).compile() for one in fns]
    mib = [program.memory_analysis().temp_size_in_bytes / 2**20 for program in programs]
    leaves = zip(*(jax.tree.leaves(program(*args)) for program in programs), strict=True)
    norms = [(float(jnp.linalg.norm(a)), float(jnp.linalg.norm(a - b))) for a, b in leaves]
    difference = max(away / norm for norm, away in norms if norm)
    times: list[list[float]] = [[], []]
    for _ in range(pairs):
        for program, own in zip(programs, times, strict=True):
            start = time.perf_counter()
            jax.block_until_ready(program(*args))
            own.append(time.perf_counter() - start)
    ms = [1e3 * statistics.median(own) if own else float("nan") for own in times]
    ratio = statistics.median(a / b for a, b in zip(*times, strict=True)) if pairs else float("nan")
    cells = [name, limit, *(f"{x:.0f}" for x in mib), f"{mib[0] / mib[1]:.1f}"]
    print(
        "| " + " | ".join([*cells, *(f"{x:.0f}" for x in ms), f"{ratio:.2f}", f"{difference:.0e}"]) + " |", flush=True
    )


if __name__ == "__main__":
    main()
