#!/usr/bin/env bash
# Scores a checkpoint on the held-out problems of its run, under the config that it was trained
# with.
# In the repository's folder:
#
#   sbatch --gpus-per-node=1 slurm/evaluate.sh runs/math_maxent/step_000100 --seeds=3
#
# --key=value changes that config. To have it done after every save, train with
#
#   --eval_command="sbatch --gpus-per-node=1 slurm/evaluate.sh {checkpoint}"
#
# The checkpoint must still be there when the job starts: save_total_limit=0, or keep_every.
#
# Leaves runs/math_maxent/evaluations/step_000100.json (the summary) and .jsonl (a line per
# problem).
# One process per GPU of the node, or one without GPUs. A "shallow" checkpoint is made into a model
# first, in a temporary folder. Rewards of your own ("module:function") are imported when you name
# them, --reward_funcs=..., or say that you trust the config that does, --trust_checkpoint=True.

#SBATCH --job-name=evaluate
#SBATCH --nodes=1
#SBATCH --open-mode=append

set -euo pipefail

for argument in "$@"; do
  if [[ $argument == -h || $argument == --help ]]; then
    sed -n '2,/^$/s/^# \{0,1\}//p' "$0"
    exit 0
  fi
done
cd "${SLURM_SUBMIT_DIR:-.}"
[[ -f slurm/common.sh ]] || {
  echo "error: $PWD is not the repository: type sbatch in its folder, or give it --chdir" >&2
  exit 1
}
source slurm/common.sh

checkpoint=${1:-}
checkpoint=${checkpoint%/}
[[ -f $checkpoint/train_config.json ]] ||
  die "'$checkpoint' is no checkpoint, or no longer there: sbatch slurm/evaluate.sh RUN/step_N"

temporary=$(mktemp -d)
trap 'rm -rf "$temporary"' EXIT

# the config without what is not ours: a server of the training to ask, and the code of a stranger's
# rewards to run
python - "$checkpoint/train_config.json" "$temporary/config.json" "${@:2}" << 'END'
import json, sys
source, target, *flags = sys.argv[1:]
config = json.load(open(source))
if config["rollout_engine"] == "server":
    config |= {"rollout_engine": "vllm", "rollout_ahead": 0}
config["rollout_server"] = ""
config["eval_command"] = ""
consent = False
for flag in flags:
    if flag.lower() == "--trust_checkpoint=true" or flag.startswith("--reward_funcs="):
        consent = True
# "auto": those that its rows' tasks name
code = [name for name in config["reward_funcs"] if ":" in name or name == "auto"]
if code and not consent:
    sys.exit(f"error: {source} asks for reward_funcs={config['reward_funcs']!r}, and "
             f"{code[0]!r} can name code that would be imported: if you trust it add "
             f"--trust_checkpoint=True")
json.dump(config, open(target, "w"))
END
flags=()
for argument in "${@:2}"; do
  [[ $argument == --trust_checkpoint=* ]] || flags+=("$argument")
done

model=$checkpoint
if ! compgen -G "$checkpoint/model*.safetensors" > /dev/null; then
  model=$temporary/model
  python checkpoint.py export "$checkpoint" "$model"
fi
gpus=$(gpus_here | wc -l)
out=$(dirname "$checkpoint")/evaluations/$(basename "$checkpoint")
mkdir -p "$(dirname "$out")"
say "evaluating $checkpoint"
python -m torch.distributed.run --standalone --nproc_per_node=$((gpus > 1 ? gpus : 1)) \
  evaluate.py "$temporary/config.json" --model="$model" --output="$out.jsonl" "${flags[@]}" \
  | tee "$out.said"
grep '^{"model"' "$out.said" > "$out.tmp"
mv "$out.tmp" "$out.json" # whole or not there: others wait for it
rm "$out.said"
say "$out.json"
