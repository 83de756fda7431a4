"""Options of a training step that are refused, with what to give instead."""

import jax
import jax.numpy as jnp
import optax
import pytest
from programs import training_program

from hlat_jax.batch import SumAndCount
from hlat_jax.parallel.pipeline import run_pipeline
from hlat_jax.passes import remat_pass
from hlat_jax.precision import POLICIES
from hlat_jax.step import StepOptions


def linear(params, batch):
    error = (batch["x"] @ params["w"])[:, 0] - batch["y"]
    return SumAndCount(jnp.sum(batch["weight"] * jnp.square(error)), jnp.sum(batch["weight"]))


def test_options_name_the_platform_of_one_device():
    assert StepOptions(zero=0, devices=jax.devices()[:1]).platform == "cpu"


def test_invalid_options_and_arguments_are_refused():
    stages, w = {"accumulate": run_pipeline}, {"w": jnp.ones((16, 1))}
    for options, said in (
        ({"policy": "fp32"}, r"StepOptions.policy='fp32' must be a Policy, such as precision.POLICIES"),
        ({"num_microbatches": 0}, r"num_microbatches=0 must be an int of 1 or more"),
        (stages | {"loss_scale": True}, r"Leave loss_scale or accumulate out"),
        ({"spikes": "skip"}, r"spikes='skip' must be a SpikePolicy"),
        ({"zero": True}, r"zero stage True is not one of 0, 1, 2, 3"),
        ({"zero": 1, "devices": []}, r"devices=\[\] must be a list of one or more devices.*Give jax.devices\(\)"),
        ({"bucket_bytes": 1024}, r"devices and .bucket_bytes have no effect without zero. Give zero=0 to 3"),
        ({"zero": 1}, r"shard the parameters. Give their shapes as params="),
        ({"autocast": "bf17"}, r"autocast policy 'bf17' is unknown. Use"),
        ({"policy": POLICIES["mixed"], "autocast": "fp16"}, r"policy computes in bfloat16. Give policy=.*'fp32'"),
        ({"memory_budget": "12"}, r"memory_budget='12' is not a size in bytes"),
        ({"memory_budget": "1GiB"}, r"Give params=\.\.\. and batch=\.\.\."),
        ({"remat": remat_pass.RematOptions()}, r"remat needs a memory budget. Give memory_budget="),
        (stages | {"chunk": "1MiB"}, r"a single loss function, not stages"),
    ):
        with pytest.raises(ValueError, match=said):
            training_program(linear, optax.sgd(0.1), options=options)
    for given, said in (
        ({"loss_fn": None}, "loss_fn=None is not a function"),
        ({"optimizer": None}, "optimizer=None is not an Optax transformation. Give one, such as optax.adam"),
        ({"params": {"w": 1.0}}, r"params\['w'\] is a float. Give an array"),
        ({"params": w | {"n": jnp.int32(3)}}, r"params\['n'\] is int32, .*functools.partial"),
        ({"has_aux": True, "options": stages}, "has_aux=True needs a single loss function"),
    ):
        with pytest.raises(ValueError, match=said):
            training_program(**{"loss_fn": linear, "optimizer": optax.sgd(0.1)} | given)
