"""Checks parallel degrees for a number of devices, and finds the nearest degrees that pass.

The checks need no devices, so a laptop can check a layout of 8,192.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from hlat_jax.config import Config, ModelConfig, ParallelConfig, count_text
from hlat_jax.facts import core_groups
from hlat_jax.facts.core_groups import DISPUTED, REFUSED, Server
from hlat_jax.parallel.sharding import (
    CONTEXT,
    MESH_AXES,
    ROWS,
    TENSOR,
    TOKENS,
    Layout,
    abstract_layout,
    make_layout,
    resolve_degrees,
)
from hlat_jax.resolve import check_parallel, check_policy


def layout_over(config: Config, devices: Sequence[Any], *, server: Server | None = None) -> Layout:
    """Returns the layout of a config over `devices`.

    On Neuron, devices are placed in the order that groups of the tensor degree need, see `core_groups.order`.

    Args:
      config: the config.
      devices: all devices, the nearest next to each other.
      server: the Neuron servers that the devices belong to, by default the servers that the devices name.

    Raises:
      ValueError: degrees that do not multiply to the number of devices, or do not divide a size of the model or the
        batch. Groups of cores that Neuron does not support. The message has the nearest degrees that pass every
        check on these devices. It also raises for more tokens in a step than are counted exactly.
    """
    rows, seq_len = config.data.batch_size, config.data.seq_len
    if rows * seq_len > 2**24:  # they are counted in float32
        raise ValueError(
            f"data.batch_size={rows} x data.seq_len={seq_len} are {rows * seq_len:,} tokens a step, and they are "
            f"counted exactly up to {2**24:,}. Use data.batch_size={2**24 // seq_len} or less."
        )
    server = server or core_groups.server_of(devices)
    try:
        check_degrees(config, len(devices), server=server)
    except ValueError as error:
        raise ValueError(f"{error} {_advice(config, len(devices), server)}") from None
    return place_over(config.parallel, devices, server=server, num_kv_heads=config.model.num_kv_heads)


def placement(num_devices: int, *, tensor: int, server: Server | None) -> np.ndarray:
    """Returns the number of the device at each place of a mesh, int64[num_devices], with `tensor` innermost."""
    order = core_groups.order(server, tensor) if server else None
    numbers = np.arange(num_devices)
    if order is None or num_devices % server.size:
        return numbers
    return (numbers.reshape(-1, server.size)[:, order]).reshape(-1)


@functools.lru_cache(maxsize=4096)
def group_verdicts(
    parallel: ParallelConfig, *, model: ModelConfig, server: Server, trains: bool = True
) -> dict[str, list[str]]:
    """Returns DISPUTED and REFUSED -> the reasons, for the groups of the collectives of a run. No degree may be -1.

    Source: `core_groups.RULES`.
    """
    wide = {axis: getattr(parallel, axis) for axis in MESH_AXES}
    num_devices = math.prod(wide.values())
    layout = abstract_layout(parallel, num_devices, num_kv_heads=model.num_kv_heads)
    devices = placement(num_devices, tensor=parallel.tensor, server=server)
    reasons: dict[str, list[str]] = {DISPUTED: [], REFUSED: []}
    for axes in collective_axes(layout, model, trains=trains):
        groups = core_groups.groups_along(dict(layout.mesh.shape), axes, devices=devices)
        level, reason = core_groups.verdict(groups, server)
        if level in reasons:
            names = dict.fromkeys("tensor" if axis in TENSOR else axis for axis in axes)
            reasons[level].append(f"{' x '.join(f'parallel.{name}={wide[name]}' for name in names)}: {reason}")
    return reasons


def collective_axes(layout: Layout, model: ModelConfig, *, trains: bool = True) -> list[tuple[str, ...]]:
    """Returns the axes above 1 of every kind of group that collectives of a run go over.

    With `trains`, these include the collectives of gradients, the optimizer and the norms.
    """
    # stages, shards, rows, tensor, the vocabulary over stages
    sent: list[tuple[str, ...]] = [("pipe",), ("fsdp",), TENSOR, ("pipe", *TENSOR)]
    sent += [TOKENS, CONTEXT] if trains else [ROWS]  # losses; keys and values
    if trains:
        state = {axis for axes in layout.state_rules.values() for axis in axes}
        sent += [("data", *CONTEXT), ("data", *CONTEXT, "tensor_rep")]  # matrices; those of copies of a KV head
        sent += [(*TOKENS, *TENSOR)] * (layout.sequence_parallel or model.qk_norm)  # scales of norms
        sent += [(*TOKENS, "tensor_rep")] * model.qkv_bias
        sent += [tuple(axis for axis in layout.mesh.axis_names if axis in state)]  # norms of gradients and weights
        sent += [layout.mesh.axis_names]  # norms of the state before it is saved
    return list(filter(None, dict.fromkeys(map(layout.wide, sent))))


def check_degrees(config: Config, num_devices: int, *, server: Server | None = None) -> None:
    """Raises ValueError for the first size that a degree does not divide, or group of cores that Neuron refuses.

    The message has the key to change. Groups are checked if the Neuron server of the devices is given.
    """
    parallel = _resolve_rest(config.parallel, num_devices)
    check_parallel(parallel, config.model)
    check_policy(config.precision.policy, pipe=parallel.pipe)
    layout = abstract_layout(parallel, num_devices, num_kv_heads=config.model.num_kv_heads)
    _check_model(config.model, layout)
    if layout.sequence_parallel or layout.wide(CONTEXT):
        _check_seq_len(config.data.seq_len, layout)
    rows, num_microbatches = config.data.batch_size, config.train.num_microbatches
    if num_microbatches == -1 and rows < layout.row_degree:
        raise ValueError(
            f"data.batch_size={rows} has fewer rows than {count_text(layout.row_degree, 'data-parallel part')}. Lower "
            "parallel.data or parallel.fsdp, or raise data.batch_size."
        )
    parts = 1 if num_microbatches == -1 else layout.row_degree * num_microbatches
    if rows % parts:
        per_part, is_rest = divmod(rows, layout.row_degree)
        raise ValueError(
            f"data.batch_size={rows} does not divide into {count_text(layout.row_degree, 'data-parallel part')} x "
            f"train.num_microbatches={num_microbatches}. Make data.batch_size a multiple of {parts}"
            + ("" if is_rest else f", or train.num_microbatches a divisor of {per_part}")
            + (", or set train.num_microbatches=-1, which pads." if per_part else ".")
        )
    if server:
        _check_groups(parallel, model=config.model, server=server)


def _check_groups(parallel: ParallelConfig, *, model: ModelConfig, server: Server, trains: bool = True) -> None:
    refused = group_verdicts(parallel, model=model, server=server, trains=trains)[REFUSED]
    if refused:
        raise ValueError(f"{refused[0]} on {server.kind}. Source: {server.rules.source}.")


def verdicts(config: Config, num_devices: int, server: Server) -> dict[str, list[str]]:
    """Returns `group_verdicts` of a config."""
    parallel = _resolve_rest(config.parallel, num_devices)
    return group_verdicts(parallel, model=config.model, server=server)


def layout_of_model(model: ModelConfig, parallel: ParallelConfig, devices: Sequence[Any]) -> Layout:
    """Returns the layout of a model without a batch, over the first of `devices` that the degrees multiply to.

    Raises:
      ValueError: too few devices, a size of the model that a degree does not divide, or groups of cores that Neuron
        does not support.
    """
    wanted = [getattr(parallel, axis) for axis in MESH_AXES]
    count = len(devices) if -1 in wanted else math.prod(wanted)
    if count > len(devices):
        named = " x ".join(f"parallel.{axis}={degree}" for axis, degree in zip(MESH_AXES, wanted, strict=True))
        raise ValueError(f"{named} needs {count_text(count, 'device')}, not {len(devices)}. Lower a degree.")
    parallel = _resolve_rest(parallel, count)
    check_parallel(parallel, model)
    server = core_groups.server_of(devices[:count])
    layout = place_over(parallel, devices[:count], server=server, num_kv_heads=model.num_kv_heads)
    _check_model(model, layout)
    if server:
        _check_groups(parallel, model=model, server=server, trains=False)
    return layout


def _resolve_rest(parallel: ParallelConfig, num_devices: int) -> ParallelConfig:
    """Returns the config with -1 replaced by the degree that remains."""
    degrees: dict[str, Any] = dict(zip(MESH_AXES, resolve_degrees(parallel, num_devices), strict=True))
    return dataclasses.replace(parallel, **degrees)


def place_over(parallel: ParallelConfig, devices: Sequence[Any], server: Server | None, *, num_kv_heads: int) -> Layout:
    """Returns the layout over devices in the order that groups of the tensor degree need, without a check of groups."""
    parallel = _resolve_rest(parallel, len(devices))
    order = placement(len(devices), tensor=parallel.tensor, server=server)
    return make_layout(parallel, [devices[index] for index in order], num_kv_heads=num_kv_heads)


def are_degrees_valid(config: Config, num_devices: int, *, server: Server | None = None) -> bool:
    """Returns whether `check_degrees` raises nothing."""
    try:
        check_degrees(config, num_devices, server=server)
    except ValueError:
        return False
    return True


def nearest_nodes(config: Config, num_nodes: int, *, node_devices: int, server: Server | None) -> list[int]:
    """Returns the next number of nodes below `num_nodes`, and the next above it, on which `check_degrees` passes.

    Above, it looks up to four times as many nodes, and 8 more.
    """
    sides = range(num_nodes - 1, 0, -1), range(num_nodes + 1, 4 * num_nodes + 9)
    found = ((n for n in side if are_degrees_valid(config, n * node_devices, server=server)) for side in sides)
    return [count for count in (next(side, 0) for side in found) if count]


def nearest_degrees(config: Config, num_devices: int, *, server: Server | None = None) -> dict[str, int] | None:
    """Returns the degrees over `num_devices` that pass every check and are the fewest doublings from the config's.

    A degree of -1 is not compared. If no degrees pass, it returns None.
    """
    asked = {axis: degree for axis in MESH_AXES if (degree := getattr(config.parallel, axis)) != -1}

    def distance(degrees: dict[str, int]) -> tuple[float, ...]:
        steps = [abs(math.log2(degrees[axis] / degree)) for axis, degree in asked.items()]
        return round(sum(steps), 6), sum(map(bool, steps)), degrees["pipe"], degrees["fsdp"]

    def is_allowed(degrees: dict[str, int]) -> bool:
        parallel = dataclasses.replace(config.parallel, **degrees)
        return are_degrees_valid(dataclasses.replace(config, parallel=parallel), num_devices, server=server)

    context = max(1, config.parallel.context)
    every = all_degrees(num_devices // context, context=context) if num_devices % context == 0 else ()
    return next(filter(is_allowed, sorted(every, key=distance)), None)


def all_degrees(num_devices: int, *, context: int = 1) -> Iterator[dict[str, int]]:
    """Yields all degrees that multiply to `num_devices`, apart from the given degree `context`."""
    divisors = [d for d in range(1, num_devices + 1) if num_devices % d == 0]
    for pipe, data, fsdp in itertools.product(divisors, repeat=3):
        if num_devices % (pipe * data * fsdp) == 0:
            degrees = (pipe, data, fsdp, context, num_devices // (pipe * data * fsdp))
            yield dict(zip(MESH_AXES, degrees, strict=True))


def _advice(config: Config, num_devices: int, server: Server | None) -> str:
    remains = [axis for axis in MESH_AXES if getattr(config.parallel, axis) == -1]
    note = f" (parallel.{remains[0]}=-1 is the rest)" if remains else ""
    nearest = nearest_degrees(config, num_devices, server=server)
    if nearest is None:
        kept = f" with parallel.context={config.parallel.context}" if config.parallel.context > 1 else ""
        return f"No degrees pass every check on {count_text(num_devices, 'device')}{kept}."
    changed = [f"parallel.{axis}={d}" for axis, d in nearest.items() if getattr(config.parallel, axis) not in (d, -1)]
    return (
        f"The nearest degrees that pass every check on {count_text(num_devices, 'device')}: {', '.join(changed)}{note}."
    )


def _check_model(model: ModelConfig, layout: Layout) -> None:
    tensor = layout.degrees["tensor"]
    if layout.wide(("tensor_rep",)) and model.fuse_qkv:
        raise ValueError(
            f"parallel.tensor={tensor} above model.num_kv_heads={model.num_kv_heads} replicates KV heads, which needs "
            "a separate KV matrix. Set model.fuse_qkv=False, or lower parallel.tensor to at most "
            f"{model.num_kv_heads}."
        )
    sizes = {
        "layers": ("model.num_layers", model.num_layers),
        "embed": ("model.embed_dim", model.embed_dim),
        "kv_heads": ("model.num_kv_heads", model.num_kv_heads),
        "heads": ("model.num_heads", model.num_heads),
        "mlp": ("model.mlp_dim", model.mlp_dim),
    }
    if not model.fuse_qkv:
        sizes["kv_embed"] = sizes["embed"]
    for axis, (path, size) in sizes.items():
        is_padded = layout.wide(layout.param_rules[axis]) != layout.wide(layout.state_rules[axis])
        if not is_padded or layout.wide(layout.param_rules[axis]):
            _check_divisor(path, size, layout, layout.state_rules[axis])


def _check_seq_len(seq_len: int, layout: Layout) -> None:
    degree = layout.size(CONTEXT)
    if degree == 1:
        _check_divisor("data.seq_len", seq_len, layout, TENSOR)
        return
    within = layout.size(TENSOR) if layout.sequence_parallel else 1
    block = 64 if seq_len > 2 * degree * 256 else 1  # attention visits whole blocks of a chunk, of at most 256
    parts = degree * math.lcm(2 * block, within)
    if seq_len % parts:
        raise ValueError(
            f"data.seq_len={seq_len} is not a multiple of {parts}, which parallel.context={degree} needs for two "
            f"chunks a device{f', of blocks of {block} positions' * (block > 1)}"
            f"{f', each part split over parallel.tensor={within}' * (within > 1)}. Change one of them."
        )


def _check_divisor(path: str, size: int, layout: Layout, mesh_axes: Sequence[str]) -> None:
    parts = layout.size(mesh_axes)
    if size % parts:
        degrees = layout.degrees
        axes = dict.fromkeys("tensor" if axis in TENSOR else axis for axis in mesh_axes)
        named = " x ".join(f"parallel.{axis}={degrees[axis]}" for axis in axes if degrees[axis] > 1)
        within = " Or set parallel.zero1=False, so that fsdp alone splits the state."
        raise ValueError(
            f"{path}={size} does not divide into the {parts} parts of {named}. Change one of them."
            + within * ("fsdp" in axes and "data" in axes)
        )
