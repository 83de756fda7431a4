#!/usr/bin/env bash
# Starts the training process of this node, one process per node, under Slurm, Open MPI or by hand.
#
#   srun --ntasks-per-node=1 launch/node.sh --config=7b
#   mpirun --map-by ppr:1:node launch/node.sh --coordinator=HOST --config=7b
#   launch/node.sh --nodes=2 --node=0 --coordinator=HOST --config=7b   # anywhere else, once on each node
#   launch/node.sh --config=tiny                                           # one node
#   launch/node.sh --dry-run --instance=trn1.32xlarge --nodes=64 --coordinator=HOST --config=7b   # on any machine
#
# Flags of its own; all others go to `python -m hlat_jax.train`:
#   --coordinator=HOST   the first node, reachable from the others; default under Slurm: the address that its controller
#                        has of the first node, the same on all nodes whatever their /etc/hosts say
#   --nodes=N            nodes of the job
#   --node=I             this one, 0 .. N - 1
#   --port=P             port of JAX's coordination service on the first node; default 41001
#   --instance=TYPE      the Trainium instance; default, where there are Neuron devices: from DMI
#   --cores=N            NeuronCores of a node to train on, as JAX sees them; default all
#   --cache=DIR          copy the compiled programs of a shared folder to this node before the run
#   --fill_cache=DIR     the same, and copy those of this node to the folder after the run
#   --local_disk=DIR     make one file system of this instance's NVMe disks, mount it at DIR, and put the caches there,
#                        if LOCAL_CACHE names no folder; a disk with a file system, or in use, is refused. Needs root or sudo, and mdadm
#   --dry-run            print what would be exported and run, and stop: for this node if --node or the launcher names
#                        it, else for every node
#
# On Neuron the command first waits for a former run to end, removes what killed compiles have left, and tries JAX's
# cache in a separate process. If the cache fails, it prints a line and continues without.
# PYTHON names the interpreter, by default `python`; LOCAL_CACHE the folder of compiled programs on the node's own disk;
# IMAGE_ROOT another place to look for the libraries of the image, for tests.
# This script handles nodes and paths only. The recipe is in the config; `python -m hlat_jax.neuron env` computes the
# environment variables for Trainium from it, and merges them with those already set.
set -euo pipefail

python=${PYTHON:-python}
local_cache=${LOCAL_CACHE:-} local_disk=""
coordinator="" num_nodes="" node="" port=41001 cores="" instance="" shared_cache="" fill_cache="" dry_run=false
stopped_code=143
passed=() config_words=()

fail() {
  echo "error: $*" >&2
  exit 2
}

# Bash evaluates the contents of (( )), even a command inside a subscript, so every value is checked here first.
check_number() { # flag or variable, value, lowest
  if ! [[ $2 =~ ^(0|[1-9][0-9]{0,8})$ ]] || (($2 < $3)); then
    fail "$1=$2 must be a whole number of at least $3."
  fi
}

previous=""
for word in "$@"; do
  case $word in
    --coordinator=*) coordinator=${word#*=} ;;
    --nodes=*) num_nodes=${word#*=} ;;
    --node=*) node=${word#*=} ;;
    --port=*) port=${word#*=} ;;
    --cores=*) cores=${word#*=} ;;
    --instance=*) instance=${word#*=} ;;
    --cache=*) shared_cache=${word#*=} ;;
    --fill_cache=*) fill_cache=${word#*=} ;;
    --local_disk=*) local_disk=${word#*=} ;;
    --dry-run) dry_run=true ;;
    --rank=* | --num_nodes=* | --target=* | --dry_run) fail "$word is not a flag. Give --node, --nodes, --instance or --dry-run." ;;
    --num_processes=* | --process_id=*) fail "$word is not a flag. Give --nodes and --node, as one process runs on each node." ;;
    *)
      [[ $word != --stopped_code=[1-9]* ]] || stopped_code=${word#*=}
      passed+=("$word")
      # also the value after `--config`, `--config.a.b` or `--init_from`
      if [[ $word =~ ^--(config([.=]|$)|init_from(=|$)) || ($previous =~ ^--(config(\.[^=]*)?|init_from)$ && $word != --*) ]]; then
        config_words+=("$word")
      fi
      ;;
  esac
  previous=$word
done

[[ -z $local_disk || $local_disk == /?* ]] || fail "--local_disk=$local_disk must be an absolute path, such as /mnt/nvme."
: "${local_cache:=${local_disk:-/var/tmp}/hlat-compile-cache}"
for pair in "--cache=$shared_cache" "--fill_cache=$fill_cache" "LOCAL_CACHE=$local_cache"; do
  [[ ! ${pair#*=} =~ ^[A-Za-z][A-Za-z0-9+.-]+:/ ]] || fail "$pair is a URL. Give a local folder."
done

is_address() {
  [[ $1 =~ ^[0-9]+\.[0-9]+\.[0-9]+\.[0-9]+$ ]]
}

slurm_address() { # node: its address, or its name where Slurm has none
  local address=""
  if ! is_address "$1"; then
    address=$(scontrol --oneliner show node "$1" 2> /dev/null | tr ' ' '\n' | sed -n 's/^NodeAddr=//p' || true)
  fi
  if is_address "$address"; then echo "$address"; else echo "$1"; fi
}

from_slurm() {
  local nodes count
  command -v scontrol > /dev/null || fail "SLURM_JOB_NODELIST is set, but scontrol, which reads it, is not installed."
  local list=${SLURM_STEP_NODELIST:-$SLURM_JOB_NODELIST} # a step may have fewer nodes than the job
  nodes=$(scontrol show hostnames "$list") || fail "scontrol cannot read SLURM_JOB_NODELIST=$list."
  count=$(wc -l <<< "$nodes")
  num_nodes=${SLURM_STEP_NUM_NODES:-${SLURM_NNODES:-$count}}
  check_number SLURM_NNODES "$num_nodes" 1
  ((num_nodes == count)) || fail "SLURM_NNODES=$num_nodes, but SLURM_JOB_NODELIST names $count nodes."
  node=${SLURM_NODEID:-}
  [[ -n $node ]] || fail "SLURM_NODEID is not set. Start this script with srun, once per node."
  check_number SLURM_NODEID "$node" 0
  [[ ${SLURM_PROCID:-$node} == "$node" ]] ||
    fail "SLURM_PROCID=$SLURM_PROCID on node $node, as several tasks run on a node. Use srun --ntasks-per-node=1."
  [[ -n $coordinator ]] || coordinator=$(slurm_address "${nodes%%$'\n'*}")
}

from_open_mpi() {
  num_nodes=${OMPI_COMM_WORLD_SIZE:-}
  node=$OMPI_COMM_WORLD_RANK
  [[ -n $num_nodes ]] || fail "OMPI_COMM_WORLD_RANK is set and OMPI_COMM_WORLD_SIZE is not. Start this script with mpirun."
  check_number OMPI_COMM_WORLD_SIZE "$num_nodes" 1
  check_number OMPI_COMM_WORLD_RANK "$node" 0
  [[ -n $coordinator ]] || ((num_nodes == 1)) ||
    fail "Open MPI gives no host of rank 0. Give --coordinator=HOST of the first node."
  unset OMPI_MCA_orte_hnp_uri # not needed: JAX and Neuron get the coordinator's address
}

every_node=false
if [[ -n $num_nodes || -n $node ]]; then
  if $dry_run && [[ -n $num_nodes && -z $node ]]; then
    every_node=true node=0
  fi
  [[ -n $num_nodes && -n $node ]] || fail "give --nodes and --node together."
elif [[ -n ${OMPI_COMM_WORLD_RANK:-} ]]; then # first: mpirun inside a Slurm job has both
  from_open_mpi
elif [[ -n ${SLURM_JOB_NODELIST:-} ]]; then
  from_slurm
else
  [[ -z $coordinator ]] || fail "--coordinator=$coordinator needs --nodes and --node, or the variables of Slurm or Open MPI."
  num_nodes=1 node=0
fi
check_number --nodes "$num_nodes" 1
check_number --node "$node" 0
check_number --port "$port" 1
[[ -z $cores ]] || check_number --cores "$cores" 1
((node < num_nodes)) || fail "--node=$node must lie in 0 .. $((num_nodes - 1)) (--nodes - 1)."
((num_nodes == 1)) || [[ -n $coordinator ]] || fail "--coordinator=HOST is missing. Give the host name of the first node, reachable from the others."
((${#coordinator} <= 63)) || fail "--coordinator=$coordinator has ${#coordinator} characters, and Neuron takes 63. Use its address."

has_neuron() { # DEV and SYS: other folders, for the tests
  [[ ",${JAX_PLATFORMS:-neuron}," == *,neuron,* ]] && compgen -G "${DEV:-/dev}/neuron[0-9]*" > /dev/null
}
if [[ -z $instance ]] && has_neuron; then
  instance=$(cat "${SYS:-/sys}/devices/virtual/dmi/id/product_name" 2> /dev/null || true)
  [[ -n $instance ]] || fail "this machine has Neuron devices and an unknown instance type. Give --instance=TYPE."
fi

as_root() { # runs a command as root; in a dry run prints it
  if $dry_run; then
    printf '# sudo'
    printf ' %q' "$@"
    echo
  elif ((EUID == 0)); then
    "$@"
  else
    sudo -n "$@"
  fi
}

# The images leave the instance's disks without a file system. EC2 names their model; EBS volumes have another.
mount_local_disk() {
  local label=hlat-local device disk disks=() found signature=""
  ! mountpoint -q "$local_disk" || return 0
  device=$(blkid -L "$label" 2> /dev/null || true) # of an earlier start
  if [[ -z $device ]]; then
    mapfile -t disks < <(lsblk -dnpo NAME,MODEL | sed -n 's/ *Amazon EC2 NVMe Instance Storage *$//p')
    if ((${#disks[@]} == 0)); then
      $dry_run || fail "--local_disk=$local_disk: this machine has no NVMe disk of an instance. Leave the flag out."
      echo "# --local_disk=$local_disk: this machine has no NVMe disk of an instance"
      return 0
    fi
    for disk in "${disks[@]}"; do
      found=$(lsblk -nrpo NAME,FSTYPE,MOUNTPOINT "$disk" | sed 's/ *$//')
      $dry_run || signature=$(as_root wipefs --noheadings "$disk") # which reads the disk itself, and erases nothing
      found+=${signature:+ $signature}
      [[ $found == "$disk" ]] || fail "--local_disk=$local_disk: $disk is in use (${found//$'\n'/, }). Mount or empty it yourself."
    done
    device=${disks[0]}
    if ((${#disks[@]} > 1)); then
      device=/dev/md/$label
      as_root mdadm --create "$device" --run --level=0 "--raid-devices=${#disks[@]}" "${disks[@]}"
    fi
    as_root mkfs.ext4 -q -m 0 -L "$label" "$device"
  fi
  as_root mkdir -p "$local_disk"
  as_root mount "$device" "$local_disk"
  as_root chmod 1777 "$local_disk"
}
if [[ -n $local_disk ]]; then
  mount_local_disk
fi

# before the training process takes signals; as process 1 of a container bash would ignore them
trap 'exit "$stopped_code"' TERM USR1

exports="" # lines of `export NAME=VALUE`, of one node or of all
if [[ -n $instance ]]; then
  rank=$node
  ! $every_node || rank=all
  exports=$("$python" -m hlat_jax.neuron env "${config_words[@]}" "--instance=$instance" "--nodes=$num_nodes" \
    "--node=$rank" "--coordinator=$coordinator" "--port=$port" "--cores=${cores:-0}" "--cache=$local_cache")
elif [[ -n $shared_cache || -n $fill_cache ]]; then
  exports="export JAX_COMPILATION_CACHE_DIR=$(printf %q "${JAX_COMPILATION_CACHE_DIR:-$local_cache/jax}")
export JAX_PERSISTENT_CACHE_ENABLE_XLA_CACHES=none" # else the folder's path is in the keys of its entries
fi

host_exports() { # what the loader of this machine reads before Python starts
  local base library folder found="" root=${IMAGE_ROOT:-} efa=${LD_LIBRARY_PATH:-}
  [[ -n $instance ]] || return 0
  # with glibc's allocator host memory was seen to grow without bound in long runs
  for base in lib lib/x86_64-linux-gnu lib64; do # a link of the user's; Ubuntu; Amazon Linux
    for library in "$root/usr/$base"/libtcmalloc{,_minimal}.so{,.4}; do
      [[ -n $found || ! -e $library ]] || found=$library
    done
  done
  [[ -z $found || -n ${LD_PRELOAD:-} ]] || printf 'export LD_PRELOAD=%q\n' "$found"
  for folder in "$root"/opt/amazon/efa/lib64 "$root"/opt/amazon/efa/lib; do # Amazon Linux; Ubuntu
    [[ ! -d $folder || ":$efa:" == *":$folder:"* ]] || efa=$folder${efa:+:$efa}
  done
  [[ $efa == "${LD_LIBRARY_PATH:-}" ]] || printf 'export LD_LIBRARY_PATH=%q\n' "$efa"
}

exports_of() { # node
  if $every_node && ((num_nodes > 1)); then
    awk -v mine="# rank $1 of $num_nodes" '/^# rank [0-9]+ of [0-9]+$/ { shown = $0 == mine; next } shown' <<< "$exports"
  elif [[ -n $exports ]]; then
    echo "$exports"
  fi
  host_exports
}

command_of() { # node: fills `command`
  command=("$python" -m hlat_jax.train "${passed[@]}")
  [[ -z $instance ]] || command+=("--instance=$instance")
  [[ -z $instance || -z $cores ]] || command+=("--cores=$cores")
  if ((num_nodes > 1)); then
    command+=("--coordinator=$coordinator:$port" "--num_processes=$num_nodes" "--process_id=$1")
  fi
}

print_node() { # node
  exports_of "$1"
  command_of "$1"
  printf '%q ' "${command[@]}"
  echo
}

copy_cache() { # from to: existing files stay; each file is moved into place when complete
  local partial="$2/.partial.$node.$$" file
  [[ -d $1 ]] || return 0
  mkdir -p "$partial"
  while IFS= read -r -d '' file; do
    [[ ! -e $2/$file ]] || continue
    mkdir -p "$(dirname "$2/$file")"
    cp "$1/$file" "$partial/file"
    mv "$partial/file" "$2/$file"
  done < <(cd "$1" && find . -type f -not -path './.partial.*' -not -name '*.lock' -print0) # locks of killed compiles
  rm -r "$partial"
}

if $dry_run; then
  if $every_node; then
    for ((each = 0; each < num_nodes; each++)); do
      echo "# node $each of $num_nodes"
      print_node "$each"
    done
  else
    print_node "$node"
  fi
  exit 0
fi

eval "$(exports_of "$node")"
ulimit -S -n 65535 2> /dev/null || ulimit -S -n "$(ulimit -H -n)"
for shared in "$shared_cache" "$fill_cache"; do
  [[ -z $shared ]] || copy_cache "$shared" "$local_cache"
done
command_of "$node"
[[ -n $fill_cache ]] || exec "${command[@]}"
trap 'kill -TERM "$child" 2> /dev/null || true' TERM # as process 1 of a container bash would ignore it
trap 'kill -USR1 "$child" 2> /dev/null || true' USR1
trap : INT # Ctrl-C reaches the command too, which a background command would ignore
child="" code=0
env --default-signal=INT "${command[@]}" &
child=$!
wait "$child" || code=$?
while kill -0 "$child" 2> /dev/null; do # a trapped signal ended the wait, not the command
  code=0
  wait "$child" || code=$?
done
copy_cache "$local_cache" "$fill_cache"
exit "$code"
