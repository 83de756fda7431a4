"""Checks the requirements of a run on a machine, with a function for each, which returns an `Outcome`.

The arguments of a probe are the objects to check, such as versions, devices, or a function that draws or multiplies. So
a test can pass a faulty one. `exercises` has the arguments for a real machine, and `doctor` combines the two.
"""

from __future__ import annotations

import math
import pathlib
import tempfile
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from hlat_jax.config import count_text
from hlat_jax.facts import hardware
from hlat_jax.facts.sdk_releases import numbers

PASSED, FAILED, NOT_HERE = "passed", "failed", "not testable here"
UNUSED = "wrong, not used"  # by any program of a shipped config

# package -> (lowest supported, first unsupported; "" for none). A test compares this with pyproject.toml.
SUPPORTED = {
    "python": ("3.11", ""),
    "jax": ("0.9.0.1", "0.12"),
    "flax": ("0.12.6", ""),
    "optax": ("0.2.8", ""),
    "orbax-checkpoint": ("0.12.8", ""),
    "grain": ("0.2.18", ""),
}
_SIGMAS = 6.0  # bound on random quantities: a correct device fails with a probability of about 1e-8


class Outcome(NamedTuple):
    """The result of a probe, PASSED, FAILED, UNUSED or NOT_HERE, with the finding, and advice unless it passed."""

    verdict: str
    found: str
    advice: str = ""


def versions(installed: Mapping[str, str], supported: Mapping[str, tuple[str, str]]) -> Outcome:
    """Checks that every package is installed in a supported version."""
    wrong = []
    for name, (low, high) in supported.items():
        have = installed.get(name, "")
        wanted = f">={low}" + (f",<{high}" if high else "")
        if not have:
            wrong.append(f"{name} is missing ({wanted})")
        elif numbers(have) < numbers(low) or (high and numbers(have) >= numbers(high)):
            wrong.append(f"{name} {have} is not {wanted}")
    if wrong:
        return Outcome(FAILED, "; ".join(wrong), "pip install -c constraints.txt '.[neuron]', or use Neuron's image")
    return Outcome(PASSED, ", ".join(f"{name} {installed[name]}" for name in supported))


def devices(present: Sequence[Any], *, platform: str, count: int) -> Outcome:
    """Checks the JAX devices of this process.

    Args:
      present: the devices with `platform` and `device_kind`.
      platform: the required platform, or "" for any.
      count: the number of devices of the instance, or 0 if it is unknown.
    """
    kinds = sorted({(device.platform, device.device_kind) for device in present})
    names = ", ".join(f"{kind} ({platform})" for platform, kind in kinds)
    seen = f"{len(present)} x {names or 'nothing'}"
    advice = "run neuron-ls, look for another process that uses the cores, and compare `python -m hlat_jax.neuron env`"
    if not present or (platform and any(device.platform != platform for device in present)):
        return Outcome(FAILED, f"{seen}, expected platform {platform or 'any'}", advice)
    if len(kinds) > 1:
        return Outcome(FAILED, f"{seen}: several kinds", "use devices of one kind")
    if count and len(present) != count:
        return Outcome(FAILED, f"{seen}, but the instance has {count}", advice)
    if kinds[0][0] == "neuron" and hardware.device(kinds[0][1]) is None:
        return Outcome(FAILED, f"{seen}: a kind that is not in hardware.DEVICES", "add its memory and speed there")
    return Outcome(PASSED, seen)


def random_numbers(draw: Callable[[int], tuple[np.ndarray, np.ndarray]]) -> Outcome:
    """Checks `draw(seed)`, which returns (uniform numbers in [0, 1), normal numbers), arrays of one size."""
    (uniform, normal), again, (other, other_normal) = draw(1), draw(1), draw(2)
    if not np.array_equal(uniform, again[0]) or not np.array_equal(normal, again[1]):
        return Outcome(FAILED, "one seed gave two draws", "set JAX_DEFAULT_PRNG_IMPL=rbg, as runs are not reproducible")
    n = uniform.size
    half = n // 2
    u, z = uniform.astype(np.float64), normal.astype(np.float64)
    off = {  # name: (deviation from the expected value, its standard deviation)
        "mean of uniform": (u.mean() - 1 / 2, math.sqrt(1 / 12 / n)),
        "variance of uniform": (u.var() - 1 / 12, math.sqrt(1 / 180 / n)),
        "mean of normal": (z.mean(), math.sqrt(1 / n)),
        "variance of normal": (z.var() - 1, math.sqrt(2 / n)),
        "fourth moment of normal": ((z**4).mean() - 3, math.sqrt(96 / n)),
        "correlation of neighbors": (_correlation(z[:-1], z[1:]), math.sqrt(1 / n)),
        "correlation of the halves": (_correlation(z[:half], z[half : 2 * half]), math.sqrt(1 / half)),
        "correlation of two seeds": (_correlation(z, other_normal), math.sqrt(1 / n)),
        "correlation of two uniform seeds": (_correlation(u, other), math.sqrt(1 / n)),
    }
    wrong = [f"{name} off by {error:.2g}" for name, (error, sigma) in off.items() if not abs(error) <= _SIGMAS * sigma]
    if not (u.min() >= 0 and u.max() < 1):
        wrong.append(f"uniform numbers from {u.min():.3g} to {u.max():.3g}")
    if wrong:
        return Outcome(FAILED, "; ".join(wrong), "draw none in your own code, and report this to the Neuron team")
    return Outcome(PASSED, f"mean, variance, fourth moment and correlations of {n:,} numbers within {_SIGMAS:g} sigma")


def matmul_accumulation(multiply: Callable[[np.ndarray, np.ndarray, str], np.ndarray]) -> Outcome:
    """Checks that a product of bf16 matrices is accumulated in fp32, whatever the dtype of the result.

    Args:
      multiply: (a [M, K], b [K, N], dtype of the result) -> [M, N], for fp32 arrays of values that bf16 can hold.
    """
    k = 4096
    rng = np.random.default_rng(0)
    drawn = (rng.normal(size=shape).astype(np.float32) for shape in ((64, k), (k, 64)))
    a, b = ((values.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32) for values in drawn)  # truncated to bf16
    exact = a.astype(np.float64) @ b
    # 16 times the usual error of fp32 sums in any order; bf16 sums, even of blocks, are off by some hundred times more
    bound = 16 * 2.0**-24 * math.sqrt(k) * np.sqrt((a.astype(np.float64) ** 2) @ (b.astype(np.float64) ** 2))
    wrong, shares = [], {}
    for dtype, stored in (("float32", 0.0), ("bfloat16", 2.0**-7)):  # 2^-7: one bf16 step, for either rounding
        shares[dtype] = float((np.abs(multiply(a, b, dtype) - exact) / (bound + stored * np.abs(exact))).max())
        if not shares[dtype] <= 1:
            wrong.append(f"the error of sums of {k:,} products in {dtype} is {shares[dtype]:.1f} times the bound")
    if wrong:
        advice = "keep --enable-mixed-precision-accumulation and --auto-cast=none in NEURON_CC_FLAGS"
        return Outcome(FAILED, "; ".join(wrong), advice)
    return Outcome(PASSED, f"sums of {k:,} products accumulate in fp32, error {shares['float32']:.2f} of the bound")


def rounding(cast: Callable[[np.ndarray], np.ndarray], *, expected: str) -> Outcome:
    """Checks how fp32 is rounded to bf16.

    Args:
      cast: fp32 [n] -> its bf16 values, as fp32 [n].
      expected: "nearest" or "stochastic".
    """
    n, step = 2**17, 2.0**-7  # the next bf16 number after 1 is 1 + step
    specials = np.array([np.inf, -np.inf, np.nan, 1.0, -1.0 - step, 0.0], np.float32)
    kept = cast(np.tile(specials, 128))
    if not np.array_equal(kept, np.tile(specials, 128), equal_nan=True):
        return Outcome(FAILED, "a cast changes a bf16 value, inf or NaN", "do not train on this machine")
    shares = {}
    for fraction in (0.25, 0.75, -0.25, -0.75):
        sign = math.copysign(1.0, fraction)
        value = sign * (1.0 + step * abs(fraction))
        written = cast(np.full(n, value, np.float32)).astype(np.float64)
        farther = np.isclose(written, sign * (1.0 + step), rtol=0, atol=1e-6)
        if not (farther | (written == sign)).all():
            return Outcome(FAILED, f"{value} is not rounded to one of its neighbors", "do not train on this machine")
        shares[fraction] = float(farther.mean())
    bound = _SIGMAS * math.sqrt(0.25 * 0.75 / n)
    mode = "neither nearest nor stochastic"
    if all(share == round(abs(fraction)) for fraction, share in shares.items()):
        mode = "nearest"
    elif all(abs(share - abs(fraction)) <= bound for fraction, share in shares.items()):
        mode = "stochastic"
    measured = f"rounding is {mode}: {shares[0.25]:.2%} and {shares[0.75]:.2%} round up from 1/4 and 3/4 of a step"
    if mode == expected:
        return Outcome(PASSED, measured)
    advice = "before Python starts, set NEURON_RT_STOCHASTIC_ROUNDING_EN as printed by `python -m hlat_jax.neuron env`"
    return Outcome(FAILED, f"{measured}, but the config needs {expected}", advice)


def collectives(run: Callable[[str, np.ndarray], np.ndarray], *, size: int, permutes: bool = False) -> Outcome:
    """Checks the collectives among `size` devices, each in a separate program.

    Args:
      run: (name, fp32 [size, size, n], one array [size, n] per device) -> results stacked over devices. On each device,
        `sum` gives the sum [size, n] of all arrays, and `gather` all arrays [size, size, n]. `scatter` gives its own
        row [n] of the sum. `next` and `previous` give the array [size, n] of its neighbor in a ring.
      size: the size of the mesh axis. With 1 there are no collectives.
      permutes: whether `next` and `previous` are among the collectives.
    """
    if size == 1:
        return Outcome(NOT_HERE, "one device: no collectives")
    n = max(2**16 // size**2, 8)  # all_gather returns size^3 * n numbers
    values = np.random.default_rng(size).integers(-1000, 1000, (size, size, n)).astype(np.float32)  # sums are exact
    total = values.sum(0)
    right = {
        "sum": np.broadcast_to(total, values.shape),
        "gather": np.broadcast_to(values, (size, *values.shape)),
        "scatter": total,
    }
    right |= {"next": np.roll(values, 1, 0), "previous": np.roll(values, -1, 0)} if permutes else {}
    wrong = []
    for name, want in right.items():
        try:
            wrong += [] if np.array_equal(run(name, values), want) else [f"{name}: wrong values"]
        except Exception as error:  # of the compiler or the runtime; the next collective still runs
            wrong.append(f"{name}: {first_line(error)}")
    if wrong:
        detail = f"on {count_text(size, 'device')} {'; '.join(wrong)}"
        return Outcome(FAILED, detail, "run nccom-test on these cores, or try other degrees in --config.parallel")
    return Outcome(PASSED, f"{', '.join(right)} on {count_text(size, 'device')} are exact")


def donation(step: Callable[[Any], Any], state: Any) -> Outcome:
    """Checks buffer donation by `step(state)`, which returns state + 1, for a donated array `state` on one device."""
    before, want = _address(state), np.asarray(state) + 1
    result = step(state)
    advice = "a run would hold its state twice: plan with half the memory, and report this to the Neuron team"
    if not np.array_equal(np.asarray(result), want):
        return Outcome(FAILED, "a step with a donated argument gives a wrong result", advice)
    if not state.is_deleted():
        return Outcome(FAILED, "a donated argument is not freed by the step", advice)
    after = _address(result)
    if before is None or after is None:
        return Outcome(PASSED, "a donated argument is freed by the step; this backend does not report addresses")
    if before != after:
        return Outcome(FAILED, "the result of a step is not in the buffer of its donated argument", advice)
    return Outcome(PASSED, "the result of a step is in the buffer of its donated argument")


def cache(folder: pathlib.Path) -> Outcome:
    """Checks that programs can be written to the folder of JAX's compilation cache."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder):
            return Outcome(PASSED, f"{folder} can be written")
    except OSError as error:
        advice = "set JAX_COMPILATION_CACHE_DIR to a writable folder on the node's local disk"
        return Outcome(FAILED, f"{folder}: {error.strerror or error}", advice)


def first_line(error: Exception) -> str:
    """Returns the class and the first line of an error."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:200] if lines else 'no message'}"


def _correlation(a: np.ndarray, b: np.ndarray) -> float:
    with np.errstate(invalid="ignore"):  # NaN for a constant, which fails every bound
        return float(np.corrcoef(a, b)[0, 1])


def _address(array: Any) -> int | None:
    try:
        return array.unsafe_buffer_pointer()
    except Exception:  # not implemented by every backend; the errors differ
        return None
