"""The log of a batch job, which has no terminal: lines at the key's cadence, and none of its phases is silent."""

import functools
import re

import jax
import micro
import pytest

from hlat_jax import loop
from hlat_jax.cli import config_files
from hlat_jax.resolve import resolve
from hlat_jax.store.metrics import header
from hlat_jax.store.progress import ProgressBar


@pytest.mark.slow
def test_a_batch_job_prints_lines_at_the_keys_cadence_and_in_every_phase(tmp_path, monkeypatch, capsys):
    devices = jax.devices()[:1]
    monkeypatch.setattr(loop.jax, "devices", lambda *_: devices)
    monkeypatch.setattr(loop, "ProgressBar", functools.partial(ProgressBar, line_s=0.03))  # for 30 s
    c = config_files.load(str(micro.write_config(tmp_path)))
    c.train.update(eval_every_steps=0, num_eval_batches=96)
    c.checkpoint.every_steps = 0
    c.metrics.update(console="auto", log_every_steps=8, tensorboard=False)
    assert loop.train(resolve(c), tmp_path / "run") == 0
    lines = capsys.readouterr().out.splitlines()
    start = lines.index(header(mfu=False))
    compiling = lines.index("compiling        the programs of this run")

    clock = r"\d:\d\d:\d\d"
    assert any(re.fullmatch(rf"      opening the run  {clock}", line) for line in lines[:compiling])
    assert any(re.fullmatch(rf"      compiling  {clock}", line) for line in lines[compiling:start])
    evaluating = [found[1] for line in lines if (found := re.match(rf" *(\d+)%  evaluating  ({clock} left)?$", line))]
    assert 0 < int(evaluating[0]) < 100

    shown = [line.split() for line in lines[start + 1 :] if re.match(r" *\d+ +[\d.]+% ", line)]
    assert [int(cells[0]) for cells in shown] == [1, 8, 16, 24]
    names = [name.replace(" ", "") for name in re.findall(r"(?:grad |data |mem )?\S+", lines[start])]
    for cells in shown:
        found = dict(zip(names, cells, strict=True))
        assert float(found["s/step"]) > 0
        assert float(found["memGiB"]) > 0
        assert re.fullmatch(clock, found["elapsed"])
        assert "-" not in cells
