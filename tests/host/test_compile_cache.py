"""The folder of compiled programs that training uses by default."""

import os
import pathlib

import micro
import neuron_machine
import pytest
from refusals import refused

from hlat_jax import loop
from hlat_jax.host import compile_cache

DIR = compile_cache.FOLDER


def test_default_folder_belongs_to_this_user(monkeypatch, tmp_path):
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
    assert compile_cache.describe(None, platform="gpu").startswith("none (with JAX_COMPILATION_CACHE_DIR=FOLDER")


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


# The trial of a start on Trainium, whose processes run on the CPU here


@pytest.mark.slow  # the doctor's test has it too
def test_cache_works_where_a_second_process_reads_the_program_of_the_first():
    assert compile_cache.fault_of_cache(dict(os.environ)) == ""


@pytest.mark.parametrize("crash", [False, True])
def test_fault_of_the_cache_is_told_from_one_of_the_machine(tmp_path, crash):
    def environ(when):
        path = neuron_machine.breaking_cache(tmp_path / when, when=when, crash=crash)
        return dict(os.environ) | {"PYTHONPATH": path}

    fault = compile_cache.fault_of_cache(environ("cached"))
    assert ("RET_CHECK" in fault, "-6" in fault) == (True, crash)
    with refused("RET_CHECK", kind=RuntimeError):
        compile_cache.fault_of_cache(environ("always"))


@pytest.mark.slow
def test_program_that_the_second_process_does_not_find_is_a_fault(tmp_path):
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\n"
        "if sys.argv[0] == '-c':\n"
        "    from jax._src import compilation_cache\n"
        "    compilation_cache.get_executable_and_time = lambda *_, **__: (None, None)\n"
    )
    environ = dict(os.environ) | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{os.environ['PYTHONPATH']}"}
    assert compile_cache.fault_of_cache(environ)


def test_trial_runs_one_device_without_the_variables_of_a_job(monkeypatch):
    seen = []
    monkeypatch.setattr(compile_cache, "_run_trial", lambda use, environ, _: seen.append((use, environ)) or "")
    job = {"NEURON_RT_ROOT_COMM_ID": "a:41000", "NEURON_RUN_TRIVIAL_COMPUTATION_ON_CPU": "1", DIR: "/mine"}
    assert compile_cache.fault_of_cache(job) == ""
    (wrote, cached), (read, again) = seen
    assert (wrote, read, again) == ("write", "read", cached)
    assert not cached.keys() & job.keys() - {DIR}
    assert (cached["NEURON_RT_NUM_CORES"], cached[DIR] != "/mine") == ("1", True)
    compile_cache.fault_of_cache({"NEURON_RT_VISIBLE_CORES": "8-15"})
    assert "NEURON_RT_NUM_CORES" not in seen[-1][1]


def test_trial_that_does_not_end_is_a_fault():
    assert "0.01 s" in compile_cache._run_trial("write", dict(os.environ), 0.01)


def test_result_of_a_trial_is_kept_until_a_package_or_the_driver_changes(tmp_path, monkeypatch):
    tried = []
    monkeypatch.setattr(compile_cache, "fault_of_cache", lambda environ: tried.append(1) or "RET_CHECK")
    monkeypatch.setattr(compile_cache, "installed_versions", lambda names: {"jax": "0.10.0"})
    for _ in range(2):
        environ = {DIR: str(tmp_path / "jax")}
        line = compile_cache.leave_out_faulty(environ)
        assert (environ, "fails here: RET_CHECK" in line, len(tried)) == ({}, True, 1)
    monkeypatch.setattr(compile_cache, "installed_versions", lambda names: {"jax": "0.10.2"})
    for driver in ("", "2.31.7.0", "2.31.8.0", "2.31.8.0"):
        compile_cache.leave_out_faulty({DIR: str(tmp_path / "jax")}, driver=driver)
    assert len(tried) == 4
    for damaged in ("[]", "{"):
        next((tmp_path / "jax").iterdir()).write_text(damaged)
        compile_cache.leave_out_faulty({DIR: str(tmp_path / "jax")})
    assert len(tried) == 6


def test_a_cache_is_kept_unless_it_fails(tmp_path, monkeypatch):
    def fails(environ):
        raise RuntimeError("no device")

    for environ, trial, line in (
        ({DIR: str(tmp_path)}, fails, "compile cache    not tried: no device"),
        ({DIR: str(tmp_path)}, lambda environ: "", ""),
        ({DIR: "/mine", "JAX_ENABLE_COMPILATION_CACHE": "false"}, fails, ""),
        ({}, fails, ""),
    ):
        monkeypatch.setattr(compile_cache, "fault_of_cache", trial)
        found = dict(environ)
        assert compile_cache.leave_out_faulty(found) == line
        assert found == environ


def test_start_on_neuron_names_the_compilers_cache_where_it_is_alone(monkeypatch):
    monkeypatch.setenv("NEURON_COMPILE_CACHE_URL", "/var/tmp/x")
    assert compile_cache.describe(None, platform="neuron") == "only neuronx-cc's, /var/tmp/x"
    assert compile_cache.describe(None, platform="cpu") == "none"
