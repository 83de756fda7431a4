"""The initial state that the host draws for Neuron: the bits of the jitted init on CPU, on any layout."""

import contextlib
import json
import os
import pathlib
import subprocess
import sys

import jax
import jobs
import micro
import numpy as np
import pytest

import hlat_jax.program
from hlat_jax.config import default
from hlat_jax.model import init_layer, init_params
from hlat_jax.parallel.degrees import layout_over
from hlat_jax.parallel.host_arrays import place_constant, place_values
from hlat_jax.parallel.virtual_devices import planned_layout
from hlat_jax.program import RunProgram, host_state, make_program
from hlat_jax.resolve import resolve
from hlat_jax.run.compilation import named_programs, traced_programs

# name -> options by their key; 61 tokens, which only padding splits into parts
CASES = {
    "one": {},
    "zero-padded": {"pipe": 2, "data": 2, "tensor": 2, "zero1": True, "sequence_parallel": True},
    "masters": {"fsdp": 2, "tensor": 4, "policy": "mixed", "seed": 2**32 - 1},
    "muon": {"name": "muon", "data": 4, "tensor": 2, "zero1": True, "spikes": "skip", "policy": "bf16_sr"},
    "stages": {"pipe": 4, "context": 2, "qk_norm": True, "qkv_bias": True, "fuse_qkv": False, "tie_embeddings": True},
    "kv-copies": {"tensor": 8, "num_kv_heads": 2, "num_heads": 8, "fuse_qkv": False, "policy": "mixed", "zero1": True},
}


def program_of(options, devices):
    c = default()
    c.model.update(vocab_size=61, num_layers=4, embed_dim=32, mlp_dim=48, num_heads=4, head_dim=8, max_positions=16)
    c.data.update(batch_size=8, seq_len=16)
    c.train.seed = 7  # which stochastic rounding keeps
    for key, value in options.items():
        section = next(s for s in (c.parallel, c.model, c.data, c.train, c.precision, c.optimizer) if key in s)
        section[key] = value
    config = resolve(c)
    return make_program(config, layout_over(config, devices))


def bits(array):
    return [(shard.index, np.asarray(shard.data).tobytes()) for shard in array.addressable_shards]


def assert_same_bits(found, wanted):
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    for (path, ours), theirs in zip(jax.tree_util.tree_leaves_with_path(found), jax.tree.leaves(wanted), strict=True):
        name = jax.tree_util.keystr(path)
        assert (ours.dtype, ours.shape, ours.sharding) == (theirs.dtype, theirs.shape, theirs.sharding), name
        assert bits(ours) == bits(theirs), name


def num_devices(options):
    return int(np.prod([options.get(axis, 1) for axis in ("pipe", "data", "fsdp", "context", "tensor")]))


@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n == "zero-padded" else pytest.mark.slow) for n in CASES])
def test_the_host_draws_the_bits_of_the_jitted_init(name):
    program = program_of(CASES[name], jax.devices()[: num_devices(CASES[name])])
    assert_same_bits(host_state(program), program.init(program.seed))


def test_a_layer_is_drawn_as_all_layers_are():
    config, key = program_of({}, jax.devices()[:1]).config, jax.random.key(3, impl="rbg")
    whole = jax.jit(lambda key: init_params(config.model, key))(key)["layers"]
    for layer in range(config.model.num_layers):
        one = jax.jit(lambda key, layer: init_layer(config.model, key, layer))(key, layer)
        jax.tree.map(lambda ours, all_of, layer=layer: np.testing.assert_array_equal(ours, all_of[layer]), one, whole)


def test_without_draws_the_weights_are_shapes_and_the_rest_is_made():
    program = program_of(CASES["masters"], jax.devices())
    state = host_state(program, draws=False)
    assert state["params"] == program.abstract_state["params"]
    assert state["opt_state"]["master"] == program.abstract_state["opt_state"]["master"]
    assert_same_bits(state["opt_state"]["inner"], program.init(program.seed)["opt_state"]["inner"])


def test_each_replica_of_a_shard_has_the_same_host_buffer():
    """Host memory is then that of the shards of a process, and not of its devices."""
    mesh = jax.make_mesh((4, 2), ("data", "pipe"))
    target = jax.ShapeDtypeStruct((4, 6), np.float32, sharding=jax.NamedSharding(mesh, jax.P("pipe")))
    asked = []

    def compute(layer):
        asked.append(layer)
        return [np.arange(6, dtype=np.float32) + 10 * layer]

    [array] = place_values([target], compute, is_stacked=True)
    assert asked == [0, 1, 2, 3]  # each once
    np.testing.assert_array_equal(array, np.arange(6) + 10 * np.arange(4)[:, None])
    assert np.asarray(place_constant(target, 7)).tolist() == [[7.0] * 6] * 4


_OF_ONE_PROCESS = """
import json, sys
import jax
address, folder, index, options = sys.argv[1], sys.argv[2], int(sys.argv[3]), json.loads(sys.argv[4])
jax.distributed.initialize(address, 2, index)
import test_host_state
from hlat_jax import program as module

asked, place = [], module.place_values

def recorded(targets, compute, *, is_stacked):
    def one(layer):
        asked.append((is_stacked, layer))
        return compute(layer)
    return place(targets, one, is_stacked=is_stacked)

module.place_values = recorded
program = test_host_state.program_of(options, jax.devices())
state = module.host_state(program)
test_host_state.assert_same_bits(state, program.init(program.seed))
with open(f"{folder}/{index}.json", "w") as file:
    json.dump(sorted({layer for is_stacked, layer in asked if is_stacked}), file)
jax.distributed.shutdown()
"""


@pytest.mark.slow
@pytest.mark.parametrize(("options", "layers"), [("zero-padded", [[0, 1], [2, 3]]), ("masters", [[0, 1, 2, 3]] * 2)])
def test_each_process_draws_the_bits_of_its_own_layers(options, layers, tmp_path):
    address, here = jobs.free_address(), pathlib.Path(__file__).parent
    env = micro.environment(num_devices=4)
    env["PYTHONPATH"] = os.pathsep.join([env["PYTHONPATH"], str(here), str(here.parent / "support")])
    words = [sys.executable, "-c", _OF_ONE_PROCESS, address, str(tmp_path)]
    started = [
        subprocess.Popen([*words, str(index), json.dumps(CASES[options])], env=env, stderr=subprocess.PIPE, text=True)
        for index in range(2)
    ]
    errors = [process.communicate(timeout=300)[1] for process in started]
    assert [process.returncode for process in started] == [0, 0], errors
    assert [json.loads((tmp_path / f"{index}.json").read_text()) for index in range(2)] == layers


@contextlib.contextmanager
def on_host():
    """Runs of this process draw on the host, as they do on Neuron."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RunProgram, "inits_on_host", property(lambda program: True))
        yield


def test_a_run_on_neuron_compiles_no_init(tmp_path, capsys):
    c = micro.config(tmp_path, train__num_steps=3, checkpoint__every_steps=0, data__validation="")
    c.parallel.update(data=2, zero1=True)  # replicas that share a host buffer, and a state that is donated
    assert micro.train(c, tmp_path / "plain", num_devices=2) == 0
    assert "host" not in capsys.readouterr().out
    with on_host():
        assert micro.train(c, tmp_path / "host", num_devices=2) == 0
    assert "host" in capsys.readouterr().out
    recorded = [json.loads((tmp_path / name / "programs.json").read_text()) for name in ("plain", "host")]
    assert recorded[0].keys() - recorded[1].keys() == {"init"}
    rows = [[micro.exact(row) for row in micro.rows(tmp_path / name)] for name in ("plain", "host")]
    assert rows[0] == rows[1]


@pytest.mark.slow
def test_given_weights_are_not_drawn_before_they_are_read(tmp_path, monkeypatch):
    c = micro.config(tmp_path, train__num_steps=2, checkpoint__every_steps=2, precision__policy="mixed")
    assert micro.train(c, tmp_path / "first") == 0
    c.train.update(init_from=str(tmp_path / "first"), seed=5)
    assert micro.train(c, tmp_path / "plain") == 0
    with on_host():
        monkeypatch.setattr(hlat_jax.program, "_host_draw", None)  # which a call of it would fail on
        assert micro.train(c, tmp_path / "host") == 0
    rows = [[micro.exact(row) for row in micro.rows(tmp_path / name)] for name in ("plain", "host")]
    assert rows[0] == rows[1]


def test_neuron_has_no_program_of_init():
    config = program_of({}, jax.devices()[:1]).config
    for platform, expected in (("neuron", False), ("cpu", True)):
        program = make_program(config, planned_layout(config, 1, platform=platform))
        assert ("init" in named_programs(program, "all")) == ("init" in traced_programs(program)) == expected
