#!/usr/bin/env bash
# From a checkpoint to a story: builds the tools, converts the small K3 model that comes with the project, verifies
# the container, plans its memory and writes a story. Usage: scripts/demo.sh [--quiet] [--profile PROFILE] [OUTPUT-DIRECTORY]
set -euo pipefail
cd "$(dirname "$0")/.."

quiet= profile=release
[ "${1:-}" = --quiet ] && { quiet=-q; shift; }
[ "${1:-}" = --profile ] && { profile=$2; shift 2; }
out=${1:-target/demo}
model=tests/models/k3-tales
bin=target/${profile/#dev/debug}
container=$out/k3-tales.waste
prompt="Once upon a time"

run() { printf '\n$ %s\n' "$*"; "$@"; }

command -v cargo >/dev/null || { echo "demo.sh needs Rust: see https://rustup.rs" >&2; exit 2; }
run cargo build --profile $profile --bins ${quiet:+--quiet}
mkdir -p "$out"
run $bin/waste-convert $quiet --force "$model" "$container"
run $bin/waste-verify $quiet "$container"
run $bin/waste-plan $quiet "$container"
run $bin/waste-run $quiet "$container" "$prompt" -n 160

printf '\nThe container is in %s. Go on with your own prompt:\n  %s/waste-run %s "There was once a king" -n 200\n' \
  "$container" "$bin" "$container"
