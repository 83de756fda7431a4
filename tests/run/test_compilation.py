"""The programs of a run: what changes a fingerprint and what does not, what training compiles, and why it is new."""

import collections
import dataclasses
import json
import os
import pathlib
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from micro import write_config
from planned import small_config

from hlat_jax import loop, program
from hlat_jax.cli import config_files, flags
from hlat_jax.model import init_params
from hlat_jax.neuron import changes
from hlat_jax.neuron.programs_command import _cached
from hlat_jax.ops.dialect import Op
from hlat_jax.ops.registry import OPS
from hlat_jax.program import make_program
from hlat_jax.resolve import resolve
from hlat_jax.run.compilation import RECORD_FILE, Compilations, recorded
from hlat_jax.run.fingerprint import fingerprint

COMPILED = "/jax/core/compile/backend_compile_duration"
ONE = changes.Placement("neuron", {"pipe": 1, "data": 1, "fsdp": 1, "tensor": 1})
PROGRAMS = ("train", "init", "norms", "eval", "prefill", "decode")
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
    "train.eval_tasks": "any",
    "train.eval_tasks_every_steps": 3,
    "train.eval_tasks_limit": 3,
    "train.eval_tasks_folder": "/elsewhere/tasks",
    "train.max_nonfinite_steps": 9,
    "train.profile_steps": "3:4",
    "train.branch_from": "/elsewhere/run@3",
    "train.sample_tokens": 5,  # within the one shape of samples
    "data.seed": 17,
    "data.shuffle": False,
    "data.train": "/elsewhere/text.jsonl",
    "data.validation": "/elsewhere/held_out.jsonl",
    "data.tokenizer": "/elsewhere/some.model",
    "data.mixture": "a=1",
    "data.num_threads": 9,
    "checkpoint.every_steps": 3,
    "checkpoint.export_every_steps": 3,
    "metrics.log_every_steps": 3,
}
# key of the config, another value, the programs that it makes others: all the rest must stay as they are
TABLE = [
    ("data.batch_size", 16, ("train", "eval")),
    ("data.seq_len", 8, ("train", "eval")),
    ("data.packing", "documents", ("train", "eval")),
    ("train.num_microbatches", 2, ("train", "eval")),
    ("train.z_loss_weight", 1e-4, ("train",)),
    ("train.sample_tokens", 400, ("prefill", "decode")),
    ("optimizer.beta1", 0.8, ("train",)),
    ("optimizer.eps", 1e-6, ("train",)),
    ("optimizer.weight_decay", 0.2, ("train",)),
    ("optimizer.decay", "matrices", ("train",)),
    ("optimizer.clip_norm", 0.0, ("train",)),
    ("precision.policy", "mixed", PROGRAMS),
    ("model.num_layers", 2, PROGRAMS),
    ("model.mlp_dim", 96, PROGRAMS),
    ("model.init_std", 0.01, ("init",)),
    ("model.rope_theta", 500.0, ("train", "eval", "prefill", "decode")),
    ("model.remat", "full", ("train", "eval")),
    ("model.layer_loop", "scan", ("train", "eval", "prefill", "decode")),
]


def config_with(changed=()):
    """Returns a small config with all six programs; `changed` has values by the paths of their keys."""
    tree = small_config().to_dict()
    tree["model"]["max_positions"] = 1024
    tree["data"]["validation"] = "held_out.jsonl"
    tree["train"] |= {"sample_prompt": "It is", "sample_tokens": 4}
    for path, value in dict(changed).items():
        section, _, key = path.partition(".")
        tree[section][key] = value
    return resolve(tree)


def fingerprints(config, place=ONE):
    return {name: changes.program_fingerprint(name, config, place).sha256 for name in PROGRAMS}


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


@pytest.mark.quick_cases("optimizer.eps=1e-06", "optimizer.weight_decay=0.2")
@pytest.mark.parametrize(("path", "value", "programs"), TABLE, ids=[f"{path}={value}" for path, value, _ in TABLE])
def test_config_key_changes_exactly_the_expected_fingerprints(base, path, value, programs):
    changed = fingerprints(config_with({path: value}))
    assert {name for name in PROGRAMS if changed[name] != base[name]} == set(programs)


@pytest.mark.quick_cases("cpu-{}", "neuron-{'data': 2}")
@pytest.mark.parametrize(
    ("platform", "degrees"),
    [("cpu", {}), ("neuron", {"data": 2}), ("neuron", {"tensor": 2}), ("neuron", {"fsdp": 2}), ("neuron", {"pipe": 2})],
    ids=str,
)
def test_platform_and_mesh_change_the_fingerprint_of_the_step(base, platform, degrees):
    config = config_with({"train.num_microbatches": 2})
    place = changes.Placement(platform, ONE.degrees | degrees)
    assert (
        changes.program_fingerprint("train", config, place).sha256
        != changes.program_fingerprint("train", config, ONE).sha256
    )


@pytest.mark.slow
def test_fingerprints_do_not_depend_on_hash_seed_folder_or_source_lines(tmp_path):
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
        out = tmp_path / f"{seed}.json"
        words = ["programs", "--config=tiny", "--devices=2", "--config.parallel.tensor=2", f"--json={out}"]
        subprocess.run([sys.executable, "-m", "hlat_jax.neuron", *words], env=env, cwd=folder, check=True)
        found.append({name: one["sha256"] for name, one in json.loads(out.read_text())["programs"].items()})
    assert set(found[0]) == {*PROGRAMS, "start", "microbatch", "update"} - {"train"}  # on Neuron
    assert found[0] == found[1]


@pytest.mark.quick_cases("1")
@pytest.mark.parametrize("num_devices", [1, 8])
def test_virtual_devices_give_the_fingerprints_of_real_ones(num_devices):
    from hlat_jax.parallel.degrees import layout_over

    config = config_with()
    real = layout_over(config, jax.devices()[:num_devices])
    compilations = Compilations(make_program(config, real))
    for name in ("init", "eval"):
        compilations.compiled(name)
    place = changes.Placement("cpu", real.degrees)
    entries = compilations._entries
    assert {name: entry["sha256"] for name, entry in entries.items()} == {
        name: changes.program_fingerprint(name, config, place).sha256 for name in entries
    }


def test_the_size_of_a_program_is_counted():
    def body(carry, x):
        return carry + x.sum(), carry * 2

    arguments = (jnp.zeros(()), jnp.zeros((3, 4, 5), jnp.bfloat16))
    lowered = jax.jit(lambda c, xs: jax.lax.scan(body, c, xs)).lower(*arguments)
    found = fingerprint(lowered)
    text = lowered.compiler_ir("stablehlo").operation.get_asm(print_generic_op_form=True)
    names = re.findall(r'"(\w+\.\w+)"[(]', text)
    held = ("builtin.module", "func.func", "func.return", "stablehlo.return")
    assert found.num_ops == sum(name not in held for name in names) > 10
    assert (found.module, found.num_arguments, found.argument_bytes) == ("jit__lambda", 2, 4 + 3 * 4 * 5 * 2)


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A function that trains the micro config for some steps on one device: the programs that JAX compiled, by name."""
    one = jax.devices()[:1]
    monkeypatch.setattr(loop.jax, "devices", lambda: one)
    path = write_config(tmp_path)

    def train(**changed):
        c = config_files.load(str(path))
        c.train.num_eval_batches = 2
        c.train.sample_prompt = "It is"
        c.train.sample_tokens = 4
        c.train.num_steps = 3
        c.checkpoint.every_steps = 2
        c.update_from_flattened_dict({key.replace("__", "."): value for key, value in changed.items()})
        compiled = []

        def on_compile_event(event, _, **about):
            if event == COMPILED:
                compiled.append(about["fun_name"])

        jax.monitoring.register_event_duration_secs_listener(on_compile_event)
        try:
            assert loop.train(resolve(c), tmp_path / "run") == 0
        finally:
            jax.monitoring.unregister_event_duration_listener(on_compile_event)
        return compiled, resolve(c), tmp_path / "run"

    return train


@pytest.mark.slow
def test_a_run_compiles_its_programs_once_each_and_nothing_else(run):
    jax.clear_caches()
    compiled, config, workdir = run()
    names = ("decode", "eval_step", "initial", "prefill", "state_norms", "train_step")
    assert sorted(compiled) == [f"jit({name})" for name in names]
    place = changes.Placement("cpu", ONE.degrees)
    for name, entry in recorded(workdir).items():
        assert entry["sha256"] == changes.program_fingerprint(name, config, place).sha256, name
    assert set(recorded(workdir)) == set(PROGRAMS)


@pytest.mark.slow
def test_a_run_builds_its_program_once_and_chooses_each_implementation_once(run, monkeypatch):
    """New, then resumed: validation, samples, checkpoints and their norms all take the same program."""
    built, chosen = [], collections.Counter()
    training_program, choose = program.training_program, Op.choose

    def counted_program(*args, **options):
        built.append(options["options"])
        return training_program(*args, **options)

    def counted_choice(op, name, platform, **options):
        chosen[op.key] += options.get("call") is not None  # of the calls of a run; a model alone has none
        return choose(op, name, platform, **options)

    monkeypatch.setattr(program, "training_program", counted_program)
    monkeypatch.setattr(Op, "choose", counted_choice)
    for num_steps in (3, 5):
        built.clear()
        chosen.clear()
        run(train__num_steps=num_steps)
        assert len(built) == 1
        assert chosen == {op.key: 1 for op in OPS.values()}


@pytest.mark.slow
def test_resumed_run_compiles_no_other_program(run):
    _, _, workdir = run()
    before = {name: entry["sha256"] for name, entry in recorded(workdir).items()}
    compiled, _, _ = run(train__num_steps=7)
    names = ("decode", "eval_step", "prefill", "state_norms", "train_step")
    assert sorted(compiled) == [f"jit({name})" for name in names]
    assert {name: entry["sha256"] for name, entry in recorded(workdir).items()} == before


@pytest.mark.slow
def test_batch_of_another_shape_raises_instead_of_recompiling(run, monkeypatch):
    """Were the steps jitted and not compiled ahead, this would train on and compile one program more."""
    step = loop._step

    def short(run, progress, batch):
        rows = slice(0, 2) if progress.step == 2 else slice(None)
        step(run, progress, dataclasses.replace(batch, batch=jax.tree.map(lambda field: field[rows], batch.batch)))

    monkeypatch.setattr(loop, "_step", short)
    with pytest.raises(TypeError, match="compiled"):
        run()


@pytest.mark.slow
def test_initial_weights_come_from_the_rbg_key_of_the_seed(one_device):
    config = config_with({"train.seed": 2**31 + 5})
    key = jax.random.key(2**31 + 5, impl="rbg")
    expected = jax.jit(lambda: init_params(config.model, key))()
    jax.tree.map(np.testing.assert_array_equal, make_program(config, one_device).init_state()["params"], expected)


@pytest.fixture
def programs(monkeypatch, capsys):
    """A function of the words of the command that returns (exit code, what it printed, error)."""
    from hlat_jax.neuron import __main__ as commands

    def command(*words):
        monkeypatch.setattr("sys.argv", ["hlat_jax", "programs", *map(str, words)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as exit_:
            flags.main(commands.main)
        printed = capsys.readouterr()
        return exit_.value.code, printed.out, printed.err

    return command


@pytest.mark.slow
def test_compile_command_reports_unchanged_and_new_programs(run, programs, tmp_path):
    _, _, workdir = run()
    words = [f"--config={tmp_path / 'micro.py'}", "--platform=cpu", "--devices=1", f"--workdir={workdir}"]
    words += ["--config.train.sample_prompt=It is", "--config.train.sample_tokens=4"]
    out = tmp_path / "programs.json"
    code, text, _ = programs(*words, f"--json={out}")
    found = json.loads(out.read_text())["programs"]
    assert code == 0
    assert {name: one["since"] for name, one in found.items()} == dict.fromkeys(PROGRAMS, "the same")
    assert all(one["sha256"] in text for one in found.values())

    changed = [*words, "--config.optimizer.peak_lr=1e-3", "--config.data.batch_size=8", "--config.optimizer.beta1=0.5"]
    _, text, _ = programs(*changed, f"--json={out}")
    found = json.loads(out.read_text())["programs"]
    batch, beta = "batch: data.batch_size 4 -> 8", "config: optimizer.beta1 0.9 -> 0.5"
    assert sorted(found["train"]["why"]) == [batch, beta]
    assert found["eval"]["why"] == [batch]
    assert found["init"]["since"] == found["decode"]["since"] == "the same"
    assert batch in text

    edited = recorded(workdir)
    of_train = edited["train"]["config"]  # as a version wrote it that had other names for two keys
    of_train["data"]["weights"], of_train["model"]["tuned"] = (
        of_train["data"].pop("mixture"),
        of_train["model"].pop("ops_table"),
    )
    edited["train"] |= {"sha256": "0" * 16, "code": edited["train"]["code"] | {"step.py": "another"}}
    edited["train"]["libraries"] = edited["train"]["libraries"] | {"optax": "0.0.1"}
    (workdir / RECORD_FILE).write_text(json.dumps(edited))
    programs(*words, f"--json={out}")
    [libraries, files] = json.loads(out.read_text())["programs"]["train"]["why"]
    assert libraries.startswith("code: optax 0.0.1 -> ")
    assert files == "code: step.py"

    programs(*words[:1], "--devices=2", *words[3:], f"--json={out}")
    why = json.loads(out.read_text())["programs"]["eval"]["why"]
    assert why[0] == "platform: cpu -> neuron"
    assert why[1].startswith("mesh: pipe 1 x data 1 x fsdp 1 x tensor 1 -> pipe 1 x data 2")


@pytest.mark.quick_cases("[1]")
@pytest.mark.parametrize("text", ['{"train": 1}', '{"train": {"sha256": "a"}}', "[1]", '{"train": {"sha'])
def test_invalid_record_is_treated_as_missing(text, programs, tmp_path):
    (tmp_path / RECORD_FILE).write_text(text)
    assert recorded(tmp_path) == {}
    code, printed, _ = programs("--config=tiny", "--devices=1", f"--workdir={tmp_path}")
    assert code == 0
    assert "has no programs.json" in printed


def test_cache_state_is_known_only_from_a_matching_record(tmp_path):
    now = {"sha256": "a", "libraries": {"jax": "1"}, "platform": "cpu", "module": "jit_step"}
    recorded_then = now | {"cache": str(tmp_path)}
    assert _cached(now, recorded_then, str(tmp_path)) == "no"
    (tmp_path / "jit_step-0123-cache").touch()
    assert _cached(now, recorded_then, str(tmp_path)) == "yes"
    for other in (None, recorded_then | {"sha256": "b"}, recorded_then | {"cache": "/elsewhere"}):
        assert _cached(now, other, str(tmp_path)) == "not known"
    assert _cached(now | {"libraries": {"jax": "2"}}, recorded_then, str(tmp_path)) == "not known"


@pytest.mark.parametrize(("text", "is_killed"), [("[F137] neuronx-cc killed", True), ("exitcode=70", False)])
def test_a_compiler_that_was_killed_is_explained(text, is_killed, small, one_device, monkeypatch):
    def fail(*_, **__):
        raise jax.errors.JaxRuntimeError(text)

    compilations = Compilations(make_program(resolve(small), one_device))
    monkeypatch.setattr(jax.stages.Lowered, "compile", fail)
    with pytest.raises(OSError if is_killed else jax.errors.JaxRuntimeError, match="memory" if is_killed else text):
        compilations.compiled("norms")
