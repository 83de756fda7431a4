"""Sends Ctrl-C to commands at random moments of each of their phases, and checks how they end.

    PYTHONPATH=. python tests/support/interrupt_trials.py --trials 20 --seed 0

prints one line per phase and ends with exit code 1 when a command did not acknowledge the signal, ended with another
exit code than 130, or printed a traceback. `tests/system/test_interrupt.py` uses the same functions for the short form.
"""

import argparse
import dataclasses
import json
import os
import pathlib
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time

import kill_trials
import micro

from hlat_jax.data.formats.paths import asset_path

LONGEST_ACKNOWLEDGEMENT_S = 3.0  # a second where the machine does nothing else
_MOMENT_S = 0.1


@dataclasses.dataclass(frozen=True)
class Interrupt:
    """Result of one interrupt.

    Attributes:
      code: exit code of the command.
      acknowledged_s: from the signal to the line that acknowledges it; None: there was none.
      ended_s: from the signal to the end of the process.
      lines: what it printed on stderr from the signal on.
      out: what it printed on stdout.
      too_late: the command had done its work before the signal.
    """

    code: int
    acknowledged_s: float | None
    ended_s: float
    lines: list[str]
    out: str
    too_late: bool

    def problem(self) -> str:
        """Returns what is wrong with the way the command ended; "" for nothing."""
        said = [line for line in self.lines if "interrupted" in line]
        if self.too_late:
            return ""
        if self.code != 130:
            return f"exit code {self.code}: {self.lines}"
        if self.lines != said[:1]:
            return f"stderr is {self.lines}"
        if self.acknowledged_s > LONGEST_ACKNOWLEDGEMENT_S:
            return f"acknowledged after {self.acknowledged_s:.1f} s"
        return ""


def _started(process, workdir, out):
    return len(os.listdir(f"/proc/{process.pid}/task")) > 1  # from where Ctrl-C is handled


def _opening(process, workdir, out):
    return (workdir / ".lock").exists()


def _described(process, workdir, out):
    return "\nimplementations " in out.read_text()


def _resuming(process, workdir, out):
    return "\nresuming from " in out.read_text()


def _stepping(process, workdir, out):
    return kill_trials.stepping(workdir) and _compiled(process, workdir, out)


def _compiled(process, workdir, out):
    return "\ncompiled " in out.read_text()


def _evaluating(process, workdir, out):
    return _compiled(process, workdir, out) and kill_trials.interrupted_phase(workdir) == "validation"


def _saving(process, workdir, out):
    return _compiled(process, workdir, out) and kill_trials.interrupted_phase(workdir) == "asynchronous save"


def _never(process, workdir, out):
    return False


# name of a phase of training -> (event at its beginning, event after it, longest delay in seconds)
PHASES = {
    "importing": (_started, _opening, 60.0),
    "opening": (_opening, _described, 60.0),
    "compiling": (_described, _stepping, 60.0),
    "training": (_stepping, _never, 60.0),
    "evaluating": (_evaluating, _never, 0.02),
    "saving": (_saving, _never, 0.05),
}
RESTORING = (_described, _resuming, 60.0)


def interrupt(words, env, workdir, *, begins, delay_s, second_s=None):
    """Starts a command, waits for an event and a while, sends SIGINT (and another after `second_s`); an Interrupt."""
    out, err = workdir.with_suffix(".out"), workdir.with_suffix(".err")
    with open(out, "w") as out_file, open(err, "w") as err_file:
        words = ["env", "--default-signal=INT", *words]
        process = subprocess.Popen(words, env=env, stdout=out_file, stderr=err_file)
        try:
            while process.poll() is None and not begins(process, workdir, out):
                time.sleep(0.0005)
            until = time.monotonic() + delay_s
            while process.poll() is None and time.monotonic() < until:
                time.sleep(0.0005)
            too_late = process.poll() is not None
            before = len(err.read_text())
            sent_s, acknowledged_s = time.monotonic(), None
            process.send_signal(signal.SIGINT)
            while process.poll() is None and time.monotonic() < sent_s + 120:
                if acknowledged_s is None and "interrupted" in err.read_text()[before:]:
                    acknowledged_s = time.monotonic() - sent_s
                if second_s is not None and time.monotonic() > sent_s + second_s:
                    process.send_signal(signal.SIGINT)
                    second_s = None
                time.sleep(0.002)
            ended_s = time.monotonic() - sent_s
        finally:
            process.kill()
            process.wait()
    lines = err.read_text()[before:].splitlines()
    # After the command has returned, Python's teardown runs no handler for a moment, then gives SIGINT its default
    # action back; a command that swallows the signal goes on for longer than a moment.
    is_over = process.returncode == -signal.SIGINT or (process.returncode == 0 and ended_s < _MOMENT_S)
    too_late |= is_over and not lines
    if acknowledged_s is None and any("interrupted" in line for line in lines):
        acknowledged_s = ended_s
    return Interrupt(process.returncode, acknowledged_s, ended_s, lines, out.read_text(), too_late)


def timed(words, env, workdir, events):
    """Runs a command; returns the seconds from its start to the first sight of each event, and to its end."""
    out, found, began = workdir.with_suffix(".out"), [None] * len(events), time.monotonic()
    with open(out, "w") as file:
        process = subprocess.Popen(words, env=env, stdout=file, stderr=subprocess.DEVNULL)
        while process.poll() is None:
            for number, event in enumerate(events):
                if found[number] is None and event(process, workdir, out):
                    found[number] = time.monotonic() - began
            time.sleep(0.0005)
    assert process.returncode == 0, words
    return [*found, time.monotonic() - began]


def phase_length_s(words, env, workdir, phase):
    """Returns how long a phase takes, in a run of its own."""
    begins, ends, longest_s = phase
    begin, end, over = timed(words, env, workdir, (begins, ends))
    return min((over if end is None else end) - begin, longest_s)


def _report(name, found):
    valid = [trial for trial in found if not trial.too_late]
    problems = [problem for trial in valid if (problem := trial.problem())]
    times = sorted(trial.acknowledged_s for trial in valid if trial.acknowledged_s is not None) or [0.0]
    ended = sorted(trial.ended_s for trial in valid) or [0.0]
    codes = sorted({trial.code for trial in valid})
    print(
        f"{name:24}{len(valid):3} interrupts, codes {codes}, acknowledged after {statistics.median(times):.2f} s, "
        f"at most {times[-1]:.2f} s; ended after {statistics.median(ended):.2f} s, at most {ended[-1]:.2f} s; "
        f"{len(problems)} wrong",
        flush=True,
    )
    for problem in problems:
        print(f"    {problem}")
    return len(problems)


def commands(folder, run, *, config):
    """Returns the words of other commands that work for a while; they write into `folder`."""
    text = folder / "text.txt"
    text.write_text("It is a truth universally acknowledged. " * 4000)
    inputs = folder / "in.jsonl"
    inputs.write_text("".join(json.dumps({"text": f"{number} " + "word " * 2000}) + "\n" for number in range(4000)))
    module = [sys.executable, "-m"]
    return {
        "evaluate --text": [*module, "hlat_jax.evaluate", f"--checkpoint={run}", f"--text={text}"],
        "generate": [*module, "hlat_jax.generate", f"--checkpoint={run}", "--prompt=It is", "--max_tokens=24"],
        "hf export": [*module, "hlat_jax.hf", "export", str(run), f"--out={folder / 'exported'}"],
        "data build": [*module, "hlat_jax.data", "build", str(inputs), f"--out={folder / 'built'}", "--workers=2"],
        "data tokenizer": [
            *[*module, "hlat_jax.data", "tokenizer", str(asset_path("austen_train.jsonl")), "--vocab_size=2000"],
            f"--out={folder / 'own.model'}",
        ],
        "plan": [*module, "hlat_jax.plan", "--config=7b", "--nodes=64"],
        "neuron lint": [*module, "hlat_jax.neuron", "lint", f"--config={config}"],
    }


def main() -> int:
    """Runs the trials as the command line says; returns the exit code."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--trials", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="phases and commands, separated by commas")
    args = parser.parse_args()
    rng, num_bad = random.Random(args.seed), 0
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        config, env = micro.write_config(folder), micro.environment(folder / "cache")
        reference, workdir = folder / "uninterrupted", folder / "run"
        words = micro.command(config, workdir)
        done = micro.run(micro.command(config, reference), env)
        assert done.returncode == 0, done.stderr

        def trials(name, phase, *, words=words, env=env, prepare=None):
            if args.only and name not in args.only.split(","):
                return 0

            def fresh():
                shutil.rmtree(workdir, ignore_errors=True)
                if prepare is not None:
                    prepare()

            fresh()
            length_s, found = phase_length_s(words, env, workdir, phase), []
            while len([trial for trial in found if not trial.too_late]) < args.trials and len(found) < 3 * args.trials:
                fresh()
                delay_s = rng.uniform(0, length_s)
                found.append(interrupt(words, env, workdir, begins=phase[0], delay_s=delay_s))
            return _report(name, found)

        for phase, events in PHASES.items():
            env_of = micro.environment() if phase == "compiling" else env  # without the compile cache
            num_bad += trials(phase, events, env=env_of)
        half = micro.command(config, folder / "half", "train.num_steps=12")
        assert micro.run(half, env).returncode == 0
        num_bad += trials("restoring", RESTORING, prepare=lambda: shutil.copytree(folder / "half", workdir))
        for command, command_words in commands(folder, reference, config=config).items():

            def clean():
                for path in ("exported", "built"):
                    shutil.rmtree(folder / path, ignore_errors=True)
                (folder / "own.model").unlink(missing_ok=True)

            num_bad += trials(command, (_started, _never, 60.0), words=command_words, prepare=clean)
    return 1 if num_bad else 0


if __name__ == "__main__":
    sys.exit(main())
