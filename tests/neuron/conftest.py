"""Commands of hlat_jax.neuron, run in this process."""

import micro
import pytest

from hlat_jax.neuron import __main__ as commands


@pytest.fixture
def neuron_here(monkeypatch, capsys):
    """A function of a verb and its words that runs the command: (exit code, stdout, stderr)."""
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    return micro.command_runner(commands.main, monkeypatch, capsys)
