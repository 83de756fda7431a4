"""Small files are written atomically; JSON and names of others are checked as they are read."""

import errno
import os
import pathlib
import time

import pytest

from hlat_jax.store import atomic_files


def test_write_whole_creates_and_replaces_a_file_without_leftovers(tmp_path):
    for content in (b"first", b"second, longer"):
        atomic_files.write_whole(tmp_path / "a", content)
        assert (tmp_path / "a").read_bytes() == content
    assert os.listdir(tmp_path) == ["a"]


def test_only_files_that_no_writer_can_be_at_work_on_are_removed_as_partial(tmp_path):
    old, young, folder = (tmp_path / f"{name}.7-0123abcd.partial" for name in ("old", "young", "folder"))
    for path in (old, young):
        path.write_bytes(b"half")
    folder.mkdir()
    (tmp_path / "link.7-0123abcd.partial").symlink_to("nowhere")
    for path in (old, folder):
        os.utime(path, (0, time.time() - 120))
    atomic_files.remove_partial(tmp_path)
    assert sorted(path.name.partition(".")[0] for path in tmp_path.iterdir()) == ["folder", "link", "young"]


def test_a_partial_file_that_its_writer_finishes_meanwhile_is_no_error(tmp_path, monkeypatch):
    path = tmp_path / "a.7-0123abcd.partial"
    path.write_bytes(b"half")
    os.utime(path, (0, 0))
    unlink = pathlib.Path.unlink
    monkeypatch.setattr(pathlib.Path, "unlink", lambda self, **options: (unlink(self), unlink(self, **options)))
    atomic_files.remove_partial(tmp_path)
    assert not path.exists()


def test_failed_write_whole_keeps_the_old_file_without_leftovers(tmp_path, monkeypatch):
    atomic_files.write_whole(tmp_path / "a", b"before")

    def full(_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        atomic_files.write_whole(tmp_path / "a", b"after")
    assert (tmp_path / "a").read_bytes() == b"before"
    assert os.listdir(tmp_path) == ["a"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"[" * 100_000, "nested deeper than 100 levels"),
        (b'{"a": ' * 500 + b"1" + b"}" * 500, "nested deeper than 100 levels"),
        (b"[]", "must hold a JSON object"),
        (b"", "is not JSON: Expecting value"),
        (b'{"a": 1, "a": 2}', "is not JSON: key 'a' appears twice"),
        (b'{"%s": 1, "%s": 2}' % (b"a" * 1000, b"a" * 1000), "is not JSON: key 'a{99} appears twice"),
        (b'{"a": NaN}', "is not JSON: NaN is not a finite number"),
        (b'{"a": 1e999}', "is not JSON: 1e999 is not a finite number"),
        (b'{"a": 1' + b"0" * 10_000 + b".0}", "is not JSON: 10{99} is not a finite number"),
        (b'{"a": ' + b"9" * 10_000 + b"}", "is not JSON: Exceeds the limit"),
        (b'{"a": "\xff"}', "is not JSON: 'utf-8' codec can't decode byte 0xff"),
        (b"\xef\xbb\xbf{}", "is not JSON: Unexpected UTF-8 BOM"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_json_that_is_malformed_or_ambiguous_is_refused_naming_the_file(content, message, tmp_path):
    path = tmp_path / "a.json"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=message) as caught:
        atomic_files.read_json(path)
    assert str(caught.value).startswith(str(path))


def test_duplicate_key_among_many_is_found_quickly():
    keys = ",".join(f'"{number}": 0' for number in [*range(40_000), 39_999])
    start_s = time.process_time()
    with pytest.raises(ValueError, match="key '39999' appears twice"):
        atomic_files.parse_json(f"{{{keys}}}".encode(), where="a.json")
    assert time.process_time() - start_s < 5


def test_json_from_a_fifo_is_refused_without_blocking(tmp_path):
    os.mkfifo(tmp_path / "a.json")
    with pytest.raises(ValueError, match=r"a\.json is not a regular file"):
        atomic_files.read_json(tmp_path / "a.json")


def test_json_with_100_levels_is_read(tmp_path):
    (tmp_path / "a.json").write_text('{"a": ' * 100 + "1" + "}" * 100)
    assert atomic_files.read_json(tmp_path / "a.json")


@pytest.mark.parametrize(
    "name",
    ["", ".", "..", "/a", "../a", "a/../b", "a//b", "./a", "a/", "a\0b", "a\nb", "\ud800", "a" * 256, 7, None, []],
)
def test_names_that_lead_out_of_a_folder_are_refused(name):
    for allow_folders in (False, True):
        with pytest.raises(ValueError, match=r"^f: field=.* must be "):
            atomic_files.check_name(name, "f: field", allow_folders=allow_folders)


def test_plain_names_are_accepted_and_paths_only_if_allowed():
    for name in ("a", "model-00001-of-00002.safetensors", ".hidden", "..a", "a b", "é"):
        assert atomic_files.check_name(name, "f") == name
    assert atomic_files.check_name("state/d/a..b", "f", allow_folders=True) == "state/d/a..b"
    with pytest.raises(ValueError, match="must be a plain name without '/'"):
        atomic_files.check_name("state/a", "f")
