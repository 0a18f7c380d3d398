"""Run from test_rollout.py, a fresh process each, for there is one vLLM per process. Prints one JSON object as its last line.

python tests/helpers/engine_worker.py syncs MODEL        log-prob differences after each of five syncs, and after one that does not arrive
python tests/helpers/engine_worker.py samples MODEL      first tokens by both engines beside their exact probabilities
torchrun --nproc_per_node 2 tests/helpers/engine_worker.py tensor_parallel MODEL
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


def sampling(seed: int, prompts: int, max_tokens: int = 12, temperature: float = 0.8) -> dict:
    return {
        "temperature": temperature,
        "max_tokens": max_tokens,
        "stop_token_ids": [0],
        "seeds": [rollout.prompt_seed(seed, i) for i in range(prompts)],
    }


def start(engine: str, model: str, *flags):
    c = load_config(
        ["--max_prompt_length=16", "--max_completion_length=16", "--temperature=0.8", *flags]
    )
    _, _, device = start_distributed()
    return c, rollout.ENGINES[engine](model, c, torch.float32, device)


@torch.no_grad()
def difference(lm, rollouts: list) -> float:
    """Largest difference between the sampler's log-probs and the policy's."""
    batch = rollout.to_batch(rollouts, "cpu")
    logps, _ = Policy(lm, 0.8, 64)(batch["ids"], batch["prompt_lengths"], batch["lengths"])
    return (logps - batch["sampler_logps"]).abs().max().item()


def perturb(lm, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in lm.parameters():
            parameter += 0.05 * torch.randn(parameter.shape, generator=generator)


def syncs(model: str, *flags) -> dict:
    _, engine = start("vllm", model, *flags)
    lm, tokenizer = (
        AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32),
        AutoTokenizer.from_pretrained(model),
    )
    found = []
    for i in range(5):
        perturb(lm, i)
        engine.sync(named_weights(lm, 0))
        found.append(
            difference(lm, rollout.generate(engine, tokenizer, PROMPTS, 8, sampling(i, 3)))
        )
    again = [rollout.generate(engine, tokenizer, PROMPTS, 8, sampling(seed, 3)) for seed in (4, 5)]
    first = rollout.generate(engine, tokenizer, PROMPTS, 8, sampling(4, 3))
    perturb(lm, 9)  # an update that never reaches the engine
    stale = difference(lm, first)
    tied = lm.config.tie_word_embeddings
    if tied:  # and one whose vocabulary head is forgotten
        engine.sync(
            (name, tensor) for name, tensor in named_weights(lm, 0) if name != "lm_head.weight"
        )
    headless = (
        difference(lm, rollout.generate(engine, tokenizer, PROMPTS, 8, sampling(6, 3)))
        if tied
        else None
    )
    ids = [[r["completion_ids"] for r in rollouts] for rollouts in (first, *again)]
    compiled = engine.llm.llm_engine.vllm_config.compilation_config.mode != 0
    return {
        "compiled": compiled,
        "differences": found,
        "stale": stale,
        "headless": headless,
        "same_seed_same_tokens": ids[0] == ids[1],
        "other_seed_other_tokens": ids[0] != ids[2],
        "count": len(first),
        "within_group_distinct": len({tuple(x) for x in ids[0][:8]}),
        "ends": all(x[-1] == 0 or len(x) == 12 for x in ids[0]),
    }


def samples(model: str) -> dict:
    """4,000 first tokens each, from one prompt."""
    lm, tokenizer = (
        AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32),
        AutoTokenizer.from_pretrained(model),
    )
    with torch.no_grad():
        for parameter in lm.parameters():
            parameter *= (
                3.0  # random weights are nearly uniform: make it a distribution worth comparing
            )
        exact = (lm(torch.tensor([PROMPTS[0]])).logits[0, -1] / 0.8).softmax(0)
    result = {"exact": exact.tolist()}
    for name in ("vllm", "hf"):
        _, engine = start(name, model)
        engine.sync(named_weights(lm, 0))
        rollouts = rollout.generate(
            engine, tokenizer, PROMPTS[:1] * 40, 100, sampling(1, 40, max_tokens=1)
        )
        result[name] = torch.bincount(
            torch.tensor([r["completion_ids"][0] for r in rollouts]), minlength=len(exact)
        ).tolist()
        result[name + "_difference"] = difference(
            lm, rollout.generate(engine, tokenizer, PROMPTS, 8, sampling(2, 3))
        )
    return result


def tensor_parallel(model: str) -> dict:
    _, engine = start("vllm", model, "--vllm_options.tensor_parallel_size=2")
    lm, tokenizer = (
        AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32),
        AutoTokenizer.from_pretrained(model),
    )
    perturb(lm, 1)
    engine.sync(named_weights(lm, 0))
    rank = torch.distributed.get_rank()
    mine = (
        PROMPTS[:2] if rank == 0 else PROMPTS[2:]
    )  # ranks ask for different things, even different numbers of them
    rollouts = rollout.generate(engine, tokenizer, mine, 4, sampling(rank, len(mine)))
    own = float(all(r["prompt_ids"] == mine[i // 4] for i, r in enumerate(rollouts)))
    worst, own = across_ranks(
        torch.tensor([difference(lm, rollouts), -own]), torch.distributed.ReduceOp.MAX
    ).tolist()
    engine.close()
    return {"difference": worst, "every_rank_got_its_own": own == -1.0}


if __name__ == "__main__":
    print(json.dumps(globals()[sys.argv[1]](*sys.argv[2:])), flush=True)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()  # else gloo's threads may abort the process as it ends
