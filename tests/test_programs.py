"""The programs of a run: what changes a fingerprint and what does not, what training compiles, and why it is new."""

import json
import os
import pathlib
import subprocess
import sys

import jax
import pytest
from micro import write_config
from planned import small_config

from hlat_jax import config as config_lib
from hlat_jax import loop
from hlat_jax.compilation import Compilations, recorded, traced_programs
from hlat_jax.neuron import changes
from hlat_jax.planner.trace import planned_layout

COMPILED = "/jax/core/compile/backend_compile_duration"
ONE = changes.Place("neuron", {"pipe": 1, "data": 1, "fsdp": 1, "tensor": 1})
PROGRAMS = ("train", "init", "eval", "generate")
# What changes between runs, of a seed, a schedule, a length or a folder: no program may depend on any of it.
FREE = {
    "optimizer.peak_lr": 1e-5,
    "optimizer.min_lr_ratio": 0.2,
    "optimizer.warmup_steps": 7,
    "optimizer.horizon_steps": 999,
    "train.num_steps": 12345,
    "train.seed": 17,
    "train.eval_every_steps": 3,
    "train.num_eval_batches": 3,
    "train.max_nonfinite_steps": 9,
    "train.sample_tokens": 5,  # within the one shape of samples
    "data.seed": 17,
    "data.shuffle": False,
    "data.train": "/elsewhere/text.jsonl",
    "data.validation": "/elsewhere/held_out.jsonl",
    "data.tokenizer": "/elsewhere/some.model",
    "data.weights": "a=1",
    "data.num_threads": 9,
    "checkpoint.every_steps": 3,
    "metrics.log_every_steps": 3,
}
# key of the config, another value, the programs that it makes others: all the rest must stay as they are
TABLE = [
    ("data.batch_size", 16, ("train", "eval")),
    ("data.seq_len", 8, ("train", "eval")),
    ("data.packing", "documents", ("train", "eval")),
    ("train.num_microbatches", 2, ("train",)),
    ("train.z_loss_weight", 1e-4, ("train",)),
    ("train.sample_tokens", 400, ("generate",)),
    ("optimizer.beta1", 0.8, ("train",)),
    ("optimizer.eps", 1e-6, ("train",)),
    ("optimizer.weight_decay", 0.2, ("train",)),
    ("optimizer.decay", "matrices", ("train",)),
    ("optimizer.clip_norm", 0.0, ("train",)),
    ("precision.policy", "mixed", PROGRAMS),
    ("model.num_layers", 2, PROGRAMS),
    ("model.mlp_dim", 96, PROGRAMS),
    ("model.init_std", 0.01, ("init",)),
    ("model.rope_theta", 500.0, ("train", "eval", "generate")),
    ("model.remat", "full", ("train",)),
    ("model.layer_loop", "unroll", ("train", "eval", "generate")),
]


def config_with(changed=()):
    """Returns a small config with all four programs; `changed` has values by the paths of their keys."""
    tree = small_config().to_dict()
    tree["model"]["max_positions"] = 1024
    tree["data"]["validation"] = "held_out.jsonl"
    tree["train"] |= {"sample_prompt": "It is", "sample_tokens": 4}
    for path, value in dict(changed).items():
        section, _, key = path.partition(".")
        tree[section][key] = value
    return config_lib.resolve(tree)


def fingerprints(config, place=ONE):
    return {name: changes.program(name, config, place).sha256 for name in PROGRAMS}


@pytest.fixture(scope="module")
def base():
    return fingerprints(config_with())


def test_what_changes_from_run_to_run_changes_no_fingerprint(base):
    defaults = config_with().to_dict()
    for path, value in FREE.items():
        section, _, key = path.partition(".")
        assert defaults[section][key] != value, path
    assert fingerprints(config_with(FREE)) == base


@pytest.mark.parametrize(("path", "value", "programs"), TABLE, ids=[f"{path}={value}" for path, value, _ in TABLE])
def test_a_key_changes_the_fingerprints_that_it_should_and_no_other(base, path, value, programs):
    changed = fingerprints(config_with({path: value}))
    assert {name for name in PROGRAMS if changed[name] != base[name]} == set(programs)


@pytest.mark.parametrize(
    ("platform", "degrees"),
    [("cpu", {}), ("neuron", {"data": 2}), ("neuron", {"tensor": 2}), ("neuron", {"fsdp": 2}), ("neuron", {"pipe": 2})],
    ids=str,
)
def test_platform_and_mesh_change_the_fingerprint_of_the_step(base, platform, degrees):
    config = config_with({"train.num_microbatches": 2})
    place = changes.Place(platform, ONE.degrees | degrees)
    assert changes.program("train", config, place).sha256 != changes.program("train", config, ONE).sha256


def test_fingerprints_do_not_depend_on_hash_seeds_or_folders_or_lines(tmp_path):
    """A copy of the package elsewhere, its lines moved, in processes of other hash seeds, makes the same programs."""
    root = pathlib.Path(__file__).resolve().parent.parent
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
        out = tmp_path / f"{seed}.json"
        words = ["programs", "--config=tiny", "--devices=2", "--config.parallel.tensor=2", f"--json={out}"]
        subprocess.run([sys.executable, "-m", "hlat_jax.neuron", *words], env=env, cwd=folder, check=True)
        found.append({name: one["sha256"] for name, one in json.loads(out.read_text())["programs"].items()})
    assert set(found[0]) == set(PROGRAMS)
    assert found[0] == found[1]


@pytest.mark.parametrize("num_devices", [1, 8])
def test_devices_that_do_not_exist_give_the_fingerprints_of_those_that_do(num_devices):
    from hlat_jax.degrees import layout_over

    config = config_with()
    real = layout_over(config, jax.devices()[:num_devices])
    compilations = Compilations(config, real)
    for name in ("init", "eval"):
        compilations.compiled(name)
    place = changes.Place("cpu", real.degrees)
    entries = compilations._entries
    assert {name: entry["sha256"] for name, entry in entries.items()} == {
        name: changes.program(name, config, place).sha256 for name in entries
    }


def test_the_size_of_a_program_is_counted():
    config = config_with()
    step = changes.program("train", config, ONE)
    layout = planned_layout(config, 1, platform="neuron")
    text = traced_programs(config, layout)["train"]().lower(lowering_platforms=("neuron",)).as_text()
    lines = [line.strip() for line in text.splitlines()]
    computing = [line for line in lines if " = " in line and not line.startswith(("module", "sdy.mesh"))]
    assert step.module == "jit_train_step"
    # a line of the text is an operation; the arguments of a loop are written with " = " too
    assert 0 <= len(computing) - step.num_ops <= 4
    state_and_batch = jax.tree.leaves(traced_programs(config, layout)["train"]().in_avals)
    assert step.num_arguments <= len(state_and_batch)


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A function that trains the micro config for some steps on one device: the programs that JAX compiled, by name."""
    one = jax.devices()[:1]
    monkeypatch.setattr(loop.jax, "devices", lambda: one)
    path = write_config(tmp_path)

    def train(**changed):
        c = config_lib.load(str(path))
        c.train.num_eval_batches = 2
        c.train.sample_prompt = "It is"
        c.train.sample_tokens = 4
        c.train.num_steps = 3
        c.checkpoint.every_steps = 2
        c.update_from_flattened_dict({key.replace("__", "."): value for key, value in changed.items()})
        compiled = []

        def heard(event, _, **about):
            if event == COMPILED:
                compiled.append(about["fun_name"])

        jax.monitoring.register_event_duration_secs_listener(heard)
        try:
            assert loop.train(config_lib.resolve(c), tmp_path / "run") == 0
        finally:
            jax.monitoring.unregister_event_duration_listener(heard)
        return compiled, config_lib.resolve(c), tmp_path / "run"

    return train


def test_a_run_compiles_its_programs_once_each_and_nothing_else(run):
    jax.clear_caches()
    compiled, config, workdir = run()
    assert sorted(compiled) == ["jit(eval_step)", "jit(initial)", "jit(next_logits)", "jit(train_step)"]
    place = changes.Place("cpu", ONE.degrees)
    for name, entry in recorded(workdir).items():
        assert entry["sha256"] == changes.program(name, config, place).sha256, name
    assert set(recorded(workdir)) == set(PROGRAMS)


def test_a_run_that_goes_on_compiles_no_other_program(run):
    run()
    before = recorded(run()[2])
    compiled, _, workdir = run(train__num_steps=7, optimizer__peak_lr=2e-2, train__eval_every_steps=2)
    assert sorted(compiled) == ["jit(eval_step)", "jit(next_logits)", "jit(train_step)"]
    after = recorded(workdir)
    assert {name: entry["sha256"] for name, entry in after.items()} == {
        name: entry["sha256"] for name, entry in before.items()
    }
