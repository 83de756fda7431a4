"""The Neuron software of this machine, and whether it all belongs to one release of the SDK."""

from __future__ import annotations

import pathlib
import shutil
import subprocess
import sysconfig
from collections.abc import Mapping, Sequence

from hlat_jax.facts import sdk_releases
from hlat_jax.facts.sdk_releases import PYTHON_PACKAGES, RECOMMENDED, RELEASES, SYSTEM_PACKAGES, Release
from hlat_jax.neuron.probes import FAILED, NOT_HERE, PASSED, Outcome

# Of these one release cannot be without; nki is needed by model.attention=nki only.
_REQUIRED = ("jax", "numpy", "jax-neuronx", "libneuronxla", "neuronx-cc")
# Their first two numbers stay from release to release, so that they do not show a newer one.
_SLOW = ("jax-neuronx", "libneuronxla")
_DRIVER = "aws-neuronx-dkms"
# the driver that is loaded: in a container the host's, and after an upgrade the old one until the next restart
DRIVER_VERSION = pathlib.Path("/sys/module/neuron/version")
_QUERIES = (
    ("dpkg-query", "-W", "-f", "${Package} ${Version} ${db:Status-Status}\n", *SYSTEM_PACKAGES),
    ("rpm", "-q", "--qf", "%{NAME} %{VERSION} installed\n", *SYSTEM_PACKAGES),
)
_TOOLS = pathlib.Path("/opt/aws/neuron/bin")  # of aws-neuronx-tools
_ADD_ROW = "add its row to hlat_jax/facts/sdk_releases.py from AWS's release notes"


def system_versions(*, driver: pathlib.Path = DRIVER_VERSION) -> dict[str, str]:
    """Returns the versions of Neuron's driver, runtime and collectives that are found here: package -> version."""
    found: dict[str, str] = {}
    for query in _QUERIES:
        try:
            done = subprocess.run(query, capture_output=True, text=True, check=False, timeout=60)
        except (OSError, subprocess.TimeoutExpired):  # no such package manager
            continue
        # dpkg lists packages that were removed too; rpm has lines of other words for those that are missing
        rows = (line.split() for line in done.stdout.splitlines())
        found |= {row[0]: row[1] for row in rows if row[:1] and row[0] in SYSTEM_PACKAGES and row[2:] == ["installed"]}
    if driver.is_file() and (version := driver.read_text().strip()):
        found[_DRIVER] = version
    return found


def one_release(installed: Mapping[str, str]) -> Outcome:
    """Checks that everything installed belongs to one row of `sdk_releases.RELEASES`, and not to one to avoid.

    Args:
      installed: package -> version of what is found of `python`, `jax`, `numpy`, PYTHON_PACKAGES and SYSTEM_PACKAGES.
    """
    missing = [name for name in _REQUIRED if name not in installed]
    if missing:
        return Outcome(FAILED, f"missing: {', '.join(missing)}", _advice())
    packages = [name for name in (*PYTHON_PACKAGES, *SYSTEM_PACKAGES) if name in installed]
    if all(_age(name, installed[name]) == "newer" for name in packages if name not in _SLOW):
        found = f"neuronx-cc {installed['neuronx-cc']} is newer than SDK {RECOMMENDED.version}, the newest in the table"
        return Outcome(NOT_HERE, found, _ADD_ROW)
    rows = {name: sdk_releases.releases_of(name, installed[name]) for name in packages}
    num_members = [sum(one.version in row for row in rows.values()) for one in RELEASES]
    likely = [one for one, count in zip(RELEASES, num_members, strict=True) if count == max(num_members)]
    release = likely[-1]
    other = [name for name in packages if release.version not in rows[name]]
    unsupported = _unsupported(release, installed)
    if other or unsupported:
        found = "; ".join([_alien(name, installed[name], rows[name]) for name in other] + unsupported)
        found = f"the closest is SDK {release.version}, but {found}{_warning(likely)}"
        if other == [_DRIVER] and not unsupported and not release.avoid:
            if _age(_DRIVER, installed[_DRIVER]) == "newer":
                return Outcome(NOT_HERE, found, _ADD_ROW)
            if () < sdk_releases.numbers(installed[_DRIVER]) < sdk_releases.bounds(_DRIVER, release)[0]:
                wanted = f"{_DRIVER} {release.packages[_DRIVER]}"
                return Outcome(FAILED, found, f"install {wanted} and restart; a container has the driver of its host")
        return Outcome(FAILED, found, _advice())
    absent = [name for name in (*PYTHON_PACKAGES, *SYSTEM_PACKAGES) if name not in installed]
    found = f"SDK {release.version}: {', '.join(f'{name} {installed[name]}' for name in ('jax', *packages))}"
    found += f"; not found, so not checked: {', '.join(absent)}" if absent else ""
    if release.avoid:
        return Outcome(FAILED, found + _warning([release]), _advice())
    return Outcome(PASSED, found)


def tools_on_path(*, scripts: pathlib.Path | None = None, tools: pathlib.Path = _TOOLS) -> Outcome:
    """Checks that PATH leads to the compiler of this environment and to Neuron's tools, which are started by name.

    Args:
      scripts: folder of the interpreter's commands; None: that of this one.
      tools: folder of aws-neuronx-tools.
    """
    scripts = scripts or pathlib.Path(sysconfig.get_path("scripts"))
    wrong, found = [], []
    for name, folder in (("neuronx-cc", scripts), ("neuron-ls", tools)):
        at = shutil.which(name)
        if at is None:
            wrong.append(f"{name} is not on PATH")
        elif (folder / name).exists() and not (folder / name).samefile(at):
            wrong.append(f"{name} on PATH is {at}, not {folder / name}")
        else:
            found.append(at)
    if wrong:
        advice = f"export PATH={scripts}:{tools}:$PATH; launch/node.sh does, for the interpreter that PYTHON names"
        return Outcome(FAILED, "; ".join(wrong), advice)
    return Outcome(PASSED, ", ".join(found))


def _advice() -> str:
    manager = "apt-get" if shutil.which("apt-get") or not shutil.which("dnf") else "dnf"
    commands = sdk_releases.upgrade_commands(RECOMMENDED, manager=manager)
    return f"use an image of SDK {RECOMMENDED.version}, or install all of it: {commands}"


def _age(package: str, version: str) -> str:
    """Returns "newer" or "older" for a version that no release of the table has, or "not a version"."""
    numbers = sdk_releases.numbers(version)
    if not numbers:
        return "not a version"
    return "newer" if numbers >= sdk_releases.bounds(package, RELEASES[-1])[1] else "older"


def _warning(releases: Sequence[Release]) -> str:
    return "".join(f". Do not train with {one.version}: {one.avoid}" for one in releases if one.avoid)


def _alien(package: str, version: str, row: tuple[str, ...]) -> str:
    """Returns what a package belongs to instead."""
    if row:
        return f"{package} {version} belongs to SDK {' and '.join(row)}"
    ends = {
        "newer": f" than SDK {RELEASES[-1].version}",
        "older": f" than SDK {RELEASES[0].version}, or a placeholder of the public package index",
    }
    age = _age(package, version)
    return f"{package} {version} is {age}{ends.get(age, '')}"


def _unsupported(release: Release, installed: Mapping[str, str]) -> list[str]:
    """Returns what the release does not support of Python, JAX and NumPy."""
    found = []
    if not sdk_releases.supports_python(release, installed["python"]):
        found.append(f"Python {installed['python']} is not one of {sdk_releases.pythons(release)}")
    if sdk_releases.numbers(installed["jax"]) != sdk_releases.numbers(release.jax):
        found.append(f"jax {installed['jax']} is not {release.jax}")
    low, high = release.numpy
    if not sdk_releases.numbers(low) <= sdk_releases.numbers(installed["numpy"]) < sdk_releases.numbers(high):
        found.append(f"numpy {installed['numpy']} is not >={low},<{high}")
    return found
