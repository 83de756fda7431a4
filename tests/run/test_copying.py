"""A run with `checkpoint.copy_to` outlives its disk: a real server of S3 that fails, kills, and another disk."""

import concurrent.futures
import re
import shutil
import signal
import subprocess

import jobs
import micro
import pytest
from refusals import assert_names

from hlat_jax.run import copying
from hlat_jax.run.copying import COPY_CODE
from hlat_jax.run.goodput import read_events
from hlat_jax.store import bucket as bucket_lib
from hlat_jax.store.bucket import Bucket, whole_steps
from hlat_jax.store.integrity import seal

pytest.importorskip("moto", reason="pip install 'hlat_jax[test]'")
pytestmark = pytest.mark.xdist_group("copying")
HALF = 12


@pytest.fixture
def url(faults, tmp_path):
    return f"s3://bucket/{tmp_path.name}"


@pytest.fixture
def train(trained_run, train_here, url):
    """A function of a run folder and overrides that trains with copies at `url`: (exit code, stdout, stderr)."""

    def run(workdir, *overrides):
        overrides = ("data.validation=", f"checkpoint.copy_to={url}", *overrides)
        words = (f"--config.{override}" for override in overrides)
        return train_here(f"--config={trained_run.parent / 'micro.py'}", f"--workdir={workdir}", *words)

    return run


@pytest.fixture
def train_process(trained_run, url, tmp_path_factory):
    """A function of a run folder that starts a training process with copies at `url`."""
    cache = tmp_path_factory.getbasetemp() / "compiled"

    def start(workdir, *overrides):
        overrides = ("data.validation=", f"checkpoint.copy_to={url}", *overrides)
        words = micro.command(trained_run.parent / "micro.py", workdir, *overrides)
        env = micro.environment(cache)
        return subprocess.Popen(words, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    return start


def whole(url):
    return whole_steps(Bucket(url).sizes())


def differences(workdir, trained_run):
    return micro.differences(trained_run.parent / "micro.py", workdir, trained_run)


def refused(result, *names):
    code, _, err = result
    assert [line for line in err.splitlines() if line.startswith("error: ")]
    assert_names(err, *names)
    return code


@pytest.mark.slow
def test_a_run_on_an_empty_disk_goes_on_bit_for_bit(train, trained_run, url, faults, tmp_path):
    faults.slow_share, faults.cut_share = 0.1, 0.02
    code, out, err = train(tmp_path / "first", f"train.num_steps={HALF}")
    assert (code, out.count("copied ")) == (0, 3), err
    code, out, err = train(tmp_path / "second")
    assert code == 0, err
    assert f"resuming from step {HALF} of {micro.NUM_STEPS}" in out
    assert not differences(tmp_path / "second", trained_run)
    faults.slow_share = faults.cut_share = 0.0
    assert whole(url) == [24, 20]  # keep_last


@pytest.mark.slow
def test_copies_on_another_disk_are_a_run_folder(train, trained_run, tmp_path, train_here):
    disk = tmp_path / "disk"
    assert train(tmp_path / "first", f"checkpoint.copy_to={disk}")[0] == 0
    shutil.rmtree(tmp_path / "first")
    assert not differences(disk, trained_run)
    code, out, err = train(tmp_path / "second", f"checkpoint.copy_to={disk}")
    assert (code, "complete: " in out) == (0, True), err


@pytest.mark.slow
def test_a_store_that_fails_stops_no_training(train, trained_run, url, faults, tmp_path, monkeypatch):
    monkeypatch.setattr(bucket_lib, "OBJECT_S", 5)
    assert train(tmp_path / "run", "train.num_steps=5")[0] == 0
    faults.limit_bytes = faults.stored_bytes + 100  # the probe still fits
    code, out, err = train(tmp_path / "run")
    assert code == COPY_CODE
    failures = [line for line in out.splitlines() if line.startswith("copy FAILED")]
    assert len(failures) >= 2
    assert_names(failures[-1], url, "no free space", "step 24")
    recorded = [event["reason"] for event in read_events(tmp_path / "run") if event["event"] == "store_failed"]
    assert len(recorded) == len(failures)
    assert_names(err, url, "no free space", "step 24")
    assert not differences(tmp_path / "run", trained_run)
    faults.limit_bytes = 1 << 60
    code, out, err = train(tmp_path / "run")  # the same command on the complete run
    assert (code, whole(url)[0]) == (0, 24), err


def test_a_store_that_cannot_be_written_is_refused_before_compiling(train, url, tmp_path, monkeypatch):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "wrong")
    code, out, err = train(tmp_path / "run")
    assert refused((code, out, err), url, "access key") == 2
    assert "compiling" not in out
    monkeypatch.undo()


@pytest.mark.slow
def test_an_unreachable_store_refuses_a_new_run_but_no_old_one(train, trained_run, url, faults, tmp_path, monkeypatch):
    monkeypatch.setattr(bucket_lib, "OBJECT_S", 5)
    faults.down = True
    assert refused(train(tmp_path / "new"), url, "cannot be reached") == 1
    faults.down = False
    assert train(tmp_path / "old", f"train.num_steps={HALF}")[0] == 0
    with monkeypatch.context() as patch:
        patch.setenv("AWS_ACCESS_KEY_ID", "expired")
        code, out, _ = train(tmp_path / "old", "train.num_steps=15")
    assert (code, "copy FAILED" in out, f"resuming from step {HALF} of" in out) == (COPY_CODE, True, True)
    faults.down = True
    code, out, _ = train(tmp_path / "old")
    assert (code, "resuming from step 15 of" in out) == (COPY_CODE, True)
    assert not differences(tmp_path / "old", trained_run)


@pytest.mark.slow
def test_another_runs_bucket_is_refused_and_untouched(train, url, tmp_path):
    assert train(tmp_path / "first", "train.num_steps=5")[0] == 0
    assert train(tmp_path / "other", "train.num_steps=5", "checkpoint.copy_to=", "data.seed=7")[0] == 0
    before = Bucket(url).versions()
    assert refused(train(tmp_path / "other", "data.seed=7"), url, "another run") == 2
    assert refused(train(tmp_path / "empty", "data.seed=7"), url, "another run", "data.seed") == 2
    assert Bucket(url).versions() == before
    assert not (tmp_path / "empty/checkpoints").exists()


@pytest.mark.slow
def test_a_run_folder_older_than_its_bucket_gets_the_newest(train, trained_run, tmp_path):
    assert train(tmp_path / "run", "train.num_steps=5")[0] == 0
    shutil.copytree(tmp_path / "run", tmp_path / "backup")
    assert train(tmp_path / "run", f"train.num_steps={HALF}")[0] == 0
    code, out, err = train(tmp_path / "backup")
    assert (code, f"resuming from step {HALF} of" in out) == (0, True), err
    assert not differences(tmp_path / "backup", trained_run)


@pytest.mark.slow
def test_a_damaged_copy_is_named_and_the_one_before_it_fetched(train, trained_run, url, tmp_path):
    assert train(tmp_path / "first", f"train.num_steps={HALF}")[0] == 0
    bucket, name = Bucket(url), f"checkpoints/{HALF}/state/manifest.ocdbt"
    bucket.write(name, bytes(len(bucket.read(name))))
    code, out, err = train(tmp_path / "second")
    assert (code, "resuming from step 10 of" in out) == (0, True), err
    assert_names(next(line for line in out.splitlines() if "is damaged" in line), url, "step 12", "manifest.ocdbt")
    assert not differences(tmp_path / "second", trained_run)
    assert whole(url)[0] == 24


@pytest.mark.slow
@pytest.mark.parametrize(("count", "is_whole"), [(3, False), (16, True)])  # in the first checkpoint, in the second
def test_a_kill_in_mid_upload_and_one_in_mid_fetch_lose_nothing(
    count, is_whole, train, train_process, trained_run, url, faults, tmp_path
):
    def kill_at(process, method, number):
        seen = []

        def before(this, path):
            if this == method and re.search(r"/checkpoints/\d+/state/", path):
                seen.append(path)
                if len(seen) == number:
                    process.send_signal(signal.SIGKILL)

        faults.before = before

    with train_process(tmp_path / "first") as process:
        kill_at(process, "PUT", count)
        process.communicate()
    assert process.returncode == -signal.SIGKILL
    faults.before = lambda *_: None
    assert bool(whole(url)) == is_whole
    if not is_whole:  # nothing can be fetched, and the same disk resumes
        code, _, err = train(tmp_path / "first")
        assert (code, whole(url)[0]) == (0, 24), err
        assert not differences(tmp_path / "first", trained_run)
        return
    with train_process(tmp_path / "second") as process:
        kill_at(process, "GET", 4)
        process.communicate()
    assert process.returncode == -signal.SIGKILL
    faults.before = lambda *_: None
    assert not micro.saved_steps(tmp_path / "second")
    code, out, err = train(tmp_path / "second")
    assert (code, "resuming from step" in out) == (0, True), err
    assert not differences(tmp_path / "second", trained_run)


@pytest.mark.slow
def test_two_processes_send_and_fetch_their_own_shards(trained_run, url, faults, tmp_path):
    words = micro.command(trained_run.parent / "micro.py", tmp_path / "run")
    words += ["--config.data.validation=", f"--config.checkpoint.copy_to={url}"]
    for workdir, num_steps in (("first", HALF), ("second", micro.NUM_STEPS)):
        commands = [*words, f"--workdir={tmp_path / workdir}", f"--config.train.num_steps={num_steps}"]
        env = micro.environment(tmp_path / "cache")
        with jobs.run_job(jobs.commands_of(commands, 2), [env] * 2, tmp_path / f"{workdir}-log") as job:
            assert job.wait(300) == [0, 0], job.err(0) + job.err(1)
            out = job.out(0)
    assert f"resuming from step {HALF} of" in out
    names = Bucket(url).sizes()
    assert {*re.findall(r"24/state/(ocdbt.process_\d)/d/", " ".join(names))} == {"ocdbt.process_0", "ocdbt.process_1"}
    assert micro.row_differences(micro.rows(tmp_path / "second"), micro.rows(tmp_path / "second")) == []


@pytest.mark.slow
def test_a_start_that_was_superseded_copies_nothing_more(train, url, tmp_path):
    assert train(tmp_path / "run", "train.num_steps=5")[0] == 0
    copier = copying.Copier(_config(tmp_path, url), tmp_path / "run")
    copier._run = copying._own_run(tmp_path / "run")
    copier._claim()
    assert train(tmp_path / "elsewhere", "train.num_steps=7")[0] == 0  # takes over
    with pytest.raises(ValueError, match="another start"):
        copier._claim()
    copier.close()


def test_an_older_job_leaves_the_checkpoints_of_a_newer_one(url, tmp_path):
    older, newer = (copying.Copier(_config(tmp_path, url), tmp_path / name) for name in ("older", "newer"))
    for copier, steps in ((older, [10]), (newer, [12, 20]), (older, [20, 24])):
        copier._run = "run"
        for step in steps:
            _write_checkpoint(copier._workdir, step)
            copier.offer(step)
            concurrent.futures.wait(copier._work)
        if steps == [12, 20]:
            before = Bucket(url).versions()
            assert whole(url) == [20, 12]
    assert Bucket(url).versions() == before
    assert "another start of the run" in older.problem
    for copier in (older, newer):
        copier.close()


def _write_checkpoint(workdir, step):
    """Writes files that differ in each run folder, with their checksums."""
    folder = workdir / "checkpoints" / str(step)
    (folder / "state").mkdir(parents=True)
    (folder / "state/data").write_text(f"{workdir.name} {step}")
    seal(folder, ["state/data"])


def test_the_run_folder_itself_is_no_place_for_copies(train, tmp_path):
    result = train(tmp_path / "run", f"checkpoint.copy_to={tmp_path / 'run'}")
    assert refused(result, "checkpoint.copy_to", "run folder itself") == 2


@pytest.mark.parametrize("record", [None, b'{"run": "other"}'])  # with it, the other run has copies too
@pytest.mark.parametrize("has_checkpoint", [True, False])
def test_another_runs_folder_is_no_place_for_copies(train, tmp_path, record, has_checkpoint):
    other = tmp_path / "other"
    other.mkdir()
    (other / "config.json").write_text("{}")
    (other / "metrics.jsonl").write_text("")
    if has_checkpoint:
        _write_checkpoint(other, 5)
    if record is not None:
        (other / "copied_run.json").write_bytes(record)
    before = {path: path.is_file() and path.read_bytes() for path in other.rglob("*")}
    result = train(tmp_path / "run", f"checkpoint.copy_to={other}")
    assert refused(result, f"checkpoint.copy_to={other} is a run folder") == 2
    assert {path: path.is_file() and path.read_bytes() for path in other.rglob("*")} == before


def _config(folder, url):
    from hlat_jax.resolve import resolve

    return resolve(micro.config(folder, checkpoint__copy_to=url))


@pytest.mark.slow
def test_weights_are_read_from_a_bucket_as_from_a_disk(train, url, tmp_path, monkeypatch, generate_here, trained_run):
    from hlat_jax.hf.__main__ import main as hf_main

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert train(tmp_path / "run", "train.num_steps=5")[0] == 0
    words = ("--prompt=It is", "--max_tokens=8")
    texts = [generate_here(f"--checkpoint={path}", *words)[:2] for path in (tmp_path / "run", url)]
    assert texts[0][0] == 0
    assert texts[0] == texts[1]
    out = f"{url}-hf"
    with monkeypatch.context() as patch:
        send = Bucket.send
        patch.setattr(Bucket, "send", lambda self, path, name: send(self, path.with_name("gone"), name))
        assert hf_main(["export", url, f"--out={out}"]) == 1
    assert not Bucket(out).sizes().keys() - {".unfinished"}
    assert hf_main(["export", url, f"--out={out}"]) == 0
    assert hf_main(["hf", "export", str(tmp_path / "run"), f"--out={tmp_path / 'hf'}"][1:]) == 0
    local = {path.name: path.stat().st_size for path in (tmp_path / "hf").iterdir()}
    assert Bucket(out).sizes() == local
    code, printed, err = train(tmp_path / "begun", "checkpoint.copy_to=", f"train.init_from={out}", "train.num_steps=2")
    assert (code, "of an update" in printed) == (0, False), err
    assert micro.rows(tmp_path / "begun")[0]["loss"] < 7.5  # random weights: log 2048, 7.62


@pytest.mark.slow
def test_a_dataset_in_a_bucket_gives_the_same_batches(train, url, data_here, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    lines = [f'{{"text": "Document {number} says {number * number}, and no more."}}' for number in range(300)]
    (tmp_path / "a.jsonl").write_text("\n".join(lines) + "\n")
    hashes = []
    for out in (f"{url}-built", tmp_path / "built"):
        code, printed, err = data_here("build", tmp_path / "a.jsonl", f"--out={out}")
        assert (code, f"data.train={out}" in printed) == (0, True), err
        workdir = tmp_path / f"run{len(hashes)}"
        code, _, err = train(workdir, "checkpoint.copy_to=", f"data.train={out}", "train.num_steps=4")
        assert code == 0, err
        hashes.append([row["batch_hash"] for row in micro.rows(workdir)])
    assert hashes[0] == hashes[1]
    code, _, err = train(tmp_path / "no", "checkpoint.copy_to=", f"data.train={url}-nothing", "train.num_steps=4")
    assert code == 2
    assert_names(err, f"{url}-nothing", "data build")
