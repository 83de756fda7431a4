"""Data positions by batch, as the run folder or its checkpoints record them.

`<run folder>/positions/<number>.npz` holds the position after that many batches and the identity of the data it belongs
to, up to there (see streams). Step k trains batch k, or a later one where `train.skip_steps` has left out some.
"""

from __future__ import annotations

import io
import math
import pathlib
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from hlat_jax.data.streams import identity
from hlat_jax.store.atomic_files import write_whole
from hlat_jax.store.checkpoint_checks import RUN_FILE, RUN_ITEM, saved_run

FOLDER = "positions"
_CHECKPOINTS = "checkpoints"

Identity = Callable[[int], str]  # of the data, up to a step


def write(workdir: pathlib.Path, num_batches: int, *, position: np.ndarray, data_identity: str) -> None:
    """Records the position after `num_batches`; the file is written atomically."""
    (workdir / FOLDER).mkdir(exist_ok=True)
    content = io.BytesIO()
    np.savez(content, position=position, identity=np.asarray(data_identity))
    write_whole(workdir / FOLDER / f"{num_batches}.npz", content.getvalue())


def rewind(workdir: pathlib.Path, num_batches: int) -> None:
    """Removes positions after `num_batches`, perhaps of an attempt with other settings that has no checkpoint."""
    for kept, path in _indexed(workdir):
        if kept > num_batches:
            path.unlink()


def nearest(
    workdir: pathlib.Path, num_batches: int, *, data_identity: Identity
) -> tuple[int, np.ndarray, pathlib.Path] | None:
    """Returns (batches, position, file) of the last position recorded after `num_batches` or fewer; None if none is.

    Raises:
      ValueError: it belongs to other data.
    """
    files = [(kept, path) for kept, path in (*_indexed(workdir), *_saved(workdir)) if kept <= num_batches]
    files.sort(key=lambda item: item[0], reverse=True)
    return _first(files, workdir, data_identity=data_identity, most=num_batches)


def check_identity(workdir: pathlib.Path, step: int, *, data_identity: Identity) -> bool:
    """Returns whether the run has recorded, at any step, which data it was trained on.

    Raises:
      ValueError: the record nearest to `step` belongs to other data.
    """
    files = sorted([*_indexed(workdir), *_saved(workdir)], key=lambda item: abs(item[0] - step))
    return _first(files, workdir, data_identity=data_identity) is not None


def _indexed(workdir: pathlib.Path) -> Iterator[tuple[int, pathlib.Path]]:
    for path in (workdir / FOLDER).glob("*.npz"):
        if path.stem.isdecimal():
            yield int(path.stem), path


def _saved(workdir: pathlib.Path) -> Iterator[tuple[int, pathlib.Path]]:
    for path in (workdir / _CHECKPOINTS).glob("*"):
        if path.name.isdecimal() and (path / RUN_ITEM / RUN_FILE).is_file():
            yield int(path.name), path / RUN_ITEM / RUN_FILE


def _first(
    files: Sequence[tuple[int, pathlib.Path]], workdir: pathlib.Path, *, data_identity: Identity, most: float = math.inf
) -> tuple[int, np.ndarray, pathlib.Path] | None:
    """Returns (batches, position, file) of the first readable file that is after at most so many batches.

    Raises:
      ValueError: it belongs to other data.
    """
    for named, path in files:
        found = _read(path, named)
        if found is None or found[0] > most:
            continue
        kept, position, found_identity = found
        if found_identity != data_identity(kept):
            raise ValueError(
                f"{path} belongs to a run on other data (another text, tokenizer, seed, mixture or packing); use the "
                f"config it was trained with, see {workdir / 'config.json'}, or another --workdir."
            )
        return kept, position, path
    return None


def _read(path: pathlib.Path, named: int) -> tuple[int, np.ndarray, str] | None:
    """Returns (batches, position, identity of its data); None for a damaged, missing or renamed file."""
    try:
        if path.suffix == ".npz":
            with np.load(path) as kept:
                return named, kept["position"], str(kept["identity"])
        run = saved_run(path.parents[1])
        metadata, num_batches = run["metadata"], run["position"][0][0]  # every row begins with it
        if num_batches - metadata.get("skipped_batches", 0) != named:  # a renamed checkpoint
            return None
        hashes = {key: metadata[key] for key in ("manifest", "tokenizer_sha256")}
        found = identity(metadata["config"]["data"], num_batches=num_batches, **hashes)
        return num_batches, np.asarray(run["position"], np.int64), found
    except (OSError, EOFError, ValueError, LookupError, TypeError, NotImplementedError):
        return None
    except (zipfile.BadZipFile, zlib.error):
        return None
