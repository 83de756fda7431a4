"""Chooses the folder in which JAX keeps compiled programs for the next start, before JAX is imported and reads it."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import json
import os
import pathlib
import platform
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, MutableMapping
from typing import Any

FOLDER = "JAX_COMPILATION_CACHE_DIR"
_ENABLED = "JAX_ENABLE_COMPILATION_CACHE"
_OFF = ("0", "n", "no", "f", "false", "off")
_MOST_BYTES = 1 << 30
_LEAST_COMPILE_S = "0.2"  # shorter compilations are done again
_TRIAL = """
import jax, numpy, sys
read = []
jax.monitoring.register_event_listener(lambda name, **_: read.append(name.endswith("/cache_hits")))
total = float(jax.jit(lambda x: (x @ x).sum())(numpy.ones((128, 128), "float32")))
assert total == 2.0**21, f"a small program computes {total}"
assert sys.argv[1] == "write" or any(read), "the program that another process wrote is not found"
"""
# a program of one device, which does not wait for other processes, and runs on the device
_NOT_IN_TRIAL = (
    "NEURON_PJRT_PROCESSES_NUM_DEVICES",
    "NEURON_PJRT_PROCESS_INDEX",
    "NEURON_RT_INSPECT_DEVICE_PROFILE",
    "NEURON_RT_ROOT_COMM_ID",
    "NEURON_RUN_TRIVIAL_COMPUTATION_ON_CPU",
)
_PACKAGES = ("jax", "jaxlib", "jax-neuronx", "libneuronxla", "neuronx-cc")  # write and read compiled programs
_ACCELERATORS = ("neuron0", "nvidiactl", "kfd", "accel0")  # device files of Trainium, NVIDIA, AMD and TPU


def use_default_folder(environ: MutableMapping[str, str]) -> None:
    """Sets the variables of JAX's compilation cache to a folder of this user, bounded in size.

    Changes nothing if a variable names a folder or turns the cache off, or if the folder cannot be written.
    """
    if environ.get(FOLDER) or environ.get(_ENABLED, "1").lower() in _OFF:
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
    """Makes XLA log no C++ errors if a variable names a folder of compiled programs and they are for the CPU.

    For each program that it reads, XLA logs two of its tuning hints as errors, with 2 kB of the CPU's features.
    """
    platforms = environ.get("JAX_PLATFORMS", "")
    is_cpu = platforms == "cpu" or not (platforms or any((devices / name).exists() for name in _ACCELERATORS))
    if environ.get(FOLDER) and is_cpu:
        environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")


def leave_out_faulty(environ: MutableMapping[str, str], *, driver: str = "") -> str:
    """Removes the variable of JAX's cache if the cache does not work on this machine, and returns a line about it.

    The fault is kept in the folder for the next start with the same packages and the same version of the `driver`.
    """
    folder = environ.get(FOLDER)
    if not folder or environ.get(_ENABLED, "1").lower() in _OFF:
        return ""
    packages, kept, fault = (
        installed_versions(_PACKAGES) | {"driver": driver},
        pathlib.Path(folder) / "hlat-trial.json",
        None,
    )
    with contextlib.suppress(OSError, ValueError, LookupError, TypeError):  # a file that another program wrote too
        last = json.loads(kept.read_text())
        fault = last["fault"] if last["packages"] == packages else None
    if fault is None:
        try:
            fault = fault_of_cache(environ)
        except RuntimeError as error:
            return f"compile cache    not tried: {error}"
        if "://" not in folder:
            with contextlib.suppress(OSError):
                kept.parent.mkdir(parents=True, exist_ok=True)
                kept.write_text(json.dumps({"packages": packages, "fault": fault}))
    if not fault:
        return ""
    del environ[FOLDER]
    return f"compile cache    JAX's is left out, because it fails here: {fault}. The compiler's own is used"


def fault_of_cache(environ: Mapping[str, str], *, timeout_s: float = 120.0) -> str:
    """Returns how JAX's cache fails, or "". One process writes a small program, and a second process reads it.

    On jax 0.9.2 with SDK 2.31 each start with it crashed (`RET_CHECK ... has_host_program_shape`), and on jax 0.6.2
    none. Source: xbill9/tpu-jax-inf2, 2 August 2026, inf2.

    Raises:
      RuntimeError: the program fails also without the cache.
    """
    plain = {name: value for name, value in environ.items() if name not in (*_NOT_IN_TRIAL, FOLDER)}
    if not plain.get("NEURON_RT_VISIBLE_CORES"):
        plain["NEURON_RT_NUM_CORES"] = "1"
    always = {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0", "JAX_RAISE_PERSISTENT_CACHE_ERRORS": "true"}
    with tempfile.TemporaryDirectory() as folder:
        cached = plain | always | {FOLDER: folder, _ENABLED: "true"}
        fault = _run_trial("write", cached, timeout_s) or _run_trial("read", cached, timeout_s)
    if fault and (without := _run_trial("write", plain, timeout_s)):
        raise RuntimeError(f"a small program fails without JAX's cache too: {without}")
    return fault


def _run_trial(use: str, environ: Mapping[str, str], timeout_s: float) -> str:
    """Returns how the small program fails in a process, or ""."""
    options: dict[str, Any] = {"capture_output": True, "text": True, "errors": "replace", "timeout": timeout_s}
    try:
        done = subprocess.run([sys.executable, "-c", _TRIAL, use], env=environ, check=False, **options)
    except subprocess.TimeoutExpired:
        return f"no end after {timeout_s:g} s"
    lines = [line.strip() for line in done.stderr.splitlines() if line.strip()] or ["no message"]
    named = [line for line in lines if re.search("RET_CHECK|NCC_|Error|Check failed", line)] or lines
    return f"{named[-1][:200]} (exit code {done.returncode})" if done.returncode else ""


def installed_versions(names: Iterable[str]) -> dict[str, str]:
    """Returns name -> version of the installed packages. `python` stands for the interpreter."""
    found = {}
    for name in names:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = platform.python_version() if name == "python" else importlib.metadata.version(name)
    return found


def describe(folder: str | None, *, platform: str) -> str:
    """Returns the text that a start prints about the folder of JAX's compilation cache, if there is one."""
    if not folder and platform == "neuron" and (compilers := os.environ.get("NEURON_COMPILE_CACHE_URL")):
        return f"only neuronx-cc's, {compilers}"
    if not folder:  # a CPU compiles in seconds
        return "none" + f" (with {FOLDER}=FOLDER the next start does not compile again)" * (platform != "cpu")
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
