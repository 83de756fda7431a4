"""Refusals are told apart by their class and by the keys, files and figures that they name, not by their sentences."""

import contextlib

import pytest


@contextlib.contextmanager
def refused(*facts, kind=ValueError):
    """A context in which an error of this class must come that names each fact: a key, a file, a value."""
    with pytest.raises(kind) as caught:
        yield caught
    assert_names(str(caught.value), *facts)


def assert_names(said, *facts):
    """Asserts that a message, or what a command printed, has each fact."""
    missing = [str(fact) for fact in facts if str(fact) not in said]
    assert not missing, f"{missing} missing in: {said}"


def assert_refused(result, *facts):
    """Asserts that a command, as (exit code, stdout, stderr), ended as a mistake of the user that names each fact."""
    code, _, error = result
    assert (code, "Traceback" in error) == (2, False), result
    _, found, said = f"\n{error}".partition("\nerror: ")
    assert found, error
    assert_names(said, *facts)
