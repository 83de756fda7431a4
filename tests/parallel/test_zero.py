"""ZeRO for models that are not ours: every stage trains as one device does, and holds and sends what it should."""

import collections

import jax
import numpy as np
import optax
import optax.contrib
import pytest
from compiled_collectives import collectives
from foreign_models import batch, user_model
from programs import training_program

from hlat_jax.passes.products import live_jaxpr
from hlat_jax.plan.collectives import traced_collectives
from hlat_jax.precision import POLICIES


def trained(loss, params, *, stage=None, bucket_bytes=0, policy="fp32", steps=6):
    """Returns (losses and norms, final state, text of the compiled step)."""
    options = {"policy": POLICIES[policy], "num_microbatches": 2, "zero": stage, "bucket_bytes": bucket_bytes}
    program = training_program(loss, optax.adam(1e-2), options=options, params=params)
    state, replica_sync = program.init(params), program.train_step.options.replica_sync
    put = (lambda x: x) if replica_sync is None else lambda x: jax.device_put(x, replica_sync.layout.rows())
    text = program.step.lower(state, put(batch(0)), 0.0).compile().as_text()
    rows = []
    for step in range(steps):
        state, metrics = program.step(state, put(batch(step)), 0.0)
        rows.append([float(metrics.loss), float(metrics.grad_norm), float(metrics.param_norm)])
    return np.array(rows), state, (text, None if replica_sync is None else replica_sync.layout.mesh)


@pytest.mark.quick_cases("3-flax-0")
@pytest.mark.parametrize(("stage", "kind", "bucket_bytes"), [(1, "plain", 1000), (2, "plain", 0), (3, "flax", 0)])
def test_every_stage_trains_like_one_device(stage, kind, bucket_bytes):
    loss, params = user_model(kind)
    wanted, alone, _ = trained(loss, params)
    got, state, _ = trained(loss, params, stage=stage, bucket_bytes=bucket_bytes)
    np.testing.assert_allclose(got, wanted, rtol=5e-6)  # fp32 sums in another order
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5), alone["params"], state["params"])


def test_each_stage_holds_its_part_and_uses_only_the_collectives_it_needs():
    loss, params = user_model("plain")  # five arrays that 8 divides, and a scalar; 2 microbatches
    found, held = {}, {}
    for stage in range(4):
        options = {"policy": POLICIES["mixed"], "num_microbatches": 2, "zero": stage}
        program = training_program(loss, optax.adam(1e-2), options=options, params=params)
        traced = program.step.trace(jax.eval_shape(program.init, params), batch(0), 0.0)
        state = program.init(params)

        def share(tree):
            return sum(leaf.addressable_shards[0].data.size for leaf in jax.tree.leaves(tree))

        held[stage] = share(state["params"]), share(state["opt_state"]["master"])
        found[stage] = collections.Counter()
        for collective in traced_collectives(live_jaxpr(traced), program.train_step.options.replica_sync.layout.mesh):
            found[stage][collective.kind] += collective.trips
    whole = sum(np.size(leaf) for leaf in jax.tree.leaves(params))
    part = (whole - 1) // 8 + 1  # all but the scalar divide
    assert held == {0: (whole, whole), 1: (whole, part), 2: (whole, part), 3: (part, part)}
    # stage 3 gathers for the loss, and for its backward pass again what that reads: the matrices behind the first;
    # loss and count, the scalar's gradient, and the norms of gradients and weights; of stage 0 the other gradients
    assert found == {
        0: {"all-reduce": 2 + 6},
        1: {"all-reduce": 2 + 1 + 2, "reduce-scatter": 5, "all-gather": 5},
        2: {"all-reduce": 2 + 2 + 2, "reduce-scatter": 2 * 5, "all-gather": 5},
        3: {"all-reduce": 2 + 1 + 2, "reduce-scatter": 2 * 5, "all-gather": 2 * 5 + 2 * 2},
    }


def test_buckets_group_arrays_up_to_bucket_bytes():
    loss, params = user_model("plain")
    for bucket_bytes, wanted in ((0, 5), (1600, 3), (10**6, 1)):
        text, mesh = trained(loss, params, stage=1, bucket_bytes=bucket_bytes, steps=1)[2]
        scatters = [c for c in collectives(text, mesh) if c.kind == "reduce-scatter"]
        assert len(scatters) == wanted
        assert all(c.payload_bytes <= max(bucket_bytes, 24 * 16 * 4) for c in scatters)


def test_state_for_some_of_the_parameters_is_sharded_like_them():
    loss, params = user_model("plain")
    labels = jax.tree.map(lambda leaf: "adam" if np.ndim(leaf) > 1 else "sgd", params)
    optimizer = optax.partition({"adam": optax.adam(1e-2), "sgd": optax.sgd(1e-2, momentum=0.9)}, labels)
    options = {"policy": POLICIES["fp32"], "zero": 1}
    state = training_program(loss, optimizer, options=options, params=params).init(params)
    for leaf in jax.tree.leaves(state["opt_state"]["inner"]):
        assert leaf.addressable_shards[0].data.size == (leaf.size // 8 if leaf.size % 8 == 0 else leaf.size)
