"""Reads a Hugging Face tokenizer.json with the `tokenizers` library (the `hf` extra)."""

from __future__ import annotations

import functools
import json
import pathlib
from typing import Any

import numpy as np

from hlat_jax.host.optional_import import import_optional
from hlat_jax.store.typed_json import read_json

# Files beside tokenizer.json that name EOS, which it does not, in the order in which they are read.
EOS_FILES = ("tokenizer_config.json", "special_tokens_map.json", "generation_config.json", "config.json")


class JsonModel:
    """A tokenizer.json with the interface of _SentencePiece, which adds no special tokens and parses none in a text."""

    def __init__(self, path: pathlib.Path, serialized: bytes):
        missing = f"{path} needs the library tokenizers: pip install 'hlat_jax[hf]'."
        tokenizers = import_optional("tokenizers", missing=missing)
        try:
            self._content = json.loads(serialized)
            self._model = tokenizers.Tokenizer.from_str(serialized.decode())
        except Exception as error:  # the library raises bare Exception
            raise ValueError(f"{path} is not a tokenizer.json: {str(error)[:200]}") from None
        self._model.no_truncation()
        self._model.no_padding()
        self._model.encode_special_tokens = True  # "</s>" in a text is text
        self._vocab = self._model.get_vocab(with_added_tokens=True)
        self.token = self._model.id_to_token
        self.vocab_size = max(self._vocab.values()) + 1
        self.eos_id, self.bos_id = (self._special(path.parent, name) for name in ("eos", "bos"))
        model = self._content["model"]
        has_bytes = model.get("byte_fallback") and "<0x00>" in self._vocab
        unknown = model.get("unk_id") if model["type"] == "Unigram" else self._vocab.get(model.get("unk_token"))
        self.unk_id = -1 if has_bytes or unknown is None else unknown

    def encode(self, text: str) -> list[int]:
        return self._model.encode(text, add_special_tokens=False).ids

    def encode_with_control_tokens(self, text: str) -> list[int]:
        """Returns the ids of a text in which control tokens are written out, see tokenizer.Tokenizer."""
        return self._control_token_model.encode(text, add_special_tokens=False).ids

    @functools.cached_property
    def _control_token_model(self) -> Any:
        copy = type(self._model).from_str(self._model.to_str())
        copy.encode_special_tokens = False
        return copy

    def decode(self, ids: list[int]) -> str:
        return self._model.decode(ids, skip_special_tokens=True)

    def decode_with_control_tokens(self, ids: list[int]) -> str:
        """Returns the text of token ids with control tokens written out."""
        return self._model.decode(ids, skip_special_tokens=False)

    def token_bytes(self) -> np.ndarray:
        """Returns the bytes of text of each token, int32[V], see `tokenizer.Tokenizer.token_bytes`."""
        kinds = _kinds(self._content.get("decoder"))
        byte_level = "ByteLevel" in kinds
        added = {token["id"]: token for token in self._content.get("added_tokens", [])}
        num_bytes = np.zeros(self.vocab_size, np.int32)
        for piece, token in self._vocab.items():
            if token == self.unk_id:
                continue
            if token in added:
                num_bytes[token] = 0 if added[token]["special"] else len(piece.encode())
            elif byte_level:
                num_bytes[token] = len(piece)  # each character is a byte
            elif len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
                num_bytes[token] = 1
            else:
                num_bytes[token] = len(piece.replace("▁", " ").encode())
        return num_bytes

    def _special(self, folder: pathlib.Path, name: str) -> int:
        """Returns the id of EOS or BOS from the files beside it; -1: none names it."""
        for file in EOS_FILES:
            try:
                content = read_json(folder / file)
            except (OSError, ValueError):
                continue
            token, token_id = content.get(f"{name}_token"), content.get(f"{name}_token_id")
            token = token.get("content") if isinstance(token, dict) else token
            token_id = token_id[0] if isinstance(token_id, list) and token_id else token_id
            token_id = self._vocab.get(token) if isinstance(token, str) else token_id
            if type(token_id) is int and 0 <= token_id < self.vocab_size:
                return token_id
        return -1


def _kinds(decoder: dict[str, Any] | None) -> set[str]:
    """Returns the types of a decoder and of its parts."""
    if decoder is None:
        return set()
    return {decoder["type"]}.union(*(_kinds(part) for part in decoder.get("decoders", [])))
