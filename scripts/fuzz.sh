#!/usr/bin/env bash
# Runs every fuzz target for SECONDS (60), or the ones that are named. Needs a nightly compiler and cargo-fuzz
# (`cargo install cargo-fuzz`). What was found stays in fuzz/artifacts, what was learned in fuzz/corpus.
#
#   scripts/fuzz.sh [SECONDS [TARGET …]]
set -euo pipefail
cd "$(dirname "$0")/.."

seconds=${1:-60}
shift || true
targets=("$@")
[ ${#targets[@]} -gt 0 ] || mapfile -t targets < <(ls fuzz/fuzz_targets | sed 's/\.rs$//')

# The project's own files are a better beginning than nothing.
seed() {
  mkdir -p "fuzz/corpus/$1"
  shift
  cp -n "$@" 2>/dev/null || true
}
seed manifest tests/interop/*/manifest.json tests/configs/*.json fuzz/corpus/manifest/
seed tokenizer README.md tests/tokenizer/specials.*.json fuzz/corpus/tokenizer/
seed image tests/golden/components/*.png fuzz/corpus/image/
# Two pixels of a Photoshop document, as they are and in runs.
header='8BPS\0\1\0\0\0\0\0\0\0\3\0\0\0\1\0\0\0\2\0\10\0\3\0\0\0\0\0\0\0\0\0\0\0\0\0'
printf "$header\\0abcdef" >fuzz/corpus/image/raw.psd
printf "$header\\1\\0\\3\\0\\2\\0\\2\\1ab\\377c\\377d" >fuzz/corpus/image/runs.psd
mkdir -p fuzz/corpus/http_body
printf '{"messages":[{"role":"user","content":"a"}],"max_tokens":3,"stream":true,"stop":["x"]}' >fuzz/corpus/http_body/chat
printf '{"messages":[{"role":"user","content":[{"type":"image_url","image_url":{"url":"data:image/png;base64,%s"}}]}]}' \
  "$(base64 <tests/golden/tiny-k3/image.png | tr -d '\n')" >fuzz/corpus/http_body/image
printf '{"prompt":"a","temperature":0.5,"logit_bias":{"3":1}}' >fuzz/corpus/http_body/completion

for target in "${targets[@]}"; do
  printf '\n== %s, %s s\n' "$target" "$seconds"
  cargo +nightly fuzz build "$target"
  # Manifests are text of some length; the others find their way from short ones.
  cargo +nightly fuzz run "$target" -- -max_total_time="$seconds" -timeout=20 -rss_limit_mb=2048 -max_len=65536 \
    -print_final_stats=1 2>&1 | grep -E 'DONE|ERROR|SUMMARY|panicked|stat::number_of_executed|stat::peak_rss|cov:' | tail -n 6
done
