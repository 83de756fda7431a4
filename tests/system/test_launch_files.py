"""Scripts and manifests of launch/: shell checked, Kubernetes objects against their schemas, and one with the other."""

import os
import pathlib
import re
import subprocess
import sys

import jobs
import kubernetes_validate
import pytest
import yaml
from data_files import write_jsonl
from test_launch import EXPORTED_PATH, dry, nodes_of

from hlat_jax.cli import config_files
from hlat_jax.cli import flags as flags_lib
from hlat_jax.data import sources
from hlat_jax.data.tokenizer import resolve_with_tokenizer
from hlat_jax.facts import hardware
from hlat_jax.host import neuron_topology, watchdog
from hlat_jax.host.neuron_env import environment
from hlat_jax.host.neuron_topology import INSTANCES, Topology
from hlat_jax.neuron.programs import EXPLAINED, findings, layout_for_neuron
from hlat_jax.plan.report import Site, make_plan
from hlat_jax.program import make_program
from hlat_jax.resolve import resolve
from hlat_jax.run.compilation import traced_programs

LAUNCH = jobs.NODE.parent
ROOT = LAUNCH.parent
SCRIPTS = sorted([*LAUNCH.rglob("*.sh"), *LAUNCH.rglob("*.sbatch"), ROOT / ".ci" / "run"])
MANIFESTS = [LAUNCH / "eks" / "precompile.yaml", LAUNCH / "eks" / "train.yaml"]

# vCPUs and GiB of host memory. Source: AWS Neuron docs, Trn1 and Trn2 architecture
HOSTS = {"trn1.32xlarge": (128, 512), "trn1n.32xlarge": (128, 512), "trn2.48xlarge": (192, 2048)}


def test_scripts_pass_shellcheck_and_can_be_run():
    words = ["shellcheck", "--exclude=SC1091", *map(str, SCRIPTS)]  # the activation script is not there to follow
    env = os.environ | {"PATH": f"{pathlib.Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run(words, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    assert all(os.access(path, os.X_OK) for path in SCRIPTS)


def loaded(path):
    """Returns (the JobSet, the spec of its Job, the spec of its pods, its container)."""
    job_set = yaml.safe_load(path.read_text())
    [job] = job_set["spec"]["replicatedJobs"]
    spec = job["template"]["spec"]
    [container] = spec["template"]["spec"]["containers"]
    return job_set, spec, spec["template"]["spec"], container


def test_manifests_follow_their_schemas():
    for path in MANIFESTS:
        job_set, spec, _, _ = loaded(path)
        assert (job_set["apiVersion"], job_set["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
        assert set(job_set["spec"]) <= {"failurePolicy", "network", "replicatedJobs"}
        # Source: JobSet v0.6.0 to v0.12.0, pkg/webhooks/jobset_webhook.go, ruleNameFmt
        names = [rule["name"] for rule in job_set["spec"]["failurePolicy"]["rules"]]
        assert all(re.fullmatch(r"[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?", name) for name in names)
        job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "x"}, "spec": spec}
        [lowest] = re.findall(r"Kubernetes (\d\.\d+) or later", path.read_text())
        assert f"Kubernetes {lowest}" in (ROOT / "docs" / "trainium.md").read_text()
        for version in (lowest, "1.33", "1.37"):
            kubernetes_validate.validate(job, version, strict=True)
        with pytest.raises(kubernetes_validate.ValidationError, match="onPodConditions"):
            kubernetes_validate.validate(job, f"1.{int(lowest[2:]) - 1}", strict=True)


BUILD = LAUNCH / "eks" / "build.yaml"


def test_manifest_of_a_build_follows_its_schema():
    [lowest] = re.findall(r"Kubernetes (\d\.\d+) or later", BUILD.read_text())
    job = yaml.safe_load(BUILD.read_text())
    for version in (lowest, "1.33", "1.37"):
        kubernetes_validate.validate(job, version, strict=True)
    train = loaded(LAUNCH / "eks" / "train.yaml")
    pods, [container] = job["spec"]["template"]["spec"], job["spec"]["template"]["spec"]["containers"]
    for name in ("runAsNonRoot", "runAsUser", "runAsGroup"):
        assert pods["securityContext"][name] == train[2]["securityContext"][name]
    assert container["securityContext"] == train[3]["securityContext"]
    assert container["image"] == pods["initContainers"][0]["image"] == train[3]["image"]
    rules = job["spec"]["podFailurePolicy"]["rules"]
    assert rules[0]["onExitCodes"] == {"containerName": container["name"], "operator": "In", "values": [2]}


def test_indices_of_the_manifest_build_the_parts_of_a_dataset(tmp_path):
    job = yaml.safe_load(BUILD.read_text())["spec"]
    [container] = job["template"]["spec"]["containers"]
    (tmp_path / "redpajama").mkdir()
    for name in "abcde":
        write_jsonl(tmp_path / "redpajama" / f"{name}.jsonl", [name, name * 2])
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    (tmp_path / "bin" / "python").chmod(0o755)
    places = {"/fsx/llama2/tokenizer.model": "package:austen_2k.model", "/fsx/": f"{tmp_path}/", "/data/": "/"}
    words = container["command"]
    for place, here in places.items():
        words = [word.replace(place, here) for word in words]
    for index in range(job["completions"]):  # Kubernetes sets the variable for each index
        path = f"{tmp_path}/bin{os.pathsep}{os.environ['PATH']}"
        env = os.environ | {"JOB_COMPLETION_INDEX": str(index), "PATH": path}
        subprocess.run(words, env=env, cwd=ROOT, capture_output=True, timeout=600, check=True)
    documents = sources.open_corpus(f"{tmp_path}/web", text_field="text", key="data.train")
    assert len(documents) == 10
    first = next(iter(container["volumeMounts"]))["mountPath"]
    [out] = [word.removeprefix("--out=") for word in container["command"] if word.startswith("--out=")]
    [folders] = job["template"]["spec"]["initContainers"][0]["env"]
    assert out.startswith(f"{folders['value']}/")
    assert out.startswith(f"{first}/")


def test_manifests_are_consistent_with_the_instance():
    for path in MANIFESTS:
        job_set, spec, pods, container = loaded(path)
        name = job_set["metadata"]["name"]
        flags = dict(word.removeprefix("--").split("=", 1) for word in container["command"][1:])
        kind = INSTANCES[flags["instance"]]
        limits = container["resources"]["limits"]
        assert spec["completions"] == spec["parallelism"] == int(flags["nodes"])
        assert flags["coordinator"] == f"{name}-node-0-0.{name}"
        assert pods["nodeSelector"]["node.kubernetes.io/instance-type"] == flags["instance"]
        assert (limits["aws.amazon.com/neuron"], limits["vpc.amazonaws.com/efa"]) == (kind.chips, kind.num_efa)
        mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
        assert mounts["programs"] == neuron_topology.CACHE
        assert set(mounts) == {volume["name"] for volume in pods["volumes"]}
        rules = {rule["action"]: rule["onExitCodes"] for rule in spec["podFailurePolicy"]["rules"]}
        assert all(codes["containerName"] == container["name"] for codes in rules.values())
        stopped = int(flags["stopped_code"])
        assert {action: codes["values"] for action, codes in rules.items()} == {"FailJob": [2], "Ignore": [stopped]}
        assert stopped not in (0, 1, watchdog.STUCK_CODE, watchdog.TERMINATED_CODE)
        assert set(re.findall(r"\$\((\w+)\)", " ".join(container["command"]))) <= {
            one["name"] for one in container["env"]
        }


def test_pods_of_the_manifests_have_no_rights_of_root():
    dockerfile = (LAUNCH / "eks" / "Dockerfile").read_text()
    assert re.findall("(?m)^USER (.*)", dockerfile)[-1] == re.search(r"useradd --uid (\d+)", dockerfile)[1]
    for path in MANIFESTS:
        _, _, pods, container = loaded(path)
        user = int(re.search("(?m)^USER (.*)", dockerfile)[1])
        security = pods["securityContext"]
        assert (security["runAsNonRoot"], security["runAsUser"], security["runAsGroup"]) == (True, user, user)
        assert container["securityContext"] == {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
        flags = dict(word.removeprefix("--").split("=", 1) for word in container["command"][1:])
        shared = flags.get("cache") or flags["fill_cache"]
        written = {os.path.dirname(flags["workdir"]), shared, neuron_topology.CACHE}
        [first] = pods["initContainers"]
        [folders] = first["env"]
        assert set(folders["value"].split()) == written
        assert f"find $FOLDERS -maxdepth 0 -user root -exec chown {user}:{user} {{}} +" in first["command"][-1]
        assert first["image"] == container["image"]
        assert first["volumeMounts"] == [one for one in container["volumeMounts"] if one["name"] != "shm"]
        assert {one["name"] for one in pods["volumes"] if "sizeLimit" in one.get("emptyDir", {})} == {"shm"}


def test_image_is_built_from_its_own_files_alone():
    dockerfile = (LAUNCH / "eks" / "Dockerfile").read_text()
    copied = {word for line in re.findall("(?m)^COPY (.*)", dockerfile) for word in line.split()[:-1]}
    everything, *rest = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line[0] != "#"]
    assert everything == "*"
    assert {line.removeprefix("!") for line in rest if line[0] == "!"} == copied
    assert all((ROOT / name).exists() for name in copied)


def test_probe_fails_where_alive_json_no_longer_changes(tmp_path):
    _, _, _, container = loaded(LAUNCH / "eks" / "train.yaml")
    probe = container["livenessProbe"]
    script, folder = probe["exec"]["command"]
    assert f"--workdir={folder}" in container["command"]
    assert probe["periodSeconds"] * probe["failureThreshold"] == 600  # as --stale_s of restart.sh
    words = [str(ROOT / pathlib.Path(script).relative_to(container["workingDir"])), str(tmp_path)]
    alive = tmp_path / "alive.json"

    def look():
        env = os.environ | {"SEEN": str(tmp_path / "seen")}
        return subprocess.run(words, env=env, capture_output=True, text=True, timeout=600).returncode

    def beat():
        (tmp_path / "new").write_text("{}")
        os.replace(tmp_path / "new", alive)  # as the ledger does

    assert [look(), look()] == [0, 0]  # the run is being opened
    beat()
    assert [look(), look(), look()] == [0, 0, 0]  # perhaps of an earlier process
    beat()
    assert [look(), look(), look()] == [0, 1, 1]
    beat()
    assert look() == 0
    alive.unlink()
    assert [look(), look()] == [0, 0]  # the run has ended


class Template(yaml.SafeLoader):
    """Reads CloudFormation's short functions as [name, argument]."""


def _short(loader, name, node):
    is_list = isinstance(node, yaml.SequenceNode)
    return [name, loader.construct_sequence(node, deep=True) if is_list else loader.construct_scalar(node)]


Template.add_multi_constructor("!", _short)


def test_manifests_get_the_nodes_that_the_template_makes():
    """Every interface of the instance with EFA, one placement group, and the huge pages and memory of the pods."""
    resources = yaml.load((LAUNCH / "eks" / "nodes.yaml").read_text(), Loader=Template)["Resources"]
    data = resources["Template"]["Properties"]["LaunchTemplateData"]
    cards = [(card["NetworkCardIndex"], card["DeviceIndex"]) for card in data["NetworkInterfaces"]]
    assert cards == [(index, min(index, 1)) for index in range(INSTANCES[data["InstanceType"]].num_efa)]
    assert {card["InterfaceType"] for card in data["NetworkInterfaces"]} == {"efa"}
    assert all(["Ref", "Efa"] in card["Groups"] for card in data["NetworkInterfaces"])
    assert resources[data["Placement"]["GroupName"][1]]["Properties"] == {"Strategy": "cluster"}
    assert data["BlockDeviceMappings"][0]["Ebs"]["VolumeSize"] >= 512
    pages = int(re.search(r"pages=(\d+)", data["UserData"]["Fn::Base64"])[1])
    vcpus, host_gib = HOSTS[data["InstanceType"]]
    assert hardware.node(data["InstanceType"]).host_bytes == host_gib * 2**30
    for path in MANIFESTS:
        _, spec, pods, container = loaded(path)
        ports = f"{neuron_topology.COLLECTIVES_PORT},{neuron_topology.JAX_PORT}"
        assert pods["securityContext"]["sysctls"] == [{"name": "net.ipv4.ip_local_reserved_ports", "value": ports}]
        resource = container["resources"]
        assert pods["nodeSelector"]["node.kubernetes.io/instance-type"] == data["InstanceType"]
        assert spec["completions"] <= resources["Nodes"]["Properties"]["ScalingConfig"]["MaxSize"]
        assert resource["limits"]["hugepages-2Mi"] == f"{2 * pages}Mi"
        memory_gib = int(resource["limits"]["memory"].removesuffix("Gi"))
        assert memory_gib + 2 * pages / 1024 < 0.95 * host_gib
        assert resource["requests"]["memory"] == resource["limits"]["memory"]
        assert int(resource["requests"]["cpu"]) < vcpus


def test_run_manifest_starts_valid_commands():
    _, spec, _, container = loaded(LAUNCH / "eks" / "train.yaml")
    config, node = resolve(config_files.load("7b")), spec["completions"] - 1
    script, *command = [word.replace("$(NODE)", str(node)) for word in container["command"]]
    assert (ROOT / script).resolve() == jobs.NODE
    [(exports, words)] = nodes_of(dry(*command).stdout)
    place = Topology("trn1.32xlarge", nodes=4, rank=node, coordinator="hlat-node-0-0.hlat")
    variables = environment(config.precision, config.parallel, place, current={}).variables
    assert exports == variables | {"PATH": EXPORTED_PATH}
    assert f"--process_id={node}" in words


def test_configured_node_loses_its_own_name_and_no_other(tmp_path):
    """Runs the script with fakes of the commands that need root or a network."""
    for name in ("sysctl", "apt-get", "dnf"):
        (tmp_path / name).write_text(f'#!/bin/sh\necho {name} "$@"\n')
    (tmp_path / "hostname").write_text("#!/bin/sh\n[ $1 = -s ] && echo trn1-dy-1\n")
    for path in tmp_path.iterdir():
        path.chmod(0o755)
    hosts = tmp_path / "hosts"
    hosts.write_text(
        "127.0.0.1 localhost trn1-dy-1\n127.0.1.1\ttrn1-dy-1.hlat.pcluster trn1-dy-1\n10.0.0.9 trn1-dy-1\n"
        "10.0.0.12 trn1-dy-12.hlat.pcluster trn1-dy-12\n::1 ip6-localhost\n"
    )
    env = {"PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}", "HOSTS_FILE": str(hosts), "LIMITS": str(tmp_path)}
    env["SYSCTL"] = str(tmp_path / "sysctl.d")
    (tmp_path / "sysctl.d").mkdir()
    words = [str(LAUNCH / "slurm" / "node_configured.sh")]
    done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=600, check=True)
    left = "127.0.0.1 localhost\n10.0.0.12 trn1-dy-12.hlat.pcluster trn1-dy-12\n::1 ip6-localhost\n"
    assert hosts.read_text() == left
    kept = tmp_path / "sysctl.d" / "90-hlat.conf"  # read at every start of the machine
    assert kept.read_text() == "net.ipv4.ip_local_reserved_ports=41000,41001\n"
    assert f"sysctl --load={kept}" in done.stdout
    packages = [line for line in done.stdout.splitlines() if line.startswith(("apt-get", "dnf"))]
    waits = "apt-get -o DPkg::Lock::Timeout=300"
    assert packages == [f"{waits} update", f"{waits} install -y libgoogle-perftools-dev"]
    assert "nofile" in (tmp_path / "90-hlat.conf").read_text()


def first_commands():
    """Returns (instance, overrides) of the first commands of the guide with a model on one node, one for each chip."""
    guide = (ROOT / "docs" / "trainium.md").read_text().replace("\\\n", " ")
    found = re.findall(r"^launch/node\.sh --instance=(\S+) (.*)$", guide, re.MULTILINE)
    commands = [
        (instance, [word for word in words.split() if word.startswith("--config")]) for instance, words in found
    ]
    assert [words[0] for _, words in commands] == ["--config=llama3_8b", "--config=7b"]
    return commands


@pytest.mark.slow
@pytest.mark.parametrize(("instance", "overrides"), first_commands(), ids=str)
def test_first_command_of_a_model_is_planned_and_linted(instance, overrides):
    config = resolve_with_tokenizer(flags_lib.parse(overrides)[0])
    plan = make_plan(config, Site(instance, 1))
    assert plan["fits_surely"]
    assert plan["disputed_groups"] == []
    assert all(
        one["judged"] <= plan["instructions"]["limit"] / 3.8 for one in plan["instructions"]["programs"].values()
    )
    target = INSTANCES[instance].device_key()
    program = make_program(config, layout_for_neuron(config, plan["layout"]["devices"], target=target))
    for name in ("microbatch", "update", "eval"):
        traced = traced_programs(program)[name]()
        found = findings(name, traced, program=program, target=target)
        assert not [one for one in found if one.severity != "info" and (name, one.rule) not in EXPLAINED], name
