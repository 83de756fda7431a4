"""Trains as `python -m hlat_jax.train` does, and does to itself what `system/faults.py` cannot do from outside.

    python tests/support/faulty_train.py FOLDER --config=... --workdir=...

FOLDER/faults.json lists the faults. FOLDER/process-<id>.jsonl gets a line for each step, for the phases that a harness
waits for, and for each fault when it begins and ends, with the seconds of the system's monotonic clock.
"""

import dataclasses
import errno
import functools
import json
import os
import pathlib
import random
import sys
import time

from hlat_jax.host import process

# In shortest limits: the phases of `watchdog.LIMITS`, and all others. Those of a run would take a trial hours.
SHORT_LIMIT, SHORT_LIMIT_OF_OTHERS = 2, 16
SHORT_WAITS_S = (0.5, 1.0, 2.0)  # instead of a minute
SLOW_READ_S = 0.4
SHORT_REQUESTS_S = 15  # to the store of copies


class Faults:
    """The faults of one process, and where it is."""

    def __init__(self, folder: pathlib.Path, index: int):
        listed = json.loads((folder / "faults.json").read_text())
        self._faults = [fault for fault in listed if fault["process"] in (index, None)]
        self._log = os.open(folder / f"process-{index}.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self.step = 0  # the newest that was begun

    def report(self, event: str, **fields) -> None:
        line = json.dumps({"event": event, "at": time.monotonic(), "step": self.step, **fields}) + "\n"
        os.write(self._log, line.encode())

    def due(self, kind: str, *, step: int | None = None) -> dict | None:
        """Returns a fault of this kind that is to happen now, or None; says when it happens for the first time."""
        step = self.step if step is None else step
        for fault in self._faults:
            if fault["kind"] != kind or step < fault["step"]:
                continue
            now = time.monotonic()
            if "began" not in fault:
                fault["began"] = now
                self.report("fault", id=fault["id"])
            if now - fault["began"] <= fault.get("lasts_s", 1e9):
                return fault
            if "over" not in fault:
                fault["over"] = True
                self.report("fault over", id=fault["id"])
        return None

    def stick(self, where: str, *, step: int | None = None) -> None:
        """Waits for ever, or for a time, if a fault says so."""
        while self.due(f"stuck in {where}", step=step) or self.due(f"long {where}", step=step):
            time.sleep(0.1)


def install(faults: Faults) -> None:
    """Puts the faults into the functions of a run."""
    import jax
    import micro
    import numpy as np

    from hlat_jax import loop
    from hlat_jax.data import retries
    from hlat_jax.data.formats import files
    from hlat_jax.data.loader import TrainBatches
    from hlat_jax.host import watchdog
    from hlat_jax.run import open as opening
    from hlat_jax.run.compilation import Compilations
    from hlat_jax.run.validation import Validation
    from hlat_jax.store import bucket
    from hlat_jax.store.checkpoint import Checkpointer

    for phase, limit in watchdog.LIMITS.items():
        watchdog.LIMITS[phase] = dataclasses.replace(limit, shortest=SHORT_LIMIT)
    watchdog.LIMIT_OF_OTHERS = watchdog.Limit(SHORT_LIMIT_OF_OTHERS)
    retries.WAITS_S = SHORT_WAITS_S
    bucket.OBJECT_S = SHORT_REQUESTS_S

    def before(cls, name, action):
        original = getattr(cls, name)

        def call(self, *args, **options):
            action()
            return original(self, *args, **options)

        setattr(cls, name, call)

    def begin(phase):
        faults.report(phase)
        faults.stick(phase)

    def on_read():
        if faults.due("slow data"):
            time.sleep(SLOW_READ_S)
        for kind in ("data error for a moment", "data error that stays"):
            if fault := faults.due(kind):
                raise OSError(getattr(errno, fault["errno"]), os.strerror(getattr(errno, fault["errno"])))

    before(TrainBatches, "__next__", lambda: faults.stick("loader", step=faults.step + 1))
    before(Validation, "__call__", lambda: begin("evaluation"))
    before(Compilations, "compile", lambda: begin("compile"))
    before(Checkpointer, "restore", lambda: begin("restore"))
    before(Checkpointer, "_seal", lambda: faults.stick("the thread that saves"))
    before(Checkpointer, "save", lambda: begin("save"))
    before(files.DataFile, "read_range", on_read)
    open_run, step_of_loop, clock = opening.open_run, loop._step, time.time

    def open_and_report(*args, **options):
        opened = open_run(*args, **options)
        if opened is None:
            return None
        run, progress = opened
        faults.step = progress.step

        def step_or_stick(*arguments):
            faults.stick("step")
            return run.train_step(*arguments)

        return dataclasses.replace(run, train_step=step_or_stick), progress

    def step(run, progress, batch):
        faults.step = progress.step + 1
        faults.report("step")
        if jump := faults.due("clock jump"):
            time.time = functools.partial(jumped, jump["jump_s"])
        if faults.due("NaN in the weights"):
            progress.state["params"] = jax.tree.map(poisoned, progress.state["params"])
        if (fault := faults.due("flipped bit of a replica")) and "draw" in fault:
            leaves, structure = jax.tree.flatten(progress.state["params"])
            draw = random.Random(fault.pop("draw"))
            index, bit = draw.randrange(len(leaves)), draw.randrange(32)
            [shard] = leaves[index].addressable_shards
            where = {"word": draw.randrange(shard.data.size), "bit": bit}
            leaves[index] = micro.flip_on_device(leaves[index], shard.device, **where)
            progress.state["params"] = structure.unflatten(leaves)
        step_of_loop(run, progress, batch)

    def jumped(jump_s):
        return clock() + jump_s

    def poisoned(array):
        parts = [jax.device_put(np.full_like(shard.data, np.nan), shard.device) for shard in array.addressable_shards]
        return jax.make_array_from_single_device_arrays(array.shape, array.sharding, parts)

    opening.open_run, loop._step = open_and_report, step


def main(argv):
    """Trains as train.main does, once the faults are in place."""
    from hlat_jax import train

    index = next((int(word.partition("=")[2]) for word in argv if word.startswith("--process_id=")), 0)
    faults = Faults(folder, index)
    set_environment = train._set_environment

    def set_and_install(*args, **options):  # where train.main imports JAX, so that signals before that find nothing new
        set_environment(*args, **options)
        install(faults)

    train._set_environment = set_and_install
    return train.main(argv)


if __name__ == "__main__":
    process.exit_on_interrupt()  # before the imports that take time, as for `python -m hlat_jax.train`
    from hlat_jax.cli import flags

    folder = pathlib.Path(sys.argv.pop(1))
    flags.main(main)
