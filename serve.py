"""Starts a stock vLLM server with what a config needs, for rollout_engine="server". Ends with the signal that ends it.

    python serve.py config/countdown_tiny.py --port=8000                           on this machine only
    python serve.py config/math_maxent.py --port=8000 --host=0.0.0.0 --tp=2        for other machines, two GPUs a replica
    python serve.py config/math_maxent.py --port=8000 -- --max-num-seqs 512        what follows -- is vLLM's

--dp=N replicas behind one port. The server runs in vLLM's development mode, which lets whoever reaches the port change its weights:
open it to a private network only.
"""

import os
import sys

import torch

from common import UserError, load_config, script
from model_files import load_model_files
from policy import dtype_of
from rollout import enforce_eager, kv_cache_bytes


def command(
    c: dict, port: int, host: str, tp: int, dp: int, more: list[str]
) -> tuple[list[str], dict]:
    """(argv, environment additions) of the server for a resolved config."""
    longest, gpu = c["max_prompt_length"] + c["max_completion_length"], torch.cuda.is_available()
    eager = enforce_eager(c, gpu)
    argv = [
        sys.executable,
        "-m",
        "vllm.entrypoints.openai.api_server",
        "--model",
        c["model"],
        "--served-model-name",
        "policy",
        "--host",
        host,
        "--port",
        str(port),
        "--dtype",
        str(dtype_of(c)).removeprefix("torch."),
        "--seed",
        str(c["seed"]),
        "--max-model-len",
        str(longest),
        "--tensor-parallel-size",
        str(tp),
        "--data-parallel-size",
        str(dp),
        "--generation-config",
        "vllm",
        "--logprobs-mode",
        "processed_logprobs",
        "--enable-request-id-headers",
        "--disable-uvicorn-access-log",
        *(
            ["--weight-transfer-config", '{"backend": "nccl"}']
            if c["weight_sync"] == "nccl"
            else []
        ),
        *(["--enforce-eager"] if eager else []),
        # as in rollout.VllmEngine: on a CPU a seeded prompt must not be cut, and with nothing else compiled its sampler is not either
        *(
            []
            if gpu
            else [
                "--kv-cache-memory-bytes",
                str(kv_cache_bytes(c)),
                "--no-enable-chunked-prefill",
                "--max-num-batched-tokens",
                str(max(8192, longest)),
            ]
        ),
        *more,
    ]
    own = {"VLLM_SERVER_DEV_MODE": "1"}
    usual = (
        {}
        if gpu
        else {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}
        | ({"TORCHDYNAMO_DISABLE": "1"} if eager else {})
    )
    return argv, own | {key: value for key, value in usual.items() if key not in os.environ}


def main(argv) -> None:
    own, more = (
        (argv[: argv.index("--")], argv[argv.index("--") + 1 :]) if "--" in argv else (argv, [])
    )
    settings = {"port": "8000", "host": "127.0.0.1", "tp": "1", "dp": "1"}
    for flag in list(own):
        key, _, value = flag.removeprefix("--").partition("=")
        if flag.startswith("--") and key in settings:
            settings[key] = value
            own.remove(flag)
    numbers = {
        key: int(value) if value.isdecimal() else 0
        for key, value in settings.items()
        if key != "host"
    }
    for key, value in numbers.items():
        if value < 1:
            raise UserError(f"--{key}={settings[key]} must be a whole number above 0")
    if numbers["port"] > 65535:
        raise UserError(f"--port={settings['port']}: ports end at 65535")
    c = load_config(own)
    load_model_files(c["model"], c["chat_template"])  # vLLM answers a bad folder with a traceback
    arguments, environment = command(
        c, numbers["port"], settings["host"], numbers["tp"], numbers["dp"], more
    )
    print("starting", *arguments[1:], flush=True)
    os.execve(sys.executable, arguments, os.environ | environment)


if __name__ == "__main__":
    script(main)
