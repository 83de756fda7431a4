"""Documents to rows of tokens. Owns `concat` packing and the state of one logical stream; knows no file, no thread.

`concat` is HLAT's: no BOS, EOS after each document, each row begins where the last one ended, nothing is dropped or
padded, attention runs across documents. A document over the character limit is cut into pieces, EOS after each, in
order (HLAT's script put the tail pieces first: a bug, not copied). Source: arXiv 2404.10630, published packing script.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

POSITION_FIELDS = ("epoch", "document", "token")


def pieces(text: str, *, max_chars: int) -> Iterator[str]:
    """Yields `text` in order, cut every `max_chars` characters; an empty text is one empty piece."""
    for start in range(0, max(len(text), 1), max_chars):
        yield text[start : start + max_chars]


def document_tokens(text: str, *, tokenizer: Any, max_chars: int) -> Iterator[np.ndarray]:
    """Yields int32 tokens of one document, a piece at a time, each ending in EOS; memory holds one piece."""
    eos = np.asarray([tokenizer.eos_id], np.int32)
    for piece in pieces(text, max_chars=max_chars):
        yield np.concatenate([tokenizer.encode(piece), eos])


class ConcatStream:
    """One logical stream: endless rows of `seq_len` tokens from its own documents, epoch after epoch.

    `read(epoch, document)` gives the text of the stream's document of that number in that epoch; `encode(text)` its
    tokens as an iterator of arrays. The state is `position`, int64[3]: the epoch, the document in it and the token of
    that document (EOS counted) where the next row begins; always the first such triple, so a document that ended gives
    (epoch, document + 1, 0). Going on from a position tokenizes at most that one document again.
    """

    def __init__(
        self,
        read: Callable[[int, int], str],
        *,
        num_documents: int,
        encode: Callable[[str], Iterator[np.ndarray]],
        seq_len: int,
        position: np.ndarray,
    ):
        self._read, self._encode = read, encode
        self._num_documents, self._seq_len = num_documents, seq_len
        self._epoch, self._document, self._token = (int(value) for value in position)
        self._rest = np.zeros(0, np.int32)  # tokens of the present piece that no row has taken yet
        self._pieces: Iterator[np.ndarray] | None = None  # later pieces of the present document
        self._skip = self._token

    @property
    def position(self) -> np.ndarray:
        """int64[3]: where the next row begins."""
        return np.asarray([self._epoch, self._document, self._token], np.int64)

    def next_row(self) -> np.ndarray:
        """Returns the next int32[seq_len] tokens.

        Raises:
          ValueError: a document that cannot be read, or a position behind the end of its document.
        """
        parts, missing = [], self._seq_len
        while missing:
            if len(self._rest) == 0:
                self._next_piece()
                continue
            part, self._rest = self._rest[:missing], self._rest[missing:]
            parts.append(part)
            missing -= len(part)
            self._token += len(part)
        if len(self._rest) == 0:
            self._next_piece()  # so that the position is the first of its kind whether or not a row follows
        return np.concatenate(parts)

    def _next_piece(self) -> None:
        """Puts the next tokens of this document, or none and the next document's number, into the state."""
        if self._pieces is None:
            self._pieces = self._encode(self._read(self._epoch, self._document))
        piece = next(self._pieces, None)
        if piece is not None:
            dropped = min(self._skip, len(piece))
            self._skip -= dropped
            self._rest = piece[dropped:]
            return
        if self._skip:
            raise ValueError(
                f"position (epoch {self._epoch}, document {self._document}, token {self._token}) lies {self._skip} "
                "tokens behind the end of its document; the text or the tokenizer is not the one it was saved with."
            )
        self._pieces, self._token = None, 0
        self._document += 1
        if self._document == self._num_documents:
            self._epoch, self._document = self._epoch + 1, 0
