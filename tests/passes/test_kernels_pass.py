"""Attention of functions that were not written for a kernel: which calls reach one, and which are left as they are.

No kernel runs on a CPU. Most tests run cuDNN's calls by the same function of JAX without the kernel.
"""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from hlat_jax.passes import kernels_pass
from hlat_jax.passes.autocast_pass import autocast
from hlat_jax.passes.compile import training_program
from hlat_jax.passes.kernels_pass import kernels
from hlat_jax.passes.rewrite import check
from hlat_jax.step import StepOptions

B, T, N, H = 2, 8, 4, 6
TRIL = np.tril(np.ones((T, T), bool))
rng = np.random.default_rng(0)


def normal(*shape):
    return rng.normal(size=shape).astype(np.float32)


Q, K, V = (normal(B, T, N, H) for _ in range(3))
SEGMENTS = np.sort(rng.integers(0, 3, (B, T)), axis=1).astype(np.int32)
IS_TOKEN = np.arange(T) < np.array([[5], [T]])
KEYS = IS_TOKEN[:, None, None]
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
    "segments": (
        attend(lambda s, i: jnp.where(same_segment(i) & TRIL, s, -1e30)),
        (Q, K, SEGMENTS),
        "causal, .*1 masks",
    ),
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


@pytest.fixture
def on_cpu(monkeypatch):
    """cuDNN takes every call, and its calls run without it."""
    cudnn = kernels_pass._CUDNN
    monkeypatch.setitem(
        kernels_pass._KERNELS, "cuda", cudnn._replace(run=cudnn.on_cpu, refusals=lambda *args, **call: [])
    )


def report_of(fn, *args, platform="cuda", **options):
    ours = kernels(fn, platform=platform, **options)
    jax.eval_shape(ours, *args)
    return ours.report()


@pytest.mark.usefixtures("on_cpu")
def test_attention_is_recognized_in_every_form():
    for name, (fn, args, facts) in RECOGNIZED.items():
        report = report_of(fn, *args, check=False)
        assert [one.op for one in report.replacements] == ["attention"], (name, report)
        assert re.search(facts, report.replacements[0].facts), (name, report)
        assert not report.refusals, (name, report)


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.quick_cases("causal", "both")
@pytest.mark.parametrize(
    ("forms", "facts", "more"),
    [
        (CAUSAL, "causal, scale", ()),
        (PADDED, "bidir.*[12] masks", (IS_TOKEN,)),
        (BOTH, "causal, .*1 masks", (IS_TOKEN,)),
    ],
    ids=["causal", "padded", "both"],
)
def test_a_mask_is_recognized_in_every_spelling(forms, facts, more):
    for name, change in forms.items():
        report = report_of(attend(change), Q, K, *more)
        assert [one.op for one in report.replacements] == ["attention"], (name, report)
        assert re.search(facts, report.replacements[0].facts), (name, report)


@pytest.mark.slow
@pytest.mark.usefixtures("on_cpu")
def test_replaced_attention_has_the_values_and_gradients_of_the_original():
    for name, (fn, args, _) in list(RECOGNIZED.items())[::2]:
        (one,) = report_of(fn, *args).replacements
        assert one.difference < (1e-2 if name == "bf16" else 2e-6), name  # of random inputs; a few roundings of fp32
        expected, ours = fn(*args), kernels(fn, platform="cuda")(*args)
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


# name -> (function, the reason in the report, further arguments); "" if the report does not name it
REFUSED = {
    "a precision of its own": (precise, "a product has precision="),
    "scores that are read elsewhere": (several, "dot_general at .* is also read at"),
    "probabilities that are returned": (with_probabilities, "is returned"),
    "a softmax over queries": (values_after(functools.partial(softmax, axis=2)), "not over the dimensions"),
    "a scale for each head": (attend(lambda s: s * np.arange(1.0, 5)[:, None, None]), "the scores go through mul"),
    "scores that are squared": (attend(jnp.square), "go through square"),
    "a mask of small numbers": (attend(lambda s: jnp.where(TRIL, s, -1.0)), "go through select_n"),
    "a softcap": (attend(lambda s: causal(20 * jnp.tanh(s / 20))), "go through tanh"),
    "one more in the sum": (one_more_in_the_sum, ""),
    "heads that are summed": (heads_summed, "summed with the keys"),
    "probabilities that are doubled": (values_after(lambda s: 2 * softmax(s)), ""),
    "a gradient of one's own": (values_after(straight_through), ""),
    "a bias that differs by row": (attend(lambda s, b: s + b), "may have no gradient", normal(B, N, T, T)),
    "a gradient that is stopped": (attend(jax.lax.stop_gradient), "go through stop_gradient"),
    "bf16 in between": (
        values_after(lambda s: softmax(s.astype(jnp.bfloat16).astype(jnp.float32))),
        "differs from it by",
    ),
    "values of another size": (attend(causal, v=V[..., :5]), "values have 5 features, keys 6"),
    "two numbers for masked scores": (attend(lambda s, m: jnp.where(m, causal(s), -1e9)), "differs from it", KEYS),
    "only the largest scores": (attend(largest), "is also read at"),
}


@pytest.mark.usefixtures("on_cpu")
def test_attention_that_no_kernel_computes_is_left():
    for name, (fn, reason, *more) in REFUSED.items():
        report = report_of(fn, Q, K, *more)
        assert not report.replacements, (name, report)
        assert [one.op for one in report.refusals] == (["attention"] if reason else []), (name, report)
        assert re.search(reason, str(report)), (name, report)


@jax.custom_vjp
def reversed_gradient(x):
    return x


reversed_gradient.defvjp(lambda x: (x, None), lambda _, cotangent: (-cotangent,))


AHEAD = np.arange(T)[:, None] - np.arange(T)
OTHER_MASKS = {
    "the next key too": np.tril(np.ones((T, T), bool), 1),
    "only what is before": AHEAD > 0,
    "a mask in one head": TRIL | (np.arange(N) > 0)[:, None, None],
    "a band with a hole": TRIL & (AHEAD < 5) & (np.arange(T) != 2),
}


@pytest.mark.usefixtures("on_cpu")
def test_constant_masks_that_are_not_causal_are_masks():
    for name, mask in OTHER_MASKS.items():
        (one,) = report_of(attend(lambda s, mask=mask: jnp.where(mask, s, -1e9)), Q, K).replacements
        assert "bidirectional" in one.facts, name
        assert "1 masks" in one.facts, name


BIASES = {
    "of all heads": normal(N, T, T),
    "of all rows": normal(T, T),
    "of a distance": normal(N)[:, None, None] * AHEAD,
    "a mask of data": jnp.where(KEYS, 0, -1e9),
}


@pytest.mark.usefixtures("on_cpu")
def test_a_bias_has_its_gradient():
    for name, bias in BIASES.items():
        fns = [
            jax.grad(lambda bias, q, fn=fn: jnp.sum(fn(q, K, bias) ** 2))
            for plain in [attend(lambda s, bias: causal(s) + bias)]
            for fn in (plain, kernels(plain, platform="cuda"))
        ]
        if name != "a mask of data":
            np.testing.assert_allclose(fns[1](bias, Q), fns[0](bias, Q), atol=1e-5, err_msg=name)
    added = attend(lambda s, m: s + jnp.where(m, 0, -1e9))
    (one,) = report_of(added, Q, K, KEYS).replacements  # differs by row, and no float enters into it
    assert "bias" in one.facts


@pytest.mark.slow
@pytest.mark.usefixtures("on_cpu")
def test_a_rule_of_a_function_that_returns_its_operand_is_kept_with_attention():
    def after(q):
        return jnp.sum(jnp.sin(reversed_gradient(values_of(softmax(scores_of(q, K)), V))))

    def inside(q):
        return jnp.sum(jnp.sin(values_of(reversed_gradient(softmax(scores_of(q, K))), V)))

    for loss in (after, inside):
        np.testing.assert_allclose(jax.grad(kernels(loss, platform="cuda"))(Q), jax.grad(loss)(Q), atol=2e-6)


@pytest.mark.usefixtures("on_cpu")
def test_a_print_next_to_attention_happens_once(capsys):
    def loud(q, k):
        jax.debug.print("{}", q.sum())
        return values_of(softmax(causal(scores_of(jnp.tanh(q), k))), V)

    ours = kernels(loud, platform="cuda")
    np.testing.assert_allclose(ours(Q, K), loud(Q, K), atol=2e-6)
    jax.effects_barrier()
    assert len(ours.report().replacements) == 1
    assert capsys.readouterr().out.count("\n") == 2


ALIKE = {  # where all dimensions have one size
    "a sum over queries": lambda s: (e := jnp.exp(s)) / e.sum(2)[..., None],
    "sums of other rows": lambda s: (e := jnp.exp(s)) / e.sum(3).transpose(1, 0, 2)[..., None],
}


@pytest.mark.usefixtures("on_cpu")
def test_a_softmax_is_recognized_by_the_axes_of_its_sum():
    q = normal(4, 4, 4, 4)
    for name, probs in ALIKE.items():
        report = report_of(lambda q, k, probs=probs: values_of(probs(scores_of(q, k)), q), q, q, check=False)
        assert not report.replacements, name


def test_a_call_that_is_wrong_is_not_used(monkeypatch, on_cpu):
    monkeypatch.setattr(check, "_checked", {})
    kernel = kernels_pass._KERNELS["cuda"]
    wrong = kernel._replace(on_cpu=lambda q, *rest, **call: kernel.on_cpu(q * 1.0001, *rest, **call))
    monkeypatch.setitem(kernels_pass._KERNELS, "cuda", wrong)
    report = report_of(functools.partial(jax_attention, is_causal=True), *QKV)
    assert not report.replacements
    assert re.search(r"differs from it by \S+, more than 1e-05", report.refusals[0].reason)


def test_a_call_is_compared_on_a_machine_with_one_device(monkeypatch, on_cpu):
    monkeypatch.setattr(check, "_checked", {})
    devices = jax.local_devices(backend="cpu")[:1]
    monkeypatch.setattr(jax, "local_devices", lambda **_: devices)
    assert report_of(functools.partial(jax_attention, is_causal=True), *QKV).replacements


@pytest.mark.slow
@pytest.mark.usefixtures("on_cpu")
def test_attention_inside_loops_and_checkpoints_is_replaced():
    mask = jnp.tril(jnp.ones((T, T), bool))

    @jax.checkpoint
    def layer(x, k):
        return x + values_of(softmax(jnp.where(mask, scores_of(x, k), -1e9)), V)

    def fn(q, k):
        x, _ = jax.lax.scan(lambda x, k: (layer(x, k), None), q, jnp.stack([k, k]))
        return jnp.sum(jax.jit(layer)(x, k) ** 2), x

    ours = kernels(fn, platform="cuda")
    expected, found = (jax.jit(jax.value_and_grad(one, has_aux=True))(Q, K) for one in (fn, ours))
    (one,) = ours.report().replacements
    assert one.count == 2
    assert "causal" in one.facts
    assert not ours.report().refusals
    for a, b in zip(jax.tree.leaves(expected), jax.tree.leaves(found), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-5)


def test_a_platform_without_a_kernel_leaves_the_function_as_it_is():
    fn = functools.partial(jax_attention, is_causal=True)
    ours = kernels(fn, platform="cpu")
    assert str(jax.make_jaxpr(ours)(*QKV)) == str(jax.make_jaxpr(fn)(*QKV))
    assert str(ours.report()) == "kernels: nothing replaced: platform cpu has none"


def test_an_unknown_platform_is_refused():
    with pytest.raises(ValueError, match="platform='CUDA'"):
        kernels(jax_attention, platform="CUDA")


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="cuDNN is there")
def test_attention_is_left_if_cudnn_is_not_installed():
    report = report_of(functools.partial(jax_attention, is_causal=True), *(x.astype(jnp.bfloat16) for x in QKV))
    assert not report.replacements
    assert "cuDNN" in report.refusals[0].reason


def test_cudnn_receives_causal_and_masked_calls_after_autocast(monkeypatch):
    asked = []

    def fake(q, k, v, bias, mask, **options):
        asked.append((q.dtype, k.shape, bias if bias is None else bias.shape, mask if mask is None else mask.shape))
        asked[-1] += (options["is_causal"], options["implementation"])
        return q

    monkeypatch.setattr(jax.nn, "dot_product_attention", fake)
    masked = attend(lambda s, m: jnp.where(m[:, None, None] & TRIL, s, -1e9), v=V)
    biased = attend(lambda s, b: s + b, v=V)
    for fn, more in ((masked, (IS_TOKEN,)), (biased, (normal(1, N, T, T),))):
        low = kernels(autocast(fn, "bf16"), platform="cuda", check=False)
        jax.eval_shape(low, Q, K, *more)
        assert low.report().replacements, low.report()
    bf16 = jnp.dtype("bfloat16")
    assert (bf16, (B, T, N, H), None, (B, 1, T, T), True, "cudnn") in asked
    assert (bf16, (B, T, N, H), (1, N, T, T), None, False, "cudnn") in asked


def test_a_causal_program_for_neuron_has_the_nki_kernels():
    q, k = normal(1, 512, 4, 8), normal(1, 512, 2, 8)
    fn = functools.partial(jax_attention, is_causal=True, scale=0.5)
    ours = kernels(fn, platform="neuron", check=False)
    text = str(jax.make_jaxpr(jax.grad(lambda q: jnp.sum(ours(q, k, k) ** 2)))(q))
    assert "nki_attention_forward" in text
    assert "nki_attention_backward" in text
    for other, words in ((jax_attention, "takes a causal mask and no other"), (fn, "is not a multiple of 512")):
        report = report_of(other, *(QKV if other is fn else (q, k, k)), platform="neuron")
        assert not report.replacements
        assert words in report.refusals[0].reason
    difference = report_of(fn, q, k, k, platform="neuron").replacements[0].difference
    assert difference < 1e-5  # by the reference in the kernel's layouts


@pytest.mark.usefixtures("on_cpu")
def test_a_training_program_calls_kernels_before_it_makes_chunks(monkeypatch):
    monkeypatch.setattr(StepOptions, "platform", "cuda")

    def loss(params, batch):
        q, k, v = ((batch @ params[key]).reshape(2, 64, 2, 8) for key in "qkv")
        return jnp.mean(jax_attention(q, k, v, is_causal=True) ** 2)

    params = {key: jnp.asarray(normal(16, 16)) for key in "qkv"}
    passes = {"autocast": "bf16", "kernels": True, "chunk": "4KiB"}  # scores of 64 KiB
    program = training_program(loss, optax.sgd(0.1), **passes, params=params, batch=jnp.ones((2, 64, 16)))
    assert [stage.name for stage in program.stages] == ["loss", "autocast", "kernels", "chunk"]
    assert re.search(r"^kernels .* attention at .*causal", str(program), re.MULTILINE)


@pytest.mark.usefixtures("on_cpu")
def test_large_originals_are_compared_at_four_rows_and_four_heads(monkeypatch):
    monkeypatch.setattr(check, "CUT_ABOVE", 0)
    shapes = []
    random = check.random
    monkeypatch.setattr(check, "random", lambda shape, *x, **y: shapes.append(shape) or random(shape, *x, **y))
    q, k = normal(5, T, N, H), normal(5, T, N, H)
    (one,) = report_of(lambda q, k, v: values_of(softmax(causal(scores_of(q, k))), v), q, k, k).replacements
    assert shapes[:3] == [(4, T, 4, H)] * 3
    assert one.difference < 2e-6
