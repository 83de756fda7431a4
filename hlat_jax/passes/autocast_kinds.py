"""Kinds of values under autocast: narrow, or wide with the reason."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from hlat_jax.host.jax_compat import ad, batching, mlir


class Kind(enum.IntEnum):
    """The dtype in which a value is held, and why. `mix` gives the kind of fp32 arithmetic on several values."""

    FIXED = 0  # not declared fp32 (integers, keys, the user's own bf16): its dtype is unchanged
    FREE = 1  # an fp32 constant that the narrow dtype can represent: takes the dtype of the other operands
    LOW = 2  # declared fp32, held in the narrow dtype
    SOFT = 3  # fp32 only because it is declared so: an argument, a parameter
    WIDE = 4  # fp32 because a `never` operation made it so
    KEPT = 5  # fp32 until a `never` or `always` operation reads it: a loop's accumulator
    INTEGER = 6  # as KEPT, also in products: computed from integers and constants, exact in fp32 but not when narrow
    HUGE = 7  # as KEPT: has, or may have, numbers that the narrow dtype cannot represent: a mask of -1e30


@dataclasses.dataclass(eq=False)
class Value:
    """A value of the declared program, with its casts so far.

    Attributes:
      kind: kind of the value, see `Kind`.
      dtype: declared dtype.
      size: number of elements.
      forms: the arrays cast so far, by dtype.
      is_saturated: whether finite numbers beyond the range of the narrow dtype are finite in the cast to it.
    """

    kind: Kind
    dtype: Any
    size: int
    forms: dict[Any, Any]
    is_saturated: bool = False

    def held(self, low: Any) -> Any:
        """Returns the array in the dtype of its kind."""
        return self.narrow(low) if self.kind is Kind.LOW else self.declared()

    def declared(self) -> Any:
        """Returns the array in the dtype of the declared program."""
        return self._as(self.dtype)

    def narrow(self, low: Any, *, saturate: bool = False) -> Any:
        """Returns the array in `low`, or unchanged if it is not declared fp32.

        Args:
          low: the narrow dtype.
          saturate: whether finite numbers beyond the range of `low` become its largest. In HUGE values they always do.
        """
        if self.kind is Kind.FIXED:
            return self.declared()
        if (self.kind is Kind.HUGE or (saturate and self.kind > Kind.LOW)) and not self.is_saturated:
            self.forms[low], self.is_saturated = saturated(self.declared(), low), True
        return self._as(low)

    def _as(self, dtype: Any) -> Any:
        if dtype not in self.forms:
            (array, *_) = self.forms.values()
            self.forms[dtype] = jax.lax.convert_element_type(array, dtype)
        return self.forms[dtype]


def saturated(array: jax.Array, low: Any) -> jax.Array:
    """Returns an fp32 array in `low`, in which finite numbers stay finite. The derivative is the same as for a cast.

    It is a primitive so that it can be transposed like a cast, because it occurs in tangent programs too.
    """
    return _saturated_p.bind(array, low=jnp.dtype(low))


def _saturated(array: jax.Array, *, low: Any) -> jax.Array:
    limit = np.float32(jnp.finfo(low).max)
    is_infinite = jax.lax.abs(array) == np.float32(np.inf)
    finite = jax.lax.clamp(-limit, array, limit)
    return jax.lax.convert_element_type(jax.lax.select(is_infinite, array, finite), low)


def _transposed(cotangent: Any, array: Any, *, low: Any) -> list[Any]:
    is_zero = isinstance(cotangent, ad.Zero)
    return [ad.Zero(array.aval) if is_zero else jax.lax.convert_element_type(cotangent, jnp.float32)]


_saturated_p = core.Primitive("saturated_cast")
_saturated_p.def_impl(_saturated)
_saturated_p.def_abstract_eval(lambda aval, *, low: aval.update(dtype=low, weak_type=False))
ad.defjvp(_saturated_p, lambda tangent, _, *, low: jax.lax.convert_element_type(tangent, low))
ad.primitive_transposes[_saturated_p] = _transposed
batching.defvectorized(_saturated_p)
mlir.register_lowering(_saturated_p, mlir.lower_fun(_saturated, multiple_results=False))


def mix(kinds: Iterable[Kind]) -> Kind:
    """Returns the highest kind, for fp32 arithmetic on several. INTEGER with other fp32 data counts as KEPT."""
    kinds = set(kinds)
    if Kind.INTEGER in kinds and kinds - {Kind.FIXED, Kind.FREE, Kind.INTEGER}:
        kinds = {Kind.KEPT, *(kinds - {Kind.INTEGER})}
    return max(kinds, default=Kind.FIXED)


def value(array: Any, *, kind: Kind, aval: Any, low: Any) -> Value:
    """Returns the `Value` of an array that is held as `kind` and has the declared type `aval`."""
    dtype = getattr(aval, "dtype", None)
    return Value(kind, dtype, getattr(aval, "size", 0), {low if kind is Kind.LOW else dtype: array})


def is_fp32(aval: Any) -> bool:
    """Returns whether a value is declared fp32, so that autocast may hold it in another dtype."""
    return isinstance(aval, jax.core.ShapedArray) and aval.dtype == jnp.float32


def kind_of_constant(array: Any, aval: Any, low: Any) -> Kind:
    """Returns the kind of a constant, which is a literal (FREE or HUGE) or an array that a function closes over."""
    if not is_fp32(aval):
        return Kind.FIXED
    if isinstance(array, jax.core.Tracer):
        return Kind.SOFT
    if isinstance(array, jax.Array) and not array.is_fully_addressable:  # bf16 has almost the range of fp32
        return Kind.HUGE if low == jnp.float16 else Kind.SOFT
    info, sizes = jnp.finfo(low), np.abs(np.asarray(array, np.float32))
    sizes = sizes[np.isfinite(sizes) & (sizes > 0)]
    if sizes.size and float(sizes.max()) > float(info.max):
        return Kind.HUGE
    if aval.size > 1:
        return Kind.SOFT
    # HUGE also for an epsilon that would become 0
    return Kind.HUGE if sizes.size and float(sizes.min()) < float(info.smallest_subnormal) else Kind.FREE
