"""Autocast against the fp32 function that it is given: the same values within the step of bf16, narrow products."""

import itertools
import math

import jax
import jax.numpy as jnp
import jax.scipy.optimize
import jax.scipy.sparse.linalg
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import pallas as pl
from jax.extend import source_info_util
from jax.sharding import PartitionSpec as P

from hlat_jax.model import init_params
from hlat_jax.ops.choices import chosen_model
from hlat_jax.passes import autocast_pass as autocast_lib
from hlat_jax.passes import naming, remat_pass
from hlat_jax.passes.autocast_equations import Cast
from hlat_jax.passes.autocast_kinds import saturated
from hlat_jax.passes.autocast_pass import CastPolicy
from hlat_jax.passes.interpret import compound
from hlat_jax.passes.jaxpr import equations
from hlat_jax.program import model_loss
from hlat_jax.resolve import resolve

BF16_STEP = 2.0**-8


def autocast(fn, policy="bf16"):
    return autocast_lib.autocast(fn, policy)


def draw(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32) / math.sqrt(shape[-1])


W, X = draw(0, 8, 8), draw(1, 4, 8)


def products(fn, *args):
    """The dtypes of the operands of every product of a trace."""
    names = ("dot_general", "conv_general_dilated", "ragged_dot_general", "ragged_dot")
    found = [eqn for eqn, _ in equations(jax.make_jaxpr(fn)(*args).jaxpr) if eqn.primitive.name in names]
    return [str(var.aval.dtype) for eqn in found for var in eqn.invars[:2]]


def results(fn, *args):
    """Value and gradients of a scalar function, under one jit."""
    return jax.jit(jax.value_and_grad(fn, argnums=tuple(range(len(args)))))(*args)


def distance(got, wanted):
    """The largest distance of a leaf, of its norm."""
    pairs = zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True)
    return max(float(jnp.linalg.norm(a - b) / (jnp.linalg.norm(b) + 1e-6)) for a, b in pairs)


@jax.custom_vjp
def squared(x):
    return x @ x.T


# on purpose not the derivative: three times it
squared.defvjp(lambda x: (squared(x), x), lambda x, g: (3.0 * (g + g.T) @ x,))


@jax.custom_jvp
def clipped(x):
    return jnp.minimum(x, 1.0)


clipped.defjvp(lambda primals, tangents: (clipped(*primals), 2.0 * tangents[0]))


@jax.custom_jvp
def dense(w, x, bias):
    return x @ w + bias


# adds a tangent in fp32 to a product
dense.defjvp(lambda primals, tangents: (dense(*primals), tangents[1] @ primals[0] + tangents[2]))


def doubled_kernel(x_ref, out_ref):
    out_ref[...] = x_ref[...] * 2.0


@jax.custom_vjp
def doubled(x):
    return pl.pallas_call(doubled_kernel, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype), interpret=True)(x)


doubled.defvjp(lambda x: (doubled(x), None), lambda _, g: (2.0 * g,))


def scanned(w, x):
    return lax.scan(lambda x, w: (x + jax.nn.relu(x @ w), x[0]), x, jnp.stack([w, w.T, w]))[0].sum()


def checkpointed(w, x):
    def layer(x, w):
        return x + checkpoint_name(jax.nn.silu(checkpoint_name(x @ w, "product")), "act")

    inner = jax.checkpoint(layer, policy=jax.checkpoint_policies.save_only_these_names("product"))
    outer = jax.checkpoint(lambda x, w: inner(inner(x, w), w.T))
    return outer(x, w).sum()


def checked_sharded(w, x):
    mesh = jax.make_mesh((2,), ("a",), axis_types=(jax.sharding.AxisType.Auto,))

    def local(w, x):
        looped = lax.scan(lambda x, _: (x + jax.nn.relu(x @ w), None), x, None, length=2)[0]
        return lax.psum(looped.sum(), "a")

    return jax.shard_map(local, mesh=mesh, in_specs=(P(), P("a")), out_specs=P())(w, x)


def grad_inside(w, x):
    step = jax.grad(lambda w: jnp.square(x @ w).sum())(w)
    return jnp.square(x @ (w - 0.1 * step)).sum()


FUNCTIONS = {
    "custom_jvp": lambda w, x: clipped(x @ w).sum() + jax.nn.relu(x @ w.T).sum(),
    "tangents": lambda w, x: jnp.square(dense(w, x, x)).sum(),
    "custom_vjp": lambda w, x: squared(jnp.tanh(x @ w)).sum(),
    "gelu_norm": lambda w, x: jnp.square(jax.nn.standardize(jax.nn.gelu(x @ w)) @ w).sum(),
    "softmax": lambda w, x: (jax.nn.softmax(x @ w) @ w)[:, 0].sum(),
    "cond": lambda w, x: lax.cond(x[0, 0] > 9.0, lambda x: x @ w, lambda x: x @ w.T, x).sum(),
    "fori": lambda w, x: lax.fori_loop(0, 3, lambda i, x: x + x @ w, x)[:, :2].sum(),
    "scan": scanned,
    "checkpoint": checkpointed,
    "conv": lambda w, x: lax.conv(x.reshape(1, 1, 4, 8), w[:3, :3].reshape(1, 1, 3, 3), (1, 1), "SAME").sum(),
    "einsum": lambda w, x: jnp.square(jnp.einsum("ab,bc,dc->ad", x, w, x)).sum(),
    "ragged_dot": lambda w, x: lax.ragged_dot(x, jnp.stack([w, w.T]), jnp.array([1, 3], jnp.int32)).sum(),
    "scatter": lambda w, x: (x @ w).at[jnp.array([0, 2])].add(x[:2]).at[1].set(x[0]).sum(),
    "qr": lambda w, x: jnp.abs(jnp.linalg.qr(w + 3 * jnp.eye(8))[1]).sum() + (x @ w).sum(),
    "dropout": lambda w, x: jnp.where(jax.random.bernoulli(jax.random.key(0), 0.5, x.shape), x @ w, 0.0).sum(),
    "embedding": lambda w, x: jnp.square(w[jnp.array([1, 5, 1])] @ w).sum(),
    "grad_inside": grad_inside,
    "shard_map_vma": checked_sharded,
    "pallas": lambda w, x: (doubled(x @ w) @ w).sum(),
}


QUICK = ("conv", "embedding", "pallas", "scatter")


@pytest.mark.quick_cases("quick")
@pytest.mark.parametrize("names", [QUICK, FUNCTIONS.keys() - QUICK], ids=["quick", "others"])
def test_autocast_runs_matmuls_narrow_and_keeps_output_dtypes(names):
    for name in sorted(names):
        fn = FUNCTIONS[name]
        cast = autocast(fn, "bf16")
        assert set(products(cast, W, X)) <= {"bfloat16"}, name
        # the derivative of qr has products of its own, and qr runs in fp32
        narrow = {"bfloat16", "float32"} if name == "qr" else {"bfloat16"}
        assert set(products(jax.grad(cast), W, X)) == narrow, name
        wanted, got = results(fn, W, X), results(cast, W, X)
        assert jax.tree.map(lambda leaf: leaf.dtype, got) == jax.tree.map(lambda leaf: leaf.dtype, wanted), name
        # a handful of roundings of half a step each, in values and once more in gradients
        assert 0.0 < distance(got, wanted) < 8 * BF16_STEP, name


def carries(fn, *args):
    """The dtypes that the first scan of a trace carries."""
    loop = next(eqn for eqn, _ in equations(jax.make_jaxpr(fn)(*args).jaxpr) if eqn.primitive.name == "scan")
    return [str(atom.aval.dtype) for atom in loop.invars[compound(loop).carried]]


def stream_and_sums(w, x):
    """A residual stream beside what a loop accumulates: a count, a sum of products, and a loss."""

    def body(carry, _):
        x, count, total, loss = carry
        product = jax.nn.relu(x @ w)
        return (x + product, count + jnp.ones(4), total + product, loss + jnp.square(product).mean()), None

    start = x, jnp.zeros(4), jnp.zeros(x.shape), 0.0
    return lax.scan(jax.checkpoint(body), start, None, length=300)[0]


def test_loop_carries_activations_narrow_and_accumulates_in_fp32():
    small = -0.001 * jnp.eye(8) + 0.001 * W
    assert carries(autocast(stream_and_sums), small, X) == ["bfloat16", "float32", "float32", "float32"]
    _, count, total, _ = jax.jit(autocast(stream_and_sums))(small, X)
    np.testing.assert_array_equal(count, 300.0)  # bf16 would end at 256
    # each term has the step of bf16; 300 of them added in bf16 would stop growing at 256 times their size
    x = jnp.ones_like(X)
    total = jax.jit(autocast(lambda w, x: lax.fori_loop(0, 600, lambda _, sums: sums + x @ w, jnp.zeros((4, 8)))))(W, x)
    np.testing.assert_allclose(total, 600 * (x @ W), atol=600 * 2 * BF16_STEP)


def test_scalars_and_sums_that_exponentials_or_fp32_values_enter_are_fp32():
    for loss in (
        lambda w, x: 3.0 * jnp.vdot(x @ w, x @ w) + 1.0,
        lambda w, x: jax.nn.logsumexp(x @ w, axis=-1) - (x @ w)[:, 0],
    ):
        found = autocast(loss)(W, X)
        assert (found != found.astype(jnp.bfloat16).astype(jnp.float32)).all()
    jaxpr = jax.make_jaxpr(autocast(lambda w, x: jax.nn.softmax(x @ w)))(W, X)
    (subtraction,) = (eqn for eqn, _ in equations(jaxpr.jaxpr) if eqn.primitive.name == "sub")
    assert subtraction.outvars[0].aval.dtype == jnp.float32
    barrier = autocast(lambda w, x: lax.optimization_barrier((x @ w, jax.nn.logsumexp(x, axis=-1))))
    (eqn,) = (eqn for eqn, _ in equations(jax.make_jaxpr(barrier)(W, X).jaxpr) if "barrier" in eqn.primitive.name)
    assert [str(var.aval.dtype) for var in eqn.outvars] == ["bfloat16", "float32"]


def test_effects_are_kept_and_happen_once(capsys):
    def fn(w, x):
        return lax.fori_loop(0, 2, lambda i, x: (jax.debug.print("at {i}", i=i), x @ w)[1], x)

    jax.block_until_ready(jax.jit(autocast(fn))(W, X))
    jax.effects_barrier()
    assert capsys.readouterr().out == "at 0\nat 1\n"


LEAST = float(np.finfo(np.float32).min)
FILLS = (("fp16", -1e30), ("bf16", LEAST))


def test_masks_beyond_the_narrow_range_stay_finite():
    mask = jnp.tril(jnp.ones((4, 4), bool)).at[0, 0].set(False)  # the first row sees nothing
    x = draw(2, 300, 8)
    for policy, fill in FILLS:
        large = jnp.where(jnp.tril(jnp.ones((300, 300), bool)).at[5].set(False), 0.0, fill)  # row 5 sees nothing

        def by_select(w, x, fill=fill):
            return jax.nn.softmax(jnp.where(mask, (x @ w) @ x.T, fill)) @ x

        def by_sum(w, x, fill=fill):
            return jax.nn.softmax((x @ w) @ x.T + (1.0 - mask) * fill) @ x

        def closed_over(w, x, large=large):
            return jax.nn.softmax(x @ x.T + large) @ x

        for attend, x_own in ((by_select, X), (by_sum, X), (closed_over, x)):
            for cast in (autocast(attend, policy), jax.jit(autocast(attend, policy))):
                np.testing.assert_allclose(cast(W, x_own), attend(W, x_own), atol=8 * BF16_STEP)
            narrow = "bfloat16" if policy == "bf16" else "float16"
            assert set(products(autocast(attend, policy), W, x_own)) == {narrow}


def test_constants_beyond_the_range_of_fp16_stay_finite_and_small_ones_guard_a_division():
    guarded = lambda w, x: (x @ w) / jnp.maximum(jnp.max(x @ w, axis=-1, keepdims=True), 1e-9)  # noqa: E731
    np.testing.assert_array_equal(jax.jit(autocast(guarded, "fp16"))(W, jnp.zeros_like(X)), 0.0)
    eye = jnp.eye(4)
    for fn in (lambda x: x @ x + 90000.0, lambda x: x @ x + jnp.full((4, 4), 1e30)):
        np.testing.assert_array_equal(autocast(fn, "fp16")(eye), fn(eye))
    got = autocast(lambda x: x @ jnp.full((4, 4), 1e30), "fp16")(eye)
    np.testing.assert_array_equal(got, np.float32(np.finfo(np.float16).max))


def test_checkpoint_names_scopes_and_source_lines_are_preserved():
    def fn(w, x):
        with jax.named_scope("block"):
            return checkpointed(w, x) + scanned(w, x)

    def names_and_places(fn):
        found = [eqn for eqn, _ in equations(jax.make_jaxpr(fn)(W, X).jaxpr)]
        names = [eqn.params["name"] for eqn in found if eqn.primitive.name == "name"]
        places = [
            (str(eqn.source_info.name_stack), source_info_util.summarize(eqn.source_info))
            for eqn in found
            if eqn.primitive.name in ("dot_general", "logistic", "remat2", "scan")
        ]
        return names, places

    assert names_and_places(autocast(fn)) == names_and_places(fn)
    assert "block" in names_and_places(fn)[1][0][0]


def test_a_custom_vjp_keeps_narrow_residuals_and_may_close_over_an_array():
    _, pull = jax.vjp(autocast(lambda x: squared(x @ W)), X)
    assert [leaf.dtype for leaf in jax.tree.leaves(pull) if leaf.shape == X.shape] == [jnp.bfloat16]
    table = W

    @jax.custom_vjp
    def mixed(x):
        return x @ table

    mixed.defvjp(lambda x: (x @ table, None), lambda _, g: (3.0 * g @ table.T,))  # on purpose not the derivative

    def direct(w, x):
        return jnp.square(mixed(x @ w)).sum()

    def looped(w, x):
        return jnp.square(lax.scan(lambda x, _: (mixed(jnp.tanh(x @ w)), None), x, None, length=2)[0]).sum()

    for fn in (direct, looped, jax.jit(direct)):
        assert set(products(jax.grad(autocast(fn)), W, X)) == {"bfloat16"}
        wanted = results(fn, W, X)
        assert distance(results(autocast(fn), W, X), wanted) < 8 * BF16_STEP
        assert distance(jax.grad(jax.jit(autocast(fn)))(W, X), wanted[1][0]) < 8 * BF16_STEP


def test_gradient_of_a_custom_vjp_closure_is_refused_instead_of_zero():
    def fn(w, x):
        mixed = jax.custom_vjp(lambda x: x @ w)
        mixed.defvjp(lambda x: (jnp.sin(x), None), lambda _, g: (g,))
        return mixed(x).sum()

    assert distance(jax.grad(autocast(fn), argnums=1)(W, X), jnp.ones_like(X)) == 0.0
    with pytest.raises(Exception, match="with respect to a closed-over value"):
        jax.grad(autocast(fn))(W, X)


def test_rules_override_by_primitive_and_by_op():
    @jax.jit
    def head(w, x):
        return x @ w

    def fn(w, x):
        return jnp.exp(head(w, x @ w.T)).sum()

    def exps(cast):
        found = equations(jax.make_jaxpr(cast)(W, X).jaxpr)
        return [str(eqn.invars[0].aval.dtype) for eqn, _ in found if eqn.primitive.name == "exp"]

    assert exps(autocast(fn)) == ["float32"]
    assert products(autocast(head, CastPolicy(rules={"tanh": "infer"})), W, X) == ["bfloat16"] * 2  # without tanh
    assert exps(autocast(fn, CastPolicy(rules={"exp": "infer"}))) == ["bfloat16"]
    assert products(autocast(fn, CastPolicy(rules={"head": "never"})), W, X) == ["bfloat16"] * 2 + ["float32"] * 2
    assert products(autocast(fn, CastPolicy(rules={"dot_general": "never"})), W, X) == ["float32"] * 4
    cast_loss = lambda w, x: squared(jnp.exp(x @ w)).sum()  # noqa: E731
    kept = CastPolicy(rules={"squared": "never"})
    assert products(jax.grad(autocast(cast_loss, kept)), W, X).count("float32") == 4  # one in each of its functions
    narrowed = autocast(lambda x: clipped(jnp.exp(x)), CastPolicy(rules={"clipped": "always"}))
    assert float(narrowed(jnp.full((2,), -1.001))[0]) == float(jnp.exp(-1.001).astype(jnp.bfloat16))


def test_op_rules_apply_in_a_rematerialized_function():
    @jax.jit
    def router(w, x):
        return jnp.tanh(x @ w)

    def routed(w, x):
        return router(w, lax.scan(lambda x, w: (router(w, x), None), x, jnp.stack([w, w.T]))[0])

    for region in ("loops", "whole"):
        planned = naming.checkpointed(routed, remat_pass.RematChoice(), region=region)
        assert set(products(autocast(planned, CastPolicy(rules={"router": "never"})), W, X)) == {"float32"}
        assert set(products(autocast(planned), W, X)) == {"bfloat16"}
    with pytest.raises(ValueError, match=r"nor an op of routed. Ops that it calls: .*router"):
        autocast(planned, CastPolicy(rules={"rooter": "never"}))(W, X)


def test_non_fp32_inputs_are_unchanged():
    def fn(tree, *, scale):
        low = tree["low"] @ tree["low"]
        return {"low": low, "wide": low.astype(jnp.float32) * scale, "int": tree["int"] + 1, "text": None}

    tree = {"low": W.astype(jnp.bfloat16), "int": jnp.arange(3)}
    got, wanted = autocast(fn, "fp16")(tree, scale=3.0), fn(tree, scale=3.0)
    jax.tree.map(np.testing.assert_array_equal, got, wanted)
    assert jax.tree.map(lambda leaf: leaf.dtype, got) == jax.tree.map(lambda leaf: leaf.dtype, wanted)


def test_gradients_reach_what_the_function_closes_over():
    got = jax.jit(jax.grad(lambda w: autocast(lambda x: jnp.square(x @ w).sum())(X)))(W)
    wanted = jax.grad(lambda w: jnp.square(X @ w).sum())(W)
    assert got.dtype == jnp.float32
    assert distance(got, wanted) < 4 * BF16_STEP


def test_decoder_has_narrow_matmuls_and_saves_a_third_less(small, one_device, make_batch):
    small.model.update(layer_loop="scan", remat="selective", num_layers=2)
    config = resolve(small)
    model, batch = chosen_model(config, one_device), make_batch(0, config)
    loss = model_loss(model, one_device, compute=jnp.float32, z_loss_weight=1e-4)
    params = init_params(config.model, jax.random.key(0))

    def kept_bytes(loss):
        trace = jax.make_jaxpr(lambda params: jax.vjp(lambda params: loss(params, batch)[0], params)[1])(params).jaxpr
        return sum(var.aval.size * var.aval.dtype.itemsize for var in {*trace.outvars} - {*trace.invars})

    cast = autocast(loss)
    assert set(products(jax.grad(cast, has_aux=True), params, batch)) == {"bfloat16"}
    assert kept_bytes(cast) <= 0.65 * kept_bytes(loss)


INVALID = {
    "policy 'bf61' is unknown. Use bf16, fp16": lambda: autocast(jnp.sin, "bf61"),
    "policy .*bfloat16.* is not a policy. Use bf16, fp16": lambda: autocast(jnp.sin, jnp.bfloat16),
    "compute=.*float32.* must be jnp.bfloat16 or jnp.float16": lambda: CastPolicy(compute=jnp.float32),
    "rule exp='sometimes' is unknown. Use one of always, never": lambda: CastPolicy(rules={"exp": "sometimes"}),
    "nor an op of scanned. Ops that it calls: .*relu": lambda: autocast(scanned, CastPolicy(rules={"rellu": "never"}))(
        W, X
    ),
    "a Pallas kernel, which only runs in its declared dtypes": lambda: autocast(
        doubled, CastPolicy(rules={"pallas_call": "always"})
    )(X),
}


def test_invalid_input_error_names_the_fix():
    for said, make in INVALID.items():
        with pytest.raises(ValueError, match=said):
            make()
    with pytest.raises(TypeError, match=r"^dot_general requires contracting dimensions to have the same shape"):
        autocast(lambda x: x @ x)(X)  # the user's own error


def test_values_that_are_not_arrays_are_passed_as_they_are():
    def loss(layer, x, heads, *, train, dtype, mesh):
        w, activation = layer  # a function among the leaves, as in Equinox's modules
        assert mesh.axis_names == ("data",)  # it has a shape and no dtype
        y = activation((x @ w).reshape(len(x), heads, -1))
        return jnp.sum(y * 0.5 if train else y).astype(dtype)

    given = {"train": True, "dtype": jnp.float32, "mesh": jax.make_mesh((1,), ("data",))}
    got, wanted = (fn((W, jnp.tanh), X, 2, **given) for fn in (autocast(loss), loss))
    np.testing.assert_allclose(got, wanted, rtol=1e-2)
    assert got != wanted


POSITIONS = jnp.broadcast_to(jnp.arange(2040.0, 2048.0), (2, 8))
FREQS = 1.0 / (10000.0 ** (jnp.arange(0, 8, 2) / 8))


def looped_angles(pos):
    return lax.scan(lambda pos, _: (pos + 1.0, jnp.sin(pos @ jnp.ones((8, 4)))), pos, None, length=2)[1]


ANGLES = {
    "highest": lambda pos: jnp.sin(jnp.einsum("BT,k->BTk", pos, FREQS, precision="highest")),
    "no_contraction": lambda pos: jnp.sin(jnp.einsum("BT,k->BTk", pos, FREQS)),
    "contraction_of_1": lambda pos: jnp.sin(pos[:, :, None] @ FREQS[None]),
    "integers": lambda pos: jnp.sin(pos.astype(jnp.int32).astype(jnp.float32) @ jnp.ones((8, 4))),
    "integers_in_a_scan": lambda pos: looped_angles(pos.astype(jnp.int32).astype(jnp.float32)),
    "division": lambda pos: jnp.sin((pos.astype(jnp.int32).astype(jnp.float32) / 0.5) @ jnp.ones((8, 4))),
    "iota": lambda pos: jnp.sin(jax.jit(lambda t: (t + 1.0) @ jnp.ones((8, 4)))(2040.0 + lax.iota(jnp.float32, 8))),
}


def test_position_angles_stay_fp32():
    for name, fn in ANGLES.items():
        wanted = jax.jit(fn)(POSITIONS)
        for policy in ("bf16", "fp16"):
            # an angle of 2047 has the step 1.2e-4 in fp32, 8.0 in bf16; sums of 8 of them have 8 times as much
            got, atol = jax.jit(autocast(fn, policy))(POSITIONS), 4e-3 * float(abs(wanted).max())
            np.testing.assert_allclose(got, wanted, atol=atol, err_msg=name)


def test_integer_biases_are_added_in_fp32():
    bias = jnp.arange(2040, 2048)
    fn = lambda w, x: lax.optimization_barrier((x @ w) + bias.astype(jnp.float32)) - 2040.0  # noqa: E731
    np.testing.assert_allclose(autocast(fn)(W, X), fn(W, X), atol=4 * BF16_STEP)


def test_products_of_small_integers_run_narrow_and_those_of_highest_precision_only_by_rule():
    cast = autocast(lambda w, x: x.astype(jnp.float32) @ w)
    for dtype, narrow in ((jnp.int8, "bfloat16"), (jnp.uint8, "bfloat16"), (bool, "bfloat16"), (jnp.int32, "float32")):
        assert products(cast, W, jnp.eye(4, 8).astype(dtype)) == [narrow] * 2
    assert products(autocast(lambda w, ids: jax.nn.one_hot(ids, 8) @ w), W, jnp.array([1, 5])) == ["bfloat16"] * 2
    fn = lambda w, x: jnp.matmul(x, w, precision=("highest", "default"))  # noqa: E731
    assert products(autocast(fn), W, X) == ["float32"] * 2
    assert products(autocast(fn, CastPolicy(rules={"dot_general": "always"})), W, X) == ["bfloat16"] * 2
    assert products(autocast(lambda w, x: jnp.matmul(x, w, precision="high")), W, X) == ["bfloat16"] * 2


def mean(x):
    return jnp.mean(x, axis=-1, keepdims=True)


def centred(x):
    return x - mean(x)


# hand-written statistics of an activation
STATISTICS = {
    "rms_norm": lambda y: y * lax.rsqrt(mean(y * y) + 1e-6),
    "rms_norm_einsum": lambda y: y * lax.rsqrt(jnp.einsum("...d,...d->...", y, y) / 8 + 1e-6)[..., None],
    "layer_norm": lambda y: centred(y) / jnp.sqrt(mean(centred(y) * centred(y)) + 1e-6),
    "masked": lambda y: jnp.sqrt(jnp.sum(jnp.where(jnp.arange(8) < 6, y * y, 0.0).reshape(4, 2, 4), -1)),
    "weighted": lambda y: jnp.sqrt(jnp.sum(jax.nn.sigmoid(y @ W) * y * y, -1)),
    "kept": lambda y: checkpoint_name(y * y, "square") / 300.0,
}


def test_squares_and_norms_of_large_values_are_accurate():
    x = 300 * jnp.sqrt(8.0) * X
    for name, statistic in STATISTICS.items():
        fn = lambda x, statistic=statistic: statistic(x @ W)  # noqa: E731
        wanted = jax.jit(fn)(x)
        for policy in ("bf16", "fp16"):
            got, atol = jax.jit(autocast(fn, policy))(x), 4 * BF16_STEP * float(abs(wanted).max())
            np.testing.assert_allclose(got, wanted, atol=atol, err_msg=name)
        assert products(autocast(fn), x)[0] == "bfloat16", name


def test_handwritten_variances_and_covariances_match_fp32():
    x, w = draw(3, 16, 256) * 16, draw(4, 256, 256)
    places = (lambda y, z: y * z, lambda y, z: checkpoint_name(y * z, "product"))
    for place, other in itertools.product(places, (lambda y: y, lambda y: y + jnp.tanh(y))):

        def moments(x, place=place, other=other):
            y = x @ w + 30.0
            z = other(y)
            return mean(place(y, z)) - mean(y) * mean(z)

        wanted = moments(x)  # about 1, of squares of 900
        for policy in ("bf16", "fp16"):
            np.testing.assert_allclose(jax.jit(autocast(moments, policy))(x), wanted, rtol=2 * BF16_STEP)


def test_returned_updates_are_computed_in_fp32():
    def step(w, moment, x):
        grad = jax.grad(lambda w: jnp.square(x @ w - x).sum())(w)
        moment = 0.999 * moment + 0.001 * grad * grad
        return w - 1e-4 * grad / jnp.sqrt(moment), moment

    start = W, jnp.ones((8, 8))
    moved = jax.tree.map(jnp.subtract, step(*start, X), start)
    for fn, policy in itertools.product((step, jax.jit(step)), ("bf16", "fp16")):
        assert distance(jax.tree.map(jnp.subtract, autocast(fn, policy)(*start, X), start), moved) < 8 * BF16_STEP


def test_a_loop_that_floats_end_is_cast_by_rule_alone():
    def decode(w, x):
        def body(carry):
            x, _, i = carry
            x = jnp.tanh(x @ w)
            return x, jnp.argmax(x, axis=-1), i + 1

        return lax.while_loop(lambda c: (c[1] != 7).any() & (c[2] < 4), body, (x, jnp.zeros(4, int), 0))[0]

    assert set(products(autocast(decode), W, X)) == {"float32"}
    assert set(products(autocast(decode, CastPolicy(rules={"while": "infer"})), W, X)) == {"bfloat16"}


def newton(by_flag):
    """The square root of a matrix and how many iterations it takes, until the error is below 1e-5."""

    def root(a):
        def far(x):
            return jnp.linalg.norm(x @ x - a) > 1e-5

        def body(carry):
            x, _, i = carry
            x = 0.5 * (x + a @ jnp.linalg.inv(x))
            return x, jax.jit(far)(x), i + 1

        def unfinished(carry):
            return (carry[1] if by_flag else far(carry[0])) & (carry[2] < 200)

        return lax.while_loop(unfinished, body, (a, jnp.bool_(True), 0))[::2]

    return root


def minimize(a):
    return jax.scipy.optimize.minimize(lambda x: jnp.square(a @ x - 1.0).sum(), jnp.ones(8), method="BFGS").x


POSITIVE = 0.2 * W @ W.T + jnp.eye(8)
SOLVERS = {
    "newton": (newton(False), POSITIVE),
    "newton_by_flag": (newton(True), POSITIVE),
    "newton_in_scan": (lambda a: lax.scan(lambda c, _: (c, newton(True)(a)), 0.0, None, length=2)[1], POSITIVE),
    "bfgs": (minimize, POSITIVE),
}


@pytest.mark.quick_cases("quick")
@pytest.mark.parametrize("names", [("newton", "newton_by_flag"), SOLVERS], ids=["quick", "all"])
def test_loops_with_an_error_based_condition_keep_their_dtypes(names):
    for name in names:
        fn, a = SOLVERS[name]
        got, wanted = jax.jit(autocast(fn))(a), jax.jit(fn)(a)
        for leaf, want in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
            np.testing.assert_allclose(leaf, want, rtol=1e-5, err_msg=name)  # as many iterations too


@pytest.mark.quick_cases("fp16--1e+30")
@pytest.mark.parametrize(("policy", "fill"), FILLS)
def test_mask_arguments_stay_finite(policy, fill):
    mask = jnp.where(jnp.tril(jnp.ones((4, 4), bool)).at[1].set(False), 0.0, fill)  # row 1 sees nothing
    x = 4 * X

    def attend(w, x, mask):
        return jax.nn.softmax((x @ w) @ x.T + mask) @ x

    def by_select(w, x, mask):
        return jax.nn.softmax(jnp.where(mask < 0, mask, (x @ w) @ x.T)) @ x

    def by_name(w, x, mask):
        scores = checkpoint_name((x @ w) @ x.T + mask, "scores")
        return jax.nn.softmax(scores) @ x + scores.max()

    def in_scan(w, x, mask):
        return lax.scan(lambda x, _: (x + attend(w, x, mask), None), x, None, length=2)[0]

    for fn in (attend, by_select, by_name, in_scan):
        loss = lambda w, x, fn=fn: jnp.square(fn(w, x, mask)).sum()  # noqa: E731
        cast = lambda w, x, fn=fn: jnp.square(autocast(fn, policy)(w, x, mask)).sum()  # noqa: E731
        assert distance(results(cast, W, x), results(loss, W, x)) < 8 * BF16_STEP
        assert "float32" not in products(autocast(fn, policy), W, x, mask)


def test_saturated_casts_keep_infinities_and_gradients():
    for low in (jnp.bfloat16, jnp.float16):
        largest = float(jnp.finfo(low).max)
        x = jnp.array([1.0, LEAST, -LEAST, -np.inf, np.inf, np.nan])
        wanted = [1.0, -largest, largest, -np.inf, np.inf, np.nan]
        np.testing.assert_array_equal(saturated(x, low).astype(jnp.float32), wanted)
        grads = jax.grad(lambda x, low=low: saturated(x, low).astype(jnp.float32).sum())(x)
        np.testing.assert_array_equal(grads, 1.0)


def test_a_linear_function_is_transposed():
    for fn in (lambda x: x @ W + x, lambda x: jnp.concatenate([x @ W, x]), lambda x: jnp.where(X > 0.3, x @ W, x)):
        cotangent = jnp.ones_like(fn(X))
        (wanted,), (got,) = (jax.linear_transpose(each, X)(cotangent) for each in (fn, autocast(fn)))
        assert got.dtype == jnp.float32
        assert distance(got, wanted) < 4 * BF16_STEP


def test_nested_calls_are_analyzed_once_each(monkeypatch):
    fn = lambda x: x @ W  # noqa: E731
    for _ in range(10):
        fn = jax.jit(lambda x, fn=fn: fn(x) + fn(jnp.sin(x)))
    read, original = [], Cast._wide_operands
    monkeypatch.setattr(Cast, "_wide_operands", lambda *args: read.append(1) or original(*args))
    jax.make_jaxpr(autocast(fn))(X)
    assert len(read) < 10 * 10


@pytest.mark.slow
def test_integer_derived_tables_and_weights_keep_matmuls_narrow():
    def fn(w, x, mask):
        angles = jnp.arange(4.0)[:, None] / 100.0 ** (jnp.arange(4.0) / 4)
        cos, sin = (jnp.concatenate([table(angles)] * 2, -1) for table in (jnp.cos, jnp.sin))
        y = x @ w
        y = (y * cos + jnp.concatenate([-y[:, 4:], y[:, :4]], -1) * sin) @ w
        distance = jnp.abs(jnp.arange(4)[:, None] - jnp.arange(4)).astype(jnp.float32)
        y = jax.nn.softmax(y @ y.T - distance * 0.5 ** jnp.arange(1.0, 5.0)) @ y
        y = jax.nn.softmax(-distance) @ (y * (mask / mask.sum())[:, None])
        return (jax.nn.sigmoid(y @ w) * jnp.sqrt(1.0 + mask)[:, None]) @ w

    mask = jnp.array([1, 1, 1, 0])
    assert set(products(autocast(fn), W, X, mask)) == {"bfloat16"}
    assert set(products(jax.grad(lambda w: autocast(fn)(w, X, mask).sum()), W)) == {"bfloat16"}
    assert distance(autocast(fn)(W, X, mask), fn(W, X, mask)) < 8 * BF16_STEP


C = 5 + 0.05 * jax.random.normal(jax.random.key(0), (16, 32))  # codes, far from the origin beside their distances


def _squares(x):
    return jnp.sum(x**2, -1)


DISTANCES = {
    "written out": lambda q: (jnp.sum(q * q, -1, keepdims=True) - 2 * q @ C.T + _squares(C)).argmin(-1),
    "einsum": lambda q: (
        jnp.einsum("nd,nd->n", q, q)[:, None] - 2 * jnp.einsum("nd,kd->nk", q, C) + jnp.einsum("kd,kd->k", C, C)
    ).argmin(-1),
    "calls": lambda q: (
        jax.jit(lambda q: _squares(q)[:, None] + _squares(C))(q) - 2 * jax.jit(lambda a, b: a @ b.T)(q, C)
    ).argmin(-1),
    "score": lambda q: (q @ C.T - 0.5 * _squares(C)).argmax(-1),
}


def test_the_nearest_code_by_a_product_is_that_of_fp32():
    wanted = jnp.arange(64) % 16
    q = C[wanted] + 0.01 * jax.random.normal(jax.random.key(1), (64, 32))
    for name, nearest in DISTANCES.items():
        np.testing.assert_array_equal(autocast(nearest)(q), wanted, err_msg=name)
        # forced by name, the product is narrow
        assert "bf16" in str(jax.make_jaxpr(autocast(nearest, CastPolicy(rules={"dot_general": "always"})))(q)), name


def test_other_products_beside_sums_of_squares_are_narrow():
    for fn in (
        lambda x, w: jnp.sum((x + x @ w) ** 2, -1),  # a residual
        lambda x, w: jnp.sum((x @ w) ** 2) + jnp.sum(w**2),  # a penalty
        lambda x, w: (lambda y: (_squares(y)[:, None] + y, y))(x @ w),  # read elsewhere too
        lambda x, w: jnp.exp(x @ w) / _squares(x)[:, None],
        lambda x, w: x @ w - jnp.sum(x * jnp.roll(x, 1, 0), -1, keepdims=True),  # no squares
    ):
        assert products(autocast(fn), X, W) == ["bfloat16"] * 2
