"""Finds attention in a jaxpr: two products with a softmax between them.

The softmax is found by its equations; scale, softcap, masks and dropout by their values (`pointwise`), so that their
spelling does not matter. That a constant mask is causal is proven, value by value. What the dimensions are follows from
who has them, queries, keys or values.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hlat_jax.ops import attention, chunked_attention
from hlat_jax.passes.jaxpr import called_jaxpr, equations
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
from hlat_jax.passes.rewrite.graph import Choose, EquationGraph, Match, Refusal, own_rule
from hlat_jax.passes.rewrite.pointwise import Flag, NotAttention, Pointwise, Refused, dropout, score_function

_OP = "attention"


def matches(graph: EquationGraph) -> Iterator[Match | Refusal]:
    """Yields a match or a refusal for each product of probabilities and values."""
    for eqn in graph.eqns:
        for side in (0, 1) if eqn.primitive.name == "dot_general" else ():
            try:
                with jax.ensure_compile_time_eval(), jax.default_device(jax.local_devices(backend="cpu")[0]):
                    candidate = _Attention(graph, eqn, side)
            except NotAttention:
                continue
            except (TypeError, ValueError) as error:
                yield Refusal(_OP, graph.source(eqn), str(error))
            else:
                yield candidate.match()
            break


class _Attention:
    """One candidate, and what the op is called with.

    Attributes:
      q, k, v, out: queries, keys, values and the result, with the axes of their dimensions.
      B, K, G, T, S, H, V: axes; G are those of the query heads of one key-value head, V the features of values.
      function: what happens to the scores.
      causal, window: what the constant mask is.
      segments: segment ids, or None.
      masks: what else hides keys.
      keep, keep_factor: what dropout keeps.
    """

    def __init__(self, graph: EquationGraph, last: Any, side: int):
        self.graph, self.last = graph, last
        probs = last.invars[side], new_layout(last.invars[side].aval.shape)
        made_by = graph.producer(source_of(graph, probs, names=VIEWS | CASTS)[0])
        if made_by is not None and (why := own_rule(made_by)):
            inside = {eqn.primitive.name for eqn, _ in equations(called_jaxpr(made_by))}
            raise Refused(why) if {"exp", "reduce_sum"} <= inside else NotAttention
        after = Pointwise(graph, probs, lambda eqn: eqn.primitive.name == "exp")
        before = Pointwise(
            graph,
            self._softmax(after),
            lambda eqn: eqn.primitive.name == "dot_general" and bool(eqn.params["dimension_numbers"][1][0]),
        )
        self._find_operands(before.start, probs, side)
        self.keep, self.keep_factor = dropout(after)
        self.function = score_function(before)
        self._group_axes()
        self._prove()
        self._sort_masks()

    def _softmax(self, region: Pointwise) -> Placed:
        """Returns the scores of which exponentials are divided by their sum, and sets the axes of that sum, S."""
        weights, layout = region.start
        total, kept = source_of(self.graph, (region.others or [region.start])[0], names=VIEWS | CASTS)
        add = self.graph.producer(total)
        if len(region.others) != 1 or add is None or add.primitive.name != "reduce_sum":
            raise NotAttention
        dims, summed = add.params["axes"], (add.invars[0], new_layout(add.invars[0].aval.shape))
        self.S = [axis for dim, axis in enumerate(layout) if axis and dim in dims]
        is_of_weights = source_of(self.graph, summed, names=CASTS) == (weights, summed[1])
        if not is_of_weights or not self.S or kept != tuple(axis for dim, axis in enumerate(layout) if dim not in dims):
            raise NotAttention
        scores = source_of(self.graph, (self.graph.producer(weights).invars[0], layout), names=CASTS)
        shifted = operands_of(self.graph, scores, ("sub",))
        if shifted and not {*source_of(self.graph, shifted[1])[1]} & {*self.S}:  # by what is the same for all keys
            return shifted[0]
        return scores

    def _find_operands(self, product: Placed, probs: Placed, side: int) -> None:
        """Sets queries, keys, values and the result, H, V and the axes that queries share with the result."""
        first = self.graph.producer(product[0])
        for eqn in (first, self.last):
            precision = eqn.params["precision"]
            for one in precision if isinstance(precision, tuple) else (precision,):
                if one not in (None, jax.lax.Precision.DEFAULT):
                    raise Refused(f"a product has precision={one}")
        operands = zip(first.invars, linked(first, {2: product[1]}), strict=False)
        self.q, self.k = sorted(operands, key=lambda one: bool({*self.S} & {*one[1]}))
        layouts = linked(self.last, {side: probs[1]})
        self.v, self.out = (self.last.invars[1 - side], layouts[1 - side]), (self.last.outvars[0], layouts[2])
        in_q, in_k, in_v, in_out = ([axis for axis in one[1] if axis] for one in (self.q, self.k, self.v, self.out))
        if len({one[0].aval.dtype for one in (self.q, self.k, self.v)}) > 1:
            raise Refused("queries, keys and values have different dtypes")
        if {*self.S} & {*in_q, *in_out} or not {*self.S} <= {*in_k} & {*in_v}:
            raise Refused("the softmax is not over the dimensions that only keys and values have")
        self.H = [axis for axis in in_q if axis not in product[1]]
        self.V = [axis for axis in in_v if axis not in probs[1]]
        self.free = [axis for axis in in_q if axis in product[1]]
        if {*in_out} != {*self.free, *self.V}:
            raise Refused("a dimension of the scores is summed with the keys")
        if not self.H or size_of(self.V) != size_of(self.H):
            raise Refused(f"values have {size_of(self.V)} features, keys {size_of(self.H)}")

    def _group_axes(self) -> None:
        """Sets B, K, G and T."""
        shared = [axis for axis in self.free if axis in (*self.k[1], *self.v[1])]
        own = [axis for axis in self.free if axis not in shared]
        has_one_row = len(self.q[1]) > 3 and self.q[1][0] is None
        self.B, self.K = ([], shared) if has_one_row else (shared[:1], shared[1:])
        masks = (self.function.allowed, *(flag.array for flag in self.function.flags))
        in_masks = [axis for axis in own if any(axis in layout for _, layout in masks)]
        same_size = [axis for axis in own if axis.size == size_of(self.S)]
        self.T = next((axes for axes in (own, in_masks, same_size) if len(axes) == 1), [])
        if not self.T:
            raise Refused("the dimension of the queries' positions is not known")
        self.G = [axis for axis in own if axis not in self.T]
        self.groups = (self.B, [*self.K, *self.G], self.T, self.S)

    def _prove(self) -> None:
        """Sets `causal` and `window`: the constant mask is none, causal, or a causal band."""
        sizes = {axis: axis.size for group in self.groups for axis in group}
        allowed = arranged(*self.function.allowed, self.groups, sizes=sizes)
        self.causal, self.window = False, None
        if allowed.all():
            return
        num_queries, num_keys = size_of(self.T), size_of(self.S)
        if allowed.shape[2:] == (num_queries, num_keys) and num_queries == num_keys:
            width = int(allowed[0, 0, -1].sum())
            behind = np.arange(num_queries)[:, None] - np.arange(num_keys)
            self.causal = bool((allowed == ((behind >= 0) & (behind < width))).all())
            self.window = width if width < num_keys else None
        if not self.causal:
            raise Refused("a constant mask is neither causal nor a causal band")

    def _sort_masks(self) -> None:
        """Sets `segments` and `masks`."""
        self.segments, self.masks = None, []
        for flag in self.function.flags:
            ids = self._segment_ids(flag)
            if ids is not None and self.segments is None:
                self.segments = ids
            else:
                self.masks.append(flag)
        if self.masks and not self.function.is_filled:
            raise Refused("masked scores are set to different numbers")

    def _segment_ids(self, flag: Flag) -> Placed | None:
        """Returns the ids of a mask `ids[:, :, None] == ids[:, None, :]`; None for any other."""
        operands = operands_of(self.graph, flag.array, ("eq",))
        if operands is None or not flag.when or len(self.S) > 1:
            return None
        sides = [source_of(self.graph, one) for one in operands]
        for (ids, layout), other in (sides, sides[::-1]):
            of_queries = other[0], tuple(self.T[0] if axis in self.S else axis for axis in other[1])
            is_pair = (ids, layout) == of_queries and layout != other[1] and {*layout} <= {*self.B, *self.T, None}
            if is_pair and jnp.issubdtype(ids.aval.dtype, jnp.integer) and ids.aval.dtype.itemsize <= 4:
                return ids, layout
        return None

    def match(self) -> Match:
        """Returns the match."""
        flags = [*self.masks, *([self.keep] if self.keep else [])]
        placed = [self.q, self.k, self.v, *([self.segments] if self.segments else []), *(flag.array for flag in flags)]
        inputs = list(dict.fromkeys(var for var, _ in placed))
        result = self.out[0]

        def replacement(choose: Choose, *values: Any) -> list[Any]:
            given = dict(zip(inputs, values, strict=True))
            dims = [pair for var, layout in placed for pair in zip(layout, given[var].shape, strict=True)]
            sizes = {axis: size for axis, size in dims if axis}  # which the check may have cut

            def arrange(one: Placed, *groups: Sequence[Axis], full: bool = True) -> Any:
                return arranged(given[one[0]], one[1], groups, sizes=sizes, full=full)

            q = arrange(self.q, self.B, self.T, [*self.K, *self.G], self.H)
            k, v = (arrange(one, self.B, self.S, self.K, of) for one, of in ((self.k, self.H), (self.v, self.V)))
            ids = arrange(self.segments, self.B, self.T).astype(jnp.int32) if self.segments else None
            terms = [arrange(flag.array, *self.groups, full=False) == flag.when for flag in flags]
            out = self._attend(choose, q, k, v, ids, terms)
            order, layout = [*self.B, *self.T, *self.K, *self.G, *self.V], [axis for axis in self.out[1] if axis]
            out = out.reshape([sizes[axis] for axis in order]).transpose([order.index(axis) for axis in layout])
            return [out.reshape([sizes[axis] if axis else 1 for axis in self.out[1]]).astype(result.aval.dtype)]

        return Match(
            op=_OP,
            eqns=self.graph.between([self.q[0], self.k[0], self.v[0]], [result], without=inputs),
            inputs=inputs,
            outputs=[result],
            replacement=replacement,
            source=self.graph.source(self.last),
            uncut=[(self.v[0], dim) for dim, axis in enumerate(self.v[1]) if axis in self.V],
            facts=self._facts(),
        )

    def _attend(self, choose: Choose, q: Any, k: Any, v: Any, ids: Any, terms: Sequence[Any]) -> Any:
        scale, softcap, window = self.function.scale, self.function.softcap, self.window
        has_scale = math.isclose(scale, 1 / math.sqrt(q.shape[-1]), rel_tol=1e-6)
        if has_scale and softcap is None and self.causal and not terms:
            shape = {"dtype": q.dtype, "has_segments": ids is not None, "window": window}
            name = choose(attention.OP, attention.describe_call(q.shape, k.shape[2], **shape))
            return attention.attention(q, k_BSKH=k, v_BSKH=v, segment_ids_BT=ids, implementation=name, window=window)
        num_masks = len(self.masks)
        variant = chunked_attention.Variant(
            causal=self.causal,
            scale=None if has_scale else scale,
            softcap=softcap,
            masks=tuple(terms[:num_masks]),
            keep=terms[num_masks] if self.keep else None,
            keep_factor=self.keep_factor,
        )
        return chunked_attention.attention(q, k, v, segment_ids_BT=ids, window=window, variant=variant)

    def _facts(self) -> str:
        kind = "causal" if self.causal else "bidirectional"
        facts = [kind if self.window is None else f"causal, window {self.window}", f"scale {self.function.scale:.4g}"]
        facts += [f"softcap {self.function.softcap:.4g}"] if self.function.softcap else []
        facts += ["segments"] if self.segments else []
        facts += [f"{len(self.masks)} masks"] if self.masks else []
        facts += ["dropout"] if self.keep else []
        sizes = map(size_of, (self.B, self.T, self.S, [*self.K, *self.G], self.K, self.H))
        return ", ".join(facts) + ", B {} T {} S {} N {} K {} H {}".format(*sizes)
