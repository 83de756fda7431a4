"""Devices, instances and the nodes that a run is planned for: memory, rates and links, each with its source."""

from __future__ import annotations

import dataclasses
import os

from hlat_jax.facts.byte_sizes import UNITS
from hlat_jax.facts.names import nearest

GIB = UNITS["GiB"]


@dataclasses.dataclass(frozen=True)
class Device:
    """One JAX device.

    Attributes:
      peak_flops: dense bf16, FLOP/s.
      memory_bytes: capacity of the device memory.
      memory_bytes_per_s: bandwidth of the device memory.
      reserved_bytes: part of the memory that programs cannot use.
      source: where the numbers come from.
    """

    peak_flops: float
    memory_bytes: int
    memory_bytes_per_s: float
    reserved_bytes: int
    source: str


# Per physical core: about 96 MB of microcode, and since SDK 2.33 64 MB for profiling copies, on by default. Source: AWS
# Neuron docs, runtime memory and the runtime notes of 2.33.0.
_RESERVED = (96 + 64) * 10**6
DEVICES = {
    "trn1": Device(
        95e12,
        16 * GIB,
        820e9 / 2,
        _RESERVED,
        "AWS Neuron docs, Trainium architecture: 190 TFLOP/s, 32 GiB and 820 GB/s per chip of 2 cores",
    ),
    "trn2": Device(
        667e12 / 4,
        24 * GIB,
        2.9e12 / 4,
        2 * _RESERVED,
        "AWS Neuron docs, Trainium2 architecture, LNC 2: a chip's 667 TFLOP/s, 96 GiB and 2.9 TB/s by 4",
    ),
    "trn2-lnc1": Device(
        667e12 / 8,
        12 * GIB,
        2.9e12 / 8,
        _RESERVED,
        "AWS Neuron docs, Trainium2 architecture, LNC 1: a chip's 667 TFLOP/s, 96 GiB and 2.9 TB/s by 8",
    ),
    "trn3": Device(
        671e12 / 4,
        36 * GIB,
        4.9e12 / 4,
        2 * _RESERVED,
        "AWS Neuron docs, Trainium3, LNC 2: a chip's 671 TFLOP/s, 144 GiB and 4.9 TB/s by 4",
    ),
    "trn3-lnc1": Device(
        671e12 / 8,
        18 * GIB,
        4.9e12 / 8,
        _RESERVED,
        "AWS Neuron docs, Trainium3, LNC 1: a chip's 671 TFLOP/s, 144 GiB and 4.9 TB/s by 8",
    ),
    "h200": Device(989e12, 141 * 10**9, 4.8e12, 0, "NVIDIA H200 data sheet: 989 TFLOP/s bf16 dense, 141 GB, 4.8 TB/s"),
    "h100": Device(
        989e12, 80 * 10**9, 3.35e12, 0, "NVIDIA H100 SXM data sheet: 989 TFLOP/s bf16 dense, 80 GB, 3.35 TB/s"
    ),
}


@dataclasses.dataclass(frozen=True)
class Instance:
    """One EC2 instance type with Neuron devices.

    Attributes:
      target: neuronx-cc's name of its device.
      chips: number of chips, `/dev/neuron*`.
      physical_cores: number of cores of one chip.
      lncs: numbers of physical cores that one JAX device may consist of (LNC), the default first.
      num_efa: network interfaces with EFA; 0: none.
    """

    target: str
    chips: int
    physical_cores: int
    lncs: tuple[int, ...]
    num_efa: int

    def devices_per_chip(self, *, lnc: int = 0) -> int:
        """Returns the JAX devices of one chip; `lnc` 0: at the default LNC."""
        return self.physical_cores // (lnc or self.lncs[0])

    def num_devices(self, *, lnc: int = 0) -> int:
        """Returns the JAX devices of the instance; `lnc` 0: at the default LNC."""
        return self.chips * self.devices_per_chip(lnc=lnc)


# Source: AWS Neuron docs, Trn1 and Trn2 architecture and "EC2 instance types with EFA". trn2.3xlarge is derived from
# one chip of trn2.48xlarge: no page has a row for it. trn3 is not listed: no page names an EC2 instance type with it.
INSTANCES = {
    "trn1.2xlarge": Instance("trn1", 1, 2, (1,), 0),
    "trn1.32xlarge": Instance("trn1", 16, 2, (1,), 8),
    "trn1n.32xlarge": Instance("trn1n", 16, 2, (1,), 16),
    "trn2.3xlarge": Instance("trn2", 1, 8, (2, 1), 0),
    "trn2.48xlarge": Instance("trn2", 16, 8, (2, 1), 16),
    "trn2u.48xlarge": Instance("trn2", 16, 8, (2, 1), 16),
}


@dataclasses.dataclass(frozen=True)
class Target:
    """A node for which a run can be planned: an instance, or an UltraServer of several linked servers.

    Attributes:
      device: one of its devices.
      num_devices: JAX devices of a node.
      platform: JAX's name of the platform, by which kernels are chosen.
      link_bytes_per_s: bandwidth from one device to the others of its server; 0: no links.
      network_bytes_per_s: bandwidth from one node to the others; 0: no network, or unknown.
      host_bytes: memory of the node's hosts; 0: unknown.
      source: where the node's numbers come from.
      servers: number of servers that the node's links join.
      server_link_bytes_per_s: bandwidth from one device to those in the other servers of its node.
    """

    device: Device
    num_devices: int
    platform: str
    link_bytes_per_s: float
    network_bytes_per_s: float
    host_bytes: int
    source: str
    servers: int = 1
    server_link_bytes_per_s: float = 0.0


_TRN1, _TRN2, _TRN3 = (f"AWS Neuron docs, {name} architecture" for name in ("Trn1", "Trn2", "Trn3"))
TARGETS = {
    "trn1.2xlarge": Target(
        DEVICES["trn1"],
        INSTANCES["trn1.2xlarge"].num_devices(),
        "neuron",
        384e9 / 2,
        25e9 / 8,
        32 * GIB,
        f"{_TRN1}: one chip; up to 25 Gb/s, no EFA",
    ),
    "trn1.32xlarge": Target(
        DEVICES["trn1"],
        INSTANCES["trn1.32xlarge"].num_devices(),
        "neuron",
        384e9 / 2,
        800e9 / 8,
        512 * GIB,
        f"{_TRN1}: 16 chips, NeuronLink-v2 384 GB/s per chip of 2, EFA 800 Gb/s",
    ),
    "trn1n.32xlarge": Target(
        DEVICES["trn1"],
        INSTANCES["trn1n.32xlarge"].num_devices(),
        "neuron",
        768e9 / 2,
        1600e9 / 8,
        512 * GIB,
        f"{_TRN1}: 16 chips, NeuronLink-v2 768 GB/s per chip of 2, EFA 1600 Gb/s",
    ),
    "trn2.3xlarge": Target(
        DEVICES["trn2"],
        INSTANCES["trn2.3xlarge"].num_devices(),
        "neuron",
        1024e9 / 4,
        0.0,
        0,
        "derived from one chip of trn2.48xlarge: no page of the docs has a row for it; network and host unknown",
    ),
    "trn2.48xlarge": Target(
        DEVICES["trn2"],
        INSTANCES["trn2.48xlarge"].num_devices(),
        "neuron",
        1024e9 / 4,
        3200e9 / 8,
        2048 * GIB,
        f"{_TRN2}: 16 chips, LNC 2, NeuronLink-v3 1,024 GB/s per chip in the instance, by 4, EFAv3 3.2 Tb/s",
    ),
    "trn2.48xlarge-lnc1": Target(
        DEVICES["trn2-lnc1"],
        INSTANCES["trn2.48xlarge"].num_devices(lnc=1),
        "neuron",
        1024e9 / 8,
        3200e9 / 8,
        2048 * GIB,
        f"{_TRN2}: 16 chips, LNC 1, NeuronLink-v3 1,024 GB/s per chip in the instance, by 8, EFAv3 3.2 Tb/s",
    ),
    "trn2-ultraserver": Target(
        DEVICES["trn2"],
        4 * INSTANCES["trn2u.48xlarge"].num_devices(),
        "neuron",
        1024e9 / 4,
        3200e9 / 8,
        4 * 2048 * GIB,
        f"{_TRN2}: 4 trn2u.48xlarge, LNC 2, 256 GB/s per chip between them, by 4; EFA 3.2 Tb/s by the "
        "UltraServer's row, while 4 instances have 12.8",
        servers=4,
        server_link_bytes_per_s=256e9 / 4,
    ),
    "trn3-gen1": Target(
        DEVICES["trn3"],
        64 * 4,
        "neuron",
        256e9 / 4,
        12800e9 / 8,
        8192 * GIB,
        f"{_TRN3}, UltraServer Gen1 of 64 chips, LNC 2: 256 GB/s per chip in a server of 4 and 320 to the other "
        "servers of the rack, by 4 (other pages: 2,560 and 2,048 in all, and 16 chips per server); EFA 12.8 Tb/s",
        servers=16,
        server_link_bytes_per_s=320e9 / 4,
    ),
    "trn3-gen2": Target(
        DEVICES["trn3"],
        144 * 4,
        "neuron",
        256e9 / 4,
        28800e9 / 8,
        27648 * GIB,
        f"{_TRN3}, UltraServer Gen2 of 36 servers of 4 chips, LNC 2: 256 GB/s per chip in a server, 320 in a rack and "
        "128 between racks, by 4 (other pages: 2,560 and 2,048 in all); EFA 28.8 Tb/s",
        servers=36,
        server_link_bytes_per_s=128e9 / 4,
    ),
    "h200": Target(DEVICES["h200"], 1, "gpu", 0.0, 0.0, 0, "one device; the host is not considered"),
}


def target(name: str) -> Target:
    """Returns an entry of `TARGETS`; for `cpu`, this machine as one device of unknown speed (peak 0).

    Raises:
      ValueError: an unknown target.
    """
    if name == "cpu":
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        device = Device(0.0, memory, 0.0, 0, "memory: this operating system; speed: not known before it is measured")
        return Target(device, 1, "cpu", 0.0, 0.0, memory, "this machine")
    if name not in TARGETS:
        raise ValueError(f"--instance={name} is not a known target. {nearest(name, [*TARGETS, 'cpu'])}")
    return TARGETS[name]


# JAX's device_kind, in lower case -> key of DEVICES. Source: AXLearn, which reads trn2 at LNC 1 as NC_v3 and at LNC 2
# as NC_v3d; NC_v4 and NC_v4d follow from that and are not documented.
NEURON_KINDS = {
    "nc_v2": "trn1",
    "nc_v3": "trn2-lnc1",
    "nc_v3d": "trn2",
    "nc_v4": "trn3-lnc1",
    "nc_v4d": "trn3",
}


def device(kind: str) -> Device | None:
    """Returns the table row for JAX's `device_kind`, or None when the table has no such device."""
    kind = kind.lower()
    if kind in NEURON_KINDS:
        return DEVICES[NEURON_KINDS[kind]]
    return next((row for name, row in DEVICES.items() if name in kind), None)
