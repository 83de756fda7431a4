"""Residual selection: what backward passes keep of cheap work, and that nothing else changes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from foreign.measured import distance, residual_bytes, step_for_memory, total_product_flops
from foreign.models import MODELS
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P

from hlat_jax.passes import naming
from hlat_jax.passes.autocast_pass import autocast
from hlat_jax.passes.residuals import select_residuals

ROWS, D, F = 256, 256, 512


@functools.cache
def arguments():
    rng = np.random.default_rng(0)
    shapes = {"up": (D, F), "down": (F, D), "gain": (D,)}
    params = {name: jnp.asarray(rng.normal(size=shape) / shape[0] ** 0.5, "float32") for name, shape in shapes.items()}
    return params, jnp.asarray(rng.normal(size=(ROWS, D)), "float32")


def mlp(params, x, act=jax.nn.gelu):
    return act(x @ params["up"]) @ params["down"]


def norm(params, x):
    x = x - x.mean(axis=-1, keepdims=True)
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6) * params["gain"]


def unrolled(params, x, block=mlp):
    for _ in range(3):
        x = x + block(params, norm(params, x))
    return jnp.mean(x**2)


def scanned(params, x, block=mlp):
    return jnp.mean(jax.lax.scan(lambda x, _: (x + block(params, norm(params, x)), None), x, length=3)[0] ** 2)


def total(fn):
    return lambda params, x: jnp.sum(fn(params, x))


def close(fn, wanted, *args, rtol=2e-6):
    for found, want in zip(jax.tree.leaves(fn(*args)), jax.tree.leaves(wanted(*args)), strict=True):
        found, want = np.asarray(found), np.asarray(want)
        np.testing.assert_allclose(found, want, rtol=0, atol=rtol * np.abs(want).max())


def test_an_mlp_keeps_one_narrow_array_of_its_hidden_width():
    for act in (jax.nn.gelu, jax.nn.relu, jax.nn.silu, jnp.tanh):
        fn = autocast(total(functools.partial(mlp, act=act)), "bf16")
        assert residual_bytes(select_residuals(fn), *arguments()) == ROWS * F * 2 < residual_bytes(fn, *arguments()) / 2


@pytest.mark.slow
def test_attention_keeps_its_scores_once_and_layer_norm_its_input():
    def attention(params, x):
        return jax.nn.softmax(x @ x.T) @ norm(params, x) @ params["up"]

    fn = select_residuals(autocast(total(attention), "bf16"))
    mixed = ROWS * D  # what the last product reads
    statistics = 8 * ROWS  # fp32
    assert residual_bytes(fn, *arguments()) <= 2 * (ROWS * ROWS + mixed) + 2 * statistics


def test_a_function_that_keeps_nothing_has_its_gradients():
    w = jnp.arange(3.0)
    losses = (lambda w: jnp.sum(w * w), lambda w: jnp.sum(3 * w), lambda w: w[0], lambda w: jnp.sum(jnp.tanh(w) ** 0))
    for loss in losses:
        np.testing.assert_array_equal(jax.grad(select_residuals(loss))(w), jax.grad(loss)(w))
        np.testing.assert_array_equal(jax.jit(jax.grad(jax.jit(select_residuals(loss))))(w), jax.grad(loss)(w))


def test_dropout_keeps_a_boolean_and_no_random_bits():
    def dropped(params, x):
        hidden = mlp(params, x)
        return jnp.where(jax.random.bernoulli(jax.random.key(0), 0.9, hidden.shape), hidden / 0.9, 0) @ params["up"]

    # hidden width, the mask, and the product that the mask selects from or what is selected
    assert residual_bytes(select_residuals(autocast(total(dropped), "bf16")), *arguments()) == ROWS * (
        2 * F + D + 2 * D
    )


@pytest.mark.quick_cases("scanned")
@pytest.mark.parametrize("loss", [unrolled, scanned])
def test_gradients_in_fp32_are_those_of_the_function_and_no_product_runs_again(loss):
    found = select_residuals(loss)
    close(jax.jit(jax.value_and_grad(found)), jax.jit(jax.value_and_grad(loss)), *arguments())
    assert total_product_flops(found, *arguments()) == total_product_flops(loss, *arguments())
    assert residual_bytes(found, *arguments()) < 0.6 * residual_bytes(loss, *arguments())


@pytest.mark.slow
def test_peak_memory_of_a_step_does_not_grow():
    def temporaries(fn):
        return step_for_memory(fn).lower(*arguments()).compile().memory_analysis().temp_size_in_bytes

    for loss in (unrolled, scanned):
        assert temporaries(select_residuals(loss)) <= 1.02 * temporaries(loss)


def test_a_saturated_softmax_under_autocast_reads_one_rounding_of_its_logits():
    """XLA may leave logits wide for the sum of exponentials, while the backward pass reads the narrow ones it kept."""

    def loss(head, x):
        logits = x @ head
        return jnp.mean(jax.nn.logsumexp(logits, -1) - logits[:, 0])

    rng = np.random.default_rng(0)
    head, x = (jnp.asarray(rng.normal(size=shape), "float32") for shape in ((6, 40), (4, 6)))
    narrow = autocast(loss, "bf16")
    lowered = jax.jit(jax.grad(narrow, (0, 1))).lower(head, x + 60)
    rounded = lowered.compile(compiler_options={"xla_allow_excess_precision": False})(head, x + 60)
    found = jax.jit(jax.grad(select_residuals(narrow), (0, 1)))(head, x + 60)
    assert distance(found, rounded) < 2e-2  # the cotangents are rounded to bf16 too


def test_an_ensemble_by_vmap_takes_no_more_memory():
    def member(params, x):
        hidden = jax.nn.silu(jax.nn.silu(x @ params["a"]) @ params["b"])
        mean, log_var = jnp.split(hidden @ params["c"], 2, -1)
        return jnp.mean(jnp.square(mean - x) * jnp.exp(-log_var) + log_var)

    def loss(params, x):
        return jnp.sum(jax.vmap(member, (0, None))(params, x))

    params = {name: jnp.ones((5, *shape)) for name, shape in {"a": (16, 64), "b": (64, 64), "c": (64, 32)}.items()}
    plain, ours = (
        jax.jit(jax.value_and_grad(fn)).lower(params, jnp.ones((128, 16))).compile().memory_analysis()
        for fn in (loss, select_residuals(loss))
    )
    assert ours.temp_size_in_bytes <= 1.05 * plain.temp_size_in_bytes  # 1.00 with the code generator of users


@jax.custom_vjp
def doubled(x):
    return 2 * x


doubled.defvjp(lambda x: (2 * x, jnp.sin(x)), lambda kept, g: (2 * g + 0 * kept,))


def in_regions(params, x):
    hidden = jax.checkpoint(mlp)(params, norm(params, doubled(x)))
    hidden = jax.lax.cond(hidden[0, 0] > 0, lambda h: jnp.tanh(mlp(params, h)), jnp.sin, hidden)
    return jnp.mean(hidden**2 + jax.lax.fori_loop(0, 2, lambda i, h: jnp.cos(h) * h, hidden))


def mapped(fn):
    mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    return jax.shard_map(
        lambda params, x: jax.lax.pmean(jax.jit(lambda x: fn(params, jax.lax.psum(x, "data") + x))(x), "data"),
        mesh=mesh, in_specs=(P(), P("data")), out_specs=P(),
    )  # fmt: skip


TRANSFORMED = {
    "regions of its own": lambda s: jax.grad(s(in_regions)),
    "vmap": lambda s: lambda p, x: jax.vmap(jax.grad(s(unrolled)), (None, 0))(p, x.reshape(4, -1, D)),
    "jvp": lambda s: lambda p, x: jax.jvp(s(unrolled), (p, x), (p, x)),
    "grad of grad": lambda s: jax.grad(lambda p, x: sum(map(jnp.sum, jax.tree.leaves(jax.grad(s(scanned))(p, x))))),
    "shard_map": lambda s: jax.grad(mapped(s(unrolled))),
    "of shard_map": lambda s: jax.grad(s(mapped(unrolled))),
}


def far_readers(params, x):
    """Reads a value that is recomputed long after its own checkpoint."""
    first = jnp.tanh(jnp.sin(x @ params["up"]) + 1.0)
    last = first
    for _ in range(4):
        last = jnp.sin(jnp.tanh(last @ params["down"]) @ params["up"])
    return jnp.sum(jnp.sin((first * last) @ params["down"]) ** 2)


@pytest.mark.slow
def test_second_derivatives_pass_through_what_is_recomputed_elsewhere():
    params = {name: arguments()[0][name][:32, :32] * 2 for name in ("up", "down")}
    x = arguments()[1][:16, :32]

    def second(fn):
        return jax.jvp(jax.grad(fn), (params, x), (params, x))[1]

    assert distance(second(select_residuals(far_readers)), second(far_readers)) < 1e-5


def test_gradients_of_gradients_pass_through_branches_by_a_computed_index():
    x, rows = jnp.linspace(-1.0, 1.0, 24).reshape(4, 6), jnp.arange(4)

    def routed(x, rows):
        return jnp.sum(jax.lax.switch((rows + 1).sum() % 3, [jnp.tanh, jnp.sin, jnp.cos], jnp.sin(x)) ** 2)

    def hessian_times_x(fn):
        return jax.jit(lambda x, rows: jax.vjp(lambda x: jax.grad(fn)(x, rows), x)[1](x)[0])(x, rows)

    np.testing.assert_allclose(hessian_times_x(select_residuals(routed)), hessian_times_x(routed), rtol=1e-5, atol=1e-6)


@pytest.mark.quick_cases("quick")
@pytest.mark.parametrize("cases", [("jvp", "of shard_map"), TRANSFORMED], ids=["quick", "all"])
def test_it_composes_with_transformations(cases):
    for case in cases:
        program = TRANSFORMED[case]
        close(jax.jit(program(select_residuals)), jax.jit(program(lambda fn: fn)), *arguments(), rtol=1e-5)


@pytest.mark.slow
def test_a_checkpoint_of_the_function_keeps_its_policy():
    policy = jax.checkpoint_policies.save_only_these_names("wide")
    block = jax.checkpoint(
        lambda params, x: jnp.sin(checkpoint_name(jnp.exp(x @ params["up"]), "wide")) @ params["down"], policy=policy
    )
    fn = total(block)
    assert residual_bytes(select_residuals(fn), *arguments()) == residual_bytes(fn, *arguments()) == ROWS * F * 4


def test_regions_inside_shard_map_are_selected_too():
    fn = mapped(unrolled)
    assert residual_bytes(select_residuals(fn), *arguments()) < 0.6 * residual_bytes(fn, *arguments())


@pytest.mark.slow
def test_autocast_keeps_no_more_than_the_selection_of_fp32_where_work_is_mostly_elementwise():
    loss, params, batch = MODELS["unet"](small=True)
    narrow, wide = (residual_bytes(select_residuals(one), params, batch) for one in (autocast(loss, "bf16"), loss))
    assert narrow <= 0.6 * wide


@pytest.mark.quick_cases("scanned")
@pytest.mark.parametrize(("loss", "region"), [(unrolled, "segments"), (scanned, "loops")], ids=["unrolled", "scanned"])
def test_rematerialization_finds_the_blocks_of_a_selected_function_and_keeps_its_gradients(loss, region):
    if region == "segments":
        assert len(naming.segments(jax.make_jaxpr(select_residuals(loss))(*arguments()).jaxpr)) == 3
    planned = naming.checkpointed(select_residuals(loss), naming.RematChoice(), region=region)
    plain = naming.checkpointed(loss, naming.RematChoice(), region=region)
    found, wanted, least = (total_product_flops(fn, *arguments()) for fn in (planned, plain, loss))
    assert found == wanted > least
    close(jax.jit(jax.value_and_grad(planned)), jax.jit(jax.value_and_grad(loss)), *arguments(), rtol=1e-5)


def test_callbacks_of_the_function_run_once():
    seen = []

    def told(params, x):
        hidden = jnp.tanh(x @ params["up"])
        jax.debug.callback(seen.append, hidden.sum())
        return jnp.sum(jnp.sin(hidden))

    jax.block_until_ready(jax.jit(jax.grad(select_residuals(told)))(*arguments()))
    jax.effects_barrier()
    assert len(seen) == 1
