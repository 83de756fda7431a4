"""What the devices of a mesh say to each other during a step: every collective that we write ourselves.

The step's forward and backward pass runs under `jax.shard_map` over all axes of the mesh: code inside sees the shapes
of one device, and nothing travels that is not written here. So the collectives of a program are known from this file
and do not depend on how well a partitioner guesses; a reduce-scatter is one, also where XLA would not form it. Where
what lies is a matter of the tables in `sharding`, from which every function here takes its axes.

`Shards` is for the model: the collectives of one forward pass, whose transposes are those of the backward pass.
`Spread` is for the program: gradients of every device in, one gradient out, and parameters to their replicas.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import PartitionSpec as P

from hlat_jax.precision import Rounding, cast_tree
from hlat_jax.sharding import ROWS, TENSOR, Layout, spec

# The four ways in which one value becomes another along mesh axes, each with its transpose written out.


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def copied(x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """Returns `x`, which every device along `axes` has and uses for a part; its gradient is the sum of their parts."""
    return x


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def summed(x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """Returns the sum of `x` over `axes`, which every device then goes on with; each term has the sum's gradient."""
    return jax.lax.psum(x, axes) if axes else x


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def gathered(x: jax.Array, axes: tuple[str, ...], dim: int) -> jax.Array:
    """Returns the parts of all devices along `axes`, one after another in `dim`; the gradient is `scattered`."""
    return jax.lax.all_gather(x, axes, axis=dim, tiled=True) if axes else x


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def scattered(x: jax.Array, axes: tuple[str, ...], dim: int) -> jax.Array:
    """Returns this device's part in `dim` of the sum of `x` over `axes`; the gradient is `gathered`."""
    return jax.lax.psum_scatter(x, axes, scatter_dimension=dim, tiled=True) if axes else x


copied.defvjp(lambda x, axes: (x, None), lambda axes, _, grad: (summed(grad, axes),))
summed.defvjp(lambda x, axes: (summed(x, axes), None), lambda axes, _, grad: (grad,))
gathered.defvjp(lambda x, *at: (gathered(x, *at), None), lambda axes, dim, _, grad: (scattered(grad, axes, dim),))
scattered.defvjp(lambda x, *at: (scattered(x, *at), None), lambda axes, dim, _, grad: (gathered(grad, axes, dim),))


@dataclasses.dataclass(frozen=True)
class Shards:
    """The collectives of a model whose parameters are split over a mesh; as it stands, of a model on one device.

    Attributes:
      tensor: mesh axes of more than one device over which heads, mlp and vocabulary are split.
      pipe: likewise, the axis over which layers and vocabulary are split.
      fsdp: likewise, the axis over which matrices are split along `fsdp_axes` until they are used.
      fsdp_axes: the logical axes that fsdp splits.
      sequence_parallel: activations between blocks are split over `tensor` along T.
    """

    tensor: tuple[str, ...] = ()
    pipe: tuple[str, ...] = ()
    fsdp: tuple[str, ...] = ()
    fsdp_axes: tuple[str, ...] = ()
    sequence_parallel: bool = False

    @property
    def vocab(self) -> tuple[str, ...]:
        """Mesh axes that the tables of the vocabulary are split over, outermost first."""
        return self.pipe + self.tensor

    def enter(self, x_BTD: jax.Array) -> jax.Array:
        """Returns what a matrix split by columns reads: every place of the sequence. Backward: sums over `tensor`."""
        return gathered(x_BTD, self.tensor, 1) if self.sequence_parallel else copied(x_BTD, self.tensor)

    def leave(self, y_BTD: jax.Array) -> jax.Array:
        """Returns the sum over `tensor` of what a matrix split by rows gave, as it lies between blocks."""
        return scattered(y_BTD, self.tensor, 1) if self.sequence_parallel else summed(y_BTD, self.tensor)

    def weight(self, weight: jax.Array, axes: Sequence[str]) -> jax.Array:
        """Returns a parameter with these logical axes whole over fsdp. Backward: reduce-scatter of its gradient."""
        for dim, axis in enumerate(axes):
            if axis in self.fsdp_axes:
                weight = gathered(weight, self.fsdp, dim)
        return weight


ALONE = Shards()


def shards(layout: Layout) -> Shards:
    """Returns the collectives of a model under a layout, for code inside `Spread`'s region."""
    return Shards(
        tensor=layout.wide(TENSOR),
        pipe=layout.wide(("pipe",)),
        fsdp=layout.wide(("fsdp",)),
        fsdp_axes=tuple(axis for axis, places in layout.param_rules.items() if "fsdp" in places),
        sequence_parallel=layout.sequence_parallel,
    )


def position(axes: tuple[str, ...]) -> jax.Array:
    """Returns this device's int32 number along mesh axes, the first outermost; 0 without any."""
    return jax.lax.axis_index(axes) if axes else jax.numpy.int32(0)


@dataclasses.dataclass(frozen=True)
class Spread:
    """Parameters, gradients and batches of a program over a mesh.

    Attributes:
      layout: the mesh and its tables.
      axes: the logical axes of every parameter, a tuple in the place of each array.
    """

    layout: Layout
    axes: Any

    def value_and_grad(self, local: Callable, *, dtype: Any) -> Callable:
        """Returns (params, batch, rounding) -> ((loss sum, count), gradients) over all devices.

        Args:
          local: the same for the rows and the parameters of one device; its gradients are parts that are still to be
            summed over the devices that hold the same parameters. That happens once, however many microbatches.
          dtype: in which gradients are summed. They come out as the optimizer's state lies.
        """

        def everywhere(params: Any, batch: Any, rounding: Rounding) -> tuple:
            # Devices with other rows have gradients of their own, and round them by other bits. Along the other axes
            # some gradients are equal on all devices and have to stay so.
            sums, grads = local(params, batch, rounding.at(position(self.layout.wide(ROWS))))
            return self._over_rows(sums), self._map(self._reduced, cast_tree(grads, dtype))

        return self._manual(everywhere, (self._params, P(ROWS), P()), ((P(), P()), self._state))

    def loss(self, local: Callable) -> Callable:
        """Returns (params, batch) -> (loss sum, count) over all devices from the same of one device."""

        def everywhere(params: Any, batch: Any) -> tuple:
            return self._over_rows(local(params, batch))

        return self._manual(everywhere, (self._params, P(ROWS)), (P(), P()))

    def forward(self, local: Callable, in_specs: tuple, out_specs: Any) -> Callable:
        """Returns (params, *args) -> what `local` gives of the parts of one device, `args` and result as specified."""
        return self._manual(local, (self._params, *in_specs), out_specs)

    def split(self, params: Any) -> Any:
        """Returns parameters as the optimizer's state lies: with ZeRO-1 a part of every replica."""
        sharding = self._map(lambda axes: self.layout.state_sharding(axes))
        return jax.lax.with_sharding_constraint(params, sharding)

    def publish(self, params: Any) -> Any:
        """Returns parameters as the forward pass reads them, from `split` ones: the all-gather of ZeRO-1."""
        return self._manual(lambda tree: self._map(self._whole, tree), (self._state,), self._params)(params)

    def total(self, of_leaf: Callable[[jax.Array], jax.Array], tree: Any) -> jax.Array:
        """Returns the sum over the leaves of `of_leaf`, fp32, from `split` arrays: one all-reduce of a scalar.

        Args:
          of_leaf: a sum over the elements of an array, so that the whole is the sum of what the devices have.
          tree: arrays that lie as the optimizer's state.
        """
        rules = self.layout.state_rules

        def held(axes: tuple[str, ...]) -> set[str]:
            return {place for axis in axes for place in rules[axis]}

        used = set().union(*jax.tree.leaves(self._map(lambda axes: frozenset(held(axes)))))
        places = tuple(place for place in self.layout.wide(self.layout.mesh.axis_names) if place in used)

        def share(axes: tuple[str, ...], part: jax.Array) -> jax.Array:
            return of_leaf(part) / self.layout.size(set(places) - held(axes))

        def everywhere(parts: Any) -> jax.Array:
            return summed(sum(jax.tree.leaves(self._map(share, parts))), places)

        return self._manual(everywhere, (self._state,), P())(tree)

    def _reduced(self, axes: tuple[str, ...], grad: jax.Array) -> jax.Array:
        rules = self.layout.param_rules
        partial = {place for axis in axes for place in self.layout.partial_gradients.get(axis, ())}
        held = {place for axis in axes for place in rules[axis]}
        places = [place for place in self.layout.wide((*ROWS, *TENSOR)) if place in {*ROWS, *partial} - held]
        for dim, axis in enumerate(axes):
            grad = scattered(grad, self._replicas(axis), dim)
            places = [place for place in places if place not in self._replicas(axis)]
        return summed(grad, tuple(places))

    def _whole(self, axes: tuple[str, ...], part: jax.Array) -> jax.Array:
        for dim, axis in enumerate(axes):
            part = gathered(part, self._replicas(axis), dim)
        return part

    def _replicas(self, axis: str) -> tuple[str, ...]:
        """Returns the mesh axes over which the state, and not the parameters, is split along a logical axis."""
        more = self.layout.state_rules[axis][len(self.layout.param_rules[axis]) :]
        return self.layout.wide(more)

    def _over_rows(self, sums: tuple) -> tuple:
        return jax.tree.map(lambda value: summed(value, self.layout.wide(ROWS)), sums)

    def _map(self, fn: Callable, *trees: Any) -> Any:
        return jax.tree.map(fn, self.axes, *trees, is_leaf=lambda leaf: isinstance(leaf, tuple))

    @property
    def _params(self) -> Any:
        return self._map(lambda axes: spec(axes, self.layout.param_rules))

    @property
    def _state(self) -> Any:
        return self._map(lambda axes: spec(axes, self.layout.state_rules))

    def _manual(self, fn: Callable, in_specs: Any, out_specs: Any) -> Callable:
        return jax.shard_map(fn, mesh=self.layout.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)
