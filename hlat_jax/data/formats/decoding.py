"""Separates damaged files from failed reads in the errors of the libraries that decode files."""

from __future__ import annotations

import contextlib
import os
import zipfile
import zlib
from collections.abc import Iterator

import pyarrow

from hlat_jax.data.formats.files import DataFile, unreadable

# What NumPy raises for a damaged .npz.
NPZ_DAMAGE = (ValueError, LookupError, EOFError, NotImplementedError, zipfile.BadZipFile, zlib.error)
_ERRORS = (OSError, EOFError, RuntimeError, IndexError, UnicodeDecodeError, pyarrow.ArrowException)


@contextlib.contextmanager
def decode_errors(
    file: DataFile | os.PathLike,
    *,
    part: str = "",
    remedy: str = "Restore the file, or write it again",
    errors: tuple[type[Exception], ...] = (),
) -> Iterator[None]:
    """Converts errors of a library that decodes `part` of a file to Unreadable if a read failed, else to ValueError.

    `errors` are further types that mean damage.

    pyarrow raises a bare OSError for bytes that it cannot decode. For a failed read the OSError has a number or is of a
    subclass. Errors of Python's files pass unchanged. array_record raises a RuntimeError that names the system call.
    """
    try:
        yield
    except (*_ERRORS, *errors) as error:
        failed_read = isinstance(error, OSError) and (error.errno is not None or type(error) is not OSError)
        if failed_read or (isinstance(error, RuntimeError) and "() failed: " in str(error)):
            raise unreadable(file, error) from None
        raise ValueError(f"{file}{part and ', '}{part} cannot be decoded ({error}). {remedy}.") from None
