"""The groups of cores that Neuron's collectives support inside a server, and their order.

One table for the layout of a run, the search over layouts, the lint and `--cores`. We ran nothing on a device.
Measurements of others win over documents. If pages contradict each other, the group is disputed.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Mapping, Sequence

import numpy as np

from hlat_jax.facts import hardware

FINE, DISPUTED, REFUSED = VERDICTS = ("fine", "disputed", "refused")
Orders = tuple[tuple[int, ...], ...]


@dataclasses.dataclass(frozen=True)
class Rules:
    """Groups of JAX devices inside one server of a kind.

    Attributes:
      server: the number of devices of the largest server of this kind.
      sizes: the sizes of groups of consecutive devices that pages list without contradiction.
      orders: size -> all groups of that size, for sizes that work only in a special order.
      seen: the sizes of groups of consecutive devices that others ran with right sums, and no page lists.
      seen_worlds: the numbers of first devices that others ran without the rest, all in one group.
      strides: the (size, stride) of other groups that a page has.
      no_strided_all_to_all: the known fault of an all-to-all in a group of every n-th device.
      disputed: size -> the statements of pages.
      refused: size -> the reason, for sizes that a page excludes.
    """

    server: int
    sizes: tuple[int, ...]
    orders: Mapping[int, Orders] = dataclasses.field(default_factory=dict)
    seen: tuple[int, ...] = ()
    seen_worlds: tuple[int, ...] = ()
    strides: tuple[tuple[int, int], ...] = ()
    no_strided_all_to_all: str = ""
    disputed: Mapping[int, str] = dataclasses.field(default_factory=dict)
    refused: Mapping[int, str] = dataclasses.field(default_factory=dict)
    source: str = ""

    @property
    def sizes_with_group(self) -> list[int]:
        """The sizes with a group."""
        return sorted({*self.sizes, *self.seen, *self.orders, *self.disputed})


def _fold(quarter: int) -> Orders:
    """Returns two groups of half a server: its first and last quarter, and the two between, each there and back."""
    first, second, third, fourth = (list(range(k * quarter, (k + 1) * quarter)) for k in range(4))
    return tuple(first + fourth[::-1]), tuple(second + third[::-1])


_FEATURES = "en/v2.29.1/libraries/nxd-inference/developer_guides/feature-guide (tensor parallel degrees)"
_STATE = "NxD's parallel_layers/parallel_state.py (order of the groups)"
# Groups of 2 and 8 at once, worlds of 2 to 64 at LNC 2; on trn1 worlds of 2, 8, 16 and 32, while 4 cores failed to load
_KILN = "foxl-ai/kiln, docs/neuron-notes.md (3 October 2026, SDK 2.32, PyTorch)"
_SPECTRAL = "aws-samples/sample-spectral-dns-on-aws-neuron, docs/neuron-rules.md, rule 5 (SDK 2.32, no framework)"
# Keys of hardware.DEVICES.
RULES = {
    "trn1": Rules(
        server=32,
        sizes=(1, 2, 8, 16, 32),
        # other collectives of these groups are documented, and HLAT's own: the replicas beside its degree 8
        orders={4: tuple(tuple(range(first, 32, 8)) for first in range(8))},
        no_strided_all_to_all="an all-to-all over cores 0, 8, 16, 24 of trn1.32xlarge was refused at load",
        source=f"{_FEATURES}; {_STATE}; {_KILN}; {_SPECTRAL}",
    ),
    "trn2": Rules(
        server=64,
        sizes=(1, 2, 4, 16, 64),
        orders={32: _fold(16)},
        seen=(8,),  # the NxD Inference guide lists degree 8, parallel_state.py has no such groups
        seen_worlds=(2, 4, 8, 16, 32, 64),
        strides=((4, 4),),
        source=f"{_FEATURES}; {_STATE}; {_KILN}",
    ),
    "trn2-lnc1": Rules(
        server=128,
        sizes=(1, 4, 8, 32, 128),
        orders={64: _fold(32)},
        disputed={2: "no page lists degree 2 on trn2 at LNC 1"},
        refused={16: "NxD's parallel_state.py excludes groups of 16 on trn2 at LNC 1"},
        source=_STATE,
    ),
}


@dataclasses.dataclass(frozen=True)
class Server:
    """The devices of each server that a run uses, the first devices of a kind.

    Attributes:
      kind: a key of RULES.
      size: the number of devices, at most as many as the largest server has.
    """

    kind: str
    size: int

    @property
    def rules(self) -> Rules:
        return RULES[self.kind]


def server_for(kind: str, num_devices: int) -> Server:
    """Returns the servers of a run over `num_devices` devices of a kind."""
    return Server(kind, min(num_devices, RULES[kind].server))


def server_of(devices: Sequence[object]) -> Server | None:
    """Returns the servers of JAX's Neuron devices by kind and process, or None for other devices."""
    first = devices[0]
    kind = hardware.NEURON_KINDS.get(first.device_kind.lower())
    if first.platform != "neuron" or kind is None:
        return None
    near = sum(device.process_index == first.process_index for device in devices)
    return server_for(kind, near)


def server_of_node(node: hardware.Instance, *, num_devices: int) -> Server | None:
    """Returns the servers of a node in a run over `num_devices` devices, or None if they are not Neuron's."""
    kind = node.device_key()
    return Server(kind, min(num_devices, node.num_devices())) if kind in RULES else None


def verdict_of_first(count: int, *, kind: str) -> tuple[str, str]:
    """Returns the `verdict` on the first devices of a server of a kind."""
    return verdict(np.arange(count)[None], Server(kind, count))


def order(server: Server | None, tensor: int) -> list[int] | None:
    """Returns the device at each place of a server, for a degree that needs a special order.

    Places are numbered with `tensor` innermost. Returns None for other degrees, as device n is then at place n.
    """
    groups = server.rules.orders.get(tensor) if server else None
    if groups is None or server.size != server.rules.server:
        return None
    return [device for group in groups for device in group]


def verdict(groups: np.ndarray, server: Server, *, all_to_all: bool = False) -> tuple[str, str]:
    """Returns the worst of FINE, DISPUTED and REFUSED, and the reason, for the groups [n, size] of one collective.

    Devices are numbered over all servers. Each server's part of a group is judged, and has to be the same in all.
    `all_to_all` names the kind of the collective.
    """
    if groups.shape[1] == 1:
        return FINE, ""
    ordered = np.sort(groups, axis=1)
    servers, places = ordered // server.size, ordered % server.size
    spanned = len(np.unique(servers[0]))
    if groups.shape[1] % spanned == 0:
        parts = places.reshape(len(groups), spanned, -1)
        is_even = (servers.reshape(parts.shape) == servers.reshape(parts.shape)[:, :, :1]).all()
        if is_even and (parts == parts[:, :1]).all():
            inside = np.unique(parts[:, 0], axis=0)
            if all_to_all and server.rules.no_strided_all_to_all and (np.diff(inside) > 1).any():
                return REFUSED, server.rules.no_strided_all_to_all
            verdicts = [_verdict_inside(tuple(map(int, part)), server) for part in inside]
            return max(verdicts, key=lambda verdict: VERDICTS.index(verdict[0]))
    return REFUSED, "its groups do not have the same cores of every server (internode-collective-comm)"


@functools.lru_cache(maxsize=4096)
def _verdict_inside(part: tuple[int, ...], server: Server) -> tuple[str, str]:
    """Returns the verdict on the sorted devices of one server."""
    rules, size = server.rules, len(part)
    if size == 1:
        return FINE, ""
    named = f"{size} cores {_shorten(part)}"
    steps = {b - a for a, b in itertools.pairwise(part)}
    stride = steps.pop() if len(steps) == 1 else 0
    # the groups that have an order of their own, and those of the replicas beside them
    own = (group for orders in rules.orders.values() for group in (*orders, *zip(*orders, strict=True)))
    if part in {tuple(sorted(group)) for group in own} or (size, stride) in rules.strides:
        return FINE, ""
    if size == server.size and size in rules.seen_worlds:
        return FINE, ""
    if stride in rules.sizes and stride > 1 and stride * size == rules.server == server.size:
        return FINE, ""  # the replicas beside a listed degree
    if size not in rules.sizes_with_group:
        reason = rules.refused.get(size) or f"no page lists groups of {size}"
        *others, last = rules.sizes_with_group
        return REFUSED, f"{named}: {reason}; sizes with a group: {', '.join(map(str, others))} and {last}"
    if stride == 1 and part[0] % size == 0:
        if size in (*rules.sizes, *rules.seen):
            return FINE, ""
        if size in rules.disputed:
            return DISPUTED, f"{named}: {rules.disputed[size]}"
        works = " and ".join(_shorten(sorted(group)) for group in rules.orders[size][:2])
        return REFUSED, f"{named}: groups of {size} work in an order of their own, such as {works}"
    return DISPUTED, f"{named}: no page documents groups of {size} in this pattern"


def _shorten(part: Sequence[int]) -> str:
    words = [str(device) for device in part]
    return f"[{', '.join(words if len(words) <= 8 else [*words[:4], '...', *words[-2:]])}]"


def groups_along(shape: Mapping[str, int], axes: Sequence[str], *, devices: np.ndarray) -> np.ndarray:
    """Returns the groups [n, size] of devices along some axes of a mesh of this shape, outermost first."""
    numbered, names = devices.reshape(tuple(shape.values())), list(shape)
    last = [names.index(axis) for axis in names if axis not in axes] + [names.index(axis) for axis in axes]
    return numbered.transpose(last).reshape(-1, math.prod(shape[axis] for axis in axes))
