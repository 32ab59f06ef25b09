#!/usr/bin/env bash
# Converts on a Slurm cluster: an array job with a task for each layer, and a last job that finishes the container when
# all have succeeded. Checkpoint and container must be on a file system that all nodes share. Submit it again after a
# failure: finished layers are skipped.
# Usage: scripts/convert-slurm.sh CHECKPOINT CONTAINER [-- CONVERT-OPTIONS…]
#   SBATCH="--partition=p --cpus-per-task=16 --mem=4G --time=2:00:00" are the options of the array's tasks, CONCURRENT
#   (16) is how many run at once. waste-convert must be on the PATH of the nodes.
set -euo pipefail

[ $# -ge 2 ] || { sed -n '2,7p' "$0" >&2; exit 2; }
checkpoint=$1 container=$2
shift 2
[ "${1:-}" = -- ] && shift
command=(waste-convert "$checkpoint" "$container" "$@")

layers=$("${command[@]}" --status --json | sed -n 's/.*"owed_layers":\[\([0-9,]*\)\].*/\1/p')
read -r -a sbatch <<<"${SBATCH:-}"
after=()
if [ -n "$layers" ]; then
  task="exec ${command[*]@Q} --jobs 1 --threads \${SLURM_CPUS_PER_TASK:-1} --layers \$SLURM_ARRAY_TASK_ID"
  job=$(sbatch --parsable "${sbatch[@]}" --job-name=waste-layers --array="$layers%${CONCURRENT:-16}" --wrap "$task")
  after=(--dependency="afterok:${job%%;*}")
fi
sbatch "${sbatch[@]}" "${after[@]}" --job-name=waste-finish --wrap "exec ${command[*]@Q} --finish"
