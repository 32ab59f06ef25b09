#!/usr/bin/env bash
# Installs the tools, their manual pages and shell completions. Again for an update; --remove takes all of it away.
#
#   scripts/install.sh                       builds, and installs into ~/.local
#   scripts/install.sh --prefix /usr/local
#   scripts/install.sh --from DIR            installs tools that are built already
#   scripts/install.sh --remove
set -euo pipefail
cd "$(dirname "$0")/.."

usage() { sed -n '2,7s/^# \{0,1\}//p' "$0" >&2; exit 2; }

prefix=$HOME/.local from= remove=
while [ $# -gt 0 ]; do
  case $1 in
    --prefix) prefix=${2:?}; shift 2 ;;
    --from) from=${2:?}; shift 2 ;;
    --remove) remove=1; shift ;;
    *) usage ;;
  esac
done

tools=(waste-download waste-convert waste-verify waste-plan waste-run waste-bench waste-serve)
man=$prefix/share/man/man1
bash=$prefix/share/bash-completion/completions zsh=$prefix/share/zsh/site-functions
fish=$prefix/share/fish/vendor_completions.d

if [ -n "$remove" ]; then
  for tool in "${tools[@]}"; do
    rm -f "$prefix/bin/$tool" "$man/$tool.1" "$man/$tool"-*.1 "$bash/$tool" "$zsh/_$tool" "$fish/$tool.fish"
  done
  exit
fi

if [ -z "$from" ]; then
  cargo build --release --bins
  from=${CARGO_TARGET_DIR:-target}/release
fi
mkdir -p "$prefix/bin" "$man" "$bash" "$zsh" "$fish"
for tool in "${tools[@]}"; do
  # A tool that runs now goes on with the old file.
  install -m 755 "$from/$tool" "$prefix/bin/.$tool.new"
  mv "$prefix/bin/.$tool.new" "$prefix/bin/$tool"
  run=$prefix/bin/$tool
  "$run" man >"$man/$tool.1"
  # The pages of its subcommands, as the usage of `man` lists them.
  subcommands=$({ "$run" man '?' 2>&1 || true; } | sed -n "s/.*man \[\([a-z|-]*\)\].*/\1/p" | tr '|' ' ')
  for sub in $subcommands; do
    "$run" man "$sub" >"$man/$tool-$sub.1"
  done
  "$run" completions bash >"$bash/$tool"
  "$run" completions zsh >"$zsh/_$tool"
  "$run" completions fish >"$fish/$tool.fish"
done
echo "installed into $prefix/bin" >&2
case ":$PATH:" in
  *":$prefix/bin:"*) ;;
  *) echo "it is not in PATH: export PATH=\"$prefix/bin:\$PATH\"" >&2 ;;
esac
