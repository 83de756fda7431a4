"""Which implementation of each op a run takes: the calls that its config makes on one device, and the choice for them.

Owns what is known of those calls before anything is traced. Refuses to rank implementations; that is `ops.dialect`.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from jax.sharding import AbstractMesh

from hlat_jax import stack
from hlat_jax.config import Config, ModelConfig
from hlat_jax.ops import attention, cross_entropy, norm, rope, swiglu, table
from hlat_jax.ops.dialect import Choice
from hlat_jax.ops.registry import OPS
from hlat_jax.parallel.sharding import Layout
from hlat_jax.precision import POLICIES


def calls(config: Config, layout: Layout) -> dict[str, dict[str, Any]]:
    """Returns key of ModelConfig -> what is known of the op's call in one microbatch of training, on one device.

    RMSNorm's is that of a layer, and of the head as well; RoPE's that of the queries, where keys have no more heads.
    """
    model, degrees = config.model, layout.degrees
    rows, seq_len = config.data.batch_size // (layout.row_degree * config.train.num_microbatches), config.data.seq_len
    places_between = seq_len // degrees["tensor"] if layout.sequence_parallel else seq_len
    dtype = POLICIES[config.precision.policy].compute
    q_shape = rows, seq_len, model.num_heads // degrees["tensor"], model.head_dim
    return {
        "attention": attention.describe_call(
            q_shape,
            max(1, model.num_kv_heads // degrees["tensor"]),
            dtype=dtype,
            has_segments=config.data.packing == "documents",
        ),
        "cross_entropy": cross_entropy.describe_call(
            (rows, seq_len, model.embed_dim),
            model.vocab_size // (degrees["pipe"] * degrees["tensor"]),
            dtype=dtype,
        ),
        "rms_norm": norm.describe_call((rows, places_between, model.embed_dim), dtype=dtype),
        "swiglu": swiglu.describe_call((rows, seq_len, model.mlp_dim // degrees["tensor"]), dtype=dtype),
        "rope": rope.describe_call(q_shape, dtype=dtype),
    }


def choices(config: Config, layout: Layout, *, platform: str | None = None) -> dict[str, Choice]:
    """Returns key of ModelConfig -> which implementation serves the run, and why the others do not.

    Args:
      config: of the run.
      layout: of its degrees, of devices or abstract.
      platform: of the devices; None: as the layout has it.

    Raises:
      ValueError: a name that cannot serve the run's calls, or `model.tuned` of another kind of device.
    """
    times = None
    if config.model.tuned:
        abstract = platform is not None or isinstance(layout.mesh, AbstractMesh)
        kind = table.PLANNED if abstract else table.device_kind(layout.mesh.devices.flat[0])
        times = table.read_for(config.model.tuned, platform=platform or layout.platform, kind=kind)
    known = calls(config, layout)
    return {
        key: op.choose(getattr(config.model, key), platform or layout.platform, call=known[key], times=times)
        for key, op in OPS.items()
    }


def chosen_model(config: Config, layout: Layout, *, platform: str | None = None) -> ModelConfig:
    """Returns the model with every `auto` replaced by what `choices` says."""
    names = {key: choice.name for key, choice in choices(config, layout, platform=platform).items()}
    remat = stack.select(config.model.remat, platform or layout.platform)
    return dataclasses.replace(config.model, **names, remat=remat)
