"""Exports in the background of training to `<run folder>/huggingface/<step>/`, the same as `hf export`.

A thread of process 0 makes an export from the checkpoint of its step. No step waits for it, and the other processes
take no part. A folder appears only when it is complete.
"""

from __future__ import annotations

import concurrent.futures
import pathlib

from hlat_jax.config import Config
from hlat_jax.hf.exporting import export_checkpoint
from hlat_jax.run.resume import EXPORTS
from hlat_jax.weights.trained import weights_of_run


class ExportError(OSError):
    """An export could not be written. Checkpoints, and the exports before it, are untouched."""


class Exporter:
    """Exports checkpoints of one run, one at a time. Only process 0 has an exporter."""

    def __init__(self, workdir: pathlib.Path, *, config: Config):
        """Starts the thread, and writes nothing."""
        self._workdir, self._config = workdir, config
        self._thread = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="hlat-export")
        self._offered = self._step = 0  # the newest checkpoint that was offered, and the one that was exported last
        self._written: concurrent.futures.Future[str] | None = None  # the export under way, which returns its dtype

    @property
    def reading_step(self) -> int:
        """The step of the checkpoint that an export under way reads, or 0 without one."""
        return 0 if self._written is None or self._written.done() else self._step

    def begin(self, step: int, *, is_saved: bool) -> None:
        """Notes the step at which the run begins, and offers its checkpoint, since a kill may have cut its export."""
        self._offered = step - is_saved
        if is_saved:
            self.offer(step)

    def offer(self, step: int) -> None:
        """Starts to export a new checkpoint if an export is due since the one before, or the run is complete.

        One that is due while another is still being written is skipped, with a message. The last one waits for it.

        Raises:
          ExportError: the previous export failed.
        """
        every, is_last = self._config.checkpoint.export_every_steps, step >= self._config.train.num_steps
        is_due, self._offered = step // every > self._offered // every, step
        if not (is_due or is_last) or self._folder(step).exists():
            return
        if self.reading_step and not is_last:
            print(
                f"export of step {step} skipped, since the export of step {self._step} is still being written. Raise "
                f"checkpoint.export_every_steps={every}, or export the checkpoint of step {step} yourself."
            )
            return
        self.wait()
        self._step, self._written = step, self._thread.submit(self._write, step)

    def check(self) -> None:
        """Raises ExportError if the export in the background has failed, without waiting."""
        if not self.reading_step:
            self.wait()

    def wait(self) -> None:
        """Blocks until no export is under way. Raises ExportError if it failed."""
        if self._written is None:
            return
        written, self._written = self._written, None
        try:
            dtype = written.result()
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) and error.strerror else error
            raise ExportError(
                f"step {self._step} could not be exported to {self._folder(self._step)} ({reason}). The "
                "checkpoints are untouched, so fix the cause, or set checkpoint.export_every_steps=0, and run the same "
                "command to resume."
            ) from error
        print(f"exported step {self._step} to {self._folder(self._step)} ({dtype})", flush=True)

    def close(self) -> None:
        """Waits for the export under way and ends the thread. Raises ExportError when that export failed."""
        try:
            self.wait()
        finally:
            self._thread.shutdown()

    def _folder(self, step: int) -> pathlib.Path:
        return self._workdir / EXPORTS / str(step)

    def _write(self, step: int) -> str:
        weights = weights_of_run(self._workdir.absolute() / "checkpoints" / str(step), masters=True)
        return export_checkpoint(weights, self._folder(step))
