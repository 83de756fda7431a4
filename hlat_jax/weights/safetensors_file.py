"""Files in the safetensors format: the `safetensors` library reads them; they are written here, in parts of rows.

The library writes whole files only. Source: https://huggingface.co/docs/safetensors, "Format": 8 bytes with the length
of a JSON header, the header, data.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import pathlib
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np
import safetensors

from hlat_jax.store.array_reading import aligned_empty

DTYPES = {"F32": np.dtype(np.float32), "F16": np.dtype(np.float16), "BF16": np.dtype(jnp.bfloat16)}
_CODES = {dtype: code for code, dtype in DTYPES.items()}
_READ_BYTES = 1 << 26


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
    """

    path: pathlib.Path
    name: str
    code: str
    shape: tuple[int, ...]

    @property
    def dtype(self) -> np.dtype:
        return DTYPES[self.code]

    def read(self, *, rows: slice = slice(None)) -> np.ndarray:
        """Returns the tensor, or consecutive rows of it, in memory of its own: see `aligned_empty`."""
        if not self.shape:
            with _open(self.path) as file:
                return file.get_tensor(self.name)
        first, last, _ = rows.indices(self.shape[0])
        values = aligned_empty((last - first, *self.shape[1:]), self.dtype)
        step = max(1, _READ_BYTES * self.shape[0] // max(1, math.prod(self.shape) * self.dtype.itemsize))
        for start in range(first, last, step):
            stop = min(start + step, last)
            # The library maps the file. It is opened for each part, so that no more than a part stays in memory twice.
            with _open(self.path) as file:
                bits(values[start - first : stop - first])[...] = bits(file.get_slice(self.name)[start:stop])
        return values


def read_header(path: pathlib.Path) -> dict[str, StoredTensor]:
    """Returns the tensors of a file by name.

    Raises:
      ValueError: not a safetensors file, or a damaged one; the message names the file and the library's reason.
    """
    with _open(path) as file:
        slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 - it is no dict
        return {
            name: StoredTensor(path, name, part.get_dtype(), tuple(part.get_shape())) for name, part in slices.items()
        }


@contextlib.contextmanager
def _open(path: pathlib.Path) -> Iterator[Any]:
    """Yields the library's view of a file; its header is checked: names, dtypes, shapes, and data without gaps."""
    if not path.is_file():  # to open a FIFO would block
        raise ValueError(f"{path} is not a regular file.")
    try:
        with safetensors.safe_open(path, framework="np") as file:
            yield file
    except safetensors.SafetensorError as error:
        reason = str(error).encode("unicode_escape").decode()[:200]
        raise ValueError(f"{path} is not a safetensors file, or is damaged: {reason}. Fetch that file again.") from None


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
