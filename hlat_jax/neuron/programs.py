"""The programs that a run of a config makes a device compile, traced for devices that need not exist.

Owns which they are, on how many devices, and why a finding of `lint` in one of them is accepted.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import jax
import jax.numpy as jnp

from hlat_jax import cost
from hlat_jax.config import Config
from hlat_jax.generate import make_next_logits
from hlat_jax.model import select_implementations
from hlat_jax.neuron import lint
from hlat_jax.neuron.rules import RULES
from hlat_jax.planner.memory import device_bytes
from hlat_jax.planner.trace import live_jaxpr, planned_layout
from hlat_jax.sharding import MESH_AXES, Layout
from hlat_jax.step import init_arguments, make_eval_step, make_init, step_arguments, traced_step

# Warnings that stand in shipped configs, by (program, rule), each with the reason why it may.
EXPLAINED = {
    ("init", "RNG01"): "runs once, before the first step; drawing from rbg keys of its own for every layer takes a "
    "split, which JAX does by Threefry whatever the key. Neuron lists it as incomplete, and others have compiled it; "
    "NEURON_RUN_TRIVIAL_COMPUTATION_ON_CPU=1 draws the weights of a mesh without collectives on the host",
    ("train", "CC02"): "the stages of this pipeline lie on different nodes, so their rings run over EFA; "
    "NEURON_COLLECTIVE_PERMUTE_TO_ALL_GATHER=1 replaces them if the runtime refuses",
}
EXPLAINED[("init", "DT06")] = "the counters of that split, below 2^32: their upper word is 0, also where it is cut off"
EXPLAINED[("eval", "CC02")] = EXPLAINED[("train", "CC02")]


def num_devices(config: Config) -> int:
    """Returns the devices of a config's mesh; an open degree is as large as leaves each device one row at a time."""
    pipe, data, fsdp, tensor = (getattr(config.parallel, axis) for axis in MESH_AXES)
    inner = max(pipe, 1) * max(tensor, 1)
    if -1 not in (data, fsdp):
        return inner * data * fsdp
    rows = config.data.batch_size // config.train.num_microbatches
    return inner * max(rows, data, fsdp)


def traced_programs(config: Config, layout: Layout) -> dict[str, Callable[[], Any]]:
    """Returns what traces each program of a run, by name: train, init, and eval and generate where the config asks."""
    found = {"train": lambda: traced_step(config, layout), "init": lambda: _init(config, layout)}
    if config.data.validation:
        found["eval"] = lambda: _eval(config, layout)
    if config.train.sample_prompt:
        found["generate"] = lambda: _generate(config, layout)
    return found


def findings(
    name: str, traced: Any, *, config: Config, layout: Layout, target: str, operators: Collection[str]
) -> list[lint.Finding]:
    """Returns the findings of one program, and of the training step also what the planner says of its memory.

    Args:
      name: of the program, as `traced_programs` has it.
      traced: its trace.
      config: of the run.
      layout: over the devices that it was traced for.
      target: as for `lint.check`.
      operators: likewise.
    """
    found = lint.check_traced(traced, target=target, recurring=name != "init", operators=operators)
    if name != "train":
        return found
    memory = device_bytes(config, layout, arguments=step_arguments(config, layout), jaxpr=live_jaxpr(traced))
    device = cost.DEVICES[target]
    budget = device.memory_bytes - device.reserved_bytes
    if memory.total <= budget:
        return found
    rule = RULES["MEM1"]
    what = f"planned {memory.total / cost.GIB:.1f} GiB of a device's {budget / cost.GIB:.1f} GiB"
    over = lint.Finding("MEM1", rule.severity, "func.func", what, "", (), 1, rule.why, rule.instead, rule.source)
    return [over, *(finding for finding in found if finding.rule != "MEM1")]


def layout_for_neuron(config: Config, count: int) -> Layout:
    """Returns the layout of a config over `count` Neuron devices that need not exist."""
    return planned_layout(config, count, platform="neuron")


def _init(config: Config, layout: Layout) -> Any:
    return make_init(config, layout).trace(*init_arguments(config))


def _eval(config: Config, layout: Layout) -> Any:
    state, batch, _ = step_arguments(config, layout)
    return make_eval_step(config, layout).trace(state["params"], batch)


def _generate(config: Config, layout: Layout) -> Any:
    state, _, _ = step_arguments(config, layout)
    model = select_implementations(config.model, layout.platform)
    sharding = layout.replicated()
    tokens = jax.ShapeDtypeStruct((1, model.max_positions), jnp.int32, sharding=sharding)
    last = jax.ShapeDtypeStruct((), jnp.int32, sharding=sharding)
    return make_next_logits(model, sharding=sharding).trace(state["params"], tokens, last)
