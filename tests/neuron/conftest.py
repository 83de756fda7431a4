"""Commands of hlat_jax.neuron, run in this process."""

import pytest

from hlat_jax.cli import flags
from hlat_jax.neuron import __main__ as commands


@pytest.fixture
def neuron_here(monkeypatch, capsys):
    """A function of a verb and its words that runs the command: (exit code, stdout, stderr)."""

    def run(*words):
        monkeypatch.setattr("sys.argv", ["neuron", *map(str, words)])
        monkeypatch.setenv("JAX_PLATFORMS", "cpu")
        capsys.readouterr()
        with pytest.raises(SystemExit) as exit_:
            flags.main(commands.main)
        printed = capsys.readouterr()
        return exit_.value.code, printed.out, printed.err

    return run
