"""Tokens of documents in which only the answers are trained on, a prompt with its answer or a conversation."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import numpy as np

from hlat_jax.data.chat_template import ChatTemplate
from hlat_jax.data.formats.records import Answered
from hlat_jax.data.packing import Tokens
from hlat_jax.data.tokenizer import Tokenizer


class AnswerTokens:
    """Makes the tokens of `records.Answered` documents, in which only the answers are targets.

    A conversation is formatted with the tokenizer's chat template, and control tokens are encoded as control tokens. A
    prompt and its answer end with EOS, which is a target, and begin with BOS if `bos`.
    """

    def __init__(self, tokenizer: Tokenizer, *, bos: bool):
        self._tokenizer, self._bos = tokenizer, bos

    @functools.cached_property
    def _template(self) -> ChatTemplate:
        return ChatTemplate(self._tokenizer.path.parent)

    @property
    def template_sha256(self) -> str:
        """Identifies the template and the reader of its control tokens, or "" until a conversation is formatted."""
        if "_template" not in vars(self):
            return ""
        return f"{self._template.sha256[:16]}{self._tokenizer.control_tokens_sha256[:16]}"

    def __call__(self, document: Answered) -> Tokens:
        """Returns the tokens. Raises ValueError, with the row, where the template refuses a conversation."""
        tokenizer = self._tokenizer
        if document.messages is None:
            ids, is_target = _encode_with_targets(tokenizer.encode, document, [(document.start, len(document))])
            first = [tokenizer.bos_id] if self._bos else []
            ids = np.asarray([*first, *ids, tokenizer.eos_id], np.int32)
            return Tokens(ids, np.asarray([False] * len(first) + [*is_target, True]))
        try:
            text, spans = self._template.answers(document.messages)
        except ValueError as error:
            raise ValueError(f"{document.where}: {error}") from None
        return Tokens(*_encode_with_targets(tokenizer.encode_with_control_tokens, text, spans))


def _encode_with_targets(
    encode: Callable[[str], np.ndarray], text: str, spans: Sequence[tuple[int, int]]
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the tokens of a text, and which lie in a span; a token across the beginning of one is in it."""
    ids = encode(text)
    counted = np.zeros(len(ids), bool)
    for first, last in spans:
        begin, end = (_num_equal(ids, encode(text[:stop])) for stop in (first, last))
        counted[begin:end] = True
    return ids, counted


def _num_equal(ids: np.ndarray, other: np.ndarray) -> int:
    """Returns how many first tokens are the same."""
    length = min(len(ids), len(other))
    differ = np.flatnonzero(ids[:length] != other[:length])
    return int(differ[0]) if len(differ) else length
