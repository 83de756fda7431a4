"""Programs that others have seen compute wrong numbers: right on CPU, and each fault is found."""

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from refusals import assert_names

from hlat_jax.cli import config_files
from hlat_jax.neuron import child, doctor, numerics
from hlat_jax.neuron.probes import FAILED, NOT_HERE, PASSED, UNUSED, Outcome
from hlat_jax.neuron.rules import RULES
from hlat_jax.resolve import resolve


def by_reciprocal(x):
    """As seen on trn1: quotients by an fp32 reciprocal."""
    right = numerics.PROGRAMS["integer division"][0]()[0](x)
    quotient = np.floor(x.astype(np.float32) * np.float32(1 / 6284)).astype(np.int32)
    return right | {"by 6284": np.stack([quotient, x - 6284 * quotient])}


def in_halves(name):
    """As seen on trn2 at LNC 2: each half of the rows without the rows before it."""

    def run(x, *others):
        program = jax.jit(numerics.PROGRAMS[name][0]()[0])
        halves = [program(half, *others) for half in np.split(x, 2)]
        return {part: np.concatenate([half[part] for half in halves]) for part in halves[0]}

    return run


def with_part(name, part, fault):
    """The right results but for one part."""

    def run(*arguments):
        results = jax.jit(numerics.PROGRAMS[name][0]()[0])(*arguments)
        return results | {part: fault(np.asarray(results[part]), *arguments)}

    return run


def halo_lost(x_TD, taps_KD):
    results = numerics.PROGRAMS["shift of rows"][0]()[0](x_TD, taps_KD)
    middle = x_TD.shape[0] // 2
    return {part: np.asarray(rows) * (np.arange(len(rows)) != middle)[:, None] for part, rows in results.items()}


def without_rounding(x):
    return {"values rounded by a hash": ((x + 1) * 2).view(np.uint32) & 0xFFFF}


# check -> (faulty program, what is found)
FAULTS = {
    "integer division": (by_reciprocal, "by 6284"),
    "casts to bf16 and back": (without_rounding, "values rounded by a hash"),
    "index of NaN": (
        with_part("index of NaN", "ids of rows with NaN", lambda valid, *_: np.arange(8) < 6),  # 2^32 - 1
        "ids of rows with NaN",
    ),
    "large table": (with_part("large table", "rows of 64.00 MiB", lambda rows, *_: 0 * rows), "rows of 64.00 MiB"),
    "shift of rows": (halo_lost, "a causal convolution, slices"),
    "cumulative sums": (in_halves("cumulative sums"), "associative_scan of int32, cumsum of fp32, cumsum of int32"),
    "masked softmax": (
        with_part("masked softmax", "finfo.min of bf16", lambda probs, *_: probs + np.nan),
        "finfo.min of bf16",
    ),
    "fp32 products": (
        lambda a, b: {"products of fp32 integers": jnp.matmul(jnp.bfloat16(a), jnp.bfloat16(b))},
        "products of fp32 integers",
    ),
}


@pytest.mark.parametrize("name", numerics.PROGRAMS)
def test_numbers_are_right_and_a_fault_seen_on_trainium_is_found(name):
    assert numerics.check(name).verdict == PASSED
    run, found = FAULTS[name]
    assert numerics.check(name, run=run)[:2] == (FAILED, f"wrong: {found}")


def test_rules_by_which_lint_finds_such_programs_exist():
    assert {rules for _, rules in numerics.PROGRAMS.values()} - {""} <= set(RULES)


def test_a_check_that_ends_its_process_does_not_end_the_others():
    sound = f"{numerics.__name__}:check:fp32 products"
    checks = [sound, "os:abort", "os:getcwd:argument", sound]
    found = [(check, outcome.verdict, outcome.found) for check, outcome in child.outcomes(checks, environ=os.environ)]
    assert [(check, verdict) for check, verdict, _ in found] == list(
        zip(checks, [PASSED, FAILED, FAILED, PASSED], strict=True)
    )
    assert "SIGABRT" in found[1][2]
    assert found[2][2].startswith("TypeError: ")


@pytest.mark.slow  # waits
def test_a_check_that_stops_is_ended_at_its_limit():
    checks = ["signal:pause", f"{numerics.__name__}:check:fp32 products"]
    found = [outcome for _, outcome in child.outcomes(checks, environ=os.environ, timeout_s=20)]
    assert [outcome.verdict for outcome in found] == [FAILED, PASSED]
    assert "20 s" in found[0].found


def test_without_a_backend_no_check_runs_and_one_line_says_why():
    environ = os.environ | {"JAX_PLATFORMS": "neuron"}
    found = [outcome for _, outcome in child.outcomes(["os:abort", "os:abort"], environ=environ)]
    assert [outcome.verdict for outcome in found] == [NOT_HERE] * 2
    assert_names(found[0].found, "'neuron'")


def test_a_fault_that_no_shipped_program_meets_does_not_fail_the_doctor():
    wrong = [(f"x:check:{name}", Outcome(FAILED, "wrong", "stop")) for name in numerics.PROGRAMS]
    found = {name: doctor._in_child({}, iter(wrong), name) for name in numerics.PROGRAMS}
    for name, (_, rules) in numerics.PROGRAMS.items():
        assert found[name].verdict == (UNUSED if rules else FAILED), name
        assert rules in found[name].advice


def test_the_child_runs_without_the_cache_of_jax(monkeypatch, tmp_path):
    given = {}
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(child, "outcomes", lambda checks, *, environ: given.update(environ) or iter(()))
    config = resolve(config_files.load("tiny"))
    next(name for name, _ in doctor.checks(config, instance="", num_devices=0, cache=tmp_path) if name == "devices")
    assert set(os.environ) - set(given) == {"JAX_COMPILATION_CACHE_DIR"}


@pytest.mark.slow  # a process that starts another
def test_programs_of_the_child_run_before_jax_starts_in_the_doctor():
    script = """if True:
        import pathlib
        from jax._src import xla_bridge
        from hlat_jax.cli import config_files
        from hlat_jax.neuron import doctor
        from hlat_jax.resolve import resolve
        checks = doctor.checks(resolve(config_files.load("tiny")), instance="", num_devices=0, cache=pathlib.Path("."))
        for name, probe in checks:
            if name == "devices":
                break
            outcome, _ = doctor.run_check(probe)
            assert not xla_bridge.backends_are_initialized(), name
        print(outcome.verdict, name)
    """
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stdout.split() == [PASSED, "devices"], done.stderr
