"""Rows of products are taken before these are computed."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hlat_jax.passes.rewrite.graph import EquationGraph

B, T, D, V = 2, 6, 3, 8
rng = np.random.default_rng(0)
X, W, BIAS = (rng.standard_normal(shape, np.float32) for shape in ((B, T, D), (D, V), (V,)))


def product(x, w, bias):
    return 9 * jnp.tanh((x @ w + bias) / 9)


TAKEN = {
    "all but the last, flat": (lambda *args: product(*args)[:, :-1].reshape(-1, V), (B * (T - 1), V)),
    "every third": (lambda *args: jax.lax.slice(product(*args), (1, 1, 0), (2, 6, V), (1, 3, 1)), (1, 2, V)),
    "cast": (lambda x, w, _: (x @ w).astype(jnp.bfloat16).reshape(-1, V).astype(jnp.float32), (B * T, V)),
    "of the second operand": (lambda x, w, _: jnp.einsum("vd,btd->vbt", w.T, x).reshape(V, -1), (V, B * T)),
    "contracted first": (lambda x, w, _: jnp.einsum("dbt,dv->btv", x.transpose(2, 0, 1), w).reshape(-1, V), (B * T, V)),
    "beside others": (lambda x, w, _: jnp.where(jnp.ones((B, T, V)) > jnp.sum(w), 0, x @ w)[1:, 2:], (1, 4, V)),
    "some of the columns too": (lambda x, w, _: (x @ w)[:, :, 1:-1], (B, T, V - 2)),
    "in a call": (lambda *args: jax.jit(product)(*args)[:, 1:], (B, T - 1, V)),
}
KEPT = {
    "read by others": lambda x, w, _: ((y := x @ w)[:, :-1], jnp.sum(y)),
    "returned": lambda x, w, _: ((y := x @ w)[:, :-1], y),
    "merged with the columns": lambda x, w, _: (x @ w).reshape(B, -1),
    "split": lambda x, w, _: (x @ w).reshape(B, 2, -1, V),
    "a product per row": lambda x, w, _: jnp.einsum("btd,bdv->btv", x, jnp.stack([w, w]))[1:],
    "of one array": lambda x, w, _: jnp.einsum("btd,sud->btsu", x, x).reshape(B, -1, T),
    "by each row": lambda x, w, _: (x @ w + jnp.sum(x, (1, 2), keepdims=True)).reshape(-1, V),
}


def graph_of(fn):
    return EquationGraph(jax.make_jaxpr(fn)(X, W, BIAS))


def products(graph):
    read = [eqn for eqn in graph.eqns if any(graph.readers(var) or graph.is_output(var) for var in eqn.outvars)]
    return [eqn.outvars[0].aval.shape for eqn in read if eqn.primitive.name == "dot_general"]


@pytest.mark.parametrize(("fn", "shape"), TAKEN.values(), ids=TAKEN)
def test_the_product_is_of_the_rows_that_are_taken(fn, shape):
    graph = graph_of(fn)
    assert products(graph) == [shape]
    (found,) = graph.run(graph.steps([]), [X, W, BIAS])
    np.testing.assert_allclose(found, fn(X, W, BIAS), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("fn", KEPT.values(), ids=KEPT)
def test_other_products_are_computed_whole(fn):
    graph = graph_of(fn)
    whole = [eqn.outvars[0].aval.shape for eqn in jax.make_jaxpr(fn)(X, W, BIAS).eqns if "dot" in eqn.primitive.name]
    assert products(graph) == whole
    for found, expected in zip(graph.run(graph.steps([]), [X, W, BIAS]), jax.tree.leaves(fn(X, W, BIAS)), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-6)


def test_products_that_are_one_number_and_long_chains_are_left():
    def by_number(x, w, bias):
        return jax.lax.select(bias @ bias > 9, x @ w, jnp.zeros((B, T, V)))[:, :-1]

    def in_many_steps(x, w, bias):
        y = x @ w
        for _ in range(1200):  # more than Python's calls may be deep
            y = -y
        return y[:, :-1]

    for fn, shapes in ((by_number, [(B, T - 1, V)]), (in_many_steps, [(B, T, V)])):
        graph = graph_of(fn)
        assert [shape for shape in products(graph) if shape] == shapes
        (found,) = graph.run(graph.steps([]), [X, W, BIAS])
        np.testing.assert_allclose(found, fn(X, W, BIAS), rtol=1e-6, atol=1e-6)
