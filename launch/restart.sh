#!/usr/bin/env bash
# Runs a command again when it fails; it resumes from its last checkpoint:
#
#   launch/restart.sh [--max_restarts=10] [--wait_s=10] [--stale_s=600] [--requeue=JOB] [--requeued=N] \
#     srun launch/node.sh --config=7b --workdir=/fsx/runs/7b
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
# The command replaces alive.json in its --workdir each second. Where it did and then does not for --stale_s seconds, it
# is frozen and cannot end by itself: its process group is ended, which counts as exit code 124; with 0 it never is.
set -uo pipefail

max_restarts=10 wait_s=10 stale_s=600 requeue="" requeued=0
while (($# > 0)); do
  case $1 in
    --max_restarts=*) max_restarts=${1#*=} ;;
    --wait_s=*) wait_s=${1#*=} ;;
    --stale_s=*) stale_s=${1#*=} ;;
    --requeue=*) requeue=${1#*=} ;;
    --requeued=*) requeued=${1#*=} ;;
    *) break ;;
  esac
  shift
done

fail() {
  echo "error: $*" >&2
  exit 2
}
for pair in "--max_restarts=$max_restarts" "--wait_s=$wait_s" "--stale_s=$stale_s" "--requeued=$requeued"; do
  [[ ${pair#*=} =~ ^(0|[1-9][0-9]{0,8})$ ]] || fail "$pair must be a whole number."
done
workdir=""
for word in "$@"; do
  [[ $word != --workdir=* ]] || workdir=${word#*=}
done
[[ -n $workdir ]] || fail "--workdir=DIR is missing in the command. Give a folder that all nodes share."
[[ ! $workdir =~ ^file://(localhost)?(/.*)$ ]] || workdir=${BASH_REMATCH[2]}
[[ ! $workdir =~ ^[A-Za-z][A-Za-z0-9+.-]+:/ ]] || fail "--workdir=$workdir is a URL. Give a folder that all nodes share."

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
  set -m # a process group of its own
  "$@" < /dev/null &
  child=$!
  set +m
  watch=""
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
  [[ -z $stopped ]] || end "$code"
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
