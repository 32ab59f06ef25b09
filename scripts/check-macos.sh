#!/usr/bin/env bash
# Type-checks the workspace for macOS on Apple silicon (no linking, nothing is run).
# Usage, from the project's root:  scripts/check-macos.sh [cargo check arguments…]
# The standard library is built from Debian's rust-web-src with Debian's rustc. C parts of dependencies are not compiled: a stand-in
# compiler writes empty objects, which is enough for `check`.
set -euo pipefail
need=(rustc-web rust-web-src)
dpkg -s "${need[@]}" >/dev/null 2>&1 || { apt-get update -qq; apt-get install -y -qq --no-install-recommends "${need[@]}"; }
T=aarch64-apple-darwin D=${CARGO_TARGET_DIR:-target}/macos
mkdir -p "$D/shim"
cat >"$D/shim/cc" <<'C'
#!/bin/sh
# writes the file named after -o (or the archive that ar names) and succeeds
prev=; for a in "$@"; do [ "$prev" = -o ] && : >"$a"; case "$a" in *.a) : >"$a";; esac; prev=$a; done
exit 0
C
chmod +x "$D/shim/cc"
export RUSTC=/usr/bin/rustc RUSTC_BOOTSTRAP=1 SDKROOT=/
export CC_aarch64_apple_darwin="$(realpath "$D/shim/cc")" AR_aarch64_apple_darwin="$(realpath "$D/shim/cc")" CXX_aarch64_apple_darwin="$(realpath "$D/shim/cc")"
exec cargo check -Zbuild-std=std,panic_unwind,test --target $T --target-dir "$D" --all-targets "$@"
