"""Run by test_rollout.py, a fresh process each, for there is one vLLM per process. Prints one JSON
object as its last line.

    python tests/helpers/engine_worker.py syncs MODEL [FLAG ...]
    python tests/helpers/engine_worker.py samples MODEL
    torchrun --nproc_per_node 2 tests/helpers/engine_worker.py tensor_parallel MODEL

syncs: log-prob differences after each of five syncs, and after one that does not arrive.
samples: first tokens by both engines beside their exact probabilities.
tensor_parallel: two ranks that share an engine.
"""

import json
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from transformers import AutoModelForCausalLM, AutoTokenizer

import rollout
from common import load_config
from policy import Policy, named_weights
from ranks import across_ranks, start_distributed

PROMPTS = [[7, 20, 33, 41], [50, 51], [9, 8, 7, 6, 5, 90]]
LONG = list(range(5, 85))  # fills blocks of vLLM's cache, which must not outlive a sync


def sampling(seed: int, prompts: int, max_tokens: int = 12, temperature: float = 0.8):
    return rollout.Sampling(
        temperature=temperature,
        max_tokens=max_tokens,
        stop_token_ids=[0],
        seeds=[rollout.prompt_seed(seed, i) for i in range(prompts)],
    )


def start(name: str, model: str, *flags):
    """The engine of that name, and the policy and tokenizer beside it."""
    lengths = ["--max_prompt_length=16", "--max_completion_length=16"]
    c = load_config([*lengths, "--temperature=0.8", *flags])
    device = start_distributed().device
    engine = rollout.ENGINES[name](model, c, torch.float32, device)
    lm = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    return engine, lm, AutoTokenizer.from_pretrained(model)


@torch.no_grad()
def difference(lm, rollouts: list) -> float:
    """Largest difference between the sampler's log-probs and the policy's."""
    batch = rollout.to_batch(rollouts, "cpu")
    policy = Policy(lm, 0.8, 64)
    logps, _ = policy(batch["ids"], batch["prompt_lengths"], batch["lengths"])
    return (logps - batch["sampler_logps"]).abs().max().item()


@torch.no_grad()
def perturb(lm, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in lm.parameters():
        parameter += 0.05 * torch.randn(parameter.shape, generator=generator)


def without_head(lm):
    """The weights of a tied model, its vocabulary head forgotten."""
    for name, tensor in named_weights(lm, 0):
        if name != "lm_head.weight":
            yield name, tensor


def syncs(model: str, *flags) -> dict:
    engine, lm, tokenizer = start("vllm", model, "--max_prompt_length=80", *flags)

    def ask(seed: int) -> list[dict]:
        return rollout.generate(engine, tokenizer, [*PROMPTS, LONG], 8, sampling(seed, 4))

    differences = []
    for i in range(5):
        perturb(lm, i)
        engine.sync(named_weights(lm, 0))
        differences.append(difference(lm, ask(i)))
    first = ask(4)
    same_seed = ask(4)
    other_seed = ask(5)
    perturb(lm, 9)  # an update that never reaches the engine
    stale = difference(lm, first)
    headless = None
    if lm.config.tie_word_embeddings:
        engine.sync(without_head(lm))
        headless = difference(lm, ask(6))

    def tokens(rollouts: list) -> list:
        return [r["completion_ids"] for r in rollouts]

    return {
        "compiled": engine.llm.llm_engine.vllm_config.compilation_config.mode != 0,
        "differences": differences,
        "stale": stale,
        "headless": headless,
        "same_seed_same_tokens": tokens(first) == tokens(same_seed),
        "other_seed_other_tokens": tokens(first) != tokens(other_seed),
        "count": len(first),
        "within_group_distinct": len({tuple(ids) for ids in tokens(first)[:8]}),
        "ends": all(ids[-1] == 0 or len(ids) == 12 for ids in tokens(first)),
    }


@torch.no_grad()
def samples(model: str) -> dict:
    """4,000 first tokens each, from one prompt."""
    result = {}
    for name in ("vllm", "hf"):
        engine, lm, tokenizer = start(name, model)
        for parameter in lm.parameters():
            # random weights are nearly uniform: make it a distribution worth comparing
            parameter *= 3.0
        logits = lm(torch.tensor([PROMPTS[0]])).logits[0, -1]  # (V,)
        result["exact"] = (logits / 0.8).softmax(0).tolist()
        engine.sync(named_weights(lm, 0))
        one_token = sampling(1, 40, max_tokens=1)
        rollouts = rollout.generate(engine, tokenizer, PROMPTS[:1] * 40, 100, one_token)
        tokens = torch.tensor([r["completion_ids"][0] for r in rollouts])
        result[name] = torch.bincount(tokens, minlength=len(logits)).tolist()
        rollouts = rollout.generate(engine, tokenizer, PROMPTS, 8, sampling(2, 3))
        result[f"{name}_difference"] = difference(lm, rollouts)
    return result


def tensor_parallel(model: str) -> dict:
    engine, lm, tokenizer = start("vllm", model, "--vllm_options.tensor_parallel_size=2")
    perturb(lm, 1)
    engine.sync(named_weights(lm, 0))
    rank = torch.distributed.get_rank()
    # ranks ask for different things, even different numbers of them
    mine = PROMPTS[:2] if rank == 0 else PROMPTS[2:]
    rollouts = rollout.generate(engine, tokenizer, mine, 4, sampling(rank, len(mine)))
    wanted = [ids for ids in mine for _ in range(4)]
    foreign = [r["prompt_ids"] for r in rollouts] != wanted
    local = torch.tensor([difference(lm, rollouts), float(foreign)])
    worst, foreign = across_ranks(local, torch.distributed.ReduceOp.MAX).tolist()
    engine.close()
    return {"difference": worst, "every_rank_got_its_own": not foreign}


WORK = {"syncs": syncs, "samples": samples, "tensor_parallel": tensor_parallel}

if __name__ == "__main__":
    print(json.dumps(WORK[sys.argv[1]](*sys.argv[2:])), flush=True)
    if torch.distributed.is_initialized():
        # else gloo's threads may abort the process as it ends
        torch.distributed.destroy_process_group()
