"""The folder of compiled programs that training uses by default."""

import os
import pathlib

import micro
import pytest

from hlat_jax import loop
from hlat_jax.host import compile_cache

DIR = compile_cache.FOLDER


def test_default_folder_belongs_to_this_user_unless_one_was_chosen_or_it_cannot_be_written(monkeypatch, tmp_path):
    environ = {"XDG_CACHE_HOME": str(tmp_path)}
    compile_cache.use_default_folder(environ)
    folder = pathlib.Path(environ[DIR])
    assert (folder.is_dir(), folder.parent) == (True, tmp_path / "hlat_jax" / "compiled")
    for chosen in (
        environ,
        {DIR: "/mine", "XDG_CACHE_HOME": "/dev/null"},
        {"JAX_ENABLE_COMPILATION_CACHE": "false"},
        {"XDG_CACHE_HOME": "/dev/null"},  # no folder can be made there
    ):
        found = dict(chosen)
        compile_cache.use_default_folder(found)
        assert found == chosen
    monkeypatch.setenv("HOME", "/home/me")
    assert compile_cache.describe("/home/me/.cache/x", platform="cpu") == "~/.cache/x"


def test_folder_is_proposed_where_programs_compile_for_long():
    assert compile_cache.describe(None, platform="cpu") == "none"
    assert compile_cache.describe(None, platform="gpu").startswith("none; with JAX_COMPILATION_CACHE_DIR=FOLDER")


def test_errors_of_xla_are_silent_only_for_programs_of_the_cpu(tmp_path):
    (tmp_path / "gpu").mkdir()
    (tmp_path / "gpu" / "nvidiactl").touch()
    for environ, machine, is_silent in (
        ({DIR: "/mine"}, "cpu", True),
        ({DIR: "/mine"}, "gpu", False),
        ({DIR: "/mine", "JAX_PLATFORMS": "cpu"}, "gpu", True),
        ({DIR: "/mine", "JAX_PLATFORMS": "cuda"}, "cpu", False),
        ({DIR: "/mine", "TF_CPP_MIN_LOG_LEVEL": "0"}, "cpu", False),
        ({}, "cpu", False),
    ):
        found = dict(environ)
        compile_cache.silence_tuning_hints(found, devices=tmp_path / machine)
        assert found == environ | ({"TF_CPP_MIN_LOG_LEVEL": "3"} if is_silent else {})


def test_programs_that_were_used_least_recently_are_removed(tmp_path, monkeypatch):
    monkeypatch.setattr(compile_cache, "_MOST_BYTES", 250)
    environ = {"XDG_CACHE_HOME": str(tmp_path)}
    compile_cache.use_default_folder(environ)
    folder = pathlib.Path(environ.pop(DIR))
    for age, name in enumerate("abcd"):
        (folder / name).write_bytes(bytes(100))
        os.utime(folder / name, (1e9 - age, 1e9 - age))
    os.utime(folder / "d", (2e9, 1e9 - 9))  # read since
    (folder / "e").mkdir()  # JAX keeps what it measured on a GPU in a folder there
    compile_cache.use_default_folder(environ)
    assert environ[DIR] == str(folder)
    assert sorted(path.name for path in folder.iterdir()) == ["a", "d", "e"]


@pytest.mark.slow
def test_training_of_one_process_uses_it_before_it_imports_jax(train_here, tmp_path, monkeypatch):
    for name, value in {DIR: "", "JAX_ENABLE_COMPILATION_CACHE": "", "XDG_CACHE_HOME": tmp_path / "c"}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
    monkeypatch.setattr(loop, "train", lambda *_, **__: 0)
    assert train_here("--config=tiny", f"--workdir={tmp_path / 'run'}")[0] == 0
    assert os.environ[DIR].startswith(str(tmp_path / "c"))


@pytest.mark.slow
def test_restart_that_reads_compiled_programs_writes_no_errors(tmp_path):
    env = micro.environment(tmp_path / "cache")
    env.pop("TF_CPP_MIN_LOG_LEVEL", None)
    config = micro.write_config(tmp_path)
    for run in ("first", "second"):
        done = micro.run(micro.command(config, tmp_path / run, "train.num_steps=2"), env)
        assert (done.returncode, done.stderr) == (0, "")
    assert any((tmp_path / "cache").iterdir())
