"""The Neuron software of this machine, and whether it all belongs to one release of the SDK."""

from __future__ import annotations

import pathlib
import shutil
import subprocess
import sysconfig
from collections.abc import Mapping

from hlat_jax.facts import sdk_releases
from hlat_jax.facts.sdk_releases import PYTHON_PACKAGES, RECOMMENDED, RELEASES, SYSTEM_PACKAGES, Release, numbers
from hlat_jax.neuron.probes import FAILED, NOT_HERE, PASSED, Outcome

# what no release is without; nki is needed by model.attention=nki only
_REQUIRED = ("jax", "numpy", "jax-neuronx", "libneuronxla", "neuronx-cc")
_DRIVER = "aws-neuronx-dkms"
# the driver that is loaded: in a container the host's, and after an upgrade the old one until the next restart
DRIVER_VERSION = pathlib.Path("/sys/module/neuron/version")
_QUERIES = (
    ("dpkg-query", "-W", "-f", "${Package} ${Version} ${db:Status-Status}\n", *SYSTEM_PACKAGES),
    ("rpm", "-q", "--qf", "%{NAME} %{VERSION} installed\n", *SYSTEM_PACKAGES),
)
_TOOLS = pathlib.Path("/opt/aws/neuron/bin")  # of aws-neuronx-tools


def system_versions(*, driver: pathlib.Path = DRIVER_VERSION) -> dict[str, str]:
    """Returns the versions of Neuron's driver, runtime and collectives that are found here: package -> version."""
    versions: dict[str, str] = {}
    for query in _QUERIES:
        try:
            done = subprocess.run(query, capture_output=True, text=True, check=False, timeout=60)
        except (OSError, subprocess.TimeoutExpired):  # no such package manager
            continue
        # dpkg lists packages that were removed too; rpm has lines of other words for those that are missing
        rows = (line.split() for line in done.stdout.splitlines())
        versions |= {row[0]: row[1] for row in rows if row[2:] == ["installed"] and row[0] in SYSTEM_PACKAGES}
    if driver.is_file() and (version := driver.read_text().strip()):
        versions[_DRIVER] = version
    return versions


def one_release(installed: Mapping[str, str]) -> Outcome:
    """Checks that everything installed belongs to one row of `sdk_releases.RELEASES`, and not to one to avoid.

    Args:
      installed: package -> version of what is found of `python`, `jax`, `numpy`, PYTHON_PACKAGES and SYSTEM_PACKAGES.
    """
    missing = [name for name in _REQUIRED if name not in installed]
    if missing:
        return Outcome(FAILED, f"missing: {', '.join(missing)}", _advice())
    compiler = installed["neuronx-cc"]
    if numbers(compiler) >= sdk_releases.bounds("neuronx-cc", RELEASES[-1])[1]:
        what = f"neuronx-cc {compiler} is newer than SDK {RELEASES[-1].version}, the newest in the table"
        return Outcome(NOT_HERE, what, "add its row to hlat_jax/facts/sdk_releases.py from AWS's release notes")
    packages = [name for name in (*PYTHON_PACKAGES, *SYSTEM_PACKAGES) if name in installed]
    rows = {name: sdk_releases.releases_of(name, installed[name]) for name in packages}
    num_members = {one.version: sum(one.version in row for row in rows.values()) for one in RELEASES}
    release = max(reversed(RELEASES), key=lambda one: num_members[one.version])
    wrong = [
        f"{name} {installed[name]} belongs to {'SDK ' * bool(row)}{' and '.join(row) or 'no release of the table'}"
        for name, row in rows.items()
        if release.version not in row
    ]
    wrong += _unsupported_parts(release, installed)
    warning = f". Do not train with {release.version}: {release.avoid}" if release.avoid else ""
    if wrong:
        what = f"the closest is SDK {release.version}, but {'; '.join(wrong)}{warning}"
        return Outcome(FAILED, what, _advice())
    absent = [name for name in (*PYTHON_PACKAGES, *SYSTEM_PACKAGES) if name not in installed]
    what = f"SDK {release.version}: {', '.join(f'{name} {installed[name]}' for name in ('jax', *packages))}"
    what += f"; not found, so not checked: {', '.join(absent)}" if absent else ""
    return Outcome(FAILED, what + warning, _advice()) if warning else Outcome(PASSED, what)


def tools_on_path(*, scripts: pathlib.Path | None = None, tools: pathlib.Path = _TOOLS) -> Outcome:
    """Checks that PATH leads to the compiler of this environment and to Neuron's tools, which are started by name.

    Args:
      scripts: folder of the interpreter's commands; None: that of this one.
      tools: folder of aws-neuronx-tools.
    """
    scripts = scripts or pathlib.Path(sysconfig.get_path("scripts"))
    wrong, paths = [], []
    for name, folder in (("neuronx-cc", scripts), ("neuron-ls", tools)):
        at = shutil.which(name)
        if at is None:
            wrong.append(f"{name} is not on PATH")
        elif (folder / name).exists() and not (folder / name).samefile(at):
            wrong.append(f"{name} on PATH is {at}, not {folder / name}")
        else:
            paths.append(at)
    if wrong:
        advice = f"export PATH={scripts}:{tools}:$PATH; launch/node.sh does, for the interpreter that PYTHON names"
        return Outcome(FAILED, "; ".join(wrong), advice)
    return Outcome(PASSED, ", ".join(paths))


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
