"""Searches the values that a backward pass saves under a memory budget, by the compiler's memory analysis.

The search selects a set of values by the costs of `recompute` and compiles the program. It then corrects the bytes of
the set until XLA's allocation is within the budget.

Source: RAF, arXiv 2303.04759, which compares the budget with an estimate.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax

from hlat_jax.config import STOCK_POLICIES
from hlat_jax.facts.byte_sizes import format_bytes
from hlat_jax.passes.liveness import estimated_temporaries
from hlat_jax.passes.naming import RematChoice
from hlat_jax.passes.products import live_jaxpr, total_flops
from hlat_jax.passes.recompute import RecomputeGraph, recompute_graph

_Program = tuple[str, RematChoice]  # region, choice
_REGIONS = ("loops", "segments", "whole")
# After a choice that leaves less than this share of the budget unused, only the next larger one is tried.
_CLOSE = 0.02
# Another choice is compiled only if it saves more than this share of the step's work, of which recomputing everything
# is a third: a forward pass, on top of one and a backward pass of twice its work.
_LEAST_GAIN = 0.01
_PREDICTION_ERROR = 1.05  # bytes that are predicted to be this many times the budget are not measured
ESTIMATE_ERROR = 1.25  # a program is larger than another if its estimated temporaries are this many times larger
GENERAL_ADVICE = "Raise the budget, or reduce the batch or microbatch of a device."


def temporaries(traced: Any) -> int:
    """Returns the bytes of temporaries that XLA allocates for a traced program on one device."""
    return _memory(traced).temp_size_in_bytes


def total_bytes(traced: Any) -> int:
    """Returns the bytes of a traced program on one device: arguments, temporaries, and results that alias no
    argument."""
    memory = _memory(traced)
    results = memory.output_size_in_bytes - memory.alias_size_in_bytes
    return memory.argument_size_in_bytes + results + memory.temp_size_in_bytes


@dataclasses.dataclass(frozen=True)
class RematOptions:
    """Options of the search for a `RematChoice`.

    Attributes:
      region: extent of one checkpoint: the body of every outermost `lax.scan` of the function (loops), each of its
        segments (segments), or the function (whole). Auto is the first of these that the function has, if nothing
        kept then fits. Otherwise it is the region that takes the fewest bytes.
      min_bytes: smallest size of a value that may be saved, over all trips of the loops and all calls that keep the
        value at one time. Under `shard_map` it is the size on one device.
      measure: function from a traced program to the bytes that are compared with the budget.
      max_compilations: most programs compiled, apart from one for the comparison of regions. More programs come closer
        to the budget. If keeping nothing does not fit, the four `config.STOCK_POLICIES` are compiled too, unless one
        checkpoint around the whole function is estimated to be much larger.
    """

    region: str = "auto"
    min_bytes: int = 65536
    measure: Callable[[Any], int] = temporaries
    max_compilations: int = 8

    def __post_init__(self):
        if self.region not in ("auto", *_REGIONS):
            raise ValueError(f"region={self.region!r} must be auto, {', '.join(_REGIONS)}.")


class BudgetNotMet(ValueError):
    """None of the programs tried fits the budget, although others may."""


class NoChoiceFits(BudgetNotMet):
    """No choice of saved values fits. The text has the measured bytes, and no advice."""


@dataclasses.dataclass(frozen=True)
class RematPlan:
    """A choice of values to save, and the figures behind it.

    Attributes:
      choice: names of the values, or a stock policy. None if the program fits without rematerialization.
      budget_bytes: the budget.
      measured_bytes: bytes of the program, by `RematOptions.measure`.
      predicted_bytes: bytes predicted before compilation. They are the bytes of the program with nothing kept, measured
        or estimated, plus the saved values.
      flops: FLOPs of products that the program executes on one device, counted in its trace.
      predicted_flops: FLOPs of the products, as the recompute graph predicts them.
      plain: (bytes, FLOPs) of the program without rematerialization.
      full: (bytes, FLOPs) of the program that keeps nothing. None if it was not compiled.
      compilations: number of programs compiled.
      seconds: duration of the search.
      fn: the function with the choice applied.
      program: the jitted program of `fn` that was measured. It is not traced again for the same arguments.
      region: the regions of the checkpoints, as in `RematOptions`. It is auto if the caller of `search` decides.
      segments: number of segments of each kind, if these are the regions.
      passes: name -> pass that changed the function before the choice, "nest" (`scan_segments.nest_scans`) or "chunk".
      changes: lines with the changes by these passes.
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
    program: Any = None
    region: str = "auto"
    segments: tuple[int, ...] = ()
    passes: Mapping[str, Callable] = dataclasses.field(default_factory=dict)
    changes: tuple[str, ...] = ()

    @property
    def recompute_share(self) -> float:
        """FLOPs of recomputation, relative to the FLOPs of the program without it."""
        return self.flops / self.plain[1] - 1 if self.plain[1] else 0.0

    def report(self) -> str:
        """Returns a summary in a few lines."""
        kept = "everything" if self.passes else "everything, since it fits without rematerialization"
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
                f"bytes      {format_bytes(self.measured_bytes)} measured, of a budget of "
                f"{format_bytes(self.budget_bytes)}; "
                f"{format_bytes(self.predicted_bytes)} estimated before compilation; "
                f"{format_bytes(self.plain[0])} without rematerialization{full}",
                f"products   {self.flops:.4g} FLOP, {self.predicted_flops:.4g} predicted, {self.recompute_share:+.1%}",
                f"search     {self.compilations} compilations, {self.seconds:.1f} s",
            )
        )


def search(
    traced: Callable[[RematChoice | None], Any], *, budget_bytes: int, options: RematOptions = RematOptions()
) -> RematPlan:
    """Returns the plan of a program that can be traced under any choice, see `remat.fit`.

    Args:
      traced: function from a choice, or None for no rematerialization, to the traced program.
      budget_bytes: limit of the measured bytes.
      options: options of the search.

    Raises:
      BudgetNotMet: no program tried fits.
    """
    trials = Trials(lambda _, choice: traced(choice), options.measure)
    try:
        return search_region(trials, "auto", budget_bytes=budget_bytes, options=options)
    except NoChoiceFits as refused:
        advice = "Checkpoint smaller parts, or compute large intermediates in chunks with passes.chunk."
        raise BudgetNotMet(f"{refused}. {advice} {GENERAL_ADVICE}") from None


class Trial(NamedTuple):
    """A program that was compiled.

    Attributes:
      num_bytes: measured bytes.
      flops: FLOPs of the products.
      traced: the traced program.
    """

    num_bytes: int
    flops: float
    traced: Any


class Trials:
    """The programs of a function under all choices, each traced and compiled once.

    Args:
      traced: function (region, choice) -> the traced program.
      measure: function from a traced program to its bytes.

    Attributes:
      traced: the argument `traced`, which traces each program once and compiles nothing.
      compiled: (region, choice) -> trial of the program.
    """

    def __init__(self, traced: Callable[[str, RematChoice | None], Any], measure: Callable[[Any], int]):
        self.traced, self._measure = functools.cache(traced), measure
        self.compiled: dict[tuple[str, RematChoice | None], Trial] = {}
        self._estimates: dict[tuple[str, RematChoice | None], int] = {}

    def estimate(self, region: str, choice: RematChoice | None) -> int:
        """Returns the estimated bytes of a program, which is not compiled for it."""
        if (region, choice) not in self._estimates:
            self._estimates[region, choice] = estimated_bytes(self.traced(region, choice))
        return self._estimates[region, choice]

    def __call__(self, region: str, choice: RematChoice | None) -> Trial:
        if (region, choice) not in self.compiled:
            program = self.traced(region, choice)
            flops = total_flops(live_jaxpr(program))
            self.compiled[region, choice] = Trial(self._measure(program), flops, program)
        return self.compiled[region, choice]


def search_region(
    trials: Trials,
    region: str,
    *,
    budget_bytes: int,
    options: RematOptions,
    policies: Sequence[str] = STOCK_POLICIES,
) -> RematPlan:
    """Returns the plan of a program with checkpoints around this region, see `RematOptions`.

    Raises:
      NoChoiceFits: no choice fits, nor one of the stock `policies`, which are tried if keeping nothing does not fit.
    """
    began = time.monotonic()

    def trial(choice: RematChoice | None) -> Trial:
        return trials("" if choice is None else region, choice)

    plain = trial(None)
    choice, predicted = None, None
    full = None
    if plain.num_bytes > budget_bytes:
        nothing = RematChoice()
        start = first_choice(trials, region, budget_bytes=budget_bytes, options=options)
        if start is None:
            start, full = nothing, trial(nothing)
        if full is not None and full.num_bytes > budget_bytes:
            # a policy is of the function as a whole, and keeps no less than nothing
            whole = _not_much_larger(trials, [(region, nothing), ("whole", nothing)])[1:] if policies else []
            choice = _stock_choice(trial, budget_bytes, policies if whole else ())
        else:
            choice = start
            jaxpr = live_jaxpr(trials.traced(region, nothing))
            graph = recompute_graph(jaxpr, min_bytes=options.min_bytes)
            full_bytes = trials.estimate(region, nothing) if full is None else full.num_bytes
            if graph.sizes:
                choice = _search_choice(
                    trial,
                    graph,
                    start=start,
                    full=full_bytes,
                    budget_bytes=budget_bytes,
                    tries=options.max_compilations - sum(of in ("", region) for of, _ in trials.compiled),
                    predict=_prediction(trials, region, start),
                )
            predicted = (
                full_bytes + graph.num_bytes(choice.saved),
                total_flops(jaxpr) - graph.flops(()) + graph.flops(choice.saved),
            )
    measured = trial(choice)
    predicted_bytes, predicted_flops = predicted or measured[:2]
    return RematPlan(
        choice,
        budget_bytes,
        measured_bytes=measured.num_bytes,
        predicted_bytes=predicted_bytes,
        flops=measured.flops,
        predicted_flops=predicted_flops,
        plain=plain[:2],
        full=full and full[:2],
        compilations=len(trials.compiled),
        seconds=time.monotonic() - began,
    )


def first_choice(trials: Trials, region: str, *, budget_bytes: int, options: RematOptions) -> RematChoice | None:
    """Returns the cheapest choice that fits by the estimates, if its compiled program fits too; else None.

    A search that starts from it does not compile the program that keeps nothing. None if that program is compiled.
    """
    nothing = RematChoice()
    if (region, nothing) in trials.compiled or options.max_compilations < 3:
        return None
    room = budget_bytes / ESTIMATE_ERROR - trials.estimate(region, nothing)
    graph = recompute_graph(live_jaxpr(trials.traced(region, nothing)), min_bytes=options.min_bytes)
    if room <= 0 or not graph.sizes:
        return None
    choice = RematChoice(graph.cheapest(budget_bytes=room))
    if not choice.saved or trials.estimate(region, choice) * ESTIMATE_ERROR > budget_bytes:
        return None
    return choice if trials(region, choice).num_bytes <= budget_bytes else None


def _prediction(trials: Trials, region: str, start: RematChoice) -> Callable[[RematChoice], float]:
    """Returns choice -> predicted bytes: estimates on a line through the program that keeps everything and `start`."""

    def predict(choice: RematChoice) -> float:  # no estimate before the first call, since each takes time
        most, least = trials("", None).num_bytes, trials(region, start).num_bytes
        low = trials.estimate(region, start)
        slope = (most - least) / max(1, trials.estimate("", None) - low)
        return least + slope * (trials.estimate(region, choice) - low)

    return predict


def _search_choice(
    trial: Callable[[RematChoice | None], Trial],
    graph: RecomputeGraph,
    *,
    start: RematChoice,
    full: float,
    budget_bytes: int,
    tries: int,
    predict: Callable[[RematChoice], float],
) -> RematChoice:
    """Returns the cheapest choice found that fits, by a secant search for the bytes to save, from `start` on.

    `start` fits, and `full` is the bytes of the program that saves nothing, measured or estimated.
    A choice that is predicted to exceed the budget by far is not compiled. Near the budget one more choice is tried,
    since saving more may need less working memory. After a step that narrows the range little, its middle is tried.
    """
    fits, kept = start, graph.num_bytes(start.saved)
    measured: float = trial(start).num_bytes
    above = graph.num_bytes(graph.cheapest()) + 1  # does not fit, or nothing more can be saved
    above_measured = None
    is_narrowed = True
    least_gain = _LEAST_GAIN * 3 * graph.cost(())
    while tries > 0:
        if above_measured is None:
            slope = min(4.0, max(1.0, kept / max(measured - full, 1)))  # bytes saved per additional measured byte
        else:
            slope = (above - kept) / max(above_measured - measured, 1)
        guess = kept + slope * (budget_bytes - measured) if is_narrowed else (kept + above) / 2
        is_close = kept > 0 and budget_bytes - measured < _CLOSE * budget_bytes
        choice = _larger(graph, low=kept, high=above, guess=kept if is_close else guess)
        if choice is None or graph.cost(fits.saved) - graph.cost(choice.saved) < least_gain:
            break
        tried_kept = graph.num_bytes(choice.saved)
        tried_measured: float = predict(choice)
        if tried_measured <= _PREDICTION_ERROR * budget_bytes:
            tried_measured = trial(choice).num_bytes
            tries -= 1
        if tried_measured <= budget_bytes:
            fits, kept, measured, is_narrowed = choice, tried_kept, tried_measured, True
        elif is_close:
            break
        else:
            is_narrowed = tried_kept < (kept + above) / 2
            above, above_measured = tried_kept, tried_measured
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


def _stock_choice(
    trial: Callable[[RematChoice | None], Trial], budget_bytes: int, policies: Sequence[str]
) -> RematChoice:
    """Returns the stock policy that fits with the fewest FLOPs, for a program that takes more with nothing kept.

    What XLA allocates also depends on the order of its operations, which a policy changes.

    Raises:
      NoChoiceFits: none fits.
    """
    results = {choice: trial(choice) for choice in (RematChoice(stock_policy=name) for name in policies)}
    fitting = [choice for choice, (num_bytes, *_) in results.items() if num_bytes <= budget_bytes]
    if fitting:
        return min(fitting, key=lambda choice: results[choice].flops)
    full, plain = trial(RematChoice()).num_bytes, trial(None).num_bytes
    figures = [
        f"{full:,} bytes ({format_bytes(full)}) with nothing kept",
        f"{format_bytes(plain)} without rematerialization",
    ]
    if results:
        best = min(results, key=lambda choice: results[choice].num_bytes)
        figures.append(f"{format_bytes(results[best].num_bytes)} under {best.stock_policy}")
    raise NoChoiceFits(
        f"a budget of {budget_bytes:,} bytes ({format_bytes(budget_bytes)}) is not met: the program takes "
        + ", ".join(figures)
    )


def narrowest_region(trials: Trials, candidates: list[str], budget_bytes: int) -> str:
    """Returns the region to search, which is the first candidate if it fits.

    Otherwise it is the one that takes the fewest bytes with nothing kept. A region is compiled only if its estimate is
    within the budget, or not much larger than the fewest.
    """
    nothing = [(region, RematChoice()) for region in candidates]
    if len(candidates) == 1:
        return candidates[0]
    if trials.estimate(*nothing[0]) > ESTIMATE_ERROR * budget_bytes:
        nothing.sort(key=lambda program: trials.estimate(*program))
    elif trials(*nothing[0]).num_bytes <= budget_bytes:
        return candidates[0]
    return min(_not_much_larger(trials, nothing), key=lambda program: trials(*program).num_bytes)[0]


def _not_much_larger(trials: Trials, programs: Sequence[_Program]) -> list[_Program]:
    """Returns the first program and the others whose estimates are not much larger; none is compiled."""
    first, *others = programs
    if not others:
        return [first]
    most = ESTIMATE_ERROR * trials.estimate(*first)
    return [first, *(program for program in others if trials.estimate(*program) < most)]


def estimated_bytes(traced: Any) -> int:
    """Returns the estimated bytes of temporaries of a traced program, as if each array were whole on one device."""
    jaxpr = live_jaxpr(traced)
    return estimated_temporaries(jaxpr, [var.aval.update(sharding=None) for var in jaxpr.invars]).total


def _memory(traced: Any) -> Any:
    # On CPU, half of the time of compilation optimizes machine code, which has no part in the allocation.
    options = {"xla_backend_optimization_level": 0} if jax.default_backend() == "cpu" else None
    memory = traced.lower().compile(compiler_options=options).memory_analysis()
    if memory is None:
        raise ValueError("this backend has no memory analysis of programs. Set RematOptions.measure.")
    return memory
