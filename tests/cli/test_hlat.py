"""The console command: `hlat AREA` is `python -m hlat_jax.AREA`, and costs no more."""

import importlib
import os
import pathlib
import subprocess
import sys
import tomllib

import micro
import pytest
from refusals import assert_refused

from hlat_jax.cli import hlat
from hlat_jax.host import process

ROOT = pathlib.Path(__file__).resolve().parents[2]
HLAT = [sys.executable, "-c", "import sys; from hlat_jax.cli.hlat import main; main()"]


@pytest.fixture
def hlat_here(monkeypatch, capsys):
    """A function of the words after `hlat` that runs it in this process: (exit code, stdout, stderr)."""

    def run(*words):
        monkeypatch.setattr(process, "exit_on_interrupt", lambda: None)  # it would outlive the test
        monkeypatch.setattr("sys.argv", ["hlat", *words])
        with pytest.raises(SystemExit) as exit_:
            hlat.main()
        return exit_.value.code, *capsys.readouterr()

    return run


def test_the_script_of_the_package_is_this_command():
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert list(scripts) == ["hlat"]
    module, _, name = scripts["hlat"].partition(":")
    assert getattr(importlib.import_module(module), name) is hlat.main


def test_every_command_of_the_package_is_an_area():
    rooms = {path.parent.name for path in (ROOT / "hlat_jax").glob("*/__main__.py")}
    assert set(hlat.AREAS) == rooms | {"launch", "train"}


def test_help_has_a_line_for_each_area(hlat_here):
    for words, expected in (["--help"], 0), ([], 2):
        code, out, err = hlat_here(*words)
        assert (code, err) == (expected, "")
        assert [line.split()[0] for line in out.splitlines() if line.startswith("  ")] == list(hlat.AREAS)
    assert hlat_here("--version") == (0, "0.1.0\n", "")


def test_a_word_that_is_no_area_is_answered_with_one_line(hlat_here):
    found = hlat_here("trian")
    assert_refused(found, "'trian'", "'train'")
    assert (found[1], found[2].count("\n")) == ("", 1)


def test_an_area_gets_its_words_and_nothing_else_is_imported():
    code = HLAT[-1].replace("main()", "import atexit; atexit.register(lambda: print(*sys.modules)); main()")
    words = [*HLAT[:-1], code, "train", "--config=tiny", "--print_config"]
    done = subprocess.run(words, env=micro.environment(), capture_output=True, text=True, check=True)
    *printed, modules = done.stdout.splitlines()
    alone = [sys.executable, "-m", "hlat_jax.train", "--config=tiny", "--print_config"]
    assert printed == subprocess.run(alone, env=micro.environment(), capture_output=True, text=True).stdout.splitlines()
    assert not {"jax", "hlat_jax.plan", "hlat_jax.evaluate", "hlat_jax.neuron", "hlat_jax.hf"} & set(modules.split())


def test_launch_files_are_listed_printed_and_copied(hlat_here, tmp_path):
    launch, out = ROOT / "launch", tmp_path / "launch"
    files = sorted(path.relative_to(launch).as_posix() for path in launch.rglob("*") if path.is_file())
    assert hlat_here("launch") == (0, "\n".join(files) + "\n", "")
    assert hlat_here("launch", "slurm/train.sbatch") == (0, (launch / "slurm" / "train.sbatch").read_text(), "")
    assert hlat_here("launch", f"--out={out}")[0] == 0
    for name in files:
        assert (out / name).read_bytes() == (launch / name).read_bytes()
        assert os.access(out / name, os.X_OK) == os.access(launch / name, os.X_OK)
    for words, *facts in (
        (["nod.sh"], "nod.sh", "'node.sh'"),
        (["node.sh", "restart.sh"], "'restart.sh'"),
        ([f"--out={out}"], f"--out={out}"),
    ):
        found = hlat_here("launch", *words)
        assert_refused(found, *facts)
        assert found[1] == ""
