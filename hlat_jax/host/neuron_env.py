"""Computes the environment variables of a run on Trainium from its precision, mesh and topology.

They are set before JAX is imported, which reads some of them then. Undocumented variables are never set here, but the
user may set them. LD_PRELOAD, LD_LIBRARY_PATH and `ulimit` take effect at the start of a process, so launch/node.sh
sets them. Source: AWS Neuron docs (JAX environment variables, runtime configuration, neuronx-cc CLI reference, EFA
set-up), and HLAT's scripts if named.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import shlex
import shutil
import sys
import sysconfig
from collections.abc import Mapping

from hlat_jax.config import ParallelConfig, PrecisionConfig, check_choice, count_text
from hlat_jax.facts.core_groups import DISPUTED, verdict_of_first
from hlat_jax.facts.policies import POLICY_FACTS
from hlat_jax.host import compile_cache, neuron_start
from hlat_jax.host.neuron_compiler_flags import compiler_flags, merge_flags, with_config
from hlat_jax.host.neuron_topology import (
    COLLECTIVES_PORT,
    HERE,
    Machine,
    Topology,
    instance_to_serve,
    lnc_of,
    resolve_topology,
)

# Variables without effect, in the current SDK or under JAX, and what replaces them.
REMOVED = {
    "NEURON_RT_ASYNC_EXEC_MAX_INFLIGHT_REQUESTS": "deprecated by runtime 2.30 and without effect since: unset it",
    "NEURON_RT_VIRTUAL_CORE_SIZE": "an older name: set NEURON_LOGICAL_NC_CONFIG",
    "XLA_USE_BF16": "a variable of PyTorch/XLA: set --config.precision.policy=bf16_sr, HLAT-7B's recipe",
    "XLA_DOWNCAST_BF16": "a variable of PyTorch/XLA: set --config.precision.policy=mixed, HLAT-70B's recipe",
    "NEURON_EXTRACT_GRAPHS_ONLY": "for neuron_parallel_compile, a tool of PyTorch: use launch/slurm/precompile.sbatch",
}
# Variables of the runtime that change numbers without an error -> what they do. Source: foxl-ai/kiln,
# docs/neuron-notes.md, October 2026, SDK 2.32 under PyTorch. Other projects set the first for speed.
WRONG_NUMBERS = {
    "NEURON_RT_DISABLE_EXECUTION_BARRIER": "gave deadlocks, and wrong numbers without an error",
    "NEURON_RT_DBG_CC_NOP": "removes all collectives, so that each device trains by itself",
}
# Variables that the config and the rank of a process determine, and the setting to change instead.
FIXED = {
    "NEURON_RT_STOCHASTIC_ROUNDING_EN": "precision.policy and precision.stochastic_rounding",
    "NEURON_LOGICAL_NC_CONFIG": "--lnc",
    "NEURON_PJRT_PROCESS_INDEX": "--node or --process_id",
    "NEURON_PJRT_PROCESSES_NUM_DEVICES": "--nodes and --cores",
}
PROFILE_FOLDER = "neuron_profile"  # in a run folder
COMPILER = "neuronx-cc"  # JAX's plugin starts it by this name
TOOLS_FOLDER = "/opt/aws/neuron/bin"  # of aws-neuronx-tools


@dataclasses.dataclass(frozen=True)
class Environment:
    """The environment of a process before JAX is imported.

    Attributes:
      variables: the variables to set, with the user's values if they take precedence.
      notes: a line for each value of the user that takes precedence.
    """

    variables: dict[str, str]
    notes: tuple[str, ...] = ()

    def shell(self) -> str:
        """Returns the shell commands that set it, for `eval "$(...)"`. They extend the PATH of that shell."""
        values = {name: shlex.quote(value) for name, value in self.variables.items()}
        values["PATH"] = shlex.quote(os.pathsep.join(_first_folders())) + os.pathsep + '"$PATH"'
        return "\n".join(f"export {name}={value}" for name, value in values.items())


def environment(
    precision: PrecisionConfig,
    parallel: ParallelConfig,
    topology: Topology,
    *,
    current: Mapping[str, str],
    profile: str = "",
    config_flags: str = "",
) -> Environment:
    """Returns the environment of one process. With its own result as `current` it returns the same.

    Args:
      precision: the policy, and whether hardware or software rounds.
      parallel: the degrees of the mesh.
      topology: the topology of the job.
      current: the variables that are set already. Their values take precedence, see Environment.notes.
      profile: the folder for JAX's device profiles (`train.profile_steps`), or "" for none, as they take device memory.
      config_flags: the value of `train.compiler_flags`.

    Raises:
      ValueError: the topology or precision is invalid, or a variable of `current` was removed, or contradicts the
        config, the topology or another variable.
    """
    topology = resolve_topology(topology)
    for field in dataclasses.fields(precision):
        check_choice(f"precision.{field.name}", field, getattr(precision, field.name))
    for name, instead in REMOVED.items():
        if current.get(name):
            raise ValueError(f"{name}={current[name]} is set, but it is {instead}.")
    ours = _compute(precision, parallel, topology)
    if profile:
        _check_profile(current)
        ours |= {"NEURON_RT_INSPECT_DEVICE_PROFILE": "1", "NEURON_RT_INSPECT_OUTPUT_DIR": profile}
    _check_contradictions(ours, topology, current)
    flags = with_config(compiler_flags(topology), config_flags, topology)
    ours["NEURON_CC_FLAGS"], notes = merge_flags(flags, current.get("NEURON_CC_FLAGS", ""), topology)
    variables = dict(ours)
    for name, value in ours.items():
        yours = current.get(name) or value  # an empty variable counts as unset
        if name != "NEURON_CC_FLAGS" and yours != value:
            variables[name] = yours
            notes.append(f"{name}: your value {yours} replaces {value}")
    variables["PATH"] = _search_path(current.get("PATH", ""))
    level, reason = verdict_of_first(topology.devices_per_node, kind=topology.device_key)
    notes += [f"--cores={topology.devices_per_node} is disputed: {reason}"] * (level == DISPUTED)
    return Environment(variables, tuple(notes))


def prepare(precision: PrecisionConfig, parallel: ParallelConfig, *, machine: Machine = HERE) -> str:
    """Sets the `environment` of a single process if this machine has Neuron devices, and returns a summary.

    For notebooks and code that imports the package. The commands call it themselves.

    Raises:
      ValueError: `environment` raises, or JAX was imported before, which reads the environment at its import.
    """
    instance = instance_to_serve("", os.environ.get("JAX_PLATFORMS", ""), machine=machine)
    if not instance:
        return "environment: nothing to set, as no Neuron device is used"
    topology = Topology(instance, lnc=lnc_of(os.environ))
    computed = environment(precision, parallel, topology, current=os.environ)
    variables, is_late = computed.variables, "jax" in sys.modules
    if is_late:  # the first call may have left out JAX's cache
        variables = {name: value for name, value in variables.items() if name != compile_cache.FOLDER}
    late = [name for name, value in variables.items() if os.environ.get(name) != value and name != "PATH"]
    if late and is_late:
        raise ValueError(
            f"{instance}: JAX was imported before {late[0]} was set. Start Python again, in a notebook its kernel, and "
            "call this before you import JAX."
        )
    os.environ.update(variables)
    notes = list(computed.notes)
    if not is_late:
        neuron_start.clear_way(os.environ, topology, machine, say=functools.partial(print, file=sys.stderr, flush=True))
    if not shutil.which(COMPILER):
        notes.append(f"{COMPILER} is not installed next to {sys.executable}. Choose the Python or kernel that has it")
    return "\n".join((f"environment: set for {instance}", *notes))


def variables_to_record(environ: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables that can change the results or the speed of a run, for the record in the run folder."""
    prefixes = ("FI_", "JAX_", "LD_", "MALLOC_", "NEURON_", "XLA_")
    return {name: environ[name] for name in sorted(environ) if name.startswith(prefixes)}


def _search_path(path: str) -> str:
    """Returns a PATH that begins with the `_first_folders`; an empty one becomes the default of the system before."""
    first = _first_folders()
    others = [folder for folder in (path or os.defpath).split(os.pathsep) if folder not in first]
    return os.pathsep.join([*first, *others])


def _first_folders() -> list[str]:
    """Returns the folders of this interpreter's commands, such as the compiler, and of Neuron's tools."""
    return [sysconfig.get_path("scripts"), TOOLS_FOLDER]


def _compute(precision: PrecisionConfig, parallel: ParallelConfig, topology: Topology) -> dict[str, str]:
    # the rounding mode of the device applies to every cast: stochastic only if all storage is bf16
    is_stochastic = POLICY_FACTS[precision.policy].rounding == "stochastic"
    rounds_by_device = is_stochastic and precision.stochastic_rounding != "software"
    variables = {
        "JAX_PLATFORMS": "neuron,cpu",  # the CPU for initialization and host work
        "JAX_DEFAULT_PRNG_IMPL": "rbg",  # threefry is incomplete on Neuron: JAX known issues
        "NEURON_FORCE_PJRT_PLUGIN_REGISTRATION": "1",
        "NEURON_LOGICAL_NC_CONFIG": str(topology.lnc),
        "NEURON_RT_STOCHASTIC_ROUNDING_EN": str(int(rounds_by_device)),
        **({"NEURON_RT_STOCHASTIC_ROUNDING_SEED": "0"} if rounds_by_device else {}),
        # seconds; the docs give 2, 30 and 600 as default. HLAT: 4000. A run must not end while a peer still compiles
        "NEURON_RT_EXEC_TIMEOUT": "4000",
        "JAX_COMPILATION_CACHE_DIR": f"{topology.cache}/jax",  # `neuron_start` tries it before a run
        # neuronx-cc refuses --cache_dir (NCC_EARG002), and fills this folder under JAX. Source: xbill9/tpu-jax-inf2,
        # 2 August 2026, jax 0.9.2 and neuronx-cc 2.26
        "NEURON_COMPILE_CACHE_URL": f"{topology.cache}/neuronx-cc",
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",  # small programs too: each takes seconds to compile
        # else the options of a program contain a path inside the cache's folder, and with it the key of its entry
        "JAX_PERSISTENT_CACHE_ENABLE_XLA_CACHES": "none",
        "MALLOC_ARENA_MAX": "64",  # HLAT. Read when a process starts: export it before Python
    }
    if topology.cores:
        variables["NEURON_RT_NUM_CORES"] = str(topology.cores)
    num_devices = topology.nodes * topology.devices_per_node
    if _has_recognized_collectives(parallel, num_devices):
        variables["NEURON_RUN_TRIVIAL_COMPUTATION_ON_CPU"] = "1"
    if topology.nodes > 1:
        variables |= _job_variables(topology)
    return variables


def _has_recognized_collectives(parallel: ParallelConfig, num_devices: int) -> bool:
    """Returns whether each program of a step has a collective by which the plugin sees that it is not trivial.

    With NEURON_RUN_TRIVIAL_COMPUTATION_ON_CPU=1, a program with none of the documented collectives runs on the host's
    CPU. The list lacks the plain all-reduce, the only collective of pure data parallelism and of tensor parallelism
    without sequence parallelism. A step is thousands of times slower on the CPU, so for these the variable is not set.
    Microbatches and the update are programs of their own, unless train.accumulate=scan. `start`, which fills the
    sums with zeros once in a run, has no collective and runs on the host.
    """
    degrees = {axis: getattr(parallel, axis) for axis in ("pipe", "data", "fsdp", "context", "tensor")}
    fixed = 1
    for degree in degrees.values():
        fixed *= max(degree, 1)
    degrees = {axis: max(num_devices // fixed, 1) if degree == -1 else degree for axis, degree in degrees.items()}
    update = parallel.zero1 and degrees["data"] * degrees["context"] > 1  # reduce-scatter, all-gather
    microbatch = (
        degrees["pipe"] > 1  # collective-permute or all-gather
        or degrees["fsdp"] > 1
        or degrees["context"] > 1
        or (parallel.sequence_parallel and degrees["tensor"] > 1)
        or (update and parallel.reduce_gradients == "microbatch")
    )
    return num_devices > 1 and update and microbatch


def _job_variables(topology: Topology) -> dict[str, str]:
    counts = [str(topology.devices_per_node)] * topology.nodes
    variables = {
        "NEURON_RT_ROOT_COMM_ID": f"{topology.coordinator}:{COLLECTIVES_PORT}",
        "NEURON_PJRT_PROCESSES_NUM_DEVICES": ",".join(counts),
        "NEURON_PJRT_PROCESS_INDEX": str(topology.rank),
    }
    if topology.kind.num_efa:
        variables |= {
            "FI_PROVIDER": "efa",
            "FI_EFA_USE_DEVICE_RDMA": "1",
            "FI_EFA_FORK_SAFE": "1",  # needed by kernels before 5.15, harmless after
            "FI_LOG_LEVEL": "warn",
        }
    return variables


def _check_contradictions(ours: Mapping[str, str], topology: Topology, current: Mapping[str, str]) -> None:
    platforms = current.get("JAX_PLATFORMS", "")
    if platforms and "neuron" not in platforms.split(","):
        raise ValueError(f"JAX_PLATFORMS={platforms} keeps JAX off the devices of {topology.instance}. Unset it.")
    for name, fault in WRONG_NUMBERS.items():
        if current.get(name, "0") not in ("", "0"):
            raise ValueError(f"{name}={current[name]} {fault}. Unset it.")
    if current.get("NEURON_RT_INSPECT_DEVICE_PROFILE") == "1":
        _check_profile(current)
    # of one process, which sets neither: they may be left of a larger job
    alone = {"NEURON_PJRT_PROCESSES_NUM_DEVICES": str(topology.devices_per_node), "NEURON_PJRT_PROCESS_INDEX": "0"}
    for name, setting in FIXED.items():
        value = (alone | ours)[name]
        if current.get(name, value) not in ("", value):
            raise ValueError(
                f"{name}={current[name]} contradicts {setting}, which gives {value}. Unset it, or change that setting."
            )
    num_devices = topology.nodes * topology.devices_per_node
    if num_devices == 1 and current.get("NEURON_RUN_TRIVIAL_COMPUTATION_ON_CPU", "0") != "0":
        raise ValueError(
            "NEURON_RUN_TRIVIAL_COMPUTATION_ON_CPU=1 with one device would run the whole training step on the host's "
            "CPU, as it has no collectives. Unset it, or use more than --cores=1."
        )
    _check_visible(topology, current)
    if platforms and "cpu" not in platforms.split(","):
        raise ValueError(
            f"JAX_PLATFORMS={platforms} leaves out the CPU, which draws the initial weights. Set neuron,cpu."
        )


def _check_profile(current: Mapping[str, str]) -> None:
    """Raises ValueError where the runtime would record by itself what JAX's profiler is to record."""
    if current.get("NEURON_RT_INSPECT_ENABLE", "0") != "0":
        raise ValueError(
            "NEURON_RT_INSPECT_ENABLE and NEURON_RT_INSPECT_DEVICE_PROFILE=1 exclude each other. Unset the first for "
            "jax.profiler and train.profile_steps, or set NEURON_RT_INSPECT_DEVICE_PROFILE=session."
        )


def _check_visible(topology: Topology, current: Mapping[str, str]) -> None:
    name = next((n for n in ("NEURON_RT_VISIBLE_CORES", "NEURON_RT_NUM_CORES") if current.get(n)), None)
    if name is None:
        return
    value = current[name]
    visible = _num_visible(value) if name == "NEURON_RT_VISIBLE_CORES" else int(value) if value.isdecimal() else None
    if visible != topology.devices_per_node:
        cores = "not a list of cores" if visible is None else count_text(visible, "core")
        change = f", or give --cores={visible}" if visible else ""
        raise ValueError(f"{name}={value}: {cores}, but the run uses {topology.devices_per_node}. Unset it{change}.")


def _num_visible(text: str) -> int | None:
    """Returns the number of cores in a list such as `4`, `0-31` or `0,1,2`; None for another form."""
    count = 0
    for part in text.split(","):
        first, is_range, last = part.partition("-")
        if not first.isdecimal() or (is_range and not last.isdecimal()):
            return None
        count += int(last) - int(first) + 1 if is_range else 1
    return count if count > 0 else None
