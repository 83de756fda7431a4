"""A run with fewer replicas, for compiling on virtual CPU devices, of which there are at most 2,048."""

from __future__ import annotations

from hlat_jax.config import Config
from hlat_jax.parallel.virtual_devices import planned_layout
from hlat_jax.resolve import resolve


def fewer_replicas(config: Config, num_devices: int, *, max_devices: int) -> tuple[Config, int]:
    """Returns (config with a data degree for at most `max_devices` and the same rows per device, number of devices).

    Raises:
      ValueError: one replica needs more than 2,048 devices.
    """
    degrees = planned_layout(config, num_devices, platform="cpu").degrees
    inner = num_devices // degrees["data"]
    if inner > 2048:
        raise ValueError(
            f"this layout takes {inner:,} devices for one replica; virtual CPU devices are limited to 2,048."
        )
    few = max(1, max_devices // inner)
    data = max(d for d in range(1, few + 1) if degrees["data"] % d == 0)  # a divisor, so that the config stays valid
    tree = config.to_dict()
    tree["data"]["batch_size"] = config.data.batch_size // degrees["data"] * data
    tree["parallel"]["data"] = data
    return resolve(tree), inner * data
