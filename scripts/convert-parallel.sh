#!/usr/bin/env bash
# Spreads the layers of one conversion over several processes or machines, then finishes the container. Checkpoint and
# container must be at the same path everywhere (a network file system). Run it again after any interruption.
# Usage: scripts/convert-parallel.sh CHECKPOINT CONTAINER [--hosts a,b,c] [--layers FIRST-LAST] [-- CONVERT-OPTIONS…]
#   Without --hosts layers are converted here, JOBS (2) at a time. With GNU parallel each host takes one layer at a time
#   over ssh; without it xargs does the same, here only. waste-convert must be on the PATH.
set -euo pipefail

usage() { sed -n '2,6p' "$0" >&2; exit 2; }
[ $# -ge 2 ] || usage
checkpoint=$1 container=$2 hosts='' range=''
shift 2
while [ $# -gt 0 ]; do
  case $1 in
    --hosts) hosts=${2:?--hosts needs names}; shift 2 ;;
    --layers) range=${2:?--layers needs FIRST-LAST}; shift 2 ;;
    --) shift; break ;;
    *) usage ;;
  esac
done
options=("$@")

# The layers that are owed, one a line; --status fails if the options are others than those it was begun with.
owed() {
  waste-convert "$checkpoint" "$container" "${options[@]}" --status --json |
    sed -n 's/.*"owed_layers":\[\([0-9,]*\)\].*/\1/p' | tr ',' '\n' | sed '/^$/d'
}

layers=$(owed)
if [ -n "$range" ]; then
  layers=$(awk -v first="${range%-*}" -v last="${range#*-}" '$1 >= first && $1 <= last' <<<"$layers")
fi
convert=(waste-convert "$checkpoint" "$container" "${options[@]}" --jobs 1 -q --layers)
if [ -n "$layers" ]; then
  # The first one begins the conversion, so that the others find it begun.
  "${convert[@]}" "$(head -n 1 <<<"$layers")" >&2
  rest=$(tail -n +2 <<<"$layers")
  if [ -z "$rest" ]; then
    :
  elif command -v parallel >/dev/null && parallel --version 2>/dev/null | grep -q GNU; then
    parallel ${hosts:+--sshlogin "$hosts"} --jobs "${JOBS:-2}" --halt soon,fail=1 "${convert[@]@Q}" {} <<<"$rest" >&2
  elif [ -n "$hosts" ]; then
    echo "convert-parallel.sh: --hosts needs GNU parallel" >&2
    exit 2
  else
    xargs -P "${JOBS:-2}" -n 1 "${convert[@]}" <<<"$rest" >&2
  fi
fi
[ -n "$range" ] || waste-convert "$checkpoint" "$container" "${options[@]}" --finish
