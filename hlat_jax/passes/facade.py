"""The passes as other projects import them: `from hlat_jax import passes`, decorators with a report.

@passes.chunk(max_bytes="64MiB")
@passes.autocast(policy="bf16")
def loss(params, batch): ...

value, grads = jax.jit(jax.value_and_grad(loss))(params, batch)
print(loss.report())
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import warnings
from collections.abc import Callable, Collection, Iterable, Sequence
from types import MethodType
from typing import Any, Concatenate, Generic, NamedTuple, ParamSpec, Protocol, TypeVar, overload

import jax
import jax.numpy as jnp

from hlat_jax.facts.byte_sizes import format_bytes, parse_bytes
from hlat_jax.host.jax_compat import bound_axes
from hlat_jax.passes import autocast_pass, chunk_pass, kernels_pass, module_state, remat_pass, residuals
from hlat_jax.passes.autocast_pass import CastPolicy
from hlat_jax.passes.jaxpr import (
    by_value,
    function_name,
    is_array,
    is_inexact,
    perturbed_at,
    source_of,
    trace_call,
    without_dead_code,
)
from hlat_jax.passes.liveness import estimated_temporaries, moments
from hlat_jax.passes.products import products_by_dtype
from hlat_jax.passes.remat_pass import RematOptions, RematPlan
from hlat_jax.passes.rewrite.chunks import MAX_BYTES

_Args = ParamSpec("_Args")
_Rest = ParamSpec("_Rest")
_Result = TypeVar("_Result")
_DEFAULT = RematOptions()
ORDER = ("autocast", "kernels", "chunk", "select_residuals", "remat")  # as in `training_program`


class Passed(Generic[_Args, _Result]):
    """A function under a pass. You call it, and transform it, as the function itself.

    Args:
      name: the pass, one of `ORDER`.
      fn: the function, which may be under other passes.
      change: the pass. If the changed function has a `report`, it is part of the table.
    """

    def __init__(self, name: str, fn: Callable[_Args, _Result], change: Callable[[Callable], Callable]):
        functools.update_wrapper(self, fn, updated=())
        self._name, self._fn, self._changed = name, fn, change(module_state.pure(fn))
        self._called: tuple[tuple, dict] | None = None
        self._axes: Sequence[tuple[Any, int]] = ()
        self._mesh: Any = None
        later = [one for one in self._names() if ORDER.index(one) > ORDER.index(name)]
        if later:
            warnings.warn(
                f"{name} runs after {later[-1]} on {function_name(fn)}, so it may change less. "
                f"The order of training_program is {', '.join(ORDER)}.",
                stacklevel=4,
            )

    def __call__(self, *args: _Args.args, **kwargs: _Args.kwargs) -> _Result:
        return module_state.impure(self._call)(*args, **kwargs)

    def _call(self, *args: Any, **kwargs: Any) -> tuple[_Result, dict[int, Any]]:
        """Calls the changed function with modules as `module_state.Split`."""
        self._called = jax.tree.map(_shape_of, (args, kwargs))
        self._axes, self._mesh = bound_axes(), jax.sharding.get_abstract_mesh()
        return self._changed(*args, **kwargs)

    @overload
    def __get__(self, instance: None, owner: Any = None) -> Passed[_Args, _Result]: ...
    @overload
    def __get__(
        self: Passed[Concatenate[Any, _Rest], _Result], instance: object, owner: Any = None
    ) -> Passed[_Rest, _Result]: ...
    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else MethodType(self, instance)  # it has the report of the function too

    def _names(self) -> list[str]:
        return [*self._fn._names(), self._fn._name] if isinstance(self._fn, Passed) else []

    def _stages(self) -> list[tuple[str, Callable, str]]:
        before = self._fn._stages() if isinstance(self._fn, Passed) else [("function", self._fn, "")]
        report = getattr(self._changed, "report", None)
        return [*before, (self._name, self, "" if report is None else str(report()))]

    def report(self) -> str:
        """Returns a table of the function before the passes and after each one, for the last call.

        A row has the matrix products of the function and its gradients, and the temporaries on one device, estimated
        from the trace. The gradients are by all float arguments. The last column lists the changes.

        Raises:
          ValueError: the function was not yet called or traced.
        """
        if self._called is None:
            raise ValueError(f"{self._name}: call the function, or trace it with jax.eval_shape, before its report.")
        called, axes, mesh = self._called, self._axes, self._mesh
        leaves, tree = jax.tree.flatten(called)
        places = [at for at, leaf in enumerate(leaves) if isinstance(leaf, jax.ShapeDtypeStruct)]
        shapes = [leaves[at] for at in places]
        is_traced = all(shape.sharding is None for shape in shapes)  # else the shardings name the mesh
        rows = []
        for name, fn, lines in self._stages():
            run = _with_gradients(module_state.pure(fn), leaves, tree, places)
            with jax.sharding.use_abstract_mesh(mesh) if is_traced else contextlib.nullcontext():
                closed: Any = jax.make_jaxpr(run, axis_env=axes)(*shapes)
            rows.append((name, without_dead_code(closed.jaxpr), lines))
        self._called, self._axes, self._mesh = called, axes, mesh  # of the call, not of this trace
        return table(rows, shapes)


def _shape_of(leaf: Any) -> Any:
    if not is_array(leaf):
        return leaf
    sharding = None if isinstance(leaf, jax.core.Tracer) else getattr(leaf, "sharding", None)
    named = sharding if isinstance(sharding, jax.sharding.NamedSharding) else None
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=named)


def _is_none(leaf: Any) -> bool:
    return leaf is None


def _with_gradients(fn: Callable, leaves: list[Any], tree: Any, places: list[int]) -> Callable:
    """Returns a function of the arrays among the arguments to the results and all gradients of their sum."""

    flat = functools.partial(_unflatten_and_call, fn, leaves, tree, places)

    def run(*arrays: Any) -> list[Any]:
        floats = [at for at, array in enumerate(arrays) if is_inexact(array)]
        flat_fn = perturbed_at(lambda *given: list(map(jnp.asarray, flat(*given))), arrays, floats)
        outs, pull = jax.vjp(flat_fn, *(arrays[at] for at in floats))
        ones = [jnp.ones_like(out) if is_inexact(out) else jnp.zeros(out.shape, jax.dtypes.float0) for out in outs]
        return [*outs, *pull(ones)]

    return run


def _unflatten_and_call(fn: Callable, leaves: list[Any], tree: Any, places: list[int], *arrays: Any) -> list[Any]:
    given = dict(zip(places, arrays, strict=True))
    args, kwargs = jax.tree.unflatten(tree, [given.get(at, leaf) for at, leaf in enumerate(leaves)])
    results, updates = fn(*args, **kwargs)
    return jax.tree.leaves((results, jax.lax.stop_gradient(updates)))  # updates of modules have no gradients


def table(stages: Iterable[tuple[str, Any, str]], arguments: Any) -> str:
    """Returns a table with a row for each stage of a program: its products, its temporaries, the changes.

    Args:
      stages: (name, open jaxpr without dead code, lines of the pass).
      arguments: shapes and shardings of the arguments of the jaxprs.
    """
    rows, before = [("pass", "products", "temporaries", "what it did, and did not")], 0
    for name, jaxpr, lines in stages:
        products = [f"{count:,} {dtypes}" for dtypes, count in sorted(products_by_dtype(jaxpr).items())]
        held = estimated_temporaries(jaxpr, arguments).total
        temporaries = format_bytes(held) + (f" ({held / before - 1:+.0%})" if before else "")
        before = held
        rows += itertools.zip_longest([name], products, [temporaries], lines.splitlines(), fillvalue="")
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


class Moment(NamedTuple):
    """The memory of a program while one operation runs.

    Attributes:
      total_bytes: temporaries on one device, the results of the operation included.
      operation: name of the operation, and its source line if JAX knows it, such as "dot_general at loss.py:8 (loss)".
    """

    total_bytes: int
    operation: str


def memory_timeline(fn: Callable, *args: Any, **kwargs: Any) -> list[Moment]:
    """Returns the temporaries of a program while each operation runs, in order, estimated from the trace.

    The body of a loop runs once. The largest number is the estimate of `report()`.

    Args:
      fn: the program, such as `jax.value_and_grad(loss)` or the step of a `training_program`.
      args, kwargs: its arguments, or their shapes. `memory_timeline` runs nothing.
    """
    (args, kwargs), _ = module_state.split((args, kwargs))
    fn = inspect.unwrap(fn, stop=lambda one: not hasattr(one, "trace"))  # JAX nests no `jit` with compiler options

    def results(*args: Any, **kwargs: Any) -> list[Any]:
        (args, kwargs), modules = module_state.merge((args, kwargs))
        return list(filter(is_array, jax.tree.leaves((fn(*args, **kwargs), modules))))

    closed, leaves, _ = trace_call(results, args, kwargs)
    return [
        Moment(held.total, " at ".join(filter(None, (eqn.primitive.name, source_of(eqn)))))
        for eqn, held in moments(without_dead_code(closed.jaxpr), list(map(_shape_of, leaves)))
    ]


class Decorator(Protocol):
    """A pass with its options, to be applied to a function."""

    def __call__(self, fn: Callable[_Args, _Result], /) -> Passed[_Args, _Result]: ...


def _under(name: str, fn: Any, change: Callable[[Callable], Callable]) -> Any:
    """Returns a function, or a class or static method, under a pass."""
    if isinstance(fn, (classmethod, staticmethod)):
        return type(fn)(Passed(name, fn.__func__, change))
    return Passed(name, fn, change)


@overload
def autocast(fn: Callable[_Args, _Result], *, policy: CastPolicy | str = "bf16") -> Passed[_Args, _Result]: ...
@overload
def autocast(fn: None = None, *, policy: CastPolicy | str = "bf16") -> Decorator: ...
def autocast(fn: Any = None, *, policy: CastPolicy | str = "bf16") -> Any:
    """Returns the function with its fp32 matrix products in bf16 or fp16, see `autocast_pass.autocast`.

    Args:
      fn: the function. Without it, the result is a decorator.
      policy: "bf16", "fp16" or a `CastPolicy`.
    """
    if fn is None:
        return functools.partial(autocast, policy=policy)
    return _under("autocast", fn, functools.partial(autocast_pass.autocast, policy=policy))


@overload
def kernels(
    fn: Callable[_Args, _Result], *, platform: str | None = None, check: bool = True
) -> Passed[_Args, _Result]: ...
@overload
def kernels(fn: None = None, *, platform: str | None = None, check: bool = True) -> Decorator: ...
def kernels(fn: Any = None, *, platform: str | None = None, check: bool = True) -> Any:
    """Returns the function with the platform's attention kernel called where it fits, see `kernels_pass.kernels`.

    Args:
      fn: the function. Without it, the result is a decorator.
      platform, check: as for `kernels_pass.kernels`.
    """
    if fn is None:
        return functools.partial(kernels, platform=platform, check=check)
    return _under("kernels", fn, functools.partial(kernels_pass.kernels, platform=platform, check=check))


@overload
def chunk(
    fn: Callable[_Args, _Result],
    *,
    max_bytes: int | str = MAX_BYTES,
    rules: Collection[str] = (),
    check: bool = True,
) -> Passed[_Args, _Result]: ...
@overload
def chunk(
    fn: None = None, *, max_bytes: int | str = MAX_BYTES, rules: Collection[str] = (), check: bool = True
) -> Decorator: ...
def chunk(fn: Any = None, *, max_bytes: int | str = MAX_BYTES, rules: Collection[str] = (), check: bool = True) -> Any:
    """Returns the function with intermediates above a size computed in chunks, see `chunk_pass.chunk`.

    Args:
      fn: the function. Without it, the result is a decorator.
      max_bytes, rules, check: as for `chunk_pass.chunk`.
    """
    parse_bytes(max_bytes, name="max_bytes")  # at once, and not when the decorator is applied
    if fn is None:
        return functools.partial(chunk, max_bytes=max_bytes, rules=rules, check=check)
    return _under("chunk", fn, functools.partial(chunk_pass.chunk, max_bytes=max_bytes, rules=rules, check=check))


@overload
def select_residuals(fn: Callable[_Args, _Result]) -> Passed[_Args, _Result]: ...
@overload
def select_residuals(fn: None = None) -> Decorator: ...
def select_residuals(fn: Any = None) -> Any:
    """Returns the function with fewer bytes kept for its backward pass, see `residuals.select_residuals`.

    Args:
      fn: the function. Without it, the result is a decorator.
    """
    if fn is None:
        return select_residuals
    return _under("select_residuals", fn, residuals.select_residuals)


def _loss_and_grads(loss: Callable) -> Callable:
    """Returns a function to the loss, or a pair of the loss and auxiliary values, and its gradients.

    The gradients are by the float arrays of the first argument.
    """

    def program(first: Any, *args: Any, **kwargs: Any) -> Any:
        leaves, tree = jax.tree.flatten(first)
        floats = [at for at, leaf in enumerate(leaves) if is_array(leaf) and is_inexact(leaf)]

        def of_floats(given: list[Any]) -> Any:
            chosen = dict(zip(floats, given, strict=True))
            own = jax.tree.unflatten(tree, [chosen.get(at, leaf) for at, leaf in enumerate(leaves)])
            result = loss(own, *args, **kwargs)
            value, aux = result if isinstance(result, (tuple, list)) and len(result) == 2 else (result, None)
            if not is_array(value) or jnp.shape(value) or not is_inexact(value):
                raise ValueError(
                    f"remat: {function_name(loss)} returns neither a loss nor (loss, auxiliary values). Give step= the "
                    "program that must fit."
                )
            return value, aux

        if not floats:
            raise ValueError(
                f"remat: the first argument of {function_name(loss)} has no float arrays. Put the parameters first, or "
                "give step= the program that must fit."
            )
        return jax.value_and_grad(of_floats, has_aux=True)([leaves[at] for at in floats])

    return program


_Step = Callable[[Callable], Callable]


@overload
def remat(
    fn: Callable[_Args, _Result], *, budget: int | str, step: _Step = _loss_and_grads, options: RematOptions = _DEFAULT
) -> Passed[_Args, _Result]: ...
@overload
def remat(
    fn: None = None, *, budget: int | str, step: _Step = _loss_and_grads, options: RematOptions = _DEFAULT
) -> Decorator: ...
def remat(fn: Any = None, *, budget: int | str, step: _Step = _loss_and_grads, options: RematOptions = _DEFAULT) -> Any:
    """Returns the function with intermediates computed again, so that `step` of it fits a budget of temporaries.

    The first call with new shapes compiles programs until one fits. Later calls use its choice.

    Args:
      fn: the function. Without it, the result is a decorator.
      budget: "12GiB" or bytes, on one device.
      step: function from `fn` to the program that must fit. It takes the arguments of `fn`, with keyword arguments in
        a dict at the end. The default program is the loss and its gradients by the float arrays of the first argument.
        `fn` may return a pair: the loss, and auxiliary values whose gradients do not count.
      options: options of the choice.

    Raises:
      ValueError: a budget that is not a size, or (BudgetNotMet) at a call a budget that no program fits.
    """
    parse_bytes(budget, name="budget")  # at once, and not when the function is called
    if fn is None:
        return functools.partial(remat, budget=budget, step=step, options=options)
    return _under("remat", fn, functools.partial(_WithinBudget, budget=budget, step=step, options=options))


class _WithinBudget:
    """A function that is fitted to a budget when it is called with new shapes."""

    def __init__(self, fn: Callable, budget: int | str, step: Callable, options: RematOptions):
        functools.update_wrapper(self, fn, updated=())
        self._fn, self._budget, self._step, self._options = fn, budget, step, options
        self._plans: dict[Any, RematPlan] = {}
        self._last: RematPlan | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        leaves, tree = jax.tree.flatten((args, kwargs), is_leaf=_is_none)
        shapes = [_shape_of(leaf) for leaf in leaves]
        is_dynamic = [isinstance(shape, jax.ShapeDtypeStruct) for shape in shapes]

        def of_arrays(*arrays: Any) -> Any:
            """Calls the function with arguments in which anything that is no array is None."""
            given = jax.tree.leaves(arrays if kwargs else (arrays, {}), is_leaf=_is_none)
            merged = [new if chosen else old for new, old, chosen in zip(given, shapes, is_dynamic, strict=True)]
            own_args, own_kwargs = jax.tree.unflatten(tree, merged)
            return self._fn(*own_args, **own_kwargs)

        def only_arrays(values: Iterable[Any]) -> tuple:
            kept = [value if chosen else None for value, chosen in zip(values, is_dynamic, strict=True)]
            own_args, own_kwargs = jax.tree.unflatten(tree, kept)
            return (*own_args, own_kwargs) if own_kwargs else own_args

        key = tuple(map(by_value, shapes)), tree
        if key not in self._plans:
            functools.update_wrapper(of_arrays, self._fn, updated=())
            self._plans[key] = self._fit(of_arrays, only_arrays(shapes))
        self._last = self._plans[key]
        return self._last.fn(*only_arrays(leaves))

    def _fit(self, of_arrays: Callable, shapes: tuple) -> RematPlan:
        own_step = self._step is not _loss_and_grads and module_state.has_modules(shapes)
        step = functools.partial(module_state.program_of, self._step, with_modules=own_step)
        given: dict[str, Any] = {"budget_bytes": self._budget, "options": self._options, "name": "budget"}
        try:
            return remat_pass.fit(of_arrays, *shapes, step=step, **given)
        except NameError as error:
            if not bound_axes():
                raise
            raise ValueError(
                f"remat compiles {function_name(self._fn)} alone, but it has a collective: {error}. Apply remat to the "
                "function that has jax.vmap or jax.shard_map inside."
            ) from error

    def report(self) -> str:
        return "" if self._last is None else str(self._last.report())
