"""Makes rungs of programs of a config, from one layer, one microbatch and one row to the whole.

Each rung is the config with some keys changed, and a bit larger than the previous rung. Its programs are lowered and
linted here. The first rung that fails on a device is the smallest program with the faulty part.
"""

from __future__ import annotations

import dataclasses
import math
import operator
import shlex
from collections.abc import Sequence
from typing import Any, NamedTuple

from hlat_jax.config import Config, count_text
from hlat_jax.facts.core_groups import server_for
from hlat_jax.facts.number_ranges import parse_ranges
from hlat_jax.host.neuron_compiler_flags import COMPILER_KILLED, compiler_flags, compiler_killed, with_config
from hlat_jax.host.neuron_topology import Topology
from hlat_jax.neuron import partitioned, programs
from hlat_jax.neuron.module import Program
from hlat_jax.parallel.degrees import are_degrees_valid
from hlat_jax.parallel.sharding import MESH_AXES
from hlat_jax.passes.products import live_jaxpr
from hlat_jax.plan.instructions import estimate_instructions
from hlat_jax.program import make_program
from hlat_jax.resolve import resolve
from hlat_jax.run.compilation import fingerprint, named_programs, traced_programs

_MICROBATCH_FACTOR = 4  # from one rung to the next
_STEPS = {"train.num_steps": 2, "checkpoint.every_steps": 0}
# Text and tokenizer that ship with the package, so that the first rungs need no data. Each row of a batch reads
# documents of its own, and the text has 257.
_TEXT = {"data.train": "package:austen_train.jsonl", "data.tokenizer": "package:austen_2k.model"}
_VALIDATION = {"data.validation": "package:austen_validation.jsonl"}
_MOST_ROWS = 256
# An extended regular expression of what a log has if the compiler failed, of our own messages and of JAX's plugin.
_COMPILER_FAILED = rf"NCC_[A-Z]+[0-9]+|RunNeuronCC|neuronx-cc.*(failed|killed|error)|{COMPILER_KILLED}"


@dataclasses.dataclass(frozen=True)
class Rung:
    """A config with some keys changed, and the devices that it runs on.

    Attributes:
      what: the sizes of the rung, for people.
      changes: config path -> value that differs from the recipe's.
    """

    what: str
    changes: dict[str, Any]
    num_devices: int
    config: Config


def rungs(config: Config, *, num_devices: int, node_devices: int, target: str = "") -> list[Rung]:
    """Returns the rungs of a config, the smallest first. The last is the whole over `num_devices`.

    The first rungs run on as few nodes as a replica without pipeline stages takes, the whole on all. The batch of a
    rung has as many rows as its replicas and microbatches take. Microbatches of the whole have the recipe's rows.

    Args:
      config: the config of the whole.
      num_devices: the number of devices of the whole.
      node_devices: the number of devices of one node.
      target: one of `rules.LINTED` with the groups of cores that a rung must have, or "" for no check.

    Raises:
      ValueError: the config does not fit `num_devices`.
    """
    degrees = programs.layout_for_neuron(config, num_devices, target=target).degrees
    num_stages, num_layers = degrees["pipe"], config.model.num_layers
    rows = _rows(config, num_devices)
    last = -(-config.data.batch_size // (num_devices // _replica_size(degrees) * rows))  # microbatches
    sizes = [(1, 1, 1, 1), (1, 1, 1, rows)]  # layers, stages, microbatches, rows of one
    sizes += [(layers, 1, 1, rows) for layers in _powers(2, num_layers // num_stages)]
    sizes += [(layers, num_stages, 1, rows) for layers in (num_stages, num_layers)]
    sizes += [(num_layers, num_stages, microbatches, rows) for microbatches in _powers(_MICROBATCH_FACTOR, last)]
    shards = math.prod(max(1, getattr(config.parallel, axis)) for axis in ("fsdp", "context", "tensor"))
    # each on the fewest whole nodes that hold a replica
    runs = [(size, min(num_devices, math.ceil(size[1] * shards / node_devices) * node_devices)) for size in sizes]
    runs.append(((num_layers, num_stages, last, rows), num_devices))
    fitting = []
    for size, devices in dict.fromkeys(runs):
        rung = _rung(config, size, devices, whole=(num_devices, degrees))
        if are_degrees_valid(rung.config, devices, server=server_for(target, devices) if target else None):
            fitting.append(rung)
    return fitting


def _rung(
    config: Config, size: tuple[int, int, int, int], num_devices: int, *, whole: tuple[int, dict[str, int]]
) -> Rung:
    """Returns the rung of (layers, stages, microbatches of one replica, rows of one); `whole`: devices and degrees."""
    layers, stages, microbatches, rows = size
    changes = {"model.num_layers": layers, "parallel.pipe": stages, "train.num_microbatches": microbatches}
    parts = parse_ranges("model.sliding_window_layers", config.model.sliding_window_layers, example="29:36")
    if parts:
        within = [f"{part.start}:{min(part.stop - 1, layers)}" for part in parts if part.start <= layers]
        changes["model.sliding_window_layers"] = ",".join(within)
        changes["model.sliding_window"] = config.model.sliding_window if within else 0
    # one where parallel.tensor takes all devices
    replicas = max(1, num_devices // _replica_size(whole[1] | {"pipe": stages}))
    changes["data.batch_size"] = replicas * microbatches * rows
    if num_devices != whole[0] and -1 not in [getattr(config.parallel, axis) for axis in MESH_AXES]:
        changes["parallel.data"] = -1
    sizes = f"{count_text(layers, 'layer')} x {count_text(microbatches, 'microbatch')} x {count_text(rows, 'row')}"
    sizes += f", pipe {stages}" if stages > 1 else ""
    kept = {path: value for path, value in changes.items() if value != operator.attrgetter(path)(config)}
    tree = config.to_dict()
    for path, value in changes.items():
        section, key = path.split(".")
        tree[section][key] = value
    return Rung(sizes, kept, num_devices, resolve(tree))


def check_programs(rung: Rung, *, target: str) -> dict[str, dict[str, Any]]:
    """Returns estimates and lint results of each program of a rung, lowered for a target of `rules.LINTED`.

    The values are the estimated instructions (None for a program that cannot be lowered), the fingerprint, and the
    rules of the lint's errors and warnings.
    """
    program = make_program(rung.config, programs.layout_for_neuron(rung.config, rung.num_devices, target=target))
    traced, rows = traced_programs(program), {}
    for name in named_programs(program, "all"):
        trace = traced[name]()
        findings = programs.findings(name, trace, program=program, target=target)
        row: dict[str, Any] = {"sha256": "", "unrolled": None, "looped": None, "largest": None}
        if not any(finding.rule == "LW01" for finding in findings):
            lowered = trace.lower(lowering_platforms=("neuron",))
            num_shards = partitioned.num_shards(Program(lowered.compiler_ir("stablehlo").operation))
            instructions = estimate_instructions(live_jaxpr(trace), num_shards=num_shards)
            row |= dataclasses.asdict(instructions) | {"judged": instructions.count_for_limit(name)}
            row["sha256"] = fingerprint(lowered)
        for severity in ("error", "warning"):
            row[f"{severity}s"] = sorted({finding.rule for finding in findings if finding.severity == severity})
        rows[name] = row
    return rows


def command(rung: Rung, config_words: Sequence[str], *, topology: Topology, workdir: str) -> str:
    """Returns the command that trains two steps of a rung.

    Args:
      rung: the rung to train.
      config_words: `--config=NAME` and the user's overrides. The data is the shipped text, unless they set data.train
        or the batch has more rows than that text has documents.
      topology: the instance type of the nodes, and their LNC.
      workdir: the beginning of the run folder's name. The time follows, because a run in the folder of an earlier run
        would continue it, and pass without compiling anything.
    """
    has_data = any(word.startswith("--config.data.train=") for word in config_words)
    changes = rung.changes | _STEPS
    if not has_data and rung.config.data.batch_size <= _MOST_ROWS:
        changes |= _TEXT | (_VALIDATION if rung.config.data.validation else {})
    nodes = math.ceil(rung.num_devices / topology.devices_per_node)
    words = [f"env NEURON_LOGICAL_NC_CONFIG={topology.lnc}"] if topology.lnc not in (0, topology.kind.lncs[0]) else []
    # a job of several nodes ends before the command does, and would restart after a failure
    job = f"sbatch --wait --export=ALL,MAX_RESTARTS=0 --time=02:00:00 --nodes={nodes} launch/slurm/train.sbatch"
    words += [job if nodes > 1 else "launch/node.sh"]
    words += [f"--cores={rung.num_devices}"] if rung.num_devices < topology.devices_per_node else []
    words += [*map(shlex.quote, config_words), f'--workdir={shlex.quote(workdir)}"-$(date +%s)"']
    return " ".join(words + [f"--config.{path}={shlex.quote(str(value))}" for path, value in changes.items()])


class Levels(NamedTuple):
    """Optimization levels of the compiler, with the config's level, another level, and the flag that sets the other.

    Some programs fail at -O1 and pass at -O2, and others the reverse.
    """

    own: int
    other: int
    override: str


def optimization_levels(config: Config, topology: Topology) -> Levels:
    """Returns the levels of a config on an instance type."""
    given = config.train.compiler_flags
    own = int(with_config(compiler_flags(topology), given, topology)["--optlevel"] or 1)
    other = 2 if own == 1 else 1
    return Levels(own, other, f"--config.train.compiler_flags={f'{given} -O{other}'.strip()}")


def script(name: str, commands: Sequence[tuple[str, str]], *, folder: str, levels: Levels) -> str:
    """Returns a Bash script that runs (sizes, command) of each rung in turn and stops at the first one that fails.

    A rung that neuronx-cc refuses runs once more at the other optimization level. The next rungs begin with the level
    that compiled. Output goes to FOLDER/rung-NN-ON.log, results to FOLDER/ladder.jsonl.
    """
    total, own = len(commands), levels.own
    lines = [
        "#!/usr/bin/env bash",
        f"# The ladder of {name}: {total} runs of two steps, from the smallest program to the whole. It stops at the",
        f"# first rung that fails and names it. FROM=N begins at rung N. Logs and ladder.jsonl: {folder}",
        "set -uo pipefail",
        f"folder={shlex.quote(folder)} from=${{FROM:-1}} own={own} level={own} other={levels.other}",
        f"override={shlex.quote(levels.override)}",
        '[[ $from =~ ^[1-9][0-9]{0,3}$ ]] || { echo "error: FROM=$from must be the number of a rung." >&2; exit 2; }',
        'mkdir -p "$folder"',
        "rung() { # number, sizes, command ...",
        "  local number=$1 sizes=$2 code=0 began log tried more",
        "  shift 2",
        "  ((number >= from)) || return 0",
        f'  echo "rung $number of {total}: $sizes"',
        '  for tried in "$level" "$other"; do',
        "    code=0 began=$SECONDS more=()",
        '    ((tried == own)) || more=("$override")',
        '    log=$(printf "%s/rung-%02d-O%d.log" "$folder" "$number" "$tried")',
        '    "$@" "${more[@]}" > "$log" 2>&1 || code=$?',
        '    printf \'{"rung": %d, "what": "%s", "optlevel": %d, "code": %d, "seconds": %d}\\n\' \\',
        '      "$number" "$sizes" "$tried" "$code" "$((SECONDS - began))" >> "$folder/ladder.jsonl"',
        "    if ((code == 0 && tried != level)); then",
        "      other=$level level=$tried",
        '      echo "rung $number: neuronx-cc compiles it at -O$level, and not at -O$other"',
        "    fi",
        "    ((code != 0)) || break",
        f'    grep -Eq {shlex.quote(_COMPILER_FAILED)} "$log" || break',
        "  done",
        "  ((code == 0)) || {",
        '    tail -n 20 "$log" >&2',
        f'    ! grep -Eq {shlex.quote(COMPILER_KILLED)} "$log" || echo "{compiler_killed("F137")}" >&2',
        f'    echo "error: rung $number of {total} ($sizes) ended with code $code, with its output in $log" >&2',
        "    exit 1",
        "  }",
        "}",
    ]
    lines += [f"rung {number} {shlex.quote(sizes)} {words}" for number, (sizes, words) in enumerate(commands, 1)]
    lines += [f'echo "all {total} rungs ran at -O$level"', '((level == own)) || echo "train with $override"']
    return "\n".join(lines) + "\n"


def _rows(config: Config, num_devices: int) -> int:
    """Returns the rows of a microbatch of one replica: the recipe's, or fewer if the devices are too many for those."""
    if config.train.num_microbatches == -1:
        return 1
    recipe = programs.num_devices(config)

    def batches(count: int) -> int:
        degrees = programs.layout_for_neuron(config, count).degrees
        return config.data.batch_size // (count // _replica_size(degrees))

    return math.gcd(max(1, batches(recipe) // config.train.num_microbatches), batches(num_devices))


def _replica_size(degrees: dict[str, int]) -> int:
    """Returns the number of devices with the same rows."""
    return degrees["pipe"] * degrees["context"] * degrees["tensor"]


def _powers(factor: int, last: int) -> list[int]:
    """Returns the powers of a factor below `last`, from the first, and `last`."""
    powers = [factor**exponent for exponent in range(1, 64) if factor**exponent < last]
    return [*powers, last]
