#!/usr/bin/env bash
# Builds static Linux binaries (musl) and packs them, with licence, README and documents, as
# target/release-VERSION/waste-VERSION-ARCH-linux.tar.gz, with its checksum beside it. The same source gives the same archive.
#
#   scripts/release.sh                               for this machine's CPU
#   scripts/release.sh aarch64-unknown-linux-musl    for another one; needs its linker
#
# Needs rustup and musl-gcc (package musl-tools): the TLS library has C and assembly.
set -euo pipefail
cd "$(dirname "$0")/.."

case ${1:-} in -*) sed -n '2,8s/^# \{0,1\}//p' "$0" >&2; exit 2 ;; esac
target=${1:-$(uname -m)-unknown-linux-musl}
arch=${target%%-*}
version=$(sed -n '/^\[workspace.package\]/,/^version/s/^version = "\(.*\)"/\1/p' Cargo.toml)
rustup target add "$target"
# A path of the builder's has no place in a binary.
export RUSTFLAGS="${RUSTFLAGS:-} --remap-path-prefix=$PWD=waste --remap-path-prefix=${CARGO_HOME:-$HOME/.cargo}=cargo"
cargo build --release --locked --bins --target "$target"

out=${CARGO_TARGET_DIR:-target}/release-$version
name=waste-$version-$arch-linux
rm -rf "${out:?}/$name"
mkdir -p "$out/$name/bin"
for tool in download convert verify plan run bench serve; do
  install -m 755 "${CARGO_TARGET_DIR:-target}/$target/release/waste-$tool" "$out/$name/bin/"
  # Nothing of this system is linked.
  if ldd "$out/$name/bin/waste-$tool" 2>/dev/null | grep -q '=>'; then
    echo "waste-$tool is not static" >&2
    exit 1
  fi
done
cp -r LICENSE README.md CHANGELOG.md docs "$out/$name/"
mkdir "$out/$name/scripts"
install -m 755 scripts/install.sh "$out/$name/scripts/" # scripts/install.sh --from bin
tar -C "$out" --sort=name --owner=0 --group=0 --numeric-owner --mtime="@$(git log -1 --format=%ct)" \
  -cf - "$name" | gzip -n >"$out/$name.tar.gz"
(cd "$out" && sha256sum "$name.tar.gz" | tee "$name.tar.gz.sha256")
