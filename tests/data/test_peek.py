"""What peek shows is what a step trains on, wherever it begins; and a run of several sources, packed and skipped."""

import dataclasses
import json

import micro
import numpy as np
import pytest
from data_files import write_jsonl
from refusals import assert_names, refused

from hlat_jax.data import packing, positions
from hlat_jax.data.build import peek
from hlat_jax.data.drift import data_drift
from hlat_jax.data.formats.paths import asset_path
from hlat_jax.data.loader import TrainBatches, batch_hash, make_batch
from hlat_jax.data.streams import identity
from hlat_jax.data.tokenizer import Tokenizer
from hlat_jax.resolve import resolve

pytestmark = pytest.mark.xdist_group("peek")  # its run is costly: one process
TOKENIZER = Tokenizer("package:austen_2k.model")


@pytest.fixture(scope="module")
def texts():
    """Of each of two sources, documents of some hundred characters."""
    chapters = [json.loads(line)["text"] for line in asset_path("austen_train.jsonl").open(encoding="utf-8")]
    return {
        "web": [chapters[i][100 : 101 + 37 * (i % 23)] for i in range(60)],
        "code": [chapters[i][900 : 900 + 61 * (i % 7)] + " é 漢" for i in range(40)],
    }


@pytest.fixture
def config(tmp_path, texts):
    """A mutable config of both sources, in two stages."""
    c = micro.config(tmp_path)
    for name, own in texts.items():
        write_jsonl(tmp_path / f"{name}.jsonl", own)
    c.data.train = f"web={tmp_path}/web.jsonl;code={tmp_path}/code.jsonl"
    c.data.validation = "one=package:austen_validation.jsonl;two=package:austen_train.jsonl"
    c.data.mixture = "web=3,code=1 until_step=10;web=1,code=1"
    c.data.update(max_document_chars=300, window_documents=5, num_threads=0)
    c.train.update(num_steps=12, eval_every_steps=0, num_eval_batches=2)
    c.checkpoint.update(every_steps=7, keep_last=9)
    return c


def batches_before(data, step, **options):
    """(batches, position where the batch of `step` begins)."""
    batches = TrainBatches(data, tokenizer=TOKENIZER, **options)
    for _ in range(step - 1):
        batches.next_rows()
    return batches, batches.get_state()


def shown(resolved, workdir, capsys, *, step, row=None):
    capsys.readouterr()
    code = peek.peek(resolved, workdir, step=step, row=row)
    return code, capsys.readouterr().out


@pytest.mark.parametrize("kind", ["concat", "documents"])
def test_peek_prints_documents_and_text_of_every_row(config, texts, tmp_path, capsys, kind):
    config.data.packing = kind
    resolved = resolve(config)
    code, out = shown(resolved, tmp_path / "none", capsys, step=6)
    assert code == 0
    assert_names(out, tmp_path / "none", "5 batches")
    batches, _ = batches_before(resolved.data, 6)
    for row, (source, packed) in enumerate(batches.next_rows()):
        name = list(texts)[source]
        assert f"\nrow {row}, source {name}, documents or parts: {len(packed.spans)}" in out
        for span in packed.spans:
            number = batches.definition.document(source, row=row, epoch=span.epoch, entry=span.document)
            text = texts[name][number]
            whole = [*packing.document_tokens(text, tokenizer=TOKENIZER, max_chars=300)]
            ids = np.concatenate(whole)[span.token :][: span.stop - span.start]
            place = f"--- document {number} ({tmp_path}/{name}.jsonl, row {number + 1}), epoch {span.epoch}, tokens"
            place += f" {span.token} to {span.token + len(ids) - 1}, at {span.start} to {span.stop - 1} of the row\n"
            after = out.split(place)[1]
            if len(ids) == sum(map(len, whole)):
                pieces = [text[i : i + 300] for i in range(0, max(len(text), 1), 300)]
                assert after.startswith("</s>".join([*pieces, ""]) + "\n")
            else:
                assert after.split("</s>")[0].split("\n---")[0].split("\n\n")[0].strip("\n\ufffd") in text
    batches.close()


@pytest.mark.parametrize("kind", ["concat", "documents"])
def test_peek_does_not_depend_on_the_saved_position(config, tmp_path, capsys, kind):
    config.data.packing = kind
    resolved = resolve(config)
    expected = shown(resolved, tmp_path / "none", capsys, step=9)[1].split("\n", 2)[2]
    for step in (9, 3, 5, 8):
        batches, position = batches_before(resolved.data, step + 1)
        positions.write(tmp_path, step, position=position, data_identity=batches.definition.identity(step))
        batches.close()
        _, out = shown(resolved, tmp_path, capsys, step=9)
        line, rest = out.split("\n", 2)[1:]
        if step == 9:  # where the batch asked for ends
            assert "step" not in line
            continue
        assert_names(line, f"step {step} ", tmp_path / f"positions/{step}.npz", f"{8 - step} batches")
        assert rest.split("\nbatch ")[0] == expected.split("\nbatch ")[0]
    _, one = shown(resolved, tmp_path, capsys, step=9, row=2)
    assert "row 2," in one
    assert "row 1," not in one
    assert one.split("\n", 2)[2].strip() in rest
    for torn in (b"", b"PK", b"torn"):
        (tmp_path / "positions/8.npz").write_bytes(torn)
        assert "after step 5" in shown(resolved, tmp_path, capsys, step=9)[1]
    positions.rewind(tmp_path, 3)
    assert "after step 3" in shown(resolved, tmp_path, capsys, step=9)[1]


def test_peek_refuses_positions_from_other_data(config, tmp_path, capsys):
    resolved = resolve(config)
    batches, position = batches_before(resolved.data, 3)
    positions.write(tmp_path, 2, position=position, data_identity=batches.definition.identity(2))
    batches.close()
    config.data.seed = 5
    for step, row in ((9, None), (9, 1), (2, None), (1, 1)):  # also where the position is kept behind the step
        with refused("2.npz"):
            shown(resolve(config), tmp_path, capsys, step=step, row=row)
        assert "\nrow" not in capsys.readouterr().out
    assert shown(resolve(config), tmp_path / "none", capsys, step=2, row=1)[0] == 0


def test_a_checkpoint_that_names_no_text_is_passed_over(config, tmp_path, monkeypatch):
    data = dataclasses.asdict(resolve(config).data) | {"train": 10**39}
    metadata = {"manifest": {"hash": "", "order": ""}, "tokenizer_sha256": "", "config": {"data": data}}
    monkeypatch.setattr(positions, "saved_run", lambda _: {"metadata": metadata, "position": [[3]]})
    (tmp_path / "checkpoints/3" / positions.RUN_ITEM).mkdir(parents=True)
    (tmp_path / "checkpoints/3" / positions.RUN_ITEM / positions.RUN_FILE).touch()
    assert positions.nearest_position(tmp_path, 3, data_identity=str) is None


def test_identity_depends_only_on_what_determines_batches(config):
    data = dataclasses.asdict(resolve(config).data)

    def of(**changes):
        facts = {"manifest": {"hash": "m", "order": "o"}, "tokenizer_sha256": "t", "num_batches": 12}
        return identity(data | {key: changes.pop(key) for key in [*changes] if key in data}, **facts | changes)

    for same in ({"num_threads": 9}, {"on_bad_record": "skip"}, {"train": "web=a;code=b"}, {"window_documents": 9}):
        assert of(**same) == of()
    weights = data["mixture"]  # web=3,code=1 until_step=10;web=1,code=1
    for same in (
        "web=6,code=2 until_step=10;web=2,code=2 until_step=12;web=0,code=1",
        "web=3,code=1 until_step=4;" + weights,
    ):
        assert of(mixture=same) == of()
    later = "web=3,code=1 until_step=12;web=1,code=1"
    assert of(mixture=later) != of()
    assert of(mixture=later, num_batches=10) == of(num_batches=10)
    others = [{"seed": 9}, {"mixture": "web=3,code=1 until_step=9;web=1,code=1"}, {"seq_len": 9}, {"batch_size": 9},
              {"packing": "documents"}, {"packing": "documents", "window_documents": 9}, {"shuffle": False},
              {"max_document_chars": 9}]  # fmt: skip
    assert len({of(), *(of(**other) for other in others)}) == 1 + len(others)
    assert len({of(), of(manifest={"hash": "n", "order": "o"}), of(manifest={"hash": "m", "order": "p"}),
                of(tokenizer_sha256="u"), of(num_batches=13)}) == 5  # fmt: skip


@pytest.mark.slow
def test_a_run_of_two_sources_validates_and_shows_each(config, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(positions, "EVERY_STEPS", 4)
    run = tmp_path / "run"
    with open(tmp_path / "code.jsonl", "a") as file:
        file.write('{"text": null}\n' * 4)
    config.data.update(packing="documents", on_bad_record="skip", batch_size=4)
    resolved = resolve(config)
    assert micro.train(config, run) == 0
    out = capsys.readouterr().out
    assert_names(out, "web 75.00%", "code 25.00%", "step 10", "web 50.00%", "code 50.00%")
    written = micro.rows(run)
    train_rows = [row for row in written if "loss" in row]
    batches, _ = batches_before(resolved.data, 1)
    for row in train_rows:
        batch = make_batch([packed for _, packed in batches.next_rows()])
        assert row["batch_hash"] == batch_hash(batch, rows=range(4))
        assert row["padding_share"] == (batch.segment_ids == 0).mean()
        assert row["tokens"] - (train_rows[row["step"] - 2]["tokens"] if row["step"] > 1 else 0) == batch.weights.sum()
    batches.close()
    assert train_rows[-1]["skipped_records"] > 0
    mean = sum(row["padding_share"] for row in train_rows) / len(train_rows)
    assert_names(out, f"padding: {mean:.2%}", f"skipped: {train_rows[-1]['skipped_records']:,}")
    last = written[-1]
    assert last["eval_tokens"] == last["eval_tokens/one"] + last["eval_tokens/two"]
    nats = sum(last[f"eval_loss/{name}"] * last[f"eval_tokens/{name}"] for name in ("one", "two"))
    assert last["eval_loss"] == pytest.approx(nats / last["eval_tokens"])
    assert {f"{key}/{name}" for key in ("perplexity", "bits_per_byte") for name in ("one", "two")} < set(last)

    assert sorted(path.name for path in (run / "positions").iterdir()) == ["12.npz", "4.npz", "8.npz"]
    assert micro.saved_steps(run) == [7, 12]
    for step, begins in ((4, "beginning"), (7, "step 4"), (8, "step 7"), (11, "step 8")):
        code, shown_text = shown(resolved, run, capsys, step=step)
        assert code == 0
        assert_names(shown_text, begins, run / "metrics.jsonl", f"step {step}")
    longer = dataclasses.replace(resolved, train=dataclasses.replace(resolved.train, num_steps=14))
    code, ahead = shown(longer, run, capsys, step=14)
    assert code == 0
    assert_names(ahead, "step 12", "step 14")
    content = (run / "metrics.jsonl").read_text().replace(train_rows[4]["batch_hash"], "0" * 32)
    (run / "metrics.jsonl").write_text(content)
    assert shown(resolved, run, capsys, step=5)[0] == 1


def test_future_mixture_stages_may_change_on_resume(config):
    first = "web=3,code=1 until_step=5;web=1,code=1"

    def drift(weights):
        data = dataclasses.asdict(resolve(config).data)
        configs = [{"data": data | {"mixture": mixture}} for mixture in (first, weights)]
        return data_drift(*({"manifest": {"files": []}, "config": each} for each in configs), num_batches=7)

    for weights in ("web=3,code=1 until_step=6;web=1,code=1", "web=3,code=1 until_step=5;web=2,code=1", "web=3,code=1"):
        [line] = drift(weights)
        assert_names(line, "data.mixture", "step 8")
    assert drift("web=3,code=1 until_step=5;web=1,code=1 until_step=9;web=0,code=1") == []
