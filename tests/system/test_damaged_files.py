"""Files that are damaged in any way end commands with a line, never with a traceback or an abort.

    PYTHONPATH=.:tests/support python tests/system/test_damaged_files.py RUN --seed=1 --count=500

damages copies of the files that commands read back, at random, and runs a command that reads them, each time anew. RUN
is a run folder of `micro.write_config`, its config beside it. What was damaged last stands in --work.
"""

import argparse
import contextlib
import copy
import io
import json
import os
import pathlib
import random
import shutil
import subprocess
import sys
import traceback
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest

from hlat_jax import config as config_lib
from hlat_jax.cli import config_files, flags
from hlat_jax.data import __main__ as data_commands
from hlat_jax.data import positions, sources
from hlat_jax.data.build import build
from hlat_jax.data.streams import identity
from hlat_jax.hf import __main__ as hf_commands
from hlat_jax.host.process import StopSignals
from hlat_jax.resolve import resolve
from hlat_jax.run import __main__ as run_commands
from hlat_jax.run import open as run_open
from hlat_jax.run import results
from hlat_jax.run.compilation import read_record
from hlat_jax.run.copying import Copier
from hlat_jax.run.goodput import ALIVE_FILE, EVENTS_FILE
from hlat_jax.run.machine import fitting_program
from hlat_jax.store.checkpoint_checks import saved_run
from hlat_jax.store.metrics import ROWS_FILE
from hlat_jax.store.typed_json import read_lines
from hlat_jax.weights.trained import open_weights

# Files of which most is read, and so damaged most often.
_HOT = (ROWS_FILE, EVENTS_FILE, ALIVE_FILE, "metadata", "manifest.json", "integrity.json")
_HOT += ("_CHECKPOINT_METADATA", "config.json")
Probe = Callable[[pathlib.Path], object]


class _NotCompiled:
    """Stands in for the programs of a run, which take seconds: it ends once it is open."""

    def __init__(self, program, *, beside=None):
        self.program = program

    def compile(self, name):
        if name == "digest":  # of no arrays, by a device that adds otherwise: nothing is compared
            return lambda *_: jax.numpy.zeros((jax.device_count(), 1), "uint32")
        return lambda *_: self.program.abstract_state

    def write(self, workdir):
        read_record(workdir)


def prepare(run: pathlib.Path, work: pathlib.Path) -> None:
    """Writes a folder of each kind to `work`: a run, datasets, weights, a Hugging Face folder."""
    shutil.copytree(run, work / "run")
    run = work / "run"
    with open(run / ROWS_FILE, "a") as rows:
        row = {"step": 24, "eval_loss": 5.0, "perplexity": 148.4, "bits_per_byte": 2.0, "eval_tokens": 9}
        rows.write(json.dumps(row) + "\n")
    events = [line.row for line in read_lines(run / EVENTS_FILE, lambda row: dict)]
    [ended] = [event for event in events if event["event"] == "end"]  # as if it had been killed before
    (run / ALIVE_FILE).write_text(json.dumps(ended["life"]))
    (run / EVENTS_FILE).write_text("".join(json.dumps(event) + "\n" for event in events if event != ended))
    saved = saved_run(run / "checkpoints/20")
    hashes = {key: saved["metadata"][key] for key in ("manifest", "tokenizer_sha256")}
    found = identity(saved["metadata"]["config"]["data"], num_batches=20, **hashes)
    positions.write(run, 20, position=np.asarray(saved["position"]), data_identity=found)
    text = work / "text.jsonl"
    text.write_text("".join(json.dumps({"text": f"It is a truth {i} " * (i % 7 + 1)}) + "\n" for i in range(60)))
    for name, tokenizer in (("text", ""), ("tokens", "package:austen_2k.model")):
        options = build.BuildOptions(tokenizer=tokenizer, shard_bytes=1000)
        build.build([str(text)], out=work / name, options=options)
    assert hf_commands.main(["export", str(run), f"--out={work}/hf"]) == 0
    assert hf_commands.main(["import", f"{work}/hf", f"--out={work}/weights"]) == 0


def probes(config: pathlib.Path) -> dict[str, dict[str, Probe]]:
    """Returns kind of folder -> name -> what reads it."""

    def settings(num_steps: int) -> config_lib.Config:
        mutable = config_files.load(str(config))
        mutable.data.validation, mutable.train.num_steps, mutable.metrics.plot = "", num_steps, True
        mutable.metrics.tensorboard = False
        return resolve(mutable)

    def resume(folder: pathlib.Path, *, num_steps: int = 30, begin_again: bool = False) -> None:
        with contextlib.ExitStack() as stack:
            signals = stack.enter_context(StopSignals())
            program = fitting_program(settings(num_steps), jax.devices())
            options = {"copier": Copier(settings(num_steps), folder), "begin_again": begin_again}
            run_open.open_run(program, folder, signals=signals, stack=stack, **options)

    def begin(folder: pathlib.Path, *, begin_again: bool) -> None:
        shutil.rmtree(folder / "checkpoints", ignore_errors=True)
        resume(folder, begin_again=begin_again)

    def command(main: Callable, *words: str) -> Probe:
        def run(folder: pathlib.Path) -> object:
            sys.argv = ["hlat_jax", *(word.replace("FOLDER", str(folder)) for word in words)]
            try:
                flags.main(main)
            except SystemExit as exit_:
                return exit_.code

        return run

    def weights(folder: pathlib.Path, *, masters: bool = False) -> None:
        found = open_weights(folder, masters=masters)
        found.restore(None)
        found.open_tokenizer()

    def read(folder: pathlib.Path) -> None:
        documents = sources.open_corpus(str(folder), text_field="text", key="k")
        for index in range(len(documents)):
            documents[index]

    peek = ("peek", f"--config={config}", "--config.data.validation=", "--step=21", "--workdir=FOLDER")
    of_run = {
        "resume": resume,
        "finish": lambda folder: resume(folder, num_steps=24),
        "begin": lambda folder: begin(folder, begin_again=False),
        "begin again": lambda folder: begin(folder, begin_again=True),
        "plot": lambda folder: results.show(settings(24), folder, 24),
        "goodput": command(run_commands.main, "goodput", "FOLDER"),
        "peek": command(data_commands.main, *peek),
        "weights": weights,
        "masters": lambda folder: weights(folder, masters=True),
        "export": command(hf_commands.main, "export", "FOLDER", "--out=FOLDER/exported"),
    }
    imported = command(hf_commands.main, "import", "FOLDER", "--out=FOLDER/imported")
    return {
        "run": of_run,
        "text": {"read": read},
        "tokens": {"read": read},
        "weights": {"weights": weights},
        "hf": {"weights": weights, "import": imported},
    }


def fault_of(probe: Probe, folder: pathlib.Path) -> str:
    """Returns what is wrong with the end of a command; "" where it succeeded or ended with a line."""
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(printed):
            code = probe(folder)
    except (OSError, ValueError) as error:
        ours = "/hlat_jax/" in traceback.extract_tb(error.__traceback__)[-1].filename
        is_line = ours and not isinstance(error, UnicodeError) and str(error).strip()
        return "" if is_line else traceback.format_exc()
    except BaseException:
        return traceback.format_exc()
    lines = printed.getvalue()
    is_clean = "Traceback" not in lines and (code not in (1, 2) or "error: " in lines)
    return "" if is_clean else f"code {code}: {lines}"


_VALUES = (
    *("abc", "", "\ud800", "1", None, True, [], [1, 2], ["a"], [[1], [1, 2]], {}, {"a": None}),
    *(-1, 0, 1, 1.5, 10**30, 10**400, 1e308, -1e308, float("nan"), float("inf"), 2**63 - 1, "x" * 300),
)


def damage(path: pathlib.Path, rng: random.Random) -> str:
    """Changes one file in one way, as a disk, an editor or another program may; returns what was done."""
    raw = path.read_bytes()
    if path.suffix == ".jsonl" and raw and rng.random() < 0.85:
        lines = raw.splitlines(keepends=True)
        number = rng.randrange(len(lines))
        how = rng.choice((*["field"] * 8, "delete", "repeat", "move", "bytes"))
        if how == "field":
            how, row = changed_value(json.loads(lines[number]), rng)
            lines[number] = json.dumps(row).encode() + b"\n"
        elif how == "bytes":
            how, lines[number] = changed_bytes(lines[number], rng)
        else:
            line = lines[number] if how == "repeat" else lines.pop(number)
            lines += [] if how == "delete" else [line]
        raw = b"".join(lines)
    elif path.suffix != ".jsonl" and raw[:1] in b"{[" and rng.random() < 0.75:
        how, tree = changed_value(json.loads(raw), rng)
        raw = json.dumps(tree).encode()
        if rng.random() < 0.05:
            raw = raw.replace(b"{", b'{"a": 1, "a": 2, ', 1)
    else:
        how, raw = changed_bytes(raw, rng)
    path.write_bytes(raw)
    return f"{path.name}: {how}".encode("ascii", "backslashreplace").decode()


def changed_value(tree: Any, rng: random.Random) -> tuple[str, Any]:
    """Returns a JSON value with one field deleted, renamed or replaced, or one entry repeated."""
    tree, places = copy.deepcopy(tree), []

    def visit(node):
        pairs = node.items() if isinstance(node, dict) else list(enumerate(node))[:4] if isinstance(node, list) else ()
        for key, value in pairs:
            places.append((node, key))
            visit(value)

    visit(tree)
    value = rng.choice(_VALUES)
    if not places or rng.random() < 0.03:
        return f"all is {value!r:.40}", value
    holder, key = rng.choice(places)
    how = rng.choice(("delete", "rename", "repeat", *["value"] * 7))
    if how == "value":
        holder[key] = value
        return f"{key!r:.60} is {value!s:.40}", tree
    if how == "delete":
        del holder[key]
    elif how == "rename" and isinstance(holder, dict):
        holder[rng.choice((f"{key}x", "\ud800", "", "a/b", "../a"))] = holder.pop(key)
    else:
        holder[key] = [holder[key]]
    return f"{how} {key!r:.60}", tree


def changed_bytes(raw: bytes, rng: random.Random) -> tuple[str, bytes]:
    how = rng.choice(("empty", "cut", "flip", "flip", "flip", "many", "zeros", "insert"))
    if how == "empty" or not raw:
        return "empty", b""
    place, changed = rng.randrange(len(raw)), bytearray(raw)
    if how == "cut":
        del changed[place:]
    elif how == "zeros":
        changed[place : place + 64] = bytes(len(changed[place : place + 64]))
    elif how == "insert":
        changed[place:place] = rng.choice((b"\\ud800", b"\xff", b"\0", b"1", b'"', b"\n", b"{", "é".encode()))
    else:
        for _ in range(1 if how == "flip" else 20):
            changed[rng.randrange(len(raw))] ^= 1 << rng.randrange(8)
    return f"{how} at {place}", bytes(changed)


def trial(work: pathlib.Path, kind: str, probes: dict[str, Probe], rng: random.Random) -> str:
    """Damages a copy of a folder and runs a command on it; returns what was done and what is wrong, or ""."""
    folder = work / "damaged"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(work / kind, folder)
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.stat().st_size)
    files = [path for path in files if "tensorboard" not in path.parts]
    weights = [12 if path.name in _HOT and "20" not in path.parts else 1 for path in files]
    chosen = dict.fromkeys(rng.choices(files, weights, k=rng.choice((1, 1, 1, 2))))
    done = [damage(path, rng) for path in chosen]
    name = rng.choice(list(probes))
    told = f"{kind}, {name}: {done}"
    (work / "last.txt").write_text(told)
    fault = fault_of(probes[name], folder)
    return f"{told}\n{fault}" if fault else ""


def main() -> int:
    """Runs trials; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", type=pathlib.Path)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=500)
    parser.add_argument("--work", type=pathlib.Path, required=True)
    words = parser.parse_args()
    one = jax.devices()[:1]
    jax.devices = lambda *_: one
    run_open.Compilations = _NotCompiled
    run_open.compiled_step = run_open.compiled_sampler = lambda _: None
    prepare(words.run, words.work)
    rng, found, faults = random.Random(words.seed), probes(words.run.parent / "micro.py"), 0
    for kind in rng.choices(list(found), [12, 1, 2, 1, 2], k=words.count):
        fault = trial(words.work, kind, found[kind], rng)
        faults += bool(fault)
        print(fault.encode("ascii", "backslashreplace").decode(), end="\n" if fault else "")
    print(f"{words.count} trials, {faults} faults")
    return int(faults > 0)


@pytest.mark.slow
def test_500_damaged_files_end_commands_with_a_line_at_most(trained_run, tmp_path):
    # in a process of its own, which an abort would end
    words = [sys.executable, __file__, str(trained_run), "--seed=1", "--count=500", f"--work={tmp_path}"]
    root = pathlib.Path(__file__).resolve().parents[2]
    env = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": f"{root}:{root / 'tests/support'}"}
    done = subprocess.run(words, capture_output=True, text=True, check=False, env=env)
    last = (tmp_path / "last.txt").read_text() if (tmp_path / "last.txt").exists() else ""
    assert done.returncode == 0, f"code {done.returncode} at {last}\n{done.stdout}\n{done.stderr}"[-6000:]
    assert "500 trials, 0 faults" in done.stdout


if __name__ == "__main__":
    sys.exit(main())
