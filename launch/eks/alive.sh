#!/usr/bin/env bash
# Fails if the run of this container is frozen, for a livenessProbe, which calls it every minute:
#
#   launch/eks/alive.sh /fsx/runs/7b
#
# Process 0 of a run replaces alive.json in the run folder each second, also while it compiles. Here the file is frozen
# if it is as it was at the call before. Only a change counts, as the clocks of two machines may differ; and before the
# first change nothing is wrong: a file that an earlier process left lies there while the run is opened.
set -uo pipefail

seen=${SEEN:-/tmp/alive} # a line for each file that was seen
now=$(stat --format="%i %y" "$1/alive.json" 2> /dev/null) || exit 0 # the run is being opened, or has ended
if [[ $now != "$(tail -n 1 "$seen" 2> /dev/null)" ]]; then
  echo "$now" >> "$seen"
elif (($(wc -l < "$seen") > 1)); then
  echo "$1/alive.json has not changed since the last look" >&2
  exit 1
fi
