"""The arguments and results of the loss function of a training step.

A loss function is (params, microbatch) -> loss. The loss is a floating-point scalar, the mean over the microbatch.
Microbatches and devices then weigh equally, for any number of tokens in them. Or it is `SumAndCount(sum of the losses
of the counted tokens, number of counted tokens)`. The step then divides by the count over the whole batch, so unequal
microbatches weigh as in one batch. Both are accumulated in fp32.

More parameters without a default are given by name.

- `model_state` is a pytree of arrays that the model updates itself, such as the statistics of batch norm. The function
  then returns (loss, new model state). Microbatches update it one after another, and each device updates it for its
  rows. Floats become their mean over devices. A step that is not finite leaves it unchanged.

- `keys` has a random key for each row, made from the seed, the step and the row's index in the batch of all devices.
  If you draw with `jax.vmap` over rows and keys, the numbers are the same on any number of devices and microbatches.
  `keys` is None in an evaluation.

- `train` is a Python bool, True in training and False in an evaluation.

With `has_aux` it returns (loss, auxiliary values), as for `jax.value_and_grad`. With a model state too, it returns
(loss, (new model state, auxiliary values)). The auxiliary values are a pytree, reported in fp32. Each array becomes the
mean over microbatches and devices, and each `SumAndCount` becomes total / count over the batch.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hlat_jax.batch import SumAndCount
from hlat_jax.facts.names import nearest

GIVEN = ("model_state", "keys", "train")

LossFn = Callable[..., jax.Array | SumAndCount | tuple[jax.Array | SumAndCount, Any]]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LossAux:
    """The results of the loss of some microbatches, apart from the sum of losses.

    Attributes:
      count: float32 divisor of the sum of losses. If the loss is a plain mean, it is the number of microbatches.
      aux: sums of the auxiliary values.
      model_state: model state after the last microbatch.
      is_mean: whether the loss is a plain mean.
    """

    count: Any
    aux: Any = None
    model_state: Any = None
    is_mean: bool = dataclasses.field(default=False, metadata={"static": True})


CheckedLossFn = Callable[..., tuple[jax.Array, LossAux]]


@dataclasses.dataclass(frozen=True)
class LossSignature:
    """The arguments of a loss function other than (params, microbatch), and its results other than the loss.

    Attributes:
      given: names of `GIVEN` that the loss function takes.
      has_aux: whether the loss function returns auxiliary values.
    """

    given: tuple[str, ...] = ()
    has_aux: bool = False

    @property
    def has_state(self) -> bool:
        """Whether it takes and returns a model state."""
        return "model_state" in self.given

    @property
    def has_keys(self) -> bool:
        """Whether it takes random keys."""
        return "keys" in self.given

    @property
    def is_plain(self) -> bool:
        """Whether it is (params, microbatch) -> loss."""
        return not self.given and not self.has_aux


def signature_of(loss_fn: Callable, *, has_aux: bool = False) -> LossSignature:
    """Returns the signature of a loss function, from its parameters without a default after (params, microbatch).

    Raises:
      ValueError: not a function, or a parameter without a default that no step gives.
    """
    if not callable(loss_fn):
        raise ValueError(f"loss_fn={loss_fn!r} is not a function of (params, microbatch).")
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
                f"loss_fn takes {name!r}, but after (params, microbatch), a training step only gives "
                f"{', '.join(GIVEN)} by name. {nearest(name, GIVEN)} Bind other values with functools.partial."
            )
    return LossSignature(names, has_aux)


def checked_loss(loss_fn: Callable, signature: LossSignature, *, is_training: bool = True) -> CheckedLossFn:
    """Returns (params, rows, model_state) -> (loss sum, LossAux) from a loss function.

    `rows` is a microbatch. For a loss function that takes keys, in training, it is the pair (microbatch, keys).

    Args:
      loss_fn: the loss function.
      signature: signature of the loss function, see `signature_of`.
      is_training: whether to call it as in training. Otherwise the model state that it returns is dropped.

    Raises:
      ValueError: at a trace, if the loss function returns anything else.
    """

    @functools.wraps(loss_fn)
    def with_checks(params: Any, rows: Any, model_state: Any) -> tuple[jax.Array, LossAux]:
        part, keys = rows if signature.has_keys and is_training else (rows, None)
        values = {"model_state": model_state, "keys": keys, "train": is_training}
        returned = loss_fn(params, part, **{name: values[name] for name in signature.given})
        parts = _parts_of(returned, signature)
        loss, new_state, aux = parts or (returned, None, None)
        total, count = loss if _is_sum(loss) else (loss, 1.0)
        are_numbers = _is_number(total, jnp.floating) and _is_number(count, jnp.floating, jnp.integer)
        if parts is None or not are_numbers or jnp.shape(total) or jnp.shape(count):
            raise ValueError(_refusal(returned, signature))
        _check_aux(aux)
        if signature.has_state:
            _check_new_state(new_state, model_state)
        total, count, aux = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float32), (total, count, aux))
        return total, LossAux(count, aux, new_state if is_training else None, is_mean=not _is_sum(loss))

    return with_checks


def check_model_state(model_state: Any, signature: LossSignature) -> None:
    """Raises ValueError for a model state that the loss function does not take, or one that cannot be carried."""
    if not signature.has_state:
        raise ValueError("loss_fn takes no model_state. Define it as loss(params, batch, *, model_state).")
    for path, leaf in jax.tree_util.tree_leaves_with_path(model_state):
        dtype = getattr(leaf, "dtype", None)
        if dtype is None or not (jnp.issubdtype(dtype, jnp.floating) or jnp.issubdtype(dtype, jnp.integer)):
            kind = type(leaf).__name__ if dtype is None else dtype
            raise ValueError(
                f"model_state{jax.tree_util.keystr(path)} is {kind}. Give floating-point or integer arrays, bind "
                "other values with functools.partial, and take random keys as `keys`."
            )


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
                f"loss_fn returned the auxiliary value aux{jax.tree_util.keystr(path)} = {_describe(leaf)}, which has "
                "no mean over microbatches and devices. Return floating-point arrays, or batch.SumAndCount(total, "
                "count) with a count that is a scalar or has the total's shape."
            )


def _parts_of(returned: Any, signature: LossSignature) -> tuple[Any, Any, Any] | None:
    """Returns (loss, new model state, auxiliary values) from what a loss function returned; None if it is not that."""
    if not signature.has_aux and not signature.has_state:
        return returned, None, None
    if not _is_pair(returned):
        return None
    loss, rest = returned
    if signature.has_aux and signature.has_state:
        return (loss, rest[0], rest[1]) if _is_pair(rest) else None
    return (loss, rest, None) if signature.has_state else (loss, None, rest)


def _check_new_state(new: Any, old: Any) -> None:
    if _describe(new) != _describe(old):
        raise ValueError(
            f"loss_fn was given the model state {_describe(old)} and returned {_describe(new)}. Return arrays of the "
            "same names, shapes and dtypes."
        )


def _refusal(returned: Any, signature: LossSignature) -> str:
    loss = (
        "the mean loss of the microbatch, a floating-point scalar, or batch.SumAndCount(sum of the losses, count), "
        "two scalars"
    )
    if signature.has_state:
        rest = "(new model state, auxiliary values)" if signature.has_aux else "new model state"
        wanted = f"With model_state, return (loss, {rest}). The loss is {loss}."
    elif signature.has_aux:
        wanted = f"With has_aux=True, return (loss, auxiliary values). The loss is {loss}."
    else:
        wanted = f"Return {loss}. For (loss, auxiliary values), give has_aux=True."
    return f"loss_fn returned {_describe(returned)}. {wanted}"


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
