"""Small programs that other users reported as crashing the Neuron compiler or as silently wrong, with known values.

A failure is a fault of the compiler in use, not of the machine, and does not mean that the training step is wrong, but
that code written the same way is. Dims are smaller than in some reports. Reports are from several SDK releases; which
still hold is not known. Source: the threads named below.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from hlat_jax.neuron.probes import FAILED, NOT_HERE, PASSED, Outcome

_ISSUES = "https://github.com/aws-neuron/aws-neuron-sdk/issues/"
_AXIS = "device"


@dataclasses.dataclass(frozen=True)
class Report:
    """A reported program.

    Attributes:
      name: what it does.
      thread: address of the report.
      effect: what happened there.
      operands: NumPy arrays.
      program: (*operands) -> result; jitted by `run`.
      want: likewise, by NumPy.
      specs: how operands are sharded over all devices; None: one device.
      tolerance: largest error, relative to the largest magnitude wanted.
    """

    name: str
    thread: str
    effect: str
    operands: Sequence[np.ndarray]
    program: Callable[..., jax.Array]
    want: Callable[..., np.ndarray]
    specs: Sequence[P] | None = None
    tolerance: float = 0.0


def run(report: Report, devices: Sequence[Any]) -> np.ndarray:
    """Returns the result of a reported program on these devices, or on the first if it is for one."""
    if report.specs is None:
        placed = jax.device_put(list(report.operands), devices[0])
    else:
        mesh = Mesh(np.array(devices), (_AXIS,))
        shardings = [NamedSharding(mesh, spec) for spec in report.specs]
        placed = [jax.device_put(x, sharding) for x, sharding in zip(report.operands, shardings, strict=True)]
    return np.asarray(jax.jit(report.program)(*placed))


def check(report: Report, devices: Sequence[Any], *, run: Callable[..., np.ndarray] = run) -> Outcome:
    """Compares the result of a reported program with its known value; an exception of `run` counts as failed."""
    if report.specs is not None and len(devices) == 1:
        return Outcome(NOT_HERE, "needs several devices")
    want = report.want(*report.operands).astype(np.float64)
    advice = f"do not write programs this way; the report: {report.thread}"
    try:
        got = run(report, devices).astype(np.float64)
    except Exception as error:  # of the compiler or the runtime
        found = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:200]}"
        return Outcome(FAILED, f"{found}; reported: {report.effect}", advice)
    bound = report.tolerance * np.abs(want).max()
    if got.shape != want.shape or not (np.abs(got - want) <= bound).all():
        wrong = got.shape != want.shape or ~(np.abs(got - want) <= bound)
        return Outcome(
            FAILED, f"{np.sum(wrong):,} of {want.size:,} numbers are wrong; reported: {report.effect}", advice
        )
    return Outcome(PASSED, f"as expected; reported: {report.effect}")


def reports(num_devices: int) -> list[Report]:
    """Returns the reported programs that can be written in JAX, with dims that `num_devices` divide."""
    rng = np.random.default_rng(0)
    rows, several = 8 * num_devices, P(_AXIS)

    def whole(*shape: int, dtype: str = "float32") -> np.ndarray:
        return rng.integers(-3, 4, shape).astype(dtype)

    mask = np.arange(16) % 3 == 1
    ids = rng.permutation(rows).astype(np.int32)
    gated = [
        whole(1, 1024, dtype="bfloat16"),
        whole(1024, 2 * 2048, dtype="bfloat16"),
        whole(1024, 2048, dtype="bfloat16"),
    ]
    # small enough for gelu to be neither 0 nor the identity everywhere
    gated[1] = (gated[1].astype(np.float32) / 64).astype(gated[1].dtype)
    gated_mlp = ("gated MLP, weights sharded along dim", _ISSUES + "1030", "compiler crash for one of the two dims")
    return [
        Report(
            "masked assignment",
            _ISSUES + "1381",
            "finite but wrong values (trn2, PyTorch, 2026)",
            [whole(16, 32), mask],
            functools.partial(_flip_masked, size=int(mask.sum())),
            lambda x, mask: np.where(mask[:, None], x[:, ::-1], x),
        ),
        Report(
            "lookup by an integer vector",
            _ISSUES + "937",
            "every other value 0 (trn1, PyTorch, 64-bit indices, 2024)",
            [whole(64), rng.permutation(64).astype(np.int32)],
            lambda x, ids: x[ids],
            lambda x, ids: x[ids],
        ),
        Report(
            "sum of two products beside a third",
            _ISSUES + "756",
            "wrong values for 2 x 2 matrices (neuronx-cc 2.10)",
            [whole(2, 2), whole(2, 2)],
            lambda a, b: jnp.stack([a @ a, b @ a.T + a @ b.T]),
            lambda a, b: np.stack([a @ a, b @ a.T + a @ b.T]),
        ),
        Report(
            "cumulative sum",
            _ISSUES + "767",
            "differs from the CPU (2023)",
            [whole(4, 512)],
            lambda x: jnp.cumsum(x, axis=1),
            lambda x: np.cumsum(x, axis=1),
        ),
        Report(
            "cumulative sum of integers",
            _ISSUES + "767",
            "compiler crash (2023)",
            [whole(512, dtype="int32")],
            jnp.cumsum,
            np.cumsum,
        ),
        Report(
            "loop with an unsigned carry",
            _ISSUES + "1077",
            "the compiler's verification fails (trn1, 2025)",
            [whole(8, 8)],
            _sum_of_bits,
            lambda x: np.asarray(x.reshape(-1).view(np.uint32).sum(dtype=np.uint32)),
        ),
        Report(
            "rows of a sharded table",
            _ISSUES + "1309",
            "the process ends in a check of XLA on 2 cores (libneuronxla 2.2)",
            [whole(rows, 32), ids],
            lambda table, ids: table.at[ids].get(mode="clip"),
            lambda table, ids: table[ids],
            specs=(several, P()),
        ),
        Report(
            "gradient of a sharded table",
            "https://github.com/openxla/xla/issues/42481",
            "all-reduce in the wrong place (partitioner GSPMD)",
            [whole(rows, 32), np.concatenate([ids, ids[::-1]]), whole(2 * rows, 32)],
            lambda table, ids, dy: jax.grad(lambda table: jnp.sum(table.at[ids].get(mode="clip") * dy))(table),
            _table_gradient,
            specs=(several, several, several),
        ),
        *(
            Report(
                f"{gated_mlp[0]} {dim}",
                *gated_mlp[1:],
                gated,
                _gated_mlp,
                lambda *operands: _gated_mlp_in_numpy(*(x.astype(np.float64) for x in operands)),
                specs=(P(), spec, spec),
                tolerance=0.03,  # bf16, and a sum of 2,048 products of rounded values
            )
            for dim, spec in enumerate((P(_AXIS, None), P(None, _AXIS)))
        ),
    ]


def _flip_masked(x: jax.Array, mask: jax.Array, *, size: int) -> jax.Array:
    [chosen] = jnp.nonzero(mask, size=size)
    return x.at[chosen].set(x[chosen][:, ::-1])


def _sum_of_bits(x: jax.Array) -> jax.Array:
    bits = jax.lax.bitcast_convert_type(x.ravel(), jnp.uint32)
    return jax.lax.fori_loop(0, bits.size, lambda i, carry: carry + bits[i], jnp.uint32(0))


def _table_gradient(table: np.ndarray, ids: np.ndarray, dy: np.ndarray) -> np.ndarray:
    gradient = np.zeros_like(table)
    np.add.at(gradient, ids, dy)
    return gradient


def _gated_mlp(x: jax.Array, w: jax.Array, v: jax.Array) -> jax.Array:
    gate, up = jnp.split(x @ w, 2, axis=-1)
    return jnp.einsum("bf,df->bd", jax.nn.gelu(gate) * up, v)


def _gated_mlp_in_numpy(x: np.ndarray, w: np.ndarray, v: np.ndarray) -> np.ndarray:
    gate, up = np.split(x @ w, 2, axis=-1)
    gelu = gate / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3)))
    return (gelu * up) @ v.T
