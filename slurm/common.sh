# shellcheck shell=bash
# What the batch scripts share; they source it in the repository's folder. Python, caches, and a
# few small functions.

# Python: the repository's own, or if there is none, the one that is active
if [[ -x .venv/bin/python ]]; then export PATH="$PWD/.venv/bin:$PATH"; fi

# what libraries download stays here, unless the environment says where it should go; what the user
# already has at home is used
cache=$PWD/var/cache
home=~      # HOME may not be set
if [[ ! ${HF_HOME:-} && -f $home/.cache/huggingface/token ]]; then
  export HF_TOKEN_PATH="${HF_TOKEN_PATH:-$home/.cache/huggingface/token}"
fi
if [[ ! ${HF_HOME:-} && -d $home/.cache/huggingface/hub ]]; then
  export HF_HOME=$home/.cache/huggingface
fi
export XDG_CACHE_HOME="${XDG_CACHE_HOME:-$cache}"
export HF_HOME="${HF_HOME:-$cache/huggingface}"
export PIP_CACHE_DIR="${PIP_CACHE_DIR:-$cache/pip}"
export TORCH_HOME="${TORCH_HOME:-$cache/torch}"
# what is compiled is many small files that every rank reads and locks, so each node has its own
compiled=${SLURM_TMPDIR:-${TMPDIR:-/tmp}}/compiled-$(id -u)
# a job that another job has submitted inherits its places, which are gone or on another node
for name in TORCHINDUCTOR_CACHE_DIR TRITON_CACHE_DIR VLLM_CACHE_ROOT; do
  if [[ ${!name:-} == */compiled-$(id -u)/* ]]; then unset "$name"; fi
done
export TORCHINDUCTOR_CACHE_DIR="${TORCHINDUCTOR_CACHE_DIR:-$compiled/inductor}"
export TRITON_CACHE_DIR="${TRITON_CACHE_DIR:-$compiled/triton}"
export VLLM_CACHE_ROOT="${VLLM_CACHE_ROOT:-$compiled/vllm}"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" PYTHONUNBUFFERED=1

say() { echo "$(date +%T) $*"; }
die() { say "error: $*" >&2; exit 1; }

# the ids of the GPUs that Slurm gave us on this node, or else of all GPUs, one per line
gpus_here() {
  if [[ ${CUDA_VISIBLE_DEVICES+set} ]]; then
    # NoDevFiles is some Slurms' word for none
    tr , '\n' <<< "$CUDA_VISIBLE_DEVICES" | grep -v -e '^$' -e NoDevFiles || true
  else
    nvidia-smi --query-gpu=index --format=csv,noheader 2> /dev/null | grep -E '^[0-9]+$' || true
  fi
}
