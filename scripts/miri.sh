#!/usr/bin/env bash
# The unsafe code under Miri, as far as Miri knows what it calls: products by pointers, parts of a matrix, aligned buffers,
# views of bytes, the border to C. Needs a nightly compiler with miri and rust-src. SIMD kernels and system calls are beyond
# it; scripts/sanitize.sh looks at those.
set -euo pipefail
cd "$(dirname "$0")/.."

# No isolation: the tests read files. Proptest tries as few cases as make sense at a hundredth of the speed.
export MIRIFLAGS="-Zmiri-disable-isolation" PROPTEST_CASES=4 WASTE_KERNELS=portable
export CARGO_TARGET_DIR=${CARGO_TARGET_DIR:-target}/miri
step() { printf '\n== %s\n' "$*"; "$@"; }

step cargo +nightly miri test -p waste-common --no-default-features --lib -- io::arena io::buffer io::slab container::record
step cargo +nightly miri test -p waste-engine --no-default-features --lib -- kernels::columns kernels::gemm
step cargo +nightly miri test -p waste-capi --lib
