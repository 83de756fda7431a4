"""Tokenizers from a SentencePiece model or a Hugging Face tokenizer.json. They add no BOS or EOS, as packing does."""

from __future__ import annotations

import functools
import hashlib
import itertools
import pathlib
import re
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import sentencepiece

from hlat_jax.config import Config
from hlat_jax.data.formats.paths import tokenizer_file
from hlat_jax.data.kept_tokenizer import resolve_tokenizer_path
from hlat_jax.data.tokenizer_json import JsonModel
from hlat_jax.resolve import export_problem, resolve


class Tokenizer:
    """The tokenizer at `path`, which may be 'package:NAME'. Thread-safe. Encoding releases the GIL.

    A path that ends in .json is a tokenizer.json, which needs the `hf` extra. Any other is a SentencePiece model.

    Attributes:
      eos_id, bos_id: the tokens that end and begin a text. bos_id is -1 without such a token.
      unk_id: the token for characters that no other token holds, or -1 if bytes have tokens.
      model_vocab_size: the argument `vocab_size`.

    Args:
      path: the path of the tokenizer.
      vocab_size: the vocabulary of the model, which may exceed the number of tokens. None is not checked.
      stop_ids: the tokens besides EOS that end a generated text, from the files of an imported model.
      key: the config key or flag that gives the path, for errors.
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
            raise ValueError("data.tokenizer is empty. Give a SentencePiece .model file or 'package:austen_2k.model'.")
        self.path = tokenizer_file(path, key=key)
        serialized = self.path.read_bytes()
        self.is_json = self.path.suffix == ".json"
        self._model = (JsonModel if self.is_json else _SentencePiece)(self.path, serialized)
        self.vocab_size, self.model_vocab_size = self._model.vocab_size, vocab_size
        self.sha256 = hashlib.sha256(serialized).hexdigest()
        self.eos_id, self.bos_id, self.unk_id = self._model.eos_id, self._model.bos_id, self._model.unk_id
        if self.eos_id < 0:
            how = "Put its tokenizer_config.json next to it" if self.is_json else "Train it with eos_id=2"
            raise ValueError(f"{key}={path} has no EOS, which ends every document. {how}.")
        if vocab_size is not None and vocab_size < self.vocab_size:
            raise ValueError(
                f"{key}={path} has {self.vocab_size} tokens but model.vocab_size={vocab_size}. Set "
                f"model.vocab_size={self.vocab_size} or more, or use a tokenizer of at most {vocab_size} tokens."
            )
        self.stop_ids = tuple(dict.fromkeys((self.eos_id, *stop_ids)))

    def encode(self, text: str) -> np.ndarray:
        """Returns int32[n] token ids, without BOS or EOS."""
        return np.asarray(self._model.encode(text), np.int32)

    def decode(self, ids: np.ndarray) -> str:
        """Returns the text of token ids, without control tokens and ids beyond the vocabulary."""
        return self._model.decode(self._known(ids))

    def decode_with_control_tokens(self, ids: np.ndarray) -> str:
        """Returns the text of token ids with control tokens written out, as in '<s>It is'."""
        return self._model.decode_with_control_tokens(self._known(ids))

    def _known(self, ids: np.ndarray) -> list[int]:
        return [int(token) for token in np.asarray(ids) if token < self.vocab_size]

    def require_bos(self, wanted: bool, *, key: str) -> None:
        """Raises ValueError if the setting `key` asks for BOS (`wanted`) and the tokenizer has none."""
        if wanted and self.bos_id < 0:
            raise ValueError(f"{key}: the tokenizer {self.path} has no BOS token. Leave {key} out.")

    def encode_with_control_tokens(self, text: str) -> np.ndarray:
        """Returns int32[n] token ids of a text in which control tokens are written out, as in '<s>It is'.

        The control tokens are the same as in transformers. They come from a tokenizer.json, which may lie next to a
        tokenizer.model with the same tokens, or else from the SentencePiece model.
        """
        return np.asarray(self._model_of_control_tokens.encode_with_control_tokens(text), np.int32)

    @functools.cached_property
    def _model_of_control_tokens(self) -> Any:
        beside = self.path.with_name("tokenizer.json")
        if self.path.name != "tokenizer.model" or not beside.is_file():
            return self._model
        other = JsonModel(beside, beside.read_bytes())
        same = all(other.token(token) == self._model.token(token) for token in range(self.vocab_size))
        return other if same else self._model

    @property
    def control_tokens_sha256(self) -> str:
        """The checksum of the file with the control tokens of `encode_with_control_tokens`."""
        if self._model_of_control_tokens is self._model:
            return self.sha256
        return hashlib.sha256(self.path.with_name("tokenizer.json").read_bytes()).hexdigest()

    def token(self, token: int) -> str:
        """Returns the piece of a token."""
        return self._model.token(token)

    def has_tokens(self, tokens: Mapping[int, str]) -> bool:
        """Returns whether each of these ids is a token with exactly this text."""
        return all(0 <= token < self.vocab_size and self.token(token) == text for token, text in tokens.items())

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
        """The number of UTF-8 bytes of the piece of each token, int32[V].

        '▁' counts as one space, a byte-fallback piece as one byte, a control or unknown token as none. For the bytes of
        a text use `bytes_of`, as a model may have unknown characters, normalize, or add a space before each text.
        """
        num_bytes = self._model.token_bytes()
        num_bytes.flags.writeable = False  # cached and shared
        return num_bytes

    def bytes_of(self, ids: np.ndarray, num_bytes: int) -> np.ndarray:
        """Returns the number of bytes that each token of a text of `num_bytes` bytes stands for, float64[n].

        Unknown tokens share the bytes that the other pieces leave. If there are none, or no byte is left, the pieces
        share the text in proportion to their lengths. A lossless tokenizer then gives exactly these lengths.
        """
        each = self.token_bytes[ids].astype(np.float64)
        unknown = ids == self.unk_id
        known = each.sum()
        if unknown.any() and known < num_bytes:
            each[unknown] = (num_bytes - known) / unknown.sum()
        elif known:
            each *= num_bytes / known
        else:
            each[-1:] = num_bytes  # the end of a text of spaces, all of which the model removes
        return each


def resolve_with_tokenizer(mutable: Any, *, workdir: pathlib.Path | None = None) -> Config:
    """Returns the resolved config of a ConfigDict. A model.vocab_size of 0 becomes data.tokenizer's.

    The run folder `workdir` keeps a copy of the tokenizer. If the file of data.tokenizer is gone since the run opened
    it, the key becomes the path of that copy.
    """
    if workdir is not None:
        mutable.data.tokenizer = resolve_tokenizer_path(mutable.data.tokenizer, workdir)
    if mutable.model.vocab_size == 0:
        mutable.model.vocab_size = Tokenizer(mutable.data.tokenizer).vocab_size
    config = resolve(mutable)
    if problem := export_problem(config.model):
        print(f"warning: this model can be trained, but not exported: {problem}.", file=sys.stderr)
    return config


class _SentencePiece:
    def __init__(self, path: pathlib.Path, serialized: bytes):
        try:
            self._processor = sentencepiece.SentencePieceProcessor(model_proto=serialized)
            self.vocab_size = self._processor.vocab_size()
        except (RuntimeError, OSError):
            self.vocab_size = 0
        if self.vocab_size == 0:
            raise ValueError(
                f"{path} is not a SentencePiece model ({len(serialized)} bytes). The name of a Hugging "
                "Face tokenizer.json must end in .json."
            )
        self.encode, self.decode = self._processor.encode, self._processor.decode
        self.token = self._processor.id_to_piece
        self.eos_id = self._processor.eos_id()
        self.bos_id = self._processor.bos_id()  # -1: none
        has_bytes = any(map(self._processor.is_byte, range(self.vocab_size)))
        self.unk_id = -1 if has_bytes else self._processor.unk_id()

    def encode_with_control_tokens(self, text: str) -> list[int]:
        """Returns the ids of a text in which control tokens are written out, see Tokenizer."""
        ids = []
        for index, part in enumerate(self._control_pattern.split(text) if self._control_ids else [text]):
            if index % 2:
                ids.append(self._control_ids[part])
            elif index and self.adds_space:  # a space is added to the beginning of the text alone
                ids += self.encode(f"\n{part}")[len(self.encode("\n")) :] if part else []
            else:
                ids += self.encode(part)
        return ids

    def decode_with_control_tokens(self, ids: list[int]) -> str:
        """Returns the text of token ids with control tokens written out."""
        runs = itertools.groupby(ids, key=self._processor.is_control)
        return "".join("".join(map(self.token, run)) if control else self.decode(list(run)) for control, run in runs)

    @functools.cached_property
    def _control_ids(self) -> dict[str, int]:
        """Text of each control token -> its id."""
        return {self.token(each): each for each in filter(self._processor.is_control, range(self.vocab_size))}

    @functools.cached_property
    def _control_pattern(self) -> re.Pattern[str]:
        longest_first = sorted(self._control_ids, key=len, reverse=True)
        return re.compile(f"({'|'.join(map(re.escape, longest_first))})")

    @functools.cached_property
    def adds_space(self) -> bool:
        """Whether a space is added before each text."""
        return "".join(self._processor.encode_as_pieces("a")).startswith("▁")

    def special(self, name: str) -> str:
        """Returns the text of `bos`, `eos` or `unk`, or "" if the model has none."""
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
