"""Silent corruption: devices whose copies of the state differ, or whose computations do not repeat bit for bit."""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import numpy as np

from hlat_jax.batch import Batch
from hlat_jax.host import distributed
from hlat_jax.parallel.digests import adds_exactly
from hlat_jax.run.state import Progress, Run

_MOST_NAMED = 4  # devices in a message


class CorruptionError(RuntimeError):
    """A device holds or computes wrong bits, also at a second try."""


def check_devices(run: Run, progress: Progress, batch: Batch) -> None:
    """Compares the replicas of the state, and computes a microbatch of `batch` twice. Prints a transient error.

    Raises:
      CorruptionError: replicas differ at two tries, or three computations have three results.
    """
    check_state(run, progress)
    if run.recompute is not None:
        recompute = run.recompute
        _repeated(run, progress, lambda: recompute(progress.state, batch), [*recompute.names, "the probe"])


def check_state(run: Run, progress: Progress) -> dict[str, int] | None:
    """Returns the digest of every array of the state, or None if the devices do not add integers exactly.

    With `train.check_devices_every_steps`, replicas are compared.

    Raises:
      CorruptionError: see `check_devices`.
    """
    digest = run.state_digest
    names = [*digest.names, "the probe"]
    digests = _repeated(run, progress, lambda: digest(progress.state), names)
    found = digest.replicas.differences(digests) if run.config.train.check_devices_every_steps else []
    if found:
        first, others = found[0], len({each.array for each in found}) - 1
        others_text = f" ({others} more arrays differ)" if others else ""
        are_all = first.devices == first.replicas
        _end(
            run,
            progress,
            first.devices,
            names[first.array],
            f"{'hold different bits' if are_all else 'has other bits than its replicas'} in {names[first.array]}"
            f"{others_text}{', and no majority shows which is right' if are_all else ''}",
        )
    return digest.by_name(digests) if adds_exactly(digests) else None


def _repeated(run: Run, progress: Progress, compute: Callable[[], np.ndarray], names: Sequence[str]) -> np.ndarray:
    """Returns the digests that two tries agree on. If they differ, a third try decides, and a line is printed."""
    first, second = compute(), compute()
    if np.array_equal(first, second):
        return first
    third = compute()
    agreed = second if np.array_equal(second, third) else first
    places, arrays = np.nonzero(first != second)
    devices, name = tuple(map(int, np.unique(places))), names[int(arrays.min())]
    if not np.array_equal(agreed, third):
        _end(run, progress, devices, name, f"had other bits of {name} at each of three tries")
    fields = _record(run, progress, devices, name, is_persistent=False)
    print(
        f"WARNING: step {progress.step}, silent corruption, transient: {fields['devices']} computed other bits of "
        f"{name} at one of three tries. Training continues, as this did not change the state."
    )
    return agreed


def _end(run: Run, progress: Progress, devices: Sequence[int], name: str, what: str) -> NoReturn:
    """Records a persistent error and raises it. All processes call it together."""
    run.log.sync()
    fields = _record(run, progress, devices, name, is_persistent=True)
    distributed.barrier()  # it is on the disk before any process ends the others
    saved = f"the checkpoint of step {progress.saved_step}" if progress.saved_step else "the beginning"
    raise CorruptionError(
        f"after step {progress.step}, silent corruption, persistent: {fields['devices']} {what}. This state was not "
        f"saved. The same command resumes from {saved}. If a device is named again, leave it out of the job."
    )


def _record(run: Run, progress: Progress, devices: Sequence[int], name: str, *, is_persistent: bool) -> dict[str, Any]:
    """Writes an error to the ledger, and returns its fields."""
    hosts, mesh = distributed.exchange(socket.gethostname()), run.program.layout.mesh.devices.flat
    named = [mesh[place] for place in devices]
    texts = [f"device {each.id} (process {each.process_index}, {hosts[each.process_index]})" for each in named]
    more = [f"{len(texts) - _MOST_NAMED} more devices"] if len(texts) > _MOST_NAMED else []
    kind = "persistent" if is_persistent else "transient"
    fields = {"kind": kind, "array": name, "devices": " and ".join([*texts[:_MOST_NAMED], *more])}
    run.ledger.event("corruption", step=progress.step, **fields)
    return fields
