"""Tables of measured times: how they are made, whose they are, and that `auto` honours them."""

import itertools
import json
import pathlib

import jax
import micro
import pytest

from hlat_jax.cli import config_files
from hlat_jax.ops import attention, choices, table
from hlat_jax.ops.registry import OPS
from hlat_jax.parallel.degrees import layout_over
from hlat_jax.parallel.virtual_devices import planned_layout
from hlat_jax.plan import ops_command as command
from hlat_jax.plan import tune
from hlat_jax.resolve import resolve

COMMITTED = sorted((pathlib.Path(__file__).resolve().parents[2] / "benchmarks" / "tuned").glob("*.json"))
CALL = attention.describe_call((2, 32, 4, 8), 2, dtype="float32", has_segments=True, window=8)


EIGHT_ROWS = "--config.data.batch_size=8"  # one for each device of the tests
TWO_OPS = "--ops=attention,cross_entropy"


def resolved(path, rows=8, **model):
    c = config_files.load(str(path))
    c.data.batch_size = rows
    c.model.update(model)
    return resolve(c)


def here(one):
    return layout_over(one, jax.devices())


def test_every_usable_implementation_is_measured_and_others_have_a_reason():
    entry = tune.measure(attention.OP, CALL, platform="cpu", num_rounds=2, num_rows=1)
    assert set(entry.times) == {"einsum", "blocked", "chunked"}
    assert all(seconds > 0 for seconds in entry.times.values())
    assert entry.winner == min(entry.times, key=entry.times.get)
    assert entry.passed_over == dict.fromkeys(("nki", "cudnn", "triton"), "does not run on cpu")
    assert entry.call == json.loads(json.dumps(CALL))
    assert entry.rows_measured == 1


def test_every_op_of_a_layer_is_measured_at_the_shapes_of_a_run(tmp_path):
    one = resolved(micro.write_config(tmp_path))
    for key, call in choices.calls(one, here(one)).items():
        if "x_shape" in call:
            assert list(call["x_shape"][:2]) == [1, one.data.seq_len]
            entry = tune.measure(OPS[key], call, platform="cpu", num_rounds=1, num_rows=0)
            assert (set(entry.times), entry.passed_over) == (set(OPS[key].names), {})


@pytest.fixture
def tuned(tmp_path):
    """(path of a config, path of its table on this machine, as the command writes it)."""
    path = micro.write_config(tmp_path)
    out = tmp_path / "tuned.json"
    assert command.main(["tune", f"--config={path}", EIGHT_ROWS, f"--out={out}", "--rounds=1", TWO_OPS]) == 0
    return path, out


def edited(out, **changes):
    tree = json.loads(out.read_text()) | changes
    out.write_text(json.dumps(tree))
    return tree


def test_ops_table_overrides_levels(tuned, capsys):
    path, out = tuned
    tree = json.loads(out.read_text())
    assert [entry["op"] for entry in tree["entries"]] == ["model.attention", "model.cross_entropy"]
    assert (tree["platform"], tree["jax"]) == ("cpu", jax.__version__)
    plain = resolved(path)
    assert choices.chosen_model(plain, here(plain)).attention == "blocked"
    tree["entries"][0] |= {"times": {"einsum": 0.001, "blocked": 0.002, "chunked": 0.004}, "winner": "einsum"}
    edited(out, entries=tree["entries"])
    one = resolved(path, ops_table=str(out))
    choice = choices.choices(one, here(one))["attention"]
    assert (choice.name, choice.because) == ("einsum", f"1 ms, the fastest in {out}")
    assert choice.passed_over["chunked"] == "4 ms, 4.00 times as long as einsum"
    assert choices.chosen_model(one, here(one)).attention == "einsum"
    named = resolved(path, ops_table=str(out), attention="chunked")
    assert choices.chosen_model(named, here(named)).attention == "chunked"
    assert command.main(["choices", f"--config={path}", EIGHT_ROWS, f"--config.model.ops_table={out}"]) == 0
    assert "model.attention: einsum, 1 ms, the fastest in" in capsys.readouterr().out


def test_call_or_op_without_times_falls_back_to_levels_with_a_reason(tuned):
    path, out = tuned
    one = resolved(path, ops_table=str(out))
    found = choices.choices(one, here(one))
    assert found["attention"].because.endswith(f"the fastest in {out}")
    for key in ("swiglu", "rope"):
        assert found[key].because == f"level 10 on cpu; {out} has no times for this call"
    one = resolved(path, rows=16, ops_table=str(out))
    choice = choices.choices(one, here(one))["attention"]
    assert choice.because == f"level 20 on cpu; {out} has no times for this call"


@pytest.mark.slow
def test_table_is_for_its_platform_and_device_kind_and_notes_another_jax(tuned):
    path, out = tuned
    one, kind = resolved(path, ops_table=str(out)), table.device_kind(jax.devices()[0])
    winner = json.loads(out.read_text())["entries"][0]["winner"]
    assert choices.chosen_model(one, planned_layout(one, 8, platform="cpu")).attention == winner
    with pytest.raises(ValueError, match=r"this device is 'planned' \(neuron\)"):
        choices.chosen_model(one, planned_layout(one, 8, platform="neuron"))
    edited(out, jax="0.1.2")
    found = choices.choices(one, here(one))
    assert found["attention"].because.endswith(f"the fastest in {out}, made with JAX 0.1.2")
    edited(out, device_kind="TPU v9")
    with pytest.raises(ValueError, match="was measured on 'TPU v9'") as caught:
        choices.chosen_model(one, here(one))
    assert f"this device is {kind!r} (cpu)" in str(caught.value)
    assert "Measure this device with python -m hlat_jax.plan tune" in str(caught.value)
    with pytest.raises(ValueError, match="give another file, or remove this one"):
        command.main(["tune", f"--config={path}", EIGHT_ROWS, f"--out={out}"])


WRONG_ENTRIES = [
    ({"times": {"dense": "0.1"}}, "has '0.1' for dense, which must be seconds, a float above 0"),
    ({"times": {"dens": 0.1}, "winner": "dens"}, "has a time of 'dens', which is not one of dense, chunked"),
    ({"op": "model.los"}, "names an unknown op; ops are model.attention, model.cross_entropy"),
]


def test_invalid_table_is_refused_with_file_entry_and_fix(tmp_path):
    out = tmp_path / "tuned.json"
    for text, message in ((None, "cannot be read"), ("[]", "is not a table"), ('{"entries": [{"op": "x"}]}', "is not")):
        if text is not None:
            out.write_text(text)
        with pytest.raises(ValueError, match=message):
            table.read(str(out))
    for changes, said in WRONG_ENTRIES:
        entry = {"op": "model.cross_entropy", "call": {"vocab_rows": 8}, "times": {"dense": 0.1}, "winner": "dense"}
        entry |= {"passed_over": {}, "rows_measured": 1} | changes
        out.write_text(json.dumps({"platform": "cpu", "device_kind": "x", "jax": "0.1", "entries": [entry]}))
        with pytest.raises(ValueError, match="is not a table of measured times") as caught:
            table.read(str(out))
        message = str(caught.value)
        assert f"(entry 0, {entry['op']} at {{'vocab_rows': 8}}, {said}" in message
        assert message.startswith(str(out))
        assert "write it again with python -m hlat_jax.plan tune" in message


def test_committed_tables_cover_their_config_and_decide_its_choices():
    assert COMMITTED
    for path, name in itertools.product(COMMITTED, ("tiny", "160m", "1b")):
        known = table.read(str(path))
        c = config_files.load(name)
        c.model.ops_table = str(path)
        if name == "tiny":
            c.data.batch_size = 4  # of a microbatch, as when they were measured
        one = resolve(c)
        layout = planned_layout(one, 1, platform=known.platform)
        for key, choice in choices.choices(one, layout).items():
            seconds = known.entry(f"model.{key}", choices.calls(one, layout)[key]).times
            assert choice.name == min(seconds, key=seconds.get)
            assert len(seconds) >= 2


def test_choices_for_virtual_devices_explain_every_rejection(capsys, monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    assert command.main(["choices", "--config=7b", "--platform=neuron", "--devices=2048"]) == 0
    said = capsys.readouterr().out
    assert "model.attention: einsum, level 10 on neuron\n" in said
    assert "  not nki: level 1 on neuron, where einsum has 10\n" in said
    assert "for q_shape (1, 4096, 4, 128), num_kv_heads 4, dtype bfloat16, has_segments False" in said
    assert "model.rms_norm: recomputed, level 10 on neuron\n  for x_shape (1, 512, 4096), dtype bfloat16\n" in said
    assert "model.swiglu: recomputed, level 10 on neuron\n  for x_shape (1, 4096, 1376), dtype bfloat16\n" in said
    assert "model.rope: reference, level 10 on neuron\n  for x_shape (1, 4096, 4, 128), dtype bfloat16\n" in said
