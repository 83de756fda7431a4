"""NKI attention without a device: its values and layouts, what it refuses, and its place in a program for Neuron."""

import dataclasses
import functools
import importlib.util
import itertools
import json
import os
import pathlib
import subprocess
import sys
import types

import jax
import jax.numpy as jnp
import nki_contracts
import numpy as np
import pytest
from flax import nnx
from planned import small_config
from refusals import refused

from hlat_jax.facts import sdk_releases
from hlat_jax.model import Decoder
from hlat_jax.ops import attention as attention_op
from hlat_jax.ops import choices
from hlat_jax.ops.nki import attention as nki
from hlat_jax.parallel.virtual_devices import planned_layout
from hlat_jax.passes.jaxpr import equations
from hlat_jax.program import make_program
from hlat_jax.resolve import resolve

SHAPES = {"gqa": (1, 512, 6, 8, 2), "mqa": (1, 1024, 4, 32, 1)}  # B, T, N, H, K


def inputs(shape):
    b, t, n, h, k = SHAPES[shape]
    rng = np.random.default_rng(0)
    return [jnp.asarray(rng.normal(size=(b, t, heads, h)), jnp.bfloat16) for heads in (n, k, k, n)]


def value_and_grads(attend, q, k, v, dout):
    out, pullback = jax.vjp(attend, q, k, v)
    return out, *pullback(dout)


def einsum(q, k, v):
    return attention_op.attention(q, k_BSKH=k, v_BSKH=v, segment_ids_BT=None, implementation="einsum")


def packed(shape, *lengths):
    """Returns segment ids [B, T] of rows with documents of these lengths; the rest is padding, 0. Rows differ."""
    b, t = SHAPES[shape][:2]
    rows = []
    for row in range(b):
        ids = np.zeros(t, np.int32)
        ends = np.minimum(np.cumsum(lengths) + 7 * row, t)
        for number, (start, end) in enumerate(itertools.pairwise([0, *ends]), 1):
            ids[start:end] = number
        rows.append(ids)
    return jnp.asarray(np.stack(rows))


@pytest.mark.slow
def test_bf16_matches_the_reference_up_to_rounding():
    arrays = inputs("gqa")
    for mine, theirs in zip(value_and_grads(nki.attention, *arrays), value_and_grads(einsum, *arrays), strict=True):
        assert mine.dtype == theirs.dtype == jnp.bfloat16
        np.testing.assert_allclose(np.asarray(mine, np.float32), np.asarray(theirs, np.float32), rtol=0.05, atol=0.05)


def test_bounds_of_any_packing_are_the_ends_of_its_runs():
    rng = np.random.default_rng(3)
    ids = np.cumsum(rng.random((5, 640)) < 0.02, axis=1).astype(np.int32)
    first, end = map(np.asarray, jax.jit(nki.segment_bounds)(ids))
    for row in range(5):
        for position in range(640):
            same = np.flatnonzero(ids[row] == ids[row, position])
            assert (first[row, position], end[row, position]) == (same[0], same[-1] + 1)


FITS = {"q_shape": (1, 4096, 32, 128), "num_kv_heads": 8, "dtype": jnp.bfloat16, "has_segments": False, "window": None}


def test_unsupported_calls_are_refused_with_the_reason():
    assert nki.unsupported_reasons(**FITS) == []
    for change, wanted in (
        ({"window": 1024}, "supports a window (window=1024) only with a scale of 1"),
        ({"q_shape": (1, 4096, 32, 256)}, "model.head_dim=256 is above 128"),
        ({"q_shape": (1, 4000, 32, 128)}, "4000 is not a multiple of 512"),
        ({"q_shape": (1, 262144, 32, 128)}, "262144 is above 131072"),
        ({"q_shape": (17, 4096, 32, 128)}, "17 rows x 32 heads on one device are above 512"),
        ({"dtype": jnp.float64}, "dtype float64 is not one of"),
    ):
        [reason] = nki.unsupported_reasons(**(FITS | change))
        assert wanted in reason


def test_a_model_with_the_kernel_lowers_for_neuron_only(small):
    small.model.attention, small.model.max_positions, small.data.seq_len = "nki", 512, 512
    config = resolve(small)
    calls = make_program(config, planned_layout(config, 8, platform="neuron")).trace_step().jaxpr
    assert "nki_attention_forward" in str(calls)
    assert "nki_attention_backward" in str(calls)
    with refused("model.attention='nki'", "neuron"):
        make_program(config, planned_layout(config, 8, platform="cpu"))
    decoder = Decoder(config.model, rngs=nnx.Rngs(0))
    with refused("model.attention='nki'", "neuron", "cpu"):
        decoder(np.zeros((1, 512), np.int32))


def kernel_calls(monkeypatch, shape, ids, contracts):
    """Calls the kernels with what forward and backward pass give them; returns (result shapes, expected, grids)."""
    arrays, grids = inputs(shape), []
    for name, module in nki_contracts.fake_modules(contracts, grids).items():
        monkeypatch.setitem(sys.modules, name, module)
    attend = functools.partial(nki.attention, segment_ids_BT=ids)
    jaxpr = jax.make_jaxpr(lambda *x: value_and_grads(attend, *x))(*arrays)
    kernels = {nki._forward_p: nki._kernel_forward, nki._backward_p: nki._kernel_backward}
    calls = [(eqn, kernels[eqn.primitive]) for eqn, _ in equations(jaxpr.jaxpr) if eqn.primitive in kernels]
    got, wanted = [], []
    for eqn, kernel in calls:
        operands = [jax.ShapeDtypeStruct(var.aval.shape, var.aval.dtype) for var in eqn.invars]
        outs = jax.eval_shape(functools.partial(kernel, **eqn.params), *operands)
        got.append([(out.shape, out.dtype) for out in outs])
        wanted.append([(var.aval.shape, var.aval.dtype) for var in eqn.outvars])
    return got, wanted, grids


def test_calls_follow_the_kernels_signatures_in_every_release(monkeypatch):
    assert set(nki_contracts.CONTRACTS) == {release.version for release in sdk_releases.RELEASES}
    for contracts in set(nki_contracts.CONTRACTS.values()):
        for lnc, shape in (("1", "gqa"), ("2", "mqa")):
            monkeypatch.setenv("NEURON_LOGICAL_NC_CONFIG", lnc)
            for ids in (None, packed(shape, 100, 200)):
                got, wanted, grids = kernel_calls(monkeypatch, shape, ids, contracts)
                assert len(got) == 2
                assert got == wanted, "the results of a kernel are not what the program continues with"
                assert grids == [int(lnc)] * 2


def test_the_grid_is_that_of_the_device(monkeypatch):
    monkeypatch.delenv("NEURON_LOGICAL_NC_CONFIG", raising=False)
    with refused("NEURON_LOGICAL_NC_CONFIG", "trn2"):
        nki._num_cores()
    for kind, cores in (("NC_v3d", 2), ("NC_v3", 1), ("NC_v2", 1)):
        device = types.SimpleNamespace(device_kind=kind)
        monkeypatch.setattr(jax, "devices", lambda platform, device=device: [device])
        assert nki._num_cores() == cores


def lowered(*arguments):
    """Returns what the fixture says of forward and backward pass over 128 x 4 devices, lowered for Neuron."""
    script = pathlib.Path(__file__).resolve().parents[1] / "support" / "fake_neuron.py"
    command = [sys.executable, str(script), *arguments]
    env = os.environ | {"PYTHONPATH": str(script.parents[2]), "NEURON_LOGICAL_NC_CONFIG": "2"}
    result = subprocess.run(command, capture_output=True, text=True, check=False, env=env)
    return json.loads(result.stdout) if result.returncode == 0 else result.stderr


def test_neuron_lowering_contains_both_kernels_over_both_cores_of_a_device():
    found = lowered("kernels")
    assert found["partitions"] == 512
    assert found["grids"] == [2] * 4
    # one row and 8 / 4 query heads of 512 places on a device, 4 / 4 of keys: operands and results of each call
    q, k, lse = "1x2x16x512xbf16", "1x1x16x512xbf16", "1x2x128x4xf32"
    forward = ["2x512x16xbf16", "1x16x512xbf16", "1x512x16xbf16", "2x512x16xbf16", "2x128x4xf32", "2x128x4xf32"]
    assert sorted(found["calls"]) == sorted([forward, [q, k, k, q, q, lse, q, k, k]])
    of_heads, of_rows = ["2x512x1xf32"] * 2, ["1x512xf32"] * 2  # the bounds of documents
    forward = [*forward[:3], *of_heads, *forward[3:]]
    assert sorted(found["documents"]) == sorted([forward, [q, k, k, q, q, lse, *of_rows, q, k, k]])


@pytest.mark.skipif(importlib.util.find_spec("nkilib") is not None, reason="nkilib is installed")
def test_missing_kernels_on_neuron_raise_instead_of_using_the_reference():
    assert "'nkilib'" in lowered()


def with_nki(**model):
    tree = small_config().to_dict()
    tree["model"] |= {"attention": "nki", "max_positions": 512} | model
    tree["data"] |= {"seq_len": 512, "validation": "held_out.jsonl"}
    return resolve(tree)


def choice_on(config, chip):
    return choices.choices(config, planned_layout(config, 1, platform="neuron", chip=chip))["attention"]


def test_trn1_refuses_the_kernels_with_the_page_unless_the_user_insists():
    one, insisted = with_nki(), with_nki(allow_nki_on_trn1=True)
    either = with_nki(attention="auto", allow_nki_on_trn1=True)
    for chip in ("trn1", "trn1.32xlarge", "trn1n.32xlarge"):
        with refused("model.attention='nki'", "(nki/nki_faq)", "model.allow_nki_on_trn1=True"):
            make_program(one, planned_layout(one, 1, platform="neuron", chip=chip))
        assert choice_on(insisted, chip).name == "nki"
        choice = choice_on(either, chip)
        assert choice.name == "einsum"
        assert "nki/nki_faq" in choice.passed_over["nki"]
    for chip in ("trn2", "trn2.48xlarge", "trn2-ultraserver", "trn3-gen1", ""):
        assert choice_on(one, chip).name == "nki"


def test_auto_takes_the_kernel_for_long_rows_on_trn2_with_the_reason():
    def on(chip, seq_len, attention="auto", **model):
        config = with_nki(attention=attention, max_positions=seq_len, **model)
        return choice_on(dataclasses.replace(config, data=dataclasses.replace(config.data, seq_len=seq_len)), chip)

    for chip in ("trn2", "trn2.48xlarge", "NC_v3d"):
        choice = on(chip, 16384)
        assert choice.name == "nki"
        assert "33%" in choice.because
        assert choice.passed_over["einsum"].startswith("nki ")
    assert on("trn2", 4096).name == "einsum"
    assert on("trn1", 16384).name == "einsum"
    assert on("", 16384).name == "einsum"
    assert on("trn2", 16384, "einsum").because == "requested"
    assert on("trn2", 8192 + 128).name == "einsum"  # not a multiple of 512


@pytest.mark.skipif(importlib.util.find_spec("nkilib") is not None, reason="nkilib is installed")
def test_device_without_nkilib_refuses_the_kernel_by_name():
    config = with_nki(attention="auto", max_positions=8192)
    config = dataclasses.replace(config, data=dataclasses.replace(config.data, seq_len=8192))
    planned = planned_layout(config, 1, platform="neuron", chip="trn2")
    device = types.SimpleNamespace(device_kind="NC_v3d", platform="neuron")
    keys = ("degrees", "row_degree", "sequence_parallel", "vocab_rows", "platform")
    layout = types.SimpleNamespace(**{key: getattr(planned, key) for key in keys})
    layout.mesh = types.SimpleNamespace(devices=np.array([device]))
    choice = choices.choices(config, layout)["attention"]
    assert (choice.name, "nkilib" in choice.passed_over["nki"]) == ("einsum", True)
    asked = dataclasses.replace(config, model=dataclasses.replace(config.model, attention="nki"))
    with refused("model.attention='nki'", "nkilib"):
        choices.choices(asked, layout)
