"""The environment of a run on Trainium: golden ones, what must hold for all, and what is refused. Nothing ran there.

    PYTHONPATH=. python tests/host/test_neuron_env.py

writes `tests/support/golden/env.json` again after an intended change.
"""

import dataclasses
import json
import os
import pathlib
import re
import shlex
import shutil
import subprocess
import sys

import neuron_machine
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import assert_names

from hlat_jax import train
from hlat_jax.cli import config_files
from hlat_jax.cli import flags as flags_lib
from hlat_jax.config import ParallelConfig, PrecisionConfig
from hlat_jax.facts.policies import POLICY_FACTS
from hlat_jax.host import compile_cache, neuron_env, neuron_topology
from hlat_jax.host.neuron_env import FIXED, REMOVED, environment
from hlat_jax.host.neuron_topology import INSTANCES, Topology
from hlat_jax.neuron import env_command as command
from hlat_jax.resolve import resolve

ROOT = pathlib.Path(__file__).resolve().parents[2]
GOLDEN = ROOT / "tests" / "support" / "golden" / "env.json"
TARGETS = {
    "trn1.32xlarge": ("trn1.32xlarge", 1),
    "trn1.2xlarge": ("trn1.2xlarge", 1),
    "trn1n.32xlarge": ("trn1n.32xlarge", 1),
    "trn2.3xlarge": ("trn2.3xlarge", 2),
    "trn2.48xlarge": ("trn2.48xlarge", 2),
    "trn2.48xlarge-lnc1": ("trn2.48xlarge", 1),
}
SEVEN_B = resolve(config_files.load("7b"))
MIXED, BF16_SR = PrecisionConfig("mixed"), PrecisionConfig("bf16_sr")
HLAT = ParallelConfig(tensor=8, sequence_parallel=True, zero1=True)
PLACE = Topology("trn1.32xlarge", nodes=4, rank=1, coordinator="first")


def golden_runs():
    """Returns the environments of a job of 1 and of 64 nodes under mixed precision, and under bf16_sr on one.

    Of the first target's job of one node all of it; of its other runs what differs from that, of the other targets what
    differs from the same run of the first. A variable that is not set there is None.
    """
    found, first = {}, {}
    for target, (instance, lnc) in TARGETS.items():
        one, last = Topology(instance, lnc=lnc), Topology(instance, lnc=lnc, nodes=64, rank=63, coordinator="trn-1")
        for run, precision, place in (("1 node", MIXED, one), ("64 nodes", MIXED, last), ("bf16_sr", BF16_SR, one)):
            if place is last and not INSTANCES[instance].num_efa:
                continue
            variables = environment(precision, HLAT, place, current={}).variables
            del variables["PATH"]  # of this machine
            base = first.get(run) or first.get("1 node", {})
            names = sorted({name for name, _ in variables.items() ^ base.items()})
            found[f"{target}, {run}"] = {name: variables.get(name) for name in names}
            first.setdefault(run, variables)
    return found


def test_environments_match_the_golden_file():
    golden = json.loads(GOLDEN.read_text())
    assert golden_runs() == golden, "If that is meant: PYTHONPATH=. python tests/host/test_neuron_env.py"


# What must hold for every run: reference/neuron.md, 8.2(1)


@st.composite
def runs(draw):
    """A precision, a layout and a topology that can be."""
    instance = draw(st.sampled_from(sorted(INSTANCES)))
    lnc = draw(st.sampled_from(INSTANCES[instance].lncs))
    nodes = draw(st.integers(1, 300 if INSTANCES[instance].num_efa else 1))
    whole = INSTANCES[instance].chips * INSTANCES[instance].physical_cores // lnc
    place = Topology(
        instance,
        nodes=nodes,
        rank=draw(st.integers(0, nodes - 1)),
        coordinator=draw(st.from_regex(r"[a-z][a-z0-9-]{0,61}[a-z0-9]", fullmatch=True)),
        port=draw(st.integers(1, 65535).filter(lambda port: port != neuron_topology.COLLECTIVES_PORT)),
        lnc=lnc,
        cores=draw(st.sampled_from([0, 1, whole])),
    )
    degrees = {axis: draw(st.sampled_from([1, 2, 4])) for axis in ("pipe", "fsdp", "tensor")}
    switches = {name: draw(st.booleans()) for name in ("zero1", "sequence_parallel")}
    policy = draw(st.sampled_from(sorted(POLICY_FACTS)))
    who = draw(st.sampled_from(["auto", "hardware", "software"])) if policy == "bf16_sr" else "auto"
    return PrecisionConfig(policy, who), ParallelConfig(data=-1, **degrees, **switches), place


@given(runs())
@settings(max_examples=200, deadline=None)
def test_environment_is_complete_and_consistent(run):
    precision, parallel, place = run
    found = environment(precision, parallel, place, current={})
    of = found.variables
    words = shlex.split(of["NEURON_CC_FLAGS"])
    num_devices = place.nodes * place.devices_per_node

    assert f"--logical-nc-config={of['NEURON_LOGICAL_NC_CONFIG']}" in words
    assert "--auto-cast=none" in words
    # JAX's plugin passes them on to neuronx-cc, which refuses them
    assert not [word for word in words if word.startswith(("--cache_dir", "--retry_failed_compilation"))]
    assert of["NEURON_COMPILE_CACHE_URL"] == f"{place.cache}/neuronx-cc"
    assert not set(of) & set(REMOVED)
    assert not found.notes
    assert environment(precision, parallel, place, current=of) == found
    if num_devices == 1:
        assert "NEURON_RUN_TRIVIAL_COMPUTATION_ON_CPU" not in of
    if place.nodes == 1:
        assert not [name for name in of if name.startswith(("FI_", "NEURON_PJRT_"))]
    else:
        assert of["NEURON_PJRT_PROCESSES_NUM_DEVICES"] == ",".join([str(place.devices_per_node)] * place.nodes)
        host, port = of["NEURON_RT_ROOT_COMM_ID"].split(":")
        assert (host, int(port) != place.port) == (place.coordinator, True)
        assert of["FI_PROVIDER"] == "efa"
        first = environment(precision, parallel, dataclasses.replace(place, rank=0), current={}).variables
        assert of == first | {"NEURON_PJRT_PROCESS_INDEX": str(place.rank)}


def test_the_rounding_of_the_device_is_that_of_the_program():
    from hlat_jax.precision import POLICIES, policy_on

    for name in POLICIES:
        for who in ("auto", "hardware", "software") if name == "bf16_sr" else ("auto",):
            found = environment(PrecisionConfig(name, who), ParallelConfig(), PLACE, current={}).variables
            in_hardware = policy_on(name, "neuron", stochastic_rounding=who).rounding == "hardware"
            assert found["NEURON_RT_STOCHASTIC_ROUNDING_EN"] == ("1" if in_hardware else "0")


LAYOUTS = [
    ({"data": 32}, False),  # all-reduce alone: the plugin would take the step for a trivial program
    # a microbatch may be a program of its own, and has none of the collectives of ZeRO-1
    ({"data": 32, "zero1": True}, False),
    ({"data": 32, "zero1": True, "reduce_gradients": "microbatch"}, True),
    ({"data": -1, "tensor": 8, "zero1": True, "sequence_parallel": True}, True),
    ({"data": -1, "tensor": 32, "zero1": True}, False),
    # as may be the update
    ({"tensor": 32, "sequence_parallel": True}, False),
    ({"fsdp": -1, "data": 2, "zero1": True}, True),
    ({"pipe": 2, "data": 2, "zero1": True}, True),
]


def test_host_runs_trivial_programs_only_when_the_step_is_not_trivial():
    for degrees, expected in LAYOUTS:
        found = environment(MIXED, ParallelConfig(**degrees), Topology("trn1.32xlarge"), current={})
        assert ("NEURON_RUN_TRIVIAL_COMPUTATION_ON_CPU" in found.variables) == expected, degrees


# What the user has set


def with_current(**current):
    return environment(MIXED, ParallelConfig(), PLACE, current=current)


def test_user_variables_override_with_a_note():
    yours = {"FI_PROVIDER": "tcp", "NEURON_RT_EXEC_TIMEOUT": "600", "FI_LOG_LEVEL": "warn", "MALLOC_ARENA_MAX": ""}
    found = with_current(**yours)
    assert found.variables.items() >= (yours | {"MALLOC_ARENA_MAX": "64"}).items()
    timeout, provider = found.notes
    assert_names(timeout, "NEURON_RT_EXEC_TIMEOUT: ", "600", "4000")
    assert_names(provider, "FI_PROVIDER: ", "tcp", "efa")


def test_compiler_flags_replace_others_flag_by_flag():
    config, limit = resolve(config_files.load("llama3_8b")), "--internal-max-instruction-limit"

    def flags_with(yours="", text=""):
        found = environment(MIXED, ParallelConfig(), PLACE, current={"NEURON_CC_FLAGS": yours}, config_flags=text)
        return found.variables["NEURON_CC_FLAGS"], found.notes

    before, _ = flags_with()
    for yours, gone in (
        ("-O2", "--optlevel"),
        ("-O 3", "--optlevel"),
        ("--optlevel=2 --dump='/a b'", "--optlevel"),
        ("--model-type generic", "--model-type"),
        ("--disable-mixed-precision-accumulation", "--enable-mixed-precision-accumulation"),
    ):
        kept = " ".join(word for word in before.split() if not word.startswith(gone))
        words, [note] = flags_with(yours)
        assert words == f"{kept} {yours}"
        assert_names(note, "NEURON_CC_FLAGS: ", gone)
    for yours in ("--dump=/x", "-lnc 1", "--auto-cast none", "--target trn1"):  # added or repeated
        words, notes = flags_with(yours)
        assert (words.endswith(yours), notes) == (True, ())
    assert flags_with(text=config.train.compiler_flags) == (f"{before} {limit}=60000000", ())
    words, [note] = flags_with(f"{limit}=7", config.train.compiler_flags)
    assert words == f"{before} {limit}=7"
    assert_names(note, "NEURON_CC_FLAGS: ", f"{limit}=60000000")
    assert "--optlevel=2" in flags_with(text="-O2")[0]
    with pytest.raises(ValueError, match=r"^train\.compiler_flags='--target=trn2'"):
        flags_with(text="--target=trn2")


@pytest.fixture
def with_plugin(tmp_path, monkeypatch):
    """Neuron's plugin looks installed, and JAX's cache is not tried."""
    monkeypatch.syspath_prepend(neuron_machine.installed(tmp_path / "site"))
    monkeypatch.setattr(compile_cache, "leave_out_faulty", lambda environ, **_: "")


def test_a_run_and_the_env_command_set_the_flags_of_the_config(env_here, with_plugin, tmp_path):
    flag = "--internal-max-instruction-limit=7"
    words = [f"--config.train.compiler_flags={flag}", "--instance=trn2.48xlarge"]
    assert flag in env_here(*words).out
    mutable, values = flags_lib.parse(["--config=7b", *words], train._define)
    train._set_environment(resolve(mutable), values, workdir=tmp_path)  # into the dict that env_here has left
    assert flag in os.environ["NEURON_CC_FLAGS"].split()


CONTRADICTIONS = [
    ("NEURON_RT_STOCHASTIC_ROUNDING_EN", "1"),
    ("NEURON_LOGICAL_NC_CONFIG", "2"),
    ("NEURON_PJRT_PROCESS_INDEX", "3"),
    *(("NEURON_CC_FLAGS", flag) for flag in ("-lnc=2", "--auto-cast matmult", "--cache_dir=/x", "--target=trn2")),
    *(("NEURON_RT_VISIBLE_CORES", cores) for cores in ("0-15", "all")),
    ("NEURON_RT_DISABLE_EXECUTION_BARRIER", "1"),
    ("NEURON_RT_DBG_CC_NOP", "1"),
    *(("JAX_PLATFORMS", platforms) for platforms in ("cpu", "neuron")),
    *((name, "1") for name in REMOVED),
]


@pytest.mark.parametrize(("name", "value"), CONTRADICTIONS)
def test_a_variable_that_contradicts_or_has_no_effect_is_refused(name, value):
    with pytest.raises(ValueError, match=f"^{name}='?{re.escape(value)}"):
        with_current(**{name: value})


def test_what_a_larger_job_has_left_is_refused_for_one_process():
    assert set(FIXED) <= set(with_current().variables)
    alone = Topology("trn1.32xlarge")
    for name, value, ours in (
        ("NEURON_PJRT_PROCESSES_NUM_DEVICES", "32,32", "32"),
        ("NEURON_PJRT_PROCESS_INDEX", "1", "0"),
    ):
        assert environment(MIXED, ParallelConfig(), alone, current={name: ours}).notes == ()
        with pytest.raises(ValueError, match=f"^{name}={value}"):
            environment(MIXED, ParallelConfig(), alone, current={name: value})


def test_part_of_a_node_is_made_visible():
    some = Topology("trn1.32xlarge", cores=8)
    assert environment(MIXED, ParallelConfig(), some, current={}).variables["NEURON_RT_NUM_CORES"] == "8"
    assert not environment(MIXED, ParallelConfig(), some, current={"NEURON_RT_VISIBLE_CORES": "8-15"}).notes
    one = Topology("trn1.2xlarge", cores=1)
    with pytest.raises(ValueError, match=r"^NEURON_RUN_TRIVIAL_COMPUTATION_ON_CPU"):
        environment(MIXED, ParallelConfig(), one, current={"NEURON_RUN_TRIVIAL_COMPUTATION_ON_CPU": "1"})


INVALID = [
    ("--instance", {"instance": "trn1.32xlrge"}),
    ("--cores", {"cores": 4}),  # groups of 4 work in an order of their own
    ("--lnc", {"lnc": 2}),
    ("--nodes", {"instance": "trn1.2xlarge"}),
    *(("--coordinator", {"coordinator": name}) for name in ("", "a" * 64, "first:41000")),
    ("--port", {"port": neuron_topology.COLLECTIVES_PORT}),
]


@pytest.mark.parametrize(("flag", "fields"), INVALID)
def test_an_invalid_topology_is_refused_by_its_flag(flag, fields):
    with pytest.raises(ValueError, match=f"^{flag}="):
        environment(MIXED, ParallelConfig(), dataclasses.replace(PLACE, **fields), current={})


def test_neuron_is_used_if_devices_exist_and_are_not_excluded(tmp_path):
    product = tmp_path / "product_name"
    product.write_text("trn1.2xlarge\n")
    here = neuron_topology.Machine(tmp_path, product)
    for named, platforms, expected in (("", "", ""), ("", "cpu", ""), ("trn1.32xlarge", "", "trn1.32xlarge")):
        assert neuron_topology.instance_to_serve(named, platforms, machine=here) == expected
    with pytest.raises(ValueError, match=r"^JAX_PLATFORMS=neuron,cpu"):
        neuron_topology.instance_to_serve("", "neuron,cpu", machine=here)
    (tmp_path / "neuron0").touch()
    for platforms, expected in (("", "trn1.2xlarge"), ("neuron,cpu", "trn1.2xlarge"), ("cpu", ""), ("cuda", "")):
        assert neuron_topology.instance_to_serve("", platforms, machine=here) == expected
    product.write_text("inf2.24xlarge\n")
    with pytest.raises(ValueError, match=r"inf2\.24xlarge"):
        neuron_topology.detected_instance(here)


@pytest.fixture
def trn1_node(tmp_path, monkeypatch):
    """A machine with Neuron devices, and an environment without their variables."""
    (tmp_path / "neuron0").touch()
    (tmp_path / "product_name").write_text("trn1.32xlarge\n")
    for name in [name for name in os.environ if name.startswith(("JAX_", "NEURON_", "MALLOC_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    return neuron_topology.Machine(tmp_path, tmp_path / "product_name")


def fake_compiler(folder, monkeypatch):
    """Makes `folder` that of this interpreter's commands, with a neuronx-cc in it."""
    folder.mkdir()
    (folder / neuron_env.COMPILER).touch(0o755)
    monkeypatch.setattr(neuron_env.sysconfig, "get_path", lambda _: str(folder))


def test_path_begins_with_the_compiler_of_this_interpreter(tmp_path, monkeypatch):
    scripts, other = tmp_path / "scripts", tmp_path / "other"
    other.mkdir()
    (other / neuron_env.COMPILER).touch(0o755)  # of another environment
    fake_compiler(scripts, monkeypatch)
    for path, rest in (
        (f"{other}:{scripts}:/usr/bin", f"{other}:/usr/bin"),
        (f"{neuron_env.TOOLS_FOLDER}:/usr/bin", "/usr/bin"),
        ("", os.defpath),
    ):
        found = with_current(PATH=path)
        assert found.variables["PATH"] == f"{scripts}:{neuron_env.TOOLS_FOLDER}:{rest}"
        assert found.notes == ()
        assert with_current(**found.variables) == found
        assert shutil.which(neuron_env.COMPILER, path=found.variables["PATH"]) == f"{scripts / neuron_env.COMPILER}"


def test_prepare_sets_the_node_environment_before_importing_jax(trn1_node, with_plugin, monkeypatch, tmp_path):
    precision, parallel = PrecisionConfig("bf16_sr"), ParallelConfig(data=1, tensor=-1)
    fake_compiler(tmp_path / "scripts", monkeypatch)
    before = dict(os.environ)
    with pytest.raises(ValueError, match=r"^trn1\.32xlarge: "):
        neuron_env.prepare(precision, parallel, machine=trn1_node)
    assert os.environ == before
    jax = sys.modules["jax"]
    monkeypatch.delitem(sys.modules, "jax")
    expected = environment(precision, parallel, Topology("trn1.32xlarge"), current=os.environ).variables
    said = neuron_env.prepare(precision, parallel, machine=trn1_node)
    assert "trn1.32xlarge" in said
    assert expected.items() <= os.environ.items()
    monkeypatch.setitem(sys.modules, "jax", jax)  # the first cell of a notebook runs again
    assert neuron_env.prepare(precision, parallel, machine=trn1_node) == said
    del os.environ["JAX_COMPILATION_CACHE_DIR"]  # as the first call does where JAX's cache fails
    assert neuron_env.prepare(precision, parallel, machine=trn1_node) == said
    assert "JAX_COMPILATION_CACHE_DIR" not in os.environ
    monkeypatch.setenv("PATH", f"{tmp_path / 'other'}:{os.environ['PATH']}")  # which JAX reads only when it compiles
    assert neuron_env.prepare(precision, parallel, machine=trn1_node) == said
    assert os.environ["PATH"].startswith(str(tmp_path / "scripts"))
    (tmp_path / "scripts" / neuron_env.COMPILER).unlink()
    assert "neuronx-cc" in neuron_env.prepare(precision, parallel, machine=trn1_node)
    (tmp_path / "neuron0").unlink()
    os.environ.pop("JAX_PLATFORMS")
    assert "trn1" not in neuron_env.prepare(precision, parallel, machine=trn1_node)


# Training: a process of its own that stops where JAX would be imported, and writes what it then finds

AT_IMPORT = """
import json, os, sys

class Stop:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("jax", "jaxlib", "libneuronxla"):
            print("AT", name, json.dumps(dict(os.environ)))
            sys.exit(0)

sys.meta_path.insert(0, Stop())
from hlat_jax.cli import flags
import importlib.util
is_room = importlib.util.find_spec("hlat_jax.COMMAND").submodule_search_locations
flags.main(importlib.import_module("hlat_jax.COMMAND" + (".__main__" if is_room else "")).main)
"""


def environment_at_import(*words, **variables):
    """Returns (variables, what was printed before) when a training command imports JAX; (None, the error) if it does
    not come to that."""
    return at_import("train", "--config=7b", "--config.precision.policy=mixed", *words, **variables)


def at_import(command, *words, **variables):
    run = [sys.executable, "-c", AT_IMPORT.replace("COMMAND", command), *words]
    variables = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), **variables}
    done = subprocess.run(run, env=variables, capture_output=True, text=True, timeout=600, check=False)
    if done.returncode:
        return None, done.stderr
    printed, _, found = done.stdout.partition("AT jax ")
    return json.loads(found), printed


def test_training_sets_the_environment_before_jax_is_imported(tmp_path):
    plugin = {"PYTHONPATH": os.pathsep.join([str(ROOT), neuron_machine.installed(tmp_path / "site")])}
    plugin["JAX_ENABLE_COMPILATION_CACHE"] = "false"  # so it is not tried
    place = ("--coordinator=first:5000", "--num_processes=4", "--process_id=1", "--instance=trn1.32xlarge")
    found, printed = environment_at_import(*place, NEURON_RT_EXEC_TIMEOUT="600", **plugin)
    expected = with_current(NEURON_RT_EXEC_TIMEOUT="600", PATH=os.environ["PATH"])
    assert printed == ""  # of process 0 alone
    assert found.items() >= expected.variables.items()
    _, printed = environment_at_import("--instance=trn1.32xlarge", NEURON_RT_EXEC_TIMEOUT="600", **plugin)
    machine, note = printed.splitlines()
    assert_names(machine, "environment ", "1 x trn1.32xlarge")
    assert_names(note, "NEURON_RT_EXEC_TIMEOUT: ", "600", "4000")


@pytest.mark.slow
def test_commands_without_neuron_leave_the_environment_unchanged(tmp_path):
    (tmp_path / "checkpoints").mkdir()
    checkpoint, off = f"--checkpoint={tmp_path}", {"JAX_ENABLE_COMPILATION_CACHE": "false"}
    for name, *words in (
        ("train", "--config=7b"),
        ("generate", checkpoint, "--prompt=x"),
        ("evaluate", checkpoint, f"--text={__file__}"),
    ):
        found, printed = at_import(name, *words, JAX_PLATFORMS="cpu", **off)
        prefixes = ("NEURON", "FI_", "MALLOC", "JAX")
        assert {variable for variable in found if variable.startswith(prefixes)} == {"JAX_PLATFORMS", *off}
        assert printed == ""
        found, error = at_import(name, *words, JAX_PLATFORMS="neuron")
        assert (found, "/dev/neuron0" in error) == (None, True)
    found, error = environment_at_import("--instance=trn1.32xlarge", NEURON_RT_STOCHASTIC_ROUNDING_EN="1")
    assert found is None
    assert_names(error, "error: NEURON_RT_STOCHASTIC_ROUNDING_EN=1", "precision.policy")


def test_recorded_environment_is_limited_to_relevant_variables():
    environ = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "-x", "AWS_SECRET_ACCESS_KEY": "s", "HOME": "/"}
    assert neuron_env.variables_to_record(environ) == {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "-x"}


# The command


@pytest.fixture
def env_here(monkeypatch, capsys):
    """A function of the words of the command that runs it here: what it printed; the variables are the only ones."""

    def run(*words, **variables):
        monkeypatch.setattr(os, "environ", variables)
        code = command.main(["--config=7b", *words])
        assert code == 0
        return capsys.readouterr()

    return run


NODES = ("--instance=trn1.32xlarge", "--nodes=3", "--coordinator=first")


def test_env_command_prints_shell_exports(env_here):
    printed = env_here(*NODES, "--node=2", NEURON_CC_FLAGS="--dump='/a b' --x=$HOME", MALLOC_ARENA_MAX="a\n'b")
    expected = environment(
        SEVEN_B.precision,
        SEVEN_B.parallel,
        Topology("trn1.32xlarge", nodes=3, rank=2, coordinator="first"),
        current={"NEURON_CC_FLAGS": "--dump='/a b' --x=$HOME", "MALLOC_ARENA_MAX": "a\n'b"},
    )
    show = f"import json, os; print(json.dumps({{n: os.environ[n] for n in {list(expected.variables)}}}))"
    words = [shutil.which("bash"), "-c", 'eval "$1" && "$2" -c "$3"', "-", printed.out, sys.executable, show]
    done = subprocess.run(words, capture_output=True, text=True, env={"PATH": "/of/the/shell"}, check=True)
    found = json.loads(done.stdout)
    first, rest = expected.variables["PATH"].split(neuron_env.TOOLS_FOLDER)
    assert found.pop("PATH") == f"{first}{neuron_env.TOOLS_FOLDER}:/of/the/shell"  # not of the process that printed it
    assert rest != ":/of/the/shell"
    assert found == {name: value for name, value in expected.variables.items() if name != "PATH"}
    assert_names(printed.err, "MALLOC_ARENA_MAX: ", "a\n'b", "64")


def test_env_command_prints_all_nodes(env_here):
    assert [line for line in env_here(*NODES, "--node=all").out.splitlines() if "INDEX" in line or line[0] == "#"] == [
        line for rank in range(3) for line in (f"# rank {rank} of 3", f"export NEURON_PJRT_PROCESS_INDEX={rank}")
    ]
    words = ("--config.data.tokenizer=package:austen_2k.model", "--config.model.vocab_size=0", "--nodes=2", "--node=1")
    printed = env_here("--instance=trn2.48xlarge", "--coordinator=a", *words, NEURON_LOGICAL_NC_CONFIG="1").out
    assert "export NEURON_PJRT_PROCESSES_NUM_DEVICES=128,128\n" in printed


def test_profile_of_the_devices_is_recorded_by_jax_profiler_alone():
    recorded = environment(MIXED, HLAT, PLACE, current={}, profile="/run/p").variables
    plain = environment(MIXED, HLAT, PLACE, current={}).variables
    added = {"NEURON_RT_INSPECT_DEVICE_PROFILE": "1", "NEURON_RT_INSPECT_OUTPUT_DIR": "/run/p"}
    assert recorded == plain | added
    assert environment(MIXED, HLAT, PLACE, current=recorded, profile="/run/p").variables == recorded
    with pytest.raises(ValueError, match=r"^NEURON_RT_INSPECT_ENABLE"):
        environment(MIXED, HLAT, PLACE, current={"NEURON_RT_INSPECT_ENABLE": "1"}, profile="/run/p")


def test_training_without_the_plugin_ends_with_one_line():
    found, error = environment_at_import("--instance=trn1.32xlarge")
    assert found is None
    assert_names(error, "error: ", sys.executable, "jax-neuronx", "libneuronxla", "`neuron`")
    assert error.count("\n") == 1


def test_train_records_the_devices_of_process_0_if_profiled(monkeypatch, with_plugin, tmp_path):
    for steps, process_id, recorded in (("2:3", 0, True), ("2:3", 1, False), ("", 0, False)):
        environ = {}
        monkeypatch.setattr(os, "environ", environ)
        words = ["--coordinator=a:41001", "--num_processes=2", f"--process_id={process_id}", "--instance=trn1.32xlarge"]
        words.append(f"--config.train.profile_steps={steps}")
        mutable, values = flags_lib.parse(["--config=tiny", *words], train._define)
        train._set_environment(resolve(mutable), values, workdir=tmp_path)
        assert environ["NEURON_PJRT_PROCESS_INDEX"] == str(process_id)
        folder = environ.get("NEURON_RT_INSPECT_OUTPUT_DIR")
        assert folder == (str(tmp_path / "neuron_profile") if recorded else None)


if __name__ == "__main__":
    GOLDEN.write_text(json.dumps(golden_runs(), indent=1) + "\n")
