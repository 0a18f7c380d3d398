#!/usr/bin/env bash
# Scores a checkpoint on the held-out problems of its run, under the config that it was trained with. In the repository's folder:
#
#   sbatch --gpus-per-node=1 slurm/evaluate.sh runs/math_maxent/step_000100 --eval_seeds=3
#
# --key=value changes that config. To have it done after every save, train with --eval_command="sbatch --gpus-per-node=1 slurm/evaluate.sh {checkpoint}";
# the checkpoint must still be there when the job starts: save_total_limit=0, or keep_every.
#
# Leaves runs/math_maxent/evaluations/step_000100.json (the summary) and .jsonl (a line per problem). One process per GPU of the node, or one without
# GPUs. A "shallow" checkpoint is made into a model first, in a temporary folder, which needs --trust_checkpoint=True: that loads DeepSpeed's pickles.

#SBATCH --job-name=evaluate
#SBATCH --nodes=1
#SBATCH --open-mode=append

set -euo pipefail

for argument in "$@"; do
  if [[ $argument == -h || $argument == --help ]]; then sed -n '2,/^$/s/^# \{0,1\}//p' "$0"; exit 0; fi
done
cd "${SLURM_SUBMIT_DIR:-.}"
[[ -f slurm/common.sh ]] || { echo "error: $PWD is not the repository: type sbatch in its folder, or give it --chdir" >&2; exit 1; }
source slurm/common.sh

checkpoint=${1:-}
checkpoint=${checkpoint%/}
[[ -f $checkpoint/train_config.json ]] || die "'$checkpoint' is no checkpoint, or no longer there: sbatch slurm/evaluate.sh RUN/step_N"

model=$checkpoint
if ! compgen -G "$checkpoint/model*.safetensors" > /dev/null; then
  temporary=$(mktemp -d)
  trap 'rm -rf "$temporary"' EXIT
  model=$temporary/model
  trust=()
  for argument in "${@:2}"; do
    if [[ ${argument,,} == --trust_checkpoint=true ]]; then trust=("$argument"); fi
  done
  python checkpoint.py export "$checkpoint" "$model" ${trust[@]+"${trust[@]}"}
fi

# the config as --key=value, each ended by a zero byte; a server of the training is not ours to ask
mapfile -d '' -t flags < <(python - "$checkpoint/train_config.json" << 'END'
import json, sys
config = json.load(open(sys.argv[1]))
if config["rollout_engine"] == "server":
    config |= {"rollout_engine": "vllm", "rollout_ahead": 0}
for key, value in config.items():
    print(f"--{key}={value}", end="\0")
END
)
gpus=$(gpus_here | wc -l)
out=$(dirname "$checkpoint")/evaluations/$(basename "$checkpoint")
mkdir -p "$(dirname "$out")"
say "evaluating $checkpoint"
python -m torch.distributed.run --standalone --nproc_per_node=$((gpus > 1 ? gpus : 1)) evaluate.py "${flags[@]}" --model="$model" --eval_output="$out.jsonl" \
  "${@:2}" | tee "$out.tmp"
grep '^{"model"' "$out.tmp" > "$out.json"
rm "$out.tmp"
say "$out.json"
