"""Devices, instances and the nodes that a run is planned for: memory, rates and links."""

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
    """

    peak_flops: float
    memory_bytes: int
    memory_bytes_per_s: float
    reserved_bytes: int = 0


# Per physical core: about 96 MB of microcode, and since SDK 2.33 64 MB for profiling copies, on by default. Source: AWS
# Neuron docs, runtime memory and the runtime notes of 2.33.0.
_RESERVED = (96 + 64) * 10**6
# Source: AWS Neuron docs, the architectures of Trainium, 2 and 3, which have rates and memory of a chip; trn2 is at LNC
# 2 where no other is named, as is trn3. NVIDIA's data sheets of H200 and H100 SXM.
DEVICES = {
    "trn1": Device(190e12 / 2, 16 * GIB, 820e9 / 2, _RESERVED),
    "trn2": Device(667e12 / 4, 24 * GIB, 2.9e12 / 4, 2 * _RESERVED),
    "trn2-lnc1": Device(667e12 / 8, 12 * GIB, 2.9e12 / 8, _RESERVED),
    "trn3": Device(671e12 / 4, 36 * GIB, 4.9e12 / 4, 2 * _RESERVED),
    "h200": Device(989e12, 141 * 10**9, 4.8e12),
    "h100": Device(989e12, 80 * 10**9, 3.35e12),
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
      chip_link: bandwidth from one chip to the others of the instance, bytes/s.
      network: bandwidth from one instance to the others, bytes/s, 0 where it is unknown.
      host_bytes: memory of the host, 0 where it is unknown.
    """

    target: str
    chips: int
    physical_cores: int
    lncs: tuple[int, ...]
    num_efa: int
    chip_link: float
    network: float
    host_bytes: int

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


_TRN2_48XLARGE = Instance("trn2", 16, 8, (2, 1), 16, 1024e9, 3200e9 / 8, 2048 * GIB)
# Source: AWS Neuron docs, architectures of Trn1 and Trn2 (NeuronLink per chip, EFA per instance), and "EC2 instance
# types with EFA". No page has a row for trn2.3xlarge: it is one chip of trn2.48xlarge, its network and host unknown.
# trn2u.48xlarge is without the links of its UltraServer. No page names an EC2 instance type with trn3.
INSTANCES = {
    "trn1.2xlarge": Instance("trn1", 1, 2, (1,), 0, 384e9, 25e9 / 8, 32 * GIB),
    "trn1.32xlarge": Instance("trn1", 16, 2, (1,), 8, 384e9, 800e9 / 8, 512 * GIB),
    "trn1n.32xlarge": Instance("trn1n", 16, 2, (1,), 16, 768e9, 1600e9 / 8, 512 * GIB),
    "trn2.3xlarge": Instance("trn2", 1, 8, (2, 1), 0, 1024e9, 0, 0),
    "trn2.48xlarge": _TRN2_48XLARGE,
    "trn2u.48xlarge": _TRN2_48XLARGE,
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
    """

    device: Device
    num_devices: int
    platform: str
    link_bytes_per_s: float
    network_bytes_per_s: float
    host_bytes: int


def _node(kind: Instance, *, lnc: int) -> Target:
    return Target(
        device=DEVICES[kind.device(lnc=lnc)],
        num_devices=kind.num_devices(lnc=lnc),
        platform="neuron",
        link_bytes_per_s=kind.chip_link / kind.devices_per_chip(lnc=lnc),
        network_bytes_per_s=kind.network,
        host_bytes=kind.host_bytes,
    )


TARGETS = {name: _node(kind, lnc=kind.lncs[0]) for name, kind in INSTANCES.items()} | {
    "trn2.48xlarge-lnc1": _node(_TRN2_48XLARGE, lnc=1),
    "h200": Target(DEVICES["h200"], 1, "gpu", 0.0, 0.0, 0),  # one device; the host is not considered
}


def target(name: str) -> Target:
    """Returns an entry of `TARGETS`; for `cpu`, this machine as one device of unknown speed (peak 0).

    Raises:
      ValueError: an unknown target.
    """
    if name == "cpu":
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return Target(Device(0.0, memory, 0.0), 1, "cpu", 0.0, 0.0, memory)
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
