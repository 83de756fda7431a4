"""Finds attention in a jaxpr: product, scale, softcap, mask, softmax, dropout, product.

Dimensions are followed as sequences of axes (`axes`), so that the layout of the function does not matter. What
the axes are follows from who has them: queries, keys or values. `scores` reads what lies between the products.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hlat_jax.ops import attention
from hlat_jax.ops.chunked_attention import Variant, general_attention
from hlat_jax.passes.rewrite.axes import (
    ArrayAxes,
    Axis,
    all_leaves,
    arranged,
    broadcast_source,
    leaves_of,
    new_layout,
    size_of,
)
from hlat_jax.passes.rewrite.graph import Choose, EquationGraph, Match, Refusal, is_literal
from hlat_jax.passes.rewrite.scores import Chain, NotAttention, Refused, Scores, ScoreTerm

_OP = "attention"


def matches(graph: EquationGraph) -> Iterator[Match | Refusal]:
    """Yields a match or a refusal for each product of probabilities and values."""
    for eqn in graph.eqns:
        if eqn.primitive.name != "dot_general":
            continue
        for side in (0, 1):
            try:
                yield _Reader(graph, eqn, side).match()
            except NotAttention:
                continue
            except Refused as refused:
                yield Refusal(_OP, graph.source(eqn), str(refused))
            break


class _Reader:
    """Reads one candidate backwards, from the product of probabilities and values to the queries and keys."""

    def __init__(self, graph: EquationGraph, eqn: Any, side: int):
        self.graph, self.last, self.side = graph, eqn, side

    def match(self) -> Match:
        last = self.last
        probs, values = last.invars[self.side], last.invars[1 - self.side]
        probs_layout = new_layout(probs.aval.shape)
        reader = Scores(self.graph)
        keep, scores, layout, reduced = reader.softmax(probs, probs_layout)
        chain, first, scores_layout = reader.chain(scores, layout)
        q_layout, k_layout = self._operand_layouts(first, scores_layout)
        v_layout, out_layout = self._value_layouts(probs_layout)
        operands = self._operands(first, (q_layout, k_layout), (values, v_layout), set(leaves_of(reduced)))
        mask_axes = {axis for term in chain.masks for axis in all_leaves(term.layout)}
        shape = _Shape(operands, out_layout, set(leaves_of(reduced)), mask_axes)
        terms = _Terms(self, shape, chain, keep)
        _check_precision(first, last)
        return terms.match(first)

    def _operand_layouts(self, first: Any, scores: ArrayAxes) -> tuple[ArrayAxes, ArrayAxes]:
        """Returns the layouts of both operands of the first product from that of its result."""
        (left_contracted, right_contracted), (left_batch, right_batch) = first.params["dimension_numbers"]
        left, right = ([None] * len(atom.aval.shape) for atom in first.invars)
        axes = iter(scores)
        for one, other in zip(left_batch, right_batch, strict=True):
            left[one] = right[other] = next(axes)
        for layout, contracted in ((left, left_contracted), (right, right_contracted)):
            for dim in range(len(layout)):
                if layout[dim] is None and dim not in contracted:
                    layout[dim] = next(axes)
        for one, other in zip(left_contracted, right_contracted, strict=True):
            left[one] = right[other] = new_layout([first.invars[0].aval.shape[one]])[0]
        return tuple(left), tuple(right)

    def _value_layouts(self, probs: ArrayAxes) -> tuple[ArrayAxes, ArrayAxes]:
        """Returns the layouts of the values and of the result."""
        contracted, batch = self.last.params["dimension_numbers"]
        values = self.last.invars[1 - self.side]
        layout: list[Any] = [None] * len(values.aval.shape)
        for own, theirs in (*zip(batch[self.side], batch[1 - self.side], strict=True),):
            layout[theirs] = probs[own]
        out = [probs[dim] for dim in batch[self.side]]
        for own, theirs in zip(contracted[self.side], contracted[1 - self.side], strict=True):
            layout[theirs] = probs[own]
        free = [dim for dim, axes in enumerate(layout) if axes is None]
        for dim in free:
            layout[dim] = new_layout([values.aval.shape[dim]])[0]
        taken = (*batch[self.side], *contracted[self.side])
        own_free = [axes for dim, axes in enumerate(probs) if dim not in taken]
        values_free = [layout[dim] for dim in free]
        out += own_free + values_free if self.side == 0 else values_free + own_free
        return tuple(layout), tuple(out)

    def _operands(self, first: Any, layouts: Any, values: Any, reduced: set[Axis]) -> Any:
        """Returns ((queries, layout), (keys, layout), (values, layout)), without heads that are repeated."""
        has_keys = [reduced <= set(all_leaves(layout)) for layout in layouts]
        if has_keys.count(True) != 1 or reduced & set(all_leaves(layouts[has_keys.index(False)])):
            raise Refused("the softmax is not over the dimensions that only the keys have")
        number = has_keys.index(True)
        queries = first.invars[1 - number], layouts[1 - number]
        keys = first.invars[number], layouts[number]
        sources = [broadcast_source(self.graph, *one) for one in (keys, values)]
        lost = [
            set(all_leaves(one[1])) - set(all_leaves(source[1]))
            for one, source in zip((keys, values), sources, strict=True)
        ]
        if lost[0] and lost[0] == lost[1]:
            keys, values = sources
        return queries, keys, values


def _same_segments(graph: EquationGraph, term: ScoreTerm) -> tuple[Any, ArrayAxes, ArrayAxes] | None:
    """Returns (ids, layout on the queries' side, on the keys' side) of `ids[:, :, None] == ids[:, None, :]`."""
    eqn = graph.producer(term.var)
    if eqn is None or eqn.primitive.name != "eq" or term.factor != 1.0:
        return None
    (one, one_layout), (other, other_layout) = (broadcast_source(graph, atom, term.layout) for atom in eqn.invars)
    if one is not other or is_literal(one) or not jnp.issubdtype(one.aval.dtype, jnp.integer):
        return None
    return one, one_layout, other_layout


class _Shape:
    """Which axes are batch, heads, positions: B, K (key-value heads), G (query heads for each), T, S, H."""

    def __init__(self, operands: Any, out_layout: ArrayAxes, reduced: set[Axis], mask_axes: set[Axis]):
        self.operands, self.out_layout = operands, out_layout
        (self.q, q_layout), (self.k, k_layout), (self.v, v_layout) = operands
        in_q, in_k, in_v = (all_leaves(layout) for layout in (q_layout, k_layout, v_layout))
        if len({var.aval.dtype for var in (self.q, self.k, self.v)}) > 1 or not jnp.issubdtype(
            self.q.aval.dtype, jnp.floating
        ):
            raise Refused("queries, keys and values are not floats of one dtype")
        in_out = all_leaves(out_layout)
        self.S = tuple(axis for axis in in_k if axis in reduced)
        if set(self.S) != reduced or not reduced <= set(in_v) or reduced & set(in_out):
            raise Refused("the softmax is not over the dimensions that the product with the values sums")
        self.H = tuple(axis for axis in in_q if axis in in_k and axis not in in_out)
        self.V = tuple(axis for axis in in_v if axis not in in_q and axis not in in_k and axis in in_out)
        free = [axis for axis in in_q if axis not in self.H]
        if (
            set(in_out) != {*free, *self.V}
            or set(in_k) - {*free, *self.H, *self.S}
            or set(in_v) - {*free, *self.V, *self.S}
        ):
            raise Refused("a dimension of the scores is summed with the keys")
        shared = [axis for axis in free if axis in in_k or axis in in_v]
        own = [axis for axis in free if axis not in in_k and axis not in in_v]
        first = leaves_of(q_layout[0])
        has_batch = (len(q_layout) > 3 or first) and set(first) <= set(shared)
        self.B = first if has_batch else tuple(shared[:1])
        self.K = tuple(axis for axis in shared if axis not in self.B)
        self.T = self._positions(own, mask_axes)
        self.G = tuple(axis for axis in own if axis not in self.T)
        if not self.S or not self.H:
            raise Refused("there is one key or one feature")
        if size_of(self.V) != size_of(self.H):
            raise Refused(f"values have {size_of(self.V)} features, keys {size_of(self.H)}")

    def _positions(self, own: list[Axis], mask_axes: set[Axis]) -> tuple[Axis, ...]:
        masked = [axis for axis in own if axis in mask_axes]
        same_size = [axis for axis in own if axis.size == size_of(self.S)]
        for candidates in (masked, same_size, own):
            if len(candidates) == 1:
                return tuple(candidates)
        raise Refused("the dimension of the queries' positions is not known")

    def sizes(self, arrays: Sequence[Any], layouts: Sequence[ArrayAxes]) -> dict[Axis, int]:
        """Returns the size of each axis: a dimension that is one axis gives its size, which may have been cut."""
        found = {}
        for layout in layouts:
            found.update({axis: axis.size for axis in all_leaves(layout)})
        for x, layout in zip(arrays, layouts, strict=True):
            for size, axes in zip(x.shape, layout, strict=True):
                if len(leaves_of(axes)) == 1:
                    found[leaves_of(axes)[0]] = size
        return found

    def restored(self, out: Any, sizes: dict[Axis, int]) -> Any:
        """Returns the result [B, T, N, H] in the layout of the function."""
        order = [*self.B, *self.T, *self.K, *self.G, *self.V]
        leaves = all_leaves(self.out_layout)
        widths = dict(sizes)
        out = out.reshape([widths[axis] for axis in order]).transpose([order.index(axis) for axis in leaves])
        return out.reshape([math.prod(widths[axis] for axis in leaves_of(axes)) for axes in self.out_layout])


def _check_precision(*products: Any) -> None:
    """Raises Refused for products with a precision of their own, which ours do not have."""
    for product in products:
        precision = product.params["precision"]
        each = precision if isinstance(precision, tuple) else (precision,)
        if any(one not in (None, jax.lax.Precision.DEFAULT) for one in each):
            raise Refused(f"a product has precision={each[0]}")


class _Terms:
    """What the op is called with: masks that are proven by their values, segments, and the arrays of all others."""

    def __init__(self, reader: _Reader, shape: _Shape, chain: Chain, keep: ScoreTerm | None):
        self.reader, self.graph, self.shape, self.chain, self.keep = reader, reader.graph, shape, chain, keep
        self.groups = (shape.B, (*shape.K, *shape.G), shape.T, shape.S)
        if len(chain.fills) > 1:
            raise Refused("masked scores are set to different numbers")
        self.constant = np.ones((1, 1, 1, 1), bool)  # [B, N, T, S], the conjunction of constant masks
        self.segments: tuple[Any, ArrayAxes] | None = None
        self.masks: list[ScoreTerm] = []
        for term in chain.masks:
            self._add_mask(term)
        self._prove()

    def _add_mask(self, term: ScoreTerm) -> None:
        if self.graph.constant(term.var) is not None:
            self.constant = self.constant & self._folded(term)
            return
        found = _same_segments(self.graph, term)
        if found is not None and self.segments is None:
            ids, one, other = found
            sides = [set(all_leaves(layout)) for layout in (one, other)]
            batch = set(all_leaves(one)) & {*self.shape.B, *self.shape.K}
            swapped = sides == [batch | {*self.shape.S}, batch | {*self.shape.T}]
            if (sides == [batch | {*self.shape.T}, batch | {*self.shape.S}] or swapped) and len(self.shape.T) == len(
                self.shape.S
            ) == 1:
                queries, keys = (other, one) if swapped else (one, other)
                renamed = tuple(
                    tuple(self.shape.T[0] if axis is self.shape.S[0] else axis for axis in leaves_of(axes))
                    for axes in keys
                )
                if renamed == tuple(leaves_of(axes) for axes in queries) and batch <= {*self.shape.B}:
                    self.segments = ids, queries
                    return
        self.masks.append(term)

    def _folded(self, term: ScoreTerm) -> np.ndarray:
        value = self.graph.constant(term.var)
        value = value != 0 if term.factor > 0 else value == 0
        if set(all_leaves(term.layout)) - {axis for group in self.groups for axis in group}:
            raise Refused("a mask has a dimension that the scores do not have")
        sizes = {axis: axis.size for axes in (*self.groups, *term.layout) for axis in leaves_of(axes)}
        return np.asarray(arranged(value, term.layout, self.groups, sizes=sizes))

    def _prove(self) -> None:
        """Recognizes the constant mask: none, causal, or a causal band."""
        num_queries, num_keys = size_of(self.shape.T), size_of(self.shape.S)
        self.causal, self.window = False, None
        if self.segments is not None and num_queries != num_keys:
            raise Refused("segment ids with other keys than queries")
        if self.constant.all():
            return
        mask = self.constant[:1, :1]
        if (self.constant == mask).all() and mask.shape[2:] == (num_queries, num_keys) and num_queries == num_keys:
            mask = mask[0, 0]
            width = int(mask[-1].sum())
            behind = np.arange(num_queries)[:, None] - np.arange(num_keys)
            self.causal = (mask == ((behind >= 0) & (behind < width))).all()
            self.window = width if width < num_keys else None
        if not self.causal:
            raise Refused("a constant mask is neither causal nor a causal band")

    def match(self, first: Any) -> Match:
        """Returns the match."""
        shape, graph, chain, keep = self.shape, self.graph, self.chain, self.keep
        arrays: list[tuple[Any, ArrayAxes]] = [*shape.operands, *([self.segments] if self.segments else [])]
        arrays += [(term.var, term.layout) for term in (*self.masks, *([keep] if keep else []))]
        known = {axis for group in self.groups for axis in group}
        layouts = [layout for _, layout in arrays]
        if any(set(all_leaves(layout)) - known for layout in layouts[3:]):
            raise Refused("a mask has a dimension that the scores do not have")
        inputs = list(dict.fromkeys(var for var, _ in arrays))
        indices = [inputs.index(var) for var, _ in arrays]
        has_segments, masks, causal, window = self.segments is not None, self.masks, self.causal, self.window
        scale = None if math.isclose(chain.scale, 1 / math.sqrt(size_of(shape.H)), rel_tol=1e-6) else chain.scale
        out_dtype = self.reader.last.outvars[0].aval.dtype

        def replacement(choose: Choose, *values: Any) -> list[Any]:
            found = [values[index] for index in indices]
            sizes = shape.sizes(found, layouts)
            heads = (*shape.K, *shape.G)
            q = arranged(found[0], layouts[0], (shape.B, shape.T, heads, shape.H), sizes=sizes, full=True)
            k = arranged(found[1], layouts[1], (shape.B, shape.S, shape.K, shape.H), sizes=sizes, full=True)
            v = arranged(found[2], layouts[2], (shape.B, shape.S, shape.K, shape.V), sizes=sizes, full=True)
            rest = list(zip(found[3:], layouts[3:], strict=True))
            ids = None
            if has_segments:
                x, layout = rest.pop(0)
                ids = arranged(x, layout, (shape.B, shape.T), sizes=sizes, full=True).astype(jnp.int32)
            others = [arranged(x, layout, self.groups, sizes=sizes) for x, layout in rest]
            variant = Variant(
                causal=causal,
                scale=scale,
                softcap=chain.softcap,
                masks=tuple(
                    x != 0 if term.factor > 0 else x == 0 for x, term in zip(others[: len(masks)], masks, strict=True)
                ),
                keep=others[-1] if keep is not None else None,
                keep_factor=keep.factor if keep is not None else 1.0,
            )
            out = _attend(choose, q, k, v, ids, window, variant)
            return [shape.restored(out, sizes).astype(out_dtype)]

        return Match(
            op=_OP,
            eqns=_between(graph, inputs, self.reader.last, inputs[:3]),
            inputs=inputs,
            outputs=[self.reader.last.outvars[0]],
            replacement=replacement,
            source=graph.source(self.reader.last),
            uncut=[(shape.v, dim) for dim, axes in enumerate(shape.operands[2][1]) if {*leaves_of(axes)} & {*shape.V}],
            facts=self._facts(),
        )

    def _facts(self) -> str:
        shape, chain = self.shape, self.chain
        kind = "causal" if self.causal else "bidirectional"
        facts = [kind if self.window is None else f"causal, window {self.window}", f"scale {chain.scale:.4g}"]
        facts += [f"softcap {chain.softcap:g}"] if chain.softcap else []
        facts += ["segments"] if self.segments else []
        facts += [f"{len(self.masks)} masks"] if self.masks else []
        facts += ["dropout"] if self.keep is not None else []
        sizes = (size_of(one) for one in (shape.B, shape.T, shape.S, (*shape.K, *shape.G), shape.K, shape.H))
        return ", ".join(facts) + ", B {} T {} S {} N {} K {} H {}".format(*sizes)


def _attend(choose: Choose, q: Any, k: Any, v: Any, ids: Any, window: int | None, variant: Variant) -> Any:
    operands = {"k_BSKH": k, "v_BSKH": v, "segment_ids_BT": ids, "window": window}
    is_other = variant.scale or variant.softcap or variant.masks or variant.keep is not None
    if is_other or not variant.causal or k.shape[1] != q.shape[1]:
        return general_attention(q, **operands, variant=variant)
    has_segments = ids is not None
    call = attention.describe_call(q.shape, k.shape[2], dtype=q.dtype, has_segments=has_segments, window=window)
    return attention.attention(q, **operands, implementation=choose(attention.OP, call))


def _between(graph: EquationGraph, inputs: Sequence[Any], last: Any, starts: Sequence[Any]) -> list[Any]:
    """Returns the equations on the ways from `starts` to the result, in order."""
    stop = set(inputs)
    above: dict[int, Any] = {}
    todo = [last]
    while todo:
        eqn = todo.pop()
        if id(eqn) in above:
            continue
        above[id(eqn)] = eqn
        for atom in eqn.invars:
            producer = graph.producer(atom)
            if not is_literal(atom) and atom not in stop and producer is not None and not graph.is_constant(atom):
                todo.append(producer)
    reached = set(starts)
    between = []
    for eqn in graph.eqns:
        if id(eqn) in above and any(not is_literal(atom) and atom in reached for atom in eqn.invars):
            reached |= set(eqn.outvars)
            between.append(eqn)
    return between
