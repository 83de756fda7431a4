"""The kinds of fault of `system/faults.py`, what each may lead to, and the checks of a run that has met some.

The table was tried in small campaigns and then fixed, before the one of 300 faults. Each outcome is only part of a
verdict: in every case the run must afterwards reach its last step with the bits of a run without faults.
"""

import dataclasses
import json
import pathlib
import random
import re
import shutil
from collections.abc import Callable, Collection, Mapping, Sequence

import micro

from hlat_jax.store.metrics import read_rows

# Outcomes of a fault
GOES_ON = "goes on"
ENDS = "ends"  # by itself, with one line that says why, and a code that launch/restart.sh restarts
STUCK = "ends as stuck"  # so, with code 124
MISNAMED = "ends as stuck, naming another process"  # one that waited for it in a collective
STOPS = "stops"  # after saving, as a signal asked it to
DIES = "dies"  # of the signal
REFUSES = "refuses"  # ends with one line and code 2: not restarted before somebody has removed the cause
RESUMES = "resumes"  # from the newest checkpoint, after files were damaged
GOES_BACK = "goes back"  # to an older checkpoint, and says so
ABORTS = "ends, JAX with a C++ stack"  # of the process that is left, when the coordinator dies before the watch sees it
NOTES = "notes a gap"  # resumes, and says which rows are lost
# Outcomes that no kind allows
CRASHES = "crashes"  # a Python or C++ stack
SILENT = "ends silently"
HANGS = "hangs"
UNSAID = "loses rows and does not say so"

_LOST = r"sent no heartbeat|does not answer|gave up waiting|did not reach"
_UNREADABLE = "cannot be read|truncated"


@dataclasses.dataclass(frozen=True)
class Kind:
    """A kind of fault.

    Attributes:
      how: "signal", "inside" (the process does it to itself), "around" (something it uses, while it runs), "damage"
        (files, between two starts), "start" (before a start).
      allowed: outcome -> what its line must match.
      at_start: outcomes that are allowed only where it came while the job started.
      mild: whether the job may go on.
      lasting: it belongs to the plan of the trial: it happens again where its step is trained again, and the reference
        has it too.
      least: of processes.
    """

    how: str
    allowed: Mapping[str, str]
    at_start: Mapping[str, str] = dataclasses.field(default_factory=dict)
    mild: bool = False
    lasting: bool = False
    least: int = 1


_SIGNAL = {"at_start": {DIES: "", ENDS: f"{_LOST}|interrupted", ABORTS: ""}}
_DAMAGED = {GOES_BACK: "damaged", REFUSES: "every checkpoint is damaged", RESUMES: ""}
_STUCK = {STUCK: r"stuck: process \d of \d on "}
KINDS = {
    "SIGKILL": Kind("signal", {DIES: "", ENDS: _LOST, ABORTS: ""}),
    "lost coordinator": Kind("signal", {DIES: "", ENDS: _LOST, ABORTS: ""}, least=2),
    "SIGSTOP, soon SIGCONT": Kind("signal", {GOES_ON: ""}, mild=True),
    "SIGSTOP for long": Kind("signal", {GOES_ON: "", ENDS: f"{_LOST}|stuck: ", STUCK: "stuck: "}, mild=True),
    "SIGTERM": Kind("signal", {STOPS: "stopped by SIGTERM"}, **_SIGNAL),
    "SIGHUP": Kind("signal", {STOPS: "stopped by SIGHUP"}, **_SIGNAL),
    "SIGUSR1": Kind("signal", {STOPS: "stopped by SIGUSR1"}, **_SIGNAL),
    "SIGINT": Kind("signal", {STOPS: "stopped by SIGINT|interrupted"}, **_SIGNAL),
    "stuck in loader": Kind("inside", _STUCK),
    "stuck in step": Kind("inside", _STUCK | {MISNAMED: "while training"}),
    "stuck in save": Kind("inside", _STUCK),
    "stuck in the thread that saves": Kind("inside", _STUCK),
    "stuck in evaluation": Kind("inside", _STUCK | {MISNAMED: "while evaluating"}),
    "stuck in compile": Kind("inside", _STUCK),
    "stuck in restore": Kind("inside", _STUCK),
    "long compile": Kind("inside", {GOES_ON: ""}, mild=True, least=2),  # in one process; the others wait
    "disk full": Kind("around", dict.fromkeys((ENDS, REFUSES), "No space left|File too large|not enough space")),
    "torn checkpoint": Kind("damage", _DAMAGED),
    "flipped checkpoint": Kind("damage", _DAMAGED),
    "renamed checkpoint": Kind("damage", {GOES_BACK: "damaged", REFUSES: "every checkpoint is damaged"}),
    "checkpoints away": Kind("damage", {REFUSES: "begin_again"}),
    "torn rows": Kind("damage", {RESUMES: ""}),
    "flipped rows": Kind("damage", {RESUMES: "", NOTES: "missing"}),
    "torn file of the run": Kind("damage", {RESUMES: "", REFUSES: ""}),
    "flipped file of the run": Kind("damage", {RESUMES: "", REFUSES: ""}),
    "run folder renamed": Kind(
        "around",
        {REFUSES: "removed or replaced", ENDS: "removed or replaced|written"},
    ),
    "torn data": Kind("around", {REFUSES: "changed|truncated"}),
    "flipped data": Kind("around", {REFUSES: "changed"}),
    "renamed data": Kind("around", {ENDS: _UNREADABLE}),
    "data away for a moment": Kind("around", {GOES_ON: ""}, mild=True),
    "data error for a moment": Kind("inside", {GOES_ON: ""}, mild=True),
    "data error that stays": Kind("inside", {ENDS: _UNREADABLE}),
    "slow data": Kind("inside", {GOES_ON: ""}, mild=True),
    "NaN for a step": Kind("inside", {GOES_ON: ""}, mild=True, lasting=True),
    "NaN in the weights": Kind("inside", {ENDS: "not finite"}),
    "spike": Kind("inside", {GOES_ON: ""}, mild=True, lasting=True),
    "clock jump": Kind("inside", {GOES_ON: "", ENDS: "[Tt]imed out"}, mild=True),  # while saving: Orbax uses the clock
    "port taken": Kind("start", dict.fromkeys((ENDS, REFUSES), "port|in use"), least=2),
}


def is_allowed(kind: str, outcome: str, line: str, *, at_start: bool = False) -> bool:
    """Returns whether the table allows a kind of fault to lead to this outcome, with this line."""
    found = KINDS[kind]
    patterns = [table[outcome] for table in (found.allowed, found.at_start if at_start else {}) if outcome in table]
    return any(re.search(pattern, line) for pattern in patterns)


def history_problems(rows: Sequence[dict], wanted: Sequence[dict], *, lost: Collection[int] = ()) -> list[str]:
    """Returns what is wrong with the rows of a run that has ended; [] for nothing.

    Every step stands there once, in order, with the batch and the figures of the reference: each batch was trained
    exactly once, in the same order.

    Args:
      rows: of metrics.jsonl.
      wanted: those of a run of the same plan without faults.
      lost: steps whose rows may be missing, as their bytes were damaged.
    """
    steps = [row["step"] for row in rows if "loss" in row]
    problems = []
    if twice := sorted({step for step in steps if steps.count(step) > 1}):
        problems.append(f"trained more than once: steps {twice}")
    if steps != sorted(steps):
        problems.append("steps are out of order")
    expected = {(row["step"], "loss" in row): micro.exact(row) for row in wanted}
    found = {(row["step"], "loss" in row): micro.exact(row) for row in rows}
    if missing := sorted(step for step, _ in expected.keys() - found.keys() if step not in lost):
        problems.append(f"rows are missing: steps {missing}")
    if extra := sorted(step for step, _ in found.keys() - expected.keys()):
        problems.append(f"rows that the reference has not: steps {extra}")
    for key in sorted(expected.keys() & found.keys()):
        names = [name for name, value in expected[key].items() if found[key].get(name) != value]
        if names:
            problems.append(f"step {key[0]} differs in {', '.join(names)}")
            break
    return problems


def differences(config: pathlib.Path, found: pathlib.Path, wanted: pathlib.Path) -> list[str]:
    """Returns in which parts the final checkpoints of two run folders differ; [] when in no bit."""
    (step, arrays, position, metadata), (*other,) = (micro.final_checkpoint(config, each) for each in (found, wanted))
    pairs = {"its step": (step, other[0]), "data position": (position, other[2])}
    pairs |= {"tokens": (metadata["tokens"], other[3]["tokens"])}
    pairs |= {name: (arrays.get(name), other[1].get(name)) for name in sorted(arrays.keys() | other[1].keys())}
    return [f"final checkpoint differs in {name}" for name, (mine, theirs) in pairs.items() if mine != theirs]


# Damage to files: each returns (what was done, how to undo it), or None where there is nothing to damage

Undo = Callable[[], None]
Damage = tuple[str, Undo] | None


def tear(path: pathlib.Path, rng: random.Random) -> Damage:
    """Cuts a file at a random place."""
    content = path.read_bytes()
    if not content:
        return None
    size = rng.randrange(len(content))
    path.write_bytes(content[:size])
    return f"{path.name} cut from {len(content)} to {size} bytes", lambda: _put_back(path, content)


def flip(path: pathlib.Path, rng: random.Random, *, bit: int | None = None) -> Damage:
    """Flips one bit of a file."""
    content = path.read_bytes()
    if not content:
        return None
    place, bit = rng.randrange(len(content)), rng.randrange(8) if bit is None else bit
    changed = bytearray(content)
    changed[place] ^= 1 << bit
    path.write_bytes(changed)
    return f"bit {bit} of byte {place} of {path.name}", lambda: _put_back(path, content)


def rename(path: pathlib.Path, to: pathlib.Path) -> Damage:
    """Renames a file or folder."""
    path.rename(to)

    def undo() -> None:
        if path.is_dir():
            shutil.rmtree(path)
        to.replace(path)

    return f"{path.name} renamed to {to.name}", undo


def _put_back(path: pathlib.Path, content: bytes) -> None:
    if path.parent.is_dir():  # else it was in a checkpoint that was removed
        path.write_bytes(content)


def files(folder: pathlib.Path) -> list[pathlib.Path]:
    """Returns the files below a folder that are not empty, in order."""
    return sorted(path for path in folder.rglob("*") if path.is_file() and path.stat().st_size)


def damage(kind: str, workdir: pathlib.Path, rng: random.Random) -> Damage:
    """Does damage of a kind to the files of a run that is not running."""
    steps = micro.saved_steps(workdir) if (workdir / "checkpoints").is_dir() else []
    rows = workdir / "metrics.jsonl"
    if not steps or not rows.exists():
        return None
    newest = workdir / "checkpoints" / str(steps[-1])
    if kind == "renamed checkpoint":
        return rename(newest, newest.with_name(str(steps[-1] + rng.randrange(1, 4))))
    if kind == "checkpoints away":
        return rename(newest.parent, workdir.with_name(f"{workdir.name}-checkpoints"))
    if kind == "torn rows":
        return _tear_rows(rows, steps[-1], rng)
    if kind == "flipped rows":
        return flip(rows, rng, bit=7)  # no longer text; a digit that became another would not be noticed
    change = tear if kind.startswith("torn") else flip
    if kind.endswith("checkpoint"):
        return change(rng.choice(files(newest)), rng)
    kept = [path for path in files(workdir) if "checkpoints" not in path.parts and path != rows]
    return change(rng.choice(kept), rng)


def _tear_rows(rows: pathlib.Path, step: int, rng: random.Random) -> Damage:
    """Cuts the rows within what a crash of the machine can lose: all up to the checkpoint are on the disk by fsync."""
    content = rows.read_bytes()
    safe = 0
    for line in content.splitlines(keepends=True):
        if json.loads(line)["step"] > step:
            break
        safe += len(line)
    if safe == len(content):
        return None
    size = rng.randrange(safe, len(content))
    rows.write_bytes(content[:size])
    return f"{rows.name} cut from {len(content)} to {size} bytes", lambda: None


def whole_rows(workdir: pathlib.Path) -> list[dict]:
    """Returns the rows of metrics.jsonl that can be read."""
    path = workdir / "metrics.jsonl"
    return read_rows(path) if path.exists() else []
