"""A published model continued: in by one command, trained on, and out again as it came."""

import json
import shutil

import hf_models
import jax
import numpy as np
import optax
import pytest
import torch
import transformers
from refusals import assert_names, refused
from tokenizer_files import write_tokenizer_json

from hlat_jax import hf, train
from hlat_jax.hf import __main__ as hf_command
from hlat_jax.model import apply, init_params
from hlat_jax.store.metrics import ROWS_FILE, read_rows

HELD_OUT = ["It is a truth", "universally acknowledged, that a single man", "in possession of a good fortune"]


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A Hugging Face folder in bfloat16, whose tokenizer begins texts with BOS."""
    folder = tmp_path_factory.mktemp("source")
    files = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": "{{ messages }}"}
    write_tokenizer_json(folder, **files)
    config = transformers.LlamaConfig(**hf_models.SMALL | {"vocab_size": 640, "eos_token_id": 2})
    return hf_models.save(hf_models.model(config), folder, dtype=torch.bfloat16)


def loss_of_transformers(source, texts):
    """Returns the mean loss of the tokens of texts with their EOS, each text alone, and the number of targets."""
    theirs = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(source)
    # the tokenizer of tests truncates to 4 tokens, and pads
    tokenizer.backend_tokenizer.no_truncation(), tokenizer.backend_tokenizer.no_padding()
    total, count = 0.0, 0
    for text in texts:
        ids = torch.tensor([[*tokenizer.backend_tokenizer.encode(text).ids, tokenizer.eos_token_id]])
        assert ids[0, 0] == tokenizer.bos_token_id
        with torch.no_grad():
            total += theirs(ids, labels=ids).loss.item() * (ids.shape[1] - 1)
        count += ids.shape[1] - 1
    return total / count, count


def test_a_continued_model_is_exported_as_it_came(source, tmp_path, capsys):
    (tmp_path / "my.txt").write_text("\n\n".join(f"{text} number {k}." for k in range(40) for text in HELD_OUT))
    (tmp_path / "held_out.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in HELD_OUT))
    run, out = tmp_path / "run", tmp_path / "out"
    keys = {"data.train": tmp_path / "my.txt", "data.validation": tmp_path / "held_out.jsonl"}
    keys |= {"data.packing": "documents", "data.seq_len": 32, "data.batch_size": 8}
    keys |= {"train.num_steps": 4, "train.num_eval_batches": 0}
    words = [f"--config.{key}={value}" for key, value in keys.items()]
    assert train.main([f"--init_from={source}", *words, f"--workdir={run}"]) == 0
    assert_names(capsys.readouterr().out, "adamw, learning rate 0.0001 ", "4 steps of 8 x 32")
    before = read_rows(run / ROWS_FILE)[0]
    loss, count = loss_of_transformers(source, HELD_OUT)
    assert (before["step"], before["eval_tokens"]) == (0, count)
    assert before["eval_loss"] == pytest.approx(loss, rel=1e-4)
    other = shutil.copytree(source, tmp_path / "other")
    with refused(run, source, "--workdir"):
        train.main([f"--init_from={other}", *words, f"--workdir={run}"])
    assert train.main([f"--init_from={source}", *words, f"--workdir={run}"]) == 0
    assert hf_command.main(["export", str(run), f"--out={out}"]) == 0
    names = {path.name for path in source.iterdir()}
    assert {path.name for path in out.iterdir()} == names
    assert [name for name in names if (out / name).read_bytes() != (source / name).read_bytes()] == [
        "model.safetensors"
    ]
    assert hf_command.main(["export", str(run), f"--out={tmp_path / 'whole'}", "--dtype=float32"]) == 0
    assert json.loads((tmp_path / "whole/config.json").read_text())["dtype"] == "float32"


@pytest.mark.slow
def test_changed_parameters_are_saved_as_transformers_computes(source, tmp_path):
    model, params = hf.load(source, dtype="float32")
    tokens_BT = np.random.default_rng(0).integers(0, 640, (2, 24))
    updates = jax.grad(lambda params: apply(params, model, tokens_BT).var())(params)
    params = optax.apply_updates(params, jax.tree.map(lambda leaf: -0.1 * leaf, updates))
    hf.save(params, model, source, tmp_path / "out")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    with torch.no_grad():
        expected = theirs(torch.from_numpy(tokens_BT)).logits.numpy()
    ours = np.asarray(apply(params, model, tokens_BT))
    assert np.abs(ours - expected).max() <= 1e-4 * np.abs(expected).max()
    assert (tmp_path / "out/tokenizer.json").read_bytes() == (source / "tokenizer.json").read_bytes()
    hf.save(hf.load(source)[1], model, source / "tokenizer.json", tmp_path / "rounded")  # a file
    assert json.loads((tmp_path / "rounded/config.json").read_text())["torch_dtype"] == "bfloat16"
    assert (tmp_path / "rounded/tokenizer.json").is_file()


def test_parameters_are_saved_with_the_tokenizer_of_any_folder(source, tmp_path):
    """Of what `save_pretrained` of a tokenizer writes, or of a model of another architecture."""
    model, params = hf.load(source)
    alone, other = tmp_path / "alone", tmp_path / "other"
    shutil.copytree(source, alone, ignore=shutil.ignore_patterns("config.json", "generation_config.json", "*tensors"))
    (alone / "chat_template.jinja").write_text("{{ messages }}")
    shutil.copytree(alone, other)
    (other / "config.json").write_text(json.dumps({"model_type": "gemma", "eos_token_id": 2}))
    for folder in (alone, other):
        out = tmp_path / f"{folder.name}-out"
        hf.save(params, model, folder, out)
        for path in folder.iterdir():
            assert path.name == "config.json" or (out / path.name).read_bytes() == path.read_bytes()
        theirs = transformers.AutoModelForCausalLM.from_pretrained(out)
        assert (type(theirs), theirs.config.eos_token_id) == (transformers.LlamaForCausalLM, 2)
        assert theirs.generation_config.eos_token_id == 2


def test_parameters_of_another_model_are_refused_by_name(source, tmp_path):
    model, params = hf.load(source)
    other, half = init_params(model, jax.random.key(0)), jax.tree.map(lambda leaf: leaf.astype("float16"), params)
    other["layers"]["mlp"]["down"] = other["layers"]["mlp"]["down"][:1]
    for given, *facts in (
        (other, "layers.mlp.down", "(1, 160, 96)", "(2, 160, 96)"),
        (params | {"extra": params["embed"]}, "extra", "(640, 96)"),
        (half, "float16", "float32, bfloat16"),
    ):
        with refused(" of params is ", *facts):
            hf.save(given, model, "", tmp_path / "out")
    with refused("dtype='float16'", "float32, bfloat16"):
        hf.save(params, model, "", tmp_path / "out", dtype="float16")
    with refused("tokenizer=gone"):
        hf.save(params, model, "gone", tmp_path / "out")
    assert not (tmp_path / "out").exists()
