"""The wheel: configs and assets are inside, and it trains where the repository is not."""

import importlib.util
import os
import shutil
import subprocess
import sys
import zipfile

import micro
import pytest

pytestmark = pytest.mark.xdist_group("wheel")  # its fixtures are costly: one process


def run(words, **how):
    """Returns what a command printed that succeeds."""
    done = subprocess.run(words, capture_output=True, text=True, timeout=600, check=False, **how)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The wheel of this checkout, built from a copy of it: building leaves folders behind."""
    folder = tmp_path_factory.mktemp("wheel")
    copy = folder / "source"
    copy.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE", "NOTICE"):
        shutil.copy(micro.REPOSITORY / name, copy)
    for name in ("hlat_jax", "configs", "tests"):
        shutil.copytree(micro.REPOSITORY / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    # with the setuptools that is here, so that no network is needed
    isolation = ["--no-build-isolation"] if importlib.util.find_spec("setuptools") else []
    run([sys.executable, "-m", "pip", "wheel", str(copy), "--no-deps", *isolation, "-w", str(folder / "dist"), "-q"])
    [path] = (folder / "dist").glob("hlat_jax-*.whl")
    return path


@pytest.mark.slow
def test_wheel_holds_all_modules_configs_and_assets_and_no_tests(wheel):
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    package, configs = micro.REPOSITORY / "hlat_jax", micro.REPOSITORY / "configs"
    expected = {f"hlat_jax/{path.relative_to(package).as_posix()}" for path in package.rglob("*.py")}
    expected |= {f"hlat_jax/configs/{path.name}" for path in configs.glob("*.py")}
    assets = [path for suffix in ("jsonl", "model", "mplstyle") for path in (package / "assets").glob(f"*.{suffix}")]
    expected |= {f"hlat_jax/assets/{path.name}" for path in assets}
    assert names == expected | {"hlat_jax/py.typed"}
    licences = {name.rsplit("/", 1)[-1] for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/licenses/" in name}
    assert licences == {"LICENSE", "NOTICE"}


@pytest.mark.slow
def test_installed_wheel_trains_tiny_outside_the_repository(wheel, tmp_path):
    target = tmp_path / "site"
    run([sys.executable, "-m", "pip", "install", str(wheel), "--no-deps", "--target", str(target), "-q"])
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    how = {"cwd": elsewhere, "env": micro.environment() | {"PYTHONPATH": str(target)}}

    where = [sys.executable, "-c", "import hlat_jax.cli.config_files as c; print(c.__file__, c.config_folder())"]
    for path in run(where, **how).split():
        assert os.path.commonpath([path, target]) == str(target)

    run([target / "bin" / "hlat", "plan", "choices", "--config=tiny", "--platform=cpu"], **how)
    short = ("train.num_steps=2", "train.eval_every_steps=2", "train.num_eval_batches=1", "train.sample_prompt=")
    words = [sys.executable, "-m", "hlat_jax.train", "--config=tiny", *(f"--config.{word}" for word in short)]
    assert "validation loss" in run(words, **how)
    workdir = elsewhere / "runs" / "tiny"
    assert [row["step"] for row in micro.rows(workdir) if "loss" in row] == [1, 2]
    assert micro.saved_steps(workdir) == [2]
