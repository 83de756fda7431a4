"""Reads token ids that other programs made in place, Megatron-LM's .bin with its .idx, and .npy.

The index of Megatron-LM is little-endian. It begins with the magic, a version of 8 bytes and a code of the ids' dtype
in 1. The numbers of sequences and of document boundaries follow in 8 each. The rest is int32 lengths and int64 offsets
in bytes of the sequences, and int64 boundaries, beginning with 0.
Source: NVIDIA/Megatron-LM, megatron/core/datasets/indexed_dataset.py.
"""

from __future__ import annotations

import pathlib
import struct
from typing import Protocol

import numpy as np

from hlat_jax.data.formats.files import DataFile, NotFound, Snapshot
from hlat_jax.data.formats.records import Documents

_MAGIC = b"MMIDIDX\x00\x00"
_DTYPES = {1: np.uint8, 2: np.int8, 3: np.int16, 4: np.int32, 5: np.int64, 8: np.uint16}
_REMEDY = "Write it again"
_BLOCK_BYTES, _NUM_BLOCKS = 1 << 24, 16


class Vocabulary(Protocol):
    """The part of `data.tokenizer.Tokenizer` that this module needs."""

    vocab_size: int
    model_vocab_size: int | None
    eos_id: int

    @property
    def token_bytes(self) -> np.ndarray: ...


class _Ids:
    """The token ids of a file. They are read, not mapped: a map of a file that is cut or away ends the process.

    Ids are compared with the tokenizer when the file is opened (all up to 256 MiB, else 16 evenly spaced blocks of 16
    MiB), and in each document that is read.
    """

    def __init__(self, snapshot: Snapshot, *, dtype: np.dtype, offset: int, total: int, tokenizer: Vocabulary):
        """`offset` is the first byte of the ids, `total` their number."""
        self._snapshot, self._dtype, self._offset, self._tokenizer = snapshot, dtype, offset, tokenizer
        step = _BLOCK_BYTES // dtype.itemsize
        self._blocks = [(start, min(start + step, total)) for start in range(0, total, step)]
        chosen = np.linspace(0, len(self._blocks) - 1, min(len(self._blocks), _NUM_BLOCKS), dtype=np.int64)
        for block in chosen.tolist():
            self._check(self._read(*self._blocks[block]), where=str(snapshot.file))

    def find(self, token: int) -> np.ndarray:
        """Returns the places of a token among all ids, in order. Memory holds a block of ids."""
        places = (start + np.flatnonzero(self._read(start, stop) == token) for start, stop in self._blocks)
        return np.concatenate([np.zeros(0, np.int64), *places])

    def documents(self, bounds: np.ndarray, *, snapshots: tuple[Snapshot, ...] = ()) -> Documents:
        """Returns the documents unchanged. Document i has the ids from bounds[i] to bounds[i + 1].

        Args:
          bounds: int64[n + 1]. Documents without ids are left out, and not counted.
          snapshots: the snapshots of further files.
        """
        if not (np.diff(bounds) > 0).all():
            bounds = np.unique(bounds)

        def locate(index: int) -> str:
            return f"{self._snapshot.file}, document {index + 1}"

        def read(index: int) -> np.ndarray:
            ids = self._read(int(bounds[index]), int(bounds[index + 1]))
            self._check(ids, where=locate(index))
            return ids.astype(np.int32)

        return Documents(
            snapshots=(self._snapshot, *snapshots),
            num_documents=len(bounds) - 1,
            read=read,
            locate=locate,
            text_bytes=lambda index: int(self._tokenizer.token_bytes[read(index)].sum()),
        )

    def _check(self, ids: np.ndarray, *, where: str) -> None:
        tokenizer, least, most = self._tokenizer, int(ids.min()), int(ids.max())
        if least < 0 or most >= tokenizer.vocab_size:
            model = "" if tokenizer.model_vocab_size is None else f" (model.vocab_size={tokenizer.model_vocab_size})"
            raise ValueError(
                f"{where} has the token id {least if least < 0 else most}, and data.tokenizer has "
                f"{tokenizer.vocab_size} tokens{model}. Give the tokenizer that made these ids, and a model.vocab_size "
                "of at least its size."
            )

    def _read(self, start: int, stop: int) -> np.ndarray:
        width = self._dtype.itemsize
        return np.frombuffer(self._snapshot.read(self._offset + start * width, (stop - start) * width), self._dtype)


def npy_documents(snapshot: Snapshot, *, tokenizer: Vocabulary) -> Documents:
    """Returns the rows of a .npy of two axes, or the parts up to each EOS of one axis, for which it reads all ids."""
    file = snapshot.file
    try:
        ids = np.lib.format.open_memmap(file.where, mode="r")  # np.load would open a .npz under this name too
    except (ValueError, EOFError) as error:
        raise ValueError(f"{file} is not a whole .npy file ({error}). {_REMEDY} with numpy.save.") from None
    if ids.ndim not in (1, 2) or ids.dtype.kind not in "iu":
        raise ValueError(f"{file} has {ids.ndim} axes of {ids.dtype}. Token ids are integers in one axis or in rows.")
    if not ids.flags.c_contiguous:
        raise ValueError(f"{file} is in Fortran order. Save numpy.ascontiguousarray of it.")
    stored = _Ids(snapshot, dtype=ids.dtype, offset=ids.offset, total=ids.size, tokenizer=tokenizer)
    if ids.ndim == 2:
        return stored.documents(np.arange(len(ids) + 1, dtype=np.int64) * ids.shape[1])
    ends = stored.find(tokenizer.eos_id)
    if not len(ends):
        raise ValueError(
            f"{file} has one axis and nowhere the id {tokenizer.eos_id}, EOS of data.tokenizer, to end documents. "
            "Give the tokenizer that made these ids, or save each document as a row."
        )
    return stored.documents(np.concatenate([[0], ends + 1, [len(ids)]]))


def megatron_documents(snapshot: Snapshot, *, tokenizer: Vocabulary) -> Documents:
    """Returns the documents of a .bin with its .idx in the same folder."""
    path = pathlib.Path(snapshot.file).with_suffix(".idx")
    if not path.is_file():
        raise NotFound(f"{snapshot.file}: its index {path} is missing. A .bin needs its .idx.")
    index, raw = Snapshot(DataFile(path)), path.read_bytes()

    def damaged(problem: str) -> ValueError:
        return ValueError(f"{path} is not an index of Megatron-LM: {problem}. {_REMEDY}, with its .bin.")

    header = struct.Struct("<QBQQ")
    if raw[: len(_MAGIC)] != _MAGIC or len(raw) < len(_MAGIC) + header.size:
        raise damaged("it does not begin as one")
    version, code, num_sequences, num_bounds = header.unpack_from(raw, len(_MAGIC))
    if version != 1 or code not in _DTYPES:
        raise damaged(f"version {version} and dtype {code} are not 1 and one of {sorted(_DTYPES)}")
    offset = len(_MAGIC) + header.size
    if len(raw) < offset + 12 * num_sequences + 8 * num_bounds:
        raise damaged(f"{len(raw)} bytes are too few for {num_sequences} sequences and {num_bounds} boundaries")

    def read(dtype: str, count: int) -> np.ndarray:
        nonlocal offset
        values = np.frombuffer(raw, dtype, count, offset)
        offset += values.nbytes
        return values.astype(np.int64)

    lengths, offsets, documents = read("<i4", num_sequences), read("<i8", num_sequences), read("<i8", num_bounds)
    starts, dtype = np.append(0, np.cumsum(lengths)), np.dtype(_DTYPES[code]).newbyteorder("<")
    if (offsets != starts[:-1] * dtype.itemsize).any() or starts[-1] * dtype.itemsize != snapshot.size:
        raise damaged(f"its {starts[-1]} ids of {dtype} are not the {snapshot.size} bytes of {snapshot.file}")
    if (np.diff(documents) < 0).any() or (len(documents) and not 0 <= documents[0] <= documents[-1] <= num_sequences):
        raise damaged("its boundaries of documents are not in order")
    ends = documents if len(documents) and documents[-1] == num_sequences else np.append(documents, num_sequences)
    stored = _Ids(snapshot, dtype=dtype, offset=0, total=int(starts[-1]), tokenizer=tokenizer)
    return stored.documents(starts[np.append(0, ends)], snapshots=(index,))
