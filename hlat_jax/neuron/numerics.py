"""Programs with wrong results on Trainium, as reported by others, and the right results. `child` runs them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hlat_jax.facts.byte_sizes import format_bytes
from hlat_jax.generate.sampling import Sampling, sample
from hlat_jax.neuron.probes import FAILED, PASSED, Outcome
from hlat_jax.ops.embedding import lookup
from hlat_jax.parallel.collectives import SINGLE_DEVICE
from hlat_jax.precision import Rounding

# A function of arrays that returns results by name; its arguments; and the right results.
Program = tuple[Callable[..., dict[str, Any]], tuple[np.ndarray, ...], dict[str, np.ndarray]]
_DIVISORS = (3, 7, 1000, 6284, 128256)  # 6284 was wrong on trn1
_TABLE_BYTES = {"cpu": 2**26}  # by platform; elsewhere more than the 1.61 GB that were right, and less than 4 GiB
_TABLE_COLUMNS = 8192


def check(name: str, *, run: Callable[..., dict[str, Any]] | None = None) -> Outcome:
    """Checks the results of one of `PROGRAMS` on the first device. `run` replaces its function in tests."""
    program, arguments, expected = PROGRAMS[name][0]()
    results = (run or jax.jit(program))(*arguments)
    wrong = []
    for part, want in expected.items():
        got = np.asarray(results[part]).astype(np.float64)
        # integers are exact; probabilities in bf16 are off by three roundings, stochastic ones by 2^-7 each
        tolerance = 0.04 if want.dtype.kind == "f" else 0
        if not (np.abs(got - want) <= tolerance * np.abs(want) + 1e-6).all():
            wrong.append(part)
    if wrong:
        return Outcome(FAILED, f"wrong: {', '.join(wrong)}", "do not train on this machine, see docs/neuron-doctor.md")
    return Outcome(PASSED, f"{', '.join(expected)}: right")


def _integer_division() -> Program:
    factors = np.random.default_rng(0).integers(1, 2**31 // max(_DIVISORS), 512)
    x = np.concatenate([factors * c + offset for c in _DIVISORS for offset in (-1, 0, 1)]).astype(np.int32)

    def divide(x, *, stack=jnp.stack):
        return {f"by {c}": stack([x // c, x % c]) for c in _DIVISORS}

    return divide, (x,), divide(x, stack=np.stack)


def _casts() -> Program:
    def lower_bits(x):
        written = Rounding((jnp.uint32(3), jnp.uint32(5))).write(x + 1, jnp.bfloat16, name="doctor")
        doubled = written.astype(jnp.float32) * 2
        return {"values rounded by a hash": jax.lax.bitcast_convert_type(doubled, jnp.uint32) & jnp.uint32(0xFFFF)}

    x = np.random.default_rng(0).random(4096, np.float32)
    return lower_bits, (x,), {"values rounded by a hash": np.zeros(x.shape, np.uint32)}


def _index_of_nan() -> Program:
    logits_BV = np.random.default_rng(0).normal(size=(8, 512)).astype(np.float32)
    logits_BV[6, 100] = logits_BV[7] = np.nan
    table_VD = np.arange(512, dtype=np.float32)[:, None] + np.zeros(64, np.float32)

    def choose(logits_BV, table_VD):
        zeros_B = jnp.zeros(logits_BV.shape[0], jnp.int32)
        ids_B = sample(logits_BV, Sampling().arguments(), draws=(zeros_B, zeros_B))
        rows_BD = lookup(table_VD, ids_B[:, None], ctx=SINGLE_DEVICE)[:, 0]
        return {
            "ids of other rows": ids_B[:6],
            "ids of rows with NaN": (ids_B >= 0) & (ids_B < 512),
            "rows read": (rows_BD == ids_B[:, None].astype(jnp.float32)).all(axis=1),
        }

    want = (logits_BV[:6].argmax(axis=1), np.ones(8, int), np.ones(8, int))
    parts = jax.eval_shape(choose, logits_BV, table_VD)  # in the order of their names
    return choose, (logits_BV, table_VD), dict(zip(parts, want, strict=True))


def _large_table() -> Program:
    num_rows = _TABLE_BYTES.get(jax.default_backend(), 3 * 10**9) // (4 * _TABLE_COLUMNS)
    # an argument: rows of an iota in the program could be computed without a table
    table_VD = jax.jit(lambda: jax.lax.broadcasted_iota(jnp.float32, (num_rows, _TABLE_COLUMNS), 0))()
    ids_B = np.linspace(0, num_rows - 1, 256).astype(np.int32)
    part = f"rows of {format_bytes(table_VD.nbytes)}"

    def read(table_VD, ids_B):
        rows_BD = jnp.abs(lookup(table_VD, ids_B[:, None], ctx=SINGLE_DEVICE)[:, 0])
        return {part: rows_BD[:, :: _TABLE_COLUMNS - 1].astype(jnp.int32)}

    return read, (table_VD, ids_B), {part: np.stack([ids_B, ids_B], axis=1)}


def _row_shift() -> Program:
    rng, (t, d, k) = np.random.default_rng(0), (1024, 256, 4)
    x_TD, taps_KD = (rng.integers(-8, 9, shape) for shape in ((t, d), (k, d)))

    def by_slices(x_TD, taps_KD, *, pad=jnp.pad):
        padded = pad(x_TD, ((k - 1, 0), (0, 0)))
        return sum(padded[k - 1 - i : k - 1 - i + t] * taps_KD[i] for i in range(k))

    def convolve(x_TD, taps_KD):
        options = {"feature_group_count": d, "dimension_numbers": ("NHC", "HIO", "NHC")}
        out_1TD = jax.lax.conv_general_dilated(x_TD[None], taps_KD[::-1, None], (1,), [(k - 1, 0)], **options)
        return {"slices": by_slices(x_TD, taps_KD), "a causal convolution": out_1TD[0]}

    floats = x_TD.astype(np.float32), taps_KD.astype(np.float32)
    return convolve, floats, dict.fromkeys(jax.eval_shape(convolve, *floats), by_slices(x_TD, taps_KD, pad=np.pad))


def _cumulative_sums() -> Program:
    x_TD = np.random.default_rng(0).integers(0, 9, (1024, 256)).astype(np.int32)

    def sums(x_TD):
        return {
            "cumsum of int32": jnp.cumsum(x_TD, axis=0),
            "cumsum of fp32": jnp.cumsum(x_TD.astype(jnp.float32), axis=0),
            "associative_scan of int32": jax.lax.associative_scan(jnp.add, x_TD),
        }

    return sums, (x_TD,), dict.fromkeys(jax.eval_shape(sums, x_TD), x_TD.cumsum(axis=0))


def _masked_softmax() -> Program:
    scores_TS = np.random.default_rng(0).integers(-16, 17, (128, 256)).astype(np.float32) / 4  # exact in bf16
    mask_TS = np.arange(256) == np.arange(128)[:, None]  # of every row all but one
    mask_TS[::2] = True

    def masked(scores_TS, mask_TS):
        def added(value, dtype):
            return jax.nn.softmax(scores_TS.astype(dtype) + jnp.where(mask_TS, 0, value).astype(dtype), axis=-1)

        return {
            "-inf": added(-jnp.inf, jnp.float32),
            "finfo.min of fp32": added(float(jnp.finfo(jnp.float32).min), jnp.float32),
            "finfo.min of bf16": added(float(jnp.finfo(jnp.bfloat16).min), jnp.bfloat16),
            "-1e30": jax.nn.softmax(jnp.where(mask_TS, scores_TS, -1e30), axis=-1),
        }

    exp_TS = np.exp(scores_TS.astype(np.float64)) * mask_TS
    want = dict.fromkeys(jax.eval_shape(masked, scores_TS, mask_TS), exp_TS / exp_TS.sum(axis=1, keepdims=True))
    return masked, (scores_TS, mask_TS), want


def _fp32_products() -> Program:
    # bf16 cannot hold the integers, fp32 holds the sums
    rng = np.random.default_rng(0)
    a, b = (rng.integers(-1023, 1024, shape) for shape in ((128, 16), (16, 128)))

    def multiply(a, b):
        return {"products of fp32 integers": jnp.matmul(a, b, precision="highest")}

    return multiply, (a.astype(np.float32), b.astype(np.float32)), {"products of fp32 integers": a @ b}


# check of the doctor -> its program, and the rules by which `lint` finds such programs; "" if runs depend on it
PROGRAMS: dict[str, tuple[Callable[[], Program], str]] = {
    "integer division": (_integer_division, "KB09"),
    "casts to bf16 and back": (_casts, ""),
    "index of NaN": (_index_of_nan, ""),
    "large table": (_large_table, "KB11"),
    "shift of rows": (_row_shift, "KB13"),
    "cumulative sums": (_cumulative_sums, "RED02"),
    "masked softmax": (_masked_softmax, ""),
    "fp32 products": (_fp32_products, ""),
}
