"""tokenizer.json: the same ids as its library gives, bytes that add up, and an EOS that something names."""

import json
import sys

import numpy as np
import pytest
import tokenizers
import transformers
from tokenizer_files import TEXTS, write_tokenizer_json

from hlat_jax.data.tokenizer import Tokenizer


@pytest.mark.parametrize("kind", ["bytes", "pieces"])
def test_encode_round_trips_and_token_bytes_sum_to_the_text_bytes(kind, tmp_path):
    ours = Tokenizer(str(write_tokenizer_json(tmp_path, kind)))
    for text in TEXTS:
        ids = ours.encode(text)
        assert ours.decode([*ids, ours.vocab_size]) == text
        assert ids.dtype == np.int32
        assert ours.decode(ids) == text
        assert ours.token_bytes[ids].sum() == len(text.encode())
    assert ours.token_bytes[[0, 1, 2]].tolist() == [0, 0, 0]


def test_ids_match_transformers_without_control_tokens_in_the_text(tmp_path):
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


def test_unusable_files_are_refused_by_name(tmp_path, monkeypatch):
    path = write_tokenizer_json(tmp_path)
    with pytest.raises(ValueError, match=r"has \d+ tokens but model.vocab_size=7"):
        Tokenizer(str(path), vocab_size=7)
    (tmp_path / "tokenizer_config.json").unlink()
    with pytest.raises(ValueError, match=r"tokenizer.json has no EOS.*tokenizer_config.json beside it"):
        Tokenizer(str(path))
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "tokenizers", None)
        with pytest.raises(ValueError, match=r"tokenizer.json needs the library tokenizers: pip install 'hlat_jax\[hf"):
            Tokenizer(str(path))
    for content in (b"", b"{", b"[]", b'{"model": {}}', b"\xff"):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=r"is not a tokenizer.json"):
            Tokenizer(str(path))
