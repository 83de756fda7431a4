"""Function transformations that make a training step smaller and faster; they take any function that JAX can trace.

    from hlat_jax import passes

These names stay stable. Importing the package imports no pass.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hlat_jax.passes.autocast_pass import CastPolicy as CastPolicy
    from hlat_jax.passes.compile import TrainingProgram as TrainingProgram
    from hlat_jax.passes.compile import training_program as training_program
    from hlat_jax.passes.facade import autocast as autocast
    from hlat_jax.passes.facade import chunk as chunk
    from hlat_jax.passes.facade import kernels as kernels
    from hlat_jax.passes.facade import memory_timeline as memory_timeline
    from hlat_jax.passes.facade import remat as remat
    from hlat_jax.passes.facade import select_residuals as select_residuals
    from hlat_jax.passes.remat_search import BudgetNotMet as BudgetNotMet
    from hlat_jax.passes.remat_search import RematOptions as RematOptions
    from hlat_jax.step import StepOptions as StepOptions

_MODULES = {
    **dict.fromkeys(
        ["autocast", "chunk", "kernels", "memory_timeline", "remat", "select_residuals"], "hlat_jax.passes.facade"
    ),
    **dict.fromkeys(["training_program", "TrainingProgram"], "hlat_jax.passes.compile"),
    **dict.fromkeys(["BudgetNotMet", "RematOptions"], "hlat_jax.passes.remat_search"),
    "CastPolicy": "hlat_jax.passes.autocast_pass",
    "StepOptions": "hlat_jax.step",
}
__all__ = list(_MODULES)


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return __all__
