"""Random small functions under each pass and under all: they run wherever plain JAX does, with equal derivatives."""

import dataclasses
import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hlat_jax.passes import naming
from hlat_jax.passes.autocast_pass import autocast
from hlat_jax.passes.chunk_pass import chunk
from hlat_jax.passes.residuals import select_residuals

MOST_STEPS = 6
# Relative to the largest element of a result, or to 1e-2 of the largest of all: sums in another order.
FP32 = 2e-5
BF16 = 0.15  # of bf16, 2^-9 each; a mean of losses may be a tenth of what it is the difference of


@jax.custom_vjp
def doubled(x):
    return 2 * x


doubled.defvjp(lambda x: (2 * x, jnp.cos(x)), lambda kept, g: (2 * g + 0.5 * kept,))


@jax.custom_jvp
def tripled(x):
    return 3 * x


tripled.defjvp(lambda primals, tangents: (tripled(*primals), 3 * tangents[0]))


def scanned(x):
    def step(carry, row):
        carry = jnp.tanh(carry + row)
        return carry, carry * row

    return jax.lax.scan(step, jnp.zeros_like(x[0]), x)[1]


def looped(x):
    return jax.lax.fori_loop(0, 3, lambda i, y: jnp.sin(y) + i * x, x)


def branched(x):
    return jax.lax.cond(jnp.sum(x) > 0, jnp.sin, lambda x: 2 * x, x)


def dropped(x):
    return jnp.where(jax.random.bernoulli(jax.random.key(0), 0.7, x.shape), x / 0.7, 0)


def has_rows(x):
    return x.ndim > 0 and x.shape[0] > 0


def is_float(x):
    return jnp.issubdtype(x.dtype, jnp.floating)


def narrow_and_back(x):
    return x.astype(jnp.bfloat16).astype(jnp.float32)


# function -> whether it takes some operands
SMOOTH = {
    jnp.tanh: is_float,
    jnp.sin: is_float,
    lambda x: jnp.exp(-jnp.square(x)): is_float,
    lambda x: jnp.log1p(jnp.square(x)): is_float,
    lambda x: x * x: is_float,
    lambda x: 3 * x: is_float,
    lambda x: 1 / (1 + x**2): is_float,
    jax.nn.gelu: is_float,
    jax.nn.softplus: is_float,
    jnp.add: lambda x, y: fit(x, y),
    jnp.multiply: lambda x, y: fit(x, y),
    jnp.subtract: lambda x, y: fit(x, y),
    lambda flags, x: jnp.where(flags, x, 1.0): lambda flags, x: flags.dtype == bool and fit(flags, x),
    lambda x, y: x @ y.T: lambda x, y: x.ndim == y.ndim == 2 and x.shape[1] == y.shape[1] and x.size,
    lambda x, y: jnp.einsum("td,sd->ts", x, y): lambda x, y: x.ndim == y.ndim == 2 and x.shape[1] == y.shape[1],
    lambda x, y: jax.nn.logsumexp(x @ y, -1): lambda x, y: x.ndim == y.ndim == 2 and x.shape[1] == len(y) and x.size,
    jnp.sum: is_float,
    lambda x: x.mean(-1): lambda x: has_rows(x) and is_float(x) and x.shape[-1],
    lambda x: x.sum(0): lambda x: has_rows(x) and is_float(x),
    lambda x: jax.nn.softmax(x, 0): lambda x: has_rows(x) and is_float(x),
    lambda x: jax.nn.logsumexp(x, -1): lambda x: has_rows(x) and is_float(x) and x.shape[-1],
    lambda x: jnp.cumsum(x, 0): lambda x: has_rows(x) and is_float(x),
    lambda x, at: x[at % x.shape[0]]: lambda x, at: has_rows(x) and jnp.issubdtype(at.dtype, jnp.integer),
    lambda x, at: jnp.take_along_axis(x, at[: len(x), None] % x.shape[1], 1): (
        lambda x, at: x.ndim == 2 and x.shape[1] and at.ndim == 1 and at.dtype == jnp.int32 and len(at) >= len(x)
    ),
    scanned: lambda x: has_rows(x) and is_float(x) and len(x) < 10,
    looped: is_float,
    branched: is_float,
    dropped: is_float,
    narrow_and_back: is_float,
    jnp.ravel: lambda x: True,
    jnp.transpose: lambda x: True,
    lambda x: x[None]: lambda x: x.ndim < 3,
    lambda x: x[:0]: has_rows,
    lambda x: x[:-1]: lambda x: has_rows(x) and len(x) > 1,
    lambda x: jnp.pad(x, 1): lambda x: x.ndim in (1, 2) and is_float(x),
    lambda x: jnp.concatenate([x, x]): lambda x: has_rows(x) and x.size < 5000,
    lambda x: jnp.broadcast_to(x, (3, *x.shape)): lambda x: x.ndim < 3,
    jax.lax.stop_gradient: is_float,
    doubled: is_float,
    tripled: is_float,
    jax.checkpoint(jnp.sin): is_float,
    jax.jit(lambda x: jnp.cos(x) * x): is_float,
    jax.vmap(jnp.sin): lambda x: has_rows(x) and is_float(x),
    lambda x: x.astype(jnp.float32): lambda x: True,
    lambda at: at + 1: lambda at: jnp.issubdtype(at.dtype, jnp.integer),
    lambda x: jnp.ones(x.shape): lambda x: True,
}
JUMPING = {  # a rounding may change their results by more than itself
    jax.nn.relu: is_float,
    jnp.abs: is_float,
    jnp.floor: is_float,
    jnp.sign: is_float,
    lambda x: x.max(0): lambda x: has_rows(x) and is_float(x),
    lambda x: jnp.argmax(x, -1): lambda x: has_rows(x) and is_float(x) and x.shape[-1],
    lambda x: jnp.sort(x, 0): lambda x: has_rows(x) and is_float(x),
    lambda x: x > 0: is_float,
    lambda x: x.astype(jnp.int32): is_float,
    jnp.maximum: lambda x, y: fit(x, y) and is_float(x),
}


def fit(x, y):
    sizes = zip(x.shape[::-1], y.shape[::-1], strict=False)
    most = math.prod(np.broadcast_shapes(x.shape, y.shape)) if all(a == b or 1 in (a, b) for a, b in sizes) else 10**9
    return most <= 10_000 and y.dtype != bool and (is_float(x) or is_float(y) or x.dtype == bool)


@dataclasses.dataclass
class RandomFunction:
    """A function of (floats, others) that returns a number and auxiliary values, as `jax.grad` takes it."""

    seed: int
    smooth: bool

    def __post_init__(self):
        rng = np.random.default_rng(self.seed)
        rows, width = rng.choice([1, 4, 256], p=[0.1, 0.6, 0.3]), 6
        normal = rng.standard_normal
        self.floats = {
            "w": normal((5, width), np.float32),
            "x": normal((rows, width), np.float32),
            "v": normal(width, np.float32),
            "s": np.float32(normal()),
            "head": normal((width, 40), np.float32) / 2,
        }
        self.others = {"at": rng.integers(0, 4, rows).astype(np.int32), "flags": rng.random((rows, width)) < 0.5}
        functions = SMOOTH if self.smooth else SMOOTH | JUMPING
        self.steps: list[tuple[Callable, list[int]]] = []
        values = [*self.floats.values(), *self.others.values()]
        for _ in range(rng.integers(0, MOST_STEPS + 1)):
            found = None
            while found is None:
                function, takes = list(functions.items())[rng.integers(len(functions))]
                num = takes.__code__.co_argcount
                # what is new is read more often
                weights = np.arange(1, len(values) + 1) ** 1.5
                places = list(map(int, rng.choice(len(values), num, p=weights / weights.sum())))
                found = takes(*(values[at] for at in places)) or None
            self.steps.append((function, places))
            shape = jax.eval_shape(function, *(values[at] for at in places))
            values.append(np.zeros(shape.shape, shape.dtype))
        inexact = [at for at, value in enumerate(values) if is_float(value)]
        self.ends = list(rng.choice(inexact[-3:], rng.integers(1, 3)))
        self.kind = rng.choice(
            ["square", "mean", "linear", "logits", "constant", "argument"], p=[0.2, 0.2, 0.3, 0.2, 0.05, 0.05]
        )
        self.aux = [int(at) for at in rng.choice(len(values), 2)]

    def __call__(self, floats, others):
        values = [*(floats[name] for name in self.floats), *(others[name] for name in self.others)]
        for function, places in self.steps:
            values.append(function(*(values[at] for at in places)))
        ends = [values[at].astype(jnp.float32) for at in self.ends]
        aux = [values[at] for at in self.aux]
        if self.kind == "constant":
            return jnp.float32(2.0), aux
        if self.kind == "argument":
            return floats["s"], aux
        if self.kind == "logits":
            logits = (floats["x"] + sum(jnp.sum(end) / max(end.size, 1) for end in ends)) @ floats["head"]
            return jnp.mean(jax.nn.logsumexp(logits, -1) - logits[:, 0]), aux
        if self.kind == "square":
            return sum(jnp.sum(end**2) for end in ends), aux
        if self.kind == "mean":
            return sum(jnp.sum(end) / max(end.size, 1) for end in ends), aux
        return sum(jnp.sum(end) for end in ends), aux


def checkpointed(fn):
    return naming.checkpointed(fn, naming.RematChoice(), region="whole")


PASSES = {
    "chunk": functools.partial(chunk, max_bytes="1KiB"),
    "select_residuals": select_residuals,
    "checkpointed": checkpointed,
    "all": lambda fn: checkpointed(select_residuals(chunk(fn, max_bytes="1KiB"))),
}
NARROW = {
    "autocast": lambda fn: autocast(fn, "bf16"),
    "all": lambda fn: select_residuals(chunk(autocast(fn, "bf16"), max_bytes="1KiB")),
}


def results(fn, random):
    return jax.tree.leaves(jax.value_and_grad(fn, has_aux=True)(random.floats, random.others))


def difference(found, wanted):
    """Returns the largest difference of the results, see `FP32`."""
    found, wanted = ([np.asarray(one, np.float64) for one in each] for each in (found, wanted))
    assert [one.shape for one in found] == [one.shape for one in wanted]
    sizes = [np.abs(one).max(initial=0) for one in wanted]
    return max(
        np.abs(a - b).max(initial=0) / max(size, 1e-2 * max(sizes), 1e-3)
        for a, b, size in zip(found, wanted, sizes, strict=True)
    )


def check(seeds, passes, tolerance, *, smooth):
    for seed in seeds:
        random = RandomFunction(seed, smooth)
        wanted = results(random, random)
        for name, pass_ in passes.items():
            assert difference(results(pass_(random), random), wanted) <= tolerance, (seed, name)


SEEDS = pytest.mark.parametrize(
    "seeds", [range(8), pytest.param(range(200), marks=pytest.mark.slow)], ids=["some", "all"]
)


@SEEDS
def test_random_functions_run_under_every_pass_as_without(seeds):
    check(seeds, PASSES, FP32, smooth=False)


@SEEDS
def test_random_smooth_functions_run_under_autocast_nearly_so(seeds):
    check(seeds, NARROW, BF16, smooth=True)
