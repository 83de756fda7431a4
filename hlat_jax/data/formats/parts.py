"""Parts of a dataset, each from a separate `build` command: `--part=2/4` writes DIR/part-00002-of-00004.

The parts in order hold the documents of one build. Each part is a dataset. Its manifest has `PartFacts` under "part".
"""

from __future__ import annotations

import bisect
import itertools
import pathlib
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, NamedTuple, TypedDict

from hlat_jax.data.formats.files import MANIFEST_NAME, DataFile, NotFound
from hlat_jax.store.typed_json import check_kind, read_json

_MAX_PARTS = 99_999
_SHOWN = 5
# of a manifest, or of its "part": what the parts of one build share -> the name in errors
_SHARED = {
    "of": "number of parts",
    "inputs": "inputs",
    "text_field": "--text_field",
    "kind": "--tokenizer",
    "tokenizer_sha256": "--tokenizer",
    "max_document_chars": "--max_document_chars",
    "prepend_bos": "--prepend_bos",
}

_Number = Annotated[int, "an integer of at least 1", lambda value: value >= 1]


class PartFacts(TypedDict):
    """The entry "part" in the manifest of a part. `inputs` identifies the inputs of all parts."""

    number: _Number
    of: _Number
    inputs: str
    text_field: str


class Part(NamedTuple):
    """Part `number`, from 1, of `of`."""

    number: int
    of: int

    def __str__(self) -> str:
        return f"{self.number}/{self.of}"

    @property
    def folder(self) -> str:
        """The name of its folder."""
        return f"part-{self.number:05d}-of-{self.of:05d}"

    def choose(self, sizes: Sequence[int]) -> range:
        """Returns the inputs of this part: consecutive ones, and for each part about the same number of bytes.

        Raises:
          ValueError: there are more parts than inputs.
        """
        if self.of > len(sizes):
            raise ValueError(
                f"--part={self}: IN is {len(sizes)} files, and no file is split. Use --part=I/N with N of at most "
                f"{len(sizes)}, or give more and smaller files."
            )
        ends = [0, *itertools.accumulate(sizes)]
        cuts = [0]
        for number in range(1, self.of):
            end = bisect.bisect_left(ends, ends[-1] * number // self.of)
            cuts.append(min(max(end, cuts[-1] + 1), len(sizes) - (self.of - number)))
        return range(cuts[self.number - 1], [*cuts, len(sizes)][self.number])


def parse_part(text: str) -> Part | None:
    """Returns the part that `--part=I/N` names, or None for ""."""
    if not text:
        return None
    match = re.fullmatch(r"(\d{1,5})/(\d{1,5})", text)
    if match is None or not 1 <= int(match[1]) <= int(match[2]):
        raise ValueError(f"--part={text} must be I/N, such as 1/4, with I in 1 .. N and N of at most {_MAX_PARTS}.")
    return Part(int(match[1]), int(match[2]))


def part_of_folder(name: str) -> Part | None:
    """Returns the part that is in a folder of this name, or None for another folder."""
    match = re.fullmatch(r"part-(\d{5})-of-(\d{5})", name)
    return Part(int(match[1]), int(match[2])) if match else None


def require_all_parts(folders: Sequence[str], *, url: str, key: str) -> None:
    """Raises NotFound unless these folders of a bucket are all parts of one build. They are sorted."""
    parts = [part_of_folder(folder) for folder in folders]
    of = max(part.of for part in parts if part)
    expected = [Part(number, of).folder for number in range(1, of + 1)]
    if folders != expected:
        [folder, *_] = sorted({*expected} ^ {*folders})
        problem = "is missing" if folder in expected else f"is no part of {of}"
        raise NotFound(f"{key}: {url}/{folder} {problem}. {url} must hold all parts of one build, and nothing else.")


def differences(manifest: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """Returns the settings of a build in which two parts differ. Parts of one build differ in none."""
    pairs = zip(_SHARED.values(), _shared(manifest).values(), _shared(other).values(), strict=True)
    # None is of a text, and "kind" differs then too
    return list(dict.fromkeys(words for words, mine, theirs in pairs if mine != theirs and None not in (mine, theirs)))


def _shared(manifest: Mapping[str, Any]) -> dict[str, Any]:
    return {name: manifest["part"].get(name, manifest.get(name)) for name in _SHARED}


def read_part(folder: pathlib.Path) -> dict[str, Any] | None:
    """Returns the manifest of a part, or None for another dataset and for a folder without a manifest."""
    path = folder / MANIFEST_NAME
    manifest = read_json(path) if path.exists() else {}
    if "part" not in manifest:
        return None
    check_kind(manifest["part"], PartFacts, where=str(path), field="part")
    return manifest


def check_parts(files: Iterable[DataFile], *, key: str) -> None:
    """Raises NotFound unless the files hold all parts, in order, of each build that they hold a part of."""
    builds: dict[tuple, list[tuple[DataFile, dict[str, Any]]]] = {}
    for file in files:
        if file.is_built and (manifest := read_part(pathlib.Path(file))) is not None:
            builds.setdefault(tuple(_shared(manifest).values()), []).append((file, manifest))
    broken = {}
    for shared, found in builds.items():
        numbers = [manifest["part"]["number"] for _, manifest in found]
        if problem := _problem(numbers, [file for file, _ in found], of=found[0][1]["part"]["of"]):
            broken[shared] = problem
    for (shared, found), (other_shared, others) in itertools.combinations(builds.items(), 2):
        (file, manifest), (other_file, other) = found[0], others[0]
        if {shared, other_shared} <= broken.keys() or manifest["part"]["inputs"] == other["part"]["inputs"]:
            differ = " and ".join(differences(manifest, other))
            raise NotFound(
                f"{key}: {file} and {other_file} are parts of two builds, which differ in their {differ}. Name all "
                "parts of one build, or build the parts again with the same inputs and flags."
            )
    for problem in broken.values():
        raise NotFound(f"{key}: {problem}")


def _problem(numbers: Sequence[int], files: Sequence[DataFile], *, of: int) -> str:
    """Returns the problem of parts of one build as they are named, or "" for all of them in order."""
    where = dict(zip(numbers, files, strict=True))
    if missing := [number for number in range(1, of + 1) if number not in where]:
        more = f", and {len(missing) - _SHOWN} more," * (len(missing) > _SHOWN)
        are = "is" if len(missing) == 1 else "are"
        return (
            f"part {', '.join(map(str, missing[:_SHOWN]))} of {of}{more} {are} missing, beside {files[0]}. Build it "
            f"with --part={missing[0]}/{of}, or name its folder too."
        )
    for number, file in zip(numbers, files, strict=True):
        if where[number] is not file:
            return f"{file} and {where[number]} are both part {number} of {of}. Name each part once."
    if list(numbers) != sorted(numbers):
        order = ", ".join(map(str, numbers[:_SHOWN]))
        return f"the parts are in the order {order}, with {files[0]} first. Name them in order, or name their folder."
    return ""
