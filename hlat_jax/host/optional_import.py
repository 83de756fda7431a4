"""Imports libraries that only some commands need."""

from __future__ import annotations

import importlib
from typing import Any


def import_optional(module: str, *, missing: str) -> Any:
    """Returns a module of a library that a command needs.

    Raises:
      ValueError: the library is not installed, with the text `missing`, or cannot be imported, with its error.
    """
    library = module.partition(".")[0]
    try:
        return importlib.import_module(module)
    except Exception as error:  # such as one written for another version of NumPy
        if isinstance(error, ModuleNotFoundError) and error.name in (library, module):
            raise ValueError(missing) from None
        raise ValueError(f"{library} is installed and cannot be imported ({type(error).__name__}: {error}).") from error
