"""Metrics of a run in metrics.jsonl, progress lines, Prometheus, TensorBoard and Weights & Biases.

`metrics.jsonl` is the record, and the others are views of it. It has each step exactly once, even if the run was killed
and resumed. On resume, rows beyond the checkpoint move to `metrics.discarded.jsonl`. Values are Python numbers.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import pathlib
import secrets
import sys
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, NotRequired, TypedDict

from hlat_jax.config import MetricsConfig
from hlat_jax.facts.byte_sizes import UNITS
from hlat_jax.host import process
from hlat_jax.host.optional_import import import_optional
from hlat_jax.store.atomic_files import sync_folder, to_disk, write_whole
from hlat_jax.store.config_diff import flat
from hlat_jax.store.prometheus import PrometheusFile
from hlat_jax.store.typed_json import Line, read_lines

ROWS_FILE, DISCARDED_FILE = "metrics.jsonl", "metrics.discarded.jsonl"
TENSORBOARD_FOLDER = "tensorboard"
TESTED_VERSIONS = ("2.6.5",)  # of tensorboardX, whose writer of event files is undocumented
# With `log_every_steps=0`: steps between lines on a terminal, and lines over a run without one.
_TERMINAL_STEPS, _BATCH_LINES = 10, 10
_LONGEST_SILENCE_S = 60


class _Row(TypedDict):
    """What any row has, and of the rest what is read back."""

    step: int
    eval_loss: NotRequired[float]
    bits_per_byte: NotRequired[float]
    padding_share: NotRequired[float]
    skipped_records: NotRequired[int]
    batch: NotRequired[int]
    batch_hash: NotRequired[str]
    nonfinite: NotRequired[int]


class _TrainRow(_Row):
    loss: float
    tokens: int


class MetricsLog:
    """Writes one row per step and per validation to the files and the console.

    Training rows have values from `loop` and `run.step_sync`, `tokens_per_s` and, for a known peak, `mfu_6n` and `mfu`.
    """

    def __init__(
        self,
        workdir: str | os.PathLike,
        *,
        config: MetricsConfig,
        num_steps: int,
        start_step: int = 0,
        start_tokens: int = 0,
        hyperparameters: dict[str, Any] | None = None,
        flops_per_token: tuple[float, float] = (0.0, 0.0),
        peak_flops: float | None = None,
    ):
        """Opens the files of a run that starts or resumes after `start_step` updates.

        Args:
          num_steps: last step of the run; for percentages and the remaining time.
          start_step: 0 for a new run, which moves all rows of an earlier attempt aside.
          start_tokens: tokens trained on so far, for a folder that has no rows of them.
          hyperparameters: the config as nested dicts, for TensorBoard and Weights & Biases.
          flops_per_token: by the 6N rule, and with attention.
          peak_flops: FLOP/s of all devices together; None when unknown.
        """
        workdir = pathlib.Path(workdir)
        workdir.mkdir(parents=True, exist_ok=True)
        self._config, self._num_steps, self._start_step = config, num_steps, start_step
        self._flops_per_token, self._peak_flops = flops_per_token, peak_flops
        self._path = workdir / ROWS_FILE
        last = rewind(self._path, start_step if start_step > 0 else -1)
        self._tokens = last["tokens"] if last else start_tokens
        self._file = open(self._path, "a")  # noqa: SIM115 - closed by close()
        self._rows: list[dict[str, Any]] = []  # since the last line
        self._opened_s = self._printed_s = time.monotonic()
        self._header_due = True
        self._sinks: list[Any] = [PrometheusFile(workdir, num_steps=num_steps)]
        if config.tensorboard:
            self._sinks.append(_TensorBoard(workdir / TENSORBOARD_FOLDER, start_step, hyperparameters or {}))
        if config.wandb_project:
            self._sinks.append(_Wandb(workdir, config.wandb_project, hyperparameters or {}))

    def train_row(self, row: dict[str, Any]) -> None:
        """Records one step, and prints a line when one is due."""
        tokens_per_s = (row["tokens"] - self._tokens) / row["step_s"] if row["step_s"] > 0 else math.inf
        self._tokens = row["tokens"]
        row = row | {"tokens_per_s": tokens_per_s}
        if self._peak_flops:
            row["mfu_6n"], row["mfu"] = (flops * tokens_per_s / self._peak_flops for flops in self._flops_per_token)
        self._record("train", row)
        self._rows.append(row)
        now = time.monotonic()
        if self._line_due(row, now):
            if self._header_due:
                print(header(mfu="mfu" in row))
                self._header_due = False
            print(train_line(self._rows, self._num_steps, elapsed_s=now - self._opened_s), flush=True)
            self._rows, self._printed_s = [], now

    def eval_row(self, row: dict[str, Any]) -> None:
        """Records one validation: `step, eval_loss, perplexity, bits_per_byte, eval_tokens`."""
        self._record("validation", row)
        if self._config.console != "off":
            sources = [f"; {key[10:]} {value:.4f}" for key, value in row.items() if key.startswith("eval_loss/")]
            loss = f"loss {row['eval_loss']:.4f}, perplexity {row['perplexity']:.5g}"
            more = f"{row['bits_per_byte']:.4f} bits per byte ({row['eval_tokens']:,} tokens){''.join(sources)}"
            print(f"{row['step']:8}  validation: {loss}, {more}", flush=True)

    def tasks_row(self, row: dict[str, Any], *, shown: Collection[str]) -> None:
        """Records the results of tasks at one `step` as `tasks/NAME/METRIC`, and prints the metrics in `shown`."""
        self._record("validation", row)
        if self._config.console != "off":
            cells = [f"{key.removeprefix('tasks/')} {row[key]:.4f}" for key in shown]
            print(f"{row['step']:8}  tasks: {', '.join(cells)}", flush=True)

    def goodput_row(self, step: int, shares: dict[str, float]) -> None:
        """Records category -> share of the time so far in TensorBoard and Weights & Biases."""
        self._show("goodput", {"step": step, **{name.replace(" ", "_"): share for name, share in shares.items()}})

    def sample(self, step: int, text: str) -> None:
        """Records a generated text in TensorBoard and Weights & Biases."""
        with self._named_errors():
            for sink in self._sinks:
                sink.write_text("sample", step, text)

    def sync(self) -> None:
        """Flushes and fsyncs every row so far."""
        to_disk(self._file)

    def close(self) -> None:
        """Syncs and closes. A second call does nothing."""
        if self._file.closed:
            return
        self.sync()
        self._file.close()
        for sink in self._sinks:
            sink.close()

    def _record(self, group: str, row: dict[str, Any]) -> None:
        with self._named_errors():
            self._file.write(json_line(row))
            self._file.flush()
        self._show(group, row)

    def _show(self, group: str, row: dict[str, Any]) -> None:
        with self._named_errors():
            for sink in self._sinks:
                sink.write(group, row)

    @contextlib.contextmanager
    def _named_errors(self) -> Iterator[None]:
        """Raises an OSError of the block with the name of the file, which that of a full disk does not have."""
        try:
            yield
        except OSError as error:
            raise OSError(error.errno, f"a row cannot be written: {error.strerror}", str(self._path)) from None

    def _line_due(self, row: dict[str, Any], now: float) -> bool:
        step, every = row["step"], self._config.log_every_steps
        if self._config.console == "off":
            return False
        if every == 0 and (self._config.console == "on" or process.is_terminal(sys.stdout)):
            every = _TERMINAL_STEPS
        every = every or math.ceil((self._num_steps - self._start_step) / _BATCH_LINES)
        # the next row comes about one step from now
        is_long_ago = now - self._printed_s + row["step_s"] > _LONGEST_SILENCE_S
        return step in (self._start_step + 1, self._num_steps) or step % every == 0 or is_long_ago


class Silent:
    """The log and the ledger of processes other than the first: every method does nothing."""

    def __enter__(self):
        return self

    def __exit__(self, *_): ...

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_, **__: None


def header(*, mfu: bool) -> str:
    """Returns the header of the columns of `train_line`, with columns of the MFU if it is known."""
    speeds = f"   tokens/s{'  MFU 6N  MFU+attn' * mfu} data wait"
    return f"    step   done     loss grad norm        lr   s/step{speeds}  mem GiB      elapsed          ETA"


def train_line(rows: Sequence[dict[str, Any]], num_steps: int, *, elapsed_s: float) -> str:
    """Returns a progress line: loss, gradient norm and rate of the last step, times and speeds over all of `rows`."""
    last, spent_s = rows[-1], math.fsum(row["step_s"] for row in rows)
    step_s = spent_s / len(rows)

    def mean(key: str) -> float:
        return math.fsum(row[key] * row["step_s"] for row in rows) / spent_s if spent_s > 0 else math.inf

    mfu = f"{mean('mfu_6n'):8.1%}{mean('mfu'):10.1%}" if "mfu" in last else ""
    wait = math.fsum(row["data_wait_s"] for row in rows) / max(spent_s, 1e-9)
    return (
        f"{last['step']:8}{last['step'] / max(num_steps, 1):7.1%}{last['loss']:9.4f}{last['grad_norm']:10.3g}"
        f"{last['learning_rate']:10.2e}{step_s:9.3f}{mean('tokens_per_s'):11,.0f}{mfu}{wait:10.1%}"
        f"{last['peak_memory_bytes'] / UNITS['GiB']:9.2f}{duration(elapsed_s):>13}"
        f"{duration((num_steps - last['step']) * step_s):>13}"
    )


def duration(seconds: float) -> str:
    """Returns `h:mm:ss`, with days before it when there are any."""
    days, rest = divmod(max(round(seconds), 0), 86400)
    clock = f"{rest // 3600}:{rest % 3600 // 60:02}:{rest % 60:02}"
    return f"{days}d {clock}" if days else clock


def json_line(row: dict[str, Any]) -> str:
    """Returns a row as a line of JSON, with floats at full precision, and NaN and Infinity as in Python's json."""
    return json.dumps(row, default=lambda scalar: scalar.item()) + "\n"


def copy_rows(source: pathlib.Path, workdir: pathlib.Path, *, last_step: int) -> None:
    """Copies the rows of a run up to `last_step` into another run folder. Rows of an earlier attempt move aside."""
    rewind(workdir / ROWS_FILE, -1)
    if (source / ROWS_FILE).exists():  # a run may have been copied without it
        lines = (line for line in _lines(source / ROWS_FILE) if line.row is not None)
        write_whole(workdir / ROWS_FILE, b"".join(line.raw for line in lines if line.row["step"] <= last_step))


def rewind(path: str | os.PathLike, step: int) -> dict[str, Any] | None:
    """Moves rows after `step`, and torn lines, to `metrics.discarded.jsonl`, and returns the last training row.

    Idempotent, also after a kill. Discarded rows are fsynced before they leave `path`, and are not appended twice.
    """
    path = pathlib.Path(path)
    if not path.exists():
        return None
    last, discarded = None, []
    kept_path = path.with_name(f"{path.name}.kept")
    with open(kept_path, "wb") as new:
        for raw, row, _ in _lines(path):
            if row is None or row["step"] > step:
                discarded.append(raw if raw.endswith(b"\n") else raw + b"\n")
                continue
            new.write(raw)
            last = row if "loss" in row else last
        to_disk(new)
    if not discarded:
        kept_path.unlink()
        return last
    aside = path.with_name(DISCARDED_FILE)
    before, chunk = aside.read_bytes() if aside.exists() else b"", b"".join(discarded)
    if not before.endswith(chunk):
        write_whole(aside, before + chunk)
    os.replace(kept_path, path)
    sync_folder(path.parent)
    return last


class _TensorBoard:
    """Event files, written in this thread: with a full disk tensorboardX's own writer thread would hang the run."""

    def __init__(self, folder: pathlib.Path, start_step: int, hyperparameters: dict[str, Any]):
        no_torch = sys.modules.setdefault("torch", None) is None  # tensorboardX would import it unnecessarily
        from tensorboardX import event_file_writer, summary
        from tensorboardX.proto import event_pb2, summary_pb2

        if no_torch:
            del sys.modules["torch"]
        self._event, self._summary, self._text = event_pb2.Event, summary_pb2.Summary, summary.text
        folder.mkdir(exist_ok=True)
        # file names have a resolution of a second: the suffix keeps a quick restart from overwriting the previous file
        self._writer = event_file_writer.EventsWriter(str(folder / "events"), f".{os.getpid()}.{start_step}")
        # hides the events of an earlier attempt from this step on from TensorBoard
        hidden_from = start_step + 1 if start_step > 0 else 0
        self._add(hidden_from, session_log=event_pb2.SessionLog(status=event_pb2.SessionLog.START))
        if hyperparameters:
            # without the experiment's own summary TensorBoard finds columns and metrics from all runs it shows
            _, session, _ = summary.hparams(flat(hyperparameters), {})
            self._add(hidden_from, summary=session)
            self.write_text("config", hidden_from, json.dumps(hyperparameters, indent=2))

    def write(self, group: str, row: dict[str, Any]) -> None:
        # one event per row: one per number takes milliseconds
        numbers = {key: float(value) for key, value in row.items() if isinstance(value, (int, float)) and key != "step"}
        values = [self._summary.Value(tag=f"{group}/{key}", simple_value=value) for key, value in numbers.items()]
        self._add(row["step"], summary=self._summary(value=values))
        self._writer.flush()  # for live viewing, and so that a kill loses nothing

    def write_text(self, tag: str, step: int, text: str) -> None:
        block = "\n".join(f"    {line}" for line in text.splitlines())  # of code: the text is not Markdown
        self._add(step, summary=self._text(tag, block))
        self._writer.flush()

    def _add(self, step: int, **content: Any) -> None:
        self._writer.write_event(self._event(step=step, wall_time=time.time(), **content))

    def close(self) -> None:
        self._writer.close()


class _Wandb:
    """Weights & Biases; a resumed run continues the same W&B run."""

    def __init__(self, workdir: pathlib.Path, project: str, hyperparameters: dict[str, Any]):
        missing = f"metrics.wandb_project={project!r} needs Weights & Biases: pip install wandb, or set the key to ''."
        wandb = import_optional("wandb", missing=missing)
        id_path = workdir / "wandb_id.txt"
        run_id = id_path.read_text().strip() if id_path.exists() else ""
        if not run_id:
            run_id = secrets.token_hex(4)
            write_whole(id_path, f"{run_id}\n".encode())
        same_run = {"id": run_id, "resume": "allow", "config": hyperparameters, "allow_val_change": True}
        self._run = wandb.init(project=project, name=workdir.name, dir=str(workdir), **same_run)
        # W&B's own step can only increase; ours returns to the checkpoint's on resume
        self._run.define_metric("*", step_metric="step")

    def write(self, group: str, row: dict[str, Any]) -> None:
        numbers = {key: value for key, value in row.items() if isinstance(value, (int, float))}
        self._run.log({key if key == "step" else f"{group}/{key}": value for key, value in numbers.items()})

    def write_text(self, tag: str, step: int, text: str) -> None:
        self._run.log({"step": step, tag: text})

    def close(self) -> None:
        self._run.finish()


def read_rows(path: str | os.PathLike) -> list[dict[str, Any]]:
    """Returns every complete row of a `metrics.jsonl` in order, without torn or damaged lines."""
    return [line.row for line in _lines(path) if line.row is not None]


def damaged_lines(path: pathlib.Path) -> list[str]:
    """Returns the problem of each complete line that is not a row. A last line that a kill cut short does not count."""
    return [line.problem for line in _lines(path) if line.problem]


def _lines(path: str | os.PathLike) -> Iterator[Line]:
    return read_lines(path, lambda row: _TrainRow if "loss" in row else _Row, allow_nan=True)
