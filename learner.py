"""The learner: from a batch of rollouts and their rewards to accumulated gradients, the same on one rank and on many.

    group = measure_groups(engine, reference, batch, rollouts, rows, rewards, right, config)       # rewards and what else the objective asks for, (P, G)
    targets = group_targets(group, tau, beta, config)                       # (P, G): weights, advantages, active groups
    metrics = accumulate_gradients(engine, batch, targets, beta, config, norm)      # then engine.step()

P prompts, G completions each, N = P*G rows; p = P / world prompts of this rank; n rows of a micro-batch; T tokens of a completion.
"""

import math

import torch
import torch.distributed as dist

import loss as L
import packing
import rollout
import scoring
from checks import OBJECTIVES
from common import RunStopped
from policy import completion_mask
from ranks import across_ranks, gather_groups

# --- micro-batches


def unit_tokens(batch: dict, unit: int, pack: bool) -> tuple[list[int], list[int]]:
    """Of every `unit` neighbouring rows: the tokens they cost alone, padded or packed, and how many fewer, packed, behind the unit before them:
    those of a prompt that both have."""
    total = (batch["prompt_lengths"] + batch["lengths"]).cpu().view(-1, unit)
    if not pack:
        return (total.amax(1) * unit).tolist(), [0] * len(total)
    again = (
        (batch["prompt_lengths"] * packing.continues(batch["ids"], batch["prompt_lengths"]))
        .cpu()
        .view(-1, unit)
    )
    return (total.sum(1) - again[:, 1:].sum(1)).tolist(), again[:, 0].tolist()


def plan_micro_batches(
    batch: dict, budget: int, unit: int, pack: bool, at_least: int = 1, idle=None
) -> list:
    """Row indices of each micro-batch: as many as fit in `budget` tokens, `unit` neighbouring rows (a group) never torn apart. Packed rows keep
    their order, for neighbours share prompts; padded ones stand longest first. Then halved until there are `at_least`: ranks must agree on the number.
    idle (N,) bool: rows without a gradient; they get micro-batches of their own, the first ones."""
    alone, saved = unit_tokens(batch, unit, pack)
    rests = [False] * len(alone) if idle is None else idle.cpu().view(-1, unit).all(1).tolist()
    bins, used = [], 0
    for u in sorted(range(len(alone)), key=lambda u: (not rests[u], 0 if pack else -alone[u])):
        if pack:
            more = alone[u] - saved[u] * (
                bool(bins) and bins[-1][-1] == u - 1
            )  # the prompt is shared with its neighbour only
        else:
            more = alone[bins[-1][0]] if bins else 0  # padded to the longest, which came first
        if bins and used + more <= budget and rests[u] == rests[bins[-1][0]]:
            bins[-1].append(u)
            used += more
        else:
            bins.append([u])
            used = alone[u]
    while len(bins) < at_least:
        i = max(range(len(bins)), key=lambda i: len(bins[i]))
        half = len(bins[i]) // 2
        bins[i : i + 1] = [bins[i][:half], bins[i][half:]]
    return [(torch.tensor(b)[:, None] * unit + torch.arange(unit)).flatten() for b in bins]


def agree_on_plan(batch: dict, unit: int, c: dict, idle=None) -> tuple[list, bool]:
    """The micro-batches of this rank, as many on every rank, and whether groups of `unit` rows had to be cut because one of them,
    on any rank, exceeds the budget."""
    budget, pack = c["max_tokens_per_micro_batch"], c["pack_sequences"]
    cut = max(unit_tokens(batch, unit, pack)[0]) > budget
    mine = torch.tensor(
        [cut, *(len(plan_micro_batches(batch, budget, u, pack, idle=idle)) for u in (unit, 1))]
    )
    agreed = across_ranks(mine, dist.ReduceOp.MAX).tolist()
    cut = unit > 1 and bool(agreed[0])
    return plan_micro_batches(
        batch, budget, 1 if cut else unit, pack, agreed[2 if cut else 1], idle
    ), cut


@torch.no_grad()
def score_rows(model, batch: dict, plan: list, entropy: bool = False):
    """Log-probs (N, T) of all rows under `model`, or the entropies of its next-token distributions; 0 outside completions."""
    found = torch.zeros_like(batch["sampler_logps"])
    for rows in plan:
        part = rollout.take(batch, rows)
        values = model(part["ids"], part["prompt_lengths"], part["lengths"], want_entropy=entropy)[
            int(entropy)
        ]
        found[rows, : values.shape[1]] = values
    return found


# --- the step's loss


def measure_groups(engine, reference, batch: dict, lived, rewards, c: dict) -> dict:
    """What group_targets needs of the whole step, all ranks: "rewards", "task_rewards", "lengths"
    and what this config asks for. Sets batch["ref_logps"].

    lived: experience.Lived; rewards (P, G): its rewards, with what InfoSeed adds to them."""
    rows, rollouts, right = lived.rows, lived.rollouts, lived.right

    def gather(values):
        return gather_groups(values.view(len(rows), -1))  # (P, G)

    group = {
        "rewards": rewards,
        "task_rewards": lived.rewards,
        "lengths": gather(batch["lengths"]),
    }
    if reference is not None or c["policy_entropy_bonus_coef"] > 0:
        plan, _ = agree_on_plan(batch, 1, c)
    if reference is not None:
        batch["ref_logps"] = score_by_reference(reference, batch, plan, c)
        group["ref_scores"] = gather(group_scores(batch["ref_logps"], batch, c))
    if c["unlikeliness_coef"] > 0:
        group["seq_logps"] = gather(batch["sampler_logps"].sum(1))
    if c["policy_entropy_bonus_coef"] > 0:
        entropies = score_rows(engine, batch, plan, entropy=True)
        group["entropies"] = gather(entropies.sum(1) / batch["lengths"])
    if OBJECTIVES[c["objective"]].term == "answer_entropy":
        group["clusters"] = gather(scoring.answer_clusters(rollouts, rows, right, c))
        group["mean_logps"] = gather(batch["sampler_logps"].sum(1) / batch["lengths"])
    if c["xdr_mode_adaptive_tau"]:
        modes = [len(modes or ()) for _, modes in scoring.correct_modes(rollouts, rows, right, c)]
        group["correct_modes"] = gather(torch.tensor(modes))[:, 0]  # (P,)
    return group


def score_by_reference(reference, batch: dict, plan: list, c: dict):
    """Log-probs (N, T) of all rows under the reference model, which may wait in CPU memory."""
    if c["reference_placement"] != "cpu":
        return score_rows(reference, batch, plan)
    reference.to(batch["ids"].device)
    logps = score_rows(reference, batch, plan)
    reference.to("cpu")
    return logps


def group_scores(logps, batch: dict, c: dict):
    """The sequence scores (N,) that maxent compares within a group."""
    norm, longest = c["maxent_score_norm"], c["max_completion_length"]
    return L.sequence_scores(logps, batch["lengths"], norm, longest, c["maxent_score_scale"])


def own_targets(targets: dict, world) -> dict:
    """This rank's groups (p, G) of the whole step's (P, G)."""
    own = {}
    for name, value in targets.items():
        share = len(value) // world.size
        own[name] = value[world.rank * share : (world.rank + 1) * share]
    return own


def step_counts(targets: dict, lengths) -> dict:
    """The normalisers of the step, all ranks: rows, prompts, completion tokens, active groups (at least 1)."""
    return {
        "rows": lengths.numel(),
        "prompts": len(lengths),
        "tokens": int(lengths.sum()),
        "active": max(1, int(targets["active"].sum())),
    }


def shaped_rewards(group: dict, c: dict):
    """The rewards, (P, G), with what the config makes of a row's rarity and of its entropy."""
    rewards = group["rewards"]
    if "seq_logps" in group:
        rewards = L.unlikely_rewards(rewards, group["seq_logps"], c["unlikeliness_coef"])
    if "entropies" in group:
        bonus = L.entropy_bonus(rewards, group["entropies"], c["policy_entropy_bonus_coef"])
        rewards = rewards + bonus
    return rewards


def row_advantages(group: dict, c: dict):
    """The advantage of each row, (P, G), as the table of objectives says."""
    objective = OBJECTIVES[c["objective"]]
    rewards = shaped_rewards(group, c)
    if objective.advantage == "pass_at_k":
        return L.pass_at_k_advantages(rewards, group["pass_k"])
    return L.group_advantages(rewards, c["scale_rewards"] or objective.scale)


def score_targets(group: dict, tau: float, beta: float, c: dict) -> dict:
    """group_targets of an objective whose loss is over the scores of a group. Its "advantages" say what it asks of each row; they
    are trained on under maxent_loss="policy_gradient" only."""
    rewards, ref_scores = group["rewards"], group.get("ref_scores")
    utilities = L.log_reward_targets(
        shaped_rewards(group, c), c["maxent_q_temperature"], c["maxent_q_epsilon"]
    )
    active = L.active_groups(rewards, c["maxent_skip_equal_groups"])
    targets = {
        "rewards": group.get("task_rewards", rewards),
        "active": active,
        "utilities": utilities,
    }
    if OBJECTIVES[c["objective"]].group_loss == "listwise":
        weights = targets["weights"] = L.maxent_weights(utilities, ref_scores, tau, beta)
        # (w - 1/G) summed over the group, then a mean over prompts; G * w - 1 would not be exactly 0 at w = 1/G
        G = rewards.shape[1]
        advantages = G * (weights - 1 / G)
    else:
        goals = targets["goals"] = L.balance_goals(utilities, ref_scores, tau, beta)
        advantages = goals - goals.mean(1, keepdim=True)
    if c["maxent_group_weight"] == "spread":
        targets["share"] = L.reward_spread(rewards)
        advantages = advantages * targets["share"][:, None]
    targets["advantages"] = advantages.masked_fill(~active[:, None], 0.0)
    return targets


def group_targets(group: dict, tau: float, beta: float, c: dict) -> dict:
    """What the whole step asks of the policy: weights and active groups (maxent, xdr), advantages, all (P, G).

    group: "rewards" and "lengths" (P, G); where InfoSeed has added something to the rewards "task_rewards" (P, G), by which rows are best or correct;
    where the config needs them "ref_scores", "entropies" (mean over a row's tokens), "seq_logps", "clusters", "mean_logps" (P, G),
    "correct_modes" (P,) and "pass_k"."""
    rewards, (P, G) = group["rewards"], group["rewards"].shape
    objective = OBJECTIVES[c["objective"]]
    if objective.group_loss:
        return score_targets(group, tau, beta, c)
    advantages = row_advantages(group, c)
    targets = {
        "rewards": group.get("task_rewards", rewards),
        "active": ~L.equal_groups(rewards),
        "advantages": advantages,
    }
    if objective.weights == "rows":
        utilities = L.xdr_utilities(
            advantages, group["lengths"], c["xdr_utility"], c["max_completion_length"]
        )
        taus = (
            L.mode_adaptive_tau(tau, group["correct_modes"])
            if c["xdr_mode_adaptive_tau"]
            else [tau] * P
        )
        targets["weights"] = L.xdr_weights(
            utilities, group.get("ref_scores"), taus, beta if c["xdr_ref_tilt"] else 0.0
        )
        if not math.isinf(tau):  # infinite: the dr_grpo path, to the bit
            targets["advantages"] = G * targets["weights"] * advantages
    if objective.term == "answer_entropy":
        entropy = L.semantic_entropy(group["clusters"], group["mean_logps"])
        targets["advantages"] = advantages * L.semantic_scale(entropy, c["seed_grpo_alpha"], G)
    return targets


def couples_rows(c: dict) -> bool:
    """Whether part of the loss is a function of a whole group's scores."""
    return not policy_gradient(c) or c["mode_entropy_coef"] > 0


def policy_gradient(c: dict) -> bool:
    """Whether advantages act on the log-probs of tokens; otherwise the whole loss is over the scores of groups."""
    group_loss = OBJECTIVES[c["objective"]].group_loss
    return not group_loss or (group_loss == "listwise" and c["maxent_loss"] == "policy_gradient")


def scores_of(logps, lengths, c: dict):
    """Sequence scores (n,) for group_loss, in the norm that its loss asks for."""
    group_loss, scale = OBJECTIVES[c["objective"]].group_loss, 1.0
    if group_loss == "listwise" and c["maxent_loss"] == "mle":
        norm = "length"
    elif group_loss:
        norm, scale = c["maxent_score_norm"], c["maxent_score_scale"]
    else:
        norm = c["mode_entropy_score_norm"]
    return L.sequence_scores(logps, lengths, norm, c["max_completion_length"], scale)


def group_loss(scores, targets: dict, c: dict, norm: dict):
    """The part of the loss that takes the rows of a group together, from their scores (p, G): that of the objective, or the
    mode-entropy term."""
    kind = OBJECTIVES[c["objective"]].group_loss
    if kind == "balance":
        loss, wanted = L.balance_loss, targets["goals"]
    elif kind == "listwise":
        loss = L.mle_loss if c["maxent_loss"] == "mle" else L.listwise_loss
        wanted = targets["weights"]
    if kind:
        return loss(scores, wanted, targets["active"], norm["active"], targets.get("share"))
    longest = (
        c["max_completion_length"] if c["mode_entropy_score_norm"] == "sum" else 1
    )  # the other scores are per token already
    return c["mode_entropy_coef"] * L.mode_entropy_loss(
        scores, targets["rewards"], norm["prompts"] * longest
    )


def surrogate(logps, part: dict, advantages, c: dict) -> tuple:
    """What a policy gradient maximises, per token, and the tokens clipped below and above: each (n, T), or (n, 1) for gspo."""
    log_ratio = logps - part["old_logps"]
    ratio = OBJECTIVES[c["objective"]].ratio
    if ratio == "cispo":
        return L.cispo_surrogate(logps, log_ratio, advantages, c["cispo_epsilon_max"])
    if ratio == "sequence":
        log_ratio = log_ratio.sum(1, keepdim=True) / part["lengths"][:, None]
    high = c["epsilon_high"] if c["epsilon_high"] >= 0 else c["epsilon"]
    return L.clipped_surrogate(log_ratio, advantages, c["epsilon"], high, c["delta"])


def adds_kl(c: dict) -> bool:
    """Whether beta * KL is a term of the loss; maxent and a tilted xdr have beta in their weights instead."""
    if OBJECTIVES[c["objective"]].beta == "weights":
        return c["maxent_kl"]
    return not c["xdr_ref_tilt"]


def token_loss(logps, entropy, part: dict, advantages, beta: float, c: dict, norm: dict) -> tuple:
    """The part of the loss that is a sum over tokens: surrogate, KL, entropy. (loss, clipped below, clipped above, KL sum)."""
    mask = completion_mask(part["lengths"])
    share = L.token_weights(
        OBJECTIVES[c["objective"]].tokens,
        mask,
        norm["rows"],
        norm["tokens"],
        c["max_completion_length"],
    )  # (n, T)
    total, low, high, kl_sum = logps.new_zeros(()), mask & False, mask & False, logps.new_zeros(())
    if policy_gradient(c):
        gain, low, high = surrogate(logps, part, advantages, c)
        correction = L.importance_ratio(
            part["old_logps"],
            part["sampler_logps"],
            part["lengths"],
            c["importance_sampling"],
            c["importance_sampling_cap"],
        )
        total = total - (share * correction * gain).sum()
    if OBJECTIVES[c["objective"]].term == "token_entropy":
        total = total - c["token_entropy_coef"] * (share * entropy).sum()
    if "ref_logps" in part:
        kl_sum = (L.k3_kl(logps.detach(), part["ref_logps"]) * mask).sum()
        if adds_kl(c):
            total = (
                total
                + beta
                * (
                    share
                    * {"k2": L.k2_kl, "k3": L.k3_kl}[c["kl_loss_type"]](logps, part["ref_logps"])
                ).sum()
            )
    return total, (low & mask).sum(), (high & mask).sum(), kl_sum


def idle_rows(targets: dict, beta: float, c: dict):
    """(p * G,) bool: rows of groups that the loss does not depend on, as a rule those of equal rewards. They need no backward."""
    entropy_term = OBJECTIVES[c["objective"]].term == "token_entropy"
    if c["mode_entropy_coef"] > 0 or entropy_term or (adds_kl(c) and beta > 0):
        return torch.zeros_like(targets["rewards"], dtype=torch.bool).flatten()
    idle = ~targets["active"] if couples_rows(c) else (targets["advantages"] == 0).all(1)
    return idle.repeat_interleave(targets["rewards"].shape[1])


def accumulate_gradients(
    engine, batch: dict, targets: dict, beta: float, c: dict, norm: dict
) -> dict:
    """Forward over all micro-batches of one update, backward where there is a gradient; the metrics of the step, over all ranks.

    targets: this rank's groups (p, G); norm: counts of the whole step. Sets batch["old_logps"] in the first update of a batch."""
    G, world = targets["rewards"].shape[1], dist.get_world_size()
    targets = {key: value.to(batch["ids"].device) for key, value in targets.items()}
    idle = idle_rows(targets, beta, c)
    plan, cut = agree_on_plan(batch, G if couples_rows(c) else 1, c, idle)
    # The last ones go backward: as many on every rank, and one at least, for the optimizer to step on
    backwards = max(
        1,
        int(
            across_ranks(
                torch.tensor(sum(not idle[rows].all() for rows in plan)), dist.ReduceOp.MAX
            )
        ),
    )
    coefficients, value, first, finite = None, 0.0, "old_logps" not in batch, True
    if cut:  # a group does not fit: its members' scores come from a pass of their own, and each row gets d loss / d score
        scores = scores_of(score_rows(engine, batch, plan), batch["lengths"], c).requires_grad_()
        value = group_loss(scores.view(-1, G), targets, c, norm)
        coefficients, value = torch.autograd.grad(value, scores)[0], value.item()
    old_logps = torch.zeros_like(batch["sampler_logps"])
    sums = torch.zeros(5, dtype=torch.float64)
    sums[0] = value
    for i, rows in enumerate(plan):
        part = rollout.take(batch, rows)
        learns = i >= len(plan) - backwards
        with torch.set_grad_enabled(learns):
            logps, entropy = engine(part["ids"], part["prompt_lengths"], part["lengths"])  # (n, T)
        if first:
            part["old_logps"] = logps.detach()
            old_logps[rows, : logps.shape[1]] = part["old_logps"]
        loss, low, high, kl = token_loss(
            logps, entropy, part, targets["advantages"].flatten()[rows], beta, c, norm
        )
        reported = loss.item()
        if couples_rows(c):
            scores = scores_of(logps, part["lengths"], c)
            if cut:
                loss = loss + (coefficients[rows] * scores).sum()
            else:
                whole = {k: v[rows[::G] // G] for k, v in targets.items()}
                coupled = group_loss(scores.view(-1, G), whole, c, norm)
                loss, reported = loss + coupled, reported + coupled.item()
        logps_sum, *measured = torch.stack(
            [x.detach().sum().float() for x in (logps, entropy, kl, low, high)]
        ).tolist()  # one wait for the device
        finite = finite and math.isfinite(
            reported + logps_sum
        )  # a group without a gradient may not be in the loss
        if learns:
            # A NaN loss can have a finite gradient, or none: make sure it has not, then the optimizer skips the step on every rank.
            # Times world, because DeepSpeed averages over ranks what is meant to be a sum.
            engine.backward(loss * (world if finite else math.nan), scale_wrt_gas=False)
        sums += torch.tensor([reported, *measured])
    if first:
        batch["old_logps"] = old_logps
    total, entropy, kl, low, high = across_ranks(sums).tolist()
    tokens = norm["tokens"]
    metrics = {
        "loss": total,
        "entropy": entropy / tokens,
        "clip_ratio/low": low / tokens,
        "clip_ratio/high": high / tokens,
    }
    return metrics | ({"kl": kl / tokens} if "ref_logps" in batch else {})


def group_metrics(rewards, lengths) -> dict:
    """What the groups of the step were worth and how long their completions were; rewards and lengths (P, G)."""
    return {
        "reward": rewards.mean().item(),
        "reward_std": rewards.std(1).mean().item(),
        "frac_reward_zero_std": L.equal_groups(rewards).float().mean().item(),
        "completions/mean_length": lengths.mean().item(),
        "completions/max_length": lengths.max().item(),
    }


def sampler_mismatch(batch: dict, limit: float) -> dict:
    """How far the sampler's log-probs are from the trainer's before the update, over all ranks. They should be the same policy: a mean
    difference above `limit` (nats, -1 off) means that weights did not arrive, and stops the run."""
    mask = completion_mask(batch["lengths"])
    d = (batch["old_logps"] - batch["sampler_logps"])[mask]
    ratio = d.clamp(max=20).exp()
    sums = across_ranks(torch.stack([d.abs().sum(), ratio.sum(), mask.sum()]))
    mean, ratio_mean = (sums[:2] / sums[2]).tolist()
    largest, ratio_max, ratio_min = across_ranks(
        torch.stack([d.abs().max(), ratio.max(), -ratio.min()]), dist.ReduceOp.MAX
    ).tolist()
    if limit >= 0 and mean > limit:
        raise RunStopped(
            f"the sampler's log-probs differ from the trainer's by {mean:.3f} nats a token on average (at most {largest:.1f}), "
            f"over max_logp_difference={limit}: the rollout engine does not hold the policy's weights, or the limit is too low for this dtype "
            f"(bfloat16 alone makes about 0.01)"
        )
    found = {
        "sampling_logp_difference/mean": mean,
        "sampling_logp_difference/max": largest,
        "importance_sampling_ratio/mean": ratio_mean,
        "importance_sampling_ratio/min": -ratio_min,
        "importance_sampling_ratio/max": ratio_max,
    }
    return {f"sampling/{name}": value for name, value in found.items()}
