"""Opens a trained model on a mesh, for the command lines of `generate` and `evaluate`."""

from __future__ import annotations

import dataclasses
import os
import pathlib
import sys
from typing import TYPE_CHECKING, Any

from absl import flags

from hlat_jax.cli import flags as flags_lib
from hlat_jax.config import ModelConfig, ParallelConfig, PrecisionConfig
from hlat_jax.facts.local_paths import is_bucket
from hlat_jax.host import neuron_env, neuron_topology
from hlat_jax.host.console import labelled
from hlat_jax.weights.path_checks import check_checkpoint

if TYPE_CHECKING:
    from hlat_jax.data.tokenizer import Tokenizer
    from hlat_jax.parallel.sharding import Layout

DEGREES = {"pipe": "Pipeline stages", "data": "Replicas", "fsdp": "Shards of each matrix", "tensor": "Tensor degree"}


@dataclasses.dataclass(frozen=True)
class TrainedModel:
    """A model with its parameters on the devices, and its tokenizer.

    Attributes:
      model: config of the model.
      params: jax arrays sharded by `layout`, in the stored dtype.
      layout: layout of the devices.
      tokenizer: tokenizer of the training run.
      folder: folder from which the parameters were read.
      described: a line that describes the weights.
      begins_with_bos: whether texts begin with BOS, by an imported tokenizer or data.prepend_bos of the run.
    """

    model: ModelConfig
    params: Any
    layout: Layout
    tokenizer: Tokenizer
    folder: pathlib.Path
    described: str
    begins_with_bos: bool = False

    def first_ids(self, bos: bool | None) -> list[int]:
        """Returns [BOS] or []. If `bos` is None, the tokenizer or run decides.

        Raises:
          ValueError: the tokenizer has no BOS.
        """
        bos = self.begins_with_bos if bos is None else bos
        self.tokenizer.require_bos(bos, key="--bos")
        return [self.tokenizer.bos_id] if bos else []


_CHECKPOINT = "Run folder, one of its checkpoints, or a Hugging Face folder, also in a bucket."


def define(values: flags.FlagValues) -> None:
    """Declares the flags that `trained_model` reads."""
    flags_lib.define_path(values, "checkpoint", _CHECKPOINT, use="bucket")
    flags_lib.define_path(values, "tokenizer", "Tokenizer file, for a folder whose own is missing.")
    for axis, about in DEGREES.items():
        flags.DEFINE_integer(
            f"config.parallel.{axis}", 1, f"{about} of the mesh. -1 takes all devices that remain.", flag_values=values
        )


def prepare(values: flags.FlagValues) -> None:
    """Checks that --checkpoint and --tokenizer exist, then does as `prepare_for` for the degrees of a command line.

    Raises:
      ValueError: no --checkpoint, or one of the two does not exist.
    """
    from hlat_jax.data.path_checks import check_tokenizer  # not at the top: --help does not need it

    if not values.checkpoint:
        raise ValueError(
            "--checkpoint=FOLDER is missing. Give a run folder such as runs/tiny, one of its checkpoints, or a "
            "Hugging Face folder."
        )
    check_checkpoint(values.checkpoint, key="--checkpoint" * is_bucket(values.checkpoint))
    check_tokenizer(values.tokenizer, key="--tokenizer")
    prepare_for(_degrees(values))


def prepare_for(parallel: ParallelConfig) -> None:
    """Sets and logs Neuron's environment variables if its devices are used and JAX is not imported yet.

    Casts round to nearest, even if the training run rounded stochastically, because no weights are updated.
    """
    if "jax" in sys.modules:
        return
    if neuron_topology.instance_to_serve("", os.environ.get("JAX_PLATFORMS", ""), machine=neuron_topology.HERE):
        print(neuron_env.prepare(PrecisionConfig("mixed"), parallel), file=sys.stderr, flush=True)


def trained_model(values: flags.FlagValues) -> TrainedModel:
    """Returns the model of a command line, on its mesh. Imports JAX.

    Raises:
      ValueError: no complete checkpoint, or degrees that do not fit model and devices.
    """
    return open_model(values.checkpoint, _degrees(values), tokenizer=values.tokenizer)


def _degrees(values: flags.FlagValues) -> ParallelConfig:
    degrees: dict[str, Any] = {axis: values[f"config.parallel.{axis}"].value for axis in DEGREES}
    return ParallelConfig(**degrees)


def open_model(checkpoint: str, parallel: ParallelConfig, *, tokenizer: str = "") -> TrainedModel:
    """Returns the model of a checkpoint over a mesh of these degrees. Imports JAX.

    Args:
      checkpoint: path, as for `weights.trained.open_weights`.
      parallel: degrees of the mesh.
      tokenizer: tokenizer file, for weights without one.

    Raises:
      ValueError: as for `trained_model`.
    """
    import jax

    from hlat_jax.generate.generator import param_shardings
    from hlat_jax.parallel.degrees import layout_of_model
    from hlat_jax.weights.trained import open_weights

    weights = open_weights(checkpoint, tokenizer=tokenizer)
    if parallel.tensor > weights.model.num_kv_heads:  # a split of Q that K and V do not have
        weights = open_weights(checkpoint, tokenizer=tokenizer, fuse_qkv=False)
    opened = weights.open_tokenizer()
    layout = layout_of_model(weights.model, parallel, jax.devices())
    params = weights.restore(param_shardings(weights.model, layout))
    mesh = " x ".join(f"{axis} {degree}" for axis, degree in layout.degrees.items())
    dtype = params["embed"].dtype
    begins = "; texts begin with BOS" * weights.begins_with_bos
    described = f"{weights.folder}, step {weights.step}, {dtype}; {mesh}, {layout.platform}{begins}"
    return TrainedModel(
        weights.model,
        params,
        layout,
        opened,
        weights.folder,
        labelled("weights", described),
        weights.begins_with_bos,
    )
