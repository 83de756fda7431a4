"""`python -m hlat_jax.neuron env --config=NAME --instance=TYPE`: prints the environment of one process or of all.

eval "$(python -m hlat_jax.neuron env --config=7b --instance=trn1.32xlarge --nodes=4 --node=3 --coordinator=trn1)"
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from collections.abc import Sequence
from typing import Any

from absl import flags

from hlat_jax.cli import flags as flags_lib
from hlat_jax.data.tokenizer import resolve_with_tokenizer
from hlat_jax.host.neuron_env import Environment, environment
from hlat_jax.host.neuron_topology import CACHE, INSTANCES, JAX_PORT, Topology, launcher, lnc_of, of_launcher
from hlat_jax.weights.init_model import take_checked_model


def main(argv: Sequence[str]) -> int:
    """Prints the environment; returns the exit code."""
    mutable, values = flags_lib.parse(argv, _define)
    take_checked_model(mutable, given=flags_lib.given_keys(values))
    config = resolve_with_tokenizer(mutable)
    if values.format not in ("shell", "json"):
        raise ValueError(f"--format={values.format} must be shell or json.")
    topology = _topology(values)
    ranks = range(topology.nodes) if values.node == "all" else [topology.rank]
    found = {}
    for rank in ranks:
        place = dataclasses.replace(topology, rank=rank)
        options = {"profile": values.profile, "config_flags": config.train.compiler_flags}
        found[rank] = environment(config.precision, config.parallel, place, current=os.environ, **options)
    for note in found[ranks[0]].notes:
        print(note, file=sys.stderr)
    _show(found, values.format, topology.nodes)
    return 0


def _show(found: dict[int, Environment], form: str, nodes: int) -> None:
    if form == "json":
        shown: Any = {rank: one.to_dict() for rank, one in found.items()}
        print(json.dumps(shown if len(found) > 1 else next(iter(shown.values())), indent=1))
        return
    for rank, one in found.items():
        if len(found) > 1:
            print(f"# rank {rank} of {nodes}")
        print(one.shell())


def _topology(values: flags.FlagValues) -> Topology:
    if not values.instance:
        raise ValueError("--instance=TYPE is missing; for example --instance=trn1.32xlarge.")
    fields: dict[str, Any] = {"lnc": values.lnc or lnc_of(os.environ)}
    fields |= {name: getattr(values, name) for name in ("port", "cores", "cache")}
    if values.nodes is None:
        fields |= of_launcher(os.environ)
    else:
        fields |= {"launcher": launcher(os.environ), "nodes": values.nodes}
        if values.nodes > 1 and not values.node:
            raise ValueError(f"--node is missing: give the index of this node, 0 .. {values.nodes - 1}, or all.")
    if values.node.isdecimal():
        fields["rank"] = int(values.node)
    elif values.node not in ("", "all"):
        raise ValueError(f"--node={values.node} must be an integer of at least 0, or all.")
    if values.coordinator:
        fields["coordinator"] = values.coordinator
    return Topology(values.instance, **fields)


def _define(values: flags.FlagValues) -> None:
    options = {"flag_values": values}
    flags.DEFINE_string("instance", "", f"Instance type of every node: {', '.join(INSTANCES)}.", **options)
    flags.DEFINE_integer("nodes", None, "Nodes of the job; default: from Slurm or Open MPI, else 1.", **options)
    flags.DEFINE_string("node", "", "Index of this node, from 0, or all; default: as for --nodes, else 0.", **options)
    flags.DEFINE_string("coordinator", "", "Host name of rank 0, reachable from the other nodes.", **options)
    flags.DEFINE_integer("port", JAX_PORT, "Port of JAX's coordinator on rank 0.", **options)
    flags.DEFINE_integer(
        "lnc", 0, "Physical cores per JAX device; 0: NEURON_LOGICAL_NC_CONFIG, else 2 on trn2.", **options
    )
    flags.DEFINE_integer("cores", 0, "JAX devices per node that the run uses; 0: all.", **options)
    flags.DEFINE_string("cache", CACHE, "Folder for compiled programs on the node's local disk.", **options)
    flags.DEFINE_string("profile", "", "Folder for JAX's profile of the devices; empty: none is taken.", **options)
    flags.DEFINE_string("format", "shell", "shell (lines for eval) or json.", **options)
