"""The packages of each release of the AWS Neuron SDK.

This is the one table of Neuron's versions. The doctor reads it, and tests compare `pyproject.toml`, docs/trainium.md
and launch/ with it. A new release is a new row here. Source: AWS Neuron docs of each version (release-notes/
releasecontent, release-notes/components, release-notes/2.33.1 and setup/jax), and issues of aws-neuron-sdk.
"""

from __future__ import annotations

import dataclasses
import re

# Distributions of Python, and packages of the operating system: these belong to one release together.
PYTHON_PACKAGES = ("jax-neuronx", "libneuronxla", "neuronx-cc", "nki")
PIP_INDEX = "https://pip.repos.neuron.amazonaws.com"
SYSTEM_PACKAGES = ("aws-neuronx-dkms", "aws-neuronx-runtime-lib", "aws-neuronx-collectives")


@dataclasses.dataclass(frozen=True)
class Release:
    """One release of the SDK.

    Attributes:
      numpy: (lowest supported, first unsupported).
      python: (lowest supported, first unsupported).
      avoid: the reason not to train with it, or "" for a sound release.
    """

    version: str
    packages: dict[str, str]
    jax: str
    numpy: tuple[str, str]
    python: tuple[str, str]
    avoid: str = ""

    @property
    def series(self) -> str:
        """The first two numbers, such as "2.33"."""
        return ".".join(self.version.split(".")[:2])


_2_33_0 = Release(
    version="2.33.0",
    packages={
        "jax-neuronx": "0.10.0.1.0.14198",
        "libneuronxla": "3.0.10135.0",
        "neuronx-cc": "2.28.7631.0",
        "nki": "0.7.0",
        "aws-neuronx-dkms": "2.31.7.0",
        "aws-neuronx-runtime-lib": "2.35.30.0",
        "aws-neuronx-collectives": "2.35.43.0",
    },
    jax="0.10.0",
    numpy=("2.2", "2.4"),
    python=("3.11", "3.15"),
    avoid="DMA that transposes can hang the chip beside collectives; fixed in 2.33.1",
)
# Oldest first.
RELEASES = (
    Release(
        version="2.32.0",
        packages={
            "jax-neuronx": "0.10.0.1.0.11459",
            "libneuronxla": "3.0.5356.0",
            "neuronx-cc": "2.27.5334.0",
            "nki": "0.6.0",
            "aws-neuronx-dkms": "2.30.2.0",
            "aws-neuronx-runtime-lib": "2.34.10.0",
            "aws-neuronx-collectives": "2.34.10.0",
        },
        jax="0.10.0",
        numpy=("2.2", "2.4"),
        python=("3.11", "3.14"),
    ),
    _2_33_0,
    dataclasses.replace(
        _2_33_0,
        version="2.33.1",
        packages=_2_33_0.packages
        | {
            "jax-neuronx": "0.10.0.1.0.15472",
            "libneuronxla": "3.0.12293.0",
            "aws-neuronx-dkms": "2.31.8.0",
            "aws-neuronx-runtime-lib": "2.35.33.0",
            "aws-neuronx-collectives": "2.35.49.0",
        },
        avoid="",
    ),
)
RECOMMENDED = RELEASES[-1]


def numbers(version: str) -> tuple[int, ...]:
    """Returns the leading numbers of a version, (2, 35, 30, 0) for `2.35.30.0-1a2b3c`, or () without any."""
    match = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, match[0].split("."))) if match else ()


def bounds(package: str, release: Release) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns (lowest, first too high) version of a package of a release, as `numbers`.

    A build between two rows belongs to the older row, as AWS rebuilds packages within a release.
    """
    low = numbers(release.packages[package])
    later = [numbers(other.packages[package]) for other in RELEASES]
    return low, min((other for other in later if other > low), default=(low[0], low[1] + 1))


def releases_of(package: str, version: str) -> tuple[str, ...]:
    """Returns the releases that a version of a package belongs to, or ()."""
    have = numbers(version)
    return tuple(
        release.version for release in RELEASES if (low_high := bounds(package, release))[0] <= have < low_high[1]
    )


def supports_python(release: Release, version: str) -> bool:
    """Returns whether a release supports a version of Python."""
    low, high = release.python
    return numbers(low) <= numbers(version) < numbers(high)


def upgrade_commands(release: Release, *, manager: str = "apt-get") -> str:
    """Returns the commands that install all of a release in this environment and on this machine, joined by `&&`.

    `manager` is "apt-get" for Ubuntu, "dnf" for Amazon Linux.
    """
    between = {"apt-get": "=", "dnf": "-"}[manager]
    system = " ".join(f"'{name}{between}{release.packages[name]}*'" for name in SYSTEM_PACKAGES)
    held = " --allow-change-held-packages" if manager == "apt-get" else ""
    extra = "neuron" if release.series == RECOMMENDED.series else f"neuron-{release.series.replace('.', '-')}"
    return " && ".join(
        (
            f"sudo {manager} {'update' if manager == 'apt-get' else 'makecache'}",
            f"sudo {manager} install -y{held} {system}",
            f"pip install -c constraints.txt '.[{extra}]' --extra-index-url={PIP_INDEX}",
            "sudo reboot",  # else the old driver stays loaded
        )
    )
