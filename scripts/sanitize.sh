#!/usr/bin/env bash
# The tests of the unsafe code under a sanitizer of the compiler: address (default) or thread. Needs a nightly compiler with
# rust-src.
#
#   scripts/sanitize.sh [address|thread]
set -euo pipefail
cd "$(dirname "$0")/.."

kind=${1:-address}
host=$(rustc -vV | sed -n 's/^host: //p')
export RUSTFLAGS="-Zsanitizer=$kind" CARGO_TARGET_DIR=${CARGO_TARGET_DIR:-target}/sanitize-$kind
# Threads of a pool are never joined.
export ASAN_OPTIONS=detect_leaks=0 TSAN_OPTIONS=halt_on_error=1 PROPTEST_CASES=16
step() { printf '\n== %s\n' "$*"; "$@"; }

# The standard library is built with it too: without that, what it does between threads looks like a race.
step cargo +nightly test -Zbuild-std --target "$host" -p waste-common --no-default-features --lib -- io::
step cargo +nightly test -Zbuild-std --target "$host" -p waste-engine --lib -- kernels experts
step cargo +nightly test -Zbuild-std --target "$host" -p waste-engine --test embedding --test expert_store --test kernels
step cargo +nightly test -Zbuild-std --target "$host" -p waste-capi --lib --test calls
