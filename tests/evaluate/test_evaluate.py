"""Perplexity against transformers: each token's probability from a context of its own, counted from the definition.

Relative tolerance 1e-5 on the sum of the losses: both sides compute in fp32, which is exact to 1e-7 a token.
"""

import contextlib
import dataclasses
import functools
import io
import itertools
import json
import math
import pathlib
import re
import shutil
import types

import jax
import micro
import numpy as np
import pytest
import torch
from data_files import write_jsonl
from hf_cases import hugging_face
from refusals import assert_names, assert_refused

from hlat_jax.batch import concat_batch
from hlat_jax.data.formats.paths import asset_path
from hlat_jax.evaluate import __main__ as evaluate
from hlat_jax.evaluate.__main__ import pieces, position_ranges
from hlat_jax.generate.inference import TrainedModel
from hlat_jax.generate.scoring import Scorer
from hlat_jax.model import apply, init_params
from hlat_jax.resolve import resolve
from hlat_jax.run.resume import saved_config
from hlat_jax.store.metrics import ROWS_FILE, read_rows
from hlat_jax.weights.trained import open_weights

TEXTS = ["It is a truth universally acknowledged, that a single man — in possession of a good fortune — must be in "
         "want of a wife. However little known the feelings of such a man may be on his first entering a place.",
         "x", "Emma Woodhouse, handsome, clever, and rich."]  # fmt: skip
pytestmark = pytest.mark.usefixtures("one_torch_thread")


@pytest.fixture(scope="module")
def oracle(trained_run):
    """A function of (text, window, first token) -> sum of the losses in nats, by Hugging Face's model."""
    weights = open_weights(trained_run)
    tokenizer, model = weights.open_tokenizer(), hugging_face(weights.restore(None), weights.model)

    def nats(text, window, first):
        ids, total = [first, *tokenizer.encode(text).tolist()], 0.0
        for number in range(1, len(ids)):
            # windows end after W, W + W / 2, W + 2 W / 2, ... predictions and have at most W tokens before their end
            turn = max(0, -(-(number - window) // (window - window // 2)))
            start = turn * (window - window // 2)
            assert number - start > min(window // 2, number - 1)
            with torch.no_grad():
                logits = model(torch.tensor([ids[start:number]])).logits[0, -1].double()
            total -= float(torch.log_softmax(logits, -1)[ids[number]])
        return total

    return nats, tokenizer


def test_pieces_predict_each_token_once_from_its_window():
    for window, length in itertools.product((2, 64, 200), (1, 2, 64, 65, 66, 500)):
        ranges, predicted = position_ranges(window), []
        assert [first for first, _ in ranges] == [first for first in (0, 64, 128) if first < window]
        for context, continuation in pieces(np.arange(length), ranges):
            np.testing.assert_array_equal(np.diff([*context, *continuation]), 1)
            assert context[0] % window == 0
            assert (len(context) - 1, len(context) - 1 + len(continuation)) in ranges or continuation[-1] == length - 1
            predicted += continuation.tolist()
        assert predicted == list(range(1, length))


@pytest.mark.slow
def test_loss_by_position_is_that_of_its_window_in_parts(trained_run, evaluate_here, tmp_path, monkeypatch):
    path, out = write_jsonl(tmp_path / "text.jsonl", TEXTS), tmp_path / "found.json"
    words = [f"--checkpoint={trained_run}", f"--data={path}", "--window=15", "--by_position", f"--json={out}"]
    assert evaluate_here(*words)[0] == 0
    whole = json.loads(out.read_text())
    assert [(part["first"], part["last"]) for part in whole["by_position"]] == [(0, 14)]
    monkeypatch.setattr("hlat_jax.evaluate.__main__._FIRST_RANGE", 4)
    code, printed, _ = evaluate_here(*words)
    parts = json.loads(out.read_text())
    assert code == 0
    assert [(part["first"], part["last"]) for part in parts["by_position"]] == [(0, 3), (4, 7), (8, 14)]
    assert parts["num_windows"] == whole["num_windows"] < sum(part["num_tokens"] for part in parts["by_position"])
    for key in ("nats", "num_tokens"):
        assert sum(part[key] for part in parts["by_position"]) == pytest.approx(whole[key], rel=1e-6)
    assert re.search(r"^8-14 +\d\.\d{4} ", printed, re.MULTILINE)


def test_evaluate_equals_hugging_face_token_by_token(trained_run, oracle, evaluate_here, data_here, tmp_path):
    nats, tokenizer = oracle
    path, out = write_jsonl(tmp_path / "text.jsonl", TEXTS), tmp_path / "found.json"
    (tmp_path / "text.txt").write_text(TEXTS[0])
    built = [path, f"--out={tmp_path / 'built'}", f"--tokenizer={tokenizer.path}", "--workers=1"]
    assert data_here("build", *built)[0] == 0
    mesh = ["--config.parallel.tensor=2", "--config.parallel.data=2"]
    for words, window, texts in (
        ([f"--data={path}", "--window=15", "--batch_size=3"], 15, TEXTS),
        ([f"--data={tmp_path / 'built'}", *mesh], 32, TEXTS),
        ([f"--text={tmp_path / 'text.txt'}"], 32, TEXTS[:1]),
    ):
        code, printed, error = evaluate_here(f"--checkpoint={trained_run}", f"--json={out}", *words)
        assert (code, error) == (0, "")
        found, wanted = json.loads(out.read_text()), sum(nats(text, window, tokenizer.eos_id) for text in texts)
        num_bytes, num_tokens = sum(len(text.encode()) for text in texts), sum(len(tokenizer.encode(t)) for t in texts)
        assert [found[f"num_{key}"] for key in ("documents", "bytes", "tokens")] == [len(texts), num_bytes, num_tokens]
        assert found["nats"] == pytest.approx(wanted, rel=1e-5)
        assert found["eval_loss"] == pytest.approx(wanted / num_tokens, rel=1e-5)
        assert found["perplexity"] == pytest.approx(np.exp(wanted / num_tokens), rel=1e-4)
        assert found["bits_per_byte"] == pytest.approx(wanted / np.log(2) / num_bytes, rel=1e-5)
        assert_names(printed, f"{num_bytes} bytes", f"{num_tokens} tokens")


@pytest.fixture(scope="module")
def validated(tmp_path_factory):
    """A function of a packing -> (folder, validation row, line on what is validated, held-out file) of a short run."""

    @functools.cache
    def run(packing):
        folder = tmp_path_factory.mktemp(packing)
        text = folder / "held_out.jsonl"
        shutil.copy(asset_path("austen_validation.jsonl"), text)
        c, printed = micro.config(folder, data__packing=packing, data__validation=str(text)), io.StringIO()
        c.train.update(num_steps=8, eval_every_steps=0, num_eval_batches=3)
        with contextlib.redirect_stdout(printed):
            assert micro.train(c, folder / "run") == 0
        [said] = [line for line in printed.getvalue().splitlines() if line.startswith("validation  ")]
        return folder / "run", read_rows(folder / "run" / ROWS_FILE)[-1], said, text

    return run


@pytest.mark.slow
def test_evaluate_equals_the_validation_of_the_run(validated, evaluate_here, tmp_path):
    """1e-5: fp32 sums over batches of another size, and another mesh."""
    out, mesh = tmp_path / "found.json", ["--config.parallel.tensor=2", "--config.parallel.data=2", "--batch_size=1"]
    for packing, words in (("concat", mesh), ("documents", ["--batch_size=5"])):
        folder, row, said, _ = validated(packing)
        code, printed, error = evaluate_here(f"--checkpoint={folder}", "--validation", f"--json={out}", *words)
        assert (code, error) == (0, "")
        assert said in printed.splitlines()
        found = json.loads(out.read_text())
        assert found["eval_tokens"] == row["eval_tokens"]
        for key in ("eval_loss", "bits_per_byte"):
            assert found[key] == pytest.approx(row[key], rel=1e-5)
        assert found["coverage"]["all"]["all_documents"] == 13


@pytest.mark.slow
def test_evaluate_uses_the_precision_policy_of_the_run(validated, monkeypatch, evaluate_here):
    """Its parameters are float32, which alone would mean fp32."""
    folder, _, _, _ = validated("concat")
    policies = []

    def saved(settings):
        run = saved_config(settings)
        return dataclasses.replace(run, precision=dataclasses.replace(run.precision, policy="mixed"))

    def recorded(config, layout):
        policies.append(config.precision.policy)
        return types.SimpleNamespace(eval_step=lambda *_: (0.0, 1.0))

    monkeypatch.setattr("hlat_jax.run.resume.saved_config", saved)
    monkeypatch.setattr("hlat_jax.program.make_program", recorded)
    evaluate_here(f"--checkpoint={folder}", "--validation")
    assert set(policies) == {"mixed"}


def test_validation_matches_a_loss_computed_by_hand(validated):
    """Every sixth row, counted from the middle of the first six, by logits and log_softmax alone; rel 1e-5: fp32."""
    folder, row, _, text = validated("concat")
    weights = open_weights(folder)
    tokenizer, params = weights.open_tokenizer(), weights.restore(None)
    texts = [json.loads(line)["text"] for line in text.read_text(encoding="utf-8").splitlines()]
    pieces = [text[start : start + 2000] for text in texts for start in range(0, len(text), 2000)]
    tokens = np.concatenate([[*tokenizer.encode(piece), tokenizer.eos_id] for piece in pieces])
    starts = range(0, len(tokens), 32)
    rows_BT = np.stack([tokens[starts[(2 * i + 1) * len(starts) // 24] :][:32] for i in range(12)])
    log_probs_BTV = jax.nn.log_softmax(apply(params, weights.model, rows_BT).astype(np.float32))
    losses = -np.take_along_axis(np.asarray(log_probs_BTV, np.float64)[:, :-1], rows_BT[:, 1:, None], axis=2)
    assert row["eval_tokens"] == losses.size == 12 * 31
    assert row["eval_loss"] == pytest.approx(losses.mean(), rel=1e-5)


@pytest.mark.slow
def test_evaluate_refuses_changed_held_out_text(validated, evaluate_here):
    folder, _, _, text = validated("concat")
    kept = text.read_bytes()
    try:
        text.write_bytes(kept.replace(b"Emma", b"Anna"))
        assert_refused(evaluate_here(f"--checkpoint={folder}", "--validation"), "--validation", "held_out.jsonl")
    finally:
        text.write_bytes(kept)


def test_evaluate_refuses_invalid_flags(trained_run, evaluate_here, tmp_path):
    (tmp_path / "empty").touch()
    for words, *facts in [
        ([], "--text=FILE", "--data=SOURCE", "--validation", "--tasks"),
        (["--text=a", "--data=b"], "--text=FILE"),
        ([f"--text={__file__}", "--window=33"], "--window=33", "model.max_positions=32"),
        ([f"--text={tmp_path / 'empty'}"], "token"),
        (["--validation"], "data.validation", "--data=SOURCE"),
        (["--tasks=x", "--json=/no/such/x.json"], "--json=/no/such/x.json"),
    ]:
        assert_refused(evaluate_here(f"--checkpoint={trained_run}", *words), *facts)


def test_non_finite_metrics_are_null_in_the_json(trained_run, evaluate_here, monkeypatch, tmp_path):
    (tmp_path / "text.txt").write_text(TEXTS[0])
    infinite = {"eval_loss": math.inf, "perplexity": math.inf, "bits_per_byte": math.nan}
    monkeypatch.setattr("hlat_jax.run.validation.measures", lambda *_, **__: infinite)
    words = (f"--text={tmp_path / 'text.txt'}", f"--json={tmp_path / 'found.json'}")
    assert evaluate_here(f"--checkpoint={trained_run}", *words)[0] == 0
    found = json.loads((tmp_path / "found.json").read_text(), parse_constant=pytest.fail)
    assert dict.fromkeys(infinite).items() <= found.items()
    assert found["num_documents"] == 1


@pytest.mark.slow
def test_evaluation_ignores_model_options_of_training(small, one_device):
    how, run = {"attention": "nki", "remat": "saved:dot_general.6"}, resolve(small)
    params = init_params(run.model, jax.random.key(0))

    def found(model):
        trained = TrainedModel(model, params, one_device, None, pathlib.Path(), "")
        eval_step = evaluate._eval_step(trained, run, num_rows=2)
        [score] = Scorer(model, params, layout=one_device, num_rows=2)([([1], [2, 3])])
        return *eval_step(params, concat_batch(np.zeros((2, 16), int))), score.log_likelihood

    np.testing.assert_allclose(found(dataclasses.replace(run.model, **how)), found(run.model), rtol=1e-5)
