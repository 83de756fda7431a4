"""The ops with several implementations, by key of ModelConfig, and the choice for a model."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax

from hlat_jax.config import ModelConfig, select
from hlat_jax.ops import attention, cross_entropy
from hlat_jax.ops.dialect import Op
from hlat_jax.ops.nki.chips import exclusions

OPS: dict[str, Op] = {
    "attention": attention.OP,
    "cross_entropy": cross_entropy.OP,
}


def select_implementations(model: ModelConfig, platform: str) -> ModelConfig:
    """Returns the model with every `auto` replaced by an implementation that can run any call on a platform.

    A name is kept even if it does not run on this machine, since a program may be lowered for another platform. For the
    calls of a run, `ops.choices` makes better choices.
    """
    automatic = [key for key in OPS if getattr(model, key) == "auto"]
    chosen: dict[str, Any] = {key: OPS[key].choose("auto", platform).name for key in automatic}
    chosen |= {key: select(key, getattr(model, key), platform) for key in ("remat", "layer_loop")}
    return dataclasses.replace(model, **chosen)


def refusal_here(model: ModelConfig) -> str:
    """Returns why an implementation that a model names does not run on the default backend, or "" if all do."""
    refused = exclusions(model, jax.devices()[0].device_kind)
    for key, op in OPS.items():
        try:
            op.choose(getattr(model, key), jax.default_backend(), excluded=refused.get(key))
        except ValueError as error:
            return str(error)
    return ""
