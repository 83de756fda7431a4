"""A few steps of the program of a run, and rows of documents to train on."""

import jax
import numpy as np
from planned import num_devices

from hlat_jax.batch import segmented_batch
from hlat_jax.parallel.degrees import layout_over
from hlat_jax.program import make_program


def trained(config, batches, *, rate=1e-3):
    """Returns (program, state after a step on each batch, their metrics as NumPy), on as many devices as it needs.

    `rate` is the learning rate, or one for each batch.
    """
    program = make_program(config, layout_over(config, jax.devices()[: num_devices(config)]))
    state, rows = program.init_state(), []
    for batch, each in zip(batches, np.broadcast_to(np.float32(rate), len(batches)), strict=True):
        state, metrics = program.run_step(state, program.shard(batch), each)
        rows.append(jax.device_get(metrics))
    return program, state, rows


def documents(seed, config):
    """Returns rows of three documents and padding, a different number of counted targets in each."""
    rng, shape = np.random.default_rng(seed), (config.data.batch_size, config.data.seq_len)
    ends, places = np.sort(rng.integers(1, shape[1], (shape[0], 3)), axis=1), np.arange(shape[1])
    ids = 1 + (places >= ends[:, :1]) + (places >= ends[:, 1:2])
    return segmented_batch(rng.integers(0, config.model.vocab_size, shape), np.where(places >= ends[:, 2:], 0, ids))
