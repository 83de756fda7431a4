"""Compares the data of a run with the data that its checkpoint records. Imports no JAX."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any

from hlat_jax.config import count_text
from hlat_jax.data.mixture import first_stages_of
from hlat_jax.resolve import held_out_share


def data_drift(saved: Mapping[str, Any], current: Mapping[str, Any], *, num_batches: int) -> list[str]:
    """Returns a line for each difference between the data of two settings of a run after `num_batches` batches.

    Differences are changed files, a changed chat template, and a changed data.mixture of the batches so far. Later
    stages of the mixture may be added, changed or removed.
    """
    lines, said = [], set()
    for key, name in (("manifest", "data.train"), ("validation_manifest", "data.validation")):
        before, now = ((settings.get(key) or {}).get("chat_template") for settings in (saved, current))
        if before not in (None, now):
            lines.append(
                f"{name}: the chat template of data.tokenizer, or a control token, changed since the checkpoint. "
                "The folder tokenizer/ of the run has the files of its training"
            )
        before, now = ((settings.get(key) or {"files": []})["files"] for settings in (saved, current))
        if len(before) != len(now):
            lines.append(f"{name}: {count_text(len(before), 'file')} in the checkpoint, {len(now):,} now")
            continue
        facts = [[(e["bytes"], e["documents"], e["fingerprint"]) for e in entries] for entries in (before, now)]
        changed = [entry["name"] for entry, old, new in zip(now, *facts, strict=True) if old != new]
        if changed and tuple(changed) not in said:  # a share of data.train has the same files
            said.add(tuple(changed))
            lines.append(
                f"{name}: {', '.join(changed[:3])} changed since the checkpoint ({len(changed):,} of "
                f"{count_text(len(now), 'file')})"
            )
    before, now = saved["config"]["data"], current["config"]["data"]
    if held_out_share(before["validation"]) != held_out_share(now["validation"]):
        lines.append(
            f"data.validation: {before['validation']!r} in the checkpoint, {now['validation']!r} now, and a share is "
            f"held out of data.train. Give --config.data.validation={shlex.quote(before['validation'])}"
        )
    if before["mixture"] != now["mixture"]:
        stages = [first_stages_of(data, num_batches=num_batches) for data in (before, now)]
        if stages[0] != stages[1]:
            lines.append(
                f"data.mixture: {before['mixture']!r} in the checkpoint, {now['mixture']!r} now, which differ before "
                f"step {num_batches + 1:,}. Only stages that start after it may change"
            )
    return lines
