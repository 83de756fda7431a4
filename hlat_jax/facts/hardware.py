"""Memory, rates and links of devices, instances and nodes, for plans of runs."""

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
      peak_flops: the FLOP/s of dense products in bf16.
      reserved_bytes: the part of the memory that programs cannot use.
    """

    peak_flops: float
    memory_bytes: int
    memory_bytes_per_s: float
    reserved_bytes: int = 0

    @property
    def program_bytes(self) -> int:
        """The memory that programs can use."""
        return self.memory_bytes - self.reserved_bytes


# Per physical core: about 96 MB of microcode, and since SDK 2.33 64 MB for profiling copies, on by default. Source: AWS
# Neuron docs, runtime memory and the runtime notes of 2.33.0.
_RESERVED = (96 + 64) * 10**6
# Of a logical core of trn2, at LNC 2, programs and tensors get 24.26 GB. Source: foxl-ai/kiln, docs/neuron-notes.md,
# October 2026, SDK 2.32; at LNC 1 half of the rest is assumed.
_RESERVED_TRN2 = 24 * GIB - 24_260_000_000
# Source: AWS Neuron docs, the architectures of Trainium, 2 and 3, which have rates and memory of a chip; trn2 is at LNC
# 2 where no other is named, as is trn3. NVIDIA's data sheets of H200 and H100 SXM.
DEVICES = {
    "trn1": Device(190e12 / 2, 16 * GIB, 820e9 / 2, _RESERVED),
    "trn2": Device(667e12 / 4, 24 * GIB, 2.9e12 / 4, _RESERVED_TRN2),
    "trn2-lnc1": Device(667e12 / 8, 12 * GIB, 2.9e12 / 8, _RESERVED_TRN2 // 2),
    "trn3": Device(671e12 / 4, 36 * GIB, 4.9e12 / 4, 2 * _RESERVED),
    "h200": Device(989e12, 141 * 10**9, 4.8e12),
    "h100": Device(989e12, 80 * 10**9, 3.35e12),
}


@dataclasses.dataclass(frozen=True)
class Instance:
    """A type of node, which is an EC2 instance type with Neuron devices, or a machine with another device.

    Attributes:
      target: neuronx-cc's name of its device, or the key in DEVICES of another device.
      chips: the number of chips, `/dev/neuron*`.
      lncs: the numbers of physical cores that one JAX device may consist of (LNC), the default first.
      chip_link: the bandwidth from one chip to the others of the instance, bytes/s.
      network: the bandwidth from one instance to the others, bytes/s, 0 without a network or if it is unknown.
      host_bytes: the memory of the host, 0 if it is unknown.
      platform: JAX's name of the platform, by which kernels are chosen.
    """

    target: str
    chips: int
    physical_cores: int
    lncs: tuple[int, ...]
    num_efa: int
    chip_link: float
    network: float
    host_bytes: int
    platform: str = "neuron"

    @property
    def device(self) -> Device:
        """A device at the default LNC. Without a row in DEVICES it has an unknown speed and the host's memory."""
        return DEVICES.get(self.device_key()) or Device(0.0, self.host_bytes, 0.0)

    @property
    def link_bytes_per_s(self) -> float:
        """The bandwidth from one device, at the default LNC, to the others of its node, 0 without links."""
        return self.chip_link / self.devices_per_chip()

    def devices_per_chip(self, *, lnc: int = 0) -> int:
        """Returns the number of JAX devices of one chip, at the default LNC if `lnc` is 0."""
        return self.physical_cores // (lnc or self.lncs[0])

    def num_devices(self, *, lnc: int = 0) -> int:
        """Returns the number of JAX devices of the instance, at the default LNC if `lnc` is 0."""
        return self.chips * self.devices_per_chip(lnc=lnc)

    def device_key(self, *, lnc: int = 0) -> str:
        """Returns the key of its devices in DEVICES, at the default LNC if `lnc` is 0."""
        chip = self.target.removesuffix("n")
        key = f"{chip}-lnc{lnc or self.lncs[0]}"
        return key if key in DEVICES else chip


_TRN2_48XLARGE = Instance("trn2", 16, 8, (2, 1), 16, 1024e9, 3200e9 / 8, 2048 * GIB)
# Source: AWS Neuron docs, architectures of Trn1 and Trn2 (NeuronLink per chip, EFA per instance), and "EC2 instance
# types with EFA". No page has a row for trn2.3xlarge: it is one chip of trn2.48xlarge, its network unknown. Source
# of its host: alpharomercoma/torchneuronx, REPORT-EXTENSIONS.md 15.5, August 2026.
# trn2u.48xlarge is without the links of its UltraServer. No page names an EC2 instance type with trn3.
INSTANCES = {
    "trn1.2xlarge": Instance("trn1", 1, 2, (1,), 0, 384e9, 25e9 / 8, 32 * GIB),
    "trn1.32xlarge": Instance("trn1", 16, 2, (1,), 8, 384e9, 800e9 / 8, 512 * GIB),
    "trn1n.32xlarge": Instance("trn1n", 16, 2, (1,), 16, 768e9, 1600e9 / 8, 512 * GIB),
    "trn2.3xlarge": Instance("trn2", 1, 8, (2, 1), 0, 1024e9, 0, 124 * GIB),
    "trn2.48xlarge": _TRN2_48XLARGE,
    "trn2u.48xlarge": _TRN2_48XLARGE,
}
# What a run can be planned for.
NODES = INSTANCES | {
    "trn2.48xlarge-lnc1": dataclasses.replace(_TRN2_48XLARGE, lncs=(1,)),
    "h200": Instance("h200", 1, 1, (1,), 0, 0.0, 0.0, 0, platform="gpu"),  # one device; the host is not considered
}


def node(name: str) -> Instance:
    """Returns an entry of `NODES`, or for `cpu` this machine as one device of unknown speed (peak 0).

    Raises:
      ValueError: the node is unknown.
    """
    if name == "cpu":
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return Instance("cpu", 1, 1, (1,), 0, 0.0, 0.0, memory, platform="cpu")
    if name not in NODES:
        raise ValueError(f"--instance={name} is not a known node. {nearest(name, [*NODES, 'cpu'])}")
    return NODES[name]


# JAX's device_kind, in lower case -> key of DEVICES. Source: AXLearn, which reads trn2 at LNC 1 as NC_v3 and at LNC 2
# as NC_v3d. No source names the kinds of trn3.
NEURON_KINDS = {"nc_v2": "trn1", "nc_v3": "trn2-lnc1", "nc_v3d": "trn2"}


def device(kind: str) -> Device | None:
    """Returns the table row for JAX's `device_kind`, or None if the table has no such device."""
    kind = kind.lower()
    if kind in NEURON_KINDS:
        return DEVICES[NEURON_KINDS[kind]]
    return next((row for name, row in DEVICES.items() if name in kind), None)
