"""A sequence split over devices is the same training as on one."""

import functools

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from hlat_jax.batch import segmented_batch
from hlat_jax.config import default
from hlat_jax.ops import context_attention
from hlat_jax.parallel.degrees import layout_over
from hlat_jax.parallel.rows import shard_batch, zigzag
from hlat_jax.program import make_program
from hlat_jax.resolve import resolve

SEQ_LEN = 48
# What the rows of the covering array are too short for: windows over several parts, and shorter than one.
LAYOUTS = {
    "window": {"parallel.context": 4, "model.sliding_window": 7},
    "ring, window shorter than a chunk": {
        "parallel.context": 4,
        "parallel.context_exchange": "ring",
        "model.sliding_window": 3,
    },
    "ring, rows, tensor, windows that differ": {
        "parallel.context": 2,
        "parallel.data": 2,
        "parallel.tensor": 2,
        "parallel.context_exchange": "ring",
        "parallel.zero1": True,
        "model.sliding_window": 7,
        "model.sliding_window_layers": "1:2",
        "model.remat": "full",
    },
}


def configured(changes):
    c = default()
    sizes = {"vocab_size": 64, "embed_dim": 32, "mlp_dim": 48, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8}
    c.model.update(num_layers=2, fuse_qkv=False, init_std=0.2, **sizes)
    c.data.update(batch_size=4, seq_len=SEQ_LEN, packing="documents")
    c.parallel.data = 1
    for path, value in changes.items():
        section, key = path.split(".")
        c[section][key] = value
    return resolve(c)


def drawn(seed):
    """Returns rows of up to four documents with padding at the end."""
    rng = np.random.default_rng(seed)
    ids = np.sort(rng.integers(1, 5, (4, SEQ_LEN)), axis=1)
    ids[:, -3:] = 0
    return segmented_batch(rng.integers(0, 64, (4, SEQ_LEN)), ids)


def trained(config, num_steps=4):
    degrees = config.parallel
    count = degrees.pipe * degrees.data * degrees.fsdp * degrees.context * degrees.tensor
    program = make_program(config, layout_over(config, jax.devices()[:count]))
    state, rows = program.init_state(), []
    for step in range(num_steps):
        state, metrics = program.run_step(state, program.shard(drawn(step)), np.float32(1e-3))
        rows.append([float(metrics.loss), float(metrics.grad_norm), float(metrics.num_tokens)])
    total, count = program.eval_step(state["params"], shard_batch(drawn(99), program.layout))
    return [*np.ravel(rows), float(total), float(count)]


@functools.cache
def on_one_device(changes):
    return trained(configured({path: value for path, value in changes if not path.startswith("parallel.")}))


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_split_sequence_trains_as_on_one_device(name):
    changes = LAYOUTS[name]
    alone = tuple((path, value) for path, value in changes.items() if path.startswith("model."))
    np.testing.assert_allclose(trained(configured(changes)), on_one_device(alone), rtol=5e-6)


@pytest.mark.parametrize("exchange", ["all_gather", "ring"])
def test_a_document_does_not_reach_another_across_the_split(exchange):
    config = configured({"parallel.context": 4, "parallel.context_exchange": exchange})
    layout = layout_over(config, jax.devices()[:4])
    order = zigzag(SEQ_LEN, 4)
    back = np.argsort(order)
    ids = (np.arange(SEQ_LEN)[None] >= 19).astype(np.int32) + 1
    q, k, v = (np.random.default_rng(seed).standard_normal((1, SEQ_LEN, 2, 8)).astype(np.float32) for seed in range(3))

    def run(*arrays):
        def local(q, k, v, ids):
            return context_attention.attend_over(layout, ids)(q, k, v, window=None)[0]

        specs = layout.batch_spec
        mapped = jax.shard_map(local, mesh=layout.mesh, in_specs=(specs,) * 4, out_specs=specs, check_vma=False)
        return np.asarray(jax.jit(mapped)(*(x[:, order] for x in (*arrays, ids))))[:, back]

    before = run(q, k, v)
    after = run(*(np.where((ids == 1)[..., None, None], x + 100, x) for x in (q, k, v)))
    assert layout.batch_spec == P(("data", "fsdp"), "context")
    np.testing.assert_array_equal(before[:, 19:], after[:, 19:])
    assert (before[:, :19] != after[:, :19]).any(axis=(2, 3)).all()


@pytest.mark.parametrize("is_ring", [False, True])
@pytest.mark.parametrize("window", [None, 1, 9, 40])
def test_devices_visit_every_pair_of_blocks_once(monkeypatch, window, is_ring):
    monkeypatch.setattr(context_attention.chunked_attention, "BLOCK", 4)
    context_attention.tables.cache_clear()
    turns, query_starts, key_starts = context_attention.tables(SEQ_LEN, 3, window, is_ring=is_ring)
    context_attention.tables.cache_clear()
    visited = []
    for turn, pairs in enumerate(turns):
        for own, queries, keys in zip(pairs, query_starts, key_starts[:, turn], strict=True):
            visited += [(queries[query], keys[key]) for query, key in own]
    unmasked = [(query, key) for query, key in visited if query >= key]
    wanted = {(q, k) for q in range(0, SEQ_LEN, 4) for k in range(0, q + 1, 4) if window is None or q - k - 3 < window}
    assert sorted(unmasked) == sorted(wanted)
    assert len(visited) == len(unmasked) or window is not None  # without a window all have the same work


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"parallel.context": 2, "data.seq_len": 46},
            r"data.seq_len=46 is not a multiple of 4, which parallel.context=2",
        ),
        (
            {"parallel.context": 2, "data.seq_len": 2056, "model.max_positions": 2056},
            r"data.seq_len=2056 is not a multiple of 256, .* of blocks of 64 positions",
        ),
        ({"parallel.context": -2}, r"parallel.context=-2 must be positive, or -1"),
    ],
)
def test_what_cannot_be_split_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        trained(configured(changes))
