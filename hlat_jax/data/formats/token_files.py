"""Token ids that other programs made, read in place by memory maps: Megatron-LM's .bin beside its .idx, and .npy.

The index of Megatron-LM: the magic, a version of 8 bytes, a code of the ids' dtype in 1, the numbers of sequences and
of document boundaries in 8 each; then int32 lengths and int64 offsets in bytes of the sequences, and int64 boundaries,
of which the first is 0. Little-endian. Source: NVIDIA/Megatron-LM, megatron/core/datasets/indexed_dataset.py.
"""

from __future__ import annotations

import pathlib
import struct

import numpy as np

from hlat_jax.data.formats.files import DataFile, NotFound, Snapshot

_MAGIC = b"MMIDIDX\x00\x00"
_DTYPES = {1: np.uint8, 2: np.int8, 3: np.int16, 4: np.int32, 5: np.int64, 8: np.uint16}
_REMEDY = "write it again"


class TokenDocuments:
    """The documents of a file of token ids by number: int32[n], as they are; nothing is added to them.

    Args:
      snapshots: of the file, and of its index if it has one.
      ids: all ids, one after another.
      bounds: int64[n + 1]; document i has the ids from bounds[i] to bounds[i + 1].
      vocab_size: ids must be below it; None: not checked.
    """

    def __init__(self, snapshots: tuple[Snapshot, ...], *, ids: np.ndarray, bounds: np.ndarray, vocab_size: int | None):
        self.snapshots, self._ids, self._bounds, self._vocab_size = snapshots, ids, bounds, vocab_size
        if len(self):
            self[0]  # ids of another tokenizer are found before anything is compiled

    def __len__(self) -> int:
        return len(self._bounds) - 1

    def __getitem__(self, index: int) -> np.ndarray:
        for snapshot in self.snapshots:
            snapshot.check()
        ids = np.asarray(self._ids[self._bounds[index] : self._bounds[index + 1]], np.int64)
        if self._vocab_size is not None and len(ids) and not 0 <= ids.min() <= ids.max() < self._vocab_size:
            wrong = ids.min() if ids.min() < 0 else ids.max()
            raise ValueError(
                f"{self.locate(index)} has the token id {wrong}, and data.tokenizer has {self._vocab_size} tokens; "
                "give the tokenizer that made these ids, and a model.vocab_size of at least its size."
            )
        return ids.astype(np.int32)

    def locate(self, index: int) -> str:
        """Returns the file and the number of a document, from 1."""
        return f"{self.snapshots[0].file}, document {index + 1}"


def npy_documents(snapshot: Snapshot, *, vocab_size: int | None, eos_id: int) -> TokenDocuments:
    """Returns the rows of a .npy of two axes; of one axis what ends with `eos_id`, and the rest."""
    file = snapshot.file
    try:
        ids = np.load(file.where, mmap_mode="r", allow_pickle=False)
    except (ValueError, EOFError) as error:
        raise ValueError(f"{file} is not a whole .npy file: {error}; {_REMEDY}.") from None
    if ids.ndim not in (1, 2) or ids.dtype.kind not in "iu":
        raise ValueError(f"{file} has {ids.ndim} axes of {ids.dtype}; token ids are integers in one axis or in rows.")
    if ids.ndim == 2:
        bounds = np.arange(len(ids) + 1, dtype=np.int64) * ids.shape[1]
    else:
        ends = np.flatnonzero(ids == eos_id) + 1
        bounds = np.unique(np.concatenate([[0], ends, [len(ids)]]))
    return TokenDocuments((snapshot,), ids=ids.reshape(-1), bounds=bounds, vocab_size=vocab_size)


def megatron_documents(snapshot: Snapshot, *, vocab_size: int | None) -> TokenDocuments:
    """Returns the documents of a .bin, whose .idx lies beside it."""
    path = pathlib.Path(snapshot.file).with_suffix(".idx")
    if not path.is_file():
        raise NotFound(f"{snapshot.file}: its index {path} is missing; a .bin alone does not say what its ids are.")
    index, raw = Snapshot(DataFile(path)), path.read_bytes()

    def damaged(what: str) -> ValueError:
        return ValueError(f"{path} is not an index of Megatron-LM: {what}; {_REMEDY}, with its .bin.")

    header = struct.Struct("<QBQQ")
    if raw[: len(_MAGIC)] != _MAGIC or len(raw) < len(_MAGIC) + header.size:
        raise damaged("it does not begin as one")
    version, code, num_sequences, num_bounds = header.unpack_from(raw, len(_MAGIC))
    if version != 1 or code not in _DTYPES:
        raise damaged(f"version {version} and dtype {code} are not 1 and one of {sorted(_DTYPES)}")
    place = len(_MAGIC) + header.size
    if len(raw) < place + 12 * num_sequences + 8 * num_bounds:
        raise damaged(f"{len(raw)} bytes are too few for {num_sequences} sequences and {num_bounds} boundaries")

    def read(dtype: str, count: int) -> np.ndarray:
        nonlocal place
        values = np.frombuffer(raw, dtype, count, place)
        place += values.nbytes
        return values.astype(np.int64)

    lengths, offsets, documents = read("<i4", num_sequences), read("<i8", num_sequences), read("<i8", num_bounds)
    starts, dtype = np.append(0, np.cumsum(lengths)), np.dtype(_DTYPES[code]).newbyteorder("<")
    if (offsets != starts[:-1] * dtype.itemsize).any() or starts[-1] * dtype.itemsize != snapshot.size:
        raise damaged(f"its {starts[-1]} ids of {dtype} are not the {snapshot.size} bytes of {snapshot.file}")
    if (np.diff(documents) < 0).any() or (len(documents) and not 0 <= documents[0] <= documents[-1] <= num_sequences):
        raise damaged("its boundaries of documents are not in order")
    ends = documents if len(documents) and documents[-1] == num_sequences else np.append(documents, num_sequences)
    bounds = starts[np.unique(np.append(0, ends))]
    ids = np.memmap(snapshot.file.where, dtype, "r") if snapshot.size else np.zeros(0, dtype)
    return TokenDocuments((snapshot, index), ids=ids, bounds=bounds, vocab_size=vocab_size)
