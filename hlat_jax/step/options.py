"""Options of a training step for precision, accumulation, devices and masked updates."""

from __future__ import annotations

import dataclasses
import numbers
from collections.abc import Callable, Sequence
from typing import Any

import jax

from hlat_jax.optimizer import SpikePolicy
from hlat_jax.parallel.pipeline import run_pipeline
from hlat_jax.parallel.replica_sync import ReplicaSync
from hlat_jax.parallel.zero import check_stage, make_replica_sync
from hlat_jax.precision import POLICIES, Policy


@dataclasses.dataclass(frozen=True)
class StepOptions:
    """Options of a training step.

    Attributes:
      policy: dtypes of storage and accumulation, and the rounding of stored values, by default fp32.
      num_microbatches: static number of parts into which a batch, or its rows on each device, is split.
      accumulate: function that computes and sums the gradients of the parts, for pipeline stages. By default it is
        `accumulate_grads`.
      zero: ZeRO stage, 0 to 3, for parameters of any structure on `devices`, see `zero.make_replica_sync`.
      devices: devices for `zero`, by default all.
      bucket_bytes: for `zero`, bytes per device up to which arrays share a collective. With 0 each array has its own.
      replica_sync: your own mesh, shardings and collectives, instead of `zero`. With neither the step is for one
        device.
      spikes: policy for steps with a loss or gradient norm far above earlier ones, which are skipped or reported, see
        `optimizer.SpikePolicy`. By default there is none.
      loss_scale: whether the loss is scaled, for gradients in fp16, see `step.loss_scale`.
      layer_norms: whether the metrics have the norms of the gradient and the update of each layer, which needs a
        `replica_sync`. Its logical axis `layers` is first in the axes of stacked layers.
      state_in_place: whether XLA on one CPU writes the state of an Optax optimizer after the weights, without a copy of
        the old state. It takes less memory and more time. A `training_program` with a memory budget sets it.

    Raises:
      ValueError: an invalid value, or options that exclude each other.
    """

    policy: Policy = POLICIES["fp32"]
    num_microbatches: int = 1
    accumulate: Callable | None = None
    zero: int | None = None
    devices: Sequence[Any] | None = None
    bucket_bytes: int = 0
    replica_sync: ReplicaSync | None = None
    spikes: SpikePolicy | None = None
    loss_scale: bool = False
    layer_norms: bool = False
    state_in_place: bool = False

    def __post_init__(self):
        # a config file has names for these two
        if not isinstance(self.policy, Policy):
            raise ValueError(
                f"StepOptions.policy={self.policy!r} must be a Policy, such as precision.POLICIES['fp32']."
            )
        if not isinstance(self.spikes, SpikePolicy | None):
            raise ValueError(f"StepOptions.spikes={self.spikes!r} must be a SpikePolicy.")
        count = self.num_microbatches
        if not isinstance(count, numbers.Integral) or isinstance(count, bool) or count < 1:
            raise ValueError(f"StepOptions.num_microbatches={count!r} must be an int of 1 or more.")
        if self.accumulate is not None and self.loss_scale:
            raise ValueError("StepOptions.accumulate sums unscaled losses. Leave loss_scale or accumulate out.")
        if self.layer_norms and self.replica_sync is None:
            raise ValueError("StepOptions.layer_norms needs a replica_sync, whose axes name the layers. Give one.")
        if self.zero is not None and self.replica_sync is not None:
            raise ValueError("StepOptions.zero and .replica_sync both shard the parameters. Give one of them.")
        if self.zero is not None:
            check_stage(self.zero, self.devices, bucket_bytes=self.bucket_bytes)
        elif self.devices is not None or self.bucket_bytes:
            raise ValueError(
                "StepOptions.devices and .bucket_bytes have no effect without zero. Give zero=0 to 3 too, or leave "
                "them out, since a replica_sync has its own."
            )

    def for_params(self, params: Any) -> StepOptions:
        """Returns the options with `zero` replaced by the `replica_sync` of these parameters, arrays or shapes."""
        if self.zero is None:
            return self
        devices = jax.devices() if self.devices is None else self.devices
        replica_sync = make_replica_sync(params, devices, stage=self.zero, bucket_bytes=self.bucket_bytes)
        return dataclasses.replace(self, replica_sync=replica_sync, zero=None, devices=None, bucket_bytes=0)

    @property
    def active_replica_sync(self) -> ReplicaSync | None:
        """`replica_sync` if it has several devices, else None, because on one device a step has no collectives."""
        return self.replica_sync if self.replica_sync is not None and self.replica_sync.layout.mesh.size > 1 else None

    @property
    def num_stages(self) -> int:
        """Number of stages that `pipeline.run_pipeline` splits the layers over, or 1 without it."""
        if self.accumulate is not run_pipeline or self.replica_sync is None:
            return 1
        return dict(self.replica_sync.layout.mesh.shape).get("pipe", 1)

    @property
    def row_degree(self) -> int:
        """Number of devices over which the rows of a batch are split."""
        return 1 if self.active_replica_sync is None else self.active_replica_sync.layout.row_degree

    @property
    def platform(self) -> str:
        """The platform of the devices."""
        if self.devices:
            return self.devices[0].platform
        return jax.default_backend() if self.replica_sync is None else self.replica_sync.layout.platform


FP32 = StepOptions()
