"""Compiler options for GPUs: known to XLA, and passed for GPUs only."""

import jax
import jax.numpy as jnp
import pytest

from hlat_jax.config import ParallelConfig
from hlat_jax.parallel.sharding import make_layout
from hlat_jax.parallel.xla_options import compiler_options


def layout(**parallel):
    return make_layout(ParallelConfig(**parallel), jax.devices())


def test_options_apply_only_to_several_gpus():
    assert compiler_options(layout()) == {}
    assert compiler_options(make_layout(ParallelConfig(), jax.devices()[:1]), platform="gpu") == {}
    assert compiler_options(layout(), platform="neuron") == {}
    assert compiler_options(layout(), platform="gpu")["xla_gpu_enable_latency_hiding_scheduler"] is True


def test_options_are_known_to_xla():
    options = compiler_options(layout(bucket_bytes=1 << 24), platform="gpu")
    assert options["xla_gpu_all_reduce_combine_threshold_bytes"] == 1 << 24
    lowered = jax.jit(jnp.sin).lower(1.0)
    lowered.compile(compiler_options=options)
    for name in options:  # one that it does not know it refuses
        with pytest.raises(Exception, match="No such compile option"):
            lowered.compile(compiler_options={f"{name}_not": True})
