"""Rematerialization under a memory budget: chooses what a backward pass saves, by the compiler's memory analysis.

    plan = remat.fit(loss, params, batch, budget_bytes="12GiB")   # regions: each lax.scan over layers, or each block
    grads = jax.grad(plan.fn)(params, batch)
    plan = remat.fit(layer, state, batch, budget_bytes="12GiB", step=make_step)   # make_step(layer) -> what is compiled

`segments` finds the blocks of a function without a scan, `naming` names the values, `recompute` has their costs. Here a
set of them is selected, the program compiled, and the bytes of the set corrected until XLA's allocation is within the
budget. If no set serves, the function is changed first: `scan_segments` splits long scans, `chunk` cuts intermediates.

Source: RAF, arXiv 2303.04759, which compares the budget with an estimate.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
from jax.extend import core

from hlat_jax.config import STOCK_POLICIES
from hlat_jax.facts.byte_sizes import format_bytes, parse_bytes
from hlat_jax.passes import naming
from hlat_jax.passes.chunk import chunk
from hlat_jax.passes.jaxpr import RULE_WITH_TRACER, function_name, rule_with_tracer, trace_call
from hlat_jax.passes.liveness import estimated_temporaries
from hlat_jax.passes.naming import RematChoice
from hlat_jax.passes.products import live_jaxpr, total_flops
from hlat_jax.passes.recompute import RecomputeGraph, recompute_graph
from hlat_jax.passes.scan_segments import nest_scans

_Program = tuple[str, RematChoice]  # region, choice
_Trial = Callable[[RematChoice | None], tuple[int, float, Any]]  # of one region, see `_trials`
_REGIONS = ("loops", "segments", "whole")
# After a choice that leaves less than this share of the budget unused, only the next larger one is tried.
_CLOSE = 0.02
# Another choice is compiled only if it saves more than this share of the step's work, of which recomputing everything
# is a third: a forward pass, beside one and a backward pass of twice its work.
_LEAST_GAIN = 0.01
_PREDICTION_ERROR = 1.05  # bytes that are predicted to be this many times the budget are not measured
_ESTIMATE_ERROR = 1.25  # a program is larger than another if its estimated temporaries are this many times larger
_CHUNK_DIVISORS = (32, 8, 3)  # of the budget: chunks of the first size that changes anything are tried
_GENERAL_ADVICE = "Raise the budget, or reduce the batch or microbatch of a device."


def temporaries(traced: Any) -> int:
    """Returns the bytes of temporaries that XLA allocates for a traced program on one device."""
    return _memory(traced).temp_size_in_bytes


def total_bytes(traced: Any) -> int:
    """Returns all bytes of a traced program on one device: arguments, results that do not alias one, and
    temporaries."""
    memory = _memory(traced)
    results = memory.output_size_in_bytes - memory.alias_size_in_bytes
    return memory.argument_size_in_bytes + results + memory.temp_size_in_bytes


@dataclasses.dataclass(frozen=True)
class RematOptions:
    """Options of the search for a `RematChoice`.

    Attributes:
      region: what one checkpoint covers: the body of every outermost `lax.scan` of the function (loops), each of its
        segments (segments), the function (whole), or what serves (auto): loops where there are any and the program
        fits, else whichever of these takes fewer bytes with nothing kept.
      min_bytes: smallest size of a value that may be saved: on one device under `shard_map`, over all trips of the
        loops and all calls that keep the value at one time.
      measure: traced program -> bytes, which are compared with the budget.
      max_compilations: most programs compiled, and one more for the comparison of regions; more of them come closer to
        the budget. If keeping nothing does not fit, the four `config.STOCK_POLICIES` are compiled too. They are not
        if one checkpoint around the whole function is estimated to be much larger.
    """

    region: str = "auto"
    min_bytes: int = 65536
    measure: Callable[[Any], int] = temporaries
    max_compilations: int = 8

    def __post_init__(self):
        if self.region not in ("auto", *_REGIONS):
            raise ValueError(f"region={self.region!r} must be auto, {', '.join(_REGIONS)}.")


class BudgetNotMet(ValueError):
    """None of the programs tried fits the budget; others may."""


class _NoChoiceFits(BudgetNotMet):
    """No choice of what a function saves fits; the text has the bytes measured, and no advice."""


@dataclasses.dataclass(frozen=True)
class RematPlan:
    """A choice of values to save, and the figures behind it.

    Attributes:
      choice: names of the values, or a stock policy; None if the program fits without rematerialization.
      budget_bytes: the budget.
      measured_bytes: bytes of the program, by `RematOptions.measure`.
      predicted_bytes: its bytes before it was compiled: those of full rematerialization plus those of the saved values.
      flops: FLOPs of products that the program executes on one device, counted in its trace.
      predicted_flops: FLOPs of its products, as the recompute graph predicts them.
      plain: (bytes, FLOPs) of the program without rematerialization.
      full: (bytes, FLOPs) of the program that keeps nothing; None if it was not compiled.
      compilations: number of programs compiled.
      seconds: duration of the search.
      fn: the function with the choice applied.
      region: what the choice is applied to, as in `RematOptions`; auto if the caller of `search` decides that.
      segments: number of segments of each kind, if these are the regions.
      passes: name -> pass that changed the function before the choice: "nest" (`scan_segments.nest_scans`), "chunk".
      changes: what they changed, in lines.
    """

    choice: RematChoice | None
    budget_bytes: int
    measured_bytes: int
    predicted_bytes: int
    flops: float
    predicted_flops: float
    plain: tuple[int, float]
    full: tuple[int, float] | None
    compilations: int
    seconds: float
    fn: Any = None
    region: str = "auto"
    segments: tuple[int, ...] = ()
    passes: Mapping[str, Callable] = dataclasses.field(default_factory=dict)
    changes: tuple[str, ...] = ()

    @property
    def recompute_share(self) -> float:
        """FLOPs of recomputation, relative to those of the program without it."""
        return self.flops / self.plain[1] - 1 if self.plain[1] else 0.0

    def report(self) -> str:
        """Returns a summary in a few lines."""
        kept = "everything" if self.passes else "everything: it fits without rematerialization"
        if self.choice is not None:
            policy = self.choice.stock_policy
            kept = f"what {policy} saves" if policy else ", ".join(self.choice.saved) or "nothing"
        full = "" if self.full is None else f", {format_bytes(self.full[0])} with nothing kept"
        if self.segments:
            kinds = "1 kind" if len(self.segments) == 1 else f"{len(self.segments)} kinds"
            kept += f"\nsegments   {sum(self.segments)} of {kinds}, a checkpoint around each"
        return "\n".join(
            (
                *(f"changed    {line}" for line in self.changes),
                f"kept       {kept}",
                f"bytes      {format_bytes(self.measured_bytes)} measured, "
                f"{format_bytes(self.predicted_bytes)} predicted, of {format_bytes(self.budget_bytes)}; "
                f"{format_bytes(self.plain[0])} without rematerialization{full}",
                f"products   {self.flops:.4g} FLOP, {self.predicted_flops:.4g} predicted, {self.recompute_share:+.1%}",
                f"search     {self.compilations} compilations, {self.seconds:.1f} s",
            )
        )


def fit(
    fn: Callable,
    *args: Any,
    budget_bytes: int | str,
    step: Callable[[Callable], Callable] = jax.value_and_grad,
    options: RematOptions = RematOptions(),
    name: str = "budget_bytes",
    passes: Sequence[Callable[[Callable], Callable]] = (),
) -> RematPlan:
    """Returns a plan, with `fn` transformed, whose program takes at most `budget_bytes` of temporaries per device.

    If no choice of what is saved fits, long scans of `fn` are split in two nested ones, and large intermediates are
    computed in chunks; `RematPlan.changes` says which.

    Args:
      fn: the function to rematerialize: a layer, or a forward function with loops over layers.
      *args: arguments of `step(fn)` if there is a step, else of `fn`: arrays or shapes.
      budget_bytes: '12GiB' or an int.
      step: fn -> the function of `args` whose program must fit, jitted if it donates or shards; by default its value
        and gradients.
      options: options of the search.
      name: name of the budget's setting, for errors.
      passes: passes that `fn` goes through after its scans are split and before the choice, such as autocast.

    Raises:
      ValueError: a budget that is not a size, or (BudgetNotMet) that no program tried fits.
    """
    budget = parse_bytes(budget_bytes, name=name)
    began = time.monotonic()
    own = _Form(fn, step, args, options, tuple(passes))
    plain_bytes = own.trial("", None)[0]
    if plain_bytes > budget and own.jaxprs and (rule := rule_with_tracer(own.jaxprs[-1])) is not None:
        raise BudgetNotMet(
            f"{name}={budget_bytes!r}: {function_name(fn)} takes {format_bytes(plain_bytes)} and cannot be "
            f"checkpointed: {rule[0]} at {rule[1]}: {RULE_WITH_TRACER}."
        )
    tried: list[_Form] = []
    for form, policies in _forms(own, budget):
        tried.append(form)
        try:
            plan = form.plan(budget, policies=policies)
            break
        except _NoChoiceFits as error:
            refused = error
    else:
        raise BudgetNotMet(f"{refused}{_other_figures(tried)}. {_advice(tried)}")
    return dataclasses.replace(
        plan,
        plain=own.trial("", None)[:2],
        passes=form.changing,
        changes=form.changes(),
        compilations=sum(each.trial.cache_info().currsize for each in {*tried}),
        seconds=time.monotonic() - began,
    )


@dataclasses.dataclass(eq=False)
class _Form:
    """A function whose program must fit: as it is given, or changed by passes so that it keeps fewer bytes.

    Attributes:
      given: the function as it is given.
      step, args, options: as for `fit`.
      later: passes after those that change it.
      changing: name -> pass that changes it.
      changed: the function after each of these.
      fn: the function after all passes.
      jaxprs: traces of `fn`.
      trial: see `_trials`.
      measured: the bytes of each trial.
    """

    given: Callable
    step: Callable
    args: Sequence[Any]
    options: RematOptions
    later: Sequence[Callable]
    changing: Mapping[str, Callable] = dataclasses.field(default_factory=dict)

    def __post_init__(self):
        self.changed: list[Any] = [*itertools.accumulate(self.changing.values(), _applied, initial=self.given)][1:]
        self.fn = functools.reduce(_applied, self.later, [self.given, *self.changed][-1])
        self.jaxprs: list[Any] = []
        self.measured: list[int] = []
        self.trial = _trials(self._traced, self._measured)

    def is_changed(self) -> bool:
        """Returns whether each of the changing passes finds something to change."""
        self.trial.traced("", None)
        return all(fn.report().replacements for fn in self.changed)

    def changes(self) -> tuple[str, ...]:
        """Returns a line for each change."""
        lines = [line for fn in self.changed for line in str(fn.report()).splitlines()]
        return tuple(line for line in lines if not line.startswith("not replaced"))

    def estimate(self) -> int:
        """Returns the estimated bytes with nothing kept, in the region with the fewest."""
        traced = (self.trial.traced(region, RematChoice()) for region in self.regions())
        return min(map(_estimated_bytes, traced))

    def regions(self) -> list[str]:
        """Returns the regions that serve the function."""
        if self.options.region != "auto":
            return [self.options.region]
        return naming.regions(self.jaxprs[-1]) if self.jaxprs else ["whole"]

    def plan(self, budget: int, *, policies: Sequence[str] = STOCK_POLICIES) -> RematPlan:
        """Returns the plan of the function.

        Raises:
          _NoChoiceFits: no choice fits, nor one of the stock policies.
        """
        candidates = self.regions()
        is_met = self.trial("", None)[0] <= budget
        region = candidates[0] if is_met else _narrowest(self.trial, candidates, budget)
        plan = _search(self.trial, region, budget_bytes=budget, options=self.options, policies=policies)
        if plan.choice is None or plan.choice.stock_policy:
            region = "whole"
        segments = naming.segments(self.jaxprs[-1]) if region == "segments" else []
        return dataclasses.replace(
            plan,
            fn=self.fn if plan.choice is None else naming.checkpointed(self.fn, plan.choice, region=region),
            region=region,
            segments=tuple(collections.Counter(segment.kind for segment in segments).values()),
        )

    def _traced(self, region: str, choice: RematChoice | None) -> Any:
        fn = self.fn

        def observed(*args: Any, **kwargs: Any) -> Any:
            closed, leaves, tree = trace_call(fn, args, kwargs)
            self.jaxprs.append(closed.jaxpr)
            if self.changing:  # finding chunks takes seconds: not twice
                return jax.tree.unflatten(tree, core.jaxpr_as_fun(closed)(*leaves))
            return fn(*args, **kwargs)

        observed.__name__, observed.__qualname__ = getattr(fn, "__name__", function_name(fn)), function_name(fn)
        program = self.step(observed if choice is None else naming.checkpointed(fn, choice, region=region))
        return (program if hasattr(program, "trace") else jax.jit(program)).trace(*self.args)

    def _measured(self, traced: Any) -> int:
        self.measured.append(self.options.measure(traced))
        return self.measured[-1]


def _applied(fn: Callable, change: Callable) -> Callable:
    return change(fn)


def _forms(own: _Form, budget: int) -> Iterator[tuple[_Form, Sequence[str]]]:
    """Yields the forms of a function in the order in which they are tried, each with the stock policies that are too.

    They are the function, then with long scans split, with large intermediates in chunks, and with both, if a pass
    finds any; last, under the stock policies, which are four programs and keep more than nothing.
    """
    yield own, ()
    share = budget / own.trial("", None)[0] / 2  # half, since other values are kept too
    nest: dict[str, Callable] = {"nest": functools.partial(nest_scans, share=share)}
    nested = dataclasses.replace(own, changing=nest)
    has_scans = nested.is_changed()
    if has_scans:
        yield nested, ()
    for divisor in _CHUNK_DIVISORS:
        in_chunks: dict[str, Callable] = {"chunk": functools.partial(chunk, max_bytes=max(4096, budget // divisor))}
        unchecked = {"chunk": functools.partial(in_chunks["chunk"], check=False)}  # a check compiles what it compares
        expected = dataclasses.replace(own, changing=unchecked)
        if not expected.is_changed() or expected.estimate() >= _ESTIMATE_ERROR * own.estimate():
            continue
        chunked = dataclasses.replace(own, changing=in_chunks)
        if chunked.is_changed():
            yield chunked, ()
            both = dataclasses.replace(own, changing=nest | in_chunks)
            if has_scans and both.is_changed():
                yield both, ()
            break
    yield own, STOCK_POLICIES


def _other_figures(tried: Sequence[_Form]) -> str:
    """Returns the fewest bytes of each changed form, as a part of a sentence."""

    def describe(name: str, change: Any) -> str:
        if name == "nest":
            return "long scans split in two"
        return f"intermediates above {format_bytes(change.keywords['max_bytes'])} in chunks"

    return "".join(
        f", {format_bytes(min(form.measured))} with {' and '.join(itertools.starmap(describe, form.changing.items()))}"
        for form in tried
        if form.changing
    )


def _advice(tried: Sequence[_Form]) -> str:
    """Returns what else to try than what was tried."""
    own, advice = tried[0], []
    plain, *others = own.measured
    if min(others, default=plain) >= plain:
        advice.append("What is saved for the backward pass is not what takes the memory.")
    elif own.jaxprs and not naming.num_loops(own.jaxprs[-1]):
        advice.append("Write blocks in a Python loop as a lax.scan, or put jax.checkpoint around each.")
    if not any("chunk" in form.changing for form in tried):
        advice.append("passes.chunk finds nothing whose chunks would take fewer bytes.")
    return " ".join((*advice, _GENERAL_ADVICE))


def _narrowest(trials: Any, candidates: list[str], budget_bytes: int) -> str:
    """Returns the region to search: the first if it fits, else the one that takes the fewest bytes with nothing kept.

    A region is compiled only if its estimate is not much larger than the estimate of the first.
    """
    nothing = [(region, RematChoice()) for region in candidates]
    if len(candidates) == 1 or trials(*nothing[0])[0] <= budget_bytes:
        return candidates[0]
    return min(_not_much_larger(trials, nothing), key=lambda program: trials(*program)[0])[0]


def _not_much_larger(trials: Any, programs: Sequence[_Program]) -> list[_Program]:
    """Returns the first program and the others whose estimates are not much larger; none is compiled."""
    first, *others = programs
    if not others:
        return [first]
    most = _ESTIMATE_ERROR * _estimated_bytes(trials.traced(*first))
    return [first, *(program for program in others if _estimated_bytes(trials.traced(*program)) < most)]


def _estimated_bytes(traced: Any) -> int:
    """Returns the estimated bytes of temporaries of a traced program, as if each array were whole on one device."""
    jaxpr = live_jaxpr(traced)
    return estimated_temporaries(jaxpr, [var.aval.update(sharding=None) for var in jaxpr.invars]).total


def search(
    traced: Callable[[RematChoice | None], Any], *, budget_bytes: int, options: RematOptions = RematOptions()
) -> RematPlan:
    """Returns the plan of a program that can be traced under any choice; see `fit`.

    Args:
      traced: choice, or None for no rematerialization -> the traced program.
      budget_bytes: limit of the measured bytes.
      options: options of the search.

    Raises:
      BudgetNotMet: no program tried fits.
    """
    trials = _trials(lambda _, choice: traced(choice), options.measure)
    try:
        return _search(trials, "auto", budget_bytes=budget_bytes, options=options)
    except _NoChoiceFits as refused:
        advice = "Checkpoint smaller parts, or compute large intermediates in chunks, see passes.chunk."
        raise BudgetNotMet(f"{refused}. {advice} {_GENERAL_ADVICE}") from None


def _trials(traced: Callable[[str, RematChoice | None], Any], measure: Callable[[Any], int]) -> Any:
    """Returns region, choice -> (measured bytes, FLOPs of products, the traced program), each compiled once.

    Its attribute `traced` is region, choice -> the traced program, which is not compiled.
    """
    traced_once = functools.cache(traced)

    @functools.cache
    def trial(region: str, choice: RematChoice | None) -> tuple[int, float, Any]:
        program = traced_once(region, choice)
        return measure(program), total_flops(live_jaxpr(program)), program

    trials: Any = trial
    trials.traced = traced_once
    return trials


def _search(
    trials: Any,
    region: str,
    *,
    budget_bytes: int,
    options: RematOptions,
    policies: Sequence[str] = STOCK_POLICIES,
) -> RematPlan:
    began = time.monotonic()

    def trial(choice: RematChoice | None) -> tuple[int, float, Any]:
        return trials("" if choice is None else region, choice)

    plain = trial(None)
    choice, predicted = None, None
    full: Any = None
    if plain[0] > budget_bytes:
        choice, full = RematChoice(), trial(RematChoice())
        if full[0] > budget_bytes:
            # a policy is of the function as a whole, and keeps no less than nothing
            whole = _not_much_larger(trials, [(region, choice), ("whole", choice)])[1:] if policies else []
            choice = _stock_choice(trial, budget_bytes, policies if whole else ())
        else:
            graph = recompute_graph(live_jaxpr(full[2]), min_bytes=options.min_bytes)
            if graph.sizes:
                tries = options.max_compilations - 2  # these two are compiled
                predict = _prediction(trials, region)
                choice = _search_choice(trial, graph, budget_bytes=budget_bytes, tries=tries, predict=predict)
            predicted = full[0] + graph.num_bytes(choice.saved), full[1] - graph.flops(()) + graph.flops(choice.saved)
    measured = trial(choice)
    predicted_bytes, predicted_flops = predicted or measured[:2]
    return RematPlan(
        choice,
        budget_bytes,
        measured_bytes=measured[0],
        predicted_bytes=predicted_bytes,
        flops=measured[1],
        predicted_flops=predicted_flops,
        plain=plain[:2],
        full=full and full[:2],
        compilations=trials.cache_info().currsize,
        seconds=time.monotonic() - began,
    )


def _prediction(trials: Any, region: str) -> Callable[[RematChoice], float]:
    """Returns choice -> predicted bytes: estimates on a line through the programs that keep everything and nothing."""
    (most, *_, everything), (least, *_, nothing) = trials("", None), trials(region, RematChoice())
    low = _estimated_bytes(nothing)
    slope = (most - least) / max(1, _estimated_bytes(everything) - low)
    return lambda choice: least + slope * (_estimated_bytes(trials.traced(region, choice)) - low)


def _search_choice(
    trial: _Trial,
    graph: RecomputeGraph,
    *,
    budget_bytes: int,
    tries: int,
    predict: Callable[[RematChoice], float],
) -> RematChoice:
    """Returns the cheapest choice found that fits, by a secant search for the bytes to save.

    A choice that is predicted to exceed the budget by far is not compiled. Near the budget one more choice is tried,
    since saving more may need less working memory.
    """
    fits, kept = RematChoice(), 0
    measured: float = trial(RematChoice())[0]
    full = measured
    above = graph.num_bytes(graph.cheapest()) + 1  # does not fit, or nothing more can be saved
    above_measured = None
    guess: float = budget_bytes - measured
    least_gain = _LEAST_GAIN * 3 * graph.cost(())
    for _ in range(tries):
        is_close = kept > 0 and budget_bytes - measured < _CLOSE * budget_bytes
        choice = _larger(graph, low=kept, high=above, guess=kept if is_close else guess)
        if choice is None or graph.cost(fits.saved) - graph.cost(choice.saved) < least_gain:
            break
        tried_kept = graph.num_bytes(choice.saved)
        tried_measured: float = predict(choice)
        if tried_measured <= _PREDICTION_ERROR * budget_bytes:
            tried_measured = trial(choice)[0]
        if tried_measured <= budget_bytes:
            fits, kept, measured = choice, tried_kept, tried_measured
        elif is_close:
            break
        else:
            above, above_measured = tried_kept, tried_measured
        if above_measured is None:
            slope = min(4.0, max(1.0, kept / max(measured - full, 1)))  # bytes saved per additional measured byte
        else:
            slope = (above - kept) / max(above_measured - measured, 1)
        guess = kept + slope * (budget_bytes - measured)
    return fits


def _larger(graph: RecomputeGraph, *, low: int, high: int, guess: float) -> RematChoice | None:
    """Returns a choice near `guess` that saves more than `low` and fewer than `high` bytes; None if none is found."""
    step = max(guess - low, 0.01 * (high - low))
    for _ in range(8):
        choice = RematChoice(graph.cheapest(budget_bytes=min(low + step, high - 1)))
        if low < graph.num_bytes(choice.saved) < high:
            return choice
        step *= 2
    return None


def _stock_choice(trial: _Trial, budget_bytes: int, policies: Sequence[str]) -> RematChoice:
    """Returns the stock policy that fits with the fewest FLOPs, for a program that takes more with nothing kept.

    What XLA allocates also depends on the order of its operations, which a policy changes.

    Raises:
      _NoChoiceFits: none fits.
    """
    results = {choice: trial(choice) for choice in (RematChoice(stock_policy=name) for name in policies)}
    fitting = [choice for choice, (num_bytes, *_) in results.items() if num_bytes <= budget_bytes]
    if fitting:
        return min(fitting, key=lambda choice: results[choice][1])
    full, plain = trial(RematChoice())[0], trial(None)[0]
    figures = [
        f"{full:,} bytes ({format_bytes(full)}) with nothing kept",
        f"{format_bytes(plain)} without rematerialization",
    ]
    if results:
        best = min(results, key=lambda choice: results[choice][0])
        figures.append(f"{format_bytes(results[best][0])} under {best.stock_policy}")
    raise _NoChoiceFits(
        f"a budget of {budget_bytes:,} bytes ({format_bytes(budget_bytes)}) is not met: the program takes "
        + ", ".join(figures)
    )


def _memory(traced: Any) -> Any:
    # On CPU, half of the time of compilation optimizes machine code, which has no part in the allocation.
    options = {"xla_backend_optimization_level": 0} if jax.default_backend() == "cpu" else None
    memory = traced.lower().compile(compiler_options=options).memory_analysis()
    if memory is None:
        raise ValueError("this backend has no memory analysis of programs; set RematOptions.measure.")
    return memory
