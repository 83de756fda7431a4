"""What is published: the source distribution has the repository, and the wheel trains where the repository is not."""

import importlib.util
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile

import micro
import pytest

pytestmark = pytest.mark.xdist_group("wheel")  # its fixtures are costly: one process


def run(words, **how):
    """Returns what a command printed that succeeds."""
    done = subprocess.run(words, capture_output=True, text=True, timeout=600, check=False, **how)
    assert done.returncode == 0, done.stderr
    return done.stdout


FOLDERS = (".ci", "benchmarks", "configs", "docs", "hlat_jax", "launch", "notebooks", "tests", "tools")
FILES = (
    *("CHANGELOG.md", "CONTRIBUTING.md", "LICENSE", "NOTICE", "README.md", "SECURITY.md"),
    *("MANIFEST.in", "constraints.txt", "pyproject.toml"),
)


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A copy of this checkout: building leaves folders behind."""
    copy = tmp_path_factory.mktemp("source")
    for name in FOLDERS:
        ignored = shutil.ignore_patterns("__pycache__", "runs", ".*_cache")
        shutil.copytree(micro.REPOSITORY / name, copy / name, ignore=ignored)
    for name in FILES:
        shutil.copy(micro.REPOSITORY / name, copy)
    return copy


@pytest.fixture(scope="module")
def sdist(source, tmp_path_factory):
    """The source distribution of this checkout."""
    out, isolation = tmp_path_factory.mktemp("dist"), ["--no-isolation"] * bool(importlib.util.find_spec("setuptools"))
    run([sys.executable, "-m", "build", "--sdist", *isolation, "--outdir", str(out), str(source)])
    [path] = out.glob("hlat_jax-*.tar.gz")
    return path


@pytest.fixture(scope="module")
def wheel(sdist, tmp_path_factory):
    """The wheel that is built of the source distribution."""
    out = tmp_path_factory.mktemp("wheel")
    # with the setuptools that is here, so that no network is needed
    isolation = ["--no-build-isolation"] if importlib.util.find_spec("setuptools") else []
    run([sys.executable, "-m", "pip", "wheel", str(sdist), "--no-deps", *isolation, "-w", str(out), "-q"])
    [path] = out.glob("hlat_jax-*.whl")
    return path


@pytest.mark.slow
def test_source_distribution_holds_all_that_the_repository_has(sdist, source):
    with tarfile.open(sdist) as archive:
        files = {member.name.partition("/")[2]: member for member in archive.getmembers() if member.isfile()}
    built = {"PKG-INFO", "setup.cfg"} | {name for name in files if name.startswith("hlat_jax.egg-info/")}
    copied = {path.relative_to(source).as_posix() for path in source.rglob("*") if path.is_file()}
    assert set(files) - built == {name for name in copied if not name.startswith("hlat_jax.egg-info/")}
    assert files["launch/node.sh"].mode & 0o111


@pytest.mark.slow
def test_wheel_holds_all_modules_configs_and_assets_and_no_tests(wheel):
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    package, configs = micro.REPOSITORY / "hlat_jax", micro.REPOSITORY / "configs"
    expected = {f"hlat_jax/{path.relative_to(package).as_posix()}" for path in package.rglob("*.py")}
    expected |= {f"hlat_jax/configs/{path.name}" for path in configs.glob("*.py")}
    assets = [path for suffix in ("jsonl", "model", "mplstyle") for path in (package / "assets").glob(f"*.{suffix}")]
    expected |= {f"hlat_jax/assets/{path.name}" for path in assets}
    launch = micro.REPOSITORY / "launch"
    expected |= {
        f"hlat_jax/launch/{path.relative_to(launch).as_posix()}" for path in launch.rglob("*") if path.is_file()
    }
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

    script = run([target / "bin" / "hlat", "launch", "restart.sh"], **how)
    assert script == (micro.REPOSITORY / "launch" / "restart.sh").read_text()
    run([target / "bin" / "hlat", "plan", "choices", "--config=tiny", "--platform=cpu"], **how)
    short = ("train.num_steps=2", "train.eval_every_steps=2", "train.num_eval_batches=1", "train.sample_prompt=")
    words = [sys.executable, "-m", "hlat_jax.train", "--config=tiny", *(f"--config.{word}" for word in short)]
    run(words, **how)
    workdir = elsewhere / "runs" / "tiny"
    assert [row["step"] for row in micro.rows(workdir) if "loss" in row] == [1, 2]
    assert any("eval_loss" in row for row in micro.rows(workdir))
    assert micro.saved_steps(workdir) == [2]
