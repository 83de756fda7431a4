"""`python -m hlat_jax.plan tune|choices --config=NAME`: times the implementations of each op, or shows the choices."""

from __future__ import annotations

import dataclasses
import math
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from absl import flags

from hlat_jax import config as config_lib
from hlat_jax.cli import flags as flags_lib
from hlat_jax.config import count_text
from hlat_jax.facts.names import nearest
from hlat_jax.weights.init_model import parse_config

_PLATFORMS = ("cpu", "cuda", "neuron")


def main(argv: Sequence[str]) -> int:
    """Runs the verb `tune` or `choices`; returns its exit code."""
    return VERBS[flags_lib.choose_verb(argv, VERBS, usage="Usage: plan tune|choices --config=NAME [flags]")](argv[1:])


def _tune(argv: Sequence[str]) -> int:
    config, values = parse_config(argv, _define_tune)
    flags_lib.check_output("--out", values.out)
    import jax

    from hlat_jax.ops import choices, table
    from hlat_jax.ops.nki.chips import exclusions
    from hlat_jax.ops.registry import OPS
    from hlat_jax.plan import tune

    device = jax.devices()[0]
    known = _table(values.out, device)
    calls = choices.calls(config, _layout(config, values.devices, platform=""))
    wanted, refused = [key for key in values.ops.split(",") if key], exclusions(config.model, device.device_kind)
    for key in wanted:
        if key not in calls:
            raise ValueError(f"--ops={values.ops}: unknown op {key!r}. {nearest(key, calls)}")
    print(f"{config.name} on {known.device_kind} ({known.platform}), forward and backward pass, milliseconds")
    for key in wanted or calls:
        entry = tune.measure(
            OPS[key],
            calls[key],
            platform=device.platform,
            num_rounds=values.rounds,
            num_rows=values.rows,
            excluded=refused.get(key),
        )
        print(f"{entry.op}: {_call_text(entry.call)}; {count_text(entry.rows_measured, 'row')} timed")
        for name, seconds in sorted(entry.times.items(), key=lambda item: item[1]):
            print(f"  {name:<10}{1e3 * seconds:10.2f}  {seconds / entry.times[entry.winner]:5.2f}")
        print("".join(f"  {name:<10}{'':>10}  {why}\n" for name, why in entry.passed_over.items()), end="", flush=True)
        table.write(known := known.with_entries((entry,)))
    print(f"wrote {values.out}; with --config.model.ops_table={values.out}, `auto` chooses the fastest")
    return 0


def _table(path: str, device: Any) -> Any:
    """Returns the table in a file, or an empty one.

    Raises:
      ValueError: the file was measured on another kind of device, or with another version of JAX.
    """
    import jax

    from hlat_jax.ops import table

    kind = table.device_kind(device)
    if not pathlib.Path(path).exists():
        return table.Table(path, device.platform, kind, jax.__version__, ())
    known = table.read(path)
    if (known.platform, known.device_kind, known.jax) != (device.platform, kind, jax.__version__):
        raise ValueError(
            f"--out={path} was measured on {known.device_kind!r} ({known.platform}), JAX {known.jax}; this machine has "
            f"{kind!r} ({device.platform}), JAX {jax.__version__}; give another file, or remove this one."
        )
    return known


def _choices(argv: Sequence[str]) -> int:
    config, values = parse_config(argv, _define_choices)
    if values.platform:
        os.environ["JAX_PLATFORMS"] = "cpu"  # virtual devices
    from hlat_jax.ops import choices

    layout = _layout(config, values.devices, platform=values.platform or "")
    calls = choices.calls(config, layout)
    for key, choice in choices.choices(config, layout).items():
        print(f"model.{key}: {choice.name}, {choice.because}")
        print(f"  for {_call_text(calls[key])}")
        print("".join(f"  not {name}: {why}\n" for name, why in choice.passed_over.items()), end="")
    return 0


def _call_text(call: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in call.items())


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


def _define_tune(values: flags.FlagValues) -> None:
    options = {"flag_values": values}
    flags.DEFINE_integer("devices", 0, "Number of devices of the run; 0: those of this machine.", 0, **options)
    about = "Table to write; entries for the same calls are replaced."
    flags_lib.define_path(values, "out", about, default="tuned.json", use="write")
    flags.DEFINE_string("ops", "", "Ops to time, such as rms_norm,rope; empty: all.", **options)
    flags.DEFINE_integer("rounds", 7, "Number of times of each implementation; the median counts.", 1, **options)
    flags.DEFINE_integer("rows", 0, "Rows of the batch to time, where all do not fit in memory; 0: all.", 0, **options)


def _define_choices(values: flags.FlagValues) -> None:
    options = {"flag_values": values}
    about = "Virtual devices of this platform; default: the devices of this machine."
    flags.DEFINE_enum("platform", None, _PLATFORMS, about, **options)
    about = "Number of virtual devices; 0: as few as the degrees allow, or without --platform those of this machine."
    flags.DEFINE_integer("devices", 0, about, 0, **options)


VERBS = {"tune": _tune, "choices": _choices}
