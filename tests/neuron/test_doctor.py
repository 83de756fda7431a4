"""The doctor: every probe passes on correct inputs and catches a faulty fake; the command on CPU."""

import dataclasses
import functools
import json
import pathlib
import sysconfig
import tomllib
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from refusals import assert_names, refused

from hlat_jax.cli import config_files
from hlat_jax.config import ParallelConfig, PrecisionConfig
from hlat_jax.host import compile_cache
from hlat_jax.host.neuron_topology import Machine
from hlat_jax.neuron import doctor, doctor_command, exercises, probes
from hlat_jax.neuron.probes import FAILED, NOT_HERE, PASSED, Outcome
from hlat_jax.parallel.virtual_devices import PlannedClient, PlannedDevice
from hlat_jax.resolve import resolve

ROOT = pathlib.Path(__file__).resolve().parents[2]
TINY = resolve(config_files.load("tiny"))


def assert_failed(outcome, *words):
    assert outcome.verdict == FAILED
    assert outcome.advice
    for word in words:
        assert word in outcome.found


# versions


def test_supported_versions_match_the_package_metadata():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    declared = {one.name: one.specifier for one in map(Requirement, project["dependencies"])}
    declared["python"] = SpecifierSet(project["requires-python"])
    for name, (low, high) in probes.SUPPORTED.items():
        assert declared[name] == SpecifierSet(f">={low}" + (f",<{high}" if high else "")), name


def test_versions_are_compared_with_their_range():
    assert probes.versions(compile_cache.installed_versions(probes.SUPPORTED), probes.SUPPORTED).verdict == PASSED
    assert_failed(probes.versions({"jax": "0.10.0"}, {"jax": ("0.9", ""), "flax": ("0.12", "")}), "flax is missing")
    for version, verdict in {
        **dict.fromkeys(["0.9.0", "0.12.0", "1.0"], FAILED),
        **dict.fromkeys(["0.9.0.1", "0.11.0rc1", "0.10.0+local.7"], PASSED),
    }.items():
        assert probes.versions({"jax": version}, {"jax": ("0.9.0.1", "0.12")}).verdict == verdict


# devices


def cores(count, kind="NC_v2", platform="neuron"):
    return [types.SimpleNamespace(platform=platform, device_kind=kind)] * count


def test_devices_are_those_of_the_instance():
    assert probes.devices(cores(32), platform="neuron", count=32) == (PASSED, "32 x NC_v2 (neuron)", "")
    assert probes.devices(jax.devices(), platform="", count=0).verdict == PASSED
    for found, word in [
        ([], "nothing"),
        (cores(1, "cpu", "cpu"), "expected platform neuron"),
        (cores(31), "the instance has 32"),
        (cores(31) + cores(1, "NC_v3"), "several kinds"),
        (cores(32, "NC_v9"), "a kind that"),
    ]:
        assert_failed(probes.devices(found, platform="neuron", count=32), word)


# numbers


@pytest.mark.slow
def test_random_numbers_of_jax_pass():
    assert probes.random_numbers(exercises.draw).verdict == PASSED


def sound(seed):
    rng = np.random.default_rng(seed)
    return rng.random(1 << 18), rng.normal(size=1 << 18)


def altered(uniform=lambda u: u, normal=lambda z: z):
    def draw(seed):
        u, z = sound(seed)
        return uniform(u), normal(z)

    return draw


def test_biased_random_numbers_fail():
    assert probes.random_numbers(sound).verdict == PASSED
    for draw, word in [
        (lambda seed: sound(None), "one seed gave two draws"),
        (lambda seed: sound(0), "two seeds"),
        (lambda seed: (sound(0)[0], sound(seed)[1]), "two uniform seeds"),
        (altered(uniform=lambda u: u * 0.98), "mean of uniform"),
        (altered(uniform=lambda u: 0.5 + (u - 0.5) * 1.02), "variance of uniform"),
        (altered(uniform=lambda u: np.where(u > 0.9999, 1.0, u)), "uniform numbers from"),
        (altered(normal=lambda z: z + 0.02), "mean of normal"),
        (altered(normal=lambda z: z * 1.01), "variance of normal"),
        (
            altered(normal=lambda z: np.random.default_rng(z.view(np.uint64)[0]).uniform(-(3**0.5), 3**0.5, z.size)),
            "fourth",
        ),
        (altered(normal=lambda z: np.repeat(z[: z.size // 2], 2)), "neighbors"),
        (altered(normal=lambda z: np.tile(z[: z.size // 2], 2)), "halves"),  # every device draws the same
        (altered(normal=np.zeros_like), "correlation"),  # a generator that was folded to a constant
    ]:
        assert_failed(probes.random_numbers(draw), word)


def bf16(x):
    return np.asarray(x, jnp.bfloat16).astype(np.float32)


def in_blocks(block, keep):
    """Returns a product whose partial sums over `block` products go through `keep`."""

    def multiply(a, b, dtype):
        total = np.zeros((a.shape[0], b.shape[1]), np.float32)
        for first in range(0, a.shape[1], block):
            total = keep(total + a[:, first : first + block] @ b[first : first + block])
        return np.asarray(total, dtype).astype(np.float32)

    return multiply


def test_products_are_accumulated_in_fp32():
    assert probes.matmul_accumulation(exercises.multiply).verdict == PASSED
    assert probes.matmul_accumulation(in_blocks(128, lambda total: total)).verdict == PASSED
    for multiply in [
        in_blocks(16, bf16),
        in_blocks(128, bf16),  # one tile of the systolic array
        in_blocks(1024, bf16),
        in_blocks(128, lambda total: np.asarray(total, np.float16).astype(np.float32)),
        lambda a, b, dtype: bf16(a @ b) if dtype == "float32" else (a @ b),
        lambda a, b, dtype: (a @ b) * (1 if dtype == "float32" else 1.02),
        lambda a, b, dtype: a[:, :-1] @ b[:-1],
    ]:
        assert_failed(probes.matmul_accumulation(multiply))


def truncated(values):
    return (values.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)


def test_casts_round_as_the_config_expects(monkeypatch):
    assert probes.rounding(exercises.cast, expected="nearest").verdict == PASSED
    assert probes.rounding(exercises.cast_by_hash, expected="stochastic").verdict == PASSED
    for cast, expected, word in [
        (exercises.cast_by_hash, "nearest", "rounding is stochastic"),  # on where the config keeps fp32 master weights
        (bf16, "stochastic", "rounding is nearest"),  # off where all that is stored is bf16
        (truncated, "nearest", "neither"),
        (
            lambda v: np.where(np.random.default_rng(0).random(v.shape) < 0.5, truncated(v), bf16(v)),
            "stochastic",
            "neither",
        ),
        (lambda v: v, "nearest", "neighbors"),  # not rounded: the pair of casts was taken out
        (lambda v: np.nan_to_num(bf16(v), posinf=3e38), "nearest", "inf or NaN"),
        (lambda v: bf16(v * 1.01), "nearest", "a bf16 value"),
    ]:
        assert_failed(probes.rounding(cast, expected=expected), word)
    by_device = dataclasses.replace(TINY, precision=PrecisionConfig("bf16_sr"))
    in_software = dataclasses.replace(TINY, precision=PrecisionConfig("bf16_sr", "software"))
    assert doctor.expected_rounding(by_device) == "nearest"  # of a CPU
    monkeypatch.setattr(jax, "default_backend", lambda: "neuron")
    assert doctor.expected_rounding(by_device) == "stochastic"
    assert doctor.expected_rounding(in_software) == "nearest"


# donation


def state():
    return jax.jit(lambda: jnp.zeros(1 << 12))()


def deleting_without_aliasing(x):
    result = jax.block_until_ready(x + 1)
    x.delete()
    return result


def test_donation_that_keeps_two_states_or_corrupts_one_is_caught():
    outcome = probes.donation(exercises.add_one, state())
    assert outcome.verdict == PASSED
    for step in (
        jax.jit(lambda x: x + 1),
        deleting_without_aliasing,
        lambda x: exercises.add_one(exercises.add_one(x)),
    ):
        assert_failed(probes.donation(step, state()))


# collectives


def by_numpy(name, values):
    """Returns the result of correct devices."""
    size, total = len(values), values.sum(0)
    return {
        "sum": np.stack([total] * size),
        "gather": np.stack([values] * size),
        "scatter": total,
        "next": np.roll(values, 1, 0),
        "previous": np.roll(values, -1, 0),
    }[name]


def test_collectives_run_in_the_groups_of_the_config_and_over_all_devices():
    for parallel, expected in (
        (ParallelConfig(data=2, fsdp=2, tensor=2), [("data", 2), ("fsdp", 2), ("tensor_rep", 2), ("data", 8)]),
        (ParallelConfig(pipe=4, data=2, pipe_exchange="permute"), [("pipe", 4), ("data", 2), ("data", 8)]),
        (ParallelConfig(context=4, data=2), [("data", 2), ("context", 4), ("data", 8)]),
        (ParallelConfig(data=1, tensor=16), [("data", 8)]),  # does not fit these devices
    ):
        layouts = list(exercises.layouts_to_check(parallel, jax.devices(), 1))
        assert [(axis, layout.mesh.shape[axis]) for layout, axis in layouts] == expected
        for layout, axis in layouts:
            outcome = doctor.collectives(layout, axis)
            names = "sum, gather, scatter" + ", next, previous" * (axis == "pipe")
            assert outcome.verdict == PASSED
            assert_names(outcome.found, f"{names} on {layout.mesh.shape[axis]} devices")
    [(layout, axis)] = exercises.layouts_to_check(ParallelConfig(data=1), jax.devices()[:1], 8)
    assert doctor.collectives(layout, axis).verdict == NOT_HERE


def test_a_wrong_collective_fails_by_name_and_the_others_still_run():
    assert probes.collectives(by_numpy, size=4, permutes=True).verdict == PASSED
    for name in ("sum", "gather", "scatter", "next", "previous"):
        for error, said in ((None, "wrong values"), (RuntimeError("NCC_EXCL001: groups\nmore"), "RuntimeError: NCC_E")):

            def faulty(kind, values, name=name, error=error):
                if kind == name and error:
                    raise error
                result = by_numpy(kind, values).copy()
                result.flat[-1] += kind == name
                return result

            outcome = probes.collectives(faulty, size=4, permutes=True)
            assert_failed(outcome, f"{name}: {said}")
            assert outcome.found.count(";") == 0
    for run in [
        lambda name, values: values if name == "sum" else by_numpy(name, values),  # each returns its own array
        lambda name, values: by_numpy(name, values[:1].repeat(len(values), 0)),  # all receive the first array
        lambda name, values: by_numpy(name, bf16(values)),  # sent in bf16
    ]:
        assert_failed(probes.collectives(run, size=4))


def test_collective_wrong_in_one_mesh_group_fails(monkeypatch):
    layouts = {axis: layout for layout, axis in exercises.layouts_to_check(ParallelConfig(tensor=2), jax.devices(), 2)}
    psum = jax.lax.psum
    monkeypatch.setattr(jax.lax, "psum", lambda x, axis: psum(x, axis) + (jax.lax.axis_index("data") == 3))
    run = functools.partial(exercises.run_collective, layout=layouts["tensor_kv"], axis="tensor_kv")
    assert_failed(probes.collectives(run, size=2), "on 2 devices sum: wrong values")


def neuron_devices(kind, count):
    """Returns stand-ins for the devices of one node."""
    client = PlannedClient("neuron", count)
    return [PlannedDevice(number, client, device_kind=kind) for number in range(count)]


def test_groups_of_a_node_are_placed_as_in_a_run(monkeypatch):
    layout, _ = next(exercises.layouts_to_check(ParallelConfig(data=8, tensor=4), neuron_devices("NC_v2", 32), 4))
    numbers = [device.id for device in layout.mesh.devices.flat]
    assert numbers[:8] == [0, 8, 16, 24, 1, 9, 17, 25]
    ran = []

    def record(run, size, permutes):
        ran.append(size)
        return Outcome(PASSED, "")

    monkeypatch.setattr(probes, "collectives", record)
    outcomes = {}
    for tensor in (8, 16):
        degrees = ParallelConfig(data=128 // tensor, tensor=tensor)
        for layout, axis in exercises.layouts_to_check(degrees, neuron_devices("NC_v3", 128), tensor):
            outcomes[axis, layout.mesh.shape[axis]] = doctor.collectives(layout, axis)
    assert outcomes["tensor_kv", 8].verdict == PASSED
    excluded = outcomes["tensor_kv", 16]
    assert (excluded.verdict, bool(excluded.advice)) == (NOT_HERE, True)
    assert_names(excluded.found, "groups of 16 ", "trn2", "LNC 1")
    assert ran == [16, 8, 128, 8, 128], "all but the groups of 16"


# the command


def test_a_cache_that_cannot_be_written_fails(tmp_path):
    assert probes.cache(tmp_path / "new").verdict == PASSED
    assert list((tmp_path / "new").iterdir()) == []
    (tmp_path / "file").write_text("")
    assert_failed(probes.cache(tmp_path / "file" / "cache"), "file")


def no_memory():
    raise RuntimeError("RESOURCE_EXHAUSTED: 3.75 GiB")


def run_command(monkeypatch, outcomes, *words):
    rows = [(name, lambda outcome=outcome: outcome) for name, outcome in outcomes.items()]
    monkeypatch.setattr(doctor, "checks", lambda config, **_: iter(rows))
    return doctor_command.main(list(words))


def test_the_command_checks_for_the_weights_that_a_run_begins_with(monkeypatch, tmp_path):
    with refused(f"train.init_from: {tmp_path}"):
        run_command(monkeypatch, {}, f"--init_from={tmp_path}")


def test_report_ends_with_counts_of_passed_failed_and_not_testable(monkeypatch, capsys, tmp_path):
    outcomes = {
        "a": Outcome(PASSED, "fine"),
        "b": Outcome(FAILED, "bad", "fix it"),
        "c": Outcome(NOT_HERE, "no device"),
    }
    assert run_command(monkeypatch, outcomes, f"--json={tmp_path / 'r.json'}") == 1
    printed = capsys.readouterr().out
    assert "fix it" in printed
    ends = [line.split() for line in printed.splitlines()[-4:]]
    assert ends[:3] == [["passed", "1", "a"], ["failed", "1", "b"], ["not", "testable", "here", "1", "c"]]
    assert "Trainium" in printed
    assert run_command(monkeypatch, {"a": Outcome(PASSED, ""), "c": Outcome(NOT_HERE, "")}, "--config=7b") == 0
    report = json.loads((tmp_path / "r.json").read_text())
    verdicts = [(row["check"], row["verdict"]) for row in report["checks"]]
    assert verdicts == [("a", PASSED), ("b", FAILED), ("c", NOT_HERE)]


def test_a_probe_that_raises_fails():
    for message, is_killed in [
        ("[F137] neuronx-cc was forcibly killed", True),
        ("RuntimeError: neuronx-cc failed with -9", True),
        ("Subcommand returned with exitcode=-9", True),
        ("[F134] neuronx-cc terminated abnormally", False),
        ("neuronx-cc failed with -90", False),
    ]:

        def fail(message=message):
            raise RuntimeError(f"INTERNAL: {message}")

        outcome, seconds = doctor.run_check(fail)
        assert_failed(outcome, f"RuntimeError: INTERNAL: {message}")
        assert ("killed" in outcome.advice) == is_killed
        assert seconds >= 0


def test_checks_on_cpu_pass_or_are_not_testable(monkeypatch, tmp_path):
    config = dataclasses.replace(TINY, precision=PrecisionConfig("bf16_sr"))
    machine = {"instance": "", "num_devices": 0, "cache": tmp_path}
    rows = {name: doctor.run_check(probe)[0] for name, probe in doctor.checks(config, **machine)}
    assert [name for name, outcome in rows.items() if outcome.verdict == FAILED] == []
    not_here = [name for name, outcome in rows.items() if outcome.verdict == NOT_HERE]
    assert not_here == ["versions for Neuron", "tools on PATH", "compiler's cache", "former run"]
    assert rows["JAX's cache"].verdict == PASSED
    assert list(rows)[-2:] == ["donation", "along data"]
    monkeypatch.setattr(jax, "local_devices", no_memory)  # the other checks still run
    probe = dict(doctor.checks(TINY, **machine))["devices"]
    assert_failed(doctor.run_check(probe)[0], "RuntimeError: RESOURCE_EXHAUSTED")
    monkeypatch.setattr(doctor.installation, "system_versions", lambda: {"aws-neuronx-dkms": "2.31.8.0"})
    checks = dict(doctor.checks(TINY, **machine | {"instance": "trn1.32xlarge"}))
    assert_failed(checks["versions for Neuron"](), "missing: jax-neuronx, libneuronxla, neuronx-cc")
    assert list(checks)[-1] == "devices"  # which a plugin finds; without it each later check would fail alike
    assert checks["devices"]().verdict == NOT_HERE


def test_later_checks_do_not_use_a_cache_of_jax_that_fails(monkeypatch):
    monkeypatch.setattr(jax.config, "update", lambda name, value: changed.append((name, value)))
    for outcome, expected in (
        (Outcome(PASSED, ""), []),
        (Outcome(FAILED, "crashed", "unset"), [("jax_enable_compilation_cache", False)]),
    ):
        changed = []
        monkeypatch.setattr(doctor.installation, "jax_cache", lambda environ, outcome=outcome: outcome)
        assert doctor.jax_cache() == outcome
        assert changed == expected


def test_environment_on_a_trainium_node_is_that_of_the_run(tmp_path):
    (tmp_path / "neuron0").touch()
    (tmp_path / "product").write_text("trn1.32xlarge\n")
    values = types.SimpleNamespace(instance="", cores=0)
    config = resolve(config_files.load("7b"))
    environ = {"NEURON_RUN_TRIVIAL_COMPUTATION_ON_CPU": "1"}
    options = doctor_command._prepare(config, values, environ, machine=Machine(tmp_path, tmp_path / "product"))
    cache = pathlib.Path(environ["JAX_COMPILATION_CACHE_DIR"])
    assert options == {"instance": "trn1.32xlarge", "num_devices": 32, "cache": cache}
    assert environ["JAX_PLATFORMS"] == "neuron,cpu"
    assert environ["PATH"].startswith(sysconfig.get_path("scripts"))
    assert environ["NEURON_RT_STOCHASTIC_ROUNDING_EN"] == "1"  # 7b is bf16_sr
    assert "NEURON_RUN_TRIVIAL_COMPUTATION_ON_CPU" not in environ
