"""launch/node.sh: what it exports and runs on each node, and what it refuses. Real jobs start with it elsewhere."""

import os
import shlex
import shutil
import subprocess

import jobs
import pytest

TRAIN = ["python", "-m", "hlat_jax.train", "--config=tiny", "--config.train.num_steps=3"]


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
        env = {"PATH": os.environ["PATH"], "DEV": str(tmp_path / "dev"), "SYS": str(tmp_path / "sys"), **variables}
        words = [str(jobs.NODE), "--dry_run", *flags, *TRAIN[3:]]
        done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=20, check=False)
        if done.returncode:
            assert done.returncode == 2, done.stderr
            assert done.stdout == ""
            return {}, [], done.stderr
        *exports, command = [shlex.split(line) for line in done.stdout.splitlines()]
        assert all(words[0] == "export" for words in exports)
        return dict(word.split("=", 1) for [_, word] in exports), command, done.stderr

    return run


def of_job(coordinator, num_processes, process_id):
    return [f"--coordinator={coordinator}", f"--num_processes={num_processes}", f"--process_id={process_id}"]


def test_node_alone_trains_without_a_job(dry_run):
    assert dry_run() == ({}, TRAIN, "")
    assert dry_run("--num_nodes=1", "--node=0") == ({}, TRAIN, "")


def test_node_takes_its_place_from_flags(dry_run):
    exports, command, _ = dry_run("--num_nodes=4", "--node=3", "--coordinator=first", "--port=5000")
    assert (exports, command) == ({}, TRAIN + of_job("first:5000", 4, 3))


def test_node_takes_its_place_from_slurm(dry_run, tmp_path):
    variables = jobs.node_variables("slurm", 4, 2, folder=tmp_path / "bin")
    assert dry_run(**variables)[1] == TRAIN + of_job("127.0.0.1:41001", 4, 2)
    assert dry_run("--coordinator=other", **variables)[1] == TRAIN + of_job("other:41001", 4, 2)


def test_node_takes_its_place_from_open_mpi_also_inside_slurm(dry_run, tmp_path):
    variables = jobs.node_variables("mpi", 4, 2, folder=tmp_path / "bin")
    assert dry_run("--coordinator=first", **variables)[1] == TRAIN + of_job("first:41001", 4, 2)
    inside = jobs.node_variables("slurm", 4, 0, folder=tmp_path / "bin") | variables
    assert dry_run("--coordinator=first", **inside)[1] == TRAIN + of_job("first:41001", 4, 2)
    assert dry_run("--coordinator=a", "--num_nodes=2", "--node=1", **inside)[1] == TRAIN + of_job("a:41001", 2, 1)


def test_node_with_neuron_devices_exports_what_their_runtime_needs(dry_run):
    exports, command, _ = dry_run("--num_nodes=3", "--node=1", "--coordinator=first", neuron_devices=16)
    assert exports == {
        "JAX_PLATFORMS": "neuron,cpu",
        "NEURON_FORCE_PJRT_PLUGIN_REGISTRATION": "1",
        "MALLOC_ARENA_MAX": "64",
        "NEURON_RT_ROOT_COMM_ID": "first:41000",
        "NEURON_PJRT_PROCESSES_NUM_DEVICES": "32,32,32",
        "NEURON_PJRT_PROCESS_INDEX": "1",
        "FI_PROVIDER": "efa",
        "FI_EFA_USE_DEVICE_RDMA": "1",
        "FI_EFA_FORK_SAFE": "1",
        "FI_LOG_LEVEL": "warn",
    }
    assert command == TRAIN + of_job("first:41001", 3, 1)


@pytest.mark.parametrize(
    ("instance", "num_devices", "variables", "cores"),
    [
        ("trn1.2xlarge", 1, {}, "2"),
        ("trn1n.32xlarge", 16, {}, "32"),
        ("trn2.48xlarge", 16, {}, "64"),
        ("trn2.48xlarge", 16, {"NEURON_LOGICAL_NC_CONFIG": "1"}, "128"),
    ],
)
def test_node_counts_the_cores_of_its_instance(dry_run, instance, num_devices, variables, cores):
    place = ("--num_nodes=2", "--node=0", "--coordinator=first")
    exports, _, _ = dry_run(*place, neuron_devices=num_devices, instance=instance, **variables)
    assert exports["NEURON_PJRT_PROCESSES_NUM_DEVICES"] == f"{cores},{cores}"


def test_node_alone_with_neuron_devices_needs_no_network(dry_run):
    exports, command, _ = dry_run(neuron_devices=1, instance="trn1.2xlarge")
    assert exports.keys() == {"JAX_PLATFORMS", "NEURON_FORCE_PJRT_PLUGIN_REGISTRATION", "MALLOC_ARENA_MAX"}
    assert command == TRAIN


def test_node_keeps_variables_of_the_caller_but_for_its_place(dry_run):
    own = {"FI_LOG_LEVEL": "info", "NEURON_PJRT_PROCESS_INDEX": "7"}
    exports, _, _ = dry_run("--num_nodes=2", "--node=1", "--coordinator=first", neuron_devices=16, **own)
    assert exports["FI_LOG_LEVEL"] == "info"
    assert exports["NEURON_PJRT_PROCESS_INDEX"] == "1"


@pytest.mark.parametrize(
    ("flags", "variables", "message"),
    [
        (["--num_nodes=2"], {}, "--num_nodes and --node belong together"),
        (["--num_nodes=2", "--node=0"], {}, "--coordinator=HOST is missing"),
        (["--num_nodes=2", "--node=2", "--coordinator=a"], {}, "--node=2 must lie in 0 .. 1"),
        (["--num_nodes=2", "--node=-1", "--coordinator=a"], {}, "--node=-1 must be a whole number of at least 0"),
        (["--num_nodes=two", "--node=0", "--coordinator=a"], {}, "--num_nodes=two must be a whole number"),
        (["--num_nodes=2", "--node=0", f"--coordinator={'a' * 64}"], {}, "has 64 characters; Neuron takes 63"),
        (["--coordinator=a"], {}, "needs --num_nodes and --node, or the variables of Slurm or Open MPI"),
        (["--process_id=0"], {}, "--process_id=0: give --num_nodes and --node"),
        ([], {"OMPI_COMM_WORLD_RANK": "0"}, "OMPI_COMM_WORLD_SIZE is not"),
        ([], {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2"}, "does not say where rank 0 runs"),
        ([], {"SLURM_NODEID": ""}, "SLURM_NODEID is not set: start this script with srun"),
        ([], {"SLURM_PROCID": "5"}, "several tasks run on a node; use srun --ntasks-per-node=1"),
        ([], {"SLURM_NNODES": "3"}, "SLURM_NNODES=3, but SLURM_JOB_NODELIST names 2 nodes"),
        ([], {"SLURM_JOB_NODELIST": "?"}, "scontrol cannot read SLURM_JOB_NODELIST=?"),
    ],
)
def test_node_refuses_what_names_no_place(dry_run, tmp_path, flags, variables, message):
    if any(name.startswith("SLURM") for name in variables):
        variables = jobs.node_variables("slurm", 2, 1, folder=tmp_path / "bin") | variables
    _, _, error = dry_run(*flags, **variables)
    assert error.startswith("error: ")
    assert message in error


def test_node_refuses_slurm_without_scontrol(dry_run):
    if shutil.which("scontrol"):
        pytest.skip("this machine has Slurm")
    assert "there is no scontrol" in dry_run(SLURM_JOB_NODELIST="node[0-1]")[2]


def test_node_refuses_an_unknown_instance_unless_its_cores_are_given(dry_run):
    place = ("--num_nodes=2", "--node=0", "--coordinator=first")
    _, _, error = dry_run(*place, neuron_devices=4, instance="inf2.24xlarge")
    assert "the NeuronCores of instance type 'inf2.24xlarge' are not known here: give --cores=N" in error
    exports, _, _ = dry_run(*place, "--cores=8", neuron_devices=4, instance="inf2.24xlarge")
    assert exports["NEURON_PJRT_PROCESSES_NUM_DEVICES"] == "8,8"
    assert "--port=41000 is that of Neuron's" in dry_run(*place, "--port=41000", neuron_devices=16)[2]
