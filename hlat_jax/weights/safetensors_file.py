"""Files in the safetensors format, read and written in parts.

The library of that name maps whole files and writes whole trees; here a part of a tensor goes between a file and an
array of its size, so that what a conversion holds is known. Owns the format. Refuses to know what tensors mean.

Source: https://huggingface.co/docs/safetensors, "Format": 8 bytes with the length of a JSON header, the header, data.
"""

from __future__ import annotations

import dataclasses
import json
import math
import pathlib
from typing import Any

import jax.numpy as jnp
import numpy as np

from hlat_jax.store import atomic_files

DTYPES = {"F32": np.dtype(np.float32), "F16": np.dtype(np.float16), "BF16": np.dtype(jnp.bfloat16)}
_CODES = {dtype: code for code, dtype in DTYPES.items()}
# Every dtype of the format; those that are not in DTYPES are recognized and not read.
_BITS = {"BOOL": 8, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8}
_BITS |= {"F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8}
_BITS |= {"I16": 16, "U16": 16, "F16": 16, "BF16": 16, "I32": 32, "U32": 32, "F32": 32, "C64": 64, "F64": 64}
_BITS |= {"I64": 64, "U64": 64}
_MOST_DIMS = 64  # of a NumPy array; bounds the size of a product
_LONGEST_HEADER_BYTES = 100_000_000  # the library's own limit


def bits(values: np.ndarray) -> np.ndarray:
    """Returns the values as integers, whose copies and comparisons NumPy does at once, NaN and -0 included."""
    return values.view(np.dtype(f"u{values.dtype.itemsize}"))


@dataclasses.dataclass(frozen=True)
class Stored:
    """Where one tensor lies in its file.

    Attributes:
      code: of its dtype, such as BF16; not always one of DTYPES.
      shape: of the tensor, row-major.
      start: its first byte in the file.
    """

    path: pathlib.Path
    name: str
    code: str
    shape: tuple[int, ...]
    start: int

    @property
    def dtype(self) -> np.dtype:
        return DTYPES[self.code]

    def read(self, *, rows: slice = slice(None)) -> np.ndarray:
        """Returns the tensor, or consecutive rows of it, in memory of its own."""
        first, last, _ = rows.indices(self.shape[0]) if self.shape else (0, 1, 1)
        shape = (last - first, *self.shape[1:]) if self.shape else ()
        row_bytes = math.prod(self.shape[1:]) * self.dtype.itemsize
        found = np.empty(math.prod(shape) * self.dtype.itemsize, np.uint8)
        with open(self.path, "rb", buffering=0) as file:
            file.seek(self.start + first * row_bytes)
            view, done = memoryview(found), 0
            while done < found.size:
                count = file.readinto(view[done:])
                if not count:
                    raise ValueError(f"{self.path} ends within tensor {repr(self.name)[:100]}; fetch that file again.")
                done += count
        return found.view(self.dtype).reshape(shape)


def read_header(path: pathlib.Path) -> dict[str, Stored]:
    """Returns the tensors of a file by name.

    Raises:
      ValueError: not a safetensors file, one that is cut off, or a header whose tensors do not lie one behind another
        from the first byte of the data to the last; the message names file, tensor and field.
    """
    if not path.is_file():
        raise ValueError(f"{path} is not a regular file.")
    num_bytes = path.stat().st_size
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if not 2 <= length <= min(num_bytes - 8, _LONGEST_HEADER_BYTES):
            raise ValueError(f"{path} is not a safetensors file, or is cut off in its header ({num_bytes:,} bytes).")
        text = file.read(length)
    if not text.startswith(b"{"):
        raise ValueError(f"{path} has no safetensors header.")
    header = atomic_files.parse_json(text, where=f"{path}: the safetensors header")
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise ValueError(f"{path}: __metadata__ must be an object of strings.")
    where = {name: f"{path}: tensor {repr(name)[:100]}" for name in header}
    places = sorted((_place(entry, where=where[name]), name) for name, entry in header.items())
    end = 0
    for (first, last), name in places:
        if first != end:
            fault = "overlap the tensor before it" if first < end else f"leave a gap of {first - end:,} bytes"
            raise ValueError(f"{where[name]}: data_offsets={[first, last]} {fault}; fetch that file again.")
        end = last
    if 8 + length + end != num_bytes:
        raise ValueError(f"{path} has {num_bytes:,} bytes instead of {8 + length + end:,}; fetch that file again.")
    return {
        name: Stored(path, name, entry["dtype"], tuple(entry["shape"]), 8 + length + entry["data_offsets"][0])
        for name, entry in header.items()
    }


def _place(entry: Any, *, where: str) -> tuple[int, int]:
    """Returns the first byte of a tensor in the data and the one after its last, by its entry in the header.

    Raises:
      ValueError: no such entry, or one whose dtype and shape need another number of bytes; the message has the field.
    """
    if not isinstance(entry, dict):
        raise ValueError(f"{where} is {repr(entry)[:100]}; it must be an object.")
    code, shape, offsets = (entry.get(key) for key in ("dtype", "shape", "data_offsets"))
    if not isinstance(code, str) or code not in _BITS:
        raise ValueError(f"{where}: dtype={repr(code)[:100]} is not one of {', '.join(_BITS)}.")
    if not _are_counts(shape):
        raise ValueError(f"{where}: shape={repr(shape)[:100]} must be at most {_MOST_DIMS} integers of 0 to 2**63 - 1.")
    if not _are_counts(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise ValueError(f"{where}: data_offsets={repr(offsets)[:100]} must be [begin, end], 0 <= begin <= end.")
    first, last = offsets
    num_bits = math.prod(shape) * _BITS[code]
    if (last - first) * 8 != num_bits:
        takes = f"{code}{repr(shape)[:100]} takes {f'{num_bits // 8:,}'[:100]}"
        raise ValueError(f"{where}: data_offsets={offsets} hold {last - first:,} bytes, and {takes}.")
    return first, last


def _are_counts(values: Any) -> bool:
    is_short = isinstance(values, list) and len(values) <= _MOST_DIMS
    return is_short and all(type(value) is int and 0 <= value < 1 << 63 for value in values)


class Writer:
    """A new safetensors file whose tensors are all known beforehand, and written in any order, in parts of rows."""

    def __init__(self, path: pathlib.Path, *, tensors: dict[str, jnp.ndarray | Any], metadata: dict[str, str]):
        """Lays the file out; `tensors` have shape and dtype, of DTYPES."""
        header: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
        self._tensors, self._starts, end = dict(tensors), {}, 0
        for name, tensor in self._tensors.items():
            start, end = end, end + math.prod(tensor.shape) * np.dtype(tensor.dtype).itemsize
            code = _CODES[np.dtype(tensor.dtype)]
            header[name] = {"dtype": code, "shape": list(tensor.shape), "data_offsets": [start, end]}
            self._starts[name] = start
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)  # data begins at a multiple of 8
        self._file = open(path, "wb", buffering=0)  # noqa: SIM115 - see close
        self._data = 8 + len(text)
        self._write(0, len(text).to_bytes(8, "little") + text)
        self._file.truncate(self._data + end)

    def write(self, name: str, values: np.ndarray, *, first_row: int = 0) -> None:
        """Writes consecutive rows of a tensor, the whole of it by default."""
        tensor = self._tensors[name]
        assert values.dtype == tensor.dtype, name
        assert values.shape[1:] == tensor.shape[1:], name
        row_bytes = math.prod(tensor.shape[1:]) * values.dtype.itemsize
        whole = np.ascontiguousarray(bits(values)).reshape(-1).view(np.uint8)
        self._write(self._data + self._starts[name] + first_row * row_bytes, whole)

    def close(self) -> None:
        self._file.close()

    def _write(self, offset: int, content: bytes | np.ndarray) -> None:
        self._file.seek(offset)
        view = memoryview(content)
        while len(view):
            view = view[self._file.write(view) :]
