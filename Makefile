# make demo: from nothing to a trained model and a table. make test: the fast tests, about 8 minutes
# on two quiet cores. make test-all: also the slow ones.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# yes also on a login node without a GPU, if the environment was made on a machine with one
GPU := $(if $(wildcard $(VENV)/installed-gpu-*),yes,$(shell nvidia-smi >/dev/null 2>&1 && echo yes))
REQUIREMENTS := $(if $(GPU),requirements.txt,requirements-cpu.txt)
RANKS ?= $(if $(GPU),1,2)
PIP := $(BIN)/pip install --quiet --disable-pip-version-check
TORCH := $(if $(GPU),"torch==2.13.0",--retries 0 --extra-index-url https://download.pytorch.org/whl/cpu "torch==2.13.0+cpu")

# one thread per rank: two threads that share a busy core wait for each other for seconds
export OMP_NUM_THREADS ?= 1

# if a recipe fails, its half-made model is deleted: the next make would take it for a whole one
.DELETE_ON_ERROR:

.PHONY: demo demo-real test test-all bench check-gpu env clean

# the stamp's name has the hash of the requirements, so a changed pin installs again; on a machine
# with a GPU an environment made for CPUs is made anew
STAMP := $(VENV)/installed-$(if $(GPU),gpu-)$(shell cat requirements*.txt | cksum | cut -d' ' -f1)

# programs of an environment begin with the path of its Python. If that is gone, the folder was
# renamed or copied from another machine: torchrun can't start and `activate` leads nowhere, so the
# environment is made anew (126 and 127: the program that a script begins with is not there)
MOVED := $(shell test -e $(BIN)/pip && { $(BIN)/pip --version; c=$$?; test $$c = 126 -o $$c = 127; } >/dev/null 2>&1 && echo yes)
ifdef MOVED
.PHONY: $(STAMP)
endif

env: $(STAMP)

$(STAMP):
	$(PYTHON) -c 'import sys; sys.exit("Python 3.11 or newer is needed, this is " + sys.version.split()[0] if sys.version_info < (3, 11) else 0)'
	$(if $(GPU),$(PYTHON) bench/gpu_needs.py)
	$(if $(GPU),rm -rf $(if $(wildcard $(VENV)/installed-[0-9]*),$(VENV)))
	$(if $(MOVED),@echo "$(VENV) was made for another place: it is made anew"; rm -rf $(VENV))
	test -x $(BIN)/pip || $(PYTHON) -m venv $(VENV)
	@echo "installing $(REQUIREMENTS) into $(VENV), two to four minutes"
	$(PIP) $(TORCH)
	$(PIP) -r $(REQUIREMENTS)
	$(if $(GPU),,$(BIN)/pip uninstall --quiet --yes torchvision torchaudio torchcodec)
	touch $@

runs/countdown_sft/model.safetensors: | $(STAMP)
	rm -rf runs/countdown_sft
	$(BIN)/torchrun --standalone --nproc_per_node $(RANKS) sft.py config/countdown_tiny.py --model=tiny --output_dir=runs/countdown_sft \
	  --steps=800 --batch_size=128 --learning_rate=2e-3

demo: $(STAMP) runs/countdown_sft/model.safetensors
	$(BIN)/python -m compare config/countdown_tiny.py --arms=compare/demo_arms.py --seeds=1 --ranks=1 --jobs=$(if $(GPU),1,2) --output=runs/demo

runs/smollm2/model.safetensors: | $(STAMP)
	$(BIN)/python -m bench.smollm2 runs/smollm2

# a real model has enough work for two threads, so one rank takes both cores
demo-real: export OMP_NUM_THREADS = 2
demo-real: $(STAMP) runs/smollm2/model.safetensors
	$(BIN)/python -m compare config/smollm2_between.py --arms=compare/demo_arms.py --seeds=1 --eval_seeds=1 --ranks=1 --output=runs/demo_smollm2

$(STAMP)-dev: $(STAMP)
	$(PIP) -r requirements-dev.txt
	touch $@

# three files at a time on two cores, because some tests wait more than they compute. A run that
# hangs is ended after an hour (test-all after three) by SIGINT; pytest then names what has failed
# so far
LIMIT := 3600
test-all: LIMIT := 10800
PYTEST = timeout --foreground --signal=INT --kill-after=60 $(LIMIT) $(BIN)/python -m pytest -q -n 3 --dist loadfile --no-loadscope-reorder

# even on a machine with a GPU, tests and bench run on the CPU, in an environment of their own:
# vLLM's GPU build can't use a CPU
ON_CPU := CUDA_VISIBLE_DEVICES= $(MAKE) --no-print-directory GPU= VENV=.venv-cpu

ifdef GPU
test test-all bench:
	+$(ON_CPU) $@
else
test: $(STAMP)-dev
	$(BIN)/ruff check . && $(BIN)/ruff format --check --quiet .
	$(PYTEST) -m "not slow" tests

test-all: $(STAMP)-dev
	$(BIN)/ruff check . && $(BIN)/ruff format --check --quiet .
	$(PYTEST) tests

bench: $(STAMP)-dev
	$(BIN)/python -m bench
endif

# without a GPU Python's exit status is 3, and make's is 2
check-gpu: $(STAMP)
	$(BIN)/python -m bench.gpu

# the environments; runs/ holds what was trained, and stays
clean:
	rm -rf $(VENV) .venv-cpu
