"""Documents of which only the answers are trained on: a prompt with its answer, or a conversation.

Until a batch is made, a token that is no target is its bitwise complement, a negative number, so that packing carries
what counts.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import numpy as np

from hlat_jax.batch import Batch, concat_batch, segmented_batch
from hlat_jax.data.chat_template import ChatTemplate
from hlat_jax.data.formats.records import Answered
from hlat_jax.data.tokenizer import Tokenizer


def unmark(marked: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns token ids, and which of them are targets."""
    return np.where(marked < 0, ~marked, marked), marked >= 0


def make_batch(marked_BT: np.ndarray, segment_ids_BT: np.ndarray | None) -> Batch:
    """Returns the batch of packed tokens; without `segment_ids_BT`, as of `concat`. What is no target has weight 0."""
    tokens_BT, is_target_BT = unmark(marked_BT)
    batch = concat_batch(tokens_BT) if segment_ids_BT is None else segmented_batch(tokens_BT, segment_ids_BT)
    batch.weights[:, :-1] *= is_target_BT[:, 1:]
    return batch


class AnswerTokens:
    """Makes the tokens of `records.Answered` documents, of which all but the answers are marked as no targets.

    A conversation is written by the chat template beside the tokenizer, its control tokens as such. A prompt and its
    answer end with EOS, which counts, and begin with BOS if `bos`.
    """

    def __init__(self, tokenizer: Tokenizer, *, bos: bool):
        self.tokenizer, self._bos = tokenizer, bos

    @functools.cached_property
    def _template(self) -> ChatTemplate:
        return ChatTemplate(self.tokenizer.path.parent)

    @property
    def template_sha256(self) -> str:
        """Identifies the template and what reads its control tokens; "" as long as no conversation was written."""
        if "_template" not in vars(self):
            return ""
        return f"{self._template.sha256[:16]}{self.tokenizer.control_tokens_sha256[:16]}"

    def __call__(self, document: Answered) -> np.ndarray:
        """Returns int32[n]. Raises ValueError, with the row, where the template refuses a conversation."""
        tokenizer = self.tokenizer
        if document.messages is None:
            ids, counted = _counted(tokenizer.encode, document, [(document.start, len(document))])
            first = [tokenizer.bos_id] if self._bos else []
            ids = np.asarray([*first, *ids, tokenizer.eos_id], np.int32)
            return _mark(ids, np.asarray([False] * len(first) + [*counted, True]))
        try:
            text, spans = self._template.answers(document.messages)
        except ValueError as error:
            raise ValueError(f"{document.where}: {error}") from None
        return _mark(*_counted(tokenizer.encode_with_control_tokens, text, spans))


def _mark(ids: np.ndarray, is_target: np.ndarray) -> np.ndarray:
    return np.where(is_target, ids, ~ids).astype(np.int32)


def _counted(
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
