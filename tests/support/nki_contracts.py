"""The calls that the NKI attention kernels of each SDK release take, as recorded from the public library.

A fake kernel refuses what the real one's signature, shapes or dtypes would refuse, and returns results of its shapes.
It computes nothing: what its results are is not checked anywhere.
Source: nki-library, nkilib.core.attention, at the commits and tags named below.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

TARGET = "AwsNeuronCustomNativeKernel"
P = 128


class Contract(NamedTuple):
    """One kernel of one version of the library: its signature, and (arguments) -> shapes of its results."""

    source: str
    signature: inspect.Signature
    results: Callable[[Mapping[str, Any]], tuple[jax.ShapeDtypeStruct, ...]]


class FakeKernel:
    """A kernel that is called as `kernel[grid](...)` with arrays, and checks the call against a contract."""

    def __init__(self, contract: Contract, grids: list[int]):
        self.contract, self.grids = contract, grids

    def __getitem__(self, grid):
        assert grid in (1, 2), f"the grid is {grid}; a device has 1 or 2 cores"
        self.grids.append(grid)
        return self._launch

    def __call__(self, *_, **__):
        raise AssertionError("called without a grid: half of the cores of each device would idle")

    def _launch(self, *args, **kwargs):
        bound = self.contract.signature.bind(*args, **kwargs)
        bound.apply_defaults()
        results = self.contract.results(bound.arguments)
        operands = [value for value in bound.arguments.values() if hasattr(value, "shape")]
        return jax.ffi.ffi_call(TARGET, results)(*operands)


def _signature(text: str) -> inspect.Signature:
    """Returns the signature of `a, b=1, ...`; a default of ... stands for one that the record does not have."""
    names: dict[str, Any] = {}
    exec(f"def kernel({text}): pass", names)
    return inspect.signature(names["kernel"])


def _like(x):
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


def _forward_results(*, max_batch: int, max_seq_len: int, max_head_dim: int):
    def results(call: Mapping[str, Any]) -> tuple[jax.ShapeDtypeStruct, ...]:
        q, k, v = call["q"], call["k"], call["v"]
        assert call["tp_q"], "q is given as (B, Sq, d)"
        assert not call["tp_k"], "k is given as (Bkv, d, Skv)"
        assert not call["tp_out"], "the result is read as (B, Sq, d)"
        assert call["cache_softmax"], "the backward pass needs the statistics"
        batch, seq_len, head_dim = q.shape
        assert batch <= max_batch
        assert seq_len <= max_seq_len
        assert head_dim <= max_head_dim
        assert seq_len % P == 0, "for the statistics"
        assert k.shape == (k.shape[0], head_dim, seq_len)
        assert v.shape == (k.shape[0], seq_len, head_dim)
        assert batch % k.shape[0] == 0
        assert q.dtype == k.dtype == v.dtype
        assert q.dtype in (jnp.bfloat16, jnp.float16, jnp.float32)
        low, high = call.get("bound_min"), call.get("bound_max")
        assert (low is None) == (high is None), "both bounds or none"
        for bound in (low, high):
            assert bound is None or (bound.shape == (batch, seq_len, 1) and bound.dtype == jnp.float32)
        statistics = jax.ShapeDtypeStruct((batch, P, seq_len // P), jnp.float32)
        return _like(q), statistics, statistics

    return results


def _backward_results(call: Mapping[str, Any]) -> tuple[jax.ShapeDtypeStruct, ...]:
    q, k, v, lse = call["q_ref"], call["k_ref"], call["v_ref"], call["lse_ref"]
    batch, heads, head_dim, seq_len = q.shape
    assert k.shape[0] == v.shape[0] == batch
    assert k.shape[1:] == v.shape[1:] == (k.shape[1], head_dim, seq_len), "d comes before the positions"
    assert heads % k.shape[1] == 0
    assert call["o_ref"].shape == call["dy_ref"].shape == q.shape
    assert len({x.dtype for x in (q, k, v, call["o_ref"], call["dy_ref"])}) == 1
    assert lse.shape == (batch, heads, P, seq_len // P)
    assert lse.dtype == jnp.float32
    assert seq_len % P == 0
    assert seq_len % min(512, seq_len) == 0
    assert call["use_causal_mask"]
    assert call["mixed_precision"], "intermediates would be rounded to bf16"
    assert not call["transpose_dv"]
    low, high = call.get("bound_min"), call.get("bound_max")
    assert (low is None) == (high is None), "both bounds or none"
    for bound in (low, high):
        assert bound is None or (bound.shape == (batch, seq_len) and bound.dtype == jnp.float32)
    return _like(q), _like(k), _like(v)


_FORWARD = Contract(
    "commit e9ef98f: nki 0.5 and later",
    _signature(
        "q, k, v, scale=1.0, causal_mask=True, k_prior=None, v_prior=None, prior_used_len=None, sink=None, "
        "sliding_window=..., tp_q=True, tp_k=False, tp_out=False, cache_softmax=False, softmax_dtype='float32', "
        "mm_out_dtype='float32', cp_offset=None, global_cp_deg=..., cp_strided_q_slicing=False, bound_min=None, "
        "bound_max=None, cp_striped_input=False, skip_output_normalization=False, position_bias=None, "
        "bias_layout='dense', bias_band_params=None"
    ),
    _forward_results(max_batch=512, max_seq_len=131_072, max_head_dim=512),
)
_BACKWARD = Contract(
    "commit 092a49d",
    _signature(
        "q_ref, k_ref, v_ref, o_ref, dy_ref, lse_ref, sinks_ref=None, bound_min=None, bound_max=None, "
        "use_causal_mask=False, mixed_precision=False, softmax_scale=None, sliding_window=None, transpose_dv=False, "
        "cp_offset=0"
    ),
    _backward_results,
)
# SDK release -> (attention_cte, attention_bwd). What the library of 2.33 changes in these two was not readable: its
# notes name new kernels only.
CONTRACTS = dict.fromkeys(("2.32.0", "2.33.0", "2.33.1"), (_FORWARD, _BACKWARD))


def fake_modules(contracts: tuple[Contract, Contract], grids: list[int]) -> dict[str, Any]:
    """Returns the modules of nkilib with fake kernels, for `sys.modules`; each launch appends its grid to `grids`."""
    import types

    names = ("attention_cte", "attention_bwd")
    return {
        f"nkilib.core.attention.{name}": types.SimpleNamespace(**{name: FakeKernel(contract, grids)})
        for name, contract in zip(names, contracts, strict=True)
    }
