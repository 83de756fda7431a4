"""Memory of one device and of one host, with exact state, and temporaries as estimated by `passes.liveness`."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hlat_jax.facts import measured_rates
from hlat_jax.parallel.rows import replica_rows
from hlat_jax.parallel.sharding import CONTEXT, TENSOR
from hlat_jax.passes import liveness
from hlat_jax.passes.products import live_jaxpr
from hlat_jax.precision import POLICIES
from hlat_jax.program import RunProgram, state_bytes

# Of the estimate of temporaries, without and with pipeline stages; tests hold them against XLA on CPU, which copies a
# part of the ring of residuals in a steady tick.
TEMPORARIES_ERROR, STAGES_ERROR = 0.15, 0.30


@dataclasses.dataclass(frozen=True)
class DeviceBytes:
    """Bytes of the fullest device, at its peak.

    Attributes:
      params: the exact bytes of the parameters that the forward pass reads.
      opt_state: the exact bytes of moments, master weights and counters.
      batch: the exact bytes of the rows of one step.
      gradients: the exact bytes of the sums over microbatches in the policy's dtype, a part of the temporaries. They
        are sharded over replicas only if the gradients of each microbatch are reduced.
      activations: the estimated bytes of values kept for the backward pass. If the layers run in a loop, they are the
        peak in loops without the sums, with the gradients of one microbatch. If the layers are unrolled, they are the
        peak kept by the forward pass, with the logits.
      workspace: the estimated bytes of the rest of the temporaries.
      logits: the bytes of one microbatch's logits on this device in fp32, part of the workspace if the loss is dense.
      programs: the bytes of the loaded programs of a step on a Neuron device, code by the estimate of their
        instructions and rings. It is 0 elsewhere, and by default.
      temporaries_error: the share of the allocated temporaries by which their estimate may be too low.
    """

    params: int
    opt_state: int
    batch: int
    gradients: int
    activations: int
    workspace: int
    logits: int
    programs: int = 0
    temporaries_error: float = TEMPORARIES_ERROR

    @property
    def state(self) -> int:
        return self.params + self.opt_state

    @property
    def temporaries(self) -> int:
        return self.gradients + self.activations + self.workspace

    @property
    def total(self) -> int:
        return self.state + self.batch + self.temporaries + self.programs

    @property
    def upper(self) -> int:
        """The total if the estimate of temporaries is too low by its error."""
        return self.total - self.temporaries + round(self.temporaries / (1 - self.temporaries_error))


def device_bytes(program: RunProgram, *, jaxpr: Any) -> DeviceBytes:
    """Returns the bytes on one device. `jaxpr` is the trace of the step as one program.

    If microbatches are dispatched, the programs of a microbatch and of the update are traced here. The temporaries are
    the larger of the two, and the sums, which both take.
    """
    config, layout, (state, batch, _) = program.config, program.layout, program.step_arguments
    peak = _dispatched_peak(program) if program.accumulate == "programs" else None
    if peak is None:
        peak = liveness.estimated_temporaries(jaxpr, program.step_arguments)
    itemsize = jnp.dtype(POLICIES[config.precision.policy].accumulate).itemsize
    are_split = layout.reduce_gradients == "microbatch"
    like = state["opt_state"]["inner"]["mu"] if are_split else state["params"]
    num_params = sum(math.prod(p.sharding.shard_shape(p.shape)) for p in jax.tree.leaves(like))
    gradients = min(num_params * itemsize, peak.total)
    kept = peak.kept if program.model.layer_loop == "unroll" else max(0, peak.in_loops - gradients)
    activations = min(kept, peak.total - gradients)
    params = state_bytes(state["params"])
    rows = replica_rows(config.data.batch_size, layout) // program.num_microbatches
    vocab = layout.vocab_rows(config.model.vocab_size) // layout.size(("pipe", *TENSOR))
    return DeviceBytes(
        params=params,
        opt_state=state_bytes(state) - params,
        batch=state_bytes(batch),
        gradients=gradients,
        activations=activations,
        workspace=peak.total - gradients - activations,
        logits=4 * rows * config.data.seq_len // layout.size(CONTEXT) * vocab,
        temporaries_error=STAGES_ERROR if layout.size(("pipe",)) > 1 else TEMPORARIES_ERROR,
    )


def _dispatched_peak(program: RunProgram) -> liveness.Peak:
    arguments, step = program.microbatch_arguments, program.training.microbatch_step
    buffer = arguments["update"][1]
    held, sums = state_bytes(buffer), state_bytes(buffer["kept"]["grads"])
    peaks = [
        liveness.estimated_temporaries(live_jaxpr(program.trace_microbatch_step(name)), arguments[name])
        for name in (*step.ticks, "update")
    ]
    in_loops, kept = (max(getattr(peak, key) for peak in peaks) for key in ("in_loops", "kept"))
    total = held + max(peak.total for peak in peaks)
    return liveness.Peak(total, in_loops=held + in_loops, kept=held - sums + kept)


def program_bytes(counts: Iterable[int]) -> int:
    """Returns the bytes that programs of so many instructions reserve on a Neuron device for code and rings."""
    return measured_rates.INSTRUCTION_BYTES * sum(counts) + measured_rates.RING_BYTES


def checkpoint_bytes(state: Any) -> int:
    """Returns the bytes of a checkpoint of a state, with every array once."""
    return sum(leaf.dtype.itemsize * math.prod(leaf.shape) for leaf in jax.tree.leaves(state))


def host_bytes(state: Any, num_devices: int) -> int:
    """Returns the most bytes of state that one node of `num_devices` devices copies to its host during a save.

    These are the shards on the first node, each counted once, whichever node writes it.
    """

    def on_node(leaf):
        sharding = leaf.sharding
        axes = [axis for part in sharding.spec for axis in ((part,) if isinstance(part, str) else part or ())]
        shape = sharding.mesh.shape
        places = np.unravel_index(np.arange(min(num_devices, sharding.mesh.size)), tuple(shape.values()))
        used = [coordinates for axis, coordinates in zip(shape, places, strict=True) if axis in axes]
        num_shards = len(np.unique(np.stack(used), axis=1).T) if used else 1
        return num_shards * leaf.dtype.itemsize * math.prod(sharding.shard_shape(leaf.shape))

    return sum(on_node(leaf) for leaf in jax.tree.leaves(state))
