"""Damages the files that commands read back, at random, and runs a command that reads them, each time anew.

PYTHONPATH=.:tests/support python tests/system/damaged_files.py RUN --seed=1 --count=500

RUN is a run folder of `micro.write_config`, its config beside it. Each command must succeed or end with one line: no
traceback, no abort. What was damaged last stands in --work, for the case that the process dies.
"""

import argparse
import collections
import contextlib
import io
import json
import pathlib
import random
import shutil
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator

import jax
import numpy as np
from damage import damage

from hlat_jax import config as config_lib
from hlat_jax.cli import config_files, flags
from hlat_jax.data import __main__ as data_commands
from hlat_jax.data import positions, sources
from hlat_jax.data.build import build
from hlat_jax.data.streams import identity
from hlat_jax.hf import __main__ as hf_commands
from hlat_jax.host.process import StopSignals
from hlat_jax.ops import table
from hlat_jax.resolve import resolve
from hlat_jax.run import __main__ as run_commands
from hlat_jax.run import open as run_open
from hlat_jax.run import summary
from hlat_jax.run.compilation import read_record
from hlat_jax.run.goodput import ALIVE_FILE, EVENTS_FILE
from hlat_jax.store.checkpoint_checks import saved_run
from hlat_jax.store.metrics import ROWS_FILE
from hlat_jax.store.typed_json import read_lines
from hlat_jax.weights.trained import open_weights

# Files of which most is read, and so damaged most often.
_HOT = (ROWS_FILE, EVENTS_FILE, ALIVE_FILE, "metadata", "manifest.json", "integrity.json")
_HOT += ("_CHECKPOINT_METADATA", "table.json", "config.json")
_MEASURED = {"op": "model.rms_norm", "call": {"x_shape": [2, 3, 4]}, "times": {"reference": 1.0, "recomputed": 2.0}}
Probe = Callable[[pathlib.Path], object]


class _NotCompiled:
    """Stands in for the programs of a run, which take seconds: it ends once it is open."""

    def __init__(self, program):
        self.program = program

    def compiled(self, name):
        return lambda *_: self.program.abstract_state

    def write(self, workdir):
        read_record(workdir)


def prepare(run: pathlib.Path, work: pathlib.Path) -> None:
    """Writes a folder of each kind to `work`: a run, datasets, weights, a Hugging Face folder, a table of times."""
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
    (work / "table").mkdir()
    entry = table.Measurement(**_MEASURED, winner="reference", passed_over={}, rows_measured=2)
    measured = {"platform": "cpu", "device_kind": "x", "jax": jax.__version__, "entries": (entry, entry)}
    table.write(table.Table(path=str(work / "table/table.json"), **measured))


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
            run_open.open_run(settings(num_steps), folder, signals=signals, stack=stack, begin_again=begin_again)

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
        "plot": lambda folder: summary.finish(settings(24), folder, 24),
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
        "table": {"table": lambda folder: table.read(str(folder / "table.json"))},
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


def campaign(work: pathlib.Path, config: pathlib.Path, *, seed: int, count: int) -> Iterator[tuple[str, str]]:
    """Yields (what was damaged, what is wrong) of each trial."""
    rng, found = random.Random(seed), probes(config)
    for number in range(count):
        kind = rng.choices(list(found), [12, 1, 2, 1, 2, 1])[0]
        folder = work / "damaged"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(work / kind, folder)
        files = sorted(path for path in folder.rglob("*") if path.is_file() and path.stat().st_size)
        files = [path for path in files if "tensorboard" not in path.parts]
        weights = [12 if path.name in _HOT and "20" not in path.parts else 1 for path in files]
        chosen = dict.fromkeys(rng.choices(files, weights, k=rng.choice((1, 1, 1, 2))))
        done = [damage(folder, path, rng) for path in chosen]
        name = rng.choice(list(found[kind]))
        said = f"{number} {kind}, {name}: " + "; ".join(map(str, done))
        (work / "last.txt").write_text(said, errors="backslashreplace")
        yield said, fault_of(found[kind][name], folder)


def main() -> int:
    """Runs a campaign; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", type=pathlib.Path)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=500)
    parser.add_argument("--work", type=pathlib.Path, default=None)
    words = parser.parse_args()
    work = words.work or pathlib.Path(tempfile.mkdtemp())
    one = jax.devices()[:1]
    jax.devices = lambda *_: one
    run_open.Compilations = _NotCompiled
    run_open.compiled_step = run_open.compiled_sampler = lambda _: None
    prepare(words.run, work)
    faults: collections.Counter[str] = collections.Counter()
    for said, fault in campaign(work, words.run.parent / "micro.py", seed=words.seed, count=words.count):
        if fault:
            last = fault.strip().splitlines()[-1]
            faults[last] += 1
            if faults[last] == 1:
                print(f"{said}\n{fault}".encode("ascii", "backslashreplace").decode(), flush=True)
    print(f"{words.count} trials, {sum(faults.values())} faults")
    return int(bool(faults))


if __name__ == "__main__":
    sys.exit(main())
