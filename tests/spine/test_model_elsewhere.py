"""The model in other people's code: its signatures, their mesh, forward mode, an attention of theirs, LoRA."""

import dataclasses
import inspect
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import hlat_jax.hf
from hlat_jax import batch
from hlat_jax.config import ModelConfig
from hlat_jax.generate import generator, inference, sampling
from hlat_jax.model import LOGICAL_AXES, Decoder, abstract_params, apply, bind, init_params, param_axes, param_specs
from hlat_jax.neuron import lint
from hlat_jax.passes import autocast_pass, compile, remat_pass
from hlat_jax.step import StepOptions, train_step

CFG = ModelConfig(vocab_size=64, num_layers=2, embed_dim=32, mlp_dim=48, num_heads=4, num_kv_heads=2, head_dim=8)
TOKENS = jnp.asarray(np.random.default_rng(0).integers(0, 64, (4, 13)), jnp.int32)
PUBLIC = [
    *(Decoder, Decoder.__call__, Decoder.hidden_states, init_params, apply, bind, param_specs, ModelConfig),
    *(batch.Batch, batch.concat_batch, batch.segmented_batch, train_step, StepOptions),
    compile.training_program,
    *(autocast_pass.autocast, autocast_pass.CastPolicy, remat_pass.fit, remat_pass.RematOptions, hlat_jax.hf.load),
    *(lint.check, lint.check_traced, lint.check_module, generator.Generator, generator.Generator.__call__),
    *(generator.Generator.stream, sampling.Sampling, inference.open_model),
]
MESHES = {
    "data": ({"data": 4}, {}),
    "data_tensor": ({"data": 2, "tensor": 2}, dict.fromkeys(("vocab", "kv_heads", "heads", "mlp"), "tensor")),
    "fsdp": ({"data": 2, "tensor": 2}, {"embed": "data", "vocab": "tensor", "kv_heads": "tensor", "mlp": "tensor"}),
}


@pytest.fixture(scope="module")
def params():
    return init_params(CFG, jax.random.key(0))


def loss(params, tokens, **options):
    logprobs = jax.nn.log_softmax(apply(params, CFG, tokens[:, :-1], **options))
    return -(jax.nn.one_hot(tokens[:, 1:], CFG.vocab_size) * logprobs).sum(-1).mean()


def assert_close(actual, expected, share=1e-5):
    """fp32 sums in another order: `share` of each array's largest entry."""
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=share * np.abs(b).max()), actual, expected)


def test_public_signatures_name_every_argument_and_its_type():
    for parameter in itertools.chain(*(inspect.signature(function).parameters.values() for function in PUBLIC)):
        assert parameter.kind is not parameter.VAR_KEYWORD
        assert parameter.annotation is not parameter.empty or parameter.name == "self"


def test_flax_reads_the_logical_axes_and_maps_them_to_a_mesh_of_ones_own():
    state = nnx.state(Decoder(CFG, rngs=nnx.Rngs(0)))
    specs = nnx.to_pure_dict(nnx.get_partition_spec(state))
    is_axes = lambda leaf: isinstance(leaf, tuple)  # noqa: E731
    assert specs == jax.tree.map(lambda axes: P(*axes), param_axes(CFG), is_leaf=is_axes)
    rules = MESHES["fsdp"][1]
    with nnx.logical_axis_rules(tuple((axis, rules.get(axis)) for axis in LOGICAL_AXES)):
        mapped = nnx.to_pure_dict(nnx.get_partition_spec(state))
    assert mapped == param_specs(CFG, rules)
    assert mapped["layers"]["mlp"]["gate_up"] == P(None, "data", None, "tensor")
    assert mapped["layers"]["mlp_norm"]["scale"] == P(None, None)


def test_rules_of_an_unknown_logical_axis_are_refused():
    with pytest.raises(ValueError, match=r"rules name 'head', not .*\. Did you mean 'heads'\?"):
        param_specs(CFG, {"head": "tensor"})


@pytest.mark.quick_cases("Explicit-fsdp")
@pytest.mark.parametrize(("axis_type", "name"), [("Auto", "data_tensor"), ("Explicit", "fsdp"), ("Explicit", "data")])
def test_loss_and_gradients_on_a_mesh_of_ones_own_equal_one_device(axis_type, name, params):
    sizes, rules = MESHES[name]
    mesh = jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=(AxisType[axis_type],) * len(sizes))
    shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), param_specs(CFG, rules))
    sharded = jax.device_put(params, shardings)
    rows = jax.device_put(TOKENS, NamedSharding(mesh, P("data")))
    expected = jax.jit(jax.value_and_grad(loss))(params, TOKENS)
    with jax.set_mesh(mesh):
        actual = jax.jit(jax.value_and_grad(loss))(sharded, rows)
        if axis_type == "Explicit":
            assert jax.tree.map(lambda g: jax.typeof(g).sharding.spec, actual[1]) == jax.tree.map(
                lambda p: jax.typeof(p).sharding.spec, sharded
            )
    assert_close(actual, expected)


@pytest.mark.slow
def test_apply_runs_where_some_explicit_axes_are_manual(params):
    mesh = jax.make_mesh((2, 2), ("data", "tensor"), axis_types=(AxisType.Explicit,) * 2)
    expected = apply(params, CFG, TOKENS)
    with jax.set_mesh(mesh):
        whole = jax.device_put(params, NamedSharding(mesh, P()))
        rows = jax.device_put(TOKENS, NamedSharding(mesh, P("data")))
        over_data = jax.shard_map(
            lambda params, rows: apply(params, CFG, rows), in_specs=(P(), P("data")), out_specs=P("data"),
            axis_names={"data"},
        )  # fmt: skip
        assert_close(jax.jit(over_data)(whole, rows), expected)


def test_signatures_are_those_of_the_class_of_a_subclass_and_of_a_call():
    class Adapted(Decoder):
        def __init__(self, cfg, rank, *, rngs):
            super().__init__(cfg, rngs=rngs)
            self.rank = rank

    assert list(inspect.signature(Decoder).parameters) == ["cfg", "rngs"]
    assert list(inspect.signature(Adapted).parameters) == ["cfg", "rank", "rngs"]
    assert "tokens_BT" in inspect.signature(Adapted(CFG, 2, rngs=nnx.Rngs(0))).parameters


def test_declaration_made_under_a_mesh_is_that_of_any():
    cfg = ModelConfig(vocab_size=67)  # which no other test declares
    with jax.set_mesh(jax.make_mesh((8,), ("data",), axis_types=(AxisType.Explicit,))):
        inside = abstract_params(cfg)
    assert all(leaf.sharding is None for leaf in jax.tree.leaves(inside))


@pytest.mark.slow
def test_forward_mode_equals_reverse_mode_and_finite_differences(params):
    rng = np.random.default_rng(1)
    direction = jax.tree.map(lambda p: jnp.asarray(rng.standard_normal(p.shape), jnp.float32), params)
    scalar = lambda params: loss(params, TOKENS)  # noqa: E731
    inner = lambda a, b: sum(jnp.vdot(x, y) for x, y in zip(*map(jax.tree.leaves, (a, b)), strict=True))  # noqa: E731
    _, slope = jax.jit(lambda p, d: jax.jvp(scalar, (p,), (d,)))(params, direction)
    gradient = jax.jit(jax.grad(scalar))
    np.testing.assert_allclose(slope, inner(gradient(params), direction), rtol=1e-4)
    product = jax.jit(lambda p, d: jax.jvp(jax.grad(scalar), (p,), (d,))[1])(params, direction)
    twice = jax.jit(jax.grad(lambda p, d: inner(jax.grad(scalar)(p), d)))(params, direction)
    assert_close(product, twice)
    # central differences of the gradient: their error is of the step squared, and of rounding over the step
    step = 1e-3
    ahead, behind = (gradient(jax.tree.map(lambda p, d, by=by: p + by * d, params, direction)) for by in (step, -step))
    assert_close(product, jax.tree.map(lambda a, b: (a - b) / (2 * step), ahead, behind), share=1e-2)


def test_attention_of_ones_own_replaces_that_of_the_model(params):
    seen = []

    def attend(q_BTNH, k_BSKH, v_BSKH, segment_ids_BT):
        seen.append((q_BTNH.shape, k_BSKH.shape, v_BSKH.shape, segment_ids_BT))
        return jax.nn.dot_product_attention(q_BTNH, k_BSKH, v_BSKH, is_causal=True)

    own = jax.jit(jax.value_and_grad(lambda params: loss(params, TOKENS, attention=attend)))
    assert_close(own(params), jax.jit(jax.value_and_grad(loss))(params, TOKENS))
    assert set(seen) == {((4, 12, 4, 8), (4, 12, 2, 8), (4, 12, 2, 8), None)}

    def looks_ahead(q, k, v, segment_ids):
        return jax.nn.dot_product_attention(q, k, v)

    assert np.abs(loss(params, TOKENS, attention=looks_ahead) - loss(params, TOKENS)) > 1e-4
    windowed = dataclasses.replace(CFG, sliding_window=4)
    with pytest.raises(ValueError, match=r"model.sliding_window=4. .* set sliding_window=0"):
        apply(params, windowed, TOKENS, attention=attend)
    said = r"attention returned float32\[4, 12, 2, 8\]. It must return float32\[4, 12, 4, 8\]"
    with pytest.raises(ValueError, match=said):
        jax.eval_shape(lambda params: loss(params, TOKENS, attention=lambda q, k, v, ids: v), params)
