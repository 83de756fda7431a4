"""Peak host memory of `python -m hlat_jax.hf import` and `export`, against the largest stacked parameter.

    python benchmarks/hf_memory.py --layers 32 --folder /tmp/hf_memory

writes a synthetic bf16 checkpoint of the 7B shapes in shards of 5 GB (with all 32 layers 13.5 GB; the three folders
need 41 GB of disk), runs each command in a process of its own, and prints its peak resident memory. The bound: the
largest stacked parameter at its storage dtype, plus 2 GB.
"""

import argparse
import dataclasses
import json
import pathlib
import resource
import shutil
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np

from hlat_jax import config as config_lib
from hlat_jax.cli import config_files
from hlat_jax.hf import exporting
from hlat_jax.resolve import resolve
from hlat_jax.weights import hf_config, hf_names
from hlat_jax.weights.safetensors_file import Writer

GB = 1e9


def write_synthetic(folder: pathlib.Path, model: config_lib.ModelConfig) -> None:
    """Writes a checkpoint whose tensors hold what a generator gives, a tensor at a time."""
    folder.mkdir(parents=True)
    content = hf_config.config_json(model, dtype="bfloat16", token_ids={"bos_token_id": 1, "eos_token_id": 2})
    (folder / "config.json").write_text(json.dumps(content))
    dtype = np.dtype(jnp.bfloat16)
    tensors = {name: jax.ShapeDtypeStruct(shape, dtype) for name, shape in hf_names.expected_shapes(model).items()}
    shards = exporting.shards_of(tensors, exporting.SHARD_BYTES)
    rng = np.random.default_rng(0)
    for file, part in shards.items():
        writer = Writer(folder / file, tensors=part, metadata={"format": "pt"})
        for name, tensor in part.items():
            # any bits below the exponents of infinities
            drawn = rng.integers(0, 0x7F00, tensor.shape, np.uint16)
            writer.write(name, drawn.view(dtype))
        writer.close()
    where = {name: file for file, part in shards.items() for name in part}
    if len(shards) > 1:
        (folder / exporting.INDEX_FILE).write_text(json.dumps({"metadata": {}, "weight_map": where}))


def measured(*words: str) -> tuple[float, float]:
    """Returns (peak resident bytes, seconds) of a command."""
    began = time.monotonic()
    subprocess.run([sys.executable, "-m", "hlat_jax.hf", *words], check=True)
    return peak_of_children(), time.monotonic() - began


def peak_of_children() -> float:
    return resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--folder", type=pathlib.Path, required=True, help="made, and removed at the end")
    args = parser.parse_args()
    model = resolve(config_files.load("7b")).model
    model = dataclasses.replace(model, num_layers=args.layers)
    source, ours, back = (args.folder / name for name in ("source", "ours", "back"))
    try:
        write_synthetic(source, model)
        size = sum(path.stat().st_size for path in source.iterdir())
        shapes = [(args.layers if entry.stacked else 1, *entry.shape) for entry in hf_names.table(model)]
        largest = max(2 * int(np.prod(shape)) for shape in shapes)
        num_files = len(list(source.glob("*.safetensors")))
        print(f"{args.layers} layers of the 7B shapes, bf16: {size / GB:.2f} GB in {num_files} files")
        print(f"largest stacked parameter {largest / GB:.2f} GB, bound {largest / GB + 2:.2f} GB")
        # import first: the peak that the system keeps of all children only rises
        for words in (("import", str(source), f"--out={ours}"), ("export", str(ours), f"--out={back}")):
            peak, seconds = measured(*words)
            verdict = "within" if peak <= largest + 2 * GB else "ABOVE"
            print(f"{words[0]:<8} peak {peak / GB:.2f} GB, {verdict} the bound; {seconds:.0f} s")
    finally:
        shutil.rmtree(args.folder, ignore_errors=True)


if __name__ == "__main__":
    main()
