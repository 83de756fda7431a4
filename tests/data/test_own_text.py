"""A user's own text: one file cut at paragraphs, a share held out, and no expectation that belongs to other text."""

import contextlib
import dataclasses

import numpy as np
from data_files import read_all, write_compressed, write_jsonl
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import assert_names, refused

from hlat_jax.cli import flags as flags_lib
from hlat_jax.config import DataConfig
from hlat_jax.data import sources
from hlat_jax.data.build import build as build_lib
from hlat_jax.data.held_out import open_held_out
from hlat_jax.data.loader import TrainBatches
from hlat_jax.data.streams import Encoder, open_sources
from hlat_jax.data.tokenizer import Tokenizer, resolve_with_tokenizer
from hlat_jax.resolve import resolve

TOKENIZER = Tokenizer("package:austen_2k.model")


def book(num_paragraphs, *, words=40):
    """A text of numbered paragraphs of two lines."""
    return "\n\n".join(f"{n} " + "some words\nand more " * (words // 4) for n in range(num_paragraphs)) + "\n"


def data_config(path, **changes):
    small = {"batch_size": 4, "seq_len": 16, "num_threads": 0, "validation": "5%", "tokenizer": str(TOKENIZER.path)}
    return dataclasses.replace(DataConfig(), train=str(path), **(small | changes))


def documents(data):
    """Returns (training documents, held-out documents) as their text."""
    return tuple(
        [source.documents[n] for source in sources_of(data, key=key) for n in range(len(source.documents))]
        for key in ("data.train", "data.validation")
    )


def sources_of(data, *, key="data.train"):
    return open_sources(data, key=key, encode=Encoder(data, TOKENIZER))


def parse(*words):
    return flags_lib.parse(["--config=tiny", *(f"--config.{word}" for word in words)])[0]


def test_settings_of_shipped_text_go_with_it_unless_they_are_given():
    shipped = "package:austen_validation.jsonl"
    for words, validation, high in (
        ((), shipped, 5.6),
        (("data.train=package:austen_train.jsonl",), shipped, 5.6),
        (("data.train=my_book.txt",), "5%", 0.0),
        (("data.train=my_book.txt", "data.validation=held.txt"), "held.txt", 0.0),
        (("data.train=a.txt", f"data.validation={shipped}"), shipped, 0.0),
        (("data.train=my_book.txt", "data.validation="), "", 0.0),
        (("data.train=my_book.txt", "train.eval_loss_high=9", "train.eval_loss_low=1"), "5%", 9.0),
        (("data.tokenizer=my.model",), shipped, 0.0),
        (("data.batch_size=8",), shipped, 5.6),
    ):
        mutable = parse(*words)
        assert (mutable.data.validation, mutable.train.eval_loss_high) == (validation, high), words
        resolve(mutable)


def test_a_share_out_of_range_is_refused_with_the_range():
    for share in ("0%", "51%", "-3%", "1.2.3%"):
        with refused(f"data.validation={share!r}", "0%", "50%"):
            resolve(parse(f"data.validation={share}"))


@settings(max_examples=12, deadline=None)
@given(
    st.lists(st.integers(1, 3000), min_size=5, max_size=120), st.sampled_from(["\n\n", "\r\n\r\n", "\n \t\n\n", "\n"])
)
def test_a_file_is_cut_between_paragraphs_and_loses_nothing_else(tmp_path_factory, lengths, separator):
    long = [2100, 2200]  # so that there are always two documents
    paragraphs = [f"{number}" + "é" * length for number, length in enumerate([*lengths, *long])]
    path = tmp_path_factory.mktemp("book") / "book.txt"
    path.write_bytes(separator.join(paragraphs).encode())
    train, held_out = documents(data_config(path, batch_size=1))
    assert sorted((p for text in train + held_out for p in text.split(separator)), key=paragraphs.index) == paragraphs
    assert len(held_out) == min(max(1, round(0.05 * len(train + held_out))), sources.MAX_HELD_OUT)
    longest, size = max(map(len, paragraphs)) * 2, path.stat().st_size
    assert max(len(text.encode()) for text in train + held_out) <= longest + 2 * min(4096, size // 64) + 8


def test_long_stretches_without_blank_lines_are_cut_at_line_ends(tmp_path):
    lines = [f"line {n} of a poem" for n in range(20_000)]
    (tmp_path / "book.txt").write_bytes(b"\xef\xbb\xbfTitle\n\n" + "\n".join(lines).encode())
    train, held_out = documents(data_config(tmp_path / "book.txt"))
    found = [line for text in train + held_out for line in text.split("\n") if line]
    assert sorted(found) == sorted(["Title", *lines])
    assert max(map(len, train)) < 2 * 4096


def test_build_cuts_few_texts_as_training_does(tmp_path, data_here):
    """Other formats beside them keep texts whole."""
    folder, packed = tmp_path / "texts", tmp_path / "packed"
    folder.mkdir()
    packed.mkdir()
    for name, size in (("a", 400), ("b", 30)):
        (folder / f"{name}.txt").write_text(book(size))
        write_compressed(packed / f"{name}.md.gz", book(size).encode())
    [source] = sources_of(data_config(folder, validation="", batch_size=8))
    expected = [source.documents[number] for number in range(len(source.documents))]
    assert len(expected) > 64
    for texts in (folder, packed):
        out = tmp_path / f"{texts.name}-cut"
        code, said, _ = data_here("build", texts, f"--out={out}")
        assert code == 0
        assert_names(said, "2 texts", "--batch_size")
        assert read_all(out) == expected
    write_jsonl(folder / "c.jsonl", ["x"])
    data_here("build", folder, f"--out={tmp_path / 'mixed'}")
    assert len(read_all(tmp_path / "mixed")) == 3


def test_held_out_documents_are_spread_and_never_trained_on(tmp_path):
    (tmp_path / "book.txt").write_text(book(400))
    data = data_config(tmp_path / "book.txt", validation="10%")
    train, held_out = documents(data)
    hashes = {sources_of(data_config(data.train, validation=share))[0].documents.manifest["hash"]
              for share in ("", "5%", "10%")}  # fmt: skip
    assert len(hashes) == 3  # the share is part of the identity of the data
    numbers = [int(text.split()[0]) for text in held_out]
    assert not set(train) & set(held_out)
    assert max(np.diff([0, *numbers, 400])) < 2.5 * 400 / len(numbers)
    with contextlib.closing(TrainBatches(data, tokenizer=TOKENIZER)) as batches:
        assert batches.num_documents == len(train)
        cut, out = len(train + held_out), len(held_out)
        assert_names(batches.definition.sources[0].notes, f"{cut} documents", f"{out} documents")
    [found] = open_held_out(data, tokenizer=TOKENIZER, num_batches=0)[0].values()
    assert found.coverage.documents == found.coverage.all_documents == len(held_out)


def test_a_share_is_held_out_of_each_source_and_of_stored_ids(tmp_path):
    (tmp_path / "a.jsonl").write_text("".join(f'{{"text": "text {n}"}}\n' for n in range(40)))
    options = build_lib.BuildOptions(tokenizer=str(TOKENIZER.path))
    build_lib.build([str(tmp_path / "a.jsonl")], out=tmp_path / "ids", options=options)
    data = data_config(f"ids={tmp_path / 'ids'};text={tmp_path / 'a.jsonl'}", mixture="ids=1,text=1")
    held_out, _ = open_held_out(data, tokenizer=TOKENIZER, num_batches=0)
    assert {name: source.coverage.documents for name, source in held_out.items()} == {"ids": 2, "text": 2}
    with contextlib.closing(TrainBatches(data, tokenizer=TOKENIZER)) as batches:
        ids, text = (source.documents for source in batches.definition.sources)
        assert len(ids) == len(text) == 38
        assert [TOKENIZER.decode(ids[n]) for n in range(38)] == [text[n] for n in range(38)]


def test_files_are_cut_only_if_they_leave_fewer_than_the_rows(tmp_path):
    for number in range(6):
        (tmp_path / f"{number}.txt").write_text(book(30))
    for validation in ("5%", f"{tmp_path}/0.txt"):
        train, held_out = documents(data_config(tmp_path, validation=validation))
        assert len(held_out) == 1
        assert {*train, *held_out} == {book(30)}
    train, held_out = documents(data_config(tmp_path, validation="50%"))
    assert len(train) == len(held_out) > 6


def test_text_that_cannot_be_trained_on_is_refused_in_one_line(tmp_path):
    for content, *facts in (
        (b"",),
        (b" \n\n \n", "1 file"),
        (b"one paragraph of text " * 500, "1 document", "data.batch_size=4"),
        (b"\x7fELF\x02\x01\xff\xfe\n\n" * 50, "byte 6", "iconv -t UTF-8"),
        ("text\n\n".encode("utf-16-le") * 50, "NUL", "UTF-8"),
        (b"a\n\nb\n\nc\n", "3 documents", "data.batch_size", " 2"),
    ):
        (tmp_path / "book.txt").write_bytes(content)
        with refused("book.txt", *facts) as caught:
            TrainBatches(data_config(tmp_path / "book.txt"), tokenizer=TOKENIZER)
        assert "\n" not in str(caught.value)


def test_a_vocabulary_of_0_is_that_of_the_tokenizer():
    mutable = parse("model.vocab_size=0")
    assert resolve_with_tokenizer(mutable).model.vocab_size == TOKENIZER.vocab_size
    given = parse("model.vocab_size=4096")
    assert resolve_with_tokenizer(given).model.vocab_size == 4096
