"""Defines batch k, the tokens of each of its rows.

A run has S named sources (see mixture.parse_sources) and R = data.batch_size rows. Each source has R streams. In epoch
e, stream r of source s reads the documents order(s, e)[r], order(s, e)[r + R], ... Then it continues with epoch e + 1.
The permutation order(s, e) of all documents of s depends only on data.seed, the name of s and e. With
data.shuffle=False it is the identity. A stream skips bad records with data.on_bad_record="skip". It tokenizes each
document, cut every data.max_document_chars characters. It packs the tokens into rows of data.seq_len by data.packing,
under `documents` data.window_documents at a time (see packing). The mixture chooses a source from k and the tokens
emitted into row r before (see mixture). Row r of batch k is the next row of stream r of that source. So batch k is a
pure function of (manifests, tokenizer, these settings, k). It does not depend on which process computes which rows.

The position of row r is int64[1 + 6 S]. It has the number of batches so far. For each source it has the position of
stream r, the tokens emitted into this row, and the tokens owed. Resuming needs no more. A loader stacks its rows'.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import pathlib
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from hlat_jax.config import DataConfig, count_text
from hlat_jax.data import packing, sources
from hlat_jax.data.answers import AnswerTokens
from hlat_jax.data.formats.records import Answered, BadRecord
from hlat_jax.data.formats.streaming import MANY_BAD
from hlat_jax.data.mixture import UNNAMED, Mixture, first_stages_of, parse_sources, stages_of
from hlat_jax.data.order import Order, algorithm_hash
from hlat_jax.data.retries import Retries
from hlat_jax.data.tokenizer import Tokenizer
from hlat_jax.resolve import held_out_share

NUM_FIELDS = 6  # per source in a position: four of its stream, see packing, and the next two
EMITTED, OWED = slice(5, None, NUM_FIELDS), slice(6, None, NUM_FIELDS)
_SKIPPED = slice(4, None, NUM_FIELDS)
_MANY_EPOCHS = 20  # a stream misses the only good document for this many epochs with probability exp(-20)

# The settings that determine the batches, without data.mixture, of which only the stages so far count, and without the
# paths, which the manifests replace.
_DEFINING = ("batch_size", "seq_len", "packing", "max_document_chars", "shuffle", "seed")


@dataclasses.dataclass(frozen=True)
class Source:
    """The documents of one source.

    Attributes:
      name: the name in data.train, "all" without one.
      documents: the documents of text, or of token ids with EOS.
      order: the permutation of each epoch, or None without shuffling.
      notes: notes for the user about the documents, such as ignored files, or "".
    """

    name: str
    documents: sources.Corpus
    order: Order | None
    notes: str

    def number(self, epoch: int, entry: int) -> int:
        """Returns the number of the document at entry `entry` of an epoch."""
        return entry if self.order is None else self.order.number(epoch, entry)


def open_sources(
    data: DataConfig, *, key: str, encode: Encoder, index_folder: pathlib.Path | None = None
) -> list[Source]:
    """Opens the sources of `key`, which is `data.train` or `data.validation`.

    If data.validation is a share, it is held out of each source of data.train. Plain-text files of data.train are cut
    into documents at paragraphs if there are otherwise too few documents for the rows of a batch.
    """
    if not 0 <= data.seed < 2**32:
        raise ValueError(f"data.seed={data.seed} must be in 0 .. 2**32 - 1.")
    opened, share, is_train = [], held_out_share(data.validation), key == "data.train"
    from_key = "data.train" if share else key
    for name, paths in parse_sources(getattr(data, from_key.removeprefix("data.")), key=from_key).items():
        where = from_key if name == UNNAMED else f"{from_key} ({name})"
        corpus = open_documents(paths, data, key=where, tokenizer=encode.tokenizer, index_folder=index_folder)
        _check_first_records(corpus, encode, is_bad_skipped=data.on_bad_record == "skip")
        if encode.answers.template_sha256:
            corpus.manifest["chat_template"] = encode.answers.template_sha256
        _check_stored(corpus.manifest, data, key=where)
        notes = [f"cut at paragraphs into {count_text(len(corpus), 'document')}"] if corpus.is_cut else []
        if share:
            corpus = corpus.split(share=share, held_out=not is_train)
            notes.append(f"{count_text(corpus.num_held_out, 'document')} held out for validation")
        notes += [corpus.ignored] if corpus.ignored else []
        if is_train:
            _check_enough(corpus, data, key=where)
        order = None
        if data.shuffle and is_train:
            # sources of equal length need different orders; an unnamed source uses the seed itself
            offset = 0 if name == UNNAMED else zlib.crc32(name.encode())
            order = Order(len(corpus), seed=(data.seed + offset) % 2**32)
        opened.append(Source(name, corpus, order, ", ".join(notes)))
    return opened


def _check_first_records(corpus: sources.Corpus, encode: Encoder, *, is_bad_skipped: bool) -> None:
    """Tries the first record of each JSONL file, before anything is compiled; only these may hold conversations.

    Raises:
      ValueError: the chat template refuses it.
      BadRecord: the first thousand records of a file are bad, and bad ones are not skipped: row 1, and not the first
        that the shuffled order reads.
    """
    end = 0
    for entry in corpus.manifest["files"]:
        start, end = end, end + entry["documents"]
        first_bad: BadRecord | None = None
        for index in range(start, end)[:MANY_BAD] if entry["kind"] == "jsonl" else ():
            try:
                document = corpus[index]
                if isinstance(document, Answered):
                    encode.answers(document)
                first_bad = None
                break
            except BadRecord as error:
                first_bad = first_bad or error
            except OSError:
                pass  # which may pass: the run tries again
        if first_bad is not None and not is_bad_skipped:
            raise first_bad


def open_documents(
    spec: str, data: DataConfig, *, key: str, tokenizer: Tokenizer, index_folder: pathlib.Path | None = None
) -> sources.Corpus:
    """Returns sources.open_corpus of one source. `key` begins with the key of the config that names the source.

    Plain-text files of data.train are cut into documents at paragraphs if there would be too few documents.
    """
    options = {"tokenizer": tokenizer, "tokenizer_sha256": tokenizer.sha256, "index_folder": index_folder}
    documents = sources.open_corpus(spec, text_field=data.text_field, key=key, **options)
    share, total = held_out_share(data.validation), len(documents)
    num_left = total - (sources.num_held_out(total, share=share) if share else 0)
    if key.startswith("data.train") and documents.has_text and num_left < data.batch_size:
        documents = sources.open_corpus(spec, text_field=data.text_field, key=key, cut_text=True, **options)
    return documents


def _check_enough(corpus: sources.Corpus, data: DataConfig, *, key: str) -> None:
    """Raises ValueError if a source has fewer documents than rows in a batch, beside those held out."""
    num_left = len(corpus)
    if num_left >= data.batch_size:
        return
    held_out = f" and {corpus.num_held_out} to hold out ({data.validation=})" if corpus.num_held_out else ""
    fewer = f", or set data.batch_size to at most {num_left}" if num_left else ""
    files = " and ".join(entry["name"] for entry in corpus.manifest["files"][:3])
    raise ValueError(
        f"{key} ({files}) holds {count_text(num_left + corpus.num_held_out, 'document')}, fewer than "
        f"{data.batch_size=}{held_out}, and each row of a batch reads other documents. Give more text, with blank "
        f"lines or line ends between the paragraphs of plain text{fewer}."
    )


def _check_stored(manifest: dict[str, Any], data: DataConfig, *, key: str) -> None:
    """Raises ValueError if stored ids have pieces of another length than data.max_document_chars, or another BOS."""
    for entry in (entry for entry in manifest["files"] if entry["kind"] == "tokens"):
        built_with = {"prepend_bos": entry.get("prepend_bos", False), "max_document_chars": entry["max_document_chars"]}
        for name, value in built_with.items():
            if value not in (None, getattr(data, name)):
                raise ValueError(
                    f"{key}: the token ids in {entry['name']} were built with another --{name}. Set "
                    f"data.{name}={value} (it is {getattr(data, name)}), or build them again."
                )


def joint_manifest(opened: list[Source]) -> dict[str, Any]:
    """Returns one manifest for all sources with `files`, `sources` and a joint `hash`, or an unnamed source's own."""
    if [source.name for source in opened] == [UNNAMED]:
        return opened[0].documents.manifest
    fields = [[source.name, len(source.documents), source.documents.manifest["hash"]] for source in opened]
    manifests = [source.documents.manifest for source in opened]
    templates = [each["chat_template"] for each in manifests if "chat_template" in each]
    template = {"chat_template": templates[0]} if templates else {}  # all have that of data.tokenizer
    return {
        "files": [{"source": source.name} | entry for source in opened for entry in source.documents.manifest["files"]],
        "sources": fields,
        "documents": sum(len(source.documents) for source in opened),
        "hash": hashlib.blake2b(json.dumps(fields).encode(), digest_size=16).hexdigest(),
    } | template


def identity(data: Mapping[str, Any], *, manifest: Mapping[str, Any], tokenizer_sha256: str, num_batches: int) -> str:
    """Returns 32 hex digits that two runs share if and only if their batches are the same.

    After `num_batches` batches data.mixture may differ. `data` is a DataConfig as a dict, `manifest` a Definition's.
    """
    fields = [data[key] for key in _DEFINING] + [manifest["hash"], manifest["order"], tokenizer_sha256]
    fields += [data["window_documents"]] if data["packing"] == "documents" else []
    fields += ["bos"] if data["prepend_bos"] else []
    fields += [manifest["chat_template"]] if "chat_template" in manifest else []
    fields += [first_stages_of(data, num_batches=num_batches)]
    return hashlib.blake2b(json.dumps(fields).encode(), digest_size=16).hexdigest()


class Encoder:
    """Makes the tokens of documents, from text in pieces, from answers with a mask, or unchanged from stored ids.

    Attributes:
      tokenizer: the tokenizer of the texts.
      answers: the maker of the tokens of `records.Answered`, which identifies their chat template.
    """

    def __init__(self, data: DataConfig, tokenizer: Tokenizer):
        tokenizer.require_bos(data.prepend_bos, key="data.prepend_bos=True")
        options = {"tokenizer": tokenizer, "max_chars": data.max_document_chars, "bos": data.prepend_bos}
        self._pieces = functools.partial(packing.document_tokens, **options)
        self.tokenizer, self.answers = tokenizer, AnswerTokens(tokenizer, bos=data.prepend_bos)

    def __call__(self, document: str | np.ndarray) -> Iterator[packing.Tokens]:
        if isinstance(document, Answered):
            return iter([self.answers(document)])
        return map(packing.Tokens, [document] if isinstance(document, np.ndarray) else self._pieces(document))


class Definition:
    """The opened sources of training, and the tokens of every row of every batch.

    Attributes:
      manifest: the joint_manifest with `order`, the hash of the permutation algorithm, None without shuffling.
    """

    def __init__(
        self,
        data: DataConfig,
        *,
        tokenizer: Tokenizer,
        index_folder: pathlib.Path | None = None,
        retries: Retries | None = None,
    ):
        """Opens `data.train`; `index_folder` keeps the indices of JSONL files between runs, `retries` reads again."""
        # check data.mixture before reading any file
        names = list(parse_sources(data.train, key="data.train"))
        stages = stages_of(dataclasses.asdict(data), names)
        self.mixture = Mixture(names, stages=stages, num_rows=data.batch_size, row_tokens=data.seq_len)
        self._encode = Encoder(data, tokenizer)
        self.sources = open_sources(data, key="data.train", encode=self._encode, index_folder=index_folder)
        self._data, self._tokenizer, self._retries = data, tokenizer, retries or Retries()
        self.manifest = joint_manifest(self.sources) | {"order": algorithm_hash() if data.shuffle else None}

    def identity(self, num_batches: int) -> str:
        """Returns the identity of the data up to `num_batches`, see `identity`."""
        return identity(
            dataclasses.asdict(self._data),
            manifest=self.manifest,
            tokenizer_sha256=self._tokenizer.sha256,
            num_batches=num_batches,
        )

    def position(self, position: np.ndarray | None, *, num_rows: int) -> np.ndarray:
        """Returns int64[num_rows, 1 + 6 S], a copy of a position, by default the position before the first batch."""
        if position is not None:
            return np.array(position, np.int64)
        return np.zeros((num_rows, 1 + NUM_FIELDS * len(self.sources)), np.int64)

    def row(self, row: int, *, position: np.ndarray) -> RowStream:
        """Returns the stream of row `row` of every batch, from a position int64[1 + 6 S]."""
        numbers = range(len(self.sources))
        streams = [self._stream(row, source, position=position[_fields(source)]) for source in numbers]
        return RowStream(row, mixture=self.mixture, streams=streams, position=position)

    def document(self, source: int, *, row: int, epoch: int, entry: int) -> int:
        """Returns the number, within its source, of the document at entry `entry` of a stream in an epoch."""
        return self.sources[source].number(epoch, row + entry * self._data.batch_size)

    def _stream(self, row: int, source: int, *, position: np.ndarray) -> packing.Stream:
        data, documents = self._data, self.sources[source].documents
        num_own = len(range(row, len(documents), data.batch_size))  # in each epoch
        # with shuffling, a stream reads other documents in every epoch; without, the same ones
        most_bad = 2 * num_own if self.sources[source].order is None else _MANY_EPOCHS * len(documents)
        bad_in_a_row = 0

        def read(epoch: int, entry: int) -> str | np.ndarray | None:
            nonlocal bad_in_a_row
            document_index = self.document(source, row=row, epoch=epoch, entry=entry)
            try:
                document = self._retries(lambda: documents[document_index])
            except BadRecord:
                bad_in_a_row += 1
                if data.on_bad_record == "skip" and bad_in_a_row < most_bad:
                    return None
                raise  # all of them seem to be bad
            bad_in_a_row = 0
            return document

        options = {"num_documents": num_own, "position": position, "encode": self._encode}
        return packing_stream(data, self._tokenizer, read, **options)


def packing_stream(data: DataConfig, tokenizer: Tokenizer, read: packing.Read, **options: Any) -> packing.Stream:
    """Returns the stream of `data.packing`. Padding is EOS, which every vocabulary has."""
    if data.packing == "concat":
        return packing.ConcatStream(read, seq_len=data.seq_len, **options)
    windows = {"window_documents": data.window_documents, "pad_id": tokenizer.eos_id}
    return packing.DocumentsStream(read, seq_len=data.seq_len, **windows, **options)


class RowStream:
    """One row of every batch, each taken from the stream of the source that the mixture chooses.

    Attributes:
      position: int64[1 + 6 S], before the next row.
    """

    def __init__(self, row: int, *, mixture: Mixture, streams: Sequence[packing.Stream], position: np.ndarray):
        self._row, self._mixture, self._streams = row, mixture, streams
        self.position = np.array(position, np.int64)

    def next_row(self) -> tuple[int, packing.Row]:
        """Returns (number of its source, the next row). Raises as the streams do, without moving the position."""
        position = self.position.copy()  # callers hold earlier positions
        account = {"batch": int(position[0]), "emitted": position[EMITTED].tolist(), "owed": position[OWED].tolist()}
        source = self._mixture.choose(self._row, **account)
        row = self._streams[source].next_row()
        num_tokens = sum(span.stop - span.start for span in row.spans)
        position[EMITTED], position[OWED] = self._mixture.account_after(self._row, **account, num_tokens=num_tokens)
        position[0] += 1
        position[_fields(source)] = self._streams[source].position
        self.position = position
        return source, row


def _fields(source: int) -> slice:
    """Returns the slice of a row's position with the position of a source's stream."""
    return slice(1 + NUM_FIELDS * source, 5 + NUM_FIELDS * source)


def skipped_records(position: np.ndarray) -> int:
    """Returns the number of bad records skipped before a position [..., 1 + 6 S], over all its rows and sources."""
    return int(position[..., _SKIPPED].sum())
