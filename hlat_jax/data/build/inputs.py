"""Opens the inputs of `build` and `tokenizer`, files and the documents of each in order."""

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
      size: the bytes on disk, or for a dataset the bytes of text.
      fingerprint: 32 hex digits that change with the content, or when a local file is rewritten.
      content: digits that are the same for a copy of a local file, see `files.fingerprint`.
      is_cut: whether the input is plain text that is cut into documents at paragraphs.
    """

    file: files.DataFile
    size: int
    fingerprint: str
    content: str
    is_cut: bool = False


def open_inputs(searched: paths.FoundFiles, *, batch_size: int = 1) -> list[Input]:
    """Returns the inputs in the order in which training would read them.

    Plain text, without inputs of another format, is cut at paragraphs if it has fewer files than `batch_size`.

    Raises:
      ValueError: a file cannot be read, or a dataset is damaged or holds token ids instead of text.
    """
    inputs: list[Input] = []
    is_cut = len(searched.files) < batch_size and {paths.file_format(file) for file in searched.files} == {"text"}
    for file in searched.files:
        if file.is_built:
            manifest = built.read_manifest(file)
            if manifest.kind != "text":
                raise ValueError(f"{KEY}: {file} holds token ids, not text. Give the text it was built from.")
            content = fingerprint = files.fingerprint(pathlib.Path(file) / files.MANIFEST_NAME)
            size = manifest.bytes
        else:
            snapshot = files.Snapshot(file)
            size, content = snapshot.size, snapshot.fingerprint
            fingerprint = hashlib.blake2b(snapshot.state.encode(), digest_size=16).hexdigest()
        inputs.append(Input(file, size, fingerprint, content, is_cut))
    return inputs


def names(inputs: Sequence[Input]) -> list[str]:
    """Returns a name for each input, its file name, or its path if file names are not distinct."""
    short = [input_.file.name for input_ in inputs]
    return short if len(set(short)) == len(short) else [input_.file.where for input_ in inputs]


def read(input_: Input, *, text_field: str) -> Iterator[str | BadRecord]:
    """Yields the documents of one input in order, and for an unusable one the BadRecord with the reason.

    Memory holds one document and the part of the file that the format decodes at once.

    Raises:
      ValueError: an error of the whole file, such as a missing column or a truncated end.
    """
    for text, _ in streaming.iter_documents(input_.file, text_field=text_field, cut_text=input_.is_cut):
        yield text
        del text  # frees it before the next one is read
