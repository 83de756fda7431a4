"""Pipeline parallelism: value and gradient of embed -> stages -> head and loss over the mesh axis `pipe`.

Stage s of p holds the s-th part of the stacked layers. In each tick every stage does the same work on its own
microbatch, so the program has no branches.

    Microbatch j goes forward through stage s in tick j + s and backward in tick j + 2 (p - 1) - s.

In the last stage both fall into one tick, with the loss between them. So there are three loops of static length. They
have p - 1 ticks forward, m ticks of one forward and one backward, and p - 1 ticks backward. These are m + p - 1
forwards and backwards, with a bubble of (p - 1) / (m + p - 1). A stage holds at most 2p - 1 microbatches, for any m.
The residuals of their backward passes are in a ring of as many slots.

The embedding table and the head are split over the stages too. Each tick broadcasts the output of the last stage, and
every stage computes its part of the logits.

A value goes to the neighboring stage by a permute, or by an all-gather over the stages. Neuron documents permutes
between linked cores only, and stages lie on different nodes. Both are equal bit for bit.

It runs inside the `shard_map` of `replica_sync.ReplicaSync`.
Source: Narayanan et al. (PipeDream-Flush, 1F1B), arXiv 2104.04473, section 2.2. The schedule in lockstep is ours.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core

from hlat_jax.batch import SumAndCount
from hlat_jax.host.jax_compat import partial_eval
from hlat_jax.parallel import collectives
from hlat_jax.parallel.rows import microbatches
from hlat_jax.precision import NEAREST, Accumulation, Rounding, remainder

_PIPE = ("pipe",)
# The phases of a step, and what each carries from tick to tick.
_CARRIED = {
    "warm_up": ("received", "ring"),
    "steady": ("received", "returned", "ring", "totals", "grads"),
    "cool_down": ("returned", "ring", "grads"),
}
PHASES = tuple(_CARRIED)
_MOST_ARRAYS = 32  # of residuals in the ring


@dataclasses.dataclass(frozen=True)
class StagedLoss:
    """A loss function in parts. A call is their composition, with parameters cast and bound once.

    Attributes:
      bind: function params -> the model that computes with them. params["layers"] has the layers of one stage or all.
      embed: function (model, microbatch) -> x.
      stage: function (model, x, microbatch) -> x of the same shape and dtype. It reads the layers.
      loss: function (model, x, microbatch) -> sum of the losses and count, fp32 scalars.
      exchange: collective that sends a value to the neighboring stage, "permute" or "all_gather".
    """

    bind: Callable[[Any], Any]
    embed: Callable[[Any, Any], jax.Array]
    stage: Callable[[Any, jax.Array, Any], jax.Array]
    loss: Callable[[Any, jax.Array, Any], SumAndCount]
    exchange: str = "permute"

    def __call__(self, params: Any, batch: Any) -> SumAndCount:
        model = self.bind(params)
        return self.loss(model, self.stage(model, self.embed(model, batch), batch), batch)


def run_pipeline(staged: StagedLoss, params: Any, batch: Any, *, sums: Accumulation) -> tuple[SumAndCount, Any]:
    """Returns (loss sum and count, gradients) of a batch, with layers split over `pipe`.

    Args:
      staged: the loss in parts.
      params: parameters of this stage. Every key but `layers` belongs to embed and loss.
      batch: the rows of this device, the same in every stage.
      sums: number m of microbatches, and the summation of their gradients. `reduce` must be None, since the gradients
        of several microbatches are computed at a time.
    """
    assert sums.reduce is None
    m = sums.num_microbatches
    stage = _Stage(staged, params, microbatches(batch, m), num_microbatches=m, rounding=sums.rounding)
    p, carry = stage.num_stages, stage.first_carry(sums.dtype)
    ticks = jnp.arange(m + 2 * (p - 1), dtype=jnp.int32)
    for phase, part in (
        (stage.warm_up, ticks[: p - 1]),
        (stage.steady, ticks[p - 1 : p - 1 + m]),
        (stage.cool_down, ticks[p - 1 + m :]),
    ):
        carried = {key: carry[key] for key in _CARRIED[phase.__name__]}
        carry |= jax.lax.scan(lambda carry, tick, phase=phase: (phase(carry, tick), None), carried, part)[0]
    return carry["totals"], carry["grads"]


def start_ticks(staged: StagedLoss, params: Any, rows: Any, *, dtype: Any) -> dict[str, Any]:
    """Returns the zeros of the carry of the loops and of a window, which a device keeps between programs of one tick.

    `rows` are the rows of a microbatch on this device, and gradients are summed in `dtype`.
    """
    fields = jax.tree.map(lambda field: field[None], rows)
    stage = _Stage(staged, params, fields, num_microbatches=1, rounding=NEAREST)
    size = 2 * stage.num_stages - 1
    window = jax.tree.map(lambda field: jnp.zeros((size, *field.shape), field.dtype), rows)
    return stage.first_carry(dtype) | {"window": window}


def run_tick(
    staged: StagedLoss,
    kept: dict[str, Any],
    of_device: tuple[Any, Any],
    *,
    phase: str,
    tick: jax.Array,
    num_microbatches: jax.Array,
    rounding: Rounding,
) -> dict[str, Any]:
    """Returns the values that `start_ticks` began after one more tick, the same as in the loops of `run_pipeline`.

    Args:
      staged: the loss in parts.
      kept: values from the tick before.
      of_device: (parameters, rows of the microbatch that goes forward through the first stage). It has the same number
        as the tick. The last ticks get the last microbatch again.
      phase: one of PHASES.
      tick: int32 scalar, number of the tick.
      num_microbatches: int32 scalar.
      rounding: rounding of sums of gradients.
    """
    params, rows = of_device

    def write(old: jax.Array, new: jax.Array) -> jax.Array:
        # in a slot and not shifted: at LNC 2 shifts along rows have lost the row between the two cores
        slot = remainder(tick, len(old))
        return jnp.where(tick == 0, new[None], jax.lax.dynamic_update_index_in_dim(old, new, slot, 0))

    window = jax.tree.map(write, kept["window"], rows)  # of the microbatches that are in some stage
    stage = _Stage(staged, params, window, num_microbatches=num_microbatches, rounding=rounding)
    stage.first = tick - 2 * (stage.num_stages - 1)
    if phase == "cool_down":
        stage.abstract_forward()  # for the structure of the residuals
    carried = {key: kept[key] for key in _CARRIED[phase]}
    return kept | {"window": window} | getattr(stage, phase)(carried, tick)


def pipelined_loss(staged: StagedLoss, params: Any, batch: Any, *, num_microbatches: int) -> SumAndCount:
    """Returns only loss sum and count, by m + p - 1 ticks forward."""
    fields = microbatches(batch, num_microbatches)
    stage = _Stage(staged, params, fields, num_microbatches=num_microbatches, rounding=NEAREST)

    def warm_up(received, tick):
        return stage.to_next(stage.forward(tick, received)[0]), None

    def steady(carry, tick):
        received, sums = carry
        y, _ = stage.forward(tick, received)
        loss = staged.loss(stage.model(), stage.of_last(y), stage.microbatch(tick - (stage.num_stages - 1)))
        return (stage.to_next(y), jax.tree.map(jnp.add, sums, loss)), None

    x, _ = stage.abstract_forward()
    ticks = jnp.arange(num_microbatches + stage.num_stages - 1, dtype=jnp.int32)
    received, _ = jax.lax.scan(warm_up, jnp.zeros(x.shape, x.dtype), ticks[: stage.num_stages - 1])
    carry = received, SumAndCount(jnp.float32(0.0), jnp.float32(0.0))
    return jax.lax.scan(steady, carry, ticks[stage.num_stages - 1 :])[0][1]


class _Stage:
    """The work of one stage in a tick. Indices of microbatches and stages are int32 scalars on the device."""

    def __init__(self, staged: StagedLoss, params: Any, fields: Any, *, num_microbatches: Any, rounding: Rounding):
        self.staged, self.fields, self.num_microbatches, self.rounding = staged, fields, num_microbatches, rounding
        self.first: Any = None  # the lowest number of a microbatch in the fields, each in a slot; without it, all are
        self.layers, self.rest = _split_layers(params)
        self.num_stages = jax.lax.axis_size("pipe")
        self.stage = collectives.axis_index(_PIPE)
        self.is_last = self.stage == self.num_stages - 1
        # of the pullback of the stage: its structure, which of its leaves are kept, the others from the parameters, and
        # which of the kept ones are stacked
        self._structure, self._is_kept, self._of_layers, self._groups = None, None, None, []

    def model(self, *, layers: Any = None, rest: Any = None) -> Any:
        """Returns the model bound to this stage's parameters, or to the values that are differentiated in their place.

        Each derivative binds for itself, because embedding, stage and loss are differentiated in different ticks.
        """
        rest = self.rest if rest is None else rest
        return self.staged.bind(rest | {"layers": self.layers if layers is None else layers})

    def microbatch(self, index: jax.Array) -> Any:
        """Returns a microbatch, or the nearest one if the index is outside their range."""
        size = len(jax.tree.leaves(self.fields)[0])
        if self.first is None:
            index = jnp.clip(index, 0, size - 1)
        else:
            index = remainder(jnp.clip(index, self.first, self.first + size - 1), size)
        return jax.tree.map(lambda field: jax.lax.dynamic_index_in_dim(field, index, keepdims=False), self.fields)

    def first_carry(self, dtype: Any) -> dict[str, Any]:
        """Returns the carry of the first tick, all 0. Gradients are summed in `dtype`."""
        x, residuals = self.abstract_forward()
        nothing = jnp.zeros(x.shape, x.dtype)
        return {
            "received": nothing,
            "returned": nothing,
            "ring": [jnp.zeros((2 * self.num_stages - 1, *leaf.shape), leaf.dtype) for leaf in residuals],
            "totals": SumAndCount(jnp.float32(0.0), jnp.float32(0.0)),
            "grads": jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, dtype), self.rest | {"layers": self.layers}),
        }

    def warm_up(self, carry: dict[str, Any], tick: jax.Array) -> dict[str, Any]:
        """Returns the carry after a tick forward."""
        y, residuals = self.forward(tick, carry["received"])
        return {"received": self.to_next(y), "ring": self.store_residuals(carry["ring"], tick, residuals)}

    def steady(self, carry: dict[str, Any], tick: jax.Array) -> dict[str, Any]:
        """Returns the carry after a tick of one forward and one backward, with the loss between them."""
        y, residuals = self.forward(tick, carry["received"])
        ring = self.store_residuals(carry["ring"], tick, residuals)
        if self.first is not None:  # XLA else fuses the update into what reads the ring, and copies all of it before
            ring = jax.lax.optimization_barrier(ring)
        (loss_sum, count), rest_grads, dy = self.loss(tick, y)
        totals = SumAndCount(carry["totals"].total + loss_sum, carry["totals"].count + count)
        layers, rest = _split_layers(carry["grads"])
        grads = self.rounding.at(tick, 0).add(rest, rest_grads) | {"layers": layers}
        dx, grads = self.backward(tick, jnp.where(self.is_last, dy, carry["returned"]), ring=ring, grads=grads)
        exchanged = {"received": self.to_next(y), "returned": self.to_previous(dx)}
        return exchanged | {"ring": ring, "totals": totals, "grads": grads}

    def cool_down(self, carry: dict[str, Any], tick: jax.Array) -> dict[str, Any]:
        """Returns the carry after a tick backward."""
        dx, grads = self.backward(tick, carry["returned"], ring=carry["ring"], grads=carry["grads"])
        return {"returned": self.to_previous(dx), "ring": carry["ring"], "grads": grads}

    def forward(self, tick: jax.Array, received: jax.Array) -> tuple[jax.Array, list[jax.Array]]:
        """Returns this stage's output and the residuals of its backward pass, without parameters."""
        first = self.staged.embed(self.model(), self.microbatch(tick))
        index = tick - self.stage
        x = jnp.where(self._exists(index), jnp.where(self.stage == 0, first, received), 0)
        return self._stage(self.layers, x, self.microbatch(index))

    def loss(self, tick: jax.Array, y: jax.Array) -> tuple[tuple, Any, jax.Array]:
        """Returns (loss sum, count), the gradients of all but the layers, and of the last stage's output."""
        microbatch = self.microbatch(tick - (self.num_stages - 1))

        def loss(rest, y):
            return self.staged.loss(self.model(rest=rest), y, microbatch)

        grad_fn = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)
        sums, (rest_grads, dy) = grad_fn(self.rest, self.of_last(y))
        return sums, rest_grads, dy

    def backward(self, tick: jax.Array, dy: jax.Array, *, ring: list, grads: dict) -> tuple[jax.Array, dict]:
        """Returns the gradient of this stage's input, and the sums with the gradients of its parameters."""
        index = tick - 2 * (self.num_stages - 1) + self.stage
        slot = remainder(index, 2 * self.num_stages - 1)
        residuals = [jax.lax.dynamic_index_in_dim(buffer, slot, keepdims=False) for buffer in ring]
        # Without a microbatch the residuals are zeros, or those of an input of zeros: 0 / 0 in a pullback is NaN, so
        # its results are masked, and not what it takes.
        exists = self._exists(index)
        dlayers, dx = jax.tree.map(lambda grad: jnp.where(exists, grad, 0), self._pull_back(residuals, dy))
        dfirst = jax.lax.psum(jnp.where(self.stage == 0, dx, 0), "pipe")
        microbatch = self.microbatch(tick - 2 * (self.num_stages - 1))
        pullback = jax.vjp(lambda rest: self.staged.embed(self.model(rest=rest), microbatch), self.rest)[1]
        rounding, (layers, rest) = self.rounding.at(tick, 1), _split_layers(grads)
        return dx, rounding.add(rest, pullback(dfirst)[0]) | {"layers": rounding.add(layers, dlayers)}

    def store_residuals(self, ring: list, tick: jax.Array, residuals: list) -> list:
        """Returns the ring with the residuals of this tick's forward pass in their slot.

        Ticks without a microbatch write too. Before the first microbatch they write slots that are written again before
        they are read. After the last one they write slots that have been read.
        """
        slot = remainder(tick - self.stage, 2 * self.num_stages - 1)
        update = jax.lax.dynamic_update_index_in_dim
        return [update(buffer, leaf, slot, 0) for buffer, leaf in zip(ring, residuals, strict=True)]

    def of_last(self, y: jax.Array) -> jax.Array:
        """Returns the value of the last stage on every stage."""
        return jax.lax.psum(jnp.where(self.is_last, y, 0), "pipe")

    def to_next(self, y: jax.Array) -> jax.Array:
        """Returns the value of the stage before, or of the last stage in the first."""
        return self._shift(y, 1)

    def to_previous(self, dx: jax.Array) -> jax.Array:
        """Returns the value of the stage behind, or of the first stage in the last."""
        return self._shift(dx, -1)

    def _shift(self, x: jax.Array, shift: int) -> jax.Array:
        if self.staged.exchange == "all_gather":
            whole = jax.lax.all_gather(x, "pipe")
            return jax.lax.dynamic_index_in_dim(whole, remainder(self.stage - shift, self.num_stages), keepdims=False)
        pairs = [(s, (s + shift) % self.num_stages) for s in range(self.num_stages)]
        return jax.lax.ppermute(x, "pipe", pairs)

    def abstract_forward(self) -> tuple[jax.ShapeDtypeStruct, list[jax.ShapeDtypeStruct]]:
        """Returns shapes and dtypes of the results of `forward`."""

        def run(layers, rest, microbatch):
            x = self.staged.embed(self.model(layers=layers, rest=rest), microbatch)
            return self._stage(layers, x, microbatch)

        one = jax.tree.map(lambda field: jax.ShapeDtypeStruct(field.shape[1:], field.dtype), self.fields)
        return jax.eval_shape(run, self.layers, self.rest, one)

    def _exists(self, index: jax.Array) -> jax.Array:
        return (index >= 0) & (index < self.num_microbatches)

    def _stage(self, layers: Any, x: jax.Array, microbatch: Any) -> tuple[jax.Array, list[jax.Array]]:
        def run(layers, x):
            return self.staged.stage(self.model(layers=layers), x, microbatch)

        def residuals(layers, x):
            y, pullback = jax.vjp(run, layers, x)
            leaves, self._structure = jax.tree.flatten(pullback)
            return y, leaves

        # The pullback holds the stage's parameters beside its residuals, and slices of them where the layers are
        # unrolled. They are the same in every tick, and computed again: only the other leaves are kept.
        traced = jax.make_jaxpr(residuals)(layers, x)
        y, *leaves = core.jaxpr_as_fun(traced)(*jax.tree.leaves(layers), x)
        num_layers = len(jax.tree.leaves(layers))
        self._is_kept = _depends(traced.jaxpr, traced.jaxpr.invars[num_layers:])[1:]
        unkept = [False, *(not is_kept for is_kept in self._is_kept)]
        self._of_layers = partial_eval.dce_jaxpr(traced.jaxpr, unkept, instantiate=True)[0]
        kept = [leaf for leaf, is_kept in zip(leaves, self._is_kept, strict=True) if is_kept]
        self._groups = _groups_to_stack(kept)
        return y, [jnp.stack([kept[i] for i in group]) if len(group) > 1 else kept[group[0]] for group in self._groups]

    def _pull_back(self, residuals: list[jax.Array], dy: jax.Array) -> tuple[Any, jax.Array]:
        jaxpr = self._of_layers
        unused = [None] * (len(jaxpr.invars) - len(jax.tree.leaves(self.layers)))
        closed = core.ClosedJaxpr(jaxpr, [None] * len(jaxpr.constvars))
        by_index = {}
        for group, stacked in zip(self._groups, residuals, strict=True):
            by_index |= dict(zip(group, stacked if len(group) > 1 else [stacked], strict=True))
        computed = iter(core.jaxpr_as_fun(closed)(*jax.tree.leaves(self.layers), *unused))
        kept = iter([by_index[i] for i in sorted(by_index)])
        leaves = [next(kept if is_kept else computed) for is_kept in self._is_kept]
        return jax.tree.unflatten(self._structure, leaves)(dy)


def _groups_to_stack(leaves: list[jax.Array]) -> list[list[int]]:
    """Returns the indices of leaves in groups to be stacked: those of unrolled layers, of which there are many.

    Calls slow down with the number of arrays, and the ring is an argument where ticks are programs of their own.
    """
    if len(leaves) <= _MOST_ARRAYS:
        return [[index] for index in range(len(leaves))]
    groups: dict[Any, list[int]] = {}
    for index, leaf in enumerate(leaves):
        groups.setdefault((leaf.shape, leaf.dtype), []).append(index)
    return list(groups.values())


def _split_layers(params: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Returns the layers, and all else."""
    return params["layers"], {key: value for key, value in params.items() if key != "layers"}


def _depends(jaxpr: Any, inputs: Sequence[Any]) -> list[bool]:
    """Returns for each result of a jaxpr whether it depends on one of these inputs, or on what it closes over."""
    dependent = {*inputs, *jaxpr.constvars}
    for eqn in jaxpr.eqns:
        if any(not isinstance(var, core.Literal) and var in dependent for var in eqn.invars):
            dependent.update(eqn.outvars)
    return [not isinstance(var, core.Literal) and var in dependent for var in jaxpr.outvars]
