"""Compares a replacement with the equations it replaces, by values and gradients on random inputs.

If the original is large, dimensions along which nothing is mixed are cut to 4 or 5, such as batch and heads. The
equations determine these dimensions, see `Cut`.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from hlat_jax.passes.independence import bind_part, links
from hlat_jax.passes.jaxpr import equations, is_inexact, is_literal, perturbed_at, place_of, values_of, variables
from hlat_jax.passes.rewrite.graph import CHEAP, EquationGraph, Match

# Largest difference from the original, relative to the norm of the value, by the narrowest float among the operands.
TOLERANCES = {"float64": 1e-12, "float32": 1e-5, "float16": 4e-3, "bfloat16": 3e-2}
CUT_ABOVE = 2**20  # elements of the largest intermediate, above which dimensions are cut
FAST_COMPILE = {"xla_backend_optimization_level": 0}  # half the time: what is compared runs once or twice
_ROUNDINGS = 4.0  # a replacement may differ by this many times what one more rounding of each input changes
_MOST = 100.0  # and by no more than this many times the tolerance, however sensitive the function is
_checked: dict[str, tuple[float, float]] = {}  # digest of (original, replacement) -> `_differences`, of this process


def compare(graph: EquationGraph, match: Match) -> tuple[float, float]:
    """Returns (the largest relative difference of a replacement from the original, the tolerance).

    Both run on the CPU, in values and gradients. The tolerance is at least four times the difference that the original
    shows if its inputs are rounded once more.

    Raises:
      ValueError: the match lacks an input of the original, or the two cannot be run, or the results are NaN.
    """
    floats = [var.aval.dtype for var in (*match.inputs, *match.outputs) if jnp.issubdtype(var.aval.dtype, jnp.floating)]
    tolerance = max((TOLERANCES.get(dtype.name, 1e-5) for dtype in floats), default=1e-5)
    for cuts_taken in (True, False):
        cut = Cut(graph, match, cuts_taken=cuts_taken)
        for change in (np.asarray, np.abs):  # some functions are of positive numbers
            difference, of_rounding = _differences(graph, match, cut, change)
            if not math.isnan(difference):
                return difference, max(tolerance, min(_ROUNDINGS * of_rounding, _MOST * tolerance))
    raise ValueError("it is NaN for random inputs, so it cannot be checked")


def _differences(graph: EquationGraph, match: Match, cut: Cut, change: Callable[[Any], Any]) -> tuple[float, float]:
    """Returns the largest relative differences from the original for random inputs, changed; NaN if the original is.

    The first is of the replacement, the second of the original for inputs that are rounded once more.
    """
    replacement = match.resized(cut.shape) if cut.sizes and match.resized else match.on_cpu or match.replacement
    # what depends on no input of the function, such as sqrt(width) or a mask, has its own value and no gradient
    numbers = [cut.constant(var) for var in match.inputs]
    scale = 1.0 if match.resized is None else 0.3  # no product stands out: each chunk depends on all that it reads
    with jax.ensure_compile_time_eval(), jax.default_device(jax.local_devices(backend="cpu")[0]):
        drawn = {
            var: change(random(cut.shape(var), var.aval.dtype, scale=scale, seed=seed))
            for seed, var in enumerate(cut.roots)
        }
        computed = cut.inputs(drawn)
        inputs = [one if number is None else number for one, number in zip(computed, numbers, strict=True)]
        places = [at for at, x in enumerate(inputs) if numbers[at] is None and jnp.issubdtype(x.dtype, jnp.floating)]
        both = (lambda *args: cut.evaluate(args)), replacement
        digest = digest_of([jax.make_jaxpr(one)(*inputs) for one in both]) + change.__name__
        if digest not in _checked:
            original, replaced = (jax.jit(_with_gradients(one, places), compiler_options=FAST_COMPILE) for one in both)
            expected, num_outs = original(*inputs), len(match.outputs)
            of_all = math.hypot(*(np.linalg.norm(np.asarray(grad, np.float64)) for grad in expected[num_outs:]))

            def largest(actual: Sequence[Any]) -> float:
                return max(
                    # the gradient of a single number is a sum over all others, which may nearly cancel
                    relative(a, b, at_least=of_all if at >= num_outs and a.size == 1 else 0.0)
                    for at, (a, b) in enumerate(zip(expected, actual, strict=True))
                )

            rounded = [_rounded_once_more(x) if at in places else x for at, x in enumerate(inputs)]
            _checked[digest] = largest(replaced(*inputs)), largest(original(*rounded))
            if any(np.isnan(np.asarray(x, np.float64)).any() for x in expected):
                _checked[digest] = math.nan, math.nan
    return _checked[digest]


def _rounded_once_more(array: Any) -> Any:
    """Returns floats that differ from an array by at most one unit in the last place, at random."""
    shares = np.random.default_rng(0).uniform(-1, 1, array.shape)
    exact = np.asarray(array).astype(np.float64)
    return (exact * (1 + float(jnp.finfo(array.dtype).eps) * shares)).astype(array.dtype)


def random(shape: Sequence[int], dtype: Any, *, scale: float, seed: int) -> np.ndarray:
    generator = np.random.default_rng(seed)
    if jnp.issubdtype(dtype, jnp.bool_):
        return generator.random(shape) < 0.7
    if jnp.issubdtype(dtype, jnp.integer):
        return generator.integers(0, 4, shape).astype(dtype)
    if not jnp.issubdtype(dtype, jnp.floating):
        raise ValueError(f"an operand of dtype {dtype} cannot be checked with random values")
    return (scale * generator.standard_normal(shape, np.float32)).astype(dtype)


def _with_gradients(function: Callable, places: Sequence[int]) -> Callable:
    """Returns a function to the results of another, and gradients by the arguments at `places` of a random sum."""

    def run(*args: Any) -> list[Any]:
        outs, pull = jax.vjp(perturbed_at(function, args, places), *(args[at] for at in places))
        weights = [
            jnp.asarray(random(out.shape, out.dtype, scale=1.0, seed=1000 + number))
            if jnp.issubdtype(out.dtype, jnp.floating)
            else np.zeros(out.shape, jax.dtypes.float0)
            for number, out in enumerate(outs)
        ]
        return [*outs, *pull(type(outs)(weights))]

    return run


def relative(expected: Any, actual: Any, *, at_least: float = 0.0) -> float:
    """Returns the norm of the difference, relative to the norm of the first, but at least to `at_least`."""
    expected, actual = (np.asarray(x).astype(np.float64) for x in (expected, actual))
    if expected.shape != actual.shape or not np.array_equal(np.isfinite(expected), np.isfinite(actual)):
        return np.inf
    expected, actual = (np.where(np.isfinite(x), x, 0) for x in (expected, actual))
    norm = max(np.linalg.norm(expected), at_least if math.isfinite(at_least) else 0.0)
    # a gradient that is 0 but for rounding is compared with 1 per element
    return float(np.linalg.norm(actual - expected) / max(norm, 1e-3 * math.sqrt(expected.size) or 1.0))


def digest_of(traced: Sequence[Any]) -> str:
    digest = hashlib.sha256()
    for closed in traced:
        digest.update(str(closed.jaxpr).encode())
        inner = (value for eqn, _ in equations(closed.jaxpr) for value in eqn.params.values())
        for one in (closed, *(value for value in inner if isinstance(value, core.ClosedJaxpr))):
            for const in one.consts:
                digest.update(np.asarray(const).tobytes())
    return digest.hexdigest()


class Cut:
    """The original with the dimensions cut along which it computes every index alike, from the same index.

    Dimensions of variables that an equation links are one class. A class is not cut if an equation mixes it or splits
    it in a reshape. Unless the replacement is `resized`, it is not cut either if it is reduced or a constant differs
    along it. If a gather takes single indices from a class, it is cut only with `cuts_taken`, since constant indices
    may be of the whole.

    Attributes:
      sizes: class -> size, of those that are cut; {} if the original is small.
      before: equations that compute masks and indices among its inputs from other integers.
      roots: what these read, and the other inputs: they are independent.
      eqns: the equations of the original.
      constants: variables that they read and no input enters into -> their values.
    """

    def __init__(self, graph: EquationGraph, match: Match, *, cuts_taken: bool):
        self.graph, self.match, self.cuts_taken = graph, match, cuts_taken
        self.sizes: dict[Any, int] = {}
        self._parents: dict[Any, Any] = {}
        self._fixed: set[Any] = set(match.uncut)
        self.eqns, self.constants = self._original()
        self.before, self.roots = self._indices()
        cut_above = CUT_ABOVE // 256 if match.resized else CUT_ABOVE  # sums of fewer numbers are also more exact
        if max(var.aval.size for eqn in self.eqns for var in eqn.outvars) <= cut_above:
            return
        for eqn in (*self.before, *self.eqns):
            self._join(eqn)
        for var, value in self.constants.items():
            for dim, size in enumerate(var.aval.shape):
                is_even = isinstance(value, np.ndarray) and (value == value.take([0], axis=dim)).all()
                if size > 1 and not is_even:
                    self._fixed.add((var, dim))
        fixed = {self._root(one) for one in self._fixed}
        for var in {*self.roots, *(var for eqn in (*self.before, *self.eqns) for var in eqn.outvars)}:
            for dim, size in enumerate(var.aval.shape):
                if size > match.cut_to and self._root((var, dim)) not in fixed:
                    self.sizes[self._root((var, dim))] = match.cut_to

    def _original(self) -> tuple[list[Any], dict[Any, Any]]:
        graph, stop = self.graph, set(self.match.inputs)
        visited: set[int] = set()
        constants: dict[Any, Any] = {}
        todo = [graph.producer(var) for var in self.match.outputs]
        while todo:
            eqn = todo.pop()
            if id(eqn) in visited:
                continue
            visited.add(id(eqn))
            for atom in eqn.invars:
                if is_literal(atom) or atom in stop:
                    continue
                value = graph.constant(atom) if self.match.resized is None else None
                if value is None and graph.producer(atom) is not None:
                    todo.append(graph.producer(atom))
                elif value is None and atom not in graph.values:
                    raise ValueError("it also depends on an input that the op does not take")
                else:
                    constants[atom] = graph.values[atom] if value is None else value
        if self.match.resized is None:
            constants |= {var: value for var in stop if (value := graph.constant(var)) is not None}
        return [eqn for eqn in graph.eqns if id(eqn) in visited], constants

    def _indices(self) -> tuple[list[Any], list[Any]]:
        """Returns `before` and `roots`."""
        needed, before = dict.fromkeys(self.match.inputs), []
        for eqn in reversed(self.graph.eqns):
            is_index = not any(is_inexact(atom.aval) for atom in (*eqn.invars, *eqn.outvars))
            if is_index and eqn.primitive.name in CHEAP and any(var in needed for var in eqn.outvars):
                before.append(eqn)
                needed |= dict.fromkeys(variables(eqn.invars))
        made = {var for eqn in before for var in eqn.outvars}
        return before[::-1], [var for var in needed if var not in made]

    def shape(self, var: Any) -> tuple[int, ...]:
        """Returns the shape of a variable after the cut."""
        return tuple(self.sizes.get(self._root((var, dim)), size) for dim, size in enumerate(var.aval.shape))

    def inputs(self, drawn: Mapping[Any, Any]) -> list[Any]:
        """Returns the values of the inputs from the values of the roots."""
        env = dict(drawn)
        for eqn in self.before:
            results = bind_part(eqn, values_of(eqn.invars, env), list(map(self.shape, eqn.outvars)))
            env |= zip(eqn.outvars, results, strict=True)
        return values_of(self.match.inputs, env)

    def evaluate(self, args: Sequence[Any]) -> list[Any]:
        """Returns the values of the outputs for inputs of the shapes that are cut."""
        env = dict(zip(self.match.inputs, args, strict=True))
        for var, value in self.constants.items():
            env[var] = self._part(var, value)
        for eqn in self.eqns:
            with place_of(eqn):
                results = bind_part(eqn, values_of(eqn.invars, env), list(map(self.shape, eqn.outvars)))
                env |= zip(eqn.outvars, results, strict=True)
        return [env[var] for var in self.match.outputs]

    def constant(self, var: Any) -> Any:
        """Returns the value of an input that depends on no input of the function, cut; None for other inputs.

        If the replacement is `resized`, only single numbers have one.
        """
        value = self.constants.get(var, self.graph.constant(var) if var.aval.size == 1 else None)
        return None if value is None else self._part(var, value)

    def _part(self, var: Any, value: Any) -> Any:
        return value[tuple(slice(size) for size in self.shape(var))]

    def _join(self, eqn: Any) -> None:
        """Joins the dimensions of each link to a class, and fixes those that are in none."""
        left = {(atom, dim) for atom in (*eqn.invars, *eqn.outvars) for dim in range(len(atom.aval.shape))}
        cuts_reduced = self.match.resized is not None and (self.cuts_taken or eqn.primitive.name != "gather")
        for link in links(eqn):
            atoms = [*zip(eqn.invars, link.operands, strict=True), *zip(eqn.outvars, link.results, strict=True)]
            ends = [(atom, dim) for atom, dim in atoms if dim is not None and not is_literal(atom)]
            if (link.reduction and not cuts_reduced) or len({atom.aval.shape[dim] for atom, dim in ends}) > 1:
                continue
            left -= set(ends)
            for one in ends[1:]:
                self._parents[self._root(ends[0])] = self._root(one)
        self._fixed |= {(atom, dim) for atom, dim in left if not is_literal(atom) and atom.aval.shape[dim] > 1}

    def _root(self, one: Any) -> Any:
        one = self.graph.copied.get(one[0], one[0]), one[1]
        while self._parents.get(one, one) != one:
            one = self._parents[one]
        return one
