"""A simulator of a Neuron core's rounding: every cast to bf16 and every bf16 result, to nearest or stochastically.

    simulated = simulate(train_step, SimulatedCore(stochastic_rounding=True))
    state, metrics = simulated((seed, step), state, batch, learning_rate)

Apply it to the function that contains `jax.grad`, such as a whole training step. Its rules follow Neuron's
documentation, and have not been compared with a device.

A value is *simulated*, as bf16, if it is declared bf16. With `auto_cast="all"` an fp32 value is simulated too if it is
computed from a floating-point argument. Values computed only from integers and constants are computed as declared, as
if on the host. They are rounded to nearest if they meet others. Examples are positions, tables of RoPE and bias
corrections of Adam.

Each primitive of JAX reads simulated operands, computes in fp32, and rounds its result once. A core that fuses several
primitives into one instruction rounds less often. Moves, selections, maxima and negations do not round.

Products, sums, scatter-adds and all-reduces accumulate in fp32 and round once. The order of the terms is XLA's. A
tensor engine adds up tiles of 128 terms in turn. That changes 2 in 10,000 bf16 results of products of 512 terms, by
one step of bf16. It would take the simulator up to 1.7 times as long. `jax.checkpoint` draws new bits when it computes
again, so a recomputed value may differ from the first one.

`precision.random_bits` makes the bits from the words of the call, the number of the equation, the iterations of loops,
and the index of the element. The same words give the same bits. Another program draws other bits, even if it
computes the same values.

Outside `shard_map` the index is the index in the global array. Bits then depend neither on the mesh nor on the number
of processes nor on the sharding. Inside, it is the index in the device's part, with the position of the device along
the mesh axes over which the value varies. So replicas of a value get the same bits and its shards different bits, which
depend on the number of shards. Sums over a sharded dimension may differ from mesh to mesh by the order of their terms.

Source: AWS Neuron documentation: neuronx-cc CLI reference (`--auto-cast`), runtime configuration
(`NEURON_RT_STOCHASTIC_ROUNDING_EN`, which applies to every cast from fp32); HLAT, arXiv 2404.10630, section III-D.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend import core as jax_core
from jax.extend import source_info_util

from hlat_jax.passes import origins
from hlat_jax.passes.interpret import Body, Compound, bind_shard_map, compound, evaluate
from hlat_jax.passes.jaxpr import inner_jaxprs, is_inexact, place_of, primitives, rebind, trace_call
from hlat_jax.passes.products import PRODUCTS
from hlat_jax.precision import random_bits, stochastic_round

AUTO_CAST = ("none", "matmult", "all")

# Each element of the result is one of an operand, or is exact in bf16; or the result is no floating-point number.
EXACT = primitives(
    """
    neg abs sign max min clamp select_n floor ceil round copy copy_p name stop_gradient optimization_barrier
    broadcast_in_dim reshape transpose squeeze expand_dims slice dynamic_slice dynamic_update_slice pad rev concatenate
    stack unstack split gather scatter scatter-min scatter-max reduce_max reduce_min reduce_window_max cummax cummin
    sort top_k argmax argmin is_finite eq ne lt le gt ge sharding_constraint reshard device_put pvary pcast pbroadcast
    all_gather all_gather_invariant all_to_all ppermute pmax pmin reduce_precision split_tangent with_tangent
    """
)
# The result is rounded once.
ROUNDED = PRODUCTS | primitives(
    """
    add sub add_any mul div rem pow integer_pow square one_minus_square sqrt rsqrt cbrt exp exp2 expm1 log log1p log2
    tanh logistic erf erfc erf_inv lgamma digamma sin cos tan asin acos atan atan2 sinh cosh asinh acosh atanh
    reduce_sum reduce_prod cumsum cumprod cumlogsumexp reduce_window_sum select_and_scatter_add
    scatter-add scatter-sub scatter-mul psum psum_invariant reduce_scatter
    convert_element_type iota saturated_cast bitcast_convert_type
    """
)
_SCATTERS = primitives("scatter scatter-add scatter-sub scatter-mul scatter-min scatter-max")
_BF16, _FP32 = jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float32)
_DTYPES = ("new_dtype", "preferred_element_type", "dtype", "low")  # parameters that may name the dtype of the result


@dataclasses.dataclass(frozen=True)
class SimulatedCore:
    """The rounding of the simulated core.

    Attributes:
      auto_cast: values to round, as in `--auto-cast` of neuronx-cc. "none" rounds only values declared bf16, and
        "matmult" also operands of fp32 products. "all" rounds every fp32 value, as `XLA_USE_BF16=1` of PyTorch/XLA
        does, with which HLAT-7B was trained.
      stochastic_rounding: whether to round stochastically, as with `NEURON_RT_STOCHASTIC_ROUNDING_EN`, or to nearest
        even.

    Raises:
      ValueError: another value of `auto_cast`.
    """

    auto_cast: str = "none"
    stochastic_rounding: bool = False

    def __post_init__(self):
        if self.auto_cast not in AUTO_CAST:
            raise ValueError(f"SimulatedCore.auto_cast={self.auto_cast!r} must be one of {', '.join(AUTO_CAST)}.")


def simulate(fn: Callable, core: SimulatedCore) -> Callable:
    """Returns a function of `(words, *args, **kwargs)` that computes `fn` of the arguments on the simulated core.

    Results have the same shapes and dtypes as without the simulator. `words` are uint32 scalars that seed the random
    bits, such as a seed and the number of a step. Without stochastic rounding they have no effect.

    Args:
      fn: a function that JAX can trace, gradients included, of pytrees of arrays and of anything else.
      core: the rounding.

    Raises:
      ValueError: at a call, an unknown operation with bf16 values (with its source line), or a derivative of the call.
    """

    @functools.wraps(fn)
    def simulated(words: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
        closed, leaves, tree = trace_call(fn, args, kwargs)
        simulation, word = _Simulation(core), None
        if core.stochastic_rounding:
            word = _word(tuple(jnp.asarray(word).astype(jnp.uint32) for word in words), "simulate")
        site = _Site(word, "")
        values = []
        for number, (leaf, aval) in enumerate(zip(leaves, closed.in_avals, strict=True)):
            labels = frozenset({origins.DATA}) if is_inexact(aval) else origins.NONE
            array = _carrier(_without_derivative(jnp.asarray(leaf)) if is_inexact(aval) else leaf, aval)
            if simulation.is_simulated(aval, labels) and aval.dtype != _BF16:
                array = simulation.rounded(array, labels, site.inside(f"argument {number}"))
            values.append(_Value(array, labels))
        outs = simulation.call(closed, values, site)
        declared = [jnp.asarray(out.array, aval.dtype) for out, aval in zip(outs, closed.out_avals, strict=True)]
        return jax.tree.unflatten(tree, declared)

    return simulated


def simulate_step(step: Callable, *, core: SimulatedCore) -> Callable:
    """Returns a training step, (state, batch, learning_rate) -> (state, metrics), on the simulated core.

    The seed in the state and the number of the step give the random bits. So a resumed run draws the same bits as a
    run without a break.
    """

    @functools.wraps(step)
    def simulated_step(state: Any, batch: Any, learning_rate: Any = None) -> tuple:
        words = (state["opt_state"]["seed"], state["step"]) if core.stochastic_rounding else ()
        return simulate(step, core)(words, state, batch, learning_rate)

    return simulated_step


@jax.custom_jvp
def _without_derivative(array: jax.Array) -> jax.Array:
    return array


@_without_derivative.defjvp
def _refuse(primals, tangents):
    raise ValueError(
        "a simulated function has no derivative. To round the backward pass too, simulate the function that contains "
        "jax.grad:\n  simulate(jax.grad(loss), core)"
    )


def _carrier(array: Any, aval: Any) -> Any:
    """Returns what holds a value of this type: bf16 numbers are held in fp32, so that XLA adds no roundings."""
    return jnp.asarray(array, _FP32) if getattr(aval, "dtype", None) == _BF16 else array


class _Value(NamedTuple):
    """A value of the simulated program, and its labels, see `origins`."""

    array: Any
    labels: origins.Labels


@dataclasses.dataclass(frozen=True)
class _Site:
    """What the random bits of an equation are made of, but for the index of the element.

    Attributes:
      word: uint32 scalar, a hash of the words of the call and of the iterations so far; None when rounding to nearest.
      path: numbers of the equation and of those around it.
      axes: manual mesh axes with more than one device, in the order of the mesh.
      place: "file:line:column (function)" of the equation.
    """

    word: Any
    path: str
    axes: tuple[str, ...] = ()
    place: str = ""

    def inside(self, part: int | str, *, place: str = "") -> _Site:
        return dataclasses.replace(self, path=f"{self.path}/{part}", place=place or self.place)

    def iteration(self, index: jax.Array) -> _Site:
        if self.word is None:
            return self
        return dataclasses.replace(self, word=_word((self.word, index.astype(jnp.uint32)), self.path))

    def bits(self, shape: tuple[int, ...], labels: origins.Labels) -> jax.Array:
        axes = tuple(axis for axis in self.axes if axis in labels)
        words = (self.word, jax.lax.axis_index(axes).astype(jnp.uint32)) if axes else (self.word,)
        return random_bits(words, self.path, shape)


def _word(words: tuple[jax.Array, ...], name: str) -> jax.Array:
    """Returns a uint32 scalar, a hash of the words and the name.

    XLA never fuses a sort, so that no loop over the elements computes this hash. LLVM would look at each of its
    operations 2^n times, where n is the number of those before it, and a chain of a few hashes would compile for ever.
    """
    return jax.lax.sort(random_bits(words, name, (2,)))[0]


class _Simulation:
    """Runs jaxprs on the simulated core."""

    def __init__(self, core: SimulatedCore):
        self.core = core

    def is_simulated(self, aval: Any, labels: origins.Labels) -> bool:
        """Returns whether a value of this type is bf16 on the core."""
        dtype = getattr(aval, "dtype", None)
        return dtype == _BF16 or (self.core.auto_cast == "all" and dtype == _FP32 and origins.DATA in labels)

    def rounded(self, array: Any, labels: origins.Labels, site: _Site) -> Any:
        """Returns fp32 numbers rounded to bf16, held in fp32."""
        if not self.core.stochastic_rounding:
            return jax.lax.reduce_precision(array, exponent_bits=8, mantissa_bits=7)
        return stochastic_round(array, _BF16, bits=site.bits(array.shape, labels)).astype(_FP32)

    def meets(self, value: _Value, aval: Any, wanted: origins.Labels) -> Any:
        """Returns the array of a value that joins others with these labels: if they are simulated, it is rounded."""
        if self.is_simulated(aval, wanted) and not self.is_simulated(aval, value.labels):
            return jax.lax.reduce_precision(jnp.asarray(value.array), exponent_bits=8, mantissa_bits=7)
        return value.array

    def call(self, closed: jax_core.ClosedJaxpr, values: Sequence[_Value], site: _Site) -> list[_Value]:
        """Returns the results of a jaxpr."""
        numbers = itertools.count()

        def on_equation(eqn: jax_core.JaxprEqn, values: list[_Value]) -> list[_Value]:
            # JAX does not name its own code: then the line that called it
            here = site.inside(next(numbers), place=source_info_util.summarize(eqn.source_info))
            labels, inside = origins.labels_of_results(eqn, [value.labels for value in values]), compound(eqn)
            with place_of(eqn):
                if inside is None:
                    arrays = _operation(self, eqn, values, labels, here)
                else:
                    arrays = _compound(self, inside, values, labels, here)
            return list(map(_Value, arrays, labels))

        consts = zip(closed.consts, closed.jaxpr.constvars, strict=True)
        consts = [_Value(_carrier(const, var.aval), origins.constant_labels(const)) for const, var in consts]
        return evaluate(closed.jaxpr, [*consts, *values], on_equation, on_literal=_literal)

    def body(self, body: Body, arrays: Sequence[Any], labels: Sequence, *, site: _Site, wanted: Sequence = ()) -> list:
        """Returns the arrays of the results of a body for inputs with these labels.

        With `wanted`, the labels of what joins them with others: the carry of a loop, the result of a `cond`.
        """
        outs = self.call(body.closed, list(map(_Value, arrays, labels)), site)
        wanted = wanted or [out.labels for out in outs]
        return [self.meets(out, *each) for out, *each in zip(outs, body.closed.out_avals, wanted, strict=True)]


def _literal(literal: jax_core.Literal) -> _Value:
    return _Value(_carrier(literal.val, literal.aval), origins.NONE)


def _operation(sim: _Simulation, eqn: jax_core.JaxprEqn, values: list[_Value], outs: list, site: _Site) -> list[Any]:
    """Returns the results of an equation without bodies."""
    name, changed = eqn.primitive.name, {}
    operands, own = [value.array for value in values], [value.labels for value in values]
    atoms = [*eqn.invars, *eqn.outvars]
    has_simulated = any(sim.is_simulated(atom.aval, of) for atom, of in zip(atoms, [*own, *outs], strict=True))
    if name not in EXACT | ROUNDED:
        if has_simulated or any(True for _ in inner_jaxprs(eqn)):
            raise ValueError(
                f"{site.place}: the simulator does not know the operation {name}. Compute it outside of the simulated "
                "function, or add it to EXACT or ROUNDED of hlat_jax.passes.neuron_simulator."
            )
        return rebind(eqn, operands)
    if name in PRODUCTS and sim.core.auto_cast == "matmult":
        parts = enumerate(zip(operands, eqn.invars, own, strict=True))
        operands = [
            sim.rounded(array, of, site.inside(f"operand {number}")) if atom.aval.dtype == _FP32 else array
            for number, (array, atom, of) in parts
        ]
    if not has_simulated:
        return rebind(eqn, operands)
    if name not in origins.EACH:
        everything = frozenset().union(*own)
        parts = zip(map(_Value, operands, own), eqn.invars, strict=True)
        operands = [sim.meets(value, atom.aval, everything) for value, atom in parts]
    if name == "bitcast_convert_type":  # of the bits of bf16
        (array,), (atom,), (out,) = operands, eqn.invars, eqn.outvars
        return [_carrier(rebind(eqn, [jnp.asarray(array, atom.aval.dtype)])[0], out.aval)]
    if name == "saturated_cast":
        limit = jnp.float32(jnp.finfo(_BF16).max)
        results = [jnp.where(jnp.isinf(operands[0]), operands[0], jnp.clip(operands[0], -limit, limit))]
    elif name in _SCATTERS:  # the jaxpr among the parameters is of the declared dtype
        given = {key: eqn.params[key] for key in ("indices_are_sorted", "unique_indices", "mode")}
        scatter = getattr(jax.lax, name.replace("-", "_"))
        results = [scatter(*operands, eqn.params["dimension_numbers"], **given)]
    else:
        changed = {key: _FP32 for key in _DTYPES if eqn.params.get(key) == _BF16}
        if name in PRODUCTS:
            changed |= {"preferred_element_type": _FP32, "precision": jax.lax.Precision.HIGHEST}
        results = rebind(eqn, operands, **changed)
    if name in EXACT or (name == "convert_element_type" and sim.is_simulated(eqn.invars[0].aval, own[0])):
        return results
    return [
        sim.rounded(result, of, site.inside(number)) if sim.is_simulated(var.aval, of) else result
        for number, (result, var, of) in enumerate(zip(results, eqn.outvars, outs, strict=True))
    ]


def _compound(sim: _Simulation, inside: Compound, values: list[_Value], outs: list, site: _Site) -> list[Any]:
    """Returns the results of an equation with bodies, each of which runs on the simulated core."""
    eqn, (body, *_) = inside.eqn, inside.bodies
    arrays, labels = [value.array for value in values], [value.labels for value in values]
    if inside.name == "shard_map":
        return _shard_map(sim, inside, arrays, labels, site)
    if inside.has_branches:
        return inside.bind_numbered(
            arrays,
            lambda body, number, inputs: sim.body(body, inputs, labels[1:], site=site.inside(number), wanted=outs),
        )
    if inside.carried is not None:
        joined = origins.labels_in_loop(inside, labels)
        arrays = [sim.meets(*each) for each in zip(values, (atom.aval for atom in eqn.invars), joined, strict=True)]

        def trip(body: Body, number: Any, inputs: list[Any]) -> list[Any]:
            if body is inside.condition:
                return sim.body(body, inputs, body.inputs(joined), site=site.inside("condition").iteration(number))
            return sim.body(body, inputs, body.inputs(joined), site=site.iteration(number), wanted=outs)

        return inside.bind_numbered(arrays, trip)
    # derivative rules have done their work in the trace of the gradient
    if eqn.params.get("differentiated"):  # `jax.checkpoint`: compilers must not find the values of the first pass again
        arrays = jax.lax.optimization_barrier(arrays)
    results = sim.body(body, arrays, labels, site=site)
    placed = eqn.params.get("out_shardings") or [None] * len(results)
    return [
        jax.lax.with_sharding_constraint(result, to) if isinstance(to, jax.sharding.Sharding) else result
        for result, to in zip(results, placed, strict=True)
    ]


def _shard_map(sim: _Simulation, inside: Compound, arrays: list, labels: list, site: _Site) -> list[Any]:
    (body,), mesh, num = inside.bodies, inside.eqn.params["mesh"], len(arrays)
    manual = {*site.axes, *origins.manual_axes(inside.eqn)}
    axes = tuple(axis for axis in mesh.axis_names if axis in manual and mesh.shape[axis] > 1)

    def local(*arrays: Any) -> list[Any]:
        at = dataclasses.replace(site, word=None if site.word is None else arrays[num], axes=axes)
        return sim.body(body, arrays[:num], origins.labels_in_shard_map(inside.eqn, labels), site=at)

    return bind_shard_map(inside.eqn, local, arrays, replicated=[] if site.word is None else [site.word])
