"""Weights from Hugging Face and to it, against transformers and the safetensors library.

Logits are compared in test_families.
"""

import dataclasses
import json
import math
import pathlib
import shutil
import weakref

import hf_models
import jax
import jax.numpy as jnp
import micro
import numpy as np
import pytest
import torch
import transformers
from hf_weights import hf_state_dict
from refusals import assert_names, assert_refused, refused
from safetensors.torch import load_file, save_file
from tokenizer_files import train_model

import hlat_jax.hf
from hlat_jax.cli import config_files
from hlat_jax.hf import __main__ as hf
from hlat_jax.hf import exporting
from hlat_jax.ops.registry import OPS
from hlat_jax.resolve import resolve
from hlat_jax.run import costs
from hlat_jax.weights import hf_config as config_json
from hlat_jax.weights import hf_names
from hlat_jax.weights.hf_files import ids_that_end_a_text, tokenizer_file
from hlat_jax.weights.hf_reading import open_checkpoint
from hlat_jax.weights.safetensors_file import StoredTensor, Writer
from hlat_jax.weights.trained import Weights, open_weights

pytestmark = pytest.mark.usefixtures("one_torch_thread")


@pytest.fixture
def hf_here(monkeypatch, capsys):
    """A function of the words of an hf command that runs it in this process: (exit code, stdout, stderr)."""
    return micro.command_runner(hf.main, monkeypatch, capsys)


@pytest.fixture(scope="module")
def gqa(tmp_path_factory):
    """A folder with a small GQA model, to be copied before it is changed."""
    return hf_models.save(hf_models.model(hf_models.CONFIGS["gqa"]), tmp_path_factory.mktemp("gqa"))


def tensors(folder):
    return {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}


def edit_json(path, **changes):
    """Sets keys of a JSON file; a value of ... takes its key away."""
    content = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in content.items() if value is not ...}))


def same_bits(found, expected):
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype
        width = {2: torch.int16, 4: torch.int32}[tensor.element_size()]
        assert torch.equal(found[name].view(width), tensor.view(width)), name


def test_loaded_parameters_match_an_independent_mapping(tmp_path):
    for case, config in hf_models.CONFIGS.items():
        folder = hf_models.save(hf_models.model(config), tmp_path / case)
        for fuse_qkv in (True, False):
            _, params = hlat_jax.hf.load(folder, fuse_qkv=fuse_qkv)
            assert ("qkv" in params["layers"]["attention"]) == fuse_qkv
            same_bits(hf_state_dict(jax.tree.map(np.asarray, params)), tensors(folder))


@pytest.mark.parametrize(
    ("case", "dtype", "options"),
    [
        ("gqa", torch.bfloat16, {"max_shard_size": "60KB"}),
        ("tied", torch.bfloat16, {}),
        ("llama3", torch.float32, {"max_shard_size": "200KB"}),
        ("mistral", torch.float32, {}),
    ],
)
def test_import_and_then_export_are_bitwise_identical(case, dtype, options, tmp_path, hf_here):
    source = hf_models.save(hf_models.model(hf_models.CONFIGS[case]), tmp_path / "hf", dtype=dtype, **options)
    (source / "tokenizer_config.json").write_text('{"chat_template": "of the source"}')
    assert (len(list(source.glob("*.safetensors"))) > 2) == bool(options)
    code, out, _ = hf_here("import", source, "--out", tmp_path / "ours")
    assert code == 0, out
    code, out, _ = hf_here("export", tmp_path / "ours", f"--out={tmp_path / 'back'}")
    assert code == 0, out
    for folder in (tmp_path / "ours", tmp_path / "back"):
        same_bits(tensors(folder), tensors(source))
        for name in ("generation_config.json", "tokenizer_config.json"):
            assert (folder / name).read_text() == (source / name).read_text()
        assert json.loads((folder / "config.json").read_text()) == json.loads((source / "config.json").read_text())


def test_weights_are_read_into_shardings_and_cast_while_reading(gqa):
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("x",))
    axes = {"layers.mlp.down": (None, "x"), "embed": ("x",), "layers.mlp.gate_up": (None, None, None, "x")}
    axes["layers.attention.qkv"] = ("x",)  # by layers, as stages of a pipeline

    def sharding(path, _):
        name = ".".join(entry.key for entry in path)
        return jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*axes.get(name, ())))

    model, whole = hlat_jax.hf.load(gqa)
    weights = open_weights(gqa)
    assert (weights.model, weights.step) == (model, 0)
    jax.tree.map(np.testing.assert_array_equal, weights.restore(None), whole)
    shardings = jax.tree_util.tree_map_with_path(sharding, weights.arrays)
    found = weights.restore(shardings, dtype=jnp.bfloat16)
    assert found["embed"].addressable_shards[1].data.shape == (192, 96)
    rounded = jax.tree.map(lambda leaf: np.asarray(leaf).astype(jnp.bfloat16), whole)
    jax.tree.map(np.testing.assert_array_equal, found, rounded)


def test_an_export_takes_a_tokenizer_where_it_has_none(gqa, tmp_path, hf_here):
    own, other = (train_model(tmp_path / f"{n}.model", byte_fallback=True, vocab_size=n) for n in (320, 310))
    for has_own in (False, True):
        folder = shutil.copytree(gqa, tmp_path / f"hf{has_own}")
        if has_own:
            shutil.copy(own, folder / "tokenizer.model")
        out = tmp_path / f"back{has_own}"
        code, _, err = hf_here("export", folder, f"--out={out}", f"--tokenizer={own}")
        assert code == 0, err
        assert (out / "tokenizer.model").read_bytes() == pathlib.Path(own).read_bytes()
        assert (out / "tokenizer_config.json").exists() == (not has_own)  # files that came along stay as they are
    found = hf_here("export", folder, f"--out={tmp_path / 'x'}", f"--tokenizer={other}")
    assert_refused(found, f"--tokenizer={other}", folder)


def test_a_layer_is_read_once_whatever_the_number_of_its_shards(gqa, monkeypatch):
    weights, reads = open_weights(gqa), []
    read = StoredTensor.read
    monkeypatch.setattr(StoredTensor, "read", lambda self: reads.append(self.name) or read(self))
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("x", "y"))
    weights.restore(jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x")))
    assert sorted(reads) == sorted(tensors(gqa))


def test_config_defaults_match_transformers():
    short = {key: value for key, value in hf_models.SMALL.items() if key not in ("rms_norm_eps", "num_key_value_heads")}
    del short["max_position_embeddings"]
    short |= {"num_attention_heads": 32, "hidden_size": 128}  # a Qwen without the field has 32 key-value heads
    for kind, head_dim in {"llama": 4, "mistral": 4, "qwen2": 4, "qwen3": 128}.items():
        theirs = transformers.AutoConfig.for_model(kind, **short)
        ours = config_json.model_config(short | {"model_type": kind}, where="short")
        assert (ours.norm_eps, ours.num_kv_heads) == (theirs.rms_norm_eps, theirs.num_key_value_heads)
        assert (ours.head_dim, ours.max_positions) == (head_dim, theirs.max_position_embeddings)
        assert getattr(theirs, "head_dim", head_dim) == head_dim
        assert (ours.tie_embeddings, ours.rope_theta) == (False, theirs.rope_parameters["rope_theta"])
        assert (ours.sliding_window or None) == getattr(theirs, "sliding_window", None)


MISTRAL = {"model_type": "mistral", "architectures": None, "sliding_window": 8}
QWEN = {"model_type": "qwen2", "architectures": None, "use_sliding_window": True, "sliding_window": 8}
# Changes of the config of a small GQA model of transformers -> the fields that the refusal names.
UNSUPPORTED = [
    (MISTRAL | {"attention_bias": True}, "attention_bias=True", "mistral", "False"),
    ({"attention_bias": 1}, "attention_bias=1", "llama"),
    ({"sliding_window": 2047}, "sliding_window=2047", "max_position_embeddings=2048"),
    ({"sliding_window": "4096"}, "sliding_window='4096'"),
    ({"use_sliding_window": True}, "sliding_window=None"),
    ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types=", "'full_attention'", "llama"),
    (MISTRAL | {"layer_types": ["full_attention", "sliding_attention"]}, "layer_types=", "'sliding_attention'"),
    (MISTRAL | {"sliding_window": 0}, "sliding_window=0"),
    (QWEN | {"layer_types": ["sliding_attention"]}, "layer_types=['sliding_attention']", "2"),
    (QWEN | {"max_window_layers": "1"}, "max_window_layers='1'"),
    (QWEN | {"use_sliding_window": False, "layer_types": ["sliding_attention"] * 2}, "layer_types=", "=None"),
    ({"no_rope_layers": [1, 0]}, "no_rope_layers=[1, 0]"),
    ({"quantization_config": {"bits": 4}}, "quantization_config="),
    ({"rope_parameters": {"rope_type": ["yarn"]}}, "rope_type=['yarn']"),
    ({"rope_parameters": {"rope_type": "linear", "factor": math.nan}}, "rope_factor=nan"),
    ({"rope_scaling": {"type": "dynamic", "factor": 2.0}, "rope_parameters": ...}, "'dynamic'", "'linear'", "'yarn'"),
    ({"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "truncate": False}}, "truncate=false"),
    ({"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "beta_slow": 64}}, "rope_beta_fast=32.0", "64"),
    # two values of one field: in either spelling, in both, and beside them
    ({"rope_scaling": {"type": "linear", "factor": 2.0}},
     "rope_scaling.type='linear'", "rope_parameters.rope_type='default'"),
    ({"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64},
      "original_max_position_embeddings": 128},
     "original_max_position_embeddings=128", "rope_parameters.original_max_position_embeddings=64"),
    ({"rope_parameters": {"rope_type": "llama3", "factor": 2.0}}, "rope_type='llama3'"),
    ({"rope_parameters": {"rope_type": "default", "factor": 2.0}}, "factor", "rope_type='default'"),
    ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "partial_rotary_factor=0.5"),
    ({"rope_parameters": {"rope_theta": "1e4"}}, "rope_theta='1e4'"),
    ({"rope_theta": 1e6}, "rope_theta=1000000.0", "rope_parameters"),
    ({"model_type": ["llama"]}, "model_type=['llama']", "llama"),
    ({"model_type": "olmo2", "architectures": ["Olmo2ForCausalLM"]}, "model_type='olmo2'", "['Olmo2ForCausalLM']"),
    ({"hidden_size": ...}, "hidden_size "),
    ({"num_hidden_layers": 10**7}, "num_layers=10000000"),
    ({"num_attention_heads": 5, "head_dim": None}, "hidden_size=96"),
    ({"num_key_value_heads": 4}, "num_kv_heads=4"),
]  # fmt: skip


def test_an_unsupported_config_is_refused_naming_the_field(gqa, tmp_path, hf_here):
    whole = json.loads((gqa / "config.json").read_text())
    for change, *facts in UNSUPPORTED:
        changed = {key: value for key, value in (whole | change).items() if value is not ...}
        with refused("config.json: ", *facts):
            config_json.model_config(changed, where="config.json")
    folder = shutil.copytree(gqa, tmp_path / "hf")
    edit_json(folder / "config.json", mlp_bias=True)
    found = hf_here("import", folder, f"--out={tmp_path / 'ours'}")
    assert_refused(found, "mlp_bias=True")
    assert found[2].count("\n") == 1
    assert not (tmp_path / "ours").exists()


SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
         "head_dim", "vocab_size", "rope_theta", "rms_norm_eps", "max_position_embeddings",
         "tie_word_embeddings")  # fmt: skip
PUBLISHED = {  # the sizes of the model, of which a file may leave some out (...), and its other fields
    "SmolLM-135M": ((576, 1536, 30, 9, 3, 64, 49152, 1e4, 1e-5, 2048, True), {
        "head_dim": ..., "rope_scaling": None, "attention_bias": False, "mlp_bias": False, "pretraining_tp": 1}),
    "Llama-3-8B": ((4096, 14336, 32, 32, 8, 128, 128256, 5e5, 1e-5, 8192, False), {
        "head_dim": ..., "rope_scaling": None, "attention_bias": False, "attention_dropout": 0.0}),
    "Llama-3.2-1B": ((2048, 8192, 16, 32, 8, 64, 128256, 5e5, 1e-5, 131072, True), {
        "rope_scaling": {"factor": 32.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0, "rope_type": "llama3",
                         "original_max_position_embeddings": 8192}, "eos_token_id": [128001, 128008]}),
    "a Llama of 2023 with the defaults of its base class": (
        (2048, 5632, 22, 32, 32, 64, 32000, 1e4, 1e-6, 2048, False), {
        "num_key_value_heads": ..., "head_dim": ..., "rope_theta": ..., "max_sequence_length": 2048,
        "pruned_heads": {}, "is_decoder": False, "id2label": {"0": "LABEL_0"}, "tokenizer_class": None}),
    "a Llama with windows switched off": ((896, 4864, 4, 14, 2, 64, 151936, 1e6, 1e-6, 32768, True), {
        "head_dim": ..., "use_sliding_window": False, "max_window_layers": 4, "sliding_window": 4096,
        "layer_types": ["full_attention"] * 4}),
    "Mistral-7B-v0.1": ((4096, 14336, 32, 32, 8, 128, 32000, 1e4, 1e-5, 32768, False), {
        "head_dim": ..., "sliding_window": 4096}),
    "Qwen2.5-0.5B": ((896, 4864, 24, 14, 2, 64, 151936, 1e6, 1e-6, 32768, True), {
        "head_dim": ..., "use_sliding_window": False, "max_window_layers": 24, "sliding_window": 32768,
        "use_mrope": False}),
    "Qwen3-0.6B": ((1024, 3072, 28, 16, 8, 128, 151936, 1000000, 1e-6, 40960, True), {
        "attention_bias": False, "use_sliding_window": False, "max_window_layers": 28, "sliding_window": None}),
    "Qwen3-8B": ((4096, 12288, 36, 32, 8, 128, 151936, 1e6, 1e-6, 40960, False), {
        "attention_bias": False, "use_sliding_window": False, "max_window_layers": 36, "sliding_window": None}),
}  # fmt: skip
KINDS = {"Mistral": "mistral", "Qwen2.5": "qwen2", "Qwen3": "qwen3"}


def published(name):
    """Returns the config.json that was published with a model."""
    sizes, others = PUBLISHED[name]
    kind = KINDS.get(name.partition("-")[0], "llama")
    found = {"model_type": kind, "architectures": [f"{kind.capitalize()}ForCausalLM"], "hidden_act": "silu"}
    found |= {"initializer_range": 0.02, "use_cache": True, "torch_dtype": "bfloat16", "transformers_version": "4.42.3"}
    found |= {"bos_token_id": 1, "eos_token_id": 2} | dict(zip(SIZES, sizes, strict=True)) | others
    return {key: value for key, value in found.items() if value is not ...}


def as_written_by_transformers_5(found):
    """Returns the same config.json in the spelling of transformers 5."""
    new = {key: value for key, value in found.items() if key not in ("rope_theta", "rope_scaling", "torch_dtype")}
    rope = {"rope_type": "default", "rope_theta": found.get("rope_theta", 10000.0)} | (found.get("rope_scaling") or {})
    return new | {"dtype": found["torch_dtype"], "rope_parameters": rope}


def test_published_config_files_are_understood():
    for name, (sizes, _) in PUBLISHED.items():
        for found in (published(name), as_written_by_transformers_5(published(name))):
            m = config_json.model_config(found, where=name)
            read = (m.embed_dim, m.mlp_dim, m.num_layers, m.num_heads, m.num_kv_heads, m.head_dim, m.vocab_size)
            assert (*read, m.rope_theta, m.norm_eps, m.max_positions, m.tie_embeddings) == sizes
            assert (m.rope_scaling == "llama3") == ("3.2" in name)
            assert m.rope_scaling == "none" or (m.rope_factor, m.rope_original_positions) == (32, 8192)
            kind = found["model_type"]
            assert (m.qkv_bias, m.qk_norm) == (kind == "qwen2", kind == "qwen3")
            assert (m.sliding_window, m.sliding_window_layers) == (4096 * name.endswith("v0.1"), "")
            assert (config_json.unknown_fields(found) == []) == ("2023" not in name)


def test_shipped_configs_have_the_published_models():
    """And their numbers of parameters, as transformers counts them."""
    names = {"llama3_1b": "Llama-3.2-1B", "llama3_8b": "Llama-3-8B", "mistral_7b": "Mistral-7B-v0.1"}
    names |= {"qwen3_0_6b": "Qwen3-0.6B", "qwen3_8b": "Qwen3-8B"}
    for shipped, name in names.items():
        ours, saved = resolve(config_files.load(shipped)).model, published(name)
        assert config_json.architecture(ours) == config_json.architecture(config_json.model_config(saved, where=""))
        with torch.device("meta"):
            theirs = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**saved))
        assert costs.num_params(ours) == sum(parameter.numel() for parameter in theirs.parameters())


def test_fields_with_neutral_values_are_accepted():
    plain = config_json.model_config(published("SmolLM-135M"), where="b")
    for neutral in (
        {"no_rope_layer_interval": 4, "no_rope_layers": [1] * 30},
        {"quantization_config": {}, "num_experts": 0, "logit_softcap": 0.0, "final_logit_softcapping": None},
        {"hidden_act": "swish", "logits_scaling": 1, "sliding_window": 2048},  # as long as the context
    ):
        assert config_json.model_config(published("SmolLM-135M") | neutral, where="a") == plain
    for kind in ("llama", "mistral"):
        found = hf_models.SMALL | {"model_type": kind, "num_key_value_heads": None, "sliding_window": None}
        model = config_json.model_config(found, where=kind)
        assert (model.num_kv_heads, model.sliding_window) == (found["num_attention_heads"], 0)


def test_only_an_import_warns_of_unknown_fields(gqa, tmp_path, hf_here, capsys):
    folder = shutil.copytree(gqa, tmp_path / "hf")
    path, extra = folder / "config.json", {"unk_token_id": 0, "a_field_without_a_value": None}
    edit_json(path, **extra, _model_name_or_path="a/b", trained_by={"hours": 3})
    for words in (["--out", tmp_path / "ours"], ["--out", tmp_path / "verified", "--verify"]):
        code, _, err = hf_here("import", folder, *words)
        assert (code, err.count("\n")) == (0, 1)
        assert_names(err, f"warning: {path} ", "1 ", "trained_by")
    with pytest.warns(UserWarning, match="trained_by") as warned:
        hlat_jax.hf.load(folder)
    assert len(warned) == 1
    open_weights(tmp_path / "ours")  # a command on the imported folder
    assert not capsys.readouterr().err

    assert hf_here("export", tmp_path / "ours", f"--out={tmp_path / 'back'}")[0] == 0
    assert json.loads((tmp_path / "back/config.json").read_text()) == json.loads(path.read_text())


def test_damaged_file_next_to_the_weights_is_refused_by_name(gqa, tmp_path):
    for number, (file, content, *facts) in enumerate([
        ("tokenizer_config.json", b"{", "JSON"),
        ("added_tokens.json", b'{"<|end|>": [7]}'),
        ("tokenizer.json", b'{"post_processor": {"single": [1]}}', "post_processor", "{'single'"),
        ("tokenizer.json", b"\xff", "JSON"),
        ("generation_config.json", b'{"eos_token_id": [1, "2"]}', "eos_token_id=[1, '2']"),
    ]):  # fmt: skip
        folder = shutil.copytree(gqa, tmp_path / str(number))
        for name in ("tokenizer.model", "tokenizer.json"):
            (folder / name).write_text("{}")
        (folder / file).write_bytes(content)
        with refused(file, *facts):
            open_weights(folder)


def of_ids(*added):
    return {"tokenizer_config.json": {"added_tokens_decoder": {str(id_): {"content": text} for id_, text in added}}}


def test_the_tokenizer_with_the_added_tokens_is_taken(tmp_path):
    for number, (files, taken) in enumerate([
        ({}, "tokenizer.model"),
        ({"added_tokens.json": {"<|end|>": 320}}, "tokenizer.json"),
        (of_ids((1, "<s>"), (320, "<|end|>")), "tokenizer.json"),
        (of_ids((1, "<s>"), (300, "<|end|>")), "tokenizer.json"),  # in the place of another token
        (of_ids((1, "<s>"), (2, "</s>")), "tokenizer.model"),
        ({"added_tokens.json": {"[PAD]": 384}}, "tokenizer.model"),  # the model has no row for it
        ({"tokenizer.model": {"of": "another kind"}}, "tokenizer.json"),
    ]):  # fmt: skip
        folder = tmp_path / str(number)
        folder.mkdir()
        train_model(folder / "tokenizer.model", byte_fallback=True, vocab_size=320)
        for name, content in ({"tokenizer.json": {}} | files).items():
            (folder / name).write_text(json.dumps(content))
        assert tokenizer_file(folder, vocab_size=384) == taken


def test_stop_ids_are_those_of_transformers(tmp_path):
    for files, ids in [
        ({"config.json": {"eos_token_id": [2, 9]}}, (2, 9)),
        ({"generation_config.json": {"eos_token_id": [2, 7]}, "config.json": {"eos_token_id": 9}}, (2, 7)),
        ({"generation_config.json": {"eos_token_id": 5}}, (5,)),
        ({"generation_config.json": {}}, ()),
    ]:
        for name, content in files.items():
            (tmp_path / name).write_text(json.dumps(content))
        assert ids_that_end_a_text(tmp_path) == ids


def changed(name, change):
    return lambda found: found.update({name: change(found[name]).contiguous()})


def added(name, *shape):
    return lambda found: found.update({name: torch.zeros(shape)})


Q0, Q0_BIAS = "model.layers.0.self_attn.q_proj.weight", "model.layers.0.self_attn.q_proj.bias"


MISMATCHED = [
    (lambda found: found.pop("lm_head.weight"), "lm_head.weight", "[384, 96]"),
    (lambda found: found.update({Q0_BIAS: found.pop(Q0)}), "2 differences", Q0, Q0_BIAS, "[96, 96]"),
    (added(Q0_BIAS, 96), "1 difference", Q0_BIAS, "[96]"),
    (changed(Q0, lambda q: q[:48]), Q0, "[48, 96]", "[96, 96]"),
    (changed("model.norm.weight", torch.Tensor.bfloat16), "1 BF16", "20 F32", "--dtype=float32"),
    (changed(Q0, torch.Tensor.double), Q0, "F64", "F32, F16, BF16"),
]


def test_mismatched_tensors_are_refused_by_name(gqa, tmp_path):
    folder = shutil.copytree(gqa, tmp_path / "hf")
    for change, *facts in MISMATCHED:
        found = load_file(gqa / "model.safetensors")
        change(found)
        save_file(found, folder / "model.safetensors")
        with refused(folder, *facts):
            open_checkpoint(folder)


def cut_off(folder):
    path = sorted(folder.glob("*.safetensors"))[0]
    path.write_bytes(path.read_bytes()[:-4])


def edit_index(folder, name):
    path = folder / "model.safetensors.index.json"
    where = json.loads(path.read_text())["weight_map"]
    edit_json(path, weight_map=where | {next(iter(where)): name})


DAMAGE = [
    (lambda folder: sorted(folder.glob("*.safetensors"))[1].unlink(), "model-00002-"),
    (cut_off, "model-00001"),
    (lambda folder: (folder / "config.json").unlink(), "config.json"),
    (lambda folder: (folder / "model.safetensors.index.json").unlink(), "model.safetensors.index.json"),
    (lambda folder: edit_index(folder, "../a.safetensors"), "weight_map['", "='../a.safetensors'"),
    (lambda folder: edit_index(folder, sorted(folder.glob("*.safetensors"))[-1].name), "model.safetensors.index.json"),
    (lambda folder: edit_json(folder / "config.json", num_hidden_layers=100), "config.json", "model.layers.2."),
]


def test_a_damaged_folder_is_refused_naming_the_file(gqa, tmp_path):
    cfg = transformers.AutoModelForCausalLM.from_pretrained(gqa)
    whole = hf_models.save(cfg, tmp_path / "hf", max_shard_size="200KB")
    open_checkpoint(whole)
    for number, (damage, *facts) in enumerate(DAMAGE):
        folder = shutil.copytree(whole, tmp_path / str(number))
        damage(folder)
        with refused(folder, *facts):
            open_checkpoint(folder)


def test_float16_is_loaded_as_float32(gqa, tmp_path):
    made = transformers.AutoModelForCausalLM.from_pretrained(gqa)
    folder = hf_models.save(made, tmp_path, dtype=torch.float16)
    _, params = hlat_jax.hf.load(folder)
    np.testing.assert_array_equal(params["embed"], load_file(folder / "model.safetensors")[hf_names.EMBEDDING].float())
    assert params["embed"].dtype == jnp.float32


def test_rotary_frequency_tables_are_ignored(gqa, tmp_path):
    folder = shutil.copytree(gqa, tmp_path / "hf")
    found = load_file(folder / "model.safetensors")
    save_file(found | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}, folder / "model.safetensors")
    assert open_checkpoint(folder).tensors.keys() == found.keys()


def test_head_must_equal_the_tied_embedding(tmp_path):
    folder = hf_models.save(hf_models.model(hf_models.CONFIGS["tied"]), tmp_path)
    found = load_file(folder / "model.safetensors")
    save_file(found | {hf_names.HEAD: found[hf_names.EMBEDDING].clone()}, folder / "model.safetensors")
    open_checkpoint(folder)
    for change in (lambda head: head + 1e-3, lambda head: head.bfloat16(), lambda head: head[0, 0].clone()):
        save_file(found | {hf_names.HEAD: change(found[hf_names.EMBEDDING])}, folder / "model.safetensors")
        with refused("lm_head.weight", "model.embed_tokens.weight"):
            open_checkpoint(folder)


def test_an_export_with_other_values_leaves_nothing(gqa, tmp_path, hf_here, monkeypatch):
    write = Writer.write

    def write_wrong(self, name, values):
        if name == Q0:
            values = values.copy()
            values.view(np.uint32)[3, 5] ^= 1  # the last bit of one weight
        write(self, name, values)

    monkeypatch.setattr(Writer, "write", write_wrong)
    assert_refused(hf_here("export", gqa, f"--out={tmp_path / 'back'}"), Q0)
    assert list(tmp_path.iterdir()) == []


def test_existing_output_is_not_overwritten(gqa, tmp_path, hf_here):
    (tmp_path / "mine").write_text("")
    for words in (("import", gqa), ("export", gqa), ("average", gqa, gqa)):
        assert_refused(hf_here(*words, f"--out={tmp_path}"), f"--out={tmp_path}")
        assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_shards_keep_every_tensor_in_order_and_below_the_size(gqa, tmp_path):
    exporting.export_checkpoint(open_weights(gqa), tmp_path / "back", shard_bytes=200_000)
    same_bits(tensors(tmp_path / "back"), tensors(gqa))
    sizes = [path.stat().st_size for path in (tmp_path / "back").glob("*.safetensors")]
    assert len(sizes) > 2
    assert max(sizes) < 210_000
    transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "back")


def test_an_export_holds_one_parameter_at_a_time(gqa, tmp_path, monkeypatch):
    read, owners = Weights.read, []

    def alone(self, name):
        assert not any(owner() is not None for owner in owners), f"{name} is read beside another one"
        found = read(self, name)
        owners.append(weakref.ref(found if found.base is None else found.base))
        return found

    monkeypatch.setattr(Weights, "read", alone)
    exporting.export_checkpoint(open_weights(gqa), tmp_path / "back")
    assert len(owners) == 2 * len(jax.tree.leaves(open_weights(gqa).arrays))  # written, and compared


def test_every_model_field_is_compared_after_export():
    model = config_json.model_config(hf_models.SMALL | {"model_type": "llama"}, where="small")
    models = (dataclasses.replace(model, rope_scaling=scaling) for scaling in ("llama3", "yarn"))
    told = {key: value for model in models for key, value in config_json.architecture(model).items()}
    theirs_only = {"fuse_qkv", "depth_scaled_init", "layer_loop", "remat", "allow_nki_on_trn1", *OPS}
    assert told.keys() | theirs_only == {field.name for field in dataclasses.fields(model)}
