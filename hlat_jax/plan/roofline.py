"""Projects the time of a step from its trace and the table of targets, without measurements.

In the roofline every product runs at the device's peak or at the speed of its memory, whichever is slower. It reads its
operands and writes its result once, and elementwise work is fused into it. The update reads and writes the state once.
Collectives run one after another at the full speed of the slowest link on their path, with a latency per step of a
binary tree. A real step is slower, as no compiler reaches these speeds everywhere. So on Neuron, products and update
are divided by an efficiency, fitted once on published rows of each training library, see `STACKS`.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np

from hlat_jax.facts.chips import chip_of
from hlat_jax.facts.hardware import Instance
from hlat_jax.passes.products import products
from hlat_jax.plan.collectives import Collective

# Source: AWS Neuron docs, collectives: about 15 us per EFA hop, 1 to 2 us per hop inside an instance.
NETWORK_HOP_S, LINK_HOP_S = 15e-6, 2e-6


@dataclasses.dataclass(frozen=True)
class Calibration:
    """An efficiency that was fitted on the published steps of one training library.

    Attributes:
      chip: the chip that ran the steps.
      efficiency: the speed of products and update relative to the roofline.
      step_range: the smallest and the largest published step over the projected one, each model held out.
    """

    chip: str
    efficiency: float
    step_range: tuple[float, float]


# Fitted by benchmarks/calibration.py; a test fits them again. NxD's rows are newer than NeMo Megatron's, and it is the
# library of HLAT. Those of Optimum Neuron are fine-tuning runs on one chip, by third parties.
STACKS = {
    "NxD": Calibration("trn1", 0.54, (0.859, 1.203)),
    "NeMo Megatron": Calibration("trn1", 0.44, (0.889, 1.214)),
    "Optimum Neuron": Calibration("trn2", 0.24, (0.591, 2.134)),
}
# chip -> the stack of a projection, then others that it is compared with.
STACKS_OF = {"trn1": ("NxD", "NeMo Megatron"), "trn2": ("Optimum Neuron", "NxD")}
# chip -> median and largest |published step / projected - 1|, each model held out.
ERRORS = {"trn1": (0.042, 0.214), "trn2": (0.327, 1.134)}


@dataclasses.dataclass(frozen=True)
class Seconds:
    """Parts of a projected step.

    Attributes:
      products: the time of forward, backward, recomputation and idle ticks of a pipeline, at full speed.
      update: the time of the optimizer update, at full speed.
      link: the time of collectives inside a node.
      network: the time of collectives between nodes.
      flops: the FLOPs of the products on one device, with recomputation and idle ticks.
      efficiency: the speed of products and update relative to the roofline.
      launch: the fixed cost of the launches of a step, see `launches`, or 0 if it is unknown.
    """

    products: float
    update: float
    link: float
    network: float
    flops: float
    efficiency: float = 1.0
    launch: float = 0.0

    @property
    def step(self) -> float:
        """The time of a step without overlap."""
        return (self.products + self.update) / self.efficiency + self.link + self.network + self.launch

    @property
    def roofline(self) -> float:
        """The time of a step with products and update at full speed, without overlap."""
        return dataclasses.replace(self, efficiency=1.0).step

    @property
    def overlapped_step(self) -> float:
        """The time of a step with all collectives overlapped by the products and the update."""
        return max((self.products + self.update) / self.efficiency, self.link + self.network) + self.launch


def stacks_of(target: Instance) -> tuple[str, ...]:
    """Returns the training libraries that calibrate a projection on a target, its own first, or () without any."""
    return STACKS_OF.get(chip_of(target.target), STACKS_OF["trn2"]) if target.platform == "neuron" else ()


def efficiency(target: Instance) -> float:
    """Returns the efficiency of products and update on a target, 1.0 without published rows of its kind."""
    return next((STACKS[name].efficiency for name in stacks_of(target)), 1.0)


def project(jaxpr: Any, collectives: list[Collective], *, target: Instance, mesh: Any, state_bytes: int) -> Seconds:
    """Returns the projection of a whole traced step with these collectives and bytes of state on one device."""
    device = target.device
    flops = seconds = 0.0
    for count, num_bytes, trips in products(jaxpr):
        flops += trips * count
        seconds += trips * max(count / device.peak_flops, num_bytes / device.memory_bytes_per_s)
    spent = {"link": 0.0, "network": 0.0}
    for collective in collectives:
        medium, once = collective_seconds(collective, target=target, mesh=mesh)
        spent[medium] += once * collective.trips
    update = 2 * state_bytes / device.memory_bytes_per_s
    return Seconds(products=seconds, update=update, **spent, flops=flops, efficiency=efficiency(target))


def collective_seconds(collective: Collective, *, target: Instance, mesh: Any) -> tuple[str, float]:
    """Returns ("link" or "network", seconds of one execution).

    All groups run at the same time and share the network of their node.
    """
    nodes, members = node_spread(collective.axes, mesh=mesh, node_size=target.num_devices())
    steps = math.ceil(math.log2(max(2, collective.group_size)))
    inside = collective.wire_bytes / target.link_bytes_per_s if members > 1 else 0.0
    if nodes == 1:
        return "link", inside + steps * LINK_HOP_S
    groups = min(target.num_devices(), math.prod(mesh.shape.values())) / members
    outside = groups * collective.wire_bytes / target.network
    return "network", max(inside, outside) + steps * NETWORK_HOP_S


def node_spread(axes: tuple[str, ...], *, mesh: Any, node_size: int) -> tuple[int, int]:
    """Returns (number of nodes that a group over mesh axes spans, number of its devices in each).

    Devices are numbered row-major over the mesh and fill one node after another.
    """
    shape = mesh.shape
    strides = {axis: math.prod(list(shape.values())[i + 1 :]) for i, axis in enumerate(shape)}
    members = np.zeros(1, np.int64)
    for axis in axes:
        members = (members[:, None] + strides[axis] * np.arange(shape[axis])).reshape(-1)
    nodes = np.unique(members // node_size)
    return len(nodes), math.ceil(len(members) / len(nodes))
