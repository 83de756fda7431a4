"""Every setting is read, nothing unknown passes, and every shipped config resolves to what is written down.

    PYTHONPATH=. python tests/spine/test_config.py

writes `tests/support/golden/configs.json` again after an intended change.
"""

import collections
import contextlib
import dataclasses
import functools
import io
import json
import pathlib
import sys
from typing import Any
from unittest import mock

import jax
import micro
import numpy as np
import pytest
import sentencepiece
from safetensors.numpy import save_file

from hlat_jax import config as config_lib
from hlat_jax import train
from hlat_jax.cli import config_files
from hlat_jax.cli.flags import config_words
from hlat_jax.data import loader as loader_lib
from hlat_jax.data.held_out import open_held_out
from hlat_jax.data.loader import TrainBatches
from hlat_jax.data.tokenizer import Tokenizer
from hlat_jax.host import neuron_env
from hlat_jax.host.neuron_topology import Topology
from hlat_jax.ops.choices import choices
from hlat_jax.optimizer import learning_rate
from hlat_jax.parallel.sharding import make_layout
from hlat_jax.parallel.virtual_devices import planned_layout
from hlat_jax.program import make_program
from hlat_jax.resolve import resolve
from hlat_jax.run.compilation import RECORD_FILE
from hlat_jax.run.machine import fitting_program
from hlat_jax.run.nonfinite import NonFiniteError
from hlat_jax.store.typed_json import read_json
from hlat_jax.weights.hf_config import config_json
from hlat_jax.weights.hf_names import expected_shapes

pytestmark = pytest.mark.xdist_group("config")  # its fixtures are costly: one process
GOLDEN = pathlib.Path(__file__).resolve().parents[1] / "support" / "golden" / "configs.json"
SHIPPED = sorted(path.stem for path in config_files.config_folder().glob("*.py"))


# What can be observed of a config. Each function takes the mutable config and a folder of its own.


def program(c, _):
    """The text of the lowered training step on one device."""
    return _lowered(c, jax.devices()[:1])


def program_8(c, _):
    """The text of the lowered training step on eight devices."""
    return _lowered(c, jax.devices())


def _lowered(c, devices):
    config = resolve(c)
    return make_program(config, make_layout(config.parallel, devices)).trace_step().lower().as_text()


def placement(c, _):
    """The mesh of eight devices and where each part of the state lies on it, or why not."""
    config = resolve(c)
    try:
        program = fitting_program(config, jax.devices())
    except ValueError as error:
        return str(error)
    return program.layout.mesh.shape, jax.tree.map(lambda leaf: leaf.sharding.spec, program.abstract_state)


def weights(c, _):
    """The bytes of the initial weights."""
    config = resolve(c)
    state = make_program(config, make_layout(config.parallel, jax.devices()[:1])).init_state()
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(state["params"])]


def rates(c, _):
    """The learning rates of the first hundred updates."""
    return [learning_rate(step, resolve(c).optimizer) for step in range(100)]


def batches(c, _):
    """The first training batches and all validation batches."""
    data = resolve(c).data
    tokenizer = Tokenizer(data.tokenizer)
    loader = TrainBatches(data, tokenizer=tokenizer)
    held_out, _ = open_held_out(data, tokenizer=tokenizer, num_batches=2)
    found = [next(loader)[0] for _ in range(4)] + [batch for source in held_out.values() for batch in source.batches]
    loader.close()
    return [batch.tokens.tobytes() for batch in found]


def reads_ahead(c, _):
    """How the loader reads ahead; what that does is in tests/data."""
    data = resolve(c).data
    with mock.patch.object(loader_lib, "_RowPrefetcher", wraps=loader_lib._RowPrefetcher) as made:
        loader = TrainBatches(data, tokenizer=Tokenizer(data.tokenizer))
        next(loader)
        loader.close()
    return [call.kwargs for call in made.call_args_list]


def refusal(c, _, check=lambda config: None):
    """What `resolve`, or `check` of what it returns, says against it; "" when nothing."""
    try:
        check(resolve(c))
    except ValueError as error:
        return str(error)
    return ""


def refusal_on_trn1(c, folder):
    """The same of the implementations of a run on one device of trn1."""
    return refusal(c, folder, lambda config: choices(config, planned_layout(config, 1, platform="neuron", chip="trn1")))


def neuron_flags(c, _):
    """The flags of neuronx-cc for a run on a trn2.48xlarge."""
    config = resolve(c)
    flags, place = config.train.compiler_flags, Topology("trn2.48xlarge")
    return neuron_env.environment(config.precision, config.parallel, place, current={}, config_flags=flags).variables


def run(c, folder):
    """What a whole run leaves and prints, timings apart: part -> what is seen there, each of few settings."""
    config = resolve(c)
    stdout, error, one = io.StringIO(), "", jax.devices()[:1]
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(stdout):
        patch.setattr(jax, "devices", lambda *_: one)
        patch.setitem(sys.modules, "wandb", None)  # as if it were not installed
        try:
            train.train(config, folder)
        except (ValueError, NonFiniteError) as caught:
            error = str(caught)
    printed = stdout.getvalue().splitlines()
    written = micro.rows(folder) if not error or "steps in a row" in error else []
    rows = [micro.exact(row) for row in written]
    evaluated = [row for row in rows if "eval_loss" in row]
    files = {path.name for path in folder.rglob("*")}
    return {
        "rows": [error, *rows],
        "sources": [key for row in written for key in row if key.startswith("source_")],
        "steps": [row["step"] for row in rows if "loss" in row],
        "losses": [row["loss"] for row in rows if "loss" in row][:3],
        "evaluations": [row["step"] for row in evaluated],
        "evaluated": [row["eval_tokens"] for row in evaluated[:1]],
        "samples": [line for line in printed if line.startswith("sample ")],
        "range": [
            "expected" in line and "within" not in line for line in printed if line.startswith("validation loss")
        ],
        "progress": [line.split()[0] for line in printed if "%" in line],
        "monitor": [line for line in printed if line.startswith("neuron-monitor")],
        "checkpoints": micro.saved_steps(folder),
        "copied": [line for line in printed if line.startswith("copied ")] != [],
        "programs": sorted(read_json(folder / RECORD_FILE)) if (folder / RECORD_FILE).exists() else [],
        **{name: name in files for name in ("tensorboard", "loss.png", "huggingface", "positions", "profile")},
    }


@dataclasses.dataclass(frozen=True)
class Row:
    """One field, set to `value`: which observer must see it, and the part of what it returns, and what else is set."""

    value: Any
    seen_in: Any
    part: str = ""
    given: dict = dataclasses.field(default_factory=dict)
    group: str = ""  # of fields that are set at once, in one run


in_run = functools.partial(Row, seen_in=run)
LONG_ROWS = {"model.max_positions": 512, "data.seq_len": 512}  # more than one chunk of the loss
LLAMA3 = {"model.rope_scaling": "llama3"}
YARN = {"model.rope_scaling": "yarn"}
SHORT_DOCUMENTS = {"data.train": "FOLDER/two.jsonl", "data.validation": ""}
TWO_SOURCES = {"data.train": "a=package:austen_train.jsonl;b=FOLDER/two.jsonl", "data.validation": ""}
TWO_SOURCES |= {"data.mixture": "a=1,b=1"}
MUON = {"optimizer.name": "muon"}
WSD = {"optimizer.schedule": "wsd", "optimizer.cooldown_steps": 5}
DIVERGING = {"optimizer.peak_lr": 1e30, "optimizer.warmup_steps": 1, "train.num_steps": 7}
FIELDS = {
    "model.vocab_size": Row(4096, program),
    "model.num_layers": Row(3, program),
    "model.embed_dim": Row(48, program),
    "model.mlp_dim": Row(64, program),
    "model.num_heads": Row(2, program),
    "model.num_kv_heads": Row(4, program),
    "model.head_dim": Row(16, program),
    "model.max_positions": Row(16, refusal),
    "model.norm_eps": Row(1e-6, program),
    "model.rope_theta": Row(5e5, program),
    "model.rope_scaling": Row("llama3", program),
    "model.rope_factor": Row(4.0, program, given=LLAMA3),
    "model.rope_low_freq_factor": Row(2.0, program, given=LLAMA3),
    "model.rope_high_freq_factor": Row(8.0, program, given=LLAMA3),
    "model.rope_original_positions": Row(4096, program, given=LLAMA3),
    "model.rope_beta_fast": Row(1024.0, program, given=YARN),
    "model.rope_beta_slow": Row(4.0, program, given=YARN),
    "model.rope_attention_factor": Row(2.0, program, given=YARN),
    "model.qkv_bias": Row(True, program),
    "model.out_bias": Row(True, program),
    "model.qk_norm": Row(True, program),
    "model.sliding_window": Row(8, program),
    "model.sliding_window_layers": Row("2:2", program, given={"model.sliding_window": 8}),
    "model.tie_embeddings": Row(True, program),
    "model.fuse_qkv": Row(False, program),
    "model.init_std": Row(0.03, weights),
    "model.depth_scaled_init": Row(False, weights),
    "model.layer_loop": Row("unroll", program),
    "model.remat": Row("full", program, given={"model.remat": "none"}),
    "model.attention": Row("einsum", program, given={"model.attention": "blocked"}),
    "model.cross_entropy": Row("chunked", program, given=LONG_ROWS | {"model.cross_entropy": "dense"}),
    "model.allow_nki_on_trn1": Row(True, refusal_on_trn1, given=LONG_ROWS | {"model.attention": "nki"}),
    "parallel.pipe": Row(2, placement),
    "parallel.data": Row(2, placement, given={"parallel.data": 1, "parallel.fsdp": -1}),
    "parallel.fsdp": Row(2, placement),
    "parallel.context": Row(2, program_8),
    "parallel.tensor": Row(2, placement),
    "parallel.zero1": Row(True, placement),
    "parallel.reduce_gradients": Row("microbatch", program_8),
    "parallel.bucket_bytes": Row(4096, program_8),
    "parallel.pipe_exchange": Row("all_gather", program_8, given={"parallel.pipe": 2}),
    "parallel.sequence_parallel": Row(True, program_8, given={"parallel.tensor": 2}),
    "precision.policy": Row("mixed", program),
    "precision.simulate": Row("neuron", program, given={"precision.policy": "bf16"}),
    "precision.stochastic_rounding": Row("software", refusal),
    "optimizer.name": Row("muon", program),
    "optimizer.schedule": Row("linear", rates),
    "optimizer.peak_lr": Row(2e-2, rates),
    "optimizer.min_lr_ratio": Row(0.2, rates),
    "optimizer.warmup_steps": Row(5, rates),
    "optimizer.horizon_steps": Row(50, rates),
    "optimizer.cooldown_steps": Row(10, rates, given=WSD),
    "optimizer.cooldown": Row("sqrt", rates, given=WSD),
    "optimizer.beta1": Row(0.8, program),
    "optimizer.beta2": Row(0.9, program),
    "optimizer.eps": Row(1e-6, program),
    "optimizer.weight_decay": Row(0.2, program),
    "optimizer.decay": Row("matrices", program),
    "optimizer.clip_norm": Row(2.0, program),
    "optimizer.muon_beta": Row(0.9, program, given=MUON),
    "optimizer.muon_lr_ratio": Row(2.0, program, given=MUON),
    "data.train": Row("package:austen_validation.jsonl", batches),
    "data.validation": Row("package:austen_train.jsonl", batches),
    "data.text_field": Row("body", batches, given=SHORT_DOCUMENTS),
    "data.tokenizer": Row("FOLDER/other.model", batches),
    "data.batch_size": Row(16, batches),
    "data.seq_len": Row(16, batches),
    "data.packing": Row("documents", batches, given=SHORT_DOCUMENTS),
    "data.mixture": Row("a=1,b=9", batches, given=TWO_SOURCES),
    "data.window_documents": Row(1, batches, given=SHORT_DOCUMENTS | {"data.packing": "documents"}),
    "data.on_bad_record": in_run("skip", part="rows", given={"data.train": "FOLDER/bad.jsonl"}),
    "data.prepend_bos": Row(True, batches),
    "data.max_document_chars": Row(100, batches),
    "data.shuffle": Row(False, batches),
    "data.seed": Row(5, batches),
    "data.num_threads": Row(1, reads_ahead),
    "data.prefetch_batches": Row(2, reads_ahead),
    "train.num_steps": in_run(5, part="steps", group="b"),
    "train.seed": Row(1, weights),
    "train.init_from": in_run("FOLDER/start", part="losses", group="b"),
    "train.branch_from": Row("runs/micro@99", refusal),  # what it does is in test_branch
    "train.num_microbatches": Row(2, program),
    "train.compiler_flags": Row("--optlevel=2", neuron_flags),
    "train.accumulate": in_run("programs", part="programs", group="a"),
    "train.z_loss_weight": Row(1e-4, program),
    "train.eval_every_steps": in_run(3, part="evaluations", group="a"),
    "train.num_eval_batches": in_run(3, part="evaluated", group="a"),
    # what these do is in test_harness
    "train.early_stop_evals": Row(1, refusal, given={"train.eval_every_steps": 0}),
    "train.eval_tasks": Row("any", refusal, given={"train.eval_tasks_limit": 2}),
    "train.eval_tasks_every_steps": Row(2, refusal),
    "train.eval_tasks_limit": Row(2, refusal),
    "train.eval_tasks_folder": Row("FOLDER/tasks", refusal),
    # without a save, which ends a run at the first state that is not finite
    "train.max_nonfinite_steps": in_run(2, part="rows", given=DIVERGING | {"checkpoint.every_steps": 0}),
    "train.check_devices_every_steps": in_run(2, part="programs"),
    "train.spikes": Row("skip", program),
    "train.spike_sigmas": Row(7.0, program, given={"train.spikes": "warn"}),
    "train.spike_window": Row(64, program, given={"train.spikes": "warn"}),
    "train.skip_steps": in_run("2:3", part="losses", group="a"),
    "train.eval_loss_low": in_run(19.0, part="range", given={"train.eval_loss_high": 20.0}, group="b"),
    "train.eval_loss_high": in_run(1.0, part="range", group="a"),
    "train.sample_prompt": in_run("It is", part="samples", group="a"),
    "train.sample_every_steps": in_run(1, part="samples", given={"train.sample_prompt": "It is"}),
    "train.sample_tokens": in_run(3, part="samples", given={"train.sample_prompt": "It is"}, group="b"),
    "train.profile_steps": in_run("2:3", part="profile", group="b"),
    "checkpoint.every_steps": in_run(2, part="checkpoints"),
    "checkpoint.every_minutes": in_run(1e-9, part="checkpoints", given={"checkpoint.every_steps": 0}),
    "checkpoint.keep_last": in_run(1, part="checkpoints", group="a"),
    "checkpoint.keep_every_steps": in_run(1, part="checkpoints"),
    "checkpoint.keep_best": in_run(True, part="checkpoints", given={"checkpoint.every_steps": 0}),
    "checkpoint.export_every_steps": in_run(4, part="huggingface", group="a"),
    "checkpoint.copy_to": in_run("FOLDER/copies", part="copied"),
    "metrics.log_every_steps": in_run(1, part="progress", group="a"),
    "metrics.console": in_run("off", part="progress", group="b"),
    "metrics.tensorboard": in_run(True, part="tensorboard", group="a"),
    "metrics.wandb_project": in_run("novels", part="rows"),
    "metrics.plot": in_run(True, part="loss.png", group="a"),
    "metrics.layer_norms": Row(True, program),
    "metrics.source_losses_every_steps": in_run(2, part="sources"),
    "metrics.neuron_monitor": in_run("on", part="monitor", group="a"),
}


@pytest.fixture(scope="module")
def observed(tmp_path_factory):
    """A function (settings, observer) -> what is observed, remembered."""
    folder = tmp_path_factory.mktemp("config")
    _write_inputs(folder)
    seen = {}

    def observe(settings, observer):
        key = (observer.__name__, *sorted(settings.items()))
        if key not in seen:
            seen[key] = observer(_base(settings, folder), folder / f"run{len(seen)}")
        return seen[key]

    return observe


def _base(settings, folder):
    c = micro.config(folder, data__batch_size=8, checkpoint__every_steps=1)
    c.train.update(num_steps=4, eval_every_steps=2, num_eval_batches=2, sample_tokens=2)
    c.metrics.update(console="on", log_every_steps=2, tensorboard=False)
    placed = {path: value.replace("FOLDER", str(folder)) for path, value in settings.items() if isinstance(value, str)}
    c.update_from_flattened_dict(settings | placed)
    return c


def _write_inputs(folder):
    model = resolve(micro.config(folder)).model
    (folder / "start").mkdir()
    (folder / "start/config.json").write_text(json.dumps(config_json(model, dtype="float32", token_ids={})))
    tensors = {name: np.full(shape, 0.01, np.float32) for name, shape in expected_shapes(model).items()}
    save_file(tensors, folder / "start/model.safetensors")
    texts = [f"Document {number} is of another kind." for number in range(20)]
    rows = [json.dumps({"text": text, "body": text[::-1]}) for text in texts]
    (folder / "two.jsonl").write_text("\n".join(rows) + "\n")
    (folder / "bad.jsonl").write_text("\n".join([*rows, '{"text": null}']) + "\n")
    with open(folder / "other.model", "wb") as file:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(texts), model_writer=file, vocab_size=300, byte_fallback=True,
            hard_vocab_limit=False, minloglevel=2,
        )  # fmt: skip


OBSERVERS = {row.seen_in.__name__: row.seen_in for row in FIELDS.values()}


@pytest.mark.quick_cases("refusal", "rates", "placement")
@pytest.mark.parametrize("observer", OBSERVERS)
def test_every_config_field_has_an_effect(observer, observed):
    groups, without = collections.defaultdict(dict), []
    for path, row in FIELDS.items():
        if row.seen_in is OBSERVERS[observer]:
            groups[row.group or path][path] = row
    for rows in groups.values():
        given = {key: value for row in rows.values() for key, value in row.given.items()}
        changes = {path: row.value for path, row in rows.items()}
        plain, changed = (observed(settings, OBSERVERS[observer]) for settings in (given, given | changes))
        for path, row in rows.items():
            a, b = (plain[row.part], changed[row.part]) if row.part else (plain, changed)
            without += [f"{path}={row.value!r} changes nothing in {observer} {row.part}"] * (a == b)
    assert not without


def test_config_table_covers_every_field_exactly():
    fields = {f"{name}.{f.name}" for name, cls in config_lib.SECTIONS.items() for f in dataclasses.fields(cls)}
    assert set(FIELDS) == fields
    assert {f.name for f in dataclasses.fields(config_lib.Config)} == {"name", *config_lib.SECTIONS}
    tree = config_lib.default().to_dict()
    assert {f"{section}.{key}" for section in config_lib.SECTIONS for key in tree[section]} == fields


COMMAND_LINE_ERRORS = [
    ([], "--config=NAME is missing"),
    (["--config=tinny"], "--config=tinny is not a shipped config, nor a path that ends in .py. Did you mean 'tiny'?"),
    (["--config=tiny", "--config", "7b"], "--config is given 2 times, but a run has one config."),
    (["--init_from=a", "--init_from=b"], "initial weights are given 2 times. Give one --init_from."),
    (["--init_from=a", "--config.train.init_from=b"], "initial weights are given 2 times"),
    (["--config=tiny", "--config.optimizer.peek_lr=1"], "no key --config.optimizer.peek_lr. Did you mean '--config.o"),
    (
        ["--config=tiny", "--config.optimizer.lr=1"],
        "optimizer.lr. Did you mean '--config.optimizer.peak_lr'?",
    ),
    (["--config=tiny", "--config.train.steps=1"], "Did you mean '--config.train.num_steps'?"),
    (["--config=tiny", "--lr=1"], "unknown flag --lr. Did you mean '--config.optimizer.peak_lr'?"),
    (["--config=tiny", "--config.optimizer.peak_lr=nan"], "optimizer.peak_lr=nan must be finite."),
    (["--config=tiny", "--config.train.eval_loss_low=nan"], "train.eval_loss_low=nan must be finite."),
    (["--config=tiny", "--config.data=1"], "--config.data is a section. Set one of its keys: "),
    (["--config=tiny", "--config.model.layer_loop=scam"], "is not one of auto, scan, unroll. Did you mean 'scan'?"),
    (["--config=tiny", "--config.optimizer.peak_lr=fast"], "peak_lr=fast must be a number, such as 0.1 or 3e-4."),
    (["tiny"], "--config=NAME is missing. Did you mean --config=tiny?"),
    (["--config=tiny", "--seed=1"], "Did you mean '--config.data.seed' or '--config.train.seed'?"),
    (["--config=tiny", "--config.train.z_loss_weight=inf"], "train.z_loss_weight=inf must be finite."),
    (["--config=tiny", "--workdri=x"], "unknown flag --workdri. Did you mean '--workdir'?"),
]


def test_help_names_every_key_and_errors_the_nearest(train_here):
    code, out, _ = train_here("--help")
    assert code == 0
    assert all(word in out for word in (*SHIPPED, *FIELDS, "--workdir", "--print_config"))
    for words, message in COMMAND_LINE_ERRORS:
        code, _, err = train_here(*words)
        [line] = [line for line in err.splitlines() if line.startswith("error: ")]
        assert (code, message in line) == (2, True), (words, message, line)


def test_words_of_the_config_include_the_weights_to_begin_with():
    words = ["--config", "tiny", "--nodes=2", "--init_from", "runs/a", "-init_from=b"]
    assert config_words(words) == ["--config=tiny", "--init_from=runs/a", "--init_from=b"]


FILE_ERRORS = [
    ("c.model.num_layer = 3", "mine.py: config has no key model.num_layer. Did you mean 'num_layers'?"),
    ("c.optimizer.lr = 1e-3", "mine.py: config has no key optimizer.lr. Did you mean 'peak_lr'?"),
    ("c.modle = 3", "mine.py: config has no section 'modle'. Did you mean 'model'?"),
    ("c.model.num_layers = True", "mine.py: model.num_layers=True has type bool, but must have type int."),
    ("print(c.data.trian)", "mine.py, line 5, `print(c.data.trian)`: "),
    ("c.model.num_layers = 'three'", "mine.py, line 5, `c.model.num_layers = 'three'`: TypeError: "),
    ("c.model.num_layers = (3", "mine.py, line 5, `c.model.num_layers = (3`: SyntaxError: '(' was never closed"),
    ("return", "get_config() returns None. End it with `return c`, the config that it edits."),
]


def test_config_file_with_an_error_is_an_error_of_one_line_with_its_line(train_here, tmp_path):
    before = "from hlat_jax.config import default\n\ndef get_config():\n    c = default()\n"
    for number, (edit, message) in enumerate(FILE_ERRORS):
        path = tmp_path / str(number) / "mine.py"
        path.parent.mkdir()
        path.write_text(f"{before}    {edit}\n    return c\n")
        code, _, err = train_here(f"--config={path}", f"--workdir={tmp_path / 'run'}")
        [line] = err.splitlines()
        assert (code, line.startswith("error: "), message in line) == (2, True, True), (edit, message, line)


def test_paths_of_a_config_file_are_relative_to_it_and_else_to_the_working_directory(tmp_path, monkeypatch):
    beside = tmp_path / "with [signs]"
    beside.mkdir()
    here, pattern = f"{tmp_path}/here.txt", str(beside).replace("[", "[[]") + "/*.txt"
    expected = {
        ("data.train", "one.txt"): f"{beside}/one.txt",
        ("data.validation", "a=one.txt, here.txt ;b=*.txt,no.txt,/an/absolute.txt"): (
            f"a={beside}/one.txt,{here};b={pattern},{beside}/no.txt,/an/absolute.txt"
        ),
        ("data.tokenizer", "package:austen_2k.model"): "package:austen_2k.model",
        ("train.init_from", "runs/a"): f"{tmp_path}/runs/a",
        ("train.branch_from", "runs/b@300"): f"{beside}/runs/b@300",
        ("train.eval_tasks_folder", "~/tasks"): "~/tasks",
    }
    lines = "".join(f"    c.{key} = {given!r}\n" for key, given in expected)
    (beside / "paths.py").write_text(micro.CONFIG.replace("    return c\n", f"{lines}    return c\n"))
    for path in (beside / "one.txt", tmp_path / "one.txt", tmp_path / "here.txt"):
        path.write_text("text")
    (tmp_path / "runs" / "a").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    c = config_files.load("with [signs]/paths.py")
    for (path, _), absolute in expected.items():
        section, key = path.split(".")
        assert c[section][key] == absolute
    assert config_files.load("160m").data.train == "data/corpus/train.jsonl"  # shipped ones have no place of their own
    assert config_files.load(str(config_files.config_folder() / "160m.py")).data.train == "data/corpus/train.jsonl"


def test_text_paths_of_a_command_line_become_absolute(train_here, tmp_path, monkeypatch):
    here = tmp_path / "of [mine]"
    here.mkdir()
    monkeypatch.chdir(here)
    of_others = "s3://bucket/a.txt,package:austen_train.jsonl,/an/absolute.txt,~/a.txt"
    code, out, err = train_here("--config=160m", "--config.data.train=my_book.txt", "--print_config")
    assert code == 0, err
    assert json.loads(out[: out.index("\n}\n") + 2])["data"]["train"] == f"{here}/my_book.txt"
    for given, absolute in (
        ("my_book.txt", f"{here}/my_book.txt"),
        ("texts/*.txt,more", f"{tmp_path}/of [[]mine]/texts/*.txt,{here}/more"),
        ("web=a.txt;code = b.txt, c.txt", f"web={here}/a.txt;code ={here}/b.txt,{here}/c.txt"),
        (of_others, of_others),
        ("5%", "5%"),
        ("", ""),
    ):
        c = config_files.load("tiny")
        c.data.update(train=given, validation=given, tokenizer="package:austen_2k.model")
        c.train.init_from = "runs/a"
        config_files.make_text_paths_absolute(c)
        assert (c.data.train, c.data.validation, c.data.tokenizer) == (absolute, absolute, "package:austen_2k.model")
        assert c.train.init_from == "runs/a"  # is not recorded with text: processes must agree on it


def test_run_name_that_is_not_a_folder_name_is_refused():
    c = config_files.load("tiny")
    for name in ("../x", "/x", "a/b", "..", ".", "", ".x", "-x", "a\n", "a\0", "a" * 256):
        c.name = name
        with pytest.raises(ValueError, match=r"^config\.name="):
            resolve(c)
    for name in ("7b v1.5_lr=3e-4", "a"):
        c.name = name
        assert resolve(c).name == name


def golden():
    """Returns what the golden file holds: every value of the default, and of each shipped config those that differ."""

    def flat(c):
        tree = resolve(c).to_dict()
        keys = {f"{name}.{key}": value for name in config_lib.SECTIONS for key, value in tree[name].items()}
        return {"name": tree["name"], **keys}

    found, default = {}, flat(config_lib.default())
    for name in SHIPPED:
        values = flat(config_files.load(name)).items()
        found[name] = {key: value for key, value in values if repr(value) != repr(default[key])}
    return json.dumps({"default": default, **found}, indent=2) + "\n"


def test_configs_shipped_resolve_to_the_golden_file():
    again = "If that is meant: PYTHONPATH=. python tests/spine/test_config.py"
    assert GOLDEN.read_text() == golden(), again


if __name__ == "__main__":
    GOLDEN.write_text(golden())
