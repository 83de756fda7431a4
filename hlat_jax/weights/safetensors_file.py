"""Reads safetensors files with the `safetensors` library, and writes them one tensor at a time.

The library only writes whole files. A file has 8 bytes with the length of a JSON header, the header, and data.
Source: https://huggingface.co/docs/safetensors, "Format".
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
      code: the dtype in the format, such as BF16, which may not be in DTYPES.
      shape: the shape, row-major.
    """

    path: pathlib.Path
    name: str
    code: str
    shape: tuple[int, ...]

    @property
    def dtype(self) -> np.dtype:
        return DTYPES[self.code]

    def read(self) -> np.ndarray:
        with safetensors.safe_open(self.path, framework="np") as file:
            return file.get_tensor(self.name)


def read_header(path: pathlib.Path) -> dict[str, StoredTensor]:
    """Returns the tensors of a file by name.

    Raises:
      ValueError: not a safetensors file, or a damaged one. The message has the file and the library's reason.
    """
    try:
        with safetensors.safe_open(path, framework="np") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 - no mapping
            return {name: StoredTensor(path, name, s.get_dtype(), tuple(s.get_shape())) for name, s in slices.items()}
    except safetensors.SafetensorError as error:
        reason = str(error).encode("unicode_escape").decode()[:200]
        raise ValueError(f"{path} is not a safetensors file, or is damaged: {reason}. Fetch that file again.") from None


class Writer:
    """Writes a safetensors file with tensors that are all known beforehand, in any order."""

    def __init__(self, path: pathlib.Path, *, tensors: dict[str, jnp.ndarray | Any], metadata: dict[str, str]):
        """Writes the header and allocates the file. `tensors` have shape and dtype, one of DTYPES."""
        header: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
        self._tensors, self._starts, end = dict(tensors), {}, 0
        for name, tensor in self._tensors.items():
            start, end = end, end + math.prod(tensor.shape) * np.dtype(tensor.dtype).itemsize
            code = _CODES[np.dtype(tensor.dtype)]
            header[name] = {"dtype": code, "shape": list(tensor.shape), "data_offsets": [start, end]}
            self._starts[name] = start
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)  # data begins at a multiple of 8
        self._file = open(path, "wb")  # noqa: SIM115 - see close
        self._data = 8 + len(text)
        self._file.write(len(text).to_bytes(8, "little") + text)
        self._file.truncate(self._data + end)

    def write(self, name: str, values: np.ndarray) -> None:
        """Writes a tensor."""
        tensor = self._tensors[name]
        assert (values.dtype, values.shape) == (tensor.dtype, tensor.shape), name
        self._file.seek(self._data + self._starts[name])
        self._file.write(np.ascontiguousarray(bits(values)).reshape(-1).view(np.uint8))

    def close(self) -> None:
        self._file.close()
