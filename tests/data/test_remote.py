"""Text behind URLs whose server fails: it is read whole after faults that pass, and a lasting one is one line."""

import contextlib
import json
import re
import socket
import sys

import faulty_server
import pytest
from data_files import read_in_order
from refusals import refused

from hlat_jax.cli import flags as flags_lib
from hlat_jax.data import __main__ as data_command
from hlat_jax.data.formats.files import DataFile, NotFound, Snapshot, Unreadable
from hlat_jax.store import remote

pytest.importorskip("aiohttp")

TEXTS = [f"{i} {'word ' * 1000}" for i in range(1300)]  # 6.5 MB: two ranges of HTTP
CONTENT = b"".join(json.dumps({"text": text}).encode() + b"\n" for text in TEXTS)


@pytest.fixture(params=["http", "s3"])
def url_of(request, monkeypatch):
    """A function of a port that returns the URL of the server's file there; waits are short."""
    monkeypatch.setattr(remote, "_FIRST_WAIT_S", 0.01)
    if request.param == "http":
        return lambda port: f"http://127.0.0.1:{port}{faulty_server.FILE}"
    s3fs = pytest.importorskip("s3fs", reason="pip install 'hlat_jax[s3]'")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    for name, value in (("ACCESS_KEY_ID", "a"), ("SECRET_ACCESS_KEY", "b"), ("DEFAULT_REGION", "us-east-1")):
        monkeypatch.setenv(f"AWS_{name}", value)

    def url(port):
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{port}")
        s3fs.S3FileSystem.clear_instance_cache()  # an instance keeps its endpoint
        return f"s3:/{faulty_server.FILE}"

    return url


@pytest.mark.parametrize("fault", ["slow", "cut", "hang"])
def test_text_is_whole_after_faults_that_pass(url_of, fault, capsys, monkeypatch):
    if fault == "hang":
        monkeypatch.setattr(remote, "READ_TIMEOUT_S", 0.5)
    with faulty_server.serve(CONTENT, fault=fault, failing={0, 2}, methods=["GET"]) as (port, requests):
        url = url_of(port)
        assert [text for text, _ in read_in_order(url)] == TEXTS
        assert sum("failed" in request for request in requests) in (1, 2)
    warnings = capsys.readouterr().err.splitlines()
    assert warnings
    assert all(line.startswith(f"warning: {url}: ") for line in warnings)


@pytest.mark.parametrize("fault", ["refused", "unresolved", "slow", "hang", "cut"])
def test_lasting_fault_ends_the_command_with_one_line(url_of, fault, capsys, monkeypatch, tmp_path):
    for name in ("OPENING_S", "READING_S", *["READ_TIMEOUT_S"] * (fault == "hang")):
        monkeypatch.setattr(remote, name, 0.2)

    def unresolved(*_, **__):
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    with contextlib.ExitStack() as stack:
        if fault in ("refused", "unresolved"):
            unused = stack.enter_context(socket.socket())  # held, so that no other process listens there
            unused.bind(("127.0.0.1", 0))
            port = unused.getsockname()[1]
        else:
            methods = ("GET",) if fault == "cut" else ("GET", "HEAD")
            port, _ = stack.enter_context(faulty_server.serve(CONTENT, fault=fault, methods=methods))
        url = url_of(port)
        if fault == "unresolved":
            monkeypatch.setattr(socket, "getaddrinfo", unresolved)
            url = url.replace("127.0.0.1", "nothing.invalid")
            monkeypatch.setenv("AWS_ENDPOINT_URL", "http://nothing.invalid")
        monkeypatch.setattr(sys, "argv", ["data", "build", url, f"--out={tmp_path / 'out'}"])
        with pytest.raises(SystemExit) as ended:
            flags_lib.main(data_command.main)
    assert ended.value.code == 1
    *warnings, error = capsys.readouterr().err.splitlines()
    assert error.startswith(f"error: {url} ")
    assert re.search(r"\d+ s\b", error)  # for how long it was tried
    assert all(line.startswith(f"warning: {url}: ") for line in warnings)


def test_what_does_not_exist_is_asked_for_once(url_of, capsys):
    with faulty_server.serve(CONTENT) as (port, _):
        url = url_of(port).replace("a.jsonl", "b.jsonl")
        with refused(url, kind=NotFound):
            Snapshot(DataFile(url))
    assert capsys.readouterr().err == ""


def test_a_broken_answer_of_unknown_size_is_no_end_of_text():
    url = f"http://127.0.0.1:{{}}{faulty_server.FILE}"
    with faulty_server.serve(CONTENT, ranges=False) as (port, _):
        assert [text for text, _ in read_in_order(url.format(port))] == TEXTS
    with (
        faulty_server.serve(CONTENT, fault="cut", methods=("GET",), ranges=False) as (port, _),
        refused("a.jsonl", kind=Unreadable),
    ):
        read_in_order(url.format(port))


def test_missing_client_of_s3_is_named_with_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "s3fs", None)
    monkeypatch.delitem(sys.modules["fsspec.registry"]._registry, "s3", raising=False)
    with refused("s3://bucket/a.jsonl", "pip install 'hlat_jax[s3]'"):
        read_in_order("s3://bucket/a.jsonl")
