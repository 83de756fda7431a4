"""A training run of about a minute with a known final loss: `tiny` with fewer steps and without a run folder.

`loop.train` uses every device of the process, and the batch of `tiny` is too small for all devices of an instance.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from hlat_jax.cli import config_files
from hlat_jax.config import Config, PrecisionConfig
from hlat_jax.data.held_out import open_held_out
from hlat_jax.data.loader import TrainBatches
from hlat_jax.data.tokenizer import Tokenizer
from hlat_jax.facts.core_groups import server_of
from hlat_jax.optimizer import learning_rate
from hlat_jax.parallel.degrees import layout_over, passes
from hlat_jax.program import make_program
from hlat_jax.resolve import resolve
from hlat_jax.run.validation import Validation

NUM_STEPS = 160
# Final loss on the held-out text, in nats per token. Measured on CPU, JAX 0.10.0, by `train` below, data.seed 1234:
# fp32 5.127 (train.seed 0), 5.185 (1); mixed 5.115 (2); bf16_sr 5.230 (3). The loss starts at 7.65 and still falls fast
# at the end, so the band is over three times as wide as their spread. Measured by benchmarks/doctor_band.py.
BAND = (5.0, 5.4)


@dataclasses.dataclass(frozen=True)
class TrainingResult:
    """Result of a training run.

    Attributes:
      losses: loss of each step, in nats per token.
      eval_loss: loss on the held-out text at the end.
      num_devices: number of devices used.
      compile_s: seconds to the end of the first step, compilation included.
      train_s: seconds of the remaining steps.
    """

    losses: tuple[float, ...]
    eval_loss: float
    num_devices: int
    compile_s: float
    train_s: float


def short_config(precision: PrecisionConfig) -> Config:
    """Returns the config of the short training, with the precision of a run."""
    mutable = config_files.load("tiny")
    mutable.precision.policy = precision.policy
    mutable.precision.stochastic_rounding = precision.stochastic_rounding
    mutable.train.num_steps = NUM_STEPS
    mutable.optimizer.horizon_steps = NUM_STEPS
    return resolve(mutable)


def train(config: Config, devices: Sequence[Any]) -> TrainingResult:
    """Trains on as many of `devices` as the batch can be split over."""
    began = time.monotonic()
    counts = range(min(len(devices), config.data.batch_size), 0, -1)
    count = next(n for n in counts if passes(config, n, server=server_of(devices[:n])))
    layout = layout_over(config, devices[:count])
    tokenizer = Tokenizer(config.data.tokenizer, vocab_size=config.model.vocab_size)
    held_out, _ = open_held_out(config.data, tokenizer=tokenizer, num_batches=config.train.num_eval_batches)
    program = make_program(config, layout)
    validation = Validation(held_out, program.eval_step, layout)
    state, losses, compile_s = program.init_state(), [], 0.0
    with contextlib.closing(TrainBatches(config.data, tokenizer=tokenizer)) as batches:
        for number in range(config.train.num_steps):
            batch, _ = next(batches)
            rate = np.float32(learning_rate(number, config.optimizer))
            state, metrics = program.run_step(state, program.shard(batch), rate)
            losses.append(metrics.loss)
            if number == 0:
                jax.block_until_ready(metrics)
                compile_s = time.monotonic() - began
            jax.block_until_ready(losses[-2:][0])  # one step ahead of the device, as in `loop`
    losses = tuple(map(float, jax.device_get(losses)))
    train_s = time.monotonic() - began - compile_s
    return TrainingResult(losses, validation(state["params"])["eval_loss"], count, compile_s, train_s)
