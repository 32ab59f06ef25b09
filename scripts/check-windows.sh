#!/usr/bin/env bash
# Builds the workspace for 64-bit Windows (MinGW) and runs its tests under Wine.
# Usage, from the project's root:  scripts/check-windows.sh [cargo test arguments…]     (e.g. -p waste-common)
# Installs Debian's packages when missing. The standard library is built from Debian's rust-web-src with Debian's rustc.
set -euo pipefail
need=(rustc-web rust-web-src gcc-mingw-w64-x86-64 wine64)
dpkg -s "${need[@]}" >/dev/null 2>&1 || { apt-get update -qq; apt-get install -y -qq --no-install-recommends "${need[@]}"; }
T=x86_64-pc-windows-gnu D=${CARGO_TARGET_DIR:-target}/windows
export RUSTC=/usr/bin/rustc RUSTDOC=/usr/bin/rustdoc RUSTC_BOOTSTRAP=1
export CARGO_TARGET_X86_64_PC_WINDOWS_GNU_LINKER=x86_64-w64-mingw32-gcc CC_x86_64_pc_windows_gnu=x86_64-w64-mingw32-gcc
export WINEDEBUG=-all WINEPREFIX=${WINEPREFIX:-$HOME/.cache/waste-wine}
mkdir -p "$D/shim" "$WINEPREFIX"
# Wine 8 has no bcryptprimitives.dll, which Rust's std needs for its random numbers: a shim over RtlGenRandom, found through WINEPATH
cat >"$D/shim/bp.c" <<'C'
#include <windows.h>
BOOLEAN NTAPI SystemFunction036(PVOID, ULONG);
__declspec(dllexport) BOOL WINAPI ProcessPrng(PBYTE p, SIZE_T n) {
  while (n) { ULONG k = n > 0x10000000 ? 0x10000000 : (ULONG)n; if (!SystemFunction036(p, k)) return FALSE; p += k; n -= k; }
  return TRUE;
}
C
x86_64-w64-mingw32-gcc -shared -O1 -o "$D/shim/bcryptprimitives.dll" "$D/shim/bp.c" -ladvapi32
export WINEPATH="$(realpath "$D/shim")"
printf '#!/bin/sh\nexec /usr/lib/wine/wine64 "$@"\n' >"$D/shim/run"; chmod +x "$D/shim/run"
export CARGO_TARGET_X86_64_PC_WINDOWS_GNU_RUNNER="$(realpath "$D/shim/run")"
exec cargo test -Zbuild-std=std,panic_unwind,test --target $T --target-dir "$D" "$@"
