"""Clears obstacles to a start on a Trainium machine, such as a missing plugin and leftovers of killed runs.

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
from collections.abc import Callable, Mapping, MutableMapping

from hlat_jax.host import compile_cache
from hlat_jax.host.neuron_topology import COLLECTIVES_PORT, Machine, Topology

PROCESSES = pathlib.Path("/proc")
REMOVE = "If compiles wait and no neuronx-cc runs, delete the files *.lock"
_COMPILERS = ("neuronx-cc", "walrus_driver")  # names of programs
_LOCAL = ("btrfs", "ext2", "ext3", "ext4", "overlay", "tmpfs", "xfs")  # file systems of one machine alone


def missing_plugin() -> str:
    """Returns the packages that JAX lacks to find Neuron devices, in words, or "" if it has them."""
    needed = ("jax-neuronx", "libneuronxla")
    missing = [name for name in needed if name not in compile_cache.installed_versions(needed)]
    return f"not installed in {sys.executable}: {', '.join(missing)}" if missing else ""


def clear_way(
    environ: MutableMapping[str, str], topology: Topology, machine: Machine, *, say: Callable[[str], object] = print
) -> None:
    """Waits for an earlier run to end, makes the caches of compiled programs usable, and prints the obstacles.

    Removes JAX's cache from `environ` if it does not work.

    Raises:
      ValueError: this Python has no plugin for Neuron devices. JAX would print a traceback.
    """
    if missing := missing_plugin():
        raise ValueError(f"{missing}. Install the extra `neuron`, or set PYTHON to an interpreter that has it.")
    # with part of the cores, another process may train on the others
    whole = not topology.cores and not environ.get("NEURON_RT_VISIBLE_CORES")
    port = COLLECTIVES_PORT if topology.nodes > 1 and topology.rank == 0 else 0
    wait_for_former_run(machine if whole else None, port, say=say)
    remove_leftovers(compiler_cache(environ), say=say)
    if line := compile_cache.leave_out_faulty(environ, driver=machine.driver_version):
        say(line)


def compiler_cache(environ: Mapping[str, str]) -> pathlib.Path | None:
    """Returns the folder of neuronx-cc's own cache, or None if it is not a folder."""
    url = environ.get("NEURON_COMPILE_CACHE_URL", "").removeprefix("file://")
    return pathlib.Path(url) if url and "://" not in url else None


def leftovers(folder: pathlib.Path | None, *, processes: pathlib.Path = PROCESSES) -> tuple[list[pathlib.Path], str]:
    """Returns (lock files of killed compiles and folders of failed ones, why a process may still use them, or "").

    Each process that needs a locked program waits for ever ("Another process must be compiling"). A failure is raised
    again at every start. Source of the names: huggingface/optimum-neuron, optimum/neuron/cache/cleanup.py.
    """
    entries = list(folder.glob("neuronxcc-*/MODULE_*")) if folder else []
    locks = [lock for entry in entries for lock in entry.glob("*.lock")]
    failures = [entry for entry in entries if (entry / "model.log").exists() and not (entry / "model.neff").exists()]
    if not locks and not failures:
        return [], ""
    kind = _file_system(entries[0], processes)
    if kind not in _LOCAL:
        return locks + failures, f"other machines may compile there (file system: {kind or 'unknown'})"
    if any(lock.stat().st_uid != os.getuid() for lock in locks):  # whose processes this user cannot look into
        return locks + failures, "another user owns a lock"
    compiler = _find_process(
        processes,
        lambda path, command: (
            any(word.rpartition("/")[2] in _COMPILERS for word in command.split()[:2])  # the second, of an interpreter
            or b"libneuronpjrt" in (path / "maps").read_bytes()
        ),  # the plugin, which starts it
    )
    return locks + failures, f"{compiler} may compile" if compiler else ""


def remove_leftovers(
    folder: pathlib.Path | None, *, say: Callable[[str], object], processes: pathlib.Path = PROCESSES
) -> None:
    """Removes leftovers that no process can use, and prints a line about them."""
    found, doubt = leftovers(folder, processes=processes)
    if not found:
        return
    say(f"compiler cache   {'kept' if doubt else 'removed'} {describe(found)}{doubt and f': {doubt}. {REMOVE}'}")
    for path in () if doubt else found:
        path.unlink(missing_ok=True) if path.is_file() else shutil.rmtree(path, ignore_errors=True)


def describe(found: list[pathlib.Path]) -> str:
    """Returns leftovers in words."""
    return f"{len(found)} leftovers of killed or failed compiles, such as {found[0]}"


def _find_process(processes: pathlib.Path, is_meant: Callable[[pathlib.Path, str], bool]) -> str:
    """Returns the id and the command of a process, but this one, whose (folder, command line) is meant, or ""."""
    for path in processes.glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended, or belongs to another user
            command = (path / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
            if int(path.name) != os.getpid() and is_meant(path, command):
                return f"process {path.name} ({command[:100]})"
    return ""


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
    """Returns whether a server cannot bind a port, as a process listens, or the kernel keeps it after a killed run."""
    with socket.socket() as server:  # without SO_REUSEADDR, as Neuron's runtime binds
        try:
            server.bind(("", port))
        except OSError as error:
            return error.errno == errno.EADDRINUSE
    return False


def find_obstacle(machine: Machine | None, port: int, *, processes: pathlib.Path = PROCESSES) -> str:
    """Returns the process that holds devices of `machine`, or that `port` is taken, or "". None and 0 skip a check."""
    prefix = f"{machine.devices}/neuron" if machine else ""

    def holds(path: pathlib.Path, command: str) -> bool:
        is_tool = command.partition(" ")[0].rpartition("/")[2].startswith("neuron-")  # neuron-monitor only reads
        return not is_tool and any(os.readlink(opened).startswith(prefix) for opened in (path / "fd").iterdir())

    holder = _find_process(processes, holds) if machine else ""
    if holder:
        return f"{holder} holds NeuronCores"
    return f"port {port} of Neuron's collectives is taken" if port and is_taken(port) else ""


def wait_for_former_run(
    machine: Machine | None,
    port: int,
    *,
    say: Callable[[str], object],
    timeout_s: float = 90.0,  # the kernel keeps the port of a killed run for 60 s
    period_s: float = 1.0,
    processes: pathlib.Path = PROCESSES,
) -> None:
    """Returns if there is no obstacle, or after a time, and prints the obstacle. The runtime would fail at once."""
    until, is_waiting = time.monotonic() + timeout_s, False
    while obstacle := find_obstacle(machine, port, processes=processes):
        if time.monotonic() >= until:
            say(f"start            {obstacle}, still after {timeout_s:g} s, so the run may fail")
            return
        if not is_waiting:
            say(f"start            waits up to {timeout_s:g} s, as {obstacle}")
        is_waiting = True
        time.sleep(period_s)
