"""Tokenizers: a SentencePiece model or a Hugging Face tokenizer.json. Adds no BOS or EOS; packing does."""

from __future__ import annotations

import functools
import hashlib
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import sentencepiece

from hlat_jax.config import Config
from hlat_jax.data.formats.paths import tokenizer_file
from hlat_jax.data.kept_tokenizer import resolve_tokenizer_path
from hlat_jax.data.tokenizer_json import JsonModel
from hlat_jax.resolve import resolve

_MAX_FILE_BYTES = 256 << 20  # of large vocabularies: 5 MB of SentencePiece, 35 MB of tokenizer.json


class Tokenizer:
    """The tokenizer at `path`, which may be 'package:NAME'. Thread-safe; encoding releases the GIL.

    A path that ends in .json is a tokenizer.json, which needs the `hf` extra; any other is a SentencePiece model.

    Args:
      path: of the file.
      vocab_size: that of the model, which may exceed the number of tokens; None: not checked.
      stop_ids: tokens besides EOS that end a generated text, from the files of an imported model.
      key: what was given, for errors.

    Raises:
      ValueError: no path, no such file, not a tokenizer, no EOS, or more tokens than the model's vocab_size.
    """

    def __init__(
        self,
        path: str,
        *,
        vocab_size: int | None = None,
        stop_ids: Sequence[int] = (),
        key: str = "data.tokenizer",
    ):
        if not path:
            raise ValueError("data.tokenizer is empty; give a SentencePiece .model file or 'package:austen_2k.model'.")
        self.path = tokenizer_file(path, key=key)
        num_bytes = self.path.stat().st_size
        if num_bytes > _MAX_FILE_BYTES:
            raise ValueError(
                f"{key}={path} is no tokenizer: it has {num_bytes:,} bytes, more than {_MAX_FILE_BYTES:,}; give a "
                "SentencePiece .model file or a tokenizer.json."
            )
        serialized = self.path.read_bytes()
        self.is_json = self.path.suffix == ".json"
        self._model = (JsonModel if self.is_json else _SentencePiece)(self.path, serialized)
        self.vocab_size = self._model.vocab_size
        self.sha256 = hashlib.sha256(serialized).hexdigest()
        self.eos_id, self.bos_id = self._model.eos_id, self._model.bos_id
        if self.eos_id < 0:
            how = "put its tokenizer_config.json beside it" if self.is_json else "train it with eos_id=2"
            raise ValueError(f"{key}={path} has no EOS, which ends every document; {how}.")
        if vocab_size is not None and vocab_size < self.vocab_size:
            raise ValueError(
                f"{key}={path} has {self.vocab_size} tokens but model.vocab_size={vocab_size}; set "
                f"model.vocab_size={self.vocab_size} or more, or use a tokenizer of at most {vocab_size} tokens."
            )
        self.stop_ids = tuple(dict.fromkeys((self.eos_id, *stop_ids)))

    def encode(self, text: str) -> np.ndarray:
        """Returns int32[n] token ids, without BOS or EOS."""
        return np.asarray(self._model.encode(text), np.int32)

    def decode(self, ids: np.ndarray) -> str:
        """Returns the text of token ids, without control tokens and ids beyond the vocabulary."""
        return self._model.decode([int(token) for token in np.asarray(ids) if token < self.vocab_size])

    def has_tokens(self, tokens: Mapping[int, str]) -> bool:
        """Returns whether each of these ids is a token with exactly this text."""
        return all(0 <= token < self.vocab_size and self._model.token(token) == text for token, text in tokens.items())

    def transformers_config(self) -> dict[str, Any]:
        """Returns the tokenizer_config.json with which transformers tokenizes as this SentencePiece model does."""
        pieces = {f"{name}_token": self._model.special(name) for name in ("bos", "eos", "unk")}
        return {
            "tokenizer_class": "LlamaTokenizer",
            **{name: piece for name, piece in pieces.items() if piece},
            "add_bos_token": False,
            "add_eos_token": False,
            "add_prefix_space": self._model.adds_space,
            "clean_up_tokenization_spaces": False,
            "legacy": False,
        }

    @functools.cached_property
    def token_bytes(self) -> np.ndarray:
        """int32[V]: UTF-8 bytes of the text of each token; their sum over a text's tokens is its length.

        '▁' counts as one space, a byte-fallback piece as one byte, a control or unknown token as none. With a model
        that puts a space before each text (add_dummy_prefix) the sum is one byte too large per encoded text, and with
        one that normalizes it is the length of the normalized text.
        """
        num_bytes = self._model.token_bytes()
        num_bytes.flags.writeable = False  # cached and shared
        return num_bytes


def resolve_with_tokenizer(mutable: Any, *, workdir: pathlib.Path | None = None) -> Config:
    """Returns the resolved config of a ConfigDict; a model.vocab_size of 0 becomes that of data.tokenizer.

    `workdir` is the run folder; where the file of data.tokenizer is gone since that run opened it, the key becomes the
    path of the copy that the folder keeps. None: there is none.
    """
    if workdir is not None:
        mutable.data.tokenizer = resolve_tokenizer_path(mutable.data.tokenizer, workdir)
    if mutable.model.vocab_size == 0:
        mutable.model.vocab_size = Tokenizer(mutable.data.tokenizer).vocab_size
    return resolve(mutable)


class _SentencePiece:
    def __init__(self, path: pathlib.Path, serialized: bytes):
        try:
            self._processor = sentencepiece.SentencePieceProcessor(model_proto=serialized)
            self.vocab_size = self._processor.vocab_size()
        except (RuntimeError, OSError):
            self.vocab_size = 0
        if self.vocab_size == 0:
            raise ValueError(
                f"{path} is not a SentencePiece model ({len(serialized)} bytes); the name of a Hugging "
                "Face tokenizer.json must end in .json."
            )
        self.encode, self.decode = self._processor.encode, self._processor.decode
        self.token = self._processor.id_to_piece
        self.eos_id = self._processor.eos_id()
        self.bos_id = self._processor.bos_id()  # -1: none; packing uses none

    @property
    def adds_space(self) -> bool:
        """Whether a space is added before each text."""
        return "".join(self._processor.encode_as_pieces("a")).startswith("▁")

    def special(self, name: str) -> str:
        """Returns the text of `bos`, `eos` or `unk`; "" if the model has none."""
        token = getattr(self._processor, f"{name}_id")()
        return self.token(token) if token >= 0 else ""

    def token_bytes(self) -> np.ndarray:
        processor, num_bytes = self._processor, np.zeros(self.vocab_size, np.int32)
        for token in range(self.vocab_size):
            if processor.is_control(token) or processor.is_unknown(token) or processor.is_unused(token):
                continue
            if processor.is_byte(token):
                num_bytes[token] = 1
            else:
                num_bytes[token] = len(processor.id_to_piece(token).replace("▁", " ").encode("utf-8"))
        return num_bytes
