"""What a command prints where it cannot be shown, or where nobody reads it."""

import io
import os
import subprocess
import sys

import pytest

from hlat_jax.cli import flags
from hlat_jax.host import process


def test_text_that_the_output_cannot_show_is_replaced(monkeypatch):
    shown = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(shown, encoding="ascii"))
    monkeypatch.setattr(sys, "argv", ["hlat_jax"])
    with pytest.raises(SystemExit) as exit_:
        flags.main(lambda _: print("sample: café \udcff") or 0)  # of a command line that is not UTF-8
    assert (exit_.value.code, shown.getvalue()) == (0, b"sample: caf\\xe9 \\udcff\n")


def print_to(descriptor, monkeypatch):
    """Makes a descriptor the standard output of this process, as a training run has it."""
    stream = open(descriptor, "w", closefd=False)  # noqa: SIM115
    monkeypatch.setattr(sys, "stdout", stream)
    process.drop_unwritable()


def test_a_run_prints_on_where_nothing_can_be_written(monkeypatch, capfd):
    reader, pipe = os.pipe()
    os.close(reader)
    full = os.open("/dev/full", os.O_WRONLY)
    for descriptor, why in ((pipe, "Broken pipe"), (full, "No space left on device")):
        print_to(descriptor, monkeypatch)
        for _ in range(3):
            print("row")
        sys.stdout.flush()
        os.close(descriptor)
        said = capfd.readouterr().err
        assert (why in said, said.count("\n")) == (True, 1)


def test_a_run_waits_for_a_reader_of_a_non_blocking_pipe(monkeypatch):
    reader, descriptor = os.pipe()
    os.set_blocking(descriptor, False)
    with subprocess.Popen(["wc", "-c"], stdin=reader, stdout=subprocess.PIPE) as counting:
        os.close(reader)
        print_to(descriptor, monkeypatch)
        print("x" * 1_000_000)  # more than a pipe holds
        os.close(descriptor)
        assert counting.stdout.read() == b"1000001\n"


def test_dumb_terminal_is_no_terminal(monkeypatch):
    ours, theirs = os.openpty()
    with open(theirs, "w") as stream, open(ours, "rb", buffering=0):
        for term, expected in (("xterm", True), ("dumb", False)):
            monkeypatch.setenv("TERM", term)
            assert (process.is_terminal(stream), process.is_terminal(theirs)) == (expected, expected)
    assert not process.is_terminal(io.StringIO())
