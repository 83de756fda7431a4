"""The processes of a job meet, or each says in one line why not; here each is a thread."""

import concurrent.futures
import contextlib
import errno
import os
import socket
import threading

import jobs
import pytest
from refusals import assert_names

from hlat_jax.host import rendezvous


@pytest.fixture
def met(monkeypatch):
    """A function of (number of processes, process id) pairs that start together: what each gets, None or its error."""
    monkeypatch.setattr(rendezvous, "_BUSY_S", 0.3)

    def start(*places, address=None, timeout_s=60.0):
        address = address or jobs.free_address()

        def one(place):
            try:
                return rendezvous.meet(address, *place, timeout_s=timeout_s, busy_s=0.3)
            except rendezvous.RendezvousError as error:
                return str(error), error.code

        with concurrent.futures.ThreadPoolExecutor(len(places)) as pool:
            return list(pool.map(one, places))

    return start


@contextlib.contextmanager
def other_program(*, says=b""):
    """Listens on a port that it yields, and answers whatever comes with `says`."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve():
            with contextlib.suppress(OSError):
                while True:
                    connection, _ = server.accept()
                    connection.sendall(says)
                    connection.close()

        thread = threading.Thread(target=serve)
        thread.start()
        yield f"127.0.0.1:{server.getsockname()[1]}"
        server.shutdown(socket.SHUT_RDWR)
        thread.join()


def test_processes_meet_in_any_order_and_again_on_the_same_port(met):
    for host in ("127.0.0.1", "localhost", *["[::1]"] * socket.has_dualstack_ipv6()):
        address = f"{host}:{jobs.free_address().rpartition(':')[2]}"
        for _ in range(2):
            assert met((3, 2), (3, 0), (3, 1), address=address) == [None] * 3


def test_contradicting_processes_all_end_with_one_line(met):
    contradictions = {
        "--num_processes=2": ((2, 1), 2),
        "--process_id=1": ((3, 1), 1),  # a restart may help: one may be of an earlier job
    }
    for message, (third, expected) in contradictions.items():
        lines = met((3, 0), (3, 1), third)
        assert len(set(lines)) == 1
        [(line, code), *_] = lines
        assert (message in line, code) == (True, expected)


def test_a_process_that_is_missing_is_named_in_all(met):
    lines = met((3, 0), (3, 2), timeout_s=3.0)
    assert len(set(lines)) == 1
    assert lines[0][0].endswith("Missing: 1.")


def test_a_port_that_another_program_has_ends_each_process_with_a_line(met):
    with other_program(says=b"HTTP/1.1 400 Bad Request\r\n") as address:
        (first, code), (second, other_code) = met((2, 0), (2, 1), address=address)
    assert (code, other_code) == (1, 1)
    assert_names(first, address.rpartition(":")[2], os.strerror(errno.EADDRINUSE))
    assert_names(second, f"--coordinator={address}")


def test_a_process_that_died_before_the_others_came_may_be_started_again(met):
    address = jobs.free_address()
    host, _, port = address.rpartition(":")

    def die_and_start_again():
        connection = None
        while connection is None:
            with contextlib.suppress(ConnectionRefusedError):
                connection = socket.create_connection((host, int(port)))
        with connection:
            rendezvous._say(connection, {"process": 1, "of": 3, "host": "a", "pid": 1})
        return met((3, 1), (3, 2), address=address)

    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        others = pool.submit(die_and_start_again)
        assert met((3, 0), address=address) == [None]
        assert others.result() == [None] * 2
