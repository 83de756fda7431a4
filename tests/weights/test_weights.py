"""Weights wherever they lie: read back, averaged, exported from a run, and begun with."""

import dataclasses
import itertools
import json
import shutil
import warnings

import jax
import jax.numpy as jnp
import micro
import numpy as np
import pytest
import transformers
from refusals import assert_names, refused
from safetensors.numpy import load_file, save_file
from tokenizer_files import train_model, write_tokenizer_json

from hlat_jax import config as config_lib
from hlat_jax.cli import config_files, flags
from hlat_jax.data.formats.paths import asset_path
from hlat_jax.data.tokenizer import Tokenizer
from hlat_jax.generate.inference import open_model
from hlat_jax.hf import __main__ as hf
from hlat_jax.hf import averaging, exporting
from hlat_jax.model import apply
from hlat_jax.program import make_program
from hlat_jax.resolve import export_problem, resolve
from hlat_jax.run.resume import open_init, with_weights
from hlat_jax.store.checkpoint_checks import saved_run
from hlat_jax.store.metrics import ROWS_FILE, read_rows
from hlat_jax.weights import hf_config, hf_names
from hlat_jax.weights import trained as trained_weights
from hlat_jax.weights.description import stored_model
from hlat_jax.weights.hf_files import keep_companions
from hlat_jax.weights.init_model import take_model
from hlat_jax.weights.safetensors_file import read_header
from hlat_jax.weights.trained import leaves_by_name, open_weights

MODEL = config_lib.ModelConfig(
    vocab_size=64, num_layers=2, embed_dim=16, mlp_dim=24, num_heads=4, num_kv_heads=2, head_dim=4, max_positions=32
)


def write_weights(folder, *, seed=0, dtype=np.float32, model=MODEL, first=()):
    """Writes a Hugging Face folder of random values, which begin with `first` in each tensor; returns ours by name."""
    rng = np.random.default_rng(seed)
    found = {name: rng.standard_normal(shape).astype(dtype) for name, shape in hf_names.expected_shapes(model).items()}
    for values in found.values():
        values.reshape(-1)[: len(first)] = np.array(first).astype(dtype)
    folder.mkdir()
    save_file(found, folder / "model.safetensors")
    content = hf_config.config_json(model, dtype=np.dtype(dtype).name, token_ids={})
    (folder / "config.json").write_text(json.dumps(content))
    return read_all(folder)


def read_all(folder):
    weights = open_weights(folder)
    return {name: weights.read(name) for name in leaves_by_name(weights.arrays)}


def same_bits(found, expected):
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        assert found[name].dtype == values.dtype
        assert found[name].tobytes() == values.tobytes(), name


def train(folder, workdir, **settings):
    """Trains the micro config on one device to step 2, edited by SECTION__KEY=VALUE, and returns the config."""
    short = {"train__num_steps": 2, "train__eval_every_steps": 0, "train__num_eval_batches": 1}
    c = micro.config(folder, **short | settings)
    micro.train(c, workdir)
    return resolve(c)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """(folder with the micro config, run folder at step 2 with steps 1 and 2, its config), under `mixed`."""
    folder = tmp_path_factory.mktemp("trained")
    settings = {"precision__policy": "mixed", "checkpoint__every_steps": 1, "train__seed": 3}
    return folder, folder / "run", train(folder, folder / "run", **settings)


@pytest.mark.slow
def test_parameters_and_an_export_are_the_rounded_masters(trained, tmp_path):
    _, run, _ = trained
    masters, params = open_weights(run, masters=True), open_weights(run)
    for name in leaves_by_name(params.arrays):
        fp32 = masters.read(name)
        assert fp32.dtype == np.float32
        np.testing.assert_array_equal(params.read(name), fp32.astype(jnp.bfloat16))
    rounded = masters.restore(None, dtype=jnp.bfloat16)
    jax.tree.map(np.testing.assert_array_equal, rounded, params.restore(None))
    assert hf.main(["export", str(run), f"--out={tmp_path / 'hf'}", "--dtype=bfloat16"]) == 0
    found = load_file(tmp_path / "hf/model.safetensors")["model.embed_tokens.weight"]
    np.testing.assert_array_equal(found, params.read("embed"))
    assert json.loads((tmp_path / "hf/config.json").read_text())["torch_dtype"] == "bfloat16"


COMMANDS = {  # each of them opens a checkpoint that was asked for by name
    "open": lambda trained, path, out: open_weights(path),
    "generate and evaluate": lambda trained, path, out: open_model(str(path), config_lib.ParallelConfig()),
    "export": lambda trained, path, out: hf.main(["export", str(path), f"--out={out}"]),
    "average": lambda trained, path, out: averaging.average([path, path], out),
    "init_from": lambda trained, path, out: train(trained[0], out, train__init_from=str(path)),
}


@pytest.mark.slow
def test_every_command_refuses_a_damaged_checkpoint(trained, tmp_path, capsys):
    run = shutil.copytree(trained[1], tmp_path / "run")
    shutil.copytree(run / "checkpoints/2", run / "checkpoints/5")
    micro.reseal(run / "checkpoints/2", lambda saved: saved["norms"].update(params=float("inf")))
    for step, fact in ((5, "step 2"), (2, "params is inf")):
        for command in COMMANDS.values():
            with refused(f"checkpoints/{step} ", fact):
                command(trained, run / f"checkpoints/{step}", tmp_path / "out")
            assert not (tmp_path / "out").exists()
    capsys.readouterr()
    assert open_weights(run).step == 1
    assert_names(capsys.readouterr().err, "checkpoints/5 ", "checkpoints/2 ", "params is inf")


def test_a_damaged_import_or_average_is_refused(tmp_path):
    write_weights(tmp_path / "w")
    hf.main(["import", str(tmp_path / "w"), f"--out={tmp_path / 'import'}"])
    hf.main(["average", str(tmp_path / "w"), str(tmp_path / "w"), f"--out={tmp_path / 'average'}"])
    for name in ("import", "average"):
        open_weights(tmp_path / name)
        path = tmp_path / name / "model.safetensors"
        content = bytearray(path.read_bytes())
        content[-2] ^= 4
        path.write_bytes(content)
        with refused(tmp_path / name, path.name):
            open_weights(tmp_path / name)


def test_exported_run_loads_in_transformers(trained, tmp_path, capsys, caplog, one_torch_thread):
    import torch

    _, run, config = trained
    hf.main(["export", str(run), f"--out={tmp_path / 'hf'}"])
    capsys.readouterr()
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.enable_propagation()
    with warnings.catch_warnings(), caplog.at_level("WARNING"):
        warnings.simplefilter("error")
        model, info = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf", output_loading_info=True)
        tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    transformers.utils.logging.disable_propagation()
    assert not any(info.values())
    assert (caplog.records, capsys.readouterr().err) == ([], "")
    assert model.dtype == torch.float32
    text = "It is a truth universally acknowledged, naïve — and  “so” on.\n"
    ours = Tokenizer(config.data.tokenizer)
    assert tokenizer.encode(text, add_special_tokens=False) == ours.encode(text).tolist()
    assert (tokenizer.eos_token_id, model.generation_config.eos_token_id) == (ours.eos_id, ours.eos_id)
    tokens_BT = ours.encode(text)[None, :16]
    weights = open_weights(run, masters=True)
    logits_BTV = np.asarray(apply(weights.restore(None), weights.model, tokens_BT))
    with torch.no_grad():
        theirs = model(torch.from_numpy(tokens_BT).long()).logits.numpy()
    np.testing.assert_allclose(logits_BTV, theirs, atol=1e-5)  # fp32, sums in another order; measured 1e-6


@pytest.mark.slow
def test_only_the_weights_of_a_run_are_read_largest_first(trained, monkeypatch):
    """The state holds 14 bytes a parameter: fp32 masters and both moments, and the bf16 parameters that are read."""
    weights, sizes = open_weights(trained[1]), []
    read = trained_weights.read_arrays

    def read_and_record(folder, abstract):
        [(path, leaf)] = jax.tree_util.tree_leaves_with_path(abstract)
        assert path[0].key == "params"
        sizes.append(leaf.size)
        return read(folder, abstract)

    monkeypatch.setattr(trained_weights, "read_arrays", read_and_record)
    params = weights.restore(None)
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype(jnp.bfloat16)}
    assert sizes == sorted(sizes, reverse=True)
    assert len(sizes) == len(jax.tree.leaves(params))


@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16])
def test_the_average_is_the_mean_rounded_once(dtype, tmp_path):
    values = write_weights(tmp_path / "w", dtype=dtype, first=(-0.0, 1e-40, 3e38, 1 / 3, 0))
    for count in (2, 7):
        averaging.average([tmp_path / "w"] * count, tmp_path / str(count))
        same_bits(read_all(tmp_path / str(count)), values)
    found = [write_weights(tmp_path / f"w{seed}", seed=seed, dtype=dtype) for seed in range(3)]
    averaging.average([tmp_path / f"w{seed}" for seed in range(3)], tmp_path / "mean")
    for name, mean in read_all(tmp_path / "mean").items():
        exact = np.mean([values[name].astype(np.float64) for values in found], axis=0)
        # some roundings of fp32, and one of what is stored
        tolerance = {"float32": 4e-7, "bfloat16": 2**-8}[mean.dtype.name]
        np.testing.assert_allclose(mean.astype(np.float64), exact, rtol=tolerance, atol=tolerance)
        if mean.dtype == jnp.bfloat16:
            assert np.mean(mean == exact.astype(np.float32).astype(jnp.bfloat16)) > 0.99


@pytest.mark.slow
def test_the_average_of_masters_is_fp32(trained, tmp_path):
    exporting.export_checkpoint(open_weights(trained[1]), tmp_path / "hf", dtype="bfloat16")
    train(trained[0], tmp_path / "run", train__init_from=str(tmp_path / "hf"), precision__policy="mixed")
    averaging.average([tmp_path / "run"] * 2, tmp_path / "mean")
    masters = open_weights(tmp_path / "run", masters=True)
    same_bits(read_all(tmp_path / "mean"), {name: masters.read(name) for name in leaves_by_name(masters.arrays)})


@pytest.mark.slow
def test_exported_tokenizer_adds_bos_as_the_run_was_trained(tmp_path):
    path = write_tokenizer_json(tmp_path, tokenizer_class="PreTrainedTokenizerFast").rename(tmp_path / "mine.json")
    run, mean = tmp_path / "run", tmp_path / "mean"
    train(tmp_path, run, data__tokenizer=str(path), checkpoint__every_steps=1, data__prepend_bos=True)
    averaging.average([run / "checkpoints/1", run / "checkpoints/2"], mean)
    ours, text = Tokenizer(str(path)), "It is a truth, naïve — “quoted” 12,345.6 € 東京"
    for place in (run, mean):
        trained_model = open_model(str(place), config_lib.ParallelConfig())
        first = [ours.bos_id]
        assert trained_model.first_ids(None) == first
        assert trained_model.tokenizer.encode(text).tolist() == ours.encode(text).tolist()
        exported = tmp_path / f"of_{place.name}"
        assert hf.main(["export", str(place), f"--out={exported}"]) == 0
        theirs = transformers.AutoTokenizer.from_pretrained(exported)
        assert theirs.encode(text) == first + ours.encode(text).tolist()
        assert (theirs.eos_token_id, theirs.bos_token_id) == (ours.eos_id, ours.bos_id)
        assert json.loads((exported / "tokenizer_config.json").read_text())["add_bos_token"] is True
        assert json.loads((exported / "config.json").read_text())["eos_token_id"] == ours.eos_id


def test_incompatible_checkpoints_are_not_averaged(tmp_path):
    write_weights(tmp_path / "a")
    for number, (other, *facts) in enumerate([
        ({"model": dataclasses.replace(MODEL, num_layers=3)}, "model.num_layers: 2 ", "3"),
        ({"dtype": jnp.bfloat16}, "embed", "'float32'", "'bfloat16'"),
    ]):  # fmt: skip
        write_weights(tmp_path / str(number), **other)
        with refused(*facts):
            averaging.average([tmp_path / "a", tmp_path / str(number)], tmp_path / "mean")
        assert not (tmp_path / "mean").exists()


def parsed(*words):
    """Returns the config of a command line with `--config=tiny`, its model taken over, the keys given, the lines."""
    mutable, values = flags.parse(["--config=tiny", *(f"--config.{word}" for word in ("data.seq_len=32", *words))])
    given = flags.given_keys(values)
    return mutable, given, take_model(mutable, given=given)


@pytest.fixture(scope="module")
def kinds(trained, tmp_path_factory):
    """A run, one of its checkpoints and its export, each a path to start from."""
    folder, run = tmp_path_factory.mktemp("kinds"), trained[1]
    hf.main(["export", str(run), f"--out={folder / 'hf'}"])
    config = json.loads((folder / "hf/config.json").read_text())
    changed = {"max_position_embeddings": 8192, "rms_norm_eps": 9.999999747378752e-06, "rope_theta": 5e4}
    (folder / "hf/config.json").write_text(json.dumps(config | changed | {"pad_token_id": 7}))
    (folder / "hf/chat_template.jinja").write_text("{{ messages }}")
    (folder / "hf/generation_config.json").write_text(json.dumps({"eos_token_id": [2, 9], "pad_token_id": 7}))
    return {"run": run, "checkpoint": run / "checkpoints/1", "hf": folder / "hf"}


@pytest.mark.quick_cases("checkpoint", "hf")
@pytest.mark.parametrize("kind", ["run", "checkpoint", "hf"])
def test_a_run_takes_the_model_of_its_initial_weights(kind, kinds, tmp_path):
    train_model(tmp_path / "other.model")
    shipped = config_files.load("tiny").model
    mutable, given, lines = parsed(f"train.init_from={kinds[kind]}", "optimizer.clip_norm=0.5")
    config, weights = resolve(mutable), open_weights(kinds[kind])
    assert config.model == dataclasses.replace(weights.model, depth_scaled_init=shipped.depth_scaled_init)
    assert config.model.max_positions == (32 if kind in ("run", "checkpoint") else 8192)
    assert (config.data.tokenizer, config.train.eval_loss_high) == ("package:austen_2k.model", 0)  # it has the same ids
    assert f"num_layers 2 ({shipped.num_layers})" in lines[0]
    open_init(config, Tokenizer(config.data.tokenizer), given=given)
    mutable.data.tokenizer = str(tmp_path / "other.model")  # as a config file sets it
    [line] = take_model(mutable, given=given)
    assert mutable.data.tokenizer == weights.tokenizer in line
    mutable.data.tokenizer = str(tmp_path / "other.model")
    assert take_model(mutable, given={"data.tokenizer"}) == []


def test_only_a_given_key_changes_what_weights_compute(kinds):
    words = ["model.rope_theta=1e6", "model.max_positions=512", "model.attention=einsum", "model.fuse_qkv=false"]
    mutable, given, lines = parsed(f"train.init_from={kinds['hf']}", *words)
    config = resolve(mutable)
    model = config.model
    assert (model.rope_theta, model.max_positions, model.attention, model.fuse_qkv) == (1e6, 512, "einsum", False)
    assert_names(lines[1], "warning: model.rope_theta=1000000.0", kinds["hf"], "50000.0")
    tokenizer = Tokenizer(config.data.tokenizer)
    assert "q" in open_init(config, tokenizer, given=given).arrays["layers"]["attention"]
    with refused("model.rope_theta: 50000.0 ", "1000000.0"):
        open_init(config, tokenizer)
    mutable, given, _ = parsed(f"train.init_from={kinds['hf']}", "model.mlp_dim=64")
    with refused("model.mlp_dim: 48 ", "64"):
        open_init(resolve(mutable), tokenizer, given=given)


def test_a_scaling_of_rope_begins_at_the_given_positions(kinds):
    words = [f"train.init_from={kinds['run']}", "model.rope_scaling=yarn", "model.max_positions=128"]
    mutable, given, lines = parsed(*words)
    assert mutable.model.rope_original_positions == 32
    assert_names(lines[-1], "rope_original_positions 32", kinds["run"])
    open_init(resolve(mutable), Tokenizer(mutable.data.tokenizer), given=given)
    assert parsed(*words, "model.rope_original_positions=16")[0].model.rope_original_positions == 16
    assert parsed(words[0])[0].model.rope_original_positions == config_files.load("tiny").model.rope_original_positions


def test_a_resumed_run_takes_its_own_model(kinds, tmp_path):
    for key in ("init_from", "branch_from"):
        mutable, _ = flags.parse(["--config=tiny", f"--config.train.{key}={tmp_path / 'gone'}@1"])
        assert take_model(mutable, given=(), workdir=tmp_path) == []
        assert mutable.model.num_layers == 6
        assert take_model(mutable, given=(), workdir=kinds["run"])[0].startswith("model ")
        assert mutable.model.num_layers == 2
    assert parsed(f"train.branch_from={kinds['run']}@1")[0].model.num_layers == 2
    mutable.train.update(init_from=str(tmp_path / "gone"), branch_from="")
    (tmp_path / "gone").mkdir()
    (tmp_path / "gone/config.json").write_text('{"model_type": "olmo2"}')
    with refused("train.init_from: ", "model_type='olmo2'"):
        take_model(mutable, given=(), workdir=tmp_path)


def test_an_export_has_the_files_of_its_initial_weights(kinds, trained, tmp_path):
    run, source = shutil.copytree(trained[1], tmp_path / "run"), kinds["hf"]
    keep_companions(source, run)
    (source / "chat_template.jinja").rename(source / "away")  # the source is needed no more
    for kind, path in {"run": run, "mean": tmp_path / "mean"}.items():
        if kind == "mean":
            averaging.average([run / "checkpoints/1", run], path)
        assert open_weights(path).open_tokenizer().stop_ids == (2, 9)
        assert hf.main(["export", str(path), f"--out={tmp_path / kind}-hf"]) == 0
        out = tmp_path / f"{kind}-hf"
        theirs, ours = (json.loads((folder / "config.json").read_text()) for folder in (source, out))
        assert (ours["pad_token_id"], ours["eos_token_id"]) == (7, theirs["eos_token_id"])
        assert (ours["max_position_embeddings"], ours["rope_theta"]) == (32, 1e4)  # of the run, not of the files
        assert (out / "generation_config.json").read_text() == (source / "generation_config.json").read_text()
        tokenizer = transformers.AutoTokenizer.from_pretrained(out)
        assert tokenizer.chat_template == "{{ messages }}"
        assert tokenizer("It is")["input_ids"] == Tokenizer("package:austen_2k.model").encode("It is").tolist()
    (source / "away").rename(source / "chat_template.jinja")
    (run / "huggingface_files/config.json").write_text((tmp_path / "run-hf/config.json").read_text())
    hf.main(["export", str(run), f"--out={tmp_path / 'again'}"])
    assert json.loads((tmp_path / "again/config.json").read_text()) == ours  # as the files have it, when they agree


def test_what_an_export_refuses_is_what_transformers_refuses(tmp_path):
    sizes = [(6, 64), (4, 64), (3, 32), (1, 8), (8, 12), (12, 8)]
    for (heads, width), init_std in itertools.product(sizes, (0.02, 1.5)):
        changes = {"embed_dim": width, "num_heads": heads, "num_kv_heads": 1, "head_dim": 16, "init_std": init_std}
        model = dataclasses.replace(MODEL, **changes)
        content = hf_config.config_json(model, dtype="float32", token_ids={})
        try:
            transformers.LlamaConfig.from_dict(content)
            problem = ""
        except Exception as error:  # of huggingface_hub, not one class
            problem = str(error)
        assert bool(export_problem(model)) == bool(problem), problem
    write_weights(tmp_path / "w", model=model)  # the last, which is refused
    with refused(tmp_path / "w", "model."):
        exporting.export_checkpoint(open_weights(tmp_path / "w"), tmp_path / "hf")
    assert not (tmp_path / "hf").exists()


def test_init_from_copies_only_the_weights(trained, one_device):
    _, run, config = trained
    train_config = dataclasses.replace(config.train, init_from=str(run), seed=5)
    config = dataclasses.replace(config, train=train_config, precision=config_lib.PrecisionConfig("mixed"))
    drawn = make_program(config, one_device).init_state()
    moments = jax.tree.map(np.asarray, drawn["opt_state"]["inner"])
    expected = jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype, leaf.sharding), drawn)
    state, origin = with_weights(drawn, open_init(config, Tokenizer(config.data.tokenizer)), config=config)
    assert origin == {"folder": str(run / "checkpoints/2"), "step": 2}
    assert jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype, leaf.sharding), state) == expected
    assert int(state["step"]) == 0
    jax.tree.map(np.testing.assert_array_equal, state["opt_state"]["inner"], moments)
    masters = open_weights(run, masters=True).restore(None)
    for mine in (state["params"], state["opt_state"]["master"]):
        jax.tree.map(lambda a, b: np.testing.assert_array_equal(a, np.asarray(b).astype(a.dtype)), mine, masters)


@pytest.mark.slow
def test_init_from_is_ignored_at_a_resume(trained, kinds, tmp_path, capsys):
    folder, run = trained[0], shutil.copytree(trained[1], tmp_path / "run")
    keep_companions(kinds["hf"], run)
    begun = tmp_path / "begun"
    settings = {"precision__policy": "mixed", "train__init_from": str(run)}
    config = train(folder, begun, **settings)
    assert_names(capsys.readouterr().out, run / "checkpoints/2", "step 2")
    [first, *_] = read_rows(begun / ROWS_FILE)
    weights = open_weights(run, masters=True)
    masters = map(weights.read, leaves_by_name(weights.arrays))
    norm = np.sqrt(sum(np.sum(np.square(values, dtype=np.float64)) for values in masters))
    assert (first["step"], first["learning_rate"]) == (1, 0.0)
    assert first["param_norm"] == pytest.approx(norm, rel=1e-6)
    assert json.loads((begun / "config.json").read_text())["train"]["init_from"] == config.train.init_from == str(run)
    assert open_weights(begun).stop_ids == (2, 9)
    assert (begun / "huggingface_files/chat_template.jinja").read_text() == "{{ messages }}"

    train(folder, begun, **settings | {"train__init_from": str(tmp_path / "gone"), "train__num_steps": 3})
    assert "\ntrain.init_from " in capsys.readouterr().out
    for step in (2, 3):
        metadata = saved_run(begun / f"checkpoints/{step}")["metadata"]
        assert metadata["init_from"] == {"folder": str(run / "checkpoints/2"), "step": 2}


def test_another_tokenizer_of_the_same_size_is_refused_by_name(trained, tmp_path):
    folder, run, _ = trained
    tokenizer = asset_path("austen_2k.model").read_bytes()
    (tmp_path / "other.model").write_bytes(tokenizer.replace("▁truth".encode(), "▁tooth".encode()))
    with refused("other.model", "train.init_from", "tokenizer.model"):
        train(folder, tmp_path / "run", train__init_from=str(run), data__tokenizer=str(tmp_path / "other.model"))


def test_a_recorded_model_may_have_keys_that_are_gone():
    now = config_lib.ModelConfig(num_layers=3)
    gone = {"ops_table": "a.json", "rms_norm": "reference", "swiglu": "auto", "rope": "paired"}
    assert stored_model(dataclasses.asdict(now) | gone, where="runs/a") == now
    with refused("runs/a", "'rpoe'"):
        stored_model(dataclasses.asdict(now) | {"rpoe": "paired"}, where="runs/a")


def test_a_damaged_safetensors_file_is_refused_by_its_name(tmp_path):
    path = tmp_path / "a.safetensors"
    unreadable = json.dumps({"\x1b[31m\n" * 1000: [0, 8]}).encode()
    for content in (len(unreadable).to_bytes(8, "little") + unreadable, b""):
        path.write_bytes(content)
        with refused(path, "safetensors") as caught:
            read_header(path)
        assert str(caught.value).isprintable()
        assert len(str(caught.value)) < len(str(path)) + 300
