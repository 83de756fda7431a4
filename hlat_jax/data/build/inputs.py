"""What the data commands read: files in order, and the documents of each one after another.

Owns the one place where `build`, `tokenizer` and their kind read text. Refuses to know formats: streaming does.
"""

from __future__ import annotations

import dataclasses
import hashlib
import pathlib
from collections.abc import Iterator, Sequence

from hlat_jax.data.formats import built, files, paths, streaming
from hlat_jax.data.formats.records import BadRecord

KEY = "IN"


@dataclasses.dataclass(frozen=True)
class Input:
    """One file, or the folder of a built dataset.

    Attributes:
      file: as streaming takes it.
      size: bytes on the disk; of a dataset, its bytes of text.
      fingerprint: 32 hex digits that change when the input does, or a local file is written again.
      number: its place among the inputs.
    """

    file: files.DataFile
    size: int
    fingerprint: str
    number: int


def find(words: Sequence[str]) -> paths.Found:
    """Returns the files that the words of a command name; raises as paths.find_files does."""
    return paths.find_files(words, key=KEY, allow_compressed=True)


def opened(found: paths.Found) -> list[Input]:
    """Returns the inputs in the order in which training would read them.

    Raises:
      ValueError: a file that cannot be read; a dataset that is damaged, or of token ids, whose text is gone.
    """
    inputs: list[Input] = []
    for file in found.files:
        size, print_ = _built_facts(file) if file.is_built else _file_facts(file)
        inputs.append(Input(file, size=size, fingerprint=print_, number=len(inputs)))
    return inputs


def names(inputs: Sequence[Input]) -> list[str]:
    """Returns a name for each input, for people: file names, or paths where file names alone are not distinct."""
    short = [input_.file.name for input_ in inputs]
    return short if len(set(short)) == len(short) else [input_.file.where for input_ in inputs]


def read(input_: Input, *, text_field: str) -> Iterator[str | BadRecord]:
    """Yields the documents of one input in order; in place of one that cannot be used, what is wrong with it.

    Memory holds one document and what the format reads at once.

    Raises:
      ValueError: trouble of the whole file, such as a missing column or a truncated end.
    """
    for text, _ in streaming.iter_documents(input_.file, text_field=text_field):
        yield text
        del text  # not kept here while the next one is read


def _file_facts(file: files.DataFile) -> tuple[int, str]:
    snapshot = files.Snapshot(file)
    return snapshot.size, hashlib.blake2b(snapshot.state.encode(), digest_size=16).hexdigest()


def _built_facts(file: files.DataFile) -> tuple[int, str]:
    manifest = built.read_manifest(file)
    if manifest.kind != "text":
        raise ValueError(f"{KEY}: {file} holds token ids, not text; build from the text it was built from.")
    return manifest.bytes, files.fingerprint(pathlib.Path(file) / files.MANIFEST_NAME)
