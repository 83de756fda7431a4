"""The doctor's check that the Neuron software is one release."""

import os
import socket
import stat

import neuron_machine
from refusals import assert_names

from hlat_jax.facts import sdk_releases
from hlat_jax.facts.sdk_releases import SYSTEM_PACKAGES
from hlat_jax.host.neuron_topology import Machine
from hlat_jax.neuron import installation
from hlat_jax.neuron.probes import FAILED, NOT_HERE, PASSED


def of_release(name, **changed):
    """Returns what is installed where all of one release is; None leaves a package out."""
    one = next(release for release in sdk_releases.RELEASES if release.version == name)
    found = {"python": "3.12.4", "jax": one.jax, "numpy": "2.3.5"} | one.packages
    found |= {package.replace("_", "-"): version for package, version in changed.items()}
    return {package: version for package, version in found.items() if version is not None}


def test_all_of_one_release_passes_and_is_named():
    unseen = {package.replace("-", "_"): None for package in (*SYSTEM_PACKAGES, "nki")}
    for name, changed in (("2.32.0", {}), ("2.33.1", {}), ("2.33.1", {"python": "3.14.1"}), ("2.33.1", unseen)):
        outcome = installation.one_release(of_release(name, **changed))
        assert (outcome.verdict, outcome.advice) == (PASSED, "")
        assert outcome.found.startswith(f"SDK {name}: jax 0.10.0, ")
    assert_names(outcome.found, "nki, aws-neuronx-dkms, aws-neuronx-runtime-lib")


def test_a_release_to_avoid_fails_with_the_one_to_install():
    for changed in ({}, dict.fromkeys(["aws_neuronx_dkms", "nki"]), {"aws_neuronx_dkms": "2.31.8.0"}):
        outcome = installation.one_release(of_release("2.33.0", **changed))
        assert outcome.verdict == FAILED
        assert_names(outcome.found, "SDK 2.33.0", "DMA")
        facts = ("'aws-neuronx-runtime-lib=2.35.33.0*'", "'.[neuron]' --extra-index-url=https://", "reboot")
        assert_names(outcome.advice, *facts)


def test_mixed_installation_names_the_part_that_does_not_belong():
    for changed, *facts in [
        ({"neuronx_cc": "2.27.5334.0+aa"}, "SDK 2.33.1", "neuronx-cc 2.27.5334.0+aa", "SDK 2.32.0"),
        ({"libneuronxla": "3.0.5356.0"}, "libneuronxla 3.0.5356.0", "SDK 2.32.0"),
        ({"aws_neuronx_dkms": "2.31.7.0"}, "aws-neuronx-dkms 2.31.7.0", "SDK 2.33.0"),  # not restarted
        ({"aws_neuronx_dkms": "2.32.0.0"}, "aws-neuronx-dkms 2.32.0.0"),
        ({"aws_neuronx_collectives": "2.34.10.0"}, "aws-neuronx-collectives 2.34.10.0", "SDK 2.32.0"),
        ({"neuronx_cc": "unknown"}, "neuronx-cc unknown"),
        ({"jax_neuronx": "0.0.0"}, "jax-neuronx 0.0.0"),  # a placeholder of PyPI
        ({"jax": "0.10.2"}, "jax 0.10.2", "0.10.0"),
        ({"numpy": "2.4.0"}, "numpy 2.4.0", ">=2.2,<2.4"),
        ({"python": "3.15.0"}, "Python 3.15.0", ">=3.11,<3.15"),
        ({"libneuronxla": None}, "libneuronxla"),
    ]:
        outcome = installation.one_release(of_release("2.33.1", **changed))
        assert outcome.verdict == FAILED
        assert_names(outcome.found, *facts)
        assert outcome.found.count(";") == 0, "only what was changed is named"
        assert outcome.advice
    older = installation.one_release(of_release("2.32.0", python="3.14.1"))
    assert_names(older.found, "Python 3.14.1", ">=3.11,<3.14")


def test_package_that_is_newer_than_the_table_is_not_judged():
    """Also one within the bounds of the newest row: 2.30 to 2.33 all have libneuronxla 3.0."""
    for changed, what in (
        ({"neuronx_cc": "2.29.1.0", "aws_neuronx_dkms": "2.32.1.0"}, "neuronx-cc 2.29.1.0"),
        ({"jax_neuronx": "0.10.0.1.0.20000"}, "jax-neuronx 0.10.0.1.0.20000"),
        ({"libneuronxla": "3.0.20000.0+ab"}, "libneuronxla 3.0.20000.0+ab"),
    ):
        outcome = installation.one_release(of_release("2.33.1", **changed))
        assert outcome.verdict == NOT_HERE
        assert_names(outcome.found.split(",")[0], what, "SDK 2.33.1")
        assert_names(outcome.advice, "`neuron`", "hlat_jax/facts/sdk_releases.py")
    assert installation.one_release(of_release("2.33.1", libneuronxla="3.0.12293.0+ab")).verdict == PASSED


def fake_command(folder, name, lines, *, code=0):
    path = folder / name
    path.write_text(f"#!/bin/sh\nprintf '{lines}'\necho problem >&2\nexit {code}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


DPKG = (
    "aws-neuronx-dkms 2.31.8.0 installed\\naws-neuronx-runtime-lib 2.35.44.0-ab1 installed\\n"
    "aws-neuronx-collectives 2.34.10.0-c2 config-files\\n"
)


def test_system_versions_are_of_packages_and_the_loaded_driver(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    machine = Machine(driver=tmp_path / "version")
    assert installation.system_versions(machine=machine) == {}
    fake_command(tmp_path, "dpkg-query", DPKG, code=1)
    found = {"aws-neuronx-dkms": "2.31.8.0", "aws-neuronx-runtime-lib": "2.35.44.0-ab1"}
    assert installation.system_versions(machine=machine) == found
    (tmp_path / "version").write_text("2.31.7.0\n")  # the old one until the next restart
    assert installation.system_versions(machine=machine) == found | {"aws-neuronx-dkms": "2.31.7.0"}


def test_a_missing_tool_is_named_with_its_package(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    missing = installation.tools_on_path()
    assert missing.verdict == FAILED
    assert_names(missing.found, "PATH", "neuronx-cc", "neuron-ls")
    fake_command(tmp_path, "neuronx-cc", "x")
    missing = installation.tools_on_path()
    assert ("neuronx-cc" in missing.found, missing.advice.split()[-1]) == (False, "aws-neuronx-tools")
    fake_command(tmp_path, "neuron-ls", "x")
    assert installation.tools_on_path() == (PASSED, f"{tmp_path}/neuronx-cc, {tmp_path}/neuron-ls", "")


def test_leftovers_in_the_compilers_cache_fail(tmp_path):
    cache, processes = tmp_path / "cache", neuron_machine.mounted(tmp_path / "proc", "ext4")
    environ = {"NEURON_COMPILE_CACHE_URL": str(cache)}
    neuron_machine.compiled(cache, "sound", "model.neff", "model.done")
    assert installation.compiler_cache(environ, processes=processes).verdict == PASSED
    assert installation.compiler_cache({}, processes=processes).verdict == PASSED
    lock = neuron_machine.compiled(cache, "killed", "model.hlo_module.pb.lock") / "model.hlo_module.pb.lock"
    outcome = installation.compiler_cache(environ, processes=processes)
    assert (outcome.verdict, str(lock) in outcome.found) == (FAILED, True)
    assert "*.lock" in outcome.advice
    neuron_machine.process(processes, 7, "neuronx-cc compile")
    outcome = installation.compiler_cache(environ, processes=processes)
    assert (outcome.verdict, "process 7 (neuronx-cc compile)" in outcome.found) == (NOT_HERE, True)
    assert lock.exists(), "the doctor removes nothing"


def test_former_run_that_holds_cores_or_the_port_fails(tmp_path):
    processes, machine = neuron_machine.mounted(tmp_path / "proc", "ext4"), Machine(devices=tmp_path / "dev")
    with socket.socket() as server:
        server.bind(("", 0))
        options = {"port": server.getsockname()[1], "processes": processes}
        assert str(options["port"]) in installation.former_run(machine, **options).found
    assert installation.former_run(machine, **options).verdict == PASSED
    neuron_machine.process(processes, 9, "python train.py", opened=[f"{machine.devices}/neuron0"])
    outcome = installation.former_run(machine, **options)
    assert (outcome.verdict, "process 9 (python train.py)" in outcome.found) == (FAILED, True)


def test_a_crash_of_jaxs_cache_fails(tmp_path):
    path = neuron_machine.breaking_cache(tmp_path / "site", crash=True)
    outcome = installation.jax_cache(dict(os.environ) | {"PYTHONPATH": path})
    assert outcome.verdict == FAILED
    assert_names(outcome.found, "XlaRuntimeError: RET_CHECK has_host_program_shape", "-6")
    assert "JAX_COMPILATION_CACHE_DIR" in outcome.advice
