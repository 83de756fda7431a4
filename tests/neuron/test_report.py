"""The archive for an issue: the named files, those of a run folder, versions and environment, and nothing else."""

import json
import tarfile

import pytest

from hlat_jax.neuron import report_command
from hlat_jax.neuron.__main__ import main


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """A folder after a first hour, which is the working directory."""
    files = {
        "doctor-7b.json": "{}",
        "notes.txt": "mine",
        "runs/7b/metrics.jsonl": "{}",
        "runs/7b/environment.json": "{}",
        "runs/7b/checkpoints/1/config.json": "weights",
    }
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NEURON_RT_LOG_LEVEL", "INFO")
    monkeypatch.setenv("MY_SERVICE_TOKEN", "a secret")
    return tmp_path


def contents(path):
    with tarfile.open(path) as archive:
        assert {(member.uname, member.gname, member.uid) for member in archive} == {("", "", 0)}
        return {member.name.removeprefix("report/"): archive.extractfile(member).read().decode() for member in archive}


def test_report_has_the_named_files_and_lists_them(machine, monkeypatch, capsys):
    monkeypatch.setattr(report_command, "LARGEST_BYTES", 100)
    (machine / "long.log").write_text("".join(f"line {number}\n" for number in range(1000)))
    assert main(["report", "--out=r.tar.gz", "--paths=doctor-7b.json,runs/7b,./long.log"]) == 0
    found = contents("r.tar.gz")
    taken = {name for name in found if name.startswith("files/")}
    run = {"files/runs/7b/metrics.jsonl", "files/runs/7b/environment.json"}
    assert taken == {"files/doctor-7b.json", "files/long.log", *run}
    assert found["files/long.log"].startswith("[the last 100 of 8,890 bytes]\n")
    assert found["files/long.log"].endswith("line 999\n")
    assert json.loads(found["environment.json"])["NEURON_RT_LOG_LEVEL"] == "INFO"
    assert "a secret" not in found["environment.json"]
    assert json.loads(found["versions.json"])["packages"]["jax"]
    assert "Linux" in found["commands/uname_a.txt"]
    *listed, last = capsys.readouterr().out.splitlines()
    assert {line.split()[-1] for line in listed} == set(found)
    assert "nothing has been removed from these files" in last


def test_report_refuses_what_it_cannot_do(machine):
    for words, message in (
        ([], "--out=FILE is missing"),
        (["--out=nowhere/r.tar.gz"], "there is no folder nowhere"),
        (["--out=r.tar.gz", "--paths=a,b"], "there is no a; name files and run folders"),
        (["--out=r.tar.gz", "--path=a"], "unknown flag --path. Did you mean '--paths'"),
    ):
        with pytest.raises(ValueError, match=message):
            main(["report", *words])
