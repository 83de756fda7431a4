"""The tokenizer that a run folder keeps, and which paths of a config are refused before JAX is imported."""

import contextlib
import hashlib
import json

from refusals import refused

from hlat_jax.data import path_checks
from hlat_jax.data.formats.paths import asset_path
from hlat_jax.data.kept_tokenizer import find_kept, keep_tokenizer, resolve_tokenizer_path

AUSTEN = asset_path("austen_2k.model")


def sha256(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_a_model_is_kept_once_and_found_by_its_checksum(tmp_path):
    assert find_kept(tmp_path, sha256="") is None
    keep_tokenizer(AUSTEN, tmp_path)
    kept = tmp_path / "tokenizer" / "tokenizer.model"
    assert kept.read_bytes() == AUSTEN.read_bytes()
    assert find_kept(tmp_path, sha256=sha256(AUSTEN)) == find_kept(tmp_path, sha256="") == kept
    assert find_kept(tmp_path, sha256="0" * 64) is None
    before = kept.stat().st_mtime_ns
    keep_tokenizer(kept, tmp_path)  # of a run that was resumed with it
    assert kept.stat().st_mtime_ns == before


def test_a_tokenizer_json_is_kept_with_the_files_that_name_its_tokens(tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    (source / "mine.json").write_text("{}")
    for name in ("tokenizer_config.json", "config.json", "other.json"):
        (source / name).write_text(json.dumps({"in": name}))
    keep_tokenizer(source / "mine.json", tmp_path)
    files = {path.name: path.read_text() for path in (tmp_path / "tokenizer").iterdir()}
    beside = {name: json.dumps({"in": name}) for name in ("tokenizer_config.json", "config.json")}
    assert files == {"tokenizer.json": "{}"} | beside
    keep_tokenizer(AUSTEN, tmp_path)  # another one replaces it
    assert [path.name for path in (tmp_path / "tokenizer").iterdir()] == ["tokenizer.model"]


def test_a_native_tokenizer_is_kept_with_its_chat_template(tmp_path):
    names = ("tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja", "tokenizer.json", "config.json")
    for name in names:
        (tmp_path / name).write_text(json.dumps({"in": name}))
    for name, kept in (("tokenizer.model", names[:4]), ("mine.model", names[:3])):
        (tmp_path / name).write_bytes(AUSTEN.read_bytes())
        keep_tokenizer(tmp_path / name, tmp_path)
        assert {path.name for path in (tmp_path / "tokenizer").iterdir()} == {"tokenizer.model", *kept}
    (tmp_path / names[2]).write_text("another")
    keep_tokenizer(tmp_path / "mine.model", tmp_path)
    assert (tmp_path / "tokenizer" / names[2]).read_text() == "another"


def test_the_kept_tokenizer_replaces_only_the_file_of_the_run(tmp_path):
    keep_tokenizer(AUSTEN, tmp_path)
    assert resolve_tokenizer_path("/gone.model", tmp_path) == "/gone.model"  # there is no record
    (tmp_path / "config.json").write_text(json.dumps({"data": {"tokenizer": "/gone.model"}}))
    for there in (str(AUSTEN), "package:austen_2k.model", ""):
        assert resolve_tokenizer_path(there, tmp_path) == there
    assert resolve_tokenizer_path("/gone.model", tmp_path) == str(tmp_path / "tokenizer" / "tokenizer.model")
    assert resolve_tokenizer_path("/no.model", tmp_path) == "/no.model"
    assert resolve_tokenizer_path("/gone.model", tmp_path / "other") == "/gone.model"


def test_text_paths_with_nothing_there_and_urls_are_refused(tmp_path):
    (tmp_path / "a.txt").write_text("a")
    for path, fact in (
        *((good, "") for good in ("{0}/a.txt", "{0}/*.txt", "{0}", "file://{0}/a.txt", "")),
        ("s3://bucket/x", ""),  # perhaps a dataset, which is looked for later
        ("https://host/x", "data build https://host/x --out x"),
        *((bad, bad.format(tmp_path)) for bad in ("{0}/b.txt", "{0}/*.md")),
        ("file://{0}/b.txt", "b.txt"),
        ("package:b", "package:b"),
    ):
        with refused(fact) if fact else contextlib.nullcontext():
            path_checks.check_text_path(path.format(tmp_path), key="data.train")
