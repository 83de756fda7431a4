"""tokenizer.json: the same ids as its library gives, bytes that add up, and an EOS that something names."""

import json
import sys

import numpy as np
import pytest
import tokenizers
import transformers
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

from hlat_jax.data.tokenizer import Tokenizer

TEXTS = [
    "It is a truth universally acknowledged, that a single man in possession of a good fortune",
    "  two  spaces\n\n\tand a tab, naïve — “quoted” 12,345.6 € 東京 🙂 e\u0301",
    "text with </s> and <s> in it",
    "",
]


def write(folder, kind="bytes", **config):
    """Trains and writes a tokenizer.json of a kind of decoder, and tokenizer_config.json; returns its path."""
    if kind == "bytes":
        made = tokenizers.Tokenizer(models.BPE())
        made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        made.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
    else:
        made = tokenizers.Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
        made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never", split=False)
        made.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
        alphabet = []
    special = ["<unk>", "<s>", "</s>"] + ([f"<0x{byte:02X}>" for byte in range(256)] if kind != "bytes" else [])
    trainer = trainers.BpeTrainer(
        vocab_size=600, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator(TEXTS[:1] * 5, trainer)
    made.add_tokens(["possession"])
    made.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    made.enable_truncation(4)
    made.enable_padding(length=8)
    path = folder / "tokenizer.json"
    made.save(str(path))
    if kind != "bytes":  # bytes are ordinary tokens of the vocabulary
        content = json.loads(path.read_text())
        content["added_tokens"] = [each for each in content["added_tokens"] if not each["content"].startswith("<0x")]
        path.write_text(json.dumps(content))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>", "bos_token": "<s>"} | config))
    return path


@pytest.mark.parametrize("kind", ["bytes", "pieces"])
def test_ids_come_back_as_the_text_and_its_bytes_add_up(kind, tmp_path):
    ours = Tokenizer(str(write(tmp_path, kind)))
    for text in TEXTS:
        ids = ours.encode(text)
        assert ours.decode([*ids, ours.vocab_size]) == text
        assert ids.dtype == np.int32
        assert ours.decode(ids) == text
        assert ours.token_bytes[ids].sum() == len(text.encode())
    assert ours.token_bytes[[0, 1, 2]].tolist() == [0, 0, 0]


def test_ids_are_those_of_transformers_where_no_control_token_is_written_in_the_text(tmp_path):
    path = write(tmp_path, tokenizer_class="PreTrainedTokenizerFast")
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    ours = Tokenizer(str(path))
    for text in (*TEXTS[:2], TEXTS[3]):
        assert ours.encode(text).tolist() == theirs.encode(text, add_special_tokens=False, truncation=False)
    assert (ours.eos_id, ours.bos_id) == (theirs.eos_token_id, theirs.bos_token_id)
    assert ours.vocab_size == tokenizers.Tokenizer.from_file(str(path)).get_vocab_size()


def test_a_control_token_written_in_a_text_is_text(tmp_path):
    ours = Tokenizer(str(write(tmp_path)))
    ids = ours.encode("a</s>b")
    assert ours.eos_id not in ids
    assert ours.decode(ids) == "a</s>b"


@pytest.mark.parametrize(
    ("files", "eos"),
    [
        ({"tokenizer_config.json": {"eos_token": {"content": "<s>"}}}, 1),
        ({"special_tokens_map.json": {"eos_token": "</s>"}}, 2),
        ({"generation_config.json": {"eos_token_id": [2, 1]}}, 2),
        ({"tokenizer_config.json": {"eos_token": None}, "config.json": {"eos_token_id": 1}}, 1),
    ],
)
def test_eos_is_what_lies_beside_it_says(files, eos, tmp_path):
    path = write(tmp_path)
    (tmp_path / "tokenizer_config.json").unlink()
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content))
    assert Tokenizer(str(path)).eos_id == eos


def test_what_cannot_be_used_is_refused_by_name(tmp_path, monkeypatch):
    path = write(tmp_path)
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
