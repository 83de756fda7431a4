"""One suite of properties over every implementation of attention and of the loss, and broken ones that must fail it.

What cannot run on a CPU is marked by how it runs here instead: Triton's kernel in Pallas's interpret mode, NKI's as the
reference that stands for it in the same layouts. cuDNN cannot even be traced without its library; what can be checked
of it is in the last tests.
"""

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from hlat_jax.collectives import Shards
from hlat_jax.ops import attention, chunked_attention, cross_entropy
from hlat_jax.ops.gpu import attention as gpu
from hlat_jax.ops.nki import attention as nki

# One fp32 rounding is 6e-8 of a value; a few hundred of them add up in any order in these sums.
FP32 = {"rtol": 2e-5, "atol": 5e-6}


def interpreted(q, k, v, segment_ids, window):
    assert window is None
    return gpu.triton(q, k, v, segment_ids_BT=segment_ids, interpret=True)


@dataclasses.dataclass(frozen=True)
class Subject:
    """An implementation as it runs here.

    Attributes:
      run: (q, k, v, segment_ids, window) -> output.
      supports: of the implementation.
      place: T of a row must be a multiple of it.
    """

    run: Callable
    supports: Callable
    place: int = 1


def of_op(name):
    def run(q, k, v, segment_ids, window):
        return attention.attention(
            q, k_BSKH=k, v_BSKH=v, segment_ids_BT=segment_ids, implementation=name, window=window
        )

    return run


def serves_all(**_):
    return []


SUBJECTS = {name: Subject(of_op(name), serves_all) for name in ("einsum", "blocked", "chunked")}
SUBJECTS["nki, its reference"] = Subject(of_op("nki"), nki.supports, 512)
SUBJECTS["triton, interpreted"] = Subject(interpreted, gpu.triton_supports, 128)


@pytest.fixture(autouse=True)
def _many_small_blocks(monkeypatch):
    monkeypatch.setattr(chunked_attention, "BLOCK", 64)
    monkeypatch.setattr(cross_entropy, "CHUNK_POSITIONS", 3)


def normal(*shape, seed=0):
    return np.random.default_rng((seed, *shape)).standard_normal(shape).astype(np.float32)


def inputs(num_rows, seq_len, num_heads=4, num_kv_heads=2, head_dim=8):
    """Returns queries, keys, values and the cotangent of the output."""
    heads = (num_heads, num_kv_heads, num_kv_heads, num_heads)
    return [normal(num_rows, seq_len, n, head_dim, seed=seed) for seed, n in enumerate(heads)]


def documents(num_rows, seq_len):
    """Documents of uneven length, other cuts in each row."""
    cuts = [sorted(np.random.default_rng(row).choice(np.arange(1, seq_len), 3, False)) for row in range(num_rows)]
    return np.stack([np.searchsorted(c, np.arange(seq_len), side="right") + 1 for c in cuts]).astype(np.int32)


def with_grads(subject, arrays, segment_ids=None, window=None):
    *operands, dout = arrays

    @jax.jit
    def both(dout, *operands):
        out, pullback = jax.vjp(lambda *x: subject.run(*x, segment_ids, window), *operands)
        return out, *pullback(dout)

    return both(dout, *operands)


def float64_attention(arrays, segment_ids=None, window=None):
    """Value and gradients in NumPy, head by head: softmax(S) V and its derivative, written out."""
    q, k, v, dout = (x.astype(np.float64) for x in arrays)
    places = np.arange(q.shape[1])
    ahead = places[:, None] - places[None, :]
    out, dq, dk, dv = (np.zeros_like(x) for x in (q, q, k, v))
    for b in range(q.shape[0]):
        seen = (ahead >= 0) & (ahead < (window or len(places)))
        if segment_ids is not None:
            seen &= segment_ids[b][:, None] == segment_ids[b][None, :]
        for n in range(q.shape[2]):
            kv = n // (q.shape[2] // k.shape[2])
            scores = np.where(seen, q[b, :, n] @ k[b, :, kv].T / math.sqrt(q.shape[3]), -np.inf)
            probs = np.exp(scores - scores.max(-1, keepdims=True))
            probs /= probs.sum(-1, keepdims=True)
            out[b, :, n] = probs @ v[b, :, kv]
            dprobs = dout[b, :, n] @ v[b, :, kv].T
            dscores = probs * (dprobs - (probs * dprobs).sum(-1, keepdims=True)) / math.sqrt(q.shape[3])
            dq[b, :, n] = dscores @ k[b, :, kv]
            dk[b, :, kv] += dscores.T @ q[b, :, n]
            dv[b, :, kv] += probs.T @ dout[b, :, n]
    return out, dq, dk, dv


# The properties. Each takes a subject and raises AssertionError where it does not hold.


def is_float64(subject, *, packed, window):
    arrays = inputs(2, subject.place if subject.place > 1 else 150)
    ids = documents(*arrays[0].shape[:2]) if packed else None
    actual = with_grads(subject, arrays, ids, window)
    for mine, exact in zip(actual, float64_attention(arrays, ids, window), strict=True):
        np.testing.assert_allclose(mine, exact, **FP32)


def is_each_document_alone(subject):
    length = subject.place if subject.place > 1 else 75
    arrays = inputs(1, 2 * length)
    packed = with_grads(subject, arrays, np.repeat([4, 2], length)[None].astype(np.int32))
    alone = with_grads(subject, [x.reshape(2, length, *x.shape[2:]) for x in arrays])
    for mine, own in zip(packed, alone, strict=True):
        np.testing.assert_allclose(mine.reshape(own.shape), own, **FP32)


def is_right_at_the_end_of_a_long_row(subject):
    arrays = inputs(1, 2048, num_heads=1, num_kv_heads=1, head_dim=4)
    q, k, v = arrays[:3]
    out = jax.jit(lambda *x: subject.run(*x, None, None))(q, k, v)
    for place in (0, 1023, 1024, 2047):
        scores = k[0, : place + 1, 0].astype(np.float64) @ q[0, place, 0] / 2
        probs = np.exp(scores - scores.max())
        np.testing.assert_allclose(out[0, place, 0], probs @ v[0, : place + 1, 0] / probs.sum(), **FP32)


def is_the_same_over_devices(subject):
    arrays = inputs(2, subject.place if subject.place > 1 else 70)
    mesh = jax.make_mesh((2, 2), ("data", "tensor"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    spec = P("data", None, "tensor")

    def local(*arrays):
        return with_grads(subject, arrays)

    everywhere = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=(spec,) * 4, out_specs=(spec,) * 4, check_vma=False))
    for mine, whole in zip(everywhere(*arrays), with_grads(subject, arrays), strict=True):
        np.testing.assert_allclose(mine, whole, **FP32)


# name -> (the property, whether its calls have segments, their window)
PROPERTIES = {
    f"float64, {'packed' if packed else 'whole rows'}, window {window}": (
        functools.partial(is_float64, packed=packed, window=window),
        packed,
        window,
    )
    for packed in (False, True)
    for window in (None, 65)
} | {
    "packed is each document alone": (is_each_document_alone, True, None),
    "long rows": (is_right_at_the_end_of_a_long_row, False, None),
    "sharded is unsharded": (is_the_same_over_devices, False, None),
}


@pytest.mark.parametrize("property_name", PROPERTIES)
@pytest.mark.parametrize("name", SUBJECTS)
def test_attention_has_the_property_or_refuses_the_call(name, property_name):
    subject, (holds, packed, window) = SUBJECTS[name], PROPERTIES[property_name]
    q, k, *_ = inputs(1, 512)
    ids = np.ones(q.shape[:2], np.int32) if packed else None
    facts = attention.call(q.shape, k.shape[2], dtype=q.dtype, has_segments=packed, window=window)
    why = "; ".join(subject.supports(**facts))
    if not why:
        holds(subject)
        return
    assert (packed and "takes no segment ids" in why) or (window and "window" in why)
    with pytest.raises(ValueError, match="cannot serve"):
        of_op(name.split(",")[0])(q, k, k, ids, window)


def test_every_implementation_of_attention_is_a_subject_or_is_cudnn():
    assert {name.split(",")[0] for name in SUBJECTS} | {"cudnn"} == set(attention.OP.names)


# Broken kernels: what each gets wrong, and a property that must see it.


def broken(q, k, v, segment_ids, window, *, how):
    if how == "sees the next place":
        k, v = (jnp.roll(x, -1, axis=1) for x in (k, v))
    if how == "forgets segments":
        segment_ids = None
    if how == "forgets the window":
        window = None
    if how == "a window of one more":
        window = window and window + 1
    if how == "heads in another order":
        k, v = k[:, :, ::-1], v[:, :, ::-1]
    if how == "loses the tail of long rows":
        v = v.at[:, 1024:].multiply(0.99)
    out = of_op("chunked")(q, k, v, segment_ids, window)
    if how == "scaled by 1.0001":
        out = out * 1.0001
    if how == "gradient of the queries is off":
        out = out + 1e-3 * (q - jax.lax.stop_gradient(q))
    if how == "values of other devices":
        with contextlib.suppress(NameError):  # the same kernel without devices to mix
            out = jax.lax.pmean(out, "tensor")
    return out


PERTURBED = {
    "sees the next place": "float64, whole rows, window None",
    "heads in another order": "float64, whole rows, window None",
    "scaled by 1.0001": "float64, whole rows, window None",
    "gradient of the queries is off": "float64, whole rows, window None",
    "forgets segments": "float64, packed, window None",
    "forgets the window": "float64, whole rows, window 65",
    "a window of one more": "float64, packed, window 65",
    "loses the tail of long rows": "long rows",
    "values of other devices": "sharded is unsharded",
}


@pytest.mark.parametrize("how", PERTURBED)
def test_a_perturbed_kernel_fails(how):
    perturbed = Subject(functools.partial(broken, how=how), serves_all)
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        PROPERTIES[PERTURBED[how]][0](perturbed)


def test_forgotten_segments_are_seen_by_packing_too():
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        is_each_document_alone(Subject(functools.partial(broken, how="forgets segments"), serves_all))


# The loss, likewise.


def float64_loss(hidden, head, targets, weights, z_loss_weight):
    """Value and gradients in NumPy."""
    logits = hidden.astype(np.float64) @ head.T.astype(np.float64)
    log_z = np.log(np.exp(logits).sum(-1))
    losses = log_z - np.take_along_axis(logits, targets[..., None], -1)[..., 0] + z_loss_weight * log_z**2
    dlogits = np.exp(logits - log_z[..., None]) * (1 + 2 * z_loss_weight * log_z)[..., None]
    dlogits = (dlogits - np.eye(len(head))[targets]) * weights[..., None]
    return (weights * losses).sum(), dlogits @ head, np.einsum("btv,btd->vd", dlogits, hidden)


def loss_is_float64(name, *, z_loss_weight, axes):
    hidden, head = normal(2, 10, 16, seed=5), normal(48, 16, seed=6)
    targets = np.random.default_rng(7).integers(0, 48, (2, 10)).astype(np.int32)
    weights = np.random.default_rng(8).choice([0.0, 0.5, 1.0], (2, 10)).astype(np.float32)
    options = cross_entropy.LossOptions(name, z_loss_weight, Shards(tensor=axes))

    def local(hidden, head):
        def loss(hidden, head):
            fields = {"targets_BT": targets, "weights_BT": weights, "options": options}
            return cross_entropy.cross_entropy(hidden, head_VD=head, **fields)[0]

        total, grads = jax.value_and_grad(loss, argnums=(0, 1))(hidden, head)
        return total, *grads

    if axes:
        mesh = jax.make_mesh((4,), axes, axis_types=(jax.sharding.AxisType.Auto,))
        split = P(axes)
        local = jax.shard_map(local, mesh=mesh, in_specs=(P(), split), out_specs=(P(), P(), split), check_vma=False)
    exact = float64_loss(hidden, head, targets, weights, z_loss_weight)
    for mine, expected in zip(jax.jit(local)(hidden, head), exact, strict=True):
        np.testing.assert_allclose(mine, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("axes", [(), ("tensor",)], ids=["whole", "split vocabulary"])
@pytest.mark.parametrize("z_loss_weight", [0.0, 0.1])
@pytest.mark.parametrize("name", cross_entropy.OP.names)
def test_loss_is_that_of_float64(name, z_loss_weight, axes):
    loss_is_float64(name, z_loss_weight=z_loss_weight, axes=axes)


@pytest.mark.parametrize("how", ["forgets the largest of other devices", "forgets the z-loss"])
def test_a_perturbed_loss_fails(how, monkeypatch):
    whole = cross_entropy._softmax_loss

    def perturbed(logits, targets, weights, z_loss_weight, axes):
        if how == "forgets the z-loss":
            return whole(logits, targets, weights, 0.0, axes)
        return whole(logits, targets, weights, z_loss_weight, ())

    monkeypatch.setattr(cross_entropy, "_softmax_loss", perturbed)
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        loss_is_float64("chunked", z_loss_weight=0.1, axes=("tensor",))


# What can be said of kernels that do not run here.


@pytest.mark.parametrize("segments", [False, True])
def test_triton_stands_in_the_program_for_cuda_forward_and_backward_and_nowhere_else(segments):
    arrays = inputs(1, 128)
    ids = documents(1, 128) if segments else None
    subject = Subject(of_op({"cuda": "triton", "cpu": "blocked", "neuron": "einsum"}), serves_all)
    traced = jax.jit(lambda *x: with_grads(subject, x, ids)).trace(*arrays)
    calls = {
        platform: traced.lower(lowering_platforms=(platform,)).as_text().count("custom_call @__gpu$xla.gpu.triton")
        for platform in ("cpu", "cuda", "neuron")
    }
    assert calls == {"cpu": 0, "cuda": 3, "neuron": 0}  # forward; sums of the backward pass; gradients


def test_cudnn_without_its_library_is_passed_over_with_its_own_words_and_a_name_says_them():
    facts = attention.call((1, 128, 4, 64), 2, dtype=jnp.bfloat16, has_segments=False)
    choice = attention.OP.choose("auto", "cuda", facts=facts)
    assert choice.name == "einsum"
    assert choice.passed_over["cudnn"] == "cuDNN is not detected."
    with pytest.raises(ValueError, match=r"model.attention='cudnn' cannot serve: cuDNN is not detected\.\."):
        attention.OP.choose("cudnn", "cuda", facts=facts)


def test_cudnn_is_asked_for_what_the_call_is(monkeypatch):
    asked = []

    def fake(q, k, v, **options):
        asked.append((q.shape, k.shape, q.dtype, options))
        return q

    monkeypatch.setattr(jax.nn, "dot_product_attention", fake)
    facts = attention.call((2, 128, 4, 64), 2, dtype=jnp.bfloat16, has_segments=False, window=32)
    assert gpu.cudnn_supports(**facts) == []
    options = {"is_causal": True, "local_window_size": (31, 0), "implementation": "cudnn"}
    assert asked == [((2, 128, 4, 64), (2, 128, 2, 64), jnp.bfloat16, options)]
    [reason] = gpu.cudnn_supports(**facts | {"has_segments": True})
    assert "takes no segment ids" in reason


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"window": 64}, "takes no window"),
        ({"q_shape": (1, 100, 4, 64)}, "100 is no multiple of 128"),
        ({"q_shape": (1, 128, 4, 256)}, "model.head_dim=256 is above 128"),
        ({"dtype": "float64"}, "dtype float64 is not one of"),
    ],
    ids=["window", "multiple", "head", "dtype"],
)
def test_what_triton_cannot_honour_is_refused_with_the_reason(change, reason):
    facts = attention.call((1, 128, 4, 64), 2, dtype=jnp.bfloat16, has_segments=True)
    assert gpu.triton_supports(**facts) == []
    [found] = gpu.triton_supports(**facts | change)
    assert reason in found


def test_chunked_attention_holds_no_scores_of_whole_rows():
    """Scores and probabilities of T x T are what `einsum` keeps for its backward pass; chunked has none of them."""
    b, t, n, h = 1, 1024, 4, 16

    def temp_bytes(name):
        shapes = [jax.ShapeDtypeStruct((b, t, n, h), np.float32)] * 4
        compiled = jax.jit(lambda *x: with_grads(SUBJECTS[name], x)).lower(*shapes).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    scores_bytes = b * n * t * t * 4
    assert temp_bytes("einsum") > 2 * scores_bytes
    assert temp_bytes("chunked") < scores_bytes / 4


def test_saving_the_residuals_by_name_spares_the_second_forward_pass():
    arrays = inputs(1, 150)
    policy = jax.checkpoint_policies.save_only_these_names

    def num_exps(*names):
        run = jax.checkpoint(lambda *x: SUBJECTS["chunked"].run(*x, None, None), policy=policy(*names))
        jaxpr = jax.make_jaxpr(lambda *x: with_grads(Subject(lambda q, k, v, *_: run(q, k, v), serves_all), x))(*arrays)
        return str(jaxpr).count(" exp ")

    assert num_exps("attention_out", "attention_lse") < num_exps()


@pytest.mark.parametrize("window", [1, 64, 65, 66, 200, None])
def test_chunked_attention_visits_the_pairs_of_blocks_in_which_something_is_seen(window):
    places = np.arange(4 * 64)
    ahead = places[:, None] - places[None, :]
    seen = (ahead >= 0) & (ahead < (window or len(places)))
    expected = {(i, j) for i in range(4) for j in range(4) if seen[i * 64 : i * 64 + 64, j * 64 : j * 64 + 64].any()}
    pairs = [tuple(pair) for pair in chunked_attention.block_pairs(4, block=64, window=window).tolist()]
    assert len(pairs) == len(set(pairs))
    assert set(pairs) == expected
    firsts = dict(reversed(pairs))
    assert firsts == dict(zip(range(4), range(4), strict=True))  # its own block first: there a query sees itself


def test_a_window_below_one_is_refused():
    q, k, v, _ = inputs(1, 8)
    with pytest.raises(ValueError, match=r"window=0 must be at least 1"):
        SUBJECTS["einsum"].run(q, k, v, None, 0)
