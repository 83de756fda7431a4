"""What a loss function of a training step may take and return.

It is (params, microbatch) -> loss, and may take by name what `GIVEN` lists.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hlat_jax.batch import SumAndCount
from hlat_jax.facts.names import nearest

# What a loss function is given by keyword, where its signature has a parameter of that name without a default.
GIVEN = ("model_state", "keys", "train")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LossAux:
    """What the loss of some microbatches returns besides its sum.

    Attributes:
      count: float32, the divisor of that sum; the number of microbatches where the loss is a plain mean.
      aux: sums of the auxiliary values.
      model_state: after the last of them.
      is_mean: whether the loss is a plain mean.
    """

    count: Any
    aux: Any = None
    model_state: Any = None
    is_mean: bool = dataclasses.field(default=False, metadata={"static": True})


def check_loss(
    loss_fn: Callable, *, has_aux: bool, given: Sequence[str] = (), is_training: bool = True
) -> Callable[..., tuple[jax.Array, LossAux]]:
    """Returns (params, rows, model_state) -> (loss sum, LossAux) from the loss function of a step.

    `rows` is a microbatch; for a loss function that takes keys in training, the pair of it and them.

    Args:
      loss_fn: the loss function.
      has_aux: whether it returns auxiliary values.
      given: what it takes by name, see `given_names`.
      is_training: whether it is called as in training; otherwise the model state that it returns is dropped.

    Raises:
      ValueError: when it is traced: the loss function returns anything else.
    """
    has_state, has_keys = "model_state" in given, "keys" in given

    @functools.wraps(loss_fn)
    def with_checks(params: Any, rows: Any, model_state: Any) -> tuple[jax.Array, LossAux]:
        part, keys = rows if has_keys and is_training else (rows, None)
        values = {"model_state": model_state, "keys": keys, "train": is_training}
        returned = loss_fn(params, part, **{name: values[name] for name in given})
        parts = _parts_of(returned, has_aux=has_aux, has_state=has_state)
        loss, new_state, aux = parts or (returned, None, None)
        total, count = loss if _is_sum(loss) else (loss, 1.0)
        are_numbers = _is_number(total, jnp.floating) and _is_number(count, jnp.floating, jnp.integer)
        if parts is None or not are_numbers or jnp.shape(total) or jnp.shape(count):
            raise ValueError(_refusal(returned, has_aux=has_aux, has_state=has_state))
        _check_aux(aux)
        if has_state:
            _check_new_state(new_state, model_state)
        total, count, aux = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float32), (total, count, aux))
        return total, LossAux(count, aux, new_state if is_training else None, is_mean=not _is_sum(loss))

    return with_checks


def check_model_state(model_state: Any, given: Sequence[str]) -> None:
    """Raises ValueError for a model state that the loss function does not take, or one that cannot be carried."""
    if "model_state" not in given:
        raise ValueError("loss_fn takes no model_state: define it as loss(params, batch, *, model_state).")
    for path, leaf in jax.tree_util.tree_leaves_with_path(model_state):
        dtype = getattr(leaf, "dtype", None)
        if dtype is None or not (jnp.issubdtype(dtype, jnp.floating) or jnp.issubdtype(dtype, jnp.integer)):
            kind = type(leaf).__name__ if dtype is None else dtype
            raise ValueError(
                f"model_state{jax.tree_util.keystr(path)} is {kind}: give floating-point or integer arrays, and bind "
                "other values with functools.partial. Random keys come as `keys`."
            )


def given_names(loss_fn: Callable) -> tuple[str, ...]:
    """Returns which of `GIVEN` a loss function takes: its parameters without a default after (params, microbatch).

    Raises:
      ValueError: another parameter without a default.
    """
    try:
        parameters = list(inspect.signature(loss_fn).parameters.values())
    except (TypeError, ValueError):  # some functions written in C have no signature
        parameters = []
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    is_named = [p not in positional[:2] and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in parameters]
    names = tuple(p.name for p, named in zip(parameters, is_named, strict=True) if named and p.default is p.empty)
    for name in names:
        if name not in GIVEN:
            raise ValueError(
                f"loss_fn takes {name!r}: besides (params, microbatch), a training step gives {', '.join(GIVEN)} by "
                f"name. {nearest(name, GIVEN)} Bind other values with functools.partial."
            )
    return names


def row_keys(seed: jax.Array, step: jax.Array, num_rows: int) -> jax.Array:
    """Returns a random key for each row of a batch, from (seed, step, index of the row in the batch over all devices).

    The generator is named, because a function that is mapped over keys of `rbg` draws from the first of them alone.
    """
    key = jax.random.fold_in(jax.random.key(seed, impl="threefry2x32"), step)
    return jax.vmap(functools.partial(jax.random.fold_in, key))(jnp.arange(num_rows, dtype=jnp.uint32))


def check_divides(batch: Any, *, num_devices: int, num_microbatches: int) -> None:
    """Raises ValueError for a batch whose rows do not divide over the devices and into the microbatches.

    Its fields must agree on the number of rows, where there are several parts.
    """
    multiple = num_devices * num_microbatches
    if multiple == 1:
        return
    split = [f"over {num_devices} devices"] * (num_devices > 1)
    split += [f"into num_microbatches={num_microbatches}"] * (num_microbatches > 1)
    shapes = {_name(path): jnp.shape(field) for path, field in jax.tree_util.tree_leaves_with_path(batch)}
    sizes = {shape[0]: name for name, shape in shapes.items() if shape}
    if len(sizes) > 1:
        (size, name), (other_size, other_name) = list(sizes.items())[:2]
        raise ValueError(
            f"the batch's {name} has {size} rows and its {other_name} has {other_size}, so it cannot be divided "
            f"{' and '.join(split)}. Give graphs and other ragged data the same number of rows in every field: pad "
            "each graph to one size, stack the graphs, and map the loss over them with jax.vmap. Or use one device and "
            "no microbatches."
        )
    for name, shape in shapes.items():
        if not shape or shape[0] % multiple:
            below = shape[0] // multiple * multiple if shape else 0
            counts = f"{below} or {below + multiple}" if below else multiple
            raise ValueError(
                f"the batch's {name} of shape {shape} does not divide {' and '.join(split)}; make the leading "
                f"axis of every field a multiple of {multiple}, such as {counts}."
            )


def check_fields(batch: Any) -> None:
    """Raises ValueError for a field of a batch that JAX cannot take, such as strings."""
    for path, field in jax.tree_util.tree_leaves_with_path(batch):
        dtype = getattr(field, "dtype", None)
        is_number = isinstance(field, (bool, int, float, complex)) or hasattr(field, "__jax_array__")
        kinds = (np.number, np.bool_, jax.dtypes.extended)
        if not is_number and (dtype is None or not any(jnp.issubdtype(dtype, kind) for kind in kinds)):
            kind = f"a {type(field).__name__}" if dtype is None else f"an array of {dtype}"
            raise ValueError(
                f"the batch's {_name(path)} is {kind}: a step takes arrays of numbers. Make numbers of it before the "
                "step, such as token ids, or leave it out of the batch. Bind what is the same in every step to the "
                "loss function with functools.partial."
            )


def num_rows(batch: Any) -> int:
    """Returns the number of rows of a batch.

    Raises:
      ValueError: its fields differ in that number.
    """
    fields = jax.tree_util.tree_leaves_with_path(batch)
    sizes = {_name(path): jnp.shape(field)[:1] for path, field in fields}
    if len(set(sizes.values())) != 1 or () in sizes.values():
        rows_by_field = ", ".join(f"{name} has {size[0] if size else 'no rows'}" for name, size in sizes.items())
        raise ValueError(f"loss_fn takes a key for each row, and the batch's fields differ in rows: {rows_by_field}.")
    return next(iter(sizes.values()))[0]


def _name(path: Any) -> str:
    return jax.tree_util.keystr(path) or "array"


def mean_aux(aux: Any, *, num_parts: int) -> Any:
    """Returns the auxiliary values of a batch from their sums over its parts."""

    def mean(leaf: Any) -> jax.Array:
        return leaf.total / leaf.count if _is_sum(leaf) else leaf / num_parts

    return jax.tree.map(mean, aux, is_leaf=_is_sum)


def _check_aux(aux: Any) -> None:
    try:
        leaves = jax.tree_util.tree_leaves_with_path(aux, is_leaf=_is_sum)
    except ValueError as error:  # keys of a dict that cannot be sorted
        raise ValueError(f"loss_fn returned auxiliary values that are not a pytree: {error}") from None
    for path, leaf in leaves:
        if _is_sum(leaf):
            is_taken = all(_is_number(value, jnp.floating, jnp.integer) for value in leaf)
            is_taken = is_taken and jnp.shape(leaf.count) in ((), jnp.shape(leaf.total))
        else:
            is_taken = _is_number(leaf, jnp.floating)
        if not is_taken:
            raise ValueError(
                f"loss_fn returned the auxiliary value aux{jax.tree_util.keystr(path)} = {_describe(leaf)}; auxiliary "
                "values are averaged over microbatches and devices. Return floating-point arrays, and "
                "batch.SumAndCount(total, count) for what is counted; count is a scalar or of the total's shape."
            )


def _parts_of(returned: Any, *, has_aux: bool, has_state: bool) -> tuple[Any, Any, Any] | None:
    """Returns (loss, new model state, auxiliary values) from what a loss function returned; None if it is not that."""
    if not has_aux and not has_state:
        return returned, None, None
    if not _is_pair(returned):
        return None
    loss, rest = returned
    if has_aux and has_state:
        return (loss, rest[0], rest[1]) if _is_pair(rest) else None
    return (loss, rest, None) if has_state else (loss, None, rest)


def _check_new_state(new: Any, old: Any) -> None:
    if _describe(new) != _describe(old):
        raise ValueError(
            f"loss_fn was given the model state {_describe(old)} and returned {_describe(new)}; return arrays of the "
            "same names, shapes and dtypes."
        )


def _refusal(returned: Any, *, has_aux: bool, has_state: bool) -> str:
    loss = (
        "the mean loss of the microbatch, a floating-point scalar, or batch.SumAndCount(sum of the losses, count), "
        "two scalars"
    )
    if has_state:
        rest = "(new model state, auxiliary values)" if has_aux else "new model state"
        wanted = f"a loss function that takes model_state returns (loss, {rest}), where loss is {loss}."
    elif has_aux:
        wanted = f"with has_aux=True return (loss, auxiliary values), where loss is {loss}."
    else:
        wanted = f"return {loss}. For (loss, auxiliary values) give has_aux=True."
    return f"loss_fn returned {_describe(returned)}; {wanted}"


def _describe(returned: Any) -> str:
    """Returns a pytree with each array replaced by its dtype and shape."""

    def describe(leaf: Any) -> str:
        return f"{leaf.dtype}{list(leaf.shape)}" if hasattr(leaf, "dtype") else str(leaf)

    return str(jax.tree.map(describe, returned)).replace("'", "")


def _is_pair(returned: Any) -> bool:
    return isinstance(returned, (tuple, list)) and not _is_sum(returned) and len(returned) == 2


def _is_sum(leaf: Any) -> bool:
    return isinstance(leaf, SumAndCount)


def _is_number(leaf: Any, *kinds: Any) -> bool:
    is_array = isinstance(leaf, (jax.Array, np.ndarray, np.generic, int, float))
    return is_array and any(jnp.issubdtype(jnp.result_type(leaf), kind) for kind in kinds)
