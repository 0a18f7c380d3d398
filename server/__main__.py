"""Starts a stock vLLM server with what a config needs, for rollout_engine="server". Ends with the signal that ends it.

    python -m server config/countdown_tiny.py --port=8000                           on this machine only
    python -m server config/math_maxent.py --port=8000 --host=0.0.0.0 --tp=2        for other machines, two GPUs a replica
    python -m server config/math_maxent.py --port=8000 -- --max-num-seqs 512        what follows -- is vLLM's

--dp=N replicas behind one port. The server runs in vLLM's development mode, which lets whoever reaches the port change its weights:
open it to a private network only.
"""

import json
import os
import sys

from common import UserError, load_config, own_flags, script

OWN = {"port": 8000, "host": "127.0.0.1", "tp": 1, "dp": 1}  # flags that are no keys of the config


def option_flags(options: dict) -> list[str]:
    """vllm_options as flags of the server; --tp has the place of tensor_parallel_size."""
    flags = []
    for name, value in options.items():
        word = name.replace("_", "-")
        if name in ("tensor_parallel_size", "enforce_eager", "kv_cache_memory_bytes"):
            continue
        if isinstance(value, bool):
            flags.append(f"--{word}" if value else f"--no-{word}")
        else:
            flags += [
                f"--{word}",
                json.dumps(value) if isinstance(value, (dict, list)) else str(value),
            ]
    return flags


def command(
    c: dict, port: int, host: str, tp: int, dp: int, more: list[str]
) -> tuple[list[str], dict]:
    """(argv, environment additions) of the server for a resolved config."""
    # here, not above: a wrong flag is told before the ten seconds that these take
    import torch

    from policy import dtype_of
    from rollout import enforce_eager, kv_cache_bytes

    longest, gpu = c["max_prompt_length"] + c["max_completion_length"], torch.cuda.is_available()
    eager = enforce_eager(c, gpu)
    own_cache = not gpu or "kv_cache_memory_bytes" in c["vllm_options"]
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
        *(["--kv-cache-memory-bytes", str(kv_cache_bytes(c))] if own_cache else []),
        # as in rollout.VllmEngine: on a CPU a seeded prompt must not be cut, and with nothing else compiled its sampler is not either
        *(
            []
            if gpu
            else [
                "--no-enable-chunked-prefill",
                "--max-num-batched-tokens",
                str(max(8192, longest)),
            ]
        ),
        *option_flags(c["vllm_options"]),
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
    ours, more = argv, []
    if "--" in argv:
        ours, more = argv[: argv.index("--")], argv[argv.index("--") + 1 :]
    own, rest = own_flags(ours, OWN)
    for key in ("port", "tp", "dp"):
        if own[key] < 1:
            raise UserError(f"--{key}={own[key]} must be a whole number above 0")
    if own["port"] > 65535:
        raise UserError(f"--port={own['port']}: ports end at 65535")
    c = load_config(rest)
    from preflight import load_model_files

    load_model_files(c["model"], c["chat_template"])  # vLLM answers a bad folder with a traceback
    arguments, environment = command(c, **own, more=more)
    print("starting", *arguments[1:], flush=True)
    os.execve(sys.executable, arguments, os.environ | environment)


if __name__ == "__main__":
    script(main)
