"""Shows which implementation of each op a run uses, and why, `python -m hlat_jax.plan choices --config=NAME`."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Sequence
from typing import Any

from absl import flags

from hlat_jax import config as config_lib
from hlat_jax.weights.init_model import parse_config

_PLATFORMS = ("cpu", "cuda", "neuron")


def main(argv: Sequence[str]) -> int:
    """Prints the implementation of each op of a config, and returns the exit code."""
    config, values = parse_config(argv, _define)
    if values.platform:
        os.environ["JAX_PLATFORMS"] = "cpu"  # virtual devices
    from hlat_jax.ops import choices

    layout = _layout(config, values.devices, platform=values.platform or "")
    calls = choices.calls(config, layout)
    for key, choice in choices.choices(config, layout).items():
        print(f"model.{key}: {choice.name}, {choice.because}")
        print(f"  for {', '.join(f'{name} {value}' for name, value in calls[key].items())}")
        print("".join(f"  not {name}: {why}\n" for name, why in choice.passed_over.items()), end="")
    return 0


def _layout(config: config_lib.Config, num_devices: int, *, platform: str) -> Any:
    """Returns the layout over the devices of this machine, or over virtual ones."""
    import jax

    from hlat_jax.parallel.degrees import layout_over
    from hlat_jax.parallel.sharding import MESH_AXES
    from hlat_jax.parallel.virtual_devices import planned_layout

    if not num_devices and not platform:
        return layout_over(config, jax.devices())
    degrees = dataclasses.asdict(config.parallel)
    fewest = math.prod(degrees[axis] for axis in MESH_AXES if degrees[axis] != -1)
    return planned_layout(config, num_devices or fewest, platform=platform or jax.default_backend())


def _define(values: flags.FlagValues) -> None:
    options = {"flag_values": values}
    about = "Virtual devices of this platform, by default the devices of this machine."
    flags.DEFINE_enum("platform", None, _PLATFORMS, about, **options)
    about = "Number of virtual devices. 0 means as few as the degrees allow, or without --platform this machine's."
    flags.DEFINE_integer("devices", 0, about, 0, **options)
