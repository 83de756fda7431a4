"""The ladder: rungs from one layer to the whole, the commands that run them, and the script that stops at a failure."""

import dataclasses
import itertools
import json
import os
import pathlib
import shlex
import subprocess
import sys

import pytest
from refusals import assert_names, assert_refused

from hlat_jax.cli import config_files, flags
from hlat_jax.data.tokenizer import resolve_with_tokenizer
from hlat_jax.host import neuron_topology
from hlat_jax.host.neuron_topology import Topology
from hlat_jax.neuron import ladder, programs
from hlat_jax.parallel.degrees import are_degrees_valid
from hlat_jax.resolve import resolve

ROOT = pathlib.Path(__file__).resolve().parents[2]
TRN1 = Topology("trn1.32xlarge")


def rungs_of(name, num_devices=0, **options):
    config = resolve(config_files.load(name))
    num_devices = num_devices or programs.num_devices(config)
    return config, ladder.rungs(config, num_devices=num_devices, **({"node_devices": 32} | options))


def sizes(rung):
    c, degrees = rung.config, programs.layout_for_neuron(rung.config, rung.num_devices).degrees
    replicas = rung.num_devices // (degrees["pipe"] * degrees["context"] * degrees["tensor"])
    rows = c.data.batch_size // replicas // c.train.num_microbatches
    return c.model.num_layers, degrees["pipe"], c.train.num_microbatches, rows, rung.num_devices


def test_rungs_lead_from_one_layer_to_the_recipe():
    for name in sorted(config_files.shipped_configs()):
        config, found = rungs_of(name)
        assert sizes(found[0])[:4] == (1, 1, 1, 1)
        assert (found[-1].config, found[-1].changes) == (config, {})
        assert all(are_degrees_valid(rung.config, rung.num_devices) for rung in found)
        steps = [tuple(map(int, sizes(rung))) for rung in found]
        assert len(set(steps)) == len(steps) <= 12
        # each rung has more of something than the one before; 70b's first with stages has fewer layers than a stage
        assert all(any(new > old for new, old in zip(b, a, strict=True)) for a, b in itertools.pairwise(steps))


def test_rungs_of_a_split_sequence_have_the_rows_of_the_recipe():
    c = config_files.load("tiny")
    c.parallel.update(context=4, data=2)
    c.data.batch_size, c.train.num_microbatches = 8, 4
    config = resolve(c)
    rungs = ladder.rungs(config, num_devices=8, node_devices=2)
    assert (rungs[-1].config, rungs[-1].changes) == (config, {})
    assert (sizes(rungs[0]), sizes(rungs[-1])) == ((1, 1, 1, 1, 4), (6, 1, 4, 1, 8))


def test_rungs_have_the_windows_of_their_layers():
    config = resolve(config_files.load("qwen3_0_6b"))
    model = dataclasses.replace(config.model, sliding_window=64, sliding_window_layers="3:5,8:28")
    config = dataclasses.replace(config, model=model)
    found = ladder.rungs(config, num_devices=programs.num_devices(config), node_devices=32)
    assert {rung.config.model.num_layers for rung in found} >= {1, 2, 4, 28}
    for rung in found:
        ours, count = rung.config.model, rung.config.model.num_layers
        assert ours.windows(512) == model.windows(512)[:count]
    assert found[-1].config == config


def command(rung, *words, folder="runs/x", place=TRN1):
    return ladder.command(rung, words, topology=place, workdir=folder)


def test_a_command_sets_what_its_rung_has():
    _, found = rungs_of("7b")
    for rung in found[:-1]:
        program, *words = shlex.split(command(rung, "--config=7b"))
        assert program == "launch/node.sh"
        mutable, values = flags.parse([word for word in words if not word.startswith("--workdir")], lambda own: None)
        config = resolve_with_tokenizer(mutable)
        assert (config.model, config.parallel) == (rung.config.model, rung.config.parallel)
        assert config.data.batch_size == rung.config.data.batch_size
        assert (config.train.num_microbatches, config.train.num_steps) == (rung.config.train.num_microbatches, 2)
        assert config.data.train.startswith("package:")
        assert values


def test_a_command_names_its_data_cores_and_job():
    _, found = rungs_of("7b", 32)
    documents = len((ROOT / "hlat_jax" / "assets" / "austen_train.jsonl").read_text().splitlines())
    for rung in found:
        shipped = "data.train=package:" in command(rung, "--config=7b")
        assert shipped == (rung.config.data.batch_size <= documents)
    given = command(found[0], "--config=7b", "--config.data.train=my texts/*.jsonl")
    assert "package:" not in given
    assert "'--config.data.train=my texts/*.jsonl'" in given
    of_two = command(rungs_of("tiny", 2)[1][0], "--config=tiny")
    assert of_two.startswith('launch/node.sh --cores=2 --config=tiny --workdir=runs/x"-$(date +%s)" ')
    job = "sbatch --wait --export=ALL,MAX_RESTARTS=0 --time=02:00:00 --nodes=64 launch/slurm/train.sbatch"
    assert command(rungs_of("7b")[1][-1], "--config=7b").startswith(f"{job} --config=7b ")


@pytest.fixture
def run_script(tmp_path):
    """A function of what a stub of launch/node.sh does that runs the ladder of 7b on one node: its process."""
    (tmp_path / "launch").mkdir()
    node = tmp_path / "launch" / "node.sh"
    config, found = rungs_of("7b", 32)
    commands = [(rung.what, command(rung, "--config=7b")) for rung in found]

    def run(body, *, compiler_flags="", **variables):
        changed = dataclasses.replace(config, train=dataclasses.replace(config.train, compiler_flags=compiler_flags))
        levels = ladder.optimization_levels(changed, neuron_topology.resolve_topology(TRN1))
        (tmp_path / "ladder.sh").write_text(ladder.script("7b", commands, folder="runs/ladder/7b", levels=levels))
        node.write_text(f'#!/usr/bin/env bash\necho "ran $*"\n{body}\n')
        node.chmod(0o755)
        (tmp_path / "runs/ladder/7b/ladder.jsonl").unlink(missing_ok=True)
        words, env = ["bash", "ladder.sh"], os.environ | variables
        return subprocess.run(words, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)

    return run


def attempts(folder, key="code"):
    """Returns (rung, level, code) of each run of a script, in turn."""
    rows = [json.loads(line) for line in (folder / "runs/ladder/7b/ladder.jsonl").read_text().splitlines()]
    return [(row["rung"], row["optlevel"], row[key]) for row in rows]


def test_script_keeps_the_level_at_which_a_rung_compiled(run_script, tmp_path):
    refused = "[[ $* != *num_layers=4* || $* == *-O2* ]] || { echo '[NCC_INAS001] IGAA901'; exit 70; }"
    done = run_script(refused, compiler_flags="--internal-max-instruction-limit=7")
    subprocess.run(["shellcheck", tmp_path / "ladder.sh"], check=True)
    assert (done.returncode, done.stderr) == (0, "")
    last = [(number, 2, 0) for number in range(4, attempts(tmp_path)[-1][0] + 1)]
    assert attempts(tmp_path) == [(1, 1, 0), (2, 1, 0), (3, 1, 70), (3, 2, 0), *last]
    *_, count, flags = done.stdout.splitlines()
    assert_names(done.stdout, "rung 3: ")
    assert_names(count, f" {last[-1][0]} rungs", "-O2")
    assert flags.endswith("--config.train.compiler_flags=--internal-max-instruction-limit=7 -O2")
    logs = tmp_path / "runs/ladder/7b"
    assert "compiler_flags" not in (logs / "rung-03-O1.log").read_text()  # the program of the run itself
    assert (logs / "rung-03-O2.log").read_text().strip().endswith("=--internal-max-instruction-limit=7 -O2")


def test_script_begins_with_the_level_of_the_config(run_script, tmp_path):
    done = run_script("[[ $* == *-O1* ]] || { echo 'RunNeuronCC: error'; exit 1; }", compiler_flags="-O2")
    assert attempts(tmp_path)[:3] == [(1, 2, 1), (1, 1, 0), (2, 1, 0)]
    assert "--config.train.compiler_flags=-O2 -O1" in done.stdout


def test_script_tries_no_other_level_if_the_compiler_did_not_fail(run_script, tmp_path):
    done = run_script("echo 'error: data.train: no such file'; echo cache /var/tmp/neuronx-cc; exit 2")
    assert (done.returncode, attempts(tmp_path)) == (1, [(1, 1, 2)])


def test_script_stops_at_the_first_rung_that_fails(run_script, tmp_path):
    killed = '[[ $* != *num_layers=4* ]] || { echo "[F137] killed"; exit 70; }'
    done = run_script(killed)
    assert done.returncode == 1
    facts = ("error: rung 3 of 10 (4 layers x 1 microbatch x 1 row)", "code 70", "memory")
    assert_names(done.stderr, "[F137] killed", *facts)
    assert attempts(tmp_path) == [(1, 1, 0), (2, 1, 0), (3, 1, 70), (3, 2, 70)]
    assert "--config=7b" in (tmp_path / "runs/ladder/7b/rung-01-O1.log").read_text()
    assert (run_script(killed, FROM="4").returncode, attempts(tmp_path)[0]) == (0, (4, 1, 0))
    assert "FROM=x" in run_script(killed, FROM="x").stderr


def test_ladder_lowers_and_lints_every_rung(neuron_here, tmp_path):
    words = ("--config.model.num_layers=1", "--config.data.batch_size=8", "--config.train.num_microbatches=4")
    quiet = ("--config.train.sample_prompt=", "--config.data.validation=")
    code, printed, error = neuron_here("ladder", "--config=tiny", *words, *quiet, f"--json={tmp_path / 'found.json'}")
    assert (code, error) == (0, "")
    found = json.loads((tmp_path / "found.json").read_text())["rungs"]
    assert [row["what"] for row in found] == ["1 layer x 1 microbatch x 1 row", "1 layer x 4 microbatches x 1 row"]
    for row in found:
        assert row["command"] in printed
        assert all(word in row["command"] for word in (*words, *quiet))
        assert list(row["programs"]) == ["start", "microbatch", "update", "norms", "digest"]
        assert all(program["errors"] == [] for program in row["programs"].values())
        assert all(row["programs"][name]["unrolled"] > 0 for name in ("microbatch", "update", "norms"))
    four = found[1]["programs"]
    assert {four[name]["same_as_rung"] for name in four} == {1}  # each microbatch is dispatched by itself
    assert "--config.train.compiler_flags=-O2" in printed


def test_ladder_takes_the_lnc_of_the_environment(neuron_here, monkeypatch):
    refused = {"sha256": "", "unrolled": None, "errors": ["LW01"], "warnings": []}
    monkeypatch.setattr(ladder, "check_programs", lambda rung, target: {"norms": dict(refused)})
    code, printed, _ = neuron_here("ladder", "--config=tiny")
    assert (code, "norms       " in printed, "LW01" in printed) == (1, True, True)
    monkeypatch.setattr(ladder, "check_programs", lambda rung, target: {})
    words = ("--config=llama3_8b", "--instance=trn2.48xlarge", "--nodes=1")
    printed = neuron_here("ladder", *words)[1]
    assert_names(printed, "llama3_8b on trn2.48xlarge at LNC 2", "64 devices")
    monkeypatch.setenv("NEURON_LOGICAL_NC_CONFIG", "1")
    code, printed, _ = neuron_here("ladder", *words)
    assert code == 0
    assert "128 devices" in printed
    assert "\n  env NEURON_LOGICAL_NC_CONFIG=1 launch/node.sh --config=llama3_8b " in printed
    monkeypatch.setenv("NEURON_LOGICAL_NC_CONFIG", "2")
    assert_refused(neuron_here("ladder", "--config=7b"), "NEURON_LOGICAL_NC_CONFIG", "trn1.32xlarge")


@pytest.mark.slow
def test_the_first_rung_trains(tmp_path):
    _, [first, *_] = rungs_of("tiny", 1)
    words = command(first, "--config=tiny", "--config.data.seq_len=32", folder=str(tmp_path / "run"))
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHON": sys.executable, "XLA_FLAGS": ""}
    words = words.replace("--cores=1 ", "")  # this machine has no Neuron cores
    done = subprocess.run(["bash", "-c", words], cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    rows = next(tmp_path.glob("run-*/metrics.jsonl")).read_text().splitlines()
    assert {json.loads(row)["step"] for row in rows} >= {1, 2}
