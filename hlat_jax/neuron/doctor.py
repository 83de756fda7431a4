"""The checks of `doctor`, in order. Each pairs a probe of `probes` with a program of `exercises`."""

from __future__ import annotations

import functools
import os
import pathlib
import time
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np

from hlat_jax.config import Config
from hlat_jax.facts import sdk_releases
from hlat_jax.facts.core_groups import REFUSED, groups_along, server_of, verdict
from hlat_jax.host import neuron_start
from hlat_jax.host.compile_cache import installed_versions
from hlat_jax.host.neuron_compiler_flags import compiler_killed
from hlat_jax.host.neuron_topology import COLLECTIVES_PORT, HERE
from hlat_jax.neuron import child, exercises, installation, numerics, probes
from hlat_jax.neuron.probes import FAILED, NOT_HERE, UNUSED, Outcome
from hlat_jax.parallel.sharding import Layout
from hlat_jax.precision import policy_on

_NO_NEURON = Outcome(NOT_HERE, "this machine has no Neuron device")


def checks(
    config: Config, *, instance: str, num_devices: int, cache: pathlib.Path
) -> Iterator[tuple[str, Callable[[], Outcome]]]:
    """Yields (name, probe) of the checks for a run of a config on this machine, in the order to run them.

    Programs that may end the process run in a child. They come before JAX starts in this process, as a core belongs to
    one process at a time. Collectives come last, because a faulty runtime is most likely to end the process in them.

    Args:
      config: the config of the run.
      instance: the type of the Trainium instance, or "" for any other machine.
      num_devices: the number of devices that JAX must find, or 0 if it is unknown.
      cache: the folder of JAX's compilation cache.
    """
    platform = "neuron" if instance else ""
    yield "versions", lambda: probes.versions(installed_versions(probes.SUPPORTED), probes.SUPPORTED)
    yield "versions for Neuron", lambda: neuron_versions() if instance else _NO_NEURON
    yield "tools on PATH", lambda: installation.tools_on_path() if instance else _NO_NEURON
    yield "compile cache", lambda: probes.cache(cache)
    yield "compiler's cache", lambda: installation.compiler_cache(os.environ) if instance else _NO_NEURON
    yield "former run", lambda: installation.former_run(HERE, port=COLLECTIVES_PORT) if instance else _NO_NEURON
    if instance and neuron_start.missing_plugin():
        missing = "JAX finds no device without the packages that `versions for Neuron` names"
        yield "devices", lambda: Outcome(NOT_HERE, missing)
        return
    yield "JAX's cache", jax_cache
    # without JAX's cache, which may end the process by itself
    environ = {key: value for key, value in os.environ.items() if key != "JAX_COMPILATION_CACHE_DIR"}
    in_child = child.outcomes([f"{numerics.__name__}:check:{name}" for name in numerics.PROGRAMS], environ=environ)
    alone = functools.partial(_in_child, {}, in_child)
    yield from ((name, functools.partial(alone, name)) for name in numerics.PROGRAMS)
    yield "devices", lambda: probes.devices(jax.local_devices(), platform=platform, count=num_devices)
    yield "random numbers", lambda: probes.random_numbers(exercises.draw)
    yield "bf16 products", lambda: probes.matmul_accumulation(exercises.multiply)
    yield "casts to bf16", lambda: probes.rounding(exercises.cast, expected=expected_rounding(config))
    yield "rounding by hash", lambda: probes.rounding(exercises.cast_by_hash, expected="stochastic")
    yield "donation", lambda: probes.donation(exercises.add_one, jax.jit(lambda: jnp.zeros(1 << 20))())
    try:
        layouts = list(exercises.layouts_to_check(config.parallel, jax.local_devices(), config.model.num_kv_heads))
    except RuntimeError:  # JAX finds no devices, which `devices` has reported
        return
    for layout, axis in layouts:
        yield f"along {axis}", functools.partial(collectives, layout, axis)


def _in_child(ended: dict[str, Outcome], running: Iterator[tuple[str, Outcome]], name: str) -> Outcome:
    """Returns the outcome of one of `numerics.PROGRAMS`, as soon as the child process that runs them has it."""
    while name not in ended:
        check, outcome = next(running)
        ended[check.rpartition(":")[2]] = outcome
    outcome, rules = ended[name], numerics.PROGRAMS[name][1]
    if outcome.verdict != FAILED or not rules:
        return outcome
    advice = f"no shipped config has such a program; for others see {rules} of `python -m hlat_jax.neuron lint`"
    return Outcome(UNUSED, outcome.found, advice)


def run_check(probe: Callable[[], Outcome]) -> tuple[Outcome, float]:
    """Returns the outcome of a check and its duration in seconds. A probe that raises counts as failed."""
    began = time.monotonic()
    try:
        outcome = probe()
    except Exception as error:  # whatever the error, the later checks still run
        advice = compiler_killed(str(error)) or "fix the first failure above, or search for this message"
        outcome = Outcome(FAILED, probes.first_line(error), advice)
    return outcome, time.monotonic() - began


def neuron_versions() -> Outcome:
    """Checks that the Neuron software of this machine belongs to one release."""
    python = installed_versions(("python", "jax", "numpy", *sdk_releases.PYTHON_PACKAGES))
    return installation.one_release(python | installation.system_versions())


def jax_cache() -> Outcome:
    """Checks JAX's cache of compiled programs, and turns it off for the later checks if they would fail with it."""
    outcome = installation.jax_cache(os.environ)
    if outcome.verdict == FAILED:
        jax.config.update("jax_enable_compilation_cache", False)
    return outcome


def expected_rounding(config: Config) -> str:
    """Returns how the devices of this process round a cast to bf16 in a run of a config."""
    precision, platform = config.precision, jax.default_backend()
    policy = policy_on(precision.policy, platform, stochastic_rounding=precision.stochastic_rounding)
    return "stochastic" if policy.rounding == "hardware" else "nearest"


def collectives(layout: Layout, axis: str) -> Outcome:
    """Checks the collectives along an axis of a layout, for groups of cores that pages do not refuse."""
    server = server_of(list(layout.mesh.devices.flat))
    if server:
        numbers = np.argsort(np.argsort([device.id for device in layout.mesh.devices.flat]))  # on this node
        level, reason = verdict(groups_along(dict(layout.mesh.shape), [axis], devices=numbers), server)
        if level == REFUSED:  # a run has no such groups, and their collectives may hang
            return Outcome(NOT_HERE, reason, "give the degrees of a run on this instance: --config.parallel.tensor=N")
    permutes = axis == "pipe" and layout.pipe_exchange == "permute"
    run = functools.partial(exercises.run_collective, layout=layout, axis=axis)
    outcome = probes.collectives(run, size=layout.mesh.shape[axis], permutes=permutes)
    if outcome.verdict == NOT_HERE:
        return outcome
    mesh = " x ".join(f"{name} {degree}" for name, degree in layout.degrees.items())
    return outcome._replace(found=f"{outcome.found}; {mesh}")
