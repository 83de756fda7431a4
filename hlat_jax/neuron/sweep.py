"""Compares operations of a step, run on this machine's devices, with the same operations run on the host's CPU."""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from hlat_jax.neuron.probes import FAILED, NOT_HERE, PASSED, Outcome, first_line
from hlat_jax.neuron.step_operations import SUMS, Operation, sample
from hlat_jax.passes.jaxpr import COLLECTIVES, SAME_ELEMENTS
from hlat_jax.store.progress import Status

_MAX_OPERATIONS = 16  # of one kind in one program
# Kinds first compared, because public reports name them: data movement by index and by mask, and collectives.
_FIRST = ("gather", "scatter", "dynamic_", "select_n", "cumsum", "sort", *COLLECTIVES, "dot_general", "transpose")
# Results that are operands, parts of them, or exact by definition. Those of sums are exact for the operands drawn here.
_EXACT = (
    SUMS
    | frozenset(COLLECTIVES)
    | SAME_ELEMENTS
    | {"transpose", "concatenate", "pad", "slice", "split", "rev", "gather", "scatter", "dynamic_slice"}
    | {"dynamic_update_slice", "select_n", "select_and_scatter_add", "max", "min", "clamp", "neg", "abs", "sign"}
    | {"reduce_max", "reduce_min", "cummax", "cummin", "sort", "top_k", "optimization_barrier", "floor", "ceil"}
    | {"round", "real", "imag"}
)
_ARITHMETIC = frozenset(
    {"add", "add_any", "sub", "mul", "square", "scatter-mul", "reduce_prod", "cumprod"}
    | {"convert_element_type", "reduce_precision"}
)
_ARITHMETIC_ERROR = 2.0**-21  # four times the half step of a correctly rounded fp32 result
# Of everything else, such as exp, division and sin. The accuracy of these on Neuron is not documented; a thousandth is
# far below the error of a wrong result and far above that of a usable one.
_OTHER_ERROR = 2.0**-10
_SMALLEST = 2.0**-126  # devices may flush smaller numbers to zero


@dataclasses.dataclass(frozen=True)
class Limits:
    """Bounds of a sweep.

    Attributes:
      seconds: no further program is started after this time; 0: no sweep.
      num_bytes: of the operands and results of one operation on one device; of an operation across devices, or on
        devices of the host, of all devices together. Operations of more are not compared.
    """

    seconds: float = 600.0
    num_bytes: int = 5 * 2**29


DEFAULT_LIMITS = Limits()


@dataclasses.dataclass(frozen=True)
class Difference:
    """An operation that the devices do not compute as the CPU does."""

    operation: Operation
    what: str


class _NoReferenceError(Exception):
    """The CPU cannot run an operation."""


@dataclasses.dataclass
class _Report:
    """What a sweep has found so far.

    Attributes:
      operations: of the step.
      small: those within the limit on memory.
      compared: those run on the devices.
      differences: those that devices compute otherwise.
      without_reference: those that the CPU cannot run, with its error.
      only_alone: kinds whose operations run one by one, but not in one program.
    """

    operations: Sequence[Operation]
    small: Sequence[Operation]
    compared: list[Operation] = dataclasses.field(default_factory=list)
    differences: list[Difference] = dataclasses.field(default_factory=list)
    without_reference: dict[Operation, str] = dataclasses.field(default_factory=dict)
    only_alone: list[str] = dataclasses.field(default_factory=list)

    def outcome(self) -> Outcome:
        found = self._found()
        if not self.differences:
            return Outcome(PASSED if self.compared else NOT_HERE, found)
        first, *others = sorted(self.differences, key=lambda one: one.operation.position)
        what = f"{first.operation}: {first.what}"
        if others:
            counts = collections.Counter(one.operation.name for one in others)
            what += f"; also {', '.join(f'{name} x{count}' for name, count in counts.items())}"
        advice = "do not train: report this operation to the Neuron team, or choose another implementation of it"
        return Outcome(FAILED, f"{what}; {found}", advice)

    def _found(self) -> str:
        kinds = {one.name for one in self.compared}
        counts = f"{len(self.compared)} of {len(self.operations)} operations of the step, {len(kinds)} kinds"
        num_late = len(self.small) - len(self.compared) - len(self.without_reference)
        left = {
            "larger than --sweep_gib": len(self.operations) - len(self.small),
            "after --sweep_s": num_late,
            f"that the CPU cannot run ({next(iter(self.without_reference.values()), '')})": len(self.without_reference),
        }
        missed = ", ".join(f"{count} {why}" for why, count in left.items() if count)
        found = f"{counts}, compared with the CPU" + (f"; not compared: {missed}" if missed else "")
        missing = sorted({one.name for one in self.operations} - kinds)
        found += f"; no {', '.join(missing)} at all" if missing else ""
        return found + (f"; only one by one: {', '.join(self.only_alone)}" if self.only_alone else "")


def sweep(
    operations: Sequence[Operation],
    *,
    run: Callable[[Sequence[Operation], Sequence[list[np.ndarray]]], list[list[list[Any]]]],
    reference: Callable[[Sequence[Operation], Sequence[list[np.ndarray]]], list[list[list[Any]]]],
    num_devices: int,
    num_in_mesh: int,
    share_memory: bool,
    limits: Limits,
    status: Status | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Outcome:
    """Compares the results of operations.

    Args:
      operations: of a step.
      run: (operations of one kind, operands of each) -> for each operation, for each result, the arrays of all devices,
        from one program. Those across devices get operands with a leading dim of devices.
      reference: likewise, computed by the CPU; one array per result where all devices must agree. Any
        exception means that the CPU cannot run one of them.
      num_devices: that run operations without collectives.
      num_in_mesh: devices that run collectives.
      share_memory: whether these devices share the host's memory.
      limits: of time and memory.
      status: gets the kind of the operations that run.
      clock: seconds.
    """
    began = clock()
    per_device = limits.num_bytes // (num_devices if share_memory else 1)
    together = limits.num_bytes // num_in_mesh
    compare = functools.partial(_compare, run=run, reference=reference, counts=(num_devices, num_in_mesh))
    small = [one for one in operations if one.num_bytes <= (together if one.is_collective else per_device)]
    report = _Report(operations, small)
    for batch in _batches(report.small, per_device=per_device, together=together):
        if clock() - began > limits.seconds:
            break
        if status is not None:
            status.share, status.text = len(report.compared) / len(small), f"comparing {batch[0].name}"
        try:
            report.differences += compare(batch)
            report.compared += batch
            continue
        except Exception as error:  # of the compiler or the runtime; each operation alone shows which one it is
            together_error = first_line(error)
        num_failed = 0
        for one in batch:
            try:
                report.differences += compare([one])
            except _NoReferenceError as error:
                report.without_reference[one] = first_line(error.__cause__)
                num_failed += 1
                continue
            except Exception as error:
                report.differences.append(Difference(one, f"does not run: {first_line(error)}"))
                num_failed += 1
            report.compared.append(one)
        if not num_failed:
            report.only_alone.append(f"{batch[0].name} x{len(batch)} ({together_error})")
    return report.outcome()


def difference(operation: Operation, got: np.ndarray, want: np.ndarray) -> str | None:
    """Returns how a device's result differs from the CPU's by more than the operation allows; None if it does not."""
    if got.shape != want.shape or got.dtype != want.dtype:
        return f"a result of {got.dtype}{list(got.shape)}, on the CPU {want.dtype}{list(want.shape)}"
    if np.array_equal(*(np.ascontiguousarray(x).reshape(-1).view(np.uint8) for x in (got, want))):
        return None
    if not jnp.issubdtype(want.dtype, jnp.inexact):
        wrong = got != want
    else:
        kind = np.float64 if want.dtype == np.float64 else np.float32
        a, b = (x if np.iscomplexobj(x) else x.astype(kind) for x in (got, want))
        with np.errstate(all="ignore"):
            close = np.isfinite(b) & (np.abs(a - b) <= _allowed(operation, b, want.dtype))
            wrong = ~(close | (a == b) | (np.isnan(a) & np.isnan(b)))
    if not wrong.any():
        return None
    first = tuple(int(index) for index in np.unravel_index(np.argmax(wrong), wrong.shape))
    where = f" of which the first is at {list(first)}" if wrong.ndim else ""
    return f"{int(wrong.sum()):,} of {wrong.size:,} elements differ,{where}: {got[first]}, on the CPU {want[first]}"


def _allowed(operation: Operation, want: np.ndarray, dtype: Any) -> np.ndarray:
    """Returns the largest error of each element; a 16-bit result may be rounded stochastically, to either neighbor."""
    step = 0.0 if jnp.finfo(dtype).bits >= 32 else float(jnp.finfo(dtype).eps)
    size = np.abs(want)
    if operation.name in _EXACT:
        moves = all(one.dtype == dtype for one in operation.operands) and operation.name not in SUMS
        return 0 * size if moves else step * size
    if operation.name in _ARITHMETIC:
        return (step or _ARITHMETIC_ERROR) * size + _SMALLEST
    finite = size[np.isfinite(size)]
    typical = math.sqrt(np.square(finite, dtype=np.float64).mean()) if finite.size else 0.0
    return (step + _OTHER_ERROR) * size + _OTHER_ERROR * typical + _SMALLEST


def _compare(batch: Sequence[Operation], *, run: Any, reference: Any, counts: tuple[int, int]) -> list[Difference]:
    num_devices = counts[batch[0].is_collective]
    rng = np.random.default_rng(0)
    operands = []
    for one in batch:
        if one.is_collective:
            each = [sample(one, rng) for _ in range(num_devices)]
            operands.append([np.stack(arrays) for arrays in zip(*each, strict=True)])
        else:
            operands.append(sample(one, rng))
    try:
        wants = reference(batch, operands)
    except Exception as error:
        raise _NoReferenceError from error
    found = []
    for one, got, want in zip(batch, run(batch, operands), wants, strict=True):
        by_device: dict[str, list[int]] = {}
        for results, right in zip(got, want, strict=True):
            for device, result in enumerate(results):
                what = difference(one, np.asarray(result), np.asarray(right[device if len(right) > 1 else 0]))
                if what is not None:
                    by_device.setdefault(what, []).append(device)
        for what, devices in itertools.islice(by_device.items(), 1):
            wrong = {device for each in by_device.values() for device in each}
            named = f"device {devices[0]}" if len(wrong) < num_devices or num_devices == 1 else "all devices"
            more = f" and {len(wrong) - 1} more" if 1 < len(wrong) < num_devices else ""
            found.append(Difference(one, f"on {named}{more} {what}"))
    return found


def _batches(operations: Sequence[Operation], *, per_device: int, together: int) -> Iterator[list[Operation]]:
    """Yields operations of one kind that fit one program: of every kind the largest, then of every kind the next."""
    kinds: dict[str, list[list[Operation]]] = {}
    for one in sorted(operations, key=lambda one: -one.num_bytes):
        batches = kinds.setdefault(one.name, [])
        limit = together if one.is_collective else per_device
        if not batches or len(batches[-1]) == _MAX_OPERATIONS or _size(batches[-1]) + one.num_bytes > limit:
            batches.append([])
        batches[-1].append(one)

    def order(item: tuple[int, list[Operation]]) -> tuple:
        number, batch = item
        return number, not batch[0].name.startswith(_FIRST), min(one.position for one in batch)

    numbered = [item for batches in kinds.values() for item in enumerate(batches)]
    for _, batch in sorted(numbered, key=order):
        yield sorted(batch, key=lambda one: one.position)


def _size(batch: Sequence[Operation]) -> int:
    return sum(one.num_bytes for one in batch)
