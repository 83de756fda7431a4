"""A file is there whole or not at all."""

import errno
import os

import pytest

from hlat_jax import durable


def test_write_whole_makes_and_replaces_a_file_and_leaves_nothing_beside_it(tmp_path):
    for content in (b"first", b"second, longer"):
        durable.write_whole(tmp_path / "a", content)
        assert (tmp_path / "a").read_bytes() == content
    assert os.listdir(tmp_path) == ["a"]


def test_write_whole_that_fails_leaves_the_file_of_before_and_nothing_beside_it(tmp_path, monkeypatch):
    durable.write_whole(tmp_path / "a", b"before")

    def full(_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        durable.write_whole(tmp_path / "a", b"after")
    assert (tmp_path / "a").read_bytes() == b"before"
    assert os.listdir(tmp_path) == ["a"]
