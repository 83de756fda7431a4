"""Commands started once for each process of a job, on this machine."""

import contextlib
import pathlib
import socket
import subprocess
import time


def free_address() -> str:
    """Returns 127.0.0.1:PORT of a port that nothing listens on."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{free.getsockname()[1]}"


def flags(address: str, num_processes: int, process_id: int) -> list[str]:
    """Returns the flags of one process of a job."""
    return [f"--coordinator={address}", f"--num_processes={num_processes}", f"--process_id={process_id}"]


class Job:
    """The processes of one job, each with its output in a file of its own."""

    def __init__(self, processes: list[subprocess.Popen], logs: list[pathlib.Path]):
        self.processes, self._logs = processes, logs

    def wait(self, timeout_s: float) -> list[int]:
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
def started(commands: list[list[str]], envs: list[dict[str, str]], folder: pathlib.Path):
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
