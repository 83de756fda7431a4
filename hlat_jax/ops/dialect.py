"""Operator dialects: an op is a contract, and several implementations of it of which one is chosen, with reasons.

Owns the choice. Refuses to know any op. Nothing falls back silently: `auto` is decided once, before anything is traced,
from the platform and from what is known of the calls (shapes, dtypes); by measured times where there are some, by level
where there are none. A name given explicitly serves every call or raises and says why.
Source of the idea: RAF, arXiv 2303.04759; there the choice is by priority alone and a kernel that fails is passed over.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import jax

# What JAX calls a device's platform -> what it calls the same when it lowers for it, which is the word used here.
_LOWERED_AS = {"gpu": "cuda"}


class Timed(Protocol):
    """What the implementations took for one call, as `table.Entry` has it."""

    times: Mapping[str, float]  # implementation -> seconds
    extent: str  # what of the call was timed, where that is not all of it


class Times(Protocol):
    """Measured calls, as `table.Table` has them."""

    source: str  # what a reason calls them

    def entry(self, op_key: str, facts: Mapping[str, Any]) -> Timed | None:
        """Returns what a call with these facts took; None: it was not measured."""


def _everything(**_: Any) -> list[str]:
    return []


@dataclasses.dataclass(frozen=True)
class Implementation:
    """One way to compute an op.

    Attributes:
      name: what a config calls it.
      run: the function; takes the arguments of the op's contract.
      levels: platform, as JAX lowers for it -> preference; `auto` takes the highest. "*" stands for every platform
        not named. A platform that is not there cannot run it.
      supports: what is known of a call, by keyword -> the reasons why it cannot be served, none when it can.
    """

    name: str
    run: Callable[..., Any]
    levels: Mapping[str, int]
    supports: Callable[..., list[str]] = _everything

    def level_on(self, platform: str) -> int | None:
        """Returns the preference on a platform; None: it does not run there."""
        platform = _LOWERED_AS.get(platform, platform)
        return self.levels.get(platform, self.levels.get("*"))


@dataclasses.dataclass(frozen=True)
class Choice:
    """Which implementation serves on a platform.

    Attributes:
      name: of the implementation.
      because: why this one.
      passed_over: name -> why not, of all others.
    """

    name: str
    because: str
    passed_over: Mapping[str, str]

    def __str__(self) -> str:
        others = "".join(f"; not {name}: {why}" for name, why in self.passed_over.items())
        return f"{self.name} ({self.because}){others}"


class Op:
    """The implementations of one op.

    Args:
      key: of the config that chooses among them, for errors.
    """

    def __init__(self, key: str):
        self.key = key
        self._implementations: dict[str, Implementation] = {}

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all implementations, in the order of their registration."""
        return tuple(self._implementations)

    def register(self, implementation: Implementation) -> None:
        """Adds an implementation.

        Raises:
          ValueError: there is one of that name.
        """
        if implementation.name in ("auto", *self.names):
            raise ValueError(f"{self.key}: there is an implementation {implementation.name!r} already.")
        self._implementations[implementation.name] = implementation

    def choose(
        self, wanted: str, platform: str, *, facts: Mapping[str, Any] | None = None, times: Times | None = None
    ) -> Choice:
        """Returns the implementation that a configured name stands for on a platform.

        Args:
          wanted: a name, or "auto": of those that can serve the call the fastest measured; without times of it the one
            with the highest level, of equal ones the first.
          platform: JAX's word, such as "cpu" or "neuron".
          facts: of the call, as `supports` takes them. None: nothing is known, and `auto` takes none that may refuse.
          times: measured on such a device.

        Raises:
          ValueError: an unknown name, one that does not run there or cannot serve the call, or none that can.
        """
        refusals = self.refusals(platform, facts)
        able = [name for name, why in refusals.items() if not why]
        if wanted != "auto":
            self._check(wanted, platform, facts)
            others = {name: why or f"{self.key}={wanted!r} was asked for" for name, why in refusals.items()}
            return Choice(wanted, "asked for", {name: why for name, why in others.items() if name != wanted})
        if not able:
            said = "; ".join(f"{name}: {why}" for name, why in refusals.items())
            raise ValueError(f"{self.key} has no implementation for {platform} and this call: {said}.")
        timed = times.entry(self.key, facts) if times and facts is not None else None
        measured = [name for name in able if timed and name in timed.times]
        if measured:
            seconds = timed.times
            best = min(measured, key=seconds.get)
            why_not = {name: _slower(name, best, seconds) for name in able}
            because = f"{1e3 * seconds[best]:.4g} ms, the fastest in {times.source}{timed.extent}"
        else:
            levels = {name: self._implementations[name].level_on(platform) for name in able}
            best = max(able, key=levels.get)
            why_not = {name: f"level {levels[name]} on {platform}, where {best} has {levels[best]}" for name in able}
            because = f"level {levels[best]} on {platform}"
            if times:
                because += f"; {times.source} has no times of this call"
        return Choice(best, because, {name: refusals[name] or why_not[name] for name in refusals if name != best})

    def choose_each(
        self, wanted: str, platforms: Sequence[str], *, facts: Mapping[str, Any] | None = None
    ) -> dict[str, Choice]:
        """Returns the choice for each of several platforms that one trace is to serve, as `choose`."""
        return {platform: self.choose(wanted, platform, facts=facts) for platform in platforms}

    def refusals(self, platform: str, facts: Mapping[str, Any] | None) -> dict[str, str]:
        """Returns why each implementation cannot serve a call on a platform; "" where it can.

        Args:
          platform: JAX's word.
          facts: of the call; None: nothing is known, and an implementation that may refuse one is said to.
        """
        return {name: self._refusal(one, platform, facts) for name, one in self._implementations.items()}

    def run(self, name: str | Mapping[str, str], *args: Any, **facts: Any) -> Any:
        """Returns what an implementation makes of the arguments.

        Args:
          name: as `choose` returns it; or platform -> name: one trace that lowers to each platform's own, and for a
            platform that is not named is an error. Where all names are equal, nothing is added to the program.
          *args: of the op's contract.
          **facts: what `supports` is asked about.

        Raises:
          ValueError: it cannot serve this call, or there is none of that name.
        """
        if not isinstance(name, str):
            if not name:
                raise ValueError(f"{self.key}={name!r} names no platform; give platform -> name.")
            branches = {_LOWERED_AS.get(platform, platform): one for platform, one in name.items()}
            if len(set(branches.values())) > 1:
                # bound to their arguments: given to platform_dependent, a number that must be static would be traced
                runs = {where: functools.partial(self.run, one, *args, **facts) for where, one in branches.items()}
                return jax.lax.platform_dependent(**runs)
            (name,) = set(branches.values())
        if name not in self._implementations:
            raise ValueError(f"{self.key}={name!r} is not one of {', '.join(self.names)}; `choose` resolves auto.")
        implementation = self._implementations[name]
        reasons = implementation.supports(**facts)
        if reasons:
            raise ValueError(self._cannot_serve(name, reasons))
        return implementation.run(*args)

    def _refusal(self, one: Implementation, platform: str, facts: Mapping[str, Any] | None) -> str:
        if one.level_on(platform) is None:
            return f"does not run on {platform}"
        if facts is None:
            return "" if one.supports is _everything else "may refuse a call, and nothing is known of it here"
        return "; ".join(one.supports(**facts))

    def _check(self, wanted: str, platform: str, facts: Mapping[str, Any] | None) -> None:
        there = [name for name, one in self._implementations.items() if one.level_on(platform) is not None]
        if wanted not in there:
            known = ", ".join(("auto", *there))
            if wanted not in self._implementations:
                raise ValueError(f"{self.key}={wanted!r} is not one of {known}.")
            served = " and ".join(self._implementations[wanted].levels)
            raise ValueError(f"{self.key}={wanted!r} serves {served} and not {platform}; use one of {known}.")
        reasons = self._implementations[wanted].supports(**facts) if facts is not None else []
        if reasons:
            raise ValueError(self._cannot_serve(wanted, reasons))

    def _cannot_serve(self, name: str, reasons: Sequence[str]) -> str:
        others = ", ".join(other for other in self.names if other != name)
        return f"{self.key}={name!r} cannot serve: {'; '.join(reasons)}. Others are {others}."


def _slower(name: str, best: str, seconds: Mapping[str, float]) -> str:
    if name not in seconds:
        return "not measured"
    return f"{1e3 * seconds[name]:.4g} ms, {seconds[name] / seconds[best]:.2f} times that of {best}"
