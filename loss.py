"""The objectives as pure functions of tensors and floats: no model, no config, no ranks in here.

Shapes: P prompts, G completions per prompt (the group), N = P*G rows prompt-major, T tokens of the
longest completion, V vocabulary, H hidden size. A mask (N, T) is 1 on completion tokens, their EOS
included. Log-probs are taken at the sampling temperature. A loss is a sum over rows or tokens
divided by a normaliser of the whole step, which the caller knows before the first backward: so any
split into micro-batches or ranks gives the same loss and the same gradient.

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
    xdr       dr_grpo whose rows are weighted by G * softmax(U / tau)
    maxent    cross-entropy over the group, from w = softmax((log q + beta * l) / (tau + beta)) to
              softmax(scores)
    maxrl     dr_grpo with advantages (r - mean) / mean
              Tajwar et al. 2026, arXiv:2602.02710
    pkpo      dr_grpo with the leave-one-out gradient of pass@k as advantages
              Walder and Karkhanis 2025, arXiv:2505.15201
    flow      variance over the group of scores - (log q + beta * l) / tau
              after FlowRL, Zhu et al. 2025, arXiv:2509.15207

maxent and maxrl are relatives: with rewards of 0 and 1, tau -> 0 and beta = 0, w is uniform over
the K right rows, and as long as p = softmax(scores) is near 1/G the gradient of maxent, sum_i (p_i
- w_i) * ds_i, has the coefficients -(1/K) * (1 - K/G) on right and 1/G on wrong rows: maxrl's
advantages over G, on scores instead of log-probs. What maxent adds is p as a baseline that knows
what the policy has learnt, a temperature, and a reference.

And two that exist to be compared with: seed_grpo (dr_grpo, advantages shrunk where the answers of
a group differ, Chen et al. 2025, arXiv:2505.12346) and token_entropy (dr_grpo with the usual bonus
for the entropy of every token).
"""

import functools
import math
from typing import NamedTuple

import torch
from torch import Tensor

# --- rewards to advantages and weights, (P, G) in, (P, G) out


def equal_groups(rewards: Tensor) -> Tensor:
    """(P,) bool: groups whose rewards are all the same. Compared directly: in fp32 the mean of
    equal numbers is not exact."""
    return rewards.amax(1) == rewards.amin(1)


def group_advantages(rewards: Tensor, scale: str) -> Tensor:
    """A = r - mean_group(r), (P, G), divided by nothing ("none"), by std + 1e-4 of the "group"
    (its G - 1 estimate), by that of all rows ("batch"), or by the group's "mean". Exactly 0 where
    all rewards of a group are equal, and for G = 1.

    "mean" is maxrl, for rewards from 0 up: with K of G right, (1 - K/G) / (K/G) on right rows and
    -1 on wrong ones, the estimator of the gradient of log p's first G terms, -sum_k (1 - p)^k / k
    (Tajwar et al. 2026, arXiv:2602.02710): the right rows of a group add up to
    G - K, most for a single success. 0 where no reward is above 0. At K = G - 1 it is nearly
    dr_grpo. Rewards below 0 could bring the mean to nearly 0: the divisor is at least max_group(r)
    / G, which the mean of rewards from 0 up never falls below."""
    mean = rewards.mean(1, keepdim=True)  # (P, 1)
    advantages = rewards - mean  # (P, G)
    # 1e-4 keeps a group of nearly equal rewards from being blown up
    if scale == "group" and rewards.shape[1] > 1:
        advantages = advantages / (rewards.std(1, keepdim=True) + 1e-4)
    elif scale == "batch" and rewards.numel() > 1:
        advantages = advantages / (rewards.std() + 1e-4)
    elif scale == "mean":
        best = rewards.amax(1, keepdim=True)  # (P, 1)
        divisor = torch.maximum(mean, best / rewards.shape[1])
        advantages = (advantages / divisor).masked_fill(best <= 0, 0.0)
    elif scale not in ("none", "group", "batch"):
        raise ValueError(f'scale_rewards={scale!r} must be "group", "batch", "mean" or "none"')
    # r - mean of equal rewards is only nearly 0, and divided by a std of nearly 0 it would not be
    return advantages.masked_fill(equal_groups(rewards)[:, None], 0.0)


def pass_at_k_advantages(rewards: Tensor, k: int) -> Tensor:
    """A_i = G / C(G, k) * sum over the sets J of k - 1 other rows of max(0, r_i - best of J), (P,
    G), 2 <= k <= G.

    sum_i A_i * dlogp_i / G is unbiased for the gradient of the expected best reward of k samples,
    pass@k for rewards of 0 and 1 (Walder and Karkhanis 2025, arXiv:2505.15201; the baseline is
    their leave-one-out, the best of J, which does not know row i). For 0 and 1: k * the share of
    those sets without a right row for a right row, 0 for a wrong one; 0 in groups of equal
    rewards. At k = 1 nothing would be subtracted, so the mean of the other rows is: dr_grpo times
    G / (G - 1)."""
    G = rewards.shape[1]
    if k == 1:
        return group_advantages(rewards, "none") * G / max(1, G - 1)
    ordered, order = rewards.sort(1)  # (P, G), the worst row first
    # G / C(G, k) times the sets of k - 1 rows whose best is the j-th from below; as Python's ints,
    # which may be larger than a tensor holds
    shares = [math.comb(j, k - 2) * G / math.comb(G, k) for j in range(G)]
    gains = (ordered[:, :, None] - ordered[:, None, :]).clamp(min=0)  # (P, G, G): r_i - r_j
    advantages = (gains * rewards.new_tensor(shares)).sum(2)  # (P, G)
    # back to the order of the rows
    return torch.empty_like(rewards).scatter(1, order, advantages)


# What checks.Objective.advantage names, of rewards (P, G), scale_rewards and pkpo's k.
ADVANTAGES = {
    "centred": lambda rewards, scale, k: group_advantages(rewards, scale),
    "pass_at_k": lambda rewards, scale, k: pass_at_k_advantages(rewards, k),
}


def log_reward_targets(rewards: Tensor, temperature: float, epsilon: float) -> Tensor:
    """u = log q, (P, G), with q = (1 - G*eps) * softmax(r / T_q) + eps. In log space, so that
    nothing underflows at small T_q."""
    G = rewards.shape[1]
    if not 0 <= epsilon * G <= 1 + 1e-6:
        raise ValueError(f"maxent_q_epsilon={epsilon} must lie between 0 and 1/G = {1 / G:.4f}")
    # subtracted before dividing, so that a constant added to a group changes nothing
    best = rewards.amax(1, keepdim=True)
    log_softmax = ((rewards - best) / temperature).log_softmax(1)
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
    """w = softmax((u + beta * l) / (tau + beta)), (P, G), detached: the maximiser of <w, u> + tau
    * H(w) - beta * KL(w || ref).

    utilities u: log q for maxent, advantages for xdr. ref_scores l: the reference model's sequence
    scores, unused at beta = 0. Limits: tau = inf gives uniform weights, beta = inf softmax(l), tau
    + beta = 0 uniform over the exact argmax of u.
    """
    if math.isinf(tau) and math.isinf(beta):
        raise ValueError("tau and beta are both infinite: the weights are not defined")
    # the limits first: they would be NaN in the formula
    if math.isinf(tau):
        return torch.full_like(utilities, 1 / utilities.shape[1])
    if beta > 0 and ref_scores is None:
        raise ValueError(f"beta={beta} needs the reference model's scores")
    if math.isinf(beta):
        return ref_scores.detach().softmax(1)
    z = utilities.detach()  # (P, G)
    if beta > 0:  # not 0 * l, which an infinite l would make NaN
        z = z + beta * ref_scores.detach()
    # before dividing: a tiny tau + beta must not lose the differences
    z = z - z.amax(1, keepdim=True)
    if tau + beta < torch.finfo(z.dtype).tiny:  # 0, also after rounding to the dtype of z
        best = (z == 0).to(z.dtype)
        return best / best.sum(1, keepdim=True)
    return (z / (tau + beta)).softmax(1)


def entropy_bonus(rewards: Tensor, entropies: Tensor, coef: float) -> Tensor:
    """coef * std(r) * z per row, (P, G), to be added to the rewards: z is the z-score, within the
    group, of a row's mean token entropy (P, G). 0 in groups whose rewards are equal (there is
    nothing to scale it by) or whose entropies are."""
    centred = entropies - entropies.mean(1, keepdim=True)
    z = centred / entropies.std(1, keepdim=True)  # (P, G)
    flat = equal_groups(rewards) | equal_groups(entropies)  # (P,); their z may be NaN
    bonus = coef * rewards.std(1, keepdim=True) * z
    return bonus.masked_fill(flat[:, None], 0.0)


def unlikely_rewards(rewards: Tensor, seq_logps: Tensor, coef: float) -> Tensor:
    """r * (1 - coef * (G - rank) / G) where r > 0, (P, G); rank: how many rows of the group are
    more likely, seq_logps (P, G) under the sampler. So a rare right answer is worth more than a
    usual one, also where all are right (but maxent and flow skip such groups, unless
    maxent_skip_equal_groups says otherwise); coef 0 changes nothing. He, Fried and Welleck 2025,
    arXiv:2506.02355, who use .25. Equal answers, equal up to rounding, share a rank."""
    G = rewards.shape[1]
    # 1e-4 nats is more than rounding makes of equal answers
    rank = (seq_logps[:, None, :] > seq_logps[:, :, None] + 1e-4).sum(2)  # (P, G)
    return torch.where(rewards > 0, rewards * (1 - coef * (G - rank) / G), rewards)


def xdr_utilities(advantages: Tensor, lengths: Tensor, kind: str, max_length: int) -> Tensor:
    """What xdr's weights prefer, (P, G): the "advantage" A, or the "surrogate" A * T / L, the
    row's term of the loss: that one likes length, and makes tau depend on L."""
    if kind == "advantage":
        return advantages
    return advantages * lengths / max_length


def mode_adaptive_tau(tau: float, correct_modes: Tensor) -> list[float]:
    """tau * log 2 / log(1 + k) for each group, k = max(1, its different correct answers), (P,):
    tau itself while there is one."""
    return [tau * math.log(2) / math.log1p(max(1.0, k)) for k in correct_modes.tolist()]


def xdr_weights(
    utilities: Tensor, ref_scores: Tensor | None, taus: list[float], beta: float
) -> Tensor:
    """a = softmax((U + beta * l) / (tau_x + beta)), (P, G), one tau for each group."""
    weights = []
    for x, tau in enumerate(taus):
        own_ref = None if ref_scores is None else ref_scores[x : x + 1]
        weights.append(maxent_weights(utilities[x : x + 1], own_ref, tau, beta))  # (1, G)
    return torch.cat(weights)


def semantic_entropy(clusters: Tensor, mean_logps: Tensor) -> Tensor:
    """H_sem, (P,), nats: the entropy over the answers of a group. clusters (P, G): rows of one
    number gave the same answer; the mass of a cluster is that of its rows under the softmax over
    the group of their mean log-probs (P, G)."""
    p = mean_logps.softmax(1)  # (P, G)
    same = clusters[:, :, None] == clusters[:, None, :]  # (P, G, G)
    mass = (same * p[:, None, :]).sum(2)  # (P, G), of the row's own cluster
    # summed over rows, which is over clusters; xlogy: an impossible row counts 0 and not NaN
    return -torch.xlogy(p, mass).sum(1)


def semantic_scale(entropy: Tensor, alpha: float, G: int) -> Tensor:
    """1 / (1 + alpha / log G * H_sem), (P, 1), G >= 2: seed_grpo trusts a group less the more its
    answers differ."""
    return 1 / (1 + alpha / math.log(G) * entropy[:, None])


def active_groups(rewards: Tensor, skip: str) -> Tensor:
    """(P,) bool: groups that maxent learns from. skip "all": not those with equal rewards;
    "wrong": not those that are equal and at the lowest reward of the step; "none": every group.
    `rewards` are those of the whole step."""
    equal = equal_groups(rewards)
    if skip == "none":
        return torch.ones_like(equal)
    if skip == "wrong":
        return ~(equal & (rewards[:, 0] == rewards.min()))
    return ~equal


def reward_spread(rewards: Tensor) -> Tensor:
    """4 * variance of a group's rewards over its G rows, (P,): 4 * mean * (1 - mean) for rewards
    of 0 and 1, at most 1 there."""
    return 4 * rewards.var(1, correction=0)


def weight_metrics(weights: Tensor, rewards: Tensor, active: Tensor) -> dict:
    """How flat the weights are, means over active groups: entropy (nats), its share of ln G,
    exp(entropy), the largest weight; and over those of them that have a row below their best
    reward: the mass on such rows, and the excess entropy (H - ln n_top) / (ln G - ln n_top), n_top
    rows at the best reward, which is 0 when only they have weight and 1 when w is uniform. Empty
    without an active group."""
    if not active.any():
        return {}
    w = weights[active]  # (a, G), a active groups
    r = rewards[active]
    G = w.shape[1]
    H = torch.special.entr(w).sum(1)  # (a,) nats
    metrics = {
        "weights/entropy": H.mean().item(),
        "weights/entropy_norm": (H / math.log(G)).mean().item(),
        "weights/effective_rollouts": H.exp().mean().item(),
        "weights/max": w.amax(1).mean().item(),
    }
    top = r == r.amax(1, keepdim=True)  # (a, G) rows at the best reward
    n_top = top.sum(1)
    spread = n_top < G  # where all rows are best there is no room above ln n_top
    if spread.any():
        excess = (H - n_top.log()) / (math.log(G) - n_top.log())
        metrics["weights/incorrect_mass"] = (w * ~top).sum(1)[spread].mean().item()
        metrics["weights/excess_entropy"] = excess[spread].mean().item()
    return metrics


# --- losses


def sequence_scores(
    logps: Tensor, lengths: Tensor, norm: str, max_length: int, scale: float = 1.0
) -> Tensor:
    """s = scale * sum_t logp / divisor, (N,): T_i ("length"), L ("constant") or 1 ("sum"). `logps`
    (N, T) are 0 outside the completion. The scale says how sharp p = softmax(s) is: at 1 the mean
    log-probs of a group differ by a few tenths, p stays near 1/G and pulls little; the larger it
    is, the sooner p = w. A policy with p = w has mean log-probs of u / (scale * tau) and a
    constant, so the bound T_q * tau <= 1 / ln V becomes scale * T_q * tau <= 1 / ln V
    (checks.tau_limit)."""
    divisor = {"length": lengths, "constant": max_length, "sum": 1}[norm]
    return scale * (logps.sum(1) / divisor)


def over_groups(losses: Tensor, active: Tensor, norm: float, share: Tensor | None) -> Tensor:
    """sum over active groups of share * loss / norm; losses, active, share (P,), None for shares
    of 1."""
    if share is not None:
        losses = losses * share
    # filled and not multiplied: no gradient at all reaches the groups that are left out
    return losses.masked_fill(~active, 0.0).sum() / norm


def listwise_loss(
    scores: Tensor,
    weights: Tensor,
    active: Tensor,
    norm: float | None = None,
    share: Tensor | None = None,
) -> Tensor:
    """L = -sum_active sum_i w_i * log softmax_i(s) / norm; scores, weights (P, G), active (P,).
    norm None: max(1, active groups). Gradient per group sum_i (p_i - w_i) * ds_i, p = softmax(s):
    zero exactly when the policy's p equals w. For summed log-probs that makes equally rewarded
    answers equally likely; for means over length (s = S/T) equally likely *per token*, so a short
    answer ends up more likely than a long one: pi_long = pi_short^(T_long / T_short). As tau -> 0,
    beta = 0 and p = 1/G, rewards 0 and 1, the gradient is maxrl's on s. |p - 1/G| / |w - 1/G|
    falls as 1/sqrt(T)."""
    cross_entropy = -(weights * scores.log_softmax(1)).sum(1)  # (P,)
    norm = max(1, int(active.sum())) if norm is None else norm
    return over_groups(cross_entropy, active, norm, share)


def mle_loss(
    scores: Tensor, weights: Tensor, active: Tensor, norm: float, share: Tensor | None = None
) -> Tensor:
    """L = -sum_active sum_i w_i * s_i / norm, s the mean log-prob of a row (P, G): weighted
    imitation without a baseline. Groups of equal rewards push their own samples, short ones more;
    for comparison only."""
    return over_groups(-(weights * scores).sum(1), active, norm, share)


def balance_goals(utilities: Tensor, ref_scores: Tensor | None, tau: float, beta: float) -> Tensor:
    """(u + beta * l) / tau, (P, G): what flow wants the scores to be, up to a constant of the
    group. tau = inf: all the same."""
    if beta > 0:
        utilities = utilities + beta * ref_scores
    return (utilities / tau).detach()


def balance_loss(
    scores: Tensor, goals: Tensor, active: Tensor, norm: float, share: Tensor | None = None
) -> Tensor:
    """L = 1/(2 norm) * sum_active mean_i (d_i - mean d)^2, d = s - (u + beta * l) / tau; scores,
    goals (P, G).

    Trajectory balance with the mean of the group as the log of the normaliser (VarGrad, Richter et
    al. 2020, arXiv:2010.10436) in place of FlowRL's learnt one (Zhu et al. 2025,
    arXiv:2509.15207). Gradient (1/G) sum_i (d_i - mean d) * ds_i: 0 exactly where pi is
    proportional to exp(u / tau) over answers (summed scores) or per token (means), whoever sampled
    the answers, so there is no importance ratio; unlike maxent's pull it does not saturate in p.
    Groups of equal rewards, where they are not skipped, have their scores pulled together, and so
    has everything as tau -> inf. It grows with 1 / tau."""
    d = scores - goals  # (P, G)
    # the mean of the group stands for the unknown log-normaliser of its prompt
    d = d - d.mean(1, keepdim=True)
    return over_groups((d**2).mean(1) / 2, active, norm, share)


def mode_entropy_loss(seq_logps: Tensor, rewards: Tensor, norm: float) -> Tensor:
    """L = -1/norm * sum_x [n_c >= 2] / n_c * sum_{i in C} log softmax over C of S_i: a pull
    towards equally likely correct answers. C: rows at the best reward of a group that is not all
    equal, n_c = |C|; seq_logps S, rewards (P, G); norm = P * L for sums S, P for means. Row
    gradient (p_i - 1/n_c) * dS_i / norm; wrong rows are never touched."""
    best = rewards == rewards.amax(1, keepdim=True)
    best = best & ~equal_groups(rewards)[:, None]  # C, (P, G)
    count = best.sum(1)  # n_c, (P,)
    use = count >= 2
    if not use.any():
        return seq_logps.sum() * 0.0  # zero, yet with a graph to go backward through
    # only groups with a C: a logsumexp over nothing is -inf, and its gradient NaN
    S = seq_logps[use]
    best = best[use]
    log_p = S - S.masked_fill(~best, -math.inf).logsumexp(1, keepdim=True)
    return -((log_p * best).sum(1) / count[use]).sum() / norm


def clipped_surrogate(
    log_ratio: Tensor, advantages: Tensor, low: float, high: float, delta: float = -1.0
):
    """PPO's min(c*A, clip(c, 1-low, 1+high)*A), (n, T), with c = exp(log_ratio), and the two masks
    of what is clipped (below with A < 0, above with A > 0). delta > 0 caps c in the unclipped
    branch (two-sided clip). log_ratio (n, T), or (n, 1) of gspo; advantages (n,)."""
    A = advantages[:, None]
    # an infinite ratio would make clipped tokens and A = 0 NaN
    ratio = log_ratio.clamp(max=20).exp()
    unclipped = ratio.clamp(max=delta) if delta > 0 else ratio
    surrogate = torch.minimum(unclipped * A, ratio.clamp(1 - low, 1 + high) * A)
    # only where the minimum takes the clipped branch, so where the gradient is 0
    clipped_low = (ratio < 1 - low) & (A < 0)
    clipped_high = (ratio > 1 + high) & (A > 0)
    return surrogate, clipped_low, clipped_high


def cispo_surrogate(logps: Tensor, log_ratio: Tensor, advantages: Tensor, cap: float):
    """min(c, cap) * A * logp per token, (n, T), the ratio detached: clipped tokens keep their
    gradient. Nothing is clipped below."""
    A = advantages[:, None]
    # an infinite ratio would make A = 0 NaN
    ratio = log_ratio.detach().clamp(max=20).exp()
    gain = ratio.clamp(max=cap) * A * logps
    clipped_low = torch.zeros_like(ratio, dtype=torch.bool)
    # bad tokens are capped too, which PPO's clip would not do: they are not counted
    clipped_high = (ratio > cap) & (A > 0)
    return gain, clipped_low, clipped_high


def token_weights(
    aggregation: str, mask: Tensor, rows: int, tokens: int, max_length: int
) -> Tensor:
    """The share of every token in the loss, (n, T): "row_mean" m / (T_i * N), "token_mean" m /
    tokens of the step, "constant" m / (N * L). rows N and tokens count the whole step, all ranks.
    """
    if aggregation == "row_mean":
        return mask / (mask.sum(1, keepdim=True).clamp(min=1) * rows)
    if aggregation == "token_mean":
        return mask / tokens
    return mask / (rows * max_length)


def k3_kl(logps: Tensor, ref_logps: Tensor) -> Tensor:
    """exp(-d) + d - 1 with d = logp - ref_logp clamped to +-20: never negative, unbiased for
    KL(policy || ref) under the policy. http://joschu.net/blog/kl-approx.html"""
    # clamped, for exp of a large difference would be infinite
    d = (logps - ref_logps).clamp(-20, 20)
    return torch.exp(-d) + d - 1


def k2_kl(logps: Tensor, ref_logps: Tensor) -> Tensor:
    """d^2 / 2 with d = logp - ref_logp clamped to +-20: its gradient is that of the reverse KL,
    k3's that of the forward KL."""
    return (logps - ref_logps).clamp(-20, 20) ** 2 / 2


def importance_ratio(
    old_logps: Tensor, sampler_logps: Tensor, lengths: Tensor, kind: str, cap: float
) -> Tensor:
    """Weight for the mismatch between trainer and sampler, detached: exp(old_logp - sampler_logp)
    of every token, (n, T), or exp of the row's sum, (n, 1), capped ("token_truncate",
    "sequence_truncate") or 0 above the cap ("token_mask", "sequence_mask"). "sequence_geometric"
    is exp of the row's mean, capped: biased, but it does not explode with length. "none": 1. Both
    log-probs are 0 outside completions; lengths (n,)."""
    if kind == "none":
        return torch.ones_like(old_logps)
    d = old_logps.detach() - sampler_logps  # (n, T)
    if kind.startswith("sequence"):
        d = d.sum(1, keepdim=True)
    if kind == "sequence_geometric":
        d = d / lengths[:, None]
    ratio = d.clamp(max=20).exp()  # finite, for a masked ratio is multiplied by 0
    if kind.endswith("mask"):
        return ratio * (ratio <= cap)
    return ratio.clamp(max=cap)


# --- log-probs of tokens without ever holding (tokens, vocabulary)

# Softmaxes of a forward that are kept for its backward, on a CPU; the others are computed again.
KEPT_BYTES = 2**28
CPU_CHUNK = 128  # tokens: their buffers stay in a CPU's cache


class HeadOptions(NamedTuple):
    """How ChunkedLogps goes over the vocabulary."""

    temperature: float
    chunk: int  # tokens at a time
    want_entropy: bool
    keep: bool  # whether a backward may come, for which softmaxes are worth keeping


class ChunkedLogps(torch.autograd.Function):
    """Log-prob and entropy of a linear vocabulary head, `chunk` tokens at a time in forward and
    backward. In between only the two results, hidden, the log-normaliser and the softmaxes that
    there is room for are kept, so memory does not grow with tokens * vocabulary."""

    @staticmethod
    def forward(ctx, hidden, weight, targets, options: HeadOptions):
        softmax_statistics, _ = chunk_functions(hidden)
        logps = hidden.new_empty(len(targets), dtype=torch.float32)
        log_z = torch.empty_like(logps)
        entropy = torch.empty_like(logps)
        ctx.options = options
        ctx.kept = {}  # first token of a chunk -> its softmax (chunk, V)
        room = room_for_softmaxes(hidden) if options.keep else 0  # bytes
        for i in range(0, len(targets), options.chunk):
            part = slice(i, i + options.chunk)
            room -= kept_size(hidden) * len(targets[part]) * len(weight)
            logits = head_logits(hidden[part], weight)  # (chunk, V)
            kept_type = hidden.dtype if room >= 0 else None
            logps[part], log_z[part], entropy[part], p = softmax_statistics(
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
        _, logits_gradient = chunk_functions(hidden)
        grad_hidden = torch.zeros_like(hidden)
        grad_weight = None
        if ctx.needs_input_grad[1]:
            # in float32, for many chunks add to it
            grad_weight = torch.zeros_like(weight, dtype=torch.float32)
        wanted = grad_logps != 0  # (n,)
        if ctx.options.want_entropy:
            wanted |= grad_entropy != 0
        else:
            grad_entropy = None
        # groups with equal rewards ask for nothing; one wait for the device, not one a chunk
        wanted = wanted.tolist()
        for i in range(0, len(targets), ctx.options.chunk):
            part = slice(i, i + ctx.options.chunk)
            # popped, for the gradient is written over it: a second backward computes it again
            p = ctx.kept.pop(i, None)
            if not any(wanted[part]):
                continue
            logits = head_logits(hidden[part], weight) if p is None else None
            grad = logits_gradient(  # (chunk, V)
                (p, logits, ctx.options.temperature),
                (targets[part], logps[part], log_z[part], entropy[part]),
                grad_logps[part],
                None if grad_entropy is None else grad_entropy[part],
                hidden.dtype,
            )
            grad_hidden[part] = grad @ weight
            if grad_weight is None:
                continue
            if grad.dtype == torch.float32:  # without a product in memory of its own
                grad_weight.addmm_(grad.T, hidden[part])
            else:
                grad_weight += float32_product(grad.T, hidden[part])
        if grad_weight is not None:
            grad_weight = grad_weight.to(weight.dtype)
        return grad_hidden, grad_weight, None, None  # nothing for targets and options


def head_logits(hidden: Tensor, weight: Tensor) -> Tensor:
    """(c, V) float32, at temperature 1, fresh memory."""
    return float32_product(hidden, weight.T)


def float32_product(a: Tensor, b: Tensor) -> Tensor:
    """a @ b in float32. On a GPU the sums of 16-bit products are not rounded to 16 bits first."""
    if a.is_cuda and a.dtype != torch.float32:
        return torch.mm(a, b, out_dtype=torch.float32)
    return (a @ b).float()


def on_gpu(x: Tensor) -> bool:
    return x.is_cuda


def chunk_functions(hidden: Tensor) -> tuple:
    """(softmax statistics, gradient of logits) of a chunk: compiled on a GPU, in place on a CPU."""
    if on_gpu(hidden):
        return gpu_statistics, gpu_gradient
    return cpu_statistics, cpu_gradient


def kept_size(hidden: Tensor) -> int:
    """Bytes of a kept probability: in the model's type on a GPU."""
    return hidden.dtype.itemsize if on_gpu(hidden) else 4


def room_for_softmaxes(hidden: Tensor) -> int:
    """Bytes that softmaxes may take between forward and backward. On a GPU a quarter of what is
    free: they save the backward a product of hidden states and vocabulary head, 2 of 8."""
    if not hidden.is_cuda:
        return KEPT_BYTES
    free = torch.cuda.mem_get_info(hidden.device)[0]
    cached = torch.cuda.memory_reserved(hidden.device) - torch.cuda.memory_allocated(hidden.device)
    return (free + cached) // 4


# Both pairs below: logits (c, V) float32 at temperature 1, targets (c,); statistics return
# (logps, log-normalisers, entropies (c,), the softmax (c, V) or None).
# What the gradient is of: (p, logits, temperature), p the kept softmax or None, logits then; and
# (targets, logps, log-normalisers, entropies). It returns d / d logits, (c, V), in `dtype`.


def cpu_statistics(logits, temperature: float, targets, want_entropy: bool, kept_type):
    """In place: the buffers of a chunk stay in the cache."""
    logits = logits if temperature == 1 else logits.div_(temperature)
    top = logits.amax(1)  # (c,)
    p = logits.sub_(top[:, None]).exp()  # (c, V), not yet divided by its sum
    z = p.sum(1)  # (c,)
    logps = logits.gather(1, targets[:, None])[:, 0] - z.log()
    entropy = logps  # anything of this shape: nobody asks for it
    if want_entropy:
        entropy = z.log() - torch.linalg.vecdot(p, logits) / z
    kept = None if kept_type is None else p.div_(z[:, None])
    return logps, top + z.log(), entropy, kept


def cpu_gradient(source: tuple, rows: tuple, grad_logps, grad_entropy, dtype):
    p, logits, temperature = source
    targets, _, log_z, entropy = rows
    if p is None:
        logits = logits if temperature == 1 else logits.div_(temperature)
        p = logits.sub_(log_z[:, None]).exp_()
    of_entropy = None
    if grad_entropy is not None and grad_entropy.any():
        # dH / dlogits = -p * (log p + H), before p is written over
        of_entropy = grad_entropy[:, None] * (torch.special.entr(p) - p * entropy[:, None])
    # dlogp / dlogits = [1 at the target] - p
    grad = p.mul_(-grad_logps[:, None])
    grad.scatter_add_(1, targets[:, None], grad_logps[:, None])
    if of_entropy is not None:
        grad.add_(of_entropy)
    return grad.div_(temperature).to(dtype)


def gpu_statistics(logits, temperature: float, targets, want_entropy: bool, kept_type):
    scale = logits.new_full((), 1 / temperature)  # a number would be compiled in
    return compiled(softmax_statistics)(logits, scale, targets, kept_type)


def softmax_statistics(logits, scale, targets, kept_type):
    """Two passes over the logits when compiled."""
    logits = logits * scale
    log_z = logits.logsumexp(1)  # (c,)
    logps = logits.gather(1, targets[:, None])[:, 0] - log_z
    p = (logits - log_z[:, None]).exp()  # (c, V)
    entropy = log_z - (p * logits).sum(1)
    kept = None if kept_type is None else p.to(kept_type)
    return logps, log_z, entropy, kept


def gpu_gradient(source: tuple, rows: tuple, grad_logps, grad_entropy, dtype):
    p, logits, temperature = source
    source = (logits, False) if p is None else (p, True)
    scale = grad_logps.new_full((), 1 / temperature)
    if grad_entropy is None:  # zeros: one compiled function serves both
        grad_entropy = torch.zeros_like(grad_logps)
    grads = grad_logps, grad_entropy
    return compiled(softmax_gradient)(source, scale, rows, grads, dtype)


def softmax_gradient(source: tuple, scale, rows: tuple, grads: tuple, dtype):
    """One pass over source, (kept softmax, True) or (logits, False), when compiled. At the target
    1 - p comes from its log-prob: a p of nearly 1 in 16 bits has lost it."""
    p, kept = source
    targets, logps, log_z, entropy = rows
    grad_logps, grad_entropy = grads
    p = p.float() if kept else (p * scale - log_z[:, None]).exp()  # (c, V)
    at_target = torch.arange(p.shape[1], device=p.device) == targets[:, None]
    logp = logps[:, None]
    p = torch.where(at_target, logp.exp(), p)
    rest = torch.where(at_target, -torch.expm1(logp), -p)
    grad = grad_logps[:, None] * rest
    grad = grad + grad_entropy[:, None] * (torch.special.entr(p) - p * entropy[:, None])
    return (grad * scale).to(dtype)


@functools.cache
def compiled(function):
    """For chunks of any number of tokens; compiled by Triton at first use."""
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
    Memory: about 4 float32 buffers of `chunk` * V at a time and the softmaxes that are kept,
    whatever n is. On a CPU a chunk has at most CPU_CHUNK tokens."""
    chunk = chunk if hidden.is_cuda else min(chunk, CPU_CHUNK)
    keep = torch.is_grad_enabled() and (hidden.requires_grad or head_weight.requires_grad)
    options = HeadOptions(temperature, chunk, want_entropy, keep)
    logps, entropy = ChunkedLogps.apply(hidden, head_weight, targets, options)
    return logps, entropy if want_entropy else None
