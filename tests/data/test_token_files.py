"""Token ids made by other programs: the batches of the same documents given as text, and files that are refused."""

import struct

import numpy as np
import pytest
from data_files import write_jsonl
from refusals import assert_names, assert_refused, refused

import configs
from hlat_jax.data import sources
from hlat_jax.data.formats import token_files
from hlat_jax.data.held_out import open_held_out
from hlat_jax.data.loader import TrainBatches, batch_hash
from hlat_jax.data.tokenizer import Tokenizer

NATIVE = "package:austen_2k.model"
TOKENIZER = Tokenizer(NATIVE)
TEXTS = [f"Document {n} has {'more ' * n}words." for n in range(1, 13)]
IDS = [[*TOKENIZER.encode(text), TOKENIZER.eos_id] for text in TEXTS]
CODES = {np.uint16: 8, np.int32: 4, np.int64: 5}


def write_megatron(path, sequences, *, dtype=np.uint16, boundaries=None):
    """Writes a .bin and its .idx, byte by byte; `boundaries` are the first sequences of documents, and their number."""
    path.write_bytes(b"".join(np.asarray(ids, dtype).tobytes() for ids in sequences))
    lengths = np.asarray([len(ids) for ids in sequences])
    offsets = np.append(0, np.cumsum(lengths))[:-1] * np.dtype(dtype).itemsize
    boundaries = range(len(sequences) + 1) if boundaries is None else boundaries
    content = b"MMIDIDX\x00\x00" + struct.pack("<Q", 1) + struct.pack("<B", CODES[dtype])
    content += struct.pack("<Q", len(sequences)) + struct.pack("<Q", len(boundaries))
    content += lengths.astype("<i4").tobytes() + offsets.astype("<i8").tobytes()
    path.with_suffix(".idx").write_bytes(content + np.asarray(boundaries, "<i8").tobytes())


def data_config(path, **changes):
    small = {"tokenizer": NATIVE, "batch_size": 2, "seq_len": 32}
    return configs.resolved(data__train=str(path), **small | changes).data


def batches(path, num=8):
    opened = TrainBatches(data_config(path, validation=""), tokenizer=TOKENIZER)
    made = [next(opened)[0] for _ in range(num)]
    opened.close()
    return [np.asarray([batch.tokens, batch.targets, batch.weights]) for batch in made]


def test_batches_are_those_of_the_same_documents_as_text(tmp_path):
    (tmp_path / "texts").mkdir()
    for number, text in enumerate(TEXTS):
        (tmp_path / "texts" / f"{number:02}.txt").write_text(text)
    for dtype in (np.int32, np.int64):  # and uint16 below, in every packing
        write_megatron(tmp_path / f"{dtype.__name__}.bin", IDS, dtype=dtype)
    halves = [half for ids in IDS for half in (ids[:3], ids[3:])]  # two sequences a document, as of split sentences
    write_megatron(tmp_path / "sentences.bin", halves, boundaries=range(0, 25, 2))
    wanted = batches(tmp_path / "texts")
    for name in ("int32.bin", "int64.bin", "sentences.bin"):
        np.testing.assert_array_equal(batches(tmp_path / name), wanted, err_msg=name)
    np.save(tmp_path / "rows.npy", np.asarray([ids[:5] for ids in IDS], np.int32))
    rows = {tuple(batch[0].astype(int).ravel()[:5]) for batch in batches(tmp_path / "rows.npy", num=40)}
    assert rows & {tuple(ids[:5]) for ids in IDS}


def test_commands_read_token_files(tmp_path, data_here):
    good = tmp_path / "good.bin"
    write_megatron(good, IDS)
    words = ["--config=tiny", "--config.data.validation=", f"--config.data.train={good}"]
    code, printed, error = data_here("peek", *words, "--step=1", "--row=0", f"--workdir={tmp_path / 'run'}")
    assert (code, "Document 12 has more more" in printed or "Document 11 has more more" in printed) == (0, True), error
    code, printed, error = data_here("stats", *words, "--sample_mb=0")
    assert (code, f"{sum(map(len, IDS)):,}" in printed) == (0, True), error
    assert_refused(data_here("build", str(good), f"--out={tmp_path / 'built'}"), good, "token ids")


def index_of(path):
    return path.with_suffix(".idx")


def change_index(change):
    return lambda path: index_of(path).write_bytes(change(index_of(path).read_bytes()))


@pytest.mark.parametrize(
    ("change", "names"),
    [
        (lambda path: index_of(path).unlink(), ("bad.idx",)),
        (change_index(lambda index: b"TNTIDX\0\0" + index[9:]), ("bad.idx",)),
        (change_index(lambda index: index[:17] + b"\x07" + index[18:]), ("bad.idx", "version 1", "dtype 7")),
        (change_index(lambda index: index[:-200]), ("bad.idx", "12 sequences", "13")),
        (lambda path: path.write_bytes(path.read_bytes()[:-2]), ("uint16", "bad.bin")),
        (lambda path: write_megatron(path, [[5, 5000], *IDS]), ("bad.bin", "5000", "2048")),
        (lambda path: write_megatron(path, IDS, boundaries=[0, 9, 3, 12]), ("bad.idx",)),
    ],
)
def test_a_damaged_bin_or_idx_is_refused(change, names, tmp_path):
    path = tmp_path / "bad.bin"
    write_megatron(path, IDS)
    change(path)
    with refused(*names):
        batches(path)


def test_an_npy_that_holds_no_documents_is_refused(tmp_path):
    for name, array, *facts in [
        ("floats.npy", np.zeros(9), "float64"),
        ("cube.npy", np.zeros((2, 2, 2), np.int32), "3 axes"),
        ("minus.npy", np.full((4, 3), -1), "-1"),
        ("no_end.npy", np.arange(3, 40), "one axis", f"id {TOKENIZER.eos_id}"),
        ("fortran.npy", np.asfortranarray(np.ones((3, 2), int)), "Fortran"),
    ]:
        np.save(tmp_path / name, array)
        with refused(name, *facts):
            batches(tmp_path / name)
    (tmp_path / "torn.npy").write_bytes((tmp_path / "minus.npy").read_bytes()[:-9])
    np.savez(tmp_path / "zip", ids=np.arange(9))
    (tmp_path / "zip.npz").rename(tmp_path / "zip.npy")
    for name in ("torn.npy", "zip.npy"):
        with refused(name, "numpy.save"):
            batches(tmp_path / name)


def test_ids_beyond_the_vocabulary_are_found_before_training(tmp_path, monkeypatch):
    path, tokenizer = tmp_path / "large.bin", Tokenizer(NATIVE, vocab_size=2304)
    write_megatron(path, [*IDS[:7], [*IDS[7], 2048], *IDS[8:]])
    data = data_config(path, validation=str(path))
    for opens in (TrainBatches, lambda *args, **given: open_held_out(*args, **given, num_batches=1)):
        with refused("large.bin", "2048", "model.vocab_size=2304"):
            opens(data, tokenizer=tokenizer)
    monkeypatch.setattr(token_files, "_BLOCK_BYTES", 4)  # the blocks that are read first are now a part of the file
    opened = sources.open_corpus(str(path), text_field="text", key="k", tokenizer=tokenizer)
    assert opened[6].tolist() == IDS[6]
    with refused("large.bin, document 8", "2048"):
        opened[7]


def test_an_index_names_its_ids_and_a_folder_gives_pairs_alone(tmp_path):
    write_megatron(tmp_path / "a.bin", [[], *IDS, []])
    expected = batches(tmp_path / "a.bin", num=3)
    (tmp_path / "model.bin").write_bytes(b"weights of a model")
    np.save(tmp_path / "embeddings.npy", np.zeros(3))
    for name in (tmp_path / "a.idx", tmp_path / "a.*", tmp_path):
        np.testing.assert_array_equal(batches(name, num=3), expected, err_msg=str(name))
    opened = sources.open_corpus(str(tmp_path), text_field="text", key="k", tokenizer=TOKENIZER)
    assert len(opened) == len(IDS)
    assert_names(opened.ignored, "2 files", ".bin 1", ".npy 1")
    (tmp_path / "a.bin").unlink()
    with refused("a.bin"):
        batches(tmp_path / "a.idx")


@pytest.mark.parametrize("packing", ["concat", "documents"])
@pytest.mark.parametrize("kind", ["bin", "npy"])
def test_resumed_batches_and_validation_are_those_of_text(kind, packing, tmp_path, monkeypatch):
    monkeypatch.setattr(token_files, "_BLOCK_BYTES", 64)  # a file is then several blocks
    write_jsonl(tmp_path / "texts.jsonl", TEXTS)
    write_megatron(tmp_path / "ids.bin", IDS)
    np.save(tmp_path / "ids.npy", np.concatenate(IDS).astype(np.uint16))
    names = (f"ids.{kind}", "texts.jsonl")
    pair = [data_config(tmp_path / name, validation="20%", packing=packing) for name in names]
    stored, tokenized = (TrainBatches(data, tokenizer=TOKENIZER) for data in pair)
    for step in range(12):  # more than two epochs
        if step == 5:
            stored.set_state(stored.get_state())
        (ours, position), (theirs, other) = next(stored), next(tokenized)
        assert batch_hash(ours, rows=[0, 1]) == batch_hash(theirs, rows=[0, 1])
        np.testing.assert_array_equal(position, other)
    stored.close()
    tokenized.close()
    ours, theirs = (open_held_out(data, tokenizer=TOKENIZER, num_batches=0)[0]["all"] for data in pair)
    assert (ours.num_bytes, ours.coverage) == (theirs.num_bytes, theirs.coverage)
    hashes = [[batch_hash(batch, rows=[0, 1]) for batch in each.batches] for each in (ours, theirs)]
    assert hashes[0] == hashes[1]
