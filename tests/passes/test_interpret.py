"""The interpreter of jaxprs: every primitive with a body is known, and a walk into bodies changes nothing by itself."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from hlat_jax.passes.dataflow import Dataflow, upstream
from hlat_jax.passes.interpret import COMPOUND, called, compound, evaluate
from hlat_jax.passes.jaxpr import bind_again, equations, inner_jaxprs, place_of, variables

X = np.linspace(-1, 1, 8, dtype=np.float32)


@jax.custom_jvp
def _twice(x):
    return 2 * x


_twice.defjvp(lambda primals, tangents: (_twice(*primals), 2 * tangents[0]))


@jax.custom_vjp
def _thrice(x):
    return 3 * x


_thrice.defvjp(lambda x: (_thrice(x), None), lambda kept, grad: (3 * grad,))


def _sharded(x):
    mesh = jax.make_mesh((1,), ("rows",), axis_types=(jax.sharding.AxisType.Auto,))
    return jax.shard_map(lambda x: lax.psum(jnp.sin(x), "rows"), mesh=mesh, in_specs=P("rows"), out_specs=P())(x)


FUNCTIONS = {
    "jit": lambda x: jax.jit(jnp.sin)(x) + 1,
    "remat2": lambda x: jax.checkpoint(lambda x: jnp.sin(x) * x)(x),
    "scan": lambda x: lax.scan(lambda carry, row: (jnp.sin(carry) + row, carry * x), x[0], x, reverse=True),
    "while": lambda x: lax.while_loop(lambda c: (c[0] < 3) & (c[1].sum() < 9), lambda c: (c[0] + 1, c[1] + x), (0, x)),
    "cond": lambda x: lax.switch(jnp.int32(x[0] < 0), [jnp.sin, jnp.cos, jnp.tanh], x),
    "shard_map": _sharded,
    "custom_jvp_call": _twice,
    "custom_vjp_call": _thrice,
}


def walked(fn, x):
    """Returns the results of a function, all bodies bound again as functions."""

    def on_equation(eqn, operands):
        inside = compound(eqn)
        if inside is None:
            return bind_again(eqn, operands)
        with place_of(eqn):
            return inside.bind(operands, lambda body: lambda *inputs: walk(body.closed, inputs))

    def walk(closed, inputs):
        return evaluate(closed.jaxpr, [*closed.consts, *inputs], on_equation)

    return walk(jax.make_jaxpr(fn)(x), [x])


@pytest.mark.parametrize("name", FUNCTIONS)
def test_bodies_bound_again_compute_the_same(name):
    fn = FUNCTIONS[name]
    assert name in COMPOUND
    assert name in {eqn.primitive.name for eqn, _ in equations(jax.make_jaxpr(fn)(X).jaxpr)}
    again = jax.make_jaxpr(lambda x: walked(fn, x))(X)
    assert [eqn.primitive.name for eqn, _ in equations(again.jaxpr)] == [
        eqn.primitive.name for eqn, _ in equations(jax.make_jaxpr(fn)(X).jaxpr)
    ]
    for actual, expected in zip(jax.jit(lambda x: walked(fn, x))(X), jax.tree.leaves(jax.jit(fn)(X)), strict=True):
        np.testing.assert_array_equal(actual, expected)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_no_equation_with_a_jaxpr_is_unknown(name):
    for eqn, _ in equations(jax.make_jaxpr(FUNCTIONS[name])(X).jaxpr):
        assert (compound(eqn) is not None) == any(True for _ in inner_jaxprs(eqn)), eqn.primitive.name


def test_rows_of_a_while_under_vmap_end_in_their_own_trip():
    def halved(row):  # as often as the row says
        return lax.while_loop(lambda c: c[0] < row, lambda c: (c[0] + 1, c[1] / 2), (0.0, jnp.ones(2)))

    rows = jnp.arange(4.0)
    closed = jax.make_jaxpr(jax.vmap(halved))(rows)

    def run(body, number, inputs):
        return jax.core.eval_jaxpr(body.closed.jaxpr, body.closed.consts, *inputs)

    def on_equation(eqn, operands):
        inside = compound(eqn)
        return bind_again(eqn, operands) if inside is None else inside.bind_numbered(operands, run)

    found = evaluate(closed.jaxpr, [*closed.consts, rows], on_equation)
    np.testing.assert_array_equal(found[1], np.float32(0.5) ** rows[:, None] * np.ones(2))


@pytest.mark.parametrize("name", ["scan", "while", "cond"])
def test_bodies_know_their_trip_or_branch(name):
    def numbered(x):
        (eqn,) = (eqn for eqn in jax.make_jaxpr(FUNCTIONS[name])(x).jaxpr.eqns if eqn.primitive.name == name)
        inside = compound(eqn)

        def run(body, number, inputs):
            outs = jax.core.eval_jaxpr(body.closed.jaxpr, body.closed.consts, *inputs)
            return outs if body is inside.condition else [jnp.full_like(out, number) for out in outs]

        operands = [jnp.ones(var.aval.shape, var.aval.dtype) for var in eqn.invars]
        return inside.bind_numbered(operands, run)

    outs = jax.jit(numbered)(X)
    if name == "scan":  # in reverse: the last trip reads row 0
        np.testing.assert_array_equal(outs[0], 0)
        np.testing.assert_array_equal(outs[1][:, 0], np.arange(8))
    else:
        np.testing.assert_array_equal(outs[-1], {"while": 2, "cond": 1}[name])


def test_forward_joins_the_carry_of_all_trips_of_a_loop():
    """What enters a carry in one trip reaches the next carry in the next: three trips, three values."""

    def shifted(a, b, c):
        return lax.fori_loop(0, 5, lambda _, abc: (abc[1], abc[2], abc[2] * 1.0), (a, b, c))

    closed = jax.make_jaxpr(shifted)(X, X, X)

    def of_body(closed, facts):
        return evaluate(
            closed.jaxpr, [*[set() for _ in closed.consts], *facts], of_equation, on_literal=lambda _: set()
        )

    def of_equation(eqn, facts):
        inside = compound(eqn)
        if inside is None:
            return [set().union(*facts)] * len(eqn.outvars)
        return inside.forward(facts, of_body, join)

    def join(paths, selection):
        return [set().union(*each, *selection) for each in zip(*paths, strict=True)]

    assert of_body(closed, [{"a"}, {"b"}, {"c"}]) == [{"a", "b", "c"}, {"b", "c"}, {"c"}]


def test_values_of_two_calls_of_one_function_are_two():
    inner = jax.jit(jnp.sin)
    closed = jax.make_jaxpr(lambda x: inner(x) + inner(2 * x))(X)
    flow = Dataflow(closed.jaxpr, inlined=called)
    assert [op.name for op in flow.ops] == ["sin", "mul", "sin", "add"]
    assert len({value for op in flow.ops for value in op.outvars}) == 4
    first = flow.ops[0].outvars[0]
    assert upstream(flow.ops, variables(flow.outputs), without=[first]) == flow.ops[1:]
