"""The doctor's check that the Neuron software is one release, and `neuron sdk-diff`."""

import pathlib
import re
import stat

import jax
import jax.numpy as jnp
import pytest

from hlat_jax.facts import sdk_releases
from hlat_jax.facts.hardware import INSTANCES
from hlat_jax.facts.sdk_releases import RELEASES, SYSTEM_PACKAGES
from hlat_jax.neuron import installation, lint, sdk_diff_command
from hlat_jax.neuron.probes import FAILED, NOT_HERE, PASSED


def of_release(name, **changed):
    """Returns what is installed where all of one release is; None leaves a package out."""
    one = sdk_releases.find(name)
    found = {"python": "3.12.4", "jax": one.jax, "numpy": "2.3.5"} | one.packages
    found |= {package.replace("_", "-"): version for package, version in changed.items()}
    return {package: version for package, version in found.items() if version is not None}


@pytest.mark.parametrize("name", ["2.32.0", "2.33.1"])
def test_all_of_one_release_passes_and_is_named(name):
    outcome = installation.one_release(of_release(name))
    assert outcome.verdict == PASSED, outcome
    assert outcome.found.startswith(f"SDK {name}: jax 0.10.0, ")
    assert not outcome.advice


def test_release_to_avoid_fails_with_the_reason_and_the_release_to_install():
    outcome = installation.one_release(of_release("2.33.0"))
    assert outcome.verdict == FAILED
    assert "SDK 2.33.0" in outcome.found
    assert "can hang the chip" in outcome.found
    for word in ("'aws-neuronx-runtime-lib=2.35.33.0*'", "'.[neuron]' --extra-index-url=https://", "reboot"):
        assert word in outcome.advice


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        (
            {"neuronx_cc": "2.27.5334.0+aa"},
            "most of it is SDK 2.33.1, but neuronx-cc 2.27.5334.0+aa belongs to SDK 2.32.0",
        ),
        ({"libneuronxla": "3.0.5356.0"}, "libneuronxla 3.0.5356.0 belongs to SDK 2.32.0"),
        ({"aws_neuronx_dkms": "2.31.7.0"}, "aws-neuronx-dkms 2.31.7.0 belongs to SDK 2.33.0"),  # not restarted
        ({"aws_neuronx_runtime_lib": "2.35.30.0"}, "aws-neuronx-runtime-lib 2.35.30.0 belongs to SDK 2.33.0"),
        ({"aws_neuronx_collectives": "2.34.10.0"}, "aws-neuronx-collectives 2.34.10.0 belongs to SDK 2.32.0"),
        ({"neuronx_cc": "2.29.1.0"}, "neuronx-cc 2.29.1.0 is newer than SDK 2.33.1"),
        ({"neuronx_cc": "unknown"}, "neuronx-cc unknown is not a version"),
        ({"nki": "0.5.0"}, "nki 0.5.0 is older than SDK 2.32.0, or a placeholder of the public package index"),
        ({"jax_neuronx": "0.0.0"}, "jax-neuronx 0.0.0 is older than SDK 2.32.0, or a placeholder"),
        ({"jax": "0.10.2"}, "jax 0.10.2 is not 0.10.0"),
        ({"numpy": "2.4.0"}, "numpy 2.4.0 is not >=2.2,<2.4"),
        ({"python": "3.15.0"}, "Python 3.15.0 is not one of 3.11 to 3.14"),
        ({"libneuronxla": None}, "missing: libneuronxla"),
    ],
)
def test_mixed_installation_names_the_part_that_does_not_belong(changed, words):
    outcome = installation.one_release(of_release("2.33.1", **changed))
    assert outcome.verdict == FAILED
    assert words in outcome.found
    assert outcome.found.count(";") == 0, "only what was changed is named"
    assert "SDK 2.33.1" in outcome.advice


def test_python_that_only_the_newer_release_takes_is_refused_by_the_older():
    assert installation.one_release(of_release("2.33.1", python="3.14.1")).verdict == PASSED
    assert (
        "Python 3.14.1 is not one of 3.11 to 3.13"
        in installation.one_release(of_release("2.32", python="3.14.1")).found
    )


def test_system_packages_that_are_not_found_are_said_not_to_be_checked():
    unseen = {package.replace("-", "_"): None for package in (*SYSTEM_PACKAGES, "nki")}
    outcome = installation.one_release(of_release("2.33.1", **unseen))
    assert outcome.verdict == PASSED, "jax-neuronx and libneuronxla tell 2.33.1 from the release to avoid"
    assert "Do not train with 2.33.0: DMA" in installation.one_release(of_release("2.33.0", **unseen)).found
    assert "not found, so not checked: nki, aws-neuronx-dkms, aws-neuronx-runtime-lib" in outcome.found


def test_driver_of_another_release_is_updated_on_the_host():
    outcome = installation.one_release(of_release("2.33.1", aws_neuronx_dkms="2.30.2.0"))
    assert outcome.verdict == FAILED
    assert outcome.advice.startswith("update the driver on the host to aws-neuronx-dkms 2.31.8.0 of SDK 2.33.1")
    both = installation.one_release(of_release("2.33.1", aws_neuronx_dkms="2.30.2.0", nki="0.6.0"))
    assert both.advice.startswith("use an image of SDK 2.33.1")


def test_a_newer_driver_is_not_replaced_by_an_older_one():
    fixed = installation.one_release(of_release("2.33.0", aws_neuronx_dkms="2.31.8.0"))  # of 2.33.1
    assert fixed.advice.startswith("use an image of SDK 2.33.1")
    assert "Do not train with 2.33.0: DMA" in fixed.found
    newer = installation.one_release(of_release("2.33.1", aws_neuronx_dkms="2.32.0.0"))
    assert "aws-neuronx-dkms 2.32.0.0 is newer than SDK 2.33.1" in newer.found
    assert newer.verdict == NOT_HERE
    assert newer.advice.startswith("add its row")
    later = installation.one_release(of_release("2.32", aws_neuronx_dkms="2.31.8.0"))
    assert (later.verdict, later.advice[:25]) == (FAILED, "use an image of SDK 2.33.")
    unknown = installation.one_release(of_release("2.33.1", aws_neuronx_dkms="unknown"))
    assert "aws-neuronx-dkms unknown is not a version" in unknown.found
    assert "update the driver" not in unknown.advice


def test_release_older_than_the_table_is_not_called_one_of_it():
    older = {"neuronx_cc": "2.26.1.0", "nki": "0.5.0", "aws_neuronx_dkms": "2.29.1.0", "libneuronxla": "3.0.1.0"}
    older |= {"aws_neuronx_runtime_lib": "2.33.1.0", "aws_neuronx_collectives": "2.33.2.0"}
    outcome = installation.one_release(of_release("2.32", **older))
    assert outcome.verdict == FAILED
    assert outcome.found.startswith("not in the table of SDK 2.32.0 to 2.33.1: ")
    assert "neuronx-cc 2.26.1.0 is older, nki 0.5.0 is older" in outcome.found
    assert outcome.advice.startswith("use an image of SDK 2.33.1")


def test_release_newer_than_the_table_is_not_judged():
    newer = {"neuronx_cc": "2.29.1.0", "nki": "0.8.0", "aws_neuronx_dkms": "2.32.1.0"}
    newer |= {"aws_neuronx_runtime_lib": "2.36.1.0", "aws_neuronx_collectives": "2.36.2.0"}
    outcome = installation.one_release(of_release("2.33.1", **newer))
    assert outcome.verdict == NOT_HERE
    assert "newer than SDK 2.33.1" in outcome.found


def fake_command(folder, name, lines, *, code=0):
    path = folder / name
    path.write_text(f"#!/bin/sh\nprintf '{lines}'\necho problem >&2\nexit {code}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


DPKG = (
    "aws-neuronx-dkms 2.31.8.0 installed\\naws-neuronx-runtime-lib 2.35.44.0-ab1 installed\\n"
    "aws-neuronx-collectives 2.34.10.0-c2 config-files\\n"
)


def test_system_versions_are_those_of_the_package_manager_and_of_the_loaded_driver(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert installation.system_versions(driver=tmp_path / "no") == {}
    fake_command(tmp_path, "dpkg-query", DPKG, code=1)
    found = {"aws-neuronx-dkms": "2.31.8.0", "aws-neuronx-runtime-lib": "2.35.44.0-ab1"}
    assert installation.system_versions(driver=tmp_path / "no") == found
    (tmp_path / "version").write_text("2.31.7.0\n")  # the old one until the next restart
    loaded = installation.system_versions(driver=tmp_path / "version")
    assert loaded == found | {"aws-neuronx-dkms": "2.31.7.0"}


def test_tools_are_those_of_this_environment_and_on_the_path(tmp_path, monkeypatch):
    mine, tools, other = (tmp_path / name for name in ("mine", "tools", "other"))
    for folder in (mine, tools, other):
        folder.mkdir()

    def checked(*folders):
        monkeypatch.setenv("PATH", ":".join(map(str, folders)))
        return installation.tools_on_path(scripts=mine, tools=tools)

    fake_command(tools, "neuron-ls", "x")
    fake_command(mine, "neuronx-cc", "x")
    missing = checked(tools)
    assert (missing.verdict, missing.found) == (FAILED, "neuronx-cc is not on PATH")
    assert missing.advice.startswith(f"export PATH={mine}:{tools}:$PATH; ")
    fake_command(other, "neuronx-cc", "x")
    assert checked(other, mine, tools).found == f"neuronx-cc on PATH is {other}/neuronx-cc, not {mine}/neuronx-cc"
    assert checked(mine).found == "neuron-ls is not on PATH"
    assert checked(mine, tools, other) == (PASSED, f"{mine}/neuronx-cc, {tools}/neuron-ls", "")


def test_system_versions_are_found_by_rpm_too(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    fake_command(
        tmp_path, "rpm", "aws-neuronx-collectives 2.35.49.0_ab installed\\npackage aws-neuronx-dkms is not installed\\n"
    )
    assert installation.system_versions(driver=pathlib.Path("no")) == {"aws-neuronx-collectives": "2.35.49.0_ab"}
    assert sdk_releases.releases_of("aws-neuronx-collectives", "2.35.49.0_ab") == ("2.33.1",)


# sdk-diff


def diff(capsys, *words):
    assert sdk_diff_command.main(words) == 0
    sections = capsys.readouterr().out.split("\n\n")
    return sections[0], {section.splitlines()[0]: section.splitlines()[1:] for section in sections[1:]}


@pytest.fixture
def without_plan(monkeypatch):
    """A step of 15 GiB for every target; the value is the list of the targets asked for."""
    targets = []

    def step(config, target):
        targets.append(target)
        return sdk_diff_command._TrainingStep(15 * 2**30, ())

    monkeypatch.setattr(sdk_diff_command, "_training_step", step)
    return targets


@pytest.mark.parametrize(("lnc", "target", "more"), [("", "trn2", "122.07"), ("1", "trn2-lnc1", "61.04")])
def test_sdk_diff_reads_the_lnc_of_the_environment(capsys, monkeypatch, without_plan, lnc, target, more):
    monkeypatch.setenv("NEURON_LOGICAL_NC_CONFIG", lnc)
    _, found = diff(capsys, "2.32", "2.33", "--config=7b", "--instance=trn2.48xlarge")
    assert without_plan == [target]
    assert f"the runtime takes {more} MiB more of each device" in found["device memory"][0]


def test_sdk_diff_says_what_moves_and_what_the_run_pins(capsys, without_plan):
    title, found = diff(capsys, "2.32", "2.33", "--config=7b")
    assert title == "7b on trn1.32xlarge: SDK 2.32.0 (2026-08-17) to 2.33.1 (2026-11-11)"
    assert "  neuronx-cc              2.27.5334.0 -> 2.28.7631.0" in found["packages"]
    assert "  Python                  3.11 to 3.13 -> 3.11 to 3.14" in found["packages"]
    flags = "\n".join(found["compiler flags whose default moves"])
    assert "this run passes --implicit-integer-downcast=all: nothing changes" in flags
    assert "this run does not pass --native-int64, which is for trn2 and later only" in flags
    assert "the runtime takes 61.04 MiB more of each device" in found["device memory"][0]
    assert found["device memory"][1].endswith(": fits")
    [only] = [line for line in found["faults"] if "only in" in line]
    assert "only in 2.33.0, which is between them: DMA" in only
    assert found["environment variables without effect in both"][0].endswith(" is set here")
    assert len(found["not known"]) == 3


def test_sdk_diff_names_faults_that_come_and_go(capsys, without_plan):
    assert any(line.startswith("  NEW: DMA") for line in diff(capsys, "2.32", "2.33.0", "--config=tiny")[1]["faults"])
    _, found = diff(capsys, "2.33.0", "2.33.1", "--config=tiny", "--instance=trn2.48xlarge")
    assert any(line.startswith("  fixed: DMA") for line in found["faults"])
    assert found["device memory"] == found["compiler flags whose default moves"] == ["  no change known"]
    same = diff(capsys, "2.33", "2.33.1", "--config=tiny")[1]
    assert same["packages"] == same["not known"] == ["  no change known"]
    assert not [line for line in same["faults"] if line.startswith(("  NEW", "  fixed", "  only"))]


def test_sdk_diff_back_to_an_older_release_says_what_is_not_known_of_either(capsys, without_plan):
    _, found = diff(capsys, "2.33", "2.32", "--config=tiny")
    assert len(found["not known"]) == 3, "those of 2.33"
    assert "the runtime takes 61.04 MiB less of each device" in found["device memory"][0]
    assert any("only in 2.33.0, which is between them: DMA" in line for line in found["faults"])
    _, found = diff(capsys, "2.33.0", "2.32", "--config=tiny")
    assert any(line.startswith("  not known of 2.32.0: DMA") for line in found["faults"])


@pytest.mark.parametrize("words", [["--config=7b", "2.32", "2.33"], ["2.32", "--config", "7b", "2.33"]])
def test_sdk_diff_takes_flags_before_the_releases(words, capsys, without_plan):
    assert diff(capsys, *words)[0].startswith("7b on trn1.32xlarge: SDK 2.32.0 (2026-08-17) to 2.33.1")


def test_sdk_diff_uses_the_plan_of_the_config_and_both_cores_of_a_trn2_device(capsys, monkeypatch):
    small = "--config.model.num_layers=1", "--config.model.vocab_size=2048", "--config.data.seq_len=32"
    found = diff(capsys, "2.32", "2.33", "--config=tiny", *small)[1]
    assert re.fullmatch(r"  the step is planned with [\d.]+ MiB of 15.85 GiB: fits", found["device memory"][1])
    assert found["faults"][-1].startswith("  not in the step of tiny: the reported patterns CC06, KB01, KB02, ")
    step = sdk_diff_command._TrainingStep(24 * 2**30 - 250 * 10**6, ())
    monkeypatch.setattr(sdk_diff_command, "_training_step", lambda config, target: step)
    found = diff(capsys, "2.32", "2.33", "--config=tiny", "--instance=trn2.48xlarge")[1]
    assert "122.07 MiB more" in found["device memory"][0]
    assert "DOES NOT FIT" in found["device memory"][1]
    assert "this run passes --native-int64=disabled" in "\n".join(found["compiler flags whose default moves"])


def test_sdk_diff_names_the_reported_faults_whose_pattern_the_step_has(capsys, monkeypatch):
    rows = jax.ShapeDtypeStruct((8, 4), jnp.float32)
    masked = lint.check(
        lambda x, at: x.at[at].set(x[at] * 2), rows, jax.ShapeDtypeStruct((3,), jnp.int32), target="trn2"
    )
    assert "KB04" in {finding.rule for finding in masked}
    step = sdk_diff_command._TrainingStep(0, masked)
    monkeypatch.setattr(sdk_diff_command, "_training_step", lambda config, target: step)
    faults = "\n".join(diff(capsys, "2.32", "2.33", "--config=tiny")[1]["faults"])
    assert "possible in both (neuronx-cc 2.26, open): KB04, " in faults
    assert "1381" in faults
    assert "KB04" not in faults.splitlines()[-1]


@pytest.mark.parametrize("instance", INSTANCES)
def test_sdk_diff_knows_every_instance(instance, capsys, without_plan):
    assert diff(capsys, "2.32", "2.33", "--config=tiny", f"--instance={instance}")[0].startswith(
        f"tiny on {instance}: "
    )


def test_sdk_diff_reports_variables_without_effect_and_kernels(capsys, without_plan, monkeypatch):
    monkeypatch.setenv("NEURON_RT_VIRTUAL_CORE_SIZE", "2")
    found = diff(capsys, "2.32", "2.33", "--config=tiny", "--config.model.attention=nki", "--instance=trn2.48xlarge")[1]
    variables = found["environment variables without effect in both"]
    assert variables == ["  NEURON_RT_VIRTUAL_CORE_SIZE is set here: it is an older name: set NEURON_LOGICAL_NC_CONFIG"]
    assert "compiled by nki 0.7.0" in found["kernels"][0]
    assert "nki 0.7.0: a loop on the device must be fori_loop() or while_loop()" in found["kernels"][2]
    assert len(found["kernels"]) == 4


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["2.32", "2.34", "--config=tiny"], "2.34: no such Neuron SDK in the table"),
        (["2.32", "--config=tiny"], "sdk-diff takes two releases"),
        (["--config=tiny"], "sdk-diff takes two releases"),
        (["2.32", "2.33", "2.33.1", "--config=tiny"], "sdk-diff takes two releases"),
        (["2.32", "2.33", "--config=tiny", "--instance=trn9"], "--instance=trn9: no such instance type"),
    ],
)
def test_sdk_diff_refuses_what_it_does_not_know(words, message):
    with pytest.raises(ValueError, match=message):
        sdk_diff_command.main(words)


def test_every_fault_has_what_to_do_and_a_source():
    names = [fault.name for fault in sdk_releases.FAULTS]
    assert len(names) == len(set(names))
    for fault in sdk_releases.FAULTS:
        assert fault.instead
        assert fault.source
        assert not fault.fixed or fault.fixed in [one.version for one in RELEASES]
