"""Keeps a copy of the tokenizer in `<run folder>/tokenizer/`, so that the folder can be moved."""

from __future__ import annotations

import hashlib
import os
import pathlib

from hlat_jax.data.chat_template import TEMPLATE_FILE
from hlat_jax.data.path_checks import recorded_value
from hlat_jax.data.tokenizer_json import EOS_FILES
from hlat_jax.facts.local_paths import local_path
from hlat_jax.store.atomic_files import write_whole

FOLDER = "tokenizer"
_NAMES = ("tokenizer.model", "tokenizer.json")


def keep_tokenizer(path: pathlib.Path, workdir: pathlib.Path) -> None:
    """Copies the tokenizer at `path`, with its chat template and the files that name its tokens, into a run folder."""
    folder, is_json = workdir / FOLDER, path.suffix == ".json"
    folder.mkdir(exist_ok=True)
    beside = EOS_FILES if is_json else EOS_FILES[:2]  # of a native tokenizer those with a template's control tokens
    if path.name == _NAMES[0]:
        beside += _NAMES[1:]  # has its control tokens, see `Tokenizer.encode_with_control_tokens`
    files = {name: path.with_name(name) for name in (*beside, TEMPLATE_FILE)} | {_NAMES[is_json]: path}
    contents = {name: file.read_bytes() for name, file in files.items() if file.is_file()}
    for name in {*_NAMES, *EOS_FILES, TEMPLATE_FILE} - contents.keys():
        (folder / name).unlink(missing_ok=True)  # of another tokenizer, by a run that had no checkpoint
    for name, content in contents.items():  # the tokenizer last: where it is, the others are
        kept = folder / name
        if not kept.is_file() or kept.read_bytes() != content:
            write_whole(kept, content)


def file_sha256(path: pathlib.Path) -> str:
    """Returns the checksum by which runs identify a tokenizer."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def find_kept(workdir: pathlib.Path, *, sha256: str) -> pathlib.Path | None:
    """Returns the tokenizer that a run folder keeps, or None without one of this checksum ("" stands for any)."""
    for path in (workdir / FOLDER / name for name in _NAMES):
        if path.is_file() and sha256 in ("", file_sha256(path)):
            return path
    return None


def resolve_tokenizer_path(tokenizer: str, workdir: pathlib.Path) -> str:
    """Returns `data.tokenizer`, or the path of its copy if the file is gone since the run in `workdir` opened it."""
    if not tokenizer or tokenizer.startswith("package:") or local_path(tokenizer, key="data.tokenizer").is_file():
        return tokenizer
    kept, opened = find_kept(workdir, sha256=""), recorded_value(workdir, "data.tokenizer")
    # the copy of any other file would be another tokenizer than the one that is asked for
    return str(kept.absolute()) if kept is not None and opened == os.path.abspath(tokenizer) else tokenizer
