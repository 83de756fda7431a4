"""Perplexity against transformers: each token's probability from a context of its own, counted from the definition.

Relative tolerance 1e-5 on the sum of the losses: both sides compute in fp32, which is exact to 1e-7 a token.
"""

import dataclasses
import json
import math
import pathlib

import jax
import numpy as np
import pytest
import torch
from hf_weights import hf_model

from hlat_jax import config as config_lib
from hlat_jax import evaluate
from hlat_jax.batch import concat_batch
from hlat_jax.eval.perplexity import windows
from hlat_jax.inference import TrainedModel
from hlat_jax.model import init_params
from hlat_jax.sharding import make_layout
from hlat_jax.weights import open_weights

TEXTS = ["It is a truth universally acknowledged, that a single man — in possession of a good fortune — must be in "
         "want of a wife. However little known the feelings of such a man may be on his first entering a place.",
         "x", "Emma Woodhouse, handsome, clever, and rich."]  # fmt: skip
pytestmark = pytest.mark.usefixtures("one_torch_thread")


@pytest.fixture(scope="module")
def oracle(trained_run):
    """A function of (text, window, first token) -> sum of the losses in nats, by Hugging Face's model."""
    weights = open_weights(trained_run)
    cfg, tokenizer = weights.model, weights.open_tokenizer()
    sizes = {"vocab_size": cfg.vocab_size, "hidden_size": cfg.embed_dim, "intermediate_size": cfg.mlp_dim,
             "num_hidden_layers": cfg.num_layers, "num_attention_heads": cfg.num_heads,
             "num_key_value_heads": cfg.num_kv_heads, "head_dim": cfg.head_dim, "rms_norm_eps": cfg.norm_eps,
             "rope_parameters": {"rope_type": "default", "rope_theta": cfg.rope_theta}}  # fmt: skip
    model = hf_model(weights.restore(None), **sizes)

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


@pytest.mark.parametrize("length", range(2, 40))
@pytest.mark.parametrize("window", [2, 5, 8])
def test_windows_predict_each_token_once_from_half_a_window_or_all_before(window, length):
    ids, predicted = np.arange(length), []
    for piece in windows(ids, window):
        assert len(piece.tokens) == len(piece.targets) <= window
        np.testing.assert_array_equal(piece.tokens + 1, piece.targets)
        for place in range(piece.first, len(piece.tokens)):
            predicted.append(int(piece.targets[place]))
            assert place + 1 >= min(window // 2, predicted[-1])
    assert predicted == list(range(1, length))


@pytest.mark.parametrize(
    ("words", "window"),
    [([], 32), (["--window=15", "--batch_size=3"], 15), (["--parallel.tensor=2", "--parallel.data=2"], 32)],
    ids=["whole", "odd", "mesh"],
)
def test_evaluate_equals_hugging_face_token_by_token(words, window, trained_run, oracle, evaluate_here, tmp_path):
    nats, tokenizer = oracle
    (tmp_path / "text.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    out = tmp_path / "found.json"
    code, printed, error = evaluate_here(
        f"--checkpoint={trained_run}", f"--data={tmp_path / 'text.jsonl'}", f"--json={out}", *words
    )
    assert (code, error) == (0, "")
    found, wanted = json.loads(out.read_text()), sum(nats(text, window, tokenizer.eos_id) for text in TEXTS)
    num_bytes, num_tokens = sum(len(text.encode()) for text in TEXTS), sum(len(tokenizer.encode(t)) for t in TEXTS)
    assert (found["num_documents"], found["num_bytes"], found["num_tokens"]) == (3, num_bytes, num_tokens)
    assert found["nats"] == pytest.approx(wanted, rel=1e-5)
    assert found["eval_loss"] == pytest.approx(wanted / num_tokens, rel=1e-5)
    assert found["perplexity"] == pytest.approx(np.exp(wanted / num_tokens), rel=1e-4)
    assert found["bits_per_byte"] == pytest.approx(wanted / np.log(2) / num_bytes, rel=1e-5)
    assert f"3 documents, {num_bytes} bytes, {num_tokens} tokens" in printed


def test_evaluate_reads_a_file_as_one_document_and_stored_ids_as_their_texts(
    trained_run, oracle, evaluate_here, data_here, tmp_path
):
    nats, tokenizer = oracle
    (tmp_path / "text.txt").write_text(TEXTS[0])
    built = [tmp_path / "text.txt", f"--out={tmp_path / 'built'}", f"--tokenizer={tokenizer.path}", "--workers=1"]
    assert data_here("build", *built)[0] == 0
    wanted = nats(TEXTS[0], 32, tokenizer.eos_id)
    for source in (f"--text={tmp_path / 'text.txt'}", f"--data={tmp_path / 'built'}"):
        out = tmp_path / "found.json"
        assert evaluate_here(f"--checkpoint={trained_run}", source, f"--json={out}")[0] == 0
        found = json.loads(out.read_text())
        assert (found["num_documents"], found["num_bytes"]) == (1, len(TEXTS[0].encode()))
        assert found["nats"] == pytest.approx(wanted, rel=1e-5)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "give one of --text=FILE, --data=SOURCE and --tasks"),
        (["--text=a", "--data=b"], "give one of --text=FILE, --data=SOURCE and --tasks"),
        (["--text=a", "--tasks=b"], "give one of --text=FILE, --data=SOURCE and --tasks"),
        (["--text=/no/such/file"], "--text=/no/such/file: no such file"),
        (["--data=/no/such/file"], "/no/such/file"),
        (["--text=README.md", "--window=33"], "--window=33 must lie in 2 .. 32"),
        (["--text=EMPTY"], "no token to predict"),
        (["--text=README.md", "--limit=3"], "--limit says nothing beside --text, it is of --tasks; leave it out"),
        (["--data=README.md", "--tasks_folder=x"], "--tasks_folder says nothing beside --data"),
        (["--tasks=arc_easy", "--window=8"], "--window says nothing beside --tasks, it is of --text"),
    ],
)
def test_evaluate_refuses_what_it_cannot_do(words, message, trained_run, evaluate_here, tmp_path):
    (tmp_path / "empty").touch()
    words = [word.replace("EMPTY", str(tmp_path / "empty")) for word in words]
    code, _, error = evaluate_here(f"--checkpoint={trained_run}", *words)
    assert code == 2
    assert message in error


def test_a_figure_that_is_not_finite_is_null_in_the_file(trained_run, evaluate_here, monkeypatch, tmp_path):
    (tmp_path / "text.txt").write_text(TEXTS[0])
    infinite = {"eval_loss": math.inf, "perplexity": math.inf, "bits_per_byte": math.nan}
    monkeypatch.setattr("hlat_jax.eval.validation.measures", lambda *_, **__: infinite)
    words = (f"--text={tmp_path / 'text.txt'}", f"--json={tmp_path / 'found.json'}")
    assert evaluate_here(f"--checkpoint={trained_run}", *words)[0] == 0
    found = json.loads((tmp_path / "found.json").read_text(), parse_constant=pytest.fail)
    assert dict.fromkeys(infinite).items() <= found.items()
    assert found["num_documents"] == 1


def test_evaluate_says_what_tasks_need(evaluate_here, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    code, _, error = evaluate_here("--checkpoint=X", "--tasks=hlat")
    assert code == 2
    assert "pip install 'hlat_jax[eval]'" in error


@pytest.mark.parametrize("words", [["--text=README.md"], ["--tasks=x"]])
def test_an_output_that_cannot_be_written_is_refused_before_any_work(words, evaluate_here):
    code, _, error = evaluate_here("--checkpoint=/no/such", *words, "--json=/no/such/x.json")
    assert code == 2
    assert "--json=/no/such/x.json: there is no folder" in error


def test_help_does_not_hide_a_flag_that_there_is_not(evaluate_here):
    code, _, error = evaluate_here("--checkpoint=x", "--taskz=hlat", "--help")
    assert code == 2
    assert "unknown flag --taskz" in error


MODEL = config_lib.ModelConfig(
    vocab_size=64, num_layers=2, embed_dim=32, mlp_dim=64, num_heads=4, num_kv_heads=2, head_dim=8, max_positions=256
)


@pytest.mark.parametrize(
    "how",
    [{"tuned": "nowhere.json"}, {"rms_norm": "triton"}, {"attention": "nki"}, {"remat": "saved:dot_general.6"}],
    ids=str,
)
def test_a_text_is_evaluated_by_a_model_that_was_trained_elsewhere(how):
    layout = make_layout(config_lib.ParallelConfig(), jax.devices()[:1])
    params = init_params(MODEL, jax.random.key(0))

    def found(model):
        trained = TrainedModel(model, params, layout, None, pathlib.Path(), "")
        return evaluate._predict(trained, num_rows=2, window=64)(concat_batch(np.zeros((2, 64), int)))

    np.testing.assert_allclose(found(dataclasses.replace(MODEL, **how)), found(MODEL), rtol=1e-5)
