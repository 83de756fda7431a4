"""URLs given for paths: all are refused, in any spelling, and no local path is."""

import pathlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hlat_jax.facts.local_paths import check_local, local_path

LETTERS = "abcXYZ"
SCHEMES = st.builds(str.__add__, st.sampled_from(LETTERS), st.text(f"{LETTERS}09+.-", min_size=1, max_size=8))
RESTS = st.text("ab/. *{}é", max_size=12)


@given(SCHEMES, RESTS, st.sampled_from(["", " ", "\t"]))
def test_every_scheme_is_refused_also_as_pathlib_folds_it(scheme, rest, blank):
    url = f"{scheme}://{rest}"
    for path in (blank + url, f"simplecache::{url}", pathlib.Path(url) / "x"):
        with pytest.raises(ValueError, match="is a URL"):
            check_local(path, key="--out")


@given(RESTS, st.sampled_from(["", "/", "//", "./", "../a//", "runs/a:/", "a:b/", "**/*.{x}//"]))
def test_paths_without_a_scheme_and_globs_stay_as_they_are(rest, start):
    assert check_local(start + rest) == start + rest


@pytest.mark.parametrize("export", ["lustre:/fsx/a", "10.0.0.2@tcp:/fsx", "nfs-1:/a"])
def test_an_export_of_a_file_server_is_refused_with_its_mount(export):
    with pytest.raises(ValueError, match="give the folder of the mount"):
        check_local(export, key="--workdir", use="run")


def test_file_urls_are_the_paths_in_them_and_the_home_is_expanded(monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    for given_path, path in (
        ("file:///a/b", "/a/b"),
        ("file://localhost/a", "/a"),
        ("~/a", "/home/me/a"),
        ("file://~/a", "/home/me/a"),
    ):
        assert local_path(given_path) == pathlib.Path(path)
    for url in ("file://", "file:/a", "file://a", "file://host/a", "file://localhost"):
        with pytest.raises(ValueError, match="is a URL"):
            check_local(url)


@pytest.mark.parametrize(
    ("url", "use", "command"),
    [
        ("s3://b/run", "run", "aws s3 cp --recursive FOLDER s3://b/run"),
        ("S3:/b/run@30", "read", "aws s3 cp --recursive s3://b/run FOLDER"),
        ("s3://b/my table.json", "write", "aws s3 cp FILE 's3://b/my table.json'"),
        ("s3://b/Llama-3.2-1B", "read", "aws s3 cp --recursive s3://b/Llama-3.2-1B FOLDER"),
    ],
)
def test_refusal_of_an_s3_url_ends_with_the_command_that_copies(url, use, command):
    with pytest.raises(ValueError, match="is a URL") as caught:
        check_local(url, key="--x", use=use)
    assert str(caught.value).startswith(f"--x={url} is a URL. ")
    assert str(caught.value).endswith(f":\n  {command}")
