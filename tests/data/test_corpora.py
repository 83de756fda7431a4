"""Chapters of novels as every format that is read: the same batches, to behind the end of the first epoch."""

import contextlib
import itertools
import json

import pytest
from data_files import write_arrow, write_compressed, write_jsonl, write_parquet

from hlat_jax.config import DataConfig
from hlat_jax.data.build import build
from hlat_jax.data.formats.paths import asset_path
from hlat_jax.data.loader import TrainBatches, batch_hash
from hlat_jax.data.tokenizer import Tokenizer

TOKENIZER = Tokenizer("package:austen_2k.model")
FORMATS = ("Parquet", "Arrow stream", "Arrow file", "text files", "built texts", "built texts of .gz", "built ids")


@pytest.fixture(scope="module")
def novels(tmp_path_factory):
    """Name of a format -> data.train of the text of the package in it."""
    folder = tmp_path_factory.mktemp("novels")
    with asset_path("austen_train.jsonl").open(encoding="utf-8") as lines:
        texts = [json.loads(line)["text"] for line in itertools.islice(lines, 64)]
    jsonl = write_jsonl(folder / "a.jsonl", texts)
    packed = write_compressed(folder / "a.jsonl.gz", jsonl.read_bytes())
    (folder / "texts").mkdir()
    for number, text in enumerate(texts):
        (folder / "texts" / f"{number:03d}.txt").write_bytes(text.encode("utf-8"))
    for name, source, tokenizer in (
        ("built", jsonl, ""),
        ("gz", packed, ""),
        ("ids", jsonl, "package:austen_2k.model"),
    ):
        build.build(
            [str(source)],
            out=folder / name,
            options=build.BuildOptions(tokenizer=tokenizer, shard_bytes=1 << 20),
        )
    paths = [
        write_parquet(folder / "a.parquet", texts, rows_in_group=10),
        write_arrow(folder / "a.arrow", texts, rows_in_batch=10),
        write_arrow(folder / "b.arrow", texts, rows_in_batch=20, is_file=True, compression="zstd"),
        *(folder / name for name in ("texts", "built", "gz", "ids")),
    ]
    return dict(zip(FORMATS, map(str, paths), strict=True)) | {"JSONL": str(jsonl)}


def hashes(train, packing):
    """The hashes of all batches until every row is in its second epoch, and where that is."""
    data = DataConfig(
        train=train,
        tokenizer="package:austen_2k.model",
        batch_size=8,
        seq_len=1024,
        packing=packing,
        window_documents=8,
        num_threads=2,
    )
    found = []
    with contextlib.closing(TrainBatches(data, tokenizer=TOKENIZER)) as batches:
        while batches.get_state()[:, 1].min() < 1:
            found.append(batch_hash(next(batches)[0], rows=batches.rows))
        return found, batches.get_state().tolist()


@pytest.fixture(scope="module")
def of_jsonl(novels):
    return {packing: hashes(novels["JSONL"], packing) for packing in ("concat", "documents")}


@pytest.mark.quick_cases("built ids", "built texts")
@pytest.mark.parametrize("name", FORMATS)
def test_every_format_gives_the_same_batches_as_jsonl(novels, of_jsonl, name):
    for packing in ("concat", "documents"):
        assert len(of_jsonl[packing][0]) > 40
        assert hashes(novels[name], packing) == of_jsonl[packing]
