"""The norms of the gradient and the update of each layer, against the state before and after a step, in NumPy."""

import collections
import dataclasses
import math

import jax
import micro
import numpy as np
import pytest
from planned import num_devices, small_config
from steps import documents, trained

from hlat_jax.parallel.degrees import layout_over
from hlat_jax.passes.products import live_jaxpr
from hlat_jax.plan.collectives import traced_collectives
from hlat_jax.program import make_program
from hlat_jax.step import StepOptions

RATE = 1e-2
LAYOUTS = {
    "one-device": {},
    "programs-fsdp-tensor": {"data": 2, "fsdp": 2, "tensor": 2, "zero1": True, "accumulate": "programs", "m": 2},
    "pipe-zero1": {"pipe": 2, "data": 2, "tensor": 2, "sequence_parallel": True, "zero1": True, "m": 2},
    "padded-zero1": {"data": 3, "zero1": True, "batch_size": 12},
    "replicated-kv-heads": {"tensor": 8, "zero1": True},
}


def with_layer_norms(layer_norms=True, **changes):
    config = small_config(policy="fp32", **changes)
    return dataclasses.replace(config, metrics=dataclasses.replace(config.metrics, layer_norms=layer_norms))


def norms(tree):
    """Returns parameter, or "layers" -> L2 norm in float64, for layers [L]."""

    def squares(name, part):
        leaves = [np.square(np.asarray(leaf, np.float64)) for leaf in jax.tree.leaves(part)]
        return sum(leaf.reshape(len(leaf), -1).sum(1) if name == "layers" else leaf.sum() for leaf in leaves)

    return {name: np.sqrt(squares(name, part)) for name, part in tree.items()}


@pytest.mark.quick_cases("padded-zero1")
@pytest.mark.parametrize("name", LAYOUTS)
def test_norms_of_layers_are_those_of_the_moments_and_weights(name):
    config = with_layer_norms(**LAYOUTS[name])
    _, before, _ = trained(config, [])
    _, after, [metrics] = trained(config, [documents(0, config)], rate=RATE)
    scale = min(1.0, config.optimizer.clip_norm / (metrics.grad_norm + 1e-6)) * (1.0 - config.optimizer.beta1)
    found = metrics.layer_norms
    wanted = norms(jax.tree.map(lambda mu: np.asarray(mu) / scale, after["opt_state"]["inner"]["mu"]))
    assert found["grad_norm"].keys() == wanted.keys()
    assert found["grad_norm"]["layers"].shape == (config.model.num_layers,)
    # sums of fp32 in another order
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), found["grad_norm"], wanted)
    moved = jax.tree.map(lambda new, old: np.asarray(new, np.float64) - old, after["params"], before["params"])
    # new weights are rounded to fp32
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4), found["update_norm"], norms(moved))
    whole = math.hypot(*np.concatenate([np.atleast_1d(x) for x in found["grad_norm"].values()]))
    np.testing.assert_allclose(whole, metrics.grad_norm, rtol=1e-5)


def test_norms_of_layers_take_one_more_all_reduce():
    arrays = []
    for layer_norms in (False, True):
        config = with_layer_norms(layer_norms, **LAYOUTS["pipe-zero1"])
        program = make_program(config, layout_over(config, jax.devices()[: num_devices(config)]))
        counts = collections.Counter()
        for found in traced_collectives(live_jaxpr(program.trace_step()), program.layout.mesh):
            counts[found.kind, found.axes] += found.num_arrays * found.trips
        arrays.append(counts)
    axes = ("pipe", "data", "tensor_kv")
    assert arrays[1] - arrays[0] == {("all-reduce", axes): 1}
    assert arrays[0] - arrays[1] == {}


def test_norms_of_layers_need_the_axes_of_the_parameters():
    with pytest.raises(ValueError, match=r"layer_norms needs a replica_sync"):
        StepOptions(layer_norms=True)


def test_rows_have_the_norms_of_layers_and_change_nothing(trained_run, tmp_path):
    config = micro.config(tmp_path, data__validation="", train__num_steps=2, metrics__layer_norms=True)
    assert micro.train(config, tmp_path / "run") == 0
    rows = micro.rows(tmp_path / "run")
    assert [micro.exact(row) for row in rows] == [micro.exact(row) for row in micro.rows(trained_run)[:2]]
    for name in ("grad_norm", "update_norm"):
        parts = {key.partition("/")[2]: value for key, value in rows[1].items() if key.startswith(f"{name}/")}
        assert parts.keys() == {"embed", "final_norm", "head", "layer_00", "layer_01"}
        assert rows[1][name] == pytest.approx(math.hypot(*parts.values()), rel=1e-5)  # of fp32
