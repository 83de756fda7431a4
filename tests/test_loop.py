"""What the loop owes a run in the moments that hurt: a signal in the wrong place, a bad record, a second process."""

import json
import os
import signal

import jax
import pytest
from micro import saved_steps, write_config

from hlat_jax import config as config_lib
from hlat_jax import loop
from hlat_jax.checkpoint import Checkpointer
from hlat_jax.eval.validation import Validation
from hlat_jax.machine import fitting_layout
from hlat_jax.metrics import ROWS_FILE, read_rows
from hlat_jax.process import only_process


@pytest.fixture
def micro(tmp_path):
    """A mutable micro config on one of the virtual devices."""
    c = config_lib.load(str(write_config(tmp_path)))
    c.train.num_eval_batches = 1
    return c


@pytest.fixture
def train(tmp_path, monkeypatch):
    """A function that trains a mutable config in `tmp_path/run` on one device."""
    one = jax.devices()[:1]
    monkeypatch.setattr(loop.jax, "devices", lambda: one)
    return lambda c: loop.train(config_lib.resolve(c), tmp_path / "run")


def test_a_signal_during_validation_loses_no_step(micro, train, tmp_path, monkeypatch, capsys):
    micro.checkpoint.every_steps = 0
    evaluate = Validation.__call__
    calls = []

    def evaluate_and_signal(self, params):
        row = evaluate(self, params)
        calls.append(row)
        if len(calls) == 2:  # at step 6
            os.kill(os.getpid(), signal.SIGTERM)
        return row

    monkeypatch.setattr(Validation, "__call__", evaluate_and_signal)
    assert train(micro) == 0
    assert "after step 6, saved in" in capsys.readouterr().out
    assert saved_steps(tmp_path / "run") == [6]
    assert [row["step"] for row in read_rows(tmp_path / "run" / ROWS_FILE) if "loss" in row] == list(range(1, 7))


def test_after_a_signal_the_state_is_saved_before_what_is_due_is_evaluated(micro, train, tmp_path, monkeypatch):
    micro.checkpoint.every_steps = 0
    dispatch, evaluate, saved_before = loop._dispatch, Validation.__call__, []

    def dispatch_and_signal(run, *rest):
        found = dispatch(run, *rest)
        if run.step == 6:  # where a validation is due
            os.kill(os.getpid(), signal.SIGTERM)
        return found

    def evaluate_and_look(self, params):
        saved_before.append(saved_steps(tmp_path / "run"))
        return evaluate(self, params)

    monkeypatch.setattr(loop, "_dispatch", dispatch_and_signal)
    monkeypatch.setattr(Validation, "__call__", evaluate_and_look)
    assert train(micro) == 0
    assert saved_before[-1] == saved_steps(tmp_path / "run")
    assert len(saved_before[-1]) == 1


def test_a_bad_record_is_named_and_the_steps_before_it_are_saved(micro, train, tmp_path):
    text = tmp_path / "text.jsonl"
    lines = [json.dumps({"text": f"{index} " + "word and word " * 40}) for index in range(40)]
    lines[29] = json.dumps({"text": None})
    text.write_text("\n".join(lines) + "\n")
    micro.data.train = str(text)
    micro.data.shuffle = False
    micro.checkpoint.every_steps = 0
    micro.train.num_steps = 1000
    with pytest.raises(ValueError, match=r"text.jsonl, row 30: .*another --workdir"):
        train(micro)
    done = [row["step"] for row in read_rows(tmp_path / "run" / ROWS_FILE) if "loss" in row]
    assert saved_steps(tmp_path / "run") == [done[-1]]
    assert done[-1] > 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"data.validation=.*held_out.jsonl': none of 1 documents can be read.* row 1: 'text' is empty"),
        ("\n", r"held_out.jsonl' holds no text to predict; give more, or ''"),
    ],
)
def test_held_out_text_that_gives_nothing_to_predict_is_refused(micro, train, tmp_path, text, message):
    held_out = tmp_path / "held_out.jsonl"
    held_out.write_text(json.dumps({"text": text}) + "\n")
    micro.data.validation = str(held_out)
    with pytest.raises(ValueError, match=message):
        train(micro)


def test_permanent_checkpoints_are_saved_at_their_own_multiples(micro, train, tmp_path):
    micro.checkpoint.every_steps = 5
    micro.checkpoint.keep_every_steps = 7
    micro.checkpoint.keep_last = 1
    assert train(micro) == 0
    assert saved_steps(tmp_path / "run") == [7, 14, 21, 24]


def test_a_second_process_in_the_run_folder_is_refused(tmp_path):
    with only_process(tmp_path / "run"), pytest.raises(ValueError, match="another process trains in"):
        only_process(tmp_path / "run").__enter__()
    with only_process(tmp_path / "run"):
        pass  # free again


def test_other_validation_text_is_refused_on_resume(micro, train, tmp_path):
    text = tmp_path / "held_out.jsonl"
    text.write_text(json.dumps({"text": "one text " * 200}) + "\n")
    micro.data.validation = str(text)
    micro.train.num_steps = 2
    assert train(micro) == 0
    text.write_text(json.dumps({"text": "another text " * 200}) + "\n")
    micro.train.num_steps = 4
    with pytest.raises(ValueError, match="validation_manifest"):
        train(micro)


def test_a_finished_run_whose_checkpoint_is_damaged_goes_back_instead_of_claiming_completeness(
    micro, train, tmp_path, capsys
):
    micro.checkpoint.every_steps = 2
    micro.train.num_steps = 4
    assert train(micro) == 0
    biggest = max((tmp_path / "run/checkpoints/4").rglob("*"), key=lambda p: p.stat().st_size if p.is_file() else 0)
    content = bytearray(biggest.read_bytes())
    content[len(content) // 2] ^= 1
    biggest.write_bytes(content)
    capsys.readouterr()
    assert train(micro) == 0
    shown = capsys.readouterr()
    assert "complete:" not in shown.out
    assert "checkpoints/4 is damaged" in shown.err
    assert saved_steps(tmp_path / "run") == [2, 4]


def test_non_finite_steps_are_counted_across_a_resume(micro, train, tmp_path):
    micro.checkpoint.every_steps = 1
    micro.checkpoint.keep_last = 10
    micro.train.eval_every_steps = 0
    micro.optimizer.peak_lr = 1e30
    micro.optimizer.warmup_steps = 0
    with pytest.raises(loop.NonFiniteError, match="3 steps in a row"):
        train(micro)
    stopped_at = read_rows(tmp_path / "run" / ROWS_FILE)[-1]["step"]
    evidence = json.loads((tmp_path / "run/nonfinite.json").read_text())
    # the batch of step n begins where the checkpoint of step n - 1 says that the data goes on
    resolved = config_lib.resolve(micro)
    checkpointer = Checkpointer(tmp_path / "run", config=resolved.checkpoint, read_only=True)
    layout = fitting_layout(resolved, jax.devices())
    step, _, position, metadata = checkpointer.restore(loop.abstract_state(resolved, layout))
    checkpointer.close()
    assert step == stopped_at - 1
    assert evidence["data_position_before_that_batch"] == position.tolist()
    assert metadata["num_nonfinite"] == 2
    with pytest.raises(loop.NonFiniteError, match="3 steps in a row"):
        train(micro)
    assert read_rows(tmp_path / "run" / ROWS_FILE)[-1]["step"] == stopped_at
    micro.train.max_nonfinite_steps = 4  # the remedy that the error names is allowed
    with pytest.raises(loop.NonFiniteError, match="4 steps in a row"):
        train(micro)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"parallel.fsdp": 8, "model.embed_dim": 36},
            r"model.embed_dim=36 does not divide into the 8 parts of parallel.fsdp=8",
        ),
        (
            {"parallel.tensor": 2, "model.mlp_dim": 49},
            r"model.mlp_dim=49 does not divide into the 2 parts of parallel.tensor=2",
        ),
        ({"parallel.tensor": 2, "model.num_kv_heads": 1}, "set model.fuse_qkv=False, or lower"),
        ({"data.batch_size": 12}, "make data.batch_size a multiple of 8"),
    ],
)
def test_sizes_that_do_not_divide_over_the_devices_are_refused_by_name(micro, changes, message):
    micro.update_from_flattened_dict(changes)
    with pytest.raises(ValueError, match=message):
        fitting_layout(config_lib.resolve(micro), jax.devices())
