"""The kinds of fault of `system/faults.py`, what each may lead to, and the damage that some do to files.

The table was tried in small campaigns and then fixed, before the one of 300 faults. Each outcome is only part of a
verdict: in every case the run must afterwards reach its last step with the bits of a run without faults.
"""

import dataclasses
import json
import pathlib
import random
import re
import shutil
from collections.abc import Callable, Mapping

import micro

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
_NOT_COPIED = "could not be copied|cannot be reached"
_UNREADABLE = "cannot be read|truncated"


@dataclasses.dataclass(frozen=True)
class Kind:
    """A kind of fault.

    Attributes:
      how: "signal", "inside" (the process does it to itself), "around" (something it uses, while it runs), "store"
        (the server of its bucket does it), "damage" (files, between two starts).
      allowed: outcome -> what its line must match.
      at_start: outcomes that are allowed only where it came while the job started.
      mild: whether the job may go on.
      least: smallest number of processes.
    """

    how: str
    allowed: Mapping[str, str]
    at_start: Mapping[str, str] = dataclasses.field(default_factory=dict)
    mild: bool = False
    least: int = 1


_SIGNAL = {"at_start": {DIES: "", ENDS: f"{_LOST}|interrupted", ABORTS: ""}}
_DAMAGED = {GOES_BACK: "damaged", REFUSES: "every checkpoint is damaged", RESUMES: ""}
_STUCK = {STUCK: r"stuck: process \d of \d on "}
KINDS = {
    "SIGKILL": Kind("signal", {DIES: "", ENDS: _LOST, ABORTS: ""}),
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
    "other digest in a checkpoint": Kind("damage", {GOES_BACK: "digest", REFUSES: "every checkpoint is damaged"}),
    "checkpoints away": Kind("damage", {REFUSES: "begin_again", RESUMES: "", GOES_BACK: "^fetched"}),
    "torn rows": Kind("damage", {RESUMES: ""}),
    "flipped rows": Kind("damage", {RESUMES: "", NOTES: "missing"}),
    "torn file of the run": Kind("damage", {RESUMES: "", REFUSES: ""}),
    "flipped file of the run": Kind("damage", {RESUMES: "", REFUSES: ""}),
    "run folder renamed": Kind("around", {REFUSES: "removed or replaced", ENDS: "removed or replaced|written"}),
    "torn data": Kind("around", {REFUSES: "changed|truncated"}),
    "flipped data": Kind("around", {REFUSES: "changed"}),
    "renamed data": Kind("around", {ENDS: _UNREADABLE}),
    "data away for a moment": Kind("around", {GOES_ON: ""}, mild=True),
    "data error for a moment": Kind("inside", {GOES_ON: ""}, mild=True),
    "data error that stays": Kind("inside", {ENDS: _UNREADABLE}),
    "slow data": Kind("inside", {GOES_ON: ""}, mild=True),
    "NaN in the weights": Kind("inside", {ENDS: "not finite"}),
    "flipped bit of a replica": Kind("inside", {ENDS: "silent corruption, persistent: .*process"}, least=2),
    # of the store that `checkpoint.copy_to` names
    "store slow and cut": Kind("store", {GOES_ON: ""}, mild=True),
    "store down": Kind("store", {GOES_ON: "", ENDS: _NOT_COPIED}, mild=True),
    "store full": Kind("store", {GOES_ON: "", ENDS: _NOT_COPIED}, mild=True),
    "killed in an upload": Kind("store", {DIES: "", ENDS: _LOST, ABORTS: ""}),
    "run folder lost": Kind("damage", {RESUMES: "", GOES_BACK: "^fetched"}),
    "run folder lost, copy damaged": Kind("damage", {GOES_BACK: "is damaged"}),
    "run folder lost, killed in the fetch": Kind("damage", {DIES: "", ENDS: _LOST, ABORTS: ""}),
    "run folder lost, store slow and cut": Kind("damage", {RESUMES: "", GOES_BACK: "^fetched"}),
    "run folder lost, store down": Kind("damage", {ENDS: "cannot be reached"}),
    "run folder lost, wrong key": Kind("damage", {REFUSES: "cannot be written.*access key"}),
    "wrong key": Kind("damage", {RESUMES: "copy FAILED"}),
    "clock jump": Kind("inside", {GOES_ON: "", ENDS: "[Tt]imed out"}, mild=True),  # while saving: Orbax uses the clock
}
NEEDS_COPY = tuple(kind for kind in KINDS if kind.startswith("run folder lost") or kind == "wrong key")
STORE = (*(kind for kind, rule in KINDS.items() if rule.how == "store"), *NEEDS_COPY)


def is_allowed(kind: str, outcome: str, line: str, *, at_start: bool = False) -> bool:
    """Returns whether the table allows a kind of fault to lead to this outcome, with this line."""
    rule = KINDS[kind]
    patterns = [table[outcome] for table in (rule.allowed, rule.at_start if at_start else {}) if outcome in table]
    return any(re.search(pattern, line) for pattern in patterns)


# Damage to files: each returns (what was done, how to undo it), or None where there is nothing to damage

Damage = tuple[str, Callable[[], None]] | None


def tear(path: pathlib.Path, rng: random.Random, *, from_byte: int = 0) -> Damage:
    """Cuts a file at a random place."""
    content = path.read_bytes()
    if len(content) == from_byte:
        return None
    size = rng.randrange(from_byte, len(content))
    path.write_bytes(content[:size])
    return f"{path.name} cut from {len(content)} to {size} bytes", lambda: _put_back(path, content)


def flip(path: pathlib.Path, rng: random.Random, *, bit: int | None = None) -> Damage:
    """Flips one bit of a file."""
    content = path.read_bytes()
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


def damage(kind: str, workdir: pathlib.Path, rng: random.Random) -> Damage:
    """Does damage of a kind to the files of a run that is not running."""
    steps, rows = micro.saved_steps(workdir), workdir / "metrics.jsonl"
    if not steps or not rows.exists():
        return None
    newest = workdir / "checkpoints" / str(steps[-1])
    if kind == "renamed checkpoint":
        return rename(newest, newest.with_name(str(steps[-1] + rng.randrange(1, 4))))
    if kind == "other digest in a checkpoint":
        before = [(path, path.read_bytes()) for path in (newest / "run/metadata", newest / "integrity.json")]
        name = rng.choice(sorted(json.loads(before[0][1])["digest"]))
        micro.reseal(newest, lambda saved: saved["digest"].update({name: saved["digest"][name] ^ 1}))
        return f"the digest of {name} in {newest.name}", lambda: [_put_back(*each) for each in before] and None
    if kind == "checkpoints away":
        return rename(newest.parent, workdir.with_name(f"{workdir.name}-checkpoints"))
    if kind == "torn rows":  # where a crash of the machine can: up to the checkpoint they are on the disk by fsync
        safe = [line for line in rows.read_bytes().splitlines(keepends=True) if json.loads(line)["step"] <= steps[-1]]
        return tear(rows, rng, from_byte=sum(map(len, safe)))
    if kind == "flipped rows":
        return flip(rows, rng, bit=7)  # no longer text; a digit that became another would not be noticed
    of_run = kind.endswith("file of the run")
    files = [path for path in (workdir if of_run else newest).rglob("*") if path.is_file() and path.stat().st_size]
    if of_run:
        files = [path for path in files if "checkpoints" not in path.parts and path != rows]
    return (tear if kind.startswith("torn") else flip)(rng.choice(sorted(files)), rng)
