"""Gradient reduction and parameter all-gather across replicas.

It depends on no model, since logical axes describe a parameter. `collectives` has the collectives of a forward pass.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from hlat_jax.parallel import buckets, collectives
from hlat_jax.parallel.collectives import parallel_context
from hlat_jax.parallel.sharding import TOKENS, Layout, spec
from hlat_jax.precision import Rounding, cast_tree

# An all-gather and the layout operations after it, which a backward pass recomputes.
_RECOMPUTED = ("all_gather", "reshape", "transpose", "slice", "squeeze", "convert_element_type", "copy")


@dataclasses.dataclass(frozen=True)
class ReplicaSync:
    """Shardings and collectives of the parameters, gradients and batches of a program over a mesh.

    Attributes:
      layout: the mesh and its rules.
      axes: the logical axes of every parameter, with a tuple of names for each array.
      gathers: whether to gather parameters that are split over `fsdp` before the loss function, which takes them
        unsharded. A model that calls `ParallelContext.gather_weight` does so itself, a layer at a time.
    """

    layout: Layout
    axes: Any
    gathers: bool = False

    def value_and_grad(self, local: Callable, *, dtype: Any) -> Callable:
        """Returns (params, batch, rounding, **replicated) -> (sums, gradients) over all devices.

        Args:
          local: the same for the rows and the parameters of one device, (params, batch, rounding, *, reduce,
            **replicated). Its sums, a pytree, and its gradients are partial sums over the devices that hold the same
            parameters. They are reduced here, once. If `reduce` is not None, `local` calls it to reduce the gradients
            of each microbatch, see `layout.reduce_gradients`.
          dtype: dtype of the sums of gradients. The result is sharded like the optimizer's state.
        """

        def value_and_grad(params: Any, batch: Any, shared: tuple) -> tuple:
            rounding, replicated = shared
            reduce = self._reduce_microbatch(dtype)
            sums, grads = local(params, batch, self._own_rounding(rounding), reduce=reduce, **replicated)
            return self._psum_over_rows(sums), grads if reduce else self._reduce(grads, dtype)

        run = self._shard_map(value_and_grad, (self._params, self.layout.batch_spec, P()), (P(), self._state))
        return lambda params, batch, rounding, **replicated: run(params, batch, (rounding, replicated))

    def start_sums(self, local: Callable, *, dtype: Any) -> Callable:
        """Returns (params, microbatch) -> values that each device keeps between programs of a step, [devices, ...].

        `local` is the same for one device, (params, rows, *, reduce) -> its values. `reduce` and `dtype` are as for
        `value_and_grad`.
        """

        def start(params: Any, batch: Any) -> Any:
            return _own_row(local(params, batch, reduce=self._reduce_microbatch(dtype)))

        return self._shard_map(start, (self._params, self.layout.batch_spec), self.per_device.spec)

    def add_to_sums(self, local: Callable, *, dtype: Any) -> Callable:
        """Returns (kept, (params, microbatch), rounding, **replicated) -> kept, for values that `start_sums` began.

        `local` is the same for one device, (kept, (params, rows), rounding, *, reduce, **replicated) -> kept.
        """

        def add(kept: Any, of_device: tuple, shared: tuple) -> Any:
            rounding, replicated = self._own_rounding(shared[0]), shared[1]
            return _own_row(local(_own(kept), of_device, rounding, reduce=self._reduce_microbatch(dtype), **replicated))

        in_specs = self.per_device.spec, (self._params, self.layout.batch_spec), P()
        run = self._shard_map(add, in_specs, self.per_device.spec)
        return lambda kept, of_device, rounding, **replicated: run(kept, of_device, (rounding, replicated))

    def reduced_sums(self, totals: Any, grads: Any, *, dtype: Any) -> tuple[Any, Any]:
        """Returns (sums, gradients) over all devices from the sums that each keeps, as in `value_and_grad`."""

        def reduce(kept: tuple) -> tuple[Any, Any]:
            sums, grads = _own(kept)
            return self._psum_over_rows(sums), grads if self._reduces_each else self._reduce(grads, dtype)

        return self._shard_map(reduce, (self.per_device.spec,), (P(), self._state))((totals, grads))

    @property
    def per_device(self) -> NamedSharding:
        """The sharding of values that each device keeps for itself, [devices, ...]."""
        return NamedSharding(self.layout.mesh, P(self.layout.mesh.axis_names))

    def mean_shares(self, tree: Any) -> Any:
        """Returns this device's share of the mean over the devices with other rows, for `value_and_grad`'s sums.

        Floats are averaged. Integers should not depend on the rows, so they are the values of the first device.
        """
        axes = self.layout.wide(TOKENS)

        def share(value: jax.Array) -> jax.Array:
            if jnp.issubdtype(value.dtype, jnp.floating):
                return value.astype(jnp.float32) / self.layout.size(axes)
            return jnp.where(collectives.axis_index(axes) == 0, value, 0)

        return jax.tree.map(share, tree)

    def with_gathered_params(self, loss_fn: Callable) -> Callable:
        """Returns a loss function of this device's shards of the parameters if `gathers`, or else `loss_fn`.

        The backward pass gathers again, and keeps no gathered parameter.
        """
        ctx = parallel_context(self.layout)
        if not self.gathers or not ctx.fsdp:
            return loss_fn

        def gather_over(axes: tuple[str, ...]) -> tuple[int, tuple[str, ...]]:
            dims = [dim for dim, axis in enumerate(axes) if axis in ctx.fsdp_axes]
            return (dims[0], ctx.fsdp) if dims else (0, ())

        def loss(params: Any, *args: Any) -> Any:
            return loss_fn(self._all_gather(params, gather_over), *args)

        return jax.checkpoint(loss, policy=lambda primitive, *_, **__: primitive.name not in _RECOMPUTED)

    def loss(self, local: Callable) -> Callable:
        """Returns (params, batch, *more) -> sums over all devices of the results of `local`. `more` is replicated."""

        def reduce_loss(params: Any, batch: Any, more: tuple) -> Any:
            return self._psum_over_rows(local(params, batch, *more))

        run = self._shard_map(reduce_loss, (self._params, self.layout.batch_spec, P()), P())
        return lambda params, batch, *more: run(params, batch, more)

    def forward(self, local: Callable, in_specs: tuple, out_specs: Any) -> Callable:
        """Returns (params, *args) -> `local` of each device's shards, with these specs for `args` and the result."""
        return self._shard_map(local, (self._params, *in_specs), out_specs)

    def state_shardings(self, state: Any) -> Any:
        """Returns the sharding of every leaf of a program's state.

        Args:
          state: state {"step", "params", "opt_state"[, "model_state"]} of arrays or shapes. A leaf of the optimizer's
            state is sharded like a parameter if its path ends in the parameter's path. It must also have the shape of
            the parameter's state. Others are replicated.
        """
        replicated, shardings = self.layout.replicated_sharding(), self._map(self.layout.state_sharding)
        opt_state = self._map_opt_state(lambda _, sharding: sharding or replicated, state, shardings)
        others = jax.tree.map(lambda _: replicated, state)
        return others | {"params": self._map(self.layout.param_sharding), "opt_state": opt_state}

    def unpadded_shapes(self, state: Any) -> list[tuple[int, ...]]:
        """Returns the shape of every leaf of a program's state without the padding of `pad_like_state`."""
        opt_state = self._map_opt_state(lambda leaf, param: leaf if param is None else param, state, state["params"])
        return [leaf.shape for leaf in jax.tree.leaves(state | {"opt_state": opt_state})]

    def shard_like_state(self, params: Any) -> Any:
        """Returns parameters sharded like the optimizer's state, with ZeRO-1 a part on every replica."""
        return jax.lax.with_sharding_constraint(self.pad_like_state(params), self._map(self.layout.state_sharding))

    def pad_like_state(self, params: Any) -> Any:
        """Returns parameters with zeros in the dims that the replicas do not divide, see `Layout.state_shape`."""

        def pad(axes: tuple[str, ...], leaf: jax.Array) -> jax.Array:
            shape = self.layout.state_shape(leaf.shape, axes)
            if shape == leaf.shape:
                return leaf
            dim, split = self.layout.state_split(axes)
            size = shape[dim] // self.layout.size(split)

            def own_part(whole: jax.Array, start: jax.Array) -> jax.Array:  # a partitioner would exchange borders
                padded = _pad_dim(whole, dim, shape[dim])
                return jax.lax.dynamic_slice_in_dim(padded, start.reshape(()), size, dim)

            # `axis_index` would divide by a number of replicas, see rule KB09 of docs/neuron-lint.md
            starts = jnp.arange(0, shape[dim], size, dtype=jnp.int32)
            in_specs = spec(axes, self.layout.param_rules), P(split)
            return self._shard_map(own_part, in_specs, spec(axes, self.layout.state_rules))(leaf, starts)

        return self._map(pad, params)

    def all_gather_params(self, params: Any, *, like: Any) -> Any:
        """Returns parameters as the forward pass reads them, by the all-gather of ZeRO-1 after `shard_like_state`.

        Args:
          params: parameters, on each replica its part.
          like: parameters without padding, as arrays or shapes.
        """

        def cut(axes: tuple[str, ...], whole: jax.Array, leaf: Any) -> jax.Array:
            if self.layout.state_shape(leaf.shape, axes) == leaf.shape:
                return whole
            dim, _ = self.layout.state_split(axes)
            return jax.lax.slice_in_dim(whole, 0, leaf.shape[dim], axis=dim)

        def gather(parts: Any) -> Any:
            return self._map(cut, self._all_gather(parts, self.layout.state_split), like)

        return self._shard_map(gather, (self._state,), self._params)(params)

    def global_sum(self, of_leaf: Callable[[jax.Array], jax.Array], tree: Any) -> jax.Array:
        """Returns the fp32 sum of `of_leaf` over the leaves and devices, by one all-reduce of a scalar.

        Args:
          of_leaf: function from an array to a sum over its elements.
          tree: arrays sharded like the optimizer's state.
        """
        split = self._state_mesh_axes()

        def share(axes: tuple[str, ...], part: jax.Array) -> jax.Array:
            return of_leaf(part) / self._num_copies(axes, split)

        def sum_over_devices(parts: Any) -> jax.Array:
            return collectives.psum(sum(jax.tree.leaves(self._map(share, parts))), split)

        return self._shard_map(sum_over_devices, (self._state,), P())(tree)

    def sums_of_squares_by_layer(self, trees: dict[str, Any]) -> dict[str, dict[str, jax.Array]]:
        """Returns name of a tree -> parameter, or "layers" -> fp32 sum of squares, by one all-reduce.

        Layers are stacked parameters, with the logical axis `layers` first. They have one sum each, [L].

        Args:
          trees: trees like the parameters, {name: parameter or tree}, sharded like the optimizer's state.
        """
        split, over_stages = self._state_mesh_axes(), self.layout.state_rules["layers"]
        num_stages = self.layout.size(over_stages)

        def local(trees: dict[str, Any], stage: jax.Array) -> dict[str, dict[str, jax.Array]]:
            def of_leaf(axes: tuple[str, ...], part: jax.Array) -> jax.Array:
                dims = tuple(range(axes[0] == "layers", part.ndim))
                return jnp.sum(jnp.square(part.astype(jnp.float32)), dims) / self._num_copies(axes, split)

            def of_group(name: str, tree: Any) -> jax.Array:
                total = sum(jax.tree.leaves(jax.tree.map(of_leaf, self.axes[name], tree, is_leaf=_is_axes)))
                if num_stages == 1 or total.ndim == 0:
                    return total
                is_own = jnp.arange(num_stages, dtype=jnp.int32) == stage
                return jnp.where(is_own[:, None], total, 0.0).reshape(-1)

            sums = {name: {key: of_group(key, part) for key, part in tree.items()} for name, tree in trees.items()}
            values, structure = jax.tree.flatten(sums)
            whole = collectives.psum(jnp.concatenate([value.reshape(-1) for value in values]), split)
            ends = np.cumsum([value.size for value in values])[:-1]
            parts = zip(jnp.split(whole, ends), values, strict=True)
            return structure.unflatten([part.reshape(value.shape) for part, value in parts])

        # `axis_index` would divide by a number of replicas, see rule KB09 of docs/neuron-lint.md
        stages = jnp.arange(num_stages, dtype=jnp.int32)
        if self.layout.mesh.size == 1:
            return local(trees, stages)
        return self._shard_map(local, (dict.fromkeys(trees, self._state), P(over_stages)), P())(trees, stages)

    def _state_mesh_axes(self) -> tuple[str, ...]:
        """Returns the mesh axes that split the state of some parameter."""
        used = {mesh_axis for axis in jax.tree.leaves(self.axes) for mesh_axis in self.layout.state_rules[axis]}
        return tuple(axis for axis in self.layout.wide(self.layout.mesh.axis_names) if axis in used)

    def _num_copies(self, axes: tuple[str, ...], split: tuple[str, ...]) -> int:
        """Returns how often the devices along `split` hold each part of the state of a parameter."""
        own = {mesh_axis for axis in axes for mesh_axis in self.layout.state_rules[axis]}
        return self.layout.size(set(split) - own)

    def _all_gather(self, params: Any, over: Callable[[tuple[str, ...]], tuple[int, tuple[str, ...]]]) -> Any:
        """Returns parameters from their shards; `over`: logical axes -> (dim, mesh axes) to gather an array over."""
        parts, structure = jax.tree.flatten(params)
        targets = [over(axes) for axes in structure.flatten_up_to(self.axes)]
        mesh_axes, whole = [axes for _, axes in targets], list(parts)
        for indices in buckets.assign_buckets(parts, mesh_axes, bucket_bytes=self.layout.bucket_bytes):
            bucket, bucket_dims = [parts[index] for index in indices], [targets[index][0] for index in indices]
            gathered = buckets.bucketed_all_gather(bucket, mesh_axes[indices[0]], bucket_dims)
            for index, leaf in zip(indices, gathered, strict=True):
                whole[index] = leaf
        return structure.unflatten(whole)

    def _reduce(self, grads: Any, dtype: Any) -> Any:
        """Returns reduced gradients, sharded like the state, from each device's partial sums."""
        leaves, structure = jax.tree.flatten(cast_tree(grads, dtype))
        named = structure.flatten_up_to(self.axes)
        reductions = [self.layout.reduction(axes) for axes in named]
        keys, dims = [key for key, _ in reductions], [dim for _, dim in reductions]
        for index, ((scattered, _), dim) in enumerate(reductions):
            parts = self.layout.size(scattered)
            if parts > 1 and leaves[index].shape[dim] % parts:
                leaves[index] = _pad_dim(leaves[index], dim, -(-leaves[index].shape[dim] // parts) * parts)
        for indices in buckets.assign_buckets(leaves, keys, bucket_bytes=self.layout.bucket_bytes):
            axes, sums = keys[indices[0]]
            bucket, bucket_dims = [leaves[index] for index in indices], [dims[index] for index in indices]
            parts = buckets.bucketed_reduce_scatter(bucket, axes, bucket_dims)
            for index, reduced in zip(indices, buckets.bucketed_psum(parts, sums), strict=True):
                leaves[index] = reduced
        return structure.unflatten(leaves)

    @property
    def _reduces_each(self) -> bool:
        """Whether the gradients of each microbatch are reduced."""
        return self.layout.reduce_gradients == "microbatch"

    def _reduce_microbatch(self, dtype: Any) -> Callable | None:
        """Returns a function that reduces the gradients of a microbatch, or None where they are reduced once a step."""
        return functools.partial(self._reduce, dtype=dtype) if self._reduces_each else None

    def _own_rounding(self, rounding: Rounding) -> Rounding:
        """Returns how this device rounds sums of gradients.

        Devices with other rows have gradients of their own, and round them by other bits. Gradients that are equal on
        all devices, along the other axes or because they are reduced by then, have to stay so.
        """
        own = () if self._reduces_each else self.layout.wide(TOKENS)
        return rounding.at(collectives.axis_index(own))

    def _psum_over_rows(self, sums: Any) -> Any:
        return jax.tree.map(lambda value: collectives.psum(value, self.layout.wide(TOKENS)), sums)

    def _map_opt_state(self, fn: Callable[[Any, Any], Any], state: Any, of_params: Any) -> Any:
        """Returns `fn` of every leaf of the optimizer's state and the value in `of_params` of its parameter, or None.

        The parameter of a leaf has a path that ends the leaf's path, and its state has the leaf's shape.
        """
        leaves = jax.tree_util.tree_leaves_with_path(state["params"])
        named = jax.tree.structure(state["params"]).flatten_up_to(self.axes)
        values = {
            (path, self.layout.state_shape(param.shape, axes)): value
            for (path, param), axes, value in zip(leaves, named, jax.tree.leaves(of_params), strict=True)
        }

        def of_leaf(path: tuple, leaf: Any) -> Any:
            ends = ((path[start:], leaf.shape) for start in range(len(path) + 1))
            return fn(leaf, next((values[end] for end in ends if end in values), None))

        return jax.tree_util.tree_map_with_path(of_leaf, state["opt_state"])

    def _map(self, fn: Callable, *trees: Any) -> Any:
        return jax.tree.map(fn, self.axes, *trees, is_leaf=_is_axes)

    @property
    def _params(self) -> Any:
        return self._map(lambda axes: spec(axes, self.layout.param_rules))

    @property
    def _state(self) -> Any:
        return self._map(lambda axes: spec(axes, self.layout.state_rules))

    def _shard_map(self, fn: Callable, in_specs: Any, out_specs: Any) -> Callable:
        return jax.shard_map(fn, mesh=self.layout.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)


def _pad_dim(array: jax.Array, dim: int, size: int) -> jax.Array:
    """Returns the array with zeros after its last element in `dim`, `size` in all."""
    return jnp.pad(array, [(0, (size - array.shape[dim]) * (index == dim)) for index in range(array.ndim)])


def _own(kept: Any) -> Any:
    """Returns what this device keeps, from its row of [devices, ...]; by reshapes, which compilers do not copy."""
    return jax.tree.map(lambda leaf: leaf.reshape(leaf.shape[1:]), kept)


def _own_row(kept: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf.reshape(1, *leaf.shape), kept)


def _is_axes(leaf: Any) -> bool:
    return isinstance(leaf, tuple) and all(isinstance(axis, str) for axis in leaf)
