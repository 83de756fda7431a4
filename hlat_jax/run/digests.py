"""The digests of a run: of its state, and of a microbatch that is computed again."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from hlat_jax.batch import Batch
from hlat_jax.parallel.digests import PROBE, Replicas, adds_exactly, find_replicas, gather_digests
from hlat_jax.program import RunProgram
from hlat_jax.step import MicrobatchStep


@dataclasses.dataclass(frozen=True)
class StateDigest:
    """The digests of the state of a run.

    Attributes:
      compiled: returns the compiled (state, PROBE) -> digests of each device, see `digests.make_digest`.
      names: the names of the arrays.
      replicas: the devices that hold the same parts of them.
    """

    compiled: Callable[[], Callable[..., jax.Array]]
    names: Sequence[str]
    replicas: Replicas

    def __call__(self, state: Any) -> np.ndarray:
        """Returns the digests of all devices. All processes call it together."""
        return gather_digests(self.compiled()(state, PROBE))

    def by_name(self, digests: np.ndarray) -> dict[str, int]:
        """Returns the digest of every whole array."""
        return dict(zip(self.names, self.replicas.whole(digests), strict=True))

    def problem(self, state: Any, saved: Mapping[str, int]) -> str:
        """Returns the array of a restored state with another digest than the saved one, also at a second try, or ""."""
        for _ in range(2):
            digests = self(state)
            found = self.by_name(digests) if adds_exactly(digests) else {}
            others = [name for name in saved if found.get(name, saved[name]) != saved[name]]
            if not others:
                return ""
        more = f" ({len(others)} arrays do)" if len(others) > 1 else ""
        return f"{others[0]} has another digest than was saved{more}"


@dataclasses.dataclass(frozen=True)
class Recompute:
    """Computes the loss and the gradients of a microbatch again, with the state of a run.

    Attributes:
      step: the compiled programs of a microbatch.
      digest: the compiled (what `step` keeps, PROBE) -> digests of each device.
      names: the names of the arrays that it keeps.
      shard: the rows of this process -> microbatches on devices.
    """

    step: MicrobatchStep
    digest: Callable[..., jax.Array]
    names: Sequence[str]
    shard: Callable[[Batch], Iterable[Batch]]

    def __call__(self, state: Any, batch: Batch) -> np.ndarray:
        """Returns the digests of the values that each device computes for the first microbatch, in all processes."""
        first = next(iter(self.shard(batch)))
        _, buffer = self.step.accumulate(state, [first])
        return gather_digests(self.digest(buffer["kept"], PROBE))


def make_state_digest(compile_digest: Callable[[], Callable[..., jax.Array]], program: RunProgram) -> StateDigest:
    """Returns the digests of the states of a program. Compiles nothing yet."""
    state = program.abstract_state
    return StateDigest(functools.cache(compile_digest), array_names(state), find_replicas(state, program.layout.mesh))


def array_names(tree: Any) -> list[str]:
    """Returns the path of every array, such as params.embed."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return [jax.tree_util.keystr(path, simple=True, separator=".") for path, _ in leaves]
