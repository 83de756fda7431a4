"""Settings compared: those of a run with those of its checkpoint, and those of a process with those of another.

Owns which settings may differ, and how a difference is said. Refuses to know where either side comes from.
"""

from __future__ import annotations

import fnmatch
import hashlib
import json
from typing import Any

# What a resumed run may set differently: it changes no update so far. The hashes guard the content behind the paths.
MAY_CHANGE = (
    "name",
    "model.ops_table",  # what it chose is compared as `implementations`
    "train.num_steps",
    "train.init_from",  # read at step 0 alone
    "train.max_nonfinite_steps",
    "train.eval_loss_*",
    "train.eval_tasks*",
    "train.sample_*",
    "metrics.*",
    "checkpoint.*",
    "parallel.*",
    "data.train",
    "data.validation",
    "data.tokenizer",
    "data.mixture",  # of the steps to come; streams.data_drift compares those that are trained
    "data.num_threads",
    "data.prefetch_batches",
    "data.position_every_steps",
    "data.on_bad_record",
    "*manifest.files",
)
# What the processes of one run may set differently: where their node keeps the data, and what it does with its cores.
MAY_DIFFER = (
    "metrics.*",
    "data.train",
    "data.validation",
    "data.tokenizer",
    "data.num_threads",
    "data.prefetch_batches",
    "*manifest.files",
)


def config_drift(saved: dict[str, Any], current: dict[str, Any]) -> list[str]:
    """Returns a line for each setting that differs between two runs and must not; see MAY_CHANGE.

    Takes configs as nested dicts, or checkpoint metadata with such a dict under `config` and, beside it, hashes of what
    the config only points to. Further entries of `saved` tell how far it was (tokens seen) and are no settings.
    """
    current = json.loads(json.dumps(current))  # as it looks once it has been through a file
    before = {key: value for key, value in saved.items() if key in current}
    return differences(*(_without(_flat(tree), MAY_CHANGE) for tree in (before, current)))


def shared_settings(settings: dict[str, Any]) -> dict[str, str]:
    """Returns the settings that all processes of a run must have in common, each as a short text: long ones by hash."""
    found = {key: json.dumps(value) for key, value in _without(_flat(settings), MAY_DIFFER).items()}
    return {
        key: text if len(text) <= 60 else hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
        for key, text in found.items()
    }


def differences(saved: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Returns a line for each key whose value in a checkpoint is another than now, or that only one of them has."""
    sides = {key: (saved.get(key, "absent"), now.get(key, "absent")) for key in sorted(saved.keys() | now.keys())}
    return [f"{key}: {_short(a)} in the checkpoint, {_short(b)} now" for key, (a, b) in sides.items() if a != b]


def _without(leaves: dict[str, Any], patterns: tuple[str, ...]) -> dict[str, Any]:
    return {
        key: value
        for key, value in leaves.items()
        if not any(fnmatch.fnmatchcase(key, pattern) for pattern in patterns)
    }


def _flat(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    leaves: dict[str, Any] = {}
    for key, value in tree.items():
        path = prefix if not prefix and key == "config" else f"{prefix}{key}"
        if isinstance(value, dict):
            leaves |= _flat(value, f"{path}." if path else "")
        else:
            leaves[path] = value
    return leaves


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:60]} ... ({len(text)} characters)"
