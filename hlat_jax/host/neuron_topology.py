"""The topology of a job, its instances and the rank of this instance."""

from __future__ import annotations

import dataclasses
import pathlib
import re
from collections.abc import Mapping

from hlat_jax.facts import core_groups
from hlat_jax.facts.hardware import INSTANCES, Instance
from hlat_jax.facts.names import nearest

JAX_PORT = 41001  # JAX's coordinator on rank 0
COLLECTIVES_PORT = 41000  # Neuron's collectives on rank 0; must differ
LONGEST_HOST = 63  # characters of a host name in NEURON_RT_ROOT_COMM_ID
CACHE = "/var/tmp/hlat-compile-cache"  # on the node's own disk: HLAT's ranks overran a shared one, see docs/trainium.md


@dataclasses.dataclass(frozen=True)
class Topology:
    """A job of instances of one type with one process on each, as seen by one of the processes.

    Attributes:
      instance: the instance type, a key of INSTANCES.
      rank: the index of this instance, 0 .. nodes - 1.
      coordinator: the host name or address of rank 0, which may be empty for one node.
      lnc: the number of physical cores of one JAX device, or 0 for the default of the instance.
      cores: the number of JAX devices of its node that this process uses, or 0 for all.
      cache: the folder of compiled programs on the node's own disk.
    """

    instance: str
    nodes: int = 1
    rank: int = 0
    coordinator: str = ""
    port: int = JAX_PORT
    lnc: int = 0
    cores: int = 0
    cache: str = CACHE

    @property
    def kind(self) -> Instance:
        return INSTANCES[self.instance]

    @property
    def device_key(self) -> str:
        """The kind of the devices, a key of `core_groups.RULES`."""
        return self.kind.device_key(lnc=self.lnc)

    @property
    def devices_per_node(self) -> int:
        return self.cores or self.kind.num_devices(lnc=self.lnc)


@dataclasses.dataclass(frozen=True)
class Machine:
    """Paths by which Linux identifies the machine.

    Attributes:
      devices: the folder in which the driver creates neuron0, neuron1, ..., one per chip.
      product_name: the file in which EC2 writes the instance type.
      driver: the file with the version of the loaded driver, in a container the host's, and old until a restart.
    """

    devices: pathlib.Path = pathlib.Path("/dev")
    product_name: pathlib.Path = pathlib.Path("/sys/devices/virtual/dmi/id/product_name")
    driver: pathlib.Path = pathlib.Path("/sys/module/neuron/version")

    @property
    def driver_version(self) -> str:
        """The version of the loaded driver, or "" without one."""
        return self.driver.read_text().strip() if self.driver.is_file() else ""


HERE = Machine()


def resolve_topology(topology: Topology) -> Topology:
    """Returns the topology with its defaults filled in.

    Raises:
      ValueError: the instance type is unknown, or does not have the LNC or cores. Or the rank lies outside the job, or
        Neuron or JAX cannot use the coordinator or the port.
    """
    t = topology
    if t.instance not in INSTANCES:
        raise ValueError(f"--instance={t.instance} is not a known instance type. {nearest(t.instance, INSTANCES)}")
    kind = t.kind
    if t.lnc and t.lnc not in kind.lncs:
        allowed = " or ".join(map(str, sorted(kind.lncs)))  # trn1: the compiler's error NCC_EARG001
        raise ValueError(
            f"--lnc={t.lnc} (or NEURON_LOGICAL_NC_CONFIG) must be {allowed} on {t.instance}, the number of physical "
            "cores of a JAX device. Unset it, or give another --instance."
        )
    t = dataclasses.replace(t, lnc=t.lnc or kind.lncs[0])
    whole = kind.num_devices(lnc=t.lnc)
    if not 0 <= t.cores <= whole:
        raise ValueError(f"--cores={t.cores} must be 1 to {whole} on {t.instance} at --lnc={t.lnc}, or 0 for all.")
    level, why = core_groups.verdict_of_first(t.cores or whole, kind=t.device_key)
    if level == core_groups.REFUSED:
        raise ValueError(f"--cores={t.cores} on {t.instance}: {why}. 0 uses all.")
    if t.nodes < 1:
        raise ValueError(f"--nodes={t.nodes} must be at least 1.")
    if not 0 <= t.rank < t.nodes:
        raise ValueError(f"--node={t.rank} must lie in 0 .. {t.nodes - 1}, which is --nodes - 1.")
    if t.nodes > 1 and not kind.num_efa:  # aws-neuron-sdk issue 742: "NEFF is invalid" on two trn1.2xlarge
        raise ValueError(
            f"--nodes={t.nodes}: {t.instance} has no EFA, and AWS does not support several nodes of it. "
            "Use --nodes=1, or a larger instance."
        )
    if t.nodes > 1:
        check_host(t.coordinator, "--coordinator")
    if not 0 < t.port < 65536:
        raise ValueError(f"--port={t.port} must lie in 1 .. 65535.")
    if t.port == COLLECTIVES_PORT:
        raise ValueError(f"--port={t.port} is used by Neuron's collectives. Use another, such as {JAX_PORT}.")
    return t


def check_host(host: str, name: str) -> None:
    """Raises ValueError unless `host` is a short host name, an IPv4 address, or an IPv6 address in brackets."""
    if not host:
        raise ValueError(f"{name}=HOST is missing. Give the host name of rank 0, as the others reach it.")
    if len(host) > LONGEST_HOST:
        raise ValueError(
            f"{name}={host} has {len(host)} characters, more than Neuron's {LONGEST_HOST}. Use an IP address."
        )
    is_ipv6 = re.fullmatch(r"\[[0-9A-Fa-f:.%\w]+\]", host)
    if not is_ipv6 and not re.fullmatch(r"[A-Za-z0-9]([A-Za-z0-9_.-]*[A-Za-z0-9])?", host):
        raise ValueError(f"{name}={host} must be a host name, a.b.c.d or [v6], without a port. Set --port for that.")


def lnc_of(environ: Mapping[str, str]) -> int:
    """Returns NEURON_LOGICAL_NC_CONFIG, or 0 if it is not set."""
    text = environ.get("NEURON_LOGICAL_NC_CONFIG", "")
    if text and not text.isdecimal():
        raise ValueError(f"NEURON_LOGICAL_NC_CONFIG={text} must be 1, or on trn2 also 2.")
    return int(text or 0)


def instance_to_serve(given: str, platforms: str, *, machine: Machine) -> str:
    """Returns the type of this instance if the process uses its Neuron devices, else "".

    Args:
      given: the type given by a flag, or "". A JAX_PLATFORMS that contradicts it raises an error later.
      platforms: JAX_PLATFORMS, which decides if set. With `cpu`, a run on a Trainium node does not use the devices.
      machine: the paths of the devices.

    Raises:
      ValueError: JAX_PLATFORMS names neuron and there is no device, or the type of this machine is unknown.
    """
    if given or (platforms and "neuron" not in platforms.split(",")):
        return given
    instance = detected_instance(machine)
    if platforms and not instance:
        raise ValueError(
            f"JAX_PLATFORMS={platforms} names neuron, and this machine has no {machine.devices / 'neuron0'}. Unset it, "
            "or give --instance=TYPE."
        )
    return instance


def detected_instance(machine: Machine) -> str:
    """Returns the type of this machine, or "" if it has no Neuron device.

    Raises:
      ValueError: there are Neuron devices, but the instance type is unknown.
    """
    device, product_name = machine.devices / "neuron0", machine.product_name
    if not device.exists():
        return ""
    name = product_name.read_text().strip() if product_name.is_file() else ""
    if name not in INSTANCES:
        raise ValueError(
            f"{device} exists, but the instance type {name!r} is unknown. Give --instance=TYPE. "
            f"{nearest(name, INSTANCES)}"
        )
    return name
