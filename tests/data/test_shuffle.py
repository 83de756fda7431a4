"""Shuffled rows: each once an epoch, batch k alone where ids are stored, resumable; older runs keep their order."""

import contextlib
import dataclasses
import json

import micro
import numpy as np
import packer
import pytest

from hlat_jax.cli import config_files
from hlat_jax.config import DataConfig
from hlat_jax.data import packing, positions, streams
from hlat_jax.data.build import build as build_lib
from hlat_jax.data.build import peek
from hlat_jax.data.formats.paths import asset_path
from hlat_jax.data.loader import TrainBatches
from hlat_jax.data.tokenizer import Tokenizer
from hlat_jax.resolve import resolve

TOKENIZER = Tokenizer("package:austen_2k.model")
T, ROWS = 16, 3
LENGTHS = [0, 700, 3, 64, 0, 1500, 1, 17, 90, 2500, 40]  # characters: some documents are much longer than a row


@pytest.fixture(scope="module")
def texts():
    chapter = json.loads(asset_path("austen_train.jsonl").open(encoding="utf-8").readline())["text"]
    return [f"{n}:" + chapter[n * 200 :][:length] for n, length in enumerate(LENGTHS)]


@pytest.fixture(scope="module")
def folder(texts, tmp_path_factory):
    """Holds the texts as text.jsonl, and as token ids in `ids`."""
    path = tmp_path_factory.mktemp("books")
    (path / "text.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    options = build_lib.BuildOptions(tokenizer=str(TOKENIZER.path))
    build_lib.build([str(path / "text.jsonl")], out=path / "ids", options=options)
    return path


def data_config(path, **changes):
    fixed = {"train": str(path), "tokenizer": "package:austen_2k.model", "batch_size": ROWS, "seq_len": T}
    return dataclasses.replace(DataConfig(), **(fixed | {"num_threads": 0, "shuffle_by": "row"} | changes))


def opened(data, **options):
    return contextlib.closing(TrainBatches(data, tokenizer=TOKENIZER, **options))


def take(data, count, **options):
    """Returns (tokens of each batch, position after each)."""
    with opened(data, **options) as batches:
        made = [next(batches) for _ in range(count)]
    return [batch.tokens.tolist() for batch, _ in made], [position for _, position in made]


def flat(texts):
    return [token for text in texts for token in [*TOKENIZER.encode(text).tolist(), TOKENIZER.eos_id]]


@pytest.mark.parametrize("num_threads", [0, 2])
def test_stored_ids_give_the_rows_of_their_concatenation_permuted_anew_in_each_epoch(folder, texts, num_threads):
    tokens, data = flat(texts), data_config(folder / "ids", num_threads=num_threads)
    rows = [tokens[start : start + T] for start in range(0, len(tokens) - T + 1, T)]
    own = len(rows) // ROWS  # the streams have different numbers of rows; each of them has these in an epoch
    found, _ = take(data, own)
    permutations = packer.permutation(len(rows), data.seed)
    assert [row for batch in found for row in batch] == [rows[n] for n in permutations[: own * ROWS]]
    again, _ = take(data_config(folder / "ids", seed=99), own)
    assert again != found


def test_a_dataset_of_one_long_document_fills_a_batch(tmp_path, texts):
    (tmp_path / "book.txt").write_text("\n".join(texts), encoding="utf-8")
    options = build_lib.BuildOptions(tokenizer=str(TOKENIZER.path))
    build_lib.build([str(tmp_path / "book.txt")], out=tmp_path / "ids", options=options)
    assert len(take(data_config(tmp_path / "ids"), 2)[0]) == 2
    with pytest.raises(ValueError, match=r"holds 1 document, fewer than data\.batch_size=3;"):
        TrainBatches(data_config(tmp_path / "ids", shuffle_by="document"), tokenizer=TOKENIZER)


@pytest.mark.parametrize("kind", ["ids", "text.jsonl"])
@pytest.mark.parametrize("kind_of_packing", ["concat", "documents"])
def test_a_run_resumes_at_every_position_with_any_number_of_threads(folder, kind, kind_of_packing, monkeypatch):
    monkeypatch.setattr(packing, "BUFFER_ROWS", 7)
    monkeypatch.setattr(packing, "BUFFER_DOCUMENTS", 2)
    data = data_config(folder / kind, packing=kind_of_packing, window_documents=2)
    expected, after = take(data, 60)
    for step in (0, 1, 6, 7, 8, 20, 41):
        resumed, positions_after = take(dataclasses.replace(data, num_threads=2), 5, position=after[step])
        assert resumed == expected[step + 1 : step + 6]
        np.testing.assert_array_equal(positions_after, after[step + 1 : step + 6])


@pytest.mark.parametrize("kind", ["ids", "text.jsonl"])
def test_spans_name_the_documents_and_tokens_of_a_row(folder, texts, kind, monkeypatch):
    monkeypatch.setattr(packing, "BUFFER_ROWS", 9)
    with opened(data_config(folder / kind)) as batches:
        definition = batches.definition
        for _ in range(25):
            for row, (source, packed) in enumerate(batches.next_rows()):
                assert packed.spans[0].start == 0
                assert packed.spans[-1].stop == T
                for span in packed.spans:
                    number = definition.document(source, row=row, epoch=span.epoch, entry=span.document)
                    for part, place in peek._document_spans(span, number, definition.sources[source].documents):
                        own = flat([texts[part.document]])[part.token :][: part.stop - part.start]
                        assert packed.tokens[part.start : part.stop].tolist() == own
                        assert place.endswith(f"(document {part.document + 1} of text.jsonl)") or kind != "ids"


def test_peek_shows_each_document_in_a_shuffled_row_as_it_is_in_the_text(folder, texts, tmp_path, capsys):
    c = config_files.load("tiny")
    c.data.update(dataclasses.asdict(data_config(folder / "ids", validation="")))
    assert peek.peek(resolve(c), tmp_path / "none", step=1, row=None) == 0
    shown, own = capsys.readouterr().out, [flat([text]) for text in texts]
    places = [(document, token) for document, tokens in enumerate(own) for token in range(len(tokens))]
    inside = 0
    for number in packer.permutation(len(places) // T, c.data.seed)[:ROWS]:
        row = places[number * T : (number + 1) * T]
        for document in sorted({document for document, _ in row}):
            tokens = [token for other, token in row if other == document]
            first, start = tokens[0], row.index((document, tokens[0]))
            before, upto = (TOKENIZER.decode(own[document][:end]) for end in (first, tokens[-1] + 1))
            inside += first > 0 and upto[len(before)] == " "
            end = "</s>" * (tokens[-1] == len(own[document]) - 1)
            place = f"epoch 0, tokens {first} to {tokens[-1]}, at {start} to {start + len(tokens) - 1} of the row"
            name = f"--- document {document} ({folder}/ids, document {document + 1} (document {document + 1} of "
            name += "text.jsonl)"
            assert f"{name}), {place}\n{upto[len(before) :]}{end}\n" in shown
    assert inside  # a leading space belongs to the text


SHIPPED = "package:austen_validation.jsonl"


def saved_with(data, step):
    """Returns the record of a checkpoint, of a run whose model was not recorded."""
    config = {"data": {"batch_size": 1, "seq_len": 256, "packing": "concat"} | data}
    return micro.saved_record(step, [[step]], {"config": config})


def test_the_refusal_of_another_share_says_which_flag_to_give():
    before, now = (
        {"config": {"data": {"validation": text, "mixture": ""}}, "manifest": {"files": []}} for text in (SHIPPED, "5%")
    )
    [line] = streams.data_drift(before, now, num_batches=3)
    assert line == (
        f"data.validation: '{SHIPPED}' in the checkpoint, '5%' now, and a share is held out of data.train: give "
        f"--config.data.validation={SHIPPED}"
    )
    assert streams.data_drift(now, now, num_batches=3) == []


def test_a_run_keeps_the_order_it_began_with(tmp_path, capsys):
    c = config_files.load("tiny")
    c.data.shuffle_by = "document"
    assert positions.with_order_of_run(resolve(c), tmp_path).data.shuffle_by == "document"
    for step, recorded in ((5, "document"), (10, "row")):
        (tmp_path / "checkpoints" / str(step) / "run").mkdir(parents=True)
        content = saved_with({"shuffle_by": recorded}, step)
        (tmp_path / "checkpoints" / str(step) / "run" / "metadata").write_text(json.dumps(content))
    assert positions.with_order_of_run(resolve(c), tmp_path).data.shuffle_by == "row"
    assert capsys.readouterr().out == "data.shuffle_by  document is ignored: this run began with row\n"
