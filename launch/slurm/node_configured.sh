#!/usr/bin/env bash
# Names, libraries and kernel settings of a compute node; ParallelCluster runs it as root once on each, see cluster.yaml.
# Not yet run on a Trainium cluster.
set -euo pipefail

# reserves the ports of Neuron's collectives and of JAX, after a restart too
echo "net.ipv4.ip_local_reserved_ports=41000,41001" > "${SYSCTL:-/etc/sysctl.d}/90-hlat.conf"
sysctl --load="${SYSCTL:-/etc/sysctl.d}/90-hlat.conf"
# with several interfaces the node's own name may stand for an address at which no other node reaches it; DNS has the
# right one
name=$(hostname -s)
sed -i -E -e ':again' -e "s/[[:space:]]$name(\.[^[:space:]]+)?([[:space:]]|\$)/\2/" -e 't again' \
  -e '/^[0-9a-fA-F.:]+[[:space:]]*$/d' "${HOSTS_FILE:-/etc/hosts}"
# node.sh preloads tcmalloc where it is there; the updates of a new machine may hold the lock of its packages
lock=(-o DPkg::Lock::Timeout=300)
export DEBIAN_FRONTEND=noninteractive
{ apt-get "${lock[@]}" update && apt-get "${lock[@]}" install -y libgoogle-perftools-dev; } ||
  dnf install -y gperftools-libs || echo "tcmalloc is not installed" >&2
# many files of text and checkpoints are open at once
printf '* soft nofile 65535\n* hard nofile 131071\n' > "${LIMITS:-/etc/security/limits.d}/90-hlat.conf"
