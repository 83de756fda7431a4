"""Records in files of any format, by number across files, and the error for a record without usable text."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from hlat_jax.data.formats.files import Snapshot

MAX_RECORD_BYTES = 1 << 30
_REMEDY = "Fix or remove it, set {field} if the text is under another name, or skip such records with {skip}."
_KEYS_SHOWN = 10
_KEY_CHARS_SHOWN = 40


class BadRecord(ValueError):
    """A record has no usable text. `data.on_bad_record="skip"` skips it. A damaged file is a plain ValueError.

    Attributes:
      problem: the file, row and reason, without the remedy.
    """

    def __init__(self, where: str, row: int | None, reason: str):
        """`row` of the file `where` counts from 1; None if the file is one document."""
        self.problem = f"{where}: {reason}" if row is None else f"{where}, row {row}: {reason}"
        remedy = _REMEDY.format(field="data.text_field", skip='data.on_bad_record="skip"')
        super().__init__(f"{self.problem} {remedy} After changing a file, start a new run in another --workdir.")

    def for_command(self) -> ValueError:
        """Returns the error with the flags of `build` and `tokenizer` in place of the config's keys."""
        remedy = _REMEDY.format(field="--text_field", skip="--on_bad_record=skip")
        return ValueError(f"{self.problem} {remedy}")


class Answered(str):
    """A document in which only the answers are trained on. As a str it is all of the text.

    Attributes:
      messages: the messages of a conversation, dicts with role and content. None stands for a prompt and its answer.
      start: the first character of the answer to a prompt.
      where: the file and row, for errors.
    """

    messages: list[dict[str, str]] | None
    start: int
    where: str

    def __new__(
        cls, text: str, *, where: str, messages: list[dict[str, str]] | None = None, start: int = 0
    ) -> Answered:
        document = super().__new__(cls, text)
        document.messages, document.start, document.where = messages, start, where
        return document


def starts(counts: Iterable[int]) -> np.ndarray:
    """Returns the number of the first record of each of n consecutive parts, and the total, as int64[n + 1]."""
    return np.cumsum([0, *counts], dtype=np.int64)


def find_part(starts: np.ndarray, index: int) -> tuple[int, int]:
    """Returns (the part that holds record `index`, the number of the record in that part)."""
    part = int(np.searchsorted(starts, index, side="right")) - 1
    return part, int(index) - int(starts[part])


@dataclasses.dataclass(frozen=True, kw_only=True)
class Documents:
    """The documents of a file or dataset by number, each a str, or int32[n] if token ids are stored.

    Attributes:
      snapshots: the files that are read.
      read: number -> document.
      locate: number -> file and row, for errors, without reading.
      text_bytes: number -> UTF-8 bytes of the text of a document of token ids.
      facts: further values that identify the documents in a manifest.
    """

    snapshots: tuple[Snapshot, ...]
    num_documents: int
    read: Callable[[int], str | np.ndarray]
    locate: Callable[[int], str]
    text_bytes: Callable[[int], int] | None = None
    facts: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def __len__(self) -> int:
        return self.num_documents

    def __getitem__(self, index: int) -> str | np.ndarray:
        return self.read(index)


def texts_of_rows(
    snapshot: Snapshot,
    *,
    num_documents: int,
    read: Callable[[int], str],
    row_of: Callable[[int], int] = lambda index: index + 1,
) -> Documents:
    """Returns the texts of a file with a document in each row. `row_of` returns the row of a document, for errors."""
    return Documents(
        snapshots=(snapshot,),
        num_documents=num_documents,
        read=read,
        locate=lambda index: f"{snapshot.file}, row {row_of(index)}",
    )


def check_text(text: Any, *, field: str, where: str, row: int) -> str:
    """Returns `text` if it is a string that UTF-8 can encode.

    Raises:
      BadRecord: the value is null, empty, of another type, or has a lone surrogate.
    """
    if text == "":
        raise BadRecord(where, row, f"{field!r} is empty.")
    if isinstance(text, str):
        if text.isascii():
            return text
        try:
            for start in range(0, len(text), 1 << 20):  # in blocks, to avoid a copy of a long document
                text[start : start + (1 << 20)].encode("utf-8")
        except UnicodeEncodeError as error:  # JSON can hold a lone surrogate
            reason = f"{field!r} is invalid UTF-8: {error.reason} at character {start + error.start}."
            raise BadRecord(where, row, reason) from None
        return text
    kind = "null" if text is None else f"{type(text).__name__}, not text"
    raise BadRecord(where, row, f"{field!r} is {kind}.")


def utf8_text(raw: bytes | bytearray, *, where: str, row: int | None) -> str:
    """Returns the text of a record of bare UTF-8. `row` is None for a file, or a part of one.

    Raises:
      BadRecord: the record is empty, or not UTF-8.
    """
    try:
        text = raw.decode("utf-8-sig" if row is None else "utf-8")
    except UnicodeDecodeError as error:
        reason = f"invalid UTF-8, {error.reason} at byte {error.start}. Convert it with iconv -t UTF-8."
        raise BadRecord(where, row, reason) from None
    if not text:
        raise BadRecord(where, row, "it is empty.")
    return text


def json_text(line: bytes | bytearray, *, field: str, where: str, row: int) -> str:
    """Returns the text under the key `field` of one line of JSON.

    The text is `Answered` if `field` is PROMPT,ANSWER or has a list of messages.

    Raises:
      BadRecord: the line is not UTF-8, not complete JSON, not an object, or has no such key or no text under it.
      ValueError: `field` names more than two keys.
    """
    try:
        text = line.decode("utf-8-sig")
        del line  # nor does the caller hold it: no third copy of a long document while it is parsed
        record = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BadRecord(where, row, f"it is not JSON in UTF-8: {error}.") from None
    if not isinstance(record, dict):
        raise BadRecord(where, row, "not a JSON object.")
    fields = field.split(",")
    if len(fields) > 2:
        raise ValueError(
            f"{where}: the text field {field!r} names {len(fields)} keys. Name one, or two as PROMPT,ANSWER, and "
            "rename a key that has a comma."
        )
    for field in (name for name in fields if name not in record):
        keys = ", ".join(repr(key)[:_KEY_CHARS_SHOWN] for key in sorted(record)[:_KEYS_SHOWN])  # may be unprintable
        more = f" and {len(record) - _KEYS_SHOWN} more" if len(record) > _KEYS_SHOWN else ""
        raise BadRecord(where, row, f"no key {field!r} among its keys ({keys or 'none'}{more}).")
    if len(fields) == 1 and isinstance(record[field], list):
        return _conversation(record[field], field=field, where=where, row=row)
    prompt, *answer = (check_text(record[name], field=name, where=where, row=row) for name in fields)
    return Answered(prompt + answer[0], start=len(prompt), where=f"{where}, row {row}") if answer else prompt


def _conversation(messages: list[Any], *, field: str, where: str, row: int) -> Answered:
    for number, message in enumerate(messages, 1):
        texts = [message.get(key) for key in ("role", "content")] if isinstance(message, dict) else [None]
        if not all(isinstance(text, str) for text in texts):
            raise BadRecord(where, row, f"message {number} of {field!r} must have a role and a content, both text.")
        check_text(texts[1] or " ", field=field, where=where, row=row)
    if not any(message["role"] == "assistant" for message in messages):
        raise BadRecord(where, row, f"{field!r} has no message of the role assistant, so nothing to train on.")
    text = "\n".join(message["content"] for message in messages)
    return Answered(text, messages=messages, where=f"{where}, row {row}")
