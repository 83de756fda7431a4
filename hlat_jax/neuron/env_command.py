"""Prints the environment of one process or of all, `python -m hlat_jax.neuron env --config=NAME --instance=TYPE`.

eval "$(python -m hlat_jax.neuron env --config=7b --instance=trn1.32xlarge --nodes=4 --node=3 --coordinator=trn1)"
"""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Sequence

from absl import flags

from hlat_jax.cli import flags as flags_lib
from hlat_jax.host.neuron_env import environment
from hlat_jax.host.neuron_topology import CACHE, INSTANCES, JAX_PORT, Topology, lnc_of
from hlat_jax.weights.init_model import parse_config


def main(argv: Sequence[str]) -> int:
    """Prints the environment, and returns the exit code."""
    config, values = parse_config(argv, _define)
    if not values.instance:
        raise ValueError("--instance=TYPE is missing. Give one, such as --instance=trn1.32xlarge.")
    if values.nodes > 1 and not values.node:
        raise ValueError(f"--node is missing. Give the index of this node, 0 .. {values.nodes - 1}, or all.")
    if values.node not in ("", "all") and not values.node.isdecimal():
        raise ValueError(f"--node={values.node} must be an integer of at least 0, or all.")
    rank = int(values.node) if values.node.isdecimal() else 0
    of_job = {name: getattr(values, name) for name in ("nodes", "coordinator", "port", "cores", "cache")}
    topology = Topology(values.instance, rank=rank, lnc=values.lnc or lnc_of(os.environ), **of_job)
    options = {"profile": values.profile, "config_flags": config.train.compiler_flags}
    for rank in range(topology.nodes) if values.node == "all" else [topology.rank]:
        node = dataclasses.replace(topology, rank=rank)
        computed = environment(config.precision, config.parallel, node, current=os.environ, **options)
        if values.node == "all" and topology.nodes > 1:
            print(f"# rank {rank} of {topology.nodes}")
        if rank == topology.rank:
            print(*computed.notes, sep="\n", end="\n" * bool(computed.notes), file=sys.stderr)
        print(computed.shell())
    return 0


def _define(values: flags.FlagValues) -> None:
    options = {"flag_values": values}
    flags.DEFINE_string("instance", "", f"Instance type of every node: {', '.join(INSTANCES)}.", **options)
    flags.DEFINE_integer("nodes", 1, "Nodes of the job.", **options)
    flags.DEFINE_string("node", "", "Index of this node, from 0, or all.", **options)
    flags.DEFINE_string("coordinator", "", "Host name of rank 0, reachable from the other nodes.", **options)
    flags.DEFINE_integer("port", JAX_PORT, "Port of JAX's coordinator on rank 0.", **options)
    flags.DEFINE_integer(
        "lnc", 0, "Physical cores per JAX device. 0 means NEURON_LOGICAL_NC_CONFIG, else 2 on trn2.", **options
    )
    flags.DEFINE_integer("cores", 0, "JAX devices per node that the run uses. 0 means all.", **options)
    about = "Folder for compiled programs on the node's local disk."
    flags_lib.define_path(values, "cache", about, default=CACHE, use="write")
    about = "Folder for JAX's profile of the devices. Empty means none."
    flags_lib.define_path(values, "profile", about, use="write")
