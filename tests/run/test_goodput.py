"""What the time of a run went to: a partition of the wall clock over kills, restarts, hangs and a clock that jumps."""

import json
import subprocess
import sys
import time

import pytest
from refusals import assert_names

from hlat_jax.host.watchdog import WAITING, Watchdog
from hlat_jax.run import __main__ as command
from hlat_jax.run.goodput import ALIVE_FILE, EVENTS_FILE, Ledger, goodput, read_events


def life(began, spent, *, pid=1, step=5):
    """The account of a life that began at `began`, and spent all of its time as told."""
    return {"pid": pid, "host": "n", "began": began, "life_s": sum(spent.values()), "step": step, "spent": spent}


def write(workdir, *events):
    (workdir / EVENTS_FILE).write_text("".join(json.dumps(event) + "\n" for event in events))


def start(of):
    keys = ("pid", "host", "began")
    return {"event": "start", "time": of["began"], **{key: of[key] for key in keys}}


def ended(of, name="end"):
    return {"event": name, "time": 0.0, "life": of}


FIRST = {"opening the run": 3.0, "compiling": 4.0, "first step": 1.0, "training": 20.0, WAITING: 2.0}
SECOND = {"restoring the checkpoint": 2.0, "first step": 1.0, "training again": 5.0, "training": 8.0, "saving": 0.5}


def test_two_lives_and_the_time_between_partition_the_clock(tmp_path):
    first, second = life(100.0, FIRST), life(140.0, SECOND, pid=2, step=10)
    write(tmp_path, start(first), ended(first, "died"), start(second), ended(second))
    found = goodput(tmp_path)
    assert {name: round(seconds, 3) for name, seconds in found.seconds.items() if abs(seconds) > 1e-6} == {
        "training": 28.0,
        "training again": 5.0,
        "first step": 2.0,
        "compile": 4.0,
        "blocked on save": 0.5,
        "restore": 2.0,
        "data wait": 2.0,
        "stopped": 10.0,
        "opening and closing": 3.0,
    }
    assert found.total_s == pytest.approx(140 + 16.5 - 100)
    assert_names(found.line(), "2 starts", "49.6% training")


def test_a_life_without_an_account_is_unknown(tmp_path):
    first, second = life(100.0, FIRST), life(140.0, SECOND, pid=2)
    for of_first, unknown_s in ((start(first), 40.0), (ended(first, "died"), 0.0)):
        write(tmp_path, of_first, start(second), ended(second))
        assert goodput(tmp_path).seconds["unknown"] == unknown_s
        assert goodput(tmp_path).total_s == pytest.approx(56.5)


def test_a_life_that_was_killed_from_outside_was_stuck_until_then(tmp_path):
    first, second = life(100.0, FIRST), life(160.0, SECOND, pid=2)
    killed = {"event": "killed", "time": 150.0}
    write(tmp_path, start(first), killed, ended(first, "died"), start(second), ended(second))
    found = goodput(tmp_path)
    assert (found.seconds["stuck"], found.seconds["stopped"]) == (20.0, 10.0)


def test_a_repeated_account_and_a_torn_line_count_once(tmp_path):
    first, second = life(100.0, FIRST), life(140.0, SECOND, pid=2)
    write(tmp_path, start(first), ended(first, "died"), ended(first, "died"), start(second))
    with open(tmp_path / EVENTS_FILE, "a") as file:
        for line in ('{"event": "killed"}', '{"event": "saved", "time": 0}', "[" * 5000, "{}", '{"event": []}'):
            file.write(line + "\n")
        file.write('{"event": "end", "li')
    (tmp_path / ALIVE_FILE).write_text(json.dumps(second))
    assert goodput(tmp_path).total_s == pytest.approx(56.5)
    assert goodput(tmp_path).seconds["training"] == 28.0


def test_steps_that_an_earlier_life_had_trained_are_done_again(tmp_path):
    died = life(100.0, FIRST, step=7)
    write(tmp_path, start(died))
    (tmp_path / ALIVE_FILE).write_text(json.dumps(died))
    watchdog = Watchdog()
    with Ledger(tmp_path, watchdog) as opened:
        opened.begin()
        for step in (5, 6, 7, 8):
            watchdog.begin("training")
            watchdog.step = step
            time.sleep(0.01)
            watchdog.end_first_step()
        watchdog.begin("saving")
        spent = watchdog.seconds_by_account()
        assert set(spent) == {"opening the run", "first step", "training again", "training", "saving"}
        assert spent["training again"] >= 0.02
        assert spent["training"] >= 0.01
        opened.event("spike", step=8)
    assert [event["event"] for event in read_events(tmp_path)] == ["start", "died", "start", "spike", "end"]
    assert not (tmp_path / ALIVE_FILE).exists()


LIVES = """
import pathlib, sys, time
from hlat_jax.host import process
from hlat_jax.host.watchdog import Watchdog
from hlat_jax.run import goodput
goodput._PERIOD_S = 0.1
watchdog = Watchdog(began_s=process.began_s())
with goodput.Ledger(pathlib.Path(sys.argv[1]), watchdog) as ledger:
    ledger.begin()
    watchdog.begin("compiling")
    print("compiling", flush=True)
    time.sleep(6000)
"""


def test_a_killed_process_counts_up_to_its_last_entry(tmp_path):
    began_s = time.monotonic()
    with subprocess.Popen([sys.executable, "-c", LIVES, str(tmp_path)], stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        while json.loads((tmp_path / ALIVE_FILE).read_text())["spent"].get("compiling", 0.0) < 0.5:
            time.sleep(0.05)
        process.kill()
    with Ledger(tmp_path, Watchdog()) as opened:
        opened.begin()
    wall_s, found = time.monotonic() - began_s, goodput(tmp_path)
    # from the start of the interpreter to the end of the ledger; the machine may be slow in between
    assert 0.5 <= found.seconds["compile"] < found.total_s < wall_s + 0.1
    assert found.seconds["unknown"] == pytest.approx(0.0, abs=0.01)


def test_the_command_prints_a_partition(tmp_path, capsys):
    first = life(100.0, FIRST)
    first["life_s"] -= 1e-4  # its account is rounded
    write(tmp_path, start(first), ended(first))
    assert command.main(["goodput", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "training                      20.0 s   66.67%" in out
    assert "-0.0" not in out
    assert "total                         30.0 s  100.00%" in out
    assert command.main(["goodput", str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["compile"] == 4.0


def test_an_event_after_a_torn_line_is_not_lost(tmp_path):
    (tmp_path / EVENTS_FILE).write_text('{"event": "sav')
    with Ledger(tmp_path, Watchdog()) as opened:
        opened.event("saved", step=8)
    assert [event["event"] for event in read_events(tmp_path)] == ["start", "saved", "end"]
