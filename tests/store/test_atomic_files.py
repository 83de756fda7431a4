"""Small files are written atomically."""

import errno
import os
import time
from unittest import mock

from refusals import refused

from hlat_jax.store import atomic_files


def test_only_old_files_are_removed_as_partial(tmp_path):
    old, young, folder = (tmp_path / f"{name}.7-0123abcd.partial" for name in ("old", "young", "folder"))
    for path in (old, young):
        path.write_bytes(b"half")
    folder.mkdir()
    (tmp_path / "link.7-0123abcd.partial").symlink_to("nowhere")
    for path in (old, folder):
        os.utime(path, (0, time.time() - 120))
    atomic_files.remove_partial(tmp_path)
    assert sorted(path.name.partition(".")[0] for path in tmp_path.iterdir()) == ["folder", "link", "young"]


def test_a_file_is_replaced_whole_or_kept(tmp_path, monkeypatch):
    for content in (b"first", b"second, longer"):
        atomic_files.write_whole(tmp_path / "a", content)
        assert (tmp_path / "a").read_bytes() == content
        assert os.listdir(tmp_path) == ["a"]
    monkeypatch.setattr(os, "fsync", mock.Mock(side_effect=OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))))
    with refused(os.strerror(errno.ENOSPC), kind=OSError):
        atomic_files.write_whole(tmp_path / "a", b"after")
    assert (tmp_path / "a").read_bytes() == content
    assert os.listdir(tmp_path) == ["a"]
