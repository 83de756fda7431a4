"""Weights from Hugging Face and to it, and the mean of checkpoints: `python -m hlat_jax.hf import|export|average`."""

from __future__ import annotations

import os
import pathlib
import shutil
import sys
import time
from collections.abc import Callable, Sequence

from absl import flags, logging

from hlat_jax.cli import flags as flags_lib
from hlat_jax.cli.path_checks import check_new_folder
from hlat_jax.config import count_text
from hlat_jax.facts.local_paths import is_bucket
from hlat_jax.store.bucket import local_copy, send_staged, staging_folder
from hlat_jax.store.progress import show_progress
from hlat_jax.weights.hf_files import DTYPES
from hlat_jax.weights.path_checks import check_checkpoint, check_hugging_face

USAGE = """Usage: python -m hlat_jax.hf VERB ...

  import DIR --out=DIR             checks a Hugging Face folder and copies it, with checksums
  export CKPT --out=DIR            weights to a folder that transformers loads
  average CKPT CKPT ... --out=DIR  the mean of checkpoints of one model

CKPT is a run folder (its newest checkpoint), one of its checkpoints (RUN/checkpoints/STEP), or a Hugging Face folder.
Run VERB --help for details.
"""
_IMPORT = """Usage: python -m hlat_jax.hf import DIR --out=DIR [flags]

Reads config.json and model.safetensors, or the files that model.safetensors.index.json names, and checks every name,
shape and dtype. Copies them with tokenizer and generation config, and adds checksums. Supports Llama 1, 2 and 3,
SmolLM2, TinyLlama, OpenLLaMA, Mistral, Qwen 2, 2.5 and 3 (dense). A field of config.json that is known to change the
computation must have a supported value. A warning names unknown fields, which are kept. --verify then compares the
logits of both models for 128 random tokens and for 128 tokens of a text, in float32, one model in memory at a time. If
a difference is above 16 times the rounding error of transformers' own float32, it is an error and nothing is left at
--out.
"""
_EXPORT = """Usage: python -m hlat_jax.hf export CKPT --out=DIR [flags]

Writes safetensors with config.json, generation_config.json and tokenizer, reads them back and compares every bit.
If the precision policy keeps fp32 master weights (mixed), exports them in float32. --dtype=bfloat16 rounds them.
Under the other policies the parameters are exported in their stored dtype. A run that began with weights of Hugging
Face in bfloat16 is exported in bfloat16, unless you give --dtype=float32.
"""
_AVERAGE = """Usage: python -m hlat_jax.hf average CKPT CKPT ... --out=DIR

Averages in fp32, one parameter at a time. The checkpoints must have the same model, dtype and tokenizer.
"""


def main(argv: Sequence[str]) -> int:
    """Runs one verb, and returns the exit code, which is 0, or 1 after an OSError."""
    verbs: dict[str, Callable[[Sequence[str]], None]] = {"import": _import, "export": _export, "average": _average}
    verb = flags_lib.choose_verb(argv, verbs, usage=USAGE)
    logging.set_verbosity(logging.ERROR)
    os.environ.setdefault("JAX_PLATFORMS", "cpu")  # the work is in host memory and needs no accelerator
    try:
        verbs[verb](argv[1:])
    except OSError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def _import(argv: Sequence[str]) -> None:
    values = _flags("of the parameters. By default as in the files, with float16 as float32")
    flags.DEFINE_bool("verify", False, "Compare logits with transformers.", flag_values=values)
    folder, out = _paths(argv, values, usage=_IMPORT, expected="a folder of Hugging Face")
    check_hugging_face(folder)  # before JAX is imported
    from hlat_jax.hf import verifying
    from hlat_jax.hf.exporting import whole_folder
    from hlat_jax.hf.importing import import_checkpoint
    from hlat_jax.run import costs
    from hlat_jax.weights.hf_files import companions
    from hlat_jax.weights.hf_reading import open_checkpoint
    from hlat_jax.weights.trained import open_weights

    if values.verify:
        verifying.require_transformers()  # before any work
    began = time.monotonic()
    checkpoint = open_checkpoint(folder, dtype=values.dtype)
    if checkpoint.warning:
        print(f"warning: {checkpoint.warning}", file=sys.stderr)
    with whole_folder(out) as partial:
        with show_progress("importing") as status:
            import_checkpoint(checkpoint, partial, status=status)
        verified = ""
        if values.verify:
            try:
                with show_progress("comparing the logits with transformers"):
                    verified = verifying.verify(checkpoint, open_weights(partial)) + "\n"
            except ValueError as error:
                raise ValueError(f"{error} Removed {out}. To keep it, import without --verify.") from None
    counted = f"{costs.num_params(checkpoint.model):,} parameters in {checkpoint.dtype.name}"
    print(f"{counted} from {count_text(len(checkpoint.tensors), 'tensor')}, with {', '.join(companions(folder))}")
    print(f"{verified}wrote {out} in {time.monotonic() - began:.1f} s")


def _export(argv: Sequence[str]) -> None:
    dtype = "of the tensors. By default as stored, for the fp32 masters if there are any"
    values = _flags(dtype, is_bucket=True)
    flags_lib.define_path(values, "tokenizer", "Tokenizer file, for a folder whose own is missing.")
    path, out = _paths(argv, values, usage=_EXPORT, expected="a checkpoint")
    from hlat_jax.data.path_checks import check_tokenizer  # not at the top: --help does not need it

    check_checkpoint(str(path))
    check_tokenizer(values.tokenizer, key="--tokenizer")
    from hlat_jax.hf.exporting import export_checkpoint
    from hlat_jax.run import costs
    from hlat_jax.weights.trained import open_weights

    began = time.monotonic()
    with show_progress("opening the weights") as status:
        weights = open_weights(path, masters=True, tokenizer=values.tokenizer)
        dtype = export_checkpoint(weights, out, dtype=values.dtype, status=status)
    send_staged(out, values.out, last="config.json")
    counted = f"{costs.num_params(weights.model):,} parameters in {dtype}"
    print(f"{counted} from {weights.folder} (step {weights.step}), read back and compared")
    print(f"wrote {values.out} in {time.monotonic() - began:.1f} s")


def _average(argv: Sequence[str]) -> None:
    values = _flags()
    paths = flags_lib.parse_inputs(argv, values, usage=_AVERAGE, missing="no checkpoints. Name two or more.")
    out = pathlib.Path(values.out)
    if len(paths) > 1:  # else `average` says that one is too few
        for path in paths:
            check_checkpoint(path)
        check_new_folder(out, key="--out")
    from hlat_jax.hf.averaging import average

    with show_progress("averaging") as status:
        averaged = average(paths, out, status=status)
    for weights in averaged:
        print(f"step {weights.step:>8,}  {weights.folder}")
    print(f"wrote their mean to {values.out}")


def _flags(dtype: str = "", *, is_bucket: bool = False) -> flags.FlagValues:
    """Returns --out, which may be in a bucket if `is_bucket`, and, with its help, --dtype."""
    values = flags.FlagValues()
    flags_lib.define_path(values, "out", "Folder to write.", use="bucket" if is_bucket else "write")
    if dtype:
        flags.DEFINE_enum("dtype", "", ["", *DTYPES], f"One of {', '.join(DTYPES)}, {dtype}.", flag_values=values)
    return values


def _paths(
    argv: Sequence[str], values: flags.FlagValues, *, usage: str, expected: str
) -> tuple[pathlib.Path, pathlib.Path]:
    """Returns the one input and the output of a command line."""
    words = flags_lib.parse_inputs(argv, values, usage=usage, missing=f"no input. Name {expected}.")
    if len(words) > 1:
        raise ValueError(f"{len(words)} inputs ({', '.join(words)}) are too many. Name {expected}.")
    out = staging_folder(values.out, key="--out")
    if is_bucket(values.out):
        shutil.rmtree(out, ignore_errors=True)  # of an export that was cut short
    else:
        check_new_folder(out, key="--out")
    return local_copy(words[0]), out


if __name__ == "__main__":
    flags_lib.main(main)
