"""Rematerialization under a memory budget: chooses the saved values by the compiler's memory analysis.

    plan = remat.fit(loss, params, batch, budget_bytes="12GiB")  # checkpoints around each layer
    grads = jax.grad(plan.fn)(params, batch)
    plan = remat.fit(layer, state, batch, budget_bytes="12GiB", step=make_step)

`segments` finds the blocks of a function without a scan, `naming` names the values, and `recompute` has their costs.
`fit` selects a set of values, compiles the program, and corrects the set until XLA's allocation is within the budget.
If no set fits, the function is changed first. `scan_segments` splits long scans, and `chunk` cuts intermediates.

Source: RAF, arXiv 2303.04759, which compares the budget with an estimate.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import gc
import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
from jax.extend import core

from hlat_jax.config import STOCK_POLICIES
from hlat_jax.facts.byte_sizes import format_bytes, parse_bytes
from hlat_jax.passes import naming
from hlat_jax.passes.chunk_pass import chunk
from hlat_jax.passes.jaxpr import RULE_WITH_TRACER, by_value, function_name, is_array, rule_with_tracer, trace_call
from hlat_jax.passes.naming import RematChoice
from hlat_jax.passes.remat_search import (
    ESTIMATE_ERROR,
    GENERAL_ADVICE,
    NoChoiceFits,
    Trials,
    first_choice,
    narrowest_region,
    search_region,
)
from hlat_jax.passes.remat_search import BudgetNotMet as BudgetNotMet
from hlat_jax.passes.remat_search import RematOptions as RematOptions
from hlat_jax.passes.remat_search import RematPlan as RematPlan
from hlat_jax.passes.remat_search import search as search
from hlat_jax.passes.remat_search import temporaries as temporaries
from hlat_jax.passes.remat_search import total_bytes as total_bytes
from hlat_jax.passes.scan_segments import nest_scans

_DEFAULT = RematOptions()
# A program is not compiled for a changed function if its predicted bytes are this many times the budget. A prediction
# was 1.7 times what XLA allocated, which fuses much of what an estimate counts.
_FAR = 3
_CHUNK_DIVISORS = (32, 8, 3)  # of the budget: chunks of the first size that changes anything are tried


@contextlib.contextmanager
def _no_collections() -> Iterator[None]:
    """Pauses Python's garbage collection, which took a tenth of the time of a search.

    It goes through all objects again and again, and the millions of a trace live until the search ends.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@_no_collections()
def fit(
    fn: Callable,
    *args: Any,
    budget_bytes: int | str,
    step: Callable[[Callable], Callable] = jax.value_and_grad,
    options: RematOptions = _DEFAULT,
    name: str = "budget_bytes",
    passes: Sequence[Callable[[Callable], Callable]] = (),
) -> RematPlan:
    """Returns a plan with `fn` transformed so that its program takes at most `budget_bytes` of temporaries per device.

    If no choice of saved values fits, long scans of `fn` are split into two nested scans, and large intermediates are
    computed in chunks. `RematPlan.changes` says which.

    Args:
      fn: the function to rematerialize, such as a layer, or a forward function with loops over layers.
      *args: arguments of `step(fn)`, arrays or shapes.
      budget_bytes: the budget, '12GiB' or an int.
      step: function from `fn` to the function of `args` that must fit, jitted if it donates or shards. By default it
        is the value and gradients of `fn`.
      options: options of the search.
      name: name of the budget's setting, for errors.
      passes: passes that `fn` goes through after its scans are split and before the choice, such as autocast.

    Raises:
      ValueError: a budget that is not a size, or (BudgetNotMet) a budget that no program tried fits.
    """
    budget = parse_bytes(budget_bytes, name=name)
    began = time.monotonic()
    own = _Form(fn, step, args, options, tuple(passes))
    plain_bytes = own.trial("", None).num_bytes
    if plain_bytes > budget and own.jaxprs and (rule := rule_with_tracer(own.jaxprs[-1])) is not None:
        raise BudgetNotMet(
            f"{name}={budget_bytes!r} is not met, since {function_name(fn)} takes {format_bytes(plain_bytes)} and "
            f"cannot be checkpointed because of {rule[0]} at {rule[1]}: {RULE_WITH_TRACER}."
        )
    tried: list[_Form] = []
    far: list[_Form] = []
    for form, policies in _forms(own, budget):
        if form.changing and form.predicted(own) > _FAR * budget:
            far.append(form)
            continue
        tried.append(form)
        try:
            if form.changing:
                form.check_not_far(budget, own)
            plan = form.plan(budget, policies=policies)
            break
        except NoChoiceFits as error:
            refused = error
    else:
        raise BudgetNotMet(f"{refused}{_other_figures(own, tried, far)}. {_advice(own, [*tried, *far])}")
    plan = dataclasses.replace(
        plan,
        plain=own.trial("", None)[:2],
        passes=form.changing,
        changes=form.changes(),
        compilations=sum(len(each.trial.compiled) for each in {*tried}),
        seconds=time.monotonic() - began,
    )
    form.end()
    return plan


@dataclasses.dataclass(eq=False)
class _Form:
    """A function with a program that must fit, as it is given, or changed by passes so that it keeps fewer bytes.

    `changing` has the passes that change `given`, `changed` the function after each, and `fn` the function after the
    passes in `later` too. `jaxprs` has the traces of `fn`, `trial` its traced `programs`, and `measured` their bytes.
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
        self.jaxprs: list[core.Jaxpr] = []
        self.measured: list[int] = []
        self.programs: dict[Any, Any] = {}  # (region, choice) -> the jitted program
        self._calls: dict[Any, Any] | None = {}  # passes take seconds: each call of `fn` is traced once
        self._ends_at_call = False
        self.trial: Any = Trials(self._traced, self._measured)

    def is_changed(self) -> bool:
        """Returns whether each of the changing passes finds something to change, and leaves the region asked for."""
        self._ends_at_call = True  # the rest of the program takes longer to trace than `fn`
        with contextlib.suppress(_Called):
            self.trial.traced("", None)
        self._ends_at_call = False
        region, served = self.options.region, naming.regions(self.jaxprs[-1]) if self.jaxprs else []
        return (region in ("auto", "whole", *served)) and all(fn.report().replacements for fn in self.changed)

    def changes(self) -> tuple[str, ...]:
        """Returns a line for each change."""
        lines = [line for fn in self.changed for line in str(fn.report()).splitlines()]
        return tuple(line for line in lines if not line.startswith("not replaced"))

    def predicted(self, own: _Form) -> int:
        """Returns the estimate, corrected by what the compiler allocates for the unchanged function `own`."""
        return self.estimate() * min(own.measured) // max(own.estimate(), 1)

    def check_not_far(self, budget: int, own: _Form) -> None:
        """Raises NoChoiceFits if keeping everything is predicted to take far too much, and keeping nothing exceeds it.

        Only the program that keeps nothing is compiled for it.
        """
        allocated = own.trial("", None).num_bytes / max(own.trial.estimate("", None), 1)
        if self.trial.estimate("", None) * allocated > _FAR * budget:
            region = narrowest_region(self.trial, self.regions(), budget)
            if (held := self.trial(region, RematChoice()).num_bytes) > budget:
                raise NoChoiceFits(f"{held:,} bytes with nothing kept")

    def estimate(self) -> int:
        """Returns the estimated bytes with nothing kept, in the region with the fewest."""
        return min(self.trial.estimate(region, RematChoice()) for region in self.regions())

    def regions(self) -> list[str]:
        """Returns the regions that serve the function."""
        if self.options.region != "auto":
            return [self.options.region]
        return naming.regions(self.jaxprs[-1]) if self.jaxprs else ["whole"]

    def plan(self, budget: int, *, policies: Sequence[str] = STOCK_POLICIES) -> RematPlan:
        """Returns the plan of the function.

        Raises:
          NoChoiceFits: no choice fits, nor one of the stock policies.
        """
        candidates = self.regions()
        is_met = self.trial("", None).num_bytes <= budget
        region = candidates[0]
        if not is_met and first_choice(self.trial, region, budget_bytes=budget, options=self.options) is None:
            region = narrowest_region(self.trial, candidates, budget)
        plan = search_region(self.trial, region, budget_bytes=budget, options=self.options, policies=policies)
        program = self.programs["" if plan.choice is None else region, plan.choice]
        if plan.choice is None or plan.choice.stock_policy:
            region = "whole"
        segments = naming.segments(self.jaxprs[-1]) if region == "segments" else []
        return dataclasses.replace(
            plan,
            fn=self.fn if plan.choice is None else naming.checkpointed(self.fn, plan.choice, region=region),
            program=program,
            region=region,
            segments=tuple(collections.Counter(segment.kind for segment in segments).values()),
        )

    def end(self) -> None:
        """Drops all traces. A later trace of a program calls the function again, as its surroundings may differ."""
        self._calls, self.trial = None, None
        self.jaxprs.clear()
        self.programs.clear()

    def _traced(self, region: str, choice: RematChoice | None) -> Any:
        fn = self.fn

        def observed(*args: Any, **kwargs: Any) -> Any:
            if self._calls is None:
                return fn(*args, **kwargs)
            leaves, structure = jax.tree.flatten((args, kwargs))
            key = structure, tuple(jax.typeof(leaf) if is_array(leaf) else by_value(leaf) for leaf in leaves)
            if key not in self._calls:
                closed, _, tree = trace_call(fn, args, kwargs)
                self._calls[key] = closed, tree, rule_with_tracer(closed.jaxpr)
            closed, tree, rule = self._calls[key]
            self.jaxprs.append(closed.jaxpr)
            if self._ends_at_call:
                raise _Called
            if rule is not None:  # it cannot run from a jaxpr
                return fn(*args, **kwargs)
            return jax.tree.unflatten(tree, core.jaxpr_as_fun(closed)(*filter(is_array, leaves)))

        observed.__name__, observed.__qualname__ = getattr(fn, "__name__", function_name(fn)), function_name(fn)
        program = self.step(observed if choice is None else naming.checkpointed(observed, choice, region=region))
        self.programs[region, choice] = program if hasattr(program, "trace") else jax.jit(program)
        return self.programs[region, choice].trace(*self.args)

    def _measured(self, traced: Any) -> int:
        self.measured.append(self.options.measure(traced))
        return self.measured[-1]


class _Called(Exception):
    """Ends a trace that is not needed after the call of the function."""


def _applied(fn: Callable, change: Callable) -> Callable:
    return change(fn)


def _forms(own: _Form, budget: int) -> Iterator[tuple[_Form, Sequence[str]]]:
    """Yields the forms of a function in the order in which they are tried, each with the stock policies that are too.

    They are the function, then with long scans split, with large intermediates in chunks, and with both, if a pass
    finds any; last, under the stock policies, which are four programs and keep more than nothing.
    """
    yield own, ()
    share = budget / own.trial("", None).num_bytes / 2  # half, since other values are kept too
    nest: dict[str, Callable] = {"nest": functools.partial(nest_scans, share=share)}
    nested = dataclasses.replace(own, changing=nest)
    has_scans = nested.is_changed()
    if has_scans:
        yield nested, ()
    for divisor in _CHUNK_DIVISORS:
        in_chunks: dict[str, Callable] = {"chunk": functools.partial(chunk, max_bytes=max(4096, budget // divisor))}
        chunked = dataclasses.replace(own, changing=in_chunks)
        if not chunked.is_changed() or chunked.estimate() >= ESTIMATE_ERROR * own.estimate():
            continue
        yield chunked, ()
        both = dataclasses.replace(own, changing=nest | in_chunks)
        if has_scans and both.is_changed():
            yield both, ()
        break
    yield own, STOCK_POLICIES


def _other_figures(own: _Form, tried: Sequence[_Form], far: Sequence[_Form]) -> str:
    """Returns the fewest bytes of each changed form, as a part of a sentence."""

    def describe(name: str, change: Any) -> str:
        if name == "nest":
            return "long scans split in two"
        return f"intermediates above {format_bytes(change.keywords['max_bytes'])} in chunks"

    def with_changes(size: str, form: _Form) -> str:
        return f", {size} with {' and '.join(itertools.starmap(describe, form.changing.items()))}"

    measured = [with_changes(format_bytes(min(form.measured)), form) for form in tried if form.changing]
    predicted = [with_changes(f"about {format_bytes(form.predicted(own))}", form) for form in far]
    return "".join((*measured, *predicted))


def _advice(own: _Form, tried: Sequence[_Form]) -> str:
    """Returns what else to try than what was tried."""
    advice = []
    plain, *others = own.measured
    if min(others, default=plain) >= plain:
        advice.append("What is saved for the backward pass is not what takes the memory.")
    elif own.jaxprs and not naming.num_loops(own.jaxprs[-1]):
        advice.append("Write blocks in a Python loop as a lax.scan, or put jax.checkpoint around each.")
    if own.options.region != "segments" and not any("chunk" in form.changing for form in tried):
        advice.append("passes.chunk finds nothing whose chunks would take fewer bytes.")
    return " ".join((*advice, GENERAL_ADVICE))
