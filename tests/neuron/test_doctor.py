"""The doctor: every probe passes on correct inputs and catches a faulty fake; the command on CPU."""

import dataclasses
import functools
import json
import os
import pathlib
import re
import subprocess
import sys
import tomllib
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hlat_jax.cli import config_files
from hlat_jax.config import ParallelConfig, PrecisionConfig
from hlat_jax.host.neuron_topology import Machine
from hlat_jax.neuron import doctor, doctor_command, exercises, partitioned, probes, short_training
from hlat_jax.neuron.probes import FAILED, NOT_HERE, PASSED, Outcome
from hlat_jax.parallel.virtual_devices import PlannedClient, PlannedDevice
from hlat_jax.resolve import resolve

ROOT = pathlib.Path(__file__).resolve().parents[2]
TINY = resolve(config_files.load("tiny"))
GIB = 2**30


def assert_failed(outcome, *words):
    assert outcome.verdict == FAILED
    assert outcome.advice
    for word in words:
        assert word in outcome.found


# versions


def requirements(words):
    """Returns {package: (lowest supported, first unsupported)} of requirements that have a lower bound."""
    found = {}
    for word in words:
        name, low, high = re.fullmatch(r"([\w-]+)(?:\[.*\])?(?:[>=]=([\d.]+))?(?:,<([\d.]+))?", word).groups()
        if low:
            found[name] = (low, high or "")
    return found


def test_supported_versions_match_the_package_metadata():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    declared = requirements(project["dependencies"])
    declared["python"] = requirements([f"python{project['requires-python']}"])["python"]
    assert {name: declared[name] for name in probes.SUPPORTED} == probes.SUPPORTED


def test_missing_versions_and_those_outside_the_range_fail():
    assert_failed(probes.versions({"jax": "0.10.0"}, {"jax": ("0.9", ""), "flax": ("0.12", "")}), "flax is missing")
    for version in ["0.9.0", "0.9.0.0", "0.12.0", "0.12", "1.0"]:
        assert_failed(
            probes.versions({"jax": version}, {"jax": ("0.9.0.1", "0.12")}), f"jax {version}", ">=0.9.0.1,<0.12"
        )


def test_versions_within_the_range_pass():
    assert probes.versions(exercises.installed_versions(probes.SUPPORTED), probes.SUPPORTED).verdict == PASSED
    for version in ["0.9.0.1", "0.10.2", "0.11.0rc1", "0.10.0+local.7"]:
        assert probes.versions({"jax": version}, {"jax": ("0.9.0.1", "0.12")}).verdict == PASSED


def test_packages_for_neuron_are_checked_where_the_machine_has_its_devices(monkeypatch, tmp_path):
    machine = doctor.CheckedMachine("trn1.32xlarge", 32, tmp_path)
    monkeypatch.setattr(doctor.installation, "system_versions", lambda: {"aws-neuronx-dkms": "2.31.8.0"})
    assert_failed(doctor._neuron_versions(machine), "missing: jax-neuronx, libneuronxla, neuronx-cc")
    assert doctor._neuron_versions(doctor.CheckedMachine("", 0, tmp_path)).verdict == NOT_HERE


# devices and memory


def cores(count, kind="NC_v2", platform="neuron"):
    return [types.SimpleNamespace(platform=platform, device_kind=kind)] * count


def test_devices_of_an_instance_pass():
    assert probes.devices(cores(32), platform="neuron", count=32) == (PASSED, "32 x NC_v2 (neuron)", "")
    assert probes.devices(jax.devices(), platform="", count=0).verdict == PASSED


def test_missing_mixed_or_unknown_devices_fail():
    for found, word in [
        ([], "nothing"),
        (cores(1, "cpu", "cpu"), "expected platform neuron"),
        (cores(31), "the instance has 32"),
        (cores(31) + cores(1, "NC_v3"), "several kinds"),
        (cores(32, "NC_v9"), "a kind that"),
    ]:
        assert_failed(probes.devices(found, platform="neuron", count=32), word)


def test_memory_of_a_correct_device_passes_and_a_quarter_of_it_is_written():
    asked = []
    outcome = probes.memory(15 * GIB, 16 * GIB, fill=lambda n: asked.append(n) or True)
    assert outcome.verdict == PASSED
    assert asked == [15 * GIB // 4]
    assert probes.memory(0, 16 * GIB, fill=lambda n: n == 4 * GIB).verdict == PASSED


def no_memory(num_bytes):
    raise RuntimeError("RESOURCE_EXHAUSTED: 3.75 GiB")


def test_memory_that_is_in_use_broken_or_missing_is_caught():
    for limit, fill, word in [
        (7 * GIB, lambda n: True, "7.00 GiB; such a device has 16.00 GiB"),
        (15 * GIB, lambda n: False, "read back differently"),
        (15 * GIB, no_memory, "RESOURCE_EXHAUSTED"),
    ]:
        assert_failed(probes.memory(limit, 16 * GIB, fill=fill), word)


def test_memory_of_the_host_or_an_unknown_device_is_not_testable():
    assert probes.memory(0, 0, fill=None).verdict == NOT_HERE
    assert probes.memory(0, 0, fill=lambda n: True).verdict == NOT_HERE


def test_fill_detects_a_flipped_bit(monkeypatch):
    monkeypatch.setattr(exercises, "_BLOCK_BYTES", 1 << 12)
    device = jax.devices()[0]
    assert exercises.fill(device, 1 << 14)
    put, count = jax.device_put, iter(range(100))

    def broken(block, device):
        return put(block ^ np.uint32(next(count) == 3), device)

    monkeypatch.setattr(jax, "device_put", broken)
    assert not exercises.fill(device, 1 << 14)


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


def test_fp32_accumulation_passes():
    assert probes.matmul_accumulation(exercises.multiply).verdict == PASSED
    assert probes.matmul_accumulation(in_blocks(128, lambda total: total)).verdict == PASSED


def test_accumulation_below_fp32_fails():
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


def stochastic(values, seed=0):
    finite = np.where(np.isfinite(values), values, 1)
    steps = np.ldexp(1.0, np.frexp(np.abs(finite))[1] - 8)
    low = np.floor(np.abs(finite) / steps)
    up = np.random.default_rng(seed).random(values.shape) < np.abs(finite) / steps - low
    return np.where(np.isfinite(values), np.sign(values) * (low + up) * steps, values).astype(np.float32)


def test_cpu_rounding_is_nearest_and_hash_rounding_is_stochastic():
    assert probes.rounding(exercises.cast, expected="nearest").verdict == PASSED
    assert probes.rounding(exercises.cast_by_hash, expected="stochastic").verdict == PASSED
    assert probes.rounding(stochastic, expected="stochastic").verdict == PASSED


def truncated(values):
    return (values.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)


def test_unexpected_rounding_fails():
    for cast, expected, word in [
        (stochastic, "nearest", "rounding is stochastic"),  # on where the config keeps fp32 master weights
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


def test_out_of_bounds_gather_follows_jax_semantics():
    assert probes.out_of_bounds(exercises.look_up).verdict == PASSED


def test_wrong_rows_out_of_bounds_are_caught():
    for look_up in [
        lambda table, ids, mode: table[ids % len(table)],  # wraps
        lambda table, ids, mode: exercises.look_up(table, ids, "clip"),
        lambda table, ids, mode: np.nan_to_num(exercises.look_up(table, ids, mode)),
        lambda table, ids, mode: exercises.look_up(table, np.minimum(ids, 4095), mode) + (ids == 7)[:, None],
    ]:
        assert_failed(probes.out_of_bounds(look_up), "mode")


# donation


def state():
    return jax.jit(lambda: jnp.zeros(1 << 12))()


def test_donation_on_this_cpu_passes():
    outcome = probes.donation(exercises.add_one, state())
    assert outcome.verdict == PASSED
    assert "is in the buffer" in outcome.found


def deleting_without_aliasing(x):
    result = jax.block_until_ready(x + 1)
    x.delete()
    return result


def test_donation_that_keeps_two_states_or_corrupts_one_is_caught():
    for step, word in [
        (jax.jit(lambda x: x + 1), "not freed"),
        (deleting_without_aliasing, "not in the buffer"),
        (lambda x: exercises.add_one(exercises.add_one(x)), "wrong result"),
    ]:
        assert_failed(probes.donation(step, state()), word)


# collectives


def by_numpy(name, values):
    """Returns the result of correct devices."""
    size, total = len(values), values.sum(0)
    return {"sum": np.stack([total] * size), "gather": np.stack([values] * size), "scatter": total}[name]


def test_collectives_run_in_the_groups_of_the_config_and_over_all_devices():
    parallel = ParallelConfig(data=2, fsdp=2, tensor=2)
    layouts = list(exercises.layouts_to_check(parallel, jax.devices(), 1))
    sizes = [(axis, layout.mesh.shape[axis]) for layout, axis in layouts]
    assert sizes == [("data", 2), ("fsdp", 2), ("tensor_rep", 2), ("data", 8)]
    found = [doctor._collectives(layout, axis) for layout, axis in layouts]
    assert [one.verdict for one in found] == [PASSED] * 4
    assert "sum, gather, scatter on 8 devices are exact" in found[-1].found


def test_config_that_does_not_fit_these_devices_is_checked_over_all_of_them():
    layouts = exercises.layouts_to_check(ParallelConfig(data=1, tensor=16), jax.devices(), 16)
    assert [(axis, layout.mesh.shape[axis]) for layout, axis in layouts] == [("data", 8)]


def test_wrong_collective_fails_by_name():
    assert probes.collectives(by_numpy, size=4).verdict == PASSED
    for name in ("sum", "gather", "scatter"):

        def one_value_off(kind, values, name=name):
            result = by_numpy(kind, values).copy()
            result.flat[-1] += kind == name
            return result

        outcome = probes.collectives(one_value_off, size=4)
        assert_failed(outcome, f"{name}: wrong values")
        assert outcome.found.count(":") == 1


def test_collective_that_does_not_compile_fails_by_name_and_the_others_still_run():
    ran = []

    def no_gather(name, values):
        ran.append(name)
        if name == "gather":
            raise RuntimeError("NCC_EXCL001: replica groups\nmore")
        return by_numpy(name, values)

    assert_failed(probes.collectives(no_gather, size=4), "gather: RuntimeError: NCC_EXCL001: replica groups")
    assert ran == ["sum", "gather", "scatter"]


def test_collectives_that_mix_up_devices_are_caught():
    for run in [
        lambda name, values: values if name == "sum" else by_numpy(name, values),  # each returns its own array
        lambda name, values: by_numpy(name, values[:1].repeat(len(values), 0)),  # all receive the first array
        lambda name, values: by_numpy(name, bf16(values)),  # sent in bf16
    ]:
        assert_failed(probes.collectives(run, size=4))


def test_collective_wrong_in_one_mesh_group_fails(monkeypatch):
    parallel = ParallelConfig(data=4, tensor=2)
    layout = next(
        layout for layout, axis in exercises.layouts_to_check(parallel, jax.devices(), 2) if axis == "tensor_kv"
    )
    psum = jax.lax.psum
    monkeypatch.setattr(jax.lax, "psum", lambda x, axis: psum(x, axis) + (jax.lax.axis_index("data") == 3))
    outcome = probes.collectives(functools.partial(exercises.run_collective, layout=layout, axis="tensor_kv"), size=2)
    assert_failed(outcome, "on 2 devices sum: wrong values")


def test_collectives_of_one_device_are_not_testable():
    [(layout, axis)] = exercises.layouts_to_check(ParallelConfig(data=1), jax.devices()[:1], 8)
    assert doctor._collectives(layout, axis).verdict == NOT_HERE


def test_ring_takes_only_links_between_neighboring_chips():
    for count, target in [
        (1, "trn1"),
        (2, "trn1"),
        (8, "trn1"),
        (16, "trn1"),
        (32, "trn1"),
        (64, "trn2"),
        (128, "trn2-lnc1"),
        (5, ""),
    ]:
        order = partitioned.linked_ring(count, target=target)
        assert sorted(order) == list(range(count))
        if target and count > 1:
            pairs = np.stack([order, np.roll(order, -1)], axis=1)
            assert partitioned.permute_problem(pairs, target=target) is None
        if target == "trn1" and count == 32:  # in the order of their numbers, chip 3 would send to chip 4
            pairs = np.stack([np.arange(32), np.roll(np.arange(32), -1)], axis=1)
            assert "without a link" in partitioned.permute_problem(pairs, target=target)


def test_ring_that_the_chips_do_not_have_is_not_tested(monkeypatch, tmp_path):
    assert partitioned.linked_ring(24, target="trn1") is None
    monkeypatch.setattr(jax, "local_devices", lambda: jax.devices()[:1] * 24)
    outcome = doctor._ring(doctor.CheckedMachine("trn1n.32xlarge", 24, tmp_path))
    assert outcome.verdict == NOT_HERE
    assert "24 devices of trn1n.32xlarge" in outcome.found


def test_ring_of_a_node_is_that_of_its_lnc(monkeypatch, tmp_path):
    monkeypatch.setattr(jax, "local_devices", lambda: jax.devices()[:1] * 128)
    monkeypatch.setattr(probes, "ring_permute", lambda run, order: order)
    order = doctor._ring(doctor.CheckedMachine("trn2.48xlarge", 128, tmp_path, lnc=1))
    assert sorted(order) == list(range(128))
    assert doctor.CheckedMachine("trn2.3xlarge", 4, tmp_path).target == "trn2"


def neuron_devices(kind, count):
    """Returns stand-ins for the devices of one node."""
    client = PlannedClient("neuron", count)
    return [PlannedDevice(number, client, device_kind=kind) for number in range(count)]


def test_groups_of_a_node_are_placed_as_in_a_run():
    devices = neuron_devices("NC_v2", 32)
    layouts = {
        axis: layout for layout, axis in exercises.layouts_to_check(ParallelConfig(data=8, tensor=4), devices, 4)
    }
    assert sorted(layouts) == ["data", "tensor_kv"]
    groups = doctor._groups(layouts["tensor_kv"].mesh, ["tensor_kv"])
    assert groups.tolist() == [[first, first + 8, first + 16, first + 24] for first in range(8)]


def test_groups_that_the_table_refuses_are_not_run(monkeypatch):
    ran = []
    monkeypatch.setattr(probes, "collectives", lambda run, size: ran.append(size) or probes.Outcome(PASSED, ""))
    verdicts = {}
    for tensor in (8, 16):
        degrees = ParallelConfig(data=128 // tensor, tensor=tensor)
        for layout, axis in exercises.layouts_to_check(degrees, neuron_devices("NC_v3", 128), tensor):
            verdicts[axis, layout.mesh.shape[axis]] = doctor._collectives(layout, axis)
    assert verdicts["tensor_kv", 8].verdict == PASSED
    refused = verdicts["tensor_kv", 16]
    assert refused.verdict == NOT_HERE
    assert "excludes groups of 16 on trn2 at LNC 1" in refused.found
    assert refused.advice
    assert ran == [16, 8, 128, 8, 128], "all but the groups of 16"


def test_ring_permute_of_these_devices_passes_in_any_order():
    order = [0, 3, 1, 2, 7, 6, 4, 5]
    outcome = probes.ring_permute(functools.partial(exercises.run_permute, jax.devices()), order)
    assert outcome.verdict == PASSED, outcome


def test_wrong_permutes_are_caught():
    for run, words in [
        (lambda pairs, values: np.roll(values, 1, 0), ["backward: wrong values"]),  # one direction only
        (lambda pairs, values: values, ["forward", "backward"]),
        (lambda pairs, values: no_memory(0), ["forward: RuntimeError: RESOURCE_EXHAUSTED"]),
    ]:
        outcome = probes.ring_permute(run, range(4))
        assert_failed(outcome, *words)
        assert ("forward" in outcome.found) == ("forward" in " ".join(words))


# the cache of compiled programs


def test_cache_is_hit_by_the_second_process_start(tmp_path):
    outcome = probes.cache(exercises.run_in_new_process, tmp_path / "new")
    assert outcome.verdict == PASSED, outcome
    assert list((tmp_path / "new").iterdir()) == []


def faulty_start(*, hits=(0, 1), values=(1.0, 1.0), writes=True):
    calls = iter(range(2))

    def start(folder):
        call = next(calls)
        if writes:
            (folder / "program").write_text("x")
        return {"hits": hits[call], "compile_s": 1.0, "value": values[call]}

    return start


def full_disk(folder):
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize(
    ("start", "word"),
    [
        (faulty_start(writes=False), "wrote 0 files"),
        (faulty_start(hits=(1, 1)), "loaded 1 programs"),
        (faulty_start(hits=(0, 0)), "compiled again"),
        (faulty_start(values=(1.0, 1.5)), "computes 1.5"),
        (full_disk, "No space left"),
    ],
)
def test_broken_cache_fails(start, word, tmp_path):
    assert_failed(probes.cache(start, tmp_path), word)


def test_cache_path_that_is_a_file_fails(tmp_path):
    (tmp_path / "file").write_text("")
    assert_failed(probes.cache(faulty_start(), tmp_path / "file" / "cache"), "file")


# training


def trained(eval_loss, *losses):
    return lambda: short_training.TrainingResult(losses or (7.0, 6.0), eval_loss, 1, 2.0, 3.0)


def test_training_within_tolerance_passes():
    assert probes.training(trained(5.0), (4.9, 5.1)).verdict == PASSED


def test_training_outside_tolerance_fails():
    for train, word in [
        (trained(5.2), "expected 4.9 to 5.1"),
        (trained(4.0), "expected 4.9 to 5.1"),  # too low: targets leak, or the data differs
        (trained(float("nan")), "nan"),
        (trained(5.0, 7.0, float("nan"), 6.0), "not finite at step 2"),
    ]:
        assert_failed(probes.training(train, (4.9, 5.1)), word)


@pytest.mark.slow
@pytest.mark.parametrize("num_devices", [1, 3])
def test_short_training_uses_as_many_devices_as_divide_the_batch(num_devices, small):
    small.data.train = "package:austen_train.jsonl"
    small.data.validation = "package:austen_validation.jsonl"
    small.data.tokenizer = "package:austen_2k.model"
    small.model.vocab_size = 2048
    small.data.batch_size = 4
    small.data.max_document_chars = 2000
    small.train.num_steps = 12
    done = short_training.train(resolve(small), jax.devices()[:num_devices])
    assert done.num_devices == {1: 1, 3: 2}[num_devices]
    assert len(done.losses) == 12
    assert done.losses[-1] < done.losses[0] - 0.1
    assert done.eval_loss == pytest.approx(done.losses[-1], abs=0.5)


def test_short_training_config_is_tiny_with_the_precision_of_the_run():
    config = short_training.short_config(PrecisionConfig("bf16_sr", "software")).to_dict()
    changed = {
        f"{section}.{key}": config[section][key]
        for section, values in TINY.to_dict().items()
        if isinstance(values, dict)
        for key, value in values.items()
        if config[section][key] != value
    }
    assert changed == {
        "precision.policy": "bf16_sr",
        "precision.stochastic_rounding": "software",
        "train.num_steps": 160,
        "optimizer.horizon_steps": 160,
    }, "measure short_training.BAND again: python benchmarks/doctor_band.py"


# the command


def run_command(monkeypatch, outcomes, *words):
    rows = [doctor.Check(name, lambda outcome=outcome: outcome) for name, outcome in outcomes.items()]
    monkeypatch.setattr(doctor, "checks", lambda config, place: iter(rows))
    return doctor_command.main(list(words))


def test_report_ends_with_counts_of_passed_failed_and_not_testable(monkeypatch, capsys, tmp_path):
    outcomes = {
        "a": Outcome(PASSED, "fine"),
        "b": Outcome(FAILED, "bad", "fix it"),
        "c": Outcome(NOT_HERE, "no device"),
    }
    assert run_command(monkeypatch, outcomes, f"--json={tmp_path / 'r.json'}") == 1
    printed = capsys.readouterr().out
    assert "to do: fix it" in printed
    ends = [line.split() for line in printed.splitlines()[-4:]]
    assert ends[:3] == [["passed", "1", "a"], ["failed", "1", "b"], ["not", "testable", "here", "1", "c"]]
    assert "No Trainium device was checked." in printed
    assert run_command(monkeypatch, {"a": Outcome(PASSED, ""), "c": Outcome(NOT_HERE, "")}, "--config=7b") == 0
    report = json.loads((tmp_path / "r.json").read_text())
    assert [(row["check"], row["verdict"]) for row in report["checks"]] == [
        ("a", PASSED),
        ("b", FAILED),
        ("c", NOT_HERE),
    ]


def test_a_killed_compiler_is_explained():
    for message, is_killed in [
        ("[F137] neuronx-cc was forcibly killed", True),
        ("RuntimeError: neuronx-cc failed with -9", True),
        ("Subcommand returned with exitcode=-9", True),
        ("[F134] neuronx-cc terminated abnormally", False),
        ("neuronx-cc failed with -90", False),
    ]:

        def fail(message=message):
            raise RuntimeError(f"INTERNAL: {message}")

        outcome, _ = doctor.run_check(doctor.Check("training", fail))
        assert outcome.verdict == FAILED
        assert outcome.advice.startswith("neuronx-cc was killed") == is_killed


def test_a_probe_that_raises_counts_as_failed():
    outcome, seconds = doctor.run_check(doctor.Check("a", lambda: no_memory(0)))
    assert_failed(outcome, "RuntimeError: RESOURCE_EXHAUSTED")
    assert seconds >= 0


def test_checks_on_cpu_pass_or_are_not_testable(tmp_path):
    config = dataclasses.replace(TINY, precision=PrecisionConfig("bf16_sr"))
    skipped = {"training", "compile cache"}  # tested above, and too long for here
    rows = {
        check.name: doctor.run_check(check)[0]
        for check in doctor.checks(config, doctor.CheckedMachine("", 0, tmp_path))
        if check.name not in skipped
    }
    assert [name for name, outcome in rows.items() if outcome.verdict == FAILED] == []
    not_here = [name for name, outcome in rows.items() if outcome.verdict == NOT_HERE]
    assert not_here == ["versions for Neuron", "tools on PATH", "memory"]


def test_collectives_come_late_and_rows_out_of_bounds_last(tmp_path):
    names = [check.name for check in doctor.checks(TINY, doctor.CheckedMachine("", 0, tmp_path))]
    assert names[-4:] == ["along data", "ring permute", "training", "rows out of bounds"]


def test_every_check_is_reported_where_jax_finds_no_devices(monkeypatch, tmp_path):
    monkeypatch.setattr(jax, "local_devices", lambda: no_memory(0))
    names = {check.name: check for check in doctor.checks(TINY, doctor.CheckedMachine("", 0, tmp_path))}
    for name in ("devices", "ring permute"):
        assert_failed(doctor.run_check(names[name])[0], "RuntimeError: RESOURCE_EXHAUSTED")


def fake_machine(folder, instance="trn1.32xlarge"):
    (folder / "neuron0").touch()
    (folder / "product").write_text(f"{instance}\n")
    return Machine(folder, folder / "product")


def test_environment_on_a_trainium_node_is_that_of_the_run_and_keeps_computations_off_the_host(tmp_path):
    values = types.SimpleNamespace(instance="", cores=0)
    config = resolve(config_files.load("7b"))
    environ = {"NEURON_RUN_TRIVIAL_COMPUTATION_ON_CPU": "1"}
    place = doctor_command._prepare(config, values, environ, machine=fake_machine(tmp_path))
    assert place == {
        "instance": "trn1.32xlarge",
        "num_devices": 32,
        "lnc": 1,
        "cache": pathlib.Path(environ["JAX_COMPILATION_CACHE_DIR"]),
    }
    assert environ["JAX_PLATFORMS"] == "neuron,cpu"
    assert environ["NEURON_RT_STOCHASTIC_ROUNDING_EN"] == "1"  # 7b is bf16_sr
    assert "NEURON_RUN_TRIVIAL_COMPUTATION_ON_CPU" not in environ


def test_doctor_does_not_hold_devices_while_its_subprocesses_run():
    code = (
        "import pathlib, jax\n"
        "from jax._src import xla_bridge\n"
        "from hlat_jax.cli import config_files\n"
        "from hlat_jax.neuron import doctor, probes\n"
        "from hlat_jax.resolve import resolve\n"
        "tiny = resolve(config_files.load('tiny'))\n"
        "held = []\n"
        "probes.cache = lambda *_: held.append(xla_bridge.backends_are_initialized())\n"
        "for check in doctor.checks(tiny, doctor.CheckedMachine('', 0, pathlib.Path('x'))):\n"
        "    if check.name == 'devices': break\n"
        "    check.probe()\n"
        "assert held == [False]\n"
    )
    env = dict(os.environ, JAX_PLATFORMS="cpu")
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_rounding_of_casts_is_that_of_the_config(monkeypatch):
    by_device = dataclasses.replace(TINY, precision=PrecisionConfig("bf16_sr"))
    in_software = dataclasses.replace(TINY, precision=PrecisionConfig("bf16_sr", "software"))
    assert doctor._expected_rounding(by_device) == "nearest"  # of a CPU
    monkeypatch.setattr(jax, "default_backend", lambda: "neuron")
    assert doctor._expected_rounding(by_device) == "stochastic"
    assert doctor._expected_rounding(in_software) == "nearest"
