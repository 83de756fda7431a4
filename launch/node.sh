#!/usr/bin/env bash
# Starts the training process of this node: one process a node, however the nodes were started.
#
#   srun --ntasks-per-node=1 launch/node.sh --config=7b
#   mpirun --map-by ppr:1:node launch/node.sh --coordinator=HOST --config=7b
#   launch/node.sh --num_nodes=2 --node=0 --coordinator=HOST --config=7b   # anywhere else, once on each node
#   launch/node.sh --config=tiny                                           # one node
#
# Flags of its own; all others go to `python -m hlat_jax.train`:
#   --coordinator=HOST   the first node, as the others reach it; Slurm's variables name it too
#   --num_nodes=N        nodes of the job
#   --node=I             this one, 0 .. N - 1
#   --port=P             where the processes of JAX meet on the first node; default 41001
#   --cores=N            NeuronCores of a node that JAX sees; default by the instance type
#   --dry_run            print what would be exported and run, and stop
#
# PYTHON names the interpreter, by default `python`. A variable that is set already keeps its value, unless it says which
# process this is. It knows nodes and paths. What is trained, and how, is in the config.
set -euo pipefail

readonly neuron_port=41000 # of Neuron's own collectives; JAX needs another
coordinator="" num_nodes="" node="" port=41001 cores="" dry_run=false
passed=()

fail() {
  echo "error: $*" >&2
  exit 2
}

check_number() { # flag value lowest
  if ! [[ $2 =~ ^(0|[1-9][0-9]*)$ ]] || (($2 < $3)); then
    fail "$1=$2 must be a whole number of at least $3."
  fi
}

for word in "$@"; do
  case $word in
    --coordinator=*) coordinator=${word#*=} ;;
    --num_nodes=*) num_nodes=${word#*=} ;;
    --node=*) node=${word#*=} ;;
    --port=*) port=${word#*=} ;;
    --cores=*) cores=${word#*=} ;;
    --dry_run) dry_run=true ;;
    --num_processes=* | --process_id=*) fail "$word: give --num_nodes and --node; one process runs on each node." ;;
    *) passed+=("$word") ;;
  esac
done

from_slurm() {
  local nodes count
  command -v scontrol > /dev/null || fail "SLURM_JOB_NODELIST is set, but there is no scontrol to read it with."
  nodes=$(scontrol show hostnames "$SLURM_JOB_NODELIST") || fail "scontrol cannot read SLURM_JOB_NODELIST=$SLURM_JOB_NODELIST."
  count=$(wc -l <<< "$nodes")
  num_nodes=${SLURM_NNODES:-$count}
  ((num_nodes == count)) || fail "SLURM_NNODES=$num_nodes, but SLURM_JOB_NODELIST names $count nodes."
  node=${SLURM_NODEID:-}
  [[ -n $node ]] || fail "SLURM_NODEID is not set: start this script with srun, once a node."
  [[ ${SLURM_PROCID:-$node} == "$node" ]] ||
    fail "SLURM_PROCID=$SLURM_PROCID on node $node: several tasks run on a node; use srun --ntasks-per-node=1."
  coordinator=${coordinator:-${nodes%%$'\n'*}}
}

from_open_mpi() {
  num_nodes=${OMPI_COMM_WORLD_SIZE:-}
  node=$OMPI_COMM_WORLD_RANK
  [[ -n $num_nodes ]] || fail "OMPI_COMM_WORLD_RANK is set and OMPI_COMM_WORLD_SIZE is not: start this script with mpirun."
  [[ -n $coordinator ]] || ((num_nodes == 1)) ||
    fail "Open MPI does not say where rank 0 runs: give --coordinator=HOST of the first node."
  unset OMPI_MCA_orte_hnp_uri # JAX and Neuron find each other without it
}

if [[ -n $num_nodes || -n $node ]]; then
  [[ -n $num_nodes && -n $node ]] || fail "--num_nodes and --node belong together."
elif [[ -n ${OMPI_COMM_WORLD_RANK:-} ]]; then # first: mpirun inside a Slurm job has both
  from_open_mpi
elif [[ -n ${SLURM_JOB_NODELIST:-} ]]; then
  from_slurm
else
  [[ -z $coordinator ]] || fail "--coordinator=$coordinator needs --num_nodes and --node, or the variables of Slurm or Open MPI."
  num_nodes=1 node=0
fi
check_number --num_nodes "$num_nodes" 1
check_number --node "$node" 0
check_number --port "$port" 1
((node < num_nodes)) || fail "--node=$node must lie in 0 .. $((num_nodes - 1)): --num_nodes - 1."
((num_nodes == 1)) || [[ -n $coordinator ]] || fail "--coordinator=HOST is missing: the first node, as the others reach it."
((${#coordinator} <= 63)) || fail "--coordinator=$coordinator has ${#coordinator} characters; Neuron takes 63: give its address."

exported=()
set_variable() { # name value
  export "$1=$2"
  exported+=("$1=$2")
}
set_default() { # name value: the caller's own value stays
  set_variable "$1" "${!1:-$2}"
}

cores_of_node() { # by the instance type, which EC2 tells as the product name
  local type chips per_chip
  type=$(cat "${SYS:-/sys}/devices/virtual/dmi/id/product_name" 2> /dev/null || true)
  chips=("${DEV:-/dev}"/neuron[0-9]*)
  case $type in
    trn1*) per_chip=2 ;;
    trn2*) per_chip=$((8 / ${NEURON_LOGICAL_NC_CONFIG:-2})) ;;
    *) fail "the NeuronCores of instance type '$type' are not known here: give --cores=N, as JAX sees them on a node." ;;
  esac
  echo $((${#chips[@]} * per_chip))
}

neuron_environment() {
  local counts
  [[ -n $cores ]] || cores=$(cores_of_node)
  check_number --cores "$cores" 1
  ((port != neuron_port)) || fail "--port=$port is that of Neuron's collectives; take another, such as 41001."
  set_default JAX_PLATFORMS neuron,cpu
  set_default NEURON_FORCE_PJRT_PLUGIN_REGISTRATION 1
  set_default MALLOC_ARENA_MAX 64
  if ((num_nodes > 1)); then
    printf -v counts ",$cores%.0s" $(seq "$num_nodes")
    set_variable NEURON_RT_ROOT_COMM_ID "$coordinator:$neuron_port"
    set_variable NEURON_PJRT_PROCESSES_NUM_DEVICES "${counts#,}"
    set_variable NEURON_PJRT_PROCESS_INDEX "$node"
    set_default FI_PROVIDER efa
    set_default FI_EFA_USE_DEVICE_RDMA 1
    set_default FI_EFA_FORK_SAFE 1
    set_default FI_LOG_LEVEL warn
  fi
}

if compgen -G "${DEV:-/dev}/neuron[0-9]*" > /dev/null; then # DEV and SYS: other folders, for the tests
  neuron_environment
fi
ulimit -S -n 65535 2> /dev/null || ulimit -S -n "$(ulimit -H -n)"

command=("${PYTHON:-python}" -m hlat_jax.train "${passed[@]}")
if ((num_nodes > 1)); then
  command+=("--coordinator=$coordinator:$port" "--num_processes=$num_nodes" "--process_id=$node")
fi
if $dry_run; then
  ((${#exported[@]} == 0)) || printf 'export %q\n' "${exported[@]}"
  printf '%q ' "${command[@]}"
  echo
  exit 0
fi
exec "${command[@]}"
