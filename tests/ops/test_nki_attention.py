"""NKI attention without a device: its values and layouts, what it refuses, and its place in a program for Neuron."""

import importlib.util
import json
import os
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from planned import small_config

from hlat_jax.model import Decoder
from hlat_jax.neuron.programs import layout_for_neuron
from hlat_jax.ops import attention as attention_op
from hlat_jax.ops.nki import attention as nki
from hlat_jax.parallel.virtual_devices import planned_layout
from hlat_jax.resolve import resolve
from hlat_jax.run.compilation import traced_programs
from hlat_jax.step import make_program

SHAPES = {"mha": (2, 512, 4, 16, 4), "gqa": (1, 512, 6, 8, 2), "mqa": (1, 1024, 4, 32, 1)}  # B, T, N, H, K


def inputs(shape, dtype=np.float32):
    b, t, n, h, k = SHAPES[shape]
    rng = np.random.default_rng(0)
    return [jnp.asarray(rng.normal(size=(b, t, heads, h)), dtype) for heads in (n, k, k, n)]


def value_and_grads(attend, q, k, v, dout):
    out, pullback = jax.vjp(attend, q, k, v)
    return out, *pullback(dout)


def einsum(q, k, v):
    return attention_op.attention(q, k_BSKH=k, v_BSKH=v, segment_ids_BT=None, implementation="einsum")


@pytest.mark.quick_cases("mha")
@pytest.mark.parametrize("shape", SHAPES)
def test_value_and_gradients_match_the_xla_reference(shape):
    arrays = inputs(shape)
    got = jax.jit(lambda *x: value_and_grads(nki.attention, *x))(*arrays)
    for mine, theirs in zip(got, value_and_grads(einsum, *arrays), strict=True):
        assert mine.shape == theirs.shape
        np.testing.assert_allclose(mine, theirs, rtol=2e-5, atol=2e-5)  # fp32 sums in another order


def test_bf16_matches_the_reference_up_to_rounding():
    arrays = inputs("gqa", jnp.bfloat16)
    for mine, theirs in zip(value_and_grads(nki.attention, *arrays), value_and_grads(einsum, *arrays), strict=True):
        assert mine.dtype == theirs.dtype == jnp.bfloat16
        np.testing.assert_allclose(np.asarray(mine, np.float32), np.asarray(theirs, np.float32), rtol=0.05, atol=0.05)


def test_log_sum_exp_is_stable_for_large_scores():
    scores = np.random.default_rng(0).normal(size=(3, 128)) * 30
    top = scores.max(axis=1)
    recip = 1 / np.exp(scores - top[:, None]).sum(axis=1)
    np.testing.assert_allclose(nki.log_sum_exp(-top, recip), np.log(np.exp(scores).sum(axis=1)), rtol=1e-6)


def test_tiling_by_partition_round_trips():
    numbers = jnp.arange(2 * 384).reshape(2, 384)
    tiles = nki.tiled(numbers)
    assert tiles.shape == (2, nki.PARTITIONS, 3)
    assert tiles[0, 5, 2] == 2 * nki.PARTITIONS + 5
    np.testing.assert_array_equal(nki.untiled(tiles), numbers)


FITS = {"q_shape": (1, 4096, 32, 128), "num_kv_heads": 8, "dtype": jnp.bfloat16, "has_segments": False, "window": None}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"has_segments": True}, "does not support segment ids"),
        ({"window": 1024}, "supports a window (window=1024) only with a scale of 1"),
        ({"q_shape": (1, 4096, 32, 256)}, "model.head_dim=256 is above 128"),
        ({"q_shape": (1, 4000, 32, 128)}, "4000 is not a multiple of 512"),
        ({"q_shape": (1, 262144, 32, 128)}, "262144 is above 131072"),
        ({"q_shape": (17, 4096, 32, 128)}, "17 rows x 32 heads on one device are above 512"),
        ({"dtype": jnp.float64}, "dtype float64 is not one of"),
    ],
    ids=["segments", "window", "head", "multiple", "length", "batch", "dtype"],
)
def test_unsupported_calls_are_refused_with_the_reason(change, reason):
    assert nki.unsupported_reasons(**FITS) == []
    [found] = nki.unsupported_reasons(**(FITS | change))
    assert reason in found


def test_the_op_refuses_segments_instead_of_ignoring_them():
    q, k, v, _ = inputs("gqa")
    with pytest.raises(
        ValueError, match=r"^model.attention='nki' cannot serve this call: the kernel does not support segment ids"
    ):
        attention_op.attention(
            q, k_BSKH=k, v_BSKH=v, segment_ids_BT=jnp.ones(q.shape[:2], jnp.int32), implementation="nki"
        )
    with pytest.raises(ValueError, match=r"^model.attention='nki' runs on neuron, not on cpu"):
        attention_op.OP.choose("nki", "cpu")


def test_model_with_the_kernel_lowers_for_neuron_and_is_refused_on_cpu(small):
    small.model.attention, small.model.max_positions, small.data.seq_len = "nki", 512, 512
    config = resolve(small)
    calls = make_program(config, planned_layout(config, 8, platform="neuron")).trace_step().jaxpr
    assert "nki_attention_forward" in str(calls)
    assert "nki_attention_backward" in str(calls)
    with pytest.raises(ValueError, match=r"^model.attention='nki' runs on neuron, not on cpu"):
        make_program(config, planned_layout(config, 8, platform="cpu"))
    decoder = Decoder(config.model, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match=r"^model.attention='nki' runs on neuron, not on cpu"):
        decoder(np.zeros((1, 512), np.int32))


def lowered(*, with_kernels):
    """Returns what the fixture says of forward and backward pass over 128 x 4 devices, lowered for Neuron."""
    script = pathlib.Path(__file__).resolve().parents[1] / "support" / "fake_neuron.py"
    command = [sys.executable, str(script), *(["kernels"] if with_kernels else [])]
    env = os.environ | {"PYTHONPATH": str(script.parents[2])}
    result = subprocess.run(command, capture_output=True, text=True, check=False, env=env)
    return json.loads(result.stdout) if result.returncode == 0 else result.stderr


def test_neuron_lowering_contains_both_kernels():
    found = lowered(with_kernels=True)
    assert found["partitions"] == 512
    # one row and 8 / 4 query heads of 512 places on a device, 4 / 4 of keys: operands and results of each call
    q, k, lse = "1x2x16x512xbf16", "1x1x16x512xbf16", "1x2x128x4xf32"
    forward = ["2x512x16xbf16", "1x16x512xbf16", "1x512x16xbf16", "2x512x16xbf16", "2x128x4xf32", "2x128x4xf32"]
    assert sorted(found["calls"]) == sorted([forward, [q, k, k, q, q, lse, q, k, k]])


@pytest.mark.skipif(importlib.util.find_spec("nkilib") is not None, reason="nkilib is installed")
def test_missing_kernels_on_neuron_raise_instead_of_using_the_reference():
    assert "No module named 'nkilib'" in lowered(with_kernels=False)


def test_programs_with_the_kernels_can_be_traced_without_neuron():
    tree = small_config().to_dict()
    tree["model"] |= {"attention": "nki", "max_positions": 512}
    tree["data"] |= {"seq_len": 512, "validation": "held_out.jsonl"}
    config = resolve(tree)
    programs = traced_programs(make_program(config, layout_for_neuron(config, 1)))
    made = {name: str(trace().jaxpr) for name, trace in programs.items()}
    assert "nki_attention_backward" in made["train"]
    assert "nki_attention_forward" in made["eval"]
    with pytest.raises(ValueError, match=r"^model.attention='nki' runs on neuron, not on cpu"):
        make_program(config, planned_layout(config, 1, platform="cpu"))
