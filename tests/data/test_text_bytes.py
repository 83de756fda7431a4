"""Bytes of text in validation and evaluation, the share of <unk>, and BOS before documents, by kinds of tokenizers."""

import contextlib
import dataclasses
import functools
import re

import numpy as np
import pytest
import tokenizers
from data_files import write_jsonl
from hypothesis import example, given, settings
from hypothesis import strategies as st
from refusals import assert_names, refused
from tokenizer_files import TEXTS, train_model, write_tokenizer_json
from tokenizers import models, pre_tokenizers, trainers

from hlat_jax.cli import config_files
from hlat_jax.config import DataConfig
from hlat_jax.data import held_out, loader, sources
from hlat_jax.data.build import build as build_lib
from hlat_jax.data.build import stats
from hlat_jax.data.streams import Definition
from hlat_jax.data.tokenizer import Tokenizer
from hlat_jax.evaluate.__main__ import _document
from hlat_jax.resolve import resolve
from hlat_jax.run import summary

NATIVE = {
    "nfkc": {},
    "unknown": {"normalization_rule_name": "identity", "remove_extra_whitespaces": False, "add_dummy_prefix": False},
    "byte fallback": {"byte_fallback": True, "vocab_size": 320},
}
JSON = {
    "word pieces": (models.WordPiece(unk_token="<unk>"), trainers.WordPieceTrainer),
    "unigram of a library": (models.Unigram(), functools.partial(trainers.UnigramTrainer, unk_token="<unk>")),
}
KINDS = [*NATIVE, *JSON, "bytes", "pieces"]


@pytest.fixture(scope="module")
def tokenizer_of(tmp_path_factory):
    """A function of a kind that returns its tokenizer."""

    @functools.cache
    def make(kind):
        folder = tmp_path_factory.mktemp("tokenizer")
        if kind in NATIVE:
            path = train_model(folder / "a.model", **NATIVE[kind])
        elif kind in JSON:
            kind_of_model, trainer = JSON[kind]
            model = tokenizers.Tokenizer(kind_of_model)
            model.pre_tokenizer = pre_tokenizers.Whitespace()
            trainer = trainer(special_tokens=["<unk>", "<s>", "</s>"], show_progress=False)
            model.train_from_iterator(TEXTS[:1] * 5, trainer)
            path = folder / "tokenizer.json"
            model.save(str(path))
            (folder / "tokenizer_config.json").write_text('{"bos_token": "<s>", "eos_token": "</s>"}')
        else:
            path = write_tokenizer_json(folder, kind)
        return Tokenizer(str(path))

    return make


def config_of(path, tokenizer, **changes):
    small = {"batch_size": 1, "seq_len": 4096, "num_threads": 0, "max_document_chars": 50, "prepend_bos": True}
    paths = {"train": str(path), "validation": str(path), "tokenizer": str(tokenizer.path)}
    return dataclasses.replace(DataConfig(), **(paths | small | changes))


def bytes_of_validation(data, tokenizer):
    return held_out.open_held_out(data, tokenizer=tokenizer, num_batches=0)[0]["all"].num_bytes


def bytes_of_evaluation(path, tokenizer):
    documents = sources.open_corpus(str(path), text_field="text", key="--data")
    found = [_document(documents, number, tokenizer, first=tokenizer.bos_id) for number in range(len(documents))]
    return sum(each.num_bytes for each in found)


def test_evaluation_refuses_a_record_of_a_prompt_and_an_answer(tmp_path, tokenizer_of):
    (tmp_path / "a.jsonl").write_text('{"q": "It is", "a": " a truth"}')
    documents = sources.open_corpus(str(tmp_path / "a.jsonl"), text_field="q,a", key="--data")
    with refused("a.jsonl, row 1"):
        _document(documents, 0, tokenizer_of("bytes"), first=1)


@pytest.mark.quick_cases("nfkc", "byte fallback", "word pieces", "bytes")
@pytest.mark.parametrize("kind", KINDS)
def test_validation_and_evaluation_count_the_bytes(kind, tokenizer_of, tmp_path_factory):
    """Each document begins with BOS, so every token of a text is a target; pieces are of 50 characters."""
    tokenizer, path = tokenizer_of(kind), tmp_path_factory.mktemp("text") / "a.jsonl"

    @settings(max_examples=8, deadline=None, database=None)
    @given(
        st.lists(st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=150), min_size=1, max_size=4)
    )
    @example(["\u6771\u4eac the lazy dog \ufb01", "  two  spaces  ", " ", "<unk>", *filter(None, TEXTS)])
    def check(texts):
        write_jsonl(path, texts)
        num_bytes = sum(len(text.encode()) for text in texts)
        assert bytes_of_evaluation(path, tokenizer) == num_bytes
        for packing in ("concat", "documents"):
            assert bytes_of_validation(config_of(path, tokenizer, packing=packing), tokenizer) == num_bytes

    check()


def test_unknown_tokens_share_what_the_other_pieces_leave(tokenizer_of):
    tokenizer, text = tokenizer_of("unknown"), "the \u6771\u4eac dog \u4eac fox"
    ids = np.append(tokenizer.encode(text), tokenizer.eos_id)
    found = tokenizer.bytes_of(ids, len(text.encode()))
    others = found[ids != tokenizer.unk_id]
    assert others.sum() == len("the  dog  fox")
    np.testing.assert_array_equal(others, [len(tokenizer.token(i)) * (i != tokenizer.eos_id) for i in ids if i])
    np.testing.assert_allclose(found[ids == tokenizer.unk_id], [(6 + 3) / 2] * 2, rtol=1e-12)


@pytest.mark.parametrize(
    ("kind", "prepend_bos", "packing"),
    [("nfkc", True, "concat"), ("bytes", False, "concat"), ("bytes", False, "documents")],
)
def test_stored_ids_have_the_bytes_and_batches_of_their_text(kind, prepend_bos, packing, tokenizer_of, tmp_path):
    tokenizer, texts = tokenizer_of(kind), ["the lazy \u6771\u4eac dog", "  fox ", "jumps\n" * 40, "\u6771"]
    write_jsonl(tmp_path / "a.jsonl", texts)
    options = build_lib.BuildOptions(tokenizer=str(tokenizer.path), max_document_chars=50, prepend_bos=prepend_bos)
    built = build_lib.build([str(tmp_path / "a.jsonl")], out=tmp_path / "ids", options=options)
    printed = build_lib.summary(built, out=tmp_path / "ids", elapsed_s=1.0)
    assert ("--config.data.prepend_bos" in printed) == prepend_bos
    places, found = (tmp_path / "a.jsonl", tmp_path / "ids"), []
    for place in places:
        data = config_of(place, tokenizer, seq_len=16, prepend_bos=prepend_bos, packing=packing)
        with contextlib.closing(loader.TrainBatches(data, tokenizer=tokenizer)) as batches:
            found.append([next(batches)[0].tokens for _ in range(20)])
        assert bytes_of_evaluation(place, tokenizer) == sum(len(text.encode()) for text in texts)
    np.testing.assert_array_equal(*found)
    if packing == "concat":
        begins = np.concatenate(found[0], axis=None)[:-1] == tokenizer.eos_id
        assert (np.concatenate(found[0], axis=None)[1:][begins] == tokenizer.bos_id).all() == prepend_bos
    counts = [bytes_of_validation(config_of(place, tokenizer, prepend_bos=prepend_bos), tokenizer) for place in places]
    assert counts[0] == counts[1]
    other = config_of(tmp_path / "ids", tokenizer, prepend_bos=not prepend_bos)
    with refused("--prepend_bos", f"data.prepend_bos={prepend_bos}"):
        loader.TrainBatches(other, tokenizer=tokenizer)


def test_bos_needs_a_token_and_changes_the_identity_of_the_data(tmp_path):
    write_jsonl(tmp_path / "a.jsonl", ["the dog"] * 3)
    without = Tokenizer(train_model(tmp_path / "a.model", bos_id=-1))
    with refused("data.prepend_bos=True", "a.model", "BOS"):
        loader.TrainBatches(config_of(tmp_path / "a.jsonl", without), tokenizer=without)
    options = build_lib.BuildOptions(prepend_bos=True)
    with refused("--prepend_bos", "--tokenizer"):
        build_lib.build([str(tmp_path / "a.jsonl")], out=tmp_path / "out", options=options)
    tokenizer = Tokenizer("package:austen_2k.model")
    data = [config_of(tmp_path / "a.jsonl", tokenizer, prepend_bos=bos) for bos in (False, True)]
    one, other = (Definition(each, tokenizer=tokenizer).identity(0) for each in data)
    assert one != other


def test_the_share_of_unknown_tokens_is_said_and_warned_of(tokenizer_of, tmp_path, capsys):
    texts = ["the lazy dog"] * 9 + ["\u6771 \u4eac " * 6]
    write_jsonl(tmp_path / "a.jsonl", texts)
    for kind, expected in (("unknown", 12), ("byte fallback", 0)):
        tokenizer = tokenizer_of(kind)
        ids = [token for text in texts for token in [*tokenizer.encode(text), tokenizer.eos_id]]
        share = sum(token == tokenizer.unk_id for token in ids) / len(ids)
        assert ids.count(0) == expected
        c = config_files.load("tiny")
        c.data.update(train=str(tmp_path / "a.jsonl"), validation="", tokenizer=str(tokenizer.path))
        lines = stats.report(resolve(c), sample_bytes=0).splitlines()
        with contextlib.closing(loader.TrainBatches(resolve(c).data, tokenizer=tokenizer)) as batches:
            summary.describe_data(batches, {}, vocab_size=tokenizer.vocab_size, tokenizer=tokenizer)
        out, error = capsys.readouterr()
        if not expected:
            assert (out, error) == ("", "")
            assert "%" not in lines[-1]
            continue
        assert_names("\n".join(lines), f"{share:.2%}")
        assert_names(lines[-1], "warning: <unk>", f"{share:.1%}")
        [found] = re.findall(r"<unk> is ([0-9.]+)%", out)
        assert float(found) == pytest.approx(100 * 12 / (len(ids) - 10), abs=0.01)  # without EOS
        assert_names(error, "warning: <unk>", "%")
