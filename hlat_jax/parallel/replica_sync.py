"""Parameters, gradients and batches of a program over a mesh: what replicas say to each other around a model.

`Spread` takes the gradients of every device and gives one gradient, and brings parameters to their replicas. It knows
no model: an array is the names of its axes. The collectives inside a forward pass are in `collectives`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import PartitionSpec as P

from hlat_jax.parallel.buckets import gathered_together, grouped, scattered_together, summed_together
from hlat_jax.parallel.collectives import position, shards, summed
from hlat_jax.parallel.sharding import ROWS, TENSOR, Layout, spec
from hlat_jax.precision import Rounding, cast_tree

# A gathered parameter in the forms in which a loss may read it.
_MADE_AGAIN = ("all_gather", "reshape", "transpose", "slice", "squeeze", "convert_element_type", "copy")


@dataclasses.dataclass(frozen=True)
class _Way:
    """How the gradient of a parameter is made of parts: scattered over `axes` in `dim`, then summed over `sums`."""

    axes: tuple[str, ...]
    dim: int
    sums: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Spread:
    """Parameters, gradients and batches of a program over a mesh.

    Attributes:
      layout: the mesh and its tables.
      axes: the logical axes of every parameter, a tuple of names in the place of each array.
      gathers: the loss function takes whole parameters, so that what is split over `fsdp` is gathered before it. A
        model that calls `Shards.weight` does so itself, a layer at a time.
    """

    layout: Layout
    axes: Any
    gathers: bool = False

    def value_and_grad(self, local: Callable, *, dtype: Any) -> Callable:
        """Returns (params, batch, rounding, scale) -> (sums, gradients) over all devices.

        Args:
          local: the same for the rows and the parameters of one device, (params, batch, rounding, *, scale, reduce).
            Its sums, a pytree, and its gradients are parts that are still to be summed over the devices that hold the
            same parameters. That happens here, once, unless `layout.reduce_gradients` says otherwise: `reduce`, where
            it is not None, does it for the gradients of a microbatch.
          dtype: in which gradients are summed. They come out as the optimizer's state lies.
        """
        reduce = functools.partial(self._reduce, dtype=dtype)
        each = reduce if self.layout.reduce_gradients == "microbatch" else None
        # Devices with other rows have gradients of their own, and round them by other bits. Gradients that are equal on
        # all devices, along the other axes or because they are reduced by then, have to stay so.
        own = [] if each else [place for place in self.layout.wide(ROWS) if place not in shards(self.layout).reduced]

        def everywhere(params: Any, batch: Any, shared: tuple[Rounding, Any]) -> tuple:
            rounding, scale = shared
            sums, grads = local(params, batch, rounding.at(position(tuple(own))), scale=scale, reduce=each)
            return self._over_rows(sums), grads if each else reduce(grads)

        run = self._manual(everywhere, (self._params, P(ROWS), P()), (P(), self._state))
        return lambda params, batch, rounding, scale: run(params, batch, (rounding, scale))

    def seen_whole(self, loss_fn: Callable) -> Callable:
        """Returns a loss function that takes this device's part of the parameters, if `gathers`; else the same.

        What is gathered, and what costs no arithmetic, is made again in the backward pass and not kept for it.
        """
        seat = shards(self.layout)
        if not self.gathers or not seat.fsdp:
            return loss_fn

        def way(axes: tuple[str, ...]) -> tuple[int, tuple[str, ...]]:
            dims = [dim for dim, axis in enumerate(axes) if axis in seat.fsdp_axes]
            return (dims[0], seat.fsdp) if dims else (0, ())

        def loss(params: Any, batch: Any) -> Any:
            return loss_fn(self._gathered(params, way), batch)

        return jax.checkpoint(loss, policy=lambda primitive, *_, **__: primitive.name not in _MADE_AGAIN)

    def loss(self, local: Callable) -> Callable:
        """Returns (params, batch) -> loss sum and count over all devices from the same of one device."""

        def everywhere(params: Any, batch: Any) -> Any:
            return self._over_rows(local(params, batch))

        return self._manual(everywhere, (self._params, P(ROWS)), P())

    def forward(self, local: Callable, in_specs: tuple, out_specs: Any) -> Callable:
        """Returns (params, *args) -> what `local` gives of the parts of one device, `args` and result as specified."""
        return self._manual(local, (self._params, *in_specs), out_specs)

    def state_shardings(self, state: Any) -> Any:
        """Returns where every leaf of a program's state lies: parameters by their axes, their mirrors likewise.

        Args:
          state: {"step", "params", "opt_state"}, arrays or their shapes. What has the structure of the parameters in
            the optimizer's state mirrors them; all else is on every device.
        """
        mirrors = self._map(self.layout.state_sharding)

        def shapes(tree: Any) -> tuple:
            return jax.tree.structure(tree), [leaf.shape for leaf in jax.tree.leaves(tree)]

        def like_params(subtree: Any) -> bool:
            return shapes(subtree) == shapes(state["params"])

        everywhere = self.layout.replicated()
        opt_state = jax.tree.map(
            lambda subtree: mirrors if like_params(subtree) else everywhere, state["opt_state"], is_leaf=like_params
        )
        return {"step": everywhere, "params": self._map(self.layout.param_sharding), "opt_state": opt_state}

    def split(self, params: Any) -> Any:
        """Returns parameters as the optimizer's state lies: with ZeRO-1 a part of every replica."""
        sharding = self._map(lambda axes: self.layout.state_sharding(axes))
        return jax.lax.with_sharding_constraint(params, sharding)

    def publish(self, params: Any) -> Any:
        """Returns parameters as the forward pass reads them, from `split` ones: the all-gather of ZeRO-1."""
        return self._manual(lambda tree: self._gathered(tree, self._replicas), (self._state,), self._params)(params)

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

    def _gathered(self, params: Any, way: Callable[[tuple[str, ...]], tuple[int, tuple[str, ...]]]) -> Any:
        """Returns parameters from their parts; `way`: logical axes -> (dim, mesh axes) to gather an array over."""
        parts, structure = jax.tree.flatten(params)
        ways = [way(axes) for axes in structure.flatten_up_to(self.axes)]
        whole = list(parts)
        for numbers in grouped(parts, [axes for _, axes in ways], bucket_bytes=self.layout.bucket_bytes):
            dims, axes = [ways[number][0] for number in numbers], ways[numbers[0]][1]
            together = gathered_together([parts[number] for number in numbers], axes, dims)
            for number, leaf in zip(numbers, together, strict=True):
                whole[number] = leaf
        return structure.unflatten(whole)

    def _reduce(self, grads: Any, dtype: Any) -> Any:
        """Returns gradients of all devices, as the state lies, from the parts of each."""
        leaves, structure = jax.tree.flatten(cast_tree(grads, dtype))
        named = structure.flatten_up_to(self.axes)
        leaves = [self._own_part(axes, leaf) for axes, leaf in zip(named, leaves, strict=True)]
        ways = [self._way(axes) for axes in named]
        for numbers in grouped(leaves, [(way.axes, way.sums) for way in ways], bucket_bytes=self.layout.bucket_bytes):
            way, dims = ways[numbers[0]], [ways[number].dim for number in numbers]
            parts = scattered_together([leaves[number] for number in numbers], way.axes, dims)
            for number, reduced in zip(numbers, summed_together(parts, way.sums), strict=True):
                leaves[number] = reduced
        return structure.unflatten(leaves)

    def _way(self, axes: tuple[str, ...]) -> _Way:
        """Returns the collectives that make the gradient of a parameter with these logical axes."""
        rules = self.layout.param_rules
        partial = {place for axis in axes for place in self.layout.partial_gradients.get(axis, ())}
        held = {place for axis in axes for place in rules[axis]} | set(self._reduced_before(axes))
        places = [place for place in self.layout.wide((*ROWS, *TENSOR)) if place in {*ROWS, *partial} - held]
        dim, replicas = self._replicas(axes)
        replicas = tuple(place for place in replicas if place not in self._reduced_before(axes))
        return _Way(replicas, dim, tuple(place for place in places if place not in replicas))

    def _own_part(self, axes: tuple[str, ...], grad: jax.Array) -> jax.Array:
        """Returns of a gradient that was summed in the loop over layers what this replica keeps."""
        dim, replicas = self._replicas(axes)
        replicas = tuple(place for place in replicas if place in self._reduced_before(axes))
        if not replicas:
            return grad
        size = grad.shape[dim] // self.layout.size(replicas)
        return jax.lax.dynamic_slice_in_dim(grad, position(replicas) * size, size, dim)

    def _reduced_before(self, axes: tuple[str, ...]) -> tuple[str, ...]:
        """Returns the mesh axes over which the loop over layers has summed a gradient, see `Shards.weight`."""
        is_matrix = any(axis in self.layout.fsdp_axes for axis in axes)
        return shards(self.layout).reduced if is_matrix else ()

    def _replicas(self, axes: tuple[str, ...]) -> tuple[int, tuple[str, ...]]:
        """Returns the dim of a parameter, and the mesh axes, along which the state and not the parameter is split."""
        for dim, axis in enumerate(axes):
            more = self.layout.state_rules[axis][len(self.layout.param_rules[axis]) :]
            if self.layout.wide(more):
                return dim, self.layout.wide(more)
        return 0, ()

    def _over_rows(self, sums: Any) -> Any:
        return jax.tree.map(lambda value: summed(value, self.layout.wide(ROWS)), sums)

    def _map(self, fn: Callable, *trees: Any) -> Any:
        return jax.tree.map(fn, self.axes, *trees, is_leaf=_is_axes)

    @property
    def _params(self) -> Any:
        return self._map(lambda axes: spec(axes, self.layout.param_rules))

    @property
    def _state(self) -> Any:
        return self._map(lambda axes: spec(axes, self.layout.state_rules))

    def _manual(self, fn: Callable, in_specs: Any, out_specs: Any) -> Callable:
        return jax.shard_map(fn, mesh=self.layout.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)


def _is_axes(leaf: Any) -> bool:
    return isinstance(leaf, tuple) and all(isinstance(axis, str) for axis in leaf)
