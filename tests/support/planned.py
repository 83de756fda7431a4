"""Configs of the planner's tests, on 8 devices."""

import configs

# Short names of keys, for the names of cases.
KEYS = {
    "fuse": "fuse_qkv",
    "loop": "layer_loop",
    "kernel": "attention",
    "m": "num_microbatches",
    "rows": "batch_size",
    "optimizer": "optimizer__name",
    "segments": "packing",
}


def planned_config(**changes):
    """Returns a resolved config: 8 layers of 256, GQA 8 over 4, 8 rows of 512 tokens, kernels as on the target."""
    return configs.resolved("planned", **{KEYS.get(key, key): value for key, value in changes.items()})


def small_config(**changes):
    """Returns `planned_config` with 4 layers of 32 and rows of 16 tokens, for what has to be run."""
    return configs.resolved("few", **{KEYS.get(key, key): value for key, value in changes.items()})


def num_devices(config):
    """Returns the product of a config's degrees, where -1 counts as 1."""
    p = config.parallel
    return max(1, p.pipe) * max(1, p.data) * max(1, p.fsdp) * max(1, p.context) * max(1, p.tensor)


def name(changes):
    """Returns a short name of a case for pytest."""
    return "-".join(f"{key}{value}" if value is not True else key for key, value in changes.items())
