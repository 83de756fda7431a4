"""A document of 40 MB grows the process that reads or builds it by a small multiple of its size: measured."""

import pathlib
import subprocess
import sys

import pytest
from data_files import write_arrow, write_jsonl, write_parquet

pytestmark = [
    pytest.mark.skipif(not pathlib.Path("/proc/self/status").exists(), reason="peak memory is read from /proc"),
    pytest.mark.xdist_group("memory"),  # its files are costly: one process
]
MIB = 1 << 20
LONG = 40 * MIB
PROGRAM = """
import contextlib, sys
from hlat_jax.config import DataConfig
from hlat_jax.data import __main__ as commands
from hlat_jax.data.loader import TrainBatches
from hlat_jax.data.tokenizer import Tokenizer

def read(train):
    data = DataConfig(train=train, tokenizer="package:austen_2k.model", batch_size=2, seq_len=64, shuffle=False)
    with contextlib.closing(TrainBatches(data, tokenizer=Tokenizer(data.tokenizer))) as batches:
        for _ in range(50):
            next(batches)

def build(train, out):
    with contextlib.redirect_stdout(None):
        assert commands.main(["build", train, f"--out={out}", "--workers=1"]) == 0

def peak():
    return next(int(line.split()[1]) << 10 for line in open("/proc/self/status") if line.startswith("VmHWM"))

work, small, large, *out = sys.argv[1:]
globals()[work](small, *(f"{folder}/small" for folder in out))  # what libraries take for themselves
before = peak()
globals()[work](large, *(f"{folder}/large" for folder in out))
print(peak() - before)
"""


def growth(work, name, folder, *out):
    """Bytes by which a process grew over a file with a long document, after it did the same with a short one."""
    words = [sys.executable, "-c", PROGRAM, work, folder / "short" / name, folder / "long" / name, *out]
    done = subprocess.run([*map(str, words)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return int(done.stdout)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with a long document, and one with a short one in its place, as every format."""
    base = tmp_path_factory.mktemp("long")
    for name, num_bytes in (("long", LONG), ("short", 1000)):
        texts, out = ["first"] * 3 + ["It is a truth, number 1234567. " * (num_bytes // 31)] + ["last"] * 4, base / name
        out.mkdir()
        write_jsonl(out / "a.jsonl", texts)
        write_parquet(out / "a.parquet", texts, rows_in_group=100)
        write_arrow(out / "a.arrow", texts, rows_in_batch=100)
    return base


@pytest.mark.quick_cases("read-a.jsonl")
@pytest.mark.parametrize(
    ("work", "name"),
    [("read", "a.jsonl"), ("read", "a.arrow"), ("read", "a.parquet"), ("build", "a.jsonl")],
)
def test_a_long_document_takes_a_small_multiple_of_its_size(folder, tmp_path, work, name):
    assert LONG < growth(work, name, folder, *[tmp_path] * (work == "build")) < 6 * LONG
