"""What our own Pallas kernels for GPUs can serve. Imports no kernel: it is asked on every platform."""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp

_DTYPES = ("bfloat16", "float16", "float32")
_MAX_WIDTH = 16_384  # a row and its gradients lie in the registers of one block of threads
_MAX_ELEMENTS = 2**31 - 1  # an index of 32 bits


def dtype_refusals(dtype: Any) -> list[str]:
    """Returns why a dtype cannot be served; nothing when it can."""
    name = jnp.dtype(dtype).name
    return [] if name in _DTYPES else [f"dtype {name} is not one of {', '.join(_DTYPES)}"]


def element_refusals(*, x_shape: tuple[int, ...], dtype: Any) -> list[str]:
    """Returns why an elementwise kernel cannot serve a call; see `ops.swiglu.call`."""
    count = math.prod(x_shape)
    above = [f"{count:,} elements on one device are above {_MAX_ELEMENTS:,}"] if count > _MAX_ELEMENTS else []
    return above + dtype_refusals(dtype)


def row_refusals(*, x_shape: tuple[int, ...], dtype: Any) -> list[str]:
    """Returns why a kernel that holds whole rows cannot serve a call; see `ops.norm.call`."""
    wide = [f"rows of {x_shape[-1]:,} are wider than {_MAX_WIDTH:,}"] if x_shape[-1] > _MAX_WIDTH else []
    return wide + element_refusals(x_shape=x_shape, dtype=dtype)
