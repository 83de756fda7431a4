"""Loops over the chunks of a region.

A reduction over a loop is accumulated in fp32, in the order of the chunks. Another loop computes the values that depend
on it, and computes the chunks again. If one loop for all gradients takes fewer products, it replaces a backward pass
of each loop.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero
from jax.extend import core

from hlat_jax.host.jax_compat import ad, batching, mlir
from hlat_jax.ops.cross_entropy import is_loss_scaled
from hlat_jax.ops.own_backward import with_backward
from hlat_jax.passes.dataflow import upstream
from hlat_jax.passes.independence import SUM, Start, bind_part, is_elementwise_call
from hlat_jax.passes.jaxpr import (
    aval_bytes,
    inner_jaxprs,
    is_inexact,
    is_literal,
    perturbed_at,
    place_of,
    primitives,
    values_of,
    variables,
    varying_axes,
)

ShapeOf = Callable[[Any], Sequence[int]]
_Sizes = tuple[ShapeOf, int]  # shapes of variables, and the number of chunks
_FLAT = primitives("stop_gradient sign floor ceil round nextafter")  # without a derivative
_EXTREMA = primitives("reduce_max reduce_min max min")
_REDUCED = {"reduce_max": jnp.max, "reduce_min": jnp.min, "reduce_and": jnp.all, "reduce_or": jnp.any}


@dataclasses.dataclass(frozen=True)
class Chunks:
    """Equations that are computed in chunks of one dimension.

    Attributes:
      eqns: the equations, in order.
      dims: variable that differs from chunk to chunk -> its dimension that is cut.
      reductions: variable -> its reduction over the chunks, or "" if it is computed only from reduced values. Parts
        of both may be read too, along `dims`.
      outputs: variables that others read.
      tiny_bytes: largest size of a value that later loops read and do not compute again, such as the losses of tokens.
    """

    eqns: Sequence[Any]
    dims: Mapping[Any, int]
    reductions: Mapping[Any, str]
    outputs: Sequence[Any]
    tiny_bytes: int

    def loops(self) -> list[Loop]:
        """Returns the loops in order. Each begins with the results that earlier loops have reduced."""
        level: dict[Any, int] = {}
        eqns_of: dict[int, list[Any]] = {}
        read_later = set(self.outputs)
        for eqn in self.eqns:
            now = max((level.get(atom, 0) for atom in variables(eqn.invars)), default=0)
            eqns_of.setdefault(now, []).append(eqn)
            level |= dict.fromkeys(eqn.outvars, now + bool(self.reductions.get(eqn.outvars[0])))
            before = [atom for atom in variables(eqn.invars) if level.get(atom, now) < now]
            read_later |= {atom for atom in before if aval_bytes(atom.aval) <= self.tiny_bytes}
        read_later -= self.reductions.keys()
        computed: set[Any] = set()
        loops = []
        for now in range(max(eqns_of) + 1):
            eqns = eqns_of.get(now, [])
            before = [eqn for eqn in eqns if self.reductions.get(eqn.outvars[0]) == ""]
            computed |= {var for eqn in before for var in eqn.outvars}
            made = [var for eqn in eqns for var in eqn.outvars]
            goals = [var for var in made if self.reductions.get(var) or (var in self.dims and var in read_later)]
            loops.append(self._loop(before, goals, computed))
            computed |= set(goals)
        return loops

    def _loop(self, before: Sequence[Any], goals: Sequence[Any], computed: Collection[Any]) -> Loop:
        eqns = upstream(self.eqns, goals, without=computed)
        own = {var for eqn in eqns for var in eqn.outvars}.difference(computed)  # a goal may be read as it was computed
        reads = list(dict.fromkeys(atom for eqn in eqns for atom in variables(eqn.invars) if atom not in own))
        cut, whole = [v for v in reads if v in self.dims], [v for v in reads if v not in self.dims]
        return Loop(before, goals, eqns, cut, whole, self._differentiated(eqns, goals, reads))

    def _differentiated(self, eqns: Sequence[Any], goals: Sequence[Any], reads: Sequence[Any]) -> int | None:
        """Returns the index of the only differentiable goal if all goals are scalar sums; else None."""
        has_derivative = {var for var in reads if _is_float(var.aval)}
        for eqn in eqns:
            if any(atom in has_derivative for atom in variables(eqn.invars)):
                has_derivative |= {var for var in eqn.outvars if _is_float(var.aval)}
        if any(jnp.issubdtype(var.aval.dtype, jnp.complexfloating) or var.aval.dtype == jnp.float16 for var in reads):
            return None  # complex numbers are not sorted here; fp16 needs the scale of its loss in the loop
        if any(varying_axes(var.aval) for var in reads):
            return None  # of one device: inside shard_map JAX sums the gradients of what all devices have
        places = [at for at, var in enumerate(goals) if var in has_derivative]
        are_sums = all(self.reductions.get(var) == SUM and not var.aval.shape for var in goals)
        return places[0] if are_sums and len(places) == 1 else None

    def compute(self, env: dict[Any, Any], *, shape_of: ShapeOf, num_parts: int) -> list[Any]:
        """Returns the values of the outputs.

        Args:
          env: variable that the equations read -> value.
          shape_of: function from a variable to its shape.
          num_parts: number of chunks.
        """
        loops, sizes = self.loops(), (shape_of, num_parts)
        numbers = self._num_reductions([var for var in self.outputs if is_inexact(var.aval)])
        if self._is_joint_cheaper(loops, numbers) and self._has_joint_derivative(numbers):
            return self._with_one_derivative(loops, env, sizes)
        return values_of(self.outputs, self._run_all(loops, env, sizes))

    def _is_joint_cheaper(self, loops: Sequence[Loop], numbers: Mapping[Any, int]) -> bool:
        """Returns whether one derivative of all loops takes fewer products than that of each; see `_num_reductions`."""
        differentiated = [loop for loop in loops if any(var in numbers for var in loop.goals)]
        # each: a product again, unless its gradients are summed with it, and two for the gradients
        by_each = sum(_num_products(loop.eqns) * (2 + (loop.scalar is None)) for loop in differentiated)
        eqns = {id(eqn): eqn for loop in differentiated for eqn in loop.eqns}
        return _num_products(eqns.values()) * (2 + max([1, *numbers.values()])) < by_each

    def _has_joint_derivative(self, numbers: Collection[Any]) -> bool:
        """Returns whether one derivative of all loops is that of each; see `_num_reductions`.

        Not if the largest of some values has a derivative. Which values are equal to it would be found again beside
        what was reduced before, from which they may then differ in the last bit.
        """
        extrema = [eqn for eqn in self.eqns if eqn.primitive.name in _EXTREMA and eqn.outvars[0] in numbers]
        return not extrema and all(map(_links_all, self.eqns))

    def _run_all(self, loops: Sequence[Loop], env: dict[Any, Any], sizes: _Sizes) -> dict[Any, Any]:
        """Returns `env` with the goals of the loops, and what is computed before them."""
        for loop in loops:
            for eqn in loop.before:
                env = env | self._results(env, eqn, sizes)
            env = env | self._run(env, loop, sizes)
        return env

    def _with_one_derivative(self, loops: Sequence[Loop], env: dict[Any, Any], sizes: _Sizes) -> list[Any]:
        """Returns the outputs of several loops, of which one loop computes the gradients.

        Let x be the values that the loops read, r the reduced values, and y the outputs. A loop reads values that the
        loops before it have reduced, so r = f(x, r) and y = g(x, r). For cotangents Y of y, the cotangents R of r and
        X of x follow from the chain rule:

            R = (dg/dr)^T Y + (df/dr)^T R
            X = (dg/dx)^T Y + (df/dx)^T R

        The loops are in order, so powers of df/dr vanish. Hence R is exact after as many substitutions as reductions
        follow one another, less one. Each product with a transpose is one pass over the chunks of all loops together.
        """
        before, names = [eqn for loop in loops for eqn in loop.before], list(env)
        reduced = [var for var, reduction in self.reductions.items() if reduction]

        def with_reduced(*x: Any) -> list[Any]:
            return values_of([*self.outputs, *reduced], self._run_all(loops, dict(zip(names, x, strict=True)), sizes))

        def in_loops(*x: Any) -> list[Any]:
            return with_reduced(*x)[: len(self.outputs)]

        def forward(x: Sequence[Any], places: Sequence[int]) -> tuple[list[Any], Any]:
            values = _as_one(with_reduced)(*x)
            return values[: len(self.outputs)], (list(x), values[len(self.outputs) :])

        def backward(kept: Any, cotangents: Mapping[int, Any]) -> dict[int, Any]:
            # an output without a cotangent has no derivative here: zeros times an infinite one were NaN
            given = {self.outputs[at]: cotangent for at, cotangent in cotangents.items()}
            numbers = self._num_reductions(given)
            totals = [var for var in reduced if var in numbers]
            known = {*reduced, *(var for eqn in before for var in eqn.outvars)}
            goals = dict.fromkeys([*totals, *(var for var in given if var in self.dims)])
            joint = self._loop(before, list(goals), known)
            x, values_of_reduced = kept[0], dict(zip(reduced, kept[1], strict=True))

            def again(x: Sequence[Any], r: Sequence[Any]) -> tuple[list[Any], list[Any]]:
                """Returns the outputs that have a cotangent, and f(x, r)."""
                values = values_of_reduced | dict(zip((*names, *totals), (*x, *r), strict=True))
                for eqn in before:
                    values |= self._results(values, eqn, sizes)
                made = self._run(values, joint, sizes)
                return values_of(given, made | values), values_of(totals, made)  # values: r is an output as it is

            r = values_of(totals, values_of_reduced)
            (direct,) = jax.vjp(lambda r: again(x, r)[0], r)[1](list(given.values()))
            of_r = direct
            for _ in range(max(numbers.values(), default=0) - 1):
                (through,) = jax.vjp(lambda r: again(x, r)[1], r)[1](of_r)
                of_r = [a + b for a, b in zip(direct, through, strict=True)]
            (grads,) = jax.vjp(lambda x: again(x, r), x)[1]((list(given.values()), of_r))
            return dict(enumerate(grads))

        return with_backward(in_loops, forward, backward)(*env.values())

    def _num_reductions(self, outputs: Iterable[Any]) -> dict[Any, int]:
        """Returns variable -> the most reductions on a path with a derivative from it, its own included, to an output.

        Variables without such a path are left out.
        """
        numbers = dict.fromkeys(outputs, 0)
        for eqn in reversed(self.eqns):
            own = [var for var in eqn.outvars if var in numbers]
            for var in own:
                numbers[var] += bool(self.reductions.get(var))
            for var in variables(eqn.invars) if own and eqn.primitive.name not in _FLAT else ():
                if is_inexact(var.aval):
                    numbers[var] = max(numbers.get(var, 0), *(numbers[one] for one in own))
        return numbers

    def _results(self, env: Mapping[Any, Any], eqn: Any, sizes: _Sizes, number: Any = None) -> dict[Any, Any]:
        """Returns the results of an equation; of chunk `number`, if it is one of several."""
        shape_of, num_parts = sizes
        shapes = [list(shape_of(var)) for var in eqn.outvars]
        for var, shape in zip(eqn.outvars, shapes, strict=True):
            if var in self.dims and number is not None:
                shape[self.dims[var]] = _rows(shape[self.dims[var]], num_parts)
        with place_of(eqn):
            operands = self._new_rows(eqn, values_of(eqn.invars, env), sizes, number)
            results = bind_part(eqn, operands, shapes, start=self._start(eqn, sizes, number))
        if self.reductions.get(eqn.outvars[0]) == SUM and results[0].dtype in (jnp.bfloat16, jnp.float16):
            results = [result.astype(jnp.float32) for result in results]  # partial sums
        return dict(zip(eqn.outvars, results, strict=True))

    def _new_rows(self, eqn: Any, operands: list[Any], sizes: _Sizes, number: Any) -> list[Any]:
        """Returns the operands of a reduction without rows that the chunk before has too, as the last one may."""
        reduction, (shape_of, num_parts) = self.reductions.get(eqn.outvars[0]), sizes
        if not reduction or number is None or eqn.primitive.name == "gather":
            return operands
        for at, var in enumerate(eqn.invars):
            dim = None if is_literal(var) else self.dims.get(var)
            if dim is not None and shape_of(var)[dim] % num_parts:
                x = operands[at]
                rows = jax.lax.broadcasted_iota(jnp.int32, x.shape, dim)
                is_new = rows + _first_row(shape_of(var)[dim], num_parts, number) >= number * x.shape[dim]
                operands[at] = jnp.where(is_new, x, _neutral(reduction, x.dtype))
        return operands

    def _start(self, eqn: Any, sizes: _Sizes, number: Any) -> Start | None:
        """Returns where chunk `number` begins, for an iota and a gather of single indices; see `bind_part`."""
        is_taken = eqn.primitive.name == "gather" and self.reductions.get(eqn.outvars[0])
        counted = eqn.outvars[0] if eqn.primitive.name == "iota" else eqn.invars[0] if is_taken else None
        if number is None or counted not in self.dims:
            return None
        dim, (shape_of, num_parts) = self.dims[counted], sizes
        size = shape_of(counted)[dim]
        return Start(dim, _first_row(size, num_parts, number), number * _rows(size, num_parts), size)

    def _run(self, env: Mapping[Any, Any], loop: Loop, sizes: _Sizes) -> dict[Any, Any]:
        """Returns the goals of a loop."""
        if not loop.goals:
            return {}
        num_parts = sizes[1]

        def part(number: Any, tangents: Sequence[Any], others: Sequence[Any], *, arrays: Sequence[Any]) -> list[Any]:
            local = dict(zip(loop.whole, others, strict=True))
            for var, array, tangent in zip(loop.cut, arrays, tangents, strict=True):
                dim, size = self.dims[var], array.shape[self.dims[var]]
                first = _first_row(size, num_parts, number)
                rows = jax.lax.dynamic_slice_in_dim(array, first, _rows(size, num_parts), dim)
                local[var] = _with_tangent(rows, tangent)
            made: dict[Any, Any] = {}
            for eqn in loop.eqns:  # what is given is read as it is, although its part is made too
                made |= self._results(made | local, eqn, sizes, number)
            return values_of(loop.goals, made)

        run = _in_turn if loop.scalar is None else functools.partial(_with_gradients, loop.scalar)
        # An array of all chunks would be a copy of what they are cut from: only their tangents are in one.
        arrays = [jax.lax.stop_gradient(env[var]) for var in loop.cut]
        tangents = [_split_tangent(env[var], self.dims[var], num_parts) for var in loop.cut]
        parts = run(part, tangents, [env[var] for var in loop.whole], arrays, num_parts)
        goals = {}
        for var, values in zip(loop.goals, parts, strict=True):
            reduction = self.reductions.get(var)
            if not reduction:
                goals[var] = _join(values, self.dims[var], sizes[0](var)[self.dims[var]])
            elif reduction == SUM:
                goals[var] = values.sum(0).astype(var.aval.dtype)
            else:
                goals[var] = _REDUCED[reduction](values, axis=0)
        return goals


@dataclasses.dataclass(frozen=True)
class Loop:
    """One loop over chunks.

    Attributes:
      before: equations of only reduced values, which are computed first.
      goals: variables that the loop computes.
      eqns: the equations that the goals need, in order.
      cut: variables that a chunk reads a part of.
      whole: variables that each chunk reads as they are.
      scalar: index of the only goal with a derivative, if all goals are scalar sums, else None.
    """

    before: Sequence[Any]
    goals: Sequence[Any]
    eqns: Sequence[Any]
    cut: Sequence[Any]
    whole: Sequence[Any]
    scalar: int | None


def _in_turn(
    part: Callable, tangents: Sequence[Any], others: Sequence[Any], arrays: Sequence[Any], num_parts: int
) -> list[Any]:
    """Returns the results of all chunks, stacked. The backward pass computes a chunk again.

    `part` is (number of a chunk, its tangents, others, arrays=arrays) -> its results. `tangents` belong to the arrays
    that are cut, `arrays`, in chunks, see `_split_tangent`. Each chunk reads `others` as they are.
    """
    again = jax.checkpoint(part, prevent_cse=False)
    numbered = jnp.arange(num_parts, dtype=jnp.int32), tangents
    return jax.lax.scan(lambda _, at: (None, again(*at, others, arrays=arrays)), None, numbered)[1]


def _with_gradients(
    scalar: int, part: Callable, tangents: Sequence[Any], others: Sequence[Any], arrays: Sequence[Any], num_parts: int
) -> list[Any]:
    """Returns the results of all chunks, which are numbers, and sums their gradients in the same loop, in fp32 or more.

    So the backward pass scales gradients, and computes no chunk again, but for a scaled loss, of which they would be
    unscaled here: see `step.loss_scale`. Result `scalar` alone has a derivative. Other arguments as for `_in_turn`.
    """

    if is_loss_scaled():
        return _in_turn(part, tangents, others, arrays, num_parts)
    num_cut, num_read = len(tangents), len(tangents) + len(others)
    dtypes = {at: x.dtype for at, x in enumerate((*tangents, *others)) if _is_float(x)}  # of what has a gradient

    def in_turn(*args: Any) -> list[Any]:
        return _in_turn(part, args[:num_cut], args[num_cut:num_read], args[num_read:], num_parts)

    def with_sums(*args: Any) -> list[Any]:
        """Returns the results, and then the gradients by each float."""
        tangents, others, arrays = args[:num_cut], args[num_cut:num_read], args[num_read:]

        def of_part(tangents: Sequence[Any], others: Sequence[Any], number: Any) -> tuple[Any, list[Any]]:
            values = part(number, tangents, others, arrays=arrays)
            return values[scalar], values

        def step(total: Sequence[Any], at: Any) -> tuple[Any, Any]:
            number, cut = at
            grads_of = jax.value_and_grad(of_part, (0, 1), has_aux=True, allow_int=True)
            (_, values), grads = grads_of(cut, others, number)
            by_slice, by_other = ([grad for grad in each if grad.dtype != jax.dtypes.float0] for each in grads)
            total = [old + new.astype(old.dtype) for old, new in zip(total, by_other, strict=True)]
            return total, (values, by_slice)

        zeros = [jnp.zeros(x.shape, jnp.promote_types(x.dtype, jnp.float32)) for x in others if _is_float(x)]
        total, (values, grads) = jax.lax.scan(step, zeros, (np.arange(num_parts, dtype=np.int32), tangents))
        return [*values, *grads, *total]

    opaque = _as_one(with_sums)

    def forward(args: Sequence[Any], places: Sequence[int]) -> tuple[list[Any], list[Any]]:
        results = opaque(*args)
        num_goals = len(results) - len(dtypes)
        return results[:num_goals], results[num_goals:]

    def backward(grads: Sequence[Any], cotangents: Mapping[int, Any]) -> dict[int, Any]:
        if scalar not in cotangents:
            return {}
        by_part = cotangents[scalar][0]  # all are equal: the parts are summed
        return {at: (grad * by_part).astype(dtype) for (at, dtype), grad in zip(dtypes.items(), grads, strict=True)}

    def push(grads: Sequence[Any], tangents: Mapping[int, Any]) -> dict[int, Any]:
        slopes = [jnp.sum(grad * tangents[at]) for at, grad in zip(dtypes, grads, strict=True) if at in tangents]
        return {scalar: jnp.pad(sum(slopes)[None], (0, num_parts - 1))} if slopes else {}

    return with_backward(in_turn, forward, backward, push=push)(*tangents, *others, *arrays)


def _as_one(fn: Callable) -> Callable:
    """Returns a function of arrays as one operation, which nothing looks into before it is compiled.

    A remat policy, as that of weights that are gathered again, would keep the sums as they are after each chunk; and
    linearization would compute before a loop what every chunk computes alike.
    """
    run = jax.custom_jvp(fn)

    @functools.partial(run.defjvp, symbolic_zeros=True)
    def _(primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        places = [at for at, tangent in enumerate(tangents) if not isinstance(tangent, SymbolicZero)]
        given = [primals[at] for at in places], [tangents[at] for at in places]
        return jax.jvp(perturbed_at(fn, primals, places), *given)

    return run


def _num_products(eqns: Iterable[Any]) -> int:
    return sum(eqn.primitive.name in ("dot_general", "conv_general_dilated") for eqn in eqns)


def _links_all(eqn: Any) -> bool:
    """Returns whether, as far as its name says, each result of an equation has a derivative by each operand."""
    is_own = any(inner_jaxprs(eqn)) and not is_elementwise_call(eqn)  # a branch, a loop, a rule of a user
    num_operands = sum(is_inexact(atom.aval) for atom in eqn.invars)
    is_each = len(eqn.outvars) > 1 and num_operands > 1  # as of arrays that are sorted together
    return not (is_own or is_each or eqn.primitive.name == "bitcast_convert_type")


def _rows(size: int, num_parts: int) -> int:
    """Returns the rows of a chunk; the last one begins earlier where they do not divide the size."""
    return -(-size // num_parts)


def _first_row(size: int, num_parts: int, number: Any) -> Any:
    num_rows = _rows(size, num_parts)
    return jnp.minimum(number * num_rows, size - num_rows) if size % num_parts else number * num_rows


def _neutral(reduction: str, dtype: Any) -> np.ndarray:
    """Returns what adds nothing to a sum, a product of matrices or another reduction."""
    if reduction in (SUM, "reduce_or"):
        return np.zeros((), dtype)
    if reduction == "reduce_and":
        return np.ones((), dtype)
    is_max = reduction == "reduce_max"
    if jnp.issubdtype(dtype, jnp.bool_):
        return np.asarray(not is_max)
    if jnp.issubdtype(dtype, jnp.integer):
        return np.asarray(jnp.iinfo(dtype).min if is_max else jnp.iinfo(dtype).max, dtype)
    return np.asarray(-np.inf if is_max else np.inf, dtype)


def _join(parts: Any, dim: int, size: int) -> Any:
    """Returns an array of its chunks, which are stacked."""
    num_parts, num_rows = parts.shape[0], parts.shape[1 + dim]
    whole = jnp.moveaxis(parts, 0, dim)
    whole = whole.reshape(*whole.shape[:dim], -1, *whole.shape[dim + 2 :])
    if size == num_parts * num_rows:
        return whole
    before = (num_parts - 1) * num_rows
    last = jax.lax.slice_in_dim(whole, num_parts * num_rows - (size - before), None, axis=dim)
    return jnp.concatenate([jax.lax.slice_in_dim(whole, 0, before, axis=dim), last], dim)


def _split(x: Any, dim: int, num_parts: int) -> Any:
    """Returns the chunks of an array, stacked."""
    size, num_rows = x.shape[dim], _rows(x.shape[dim], num_parts)
    if size % num_parts:
        first = jax.lax.slice_in_dim(x, 0, (num_parts - 1) * num_rows, axis=dim)
        x = jnp.concatenate([first, jax.lax.slice_in_dim(x, size - num_rows, None, axis=dim)], dim)
    return jnp.moveaxis(x.reshape(*x.shape[:dim], num_parts, num_rows, *x.shape[dim + 1 :]), dim, 0)


def _split_tangent(x: Any, dim: int, num_parts: int) -> Any:
    """Returns zeros whose tangent is that of the chunks of an array, stacked; nothing reads the zeros."""
    return _split_tangent_p.bind(x, dim=dim, num_parts=num_parts)


def _with_tangent(x: Any, tangent_of: Any) -> Any:
    """Returns an array with the tangent of another one."""
    return _with_tangent_p.bind(x, tangent_of)


# These are primitives: in a scan, JAX may keep only the body of a `jax.custom_jvp`. Second derivatives are then lost.
_split_tangent_p, _with_tangent_p = core.Primitive("split_tangent"), core.Primitive("with_tangent")


def _define(primitive: Any, like: Callable, run: Callable, tangent: Callable, batch: Callable) -> None:
    """Defines a primitive of one result, which has the type of the result of `like`, and is computed by `run`.

    `tangent` maps tangents of the operands to the tangent of the result, and `batch` is the batching rule.
    """

    def aval_of(*avals: Any, **params: Any) -> Any:
        return jax.make_jaxpr(functools.partial(like, **params))(*avals).out_avals[0]

    def derivative(primals: Sequence[Any], tangents: Sequence[Any], **params: Any) -> tuple[Any, Any]:
        return primitive.bind(*primals, **params), tangent(*tangents, **params)

    primitive.def_impl(run)
    primitive.def_abstract_eval(aval_of)
    mlir.register_lowering(primitive, mlir.lower_fun(run, multiple_results=False))
    ad.primitive_jvps[primitive] = derivative
    batching.primitive_batchers[primitive] = batch


def _batch_split(args: Sequence[Any], dims: Sequence[int], *, dim: int, num_parts: int) -> tuple[Any, int]:
    return _split_tangent(jnp.moveaxis(args[0], dims[0], 0), dim + 1, num_parts), 1


def _batch_with(args: Sequence[Any], dims: Sequence[Any]) -> tuple[Any, int]:
    size = next(x.shape[dim] for x, dim in zip(args, dims, strict=True) if dim is not None)
    return _with_tangent(*(batching.bdim_at_front(x, dim, size) for x, dim in zip(args, dims, strict=True))), 0


def _first(x: Any, tangent_of: Any) -> Any:
    return x


_define(_split_tangent_p, _split, lambda x, **how: jnp.zeros_like(_split(x, **how)), _split, _batch_split)
_define(_with_tangent_p, _first, _first, lambda _, tangent: tangent, _batch_with)


def _is_float(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jnp.floating)
