"""Calls attention kernels in a function that was written without them, on platforms that have one.

    loss = kernels(loss)
    value, grads = jax.value_and_grad(loss)(params, batch)
    print(loss.report())

On GPUs the kernel is cuDNN's, through `jax.nn.dot_product_attention`. On Neuron it is nkilib's, see `ops.nki`.
Attention that no kernel takes is left as it is, and so is a whole function on other platforms. Each call is compared
with the original first, see `passes.rewrite`.
Source: RAF, arXiv 2303.04759, in which kernels take over patterns of operators.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from hlat_jax.facts.chips import DOCUMENTED, chip_of
from hlat_jax.ops.gpu import attention as gpu
from hlat_jax.ops.nki import attention as nki
from hlat_jax.passes.dataflow import upstream
from hlat_jax.passes.jaxpr import ELEMENTWISE, is_inexact, is_literal, variables
from hlat_jax.passes.rewrite import Rewritten
from hlat_jax.passes.rewrite.axes import (
    CASTS,
    VIEWS,
    Axis,
    Placed,
    arranged,
    linked,
    new_layout,
    operands_of,
    size_of,
    source_of,
)
from hlat_jax.passes.rewrite.graph import EquationGraph, Match, Refusal

MASKED = -1e4  # a key whose score is this or less has no weight
_OP = "attention"
_PRESETS = jax.lax.DotAlgorithmPreset
_PRECISIONS = (None, jax.lax.Precision.DEFAULT, _PRESETS.BF16_BF16_F32, _PRESETS.F16_F16_F32)  # as kernels compute

_Args = ParamSpec("_Args")
_Result = TypeVar("_Result")


class _Kernel(NamedTuple):
    """An attention kernel.

    Attributes:
      name: for the report.
      run: function of the arguments of `ops.gpu.attention.dot_product_attention`.
      on_cpu: the same function without the kernel.
      refusals: function of the same arguments, arrays as shapes, that returns why the kernel does not take a call.
    """

    name: str
    run: Callable[..., Any]
    on_cpu: Callable[..., Any]
    refusals: Callable[..., list[str]]


def kernels(
    fn: Callable[_Args, _Result], *, platform: str | None = None, check: bool = True
) -> Rewritten[_Args, _Result]:
    """Returns a function with the same arguments and results that calls the attention kernel of a platform.

    Apply it before `jax.grad`, and after `autocast`: cuDNN takes only bf16 and fp16. The kernels have no forward mode.
    Each call traces `fn` again, so wrap the result, or its caller, in `jax.jit`. `report()` lists the calls, and why
    other attention is left as it is.

    Args:
      fn: a function that JAX can trace, with arguments as for `autocast`.
      platform: the platform that runs the function, by default the platform of JAX's default device.
      check: whether each call is compared with the original before it is used, on this machine's CPU without the
        kernel.

    Raises:
      ValueError: an unknown platform.
    """
    if platform is None:
        platform = jax.default_backend()
    elif platform not in _PLATFORMS:
        raise ValueError(f"kernels: platform={platform!r} is unknown. Use one of {', '.join(_PLATFORMS)}.")
    kernel = _KERNELS.get(platform)
    if kernel is None:
        return Rewritten(fn, name="kernels", matchers=(), check=check, note=f"platform {platform} has none")
    return Rewritten(fn, name="kernels", matchers=[functools.partial(_matches, kernel=kernel)], check=check)


def _cudnn_refusals(q: Any, k: Any, v: Any, *, bias_BNTS: Any, mask_BNTS: Any, **static: Any) -> list[str]:
    def attend(*operands: Any) -> Any:
        *qkv, bias, mask = operands
        return gpu.dot_product_attention(*qkv, bias_BNTS=bias, mask_BNTS=mask, **static)

    return gpu.trace_errors(attend, q, k, v, bias_BNTS, mask_BNTS)


def _nki(q_BTNH: Any, k_BSKH: Any, v_BSKH: Any, *, scale: float, **_: Any) -> Any:
    factor = scale * math.sqrt(q_BTNH.shape[-1])  # the kernel divides by the root
    is_one = math.isclose(factor, 1, rel_tol=1e-6)
    return nki.attention(q_BTNH if is_one else q_BTNH * jnp.asarray(factor, q_BTNH.dtype), k_BSKH, v_BSKH)


def _nki_refusals(
    q: Any, k: Any, v: Any, *, bias_BNTS: Any, mask_BNTS: Any, causal: bool, window: int | None, **_: Any
) -> list[str]:
    call = {"num_kv_heads": k.shape[2], "dtype": q.dtype, "has_segments": False, "window": window}
    reasons = nki.unsupported_reasons(q_shape=q.shape, **call)
    if not causal or bias_BNTS is not None or mask_BNTS is not None:
        reasons.append("the kernel takes a causal mask and no other mask or bias")
    device = jax.devices()[0]
    if device.platform == "neuron":
        if importlib.util.find_spec("nkilib") is None:
            reasons.append("nkilib is not installed")
        if (chip := chip_of(device.device_kind)) and chip not in DOCUMENTED:
            reasons.append(f"AWS documents NKI for {' and '.join(DOCUMENTED)} only, not for {chip} (nki/nki_faq)")
    return reasons


_CUDNN = _Kernel(
    "cuDNN",
    gpu.dot_product_attention,
    functools.partial(gpu.dot_product_attention, implementation="xla"),
    _cudnn_refusals,
)
_KERNELS = {"gpu": _CUDNN, "cuda": _CUDNN, "neuron": _Kernel("NKI", _nki, _nki, _nki_refusals)}
_PLATFORMS = (*_KERNELS, "cpu", "rocm", "tpu")


class _NotAttention(Exception):
    """The product does not come from a softmax of a product."""


class _Refused(ValueError):
    """No kernel takes this attention."""


class _Mask(NamedTuple):
    """An array of numbers or bools; queries attend to keys where it is nonzero, if `when`, or else where it is zero."""

    array: Placed
    when: bool


class _Scores(NamedTuple):
    """The steps from a product of queries and keys to the softmax: scale * product + biases, masked.

    Attributes:
      product: the product.
      scale: factor of the product.
      biases: arrays that are added, each with its factor.
      masks: where queries attend to keys, in all of them.
    """

    product: Placed
    scale: float
    biases: list[tuple[Placed, float]]
    masks: list[_Mask]

    def scaled(self, factor: float) -> _Scores:
        """Returns the steps, and a factor after them."""
        return self._replace(scale=self.scale * factor, biases=[(one, old * factor) for one, old in self.biases])

    def plus(self, graph: EquationGraph, bias: Placed, factor: float) -> _Scores:
        """Returns the steps, and an array added: a mask if it is 0 or a large negative number everywhere."""
        if _number(graph, bias) is not None:  # a softmax does not change
            return self
        value = _constant(graph, bias)
        if value is not None and ((factor * value <= MASKED) | (value == 0)).all():
            return self._replace(masks=[*self.masks, _Mask(bias, False)])
        return self._replace(biases=[*self.biases, (bias, factor)])


def _matches(graph: EquationGraph, *, kernel: _Kernel) -> Iterator[Match | Refusal]:
    """Yields a match or a refusal for each product of probabilities and values."""
    for eqn in graph.eqns:
        for side in (0, 1) if eqn.primitive.name == "dot_general" else ():
            try:
                yield _match(graph, eqn, side, kernel)
            except _NotAttention:
                continue
            except (TypeError, ValueError) as error:
                yield Refusal(_OP, graph.source(eqn), str(error))
            break


def _match(graph: EquationGraph, last: Any, side: int, kernel: _Kernel) -> Match:
    """Returns the match of a product whose operand `side` is a softmax.

    Raises:
      _NotAttention: the product does not come from a softmax of a product.
      _Refused: the kernel does not take it.
    """
    probs = last.invars[side], new_layout(last.invars[side].aval.shape)
    scores_placed, S = _softmax(graph, probs)
    scores = _read_scores(graph, scores_placed, set())
    if scores is None:
        raise _NotAttention
    axes = _Axes.of(graph, last, side=side, probs=probs, scores=scores, S=S)
    causal, window, masks = _split_causal(graph, scores, axes)
    for added, _ in scores.biases:
        if axes.has_rows(added) and _has_derivative(graph, added[0]):
            raise _Refused("a bias that differs by row may have no gradient in the kernel")
    placed = [axes.q, axes.k, axes.v, *(one for one, _ in scores.biases), *(one.array for one in masks)]
    inputs, result = list(dict.fromkeys(var for var, _ in placed)), axes.out[0]
    static = {"causal": causal, "window": window, "scale": scores.scale}

    def operands(*values: Any) -> tuple[list[Any], Mapping[Axis, int]]:
        """Returns the operands of the kernel from the values of the inputs, and the sizes, which the check may cut."""
        given = dict(zip(inputs, values, strict=True))
        dims = [pair for var, layout in placed for pair in zip(layout, given[var].shape, strict=True)]
        sizes = {axis: size for axis, size in dims if axis}
        q = arranged(given[axes.q[0]], axes.q[1], [axes.B, axes.T, [*axes.K, *axes.G], axes.H], sizes=sizes, full=True)
        keys = [
            arranged(given[var], layout, [axes.B, axes.S, axes.K, features], sizes=sizes, full=True)
            for (var, layout), features in ((axes.k, axes.H), (axes.v, axes.V))
        ]
        groups, lengths = axes.groups, [math.prod(sizes[axis] for axis in each) for each in (axes.T, axes.S)]

        def of_pairs(one: Placed) -> Any:
            x = arranged(given[one[0]], one[1], groups, sizes=sizes)
            return jnp.broadcast_to(x, (*x.shape[:2], *lengths))

        terms = [factor * of_pairs(one).astype(jnp.float32) for one, factor in scores.biases]
        bias = sum(terms).astype(q.dtype) if terms else None
        if bias is not None:  # of all heads: older versions of JAX have no gradient by another one
            bias = jnp.broadcast_to(bias, (bias.shape[0], q.shape[2], *lengths))
        attended = [(of_pairs(one.array) != 0) == one.when for one in masks]
        return [q, *keys, bias, functools.reduce(jnp.logical_and, attended) if attended else None], sizes

    def replacement(run: Callable[..., Any], *values: Any) -> list[Any]:
        (q, k, v, bias, mask), sizes = operands(*values)
        order, layout = [*axes.B, *axes.T, *axes.K, *axes.G, *axes.V], [axis for axis in axes.out[1] if axis]
        out = run(q, k, v, bias_BNTS=bias, mask_BNTS=mask, **static).reshape([sizes[axis] for axis in order])
        out = out.transpose([order.index(axis) for axis in layout])
        return [out.reshape([sizes[axis] if axis else 1 for axis in axes.out[1]]).astype(result.aval.dtype)]

    q, k, v, bias, mask = jax.eval_shape(lambda *values: operands(*values)[0], *(var.aval for var in inputs))
    if reasons := kernel.refusals(q, k, v, bias_BNTS=bias, mask_BNTS=mask, **static):
        raise _Refused(f"{kernel.name}: {'; '.join(reasons)}")
    return Match(
        op=_OP,
        eqns=graph.between([axes.q[0], axes.k[0], axes.v[0]], [result], without=inputs),
        inputs=inputs,
        outputs=[result],
        replacement=functools.partial(replacement, kernel.run),
        on_cpu=functools.partial(replacement, kernel.on_cpu),
        source=graph.source(last),
        uncut=[(axes.v[0], dim) for dim, axis in enumerate(axes.v[1]) if axis in axes.V],
        facts=f"{kernel.name}, {_facts(scores, axes, causal, window, masks)}",
    )


def _facts(scores: _Scores, axes: _Axes, causal: bool, window: int | None, masks: Sequence[_Mask]) -> str:
    kind = "causal" if causal else "bidirectional"
    facts = [kind if window is None else f"causal, window {window}", f"scale {scores.scale:.4g}"]
    facts += [f"{len(masks)} masks"] if masks else []
    facts += ["bias"] if scores.biases else []
    sizes = map(size_of, (axes.B, axes.T, axes.S, [*axes.K, *axes.G], axes.K, axes.H))
    return ", ".join(facts) + ", B {} T {} S {} N {} K {} H {}".format(*sizes)


def _softmax(graph: EquationGraph, probs: Placed) -> tuple[Placed, list[Axis]]:
    """Returns the scores whose exponentials are divided by their sum, and the axes of that sum."""
    quotient = operands_of(graph, source_of(graph, probs, names=VIEWS | CASTS), ("div",))
    if quotient is None:
        raise _NotAttention
    weights, (total, kept) = (source_of(graph, one, names=VIEWS | CASTS) for one in quotient)
    exp, add = graph.producer(weights[0]), graph.producer(total)
    if exp is None or exp.primitive.name != "exp" or add is None or add.primitive.name != "reduce_sum":
        raise _NotAttention
    dims, summed = add.params["axes"], (add.invars[0], new_layout(add.invars[0].aval.shape))
    S = [axis for dim, axis in enumerate(weights[1]) if axis and dim in dims]
    is_of_weights = source_of(graph, summed, names=CASTS) == (weights[0], summed[1])
    if not is_of_weights or not S or kept != tuple(axis for dim, axis in enumerate(weights[1]) if dim not in dims):
        raise _NotAttention
    scores = source_of(graph, (exp.invars[0], weights[1]), names=CASTS)
    shifted = operands_of(graph, scores, ("sub",))
    if shifted and not {*source_of(graph, shifted[1])[1]} & {*S}:  # by a number of all keys, such as the maximum
        return shifted[0], S
    return scores, S


def _read_scores(graph: EquationGraph, one: Placed, failed: set[Any]) -> _Scores | None:
    """Returns the steps from a product to an array, or None if the array does not come from a product.

    `failed` has variables that do not come from a product, and gets more.

    Raises:
      _Refused: it comes from a product through another equation.
    """
    one = source_of(graph, one, names=VIEWS | CASTS)
    eqn = graph.producer(one[0])
    if eqn is None or one[0] in failed:
        return None
    if eqn.primitive.name == "dot_general" and eqn.params["dimension_numbers"][1][0]:
        return _Scores(one, 1.0, [], [])
    operands = operands_of(graph, one, ELEMENTWISE) or []
    for at, operand in reversed([*enumerate(operands)]):  # of a selection, what is selected first
        if (scores := _read_scores(graph, operand, failed)) is not None:
            return _with_step(graph, scores, eqn, operands, at)
    failed.add(one[0])
    return None


def _with_step(graph: EquationGraph, scores: _Scores, eqn: Any, operands: Sequence[Placed], at: int) -> _Scores:
    """Returns the steps with one more, an equation whose operand `at` has the scores."""
    name, others = eqn.primitive.name, [one for number, one in enumerate(operands) if number != at]
    number = _number(graph, others[-1]) if others else None
    if number is not None and (name == "mul" or (name == "div" and at == 0)):
        return scores.scaled(number if name == "mul" else 1 / number)
    if name in ("add", "sub"):
        scores = scores.scaled(-1.0) if name == "sub" and at == 1 else scores
        return scores.plus(graph, others[0], -1.0 if name == "sub" and at == 0 else 1.0)
    if name == "select_n" and len(others) == 2 and at > 0:
        fill = _constant(graph, others[1])
        if fill is not None and fill.max() <= MASKED:
            return scores._replace(masks=[*scores.masks, *_conjuncts(graph, others[0], at == 2)])
    raise _Refused(f"the scores go through {name} at {graph.source(eqn)}")


def _constant(graph: EquationGraph, one: Placed) -> np.ndarray | None:
    """Returns the value of an array that depends on no input, without repetitions; None for any other."""
    return graph.constant(source_of(graph, one, names=VIEWS)[0])


def _number(graph: EquationGraph, one: Placed) -> float | None:
    """Returns a single number that depends on no input; None for any other value."""
    value = _constant(graph, one)
    return float(value.ravel()[0]) if value is not None and value.size == 1 else None


def _conjuncts(graph: EquationGraph, mask: Placed, when: bool) -> list[_Mask]:
    """Returns the masks that hold together where an array is nonzero, if `when`, or else where it is zero."""
    mask = source_of(graph, mask, names=VIEWS)
    if (number := _number(graph, mask)) is not None and bool(number) == when:
        return []
    operands = operands_of(graph, mask, ("and", "or", "not", "ne", "mul", "convert_element_type"))
    if operands is not None:
        name, is_bool = graph.producer(mask[0]).primitive.name, operands[0][0].aval.dtype == bool
        if name == "not" and is_bool:
            return _conjuncts(graph, operands[0], not when)
        if (name == "convert_element_type" and is_bool) or (name == "ne" and _number(graph, operands[1]) == 0):
            return _conjuncts(graph, operands[0], when)
        if (is_bool and (name, when) in (("and", True), ("or", False))) or (name, when) == ("mul", True):
            return [each for operand in operands for each in _conjuncts(graph, operand, when)]
    return [_Mask(mask, when)]


def _has_derivative(graph: EquationGraph, var: Any) -> bool:
    """Returns whether a float input of the function enters into a value."""
    eqns = upstream(graph.eqns, [var])
    reads = {var, *(atom for eqn in eqns for atom in variables(eqn.invars))}
    return any(graph.producer(one) is None and is_inexact(one.aval) and not graph.is_constant(one) for one in reads)


def _split_causal(graph: EquationGraph, scores: _Scores, axes: _Axes) -> tuple[bool, int | None, list[_Mask]]:
    """Returns whether the constant masks are causal, the window if they are a causal band, and the masks left."""
    sizes = {axis: axis.size for group in axes.groups for axis in group}
    constant = [mask for mask in scores.masks if graph.constant(mask.array[0]) is not None]
    if not constant:
        return False, None, scores.masks
    attended = functools.reduce(
        np.logical_and,
        (
            (arranged(graph.constant(var), layout, axes.groups, sizes=sizes) != 0) == when
            for (var, layout), when in constant
        ),
    )
    of_pairs, num_keys = attended[0, 0], size_of(axes.S)
    width = int(of_pairs[-1].sum())
    behind = np.arange(size_of(axes.T))[:, None] - np.arange(num_keys)
    causal = (behind >= 0) & (behind < width)
    is_square = of_pairs.shape == causal.shape and causal.shape[0] == causal.shape[1]
    if not is_square or not (attended == causal).all():
        return False, None, scores.masks
    return True, width if width < num_keys else None, [mask for mask in scores.masks if mask not in constant]


@dataclasses.dataclass(frozen=True)
class _Axes:
    """The dimensions of attention.

    Attributes:
      q, k, v, out: queries, keys, values and the result, each with its layout.
      B, K, G, T, S, H, V: axes. G are the query heads of one key-value head, V the features of values.
    """

    q: Placed
    k: Placed
    v: Placed
    out: Placed
    B: list[Axis]
    K: list[Axis]
    G: list[Axis]
    T: list[Axis]
    S: list[Axis]
    H: list[Axis]
    V: list[Axis]

    @property
    def groups(self) -> tuple[list[Axis], ...]:
        """The axes of each dimension of scores [B, N, T, S]."""
        return self.B, [*self.K, *self.G], self.T, self.S

    def has_rows(self, one: Placed) -> bool:
        """Returns whether an array differs along B."""
        return not {*self.B}.isdisjoint(one[1])

    @classmethod
    def of(cls, graph: EquationGraph, last: Any, *, side: int, probs: Placed, scores: _Scores, S: list[Axis]) -> _Axes:
        """Returns the axes of the product `last` of probabilities and values.

        The probabilities `probs` are its operand number `side`, a softmax of `scores` over the axes S.
        """
        first, in_scores = graph.producer(scores.product[0]), scores.product[1]
        for eqn in (first, last):
            precision = eqn.params["precision"]
            for one in precision if isinstance(precision, tuple) else (precision,):
                if one not in _PRECISIONS:
                    raise _Refused(f"a product has precision={one}")
        operands = zip(first.invars, linked(first, {2: in_scores}), strict=False)
        q, k = sorted(operands, key=lambda one: bool({*S} & {*one[1]}))
        layouts = linked(last, {side: probs[1]})
        v, out = (last.invars[1 - side], layouts[1 - side]), (last.outvars[0], layouts[2])
        if any(is_literal(one[0]) for one in (q, k, v)) or len({one[0].aval.dtype for one in (q, k, v)}) > 1:
            raise _Refused("queries, keys and values have different dtypes")
        in_q, in_k, in_v, in_out = ([axis for axis in one[1] if axis] for one in (q, k, v, out))
        if {*S} & {*in_q, *in_out} or not {*S} <= {*in_k} & {*in_v}:
            raise _Refused("the softmax is not over the dimensions that only keys and values have")
        H = [axis for axis in in_q if axis not in in_scores]
        V = [axis for axis in in_v if axis not in probs[1]]
        free = [axis for axis in in_q if axis in in_scores]
        if {*in_out} != {*free, *V}:
            raise _Refused("a dimension of the scores is summed with the keys")
        if not H or size_of(V) != size_of(H):
            raise _Refused(f"values have {size_of(V)} features, keys {size_of(H)}")
        shared = [axis for axis in free if axis in (*k[1], *v[1])]
        own = [axis for axis in free if axis not in shared]
        has_one_row = len(q[1]) > 3 and q[1][0] is None
        B, K = ([], shared) if has_one_row else (shared[:1], shared[1:])
        arrays = [*(mask.array for mask in scores.masks), *(bias for bias, _ in scores.biases)]
        in_arrays = [axis for axis in own if any(axis in layout for _, layout in arrays)]
        same_size = [axis for axis in own if axis.size == size_of(S)]
        T = next((axes for axes in (own, in_arrays, same_size) if len(axes) == 1), [])
        if not T:
            raise _Refused("the dimension of the queries' positions is not known")
        G = [axis for axis in own if axis not in T]
        return cls(q, k, v, out, B, K, G, T, S, H, V)
