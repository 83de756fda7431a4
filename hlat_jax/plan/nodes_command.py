"""Prints the most nodes, up to N, that a run can use, `python -m hlat_jax.plan nodes --config=NAME --nodes=N`."""

from __future__ import annotations

import os
from collections.abc import Sequence

from absl import flags

from hlat_jax.config import count_text
from hlat_jax.facts import hardware
from hlat_jax.facts.core_groups import server_of_node
from hlat_jax.host.neuron_topology import HERE, detected_instance
from hlat_jax.weights.init_model import parse_config


def main(argv: Sequence[str]) -> int:
    """Prints the number of nodes, and returns the exit code.

    Raises:
      ValueError: no number of nodes in the range passes. The message names the nearest numbers that pass.
    """
    config, values = parse_config(argv, _define)
    target = hardware.node(values.instance or detected_instance(HERE) or "trn1.32xlarge")
    least = values.min_nodes
    if least > values.nodes:
        raise ValueError(f"--min_nodes={least} is more than --nodes={values.nodes}. Lower --min_nodes.")
    os.environ["JAX_PLATFORMS"] = "cpu"
    from hlat_jax.parallel.degrees import are_degrees_valid, check_degrees, nearest_nodes

    node_devices = values.cores or target.num_devices()
    server = server_of_node(target, num_devices=node_devices)
    for count in range(values.nodes, least - 1, -1):
        if are_degrees_valid(config, count * node_devices, server=server):
            print(count)
            return 0
    try:
        check_degrees(config, values.nodes * node_devices, server=server)
    except ValueError as error:
        near = nearest_nodes(config, values.nodes, node_devices=node_devices, server=server)
        counts = " and ".join(count_text(number, "node") for number in near) or "no number of nodes"
        raise ValueError(
            f"--nodes={values.nodes} --min_nodes={least}: no number of nodes in this range passes. {error} With the "
            f"degrees of the config, {counts} pass{'es' * (not near)}."
        ) from None
    raise AssertionError("the first number of nodes passes")


def _define(values: flags.FlagValues) -> None:
    names = ", ".join([*hardware.NODES, "cpu"])
    about = f"Type of the nodes, by default the type of this machine, or trn1.32xlarge: {names}."
    flags.DEFINE_string("instance", "", about, flag_values=values)
    flags.DEFINE_integer("nodes", 1, "Number of nodes that are there.", 1, flag_values=values)
    flags.DEFINE_integer("min_nodes", 1, "Fewest nodes to use.", 1, flag_values=values)
    flags.DEFINE_integer("cores", 0, "JAX devices of a node. 0 means all of its type.", 0, flag_values=values)
