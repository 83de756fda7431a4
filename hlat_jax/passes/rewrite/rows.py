"""Takes rows of a product before it is computed: `(x @ w)[:, :-1].reshape(-1, V)` is `x[:, :-1].reshape(-1, D) @ w`.

Otherwise a slice of logits, or a merge of their dimensions, would mix rows that can be computed in chunks. Elementwise
operations in between, such as a bias, a softcap or a cast, are then computed on the rows too.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
from jax.extend import core

from hlat_jax.passes.jaxpr import ELEMENTWISE, bind_again, is_literal, place_of, variables


def rows_first(eqn: Any, producer: Callable[[Any], Any]) -> list[Any]:
    """Returns the equations that compute the result of a slice or a reshape from rows of products.

    Args:
      eqn: an equation. If it takes no rows of a product, it is returned as it is.
      producer: function from an atom to the equation that computes it, or to None if others read the atom too.
    """
    rows = _rows_of(eqn)
    if rows is None or not rows.are_of_product(eqn.invars[0], producer):
        return [eqn]
    eqns: list[Any] = []

    def emit(fn: Callable[..., Any], *atoms: Any) -> Any:
        """Adds the equations of a function of some atoms, and returns the variable of its result."""

        def of_variables(*args: Any) -> Any:
            left = iter(args)
            return fn(*(atom.val if is_literal(atom) else next(left) for atom in atoms))

        with place_of(eqn):
            traced = jax.make_jaxpr(of_variables)(*(var.aval for var in variables(atoms))).jaxpr
        names = dict(zip(traced.invars, variables(atoms), strict=True))
        for one in traced.eqns:
            names |= {var: core.Var(var.aval) for var in one.outvars}
            invars = [atom if is_literal(atom) else names[atom] for atom in one.invars]
            eqns.append(one.replace(invars=invars, outvars=[names[var] for var in one.outvars]))
        return names[traced.outvars[0]]

    def taken(atom: Any) -> Any:
        if not atom.aval.shape:
            return atom
        if not rows.are_of_product(atom, producer):
            return emit(lambda x: rows.take(x, rows.first), atom)
        one = producer(atom)
        if one.primitive.name == "dot_general":
            return emit(lambda *operands: rows.product(one, list(operands)), *one.invars)
        return emit(lambda *operands: bind_again(one, operands)[0], *map(taken, one.invars))

    taken(eqn.invars[0])
    eqns[-1] = eqns[-1].replace(outvars=eqn.outvars)
    return eqns


@dataclasses.dataclass(frozen=True)
class _Rows:
    """What a slice or a reshape takes of consecutive dimensions.

    Attributes:
      first: the first of them.
      sizes: of them.
      slices: (start, limit, stride) of each; None where they are merged into one.
    """

    first: int
    sizes: tuple[int, ...]
    slices: tuple[tuple[int, int, int], ...] | None

    def take(self, x: Any, at: int) -> Any:
        """Returns the rows of an array that has these dimensions from `at` on."""
        stop = at + len(self.sizes)
        if self.slices is None:
            return x.reshape(*x.shape[:at], math.prod(x.shape[at:stop]), *x.shape[stop:])
        for dim, (size, (start, limit, stride)) in enumerate(zip(self.sizes, self.slices, strict=True), at):
            x = jax.lax.slice_in_dim(x, start, limit, stride, dim) if x.shape[dim] == size else x
        return x

    def are_of_product(self, atom: Any, producer: Callable[[Any], Any], *, depth: int = 16) -> bool:
        """Returns whether they are rows of an operand of a product, `depth` elementwise equations before at most."""
        eqn = producer(atom)
        if eqn is None or eqn.effects or not depth or any(is_literal(one) and one.aval.shape for one in eqn.invars):
            return False
        if eqn.primitive.name == "dot_general":
            return self._place(eqn) is not None
        stop = self.first + len(self.sizes)
        shapes = [operand.aval.shape[self.first : stop] for operand in eqn.invars]
        # a slice may be of any; merged are all of them, or dimensions of size 1
        are_fit = self.slices is not None or all(not set(shape) - {1} or shape == self.sizes for shape in shapes)
        of_product = (self.are_of_product(one, producer, depth=depth - 1) for one in eqn.invars if one.aval.shape)
        return eqn.primitive.name in ELEMENTWISE and are_fit and any(of_product)

    def _place(self, product: Any) -> tuple[int, int] | None:
        """Returns which operand of a product has them, and from which dimension on; None if both or neither do."""
        contracted, (batch, _) = product.params["dimension_numbers"]
        dims = [
            (side, dim)
            for side, operand in enumerate(product.invars)
            for dim in range(operand.aval.ndim)
            if dim not in contracted[side]
        ][self.first : self.first + len(self.sizes)]
        side, first = dims[0]
        is_free = not batch and product.params.get("out_sharding") is None
        return dims[0] if is_free and dims == [(side, first + at) for at in range(len(dims))] else None

    def product(self, product: Any, operands: list[Any]) -> Any:
        """Returns the rows of a product of arrays."""
        side, first = self._place(product)
        contracted, batch = product.params["dimension_numbers"]
        if self.slices is None:
            moved = tuple(dim - (len(self.sizes) - 1) * (dim > first) for dim in contracted[side])
            contracted = (moved, contracted[1]) if side == 0 else (contracted[0], moved)
        operands[side] = self.take(operands[side], first)
        return bind_again(product, operands, dimension_numbers=(contracted, batch))[0]


def _rows_of(eqn: Any) -> _Rows | None:
    """Returns what a slice takes, or a reshape that merges dimensions; None for other equations."""
    name, params = eqn.primitive.name, eqn.params
    if name == "slice":
        old = eqn.invars[0].aval.shape
        slices = list(
            zip(params["start_indices"], params["limit_indices"], params["strides"] or [1] * len(old), strict=True)
        )
        taken = [dim for dim, size in enumerate(old) if slices[dim] != (0, size, 1)]
        first, stop = (taken[0], taken[-1] + 1) if taken else (0, 0)
        return _Rows(first, old[first:stop], tuple(slices[first:stop])) if taken else None
    if name == "reshape" and params["dimensions"] is None and params.get("sharding") is None:
        old, new = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
        num_merged = len(old) - len(new) + 1
        for first in range(len(new)) if num_merged > 1 else ():
            merged = old[first : first + num_merged]
            if (*old[:first], math.prod(merged), *old[first + num_merged :]) == new:
                return _Rows(first, merged, None)
    return None
