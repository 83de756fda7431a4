"""Commands started once for each process of a job, on this machine."""

import contextlib
import os
import pathlib
import signal
import socket
import subprocess
import sys
import time

NODE = pathlib.Path(__file__).resolve().parents[2] / "launch" / "node.sh"
# `data build` that kills itself as it is about to finish a shard, after the number of shards in its first word.
KILLED_BUILD = """
import os, signal, sys
from hlat_jax.data import __main__ as command
from hlat_jax.data.build import shards
close, left = shards.ShardWriter.close, [int(sys.argv.pop(1))]
def close_or_die(shard):
    if not left[0]:
        os.kill(os.getpid(), signal.SIGKILL)
    left[0] -= 1
    return close(shard)
shards.ShardWriter.close = close_or_die
command.main(sys.argv[1:])
"""


def free_address() -> str:
    """Returns 127.0.0.1:PORT of a port that nothing listens on."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{free.getsockname()[1]}"


def node_variables(launcher: str, num_nodes: int, node: int, *, folder: pathlib.Path) -> dict[str, str]:
    """Returns what `slurm` or `mpi` sets on one of several nodes, with a scontrol in `folder` that knows 127.0.0.1."""
    if launcher == "mpi":
        return {"OMPI_COMM_WORLD_SIZE": str(num_nodes), "OMPI_COMM_WORLD_RANK": str(node)}
    assert launcher == "slurm"
    folder.mkdir(parents=True, exist_ok=True)
    scontrol = folder / "scontrol"
    scontrol.write_text(f'#!/bin/sh\n[ "$*" = "show hostnames node[0-9]" ] && yes 127.0.0.1 | head -n {num_nodes}\n')
    scontrol.chmod(0o755)
    return {
        "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}",
        "SLURM_JOB_NODELIST": "node[0-9]",
        "SLURM_NNODES": str(num_nodes),
        "SLURM_NODEID": str(node),
        "SLURM_PROCID": str(node),
    }


def node_command(launcher: str, address: str, num_nodes: int, node: int) -> list[str]:
    """Returns the command that a launcher (`slurm`, `mpi` or `flags`) starts on a node, up to what is trained."""
    host, _, port = address.rpartition(":")
    flags = {
        "slurm": [],
        "mpi": [f"--coordinator={host}"],
        "flags": [f"--coordinator={host}", f"--nodes={num_nodes}", f"--node={node}"],
    }
    return ["env", f"PYTHON={sys.executable}", str(NODE), f"--port={port}", *flags[launcher]]


def commands_of(words: list[str], num_processes: int) -> list[list[str]]:
    """Returns the command of each process of a job on this machine; of a single process, the words."""
    if num_processes == 1:
        return [words]
    job = [f"--coordinator={free_address()}", f"--num_processes={num_processes}"]
    return [[*words, *job, f"--process_id={index}"] for index in range(num_processes)]


class Job:
    """The processes of one job, each with its output in a file of its own."""

    def __init__(self, processes: list[subprocess.Popen], logs: list[pathlib.Path]):
        self.processes, self._logs = processes, logs

    def wait(self, timeout_s: float = 600) -> list[int]:
        """Returns the exit codes; raises when a process still runs at the end of the time."""
        until = time.monotonic() + timeout_s
        return [process.wait(max(until - time.monotonic(), 0.1)) for process in self.processes]

    def out(self, process_id: int) -> str:
        return self._logs[process_id].with_suffix(".out").read_text()

    def err(self, process_id: int) -> str:
        return self._logs[process_id].with_suffix(".err").read_text()

    def error_lines(self, process_id: int) -> list[str]:
        return [line for line in self.err(process_id).splitlines() if line.startswith("error: ")]


@contextlib.contextmanager
def run_job(commands: list[list[str]], envs: list[dict[str, str]], folder: pathlib.Path):
    """Yields the Job of commands started at once; none of them outlives the block."""
    folder.mkdir(parents=True, exist_ok=True)
    logs = [folder / f"process{index}" for index in range(len(commands))]
    processes = []
    try:
        for words, env, log in zip(commands, envs, logs, strict=True):
            with open(log.with_suffix(".out"), "w") as out, open(log.with_suffix(".err"), "w") as err:
                processes.append(subprocess.Popen(words, env=env, stdout=out, stderr=err))
        yield Job(processes, logs)
    finally:
        for process in processes:
            process.kill()
            process.wait()


def run_and_interrupt(words: list[str], *, after: str, env: dict[str, str]) -> tuple[int, list[str]]:
    """Sends Ctrl-C to a command and its children once stderr has a line that ends in `after`; returns (code, stderr).

    Lines of stderr are left out up to that one, and those in which Python reports imports. The pipe is small: a
    command that writes on waits in a write before it is more than a few kilobytes ahead, however slow this process is.
    """
    process = subprocess.Popen(
        ["env", "--default-signal=INT", *words],  # ignored where the tests run in the background
        env=env,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        pipesize=4096,
    )
    try:
        next(line for line in process.stderr if line.rstrip().endswith(after))
        os.killpg(process.pid, signal.SIGINT)
        _, rest = process.communicate(timeout=600)
    finally:
        process.kill()
    return process.returncode, [line for line in rest.splitlines() if not line.startswith("import time:")]
