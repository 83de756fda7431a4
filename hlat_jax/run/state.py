"""The arguments of the loop, a run and its progress, and the batches between them."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from hlat_jax.batch import Batch
from hlat_jax.config import Config
from hlat_jax.data.held_out import HeldOut
from hlat_jax.data.loader import TrainBatches
from hlat_jax.data.tokenizer import Tokenizer
from hlat_jax.generate.generator import Programs
from hlat_jax.parallel.rows import gather_rows
from hlat_jax.run import optional
from hlat_jax.run.goodput import Ledger
from hlat_jax.run.neuron_monitor import NeuronMonitor
from hlat_jax.run.profiling import StepTrace
from hlat_jax.run.step_sync import FolderCheck, StepSync
from hlat_jax.run.validation import Best, SourceLosses, Validation
from hlat_jax.step import State, StepMetrics
from hlat_jax.store.checkpoint import Checkpointer
from hlat_jax.store.metrics import MetricsLog, Silent

if TYPE_CHECKING:
    from hlat_jax.program import RunProgram
    from hlat_jax.run.compilation import Compilations
    from hlat_jax.run.copying import Copier
    from hlat_jax.run.digests import Recompute, StateDigest

DeviceBatch = Batch | Iterator[Batch]  # on devices: a batch, or its microbatches in turn


@dataclasses.dataclass(frozen=True, kw_only=True)
class Inputs:
    """The opened and checked inputs and outputs of a run, before anything in its folder changes.

    Attributes:
      program: the program of the run, over the devices of this job.
      ledger: the ledger of the run, silent in all processes except process 0.
      batches: the iterator over the batches of this process.
      held_out: name of the source -> batches of held-out text.
      settings: the settings in every checkpoint, see `resume.settings_of`.
      copier: copies checkpoints to a bucket, if configured.
      exporter: the background exporter of process 0, if configured.
      first_compilations: compiles the programs that a choice for a memory budget needs.
      state_digest: the digests of the state.
    """

    config: Config
    workdir: pathlib.Path
    program: RunProgram
    tokenizer: Tokenizer
    tasks: optional.TasksInTraining | None
    ledger: Ledger | Silent
    batches: TrainBatches
    held_out: Mapping[str, HeldOut]
    settings: dict[str, Any]
    checkpointer: Checkpointer
    copier: Copier
    exporter: optional.Exporter | None
    first_compilations: Compilations
    state_digest: StateDigest


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run(Inputs):
    """The fixed parts of a run. The parts that change while it trains are in `Progress`.

    Attributes:
      train_step: the compiled (state, batch, learning rate) -> (state, StepMetrics), which donates the state.
      state_norms: the compiled state -> norms of its parts, see program.RunProgram.
      source_losses: measures the sources of a batch, or None without `metrics.source_losses_every_steps`.
      recompute: computes a microbatch again, or None without `train.check_devices_every_steps`.
      log: the metrics log, silent in all processes except process 0.
      monitor: the utilization of the devices of process 0's node, as process 0 writes the rows.
      remat: the record of the choice for a memory budget, if there is one, see `budget.choose_remat`.
      start_step: the step at which this process started or resumed.
    """

    check_folder: FolderCheck
    sync: StepSync
    validation: Validation | None
    source_losses: SourceLosses | None
    train_step: Callable[[State, DeviceBatch, np.float32], tuple[State, StepMetrics]]
    state_norms: Callable[[State], Mapping[str, jax.Array]]
    recompute: Recompute | None
    sampler: Programs | None
    log: MetricsLog | Silent
    monitor: NeuronMonitor
    step_trace: StepTrace
    remat: dict[str, Any] | None
    start_step: int
    skipped: tuple[range, ...]

    def global_position(self, position: np.ndarray) -> np.ndarray:
        """Returns the data position of all rows, gathered from all processes, which call it together."""
        return gather_rows(position, self.batches.rows, self.config.data.batch_size)


@dataclasses.dataclass(kw_only=True)
class Progress:
    """The state of a run while it trains.

    Attributes:
      state: the state after `step` updates.
      step: the number of updates dispatched so far.
      position: the data position after batch `step`, for the rows of this process.
      tokens: the number of tokens trained on, up to the last metrics row.
      saved_step: the step of the newest checkpoint, or 0 without one.
      num_nonfinite: the number of non-finite steps in a row, up to the last metrics row.
      num_without_target: the number of steps in a row without a target in their batch, up to the last metrics row.
      save_postponed: whether a checkpoint was due after a non-finite step.
      save_overdue: whether a checkpoint is due by the clock.
      pending: the dispatched steps with metrics still on the device, oldest first.
      saved_at_s: time.monotonic() at the start of the last save.
      timed_from_s: time.monotonic() from which the current step is timed.
      data_wait_s: the time spent waiting for data since the last metrics row.
      best: the best validation so far.
    """

    state: State
    step: int
    position: np.ndarray
    tokens: int
    saved_step: int
    num_nonfinite: int
    num_without_target: int = 0
    save_postponed: bool = False
    save_overdue: bool = False
    pending: list[Pending] = dataclasses.field(default_factory=list)
    saved_at_s: float = 0.0
    timed_from_s: float = 0.0
    data_wait_s: float = 0.0
    best: Best = dataclasses.field(default_factory=Best)


@dataclasses.dataclass(frozen=True, kw_only=True)
class NextBatch:
    """The rows of this process, the data position after them, and the metrics that describe the global batch."""

    batch: Batch
    position: np.ndarray
    row_fields: dict[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pending:
    """A dispatched step, its metrics still on the device, and its batch."""

    step: int
    metrics: StepMetrics
    learning_rate: float
    batch: NextBatch
