"""Two real processes bring each its rows of a batch: the global batch and the saved position are those of one."""

import json
import os
import pathlib
import socket
import subprocess
import sys

import micro
import numpy as np

from hlat_jax.config import DataConfig
from hlat_jax.data.loader import TrainBatches
from hlat_jax.data.tokenizer import Tokenizer

DATA = DataConfig(
    train="a=package:austen_train.jsonl;b=package:austen_validation.jsonl",
    mixture="a=2,b=1",
    tokenizer="package:austen_2k.model",
    batch_size=8,
    seq_len=32,
    max_document_chars=2000,
)
PROGRAM = """
import json, pathlib, sys
import jax
import numpy as np
jax.distributed.initialize(sys.argv[1], 2, int(sys.argv[2]))
from jax.experimental import multihost_utils
from test_processes import DATA
from hlat_jax.config import ParallelConfig
from hlat_jax.data.loader import TrainBatches
from hlat_jax.data.tokenizer import Tokenizer
from hlat_jax.parallel.rows import gather_rows, process_rows
from hlat_jax.parallel.sharding import make_layout, shard_batch

found = []
for parallel in (ParallelConfig(), ParallelConfig(data=1, fsdp=2, tensor=2), ParallelConfig(data=1, tensor=4)):
    layout = make_layout(parallel, jax.devices())
    rows = process_rows(layout, DATA.batch_size)
    batches = TrainBatches(DATA, tokenizer=Tokenizer(DATA.tokenizer), rows=rows)
    for _ in range(3):
        batch, position = next(batches)
    batches.close()
    whole = gather_rows(position + 2**40, rows, DATA.batch_size) - 2**40
    tokens = multihost_utils.process_allgather(shard_batch(batch, layout).tokens, tiled=True)
    found.append([rows, whole.tolist(), np.asarray(tokens).tolist()])
if jax.process_index() == 0:
    pathlib.Path(sys.argv[3]).write_text(json.dumps(found))
"""


def test_two_processes_load_their_own_rows_and_save_one_position(tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    env = micro.environment(num_devices=2)
    tests = pathlib.Path(__file__).resolve().parents[1]
    env["PYTHONPATH"] = os.pathsep.join([env["PYTHONPATH"], str(tests / "data"), str(tests / "support")])
    runs = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, address, str(rank), str(tmp_path / "found.json")],
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        outputs = [run.communicate(timeout=600) for run in runs]
    finally:
        for run in runs:
            run.kill()
    assert [run.returncode for run in runs] == [0, 0], [error[-2000:] for _, error in outputs]
    found = json.loads((tmp_path / "found.json").read_text())
    batches = TrainBatches(DATA, tokenizer=Tokenizer(DATA.tokenizer))
    for _ in range(3):
        batch, position = next(batches)
    batches.close()
    assert [rows for rows, _, _ in found] == [[0, 1, 2, 3], [0, 1, 2, 3], list(range(8))]
    for _, saved, tokens in found:
        np.testing.assert_array_equal(saved, position)
        np.testing.assert_array_equal(tokens, batch.tokens)
