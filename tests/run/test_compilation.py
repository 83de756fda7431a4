"""The programs of a run: what changes a fingerprint and what does not, and what training compiles."""

import dataclasses
import math
import os
import pathlib
import re
import subprocess
import sys

import jax
import micro
import pytest
from planned import small_config

from hlat_jax.parallel.virtual_devices import planned_layout
from hlat_jax.program import make_program
from hlat_jax.resolve import resolve
from hlat_jax.run.compilation import Compilations, fingerprint, read_record, traced_programs

COMPILED = "/jax/core/compile/backend_compile_duration"
ONE = {"pipe": 1, "data": 1, "fsdp": 1, "tensor": 1}
PROGRAMS = ("train", "init", "norms", "eval", "decode")
# What changes between runs, of a seed, a schedule, a length or a folder: no program may depend on any of it.
FREE = {
    "optimizer.schedule": "linear",
    "optimizer.peak_lr": 1e-5,
    "optimizer.min_lr_ratio": 0.2,
    "optimizer.warmup_steps": 7,
    "optimizer.horizon_steps": 999,
    "train.num_steps": 12345,
    "train.seed": 17,
    "train.eval_every_steps": 3,
    "train.num_eval_batches": 3,
    "train.max_nonfinite_steps": 9,
    "train.profile_steps": "3:4",
    "train.sample_tokens": 5,  # within the one shape of samples
    "data.seed": 17,
    "data.shuffle": False,
    "data.train": "/elsewhere/text.jsonl",
    "checkpoint.every_steps": 3,
    "checkpoint.export_every_steps": 3,
    "metrics.log_every_steps": 3,
}
# key of the config, another value, the programs that it makes others: all the rest must stay as they are
TABLE = [
    ("data.packing", "documents", ("train", "eval")),
    ("train.num_microbatches", 2, ("train", "eval")),
    ("train.z_loss_weight", 1e-4, ("train",)),
    ("train.sample_tokens", 400, ("decode",)),
    ("optimizer.weight_decay", 0.2, ("train",)),
    ("precision.policy", "mixed", PROGRAMS),
    ("model.init_std", 0.01, ("init",)),
    ("model.rope_theta", 500.0, ("train", "eval", "decode")),
    ("model.remat", "full", ("train", "eval")),
]


def config_with(changed=()):
    """Returns a small config with all five programs; `changed` has values by the paths of their keys."""
    tree = small_config().to_dict()
    tree["model"]["max_positions"] = 1024
    tree["data"]["validation"] = "held_out.jsonl"
    tree["train"] |= {"sample_prompt": "It is", "sample_tokens": 4}
    for path, value in dict(changed).items():
        section, _, key = path.partition(".")
        tree[section][key] = value
    return resolve(tree)


def predicted(name, config, *, platform="neuron", degrees=ONE):
    """Returns the fingerprint of a program lowered for virtual devices."""
    config = dataclasses.replace(config, parallel=dataclasses.replace(config.parallel, **degrees))
    layout = planned_layout(config, math.prod(degrees.values()), platform=platform)
    return fingerprint(traced_programs(make_program(config, layout))[name]().lower(lowering_platforms=(platform,)))


def fingerprints(config):
    # Neuron has no program of init: its initial weights are drawn on the host
    return {name: predicted(name, config, platform="cpu" if name == "init" else "neuron") for name in PROGRAMS}


@pytest.fixture(scope="module")
def base():
    return fingerprints(config_with())


@pytest.mark.slow
def test_per_run_settings_do_not_change_fingerprints(base):
    defaults = config_with().to_dict()
    for path, value in FREE.items():
        section, _, key = path.partition(".")
        assert defaults[section][key] != value, path
    assert fingerprints(config_with(FREE)) == base


@pytest.mark.slow
def test_config_key_changes_exactly_the_expected_fingerprints(base):
    for path, value, programs in TABLE:
        changed = fingerprints(config_with({path: value}))
        assert {name for name in PROGRAMS if changed[name] != base[name]} == set(programs), path


@pytest.mark.slow
def test_fingerprints_do_not_depend_on_folder_or_source_lines(tmp_path):
    """A copy of the package elsewhere, its lines moved, in processes of other hash seeds, makes the same programs."""
    root = pathlib.Path(__file__).resolve().parents[2]
    (tmp_path / "hlat_jax").mkdir()
    for path in (root / "hlat_jax").rglob("*.py"):
        copy = tmp_path / path.relative_to(root)
        copy.parent.mkdir(parents=True, exist_ok=True)
        text = path.read_text()
        copy.write_text(text.replace("from __future__", "# moved\n# by two lines\nfrom __future__", 1))
    (tmp_path / "configs").symlink_to(root / "configs")
    found = []
    for seed, folder in (("1", root), ("2", tmp_path)):
        env = os.environ | {"PYTHONHASHSEED": seed, "PYTHONPATH": str(folder)}
        words = [sys.executable, "-m", "hlat_jax.neuron", "hlo", "--config=tiny", "--devices=2"]
        words.append("--config.parallel.tensor=2")
        printed = subprocess.run(words, env=env, cwd=folder, check=True, capture_output=True, text=True).stdout
        found.append(dict(re.findall(r"^(\w+) +([0-9a-f]{16}) ", printed, re.MULTILINE)))
    assert set(found[0]) == {*PROGRAMS, "digest", "start", "microbatch", "update"} - {"train", "init"}  # on Neuron
    assert found[0] == found[1]


@pytest.mark.slow
@pytest.mark.parametrize(("prompt", "more"), [("It is", []), ("It is " * 20, ["prefill"])], ids=["short", "long"])
def test_a_run_compiles_its_programs_once_each_and_nothing_else(prompt, more, tmp_path):
    c, compiled, workdir = micro.config(tmp_path, checkpoint__every_steps=2), [], tmp_path / "run"
    c.train.update(num_eval_batches=2, sample_prompt=prompt, sample_tokens=4)

    def on_compile_event(event, _, **about):
        if event == COMPILED:
            compiled.append(about["fun_name"])

    def train(num_steps):
        compiled.clear()
        c.train.num_steps = num_steps
        jax.monitoring.register_event_duration_secs_listener(on_compile_event)
        try:
            assert micro.train(c, workdir) == 0
        finally:
            jax.monitoring.unregister_event_duration_listener(on_compile_event)

    jax.clear_caches()
    train(3)
    names = sorted(["decode", "eval_step", "initial", "state_digest", "state_norms", "train_step", *more])
    assert sorted(compiled) == [f"jit({name})" for name in names]
    before = {name: entry["sha256"] for name, entry in read_record(workdir).items()}
    assert before == {name: predicted(name, resolve(c), platform="cpu") for name in (*PROGRAMS, "digest", *more)}
    train(7)  # resumed
    assert sorted(compiled) == [f"jit({name})" for name in names if name != "initial"]
    assert {name: entry["sha256"] for name, entry in read_record(workdir).items()} == before


def test_a_compiler_that_was_killed_is_explained(small, one_device, monkeypatch):
    compilations = Compilations(make_program(resolve(small), one_device))
    for text, kind, said in (
        ("[F137] neuronx-cc killed", OSError, "memory"),
        ("exitcode=70", jax.errors.JaxRuntimeError, "=70"),
    ):

        def fail(*_, text=text, **__):
            raise jax.errors.JaxRuntimeError(text)

        monkeypatch.setattr(jax.stages.Lowered, "compile", fail)
        with pytest.raises(kind, match=said):
            compilations.compile("norms")
