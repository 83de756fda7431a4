"""Attention in functions that nobody wrote for us is found, replaced by the op, and left alone where it is another."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hlat_jax.ops import attention, chunked_attention
from hlat_jax.passes.rewrite import check, rewrite

B, T, N, H = 2, 8, 4, 6
TRIL = np.tril(np.ones((T, T), bool))
rng = np.random.default_rng(0)


def normal(*shape):
    return rng.normal(size=shape).astype(np.float32)


Q, K, V = (normal(B, T, N, H) for _ in range(3))
SEGMENTS = np.sort(rng.integers(0, 3, (B, T)), axis=1).astype(np.int32)
IS_TOKEN = np.arange(T) < np.array([[5], [T]])
KEYS = IS_TOKEN[:, None, None]
KEY = jax.random.PRNGKey(0)
scores_of = functools.partial(jnp.einsum, "btnh,bsnh->bnts")
values_of = functools.partial(jnp.einsum, "bnts,bsnh->btnh")
softmax = jax.nn.softmax


def causal(scores):
    return jnp.where(TRIL, scores, -1e30)


def attend(change, v=V):
    """Returns a function of queries and keys whose scores go through `change`."""
    return lambda q, k, *more: values_of(softmax(change(scores_of(q, k) / H**0.5, *more)), v)


def flax_attention(q, k, v):
    import flax.linen as nn

    return nn.dot_product_attention(q, k, v, mask=nn.make_causal_mask(jnp.ones((B, T))))


def heads_first(q, k, v):
    q, k, v = (x.transpose(0, 2, 1, 3) for x in (q, k, v))
    scores = causal(q @ k.swapaxes(-1, -2) / H**0.5)
    return (softmax(scores) @ v).transpose(0, 2, 1, 3).reshape(B, T, N * H)


def merged_heads(q, k, v):
    q, k, v = (x.transpose(0, 2, 1, 3).reshape(B * N, T, H) for x in (q, k, v))
    scores = jnp.where(TRIL, jnp.matmul(q * 0.5, k.transpose(0, 2, 1)), -1e9)
    return jnp.matmul(softmax(scores), v).reshape(B, N, T, H)


def keys_before_queries(q, k, v):
    scores = jnp.where(TRIL.T[None, :, :, None], jnp.einsum("bsnh,btnh->bstn", k, q) * 0.5, -1e9)
    return jnp.einsum("bstn,bsnh->bthn", softmax(scores, axis=1), v)


def repeated_heads(q, k, v):
    k, v = (jnp.repeat(x, 2, axis=2) for x in (k, v))
    return values_of(softmax(causal(scores_of(q, k) * 0.5)), v)


def grouped_heads(q, k, v):
    scores = jnp.einsum("btkgh,bskh->bkgts", q.reshape(B, T, 2, 2, H), k)
    return jnp.einsum("bkgts,bskh->btkgh", softmax(causal(scores)), v).reshape(q.shape)


def one_key_head(q, k, v):
    return jnp.einsum("bnts,bsh->btnh", softmax(causal(jnp.einsum("btnh,bsh->bnts", q, k))), v)


def in_half_precision(q, k, v):
    q, k, v = (x.astype(jnp.bfloat16) for x in (q, k, v))
    return values_of(softmax(causal(scores_of(q, k).astype(jnp.float32))).astype(jnp.bfloat16), v)


def dropped(q, k, v, key):
    probs = softmax(causal(scores_of(q, k)))
    return values_of(jax.random.bernoulli(key, 0.9, probs.shape) * probs / 0.9, v)


def where_dropped(q, k, v, key):
    probs = softmax(causal(scores_of(q, k)))
    return values_of(jnp.where(jax.random.bernoulli(key, 0.9, probs.shape), probs / 0.9, 0), v)


def same_segment(ids):
    return (ids[:, :, None] == ids[:, None, :])[:, None]


jax_attention = jax.nn.dot_product_attention
QKV = (Q, K, V)
TWO_HEADS = (Q, K[:, :, :2], V[:, :, :2])
# name -> (function, arguments, what the report says)
RECOGNIZED = {
    "jax.nn, causal": (functools.partial(jax_attention, is_causal=True), QKV, "causal, scale 0.4082, B 2 T 8 S 8 N 4"),
    "jax.nn, window": (functools.partial(jax_attention, is_causal=True, local_window_size=(3, 0)), QKV, "window 4"),
    "jax.nn, grouped": (functools.partial(jax_attention, is_causal=True), TWO_HEADS, "N 4 K 2"),
    "jax.nn, other keys": (jax_attention, (Q, normal(B, 5, N, H), normal(B, 5, N, H)), "bidirectional, .*T 8 S 5"),
    "jax.nn, key mask": (lambda *x: jax_attention(*x[:3], mask=x[3][:, None, None]), (*QKV, IS_TOKEN), "1 masks"),
    "flax.linen": (flax_attention, QKV, "causal"),
    "heads first": (heads_first, QKV, "causal, scale 0.4082"),
    "merged heads": (merged_heads, QKV, "causal, scale 1, B 8 T 8"),
    "keys before queries": (keys_before_queries, QKV, "causal, scale 0.5, B 2 T 8 S 8 N 4"),
    "repeated heads": (repeated_heads, TWO_HEADS, "causal, scale 0.5, .*N 4 K 4"),
    "grouped heads": (grouped_heads, TWO_HEADS, "causal, scale 1, .*N 4 K 2"),
    "one key head": (one_key_head, (Q, K[:, :, 0], V[:, :, 0]), "N 4 K 1"),
    "bf16": (in_half_precision, QKV, "causal"),
    "dropout": (dropped, (*QKV, KEY), "causal, .*dropout"),
    "dropout by where": (where_dropped, (*QKV, KEY), "causal, .*dropout"),
    "softcap": (attend(lambda s: causal(20 * jnp.tanh(s / 20))), (Q, K), "causal, scale 0.4082, softcap 20"),
    "segments": (attend(lambda s, i: jnp.where(same_segment(i) & TRIL, s, -1e30)), (Q, K, SEGMENTS), "causal, .*segm"),
    "causal and key mask": (
        attend(lambda s, m: jnp.where(TRIL & m[:, None, None], s, -1e9)),
        (Q, K, ~IS_TOKEN),  # the first queries attend to no key
        "causal, .*1 masks",
    ),
}


def is_behind(shape, by=0):
    return jax.lax.broadcasted_iota(int, shape, 2) - by >= jax.lax.broadcasted_iota(int, shape, 3)


# Spellings of one mask: name -> function of the scores.
CAUSAL = {
    "where, finfo.min": lambda s: jnp.where(jnp.tril(jnp.ones((1, 1, T, T), bool)), s, jnp.finfo(s.dtype).min),
    "where, -inf, the future": lambda s: jnp.where(jnp.triu(jnp.ones((T, T)), 1) == 1, -jnp.inf, s),
    "positions": lambda s: jnp.where(jnp.arange(T)[:, None] >= jnp.arange(T), s, -1e9),
    "iota": lambda s: jax.lax.select(is_behind(s.shape), s, jnp.full_like(s, -1e30)),
    "added": lambda s: s + jnp.where(TRIL, 0.0, -1e9),
    "added product": lambda s: s + (1.0 - jnp.tril(jnp.ones((T, T)))) * -1e10,
    "product and difference": lambda s: s * TRIL - 1e10 * (1 - TRIL.astype(np.float32)),
    "minimum": lambda s: jnp.minimum(s, jnp.where(TRIL, jnp.inf, -1e9)),
}
PADDED = {
    "where": lambda s, m: jnp.where(m[:, None, None], s, -1e9),
    "hidden, not shown": lambda s, m: jnp.where(~m[:, None, None], -1e9, s),
    "a product of floats": lambda s, m: jnp.where(m.astype(jnp.float32)[:, None, None] * np.ones((T, T)) > 0, s, -1e9),
    "a prefix, or what is causal": lambda s, m: jnp.where(m[:, None, None] | TRIL, s, -1e9),
    "pairs": lambda s, m: jnp.where((m[:, :, None] * m[:, None, :])[:, None], s, -1e9),
}
BOTH = {
    "and": lambda s, m: jnp.where(m[:, None, None] & TRIL, s, -1e9),
    "or of what is hidden": lambda s, m: jnp.where(~m[:, None, None] | ~TRIL, -1e9, s),
    "product": lambda s, m: jnp.where(m[:, None, None] * TRIL, s, -1e9),
    "one after the other": lambda s, m: jnp.where(m[:, None, None], causal(s), -1e30),
}


def report_of(fn, *args, **options):
    ours = rewrite(fn, **options)
    jax.eval_shape(ours, *args)
    return ours.report()


def test_attention_is_recognized_in_every_form():
    for name, (fn, args, facts) in RECOGNIZED.items():
        report = report_of(fn, *args, check=False)
        assert [one.op for one in report.replacements] == ["attention"], (name, report)
        assert re.search(facts, report.replacements[0].facts), (name, report)
        assert not report.refusals, (name, report)


@pytest.mark.quick_cases("causal", "both")
@pytest.mark.parametrize(
    ("forms", "facts", "more"),
    [(CAUSAL, "causal, scale", ()), (PADDED, "bidir.* masks", (IS_TOKEN,)), (BOTH, "causal, .*1 masks", (IS_TOKEN,))],
    ids=["causal", "padded", "both"],
)
def test_a_mask_is_recognized_in_every_spelling(forms, facts, more):
    for name, change in forms.items():
        report = report_of(attend(change), Q, K, *more)
        assert [one.op for one in report.replacements] == ["attention"], (name, report)
        assert re.search(facts, report.replacements[0].facts), (name, report)


@pytest.mark.slow
def test_replaced_attention_has_the_values_and_gradients_of_the_original():
    for name, (fn, args, _) in list(RECOGNIZED.items())[::2]:
        (one,) = report_of(fn, *args).replacements
        assert one.difference < (1e-2 if name == "bf16" else 2e-6), name  # of random inputs; a few roundings of fp32
        expected, ours = fn(*args), rewrite(fn)(*args)
        assert expected.dtype == ours.dtype
        # bf16: one step of its 8 bits in the result, and the probabilities' own rounding in those near 0
        tolerance = {"rtol": 2**-7, "atol": 1e-2} if name == "bf16" else {"atol": 3e-6}
        np.testing.assert_allclose(np.float32(ours), np.float32(expected), **tolerance, err_msg=name)


@jax.custom_jvp
def straight_through(scores):
    return softmax(scores)


@straight_through.defjvp
def _(primals, tangents):
    return softmax(primals[0]), tangents[0]


def several(q, k):
    scores = scores_of(q, k)
    return values_of(softmax(scores), V), scores.max()


def with_probabilities(q, k):
    probs = softmax(scores_of(q, k))
    return values_of(probs, V), probs


def values_after(probs):
    return lambda q, k: values_of(probs(scores_of(q, k)), V)


def one_more_in_the_sum(q, k):
    weights = jnp.exp(scores_of(q, k))
    return values_of(weights / (1 + weights.sum(axis=-1, keepdims=True)), V)


def heads_summed(q, k):
    return jnp.einsum("bnts,bsnh->bth", softmax(scores_of(q, k)), V)


def largest(scores):
    return jnp.where(scores >= scores.max(axis=-1, keepdims=True) - 1, scores, -1e9)


def precise(q, k):
    return values_of(softmax(scores_of(q, k, precision="highest")), V)


def masked(mask):
    return attend(lambda s: jnp.where(mask, s, -1e9))


AHEAD = np.arange(T)[:, None] - np.arange(T)
# name -> (function, the reason that the report gives, further arguments); "" for none: it is not even alike
REFUSED = {
    "a precision of its own": (precise, "a product has precision="),
    "scores that are read elsewhere": (several, "dot_general at .* is also read at"),
    "probabilities that are returned": (with_probabilities, "is returned"),
    "a softmax over queries": (values_after(functools.partial(softmax, axis=2)), "not over the dimensions"),
    "a scale for each head": (attend(lambda s: s * np.arange(1.0, 5)[:, None, None]), "more than a scale"),
    "scores that are squared": (attend(jnp.square), "more than a scale"),
    "a mask of small numbers": (attend(lambda s: jnp.where(TRIL, s, -1.0)), "more than a scale"),
    "a bias": (attend(lambda s, b: s + b), "more than a scale", normal(T, T)),
    "a softcap after the mask": (attend(lambda s: jnp.tanh(causal(s))), "more than a scale"),
    "one more in the sum": (one_more_in_the_sum, ""),
    "heads that are summed": (heads_summed, "summed with the keys"),
    "probabilities that are doubled": (values_after(lambda s: 2 * softmax(s)), "more than dropout"),
    "a gradient of one's own": (values_after(straight_through), "derivative rule of its own"),
    # a query without keys has a gradient by all of them
    "a mask of data, added": (attend(lambda s, m: s + jnp.where(m, 0, -1e9)), "added to the scores", KEYS),
    "a gradient that is stopped": (attend(jax.lax.stop_gradient), ""),
    "bf16 in between": (
        values_after(lambda s: softmax(s.astype(jnp.bfloat16).astype(jnp.float32))),
        "differs from it by",
    ),
    "values of another size": (attend(causal, v=V[..., :5]), "values have 5 features, keys 6"),
    "two numbers for masked scores": (attend(lambda s, m: jnp.where(m, causal(s), -1e9)), "different numbers", KEYS),
    "the next key too": (masked(np.tril(np.ones((T, T), bool), 1)), "neither causal nor a causal band"),
    "only what is before": (attend(lambda s: jnp.where(is_behind(s.shape, by=1), s, -1e9)), "neither causal"),
    "a mask in one head": (masked(TRIL | (np.arange(N) > 0)[:, None, None]), "neither"),
    "only the largest scores": (attend(largest), "more than a scale"),
    "a band with a hole": (masked(TRIL & (AHEAD < 5) & (np.arange(T) != 2)), "neither causal nor a causal band"),
}


def test_what_the_op_does_not_compute_is_not_replaced():
    for name, (fn, reason, *more) in REFUSED.items():
        report = report_of(fn, Q, K, *more)
        assert not report.replacements, (name, report)
        assert [one.op for one in report.refusals] == (["attention"] if reason else []), (name, report)
        assert re.search(reason, str(report)), (name, report)


@jax.custom_vjp
def reversed_gradient(x):
    return x


reversed_gradient.defvjp(lambda x: (x, None), lambda _, cotangent: (-cotangent,))


@pytest.mark.slow
def test_a_rule_of_a_function_that_returns_its_operand_is_kept_with_attention():
    def after(q):
        return jnp.sum(jnp.sin(reversed_gradient(values_of(softmax(scores_of(q, K)), V))))

    def inside(q):
        return jnp.sum(jnp.sin(values_of(reversed_gradient(softmax(scores_of(q, K))), V)))

    for loss in (after, inside):
        np.testing.assert_allclose(jax.grad(rewrite(loss))(Q), jax.grad(loss)(Q), atol=2e-6)


def test_a_print_beside_attention_happens_once_and_hinders_no_replacement(capsys):
    def loud(q, k):
        jax.debug.print("{}", q.sum())
        return values_of(softmax(causal(scores_of(jnp.tanh(q), k))), V)

    ours = rewrite(loud)
    np.testing.assert_allclose(ours(Q, K), loud(Q, K), atol=2e-6)
    jax.effects_barrier()
    assert len(ours.report().replacements) == 1
    assert capsys.readouterr().out.count("\n") == 2


ALIKE = {  # where all dimensions have one size
    "a sum over queries": lambda s: (e := jnp.exp(s)) / e.sum(2)[..., None],
    "sums of other rows": lambda s: (e := jnp.exp(s)) / e.sum(3).transpose(1, 0, 2)[..., None],
}


def test_a_softmax_is_recognized_by_the_axes_of_its_sum():
    q = normal(4, 4, 4, 4)
    for name, probs in ALIKE.items():
        report = report_of(lambda q, k, probs=probs: values_of(probs(scores_of(q, k)), q), q, q, check=False)
        assert not report.replacements, name


def hide(scores, mask):
    return jnp.where(mask[:, None], -1e9, scores)


NO_SEGMENTS = {
    "of queries and of keys": lambda s, i, j: hide(s, ~(i[:, :, None] == j[:, None, :])),
    "other segments alone": lambda s, i, _: hide(s, i[:, :, None] == i[:, None, :]),
    "of queries with themselves": lambda s, i, _: hide(s, ~(i == i)[:, :, None]),
}


def test_other_comparisons_of_segments_are_masks():
    for name, change in NO_SEGMENTS.items():
        (one,) = report_of(attend(change), Q, K, SEGMENTS, SEGMENTS).replacements
        assert "1 masks" in one.facts, name
        assert "segments" not in one.facts, name


def test_a_replacement_that_is_wrong_is_not_used(monkeypatch):
    fn = functools.partial(jax_attention, is_causal=True)
    monkeypatch.setattr(check, "_checked", {})
    right = attention.attention
    monkeypatch.setattr(attention, "attention", lambda q, **rest: right(q * 1.0001, **rest))
    report = report_of(fn, *QKV)
    assert not report.replacements
    assert re.search(r"differs from it by \S+, more than 1e-05", report.refusals[0].reason)

    fn = attend(lambda scores, allowed: jnp.where(allowed, scores, -1e9))
    right_of_variant = chunked_attention.attention

    def maskless(*args, variant, **rest):
        return right_of_variant(*args, variant=dataclasses.replace(variant, masks=()), **rest)

    assert report_of(fn, Q, K, KEYS).replacements
    monkeypatch.setattr(check, "_checked", {})
    monkeypatch.setattr(chunked_attention, "attention", maskless)
    assert not report_of(fn, Q, K, KEYS).replacements


def test_a_replacement_is_compared_on_a_machine_with_one_device(monkeypatch):
    monkeypatch.setattr(check, "_checked", {})
    devices = jax.local_devices(backend="cpu")[:1]
    monkeypatch.setattr(jax, "local_devices", lambda **_: devices)
    assert report_of(functools.partial(jax_attention, is_causal=True), *QKV).replacements


@pytest.mark.slow
def test_attention_inside_loops_and_checkpoints_is_replaced():
    mask = jnp.tril(jnp.ones((T, T), bool))

    @jax.checkpoint
    def layer(x, k):
        return x + values_of(softmax(jnp.where(mask, scores_of(x, k), -1e9)), V)

    def fn(q, k):
        x, _ = jax.lax.scan(lambda x, k: (layer(x, k), None), q, jnp.stack([k, k]))
        return jnp.sum(jax.jit(layer)(x, k) ** 2), x

    ours = rewrite(fn)
    expected, found = (jax.jit(jax.value_and_grad(one, has_aux=True))(Q, K) for one in (fn, ours))
    (one,) = ours.report().replacements
    assert one.count == 2
    assert "causal" in one.facts
    assert not ours.report().refusals
    for a, b in zip(jax.tree.leaves(expected), jax.tree.leaves(found), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-5)


def test_the_implementation_is_the_choice_of_the_dialect():
    fn = functools.partial(jax_attention, is_causal=True)
    (one,) = report_of(fn, *QKV, platform="cuda", check=False).replacements
    assert one.chosen == ("einsum (level 10 on cuda)",)


def test_large_originals_are_compared_at_four_rows_and_four_heads(monkeypatch):
    monkeypatch.setattr(check, "CUT_ABOVE", 0)
    shapes = []
    random = check._random
    monkeypatch.setattr(check, "_random", lambda shape, *x, **y: shapes.append(shape) or random(shape, *x, **y))
    q, k = normal(5, T, N, H), normal(5, T, N, H)
    (one,) = report_of(lambda q, k, v: values_of(softmax(causal(scores_of(q, k))), v), q, k, k).replacements
    assert shapes[:3] == [(4, T, 4, H)] * 3
    assert one.difference < 2e-6
