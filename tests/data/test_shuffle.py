"""Shuffled rows: each once an epoch, batch k alone where ids are stored, resumable; older runs keep their order."""

import contextlib
import dataclasses
import json

import numpy as np
import packer
import pytest

from hlat_jax.cli import config_files
from hlat_jax.config import DataConfig
from hlat_jax.data import packing, positions, sources, streams
from hlat_jax.data.build import build as build_lib
from hlat_jax.data.build import peek
from hlat_jax.data.build.build_task import BuildOptions
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
    options = BuildOptions(tokenizer=str(TOKENIZER.path))
    watch = lambda *_: contextlib.nullcontext()  # noqa: E731
    build_lib.build([str(path / "text.jsonl")], out=path / "ids", options=options, num_workers=1, watch=watch)
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


def test_batch_k_of_stored_ids_needs_no_batch_before_it(folder, monkeypatch):
    data, k = data_config(folder / "ids"), 1000
    expected, after = take(data, k + 1)
    with opened(data) as batches:
        definition, read = batches.definition, sources.TokenRows.__getitem__
        lengths = [source.documents.token_lengths() for source in definition.sources]
        numbers = []
        monkeypatch.setattr(streams.Source, "number", lambda *_: pytest.fail("walks over the rows before it"))
        place = [positions.compute(definition, row, batch=k, seq_len=T, lengths=lengths) for row in range(ROWS)]
        monkeypatch.undo()
        np.testing.assert_array_equal(place, after[k - 1])
        batches.set_state(np.stack(place))
        monkeypatch.setattr(sources.TokenRows, "__getitem__", lambda rows, n: numbers.append(n) or read(rows, n))
        assert next(batches)[0].tokens.tolist() == expected[k]
    assert len(numbers) <= 2 * ROWS  # a row, and the one after it that is read ahead


def test_a_dataset_of_one_long_document_fills_a_batch(tmp_path, texts):
    (tmp_path / "book.txt").write_text("\n".join(texts), encoding="utf-8")
    options = BuildOptions(tokenizer=str(TOKENIZER.path))
    watch = lambda *_: contextlib.nullcontext()  # noqa: E731
    build_lib.build([str(tmp_path / "book.txt")], out=tmp_path / "ids", options=options, num_workers=1, watch=watch)
    assert len(take(data_config(tmp_path / "ids"), 2)[0]) == 2
    with pytest.raises(ValueError, match=r"holds 1 document, fewer than data\.batch_size=3;"):
        TrainBatches(data_config(tmp_path / "ids", shuffle_by="document"), tokenizer=TOKENIZER)


@pytest.mark.parametrize(("num_rows", "num_documents"), [(40, 1), (80, 1), (5, 2), (5, 100), (1, 1)])
def test_rows_of_texts_are_those_of_a_buffer_of_whole_documents_permuted(
    folder, texts, monkeypatch, num_rows, num_documents
):
    monkeypatch.setattr(packing, "BUFFER_ROWS", num_rows)
    monkeypatch.setattr(packing, "BUFFER_DOCUMENTS", num_documents)
    data = data_config(folder / "text.jsonl")
    found, _ = take(data, 100)
    for row in range(ROWS):
        made, epoch, entry = [], 0, 0
        while len(made) < 100:
            tokens, taken, first_epoch = [], 0, epoch
            while len(tokens) < num_rows * T or (taken < num_documents and epoch == first_epoch):
                own = packer.documents_of(None, texts, data, row=row, epoch=epoch)
                tokens += flat([own[entry]])
                taken, entry = taken + 1, entry + 1
                if entry == len(own):
                    epoch, entry = epoch + 1, 0
            buffer = sorted(tokens[start : start + T] for start in range(0, len(tokens) - T + 1, T))
            now = [batch[row] for batch in found[len(made) : len(made) + len(buffer)]]
            if len(now) == len(buffer):
                assert sorted(now) == buffer
                assert len(now) < 10 or now != [tokens[start : start + T] for start in range(0, len(tokens) - T + 1, T)]
            made += buffer


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


def test_documents_packing_has_the_same_rows_in_each_window_in_another_order(folder):
    data = data_config(folder / "text.jsonl", packing="documents", window_documents=100)  # a window is an epoch
    (plain, after), (shuffled, _) = (take(dataclasses.replace(data, shuffle_by=by), 100) for by in ("document", "row"))
    for row in range(ROWS):
        end = 1 + sum(position[row, 1] == 0 for position in after)
        before, now = ([batch[row] for batch in made[:end]] for made in (plain, shuffled))
        assert sorted(now) == sorted(before)
        assert now != before


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


def test_the_order_is_part_of_the_identity_and_older_runs_have_that_of_documents(folder):
    found = {}
    for order in ("document", "row"):
        with opened(data_config(folder / "ids", shuffle_by=order)) as batches:
            found[order] = batches.definition.identity(5)
            manifest = batches.manifest
    older = dataclasses.asdict(data_config(folder / "ids"))
    del older["shuffle_by"]
    options = {"manifest": manifest, "tokenizer_sha256": TOKENIZER.sha256, "num_batches": 5}
    assert streams.identity(older, **options) == found["document"] != found["row"]


SHIPPED = "package:austen_validation.jsonl"


def saved_with(data, step):
    """Returns the record of a checkpoint, as a run of before its model was recorded wrote it."""
    config = {"data": {"batch_size": 1, "seq_len": 256, "packing": "concat"} | data}
    return {"position": [[step]], "arrays": {}, "metadata": {"config": config, "tokens": 0, "num_nonfinite": 0}}


@pytest.mark.parametrize(
    ("recorded", "asked", "kept"),
    [(SHIPPED, "5%", SHIPPED), (SHIPPED, "10%", "10%"), (SHIPPED, "", ""), ("a.txt", "5%", "5%"), ("5%", "5%", "5%")],
)
def test_a_run_of_before_shares_keeps_the_validation_text_it_began_with(tmp_path, capsys, recorded, asked, kept):
    c = config_files.load("tiny")
    c.data.update(train="mine.txt", validation=asked)
    (tmp_path / "checkpoints" / "5" / "run").mkdir(parents=True)
    content = saved_with({"validation": recorded, "shuffle_by": c.data.shuffle_by}, 5)
    (tmp_path / "checkpoints" / "5" / "run" / "metadata").write_text(json.dumps(content))
    assert positions.with_choices_of_run(resolve(c), tmp_path).data.validation == kept
    line = f"data.validation  {asked} is ignored: this run began with {kept}\n"
    assert capsys.readouterr().out == ("" if kept == asked else line)


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


@pytest.mark.parametrize(
    ("recorded", "asked", "kept"),
    [
        (None, "row", "row"),
        ({}, "row", "document"),
        ({}, "document", "document"),
        ({"shuffle_by": "row"}, "document", "row"),
        ({"shuffle_by": "row"}, "row", "row"),
    ],
)
def test_a_run_keeps_the_order_it_began_with(tmp_path, capsys, recorded, asked, kept):
    c = config_files.load("tiny")
    c.data.shuffle_by = asked
    if recorded is not None:
        for step, data in ((5, {"shuffle_by": "document"}), (10, recorded)):
            (tmp_path / "checkpoints" / str(step) / "run").mkdir(parents=True)
            content = saved_with(data, step)
            (tmp_path / "checkpoints" / str(step) / "run" / "metadata").write_text(json.dumps(content))
    assert positions.with_choices_of_run(resolve(c), tmp_path).data.shuffle_by == kept
    line = f"data.shuffle_by  {asked} is ignored: this run began with {kept}\n"
    assert capsys.readouterr().out == ("" if kept == asked else line)
