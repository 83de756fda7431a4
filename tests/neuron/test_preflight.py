"""The collectives of a step as input for nccom-test, against those of the traced step and the groups of its mesh."""

import itertools
import json
import math
import os
import pathlib
import re
import subprocess
import sys

import numpy as np
import pytest

from hlat_jax.cli import config_files
from hlat_jax.neuron import preflight, programs
from hlat_jax.neuron.__main__ import main
from hlat_jax.plan.collectives import traced_collectives
from hlat_jax.program import make_program
from hlat_jax.resolve import resolve
from hlat_jax.run.compilation import named_programs, traced_programs

KINDS = {
    "all-reduce": "all_reduce",
    "all-gather": "all_gather",
    "reduce-scatter": "reduce_scatter",
    "all-to-all": "alltoall",
    "collective-permute": "permute",
}
DTYPES = {"float32": "fp32", "bfloat16": "bf16", "int32": "int32", "uint32": "uint32"}
FLAGS = {
    "model.num_layers": 2, "model.embed_dim": 32, "model.mlp_dim": 48, "model.num_heads": 4, "model.num_kv_heads": 2,
    "model.head_dim": 8, "data.batch_size": 8, "data.seq_len": 32, "train.num_microbatches": 2,
    "parallel.pipe": 2, "parallel.data": 2, "parallel.tensor": 2, "parallel.zero1": True,
    "parallel.sequence_parallel": True, "precision.policy": "mixed",
}  # fmt: skip


@pytest.fixture(scope="module")
def step():
    """The program of a small config over 2 x 2 x 2 devices, its traced parts, and the cases."""
    c = config_files.load("tiny")
    c.update_from_flattened_dict(FLAGS)
    config = resolve(c)
    program = make_program(config, programs.layout_for_neuron(config, 8))
    names = [
        name for name in named_programs(program, "all") if name not in ("init", "norms", "eval", "prefill", "decode")
    ]
    traced = [traced_programs(program)[name]() for name in names]
    modules = [one.lower(lowering_platforms=("neuron",)).compiler_ir("stablehlo").operation for one in traced]
    return program, traced, preflight.cases(modules, ranks=range(8))


def axes_of(groups, shape):
    """Returns the axes of a mesh along which the ranks of groups differ."""
    places = np.stack(np.unravel_index(groups, tuple(shape.values())), axis=-1)
    differ = (places != places[:, :1]).any(axis=(0, 1))
    return tuple(axis for axis, does in zip(shape, differ, strict=True) if does)


def test_cases_are_the_collectives_of_the_traced_step(step):
    program, traced, cases = step
    shape = dict(program.layout.mesh.shape)
    expected = {
        (KINDS[one.kind], one.axes, dtype, one.payload_bytes)
        for part in traced
        for one in traced_collectives(part.jaxpr.jaxpr, program.layout.mesh)
        for dtype in [DTYPES[one.dtypes[0]]]
    }
    found = {
        (case.operation, axes_of(case.groups, shape), case.dtype, size)
        for case in cases
        for size in case.sizes
        if case.line != "added by the partitioner"
    }
    assert found == expected
    assert {"all_reduce", "all_gather", "reduce_scatter", "permute"} <= {operation for operation, *_ in found}
    added = [case for case in cases if case.line == "added by the partitioner"]
    assert all(max(case.sizes) <= 64 for case in added)  # scalars of the norms


def test_groups_are_those_of_the_mesh_and_each_rank_is_in_one(step):
    program, _, cases = step
    shape = dict(program.layout.mesh.shape)
    grid = np.arange(8).reshape(tuple(shape.values()))
    for case in cases:
        if case.operation == "permute":
            continue
        axes = axes_of(case.groups, shape)
        outer = [size if name not in axes else 1 for name, size in shape.items()]
        expected = set()
        for place in itertools.product(*map(range, outer)):
            index = tuple(slice(None) if name in axes else at for name, at in zip(shape, place, strict=True))
            expected.add(frozenset(grid[index].ravel().tolist()))
        assert {frozenset(group) for group in case.groups.tolist()} == expected
        assert math.prod(shape[axis] for axis in axes) == case.groups.shape[1]


def test_ranks_of_devices_that_the_mesh_reorders_are_used(step):
    _, traced, cases = step
    modules = [one.lower(lowering_platforms=("neuron",)).compiler_ir("stablehlo").operation for one in traced]
    order = [3, 1, 4, 0, 5, 7, 2, 6]
    reordered = preflight.cases(modules, ranks=order)
    for plain, moved in zip(cases, reordered, strict=True):
        np.testing.assert_array_equal(moved.groups, np.asarray(order)[plain.groups])


def test_smallest_largest_and_most_frequent_sizes_are_measured():
    case = preflight.Case("x", "all_reduce", "fp32", np.arange(4)[None], {4: 900, 64: 100, 256: 1, 512: 1}, "")
    assert case.measured == [4, 64, 512]
    assert case.spanned_nodes(2) == 2
    assert case.spanned_nodes(4) == 1


# Takes the place of nccom-test: checks its input as the guide describes it, and reports as its example does.
NCCOM_TEST = """
import json, pathlib, sys
words = sys.argv[1:]
value = {words[i]: words[i + 1] for i in range(len(words) - 1) if words[i].startswith("-")}
ranks, size = int(value["-r"]), int(value["-b"])
assert value["-e"] == value["-b"] and int(value["-N"]) == 2
assert words[words.index("--hosts") + 1 :] == ["10.0.0.1", "10.0.0.2"]
[operation] = {"all_reduce", "all_gather", "reduce_scatter", "alltoall", "permute"} & set(words)
if operation == "permute":
    [pairs] = json.loads(pathlib.Path(value["--custom-src-target-pairs"]).read_text())["src_target_pairs"]
    assert all(0 <= a < ranks and 0 <= b < ranks for a, b in pairs)
else:
    groups = json.loads(pathlib.Path(value["--custom-replica-group"]).read_text())["replica_groups"]
    assert sorted(sum(groups, [])) == list(range(ranks)) and len(set(map(len, groups))) == 1
row = {"size(B)": size, "count(elems)": 1, "type": value["-d"], "algbw(GB/s)": 1.0, "busbw(GB/s)": 2.0,
       "time:avg(us)": 6.25}
pathlib.Path(value["--report-to-json-file"]).write_text(json.dumps({"results": [row]}))
with open("calls", "a") as calls:
    calls.write(" ".join(words) + "\\n")
"""


@pytest.fixture
def folder(step, tmp_path):
    """The folder that the command would write, and an environment in which its script runs."""
    _, _, cases = step
    about = {"config": "small", "instance": "trn1.32xlarge", "nodes": 2, "devices_per_node": 4, "lnc": 1}
    preflight.write(tmp_path / "out", cases, about=about)
    command = tmp_path / "bin" / "nccom-test"
    command.parent.mkdir()
    command.write_text(f"#!{sys.executable}\n{NCCOM_TEST}")
    command.chmod(0o755)
    path = f"{command.parent}{os.pathsep}{os.path.dirname(sys.executable)}{os.pathsep}{os.environ['PATH']}"
    return tmp_path / "out", {"PATH": path}


def test_written_files_are_read_back_as_they_were(step, folder):
    _, _, cases = step
    about, found = preflight.read(folder[0])
    assert about == {"config": "small", "instance": "trn1.32xlarge", "nodes": 2, "devices_per_node": 4, "lnc": 1}
    for case, back in zip(cases, found, strict=True):
        np.testing.assert_array_equal(back.groups, case.groups)
        assert {**vars(back), "groups": 0} == {**vars(case), "groups": 0, "sizes": dict(case.sizes)}
    spanned = {
        row["name"]: row["spanned_nodes"] for row in json.loads((folder[0] / "preflight.json").read_text())["cases"]
    }
    assert {spanned[case.name] for case in cases} == {1, 2}


def test_script_measures_each_case_and_its_results_are_read_back(folder, capsys):
    out, env = folder
    subprocess.run(["shellcheck", "preflight.sh"], cwd=out, env=env, check=True, capture_output=True)
    assert main(["preflight", "--config=tiny", f"--out={out}", "--results"]) == 1
    assert "no result" in capsys.readouterr().out
    without = subprocess.run([out / "preflight.sh"], env=env, capture_output=True, text=True, check=False)
    assert without.returncode != 0
    assert "set HOSTS to the addresses of the nodes" in without.stderr
    one, expected = env | {"HOSTS": "10.0.0.1"}, "number of addresses in HOSTS: 1; this was written for 2 nodes.\n"
    fewer = subprocess.run([out / "preflight.sh"], env=one, capture_output=True, text=True, check=False)
    assert (fewer.returncode, fewer.stderr) == (2, f"error: {expected}")
    hosts = {"HOSTS": "10.0.0.1\n10.0.0.2"}
    done = subprocess.run([out / "preflight.sh"], env=env | hosts, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    _, cases = preflight.read(out)
    calls = (out / "calls").read_text().splitlines()
    assert len(calls) == sum(len(case.measured) for case in cases)
    assert all("-r 8 -N 2" in call for call in calls)

    assert main(["preflight", "--config=tiny", f"--out={out}", "--results"]) == 0
    printed = capsys.readouterr().out
    assert printed.count("6.2 us, 2.00 GB/s by the bus factor") == len(calls)
    assert f"{len(calls)} of {len(calls)} measured as expected" in printed
    path = out / "results" / f"{cases[0].name}.{cases[0].measured[0]}.json"
    path.write_text(re.sub(r'"size\(B\)": \d+', '"size(B)": 3', path.read_text()))
    assert main(["preflight", "--config=tiny", f"--out={out}", "--results"]) == 1
    assert "measured 3 bytes of" in capsys.readouterr().out
    path.write_text("{")
    assert preflight.results(out, cases)[0].problem.endswith("is not a result of nccom-test")
    preflight.write(out, cases, about={"config": "x", "instance": "x", "nodes": 2, "devices_per_node": 4, "lnc": 1})
    assert {one.problem for one in preflight.results(out, cases)} == {"no result"}, "those of an older step are removed"


def test_script_fails_where_one_measurement_does(folder):
    out, env = folder
    _, cases = preflight.read(out)
    first = cases[0]
    (out / f"{first.name}.json").write_text("[]")
    (out / "results").mkdir()
    old = out / "results" / f"{first.name}.{first.measured[0]}.json"
    old.write_text('{"results": []}')
    hosts = {"HOSTS": "10.0.0.1 10.0.0.2"}
    done = subprocess.run([out / "preflight.sh"], env=env | hosts, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert re.search(r"^[1-3] failed$", done.stdout, re.MULTILINE)
    assert not old.exists(), "a result of before would be taken for this one's"
    failed = [one for one in preflight.results(out, cases) if one.problem]
    assert {one.case.name for one in failed} == {first.name}
    assert failed[0].problem.startswith("nccom-test ended with code 1")


def test_result_whose_check_failed_is_not_as_expected(folder):
    out, env = folder
    command = pathlib.Path(env["PATH"].partition(os.pathsep)[0]) / "nccom-test"
    command.write_text(f"{command.read_text()}sys.exit(7)\n")
    hosts = {"HOSTS": "10.0.0.1 10.0.0.2"}
    subprocess.run([out / "preflight.sh"], env=env | hosts, capture_output=True, check=False)
    for one in preflight.results(out, preflight.read(out)[1]):
        assert one.microseconds == 6.25
        assert one.problem.startswith("nccom-test ended with code 7")


def test_script_without_nccom_test_says_so_once(folder):
    out, _ = folder
    done = subprocess.run(
        [out / "preflight.sh"], env={"PATH": "/usr/bin:/bin"}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert done.stderr.startswith("error: nccom-test is neither in PATH nor in /opt/aws/neuron/bin")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("content", ["{", "[]", '{"cases": [{}]}', '{"cases": 3}'])
def test_damaged_index_is_named(content, folder):
    (folder[0] / "preflight.json").write_text(content)
    with pytest.raises(ValueError, match=r"preflight.json is damaged: write the folder again"):
        preflight.read(folder[0])


SMALL = [
    "--config=tiny", "--config.model.num_layers=2", "--config.model.embed_dim=64", "--config.model.mlp_dim=64",
    "--config.model.num_heads=32", "--config.model.num_kv_heads=16", "--config.model.head_dim=8",
    "--config.model.vocab_size=2048", "--config.data.seq_len=32",
]  # fmt: skip


def groups_written(folder):
    _, found = preflight.read(folder)
    return [case.groups.tolist() for case in found if case.operation != "permute"]


def test_command_writes_the_groups_of_a_placed_mesh_over_two_nodes(tmp_path, capsys):
    words = ["--config.parallel.tensor=4", "--config.data.batch_size=32", "--nodes=2", f"--out={tmp_path}"]
    assert main(["preflight", *SMALL, *words]) == 0
    printed = capsys.readouterr().out
    assert [0, 8, 16, 24] in [groups[0] for groups in groups_written(tmp_path)]
    assert "by the pages" not in printed, "all of these groups are listed"
    assert f"{tmp_path / 'preflight.sh'}  runs nccom-test on them; not yet run" in printed


def test_command_judges_groups_as_the_lint_does_and_by_the_lnc(tmp_path, capsys, monkeypatch):
    words = ["--config.parallel.tensor=8", "--config.data.batch_size=32", f"--out={tmp_path}"]
    words += ["--instance=trn2.48xlarge", "--nodes=1"]
    assert main(["preflight", *SMALL, *words]) == 0
    assert "disputed by the pages: 8 cores [0, 1, 2, 3, 4, 5, 6, 7]" in capsys.readouterr().out
    monkeypatch.setenv("NEURON_LOGICAL_NC_CONFIG", "1")
    assert main(["preflight", *SMALL, *words]) == 0
    assert "by the pages: 8 cores" not in capsys.readouterr().out, "trn2 at LNC 1 lists groups of 8"
    assert max(max(map(max, groups)) for groups in groups_written(tmp_path)) == 127
    with pytest.raises(ValueError, match=r"parallel.tensor=16: .*excludes groups of 16"):
        main(["preflight", *SMALL, *words, "--config.parallel.tensor=16"])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "--out=DIR is missing"),
        (["--out=x", "--results"], "preflight.json is missing: write the folder again, without --results"),
        (
            ["--out=/dev/null", "--config.parallel.data=32", "--config.data.batch_size=32"],
            "--out=/dev/null cannot be created as a folder",
        ),
        (["--out=x", "--instance=trn9"], "--instance=trn9: no such instance type"),
        (["--out=x", "--config.parallel.data=3"], "takes 3 devices, which fill no whole number of trn1.32xlarge"),
    ],
)
def test_preflight_refuses_what_it_cannot_do(words, message, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=message):
        main(["preflight", "--config=tiny", *words])
