"""Llama, Qwen 2, Qwen 3 and Mistral against transformers: random small models, of every option that their configs have.

Logits and gradients are compared relative to the largest logit and to the norm of each gradient: both sides compute in
fp32 and sum in other orders, which moves them by 1e-6 to 1e-5. A norm, bias or window left out moves logits by 1e-2.
"""

from __future__ import annotations

import dataclasses
import functools

import hf_models
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers

import hlat_jax.hf
from hlat_jax.generate.generator import Generator
from hlat_jax.hf.exporting import export_checkpoint
from hlat_jax.model import apply
from hlat_jax.weights import hf_names
from hlat_jax.weights.trained import leaves_by_name, open_weights

pytestmark = pytest.mark.usefixtures("one_torch_thread")
FAMILIES = ("llama", "qwen2", "qwen3", "mistral")
DRAWS = {f"{kind}-{seed}": (kind, seed) for kind in FAMILIES for seed in range(6)}
NUM_TOKENS, PROMPT = 96, 10
FORWARD = jax.jit(apply, static_argnums=1)


@functools.cache
def made(kind, seed):
    return hf_models.model(hf_models.family(kind, seed), seed=seed)


@pytest.fixture
def loaded(request, tmp_path):
    """(the model of transformers, its folder, our config, our parameters, tokens) of a draw."""
    kind, seed = request.param
    model = made(kind, seed)
    folder = hf_models.save(model, tmp_path / "hf")
    cfg, params = hlat_jax.hf.load(folder, fuse_qkv=bool(seed % 4))
    tokens = np.random.default_rng(seed).integers(0, cfg.vocab_size, (2, NUM_TOKENS + 1), dtype=np.int32)
    return model, folder, cfg, params, tokens


def their_logits(model, tokens):
    with torch.no_grad():
        return model(torch.from_numpy(tokens).long()).logits.numpy()


def of_hugging_face(grads, cfg):
    """Returns gradients under the names of transformers, by the mapping of weights, which logits have shown right."""
    named, found = leaves_by_name(jax.tree.map(np.asarray, grads)), {}
    for entry in hf_names.table(cfg):
        for layer in range(cfg.num_layers if entry.stacked else 1):
            ours = named[entry.leaf][layer] if entry.stacked else named[entry.leaf]
            found |= dict(zip(entry.names(layer), entry.split(ours), strict=True))
    return found


@pytest.mark.quick_cases("qwen3-1")
@pytest.mark.parametrize("loaded", DRAWS.values(), indirect=True, ids=DRAWS)
def test_logits_gradients_and_greedy_tokens_equal_transformers(loaded):
    model, _, cfg, params, tokens = loaded
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    theirs = their_logits(model, inputs)
    assert 1 < np.abs(theirs).max() < 20
    ours = np.asarray(FORWARD(params, cfg, inputs))
    assert np.abs(ours - theirs).max() <= 1e-4 * np.abs(theirs).max()

    def loss(params):
        logprobs = jax.nn.log_softmax(apply(params, cfg, inputs))
        return -jnp.take_along_axis(logprobs, targets[..., None], axis=-1).mean()

    ours = of_hugging_face(jax.jit(jax.grad(loss))(params), cfg)
    model.zero_grad()
    logits = model(torch.from_numpy(inputs).long()).logits
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), torch.from_numpy(targets).long().flatten()).backward()
    grads = {name: parameter.grad.numpy() for name, parameter in model.named_parameters()}
    assert ours.keys() == grads.keys()
    deviations = {name: np.linalg.norm(ours[name] - grad) / np.linalg.norm(grad) for name, grad in grads.items()}
    assert max(deviations.values()) <= 1e-4, deviations

    prompt = tokens[:1, :PROMPT]
    ids = torch.from_numpy(prompt).long()
    options = {"attention_mask": torch.ones_like(ids), "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    with torch.no_grad():
        theirs = model.generate(ids, max_new_tokens=64, **options)[0, PROMPT:].tolist()
    assert Generator(cfg, params)(prompt.tolist(), max_tokens=64)[0] == theirs


@pytest.mark.quick_cases("qwen2-3", "mistral-4")
@pytest.mark.parametrize("loaded", DRAWS.values(), indirect=True, ids=DRAWS)
def test_an_export_without_its_source_is_the_same_model(loaded, tmp_path):
    """With the config.json that this package writes, for the fields of ModelConfig alone."""
    model, folder, cfg, _, tokens = loaded
    weights = dataclasses.replace(open_weights(folder), companions=None)
    export_checkpoint(weights, tmp_path / "out")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    is_llama = model.config.model_type == "mistral" and not cfg.sliding_window
    assert type(again) is (transformers.LlamaForCausalLM if is_llama else type(model))
    np.testing.assert_array_equal(their_logits(again, tokens), their_logits(model, tokens))
