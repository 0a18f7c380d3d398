"""The learner: from a step's completions and rewards to accumulated gradients, the same on one rank
and on many.

    group = measure_groups(engine, reference, batch, lived, rewards, config)   # (P, G), all ranks
    targets = group_targets(group, tau, beta, config)       # weights, advantages, active groups
    norm = step_counts(targets, group["lengths"])
    metrics = accumulate_gradients(engine, batch, own_targets(targets, world), beta, config, norm)
    engine.step()

P prompts, G completions each, N = P*G rows; p = P / world prompts of this rank; n rows of a
micro-batch; T tokens of a completion. What is true of an objective stands in checks.OBJECTIVES.
"""

import math
import time
from typing import NamedTuple

import torch
import torch.distributed as dist

import loss as L
import packing
import rollout
import scoring
from checks import OBJECTIVES, policy_gradient
from common import RunStopped
from policy import completion_mask
from ranks import across_ranks, gather_groups

# --- micro-batches


def unit_tokens(batch: dict, unit: int, pack: bool) -> tuple[list[int], list[int]]:
    """Token cost of each unit (`unit` neighbouring rows): on its own, and what it saves when packed
    right behind the unit before, because both begin with the same prompt."""
    total = (batch["prompt_lengths"] + batch["lengths"]).cpu().view(-1, unit)  # (units, unit)
    if not pack:
        padded = total.amax(1) * unit
        return padded.tolist(), [0] * len(total)
    repeated = packing.continues(batch["ids"], batch["prompt_lengths"])  # (N,) bool
    prompt = (batch["prompt_lengths"] * repeated).cpu().view(-1, unit)  # 0 where it is new
    # within a unit every repeated prompt is saved; that of its first row depends on its neighbour
    packed = total.sum(1) - prompt[:, 1:].sum(1)
    return packed.tolist(), prompt[:, 0].tolist()


def units_of(batch: dict, unit: int, pack: bool, budget: int) -> tuple[list, list, list]:
    """(rows, cost, saved) of what goes into a micro-batch as a whole: a group, or, of a group over
    the budget, each row. cost and saved: see unit_tokens()."""
    rows = torch.arange(len(batch["ids"])).view(-1, unit).tolist()
    cost, saved = unit_tokens(batch, unit, pack)
    if unit == 1 or max(cost) <= budget:
        return rows, cost, saved
    row_cost, row_saved = unit_tokens(batch, 1, pack)
    found = []
    for own, tokens, less in zip(rows, cost, saved):
        if tokens <= budget:
            found.append((own, tokens, less))
        else:
            found += [([i], row_cost[i], row_saved[i]) for i in own]
    return tuple(map(list, zip(*found)))


def fill_packed(units: list[int], cost: list[int], saved: list[int], budget: int) -> list:
    """Units of each micro-batch, in their own order, for neighbours share prompts."""
    bins = []
    used = 0  # tokens of the last of them
    for u in units:
        behind_neighbour = bool(bins) and bins[-1][-1] == u - 1
        added = cost[u] - saved[u] if behind_neighbour else cost[u]
        if bins and used + added <= budget:
            bins[-1].append(u)
            used += added
        else:
            bins.append([u])
            used = cost[u]
    return bins


def fill_padded(units: list[int], cost: list[int], rows: list[list], budget: int) -> list:
    """Units of each micro-batch, longest first, for all are padded to the first one's length."""
    longest = [tokens // len(own) for tokens, own in zip(cost, rows)]
    bins = []
    count = 0  # rows of the last of them
    for u in sorted(units, key=lambda u: -longest[u]):
        if bins and longest[bins[-1][0]] * (count + len(rows[u])) <= budget:
            bins[-1].append(u)
            count += len(rows[u])
        else:
            bins.append([u])
            count = len(rows[u])
    return bins


def halve_largest(bins: list) -> bool:
    """Makes two micro-batches of the one of most units; False if all have only one."""
    i = max(range(len(bins)), key=lambda i: len(bins[i]), default=0)
    if not bins or len(bins[i]) == 1:
        return False
    half = len(bins[i]) // 2
    bins[i : i + 1] = [bins[i][:half], bins[i][half:]]
    return True


class Plan(NamedTuple):
    """Row indices of each micro-batch of this rank."""

    resting: list  # that go forward only: nothing in the loss depends on these rows
    learning: list  # that go backward too, after the others; as many on every rank
    missing: int = 0  # forwards that other ranks have more
    torn: torch.Tensor | None = None  # (N,) bool: rows of groups in pieces; None: of no rank's

    @property
    def micro_batches(self) -> list:
        return self.resting + self.learning


def fill_micro_batches(batch: dict, budget: int, unit: int, pack: bool, idle=None) -> tuple:
    """(resting, learning): as many rows in each micro-batch as fit in `budget` tokens, `unit`
    neighbouring rows (a group) together if they fit in one. A micro-batch is a list of what is
    together, each a list of rows. idle (N,) bool: rows without a gradient, which rest."""
    rows, cost, saved = units_of(batch, unit, pack, budget)
    rests = [False] * len(rows)
    if idle is not None:
        idle = idle.tolist()
        rests = [idle[own[0]] for own in rows]  # a group's rows are idle together

    def fill(kind: bool) -> list:
        units = [u for u in range(len(rows)) if rests[u] == kind]
        if pack:
            bins = fill_packed(units, cost, saved, budget)
        else:
            bins = fill_padded(units, cost, rows, budget)
        return [[rows[u] for u in one] for one in bins]

    return fill(True), fill(False)


def stretch(resting: list, learning: list, at_least: tuple[int, int]) -> Plan:
    """The micro-batches, halved until there are at_least = (resting, learning), for ranks must
    agree on the numbers. A rank with too little that learns takes one unit that rests for each
    micro-batch that it lacks."""
    while len(learning) < at_least[1]:
        if not halve_largest(learning):
            # ranks have as many rows, so there is one; a single unit, for its gradient is 0
            learning.append([resting[-1].pop()])
            resting = [units for units in resting if units]
    while len(resting) < at_least[0] and halve_largest(resting):
        pass

    def rows_of(bins: list) -> list:
        return [torch.tensor([i for own in units for i in own]) for units in bins]

    return Plan(rows_of(resting), rows_of(learning), max(0, at_least[0] - len(resting)))


def torn_rows(micro_batches: list, unit: int) -> torch.Tensor:
    """(N,) bool: rows of groups that are not in one micro-batch."""
    where = torch.empty(sum(map(len, micro_batches)), dtype=torch.long)  # (N,)
    for i, rows in enumerate(micro_batches):
        where[rows] = i
    groups = where.view(-1, unit)  # (p, unit)
    return (groups != groups[:, :1]).any(1).repeat_interleave(unit)


def agree_on_plan(batch: dict, unit: int, c: dict, idle=None) -> Plan:
    """The micro-batches of this rank, all ranks together: as many that learn on every rank, and
    one at least, for the optimizer to step on."""
    budget = c["max_tokens_per_micro_batch"]
    resting, learning = fill_micro_batches(batch, budget, unit, c["pack_sequences"], idle)
    tears = any(len(own) < unit for units in resting + learning for own in units)
    mine = torch.tensor([tears, len(resting), len(learning)])
    tears, most_resting, most_learning = across_ranks(mine, dist.ReduceOp.MAX).tolist()
    if tears:  # then one whose groups all fit may need pieces too, to have as many micro-batches
        resting, learning = in_rows(resting), in_rows(learning)
    plan = stretch(resting, learning, (most_resting, max(1, most_learning)))
    return plan._replace(torn=torn_rows(plan.micro_batches, unit)) if tears else plan


def in_rows(micro_batches: list) -> list:
    """Micro-batches in which no two rows are kept together."""
    return [[[i] for own in units for i in own] for units in micro_batches]


@torch.no_grad()
def keep_step(model, batch: dict, forwards: int) -> None:
    """Forwards for nothing, of one row: ZeRO-3 gathers parameters in each, on all ranks."""
    part = rollout.take(batch, torch.tensor([0]))
    for _ in range(forwards):
        model(part["ids"], part["prompt_lengths"], part["lengths"])


@torch.no_grad()
def score_rows(model, batch: dict, plan: Plan, entropy: bool = False):
    """Log-probs (N, T) of all rows under `model`, or the entropies of its next-token
    distributions; 0 outside completions."""
    scores = torch.zeros_like(batch["sampler_logps"])  # (N, T)
    keep_step(model, batch, plan.missing)
    for rows in plan.micro_batches:
        part = rollout.take(batch, rows)
        logps, entropies = model(
            part["ids"], part["prompt_lengths"], part["lengths"], want_entropy=entropy
        )
        values = entropies if entropy else logps  # (n, T of the micro-batch)
        scores[rows, : values.shape[1]] = values
    return scores


# --- what the groups of a step ask of the policy


def measure_groups(engine, reference, batch: dict, lived, rewards, c: dict) -> dict:
    """What group_targets needs of the whole step, all ranks: "rewards", "task_rewards", "lengths"
    and what this config asks for. Sets batch["ref_logps"].

    lived: experience.Lived; rewards (P, G): its rewards, with what InfoSeed adds to them."""
    rows = lived.rows
    rollouts = lived.rollouts
    right = lived.right

    def gather(values):
        return gather_groups(values.view(len(rows), -1))  # (P, G)

    group = {
        "rewards": rewards,
        "task_rewards": lived.rewards,
        "lengths": gather(batch["lengths"]),
    }
    # passes without gradient may tear groups apart, so rows are placed one by one
    if reference is not None or c["policy_entropy_bonus_coef"] > 0:
        plan = agree_on_plan(batch, 1, c)
    if reference is not None:
        batch["ref_logps"] = score_by_reference(reference, batch, plan, c)
        group["ref_scores"] = gather(group_scores(batch["ref_logps"], batch, c))
    # the sampler's log-probs stand for the policy's, which are not known before the first forward
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


def score_by_reference(reference, batch: dict, plan: Plan, c: dict):
    """Log-probs (N, T) of all rows under the reference model, which may wait in CPU memory."""
    if c["reference_placement"] != "cpu":
        return score_rows(reference, batch, plan)
    reference.to(batch["ids"].device)
    logps = score_rows(reference, batch, plan)
    reference.to("cpu")  # its memory on the device is the policy's from here on
    return logps


def group_scores(logps, batch: dict, c: dict):
    """The sequence scores (N,) that maxent compares within a group."""
    return L.sequence_scores(
        logps,
        batch["lengths"],
        c["maxent_score_norm"],
        c["max_completion_length"],
        c["maxent_score_scale"],
    )


def own_targets(targets: dict, world) -> dict:
    """This rank's groups (p, G) of the whole step's (P, G)."""
    own = {}
    for name, value in targets.items():
        share = len(value) // world.size  # groups of a rank
        own[name] = value[world.rank * share : (world.rank + 1) * share]
    return own


def step_counts(targets: dict, lengths) -> dict:
    """The normalisers of the step, all ranks: rows, prompts, completion tokens, active groups (at
    least 1)."""
    return {
        "rows": lengths.numel(),
        "prompts": len(lengths),
        "tokens": int(lengths.sum()),
        "active": max(1, int(targets["active"].sum())),  # it divides
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
    scale = c["scale_rewards"] or objective.scale  # "": as the paper has it
    return L.ADVANTAGES[objective.advantage](rewards, scale, group.get("pass_k"))


def score_targets(group: dict, tau: float, beta: float, c: dict) -> dict:
    """group_targets of an objective whose loss is over the scores of a group. Its "advantages" say
    what it asks of each row; they are trained on under maxent_loss="policy_gradient" only."""
    rewards = group["rewards"]
    ref_scores = group.get("ref_scores")
    utilities = L.log_reward_targets(
        shaped_rewards(group, c), c["maxent_q_temperature"], c["maxent_q_epsilon"]
    )
    # by the rewards as they were given: a bonus would make equal rewards differ
    active = L.active_groups(rewards, c["maxent_skip_equal_groups"])
    targets = {
        "rewards": group.get("task_rewards", rewards),
        "active": active,
        "utilities": utilities,
    }
    if OBJECTIVES[c["objective"]].group_loss == "listwise":
        G = rewards.shape[1]
        targets["weights"] = L.maxent_weights(utilities, ref_scores, tau, beta)
        # w - 1/G summed over the group, then a mean over prompts; G * w - 1 would not be exactly 0
        # at w = 1/G
        advantages = G * (targets["weights"] - 1 / G)
    else:
        targets["goals"] = L.balance_goals(utilities, ref_scores, tau, beta)
        advantages = targets["goals"] - targets["goals"].mean(1, keepdim=True)
    if c["maxent_group_weight"] == "spread":
        targets["share"] = L.reward_spread(rewards)
        advantages = advantages * targets["share"][:, None]
    targets["advantages"] = advantages.masked_fill(~active[:, None], 0.0)
    return targets


def group_targets(group: dict, tau: float, beta: float, c: dict) -> dict:
    """What the whole step asks of the policy, all (P, G): weights and active groups, advantages.

    group: "rewards" and "lengths" (P, G); where InfoSeed has added something to the rewards,
    "task_rewards" (P, G), by which rows are best or correct; where the config needs them
    "ref_scores", "entropies" (mean over a row's tokens), "seq_logps", "clusters", "mean_logps"
    (P, G), "correct_modes" (P,) and "pass_k"."""
    objective = OBJECTIVES[c["objective"]]
    if objective.group_loss:
        return score_targets(group, tau, beta, c)
    rewards = group["rewards"]
    G = rewards.shape[1]
    advantages = row_advantages(group, c)  # (P, G)
    targets = {
        "rewards": group.get("task_rewards", rewards),
        "active": ~L.equal_groups(rewards),
        "advantages": advantages,
    }
    if objective.weights == "rows":
        targets["weights"] = row_weights(advantages, group, tau, beta, c)
        if not math.isinf(tau):  # infinite: the dr_grpo path, to the bit
            targets["advantages"] = G * targets["weights"] * advantages
    if objective.term == "answer_entropy":
        entropy = L.semantic_entropy(group["clusters"], group["mean_logps"])  # (P,)
        targets["advantages"] = advantages * L.semantic_scale(entropy, c["seed_grpo_alpha"], G)
    return targets


def row_weights(advantages, group: dict, tau: float, beta: float, c: dict):
    """xdr's weights of the rows within their groups, (P, G)."""
    longest = c["max_completion_length"]
    utilities = L.xdr_utilities(advantages, group["lengths"], c["xdr_utility"], longest)
    taus = [tau] * len(advantages)
    if c["xdr_mode_adaptive_tau"]:
        taus = L.mode_adaptive_tau(tau, group["correct_modes"])
    tilt = beta if c["xdr_ref_tilt"] else 0.0  # else beta acts as a KL term of the loss
    return L.xdr_weights(utilities, group.get("ref_scores"), taus, tilt)


# --- the loss of a micro-batch


def couples_rows(c: dict) -> bool:
    """Whether part of the loss is a function of a whole group's scores."""
    return not policy_gradient(c) or c["mode_entropy_coef"] > 0


def scores_of(logps, lengths, c: dict):
    """Sequence scores (n,) for group_loss, in the norm that its loss asks for."""
    kind = OBJECTIVES[c["objective"]].group_loss
    scale = 1.0  # mle is likelihood, and the mode-entropy term counts nats: neither is scaled
    if kind == "listwise" and c["maxent_loss"] == "mle":
        norm = "length"
    elif kind:
        norm, scale = c["maxent_score_norm"], c["maxent_score_scale"]
    else:
        norm = c["mode_entropy_score_norm"]
    return L.sequence_scores(logps, lengths, norm, c["max_completion_length"], scale)


def group_loss(scores, targets: dict, c: dict, norm: dict):
    """The part of the loss that takes the rows of a group together, from their scores (p, G): that
    of the objective, or the mode-entropy term."""
    kind = OBJECTIVES[c["objective"]].group_loss
    active = targets["active"]  # (p,) bool
    share = targets.get("share")  # (p,) or None
    if kind == "balance":
        return L.balance_loss(scores, targets["goals"], active, norm["active"], share)
    if kind == "listwise":
        loss = L.mle_loss if c["maxent_loss"] == "mle" else L.listwise_loss
        return loss(scores, targets["weights"], active, norm["active"], share)
    # sums of log-probs are compared per token of the longest completion, the others are already
    longest = c["max_completion_length"] if c["mode_entropy_score_norm"] == "sum" else 1
    loss = L.mode_entropy_loss(scores, targets["rewards"], norm["prompts"] * longest)
    return c["mode_entropy_coef"] * loss


def surrogate(logps, part: dict, c: dict) -> tuple:
    """What a policy gradient maximises, per token, and the tokens clipped below and above: each
    (n, T), or (n, 1) for gspo."""
    log_ratio = logps - part["old_logps"]
    ratio = OBJECTIVES[c["objective"]].ratio
    if ratio == "cispo":
        return L.cispo_surrogate(logps, log_ratio, part["advantages"], c["cispo_epsilon_max"])
    if ratio == "sequence":
        log_ratio = log_ratio.sum(1, keepdim=True) / part["lengths"][:, None]  # (n, 1)
    high = c["epsilon_high"] if c["epsilon_high"] >= 0 else c["epsilon"]  # -1: as below
    return L.clipped_surrogate(log_ratio, part["advantages"], c["epsilon"], high, c["delta"])


def adds_kl(c: dict) -> bool:
    """Whether beta * KL is a term of the loss; maxent and a tilted xdr have beta in the weights."""
    if OBJECTIVES[c["objective"]].beta == "weights":
        return c["maxent_kl"]
    return not c["xdr_ref_tilt"]


def token_loss(logps, entropy, part: dict, beta: float, c: dict, norm: dict) -> tuple:
    """The part of the loss that is a sum over tokens: surrogate, KL, entropy. (loss, how many
    tokens were clipped below, how many above, the sum of their KL)."""
    objective = OBJECTIVES[c["objective"]]
    mask = completion_mask(part["lengths"])  # (n, T)
    share = L.token_weights(
        objective.tokens, mask, norm["rows"], norm["tokens"], c["max_completion_length"]
    )  # (n, T)
    total = logps.new_zeros(())
    kl_sum = logps.new_zeros(())
    low = high = mask & False  # nothing is clipped
    if policy_gradient(c):
        gain, low, high = surrogate(logps, part, c)
        correction = L.importance_ratio(
            part["old_logps"],
            part["sampler_logps"],
            part["lengths"],
            c["importance_sampling"],
            c["importance_sampling_cap"],
        )
        total = total - (share * correction * gain).sum()
    if objective.term == "token_entropy":
        total = total - c["token_entropy_coef"] * (share * entropy).sum()
    if "ref_logps" in part:
        # measured also where it is no term of the loss: beta may follow it
        kl_sum = (L.k3_kl(logps.detach(), part["ref_logps"]) * mask).sum()
        if adds_kl(c):
            estimator = {"k2": L.k2_kl, "k3": L.k3_kl}[c["kl_loss_type"]]
            kl = estimator(logps, part["ref_logps"])  # (n, T)
            total = total + beta * (share * kl).sum()
    return total, (low & mask).sum(), (high & mask).sum(), kl_sum


def acts_on_all(beta: float, c: dict) -> bool:
    """Whether the loss has a term that acts on a group whatever its rewards are."""
    entropy_term = OBJECTIVES[c["objective"]].term == "token_entropy"
    return c["mode_entropy_coef"] > 0 or entropy_term or (adds_kl(c) and beta > 0)


def resting_groups(rewards, c: dict):
    """(P,) bool: groups that will hardly need a backward, by their rewards (P, G + S) alone.
    idle_rows() knows better, but needs forwards, which are to be dealt out by this."""
    # equal rewards will differ
    seeds_earn = c["info_seed_num_seeds"] > 0 and c["info_seed_reward"] > 0
    shaped = c["policy_entropy_bonus_coef"] > 0 or c["unlikeliness_coef"] > 0
    if acts_on_all(c["beta"], c) or seeds_earn or (shaped and not couples_rows(c)):
        return torch.zeros(len(rewards), dtype=torch.bool)
    if couples_rows(c):
        return ~L.active_groups(rewards, c["maxent_skip_equal_groups"])
    return L.equal_groups(rewards)


def idle_rows(targets: dict, beta: float, c: dict):
    """(p * G,) bool: rows of groups that the loss does not depend on, as a rule those of equal
    rewards. They need no backward."""
    if acts_on_all(beta, c):
        return torch.zeros_like(targets["rewards"], dtype=torch.bool).flatten()
    idle = ~targets["active"] if couples_rows(c) else (targets["advantages"] == 0).all(1)  # (p,)
    return idle.repeat_interleave(targets["rewards"].shape[1])


# --- gradients


def score_gradients(engine, batch: dict, plan: Plan, targets: dict, c: dict, norm: dict) -> tuple:
    """Where groups are in pieces: the scores of their rows come from a pass of their own, and each
    row gets d loss / d score, (N,); and the loss of these groups. All ranks together."""
    G = targets["rewards"].shape[1]
    pieces = [rows[plan.torn[rows]] for rows in plan.learning]  # what rests has no gradient
    pieces = [rows for rows in pieces if len(rows)]
    most = int(across_ranks(torch.tensor(len(pieces)), dist.ReduceOp.MAX))
    logps = score_rows(engine, batch, Plan(pieces, [], most - len(pieces)))  # 0 in whole groups
    scores = scores_of(logps, batch["lengths"], c).requires_grad_()  # (N,)
    torn = plan.torn.view(-1, G)[:, 0]  # (p,)
    loss = group_loss(scores.view(-1, G)[torn], taken(targets, torn), c, norm)
    return torch.autograd.grad(loss, scores)[0], loss.item()


def taken(targets: dict, groups) -> dict:
    """The targets of some groups, named by index or by a mask."""
    return {name: value[groups] for name, value in targets.items()}


def coupled_loss(logps, part: dict, rows, targets: dict, c: dict, norm: dict) -> tuple:
    """The group part of a micro-batch's loss, to go backward from, and what it adds to the loss
    that is reported: nothing for groups in pieces, whose loss score_gradients has reported."""
    scores = scores_of(logps, part["lengths"], c)  # (n,)
    of_pieces = 0.0
    if "score_gradients" in part:
        torn = part["torn"]
        of_pieces = (part["score_gradients"][torn] * scores[torn]).sum()
        rows, scores = rows[~torn], scores[~torn]
    G = targets["rewards"].shape[1]
    loss = group_loss(scores.view(-1, G), taken(targets, rows[::G] // G), c, norm)
    return of_pieces + loss, loss.item()


def accumulate_gradients(
    engine, batch: dict, targets: dict, beta: float, c: dict, norm: dict
) -> dict:
    """Forward over all micro-batches of one update, backward where there is a gradient; the
    metrics of the step, over all ranks.

    targets: this rank's groups (p, G); norm: counts of the whole step. Sets batch["old_logps"] in
    the first update of a batch."""
    G = targets["rewards"].shape[1]
    world = dist.get_world_size()
    device = batch["ids"].device
    targets = {name: value.to(device) for name, value in targets.items()}
    coupled = couples_rows(c)
    idle = idle_rows(targets, beta, c)  # (p * G,)
    plan = agree_on_plan(batch, G if coupled else 1, c, idle)
    began = time.perf_counter()  # from here to the end of the loop a rank is by itself
    advantages = targets["advantages"].flatten()  # (p * G,)
    sums = torch.zeros(5, dtype=torch.float64)  # loss, entropy, KL, clipped below and above
    slopes = None
    if plan.torn is not None:
        slopes, sums[0] = score_gradients(engine, batch, plan, targets, c, norm)
    # in the first update the policy is the one that sampled: its own log-probs are the old ones
    first_update = "old_logps" not in batch
    old_logps = torch.zeros_like(batch["sampler_logps"])
    finite = True
    keep_step(engine, batch, plan.missing)
    for i, rows in enumerate(plan.micro_batches):
        part = rollout.take(batch, rows)
        part["advantages"] = advantages[rows]
        if slopes is not None:
            part |= {"score_gradients": slopes[rows], "torn": plan.torn[rows]}
        learns = i >= len(plan.resting)
        with torch.set_grad_enabled(learns):
            logps, entropy = engine(part["ids"], part["prompt_lengths"], part["lengths"])  # (n, T)
        if first_update:
            part["old_logps"] = logps.detach()
            old_logps[rows, : logps.shape[1]] = part["old_logps"]
        loss, low, high, kl = token_loss(logps, entropy, part, beta, c, norm)
        reported = loss.item()
        if coupled:
            loss_of_groups, value = coupled_loss(logps, part, rows, targets, c, norm)
            loss = loss + loss_of_groups
            reported += value
        measured = [x.detach().sum().float() for x in (logps, entropy, kl, low, high)]
        logps_sum, *measured = torch.stack(measured).tolist()  # one wait for the device
        # the log-probs too: a group without a gradient may not be in the loss
        finite = finite and math.isfinite(reported + logps_sum)
        if learns:
            # A NaN loss can have a finite gradient, or none: make sure it has not, then the
            # optimizer skips the step on every rank. Times world, because DeepSpeed averages over
            # ranks what is meant to be a sum.
            engine.backward(loss * (world if finite else math.nan), scale_wrt_gas=False)
        sums += torch.tensor([reported, *measured])
    if device.type == "cuda":
        torch.cuda.synchronize()  # the last backward is only queued yet
    seconds = time.perf_counter() - began
    if first_update:
        batch["old_logps"] = old_logps
    metrics = update_metrics(sums, norm["tokens"], has_reference="ref_logps" in batch)
    return metrics | learning_seconds(seconds)


# --- metrics


def update_metrics(sums, tokens: int, has_reference: bool) -> dict:
    """What an update did, over all ranks: its loss, and means over the completion tokens."""
    total, entropy, kl, low, high = across_ranks(sums).tolist()
    metrics = {
        "loss": total,
        "entropy": entropy / tokens,
        "clip_ratio/low": low / tokens,
        "clip_ratio/high": high / tokens,
    }
    if has_reference:
        metrics["kl"] = kl / tokens
    return metrics


def learning_seconds(own: float) -> dict:
    """How long forwards and backwards took the slowest rank and a rank on average, and how long
    this one waits for the slowest (ZeRO 2 and 3 wait in every backward, which is not seen)."""
    seconds = gather_groups(torch.tensor([float(own)]))  # (world,)
    slowest = seconds.max().item()
    return {
        "time/learn_slowest": slowest,
        "time/learn_mean": seconds.mean().item(),
        "time/wait": max(0.0, slowest - own),  # of this rank, before gradients are exchanged
    }


def group_metrics(rewards, lengths) -> dict:
    """What the groups of the step were worth and how long their completions were; rewards and
    lengths (P, G)."""
    return {
        "reward": rewards.mean().item(),
        "reward_std": rewards.std(1).mean().item(),
        "frac_reward_zero_std": L.equal_groups(rewards).float().mean().item(),
        "completions/mean_length": lengths.mean().item(),
        "completions/max_length": lengths.max().item(),
    }


@torch.no_grad()
def sampler_distance(model, batch: dict, c: dict) -> float:
    """Mean distance of the sampler's log-probs from a model's, nats a token, over all ranks."""
    logps = score_rows(model, batch, agree_on_plan(batch, 1, c))  # (N, T)
    apart = (logps - batch["sampler_logps"]).abs().sum()  # both are 0 behind a row's end
    total, tokens = across_ranks(torch.stack([apart, batch["lengths"].sum()])).tolist()
    return total / tokens


def sampler_mismatch(batch: dict, limit: float) -> dict:
    """How far the sampler's log-probs are from the trainer's before the update, over all ranks.
    They should be the same policy: a mean difference above `limit` (nats, -1 off) means that
    weights did not arrive, and stops the run."""
    mask = completion_mask(batch["lengths"])  # (N, T)
    # one entry a completion token of this rank
    d = (batch["old_logps"] - batch["sampler_logps"])[mask]
    ratio = d.clamp(max=20).exp()
    sums = across_ranks(torch.stack([d.abs().sum(), ratio.sum(), mask.sum()]))
    mean, ratio_mean = (sums[:2] / sums[2]).tolist()
    # the smallest ratio as the largest of its negatives: one collective for all three
    extremes = torch.stack([d.abs().max(), ratio.max(), -ratio.min()])
    largest, ratio_max, negative_min = across_ranks(extremes, dist.ReduceOp.MAX).tolist()
    # from here on all ranks know the same numbers, so all stop or none
    if limit >= 0 and mean > limit:
        raise RunStopped(
            f"the sampler's log-probs differ from the trainer's by {mean:.3f} nats a token on "
            f"average (at most {largest:.1f}), over max_logp_difference={limit}: the rollout "
            f"engine does not hold the policy's weights, or the limit is too low for this dtype "
            f"(bfloat16 alone makes about 0.01)"
        )
    return {
        "sampling/sampling_logp_difference/mean": mean,
        "sampling/sampling_logp_difference/max": largest,
        "sampling/importance_sampling_ratio/mean": ratio_mean,
        "sampling/importance_sampling_ratio/min": -negative_min,
        "sampling/importance_sampling_ratio/max": ratio_max,
    }
