"""How much does one long document, or a large corpus, grow the process that reads or builds it?

    python benchmarks/data_memory.py [--document_mb 200] [--corpus_gb 5]

Writes a document among short ones as JSONL, Parquet, Arrow, text and built datasets (texts, ids), and a corpus as all
but text and ids, into a temporary folder (of some three times their size), and measures each in a process of its own:
peak resident memory over that of the same work on a small file, and, of reading, what of it is not mapped from files.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import pathlib
import subprocess
import sys
import tempfile
import threading
import time

import pyarrow
import pyarrow.parquet

from hlat_jax.config import DataConfig
from hlat_jax.data import __main__ as commands
from hlat_jax.data.formats.paths import asset_path
from hlat_jax.data.loader import TrainBatches
from hlat_jax.data.tokenizer import Tokenizer

TOKENIZER = "package:austen_2k.model"
ROWS_AT_ONCE = 1000


def memory(key: str) -> float:
    """Returns a line of /proc/self/status in MiB."""
    lines = pathlib.Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(key))


def write(texts: list[str], repeats: int, folder: pathlib.Path, *, tokenize: bool) -> None:
    """Writes documents, repeated, as every format."""
    folder.mkdir()
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
    with (folder / "a.jsonl").open("w") as file:
        for _ in range(repeats):
            file.write(lines)
    table = pyarrow.table({"text": texts})
    with (
        pyarrow.parquet.ParquetWriter(folder / "a.parquet", table.schema) as parquet,
        pyarrow.ipc.new_stream(str(folder / "a.arrow"), table.schema) as arrow,
    ):
        for _ in range(repeats):
            parquet.write_table(table, row_group_size=ROWS_AT_ONCE)
            arrow.write_table(table, max_chunksize=ROWS_AT_ONCE)
    work("build", folder / "a.jsonl", folder / "built")
    if tokenize:
        (folder / "texts").mkdir()
        for number, text in enumerate(texts):
            (folder / "texts" / f"{number}.txt").write_text(text)
        work("ids", folder / "a.jsonl", folder / "ids")


def work(what: str, path: pathlib.Path, out: pathlib.Path) -> None:
    """Reads 40 batches, or builds a dataset of texts or ids."""
    if what != "read":
        words = [f"--tokenizer={TOKENIZER}"] if what == "ids" else []
        with contextlib.redirect_stdout(None):
            assert commands.main(["build", str(path), f"--out={out}", "--workers=1", *words]) == 0
        return
    data = DataConfig(train=str(path), tokenizer=TOKENIZER, batch_size=4, seq_len=2048)
    tokenizer = Tokenizer(TOKENIZER)
    with contextlib.closing(TrainBatches(data, tokenizer=tokenizer, index_folder=out.with_suffix(".index"))) as batches:
        for _ in range(40):
            next(batches)


def measure(what: str, small: pathlib.Path, large: pathlib.Path) -> str:
    """Does the work on a small file and then on a large one; returns a cell of the table."""
    with tempfile.TemporaryDirectory() as name:
        work(what, small, pathlib.Path(name) / "small")
        peak, own, top = memory("VmHWM"), memory("RssAnon"), [0.0]

        def watch() -> None:
            while True:
                top[0] = max(top[0], memory("RssAnon"))
                time.sleep(0.002)

        threading.Thread(target=watch, daemon=True).start()
        work(what, large, pathlib.Path(name) / "large")
        return f"{memory('VmHWM') - peak:.0f} ({top[0] - own:.0f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--document_mb", type=int, default=200)
    parser.add_argument("--corpus_gb", type=float, default=0)
    parser.add_argument("--measure", nargs=3, help="of a process that this one starts")
    args = parser.parse_args()
    if args.measure:
        print(measure(args.measure[0], *map(pathlib.Path, args.measure[1:])))
        return
    novels = [json.loads(line)["text"] for line in asset_path("austen_train.jsonl").open(encoding="utf-8")]
    prose = "".join(novels).encode("ascii", "ignore").decode()
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        write(["short", "shorter"] * 4, 1, folder / "small", tokenize=True)
        long = (prose * (args.document_mb * 10**6 // len(prose) + 1))[: args.document_mb * 10**6]
        write([*["short"] * 4, long, *["shorter"] * 3], 1, folder / "document", tokenize=True)
        kinds = {f"document of {args.document_mb} MB": folder / "document"}
        if args.corpus_gb:
            repeats = int(args.corpus_gb * 10**9 / sum(map(len, novels)) / 4) + 1
            write(novels * 4, repeats, folder / "corpus", tokenize=False)
            kinds[f"corpus of {args.corpus_gb:g} GB"] = folder / "corpus"
        print("peak MiB over a small file, in brackets without mapped files")
        for kind, place in kinds.items():
            for path in sorted(path for path in place.iterdir() if path.suffix != ".index"):
                cells = []
                for what in ("read", "build"):
                    if what == "build" and path.name == "ids":
                        continue
                    words = ["--measure", what, str(folder / "small" / path.name), str(path)]
                    done = subprocess.run(
                        [sys.executable, __file__, *words], capture_output=True, text=True, check=True
                    )
                    cells.append(f"{what} {done.stdout.strip():>12}")
                print(f"{kind:20} {path.name:12} {'   '.join(cells)}", flush=True)


if __name__ == "__main__":
    main()
