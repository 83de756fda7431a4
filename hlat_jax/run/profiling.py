"""Traces the steps in `train.profile_steps` for TensorBoard and Perfetto, and reads the peak memory of a process."""

from __future__ import annotations

import os
import pathlib
import resource
import sys

import jax

from hlat_jax.config import Config
from hlat_jax.host import distributed
from hlat_jax.host.console import say
from hlat_jax.parallel.sharding import Layout
from hlat_jax.resolve import profiled_steps
from hlat_jax.store.metrics import TENSORBOARD_FOLDER


class StepTrace:
    """Traces process 0, its threads and its devices. Does nothing in other processes.

    A profiler that fails is reported and does not end the run.

    Attributes:
      first, last: the steps at which the trace begins and ends, or 0 without a trace.
    """

    def __init__(self, config: Config, workdir: pathlib.Path, *, start_step: int):
        self._folder = workdir / TENSORBOARD_FOLDER
        self._tracing = False
        steps = profiled_steps(config.train)
        left = steps[max(start_step + 1 - steps.start, 0) :]
        self.first, self.last = (left[0], left[-1]) if left else (0, 0)
        if steps and not left:
            print(f"train.profile_steps={config.train.profile_steps} ignored, as the run is at step {start_step}")

    def start(self) -> None:
        """Starts the trace after the earlier steps are complete."""
        if not distributed.is_first():
            return
        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = 0  # its events slow the loop and crowd out those of the devices
        try:
            jax.profiler.start_trace(self._folder, profiler_options=options)
            self._tracing = True
        except (OSError, RuntimeError) as error:
            say("trace", f"not started: {error}")

    def close(self) -> None:
        """Writes the trace and prints its path and how to open it. Does nothing if no trace was started."""
        if not self._tracing:
            return
        self._tracing = False
        before = self._traces()
        try:
            jax.profiler.stop_trace()
            [*_, trace] = sorted(self._traces() - before)
        except (OSError, RuntimeError, ValueError) as error:
            say("trace", f"not written to {self._folder}: {error}")
            return
        say(
            "trace",
            f"from step {self.first}: {trace}\nOpen that file in https://ui.perfetto.dev, or run\n"
            f"  tensorboard --logdir={self._folder} (pip install tensorboard xprof)",
        )
        if profile := os.environ.get("NEURON_RT_INSPECT_OUTPUT_DIR"):
            say("profile", f"of the devices, opened by neuron-explorer view -d {profile}")

    def _traces(self) -> set[pathlib.Path]:
        return set(self._folder.glob("plugins/profile/*/*.trace.json.gz"))


def peak_memory(layout: Layout) -> int:
    """Returns the peak memory of this process so far in bytes, on its fullest device, or on CPUs in the process."""
    stats = [device.memory_stats() or {} for device in layout.mesh.local_devices]
    peaks = [values["peak_bytes_in_use"] for values in stats if "peak_bytes_in_use" in values]
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return max(peaks) if peaks else resident * (1 if sys.platform == "darwin" else 1024)
