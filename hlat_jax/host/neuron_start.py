"""What can stand in the way of a start on a Trainium machine: a missing plugin, and what killed runs have left.

Others met each of these on devices. Source: docs/neuron-measured.md.
"""

from __future__ import annotations

import contextlib
import errno
import os
import pathlib
import shutil
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import NamedTuple

from hlat_jax.host import compile_cache
from hlat_jax.host.neuron_topology import COLLECTIVES_PORT, Machine, Topology

PROCESSES = pathlib.Path("/proc")
_COMPILERS = ("neuronx-cc", "walrus_driver")  # in command lines
_LOCAL = ("btrfs", "ext2", "ext3", "ext4", "overlay", "tmpfs", "xfs")  # file systems of one machine alone
_RELEASE_S = 90.0  # the kernel keeps the port of a killed run for 60 s


def missing_plugin() -> str:
    """Returns which packages JAX lacks to find Neuron devices, in words; "" if it has them."""
    needed = ("jax-neuronx", "libneuronxla")
    missing = [name for name in needed if name not in compile_cache.installed(needed)]
    are = "is" if len(missing) == 1 else "are"
    return f"{' and '.join(missing)} {are} not installed in {sys.executable}" if missing else ""


def clear_way(
    environ: MutableMapping[str, str], topology: Topology, machine: Machine, *, say: Callable[[str], object] = print
) -> None:
    """Waits for a former run to end, and makes the caches of compiled programs usable; says what was in the way.

    Removes JAX's cache from `environ` where it does not work.

    Raises:
      ValueError: this Python has no plugin for Neuron devices, for which JAX would print a traceback.
    """
    if missing := missing_plugin():
        raise ValueError(f"{missing}: install the extra `neuron`, or set PYTHON to an interpreter that has it.")
    # with part of the cores, another process may train on the others
    whole = not topology.cores and not environ.get("NEURON_RT_VISIBLE_CORES")
    port = COLLECTIVES_PORT if topology.nodes > 1 and topology.rank == 0 else 0
    wait_for_former_run(machine if whole else None, port, say=say)
    for line in (*remove_leftovers(compiler_cache(environ)), *compile_cache.leave_out_faulty(environ)):
        say(line)


def compiler_cache(environ: Mapping[str, str]) -> pathlib.Path | None:
    """Returns the folder of neuronx-cc's own cache, or None where it is not a folder."""
    url = environ.get("NEURON_COMPILE_CACHE_URL", "").removeprefix("file://")
    return pathlib.Path(url) if url and "://" not in url else None


class Leftovers(NamedTuple):
    """Lock files of killed compiles, folders of failed compiles, and why a process may still use them, or "".

    Each process that needs a locked program waits for ever ("Another process must be compiling"). A failure is raised
    again at every start. Source of the names: huggingface/optimum-neuron, optimum/neuron/cache/cleanup.py.
    """

    locks: list[pathlib.Path]
    failures: list[pathlib.Path]
    doubt: str

    def __str__(self) -> str:
        return f"locks of killed compiles: {len(self.locks)}, failed compiles: {len(self.failures)}"


def leftovers(folder: pathlib.Path | None, *, processes: pathlib.Path = PROCESSES) -> Leftovers | None:
    """Returns the leftovers in the folder of neuronx-cc's cache, or None."""
    entries = list(folder.glob("neuronxcc-*/MODULE_*")) if folder else []
    locks = [lock for entry in entries for lock in entry.glob("*.lock")]
    failures = [one for one in entries if (one / "model.log").exists() and not (one / "model.neff").exists()]
    if not locks and not failures:
        return None
    kind, doubt = _file_system(entries[0], processes), ""
    if kind not in _LOCAL:
        doubt = f"other machines may compile there (file system: {kind or 'unknown'})"
    elif any(lock.stat().st_uid != os.getuid() for lock in locks):  # whose processes this user cannot look into
        doubt = "another user owns a lock"
    else:
        doubt = next((f"process {pid} may compile ({command})" for pid, command in _compiling(processes)), "")
    return Leftovers(locks, failures, doubt)


def remove_leftovers(folder: pathlib.Path | None, *, processes: pathlib.Path = PROCESSES) -> list[str]:
    """Removes leftovers that no process can use; returns what was done, in at most one line."""
    found = leftovers(folder, processes=processes)
    if found is None:
        return []
    if found.doubt:
        return [f"compiler cache   {found}, kept: {found.doubt}. {how_to_remove(folder)}"]
    for lock in found.locks:
        lock.unlink(missing_ok=True)
    for failure in found.failures:
        shutil.rmtree(failure, ignore_errors=True)
    return [f"compiler cache   {found}, removed from {folder}"]


def how_to_remove(folder: pathlib.Path | None) -> str:
    """Returns when to remove locks, and the command."""
    return f"If compiles wait and no neuronx-cc runs: find {folder} -name '*.lock' -delete"


def _compiling(processes: pathlib.Path) -> Iterator[tuple[int, str]]:
    """Yields (id, command) of other processes that run the compiler, or have loaded the plugin that starts it."""
    for path, command in _others(processes):
        maps = b""
        with contextlib.suppress(OSError):
            maps = (path / "maps").read_bytes()
        if b"libneuronpjrt" in maps or any(word in command for word in _COMPILERS):
            yield int(path.name), command


def holders(machine: Machine, *, processes: pathlib.Path = PROCESSES) -> Iterator[tuple[int, str]]:
    """Yields (id, command) of other processes with open Neuron devices, as far as this user may see them."""
    for path, command in _others(processes):
        with contextlib.suppress(OSError):
            if any(os.readlink(one).startswith(f"{machine.devices}/neuron") for one in (path / "fd").iterdir()):
                yield int(path.name), command


def _others(processes: pathlib.Path) -> Iterator[tuple[pathlib.Path, str]]:
    """Yields (folder, start of the command line) of all processes but this one."""
    for path in processes.glob("[0-9]*"):
        with contextlib.suppress(OSError):
            command = (path / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            if int(path.name) != os.getpid():
                yield path, command[:100].strip()


def _file_system(path: pathlib.Path, processes: pathlib.Path) -> str:
    """Returns the type of the file system that holds a path, as the kernel names it; "" if unknown."""
    found = (0, "")
    with contextlib.suppress(OSError):
        for line in (processes / "self" / "mounts").read_text().splitlines():
            mount, kind = line.split()[1:3]
            if path.resolve().is_relative_to(mount):
                found = max(found, (len(mount), kind))
    return found[1]


def is_taken(port: int) -> bool:
    """Returns whether a server cannot bind a port: a process listens, or the kernel keeps it after a killed run."""
    with socket.socket() as server:  # without SO_REUSEADDR, as Neuron's runtime binds
        try:
            server.bind(("", port))
        except OSError as error:
            return error.errno == errno.EADDRINUSE
    return False


def wait_for_former_run(
    machine: Machine | None,
    port: int,
    *,
    say: Callable[[str], object],
    timeout_s: float = _RELEASE_S,
    period_s: float = 1.0,
    processes: pathlib.Path = PROCESSES,
) -> None:
    """Returns once no process holds the devices of `machine` and `port` is free, or after a time, and says so.

    The runtime would fail at once. `machine` is None where others may use part of the devices, `port` 0 for none.
    """
    until, is_waiting = time.monotonic() + timeout_s, False
    while obstacle := in_use(machine, port, processes=processes):
        if time.monotonic() >= until:
            say(f"start            {obstacle}, still after {timeout_s:g} s: the run may fail")
            return
        if not is_waiting:
            say(f"start            waits up to {timeout_s:g} s: {obstacle}")
        is_waiting = True
        time.sleep(period_s)


def in_use(machine: Machine | None, port: int, *, processes: pathlib.Path = PROCESSES) -> str:
    """Returns who holds the devices of a machine, or that a port is taken; "" if nothing is."""
    for pid, command in holders(machine, processes=processes) if machine else ():
        return f"process {pid} holds NeuronCores ({command})"
    return f"port {port} of Neuron's collectives is taken" if port and is_taken(port) else ""
