#!/usr/bin/env bash
# Provisions a machine with a model, as a worked example: plan, download, convert, verify, install. Run again after any
# interruption, it goes on where it stopped; once the container is there it only looks whether it still is.
#
#   scripts/provision.sh moonshotai/Kimi-K3 /models/k3.waste --ram 64GiB --work /scratch/k3
#   scripts/provision.sh moonshotai/Kimi-K3 /models/k3.waste --ram 64GiB --work /scratch/k3 -- --limit-rate 50M
#
# What follows `--` goes to waste-download. HF_TOKEN, HF_ENDPOINT and the proxies are taken from the environment.
# The exit codes are those of the tools: 1 not sound, 4 too little RAM or disk, 5 network, 6 in use.
set -euo pipefail

usage() { sed -n '2,8s/^# \{0,1\}//p' "$0" >&2; exit 2; }
say() { printf '== %s\n' "$*" >&2; }

[ $# -ge 2 ] || usage
repo=$1 container=${2%/}; shift 2
ram= work=$container.work ctx=4096
while [ $# -gt 0 ]; do
  case $1 in
    --ram) ram=${2:?}; shift 2 ;;
    --work) work=${2:?}; shift 2 ;;
    --ctx) ctx=${2:?}; shift 2 ;;
    --) shift; break ;;
    *) usage ;;
  esac
done
# The RAM of the machine the model is for, which need not be this one.
[ -n "$ram" ] || usage

if [ -e "$container/manifest.json" ]; then
  say "$container is there; looking at its structure"
  exec waste-verify "$container" --quick --json
fi

checkpoint=$work/checkpoint converted=$container.new plan=$container.plan.json
mkdir -p "$work" "$(dirname "$container")"

say "plan: the configuration first, a few megabytes"
waste-download "$repo" --dest "$checkpoint" --exclude '*.safetensors' --exclude '*.bin' "$@" >/dev/null
# Exit 4 if it does not fit, 1 if the machine would page: before anything large is fetched.
waste-plan "$checkpoint/config.json" --ram "$ram" --ctx "$ctx" --json > "$plan.tmp" || {
  code=$?; rm -f "$plan.tmp"
  case $code in 1 | 4) say "it does not fit into $ram: nothing large was downloaded" ;; esac
  exit $code
}

say "download, convert, verify"
waste-download "$repo" --dest "$checkpoint" "$@" --json \
  | waste-convert - "$converted" --json \
  | waste-verify - --from-disk --sums --json > "$work/verify.json" || {
  code=$?; say "not installed; run the same command again to go on"; exit $code
}

say "install"
mv "$plan.tmp" "$plan"
mv "$converted" "$container"
say "done: waste-run $container \"hello\" (the plan is in $plan); $work is not needed any more"
cat "$work/verify.json"
