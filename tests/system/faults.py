"""A campaign of faults: small runs, disturbed at random and started again, compared with undisturbed ones.

    PYTHONPATH=. python tests/system/faults.py --faults 300 --seed 1 --table faults.md

A trial is one run folder, trained by one to four processes to a fixed number of steps. Its faults, of the kinds in
`fault_kinds.KINDS`, come one after another; when the job has ended, it is started again, as launch/restart.sh would,
after the harness has removed the cause where the run said that somebody must. In the end the run must be complete, and
every row and every bit of its last checkpoint as without faults, and its ledger must agree with the harness's clock.
Each fault is a line of faults.jsonl as soon as it is over. One that did not really happen, such as a signal to a
process that had ended, is void and does not count. The exit code is 1 if an outcome is not one that the table of kinds
allows, or a trial does not end as it must.

Some kinds are done by the processes to themselves, see support/faulty_train.py; all else of the command is a user's.
"""

import argparse
import contextlib
import dataclasses
import json
import pathlib
import random
import re
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "support"))

import fault_kinds
import jobs
import micro
from fault_kinds import KINDS

from hlat_jax.data.formats.paths import asset_path
from hlat_jax.run.goodput import goodput, read_events

NUM_STEPS, SAVE_EVERY = 72, 4
SETTINGS = {
    "data.batch_size": 12,  # rows for one to four processes
    "optimizer.horizon_steps": 100,
    "train.num_steps": NUM_STEPS,
    "train.spikes": "skip",
    "train.spike_window": 12,
    "train.eval_every_steps": 6,
    "train.num_eval_batches": 1,
    "checkpoint.every_steps": SAVE_EVERY,
    "metrics.tensorboard": False,
}
FLAGS = ("--stuck_timeout_s=5", "--peer_timeout_s=6", "--join_timeout_s=15")
PROCESSES = (1, 1, 1, 1, 2, 2, 2, 3, 4)  # drawn from these
LASTING_STEPS = (20, 40)  # few, as each asks for an undisturbed run of its own
TRIAL_LIMIT_S, LIFE_LIMIT_S = 900, 180
MOMENT_S = 1.0
_RESTARTED = (1, 124, 143)  # by launch/restart.sh, as what a signal ended
_SMALL_DISK = "64m"
_MOST_BAD = 40  # trials, after which a campaign ends: something else is wrong
# Of a trial: the interpreter's start and end, which its ledger cannot see; share of the time without an account.
LEDGER_LIMIT_S, UNKNOWN_LIMIT = 3.0, 0.01


class LateError(Exception):
    """Something took longer than it may."""


@dataclasses.dataclass
class Fault:
    """One fault of a trial.

    Attributes:
      id, kind: number in its trial; key of KINDS.
      step: it comes after this step began; 0: while the job starts, after `delay_s`.
      delay_s: from that moment.
      process: which one it is for; None: all.
      more: what the process that does it to itself must know.
      at: when it happened, by the monotonic clock; 0: not yet.
      said: what was done.
    """

    id: int
    kind: str
    step: int
    delay_s: float
    process: int | None
    more: dict = dataclasses.field(default_factory=dict)
    at: float = 0.0
    said: str = ""

    @property
    def rule(self) -> fault_kinds.Kind:
        return KINDS[self.kind]

    def control(self) -> dict:
        return {"id": self.id, "kind": self.kind, "step": self.step, "process": self.process, **self.more}


class Life:
    """The processes of a run from a start to their end."""

    def __init__(self, commands: list[list[str]], envs: list[dict[str, str]], folder: pathlib.Path, *, until: float):
        self.folder, self._until, self.began = folder, min(until, time.monotonic() + LIFE_LIMIT_S), time.monotonic()
        self.events: list[dict] = []
        self.disturbed = False
        self.ended: dict[int, float] = {}  # process -> when it was seen to have ended
        self._read = [0] * len(commands)
        self._stack = contextlib.ExitStack()
        self._job = self._stack.enter_context(jobs.run_job(commands, envs, folder))

    @property
    def processes(self) -> list[subprocess.Popen]:
        return self._job.processes

    def over(self) -> bool:
        for index, process in enumerate(self.processes):
            if process.poll() is not None:
                self.ended.setdefault(index, time.monotonic())
        return len(self.ended) == len(self.processes)

    def codes(self) -> list[int]:
        return [process.returncode for process in self.processes]

    def step(self) -> int:
        """Returns the newest step that process 0 began; 0 before the first."""
        return max([event["step"] for event in self.events if event["event"] == "step"], default=0)

    def first_step_at(self) -> float | None:
        return min([event["at"] for event in self.events if event["event"] == "step"], default=None)

    def of(self, fault: Fault, name: str = "fault") -> dict | None:
        return next((each for each in self.events if each["event"] == name and each["id"] == fault.id), None)

    def wait(self, condition=lambda: False) -> bool:
        """Returns whether the condition came true before all processes ended. Raises LateError."""
        while True:
            over = self.over()
            self._look()
            if condition():
                return True
            if over:
                return False
            if time.monotonic() > self._until:
                raise LateError(f"processes still run: {[process.poll() for process in self.processes]}")
            time.sleep(0.005)

    def _look(self) -> None:
        for index in range(len(self.processes)):
            path = self.folder / f"process-{index}.jsonl"
            if not path.exists():
                continue
            with open(path, "rb") as file:
                file.seek(self._read[index])
                new = file.read()
            whole = new[: new.rfind(b"\n") + 1]
            self._read[index] += len(whole)
            found = [json.loads(line) for line in whole.splitlines()]
            self.events += [each for each in found if index == 0 or each["event"] != "step"]

    def err(self) -> list[str]:
        return [self._job.err(index) for index in range(len(self.processes))]

    def errors(self) -> list[str]:
        """Returns the lines that say why processes ended."""
        return [line for text in self.err() for line in text.splitlines() if line.startswith("error: ")]

    def out(self) -> str:
        return self._job.out(0)

    def close(self) -> None:
        self._stack.close()


class Campaign:
    """What all trials share: the config, compiled programs, undisturbed runs, the deck of kinds and the log."""

    def __init__(self, folder: pathlib.Path, *, seed: int, kinds: list[str], log: pathlib.Path, processes: tuple):
        self.folder, self.seed, self._kinds, self._processes = folder, seed, kinds, processes
        self._rng, self._deck, self.records, self.voids = random.Random(f"{seed}/deck"), [], [], 0
        self._log = log
        folder.mkdir(parents=True, exist_ok=True)
        lines = "".join(f"    c.{key} = {value!r}\n" for key, value in SETTINGS.items())
        self.config = folder / "micro.py"
        self.config.write_text(micro.CONFIG.replace("    return c\n", f"{lines}    return c\n"))
        for name, count in (("train", 1500), ("validation", 40)):
            lines = _paragraphs(f"austen_{name}.jsonl", count)
            (folder / f"{name}.jsonl").write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
        self.small_disk = _can_mount()

    def draw_processes(self, rng: random.Random) -> int:
        return rng.choice(self._processes)

    def draw(self, num_processes: int, *, fits=lambda kind: True) -> str | None:
        """Takes the first kind that fits from the deck, in which each stands as often as any other."""
        for _ in range(2):
            found = next((kind for kind in self._deck if KINDS[kind].least <= num_processes and fits(kind)), None)
            if found is not None:
                self._deck.remove(found)
                return found
            self._deck += self._rng.sample(self._kinds, len(self._kinds))
        return None

    def give_back(self, kind: str) -> None:
        self._deck.insert(0, kind)
        self.voids += 1

    def command(self, workdir: pathlib.Path, data: pathlib.Path, control: pathlib.Path, n: int) -> list[list[str]]:
        """Returns the commands of one start."""
        control.mkdir(parents=True, exist_ok=True)
        [python, _, _, *words] = micro.command(
            self.config, workdir, f"data.train={data}", f"data.validation={self.folder / 'validation.jsonl'}"
        )
        runner = pathlib.Path(micro.__file__).with_name("faulty_train.py")
        default = "--default-signal=INT,HUP,TERM,USR1"  # ignored where the campaign runs in the background
        words = ["env", default, python, str(runner), str(control), *words, *FLAGS]
        if n == 1:
            return [words]
        job = [f"--coordinator={jobs.free_address()}", f"--num_processes={n}"]
        return [[*words, *job, f"--process_id={index}"] for index in range(n)]

    def environments(self, num_processes: int) -> list[dict[str, str]]:
        return [micro.environment(self.folder / "cache")] * num_processes

    def reference(self, num_processes: int, lasting: list[Fault]) -> pathlib.Path:
        """Returns the folder of a run of the same plan without other faults; trains it if it is missing."""
        plan = "".join(f"-{fault.kind.replace(' ', '_')}-{fault.step}" for fault in lasting)
        workdir = self.folder / f"undisturbed-{num_processes}{plan}"
        if not workdir.exists():
            control = workdir.with_name(f"{workdir.name}-log")
            shutil.rmtree(control, ignore_errors=True)
            commands = self.command(workdir, self.folder / "train.jsonl", control, num_processes)
            (control / "faults.json").write_text(json.dumps([fault.control() for fault in lasting]))
            with jobs.run_job(commands, self.environments(num_processes), control) as job:
                codes = job.wait(LIFE_LIMIT_S)
                assert codes == [0] * num_processes, f"the undisturbed run failed: {codes} {job.err(0)[-2000:]}"
        return workdir

    def record(self, **fields) -> None:
        """Appends a line to the log, at once."""
        self.records.append(fields)
        with open(self._log, "a") as file:
            file.write(json.dumps(fields) + "\n")
        print(json.dumps(fields), flush=True)


class Trial:
    """One run folder with its faults."""

    def __init__(self, campaign: Campaign, number: int):
        self.campaign, self.number = campaign, number
        self.rng = random.Random(f"{campaign.seed}/{number}")
        self.n = campaign.draw_processes(self.rng)
        self.folder = campaign.folder / f"trial-{number}"
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir()
        self.workdir, self.data = self.folder / "disk" / "run", self.folder / "train.jsonl"
        self.workdir.parent.mkdir()
        shutil.copy(campaign.folder / "train.jsonl", self.data)
        self.until = time.monotonic() + TRIAL_LIMIT_S
        self.lasting: list[Fault] = []
        self.lost: set[int] = set()
        self.done: list[dict] = []  # faults that happened
        self._open: list[dict] = []  # of them, those after which the run does not train again yet
        self._ids, self._undo = 0, []
        self._ledger_from: float | None = None  # the first start that it counts
        self.ledger: dict[str, float] = {}
        self._now: Fault | None = None  # done, and nothing has come of it yet
        self._mounted = False

    def run(self, num_faults: int) -> list[str]:
        """Trains to the end, with so many faults if there is time for them; returns what is wrong with the result."""
        pending: Fault | None = None  # damage done before this start
        lives = 0
        try:
            while True:
                lives += 1
                left = num_faults - len(self.done) - (pending is not None)
                plan = self._plan(left, at_start=pending is None) if lives < 4 * num_faults + 6 else []
                life = self._start(lives, plan)
                try:
                    pending = self._live(life, plan, pending)
                    places = (self.workdir, self.workdir.with_name("away"))  # as the fault may have renamed it
                    if self._ledger_from is None and any(map(read_events, places)):
                        self._ledger_from = life.began
                    if life.codes() == [0] * self.n and self._is_complete(life):
                        break
                    if not life.disturbed and any(life.codes()):
                        return [f"ended with codes {life.codes()} without a fault: {life.errors()[:1]}"]
                finally:
                    life.close()
                    if pending is None:
                        self._heal()
                if lives > 6 * num_faults + 12:
                    return ["does not come to its end"]
            return self._ledger_problems(ended=life.ended[0]) + self._compare()
        except LateError as error:
            if self._now is not None:
                self._note(life, self._now, fault_kinds.HANGS, line=str(error))
            return [f"later than its limit: {error}"]
        finally:
            self._heal()
            for row in self._open:
                self.campaign.record(**row)
            if self._mounted:
                subprocess.run(["umount", "-l", str(self.workdir.parent)], check=False)

    def _plan(self, num_faults: int, *, at_start: bool) -> list[Fault]:
        """Draws the faults of one start: any number that leaves the job going on, then perhaps one that ends it."""
        plan, step = [], max(self._saved(), default=0)
        while len(plan) < num_faults:
            step += self.rng.randrange(5, 10)
            if step > NUM_STEPS - 14:
                break

            def fits(kind, first=not plan, step=step):
                if KINDS[kind].how == "start" or kind == "stuck in restore":
                    return first and at_start and (kind != "stuck in restore" or bool(self._saved()))
                if kind in ("stuck in compile", "long compile"):
                    return first and at_start
                return not KINDS[kind].lasting or (not self.lasting and step <= LASTING_STEPS[-1])

            kind = self.campaign.draw(self.n, fits=fits)
            if kind is None:
                break
            plan.append(self._fault(kind, step, may_be_early=at_start and not plan))
            step = max(step, plan[-1].step)
            if not KINDS[kind].mild:
                break
        return plan

    def _fault(self, kind: str, step: int, *, may_be_early: bool) -> Fault:
        rng, rule = self.rng, KINDS[kind]
        self._ids += 1
        fault = Fault(self._ids, kind, step, rng.uniform(0, 0.2), rng.randrange(self.n))
        if kind == "lost coordinator":
            fault.process = 0
        elif kind == "stuck in the thread that saves":
            fault.process = 0  # Orbax finishes a save there
        elif rule.how == "signal" and not rule.mild and self.n > 1 and rng.random() < 0.4:
            fault.process = None
        if kind.startswith("data ") or kind == "slow data":
            fault.process = None
        if rule.how == "signal" and not rule.mild and may_be_early and rng.random() < 0.25:
            fault.step, fault.delay_s = 0, rng.uniform(0.3, 3.0 + self.n)
        if kind in ("stuck in compile", "stuck in restore", "long compile"):
            fault.step = 0
        if kind == "SIGSTOP, soon SIGCONT":
            fault.more["lasts_s"] = rng.uniform(0.2, 2.5)
        elif kind == "long compile":
            fault.more["lasts_s"] = 11.0  # longer than an evaluation may take
        elif kind == "slow data":
            fault.more["lasts_s"] = 2 * MOMENT_S
        elif kind == "data error for a moment":
            fault.more |= {"lasts_s": MOMENT_S, "errno": rng.choice(("EIO", "ESTALE", "ETIMEDOUT", "ENOENT"))}
        elif kind == "data error that stays":
            fault.more["errno"] = rng.choice(("EIO", "ESTALE"))
        elif kind == "clock jump":
            fault.more["jump_s"] = rng.choice((-86400.0, -61.0, 3600.0, 3e7))
        if rule.lasting:
            fault.process, fault.more["exactly"] = None, True
            fault.step = min(each for each in LASTING_STEPS if each >= step)
            self.lasting.append(fault)
        return fault

    def _start(self, lives: int, plan: list[Fault]) -> Life:
        control = self.folder / f"life-{lives}"
        commands = self.campaign.command(self.workdir, self.data, control, self.n)
        inside = [fault for fault in plan if fault.rule.how == "inside" and not fault.rule.lasting]
        (control / "faults.json").write_text(json.dumps([fault.control() for fault in [*inside, *self.lasting]]))
        for fault in plan:
            if fault.rule.how == "start":
                self._take_port(fault, commands)
            if fault.kind == "disk full" and self.campaign.small_disk and not self._mounted:
                self._move_to_small_disk()
        return Life(commands, self.campaign.environments(self.n), control, until=self.until)

    def _live(self, life: Life, plan: list[Fault], pending: Fault | None) -> Fault | None:
        """Follows one life of the run through its faults; returns damage that was done after it."""
        if pending is not None:
            life.disturbed = True
            life.wait(lambda: life.first_step_at() is not None)
            self._observed_damage(life, pending)
        for index, fault in enumerate(plan):
            if (life.over() and life.of(fault) is None) or not self._inject(life, fault):
                life.wait()
                self._void(plan[index:])
                break
            life.disturbed, self._now = True, fault
            if fault.rule.how == "damage":
                life.wait()
                self._trains_again(life)
                return self._damaged(fault)
            if fault.rule.mild and life.wait(lambda fault=fault: self._has_gone_on(life, fault)):
                self._note(life, fault, fault_kinds.GOES_ON)
                continue
            life.wait()
            if "lasts_s" in fault.more and any(life.of(later) for later in plan[index + 1 :]):
                self._void([fault])  # a later one came before it was over, and may have ended the job
                continue
            self._ended(life, fault)
            self._void(plan[index + 1 :])
            break
        life.wait()
        self._trains_again(life)
        return None

    # What is done

    def _inject(self, life: Life, fault: Fault) -> bool:
        """Waits for the moment and does it; returns whether it really happened."""
        how = fault.rule.how
        if how == "start":
            return True
        if how == "inside":
            if not life.wait(lambda: life.of(fault) is not None) and life.of(fault) is None:
                return False
            fault.at = life.of(fault)["at"]
            fault.said = json.dumps(fault.more) if fault.more else ""
            return True
        began = [time.monotonic() if fault.step == 0 else None]

        def is_now() -> bool:
            if began[0] is None and life.step() >= fault.step:
                began[0] = time.monotonic()
            return began[0] is not None and time.monotonic() >= began[0] + fault.delay_s

        if not life.wait(is_now) or self._is_complete(life):
            return False
        targets = [fault.process] if fault.process is not None else list(range(self.n))
        if any(life.processes[index].poll() is not None for index in targets):
            return False
        fault.at = time.monotonic()
        if how == "signal":
            self._signal(life, fault, [life.processes[index] for index in targets])
        elif how == "damage":
            for process in life.processes:
                process.kill()
        else:
            return self._around(life, fault)
        return True

    def _signal(self, life: Life, fault: Fault, processes: list[subprocess.Popen]) -> None:
        fault.said = "all processes" if len(processes) > 1 else f"process {fault.process} of {self.n}"
        if fault.step == 0:
            fault.said += f", {fault.delay_s:.1f} s after the start"
        if not fault.kind.startswith("SIGSTOP"):
            number = signal.SIGKILL if fault.kind == "lost coordinator" else signal.Signals[fault.kind]
            for process in processes:
                process.send_signal(number)
            return
        [process] = processes
        process.send_signal(signal.SIGSTOP)
        others = [each for each in life.processes if each is not process]
        until = fault.at + fault.more.get("lasts_s", 8.0 if not others else 60.0)
        while time.monotonic() < until and not (others and all(each.poll() is not None for each in others)):
            time.sleep(0.01)
        process.send_signal(signal.SIGCONT)
        fault.said += f" for {time.monotonic() - fault.at:.1f} s"
        fault.more["over"] = time.monotonic()

    def _around(self, life: Life, fault: Fault) -> bool:
        """Changes what a run uses while it runs."""
        if fault.kind == "disk full":
            return self._fill_disk(life, fault)
        aside = self.data.with_name("away.jsonl")
        if fault.kind == "run folder renamed":
            done = fault_kinds.rename(self.workdir, self.workdir.with_name("away"))
        elif fault.kind in ("renamed data", "data away for a moment"):
            done = fault_kinds.rename(self.data, aside)
        else:
            done = (fault_kinds.tear if fault.kind == "torn data" else fault_kinds.flip)(self.data, self.rng)
        fault.said, undo = done
        if fault.kind == "data away for a moment":
            time.sleep(MOMENT_S)
            undo()
            fault.more["over"] = time.monotonic()
        else:
            self._undo.append(undo)
        return True

    def _fill_disk(self, life: Life, fault: Fault) -> bool:
        if self._mounted:
            ballast = self.workdir.parent / "ballast"
            with contextlib.suppress(OSError), open(ballast, "wb", buffering=0) as file:
                while True:
                    file.write(bytes(1 << 12))
            fault.said = "a file system without space"
            self._undo.append(lambda: ballast.unlink(missing_ok=True))
            return True
        import resource

        limit = 1 << 16  # beyond what is printed: to files too
        for process in life.processes:
            resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (limit, limit))
        fault.said = f"files of at most {limit} bytes"
        return True

    def _move_to_small_disk(self) -> None:
        disk, away = self.workdir.parent, self.folder / "moved"
        disk.rename(away)
        disk.mkdir()
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={_SMALL_DISK}", "tmpfs", str(disk)], check=True)
        self._mounted = True
        if (away / "run").exists():
            shutil.copytree(away / "run", disk / "run")

    def _take_port(self, fault: Fault, commands: list[list[str]]) -> None:
        [address] = [word.partition("=")[2] for word in commands[0] if word.startswith("--coordinator=")]
        host, _, port = address.rpartition(":")
        taken = socket.socket()
        taken.bind((host, int(port)))
        taken.listen()
        fault.at, fault.said = time.monotonic(), "the port of --coordinator"
        self._undo.append(taken.close)

    def _damaged(self, fault: Fault) -> Fault | None:
        steps = self._saved()
        before = self._steps_of_rows()
        done = fault_kinds.damage(fault.kind, self.workdir, self.rng)
        if done is None:
            self._void([fault])
            return None
        fault.said, undo = done
        gone = before - self._steps_of_rows()
        fault.more = {"newest": steps[-1], "gone": sorted({step for step, _ in gone})}
        self._undo.append(undo)
        return fault

    def _heal(self) -> None:
        while self._undo:
            self._undo.pop()()

    # What came of it

    def _has_gone_on(self, life: Life, fault: Fault) -> bool:
        """Returns whether three steps have been trained since the fault was over."""
        if fault.rule.how == "inside":
            ended = life.of(fault, "fault over")
            if "lasts_s" in fault.more and ended is None:
                return False
            over = (ended or life.of(fault))["at"]
        else:
            over = fault.more.get("over", fault.at)
        later = [each["step"] for each in life.events if each["event"] == "step" and each["at"] > over]
        return len(later) >= 3

    def _observed_damage(self, life: Life, fault: Fault) -> None:
        if life.first_step_at() is None:
            self._ended(life, fault)
            return
        self._undo.clear()  # what was damaged is replaced by now
        said = life.out() + "\n".join(life.err())
        found = re.search(r"resuming from step (\d+)", said)
        step = int(found[1]) if found else 0
        lost = [each for each in fault.more["gone"] if each <= step]
        outcome, line = fault_kinds.RESUMES, f"resumes from step {step}"
        if step < fault.more["newest"]:
            outcome = fault_kinds.GOES_BACK
            line = next((each for each in said.splitlines() if "WARNING" in each), "nothing is said")
        elif lost:
            self.lost |= set(lost)
            line = next((each for each in said.splitlines() if "missing" in each), "")
            outcome = fault_kinds.NOTES if line else fault_kinds.UNSAID
        self._note(life, fault, outcome, line=line)

    def _ended(self, life: Life, fault: Fault) -> None:
        """Notes how the job ended after a fault."""
        if fault.rule.mild and self._is_complete(life):
            self._note(life, fault, fault_kinds.GOES_ON)
            return
        if self._is_complete(life) and life.codes() == [0] * self.n:  # it came too late to matter
            self._void([fault])
            return
        codes, errors = life.codes(), life.err()
        hit = range(self.n) if fault.process is None else [fault.process]
        own = ()
        if fault.rule.how == "signal":
            number = (
                signal.SIGKILL
                if fault.kind == "lost coordinator"
                else getattr(signal, fault.kind.split(",")[0].split()[0])
            )
            own = (-number, 130) if number == signal.SIGINT else (-number,)
        others = [code for index, code in enumerate(codes) if not (index in hit and code in own)]
        lines = life.errors()
        if fault.rule.how == "signal" and any("interrupted" in text for text in errors):
            lines += [line for text in errors for line in text.splitlines() if "interrupted" in line]
        stopped = next((line for line in life.out().splitlines() if line.startswith("stopped by")), "")
        line = (lines or [""])[0]
        stacks = [text for text in errors if "Traceback (most recent call last)" in text or "Check failure" in text]
        aborted = [text for text in stacks if "JAX distributed service detected fatal errors" in text]
        if aborted and stacks == aborted and {code for code in others if code < 0} <= {-signal.SIGABRT}:
            outcome = fault_kinds.ABORTS
        elif stacks or any(code < 0 for code in others):
            outcome, line = fault_kinds.CRASHES, (stacks or [line])[0][-600:]
        elif stopped and all(code in (0, 130) for code in codes):
            outcome, line = fault_kinds.STOPS, stopped
        elif fault.kind == "SIGINT" and all(code == 130 for code in codes):
            outcome = fault_kinds.STOPS
        elif not others:
            outcome = fault_kinds.DIES
        elif not line:
            outcome = fault_kinds.SILENT
        elif 2 in others:
            outcome = fault_kinds.REFUSES
        elif all(code == 124 for code in others):
            is_named = not fault.kind.startswith("stuck") or f"process {fault.process} of" in line
            outcome = fault_kinds.STUCK if is_named else fault_kinds.MISNAMED
        elif all(code in _RESTARTED for code in others):
            outcome = fault_kinds.ENDS
        else:
            outcome = f"codes {others}"
        self._note(life, fault, outcome, line=line)

    def _note(self, life: Life, fault: Fault, outcome: str, *, line: str = "") -> None:
        self._now = None
        early = fault.step == 0 or life.first_step_at() is None or fault.at < life.first_step_at()
        allowed = fault_kinds.is_allowed(fault.kind, outcome, line, at_start=early)
        row = {
            "trial": self.number,
            "processes": self.n,
            "kind": fault.kind,
            "what": fault.said,
            "step": life.step() if fault.rule.how != "damage" else fault.step,
            "when": time.strftime("%H:%M:%S"),
            "outcome": outcome,
            "line": line[:300],
            "codes": life.codes() if life.over() else [],
            "verdict": "allowed" if allowed else "not allowed",
            "detect_s": round(time.monotonic() - fault.at, 2) if life.over() else None,
            "again_s": None,
            "at": fault.at,
            "seen_at": time.monotonic(),
        }
        self.done.append(row)
        if life.over():
            self._open.append(row)  # written when the run trains again
            return
        row["again_s"] = round((life.first_step_at() if fault.rule.how == "damage" else time.monotonic()) - fault.at, 2)
        self.campaign.record(**row)

    def _trains_again(self, life: Life) -> None:
        """Notes when the run trained again, for the faults that had ended it."""
        first = life.first_step_at()
        for row in [row for row in self._open if row["seen_at"] < life.began]:
            if first is not None:  # else another fault came first
                row["again_s"] = round(first - row["at"], 2)
            self._open.remove(row)
            self.campaign.record(**row)

    def _void(self, faults: list[Fault]) -> None:
        self._now = None
        for fault in faults:
            self.campaign.give_back(fault.kind)
            if fault in self.lasting:
                self.lasting.remove(fault)

    # The result

    def _saved(self) -> list[int]:
        return micro.saved_steps(self.workdir) if (self.workdir / "checkpoints").is_dir() else []

    def _is_complete(self, life: Life) -> bool:
        return NUM_STEPS in self._saved()

    def _steps_of_rows(self) -> set[tuple[int, bool]]:
        """Returns (step, whether it is one of training) of the rows that can be read."""
        return {(row["step"], "loss" in row) for row in fault_kinds.whole_rows(self.workdir)}

    def _ledger_problems(self, *, ended: float) -> list[str]:
        if any("events.jsonl" in row["what"] for row in self.done):
            return []
        wall_s, found = ended - self._ledger_from, goodput(self.workdir)
        unknown_s = found.seconds["unknown"]
        self.ledger = {"wall_s": wall_s, "ledger_s": found.total_s, "unknown_s": unknown_s}
        if abs(wall_s - found.total_s) > LEDGER_LIMIT_S or unknown_s > UNKNOWN_LIMIT * wall_s:
            return [f"the ledger has {found.total_s:.1f} s, {unknown_s:.1f} unknown, the clock {wall_s:.1f} s"]
        return []

    def _compare(self) -> list[str]:
        reference = self.campaign.reference(self.n, self.lasting)
        problems = fault_kinds.history_problems(micro.rows(self.workdir), micro.rows(reference), lost=self.lost)
        return problems + fault_kinds.differences(self.campaign.config, self.workdir, reference)


def table(records: list[dict]) -> str:
    """Returns kind × outcome × seconds as a Markdown table."""

    def figures(values: list[float]) -> str:
        values = [value for value in values if value is not None]
        return f"{statistics.median(values):.1f} / {max(values):.1f}" if values else ""

    lines = [
        "| fault | outcome | faults | not allowed | seconds to the end of all processes | seconds to training again |",
        "|---|---|---:|---:|---:|---:|",
    ]
    for kind in KINDS:
        of_kind = [record for record in records if record.get("kind") == kind]
        for outcome in sorted({record["outcome"] for record in of_kind}):
            found = [record for record in of_kind if record["outcome"] == outcome]
            bad = sum(record["verdict"] != "allowed" for record in found)
            seconds = [figures([record[key] for record in found]) for key in ("detect_s", "again_s")]
            lines.append(f"| {kind} | {outcome} | {len(found)} | {bad} | {seconds[0]} | {seconds[1]} |")
    return "\n".join(lines) + "\n\nSeconds are median / longest.\n"


def _paragraphs(asset: str, count: int) -> list[str]:
    """Returns short documents, so that a run reads its data all the time."""
    text = "\n\n".join(json.loads(line)["text"] for line in asset_path(asset).read_text().splitlines())
    return [line[:240] for line in text.split("\n\n") if len(line) > 100][:count]


def _can_mount() -> bool:
    with tempfile.TemporaryDirectory() as name:
        command = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", name]
        if shutil.which("mount") is None or subprocess.run(command, capture_output=True, check=False).returncode:
            return False
        subprocess.run(["umount", name], check=True)
    return True


def run(campaign: Campaign, *, faults: int, minutes: float, first: int = 0) -> bool:
    """Runs trials until there were so many faults or minutes; returns whether all is as it must be."""
    until, number, bad, count = time.monotonic() + 60 * minutes, first, 0, 0
    while count < faults and time.monotonic() < until and bad < _MOST_BAD:
        trial = Trial(campaign, number)
        wanted = min(faults - count, trial.rng.randrange(2, 6))
        began = time.monotonic()
        problems = trial.run(wanted)
        count += len(trial.done)
        wrong = [row for row in trial.done if row["verdict"] != "allowed"]
        bad += bool(problems or wrong)
        verdict = "; ".join(problems) or "bitwise equal"
        took_s = round(time.monotonic() - began, 1)
        campaign.record(
            trial=number, processes=trial.n, faults=len(trial.done), end=verdict, seconds=took_s, **trial.ledger
        )
        if not problems and not wrong:
            shutil.rmtree(trial.folder, ignore_errors=True)
        number += 1
    return not bad


def main() -> int:
    """Runs a campaign as the command line says; returns the exit code."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--faults", type=int, default=30, help="that really happen")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=1e6, help="no trial begins after so many")
    parser.add_argument("--first", type=int, default=0, help="number of the first trial, to repeat one")
    parser.add_argument("--kinds", default="", help="only these, separated by ;")
    parser.add_argument("--without", default="", help="not these, separated by ;")
    parser.add_argument("--processes", default=",".join(map(str, PROCESSES)), help="drawn from these numbers")
    parser.add_argument("--table", type=pathlib.Path, help="file for the table of kind, outcome and seconds")
    parser.add_argument("--log", type=pathlib.Path, help="file for a line of JSON per fault; default: in --folder")
    parser.add_argument("--folder", type=pathlib.Path, help="kept: compiled programs, undisturbed runs, failed trials")
    args = parser.parse_args()
    kinds = args.kinds.split(";") if args.kinds else list(KINDS)
    kinds = [kind for kind in kinds if kind not in args.without.split(";")]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that nothing stays: processes, mounts
    if unknown := set(kinds) - KINDS.keys():
        parser.error(f"unknown kinds {unknown}")
    with contextlib.ExitStack() as stack:
        folder = args.folder or pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory()))
        folder = folder.absolute()
        log = args.log or folder / "faults.jsonl"
        processes = tuple(int(word) for word in args.processes.split(","))
        campaign = Campaign(folder, seed=args.seed, kinds=kinds, log=log, processes=processes)
        began = time.monotonic()
        good = run(campaign, faults=args.faults, minutes=args.minutes, first=args.first)
        records = campaign.records
        text = table(records)
        print(text)
        if args.table:
            args.table.write_text(text)
    num_faults = sum("kind" in record for record in records)
    num_kinds = len({record["kind"] for record in records if "kind" in record})
    trials = [record for record in records if "end" in record]
    equal = sum(record["end"] == "bitwise equal" for record in trials)
    wrong = sum(record.get("verdict") == "not allowed" for record in records)
    spent_s = time.monotonic() - began
    wall_s, ledger_s, unknown_s = (sum(t.get(key, 0) for t in trials) for key in ("wall_s", "ledger_s", "unknown_s"))
    print(
        f"ledgers: {ledger_s:.1f} s of {wall_s:.1f} s by the harness's clock ({ledger_s / max(wall_s, 1) - 1:+.2%}), "
        f"{unknown_s / max(ledger_s, 1):.2%} unknown"
    )
    print(
        f"{num_faults} faults of {num_kinds} kinds in {len(trials)} trials, {campaign.voids} void; {equal} trials "
        f"bitwise equal, {len(trials) - equal} not; {wrong} outcomes not allowed; {spent_s:.0f} s, "
        f"{spent_s / max(num_faults, 1):.1f} s per fault"
    )
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
