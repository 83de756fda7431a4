"""A run that is killed, stopped or given more steps ends with the bits of an uninterrupted one."""

import json
import random
import signal
import subprocess
import time

import kill_trials
import micro
import pytest

from hlat_jax.data.formats.paths import asset_path

pytestmark = pytest.mark.xdist_group("resume")  # its fixtures are costly: one process


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """(config file, environment with a compile cache, folder of the uninterrupted run)."""
    folder = tmp_path_factory.mktemp("resume")
    config, env = micro.write_config(folder), micro.environment(folder / "cache")
    workdir = folder / "uninterrupted"
    done = micro.run(micro.command(config, workdir), env)
    assert done.returncode == 0, done.stderr
    return config, env, workdir


@pytest.fixture
def ended_early(uninterrupted, tmp_path):
    """The folder of a run that was asked for half the steps."""
    config, env, _ = uninterrupted
    half = micro.run(micro.command(config, tmp_path / "half", f"train.num_steps={micro.NUM_STEPS // 2}"), env)
    assert half.returncode == 0, half.stderr
    return tmp_path / "half"


@pytest.mark.slow
def test_resume_after_sigkill_at_random_moments_equals_the_uninterrupted_run(uninterrupted, tmp_path):
    config, env, expected = uninterrupted
    rng = random.Random()
    workdir = tmp_path / "killed"
    words = micro.command(config, workdir)
    plans = ["before the first checkpoint", "while saving", "while validating", "after the first row"]
    kills = [kill_trials.kill_once(words, env, workdir, plan=plan, rng=rng) for plan in plans]
    last = micro.run(words, env)
    assert last.returncode == 0, last.stderr
    assert not kill_trials.differences(config, workdir, expected), kills
    assert [kill.hit for kill in kills[:2]] == ["before the first checkpoint", "asynchronous save"], kills
    assert sum(bool(kill.hit) for kill in kills) >= 3, kills
    assert micro.saved_steps(workdir) == micro.saved_steps(expected)


def assert_failed_with_one_line(done, *parts):
    """Asserts exit code 1, no traceback, and one line that has all parts."""
    assert done.returncode == 1, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    assert "Exception" not in done.stderr
    [line] = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    for part in parts:
        assert part in line


@pytest.mark.slow
def test_resume_after_a_full_disk_while_saving_equals_the_uninterrupted_run(uninterrupted, small_disk):
    config, env, expected = uninterrupted
    workdir = small_disk("3m") / "run"  # one or two checkpoints of 1.3 MB fit, keeping two needs room for three
    words = micro.command(config, workdir)
    full = micro.run(words, env)
    before = max(micro.saved_steps(workdir))
    step = before + micro.SAVE_EVERY
    untouched = f"The checkpoint of step {before} is untouched"
    assert_failed_with_one_line(full, f"the checkpoint of step {step} could not be written", "bytes free", untouched)
    wanted = [micro.exact(row) for row in micro.rows(expected)]
    rows = [micro.exact(row) for row in micro.rows(workdir)]
    assert rows == wanted[: len(rows)]
    assert rows[-1]["step"] >= step  # those of the checkpoint that failed were on the disk before it

    small_disk("64m")
    again = micro.run(words, env)
    assert again.returncode == 0, again.stderr
    assert f"resuming from step {before}" in again.stdout
    assert not kill_trials.differences(config, workdir, expected)


@pytest.mark.slow
def test_sigterm_saves_and_exits_0_and_the_same_command_resumes(uninterrupted, tmp_path):
    config, env, expected = uninterrupted
    words, workdir = micro.command(config, tmp_path / "stopped", "checkpoint.every_steps=0"), tmp_path / "stopped"
    process = subprocess.Popen(words, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    while process.poll() is None and not (workdir.is_dir() and kill_trials.stepping(workdir)):
        time.sleep(0.0005)
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=600)
    assert process.returncode == 0, err
    [stopped_at] = micro.saved_steps(workdir)
    assert stopped_at < micro.NUM_STEPS
    says = out.splitlines()[-1]
    assert "SIGTERM" in says
    assert f"step {stopped_at}" in says
    assert str(workdir) in says
    assert "run the same command to resume" in says

    again = micro.run(words, env)
    assert again.returncode == 0, again.stderr
    assert f"resuming from step {stopped_at} of {micro.NUM_STEPS}" in again.stdout
    rows, wanted = ([micro.exact(row) for row in micro.rows(folder)] for folder in (workdir, expected))
    assert rows == wanted
    assert micro.final_checkpoint(config, workdir)[:3] == micro.final_checkpoint(config, expected)[:3]


def test_resume_of_a_finished_run_says_that_it_is_complete(uninterrupted):
    config, env, workdir = uninterrupted
    before = {path: path.read_bytes() for path in workdir.rglob("*") if path.is_file()}
    again = micro.run(micro.command(config, workdir), env)
    assert again.returncode == 0, again.stderr
    assert f"complete: {workdir} is at step {micro.NUM_STEPS} of train.num_steps={micro.NUM_STEPS}" in again.stdout
    assert {path: path.read_bytes() for path in workdir.rglob("*") if path.is_file()} == before


@pytest.mark.slow
def test_resume_with_more_steps_and_other_logging_is_bitwise_identical(uninterrupted, ended_early):
    config, env, expected = uninterrupted
    changed = ("checkpoint.every_steps=7", "checkpoint.keep_last=1", "metrics.console=on", "data.num_threads=0")
    more = micro.run(micro.command(config, ended_early, *changed), env)
    assert more.returncode == 0, more.stderr
    assert f"resuming from step {micro.NUM_STEPS // 2} of {micro.NUM_STEPS}" in more.stdout
    rows, wanted = ([micro.exact(row) for row in micro.rows(folder)] for folder in (ended_early, expected))
    assert rows == wanted
    assert micro.final_checkpoint(config, ended_early)[:3] == micro.final_checkpoint(config, expected)[:3]
    assert micro.saved_steps(ended_early) == [micro.NUM_STEPS]


def test_resume_with_changed_settings_or_data_is_refused_and_names_them(uninterrupted, train_here, tmp_path):
    config, _, workdir = uninterrupted
    text = tmp_path / "other.jsonl"
    text.write_text("".join(json.dumps({"text": f"Text {number} of another corpus."}) + "\n" for number in range(9)))
    changed = {
        "optimizer.peak_lr=0.02": "optimizer.peak_lr: 0.01 in the checkpoint, 0.02 now",
        "model.norm_eps=1e-6": "model.norm_eps: 1e-05 in the checkpoint, 1e-06 now",
        "data.seed=5": "data.seed: 1234 in the checkpoint, 5 now",
        f"data.train={text}": "manifest.documents: 257 in the checkpoint, 8 now",
    }

    def kept():  # all but the index of lines, a cache that may be deleted
        files = [path for path in workdir.rglob("*") if path.is_file() and path.parent.name != "index"]
        return {path: path.read_bytes() for path in files}

    before = kept()
    for override, message in changed.items():
        code, _, err = train_here(f"--config={config}", f"--workdir={workdir}", f"--config.{override}")
        assert code == 2
        assert message in err
        assert "--workdir" in err
    assert kept() == before


def test_resume_with_another_tokenizer_of_the_same_size_is_refused(uninterrupted, train_here, tmp_path):
    config, _, workdir = uninterrupted
    other = tmp_path / "other.model"
    # with a further field that SentencePiece passes over: the same pieces in a file of another hash
    other.write_bytes(asset_path("austen_2k.model").read_bytes() + bytes([0xFA, 0x07, 0x01, 0x00]))
    code, _, err = train_here(f"--config={config}", f"--workdir={workdir}", f"--config.data.tokenizer={other}")
    assert code == 2
    assert "tokenizer_sha256" in err
