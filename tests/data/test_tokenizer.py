"""Tokenizers of both kinds: ids and bytes as their libraries have them, an EOS that something names, what is refused.

The round trip of a SentencePiece model is a property in `test_commands`, of one that the package trains.
"""

import json
import sys

import numpy as np
import pytest
import tokenizers
import transformers
from refusals import refused
from tokenizer_files import TEXTS, train_model, write_tokenizer_json

from hlat_jax.data.tokenizer import Tokenizer

ASSET = "package:austen_2k.model"


def test_a_model_has_the_ids_of_llama():
    tokenizer = Tokenizer(ASSET, vocab_size=4096)
    assert (tokenizer.vocab_size, tokenizer.bos_id, tokenizer.eos_id) == (2048, 1, 2)
    assert (tokenizer.encode("").shape, tokenizer.encode("a b").dtype) == ((0,), np.int32)
    assert tokenizer.token_bytes.dtype == np.int32
    assert tokenizer.token_bytes[:3].tolist() == [0, 0, 0]
    assert tokenizer.token_bytes[3:2048].min() >= 1
    assert tokenizer.decode([2048, *tokenizer.encode("a b"), 2, 4095]) == "a b"


def test_an_unusable_model_is_refused(tmp_path):
    for path, *facts in (
        ("", "data.tokenizer"),
        (str(tmp_path / "no.model"), tmp_path / "no.model"),
        ("package:no.model", "austen_2k.model"),
        (ASSET, "2048 tokens", "model.vocab_size=2047", "2048 or more"),
        (train_model(tmp_path / "a.model", eos_id=-1), "a.model", "EOS"),
    ):
        with refused(*facts):
            Tokenizer(path, vocab_size=2047)
    for content in (b"", b'{"model": {"type": "BPE"}}', b"\x00" * 100):
        (tmp_path / "tokenizer.model").write_bytes(content)
        with refused(tmp_path / "tokenizer.model", "SentencePiece"):
            Tokenizer(str(tmp_path / "tokenizer.model"))


@pytest.mark.parametrize("kind", ["bytes", "pieces"])
def test_a_tokenizer_json_round_trips_with_the_bytes_of_text(kind, tmp_path):
    ours = Tokenizer(str(write_tokenizer_json(tmp_path, kind)))
    for text in TEXTS:
        ids = ours.encode(text)
        assert ours.decode([*ids, ours.vocab_size]) == text
        assert ids.dtype == np.int32
        assert ours.decode(ids) == text
        assert ours.token_bytes[ids].sum() == len(text.encode())
    assert ours.token_bytes[[0, 1, 2]].tolist() == [0, 0, 0]


def test_control_tokens_are_written_out_by_both_kinds(tmp_path):
    for tokenizer in (Tokenizer(ASSET), Tokenizer(str(write_tokenizer_json(tmp_path)))):
        ids = [1, *tokenizer.encode("It is"), 2, *tokenizer.encode("a truth"), 2, tokenizer.vocab_size]
        assert tokenizer.decode_with_control_tokens(ids) == "<s>It is</s>a truth</s>"


def test_ids_of_a_tokenizer_json_are_those_of_transformers(tmp_path):
    path = write_tokenizer_json(tmp_path, tokenizer_class="PreTrainedTokenizerFast")
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    ours = Tokenizer(str(path))
    for text in (*TEXTS[:2], TEXTS[3]):
        assert ours.encode(text).tolist() == theirs.encode(text, add_special_tokens=False, truncation=False)
    assert (ours.eos_id, ours.bos_id) == (theirs.eos_token_id, theirs.bos_token_id)
    assert ours.vocab_size == tokenizers.Tokenizer.from_file(str(path)).get_vocab_size()
    ids = ours.encode("a</s>b")  # a control token that is spelled in the text is plain text
    assert (ours.eos_id in ids, ours.decode(ids)) == (False, "a</s>b")


@pytest.mark.parametrize(
    ("files", "eos"),
    [
        ({"tokenizer_config.json": {"eos_token": {"content": "<s>"}}}, 1),
        ({"special_tokens_map.json": {"eos_token": "</s>"}}, 2),
        ({"generation_config.json": {"eos_token_id": [2, 1]}}, 2),
        ({"tokenizer_config.json": {"eos_token": None}, "config.json": {"eos_token_id": 1}}, 1),
    ],
)
def test_eos_comes_from_the_files_next_to_the_tokenizer(files, eos, tmp_path):
    path = write_tokenizer_json(tmp_path)
    (tmp_path / "tokenizer_config.json").unlink()
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content))
    assert Tokenizer(str(path)).eos_id == eos


def test_unusable_files_of_a_tokenizer_json_are_refused_by_name(tmp_path, monkeypatch):
    path = write_tokenizer_json(tmp_path)
    with refused(path, "model.vocab_size=7"):
        Tokenizer(str(path), vocab_size=7)
    (tmp_path / "tokenizer_config.json").unlink()
    with refused(path, "EOS", "tokenizer_config.json"):
        Tokenizer(str(path))
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "tokenizers", None)
        with refused(path, "pip install 'hlat_jax[hf"):
            Tokenizer(str(path))
    for content in (b"", b"{", b"[]", b'{"model": {}}', b"\xff"):
        path.write_bytes(content)
        with refused(path):
            Tokenizer(str(path))
