"""Random programs under each pass and under all: values, gradients, second derivatives, forward mode and memory.

`pytest tests/passes/test_random_functions.py -m slow --programs 2000 -n 2` tries 2,000. `--seed 1` tries the next ones.
A failure names the seed of its program. The constants below name seeds of the first 2,000 that need more room. Of 400
others (`--programs 400 --seed 10`), three need it too: 4070 and 4240 take an array of 6 KiB more, and 4399 is as
ill-conditioned as `ILL_CONDITIONED`.
"""

import copy
import dataclasses
import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.extend import core

from hlat_jax.passes import naming, remat_pass
from hlat_jax.passes.autocast_pass import autocast
from hlat_jax.passes.chunk_pass import chunk
from hlat_jax.passes.compile import training_program
from hlat_jax.passes.kernels_pass import kernels
from hlat_jax.passes.remat_search import RematOptions
from hlat_jax.passes.residuals import select_residuals

MOST_STEPS = 12
# Relative to the largest element of a result, or to 1e-2 of the largest of all: sums in another order.
FP32 = 2e-5
BF16 = 0.15  # of bf16, 2^-9 each; a mean of losses may be a tenth of what it is the difference of
NARROW = 2e-2  # of a program with bf16 inside, whose cotangents are rounded before or after they are added
# Temporaries, relative to plain: XLA orders other operations, and bf16 lies beside fp32 on a CPU.
MOST, MOST_CAST, LEAST_BYTES = 1.1, 2.0, 4096
ROUNDINGS = 30  # of the inputs, if a program magnifies one
TRAINED = 40  # every so many programs are trained, which compiles six
# seed -> bytes: plain takes 32, and `select_residuals` 12,560 with jaxlib 0.10.0. XLA writes two arrays of plain, of
# 6 KiB each, into the buffer of a gradient.
MORE_BYTES = {1380: 14_000}
# Even in fp32, `chunk` has other gradients of gradients than plain here, as docs/passes.md says. In float64 they agree.
ILL_CONDITIONED = {121, 373, 379}


@jax.custom_vjp
def doubled(x):
    return 2 * x


doubled.defvjp(lambda x: (2 * x, jnp.cos(x)), lambda kept, g: (g * (2 + 0.5 * kept),))  # linear, and no derivative


@jax.custom_jvp
def tripled(x):
    return 3 * x


tripled.defjvp(lambda primals, tangents: (tripled(*primals), 3 * tangents[0]))


def dropped(x, key):
    return jnp.where(jax.random.bernoulli(key, 0.7, x.shape), x / 0.7, 0)


def noisy(x, key):
    return x + 0.1 * jax.random.normal(jax.random.fold_in(key, 1), x.shape)


def has_rows(x):
    return x.ndim > 0 and x.shape[0] > 0


def is_float(x):
    return jnp.issubdtype(x.dtype, jnp.floating)


def is_key(x):
    return jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)


def is_number(x):
    return not is_key(x)


def narrow_and_back(x):
    return x.astype(jnp.bfloat16).astype(float)


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
    dropped: lambda x, key: is_float(x) and is_key(key),
    noisy: lambda x, key: is_float(x) and is_key(key),
    narrow_and_back: is_float,
    jnp.ravel: is_number,
    jnp.transpose: is_number,
    lambda x: x[None]: lambda x: x.ndim < 3 and is_number(x),
    lambda x: x[:0]: has_rows,
    lambda x: x[:-1]: lambda x: has_rows(x) and len(x) > 1,
    lambda x: jnp.pad(x, 1): lambda x: x.ndim in (1, 2) and is_float(x),
    lambda x: jnp.concatenate([x, x]): lambda x: has_rows(x) and x.size < 5000,
    lambda x: jnp.broadcast_to(x, (3, *x.shape)): lambda x: x.ndim < 3 and is_number(x),
    jax.lax.stop_gradient: is_float,
    doubled: is_float,
    tripled: is_float,
    jax.checkpoint(jnp.sin): is_float,
    jax.jit(lambda x: jnp.cos(x) * x): is_float,
    jax.vmap(jnp.sin): lambda x: has_rows(x) and is_float(x),
    lambda x: x.astype(float): is_number,
    lambda at: at + 1: lambda at: jnp.issubdtype(at.dtype, jnp.integer),
    lambda x: jnp.ones(x.shape): is_number,
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
    if is_key(x) or is_key(y):
        return False
    sizes = zip(x.shape[::-1], y.shape[::-1], strict=False)
    most = math.prod(np.broadcast_shapes(x.shape, y.shape)) if all(a == b or 1 in (a, b) for a, b in sizes) else 10**9
    return most <= 10_000 and y.dtype != bool and (is_float(x) or is_float(y) or x.dtype == bool)


# what keeps a shape, for bodies of loops, branches and rules
KEEPING = [
    jnp.tanh,
    jnp.sin,
    jax.nn.gelu,
    jax.nn.softplus,
    doubled,
    tripled,
    lambda x: jnp.exp(-jnp.square(x)),
    lambda x: 1 / (1 + x**2),
    lambda x: x - x.mean(),
    lambda x: x / 2,
]


def scanned(f, g):
    def step(carry, row):
        carry = f(carry + row)
        return carry, g(carry) * row

    return lambda x: jax.lax.scan(step, jnp.zeros_like(x[0]), x)[1]


def scanned_with_weights(f, g):
    def run(x, w):
        def step(carry, row):
            carry = f(carry @ w + row)
            return carry, g(carry)

        return jax.lax.scan(step, jnp.zeros_like(x[0]), x)[1]

    return run


def scanned_with_keys(f, g):
    def run(x, key):
        def step(carry, row_and_key):
            row, key = row_and_key
            carry = dropped(f(carry + row), key)
            return carry, carry

        keys = jax.random.split(key, len(x))
        return g(jax.lax.scan(step, jnp.zeros_like(x[0]), (x, keys))[1])

    return run


def nested(f, g):
    """Two nested scans, the inner one under a checkpoint."""

    def inner(carry, row):
        return (carry := f(carry + row)), carry * row

    def outer(carry, rows):
        return jax.checkpoint(lambda carry, rows: jax.lax.scan(inner, carry, rows))(g(carry), rows)

    return lambda x: jax.lax.scan(outer, jnp.zeros_like(x[0, 0]), x)[1]


def ensemble(f, g):
    def member(x, w, scale):
        return g(f(x @ (scale * w)) @ w.T)

    return lambda x, w: jax.vmap(member, (None, None, 0))(x, w, jnp.linspace(0.5, 1.0, 3))


def with_own_jvp(f, g):
    fn = jax.custom_jvp(lambda x: g(f(x)))
    # not the derivative, so that a pass that takes another is seen
    fn.defjvp(lambda x, t: (fn(*x), 1.5 * jax.jvp(f, x, t)[1]))
    return fn


def with_own_vjp(f, g):
    fn = jax.custom_vjp(lambda x: g(f(x)))
    fn.defvjp(lambda x: (fn(x), (f(x), x)), lambda kept, out: (out * (1.5 * kept[0] + jnp.cos(kept[1])),))
    return fn


def widened(f, g):
    """As of logits: much wider in between than the operand and the result."""
    return lambda x, w: jax.nn.logsumexp(f(x @ w), -1) * g(x.mean(-1))


def attended(f, g):
    return lambda x, y: jax.nn.softmax(f(x @ y.T / 2), -1) @ g(y)


def pairwise(f, g):
    return lambda x, y: g(f(x[:, None] - y).sum(1))


def fit_product(x, y):
    return fits_scan(x) and fits_scan(y) and x.ndim == y.ndim == 2 and x.shape[1] == y.shape[1]


def fits_scan(x):
    return has_rows(x) and is_float(x) and x.size


# function of two bodies -> whether the result takes some operands
COMBINATORS = {
    scanned: fits_scan,
    scanned_with_weights: lambda x, w: fits_scan(x) and x.ndim == w.ndim == 2 and {*w.shape} == {x.shape[1]},
    scanned_with_keys: lambda x, key: fits_scan(x) and is_key(key),
    nested: lambda x: x.ndim > 1 and fits_scan(x),
    ensemble: lambda x, w: fits_scan(x) and x.ndim == w.ndim == 2 and is_float(w) and len(w) == x.shape[1],
    widened: lambda x, w: fits_scan(x) and x.ndim == w.ndim == 2 and is_float(w) and len(w) == x.shape[1],
    attended: lambda x, y: fit_product(x, y),
    pairwise: lambda x, y: fit_product(x, y) and len(x) * y.size < 500_000,
    lambda f, g: lambda x: jax.lax.fori_loop(0, 3, lambda i, y: f(y) + i * g(x), x): is_float,
    lambda f, g: lambda x: jax.lax.cond(jnp.sum(x) > 0, f, g, x): is_float,
    lambda f, g: lambda x, at: jax.lax.switch(at.sum() % 3, [f, g, jnp.sin], x): (
        lambda x, at: is_float(x) and jnp.issubdtype(at.dtype, jnp.integer)
    ),
    lambda f, g: jax.vmap(lambda x: jax.lax.cond(jnp.sum(x) > 0, f, g, x)): fits_scan,
    lambda f, g: jax.vmap(scanned(f, g)): lambda x: x.ndim > 1 and fits_scan(x),
    lambda f, g: lambda x: jax.grad(lambda x: jnp.sum(g(f(x))))(x): is_float,
    lambda f, g: jax.checkpoint(lambda x: g(f(x))): is_float,
    lambda f, g: jax.jit(lambda x: g(f(x)) * x): is_float,
    with_own_jvp: is_float,
    with_own_vjp: is_float,
}
COMBINED = 0.5  # share of steps
LEAST_BUDGET = 4096  # that is taken


@dataclasses.dataclass(eq=False)
class RandomFunction:
    """A function of (floats, others) that returns a number and auxiliary values, as `jax.grad` takes it."""

    seed: int
    smooth: bool

    def __post_init__(self):
        rng = np.random.default_rng(self.seed)
        rows, width = rng.choice([1, 4, 256], p=[0.1, 0.4, 0.5]), 6
        normal = rng.standard_normal
        self.floats = {
            "w": normal((5, width), np.float32),
            "x": normal((rows, width), np.float32),
            "v": normal(width, np.float32),
            "s": np.float32(normal()),
            "square": normal((width, width), np.float32) / 2,
            "head": normal((width, 40), np.float32) / 2,
        }
        self.others = {
            "at": rng.integers(0, 4, rows).astype(np.int32),
            "flags": rng.random((rows, width)) < 0.5,
            "key": jax.random.key(self.seed),
        }
        self.along = {name: normal(np.shape(value), np.float32) for name, value in self.floats.items()}
        functions = SMOOTH if self.smooth else SMOOTH | JUMPING
        self.steps: list[tuple[Callable, list[int]]] = []
        values = jax.eval_shape(lambda: [*self.floats.values(), *self.others.values()])
        for _ in range(rng.integers(0, MOST_STEPS + 1)):
            found = None
            while found is None:
                combines = rng.random() < COMBINED
                choices = COMBINATORS if combines else functions
                function, takes = list(choices.items())[rng.integers(len(choices))]
                num = takes.__code__.co_argcount
                # what is new is read more often
                weights = np.arange(1, len(values) + 1) ** 1.5
                places = list(map(int, rng.choice(len(values), num, p=weights / weights.sum())))
                found = takes(*(values[at] for at in places)) or None
            if combines:
                function = function(*(KEEPING[at] for at in rng.integers(len(KEEPING), size=2)))
            self.steps.append((function, places))
            values.append(jax.eval_shape(function, *(values[at] for at in places)))
        inexact = [at for at, value in enumerate(values) if is_float(value)]
        self.ends = list(rng.choice(inexact[-3:], rng.integers(1, 3)))
        self.kind = rng.choice(
            ["square", "mean", "linear", "logits", "constant", "argument"], p=[0.2, 0.2, 0.3, 0.2, 0.05, 0.05]
        )
        self.aux = [int(at) for at in rng.choice([at for at, value in enumerate(values) if is_number(value)], 2)]
        self.text = str(jax.make_jaxpr(self)(self.floats, self.others))
        self.is_measured = self.seed % 2 == 0

    def in_float64(self):
        """Returns the function with floats of 64 bits."""
        wide = copy.copy(self)
        wide.floats, wide.along = ({k: np.float64(x) for k, x in one.items()} for one in (self.floats, self.along))
        return wide

    def __call__(self, floats, others):
        values = [*(floats[name] for name in self.floats), *(others[name] for name in self.others)]
        for function, places in self.steps:
            values.append(function(*(values[at] for at in places)))
        ends = [values[at].astype(float) for at in self.ends]  # 64 bits wide if JAX has them
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


class Program:
    """A function and its derivatives. Even seeds have gradients and memory, and odd ones second derivatives.

    Every fourth seed takes second derivatives forward over reverse, with forward mode alone beside them.
    """

    def __init__(self, fn, random):
        floats, others, along = random.floats, random.others, random.along
        closed, shapes = jax.make_jaxpr(fn, return_shape=True)(floats, others)
        self.text, structure = str(closed), jax.tree.structure(shapes)

        def of_floats(floats):
            return jax.tree.unflatten(structure, core.jaxpr_as_fun(closed)(*jax.tree.leaves((floats, others))))

        def grad(floats):
            (value, aux), grads = jax.value_and_grad(of_floats, has_aux=True)(floats)
            return grads, (value, aux)

        def derivatives(floats, along):
            if random.is_measured:
                grads, value = grad(floats)
                return {"value": value, "grads": grads}
            if random.seed % 4 == 1 or "custom_vjp_call" in random.text:  # which has no forward mode
                grads, pull, value = jax.vjp(grad, floats, has_aux=True)
                return {"value": value, "grads": grads, "second": pull(along)[0]}
            grads, second, value = jax.jvp(grad, (floats,), (along,), has_aux=True)
            tangent = jax.jvp(of_floats, (floats,), (along,), has_aux=True)[1]
            return {"value": value, "grads": grads, "second": second, "jvp": tangent}

        self.derivatives, self.given = derivatives, (floats, along)

    @functools.cached_property
    def compiled(self):
        quickly = {"xla_backend_optimization_level": 0}
        return jax.jit(self.derivatives).lower(*self.given).compile(quickly)

    def results_at(self, floats):
        """Returns the results by name."""
        return {name: jax.tree.leaves(one) for name, one in self.compiled(floats, self.given[1]).items()}

    @functools.cached_property
    def results(self):
        return self.results_at(self.given[0])

    def noise(self, error):
        """Returns kind -> how far the results move if the floats are that far from exact."""
        rng = np.random.default_rng(0)
        floats = jax.tree.map(lambda x: np.float32(x * (1 + error * rng.uniform(-1, 1, np.shape(x)))), self.given[0])
        return {kind: difference(found, self.results[kind]) for kind, found in self.results_at(floats).items()}

    @property
    def temporaries(self):
        return self.compiled.memory_analysis().temp_size_in_bytes

    def is_finite(self):
        return all(np.isfinite(np.asarray(one, np.float64)).all() for each in self.results.values() for one in each)


def checkpointed(fn):
    return naming.checkpointed(fn, naming.RematChoice(), region="whole")


def within_budget(fn, random, plain):
    """Returns the function under 80 % of the temporaries of the plain one, or None if that is refused."""
    options = RematOptions(min_bytes=256, max_compilations=3)
    try:
        plan = remat_pass.fit(
            fn,
            random.floats,
            random.others,
            budget_bytes=max(LEAST_BUDGET, int(0.8 * plain.temporaries)),
            step=functools.partial(jax.value_and_grad, has_aux=True),
            options=options,
        )
    except remat_pass.BudgetNotMet:
        return None
    return plan.fn


def passed(random, plain, *, is_cast=True):
    """Yields (name, the function under passes): all of them, those that often find nothing, and one in turn."""
    small_chunks = functools.partial(chunk, max_bytes="4KiB")
    yield "kernels", kernels(random)
    yield "chunk", small_chunks(random)
    turn = random.seed // 4 % 3
    if turn == 0:
        yield "select_residuals", select_residuals(random)
    elif turn == 1 and not random.is_measured:
        yield "checkpointed", checkpointed(random)
    elif turn == 1:
        fitted = within_budget(random, random, plain)
        if fitted is not None:
            yield "remat", fitted
    elif random.smooth:
        yield "autocast", autocast(random, "bf16")
    is_cast = is_cast and random.smooth
    given = autocast(random, "bf16") if is_cast else random
    found = select_residuals(small_chunks(kernels(given)))
    yield "autocast and all" if is_cast else "all", found if random.is_measured else checkpointed(found)


def difference(found, wanted):
    """Returns the largest difference of the results, see `FP32`."""
    found, wanted = ([np.asarray(one, np.float64) for one in each] for each in (found, wanted))
    assert [one.shape for one in found] == [one.shape for one in wanted]
    sizes = [np.abs(one).max(initial=0) for one in wanted]
    return max(
        (
            np.abs(a - b).max(initial=0) / max(size, 1e-2 * max(sizes), 1e-3)
            for a, b, size in zip(found, wanted, sizes, strict=True)
        ),
        default=0.0,
    )


def faults(seed):
    """Yields a line for each pass under which a random program differs or takes more memory."""
    random = RandomFunction(seed, smooth=seed // 2 % 3 == 0)
    plain = Program(random, random)
    if not plain.is_finite():
        return
    for name, fn in passed(random, plain):
        ours = Program(fn, random)
        if ours.text == plain.text:
            continue
        is_cast = "autocast" in name
        tolerance = BF16 if is_cast else NARROW if "bf16" in random.text else FP32
        for kind, wanted in plain.results.items():
            found = difference(ours.results[kind], wanted)
            if not found <= tolerance and not found <= rounding(random, plain, name)[kind]:
                yield f"seed {seed}, {name}: {kind} differs by {found:.1e}"
        most = (MOST_CAST if is_cast else MOST) * plain.temporaries + max(LEAST_BYTES, MORE_BYTES.get(seed, 0))
        if random.is_measured and ours.temporaries > most:
            yield f"seed {seed}, {name}: {ours.temporaries:,} bytes of temporaries, {plain.temporaries:,} without"
    if seed % TRAINED == 0:
        yield from training_faults(random)


def rounding(random, plain, name):
    """Returns kind -> a difference that is rounding, for a program that magnifies it, as a saturated softmax does.

    A pass is right if it is equal in float64. Autocast is if bf16 inputs, or the other passes, move plain as far.
    """
    if "autocast" not in name or random.seed in ILL_CONDITIONED:
        with jax.enable_x64(True):
            wide = random.in_float64()
            exact = Program(wide, wide)
            name = name.replace("autocast and all", "all")
            fns = dict(passed(wide, exact, is_cast=False))
            if name not in fns:  # the budget of this width is refused
                return dict.fromkeys(plain.results, 0.0)
            ours = Program(fns[name], wide)
            apart = {kind: difference(ours.results[kind], wanted) for kind, wanted in exact.results.items()}
        return {kind: np.inf if found <= FP32**2 else 0.0 for kind, found in apart.items()}
    others = Program(dict(passed(random, plain, is_cast=False))["all"], random)
    moved = plain.noise(2.0**-9)
    return {
        kind: max(ROUNDINGS * moved[kind], 2 * difference(others.results[kind], wanted))
        for kind, wanted in plain.results.items()
    }


def training_faults(random):
    """Yields a line if a step under all passes, each only if it is smaller, is larger or has other gradients."""
    key = random.others["key"]
    params, batch = random.floats, {name: random.others[name] for name in ("at", "flags")}

    def loss(params, batch):
        return random(params, {**batch, "key": key})[0]

    names = ("autocast", "kernels", "chunk", "residuals")
    passes = {"autocast": "bf16" if random.smooth else None, "kernels": True, "chunk": "4KiB", "residuals": True}
    given = {"params": params, "batch": batch}
    chosen = [name for name in names if passes[name]]
    plain, ours = (
        training_program(loss, optax.sgd(1.0), **options, **given)
        for options in ({}, {**passes, "only_if_smaller": chosen})
    )
    sizes = [remat_pass.temporaries(one.step.trace(*one.arguments)) for one in (ours, plain)]
    if sizes[0] > sizes[1]:
        yield f"seed {random.seed}, training_program: {sizes[0]:,} bytes of temporaries, {sizes[1]:,} without"
    after = [jax.tree.leaves(one.step(one.init(params), batch)[0]["params"]) for one in (ours, plain)]
    if not difference(*after) <= (BF16 if random.smooth else NARROW):
        yield f"seed {random.seed}, training_program: parameters differ by {difference(*after):.1e}"


def pytest_generate_tests(metafunc):
    """Makes parts of 25 programs, which processes share."""
    num = metafunc.config.getoption("--programs")
    first = num * metafunc.config.getoption("--seed")
    parts = [range(at, min(at + 25, first + num)) for at in range(first, first + num, 25)]
    slow = [pytest.param(part, marks=pytest.mark.slow, id=f"from {part[0]}") for part in parts]
    metafunc.parametrize("seeds", [pytest.param(range(1, 5), id="some"), *slow])


def test_random_programs_keep_values_derivatives_and_memory(seeds):
    assert not [line for seed in seeds for line in faults(seed)]
