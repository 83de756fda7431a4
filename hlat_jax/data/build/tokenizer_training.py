"""Trains a SentencePiece model on a sample of the text, `python -m hlat_jax.data tokenizer`.

The model is lossless, so `decode(encode(text)) == text` for every text without U+2581, SentencePiece's own space.
"""

from __future__ import annotations

import hashlib
import heapq
import io
import pathlib
from collections.abc import Iterable, Iterator, Sequence

import sentencepiece

from hlat_jax.config import count_text
from hlat_jax.data.build import inputs
from hlat_jax.data.formats.paths import find_files
from hlat_jax.data.formats.records import BadRecord
from hlat_jax.facts.byte_sizes import format_bytes
from hlat_jax.store.atomic_files import write_whole
from hlat_jax.store.progress import Status

_PIECE_CHARS = 4096  # of text sampled as a whole


def train(
    words: Sequence[str],
    *,
    out: pathlib.Path,
    vocab_size: int,
    sample_bytes: int,
    text_field: str = "text",
    on_bad_record: str = "raise",
    status: Status | None = None,
) -> str:
    """Trains a SentencePiece BPE model on a sample of the inputs, writes it to `out` and returns lines about it.

    The sample is uniform over pieces of about 4,096 characters. The same inputs give the same model. Memory holds the
    sample and the trainer's tables of its words. `status` is updated meanwhile.

    Raises:
      ValueError: bad input (see sources), no text, `out` exists, or a vocabulary too small or too large for the text.
      OSError: `out` cannot be written.
    """
    if out.suffix != ".model" or out.exists():
        raise ValueError(
            f"--out={out} must be a new file that ends in .model. Runs that use a tokenizer could not be resumed with "
            "another one of the same name."
        )
    sample, status = Sample(sample_bytes), status or Status()
    num_documents = num_bad = 0
    input_files = inputs.open_inputs(find_files(words, key=inputs.KEY, in_order=True))
    total_bytes = max(sum(input_.size for input_ in input_files), 1)
    for input_ in input_files:
        for document in inputs.read(input_, text_field=text_field):
            if isinstance(document, BadRecord):
                if on_bad_record == "raise":
                    raise document.for_command()
                num_bad += 1
                continue
            num_documents += 1
            sample.add(document)
            status.share = min(sample.seen_bytes / total_bytes, 1.0)  # compressed inputs reach 1 early
            status.text = f"reading, {count_text(num_documents, 'document')}  {format_bytes(sample.seen_bytes)}"
    documents, pieces = count_text(num_documents, "document"), sample.pieces()
    if not any(piece.strip() for piece in pieces):
        raise ValueError(f"the inputs hold no text ({documents}). Check --text_field={text_field}.")
    status.share, status.text = 1.0, f"training on {format_bytes(sample.num_bytes)}, without progress reports"
    serialized = train_model(pieces, vocab_size=vocab_size)
    out.parent.mkdir(parents=True, exist_ok=True)
    write_whole(out, serialized)
    skipped = f", skipped {count_text(num_bad, 'bad record')}" if num_bad else ""
    return (
        f"{out}: {vocab_size:,} tokens, SHA-256 {hashlib.sha256(serialized).hexdigest()}\n"
        f"sampled {format_bytes(sample.num_bytes)} of {format_bytes(sample.seen_bytes)} in {documents}{skipped}"
    )


class Sample:
    """A uniform sample of pieces of text within a budget of bytes, from any number of documents.

    Pieces with the smallest hash of their index are kept. So the sample depends only on the documents, and memory holds
    no more than the budget and one piece.
    """

    def __init__(self, max_bytes: int):
        self.num_bytes = self.seen_bytes = 0
        self._max_bytes, self._seen = max_bytes, 0
        self._heap: list[tuple[int, int, str, int]] = []  # (-hash, index, piece, bytes): the largest hash first

    def add(self, document: str) -> None:
        """Adds the pieces of one document."""
        for piece in _pieces(document):
            num_bytes = len(piece.encode("utf-8"))
            digest = hashlib.blake2b(self._seen.to_bytes(8, "little"), digest_size=8).digest()
            heapq.heappush(self._heap, (-int.from_bytes(digest, "little"), self._seen, piece, num_bytes))
            self._seen += 1
            self.seen_bytes += num_bytes
            self.num_bytes += num_bytes
            while self.num_bytes > self._max_bytes and len(self._heap) > 1:
                self.num_bytes -= heapq.heappop(self._heap)[3]

    def pieces(self) -> list[str]:
        """Returns the sampled pieces in the order of the documents."""
        return [piece for _, _, piece, _ in sorted(self._heap, key=lambda entry: entry[1])]


def _pieces(document: str) -> Iterator[str]:
    """Yields a document in pieces that end at a word boundary, if there is one within the length of a piece."""
    start = 0
    while start < len(document):
        end = start + _PIECE_CHARS
        if end < len(document):
            space = document.rfind(" ", start + 1, end + 1)
            end = space if space > 0 else end
        yield document[start:end]
        start = end


def train_model(pieces: Iterable[str], *, vocab_size: int) -> bytes:
    """Returns a serialized SentencePiece BPE model of exactly `vocab_size` tokens.

    Identity normalization, no dummy prefix and no removal of spaces keep every byte of the text. So bits per byte are
    exact and decode inverts encode. With byte fallback there are no unknown tokens. A line break is a token by itself,
    so no token spans lines. As in Llama, digits are split, and runs of spaces may be one token (which code needs). The
    ids are unk 0, bos 1, eos 2, without padding.

    Raises:
      ValueError: the text has too few different words for so many tokens, or too many characters for so few.
    """
    lines = (line for piece in pieces for line in piece.split("\n") if line)
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=lines,
            model_writer=model,
            model_type="bpe",
            vocab_size=vocab_size,
            byte_fallback=True,
            character_coverage=0.9999,  # rarer characters are written by their bytes
            normalization_rule_name="identity",
            add_dummy_prefix=False,
            remove_extra_whitespaces=False,
            allow_whitespace_only_pieces=True,
            split_digits=True,
            user_defined_symbols=["\n"],
            max_sentence_length=1 << 20,  # bytes; the trainer skips longer lines
            num_threads=1,  # it is stored in the model, which must have the same bytes on every machine
            unk_id=0,
            bos_id=1,
            eos_id=2,
            pad_id=-1,
            minloglevel=2,
        )
    except RuntimeError as error:
        raise ValueError(f"SentencePiece cannot train --vocab_size={vocab_size} on this text: {error}") from None
    return model.getvalue()
