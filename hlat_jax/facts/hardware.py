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
      peak_flops: FLOP/s of dense products in bf16.
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
      num_efa: number of network interfaces with EFA.
    """

    target: str
    chips: int
    physical_cores: int
    lncs: tuple[int, ...]
    num_efa: int

    def devices_per_chip(self, *, lnc: int = 0) -> int:
        """Returns the number of JAX devices of one chip, at the default LNC where `lnc` is 0."""
        return self.physical_cores // (lnc or self.lncs[0])

    def num_devices(self, *, lnc: int = 0) -> int:
        """Returns the number of JAX devices of the instance, at the default LNC where `lnc` is 0."""
        return self.chips * self.devices_per_chip(lnc=lnc)

    def device(self, *, lnc: int = 0) -> str:
        """Returns the key of its devices in DEVICES, at the default LNC where `lnc` is 0."""
        chip = self.target.removesuffix("n")
        return chip if lnc in (0, self.lncs[0]) else f"{chip}-lnc{lnc}"


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
    """A node for which a run can be planned.

    Attributes:
      device: one of its devices.
      num_devices: JAX devices of a node.
      platform: JAX's name of the platform, by which kernels are chosen.
      link_bytes_per_s: bandwidth from one device to the others of its node, 0 without links.
      network_bytes_per_s: bandwidth from one node to the others, 0 without a network or where it is unknown.
      host_bytes: memory of the node's host, 0 where it is unknown.
      source: where the node's numbers come from.
    """

    device: Device
    num_devices: int
    platform: str
    link_bytes_per_s: float
    network_bytes_per_s: float
    host_bytes: int
    source: str


def _node(instance: str, *, chip_link: float, network_bits: float, host_gib: int, source: str, lnc: int = 0) -> Target:
    """Returns the target of an instance type, whose chips send `chip_link` bytes/s to the others of their node."""
    kind = INSTANCES[instance]
    return Target(
        device=DEVICES[kind.device(lnc=lnc)],
        num_devices=kind.num_devices(lnc=lnc),
        platform="neuron",
        link_bytes_per_s=chip_link / kind.devices_per_chip(lnc=lnc),
        network_bytes_per_s=network_bits / 8,
        host_bytes=host_gib * GIB,
        source=source,
    )


_TRN1, _TRN2 = "AWS Neuron docs, Trn1 architecture", "AWS Neuron docs, Trn2 architecture"
_TRN2_48XLARGE = {"chip_link": 1024e9, "network_bits": 3200e9, "host_gib": 2048}
_LINKS_OF_TRN2 = "NeuronLink-v3 1,024 GB/s per chip in the instance, EFAv3 3.2 Tb/s"
TARGETS = {
    "trn1.2xlarge": _node(
        "trn1.2xlarge",
        chip_link=384e9,
        network_bits=25e9,
        host_gib=32,
        source=f"{_TRN1}: one chip; up to 25 Gb/s, no EFA",
    ),
    "trn1.32xlarge": _node(
        "trn1.32xlarge",
        chip_link=384e9,
        network_bits=800e9,
        host_gib=512,
        source=f"{_TRN1}: 16 chips, NeuronLink-v2 384 GB/s per chip, EFA 800 Gb/s",
    ),
    "trn1n.32xlarge": _node(
        "trn1n.32xlarge",
        chip_link=768e9,
        network_bits=1600e9,
        host_gib=512,
        source=f"{_TRN1}: 16 chips, NeuronLink-v2 768 GB/s per chip, EFA 1600 Gb/s",
    ),
    "trn2.3xlarge": _node(
        "trn2.3xlarge",
        chip_link=1024e9,
        network_bits=0,
        host_gib=0,
        source="derived from one chip of trn2.48xlarge: no page of the docs has a row for it; network and host unknown",
    ),
    "trn2.48xlarge": _node("trn2.48xlarge", **_TRN2_48XLARGE, source=f"{_TRN2}: 16 chips, LNC 2, {_LINKS_OF_TRN2}"),
    "trn2.48xlarge-lnc1": _node(
        "trn2.48xlarge", lnc=1, **_TRN2_48XLARGE, source=f"{_TRN2}: 16 chips, LNC 1, {_LINKS_OF_TRN2}"
    ),
    "trn2u.48xlarge": _node(
        "trn2u.48xlarge", **_TRN2_48XLARGE, source=f"{_TRN2}: 16 chips, LNC 2, without the links of its UltraServer"
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
# as NC_v3d. No source names the kinds of trn3.
NEURON_KINDS = {"nc_v2": "trn1", "nc_v3": "trn2-lnc1", "nc_v3d": "trn2"}


def device(kind: str) -> Device | None:
    """Returns the table row for JAX's `device_kind`, or None when the table has no such device."""
    kind = kind.lower()
    if kind in NEURON_KINDS:
        return DEVICES[NEURON_KINDS[kind]]
    return next((row for name, row in DEVICES.items() if name in kind), None)
