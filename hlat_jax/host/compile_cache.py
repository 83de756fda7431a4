"""The folder in which JAX keeps compiled programs for the next start of a run; no JAX, which reads it when imported."""

from __future__ import annotations

import contextlib
import hashlib
import os
import pathlib
import platform
from collections.abc import MutableMapping

FOLDER = "JAX_COMPILATION_CACHE_DIR"
_ENABLED = "JAX_ENABLE_COMPILATION_CACHE"
_MOST_BYTES = 1 << 30
_LEAST_COMPILE_S = "0.2"  # shorter compilations are done again
_ACCELERATORS = ("neuron0", "nvidiactl", "kfd", "accel0")  # device files of Trainium, NVIDIA, AMD and TPU


def use_default_folder(environ: MutableMapping[str, str]) -> None:
    """Sets the variables of JAX's compilation cache to a folder of this user, bounded in size.

    Changes nothing where a variable names a folder or turns the cache off, or where the folder cannot be written.
    """
    if environ.get(FOLDER) or environ.get(_ENABLED, "1").lower() in ("0", "n", "no", "f", "false", "off"):
        return
    with contextlib.suppress(OSError, RuntimeError):  # RuntimeError: this user has no home
        caches = pathlib.Path(environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache")
        folder = caches / "hlat_jax" / "compiled" / _processor()
        folder.mkdir(parents=True, exist_ok=True)
        if os.access(folder, os.W_OK):
            _remove_oldest(folder)
            environ[FOLDER] = str(folder.absolute())
            environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", _LEAST_COMPILE_S)
            environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # as in silence_tuning_hints


def silence_tuning_hints(environ: MutableMapping[str, str], *, devices: pathlib.Path = pathlib.Path("/dev")) -> None:
    """Makes XLA log no errors of C++ if a variable names a folder of compiled programs and they are for the CPU.

    For each program that it reads, XLA logs two of its own tuning hints as errors, with 2 kB of the CPU's features.
    """
    platforms = environ.get("JAX_PLATFORMS", "")
    is_cpu = platforms == "cpu" or not (platforms or any((devices / name).exists() for name in _ACCELERATORS))
    if environ.get(FOLDER) and is_cpu:
        environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")


def describe(folder: str | None, *, platform: str) -> str:
    """Returns what a start prints about the folder of JAX's compilation cache, if there is one."""
    if not folder:  # a CPU compiles in seconds
        return "none" + f"; with {FOLDER}=FOLDER the next start does not compile again" * (platform != "cpu")
    home = os.path.expanduser("~")
    return f"~{folder.removeprefix(home)}" if folder.startswith(f"{home}/") else folder


def _processor() -> str:
    """Returns a name for the kind of CPU: machines that share a home do not all have the same instructions."""
    words = [platform.machine()]
    with contextlib.suppress(OSError):
        lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
        words += sorted({line for line in lines if line.startswith(("model name", "flags", "Features", "CPU part"))})
    return f"{words[0]}-{hashlib.sha256(repr(words).encode()).hexdigest()[:8]}"


def _remove_oldest(folder: pathlib.Path) -> None:
    """Removes the files that were used least recently, until the rest is within the bound."""
    files = []
    for path in folder.iterdir():
        with contextlib.suppress(OSError):  # another process may have removed it
            if path.is_file():
                files.append((path.stat(), path))
    left = sum(stat.st_size for stat, _ in files)
    for stat, path in sorted(files, key=lambda pair: max(pair[0].st_atime, pair[0].st_mtime)):
        if left <= _MOST_BYTES:
            return
        with contextlib.suppress(OSError):
            path.unlink()
            left -= stat.st_size
