"""Differences between the data of a run and the data that its checkpoint records. Imports no JAX."""

from __future__ import annotations

import itertools
import os
import shlex
from collections.abc import Mapping
from typing import Any

from hlat_jax.config import DataConfig, count_text
from hlat_jax.data.formats.paths import file_format, find_files
from hlat_jax.data.mixture import first_stages_of, parse_sources
from hlat_jax.resolve import held_out_share


def data_drift(saved: Mapping[str, Any], current: Mapping[str, Any], *, num_batches: int) -> list[str]:
    """Returns a line for each difference between the data of two settings of a run after `num_batches` batches: changed
    files, a changed chat template, and a changed data.mixture of those batches.

    Later stages may be added, changed or removed.
    """
    lines, said = [], set()
    for key, name in (("manifest", "data.train"), ("validation_manifest", "data.validation")):
        before, now = ((settings.get(key) or {}).get("chat_template") for settings in (saved, current))
        if before not in (None, now):
            lines.append(
                f"{name}: the chat template beside data.tokenizer, or a control token, changed since the checkpoint; "
                "the folder tokenizer/ of the run has the files of its training"
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
            f"held out of data.train: give --config.data.validation={shlex.quote(before['validation'])}"
        )
    if before["mixture"] != now["mixture"]:
        stages = [first_stages_of(data, num_batches=num_batches) for data in (before, now)]
        if stages[0] != stages[1]:
            lines.append(
                f"data.mixture: {before['mixture']!r} in the checkpoint, {now['mixture']!r} now, which differ before "
                f"step {num_batches + 1:,}; only stages that start after it may change"
            )
    return lines


def with_sizes_now(settings: Mapping[str, Any], data: DataConfig) -> dict[str, Any]:
    """Returns the settings of a checkpoint with the sizes that the local files of `data` have now.

    Text behind a URL, files that are away and other formats than JSONL, Parquet, Arrow and plain text keep their sizes.
    """
    now = dict(settings)
    for key, spec in (("manifest", data.train), ("validation_manifest", data.validation)):
        entries = (settings.get(key) or {}).get("files", [])
        try:
            found = [] if "://" in spec or held_out_share(spec) else _sizes(spec, key=key)
        except (OSError, ValueError):  # the run says so, or waits
            continue
        if len(found) == len(entries) > 0:
            pairs = zip(entries, found, strict=True)
            now[key] = settings[key] | {"files": [entry | facts for entry, facts in pairs]}
    return now


def _sizes(spec: str, *, key: str) -> list[dict[str, Any]]:
    """Returns for each entry that the manifest of these files has its name and bytes; {} for other formats."""
    found: list[dict[str, Any]] = []
    for paths in parse_sources(spec, key=key).values() if spec else ():
        for kind, run in itertools.groupby(find_files(paths, key=key).files, key=file_format):
            files = list(run)
            if kind == "text":
                found.append({"bytes": sum(os.stat(file).st_size for file in files)})
            else:
                is_file = kind in ("jsonl", "parquet", "arrow")
                found += [{"bytes": os.stat(file).st_size, "name": file.name} if is_file else {} for file in files]
    return found
