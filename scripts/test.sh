#!/usr/bin/env bash
# All checks of the project: format, lints, tests, and the demo. Needs Rust with rustfmt and clippy, and a C compiler
# for linking; uses cargo-nextest where it is there. About ten minutes on two cores, from nothing.
# WASTE_TEST_CONTAINER=DIR adds checks of a real container (tests/tests/real_container.rs); they need the RAM it needs, and
# their figures are printed.
set -euo pipefail
cd "$(dirname "$0")/.."

step() { printf '\n== %s\n' "$*"; "$@"; }

for component in rustfmt clippy; do
  cargo "${component/rustfmt/fmt}" --version >/dev/null 2>&1 || rustup component add "$component"
done
step cargo fmt --all --check
step cargo clippy --workspace --all-targets --quiet -- -D warnings
step cargo build --workspace --bins --quiet
# The tests of all kinds take the small model for the checks of a container.
container=${WASTE_TEST_CONTAINER:-}
unset WASTE_TEST_CONTAINER
# The demo with what is built already: a release build would take as long as all tests.
step ./scripts/demo.sh --quiet --profile dev
if cargo nextest --version >/dev/null 2>&1; then
  step cargo test --workspace --doc --quiet
  step cargo nextest run --workspace --no-fail-fast --status-level slow --final-status-level slow
else
  step cargo test --workspace --no-fail-fast
fi
if [ -n "$container" ]; then
  # One at a time: each of them takes the model's whole budget.
  WASTE_TEST_CONTAINER=$container step cargo test -p waste-tests --test real_container -- --test-threads 1 --nocapture
fi
