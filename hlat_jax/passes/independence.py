"""Finds dimensions along which an equation computes every index alike, and binds it for a part of such a dimension.

There is a rule for each primitive that JAX lowers array code to, and no rule for an op such as a softmax.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend import core

from hlat_jax.passes.jaxpr import ELEMENTWISE, jax_function, op_name, rebind

REDUCTIONS = ("reduce_sum", "reduce_max", "reduce_min", "reduce_and", "reduce_or")
SUM = "reduce_sum"
_CUMULATIVE = ("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp")

# Functions of JAX that compute every index alike, with derivative rules that are not the derivatives of their bodies.
_ELEMENTWISE_CALLS = {
    "relu": jax.nn.relu,
    "relu6": jax.nn.relu6,
    "logaddexp": jnp.logaddexp,  # softplus and log_sigmoid call it
    "xlogy": jax.scipy.special.xlogy,
    "xlog1py": jax.scipy.special.xlog1py,
}


@dataclasses.dataclass(frozen=True)
class Link:
    """A dimension along which an equation computes every index alike, from the same index of its operands.

    Attributes:
      operands: the dimension of each operand. None for an operand that is the same for all indices.
      results: the dimension of each result. None if the dimension is reduced.
      reduction: one of `REDUCTIONS` if the dimension is reduced, else "".
    """

    operands: tuple[int | None, ...]
    results: tuple[int | None, ...]
    reduction: str = ""


def links(eqn: core.JaxprEqn) -> list[Link]:
    """Returns the links of an equation. A dimension without a link is mixed, or its primitive has no rule.

    The link of a reshape holds for equal blocks of the dimension, as many as divide the sizes on both sides.
    """
    name, params = eqn.primitive.name, eqn.params
    shapes = [atom.aval.shape for atom in eqn.invars]
    if not eqn.outvars:  # `unstack` of nothing
        return []
    out = eqn.outvars[0].aval.shape
    if name in ELEMENTWISE or is_elementwise_call(eqn):
        alike = [[len(shape) == len(out) and shape[dim] == out[dim] for shape in shapes] for dim in range(len(out))]
        return [Link(tuple(dim if same else None for same in each), (dim,)) for dim, each in enumerate(alike)]
    if name == "iota":
        return [Link((), (dim,)) for dim in range(len(out))]
    if name == "broadcast_in_dim" and len(shapes) == 1:
        old = {new: dim for dim, new in enumerate(params["broadcast_dimensions"]) if shapes[0][dim] == out[new]}
        return [Link((old.get(dim),), (dim,)) for dim in range(len(out))]
    if name == "sharding_constraint":
        own = params["sharding"].shard_shape(out)
        return _unchanged(eqn, [dim for dim, size in enumerate(out) if own[dim] != size])
    if name == "transpose":
        return [Link((dim,), (new,)) for new, dim in enumerate(params["permutation"])]
    if name == "squeeze":
        return _kept(shapes, params["dimensions"], 1)
    if name == "reshape" and params["dimensions"] is None and len(shapes) == 1:
        return [Link((dim,), (new,)) for dim, new in _blocks(shapes[0], out)]
    if name in (*REDUCTIONS, "argmax", "argmin"):
        is_bitwise = name in ("reduce_and", "reduce_or") and eqn.outvars[0].aval.dtype != bool
        reduced = [Link((dim,), (None,), name) for dim in params["axes"] if name in REDUCTIONS and not is_bitwise]
        return _kept(shapes, params["axes"], len(eqn.outvars)) + reduced
    if name in _CUMULATIVE or name == "split":
        return _unchanged(eqn, [params["axis"]])
    if name == "sort":
        return _unchanged(eqn, [params["dimension"]])
    if name == "top_k":
        return _unchanged(eqn, [params["axis"]] if "axis" in params else [len(out) - 1])
    if name == "concatenate":
        return _unchanged(eqn, [params["dimension"]])
    if name == "stack":
        return [Link((dim,) * len(shapes), (dim + (dim >= params["axis"]),)) for dim in range(len(shapes[0]))]
    if name == "unstack":
        return _kept(shapes, [params["axis"]], len(eqn.outvars))
    if name == "rev":
        return _unchanged(eqn, params["dimensions"])
    if name == "pad":
        dims = [dim for dim, amounts in enumerate(params["padding_config"]) if any(amounts)]
        return [Link((one.results[0], None), one.results) for one in _unchanged(eqn, dims)]
    if name == "slice":
        strides = params["strides"] or (1,) * len(out)
        return _unchanged(eqn, [dim for dim, size in enumerate(out) if size != shapes[0][dim] or strides[dim] != 1])
    if name == "dynamic_slice":
        dims = [dim for dim, size in enumerate(out) if size != shapes[0][dim]]
        return [Link((one.results[0], *(None for _ in shapes[1:])), one.results) for one in _unchanged(eqn, dims)]
    if name == "dot_general":
        return list(_links_of_product(params["dimension_numbers"], shapes))
    if name == "gather":
        return list(_links_of_gather(params, shapes, out))
    if name == "conv_general_dilated" and params["batch_group_count"] == 1:
        numbers = params["dimension_numbers"]
        return [Link((numbers.lhs_spec[0], None), (numbers.out_spec[0],))]
    return []


def is_elementwise_call(eqn: core.JaxprEqn) -> bool:
    """Returns whether an equation calls a function of JAX such as `jax.nn.relu`, which has a derivative rule."""
    return eqn.primitive.name == "custom_jvp_call" and jax_function(eqn) in _ELEMENTWISE_CALLS


class Start(NamedTuple):
    """The start of a part of a dimension.

    Attributes:
      dim: the dimension.
      first: first index of the part in the whole.
      new: the first index that is not in the part before, which the last part may overlap.
      size: size of the whole.
    """

    dim: int
    first: Any
    new: Any
    size: int


def bind_part(
    eqn: core.JaxprEqn, operands: Sequence[Any], shapes: Sequence[Sequence[int]], *, start: Start | None = None
) -> list[Any]:
    """Returns the results of an equation, with these `shapes`, for operands with linked dimensions cut.

    An iota and a gather of single indices need the `start` of the part. Such a gather returns 0 for the indices of
    other parts, so the sum over all parts is the whole result.
    """
    name, params, changed = eqn.primitive.name, eqn.params, {}
    if is_elementwise_call(eqn):
        return [_ELEMENTWISE_CALLS[op_name(eqn)](*operands)]
    if name == "iota":
        if start is None or start.dim != params["dimension"]:
            return [jax.lax.broadcasted_iota(params["dtype"], shapes[0], params["dimension"])]
        return [(jax.lax.broadcasted_iota(jnp.int32, shapes[0], start.dim) + start.first).astype(params["dtype"])]
    if name == "broadcast_in_dim":
        changed = {"shape": tuple(shapes[0]), "sharding": None}
    elif name == "reshape":
        changed = {"new_sizes": tuple(shapes[0]), "sharding": None}
    elif name in ("slice", "gather", "dynamic_slice"):  # what took the whole dimension takes the whole part
        key = "limit_indices" if name == "slice" else "slice_sizes"
        whole = zip(params[key], eqn.invars[0].aval.shape, operands[0].shape, strict=True)
        changed = {key: tuple(new if taken == old else taken for taken, old, new in whole)}
        if name == "gather" and start is not None:
            return [_gathered_from_part(eqn, *operands, start, **changed)]
    return rebind(eqn, operands, **changed)


def _kept(shapes: Sequence[Sequence[int]], removed: Sequence[int], num_results: int) -> list[Link]:
    left = [dim for dim in range(len(shapes[0])) if dim not in removed]
    return [Link((dim,), (new,) * num_results) for new, dim in enumerate(left)]


def _unchanged(eqn: core.JaxprEqn, mixed: Sequence[int]) -> list[Link]:
    dims = [dim for dim in range(len(eqn.outvars[0].aval.shape)) if dim not in mixed]
    return [Link((dim,) * len(eqn.invars), (dim,) * len(eqn.outvars)) for dim in dims]


def _blocks(old: Sequence[int], new: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yields the pairs of dimensions before which both shapes have the same number of elements: their blocks agree."""
    starts = {math.prod(old[:dim]): dim for dim, size in enumerate(old) if size > 1}
    for dim, size in enumerate(new):
        if size > 1 and math.prod(new[:dim]) in starts:
            yield starts[math.prod(new[:dim])], dim


def _links_of_product(numbers: Any, shapes: Sequence[Sequence[int]]) -> Iterator[Link]:
    contracted, batch = numbers
    for place, dims in enumerate(zip(*batch, strict=True)):
        yield Link(dims, (place,))
    for dims in zip(*contracted, strict=True):
        yield Link(dims, (None,), SUM)
    place = len(batch[0])
    for side, shape in enumerate(shapes):
        for dim in range(len(shape)):
            if dim not in contracted[side] and dim not in batch[side]:
                yield Link((None, dim) if side else (dim, None), (place,))
                place += 1


def _links_of_gather(params: Any, shapes: Sequence[Sequence[int]], out: Sequence[int]) -> Iterator[Link]:
    numbers = params["dimension_numbers"]
    batch = [dim for dim in range(len(out)) if dim not in numbers.offset_dims]
    batching = dict(zip(numbers.start_indices_batching_dims, numbers.operand_batching_dims, strict=True))
    for own, new in enumerate(batch):
        yield Link((batching.get(own), own), (new,))
    gone = (*numbers.collapsed_slice_dims, *numbers.operand_batching_dims)
    whole = [dim for dim in range(len(shapes[0])) if dim not in gone]
    for dim, new in zip(whole, numbers.offset_dims, strict=True):
        if dim not in numbers.start_index_map and params["slice_sizes"][dim] == shapes[0][dim]:
            yield Link((dim, None), (new,))
    for dim in set(numbers.start_index_map) & set(numbers.collapsed_slice_dims):
        yield Link((dim, None), (None,), SUM)


def _gathered_from_part(eqn: core.JaxprEqn, operand: Any, indices: Any, start: Start, **changed: Any) -> Any:
    dim, first, new, size = start
    numbers, num_own = eqn.params["dimension_numbers"], operand.shape[dim]
    column = numbers.start_index_map.index(dim)
    index = indices[..., column].astype(int)
    if eqn.params["mode"] == jax.lax.GatherScatterMode.CLIP:
        index = jnp.clip(index, 0, size - 1)
    is_own = (index >= new) & (index < first + num_own)
    is_own |= ((index < 0) | (index >= size)) & (new == 0)  # the first part returns what is for indices of no part
    local = indices.at[..., column].set(jnp.clip(index - first, -1, num_own).astype(indices.dtype))
    changed |= {"indices_are_sorted": False, "unique_indices": False}
    (taken,) = rebind(eqn, [operand, local], **changed)
    return jnp.where(jnp.expand_dims(is_own, numbers.offset_dims), taken, jnp.zeros_like(taken))
