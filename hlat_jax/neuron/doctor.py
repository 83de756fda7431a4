"""The checks of `doctor`, in order: each pairs a probe of `probes` with a program of `exercises`."""

from __future__ import annotations

import dataclasses
import functools
import pathlib
import time
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np

from hlat_jax.config import Config
from hlat_jax.facts import sdk_releases
from hlat_jax.facts.core_groups import REFUSED, groups_along, server_of, verdict
from hlat_jax.host.neuron_compiler_flags import compiler_killed
from hlat_jax.neuron import exercises, installation, probes
from hlat_jax.neuron.probes import FAILED, NOT_HERE, Outcome
from hlat_jax.parallel.sharding import Layout
from hlat_jax.precision import policy_on

_NO_NEURON = Outcome(NOT_HERE, "this machine has no Neuron device")


@dataclasses.dataclass(frozen=True)
class CheckedMachine:
    """The machine to check.

    Attributes:
      instance: type of the Trainium instance; "" for any other machine.
      num_devices: number of devices that JAX must find; 0 if it is unknown.
      cache: folder of JAX's compilation cache.
    """

    instance: str
    num_devices: int
    cache: pathlib.Path


@dataclasses.dataclass(frozen=True)
class Check:
    """One row of the report: a name, and a probe with its arguments."""

    name: str
    probe: Callable[[], Outcome]


def checks(config: Config, machine: CheckedMachine) -> Iterator[Check]:
    """Yields the checks for a run of a config on this machine, in the order to run them.

    Collectives come last, because a faulty runtime is most likely to end the process in them.
    """
    installed = functools.partial(exercises.installed_versions, probes.SUPPORTED)
    yield Check("versions", lambda: probes.versions(installed(), probes.SUPPORTED))
    yield Check("versions for Neuron", lambda: neuron_versions(machine))
    yield Check("tools on PATH", lambda: installation.tools_on_path() if machine.instance else _NO_NEURON)
    yield Check("compile cache", lambda: probes.cache(machine.cache))
    yield Check("devices", lambda: _devices(machine))
    yield Check("random numbers", lambda: probes.random_numbers(exercises.draw))
    yield Check("bf16 products", lambda: probes.matmul_accumulation(exercises.multiply))
    yield Check("casts to bf16", lambda: probes.rounding(exercises.cast, expected=_expected_rounding(config)))
    yield Check("rounding by hash", lambda: probes.rounding(exercises.cast_by_hash, expected="stochastic"))
    yield Check("donation", lambda: probes.donation(exercises.add_one, jax.jit(lambda: jnp.zeros(1 << 20))()))
    for layout, axis in _layouts(config):
        yield Check(f"along {axis}", functools.partial(collectives, layout, axis))


def run_check(check: Check) -> tuple[Outcome, float]:
    """Returns the outcome of a check and its duration in seconds; a probe that raises counts as failed."""
    began = time.monotonic()
    try:
        outcome = check.probe()
    except Exception as error:  # whatever the error, the later checks still run
        lines = str(error).strip().splitlines()
        found = f"{type(error).__name__}: {lines[0][:300] if lines else 'no message'}"
        advice = compiler_killed(str(error)) or "fix the first failure above, or search for this message"
        outcome = Outcome(FAILED, found, advice)
    return outcome, time.monotonic() - began


def neuron_versions(machine: CheckedMachine) -> Outcome:
    """Checks that the Neuron software of a machine with Neuron devices is of one release."""
    if not machine.instance:
        return _NO_NEURON
    python = exercises.installed_versions(("python", "jax", "numpy", *sdk_releases.PYTHON_PACKAGES))
    return installation.one_release(python | installation.system_versions())


def _devices(machine: CheckedMachine) -> Outcome:
    return probes.devices(jax.local_devices(), platform="neuron" if machine.instance else "", count=machine.num_devices)


def _expected_rounding(config: Config) -> str:
    precision, platform = config.precision, jax.default_backend()
    policy = policy_on(precision.policy, platform, stochastic_rounding=precision.stochastic_rounding)
    return "stochastic" if policy.rounding == "hardware" else "nearest"


def _layouts(config: Config) -> list[tuple[Layout, str]]:
    try:
        return list(exercises.layouts_to_check(config.parallel, jax.local_devices(), config.model.num_kv_heads))
    except RuntimeError:  # JAX finds no devices, which `devices` reports; the other checks still run
        return []


def collectives(layout: Layout, axis: str) -> Outcome:
    """Checks the collectives along an axis of a layout whose groups of cores pages do not refuse."""
    server = server_of(list(layout.mesh.devices.flat))
    if server:
        level, why = verdict(_groups(layout.mesh, [axis]), server)
        if level == REFUSED:  # a run has no such groups, and their collectives may hang
            return Outcome(NOT_HERE, why, "give the degrees of a run on this instance: --config.parallel.tensor=N")
    permutes = axis == "pipe" and layout.pipe_exchange == "permute"
    run = functools.partial(exercises.run_collective, layout=layout, axis=axis)
    outcome = probes.collectives(run, size=layout.mesh.shape[axis], permutes=permutes)
    if outcome.verdict == NOT_HERE:
        return outcome
    mesh = " x ".join(f"{name} {degree}" for name, degree in layout.degrees.items())
    return outcome._replace(found=f"{outcome.found}; {mesh}")


def _groups(mesh: jax.sharding.Mesh, axes: list[str]) -> np.ndarray:
    """Returns the groups [n, size] along some axes of a mesh, of the numbers of its devices on this node."""
    numbers = np.argsort(np.argsort([device.id for device in mesh.devices.flat]))
    return groups_along(dict(mesh.shape), axes, devices=numbers)
