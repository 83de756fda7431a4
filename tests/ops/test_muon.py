"""Muon against `optax.contrib.muon` on the unstacked matrices, and which parameters it updates."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from hlat_jax.config import ModelConfig, OptimizerConfig, ParallelConfig
from hlat_jax.model import init_params, param_axes
from hlat_jax.ops import muon
from hlat_jax.optimizer import adamw, decay_mask, global_norm
from hlat_jax.parallel.sharding import make_layout
from hlat_jax.precision import POLICIES

MODEL = ModelConfig(
    vocab_size=64, num_layers=2, embed_dim=32, mlp_dim=48, num_heads=6, num_kv_heads=2, head_dim=8, max_positions=16
)
NUM_STEPS = 20
RATE = 3e-3


def unstacked(params, cfg):
    """Returns the hidden matrices [in, out] of each layer by name, and all other parameters, as Llama has them."""
    layers, matrices = params["layers"], {}
    for number in range(cfg.num_layers):
        attention = {key: value[number] for key, value in layers["attention"].items()}
        mlp = {key: value[number] for key, value in layers["mlp"].items()}
        if cfg.fuse_qkv:
            *queries, k, v = jnp.moveaxis(attention["qkv"], 2, 0)  # each [D, K, H]
            q = jnp.stack(queries, axis=2)
        else:
            q, (k, v) = attention["q"], jnp.moveaxis(attention["kv"], 1, 0)
        gate, up = jnp.moveaxis(mlp["gate_up"], 1, 0)
        found = {"q": q, "k": k, "v": v, "gate": gate, "up": up}
        found = {name: matrix.reshape(cfg.embed_dim, -1) for name, matrix in found.items()}
        found |= {name: x.reshape(-1, cfg.embed_dim) for name, x in {"out": attention["out"], **mlp}.items()}
        del found["gate_up"]
        matrices |= {f"{name} {number}": matrix for name, matrix in found.items()}
    norms = {key: layers[key] for key in ("attention_norm", "mlp_norm")}
    return matrices, {key: value for key, value in params.items() if key != "layers"} | norms


@pytest.mark.quick_cases("True")
@pytest.mark.parametrize("fuse_qkv", [True, False])
def test_twenty_updates_equal_optax_on_unstacked_matrices(fuse_qkv):
    model = dataclasses.replace(MODEL, fuse_qkv=fuse_qkv)
    config = OptimizerConfig(name="muon", muon_lr_ratio=2.0, clip_norm=0.0)
    layout = make_layout(ParallelConfig(), jax.devices()[:1])
    functions = muon.orthogonalizers(
        param_axes(model), layout, width=model.embed_dim, config=config, dtype=jnp.float32, unroll=False
    )
    params = init_params(model, jax.random.key(0))
    decays = decay_mask(params, config.decay)
    ours = adamw(config, policy=POLICIES["fp32"], decays=decays, orthogonalizers=functions)
    of_matrices = optax.contrib.muon(2 * RATE, consistent_rms=0.2, weight_decay=0.1)
    theirs = of_matrices, optax.adamw(RATE, 0.9, 0.95, eps=1e-8, weight_decay=0.1)
    their_params = unstacked(params, model)
    states = ours.init(params), *(each.init(part) for each, part in zip(theirs, their_params, strict=True))

    @jax.jit
    def step(number, params, their_params, states):
        leaves, structure = jax.tree.flatten(params)
        keys = jax.random.split(jax.random.key(number), len(leaves))
        grads = structure.unflatten([jax.random.normal(key, p.shape) for key, p in zip(keys, leaves, strict=True)])
        extra = {"learning_rate": jnp.float32(RATE), "grad_norm": global_norm(grads), "finite": jnp.bool_(True)}
        updates, state = ours.update(grads, states[0], params, **extra)
        parts = zip(theirs, unstacked(grads, model), states[1:], their_params, strict=True)
        wanted, after = zip(*(each.update(*of_part) for each, *of_part in parts), strict=True)
        params, their_params = (optax.apply_updates(params, updates), optax.apply_updates(their_params, wanted))
        return unstacked(updates, model), wanted, (params, their_params, (state, *after))

    of_step = params, their_params, states
    for number in range(NUM_STEPS):
        got, wanted, of_step = step(number, *of_step)
        assert jax.tree.structure(got) == jax.tree.structure(wanted)
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
            # fp32: five iterations amplify what is rounded in small singular values by 3.4445^5 = 485
            np.testing.assert_allclose(a, b, rtol=0, atol=min(1e-6, 5e-6 * np.abs(b).max()))


def test_only_matrices_inside_the_layers_are_hidden():
    found = {}
    for fuse_qkv in (True, False):
        axes = param_axes(dataclasses.replace(MODEL, fuse_qkv=fuse_qkv))
        leaves = jax.tree_util.tree_leaves_with_path(axes, is_leaf=lambda leaf: isinstance(leaf, tuple))
        found |= {
            jax.tree_util.keystr(path[-2:], simple=True, separator="."): muon.is_hidden(of) for path, of in leaves
        }
    hidden = {"attention.qkv", "attention.q", "attention.kv", "attention.out", "mlp.gate_up", "mlp.down"}
    assert {name for name, is_hidden in found.items() if is_hidden} == hidden
    assert found.keys() - hidden == {"embed", "head", "final_norm.scale", "attention_norm.scale", "mlp_norm.scale"}
    for bias in (("kv_heads", "qkv", "head_dim"), ("gate", "mlp"), ("embed",), ("norm",), ("head_dim",)):
        assert not muon.is_hidden(("layers", *bias))
