"""Compiles the programs of a run ahead of time, and records them in the run folder.

The shapes follow from the config. An argument of another shape is an error and does not compile another program.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import pathlib
import time
from collections.abc import Callable
from typing import Any, TypedDict

import jax

from hlat_jax.facts.byte_sizes import format_bytes
from hlat_jax.generate.decoding import GenerationShape, decode_arguments, make_decode, make_prefill, prefill_arguments
from hlat_jax.generate.generator import Programs, prefill_by, sample_shape
from hlat_jax.host.console import say
from hlat_jax.host.neuron_compiler_flags import compiler_killed
from hlat_jax.parallel import xla_options
from hlat_jax.parallel.digests import PROBE, make_digest
from hlat_jax.program import RunProgram, make_program, programs_of_run, sample_programs, state_bytes
from hlat_jax.run.digests import Recompute, array_names
from hlat_jax.run.machine import device_memory
from hlat_jax.run.optional import short_plan
from hlat_jax.store.atomic_files import write_json
from hlat_jax.store.typed_json import read_json

RECORD_FILE = "programs.json"


class _Entry(TypedDict):
    """What an entry of the record must have."""

    sha256: str
    platform: str


def fingerprint(lowered: Any) -> str:
    """Returns a hash of the StableHLO of `jax.jit(fn).lower(...)`, 16 hexadecimal digits.

    Source locations, compiler flags and versions are not part of it.
    """
    text = lowered.compiler_ir("stablehlo").operation.get_asm(enable_debug_info=False)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def named_programs(program: RunProgram, word: str) -> list[str]:
    """Returns names of programs. "all" stands for all programs of a run, "generate" for prefill and decode."""
    if word == "all":
        return programs_of_run(program)
    return ["prefill", "decode"] if word == "generate" else [word]


def traced_programs(program: RunProgram) -> dict[str, Callable[[], Any]]:
    """Returns name -> function that traces the program, including those that this run does not compile.

    The shapes of generation are the shapes of the run's samples.
    """
    config, layout = program.config, program.layout
    state, *_ = program.step_arguments
    params, shape, step = state["params"], sample_shape(config, layout), program.training.microbatch_step
    names = () if step is None else step.programs

    def prefill() -> Any:
        arguments = prefill_arguments(layout, shape)
        return make_prefill(config.model, layout, slots=shape.slots).trace(params, *arguments)

    def digest_sums() -> Any:
        kept = program.microbatch_arguments["update"][1]["kept"]
        shardings = jax.tree.map(lambda leaf: leaf.sharding, kept)
        return jax.jit(make_digest(layout.mesh, shardings)).trace(kept, PROBE)

    def decode() -> Any:
        return make_decode(config.model, layout).trace(params, *_decode_arguments(program)[0])

    return {
        "train": program.trace_step,
        **{name: functools.partial(program.trace_microbatch_step, name) for name in names},
        **({} if program.inits_on_host else {"init": lambda: program.init.trace(program.seed)}),
        "norms": lambda: program.norms.trace(state),
        "digest": lambda: program.digest.trace(state, PROBE),
        "digest_sums": digest_sums,
        "eval": program.trace_eval_step,
        "prefill": prefill,
        "decode": decode,
    }


class Compilations:
    """Compiles the programs of a run, and records their fingerprints and compile times."""

    def __init__(self, program: RunProgram, *, beside: Compilations | None = None):
        """Keeps the record of `beside`, which has compiled other programs of this run, in common with it."""
        self.program = program
        self._programs = traced_programs(program)
        self._options = xla_options.compiler_options(program.layout)
        self._entries: dict[str, dict[str, Any]] = {} if beside is None else beside._entries

    def compile(self, name: str) -> Any:
        """Returns a program of `traced_programs`, compiled. Raises OSError if neuronx-cc was killed."""
        began = time.monotonic()
        lowered = self._programs[name]().lower()
        sha256 = fingerprint(lowered)
        try:
            program = lowered.compile(compiler_options=self._options or None)
        except jax.errors.JaxRuntimeError as error:
            if reason := compiler_killed(str(error)):
                raise OSError(f"the program {name!r} was not compiled, as {reason}.") from error
            raise
        self._entries[name] = {
            "sha256": sha256,
            "platform": self.program.layout.platform,
            "seconds": round(time.monotonic() - began, 3),
        }
        return program

    def write(self, workdir: pathlib.Path) -> None:
        """Updates the record in a run folder. Programs that were not compiled this time keep their entries."""
        whole = read_record(workdir) | self._entries
        write_json(workdir / RECORD_FILE, whole)


def compiled_step(compilations: Compilations) -> Any:
    """Returns the compiled training step. Prints the estimated memory before and the actual memory afterwards."""
    began, program = time.monotonic(), compilations.program
    for line in short_plan(program, budget=device_memory(program.layout.mesh.local_devices[0])):
        print(line)
    temporary = 0
    if program.accumulate == "programs":
        step = program.training.microbatch_step
        parts = {name: compilations.compile(name) for name in step.programs}
        compiled, temporary = step.with_programs(parts), state_bytes(program.microbatch_arguments["update"][1])
    else:
        compiled = compilations.compile("train")
        parts = {"train": compiled}
    temporary += max(getattr(part.memory_analysis(), "temp_size_in_bytes", 0) for part in parts.values())
    needs = f"the step needs {format_bytes(temporary)} in addition to the state"
    say("compiled", f"{time.monotonic() - began:.1f} s; {needs}")
    return compiled


def compiled_recompute(compilations: Compilations, train_step: Any) -> Recompute:
    """Returns what computes a microbatch again: of the step's own programs, or else of one row on each device."""
    program = compilations.program
    if program.accumulate != "programs":
        train = dataclasses.replace(program.config.train, accumulate="programs", num_microbatches=-1)
        program = make_program(dataclasses.replace(program.config, train=train), program.layout)
        compilations, train_step = Compilations(program, beside=compilations), program.microbatch_step
        parts = {name: compilations.compile(name) for name in ("start", *train_step.ticks)}
        train_step = train_step.with_programs({**train_step.programs, **parts})
    digest, kept = compilations.compile("digest_sums"), program.microbatch_arguments["update"][1]["kept"]
    return Recompute(train_step, digest, array_names(kept), program.shard)


def compiled_sampler(compilations: Compilations) -> Programs:
    """Returns the compiled programs of the run's samples, see `program.sample_programs`."""
    (cache, _), shape = _decode_arguments(compilations.program)
    decode = compilations.compile("decode")
    has_prefill = "prefill" in sample_programs(compilations.program.config.train.sample_prompt)
    return Programs(compilations.compile("prefill") if has_prefill else prefill_by(decode, cache), decode, shape)


def _decode_arguments(program: RunProgram) -> tuple[tuple[Any, Any], GenerationShape]:
    """Returns the arguments of `decode` after the parameters, abstract, and the shape of the run's samples."""
    config, layout = program.config, program.layout
    shape, dtype = sample_shape(config, layout), program.step_arguments[0]["params"]["embed"].dtype
    return decode_arguments(config.model, layout, dtype=dtype, shape=shape), shape


def read_record(workdir: pathlib.Path) -> dict[str, dict[str, Any]]:
    """Returns the record of a run folder by program, empty without a valid record."""
    with contextlib.suppress(OSError, ValueError):
        return read_json(workdir / RECORD_FILE, kind=dict[str, _Entry])
    return {}
