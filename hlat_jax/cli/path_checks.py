"""Checks the paths of a command without JAX, and so before the seconds that its import takes."""

from __future__ import annotations

import pathlib
import re

from hlat_jax.facts.local_paths import local_path


def check_file(path: str, *, key: str, advice: str = "") -> None:
    """Raises ValueError with `advice` unless there is a file at `path`, the value of the key `key`."""
    if not local_path(path, key=key).is_file():
        raise ValueError(f"{key}={path} is not a file (looked from {pathlib.Path.cwd()}).{advice}")


def check_folder(path: str, *, key: str) -> None:
    """Raises ValueError unless there is a folder at `path`, the value of the flag or config key `key`."""
    if not local_path(path, key=key).is_dir():
        raise ValueError(f"{key}={path} is not a folder (looked from {pathlib.Path.cwd()}).")


def check_new_folder(path: pathlib.Path, *, key: str) -> None:
    """Raises ValueError if `path`, the value of the flag `key`, exists and is not an empty folder."""
    if path.exists() and not (path.is_dir() and not any(path.iterdir())):
        raise ValueError(f"{key}={path} exists already. Give another folder, or remove it.")


def fetch_first(path: str, *, options: str = "") -> str:
    """Returns advice with a download command if a path looks like a name of the Hugging Face hub, else "".

    Such a path is ORG/NAME without a folder ORG in the working directory. `options` go to `hf download`.
    """
    here = str(pathlib.Path.cwd())
    name = path.removeprefix(f"{here}/")  # a key of the config may have been made absolute
    looks_like_name = re.fullmatch(r"[A-Za-z0-9][\w-]*/[\w.-]+", name) and not pathlib.Path(name).suffix[1:].isalpha()
    organization, _, last = name.partition("/")
    if not looks_like_name or organization == "runs" or pathlib.Path(organization).exists():
        return ""
    return (
        f" Names of the Hugging Face hub are not fetched, run `hf download {name}{options} --local-dir {last}` first."
    )
