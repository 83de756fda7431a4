"""Configs of the planner's tests: a model large enough that its temporaries are arrays, not rounding, on 8 devices."""

from hlat_jax import config as config_lib
from hlat_jax.resolve import resolve

KEYS = {
    "remat": ("model", "remat"),
    "fuse": ("model", "fuse_qkv"),
    "loop": ("model", "layer_loop"),
    "policy": ("precision", "policy"),
    "kernel": ("model", "attention"),
    "m": ("train", "num_microbatches"),
    "rows": ("data", "batch_size"),
    "optimizer": ("optimizer", "name"),
    "schedule": ("optimizer", "schedule"),
    "segments": ("data", "packing"),
}


def planned_config(**changes):
    """Returns a resolved config: 8 layers of 256, GQA 8 over 4, 8 rows of 512 tokens, kernels as on the target.

    `changes` are keys of `KEYS` or of the section `parallel`.
    """
    return _resolved(_base(), changes)


def small_config(**changes):
    """Returns `planned_config` with 4 layers of 32 and rows of 16 tokens, for what has to be run."""
    c = _base()
    c.model.vocab_size = 64
    c.model.num_layers = 4
    c.model.embed_dim = 32
    c.model.mlp_dim = 64
    c.model.head_dim = 8
    c.data.seq_len = 16
    return _resolved(c, changes)


def _base():
    c = config_lib.default()
    c.model.vocab_size = 2048
    c.model.num_layers = 8
    c.model.embed_dim = 256
    c.model.mlp_dim = 704
    c.model.num_heads = 8
    c.model.num_kv_heads = 4
    c.model.head_dim = 32
    c.model.max_positions = 512
    c.model.fuse_qkv = False
    c.model.attention = "einsum"
    c.model.cross_entropy = "dense"
    c.data.batch_size = 8
    c.data.seq_len = 512
    return c


def _resolved(c, changes):
    for key, value in changes.items():
        section, name = KEYS.get(key, ("parallel", key))
        c[section][name] = value
    return resolve(c)


def num_devices(config):
    """Returns the product of a config's degrees, where -1 counts as 1."""
    p = config.parallel
    return max(1, p.pipe) * max(1, p.data) * max(1, p.fsdp) * max(1, p.context) * max(1, p.tensor)


def name(changes):
    """Returns a short name of a case for pytest."""
    return "-".join(f"{key}{value}" if value is not True else key for key, value in changes.items())
