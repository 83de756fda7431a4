"""`python -m hlat_jax.evaluate --checkpoint=runs/tiny --text=FILE|--validation|--tasks=NAMES`: perplexity and tasks."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import os
import pathlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from absl import flags, logging

from hlat_jax import config as config_lib
from hlat_jax.cli import flags as flags_lib
from hlat_jax.cli.path_checks import check_file, check_folder
from hlat_jax.config import counted
from hlat_jax.generate import inference
from hlat_jax.resolve import resolve
from hlat_jax.store.progress import show_progress

_USAGE = """Usage: python -m hlat_jax.evaluate --checkpoint=FOLDER --text=FILE [--FLAG=VALUE ...]
       python -m hlat_jax.evaluate --checkpoint=FOLDER --data=SOURCE [--FLAG=VALUE ...]
       python -m hlat_jax.evaluate --checkpoint=FOLDER --validation [--FLAG=VALUE ...]
       python -m hlat_jax.evaluate --checkpoint=FOLDER --tasks=NAME,NAME [--FLAG=VALUE ...]
       python -m hlat_jax.evaluate lm_eval --model hlat_jax ...

FILE is one document in UTF-8. SOURCE is files, folders or globs as in data.validation; every record is a document.
Each document begins with EOS, as in training, or with BOS, see --bos; each of its tokens is predicted once.
--validation evaluates the rows of data.validation that the checkpoint's run evaluates while it trains.
NAME is a task of the LM Evaluation Harness, or one of the paper's suites: hlat and hlat_bias.
`lm_eval ...` is the harness's own command with our model type registered; it takes everything that lm_eval takes.
"""

_KINDS = ("tasks", "text", "data", "validation")
# Flag -> the inputs that it applies to.
_APPLIES_TO = {
    "tasks_folder": ("tasks",),
    "num_fewshot": ("tasks",),
    "limit": ("tasks",),
    "window": ("text", "data"),
    "text_field": ("data",),
    "bos": ("text", "data", "tasks"),
}


def main(argv: Sequence[str]) -> int:
    """Prints the loss of a model on text, or its results on tasks; returns 0, the exit code.

    `lm_eval ...` is the harness's own command line, with our model type registered.
    """
    if argv and argv[0] == "lm_eval":
        from hlat_jax.evaluate.tasks import require_harness

        require_harness()
        from hlat_jax.evaluate import lm_eval_compat

        lm_eval_compat.run_command(argv[1:])
        return 0
    values = flags_lib.parse_own(argv, _define, usage=_USAGE)
    kinds = [kind for kind in _KINDS if values[kind].value]
    if len(kinds) != 1:
        both = f"{' and '.join(f'--{kind}' for kind in kinds)} are given together; " if kinds else ""
        raise ValueError(f"{both}give one of --text=FILE, --data=SOURCE, --validation and --tasks=NAME,NAME.")
    for name, allowed in _APPLIES_TO.items():
        if values[name].present and kinds[0] not in allowed:
            others = " and ".join(f"--{kind}" for kind in allowed)
            raise ValueError(f"--{name} has no effect with --{kinds[0]}; it applies to {others}. Leave it out.")
    if values.json:
        flags_lib.check_output("--json", values.json)
    logging.set_verbosity(logging.ERROR)  # silence INFO logs of libraries
    from hlat_jax.data.path_checks import check_text_path  # not at the top: --help does not need it

    if values.text:
        check_file(values.text, key="--text")
    if values.tasks_folder:
        check_folder(values.tasks_folder, key="--tasks_folder")
    for part in values.data.split(","):
        check_text_path(part.strip(), key="--data")
    inference.prepare(values)
    run = {"tasks": _run_tasks, "validation": _run_validation}.get(kinds[0], _run_text)
    run(values)
    return 0


def _run_tasks(values: flags.FlagValues) -> None:
    from hlat_jax.evaluate.tasks import Tasks, report

    os.environ.setdefault("TQDM_DISABLE", "1")  # read when tqdm is imported: one bar, which is ours
    tasks = Tasks(values.tasks, num_fewshot=values.num_fewshot, limit=values.limit, folder=values.tasks_folder)
    tasks.load()  # first, so that it fails before the model is loaded, which takes longer
    with show_progress("opening the model"):
        trained = inference.trained_model(values)
    from hlat_jax.evaluate.harness import HarnessModel

    print(trained.described, flush=True)
    with show_progress("preparing the questions") as status:
        results = tasks(HarnessModel(trained, batch_size=values.batch_size, bos=values.bos, status=status))
    if values.limit:
        limit = counted(values.limit, "question")
        print(f"Only {limit} of each task: for a quick try, not comparable with published figures.")
    print(report(results, tasks, name=str(values.checkpoint)))
    if values.json:
        kept = {key: results[key] for key in ("results", "n-shot", "n-samples", "versions")}
        text = json.dumps(kept | {"checkpoint": str(trained.folder)}, indent=1, default=str)
        pathlib.Path(values.json).write_text(text + "\n")


def _run_text(values: flags.FlagValues) -> None:
    with show_progress("opening the model"):
        trained = inference.trained_model(values)
    limit = trained.model.max_positions
    window = values.window or limit
    if not 2 <= window <= limit:
        raise ValueError(f"--window={window} must be from 2 to model.max_positions={limit}.")
    num_documents, documents = _documents(values, trained)
    from hlat_jax.evaluate import perplexity
    from hlat_jax.run.validation import measures

    print(trained.described, flush=True)
    began, row_degree = time.monotonic(), trained.layout.row_degree
    sizes = {"num_rows": values.batch_size * row_degree, "row_degree": row_degree, "window": window}
    with show_progress("compiling") as status:
        predict = _predict(trained)
        totals = perplexity.total(documents, predict=predict, num_documents=num_documents, status=status, **sizes)
    measured = measures(totals.nats, totals.num_tokens, num_bytes=totals.num_bytes)
    rate = totals.num_tokens / (time.monotonic() - began)
    lengths = " and ".join(f"{length:,}" for length in totals.padded_lengths)
    print(
        f"window           at most {window:,} tokens, stride {window - window // 2:,}; padded to {lengths}\n"
        f"text             {counted(totals.num_documents, 'document')}, {counted(totals.num_bytes, 'byte')}, "
        f"{counted(totals.num_tokens, 'token')}, {counted(totals.num_windows, 'window')}; {rate:,.0f} tokens/s, with "
        "compilation"
    )
    _report(values, trained, measured, dataclasses.asdict(totals) | {"window": window})


def _run_validation(values: flags.FlagValues) -> None:
    """Evaluates the rows that the training loop evaluates, under the run's precision policy."""
    from hlat_jax.data.held_out import open_held_out
    from hlat_jax.data.streams import data_drift
    from hlat_jax.run.resume import saved_config
    from hlat_jax.run.validation import Validation
    from hlat_jax.store.checkpoint_checks import RUN_ITEM, saved_run

    with show_progress("opening the model"):
        trained = inference.trained_model(values)
    if not (trained.folder / RUN_ITEM).exists():
        raise ValueError(
            f"--validation: {trained.folder} holds weights without a run, so it has no data.validation; give "
            "--data=SOURCE, or the checkpoint of a run."
        )
    settings = saved_run(trained.folder)["metadata"]
    run = saved_config(settings)
    held_out, manifest = open_held_out(
        run.data,
        tokenizer=trained.tokenizer,
        num_batches=run.train.num_eval_batches,
        rows_per_batch=values.batch_size * trained.layout.row_degree,
    )
    if not held_out:
        raise ValueError(f"--validation: the run of {trained.folder} has no data.validation; give --data=SOURCE.")
    changed = data_drift(settings, settings | {"validation_manifest": manifest}, num_batches=0)
    if changed:
        raise ValueError("--validation: the held-out text differs from that of the run:\n  " + "\n  ".join(changed))
    print(trained.described)
    for name, source in held_out.items():
        print(f"validation       {source.describe(name)}")
    eval_step = _eval_step(trained, policy=run.precision.policy, packing=run.data.packing)
    with show_progress("compiling") as status:
        measured = Validation(held_out, eval_step, trained.layout, status)(trained.params)
    coverage = {name: dataclasses.asdict(source.coverage) for name, source in held_out.items()}
    _report(values, trained, measured, {"coverage": coverage})


def _report(values: flags.FlagValues, trained: Any, measured: dict[str, float], more: dict[str, Any]) -> None:
    """Prints loss, perplexity and bits per byte, and writes them and `more` to --json."""
    print(
        f"loss             {measured['eval_loss']:.6f} nats per token\n"
        f"perplexity       {measured['perplexity']:.4f}\n"
        f"bits per byte    {measured['bits_per_byte']:.6f}"
    )
    if values.json:
        report = more | measured | {"checkpoint": str(trained.folder)}
        finite = {
            key: None if isinstance(value, float) and not math.isfinite(value) else value
            for key, value in report.items()
        }
        pathlib.Path(values.json).write_text(json.dumps(finite, indent=1, allow_nan=False) + "\n")


def _eval_step(
    trained: inference.TrainedModel, *, policy: str = "", packing: str = "concat"
) -> Callable[[Any, Any], tuple[Any, Any]]:
    """Returns (params, batch) -> (sum of the losses in nats, number of tokens), as validation in training computes it.

    Compiles once for each batch shape. `policy` is that of `config.precision`; "": by the dtype of the parameters.
    """
    from hlat_jax.generate.decoding import serving
    from hlat_jax.program import make_program

    # implementations for these devices, not from the ops table of the machine that trained; no backward pass: no remat
    model = dataclasses.replace(serving(trained.model, trained.layout.platform), ops_table="", remat="none")
    by_dtype = "fp32" if trained.params["embed"].dtype == np.float32 else "bf16"

    @functools.cache
    def of_shape(num_rows: int, seq_len: int) -> Callable[..., Any]:
        config = config_lib.default()
        config.model.update(dataclasses.asdict(model))
        config.parallel.update(trained.layout.degrees)
        config.data.update(batch_size=num_rows, seq_len=seq_len, packing=packing)
        config.precision.policy = policy or by_dtype
        return make_program(resolve(config), trained.layout).eval_step

    return lambda params, batch: of_shape(*batch.tokens.shape)(params, batch)


def _predict(trained: inference.TrainedModel) -> Callable[[Any], tuple[Any, Any]]:
    """Returns batch -> (sum of the losses in nats, number of tokens)."""
    from hlat_jax.parallel.sharding import shard_batch

    eval_step = _eval_step(trained)
    return lambda batch: eval_step(trained.params, shard_batch(batch, trained.layout))


def _documents(values: flags.FlagValues, trained: inference.TrainedModel) -> tuple[int, Iterator[Any]]:
    """Returns the number of documents and an iterator over them.

    Raises for files that are missing or not UTF-8 before it is iterated.
    """
    from hlat_jax.data import sources

    tokenizer = trained.tokenizer
    [first] = trained.first_ids(values.bos) or [tokenizer.eos_id]
    if values.data:
        corpus = sources.open_corpus(
            values.data, text_field=values.text_field, key="--data", tokenizer_sha256=tokenizer.sha256
        )
        return len(corpus), (_document(corpus, number, tokenizer, first=first) for number in range(len(corpus)))
    try:
        text = pathlib.Path(values.text).expanduser().read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"--text={values.text} is not UTF-8: {error}.") from None
    return 1, iter([_document([text], 0, tokenizer, first=first)])


def _document(documents: Any, number: int, tokenizer: Any, *, first: int) -> Any:
    """Returns a document of a text, or of stored token ids without their BOS and EOS."""
    from hlat_jax.evaluate.perplexity import Document

    record = documents[number]
    if isinstance(record, str):
        ids, num_bytes = tokenizer.encode(record), len(record.encode("utf-8"))
    else:
        ids = record[~np.isin(record, [tokenizer.bos_id, tokenizer.eos_id])]
        num_bytes = round(tokenizer.bytes_of(record, documents.text_bytes(number)).sum())
    return Document(np.concatenate([[first], ids]).astype(np.int32), num_bytes)


def _define(values: flags.FlagValues) -> None:
    inference.define(values)
    options = {"flag_values": values}
    flags.DEFINE_string("text", "", "File to evaluate as one document.", **options)
    flags.DEFINE_string("data", "", "Files, folders or globs whose records are documents.", **options)
    flags.DEFINE_bool("validation", False, "Evaluate the validation rows of the run.", **options)
    flags.DEFINE_list("tasks", [], "Tasks of the LM Evaluation Harness; hlat: the paper's suite.", **options)
    flags.DEFINE_string("tasks_folder", "", "Folder with your own tasks, in YAML.", **options)
    flags.DEFINE_integer("num_fewshot", -1, "Solved examples before a question; -1: the task's number.", -1, **options)
    flags.DEFINE_integer("limit", 0, "Most questions of each task, for a quick try; 0: all.", 0, **options)
    flags.DEFINE_string("text_field", "text", "JSONL key or column that holds the text.", **options)
    flags.DEFINE_bool("bos", None, "Begin texts with BOS; unset: as the tokenizer or run is configured.", **options)
    flags.DEFINE_integer("window", 0, "Most tokens of a window; 0: model.max_positions.", 0, **options)
    flags.DEFINE_integer("batch_size", 8, "Windows, or questions, in a batch on each replica.", 1, **options)
    flags.DEFINE_string("json", "", "Also write the figures to this file.", **options)


if __name__ == "__main__":
    flags_lib.main(main)
