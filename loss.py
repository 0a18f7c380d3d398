"""The objectives as pure functions of tensors and floats: no model, no config, no ranks in here.

Shapes: P prompts, G completions per prompt (the group), N = P*G rows prompt-major, T tokens of the
longest completion (T_i of row i), L max_completion_length, V vocabulary, H hidden size. A mask
(N, T) is 1 on completion tokens, their EOS included. Log-probs are taken at the sampling
temperature. A loss is a sum over rows or tokens divided by a normaliser of the whole step, which
the caller knows before the first backward. So any split into micro-batches or ranks gives the same
loss and the same gradient. The normalisers (`token_sum` in checks.OBJECTIVES):

    mean over the active groups     maxent (listwise, floored, mle) and flow; their KL term: N * L
    N * L                           dr_grpo, maxrl, pkpo, xdr, seed_grpo, token_entropy, and maxent
                                    as a policy gradient; N counts groups without a gradient too
    T_i * N                         grpo, gspo
    all completion tokens           dapo, cispo

    grpo      clipped surrogate, mean over tokens of a row, then over rows
              Shao et al. 2024, arXiv:2402.03300
    dapo      the same, mean over all tokens of the step
              Yu et al. 2025, arXiv:2503.14476
    dr_grpo   the same, sum over tokens / (N * L), advantages not scaled
              Liu et al. 2025, arXiv:2503.20783
    gspo      the same as grpo with one ratio per row, exp(mean log ratio)
              Zheng et al. 2025, arXiv:2507.18071
    cispo     REINFORCE weighted by a capped, detached ratio, mean over tokens
              MiniMax 2025, arXiv:2506.13585
    xdr       dr_grpo whose rows are weighted by G * softmax(A / tau)
    maxent    cross-entropy over the group of p = softmax(scores) against the weights
              w = softmax((log q + beta * l) / (tau + beta)), l the reference's scores
    maxrl     dr_grpo with advantages (r - mean) / mean
              Tajwar et al. 2026, arXiv:2602.02710
    pkpo      dr_grpo with the leave-one-out gradient of pass@k as advantages
              Walder and Karkhanis 2025, arXiv:2505.15201
    flow      half the variance over the group of scores - (log q + beta * l) / tau
              after FlowRL, Zhu et al. 2025, arXiv:2509.15207

maxent and maxrl are relatives. With rewards of 0 and 1, tau -> 0 and beta = 0, w is uniform over
the K right rows. As long as p is near 1/G, maxent's gradient, sum_i (p_i - w_i) * ds_i, then has
the coefficients -(1/K) * (1 - K/G) on right and 1/G on wrong rows: maxrl's advantages divided by
-G, on scores instead of log-probs. What maxent adds is p as a baseline that knows what the policy
has learnt, a temperature, and a reference. All right rows have the same w, so p - w pushes the
likelier ones less: where answers are short, and p far from 1/G, that keeps many of them.

Two more exist for comparison: seed_grpo (dr_grpo, advantages shrunk where the answers of a group
differ, Chen et al. 2025, arXiv:2505.12346) and token_entropy (dr_grpo with the usual bonus for the
entropy of every token).
"""

import functools
import math
from typing import NamedTuple

import torch
from torch import Tensor

# --- from the rewards of a step, (P, G), to advantages and weights of its rows, (P, G)


def equal_groups(rewards: Tensor) -> Tensor:
    """(P,) bool: groups whose rewards are all the same. Compared directly, because in fp32 the mean
    of equal numbers is not exact."""
    return rewards.amax(1) == rewards.amin(1)


def group_advantages(rewards: Tensor, scale: str) -> Tensor:
    """A = r - mean_group(r), (P, G), divided as `scale` says: "none": by nothing; "group": by the
    group's std + 1e-4 (the G - 1 estimate); "batch": by the std of all rows + 1e-4; "mean": by the
    group's mean. Exactly 0 where all rewards of a group are equal.

    "mean" is maxrl, meant for rewards >= 0. With K of G rows right, A is (1 - K/G) / (K/G) on right
    rows and -1 on wrong ones. It estimates the gradient of log p's series, -sum_k (1 - p)^k / k, up
    to k = G - 1 (Tajwar et al. 2026, arXiv:2602.02710). Subtracting the mean loses the term k = G:
    groups with K = 0, whose mean is 0, would have to count too. A of a group's right rows sums to
    G - K: most for a single success; at K = G - 1 it is nearly dr_grpo's. A is 0 where no reward is
    above 0. Negative rewards could bring the mean close to 0, so the divisor is at least
    (max_group(r) - min(0, min_group(r))) / G, and |A| at most G; the mean of rewards >= 0 is never
    below that."""
    mean = rewards.mean(1, keepdim=True)  # (P, 1)
    advantages = rewards - mean  # (P, G)
    # 1e-4 keeps the differences of nearly equal rewards from being blown up
    if scale == "group":
        advantages = advantages / (rewards.std(1, keepdim=True) + 1e-4)
    elif scale == "batch":
        advantages = advantages / (rewards.std() + 1e-4)
    elif scale == "mean":
        best = rewards.amax(1, keepdim=True)  # (P, 1)
        worst = rewards.amin(1, keepdim=True).clamp(max=0)  # (P, 1), 0 if no reward is below 0
        divisor = torch.maximum(mean, (best - worst) / rewards.shape[1])
        advantages = (advantages / divisor).masked_fill(best <= 0, 0.0)
    elif scale != "none":
        raise ValueError(f'scale_rewards={scale!r} must be "group", "batch", "mean" or "none"')
    # rounding: r - mean of equal rewards is only nearly 0, and dividing would blow it up
    return advantages.masked_fill(equal_groups(rewards)[:, None], 0.0)


def pass_at_k_advantages(rewards: Tensor, k: int) -> Tensor:
    """A_i = G / C(G, k) * sum over all sets J of k - 1 other rows of max(0, r_i - best of J),
    (P, G), 1 <= k <= G.

    sum_i A_i * dlogp_i / G is an unbiased gradient of the expected best reward of k samples, which
    for rewards of 0 and 1 is pass@k (Walder and Karkhanis 2025, arXiv:2505.15201, with their
    leave-one-out baseline: the best of J does not depend on row i). For rewards of 0 and 1, A_i is
    k * (share of the sets J without a right row) on a right row and 0 on a wrong one. Groups of
    equal rewards get 0. At k = 1 there would be no baseline, so the mean of the other rows is
    subtracted instead, which is dr_grpo times G / (G - 1)."""
    G = rewards.shape[1]
    if k == 1:
        return group_advantages(rewards, "none") * G / max(1, G - 1)
    ordered, order = rewards.sort(1)  # (P, G), the worst row first
    # shares[j]: G / C(G, k) times the C(j, k - 2) sets of k - 1 rows whose best is row j of
    # `ordered`. They need not leave out row i: where j >= i, the gain below is 0. Python's ints,
    # because binomials may be larger than a tensor holds.
    shares = [math.comb(j, k - 2) * G / math.comb(G, k) for j in range(G)]
    gains = (ordered[:, :, None] - ordered[:, None, :]).clamp(min=0)  # (P, G, G): r_i - r_j
    advantages = (gains * rewards.new_tensor(shares)).sum(2)  # (P, G)
    # back to the order of the rows
    return torch.empty_like(rewards).scatter(1, order, advantages)


# name in checks.Objective.advantage -> function of (rewards (P, G), scale_rewards, pkpo_k)
ADVANTAGES = {
    "centred": lambda rewards, scale, k: group_advantages(rewards, scale),
    "pass_at_k": lambda rewards, scale, k: pass_at_k_advantages(rewards, k),
}


def log_reward_targets(rewards: Tensor, temperature: float, epsilon: float) -> Tensor:
    """u = log q, (P, G), with q = (1 - G*eps) * softmax(r / T_q) + eps. Computed in log space, so
    that nothing underflows at small T_q."""
    G = rewards.shape[1]
    if not 0 <= epsilon * G <= 1 + 1e-6:
        raise ValueError(f"maxent_q_epsilon={epsilon} must lie between 0 and 1/G = {1 / G:.4f}")
    # subtracted before dividing, so that adding a constant to a group changes nothing
    best = rewards.amax(1, keepdim=True)  # (P, 1)
    log_softmax = ((rewards - best) / temperature).log_softmax(1)  # (P, G)
    if epsilon == 0:
        return log_softmax
    keep = max(0.0, 1 - G * epsilon)  # the share of the softmax in q
    log_keep = math.log(keep) if keep > 0 else -math.inf
    return torch.logaddexp(log_softmax + log_keep, torch.full_like(rewards, math.log(epsilon)))


def reward_targets(rewards: Tensor, temperature: float, epsilon: float) -> Tensor:
    """q = (1 - G*eps) * softmax(r / T_q) + eps, (P, G); rows sum to 1. eps above 1/G is a
    ValueError."""
    return log_reward_targets(rewards, temperature, epsilon).exp()


def maxent_weights(utilities: Tensor, ref_scores: Tensor | None, tau: float, beta: float) -> Tensor:
    """w = softmax((u + beta * l) / (tau + beta)), (P, G), detached. It maximises
    <w, u> + tau * H(w) - beta * KL(w || ref).

    utilities u: log q for maxent, advantages for xdr. ref_scores l: the reference model's sequence
    scores, unused at beta = 0; ref = softmax(l). Limits: tau = inf gives uniform weights,
    beta = inf softmax(l), tau + beta = 0 uniform weights over the exact argmax of u. ValueError if
    both are infinite, or if beta > 0 has no ref_scores.
    """
    if math.isinf(tau) and math.isinf(beta):
        raise ValueError("tau and beta are both infinite: the weights are not defined")
    # the limits have branches of their own: the formula would give NaN
    if math.isinf(tau):
        return torch.full_like(utilities, 1 / utilities.shape[1])
    if beta > 0 and ref_scores is None:
        raise ValueError(f"beta={beta} needs the reference model's scores")
    if math.isinf(beta):
        return ref_scores.detach().softmax(1)
    z = utilities.detach()  # (P, G)
    if beta > 0:  # at beta = 0 an infinite l would give 0 * inf = NaN
        z = z + beta * ref_scores.detach()
    # subtracted before dividing, so that no difference is lost at a tiny tau + beta
    z = z - z.amax(1, keepdim=True)
    if tau + beta < torch.finfo(z.dtype).tiny:  # 0, also after rounding to the dtype of z
        best = (z == 0).to(z.dtype)
        return best / best.sum(1, keepdim=True)
    return (z / (tau + beta)).softmax(1)


def entropy_bonus(rewards: Tensor, entropies: Tensor, coef: float) -> Tensor:
    """coef * std(r) * z per row, (P, G), to be added to the rewards. z is the z-score of a row's
    mean token entropy (P, G) within its group. 0 in groups with equal rewards (std(r) is 0) or
    equal entropies."""
    centred = entropies - entropies.mean(1, keepdim=True)  # (P, G)
    z = centred / entropies.std(1, keepdim=True)  # (P, G)
    flat = equal_groups(rewards) | equal_groups(entropies)  # (P,); z may be NaN there
    bonus = coef * rewards.std(1, keepdim=True) * z
    return bonus.masked_fill(flat[:, None], 0.0)


def unlikely_rewards(rewards: Tensor, seq_logps: Tensor, coef: float) -> Tensor:
    """r * (1 - coef * (G - rank) / G) where r > 0, (P, G). rank: how many rows of the group are
    more likely, by seq_logps (P, G) under the sampler; equal answers share a rank.

    So a rare right answer is worth more than a common one, even in groups where all are right
    (which maxent and flow skip, unless maxent_skip_equal_groups says otherwise). He, Fried and
    Welleck 2025, arXiv:2506.02355, use coef 0.25; 0 changes nothing."""
    G = rewards.shape[1]
    # log-probs of equal answers differ by rounding: less than 1e-4 nats, or 1e-6 of a long sum
    rounding = 1e-4 + 1e-6 * seq_logps.abs()  # (P, G)
    rank = (seq_logps[:, None, :] > (seq_logps + rounding)[:, :, None]).sum(2)  # (P, G)
    return torch.where(rewards > 0, rewards * (1 - coef * (G - rank) / G), rewards)


def xdr_utilities(advantages: Tensor, lengths: Tensor, kind: str, max_length: int) -> Tensor:
    """The utilities U of xdr's weights, (P, G): the "advantage" A, or the "surrogate" A * T_i / L,
    the row's term of the loss. The second favours long rows and makes the best tau depend on L."""
    if kind == "advantage":
        return advantages
    return advantages * lengths / max_length


def mode_adaptive_tau(tau: float, correct_modes: Tensor) -> list[float]:
    """tau * log 2 / log(1 + k) for each group, k = max(1, number of its different correct answers),
    from correct_modes (P,). At k = 1 it is tau itself."""
    return [tau * math.log(2) / math.log1p(max(1.0, k)) for k in correct_modes.tolist()]


def xdr_weights(
    utilities: Tensor, ref_scores: Tensor | None, taus: list[float], beta: float
) -> Tensor:
    """w = softmax((U + beta * l) / (tau_x + beta)), (P, G), with a tau_x for each group x."""
    weights = []
    for x, tau in enumerate(taus):
        group_ref = None if ref_scores is None else ref_scores[x : x + 1]
        weights.append(maxent_weights(utilities[x : x + 1], group_ref, tau, beta))  # (1, G)
    return torch.cat(weights)


def semantic_entropy(clusters: Tensor, mean_logps: Tensor) -> Tensor:
    """H_sem, (P,), nats: the entropy over the different answers of a group. clusters (P, G): rows
    with the same number gave the same answer. A row's mass is the softmax over the group of
    mean_logps (P, G); a cluster's mass is the sum of its rows'."""
    p = mean_logps.softmax(1)  # (P, G)
    same = clusters[:, :, None] == clusters[:, None, :]  # (P, G, G)
    mass = (same * p[:, None, :]).sum(2)  # (P, G): mass of each row's cluster
    # -sum_rows p * log mass = -sum_clusters mass * log mass; xlogy: a row of p = 0 counts as 0
    return -torch.xlogy(p, mass).sum(1)


def semantic_scale(entropy: Tensor, alpha: float, G: int) -> Tensor:
    """1 / (1 + alpha / log G * H_sem), (P, 1), G >= 2: the factor by which seed_grpo shrinks the
    advantages of a group. The more its answers differ, the smaller the factor. The paper leaves
    the function open (it names linear, exponential and focal ones)."""
    return 1 / (1 + alpha / math.log(G) * entropy[:, None])


# --- which groups count, how much, and what their weights look like


def active_groups(rewards: Tensor, skip: str) -> Tensor:
    """(P,) bool: groups that maxent and flow learn from. skip says which equal groups they leave
    out: "all"; "wrong": only those at the lowest reward of the step; "none". `rewards` are those of
    the whole step."""
    equal = equal_groups(rewards)
    if skip == "none":
        return torch.ones_like(equal)
    if skip == "wrong":
        return ~(equal & (rewards[:, 0] == rewards.min()))
    return ~equal


def reward_spread(rewards: Tensor) -> Tensor:
    """4 * variance of the rewards within a group, (P,). For rewards of 0 and 1 that is
    4 * mean * (1 - mean), at most 1."""
    return 4 * rewards.var(1, correction=0)


def weight_metrics(weights: Tensor, rewards: Tensor, active: Tensor) -> dict:
    """How flat the weights are. Means over active groups: entropy H (nats), its share of ln G,
    exp(H), the largest weight. Means over active groups in which not all rows have the best reward:
    the mass on the others, and the excess entropy (H - ln n_top) / (ln G - ln n_top), where n_top
    rows have the best reward. The excess is 0 when w is uniform over these and 1 when it is
    uniform over all rows. Empty without an active group. weights, rewards: (P, G); active: (P,)."""
    if not active.any():
        return {}
    w = weights[active]  # (a, G), a active groups
    r = rewards[active]  # (a, G)
    G = w.shape[1]
    H = torch.special.entr(w).sum(1)  # (a,) nats
    metrics = {
        "weights/entropy": H.mean().item(),
        "weights/entropy_norm": (H / math.log(G)).mean().item(),
        "weights/effective_rollouts": H.exp().mean().item(),
        "weights/max": w.amax(1).mean().item(),
    }
    top = r == r.amax(1, keepdim=True)  # (a, G) rows at the best reward
    n_top = top.sum(1)  # (a,)
    has_worse = n_top < G  # (a,) bool; where all rows are best, ln G - ln n_top is 0
    if has_worse.any():
        excess = (H - n_top.log()) / (math.log(G) - n_top.log())  # (a,)
        metrics["weights/incorrect_mass"] = (w * ~top).sum(1)[has_worse].mean().item()
        metrics["weights/excess_entropy"] = excess[has_worse].mean().item()
    return metrics


def pull(scores: Tensor, weights: Tensor, active: Tensor) -> dict:
    """|p - 1/G| / |w - 1/G|, p = softmax(s), averaged over active groups whose weights are not
    uniform. The gradient of the listwise loss by s is p - w. A pull of 0 means that p is flat and
    only w counts, as in a policy gradient; 1, that what the policy already knows weighs as much as
    what the rewards ask for. scores, weights: (P, G). Empty without such a group."""
    G = weights.shape[1]
    asked = (weights - 1 / G).norm(dim=1)  # (P,)
    counted = active & (asked > 1e-6)
    if not counted.any():
        return {}
    known = (scores.softmax(1) - 1 / G).norm(dim=1)  # (P,)
    return {"weights/pull": (known[counted] / asked[counted]).mean().item()}


# --- losses over the scores of a group


def sequence_scores(
    logps: Tensor, lengths: Tensor, norm: str, max_length: int, scale: float = 1.0
) -> Tensor:
    """s = scale * sum_t logp / divisor, (N,); the divisor is T_i ("length"), L ("constant") or 1
    ("sum"). `logps` (N, T) are 0 outside the completion.

    The scale sets how sharp p = softmax(s) is. At scale 1 the mean log-probs of a group differ by a
    few tenths, so p stays near 1/G and hardly counts in p - w; the larger the scale, the sooner
    p = w. A policy with p = w (beta = 0) has mean log-probs of u / (scale * tau) + constant, so the
    bound T_q * tau <= 1 / ln V becomes scale * T_q * tau <= 1 / ln V (checks.tau_limit)."""
    divisor = {"length": lengths, "constant": max_length, "sum": 1}[norm]
    return scale * (logps.sum(1) / divisor)


def sum_active_groups(
    losses: Tensor, active: Tensor, norm: float, group_weight: Tensor | None
) -> Tensor:
    """Sum over active groups of group_weight * loss / norm. losses, active, group_weight (P,);
    group_weight None: 1."""
    if group_weight is not None:
        losses = losses * group_weight
    # masked_fill, not a product: 0 times a NaN would make the whole sum NaN
    return losses.masked_fill(~active, 0.0).sum() / norm


def listwise_loss(
    scores: Tensor,
    weights: Tensor,
    active: Tensor,
    norm: float | None = None,
    group_weight: Tensor | None = None,
    floored: Tensor | None = None,
) -> Tensor:
    """loss = -sum_active sum_i w_i * log p_i / norm, p = softmax(s). scores s, weights w (P, G),
    active (P,). norm None: max(1, number of active groups).

    Gradient per group: sum_i (p_i - w_i) * ds_i, zero exactly when p equals w. With summed
    log-probs as scores, that makes equally rewarded answers equally likely. With means over length
    they become equally likely *per token*, so a short answer ends up more likely than a long one:
    pi_long = pi_short^(T_long / T_short). With rewards 0 and 1, tau -> 0, beta = 0 and p = 1/G, the
    gradient is maxrl's on s (see the top of this file); pull() measures how far p is from 1/G.

    floored (P, G) bool: rows whose coefficient is max(p_i, 1/G) - w_i instead; the value of the
    loss does not change. p is a share in a softmax of mean log-probs, not how often a row is
    sampled. Long rows of improbable tokens have a p near 0 even if a third of all samples are such
    rows, so p - w hardly pushes them down. Floored, wrong rows are pushed down at least as hard as
    by a policy gradient.
    """
    G = scores.shape[1]
    log_p = scores.log_softmax(1)  # (P, G)
    losses = -(weights * log_p).sum(1)  # (P,)
    if floored is not None:
        lacking = (1 / G - log_p.detach().exp()).clamp(min=0) * floored  # (P, G)
        losses = losses + (lacking * (scores - scores.detach())).sum(1)  # adds 0, with a gradient
    norm = max(1, int(active.sum())) if norm is None else norm
    return sum_active_groups(losses, active, norm, group_weight)


def mle_loss(
    scores: Tensor, weights: Tensor, active: Tensor, norm: float, group_weight: Tensor | None = None
) -> Tensor:
    """loss = -sum_active sum_i w_i * s_i / norm, s (P, G) the mean log-prob of a row: weighted
    imitation without a baseline, for comparison only. Groups of equal rewards, if they are active,
    make their own samples more likely, short ones most."""
    return sum_active_groups(-(weights * scores).sum(1), active, norm, group_weight)


def balance_goals(utilities: Tensor, ref_scores: Tensor | None, tau: float, beta: float) -> Tensor:
    """(u + beta * l) / tau, (P, G): what flow wants the scores to be, up to a constant for each
    group. tau = inf: 0 for all."""
    if beta > 0:
        utilities = utilities + beta * ref_scores
    return (utilities / tau).detach()


def balance_loss(
    scores: Tensor, goals: Tensor, active: Tensor, norm: float, group_weight: Tensor | None = None
) -> Tensor:
    """loss = 1/(2 norm) * sum_active mean_i (d_i - mean d)^2, d = s - (u + beta * l) / tau. scores
    s and goals (see balance_goals) (P, G).

    This is trajectory balance. The mean of the group stands for the log-normaliser (VarGrad,
    Richter et al. 2020, arXiv:2010.10436), which FlowRL learns (Zhu et al. 2025, arXiv:2509.15207).
    Gradient per group: (1/G) sum_i (d_i - mean d) * ds_i. It is 0 exactly where (at beta = 0) pi is
    proportional to exp(u / tau): pi of whole answers if scores are sums, per token if they are
    means. That holds whatever policy sampled the answers, so there is no importance ratio. Unlike
    maxent's, the pull does not saturate in p; it grows with 1 / tau. In groups of equal rewards, if
    they are not skipped, the scores are pulled together; as tau -> inf, in all groups."""
    d = scores - goals  # (P, G)
    d = d - d.mean(1, keepdim=True)
    return sum_active_groups((d**2).mean(1) / 2, active, norm, group_weight)


def mode_entropy_loss(seq_logps: Tensor, rewards: Tensor, norm: float) -> Tensor:
    """loss = -1/norm * sum_x [n_c >= 2] / n_c * sum_{i in C} log softmax_C(s)_i: pulls the best
    rows towards equal likelihood.

    C: the n_c rows of group x with its best reward, empty if all its rewards are equal. seq_logps
    s, rewards (P, G). norm = P * L if s are summed log-probs, P if means. Gradient of a row in C:
    (p_i - 1/n_c) * ds_i / norm, p = softmax over C; wrong rows have none."""
    best = rewards == rewards.amax(1, keepdim=True)
    best = best & ~equal_groups(rewards)[:, None]  # C, (P, G)
    count = best.sum(1)  # n_c, (P,)
    use = count >= 2  # (P,) bool
    if not use.any():
        return seq_logps.sum() * 0.0  # zero, but backward() needs a graph
    # the other groups are left out: a logsumexp over an empty C is -inf, its gradient NaN
    s = seq_logps[use]  # (used groups, G), like best and log_p
    best = best[use]
    log_p = s - s.masked_fill(~best, -math.inf).logsumexp(1, keepdim=True)
    # masked_fill, not a product: a wrong row's log_p may be -inf, and 0 times that is NaN
    return -(log_p.masked_fill(~best, 0.0).sum(1) / count[use]).sum() / norm


# --- losses that are sums over tokens


def in_columns(advantages: Tensor) -> Tensor:
    """Advantages of rows (n,) as (n, 1); those of tokens (n, T) as they are."""
    return advantages if advantages.dim() == 2 else advantages[:, None]


def clipped_surrogate(
    log_ratio: Tensor, advantages: Tensor, low: float, high: float, delta: float = -1.0
):
    """PPO's min(c * A, clip(c, 1-low, 1+high) * A), (n, T), with c = exp(log_ratio), and the masks
    of what is clipped below (A < 0) and above (A > 0). log_ratio (n, T), or (n, 1) for gspo;
    advantages (n,), or (n, T) of tokens. Schulman et al. 2017, arXiv:1707.06347. delta > 0 caps c
    in the unclipped branch: the dual clip of Ye et al. 2019, arXiv:1912.09729."""
    A = in_columns(advantages)  # (n, 1) or (n, T)
    # clamped: an infinite ratio would give NaN for clipped tokens and for A = 0
    ratio = log_ratio.clamp(max=20).exp()  # (n, T) or (n, 1)
    unclipped = ratio.clamp(max=delta) if delta > 0 else ratio
    surrogate = torch.minimum(unclipped * A, ratio.clamp(1 - low, 1 + high) * A)
    # only with these signs of A does the minimum take the clipped branch, whose gradient is 0
    clipped_low = (ratio < 1 - low) & (A < 0)
    clipped_high = (ratio > 1 + high) & (A > 0)
    return surrogate, clipped_low, clipped_high


def cispo_surrogate(logps: Tensor, log_ratio: Tensor, advantages: Tensor, cap: float):
    """min(c, cap) * A * logp per token, (n, T), with the ratio c = exp(log_ratio) detached, so
    that capped tokens keep their gradient. Nothing is clipped below. Takes and returns what
    clipped_surrogate does."""
    A = in_columns(advantages)  # (n, 1) or (n, T)
    # clamped: an infinite ratio would give NaN for A = 0
    ratio = log_ratio.detach().clamp(max=20).exp()  # (n, T)
    gain = ratio.clamp(max=cap) * A * logps
    clipped_low = torch.zeros_like(ratio, dtype=torch.bool)
    # tokens with A < 0 are capped too; not counted, because PPO would not clip them here
    clipped_high = (ratio > cap) & (A > 0)
    return gain, clipped_low, clipped_high


def token_weights(token_sum: str, mask: Tensor, rows: int, tokens: int, max_length: int) -> Tensor:
    """The weight of every token in the loss, (n, T), from mask m: "row_mean" m / (T_i * N),
    "token_mean" m / tokens, "constant" m / (N * L). rows (N) and tokens count the whole step, all
    ranks."""
    if token_sum == "row_mean":
        return mask / (mask.sum(1, keepdim=True).clamp(min=1) * rows)
    if token_sum == "token_mean":
        return mask / tokens
    if token_sum == "constant":
        return mask / (rows * max_length)
    raise ValueError(f"token_weights has no token_sum={token_sum!r}")


def k3_kl(logps: Tensor, ref_logps: Tensor) -> Tensor:
    """exp(-d) + d - 1 with d = logp - ref_logp clamped to +-20: never negative, unbiased for
    KL(policy || ref) under the policy. http://joschu.net/blog/kl-approx.html"""
    # clamped, because exp of a large difference would be infinite
    d = (logps - ref_logps).clamp(-20, 20)
    return torch.exp(-d) + d - 1


def k2_kl(logps: Tensor, ref_logps: Tensor) -> Tensor:
    """d^2 / 2 with d = logp - ref_logp clamped to +-20. Under the policy its gradient is that of
    the reverse KL(policy || ref), k3's that of the forward KL(ref || policy)."""
    return (logps - ref_logps).clamp(-20, 20) ** 2 / 2


def importance_ratio(
    old_logps: Tensor, sampler_logps: Tensor, lengths: Tensor, kind: str, cap: float
) -> Tensor:
    """Weight that corrects for the mismatch between trainer and sampler, detached.

    With d = old_logp - sampler_logp: "token_..." is exp(d) of every token, (n, T); "sequence_..."
    is exp of the row's sum of d, (n, 1). "..._truncate" caps it, "..._mask" makes it 0 above the
    cap. "sequence_geometric" is exp of the row's mean of d, capped: biased, but it does not explode
    with length. "none" is 1. Both log-probs are 0 outside completions; lengths (n,)."""
    if kind == "none":
        return torch.ones_like(old_logps)
    d = old_logps.detach() - sampler_logps  # (n, T)
    if kind.startswith("sequence"):
        d = d.sum(1, keepdim=True)  # (n, 1)
    if kind == "sequence_geometric":
        d = d / lengths[:, None]
    ratio = d.clamp(max=20).exp()  # kept finite: masking multiplies it by 0
    if kind.endswith("mask"):
        return ratio * (ratio <= cap)
    return ratio.clamp(max=cap)


# --- log-probs of tokens, with the vocabulary's logits of a few tokens at a time: token_logps(),
# --- at the end of this file, is what policy.py calls

# On a CPU, up to this many bytes of a forward's softmaxes are kept for its backward; the rest are
# recomputed.
KEPT_BYTES = 2**28
CPU_CHUNK = 128  # tokens, few enough that their buffers stay in a CPU's cache


class HeadOptions(NamedTuple):
    """How ChunkedLogps goes through the tokens."""

    temperature: float
    chunk: int  # tokens at a time
    want_entropy: bool
    keep: bool  # whether to keep softmaxes, because a backward may follow


class ChunkTokens(NamedTuple):
    """What a backward knows about the c tokens of a chunk, (c,) each."""

    targets: Tensor
    logps: Tensor
    log_z: Tensor  # log-normalisers
    entropy: Tensor
    grad_logps: Tensor  # d loss / d logps
    grad_entropy: Tensor | None  # d loss / d entropy; None if the entropy was not wanted


class ChunkedLogps(torch.autograd.Function):
    """Log-prob and entropy of a linear vocabulary head, `chunk` tokens at a time in forward and
    backward. Between the two it keeps hidden, the results, the log-normalisers and as many
    softmaxes as room_for_softmaxes() has room for, so memory is bounded for any tokens *
    vocabulary."""

    @staticmethod
    def forward(ctx, hidden, weight, targets, options: HeadOptions):
        statistics = gpu_statistics if on_gpu(hidden) else cpu_statistics
        logps = hidden.new_empty(len(targets), dtype=torch.float32)
        log_z = torch.empty_like(logps)
        entropy = torch.empty_like(logps)
        ctx.options = options
        ctx.kept = {}  # first token of a chunk -> its softmax (chunk, V)
        room = room_for_softmaxes(hidden) if options.keep else 0  # bytes
        for i in range(0, len(targets), options.chunk):
            part = slice(i, i + options.chunk)
            # below 0 from the first chunk on that does not fit
            room -= kept_size(hidden) * len(targets[part]) * len(weight)
            logits = head_logits(hidden[part], weight)  # (chunk, V)
            kept_type = hidden.dtype if room >= 0 else None
            logps[part], log_z[part], entropy[part], p = statistics(
                logits, options.temperature, targets[part], options.want_entropy, kept_type
            )
            if room >= 0:
                ctx.kept[i] = p
        ctx.save_for_backward(hidden, weight, targets, logps, log_z, entropy)
        return logps, entropy

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad_logps, grad_entropy):
        hidden, weight, targets, logps, log_z, entropy = ctx.saved_tensors
        logits_gradient = gpu_gradient if on_gpu(hidden) else cpu_gradient
        grad_hidden = torch.zeros_like(hidden)
        grad_weight = None
        if ctx.needs_input_grad[1]:
            # float32, because many chunks add to it
            grad_weight = torch.zeros_like(weight, dtype=torch.float32)
        # clipped tokens, and rows of advantage 0 among others, have no gradient
        has_gradient = grad_logps != 0  # (n,)
        if ctx.options.want_entropy:
            has_gradient |= grad_entropy != 0
        else:
            grad_entropy = None
        has_gradient = has_gradient.tolist()  # one wait for the device instead of one per chunk
        for i in range(0, len(targets), ctx.options.chunk):
            part = slice(i, i + ctx.options.chunk)
            # popped, because the gradient overwrites it: a second backward would recompute it
            p = ctx.kept.pop(i, None)
            if not any(has_gradient[part]):
                continue
            logits = head_logits(hidden[part], weight) if p is None else None
            tokens = ChunkTokens(
                targets[part],
                logps[part],
                log_z[part],
                entropy[part],
                grad_logps[part],
                None if grad_entropy is None else grad_entropy[part],
            )
            grad = logits_gradient(p, logits, ctx.options.temperature, tokens, hidden.dtype)
            grad_hidden[part] = grad @ weight
            if grad_weight is None:
                continue
            if grad.dtype == torch.float32:  # adds in place, without a buffer for the product
                grad_weight.addmm_(grad.T, hidden[part])
            else:
                grad_weight += float32_product(grad.T, hidden[part])
        if grad_weight is not None:
            grad_weight = grad_weight.to(weight.dtype)
        return grad_hidden, grad_weight, None, None  # None: targets and options


def head_logits(hidden: Tensor, weight: Tensor) -> Tensor:
    """Logits (c, V), float32, at temperature 1, in memory that callers may overwrite."""
    return float32_product(hidden, weight.T)


def float32_product(a: Tensor, b: Tensor) -> Tensor:
    """a @ b in float32. On a GPU, sums of 16-bit products are never rounded to 16 bits."""
    if a.is_cuda and a.dtype != torch.float32:
        return torch.mm(a, b, out_dtype=torch.float32)
    return (a @ b).float()


def on_gpu(x: Tensor) -> bool:
    """Whether the functions for a GPU are used; tests replace this to use them without one."""
    return x.is_cuda


def kept_size(hidden: Tensor) -> int:
    """Bytes of one kept probability, which has the model's type on a GPU, float32 on a CPU."""
    return hidden.dtype.itemsize if on_gpu(hidden) else 4


def room_for_softmaxes(hidden: Tensor) -> int:
    """Bytes that softmaxes may take between forward and backward, on a GPU a quarter of the free
    memory. For a kept softmax the backward need not compute the logits again, one of the head's
    four matrix products."""
    if not hidden.is_cuda:
        return KEPT_BYTES
    free = torch.cuda.mem_get_info(hidden.device)[0]
    cached = torch.cuda.memory_reserved(hidden.device) - torch.cuda.memory_allocated(hidden.device)
    return (free + cached) // 4


# The CPU's and the GPU's functions below take the same arguments, for a chunk of c tokens.
# Statistics: logits (c, V) float32 at temperature 1, targets (c,); returns (logps, log-normalisers,
# entropies (c,), the softmax (c, V) or None).
# Gradient: p (c, V) is the kept softmax; if it is None, logits (c, V), float32 at temperature 1,
# are given instead. Returns d loss / d logits, (c, V), in `dtype`.


def cpu_statistics(logits, temperature: float, targets, want_entropy: bool, kept_type):
    """Works in place, so that a chunk's buffers stay in the cache."""
    logits = logits if temperature == 1 else logits.div_(temperature)
    top = logits.amax(1)  # (c,)
    logits = logits.sub_(top[:, None])  # from here on relative to the largest
    p = logits.exp()  # (c, V), not yet divided by its sum
    z = p.sum(1)  # (c,)
    logps = logits.gather(1, targets[:, None])[:, 0] - z.log()
    entropy = logps  # a placeholder of the right shape
    if want_entropy:
        entropy = z.log() - torch.linalg.vecdot(p, logits) / z
    kept = None if kept_type is None else p.div_(z[:, None])
    return logps, top + z.log(), entropy, kept


def cpu_gradient(p, logits, temperature: float, tokens: ChunkTokens, dtype):
    """Works in place."""
    if p is None:
        logits = logits if temperature == 1 else logits.div_(temperature)
        p = logits.sub_(tokens.log_z[:, None]).exp_()
    of_entropy = None
    if tokens.grad_entropy is not None and tokens.grad_entropy.any():
        # computed before p is overwritten
        of_entropy = entropy_gradient(p, tokens.entropy, tokens.grad_entropy)
    # dlogp / dlogits = one_hot(target) - p
    grad = p.mul_(-tokens.grad_logps[:, None])
    grad.scatter_add_(1, tokens.targets[:, None], tokens.grad_logps[:, None])
    if of_entropy is not None:
        grad.add_(of_entropy)
    return grad.div_(temperature).to(dtype)


def entropy_gradient(p, entropy, grad_entropy):
    """dH / dlogits = -p * (log p + H), times grad_entropy: (c, V)."""
    return grad_entropy[:, None] * (torch.special.entr(p) - p * entropy[:, None])


def gpu_statistics(logits, temperature: float, targets, want_entropy: bool, kept_type):
    scale = logits.new_full((), 1 / temperature)  # a Python number would be compiled in
    return compiled(softmax_statistics)(logits, scale, targets, kept_type)


def softmax_statistics(logits, scale, targets, kept_type):
    """gpu_statistics, to be compiled; it always computes the entropy."""
    logits = logits * scale
    log_z = logits.logsumexp(1)  # (c,)
    logps = logits.gather(1, targets[:, None])[:, 0] - log_z
    p = (logits - log_z[:, None]).exp()  # (c, V)
    entropy = log_z - (p * logits).sum(1)
    kept = None if kept_type is None else p.to(kept_type)
    return logps, log_z, entropy, kept


def gpu_gradient(p, logits, temperature: float, tokens: ChunkTokens, dtype):
    scale = tokens.grad_logps.new_full((), 1 / temperature)
    if tokens.grad_entropy is None:  # zeros: one compiled function serves both
        tokens = tokens._replace(grad_entropy=torch.zeros_like(tokens.grad_logps))
    return compiled(softmax_gradient)(p, logits, scale, tuple(tokens), dtype)


def softmax_gradient(p, logits, scale, tokens: tuple, dtype):
    """gpu_gradient, to be compiled: one pass over p or the logits. tokens: those of ChunkTokens.

    At the target, 1 - p is computed from the log-prob, because a kept p of nearly 1 was rounded to
    16 bits, in which 1 - p is lost."""
    tokens = ChunkTokens(*tokens)
    p = (logits * scale - tokens.log_z[:, None]).exp() if p is None else p.float()  # (c, V)
    at_target = torch.arange(p.shape[1], device=p.device) == tokens.targets[:, None]
    logp = tokens.logps[:, None]
    p = torch.where(at_target, logp.exp(), p)
    one_hot_minus_p = torch.where(at_target, -torch.expm1(logp), -p)  # dlogp / dlogits
    grad = tokens.grad_logps[:, None] * one_hot_minus_p
    grad = grad + entropy_gradient(p, tokens.entropy, tokens.grad_entropy)
    return (grad * scale).to(dtype)


@functools.cache
def compiled(function):
    """The function, compiled by Triton at first use, for chunks of any number of tokens."""
    return torch.compile(function, dynamic=True)


def token_logps(
    hidden: Tensor,
    head_weight: Tensor,
    targets: Tensor,
    temperature: float,
    chunk: int,
    want_entropy: bool = True,
):
    """(logps (n,), entropy (n,) or None) of `targets` (n,) under
    softmax(hidden @ head_weight.T / temperature), float32, nats. hidden (n, H), head_weight (V, H).
    Memory: about 4 float32 buffers of `chunk` * V plus the kept softmaxes, whatever n is. On a CPU
    a chunk has at most CPU_CHUNK tokens."""
    chunk = chunk if hidden.is_cuda else min(chunk, CPU_CHUNK)
    keep = torch.is_grad_enabled() and (hidden.requires_grad or head_weight.requires_grad)
    options = HeadOptions(temperature, chunk, want_entropy, keep)
    logps, entropy = ChunkedLogps.apply(hidden, head_weight, targets, options)
    return logps, entropy if want_entropy else None
