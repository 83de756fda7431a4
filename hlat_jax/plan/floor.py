"""Lower bounds of memory and time of a step under a layout, by arithmetic; they show which layouts to trace.

Every number is at most that of the plan (tests compare the two), so a layout that does not fit by these bounds does not
fit, and one that is slower by them than a planned layout is slower. State is exact. Left out: the time of elementwise
work, norms, the loss and the smaller collectives, and every buffer but the kept activations.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

import jax
import jax.numpy as jnp

from hlat_jax.config import Config
from hlat_jax.facts import hardware
from hlat_jax.facts.policies import POLICY_FACTS
from hlat_jax.model import abstract_params, param_axes
from hlat_jax.ops.choices import chosen_model
from hlat_jax.parallel.sharding import TENSOR, Layout
from hlat_jax.plan import roofline
from hlat_jax.plan.collectives import Collective
from hlat_jax.precision import POLICIES


@dataclasses.dataclass(frozen=True)
class Floor:
    """Lower bounds of a plan.

    Attributes:
      total: bytes of one device.
      step_s: seconds of a projected step with nothing overlapped; 0 if the speed of the target is unknown.
    """

    total: int
    step_s: float


@dataclasses.dataclass(frozen=True)
class Held:
    """The state and gradients on one device, which do not depend on the schedule.

    Attributes:
      state_bytes: parameters, moments and masters.
      params: parameters that the forward pass reads.
      layer_params: parameters of the layers alone.
      gradient_bytes: gradients, in the dtype of their sums.
    """

    state_bytes: int
    params: int
    layer_params: int
    gradient_bytes: int


def held(config: Config, layout: Layout) -> Held:
    """Returns the state and gradients of one device under a layout, which may be abstract."""
    policy = POLICIES[config.precision.policy]
    axes, shapes = param_axes(config.model), abstract_params(config.model)

    def count(rules: dict, *, key: str = "") -> int:
        tree = (axes[key], shapes[key]) if key else (axes, shapes)
        parts = jax.tree.map(
            lambda names, leaf: math.prod(leaf.shape) // layout.size([at for name in names for at in rules[name]]),
            *tree,
            is_leaf=lambda leaf: isinstance(leaf, tuple),
        )
        return sum(jax.tree.leaves(parts))

    params, mirrored = count(layout.param_rules), count(layout.state_rules)
    itemsize = jnp.dtype(policy.param).itemsize
    return Held(
        state_bytes=itemsize * params
        + (POLICY_FACTS[config.precision.policy].state_bytes_per_param - itemsize) * mirrored,
        params=params,
        layer_params=count(layout.param_rules, key="layers"),
        gradient_bytes=jnp.dtype(policy.accumulate).itemsize
        * (mirrored if layout.reduce_gradients == "microbatch" else params),
    )


def floor(config: Config, layout: Layout, *, target: hardware.Target, holds: Held) -> Floor:
    """Returns the lower bounds of `report.make_plan` of a config under a layout.

    Args:
      config: config of the run.
      layout: layout of the config's degrees, which may be abstract.
      target: node with the speeds.
      holds: state and gradients, as `held(config, layout)` returns them.
    """
    config = dataclasses.replace(config, model=chosen_model(config, layout, platform=target.platform))
    shape = _Shape(config, layout)
    gradients = holds.gradient_bytes if shape.num_microbatches > 1 else holds.params * shape.itemsize
    total = holds.state_bytes + gradients + shape.kept_bytes()
    if not target.device.peak_flops:
        return Floor(total, 0.0)
    seconds = 2 * holds.state_bytes / target.device.memory_bytes_per_s
    for count, moved, times in shape.products():
        seconds += times * max(count / target.device.peak_flops, moved / target.device.memory_bytes_per_s)
    seconds /= roofline.efficiency(target)
    for collective in shape.collectives(holds):
        seconds += collective.trips * roofline.collective_seconds(collective, target=target, mesh=layout.mesh)[1]
    return Floor(total, seconds)


class _Shape:
    """Sizes of one device's share of a step."""

    def __init__(self, config: Config, layout: Layout):
        self.config, self.layout, self.model = config, layout, config.model
        self.pipe, self.tensor = layout.degrees["pipe"], layout.degrees["tensor"]
        self.num_microbatches = config.train.num_microbatches
        self.ticks = self.num_microbatches + self.pipe - 1
        self.num_layers = config.model.num_layers // self.pipe
        self.rows = config.data.batch_size // (layout.row_degree * self.num_microbatches)
        self.tokens = self.rows * config.data.seq_len
        self.itemsize = jnp.dtype(POLICIES[config.precision.policy].products).itemsize
        self.x_bytes = self.tokens * config.model.embed_dim * self.itemsize
        self.heads = config.model.num_heads // self.tensor
        self.kv_heads = max(1, config.model.num_kv_heads // self.tensor)
        self.mlp_dim = config.model.mlp_dim // self.tensor

    def kept_bytes(self) -> int:
        """Returns the bytes that the layers keep for their backward pass, over all slots of a pipeline's ring."""
        model, between = self.model, self.tensor if self.layout.sequence_parallel else 1
        layer = model.embed_dim // between  # the layer's input, or its norm
        if model.remat in ("none", "selective", "products"):
            layer += (2 * self.heads + 2 * self.kv_heads) * model.head_dim + 2 * self.mlp_dim
        if model.remat == "none" and model.attention == "einsum":
            layer += self.heads * self.config.data.seq_len
        slots = 2 * self.pipe - 1 if self.pipe > 1 else 1
        return slots * self.num_layers * self.tokens * layer * self.itemsize

    def products(self) -> Iterator[tuple[float, int, int]]:
        """Yields (FLOPs, bytes, executions) of products; backward passes take twice the forward's."""
        model, seq_len, item = self.model, self.config.data.seq_len, self.itemsize
        width, head = model.embed_dim, model.head_dim
        again = self.ticks * self.num_layers if model.remat == "full" else 0
        passes = 3 * self.ticks * self.num_layers + again
        columns = (self.heads + 2 * self.kv_heads) * head
        for n, k in ((columns, width), (width, self.heads * head), (2 * self.mlp_dim, width), (width, self.mlp_dim)):
            # the last product of a layer is not recomputed: nothing reads it
            times = passes - again if (n, k) == (width, self.mlp_dim) else passes
            yield 2.0 * self.tokens * n * k, item * (self.tokens * (n + k) + n * k), times
        if model.attention == "einsum":  # "blocked" skips masked scores
            scores = self.rows * self.heads * seq_len
            times = passes + self.ticks * self.num_layers * (model.remat == "selective") // 2
            elements = scores * seq_len + (scores + self.rows * self.kv_heads * seq_len) * head
            yield 4.0 * scores * seq_len * head, 2 * item * elements, times
        vocab = model.vocab_size // (self.tensor * self.pipe)
        logits = 2.0 * self.tokens * vocab * width, item * (self.tokens * (vocab + width) + vocab * width)
        yield *logits, 3 * self.num_microbatches

    def collectives(self, holds: Held) -> Iterator[Collective]:
        """Yields the large collectives of a step."""
        layout, policy = self.layout, POLICIES[self.config.precision.policy]
        runs = self.ticks * self.num_layers
        if layout.sequence_parallel:
            gathers = 4 if self.model.remat == "none" else 6
            yield from self._over(TENSOR, "all-gather", self.x_bytes, gathers * runs)
            yield from self._over(TENSOR, "reduce-scatter", self.x_bytes, 4 * runs)
        else:
            sums = 5 if self.model.remat == "full" else 4
            yield from self._over(TENSOR, "all-reduce", self.x_bytes, sums * runs)
        weights = holds.layer_params // self.num_layers * self.itemsize * layout.size(("fsdp",))
        yield from self._over(("fsdp",), "all-gather", weights, (1 if self.model.remat == "none" else 2) * runs)
        yield from self._over(("fsdp",), "reduce-scatter", weights, runs)
        if self.config.parallel.zero1:
            param_bytes = holds.params * jnp.dtype(policy.param).itemsize
            yield from self._over(("data",), "reduce-scatter", holds.gradient_bytes, 1)
            yield from self._over(("data",), "all-gather", param_bytes, 1)
        else:
            yield from self._over(("data",), "all-reduce", holds.gradient_bytes, 1)
        between = self.x_bytes // (self.tensor if layout.sequence_parallel else 1)
        yield from self._over(("pipe",), "all-reduce", between, 2 * self.num_microbatches)
        gathers = layout.pipe_exchange == "all_gather"
        kind, num_bytes = ("all-gather", between * self.pipe) if gathers else ("collective-permute", between)
        yield from self._over(("pipe",), kind, num_bytes, 2 * self.num_microbatches)

    def _over(self, axes: tuple[str, ...], kind: str, num_bytes: int, trips: int) -> Iterator[Collective]:
        wide = self.layout.wide(axes)
        if wide:
            yield Collective(kind, wide, self.layout.size(wide), num_bytes, trips)
