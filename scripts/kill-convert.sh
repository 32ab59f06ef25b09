#!/usr/bin/env bash
# Kills a conversion again and again at random moments, parent or worker, and compares what becomes of it with an
# uninterrupted one, byte by byte. Usage: scripts/kill-convert.sh [KILLS (200)] [CHECKPOINT]
set -euo pipefail
cd "$(dirname "$0")/.."

kills=${1:-200}
checkpoint=${2:-tests/models/k3-tales}
convert=${WASTE_CONVERT:-target/release/waste-convert}
[ -x "$convert" ] || cargo build --release --bin waste-convert
dir=$(mktemp -d)
# A worker whose parent was killed ends at its next step, and may write until then.
tidy() { for _ in 1 2 3 4 5; do rm -rf "$dir" 2>/dev/null && return; sleep 2; done; }
trap tidy EXIT
options=(--effort fast --cb-sample 2048 --jobs 2 -q)

same() {
  diff -rq --exclude=.waste.lock "$dir/whole" "$dir/pieces" || { echo "they differ after $1 kills" >&2; exit 1; }
}

"$convert" "$checkpoint" "$dir/whole" "${options[@]}" >/dev/null
start=$(date +%s%N)
"$convert" "$checkpoint" "$dir/pieces" "${options[@]}" >/dev/null
took=$((($(date +%s%N) - start) / 1000000))
same 0
rm -rf "$dir/pieces"
killed=0 rounds=0
while [ "$killed" -lt "$kills" ]; do
  "$convert" "$checkpoint" "$dir/pieces" "${options[@]}" >/dev/null 2>&1 &
  parent=$!
  sleep "$(awk -v ms=$((RANDOM % (took + 1))) 'BEGIN { printf "%.3f", ms / 1000 }')"
  victim=$parent
  # Every other time a worker, whose layer is then tried once more.
  if [ $((RANDOM % 2)) = 0 ]; then
    victim=$(pgrep -P "$parent" | head -n 1 || true)
  fi
  kill -KILL "${victim:-$parent}" 2>/dev/null && killed=$((killed + 1))
  if { wait "$parent"; } 2>/dev/null; then
    same "$killed"
    until rm -rf "$dir/pieces" 2>/dev/null; do sleep 1; done
    rounds=$((rounds + 1))
  fi
done
"$convert" "$checkpoint" "$dir/pieces" "${options[@]}" >/dev/null
same "$killed"
echo "$killed kills, $rounds conversions finished between them, all byte-identical"
