"""Explains why a program differs from the one that the last run compiled.

The recorded config is lowered again with one change at a time: a difference between the configs is reported only if it
changes the fingerprint by itself, so a new learning rate is never reported. If the recorded config, unchanged, now
lowers to another program, the code or the libraries have changed.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

from hlat_jax.config import SECTIONS, Config
from hlat_jax.parallel.sharding import MESH_AXES
from hlat_jax.parallel.virtual_devices import planned_layout
from hlat_jax.program import make_program
from hlat_jax.resolve import resolve
from hlat_jax.run.compilation import traced_programs
from hlat_jax.run.fingerprint import Fingerprint, fingerprint

_BATCH = ("data.batch_size", "data.seq_len", "data.packing", "train.num_microbatches")
_LOWERED_AS = {"gpu": "cuda"}  # JAX's platform name for lowering
_MAX_FILES = 4


@dataclasses.dataclass(frozen=True)
class Placement:
    """The platform that a program runs on and the degree of each mesh axis."""

    platform: str
    degrees: dict[str, int]

    def __str__(self) -> str:
        return " x ".join(f"{axis} {degree}" for axis, degree in self.degrees.items())


def program_fingerprint(name: str, config: Config, placement: Placement) -> Fingerprint:
    """Returns the fingerprint of one of `compilation.traced_programs`, lowered for virtual devices.

    Raises:
      ValueError: the config does not fit this mesh.
    """
    parallel = dataclasses.replace(config.parallel, **placement.degrees)
    config = dataclasses.replace(config, parallel=parallel)
    layout = planned_layout(config, math.prod(placement.degrees.values()), platform=placement.platform)
    platform = _LOWERED_AS.get(placement.platform, placement.platform)
    return fingerprint(traced_programs(make_program(config, layout))[name]().lower(lowering_platforms=(platform,)))


def reasons(name: str, *, now: dict[str, Any], before: dict[str, Any]) -> list[str]:
    """Returns one line per change that made a program differ; an empty list if it is the same.

    Args:
      name: name of the program.
      now: its fingerprint under `sha256`, and the result of `compilation.surroundings`.
      before: the same, as recorded by the last run.
    """
    if now["sha256"] == before["sha256"]:
        return []
    try:
        old_config = resolve(before["config"])
        relowered = program_fingerprint(name, old_config, Placement(before["platform"], before["mesh"])).sha256
    except (ValueError, KeyError) as error:
        return [f"code: this version cannot build the recorded program ({error})", *_code_changes(now, before)]
    found = []
    if relowered != before["sha256"]:
        found = _code_changes(now, before) or ["unknown: code, libraries and config are the same as recorded"]
    if relowered == now["sha256"]:
        return found
    changes = _run_changes(now, before)
    sufficient = [line for line, build in changes if _differs(name, build, relowered)]
    return found + (sufficient or [f"{line}, together with the other changes" for line, _ in changes])


def _differs(name: str, build: Callable[[], tuple[Config, Placement]], sha256: str) -> bool:
    try:
        return program_fingerprint(name, *build()).sha256 != sha256
    except (ValueError, KeyError):  # invalid without the other changes
        return True


def _run_changes(
    now: dict[str, Any], before: dict[str, Any]
) -> list[tuple[str, Callable[[], tuple[Config, Placement]]]]:
    """Returns (line, function) per difference between the runs; the function applies only it to the earlier run."""
    then, config = Placement(before["platform"], before["mesh"]), resolve(before["config"])
    found: list[tuple[str, Callable]] = []
    if now["platform"] != then.platform:
        line = f"platform: {then.platform} -> {now['platform']}"
        found.append((line, lambda: (config, dataclasses.replace(then, platform=now["platform"]))))
    if now["mesh"] != then.degrees:
        line = f"mesh: {then} -> {Placement('', now['mesh'])}"
        found.append((line, lambda: (config, dataclasses.replace(then, degrees=now["mesh"]))))
    old = config.to_dict()
    for section in SECTIONS:
        for key, value in now["config"][section].items():
            if old[section][key] != value and not (section == "parallel" and key in MESH_AXES):
                line = _line(section, key, old[section][key], value)
                found.append((line, _with_one_change(old, section, key, value, then)))
    return found


def _with_one_change(tree: dict[str, Any], section: str, key: str, value: Any, placement: Placement) -> Callable:
    changed = tree | {section: tree[section] | {key: value}}
    return lambda: (resolve(changed), placement)


def _line(section: str, key: str, old: Any, new: Any) -> str:
    path = f"{section}.{key}"
    kind = "batch" if path in _BATCH else "mesh" if section == "parallel" else "config"
    return f"{kind}: {path} {old!r} -> {new!r}"


def _code_changes(now: dict[str, Any], before: dict[str, Any]) -> list[str]:
    found = []
    libraries = [f"{key} {before['libraries'].get(key)} -> {value}" for key, value in now["libraries"].items()
                 if before["libraries"].get(key) != value]  # fmt: skip
    if libraries:
        found.append(f"code: {', '.join(libraries)}")
    old, new = before["code"], now["code"]
    files = [file for file in sorted(old.keys() | new.keys()) if old.get(file) != new.get(file)]
    if files:
        more = f" and {len(files) - _MAX_FILES} more" if len(files) > _MAX_FILES else ""
        found.append(f"code: {', '.join(files[:_MAX_FILES])}{more}")
    return found
