"""Starts a stock vLLM server with the settings that a config needs, for rollout_engine="server".
This process becomes the server, so a signal that ends it ends the server.

    python -m server config/countdown_tiny.py --port=8000
    python -m server config/math_maxent.py --port=8000 --host=0.0.0.0 --tp=2
    python -m server config/math_maxent.py --port=8000 -- --max-num-seqs 512

The first line serves this machine only; the second serves other machines too, with two GPUs per
replica (--tp). --dp=N runs N replicas behind one port. Arguments after -- go to vLLM as they are.
The server runs in vLLM's development mode, in which anybody who reaches the port can change its
weights, so open it to a private network only.
"""

import json
import os
import socket
import sys

from checks import entries, max_sequence_length
from common import UserError, load_config, own_flags, script

SERVE_ROWS = 128  # completions that `vllm serve` runs at once by default on a CPU
OWN = {"port": 8000, "host": "127.0.0.1", "tp": 1, "dp": 1}  # flags that are not keys of the config
# vllm_options that command() handles itself; --tp replaces tensor_parallel_size
SET_HERE = ("tensor_parallel_size", "enforce_eager", "kv_cache_memory_bytes")


def command(c: dict, own: dict, model_config) -> tuple[list[str], dict]:
    """The server's argv, and what must be added to its environment. c: a resolved config;
    model_config: Hugging Face's."""
    # imported here, because they take ten seconds and a wrong flag is reported before
    import torch

    import rollout
    from policy import dtype_of

    on_gpu = torch.cuda.is_available()
    eager = rollout.enforce_eager(c, on_gpu)
    options = {
        "model": c["model"],
        "served_model_name": "policy",  # not the path, which may differ on the trainer's machine
        "host": own["host"],
        "port": own["port"],
        "dtype": str(dtype_of(c)).removeprefix("torch."),
        "seed": c["seed"],
        "max_model_len": max_sequence_length(c),
        "tensor_parallel_size": own["tp"],
        "data_parallel_size": own["dp"],
        # ignore the model's own top_p and repetition penalty
        "generation_config": "vllm",
        "logprobs_mode": "processed_logprobs",
        # answers repeat the id of their request, so that we notice if a proxy mixes up clients
        "enable_request_id_headers": True,
        "disable_uvicorn_access_log": True,
    } | rollout.HF_FILES
    if c["weight_sync"] == "nccl":
        options["weight_transfer_config"] = {"backend": "nccl"}
    if eager:
        options["enforce_eager"] = True
    cache = entries(c, "vllm_options")["kv_cache_memory_bytes"]
    if on_gpu and cache:
        options["kv_cache_memory_bytes"] = cache
    if not on_gpu:  # as in rollout.vllm_settings
        shared = c | {"vllm_options": c["vllm_options"] | {"tensor_parallel_size": own["tp"]}}
        rows = rollout.rows_at_once(shared, own["dp"], SERVE_ROWS)
        options["kv_cache_memory_bytes"] = rollout.kv_cache_bytes(shared, model_config, rows)
        options["block_size"] = rollout.CPU_BLOCK
        options["enable_chunked_prefill"] = False
        options["max_num_batched_tokens"] = rollout.largest_prefill(c)
    for name, value in c["vllm_options"].items():
        if name not in SET_HERE:  # the user's options override those above
            options[name] = value
    rollout.use_float32_logits(options, dtype_of(c), on_gpu)
    rollout.use_nccl_all_reduce(options, on_gpu)
    argv = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *flags_of(options)]
    return argv, environment_additions(on_gpu, eager, own["tp"])


def flags_of(options: dict) -> list[str]:
    """Options as flags of vLLM's command line: {"max_model_len": 64, "enforce_eager": True} ->
    ["--max-model-len", "64", "--enforce-eager"]."""
    flags = []
    for name, value in options.items():
        word = name.replace("_", "-")
        if isinstance(value, bool):
            flags.append(f"--{word}" if value else f"--no-{word}")
            continue
        if isinstance(value, dict):
            value = json.dumps(value)
        values = value if isinstance(value, list) else [value]
        flags += [f"--{word}", *map(str, values)]
    return flags


def environment_additions(on_gpu: bool, eager: bool, tp: int) -> dict[str, str]:
    """Settings that vLLM reads from the environment only. Except for VLLM_SERVER_DEV_MODE, the
    user's own values stay."""
    additions = {"VLLM_SERVER_DEV_MODE": "1"}
    usual = {"VLLM_USE_FLASHINFER_SAMPLER": "0"}  # see rollout.import_vllm
    if not on_gpu:
        usual["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
        if eager:  # enforce_eager still compiles a part of the sampler, see rollout.VllmEngine
            usual["TORCHDYNAMO_DISABLE"] = "1"
        if tp == 1:  # the model lives in the engine's process: saves 10 s at the start
            usual["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    for name, value in usual.items():
        if name not in os.environ:
            additions[name] = value
    return additions


def check_port(host: str, port: int) -> None:
    """UserError if nothing can listen there. vLLM would say so after a minute, in a traceback."""
    try:
        # vLLM takes an empty host for all addresses
        found = socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        family, kind, _, _, address = found[0]
        with socket.socket(family, kind) as probe:
            # as vLLM's own: the port of a server that has just ended is free
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as error:
        raise UserError(f"--host={host} --port={port} can't be used: {error.strerror}") from None


def main(argv) -> None:
    for_us = argv
    for_vllm = []
    if "--" in argv:
        end = argv.index("--")
        for_us = argv[:end]
        for_vllm = argv[end + 1 :]
    own, rest = own_flags(for_us, OWN)
    for key in ("port", "tp", "dp"):
        if own[key] < 1:
            raise UserError(f"--{key}={own[key]} must be a whole number above 0")
    if own["port"] > 65535:
        raise UserError(f"--port={own['port']}: ports end at 65535")
    c = load_config(rest)
    if not any(word.startswith(("--port", "--host", "--uds")) for word in for_vllm):
        check_port(own["host"], own["port"])
    from preflight import load_checked_files

    # checked here, because vLLM itself answers a bad folder with a traceback
    files = load_checked_files(c)
    arguments, additions = command(c, own, files.config)
    arguments += for_vllm
    print("starting", *arguments[1:], flush=True)
    # replaces this process, so that signals reach vLLM itself
    os.execve(sys.executable, arguments, os.environ | additions)


if __name__ == "__main__":
    script(main)
