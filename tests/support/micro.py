"""A run of a second: a config file derived from `tiny`, the command on it in a process of its own, and its results."""

import json
import os
import pathlib
import subprocess
import sys
from collections.abc import Callable, Collection

import jax
import ml_collections
import numpy as np
import pytest

from hlat_jax import train as train_lib
from hlat_jax.cli import config_files
from hlat_jax.parallel.sharding import make_layout
from hlat_jax.program import make_program
from hlat_jax.resolve import resolve
from hlat_jax.store.checkpoint import Checkpointer
from hlat_jax.store.integrity import INTEGRITY_FILE, seal
from hlat_jax.store.metrics import ROWS_FILE

REPOSITORY = pathlib.Path(__file__).resolve().parents[2]
NUM_STEPS, EVAL_EVERY, SAVE_EVERY = 24, 6, 5
CONFIG = f"""
from hlat_jax.cli.config_files import load


def get_config():
    c = load("tiny")
    c.model.num_layers = 2
    c.model.embed_dim = 32
    c.model.mlp_dim = 48
    c.model.num_heads = 4
    c.model.num_kv_heads = 2
    c.model.head_dim = 8
    c.model.max_positions = 32
    c.optimizer.peak_lr = 1e-2
    c.optimizer.warmup_steps = 4
    c.optimizer.horizon_steps = 40
    c.data.batch_size = 4
    c.data.seq_len = 32
    c.data.max_document_chars = 2000  # so that rows are ready soon
    c.train.num_steps = {NUM_STEPS}
    c.train.eval_every_steps = {EVAL_EVERY}
    c.train.num_eval_batches = 96  # long enough to be caught in
    c.train.sample_prompt = ""
    c.train.eval_loss_high = 0.0
    c.train.eval_loss_low = 0.0
    c.checkpoint.every_steps = {SAVE_EVERY}
    c.checkpoint.keep_last = 2
    c.metrics.console = "off"
    c.metrics.plot = False
    return c
"""
# What a resumed run must repeat to the last bit; durations and rates are exempt.
EXACT_KEYS = (
    "step",
    "loss",
    "tokens",
    "grad_norm",
    "param_norm",
    "learning_rate",
    "batch_hash",
    "nonfinite",
    "eval_loss",
    "perplexity",
    "bits_per_byte",
    "eval_tokens",
)


def write_config(folder: pathlib.Path) -> pathlib.Path:
    """Writes the micro config to `folder/micro.py` and returns its path."""
    path = folder / "micro.py"
    path.write_text(CONFIG)
    return path


def hold_at(path: pathlib.Path, step: int) -> None:
    """Changes a config file: process 0 waits after the step as long as the file of the variable `HOLD` exists."""
    path.write_text(f"{_HOLD.format(step=step)}{path.read_text()}")


_HOLD = """
import os, time
from hlat_jax.data import positions

positions.EVERY_STEPS, _write = 1, positions.write

def _hold_and_write(workdir, step, **given):
    while step == {step} and os.path.exists(os.environ.get("HOLD", "")):
        time.sleep(0.01)
    return _write(workdir, step, **given)

positions.write = _hold_and_write
"""


def config(folder: pathlib.Path, **settings) -> ml_collections.ConfigDict:
    """Returns the micro config, written to `folder`, with settings given as SECTION__KEY=VALUE."""
    c = config_files.load(str(write_config(folder)))
    c.update_from_flattened_dict({key.replace("__", "."): value for key, value in settings.items()})
    return c


def train(c: ml_collections.ConfigDict, workdir: pathlib.Path, *, num_devices: int = 1, **options) -> int:
    """Trains a mutable config in this process, on the first virtual devices; returns the exit code."""
    devices = jax.devices("cpu")[:num_devices]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax, "devices", lambda *_: devices)
        return train_lib.train(resolve(c), workdir, **options)


def environment(cache: pathlib.Path | None = None, *, num_devices: int = 1) -> dict[str, str]:
    """Returns the environment of a run on virtual CPU devices, compiling into and out of `cache` when there is one."""
    env = dict(os.environ, JAX_PLATFORMS="cpu", PYTHONUNBUFFERED="1", PYTHONPATH=str(REPOSITORY))
    env["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={num_devices} --xla_backend_optimization_level=0"
    env["JAX_ENABLE_COMPILATION_CACHE"] = str(cache is not None)  # never that of this user
    if cache is not None:
        env["JAX_COMPILATION_CACHE_DIR"] = str(cache)
        env["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    return env


def command(config: pathlib.Path, workdir: pathlib.Path, *overrides: str) -> list[str]:
    """Returns the command that trains `config` in `workdir`; overrides are `section.key=value`."""
    words = [f"--config={config}", f"--workdir={workdir}", *(f"--config.{override}" for override in overrides)]
    return [sys.executable, "-m", "hlat_jax.train", *words]


def run(words: list[str], env: dict[str, str], *, timeout_s: float = 600) -> subprocess.CompletedProcess:
    """Runs a command to its end and returns what it printed and its exit code."""
    return subprocess.run(words, env=env, capture_output=True, text=True, timeout=timeout_s, check=False)


def rows(workdir: pathlib.Path) -> list[dict]:
    """Returns every row of metrics.jsonl; a line that is not whole raises."""
    return [json.loads(line) for line in (workdir / ROWS_FILE).read_text().splitlines()]


def exact(row: dict) -> dict:
    """Returns the part of a row that any repetition of the run must have bit for bit (floats as their hex digits)."""
    return {key: row[key].hex() if isinstance(row[key], float) else row[key] for key in EXACT_KEYS if key in row}


def saved_steps(workdir: pathlib.Path) -> list[int]:
    """Returns the steps of the complete checkpoints."""
    return sorted(int(path.name) for path in (workdir / "checkpoints").glob("*") if path.name.isdigit())


def has_trained(workdir: pathlib.Path) -> bool:
    """Returns whether a row of a step is on the disk."""
    path = workdir / ROWS_FILE
    return path.exists() and '"loss"' in path.read_text()


def row_differences(found: list[dict], wanted: list[dict], *, lost: Collection[int] = ()) -> list[str]:
    """Returns how the rows of a finished run differ from those of another of the same plan, timings apart.

    Args:
      found: rows of metrics.jsonl, with each step once and in order if nothing is wrong.
      wanted: rows of an undisturbed run.
      lost: steps whose rows may be missing, as their bytes were damaged.
    """
    mine, theirs = ([((row["step"], "loss" in row), exact(row)) for row in rows] for rows in (found, wanted))
    here = {key for key, _ in mine}
    theirs = [(key, row) for key, row in theirs if key in here or key[0] not in lost]
    if [key for key, _ in mine] != [key for key, _ in theirs]:
        steps = [[step for (step, trained), _ in rows if trained] for rows in (mine, theirs)]
        return [f"rows of other steps, or in another order: {steps[0]}, not {steps[1]}"]
    for ((step, _), a), (_, b) in zip(mine, theirs, strict=True):
        if a != b:
            return [f"step {step} differs in {[name for name in b if a.get(name) != b[name]]}"]
    return []


def differences(
    config: pathlib.Path, found: pathlib.Path, wanted: pathlib.Path, *, lost: Collection[int] = ()
) -> list[str]:
    """Returns how the rows and the last checkpoint of a finished run differ from another's; [] when in no bit."""
    mine, theirs = (final_checkpoint(config, each) for each in (found, wanted))
    pairs = [("its step", mine[0], theirs[0]), ("data position", mine[2], theirs[2])]
    pairs.append(("tokens", mine[3]["tokens"], theirs[3]["tokens"]))
    pairs += [(name, mine[1].get(name), theirs[1].get(name)) for name in sorted(mine[1].keys() | theirs[1].keys())]
    problems = [f"final checkpoint differs in {name}" for name, a, b in pairs if a != b]
    return row_differences(rows(found), rows(wanted), lost=lost) + problems


def flip_exponent_bit(tree, name):
    """Returns nested dicts with the highest exponent bit of one value of a leaf flipped: of a weight, 1e36 and more."""
    *above, last = name.split(".")
    node = tree = jax.tree.map(lambda leaf: leaf, tree)
    for key in above:
        node = node[key]
    values = np.array(node[last])
    values.reshape(-1).view(np.uint32)[-1] ^= 1 << 30
    node[last] = jax.device_put(values, node[last].sharding)
    return tree


def flip_on_device(array, device, *, word=0, bit=0):
    """Returns an array with one bit of one word flipped in the shard of one device of this process alone."""
    parts = []
    for shard in array.addressable_shards:
        values = np.array(shard.data)
        if shard.device == device:
            values.reshape(-1).view(f"uint{8 * values.dtype.itemsize}")[word] ^= 1 << bit
        parts.append(jax.device_put(values, shard.device))
    return jax.make_array_from_single_device_arrays(array.shape, array.sharding, parts)


def reseal(folder: pathlib.Path, change: Callable[[dict], None]) -> None:
    """Changes what a checkpoint holds beside its state, and its sums with it."""
    path = folder / "run/metadata"
    run = json.loads(path.read_text())
    change(run)
    path.write_text(json.dumps(run))
    seal(folder, json.loads((folder / INTEGRITY_FILE).read_text())["files"])


def final_checkpoint(
    config: pathlib.Path, workdir: pathlib.Path, *, optimizer: str = "adamw"
) -> tuple[int, dict[str, bytes], list, dict]:
    """Returns (step, bytes and type of every array of the state, data position, metadata) of the newest checkpoint."""
    c = config_files.load(str(config))
    c.optimizer.name = optimizer
    resolved = resolve(c)
    layout = make_layout(resolved.parallel, jax.devices()[:1])
    checkpointer = Checkpointer(workdir, config=resolved.checkpoint)
    step, state, position, metadata = checkpointer.restore(make_program(resolved, layout).abstract_state)
    checkpointer.close()
    arrays = {
        jax.tree_util.keystr(path): f"{leaf.dtype}{leaf.shape}".encode() + np.asarray(leaf).tobytes()
        for path, leaf in jax.tree_util.tree_leaves_with_path(state)
    }
    return step, arrays, position.tolist(), metadata


def command_runner(command, monkeypatch, capsys):
    """Returns a function of the words of a command that runs it in this process: (exit code, stdout, stderr)."""

    def run(*words):
        from hlat_jax.cli import flags

        monkeypatch.setattr("sys.argv", ["hlat_jax", *map(str, words)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as exit_:
            flags.main(command)
        printed = capsys.readouterr()
        return exit_.value.code, printed.out, printed.err

    return run
