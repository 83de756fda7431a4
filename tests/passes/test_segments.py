"""Segments of functions without a scan: where they are cut, what they save, and the order of their backward pass."""

import functools
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hlat_jax.passes import naming
from hlat_jax.passes.autocast_pass import autocast
from hlat_jax.passes.naming import RematChoice
from hlat_jax.passes.products import live_jaxpr, total_flops

L, D, F, ROWS = 4, 16, 64, 32
KINDS_OF_BLOCKS = [0] * (L - 1) + [1]  # the loss is with the last block
NOTHING = RematChoice()


in_segments = functools.partial(naming.checkpointed, region="segments")


def mlp_block(params, x):
    return x + jax.nn.gelu(x @ params["up"]) @ params["down"]


def blocks(params, x, block=mlp_block):
    for one in params:
        x = block(one, x)
    return x


def unrolled(params, x, block=mlp_block):
    return jnp.mean(blocks(params, x, block) ** 2)


def scanned(params, x, block=mlp_block):
    return jnp.mean(jax.lax.scan(lambda carry, one: (block(one, carry), None), x, params)[0] ** 2)


@functools.cache
def arguments(dim=D, hidden=F, rows=ROWS):
    rng = np.random.default_rng(0)
    shapes = {"up": (dim, hidden), "down": (hidden, dim)}
    params = [{name: rng.standard_normal(shape) / 8 for name, shape in shapes.items()} for _ in range(L)]
    return jax.tree.map(lambda a: jnp.asarray(a, jnp.float32), (params, rng.standard_normal((rows, dim))))


def found_in(fn, *args):
    """The segments of a function: (kind, start, stop), kinds numbered in order."""
    kinds = {}
    jaxpr = jax.make_jaxpr(fn)(*args).jaxpr
    return [(kinds.setdefault(one.kind, len(kinds)), one.start, one.stop) for one in naming.segments(jaxpr)]


def kinds_in(fn, *args):
    return [kind for kind, _, _ in found_in(fn, *args)]


def shapes_out(fn, *args):
    segments = naming.segments(jax.make_jaxpr(fn)(*args).jaxpr)
    return [[var.aval.shape for var in one.outvars] for one in segments]


def assert_same(wanted, got, rtol=2e-5):
    for a, b in zip(jax.tree.leaves(wanted), jax.tree.leaves(got), strict=True):
        np.testing.assert_allclose(a, b, rtol=rtol, atol=rtol * float(np.max(np.abs(a)) + 1e-12))


# Where a function is cut


def test_blocks_are_cut_where_one_array_crosses():
    found = found_in(unrolled, *arguments())
    assert [kind for kind, _, _ in found] == KINDS_OF_BLOCKS
    assert all(stop == start for (_, _, stop), (_, start, _) in itertools.pairwise(found))
    for one in naming.segments(jax.make_jaxpr(unrolled)(*arguments()).jaxpr):
        assert len(one.invars) == 3
    assert shapes_out(unrolled, *arguments()) == [[(ROWS, D)]] * (L - 1) + [[()]]


def test_blocks_are_found_inside_jit_and_as_calls_of_jit():
    def nested(params, x):
        return jax.jit(lambda params, x: 2 * jax.jit(unrolled)(params, x))(params, x)

    for fn in (nested, functools.partial(unrolled, block=jax.jit(mlp_block))):
        assert kinds_in(fn, *arguments()) == KINDS_OF_BLOCKS


def test_kinds_of_blocks_differ_by_width_and_not_by_literals_or_indices():
    narrow, x = arguments()
    wide = arguments(hidden=2 * F)[0]
    two_narrow, one_wide = [0] * (L // 2), [1] * L
    assert kinds_in(unrolled, [*narrow, *wide, *narrow], x) == [*two_narrow, *one_wide, *two_narrow[1:], 2]

    def indexed(stacked, x):
        for at in range(L):
            one = jax.tree.map(lambda leaf, at=at: leaf[at], stacked)
            x = mlp_block(one, x) * (1 + at)
        return jnp.mean(x)

    assert kinds_in(indexed, jax.tree.map(lambda *leaves: jnp.stack(leaves), *narrow), x) == KINDS_OF_BLOCKS


def test_blocks_whose_products_differ_are_cut_where_few_bytes_cross():
    def pyramid(params, x):
        for narrow, wide in params:
            x = jnp.tanh(jnp.tanh(x @ narrow) @ wide)
        return jnp.mean(x)

    widths = [4, 480, 5, 360, 6, 420, 7, 390, 3]
    params = [(jnp.ones(widths[at : at + 2]), jnp.ones(widths[at + 1 : at + 3])) for at in range(0, 8, 2)]
    x = jnp.ones((ROWS, widths[0]))
    assert shapes_out(pyramid, params, x) == [[(ROWS, 5)], [(ROWS, 6)], [(ROWS, 7)], [()]]
    plain, planned = (
        jax.jit(jax.grad(fn)).trace(params, x).lower().compile().memory_analysis().temp_size_in_bytes
        for fn in (pyramid, in_segments(pyramid, NOTHING))
    )
    assert planned < 0.7 * plain
    check_gradients(pyramid, params, x)


def test_large_operations_and_effects_lie_between_segments_and_calls_have_their_own():
    params, x = arguments()
    head = jnp.ones((D, 3000))
    seen = []

    def large_head(params, x):
        return jnp.mean(blocks(params, x) @ head)  # computes more than the blocks

    def printing(params, x):
        x = blocks(params[:2], x)
        jax.debug.callback(lambda value: seen.append(float(value)), x[0, 0])
        return jnp.mean(blocks(params[2:], x) ** 2)

    def two_calls(params, x):
        return jnp.mean(jax.jit(blocks)(params[2:], jax.jit(blocks)(params[:2], x)) ** 2)

    assert len(kinds_in(large_head, params, x)) == len(kinds_in(two_calls, params, x)) == L
    assert len(kinds_in(printing, params, x)) >= L
    assert naming.regions(jax.make_jaxpr(printing)(params, x).jaxpr) == ["segments"]
    assert naming.regions(jax.make_jaxpr(two_calls)(params, x).jaxpr) == ["segments", "whole"]
    for fn in (large_head, printing, two_calls):
        check_gradients(fn, params, x)
    jax.effects_barrier()
    assert len(seen) == 2  # once by each of the two, and not again in a backward pass


def test_names_say_which_regions_they_come_from():
    for name in ("segment0.tanh.0", "tanh.0"):
        planned = naming.checkpointed(unrolled, RematChoice((name,)), region="auto")
        assert name in str(jax.make_jaxpr(planned)(*arguments()))


def test_what_no_gradient_passes_is_not_transposed():
    def stopped(params, x):
        steps = jax.lax.while_loop(lambda c: jnp.max(c) > 1, lambda c: c / 2, x @ params[0]["up"])[0, 0]
        return jnp.mean(blocks(params, x) ** 2) + jax.lax.stop_gradient(steps)

    check_gradients(stopped, *arguments())


def test_own_checkpoints_are_segments_and_are_not_nested():
    own = functools.partial(unrolled, block=jax.checkpoint(mlp_block))
    params, x = arguments()
    assert kinds_in(own, params, x) == KINDS_OF_BLOCKS

    def flops(fn):
        return total_flops(live_jaxpr(jax.jit(jax.value_and_grad(fn)).trace(params, x)))

    last = 2 * ROWS * D * F  # the product whose result the loss reads
    assert flops(in_segments(own, NOTHING)) == flops(own) + last > flops(unrolled)
    # a policy of its own stays
    dots = jax.checkpoint(mlp_block, policy=jax.checkpoint_policies.dots_saveable)
    kept = in_segments(functools.partial(unrolled, block=dots), NOTHING)
    bare = in_segments(own, NOTHING)
    nested, single = (str(jax.make_jaxpr(jax.grad(fn))(params, x)).count("prevent_cse=") for fn in (kept, bare))
    assert nested > single


KINDS = {"moe": [0, 1, 2, 1, 3], "gnn": [0, *[1, 2] * 3, 3], "nanodo": [*range(6)], "unet": [*range(10)]}


@pytest.mark.quick_cases("quick")
@pytest.mark.parametrize("names", [("moe", "gnn"), [*KINDS][2:]], ids=["quick", "others"])
def test_blocks_of_models_in_public_styles_are_found(names):
    pytest.importorskip("equinox")
    from foreign.models import MODELS  # not at the top: Equinox is not installed everywhere

    for name in names:
        loss, params, batch = MODELS[name](small=True)
        assert kinds_in(loss, params, batch) == KINDS[name], name


# What they compute


def check_gradients(fn, *args, choice=NOTHING, rtol=2e-5, argnums=0):
    planned = in_segments(fn, choice)
    wanted, got = (jax.jit(jax.value_and_grad(one, argnums))(*args) for one in (fn, planned))
    assert_same(wanted, got, rtol=rtol)


def test_every_choice_of_names_leaves_the_gradients():
    names = ("segment0.dot_general.0", "segment0.tanh.0", "segment0.mul.1")
    for saved in ((), names[:1], names):
        check_gradients(unrolled, *arguments(), choice=RematChoice(saved), argnums=(0, 1))


def with_other_arguments(params, tokens, key, scale):
    """Integers, a random key and a mask among the operands of the blocks; integers among their results."""
    x = jnp.take(params["embed"], tokens, axis=0)
    for one in params["blocks"]:
        key, own = jax.random.split(key)
        keep = jax.random.bernoulli(own, 0.9, x.shape)
        x = mlp_block(one, x) * keep * scale
        tokens = tokens + 1
        x = x + jnp.where(tokens[:, None] % 2 == 0, 0.1, 0.0)
    return jnp.mean(x**2)


@pytest.mark.slow
def test_blocks_with_integers_keys_and_frozen_weights_have_the_same_gradients():
    blocks, x = arguments()
    params = {"embed": x, "blocks": blocks}
    for key in (jax.random.PRNGKey(0), jax.random.key(0)):
        check_gradients(with_other_arguments, params, jnp.arange(ROWS), key, 0.5)

    def only_first(first, rest, x):
        return unrolled([first, *rest], x)

    def frozen(planned):
        return live_jaxpr(jax.jit(jax.grad(planned)).trace(blocks[0], blocks[1:], x))

    check_gradients(only_first, blocks[0], blocks[1:], x)
    more = total_flops(frozen(in_segments(only_first, NOTHING))) - total_flops(frozen(only_first))
    # one product of each block but that of the loss, whose forward pass is dead; no gradients of frozen weights
    assert more == (L - 1) * 2 * ROWS * D * F


@pytest.mark.slow
def test_forward_mode_higher_derivatives_and_vmap_pass_through_segments():
    params, x = arguments(dim=4, hidden=6, rows=3)
    both = jnp.stack([x, 2 * x])
    averaged = functools.partial(unrolled, block=lambda one, x: mlp_block(one, jax.lax.pmean(x, "rows")))

    def summed(fn, params, both):
        return jnp.sum(jax.vmap(fn, in_axes=(None, 0), axis_name="rows")(params, both))

    for plain, transform in (
        (unrolled, lambda fn: jax.jvp(fn, (params, x), (params, x))),
        (unrolled, lambda fn: jax.hessian(fn, argnums=1)(params, x)),
        (unrolled, lambda fn: jax.grad(lambda x: jnp.sum(jax.grad(fn, argnums=1)(params, x) ** 2))(x)),
        (unrolled, lambda fn: jax.vmap(jax.grad(fn), in_axes=(None, 0))(params, both)),
        (averaged, lambda fn: jax.grad(functools.partial(summed, fn), argnums=(0, 1))(params, both)),
    ):
        planned = in_segments(plain, NOTHING)
        wanted, got = (jax.jit(functools.partial(transform, fn))() for fn in (plain, planned))
        assert_same(wanted, got, rtol=1e-4)


@pytest.mark.slow
def test_segments_run_inside_shard_map_and_under_autocast():
    mesh = jax.make_mesh((min(2, jax.device_count()),), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    params, x = arguments()

    def mapped(fn):
        def local(params, x):
            return jax.lax.pmean(fn(params, x), "data")

        specs = (jax.P(), jax.P("data"))
        return jax.jit(jax.grad(jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=jax.P())))

    planned = in_segments(unrolled, NOTHING)
    assert_same(mapped(unrolled)(params, x), mapped(planned)(params, x), rtol=1e-4)
    check_gradients(autocast(unrolled, "bf16"), params, x, rtol=2e-2)


def test_the_order_is_a_loop_on_cpu_and_a_barrier_elsewhere():
    planned = jax.jit(jax.grad(in_segments(unrolled, NOTHING), argnums=(0, 1)))
    for platform, loops, barriers in (("cpu", 2 * L, L), ("cuda", 0, 3 * L)):
        text = planned.trace(*arguments()).lower(lowering_platforms=(platform,)).as_text()
        counts = tuple(text.count(f"stablehlo.{op}") for op in ("while", "optimization_barrier"))
        assert counts == (loops, barriers)


def test_recomputed_products_are_computed_twice_on_cpu():
    def products(fn):
        compiled = jax.jit(jax.grad(fn)).trace(*arguments()).lower().compile()
        return len(re.findall(r" dot\(", compiled.as_text()))

    per_block = functools.partial(unrolled, block=jax.checkpoint(mlp_block))
    # XLA merges them, but for that of JAX 0.11; once none of our versions does, the loop can go
    assert products(per_block) in (products(unrolled), products(unrolled) + L)
    assert products(in_segments(unrolled, NOTHING)) == products(unrolled) + L - 1  # the loss itself is not asked for
