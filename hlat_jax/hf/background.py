"""Exports in the background of training: `<run folder>/huggingface/<step>/`, the same as `hf export` writes.

The loop waits only for the copy of the weights to the host, before the next step overwrites them; a thread does the
rest. A folder appears only when it is complete. With several processes, each copies its shards (each shard once), and
all but process 0 pass theirs on through files in the shared run folder; no collective is involved.
"""

from __future__ import annotations

import concurrent.futures
import json
import math
import pathlib
import shutil
from typing import Any, NamedTuple

import jax
import numpy as np

from hlat_jax.config import Config
from hlat_jax.hf.exporting import export_checkpoint
from hlat_jax.host import distributed
from hlat_jax.run.resume import EXPORTS, SHARDS
from hlat_jax.weights.hf_files import kept_companions
from hlat_jax.weights.safetensors_file import StoredTensor, Writer, read_header
from hlat_jax.weights.trained import Weights, leaves_by_name

_NO_TIMEOUT_MS = 2**31 - 1  # of a barrier: the watch of `distributed` ends processes whose peers have died


class ExportError(OSError):
    """An export could not be written; checkpoints, and the exports before it, are untouched."""


class Shard(NamedTuple):
    """A part of a parameter: its start on each axis, and its values in memory or in a file."""

    start: tuple[int, ...]
    values: np.ndarray | StoredTensor

    def read(self) -> np.ndarray:
        return self.values.read() if isinstance(self.values, StoredTensor) else self.values


class Exporter:
    """Exports the weights of one run, one step at a time; every process has one and calls it at the same steps."""

    def __init__(self, workdir: pathlib.Path, *, config: Config, tokenizer_sha256: str):
        """Starts the thread; writes nothing."""
        self.folder = workdir / EXPORTS
        self._config, self._tokenizer_sha256 = config, tokenizer_sha256
        self._thread = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="hlat-export")
        self._step, self._written = 0, None  # the running export, as a Future that returns its dtype

    def due(self, step: int, *, last: bool, postponed: bool = False) -> bool:
        """Returns whether to export this step now: at the interval, the last, or `postponed`, unless its export exists.

        One that is due while another is still being written is skipped, with a message: no step waits for the disk. The
        last one waits.
        """
        every = self._config.checkpoint.export_every_steps
        if not (step and (last or postponed or (every and step % every == 0))):
            return False
        mine = {
            "exists": (self.folder / str(step)).exists(),
            "busy": not (self._written is None or self._written.done()),
        }
        everyones = [json.loads(text) for text in distributed.exchange(json.dumps(mine))]
        if everyones[0]["exists"]:
            return False
        if any(each["busy"] for each in everyones) and not last:
            print(
                f"export of step {step} skipped: that of step {self._step} is still being written; raise "
                f"checkpoint.export_every_steps={every}, or export a checkpoint of that step"
            )
            return False
        return True

    def start(self, step: int, state: Any) -> None:
        """Copies the weights to the host and exports them in the background; the caller may donate `state` at once.

        Exports master weights where the state has them, as `hf export` does.

        Raises:
          ExportError: the previous export failed.
        """
        self.wait()
        params = state["opt_state"]["master"] if "master" in state["opt_state"] else state["params"]
        arrays = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), params)
        self._step = step
        self._written = self._thread.submit(self._write, step, arrays, _on_host(params))

    def check(self) -> None:
        """Raises ExportError if the export in the background has failed; does not wait."""
        if self._written is not None and self._written.done():
            self.wait()

    def wait(self) -> None:
        """Blocks until no export is under way. Raises ExportError when it failed."""
        if self._written is None:
            return
        written, self._written = self._written, None
        try:
            dtype = written.result()
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) and error.strerror else error
            raise ExportError(
                f"step {self._step} could not be exported to {self.folder / str(self._step)}: {reason}. The "
                "checkpoints are untouched: fix the cause, or set checkpoint.export_every_steps=0, then run the same "
                "command to resume."
            ) from error
        print(f"exported step {self._step} to {self.folder / str(self._step)} ({dtype})", flush=True)

    def close(self) -> None:
        """Waits for the export under way and ends the thread. Raises ExportError when that export failed."""
        try:
            self.wait()
        finally:
            self._thread.shutdown()

    def _write(self, step: int, arrays: Any, mine: dict[str, list[Shard]]) -> str:
        shards = self.folder / f"{step}{SHARDS}"
        if not distributed.is_first():
            _hand_over(mine, shards / str(jax.process_index()))
        if jax.process_count() > 1:
            distributed.barrier_of_threads(f"export/{step}", timeout_ms=_NO_TIMEOUT_MS)
        dtype = jax.tree.leaves(arrays)[0].dtype.name
        if not distributed.is_first():
            return dtype
        for path in sorted(shards.glob("*")):
            for name, parts in _handed_over(path).items():
                mine.setdefault(name, []).extend(parts)

        c, workdir = self._config, self.folder.parent
        weights = Weights(
            folder=workdir,
            model=c.model,
            step=step,
            tokenizer=c.data.tokenizer,
            tokenizer_sha256=self._tokenizer_sha256,
            begins_with_bos=c.data.prepend_bos,
            arrays=arrays,
            read_leaf=lambda name, leaf: _whole(mine[name], leaf),
            **kept_companions(workdir),
        )
        export_checkpoint(weights, self.folder / str(step))
        shutil.rmtree(shards, ignore_errors=True)
        return dtype


def _on_host(params: Any) -> dict[str, list[Shard]]:
    """Returns host copies of the shards of each parameter of which this process has replica 0.

    All transfers are started before the first is awaited.
    """
    held = {
        name: [shard for shard in leaf.addressable_shards if shard.replica_id == 0]
        for name, leaf in leaves_by_name(params).items()
    }
    for shards in held.values():
        for shard in shards:
            shard.data.copy_to_host_async()
    return {
        # a copy: on CPUs NumPy shares the memory that the next step overwrites
        name: [Shard(tuple(part.start or 0 for part in shard.index), np.array(shard.data)) for shard in shards]
        for name, shards in held.items()
    }


def _whole(parts: list[Shard], leaf: jax.ShapeDtypeStruct) -> np.ndarray:
    """Returns a parameter from the shards that cover it; a single whole shard is not copied."""
    if len(parts) == 1 and parts[0].values.shape == leaf.shape:
        return parts[0].read()
    held = sum(math.prod(part.values.shape) for part in parts)
    if held != math.prod(leaf.shape):
        raise OSError(
            f"only {held} of {math.prod(leaf.shape)} values came from the processes; the run folder must be shared."
        )
    whole = np.empty(leaf.shape, leaf.dtype)
    for part in parts:
        values = part.read()
        whole[tuple(slice(at, at + size) for at, size in zip(part.start, values.shape, strict=True))] = values
    return whole


def _hand_over(mine: dict[str, list[Shard]], path: pathlib.Path) -> None:
    """Writes shards to a safetensors file, under names with their start: `layers.mlp.down@0,0,16`."""
    named = {f"{name}@{','.join(map(str, part.start))}": part.values for name, parts in mine.items() for part in parts}
    path.parent.mkdir(parents=True, exist_ok=True)
    writer = Writer(path, tensors=named, metadata={})
    try:
        for name, values in named.items():
            writer.write(name, values)
    finally:
        writer.close()


def _handed_over(path: pathlib.Path) -> dict[str, list[Shard]]:
    """Returns name of parameter -> shards in a file of `_hand_over`, not read yet."""
    shards: dict[str, list[Shard]] = {}
    for label, stored in read_header(path).items():
        name, _, start = label.partition("@")
        shards.setdefault(name, []).append(Shard(tuple(map(int, start.split(","))), stored))
    return shards
