"""The learner: from a step's completions and rewards to accumulated gradients, the same on one rank
and on many.

    measured = measure_groups(engine, reference, batch, collected, rewards, config)  # (P, G) each
    targets = group_targets(measured, tau, beta, config)    # weights, advantages, active groups
    counts = step_counts(targets, measured.lengths)
    local = local_targets(targets, world)    # this rank's groups, (p, G)
    metrics = accumulate_gradients(engine, batch, local, beta, config, counts)
    engine.step()

A row is a completion with its prompt (not, as in experience.py, a row of the dataset). P prompts of
the step, p = P / world of this rank. G rows of a group, InfoSeed's S included (train.py,
experience.py and infoseed.py write G + S). N = p*G rows of this rank (in loss.py: of the step), n
of a micro-batch. T tokens of the longest completion. How the objectives differ is listed in
checks.OBJECTIVES.

Four words for a group: it is *equal* if all its rewards are, *active* if a loss over groups counts
it, *resting* if it gets no gradient at all, so that a forward is enough, and *split* if its rows do
not fit into one micro-batch. A loss over groups needs all scores of a split group at once: see
score_gradients() and coupled_loss().

batch: the tensors of rollout.to_batch() for the N rows, plus "ref_logps" (measure_groups) and
"old_logps" (accumulate_gradients), each (N, T). micro_batch: n rows of it, plus "row" (their index
in batch), "advantages", "split" and "score_grads" (accumulate_gradients), each (n,).
"""

import math
import time
from typing import NamedTuple

import torch
import torch.distributed as dist

import loss as losses  # `loss` is a value here
import packing
import rollout
import scoring
from checks import (
    OBJECTIVES,
    adds_kl,
    is_policy_gradient,
    rewards_seeds,
    scale_of,
    skipped_groups,
    uses_ref_scores,
    uses_scores,
)
from common import RunStopped, UserError
from policy import completion_mask
from ranks import across_ranks, gather_rows, wait_for_gpu

# What a micro-batch adds to the sums of an update: its loss, then sums over completion tokens.
# accumulate_gradients() relies on "loss" and "logps" coming first.
SUMS = ("loss", "logps", "entropy", "kl", "clipped_low", "clipped_high")


class MicroBatchPlan(NamedTuple):
    """Row indices of each micro-batch of this rank. The end of this file shows how they are
    chosen."""

    resting: list  # forward only: nothing in the loss depends on these rows
    learning: list  # forward and backward, after the resting ones; the same number on every rank
    missing: int = 0  # extra forwards, so that all ranks make the same number (for ZeRO-3)
    split: torch.Tensor | None = None  # (N,) bool: rows of split groups; None: no rank has any

    @property
    def micro_batches(self) -> list:
        return self.resting + self.learning


class GroupMeasures(NamedTuple):
    """What was measured about a step's groups, on all ranks; None where this config does not use
    it."""

    rewards: torch.Tensor  # (P, G) to be maximised: the reward functions', plus InfoSeed's
    task_rewards: torch.Tensor  # (P, G) without InfoSeed's: these decide which rows are best
    lengths: torch.Tensor  # (P, G) tokens
    ref_scores: torch.Tensor | None = None  # (P, G) the reference's; they tilt weights or goals
    seq_logps: torch.Tensor | None = None  # (P, G) the sampler's, summed over a row's tokens
    mean_logps: torch.Tensor | None = None  # (P, G) their means over a row's tokens
    entropies: torch.Tensor | None = None  # (P, G) mean over a row's tokens, in nats
    clusters: torch.Tensor | None = None  # (P, G) rows of a group with the same answer share one
    correct_modes: torch.Tensor | None = None  # (P,) different right answers of a group


class GroupTargets(NamedTuple):
    """What the groups of a step, or of one rank, ask of the policy; None where this objective does
    not use it."""

    task_rewards: torch.Tensor  # (P, G) without InfoSeed's: these decide which rows are best
    # (P,) bool: groups that maxent and flow learn from; for other objectives only metrics use it
    active: torch.Tensor
    advantages: torch.Tensor | None = None  # (P, G) for a policy gradient
    utilities: torch.Tensor | None = None  # (P, G) log q, of which weights and goals are made
    weights: torch.Tensor | None = None  # (P, G) w: maxent learns it, xdr scales advantages by it
    goals: torch.Tensor | None = None  # (P, G) flow's
    group_weight: torch.Tensor | None = None  # (P,)

    def select(self, groups):
        """The targets of some groups, given by index, slice or mask."""
        return GroupTargets(*[None if value is None else value[groups] for value in self])

    def to(self, device):
        return GroupTargets(*[None if value is None else value.to(device) for value in self])


# --- what the groups of a step ask of the policy


def measure_groups(engine, reference, batch: dict, collected, rewards, c: dict) -> GroupMeasures:
    """What group_targets needs to know about the whole step, measured over all ranks. Sets
    batch["ref_logps"].

    collected: experience.Collected; rewards (P, G): its rewards plus what InfoSeed adds to them."""
    prompts = collected.prompts  # p
    rollouts = collected.rollouts
    right = collected.right
    lengths = batch["lengths"]  # (N,)

    def gather(values):
        return gather_rows(values.view(len(prompts), -1))  # (P, G)

    measures = {}
    # passes without a gradient need not keep a group together: the unit is one row
    if reference is not None or c["policy_entropy_bonus_coef"] > 0:
        plan = agree_on_plan(batch, 1, c)
    if reference is not None:
        batch["ref_logps"] = reference_logps(reference, batch, plan, c)
    if uses_ref_scores(c):
        measures["ref_scores"] = gather(maxent_scores(batch["ref_logps"], lengths, c))
    # the sampler's log-probs stand for the policy's, which accumulate_gradients() computes later
    if c["unlikeliness_coef"] > 0:
        measures["seq_logps"] = gather(batch["sampler_logps"].sum(1))
    if c["policy_entropy_bonus_coef"] > 0:
        entropies = forward_rows(engine, batch, plan, entropy=True)  # (N, T)
        measures["entropies"] = gather(entropies.sum(1) / lengths)
    if OBJECTIVES[c["objective"]].term == "semantic_entropy":
        measures["clusters"] = gather(scoring.answer_clusters(rollouts, prompts, right, c))
        measures["mean_logps"] = gather(batch["sampler_logps"].sum(1) / lengths)
    if c["xdr_mode_adaptive_tau"]:
        counts = []
        for _, modes in scoring.correct_modes(rollouts, prompts, right, c):
            counts.append(len(modes or ()))  # None: a task that can't tell answers apart
        measures["correct_modes"] = gather(torch.tensor(counts))[:, 0]  # (P,)
    return GroupMeasures(
        rewards=rewards,
        task_rewards=collected.rewards,
        lengths=gather(lengths),
        **measures,
    )


def reference_logps(reference, batch: dict, plan: MicroBatchPlan, c: dict):
    """Log-probs (N, T) of all rows under the reference model, which may be kept in CPU memory."""
    if c["reference_placement"] != "cpu":
        return forward_rows(reference, batch, plan)
    reference.to(batch["ids"].device)
    logps = forward_rows(reference, batch, plan)
    reference.to("cpu")  # frees its memory on the device for the policy
    return logps


def maxent_scores(logps, lengths, c: dict):
    """Sequence scores (n,), by maxent_score_norm and maxent_score_scale. The reference's tilt the
    weights; the policy's are used by the loss and by the meta-controller."""
    return losses.sequence_scores(
        logps,
        lengths,
        c["maxent_score_norm"],
        c["max_completion_length"],
        c["maxent_score_scale"],
    )


def policy_scores(batch: dict, G: int, c: dict):
    """maxent_scores of the policy before the update, (P, G), of all ranks."""
    scores = maxent_scores(batch["old_logps"], batch["lengths"], c)  # (p * G,)
    return gather_rows(scores.view(-1, G))


def group_targets(measured: GroupMeasures, tau: float, beta: float, c: dict) -> GroupTargets:
    """What the whole step asks of the policy under this objective. c: the config, with the pkpo_k
    of this step."""
    objective = OBJECTIVES[c["objective"]]
    if objective.group_loss:
        return group_loss_targets(measured, tau, beta, c)
    # from here on measured.rewards are the shaped ones
    measured = measured._replace(rewards=shaped_rewards(measured, c))
    G = measured.rewards.shape[1]
    advantages = row_advantages(measured, c)  # (P, G)
    weights = None
    if objective.row_weights:
        weights = row_weights(advantages, measured, tau, beta, c)  # (P, G)
        if not math.isinf(tau):  # at infinity the advantages stay those of dr_grpo, to the bit
            advantages = G * weights * advantages
    if objective.term == "semantic_entropy":
        entropy = losses.semantic_entropy(measured.clusters, measured.mean_logps)  # (P,)
        advantages = advantages * losses.semantic_scale(entropy, c["seed_grpo_alpha"], G)
    # only the metrics of the weights use it
    active = ~losses.equal_groups(measured.rewards)
    return GroupTargets(measured.task_rewards, active, advantages=advantages, weights=weights)


def group_loss_targets(measured: GroupMeasures, tau: float, beta: float, c: dict) -> GroupTargets:
    """group_targets for an objective whose loss is over the scores of a group (maxent, flow).
    Under maxent_loss="policy_gradient" the weights become advantages."""
    rewards = measured.rewards
    ref_scores = measured.ref_scores
    utilities = losses.log_reward_targets(
        shaped_rewards(measured, c), c["maxent_q_temperature"], c["maxent_q_epsilon"]
    )  # (P, G) u = log q
    weights = goals = None
    kind = OBJECTIVES[c["objective"]].group_loss
    if kind == "weights":
        weights = losses.maxent_weights(utilities, ref_scores, tau, beta)  # (P, G)
    elif kind == "balance":
        goals = losses.balance_goals(utilities, ref_scores, tau, beta)  # (P, G)
    spread = c["maxent_group_weight"] == "spread"
    targets = GroupTargets(
        task_rewards=measured.task_rewards,
        # from the rewards before shaping: unlikeliness_coef must not make an equal group active
        active=losses.active_groups(rewards, skipped_groups(c)),
        utilities=utilities,
        weights=weights,
        goals=goals,
        group_weight=losses.reward_spread(rewards) if spread else None,
    )
    if is_policy_gradient(c):
        targets = targets._replace(advantages=weight_advantages(targets))
    return targets


def weight_advantages(targets: GroupTargets):
    """(P, G): G * (w - 1/G), how much each row should rise or fall; 0 in groups left out."""
    weights = targets.weights
    G = weights.shape[1]
    # The loss averages over rows; the factor G turns this into a sum over the group, averaged over
    # prompts. Not G * w - 1, which would not be exactly 0 at w = 1/G.
    advantages = G * (weights - 1 / G)
    if targets.group_weight is not None:
        advantages = advantages * targets.group_weight[:, None]
    return advantages.masked_fill(~targets.active[:, None], 0.0)


def row_advantages(measured: GroupMeasures, c: dict):
    """The advantage of each row, (P, G), as the objective defines it in checks.OBJECTIVES.
    measured.rewards: already shaped."""
    name = OBJECTIVES[c["objective"]].advantage
    if name == "own":
        # found by preflight.try_formula() before anything loads
        raise UserError(
            f"learner.row_advantages has no branch for objective={c['objective']!r}, whose "
            f'advantage="own" in checks.OBJECTIVES promises one: add it, or take a formula of '
            f"loss.ADVANTAGES"
        )
    formula = losses.ADVANTAGES[name]
    return formula(measured.rewards, scale_of(c), c["pkpo_k"])


def row_weights(advantages, measured: GroupMeasures, tau: float, beta: float, c: dict):
    """xdr's weights of the rows within their groups, (P, G)."""
    max_length = c["max_completion_length"]
    utilities = losses.xdr_utilities(advantages, measured.lengths, c["xdr_utility"], max_length)
    taus = [tau] * len(advantages)
    if c["xdr_mode_adaptive_tau"]:
        taus = losses.mode_adaptive_tau(tau, measured.correct_modes)
    tilt = beta if c["xdr_ref_tilt"] else 0.0  # without the tilt, beta weights a KL in the loss
    return losses.xdr_weights(utilities, measured.ref_scores, taus, tilt)


def shaped_rewards(measured: GroupMeasures, c: dict):
    """The rewards, (P, G), changed by unlikeliness_coef and policy_entropy_bonus_coef."""
    rewards = measured.rewards
    if measured.seq_logps is not None:
        rewards = losses.unlikely_rewards(rewards, measured.seq_logps, c["unlikeliness_coef"])
    if measured.entropies is not None:
        bonus = losses.entropy_bonus(rewards, measured.entropies, c["policy_entropy_bonus_coef"])
        rewards = rewards + bonus
    return rewards


def step_counts(targets: GroupTargets, lengths) -> dict:
    """What the step's losses are divided by, counted over all ranks: rows, prompts, completion
    tokens, active groups (at least 1)."""
    return {
        "rows": lengths.numel(),
        "prompts": len(lengths),
        "tokens": int(lengths.double().sum()),  # a sum of float32 is exact to 2^24 only
        "active": max(1, int(targets.active.sum())),
    }


def local_targets(targets: GroupTargets, world) -> GroupTargets:
    """This rank's groups (p, G) of the whole step's (P, G)."""
    local = world.share(len(targets.active))
    return targets.select(slice(local.start, local.stop))


# --- the loss of a micro-batch


def couples_rows(c: dict) -> bool:
    """Whether part of the loss is a function of a whole group's scores."""
    return not is_policy_gradient(c) or c["mode_entropy_coef"] > 0


def loss_scores(logps, lengths, c: dict):
    """The sequence scores (n,) that group_loss compares, normalised as the loss in use wants
    them."""
    kind = OBJECTIVES[c["objective"]].group_loss
    max_length = c["max_completion_length"]
    # maxent_score_scale is left out of mle, a likelihood, and of the mode-entropy term (last line),
    # which is in nats
    if kind == "weights" and c["maxent_loss"] == "mle":
        return losses.sequence_scores(logps, lengths, "length", max_length)
    if kind:
        return maxent_scores(logps, lengths, c)
    return losses.sequence_scores(logps, lengths, c["mode_entropy_score_norm"], max_length)


def group_loss(scores, targets: GroupTargets, c: dict, counts: dict):
    """The part of the loss that is a function of a whole group's scores (p, G): the objective's
    group loss, or the mode-entropy term."""
    kind = OBJECTIVES[c["objective"]].group_loss
    active = targets.active  # (p,) bool
    group_weight = targets.group_weight  # (p,) or None
    if kind == "balance":
        return losses.balance_loss(scores, targets.goals, active, counts["active"], group_weight)
    if kind == "weights" and c["maxent_loss"] == "mle":
        return losses.mle_loss(scores, targets.weights, active, counts["active"], group_weight)
    if kind == "weights":
        floored = None
        if c["maxent_loss"] == "floored":  # rows below the mean reward of their group
            floored = losses.group_advantages(targets.task_rewards, "none") < 0  # (p, G)
        return losses.listwise_loss(
            scores, targets.weights, active, counts["active"], group_weight, floored
        )
    if kind:  # a name that was added only to checks.Objective
        raise ValueError(f"learner.group_loss has no group_loss={kind!r}")
    # summed log-probs are divided by the maximal length; the other scores are already per token
    max_length = c["max_completion_length"] if c["mode_entropy_score_norm"] == "sum" else 1
    loss = losses.mode_entropy_loss(scores, targets.task_rewards, counts["prompts"] * max_length)
    return c["mode_entropy_coef"] * loss


def surrogate(logps, micro_batch: dict, c: dict) -> tuple:
    """(what a policy gradient maximises, which tokens are clipped below, which above): each (n, T),
    or (n, 1) for gspo."""
    log_ratio = logps - micro_batch["old_logps"]
    ratio = OBJECTIVES[c["objective"]].ratio
    if ratio == "cispo":
        return losses.cispo_surrogate(
            logps, log_ratio, micro_batch["advantages"], c["cispo_epsilon_max"]
        )
    if ratio == "sequence":
        log_ratio = log_ratio.sum(1, keepdim=True) / micro_batch["lengths"][:, None]  # (n, 1)
    elif ratio != "token":  # a name that was added only to checks.Objective
        raise ValueError(f"learner.surrogate has no ratio={ratio!r}")
    high = c["epsilon_high"] if c["epsilon_high"] >= 0 else c["epsilon"]  # -1: epsilon
    return losses.clipped_surrogate(
        log_ratio, micro_batch["advantages"], c["epsilon"], high, c["delta"]
    )


def token_loss(logps, entropy, micro_batch: dict, beta: float, c: dict, counts: dict) -> tuple:
    """The part of the loss that is a sum over tokens: surrogate, entropy, KL. Returns (loss, tokens
    clipped below, tokens clipped above, sum of all tokens' KL)."""
    objective = OBJECTIVES[c["objective"]]
    mask = completion_mask(micro_batch["lengths"])  # (n, T)
    token_weight = losses.token_weights(
        objective.token_sum, mask, counts["rows"], counts["tokens"], c["max_completion_length"]
    )  # (n, T)
    total = logps.new_zeros(())
    kl_sum = logps.new_zeros(())
    low = high = torch.zeros_like(mask)  # (n, T): nothing is clipped
    if is_policy_gradient(c):
        gain, low, high = surrogate(logps, micro_batch, c)
        per_token, per_row = logps.shape, (len(logps), 1)
        if gain.shape not in (per_token, per_row):  # (n, n), say, would be summed where T = 1
            allowed = f"{tuple(per_token)} or {per_row}"
            raise ValueError(f"learner.surrogate gives {tuple(gain.shape)}, not {allowed}")
        correction = losses.importance_ratio(
            micro_batch["old_logps"],
            micro_batch["sampler_logps"],
            micro_batch["lengths"],
            c["importance_sampling"],
            c["importance_sampling_cap"],
        )
        total = total - (token_weight * correction * gain).sum()
    if objective.term == "token_entropy":
        total = total - c["token_entropy_coef"] * (token_weight * entropy).sum()
    if "ref_logps" in micro_batch:
        # measured even where the loss has no such term, because it may steer beta
        kl_sum = (losses.k3_kl(logps.detach(), micro_batch["ref_logps"]) * mask).sum()
        if adds_kl(c):
            estimator = {"k2": losses.k2_kl, "k3": losses.k3_kl}[c["kl_loss_type"]]
            kl = estimator(logps, micro_batch["ref_logps"])  # (n, T)
            total = total + beta * (token_weight * kl).sum()
    return total, (low & mask).sum(), (high & mask).sum(), kl_sum


# --- which groups need a gradient


def acts_on_all(beta: float, c: dict) -> bool:
    """Whether the loss has a term that may act on any group, whatever its rewards. If so, no group
    may rest."""
    return OBJECTIVES[c["objective"]].term == "token_entropy" or (adds_kl(c) and beta > 0)


def may_have_gradient(rewards, beta: float, c: dict):
    """(P,) bool: groups that may get a gradient, judged by their rewards (P, G) alone.
    resting_rows() is exact, but needs forwards that come later."""
    objective = OBJECTIVES[c["objective"]]
    # a user's own advantages may compare rows across groups
    if acts_on_all(beta, c) or rewards_seeds(c) or objective.has_custom_advantages:
        return torch.ones(len(rewards), dtype=torch.bool)
    return rewards_teach(rewards, c)


def rewards_teach(rewards, c: dict):
    """(P,) bool: groups whose rewards (P, G) tell better rows from worse, or that the objective
    wants to keep. Unlike may_have_gradient() it leaves out what acts on a group whatever its
    rewards: a KL, an entropy bonus, a user's formula that looks beyond the group."""
    if OBJECTIVES[c["objective"]].group_loss:
        return losses.active_groups(rewards, skipped_groups(c))
    differ = ~losses.equal_groups(rewards)  # in equal groups the entropy bonus is 0 too
    if c["unlikeliness_coef"] > 0:  # tells equally right answers apart, but not wrong ones
        differ |= (rewards > 0).any(1)
    return differ


def resting_rows(targets: GroupTargets, beta: float, c: dict):
    """(p * G,) bool: rows of groups on which the loss does not depend, usually because their
    rewards are equal. They need no backward."""
    if acts_on_all(beta, c):
        return torch.zeros_like(targets.task_rewards, dtype=torch.bool).flatten()
    rests = ~targets.active  # (p,)
    if is_policy_gradient(c):
        rests = (targets.advantages == 0).all(1)
        if c["mode_entropy_coef"] > 0:
            rests &= losses.equal_groups(targets.task_rewards)
    return rests.repeat_interleave(targets.task_rewards.shape[1])


# --- gradients


@torch.no_grad()
def idle_forwards(model, batch: dict, forwards: int) -> None:
    """Runs `forwards` forwards of one row, whose results are dropped: ZeRO-3 gathers parameters in
    every forward, so all ranks need the same number."""
    micro_batch = rollout.take(batch, torch.tensor([0]))
    for _ in range(forwards):
        model(micro_batch["ids"], micro_batch["prompt_lengths"], micro_batch["lengths"])


@torch.no_grad()
def forward_rows(model, batch: dict, plan: MicroBatchPlan, entropy: bool = False):
    """Log-probs (N, T) of all rows under `model`; with `entropy` the entropies of its next-token
    distributions instead. 0 outside completions."""
    table = torch.zeros_like(batch["sampler_logps"])  # (N, T)
    idle_forwards(model, batch, plan.missing)
    for rows in plan.micro_batches:
        micro_batch = rollout.take(batch, rows)
        logps, entropies = model(
            micro_batch["ids"],
            micro_batch["prompt_lengths"],
            micro_batch["lengths"],
            want_entropy=entropy,
        )
        values = entropies if entropy else logps  # (n, T of the micro-batch)
        table[rows, : values.shape[1]] = values
    return table


def score_gradients(
    engine, batch: dict, plan: MicroBatchPlan, targets: GroupTargets, c: dict, counts: dict
) -> tuple:
    """(d loss / d score of each row (N,), loss), both for the groups that are split over several
    micro-batches; 0 for rows of whole groups. This takes an extra forward over the split groups, so
    that each micro-batch can later go backward by itself. All ranks together."""
    G = targets.task_rewards.shape[1]
    micro_batches = []
    for rows in plan.learning:  # resting rows have no gradient
        if plan.split[rows].any():
            micro_batches.append(rows[plan.split[rows]])
    most = int(across_ranks(torch.tensor(len(micro_batches)), dist.ReduceOp.MAX))
    missing = most - len(micro_batches)
    forwards = MicroBatchPlan(resting=micro_batches, learning=[], missing=missing)
    logps = forward_rows(engine, batch, forwards)  # (N, T)
    scores = loss_scores(logps, batch["lengths"], c).requires_grad_()  # (N,)
    split = plan.split.view(-1, G)[:, 0]  # (p,)
    loss = group_loss(scores.view(-1, G)[split], targets.select(split), c, counts)
    return torch.autograd.grad(loss, scores)[0], loss.item()


def coupled_loss(logps, micro_batch: dict, targets: GroupTargets, c: dict, counts: dict) -> tuple:
    """The group part of a micro-batch's loss: (tensor to go backward from, what to report).

    A whole group goes backward through its own loss. Of a split group only some rows are here:
    score_gradients() has already found d loss / d score, and the loss to report. By the chain rule
    the sum of (d loss / d score) * score over these rows has their part of the gradient; its value
    means nothing, and is not reported."""
    rows = micro_batch["row"]  # (n,)
    scores = loss_scores(logps, micro_batch["lengths"], c)  # (n,)
    of_split = 0.0
    if "score_grads" in micro_batch:
        split = micro_batch["split"]  # (n,) bool
        of_split = (micro_batch["score_grads"][split] * scores[split]).sum()
        rows, scores = rows[~split], scores[~split]
    G = targets.task_rewards.shape[1]
    groups = rows[::G] // G  # only whole groups are left, so every G-th row begins one
    loss = group_loss(scores.view(-1, G), targets.select(groups), c, counts)
    return of_split + loss, loss.detach()


def backward_sum(engine, loss) -> None:
    """Backward from one term of a loss that is a sum over micro-batches and ranks. Multiplied by
    the number of ranks, because DeepSpeed averages gradients over them."""
    engine.backward(loss * dist.get_world_size(), scale_wrt_gas=False)


def micro_batch_loss(
    engine, micro_batch: dict, targets: GroupTargets, beta: float, c: dict, counts: dict
) -> tuple:
    """Forward over a micro-batch: (log-probs (n, T), the loss to go backward from, its SUMS).
    Sets micro_batch["old_logps"] in the first update of a batch."""
    logps, entropy = engine(
        micro_batch["ids"], micro_batch["prompt_lengths"], micro_batch["lengths"]
    )  # (n, T)
    # before the first update the policy is still the old one, and so are its log-probs
    micro_batch.setdefault("old_logps", logps.detach())
    loss, clipped_low, clipped_high, kl = token_loss(logps, entropy, micro_batch, beta, c, counts)
    reported_loss = loss.detach().double()
    if couples_rows(c):
        group_part, reported_part = coupled_loss(logps, micro_batch, targets, c, counts)
        loss = loss + group_part
        reported_loss = reported_loss + reported_part
    values = {
        "loss": reported_loss,
        "logps": logps,
        "entropy": entropy,
        "kl": kl,
        "clipped_low": clipped_low,
        "clipped_high": clipped_high,
    }
    sums = [values[name].detach().sum().double() for name in SUMS]
    return logps, loss, torch.stack(sums).cpu()  # one wait for the device


def accumulate_gradients(
    engine, batch: dict, targets: GroupTargets, beta: float, c: dict, counts: dict
) -> dict:
    """Forward over all micro-batches of one update, backward over those with a gradient; returns
    the metrics of the update, over all ranks.

    targets: this rank's groups (p, G); counts: step_counts() of the whole step. The first update
    of a batch sets batch["old_logps"]; later ones leave out resting rows, in metrics too."""
    G = targets.task_rewards.shape[1]
    device = batch["ids"].device
    targets = targets.to(device)
    rests = resting_rows(targets, beta, c)  # (p * G,)
    plan = agree_on_plan(batch, G if couples_rows(c) else 1, c, rests)
    first_update = "old_logps" not in batch
    if not first_update:  # the first has measured everything that resting rows are needed for
        plan = plan._replace(resting=[], missing=0)
    began = time.perf_counter()  # this rank's own work, up to the end of the loop below
    sums = torch.zeros(len(SUMS), dtype=torch.float64)
    per_row = {"row": torch.arange(len(rests), device=device)}  # (p * G,) each
    if targets.advantages is not None:
        per_row["advantages"] = targets.advantages.flatten()
    if plan.split is not None:
        per_row["split"] = plan.split
        score_grads, split_loss = score_gradients(engine, batch, plan, targets, c, counts)
        per_row["score_grads"] = score_grads
        sums[SUMS.index("loss")] = split_loss  # the micro-batches add the loss of whole groups
    old_logps = torch.zeros_like(batch["sampler_logps"])
    idle_forwards(engine, batch, plan.missing)
    for i, rows in enumerate(plan.micro_batches):
        micro_batch = rollout.take(batch | per_row, rows)
        learns = i >= len(plan.resting)
        with torch.set_grad_enabled(learns):
            logps, loss, part_sums = micro_batch_loss(engine, micro_batch, targets, beta, c, counts)
        old_logps[rows, : logps.shape[1]] = micro_batch["old_logps"]
        sums += part_sums
        if learns:
            # A NaN loss can have a finite gradient, or none, and a NaN log-prob may enter no loss.
            # Make the gradient NaN, so that the optimizer skips the step on every rank.
            # The sums are of all micro-batches so far, and stay what they are once not finite.
            if not sums[:2].isfinite().all():  # loss, log-prob
                loss = logps.sum() * math.nan
            backward_sum(engine, loss)
    wait_for_gpu()  # the last backward may only be queued so far
    seconds = time.perf_counter() - began
    if first_update:
        batch["old_logps"] = old_logps
    metrics = update_metrics(sums, counts["tokens"], has_reference="ref_logps" in batch)
    return metrics | learning_seconds(seconds)


# --- metrics


def update_metrics(sums, tokens: int, has_reference: bool) -> dict:
    """Metrics of an update, over all ranks: its loss, and means over the completion tokens. sums:
    this rank's SUMS."""
    total = dict(zip(SUMS, across_ranks(sums).tolist()))
    metrics = {
        "loss": total["loss"],
        "entropy": total["entropy"] / tokens,
        "clip_ratio/low": total["clipped_low"] / tokens,
        "clip_ratio/high": total["clipped_high"] / tokens,
    }
    if has_reference:
        metrics["kl"] = total["kl"] / tokens
    return metrics


def learning_seconds(local: float) -> dict:
    """Seconds of forwards and backwards on the slowest rank and on average, and how long this rank
    waits for the slowest. local: this rank's seconds. (ZeRO 2 and 3 also wait inside every
    backward, which counts as work here.)"""
    seconds = gather_rows(torch.tensor([float(local)]))  # (ranks,)
    slowest = seconds.max().item()
    return {
        "time/learn_slowest": slowest,
        "time/learn_mean": seconds.mean().item(),
        "time/wait": max(0.0, slowest - local),  # of this rank, before gradients are exchanged
    }


def weight_metrics(targets: GroupTargets, batch: dict, c: dict) -> dict:
    """Metrics of the group weights, if the objective has weights. All ranks together. targets: the
    whole step's."""
    if targets.weights is None:
        return {}
    metrics = losses.weight_metrics(targets.weights, targets.task_rewards, targets.active)
    if uses_scores(c):  # only then are these scores in the loss
        scores = policy_scores(batch, targets.weights.shape[1], c)  # (P, G)
        metrics |= losses.pull(scores, targets.weights, targets.active)
    return metrics


def group_metrics(rewards, lengths) -> dict:
    """Metrics of the step's rewards and completion lengths, both (P, G); this G does not include
    S."""
    return {
        "reward": rewards.mean().item(),
        "reward_std": rewards.std(1).mean().item(),
        "frac_reward_zero_std": losses.equal_groups(rewards).float().mean().item(),
        "completions/mean_length": lengths.mean().item(),
        "completions/max_length": lengths.max().item(),
    }


@torch.no_grad()
def sampler_distance(model, batch: dict, c: dict) -> float:
    """Mean |log-prob of the model - log-prob of the sampler|, nats per token, over all ranks."""
    logps = forward_rows(model, batch, agree_on_plan(batch, 1, c))  # (N, T)
    apart = (logps - batch["sampler_logps"]).abs().sum()  # both are 0 after a row's end
    total, tokens = across_ranks(torch.stack([apart, batch["lengths"].sum()])).tolist()
    return total / tokens


def sampler_mismatch(batch: dict, limit: float) -> dict:
    """How far the sampler's log-probs are from the trainer's before the update, over all ranks.
    Both should be of the same policy: a mean difference above `limit` (nats per token, -1 off)
    means that weights did not arrive, and stops the run."""
    mask = completion_mask(batch["lengths"])  # (N, T)
    d = (batch["old_logps"] - batch["sampler_logps"])[mask]  # (completion tokens of this rank,)
    ratio = d.clamp(max=20).exp()
    sums = across_ranks(torch.stack([d.abs().sum(), ratio.sum(), mask.sum()]))
    mean, ratio_mean = (sums[:2] / sums[2]).tolist()
    # -min(ratio) = max(-ratio), so that one collective serves all three
    extremes = torch.stack([d.abs().max(), ratio.max(), -ratio.min()])
    largest, ratio_max, negative_min = across_ranks(extremes, dist.ReduceOp.MAX).tolist()
    # all ranks have the same numbers here, so either all stop or none
    if limit >= 0 and not mean <= limit:  # a mean that is NaN stops it too
        raise RunStopped(
            f"the sampler's log-probs differ from the trainer's by {mean:.3g} nats a token on "
            f"average (at most {largest:.3g}), over max_logp_difference={limit}: the rollout "
            f"engine does not hold the policy's weights, or the limit is too low for this dtype "
            f"(bfloat16 alone makes 0.01 to 0.05, and more at low temperatures, which want "
            f"--max_logp_difference=0.1; -1, not 0, turns this check off)"
        )
    return {
        "sampling/sampling_logp_difference/mean": mean,
        "sampling/sampling_logp_difference/max": largest,
        "sampling/importance_sampling_ratio/mean": ratio_mean,
        "sampling/importance_sampling_ratio/min": -negative_min,
        "sampling/importance_sampling_ratio/max": ratio_max,
    }


# --- how a step is cut into micro-batches


class Unit(NamedTuple):
    """Neighbouring rows that go into one micro-batch together: a whole group, or a single row."""

    rows: list[int]
    cost: int = 0  # its tokens, on its own


def agree_on_plan(batch: dict, unit_size: int, c: dict, rests=None) -> MicroBatchPlan:
    """The micro-batches of this rank. All ranks call it together and get the same number of
    learning ones, at least one each: the optimizer needs a backward before it steps. unit_size: how
    many neighbouring rows share a micro-batch if they fit, G or 1. rests (N,) bool: rows without a
    gradient; None: no row rests."""
    budget = c["max_tokens_per_micro_batch"]
    resting, learning = fill_micro_batches(batch, budget, unit_size, c["pack_sequences"], rests)
    splits = any(len(unit.rows) < unit_size for units in resting + learning for unit in units)
    local = torch.tensor([splits, len(resting), len(learning)])
    any_splits, most_resting, most_learning = across_ranks(local, dist.ReduceOp.MAX).tolist()
    if any_splits:
        # if one rank splits a group, all take rows as units, so that each can make equally many
        # micro-batches
        resting, learning = in_rows(resting), in_rows(learning)
    plan = stretch(resting, learning, most_resting, max(1, most_learning))
    if any_splits:
        plan = plan._replace(split=split_rows(plan.micro_batches, unit_size))
    return plan


def fill_micro_batches(batch: dict, budget: int, unit_size: int, pack: bool, rests) -> tuple:
    """(resting, learning): micro-batches of as many units as fit in `budget` tokens; each is a list
    of units. A group that alone does not fit is split into units of one row. rests: see
    agree_on_plan()."""
    groups = units_of(batch, unit_size, pack)
    units = groups
    if unit_size > 1 and any(group.cost > budget for group in groups):
        single_rows = units_of(batch, 1, pack)
        units = []
        for group in groups:
            if group.cost <= budget:
                units.append(group)
            else:
                units += [single_rows[i] for i in group.rows]
    resting = []
    learning = units
    if rests is not None:
        rests = rests.tolist()  # all rows of a group, or none
        resting = [unit for unit in units if rests[unit.rows[0]]]
        learning = [unit for unit in units if not rests[unit.rows[0]]]
    if pack:
        return fill_packed(resting, batch, budget), fill_packed(learning, batch, budget)
    return fill_padded(resting, budget), fill_padded(learning, budget)


def units_of(batch: dict, unit_size: int, pack: bool) -> list[Unit]:
    """Every `unit_size` neighbouring rows as a unit."""
    rows = torch.arange(len(batch["ids"])).view(-1, unit_size)  # (units, unit_size)
    total = (batch["prompt_lengths"] + batch["lengths"]).cpu()[rows]  # (units, unit_size)
    if pack:
        shared = shared_with_previous(batch, slice(None)).view(rows.shape)
        # what the first row shares with the unit before it is left to fill_packed
        cost = total.sum(1) - shared[:, 1:].sum(1)
    else:
        cost = total.amax(1) * unit_size  # rows are padded to the longest
    return list(map(Unit, rows.tolist(), cost.tolist()))


def shared_with_previous(batch: dict, rows):
    """How many tokens each of these rows, in this order, shares with the one before; on the host.
    rows: their indices, or a slice, which copies nothing."""
    picked = [batch[name][rows] for name in ("ids", "prompt_lengths", "lengths")]
    return packing.shared_tokens(*picked).cpu()


def fill_packed(units: list[Unit], batch: dict, budget: int) -> list:
    """Micro-batches of the units, which keep their order, because neighbours share prompts."""
    if not units:
        return []
    ends = torch.tensor([[unit.rows[0], unit.rows[-1]] for unit in units])  # (units, 2)
    # What a unit saves by following the one before it: the tokens that its first row shares with
    # that one's last row. shared_with_previous() compares each row of [first 0, last 0, first 1,
    # last 1, ...] with the row before it, so every second result compares two units.
    saved = shared_with_previous(batch, ends.flatten())[::2].tolist()
    micro_batches = []
    used = 0  # tokens in the last micro-batch
    for unit, saving in zip(units, saved, strict=True):
        if micro_batches and used + unit.cost - saving <= budget:
            micro_batches[-1].append(unit)
            used += unit.cost - saving
        else:
            micro_batches.append([unit])
            used = unit.cost
    return micro_batches


def fill_padded(units: list[Unit], budget: int) -> list:
    """Micro-batches of the units, longest first: all rows are padded to the length of the first."""

    def longest(unit: Unit) -> int:
        return unit.cost // len(unit.rows)

    micro_batches = []
    count = width = 0  # rows of the last micro-batch, and tokens of each
    for unit in sorted(units, key=longest, reverse=True):
        if micro_batches and width * (count + len(unit.rows)) <= budget:
            micro_batches[-1].append(unit)
            count += len(unit.rows)
        else:
            micro_batches.append([unit])
            count, width = len(unit.rows), longest(unit)
    return micro_batches


def stretch(resting: list, learning: list, most_resting: int, most_learning: int) -> MicroBatchPlan:
    """The plan of these micro-batches, cut further until this rank has as many as the rank with the
    most: all ranks need the same number of backwards and, since ZeRO-3 gathers weights in each, of
    forwards.

    A missing learning one is made by halving the largest or, if all are single units, by letting a
    resting unit learn (its gradient is 0). A missing resting one is made by halving too; where none
    can be halved, idle_forwards() stands in."""
    while len(learning) < most_learning:
        if not halve_largest(learning):
            # there must be a resting unit, because all ranks have the same number of rows
            learning.append([resting[-1].pop()])
            resting = [units for units in resting if units]
    while len(resting) < most_resting and halve_largest(resting):
        pass

    def rows_of(micro_batches: list) -> list:
        return [torch.tensor([i for unit in units for i in unit.rows]) for units in micro_batches]

    missing = max(0, most_resting - len(resting))
    return MicroBatchPlan(rows_of(resting), rows_of(learning), missing)


def halve_largest(micro_batches: list) -> bool:
    """Splits the micro-batch with the most units in two; False if none has more than one."""
    i = max(range(len(micro_batches)), key=lambda i: len(micro_batches[i]), default=0)
    if not micro_batches or len(micro_batches[i]) == 1:
        return False
    units = micro_batches[i]
    half = len(units) // 2
    micro_batches[i : i + 1] = [units[:half], units[half:]]
    return True


def in_rows(micro_batches: list) -> list:
    """The same micro-batches with each row as a unit of its own."""
    return [[Unit([i]) for unit in units for i in unit.rows] for units in micro_batches]


def split_rows(micro_batches: list, G: int) -> torch.Tensor:
    """(N,) bool: rows of groups that are split over several micro-batches."""
    where = torch.empty(sum(map(len, micro_batches)), dtype=torch.long)  # (N,)
    for i, rows in enumerate(micro_batches):
        where[rows] = i
    groups = where.view(-1, G)  # (p, G)
    return (groups != groups[:, :1]).any(1).repeat_interleave(G)
