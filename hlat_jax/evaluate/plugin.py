"""Tells the LM Evaluation Harness of our model type, its own command `lm_eval` included.

The harness (0.4.13) looks model types up in a table of its own and asks no other package for more, by entry points or
otherwise. So the wheel brings a file `hlat_jax_lm_eval.pth`, by which Python calls `install` as it starts, where a word
of the command line has `lm_eval` in it; every other program passes it by. Imports nothing but the standard library: at
that time no other package need be there.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import sys
from typing import Any

_TABLE = "lm_eval.models"


def register() -> None:
    """Adds our model type to the harness's, by name: it is imported when it is asked for."""
    import lm_eval.models  # noqa: F401  the other types, which it adds only to an empty registry
    from lm_eval.api.registry import model_registry

    if "hlat_jax" not in model_registry:
        model_registry.register("hlat_jax", target="hlat_jax.evaluate.model_type:ModelType")


def install() -> None:
    """Has `register` called once the harness's own types are there, if ever they are imported."""
    sys.meta_path.insert(0, _Finder())


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, fullname: str, path: Any, target: Any = None) -> Any:
        if fullname != _TABLE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None:
            execute = spec.loader.exec_module

            def then_register(module: Any) -> None:
                execute(module)
                register()

            spec.loader.exec_module = then_register
        return spec
