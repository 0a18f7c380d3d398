"""InfoSeed: some completions are asked for with a seed in their prompt, and are trained to show
which seed it was, so that different seeds come to mean different answers.

    rollouts = add_completions(sampler, tokenizer, rows, rollouts, sampling, config)
    seeds = Seeds(engine, collected, config, device)   # seeds.rewards, .accumulate_gradients, ...

Each prompt gets S = info_seed_num_seeds more completions, one per seed id 0..S-1. Their prompt is
rendered through a template with the seed in it. They join the prompt's group. An auxiliary loss
pulls hidden states of the same seed together, across prompts, and those of different seeds apart:

    infonce   -mean_i mean_{j in J(i)} log softmax_{k != i}(cos(h_i, h_k) / T)_j,
              J(i) the rows of i's seed and another prompt
    ce        cross-entropy of a linear head on h, trained with the policy

h (n, H) are the final hidden states of a completion, pooled, computed under the prompt without the
seed, so that only the answer can reveal the seed. This loss shapes the representation. A reward
shapes the behaviour: info_seed_reward * (log q(seed | completion) + ln S), where the sum in
brackets is the information in nats that the completion carries about its seed. Rows that can earn
it are trained under the prompt they were sampled with.

P prompts of the step, p = P / world of this rank; the seed rows are prompt-major, S to a prompt.
With S = 0 there are none, and everything here does nothing.
"""

import math

import torch
import torch.distributed as dist

import learner
import rollout
from prompts import seed_prompts
from ranks import across_ranks, gather_rows

# --- completions


def add_completions(
    sampler, tokenizer, rows: list[dict], rollouts: list[dict], sampling: rollout.Sampling, c: dict
) -> list[dict]:
    """Groups of G + S, prompt-major: each row's G ordinary completions from `rollouts`, then S
    seeded ones, sampled here, with a "seed_id". The "prompt_ids" of the seeded ones decide under
    which prompt they are trained: the base prompt or, with a seed reward, the prompt that they were
    sampled with."""
    S = c["info_seed_num_seeds"]
    if S == 0:
        return rollouts
    asked = []  # p * S prompts
    for row in rows:
        asked += seed_prompts(row, tokenizer, c)
    rng_seeds = []
    names = []
    for rng_seed, name in zip(sampling.seeds, sampling.names):
        rng_seeds += [rollout.prompt_seed(rng_seed, "seed", z) for z in range(S)]
        names += [f"{name}-z{z}" for z in range(S)]
    seed_sampling = sampling._replace(seeds=rng_seeds, names=names)
    seeded = rollout.generate(sampler, tokenizer, asked, 1, seed_sampling)
    for i, r in enumerate(seeded):
        r["seed_id"] = i % S
        # a reward for showing the seed needs the prompt that contains it, the one sampled with
        if c["info_seed_reward"] == 0:
            r["prompt_ids"] = rows[i // S]["prompt_ids"]

    p = len(rows)
    joined = []
    for plain, with_seeds in zip(rollout.groups_of(rollouts, p), rollout.groups_of(seeded, p)):
        joined += plain + with_seeds  # G + S
    return joined


# --- losses, of the whole step's seed rows


def info_nce(h, S: int, temperature: float):
    """The infonce loss of h (P * S, H), P >= 2. Khosla et al. 2020, arXiv:2004.11362"""
    rows = torch.arange(len(h))  # prompt-major
    seed = rows % S
    prompt = rows // S
    itself = torch.eye(len(h), dtype=torch.bool)
    unit = torch.nn.functional.normalize(h, dim=1)  # (P * S, H)
    # (P * S, P * S), like the two below; k != i
    logits = (unit @ unit.T / temperature).masked_fill(itself, -math.inf)
    positive = (seed[:, None] == seed) & (prompt[:, None] != prompt)  # j in J(i)
    # masked_fill, not a product: a row's own entry is -inf
    log_p = logits.log_softmax(1).masked_fill(~positive, 0.0)
    return -(log_p.sum(1) / positive.sum(1)).mean()


def seed_logps(h, S: int, temperature: float):
    """log q(seed | completion), (P * S, S), without a trained head: the softmax over seeds z of
    cos(h_i, mean h of seed z) / T.

    The means leave out all rows of i's own prompt. If they left out only row i, the mean of its own
    seed would be the only one without that prompt, and guessing would score below chance."""
    groups = h.view(-1, S, h.shape[1])  # (P, S, H)
    means = (groups.sum(0) - groups) / (len(groups) - 1)  # (P, S, H) over the other prompts
    cosines = torch.cosine_similarity(groups[:, :, None], means[:, None], dim=3)  # (P, S, S)
    return (cosines / temperature).log_softmax(2).flatten(0, 1)


def add_rewards(rewards, log_q, S: int, coef: float):
    """rewards (P, G + S) with coef * (log q(seed | completion) + ln S) added in the last S columns,
    which is 0 for a completion that tells nothing about its seed. log_q: (P * S, S)."""
    seed = torch.arange(len(log_q)) % S
    log_q_of_seed = log_q.gather(1, seed[:, None]).view(-1, S)  # (P, S)
    information = log_q_of_seed + math.log(S)  # nats; 0 where q is 1 / S
    return torch.cat([rewards[:, :-S], rewards[:, -S:] + coef * information], 1)


# --- on all ranks


def forwards(engine, batch: dict, c: dict):
    """(rows, h, logits of the trained head or None) of each micro-batch of this rank's seed
    rows."""
    for rows in learner.agree_on_plan(batch, 1, c).learning:
        part = rollout.take(batch, rows)
        h, logits = engine(
            part["ids"], part["prompt_lengths"], part["lengths"], pool=c["info_seed_pooling"]
        )
        yield rows, h, logits


@torch.no_grad()
def features(engine, batch: dict, c: dict) -> tuple:
    """(h (P * S, H), log q (P * S, S)) of all ranks' seed rows, under the current weights."""
    rows, h, logits = zip(*forwards(engine, batch, c))
    order = torch.cat(rows).argsort()  # micro-batches take the rows in another order
    h = gather_rows(torch.cat(h)[order])  # (P * S, H)
    if logits[0] is None:  # only "ce" trains a head
        return h, seed_logps(h, c["info_seed_num_seeds"], c["info_seed_temperature"])
    return h, gather_rows(torch.cat(logits)[order]).log_softmax(1)


def under_base_prompt(collected, S: int) -> list[dict]:
    """This rank's seed rows under the prompt without the seed, as the auxiliary loss needs them."""
    seeded = [r for r in collected.rollouts if "seed_id" in r]
    rows = []
    for i, r in enumerate(seeded):
        rows.append({**r, "prompt_ids": collected.prompts[i // S]["prompt_ids"]})
    return rows


class Seeds:
    """The seed rows of a step."""

    def __init__(self, engine, collected, config: dict, device):
        self.engine = engine
        self.config = config
        self.count = config["info_seed_num_seeds"]  # S
        self.rewards = collected.rewards  # (P, G + S)
        if self.count == 0:
            return
        self.batch = rollout.to_batch(under_base_prompt(collected, self.count), device)
        # h (P * S, H), log_q (P * S, S), of all ranks, before the update
        self.h, self.log_q = features(engine, self.batch, config)
        coef = config["info_seed_reward"]  # 0: rewards do not change
        self.rewards = add_rewards(collected.rewards, self.log_q, self.count, coef)

    def accumulate_gradients(self, update: int) -> dict:
        """Backward of info_seed_lambda * auxiliary loss over this rank's seed rows; returns
        {"seed/loss"}. update: the number of updates since the rollouts."""
        if self.count == 0 or self.config["info_seed_lambda"] == 0:
            return {}
        if self.config["info_seed_loss_type"] == "ce":
            return self.classify()
        h = self.h
        if update > 0:  # the weights have moved since
            h, _ = features(self.engine, self.batch, self.config)
        return self.contrast(h)

    def contrast(self, all_h) -> dict:
        """infonce. all_h (P * S, H): all ranks' features under the current weights. d loss / d h is
        computed from all of them at once, so micro-batches and ranks do not change the gradient."""
        leaf = all_h.clone().requires_grad_()
        with torch.enable_grad():
            loss = info_nce(leaf, self.count, self.config["info_seed_temperature"])
        grad_h = torch.autograd.grad(loss, leaf)[0]  # (P * S, H)
        ids = self.batch["ids"]
        first = dist.get_rank() * len(ids)
        own_grad_h = grad_h[first : first + len(ids)].to(ids.device)  # (p * S, H)

        def surrogate(rows, h, logits):
            # not the loss, but it has the loss's gradient
            return (own_grad_h[rows] * h).sum()

        self.backward(surrogate)
        return {"seed/loss": loss.item()}

    def classify(self) -> dict:
        """ce: cross-entropy of the head's logits with the seed ids, a mean over all ranks' rows."""
        total = torch.zeros(1)

        def cross_entropy(rows, h, logits):
            seed = (rows % self.count).to(logits.device)
            # divided by the rows of all ranks, so that micro-batches add up to the mean
            loss = torch.nn.functional.cross_entropy(logits, seed, reduction="sum") / len(self.h)
            total.add_(loss.item())
            return loss

        self.backward(cross_entropy)
        return {"seed/loss": across_ranks(total).item()}

    def backward(self, loss_of) -> None:
        """Goes backward from loss_of(rows, h, logits) of every micro-batch. Gradients add up over
        micro-batches and ranks."""
        c = self.config
        for rows, h, logits in forwards(self.engine, self.batch, c):
            learner.backward_sum(self.engine, c["info_seed_lambda"] * loss_of(rows, h, logits))

    def metrics(self, targets) -> dict:
        """Metrics of the seed rows before the update: see `seed_metrics`."""
        if self.count == 0:
            return {}
        seed_rewards = targets.task_rewards[:, -self.count :]
        return seed_metrics(self.h, self.log_q, seed_rewards, targets.weights, targets.active)


def seed_metrics(h, log_q, seed_rewards, weights, active) -> dict:
    """seed/* metrics, from h (P * S, H), log_q (P * S, S) and seed_rewards (P, S). pred_acc: how
    often the most likely seed is the right one (chance 1/S). diversity_l2: mean distance between
    two seeds' mean h. reward: mean task reward of the seed rows. With weights w (P, G + S) also
    entropy_gap: the entropy of w within the ordinary rows minus that within the seed rows, nats,
    mean over the active (P,) groups."""
    S = seed_rewards.shape[1]
    right = log_q.argmax(1) == torch.arange(len(h)) % S
    means = h.view(-1, S, h.shape[1]).mean(0)  # (S, H)
    metrics = {
        "seed/pred_acc": right.float().mean().item(),
        "seed/diversity_l2": torch.nn.functional.pdist(means).mean().item(),
        "seed/reward": seed_rewards.mean().item(),
    }
    if weights is not None and active.any():
        ordinary = entropy_within(weights[active, :-S])
        seeded = entropy_within(weights[active, -S:])
        metrics["seed/entropy_gap"] = (ordinary - seeded).mean().item()
    return metrics


def entropy_within(w):
    """(P,) entropy, in nats, of w (P, n) after its rows are scaled to sum to 1."""
    share = w / w.sum(1, keepdim=True).clamp(min=1e-30)
    return torch.special.entr(share).sum(1)  # (P,)
