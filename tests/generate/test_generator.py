"""Generation with a cache against what it must equal: the whole forward pass again, transformers, one device, alone.

All of it is greedy or drawn token for token, over 128 tokens, in fp32. The logits of the random models are of size 1 to
5 and their two largest stand about 0.1 apart, where sums in other orders differ by 1e-5.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools

import jax
import numpy as np
import pytest
import torch
from hf_cases import GQA, hugging_face, random_params
from refusals import refused

from hlat_jax.config import ParallelConfig
from hlat_jax.generate.decoding import (
    decode_arguments,
    make_decode,
    make_prefill,
    prefill_arguments,
    separate_layers,
)
from hlat_jax.generate.generator import GenerationShape, Generator, Programs, Sampling, prefill_by, stream
from hlat_jax.model import apply
from hlat_jax.parallel.sharding import make_layout

pytestmark = pytest.mark.usefixtures("one_torch_thread")
PROMPTS = [np.random.default_rng(n).integers(0, 384, n).tolist() for n in (20, 1, 7, 64)]
NUM_TOKENS = 128
CREATIVE = Sampling(temperature=1.0, top_k=40, top_p=0.95, seed=3)


QWENS = dataclasses.replace(
    GQA, qkv_bias=True, qk_norm=True, sliding_window=24, sliding_window_layers="2:2", rope_scaling="yarn"
)
MODELS = {"gqa": GQA, "qwens": QWENS, "qwens_for_6": dataclasses.replace(QWENS, fuse_qkv=False, mlp_dim=96)}


@functools.cache
def weights(name):
    return random_params(MODELS[name])


@functools.cache
def generator(name):
    return Generator(MODELS[name], weights(name))


@functools.cache
def alone(name):
    """Returns the greedy continuation of every prompt, each by itself."""
    return [generator(name)([prompt], max_tokens=NUM_TOKENS)[0] for prompt in PROMPTS]


def rerun(cfg, params, prompt):
    """Returns the greedy continuation by the whole forward pass for each token, which knows no cache."""
    forward = jax.jit(lambda params, tokens: apply(params, cfg, tokens))
    tokens = np.zeros((1, len(prompt) + NUM_TOKENS), np.int32)
    tokens[0, : len(prompt)] = prompt
    for place in range(len(prompt), tokens.shape[1]):
        tokens[0, place] = np.argmax(forward(params, tokens)[0, place - 1])
    return tokens[0, len(prompt) :].tolist()


def test_greedy_generation_equals_uncached_forward_passes():
    """That of transformers is in tests/hf/test_families.py."""
    for name in ("gqa", "qwens"):  # 64 tokens are past the window of the second
        ours = generator(name)([PROMPTS[2]], max_tokens=NUM_TOKENS)[0]
        assert len(set(ours)) > 10  # no loop of few tokens, which many models fall into
        assert ours == rerun(MODELS[name], weights(name), PROMPTS[2])


def by_decode(generator, prompt):
    """Returns the greedy continuation of a prompt that `decode` reads token by token, as in a run's samples."""
    shape = generator.shape([prompt], max_tokens=NUM_TOKENS)
    cache, given = decode_arguments(generator.cfg, generator.layout, dtype=np.float32, shape=shape)
    decode = make_decode(generator.cfg, generator.layout).lower(generator.params, cache, given).compile()
    programs, options = Programs(prefill_by(decode, cache), decode, shape), {"sampling": Sampling(), "stop_ids": ()}
    return [id for [id] in stream(programs, generator.params, [prompt], limits=[NUM_TOKENS], first_number=0, **options)]


def test_a_prompt_read_token_by_token_continues_alike():
    assert by_decode(generator("qwens"), PROMPTS[3]) == alone("qwens")[3]  # longer than the window


MESHES = {
    "data-fsdp-tensor": ("qwens", ParallelConfig(data=2, fsdp=2, tensor=2)),
    "pipe-tensor": ("qwens", ParallelConfig(pipe=2, data=1, tensor=2)),
    "copied-kv-heads": ("qwens_for_6", ParallelConfig(data=1, tensor=6)),
    "sequence-parallel": ("gqa", ParallelConfig(data=1, tensor=2, sequence_parallel=True)),
}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "parallel"), MESHES.values(), ids=MESHES)
def test_generation_over_a_mesh_equals_one_device(name, parallel):
    num_devices = parallel.pipe * parallel.data * parallel.fsdp * parallel.tensor
    layout = make_layout(parallel, jax.devices()[:num_devices], num_kv_heads=MODELS[name].num_kv_heads)
    spread = Generator(MODELS[name], weights(name), layout=layout)
    for sampling in (Sampling(), CREATIVE):
        options = {"max_tokens": NUM_TOKENS, "sampling": sampling}
        wanted, found = (itertools.islice(one.stream(PROMPTS, **options), 32) for one in (generator(name), spread))
        assert list(found) == list(wanted)
    assert by_decode(spread, PROMPTS[3])[:32] == alone(name)[3][:32]


@pytest.mark.slow
def test_a_repetition_penalty_is_that_of_transformers_on_any_mesh():
    model, prompt = hugging_face(weights("gqa"), GQA), PROMPTS[0]
    ids = torch.tensor([prompt])
    with torch.no_grad():
        theirs = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=NUM_TOKENS, do_sample=False,
                                eos_token_id=None, pad_token_id=0, repetition_penalty=1.4)  # fmt: skip
    layout = make_layout(ParallelConfig(data=2, tensor=2), jax.devices()[:4], num_kv_heads=GQA.num_kv_heads)
    spread = Generator(MODELS["gqa"], weights("gqa"), layout=layout)
    plain = generator("gqa")([prompt], max_tokens=NUM_TOKENS)[0]
    for one in (generator("gqa"), spread):
        ours = one([prompt, PROMPTS[1]], max_tokens=NUM_TOKENS, repetition_penalty=1.4)[0]
        assert ours == theirs[0, ids.shape[1] :].tolist()
        assert len(set(ours)) > len(set(plain))
    with refused("repetition_penalty=0"):
        spread([prompt], max_tokens=1, repetition_penalty=0)


@pytest.mark.slow
def test_sampling_is_reproducible_and_depends_on_seed_and_row():
    run = functools.partial(generator("gqa"), [PROMPTS[0]] * 4, max_tokens=NUM_TOKENS)
    first = run(sampling=CREATIVE)
    assert first == run(sampling=CREATIVE)
    assert len(set(map(tuple, first))) == 4
    assert first[0] != run(sampling=dataclasses.replace(CREATIVE, seed=4))[0]
    assert first[0] == generator("gqa")([PROMPTS[0]], max_tokens=NUM_TOKENS, sampling=CREATIVE)[0]


@pytest.mark.slow
def test_row_stops_at_its_stop_token_while_others_continue():
    whole = alone("gqa")
    assert generator("gqa")(PROMPTS, max_tokens=NUM_TOKENS) == whole  # a batch gives what single prompts give
    stop = whole[0][9]
    ended = [ids[: ids.index(stop)] if stop in ids else ids for ids in whole]
    assert len(ended[0]) <= 9
    assert max(map(len, ended)) > 9
    assert generator("gqa")(PROMPTS, max_tokens=NUM_TOKENS, stop_ids=(stop,)) == ended
    steps = list(generator("gqa").stream(PROMPTS, max_tokens=NUM_TOKENS, stop_ids=(stop,)))
    streamed = [[step[row] for step in steps if step[row] is not None] for row in range(len(PROMPTS))]
    assert streamed == [[*ids, stop] if ids != full else ids for ids, full in zip(ended, whole, strict=True)]


def test_row_stops_at_max_positions_and_few_shapes_are_compiled():
    short = Generator(dataclasses.replace(GQA, max_positions=70), weights("gqa"))
    assert short.shape([[1] * n for n in (3, 65, 4)], max_tokens=70) == GenerationShape(4, 70, 198)
    ids = short(PROMPTS, max_tokens=NUM_TOKENS)
    assert [len(row) for row in ids] == [50, 69, 63, 6]
    assert [row == full[: len(row)] for row, full in zip(ids, alone("gqa"), strict=True)] == [True] * 4
    for number in (1, 40, 64):
        short([[1] * number] * 3, max_tokens=65)
    assert list(short._compiled) == [GenerationShape(4, 64, 192)]


def test_the_cache_has_the_dtype_of_the_parameters(one_device):
    narrow = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, jax.numpy.bfloat16), weights("gqa"))
    arguments = prefill_arguments(one_device, GenerationShape(1, 64, 128))
    cache, _ = jax.eval_shape(make_prefill(GQA, one_device, slots=128), narrow, *arguments)
    assert cache.keys.dtype == cache.values.dtype == jax.numpy.bfloat16
    assert cache.keys.shape == (2, 1, 128, 2, 16)


def test_generator_refuses_invalid_prompts():
    for prompts, max_tokens, *facts in [
        ([], 5, "prompts"),
        ([[1], []], 5, "prompt 1 ", "0 tokens", "model.max_positions=4096"),
        ([[1, 384]], 5, "prompt 0 ", "384", "model.vocab_size=384"),
        ([[1] * 4096], 5, "prompt 0 ", "4096 tokens", "model.max_positions=4096"),
        ([[1]], 0, "max_tokens=0"),
    ]:
        with refused(*facts):
            generator("gqa").stream(prompts, max_tokens=max_tokens)


def test_separate_layers_share_the_memory_of_the_stacked(one_device):
    stacked = jax.tree.map(jax.numpy.array, weights("gqa"))
    for dtype in (jax.numpy.float32, jax.numpy.bfloat16):
        params = jax.jit(lambda tree, dtype=dtype: jax.tree.map(lambda leaf: leaf.astype(dtype), tree))(stacked)
        first, second = separate_layers(params, GQA, one_device)["layers"]
        gate_up = params["layers"]["mlp"]["gate_up"]
        assert first["mlp"]["gate_up"].shape == (96, 320)
        assert first["attention"]["out"].shape == (96, 96)
        addresses = [each["mlp"]["gate_up"].unsafe_buffer_pointer() for each in (first, second)]
        assert addresses[0] == gate_up.unsafe_buffer_pointer()
        assert addresses[1] - addresses[0] == gate_up.nbytes // 2
        del first, second
        doubled = jax.jit(lambda leaf: 2 * leaf, donate_argnums=0)(gate_up)
        assert doubled.unsafe_buffer_pointer() == addresses[0]
