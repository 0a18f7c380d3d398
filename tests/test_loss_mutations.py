"""What the comparisons with the slow loops would notice: each of these mistakes, one at a time."""

import math
from functools import partial

import pytest
import torch
from loss_cases import TILTED, name_of
from loss_steps import EXAMPLE, INF, LOW, L, accumulate, assert_same, literal, ours

import learner
import loss


def wrong_std(rewards, scale):
    centred = rewards - rewards.mean(1, keepdim=True)
    return centred / (rewards.std(1, keepdim=True, unbiased=False) + 1e-4)


GRPO = dict(objective="grpo", beta=0.3, delta=1.4)
GSPO = dict(objective="gspo")
CISPO = dict(objective="cispo")
K2 = dict(objective="dr_grpo", beta=0.3, kl_loss_type="k2")
MASK = dict(objective="dr_grpo", importance_sampling="token_mask")
SEQUENCE = dict(objective="dr_grpo", importance_sampling="sequence_truncate")
GEOMETRIC = dict(objective="dr_grpo", importance_sampling="sequence_geometric")
SEED_GRPO = dict(objective="seed_grpo")
TOKEN_ENTROPY = dict(objective="token_entropy")
BONUS = dict(objective="dr_grpo", policy_entropy_bonus_coef=0.4)
MODES = dict(objective="dr_grpo", mode_entropy_coef=0.3)
SURROGATE = dict(objective="xdr", xdr_utility="surrogate")
ADAPTIVE = dict(objective="xdr", xdr_mode_adaptive_tau=True)
LISTWISE = dict(objective="maxent", maxent_tau=0.5, beta=0.3, maxent_q_epsilon=0.02)
FLOORED = dict(objective="maxent", maxent_loss="floored")
MLE = dict(objective="maxent", maxent_loss="mle", maxent_score_norm="sum")
FLOW = dict(objective="flow", beta=0.3)

# name: (function of loss.py or learner.py; the wrong one, which takes the right one as its first
# argument; the case that notices)
MUTATIONS = {
    # advantages and clips
    "advantages of the other sign": ("group_advantages", lambda f, r, scale: -f(r, scale), GRPO),
    "std over G instead of G - 1": ("group_advantages", lambda f, *a: wrong_std(*a), GRPO),
    "no gradient through the ratio": (
        "clipped_surrogate",
        lambda f, d, *a: f(d.detach(), *a),
        GRPO,
    ),
    "ratio the other way round": ("clipped_surrogate", lambda f, d, *a: f(-d, *a), GRPO),
    "clip sides swapped": (
        "clipped_surrogate",
        lambda f, d, A, low, high, delta: f(d, A, high, low, delta),
        GRPO,
    ),
    "no delta": ("clipped_surrogate", lambda f, d, A, low, high, delta: f(d, A, low, high), GRPO),
    "maximum for negative advantages": (
        "clipped_surrogate",
        lambda f, d, A, *a: (-f(d, -A, *a)[0], *f(d, A, *a)[1:]),
        GRPO,
    ),
    "clip counts swapped": (
        "clipped_surrogate",
        lambda f, *a: tuple(f(*a)[i] for i in (0, 2, 1)),
        GRPO,
    ),
    # KL and shares of tokens
    "KL the other way round": ("k3_kl", lambda f, x, ref: f(ref, x), GRPO),
    "no gradient through KL": ("k3_kl", lambda f, x, ref: f(x.detach(), ref), GRPO),
    "no KL": ("adds_kl", lambda f, c: False, GRPO),
    "k2 without its half": ("k2_kl", lambda f, x, ref: 2 * f(x, ref), K2),
    "k3 for k2": ("k2_kl", lambda f, x, ref: loss.k3_kl(x, ref), K2),
    "padding counted": (
        "token_weights",
        lambda f, kind, mask, *a: f(kind, torch.ones_like(mask), *a),
        GRPO,
    ),
    "per token instead of per row": (
        "token_weights",
        lambda f, kind, *a: f("token_mean", *a),
        GRPO,
    ),
    # the sampler's weight
    "no sampler correction": (
        "importance_ratio",
        lambda f, old, mu, T, kind, cap: f(old, mu, T, "none", cap),
        GRPO,
    ),
    "sampler ratio the other way round": (
        "importance_ratio",
        lambda f, old, mu, *a: f(mu, old, *a),
        GRPO,
    ),
    "cap as a floor": (
        "importance_ratio",
        lambda f, old, mu, T, kind, cap: f(old, mu, T, kind, INF).clamp(min=cap),
        GRPO,
    ),
    "no cap": ("importance_ratio", lambda f, old, mu, T, kind, cap: f(old, mu, T, kind, INF), GRPO),
    "sequence ratio per token": (
        "importance_ratio",
        lambda f, old, mu, T, kind, cap: f(old, mu, T, "token_truncate", cap),
        SEQUENCE,
    ),
    "sequence ratio as a mean": (
        "importance_ratio",
        lambda f, old, mu, T, kind, cap: f(old, mu, T, "sequence_geometric", cap),
        SEQUENCE,
    ),
    "sequence ratio masked": (
        "importance_ratio",
        lambda f, old, mu, T, kind, cap: f(old, mu, T, "sequence_mask", cap),
        SEQUENCE,
    ),
    "geometric ratio as a sum": (
        "importance_ratio",
        lambda f, old, mu, T, kind, cap: f(old, mu, torch.ones_like(T), kind, cap),
        GEOMETRIC,
    ),
    "geometric mean over padding": (
        "importance_ratio",
        lambda f, old, mu, T, kind, cap: f(old, mu, torch.full_like(T, 5), kind, cap),
        GEOMETRIC,
    ),
    "mask keeps what is above the cap": (
        "importance_ratio",
        lambda f, *a: f(*a[:4], INF) - f(*a),
        MASK,
    ),
    "mask truncates": (
        "importance_ratio",
        lambda f, old, mu, T, kind, cap: f(old, mu, T, "token_truncate", cap),
        MASK,
    ),
    # other ratios
    "gspo's ratio as a sum": (
        "surrogate",
        lambda f, x, part, c: f(x, part | {"lengths": torch.ones_like(part["lengths"])}, c),
        GSPO,
    ),
    "gspo's ratio per token": (
        "surrogate",
        lambda f, x, part, c: f(x, part, c | {"objective": "grpo"}),
        GSPO,
    ),
    "cispo's ratio not detached": (
        "cispo_surrogate",
        lambda f, x, d, A, cap: (d.exp().clamp(max=cap) * A[:, None] * x, *f(x, d, A, cap)[1:]),
        CISPO,
    ),
    "cispo without gradient above its cap": (
        "cispo_surrogate",
        lambda f, x, d, A, cap: f(torch.where(d.exp() > cap, x.detach(), x), d, A, cap),
        CISPO,
    ),
    "cispo clipped below too": (
        "cispo_surrogate",
        lambda f, x, d, A, cap: f(x, d.clamp(min=math.log(1 - LOW)), A, cap),
        CISPO,
    ),
    "cispo's cap as a floor": (
        "cispo_surrogate",
        lambda f, x, d, A, cap: f(x, d.clamp(min=math.log(cap)), A, INF),
        CISPO,
    ),
    "cispo without a cap": (
        "cispo_surrogate",
        lambda f, x, d, A, cap: (f(x, d, A, INF)[0], *f(x, d, A, cap)[1:]),
        CISPO,
    ),
    "cispo counts bad tokens as clipped": (
        "cispo_surrogate",
        lambda f, x, d, A, cap: (*f(x, d, A, cap)[:2], d.exp() > cap),
        CISPO,
    ),
    # entropies
    "an answer's mass not summed": (
        "semantic_entropy",
        lambda f, clusters, p: f(torch.arange(p.numel()).view(p.shape), p),
        SEED_GRPO,
    ),
    "answers counted, not weighed": (
        "semantic_entropy",
        lambda f, clusters, p: f(clusters, p * 0),
        SEED_GRPO,
    ),
    "alpha not over log G": (
        "semantic_scale",
        lambda f, H, alpha, G: f(H, alpha * math.log(G), G),
        SEED_GRPO,
    ),
    "different answers trusted more": ("semantic_scale", lambda f, *a: 1 / f(*a), SEED_GRPO),
    "entropy detached": (
        "token_loss",
        lambda f, x, entropy, *a: f(x, entropy.detach(), *a),
        TOKEN_ENTROPY,
    ),
    "entropy lowered": ("token_loss", lambda f, x, entropy, *a: f(x, -entropy, *a), TOKEN_ENTROPY),
    "bonus of the other sign": ("entropy_bonus", lambda f, *a: -f(*a), BONUS),
    "bonus not scaled by the rewards": (
        "entropy_bonus",
        lambda f, r, *a: f(r, *a) / r.std(1, keepdim=True).clamp(min=1e-9),
        BONUS,
    ),
    "bonus without z-scores": (
        "entropy_bonus",
        lambda f, r, H, coef: coef * r.std(1, keepdim=True) * (H - H.mean(1, keepdim=True)),
        BONUS,
    ),
    "bonus in flat groups": (
        "entropy_bonus",
        lambda f, r, H, coef: coef * (H - H.mean(1, keepdim=True)) / H.std(1, keepdim=True),
        BONUS,
    ),
    # weights of rows
    "surrogate utility without lengths": ("xdr_utilities", lambda f, A, T, *a: A, SURROGATE),
    "surrogate utility per row mean": (
        "xdr_utilities",
        lambda f, A, T, kind, cap: A * T / T.max(),
        SURROGATE,
    ),
    "xdr prefers the worst": ("xdr_utilities", lambda f, *a: -f(*a), dict(objective="xdr")),
    "more modes, more tau": (
        "mode_adaptive_tau",
        lambda f, tau, k: [tau * tau / t for t in f(tau, k)],
        ADAPTIVE,
    ),
    "modes not counted from one": ("mode_adaptive_tau", lambda f, tau, k: f(tau, k + 1), ADAPTIVE),
    "tilted away from the reference": ("xdr_weights", lambda f, U, l, *a: f(U, -l, *a), TILTED),
    "no tilt": ("xdr_weights", lambda f, U, l, taus, beta: f(U, l, taus, 0.0), TILTED),
    "a tilt over tau alone": (
        "xdr_weights",
        lambda f, U, l, taus, beta: f(U + beta * l, None, taus, 0.0),
        TILTED,
    ),
    "KL next to the tilt": ("adds_kl", lambda f, c: True, TILTED),
    "weights without the reference": (
        "maxent_weights",
        lambda f, u, l, tau, beta: f(u, None, tau, 0.0),
        LISTWISE,
    ),
    "tau alone as divisor": (
        "maxent_weights",
        lambda f, u, l, tau, beta: f(u + beta * l, None, tau, 0.0),
        LISTWISE,
    ),
    "rewards instead of log targets": ("log_reward_targets", lambda f, r, T_q, eps: r, LISTWISE),
    "KL next to maxent's weights": ("adds_kl", lambda f, c: True, LISTWISE),
    # losses over groups
    "equal groups trained": (
        "listwise_loss",
        lambda f, s, w, active, *a: f(s, w, torch.ones_like(active), *a),
        LISTWISE,
    ),
    "mean over all groups": (
        "listwise_loss",
        lambda f, s, w, active, norm, *a: f(s, w, active, len(s), *a),
        LISTWISE,
    ),
    "no floor under the share of wrong rows": (
        "listwise_loss",
        lambda f, s, w, active, norm, share, below: f(s, w, active, norm, share),
        FLOORED,
    ),
    "a floor under the share of all rows": (
        "listwise_loss",
        lambda f, s, w, active, norm, share, below: f(s, w, active, norm, share, below | True),
        FLOORED,
    ),
    "scores averaged over padding": (
        "sequence_scores",
        lambda f, x, T, *a: f(x, torch.full_like(T, x.shape[1]), *a),
        LISTWISE,
    ),
    "mle with a baseline": ("mle_loss", lambda f, s, w, *a: f(s, w - 1 / s.shape[1], *a), MLE),
    "mle of equal groups": (
        "mle_loss",
        lambda f, s, w, active, *a: f(s, w, torch.ones_like(active), *a),
        MLE,
    ),
    "flow without its baseline": (
        "balance_loss",
        lambda f, s, goals, *a: f(torch.cat([s, -s], 1), torch.cat([goals, -goals], 1), *a),
        FLOW,
    ),
    "flow of equal groups": (
        "balance_loss",
        lambda f, s, goals, active, *a: f(s, goals, torch.ones_like(active), *a),
        FLOW,
    ),
    "flow's goals multiplied by tau": (
        "balance_goals",
        lambda f, u, l, tau, beta: f(u, l, 1 / tau, beta),
        FLOW,
    ),
    "flow's reference against it": (
        "balance_goals",
        lambda f, u, l, tau, beta: f(u, -l, tau, beta),
        FLOW,
    ),
    "the target's scores not scaled": (
        "sequence_scores",
        lambda f, x, T, norm, cap, scale: f(x, T, norm, cap),
        dict(objective="maxent", maxent_score_scale=4.0),
    ),
    "all groups weigh the same": (
        "reward_spread",
        lambda f, r: torch.ones(len(r)),
        dict(objective="maxent", maxent_group_weight="spread"),
    ),
    "pass@k of k - 1": (
        "pass_at_k_advantages",
        lambda f, r, k: f(r, k - 1),
        dict(objective="pkpo"),
    ),
    "usual answers worth more": (
        "unlikely_rewards",
        lambda f, r, S, coef: f(r, -S, coef),
        dict(objective="dr_grpo", unlikeliness_coef=0.25),
    ),
    "mle not per token": (
        "loss_scores",
        lambda f, x, T, c: loss.sequence_scores(x, T, "sum", L),
        MLE,
    ),
    "mode entropy over all rows": (
        "mode_entropy_loss",
        lambda f, s, r, norm: loss.listwise_loss(s, s * 0 + 1 / 4, ~loss.equal_groups(r), norm),
        MODES,
    ),
    "mode entropy of equal groups": ("equal_groups", lambda f, r: r[:, 0] == 99, MODES),
    "mode entropy not over L": (
        "mode_entropy_loss",
        lambda f, s, r, norm: f(s, r, norm / L),
        MODES,
    ),
    "mode entropy in another norm": (
        "loss_scores",
        lambda f, x, T, c: loss.sequence_scores(x, T, "length", L),
        MODES,
    ),
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_the_slow_loop_notices(name, monkeypatch):
    """The comparison passes, and fails once one function is replaced by a wrong one."""
    function, mutate, case = MUTATIONS[name]
    module = loss if hasattr(loss, function) else learner
    slow = literal(EXAMPLE, case)
    assert_same(ours(EXAMPLE, case), slow)
    monkeypatch.setattr(module, function, partial(mutate, getattr(module, function)))
    with pytest.raises(AssertionError):
        assert_same(ours(EXAMPLE, case), slow)


def counts_of(part):
    """The counts of a micro-batch, where those of the step belong."""
    return {"rows": len(part["lengths"]), "tokens": int(part["lengths"].sum())}


CUT_MUTATIONS = {  # as above, of learner.py, where groups are cut
    "coefficients of the wrong rows": ("group_loss", lambda f, s, *a: f(s.roll(1, 1), *a)),
    "micro-batches count their own groups": (
        "group_loss",
        lambda f, s, targets, c, counts: f(s, targets, c, {key: 1 for key in counts}),
    ),
    "micro-batches count their own tokens": (
        "token_loss",
        lambda f, x, H, part, beta, c, counts: f(x, H, part, beta, c, counts | counts_of(part)),
    ),
    "groups with a gradient rest": (
        "resting_rows",
        lambda f, targets, *a: (targets.task_rewards[:, :1] < 1).expand(-1, EXAMPLE.G).flatten(),
    ),
    "scores of the old policy": (
        "forward_rows",
        lambda f, model, batch, *a: batch.get("old_logps", f(model, batch, *a)),
    ),
}


@pytest.mark.parametrize("name", CUT_MUTATIONS)
@pytest.mark.parametrize(
    "case",
    [
        dict(objective="maxent", beta=0.3, maxent_kl=True),
        dict(objective="grpo", mode_entropy_coef=0.3),
    ],
    ids=name_of,
)
def test_the_split_notices(name, case, monkeypatch):
    function, mutate = CUT_MUTATIONS[name]
    whole = ours(EXAMPLE, case)
    assert_same(accumulate(EXAMPLE, case, budget=13), whole)
    monkeypatch.setattr(learner, function, partial(mutate, getattr(learner, function)))
    with pytest.raises(AssertionError):
        assert_same(accumulate(EXAMPLE, case, budget=13), whole)
