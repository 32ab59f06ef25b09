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

# For races the standard library is built with it too: without that, what it does between threads looks like one.
std=()
[ "$kind" != thread ] || std=(-Zbuild-std)
check() { step cargo +nightly test "${std[@]}" --target "$host" "$@"; }

# What a test counts as resident has the sanitizer's own memory in it.
check -p waste-common --no-default-features --lib -- io:: --skip resident
# Without grammar and vision, which have no unsafe code of ours.
check -p waste-engine --no-default-features --lib -- kernels experts
check -p waste-engine --no-default-features --test embedding --test expert_store --test kernels
check -p waste-capi --lib --test calls
