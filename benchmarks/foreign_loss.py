"""Memory and time of cross-entropies as foreign models write them, under jit and with `passes.rewrite`.

python benchmarks/foreign_loss.py --rows=1 --pairs=7
"""

import argparse
import functools
import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax

from hlat_jax.passes.rewrite import rewrite


def attend(p, t):
    """Tied embedding and integer labels, as in nanodo."""
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(jnp.dot(p["hidden"], p["table"].T), t))


def smoothed(p, t):
    """Bias and smoothed one-hot labels, as in Flax's lm1b."""
    columns = p["bias"].shape[0]
    labels = 1e-6 + (0.9 - 1e-6) * jax.nn.one_hot(t, columns)
    return jnp.mean(-jnp.sum(labels * jax.nn.log_softmax(p["hidden"] @ p["table"].T + p["bias"]), axis=-1))


def softcapped(p, t):
    """Softcap and one-hot labels, as in Gemma."""
    logits = 30.0 * jnp.tanh(jnp.dot(p["hidden"], p["table"].T) / 30.0)
    return -jnp.sum(jax.nn.log_softmax(logits) * jax.nn.one_hot(t, logits.shape[-1])) / t.size


def gathered(p, t):
    """Log-probabilities by index."""
    log_probs = jax.nn.log_softmax(p["hidden"] @ p["head"])
    return -jnp.mean(jnp.take_along_axis(log_probs, t[..., None], axis=-1))


def with_z_loss(p, t):
    """Log-normaliser, its square, and the target's logit."""
    logits = jnp.einsum("btd,dv->btv", p["hidden"], p["head"])
    log_z = jax.nn.logsumexp(logits, axis=-1)
    return jnp.mean(log_z - jnp.take_along_axis(logits, t[..., None], -1)[..., 0] + 1e-4 * log_z**2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1)
    parser.add_argument("--seq_len", type=int, default=1024)
    parser.add_argument("--embed_dim", type=int, default=256)
    parser.add_argument("--vocab_size", type=int, default=32_000)
    parser.add_argument("--pairs", type=int, default=7, help="runs of each, alternating; 0 prints the memory only")
    args = parser.parse_args()
    generator = np.random.default_rng(0)
    normal = functools.partial(generator.standard_normal, dtype=np.float32)
    p = {
        "hidden": normal((args.rows, args.seq_len, args.embed_dim)),
        "table": 0.05 * normal((args.vocab_size, args.embed_dim)),
        "head": 0.05 * normal((args.embed_dim, args.vocab_size)),
        "bias": 0.05 * normal(args.vocab_size),
    }
    p = {name: jnp.asarray(value) for name, value in p.items()}
    t = jnp.asarray(generator.integers(0, args.vocab_size, (args.rows, args.seq_len)), jnp.int32)
    print("| loss | MiB, jit | MiB, rewrite | ratio | ms, jit | ms, rewrite | ratio | gradients differ by |")
    print("|---|---|---|---|---|---|---|---|")
    for loss in (attend, smoothed, softcapped, gathered, with_z_loss):
        fns = [jax.jit(jax.value_and_grad(fn)).lower(p, t).compile() for fn in (loss, rewrite(loss, check=False))]
        temps = [fn.memory_analysis().temp_size_in_bytes / 2**20 for fn in fns]
        times: list[list[float]] = [[], []]
        for _ in range(args.pairs):
            for fn, own in zip(fns, times, strict=True):
                start = time.perf_counter()
                jax.block_until_ready(fn(p, t))
                own.append(time.perf_counter() - start)
        ms = [1e3 * statistics.median(own) if own else float("nan") for own in times]
        leaves = zip(*(jax.tree.leaves(fn(p, t)) for fn in fns), strict=True)
        worst = max(float(jnp.linalg.norm(a - b) / (jnp.linalg.norm(a) + 1e-30)) for a, b in leaves)
        cells = [loss.__doc__.rstrip("."), *(f"{x:.0f}" for x in temps), f"{temps[0] / temps[1]:.1f}"]
        cells += [*(f"{x:.0f}" for x in ms), f"{ms[0] / ms[1]:.2f}", f"{worst:.0e}"]
        print("| " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
