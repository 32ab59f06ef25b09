#!/usr/bin/env bash
# Reproduces the figures: makes synthetic containers of Kimi-Linear-48B's shape and of a slice of Kimi K3, measures kernels
# and disk, then decoding and prefill with the cache too small for all experts and with all of them in it, against
# plain look-ups too, and prints the tables.
# Usage: scripts/bench.sh [--layers N] [--dir DIRECTORY] [--runs N] [--prompt-tokens N] [--tokens N]
#   --layers 27 is the whole model and takes 17.5 GiB of disk; 6 take 4.1 GiB, the slice of K3 5.8 GiB.
set -euo pipefail
cd "$(dirname "$0")/.."

layers=6 dir=target/bench runs=3 prompt=512 tokens=64
while [ $# -gt 0 ]; do
  [ $# -ge 2 ] || { sed -n '2,7p' "$0" >&2; exit 2; }
  case $1 in
    --layers) layers=$2 ;;
    --dir) dir=$2 ;;
    --runs) runs=$2 ;;
    --prompt-tokens) prompt=$2 ;;
    --tokens) tokens=$2 ;;
    *) sed -n '2,7p' "$0" >&2; exit 2 ;;
  esac
  shift 2
done

run() { printf '\n$ %s\n' "$*"; "$@"; }

command -v cargo >/dev/null || { echo "bench.sh needs Rust: see https://rustup.rs" >&2; exit 2; }
run cargo build --release --bins --quiet
bench=target/release/waste-bench
container=$dir/kimi-linear-48b-$layers.waste
mkdir -p "$dir"
[ -e "$container/manifest.json" ] || run $bench synth kimi-linear-48b "$container" --layers "$layers" -q

work=(--runs "$runs" --prompt-tokens "$prompt" --tokens "$tokens" -q)
# Where the disk cannot be measured (exit 1), the rest still can.
run $bench disk "$dir" -q || [ $? -eq 1 ]
run $bench kernels --only rows -q
run $bench cache --trace tests/traces/kimi-linear-48b-300tok.jsonl -q
run $bench "$container" --budget auto "${work[@]}"
run $bench "$container" --budget max --compare kernels=plain,best "${work[@]}"
run $bench "$container" --budget auto --compare lookahead=0,6 "${work[@]}"

slice=$dir/k3-5-of-93.waste
[ -e "$slice/manifest.json" ] || run $bench synth k3 "$slice" --layers 5 --experts 32 -q
run $bench "$slice" --budget max "${work[@]}"

printf '\nThe containers stay in %s.\n' "$dir"
