"""Keeps the updates that Flax NNX modules make to their state inside a function that a pass changes.

Passes change pure functions, and JAX gives these copies of the modules. `pure` returns updates as results, and `impure`
writes them to the caller's modules. Flax is not imported here: without it there are no modules.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Callable
from typing import Any

import jax

from hlat_jax.passes.jaxpr import function_name


@functools.partial(jax.tree_util.register_dataclass, data_fields=["state"], meta_fields=["graph", "at"])
@dataclasses.dataclass(frozen=True)
class Split:
    """A module among the arguments of a function.

    Attributes:
      state: the variables that no earlier module of the call has.
      graph: the structure of all modules of the call.
      at: the number of the module in the call.
    """

    state: Any
    graph: Any
    at: int


def _nnx() -> Any:
    return sys.modules.get("flax.nnx")


def _is_split(leaf: Any) -> bool:
    return isinstance(leaf, Split)


def split(arguments: Any) -> tuple[Any, list[Any]]:
    """Returns (the arguments with a `Split` in place of each module, the modules)."""
    nnx = _nnx()
    if nnx is None:
        return arguments, []
    leaves, tree = jax.tree.flatten(arguments, is_leaf=lambda leaf: isinstance(leaf, (nnx.Pytree, nnx.Variable)))
    places = [at for at, leaf in enumerate(leaves) if isinstance(leaf, (nnx.Pytree, nnx.Variable))]
    modules = [leaves[at] for at in places]
    if modules:
        graph, state = nnx.split(modules)
        for at, place in enumerate(places):
            leaves[place] = Split(state.get(at, {}), graph, at)
    return jax.tree.unflatten(tree, leaves), modules


def merge(arguments: Any) -> tuple[Any, list[Any]]:
    """Returns (the arguments with a new module in place of each `Split`, the modules)."""
    leaves, tree = jax.tree.flatten(arguments, is_leaf=_is_split)
    splits = list(filter(_is_split, leaves))
    if not splits:
        return arguments, []
    modules = _nnx().merge(splits[0].graph, _nnx().State({one.at: one.state for one in splits}))
    return jax.tree.unflatten(tree, [modules[leaf.at] if _is_split(leaf) else leaf for leaf in leaves]), modules


def pure(fn: Callable) -> Callable:
    """Returns a function of arguments with `Split` to the results of `fn` and the variables that it updates.

    Raises:
      ValueError: at a call, if `fn` adds variables to a module or changes its attributes.
    """

    def run(*args: Any, **kwargs: Any) -> tuple[Any, dict[int, Any]]:
        (args, kwargs), modules = merge((args, kwargs))
        if not modules:
            return fn(*args, **kwargs), {}
        graph, state = _nnx().split(modules)
        before, tree = jax.tree.flatten(state)  # now, since the state shares its variables with the modules
        outs = fn(*args, **kwargs)
        new_graph, state = _nnx().split(modules)
        new_tree: Any = jax.tree.structure(state)
        if new_graph != graph or new_tree != tree:
            raise ValueError(
                f"{function_name(fn)} adds variables to a Flax NNX module, or changes its attributes or the structure "
                "of a variable. A pass keeps updates of variables only. Use nnx.split before the pass and nnx.merge "
                "inside it, and return the new state."
            )
        pairs = zip(before, jax.tree.leaves(state), strict=True)
        return outs, {at: new for at, (old, new) in enumerate(pairs) if new is not old}

    return _named(run, fn)


def impure(fn: Callable) -> Callable:
    """Returns the function of modules that `fn`, changed from the result of `pure`, computes. It updates modules."""

    def run(*args: Any, **kwargs: Any) -> Any:
        (args, kwargs), modules = split((args, kwargs))
        outs, updates = fn(*args, **kwargs)
        if updates:
            leaves, tree = jax.tree.flatten(_nnx().state(modules))
            new = [updates.get(at, leaf) for at, leaf in enumerate(leaves)]
            _nnx().update(modules, jax.tree.unflatten(tree, new))
        return outs

    return _named(run, fn)


def has_modules(arguments: Any) -> bool:
    """Returns whether there is a `Split` among the arguments."""
    return any(map(_is_split, jax.tree.leaves(arguments, is_leaf=_is_split)))


def program_of(step: Callable[[Callable], Callable], fn: Callable, *, with_modules: bool) -> Callable:
    """Returns the program `step(fn)` of a function from `pure`, with arguments as for `fn`.

    Args:
      step: function from a function to its program.
      fn: the function.
      with_modules: whether the step gets modules, and not a `Split` for each.
    """
    if with_modules:
        program = step(impure(fn))
        return lambda *args: program(*merge(args)[0])

    return step(_named(lambda *args: fn(*args)[0], fn))


def _named(run: Callable, fn: Callable) -> Callable:
    """Returns `run` with the names of `fn`, which reports and compiled programs have."""
    functools.update_wrapper(run, fn, updated=())
    run.__qualname__ = function_name(fn)
    return run
