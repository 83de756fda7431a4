"""`python -m hlat_jax.neuron sdk-diff OLD NEW --config=NAME`: what another Neuron SDK changes for a run."""

from __future__ import annotations

import dataclasses
import itertools
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from absl import flags

from hlat_jax.cli import flags as flags_lib
from hlat_jax.config import Config
from hlat_jax.data.tokenizer import resolve_with_tokenizer
from hlat_jax.facts import hardware, sdk_releases
from hlat_jax.facts.byte_sizes import format_bytes
from hlat_jax.facts.sdk_releases import PYTHON_PACKAGES, SYSTEM_PACKAGES, Release
from hlat_jax.host.neuron_compiler_flags import Flags, compiler_flags, with_config
from hlat_jax.host.neuron_env import REMOVED
from hlat_jax.host.neuron_topology import Topology, checked, lnc_of
from hlat_jax.weights.init_model import take_checked_model


def main(argv: Sequence[str]) -> int:
    """Prints what changes from one release to another; returns 0."""
    if any(word in ("--help", "-h") for word in argv):
        flags_lib.parse(argv, _define)  # prints and exits
    taken = {place + 1 for place, word in enumerate(argv) if word.startswith("--") and "=" not in word}  # --config 7b
    names = {place: word for place, word in enumerate(argv) if not word.startswith("-") and place not in taken}
    if len(names) != 2:
        known = ", ".join(release.version for release in sdk_releases.RELEASES)
        raise ValueError(f"sdk-diff takes two releases, such as `sdk-diff 2.32 2.33 --config=7b`; known are {known}.")
    old, new = map(sdk_releases.find, names.values())
    mutable, values = flags_lib.parse([word for place, word in enumerate(argv) if place not in names], _define)
    take_checked_model(mutable, given=flags_lib.given_keys(values))
    config = resolve_with_tokenizer(mutable)
    topology = checked(Topology(values.instance, lnc=lnc_of(os.environ)))
    os.environ["JAX_PLATFORMS"] = "cpu"  # leave any accelerator to other processes
    from hlat_jax.neuron.rules import target_of

    target = target_of(topology.instance, lnc=topology.lnc)
    device, step = hardware.DEVICES[target], _training_step(config, target)
    print(f"{config.name} on {topology.instance}: SDK {old.version} ({old.date}) to {new.version} ({new.date})")
    sections = {
        "packages": _packages(old, new),
        "compiler flags whose default moves": _flags(
            old, new, with_config(compiler_flags(topology), config.train.compiler_flags, topology)
        ),
        "environment variables without effect in both": _variables(os.environ),
        "device memory": _memory(old, new, step=step, device=device, lnc=topology.lnc),
        "faults": itertools.chain(_faults(old, new), _open_faults(config, step)),
        "kernels": _kernels(old, new, config),
        "not known": iter(dict.fromkeys(old.open_questions + new.open_questions) if new != old else ()),
    }
    for title, lines in sections.items():
        print("\n".join([f"\n{title}", *(f"  {line}" for line in list(lines) or ["no change known"])]))
    print("\nFrom the release notes and issues of AWS Neuron; nothing here has been run on a device.")
    return 0


def _packages(old: Release, new: Release) -> Iterator[str]:
    for name in (*PYTHON_PACKAGES, *SYSTEM_PACKAGES):
        if old.packages[name] != new.packages[name]:
            yield f"{name:<24}{old.packages[name]} -> {new.packages[name]}"
    rows = {"JAX": (old.jax, new.jax), "Python": (sdk_releases.pythons(old), sdk_releases.pythons(new))}
    rows |= {"operating systems": (", ".join(old.systems), ", ".join(new.systems))}
    rows |= {"container images": (old.container_os, new.container_os)}
    for name, (before, after) in rows.items():
        if before != after:
            yield f"{name:<24}{before} -> {after}"


def _flags(old: Release, new: Release, ours: Flags) -> Iterator[str]:
    for name, before in old.flag_defaults.items():
        after = new.flag_defaults[name]
        if before != after:
            yield f"{name}: {before} -> {after}"
            passes = f"passes {name}={ours[name]}: nothing changes" if name in ours else f"does not pass {name}"
            yield f"    this run {passes}" + ("" if name in ours else ", which is for trn2 and later only")


def _variables(environ: Mapping[str, str]) -> Iterator[str]:
    found = [f"{name} is set here: it is {instead}" for name, instead in REMOVED.items() if environ.get(name)]
    yield from found or [f"none of {', '.join(REMOVED)} is set here"]


def _memory(old: Release, new: Release, *, step: _TrainingStep, device: hardware.Device, lnc: int) -> Iterator[str]:
    more = (new.reserved_bytes_per_core - old.reserved_bytes_per_core) * lnc
    if not more:
        return
    counted = sdk_releases.RECOMMENDED.reserved_bytes_per_core  # in the table of devices already
    free = device.memory_bytes - device.reserved_bytes - (new.reserved_bytes_per_core - counted) * lnc
    yield f"the runtime takes {format_bytes(abs(more))} {'more' if more > 0 else 'less'} of each device"
    fits = "fits" if step.planned_bytes <= free else "DOES NOT FIT: see `python -m hlat_jax.plan` for other degrees"
    yield f"the step is planned with {format_bytes(step.planned_bytes)} of {format_bytes(free)}: {fits}"


@dataclasses.dataclass(frozen=True)
class _TrainingStep:
    """What is known of a config's step: the planned bytes of a device, and the lint's findings."""

    planned_bytes: int
    findings: Sequence[Any]


def _training_step(config: Config, target: str) -> _TrainingStep:
    from hlat_jax.neuron import programs
    from hlat_jax.passes.products import live_jaxpr
    from hlat_jax.plan.memory import device_bytes
    from hlat_jax.program import make_program
    from hlat_jax.run.compilation import traced_programs

    count = programs.num_devices(config, target=target)
    program = make_program(config, programs.layout_for_neuron(config, count, target=target))
    traced = traced_programs(program)["train"]()
    found = programs.findings("train", traced, program=program, target=target, operators=[])
    return _TrainingStep(device_bytes(program, jaxpr=live_jaxpr(traced)).total, found)


def _faults(old: Release, new: Release) -> Iterator[str]:
    def has(fault: sdk_releases.Fault, release: Release) -> bool:
        at = sdk_releases.numbers(release.version)
        return sdk_releases.numbers(fault.since) <= at and (not fault.fixed or at < sdk_releases.numbers(fault.fixed))

    words = {(False, True): "NEW", (True, False): "fixed", (True, True): "in both"}
    first, last = sorted((old.date, new.date))
    for fault in sdk_releases.FAULTS:
        word = words.get((has(fault, old), has(fault, new)))
        if word == "fixed" and new.date < old.date:
            word = f"not known of {new.version}"
        if word is None:
            between = [one for one in sdk_releases.RELEASES if first < one.date < last and has(fault, one)]
            if not between:
                continue
            word = f"only in {between[0].version}, which is between them"
        yield f"{word}: {fault.what} ({fault.source})"
        if word != "fixed":
            yield f"    {fault.instead}"


def _open_faults(config: Config, step: _TrainingStep) -> Iterator[str]:
    """Yields the faults of programs that public threads report for some version, as far as the step has their form."""
    from hlat_jax.neuron.rules import RULES

    known = [rule for rule, one in RULES.items() if one.seen]
    found = {finding.rule: finding for finding in step.findings if finding.rule in known}
    for rule, finding in found.items():
        yield f"possible in both ({RULES[rule].seen}): {rule}, {finding.what} ({finding.source})"
        yield f"    {finding.instead}"
    absent = ", ".join(rule for rule in known if rule not in found)
    yield f"not in the step of {config.name}: the reported patterns {absent} of docs/neuron-lint.md"


def _kernels(old: Release, new: Release, config: Config) -> Iterator[str]:
    if config.model.attention == "nki" and old.packages["nki"] != new.packages["nki"]:
        yield f"model.attention=nki: the kernels are compiled by nki {new.packages['nki']}; run the doctor again"
        for version in sorted({old.packages["nki"], new.packages["nki"]} & sdk_releases.NKI_NOTES.keys()):
            yield from (f"nki {version}: {note}" for note in sdk_releases.NKI_NOTES[version])


def _define(values: flags.FlagValues) -> None:
    about = "Instance type of the run."
    flags.DEFINE_string("instance", "trn1.32xlarge", about, flag_values=values)
