"""Operator dialects. An op is a contract with several implementations, and one of them is chosen, with a reason.

Nothing falls back silently. `auto` is resolved once, before tracing, from the platform and the specs of the calls
(shapes, dtypes), by level. An explicit name is used for every call, or raises an error with the reasons.
Source: RAF, arXiv 2303.04759, which chooses only by priority and skips a kernel that fails.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

# The platform of a JAX device -> the name of its lowering platform, which is used here.
_LOWERED_AS = {"gpu": "cuda"}
# Description of an op's call, known before tracing: shapes, dtypes. See `describe_call` of each op.
CallSpec = Mapping[str, Any]


def _serves_every_call(**_: Any) -> list[str]:
    return []


@dataclasses.dataclass(frozen=True)
class Implementation:
    """One way to compute an op.

    Attributes:
      name: name in a config.
      run: function of the arguments of the op's contract.
      levels: lowering platform -> preference. `auto` takes the highest. "*" is for all other platforms. The
        implementation does not run on platforms without a level.
      unsupported_reasons: function from a CallSpec, by keyword, to reasons why it cannot run the call, [] if it can.
    """

    name: str
    run: Callable[..., Any]
    levels: Mapping[str, int]
    unsupported_reasons: Callable[..., list[str]] = _serves_every_call

    def level_on(self, platform: str) -> int | None:
        """Returns the level on a platform, or None if it does not run there."""
        platform = _LOWERED_AS.get(platform, platform)
        return self.levels.get(platform, self.levels.get("*"))


@dataclasses.dataclass(frozen=True)
class Choice:
    """The implementation of an op that a run uses.

    Attributes:
      name: name of the implementation.
      because: the reason for the choice.
      passed_over: name of each other implementation -> the reason against it.
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
      key: config key that selects the implementation, for errors.
    """

    def __init__(self, key: str):
        self.key = key
        self._implementations: dict[str, Implementation] = {}

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all implementations, in order of registration."""
        return tuple(self._implementations)

    def register(self, implementation: Implementation) -> None:
        """Adds an implementation.

        Raises:
          ValueError: an implementation of that name exists.
        """
        if implementation.name in ("auto", *self.names):
            raise ValueError(f"{self.key} already has an implementation {implementation.name!r}.")
        self._implementations[implementation.name] = implementation

    def choose(
        self,
        wanted: str,
        platform: str,
        *,
        call: CallSpec | None = None,
        excluded: Mapping[str, str] | None = None,
        preferred: Mapping[str, str] | None = None,
    ) -> Choice:
        """Returns the choice for a configured name on a platform.

        Args:
          wanted: a name, or "auto" for the highest level among the implementations that can run the call. Among equals
            it is the first registered.
          platform: JAX's name, such as "cpu" or "neuron".
          call: spec of the call. If it is None, `auto` takes only implementations that can run every call.
          excluded: name -> why it must not run on this device, for any call.
          preferred: name -> why "auto" takes it before levels, if it can run the call.

        Raises:
          ValueError: an unknown name, an implementation that does not run there or cannot run the call, or no
            implementation that can.
        """
        refusals = self.refusals(platform, call, excluded=excluded)
        if wanted != "auto":
            self._check(wanted, platform)
            if call is not None or wanted in (excluded or {}):
                self._check_serves(wanted, refusals[wanted])
            others = {name: why or f"{self.key}={wanted!r} was requested" for name, why in refusals.items()}
            return Choice(wanted, "requested", {name: why for name, why in others.items() if name != wanted})
        able = [name for name, why in refusals.items() if not why]
        if not able:
            reasons = "; ".join(f"{name}: {why}" for name, why in refusals.items())
            raise ValueError(f"{self.key} has no implementation for this call on {platform}: {reasons}.")
        if best := next((name for name in preferred or {} if name in able), ""):
            because = preferred[best]
            why_not = dict.fromkeys(able, f"{best} is preferred: {because}")
        else:
            levels = {name: self._implementations[name].level_on(platform) for name in able}
            best = max(able, key=levels.get)
            why_not = {name: f"level {levels[name]} on {platform}, where {best} has {levels[best]}" for name in able}
            because = f"level {levels[best]} on {platform}"
        return Choice(best, because, {name: refusals[name] or why_not[name] for name in refusals if name != best})

    def refusals(
        self, platform: str, call: CallSpec | None, *, excluded: Mapping[str, str] | None = None
    ) -> dict[str, str]:
        """Returns name -> the reason why an implementation cannot run a call on a platform, or "" if it can.

        Arguments are the same as for `choose`.
        """
        reasons = {}
        for name, implementation in self._implementations.items():
            why = (excluded or {}).get(name, "")
            if implementation.level_on(platform) is None:
                why = f"does not run on {platform}"
            elif call is not None:
                why = "; ".join(implementation.unsupported_reasons(**call)) or why
            elif implementation.unsupported_reasons is not _serves_every_call:
                why = why or "may not serve the call, since its shapes are not known here"
            reasons[name] = why
        return reasons

    def run(self, name: str, *args: Any, **call: Any) -> Any:
        """Returns the output of an implementation.

        Args:
          name: name that `choose` returns.
          *args: arguments of the op's contract.
          **call: CallSpec of the call.

        Raises:
          ValueError: an unknown name, or an implementation that cannot run this call.
        """
        if name not in self._implementations:
            raise ValueError(f"{self.key}={name!r} is not one of {', '.join(self.names)}.")
        self._check_serves(name, "; ".join(self._implementations[name].unsupported_reasons(**call)))
        return self._implementations[name].run(*args)

    def _check(self, wanted: str, platform: str) -> None:
        there = [name for name, one in self._implementations.items() if one.level_on(platform) is not None]
        known = ", ".join(("auto", *there))
        if wanted not in self._implementations:
            raise ValueError(f"{self.key}={wanted!r} is not one of {known}.")
        if wanted not in there:
            served = " and ".join(self._implementations[wanted].levels)
            raise ValueError(f"{self.key}={wanted!r} runs on {served}, not on {platform}. Use one of {known}.")

    def _check_serves(self, name: str, why_not: str) -> None:
        if why_not:
            others = ", ".join(other for other in self.names if other != name)
            raise ValueError(f"{self.key}={name!r} cannot serve this call, since {why_not}. Use one of auto, {others}.")
