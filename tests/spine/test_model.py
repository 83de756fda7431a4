"""The decoder as a module and as pure functions: shapes, initial weights, loops, remat, reuse by foreign code."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from hlat_jax.config import ModelConfig
from hlat_jax.model import Decoder, abstract_params, apply, bind, init_params, param_axes
from hlat_jax.passes.jaxpr import equations
from hlat_jax.run import costs

CFG = ModelConfig(vocab_size=64, num_layers=4, embed_dim=32, mlp_dim=48, num_heads=4, num_kv_heads=2, head_dim=8)


def tokens(shape=(2, 12), seed=0):
    return jnp.asarray(np.random.default_rng(seed).integers(0, 64, shape), jnp.int32)


def test_decoder_in_a_notebook_gives_fp32_logits():
    logits_BTV = Decoder(CFG, rngs=nnx.Rngs(0))(tokens())
    assert logits_BTV.shape == (2, 12, 64)
    assert logits_BTV.dtype == jnp.float32


@pytest.mark.slow
def test_module_and_pure_functions_are_one_model():
    params = init_params(CFG, jax.random.key(3))
    np.testing.assert_array_equal(apply(params, CFG, tokens()), bind(params, CFG)(tokens()))
    module = Decoder(CFG, rngs=nnx.Rngs(jax.random.key(3)))
    np.testing.assert_array_equal(apply(params, CFG, tokens()), module(tokens()))


@pytest.mark.quick_cases("{'fuse_qkv': False}", "{'tie_embeddings': True}")
@pytest.mark.parametrize(
    "changes", [{}, {"tie_embeddings": True}, {"fuse_qkv": False}, {"num_kv_heads": 4}], ids=lambda c: str(c)
)
def test_parameter_count_and_axes_match_the_arrays(changes):
    cfg = dataclasses.replace(CFG, **changes)
    params = init_params(cfg, jax.random.key(0))
    assert sum(leaf.size for leaf in jax.tree.leaves(params)) == costs.num_params(cfg)
    is_axes = lambda leaf: isinstance(leaf, tuple)  # noqa: E731
    jax.tree.map(lambda p, axes: assert_same_rank(p, axes), params, param_axes(cfg), is_leaf=is_axes)
    assert jax.tree.map(lambda p: p.shape, params) == jax.tree.map(lambda p: p.shape, abstract_params(cfg))


def assert_same_rank(param, axes):
    assert param.ndim == len(axes)


@pytest.mark.slow
def test_initial_weights_do_not_depend_on_loop_or_remat():
    wanted = init_params(CFG, jax.random.key(0, impl="rbg"))
    for changes in ({"layer_loop": "unroll"}, {"remat": "full"}, {"remat": "selective"}):
        got = init_params(dataclasses.replace(CFG, **changes), jax.random.key(0, impl="rbg"))
        jax.tree.map(np.testing.assert_array_equal, got, wanted)


@pytest.mark.parametrize("impl", ["rbg", "threefry2x32"])
def test_initial_weights_of_every_layer_differ(impl):
    qkv = np.asarray(init_params(CFG, jax.random.key(0, impl=impl))["layers"]["attention"]["qkv"])
    flat = qkv.reshape(CFG.num_layers, -1)
    assert np.abs(np.corrcoef(flat) - np.eye(CFG.num_layers)).max() < 0.1


def test_initial_weights_have_the_depth_scaled_deviation():
    cfg = dataclasses.replace(CFG, num_layers=8, embed_dim=128, mlp_dim=256, init_std=0.021)
    layers = init_params(cfg, jax.random.key(0))["layers"]
    # 1 % is four standard errors of the deviation of 100,000 draws
    np.testing.assert_allclose(layers["mlp"]["gate_up"].std(), 0.021, rtol=0.01)
    np.testing.assert_allclose(layers["mlp"]["down"].std(), 0.021 / 4, rtol=0.01)
    np.testing.assert_allclose(layers["attention"]["out"].std(), 0.021 / 4, rtol=0.02)
    assert (layers["mlp_norm"]["scale"] == 1).all()


CHOICES = [
    {"layer_loop": loop, "remat": remat}
    for loop in ("scan", "unroll")
    for remat in ("names:gate,q", "saved:dot_general.0,gate")  # the covering array has the others
]


@pytest.mark.quick_cases("scan-saved:dot_general.0,gate")
@pytest.mark.parametrize("changes", CHOICES, ids=lambda c: f"{c['layer_loop']}-{c['remat']}")
def test_named_and_numbered_residuals_give_one_loss_and_gradient(changes):
    params = init_params(CFG, jax.random.key(0))

    def loss(params, cfg):
        return -jax.nn.log_softmax(apply(params, cfg, tokens()))[..., 3].mean()

    wanted, wanted_grads = jax.jit(jax.value_and_grad(loss), static_argnums=1)(params, CFG)
    got, grads = jax.jit(jax.value_and_grad(loss), static_argnums=1)(params, dataclasses.replace(CFG, **changes))
    np.testing.assert_allclose(got, wanted, rtol=1e-6)
    # fp32: the same sums in another order; 1e-6 of each array's largest entry
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6 * np.abs(b).max()), grads, wanted_grads)


def count_primitive(jaxpr, name):
    return sum(eqn.primitive.name == name for eqn, _ in equations(jaxpr))


def dots_of(cfg):
    params = init_params(cfg, jax.random.key(0))
    loss = lambda params: apply(params, cfg, tokens()).sum()  # noqa: E731
    compiled = jax.jit(jax.grad(loss)).lower(params).compile()
    return compiled.cost_analysis()["flops"]


@pytest.mark.slow
def test_remat_choices_differ_in_what_they_recompute():
    flops = {
        remat: dots_of(dataclasses.replace(CFG, layer_loop="unroll", remat=remat, attention="einsum"))
        for remat in ("none", "selective", "full")
    }
    assert flops["none"] < flops["selective"] < flops["full"]


def test_backward_pass_of_the_layer_loop_stacks_no_merged_weights():
    cfg = dataclasses.replace(CFG, layer_loop="scan", remat="none")
    params = init_params(cfg, jax.random.key(0))
    text = str(jax.make_jaxpr(jax.grad(lambda params: apply(params, cfg, tokens()).sum()))(params))
    d, f, g = cfg.embed_dim, cfg.mlp_dim, cfg.num_heads // cfg.num_kv_heads
    assert f"f32[{d},{2 * f}]" in text  # gate and up as one product
    assert f"f32[{cfg.num_layers},{d},{2 * f}]" not in text
    assert f"f32[{cfg.num_layers},{d},{cfg.num_kv_heads * (g + 2) * cfg.head_dim}]" not in text


def test_selective_remat_saves_linear_inputs_but_not_scores(capsys):
    from jax.ad_checkpoint import print_saved_residuals

    cfg = dataclasses.replace(CFG, layer_loop="unroll", remat="selective", num_layers=1, attention="einsum")
    params = init_params(cfg, jax.random.key(0))
    print_saved_residuals(lambda params: apply(params, cfg, tokens()).sum(), params)
    saved = capsys.readouterr().out
    assert "[2,12,48]" in saved  # gate and up
    assert "[2,2,2,12,12]" not in saved  # attention scores and probabilities


@pytest.mark.slow
def test_tokens_attend_only_to_the_past_of_their_segment():
    params = init_params(CFG, jax.random.key(0))
    segment_ids = jnp.asarray([[0] * 5 + [1] * 7] * 2)
    positions = jnp.asarray([list(range(5)) + list(range(7))] * 2)

    def seen_by(position, **kwargs):
        def logit(embed):
            changed = dict(params, embed=embed)
            return apply(changed, CFG, jnp.arange(12)[None], **kwargs)[0, position].sum()

        return np.flatnonzero(np.abs(np.asarray(jax.grad(logit)(params["embed"]))).sum(axis=1))

    np.testing.assert_array_equal(seen_by(6), np.arange(7))
    masked = {"segment_ids_BT": segment_ids[:1], "positions_BT": positions[:1]}
    np.testing.assert_array_equal(seen_by(6, **masked), [5, 6])


@pytest.mark.slow
def test_packed_documents_equal_separate_documents():
    params = init_params(CFG, jax.random.key(0))
    row = tokens((1, 12))
    packed = apply(
        params,
        CFG,
        row,
        segment_ids_BT=jnp.asarray([[0] * 5 + [1] * 7]),
        positions_BT=jnp.asarray([list(range(5)) + list(range(7))]),
    )
    apart = [apply(params, CFG, row[:, :5]), apply(params, CFG, row[:, 5:])]
    np.testing.assert_allclose(packed, jnp.concatenate(apart, axis=1), atol=1e-5)


@pytest.mark.slow
def test_model_trains_with_plain_optax():
    params = init_params(CFG, jax.random.key(0))
    optimizer = optax.adam(1e-2)
    opt_state = optimizer.init(params)
    batch = tokens((4, 13))

    def loss(params):
        logits_BTV = apply(params, CFG, batch[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(logits_BTV, batch[:, 1:]).mean()

    @jax.jit
    def step(params, opt_state):
        value, grads = jax.value_and_grad(loss)(params)
        updates, opt_state = optimizer.update(grads, opt_state)
        return optax.apply_updates(params, updates), opt_state, value

    losses = []
    for _ in range(40):
        params, opt_state, value = step(params, opt_state)
        losses.append(float(value))
    assert losses[-1] < 0.2 * losses[0]


@pytest.mark.slow
def test_model_trains_with_nnx_optimizer():
    decoder = Decoder(CFG, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(decoder, optax.adam(1e-2), wrt=nnx.Param)
    batch = tokens((4, 13))

    @nnx.jit
    def step(decoder, optimizer):
        def loss(decoder):
            logits_BTV = decoder(batch[:, :-1])
            return optax.softmax_cross_entropy_with_integer_labels(logits_BTV, batch[:, 1:]).mean()

        value, grads = nnx.value_and_grad(loss)(decoder)
        optimizer.update(decoder, grads)
        return value

    losses = [float(step(decoder, optimizer)) for _ in range(40)]
    assert losses[-1] < 0.2 * losses[0]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_kv_heads": 3}, r"num_kv_heads=3 must divide model.num_heads=4; use one of \[1, 2, 4\]"),
        ({"head_dim": 7}, "head_dim=7 must be even"),
        ({"remat": "names:nothing"}, "names .*nothing.*; layers name"),
        ({"remat": "ful"}, "must be auto, none, full, selective"),
        ({"attention": "flash"}, "attention='flash' is not one of"),
        (
            {"attention": "nki"},
            "model.attention='nki' runs on neuron, not on cpu; use one of auto, einsum, blocked",
        ),
        ({"rms_norm": "fused"}, "model.rms_norm='fused' is not one of auto, reference, recomputed"),
        ({"rope": "pairs"}, "model.rope='pairs' is not one of auto, reference, paired. Did you mean 'paired'"),
        ({"rope_scaling": "Llama3"}, "rope_scaling='Llama3' is not one of none, llama3. Did you mean 'llama3'"),
        ({"layer_loop": "scna"}, "Did you mean 'scan'"),
        ({"rope_theta": 0.0}, "rope_theta=0.0 must be above 0"),
        ({"num_layers": 10**7}, "model.num_layers=10000000 must be at most 10000"),
        ({"num_heads": 10**9 + 7}, "model.num_heads=1000000007 must be at most 65536"),  # not its divisors
    ],
)
def test_invalid_model_config_raises_with_the_reason(changes, message):
    with pytest.raises(ValueError, match=message):
        Decoder(dataclasses.replace(CFG, **changes), rngs=nnx.Rngs(0))(tokens())


@pytest.mark.parametrize("kind", [np.asarray, jnp.asarray])
def test_ids_outside_the_vocabulary_are_refused_where_they_are_known(kind):
    decoder = bind(abstract_params(CFG), CFG)  # without values: nothing is computed before the check
    for ids, message in (([[3, 64]], "tokens run from 3 to 64, "), ([[-1, 3]], "tokens run from -1 to 3, ")):
        with pytest.raises(ValueError, match=message + r"but model.vocab_size=64 has ids 0 to 63; encode the text"):
            decoder(kind(ids))


def test_a_traced_function_may_close_over_its_tokens():
    ids = jnp.asarray(tokens())
    assert jax.eval_shape(lambda params: apply(params, CFG, ids), abstract_params(CFG)).shape == (*ids.shape, 64)


def test_rows_longer_than_the_model_are_refused_even_where_ids_are_traced():
    cfg = dataclasses.replace(CFG, max_positions=12)
    shapes = [jax.ShapeDtypeStruct((2, length), jnp.int32) for length in (12, 13)]
    logits = lambda params, tokens_BT: apply(params, cfg, tokens_BT)  # noqa: E731
    assert jax.eval_shape(logits, abstract_params(cfg), shapes[0]).shape == (2, 12, 64)
    with pytest.raises(ValueError, match=r"tokens have 13 positions, more than model.max_positions=12; shorten the"):
        jax.eval_shape(logits, abstract_params(cfg), shapes[1])
