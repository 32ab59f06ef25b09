#!/usr/bin/env bash
# Writes for HOURS (1) with a cache that is as small as it may be, and asks the server all the while. Says at the end how many
# tokens there were, and fails if a text differs from the first one, or if memory grows.
#
#   scripts/soak.sh [HOURS [CONTAINER]]
set -euo pipefail
cd "$(dirname "$0")/.."

hours=${1:-1}
container=${2:-}
profile=${PROFILE:-release}
case $profile in release) cargo build --release --bins --quiet ;; *) cargo build --bins --quiet ;; esac
export PATH="${CARGO_TARGET_DIR:-$PWD/target}/${profile/dev/debug}:$PATH"
work=$(mktemp -d)
server=
trap '[ -z "$server" ] || kill "$server" 2>/dev/null || true; rm -rf "$work"' EXIT
if [ -z "$container" ]; then
  container=$work/k3.waste
  waste-convert tests/models/k3-tales "$container" --effort fast -q
fi
number() { sed -n "s/.*\"$1\":\([0-9]*\).*/\1/p"; }
floor=$(waste-plan "$container" --ctx 1024 --json | number floor_bytes)

waste-serve "$container" --port 0 --model-id soak --ctx 1024 --json >"$work/serve.json" 2>"$work/serve.log" &
server=$!
until grep -q "ready.*}$" "$work/serve.json"; do
  kill -0 "$server" 2>/dev/null || { cat "$work/serve.log" >&2; exit 70; }
  sleep 0.2
done
address=$(sed -n 's/.*"addr":"\([^"]*\)".*/\1/p' "$work/serve.json")
resident() { awk '/VmRSS/ {print $2}' "/proc/$server/status"; }
ask() {
  curl -sS --max-time 600 "$address/v1/completions" -H 'content-type: application/json' \
    -d "{\"model\":\"soak\",\"prompt\":\"The king $1\",\"max_tokens\":$2,\"temperature\":0}"
}

end=$(($(date +%s) + $(awk "BEGIN {print int($hours * 3600)}")))
rounds=0 tokens=0 first= settled=
while [ "$(date +%s)" -lt "$end" ]; do
  # The same text from a process of its own each time, with a file as its state in between.
  rm -f "$work/session"
  one=$(waste-run "$container" "Once upon a time" -n 60 --ctx 1024 --budget "$floor" --session "$work/session" -q)
  two=$(waste-run "$container" -n 60 --ctx 1024 --budget "$floor" --session "$work/session" -q)
  answer=$(ask "was" 80 | sed -n 's/.*"text":"\([^"]*\)".*/\1/p')
  said=$one$two$answer
  [ -n "$answer" ] || { echo "the server does not answer" >&2; exit 1; }
  : "${first:=$said}"
  [ "$said" = "$first" ] || { printf 'round %s differs:\n%s\n%s\n' "$rounds" "$first" "$said" >&2; exit 1; }
  # Clients that leave, and prompts that are too long.
  ask "and his $rounds" 500 >/dev/null & client=$!
  sleep 0.3
  kill "$client" 2>/dev/null || true
  ask "$(printf 'very %.0s' {1..2000})" 5 | grep -q error || { echo "too long a prompt was taken" >&2; exit 1; }
  rounds=$((rounds + 1)) tokens=$((tokens + 200))
  if [ "$rounds" = 5 ]; then settled=$(resident); fi
done
now=$(resident)
printf '%s rounds, %s tokens, all the same; the server has %s KiB, had %s after five rounds\n' \
  "$rounds" "$tokens" "$now" "${settled:-$now}"
# A tenth and 8 MiB are what caches of whole conversations may still take.
[ "$now" -le $((${settled:-$now} * 11 / 10 + 8192)) ] || { echo "memory grows" >&2; exit 1; }
