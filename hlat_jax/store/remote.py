"""Files behind URLs, with fsspec. Each request has a time limit, and is tried again for a limited time."""

from __future__ import annotations

import io
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, BinaryIO, TypeVar

CONNECT_TIMEOUT_S, READ_TIMEOUT_S = 10, 20  # of S3 and HTTP; other clients have their own
# No request is tried again later than this after it began: at a first contact, where most faults are mistakes, and of a
# file that is being read.
OPENING_S, READING_S = 10, 60
_FIRST_WAIT_S, _LONGEST_WAIT_S = 1.0, 15.0
# Errors of clients that are no OSError, by name, as the clients may not be installed.
_NETWORK_ERRORS = {"aiohttp.ClientError", "botocore.ConnectionError", "botocore.HTTPClientError"}
_NO_KEY = ("NoCredentialsError", "PartialCredentialsError")
_PASSING_STATUS = (408, 429)  # and from 500 on
_LASTING = (FileNotFoundError, PermissionError, NotADirectoryError, IsADirectoryError)

T = TypeVar("T")


class RemoteError(OSError):
    """A request for a URL failed after all tries. The message does not have the URL."""


def filesystem_of(url: str, *, num_tries: int = 1, **options: Any) -> tuple[Any, str]:
    """Returns fsspec's file system for a URL and the path in it.

    Args:
      num_tries: tries that S3's client makes of each request, and so of each part of a large file.
      options: further ones of that file system.
    """
    import fsspec.core

    protocol = url.partition("://")[0]
    try:
        filesystem, path = fsspec.core.url_to_fs(url, **_timeouts(protocol), **options)
    except ImportError as error:
        if protocol in ("s3", "s3a", "http", "https"):
            raise ValueError(f"{url}: {error}. Run pip install 'hlat_jax[s3]', or give a local path.") from None
        raise ValueError(f"{url}: {error}. Install the package that fsspec needs, or give a local path.") from None
    except ValueError as error:
        raise ValueError(f"{url}: {error}. Install the package that fsspec needs, or give a local path.") from None
    if protocol in ("s3", "s3a"):
        filesystem.retries = num_tries  # by default one: others would multiply the tries of `retry`
    return filesystem, path


def _timeouts(protocol: str) -> dict[str, Any]:
    """Returns the options of fsspec that limit the time of one request; the user's config of fsspec comes first."""
    from fsspec.config import conf

    if protocol in ("s3", "s3a"):
        name, ours = "config_kwargs", {"connect_timeout": CONNECT_TIMEOUT_S, "read_timeout": READ_TIMEOUT_S}
        ours["retries"] = {"total_max_attempts": 1, "mode": "standard"}
    elif protocol in ("http", "https"):
        import aiohttp

        limit = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S, sock_read=READ_TIMEOUT_S)
        name, ours = "client_kwargs", {"timeout": limit}
    else:
        return {}
    return {name: ours | conf.get(protocol, {}).get(name, {})}


def retry(ask: Callable[[], T], url: str, *, for_s: float | None = None, ended: threading.Event | None = None) -> T:
    """Returns `ask()`, and calls it again after a fault of the network, for `for_s` (OPENING_S) at most.

    The first fault is a line on stderr, unless there is an event `ended`. Nothing is tried again after this event.

    Raises:
      OSError: a RemoteError for faults that may pass, or a subclass such as FileNotFoundError for others.
    """
    began_s, wait_s = time.monotonic(), _FIRST_WAIT_S
    for_s = OPENING_S if for_s is None else for_s
    while True:
        try:
            return ask()
        except Exception as error:
            # fsspec's HTTP says "not found" of every fault, and has the fault as the cause
            cause = error.__cause__ if isinstance(error, FileNotFoundError) and error.__cause__ else error
            fault = _describe(cause)
            if not _may_pass(cause):
                refused = PermissionError if type(error).__name__ in _NO_KEY else RemoteError
                raise type(error)(fault) if isinstance(error, _LASTING) else refused(fault) from None
            left_s = began_s + for_s - time.monotonic() - wait_s
            if left_s < 0 or (ended is not None and ended.is_set()):
                raise RemoteError(f"{fault}, tried for {time.monotonic() - began_s:.0f} s") from None
        if wait_s == _FIRST_WAIT_S and ended is None:
            print(f"warning: {url}: {fault}. Trying again for up to {left_s:.0f} s.", file=sys.stderr, flush=True)
        (ended or threading.Event()).wait(wait_s)
        wait_s = min(2 * wait_s, _LONGEST_WAIT_S)


def _may_pass(error: BaseException) -> bool:
    status = getattr(error, "status", None)  # of aiohttp's errors about an answer
    if isinstance(status, int) and status:
        return status >= 500 or status in _PASSING_STATUS
    names = {f"{kind.__module__.partition('.')[0]}.{kind.__name__}" for kind in type(error).__mro__}
    return not isinstance(error, _LASTING) and (isinstance(error, OSError) or bool(names & _NETWORK_ERRORS))


def _describe(error: BaseException) -> str:
    """Returns the message of an error in one line, with its class where that says more."""
    text = " ".join(str(getattr(error, "strerror", None) or error).split()).rstrip(".")
    return text if isinstance(error, OSError) and text else f"{type(error).__name__}{text and f': {text}'}"


def open_url(url: str) -> BinaryIO:
    """Returns a file behind a URL opened for reading in order. Opening and reads are tried again as in `retry`."""
    filesystem, path = filesystem_of(url)
    return io.BufferedReader(_RetriedReads(retry(lambda: filesystem.open(path, "rb"), url), url))


class _RetriedReads(io.RawIOBase):
    """A file of fsspec whose reads are repeated when they fail, if it is read in ranges.

    A server that knows no size knows no ranges: what is left of its broken answer would look like the end.
    """

    def __init__(self, file: Any, url: str):
        self._file, self._url = file, url
        self._has_ranges = isinstance(getattr(file, "size", None), int)

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return self._has_ranges

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        return self._file.seek(offset, whence)

    def tell(self) -> int:
        return self._file.tell()

    def readinto(self, buffer: Any) -> int:
        content = retry(lambda: self._file.read(len(buffer)), self._url, for_s=READING_S * self._has_ranges)
        buffer[: len(content)] = content
        return len(content)

    def close(self) -> None:
        self._file.close()
        super().close()
