"""Lets the processes of a job meet before JAX joins them, as JAX aborts all for one too many or from another job.

Process 0 listens on the coordinator's port until the others have reported, and answers all at once. Then JAX's
coordination service takes the port over. A later process, or one that finds another program there, gets no answer.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from typing import Any, NoReturn

_HELLO = b'{"hlat_jax": '  # how each line begins
_BUSY_S = 10.0  # an earlier job may hold the port until its last process has ended
_PERIOD_S, _HELLO_S, _CONNECT_S = 0.1, 2.0, 5.0


class RendezvousError(Exception):
    """The processes did not meet. The exit code `code` is 2 for wrong flags, or 1 if a restart may help."""

    def __init__(self, line: str, *, code: int):
        super().__init__(line)
        self.code = code


def meet(coordinator: str, num_processes: int, process_id: int, *, timeout_s: float, busy_s: float = _BUSY_S) -> None:
    """Returns after all processes of the job have called it, with the same coordinator (HOST:PORT) and number.

    A process that finds another job there waits `busy_s` for its end, or `timeout_s` if that is less.

    Raises:
      RendezvousError: the port is taken, two processes have the same id or different numbers, or not all came in time.
    """
    host, _, port = coordinator.rpartition(":")
    who = f"process {process_id} of {num_processes} on {socket.gethostname()}"
    late = (
        f"at --coordinator={coordinator} after {timeout_s:g} s (--join_timeout_s). Check that every node runs the same "
        "command, and that the port is free on the first and open to the others."
    )
    until = time.monotonic() + timeout_s
    try:
        if process_id == 0:
            _gather(int(port), num_processes, until=until, late=f"{who} gave up waiting for the other processes {late}")
        else:
            hello = {"process": process_id, "of": num_processes, "host": socket.gethostname(), "pid": os.getpid()}
            _join(
                host.strip("[]"),
                int(port),
                hello,
                busy_s=busy_s,
                until=until,
                late=f"{who} did not reach process 0 {late}",
            )
    except OSError as error:
        raise RendezvousError(f"{who} at --coordinator={coordinator}: {error.strerror or error}.", code=1) from None


def _gather(port: int, num_processes: int, *, until: float, late: str) -> None:
    """Process 0: waits for the others."""
    met: dict[int, tuple[socket.socket, str]] = {}  # process -> its connection, and where it runs
    with contextlib.ExitStack() as stack:
        with _listen(port) as server:
            server.settimeout(_PERIOD_S)
            while len(met) < num_processes - 1:
                with contextlib.suppress(TimeoutError, ConnectionError):
                    connection = stack.enter_context(server.accept()[0])
                    try:
                        _admit(connection, met, num_processes)
                    except RendezvousError as error:
                        _refuse_late(server, error, num_processes - 2 - len(met))
                        raise
                for index in [index for index, (connection, _) in met.items() if _has_left(connection)]:
                    del met[index]
                if time.monotonic() > until:
                    missing = [str(index) for index in range(1, num_processes) if index not in met]
                    named = ", ".join(missing[:8]) + (f" and {len(missing) - 8} more" if len(missing) > 8 else "")
                    _refuse(f"{late} Missing: {named}.", [each for each, _ in met.values()], code=1)
        for connection, _ in met.values():  # nobody listens now: whom this reaches waits for JAX's service
            _say(connection, {})


def _admit(connection: socket.socket, met: dict[int, tuple[socket.socket, str]], num_processes: int) -> None:
    connection.settimeout(_HELLO_S)
    said = _hear(connection)
    if said is None:  # another program
        return
    index, count = said["process"], said["of"]
    place = f"{said['host']} (pid {said['pid']})"
    if count != num_processes:
        _refuse(
            f"process {index} on {place} was given --num_processes={count}, and process 0 on {socket.gethostname()} "
            f"--num_processes={num_processes}. Give all of them the same.",
            [connection, *(each for each, _ in met.values())],
            code=2,
        )
    if index in met and not _has_left(met[index][0]):
        _refuse(
            f"two processes have --process_id={index}, on {met[index][1]} and on {place}. Give each another one, or "
            "end the processes of an earlier job.",
            [connection, *(each for each, _ in met.values())],
            code=1,
        )
    met[index] = connection, place


def _refuse(line: str, connections: list[socket.socket], *, code: int) -> NoReturn:
    for connection in connections:
        _say(connection, {"error": line, "code": code})
    raise RendezvousError(line, code=code)


def _refuse_late(server: socket.socket, error: RendezvousError, count: int) -> None:
    """Answers as many more processes in the same way, if they come soon; else they would wait for one that has left."""
    until = time.monotonic() + _CONNECT_S
    while count > 0 and time.monotonic() < until:
        with contextlib.suppress(TimeoutError, ConnectionError), server.accept()[0] as connection:
            connection.settimeout(_HELLO_S)
            if _hear(connection) is not None:
                _say(connection, {"error": str(error), "code": error.code})
                count -= 1


def _listen(port: int) -> socket.socket:
    """Returns a socket that listens on the port, which another job of this machine may be about to leave.

    JAX's own would share the port with that job. It is free for this one where only connections are left of a job.
    """
    until = time.monotonic() + _BUSY_S
    is_dual = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if is_dual else socket.AF_INET
    while True:
        try:
            return socket.create_server(("", port), family=family, dualstack_ipv6=is_dual, backlog=1024)
        except OSError as error:
            if time.monotonic() > until:
                line = f"cannot listen on port {port} of {socket.gethostname()}: {os.strerror(error.errno)}"
                hint = "Another job or program has it. End that, or name another in --coordinator (--port of node.sh)."
                raise RendezvousError(f"{line}. {hint}", code=1) from None
        time.sleep(_PERIOD_S)


def _join(host: str, port: int, hello: dict[str, Any], *, busy_s: float, until: float, late: str) -> None:
    """Processes other than 0: says who it is, until it is answered."""
    why, busy_since_s = "none", 0.0
    while (now := time.monotonic()) < until:
        try:
            with socket.create_connection((host, port), timeout=_CONNECT_S) as connection:
                _say(connection, hello)
                connection.settimeout(until - now + _CONNECT_S)  # process 0 says who is missing
                answer = _hear(connection)
        except OSError as error:
            why, busy_since_s = error.strerror or str(error), 0.0
            time.sleep(_PERIOD_S)
            continue
        if answer is not None and "error" not in answer:
            return
        if answer is not None:
            raise RendezvousError(answer["error"], code=answer["code"])
        why, busy_since_s = "another program listens there", busy_since_s or now
        if now - busy_since_s > busy_s:
            raise RendezvousError(
                f"process {hello['process']} of {hello['of']} on {hello['host']} found no job to join at "
                f"--coordinator={host}:{port}, as another program listens there, or a job with all its processes. "
                "End that, or give another port (--port of node.sh).",
                code=1,
            )
        time.sleep(1.0)  # an earlier job may be about to end
    raise RendezvousError(f"{late} The last error: {why}.", code=1)


def _say(connection: socket.socket, what: dict[str, Any]) -> None:
    with contextlib.suppress(OSError):  # it has left
        connection.sendall(_HELLO + json.dumps(what).encode() + b"}\n")


def _hear(connection: socket.socket) -> dict[str, Any] | None:
    """Returns what one line of a process says; None if it is of another program, or of none."""
    line = b""
    while not line.endswith(b"\n"):
        part = connection.recv(4096)
        line += part
        if not part or not line.startswith(_HELLO[: len(line)]):
            return None
    try:
        return json.loads(line)["hlat_jax"]
    except ValueError:
        return None


def _has_left(connection: socket.socket) -> bool:
    connection.setblocking(False)
    try:
        return connection.recv(1, socket.MSG_PEEK) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True
