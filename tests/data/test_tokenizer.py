"""SentencePiece models: round trips, bytes per token, and what is refused."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizer_files import train_model

from hlat_jax.data.tokenizer import Tokenizer

ASSET = "package:austen_2k.model"
TOKENIZER = Tokenizer(ASSET, vocab_size=2048)
# U+2581 is SentencePiece's own sign for a space, the one character it cannot give back
ANY_TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="▁"), max_size=80)


def test_special_ids_follow_the_llama_layout():
    assert (TOKENIZER.vocab_size, TOKENIZER.bos_id, TOKENIZER.eos_id) == (2048, 1, 2)
    ids = TOKENIZER.encode("Emma Woodhouse")
    assert ids.dtype == np.int32
    assert ids.ndim == 1
    assert not {0, 1, 2} & set(ids.tolist())
    assert TOKENIZER.encode("").shape == (0,)


@settings(max_examples=80, deadline=None)
@given(ANY_TEXT)
def test_encode_round_trips_and_token_bytes_sum_to_the_text_bytes(text):
    ids = TOKENIZER.encode(text)
    assert TOKENIZER.decode(ids) == text
    assert TOKENIZER.token_bytes[ids].sum() == len(text.encode("utf-8"))


def test_control_tokens_have_no_bytes_and_no_text_nor_have_padding_rows_beyond_the_vocabulary():
    assert TOKENIZER.token_bytes.dtype == np.int32
    assert TOKENIZER.token_bytes[:3].tolist() == [0, 0, 0]
    assert TOKENIZER.token_bytes[3:].min() >= 1
    assert Tokenizer(ASSET, vocab_size=4096).decode([2048, *TOKENIZER.encode("a b"), 2, 4095]) == "a b"


def test_a_model_that_is_missing_foreign_too_large_or_without_eos_is_refused(tmp_path):
    for path, message in (
        ("", r"data.tokenizer is empty"),
        (str(tmp_path / "no.model"), r"no such file"),
        ("package:no.model", r"austen_2k.model"),
        (ASSET, r"has 2048 tokens but model.vocab_size=2047; set .*=2048 or more, or .* at most 2047 tokens"),
        (train_model(tmp_path / "a.model", eos_id=-1), r"has no EOS"),
    ):
        with pytest.raises(ValueError, match=message):
            Tokenizer(path, vocab_size=2047)
    for content in (b"", b'{"model": {"type": "BPE"}}', b"\x00" * 100):
        (tmp_path / "tokenizer.model").write_bytes(content)
        with pytest.raises(ValueError, match=r"is not a SentencePiece model"):
            Tokenizer(str(tmp_path / "tokenizer.model"))
