"""Reads paths on this machine, as users give them. file:///a is the path /a, and any other URL is refused.

`pathlib` would fold s3://bucket/run to s3:/bucket/run, a folder of the working directory.
"""

from __future__ import annotations

import os
import pathlib
import re
import shlex

_LOCAL = re.compile(r"file://(localhost(?=/)|(?=[/~]))", re.IGNORECASE)  # what follows is a path
# s3://, simplecache::s3://, s3:/ as pathlib folds it, and HOST@tcp:/ of Lustre; not C:/
_URL = re.compile(r"[^/]*://|\s*([a-z][a-z0-9+.-]*::)*[a-z0-9][a-z0-9+.@-]+:/", re.IGNORECASE)
_BUCKET = re.compile(r"(s3a?|gc?s)://[^/]", re.IGNORECASE)
_WHY = {
    "read": "Only local paths are read here, so copy it to one first",
    "write": "Only local paths are written here, so copy the result afterwards",
    "bucket": "Only s3://BUCKET/FOLDER, gs://BUCKET/FOLDER and local paths are taken here, so copy it to one first",
    "run": "Give a folder on a file system that all nodes see, such as FSx for Lustre (not Mountpoint for S3, as a run "
    "renames and locks files), and copy the run afterwards",
}


def is_bucket(path: str | os.PathLike) -> bool:
    """Returns whether a path is the URL of a folder in an object store."""
    return _BUCKET.match(os.fspath(path)) is not None


def check_local(path: str | os.PathLike, *, key: str = "", use: str = "read") -> str:
    """Returns the text of a path without `file://`.

    Args:
      key: the flag, config key or argument that has the path, for the error.
      use: "read", "write", "run" for a run folder to write, or "bucket" to accept the URL of a bucket too.

    Raises:
      ValueError: the path is a URL.
    """
    text = os.fspath(path)
    if use == "bucket" and is_bucket(text):
        return text
    local = _LOCAL.sub("", text, count=1) if _LOCAL.match(text) else text
    if _URL.match(local) is None:
        return local
    asked = f"{key}={text}" if key else text
    copy = _copy_command(text, is_source=use == "read")
    kind = "is a URL"
    if "://" not in text and copy == ".":  # lustre:/, or the name of a host before :/
        kind += ", or an export that a node mounts (give the folder of the mount)"
    raise ValueError(f"{asked} {kind}. {_WHY[use]}{copy}")


def local_path(path: str | os.PathLike, *, key: str = "", use: str = "read") -> pathlib.Path:
    """Returns a path without `file://`, with `~` expanded. Arguments and errors are the same as for `check_local`."""
    return pathlib.Path(os.path.expanduser(check_local(path, key=key, use=use)))


def _copy_command(url: str, *, is_source: bool) -> str:
    """Returns a colon and the command "aws s3 cp ..." for a URL of S3, else "."."""
    match = re.match(r"\s*s3:/+(.*?)(@\d+)?\s*$", url, re.IGNORECASE | re.DOTALL)  # RUN@STEP of train.branch_from
    if match is None:
        return "."
    bucket = shlex.quote(f"s3://{match[1]}")
    is_file = not match[1].endswith("/") and pathlib.PurePosixPath(match[1]).suffix[1:].isalpha()
    local, flag = ("FILE", "") if is_file else ("FOLDER", "--recursive ")
    return f":\n  aws s3 cp {flag}{bucket} {local}" if is_source else f":\n  aws s3 cp {flag}{local} {bucket}"
