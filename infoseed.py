"""InfoSeed: completions that know which seed they were asked with, so that different seeds come to
mean different answers.

    rollouts = add_completions(sampler, tokenizer, rows, rollouts, sampling, config)
    seeds = Seeds(engine, lived, config, device)    # seeds.rewards, .accumulate_gradients, .metrics

Each prompt gets S = info_seed_num_seeds more completions, one per seed id 0..S-1, from the prompt
rendered through a template with the seed in it. They join the prompt's group. An auxiliary loss
pulls together the hidden states of completions of one seed over prompts, and apart those of
different seeds:

    infonce   -mean_i mean_{j in P(i)} log softmax_{k != i}(cos(h_i, h_k) / T)_j,
              P(i) the rows of i's seed and another prompt
    ce        cross-entropy of a linear head on h, trained with the policy

h (n, H) are the final hidden states of a completion, pooled, under the prompt without the seed:
they can tell the seed only by the answer. That shapes the representation. For the behaviour there
is a reward: coef * (log q(seed | completion) + ln S), the information that the completion carries
about its seed; rows that earn it are trained under the prompt they were asked with.

P prompts of the step, p = P / world of this rank; the seed rows are prompt-major, S to a prompt.
With S = 0 there are none, and everything here does nothing.
"""

import math

import torch
import torch.distributed as dist

import learner
import rollout
from prompts import seed_prompts
from ranks import across_ranks, gather_groups

# --- completions


def number_of_seeds(c: dict) -> int:
    return c["info_seed_num_seeds"]


def add_completions(
    sampler, tokenizer, rows: list[dict], rollouts: list[dict], sampling: dict, c: dict
) -> list[dict]:
    """Groups of G + S, prompt-major: each row's G ordinary completions, then its S seeded ones,
    with a "seed_id". Their "prompt_ids" are those of the base prompt, under which they are scored,
    or with a seed reward those of the prompt they were asked with."""
    S = number_of_seeds(c)
    if S == 0:
        return rollouts
    asked = []  # p * S prompts
    for row in rows:
        asked += seed_prompts(row, tokenizer, c)
    seeds = []
    names = []
    for seed, name in zip(sampling["seeds"], sampling["names"]):
        seeds += [rollout.prompt_seed(seed, "seed", z) for z in range(S)]
        names += [f"{name}-z{z}" for z in range(S)]
    own_sampling = {**sampling, "seeds": seeds, "names": names}
    seeded = rollout.generate(sampler, tokenizer, asked, 1, own_sampling)
    for i, r in enumerate(seeded):
        r["seed_id"] = i % S
        r["prompt_ids"] = rows[i // S]["prompt_ids"]
        if c["info_seed_reward"] > 0:  # what a seed is paid for must be learnt where it is seen
            r["prompt_ids"] = asked[i]

    G = len(rollouts) // max(1, len(rows))
    joined = []
    for x in range(len(rows)):
        joined += rollouts[x * G : (x + 1) * G]
        joined += seeded[x * S : (x + 1) * S]
    return joined


# --- losses, of the whole step's seed rows


def info_nce(h, S: int, temperature: float):
    """The infonce loss of h (P * S, H), P >= 2. Khosla et al. 2020, arXiv:2004.11362"""
    rows = torch.arange(len(h))  # prompt-major
    seed = rows % S
    prompt = rows // S
    itself = torch.eye(len(h), dtype=torch.bool)
    unit = torch.nn.functional.normalize(h, dim=1)
    logits = (unit @ unit.T / temperature).masked_fill(itself, -math.inf)  # k != i
    positive = (seed[:, None] == seed) & (prompt[:, None] != prompt)  # (P * S, P * S): j in P(i)
    # filled and not multiplied: that of a row with itself is -inf
    log_p = logits.log_softmax(1).masked_fill(~positive, 0.0)
    return -(log_p.sum(1) / positive.sum(1)).mean()


def log_q(h, S: int, temperature: float):
    """log q(seed | completion), (P * S, S), without a head: softmax of cos(h_i, a seed's mean h)
    over T.

    The means leave out all rows of i's own prompt: with only i left out, its own seed would be the
    one mean without that prompt, and guessing would score below chance."""
    groups = h.view(-1, S, h.shape[1])  # (P, S, H)
    means = (groups.sum(0) - groups) / (len(groups) - 1)  # (P, S, H)
    cosines = torch.cosine_similarity(groups[:, :, None], means[:, None], dim=3)  # (P, S, S)
    return (cosines / temperature).log_softmax(2).flatten(0, 1)


def add_rewards(rewards, log_q, S: int, coef: float):
    """rewards (P, G + S) with coef * (log q(seed | completion) + ln S) added in the last S columns:
    nothing for a completion that tells nothing."""
    seed = torch.arange(len(log_q)) % S
    own = log_q.gather(1, seed[:, None]).view(-1, S)  # (P, S)
    information = own + math.log(S)  # nats; 0 at a guess
    return torch.cat([rewards[:, :-S], rewards[:, -S:] + coef * information], 1)


# --- on all ranks


@torch.no_grad()
def features(engine, batch: dict, c: dict) -> tuple:
    """(h (P * S, H), log q (P * S, S)) of all ranks' seed rows, under the weights as they are."""
    S = c["info_seed_num_seeds"]
    plan = learner.agree_on_plan(batch, 1, c)
    h = None
    logits = None
    for rows in plan.learning:
        part = rollout.take(batch, rows)
        pooled, scores = engine(
            part["ids"], part["prompt_lengths"], part["lengths"], pool=c["info_seed_pooling"]
        )
        if h is None:  # its width is known now
            h = pooled.new_zeros(len(batch["ids"]), pooled.shape[1])  # (p * S, H)
        h[rows] = pooled
        if scores is not None:  # of the trained head ("ce")
            if logits is None:
                logits = scores.new_zeros(len(h), S)
            logits[rows] = scores
    h = gather_groups(h)
    if logits is None:
        return h, log_q(h, S, c["info_seed_temperature"])
    return h, gather_groups(logits).log_softmax(1)


def under_base_prompt(lived, S: int) -> list[dict]:
    """This rank's seed rows as the auxiliary loss sees them: under the prompt without the seed."""
    seeded = [r for r in lived.rollouts if "seed_id" in r]
    rows = []
    for i, r in enumerate(seeded):
        rows.append({**r, "prompt_ids": lived.rows[i // S]["prompt_ids"]})
    return rows


class Seeds:
    """The seed rows of a step."""

    def __init__(self, engine, lived, config: dict, device):
        self.engine = engine
        self.config = config
        self.count = number_of_seeds(config)
        self.task_rewards = lived.rewards  # (P, G + S)
        self.rewards = lived.rewards
        if self.count == 0:
            return
        self.batch = rollout.to_batch(under_base_prompt(lived, self.count), device)
        # h (P * S, H), log_q (P * S, S): of all ranks, before the update
        self.h, self.log_q = features(engine, self.batch, config)
        coef = config["info_seed_reward"]  # at 0 the rewards stay as they are
        self.rewards = add_rewards(lived.rewards, self.log_q, self.count, coef)

    def accumulate_gradients(self, update: int) -> dict:
        """Backward of info_seed_lambda * L_seed over this rank's seed rows; {"seed/loss"}.
        update: how many updates there have been since the rollouts."""
        if self.count == 0 or self.config["info_seed_lambda"] == 0:
            return {}
        if self.config["info_seed_loss_type"] == "ce":
            return self.classify()
        h = self.h
        if update > 0:  # the weights have moved since
            h, _ = features(self.engine, self.batch, self.config)
        return self.contrast(h)

    def contrast(self, h) -> dict:
        """infonce: h (P * S, H), all ranks' features under the current weights, give d L / d h, so
        micro-batches and ranks do not change the gradient."""
        leaf = h.clone().requires_grad_()
        with torch.enable_grad():
            loss = info_nce(leaf, self.count, self.config["info_seed_temperature"])
        slope = torch.autograd.grad(loss, leaf)[0]  # (P * S, H)
        ids = self.batch["ids"]
        first = dist.get_rank() * len(ids)
        own_slope = slope[first : first + len(ids)].to(ids.device)  # (p * S, H)

        def surrogate(rows, h, logits):
            # another number than the loss, with the same gradient
            return (own_slope[rows] * h).sum()

        self.backward(surrogate)
        return {"seed/loss": loss.item()}

    def classify(self) -> dict:
        """ce: the head's logits against the seed ids, a mean over all ranks' rows."""
        total = torch.zeros(1)

        def cross_entropy(rows, h, logits):
            seed = (rows % self.count).to(logits.device)
            # over the rows of all ranks, so that micro-batches add up to the mean
            loss = torch.nn.functional.cross_entropy(logits, seed, reduction="sum") / len(self.h)
            total.add_(loss.item())
            return loss

        self.backward(cross_entropy)
        return {"seed/loss": across_ranks(total).item()}

    def backward(self, loss_of) -> None:
        """loss_of(rows, h, logits) of every micro-batch, summed over all ranks."""
        c = self.config
        plan = learner.agree_on_plan(self.batch, 1, c)
        for rows in plan.learning:
            part = rollout.take(self.batch, rows)
            h, logits = self.engine(
                part["ids"], part["prompt_lengths"], part["lengths"], pool=c["info_seed_pooling"]
            )
            # times world, because DeepSpeed averages over ranks what is meant to be a sum
            loss = c["info_seed_lambda"] * dist.get_world_size() * loss_of(rows, h, logits)
            self.engine.backward(loss, scale_wrt_gas=False)

    def metrics(self, targets: dict) -> dict:
        """Of the seed rows before the update; see `measure`."""
        if self.count == 0:
            return {}
        seed_rewards = self.task_rewards[:, -self.count :]
        return measure(self.h, self.log_q, seed_rewards, targets.get("weights"), targets["active"])


def measure(h, log_q, seed_rewards, weights, active) -> dict:
    """pred_acc, how often the most likely seed is the right one (chance 1/S); diversity_l2, the
    mean distance of two seeds' mean h; their mean task reward; and with weights w (P, G + S)
    entropy_gap, how much more entropy w has within the ordinary rows than within the seed rows,
    nats, mean over active groups."""
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
    """Entropy in nats of some columns of w (P, n), made to sum to 1."""
    share = w / w.sum(1, keepdim=True).clamp(min=1e-30)
    return torch.special.entr(share).sum(1)  # (P,)
