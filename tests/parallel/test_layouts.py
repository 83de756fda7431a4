"""The collectives of every layout against a written table, and what each of them is for."""

import collections
import math

import jax
import jax.numpy as jnp
import micro
import numpy as np
import pytest
from compiled_collectives import collectives
from planned import small_config
from steps import documents, trained

from hlat_jax.batch import abstract_batch
from hlat_jax.cli.config_files import load
from hlat_jax.config import ParallelConfig, default
from hlat_jax.model import param_axes
from hlat_jax.ops.choices import chosen_model
from hlat_jax.parallel.degrees import layout_over
from hlat_jax.parallel.replica_sync import ReplicaSync
from hlat_jax.parallel.sharding import make_layout
from hlat_jax.parallel.xla_options import compiler_options
from hlat_jax.passes.jaxpr import equations
from hlat_jax.passes.products import live_jaxpr
from hlat_jax.plan.collectives import traced_collectives
from hlat_jax.precision import NEAREST, Accumulation
from hlat_jax.program import make_program, model_loss
from hlat_jax.resolve import resolve
from hlat_jax.step.gradients import accumulate_grads
from hlat_jax.step.loss_signature import checked_loss, signature_of

SEQUENCE, ZERO1 = {"sequence_parallel": True}, {"zero1": True}
# name -> changes of parallel, model and train sections
LAYOUTS = {
    "fsdp-tensor-sequence": {"data": 2, "fsdp": 2, "tensor": 2, "num_microbatches": 2} | SEQUENCE | ZERO1,
    "pipe-all": {"pipe": 2, "data": 2, "tensor": 2, "num_microbatches": 4, "remat": "full"} | SEQUENCE | ZERO1,
}
# Arrays that collectives of the traced step carry, by kind and mesh axes, loops counted once per trip; XLA leaves out
# those whose result is not used, and adds none (test_covering_array.py). With L layers (4, over
# the stages), M microbatches and W matrices (embed, head, q, kv, out, gate_up, down; one less when qkv is fused or the
# embedding tied), and N = 3 norms:
# - tensor: 4 L M all-reduces (a sum after each block and of each block's input gradient), and 4 M for the tables: the
#   embedding's sum, the largest logit, sum and target together, the gradient of the head's input.
# - sequence: 6 L M + 2 M all-gathers (each block's input, again for its weight gradient, its output's gradient; the
#   head's input and the embedding's gradient) and 4 L M + 2 M reduce-scatters.
# - fsdp: (2 (W - 2) L + 2) M all-gathers of weights, half as many reduce-scatters plus M; full remat gathers once more.
# - data: every gradient once, whatever M is, and loss and count; zero1 scatters those of matrices and gathers weights.
# - pipe, p stages: 2 (M + p - 1) permutes, or all-gathers; as many sums of embeddings and of their gradients, and 4 M
#   more: the last stage's output, the largest logit, sum and target, the gradient of the head's input.
# - two scalars for the norms of gradients and weights, over the axes that split the state.
COLLECTIVES = {
    "fsdp-tensor-sequence": {
        "all-gather data": 7,
        "all-gather fsdp": 84,
        "all-gather tensor_kv": 52,
        "all-reduce data*fsdp": 2,
        "all-reduce data*fsdp*tensor_kv": 5,
        "all-reduce tensor_kv": 4,
        "reduce-scatter data": 7,
        "reduce-scatter fsdp": 44,
        "reduce-scatter tensor_kv": 36,
    },
    "pipe-all": {
        "all-gather data": 7,
        "all-gather tensor_kv": 89,
        "all-reduce data": 2,
        "all-reduce data*tensor_kv": 3,
        "all-reduce pipe": 18,
        "all-reduce pipe*data*tensor_kv": 2,
        "all-reduce pipe*tensor_kv": 8,
        "collective-permute pipe": 10,
        "reduce-scatter data": 7,
        "reduce-scatter tensor_kv": 59,
    },
}


def configured(**changes):
    c = default()
    c.model.update(vocab_size=64, num_layers=4, embed_dim=32, mlp_dim=48, num_heads=8, num_kv_heads=2, head_dim=8)
    c.model.update(max_positions=16, fuse_qkv=False)
    c.data.update(batch_size=16, seq_len=16, packing="documents")
    for key, value in changes.items():
        section = next(s for s in (c.parallel, c.model, c.data, c.train, c.optimizer, c.precision) if key in s)
        section[key] = value
    return resolve(c)


def layout_of(config):
    return make_layout(config.parallel, jax.devices(), num_kv_heads=config.model.num_kv_heads)


@pytest.mark.parametrize("name", COLLECTIVES)
def test_step_has_the_collectives_of_its_layout(name):
    config = configured(**LAYOUTS[name])
    layout = layout_of(config)
    arrays = collections.Counter()
    for found in traced_collectives(live_jaxpr(make_program(config, layout).trace_step()), layout.mesh):
        arrays[f"{found.kind} {'*'.join(found.axes)}"] += found.num_arrays * found.trips
    assert arrays == COLLECTIVES[name]


@pytest.mark.slow
def test_stages_send_each_other_only_their_part_of_the_sequence():
    """Stages lie on other nodes. The gradient of the head's input was once summed over them for the whole sequence."""
    config = small_config(pipe=2, tensor=4, sequence_parallel=True, m=2, policy="fp32")
    program = make_program(config, layout_over(config, jax.devices()))
    traced, mesh = program.trace_step(), program.layout.mesh
    part_bytes = config.data.batch_size // 2 * config.data.seq_len // 4 * config.model.embed_dim * 4
    for found in (traced_collectives(live_jaxpr(traced), mesh), collectives(traced.lower().compile().as_text(), mesh)):
        between_stages = [one.payload_bytes for one in found if one.axes == ("pipe",)]
        assert len(between_stages) > 4
        assert max(between_stages) == part_bytes


@pytest.mark.slow
def test_evaluation_over_a_mesh_equals_one_device():
    config, sums = configured(**LAYOUTS["pipe-all"]), []
    for other in (config, configured(data=1)):
        program, state, _ = trained(other, [])
        sums.append(np.asarray(program.eval_step(state["params"], program.shard(documents(9, other)))))
    np.testing.assert_allclose(*sums, rtol=1e-6)


def test_each_core_computes_only_the_kv_heads_it_needs():
    config = configured(tensor=8, embed_dim=40)  # 2 KV heads on 8 cores, so 1 query head on each
    layout = layout_of(config)
    state = make_program(config, layout).abstract_state
    attention = state["params"]["layers"]["attention"]
    assert attention["kv"].shape == (4, 40, 2, 2, 8)  # parameters and checkpoints have both heads once
    assert attention["kv"].sharding.shard_shape(attention["kv"].shape) == (4, 40, 2, 1, 8)
    assert attention["q"].sharding.shard_shape(attention["q"].shape) == (4, 40, 1, 1, 8)

    def local(params, batch, rounding, *, scale, reduce):
        assert scale is reduce is None
        loss = model_loss(chosen_model(config, layout), layout, compute="float32", z_loss_weight=0.0)
        loss_fn = checked_loss(loss, signature_of(loss))
        return accumulate_grads(loss_fn, params, batch, sums=Accumulation(1, "float32", rounding))

    everywhere = ReplicaSync(layout, param_axes(config.model)).value_and_grad(local, dtype="float32")
    traced = jax.make_jaxpr(everywhere)(
        state["params"], abstract_batch(16, 16, with_segments=True), NEAREST, scale=None
    )
    products = collections.Counter(
        equation.outvars[0].aval.shape
        for equation, _ in equations(traced.jaxpr)
        if equation.primitive.name == "dot_general"
    )
    tokens, key_and_value = 16 * 16, 2 * 1 * 8
    assert products[tokens, key_and_value] >= 1
    assert products[40, key_and_value] + products[key_and_value, 40] == 1  # its gradient
    assert not {(tokens, 2 * key_and_value), (40, 2 * key_and_value), (2 * key_and_value, 40)} & products.keys()


@pytest.mark.quick_cases("fp32-degrees0")
@pytest.mark.parametrize(
    ("policy", "degrees"),
    [("fp32", {}), ("mixed", {"pipe": 2, "data": 2, "tensor": 2, "zero1": True})],
)
def test_state_norms_match_numpy_and_use_one_all_reduce(policy, degrees, tmp_path):
    c = load(str(micro.write_config(tmp_path)))
    c.precision.policy = policy
    c.parallel.update(degrees)
    c.data.batch_size, c.train.num_microbatches = 8, 2
    config = resolve(c)
    num_devices = math.prod(degree for axis, degree in degrees.items() if axis != "zero1")
    layout = layout_over(config, jax.devices()[:num_devices])
    program = make_program(config, layout)
    state = program.init_state()
    inner = state["opt_state"]["inner"]
    inner["mu"] = jax.tree.map(lambda leaf: jax.device_put(leaf + 1, leaf.sharding), inner["mu"])
    compiled = program.norms.lower(state).compile()
    found = {name: float(norm) for name, norm in compiled(state).items()}
    parts = {"params": state["params"], "opt_state.inner.mu": inner["mu"], "opt_state.inner.nu": inner["nu"]}
    parts |= {"opt_state.master": state["opt_state"]["master"]} if policy == "mixed" else {}
    leaves = {name: [np.asarray(leaf, np.float64) for leaf in jax.tree.leaves(tree)] for name, tree in parts.items()}
    expected = {name: np.sqrt(sum(np.sum(leaf**2) for leaf in each)) for name, each in leaves.items()}
    for name in ("opt_state.inner.mu", "opt_state.inner.nu"):  # the mean magnitude
        expected[name] = np.mean(np.abs(np.concatenate([leaf.reshape(-1) for leaf in leaves[name]])))
    assert found == pytest.approx(expected, rel=1e-5)  # fp32 sums
    assert compiled.as_text().count(" all-reduce(") == (num_devices > 1)

    def filled_nu(value):
        nu = jax.tree.map(lambda leaf: jax.device_put(np.full_like(leaf, value), leaf.sharding), inner["nu"])
        return float(
            compiled(state | {"opt_state": state["opt_state"] | {"inner": inner | {"nu": nu}}})["opt_state.inner.nu"]
        )

    assert filled_nu(2.0**126) == pytest.approx(2.0**126, rel=1e-5)  # gradients of 1e19
    assert filled_nu(np.inf) == np.inf
    assert np.isnan(filled_nu(np.nan))
    embed = state["params"]["embed"]
    one_bad = jax.device_put(embed.at[-1, -1].set(np.inf), embed.sharding)
    found = compiled(state | {"params": state["params"] | {"embed": one_bad}})
    assert [name for name, norm in found.items() if not np.isfinite(norm)] == ["params"]


def test_compiler_options_are_for_several_gpus_and_known_to_xla():
    everywhere = make_layout(ParallelConfig(bucket_bytes=1 << 24), jax.devices())
    alone = make_layout(ParallelConfig(), jax.devices()[:1])
    assert compiler_options(everywhere) == compiler_options(everywhere, platform="neuron") == {}
    assert compiler_options(alone, platform="gpu") == {}
    options = compiler_options(everywhere, platform="gpu")
    assert options["xla_gpu_enable_latency_hiding_scheduler"] is True
    assert options["xla_gpu_all_reduce_combine_threshold_bytes"] == 1 << 24
    jax.jit(jnp.sin).lower(1.0).compile(compiler_options=options)
    with pytest.raises(Exception, match="No such compile option"):
        jax.jit(jnp.sin).lower(1.0).compile(compiler_options={"xla_gpu_not_one": True})
