"""`python -m hlat_jax.evaluate --checkpoint=runs/tiny --text=FILE`: perplexity and bits per byte of any text.

Owns the command line and how a text becomes a document. What is predicted from what is in `eval.perplexity`.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from absl import flags, logging

from hlat_jax import config as config_lib
from hlat_jax import flags as flags_lib
from hlat_jax import inference

_USAGE = """Usage: python -m hlat_jax.evaluate --checkpoint=FOLDER --text=FILE [--FLAG=VALUE ...]
       python -m hlat_jax.evaluate --checkpoint=FOLDER --data=SOURCE [--FLAG=VALUE ...]

FILE is one document in UTF-8. Of SOURCE, which is files, folders or globs as in data.validation, every record is one.
Each document begins with EOS, as in training, or with --bos; all its tokens are predicted, once.
"""


def main(argv: Sequence[str]) -> int:
    """Prints what a model makes of a text; returns 0."""
    values = flags_lib.parse_own(argv, _define, usage=_USAGE)
    if bool(values.text) == bool(values.data):
        raise ValueError("give one of --text=FILE and --data=SOURCE.")
    logging.set_verbosity(logging.ERROR)  # libraries tell of profilers; our own words are printed
    trained = inference.trained_model(values)
    window = _window(values.window, trained.model)
    documents = _documents(values, trained.tokenizer)
    from hlat_jax.eval import perplexity
    from hlat_jax.eval.validation import measures

    print(f"{trained.described}\nwindow           {window:,} tokens, of which {window // 2:,} are seen before")
    began, num_rows = time.monotonic(), values.batch_size * trained.layout.row_degree
    predict = _predict(trained, num_rows=num_rows, window=window)
    totals = perplexity.total(documents, predict=predict, num_rows=num_rows, window=window)
    found = measures(totals.nats, totals.num_tokens, num_bytes=totals.num_bytes)
    rate = totals.num_tokens / (time.monotonic() - began)
    print(
        f"text             {totals.num_documents:,} documents, {totals.num_bytes:,} bytes, "
        f"{totals.num_tokens:,} tokens, {totals.num_windows:,} windows; {rate:,.0f} tokens/s, compiling counted\n"
        f"loss             {found['eval_loss']:.6f} nats per token\n"
        f"perplexity       {found['perplexity']:.4f}\n"
        f"bits per byte    {found['bits_per_byte']:.6f}"
    )
    if values.json:
        report = dataclasses.asdict(totals) | found | {"window": window, "checkpoint": str(trained.folder)}
        pathlib.Path(values.json).write_text(json.dumps(report, indent=1) + "\n")
    return 0


def _predict(trained: inference.TrainedModel, *, num_rows: int, window: int) -> Callable[[Any], tuple[Any, Any]]:
    """Returns batch -> (sum of the losses in nats, counted tokens), as validation computes it during training."""
    from hlat_jax.sharding import shard_batch
    from hlat_jax.step import make_eval_step

    config = config_lib.default()
    config.model.update(dataclasses.asdict(trained.model))
    config.parallel.update(trained.layout.degrees)
    config.data.batch_size, config.data.seq_len = num_rows, window
    config.precision.policy = "fp32" if trained.params["embed"].dtype == np.float32 else "bf16"
    eval_step = make_eval_step(config_lib.resolve(config), trained.layout)
    return lambda batch: eval_step(trained.params, shard_batch(batch, trained.layout))


def _documents(values: flags.FlagValues, tokenizer: Any) -> Iterator[Any]:
    """Returns an iterator over documents; what can be refused is refused at once."""
    from hlat_jax.data import sources

    first = tokenizer.bos_id if values.bos else tokenizer.eos_id
    if first < 0:
        raise ValueError(f"--bos: the tokenizer {tokenizer.path} has no BOS; leave it out.")
    if values.data:
        corpus = sources.open_corpus(
            values.data, text_field=values.text_field, key="--data", tokenizer_sha256=tokenizer.sha256
        )
        return (_document(corpus[number], tokenizer, first=first) for number in range(len(corpus)))
    path = pathlib.Path(values.text).expanduser()
    if not path.is_file():
        raise ValueError(f"--text={values.text}: no such file (looked from {pathlib.Path.cwd()}).")
    try:
        text = path.read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"--text={values.text} is not UTF-8: {error}.") from None
    return iter([_document(text, tokenizer, first=first)])


def _document(record: str | np.ndarray, tokenizer: Any, *, first: int) -> Any:
    """Returns a document of a text, or of stored token ids, whose EOS is left out."""
    from hlat_jax.eval.perplexity import Document

    if isinstance(record, str):
        ids, num_bytes = tokenizer.encode(record), len(record.encode("utf-8"))
    else:
        ids = record[record != tokenizer.eos_id]
        num_bytes = len(tokenizer.decode(ids).encode("utf-8"))
    return Document(np.concatenate([[first], ids]).astype(np.int32), num_bytes)


def _window(asked: int, model: config_lib.ModelConfig) -> int:
    window = asked or model.max_positions
    if not 2 <= window <= model.max_positions:
        raise ValueError(f"--window={window} must lie in 2 .. {model.max_positions}, which is model.max_positions.")
    return window


def _define(values: flags.FlagValues) -> None:
    inference.define(values)
    options = {"flag_values": values}
    flags.DEFINE_string("text", "", "File to evaluate as one document.", **options)
    flags.DEFINE_string("data", "", "Files, folders or globs whose records are documents.", **options)
    flags.DEFINE_string("text_field", "text", "JSONL key or column that holds the text.", **options)
    flags.DEFINE_bool("bos", False, "Begin documents with BOS in the place of EOS.", **options)
    flags.DEFINE_integer("window", 0, "Tokens of a window; 0: model.max_positions.", 0, **options)
    flags.DEFINE_integer("batch_size", 8, "Windows that run together, on each replica.", 1, **options)
    flags.DEFINE_string("json", "", "Also write the figures to this file.", **options)


if __name__ == "__main__":
    flags_lib.main(main)
