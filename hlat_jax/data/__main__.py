"""The commands for text, `python -m hlat_jax.data build|tokenizer|stats|peek`."""

from __future__ import annotations

import os
import pathlib
import time
from collections.abc import Callable, Sequence

from absl import flags, logging

from hlat_jax.cli import flags as flags_lib
from hlat_jax.config import Config, DataConfig
from hlat_jax.facts.local_paths import is_bucket
from hlat_jax.store.bucket import send_staged, staging_folder
from hlat_jax.store.progress import show_progress

USAGE = """Usage: python -m hlat_jax.data VERB ...

  build IN... --out=DIR [--tokenizer=MODEL]      converts text to a dataset of shards of texts or token ids
  tokenizer IN... --vocab_size=N --out=F.model   trains a SentencePiece tokenizer
  stats --config=NAME                            counts documents, bytes, tokens and epochs of a config's data
  peek --config=NAME --step=N [--row=R]          prints the text that a step trains on

IN is a file, a folder or a glob of .jsonl, .parquet, .arrow, .array_record, .txt or .md, also .gz or .zst of JSONL and
text.
Run VERB --help for details.
"""

_BUILD = """Usage: python -m hlat_jax.data build IN... --out=DIR [flags]

Writes the documents of IN, in order, as ArrayRecord shards with a manifest. data.train=DIR then trains on them. With
--tokenizer they are stored as token ids, so that training does not tokenize them again. After a kill, run the same
command again to resume. The same inputs give the same bytes with any number of --workers.

On several machines, give each the same command and its own --part=I/N. data.train=DIR joins the parts: the documents
are those of one build, in the same order. N is at most the number of files, as no file is split.
"""

_TOKENIZER = """Usage: python -m hlat_jax.data tokenizer IN... --vocab_size=N --out=F.model [flags]

Trains a SentencePiece model (BPE, byte fallback) on a sample of IN. The model is lossless, so decoding returns the
encoded text. The ids of unk, bos and eos are 0, 1 and 2.
"""


def main(argv: Sequence[str]) -> int:
    """Runs one verb; returns the exit code."""
    verbs = {"build": _build, "tokenizer": _tokenizer, "stats": _stats, "peek": _peek}
    verb = flags_lib.choose_verb(argv, verbs, usage=USAGE)
    logging.set_verbosity(logging.ERROR)  # silence absl INFO logs
    return verbs[verb](argv[1:])


def _parse(argv: Sequence[str], values: flags.FlagValues, *, usage: str) -> list[str]:
    return flags_lib.parse_inputs(argv, values, usage=usage, missing="no inputs. Give files, folders or globs of text.")


def _define_reading(values: flags.FlagValues) -> None:
    options = {"flag_values": values}
    flags.DEFINE_string("text_field", "text", "JSONL key or column that holds the text.", **options)
    about = "Stop at a record without text, or skip and count it."
    flags.DEFINE_enum("on_bad_record", "raise", ["raise", "skip"], about, **options)


def _build(argv: Sequence[str]) -> int:
    values = flags.FlagValues()
    flags_lib.define_path(values, "out", "Folder to write, also in a bucket.", use="bucket")
    flags_lib.define_path(values, "tokenizer", "SentencePiece model, to store token ids. Empty stores text.")
    about = "As data.max_document_chars, with --tokenizer."
    flags.DEFINE_integer("max_document_chars", 500_000, about, 1, flag_values=values)
    flags.DEFINE_bool("prepend_bos", False, "As data.prepend_bos, with --tokenizer.", flag_values=values)
    about = "As data.batch_size. Fewer .txt and .md files are cut at paragraphs."
    flags.DEFINE_integer("batch_size", DataConfig.batch_size, about, 1, flag_values=values)
    flags.DEFINE_integer("shard_mb", 256, "Text per shard, in 10**6 bytes.", 1, flag_values=values)
    about = "Build part I of N of the inputs, as in 2/4, into DIR/part-00002-of-00004."
    flags.DEFINE_string("part", "", about, flag_values=values)
    flags.DEFINE_integer("workers", 0, "Threads that tokenize. 0 means one for each core.", 0, flag_values=values)
    _define_reading(values)
    words = _parse(argv, values, usage=_BUILD)
    from hlat_jax.data.build import build  # not at the top: --help does not need the readers
    from hlat_jax.data.formats.files import MANIFEST_NAME
    from hlat_jax.data.formats.parts import parse_part

    same = ("text_field", "tokenizer", "max_document_chars", "on_bad_record", "prepend_bos", "batch_size")
    named = {name: values[name].value for name in same}
    part = parse_part(values.part)
    whole_url = values.out if is_bucket(values.out) else ""
    below = part.folder if part is not None and whole_url else ""  # each part is staged and sent alone
    url = f"{values.out.rstrip('/')}/{below}" if below else values.out
    options = build.BuildOptions(shard_bytes=values.shard_mb * 1_000_000, part=part, url=whole_url, **named)
    start_s, out = time.monotonic(), staging_folder(url, key="--out")
    num_workers = values.workers or os.cpu_count() or 1
    with show_progress("opening the inputs") as status:
        result = build.build(words, out=out, options=options, num_workers=num_workers, status=status)
    send_staged(out / below, url, last=MANIFEST_NAME)
    print(build.summary(result, out=values.out, elapsed_s=time.monotonic() - start_s))
    return 0


def _tokenizer(argv: Sequence[str]) -> int:
    values = flags.FlagValues()
    flags_lib.define_path(values, "out", "The .model file to write.", use="write")
    about = "Tokens of the vocabulary, with 3 controls and 256 bytes."
    flags.DEFINE_integer("vocab_size", 32_000, about, flag_values=values)
    flags.DEFINE_integer("sample_mb", 100, "Text to train on at most, in 10**6 bytes.", 1, flag_values=values)
    _define_reading(values)
    words = _parse(argv, values, usage=_TOKENIZER)
    from hlat_jax.data.build import tokenizer_training

    with show_progress("opening the inputs") as status:
        summary = tokenizer_training.train(
            words,
            out=pathlib.Path(values.out),
            vocab_size=values.vocab_size,
            sample_bytes=values.sample_mb * 1_000_000,
            text_field=values.text_field,
            on_bad_record=values.on_bad_record,
            status=status,
        )
    print(summary)
    return 0


def _stats(argv: Sequence[str]) -> int:
    def define(values: flags.FlagValues) -> None:
        about = "Text to tokenize of each source, in 10**6 bytes. 0 means all."
        flags.DEFINE_integer("sample_mb", 16, about, 0, flag_values=values)

    config, values = _parse_config(argv, define)
    from hlat_jax.data.build import stats

    with show_progress("opening the text") as status:
        report = stats.report(config, sample_bytes=values.sample_mb * 1_000_000, status=status)
    print(report)
    return 0


def _peek(argv: Sequence[str]) -> int:
    def define(values: flags.FlagValues) -> None:
        flags.DEFINE_integer("step", None, "Show the batch of this step, at least 1.", flag_values=values)
        flags.DEFINE_integer("row", None, "Only this row of the batch.", flag_values=values)
        flags_lib.define_path(values, "workdir", "Run folder, by default runs/NAME.")

    config, values = _parse_config(argv, define)
    if values.step is None or values.step < 1:
        raise ValueError(f"--step={values.step} must be at least 1. Step N trains on batch N.")
    if values.row is not None and not 0 <= values.row < config.data.batch_size:
        raise ValueError(f"--row={values.row} must be in 0 .. data.batch_size - 1 = {config.data.batch_size - 1}.")
    from hlat_jax.data.build import peek

    return peek.peek(config, pathlib.Path(values.workdir or f"runs/{config.name}"), step=values.step, row=values.row)


def _parse_config(argv: Sequence[str], define: Callable[[flags.FlagValues], None]) -> tuple[Config, flags.FlagValues]:
    """Returns the config of a command line, whose paths exist, and the command's own flags, maybe with a --workdir."""
    from hlat_jax.data import path_checks
    from hlat_jax.weights.init_model import parse_config

    config, values = parse_config(argv, define)
    path_checks.check_mixture(config.data)  # before JAX is imported
    path_checks.check_texts(config.data)
    path_checks.check_records(config.data)
    path_checks.check_tokenizer(config.data.tokenizer)
    return config, values


if __name__ == "__main__":
    flags_lib.main(main)
