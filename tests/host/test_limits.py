"""Memory, threads and files that the system refuses: which errors mean it, also those of threads that nobody awaits."""

import _thread
import contextlib
import errno
import threading
import time

import pytest
from refusals import assert_names

from hlat_jax.host import distributed, limits
from hlat_jax.host.watchdog import Watchdog


def caused(error, cause):
    """The error, raised from another."""
    error.__cause__ = cause
    return error


ERRORS = [
    (MemoryError(), "out of memory"),
    (caused(OSError("not saved"), RuntimeError("can't start new thread")), "out of memory: can't start new thread"),
    (RuntimeError("RESOURCE_EXHAUSTED: 8 bytes\nmore"), "out of memory: RESOURCE_EXHAUSTED: 8 bytes"),
    (OSError(errno.ENOMEM, "Cannot allocate memory"), "out of memory: [Errno 12] Cannot allocate memory"),
    (OSError(errno.ENOSPC, "No space left on device"), None),
    (ValueError("RESOURCE_EXHAUSTED: [os_error_code='28']"), None),  # of TensorStore, for a full disk
    (RuntimeError("another"), None),
]


def test_errors_that_memory_was_refused_are_described(monkeypatch):
    for error, expected in ERRORS:
        monkeypatch.setattr(limits, "_soft_limit", lambda kind: [])
        refused = limits.out_of_memory(error)
        assert (refused and limits.describe(refused)) == expected
        monkeypatch.setattr(limits, "_soft_limit", lambda kind: [1 << 30])
        assert refused is None or "1.00 GiB" in limits.describe(refused)


def fail(error):
    raise error


@pytest.mark.parametrize(
    "start", [_thread.start_new_thread, lambda work, args: threading.Thread(target=work, args=args).start()]
)
def test_a_thread_without_memory_ends_the_run(start, monkeypatch):
    printed, ended, over = [], [], threading.Event()
    monkeypatch.setattr("sys.unraisablehook", lambda unraisable: printed.append(str(unraisable.exc_value)))
    monkeypatch.setattr("threading.excepthook", lambda args: printed.append(str(args.exc_value)))
    watchdog = Watchdog()

    def end(error):
        ended.append(type(error))
        raise SystemExit

    watchdog.end = end
    with limits.UnawaitedErrors() as errors:
        start(fail, (ValueError("another"),))
        while not (printed or errors._waiting):
            time.sleep(0.01)
        start(fail, (MemoryError(),))
        timer = threading.Timer(600, over.set)  # a watch that sees no error
        timer.start()
        with pytest.raises(SystemExit):
            distributed._watch_alone(watchdog, None, over, errors)
        timer.cancel()
    assert (printed, ended) == (["another"], [MemoryError])


def test_an_error_of_memory_ends_a_run_before_anything_is_closed(monkeypatch):
    order = []

    def end(line, code):
        order.append((line, code))
        raise SystemExit

    monkeypatch.setattr(distributed, "exit_with", end)
    watchdog = Watchdog()
    watchdog.begin("training")
    with contextlib.ExitStack() as stack:
        stack.enter_context(pytest.raises(SystemExit))
        stack.enter_context(distributed.join(None, watchdog=watchdog))
        stack.callback(order.append, "closed")
        stack.enter_context(watchdog.ending_without_memory())
        fail(RuntimeError("RESOURCE_EXHAUSTED: 8 bytes"))
    assert_names(order[0][0], "error: ", "RESOURCE_EXHAUSTED: 8 bytes", "training", "step 0")
    assert (order[0][1], order[1:]) == (1, ["closed"])
