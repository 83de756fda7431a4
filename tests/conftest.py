"""Eight virtual CPU devices for every test, set before JAX is imported, and small fixtures."""

import contextlib
import gc
import importlib
import importlib.metadata
import os
import pathlib
import subprocess

os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Level 0 compiles three times faster and changes no rule of arithmetic; what tests run is too small to notice.
# XLA's older code generator, in one piece, compiles twice as fast (29 CPU-s instead of 58 for two rows of the covering
# array and the gradients beside transformers). Neither can hide a fault of ours: a generator comes after all that we
# write, lower, lint and count, and each bound here holds for any order of sums. The users' generator compiles the same
# steps in the jobs of tests/system, in the notebooks and in the commands of the pages.
_FLAGS = (
    "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0 "
    "--xla_cpu_parallel_codegen_split_count=1"
)
if tuple(map(int, importlib.metadata.version("jax").split(".")[:2])) < (0, 11):  # later ones have one generator
    _FLAGS += " --xla_cpu_use_fusion_emitters=false"
os.environ["XLA_FLAGS"] = f"{_FLAGS} {os.environ.get('XLA_FLAGS', '')}".strip()  # yours take precedence

_REPOSITORY = pathlib.Path(__file__).resolve().parents[1]
# for processes that a test starts in another folder
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(_REPOSITORY), os.environ.get("PYTHONPATH", ""))))
os.environ.setdefault("HYPOTHESIS_STORAGE_DIRECTORY", str(_REPOSITORY / ".hypothesis"))

import jax
import numpy as np
import pytest

with contextlib.suppress(ImportError):  # CI runs some tests without it
    import hypothesis

    unhurried = {"deadline": None, "suppress_health_check": [hypothesis.HealthCheck.too_slow]}
    hypothesis.settings.register_profile("unhurried", hypothesis.settings.default, **unhurried)
    hypothesis.settings.load_profile("unhurried")

os.environ["JAX_ENABLE_COMPILATION_CACHE"] = "false"  # of what tests start, which would use the folder of this user

import micro

import configs
from hlat_jax import config as config_lib
from hlat_jax.batch import concat_batch
from hlat_jax.parallel.sharding import make_layout

gc.set_threshold(100_000, 20, 20)  # traces make millions of objects and few cycles: 7% of the time


def pytest_addoption(parser):
    parser.addoption("--seed", type=int, default=0, help="of the covering array of tests/parallel, and of the programs")
    parser.addoption("--programs", type=int, default=100, help="number of random programs of tests/passes")


@pytest.hookimpl(tryfirst=True)  # before pytest deselects by marks
def pytest_collection_modifyitems(items):
    """Marks as slow all cases of a test but those that `quick_cases` names."""
    named: dict[tuple, set] = {}
    for item in items:
        marker = item.get_closest_marker("quick_cases")
        if marker is None:
            continue
        left = named.setdefault((item.path, item.originalname), set(marker.args))
        if item.callspec.id in marker.args:
            left.discard(item.callspec.id)
        else:
            item.add_marker(pytest.mark.slow)
    missing = [f"{path.name}: {name} has no case {left}" for (path, name), left in named.items() if left]
    # a single case that is asked for by its id collects only itself
    if missing and len({item.path for item in items}) > 1:
        raise pytest.UsageError("; ".join(missing))


@pytest.fixture(scope="session", autouse=True)
def compiled_once(tmp_path_factory):
    """Compiled programs on disk, for all workers of this session: many tests compile the same ones.

    An entry that another worker has half written is a warning, and the program is compiled again.
    """
    base = tmp_path_factory.getbasetemp()
    folder = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    jax.config.update("jax_compilation_cache_dir", str(folder / "compiled"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)


@pytest.fixture(scope="session", autouse=True)
def empty_folder(tmp_path_factory):
    """The current folder of all tests, so that none reads what a user has in theirs, such as runs/tiny."""
    before, folder = os.getcwd(), tmp_path_factory.mktemp("empty")
    os.chdir(folder)
    yield folder
    os.chdir(before)


@pytest.fixture(autouse=True)
def nothing_left_in_the_current_folder(empty_folder):
    yield
    assert not os.listdir(empty_folder), "a test writes into tmp_path alone"


@pytest.fixture(scope="session", autouse=True)
def no_progress_by_the_clock():
    """A slow machine prints no more than a fast one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hlat_jax.store.progress._LINE_S", 1e6)
        yield


@pytest.fixture
def small():
    """A mutable config of a GQA model that compiles in a second: 3 layers of 32, vocabulary 64."""
    return configs.mutable("small")


@pytest.fixture
def one_device():
    """The layout of a single device."""
    return make_layout(config_lib.ParallelConfig(), jax.devices()[:1])


@pytest.fixture
def make_batch():
    """A function of (seed, config) that makes a random `concat` batch."""

    def make(seed, config):
        shape = (config.data.batch_size, config.data.seq_len)
        return concat_batch(np.random.default_rng(seed).integers(0, config.model.vocab_size, shape))

    return make


@pytest.fixture(scope="session")
def trained_run(tmp_path_factory):
    """The folder of a run of 24 steps: a model of two layers of 32, 32 positions, the tokenizer of `tiny`."""
    folder = tmp_path_factory.mktemp("trained")
    assert micro.train(micro.config(folder, data__validation=""), folder / "run") == 0
    return folder / "run"


def _here(room):
    """Returns a fixture: a function of the words of a room's command that runs it in this process."""

    @pytest.fixture
    def run_here(monkeypatch, capsys):
        return micro.command_runner(importlib.import_module(f"hlat_jax.{room}.__main__").main, monkeypatch, capsys)

    return run_here


generate_here, evaluate_here, data_here, run_here = map(_here, ("generate", "evaluate", "data", "run"))


@pytest.fixture
def train_here(monkeypatch, capsys):
    """A function of the words of a training command that runs it in this process: (exit code, stdout, stderr)."""
    from hlat_jax import train

    run = micro.command_runner(train.main, monkeypatch, capsys)

    def run_on(*words, num_devices=1):
        devices = jax.devices("cpu")[:num_devices]
        monkeypatch.setattr(jax, "devices", lambda *_: devices)
        return run(*words)

    return run_on


@pytest.fixture
def small_disk(tmp_path):
    """A function of a size, such as "2m", that mounts, or resizes, a tmpfs and returns its folder."""
    folder = tmp_path / "disk"
    folder.mkdir()

    def mount(size):
        options = f"size={size}" + (",remount" if folder.is_mount() else "")
        words = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)]
        try:
            done = subprocess.run(words, capture_output=True, text=True, check=False)
        except FileNotFoundError:
            pytest.skip("no mount command")
        if done.returncode:
            pytest.skip(f"no tmpfs can be mounted here: {done.stderr.strip()}")
        return folder

    yield mount
    if folder.is_mount():
        subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.fixture
def one_torch_thread():
    """Small operations on several threads that wait for each other by spinning crawl on a busy machine."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def server():
    """The faults of a server of S3 on this machine, which the tests of a module share."""
    import bucket_server

    with bucket_server.serve() as (faults, _):
        yield faults


@pytest.fixture
def faults(server):
    """The faults of `server`; there are none at the beginning of a test."""
    import bucket_server

    vars(server).update(vars(bucket_server.Faults()))
    return server
