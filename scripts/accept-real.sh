#!/usr/bin/env bash
# For the first owner of real weights: looks at a checkpoint, converts one layer of it as a probe, says how long the
# whole takes and how much disk, and, if there is a container already, checks and runs it. Prints one JSON report.
# Usage: scripts/accept-real.sh CHECKPOINT DIR [CONTAINER]
#   DIR takes the probe's layer (K3: 11 GiB) and the reports. EFFORT=fast|normal|max, TEXT=FILE for the perplexity.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)

[ $# -ge 2 ] || { sed -n '2,5p' "$0" >&2; exit 2; }
checkpoint=$1 dir=$2 container=${3:-}
effort=${EFFORT:-normal}
text=${TEXT:-$root/tests/models/k3-tales/eval.txt}
mkdir -p "$dir"
command -v waste-convert >/dev/null || export PATH="$root/target/release:$PATH"
report=$dir/report.json
parts=()

# Runs a tool whose JSON becomes a key of the report; a failure is reported too, and ends the rest.
step() {
  local key=$1
  shift
  printf '%s: %s\n' "$key" "$*" >&2
  local exit=0
  "$@" --json >"$dir/$key.json" 2>"$dir/$key.log" || exit=$?
  [ -s "$dir/$key.json" ] || echo null >"$dir/$key.json"
  parts+=("\"$key\":{\"exit\":$exit,\"result\":$(cat "$dir/$key.json")}")
  if [ "$exit" != 0 ]; then
    tail -n 3 "$dir/$key.log" >&2
    finish
    exit "$exit"
  fi
}

finish() {
  local IFS=,
  printf '{"schema":"waste-accept/1","date":"%s","system":"%s",%s}\n' \
    "$(date -u +%FT%TZ)" "$(uname -srm)" "${parts[*]}" | tee "$report"
}

# Opens every shard and checks names, types and shapes of all tensors; encodes one expert.
step dry_run waste-convert "$checkpoint" "$dir/probe.waste" --effort "$effort" --dry-run
first=$(waste-convert "$checkpoint" "$dir/probe.waste" --effort "$effort" --status --json |
  sed -n 's/.*"owed_layers":\[\([0-9]*\).*/\1/p')
if [ -n "$first" ]; then
  # Its report says the error against the source.
  step probe_layer waste-convert "$checkpoint" "$dir/probe.waste" --effort "$effort" --layers "$first"
fi
step plan_source waste-plan "$checkpoint"
if [ -n "$container" ]; then
  step verify waste-verify "$container"
  step plan waste-plan "$container"
  step run waste-run "$container" "Once upon a time" -n 16
  head -c 4000 "$text" >"$dir/text.txt"
  step perplexity waste-run perplexity "$container" --file "$dir/text.txt" --run 255 --bos
fi
finish
