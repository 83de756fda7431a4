"""Trained parameters in a run folder, a checkpoint or a Hugging Face folder, opened for a model.

weights = open_weights("runs/tiny")
params = weights.restore(None)
logits_BTV = model.apply(params, weights.model, tokens_BT)
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import os
import pathlib
import re
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from hlat_jax.config import ModelConfig
from hlat_jax.data.tokenizer import Tokenizer
from hlat_jax.model import abstract_params
from hlat_jax.store.bucket import local_copy
from hlat_jax.store.checkpoint import find_saved, read_arrays
from hlat_jax.store.checkpoint_checks import MASTERS, PARAMS, RUN_ITEM, saved_run, without_padding, without_table_rows
from hlat_jax.store.config_diff import differences
from hlat_jax.store.integrity import INTEGRITY_FILE, damage
from hlat_jax.weights.description import Description, describe_checkpoint, describe_hugging_face
from hlat_jax.weights.hf_files import is_hugging_face
from hlat_jax.weights.hf_reading import open_checkpoint
from hlat_jax.weights.path_checks import no_weights

# Nested dicts -> leaves by their path, such as `layers.mlp.down`, and back.
leaves_by_name = functools.partial(flatten_dict, sep=".")
nest = functools.partial(unflatten_dict, sep=".")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Weights(Description):
    """Stored, undamaged parameters that are not read yet.

    Attributes:
      arrays: the jax.ShapeDtypeStruct of every parameter, in the stored dtype.
      read_leaf: function (path of a parameter, its jax.ShapeDtypeStruct) -> its values, as a jax array if the
        jax.ShapeDtypeStruct has a sharding, otherwise as a NumPy array.
    """

    arrays: Any
    read_leaf: Callable[[str, jax.ShapeDtypeStruct], Any]

    def restore(self, shardings: Any, *, dtype: Any = None) -> Any:
        """Returns the parameters as jax arrays. Each process reads only the shards of its devices.

        Args:
          shardings: a tree like the parameters, one sharding for all of them, or None for the default device. If they
            do not divide a dim, it is padded with zeros.
          dtype: dtype to which the parameters are rounded on the host, or None for the stored dtype.
        """
        if shardings is None:
            shardings = jnp.zeros(()).sharding
        if isinstance(shardings, jax.sharding.Sharding):
            shardings = jax.tree.map(lambda _: shardings, self.arrays)

        def target(leaf: jax.ShapeDtypeStruct, sharding: jax.sharding.Sharding) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(leaf.shape, dtype or leaf.dtype, sharding=sharding)

        leaves = leaves_by_name(jax.tree.map(target, self.arrays, shardings))
        for name in leaves:
            leaves[name] = _padded(leaves[name])
        # the largest first: a read takes host memory besides its result, and then least is in memory already
        order = sorted(leaves, key=lambda name: -leaves[name].size * leaves[name].dtype.itemsize)
        return nest({name: self.read_leaf(name, leaves[name]) for name in order})

    def read(self, name: str) -> np.ndarray:
        """Returns one parameter in host memory by its path in the tree, such as `layers.mlp.down`."""
        return self.read_leaf(name, leaves_by_name(self.arrays)[name])

    def open_tokenizer(self) -> Tokenizer:
        """Returns the tokenizer that the model was trained with.

        Raises:
          ValueError: there is no tokenizer, its file has changed, or it has more tokens than the model.
        """
        path = self.tokenizer
        if not path:
            raise ValueError(
                f"{self.folder} has no tokenizer. Put the tokenizer.model or tokenizer.json of that model there, or "
                "give it with --tokenizer=FILE to `generate`, `evaluate` and `hf export`."
            )
        tokenizer = Tokenizer(path, stop_ids=self.stop_ids, key="tokenizer")
        if self.tokenizer_sha256 not in ("", tokenizer.sha256):
            raise ValueError(
                f"{path} has changed since {self.folder} was trained with it (sha256 "
                f"{self.tokenizer_sha256[:16]} then, {tokenizer.sha256[:16]} now). Restore that file."
            )
        if tokenizer.vocab_size > self.model.vocab_size:
            raise ValueError(
                f"{path} has {tokenizer.vocab_size} tokens, more than vocab_size={self.model.vocab_size} of "
                f"{self.folder}. Give the tokenizer of that model."
            )
        return tokenizer


def open_weights(
    path: str | os.PathLike, *, masters: bool = False, tokenizer: str = "", fuse_qkv: bool = True
) -> Weights:
    """Returns the parameters at a path, after comparing all files of the folder with their checksums, if it has them.

    Args:
      path: a run folder (its newest undamaged checkpoint is taken), one checkpoint of it, or a Hugging Face folder.
      masters: whether to return the optimizer's fp32 master weights, if the precision policy keeps them.
      tokenizer: a tokenizer file, for weights without a tokenizer. "" takes the tokenizer of the weights.
      fuse_qkv: `fuse_qkv` of the ModelConfig, for a Hugging Face folder.

    Raises:
      ValueError: no weights at the path, damage, arrays that do not match the model, or another tokenizer.
    """
    path = local_copy(path, key="checkpoint")
    if is_hugging_face(path):
        weights = _open_hugging_face(path, fuse_qkv=fuse_qkv)
    else:
        folder = find_saved(path)
        if folder is None:
            raise no_weights(path)
        weights = weights_of_run(folder, masters=masters)
    return _with_tokenizer(weights, tokenizer) if tokenizer else weights


def _with_tokenizer(weights: Weights, path: str) -> Weights:
    """Returns the weights with the tokenizer at `path`, which must be theirs if they have one that can be read here."""
    given, theirs = Tokenizer(path, key="--tokenizer").sha256, weights.tokenizer_sha256
    if weights.tokenizer and not theirs:
        with contextlib.suppress(ValueError):
            theirs = Tokenizer(weights.tokenizer, key="tokenizer").sha256
    if theirs not in ("", given):
        raise ValueError(f"--tokenizer={path} is not the tokenizer of {weights.folder}. Leave the flag out.")
    return dataclasses.replace(weights, tokenizer=path)


def weights_of_run(folder: pathlib.Path, *, masters: bool) -> Weights:
    """Returns the parameters of one checkpoint as `open_weights` does, without comparing its files with their sums."""
    run = saved_run(folder)
    try:
        described = describe_checkpoint(folder, run, step=run["step"])
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{folder / RUN_ITEM} is damaged ({type(error).__name__}: {str(error)[:200]}).") from None
    written = without_padding(run["arrays"])
    has_masters = any(name.startswith("['opt_state']['master']") for name in written)
    where = MASTERS if masters and has_masters else PARAMS
    prefix = "".join(f"[{part!r}]" for part in where)
    saved = {name.removeprefix(prefix): text for name, text in written.items() if name.startswith(prefix)}

    def read(name: str, leaf: jax.ShapeDtypeStruct) -> Any:
        path = ".".join((*where, name))
        return leaves_by_name(read_arrays(folder, nest({path: leaf})))[path]

    return Weights(**vars(described), arrays=_arrays(saved, described.model, folder=folder), read_leaf=read)


def _open_hugging_face(folder: pathlib.Path, *, fuse_qkv: bool) -> Weights:
    if (folder / INTEGRITY_FILE).is_file() and (problem := damage(folder, deep=True)):
        raise ValueError(f"{folder} is damaged ({problem}). Import or average it again.")
    checkpoint = open_checkpoint(folder, fuse_qkv=fuse_qkv)
    if checkpoint.warning:
        print(f"warning: {checkpoint.warning}", file=sys.stderr, flush=True)
    described = describe_hugging_face(folder, checkpoint.model)
    return Weights(**vars(described), arrays=checkpoint.arrays(), read_leaf=checkpoint.read_param)


def _padded(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    """Returns a leaf with every dim padded to a size that its sharding divides."""
    if not isinstance(leaf.sharding, jax.sharding.NamedSharding):
        return leaf
    shape = list(leaf.shape)
    for dim, axes in enumerate(leaf.sharding.spec):
        names = (axes,) if isinstance(axes, str) else axes or ()
        parts = math.prod(leaf.sharding.mesh.shape[axis] for axis in names)
        shape[dim] = -(-shape[dim] // parts) * parts
    return leaf.update(shape=tuple(shape))


def _arrays(saved: dict[str, str], model: ModelConfig, *, folder: pathlib.Path) -> Any:
    """Returns the abstract parameters of a model in the dtypes of `saved`, which maps a `keystr` to dtype[shape]."""
    shapes = {name: re.sub(r"^\w+", "", text) for name, text in saved.items()}
    leaves, structure = jax.tree_util.tree_flatten_with_path(abstract_params(model))
    expected = {jax.tree_util.keystr(path): leaf.shape for path, leaf in leaves}
    now = {name: str(list(shape)) for name, shape in expected.items()}
    others = differences(*map(without_table_rows, (shapes, now)))
    if others:
        raise ValueError(f"{folder} holds arrays that do not match its model:\n  " + "\n  ".join(others))
    dtypes = [jnp.dtype(saved[name].partition("[")[0]) for name in expected]
    pairs = zip(expected.values(), dtypes, strict=True)
    return jax.tree.unflatten(structure, [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in pairs])
