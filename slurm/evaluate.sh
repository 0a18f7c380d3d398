#!/usr/bin/env bash
# Scores a checkpoint on the held-out problems of its run, under the config that it was trained
# with.
# In the repository's folder:
#
#   sbatch --gpus-per-node=1 slurm/evaluate.sh runs/math_maxent/step_000100 --seeds=3
#
# --key=value changes that config. To start such a job after every save, train with
#
#   --eval_command="sbatch --gpus-per-node=1 slurm/evaluate.sh {checkpoint}"
#
# The checkpoint must still be there when the job starts: save_total_limit=0, or keep_every.
#
# Writes runs/math_maxent/evaluations/job_step_000100.json (the summary) and .jsonl (a line per
# problem). Without job_ the name would be that of the training's own evaluation of that step.
# Runs one process per GPU of the node, or one without GPUs. A "shallow" checkpoint is made into a
# model first, in a temporary folder. Rewards of your own ("module:function") and options of vLLM
# that may import code are used only if you name them (--reward_funcs=..., --vllm_options=...) or
# trust the config that names them (--trust_checkpoint=True).

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
[[ -f slurm/common.sh ]] || cd "${SLURM_SUBMIT_DIR:-.}"      # with --chdir we are there already
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

# the config without what must not be taken over: the training's servers, and code that a stranger
# may have named
python - "$checkpoint" "$temporary/config.json" "${@:2}" << 'END'
import json, sys
from pathlib import Path
from checkpoint import settings_of
from checks import ENTRIES
from common import script
source, target, *flags = sys.argv[1:]
config = script(settings_of, Path(source))
if config["rollout_engine"] == "server":
    config |= {"rollout_engine": "vllm", "rollout_ahead": 0}
config["rollout_server"] = ""
config["eval_command"] = ""
harmless = {*ENTRIES["vllm_options"], "enforce_eager", "max_num_seqs", "block_size"}
code = {
    # "auto": rewards that its rows' tasks name
    "reward_funcs": [name for name in config["reward_funcs"] if ":" in name or name == "auto"],
    "vllm_options": [name for name in config["vllm_options"] if name not in harmless],
}
trusted = {"--trust_checkpoint", "--trust_checkpoint=true"} & {flag.lower() for flag in flags}
for key, named in code.items():
    # a flag replaces the checkpoint's
    if named and not trusted and not any(flag.startswith(f"--{key}=") for flag in flags):
        sys.exit(f"error: {source} asks for {key}={config[key]!r}, and {named[0]!r} may import "
                 f"code: if you trust it add --trust_checkpoint=True")
json.dump(config, open(target, "w"))
END
flags=()
for argument in "${@:2}"; do
  [[ $argument == --trust_checkpoint || $argument == --trust_checkpoint=* ]] || flags+=("$argument")
done

model=$checkpoint
if ! compgen -G "$checkpoint/model*.safetensors" > /dev/null; then
  model=$temporary/model
  python checkpoint.py export "$checkpoint" "$model"
fi
gpus=$(gpus_here | wc -l)
out=$(dirname "$checkpoint")/evaluations/job_$(basename "$checkpoint")
mkdir -p "$(dirname "$out")"
# left by a job that has died, or a stranger's links, through which we must not write
rm -f "$out.said" "$out.tmp" "$out.jsonl.tmp"
say "evaluating $checkpoint"
python -m torch.distributed.run --standalone --nproc_per_node=$((gpus > 1 ? gpus : 1)) \
  evaluate.py "$temporary/config.json" --model="$model" --output="$out.jsonl" "${flags[@]}" \
  | tee "$out.said"
grep '^{"model"' "$out.said" > "$out.tmp"
mv "$out.tmp" "$out.json" # whole or not there, because others wait for it
rm "$out.said"
say "$out.json"
