"""The table of SDK releases: what it says of a version, and every other place that names one."""

import pathlib
import re
import tomllib

import pytest
from packaging import specifiers

from hlat_jax.facts import sdk_releases
from hlat_jax.facts.sdk_releases import PYTHON_PACKAGES, RECOMMENDED, RELEASES, SYSTEM_PACKAGES
from hlat_jax.host import neuron_compiler_flags
from hlat_jax.host.neuron_topology import INSTANCES, Topology, resolve_topology

ROOT = pathlib.Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_rows_are_in_order_and_whole():
    assert list(RELEASES) == sorted(RELEASES, key=lambda one: sdk_releases.numbers(one.version))
    for one in RELEASES:
        assert set(one.packages) == {*PYTHON_PACKAGES, *SYSTEM_PACKAGES}
    for package in (*PYTHON_PACKAGES, *SYSTEM_PACKAGES):
        lows = [sdk_releases.bounds(package, one)[0] for one in RELEASES]
        assert lows == sorted(lows), package
        assert all(len(low) >= 3 for low in lows), package


RELEASES_OF = {
    ("neuronx-cc", "2.27.5334.0+1a2b3c4d"): ["2.32.0"],
    ("neuronx-cc", "2.28.7631.0"): ["2.33.0", "2.33.1"],
    ("neuronx-cc", "2.29.0"): [],
    ("neuronx-cc", "1.0.post1"): [],
    ("aws-neuronx-runtime-lib", "2.35.30.0-1b3ca6425"): ["2.33.0"],
    ("libneuronxla", "3.0.5400.0"): ["2.32.0"],  # rebuilt within 2.32
    ("nki", "unknown"): [],
}


def test_version_of_a_package_gives_its_releases():
    for (package, version), releases in RELEASES_OF.items():
        assert list(sdk_releases.releases_of(package, version)) == releases


def test_extras_admit_the_sound_builds_of_their_series_and_no_others():
    """Pinned: PyPI has placeholders of these names, and builds of the next release keep the first numbers."""
    extras = PROJECT["optional-dependencies"]
    for series, extra in (("2.32", "neuron-2-32"), ("2.33", "neuron")):
        words = [re.match(r"([\w-]+)(.*)", word).groups() for word in extras[extra]]
        admitted = {name: specifiers.SpecifierSet(rest) for name, rest in words}
        assert set(admitted) == {"jax", "numpy", *PYTHON_PACKAGES}
        for one in RELEASES:
            is_meant = one.series == series and not one.avoid
            assert all(one.packages[name] in admitted[name] for name in PYTHON_PACKAGES) == is_meant, (extra, one)
            if is_meant:
                assert {name: str(admitted[name]) for name in PYTHON_PACKAGES} == {
                    name: f"=={one.packages[name]}" for name in PYTHON_PACKAGES
                }
                assert all(f"{one.packages[name]}+1a2b3c4d" in admitted[name] for name in PYTHON_PACKAGES)
        assert str(admitted["jax"]) == f"=={RECOMMENDED.jax}"
        assert all(low in admitted["numpy"] and high not in admitted["numpy"] for low, high in [RECOMMENDED.numpy])


def test_guide_has_the_commands_that_the_doctor_prints():
    text = (ROOT / "docs" / "trainium.md").read_text().replace("\\\n    &&", "&&")
    for manager in ("apt-get", "dnf"):
        assert sdk_releases.upgrade_commands(RECOMMENDED, manager=manager) in text


def test_jax_numpy_and_python_of_every_release_are_those_that_this_package_is_tested_with():
    pinned = dict(re.findall(r"^([\w-]+)==([\d.]+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
    for one in RELEASES:
        low, high = map(sdk_releases.numbers, one.numpy)
        assert low <= sdk_releases.numbers(pinned["numpy"]) < high
        assert pinned["jax"] == one.jax
        assert sdk_releases.supports_python(one, "3.11.9")
        assert not sdk_releases.supports_python(one, one.python[1])


@pytest.fixture
def guide():
    """The table of releases in docs/trainium.md: row -> cells, of the oldest release first."""
    lines = (line.split("|") for line in (ROOT / "docs" / "trainium.md").read_text().splitlines())
    return {cells[1].strip(): [cell.strip() for cell in cells[2:-1]] for cells in lines if len(cells) == 6}


def test_guide_and_launch_files_name_the_recommended_release_and_no_other_as_such(guide):
    for package in (*PYTHON_PACKAGES, *SYSTEM_PACKAGES):
        assert guide[package] == [one.packages[package] for one in RELEASES], package
    assert guide["JAX"] == [one.jax for one in RELEASES]
    for path in ("docs/trainium.md", "launch/slurm/cluster.yaml", "launch/eks/Dockerfile"):
        text = (ROOT / path).read_text()
        assert f"SDK {RECOMMENDED.version}" in text
        named = set(re.findall(r"SDK (2\.\d+(?:\.\d+)?)", text))
        assert named <= {one.version for one in RELEASES} | {one.series for one in RELEASES}, named
        assert set(re.findall(r"JAX (0\.\d+\.\d+)", text)) <= {RECOMMENDED.jax}


def test_images_of_the_cluster_and_the_container_have_a_system_of_the_recommended_release(guide):
    found = re.search(r"^  Os: (\w+)$", (ROOT / "launch" / "slurm" / "cluster.yaml").read_text(), re.MULTILINE)
    assert found[1] in guide["systems"][-1].lower().replace(" ", "").replace(".", "")
    for jax, system in re.findall(r"/dlami/jax-([\d.]+)/ubuntu-([\d.]+)", (ROOT / "docs" / "trainium.md").read_text()):
        assert RECOMMENDED.jax.startswith(jax)
        assert f"Ubuntu {system}" in guide["systems"][-1]
    tag = guide["container tags end in"][-1].strip("`")
    dockerfile = (ROOT / "launch" / "eks" / "Dockerfile").read_text()
    assert set(re.findall(r"-ubuntu[\d.]+", dockerfile)) == {tag}


def test_a_run_sets_every_flag_whose_default_differs_between_releases():
    """In 2.33 `--native-int64` is on and `--implicit-integer-downcast` is "none"; before it was the other way round."""
    for instance in INSTANCES:
        topology = resolve_topology(Topology(instance))
        ours = neuron_compiler_flags.compiler_flags(topology)
        assert "--implicit-integer-downcast" in ours
        # trn1 computes 64-bit integers in 32 bits in every release, and its compiler has no flag for it
        assert "--native-int64" in ours or topology.kind.target.startswith("trn1")
