"""Files in the safetensors format: checked by the `safetensors` library, read and written here in parts of rows.

The library maps whole files and writes whole files only. Source: https://huggingface.co/docs/safetensors, "Format":
8 bytes with the length of a JSON header, the header, data.
"""

from __future__ import annotations

import dataclasses
import json
import math
import pathlib
from typing import Any

import jax.numpy as jnp
import numpy as np
import safetensors

from hlat_jax.store.array_reading import aligned_empty

DTYPES = {"F32": np.dtype(np.float32), "F16": np.dtype(np.float16), "BF16": np.dtype(jnp.bfloat16)}
_CODES = {dtype: code for code, dtype in DTYPES.items()}


def bits(values: np.ndarray) -> np.ndarray:
    """Returns the values as unsigned integers, which NumPy copies and compares fast, NaN and -0 included."""
    return values.view(np.dtype(f"u{values.dtype.itemsize}"))


@dataclasses.dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file, not read yet.

    Attributes:
      path: the file.
      name: the name in the file.
      code: the dtype in the format, such as BF16; not always one of DTYPES.
      shape: the shape, row-major.
      start: the place of its first byte in the file.
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
        """Returns the tensor, or consecutive rows of it, in memory of its own: see `aligned_empty`."""
        first, last, _ = rows.indices(self.shape[0]) if self.shape else (0, 1, 1)
        shape = (last - first, *self.shape[1:]) if self.shape else ()
        content = aligned_empty((math.prod(shape) * self.dtype.itemsize,), np.dtype(np.uint8))
        with open(self.path, "rb", buffering=0) as file:
            file.seek(self.start + first * math.prod(self.shape[1:]) * self.dtype.itemsize)
            view, done = memoryview(content), 0
            while done < content.size:
                count = file.readinto(view[done:])
                if not count:
                    raise ValueError(f"{self.path} ends within tensor {repr(self.name)[:100]}; fetch that file again.")
                done += count
        return content.view(self.dtype).reshape(shape)


def read_header(path: pathlib.Path) -> dict[str, StoredTensor]:
    """Returns the tensors of a file by name.

    Raises:
      ValueError: not a safetensors file, or a damaged one; the message names the file and the library's reason.
    """
    if not path.is_file():  # to open a FIFO would block
        raise ValueError(f"{path} is not a regular file.")
    try:
        with safetensors.safe_open(path, framework="np"):
            pass  # the header is checked: names, dtypes, shapes, and data without gaps up to the end of the file
    except safetensors.SafetensorError as error:
        reason = str(error).encode("unicode_escape").decode()[:200]
        raise ValueError(f"{path} is not a safetensors file, or is damaged: {reason}. Fetch that file again.") from None
    with open(path, "rb") as file:
        num_bytes = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(num_bytes))
    header.pop("__metadata__", None)
    return {
        name: StoredTensor(path, name, entry["dtype"], tuple(entry["shape"]), 8 + num_bytes + entry["data_offsets"][0])
        for name, entry in header.items()
    }


class Writer:
    """Writes a safetensors file whose tensors are all known beforehand, in any order, in parts of rows."""

    def __init__(self, path: pathlib.Path, *, tensors: dict[str, jnp.ndarray | Any], metadata: dict[str, str]):
        """Writes the header and allocates the file; `tensors` have shape and dtype, one of DTYPES."""
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
