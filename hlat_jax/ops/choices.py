"""Chooses the implementation of each op in a run, from the specs of its calls on one device."""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Mapping
from typing import Any

from jax.sharding import AbstractMesh

from hlat_jax.config import Config, ModelConfig, select
from hlat_jax.ops import attention, cross_entropy
from hlat_jax.ops.dialect import Choice
from hlat_jax.ops.nki.chips import exclusions, preferences
from hlat_jax.ops.registry import OPS
from hlat_jax.parallel.rows import num_microbatches, replica_rows
from hlat_jax.parallel.sharding import Layout
from hlat_jax.parallel.virtual_devices import PlannedDevice
from hlat_jax.precision import POLICIES

_KERNELS = ("cudnn", "triton", "nki")  # of attention


def calls(config: Config, layout: Layout) -> dict[str, dict[str, Any]]:
    """Returns key of ModelConfig -> CallSpec of the op in one microbatch of training, on one device."""
    model, degrees = config.model, layout.degrees
    rows = replica_rows(config.data.batch_size, layout) // num_microbatches(config, layout)
    seq_len = config.data.seq_len // degrees["context"]
    dtype = POLICIES[config.precision.policy].compute
    q_shape = rows, seq_len, model.num_heads // degrees["tensor"], model.head_dim
    return {
        "attention": attention.describe_call(
            q_shape,
            max(1, model.num_kv_heads // degrees["tensor"]),
            dtype=dtype,
            has_segments=config.data.packing == "documents",
            window=attention.common_window(model.windows(config.data.seq_len), config.data.seq_len),
        ),
        "cross_entropy": cross_entropy.describe_call(
            (rows, seq_len, model.embed_dim),
            layout.vocab_rows(model.vocab_size) // (degrees["pipe"] * degrees["tensor"]),
            dtype=dtype,
        ),
    }


def choices(config: Config, layout: Layout, *, platform: str | None = None) -> dict[str, Choice]:
    """Returns key of ModelConfig -> the implementation that the run uses, with the reasons.

    Args:
      config: config of the run.
      layout: layout of its degrees, over devices or abstract.
      platform: platform of the devices, by default the platform of the layout.

    Raises:
      ValueError: an implementation that cannot run the run's calls or is excluded on these devices.
    """
    device = None if platform is not None or isinstance(layout.mesh, AbstractMesh) else layout.mesh.devices.flat[0]
    kind = ""
    if device is not None:  # "" too of a virtual device of no known chip, see `chips.chip_of`
        kind = device.chip if isinstance(device, PlannedDevice) else device.device_kind
    known, refused = calls(config, layout), exclusions(config.model, kind)
    preferred = preferences(known["attention"]["q_shape"][1], kind)
    is_real = device is not None and not isinstance(device, PlannedDevice)
    if is_real and device.platform == "neuron" and importlib.util.find_spec("nkilib") is None:
        refused["attention"] = {"nki": "nkilib is not installed"} | refused.get("attention", {})
    if config.precision.simulate != "none":
        reason = "precision.simulate reads every operation, and cannot read the operations of a kernel"
        refused["attention"] = dict.fromkeys(_KERNELS, reason) | refused.get("attention", {})
    if (parts := layout.degrees["context"]) > 1:
        reason = f"it needs the whole sequence, and parallel.context={parts} splits it"
        refused["attention"] = {name: reason for name in OPS["attention"].names if name != "chunked"}
    return {
        key: op.choose(
            getattr(config.model, key),
            platform or layout.platform,
            call=known[key],
            excluded=refused.get(key),
            preferred=preferred.get(key),
        )
        for key, op in OPS.items()
    }


def chosen_model(config: Config, layout: Layout, *, platform: str | None = None) -> ModelConfig:
    """Returns the model of a config with every `auto` replaced by its choice. Arguments are as for `choices`."""
    chosen = choices(config, layout, platform=platform)
    return with_choices(config.model, chosen, platform=platform or layout.platform)


def with_choices(model: ModelConfig, chosen: Mapping[str, Choice], *, platform: str) -> ModelConfig:
    """Returns the model with every `auto` replaced by its entry of `choices`."""
    names = {key: choice.name for key, choice in chosen.items()}
    names |= {key: select(key, getattr(model, key), platform) for key in ("remat", "layer_loop")}
    return dataclasses.replace(model, **names)
