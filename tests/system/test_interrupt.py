"""Ctrl-C at random moments of each phase of a run: acknowledged at once, exit code 130, and nothing is lost."""

import random

import interrupt_trials
import kill_trials
import micro
import pytest

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("resume")]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """(config file, environment with a compile cache, folder of the uninterrupted run)."""
    folder = tmp_path_factory.mktemp("interrupt")
    config, env = micro.write_config(folder), micro.environment(folder / "cache")
    done = micro.run(micro.command(config, folder / "uninterrupted"), env)
    assert done.returncode == 0, done.stderr
    return config, env, folder / "uninterrupted"


def test_ctrl_c_in_every_phase_ends_with_130_and_the_same_command_resumes_to_the_same_bits(uninterrupted, tmp_path):
    config, env, expected = uninterrupted
    workdir, rng, found = tmp_path / "run", random.Random(), {}
    words = micro.command(config, workdir)
    for phase, longest_s, says in (
        ("importing", 1.0, "interrupted"),
        ("opening", 0.0, "interrupted while opening the run: nothing to save; there is no checkpoint yet"),
        ("compiling", 0.5, "interrupted while compiling: nothing to save; there is no checkpoint yet"),
        ("training", 0.1, "interrupted: finishing this "),  # step, or evaluation
        ("evaluating", 0.0, "interrupted: finishing this "),
        ("saving", 0.0, "interrupted: finishing "),
        ("compiling", 0.5, "interrupted while "),  # or restoring
    ):
        env_of = micro.environment() if phase == "compiling" else env
        delay_s = rng.uniform(0, longest_s)
        begins = interrupt_trials.PHASES[phase][0]
        trial = interrupt_trials.interrupt(words, env_of, workdir, begins=begins, delay_s=delay_s)
        found[phase] = trial
        assert not trial.problem(), (phase, delay_s, trial)
        assert not trial.too_late, (phase, delay_s)
        assert trial.lines[0].startswith(says), (phase, delay_s, trial)
        if trial.lines[0].startswith("interrupted: finishing "):
            step = micro.saved_steps(workdir)[-1]
            if step < micro.NUM_STEPS:
                assert f"stopped by SIGINT after step {step}, saved in {workdir}" in trial.out
    last = micro.run(words, env)
    assert last.returncode == 0, last.stderr
    assert not kill_trials.differences(config, workdir, expected), found


def test_a_second_ctrl_c_ends_a_training_at_once_with_code_130(uninterrupted, tmp_path):
    config, env, _ = uninterrupted
    words, begins = micro.command(config, tmp_path / "run"), interrupt_trials.PHASES["training"][0]
    trial = interrupt_trials.interrupt(words, env, tmp_path / "run", begins=begins, delay_s=0, second_s=0.05)
    assert trial.code == 130
    assert trial.lines[0].endswith("press Ctrl-C again to stop at once")
    assert len(trial.lines) == 1 or trial.lines[1:] == [
        "interrupted; run the same command to resume from the last checkpoint, or to start again without one"
    ]


def test_ctrl_c_at_a_random_moment_of_another_command_is_one_line_and_code_130(uninterrupted, tmp_path):
    config, env, run = uninterrupted
    words = interrupt_trials.commands(tmp_path, run, config=config)["evaluate --text"]
    delay_s, begins = random.uniform(0, 4), interrupt_trials.PHASES["importing"][0]
    trial = interrupt_trials.interrupt(words, env, tmp_path / "command", begins=begins, delay_s=delay_s)
    assert not trial.problem(), (delay_s, trial)
