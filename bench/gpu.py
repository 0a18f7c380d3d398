"""The learner alone on one GPU: tokens per second, share of the matrix-product peak, peak memory, beside a plain step and TRL's loss code.

    python -m bench.gpu                          Qwen2.5 0.5B and 1.5B shapes, random weights, bfloat16, ZeRO 0 and 2, 2k and 8k tokens; a quarter of an hour
    python -m bench.gpu --shapes=tiny            the same on a CPU: shows that this script works, its figures mean nothing

One prompt of 128 tokens with 8 completions is a micro-batch; a step is one micro-batch, forward, backward, AdamW. "plain" is transformers on padded rows, all logits
of the completions, cross-entropy and torch's AdamW on bfloat16 weights; "trl" the same with TRL's selective_log_softmax and entropies. Every arm is a
process of its own. Peak: the best of products of bfloat16 matrices of 8,192 x 8,192, measured here. Products counted: 6 per weight and token that an arm needs,
the vocabulary head on completion tokens only, attention left out.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from bench.__main__ import result_of

ROOT = Path(__file__).resolve().parent.parent
#         hidden, layers, heads, kv heads, feed-forward, vocabulary
SHAPES = {
    "0.5b": (896, 24, 14, 2, 4864, 151936),
    "1.5b": (1536, 28, 12, 2, 8960, 151936),
    "tiny": (64, 2, 4, 2, 128, 1000),
}
ARMS = ["ours ZeRO 0", "ours ZeRO 2", "plain", "trl"]
PROMPT, G, STEPS, WARM = 128, 8, 12, 4


def config_of(shape: str):
    from transformers import Qwen2Config

    hidden, layers, heads, kv, feed, vocabulary = SHAPES[shape]
    return Qwen2Config(
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv,
        intermediate_size=feed,
        vocab_size=vocabulary,
        tie_word_embeddings=True,
        max_position_embeddings=32768,
    )


def model_folder(shape: str) -> Path:
    """Random weights, saved once."""
    from transformers import AutoModelForCausalLM

    folder = Path(tempfile.gettempdir()) / f"bench_gpu_{os.getuid()}_{shape}"
    if not (folder / "model.safetensors").exists():
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config_of(shape), dtype=torch.bfloat16).save_pretrained(
            folder
        )
    return folder


def batch_of(shape: str, tokens: int, device) -> dict:
    """`tokens` of one group: its prompt once and G completions."""
    T = (tokens - PROMPT) // G
    ids = torch.randint(
        3, SHAPES[shape][5], (G, PROMPT + T), generator=torch.Generator().manual_seed(0)
    )
    ids[:, :PROMPT] = ids[0, :PROMPT]
    batch = {
        "ids": ids,
        "prompt_lengths": torch.full((G,), PROMPT),
        "lengths": torch.full((G,), T),
        "sampler_logps": torch.zeros(G, T),
    }
    return {key: value.to(device) for key, value in batch.items()}


def ours(shape: str, tokens: int, zero_stage: int):
    """(work, device): train.py's learner."""
    import learner
    import train
    from common import load_config
    from ranks import start_distributed

    _, _, device = start_distributed()
    c = load_config(
        [
            f"--{key}={value}"
            for key, value in dict(
                model=model_folder(shape),
                objective="dr_grpo",
                importance_sampling="none",
                beta=0.0,
                zero_stage=zero_stage,
                dtype="bfloat16",
                prompts_per_step=1,
                num_generations=G,
                max_tokens_per_micro_batch=tokens,
            ).items()
        ]
    )
    engine, batch = (
        train.load_policy(c | {"dtype": "bfloat16"}, device),
        batch_of(shape, tokens, device),
    )
    group = {"rewards": torch.rand(1, G), "lengths": batch["lengths"].view(1, G).cpu()}
    targets = learner.group_targets(group, 0.0, 0.0, c)

    def work():
        batch.pop("old_logps", None)
        learner.accumulate_gradients(
            engine, batch, targets, 0.0, c, learner.step_counts(targets, group["lengths"])
        )
        engine.step()

    return work, device


def theirs(shape: str, tokens: int, kind: str):
    """(work, device): transformers on padded rows, with torch's loss or TRL's."""
    from transformers import AutoModelForCausalLM

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    lm = (
        AutoModelForCausalLM.from_pretrained(model_folder(shape), dtype=torch.bfloat16)
        .to(device)
        .train()
    )
    optimizer, batch = (
        torch.optim.AdamW(lm.parameters(), lr=1e-6, fused=device.type == "cuda"),
        batch_of(shape, tokens, device),
    )
    targets, T = batch["ids"][:, PROMPT:], int(batch["lengths"][0])
    if kind == "trl":
        from trl.trainer.utils import entropy_from_logits, selective_log_softmax

    def work():
        logits = lm(input_ids=batch["ids"], use_cache=False, logits_to_keep=T + 1).logits[
            :, :-1
        ]  # (G, T, V)
        if kind == "plain":
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
        else:
            loss = -selective_log_softmax(logits, targets).mean()
            with torch.no_grad():
                entropy_from_logits(logits)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return work, device


def run_arm(arm: str, shape: str, tokens: int) -> None:
    work, device = (
        ours(shape, tokens, int(arm[-1])) if arm.startswith("ours") else theirs(shape, tokens, arm)
    )
    gpu, seconds = device.type == "cuda", []
    for _ in range(STEPS):
        begin = time.perf_counter()
        work()
        if gpu:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begin)
    peak = torch.cuda.max_memory_allocated() / 2**30 if gpu else 0.0
    print(
        "\nresult "
        + json.dumps({"seconds": sorted(seconds[WARM:])[(STEPS - WARM) // 2], "gib": peak}),
        flush=True,
    )


def products(shape: str, tokens: int, shared: bool) -> float:
    """Floating-point operations of a step: 2 forward and 4 backward per weight and token."""
    hidden, layers, heads, kv, feed, vocabulary = SHAPES[shape]
    T = (tokens - PROMPT) // G
    weights = layers * (hidden * hidden * (2 + 2 * kv / heads) + 3 * hidden * feed)
    return 6 * (weights * (G * T + PROMPT * (1 if shared else G)) + hidden * vocabulary * G * T)


def matrix_peak(device) -> float:
    """Operations a second of the largest bfloat16 product."""
    n = 8192 if device == "cuda" else 512
    a, b, best = (*torch.randn(2, n, n, device=device, dtype=torch.bfloat16), 0.0)
    for _ in range(12):
        begin = time.perf_counter()
        a @ b
        if device == "cuda":
            torch.cuda.synchronize()
        best = max(best, 2 * n**3 / (time.perf_counter() - begin))
    return best


def main(argv: list[str]) -> None:
    flags = dict(flag.removeprefix("--").partition("=")[::2] for flag in argv)
    shapes = flags.get("shapes", "0.5b,1.5b").split(",")
    if "arm" in flags:
        return run_arm(flags["arm"], shapes[0], int(flags["tokens"]))
    gpu = torch.cuda.is_available()
    if not gpu and shapes != ["tiny"]:
        sys.exit(
            "error: there is no GPU here (torch.cuda.is_available() is False), so nothing is measured; --shapes=tiny only shows that this script works"
        )
    peak = matrix_peak("cuda" if gpu else "cpu")
    print(
        f"{torch.cuda.get_device_name() if gpu else 'a CPU, figures mean nothing'}; torch {torch.__version__}; largest product {peak / 1e12:.1f} Tflop/s"
    )
    print(
        "| shape | tokens | arm | completion tokens a second | share of the peak | GiB at peak |",
        "|---" * 6 + "|",
        sep="\n",
    )
    for shape in shapes:
        model_folder(shape)
        for tokens in (2048, 8192) if gpu else (512,):
            for arm in ARMS:
                command = [
                    sys.executable,
                    "-m",
                    "bench.gpu",
                    f"--arm={arm}",
                    f"--shapes={shape}",
                    f"--tokens={tokens}",
                ]
                done = subprocess.run(
                    command, cwd=ROOT, capture_output=True, text=True, timeout=600
                )
                found = result_of(done)
                if not found:
                    print(
                        f"| {shape} | {tokens:,} | {arm} | failed: {(done.stderr.strip().splitlines() or ['no word'])[-1][:120]} | | |",
                        flush=True,
                    )
                    continue
                rate = (tokens - PROMPT) // G * G / found["seconds"]
                share = products(shape, tokens, arm.startswith("ours")) / found["seconds"] / peak
                print(
                    f"| {shape} | {tokens:,} | {arm} | {rate:,.0f} | {share:.1%} | {found['gib']:.1f} |",
                    flush=True,
                )


if __name__ == "__main__":
    main(sys.argv[1:])
