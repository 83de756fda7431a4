"""Why a program differs from the one that the last run compiled: lowered again with one change at a time.

A difference between two configs is a reason only if it alone changes the fingerprint, so a new learning rate is never
blamed. Where today's code gives another program for the recorded config, the code or the libraries changed it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

from hlat_jax.config import SECTIONS, Config
from hlat_jax.parallel.sharding import MESH_AXES
from hlat_jax.parallel.virtual_devices import planned_layout
from hlat_jax.resolve import resolve
from hlat_jax.run.compilation import traced_programs
from hlat_jax.run.fingerprint import Fingerprint, fingerprint
from hlat_jax.step import make_program

_BATCH = ("data.batch_size", "data.seq_len", "data.packing", "train.num_microbatches")
_LOWERED_AS = {"gpu": "cuda"}  # JAX's name of the platform in lowering
_MAX_FILES = 4


@dataclasses.dataclass(frozen=True)
class Placement:
    """The platform that a program runs on, and the degrees of its mesh by axis."""

    platform: str
    degrees: dict[str, int]

    def __str__(self) -> str:
        return " x ".join(f"{axis} {degree}" for axis, degree in self.degrees.items())


def program(name: str, config: Config, placement: Placement) -> Fingerprint:
    """Returns the fingerprint of a program of `compilation.traced_programs` on virtual devices.

    Raises:
      ValueError: a config that does not fit this mesh.
    """
    parallel = dataclasses.replace(config.parallel, **placement.degrees)
    config = dataclasses.replace(config, parallel=parallel)
    layout = planned_layout(config, math.prod(placement.degrees.values()), platform=placement.platform)
    platform = _LOWERED_AS.get(placement.platform, placement.platform)
    return fingerprint(traced_programs(make_program(config, layout))[name]().lower(lowering_platforms=(platform,)))


def reasons(name: str, *, now: dict[str, Any], before: dict[str, Any]) -> list[str]:
    """Returns a line for each change that made a program differ; empty where it is the same.

    Args:
      name: of the program, in both.
      now: its fingerprint under `sha256`, and what `compilation.surroundings` gives.
      before: likewise, as a run recorded it.
    """
    if now["sha256"] == before["sha256"]:
        return []
    try:
        then = resolve(before["config"])
        again = program(name, then, Placement(before["platform"], before["mesh"])).sha256
    except (ValueError, KeyError) as error:
        return [f"code: today's version cannot build that program ({error})", *_of_code(now, before)]
    found = []
    if again != before["sha256"]:
        found = _of_code(now, before) or ["unknown: the same code, libraries and config gave another program then"]
    if again == now["sha256"]:
        return found
    changes = _changes(now, before)
    alone = [line for line, made in changes if _differs(name, made, again)]
    return found + (alone or [f"{line}, together with the others" for line, _ in changes])


def _differs(name: str, made: Callable[[], tuple[Config, Placement]], again: str) -> bool:
    try:
        return program(name, *made()).sha256 != again
    except (ValueError, KeyError):  # not valid without the other changes
        return True


def _changes(now: dict[str, Any], before: dict[str, Any]) -> list[tuple[str, Callable[[], tuple[Config, Placement]]]]:
    """Returns each difference between the two runs: its line, and the earlier config and placement with it alone."""
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
                found.append((line, _with_one(old, section, key, value, then)))
    return found


def _with_one(tree: dict[str, Any], section: str, key: str, value: Any, placement: Placement) -> Callable:
    changed = tree | {section: tree[section] | {key: value}}
    return lambda: (resolve(changed), placement)


def _line(section: str, key: str, old: Any, new: Any) -> str:
    path = f"{section}.{key}"
    kind = "batch" if path in _BATCH else "mesh" if section == "parallel" else "config"
    return f"{kind}: {path} {old!r} -> {new!r}"


def _of_code(now: dict[str, Any], before: dict[str, Any]) -> list[str]:
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
