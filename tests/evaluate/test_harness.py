"""Our model in the LM Evaluation Harness against the harness's own backend for Hugging Face, on one exported model.

Tasks are local files; nothing is fetched. Both compute in fp32: log-likelihoods agree within 1e-3 nats (sums over up to
100 tokens), accuracies and texts exactly.
"""

import contextlib
import functools
import io
import json
import math
import os
import random
import shutil
import types
from unittest import mock

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest

pytest.importorskip("lm_eval", reason="pip install 'hlat_jax[eval]'")
pytest.importorskip("accelerate", reason="the harness's own backend needs it")

import hf_models
import jax
import lm_eval
import micro
import numpy as np
import transformers
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from lm_eval.tasks._yaml_loader import load_yaml
from local_tasks import NAMES, write_tasks
from refusals import assert_names, assert_refused, refused

from hlat_jax.cli import config_files
from hlat_jax.config import ParallelConfig
from hlat_jax.data.tokenizer import Tokenizer
from hlat_jax.evaluate import __main__ as evaluate_command
from hlat_jax.evaluate import lm_eval_compat, suites
from hlat_jax.evaluate.harness import HarnessModel
from hlat_jax.evaluate.in_training import TasksInTraining
from hlat_jax.evaluate.model_type import ModelType
from hlat_jax.evaluate.tasks import Tasks
from hlat_jax.generate.inference import open_model
from hlat_jax.hf.exporting import export_checkpoint
from hlat_jax.hf.importing import import_checkpoint
from hlat_jax.resolve import resolve
from hlat_jax.weights.hf_files import begins_texts_with_bos
from hlat_jax.weights.hf_reading import open_checkpoint
from hlat_jax.weights.trained import open_weights

pytestmark = pytest.mark.usefixtures("one_torch_thread")
TOKENIZER = "package:austen_2k.model"


@pytest.fixture(autouse=True)
def local_tasks_alone(monkeypatch):
    """Listing the thousands that come with the harness takes seconds."""
    monkeypatch.setattr(lm_eval_compat, "TaskManager", functools.partial(TaskManager, include_defaults=False))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with the tasks, `imported` (weights of ours) and `exported` (the same for transformers)."""
    folder = tmp_path_factory.mktemp("harness")
    write_tasks(folder)
    source, tokenizer = folder / "source", Tokenizer(TOKENIZER)
    sizes = {"vocab_size": tokenizer.vocab_size, "max_position_embeddings": 64, "eos_token_id": tokenizer.eos_id}
    hf_models.save(hf_models.model(transformers.LlamaConfig(**hf_models.SMALL | sizes)), source)
    shutil.copy(tokenizer.path, source / "tokenizer.model")
    (source / "tokenizer_config.json").write_text(json.dumps(tokenizer.transformers_config()))
    import_checkpoint(open_checkpoint(source), folder / "imported")
    export_checkpoint(open_weights(folder / "imported"), folder / "exported")
    return folder


def ours(folder, *, name="imported", **degrees):
    trained = open_model(str(folder / name), ParallelConfig(**degrees))
    return HarnessModel(trained, batch_size=2)


def results(model, folder):
    manager = TaskManager(include_path=str(folder), include_defaults=False)
    return lm_eval.simple_evaluate(model=model, tasks=NAMES, task_manager=manager, bootstrap_iters=0)


@pytest.fixture(scope="module")
def of_hugging_face(folder):
    """What the harness's own backend finds; as its other models, ours begins a text without context with EOS."""
    eos = Tokenizer(TOKENIZER).eos_id
    return results(HFLM(str(folder / "exported"), device="cpu", batch_size=3, prefix_token_id=eos), folder)


def answers(found, task):
    """Returns what a model answered, a list for each document in order."""
    rows = sorted(found["samples"][task], key=lambda row: row["doc_id"])
    return [[answer for [answer] in row["resps"]] for row in rows]


@pytest.mark.slow
@pytest.mark.parametrize("degrees", [{}, {"tensor": 2, "data": 2}], ids=["one device", "mesh"])
def test_harness_model_matches_the_hugging_face_backend(degrees, folder, of_hugging_face):
    found = results(ours(folder, name="source" if degrees else "imported", **degrees), folder)
    for one, other in zip(answers(found, NAMES[0]), answers(of_hugging_face, NAMES[0]), strict=True):
        assert [score[0] for score in one] == pytest.approx([score[0] for score in other], abs=1e-3)
        assert [score[1] for score in one] == [score[1] for score in other]
    one, other = (answers(each, NAMES[1]) for each in (found, of_hugging_face))
    assert [total for [total] in one] == pytest.approx([total for [total] in other], abs=1e-3)
    texts = answers(of_hugging_face, NAMES[2])
    assert answers(found, NAMES[2]) == texts
    assert all(text for [text] in texts)
    for task in (NAMES[0], NAMES[2]):
        of_task = [{key: value for key, value in each["results"][task].items() if "stderr" not in key}
                   for each in (found, of_hugging_face)]  # fmt: skip
        assert of_task[0] == of_task[1]


def test_generation_ends_before_the_first_stop_sequence(folder):
    model = ours(folder)
    eos = model.eot_token_id

    def stream(prompts, **_):
        ids = model.tok_encode("one two. three four")
        yield from ([token, eos if step == 1 else None if step else ids[0]] for step, token in enumerate(ids))

    model._generator.stream = stream
    for stops, text in ((["four", "."], "one two"), (["ee f", "zzz"], "one two. thr")):
        asked = {"until": stops, "max_gen_toks": 32}
        assert model._continue_texts([[5], [6]], asked, first_number=0)[0] == text
    for asked, *facts in [
        ({"until": [], "max_gen_toks": 64}, "max_gen_toks=64", "model.max_positions=64"),
        ({"until": [], "max_gen_toks": 8, "num_beams": 2}, "generation_kwargs", "'num_beams'"),
    ]:
        with refused(*facts):
            model._continue_texts([[5]], asked, first_number=0)


def test_model_arguments_are_checked_by_name(tmp_path):
    (tmp_path / "checkpoints").mkdir()
    for words, *facts in [
        ("", "checkpoint=FOLDER"),
        ("checkpoint", "KEY=VALUE"),
        ("checkpoint=X,tensr=2", "--tensr", "--batch_size"),
        ("checkpoint=X,batch_size=auto", "batch_size=auto"),
        ("checkpoint=X,tensor=two", "config.parallel.tensor=two"),
        ("checkpoint=/no/such,trust_remote_code=True", "/no/such"),  # the harness adds an argument
    ]:
        with refused(*facts):
            ModelType.create_from_arg_string(words)


@pytest.mark.slow
def test_lm_eval_command_accepts_our_model_type(folder, monkeypatch, capsys, of_hugging_face):
    arguments = f"checkpoint={folder / 'source'},tokenizer={folder / 'source/tokenizer.model'},tensor=2"
    words = f"--model hlat_jax --model_args {arguments} --batch_size 4"
    words += f" --include_path {folder} --tasks local_choice"
    monkeypatch.setattr("sys.argv", [])
    monkeypatch.setattr("lm_eval.tasks.TaskManager", functools.partial(TaskManager, include_defaults=False))  # slow
    assert evaluate_command.main(["lm_eval", *words.split()]) == 0
    accuracy = of_hugging_face["results"]["local_choice"]["acc,none"]
    assert f"|acc|↑|{accuracy:g}|" in capsys.readouterr().out.replace(" ", "")


@pytest.fixture
def local_suite(monkeypatch):
    columns = (
        suites.Column("Both", 0, {"local_choice": "acc,none", "local_generation": "exact_match,none"}),
        suites.Column("Text", 2, {"local_rolling": "bits_per_byte,none"}),
    )
    suite = suites.Suite(columns, {"PAPER": (12.34, 56.78)}, ("a note",))
    monkeypatch.setitem(suites.SUITES, "local", suite)


@pytest.mark.slow
def test_evaluate_prints_a_suite_beside_published_results(folder, local_suite, evaluate_here, tmp_path):
    out = tmp_path / "found.json"
    words = (f"--checkpoint={folder / 'imported'}", "--tasks=local", f"--tasks_folder={folder}", f"--json={out}")
    code, printed, error = evaluate_here(*words)
    assert code == 0, error
    found = json.loads(out.read_text())
    assert found["n-shot"] == {"local_choice": 0, "local_generation": 0, "local_rolling": 2}
    results = found["results"]
    mean = 50 * (results["local_choice"]["acc,none"] + results["local_generation"]["exact_match,none"])
    rows = {line.split("  ")[0].strip(): line.split()[-2:] for line in printed.splitlines() if line}
    assert rows["PAPER"] == ["12.3", "56.8"]
    bits = 100 * results["local_rolling"]["bits_per_byte,none"]
    assert rows[str(folder / "imported")] == [f"{mean:.1f}", f"{bits:.1f}"]
    errors = [results["local_choice"]["acc_stderr,none"], results["local_generation"]["exact_match_stderr,none"]]
    assert rows["standard error"] == [f"{50 * math.hypot(*errors):.1f}", "–"]  # of bits per byte the harness gives none
    assert "a note" in printed


@pytest.mark.slow
def test_a_task_that_executes_code_is_refused_without_its_flag(folder, evaluate_here, tmp_path):
    write_tasks(tmp_path)
    text = (tmp_path / "local_generation.yaml").read_text()
    (tmp_path / "local_code.yaml").write_text(text.replace("local_generation", "local_code", 1) + "unsafe_code: true\n")
    words = [f"--checkpoint={folder / 'imported'}", "--tasks=local_code", f"--tasks_folder={tmp_path}", "--limit=1"]
    assert_refused(evaluate_here(*words), "local_code", "--allow_code")
    code, printed, error = evaluate_here(*words, "--allow_code")
    assert (code, "local_code" in printed) == (0, True), error


def test_evaluate_refuses_tasks_it_cannot_run(folder, local_suite, evaluate_here, monkeypatch):
    monkeypatch.setattr(lm_eval_compat, "evaluate", lambda **_: pytest.fail("scored"))
    for words, *facts in [
        (["--tasks=local_choise"], "'local_choise'", "local_choice,"),
        (["--tasks=local_choic"], "'local_choic'", "local_choice,"),
        (["--tasks=nosuch_task"], "python -m hlat_jax.evaluate lm_eval ls tasks --include_path "),
        (["--tasks=hlat", "--num_fewshot=3"], "--num_fewshot", "hlat"),
    ]:
        found = evaluate_here(f"--checkpoint={folder / 'imported'}", f"--tasks_folder={folder}", *words)
        assert_refused(found, *facts)


@pytest.mark.slow
def test_suites_name_existing_tasks_and_metrics():
    index = TaskManager().task_index
    for suite in suites.SUITES.values():
        for column in suite.columns:
            for task, figure in column.metrics.items():
                metric, name = figure.split(",")
                content = load_yaml(index[task].yaml_path, resolve_func=False)
                metrics = content.get("metric_list", content.get("aggregate_metric_list"))
                assert metric in [entry["metric"] for entry in metrics], task
                assert name in [entry["name"] for entry in content.get("filter_list", [{"name": "none"}])], task


@pytest.mark.slow
def test_tasks_in_training_match_evaluate_and_change_no_bit(folder, evaluate_here, tmp_path, monkeypatch):
    compiled, compiled_in_each = [], []

    def on_compile_event(event, _, **about):
        if event == "/jax/core/compile/backend_compile_duration":
            compiled.append(about["fun_name"])

    def evaluate(tasks, params, *, evaluate=TasksInTraining.__call__):
        compiled.clear()
        found = evaluate(tasks, params)
        compiled_in_each.append(list(compiled))
        return found

    def train(workdir, **settings):
        c = micro.config(tmp_path, model__max_positions=64, data__validation="", parallel__tensor=2)
        printed = io.StringIO()
        c.train.update(num_steps=3, **settings)
        c.checkpoint.every_steps, c.metrics.console = 2, "on"
        with monkeypatch.context() as patch, contextlib.redirect_stdout(printed):
            patch.setattr(TasksInTraining, "__call__", evaluate)
            assert micro.train(c, workdir, num_devices=2) == 0
        return micro.rows(workdir), printed.getvalue()

    settings = {"eval_tasks": "local_choice,local_rolling", "eval_tasks_folder": str(folder)}
    jax.monitoring.register_event_duration_secs_listener(on_compile_event)
    try:
        all_rows, printed = train(tmp_path / "run", **settings, eval_tasks_every_steps=2)
    finally:
        jax.monitoring.unregister_event_duration_listener(on_compile_event)
    assert "jit(score)" in compiled_in_each[0]
    assert compiled_in_each[1:] == [[], []]
    exact = [micro.exact(row) for row in all_rows if "loss" in row]
    assert exact == [micro.exact(row) for row in train(tmp_path / "plain")[0]]
    rows = {row["step"]: row for row in all_rows if "tasks/local_choice/acc" in row}
    assert list(rows) == [0, 2, 3]
    words = ("--tasks=local_choice,local_rolling", f"--tasks_folder={folder}", f"--json={tmp_path / 'found.json'}")
    code, _, error = evaluate_here(f"--checkpoint={tmp_path / 'run/checkpoints/2'}", *words)
    assert code == 0, error
    found = json.loads((tmp_path / "found.json").read_text())["results"]
    for metric in ("acc", "acc_norm"):
        assert rows[2][f"tasks/local_choice/{metric}"] == found["local_choice"][f"{metric},none"]
    for metric in ("word_perplexity", "byte_perplexity", "bits_per_byte"):
        # rows run together in other numbers, and on a mesh: sums in another order
        wanted = pytest.approx(found["local_rolling"][f"{metric},none"], rel=1e-4)
        assert rows[2][f"tasks/local_rolling/{metric}"] == wanted
        assert rows[0][f"tasks/local_rolling/{metric}"] != wanted
    [line] = [line for line in printed.splitlines() if line.startswith("       2  tasks: ")]
    assert f"local_choice/acc {rows[2]['tasks/local_choice/acc']:.4f}, " in line
    assert f"local_rolling/bits_per_byte {rows[2]['tasks/local_rolling/bits_per_byte']:.4f}" in line


@pytest.mark.slow
def test_tasks_are_evaluated_where_validations_end_a_run(folder, tmp_path):
    c = micro.config(tmp_path, model__max_positions=64, optimizer__peak_lr=0.3, optimizer__warmup_steps=8)
    c.train.update(eval_tasks="local_choice", eval_tasks_folder=str(folder), early_stop_evals=1, eval_every_steps=2)
    c.train.num_eval_batches = 1
    assert micro.train(c, tmp_path / "run") == 0
    steps = [[row["step"] for row in micro.rows(tmp_path / "run") if key in row] for key in ("eval_loss", "loss")]
    assert steps[0][-1] == steps[1][-1] < c.train.num_steps
    assert [row["step"] for row in micro.rows(tmp_path / "run") if "tasks/local_choice/acc" in row] == [0, steps[0][-1]]


def test_unknown_task_is_refused_before_creating_the_run_folder(folder, train_here, tmp_path):
    words = (f"--config={micro.write_config(tmp_path)}", f"--workdir={tmp_path / 'run'}")
    words += ("--config.train.eval_tasks=local_choise", f"--config.train.eval_tasks_folder={folder}")
    assert_refused(train_here(*words), "train.eval_tasks", "'local_choise'", "local_choice,")
    assert not (tmp_path / "run").exists()


def test_metric_failure_gives_no_results(folder, monkeypatch, capsys):
    overflow = mock.Mock(side_effect=OverflowError("overflow"))
    monkeypatch.setattr("hlat_jax.evaluate.tasks.Tasks.__call__", overflow)
    config = config_files.load("tiny")
    config.train.update(eval_tasks="local_choice", eval_tasks_folder=str(folder))
    tasks = TasksInTraining(resolve(config), layout=None, tokenizer=None)
    tasks._model = types.SimpleNamespace(use=lambda params: None)
    assert tasks(None) == ({}, [])
    assert_names(capsys.readouterr().out, "overflow")


@pytest.mark.slow
def test_a_shuffling_task_is_repeatable_and_leaves_random_alone(folder, tmp_path):
    write_tasks(tmp_path)
    with open(tmp_path / "local_rolling.yaml", "a") as file:
        file.write("process_docs: !function shuffled.shuffled\n")
    (tmp_path / "shuffled.py").write_text(
        "import random, numpy\n"
        "def shuffled(docs):\n"
        "    docs = docs.select(random.sample(range(len(docs)), len(docs)))\n"
        "    return docs.select(numpy.random.permutation(len(docs)))\n"
    )
    model = ours(folder)
    found = []
    for seed in range(2):
        shuffled = Tasks(["local_rolling"], limit=1, folder=str(tmp_path), standard_errors=False)
        random.seed(seed)
        before = random.getstate()
        found += [shuffled(model)["results"]["local_rolling"]["byte_perplexity,none"] for _ in range(2)]
        assert random.getstate() == before
    assert len(set(found)) == 1


@pytest.mark.slow
def test_bos_handling_matches_the_hugging_face_backend(folder, tmp_path):
    path = shutil.copytree(folder / "source", tmp_path / "source") / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"add_bos_token": True}))
    import_checkpoint(open_checkpoint(tmp_path / "source"), tmp_path / "imported")
    export_checkpoint(open_weights(tmp_path / "imported"), tmp_path / "exported")
    theirs = results(HFLM(str(tmp_path / "exported"), device="cpu", batch_size=3), folder)
    model = ours(tmp_path)
    found = results(model, folder)
    assert model.tok_encode("It")[0] == model.prefix_token_id == Tokenizer(TOKENIZER).bos_id
    for task in NAMES[:2]:
        scores = [[np.ravel(score)[0] for score in one] for one in answers(found, task)]
        wanted = [[np.ravel(score)[0] for score in one] for one in answers(theirs, task)]
        assert scores == [pytest.approx(one, abs=1e-3) for one in wanted]
    plain = results(HarnessModel(open_model(str(tmp_path / "imported"), ParallelConfig()), bos=False), folder)
    assert answers(plain, NAMES[1]) != answers(found, NAMES[1])


def test_tokenizer_files_decide_whether_texts_begin_with_bos(tmp_path):
    first_of_two = {"single": [{"SpecialToken": {}}, {"Sequence": {}}]}
    for number, (files, begins) in enumerate([
        ({"tokenizer_config.json": {"add_bos_token": False, "tokenizer_class": "LlamaTokenizer"}}, False),
        ({"tokenizer_config.json": {"tokenizer_class": "LlamaTokenizer"}}, True),
        ({"tokenizer_config.json": {"tokenizer_class": None}}, False),
        ({"tokenizer_config.json": {"tokenizer_class": "GPT2Tokenizer"}, "tokenizer.json": {}}, False),
        ({"tokenizer.json": {"post_processor": first_of_two}}, True),
        ({"tokenizer_config.json": {"add_bos_token": False}, "tokenizer.json": {"post_processor": first_of_two}}, True),
        ({"tokenizer_config.json": {"add_bos_token": True}, "tokenizer.json": {"post_processor": None}}, False),
        ({"tokenizer.json": {"post_processor": {"processors": [{}, first_of_two]}}}, True),
        ({"tokenizer.json": {"post_processor": {"single": [{"Sequence": {}}, {"SpecialToken": {}}]}}}, False),
    ]):  # fmt: skip
        folder = tmp_path / str(number)
        folder.mkdir()
        for name, content in files.items():
            (folder / name).write_text(json.dumps(content))
        assert begins_texts_with_bos(folder) is begins
