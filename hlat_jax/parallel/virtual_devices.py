"""Virtual devices of any platform, to trace and lower for. Nothing is compiled, and 8,192 devices take a second.

JAX does not document the attributes that it reads of a device. These classes use no part of JAX, so they are not in
`host.jax_compat`. The tests of the planner fail on a version of JAX that reads more.
"""

from __future__ import annotations

import dataclasses

from hlat_jax.config import Config
from hlat_jax.facts.core_groups import Server
from hlat_jax.parallel.degrees import layout_over
from hlat_jax.parallel.sharding import Layout
from hlat_jax.resolve import resolve


@dataclasses.dataclass(frozen=True)
class PlannedClient:
    """The part of a backend client that lowering needs. JAX 0.9 needs more of it than 0.10."""

    platform: str
    num_devices: int
    chip: str = ""

    def device_count(self) -> int:
        return self.num_devices

    def devices(self) -> list[PlannedDevice]:
        return [PlannedDevice(index, self, self.chip) for index in range(self.num_devices)]


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
    """Returns `degrees.layout_over` for virtual devices of a platform, which chooses implementations.

    Args:
      platform: JAX's name of the platform.
      server: the Neuron servers that the devices stand for. Without it no groups are checked.
      chip: name of the chip, an instance type or a target. "" refuses no implementation.
    """
    return layout_over(config, PlannedClient(platform, num_devices, chip).devices(), server=server)


def fewer_replicas(config: Config, num_devices: int, *, max_devices: int) -> tuple[Config, int]:
    """Returns (config with a data degree for at most `max_devices` and the same rows per device, number of devices).

    Raises:
      ValueError: one replica needs more than 2,048 devices.
    """
    degrees = planned_layout(config, num_devices, platform="cpu").degrees
    inner = num_devices // degrees["data"]
    if inner > 2048:
        raise ValueError(
            f"this layout takes {inner:,} devices for one replica, but virtual CPU devices are limited to 2,048."
        )
    few = max(1, max_devices // inner)
    data = max(d for d in range(1, few + 1) if degrees["data"] % d == 0)  # a divisor, so that the config stays valid
    tree = config.to_dict()
    tree["data"]["batch_size"] = config.data.batch_size // degrees["data"] * data
    tree["parallel"]["data"] = data
    return resolve(tree), inner * data
