"""The copy of the tokenizer in a run folder, so that the folder can be moved: `<run folder>/tokenizer/`."""

from __future__ import annotations

import hashlib
import os
import pathlib

from hlat_jax.data.path_checks import recorded_value
from hlat_jax.data.tokenizer_json import EOS_FILES
from hlat_jax.store.atomic_files import write_whole

FOLDER = "tokenizer"
_NAMES = ("tokenizer.model", "tokenizer.json")


def keep_tokenizer(path: pathlib.Path, workdir: pathlib.Path) -> None:
    """Copies the tokenizer at `path` into a run folder, unless the same one is there."""
    if find_kept(workdir, sha256=file_sha256(path)) is not None:
        return
    content, is_json = path.read_bytes(), path.suffix == ".json"  # read before a file of that name is removed
    folder = workdir / FOLDER
    folder.mkdir(exist_ok=True)
    for name in (*_NAMES, *EOS_FILES):
        (folder / name).unlink(missing_ok=True)  # of another tokenizer, by a run that had no checkpoint
    for beside in (path.with_name(name) for name in EOS_FILES if is_json):
        if beside.is_file():
            write_whole(folder / beside.name, beside.read_bytes())
    write_whole(folder / _NAMES[is_json], content)  # last: where it is, the others are


def file_sha256(path: pathlib.Path) -> str:
    """Returns the checksum of a tokenizer by which runs tell it from others."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def find_kept(workdir: pathlib.Path, *, sha256: str) -> pathlib.Path | None:
    """Returns the tokenizer that a run folder keeps; None without one of this checksum, where "" stands for any."""
    for path in (workdir / FOLDER / name for name in _NAMES):
        if path.is_file() and sha256 in ("", file_sha256(path)):
            return path
    return None


def resolve_tokenizer_path(tokenizer: str, workdir: pathlib.Path) -> str:
    """Returns `data.tokenizer`, or, if that file is gone since the run in `workdir` opened it, the path of its copy."""
    if not tokenizer or tokenizer.startswith("package:") or pathlib.Path(tokenizer).expanduser().is_file():
        return tokenizer
    kept, opened = find_kept(workdir, sha256=""), recorded_value(workdir, "data.tokenizer")
    # the copy of any other file would be another tokenizer than the one that is asked for
    return str(kept.absolute()) if kept is not None and opened == os.path.abspath(tokenizer) else tokenizer
