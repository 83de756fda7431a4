#!/usr/bin/env bash
# Runs a command again when it fails; it resumes from its last checkpoint:
#
#   launch/restart.sh [--max_restarts=10] [--wait_s=10] [--stale_s=600] [--requeue=JOB] [--requeued=N] \
#     srun launch/node.sh --config=7b --workdir=/fsx/runs/7b
#   launch/restart.sh --min_nodes=60 [--list_nodes=COMMAND] [--grow_s=600] \
#     srun --nodes=@NODES@ --nodelist=@NODELIST@ launch/node.sh --config=7b --config.train.num_microbatches=-1 ...
#
# A failure is any exit code but 0, 2 and 130; with 2 the command, the config or the data is wrong, and a restart would
# fail again; 130 follows SIGINT. The limit is on restarts in a row without a new checkpoint in the --workdir of the
# command. A signal that reaches the command from elsewhere, as where a node shuts down, ends it with --stopped_code; if
# that is not 0 it is started again. Code 74 says that the last checkpoint is not in checkpoint.copy_to: the restart
# copies it. Exits with the last code of the command.
#
# SIGTERM, SIGINT, SIGHUP and SIGUSR1 to this script stop the command: it saves and ends, and is not started again. The
# command gets SIGUSR1 each time, as srun passes that on, and kills its tasks after SIGTERM.
# With --requeue=JOB, SIGUSR1 also puts that Slurm job back into the queue, unless the code is 0, 2 or 130: the limit of
# the job is near. --requeued=N says how often the job has started again (SLURM_RESTART_COUNT), which the limit counts.
#
# With --min_nodes=N each start takes the nodes that are there, and at least N. --list_nodes=COMMAND prints them, one on
# each line. By default they are the nodes of the Slurm job that respond. In the command, @NODES@ becomes the number of
# nodes that the run can use, and @NODELIST@ their names, joined by commas. `python -m hlat_jax.plan nodes` finds this
# number by --config and --instance. Only this search uses --instance=TYPE and --cores=N before the command. If the
# command has --config.train.num_microbatches=-1, any number of replicas trains on the same batches. Every --grow_s
# seconds (600, 0 means never) the script looks for more nodes. If the run can use more, the command gets SIGUSR1, saves
# and ends, and starts again on them. PYTHON names the interpreter, by default `python`.
#
# The command replaces alive.json in its --workdir each second. Where it did and then does not for --stale_s seconds, it
# is frozen and cannot end by itself: its process group is ended, which counts as exit code 124; with 0 it never is.
set -uo pipefail

max_restarts=10 wait_s=10 stale_s=600 requeue="" requeued=0 min_nodes=0 list_nodes="" grow_s=600
plan_words=()
while (($# > 0)); do
  case $1 in
    --max_restarts=*) max_restarts=${1#*=} ;;
    --wait_s=*) wait_s=${1#*=} ;;
    --stale_s=*) stale_s=${1#*=} ;;
    --requeue=*) requeue=${1#*=} ;;
    --requeued=*) requeued=${1#*=} ;;
    --min_nodes=*) min_nodes=${1#*=} ;;
    --list_nodes=*) list_nodes=${1#*=} ;;
    --grow_s=*) grow_s=${1#*=} ;;
    --instance=* | --cores=*) plan_words+=("$1") ;;
    *) break ;;
  esac
  shift
done

fail() {
  echo "error: $*" >&2
  exit 2
}
for pair in "--max_restarts=$max_restarts" "--wait_s=$wait_s" "--stale_s=$stale_s" "--requeued=$requeued" \
  "--min_nodes=$min_nodes" "--grow_s=$grow_s"; do
  [[ ${pair#*=} =~ ^(0|[1-9][0-9]{0,8})$ ]] || fail "$pair must be a whole number."
done
workdir=""
for word in "$@"; do
  [[ $word != --workdir=* ]] || workdir=${word#*=}
done
[[ -n $workdir ]] || fail "--workdir=DIR is missing in the command. Give a folder that all nodes share."
[[ ! $workdir =~ ^file://(localhost)?(/.*)$ ]] || workdir=${BASH_REMATCH[2]}
[[ ! $workdir =~ ^[A-Za-z][A-Za-z0-9+.-]+:/ ]] || fail "--workdir=$workdir is a URL. Give a folder that all nodes share."

previous=""
for word in "$@"; do
  if [[ $word =~ ^--(config([.=]|$)|instance=|cores=) || ($previous =~ ^--config(\.[^=]*)?$ && $word != --*) ]]; then
    plan_words+=("$word")
  fi
  previous=$word
done
if ((min_nodes > 0)); then
  [[ " $* " == *@NODES@* ]] || fail "--min_nodes=$min_nodes needs @NODES@ in the command, such as srun --nodes=@NODES@."
  [[ -n $list_nodes || -n ${SLURM_JOB_NODELIST:-} ]] || fail "--min_nodes=$min_nodes needs --list_nodes=COMMAND outside Slurm."
fi

nodes_there() { # prints the nodes that can be used now, a name a line
  if [[ -n $list_nodes ]]; then
    bash -c "$list_nodes"
  else # a state ends in * where the node does not respond
    sinfo --noheader --Node "--nodes=$SLURM_JOB_NODELIST" --format="%N %T" |
      awk '$2 ~ /^(allocated|mixed|idle|completing)$/ && !seen[$1]++ { print $1 }'
  fi
}

# Fills `there` with the nodes that are there, and `num_nodes` with how many of them the run uses. The code is 2 if the
# degrees allow no such number, and 1 if too few nodes are there.
count_nodes() {
  mapfile -t there < <(nodes_there)
  if ((${#there[@]} < min_nodes)); then
    echo "error: ${#there[@]} nodes are there, fewer than --min_nodes=$min_nodes." >&2
    return 1
  fi
  num_nodes=$("${PYTHON:-python}" -m hlat_jax.plan nodes "${plan_words[@]}" "--nodes=${#there[@]}" "--min_nodes=$min_nodes")
}

# Ends the command, and exits with 10, when the run can use more nodes than now.
end_when_more() { # pid of the command
  local now=$num_nodes
  trap 'kill "$!" 2> /dev/null; exit 0' TERM
  while true; do
    sleep "$grow_s" > /dev/null 2>&1 & # a reader of this script's output must not wait for it
    wait "$!"
    if count_nodes 2> /dev/null && ((num_nodes > now)); then
      trap "" TERM # from here on the caller waits for this
      echo "$num_nodes nodes can be used, and $now are: the command saves and starts again." >&2
      kill -USR1 "$1" 2> /dev/null
      exit 10
    fi
  done
}

newest_checkpoint() { # prints its step; unfinished checkpoints have other names
  local path step=0
  for path in "$workdir"/checkpoints/*; do
    path=${path##*/}
    if [[ $path =~ ^[0-9]{1,18}$ ]] && ((10#$path > step)); then
      step=$((10#$path))
    fi
  done
  echo "$step"
}

# Prints which alive.json there is, every few seconds; this may hang, as a file system may.
beats() { # period in seconds
  exec 2> /dev/null # it lives a little longer than the command, whose reader must not wait for it
  while sleep "$1"; do
    stat --format="%i %y" "$workdir/alive.json" || echo none
  done
}

# Ends the process group of the command, and exits with 124, when alive.json no longer changes. Only that counts, not
# its time: the clocks of other machines and the one of this machine may be wrong, and this machine may have slept.
end_when_frozen() { # pid of the command, alive.json before it began
  local period=$((stale_s / 60)) before=$2 seen="" beat idle=0 left
  ((period >= 1)) || period=1
  ((period <= 10)) || period=10
  while true; do
    read -r -t $((2 * period)) beat || beat=$seen # the file system hangs
    if [[ $beat == "$seen" ]]; then
      ((idle += period))
    else
      seen=$beat idle=0
    fi
    # before the first beat it opens the run, and after the last it has ended by itself
    if [[ -z $seen || $seen == none || $seen == "$before" ]] || ((idle < stale_s)); then
      continue
    fi
    trap "" TERM # from here on the caller waits for this
    # for the ledger of the run; in the background, as the file system may hang
    printf '{"event": "killed", "time": %s}\n' "$(date +%s.%N)" 2> /dev/null >> "$workdir/events.jsonl" &
    echo "error: $workdir/alive.json has not changed for $idle s, so the frozen command is ended." >&2
    kill -TERM -- "-$1" 2> /dev/null
    for ((left = stale_s < 10 ? stale_s : 10; left > 0; left--)); do
      sleep 1
      kill -0 -- "-$1" 2> /dev/null || exit 124
    done
    kill -KILL -- "-$1" 2> /dev/null
    exit 124
  done < <(beats "$period")
}

stopped="" child=""
stop() { # signal
  [[ $stopped == TERM ]] || stopped=$1
  [[ -z $child ]] || kill -USR1 "$child" 2> /dev/null
}
trap 'stop TERM' TERM INT HUP
trap 'stop USR1' USR1

is_failure() { # exit code
  (($1 != 0 && $1 != 2 && $1 != 130))
}

end() { # exit code, after a signal
  if [[ $stopped == USR1 && -n $requeue ]] && is_failure "$1"; then
    echo "exit code $1, job $requeue is requeued to resume from step $(newest_checkpoint)" >&2
    scontrol requeue "$requeue" || echo "error: Slurm does not requeue job $requeue. Submit it again to resume." >&2
  fi
  exit "$1"
}

# Counts a restart, in a file as well, for the job that is requeued; false after too many without a new checkpoint.
count_restart() {
  local now
  now=$(newest_checkpoint)
  ((now <= step)) || restarts=0
  step=$now
  ((restarts < max_restarts)) || return 1
  restarts=$((restarts + 1))
  { echo "$step $restarts" > "$workdir/.restarts"; } 2> /dev/null || true
}

step=0 restarts=0 # newest checkpoint at the last restart; restarts since the last new one
if ((requeued == 0)); then
  step=$(newest_checkpoint)
  rm -f "$workdir/.restarts" 2> /dev/null
else
  counted=$(cat "$workdir/.restarts" 2> /dev/null)
  [[ ! $counted =~ ^(0|[1-9][0-9]{0,17})\ [0-9]{1,6}$ ]] || read -r step restarts <<< "$counted"
  if ! count_restart; then
    echo "error: requeued after $restarts restarts without a new checkpoint after step $step, so it stops." >&2
    exit 1
  fi
fi
while true; do
  before=$(stat --format="%i %y" "$workdir/alive.json" 2> /dev/null)
  command=("$@")
  if ((min_nodes > 0)); then
    count_nodes
    code=$?
    [[ -z $stopped ]] || end 143
    ((code != 2)) || exit 2
    if ((code == 0)); then
      names=$(IFS=,; echo "${there[*]:0:num_nodes}")
      command=("${command[@]//@NODES@/$num_nodes}")
      command=("${command[@]//@NODELIST@/$names}")
      echo "nodes            $num_nodes of ${#there[@]} that are there" >&2
    else
      command=(false)
    fi
  fi
  set -m # a process group of its own
  "${command[@]}" < /dev/null &
  child=$!
  set +m
  watch="" grow=""
  if ((min_nodes > 0 && grow_s > 0 && code == 0)); then
    end_when_more "$child" &
    grow=$!
  fi
  if ((stale_s > 0)); then
    end_when_frozen "$child" "$before" &
    watch=$!
  fi
  wait "$child"
  code=$?
  while kill -0 "$child" 2> /dev/null; do # a trapped signal ended the wait, not the command
    wait "$child"
    code=$?
  done
  child=""
  if [[ -n $watch ]]; then
    kill -TERM "$watch" 2> /dev/null
    wait "$watch"
    (($? != 124)) || code=124
  fi
  has_grown=false
  if [[ -n $grow ]]; then
    kill -TERM "$grow" 2> /dev/null
    wait "$grow"
    (($? != 10)) || has_grown=true
  fi
  [[ -z $stopped ]] || end "$code"
  if $has_grown && ((code != 2 && code != 130)); then
    continue # a run that was complete says so
  fi
  is_failure "$code" || exit "$code"
  if ! count_restart; then
    echo "error: exit code $code after $restarts restarts without a new checkpoint after step $step, so it stops." >&2
    exit "$code"
  fi
  echo "exit code $code, restart $restarts of $max_restarts, from step $step, in $wait_s s" >&2
  sleep "$wait_s" &
  child=$!
  wait "$child"
  child=""
  [[ -z $stopped ]] || end "$code"
done
