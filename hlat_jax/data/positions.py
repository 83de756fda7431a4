"""Data positions by batch, as the run folder or its checkpoints record them.

`<run folder>/positions/<number>.npz` holds the position after that many batches and the identity of the data up to
there (see streams). Step k trains on batch k, or on a later one if `train.skip_steps` left out some.
"""

from __future__ import annotations

import io
import pathlib
from collections.abc import Callable

import numpy as np

from hlat_jax.data.formats.decoding import NPZ_DAMAGE
from hlat_jax.data.streams import identity
from hlat_jax.store.atomic_files import write_whole
from hlat_jax.store.checkpoint_checks import RUN_FILE, RUN_ITEM, saved_run

FOLDER = "positions"
EVERY_STEPS = 1000  # between positions in that folder: `peek` reads at most so many batches before the one it shows

Identity = Callable[[int], str]  # of the data, up to a step


def write(workdir: pathlib.Path, num_batches: int, *, position: np.ndarray, data_identity: str) -> None:
    """Records the position after `num_batches` in a file that is written atomically."""
    (workdir / FOLDER).mkdir(exist_ok=True)
    content = io.BytesIO()
    np.savez(content, position=position, identity=np.asarray(data_identity))
    write_whole(workdir / FOLDER / f"{num_batches}.npz", content.getvalue())


def rewind(workdir: pathlib.Path, num_batches: int) -> None:
    """Removes positions after `num_batches`, perhaps of an attempt with other settings that has no checkpoint."""
    for path in workdir.glob(f"{FOLDER}/*.npz"):
        if path.stem.isdecimal() and int(path.stem) > num_batches:
            path.unlink()


def nearest_position(
    workdir: pathlib.Path, num_batches: int, *, data_identity: Identity
) -> tuple[int, np.ndarray, pathlib.Path] | None:
    """Returns (batches, position, file) of the last position recorded after `num_batches` or fewer, or None.

    Raises ValueError if that position, or a later one, belongs to other data.
    """
    files = {path: path.stem for path in workdir.glob(f"{FOLDER}/*.npz")}
    files |= {path: path.parents[1].name for path in workdir.glob(f"checkpoints/*/{RUN_ITEM}/{RUN_FILE}")}
    for named, path in sorted(((int(name), path) for path, name in files.items() if name.isdecimal()), reverse=True):
        record = _read_record(path, named)
        if record is None:
            continue
        recorded_after, position, recorded_identity = record
        if recorded_identity != data_identity(recorded_after):
            raise ValueError(
                f"{path} was written on other data (another text, tokenizer, chat template, seed, mixture or packing). "
                "Give the config in its run folder, or another --workdir. If you gave this config, the text has "
                "changed since: restore it."
            )
        if recorded_after <= num_batches:
            return recorded_after, position, path
    return None


def _read_record(path: pathlib.Path, named: int) -> tuple[int, np.ndarray, str] | None:
    """Returns (batches, position, identity of its data); None for a damaged, missing or renamed file."""
    try:
        if path.suffix == ".npz":
            with np.load(path) as kept:
                return named, kept["position"], str(kept["identity"])
        run = saved_run(path.parents[1])
        metadata, position = run["metadata"], np.asarray(run["position"], np.int64)
        num_batches = int(position[0, 0])  # every row begins with it
        if num_batches - metadata.get("skipped_batches", 0) != named:  # a renamed checkpoint
            return None
        hashes = {key: metadata[key] for key in ("manifest", "tokenizer_sha256")}
        return num_batches, position, identity(metadata["config"]["data"], num_batches=num_batches, **hashes)
    except (OSError, TypeError, AttributeError, OverflowError, *NPZ_DAMAGE):
        return None
