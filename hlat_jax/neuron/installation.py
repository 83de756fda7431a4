"""Checks that the Neuron software of this machine belongs to one release of the SDK."""

from __future__ import annotations

import pathlib
import shutil
import subprocess
import sys
from collections.abc import Mapping

from hlat_jax.facts import sdk_releases
from hlat_jax.facts.sdk_releases import PYTHON_PACKAGES, RECOMMENDED, RELEASES, SYSTEM_PACKAGES, Release, numbers
from hlat_jax.host import compile_cache, neuron_env, neuron_start
from hlat_jax.host.neuron_topology import HERE, Machine
from hlat_jax.neuron.probes import FAILED, NOT_HERE, PASSED, Outcome

# what no release is without; nki is needed by model.attention=nki only
_REQUIRED = ("jax", "numpy", "jax-neuronx", "libneuronxla", "neuronx-cc")
_DRIVER = "aws-neuronx-dkms"
_QUERIES = (
    ("dpkg-query", "-W", "-f", "${Package} ${Version} ${db:Status-Status}\n", *SYSTEM_PACKAGES),
    ("rpm", "-q", "--qf", "%{NAME} %{VERSION} installed\n", *SYSTEM_PACKAGES),
)


def system_versions(*, machine: Machine = HERE) -> dict[str, str]:
    """Returns package -> version of Neuron's driver, runtime and collectives on this machine."""
    versions: dict[str, str] = {}
    for query in _QUERIES:
        try:
            done = subprocess.run(query, capture_output=True, text=True, check=False, timeout=60)
        except (OSError, subprocess.TimeoutExpired):  # no such package manager
            continue
        # dpkg lists packages that were removed too; rpm has lines of other words for those that are missing
        rows = (line.split() for line in done.stdout.splitlines())
        versions |= {row[0]: row[1] for row in rows if row[2:] == ["installed"] and row[0] in SYSTEM_PACKAGES}
    if version := machine.driver_version:
        versions[_DRIVER] = version
    return versions


def one_release(installed: Mapping[str, str]) -> Outcome:
    """Checks that all installed packages belong to one row of `sdk_releases.RELEASES` that is not to avoid.

    Args:
      installed: package -> version of `python`, `jax`, `numpy`, PYTHON_PACKAGES and SYSTEM_PACKAGES, if found.
    """
    missing = [name for name in _REQUIRED if name not in installed]
    if missing:
        return Outcome(FAILED, f"missing: {', '.join(missing)}", _advice())
    newest = RELEASES[-1]
    for name in PYTHON_PACKAGES:  # builds of the next release may fit the bounds of this one
        if name in installed and numbers(installed[name]) > numbers(newest.packages[name]):
            detail = f"{name} {installed[name]} is newer than SDK {newest.version}, the newest in the table"
            advice = "install the extra `neuron`, or add the release to hlat_jax/facts/sdk_releases.py"
            return Outcome(NOT_HERE, detail, advice)
    packages = [name for name in (*PYTHON_PACKAGES, *SYSTEM_PACKAGES) if name in installed]
    rows = {name: sdk_releases.releases_of(name, installed[name]) for name in packages}
    num_members = {release.version: sum(release.version in row for row in rows.values()) for release in RELEASES}
    release = max(reversed(RELEASES), key=lambda release: num_members[release.version])
    wrong = [
        f"{name} {installed[name]} belongs to {'SDK ' * bool(row)}{' and '.join(row) or 'no release of the table'}"
        for name, row in rows.items()
        if release.version not in row
    ]
    wrong += _unsupported_parts(release, installed)
    warning = f". Do not train with {release.version}: {release.avoid}" if release.avoid else ""
    if wrong:
        detail = f"the closest is SDK {release.version}, but {'; '.join(wrong)}{warning}"
        return Outcome(FAILED, detail, _advice())
    absent = [name for name in (*PYTHON_PACKAGES, *SYSTEM_PACKAGES) if name not in installed]
    detail = f"SDK {release.version}: {', '.join(f'{name} {installed[name]}' for name in ('jax', *packages))}"
    detail += f"; not found, so not checked: {', '.join(absent)}" if absent else ""
    return Outcome(FAILED, detail + warning, _advice()) if warning else Outcome(PASSED, detail)


def tools_on_path() -> Outcome:
    """Checks that PATH, as set by `neuron_env`, leads to the compiler and to Neuron's tools, started by name."""
    advice = {
        neuron_env.COMPILER: f"install the extra `neuron` for {sys.executable}, or use a Python that has it",
        "neuron-ls": "install aws-neuronx-tools",
    }
    found = {name: shutil.which(name) for name in advice}
    if missing := [name for name, path in found.items() if path is None]:
        return Outcome(FAILED, f"not on PATH: {', '.join(missing)}", "; ".join(advice[name] for name in missing))
    return Outcome(PASSED, ", ".join(str(path) for path in found.values()))


def compiler_cache(environ: Mapping[str, str], *, processes: pathlib.Path = neuron_start.PROCESSES) -> Outcome:
    """Checks that killed and failed compiles have left nothing in neuronx-cc's cache."""
    folder = neuron_start.compiler_cache(environ)
    found, doubt = neuron_start.leftovers(folder, processes=processes)
    if not found:
        return Outcome(PASSED, f"{folder or 'no folder'}: no lock, no failed compile")
    if doubt:
        return Outcome(NOT_HERE, f"{neuron_start.describe(found)}; {doubt}", neuron_start.REMOVE)
    return Outcome(FAILED, neuron_start.describe(found), f"start a run, which removes them. {neuron_start.REMOVE}")


def former_run(machine: Machine, *, port: int, processes: pathlib.Path = neuron_start.PROCESSES) -> Outcome:
    """Checks that no process of a former run holds the devices, or the port of the collectives."""
    if obstacle := neuron_start.find_obstacle(machine, port, processes=processes):
        return Outcome(FAILED, obstacle, "end that process (a port stays taken for 60 s after its last connection)")
    return Outcome(PASSED, "no process that this user can see holds NeuronCores, and the port is free")


def jax_cache(environ: Mapping[str, str]) -> Outcome:
    """Checks JAX's cache with two processes. Raises RuntimeError if a program fails also without it."""
    if fault := compile_cache.fault_of_cache(environ):
        advice = "nothing for a run, which leaves JAX's cache out, but for other code unset JAX_COMPILATION_CACHE_DIR"
        return Outcome(FAILED, f"JAX's cache fails: {fault}", advice)
    return Outcome(PASSED, "one process wrote a program, a second one read it")


def _advice() -> str:
    manager = "apt-get" if shutil.which("apt-get") or not shutil.which("dnf") else "dnf"
    commands = sdk_releases.upgrade_commands(RECOMMENDED, manager=manager)
    return (
        f"use an image of SDK {RECOMMENDED.version}, or install all of it (a container has the driver of its host): "
        f"{commands}"
    )


def _unsupported_parts(release: Release, installed: Mapping[str, str]) -> list[str]:
    """Returns what the release does not support of Python, JAX and NumPy."""
    lines = []
    if not sdk_releases.supports_python(release, installed["python"]):
        low, high = release.python
        lines.append(f"Python {installed['python']} is not >={low},<{high}")
    if numbers(installed["jax"]) != numbers(release.jax):
        lines.append(f"jax {installed['jax']} is not {release.jax}")
    low, high = release.numpy
    if not numbers(low) <= numbers(installed["numpy"]) < numbers(high):
        lines.append(f"numpy {installed['numpy']} is not >={low},<{high}")
    return lines
