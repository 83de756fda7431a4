"""Synchronizes the settings of the processes of a run at the start, and their status before every step.

If one process skipped a step, the others would wait for it on their devices. So events that only one process observes
(a signal, an unreadable record, its clock) are exchanged before the step that they would stop. With one process the
same functions work without an exchange.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import pathlib
import secrets
import time
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np

from hlat_jax.batch import Batch, take_rows
from hlat_jax.config import Config
from hlat_jax.data.loader import batch_hash
from hlat_jax.data.mixture import parse_sources
from hlat_jax.data.streams import skipped_records
from hlat_jax.host import distributed
from hlat_jax.host.process import LOCK_FILE, StopSignals, only_process
from hlat_jax.store.atomic_files import remove_partial
from hlat_jax.store.config_diff import shared_settings


@dataclasses.dataclass(frozen=True)
class SyncedStep:
    """The status of all processes before a step.

    Attributes:
      row_fields: the entries of the step's metrics row that describe the global batch.
      error: the error to raise without a batch, an OSError if it cannot be read now, else a ValueError, or None.
      save: whether a checkpoint is due by the clock of process 0.
    """

    row_fields: dict[str, Any]
    error: Exception | None
    save: bool


class StepSync:
    """Exchanges the status of all processes before each step.

    Attributes:
      stop: the signal that ends the run at this step, or "". A single process sees it at once. Several processes
        exchange it before the step that was dispatched last.
    """

    def __init__(self, config: Config, rows: Sequence[int], signals: StopSignals):
        """All processes call it at the same point; `rows` are the rows of the global batch that this process loads."""
        self._config, self._rows, self.signals = config, rows, signals
        self._source_names = list(parse_sources(config.data.train, key="data.train"))
        self._stop = ""
        before = [json.loads(text) for text in distributed.exchange(json.dumps(list(rows)))][: jax.process_index()]
        # processes of one model replica load the same rows: each row is counted by the first of them
        self._counted = [index for index, row in enumerate(rows) if not any(row in others for others in before)]

    @property
    def stop(self) -> str:
        return self._stop if jax.process_count() > 1 else self.signals.name

    def sync_step(
        self,
        batch: Batch | None,
        position: np.ndarray | None,
        *,
        error: ValueError | OSError | None,
        save: bool,
        num_retries: int = 0,
        row_sources: np.ndarray | None = None,
    ) -> SyncedStep:
        """Returns the status of all processes for the next step.

        Args:
          batch: the rows of this process, or None with an `error`.
          position: the data position after these rows, or None with an `error`.
          error: the reason if this process has no rows, else None.
          save: whether a checkpoint is due by the clock of this process.
          num_retries: the number of reads that this process repeated since the previous step.
          row_sources: the number of the source of each row of this process, for the tokens of each source.
        """
        facts = {} if error else self._facts(batch, position) | {"data_retries": num_retries}
        if facts and row_sources is not None:
            facts["source_tokens"] = self._source_tokens(batch, row_sources)
        failed = error and {"text": str(error), "unreadable": isinstance(error, OSError)}
        mine = {"facts": facts, "failed": failed, "save": save, "stop": self.signals.name}
        statuses = [json.loads(text) for text in distributed.exchange(json.dumps(mine))]
        self._stop = next((each["stop"] for each in statuses if each["stop"]), "")
        failures = [(each["failed"]["unreadable"], index) for index, each in enumerate(statuses) if each["failed"]]
        if not failures:
            return SyncedStep(self._join_facts([each["facts"] for each in statuses]), None, statuses[0]["save"])
        unreadable, index = min(failures)  # all raise the same; data that changed will not be read later
        if index != jax.process_index():
            text = f"process {index} of {len(statuses)} stopped: {statuses[index]['failed']['text']}"
            error = OSError(text) if unreadable else ValueError(text)
        return SyncedStep({}, error, False)

    def _facts(self, batch: Batch, position: np.ndarray) -> dict[str, Any]:
        mine = take_rows(batch, self._counted)
        facts: dict[str, Any] = {"batch_hash": batch_hash(mine, rows=[self._rows[index] for index in self._counted])}
        if batch.segment_ids is not None:
            facts["padding"] = int((mine.segment_ids == 0).sum())
        if self._config.data.on_bad_record == "skip":
            facts["skipped_records"] = skipped_records(position[self._counted])
        return facts

    def _source_tokens(self, batch: Batch, row_sources: np.ndarray) -> list[int]:
        counts = batch.weights[self._counted].sum(1)
        return [int(counts[row_sources[self._counted] == source].sum()) for source in range(len(self._source_names))]

    def _join_facts(self, parts: list[dict[str, Any]]) -> dict[str, Any]:
        """Returns the facts of the global batch; its hash is the XOR of the hashes of its parts."""
        whole = 0
        for part in parts:
            whole ^= int(part["batch_hash"], 16)
        facts: dict[str, Any] = {"batch_hash": f"{whole:032x}"}
        if "padding" in parts[0]:
            num_tokens = self._config.data.batch_size * self._config.data.seq_len
            facts["padding_share"] = sum(part["padding"] for part in parts) / num_tokens
        for source, name in enumerate(self._source_names if "source_tokens" in parts[0] else ()):
            facts[f"source_tokens/{name}"] = sum(part["source_tokens"][source] for part in parts)
        if "skipped_records" in parts[0]:
            facts["skipped_records"] = sum(part["skipped_records"] for part in parts)
        if any(part["data_retries"] for part in parts):
            facts["data_retries"] = sum(part["data_retries"] for part in parts)
        return facts


@contextlib.contextmanager
def only_job(workdir: pathlib.Path) -> Iterator[None]:
    """Locks the run folder for all processes of this job. Process 0 locks it, and the others check the lock.

    Unfinished files of killed processes are removed.

    Raises:
      ValueError: another job has locked it, or this process and process 0 do not share this folder.
    """
    with only_process(workdir) if distributed.is_first() else contextlib.nullcontext():
        if distributed.is_first():
            remove_partial(workdir)
        if jax.process_count() > 1:
            lock, mark = workdir / LOCK_FILE, secrets.token_hex(8)
            if distributed.is_first():
                lock.write_text(mark)
            mark = distributed.exchange(mark)[0]
            if not lock.exists() or lock.read_text() != mark:
                raise ValueError(
                    f"this process does not see the run folder {workdir.absolute()} of process 0. Give a --workdir on "
                    "a file system that all nodes share."
                )
        yield


class FolderCheck:
    """Detects that the run folder was removed or replaced while the run uses it, which loses later saves.

    Process 0 checks. A single error or wrong answer of the file system does not end the run.
    """

    _PERIOD_S, _AGAIN_S = 60.0, 2.0

    def __init__(self, workdir: pathlib.Path):
        self._workdir, self._identity, self._checked_s = workdir, _identity(workdir), time.monotonic()

    def __call__(self, *, now: bool = False) -> None:
        """Compares the folder once a minute, or `now`; raises ValueError if it is another one, or none."""
        if not distributed.is_first() or (not now and time.monotonic() - self._checked_s < self._PERIOD_S):
            return
        self._checked_s = time.monotonic()
        if problem := self.problem():
            raise ValueError(problem)

    def problem(self) -> str:
        """Returns the problem of the folder, or "", in any process."""
        for wait_s in (0.0, self._AGAIN_S):
            time.sleep(wait_s)
            try:
                if _identity(self._workdir) == self._identity:
                    return ""
            except OSError:  # not known
                return ""
        return (
            f"the run folder {self._workdir.absolute()} was removed or replaced while this run trained in it, and all "
            "after its last checkpoint is lost. Remove a new folder there, put the old one back, and run the same "
            "command to resume."
        )

    @contextlib.contextmanager
    def as_cause(self) -> Iterator[None]:
        """Replaces an OSError of the block by a ValueError if the folder is gone."""
        try:
            yield
        except OSError as error:
            if problem := self.problem():
                raise ValueError(problem) from error
            raise


def _identity(folder: pathlib.Path) -> tuple[int, int] | None:
    try:
        info = folder.stat()
    except FileNotFoundError:
        return None
    return info.st_dev, info.st_ino


def require_same_settings(settings: dict[str, Any]) -> None:
    """Raises ValueError if this process has other settings than process 0, except `config_diff.MAY_DIFFER`.

    Settings are steps, shapes, data and tokenizer. The message has both values.
    """
    mine = shared_settings(settings)
    first = json.loads(distributed.exchange(json.dumps(mine))[0])
    others = [key for key in sorted(mine.keys() | first.keys()) if mine.get(key) != first.get(key)]
    if others:
        lines = "\n  ".join(f"{key}: {mine.get(key)!s:.80} here, {first.get(key)!s:.80} in process 0" for key in others)
        raise ValueError(
            f"process {jax.process_index()} of {jax.process_count()} has other settings than process 0:\n"
            f"  {lines}\nGive all processes the same command, files and versions."
        )
