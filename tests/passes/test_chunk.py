"""Large intermediates in chunks: any loss, any attention, none wrongly, and the memory of a chunk."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hlat_jax.passes.chunk import chunk
from hlat_jax.passes.independence import Link, links
from hlat_jax.passes.products import live_jaxpr, total_flops

B, T, D, V, N, H = 2, 256, 16, 640, 2, 8
LIMIT = 64 * 1024
rng = np.random.default_rng(0)


def normal(*shape, scale=0.3):
    return (scale * rng.standard_normal(shape)).astype(np.float32)


PARAMS = {"head": normal(D, V), "teacher": normal(D, V), "temperature": normal(N) + 1, "u": normal(D)}
PARAMS |= {key: normal(D, N * H) for key in "qkv"}
BATCH = {
    "x": normal(B, T, D, scale=1),
    "y": rng.integers(0, V, (B, T)).astype(np.int32),
    "weights": (rng.random((B, T)) < 0.8).astype(np.float32),
}


def logits_of(params, batch, key="head"):
    return batch["x"] @ params[key]


def log_probs(params, batch):
    return jax.nn.log_softmax(logits_of(params, batch))


def of_label(values, labels):
    return jnp.take_along_axis(values, labels[..., None], axis=-1)[..., 0]


def with_accuracy(params, batch):
    logits, weights = logits_of(params, batch), batch["weights"]
    losses = jax.nn.logsumexp(logits, axis=-1) - of_label(logits, batch["y"])
    correct = jnp.sum((jnp.argmax(logits, -1) == batch["y"]) * weights)
    return jnp.sum(losses * weights) / jnp.sum(weights) + 0 * jax.lax.stop_gradient(correct)


def distillation(params, batch):
    teacher = jax.lax.stop_gradient(jax.nn.log_softmax(logits_of(params, batch, "teacher") / 2))
    return jnp.mean(jnp.sum(jnp.exp(teacher) * (teacher - jax.nn.log_softmax(logits_of(params, batch) / 2)), -1))


def focal(params, batch):
    chosen = of_label(log_probs(params, batch), batch["y"])
    return -jnp.mean((1 - jnp.exp(chosen)) ** 2 * chosen)


def in_two_steps(params, batch):
    """Flattens the tokens, and divides by a count that is known only at the end."""
    logits = batch["x"].reshape(-1, D) @ params["head"]
    chosen = of_label(jax.nn.log_softmax(logits), batch["y"].reshape(-1))
    return -jnp.sum(chosen * batch["weights"].reshape(-1)) / jnp.sum(batch["weights"])


def of_both_sides(params, batch):
    """CLIP's: a softmax over the rows and one over the columns."""
    rows = batch["x"].reshape(-1, D)
    scores, same = (rows @ params["q"]) @ (rows @ params["k"]).T, jnp.eye(B * T)
    return -sum(jnp.mean(jnp.sum(jax.nn.log_softmax(scores, axis) * same, axis)) for axis in (0, 1))


def with_itself(params, batch):
    """Contrastive: each row with all others, of one value that is cut and taken whole."""
    rows = batch["x"].reshape(-1, D) @ params["q"]
    rows = rows / jnp.linalg.norm(rows, axis=-1, keepdims=True)
    return jnp.mean(jax.nn.logsumexp(rows @ rows.T / 0.1, axis=-1) * jnp.arange(B * T))


def attention(change=lambda scores, params: scores, softmax=jax.nn.softmax):
    def loss(params, batch):
        q, k, v = ((batch["x"] @ params[key]).reshape(B, T, N, H) for key in "qkv")
        scores = change(jnp.einsum("btnh,bsnh->bnts", q, k) / H**0.5, params)
        scores = jnp.where(jnp.tril(jnp.ones((T, T), bool)), scores, -1e30)
        return jnp.mean(jnp.einsum("bnts,bsnh->btnh", softmax(scores, params), v) ** 2)

    return loss


def softmax_plus_one(scores, _):
    highest = jax.lax.stop_gradient(jnp.maximum(jnp.max(scores, axis=-1, keepdims=True), 0))
    weights = jnp.exp(scores - highest)
    return weights / (jnp.sum(weights, axis=-1, keepdims=True) + jnp.exp(-highest))


def with_sinks(scores, params):
    sinks = jnp.broadcast_to(params["temperature"][:, None, None], (B, N, T, 1))
    return jax.nn.softmax(jnp.concatenate([scores, sinks], axis=-1), axis=-1)[..., :-1]


def plain(scores, _):
    return jax.nn.softmax(scores, axis=-1)


def by_temperature(scores, params):
    return scores * params["temperature"][:, None, None]


def by_distance(scores, params):
    return scores - params["temperature"][:, None, None] * jnp.abs(jnp.arange(T)[:, None] - jnp.arange(T))


def additive(params, batch):
    q, k = (batch["x"] @ params[key] for key in "qk")
    scores = jnp.tanh(q[:, :, None] + k[:, None]) @ params["u"]
    return jnp.mean((jax.nn.softmax(scores, axis=-1) @ batch["x"]) ** 2)


def gated_mlp(params, batch):
    x = jnp.concatenate([batch["x"]] * 2, axis=-1)[..., :D]
    return jnp.mean((jax.nn.silu(x @ params["head"]) * (x @ params["teacher"]) @ params["head"].T) ** 2)


LOSSES = [with_accuracy, distillation, focal, in_two_steps, of_both_sides, with_itself, additive, gated_mlp]
LOSSES += [attention(softmax=with_sinks), attention(softmax=softmax_plus_one)]
LOSSES += [attention(by_temperature, plain), attention(by_distance, plain)]


def difference(loss, ours, *args):
    """Returns the largest relative difference in value and gradients, both compiled."""
    expected, found = (jax.tree.leaves(jax.jit(jax.value_and_grad(one))(*args)) for one in (loss, ours))
    return max(
        float(np.linalg.norm(a - b) / max(np.linalg.norm(a), 1e-9))
        for a, b in zip(expected, found, strict=True)
        if np.linalg.norm(a) or np.linalg.norm(b)
    )


def temporaries(loss, *args):
    return jax.jit(jax.grad(loss)).lower(*args).compile().memory_analysis().temp_size_in_bytes


@pytest.mark.quick_cases("with_accuracy", "attention.<locals>.loss0")
@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: loss.__qualname__)
def test_any_loss_is_computed_in_chunks_with_its_gradients_and_a_third_of_its_memory(loss):
    ours = chunk(loss, max_bytes=LIMIT)
    assert difference(loss, ours, PARAMS, BATCH) < 1e-5  # the sums are in another order
    assert ours.report().replacements, ours.report()
    assert 3 * temporaries(ours, PARAMS, BATCH) < temporaries(loss, PARAMS, BATCH)


def test_one_loop_has_the_gradients_of_several():
    def flops(loss):
        return total_flops(live_jaxpr(jax.jit(jax.value_and_grad(loss)).trace(PARAMS, BATCH)))

    ours = chunk(of_both_sides, max_bytes=LIMIT)
    assert flops(ours) <= 2 * flops(of_both_sides)  # scores in three loops and again, and two gradients; of 3 products
    assert "in 3 loops" in str(ours.report())


def test_reductions_that_depend_on_one_another_have_their_gradients():
    """Each row's weight depends on a sum over rows that depends on another one, and on a largest and a count."""

    def loss(params, batch):
        x = jnp.sort(jnp.tanh(batch["x"][:1] @ params["head"]), axis=-1)  # only the tokens are not mixed
        x = x * (1 + jnp.mean(x, axis=1, keepdims=True))
        x = x * jax.lax.rsqrt(0.1 + jnp.mean(x**2, axis=(1, 2), keepdims=True))
        x = x / jax.lax.stop_gradient(1 + jnp.max(jnp.abs(x), axis=1, keepdims=True))
        x = x * jnp.tanh(jnp.sum(jnp.exp(x) * batch["weights"][:1, :, None], axis=1, keepdims=True) / T)
        return jnp.mean(x**3) * jnp.mean(jnp.abs(x)), jnp.sum(x > 0)

    ours = chunk(loss, max_bytes=LIMIT)
    results = [jax.jit(jax.value_and_grad(one, has_aux=True))(PARAMS, BATCH) for one in (loss, ours)]
    for expected, found in zip(*map(jax.tree.leaves, results), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5 * np.abs(expected).max())
    assert "in 5 loops" in str(ours.report())


READ = {
    "not": lambda root: 1.0,
    "by its sign": jnp.sign,
    "sorted beside": lambda root: jax.lax.sort((jnp.ones(2), jnp.stack([root, root])), num_keys=1)[0][0],
}


@pytest.mark.parametrize("read", READ.values(), ids=READ)
def test_an_infinite_derivative_that_no_gradient_passes_leaves_them_finite(read):
    def loss(params, batch):
        rows = batch["x"].reshape(-1, D)
        scores = (rows @ params["q"]) @ (rows @ params["k"]).T
        roots = jnp.sum(jnp.sqrt(jax.nn.softmax(100 * scores, axis=0)))  # of exponentials that are 0
        scores = scores * read(roots)
        losses = [jnp.sum(jax.nn.log_softmax(scores, axis) * jnp.eye(B * T), axis) for axis in (0, 1)]
        return -sum(map(jnp.mean, losses)), roots

    ours = chunk(loss, max_bytes=LIMIT)
    (expected, _), (found, _) = (jax.jit(jax.grad(one, has_aux=True))(PARAMS, BATCH) for one in (loss, ours))
    for key in "qk":
        np.testing.assert_allclose(found[key], expected[key], atol=1e-5 * np.abs(expected[key]).max())
    assert "loops" in str(ours.report())


def test_one_value_taken_twice_is_no_chunk():
    def gram(params, batch):
        rows = batch["x"].reshape(-1, D) @ params["q"] / 9
        return jnp.mean(jax.nn.logsumexp(jnp.einsum("id,jd->ij", rows, rows), axis=-1) * jnp.arange(B * T))

    def transposed(params, batch):
        weight = params["head"].T
        return jnp.sum(jax.nn.logsumexp(batch["x"] @ weight.T, axis=-1)) + jnp.sum(weight**2)

    for loss in (gram, transposed):
        assert difference(loss, chunk(loss, max_bytes=LIMIT), PARAMS, BATCH) < 1e-5


def shifted_back(x):
    return jnp.concatenate([x[:, :1], x[:, :-1]], axis=1)


STEPS = {
    "softmax": lambda x: jax.nn.softmax(x, axis=-1),
    "softmax of rows": lambda x: jax.nn.softmax(x, axis=1),
    "centred": lambda x: x - jnp.mean(x, axis=1, keepdims=True),
    "of the largest": lambda x: x / (1 + jnp.max(jnp.abs(x), axis=(0, 1), keepdims=True)),
    "summed up": lambda x: jnp.cumsum(x, axis=1) / T,
    "sorted": lambda x: jnp.sort(x, axis=-1),
    "shifted": shifted_back,
    "reversed": lambda x: x[:, ::-1],
    "every other": lambda x: x.at[:, ::2].multiply(0.5),
    "taken": lambda x: x[:, (3 * jnp.arange(x.shape[1])) % x.shape[1]],
    "by position": lambda x: x * jnp.sin(jnp.arange(x.shape[1]))[:, None],
    "below the diagonal": lambda x: jnp.where(jnp.arange(x.shape[1])[:, None] >= jnp.arange(x.shape[2]) - 1, x, 0.1),
    "transposed": lambda x: jnp.tanh(x).transpose(0, 2, 1),
    "regrouped": lambda x: x.reshape(-1, x.shape[2] * 2).reshape(x.shape) ** 2,
    "rows in one": lambda x: jnp.exp(x.reshape(-1, x.shape[-1]) / 9).reshape(x.shape),
    "squared": lambda x: jnp.einsum("btv,bsv->bts", x, x) / x.shape[-1],
}


@pytest.mark.quick_cases("2")
@pytest.mark.parametrize("seed", range(10))
def test_a_random_program_keeps_its_values_and_gradients(seed):
    """Also where dimensions are mixed, and what would be chunked is not, or in several loops."""
    chosen = np.random.default_rng(seed).choice(list(STEPS), 5)

    def loss(params, batch):
        x = logits_of(params, batch) / 3
        for name in chosen:
            x = STEPS[name](x)
        return jnp.mean(x**2) + jnp.mean(x[:, 1] * x[:, 0])

    ours = chunk(loss, max_bytes=LIMIT)
    assert difference(loss, ours, PARAMS, BATCH) < 3e-5, (*chosen, str(ours.report()))


def test_a_convolution_computes_each_row_alike_unless_rows_are_grouped():
    x, kernel = jnp.ones((4, 2, 8)), jnp.ones((6, 2, 3))
    for groups, linked in ((1, [Link((0, None), (0,))]), (2, [])):
        conv = functools.partial(jax.lax.conv_general_dilated, window_strides=(1,), padding="SAME")
        [eqn] = jax.make_jaxpr(functools.partial(conv, batch_group_count=groups))(x, kernel).eqns
        assert links(eqn) == linked


def test_a_slice_at_a_traced_index_computes_alike_where_it_takes_all():
    [*_, eqn] = jax.make_jaxpr(lambda x, at: jax.lax.dynamic_slice_in_dim(x, at, 2, axis=1))(jnp.ones((4, 3)), 1).eqns
    assert (eqn.primitive.name, links(eqn)) == ("dynamic_slice", [Link((0, None, None), (0,))])


def test_what_cannot_be_computed_in_chunks_is_left_with_a_reason():
    def returned(params, batch):
        logits = logits_of(params, batch)
        return jnp.mean(logits**2), logits

    def printed(params, batch):
        logits = logits_of(params, batch)
        jax.debug.callback(lambda _: None, logits)
        return jnp.mean(logits**2)

    for loss, words in [(returned, "result of the function"), (printed, "debug_callback")]:
        ours = chunk(loss, max_bytes=LIMIT)
        jax.eval_shape(ours, PARAMS, BATCH)
        report = ours.report()
        assert not report.replacements
        assert words in report.refusals[0].reason
        assert "test_chunk.py" in report.refusals[0].source


def test_sums_over_chunks_and_gradients_of_weights_are_in_fp32():
    half = {key: value.astype(jnp.bfloat16) for key, value in PARAMS.items()}
    batch = {**BATCH, "x": jnp.asarray(BATCH["x"], jnp.bfloat16)}
    ours = chunk(focal, max_bytes=LIMIT)
    exact = jax.grad(focal)(PARAMS, BATCH)["head"]
    errors = [np.linalg.norm(jax.jit(jax.grad(one))(half, batch)["head"] - exact) for one in (focal, ours)]
    assert errors[1] < 1.1 * errors[0]
    assert ours.report().replacements


@pytest.mark.slow
def test_layers_in_a_loop_and_under_checkpoints_are_computed_in_chunks():
    attend = attention(softmax=plain)

    def looped(params, batch):
        def layer(x, _):
            return x + attend(params, batch | {"x": x}) * x, None

        return jnp.mean(jax.lax.scan(layer, batch["x"], None, length=2)[0] ** 2)

    for loss in (looped, lambda params, batch: jax.checkpoint(attend)(params, batch)):
        ours = chunk(loss, max_bytes=LIMIT)
        assert difference(loss, ours, PARAMS, BATCH) < 1e-5
        assert ours.report().replacements
        assert 2 * temporaries(ours, PARAMS, BATCH) < temporaries(loss, PARAMS, BATCH)
