"""Perplexity and tasks: `python -m hlat_jax.evaluate --checkpoint=runs/tiny --text=FILE|--validation|--tasks=NAMES`."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import os
import pathlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from absl import flags, logging

from hlat_jax import config as config_lib
from hlat_jax.cli import flags as flags_lib
from hlat_jax.cli.path_checks import check_file, check_folder
from hlat_jax.config import count_text
from hlat_jax.data.formats.records import Answered
from hlat_jax.generate import inference
from hlat_jax.host.console import say
from hlat_jax.resolve import resolve
from hlat_jax.store.progress import show_progress

if TYPE_CHECKING:
    from hlat_jax.data.sources import Corpus
    from hlat_jax.data.tokenizer import Tokenizer

_USAGE = """Usage: python -m hlat_jax.evaluate --checkpoint=FOLDER --text=FILE [--FLAG=VALUE ...]
       python -m hlat_jax.evaluate --checkpoint=FOLDER --data=SOURCE [--FLAG=VALUE ...]
       python -m hlat_jax.evaluate --checkpoint=FOLDER --validation [--FLAG=VALUE ...]
       python -m hlat_jax.evaluate --checkpoint=FOLDER --tasks=NAME,NAME [--FLAG=VALUE ...]
       python -m hlat_jax.evaluate lm_eval --model hlat_jax ...

FILE is one document in UTF-8. SOURCE is files, folders or globs as in data.validation. Every record is a document.
Each document begins with EOS, as in training, or with BOS, see --bos. Each of its tokens is predicted once.
--validation evaluates the rows of data.validation that the checkpoint's run evaluates while it trains.
NAME is a task of the LM Evaluation Harness, or one of the paper's suites, hlat and hlat_bias.
`lm_eval ...` is the harness's own command with our model type registered. It takes all flags of lm_eval.
"""

_FIRST_RANGE = 64  # positions
_KINDS = ("tasks", "text", "data", "validation")


class Document(NamedTuple):
    """A text as int32 token ids, beginning with BOS or EOS, and its length in bytes of UTF-8."""

    ids: np.ndarray
    num_bytes: int


def main(argv: Sequence[str]) -> int:
    """Prints the loss of a model on text, or its results on tasks, and returns 0, the exit code.

    `lm_eval ...` is the harness's own command line, with our model type registered.
    """
    if argv and argv[0] == "lm_eval":
        from hlat_jax.evaluate.tasks import require_harness

        require_harness()
        from hlat_jax.evaluate import lm_eval_compat, model_type

        lm_eval_compat.run_command(argv[1:], check_template=model_type.check_template)
        return 0
    values = flags_lib.parse_own(argv, _define, usage=_USAGE)
    kinds = [kind for kind in _KINDS if values[kind].value]
    if len(kinds) != 1:
        raise ValueError("give one of --text=FILE, --data=SOURCE, --validation and --tasks=NAME,NAME.")
    flags_lib.check_output("--json", values.json)
    logging.set_verbosity(logging.ERROR)  # silence INFO logs of libraries
    from hlat_jax.data.path_checks import check_text_path  # not at the top: --help does not need it

    if values.text:
        check_file(values.text, key="--text")
    if values.tasks_folder:
        check_folder(values.tasks_folder, key="--tasks_folder")
    for part in values.data.split(","):
        check_text_path(part.strip(), key="--data", text_field=values.text_field)
    inference.prepare(values)
    run = {"tasks": _run_tasks, "validation": _run_validation}.get(kinds[0], _run_text)
    run(values)
    return 0


def _open_model(values: flags.FlagValues) -> inference.TrainedModel:
    """Returns the model of the command line, after a line that describes it."""
    with show_progress("opening the model"):
        trained = inference.trained_model(values)
    print(trained.described, flush=True)
    return trained


def _run_tasks(values: flags.FlagValues) -> None:
    from hlat_jax.evaluate.tasks import Tasks, report

    os.environ.setdefault("TQDM_DISABLE", "1")  # read when tqdm is imported: one bar, which is ours
    options = {"num_fewshot": values.num_fewshot, "limit": values.limit, "allow_code": values.allow_code}
    tasks = Tasks(values.tasks, folder=values.tasks_folder, **options)
    tasks.load()  # first, so that it fails before the model is loaded, which takes longer
    trained = _open_model(values)
    from hlat_jax.evaluate.harness import HarnessModel

    with show_progress("preparing the questions") as status:
        results = tasks(HarnessModel(trained, batch_size=values.batch_size, bos=values.bos, status=status))
    if values.limit:
        print(f"--limit={values.limit} is for a quick try, not comparable with published figures.")
    print(report(results, tasks, name=str(values.checkpoint)))
    figures = {key: results[key] for key in ("results", "n-shot", "n-samples", "versions")}
    flags_lib.write_report(values.json, figures | {"checkpoint": trained.folder})


def _run_text(values: flags.FlagValues) -> None:
    trained = _open_model(values)
    limit = trained.model.max_positions
    window = values.window or limit
    if not 2 <= window <= limit:
        raise ValueError(f"--window={window} must be from 2 to model.max_positions={limit}.")
    from hlat_jax.generate.scoring import Scorer
    from hlat_jax.run.validation import measures

    began = time.monotonic()
    with show_progress("reading the text") as status:
        documents = _documents(values, trained)
        ranges = position_ranges(window) if values.by_position else []
        cut = functools.partial(pieces, ranges=ranges) if ranges else functools.partial(windows, window=window)
        pairs = [pair for document in documents for pair in cut(document.ids)]
        if not pairs:
            raise ValueError(f"no token to predict in {count_text(len(documents), 'document')}. Give text.")
        num_rows = min(values.batch_size, -(-len(pairs) // trained.layout.row_degree))
        status.text = count_text(len(pairs), "window")
        scorer = Scorer(trained.model, trained.params, layout=trained.layout, num_rows=num_rows)
        losses = [-score.log_likelihood for score in scorer(pairs, status=status)]
    sums = {
        "num_documents": len(documents),
        "num_bytes": sum(document.num_bytes for document in documents),
        "num_tokens": sum(len(document.ids) - 1 for document in documents),
        "num_windows": sum(len(context) == 1 for context, _ in pairs) if ranges else len(pairs),
    }
    sizes = ", ".join(count_text(count, name[4:-1]) for name, count in sums.items())
    rate = sums["num_tokens"] / (time.monotonic() - began)
    say("text", f"{sizes} of at most {window:,} tokens, {rate:,.0f} tokens/s with compilation")
    by_position = []
    for first, stop in ranges:  # of a pair, the context ends at the first of its positions
        there = [(loss, len(pair[1])) for pair, loss in zip(pairs, losses, strict=True) if len(pair[0]) == first + 1]
        total, count = (math.fsum(column) for column in zip(*there, strict=True)) if there else (0.0, 0)
        by_position.append({"first": first, "last": stop - 1, "nats": total, "num_tokens": int(count)})
        if there:
            say(f"{first:,}-{stop - 1:,}", f"{total / count:.4f} nats per token, {count_text(int(count), 'token')}")
    nats = math.fsum(losses)
    measured = measures(nats, sums["num_tokens"], num_bytes=sums["num_bytes"])
    more = {"by_position": by_position} if ranges else {}
    _report(values, trained, measured, {**sums, "nats": nats, "window": window, **more})


def _run_validation(values: flags.FlagValues) -> None:
    """Evaluates the rows that the training loop evaluates, under the run's precision policy."""
    from hlat_jax.data.drift import data_drift
    from hlat_jax.data.held_out import open_held_out
    from hlat_jax.run.resume import saved_config
    from hlat_jax.run.validation import Validation
    from hlat_jax.store.checkpoint_checks import RUN_ITEM, saved_run

    trained = _open_model(values)
    if not (trained.folder / RUN_ITEM).exists():
        raise ValueError(
            f"--validation needs data.validation of a run, and {trained.folder} holds weights without a run. Give "
            "--data=SOURCE, or the checkpoint of a run."
        )
    settings = saved_run(trained.folder)["metadata"]
    run, num_rows = saved_config(settings), values.batch_size * trained.layout.row_degree
    held_out, manifest = open_held_out(
        run.data,
        tokenizer=trained.tokenizer,
        num_batches=run.train.num_eval_batches,
        rows_per_batch=num_rows,
    )
    if not held_out:
        raise ValueError(f"--validation: {trained.folder} is of a run without data.validation. Give --data=SOURCE.")
    changed = data_drift(settings, settings | {"validation_manifest": manifest}, num_batches=0)
    if changed:
        raise ValueError("the held-out text for --validation differs from the run's:\n  " + "\n  ".join(changed))
    for name, source in held_out.items():
        say("validation", source.describe(name))
    eval_step = _eval_step(trained, run, num_rows=num_rows)
    with show_progress("compiling") as status:
        measured = Validation(held_out, eval_step, trained.layout, status)(trained.params)
    coverage = {name: dataclasses.asdict(source.coverage) for name, source in held_out.items()}
    _report(values, trained, measured, {"coverage": coverage})


def _eval_step(
    trained: inference.TrainedModel, run: config_lib.Config, *, num_rows: int
) -> Callable[[Any, Any], tuple[Any, Any]]:
    """Returns (params, batch) -> (sum of the losses in nats, number of tokens), as validation of `run` computes it."""
    from hlat_jax.generate.decoding import serving
    from hlat_jax.program import make_program

    # no remat: there is no backward pass
    model = dataclasses.replace(serving(trained.model, trained.layout.platform), remat="none")
    config = config_lib.default()
    config.model.update(dataclasses.asdict(model))
    config.parallel.update(trained.layout.degrees)
    config.data.update(batch_size=num_rows, seq_len=run.data.seq_len, packing=run.data.packing)
    config.precision.policy = run.precision.policy
    return make_program(resolve(config), trained.layout).eval_step


def _report(
    values: flags.FlagValues, trained: inference.TrainedModel, measured: dict[str, float], more: dict[str, Any]
) -> None:
    """Prints loss, perplexity and bits per byte, and writes them and `more` to --json."""
    say("loss", f"{measured['eval_loss']:.6f} nats per token")
    say("perplexity", f"{measured['perplexity']:.4f}")
    say("bits per byte", f"{measured['bits_per_byte']:.6f}")
    numbers = {key: value if math.isfinite(value) else None for key, value in measured.items()}
    flags_lib.write_report(values.json, more | numbers | {"checkpoint": trained.folder})


def windows(ids: np.ndarray, window: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yields (context, continuation) of windows that slide by half their length and predict each of `ids[1:]` once.

    The first window predicts all its tokens. Each later window starts half a window before the first token that is not
    predicted yet. A model reads at most `window` tokens of a pair, all but the last.
    """
    start = done = 0
    while done < len(ids) - 1:
        stop = min(start + window, len(ids) - 1)
        yield ids[start : done + 1], ids[done + 1 : stop + 1]
        start, done = stop - window // 2, stop


def position_ranges(window: int) -> list[tuple[int, int]]:
    """Returns (first, stop) of ranges of positions, each as long as all before it, up to the end of the window."""
    bounds = [0, *(_FIRST_RANGE << power for power in range(32) if _FIRST_RANGE << power < window), window]
    return list(itertools.pairwise(bounds))


def pieces(ids: np.ndarray, ranges: Sequence[tuple[int, int]]) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yields (context, continuation) for each range of positions in windows that do not overlap.

    So each of `ids[1:]` is predicted once, from all tokens of its window before it.
    """
    for start in range(0, len(ids) - 1, ranges[-1][1]):
        for first, stop in ranges:
            if start + first + 1 < len(ids):
                yield ids[start : start + first + 1], ids[start + first + 1 : start + stop + 1]


def _documents(values: flags.FlagValues, trained: inference.TrainedModel) -> list[Document]:
    """Returns the documents of --data or --text; raises ValueError for files that are missing or not UTF-8."""
    from hlat_jax.data import sources

    tokenizer = trained.tokenizer
    [first] = trained.first_ids(values.bos) or [tokenizer.eos_id]
    if values.data:
        options = {"text_field": values.text_field, "tokenizer_sha256": tokenizer.sha256}
        corpus: Corpus | list[str] = sources.open_corpus(values.data, key="--data", **options)
    else:
        try:
            corpus = [pathlib.Path(values.text).read_bytes().decode("utf-8-sig")]
        except UnicodeDecodeError as error:
            raise ValueError(f"--text={values.text} is not UTF-8 ({error}).") from None
    return [_document(corpus, index, tokenizer, first=first) for index in range(len(corpus))]


def _document(documents: Corpus | list[str], index: int, tokenizer: Tokenizer, *, first: int) -> Document:
    """Returns a document of a text, or of stored token ids without their BOS and EOS."""
    record = documents[index]
    if isinstance(record, Answered):
        raise ValueError(f"{record.where}: records of prompts, answers or messages are only for training.")
    if isinstance(record, str):
        ids, num_bytes = tokenizer.encode(record), len(record.encode("utf-8"))
    else:
        ids = record[~np.isin(record, [tokenizer.bos_id, tokenizer.eos_id])]
        num_bytes = round(tokenizer.bytes_of(record, documents.text_bytes(index)).sum())
    return Document(np.concatenate([[first], ids]).astype(np.int32), num_bytes)


def _define(values: flags.FlagValues) -> None:
    inference.define(values)
    options = {"flag_values": values}
    flags_lib.define_path(values, "text", "File to evaluate as one document.")
    flags.DEFINE_string("data", "", "Files, folders or globs with a document in each record.", **options)
    flags.DEFINE_bool("validation", False, "Evaluate the validation rows of the run.", **options)
    flags.DEFINE_list("tasks", [], "Tasks of the LM Evaluation Harness, or hlat, the paper's suite.", **options)
    flags_lib.define_path(values, "tasks_folder", "Folder with your own tasks, in YAML.")
    flags.DEFINE_integer("num_fewshot", -1, "Solved examples before a question. -1 is the task's.", -1, **options)
    flags.DEFINE_bool("allow_code", False, "Tasks may execute what the model writes, as humaneval does.", **options)
    flags.DEFINE_integer("limit", 0, "Most questions of each task, for a quick try. 0 takes all.", 0, **options)
    flags.DEFINE_string("text_field", "text", "JSONL key or column that holds the text.", **options)
    flags.DEFINE_bool("bos", None, "Begin texts with BOS. By default the tokenizer or run decides.", **options)
    flags.DEFINE_integer("window", 0, "Most tokens of a window. 0 is model.max_positions.", 0, **options)
    flags.DEFINE_bool("by_position", False, "Print the loss by position, in windows that do not overlap.", **options)
    flags.DEFINE_integer("batch_size", 8, "Windows, or questions, in a batch on each replica.", 1, **options)
    flags_lib.define_path(values, "json", "Also write the figures to this file.", use="write")


if __name__ == "__main__":
    flags_lib.main(main)
