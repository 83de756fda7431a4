"""The programs of a run: which they are, how they are compiled, and the record of it in the run folder.

All of them are compiled ahead, for the shapes that the config gives, so a run cannot come to a new one: an argument of
another shape is an error. What the record is compared with, and how a difference is explained, is in
`neuron.changes`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import json
import pathlib
import time
from collections.abc import Callable, Iterator
from importlib import metadata
from typing import Any

import jax

from hlat_jax.byte_sizes import format_bytes
from hlat_jax.config import Config
from hlat_jax.generate.decoding import decode_arguments, make_decode, make_prefill, prefill_arguments
from hlat_jax.generate.generator import Programs, sample_shape
from hlat_jax.neuron.fingerprint import fingerprint
from hlat_jax.parallel import xla_options
from hlat_jax.parallel.sharding import Layout
from hlat_jax.plan.report import short_plan
from hlat_jax.run.machine import device_memory
from hlat_jax.step import (
    abstract_state,
    init_arguments,
    make_eval_step,
    make_init,
    make_norms,
    step_arguments,
    traced_step,
)
from hlat_jax.store.atomic_files import read_json, write_whole

RECORD_FILE = "programs.json"
GENERATION = ("prefill", "decode")
_PACKAGE = pathlib.Path(__file__).resolve().parent
_LIBRARIES = ("jax", "jaxlib", "flax", "optax")
# What an entry of the record must have to be compared with.
_COMPARED = {"sha256", "cache", "platform", "mesh", "config", "libraries", "code"}
_CACHE_HITS = "/jax/compilation_cache/cache_hits"


def programs_of_run(config: Config) -> list[str]:
    """Returns the names of the programs that training compiles.

    Reading data, writing files and drawing curves happen on the host and compile nothing.
    """
    found = ["train", "init", "norms"]
    found += ["eval"] if config.data.validation else []
    return found + (list(GENERATION) if config.train.sample_prompt else [])


def named_programs(config: Config, word: str) -> list[str]:
    """Returns the programs that a command means by a word: "all" those of a run, "generate" generation's, or a name."""
    if word == "all":
        return programs_of_run(config)
    return list(GENERATION) if word == "generate" else [word]


def traced_programs(config: Config, layout: Layout) -> dict[str, Callable[[], Any]]:
    """Returns what traces each program, by name, whether a run of the config compiles it or not.

    The shape of generation is that of the run's samples.
    """
    makers = {"train": traced_step, "init": _init, "norms": _norms}
    makers |= {"eval": _eval, "prefill": _prefill, "decode": _decode}
    return {name: functools.partial(make, config, layout) for name, make in makers.items()}


class Compilations:
    """Compiles the programs of a run, and keeps what each of them is and cost."""

    def __init__(self, config: Config, layout: Layout):
        self._programs = traced_programs(config, layout)
        self._options = xla_options.compiler_options(layout)
        self._around = surroundings(config, layout.platform, layout.degrees)
        self._entries: dict[str, dict[str, Any]] = {}

    def compiled(self, name: str, *, traced: Any = None) -> Any:
        """Returns a program of `traced_programs`, compiled; `traced`: its trace, where there is one already."""
        began = time.monotonic()
        lowered = (self._programs[name]() if traced is None else traced).lower()
        found = fingerprint(lowered)
        with _cache_hits() as hits:
            program = lowered.compile(compiler_options=self._options or None)
        spent = {"seconds": round(time.monotonic() - began, 3), "from_cache": bool(hits)}
        spent["cache"] = jax.config.jax_compilation_cache_dir or ""
        self._entries[name] = dataclasses.asdict(found) | spent | self._around
        return program

    def write(self, workdir: pathlib.Path) -> None:
        """Brings the record in a run folder up to date; a program not compiled this time keeps its entry."""
        whole = recorded(workdir) | self._entries
        write_whole(workdir / RECORD_FILE, (json.dumps(whole, indent=1) + "\n").encode())


def compiled_step(config: Config, layout: Layout, compilations: Compilations) -> Any:
    """Returns the training step, and prints what it needs before and after it is compiled."""
    began = time.monotonic()
    traced = traced_step(config, layout)
    memory = device_memory(layout.mesh.local_devices[0])
    for line in short_plan(config, layout, traced=traced, budget=memory):
        print(line)
    compiled = compilations.compiled("train", traced=traced)
    temporary = getattr(compiled.memory_analysis(), "temp_size_in_bytes", 0)
    print(
        f"compiled         {time.monotonic() - began:.1f} s; the step needs {format_bytes(temporary)} beside the state"
    )
    return compiled


def compiled_sampler(config: Config, layout: Layout, compilations: Compilations) -> Programs:
    """Returns the two programs of a run's samples."""
    return Programs(compilations.compiled("prefill"), compilations.compiled("decode"), sample_shape(config, layout))


def recorded(workdir: pathlib.Path) -> dict[str, dict[str, Any]]:
    """Returns the record of a run folder by program; empty where none was compiled, or what is there is no record."""
    try:
        found = read_json(workdir / RECORD_FILE)
    except (OSError, ValueError):
        return {}
    return {name: entry for name, entry in found.items() if isinstance(entry, dict) and entry.keys() >= _COMPARED}


def surroundings(config: Config, platform: str, degrees: dict[str, int]) -> dict[str, Any]:
    """Returns all that a program follows from, as JSON: platform, mesh, config, libraries, and our code by file."""
    return {
        "platform": platform,
        "mesh": degrees,
        "config": config.to_dict(),
        "libraries": {name: metadata.version(name) for name in _LIBRARIES},
        "code": {
            path.relative_to(_PACKAGE).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()[:16]
            for path in sorted(_PACKAGE.rglob("*.py"))
        },
    }


@contextlib.contextmanager
def _cache_hits() -> Iterator[list[str]]:
    """Gives a list with an entry for each program that JAX's cache hands this process meanwhile."""
    hits: list[str] = []

    def heard(event: str, **_: Any) -> None:
        if event == _CACHE_HITS:
            hits.append(event)

    jax.monitoring.register_event_listener(heard)
    try:
        yield hits
    finally:
        jax.monitoring.unregister_event_listener(heard)


def _init(config: Config, layout: Layout) -> Any:
    return make_init(config, layout).trace(*init_arguments(config))


def _norms(config: Config, layout: Layout) -> Any:
    return make_norms(config, layout).trace(abstract_state(config, layout))


def _eval(config: Config, layout: Layout) -> Any:
    state, batch, _ = step_arguments(config, layout)
    return make_eval_step(config, layout).trace(state["params"], batch)


def _prefill(config: Config, layout: Layout) -> Any:
    shape, params = sample_shape(config, layout), abstract_state(config, layout)["params"]
    return make_prefill(config.model, layout, slots=shape.slots).trace(params, *prefill_arguments(layout, shape))


def _decode(config: Config, layout: Layout) -> Any:
    shape, params = sample_shape(config, layout), abstract_state(config, layout)["params"]
    arguments = decode_arguments(config.model, layout, dtype=params["embed"].dtype, shape=shape)
    return make_decode(config.model, layout).trace(params, *arguments)
