"""JSON and the names in it are checked as they are read: every error has the file, the line and the field."""

import dataclasses
import json
import os
from typing import Annotated, Any, Literal, NotRequired, TypedDict

from refusals import refused

from hlat_jax.store import typed_json
from hlat_jax.store.typed_json import Count, check_kind


@dataclasses.dataclass
class Size:
    num_rows: int
    unit: str = "rows"


class Inner(TypedDict):
    sums: dict[str, Annotated[list[int], "[bytes, CRC-32]", lambda sums: len(sums) == 2]]


class Whole(TypedDict):
    step: Count
    loss: NotRequired[float]
    packing: Literal["concat", "documents"]
    size: Size
    inner: Inner | None
    anything: Any


VALID = {"step": 1, "packing": "concat", "size": {"num_rows": 2}, "inner": None, "anything": "x"}


def test_fields_of_another_kind_are_refused_by_name():
    for changed in ({}, {"loss": 2, "inner": {"sums": {"a": [1, 2]}}, "unknown": []}):
        value = VALID | changed
        assert check_kind(value, Whole, where="a.json") is value
    for changed, *facts in (
        *(({"step": step}, f"step={step!r}", "0") for step in ("abc", -1, 2**63, 1.0)),
        ({"loss": None}, "loss=None"),
        ({"packing": []}, "packing=[]", "'concat'", "'documents'"),
        ({"size": {"unit": "rows"}}, "size.num_rows"),
        ({"size": {"num_rows": 2, "unit": 3}}, "size.unit=3"),
        ({"inner": 3}, "inner=3"),
        ({"inner": {"sums": {"a": [1, "2"]}}}, "inner.sums['a']=[1, '2']", "[bytes, CRC-32]"),
    ):
        with refused("a.json: ", *facts):
            check_kind(VALID | changed, Whole, where="a.json")
    with refused("f, line 3: at.rows[1][0]='x'"):
        check_kind([[1], ["x"]], list[list[int]], where="f, line 3", field="at.rows")
    assert check_kind([[1], []], list[int] | list[list[int]], where="f")


def test_lines_of_a_log_are_rows_or_say_why_not(tmp_path):
    path = tmp_path / "log.jsonl"
    rows = [VALID, VALID | {"step": "x"}, VALID]
    path.write_bytes(b"".join(json.dumps(row).encode() + b"\n" for row in rows) + b'{"step')
    lines = list(typed_json.read_lines(path, lambda row: Whole))
    assert [line.row for line in lines] == [VALID, None, VALID, None]
    assert [line.problem for line in lines] == [
        "",
        f"{path}, line 2: step='x' must be an integer of at least 0",
        "",
        "",
    ]
    assert b"".join(line.raw for line in lines) == path.read_bytes()
    assert list(typed_json.read_lines(tmp_path / "none.jsonl", lambda row: Whole)) == []


def test_malformed_or_ambiguous_json_is_refused(tmp_path):
    path = tmp_path / "a.json"
    for content, fact in (
        (b"[" * 100_000, ""),
        (b"[]", "[]"),
        (b"", "JSON"),
        (b'{"a": 1, "a": 2}', "'a'"),
        (b'{"a": NaN}', "NaN"),
        (b'{"a": 1e999}', "1e999"),
        (b'{"a": ' + b"9" * 10_000 + b"}", "JSON"),
        (b'{"a": "\xff"}', "0xff"),
    ):
        path.write_bytes(content)
        with refused(path, fact) as caught:
            typed_json.read_json(path)
        assert str(caught.value).startswith(str(path))


def test_json_from_a_fifo_is_refused_without_blocking(tmp_path):
    os.mkfifo(tmp_path / "a.json")
    with refused(tmp_path / "a.json"):
        typed_json.read_json(tmp_path / "a.json")


def test_names_that_lead_out_of_a_folder_are_refused():
    for name in ("", ".", "..", "/a", "../a", "a/b", "a\0b", "a\nb", "\ud800", "a" * 256, 7, None, []):
        with refused("f: field="):
            typed_json.check_name(name, "f: field")
    for name in ("a", "model-00001-of-00002.safetensors", ".hidden", "..a", "a b", "é"):
        assert typed_json.check_name(name, "f") == name
