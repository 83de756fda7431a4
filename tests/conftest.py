"""Eight virtual CPU devices for every test, set before JAX is imported, and small fixtures."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Level 0 compiles three times faster and changes no rule of arithmetic; what tests run is too small to notice.
_FLAGS = "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0"
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_FLAGS}".strip()

import jax
import numpy as np
import pytest

from hlat_jax import config as config_lib
from hlat_jax.batch import concat_batch
from hlat_jax.sharding import make_layout


@pytest.fixture
def small():
    """A mutable config of a GQA model that compiles in a second: 3 layers of 32, vocabulary 64."""
    c = config_lib.default()
    c.model.vocab_size = 64
    c.model.num_layers = 3
    c.model.embed_dim = 32
    c.model.mlp_dim = 48
    c.model.num_heads = 4
    c.model.num_kv_heads = 2
    c.model.head_dim = 8
    c.model.max_positions = 16
    c.data.batch_size = 8
    c.data.seq_len = 16
    c.optimizer.peak_lr = 1e-2
    c.optimizer.warmup_steps = 1
    c.optimizer.horizon_steps = 100
    return c


@pytest.fixture
def one_device():
    """The layout of a single device."""
    return make_layout(config_lib.ParallelConfig(), jax.devices()[:1])


@pytest.fixture
def make_batch():
    """A function of (seed, config) that makes a random `concat` batch."""

    def make(seed, config):
        shape = (config.data.batch_size, config.data.seq_len)
        return concat_batch(np.random.default_rng(seed).integers(0, config.model.vocab_size, shape))

    return make


@pytest.fixture
def train_here(monkeypatch, capsys):
    """A function of the words of a training command that runs it in this process: (exit code, stdout, stderr)."""

    def run(*words, num_devices=1):
        from hlat_jax import flags, train

        devices = jax.devices("cpu")[:num_devices]
        monkeypatch.setattr(jax, "devices", lambda *_: devices)
        monkeypatch.setattr("sys.argv", ["train", *map(str, words)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as exit_:
            flags.main(train.main)
        printed = capsys.readouterr()
        return exit_.value.code, printed.out, printed.err

    return run
