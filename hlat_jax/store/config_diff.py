"""Compares the settings of a run with its checkpoint's, and the settings of the processes of a run."""

from __future__ import annotations

import fnmatch
import json
from typing import Any

# Keys that older records contain but that no longer exist, at the values that changed nothing; None: at any.
_GONE: dict[str, dict[str, Any]] = {
    "data": {"position_every_steps": None, "shuffle_by": "document"},
    # all implementations of an op compute the same function; of ops that remain, `implementations` has the choice
    "model": {"ops_table": None, "rms_norm": None, "rope": None, "swiglu": None},
    "parallel": {
        "context_exchange": None,
        "reduce_gradients": "layer",
    },  # of values that remain another takes its place
    "optimizer": {"plateau_ratio": 0.0, "num_cycles": 0.5, "muon_scale": "rms"},
    "train": {"rewind_to": None},
}
# Settings that a resumed run may change: they affect no update so far. Hashes compare the content behind the paths.
MAY_CHANGE = (
    "name",
    "model.allow_nki_on_trn1",
    "model.layer_loop",  # the layers are the same
    "train.num_steps",
    "train.num_microbatches",  # as parallel.*: the same sums in another order
    "train.accumulate",  # the same sums, equal but for what the compiler fuses
    "train.compiler_flags",
    "train.init_from",  # read at step 0 alone
    "train.branch_from",  # read at the first step alone
    "train.max_nonfinite_steps",
    "train.check_devices_every_steps",
    "train.skip_steps",  # for the batches to come; run.drift compares those that were passed
    "train.spike*",  # for the steps to come; a window that changes begins again, see store.checkpoint
    "train.early_stop_evals",  # the losses of all validations are kept
    "train.eval_loss_*",
    "train.eval_tasks*",
    "train.sample_*",
    "train.profile_steps",
    "metrics.*",
    "checkpoint.*",
    "parallel.*",
    "data.train",
    "data.validation",
    "data.tokenizer",
    "data.mixture",  # for the steps to come; data.drift compares the steps already trained
    "data.num_threads",
    "data.prefetch_batches",
    "data.on_bad_record",
    "*manifest.files",
    "*manifest.chat_template",  # data.drift compares it
)
# Settings that may differ between the processes of a run: paths on their node, and use of its cores.
MAY_DIFFER = (
    "metrics.*",
    "data.train",
    "data.validation",
    "data.tokenizer",
    "data.num_threads",
    "data.prefetch_batches",
    "*manifest.files",
)


def without_gone(section: str, values: dict[str, Any]) -> dict[str, Any]:
    """Returns the recorded values of a section without the removed keys that changed nothing."""
    gone = _GONE.get(section, {})
    return {key: value for key, value in values.items() if gone.get(key, ()) not in (value, None)}


def config_drift(saved: dict[str, Any], current: dict[str, Any], *, also: tuple[str, ...] = ()) -> list[str]:
    """Returns a line for each setting that differs between two runs, except MAY_CHANGE and `also`.

    Takes configs as nested dicts, or checkpoint metadata. Metadata has such a dict under `config` and hashes of the
    files that the config names. Entries that only `saved` has, such as the number of tokens so far, are not compared.
    """
    current = json.loads(json.dumps(current))  # as it looks once it has been through a file
    before = {key: value for key, value in saved.items() if key in current}
    return differences(*(_without(flat(tree), MAY_CHANGE + also) for tree in (before, current)))


def shared_settings(settings: dict[str, Any]) -> dict[str, str]:
    """Returns the settings that must be equal in all processes of a run, as JSON."""
    return {key: json.dumps(value) for key, value in _without(flat(settings), MAY_DIFFER).items()}


def differences(saved: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Returns a line for each key that differs between a checkpoint and now, or that only one has."""
    sides = {key: (saved.get(key, "absent"), now.get(key, "absent")) for key in sorted(saved.keys() | now.keys())}
    return [f"{key}: {_short(a)} in the checkpoint, {_short(b)} now" for key, (a, b) in sides.items() if a != b]


def _without(leaves: dict[str, Any], patterns: tuple[str, ...]) -> dict[str, Any]:
    return {
        key: value
        for key, value in leaves.items()
        if not any(fnmatch.fnmatchcase(key, pattern) for pattern in patterns)
    }


def flat(tree: dict[str, Any], *, prefix: str = "") -> dict[str, Any]:
    """Returns the values of nested dicts by their dotted paths, which leave out a first `config`."""
    leaves: dict[str, Any] = {}
    for key, value in tree.items():
        path = prefix if not prefix and key == "config" else f"{prefix}{key}"
        if isinstance(value, dict):
            leaves |= flat(value, prefix=f"{path}." if path else "")
        else:
            leaves[path] = value
    return leaves


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:60]} ... ({len(text)} characters)"
