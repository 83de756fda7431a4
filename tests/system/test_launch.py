"""launch/node.sh: what it exports and runs on each node, and what it refuses. Real jobs start with it elsewhere."""

import os
import shlex
import signal
import subprocess
import sys
import sysconfig

import jobs
import neuron_machine
import pytest
from refusals import assert_names

from hlat_jax.cli import config_files
from hlat_jax.host.neuron_env import environment
from hlat_jax.host.neuron_topology import Topology
from hlat_jax.resolve import resolve

SCRIPTS = sysconfig.get_path("scripts")
PATH = f"{SCRIPTS}{os.pathsep}{os.environ['PATH']}"
EXPORTED_PATH = f"{SCRIPTS}:/opt/aws/neuron/bin:$PATH"
TRAIN = [sys.executable, "-m", "hlat_jax.train", "--config=tiny", "--config.train.num_steps=3"]


ROOT = jobs.NODE.parent.parent


def dry(*words, **variables):
    """Returns the finished process of the script's dry run."""
    env = {"PATH": PATH, "PYTHON": sys.executable, **variables}
    words = [str(jobs.NODE), "--dry-run", *words]
    return subprocess.run(words, cwd=ROOT, env=env, capture_output=True, text=True, timeout=600, check=False)


@pytest.fixture
def dry_run(tmp_path):
    """A function of the script's flags and the variables of a node: (exports, command, the error on stderr)."""

    def run(*flags, neuron_devices=0, instance="trn1.32xlarge", **variables):
        (tmp_path / "dev").mkdir(exist_ok=True)
        for index in range(neuron_devices):
            (tmp_path / "dev" / f"neuron{index}").touch()
        product = tmp_path / "sys/devices/virtual/dmi/id/product_name"
        product.parent.mkdir(parents=True, exist_ok=True)
        product.write_text(f"{instance}\n")
        variables = {"DEV": str(tmp_path / "dev"), "SYS": str(tmp_path / "sys"), **variables}
        done = dry(*flags, *TRAIN[3:], **variables)
        if done.returncode:
            assert done.returncode == 2, done.stderr
            assert done.stdout == ""
            return {}, [], done.stderr
        [(exports, command)] = nodes_of(done.stdout)
        return exports, command, done.stderr

    return run


def nodes_of(printed):
    """Returns (what is exported, the command) of each node in what a dry run printed."""
    nodes, exports = [], {}
    for line in printed.splitlines():
        words = shlex.split(line, comments=True)
        if words[:1] == ["export"]:
            assert len(words) == 2
            exports |= [words[1].split("=", 1)]
        elif words and words[0] != "unset":
            nodes.append((exports, words))
            exports = {}
    return nodes


def computed(instance="trn1.32xlarge", **fields):
    """Returns the variables of `tiny`, as the package computes them."""
    tiny = resolve(config_files.load("tiny"))
    variables = environment(tiny.precision, tiny.parallel, Topology(instance, **fields), current={}).variables
    return variables | {"PATH": EXPORTED_PATH}


def of_job(coordinator, num_processes, process_id):
    return [f"--coordinator={coordinator}", f"--num_processes={num_processes}", f"--process_id={process_id}"]


def test_node_reads_its_rank_from_flags_slurm_or_open_mpi(dry_run, tmp_path):
    assert dry_run() == dry_run("--nodes=1", "--node=0") == ({}, TRAIN, "")
    flags = ("--nodes=4", "--node=3", "--coordinator=first", "--port=5000")
    assert dry_run(*flags)[:2] == ({}, TRAIN + of_job("first:5000", 4, 3))
    slurm = jobs.node_variables("slurm", 4, 2, folder=tmp_path / "bin")
    assert dry_run(**slurm)[1] == TRAIN + of_job("127.0.0.1:41001", 4, 2)
    assert dry_run("--coordinator=other", **slurm)[1] == TRAIN + of_job("other:41001", 4, 2)
    mpi = jobs.node_variables("mpi", 4, 2, folder=tmp_path / "bin")
    assert dry_run("--coordinator=first", **mpi)[1] == TRAIN + of_job("first:41001", 4, 2)
    inside = jobs.node_variables("slurm", 4, 0, folder=tmp_path / "bin") | mpi
    assert dry_run("--coordinator=first", **inside)[1] == TRAIN + of_job("first:41001", 4, 2)
    assert dry_run("--coordinator=a", "--nodes=2", "--node=1", **inside)[1] == TRAIN + of_job("a:41001", 2, 1)


@pytest.mark.slow
def test_every_node_takes_slurms_address_of_the_first(dry_run, tmp_path):
    for shown, coordinator in [
        ("NodeName=trn1-dy-1 Arch=x86_64 NodeAddr=10.0.3.17 NodeHostName=trn1-dy-1", "10.0.3.17"),
        ("NodeName=trn1-dy-1 NodeAddr=trn1-dy-1 NodeHostName=trn1-dy-1", "trn1-dy-1"),
        ("", "trn1-dy-1"),
    ]:
        for node in range(2):
            variables = jobs.node_variables("slurm", 2, node, folder=tmp_path / "bin")
            script = tmp_path / "bin" / "scontrol"
            names = "trn1-dy-1\\ntrn1-dy-2\\n"
            known = f"'--oneliner show node trn1-dy-1') echo '{shown}' ;;" if shown else ""
            script.write_text(
                f"#!/bin/sh\ncase $* in 'show hostnames '*) printf '{names}' ;; {known} *) exit 1 ;; esac\n"
            )
            exports, command, _ = dry_run(neuron_devices=16, **variables)
            assert command == [*TRAIN, "--instance=trn1.32xlarge", *of_job(f"{coordinator}:41001", 2, node)]
            assert exports["NEURON_RT_ROOT_COMM_ID"] == f"{coordinator}:41000"


def test_node_with_neuron_devices_exports_its_computed_environment(dry_run):
    exports, command, _ = dry_run("--nodes=3", "--node=1", "--coordinator=first", neuron_devices=16)
    assert exports == computed(nodes=3, rank=1, coordinator="first")
    assert command == [*TRAIN, "--instance=trn1.32xlarge", *of_job("first:41001", 3, 1)]
    exports, command, _ = dry_run(neuron_devices=1, instance="trn1.2xlarge")  # needs no network
    assert (exports, command) == (computed("trn1.2xlarge"), [*TRAIN, "--instance=trn1.2xlarge"])
    exports, command, _ = dry_run("--cores=8", neuron_devices=16)
    assert (exports, command) == (computed(cores=8), [*TRAIN, "--instance=trn1.32xlarge", "--cores=8"])
    assert dry_run(neuron_devices=16, JAX_PLATFORMS="cpu")[:2] == ({}, TRAIN)
    for instance, num_devices, variables, cores in [
        ("trn1n.32xlarge", 16, {}, "32"),
        ("trn2.48xlarge", 16, {}, "64"),
        ("trn2.48xlarge", 16, {"NEURON_LOGICAL_NC_CONFIG": "1"}, "128"),
    ]:
        place = ("--nodes=2", "--node=0", "--coordinator=first")
        exports, _, _ = dry_run(*place, neuron_devices=num_devices, instance=instance, **variables)
        assert exports["NEURON_PJRT_PROCESSES_NUM_DEVICES"] == f"{cores},{cores}"


@pytest.mark.slow
def test_node_finds_tcmalloc_and_the_efa_libraries_of_its_image(dry_run, tmp_path):
    for number, (there, folder) in enumerate(
        [
            ((), None),
            (("usr/lib/x86_64-linux-gnu/libtcmalloc_minimal.so.4",), None),  # Ubuntu without EFA
            (("usr/lib64/libtcmalloc.so.4", "opt/amazon/efa/lib64/x"), "opt/amazon/efa/lib64"),  # Amazon Linux
        ]
    ):
        image = tmp_path / str(number)
        for path in there:
            (image / path).parent.mkdir(parents=True, exist_ok=True)
            (image / path).touch()
        exports, _, _ = dry_run(neuron_devices=16, IMAGE_ROOT=str(image), LD_LIBRARY_PATH="/opt/mine")
        preload, libraries = there and str(image / there[0]), folder and f"{image / folder}:/opt/mine"
        assert (exports.get("LD_PRELOAD"), exports.get("LD_LIBRARY_PATH")) == (preload or None, libraries)
        assert "LD_PRELOAD" not in dry_run(neuron_devices=16, IMAGE_ROOT=str(image), LD_PRELOAD="/mine.so")[0]


def test_node_puts_its_compiler_first_on_the_path(dry_run, tmp_path):
    exports, _, _ = dry_run(neuron_devices=16)
    assert exports["PATH"] == EXPORTED_PATH
    assert dry_run(JAX_PLATFORMS="cpu")[0] == {}


def test_node_reads_settings_only_from_the_config(tmp_path):
    words = ("--config.parallel.zero1=true", "--config.train.seed", "3", "--workdir=/w", "--config", "7b")
    [(exports, command)] = nodes_of(dry("--instance=trn1.32xlarge", *words).stdout)
    assert exports["NEURON_RUN_TRIVIAL_COMPUTATION_ON_CPU"] == "1"
    assert command[3:] == [*words, "--instance=trn1.32xlarge"]
    for start in ([f"--init_from={tmp_path}"], ["--init_from", str(tmp_path)]):
        said = dry("--instance=trn1.32xlarge", *start).stderr
        assert_names(said, f"train.init_from: {tmp_path}")  # of `neuron env`, which has read it


@pytest.mark.slow
def test_dry_run_anywhere_prints_every_node():
    num_nodes, instance = 64, "trn1.32xlarge"
    place = [f"--nodes={num_nodes}", f"--instance={instance}", "--coordinator=first"]
    done = dry(*place, "--port=5000", *TRAIN[3:])
    nodes = nodes_of(done.stdout)
    assert len(nodes) == num_nodes
    for rank, (exports, command) in enumerate(nodes):
        assert exports == computed(instance, nodes=num_nodes, rank=rank, coordinator="first", port=5000)
        assert command == [*TRAIN, f"--instance={instance}", *of_job("first:5000", num_nodes, rank)]
    titles = [line for line in done.stdout.splitlines() if line.startswith("#")]
    assert titles == [f"# node {rank} of {num_nodes}" for rank in range(num_nodes)]


def test_node_refuses_invalid_rank_settings(dry_run, tmp_path):
    for flags, variables, *facts in [
        (["--node=1"], {}, "--nodes", "--node"),
        (["--nodes=2", "--node=0"], {}, "--coordinator=HOST"),
        (["--nodes=2", "--node=2", "--coordinator=a"], {}, "--node=2", "1"),
        (["--nodes=two", "--node=0", "--coordinator=a"], {}, "--nodes=two"),
        (["--process_id=0"], {}, "--process_id=0", "--nodes", "--node"),
        ([], {"OMPI_COMM_WORLD_RANK": "0"}, "OMPI_COMM_WORLD_SIZE"),
        ([], {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2"}, "--coordinator=HOST"),
        ([], {"SLURM_NODEID": ""}, "SLURM_NODEID", "srun"),
        ([], {"SLURM_PROCID": "5"}, "SLURM_PROCID=5", "--ntasks-per-node=1"),
        ([], {"SLURM_NNODES": "3"}, "SLURM_NNODES=3", "SLURM_JOB_NODELIST", "2 nodes"),
    ]:
        if any(name.startswith("SLURM") for name in variables):
            variables = jobs.node_variables("slurm", 2, 1, folder=tmp_path / "bin") | variables
        _, _, error = dry_run(*flags, **variables)
        assert error.startswith("error: ")
        assert_names(error, *facts)


def test_node_refuses_what_is_no_number_without_evaluating_it(dry_run, tmp_path):
    for launcher, name in (("slurm", "SLURM_NNODES"), ("mpi", "OMPI_COMM_WORLD_RANK"), ("flags", "--port")):
        for value in ("PATH[$(touch x)]", "08", "-1", "99999999999999999999"):
            variables = {} if launcher == "flags" else jobs.node_variables(launcher, 2, 1, folder=tmp_path / "bin")
            flags = {"--nodes": "2", "--node": "1", "--coordinator": "a"} if launcher == "flags" else {}
            (flags if launcher == "flags" else variables)[name] = value
            _, _, error = dry_run(*(f"{flag}={word}" for flag, word in flags.items()), **variables)
            assert error.startswith(f"error: {name}={value} ")
    assert not (ROOT / "x").exists()


AT_EXIT = """
if sys.argv[0] == "-c":  # the trial, on the CPU, as there is no plugin
    os.environ["JAX_PLATFORMS"] = "cpu"
elif "hlat_jax.train" in sys.orig_argv:
    import atexit
    atexit.register(lambda: print("LAST", os.environ.get("JAX_COMPILATION_CACHE_DIR")))
"""


@pytest.mark.slow
def test_node_goes_on_without_a_cache_of_jax_that_crashes(tmp_path):
    site, path = neuron_machine.installed(tmp_path / "site"), neuron_machine.breaking_cache(tmp_path / "b", crash=True)
    with (tmp_path / "b" / "sitecustomize.py").open("a") as file:
        file.write(AT_EXIT)
    env = {"PATH": PATH, "PYTHON": sys.executable, "LOCAL_CACHE": str(tmp_path / "cache")}
    env["PYTHONPATH"] = os.pathsep.join([path, site])
    words = [str(jobs.NODE), "--instance=trn1.32xlarge", "--config=tiny", f"--workdir={tmp_path / 'run'}"]
    for _ in range(2):  # the second start reads the result of the first
        done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=600, check=False)
        first, second, *_, last = done.stdout.splitlines()
        assert_names(first, "XlaRuntimeError: RET_CHECK")
        assert second.endswith("1 x trn1.32xlarge")
        assert last == "LAST None"
        assert "'neuron'" in done.stderr  # it went on to the devices


def test_node_without_the_plugin_ends_with_one_line(tmp_path):
    env = {"PATH": PATH, "PYTHON": sys.executable, "LOCAL_CACHE": str(tmp_path)}
    words = [str(jobs.NODE), "--instance=trn1.32xlarge", "--config=tiny", f"--workdir={tmp_path / 'run'}"]
    done = subprocess.run(words, cwd=ROOT, env=env, capture_output=True, text=True, timeout=600, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert_names(done.stderr, "error: ", sys.executable, "jax-neuronx", "libneuronxla")
    assert done.stderr.count("\n") == 1


@pytest.fixture
def disks(tmp_path):
    """A function that sets up disks and runs node.sh --local_disk: (process, the commands that changed the machine)."""
    folder, log = tmp_path / "bin", tmp_path / "log"
    folder.mkdir()

    def tool(name, body):
        (folder / name).write_text(f"#!/bin/sh\n{body}\n")
        (folder / name).chmod(0o755)

    def run(listed, *, partitions="", signature="", labelled="", mounted=False, flags=()):
        log.write_text("")
        tool("mountpoint", f"exit {0 if mounted else 32}")
        tool("blkid", f"[ -z '{labelled}' ] || echo '{labelled}'")
        tool("lsblk", f"case $1 in -dnpo) printf '{listed}' ;; *) printf '%s {partitions}\\n' $3 ;; esac")
        tool("wipefs", f"printf '{signature}'")
        for name in ("mdadm", "mkfs.ext4", "mkdir", "mount", "chmod"):
            tool(name, f'echo {name} "$@" >> {log}')
        tool("sudo", '[ "$1" = -n ] && shift; exec "$@"')
        tool("python", "exit 0")
        env = {"PATH": f"{folder}:{PATH}", "PYTHON": "python"}
        words = [str(jobs.NODE), "--local_disk=/mnt/nvme", "--config=tiny", *flags]
        done = subprocess.run(words, cwd=ROOT, env=env, capture_output=True, text=True, timeout=600, check=False)
        return done, log.read_text().splitlines()

    return run


EBS, NVME = "Amazon Elastic Block Store", "Amazon EC2 NVMe Instance Storage"
TWO = f"/dev/nvme0n1 {EBS}\\n/dev/nvme1n1 {NVME}\\n/dev/nvme2n1 {NVME}   \\n"
MOUNT = ["mkdir -p /mnt/nvme", "mount /dev/md/hlat-local /mnt/nvme", "chmod 1777 /mnt/nvme"]
MADE = [
    "mdadm --create /dev/md/hlat-local --run --level=0 --raid-devices=2 /dev/nvme1n1 /dev/nvme2n1",
    "mkfs.ext4 -q -m 0 -L hlat-local /dev/md/hlat-local",
    *MOUNT,
]


def test_local_disk_is_made_of_the_disks_of_the_instance_once(disks):
    done, commands = disks(TWO)
    assert (done.returncode, commands) == (0, MADE), done.stderr
    one = f"/dev/nvme1n1 {NVME}\\n"
    assert disks(one)[1] == ["mkfs.ext4 -q -m 0 -L hlat-local /dev/nvme1n1", *(
        line.replace("/dev/md/hlat-local", "/dev/nvme1n1") for line in MOUNT
    )]  # fmt: skip
    assert disks(TWO, labelled="/dev/md/hlat-local")[1] == MOUNT  # after a reboot
    assert disks(TWO, mounted=True)[1] == []


def test_local_disk_that_is_in_use_is_refused_and_left_alone(disks):
    for options, fact in (
        ({"partitions": "ext4 "}, "(/dev/nvme1n1 ext4)"),
        ({"partitions": " /data"}, "(/dev/nvme1n1  /data)"),
        ({"partitions": "\\n/dev/nvme1n1p1"}, "/dev/nvme1n1 "),
        ({"signature": "0x438 ext4"}, "(/dev/nvme1n1 0x438 ext4)"),
    ):
        done, commands = disks(TWO, **options)
        assert (done.returncode, commands) == (2, []), done.stderr
        assert_names(done.stderr, fact)
    done, commands = disks(f"/dev/nvme0n1 {EBS}\\n")
    assert (done.returncode, commands) == (2, [])
    assert "--local_disk=/mnt/nvme" in done.stderr


def test_dry_run_prints_the_commands_for_the_local_disk(disks):
    done, commands = disks(TWO, flags=("--dry-run",))
    assert (done.returncode, commands) == (0, [])
    assert done.stdout.splitlines()[:-1] == [f"# sudo {line}" for line in MADE]
    printed = dry("--local_disk=/mnt/nvme", "--instance=trn1.32xlarge", "--config=tiny").stdout
    assert "export NEURON_COMPILE_CACHE_URL=/mnt/nvme/hlat-compile-cache/neuronx-cc\n" in printed
    assert "--local_disk=nvme" in dry("--local_disk=nvme", "--config=tiny").stderr


# Writes a program into the cache, and ends with 75 after a signal.
STOPPED = """#!/usr/bin/env bash
trap 'echo "$1" > "$JAX_COMPILATION_CACHE_DIR/program"; exit 75' USR1 TERM
mkdir -p "$JAX_COMPILATION_CACHE_DIR"
touch "$JAX_COMPILATION_CACHE_DIR/x.lock"
echo started
while true; do sleep 0.05; done
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_node_that_fills_a_cache_copies_it_after_a_signal(tmp_path, number):
    python = tmp_path / "python"
    python.write_text(STOPPED)
    python.chmod(0o755)
    env = {"PATH": PATH, "PYTHON": str(python), "LOCAL_CACHE": str(tmp_path / "local")}
    words = [str(jobs.NODE), f"--fill_cache={tmp_path / 'shared'}", "--config=tiny"]
    with subprocess.Popen(words, env=env, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "started\n"
        process.send_signal(number)
        assert process.wait(600) == 75
    assert [path.name for path in (tmp_path / "shared" / "jax").iterdir()] == ["program"]  # and not the lock


def test_signal_before_the_run_ends_node_with_the_stopped_code(tmp_path):
    python, hold = tmp_path / "python", tmp_path / "hold"
    hold.touch()
    # computes the environment for a while
    python.write_text(f"#!/bin/sh\necho $3 >&2\nwhile [ -e {hold} ]; do sleep 0.05; done\n")
    python.chmod(0o755)
    words = [str(jobs.NODE), "--instance=trn1.32xlarge", "--stopped_code=75", "--config=tiny"]
    env = {"PATH": PATH, "PYTHON": str(python)}
    with subprocess.Popen(words, env=env, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr.readline() == "env\n"
        process.send_signal(signal.SIGTERM)
        hold.unlink()
        assert process.wait(600) == 75
        assert process.stderr.read() == ""  # the run was not started
