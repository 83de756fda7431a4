"""The trace of `train.profile_steps`: which steps it has, and what happens where it cannot be taken or is cut short."""

import re

import jax
import jax.numpy as jnp
from refusals import assert_names, refused

import configs
from hlat_jax.resolve import profiled_steps
from hlat_jax.run.profiling import StepTrace


def config(profile_steps):
    return configs.resolved(profile_steps=profile_steps, num_steps=20)


def test_only_steps_of_the_run_can_be_profiled():
    for value in ("10", ":13", "13:10", "0:3", "a:b", "1:2:3", "18:21", "1 : 2", "²:3"):
        with refused(f"train.profile_steps={value!r}", "FIRST:LAST", "train.num_steps=20"):
            config(value)
    assert list(profiled_steps(config("10:13").train)) == [10, 11, 12, 13]
    assert not profiled_steps(config("").train)


def test_a_resumed_run_traces_the_steps_that_are_left(tmp_path, capsys):
    for start_step, first, last in ((9, 10, 13), (11, 12, 13), (13, 0, 0)):
        trace = StepTrace(config("10:13"), tmp_path, start_step=start_step)
        assert (trace.first, trace.last) == (first, last)
        trace.close()
    [line] = capsys.readouterr().out.splitlines()
    assert_names(line, "train.profile_steps=10:13", "step 13")
    assert not list(tmp_path.iterdir())


def test_a_run_that_ends_early_writes_its_trace(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("NEURON_RT_INSPECT_OUTPUT_DIR", "/run/p")
    trace, other = (StepTrace(config("10:13"), tmp_path / name, start_step=0) for name in ("run", "other"))
    trace.start()
    other.start()
    other.close()
    jax.block_until_ready(jnp.ones(2) + 1)
    trace.close()
    not_started, written, _, tensorboard, profile = capsys.readouterr().out.splitlines()
    assert_names(tensorboard, f"--logdir={tmp_path / 'run'}")
    assert_names(profile, "neuron-explorer view -d /run/p")
    assert not_started.startswith("trace ")  # a profiler that is in use ends no run
    path = re.search(r"step 10: (\S+)$", written)[1]
    assert path.startswith(str(tmp_path / "run/tensorboard/plugins/profile"))
    assert (tmp_path / "run" / path).exists()
    assert not (tmp_path / "other").exists()
