#!/usr/bin/env bash
# Runs a command again when it fails; it resumes from its last checkpoint:
#
#   launch/restart.sh [--max_restarts=10] [--wait_s=10] srun launch/node.sh --config=7b --workdir=/fsx/runs/7b
#
# A failure is any exit code but 0, 2 and 130; with 2 the command, the config or the data is wrong, and a restart would
# fail again; 130 follows SIGINT. The limit is on restarts in a row without a new checkpoint in the --workdir of the
# command. SIGTERM and SIGINT are passed to the command, which saves and ends and is not restarted. Exits with the last
# code of the command.
set -uo pipefail

max_restarts=10 wait_s=10
while (($# > 0)); do
  case $1 in
    --max_restarts=*) max_restarts=${1#*=} ;;
    --wait_s=*) wait_s=${1#*=} ;;
    *) break ;;
  esac
  shift
done

fail() {
  echo "error: $*" >&2
  exit 2
}
for pair in "--max_restarts=$max_restarts" "--wait_s=$wait_s"; do
  [[ ${pair#*=} =~ ^(0|[1-9][0-9]{0,8})$ ]] || fail "$pair must be a whole number."
done
workdir=""
for word in "$@"; do
  [[ $word != --workdir=* ]] || workdir=${word#*=}
done
[[ -n $workdir ]] || fail "--workdir=DIR is missing in the command: a folder that all nodes share."

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

stopped=false child=""
stop() {
  stopped=true
  [[ -z $child ]] || kill -TERM "$child" 2> /dev/null
}
trap stop TERM INT

restarts=0 # since the last new checkpoint
while true; do
  step=$(newest_checkpoint)
  "$@" &
  child=$!
  wait "$child"
  code=$?
  while kill -0 "$child" 2> /dev/null; do # a trapped signal ended the wait, not the command
    wait "$child"
    code=$?
  done
  child=""
  ! $stopped || exit "$code"
  ((code != 0 && code != 2 && code != 130)) || exit "$code"
  now=$(newest_checkpoint)
  ((now <= step)) || restarts=0
  if ((restarts >= max_restarts)); then
    echo "error: exit code $code after $restarts restarts without a new checkpoint after step $now; not tried again." >&2
    exit "$code"
  fi
  restarts=$((restarts + 1))
  echo "exit code $code; restart $restarts of $max_restarts, from step $now, in $wait_s s" >&2
  sleep "$wait_s" &
  child=$!
  wait "$child"
  child=""
  ! $stopped || exit "$code"
done
