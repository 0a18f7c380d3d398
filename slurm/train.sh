#!/usr/bin/env bash
# Trains with Slurm, on one node or many. In the repository's folder:
#
#   sbatch --gpus-per-node=8 --time=24:00:00 slurm/train.sh config/math_maxent.py --key=value
#
# One node where 4 GPUs sample and 4 train; four nodes where every GPU does both; four nodes where
# the last one samples:
#
#   sbatch --gpus-per-node=8 slurm/train.sh --server-gpus 4 config/math_maxent.py
#   sbatch --nodes=4 --gpus-per-node=8 slurm/train.sh config/math_maxent.py
#   sbatch --nodes=4 --gpus-per-node=8 slurm/train.sh --server-nodes 1 config/math_maxent.py \
#     --prompts_per_step=96
#
# Account, partition, GPUs and time are sbatch's flags and come before the script's name. After the
# name come, in any order, the arguments of train.py, and
#
#   --server-gpus K    on one node: vLLM serves on its first K GPUs, torchrun trains on the others;
#                      default 0: vLLM runs inside the training processes
#   --server-nodes K   a vLLM server on each of the last K nodes; torchrun trains on the others
#   --tp N, --dp N     tensor and data parallelism of a server, tp * dp = its GPUs;
#                      default: tp 1, dp the rest
#   --vllm-port P      port of the servers; default: a free one
#   --suffix=TEXT      added to output_dir
#   --help             these lines
#
# A node trains with one process per GPU; without GPUs, with --ntasks-per-node processes, or one.
# All nodes must be alike, and share the disk that holds the repository and output_dir. Python is
# the repository's .venv/bin/python, or if there is none, the python that is active. Hugging Face,
# pip and torch keep their caches in var/cache, unless HF_HOME and the like say otherwise or
# ~/.cache/huggingface has models already. If your site gives a job one CPU and little memory by
# default, add sbatch --cpus-per-gpu=8 --mem=0. Secrets (HF_TOKEN, WANDB_API_KEY) are taken from the
# environment, which sbatch passes on.
#
# slurm-JOB.out has what this script says; output_dir/logs/ has trainer_0.log (of the first trainer
# node), trainer_1.log, ..., and server_0.log, ...
#
# Two minutes before its time is over, the run saves and ends, and the job is queued again and
# resumes, as it does after a node has failed. If a step and a save take longer than that, add
# sbatch --signal=B:USR1@600. To end a job for good: touch output_dir/stop (the run saves first), or
# scancel (it saves if a step and a save fit into Slurm's KillWait, usually 30 s).

#SBATCH --job-name=maxent-grpo
#SBATCH --signal=B:USR1@120
#SBATCH --requeue
#SBATCH --open-mode=append

set -euo pipefail

# First of all, signals only leave a note for the loops below. USR1: time is nearly over. TERM:
# cancelled or preempted; then Slurm signals the ranks too
out_of_time=0 cancelled=0
trap 'out_of_time=1' USR1
trap 'cancelled=1' TERM

for argument in "$@"; do
  if [[ $argument == -h || $argument == --help ]]; then
    sed -n '2,/^$/s/^# \{0,1\}//p' "$0"
    exit 0
  fi
done
[[ ${SLURM_JOB_ID:-} ]] || {
  echo "error: this is for Slurm: sbatch slurm/train.sh ...; --help says more" >&2
  exit 1
}
# $0 is Slurm's copy, in another folder. With --chdir we are in the repository already
[[ -f slurm/common.sh ]] || cd "$SLURM_SUBMIT_DIR"
[[ -f slurm/common.sh ]] || {
  echo "error: $PWD is not the repository: type sbatch in its folder, or give it --chdir" >&2
  exit 1
}
source slurm/common.sh

# --- what is asked for

server_gpus=0 server_nodes=0 tp=1 dp=0 vllm_port=0 suffix='' dry=0 args=()
while (($#)); do
  case $1 in
    --server-gpus=* | --server-nodes=* | --tp=* | --dp=* | --vllm-port=*)
      set -- "${1%%=*}" "${1#*=}" "${@:2}" ;;      # as two words
    --server-gpus | --server-nodes | --tp | --dp | --vllm-port)
      [[ ${2:-} =~ ^[0-9]+$ ]] || die "$1 needs a number, not '${2:-}'"
      name=${1#--}
      declare "${name//-/_}=$2"
      shift 2 ;;
    --suffix=*) suffix+=${1#*=}; shift ;;      # the user's own, then that of seeds.sh
    --dry_run | --dry_run=[Tt]rue) dry=1 args+=("$1"); shift ;;
    *) args+=("$1"); shift ;;
  esac
done

# added here, because the config is checked with them. auto: ROLLOUT_SERVER, which is set once the
# servers run
if ((server_gpus || server_nodes)); then
  args+=(--rollout_engine=server --rollout_server=auto)
fi

# a wrong key or value ends the job here, with train.py's own sentence
asked=$(python -c 'from checks import FLAGS
from common import load_with_flags, script
def show(argv):
    _, config = load_with_flags(argv, FLAGS["train"])
    print(config["prompts_per_step"], config["output_dir"])
script(show)' "${args[@]}")
prompts=${asked%% *} run=${asked#* }
if [[ $suffix ]]; then run+=$suffix args+=("--output_dir=$run"); fi

# --- who runs where

commas() { local IFS=,; echo "$*"; }
mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
mapfile -t gpus < <(gpus_here)

# srun takes --gpus-per-task from sbatch, and we start one task on a node
per_task=${SLURM_GPUS_PER_TASK:-${#gpus[@]}}      # a number, or as in a100:8
[[ ${per_task##*:} == "${#gpus[@]}" ]] ||
  die "sbatch --gpus-per-task=$per_task: one task starts all ranks of a node, and would see" \
    "${per_task##*:} of its ${#gpus[@]} GPUs: give --gpus-per-node=${#gpus[@]} instead"
((server_gpus == 0 || server_nodes == 0)) ||
  die "--server-gpus is for one node, --server-nodes for several: choose one of them"
((server_gpus == 0 || ${#nodes[@]} == 1)) ||
  die "--server-gpus $server_gpus is for one node and the job has ${#nodes[@]}: use --server-nodes"
((server_gpus == 0 || server_gpus < ${#gpus[@]})) ||
  die "--server-gpus $server_gpus: the node has ${#gpus[@]} GPU(s), and one must be left to train"
((server_nodes < ${#nodes[@]})) ||
  die "--server-nodes $server_nodes: the job has ${#nodes[@]} node(s)," \
    "and one must be left to train"

trainers=("${nodes[@]:0:${#nodes[@]} - server_nodes}")
servers=("${nodes[@]:${#nodes[@]} - server_nodes}")
# whoever reaches vLLM can change its weights; on one node only processes there can reach it
trainer_env=() server_env=() host=0.0.0.0
ranks=${#gpus[@]} serving=${#gpus[@]}      # GPUs of a trainer node and of a server
if ((server_gpus)); then
  servers=("${nodes[0]}") ranks=$((ranks - server_gpus)) serving=$server_gpus host=127.0.0.1
  server_env+=("CUDA_VISIBLE_DEVICES=$(commas "${gpus[@]:0:server_gpus}")")
  trainer_env+=("CUDA_VISIBLE_DEVICES=$(commas "${gpus[@]:server_gpus}")")
fi
((ranks)) || ranks=${SLURM_NTASKS_PER_NODE:-1}
total=$((ranks * ${#trainers[@]}))
((prompts % total == 0)) ||
  die "--prompts_per_step=$prompts must be a multiple of the $total ranks that train"
((tp && dp)) || dp=$((serving > tp && tp ? serving / tp : 1))
((serving == 0 || tp * dp == serving)) || ((${#servers[@]} == 0)) ||
  die "a server has $serving GPU(s), but --tp $tp * --dp $dp = $((tp * dp))"
if ((dry)); then servers=(); fi      # nothing will be sampled

# this task only of an array: the plain job id of its last task stands for the whole array
job=${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_}${SLURM_ARRAY_TASK_ID:-$SLURM_JOB_ID}

# --- starting and ending processes

# LOG NODES COMMAND...: one process on each of NODES, with all its CPUs and GPUs, output in
# output_dir/logs/LOG.log. To be used as "on ... &": the shell becomes srun
on() {
  local n=${2//[^,]/}      # its commas
  n=$((${#n} + 1))
  # --wait: when one has ended, the others get two minutes to follow
  # %%: in --output % begins a pattern, such as the %n of trainer_%n
  exec srun --overlap --cpu-bind=none \
    --nodes="$n" --ntasks="$n" --ntasks-per-node=1 --nodelist="$2" \
    --wait=120 --kill-on-bad-exit=0 --open-mode=append \
    --output="${run//%/%%}/logs/$1.log" "${@:3}"
}

address() {      # NODE: its own name and a port that is free there
  srun --overlap --nodes=1 --ntasks=1 --nodelist="$1" python -c 'import socket
with socket.socket() as s: s.bind(("", 0)); print(socket.gethostname(), s.getsockname()[1])'
}

healthy() {      # URL: whether the server there answers
  python -c 'import sys, urllib.request
direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
direct.open(sys.argv[1] + "/health", timeout=5)' "$1" 2> /dev/null
}

# a half-written checkpoint has another name; -H: the run's folder may be a link
newest_checkpoint() { find -H "$run" -maxdepth 1 -regex '.*/step_[0-9]+' | sort | tail -n 1; }

pids=()      # of every srun

leave() {      # ends what still runs, above all servers; called however the script ends
  trap '' USR1 TERM
  ((${#pids[@]})) && kill -0 "${pids[@]}" 2> /dev/null || return 0
  scancel --signal=TERM "$job" || true      # every srun's processes, not this script
  for _ in {1..60}; do kill -0 "${pids[@]}" 2> /dev/null || return 0; sleep 0.5; done
  kill "${pids[@]}" 2> /dev/null || true      # srun then has them killed
}
trap leave EXIT

# --- the run

mkdir -p "$run/logs"
before=$(newest_checkpoint)
more=()
find "$run/logs/" -maxdepth 1 -type l -delete      # maybe a stranger's: we write through no link
own() {      # whether the last launch in the run's folder was this job's
  [[ -f $run/launches.jsonl ]] &&
    tail -n 1 "$run/launches.jsonl" | grep -qF "\"slurm_job\": \"$SLURM_JOB_ID\""
}
if [[ ${SLURM_RESTART_COUNT:-0} != 0 ]] && own; then
  # the run in the folder is this job's own. Otherwise the job was requeued before it began, and
  # train.py decides what becomes of an older run there
  if [[ $before ]]; then
    more+=(--resume_from_checkpoint=latest)
  else
    more+=(--overwrite_output_dir=True)
  fi
fi
starts=$((${SLURM_RESTART_COUNT:-0} + 1))
who="${#trainers[@]} node(s) train with $ranks rank(s) each"
say "job $SLURM_JOB_ID, start number $starts, $run: $who ${more[*]}"

urls=()
for i in "${!servers[@]}"; do
  place=$(address "${servers[i]}") || die "no process starts on ${servers[i]}"
  read -r name port <<< "$place"
  if ((vllm_port)); then port=$vllm_port; fi
  if ((server_gpus)); then name=127.0.0.1; fi
  # the shell stays a moment longer: when it ends Slurm kills what is left, and vLLM's helpers
  # have shared memory to free
  on "server_$i" "${servers[i]}" env "${server_env[@]}" \
    bash -c 'trap : TERM; python -m server "$@"; sleep 3' serve \
    "${args[@]}" --host="$host" --port="$port" --tp="$tp" --dp="$dp" &
  pids+=($!) urls+=("http://$name:$port")
  say "vLLM server on ${servers[i]}: ${urls[i]}, log: $run/logs/server_$i.log"
done
for i in "${!urls[@]}"; do
  deadline=$((SECONDS + 1800))      # a large model is slow to load
  until healthy "${urls[i]}"; do
    kill -0 "${pids[i]}" 2> /dev/null || {
      tail -n 15 "$run/logs/server_$i.log" >&2
      die "the server ${urls[i]} has died: $run/logs/server_$i.log"
    }
    ((SECONDS < deadline && !cancelled && !out_of_time)) ||
      die "the server ${urls[i]} was not ready in time: $run/logs/server_$i.log"
    sleep 1
  done
done
if ((${#urls[@]})); then
  export ROLLOUT_SERVER
  ROLLOUT_SERVER=$(commas "${urls[@]}")
fi

place=$(address "${trainers[0]}") || die "no process starts on ${trainers[0]}"
read -r name port <<< "$place"
on trainer_%n "$(commas "${trainers[@]}")" env "${trainer_env[@]}" \
  python -m torch.distributed.run --nnodes="${#trainers[@]}" --nproc_per_node="$ranks" \
  --shutdown-timeout=600 --rdzv_backend=c10d --rdzv_endpoint="$name:$port" \
  --rdzv_id="$SLURM_JOB_ID" train.py "${args[@]}" "${more[@]}" &
trainer=$!
pids+=("$trainer")
while kill -0 "$trainer" 2> /dev/null; do
  # again and again, because a run that is just starting takes the file for an earlier run's
  if ((out_of_time || cancelled)) && [[ -e $run/config.json ]]; then touch "$run/stop"; fi
  for i in "${!urls[@]}"; do
    kill -0 "${pids[i]}" 2> /dev/null || {
      say "the server ${urls[i]} has died: $run/logs/server_$i.log" >&2
      unset "urls[i]"
    }
  done
  sleep 1
done
status=0
wait "$trainer" || status=$?

if ((status)); then
  tail -q -n 100 "$run"/logs/trainer_*.log | grep -a '^error: ' | sort -u >&2 || true
  say "training ended with status $status: $run/logs/trainer_*.log" >&2
elif ((!dry && !cancelled)) && [[ ! -e $run/done && ! -e $run/stop ]]; then
  die "srun ended with status 0, but the run is neither done nor stopped: $run"
elif ((out_of_time && !cancelled)) && [[ -e $run/stop && ! -e $run/done ]]; then
  [[ $(newest_checkpoint) != "$before" ]] ||
    die "time is over and no checkpoint was added to ${before:-$run} since the start:" \
      "not queued again, it would be the same"
  leave
  say "time is over, saved $(newest_checkpoint): queued again"
  scontrol requeue "$job"
else
  say "training ended: $run"
fi
((!cancelled)) || status=143
exit "$status"
