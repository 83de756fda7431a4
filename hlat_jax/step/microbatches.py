"""A step in programs of one microbatch each, or of one tick of a pipeline, which its host dispatches in turn."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import ArrayLike

from hlat_jax.batch import SumAndCount
from hlat_jax.parallel.pipeline import PHASES, StagedLoss, run_tick, start_ticks
from hlat_jax.precision import Rounding
from hlat_jax.step.batch_rows import check_divides
from hlat_jax.step.gradients import Reduce, make_local_value_and_grad
from hlat_jax.step.loss_signature import CheckedLossFn, LossAux
from hlat_jax.step.options import StepOptions
from hlat_jax.step.state import State, jit_donating, rounding_of, scale_of
from hlat_jax.step.update import StepMetrics, make_update

Program = Any  # a jax.stages.Wrapped, or compiled


@dataclasses.dataclass(frozen=True)
class MicrobatchStep:
    """A step in programs that do not depend on the number of microbatches, with the same results as in one program.

    Terms, their order and random bits are the same, so the two are equal bit for bit if the compiler rounds them
    alike. It may not, because XLA fuses the body of a loop in other ways, see docs/parallelism.md.

    Each microbatch, and with pipeline stages each tick, is dispatched as one program, without waiting for the program
    before. The buffer stays on the devices between steps.

    Attributes:
      start: jitted function (inputs, microbatch) -> buffer of zeros. A buffer has the values that each device keeps,
        such as sums of losses, of counted tokens and of gradients. It depends only on the shapes.
      ticks: name -> jitted function (buffer, inputs, microbatch) -> buffer with the results added. It donates the
        buffer. There is one, `microbatch`, or the phases of `pipeline`.
      update: jitted function (state, buffer[, learning_rate]) -> (state, StepMetrics, buffer of zeros). It donates the
        state and the buffer.
      shardings: shardings of the parts of the buffer, `number` and the rest. None on one device.
      num_stages: stages of the pipeline, or 1.
    """

    start: Program
    ticks: Mapping[str, Program]
    update: Program
    shardings: Any = None
    num_stages: int = 1
    _held: dict[Any, Any] = dataclasses.field(default_factory=dict, init=False)  # shapes -> buffer; one at most

    def __call__(
        self, state: State, microbatches: Iterable[Any], learning_rate: ArrayLike | None = None
    ) -> tuple[State, StepMetrics]:
        """Returns the state after the step, and its metrics. Microbatches have rows as in `rows.microbatches`.

        Raises:
          ValueError: no microbatch.
        """
        shapes, buffer = self.accumulate(state, microbatches)
        state, metrics, self._held[shapes] = self.update(state, buffer, learning_rate)
        return state, metrics

    def accumulate(self, state: State, microbatches: Iterable[Any]) -> tuple[Any, Any]:
        """Returns (shapes, buffer): the sums over microbatches, from which `update` makes the next state.

        Raises:
          ValueError: no microbatch.
        """
        num_microbatches = 0
        if self.num_stages > 1:  # every tick reads their number; else each is on the devices when it is dispatched
            microbatches = list(microbatches)
            num_microbatches = len(microbatches)
        inputs, shapes, buffer = self.inputs(state, num_microbatches=np.int32(num_microbatches)), None, None
        for name, part in self._dispatches(microbatches):
            if buffer is None:
                shapes, buffer = self._take_buffer(inputs, part)
            buffer = self.ticks[name](buffer, inputs, part)
        if buffer is None:
            raise ValueError("microbatches is empty. Give a step one or more of them.")
        return shapes, buffer

    def num_dispatches(self, num_microbatches: int) -> dict[str, int]:
        """Returns name -> number of times that a step dispatches the tick, in the order of `ticks`."""
        if self.num_stages == 1:
            return dict.fromkeys(self.ticks, num_microbatches)
        idle = self.num_stages - 1
        return {"warm_up": idle, "steady": num_microbatches, "cool_down": idle}

    def _dispatches(self, microbatches: Iterable[Any]) -> Iterable[tuple[str, Any]]:
        """Returns (name of a program, microbatch) in turn; the ticks after the last microbatch get it again."""
        if self.num_stages == 1:
            return zip(itertools.repeat(*self.ticks), microbatches, strict=False)
        parts = list(microbatches)
        names = [name for name, times in self.num_dispatches(len(parts)).items() for _ in range(times)]
        return zip(names, parts + parts[-1:] * (len(names) - len(parts)), strict=False)

    def _take_buffer(self, inputs: dict[str, Any], microbatch: Any) -> tuple[Any, Any]:
        """Returns (shapes, buffer of zeros for them): the one of the step before, or a new one for other shapes."""
        leaves, structure = jax.tree.flatten((inputs, microbatch))
        shapes = structure, *((leaf.shape, leaf.dtype) for leaf in leaves)
        buffer = self._held.pop(shapes, None)  # where a program fails, the next step starts from a new one
        self._held.clear()
        return shapes, self.start(inputs, microbatch) if buffer is None else buffer

    @property
    def programs(self) -> dict[str, Program]:
        """The programs by name, in the order of their first use."""
        return {"start": self.start, **self.ticks, "update": self.update}

    def with_programs(self, programs: Mapping[str, Program]) -> MicrobatchStep:
        """Returns the step with these `programs`, such as compiled ones."""
        ticks = {name: programs[name] for name in self.ticks}
        return dataclasses.replace(self, start=programs["start"], ticks=ticks, update=programs["update"])

    def inputs(self, state: State, *, num_microbatches: Any) -> dict[str, Any]:
        """Returns the inputs of `start` and `ticks`, parts of the state, and for stages the int32 number."""
        opt_state = {key: value for key, value in state["opt_state"].items() if key in ("seed", "loss_scale")}
        inputs = {"params": state["params"], "step": state["step"], "opt_state": opt_state}
        return inputs | ({"num_microbatches": num_microbatches} if self.num_stages > 1 else {})

    def abstract_buffer(self, inputs: Any, microbatch: Any) -> Any:
        """Returns the shapes, dtypes and shardings of the buffer, for abstract or real arguments of `start`."""
        buffer = jax.eval_shape(self.start, inputs, microbatch)
        if self.shardings is None:
            return buffer
        return {
            key: jax.tree.map(lambda x, of=self.shardings[key]: x.update(sharding=of), buffer[key]) for key in buffer
        }


def make_microbatch_step(
    loss_fn: CheckedLossFn | StagedLoss,
    optimizer: optax.GradientTransformation,
    options: StepOptions,
    *,
    shardings: Any,
) -> MicrobatchStep:
    """Returns the step in programs of one microbatch, or of one tick of a pipeline.

    Args:
      loss_fn: the loss for the rows of one device, or with stages a StagedLoss.
      optimizer: an Optax transformation.
      options: options of the step.
      shardings: shardings of the state. None without a `replica_sync`.
    """
    if options.num_stages > 1:
        assert isinstance(loss_fn, StagedLoss)  # the one that `pipeline.run_pipeline` takes
        work = _tick_work(loss_fn, options)
    else:
        work = _sum_work(loss_fn, options)
    replica_sync, start_kept = options.active_replica_sync, work.start
    if replica_sync is not None:
        start_kept = replica_sync.start_sums(work.start, dtype=options.policy.accumulate)
    of_buffer, after_update = None, None
    if options.replica_sync is not None:
        replicated = options.replica_sync.layout.replicated_sharding()
        of_buffer = {"number": replicated, "kept": replicated if replica_sync is None else replica_sync.per_device}
        after_update = shardings, None, of_buffer

    def start_accumulation(inputs: dict[str, Any], batch: Any) -> dict[str, Any]:
        return {"number": jnp.zeros((), jnp.int32), "kept": start_kept(inputs["params"], batch)}

    ticks = {name: _make_tick(name, work, options) for name in work.adds}
    return MicrobatchStep(
        start=jax.jit(start_accumulation, out_shardings=of_buffer),
        ticks={name: jit_donating(tick, options, shardings=of_buffer) for name, tick in ticks.items()},
        update=jit_donating(_make_update_step(optimizer, options), options, shardings=after_update, donated=(0, 1)),
        shardings=of_buffer,
        num_stages=options.num_stages,
    )


@dataclasses.dataclass(frozen=True)
class _DeviceWork:
    """What each device does for a microbatch, or in a tick.

    Attributes:
      start: (params, rows, *, reduce=None) -> what the device keeps, zeros.
      adds: name of a program -> (kept, (params, rows), rounding, *, number, reduce=None, **scalars) -> kept, where
        `number` counts the microbatches, or ticks, before this one.
      scalars: inputs of the step -> the scalars.
    """

    start: Callable[..., dict[str, Any]]
    adds: Mapping[str, Callable[..., dict[str, Any]]]
    scalars: Callable[[dict[str, Any]], dict[str, Any]]


def _sum_work(loss_fn: CheckedLossFn, options: StepOptions) -> _DeviceWork:
    """Returns the work without stages: adds the loss and the gradients of a microbatch to the sums."""
    value_and_grad = make_local_value_and_grad(loss_fn, dataclasses.replace(options, num_microbatches=1))

    def start(params: Any, rows: Any, *, reduce: Reduce | None = None) -> dict[str, Any]:
        shapes = params if reduce is None else jax.eval_shape(reduce, params)
        grads = jax.tree.map(lambda p: jnp.zeros(p.shape, options.policy.accumulate), shapes)
        return {"totals": SumAndCount(jnp.float32(0.0), jnp.float32(0.0)), "grads": grads}

    def add(
        kept: dict[str, Any],
        of_device: tuple,
        rounding: Rounding,
        *,
        number: jax.Array,
        scale: jax.Array | None,
        reduce: Reduce | None = None,
    ) -> dict[str, Any]:
        params, rows = of_device
        computed = value_and_grad(params, rows, rounding, scale=scale, model_state=None, reduce=reduce)
        (loss_sum, loss_aux), grads = computed
        if loss_aux.is_mean:
            raise ValueError("the steps of single microbatches need a loss function that returns SumAndCount.")
        totals = SumAndCount(kept["totals"].total + loss_sum, kept["totals"].count + loss_aux.count)
        return {"totals": totals, "grads": rounding.at(number).add(kept["grads"], grads)}

    return _DeviceWork(start, {"microbatch": add}, lambda inputs: {"scale": scale_of(inputs)})


def _tick_work(staged: StagedLoss, options: StepOptions) -> _DeviceWork:
    """Returns the work of a stage: a tick of each phase of `pipeline`."""

    def start(params: Any, rows: Any, *, reduce: Reduce | None = None) -> dict[str, Any]:
        return start_ticks(staged, params, rows, dtype=options.policy.accumulate)

    def add_in(phase: str) -> Callable[..., dict[str, Any]]:
        def add(
            kept: dict[str, Any],
            of_device: tuple,
            rounding: Rounding,
            *,
            number: jax.Array,
            num_microbatches: jax.Array,
            reduce: Reduce | None = None,
        ) -> dict[str, Any]:
            return run_tick(
                staged,
                kept,
                of_device,
                phase=phase,
                tick=number,
                num_microbatches=num_microbatches,
                rounding=rounding,
            )

        return add

    adds = {phase: add_in(phase) for phase in PHASES}
    return _DeviceWork(start, adds, lambda inputs: {"num_microbatches": inputs["num_microbatches"]})


def _make_tick(name: str, work: _DeviceWork, options: StepOptions) -> Callable[..., dict[str, Any]]:
    """Returns (buffer, inputs, microbatch) -> buffer after one of the `adds` on every device."""
    add, replica_sync = work.adds[name], options.active_replica_sync
    if replica_sync is not None:
        add = replica_sync.add_to_sums(add, dtype=options.policy.accumulate)

    def tick(buffer: dict[str, Any], inputs: dict[str, Any], batch: Any) -> dict[str, Any]:
        check_divides(batch, num_devices=options.row_degree, num_microbatches=1)
        number, scalars, rounding = buffer["number"], work.scalars(inputs), rounding_of(inputs, options.policy)
        next_number = number + 1
        kept = add(buffer["kept"], (inputs["params"], batch), rounding, number=number, **scalars)
        return {"number": next_number, "kept": kept}

    tick.__name__ = "add_microbatch" if name == "microbatch" else f"{name}_tick"  # in the keys of compile caches
    return tick


def _make_update_step(optimizer: optax.GradientTransformation, options: StepOptions) -> Callable:
    """Returns (state, buffer, learning_rate=None) -> (state, StepMetrics, buffer of zeros)."""
    update_state, replica_sync = make_update(optimizer, options), options.active_replica_sync

    def no_value(_: Any) -> Any:
        raise ValueError("an optimizer that evaluates the loss again needs the whole batch in one program.")

    def update_step(state: State, buffer: dict[str, Any], learning_rate: Any = None) -> tuple[State, StepMetrics, Any]:
        sums = buffer["kept"]["totals"], buffer["kept"]["grads"]
        if replica_sync is not None:
            sums = replica_sync.reduced_sums(*sums, dtype=options.policy.accumulate)
        (loss_sum, count), grads = sums
        computed = (loss_sum, LossAux(count)), grads
        # not by `start`: Neuron may run a program without collectives on the host
        zeros = jax.tree.map(jnp.zeros_like, buffer)
        return *update_state(state, computed, learning_rate=learning_rate, loss_and_grads=no_value), zeros

    return update_step
