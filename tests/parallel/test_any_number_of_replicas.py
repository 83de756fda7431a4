"""Replicas that divide neither the batch nor the width of the model train as one device does, on the same batches."""

import jax
import jax.numpy as jnp
import micro
import numpy as np
import pytest
from steps import documents

import configs
import hlat_jax.hf
from hlat_jax import precision
from hlat_jax.model import init_params
from hlat_jax.parallel.degrees import layout_over
from hlat_jax.parallel.rows import pad_rows, process_rows
from hlat_jax.parallel.virtual_devices import planned_layout
from hlat_jax.program import host_state, make_program
from hlat_jax.run.digests import make_state_digest
from hlat_jax.run.resume import with_weights
from hlat_jax.store.checkpoint import Checkpointer, read_checkpoint
from hlat_jax.weights.trained import open_weights

NUM_STEPS = 3
RATE = 5e-4  # see test_covering_array
METRICS = ("loss", "grad_norm", "param_norm")
# Relative differences from one device: of fp32 sums in another order, and of bf16, which rounds at 4e-3.
EXACT, NARROW = 5e-6, 5e-3


def configured(data, **changes):
    """Returns a config of 11 rows and a width of 20, which 2, 4 or 5 replicas divide, and 3, 6, 7 and 8 do not."""
    sizes = {"embed_dim": 20, "num_layers": 2, "batch_size": 11, "max_positions": 16, "seq_len": 16, "vocab_size": 61}
    sizes |= {"num_microbatches": -1, "packing": "documents", "parallel__data": data, "zero1": True}
    return configs.resolved("widths", **sizes | {"peak_lr": 1e-2} | changes)


def trained(config, *, num_steps=NUM_STEPS, state=None, first=0):
    """Returns (program, state after some steps, their metrics), from `state` or from the first."""
    parallel = config.parallel
    count = parallel.data * max(1, parallel.fsdp) * parallel.tensor * parallel.context * parallel.pipe
    program, rows = make_program(config, layout_over(config, jax.devices()[:count])), []
    state = program.init_state() if state is None else state
    for step in range(first, first + num_steps):
        batch = documents(step, config)
        state, metrics = program.run_step(state, program.shard(batch), np.float32(RATE))
        assert float(metrics.num_tokens) == batch.weights.sum()
        rows.append([float(getattr(metrics, name)) for name in METRICS])
    return program, state, np.asarray(rows)


CASES = {
    "3": {"data": 3},
    "7 programs": {"data": 7, "accumulate": "programs"},
    "6 microbatch": {"data": 6, "reduce_gradients": "microbatch", "bucket_bytes": 4096, "spikes": "skip"},
    "3 x tensor 2": {"data": 3, "parallel__tensor": 2, "sequence_parallel": True, "policy": "mixed"},
    "3 x pipe 2": {"data": 3, "parallel__pipe": 2, "accumulate": "programs"},
    "3 x context 2": {"data": 3, "parallel__context": 2},
    "copies of KV heads": {"data": 3, "parallel__tensor": 2, "num_kv_heads": 1, "fuse_qkv": False, "policy": "bf16_sr"},
    "muon": {"data": 3, "optimizer__name": "muon", "embed_dim": 50},  # whose width sets the scale
}
NUMERICS = ("policy", "num_kv_heads", "fuse_qkv", "optimizer__name", "embed_dim")


@pytest.mark.quick_cases("3 x tensor 2")
@pytest.mark.parametrize("name", CASES)
def test_replicas_that_divide_nothing_train_like_one_device(name):
    case = CASES[name]
    alone = configured(1, num_microbatches=1, **{key: case[key] for key in NUMERICS if key in case})
    _, _, wanted = trained(alone)
    _, state, found = trained(configured(**case))
    is_exact = case.get("policy", "fp32") == "fp32"
    np.testing.assert_allclose(found, wanted, rtol=EXACT if is_exact else NARROW)
    assert_padding_is_zero(state)


def without_padding(state):
    """Returns the arrays of a state by path, in NumPy; each of the optimizer's has the shape of its parameter."""
    arrays = {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(state)}
    shapes = {name.removeprefix("['params']"): array.shape for name, array in arrays.items() if "['params']" in name}
    for name, array in arrays.items():
        shape = next((shape for end, shape in shapes.items() if name.endswith(end)), array.shape)
        arrays[name] = array[tuple(map(slice, shape))]
    return arrays


def assert_padding_is_zero(state):
    for kept, leaf in zip(without_padding(state).values(), jax.tree.leaves(state), strict=True):
        assert np.count_nonzero(np.asarray(leaf)) == np.count_nonzero(kept)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_any_sizes_train_like_one_device_on_one_to_eight_replicas(seed):
    rng = np.random.default_rng(seed)
    sizes = {"embed_dim": 2 * int(rng.integers(4, 20)), "mlp_dim": int(rng.integers(5, 40))}
    sizes |= {"batch_size": int(rng.integers(8, 24)), "tie_embeddings": bool(rng.integers(2))}
    _, _, wanted = trained(configured(1, num_microbatches=1, **sizes))
    for data in range(1, 9):
        _, state, found = trained(configured(data, **sizes))
        np.testing.assert_allclose(found, wanted, rtol=EXACT, err_msg=f"{data} replicas, {sizes}")
        assert_padding_is_zero(state)


@pytest.mark.parametrize("changes", [{"policy": "mixed"}, {"optimizer__name": "muon"}], ids=["mixed", "muon"])
def test_a_padded_checkpoint_has_the_digests_of_its_state_on_any_replicas(changes, tmp_path):
    program, state, _ = trained(configured(3, **changes), num_steps=2)
    assert any(size % 20 for leaf in jax.tree.leaves(state["opt_state"]["inner"]["mu"]) for size in leaf.shape[-1:])
    digest = make_state_digest(lambda: program.digest, program)
    saved = digest.by_name(digest(state))
    assert saved.keys() > {"params.embed", "opt_state.inner.mu.embed"}
    checkpointer = Checkpointer(tmp_path, config=program.config.checkpoint)
    checkpointer.save(1, state, position=np.zeros((1, 2), np.int64), metadata={}, norms={}, digest=saved)
    checkpointer.close()
    for data in (2, 4, 7):
        config = configured(data, **changes)
        other = make_program(config, layout_over(config, jax.devices()[:data]))
        digest = make_state_digest(lambda other=other: other.digest, other)
        folder = tmp_path / "checkpoints" / "1"
        restored = read_checkpoint(folder, other.abstract_state, digest_problem=digest.problem)
        assert digest.by_name(digest(restored.state)) == saved
        mu = restored.state["opt_state"]["inner"]["mu"]
        mu["embed"] = mu["embed"].at[3, 4].add(1.0)
        assert digest.problem(restored.state, saved).startswith("opt_state.inner.mu.embed ")


@pytest.mark.quick_cases("fp32")
@pytest.mark.parametrize("policy", ["fp32", "bf16_sr", "mixed"])
def test_a_state_keeps_its_bits_through_meshes_of_any_size(policy, tmp_path):
    program, state, _ = trained(configured(3, policy=policy), num_steps=2)
    wanted = without_padding(state)
    for number, data in enumerate((7, 2, 4, 6, 1, 3)):
        folder = tmp_path / str(number)
        checkpointer = Checkpointer(folder, config=program.config.checkpoint)
        checkpointer.save(1, state, position=np.zeros((1, 2), np.int64), metadata={}, norms={})
        checkpointer.close()
        config = configured(data, policy=policy)
        program = make_program(config, layout_over(config, jax.devices()[:data]))
        state = read_checkpoint(folder / "checkpoints" / "1", program.abstract_state).state
        assert jax.tree.map(lambda x: x.sharding, state) == program.training.shardings
        found = without_padding(state)
        assert {name: array.tobytes() for name, array in found.items()} == {
            name: array.tobytes() for name, array in wanted.items()
        }
        assert_padding_is_zero(state)


def test_stochastic_rounding_does_not_depend_on_padding():
    words, shape, padded = (np.uint32(3), np.uint32(5)), (3, 20, 7), (3, 24, 7)
    bits = precision.random_bits(words, "w", shape)
    np.testing.assert_array_equal(precision.random_bits(words, "w", shape, padded=padded)[:, :20], bits)


@pytest.mark.parametrize("data", [1, 2, 3, 5, 7, 8])
def test_replicas_share_the_rows_of_a_batch_in_order(data):
    config = configured(data)
    layout = layout_over(config, jax.devices()[:data])
    batch, most = documents(0, config), -(-11 // data)
    padded = pad_rows(batch, layout, num_rows=11)
    assert process_rows(layout, 11) == list(range(11))
    assert padded.tokens.shape == (data * most, 16)
    is_row = np.abs(padded.tokens.reshape(data, most, -1)).sum(-1) > 0
    assert (np.argsort(~is_row, axis=1, kind="stable") == np.arange(most)).all()  # zeros come last on each replica
    assert is_row.sum(axis=1).min() >= most - 1
    np.testing.assert_array_equal(padded.tokens[is_row.reshape(-1)], batch.tokens)
    assert padded.weights.sum() == batch.weights.sum()


def test_more_replicas_than_rows_are_refused():
    with pytest.raises(ValueError, match=r"data\.batch_size=11 has fewer rows than 12 data-parallel parts"):
        planned_layout(configured(12), 12, platform="cpu")


def test_replicas_inside_shards_must_divide_the_width():
    with pytest.raises(ValueError, match=r"embed_dim=20 does not divide into the 6 parts .*parallel\.zero1=False"):
        planned_layout(configured(3, fsdp=2), 6, platform="cpu")
    planned_layout(configured(3, fsdp=2, zero1=False), 6, platform="cpu")


def test_the_host_draws_the_padded_state_that_a_program_does():
    config = configured(3, policy="mixed")
    program = make_program(config, layout_over(config, jax.devices()[:3]))
    found, wanted = host_state(program), program.init_state()
    jax.tree.map(np.testing.assert_array_equal, found, wanted)
    assert jax.tree.map(lambda x: x.sharding, found) == program.training.shardings


def test_weights_of_any_folder_start_a_padded_state(tmp_path):
    config = configured(3, policy="mixed")
    program = make_program(config, layout_over(config, jax.devices()[:3]))
    params = init_params(config.model, jax.random.key(0, impl="rbg"))
    hlat_jax.hf.save(params, config.model, "", tmp_path / "out")
    state = program.init_state()
    found, _ = with_weights(state, open_weights(tmp_path / "out"), config=config)
    abstract = jax.tree.map(lambda x: (x.shape, x.dtype), program.abstract_state)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), found) == abstract
    masters = without_padding({"params": params, "opt_state": found["opt_state"]})
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        name = jax.tree_util.keystr(path)
        np.testing.assert_array_equal(masters[f"['opt_state']['master']{name}"], np.asarray(leaf))
    assert_padding_is_zero(found)


@pytest.mark.slow
def test_a_run_on_nine_devices_trains_as_on_one_and_gives_its_masters(tmp_path):
    settings = ("data.batch_size=10", "train.num_microbatches=-1", "parallel.zero1=True", "precision.policy=mixed")
    settings += ("train.num_steps=3", "train.eval_every_steps=3", "train.num_eval_batches=2", "optimizer.eps=1e-5")
    config, rows = micro.write_config(tmp_path), []
    for count in (9, 1):
        done = micro.run(micro.command(config, tmp_path / str(count), *settings), micro.environment(num_devices=count))
        assert done.returncode == 0, done.stderr
        rows.append(micro.rows(tmp_path / str(count)))
    for row, wanted in zip(*rows, strict=True):
        for key in {"loss", "eval_loss", "grad_norm", "tokens", "batch_hash"} & wanted.keys():
            expected = wanted[key] if isinstance(wanted[key], str) else pytest.approx(wanted[key], rel=NARROW)
            assert row[key] == expected, (row["step"], key)
    masters, params = (open_weights(tmp_path / "9", masters=masters) for masters in (True, False))
    for name in ("embed", "layers.mlp.down"):
        np.testing.assert_array_equal(np.asarray(masters.read(name).astype(jnp.bfloat16)), params.read(name))
