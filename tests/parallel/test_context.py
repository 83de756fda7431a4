"""A sequence split over devices is the same training as on one."""

import jax
import numpy as np
import pytest
import steps
from jax.sharding import PartitionSpec as P

from hlat_jax.config import default
from hlat_jax.ops import context_attention
from hlat_jax.parallel.degrees import layout_over
from hlat_jax.parallel.rows import zigzag
from hlat_jax.resolve import resolve

SEQ_LEN = 48
# Windows shorter than a part of the sequence, and over several of them: rows of the covering array are too short.
LAYOUTS = {
    "window shorter than a chunk": {"parallel.context": 4, "model.sliding_window": 3},
    "rows, tensor, windows that differ": {
        "parallel.context": 2,
        "parallel.data": 2,
        "parallel.tensor": 2,
        "parallel.zero1": True,
        "model.remat": "full",
    }
    | {"model.sliding_window": 7, "model.sliding_window_layers": "1:2"},
}


def configured(changes):
    c = default()
    sizes = {"vocab_size": 64, "embed_dim": 32, "mlp_dim": 48, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8}
    c.model.update(num_layers=2, fuse_qkv=False, init_std=0.2, **sizes)
    c.data.update(batch_size=4, seq_len=SEQ_LEN, packing="documents")
    c.parallel.data = 1
    c.update_from_flattened_dict(changes)
    return resolve(c)


def trained(changes):
    """Returns losses, gradient norms and numbers of targets of four steps, and the sums of an evaluation."""
    config = configured(changes)
    program, state, rows = steps.trained(config, [steps.documents(seed, config) for seed in range(4)])
    sums = program.eval_step(state["params"], program.shard(steps.documents(99, config)))
    found = [value for row in rows for value in (row.loss, row.grad_norm, row.num_tokens)]
    return np.array([*found, *sums], np.float64)


@pytest.mark.quick_cases("rows, tensor, windows that differ")
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_split_sequence_trains_as_on_one_device(name):
    alone = {path: value for path, value in LAYOUTS[name].items() if path.startswith("model.")}
    np.testing.assert_allclose(trained(LAYOUTS[name]), trained(alone), rtol=5e-6)


def test_a_document_does_not_reach_another_across_the_split():
    config = configured({"parallel.context": 4})
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


@pytest.mark.parametrize("window", [None, 1, 9, 40])
def test_devices_visit_every_pair_of_blocks_once(monkeypatch, window):
    monkeypatch.setattr(context_attention.chunked_attention, "BLOCK", 4)
    context_attention.tables.cache_clear()
    pairs, query_starts, key_starts = context_attention.tables(SEQ_LEN, 3, window)
    context_attention.tables.cache_clear()
    visited = [
        (queries[query], key_starts[key])
        for own, queries in zip(pairs, query_starts, strict=True)
        for query, key in own
    ]
    unmasked = [(query, key) for query, key in visited if query >= key]
    wanted = {(q, k) for q in range(0, SEQ_LEN, 4) for k in range(0, q + 1, 4) if window is None or q - k - 3 < window}
    assert sorted(unmasked) == sorted(wanted)
    assert len(visited) == len(unmasked) or window is not None  # without a window all have the same work


@pytest.mark.parametrize(
    ("key", "changes"),
    [
        ("data.seq_len=46", {"parallel.context": 2, "data.seq_len": 46}),
        ("data.seq_len=2056", {"parallel.context": 2, "data.seq_len": 2056, "model.max_positions": 2056}),
        ("parallel.context=-2", {"parallel.context": -2}),
    ],
)
def test_a_sequence_that_cannot_be_split_is_refused(key, changes):
    with pytest.raises(ValueError, match=f"^{key}"):
        trained(changes)
