#!/usr/bin/env bash
# Runs the same training with several seeds, one job each, as an array. In the repository's folder:
#
#   sbatch --array=0-4 --gpus-per-node=8 slurm/seeds.sh config/math_maxent.py --key=value
#
# Task N runs slurm/train.sh (its --help has the rest) with --seed=N, and adds _seed_N to output_dir,
# after a --suffix=... of yours.
# At most two at a time: --array=0-4%2.

#SBATCH --job-name=maxent-grpo
#SBATCH --signal=B:USR1@120
#SBATCH --requeue
#SBATCH --open-mode=append

set -euo pipefail

for argument in "$@"; do
  if [[ $argument == -h || $argument == --help ]]; then
    sed -n '2,/^$/s/^# \{0,1\}//p' "$0"
    exit 0
  fi
done
[[ ${SLURM_ARRAY_TASK_ID:-} ]] || {
  echo "error: this is for an array of jobs:" \
    "sbatch --array=0-4 slurm/seeds.sh ...; --help says more" >&2
  exit 1
}
[[ -f slurm/train.sh ]] || cd "$SLURM_SUBMIT_DIR"      # with --chdir we are there already
# exec: Slurm signals this very process
exec bash slurm/train.sh "$@" --seed="$SLURM_ARRAY_TASK_ID" --suffix="_seed_$SLURM_ARRAY_TASK_ID"
