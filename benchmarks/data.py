"""How fast does text become batches, from each kind of file and under each packing, and does a step ever wait for it?

    python benchmarks/data.py [--text data/corpus/train.jsonl --tokenizer data/corpus/tokenizer.model] [--seconds 4]

Writes the text as Parquet, Arrow and built datasets (texts, ids) into a temporary folder, checks that batches from all
of them are the same (`--same_batches` from the beginning, from the middle and across the end of the first epoch, under
both packings), and measures each for some seconds after its first batch, in turn with bare SentencePiece on two threads
over the same documents. Then: the share of padding under `documents`; how long a resume takes at two steps far apart;
the share of a `tiny` step that waits for data. `--steps_160m 4` adds that of `160m`, with the vocabulary of the
tokenizer and a quarter of its batch, one microbatch (5 GB of memory, about a minute a step on two cores). Rates are of
tokens in rows; medians of `--rounds` rounds.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import dataclasses
import io
import itertools
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time

import numpy as np
import pyarrow
import pyarrow.parquet

from hlat_jax.cli import config_files
from hlat_jax.config import DataConfig
from hlat_jax.data.loader import TrainBatches, batch_hash
from hlat_jax.data.tokenizer import Tokenizer
from hlat_jax.resolve import resolve

ROWS, SEQ_LEN = 16, 2048


def write_formats(text: pathlib.Path, tokenizer: str, folder: pathlib.Path) -> dict[str, str]:
    """Returns name -> data.train of the documents of a JSONL file, written in every format."""
    texts = [json.loads(line)["text"] for line in text.open(encoding="utf-8")]
    table = pyarrow.table({"text": texts})
    pyarrow.parquet.write_table(table, folder / "a.parquet", row_group_size=1000)
    with pyarrow.ipc.new_stream(folder / "a.arrow", table.schema) as stream:
        stream.write_table(table, max_chunksize=1000)
    for name, words in {"built": [], "ids": [f"--tokenizer={tokenizer}"]}.items():
        command = [sys.executable, "-m", "hlat_jax.data", "build", str(text), f"--out={folder / name}", *words]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    files = {"JSONL": text, "Parquet": folder / "a.parquet", "Arrow": folder / "a.arrow"}
    files |= {"built texts": folder / "built", "built ids": folder / "ids"}
    return {name: str(path) for name, path in files.items()}


def hashes(data: DataConfig, tokenizer: Tokenizer, count: int) -> list[str]:
    """Returns the hashes of `count` batches from the beginning, from the middle and from just before the first epoch
    of every row ends."""
    found = []
    with contextlib.closing(TrainBatches(data, tokenizer=tokenizer)) as batches:
        [source] = batches.definition.sources
        own = np.asarray([len(range(row, len(source.documents), ROWS)) for row in batches.rows])
        for document in (np.zeros_like(own), own // 2, own - 2):
            position = batches.definition.position(None, num_rows=len(own))
            position[:, 2] = document
            batches.set_state(position)
            found += [batch_hash(next(batches)[0], rows=batches.rows) for _ in range(count)]
        assert (batches.get_state()[:, 1] >= 1).all(), "some row has not met the end of its epoch"
    return found


def assert_same_batches(base: DataConfig, trains: dict[str, str], tokenizer: Tokenizer, count: int) -> None:
    """Compares what every file gives under both packings."""
    for packing in ("concat", "documents"):
        data = dataclasses.replace(base, packing=packing, window_documents=32)
        wanted = hashes(data, tokenizer, count)
        for train in trains.values():
            assert hashes(dataclasses.replace(data, train=train), tokenizer, count) == wanted, (packing, train)


def tokens_per_s(data: DataConfig, tokenizer: Tokenizer, seconds: float) -> tuple[float, float]:
    """Returns (tokens per second after the first batch, seconds until the first batch)."""
    began = time.perf_counter()
    with contextlib.closing(TrainBatches(data, tokenizer=tokenizer)) as batches:
        next(batches)
        first_s, began, count = time.perf_counter() - began, time.perf_counter(), 0
        while time.perf_counter() - began < seconds:
            next(batches)
            count += 1
        return count * ROWS * SEQ_LEN / (time.perf_counter() - began), first_s


def bare_tokens_per_s(text: pathlib.Path, tokenizer: Tokenizer, seconds: float) -> float:
    """Returns the rate of two threads that only call SentencePiece, reading and parsing left out."""
    with text.open(encoding="utf-8") as lines:
        texts = [json.loads(line)["text"] for line in itertools.islice(lines, 2000)]
    until = time.perf_counter() + seconds

    def encode(offset: int) -> int:
        count, index = 0, offset
        while time.perf_counter() < until:
            count += len(tokenizer.encode(texts[index % len(texts)]))
            index += 2
        return count

    began = time.perf_counter()
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        count = sum(pool.map(encode, range(2)))
    return count / (time.perf_counter() - began)


def resume_s(data: DataConfig, tokenizer: Tokenizer, batches_before: int) -> float:
    """Returns the seconds from a saved position after so many batches to the next batch."""
    with contextlib.closing(TrainBatches(data, tokenizer=tokenizer)) as batches:
        for _ in range(batches_before):
            _, position = next(batches)
    began = time.perf_counter()
    with contextlib.closing(TrainBatches(data, tokenizer=tokenizer, position=position)) as batches:
        next(batches)
        return time.perf_counter() - began


def padding_share(data: DataConfig, tokenizer: Tokenizer, seq_len: int) -> float:
    """Returns the share of padding of `documents` in the batches until every row is in its second epoch."""
    data = dataclasses.replace(data, packing="documents", batch_size=8, seq_len=seq_len)
    used = count = 0
    with contextlib.closing(TrainBatches(data, tokenizer=tokenizer)) as batches:
        while batches.get_state()[:, 1].min() < 1:
            segment_ids = next(batches)[0].segment_ids
            used, count = used + np.count_nonzero(segment_ids), count + segment_ids.size
    return 1 - used / count


def waiting_share(name: str, steps: int, *, data: DataConfig | None = None, vocab_size: int = 2048) -> float:
    """Returns the share of the steps of a shipped config spent waiting for data, the first two left out.

    `data`: whose text and tokenizer it takes, with the rows of one microbatch; None: its own.
    """
    from hlat_jax.train import train

    c = config_files.load(name)
    if data is not None:
        c.data.update(
            train=data.train, tokenizer=data.tokenizer, batch_size=c.data.batch_size // c.train.num_microbatches
        )
        c.model.vocab_size, c.train.num_microbatches = vocab_size, 1
    c.train.update(num_steps=steps, eval_every_steps=0, sample_prompt="")
    c.data.validation = ""
    c.metrics.update(plot=False, console="off")
    c.checkpoint.every_steps = 0
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        train(resolve(c), pathlib.Path(folder))
        rows = [json.loads(line) for line in (pathlib.Path(folder) / "metrics.jsonl").read_text().splitlines()][2:]
    return sum(row["data_wait_s"] for row in rows) / sum(row["step_s"] for row in rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", default="package:austen_train.jsonl")
    parser.add_argument("--tokenizer", default="package:austen_2k.model")
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--same_batches", type=int, default=100)
    parser.add_argument("--steps_160m", type=int, default=0)
    args = parser.parse_args()
    from hlat_jax.data.formats.paths import asset_path

    text = asset_path(args.text.removeprefix("package:")) if args.text.startswith("package:") else args.text
    text, tokenizer = pathlib.Path(text), Tokenizer(args.tokenizer)
    with tempfile.TemporaryDirectory() as name:
        trains = write_formats(text, args.tokenizer, pathlib.Path(name))
        base = dataclasses.replace(
            DataConfig(), train=str(text), tokenizer=args.tokenizer, batch_size=ROWS, seq_len=SEQ_LEN
        )
        assert_same_batches(base, trains, tokenizer, args.same_batches)
        print(
            f"{text.name}, {text.stat().st_size / 1e6:.1f} MB, {ROWS} x {SEQ_LEN}; "
            f"the same {6 * args.same_batches} batches from every format"
        )
        print(
            f"{'':14}{'packing':>10}{'threads':>8}{'M tokens/s':>12}{'per core':>9}{'of bare':>9}{'first batch s':>15}"
        )
        for packing in ("concat", "documents"):
            for source, train in trains.items():
                data = dataclasses.replace(base, train=train, packing=packing, window_documents=32)
                rounds = [
                    (bare_tokens_per_s(text, tokenizer, args.seconds), *tokens_per_s(data, tokenizer, args.seconds))
                    for _ in range(args.rounds)
                ]
                rate, first_s = (statistics.median(column) for column in list(zip(*rounds, strict=True))[1:])
                of_bare = statistics.median(row[1] / row[0] for row in rounds)
                print(
                    f"{source:14}{packing:>10}{data.num_threads:8}{rate / 1e6:12.2f}"
                    f"{rate / 1e6 / min(data.num_threads, os.cpu_count()):9.2f}{of_bare:9.2f}{first_s:15.2f}",
                    flush=True,
                )
        ids = dataclasses.replace(base, train=trains["built ids"])
        shares = [f"{seq_len}: {padding_share(ids, tokenizer, seq_len):.2%}" for seq_len in (1024, 2048, 4096, 8192)]
        print(f"padding of documents, 8 rows, windows of {ids.window_documents}, by seq_len: {', '.join(shares)}")
        ids = dataclasses.replace(ids, batch_size=4, seq_len=256)
        for step in (10, 10_000):
            seconds = statistics.median(resume_s(ids, tokenizer, step) for _ in range(3))
            print(f"resume after step {step:6,}: {seconds:.3f} s to the next batch (ids, 4 x 256)")
    print(f"share of a tiny step that waits for data: {waiting_share('tiny', 30):.3%}", flush=True)
    if args.steps_160m:
        share = waiting_share("160m", 2 + args.steps_160m, data=base, vocab_size=tokenizer.vocab_size)
        print(f"share of a 160m step that waits for data: {share:.3%} of {args.steps_160m} steps")


if __name__ == "__main__":
    main()
