"""Every layout against one device, the collectives of each against a written table, and what each of them is for."""

import functools

import jax
import numpy as np
import pytest

from hlat_jax.batch import abstract_batch, segmented_batch
from hlat_jax.config import ParallelConfig, default, resolve
from hlat_jax.optimizer import learning_rate
from hlat_jax.sharding import make_layout, resolve_degrees, shard_batch
from hlat_jax.step import abstract_state, init_state, make_eval_step, make_train_step, state_bytes
from mutations import collectives_seen

# name -> changes of parallel, model and train sections
LAYOUTS = {
    "data": dict(data=8),
    "data-zero1": dict(data=8, zero1=True),
    "fsdp": dict(data=1, fsdp=8),
    "fsdp-data-zero1": dict(data=2, fsdp=4, zero1=True, num_microbatches=2),
    "tensor": dict(data=4, tensor=2),
    "tensor-sequence": dict(data=4, tensor=2, sequence_parallel=True, remat="selective"),
    "tensor-fused-unroll": dict(data=4, tensor=2, fuse_qkv=True, layer_loop="unroll"),
    "kv-copies": dict(data=2, tensor=4),
    "kv-copies-sequence-zero1": dict(data=2, tensor=4, zero1=True, sequence_parallel=True, num_microbatches=4),
    "kv-copies-8": dict(data=1, tensor=8, sequence_parallel=True, remat="none"),
    "fsdp-tensor-sequence": dict(data=2, fsdp=2, tensor=2, sequence_parallel=True, zero1=True, num_microbatches=2),
    "pipe": dict(pipe=4, data=2, num_microbatches=4),
    "pipe-tied": dict(pipe=2, data=4, num_microbatches=2, tie_embeddings=True),
    "pipe-fsdp": dict(pipe=2, data=1, fsdp=4, num_microbatches=2, remat="selective"),
    "pipe-tensor-sequence": dict(pipe=2, data=1, tensor=4, zero1=True, sequence_parallel=True, num_microbatches=8),
    "pipe-all": dict(pipe=2, data=2, tensor=2, zero1=True, sequence_parallel=True, num_microbatches=4, remat="full"),
}
MODEL_ONLY = ("fuse_qkv", "tie_embeddings")


def configured(**changes):
    c = default()
    c.model.update(vocab_size=64, num_layers=4, embed_dim=32, mlp_dim=48, num_heads=8, num_kv_heads=2, head_dim=8)
    c.model.update(max_positions=16, fuse_qkv=False)
    c.data.update(batch_size=8, seq_len=16, packing="documents")
    c.optimizer.update(peak_lr=1e-2, warmup_steps=1, horizon_steps=100)
    for key, value in changes.items():
        section = next(s for s in (c.parallel, c.model, c.train, c.optimizer, c.precision) if key in s)
        section[key] = value
    return resolve(c)


def make_segments(seed, config):
    """Returns rows of three documents and padding, a different number of counted targets in each."""
    rng = np.random.default_rng(seed)
    shape = (config.data.batch_size, config.data.seq_len)
    ends = np.sort(rng.integers(1, shape[1], (shape[0], 3)), axis=1)
    places = np.arange(shape[1])
    ids = 1 + (places >= ends[:, :1]) + (places >= ends[:, 1:2])
    return segmented_batch(rng.integers(0, config.model.vocab_size, shape), np.where(places >= ends[:, 2:], 0, ids))


def layout_of(config, devices=None):
    return make_layout(config.parallel, devices or jax.devices(), num_kv_heads=config.model.num_kv_heads)


def alone(**changes):
    """Returns the config of the same model on one device, and its layout."""
    config = configured(data=1, **{key: value for key, value in changes.items() if key in MODEL_ONLY})
    return config, layout_of(config, jax.devices()[:1])


def trained(config, layout, *, num_steps):
    """Returns (initial parameters, rows of loss and gradient norm, state)."""
    state, step = init_state(config, layout), make_train_step(config, layout)
    initial, rows = jax.tree.map(np.asarray, state["params"]), []
    for index in range(num_steps):
        batch = shard_batch(make_segments(index % 3, config), layout)
        state, metrics = step(state, batch, np.float32(learning_rate(index, config.optimizer)))
        rows.append([float(metrics.loss), float(metrics.grad_norm), float(metrics.num_tokens)])
    return initial, np.asarray(rows), state


@functools.cache
def trained_alone(**changes):
    return trained(*alone(**changes), num_steps=20)


@pytest.mark.parametrize("name", LAYOUTS)
def test_layout_trains_as_one_device_does(name):
    changes = LAYOUTS[name]
    config = configured(**changes)
    layout = layout_of(config)
    wanted_initial, wanted, _ = trained_alone(**{key: changes[key] for key in MODEL_ONLY if key in changes})
    initial, got, state = trained(config, layout, num_steps=20)
    jax.tree.map(np.testing.assert_array_equal, wanted_initial, initial)
    np.testing.assert_allclose(got, wanted, rtol=5e-6)  # fp32 sums in another order
    assert state_bytes(state) == state_bytes(abstract_state(config, layout))


@pytest.mark.parametrize("name", ["fsdp-tensor-sequence", "pipe-all"])
def test_evaluation_over_a_mesh_is_that_of_one_device(name):
    config = configured(**LAYOUTS[name])
    for other, layout in ((config, layout_of(config)), alone()):
        state = init_state(other, layout)
        sums = make_eval_step(other, layout)(state["params"], shard_batch(make_segments(9, other), layout))
        if layout.mesh.size > 1:
            got = np.asarray(sums)
    np.testing.assert_allclose(got, np.asarray(sums), rtol=1e-6)


def one_step(config, layout, state, *, unless=None):
    """Returns every number of a first step at full learning rate, and the text of its program.

    The numbers: sums, moments (so gradients), weights; None where the text is `unless`, for nothing has to run then.
    """
    state = jax.tree.map(
        lambda whole, like: jax.device_put(whole, like.sharding), state, abstract_state(config, layout)
    )
    batch = shard_batch(make_segments(0, config), layout)
    lowered = make_train_step(config, layout).lower(state, batch, np.float32(1e-2))
    text = lowered.as_text()
    if text == unless:
        return None, text
    state, metrics = lowered.compile()(state, batch, np.float32(1e-2))
    return jax.device_get((metrics, state["opt_state"]["inner"], state["params"])), text


def furthest(got, wanted):
    """Returns the largest difference of a leaf from what is wanted, relative to the leaf's largest value."""
    return max(
        float(np.max(np.abs(np.subtract(a, b, dtype=np.float64))) / (np.max(np.abs(b)) + 1e-9))
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True)
    )


MUTATED = ["fsdp-data-zero1", "kv-copies", "fsdp-tensor-sequence", "pipe-tensor-sequence", "pipe-tied"]


@pytest.mark.parametrize("name", MUTATED)
def test_no_collective_can_be_left_out(name):
    changes = LAYOUTS[name] | {"clip_norm": 0.0, "num_layers": LAYOUTS[name].get("pipe", 1)}
    config = configured(**changes)
    one = configured(data=1, **{k: changes[k] for k in (*MODEL_ONLY, "clip_norm", "num_layers") if k in changes})
    initial = jax.device_get(init_state(one, layout_of(one, jax.devices()[:1])))
    wanted, _ = one_step(one, layout_of(one, jax.devices()[:1]), initial)
    layout = layout_of(config)
    with collectives_seen() as places:
        whole, program = one_step(config, layout, initial)
    assert furthest(whole, wanted) < 1e-4
    num_left_out, harmless = 0, []
    for place in places:
        jax.clear_caches()
        with collectives_seen(without=place):
            got, _ = one_step(config, layout, initial, unless=program)
        if got is not None:  # None: JAX traced it once, to know its shape, and kept the trace of its derivative
            num_left_out += 1
            if furthest(got, wanted) < 1e-3:
                harmless.append(place)
    assert num_left_out > 5
    assert not harmless
