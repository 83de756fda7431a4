"""Covering array of options: rows in which every pair of values that may be combined occurs at least once."""

from __future__ import annotations

import functools
import itertools
import math
from typing import Any

import covertable

Row = dict[str, Any]
NUM_DEVICES = 8
DEGREES = ("pipe", "data", "fsdp", "context", "tensor")
VALUES: dict[str, list] = {
    "pipe": [1, 2, 4],
    "data": [1, 2, 4],
    "fsdp": [1, 2, 4],
    "context": [1, 2, 4],
    "tensor": [1, 2, 4],
    "zero1": [False, True],
    "sequence_parallel": [False, True],
    "reduce_gradients": ["step", "microbatch"],
    "pipe_exchange": ["permute", "all_gather"],
    "bucket_bytes": [0, 4096],
    "num_microbatches": [1, 2, 4],
    "accumulate": ["scan", "programs"],
    "z_loss_weight": [0.0, 1e-2],
    "spikes": ["off", "warn", "skip"],
    "policy": ["fp32", "autocast", "mixed", "bf16_sr", "bf16"],
    "packing": ["concat", "documents"],
    "layer_loop": ["scan", "unroll"],
    "remat": ["none", "full", "selective", "products", "policy:everything_saveable"],
    "attention": ["chunked", "einsum", "blocked"],
    "cross_entropy": ["dense", "chunked", "reference"],
    "tie_embeddings": [False, True],
    "fuse_qkv": [False, True],
    "num_kv_heads": [4, 2, 1],  # of 4 heads
    "qkv_bias": [False, True],
    "out_bias": [False, True],
    "qk_norm": [False, True],
    "sliding_window": [16, 5],  # of 16 positions: no window, also with layers that have it
    "sliding_window_layers": ["", "2:2"],
    "rope_scaling": ["none", "linear", "llama3", "yarn"],
    "optimizer": ["adamw", "muon"],
}
FIRST = {key: values[0] for key, values in VALUES.items()}
# The rows that the quick suite runs, part of every array. A scan hands out its constants as residuals, and those are
# zeros where a stage has no microbatch.
QUICK: dict[str, Row] = {
    "stages": FIRST
    | {"pipe": 2, "fsdp": 2, "num_microbatches": 2, "cross_entropy": "chunked", "fuse_qkv": True, "qkv_bias": True}
    | {"sliding_window": 5, "sliding_window_layers": "2:2", "attention": "chunked"},
    "tensor": FIRST
    | {"data": 2, "tensor": 4, "zero1": True, "sequence_parallel": True, "reduce_gradients": "microbatch"}
    | {"bucket_bytes": 4096, "num_microbatches": 2, "accumulate": "programs", "z_loss_weight": 1e-2, "spikes": "skip"}
    | {"packing": "documents", "remat": "selective", "attention": "blocked", "tie_embeddings": True, "num_kv_heads": 2}
    | {
        "optimizer": "muon",
        "qkv_bias": True,
        "out_bias": True,
        "qk_norm": True,
        "sliding_window": 5,
        "rope_scaling": "yarn",
    },
    "context": FIRST
    | {"pipe": 2, "context": 2, "tensor": 2, "zero1": True, "sequence_parallel": True, "num_microbatches": 2}
    | {"packing": "documents", "remat": "full", "fuse_qkv": True, "sliding_window": 5, "sliding_window_layers": "2:2"},
}
# What is refused: the keys that it depends on, whether a row is, a row, and how the error begins.
REFUSED = {
    "more devices": (
        DEGREES,
        lambda row: num_devices(row) > NUM_DEVICES,
        {"pipe": 4, "data": 4},
        "parallel.pipe=4, parallel.data=4",
    ),
    "attention of whole rows": (
        ("context", "attention"),
        lambda row: row["context"] > 1 and row["attention"] != "chunked",
        {"context": 2, "attention": "einsum"},
        "parallel.context=2",
    ),
    "microbatches of stages": (
        ("pipe", "reduce_gradients"),
        lambda row: row["pipe"] > 1 and row["reduce_gradients"] == "microbatch",
        {"pipe": 2, "reduce_gradients": "microbatch"},
        "parallel.pipe=2 excludes parallel.reduce_gradients",
    ),
    "stages under autocast": (
        ("pipe", "policy"),
        lambda row: row["pipe"] > 1 and row["policy"] == "autocast",
        {"pipe": 2, "policy": "autocast"},
        "precision.policy=autocast",
    ),
    "copies of fused KV heads": (
        ("tensor", "num_kv_heads", "fuse_qkv"),
        lambda row: row["tensor"] > row["num_kv_heads"] and row["fuse_qkv"],
        {"tensor": 4, "num_kv_heads": 2, "fuse_qkv": True},
        "parallel.tensor=4 above model.num_kv_heads=2",
    ),
}


def num_devices(row: Row) -> int:
    """Returns the number of devices that the degrees of a row multiply to."""
    return math.prod(row[axis] for axis in DEGREES)


@functools.cache
def covering_array(seed: int) -> list[Row]:
    """Returns rows that hold every allowed pair and nothing that is refused; another seed gives other rows."""
    constraints = [
        {"operator": "fn", "requires": list(keys), "evaluate": lambda row, is_refused=is_refused: not is_refused(row)}
        for keys, is_refused, _, _ in REFUSED.values()
    ]
    # too many devices already of some degrees: else the search goes far into rows that no value completes
    constraints += [
        {
            "operator": "fn",
            "requires": some,
            "evaluate": lambda row, some=some: math.prod(map(row.get, some)) <= NUM_DEVICES,
        }
        for size in (2, 3, 4)
        for some in map(list, itertools.combinations(DEGREES, size))
    ]
    return covertable.make(VALUES, constraints=constraints, presets=list(QUICK.values()), salt=str(seed))


def pairs(row: Row) -> set[tuple]:
    """Returns the pairs of (key, value) in a row."""
    return set(itertools.combinations(sorted(row.items()), 2))


def allowed_pairs() -> set[tuple]:
    """Returns every pair of (key, value) that is in some row without refusal, by looking at the refusals alone.

    The first values are refused with no other, so a pair is allowed unless it is refused beside them.
    """
    found = set()
    for a, b in itertools.combinations(sorted(VALUES), 2):
        for x, y in itertools.product(VALUES[a], VALUES[b]):
            row = FIRST | {a: x, b: y}
            if not any(is_refused(row) for _, is_refused, _, _ in REFUSED.values()):
                found.add(((a, x), (b, y)))
    return found
