"""Whether this machine computes, speaks and keeps as a run needs it: every probe with what it is given here.

Owns which checks there are and their order. The judgements are in `probes`; what they judge is in `exercises`.
"""

from __future__ import annotations

import dataclasses
import functools
import pathlib
import time
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp

from hlat_jax import cost
from hlat_jax.config import Config
from hlat_jax.neuron import exercises, probes, short_training
from hlat_jax.neuron.probes import FAILED, NOT_HERE, Outcome
from hlat_jax.precision import policy_on


@dataclasses.dataclass(frozen=True)
class Place:
    """Where the checks are made.

    Attributes:
      instance: type of the Trainium instance; "" for another machine.
      num_devices: that JAX must find; 0: not known.
      cache: folder of JAX's compiled programs.
    """

    instance: str
    num_devices: int
    cache: pathlib.Path


@dataclasses.dataclass(frozen=True)
class Check:
    """One row of the report: a name, and a probe with its arguments."""

    name: str
    probe: Callable[[], Outcome]


def checks(config: Config, place: Place) -> Iterator[Check]:
    """Yields the checks of a config's run on this machine, to be made one after another.

    Those before `devices` start processes of their own and leave the devices to them: a core belongs to one process.
    """
    yield Check("versions", functools.partial(_versions, probes.SUPPORTED))
    yield Check("versions for Neuron", functools.partial(_neuron_versions, place))
    yield Check("compile cache", lambda: probes.cache(exercises.start, place.cache))
    yield Check("devices", lambda: _devices(place))
    yield Check("memory", _memory)
    yield Check("random numbers", lambda: probes.random_numbers(exercises.draw))
    yield Check("bf16 products", lambda: probes.matmul_accumulation(exercises.multiply))
    yield Check("casts to bf16", lambda: probes.rounding(exercises.cast, expected=_expected_rounding(config)))
    yield Check("device's rounding", lambda: _hardware_rounding(config))
    yield Check("rounding by hash", lambda: probes.rounding(exercises.cast_by_hash, expected="stochastic"))
    yield Check("rows out of bounds", lambda: probes.out_of_bounds(exercises.look_up))
    yield Check("donation", lambda: probes.donation(exercises.add_one, jax.jit(lambda: jnp.zeros(1 << 20))()))
    for axis in ("pipe", "data", "fsdp", "tensor_kv", "tensor_rep"):
        yield Check(f"along {axis}", functools.partial(_collectives, axis, config))
    yield Check("training", lambda: _training(config))


def made(check: Check) -> tuple[Outcome, float]:
    """Returns what a check says, and its seconds. A probe that cannot be made to its end has failed."""
    began = time.monotonic()
    try:
        outcome = check.probe()
    except Exception as error:  # whatever the machine has to say: the checks after it are still to be made
        lines = str(error).strip().splitlines()
        found = f"{type(error).__name__}: {lines[0][:300] if lines else 'without a word'}"
        outcome = Outcome(FAILED, found, "the first failure above may be the cause; else look for this message")
    return outcome, time.monotonic() - began


def _versions(supported: dict[str, tuple[str, str]]) -> Outcome:
    return probes.versions(exercises.installed(supported), supported)


def _neuron_versions(place: Place) -> Outcome:
    if not place.instance:
        return Outcome(NOT_HERE, "this machine has no Neuron device")
    return _versions(probes.SUPPORTED_BY_NEURON)


def _devices(place: Place) -> Outcome:
    return probes.devices(jax.local_devices(), platform="neuron" if place.instance else "", count=place.num_devices)


def _memory() -> Outcome:
    """Judges the memory of each device, one after another; the first that fails speaks for all."""
    outcome = None
    for device in jax.local_devices():
        row, limit = cost.device(device.device_kind), (device.memory_stats() or {}).get("bytes_limit", 0)
        fill = None if device.platform == "cpu" else functools.partial(exercises.fill, device)
        outcome = probes.memory(limit, row.memory_bytes if row else 0, fill=fill)
        if outcome.verdict == FAILED:
            return outcome._replace(found=f"device {device.id}: {outcome.found}")
    return outcome


def _expected_rounding(config: Config) -> str:
    return "stochastic" if _rounds_in_hardware(config) else "nearest"


def _rounds_in_hardware(config: Config) -> bool:
    precision = config.precision
    platform = jax.default_backend()
    return (
        policy_on(precision.policy, platform, stochastic_rounding=precision.stochastic_rounding).rounding == "hardware"
    )


def _hardware_rounding(config: Config) -> Outcome:
    if jax.default_backend() != "neuron":
        return Outcome(NOT_HERE, f"devices of platform {jax.default_backend()} round to nearest")
    if not _rounds_in_hardware(config):
        found = f"precision.policy={config.precision.policy} keeps it off in this process"
        return Outcome(NOT_HERE, found, "again with --config.precision.policy=bf16_sr")
    return probes.rounding(exercises.cast, expected="stochastic")


def _collectives(axis: str, config: Config) -> Outcome:
    devices = jax.local_devices()
    heads = config.model.num_kv_heads
    layout = exercises.layout_along(axis, config.parallel, devices, num_kv_heads=heads)
    outcome = probes.collectives(functools.partial(exercises.speak, layout, axis), size=layout.mesh.shape[axis])
    if outcome.verdict == NOT_HERE:
        return outcome
    mesh = " x ".join(f"{name} {degree}" for name, degree in layout.degrees.items())
    return outcome._replace(found=f"{outcome.found}; {mesh}")


def _training(config: Config) -> Outcome:
    short = short_training.short_config(config.precision)
    return probes.training(lambda: short_training.train(short, jax.local_devices()), short_training.BAND)
