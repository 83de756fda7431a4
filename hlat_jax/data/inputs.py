"""What the data commands read: files in order, and the documents of each one after another.

Owns the one place where `build`, `tokenizer` and their kind read text. Refuses to know formats: streaming does.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
from collections.abc import Iterator, Sequence

from hlat_jax.data import files, streaming
from hlat_jax.data.records import BadRecord

KEY = "IN"


@dataclasses.dataclass(frozen=True)
class Input:
    """One file, or the folder of a built dataset.

    Attributes:
      file: as streaming takes it.
      size: bytes on the disk; of a dataset, its bytes of text.
      fingerprint: 32 hex digits that change when the input does.
      source: number of the manifest's entry it is counted under; neighbouring plain-text files share one.
    """

    file: files.DataFile
    size: int
    fingerprint: str
    source: int


def resolve(words: Sequence[str]) -> list[Input]:
    """Returns the inputs that the words of a command name, in the order in which training would read them.

    Raises:
      ValueError: see files.resolve_files; a file that cannot be read; a dataset of token ids, whose text is gone.
    """
    found: list[Input] = []
    for file in files.resolve_files(",".join(words), key=KEY, allow_compressed=True):
        joins = bool(found) and _is_text(file) and _is_text(found[-1].file)
        source = found[-1].source + (not joins) if found else 0
        size, print_ = _built_facts(file) if file.is_built else _file_facts(file)
        found.append(Input(file, size=size, fingerprint=print_, source=source))
    return found


def source_names(inputs: Sequence[Input]) -> list[str]:
    """Returns a name for each source, for people: file names, with folders where file names alone are not distinct."""
    members: dict[int, list[Input]] = {}
    for input_ in inputs:
        members.setdefault(input_.source, []).append(input_)
    firsts = [group[0].file for group in members.values()]
    short = [file.name for file in firsts]
    names = short if len(set(short)) == len(short) else [file.where for file in firsts]
    return [
        name if len(group) == 1 else f"{name} and {len(group) - 1} more"
        for name, group in zip(names, members.values(), strict=True)
    ]


def read(input_: Input, *, text_field: str) -> Iterator[str | BadRecord]:
    """Yields the documents of one input in order; in place of one that cannot be used, what is wrong with it.

    Memory holds one document and what the format reads at once.

    Raises:
      ValueError: trouble of the whole file, such as a missing column or a truncated end.
    """
    documents = streaming.iter_documents(input_.file, text_field=text_field)
    while True:
        try:
            document = next(documents, None)
        except BadRecord as error:
            yield error
            continue
        if document is None:
            return
        yield document[0]


def said_here(error: BadRecord) -> ValueError:
    """Returns the error of a bad record as a command says it, whose flag has another name than the config's key."""
    return ValueError(str(error).replace('data.on_bad_record="skip"', "--on_bad_record=skip"))


def _is_text(file: files.DataFile) -> bool:
    return not file.is_built and file.suffix in files.TEXT_SUFFIXES


def _file_facts(file: files.DataFile) -> tuple[int, str]:
    try:
        size = file.state()[0]
        return size, files.fingerprint(file, size=size)
    except OSError as error:
        raise ValueError(f"{file} cannot be read: {error.strerror or error}.") from None


def _built_facts(file: files.DataFile) -> tuple[int, str]:
    path = pathlib.Path(file) / files.MANIFEST_NAME
    manifest = json.loads(path.read_bytes())
    if manifest["kind"] != "text":
        raise ValueError(f"{KEY}: {file} holds token ids, not text; build from the text it was built from.")
    return int(manifest["bytes"]), files.fingerprint(path)
