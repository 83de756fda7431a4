"""Lists and copies the scripts and manifests that start a job on several nodes, `hlat launch`."""

from __future__ import annotations

import pathlib
import shutil
from collections.abc import Sequence

from absl import flags

from hlat_jax.cli import flags as flags_lib
from hlat_jax.facts.names import nearest

USAGE = """Usage: hlat launch [FILE | --out=FOLDER]

Lists the files that start a job on several nodes, by hand, under Slurm or on EKS. With FILE, such as node.sh, prints
that file. With --out, copies all of them.
"""


def main(argv: Sequence[str]) -> int:
    """Lists, prints or copies the files, and returns the exit code."""
    folder = launch_folder()
    files = {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*")) if path.is_file()}
    if not argv:
        print(*files, sep="\n")
    elif argv[0].startswith("-"):
        values = flags_lib.parse_own(argv, _define, usage=USAGE)
        _copy(files, values.out)
    elif len(argv) > 1:
        raise ValueError(f"unexpected argument {argv[1]!r}. Give one FILE, or --out=FOLDER for all files.")
    elif argv[0] not in files:
        raise ValueError(f"{argv[0]} is not a launch file. {nearest(argv[0], files)}")
    else:
        print(files[argv[0]].read_text(), end="")
    return 0


def launch_folder() -> pathlib.Path:
    """Returns the folder of the files, inside an installed package, or next to it in a checkout."""
    package = pathlib.Path(__file__).resolve().parent.parent
    installed = package / "launch"
    return installed if installed.is_dir() else package.parent / "launch"


def _copy(files: dict[str, pathlib.Path], out: str) -> None:
    if not out or pathlib.Path(out).exists():
        raise ValueError(f"--out={out} {'exists' if out else 'is empty'}. Give the path of a new folder.")
    for name, path in files.items():
        copy = pathlib.Path(out) / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, copy)
        if path.read_bytes().startswith(b"#!"):  # an installer may have dropped the permission
            copy.chmod(0o755)
    print(f"wrote {len(files)} files to {out}")


def _define(values: flags.FlagValues) -> None:
    flags_lib.define_path(values, "out", "New folder for the files. The examples in them name launch.", use="write")


if __name__ == "__main__":
    flags_lib.main(main)
