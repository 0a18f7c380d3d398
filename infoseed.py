"""InfoSeed: completions that know which seed they were asked with, so that different seeds come to mean different answers.

Each prompt gets S more completions, one per seed id 0..S-1, from the prompt rendered through a template with the seed in it. They join the
prompt's group. An auxiliary loss pulls together the hidden states of completions of one seed over prompts, and apart those of
different seeds:

    infonce   -mean_i mean_{j in P(i)} log softmax_{k != i}(cos(h_i, h_k) / T)_j, P(i) the rows of i's seed and another prompt
    ce        cross-entropy of a linear head on h, trained with the policy

h (n, H) are the final hidden states of a completion, pooled, under the prompt without the seed: they can tell the seed only by the answer.
That shapes the representation. For the behaviour there is a reward: coef * (log q(seed | completion) + ln S), the information that the
completion carries about its seed; rows that earn it are trained under the prompt they were asked with.

P prompts of the step, p = P / world of this rank; the seed rows are prompt-major, S to a prompt.
"""

import math

import torch
import torch.distributed as dist

import learner
import rollout
from prompts import seed_prompts
from ranks import across_ranks, gather_groups


def completions(sampler, tokenizer, rows: list[dict], sampling: dict, c: dict) -> list[dict]:
    """p * S rollouts with "seed_id"; their "prompt_ids" are those of the base prompt, under which they are scored,
    or with a seed reward those of the prompt they were asked with."""
    S = c["info_seed_num_seeds"]
    asked = [ids for row in rows for ids in seed_prompts(row, tokenizer, c)]
    seeds = [rollout.prompt_seed(seed, "seed", z) for seed in sampling["seeds"] for z in range(S)]
    names = [f"{name}-z{z}" for name in sampling.get("names", ()) for z in range(S)]
    found = rollout.generate(
        sampler, tokenizer, asked, 1, {**sampling, "seeds": seeds, "names": names}
    )
    return [
        {
            **r,
            "seed_id": i % S,
            "prompt_ids": asked[i] if c["info_seed_reward"] > 0 else rows[i // S]["prompt_ids"],
        }
        for i, r in enumerate(found)
    ]


def join(base: list[dict], seeded: list[dict], prompts: int) -> list[dict]:
    """Groups of G + S, prompt-major: a prompt's G ordinary completions, then its S seeded ones."""
    G, S = len(base) // prompts, len(seeded) // prompts
    return [
        r for x in range(prompts) for r in base[x * G : (x + 1) * G] + seeded[x * S : (x + 1) * S]
    ]


def under_base_prompt(seeded: list[dict], rows: list[dict], S: int, device) -> dict:
    """The batch of this rank's seed rows as the auxiliary loss sees them."""
    return rollout.to_batch(
        [{**r, "prompt_ids": rows[i // S]["prompt_ids"]} for i, r in enumerate(seeded)], device
    )


# --- losses, of the whole step's seed rows


def info_nce(h, S: int, temperature: float):
    """The infonce loss of h (P * S, H), P >= 2. Khosla et al. 2020, arXiv:2004.11362"""
    seed, prompt = torch.arange(len(h)) % S, torch.arange(len(h)) // S
    unit = torch.nn.functional.normalize(h, dim=1)
    logits = (unit @ unit.T / temperature).masked_fill(
        torch.eye(len(h), dtype=torch.bool), -math.inf
    )  # k != i
    positive = (seed[:, None] == seed) & (prompt[:, None] != prompt)
    log_p = logits.log_softmax(1).masked_fill(~positive, 0.0)
    return -(log_p.sum(1) / positive.sum(1)).mean()


def log_q(h, S: int, temperature: float):
    """log q(seed | completion), (P * S, S), without a head: softmax of cos(h_i, mean h of each seed) / T. The means leave out all rows of
    i's own prompt: with only i left out, its own seed would be the one mean without that prompt, and guessing would score below chance."""
    groups = h.view(-1, S, h.shape[1])  # (P, S, H)
    means = (groups.sum(0) - groups) / (len(groups) - 1)  # (P, S, H)
    cosines = torch.cosine_similarity(groups[:, :, None], means[:, None], dim=3)  # (P, S, S)
    return (cosines / temperature).log_softmax(2).flatten(0, 1)


# --- on all ranks


@torch.no_grad()
def features(engine, batch: dict, c: dict) -> tuple:
    """(h (P * S, H), log q (P * S, S)) of all ranks' seed rows, before the update."""
    S, pool = c["info_seed_num_seeds"], c["info_seed_pooling"]
    plan, _ = learner.agree_on_plan(batch, 1, c)
    h = logits = None
    for rows in plan:
        part = rollout.take(batch, rows)
        found, scores = engine(part["ids"], part["prompt_lengths"], part["lengths"], pool=pool)
        h = found.new_zeros(len(batch["ids"]), found.shape[1]) if h is None else h
        h[rows] = found
        if scores is not None:
            logits = scores.new_zeros(len(h), S) if logits is None else logits
            logits[rows] = scores
    h = gather_groups(h)
    return h, log_q(h, S, c["info_seed_temperature"]) if logits is None else gather_groups(
        logits
    ).log_softmax(1)


def add_rewards(rewards, log_q, S: int, coef: float):
    """rewards (P, G + S) with coef * (log q(seed | completion) + ln S) added in the last S columns: nothing for a completion that tells nothing."""
    own = log_q.gather(1, (torch.arange(len(log_q)) % S)[:, None]).view(-1, S)
    return torch.cat([rewards[:, :-S], rewards[:, -S:] + coef * (own + math.log(S))], 1)


def measure(h, log_q, seed_rewards, weights, active) -> dict:
    """Of the seed rows before the update: pred_acc, how often the most likely seed is the right one (chance 1/S); diversity_l2, the mean
    distance of two seeds' mean h; their mean task reward; and with weights w (P, G + S) entropy_gap, how much more entropy w has
    within the ordinary rows than within the seed rows, nats, mean over active groups."""
    S = seed_rewards.shape[1]
    right = log_q.argmax(1) == torch.arange(len(h)) % S
    means = h.view(-1, S, h.shape[1]).mean(0)
    found = {
        "pred_acc": right.float().mean().item(),
        "diversity_l2": torch.nn.functional.pdist(means).mean().item(),
        "reward": seed_rewards.mean().item(),
    }
    if weights is not None and active.any():
        base, seeded = (
            torch.special.entr(w / w.sum(1, keepdim=True).clamp(min=1e-30)).sum(1)
            for w in (weights[active, :-S], weights[active, -S:])
        )
        found["entropy_gap"] = (base - seeded).mean().item()
    return {f"seed/{name}": value for name, value in found.items()}


def accumulate_gradients(engine, batch: dict, h, c: dict) -> dict:
    """Backward of info_seed_lambda * L_seed over this rank's seed rows; {"seed/loss"}. h (P * S, H): all ranks' features under the current
    weights, which give d L / d h for the contrastive loss; so micro-batches and ranks do not change it."""
    S, world, first = (
        c["info_seed_num_seeds"],
        dist.get_world_size(),
        dist.get_rank() * len(batch["ids"]),
    )
    weight, contrastive = c["info_seed_lambda"], c["info_seed_loss_type"] == "infonce"
    if contrastive:
        leaf = h.clone().requires_grad_()
        with torch.enable_grad():
            value = info_nce(leaf, S, c["info_seed_temperature"])
        slope = torch.autograd.grad(value, leaf)[0][first : first + len(batch["ids"])].to(
            batch["ids"].device
        )  # (p * S, H)
    plan, _ = learner.agree_on_plan(batch, 1, c)
    total = torch.zeros(1)
    for rows in plan:
        part = rollout.take(batch, rows)
        found, logits = engine(
            part["ids"], part["prompt_lengths"], part["lengths"], pool=c["info_seed_pooling"]
        )
        if contrastive:
            loss = (slope[rows] * found).sum()
        else:
            loss = torch.nn.functional.cross_entropy(
                logits, (rows % S).to(logits.device), reduction="sum"
            ) / len(h)
            total += loss.item()
        engine.backward(weight * world * loss, scale_wrt_gas=False)
    return {"seed/loss": value.item() if contrastive else across_ranks(total).item()}
