"""Packs documents into rows of tokens, by `concat` or `documents`, in streams that can be resumed.

`concat` is HLAT's packing. A document has EOS at its end, and no BOS unless data.prepend_bos is set. Each row begins at
the end of the previous row, nothing is dropped or padded, and attention crosses documents. A document over the
character limit is cut into pieces in order, with EOS after each. HLAT's script put the tail pieces first, a bug that is
not copied. Source: arXiv 2404.10630, published packing script.

`documents` cuts the same tokens of each document every `seq_len` and puts whole cuts into rows. A stream takes a window
of a fixed number of documents at a time, which ends with the epoch, and packs it best-fit. Every cut is a segment, so
no attention and no target crosses its ends. The rest of a row is padding.

A stream calls `read(epoch, document)` for its documents by number and `encode(document)` for pieces of `Tokens`.
`read` returns None for a bad record to skip, which the stream counts.
"""

from __future__ import annotations

import bisect
import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from hlat_jax.data.tokenizer import Tokenizer


@dataclasses.dataclass(slots=True)
class Tokens:
    """Consecutive tokens, which can be sliced.

    Attributes:
      ids: int32 [n], the token ids.
      is_target: bool [n], whether the loss counts each token as a target. None stands for all.
    """

    ids: np.ndarray
    is_target: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, part: slice) -> Tokens:
        return Tokens(self.ids[part], None if self.is_target is None else self.is_target[part])

    def mask(self) -> np.ndarray:
        """Returns whether each token is a target, bool [n]."""
        return np.ones(len(self), bool) if self.is_target is None else self.is_target


def concatenate(parts: Sequence[Tokens]) -> Tokens:
    """Returns the tokens of all parts in order. The result has `is_target` if a part has it."""
    has_mask = any(part.is_target is not None for part in parts)
    mask = np.concatenate([part.mask() for part in parts]) if has_mask else None
    return Tokens(np.concatenate([part.ids for part in parts]), mask)


Read = Callable[[int, int], Any]
Encode = Callable[[Any], Iterator[Tokens]]


@dataclasses.dataclass(frozen=True)
class Span:
    """A range of consecutive tokens of one document in a row.

    Attributes:
      epoch, document: the document, by its number in the stream.
      token: the index of the first token in the document, EOS counted.
      start, stop: the range of the tokens in the row.
    """

    epoch: int
    document: int
    token: int
    start: int
    stop: int


@dataclasses.dataclass(frozen=True)
class Row:
    """One row of a batch.

    Attributes:
      tokens: the T tokens of the row.
      segment_ids: int32 [T], from 1, with 0 for padding. None stands for one segment that fills the row.
      spans: the origins of the tokens, in order. Padding has none.
    """

    tokens: Tokens
    segment_ids: np.ndarray | None
    spans: tuple[Span, ...]


def pieces(text: str, *, max_chars: int) -> Iterator[str]:
    """Yields `text` in order, cut every `max_chars` characters. An empty text is one empty piece."""
    for start in range(0, max(len(text), 1), max_chars):
        yield text[start : start + max_chars]


def document_tokens(text: str, *, tokenizer: Tokenizer, max_chars: int, bos: bool = False) -> Iterator[np.ndarray]:
    """Yields the int32 tokens of a document, one piece at a time, each with EOS at its end. Memory holds one piece.

    With `bos` each piece begins with BOS.
    """
    first = np.asarray([tokenizer.bos_id] if bos else [], np.int32)
    eos = np.asarray([tokenizer.eos_id], np.int32)
    for piece in pieces(text, max_chars=max_chars):
        yield np.concatenate([first, tokenizer.encode(piece), eos])


class ConcatStream:
    """An endless stream of rows of `seq_len` tokens from the documents 0 .. `num_documents` - 1, epoch after epoch.

    The state is `position`, int64[4]. The next row begins in its epoch, document and token of the document (EOS
    counted). The last element is the number of bad records skipped so far. The position is canonical, so after the end
    of a document it is (epoch, document + 1, 0). Resuming from a position tokenizes at most that document again.
    """

    def __init__(self, read: Read, *, num_documents: int, encode: Encode, seq_len: int, position: np.ndarray):
        self._read, self._encode = read, encode
        self._num_documents, self._seq_len = num_documents, seq_len
        self._epoch, self._document, self._token, self._skipped = (int(value) for value in position)
        self._piece, self._num_taken = Tokens(np.zeros(0, np.int32)), 0  # how many of its tokens are in a row
        self._pieces: Iterator[Tokens] | None = None  # later pieces of the current document
        self._skip = self._token

    @property
    def position(self) -> np.ndarray:
        """int64[4]: where the next row begins."""
        return np.asarray([self._epoch, self._document, self._token, self._skipped], np.int64)

    def next_row(self) -> Row:
        """Returns the next row; raises what `read` and `encode` raise."""
        parts, spans, filled = [], [], 0
        while filled < self._seq_len:
            if self._num_taken == len(self._piece):
                self._next_piece()
                continue
            part = self._piece[self._num_taken : self._num_taken + self._seq_len - filled]
            self._num_taken += len(part)
            last = spans[-1] if spans else None
            if last and (last.epoch, last.document) == (self._epoch, self._document):  # the next piece of it
                spans[-1] = dataclasses.replace(last, stop=filled + len(part))
            else:
                spans.append(Span(self._epoch, self._document, self._token, filled, filled + len(part)))
            parts.append(part)
            filled += len(part)
            self._token += len(part)
        if self._num_taken == len(self._piece):
            self._next_piece()  # so that the position is canonical
        return Row(concatenate(parts), None, tuple(spans))

    def _next_piece(self) -> None:
        """Loads the next piece of this document, or moves to the next document."""
        if self._pieces is None:
            document = self._read(self._epoch, self._document)
            if document is None and not self._skip:
                self._skipped += 1
            self._pieces = iter(()) if document is None else self._encode(document)
        piece = next(self._pieces, None)
        if piece is not None:
            self._piece, self._num_taken = piece, min(self._skip, len(piece))
            self._skip -= self._num_taken
            return
        assert not self._skip, "the position is beyond the end of its document"
        self._pieces, self._token = None, 0
        self._document += 1
        if self._document == self._num_documents:
            self._epoch, self._document = self._epoch + 1, 0


@dataclasses.dataclass
class _Window:
    """Consecutive documents of a stream, tokenized so far.

    Attributes:
      epoch, first: the epoch and number of the first document.
      num_read: documents read so far, bad ones too.
      documents: (number, tokens) of each good one.
    """

    epoch: int
    first: int
    num_documents: int
    num_read: int = 0
    documents: list[tuple[int, Tokens]] = dataclasses.field(default_factory=list)
    num_bad: int = 0


class DocumentsStream:
    """An endless stream of rows of whole documents, with the cuts of `window_documents` at a time packed best-fit.

    The state is `position`, int64[4]. It has the epoch and number of the window's first document, the next row in the
    window, and the count of skipped bad records. Bad records of a window count with its first row. After the last row
    of a window the position is row 0 of the next window. Resuming from a position tokenizes its window again.

    Each row tokenizes a share of the next window, so that only the first row waits for a whole window.
    """

    def __init__(
        self,
        read: Read,
        *,
        num_documents: int,
        encode: Encode,
        seq_len: int,
        window_documents: int,
        pad_id: int,
        position: np.ndarray,
    ):
        self._read, self._encode, self._num_documents = read, encode, num_documents
        self._seq_len, self._window_documents, self._pad_id = seq_len, window_documents, pad_id
        self._epoch, self._document, self._row, self._skipped = (int(value) for value in position)
        self._next = self._window(self._epoch, self._document)
        self._rows: list[Row | None] = []
        self._num_taken = 0  # rows taken from this window since it was opened in this process

    @property
    def position(self) -> np.ndarray:
        """int64[4]: where the next row begins."""
        return np.asarray([self._epoch, self._document, self._row, self._skipped], np.int64)

    def next_row(self) -> Row:
        """Returns the next row; raises what `read` and `encode` raise."""
        while not self._rows:
            self._open_window()
        row, self._rows[self._row] = self._rows[self._row], None  # to free its tokens
        self._row += 1
        self._num_taken += 1
        share = self._num_taken / (self._num_taken + len(self._rows) - self._row)
        # the first row of the next window reads that document again, and raises
        with contextlib.suppress(ValueError, OSError):
            while self._next.num_read < share * self._next.num_documents:
                self._tokenize_one()
        if self._row == len(self._rows):
            self._close_window()
        return row

    def _window(self, epoch: int, first: int) -> _Window:
        return _Window(epoch, first, min(self._window_documents, self._num_documents - first))

    def _open_window(self) -> None:
        while self._next.num_read < self._next.num_documents:
            self._tokenize_one()
        window, self._num_taken = self._next, 0
        self._rows = self._pack(window)
        if self._row == 0:  # else they were counted with the first row
            self._skipped += window.num_bad
        end = window.first + window.num_documents
        self._end = (window.epoch, end) if end < self._num_documents else (window.epoch + 1, 0)
        self._next = self._window(*self._end)
        if not self._rows:
            self._close_window()

    def _close_window(self) -> None:
        (self._epoch, self._document), self._row, self._rows = self._end, 0, []

    def _tokenize_one(self) -> None:
        window = self._next
        document_index = window.first + window.num_read
        document = self._read(window.epoch, document_index)
        if document is None:
            window.num_bad += 1
        else:
            window.documents.append((document_index, concatenate(list(self._encode(document)))))
        window.num_read += 1

    def _pack(self, window: _Window) -> list[Row]:
        cuts = [
            (document, token, tokens[token : token + self._seq_len])
            for document, tokens in window.documents
            for token in range(0, len(tokens), self._seq_len)
        ]
        rows = []
        for in_row in best_fit([len(tokens) for *_, tokens in cuts], capacity=self._seq_len):
            segment_ids_T, start, parts, spans = np.zeros(self._seq_len, np.int32), 0, [], []
            for segment, (document, token, tokens) in enumerate((cuts[cut] for cut in in_row), 1):
                stop = start + len(tokens)
                segment_ids_T[start:stop] = segment
                parts.append(tokens)
                spans.append(Span(window.epoch, document, token, start, stop))
                start = stop
            parts.append(Tokens(np.full(self._seq_len - start, self._pad_id, np.int32)))
            rows.append(Row(concatenate(parts), segment_ids_T, tuple(spans)))
        return rows


Stream = ConcatStream | DocumentsStream


def first_epoch(stream: Stream) -> Iterator[Row]:
    """Yields the rows of the first epoch of a new stream. The last row of a ConcatStream ends with the epoch."""
    while stream.position[0] == 0:
        row = stream.next_row()
        if row.segment_ids is None:
            spans = tuple(span for span in row.spans if span.epoch == 0)
            row = Row(row.tokens[: spans[-1].stop], None, spans)
        yield row


def best_fit(lengths: Sequence[int], *, capacity: int) -> list[list[int]]:
    """Returns the rows of a best-fit decreasing packing as lists of piece numbers.

    Each piece, largest first, goes to the fullest row with room, or to a new row. Ties go to the earlier one.
    """
    rows: list[list[int]] = []
    room: list[tuple[int, int]] = []  # sorted (free tokens, row) of rows that are not full
    for piece in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        length = lengths[piece]
        slot = bisect.bisect_left(room, (length, -1))
        if slot == len(room):
            rows.append([])
            free, row = capacity, len(rows) - 1
        else:
            free, row = room.pop(slot)
        rows[row].append(piece)
        if free > length:
            bisect.insort(room, (free - length, row))
    return rows
