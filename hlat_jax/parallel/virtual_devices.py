"""Virtual devices of any platform, to trace and lower for; nothing is compiled, 8,192 devices take a second.

JAX does not document what it reads of a device. These classes are not in `host.jax_compat` all the same: they use no
part of JAX, and the tests of the planner fail on a version of JAX that reads more.
"""

from __future__ import annotations

import dataclasses

from hlat_jax.config import Config
from hlat_jax.facts.core_groups import Server
from hlat_jax.parallel.degrees import layout_over
from hlat_jax.parallel.sharding import Layout


@dataclasses.dataclass(frozen=True)
class PlannedClient:
    """The part of a backend client that lowering needs; JAX 0.9 needs more of it than 0.10."""

    platform: str
    num_devices: int
    chip: str = ""

    def device_count(self) -> int:
        return self.num_devices

    def devices(self) -> list[PlannedDevice]:
        return [PlannedDevice(number, self, self.chip) for number in range(self.num_devices)]


@dataclasses.dataclass(frozen=True)
class PlannedDevice:
    """The part of a JAX device that a mesh, and lowering for another platform than this machine's, need."""

    id: int
    client: PlannedClient
    chip: str = ""  # such as trn2; "" where the program is for any chip of its platform
    device_kind: str = "planned"
    process_index: int = 0

    @property
    def platform(self) -> str:
        return self.client.platform


def planned_layout(
    config: Config, num_devices: int, *, platform: str, server: Server | None = None, chip: str = ""
) -> Layout:
    """Returns the layout of a config over virtual devices of a platform, which chooses implementations.

    Args:
      config: of the run.
      num_devices: in the mesh.
      platform: JAX's name.
      server: the Neuron servers that the devices stand for, as for `degrees.layout_over`, which else checks no groups.
      chip: its name, an instance type or a target; "" refuses no implementation.

    Raises:
      ValueError: as `degrees.layout_over`.
    """
    return layout_over(config, PlannedClient(platform, num_devices, chip).devices(), server=server)
