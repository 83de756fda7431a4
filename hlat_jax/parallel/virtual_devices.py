"""Devices that need not exist, and how a trace of the very step that trains is read: what the rest of the planner uses.

Nothing is compiled and no accelerator is asked: 8,192 devices take a second.
Shapes inside the region of `replica_sync.ReplicaSync` are those of one device, dtypes are those of the target.
"""

from __future__ import annotations

import dataclasses

from hlat_jax.config import Config
from hlat_jax.parallel.degrees import layout_over
from hlat_jax.parallel.sharding import Layout


@dataclasses.dataclass(frozen=True)
class PlannedClient:
    """As much of the backend of devices as lowering a program for them asks for, JAX 0.9 more than 0.10."""

    platform: str
    num_devices: int

    def device_count(self) -> int:
        return self.num_devices

    def devices(self) -> list[PlannedDevice]:
        return [PlannedDevice(number, self) for number in range(self.num_devices)]


@dataclasses.dataclass(frozen=True)
class PlannedDevice:
    """As much of a JAX device as a mesh, and lowering for another platform than this machine's, ask for."""

    id: int
    client: PlannedClient
    device_kind: str = "planned"
    process_index: int = 0

    @property
    def platform(self) -> str:
        return self.client.platform


def planned_layout(config: Config, num_devices: int, *, platform: str) -> Layout:
    """Returns the layout of a config over devices of a platform, which chooses implementations; none has to exist.

    Raises:
      ValueError: as `degrees.layout_over`.
    """
    return layout_over(config, PlannedClient(platform, num_devices).devices())
