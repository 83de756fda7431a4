"""What the devices of a mesh say to each other during a step: every collective that we write ourselves.

The step's forward and backward pass runs under `jax.shard_map` over all axes of the mesh: code inside sees the shapes
of one device, and nothing travels that is not written here. So the collectives of a program are known from this file
and do not depend on how well a partitioner guesses; a reduce-scatter is one, also where XLA would not form it. Where
what lies is a matter of the tables in `sharding`, from which every function here takes its axes.

`Shards` is for the model: the collectives of one forward pass, whose transposes are those of the backward pass. Those
of the program, gradients of every device in and one gradient out, are in `spread`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import jax

from hlat_jax.parallel.sharding import TENSOR, Layout

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


# `gathered.fun`: where a remat policy looks it then finds the collective, and not a function that it cannot see into.
copied.defvjp(lambda x, axes: (x, None), lambda axes, _, grad: (summed(grad, axes),))
summed.defvjp(lambda x, axes: (summed(x, axes), None), lambda axes, _, grad: (grad,))
gathered.defvjp(lambda x, *at: (gathered.fun(x, *at), None), lambda axes, dim, _, grad: (scattered(grad, axes, dim),))
scattered.defvjp(lambda x, *at: (scattered(x, *at), None), lambda axes, dim, _, grad: (gathered(grad, axes, dim),))


@dataclasses.dataclass(frozen=True)
class Shards:
    """The collectives of a model whose parameters are split over a mesh; as it stands, of a model on one device.

    Attributes:
      tensor: mesh axes of more than one device over which heads, mlp and vocabulary are split.
      pipe: likewise, the axis over which layers and vocabulary are split.
      fsdp: likewise, the axis over which matrices are split along `fsdp_axes` until they are used.
      fsdp_axes: the logical axes that fsdp splits.
      reduced: likewise, over which the gradients of matrices are summed where they arise, inside the loop over layers.
      sequence_parallel: activations between blocks are split over `tensor` along T.
    """

    tensor: tuple[str, ...] = ()
    pipe: tuple[str, ...] = ()
    fsdp: tuple[str, ...] = ()
    fsdp_axes: tuple[str, ...] = ()
    reduced: tuple[str, ...] = ()
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
        """Returns a matrix with these logical axes whole over fsdp. Backward: reduce-scatter of its gradient."""
        for dim, axis in enumerate(axes):
            if axis in self.fsdp_axes:
                weight = gathered(copied(weight, self.reduced), self.fsdp, dim)
        return weight


ALONE = Shards()


def shards(layout: Layout) -> Shards:
    """Returns the collectives of a model under a layout, for code inside `Spread`'s region."""
    return Shards(
        tensor=layout.wide(TENSOR),
        pipe=layout.wide(("pipe",)),
        fsdp=layout.wide(("fsdp",)),
        fsdp_axes=layout.fsdp_axes,
        reduced=layout.wide(("data",)) if layout.reduce_gradients == "layer" else (),
        sequence_parallel=layout.sequence_parallel,
    )


def position(axes: tuple[str, ...]) -> jax.Array:
    """Returns this device's int32 number along mesh axes, the first outermost; 0 without any."""
    return jax.lax.axis_index(axes) if axes else jax.numpy.int32(0)
