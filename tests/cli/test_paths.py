"""A URL given for a path that cannot be one: one line, exit code 2, before JAX and before anything is written.

A path that may be in a bucket is tried with a URL of another kind.
"""

import dataclasses
import json
import pathlib
import re
import subprocess
import sys

import pytest

from hlat_jax import config as config_lib
from hlat_jax import hf
from hlat_jax.cli.config_files import load
from hlat_jax.cli.flags import define_path, parse
from hlat_jax.cli.hlat import AREAS
from hlat_jax.data.tokenizer import Tokenizer
from hlat_jax.resolve import resolve
from hlat_jax.train import train

LAUNCH = pathlib.Path(__file__).resolve().parents[2] / "launch"
# Command -> what it needs beside the flags that are tried, and its positional arguments that are paths.
COMMANDS = {
    "train": (["--config=tiny"], []),
    "run goodput": ([], ["s3://bucket/x"]),
    "generate": (["--checkpoint=runs/a", "--prompt=a"], []),
    "evaluate": (["--checkpoint=runs/a", "--validation"], []),
    "data build": (["a.jsonl", "--out=b"], []),
    "data tokenizer": (["a.jsonl", "--out=b"], []),
    "data stats": (["--config=tiny"], []),
    "data peek": (["--config=tiny", "--step=1"], []),
    "hf import": (["--out=b"], ["ftp://host/x"]),
    "hf export": (["--out=b"], ["ftp://host/x"]),
    "hf average": (["--out=b"], ["ftp://host/x", "ftp://host/y"]),
    "plan": (["--config=tiny"], []),
    "plan choices": (["--config=tiny"], []),
    "neuron lint": (["--config=tiny"], []),
    "neuron ladder": (["--config=tiny"], []),
    "neuron hlo": (["--config=tiny"], []),
    "neuron doctor": (["--config=tiny"], []),
    "neuron env": (["--config=tiny", "--instance=trn1.32xlarge"], []),
    "launch": ([], []),
}
# Texts that look like a path in the help and are none, or that may be a URL and have an answer of their own.
NO_PATHS = ("--data", "--text_field")
TEXTS = ("data.train", "data.validation")
_MEANS_A_PATH = re.compile(r"(?i)\b(folders?|files?|path|table to write)\b|\.model\b|RUN@")

# Runs each command in one process: its flags, as they are declared while it prints its help, then each with a URL.
DRIVER = """
import contextlib, importlib, io, json, os, sys
from absl import flags
from hlat_jax.cli import flags as flags_lib

MODULES = {"train": "train", "launch": "cli.launch_files"}
declared, define_path, define_string = {}, flags_lib.define_path, flags.DEFINE_string
def record_path(values, name, about, **options):
    declared[f"--{name}"] = "bucket" if options.get("use") == "bucket" else "path"
    define_path(values, name, about, **options)
def record_string(name, default, about, **options):
    declared[f"--{name}"] = about
    define_string(name, default, about, **options)
flags_lib.define_path, flags.DEFINE_string = record_path, record_string

def ran(area, words):
    module = importlib.import_module("hlat_jax." + MODULES.get(area, f"{area}.__main__"))
    out, err, sys.argv = io.StringIO(), io.StringIO(), [area, *words]
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            flags_lib.main(module.main)
        except SystemExit as ended:
            return ended.code, err.getvalue()

answers, found = [], {}
for command, (words, positional, keys) in json.load(sys.stdin).items():
    area, *verb = command.split()
    declared = {}
    ran(area, [*verb, "--help"])
    found[command] = declared
    urls = {"path": "s3://bucket/x", "bucket": "ftp://host/x"}
    trials = [(name, [f"{name}={urls[about]}"]) for name, about in declared.items() if about in urls]
    trials += [(key, [f"--config.{key}={urls[kind]}"]) for key, kind in keys.items()]
    trials += [(positional[0], positional)] if positional else []
    for name, given in trials:
        answers.append((command, name, *ran(area, [*verb, *words, *given]), "jax" in sys.modules, os.listdir()))
json.dump([found, answers], sys.stdout)
"""


def test_commands_of_this_table_are_all_areas():
    assert {command.split()[0] for command in COMMANDS} == set(AREAS)


def test_urls_given_for_paths_are_refused_in_one_line_and_a_command(tmp_path):
    def keys(command, words):
        if "--config=tiny" not in words:
            return {}
        kinds = dict.fromkeys(TEXTS, "bucket") if command in ("train", "data stats", "data peek") else {}
        fields = {path: config_lib.field_of(*path.split(".")) for path in config_lib.PATH_KEYS}
        return kinds | {path: "bucket" if field.metadata["is_bucket"] else "path" for path, field in fields.items()}

    asked = {name: (words, positional, keys(name, words)) for name, (words, positional) in COMMANDS.items()}
    done = subprocess.run(
        [sys.executable, "-c", DRIVER],
        input=json.dumps(asked),
        capture_output=True,
        text=True,
        cwd=tmp_path,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    flags_of, answers = json.loads(done.stdout)
    for command, name, code, err, has_jax, files in answers:
        line = err.replace("\n  ", " ")  # before a command
        assert (code, line.count("\n"), has_jax, files) == (2, 1, False, []), (command, name, err)
        assert err.startswith(f"error: {name}") or f" {name}" in err or f"={name}" in err, (command, name, err)
        assert "URL" in err or "python -m hlat_jax.data build ftp://host/x" in err, (command, name, err)
    tried = {(command, name) for command, name, *_ in answers}
    assert {
        ("train", "--workdir"),
        ("hf export", "--out"),
        ("neuron env", "--cache"),
        ("plan", "data.tokenizer"),
    } <= tried
    for command, declared in flags_of.items():  # a new flag for a path, declared as plain text, is found by its help
        named = {
            name for name, about in declared.items() if about not in ("path", "bucket") and _MEANS_A_PATH.search(about)
        }
        assert named <= set(NO_PATHS), (command, named)


def test_urls_given_to_functions_are_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = load("tiny")
    for call in (
        lambda url: train(resolve(config), pathlib.Path(url)),
        lambda url: hf.load(pathlib.Path(url)),
        lambda url: hf.save({}, config.model, "", url),
        lambda url: hf.save({}, config.model, "", pathlib.Path(url)),
        lambda url: Tokenizer(url),
        lambda url: resolve({**config.to_dict(), "train": {**config.train.to_dict(), "branch_from": url}}),
    ):
        with pytest.raises(ValueError, match=r"s3:/+bucket/x is a URL"):
            call("s3://bucket/x")
    assert not any(tmp_path.iterdir())


def test_launch_scripts_refuse_urls_before_they_start_anything(tmp_path):
    for script, flag in (("restart.sh", "--workdir"), ("node.sh", "--cache"), ("node.sh", "--fill_cache")):
        words = [str(LAUNCH / script), f"{flag}=s3://bucket/x"]
        words = words if script == "node.sh" else [words[0], "touch", "started", words[1]]
        done = subprocess.run(words, capture_output=True, text=True, cwd=tmp_path, check=False)
        assert (done.returncode, done.stderr.count("\n"), list(tmp_path.iterdir())) == (2, 1, []), done.stderr
        assert done.stderr.startswith(f"error: {flag}=s3://bucket/x is a URL. Give a ")


def test_file_urls_and_the_home_are_paths_of_flags_and_keys(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    words = ["--config=tiny", "--workdir=~/run", f"--config.train.eval_tasks_folder=file://{tmp_path}"]
    mutable, values = parse(words, lambda values: define_path(values, "workdir", "Run folder."))
    assert values.workdir == f"{tmp_path}/run"
    assert mutable.train.eval_tasks_folder == str(tmp_path)


def test_config_keys_that_are_paths_are_declared_so():
    for section, cls in config_lib.SECTIONS.items():
        for field in dataclasses.fields(cls):
            path = f"{section}.{field.name}"
            is_text = isinstance(field.default, str) and not field.metadata["choices"]
            if is_text and _MEANS_A_PATH.search(field.metadata["doc"]):
                assert field.metadata["is_path"] or path in TEXTS, path
