"""Files that are damaged in any way end commands with a line, never with a traceback or an abort."""

import os
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "tests/system/damaged_files.py"


@pytest.mark.slow
def test_500_damaged_files_end_commands_with_a_line_at_most(trained_run, tmp_path):
    # in a process of its own, which an abort would end; what it did last stands in last.txt
    words = [sys.executable, str(SCRIPT), str(trained_run), "--seed=1", "--count=500", f"--work={tmp_path}"]
    env = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": f"{ROOT}:{ROOT / 'tests/support'}"}
    done = subprocess.run(words, capture_output=True, text=True, check=False, env=env)
    last = (tmp_path / "last.txt").read_text() if (tmp_path / "last.txt").exists() else ""
    assert done.returncode == 0, f"code {done.returncode} at {last}\n{done.stdout}\n{done.stderr}"[-6000:]
    assert "500 trials, 0 faults" in done.stdout
