"""Requirements of a run on a machine, each as one function that returns an `Outcome`.

A probe takes what it judges (versions, devices, a function that draws, multiplies, sends, ...) as arguments, so a test
can pass a faulty one. `exercises` has those of a real machine; `doctor` joins the two.
"""

from __future__ import annotations

import math
import pathlib
import re
import tempfile
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from hlat_jax import cost
from hlat_jax.byte_sizes import format_bytes

PASSED, FAILED, NOT_HERE = "passed", "failed", "not testable here"

# package -> (lowest, first that is too new; "" for none). A test compares it with pyproject.toml.
SUPPORTED = {
    "python": ("3.11", ""),
    "jax": ("0.9.0.1", "0.12"),
    "flax": ("0.12.6", ""),
    "optax": ("0.2.8", ""),
    "orbax-checkpoint": ("0.12.8", ""),
    "grain": ("0.2.18", ""),
}
# Source: AWS Neuron release notes, SDK 2.32. Lower bounds throughout: the public index has placeholders of these names.
SUPPORTED_BY_NEURON = {
    "python": ("3.11", "3.14"),
    "jax": ("0.9.0.1", "0.10.1"),
    "numpy": ("2.2", "2.4"),
    "jax-neuronx": ("0.10", ""),
    "libneuronxla": ("3", ""),
    "neuronx-cc": ("2.27", ""),
}
_SIGMAS = 6.0  # of a bound on what is drawn: a sound device fails one of a hundred million


class Outcome(NamedTuple):
    """Result of a probe: PASSED, FAILED or NOT_HERE; what was found; and what to do, unless it passed."""

    verdict: str
    found: str
    advice: str = ""


def versions(installed: Mapping[str, str], supported: Mapping[str, tuple[str, str]]) -> Outcome:
    """Judges whether every package is installed in a supported version."""
    wrong = []
    for name, (low, high) in supported.items():
        have = installed.get(name, "")
        wanted = f">={low}" + (f",<{high}" if high else "")
        if not have:
            wrong.append(f"{name} is missing ({wanted})")
        elif _numbers(have) < _numbers(low) or (high and _numbers(have) >= _numbers(high)):
            wrong.append(f"{name} {have} is not {wanted}")
    if wrong:
        return Outcome(FAILED, "; ".join(wrong), "pip install -c constraints.txt '.[neuron]', or use Neuron's image")
    return Outcome(PASSED, ", ".join(f"{name} {installed[name]}" for name in supported))


def devices(found: Sequence[Any], *, platform: str, count: int) -> Outcome:
    """Judges JAX's devices of this process.

    Args:
      found: each with `platform` and `device_kind`.
      platform: required; "" for any.
      count: of the instance; 0: unknown.
    """
    kinds = sorted({(one.platform, one.device_kind) for one in found})
    names = ", ".join(f"{kind} ({platform})" for platform, kind in kinds)
    seen = f"{len(found)} x {names or 'nothing'}"
    start = "see neuron-ls, whether another process holds cores, and what `python -m hlat_jax.neuron env` prints"
    if not found or (platform and any(one.platform != platform for one in found)):
        return Outcome(FAILED, f"{seen}; expected platform {platform or 'of any kind'}", start)
    if len(kinds) > 1:
        return Outcome(FAILED, f"{seen}: of several kinds", "use devices of one kind")
    if count and len(found) != count:
        return Outcome(FAILED, f"{seen}; the instance has {count}", start)
    if kinds[0][0] == "neuron" and cost.device(kinds[0][1]) is None:
        return Outcome(FAILED, f"{seen}: a kind that is not in cost.DEVICES", "add its memory and speed there")
    return Outcome(PASSED, seen)


def random_numbers(draw: Callable[[int], tuple[np.ndarray, np.ndarray]]) -> Outcome:
    """Judges `draw(seed)`, which returns as many uniform numbers in [0, 1) as normal ones."""
    (uniform, normal), again, (other, other_normal) = draw(1), draw(1), draw(2)
    if not np.array_equal(uniform, again[0]) or not np.array_equal(normal, again[1]):
        return Outcome(FAILED, "one seed gave two draws", "set JAX_DEFAULT_PRNG_IMPL=rbg; no run is reproducible")
    n = uniform.size
    half = n // 2
    u, z = uniform.astype(np.float64), normal.astype(np.float64)
    off = {  # name: (distance from what it should be, its standard deviation)
        "mean of uniform": (u.mean() - 1 / 2, math.sqrt(1 / 12 / n)),
        "variance of uniform": (u.var() - 1 / 12, math.sqrt(1 / 180 / n)),
        "mean of normal": (z.mean(), math.sqrt(1 / n)),
        "variance of normal": (z.var() - 1, math.sqrt(2 / n)),
        "fourth moment of normal": ((z**4).mean() - 3, math.sqrt(96 / n)),
        "correlation of neighbours": (_correlation(z[:-1], z[1:]), math.sqrt(1 / n)),
        "correlation of the halves": (_correlation(z[:half], z[half : 2 * half]), math.sqrt(1 / half)),
        "correlation of two seeds": (_correlation(z, other_normal), math.sqrt(1 / n)),
        "correlation of two uniform seeds": (_correlation(u, other), math.sqrt(1 / n)),
    }
    wrong = [f"{name} off by {error:.2g}" for name, (error, sigma) in off.items() if not abs(error) <= _SIGMAS * sigma]
    if not (u.min() >= 0 and u.max() < 1):
        wrong.append(f"uniform numbers from {u.min():.3g} to {u.max():.3g}")
    if wrong:
        return Outcome(FAILED, "; ".join(wrong), "draw initial weights on the CPU, and report it to the Neuron team")
    return Outcome(PASSED, f"mean, variance, fourth moment and correlations of {n:,} numbers within {_SIGMAS:g} sigma")


def matmul_accumulation(multiply: Callable[[np.ndarray, np.ndarray, str], np.ndarray]) -> Outcome:
    """Judges the product of bf16 matrices: sums must be held in fp32, whatever the result is stored in.

    Args:
      multiply: (a [M, K], b [K, N], dtype of the result) -> [M, N]; fp32 arrays whose values bf16 can hold.
    """
    k = 4096
    rng = np.random.default_rng(0)
    a, b = (_truncated(rng.normal(size=shape)) for shape in ((64, k), (k, 64)))
    exact = a.astype(np.float64) @ b
    # of fp32 sums in any order, 16 times the usual: a sum in bf16, also of blocks, is off by some hundred times more
    bound = 16 * 2.0**-24 * math.sqrt(k) * np.sqrt((a.astype(np.float64) ** 2) @ (b.astype(np.float64) ** 2))
    wrong, shares = [], {}
    for dtype, stored in (("float32", 0.0), ("bfloat16", 2.0**-7)):  # the last: one step of bf16, however it rounds
        shares[dtype] = float((np.abs(multiply(a, b, dtype) - exact) / (bound + stored * np.abs(exact))).max())
        if not shares[dtype] <= 1:
            wrong.append(f"sums of {k:,} products are off {shares[dtype]:.1f} times as far as allowed in {dtype}")
    if wrong:
        advice = "keep --enable-mixed-precision-accumulation and --auto-cast=none in NEURON_CC_FLAGS"
        return Outcome(FAILED, "; ".join(wrong), advice)
    return Outcome(PASSED, f"sums of {k:,} products are held in fp32; error {shares['float32']:.2f} of what is allowed")


def rounding(cast: Callable[[np.ndarray], np.ndarray], *, expected: str) -> Outcome:
    """Judges how fp32 becomes bf16.

    Args:
      cast: fp32 [n] -> the same as bf16 has it, in fp32.
      expected: "nearest" or "stochastic".
    """
    n, step = 2**17, 2.0**-7  # from 1 the next bf16 is 1 + step
    specials = np.array([np.inf, -np.inf, np.nan, 1.0, -1.0 - step, 0.0], np.float32)
    kept = cast(np.tile(specials, 128))
    if not np.array_equal(kept, np.tile(specials, 128), equal_nan=True):
        return Outcome(FAILED, "a cast changes values that bf16 has, inf or NaN", "do not train on this machine")
    shares = {}
    for fraction in (0.25, 0.75, -0.25, -0.75):
        sign = math.copysign(1.0, fraction)
        value = sign * (1.0 + step * abs(fraction))
        written = cast(np.full(n, value, np.float32)).astype(np.float64)
        farther = np.isclose(written, sign * (1.0 + step), rtol=0, atol=1e-6)
        if not (farther | (written == sign)).all():
            return Outcome(FAILED, f"{value} is not written as one of its neighbours", "do not train on this machine")
        shares[fraction] = float(farther.mean())
    bound = _SIGMAS * math.sqrt(0.25 * 0.75 / n)
    seen = "neither nearest nor stochastic"
    if all(share == round(abs(fraction)) for fraction, share in shares.items()):
        seen = "nearest"
    elif all(abs(share - abs(fraction)) <= bound for fraction, share in shares.items()):
        seen = "stochastic"
    measured = f"rounding is {seen}: {shares[0.25]:.2%} and {shares[0.75]:.2%} go up from 1/4 and 3/4 of a step"
    if seen == expected:
        return Outcome(PASSED, measured)
    advice = "NEURON_RT_STOCHASTIC_ROUNDING_EN must be as `python -m hlat_jax.neuron env` prints before Python starts"
    return Outcome(FAILED, f"{measured}; the config needs {expected}", advice)


def collectives(run: Callable[[np.ndarray], Mapping[str, np.ndarray]], *, size: int) -> Outcome:
    """Judges the collectives of `size` devices.

    Args:
      run: fp32 [size, size, n], an array of `size` parts for each device -> for each device, one after another: `sum`
        [size, n] of all arrays, `gather` [size, size, n] all arrays, `scatter` [n] its own part of the sum, `forward`
        and `backward` [size, n] the arrays of the device before and after it.
      size: of the mesh axis; of 1 there are no collectives.
    """
    if size == 1:
        return Outcome(NOT_HERE, "one device, without collectives")
    n = max(2**16 // size**2, 8)  # all gather all: size^3 * n numbers
    values = np.random.default_rng(size).integers(-1000, 1000, (size, size, n)).astype(np.float32)  # sums are exact
    total = values.sum(0)
    right = {
        "sum": np.broadcast_to(total, values.shape),
        "gather": np.broadcast_to(values, (size, *values.shape)),
        "scatter": total,
        "forward": np.roll(values, 1, axis=0),
        "backward": np.roll(values, -1, axis=0),
    }
    got = run(values)
    wrong = [name for name, want in right.items() if not np.array_equal(got[name], want)]
    if wrong:
        found = f"{', '.join(wrong)} of {size} devices: wrong values"
        return Outcome(FAILED, found, "run nccom-test on these cores, and try other degrees of --config.parallel")
    return Outcome(PASSED, f"{', '.join(right)} of {size} devices are exact")


def out_of_bounds(look_up: Callable[[np.ndarray, np.ndarray, str], np.ndarray]) -> Outcome:
    """Judges lookups of rows that a table does not have.

    Args:
      look_up: (table [V, D], ids [n], "clip" or "fill") -> [n, D] as `jax.Array.at[ids].get(mode=...)`.
    """
    num_rows = 2048
    table = np.repeat(np.arange(num_rows, dtype=np.float32)[:, None], 8, axis=1)
    ids = np.array([0, 7, num_rows - 1, num_rows, num_rows + 1, 2**31 - 1, -num_rows - 1], np.int32)
    right = {
        "clip": np.clip(ids, 0, num_rows - 1).astype(np.float32),
        "fill": np.where((ids >= 0) & (ids < num_rows), ids, np.nan).astype(np.float32),
    }
    for mode, want in right.items():
        got = look_up(table, ids, mode)
        if not np.array_equal(got, np.repeat(want[:, None], 8, axis=1), equal_nan=True):
            found = f"mode {mode}: rows {ids.tolist()} of {num_rows} give {got[:, 0].tolist()}"
            return Outcome(FAILED, found, "ids beyond model.vocab_size would silently train other rows")
    return Outcome(PASSED, f"ids beyond a table of {num_rows:,} rows are clipped or NaN as requested, others exact")


def donation(step: Callable[[Any], Any], state: Any) -> Outcome:
    """Judges `step(state)`, state + 1 of a state that it may overwrite; a JAX array on one device, or like one."""
    before, want = _address(state), np.asarray(state) + 1
    result = step(state)
    advice = "a run would hold its state twice: halve what a device holds, and report it to the Neuron team"
    if not np.array_equal(np.asarray(result), want):
        return Outcome(FAILED, "a step that overwrites its argument gives a wrong result", advice)
    if not state.is_deleted():
        return Outcome(FAILED, "a donated argument is still there after the step", advice)
    after = _address(result)
    if before is None or after is None:
        return Outcome(PASSED, "a donated argument is gone after the step; this backend gives no addresses")
    if before != after:
        return Outcome(FAILED, "the result of a step lies elsewhere than its donated argument", advice)
    return Outcome(PASSED, "the result of a step lies where its donated argument was")


def memory(limit_bytes: int, known_bytes: int, *, fill: Callable[[int], bool] | None) -> Outcome:
    """Judges the memory of a device.

    Args:
      limit_bytes: reported by the backend; 0: not reported.
      known_bytes: of a device of this kind; 0: unknown.
      fill: writes so many bytes, a quarter of the device and at most 4 GiB, and returns whether they are read back;
        None: the device is the host.
    """
    if fill is None:
        return Outcome(NOT_HERE, "the devices are this host's CPU", "")
    limit = f"the backend reports {format_bytes(limit_bytes)}" if limit_bytes else "the backend reports no limit"
    if limit_bytes and limit_bytes < known_bytes / 2:
        found = f"{limit}, of {format_bytes(known_bytes)} of such a device"
        return Outcome(FAILED, found, "find the process that holds it: neuron-top, nvidia-smi")
    num_bytes = min(min(known_bytes or limit_bytes, limit_bytes or known_bytes) // 4, 4 * cost.GIB)
    if not num_bytes:
        return Outcome(NOT_HERE, f"{limit}, and the device is not in cost.DEVICES", "add the device to cost.DEVICES")
    try:
        kept = fill(num_bytes)
    except Exception as error:  # each backend has its own class for out of memory
        found = f"{limit}; {format_bytes(num_bytes)} cannot be written: {str(error).splitlines()[0][:200]}"
        return Outcome(FAILED, found, "find the process that holds it: neuron-top, nvidia-smi")
    if not kept:
        return Outcome(FAILED, f"{format_bytes(num_bytes)} read back differ from those written", "replace the instance")
    return Outcome(PASSED, f"{limit}; {format_bytes(num_bytes)} written and read back")


def cache(start: Callable[[pathlib.Path], Mapping[str, Any]], folder: pathlib.Path) -> Outcome:
    """Judges JAX's cache of compiled programs in `folder`: writable, and read by the second start of a program.

    Args:
      start: compiles and runs one program in a process of its own, with its cache in the folder that it is given, and
        returns `hits`, `compile_s` and the `value` that the program computed.
      folder: left as it was.
    """
    advice = "set JAX_COMPILATION_CACHE_DIR to a folder on the node's own disk that you may write to"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="doctor-", dir=folder) as inside:
            first = start(pathlib.Path(inside))
            num_files = sum(path.is_file() for path in pathlib.Path(inside).rglob("*"))
            second = start(pathlib.Path(inside))
    except OSError as error:
        return Outcome(FAILED, f"{folder}: {error.strerror or error}", advice)
    if first["hits"] or not num_files:
        found = f"{folder}: the first start left {num_files} files, {first['hits']} programs came out of the cache"
        return Outcome(FAILED, found, advice)
    if not second["hits"]:
        return Outcome(FAILED, f"{folder}: the second start compiled again what the first had left there", advice)
    if first["value"] != second["value"]:
        found = f"{folder}: a program out of the cache computes {second['value']}, compiled anew {first['value']}"
        return Outcome(FAILED, found, "empty that folder; share it among machines of one kind only")
    return Outcome(
        PASSED, f"{folder}: compiled in {first['compile_s']:.1f} s, the second start {second['compile_s']:.1f} s"
    )


def training(train: Callable[[], Any], band: tuple[float, float]) -> Outcome:
    """Judges a training with a known end; `train` returns a `short_training.TrainingResult`."""
    done = train()
    low, high = band
    summary = (
        f"{len(done.losses)} steps on {done.num_devices} device(s) in {done.train_s:.0f} s after "
        f"{done.compile_s:.0f} s of starting: validation loss {done.eval_loss:.4f}, expected {low:g} to {high:g}"
    )
    advice = "run `python -m hlat_jax.train --config=tiny` here with JAX_PLATFORMS=cpu and compare metrics.jsonl"
    bad = [number for number, loss in enumerate(done.losses, 1) if not math.isfinite(loss)]
    if bad:
        return Outcome(FAILED, f"{summary}; the loss of step {bad[0]} is not finite", advice)
    if not low <= done.eval_loss <= high:
        return Outcome(FAILED, summary, advice)
    return Outcome(PASSED, summary)


def _numbers(version: str) -> tuple[int, ...]:
    """Returns (0, 10, 0) of `0.10.0`, `0.10.0rc1` and `0.10.0+local`."""
    return tuple(map(int, re.match(r"[\d.]*\d|", version)[0].split("."))) if version[:1].isdigit() else ()


def _correlation(a: np.ndarray, b: np.ndarray) -> float:
    with np.errstate(invalid="ignore"):  # NaN for a constant, which no bound allows
        return float(np.corrcoef(a, b)[0, 1])


def _truncated(values: np.ndarray) -> np.ndarray:
    """Returns fp32 values of which bf16 has every bit."""
    return (values.astype(np.float32).view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)


def _address(array: Any) -> int | None:
    try:
        return array.unsafe_buffer_pointer()
    except Exception:  # not every backend has it, and each raises its own error
        return None
