"""A simulator of a Neuron core's rounding: every cast to bf16 and every bf16 result, to nearest or stochastically.

    simulated = simulate(train_step, SimulatedCore(stochastic_rounding=True))
    state, metrics = simulated((seed, step), state, batch, learning_rate)

Apply it to the function that contains `jax.grad`, such as a whole training step. It is a simulator: its rules follow
Neuron's documentation, and have not been compared with a device.

A value is *simulated*, as bf16, if it is declared bf16; with `auto_cast="all"` also if it is declared fp32 and computed
from a floating-point argument. What is computed from integers and constants alone, such as positions, tables of RoPE
and bias corrections of Adam, is computed as declared, as if on the host, and rounded to nearest where it meets others.

- Each primitive of JAX reads simulated operands, computes in fp32, and rounds its result once. A core that fuses
  several into one instruction rounds less often. Moves, selections, maxima and negations do not round.
- Products, sums, scatter-adds and all-reduces accumulate in fp32 and round once. The order of the terms is XLA's, not
  that of the tiles of 128 terms of a tensor engine: adding up such tiles in turn changes 2 in 10,000 bf16 results of
  products of 512 terms, by one step of bf16, and takes up to 1.7 times as long.
- `jax.checkpoint` draws new bits where it computes again, so a recomputed value may differ from the first one.

The random bits are `precision.random_bits` of the words of the call, the number of the equation in the trace, the
iterations of the loops around it, and the index of the element. The same words give the same bits. Another program
draws other bits, even if it computes the same values.

Outside `shard_map` the index is that in the global array, so bits depend neither on the mesh nor on the number of
processes nor on how arrays are sharded. Inside, it is the index in the device's part, with the position of the device
along those mesh axes over which the value varies, in any of its elements: replicas of a value get the same bits, its
shards different ones, and the bits of a sharded value do depend on the number of shards. Sums over a sharded dimension
may differ from mesh to mesh by the order of their terms, in fp32.

Source: AWS Neuron documentation: neuronx-cc CLI reference (`--auto-cast`), runtime configuration
(`NEURON_RT_STOCHASTIC_ROUNDING_EN`, which applies to every cast from fp32); HLAT, arXiv 2404.10630, section III-D.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import source_info_util

from hlat_jax.passes import origins
from hlat_jax.passes.jaxpr import (
    CALL_JAXPRS,
    bind_shard_map,
    carry_of,
    inner_jaxprs,
    is_inexact,
    is_literal,
    place_of,
    primitives,
    rebind,
    trace_call,
)
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
    all_gather all_gather_invariant all_to_all ppermute pmax pmin reduce_precision
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
    """How the simulated core rounds.

    Attributes:
      auto_cast: as `--auto-cast` of neuronx-cc. "none": values declared bf16 alone are rounded; "matmult": operands of
        fp32 products too; "all": every fp32 value, as under `XLA_USE_BF16=1` of PyTorch/XLA, with which HLAT-7B was
        trained.
      stochastic_rounding: as `NEURON_RT_STOCHASTIC_ROUNDING_EN`: stochastically, or else to nearest even.

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

    Results have the shapes and dtypes of those of `fn`. `words` are uint32 scalars from which the random bits are made,
    such as a seed and the number of a step; without stochastic rounding they have no effect.

    Args:
      fn: a function that JAX can trace, gradients included, of pytrees of arrays and of anything else.

    Raises:
      ValueError: when called: an operation with bf16 values that the simulator does not know, with its source line; or
        the result is differentiated.
    """

    @functools.wraps(fn)
    def simulated(words: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
        closed, leaves, tree = trace_call(fn, args, kwargs)
        simulation, word = _Simulation(core), None
        if core.stochastic_rounding:
            word = _word(tuple(jnp.asarray(word).astype(jnp.uint32) for word in words), "simulate")
        site = _Site(word, "")
        labels = [frozenset({origins.DATA}) if is_inexact(aval) else origins.NONE for aval in closed.in_avals]
        arrays = []
        for number, (leaf, aval, own) in enumerate(zip(leaves, closed.in_avals, labels, strict=True)):
            array = _carrier(_without_derivative(jnp.asarray(leaf)) if is_inexact(aval) else leaf, aval)
            is_cast = simulation.is_simulated(aval, own) and aval.dtype != _BF16
            arrays.append(simulation.rounded(array, own, site.inside(f"argument {number}")) if is_cast else array)
        outs = simulation.call(closed, arrays, labels, site=site)
        declared = [jnp.asarray(out, aval.dtype) for out, aval in zip(outs, closed.out_avals, strict=True)]
        return jax.tree.unflatten(tree, declared)

    return simulated


def simulate_step(step: Callable, *, core: SimulatedCore) -> Callable:
    """Returns a training step, (state, batch, learning_rate) -> (state, metrics), on the simulated core.

    Its random bits are made from the seed in the state and the number of the step, so that a run that is resumed draws
    those of one that is not.
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
        "a simulated function has no derivative: apply the simulator to the function that contains jax.grad, such as "
        "simulate(jax.grad(loss), core), so that the backward pass is rounded too."
    )


def _carrier(array: Any, aval: Any) -> Any:
    """Returns what holds a value of this type: bf16 numbers are held in fp32, so that XLA adds no roundings."""
    return jnp.asarray(array, _FP32) if getattr(aval, "dtype", None) == _BF16 else array


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

    def meets(self, array: Any, aval: Any, own: origins.Labels, *, wanted: origins.Labels) -> Any:
        """Returns a value with the labels of those that it meets: rounded to nearest, if they are simulated."""
        if self.is_simulated(aval, wanted) and not self.is_simulated(aval, own):
            return jax.lax.reduce_precision(jnp.asarray(array), exponent_bits=8, mantissa_bits=7)
        return array

    def call(self, closed: Any, args: Sequence, labels: Sequence, *, site: _Site, wanted: Sequence = ()) -> list[Any]:
        """Returns the results of a jaxpr, closed, or open without constants, for operands with these labels.

        With `wanted`, those of the results in what joins them with others: the carry of a loop, a branch.
        """
        jaxpr, consts = origins.opened(closed)
        consts = [_carrier(const, var.aval) for const, var in zip(consts, jaxpr.constvars, strict=True)]
        found = origins.labels_of(closed, labels)
        env = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *args], strict=True))

        def read(atom: Any) -> Any:
            return _carrier(atom.val, atom.aval) if is_literal(atom) else env[atom]

        for number, eqn in enumerate(jaxpr.eqns):
            operands, own = [read(atom) for atom in eqn.invars], [origins.label(atom, found) for atom in eqn.invars]
            run, outs = _CALLS.get(eqn.primitive.name, _operation), [found[var] for var in eqn.outvars]
            # JAX does not name its own code: then the line that called it
            here = site.inside(number, place=source_info_util.summarize(eqn.source_info))
            with place_of(eqn):
                results = run(self, eqn, operands, own, outs, here)
            env.update(zip(eqn.outvars, results, strict=True))
        own = [origins.label(atom, found) for atom in jaxpr.outvars]
        parts = zip(jaxpr.outvars, own, wanted or own, strict=True)
        return [self.meets(read(atom), atom.aval, one, wanted=want) for atom, one, want in parts]


def _operation(sim: _Simulation, eqn: Any, operands: list, own: list, outs: list, site: _Site) -> list[Any]:
    """Runs an equation that calls no function."""
    name, changed = eqn.primitive.name, {}
    atoms = [*eqn.invars, *eqn.outvars]
    has_simulated = any(sim.is_simulated(atom.aval, of) for atom, of in zip(atoms, [*own, *outs], strict=True))
    if name not in EXACT | ROUNDED:
        if has_simulated or any(True for _ in inner_jaxprs(eqn)):
            raise ValueError(
                f"{site.place}: the simulator does not know the operation {name}. Compute it outside of the simulated "
                "function, or add it to EXACT or ROUNDED of hlat_jax.passes.rounding, by how it rounds."
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
        parts = zip(operands, eqn.invars, own, strict=True)
        operands = [sim.meets(array, atom.aval, of, wanted=everything) for array, atom, of in parts]
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


def _call(sim: _Simulation, eqn: Any, operands: list, own: list, outs: list, site: _Site) -> list[Any]:
    """Runs the function of a call; derivative rules have done their work in the trace of the gradient."""
    if eqn.params.get("differentiated"):  # `jax.checkpoint`: compilers must not find the values of the first pass again
        operands = jax.lax.optimization_barrier(operands)
    results = sim.call(eqn.params[CALL_JAXPRS[eqn.primitive.name]], operands, own, site=site)
    placed = eqn.params.get("out_shardings") or [None] * len(results)
    return [
        jax.lax.with_sharding_constraint(result, to) if isinstance(to, jax.sharding.Sharding) else result
        for result, to in zip(results, placed, strict=True)
    ]


def _shard_map(sim: _Simulation, eqn: Any, operands: list, own: list, outs: list, site: _Site) -> list[Any]:
    mesh, manual, num = eqn.params["mesh"], origins.manual_axes(eqn), len(operands)
    axes = tuple(axis for axis in mesh.axis_names if axis in {*site.axes, *manual} and mesh.shape[axis] > 1)

    def local(*arrays: Any) -> list[Any]:
        at = dataclasses.replace(site, word=None if site.word is None else arrays[num], axes=axes)
        return sim.call(eqn.params["jaxpr"], arrays[:num], origins.labels_in_shard_map(eqn, own), site=at)

    return bind_shard_map(eqn, local, operands, replicated=[] if site.word is None else [site.word])


def _cond(sim: _Simulation, eqn: Any, operands: list, own: list, outs: list, site: _Site) -> list[Any]:
    index, *rest = operands

    def branch(number: int, closed: Any) -> Callable:
        def run(*args: Any) -> list[Any]:
            return sim.call(closed, args, own[1:], site=site.inside(number), wanted=outs)

        return run

    return jax.lax.switch(index, [branch(number, one) for number, one in enumerate(eqn.params["branches"])], *rest)


def _entering(
    sim: _Simulation, body: Any, operands: list, own: Sequence[origins.Labels], labels: Sequence[origins.Labels]
) -> list:
    """Returns what the body of a loop reads in its first iteration."""
    parts = zip(operands, body.in_avals, own, labels, strict=True)
    return [sim.meets(array, aval, of, wanted=want) for array, aval, of, want in parts]


def _scan(sim: _Simulation, eqn: Any, operands: list, own: list, outs: list, site: _Site) -> list[Any]:
    (closed, carried), params = carry_of(eqn), eqn.params
    labels, num_carry = origins.labels_in_loop(closed, own, carried), carried.stop - carried.start
    operands = _entering(sim, closed, operands, own, labels)

    def body(carry: list, numbered: tuple) -> tuple[list, list]:
        number, walked = numbered
        args = [*operands[: carried.start], *carry, *walked]
        results = sim.call(closed, args, labels, site=site.iteration(number), wanted=outs)
        return results[:num_carry], results[num_carry:]

    numbered = jnp.arange(params["length"], dtype=jnp.uint32), operands[carried.stop :]
    order = {key: params[key] for key in ("length", "reverse", "unroll")}
    carry, stacked = jax.lax.scan(body, operands[carried], numbered, **order)
    return [*carry, *stacked]


def _while(sim: _Simulation, eqn: Any, operands: list, own: list, outs: list, site: _Site) -> list[Any]:
    condition, num_cond = eqn.params["cond_jaxpr"], eqn.params["cond_nconsts"]
    closed, carried = carry_of(eqn)
    read, operands, own = (operands[:num_cond], own[:num_cond]), operands[num_cond:], own[num_cond:]
    labels = origins.labels_in_loop(closed, own, carried, condition=condition, read=read[1])
    operands = _entering(sim, closed, operands, own, labels)

    def goes_on(numbered: tuple) -> Any:
        number, carry = numbered
        at = site.inside("condition").iteration(number)
        return sim.call(condition, [*read[0], *carry], [*read[1], *labels[carried]], site=at)[0]

    def body(numbered: tuple) -> tuple:
        number, carry = numbered
        args = [*operands[: carried.start], *carry]
        return number + 1, sim.call(closed, args, labels, site=site.iteration(number), wanted=outs)

    return jax.lax.while_loop(goes_on, body, (jnp.uint32(0), operands[carried]))[1]


_CALLS: dict[str, Callable] = {
    **dict.fromkeys(CALL_JAXPRS.keys() - {"shard_map"}, _call),
    "shard_map": _shard_map,
    "cond": _cond,
    "scan": _scan,
    "while": _while,
}
