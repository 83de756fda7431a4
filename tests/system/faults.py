"""A campaign of faults: small runs, disturbed at random and started again, compared with undisturbed ones.

    PYTHONPATH=. python tests/system/faults.py --faults 300 --seed 1

A trial is one run folder, trained by one to four processes to a fixed number of steps. Its faults, of the kinds in
`fault_kinds.KINDS`, come one after another; when the job has ended, it is started again, as launch/restart.sh would,
after the harness has removed the cause where the run said that somebody must. In the end the run must be complete, and
every row and every bit of its last checkpoint as without faults, and its ledger must agree with the harness's clock.
Each fault is a line of faults.jsonl. One that did not really happen, such as a signal to a process that had ended,
does not count. The exit code is 1 if an outcome is not one that the table of kinds allows, or a trial does not end as
it must.

Some kinds are done by the processes to themselves, see support/faulty_train.py; all else of the command is a user's.
"""

import argparse
import collections
import contextlib
import dataclasses
import json
import os
import pathlib
import random
import re
import resource
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "support"))

import bucket_server
import fault_kinds
import jobs
import micro
from fault_kinds import KINDS

from hlat_jax.data.formats.paths import asset_path
from hlat_jax.run.goodput import complete_step, goodput, read_events
from hlat_jax.store.bucket import (
    CHECKPOINTS,
    Bucket,
    begin_checkpoint,
    finish_checkpoint,
    receive_share,
    whole_steps,
)
from hlat_jax.store.integrity import INTEGRITY_FILE
from hlat_jax.store.metrics import read_rows

NUM_STEPS, SAVE_EVERY, KEEP_LAST = 72, 4, 2
SETTINGS = {
    "data.batch_size": 12,  # rows for one to four processes
    "optimizer.horizon_steps": 100,
    "train.num_steps": NUM_STEPS,
    "train.spikes": "skip",
    "train.spike_window": 12,
    "train.check_devices_every_steps": 3,
    "train.eval_every_steps": 6,
    "train.num_eval_batches": 1,
    "checkpoint.every_steps": SAVE_EVERY,
    "checkpoint.keep_last": KEEP_LAST,
    "metrics.tensorboard": False,
}
FLAGS = ("--stuck_timeout_s=5", "--peer_timeout_s=6", "--join_timeout_s=15")
PROCESSES = (1, 1, 1, 1, 2, 2, 2, 3, 4)  # drawn from these
TRIAL_LIMIT_S, LIFE_LIMIT_S = 900, 180
MOMENT_S = 1.0
FLAKY = {"slow_share": 0.1, "cut_share": 0.02}  # of the requests to a store
_RESTARTED = (1, 74, 124, 143)  # by launch/restart.sh, as what a signal ended
_MOST_BAD = 40  # trials, after which a campaign ends: something else is wrong
# Shares of a trial: starts and ends of the interpreter, which its ledger cannot see; the time without an account.
UNSEEN_LIMIT, UNKNOWN_LIMIT = 0.1, 0.01


class LateError(Exception):
    """Something took longer than it may."""


@dataclasses.dataclass
class Fault:
    """One fault of a trial.

    Attributes:
      id: number in its trial.
      kind: key of KINDS.
      step: the first step in which it may come.
      moment: what a signal comes after: the "start" of the process, a "step", "save", "evaluation" or "compile".
      delay_s: seconds from that moment.
      process: the process that it hits; None for all.
      more: what a process that does it to itself must know.
      at: time by the monotonic clock when it happened; 0 before.
      said: what was done.
    """

    id: int
    kind: str
    step: int
    moment: str = "step"
    delay_s: float = 0.0
    process: int | None = 0
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

    def __init__(self, job: jobs.Job, folder: pathlib.Path, *, until: float):
        self.job, self.processes, self._folder = job, job.processes, folder
        self.began = time.monotonic()
        self._until = min(until, self.began + LIFE_LIMIT_S)
        self.events: list[dict] = []
        self.disturbed = False
        self.ended: dict[int, float] = {}  # process -> when it was seen to have ended
        self._read = [0] * len(job.processes)

    def over(self) -> bool:
        for index, process in enumerate(self.processes):
            if process.poll() is not None:
                self.ended.setdefault(index, time.monotonic())
        return len(self.ended) == len(self.processes)

    def codes(self) -> list[int]:
        return [process.returncode for process in self.processes]

    def steps(self) -> list[dict]:
        """Returns the events of process 0 that begin a step."""
        return [event for event in self.events if event["event"] == "step"]

    def step(self) -> int:
        """Returns the newest step that process 0 began; 0 before the first."""
        return max((event["step"] for event in self.steps()), default=0)

    def of(self, fault: Fault, name: str = "fault") -> dict | None:
        return next((each for each in self.events if each["event"] == name and each["id"] == fault.id), None)

    def wait(self, condition=lambda: False) -> bool:
        """Returns whether the condition came true before all processes ended. Raises LateError."""
        while True:
            over = self.over()
            for index in range(len(self.processes)):
                self._look(index)
            if condition():
                return True
            if over:
                return False
            if time.monotonic() > self._until:
                raise LateError(f"processes still run: {self.codes()}")
            time.sleep(0.002)

    def _look(self, index: int) -> None:
        path = self._folder / f"process-{index}.jsonl"
        if path.exists():
            new = path.read_bytes()[self._read[index] :]
            whole = new[: new.rfind(b"\n") + 1]
            self._read[index] += len(whole)
            events = [json.loads(line) for line in whole.splitlines()]
            self.events += [event for event in events if index == 0 or event["event"].startswith("fault")]

    def err(self) -> list[str]:
        return [self.job.err(index) for index in range(len(self.processes))]


class Campaign:
    """What all trials share: the config, compiled programs, undisturbed runs, and the log."""

    def __init__(self, folder: pathlib.Path, *, seed: int = 0, kinds: Sequence = tuple(KINDS), processes=PROCESSES):
        self.folder, self.seed, self._kinds, self._processes = folder, seed, list(kinds), processes
        self._drawn: collections.Counter[str] = collections.Counter()
        self.store: bucket_server.Faults | None = None  # of the bucket of all trials, if they are copied
        if not set(fault_kinds.STORE).isdisjoint(self._kinds):
            self._serving = contextlib.ExitStack()
            self.store, _ = self._serving.enter_context(bucket_server.serve(seed=seed))
            os.environ["AWS_ACCESS_KEY_ID"] = bucket_server.CALM_KEY  # of the harness, no run
        self.records: list[dict] = []
        folder.mkdir(parents=True, exist_ok=True)
        lines = "".join(f"    c.{key} = {value!r}\n" for key, value in SETTINGS.items())
        self.config = folder / "micro.py"
        self.config.write_text(micro.CONFIG.replace("    return c\n", f"{lines}    return c\n"))
        for name, count in (("train", 1500), ("validation", 40)):
            lines = _paragraphs(f"austen_{name}.jsonl", count)
            (folder / f"{name}.jsonl").write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))

    def draw_processes(self, rng: random.Random) -> int:
        return rng.choice(self._processes)

    def draw(self, rng: random.Random, fits) -> str | None:
        """Returns a kind that fits, of those that were drawn least often."""
        kinds = [kind for kind in self._kinds if fits(kind)]
        rng.shuffle(kinds)
        kind = min(kinds, key=self._drawn.__getitem__, default=None)
        self._drawn[kind] += 1
        return kind

    def start(
        self,
        workdir: pathlib.Path,
        data: pathlib.Path,
        control: pathlib.Path,
        n: int,
        faults: list[Fault],
        *,
        key: str = bucket_server.KEY,
    ):
        """Starts a run of n processes, with the faults that these do to themselves; a context of the Job.

        `key` is the access key for the store.
        """
        control.mkdir(parents=True, exist_ok=True)
        (control / "faults.json").write_text(json.dumps([fault.control() for fault in faults]))
        overrides = (f"data.train={data}", f"data.validation={self.folder / 'validation.jsonl'}")
        if self.store is not None:
            overrides += (f"checkpoint.copy_to={self.url(workdir)}",)
        [python, _, _, *words] = micro.command(self.config, workdir, *overrides)
        default = "--default-signal=INT,HUP,TERM,USR1"  # ignored where the campaign runs in the background
        runner = pathlib.Path(micro.__file__).with_name("faulty_train.py")
        words = ["env", default, python, str(runner), str(control), *words, *FLAGS]
        env = micro.environment(self.folder / "cache") | {"AWS_ACCESS_KEY_ID": key}
        return jobs.run_job(jobs.commands_of(words, n), [env] * n, control)

    def url(self, workdir: pathlib.Path) -> str:
        """Returns the folder of the bucket that has the copies of a run."""
        return "s3://bucket/" + "-".join(workdir.relative_to(self.folder).parts)

    def reference(self, num_processes: int) -> pathlib.Path:
        """Returns the folder of a run without faults; trains it if it is missing."""
        workdir = self.folder / f"undisturbed-{num_processes}"
        if not workdir.exists():
            control = workdir.with_name(f"{workdir.name}-log")
            with self.start(workdir, self.folder / "train.jsonl", control, num_processes, []) as job:
                codes = job.wait(LIFE_LIMIT_S)
                assert codes == [0] * num_processes, f"the undisturbed run failed: {codes} {job.err(0)[-2000:]}"
        return workdir

    def record(self, **fields) -> None:
        """Appends a line to the log, at once."""
        self.records.append(fields)
        with open(self.folder / "faults.jsonl", "a") as file:
            file.write(json.dumps(fields) + "\n")
        print(json.dumps(fields), flush=True)


class Trial:
    """One run folder with its faults.

    Args:
      campaign: what it shares with others.
      number: its number, of which its random choices depend.
      processes: how many train it; None to draw.
      script: (kind, moment, process) of the faults, each of one start; None to draw them.
    """

    def __init__(
        self,
        campaign: Campaign,
        number: int,
        *,
        processes: int | None = None,
        script: list[tuple[str, str, int | None]] | None = None,
    ):
        self.campaign, self.number, self._script = campaign, number, script
        self.rng = random.Random(f"{campaign.seed}/{number}")
        self.n = processes or campaign.draw_processes(self.rng)
        self.folder = campaign.folder / f"trial-{number}"
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir()
        self.workdir, self.data = self.folder / "run", self.folder / "train.jsonl"
        shutil.copy(campaign.folder / "train.jsonl", self.data)
        self._until = time.monotonic() + TRIAL_LIMIT_S
        self.lost: set[int] = set()
        self.done: list[dict] = []  # faults that happened
        self._ids, self._undo = 0, []
        self._damaged_marks: set[bytes | None] = set()  # of copies
        self._ledger_from: float | None = None  # the first start that it counts
        self._completed = 0.0  # when the ledger had the end of the run
        self._now: Fault | None = None  # done, and nothing has come of it yet
        self._is_flaky = campaign.store is not None and self.rng.random() < 0.5  # whatever else happens
        self._calm()

    def run(self, num_faults: int) -> list[str]:
        """Trains to the end, with so many faults if there is time for them; returns what is wrong with the result."""
        pending: Fault | None = None  # damage done before this start
        try:
            for number in range(1, 6 * num_faults + 13):
                left = num_faults - len(self.done) - (pending is not None)
                plan = self._plan(left, is_damaged=pending is not None) if number < 4 * num_faults + 6 else []
                control = self.folder / f"life-{number}"
                inside = [fault for fault in plan if fault.rule.how == "inside"]
                key = "wrong" if pending is not None and "wrong key" in pending.kind else bucket_server.KEY
                if pending is not None:
                    self._disturb_fetch(pending)
                with self.campaign.start(self.workdir, self.data, control, self.n, inside, key=key) as job:
                    life = Life(job, control, until=self._until)
                    pending = self._live(life, plan, pending)
                    folders = (self.workdir, self.workdir.with_name("away"))  # as the fault may have renamed it
                    has_begun = any(map(read_events, folders)) or (self.campaign.store is not None and self._copied())
                    if self._ledger_from is None and has_begun:  # a lost folder comes back with its ledger
                        self._ledger_from = life.began
                if complete_step(read_events(self.workdir)):  # a start that only copies again enters nothing
                    self._completed = self._completed or life.ended[0]
                if pending is None:
                    self._heal()
                if life.codes() == [0] * self.n and self._is_complete():
                    return self._ledger_problems(ended=self._completed or life.ended[0]) + self._compare()
                if not life.disturbed and any(life.codes()):
                    return [f"ended with codes {life.codes()} without a fault: {life.err()[0][-300:]}"]
            return ["does not come to its end"]
        except LateError as error:
            if self._now is not None:
                self._note(life, self._now, fault_kinds.HANGS, line=str(error))
            return [f"later than its limit: {error}"]
        finally:
            self._heal()

    def _plan(self, num_faults: int, *, is_damaged: bool) -> list[Fault]:
        """Returns the faults of one start: any number that leaves the job going on, then perhaps one that ends it."""
        plan, step = [], max(micro.saved_steps(self.workdir), default=0)
        if self._script is not None:
            if self._script and not is_damaged:
                kind, moment, process = self._script.pop(0)
                plan.append(self._fault(kind, step + 6, moment=moment, process=process))
            return plan
        while len(plan) < num_faults:
            step += self.rng.randrange(5, 10)
            is_first = not plan and not is_damaged
            if step > NUM_STEPS - 14:
                break

            def fits(kind, is_first=is_first):
                if kind in ("stuck in restore", "stuck in compile", "long compile") and not is_first:
                    return False
                if KINDS[kind].how == "store" and KINDS[kind].mild and any(fault.rule.how == "store" for fault in plan):
                    return False  # it would end the one before after three steps
                has_saved = kind != "stuck in restore" or bool(micro.saved_steps(self.workdir))
                return has_saved and KINDS[kind].least <= self.n

            kind = self.campaign.draw(self.rng, fits)
            if kind is None:
                break
            plan.append(self._fault(kind, step, **self._moment(kind, is_first=is_first)))
            if not KINDS[kind].mild:
                break
        return plan

    def _moment(self, kind: str, *, is_first: bool) -> dict:
        """Returns when and where a random fault comes."""
        rng, is_signal = self.rng, KINDS[kind].how == "signal" and not KINDS[kind].mild
        moments = ["step"] * 3 + ["save", "evaluation"] + ["start", "compile"] * is_first
        process = None if is_signal and self.n > 1 and rng.random() < 0.4 else rng.randrange(self.n)
        return {"moment": rng.choice(moments) if is_signal else "step", "process": process}

    def _fault(self, kind: str, step: int, *, moment: str, process: int | None) -> Fault:
        rng = self.rng
        self._ids += 1
        delay_s = {"step": 0.2, "start": 3.0 + self.n}.get(moment, 0.05)
        fault = Fault(self._ids, kind, step, moment, rng.uniform(0, delay_s), process)
        if kind == "stuck in the thread that saves":
            fault.process = 0  # Orbax finishes a save there
        if kind.startswith("data ") or kind == "slow data":
            fault.process = None
        if moment in ("start", "compile") or kind in ("stuck in compile", "stuck in restore", "long compile"):
            fault.step = 0
        if kind == "SIGSTOP, soon SIGCONT":
            fault.more["lasts_s"] = rng.uniform(0.2, 2.5)
        elif kind == "long compile":
            fault.more["lasts_s"] = 11.0  # longer than an evaluation may take
        elif kind == "slow data":
            fault.more["lasts_s"] = 2 * MOMENT_S
        elif kind == "data error for a moment":
            fault.more |= {"lasts_s": MOMENT_S, "errno": rng.choice(("EIO", "ESTALE", "ETIMEDOUT", "ENOENT"))}
        elif kind == "flipped bit of a replica":
            fault.more["draw"] = rng.random()
        elif kind == "data error that stays":
            fault.more["errno"] = rng.choice(("EIO", "ESTALE"))
        elif kind == "clock jump":
            fault.more["jump_s"] = rng.choice((-86400.0, -61.0, 3600.0, 3e7))
        return fault

    def _live(self, life: Life, plan: list[Fault], pending: Fault | None) -> Fault | None:
        """Follows one life of the run through its faults; returns damage that was done after it."""
        if pending is not None:
            life.disturbed = True
            pending.at = time.monotonic()
            if "killed" in pending.kind:
                self._kill_at(life, pending, "GET", self.rng.randrange(2, 12))
            life.wait(life.steps)
            self._observed_damage(life, pending)
        for index, fault in enumerate(plan):
            if (life.over() and life.of(fault) is None) or not self._inject(life, fault):
                break
            life.disturbed, self._now = True, fault
            if fault.rule.how == "damage":
                life.wait()
                return self._damaged(fault)
            if fault.rule.mild and life.wait(lambda fault=fault: self._has_gone_on(life, fault)):
                self._note(life, fault, fault_kinds.GOES_ON)
                continue
            life.wait()
            if "lasts_s" in fault.more and any(life.of(later) for later in plan[index + 1 :]):
                continue  # a later one came before it was over, and may have ended the job
            self._ended(life, fault)
            break
        life.wait()
        self._now = None
        return None

    # What is done

    def _inject(self, life: Life, fault: Fault) -> bool:
        """Waits for the moment and does it; returns whether it really happened."""
        how = fault.rule.how
        if how == "inside":
            if not life.wait(lambda: life.of(fault) is not None):
                return False
            fault.at = life.of(fault)["at"]
            fault.said = json.dumps(fault.more) if fault.more else ""
            return True

        def came(event):
            return event["event"] == fault.moment and event["step"] >= fault.step

        began = [life.began] if fault.moment == "start" else []

        def is_now() -> bool:
            if not began and any(map(came, life.events)):
                began.append(time.monotonic())
            is_due = bool(began) and time.monotonic() >= began[0] + fault.delay_s
            return is_due and (fault.kind not in fault_kinds.NEEDS_COPY or self._has_copies(fault.kind))

        if not life.wait(is_now) or self._is_complete():
            return False
        targets = [fault.process] if fault.process is not None else list(range(self.n))
        if any(life.processes[index].poll() is not None for index in targets):
            return False
        fault.at = time.monotonic()
        if how == "signal":
            self._signal(life, fault, [life.processes[index] for index in targets])
        elif how == "store":
            return self._by_store(life, fault)
        elif how == "damage":
            for process in life.processes:
                process.kill()
        else:
            self._around(life, fault)
        return True

    def _signal(self, life: Life, fault: Fault, processes: list[subprocess.Popen]) -> None:
        who = "all processes" if len(processes) > 1 else f"process {fault.process} of {self.n}"
        fault.said = f"{who}, {fault.delay_s:.2f} s after {fault.moment}"
        if not fault.kind.startswith("SIGSTOP"):
            for process in processes:
                process.send_signal(signal.Signals[fault.kind])
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

    def _by_store(self, life: Life, fault: Fault) -> bool:
        """Makes the server of the bucket fail; returns whether it really happened."""
        store = self.campaign.store
        assert store is not None
        self._calm()  # an earlier fault of this start is over
        fault.said = f"after {len(store.requests)} requests{self._flaky()}"
        if fault.kind == "store slow and cut":
            store.calm(**FLAKY)
        elif fault.kind == "store down":
            store.down = True
        elif fault.kind == "store full":
            store.limit_bytes = store.stored_bytes + self.rng.randrange(1 << 20)
        else:
            process = life.processes[fault.process or 0]
            self._kill_at(life, fault, "PUT", self.rng.randrange(1, 12))
            life.wait(lambda: process.poll() is not None)
            return process.returncode == -signal.SIGKILL
        return True

    def _disturb_fetch(self, fault: Fault) -> None:
        """Makes the server of the bucket fail for a start that has to fetch its checkpoint."""
        if "slow and cut" in fault.kind:
            self.campaign.store.calm(**FLAKY)
        elif "down" in fault.kind:
            self.campaign.store.down = True

    def _calm(self) -> None:
        """Ends the faults of the store, except those that it has all the time in this trial."""
        if self.campaign.store is not None:
            self.campaign.store.calm(**FLAKY if self._is_flaky else {})

    def _flaky(self) -> str:
        return ", flaky store" if self._is_flaky else ""

    def _kill_at(self, life: Life, fault: Fault, method: str, number: int) -> None:
        """Kills a process as soon as the job has sent so many requests for objects of a checkpoint."""
        seen = []

        def before(this: str, path: str) -> None:
            if this == method and "/checkpoints/" in path:
                seen.append(path)
                if len(seen) == number:
                    fault.said += f", at {this} {number} of process {fault.process}"
                    life.processes[fault.process or 0].kill()

        self.campaign.store.before = before

    def _copied(self) -> list[int]:
        """Returns the steps that are whole in the bucket, the newest first."""
        return whole_steps(Bucket(self.campaign.url(self.workdir)).sizes())

    def _has_copies(self, kind: str) -> bool:
        return len(self._copied()) > ("damaged" in kind)  # which needs the one before it

    def _around(self, life: Life, fault: Fault) -> None:
        """Changes what a run uses while it runs."""
        aside = self.data.with_name("away.jsonl")
        if fault.kind == "disk full":
            limit = 1 << 16  # beyond what is printed: to files too
            for process in life.processes:
                resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (limit, limit))
            fault.said = f"files of at most {limit} bytes"
            return
        if fault.kind == "run folder renamed":
            fault.said, undo = fault_kinds.rename(self.workdir, self.workdir.with_name("away"))
        elif fault.kind in ("renamed data", "data away for a moment"):
            fault.said, undo = fault_kinds.rename(self.data, aside)
        else:
            change = fault_kinds.tear if fault.kind == "torn data" else fault_kinds.flip
            fault.said, undo = change(self.data, self.rng)
        if fault.kind == "data away for a moment":
            time.sleep(MOMENT_S)
            undo()
            fault.more["over"] = time.monotonic()
        else:
            self._undo.append(undo)

    def _damaged(self, fault: Fault) -> Fault | None:
        steps, before = micro.saved_steps(self.workdir), self._steps_of_rows()
        self._calm()
        if fault.kind == "wrong key":
            fault.said, fault.more = f"copies of {self._copied()}", {"newest": max(steps, default=0), "gone": set()}
            return fault if steps else None
        if fault.kind in fault_kinds.NEEDS_COPY:
            return self._lose_folder(fault)
        done = fault_kinds.damage(fault.kind, self.workdir, self.rng)
        if done is None:
            return None
        fault.said, undo = done
        fault.more = {"newest": steps[-1], "gone": {step for step, _ in before - self._steps_of_rows()}}
        self._undo.append(undo)
        return fault

    def _lose_folder(self, fault: Fault) -> Fault | None:
        """Removes the run folder, and perhaps damages the newest copy."""
        copied, bucket = self._copied(), Bucket(self.campaign.url(self.workdir))
        if not self._has_copies(fault.kind):  # the oldest was removed since
            return None
        mark = f"{CHECKPOINTS}/{copied[0]}/{INTEGRITY_FILE}"
        if bucket.read(mark) in self._damaged_marks:  # by an earlier fault, and not sent again since
            return None
        steps = micro.saved_steps(self.workdir)
        shutil.rmtree(self.workdir)
        fault.said = f"copies of {copied}, checkpoints of {steps}{self._flaky()}"
        fault.more = {"newest": max(copied + steps), "gone": set()}
        if "damaged" in fault.kind:
            name = f"checkpoints/{copied[0]}/state/manifest.ocdbt"
            bucket.write(name, bytes(len(bucket.read(name))))
            self._damaged_marks.add(bucket.read(mark))
        return fault

    def _heal(self) -> None:
        while self._undo:
            self._undo.pop()()
        self._calm()

    # What came of it

    def _has_gone_on(self, life: Life, fault: Fault) -> bool:
        """Returns whether three steps have been trained since the fault was over."""
        over = fault.more.get("over", fault.at)
        if "lasts_s" in fault.more and fault.rule.how == "inside":
            ended = life.of(fault, "fault over")
            if ended is None:
                return False
            over = ended["at"]
        return len([step for step in life.steps() if step["at"] > over]) >= 3

    def _observed_damage(self, life: Life, fault: Fault) -> None:
        if not life.steps():
            self._ended(life, fault)
            return
        self._undo.clear()  # what was damaged is replaced by now
        said = life.job.out(0) + "\n".join(life.err())
        resumed = re.search(r"resuming from step (\d+)", said)
        step = int(resumed[1]) if resumed else 0
        lost = {each for each in fault.more["gone"] if each <= step}
        outcome, line = fault_kinds.RESUMES, f"resumes from step {step}"
        if fault.kind == "wrong key":
            line = next((each for each in said.splitlines() if each.startswith("copy FAILED")), line)
        if step < fault.more["newest"]:
            outcome = fault_kinds.GOES_BACK
            names = ("WARNING", "is damaged", "fetched ")
            lines = [each for name in names for each in said.splitlines() if name in each]
            line = (lines or ["nothing is said"])[0]
        elif lost:
            self.lost |= lost
            line = next((each for each in said.splitlines() if "missing" in each), "")
            outcome = fault_kinds.NOTES if line else fault_kinds.UNSAID
        self._note(life, fault, outcome, line=line)

    def _ended(self, life: Life, fault: Fault) -> None:
        """Notes how the job ended after a fault."""
        codes, errors = life.codes(), life.err()
        if self._is_complete() and (fault.rule.mild or codes == [0] * self.n):  # else it came too late to matter
            if fault.rule.mild:
                self._note(life, fault, fault_kinds.GOES_ON)
            return
        own, said = (), "error: "
        if "killed" in fault.kind:
            own = (-signal.SIGKILL,)
        if fault.rule.how == "signal":
            number = getattr(signal, fault.kind.split(",")[0].split()[0])
            own = (-number, 130) if number == signal.SIGINT else (-number,)
            said = "error: |.*interrupted"
        hit = range(self.n) if fault.process is None else [fault.process]
        others = [code for index, code in enumerate(codes) if not (index in hit and code in own)]
        lines = [line for text in errors for line in text.splitlines() if re.match(said, line)]
        stopped = next((line for line in life.job.out(0).splitlines() if line.startswith("stopped by")), "")
        line = (lines or [""])[0]
        stacks = [text for text in errors if "Traceback (most recent call last)" in text or "Check failure" in text]
        aborted = [text for text in stacks if "JAX distributed service detected fatal errors" in text]
        if aborted and stacks == aborted and {code for code in others if code < 0} <= {-signal.SIGABRT}:
            outcome = fault_kinds.ABORTS
        elif stacks or any(code < 0 for code in others):
            outcome, line = fault_kinds.CRASHES, (stacks or [line])[0][-600:]
        elif stopped and all(code in (0, 74, 130) for code in codes):  # 74: while the store fails
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
        first = min((step["at"] for step in life.steps()), default=fault.at + 1)
        allowed = fault_kinds.is_allowed(fault.kind, outcome, line, at_start=fault.at < first)
        row = {
            "trial": self.number,
            "processes": self.n,
            "kind": fault.kind,
            "what": fault.said,
            "step": life.step(),
            "outcome": outcome,
            "line": line[:300],
            "codes": life.codes() if life.over() else [],
            "verdict": "allowed" if allowed else "not allowed",
            "seconds": round(time.monotonic() - fault.at, 2),
        }
        self.done.append(row)
        self.campaign.record(**row)

    # The result

    def _is_complete(self) -> bool:
        return NUM_STEPS in micro.saved_steps(self.workdir)

    def _steps_of_rows(self) -> set[tuple[int, bool]]:
        """Returns (step, whether it is one of training) of the rows that can be read."""
        path = self.workdir / "metrics.jsonl"
        return {(row["step"], "loss" in row) for row in read_rows(path)} if path.exists() else set()

    def _ledger_problems(self, *, ended: float) -> list[str]:
        if any(name in row["what"] for row in self.done for name in ("events.jsonl", "alive.json")):
            return []  # a damaged ledger, or a damaged account of a killed life, which is unknown from then on
        wall_s, ledger = ended - self._ledger_from, goodput(self.workdir)
        unknown_s = ledger.seconds["unknown"]
        if abs(wall_s - ledger.total_s) > UNSEEN_LIMIT * wall_s or unknown_s > UNKNOWN_LIMIT * wall_s:
            return [f"the ledger has {ledger.total_s:.1f} s, {unknown_s:.1f} unknown, the clock {wall_s:.1f} s"]
        return []

    def _copy_problems(self) -> list[str]:
        """Returns what is wrong with the bucket of a complete run: it holds its checkpoints, whole, and no parts."""
        bucket, local, whole = Bucket(self.campaign.url(self.workdir)), micro.saved_steps(self.workdir), self._copied()
        found = {name.split("/")[1] for name in bucket.sizes(under=CHECKPOINTS)}
        kept = local[-KEEP_LAST:]  # one that was being sent at the last save stays beside them
        if not set(kept) <= set(whole) or found != set(map(str, whole)):
            return [f"the run has the steps {local}, the bucket {whole} and files of {sorted(found)}"]
        problems, folder = [], self.folder / "fetched"
        for step in whole:
            begin_checkpoint(bucket, step, folder)
            receive_share(bucket, step, folder)
            if problem := finish_checkpoint(bucket, step, folder):
                problems.append(f"step {step} in the bucket: {problem}")
            elif step in local:
                mine = _contents(self.workdir / CHECKPOINTS / str(step))  # Orbax's marks are not sealed, and not sent
                if not _contents(folder / str(step)).items() <= mine.items():
                    problems.append(f"step {step} in the bucket is not that of the run")
        for name in ("metrics.jsonl", "config.json"):
            if bucket.read(name) != (self.workdir / name).read_bytes():
                problems.append(f"{name} in the bucket is not that of the run")
        return problems

    def _compare(self) -> list[str]:
        reference = self.campaign.reference(self.n)
        if self.campaign.store is not None and (problems := self._copy_problems()):
            return problems
        return micro.differences(self.campaign.config, self.workdir, reference, lost=self.lost)


def table(records: list[dict]) -> str:
    """Returns kind × outcome × seconds to the end as a Markdown table."""
    groups = collections.defaultdict(list)
    for record in records:
        if "kind" in record:
            groups[record["kind"], record["outcome"], record["verdict"]].append(record["seconds"])
    lines = ["| fault | outcome | verdict | faults | median / longest |", "|---|---|---|---:|---:|"]
    for key, seconds in sorted(groups.items()):
        figures = f"{statistics.median(seconds):.1f} / {max(seconds):.1f}"
        lines.append(f"| {' | '.join(key)} | {len(seconds)} | {figures} |")
    return "\n".join(lines)


def _contents(folder: pathlib.Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def _paragraphs(asset: str, count: int) -> list[str]:
    """Returns short documents, so that a run reads its data all the time."""
    text = "\n\n".join(json.loads(line)["text"] for line in asset_path(asset).read_text().splitlines())
    return [line[:240] for line in text.split("\n\n") if len(line) > 100][:count]


def run(campaign: Campaign, *, faults: int) -> list[str]:
    """Runs trials until there were so many faults; returns what is wrong."""
    problems, count, number = [], 0, 0
    while count < faults and len(problems) < _MOST_BAD:
        trial = Trial(campaign, number)
        wrong = trial.run(min(faults - count, trial.rng.randrange(2, 6)))
        count += len(trial.done)
        campaign.record(trial=number, processes=trial.n, end="; ".join(wrong) or "bitwise equal")
        wrong += [f"{row['kind']}: {row['outcome']}" for row in trial.done if row["verdict"] != "allowed"]
        problems += [f"trial {number}: {problem}" for problem in wrong]
        if not wrong:
            shutil.rmtree(trial.folder, ignore_errors=True)
        number += 1
    return problems


def main() -> int:
    """Runs a campaign as the command line says; returns the exit code."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--faults", type=int, default=30, help="that really happen")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kinds", default=";".join(KINDS), help="only these, separated by ;, or store")
    parser.add_argument("--processes", default=",".join(map(str, PROCESSES)), help="drawn from these numbers")
    parser.add_argument("--folder", type=pathlib.Path, help="kept: compiled programs, undisturbed runs, failed trials")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that no process stays
    kinds = [*fault_kinds.STORE] if args.kinds == "store" else args.kinds.split(";")
    if unknown := set(kinds) - KINDS.keys():
        parser.error(f"unknown kinds {unknown}")
    with contextlib.ExitStack() as stack:
        folder = args.folder or pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory()))
        processes = tuple(int(word) for word in args.processes.split(","))
        campaign = Campaign(folder.absolute(), seed=args.seed, kinds=kinds, processes=processes)
        began = time.monotonic()
        problems = run(campaign, faults=args.faults)
    print(table(campaign.records))
    kinds = [record["kind"] for record in campaign.records if "kind" in record]
    num_trials = len(campaign.records) - len(kinds)
    print(f"{len(kinds)} faults of {len(set(kinds))} kinds in {num_trials} trials, {time.monotonic() - began:.0f} s")
    print("\n".join(problems) or "every trial bitwise equal, every outcome allowed")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
