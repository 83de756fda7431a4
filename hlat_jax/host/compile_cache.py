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


def prepare(environ: MutableMapping[str, str], *, is_alone: bool) -> None:
    """Sets the variables of JAX's compilation cache for a process that uses no Neuron device.

    A process that `is_alone` gets a folder of this user, bounded in size, if no variable names a folder and it can be
    written. Processes of one job would write the same entries; their launcher may name a folder for each. Changes
    nothing if a variable turns the cache off.
    """
    if environ.get(_ENABLED, "1").lower() in ("0", "n", "no", "f", "false", "off"):
        return
    if is_alone and not environ.get(FOLDER):
        _use_default_folder(environ)
    if environ.get(FOLDER) and (is_alone or environ.get("JAX_PLATFORMS") == "cpu"):
        # for each program that it reads on CPU, XLA logs two of its own tuning hints as errors, with 3 kB of features
        environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")


def describe(folder: str | None, *, platform: str) -> str:
    """Returns what a start prints about the folder of JAX's compilation cache, if there is one."""
    if not folder:  # on CPU a program compiles in seconds
        return "none" + f"; with {FOLDER}=FOLDER the next start does not compile again" * (platform != "cpu")
    home = os.path.expanduser("~")
    return f"~{folder.removeprefix(home)}" if folder.startswith(f"{home}/") else folder


def _use_default_folder(environ: MutableMapping[str, str]) -> None:
    with contextlib.suppress(OSError, RuntimeError):  # RuntimeError: this user has no home
        caches = pathlib.Path(environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache")
        folder = caches / "hlat_jax" / "compiled" / _processor()
        folder.mkdir(parents=True, exist_ok=True)
        if os.access(folder, os.W_OK):
            _remove_oldest(folder)
            environ[FOLDER] = str(folder.absolute())
            environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", _LEAST_COMPILE_S)


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
