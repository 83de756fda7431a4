#!/usr/bin/env bash
# Kernel settings of a compute node; ParallelCluster runs it as root once on each node, see cluster.yaml.
# Not yet run on a Trainium cluster.
set -euo pipefail

# reserves the ports of Neuron's collectives and of JAX
sysctl -w net.ipv4.ip_local_reserved_ports=41000,41001
# many files of text and checkpoints are open at once
printf '* soft nofile 65535\n* hard nofile 131071\n' > /etc/security/limits.d/90-hlat.conf
