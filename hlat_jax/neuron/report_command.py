"""`python -m hlat_jax.neuron report --out=FILE.tar.gz --paths=FILE,RUN`: one archive to attach to an issue.

It has the named files, the small files of named run folders, and the versions and the environment of this machine.
Nothing is removed from them: a person looks at the archive before it is attached.
"""

from __future__ import annotations

import importlib.metadata
import io
import json
import os
import pathlib
import platform
import re
import shutil
import subprocess
import tarfile
from collections.abc import Iterator, Sequence

from absl import flags

from hlat_jax.cli import flags as flags_lib
from hlat_jax.host.neuron_env import recorded
from hlat_jax.host.neuron_topology import HERE

# what is taken of a run folder
RUN_FILES = (
    "config.json", "environment.json", "programs.json", "metrics.jsonl", "events.jsonl", "nonfinite.json", "remat.json",
)  # fmt: skip
COMMANDS = (
    "uname -a", "neuron-ls", "neuronx-cc --version", "modinfo neuron", "fi_info -p efa", "free -g",
    "dpkg-query --show *neuron*", "rpm -qa *neuron*",
)  # fmt: skip
LARGEST_BYTES = 2 * 2**20  # of a file: its end is kept


def main(argv: Sequence[str]) -> int:
    """Writes the archive and lists it; returns 0."""
    usage = "Usage: python -m hlat_jax.neuron report --out=FILE.tar.gz [--paths=FILE,RUN_FOLDER]\n"
    values = flags_lib.parse_own(argv, _define, usage=usage)
    if not values.out:
        raise ValueError("--out=FILE is missing; name the archive, such as --out=report.tar.gz.")
    flags_lib.check_output("--out", values.out)
    paths = [pathlib.Path(word) for word in values.paths.split(",") if word]
    for path in paths:
        if not path.exists():
            raise ValueError(f"--paths={values.paths}: there is no {path}; name files and run folders, by commas.")
    with tarfile.open(values.out, "w:gz") as archive:
        for name, content in _members(paths):
            member = tarfile.TarInfo(f"report/{name}")  # without the names of users and machines
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
            print(f"{len(content):>10,}  {name}")
    print(f"{values.out}: nothing has been removed from these files. Look at them before you attach it.")
    return 0


def _members(paths: Sequence[pathlib.Path]) -> Iterator[tuple[str, bytes]]:
    """Yields (name in the archive, content) of everything that goes into it."""
    yield "versions.json", _json(_versions())
    yield "environment.json", _json(recorded(os.environ))
    for command in COMMANDS:
        if (printed := _printed(command.split())) is not None:
            yield f"commands/{re.sub(r'[^A-Za-z0-9]+', '_', command).strip('_')}.txt", printed
    files = [path / name for path in paths if path.is_dir() for name in RUN_FILES if (path / name).is_file()]
    for path in dict.fromkeys([*(path for path in paths if path.is_file()), *files]):
        yield f"files/{path.as_posix().lstrip('./')}", _end_of(path)


def _end_of(path: pathlib.Path) -> bytes:
    """Returns the content of a file, of a larger one its last LARGEST_BYTES."""
    with open(path, "rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - LARGEST_BYTES))
        content = file.read(LARGEST_BYTES)
    note = f"[the last {LARGEST_BYTES:,} of {size:,} bytes]\n" if size > LARGEST_BYTES else ""
    return note.encode() + content


def _versions() -> dict[str, object]:
    packages = {one.metadata["Name"]: one.version for one in importlib.metadata.distributions() if one.metadata["Name"]}
    return {
        "python": platform.python_version(),
        "kernel": platform.release(),
        "instance": HERE.product_name.read_text().strip() if HERE.product_name.is_file() else "",
        "devices": len(list(HERE.devices.glob("neuron[0-9]*"))),
        "packages": dict(sorted(packages.items(), key=lambda item: item[0].lower())),
    }


def _printed(words: Sequence[str]) -> bytes | None:
    """Returns what a command prints; None where it is not installed."""
    path = shutil.which(words[0]) or shutil.which(words[0], path="/opt/aws/neuron/bin:/opt/amazon/efa/bin:/sbin")
    if path is None:
        return None
    try:
        done = subprocess.run([path, *words[1:]], capture_output=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{error}\n".encode()
    return done.stdout + done.stderr


def _json(found: object) -> bytes:
    return f"{json.dumps(found, indent=1)}\n".encode()


def _define(values: flags.FlagValues) -> None:
    flags.DEFINE_string("out", "", "The archive to write, FILE.tar.gz.", flag_values=values)
    about = "Files such as doctor.json, ladder.json and logs, and run folders, by commas."
    flags.DEFINE_string("paths", "", about, flag_values=values)
