"""The decoder as a module and as pure functions: shapes, initial weights, loops, remat, reuse by foreign code."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from hlat_jax.config import ModelConfig
from hlat_jax.model import Decoder, abstract_params, apply, bind, init_params, param_axes
from hlat_jax.optimizer import decay_mask
from hlat_jax.run import costs

CFG = ModelConfig(vocab_size=64, num_layers=4, embed_dim=32, mlp_dim=48, num_heads=4, num_kv_heads=2, head_dim=8)


def tokens(shape=(2, 12), seed=0):
    return jnp.asarray(np.random.default_rng(seed).integers(0, 64, shape), jnp.int32)


QWENS = {"qkv_bias": True, "out_bias": True, "qk_norm": True}  # what Qwen 2 and Qwen 3 add


@pytest.mark.slow
def test_module_and_pure_functions_are_one_model():
    params = init_params(CFG, jax.random.key(3))
    np.testing.assert_array_equal(apply(params, CFG, tokens()), bind(params, CFG)(tokens()))
    logits_BTV = Decoder(CFG, rngs=nnx.Rngs(jax.random.key(3)))(tokens())
    np.testing.assert_array_equal(apply(params, CFG, tokens()), logits_BTV)
    assert (logits_BTV.shape, logits_BTV.dtype) == ((2, 12, 64), jnp.float32)


def test_parameter_count_and_axes_match_the_arrays():
    for changes in (
        {"tie_embeddings": True},
        {"fuse_qkv": False},
        {"num_kv_heads": 4},
        QWENS,
        QWENS | {"fuse_qkv": False},
    ):
        cfg = dataclasses.replace(CFG, **changes)
        params = init_params(cfg, jax.random.key(0))
        assert sum(leaf.size for leaf in jax.tree.leaves(params)) == costs.num_params(cfg)
        ranks = jax.tree.map(len, param_axes(cfg), is_leaf=lambda leaf: isinstance(leaf, tuple))
        assert jax.tree.map(lambda p: p.ndim, params) == ranks
        assert jax.tree.map(lambda p: p.shape, params) == jax.tree.map(lambda p: p.shape, abstract_params(cfg))


def test_weight_decay_of_matrices_leaves_out_every_norm_and_bias():
    for fuse_qkv in (True, False):
        params = abstract_params(dataclasses.replace(CFG, fuse_qkv=fuse_qkv, **QWENS))
        decays = jax.tree_util.tree_leaves_with_path(decay_mask(params, "matrices"))
        left_out = {jax.tree_util.keystr(path, simple=True, separator=".") for path, decay in decays if not decay}
        names = ("qkv_bias",) if fuse_qkv else ("q_bias", "kv_bias")
        of_layers = {f"layers.attention.{name}" for name in (*names, "out_bias", "q_norm.scale", "k_norm.scale")}
        assert left_out == of_layers | {"layers.attention_norm.scale", "layers.mlp_norm.scale", "final_norm.scale"}


def test_flops_of_a_window_are_those_of_its_keys():
    without = costs.flops_per_token(CFG, 512)
    for layers, saved in (("", 4), ("2:2,4:4", 2)):
        cfg = dataclasses.replace(CFG, sliding_window=100, sliding_window_layers=layers)
        assert without - costs.flops_per_token(cfg, 512) == 12 * saved * CFG.num_heads * CFG.head_dim * 412
        assert costs.flops_per_token(cfg, 100) == costs.flops_per_token(CFG, 100)


def test_initial_weights_of_every_layer_differ():
    for impl in ("rbg", "threefry2x32"):
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


@pytest.mark.slow
def test_named_and_numbered_residuals_give_one_loss_and_gradient():
    params = init_params(CFG, jax.random.key(0))

    def loss(params, cfg):
        return -jax.nn.log_softmax(apply(params, cfg, tokens()))[..., 3].mean()

    wanted, wanted_grads = jax.jit(jax.value_and_grad(loss), static_argnums=1)(params, CFG)
    # the covering array has other choices
    for changes in ({"remat": "names:gate,q"}, {"layer_loop": "unroll", "remat": "saved:dot_general.0,gate"}):
        cfg = dataclasses.replace(CFG, **changes)
        got, grads = jax.jit(jax.value_and_grad(loss), static_argnums=1)(params, cfg)
        np.testing.assert_allclose(got, wanted, rtol=1e-6)
        # fp32: the same sums in another order; 1e-6 of each array's largest entry
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6 * np.abs(b).max()), grads, wanted_grads)


def test_backward_pass_of_the_layer_loop_stacks_no_merged_weights():
    cfg = dataclasses.replace(CFG, layer_loop="scan", remat="none")
    params = init_params(cfg, jax.random.key(0))
    text = str(jax.make_jaxpr(jax.grad(lambda params: apply(params, cfg, tokens()).sum()))(params))
    d, f, g = cfg.embed_dim, cfg.mlp_dim, cfg.num_heads // cfg.num_kv_heads
    assert f"f32[{d},{2 * f}]" in text  # gate and up as one product
    assert f"f32[{cfg.num_layers},{d},{2 * f}]" not in text
    assert f"f32[{cfg.num_layers},{d},{cfg.num_kv_heads * (g + 2) * cfg.head_dim}]" not in text


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


# changes of CFG, and what is said
REFUSED = [
    ({"sliding_window_layers": "1:2"}, r"sliding_window_layers='1:2' has no effect without model.sliding_window"),
    ({"sliding_window": 4, "sliding_window_layers": "2"}, r"'2' must be FIRST:LAST, such as 29:36 for 8 layers"),
    (
        {"sliding_window": 4, "sliding_window_layers": "3:5"},
        r"'3:5' goes beyond model.num_layers=4. End it at 4 or before",
    ),
    ({"sliding_window": -1}, r"sliding_window=-1 must be at least 0"),
    ({"rope_scaling": "dynamic"}, r"rope_scaling='dynamic' is not one of none, linear, llama3, yarn"),
    ({"rope_scaling": "yarn", "rope_theta": 1.0}, r"rope_theta=1.0 must be above 1 with model.rope_scaling='yarn'"),
    ({"rope_beta_fast": 1.0}, r"rope_beta_fast=1.0 must exceed model.rope_beta_slow=1.0"),
    ({"num_kv_heads": 3}, r"num_kv_heads=3 must divide model.num_heads=4. Use one of \[1, 2, 4\]"),
    ({"head_dim": 7}, "head_dim=7 must be even"),
    ({"remat": "names:q,nothing"}, "has unknown names: nothing. Use attn_norm, q"),
    ({"remat": "ful"}, "must be auto, none, full, selective"),
    ({"remat": "policy:dots"}, "policy:dots_saveable"),
    ({"remat": "budget:12"}, "the budget='12' is not a size"),
    ({"attention": "triton"}, "model.attention='triton' runs on cuda, not on cpu. Use one of auto, einsum, blocked"),
    ({"cross_entropy": "chunks"}, "model.cross_entropy='chunks' is not one of auto, .*Did you mean 'chunked'"),
    ({"rope_theta": 0.0}, "rope_theta=0.0 must be above 0"),
    ({"num_heads": 10**9 + 7}, "model.num_heads=1000000007 must be at most 65536"),  # not its divisors
]


def test_invalid_model_config_raises_with_the_reason():
    for changes, message in REFUSED:
        with pytest.raises(ValueError, match=message):
            Decoder(dataclasses.replace(CFG, **changes), rngs=nnx.Rngs(0))(tokens())


def test_a_call_does_not_ask_for_the_platform(monkeypatch):
    decoder, asked = Decoder(CFG, rngs=nnx.Rngs(0)), []
    for name in ("default_backend", "devices"):
        monkeypatch.setattr(jax, name, lambda *_, name=name: asked.append(name))
    jax.make_jaxpr(decoder)(tokens())
    assert not asked


def test_ids_outside_the_vocabulary_are_refused_where_they_are_known():
    decoder = bind(abstract_params(CFG), CFG)  # without values: nothing is computed before the check
    for ids, message in (([[3, 64]], "tokens run from 3 to 64, "), ([[-1, 3]], "tokens run from -1 to 3, ")):
        with pytest.raises(ValueError, match=message + r"but model.vocab_size=64 has ids 0 to 63. Encode the text"):
            decoder(jnp.asarray(ids))


def test_rows_longer_than_the_model_are_refused_even_where_ids_are_traced():
    cfg = dataclasses.replace(CFG, max_positions=12)
    shapes = [jax.ShapeDtypeStruct((2, length), jnp.int32) for length in (12, 13)]
    logits = lambda params, tokens_BT: apply(params, cfg, tokens_BT)  # noqa: E731
    assert jax.eval_shape(logits, abstract_params(cfg), shapes[0]).shape == (2, 12, 64)
    with pytest.raises(ValueError, match=r"tokens have 13 positions, more than model.max_positions=12. Shorten the"):
        jax.eval_shape(logits, abstract_params(cfg), shapes[1])
