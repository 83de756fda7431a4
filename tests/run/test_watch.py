"""A run watched from outside: real run folders, a clock of the test, and a webhook on this machine."""

import contextlib
import http.server
import json
import math
import shutil
import subprocess
import sys
import threading
import time

import micro
import pytest
from refusals import assert_names, assert_refused, refused

from hlat_jax.host.watchdog import Watchdog
from hlat_jax.run import copying, watch
from hlat_jax.run.goodput import COPYING, EVENTS_FILE, Ledger, read_events
from hlat_jax.run.watch import CODES, Limits, Watch
from hlat_jax.store.metrics import ROWS_FILE, rewind


@pytest.fixture
def ledger(tmp_path):
    """The ledger of a run in tmp_path that has begun; what it does is written by hand, not by its thread."""
    with contextlib.ExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        patch.setattr("hlat_jax.run.goodput._PERIOD_S", 1e6)
        opened = stack.enter_context(Ledger(tmp_path, Watchdog()))
        opened.begin()
        opened.watchdog = opened._watchdog
        yield opened


def write_rows(folder, steps, **fields):
    with open(folder / ROWS_FILE, "a") as file:
        for step in steps:
            values = {"loss": 3 + math.sin(step) / 100, "grad_norm": 1 + math.cos(step) / 100}
            file.write(json.dumps({"step": step, "tokens": step} | values | fields) + "\n")


def kinds(alerts):
    return [alert.kind for alert in alerts]


def test_a_run_that_makes_steps_is_no_alert(ledger, tmp_path):
    seen = Watch(tmp_path, Limits(stalled_s=100))
    for look in range(50):
        write_rows(tmp_path, range(10 * look, 10 * look + 10))
        assert seen.look(99.0 * look) == []
    assert seen.step == 499


def test_a_stalled_run_is_an_alert_once_until_it_goes_on(ledger, tmp_path):
    seen = Watch(tmp_path, Limits(stalled_s=100))
    ledger.watchdog.begin("compiling")
    ledger.beat()
    assert seen.look(0.0) == seen.look(99.0) == []
    [alert] = seen.look(100.0)
    assert_names(alert.text, "100 s", "step 0", "while compiling")
    assert seen.look(1000.0) == []
    ledger.watchdog.begin("training")
    ledger.beat()
    assert seen.look(1001.0) == seen.look(1100.0) == []
    assert kinds(seen.look(1101.0)) == ["stalled"]
    write_rows(tmp_path, [1])
    assert seen.look(1102.0) == []
    (tmp_path / "alive.json").unlink()  # the process was killed, and nothing starts it again
    assert seen.look(1103.0) == []
    [alert] = seen.look(2000.0)
    assert_names(alert.text, "no process trains", "after step 1")
    assert Watch(tmp_path, Limits(stalled_s=0)).look(1e9) == []


def test_the_error_of_a_run_that_ended_is_in_the_alert(tmp_path):
    def run():
        with Ledger(tmp_path, Watchdog()) as opened:
            opened.begin()
            raise OSError("the disk is full")

    with refused("disk", kind=OSError):
        run()
    seen = Watch(tmp_path, Limits(stalled_s=1))
    seen.look(0.0)
    [alert] = seen.look(2.0)
    assert_names(alert.text, "no process trains", "the disk is full")


def test_the_step_of_a_run_that_ended_before_is_in_the_alert(tmp_path):
    for write in (lambda: None, lambda: write_rows(tmp_path, range(1, 8))):  # rows come first, if there are some
        write()
        watchdog = Watchdog()
        with Ledger(tmp_path, watchdog) as opened:
            opened.begin()
            watchdog.step = 6
        seen = Watch(tmp_path, Limits(stalled_s=1))
        seen.look(0.0)
        [alert] = seen.look(2.0)
        assert_names(alert.text, f"after step {7 if (tmp_path / ROWS_FILE).exists() else 6}, and no process trains")


def test_spikes_are_found_with_and_without_the_runs_own_search(ledger, tmp_path):
    write_rows(tmp_path, range(1, 200), nonfinite=0)
    seen = Watch(tmp_path, Limits())  # knows the rows before
    write_rows(tmp_path, [200], loss=3.5)
    write_rows(tmp_path, [201], grad_norm=9.0)
    write_rows(tmp_path, [202])
    [alert] = seen.look(0.0)
    assert alert.kind == "spike"
    assert_names(alert.text, "step 200", "3.5", "1 step after it")
    write_rows(tmp_path, [203], loss=3.5, spike=0)  # the run says it is none
    write_rows(tmp_path, [204], spike=1)
    [alert] = seen.look(1.0)
    assert_names(alert.text, "step 204")
    write_rows(tmp_path, [205], loss=3.5)
    assert Watch(tmp_path, Limits(spike_sigmas=500)).look(0.0) == []


def test_first_steps_are_no_spikes(ledger, tmp_path):
    seen = Watch(tmp_path, Limits())
    write_rows(tmp_path, range(1, 60))
    write_rows(tmp_path, [60], loss=100.0)
    assert seen.look(0.0) == []


def test_steps_that_are_not_finite_are_one_alert_a_look(ledger, tmp_path):
    seen = Watch(tmp_path, Limits())
    write_rows(tmp_path, [1, 2, 3], loss=math.nan, grad_norm=math.inf, nonfinite=1)
    [alert] = seen.look(0.0)
    assert alert.kind == "not finite"
    assert_names(alert.text, "step 1", "nan", "2 steps after it")
    assert seen.look(1.0) == []


def test_events_of_the_store_and_of_devices_are_alerts(ledger, tmp_path):
    ledger.event("store_failed", reason="503 of s3://b")
    seen = Watch(tmp_path, Limits())  # not of what was before
    assert seen.look(0.0) == []
    ledger.event("store_failed", step=7, reason="503 of s3://b")
    ledger.event("corruption", step=8, device="cpu:3")
    ledger.event("saved", step=9)
    first, second = seen.look(0.0)
    assert kinds([first, second]) == ["store failing", "corruption"]
    assert_names(first.text, "step 7", "503 of s3://b")
    assert_names(second.text, "cpu:3")


def test_goodput_below_the_limit_is_an_alert(tmp_path):
    now = time.time()
    start = {"event": "start", "pid": 1, "host": "n", "began": now, "time": now}
    (tmp_path / "events.jsonl").write_text(json.dumps(start) + "\n")

    def trained(seconds):
        life = {"pid": 1, "host": "n", "began": now, "life_s": seconds, "step": int(seconds), "at": now}
        (tmp_path / "alive.json").write_text(json.dumps(life | {"spent": {"training": seconds}, "doing": "training"}))

    seen = Watch(tmp_path, Limits(goodput=0.8, goodput_s=100))
    for now_s, trained_s, expected in ((0, 0, 0), (50, 10, 0), (99, 20, 0), (110, 95, 0), (220, 180, 1), (230, 185, 0),
                                       (340, 300, 0), (450, 310, 1)):  # fmt: skip
        trained(float(trained_s))
        assert kinds(seen.look(float(now_s))) == ["goodput"] * expected, now_s
    assert Watch(tmp_path, Limits()).look(1e6) == []


def test_rows_that_a_resumed_run_keeps_are_not_new(ledger, tmp_path):
    write_rows(tmp_path, [*range(1, 5)], spike=0)
    write_rows(tmp_path, [5], spike=1)
    write_rows(tmp_path, range(6, 21), spike=0)
    seen = Watch(tmp_path, Limits())
    ledger.event("saved", step=10)
    assert seen.look(0.0) == []
    rewind(tmp_path / ROWS_FILE, 10)  # as the next start does
    ledger.event("start", pid=2, host="n", began=1.0)
    assert seen.look(1.0) == []
    write_rows(tmp_path, [11], spike=1)
    [alert] = seen.look(2.0)
    assert_names(alert.text, "step 11")
    write_rows(tmp_path, [12, 13], spike=0)
    seen.look(3.0)
    rewind(tmp_path / ROWS_FILE, 4)  # the checkpoint of step 10 was damaged
    write_rows(tmp_path, [5], spike=1)
    ledger.event("start", pid=3, host="n", began=2.0)
    ledger.event("rewound", step=4)
    ledger.event("saved", step=6)
    [alert] = seen.look(4.0)
    assert_names(alert.text, "step 5")


def test_torn_and_damaged_rows_are_read_once_whole(ledger, tmp_path):
    seen = Watch(tmp_path, Limits())
    line = json.dumps({"step": 1, "loss": 1.0, "nonfinite": 1})
    for text, expected in (("[" * 9 + "\n{}\n3\n" + line[:9], 0), (line[9:], 0), ("\n", 1)):
        with open(tmp_path / ROWS_FILE, "a") as file:
            file.write(text)
        assert len(seen.look(0.0)) == expected


class Webhook(http.server.BaseHTTPRequestHandler):
    """Keeps what is posted, after it has refused the number of requests that `failing` still has."""

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.server.failing:
            self.server.failing -= 1
            return self.send_error(503)
        self.server.taken.append(json.loads(body))
        self.send_response(200)
        self.end_headers()
        return None

    def log_message(self, *_): ...


@pytest.fixture
def webhook():
    with http.server.HTTPServer(("127.0.0.1", 0), Webhook) as server:
        server.taken, server.failing = [], 0
        server.url = f"http://127.0.0.1:{server.server_port}/services/secret"
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def command(*words):
    words = [sys.executable, "-m", "hlat_jax.run", "watch", *map(str, words)]
    return subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def until(ready):
    deadline = time.monotonic() + 300
    while not ready():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_the_exit_code_of_the_command_is_the_alert(ledger, tmp_path):
    started = command(tmp_path, "--every_s=0.05", "--stalled_s=1")
    out, _ = started.communicate(timeout=300)
    assert (started.returncode, out.partition(":")[0]) == (CODES["stalled"], "stalled")
    assert sorted(CODES.values()) == list(range(3, 3 + len(CODES)))


@pytest.mark.slow
def test_a_real_run_is_watched_to_its_end(tmp_path, webhook):
    """Of 300 steps some are a deviation above the mean of those before. The webhook refuses two requests."""
    config, workdir = micro.write_config(tmp_path), tmp_path / "run"
    env = micro.environment(tmp_path / "cache")
    words = micro.command(config, workdir, "data.validation=", "checkpoint.every_steps=0", "train.num_steps=300")
    training = subprocess.Popen(words, env=env, stdout=subprocess.DEVNULL)
    until(lambda: (workdir / "events.jsonl").exists() or training.poll() is not None)
    webhook.failing = 2
    started = command(workdir, "--every_s=0.1", "--spike_sigmas=1", f"--webhook={webhook.url}")
    assert training.wait(600) == 0
    out, error = started.communicate(timeout=300)
    assert (started.returncode, out.splitlines()[-1]) == (0, f"complete: {workdir} is at step 300.")
    alerts = out.splitlines()[:-1]
    assert alerts
    assert [f"run: {line}" for line in alerts] == [posted["text"] for posted in webhook.taken]
    assert {posted["code"] for posted in webhook.taken} == {CODES["spike"]}
    assert {posted["run"] for posted in webhook.taken} == {str(workdir)}
    assert_names(error, "the webhook on 127.0.0.1", "503")
    assert "secret" not in out + error
    again = command(workdir)
    assert again.communicate(timeout=300)[1] == ""
    assert again.returncode == 0


def test_an_alert_that_the_webhook_never_takes_is_an_error(ledger, tmp_path, webhook, monkeypatch, capsys):
    monkeypatch.setattr(watch, "_TRY_S", 0.01)
    webhook.failing = 10**6
    ledger.event("complete", step=1)
    original = Watch.look

    def look(self, now_s):  # the run ends with a spike
        write_rows(tmp_path, [1], spike=1)
        return original(self, now_s)

    monkeypatch.setattr(Watch, "look", look)
    with refused("127.0.0.1", "1 alert", "503", kind=OSError):
        watch.watch(tmp_path, Limits(), webhook=webhook.url, every_s=0.01)
    assert "secret" not in capsys.readouterr().err


def test_a_run_is_not_complete_before_its_last_copy(train_here, trained_run, tmp_path, monkeypatch):
    def finish(copier, signals):
        seen = Watch(workdir, Limits())
        assert seen.look(0.0) == []
        copier.on_failure("503 of s3://b")
        looks.append((kinds(seen.look(1.0)), seen.is_complete))
        return "503 of s3://b"

    workdir, looks = tmp_path / "run", []
    monkeypatch.setattr(copying.Copier, "finish", finish)
    words = (f"--config={trained_run.parent / 'micro.py'}", "--config.train.num_steps=1", "--config.data.validation=")
    assert train_here(*words, f"--workdir={workdir}")[0] == copying.COPY_CODE
    assert looks == [(["store failing"], False)]
    assert [event["event"] for event in read_events(workdir)][-3:] == ["store_failed", "complete", "end"]


def test_a_run_killed_in_its_last_copy_is_said_to_lack_it(ledger, tmp_path):
    seen = Watch(tmp_path, Limits(stalled_s=100))
    ledger.watchdog.step = 72
    ledger.watchdog.begin(COPYING)
    ledger.beat()
    assert seen.look(0.0) == seen.look(99.0) == []
    [alert] = seen.look(100.0)
    assert alert.kind == "store failing"
    assert_names(alert.text, "step 72", "100 s", "run it again")
    assert seen.look(1000.0) == []


@pytest.mark.slow
def test_a_start_that_only_copies_completes_the_run(train_here, trained_run, tmp_path):
    workdir = shutil.copytree(trained_run, tmp_path / "run", symlinks=True)
    lines = (workdir / EVENTS_FILE).read_text().splitlines(keepends=True)
    until = next(index for index, line in enumerate(lines) if '"complete"' in line)  # a kill in the last copy
    (workdir / EVENTS_FILE).write_text("".join(lines[:until]))
    seen = Watch(workdir, Limits())
    assert (seen.look(0.0), seen.is_complete) == ([], False)
    words = (f"--config={trained_run.parent / 'micro.py'}", "--config.data.validation=", f"--workdir={workdir}")
    assert train_here(*words, f"--config.checkpoint.copy_to={tmp_path / 'disk'}")[0] == 0
    assert (seen.look(1.0), seen.is_complete, seen.step) == ([], True, micro.NUM_STEPS)
    assert [event["event"] for event in read_events(workdir)][-3:] == ["start", "complete", "end"]
    before = (workdir / EVENTS_FILE).read_bytes()
    assert train_here(*words, f"--config.checkpoint.copy_to={tmp_path / 'disk'}")[0] == 0
    assert (workdir / EVENTS_FILE).read_bytes() == before


def test_events_that_vanish_are_one_line(ledger, tmp_path, run_here, monkeypatch):
    events, original = tmp_path / "events.jsonl", Watch.look
    for spoil in (lambda: events.write_text(""), events.unlink):
        ledger.event("saved", step=1)
        monkeypatch.setattr(Watch, "look", lambda self, now_s, spoil=spoil: (spoil(), original(self, now_s))[1])
        assert_refused(run_here("watch", tmp_path), str(events), "gone")


def test_wrong_words_of_watch_are_refused(tmp_path, run_here):
    assert_refused(run_here("watch"), "RUN")
    assert_refused(run_here("watch", tmp_path, tmp_path), "1 run folder, not 2")
    assert_refused(run_here("watch", tmp_path), f"RUN={tmp_path}", "events.jsonl")
    assert_refused(run_here("watch", tmp_path / "no"), "RUN")
    assert_refused(run_here("watch", tmp_path, "--goodput=2"), "--goodput=2")
    assert_refused(run_here("watch", tmp_path, "--stalled_s=-1"), "--stalled_s=-1")
    for word in ("--stalled_s=nan", "--stalled_s=inf", "--goodput=nan", "--every_s=inf"):
        assert_refused(run_here("watch", tmp_path, word), word)
    for url in ("ftp://host/secret", "secret", "http:///secret"):
        result = run_here("watch", tmp_path, f"--webhook={url}")
        assert_refused(result, "--webhook=", "https://")
        assert "secret" not in result[2]


def test_watch_of_a_run_imports_no_jax(trained_run):
    code = "import sys; from hlat_jax.run.__main__ import main; main(sys.argv[1:]); assert 'jax' not in sys.modules"
    words = [sys.executable, "-c", code, "watch", str(trained_run)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=300, check=True)
    assert done.stdout == f"complete: {trained_run} is at step {micro.NUM_STEPS}.\n"
