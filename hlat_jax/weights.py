"""Trained parameters, wherever they lie: in a run folder, in one of its checkpoints, or in an imported folder.

    weights = open_weights("runs/tiny")
    params = weights.restore(None)
    logits_BTV = model.apply(params, weights.model, tokens_BT)

Owns how such a place is recognized and checked. Refuses to know what is done with the parameters.
"""

from __future__ import annotations

import dataclasses
import os
import pathlib
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hlat_jax.checkpoint import find_saved, read_arrays, saved_run
from hlat_jax.config import ModelConfig, check_model
from hlat_jax.data.tokenizer import Tokenizer
from hlat_jax.drift import differences
from hlat_jax.model import abstract_params

PARAMS, MASTERS = ("params",), ("opt_state", "master")  # where a state has them


@dataclasses.dataclass(frozen=True)
class Weights:
    """Parameters that are stored and undamaged, not read yet.

    Attributes:
      folder: what was opened: of the newest whole checkpoint, where a run folder was asked for.
      model: their model; `auto` implementations are not chosen yet.
      step: updates they have seen; 0 when imported.
      tokenizer: what `data.tokenizer.Tokenizer` takes; "" when there is none.
      tokenizer_sha256: of its file; "" when there is none.
      arrays: jax.ShapeDtypeStruct of every parameter, in the dtype that is stored, which is also the one that the
        precision policy of the run computes in, unless masters were asked for.
    """

    folder: pathlib.Path
    model: ModelConfig
    step: int
    tokenizer: str
    tokenizer_sha256: str
    arrays: Any
    _read: Callable[[Any], Any]

    def restore(self, shardings: Any) -> Any:
        """Returns the parameters as jax arrays, each process reading what its devices hold.

        Args:
          shardings: a tree like the parameters, or one for all of them; None: the default device.
        """
        if shardings is None:
            shardings = jnp.zeros(()).sharding
        if isinstance(shardings, jax.sharding.Sharding):
            shardings = jax.tree.map(lambda _: shardings, self.arrays)
        return self._read(
            jax.tree.map(
                lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
                self.arrays,
                shardings,
            )
        )

    def read(self, name: str) -> np.ndarray:
        """Returns one parameter in host memory, by its path in the tree, such as `layers.mlp.down`."""
        path = name.split(".")
        found = self._read(nested({name: leaves_by_name(self.arrays)[name]}))
        for key in path:
            found = found[key]
        return found

    def open_tokenizer(self) -> Tokenizer:
        """Returns the tokenizer that they were trained with.

        Raises:
          ValueError: there is none, or its file is another one by now.
        """
        if not self.tokenizer:
            raise ValueError(f"{self.folder} has no tokenizer; import it from a folder with a tokenizer.model.")
        tokenizer = Tokenizer(self.tokenizer)
        if tokenizer.sha256 != self.tokenizer_sha256:
            raise ValueError(
                f"{self.folder} was trained with another tokenizer than {self.tokenizer} is now (sha256 "
                f"{self.tokenizer_sha256[:16]} then, {tokenizer.sha256[:16]} now); bring that file back."
            )
        return tokenizer


def open_weights(path: str | os.PathLike, *, masters: bool = False) -> Weights:
    """Returns the parameters at a path, after every byte of the folder was compared with its sums.

    Args:
      path: a run folder (its newest undamaged checkpoint is taken) or one checkpoint of it.
      masters: of the weights that the optimizer updates, in fp32, where the precision policy keeps such.

    Raises:
      ValueError: nothing of that kind is there, it is damaged, or its arrays do not fit its model.
    """
    folder = find_saved(path)
    if folder is None:
        raise ValueError(
            f"{path} holds no weights (looked from {pathlib.Path.cwd()}); give a run folder such as runs/tiny, or one "
            "of its checkpoints, runs/tiny/checkpoints/STEP."
        )
    return _of_run(folder, masters=masters)


def stored_model(values: dict[str, Any], *, where: str) -> ModelConfig:
    """Returns the model that was written down at `where`; a key that is newer than that takes its default."""
    unknown = values.keys() - {field.name for field in dataclasses.fields(ModelConfig)}
    if unknown:
        raise ValueError(f"{where} was written by another version of hlat_jax: its model has a key {min(unknown)!r}.")
    model = ModelConfig(**values)
    check_model(model)
    return model


def leaves_by_name(tree: Any) -> dict[str, Any]:
    """Returns the leaves of nested dicts by their path, `layers.mlp.down`, in the order of the tree."""
    return {
        ".".join(str(entry.key) for entry in path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }


def nested(leaves: dict[str, Any]) -> dict[str, Any]:
    """Returns nested dicts from leaves by their path: the inverse of `leaves_by_name`."""
    tree: dict[str, Any] = {}
    for name, leaf in leaves.items():
        *above, last = name.split(".")
        node = tree
        for key in above:
            node = node.setdefault(key, {})
        node[last] = leaf
    return tree


def _of_run(folder: pathlib.Path, *, masters: bool) -> Weights:
    run = saved_run(folder)
    metadata = run["metadata"]
    model = stored_model(metadata["config"]["model"], where=str(folder))
    has_masters = any(name.startswith(_key(MASTERS)) for name in run["arrays"])
    where = MASTERS if masters and has_masters else PARAMS
    arrays = _arrays(run["arrays"], where, model, folder=folder)

    def read(abstract: Any) -> Any:
        for key in reversed(where):
            abstract = {key: abstract}
        found = read_arrays(folder, abstract)
        for key in where:
            found = found[key]
        return found

    tokenizer = metadata["config"]["data"]["tokenizer"]
    return Weights(folder, model, int(folder.name), tokenizer, metadata["tokenizer_sha256"], arrays, read)


def _arrays(saved: dict[str, str], where: tuple[str, ...], model: ModelConfig, *, folder: pathlib.Path) -> Any:
    """Returns the abstract parameters of a model in the dtypes of a checkpoint, whose shapes must be the model's."""
    prefix = _key(where)
    found = {name.removeprefix(prefix): text for name, text in saved.items() if name.startswith(prefix)}
    dtypes = {name: text.partition("[")[0] for name, text in found.items()}
    leaves, structure = jax.tree_util.tree_flatten_with_path(abstract_params(model))
    names = [jax.tree_util.keystr(path) for path, _ in leaves]
    expected = {name: f"[{', '.join(map(str, leaf.shape))}]" for name, (_, leaf) in zip(names, leaves, strict=True)}
    others = differences({name: re.sub(r"^\w+", "", text) for name, text in found.items()}, expected)
    if others:
        raise ValueError(f"{folder} holds other arrays than its model has:\n  " + "\n  ".join(others))
    shapes = [leaf.shape for _, leaf in leaves]
    return jax.tree.unflatten(
        structure,
        [jax.ShapeDtypeStruct(shape, jnp.dtype(dtypes[name])) for name, shape in zip(names, shapes, strict=True)],
    )


def _key(where: tuple[str, ...]) -> str:
    return "".join(f"[{part!r}]" for part in where)
