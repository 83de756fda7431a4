"""Operator dialects: an op is a contract, and several implementations of it of which one is chosen, with reasons.

Owns the choice. Refuses to know any op. Nothing falls back silently: `auto` is decided once, from the platform, before
anything is traced; a name given explicitly serves every call or raises and says why.
Source of the idea: RAF, arXiv 2303.04759; there the choice is by priority alone and a kernel that fails is passed over.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any


def _everything(**_: Any) -> list[str]:
    return []


@dataclasses.dataclass(frozen=True)
class Implementation:
    """One way to compute an op.

    Attributes:
      name: what a config calls it.
      run: the function; takes the arguments of the op's contract.
      levels: platform -> preference; `auto` takes the highest. "*" stands for every platform not named. A platform
        that is not there cannot run it.
      supports: what is known of a call, by keyword -> the reasons why it cannot be served, none when it can.
    """

    name: str
    run: Callable[..., Any]
    levels: Mapping[str, int]
    supports: Callable[..., list[str]] = _everything

    def level_on(self, platform: str) -> int | None:
        """Returns the preference on a platform; None: it does not run there."""
        return self.levels.get(platform, self.levels.get("*"))


@dataclasses.dataclass(frozen=True)
class Choice:
    """Which implementation serves on a platform.

    Attributes:
      name: of the implementation.
      passed_over: name -> why not, of all others.
    """

    name: str
    passed_over: Mapping[str, str]


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

    def choose(self, wanted: str, platform: str) -> Choice:
        """Returns the implementation that a configured name stands for on a platform.

        Args:
          wanted: a name, or "auto": the one with the highest level; of equal ones the first.
          platform: JAX's word, such as "cpu" or "neuron".

        Raises:
          ValueError: an unknown name, or one that does not run there.
        """
        levels = {name: one.level_on(platform) for name, one in self._implementations.items()}
        able = {name: level for name, level in levels.items() if level is not None}
        if wanted != "auto" and wanted not in able:
            known = ", ".join(("auto", *able))
            if wanted not in levels:
                raise ValueError(f"{self.key}={wanted!r} is not one of {known}.")
            served = " and ".join(self._implementations[wanted].levels)
            raise ValueError(f"{self.key}={wanted!r} serves {served} and not {platform}; use one of {known}.")
        name = max(able, key=able.get) if wanted == "auto" else wanted
        return Choice(name, {other: self._why_not(other, name, levels, platform) for other in levels if other != name})

    def run(self, name: str, *args: Any, **facts: Any) -> Any:
        """Returns what an implementation makes of the arguments.

        Args:
          name: as `choose` returns it.
          *args: of the op's contract.
          **facts: what `supports` is asked about.

        Raises:
          ValueError: it cannot serve this call.
        """
        implementation = self._implementations[name]
        reasons = implementation.supports(**facts)
        if reasons:
            others = ", ".join(other for other in self.names if other != name)
            raise ValueError(f"{self.key}={name!r} cannot serve: {'; '.join(reasons)}. Others are {others}.")
        return implementation.run(*args)

    def _why_not(self, other: str, chosen: str, levels: Mapping[str, int | None], platform: str) -> str:
        if levels[other] is None:
            return f"does not run on {platform}"
        return f"level {levels[other]} on {platform}, where {chosen} has {levels[chosen]}"
