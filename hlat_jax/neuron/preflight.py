"""The collectives of a training step as input for nccom-test: groups and pairs of devices, element types and sizes.

They are read from the step as lowered for Neuron over the whole mesh, and from what Shardy adds to it. Ranks count the
devices of all nodes, node by node. Source: AWS Neuron docs, NCCOM-TEST user guide. It shows the format of a file of
pairs, not that of one of replica groups, which follows the same pattern here.
"""

from __future__ import annotations

import collections
import dataclasses
import json
import math
import pathlib
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from hlat_jax.neuron import partitioned
from hlat_jax.neuron.module import Program, Tensor, line_of, numbers, tensor

# Operation of StableHLO and Shardy -> that of nccom-test
OPERATIONS = {
    "all_reduce": "all_reduce",
    "all_gather": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "all_to_all": "alltoall",
    "collective_permute": "permute",
}
_DTYPES = {"f32": "fp32", "bf16": "bf16", "f16": "fp16", "i32": "int32", "ui32": "uint32", "i8": "int8", "ui8": "uint8"}
_CHECKED = ("all_reduce", "all_gather", "reduce_scatter")  # those that the guide compares with a CPU's result
INDEX, SCRIPT, RESULTS = "preflight.json", "preflight.sh", "results"
MOST_SIZES = 3


@dataclasses.dataclass(frozen=True)
class Case:
    """The collectives of a step of one operation, one element type and one set of groups.

    Attributes:
      name: of its files.
      operation: of nccom-test.
      dtype: of nccom-test.
      groups: int [n, size], the ranks of each group; for a permute [n, 2], source and target.
      sizes: bytes of the full array, as nccom-test counts them -> number of operations in the program.
      line: the Python line of one of them.
    """

    name: str
    operation: str
    dtype: str
    groups: np.ndarray
    sizes: Mapping[int, int]
    line: str

    @property
    def measured(self) -> list[int]:
        """The sizes to measure: the smallest, the largest, and the one with most bytes in all."""
        most = max(self.sizes, key=lambda size: (size * self.sizes[size], size))
        return sorted({min(self.sizes), most, max(self.sizes)})[-MOST_SIZES:]

    def input(self) -> dict[str, Any]:
        """Returns the content of the file for nccom-test."""
        groups = self.groups.tolist()
        return {"src_target_pairs": [groups]} if self.operation == "permute" else {"replica_groups": groups}

    def spanned_nodes(self, devices_per_node: int) -> int:
        """Returns the largest number of nodes that a group, or a pair, is spread over."""
        return max(len(set(group)) for group in (self.groups // devices_per_node).tolist())


def cases(modules: Iterable[Any], *, ranks: Sequence[int]) -> list[Case]:
    """Returns the collectives of lowered modules, those with most bytes first.

    Args:
      modules: roots of StableHLO modules, as for `partitioned.run_shardy`.
      ranks: global rank of each device of the mesh, in the mesh's order.
    """
    order = np.asarray(ranks)
    sizes: dict[tuple, collections.Counter[int]] = collections.defaultdict(collections.Counter)
    found: dict[tuple, tuple[np.ndarray, str]] = {}
    for root in modules:
        for operation, dtype, groups, size, line in _collectives(root):
            placed = order[groups]
            key = (operation, dtype, placed.shape, placed.tobytes())
            sizes[key][size] += 1
            found.setdefault(key, (placed, line))
    by_bytes = sorted(found, key=lambda key: -sum(size * count for size, count in sizes[key].items()))
    return [
        Case(
            name=f"{number:02}_{key[0]}_{key[1]}_{_shape(found[key][0], key[0])}",
            operation=key[0],
            dtype=key[1],
            groups=found[key][0],
            sizes=dict(sorted(sizes[key].items())),
            line=found[key][1],
        )
        for number, key in enumerate(by_bytes, 1)
    ]


def _shape(groups: np.ndarray, operation: str) -> str:
    return f"{len(groups)}_pairs" if operation == "permute" else f"{groups.shape[0]}x{groups.shape[1]}"


def _collectives(root: Any) -> Iterator[tuple[str, str, np.ndarray, int, str]]:
    """Yields (operation, dtype, groups, bytes of the full array, Python line) of each collective between devices."""
    program, sharded = Program(root), partitioned.run_shardy(root)
    for op in program.operations:
        if op.name == "stablehlo.collective_permute":
            kind = tensor(op.operands[0])
            pairs = numbers(op.attributes["source_target_pairs"])
            yield "permute", _dtype(kind), np.asarray(pairs), kind.num_bytes, line_of(program.frames(op))
    for op, groups in partitioned.replica_groups(program, sharded):
        name, size = op.name.partition(".")[2], groups.shape[1]
        if size < 2 or name not in OPERATIONS:
            continue
        if op.name.startswith("sdy."):
            local = partitioned.local_result(op, sharded)
            whole = local.num_bytes * (size if name == "reduce_scatter" else 1)
            yield OPERATIONS[name], _dtype(local), np.asarray(groups), whole, "added by the partitioner"
            continue
        values = list(op.results) if name == "all_gather" else list(op.operands)
        kinds = [tensor(value) for value in values]
        whole = sum(kind.num_bytes for kind in kinds)
        yield OPERATIONS[name], _dtype(kinds[0]), np.asarray(groups), whole, line_of(program.frames(op))


def _dtype(kind: Tensor) -> str:
    return _DTYPES.get(kind.dtype, "uint8")


def write(folder: pathlib.Path, found: Sequence[Case], *, about: Mapping[str, Any]) -> None:
    """Writes the inputs, INDEX with what is expected, and SCRIPT, which runs nccom-test on them; removes old results.

    `about` has config, instance, nodes, devices_per_node and lnc.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for old in (folder / RESULTS).glob("*.*"):
        old.unlink()
    rows = []
    for case in found:
        (folder / f"{case.name}.json").write_text(json.dumps(case.input()) + "\n")
        spanned = case.spanned_nodes(about["devices_per_node"])
        kept = {"operation": case.operation, "dtype": case.dtype, "line": case.line, "spanned_nodes": spanned}
        rows.append({"name": case.name, **kept, "sizes": case.sizes, "measured": case.measured})
    (folder / INDEX).write_text(json.dumps(dict(about) | {"cases": rows}, indent=1) + "\n")
    script = folder / SCRIPT
    script.write_text(_script(found, about=about))
    script.chmod(0o755)


_HEAD = """\
#!/usr/bin/env bash
# Measures the collectives of a step of {config} with nccom-test, on {nodes} x {instance}. NOT YET RUN.
#   {several}
# Then, with the same flags as before: python -m hlat_jax.neuron preflight ... --results
set -uo pipefail
cd "$(dirname "$0")" || exit
export NEURON_LOGICAL_NC_CONFIG={lnc} PATH="$PATH:/opt/aws/neuron/bin"
command -v nccom-test > /dev/null || {{
  echo "error: nccom-test is neither in PATH nor in /opt/aws/neuron/bin: install aws-neuronx-tools." >&2
  exit 2
}}
mkdir -p results
place=()
"""
_PLACE = """\
if [[ -n ${SLURM_JOB_ID:-} ]]; then
  place=(--slurm-mode --slurm-job-id "$SLURM_JOB_ID")
else
  : "${HOSTS:?set HOSTS to the addresses of the nodes, with spaces between, or SLURM_JOB_ID}"
  read -d '' -ra hosts <<< "$HOSTS" || true
  ((${#hosts[@]} == NODES)) || {
    echo "error: number of addresses in HOSTS: ${#hosts[@]}; this was written for NODES nodes." >&2
    exit 2
  }
  place=(--hosts "${hosts[@]}")
  export NEURON_RT_ROOT_COMM_ID="${hosts[0]}:41000"
fi
"""
_RUN = """\
failed=0
measure() { # name, operation, type, bytes, flags
  local result="results/$1.$4" code=0
  rm -f "$result.json" "$result.code"
  echo "$1: $2 of $4 bytes of $3"
  nccom-test -r RANKS -N NODES -d "$3" "$2" -b "$4" -e "$4" --non-interactive "${@:5}" \\
    --report-to-json-file "$result.json" "${place[@]}" || code=$?
  echo "$code" > "$result.code"
  ((code == 0)) || failed=$((failed + 1))
}
"""


def _script(found: Sequence[Case], *, about: Mapping[str, Any]) -> str:
    nodes = about["nodes"]
    several = f"HOSTS='ADDRESS ADDRESS ...' ./{SCRIPT}, or SLURM_JOB_ID=JOB ./{SCRIPT}" if nodes > 1 else f"./{SCRIPT}"
    ranks = nodes * about["devices_per_node"]
    lines = [_HEAD.format(**about, several=several), _PLACE.replace("NODES", str(nodes)) if nodes > 1 else ""]
    lines.append(_RUN.replace("RANKS", str(ranks)).replace("NODES", str(nodes)))
    for case in found:
        option = "--custom-src-target-pairs" if case.operation == "permute" else "--custom-replica-group"
        flags = [*(["--check"] if case.operation in _CHECKED else []), option, f"{case.name}.json"]
        for size in case.measured:
            lines.append(shlex.join(["measure", case.name, case.operation, case.dtype, str(size), *flags]) + "\n")
    lines.append('echo "$failed failed"\n((failed == 0))\n')
    return "".join(lines)


def read(folder: pathlib.Path) -> tuple[dict[str, Any], list[Case]]:
    """Returns what `write` wrote: (about, cases).

    Raises:
      ValueError: INDEX or a file that it names is missing or damaged.
    """
    path, found = folder / INDEX, []
    try:
        index = json.loads(path.read_text())
        rows = [
            {key: row[key] for key in ("name", "operation", "dtype", "line")}
            | {"sizes": {int(size): count for size, count in row["sizes"].items()}}
            for row in index.pop("cases")
        ]
        for row in rows:
            path = folder / f"{row['name']}.json"
            content = json.loads(path.read_text())
            groups = content["src_target_pairs"][0] if row["operation"] == "permute" else content["replica_groups"]
            found.append(Case(**row, groups=np.asarray(groups)))
    except FileNotFoundError:
        raise ValueError(f"{path} is missing: write the folder again, without --results.") from None
    except (ValueError, LookupError, TypeError, AttributeError):
        raise ValueError(f"{path} is damaged: write the folder again, without --results.") from None
    return index, found


@dataclasses.dataclass(frozen=True)
class Measurement:
    """What nccom-test reported for one size of a case; `problem` is "" where it is as expected."""

    case: Case
    size: int
    microseconds: float
    bus_gb_per_s: float
    problem: str


def results(folder: pathlib.Path, found: Sequence[Case]) -> list[Measurement]:
    """Returns the results in a folder for every size that SCRIPT measures."""
    rows = []
    for case in found:
        for size in case.measured:
            path = folder / RESULTS / f"{case.name}.{size}.json"
            code = path.with_suffix(".code")
            time_us = bus = math.nan
            try:
                [row] = json.loads(path.read_text())["results"]
                time_us, bus = float(row["time:avg(us)"]), float(row["busbw(GB/s)"])
                same = (row["size(B)"], row["type"]) == (size, case.dtype)
                problem = "" if same else f"measured {row['size(B)']} bytes of {row['type']}"
            except FileNotFoundError:
                problem = "no result"
            except (ValueError, KeyError, TypeError):
                problem = f"{path} is not a result of nccom-test"
            if (ended := code.read_text().strip() if code.is_file() else "") not in ("", "0"):
                problem = f"nccom-test ended with code {ended}: its output says whether its check of the values failed"
            rows.append(Measurement(case, size, time_us, bus, problem))
    return rows
