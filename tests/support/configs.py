"""The one builder of test configs: the defaults, a size of model, and changes of keys."""

from __future__ import annotations

from typing import Any

import ml_collections

from hlat_jax.config import SECTIONS, Config, default
from hlat_jax.resolve import resolve

_WIDTHS = {"vocab_size": 64, "embed_dim": 32, "mlp_dim": 48, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8}
_PLANNED = {"vocab_size": 2048, "num_layers": 8, "embed_dim": 256, "mlp_dim": 704, "num_heads": 8, "num_kv_heads": 4}
_PLANNED |= {"head_dim": 32, "max_positions": 512, "batch_size": 8, "seq_len": 512}
_PLANNED |= {"fuse_qkv": False, "attention": "einsum", "cross_entropy": "dense"}
# Of GQA models that compile in a second: `small` with the batch and rates of a run; `planned` is so large that its
# temporaries are arrays, not rounding; `few` is `planned` for what has to be run.
SIZES: dict[str, dict[str, Any]] = {
    "default": {},
    "widths": _WIDTHS,
    "small": _WIDTHS
    | {"num_layers": 3, "max_positions": 16, "batch_size": 8, "seq_len": 16}
    | {"peak_lr": 1e-2, "warmup_steps": 1, "horizon_steps": 100},
    "planned": _PLANNED,
    "few": _PLANNED | {"vocab_size": 64, "num_layers": 4, "embed_dim": 32, "mlp_dim": 64, "head_dim": 8, "seq_len": 16},
}


def mutable(size: str = "default", **changes: Any) -> ml_collections.ConfigDict:
    """Returns a mutable config; a change is KEY=VALUE, or SECTION__KEY=VALUE for a key that several sections have."""
    c = default()
    for name, value in (SIZES[size] | changes).items():
        section, _, key = name.rpartition("__")
        [owner] = [section] if section else [each for each in SECTIONS if key in c[each]]
        c[owner][key] = value
    return c


def resolved(size: str = "default", **changes: Any) -> Config:
    """Returns the checked config of `mutable`."""
    return resolve(mutable(size, **changes))
