"""Packs documents into rows of tokens, by `concat` or `documents`, in streams that can be resumed.

`concat` is HLAT's packing: no BOS (unless data.prepend_bos is set), EOS after each document, each row begins where the
previous one ended, nothing is dropped or padded, and attention crosses documents. A document over the character limit
is cut into pieces, EOS after each, in order (HLAT's script put the tail pieces first: a bug, not copied). Source: arXiv
2404.10630, published packing script.

`documents` cuts the same tokens of each document every `seq_len` and puts whole cuts into rows: a stream takes a fixed
number of documents at a time, a window, which ends with the epoch, and packs it best-fit. Every cut is a segment: no
attention and no target crosses its ends. The rest of a row is padding.

Either stream can shuffle rows (data.shuffle_by="row"), so that consecutive rows come from different documents, however
long these are: a DocumentsStream the rows of each window, a ShuffledConcatStream those of a buffer of consecutive
documents, see _Buffer.

A stream calls `read(epoch, document)` for its documents by number and `encode(document)` for int32 arrays of tokens.
`read` returns None for a bad record to be skipped, which the stream counts.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from hlat_jax.data.order import Order

BUFFER_ROWS, BUFFER_DOCUMENTS, BUFFER_TOKENS = 256, 16, 1 << 22

POSITION_FIELDS = {
    "concat": ("epoch", "document", "token", "skipped"),
    "documents": ("epoch", "document", "row", "skipped"),
}

Read = Callable[[int, int], Any]
Encode = Callable[[Any], Iterator[np.ndarray]]


@dataclasses.dataclass(frozen=True)
class Span:
    """A range of consecutive tokens of one document in a row.

    Attributes:
      epoch, document: the document, by its number in the stream.
      token: index of the first token in the document, EOS counted.
      start, stop: their range in the row.
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
      tokens: int32 [T].
      segment_ids: int32 [T], from 1, 0 for padding; None: one segment fills the row.
      spans: where the tokens come from, in order; padding has none.
    """

    tokens: np.ndarray
    segment_ids: np.ndarray | None
    spans: tuple[Span, ...]


def pieces(text: str, *, max_chars: int) -> Iterator[str]:
    """Yields `text` in order, cut every `max_chars` characters; an empty text is one empty piece."""
    for start in range(0, max(len(text), 1), max_chars):
        yield text[start : start + max_chars]


def document_tokens(text: str, *, tokenizer: Any, max_chars: int, bos: bool = False) -> Iterator[np.ndarray]:
    """Yields the int32 tokens of a document, one piece at a time, each ending in EOS; memory holds one piece.

    With `bos` each piece begins with BOS.
    """
    first = np.asarray([tokenizer.bos_id] if bos else [], np.int32)
    eos = np.asarray([tokenizer.eos_id], np.int32)
    for piece in pieces(text, max_chars=max_chars):
        yield np.concatenate([first, tokenizer.encode(piece), eos])


class ConcatStream:
    """An endless stream of rows of `seq_len` tokens from the documents 0 .. `num_documents` - 1, epoch after epoch.

    The state is `position`, int64[4]: the epoch, the document in it, the token of that document (EOS counted) at which
    the next row begins, and the bad records skipped so far. It is canonical: after the end of a document it is (epoch,
    document + 1, 0). Resuming from a position tokenizes at most that document again.
    """

    def __init__(
        self, read: Read, *, num_documents: int, encode: Encode, seq_len: int, position: np.ndarray, max_bad: int
    ):
        self._read, self._encode, self._max_bad = read, encode, max_bad
        self._num_documents, self._seq_len = num_documents, seq_len
        self._epoch, self._document, self._token, self._skipped = (int(value) for value in position)
        self._rest = np.zeros(0, np.int32)  # tokens of the current piece that are in no row yet
        self._pieces: Iterator[np.ndarray] | None = None  # later pieces of the current document
        self._skip = self._token
        self._skipped_in_a_row = 0

    @property
    def position(self) -> np.ndarray:
        """int64[4]: where the next row begins."""
        return np.asarray([self._epoch, self._document, self._token, self._skipped], np.int64)

    def next_row(self) -> Row:
        """Returns the next row.

        Raises:
          ValueError: a document that cannot be read, a position beyond the end of its document, or `max_bad` bad
            records in a row.
        """
        parts, spans, filled = [], [], 0
        while filled < self._seq_len:
            if len(self._rest) == 0:
                self._next_piece()
                continue
            part, self._rest = self._rest[: self._seq_len - filled], self._rest[self._seq_len - filled :]
            spans.append(Span(self._epoch, self._document, self._token, filled, filled + len(part)))
            parts.append(part)
            filled += len(part)
            self._token += len(part)
        if len(self._rest) == 0:
            self._next_piece()  # so that the position is canonical
        return Row(np.concatenate(parts), None, _joined(spans))

    def _next_piece(self) -> None:
        """Loads the next piece of this document, or moves to the next document."""
        if self._pieces is None:
            document = self._read(self._epoch, self._document)
            if document is None and not self._skip:
                self._skipped += 1
                self._skipped_in_a_row += 1
                _check_not_all_bad(self._skipped_in_a_row, self._max_bad)
            else:
                self._skipped_in_a_row = 0
            self._pieces = iter(()) if document is None else self._encode(document)
        piece = next(self._pieces, None)
        if piece is not None:
            dropped = min(self._skip, len(piece))
            self._skip -= dropped
            self._rest = piece[dropped:]
            return
        if self._skip:
            raise ValueError(
                f"position (epoch {self._epoch}, document {self._document}, token {self._token}) is {self._skip} "
                "tokens beyond the end of its document; resume with the text and the tokenizer it was saved with."
            )
        self._pieces, self._token = None, 0
        self._document += 1
        if self._document == self._num_documents:
            self._epoch, self._document = self._epoch + 1, 0


class ShuffledConcatStream:
    """An endless stream of rows of `seq_len` tokens, which shuffles the rows of one buffer of documents after another.

    The tokens of a buffer that do not fill its last row, fewer than `seq_len`, are dropped. The order of the rows of a
    buffer depends on `seed` and on its first document.

    The state is `position`, int64[4]: the epoch and number of the first document of the buffer, the next row of the
    buffer, and the bad records skipped so far (those of a buffer count with its first row). Resuming from a position
    tokenizes the documents of that buffer again. Each row tokenizes a share of the next buffer.
    """

    def __init__(
        self,
        read: Read,
        *,
        num_documents: int,
        encode: Encode,
        seq_len: int,
        position: np.ndarray,
        max_bad: int,
        seed: int,
    ):
        self._seq_len, self._seed = seq_len, seed
        self._epoch, self._document, self._row, self._skipped = (int(value) for value in position)
        options = {"num_documents": num_documents, "seq_len": seq_len, "max_bad": max_bad}
        self._make = functools.partial(_Buffer, read=read, encode=encode, **options)
        self._next = self._make(self._epoch, self._document)
        self._buffer: _Buffer | None = None

    @property
    def position(self) -> np.ndarray:
        """int64[4]: where the next row begins."""
        return np.asarray([self._epoch, self._document, self._row, self._skipped], np.int64)

    def next_row(self) -> Row:
        """Returns the next row.

        Raises:
          ValueError: a document that cannot be read, a position beyond the last row of its buffer, or `max_bad` bad
            records in a row.
        """
        if self._buffer is None:
            self._open_buffer()
        row = self._buffer.row(self._order.number(0, self._row))
        self._row += 1
        self._next.read_ahead(self._row / self._num_rows)
        if self._row == self._num_rows:
            (self._epoch, self._document), self._row, self._buffer = self._buffer.end, 0, None
        return row

    def _open_buffer(self) -> None:
        self._next.finish()
        num_rows = self._next.num_tokens // self._seq_len
        if self._row >= num_rows:
            raise ValueError(
                f"position (epoch {self._epoch}, document {self._document}, row {self._row}) is beyond the {num_rows} "
                "rows of its buffer; resume with the text and the tokenizer it was saved with."
            )
        self._buffer, self._num_rows = self._next, num_rows
        if self._row == 0:  # else they were counted with the first row
            self._skipped += self._buffer.num_bad
        self._order = _row_order(num_rows, seed=self._seed, epoch=self._epoch, document=self._document)
        self._next = self._make(*self._buffer.end)


class _Buffer:
    """The tokens of consecutive documents from `document` of `epoch` on.

    It is full with BUFFER_DOCUMENTS documents, BUFFER_TOKENS tokens, or the last document of the epoch, but not before
    it has BUFFER_ROWS rows, for which it may take documents of later epochs.

    Attributes:
      end: (epoch, document) after the last document read.
      num_tokens, num_bad: tokens, and bad records skipped, so far.
    """

    def __init__(
        self,
        epoch: int,
        document: int,
        *,
        read: Read,
        encode: Encode,
        num_documents: int,
        seq_len: int,
        max_bad: int,
    ):
        self._read, self._encode, self._num_documents = read, encode, num_documents
        self._seq_len, self._max_bad, self._first_epoch = seq_len, max_bad, epoch
        self._tokens: list[np.ndarray] = []
        self._documents: list[tuple[int, int]] = []  # (epoch, document)
        self._firsts: list[int] = []  # where their tokens begin
        self._bad_in_a_row = 0
        self.end, self.num_tokens, self.num_bad = (epoch, document), 0, 0

    def read_ahead(self, share: float) -> None:
        """Tokenizes about `share` of the buffer; errors are left to `finish`, which raises them."""
        try:
            while self._filled() < min(share, 1.0):
                self._tokenize_one()
        except Exception:  # raised by `finish`, for the first row of this buffer
            return

    def finish(self) -> None:
        """Tokenizes the rest of the buffer."""
        while self._filled() < 1.0:
            self._tokenize_one()
        self._tokens = [np.concatenate(self._tokens)]

    def row(self, index: int) -> Row:
        """Returns row `index` of a finished buffer."""
        start, stop = index * self._seq_len, (index + 1) * self._seq_len
        numbers = range(bisect.bisect_right(self._firsts, start) - 1, bisect.bisect_left(self._firsts, stop))
        ends = [*self._firsts[numbers.start + 1 : numbers.stop], stop]
        spans = []
        for number, end in zip(numbers, ends, strict=True):
            first, (epoch, document) = self._firsts[number], self._documents[number]
            spans.append(Span(epoch, document, max(start - first, 0), max(first - start, 0), end - start))
        return Row(self._tokens[0][start:stop], None, tuple(spans))

    def _filled(self) -> float:
        """Returns the share of the buffer that is filled; 1 or more when it is full."""
        documents = max(len(self._firsts) / BUFFER_DOCUMENTS, self.num_tokens / BUFFER_TOKENS)
        return min(self.num_tokens / (BUFFER_ROWS * self._seq_len), max(documents, self.end[0] - self._first_epoch))

    def _tokenize_one(self) -> None:
        epoch, number = self.end
        document = self._read(epoch, number)
        pieces = [] if document is None else list(self._encode(document))
        if document is None:
            _check_not_all_bad(self._bad_in_a_row + 1, self._max_bad)
        self._bad_in_a_row = self._bad_in_a_row + 1 if document is None else 0
        self.num_bad += document is None
        if pieces:
            self._documents.append((epoch, number))
            self._firsts.append(self.num_tokens)
            self._tokens += pieces
            self.num_tokens += sum(map(len, pieces))
        self.end = (epoch, number + 1) if number + 1 < self._num_documents else (epoch + 1, 0)


def _row_order(num_rows: int, *, seed: int, epoch: int, document: int) -> Order:
    """Returns the order of the rows of the window or buffer that begins with a document."""
    digest = hashlib.blake2b(f"{seed} {epoch} {document}".encode(), digest_size=4).digest()
    return Order(num_rows, seed=int.from_bytes(digest, "little"))


def _joined(spans: Iterable[Span]) -> tuple[Span, ...]:
    """Returns the spans with consecutive spans of the same document merged."""
    joined: list[Span] = []
    for span in spans:
        last = joined[-1] if joined else None
        if last and (last.epoch, last.document) == (span.epoch, span.document):
            span = dataclasses.replace(last, stop=span.stop)
            joined.pop()
        joined.append(span)
    return tuple(joined)


def _check_not_all_bad(skipped: int, max_bad: int) -> None:
    """Raises ValueError if so many consecutive records are bad that there seems to be no good document."""
    if skipped >= max_bad:
        raise ValueError(
            f"the last {skipped} documents of one row are bad records; fix the data, or set "
            'data.on_bad_record="raise" to see the reasons.'
        )


@dataclasses.dataclass(frozen=True)
class DocumentWindows:
    """The windows of `documents` packing: tokens of a row, documents of a window, and the token id of padding."""

    seq_len: int
    num_documents: int
    pad_id: int


class DocumentsStream:
    """An endless stream of rows of whole documents, window after window, epoch after epoch.

    The state is `position`, int64[4]: the epoch, the first document of the window, the next row within it, and the bad
    records skipped so far (those of a window count with its first row). After the last row of a window it is row 0 of
    the next one. Resuming from a position tokenizes the documents of that window again.

    Each row tokenizes a share of the next window, so that only the first row waits for a whole window.
    """

    def __init__(
        self,
        read: Read,
        *,
        num_documents: int,
        encode: Encode,
        windows: DocumentWindows,
        position: np.ndarray,
        max_bad: int,
        seed: int | None = None,
    ):
        self._read, self._encode, self._num_documents, self._windows = read, encode, num_documents, windows
        self._seed = seed  # of the order of the rows of each window; None: as packed
        self._epoch, self._document, self._row, self._skipped = (int(value) for value in position)
        self._skipped_in_a_row, self._max_bad = 0, max_bad
        self._next_window = self._window(self._epoch, self._document)
        self._rows: list[list[tuple[Span, np.ndarray]]] | None = None
        self._num_taken = 0  # rows taken from this window since it was opened in this process

    @property
    def position(self) -> np.ndarray:
        """int64[4]: where the next row begins."""
        return np.asarray([self._epoch, self._document, self._row, self._skipped], np.int64)

    def next_row(self) -> Row:
        """Returns the next row.

        Raises:
          ValueError: a document that cannot be read, a position beyond the last row of its window, or `max_bad` bad
            records in a row.
        """
        while self._rows is None:
            self._open_window()
        placed, self._rows[self._row] = self._rows[self._row], []  # to free its tokens
        self._row += 1
        self._num_taken += 1
        self._next_window.read_ahead(self._num_taken / (self._num_taken + len(self._rows) - self._row))
        if self._row == len(self._rows):
            self._close_window()
        return _make_row(placed, windows=self._windows)

    def _window(self, epoch: int, first: int) -> _Window:
        stop = min(first + self._windows.num_documents, self._num_documents)
        return _Window(epoch, first, stop=stop, read=self._read, cuts=self._cuts)

    def _cuts(self, document: Any) -> list[np.ndarray]:
        return list(cut(self._encode(document), seq_len=self._windows.seq_len))

    def _open_window(self) -> None:
        window, self._num_taken = self._next_window, 0
        found = window.finish()
        if self._row == 0:  # else they were counted with the first row
            self._skipped += window.num_bad
        self._skipped_in_a_row = 0 if found else self._skipped_in_a_row + window.num_bad
        _check_not_all_bad(self._skipped_in_a_row, self._max_bad)
        rows = best_fit([len(tokens) for _, tokens in found], capacity=self._windows.seq_len)
        if self._row and self._row >= len(rows):
            raise ValueError(
                f"position (epoch {self._epoch}, document {self._document}, row {self._row}) is beyond the {len(rows)} "
                "rows of its window; resume with the text and the tokenizer it was saved with."
            )
        if rows and self._seed is not None:
            order = _row_order(len(rows), seed=self._seed, epoch=self._epoch, document=self._document)
            rows = [rows[order.number(0, row)] for row in range(len(rows))]
        self._rows = [[found[index] for index in row] for row in rows]
        epoch, document = self._following()
        self._next_window = self._window(epoch, document)
        if not rows:
            self._close_window()

    def _following(self) -> tuple[int, int]:
        first = self._document + self._windows.num_documents
        return (self._epoch, first) if first < self._num_documents else (self._epoch + 1, 0)

    def _close_window(self) -> None:
        self._epoch, self._document = self._following()
        self._row, self._rows = 0, None


class _Window:
    """The documents of one window, tokenized in order."""

    def __init__(self, epoch: int, first: int, *, stop: int, read: Read, cuts: Callable[[Any], list[np.ndarray]]):
        self._epoch, self._first, self._next, self._stop = epoch, first, first, stop
        self._read, self._cuts = read, cuts
        self._found: list[tuple[Span, np.ndarray]] = []  # `start` and `stop` of a span are set when it is placed
        self.num_bad = 0

    def read_ahead(self, share: float) -> None:
        """Tokenizes until about `share` of the documents are done; errors are left to `finish`, which raises them."""
        until = self._first + int((self._stop - self._first) * share)
        try:
            while self._next < until:
                self._tokenize_one()
        except Exception:  # raised by `finish`, for the first row of this window
            return

    def finish(self) -> list[tuple[Span, np.ndarray]]:
        """Returns the cuts of all documents with their spans, in order."""
        while self._next < self._stop:
            self._tokenize_one()
        return self._found

    def _tokenize_one(self) -> None:
        document = self._read(self._epoch, self._next)
        token, found = 0, []
        for tokens in () if document is None else self._cuts(document):
            found.append((Span(self._epoch, self._next, token, 0, 0), tokens))
            token += len(tokens)
        self.num_bad += document is None
        self._found += found
        self._next += 1


def concat_epoch(documents: Iterable[Any], *, encode: Encode, seq_len: int) -> Iterator[Row]:
    """Yields the rows of one epoch of a ConcatStream of `documents`; the last one may be shorter."""
    parts, spans, filled = [], [], 0
    for number, document in enumerate(documents):
        token = 0
        for rest in encode(document):
            while len(rest):
                part, rest = rest[: seq_len - filled], rest[seq_len - filled :]
                spans.append(Span(0, number, token, filled, filled + len(part)))
                parts.append(part)
                token, filled = token + len(part), filled + len(part)
                if filled == seq_len:
                    yield Row(np.concatenate(parts), None, _joined(spans))
                    parts, spans, filled = [], [], 0
    if filled:
        yield Row(np.concatenate(parts), None, _joined(spans))


def cut(arrays: Iterable[np.ndarray], *, seq_len: int) -> Iterator[np.ndarray]:
    """Yields consecutive cuts of `seq_len` tokens of the concatenated arrays; the last one may be shorter."""
    rest = np.zeros(0, np.int32)
    for array in arrays:
        rest = np.concatenate([rest, array])
        num_whole = len(rest) // seq_len * seq_len
        yield from rest[:num_whole].reshape(-1, seq_len)
        rest = rest[num_whole:]
    if len(rest):
        yield rest


def best_fit(lengths: Sequence[int], *, capacity: int) -> list[list[int]]:
    """Returns the rows of a best-fit decreasing packing as lists of piece numbers.

    Each piece, largest first, goes to the fullest row with room for it, or to a new row; ties go to the earlier piece
    and row.
    """
    rows: list[list[int]] = []
    room: list[tuple[int, int]] = []  # sorted (free tokens, row) of rows that are not full
    for piece in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        length = lengths[piece]
        at = bisect.bisect_left(room, (length, -1))
        if at == len(room):
            rows.append([])
            free, row = capacity, len(rows) - 1
        else:
            free, row = room.pop(at)
        rows[row].append(piece)
        if free > length:
            bisect.insort(room, (free - length, row))
    return rows


def _make_row(placed: list[tuple[Span, np.ndarray]], *, windows: DocumentWindows) -> Row:
    tokens_T = np.full(windows.seq_len, windows.pad_id, np.int32)
    segment_ids_T, start, spans = np.zeros(windows.seq_len, np.int32), 0, []
    for segment, (span, tokens) in enumerate(placed, 1):
        stop = start + len(tokens)
        tokens_T[start:stop], segment_ids_T[start:stop] = tokens, segment
        spans.append(dataclasses.replace(span, start=start, stop=stop))
        start = stop
    return Row(tokens_T, segment_ids_T, tuple(spans))


def documents_epoch(documents: Iterable[Any], *, encode: Encode, windows: DocumentWindows) -> Iterator[Row]:
    """Yields the rows of one epoch of a DocumentsStream of `documents`."""
    window: list[tuple[Span, np.ndarray]] = []

    def rows() -> Iterator[Row]:
        for row in best_fit([len(tokens) for _, tokens in window], capacity=windows.seq_len):
            yield _make_row([window[index] for index in row], windows=windows)

    for number, document in enumerate(documents):
        if number and number % windows.num_documents == 0:
            yield from rows()
            window.clear()
        token = 0
        for tokens in cut(encode(document), seq_len=windows.seq_len):
            window.append((Span(0, number, token, 0, 0), tokens))
            token += len(tokens)
    yield from rows()
