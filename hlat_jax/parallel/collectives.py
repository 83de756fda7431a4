"""Collectives for use inside `shard_map`, with explicit VJPs, and the parallel context of a model that uses them.

The forward and backward pass of a step runs under `jax.shard_map` over all axes of the mesh. Code inside has the shapes
of one device, and only the collectives written here and in `replica_sync` run. No partitioner inserts others, and a
reduce-scatter is always one, even if XLA would not form it.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import jax

from hlat_jax.parallel.sharding import CONTEXT, TENSOR, Layout

# The four conjugate operations: identity and all-reduce, all-gather and reduce-scatter. Without axes, the identity.


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def copy_to_tensor_region(x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """Returns `x`, which is replicated over `axes`. Each device uses it for a part. The backward pass is `psum`."""
    return x


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def psum(x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """Returns the sum of `x` over `axes`, replicated. The backward pass returns the gradient of the sum unchanged."""
    return jax.lax.psum(x, axes) if axes else x


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def all_gather(x: jax.Array, axes: tuple[str, ...], dim: int) -> jax.Array:
    """Returns the parts of all devices along `axes`, concatenated in `dim`. The backward pass is `reduce_scatter`."""
    return _gather(x, axes, dim)


def _gather(x: jax.Array, axes: tuple[str, ...], dim: int) -> jax.Array:
    return jax.lax.all_gather(x, axes, axis=dim, tiled=True) if axes else x


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def reduce_scatter(x: jax.Array, axes: tuple[str, ...], dim: int) -> jax.Array:
    """Returns this device's part in `dim` of the sum of `x` over `axes`. The backward pass is `all_gather`."""
    return jax.lax.psum_scatter(x, axes, scatter_dimension=dim, tiled=True) if axes else x


# `_gather`: a remat policy then sees the collective itself, and not a function that it cannot look into.
copy_to_tensor_region.defvjp(lambda x, axes: (x, None), lambda axes, _, grad: (psum(grad, axes),))
psum.defvjp(lambda x, axes: (psum(x, axes), None), lambda axes, _, grad: (grad,))
all_gather.defvjp(lambda x, *at: (_gather(x, *at), None), lambda axes, dim, _, grad: (reduce_scatter(grad, axes, dim),))
reduce_scatter.defvjp(
    lambda x, *at: (reduce_scatter(x, *at), None), lambda axes, dim, _, grad: (all_gather(grad, axes, dim),)
)


def axis_index(axes: tuple[str, ...]) -> jax.Array:
    """Returns this device's int32 index along mesh axes, the first outermost, or 0 without axes."""
    return jax.lax.axis_index(axes) if axes else jax.numpy.int32(0)


@dataclasses.dataclass(frozen=True)
class ParallelContext:
    """Shardings of a model's parameters and activations inside `shard_map`, by default for a single device.

    Mesh axes are named only if they hold more than one device.

    Attributes:
      tensor: mesh axes over which heads, mlp and vocabulary are split.
      pipe: the axis over which layers and vocabulary are split.
      fsdp: the axis over which matrices are split along `fsdp_axes` until they are used.
      fsdp_axes: the logical axes that fsdp splits.
      sequence_parallel: whether activations between blocks are split over `tensor` along T.
      context_degree: number of parts into which T is split everywhere, see `ops.context_attention`.
    """

    tensor: tuple[str, ...] = ()
    pipe: tuple[str, ...] = ()
    fsdp: tuple[str, ...] = ()
    fsdp_axes: tuple[str, ...] = ()
    sequence_parallel: bool = False
    context_degree: int = 1

    @property
    def vocab(self) -> tuple[str, ...]:
        """Mesh axes over which the vocabulary of the embedding table and the head is split, outermost first."""
        return self.pipe + self.tensor

    def enter_tensor_region(self, x_BTD: jax.Array) -> jax.Array:
        """Returns the input of a column-parallel matrix, the whole sequence. Its gradient is summed over `tensor`."""
        if self.sequence_parallel:
            return all_gather(x_BTD, self.tensor, 1)
        return copy_to_tensor_region(x_BTD, self.tensor)

    def leave_tensor_region(self, y_BTD: jax.Array) -> jax.Array:
        """Returns the output of a row-parallel matrix summed over `tensor`, sharded as activations between blocks."""
        return reduce_scatter(y_BTD, self.tensor, 1) if self.sequence_parallel else psum(y_BTD, self.tensor)

    def gather_weight(self, weight: jax.Array, axes: Sequence[str]) -> jax.Array:
        """Returns a matrix with these logical axes gathered over fsdp. Its gradient is reduce-scattered."""
        for dim, axis in enumerate(axes):
            if axis in self.fsdp_axes:
                weight = all_gather(weight, self.fsdp, dim)
        return weight


SINGLE_DEVICE = ParallelContext()


def parallel_context(layout: Layout) -> ParallelContext:
    """Returns the context of a model under a layout, for code inside the `shard_map` of `ReplicaSync`."""
    return ParallelContext(
        tensor=layout.wide(TENSOR),
        pipe=layout.wide(("pipe",)),
        fsdp=layout.wide(("fsdp",)),
        fsdp_axes=layout.fsdp_axes,
        sequence_parallel=layout.sequence_parallel,
        context_degree=layout.size(CONTEXT),
    )
