"""`hf import --verify`: its limit follows the rounding errors of fp32, measured against float64."""

import dataclasses
import re

import hf_models
import micro
import numpy as np
import pytest
import torch
import transformers
from refusals import assert_names, refused
from tokenizer_files import train_model

from hlat_jax.hf import __main__ as hf
from hlat_jax.hf import verifying
from hlat_jax.weights.hf_reading import open_checkpoint
from hlat_jax.weights.trained import open_weights

pytestmark = pytest.mark.usefixtures("one_torch_thread")
SIZES = {"vocab_size": 384, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4}
SIZES |= {"num_key_value_heads": 4, "max_position_embeddings": 256, "rms_norm_eps": 1e-6}
FIGURE = r"([0-9.]+e-?[0-9]+)"
LINE = rf"differ from transformers by {FIGURE} of the largest, .*, and transformers in fp32 from float64 by {FIGURE}"


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory):
    """A function of layers and the scale of the weights that returns the folder of a Llama with a tokenizer."""

    def make(num_layers, std):
        torch.manual_seed(0)
        config = transformers.LlamaConfig(**SIZES, num_hidden_layers=num_layers, initializer_range=std)
        folder = hf_models.save(transformers.AutoModelForCausalLM.from_config(config), tmp_path_factory.mktemp("hf"))
        train_model(folder / "tokenizer.model", byte_fallback=True, vocab_size=320)
        return folder

    return make


def figures(said):
    """Returns (difference, rounding error) of each line."""
    return [tuple(map(float, found)) for found in re.findall(LINE, said)]


def wrong(weights):
    """Returns name -> weights of the same arrays that are another model."""

    def flip_heads(name, leaf):
        values = weights.read_leaf(name, leaf)
        return values[:, :, ::-1] if name.endswith("qkv") else values

    fields = {"theta": {"rope_theta": 1.1 * weights.model.rope_theta}, "eps": {"norm_eps": 1e-5}}
    models = {name: dataclasses.replace(weights.model, **change) for name, change in fields.items()}
    changed = {name: dataclasses.replace(weights, model=model) for name, model in models.items()}
    return changed | {"heads": dataclasses.replace(weights, read_leaf=flip_heads)}


def test_verify_prints_both_differences_of_both_texts(tmp_path, monkeypatch, capsys):
    source = hf_models.save(hf_models.model(hf_models.CONFIGS["llama3"]), tmp_path / "hf")
    train_model(source / "tokenizer.model", byte_fallback=True, vocab_size=320)
    words = ["import", str(source), f"--out={tmp_path / 'ours'}", "--verify", "--dtype=bfloat16"]
    code, out, err = micro.command_runner(hf.main, monkeypatch, capsys)(*words)
    assert (code, err) == (0, "")
    assert len(figures(out)) == 2  # of random tokens, and of a text
    for difference, rounding in figures(out):
        assert 0 < difference < 1e-5
        assert 0 < rounding < 1e-5


def test_verify_says_why_no_text_was_compared(folder_of):
    folder = folder_of(1, 0.3)
    (folder / "tokenizer.model").unlink()
    said = verifying.verify(open_checkpoint(folder), open_weights(folder))
    assert len(figures(said)) == 1
    assert_names(said, folder, "tokenizer")


@pytest.mark.slow
@pytest.mark.parametrize(("num_layers", "std"), [(2, 0.02), (16, 0.3)])
def test_verify_refuses_a_wrong_theta_eps_or_order_of_heads(num_layers, std, folder_of):
    folder = folder_of(num_layers, std)
    source, weights = open_checkpoint(folder), open_weights(folder)
    verifying.verify(source, weights)
    for name, other in wrong(weights).items():
        with refused("--verify", "128"):
            pytest.fail(f"{name}: {verifying.verify(source, other)}")


@pytest.mark.slow
def test_a_right_model_is_accepted_however_its_errors_grow(folder_of):
    folder = folder_of(96, 1.0)
    said = verifying.verify(open_checkpoint(folder), open_weights(folder))
    assert max(figures(said))[0] > 1e-3  # of the largest logit


@pytest.mark.slow
def test_the_rounding_error_is_measured_against_float64(folder_of):
    """Norms and angles are in float64 here and in fp32 in `verify`, so the two may differ by a factor of 4."""
    folder = folder_of(16, 0.3)
    source, weights = open_checkpoint(folder), open_weights(folder)
    printed = figures(verifying.verify(source, weights))
    tokens, _ = verifying._tokens(weights)
    ids = torch.from_numpy(np.stack(list(tokens.values()))).long()
    plain = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    exact = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()
    rope = exact.model.rotary_emb

    def angles(_, position_ids):
        half = position_ids.double()[..., None] * rope.inv_freq.double()
        whole = torch.cat((half, half), -1)
        return whole.cos(), whole.sin()

    rope.forward = angles
    for module in exact.modules():
        if type(module).__name__ == "LlamaRMSNorm":
            module.forward = lambda x, norm=module: (
                norm.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + norm.variance_epsilon)
            )
    with torch.no_grad():
        theirs, right = plain(ids).logits.double(), exact(ids).logits
    for row, (difference, rounding) in enumerate(printed):
        expected = float((theirs[row] - right[row]).abs().max() / theirs[row].abs().max())
        assert 0.25 * expected < rounding < 4 * expected
        assert difference < 4 * expected
