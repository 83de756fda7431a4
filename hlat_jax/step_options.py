"""The options of a training program, and what its loss function may return."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import numbers
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hlat_jax.batch import SumAndCount
from hlat_jax.facts.byte_sizes import parse_bytes
from hlat_jax.facts.names import nearest
from hlat_jax.ops.dialect import Choice
from hlat_jax.ops.registry import OPS
from hlat_jax.parallel.replica_sync import ReplicaSync
from hlat_jax.parallel.zero import check_params, check_stage, make_replica_sync
from hlat_jax.passes import remat
from hlat_jax.passes.autocast import POLICIES as CASTS
from hlat_jax.passes.autocast import CastPolicy
from hlat_jax.passes.spikes import SpikePolicy
from hlat_jax.precision import POLICIES, Policy

# What a loss function is given by keyword, where its signature has a parameter of that name without a default.
GIVEN = ("model_state", "keys", "train", "dialects")


@dataclasses.dataclass(frozen=True)
class ProgramOptions:
    """Options of a training program.

    Attributes:
      policy: dtypes of storage and accumulation, and the rounding of stored values; fp32 by default.
      num_microbatches: static number of parts into which a batch, or its rows on each device, is split.
      accumulate: computes and sums the gradients of the parts, for pipeline stages; None: `train_step.accumulated`.
      norm_in_blocks: see `optimizer.global_norm`.
      zero: ZeRO stage, 0 to 3, for parameters of any structure on `devices`, see `zero.make_replica_sync`.
      devices: for `zero`; None: all devices.
      bucket_bytes: for `zero`: arrays share collectives of up to this many bytes per device; 0: one per array.
      replica_sync: mesh, shardings and collectives of your own, instead of `zero`. With neither: one device.
      autocast: cast policy for a loss function in fp32 and a `policy` that computes in fp32, see `passes.autocast`;
        None: no casts. float16 adds a loss scale, see `passes.scaling`.
      rewrite: run our implementations of ops in place of what the loss function computes otherwise, such as attention
        and cross-entropy, see `passes.rewrite`.
      residuals: recompute cheap intermediates in the backward pass where that keeps fewer bytes, see
        `passes.residuals`.
      memory_budget: for the temporaries of the step on one device, "12GiB" or bytes; the values that are saved for the
        backward pass are chosen to fit, see `passes.remat`. None: the loss function decides.
      spikes: skip or report steps whose loss or gradient norm is far above those before, see `passes.spikes`; None: no.
      remat: options of that choice: regions, solver, least bytes, offload; None: the defaults.
      dialects: op of `ops.registry` -> name of an implementation, or "auto". Each is chosen for the platform of the
        devices, and the loss function is called with the choice, `loss_fn(params, microbatch, dialects={op: name})`.
        None: it is called without.
      kernels: op -> implementation with which the loss function was built; for the report, with those of `dialects`.

    Raises:
      ValueError: an invalid value, or options that exclude each other.
    """

    policy: Policy = POLICIES["fp32"]
    num_microbatches: int = 1
    accumulate: Callable | None = None
    norm_in_blocks: bool = False
    zero: int | None = None
    devices: Sequence[Any] | None = None
    bucket_bytes: int = 0
    replica_sync: ReplicaSync | None = None
    autocast: CastPolicy | str | None = None
    rewrite: bool = False
    residuals: bool = False
    memory_budget: int | str | None = None
    spikes: SpikePolicy | None = None
    remat: remat.RematOptions | None = None
    dialects: Mapping[str, str] | None = None
    kernels: Mapping[str, Choice] = dataclasses.field(default_factory=dict)

    @property
    def active_replica_sync(self) -> ReplicaSync | None:
        """`replica_sync` if it has several devices, else None: on one device, a program has no collectives."""
        return self.replica_sync if self.replica_sync is not None and self.replica_sync.layout.mesh.size > 1 else None

    @property
    def platform(self) -> str:
        """The platform of the devices."""
        return jax.default_backend() if self.replica_sync is None else self.replica_sync.layout.platform

    @property
    def row_degree(self) -> int:
        """Over how many devices the rows of a batch are split."""
        return 1 if self.active_replica_sync is None else self.active_replica_sync.layout.row_degree

    def __post_init__(self):
        self._check_each()
        self._check_together()

    def _check_each(self) -> None:
        count, cast = self.num_microbatches, self.autocast
        is_count = isinstance(count, numbers.Integral) and not isinstance(count, bool) and count >= 1
        is_cast = cast in tuple(CASTS) if isinstance(cast, str) else _is_none_or(cast, CastPolicy)
        named = " or ".join(map(repr, CASTS))
        for name, is_valid, problem in (
            ("policy", isinstance(self.policy, Policy), "is not a Policy: give precision.POLICIES['fp32']"),
            ("num_microbatches", is_count, "must be an int of 1 or more"),
            ("accumulate", self.accumulate is None or callable(self.accumulate), "is not a function: leave it out"),
            ("norm_in_blocks", isinstance(self.norm_in_blocks, bool), "must be True or False"),
            ("rewrite", isinstance(self.rewrite, bool), "must be True or False"),
            ("residuals", isinstance(self.residuals, bool), "must be True or False"),
            (
                "replica_sync",
                _is_none_or(self.replica_sync, ReplicaSync),
                "is not a ReplicaSync: give zero.make_replica_sync(...)",
            ),
            ("autocast", is_cast, f"is neither a policy's name nor a CastPolicy: give {named}"),
            ("spikes", _is_none_or(self.spikes, SpikePolicy), "must be passes.spikes.SpikePolicy(...)"),
            ("remat", _is_none_or(self.remat, remat.RematOptions), "must be passes.remat.RematOptions(...)"),
            ("kernels", isinstance(self.kernels, Mapping), "must be a dict: op -> ops.dialect.Choice"),
        ):
            if not is_valid:
                raise ValueError(f"ProgramOptions.{name}={getattr(self, name)!r} {problem}.")
        if self.dialects is not None:
            _check_dialects(self.dialects)
        if self.memory_budget is not None:
            parse_bytes(self.memory_budget, name="ProgramOptions.memory_budget")
        if self.zero is not None:
            check_stage(self.zero, self.devices, bucket_bytes=self.bucket_bytes)

    def _check_together(self) -> None:
        if self.zero is not None and self.replica_sync is not None:
            raise ValueError("ProgramOptions: zero and replica_sync both shard the parameters; give one of them.")
        if self.zero is None and (self.devices is not None or self.bucket_bytes):
            raise ValueError(
                "ProgramOptions: devices and bucket_bytes have no effect without zero; give zero=0 to 3 too, or leave "
                "them out: a replica_sync has its own."
            )
        if self.remat is not None and self.memory_budget is None:
            raise ValueError("ProgramOptions: remat needs a memory budget; give memory_budget='12GiB' too.")
        if self.autocast is not None and self.policy.compute != jnp.float32:
            raise ValueError(
                f"ProgramOptions: autocast is for a loss that computes in fp32, and this policy computes in "
                f"{jnp.dtype(self.policy.compute)}; give policy=precision.POLICIES['fp32'], or leave autocast out."
            )
        has_passes = self.rewrite or self.residuals or self.autocast is not None or self.memory_budget is not None
        if self.accumulate is not None and (has_passes or self.dialects is not None):
            raise ValueError(
                "ProgramOptions: rewrite, autocast, residuals, memory_budget and dialects need a single loss function,"
                " not pipeline stages; leave accumulate out."
            )


def check_arguments(loss_fn: Any, optimizer: Any, *, options: Any, has_aux: Any) -> None:
    """Raises ValueError for a loss function, optimizer or options that `training_program` does not take."""
    if not callable(loss_fn):
        raise ValueError(f"loss_fn={loss_fn!r} is not a function of (params, microbatch).")
    if not (callable(getattr(optimizer, "init", None)) and callable(getattr(optimizer, "update", None))):
        raise ValueError(f"optimizer={optimizer!r} is not an Optax transformation: give one, such as optax.adam(1e-3).")
    if not isinstance(options, ProgramOptions):
        raise ValueError(f"options={options!r}: give ProgramOptions(...), or leave it out: fp32 on one device.")
    if not isinstance(has_aux, bool):
        raise ValueError(f"has_aux={has_aux!r} must be True or False.")
    if has_aux and options.accumulate is not None:
        raise ValueError("has_aux=True needs a single loss function, not stages; leave options.accumulate out.")


def check_shapes(given: Sequence[str], *, options: ProgramOptions, params: Any, batch: Any, model_state: Any) -> None:
    """Raises ValueError if shapes that the options need are missing; `given`: see `given_names`."""
    if params is not None:
        check_params(params)
    elif options.zero is not None or options.replica_sync is not None:
        raise ValueError("options.zero and .replica_sync shard the parameters: give their shapes as params=...")
    if options.memory_budget is not None and (params is None or batch is None):
        raise ValueError("options.memory_budget is compared with the compiled step: give params=... and batch=...")
    if "model_state" in given and params is not None and model_state is None:
        raise ValueError("loss_fn takes a model_state: give its shapes as model_state=..., as those of the parameters.")
    if model_state is not None:
        check_model_state(model_state, given)


def check_model_state(model_state: Any, given: Sequence[str]) -> None:
    """Raises ValueError for a model state that the loss function does not take, or one that cannot be carried."""
    if "model_state" not in given:
        raise ValueError("loss_fn takes no model_state: define it as loss(params, batch, *, model_state).")
    for path, leaf in jax.tree_util.tree_leaves_with_path(model_state):
        dtype = getattr(leaf, "dtype", None)
        if dtype is None or not (jnp.issubdtype(dtype, jnp.floating) or jnp.issubdtype(dtype, jnp.integer)):
            found = type(leaf).__name__ if dtype is None else dtype
            raise ValueError(
                f"model_state{jax.tree_util.keystr(path)} is {found}: give floating-point or integer arrays, and bind "
                "other values with functools.partial. Random keys come as `keys`, see `training_program`."
            )


def given_names(loss_fn: Callable, options: ProgramOptions) -> tuple[str, ...]:
    """Returns which of `GIVEN` a loss function takes: its parameters without a default after (params, microbatch).

    Raises:
      ValueError: another parameter without a default, or one of these that the options do not provide for.
    """
    try:
        parameters = list(inspect.signature(loss_fn).parameters.values())
    except (TypeError, ValueError):  # some functions written in C have no signature
        parameters = []
    positional = [one for one in parameters if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)]
    named = [
        one.name
        for one in parameters
        if one not in positional[:2]
        and one.default is one.empty
        and one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)
    ]
    for name in named:
        if name not in GIVEN:
            raise ValueError(
                f"loss_fn takes {name!r}: besides (params, microbatch), a training program gives {', '.join(GIVEN)} by "
                f"name. {nearest(name, GIVEN)} Bind other values with functools.partial."
            )
    if "dialects" in named and options.dialects is None:
        raise ValueError("loss_fn takes dialects: name its ops, ProgramOptions(dialects={'swiglu': 'auto'}).")
    if options.dialects is not None and not _takes(loss_fn, "dialects"):
        raise ValueError("options.dialects go to the loss function: define it as loss(params, batch, *, dialects).")
    found = tuple(name for name in named if name != "dialects")
    if found and options.accumulate is not None:
        raise ValueError(f"{', '.join(found)} need a single loss function, not stages; leave options.accumulate out.")
    return found


def resolved(options: ProgramOptions, params: Any) -> ProgramOptions:
    """Returns the options with the policy's own autocast, and with the replica_sync made from `zero`."""
    changes: dict[str, Any] = {}
    if options.autocast is None:
        changes["autocast"] = options.policy.autocast
    if options.zero is not None:
        devices = jax.devices() if options.devices is None else options.devices
        replica_sync = make_replica_sync(params, devices, stage=options.zero, bucket_bytes=options.bucket_bytes)
        changes |= {"replica_sync": replica_sync, "zero": None, "devices": None, "bucket_bytes": 0}
    return dataclasses.replace(options, **changes)


def with_dialects(loss_fn: Callable, options: ProgramOptions) -> tuple[Callable, ProgramOptions]:
    """Returns the loss function bound to the implementations chosen for its ops, and options that list them."""
    chosen = {key: OPS[key].choose(name, options.platform) for key, name in (options.dialects or {}).items()}
    names = {key: choice.name for key, choice in chosen.items()}

    @functools.wraps(loss_fn)
    def with_names(params: Any, batch: Any, **given: Any) -> Any:
        return loss_fn(params, batch, dialects=names, **given)

    reported = {OPS[key].key: choice for key, choice in chosen.items()}
    return with_names, dataclasses.replace(options, kernels={**options.kernels, **reported})


def _takes(function: Callable, name: str) -> bool:
    parameters = inspect.signature(function).parameters.values()
    return any(one.name == name or one.kind is one.VAR_KEYWORD for one in parameters)


def _check_dialects(dialects: Any) -> None:
    if not isinstance(dialects, Mapping):
        raise ValueError(f"ProgramOptions.dialects={dialects!r} must be a dict: op -> name, or 'auto'.")
    for key, name in dialects.items():
        if key not in OPS:
            raise ValueError(f"ProgramOptions.dialects has no op {key!r}. {nearest(str(key), OPS)}")
        if name not in ("auto", *OPS[key].names):
            raise ValueError(
                f"ProgramOptions.dialects[{key!r}]={name!r} is not one of {', '.join(('auto', *OPS[key].names))}."
            )


def _is_none_or(value: Any, wanted: type) -> bool:
    return value is None or isinstance(value, wanted)


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


def checked_loss(
    loss_fn: Callable, *, has_aux: bool, given: Sequence[str] = (), is_training: bool = True
) -> Callable[..., tuple[jax.Array, LossAux]]:
    """Returns (params, rows, model_state) -> (loss sum, LossAux) from a loss function of `training_program`.

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
    def checked(params: Any, rows: Any, model_state: Any) -> tuple[jax.Array, LossAux]:
        part, keys = rows if has_keys and is_training else (rows, None)
        values = {"model_state": model_state, "keys": keys, "train": is_training}
        returned = loss_fn(params, part, **{name: values[name] for name in given})
        unpacked = _unpacked(returned, has_aux=has_aux, has_state=has_state)
        loss, new_state, aux = unpacked or (returned, None, None)
        total, count = loss if _is_sum(loss) else (loss, 1.0)
        are_numbers = _is_number(total, jnp.floating) and _is_number(count, jnp.floating, jnp.integer)
        if unpacked is None or not are_numbers or jnp.shape(total) or jnp.shape(count):
            raise ValueError(_refusal(returned, has_aux=has_aux, has_state=has_state))
        _check_aux(aux)
        if has_state:
            _check_new_state(new_state, model_state)
        total, count, aux = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float32), (total, count, aux))
        return total, LossAux(count, aux, new_state if is_training else None, is_mean=not _is_sum(loss))

    return checked


def row_keys(seed: jax.Array, step: jax.Array, num_rows: int) -> jax.Array:
    """Returns a random key for each row of a batch, from (seed, step, index of the row in the batch over all devices).

    The generator is named, because a function that is mapped over keys of `rbg` draws from the first of them alone.
    """
    key = jax.random.fold_in(jax.random.key(seed, impl="threefry2x32"), step)
    return jax.vmap(functools.partial(jax.random.fold_in, key))(jnp.arange(num_rows, dtype=jnp.uint32))


def check_divides(batch: Any, *, num_devices: int, num_microbatches: int) -> None:
    """Raises ValueError for a batch with a field that does not divide over the devices and into the microbatches."""
    multiple = num_devices * num_microbatches
    split = [f"over {num_devices} devices"] * (num_devices > 1)
    split += [f"into num_microbatches={num_microbatches}"] * (num_microbatches > 1)
    for path, field in jax.tree_util.tree_leaves_with_path(batch):
        shape = jnp.shape(field)
        if multiple > 1 and (not shape or shape[0] % multiple):
            below = shape[0] // multiple * multiple if shape else 0
            counts = f"{below} or {below + multiple}" if below else multiple
            raise ValueError(
                f"the batch's {_name(path)} of shape {shape} does not divide {' and '.join(split)}; make the leading "
                f"axis of every field a multiple of {multiple}, such as {counts}."
            )


def num_rows(batch: Any) -> int:
    """Returns the number of rows of a batch.

    Raises:
      ValueError: its fields differ in that number.
    """
    fields = jax.tree_util.tree_leaves_with_path(batch)
    sizes = {_name(path): jnp.shape(field)[:1] for path, field in fields}
    if len(set(sizes.values())) != 1 or () in sizes.values():
        found = ", ".join(f"{name} has {size[0] if size else 'no rows'}" for name, size in sizes.items())
        raise ValueError(f"loss_fn takes a key for each row, and the batch's fields differ in rows: {found}.")
    return next(iter(sizes.values()))[0]


def _name(path: Any) -> str:
    return jax.tree_util.keystr(path) or "array"


def averaged_aux(aux: Any, *, num_parts: int) -> Any:
    """Returns the auxiliary values of a batch from their sums over its parts."""

    def averaged(leaf: Any) -> jax.Array:
        return leaf.total / leaf.count if _is_sum(leaf) else leaf / num_parts

    return jax.tree.map(averaged, aux, is_leaf=_is_sum)


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
                f"loss_fn returned the auxiliary value aux{jax.tree_util.keystr(path)} = {_described(leaf)}; auxiliary "
                "values are averaged over microbatches and devices. Return floating-point arrays, and "
                "program.SumAndCount(total, count) for what is counted; count is a scalar or of the total's shape."
            )


def _unpacked(returned: Any, *, has_aux: bool, has_state: bool) -> tuple[Any, Any, Any] | None:
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
    if _described(new) != _described(old):
        raise ValueError(
            f"loss_fn was given the model state {_described(old)} and returned {_described(new)}; return arrays of the "
            "same names, shapes and dtypes."
        )


def _refusal(returned: Any, *, has_aux: bool, has_state: bool) -> str:
    loss = (
        "the mean loss of the microbatch, a floating-point scalar, or program.SumAndCount(sum of the losses, count), "
        "two scalars"
    )
    if has_state:
        rest = "(new model state, auxiliary values)" if has_aux else "new model state"
        wanted = f"a loss function that takes model_state returns (loss, {rest}), where loss is {loss}."
    elif has_aux:
        wanted = f"with has_aux=True return (loss, auxiliary values), where loss is {loss}."
    else:
        wanted = f"return {loss}. For (loss, auxiliary values) give training_program(..., has_aux=True)."
    return f"loss_fn returned {_described(returned)}; {wanted}"


def _described(returned: Any) -> str:
    """Returns a pytree with each array replaced by its dtype and shape."""

    def described(leaf: Any) -> str:
        return f"{leaf.dtype}{list(leaf.shape)}" if hasattr(leaf, "dtype") else str(leaf)

    return str(jax.tree.map(described, returned)).replace("'", "")


def _is_pair(returned: Any) -> bool:
    return isinstance(returned, (tuple, list)) and not _is_sum(returned) and len(returned) == 2


def _is_sum(leaf: Any) -> bool:
    return isinstance(leaf, SumAndCount)


def _is_number(leaf: Any, *kinds: Any) -> bool:
    is_array = isinstance(leaf, (jax.Array, np.ndarray, np.generic, int, float))
    return is_array and any(jnp.issubdtype(jnp.result_type(leaf), kind) for kind in kinds)
