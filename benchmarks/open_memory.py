"""Peak host memory of opening a model for generate and evaluate, against its weights.

    python benchmarks/open_memory.py [--layers 24] [--folder /tmp/open_memory]

writes a model of width 768 as a run under `mixed` (bf16 parameters, and 12 bytes a parameter of fp32 masters and Adam
moments, as one process on one device saves them), as a Hugging Face folder in bf16, and as the import of that. Opens
each in a process of its own on this CPU, and restores the run's whole state, as training that resumes. Prints the
largest memory above that of the process before, what is read of the arrays, and the seconds, checksums included.
"""

import argparse
import pathlib
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from hf_memory import write_synthetic

from hlat_jax import config as config_lib
from hlat_jax.cli import config_files
from hlat_jax.config import ParallelConfig
from hlat_jax.data.tokenizer import Tokenizer
from hlat_jax.generate import inference
from hlat_jax.parallel.sharding import make_layout
from hlat_jax.program import make_program
from hlat_jax.resolve import resolve
from hlat_jax.store.checkpoint import Checkpointer

MB = 1e6


def write_run(folder: pathlib.Path, config: config_lib.Config) -> None:
    """Writes a run folder with one checkpoint, of drawn values."""
    program = make_program(config, make_layout(config.parallel, jax.devices()[:1]))
    rng = np.random.default_rng(0)

    def draw(leaf):
        values = rng.standard_normal(leaf.shape, np.float32) if leaf.ndim else np.zeros(())
        return jax.device_put(values.astype(leaf.dtype), leaf.sharding)

    checkpointer = Checkpointer(folder, config=config.checkpoint)
    digest = Tokenizer(config.data.tokenizer).sha256
    metadata = {"config": config.to_dict(), "tokenizer_sha256": digest, "tokens": 0, "num_nonfinite": 0}
    position = np.zeros((config.data.batch_size, 3), np.int64)
    state = jax.tree.map(draw, program.abstract_state)
    checkpointer.save(0, state, position=position, metadata=metadata, norms={"params": 1.0})
    checkpointer.close()


def resident(key: str) -> int:
    """Returns the resident bytes of this process: VmRSS now, VmHWM at their peak."""
    status = pathlib.Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in status if line.startswith(key))


def measure(what: str, read: Callable[[], Any]) -> None:
    """Reads arrays and prints what that took."""
    import tensorstore

    jax.numpy.zeros(8).block_until_ready()  # starts the backend
    before, began = resident("VmRSS"), time.monotonic()
    pathlib.Path("/proc/self/clear_refs").write_text("5")  # the peak is that from here on
    arrays = jax.tree.leaves(jax.block_until_ready(read()))
    seconds = time.monotonic() - began
    total, largest = sum(leaf.nbytes for leaf in arrays), max(leaf.nbytes for leaf in arrays)
    peak = resident("VmHWM") - before
    metrics = tensorstore.experimental_collect_matching_metrics("/tensorstore/kvstore/file/bytes_read")
    bytes_read = sum(value["value"] for metric in metrics for value in metric["values"])
    print(
        f"{what} {total / MB:.0f} MB, the largest array {largest / MB:.0f}; peak {peak / MB:.0f} MB, "
        f"{peak / total:.2f} of the {what}; TensorStore read {bytes_read / MB:.0f} MB; {seconds:.1f} s",
        flush=True,
    )


def open_here(folder: str) -> None:
    tokenizer = "package:austen_2k.model"
    measure("weights", lambda: inference.open_model(folder, ParallelConfig(), tokenizer=tokenizer).params)


def resume_here(folder: str, config: config_lib.Config) -> None:
    program = make_program(config, make_layout(config.parallel, jax.devices()[:1]))
    checkpointer = Checkpointer(folder, config=config.checkpoint)
    measure("state", lambda: checkpointer.restore(program.abstract_state).state)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument(
        "--folder", type=pathlib.Path, default=pathlib.Path("/tmp/open_memory"), help="made, and removed"
    )
    parser.add_argument("--open", default="", help=argparse.SUPPRESS)
    parser.add_argument("--resume", default="", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.open:
        open_here(args.open)
        return
    mutable = config_files.load("tiny")
    sizes = {"embed_dim": 768, "mlp_dim": 2048, "num_heads": 12, "num_kv_heads": 12, "head_dim": 64}
    mutable.model.update(num_layers=args.layers, **sizes)
    mutable.precision.policy = "mixed"
    config = resolve(mutable)
    if args.resume:
        resume_here(args.resume, config)
        return
    run, source, imported = (args.folder / name for name in ("run", "hugging_face", "import"))
    try:
        write_run(run, config)
        write_synthetic(source, config.model)
        subprocess.run([sys.executable, "-m", "hlat_jax.hf", "import", source, f"--out={imported}"], check=True)
        for name, how, folder in (
            ("run", "open", run),
            ("hugging_face", "open", source),
            ("import", "open", imported),
            ("resumed run", "resume", run),
        ):
            print(f"{name:<14}", end="", flush=True)
            words = [sys.executable, __file__, f"--layers={args.layers}", f"--{how}={folder}"]
            subprocess.run(words, check=True)
    finally:
        shutil.rmtree(args.folder, ignore_errors=True)


if __name__ == "__main__":
    main()
