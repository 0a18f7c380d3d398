"""The losses of a step as their formulas say, literally: float64 loops over prompts, rows, tokens.

slow_step(logps, entropy, step, c) is the whole; the rest are its parts, an objective at a time.
x is a prompt, i a row of its group, n a row of the step, t a token.
"""

import itertools
import math
from typing import NamedTuple

from common import scheduled

INF = math.inf

# objective: (how tokens are summed, what its advantages are divided by)
TABLE = {
    "grpo": ("row", "group"),
    "dapo": ("token", "group"),
    "dr_grpo": ("constant", "none"),
    "gspo": ("row", "group"),
    "cispo": ("token", "group"),
    "xdr": ("constant", "none"),
    "seed_grpo": ("constant", "none"),
    "token_entropy": ("constant", "none"),
    "maxent": ("constant", "none"),
    "maxrl": ("constant", "mean"),
    "pkpo": ("constant", "none"),
    "flow": ("constant", "none"),
}
OVER_SCORES = ("maxent", "flow")  # objectives whose loss is over the scores of a group


# --- numbers


def slow_softmax(x):
    top = max(x)
    e = [math.exp(v - top) for v in x]
    return [v / sum(e) for v in e]


def slow_log_softmax(x):
    """Of 0-dimensional tensors, with their gradient."""
    top = max(v.item() for v in x)
    log_normaliser = sum((v - top).exp() for v in x).log() + top
    return [v - log_normaliser for v in x]


def mean(x):
    return sum(x) / len(x)


def slow_std(x):
    if len(x) == 1:
        return 0.0
    return math.sqrt(sum((v - mean(x)) ** 2 for v in x) / (len(x) - 1))


def variance(x):
    return sum((v - mean(x)) ** 2 for v in x) / len(x)


# --- of one group: rewards to advantages, targets, weights


def slow_advantages(rewards, scale):
    """A[x][i] of all groups."""
    whole_batch = [v for group in rewards for v in group]
    advantages = []
    for group in rewards:
        divisor = 1.0
        if scale == "group":
            divisor = slow_std(group) + 1e-4
        if scale == "batch":
            divisor = slow_std(whole_batch) + 1e-4
        if scale == "mean":
            divisor = max(mean(group), (max(group) - min(0.0, *group)) / len(group))
        nothing_is_right = scale == "mean" and max(group) <= 0
        if max(group) == min(group) or nothing_is_right:
            advantages.append([0.0] * len(group))
        else:
            advantages.append([(v - mean(group)) / divisor for v in group])
    return advantages


def slow_pass_at_k(group, k):
    """Section 9: what row i adds to the best of every set of k rows that it is in, over all such
    sets; at k = 1, to the mean of the others."""
    G = len(group)
    advantages = []
    for i in range(G):
        others = [r for j, r in enumerate(group) if j != i]
        total = 0.0
        if k == 1 and others:
            total = group[i] - mean(others)
        if k > 1:
            for rest in itertools.combinations(others, k - 1):
                total += max(group[i], *rest) - max(rest)
        advantages.append(total * G / math.comb(G, k))
    return advantages


def slow_bonus(rewards, entropies, coef):
    """Section 3: what is added to the rewards of one group, coef times their std times the z-score
    of the entropies."""
    if max(rewards) == min(rewards) or max(entropies) == min(entropies):
        return [0.0] * len(rewards)
    spread = slow_std(entropies)
    return [coef * slow_std(rewards) * (v - mean(entropies)) / spread for v in entropies]


def slow_unlikely(rewards, logps, coef):
    G = len(rewards)
    worth = []
    for r, mine in zip(rewards, logps):
        rank = sum(other > mine + 1e-4 for other in logps)
        worth.append(r * (1 - coef * (G - rank) / G) if r > 0 else r)
    return worth


def slow_targets(group, T_q, eps):
    keep = 1 - len(group) * eps
    return [keep * p + eps for p in slow_softmax([r / T_q for r in group])]


def slow_weights(u, l, tau, beta):
    if tau == INF:
        return [1 / len(u)] * len(u)
    if tau + beta == 0:
        return [float(v == max(u)) / u.count(max(u)) for v in u]
    return slow_softmax([(a + beta * b) / (tau + beta) for a, b in zip(u, l)])


def slow_semantic_entropy(clusters, mean_logps):
    mass = {}
    for cluster, p in zip(clusters, slow_softmax(mean_logps)):
        mass[cluster] = mass.get(cluster, 0.0) + p
    return -sum(p * math.log(p) for p in mass.values())


# --- a step as lists


class Numbers(NamedTuple):
    """Those of the policy are 0-dimensional tensors with a gradient, the others are floats."""

    rewards: list  # [x][i] as they were given
    rows: list  # [x] range of the rows n of a group
    lengths: list  # [n] T_i
    policy: list  # [n][t] log-probs
    entropy: list  # [n][t]
    measured_entropy: list  # [n][t] without a gradient
    old: list  # [n][t] log-probs, so are the next two
    ref: list
    sampler: list
    clusters: list  # [x][i]
    modes: list  # [x]


def numbers_of(logps, entropy, step):
    G = step.G
    return Numbers(
        rewards=step.rewards.double().tolist(),
        rows=[range(x * G, (x + 1) * G) for x in range(step.P)],
        lengths=step.lengths.tolist(),
        policy=[row.unbind() for row in logps.unbind()],
        entropy=[row.unbind() for row in entropy.unbind()],
        measured_entropy=step.entropy.double().tolist(),
        old=step.old.double().tolist(),
        ref=step.ref.double().tolist(),
        sampler=step.sampler.double().tolist(),
        clusters=step.clusters.tolist(),
        modes=step.modes.tolist(),
    )


def row_score(values, T, norm, c):
    """Sum of a row's values over T ("length"), L ("constant") or 1 ("sum")."""
    divisor = {"length": T, "constant": c["max_completion_length"], "sum": 1}[norm]
    return sum(values[:T]) / divisor


def group_scores(values, s, x, norm, c):
    return [row_score(values[n], s.lengths[n], norm, c) for n in s.rows[x]]


def target_scores(values, s, x, c):
    """The scores that maxent and flow compare."""
    scores = group_scores(values, s, x, c["maxent_score_norm"], c)
    return [c["maxent_score_scale"] * v for v in scores]


def slow_shaped_rewards(s, c):
    """[x][i], with what a row's rarity and its entropy make of its reward."""
    shaped = []
    for x, group in enumerate(s.rewards):
        if c["unlikeliness_coef"] > 0:
            sums = group_scores(s.sampler, s, x, "sum", c)
            group = slow_unlikely(group, sums, c["unlikeliness_coef"])
        entropies = group_scores(s.measured_entropy, s, x, "length", c)
        bonus = slow_bonus(group, entropies, c["policy_entropy_bonus_coef"])
        shaped.append([r + b for r, b in zip(group, bonus)])
    return shaped


def slow_active(rewards, skip):
    """[x] whether maxent and flow learn from a group."""
    lowest = min(min(group) for group in rewards)
    active = []
    for group in rewards:
        equal = max(group) == min(group)
        if skip == "all":
            active.append(not equal)
        elif skip == "wrong":
            active.append(not (equal and group[0] == lowest))
        else:
            active.append(True)
    return active


def slow_share(group, c):
    """What a group counts in the loss, by its rewards as they were given."""
    return 4 * variance(group) if c["maxent_group_weight"] == "spread" else 1.0


# --- what an objective asks of each row: advantages A[x][i] and weights a[x][i] of rows in a mean


def slow_rows(s, shaped, active, c):
    objective = c["objective"]
    G = len(shaped[0])
    A = slow_advantages(shaped, c["scale_rewards"] or TABLE[objective][1])
    a = [[1 / G] * G for _ in shaped]
    for x in range(len(shaped)):
        if objective == "pkpo":
            A[x] = slow_pass_at_k(shaped[x], min(G, scheduled(c["pkpo_k"], 0)))
        if objective == "seed_grpo":
            A[x] = seed_grpo_advantages(s, x, A[x], c)
        if objective == "xdr":
            a[x] = xdr_weights(s, x, A[x], c)
        if objective == "maxent":
            w = maxent_weights(s, x, shaped[x], c)
            share = slow_share(s.rewards[x], c) if active[x] else 0.0
            A[x] = [share * (v - 1 / G) for v in w]
            a[x] = [1.0] * G
    return A, a


def seed_grpo_advantages(s, x, A, c):
    H = slow_semantic_entropy(s.clusters[x], group_scores(s.sampler, s, x, "length", c))
    return [v / (1 + c["seed_grpo_alpha"] / math.log(len(A)) * H) for v in A]


def xdr_weights(s, x, A, c):
    U = A
    if c["xdr_utility"] == "surrogate":
        U = [v * s.lengths[n] / c["max_completion_length"] for v, n in zip(A, s.rows[x])]
    modes = max(1, s.modes[x]) if c["xdr_mode_adaptive_tau"] else 1
    tau = c["maxent_tau"] * math.log(2) / math.log(1 + modes)
    beta = c["beta"] if c["xdr_ref_tilt"] else 0.0
    return slow_weights(U, target_scores(s.ref, s, x, c), tau, beta)


def utilities(shaped_group, c):
    q = slow_targets(shaped_group, c["maxent_q_temperature"], c["maxent_q_epsilon"])
    return [math.log(v) for v in q]


def maxent_weights(s, x, shaped_group, c):
    u = utilities(shaped_group, c)
    return slow_weights(u, target_scores(s.ref, s, x, c), c["maxent_tau"], c["beta"])


# --- terms of the loss over the rows of a group, before the mean over groups


def listwise_term(s, x, shaped_group, c):
    scores = target_scores(s.policy, s, x, c)
    log_p = slow_log_softmax(scores)
    term = -sum(v * p for v, p in zip(maxent_weights(s, x, shaped_group, c), log_p))
    if c["maxent_loss"] == "floored":
        G = len(scores)
        mean = sum(s.rewards[x]) / G
        for reward, score, log_share in zip(s.rewards[x], scores, log_p):
            if reward < mean and min(s.rewards[x]) < max(s.rewards[x]):
                lacking = max(0.0, 1 / G - math.exp(log_share.item()))
                term = term + lacking * (score - score.item())  # 0, but with a gradient
    return term


def mle_term(s, x, shaped_group, c):
    means = group_scores(s.policy, s, x, "length", c)
    return -sum(v * m for v, m in zip(maxent_weights(s, x, shaped_group, c), means))


def flow_term(s, x, shaped_group, c):
    d = []
    u = utilities(shaped_group, c)
    l = target_scores(s.ref, s, x, c)
    for i, score in enumerate(target_scores(s.policy, s, x, c)):
        d.append(score - (u[i] + c["beta"] * l[i]) / c["maxent_tau"])
    return variance(d) / 2


def slow_group_term(c):
    """The one of the three above that this config has, or None."""
    if c["objective"] == "flow":
        return flow_term
    if c["objective"] == "maxent":
        terms = {"listwise": listwise_term, "floored": listwise_term, "mle": mle_term}
        return terms.get(c["maxent_loss"])
    return None


def slow_mode_entropy(scores, rewards):
    """One group's term of L_modes, times P * L."""
    best = max(rewards)
    C = [i for i, r in enumerate(rewards) if r == best]
    if len(C) < 2 or best == min(rewards):
        return 0.0
    return -sum(slow_log_softmax([scores[i] for i in C])) / len(C)


def slow_mode_loss(s, x, c):
    norm = c["mode_entropy_score_norm"]
    scores = group_scores(s.policy, s, x, norm, c)
    divisor = len(s.rows) * (c["max_completion_length"] if norm == "sum" else 1)
    return c["mode_entropy_coef"] * slow_mode_entropy(scores, s.rewards[x]) / divisor


# --- terms of the loss over tokens


def has_policy_gradient(c):
    if c["objective"] == "maxent":
        return c["maxent_loss"] == "policy_gradient"
    return c["objective"] not in OVER_SCORES


def token_share(s, n, c):
    """What a token of row n counts in a mean over the step."""
    N = len(s.lengths)
    shares = {
        "row": 1 / s.lengths[n] / N,
        "token": 1 / sum(s.lengths),
        "constant": 1 / (N * c["max_completion_length"]),
    }
    return shares[TABLE[c["objective"]][0]]


def sampler_weight(s, n, t, c):
    """rho: for the mismatch between trainer and sampler."""
    kind = c["importance_sampling"]
    if kind == "none":
        return 1.0
    mismatch = [s.old[n][j] - s.sampler[n][j] for j in range(s.lengths[n])]
    exponent = mismatch[t] if kind.startswith("token") else sum(mismatch)
    if kind == "sequence_geometric":
        exponent /= s.lengths[n]
    rho = math.exp(exponent)
    if rho <= c["importance_sampling_cap"]:
        return rho
    return 0.0 if kind.endswith("mask") else c["importance_sampling_cap"]


def policy_ratio(s, n, t, c):
    d = [s.policy[n][j] - s.old[n][j] for j in range(s.lengths[n])]
    log_ratio = sum(d) / len(d) if c["objective"] == "gspo" else d[t]
    return log_ratio.exp()


def ppo_gain(ratio, A, c):
    unclipped = min(ratio, c["delta"]) if c["delta"] > 0 else ratio
    clipped = min(max(ratio, 1 - c["epsilon"]), 1 + c["epsilon_high"])
    return min(unclipped * A, clipped * A)


def slow_policy_gradient(s, n, A, weight, c):
    """(term of the loss, tokens clipped below, above) of row n; weight: of each of its tokens."""
    term = 0.0
    low = 0
    high = 0
    for t in range(s.lengths[n]):
        ratio = policy_ratio(s, n, t, c)
        if c["objective"] == "cispo":
            cap = c["cispo_epsilon_max"]
            gain = min(ratio.item(), cap) * A * s.policy[n][t]
            high += bool(ratio > cap and A > 0)
        else:
            gain = ppo_gain(ratio, A, c)
            low += bool(ratio < 1 - c["epsilon"] and weight * A < 0)
            high += bool(ratio > 1 + c["epsilon_high"] and weight * A > 0)
        term = term - weight * sampler_weight(s, n, t, c) * gain
    return term, low, high


def slow_kl(s, n, kind):
    """(sum over the tokens of row n, with a gradient; the same of k3, as a number)."""
    total, k3_sum = 0.0, 0.0
    for t in range(s.lengths[n]):
        d = s.policy[n][t] - s.ref[n][t]
        k3 = (-d).exp() + d - 1
        total = total + (d**2 / 2 if kind == "k2" else k3)
        k3_sum += math.exp(-d.item()) + d.item() - 1
    return total, k3_sum


def kl_is_in_the_loss(c):
    tilts = c["objective"] in OVER_SCORES and not c["maxent_kl"]
    return not tilts and not c["xdr_ref_tilt"]


# --- the whole


def slow_step(logps, entropy, step, c):
    """Sections 2 to 4: (loss, tokens clipped below, above, sum of k3) of one step.

    Where the page leaves something open: gspo's ratio of a row counts at each of its tokens for
    sampler weights and clip counts, and a token counts as clipped only with an advantage, so not
    under a weight of 0."""
    s = numbers_of(logps, entropy, step)
    shaped = slow_shaped_rewards(s, c)
    active = slow_active(s.rewards, c["maxent_skip_equal_groups"])
    A, a = slow_rows(s, shaped, active, c)
    loss = (logps * 0).sum()
    low = 0
    high = 0
    kl = 0.0
    group_term = slow_group_term(c)
    for x, rows in enumerate(s.rows):
        if group_term is not None and active[x]:
            share = slow_share(s.rewards[x], c) / max(1, sum(active))
            loss = loss + share * group_term(s, x, shaped[x], c)
        if c["mode_entropy_coef"] > 0:
            loss = loss + slow_mode_loss(s, x, c)
        for i, n in enumerate(rows):
            term, row_low, row_high, row_kl = slow_row(s, n, A[x][i], a[x][i], c)
            loss = loss + term
            low += row_low
            high += row_high
            kl += row_kl
    return loss, low, high, kl


def slow_row(s, n, A, a, c):
    """What the tokens of row n add to the four numbers of slow_step."""
    L = c["max_completion_length"]
    share = token_share(s, n, c)
    term = 0.0
    low = 0
    high = 0
    kl = 0.0
    if has_policy_gradient(c):
        weighs_rows = c["objective"] in ("xdr", "maxent")
        weight = a / L / len(s.rows) if weighs_rows else share
        term, low, high = slow_policy_gradient(s, n, A, weight, c)
    if c["objective"] == "token_entropy":
        entropies = sum(s.entropy[n][: s.lengths[n]])
        term = term - c["token_entropy_coef"] * entropies / (len(s.lengths) * L)
    if c["beta"] > 0:
        value, kl = slow_kl(s, n, c["kl_loss_type"])
        if kl_is_in_the_loss(c):
            term = term + c["beta"] * share * value
    return term, low, high, kl
