#!/usr/bin/env bash
# Builds the workspace for 64-bit Arm Linux and runs its tests under emulation (static binaries, qemu user mode).
# Usage, from the project's root:  scripts/check-aarch64.sh [cargo test arguments…]
# Needs Debian's packages (installed here when missing); uses Debian's own rustc, which has the Arm standard library.
set -euo pipefail
if ! dpkg -s libstd-rust-web-dev:arm64 qemu-user-static gcc-aarch64-linux-gnu libc6-dev-arm64-cross >/dev/null 2>&1; then
  dpkg --add-architecture arm64
  apt-get update -qq
  apt-get install -y -qq --no-install-recommends rustc-web libstd-rust-web-dev:arm64 gcc-aarch64-linux-gnu libc6-dev-arm64-cross qemu-user-static
fi
export RUSTC=/usr/bin/rustc RUSTDOC=/usr/bin/rustdoc RUSTFLAGS="-C target-feature=+crt-static ${RUSTFLAGS:-}"
export CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_LINKER=aarch64-linux-gnu-gcc
export CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_RUNNER=qemu-aarch64-static   # dynamic binaries hang under it: keep crt-static
export CC_aarch64_unknown_linux_gnu=aarch64-linux-gnu-gcc
exec cargo test --target aarch64-unknown-linux-gnu --target-dir target/aarch64 "$@"
