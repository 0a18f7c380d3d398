"""The loss of a step against literal loops written from MATH.md, in float64, one token or row at a time.

make_step builds one training step (rewards with ties, ragged rows, four kinds of log-probs, answers); step_loss is the loss of all
its rows through the learner's own functions, accumulate the same through its micro-batches; slow_step is the page's formulas.
Values, gradients and metrics must agree to 1e-5 (fp32), under any order, split and padding of the rows.
"""

import functools
import itertools
import math
import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch._dynamo.testing import CompileCounter

import checks
import learner
import loss
from common import load_config, scheduled
from policy import completion_mask
from ranks import start_distributed

torch.set_num_threads(1)
INF = math.inf
LOW, HIGH, CAP, L = (
    0.2,
    0.28,
    1.5,
    8,
)  # clip range, cap of the sampler's ratio, max_completion_length
CISPO = 1.3  # cap of cispo's ratio
CONSTANTS = dict(
    epsilon=LOW,
    epsilon_high=HIGH,
    importance_sampling_cap=CAP,
    max_completion_length=L,
    cispo_epsilon_max=CISPO,
    maxent_tau=0.4,
    maxent_q_temperature=0.7,
    seed_grpo_alpha=0.7,
    token_entropy_coef=0.3,
)
examples = settings(derandomize=True, deadline=None, max_examples=40)
REWARDS = st.sampled_from(
    [0.0, 0.1, 1.0, 1.0, -0.5]
)  # drawn often enough for ties and all-equal groups
SCALES, NORMS = ("group", "batch", "mean", "none"), ("length", "constant", "sum")
SAMPLINGS = (
    "token_truncate",
    "token_mask",
    "sequence_truncate",
    "sequence_mask",
    "sequence_geometric",
    "none",
)
groups = (
    st.tuples(st.integers(1, 3), st.integers(1, 5))
    .flatmap(
        lambda PG: st.lists(
            st.lists(REWARDS, min_size=PG[1], max_size=PG[1]), min_size=PG[0], max_size=PG[0]
        )
    )
    .map(torch.tensor)
)
pairs = groups.filter(lambda rewards: rewards.shape[1] >= 2)


def close(a, b, tolerance=1e-5, least=1e-3):
    """Equal up to `tolerance` relative to the largest entry of b or to `least`, NaN never equal."""
    a, b = torch.as_tensor(a).double(), torch.as_tensor(b).double()
    assert b.isfinite().all()
    torch.testing.assert_close(
        a, b, rtol=0, atol=tolerance * max(least, b.abs().max().item() if b.numel() else 0)
    )


def randn(*shape, seed=0, scale=1.0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale


@functools.cache
def resolve(flags: tuple) -> dict:
    return load_config([f"--{key}={value}" for key, value in (CONSTANTS | dict(flags)).items()])


def config(G: int, case: dict) -> dict:
    return resolve(tuple(case.items())) | {
        "num_generations": G
    }  # set afterwards: a config with G = 1 is refused


# --- the page, literally


def slow_softmax(x):
    top = max(x)
    e = [math.exp(v - top) for v in x]
    return [v / sum(e) for v in e]


def slow_std(x):
    return (
        math.sqrt(sum((v - sum(x) / len(x)) ** 2 for v in x) / (len(x) - 1)) if len(x) > 1 else 0.0
    )


def slow_advantages(rewards, scale):
    A = []
    for group in rewards:
        divisor = {
            "group": slow_std(group) + 1e-4,
            "batch": slow_std([v for other in rewards for v in other]) + 1e-4,
            "mean": sum(group) / len(group) or 1.0,
            "none": 1.0,
        }[scale]
        if scale == "mean" and sum(group) <= 0:
            A.append([0.0] * len(group))
            continue
        A.append(
            [
                0.0 if max(group) == min(group) else (v - sum(group) / len(group)) / divisor
                for v in group
            ]
        )
    return A


def slow_pass_at_k(group, k):
    """Section 9: what row i adds to the best of every set of k rows that it is in, over all such sets; a mean of others at k = 1."""
    G, A = len(group), []
    for i in range(G):
        others = [r for j, r in enumerate(group) if j != i]
        if k == 1:
            total = group[i] - sum(others) / len(others) if others else 0.0
        else:
            sets = itertools.combinations(others, k - 1)
            total = sum(max(group[i], *rest) - max(rest) for rest in sets)
        A.append(total * G / math.comb(G, k))
    return A


def slow_bonus(rewards, entropies, coef):
    """Section 3: what is added to the rewards of one group, coef times their std times the z-score of the entropies."""
    if max(rewards) == min(rewards) or max(entropies) == min(entropies):
        return [0.0] * len(rewards)
    mean, spread = sum(entropies) / len(entropies), slow_std(entropies)
    return [coef * slow_std(rewards) * (v - mean) / spread for v in entropies]


def slow_targets(group, T_q, eps):
    return [(1 - len(group) * eps) * p + eps for p in slow_softmax([r / T_q for r in group])]


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


def slow_unlikely(rewards, logps, coef):
    G = len(rewards)
    rank = [sum(other > mine + 1e-4 for other in logps) for mine in logps]
    return [r * (1 - coef * (G - k) / G) if r > 0 else r for r, k in zip(rewards, rank)]


def slow_log_softmax(x):
    top = max(v.item() for v in x)
    log_normaliser = sum((v - top).exp() for v in x).log() + top
    return [v - log_normaliser for v in x]


def slow_mode_entropy(scores, rewards):
    """One group's term of L_modes, times P * L."""
    C = [i for i, r in enumerate(rewards) if r == max(rewards) and max(rewards) != min(rewards)]
    return -sum(slow_log_softmax([scores[i] for i in C])) / len(C) if len(C) >= 2 else 0.0


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


def slow_step(logps, entropy, step, c):
    """Sections 2 to 4: (loss, tokens clipped below, above, sum of k3) of one step, as four loops over prompts, rows and tokens.

    Where the page leaves something open: gspo's ratio of a row counts at each of its tokens for sampler weights and clip counts, and a
    token counts as clipped only with an advantage, so not under a weight of 0."""
    objective, P, G, N, tokens = (
        c["objective"],
        step.P,
        step.G,
        step.P * step.G,
        sum(step.lengths.tolist()),
    )
    policy, entropies = ([row.unbind() for row in x.unbind()] for x in (logps, entropy))
    old, ref, mu = (x.double().tolist() for x in (step.old, step.ref, step.sampler))
    measured = step.entropy.double().tolist()
    aggregation, scale = TABLE[objective]
    rewards, tau, beta = step.rewards.double().tolist(), c["maxent_tau"], c["beta"]
    rows = [range(x * G, (x + 1) * G) for x in range(P)]
    T = step.lengths.tolist()

    def score(values, n, norm):
        return sum(values[n][: T[n]]) / {"length": T[n], "constant": L, "sum": 1}[norm]

    def maxent_score(values, n):
        return c["maxent_score_scale"] * score(values, n, c["maxent_score_norm"])

    if c["unlikeliness_coef"] > 0:
        rewards = [
            slow_unlikely(group, [score(mu, n, "sum") for n in rows[x]], c["unlikeliness_coef"])
            for x, group in enumerate(rewards)
        ]
    shaped = [
        [
            r + b
            for r, b in zip(
                group,
                slow_bonus(
                    group,
                    [score(measured, n, "length") for n in rows[x]],
                    c["policy_entropy_bonus_coef"],
                ),
            )
        ]
        for x, group in enumerate(rewards)
    ]
    rewards = step.rewards.double().tolist()  # as they were given
    equal = [max(group) == min(group) for group in rewards]
    lowest = min(min(group) for group in rewards)
    active = [
        {"all": not same, "wrong": not (same and group[0] == lowest), "none": True}[
            c["maxent_skip_equal_groups"]
        ]
        for same, group in zip(equal, rewards)
    ]
    A = slow_advantages(shaped, c["scale_rewards"] or scale)
    if objective == "pkpo":
        A = [slow_pass_at_k(group, min(G, scheduled(c["pkpo_k"], 0))) for group in shaped]
    total, low, high, kl = (logps * 0).sum(), 0, 0, 0.0
    for x in range(P):
        l = [maxent_score(ref, n) for n in rows[x]]
        spread = sum((v - sum(rewards[x]) / G) ** 2 for v in rewards[x]) / G
        share = 4 * spread if c["maxent_group_weight"] == "spread" else 1.0
        a = [1 / G] * G  # weights of the rows in a mean over prompts
        if objective == "xdr":
            U = (
                A[x]
                if c["xdr_utility"] == "advantage"
                else [v * T[n] / L for v, n in zip(A[x], rows[x])]
            )
            modes = max(1, step.modes[x].item()) if c["xdr_mode_adaptive_tau"] else 1
            a = slow_weights(
                U, l, tau * math.log(2) / math.log(1 + modes), beta if c["xdr_ref_tilt"] else 0.0
            )
        if objective == "seed_grpo":
            H = slow_semantic_entropy(
                step.clusters[x].tolist(), [score(mu, n, "length") for n in rows[x]]
            )
            A[x] = [v / (1 + c["seed_grpo_alpha"] / math.log(G) * H) for v in A[x]]
        u = slow_targets(shaped[x], c["maxent_q_temperature"], c["maxent_q_epsilon"])
        u = [math.log(q) for q in u]
        if objective == "flow" and active[x]:
            goals = [(u[i] + beta * l[i]) / tau for i in range(G)]
            d = [maxent_score(policy, n) - goals[i] for i, n in enumerate(rows[x])]
            variance = sum((v - sum(d) / G) ** 2 for v in d) / G
            total = total + share * variance / 2 / max(1, sum(active))
        if objective == "maxent":
            w = slow_weights(u, l, tau, beta)
            a, A[x] = [1.0] * G, [share * (v - 1 / G) if active[x] else 0.0 for v in w]
            if c["maxent_loss"] == "listwise" and active[x]:
                log_p = slow_log_softmax([maxent_score(policy, n) for n in rows[x]])
                cross_entropy = -sum(v * s for v, s in zip(w, log_p))
                total = total + share * cross_entropy / max(1, sum(active))
            if c["maxent_loss"] == "mle" and active[x]:
                total = total - share * sum(
                    v * score(policy, n, "length") for v, n in zip(w, rows[x])
                ) / max(1, sum(active))
        if c["mode_entropy_coef"] > 0:
            S = [score(policy, n, c["mode_entropy_score_norm"]) for n in rows[x]]
            total = total + c["mode_entropy_coef"] * slow_mode_entropy(S, rewards[x]) / (
                P * L if c["mode_entropy_score_norm"] == "sum" else P
            )

        for i, n in enumerate(rows[x]):
            part = {"row": 1 / T[n] / N, "token": 1 / tokens, "constant": 1 / (N * L)}[aggregation]
            weight = a[i] / L / P if objective in ("xdr", "maxent") else part
            mismatch = [old[n][t] - mu[n][t] for t in range(T[n])]
            for t in range(T[n]):
                d = policy[n][t] - ref[n][t]
                if objective not in OVER_SCORES or (
                    objective == "maxent" and c["maxent_loss"] == "policy_gradient"
                ):
                    log_c = (
                        sum(policy[n][s] - old[n][s] for s in range(T[n])) / T[n]
                        if objective == "gspo"
                        else policy[n][t] - old[n][t]
                    )
                    ratio = log_c.exp()
                    if objective == "cispo":
                        gain = min(ratio.item(), c["cispo_epsilon_max"]) * A[x][i] * policy[n][t]
                        high += bool(ratio > c["cispo_epsilon_max"] and A[x][i] > 0)
                    else:
                        unclipped = min(ratio, c["delta"]) if c["delta"] > 0 else ratio
                        gain = min(
                            unclipped * A[x][i], min(max(ratio, 1 - LOW), 1 + HIGH) * A[x][i]
                        )
                        low += bool(ratio < 1 - LOW and a[i] * A[x][i] < 0)
                        high += bool(ratio > 1 + HIGH and a[i] * A[x][i] > 0)
                    kind = c["importance_sampling"]
                    of = {"token": mismatch[t], "sequence": sum(mismatch)}.get(
                        kind.split("_")[0], 0.0
                    )
                    rho = math.exp(of / T[n] if kind == "sequence_geometric" else of)
                    rho = (
                        1.0
                        if kind == "none"
                        else rho
                        if rho <= CAP
                        else 0.0
                        if kind.endswith("mask")
                        else CAP
                    )
                    total = total - weight * rho * gain
                if objective == "token_entropy":
                    total = total - c["token_entropy_coef"] * entropies[n][t] / (N * L)
                if beta > 0:
                    kl += math.exp(-d.item()) + d.item() - 1
                    tilts = objective in OVER_SCORES and not c["maxent_kl"]
                    if not tilts and not c["xdr_ref_tilt"]:
                        total = total + beta * part * (
                            d**2 / 2 if c["kl_loss_type"] == "k2" else (-d).exp() + d - 1
                        )
    return total, low, high, kl


# --- one step, and its loss as the trainer composes it


def make_step(rewards, lengths, seed):
    """rewards (P, G); log-probs (N, T) of policy, old policy, reference and sampler and the policy's entropies, 0 outside the completions;
    the answers: clusters (P, G), correct modes (P,)."""
    lengths = torch.tensor(lengths)
    N, T, (P, G) = len(lengths), int(lengths.max()), rewards.shape
    mask = torch.arange(T) < lengths[:, None]
    logps = (randn(N, T, seed=seed, scale=0.5) - 1.5) * mask
    old, ref = (logps + randn(N, T, seed=seed + k, scale=0.4) * mask for k in (1, 2))
    entropy, generator = (
        randn(N, T, seed=seed + 4).abs() * mask,
        torch.Generator().manual_seed(seed),
    )
    return SimpleNamespace(
        rewards=rewards,
        P=P,
        G=G,
        lengths=lengths,
        mask=mask,
        logps=logps,
        entropy=entropy,
        old=old,
        ref=ref,
        sampler=old + randn(N, T, seed=seed + 3, scale=0.4) * mask,
        clusters=torch.randint(3, (P, G), generator=generator),
        modes=torch.randint(4, (P,), generator=generator),
    )


def changed(step, **values):
    return SimpleNamespace(**{**vars(step), **values})


def decided(rewards):
    """No row lies at the mean of an unequal group, where rounding, of either sign, would decide whether it counts as clipped."""
    return all(
        abs(v) > 1e-6
        for A in slow_advantages(rewards.double().tolist(), "none")
        if any(A)
        for v in A
    )


@st.composite
def steps(draw):
    rewards = draw(groups.filter(decided))
    lengths = draw(st.lists(st.integers(1, 5), min_size=rewards.numel(), max_size=rewards.numel()))
    return make_step(rewards, lengths, draw(st.integers(0, 10_000)))


EXAMPLE = changed(
    make_step(
        torch.tensor([[1.0, 0, 0, 1], [0, 0.1, 0.1, -1], [0.1, 0.1, 0.1, 0.1]]),
        [3, 1, 4, 2, 5, 5, 1, 2, 3, 3, 1, 5],
        7,
    ),
    modes=torch.tensor([3, 0, 2]),
)


def group_of(step, c):
    """What learner.measure_groups would find, and it does in accumulate()."""

    def mean(x):
        return (x.sum(1) / step.lengths).view(step.P, step.G)

    group = {
        "rewards": step.rewards,
        "lengths": step.lengths.view(step.P, step.G).to(step.rewards.dtype),
        "pass_k": min(step.G, scheduled(c["pkpo_k"], 0)),
    }
    if c["beta"] > 0:
        group["ref_scores"] = loss.sequence_scores(
            step.ref, step.lengths, c["maxent_score_norm"], L, c["maxent_score_scale"]
        ).view(step.P, step.G)
    if c["unlikeliness_coef"] > 0:
        group["seq_logps"] = step.sampler.sum(1).view(step.P, step.G)
    if c["policy_entropy_bonus_coef"] > 0:
        group["entropies"] = mean(step.entropy)
    if c["objective"] == "seed_grpo":
        group |= {"clusters": step.clusters, "mean_logps": mean(step.sampler)}
    if c["xdr_mode_adaptive_tau"]:
        group["correct_modes"] = step.modes
    return group


def targets_of(step, c):
    return learner.group_targets(group_of(step, c), c["maxent_tau"], c["beta"], c)


def step_loss(logps, entropy, step, c):
    """(loss, tokens clipped below, above, sum of k3) of all rows in one micro-batch, through the learner's functions."""
    targets = targets_of(step, c)
    norm = learner.step_counts(targets, step.lengths.view(step.P, step.G))
    part = {"lengths": step.lengths, "old_logps": step.old, "sampler_logps": step.sampler} | (
        {"ref_logps": step.ref} if c["beta"] > 0 else {}
    )
    logps, entropy = logps * step.mask, entropy * step.mask  # as the policy's forward leaves them
    part["advantages"] = targets["advantages"].flatten()
    total, *counts = learner.token_loss(logps, entropy, part, c["beta"], c, norm)
    if learner.couples_rows(c):
        total = total + learner.group_loss(
            learner.scores_of(logps, step.lengths, c).view(step.P, step.G), targets, c, norm
        )
    return total, *counts


def value_and_grad(f, x, *args, **kwargs):
    leaf = x.clone().requires_grad_()
    value = f(leaf, *args, **kwargs)
    return value.detach(), torch.autograd.grad(value, leaf)[0]


def run(f, step, case, dtype=torch.float32):
    """What f makes of a step: its loss, the gradient by log-probs and entropies (2, N, T), and its metrics."""
    leaves = [x.to(dtype, copy=True).requires_grad_() for x in (step.logps, step.entropy)]
    value, low, high, kl = f(*leaves, step, config(step.G, case))
    grads = torch.autograd.grad(value, leaves, allow_unused=True, materialize_grads=True)
    return SimpleNamespace(
        value=value.item(), grad=torch.stack(grads), low=int(low), high=int(high), kl=float(kl)
    )


ours, literal = partial(run, step_loss), partial(run, slow_step, dtype=torch.float64)


def assert_same(a, b):
    """Equal to 1e-5 of the largest gradient entry, and of the loss or of what its terms add up to; the clip counts exactly."""
    close(a.grad, b.grad, least=1e-2)  # p - w is a difference of numbers near 1 / G
    assert abs(a.value - b.value) <= 1e-5 * max(abs(b.value), b.grad.abs().sum().item())
    assert (a.low, a.high) == (b.low, b.high)
    assert abs(a.kl - b.kl) <= 1e-5 * max(
        0.1, b.kl
    )  # in fp32, exp(-d) + d - 1 loses the digits of a small d


def same_to_the_bit(a, b):
    return a.value == b.value and torch.equal(a.grad, b.grad)


def compare(step, case):
    assert_same(ours(step, case), literal(step, case))


class Table:
    """An engine that looks log-probs and entropies up by the row's number, which it finds as its first token id."""

    def __init__(self, logps, entropy):
        self.tables = [x.clone().requires_grad_() for x in (logps, entropy)]

    def __call__(self, ids, prompt_lengths, lengths, want_entropy=True):
        mask = completion_mask(lengths)
        return [table[ids[:, 0], : mask.shape[1]] * mask for table in self.tables]

    def backward(self, loss, scale_wrt_gas):
        loss.backward()


def accumulate(step, case, plan=None, budget=10**6, pad=0, first=False):
    """The same as ours(), by the learner's whole path: measurements, micro-batches of a token budget or of a given plan, gradients."""
    if not torch.distributed.is_initialized():
        start_distributed()
    c = config(step.G, case) | {"max_tokens_per_micro_batch": budget}
    N, T = step.mask.shape
    wide = torch.zeros(N, pad)
    batch = {
        "ids": torch.arange(N)[:, None].expand(N, 1 + T + pad),
        "prompt_lengths": torch.ones(N, dtype=torch.long),
        "lengths": step.lengths,
        "sampler_logps": torch.cat([step.sampler, wide], 1),
    } | ({} if first else {"old_logps": torch.cat([step.old, wide], 1)})
    engine, reference = (
        Table(step.logps, step.entropy),
        Table(step.ref, step.entropy) if c["beta"] > 0 else None,
    )
    modes = [(0, set(range(k))) for k in step.modes.tolist()]
    lived = SimpleNamespace(rows=range(step.P), rollouts=[], right=None, rewards=step.rewards)
    with (
        patch("scoring.answer_clusters", lambda *a: step.clusters),
        patch("scoring.correct_modes", lambda *a: modes),
    ):
        group = learner.measure_groups(engine, reference, batch, lived, step.rewards, c)
    group["pass_k"] = min(step.G, scheduled(c["pkpo_k"], 0))
    targets = learner.group_targets(group, c["maxent_tau"], c["beta"], c)

    def given_plan(batch, unit, c, idle=None):
        return sorted(
            plan, key=lambda rows: idle is None or not idle[rows].all()
        ), learner.couples_rows(c)

    with patch("learner.agree_on_plan", given_plan if plan else learner.agree_on_plan):
        metrics = learner.accumulate_gradients(
            engine, batch, targets, c["beta"], c, learner.step_counts(targets, group["lengths"])
        )
    tokens = int(step.lengths.sum())
    close(metrics["entropy"], step.entropy.sum() / tokens)
    assert ("kl" in metrics) == (c["beta"] > 0)
    low, high = (round(metrics[f"clip_ratio/{side}"] * tokens, 3) for side in ("low", "high"))
    grad = torch.stack([torch.zeros_like(x) if x.grad is None else x.grad for x in engine.tables])
    return SimpleNamespace(
        value=metrics["loss"], grad=grad, low=low, high=high, kl=metrics.get("kl", 0.0) * tokens
    )


def scores(logps, step, norm):
    return loss.sequence_scores(logps * step.mask, step.lengths, norm, L).view(step.P, step.G)


# --- advantages and targets


@examples
@given(groups, st.sampled_from(SCALES))
def test_advantages_equal_the_slow_loop(rewards, scale):
    close(loss.group_advantages(rewards, scale), slow_advantages(rewards.double().tolist(), scale))


@pytest.mark.parametrize("scale", SCALES)
def test_equal_rewards_have_advantage_exactly_zero_though_their_mean_is_inexact(scale):
    for G in range(1, 33):
        rewards = torch.tensor([[value] * G for value in (0.1, 1 / 3, 1e-8, 12345.678)])
        assert torch.equal(loss.group_advantages(rewards, scale), torch.zeros(4, G))
    assert (
        torch.full((7,), 0.1) - torch.full((7,), 0.1).mean()
    ).abs().max() > 0  # the naive formula does leak


@pytest.mark.parametrize("scale", SCALES)
def test_a_batch_of_one_row_has_advantage_zero(scale):
    assert loss.group_advantages(torch.tensor([[0.7]]), scale).tolist() == [[0.0]]


def test_unknown_scale_is_an_error():
    with pytest.raises(ValueError, match="scale_rewards='std'"):
        loss.group_advantages(torch.zeros(2, 2), "std")


@examples
@given(groups, st.sampled_from([0.05, 1.0, 30.0]), st.sampled_from([0.0, 0.3, 1.0]))
def test_targets_equal_the_formula_and_sum_to_one(rewards, T_q, share):
    eps = share / rewards.shape[1]  # 0, something, the largest allowed 1/G
    q = torch.tensor([slow_targets(group, T_q, eps) for group in rewards.double().tolist()])
    close(loss.reward_targets(rewards, T_q, eps), q)
    close(loss.log_reward_targets(rewards, T_q, eps).exp(), q)
    close(loss.reward_targets(rewards, T_q, eps).sum(1), torch.ones(len(rewards)))


@pytest.mark.parametrize("eps", [0.251, 1.0, -0.01])
def test_epsilon_outside_0_to_1_over_G_is_an_error(eps):
    for f in (loss.reward_targets, loss.log_reward_targets):
        with pytest.raises(ValueError, match=r"0\.2500"):
            f(torch.zeros(2, 4), 1.0, eps)


def test_tiny_temperature_does_not_underflow_in_log_space():
    rewards = torch.tensor([[1.0, 0.5, 0.0]])
    close(loss.log_reward_targets(rewards, 1e-4, 0.0), [[0.0, -5e3, -1e4]], 1e-6)
    close(
        loss.log_reward_targets(rewards, 1e-4, 0.01),
        [[math.log(0.98), math.log(0.01), math.log(0.01)]],
        1e-6,
    )
    assert loss.reward_targets(rewards, 1e-40, 0.0).tolist() == [[1.0, 0.0, 0.0]]


def test_adding_a_constant_to_the_rewards_of_a_group_changes_nothing():
    rewards = torch.tensor([[1.0, 0.125, 0.0, 1.0], [0.25, 0.0, 0.0, 0.5]])
    shifted = rewards + torch.tensor([[4096.0], [-3.0]])  # exact in fp32, so the answer can be too
    for T_q, eps in ((0.03, 0.0), (1.0, 0.1), (7.0, 0.25)):
        u, v = (loss.log_reward_targets(r, T_q, eps) for r in (rewards, shifted))
        assert torch.equal(u, v)
        assert torch.equal(
            loss.maxent_weights(u, None, 0.2, 0.0), loss.maxent_weights(v, None, 0.2, 0.0)
        )


# --- weights


@examples
@given(
    st.integers(0, 10_000),
    st.integers(1, 6),
    st.sampled_from([0.01, 0.3, 5.0]),
    st.sampled_from([0.0, 0.02, 1.0, 50.0]),
)
def test_weights_equal_the_closed_form_and_rows_sum_to_one(seed, G, tau, beta):
    u, l = randn(3, G, seed=seed), randn(3, G, seed=seed + 1, scale=3.0)
    w = loss.maxent_weights(u, l, tau, beta)
    slow = [
        slow_softmax([(a + beta * b) / (tau + beta) for a, b in zip(*pair)])
        for pair in zip(u.double().tolist(), l.double().tolist())
    ]
    close(w, slow, 1e-4 if tau == 0.01 else 1e-5)  # exponents up to 500 at the smallest tau + beta
    close(w.sum(1), torch.ones(3), 1e-6)


@examples
@given(st.integers(0, 10_000), st.sampled_from([0.0, 0.3, 2.0]), st.sampled_from([0.05, 0.4]))
def test_weights_maximise_utility_plus_entropy_minus_kl(seed, beta, tau):
    u, l = randn(1, 5, seed=seed).double(), randn(1, 5, seed=seed + 1).double()

    def J(w):
        return (
            (w * u).sum(1)
            + tau * torch.special.entr(w).sum(1)
            - beta * (w * (w.log() - l.log_softmax(1))).sum(1)
        )

    w = loss.maxent_weights(u, l, tau, beta)
    other = (randn(200, 5, seed=seed + 2).double() * 3).softmax(1)
    for share in (1.0, 0.1, 1e-3):  # far away and next to w
        assert (J(w) > J((1 - share) * w + share * other)).all()


def test_tau_inf_gives_uniform_weights_and_wins_over_beta():
    u, l = randn(2, 4), torch.full((2, 4), math.nan)
    for beta in (0.0, 3.0, 1e30):
        assert torch.equal(loss.maxent_weights(u, l, INF, beta), torch.full((2, 4), 0.25))


def test_beta_inf_gives_the_reference_and_both_infinite_is_an_error():
    u, l = randn(2, 4), randn(2, 4, seed=1)
    close(loss.maxent_weights(u, l, 0.5, INF), l.softmax(1))
    close(loss.maxent_weights(u, l, 0.5, 1e7), l.softmax(1), 1e-4)  # and it is the limit
    with pytest.raises(ValueError, match="infinite"):
        loss.maxent_weights(u, l, INF, INF)


def test_tau_plus_beta_zero_is_uniform_over_the_exact_argmax_of_the_rewards():
    rewards = torch.tensor([[0.1, 0.1, 0.0, 0.1], [0.3, 0.3 + 1e-6, 0.0, 0.0], [0.7] * 4])
    for u in (
        rewards,
        loss.log_reward_targets(rewards, 0.5, 0.0),
        loss.log_reward_targets(rewards, 1.0, 0.05),
    ):
        w = loss.maxent_weights(u, torch.full((3, 4), math.nan), 0.0, 0.0)
        close(w, [[1 / 3, 1 / 3, 0, 1 / 3], [0, 1, 0, 0], [0.25] * 4], 1e-7)


@pytest.mark.parametrize("tau", [1e-6, 1e-30, 1e-46, 1e-300])
def test_tiny_tau_is_the_limit_and_not_nan(tau):
    close(
        loss.maxent_weights(torch.tensor([[1.0, 0.0, 1.0]]), None, tau, 0.0), [[0.5, 0, 0.5]], 1e-7
    )


def test_beta_zero_ignores_the_reference_and_beta_without_one_is_an_error():
    u = randn(2, 3)
    for l in (torch.full((2, 3), math.nan), torch.full((2, 3), INF), torch.full((2, 3), -INF)):
        assert torch.equal(
            loss.maxent_weights(u, l, 0.5, 0.0), loss.maxent_weights(u, None, 0.5, 0.0)
        )
    with pytest.raises(ValueError, match=r"beta=0\.1"):
        loss.maxent_weights(u, None, 0.5, 0.1)


@pytest.mark.parametrize("tau, beta", [(0.5, 0.0), (0.5, 0.3), (INF, 0.3), (0.5, INF), (0.0, 0.0)])
def test_weights_are_detached(tau, beta):
    u, l = randn(2, 3).requires_grad_(), randn(2, 3, seed=1).requires_grad_()
    assert not loss.maxent_weights(u, l, tau, beta).requires_grad


def test_active_groups_follow_the_table():
    rewards = torch.tensor([[1.0, 1.0], [0.0, 1.0], [0.1, 0.1], [0.0, 0.0]])
    assert loss.active_groups(rewards, "all").tolist() == [False, True, False, False]
    assert loss.active_groups(rewards, "wrong").tolist() == [True, True, True, False]
    assert loss.active_groups(rewards, "none").tolist() == [True] * 4


def test_weight_metrics_are_means_over_active_groups():
    w, r = (
        torch.tensor([[0.5, 0.25, 0.25], [1.0, 0.0, 0.0], [0.2, 0.3, 0.5]]),
        torch.tensor([[0.5, 1, 0], [1, 1, 0], [0, 0, 0]]),
    )
    H, room = 1.5 * math.log(2), math.log(3) - math.log(2)
    expected = {
        "entropy": H / 2,
        "entropy_norm": H / 2 / math.log(3),
        "effective_rollouts": (math.exp(H) + 1) / 2,
        "max": 0.75,
        "incorrect_mass": 0.375,
        "excess_entropy": (H / math.log(3) - math.log(2) / room) / 2,
    }  # one row at the top, then two: below 0 if w is on one of them
    metrics = loss.weight_metrics(w, r, torch.tensor([True, True, False]))
    assert metrics == {f"weights/{k}": pytest.approx(v, rel=1e-6) for k, v in expected.items()}
    whole = loss.weight_metrics(
        w, r, torch.tensor([True, True, True])
    )  # with one that has no row below its best
    assert (
        whole["weights/incorrect_mass"] == metrics["weights/incorrect_mass"]
        and whole["weights/entropy"] != metrics["weights/entropy"]
    )
    assert loss.weight_metrics(w, r, torch.zeros(3, dtype=torch.bool)) == {}


def excess_entropy(w, r):
    return loss.weight_metrics(w, r, torch.ones(len(r), dtype=torch.bool)).get(
        "weights/excess_entropy"
    )


@examples
@given(pairs, st.integers(0, 10_000))
def test_excess_entropy_equals_the_slow_loop(rewards, seed):
    w, found = randn(*rewards.shape, seed=seed).softmax(1), []
    for r, v in zip(rewards.tolist(), w.double().tolist()):
        top = r.count(max(r))
        if top < len(r):  # where all rows are best there is no room above ln n_top
            found.append(
                (-sum(x * math.log(x) for x in v) - math.log(top))
                / (math.log(len(r)) - math.log(top))
            )
    assert excess_entropy(w, rewards) == (
        pytest.approx(sum(found) / len(found), abs=1e-5) if found else None
    )


def test_excess_entropy_is_0_with_equally_likely_best_rows_and_1_with_uniform_weights():
    r = torch.tensor([[1.0, 1, 0, 0.5], [0.1, 0, 0, 0]])
    only_best = loss.maxent_weights(r, None, 0.0, 0.0)
    assert excess_entropy(only_best, r) == pytest.approx(0, abs=1e-6)
    assert excess_entropy(torch.full((2, 4), 0.25), r) == pytest.approx(1, abs=1e-6)


def test_excess_entropy_leaves_out_groups_with_all_rows_at_the_best_reward():
    r, w = torch.tensor([[1.0, 0, 0], [0.1] * 3]), torch.tensor([[0.6, 0.2, 0.2], [0.9, 0.1, 0.0]])
    assert excess_entropy(w, r) == pytest.approx(excess_entropy(w[:1], r[:1]), rel=1e-6)
    assert excess_entropy(w[1:], r[1:]) is None


# --- utilities of the other objectives


@examples
@given(pairs, st.integers(0, 10_000), st.sampled_from([1, 3, 1000]))
def test_the_entropy_bonus_equals_the_slow_loop_and_is_exactly_zero_in_flat_groups(
    rewards, seed, kinds
):
    """`kinds` of entropies: with few of them there are ties, with 1 all are equal."""
    entropies = (
        torch.randint(kinds, rewards.shape, generator=torch.Generator().manual_seed(seed)) / 7 + 0.1
    )
    bonus = loss.entropy_bonus(rewards, entropies, 0.4)
    close(
        bonus,
        [
            slow_bonus(r, h, 0.4)
            for r, h in zip(rewards.double().tolist(), entropies.double().tolist())
        ],
    )
    flat = [
        len(set(r)) == 1 or len(set(h)) == 1 for r, h in zip(rewards.tolist(), entropies.tolist())
    ]
    assert (bonus[flat] == 0).all()
    assert torch.equal(loss.entropy_bonus(rewards, entropies, 0.0), torch.zeros_like(rewards))


def test_the_entropy_bonus_is_coef_times_the_std_of_the_rewards_at_one_std_of_entropy():
    rewards, entropies = torch.tensor([[0.0, 3, 0, 3]]), torch.tensor([[1.0, 1, 2, 2]])
    one = rewards.std(1).item() * 0.5 / entropies.std(1).item()
    close(loss.entropy_bonus(rewards, entropies, 0.2), [[-0.2 * one] * 2 + [0.2 * one] * 2])
    assert torch.full((7,), 0.1).std() > 0  # in fp32, and yet the bonus of equal rewards is
    assert (loss.entropy_bonus(torch.full((1, 7), 0.1), torch.arange(7.0)[None], 1.0) == 0).all()
    close(
        loss.entropy_bonus(rewards, 100 * entropies + 7, 0.2),
        loss.entropy_bonus(rewards, entropies, 0.2),
    )


def test_surrogate_utility_is_the_advantage_of_rows_of_full_length_and_less_of_shorter_ones():
    A = randn(2, 3)
    assert torch.equal(loss.xdr_utilities(A, torch.full((2, 3), float(L)), "surrogate", L), A)
    assert torch.equal(loss.xdr_utilities(A, torch.full((2, 3), 2.0), "advantage", L), A)
    close(
        loss.xdr_utilities(A, torch.tensor([[1.0, 2, 4], [8, 6, 3]]), "surrogate", L),
        A * torch.tensor([[0.125, 0.25, 0.5], [1, 0.75, 0.375]]),
    )


def test_mode_adaptive_tau_is_tau_up_to_one_mode_and_falls_with_more():
    taus = loss.mode_adaptive_tau(0.3, torch.tensor([0.0, 1, 2, 3, 7]))
    assert taus[:2] == [0.3, 0.3] and taus[2] > taus[3] > taus[4]
    assert taus[3] == pytest.approx(0.15) and taus[4] == pytest.approx(
        0.1
    )  # log 4 and log 8 in units of log 2
    assert loss.mode_adaptive_tau(INF, torch.tensor([5.0])) == [INF]


def test_semantic_entropy_is_0_with_one_answer_and_ln_G_with_all_different_and_equally_likely():
    one, different = torch.zeros(1, 4), torch.tensor([[3.0, 1, 0, 2]])
    assert loss.semantic_entropy(one, randn(1, 4)).item() == pytest.approx(0, abs=1e-6)
    assert loss.semantic_entropy(different, torch.full((1, 4), -1.7)).item() == pytest.approx(
        math.log(4)
    )
    pairs = loss.semantic_entropy(torch.tensor([[0.0, 1, 0, 1]]), torch.full((1, 4), -1.7))
    assert pairs.item() == pytest.approx(math.log(2))


def test_semantic_entropy_of_a_row_that_is_impossible_next_to_the_others_is_not_nan():
    """exp(-120) is 0 in fp32, and 0 * log 0 would be NaN: in H_sem, so in every advantage of the group."""
    assert loss.semantic_entropy(
        torch.tensor([[0.0, 1, 2]]), torch.tensor([[-0.1, -0.1, -120.0]])
    ).item() == pytest.approx(math.log(2))


@examples
@given(st.integers(0, 10_000), st.integers(2, 6), st.integers(1, 6))
def test_semantic_entropy_equals_the_slow_loop(seed, G, answers):
    clusters, mean_logps = (
        torch.randint(answers, (2, G), generator=torch.Generator().manual_seed(seed)),
        randn(2, G, seed=seed),
    )
    slow = [
        slow_semantic_entropy(*pair)
        for pair in zip(clusters.tolist(), mean_logps.double().tolist())
    ]
    H = loss.semantic_entropy(clusters, mean_logps)
    torch.testing.assert_close(
        H.double(), torch.tensor(slow, dtype=torch.float64), rtol=0, atol=1e-6
    )
    scale = loss.semantic_scale(H, 0.7, G)
    close(scale[:, 0], [1 / (1 + 0.7 / math.log(G) * h) for h in slow])
    assert (
        (scale <= 1.00001) & (scale > 1 / 1.70001)
    ).all()  # 1 / (1 + alpha) at most differing answers


# --- losses


def test_sequence_scores_divide_by_length_or_constant_or_nothing():
    logps, lengths = torch.tensor([[-1.0, -2.0, -3.0], [-4.0, 0.0, 0.0]]), torch.tensor([3, 1])
    for norm, expected in (("length", [-2, -4]), ("constant", [-0.75, -0.5]), ("sum", [-6, -4])):
        close(loss.sequence_scores(logps, lengths, norm, L), expected)


@examples
@given(
    st.integers(0, 10_000),
    st.lists(st.booleans(), min_size=4, max_size=4),
    st.sampled_from([None, 10.0]),
)
def test_listwise_gradient_is_p_minus_w_and_exactly_zero_in_inactive_groups(seed, active, norm):
    s, w, active = (
        randn(4, 5, seed=seed, scale=4.0),
        randn(4, 5, seed=seed + 1).softmax(1),
        torch.tensor(active),
    )
    value, grad = value_and_grad(loss.listwise_loss, s, w, active, norm)
    divisor = norm or max(1, sum(active.tolist()))
    close(grad, (s.softmax(1) - w) * active[:, None] / divisor)
    assert (grad[~active] == 0).all()
    slow = 0.0
    for x in range(4):
        p = slow_softmax(s[x].double().tolist())
        slow -= sum(w[x, i].item() * math.log(p[i]) for i in range(5)) * active[x].item() / divisor
    close(value, slow)


def test_listwise_gradient_vanishes_where_the_policy_matches_the_weights():
    s = randn(3, 6, scale=3.0)
    _, grad = value_and_grad(loss.listwise_loss, s, s.softmax(1), torch.ones(3, dtype=torch.bool))
    assert grad.abs().max() < 1e-7


@examples
@given(groups, st.integers(0, 10_000))
def test_mode_entropy_equals_the_slow_loop_and_pulls_correct_rows_to_equal_likelihood(
    rewards, seed
):
    P, G = rewards.shape
    S = randn(P, G, seed=seed, scale=5.0) - 20
    value, grad = value_and_grad(loss.mode_entropy_loss, S, rewards, P * L)
    slow, slow_grad = 0.0, torch.zeros(P, G)
    for x in range(P):
        r, s = rewards[x].tolist(), S[x].double().tolist()
        C = [i for i in range(G) if r[i] == max(r) and max(r) != min(r)]
        if len(C) >= 2:
            p = slow_softmax([s[i] for i in C])
            slow -= sum(math.log(v) for v in p) / len(C) / (P * L)
            slow_grad[x, C] = torch.tensor([(v - 1 / len(C)) / (P * L) for v in p])
    close(value, slow)
    close(grad, slow_grad, 1e-4)  # fp32 of p at scores near 20
    assert (
        grad[slow_grad == 0] == 0
    ).all()  # wrong rows, single correct rows, all-equal groups: exactly 0


def test_mode_entropy_gradient_vanishes_at_equal_likelihood_and_in_all_equal_groups():
    S = torch.tensor([[-3.0, -3.0, -9.0, -3.0], [-1.0, -2.0, -3.0, -4.0]])
    value, grad = value_and_grad(
        loss.mode_entropy_loss, S, torch.tensor([[1.0, 1, 0, 1], [0.1] * 4]), 2 * L
    )
    close(value, math.log(3) / (2 * L), 1e-6)
    assert grad.abs().max() < 1e-8


@pytest.mark.parametrize(
    "A, log_ratio, delta, value, slope, low, high",
    [
        (+2, +0.5, -1, 2 * 1.28, 0, False, True),  # good enough: stop pushing up
        (
            +2,
            -0.5,
            -1,
            2 * math.exp(-0.5),
            2 * math.exp(-0.5),
            False,
            False,
        ),  # a good token that fell: full pull
        (-2, -0.5, -1, -2 * 0.8, 0, True, False),  # low enough: stop pushing down
        (
            -2,
            +0.5,
            -1,
            -2 * math.exp(0.5),
            -2 * math.exp(0.5),
            False,
            False,
        ),  # a bad token that rose: full push, unbounded
        (-2, +0.5, 1.4, -2 * 1.4, 0, False, False),  # unless delta caps it
        (-2, +0.3, 1.4, -2 * math.exp(0.3), -2 * math.exp(0.3), False, False),
        (+2, +0.5, 1.4, 2 * 1.28, 0, False, True),
        (+2, -0.5, 1.4, 2 * math.exp(-0.5), 2 * math.exp(-0.5), False, False),
        (-2, -0.5, 1.4, -2 * 0.8, 0, True, False),
        (+2, +0.5, 1.28, 2 * 1.28, 0, False, True),  # the cap does not hide a clipped token
        (0, +9.0, -1, 0, 0, False, False),
        (+2, +0.1, -1, 2 * math.exp(0.1), 2 * math.exp(0.1), False, False),
    ],
)
def test_surrogate_is_ppos_minimum_for_both_signs_with_delta_on_the_unclipped_branch(
    A, log_ratio, delta, value, slope, low, high
):
    d = torch.full((1, 1), log_ratio, requires_grad=True)
    surrogate, is_low, is_high = loss.clipped_surrogate(
        d, torch.tensor([float(A)]), LOW, HIGH, delta
    )
    close(surrogate, [[value]])
    close(torch.autograd.grad(surrogate.sum(), d)[0], [[slope]])
    assert (is_low.item(), is_high.item()) == (low, high)


@pytest.mark.parametrize("low, high", [(LOW, HIGH), (0.0, 0.0)])
def test_with_old_equal_to_new_the_gradient_is_reinforce(low, high):
    A = torch.tensor([1.5, -0.3, 0.0])
    _, grad = value_and_grad(
        lambda x: loss.clipped_surrogate(x - x.detach(), A, low, high)[0].sum(),
        randn(3, 4, scale=3.0),
    )
    close(grad, A[:, None].expand(3, 4), 1e-6)


@pytest.mark.parametrize("A", [1.0, 0.0])
def test_a_token_whose_ratio_overflows_is_clipped_and_not_nan(A):
    d = torch.tensor([[100.0, -200.0]])  # exp(100) is inf in fp32
    value, grad = value_and_grad(
        lambda x: loss.clipped_surrogate(x, torch.tensor([A]), LOW, HIGH)[0].sum(), d
    )
    assert value.item() == pytest.approx(A * (1 + HIGH)) and grad.tolist() == [[0.0, 0.0]]


def cispo(log_ratio, A):
    """(gradient by the log-prob, clipped below, clipped above) of one token under cispo with cap 3, and under PPO's clip."""
    logp, old, A = (
        torch.tensor([[-1.0]], requires_grad=True),
        torch.tensor([[-1.0 - log_ratio]]),
        torch.tensor([A]),
    )
    for f in (
        lambda: loss.cispo_surrogate(logp, logp - old, A, 3.0),
        lambda: loss.clipped_surrogate(logp - old, A, LOW, HIGH),
    ):
        gain, low, high = f()
        yield torch.autograd.grad(gain.sum(), logp)[0].item(), low.item(), high.item()


def test_cispo_keeps_the_gradient_of_tokens_above_its_cap_where_ppo_has_none():
    mine, ppo = cispo(log_ratio=2.0, A=1.5)
    assert mine == (pytest.approx(3 * 1.5), False, True) and ppo == (0.0, False, True)


def test_cispo_has_no_lower_clip():
    mine, ppo = cispo(log_ratio=-4.0, A=-1.5)
    assert mine == (pytest.approx(-1.5 * math.exp(-4)), False, False) and ppo == (0.0, True, False)


def test_cispo_caps_ratios_of_bad_tokens_too_without_counting_them_as_clipped():
    assert next(cispo(log_ratio=2.0, A=-1.5)) == (pytest.approx(-3 * 1.5), False, False)


def test_cispo_does_not_differentiate_the_ratio():
    logps, d, A = randn(2, 3), randn(2, 3, seed=1).requires_grad_(), torch.tensor([1.0, -2.0])
    assert not loss.cispo_surrogate(logps, d, A, 3.0)[0].requires_grad
    _, grad = value_and_grad(
        lambda x: loss.cispo_surrogate(x, x - (logps - d.detach()), A, 3.0)[0].sum(), logps
    )
    close(grad, d.detach().exp().clamp(max=3) * A[:, None])


def test_a_token_whose_cispo_ratio_overflows_is_capped_and_not_nan():
    gain, _, _ = loss.cispo_surrogate(
        torch.tensor([[-1.0, -1.0]]), torch.tensor([[100.0, -200.0]]), torch.tensor([0.0]), 3.0
    )
    assert (gain == 0).all()  # 0 and not NaN


@examples
@given(st.lists(st.integers(1, 5), min_size=1, max_size=6), st.integers(0, 3))
def test_token_weights_give_every_row_its_share_of_the_loss(lengths, pad):
    T = torch.tensor(lengths)
    mask = (torch.arange(5 + pad) < T[:, None]).float()
    n, tokens = len(T), sum(lengths)
    for kind, share in (
        ("row_mean", torch.ones(n) / n),
        ("token_mean", T / tokens),
        ("constant", T / (n * L)),
    ):
        weights = loss.token_weights(kind, mask, n, tokens, L)
        close(weights.sum(1), share, 1e-6)
        close(weights, mask * (share / T)[:, None], 1e-6)
    first = loss.token_weights(
        "row_mean", mask[:1], n, tokens, L
    )  # one row of a larger step keeps its share
    close(first, loss.token_weights("row_mean", mask, n, tokens, L)[:1], 1e-7)


def test_k3_is_the_formula_never_negative_and_clamped():
    logps, ref = randn(50), randn(50, seed=1)
    close(
        loss.k3_kl(logps, ref),
        [math.exp(-d) + d - 1 for d in (logps.double() - ref.double()).tolist()],
    )
    assert (loss.k3_kl(logps, ref) >= 0).all() and loss.k3_kl(logps, logps).abs().max() == 0
    close(
        loss.k3_kl(torch.tensor([0.0, -500.0]), torch.tensor([-500.0, 0.0])),
        [19.0, math.exp(20) - 21],
    )


def test_k3_averages_to_the_kl_from_policy_to_reference_under_the_policy():
    p, q = randn(6).double().log_softmax(0), randn(6, seed=1).double().log_softmax(0)
    close((p.exp() * loss.k3_kl(p, q)).sum(), (p.exp() * (p - q)).sum(), 1e-9)


def test_k2_is_half_the_square_and_clamped():
    logps, ref = randn(50), randn(50, seed=1)
    close(loss.k2_kl(logps, ref), [d**2 / 2 for d in (logps.double() - ref.double()).tolist()])
    assert loss.k2_kl(torch.tensor([0.0, -500.0]), torch.tensor([-500.0, 0.0])).tolist() == [
        200.0,
        200.0,
    ]


@pytest.mark.parametrize(
    "estimator, kl",
    [("k2_kl", lambda p, q: p.exp() * (p - q)), ("k3_kl", lambda p, q: q.exp() * (q - p))],
    ids=["k2-reverse", "k3-forward"],
)
@examples
@given(st.integers(0, 10_000))
def test_the_expected_gradient_of_k2_is_the_reverse_kls_and_of_k3_the_forward_kls(
    estimator, kl, seed
):
    """Over all 5 outcomes of a categorical policy, each sampled with its probability: as a loss sees it, samples held fixed."""
    logits, q = randn(5, seed=seed).double(), randn(5, seed=seed + 1).double().log_softmax(0)
    p = logits.softmax(0)
    _, expected = value_and_grad(
        lambda x: (p * getattr(loss, estimator)(x.log_softmax(0), q)).sum(), logits
    )
    close(expected, value_and_grad(lambda x: kl(x.log_softmax(0), q).sum(), logits)[1], 1e-9)


@pytest.mark.parametrize(
    "kind, expected",
    [
        ("token_truncate", [[1, math.exp(-0.5), 3, 3], [math.exp(0.25)] * 3 + [1]]),
        ("token_mask", [[1, math.exp(-0.5), 0, 0], [math.exp(0.25)] * 3 + [1]]),
        ("sequence_truncate", [[3], [math.exp(0.75)]]),
        ("sequence_mask", [[0], [math.exp(0.75)]]),
        ("sequence_geometric", [[3], [math.exp(0.25)]]),
        ("none", [[1] * 4] * 2),
    ],
)
def test_importance_ratio_truncates_or_masks_or_is_off_and_carries_no_gradient(kind, expected):
    old = torch.tensor([[0.0, -1, -1, 0], [-1, -1, -1, 0]], requires_grad=True)
    sampler = torch.tensor([[0.0, -0.5, -3, -500], [-1.25, -1.25, -1.25, 0]])
    ratio = loss.importance_ratio(old, sampler, torch.tensor([4, 3]), kind, 3.0)
    close(ratio, torch.tensor(expected, dtype=torch.float64), 1e-6)
    assert not ratio.requires_grad


def test_a_masked_ratio_at_the_cap_counts_in_full():
    old, sampler, lengths = (
        torch.zeros(1, 2),
        torch.full((1, 2), -math.log(2.0) / 2),
        torch.tensor([2]),
    )
    ratio = loss.importance_ratio(old, sampler, lengths, "sequence_truncate", INF).item()
    assert (
        ratio == pytest.approx(2)
        and loss.importance_ratio(old, sampler, lengths, "sequence_mask", ratio).item() == ratio
    )


@pytest.mark.parametrize("how", ["truncate", "mask"])
def test_the_sequence_ratio_of_one_token_rows_is_the_token_ratio(how):
    old, sampler, ones = randn(20, 1), randn(20, 1, seed=1), torch.ones(20)
    token, sequence = (
        loss.importance_ratio(old, sampler, ones, f"{level}_{how}", CAP)
        for level in ("token", "sequence")
    )
    assert (
        torch.equal(token, sequence)
        and (token == {"truncate": CAP, "mask": 0}[how]).any()
        and (token < 1).any()
    )


def test_the_geometric_ratio_of_equal_tokens_is_the_token_ratio_however_long_the_row():
    lengths, per_row = torch.tensor([5, 2, 1, 4]), torch.tensor([[0.3], [-0.7], [9.0], [0.1]])
    sampler = -per_row * completion_mask(lengths)
    ratio = loss.importance_ratio(torch.zeros(4, 5), sampler, lengths, "sequence_geometric", CAP)
    close(
        ratio,
        loss.importance_ratio(torch.zeros(4, 5), sampler, lengths, "token_truncate", CAP)[:, :1],
    )
    assert ratio[2] == CAP


# --- whole objectives

TILTED = dict(objective="xdr", beta=0.3, xdr_ref_tilt=True)
EVERY_XDR = TILTED | dict(xdr_utility="surrogate", xdr_mode_adaptive_tau=True)
CASES = [
    *(
        dict(objective=name)
        for name in (
            "grpo",
            "dapo",
            "dr_grpo",
            "gspo",
            "cispo",
            "seed_grpo",
            "token_entropy",
            "xdr",
            "maxent",
            "maxrl",
            "pkpo",
            "flow",
        )
    ),
    dict(objective="maxrl", beta=0.3, delta=1.4),
    dict(objective="grpo", scale_rewards="mean"),
    *(dict(objective="pkpo", pkpo_k=k) for k in (1, 2, 3)),
    dict(objective="pkpo", beta=0.3, policy_entropy_bonus_coef=0.4),
    dict(objective="flow", beta=0.3, maxent_q_epsilon=0.02),
    dict(objective="flow", maxent_score_norm="sum", maxent_tau=3.0, maxent_score_scale=0.5),
    dict(objective="flow", maxent_score_norm="constant", beta=0.3, maxent_kl=True),
    dict(objective="flow", maxent_tau=INF, maxent_skip_equal_groups="none"),
    dict(objective="flow", maxent_group_weight="spread"),
    dict(objective="maxent", maxent_group_weight="spread", beta=0.3),
    dict(objective="maxent", maxent_group_weight="spread", maxent_loss="policy_gradient"),
    dict(objective="maxent", maxent_group_weight="spread", maxent_loss="mle"),
    dict(objective="maxent", maxent_score_scale=4.0, beta=0.3, maxent_tau=0.1),
    dict(objective="maxent", maxent_score_scale=2.0, unlikeliness_coef=0.5),
    dict(objective="dr_grpo", unlikeliness_coef=0.25),
    dict(objective="grpo", unlikeliness_coef=0.25, policy_entropy_bonus_coef=0.4),
    dict(objective="grpo", beta=0.3, delta=1.4),
    dict(objective="grpo", importance_sampling="sequence_truncate", scale_rewards="batch"),
    dict(objective="dapo", beta=0.3),
    dict(objective="dapo", importance_sampling="token_mask"),
    dict(objective="dapo", importance_sampling="sequence_geometric", delta=1.4),
    dict(objective="dr_grpo", beta=0.3, importance_sampling="none"),
    dict(objective="dr_grpo", beta=0.3, kl_loss_type="k2", importance_sampling="sequence_mask"),
    dict(objective="gspo", beta=0.3, delta=1.4),
    dict(objective="gspo", importance_sampling="sequence_truncate"),
    dict(objective="gspo", importance_sampling="sequence_mask", beta=0.3, kl_loss_type="k2"),
    dict(objective="cispo", beta=0.3, kl_loss_type="k2"),
    dict(objective="cispo", importance_sampling="token_mask"),
    dict(objective="cispo", importance_sampling="sequence_truncate"),
    dict(objective="seed_grpo", beta=0.3, scale_rewards="group"),
    dict(objective="token_entropy", beta=0.3, delta=1.4),
    dict(objective="xdr", beta=0.3),
    dict(objective="xdr", maxent_tau=0.1, delta=1.4),
    dict(objective="xdr", maxent_tau=0.0),
    dict(objective="xdr", maxent_tau=INF, beta=0.3),
    dict(objective="xdr", xdr_utility="surrogate"),
    dict(objective="xdr", xdr_mode_adaptive_tau=True, beta=0.3, kl_loss_type="k2"),
    TILTED,
    TILTED | dict(maxent_tau=0.0, maxent_score_norm="sum"),
    EVERY_XDR,
    EVERY_XDR
    | dict(
        maxent_score_norm="constant",
        scale_rewards="group",
        importance_sampling="sequence_mask",
        mode_entropy_coef=0.3,
    ),
    dict(objective="dr_grpo", policy_entropy_bonus_coef=0.4),
    dict(objective="grpo", policy_entropy_bonus_coef=0.4, beta=0.3),
    dict(objective="xdr", policy_entropy_bonus_coef=0.4),
    dict(objective="maxent", policy_entropy_bonus_coef=0.4, maxent_skip_equal_groups="none"),
    dict(objective="dr_grpo", mode_entropy_coef=0.3),
    dict(objective="grpo", mode_entropy_coef=0.3, mode_entropy_score_norm="length", beta=0.3),
    dict(objective="gspo", mode_entropy_coef=0.3, mode_entropy_score_norm="constant"),
    dict(objective="token_entropy", mode_entropy_coef=0.3, policy_entropy_bonus_coef=0.4),
    dict(objective="maxent", beta=0.3, maxent_q_epsilon=0.02),
    dict(objective="maxent", maxent_score_norm="constant", beta=0.3, maxent_tau=0.0),
    dict(
        objective="maxent",
        maxent_score_norm="sum",
        beta=0.3,
        maxent_tau=3.0,
        maxent_skip_equal_groups="wrong",
    ),
    dict(objective="maxent", beta=0.3, maxent_kl=True),
    dict(
        objective="maxent",
        beta=0.3,
        maxent_kl=True,
        kl_loss_type="k2",
        maxent_skip_equal_groups="none",
    ),
    dict(objective="maxent", maxent_loss="mle"),
    dict(
        objective="maxent",
        maxent_loss="mle",
        maxent_score_norm="sum",
        beta=0.3,
        maxent_skip_equal_groups="none",
    ),
    dict(objective="maxent", maxent_loss="policy_gradient"),
    dict(
        objective="maxent",
        maxent_loss="policy_gradient",
        beta=0.3,
        maxent_kl=True,
        delta=1.4,
        importance_sampling="sequence_truncate",
    ),
]
OBJECTIVES = tuple(checks.OBJECTIVES)


def name_of(case):
    return "-".join(
        str(value if isinstance(value, str) else f"{key}={value}") for key, value in case.items()
    )


cases = pytest.mark.parametrize("case", CASES, ids=name_of)


def sensible(step, case):
    """The config refuses groups of one; only these two would notice, which divide by log G and by a std."""
    return step.G > 1 or (
        case["objective"] != "seed_grpo" and "policy_entropy_bonus_coef" not in case
    )


def test_the_cases_cover_every_objective_and_choice():
    assert set(OBJECTIVES) == set(TABLE)
    for key in (
        "importance_sampling",
        "kl_loss_type",
        "maxent_score_norm",
        "mode_entropy_score_norm",
        "maxent_loss",
        "xdr_utility",
        "maxent_skip_equal_groups",
        "maxent_group_weight",
    ):
        assert {config(4, case)[key] for case in CASES} == set(checks.CHOICES[key]), key


@cases
@settings(examples, max_examples=10)
@given(steps())
def test_the_loss_of_a_step_equals_the_slow_loop(case, step):
    assume(sensible(step, case))
    compare(step, case)


@settings(examples, max_examples=40)
@given(
    steps(),
    st.sampled_from(NORMS),
    st.sampled_from([(0.2, 0.0, 0.0), (0.5, 0.3, 0.02), (0.0, 1.0, 0.0), (3.0, 0.0, 0.1)]),
)
def test_maxent_equals_the_slow_loop(step, norm, target):
    tau, beta, eps = target
    compare(
        step,
        dict(
            objective="maxent",
            maxent_tau=tau,
            beta=beta,
            maxent_q_epsilon=eps,
            maxent_score_norm=norm,
        ),
    )


SMALL = make_step(torch.tensor([[1.0, 0, 1], [0, 0.1, 0.1]]), [3, 1, 2, 3, 2, 1], 5)


@pytest.mark.parametrize(
    "case", [case for case in CASES if case["objective"] != "cispo"], ids=name_of
)
def test_gradients_are_those_of_finite_differences(case):
    """All but cispo: its detached ratio is not the derivative of anything."""
    step = changed(
        SMALL,
        **{
            key: value.double()
            for key, value in vars(SMALL).items()
            if torch.is_tensor(value) and value.is_floating_point()
        },
    )
    leaves = [x.clone().requires_grad_() for x in (step.logps, step.entropy)]
    c = config(step.G, case)
    assert torch.autograd.gradcheck(lambda *x: step_loss(*x, step, c)[0], leaves, atol=1e-6)


@cases
@settings(examples, max_examples=8)
@given(steps(), st.data())
def test_any_order_split_and_padding_of_the_rows_gives_the_same_loss_and_gradient(case, step, data):
    """Through learner.accumulate_gradients; a plan that cuts groups makes it take a scoring pass and row coefficients."""
    assume(sensible(step, case))
    N = step.P * step.G
    order, cuts = (
        data.draw(st.permutations(range(N))),
        data.draw(st.lists(st.integers(0, N), max_size=4)),
    )
    plan = [torch.tensor(order[a:b]) for a, b in itertools.pairwise([0, *sorted(cuts), N]) if a < b]
    assert_same(accumulate(step, case, plan, pad=data.draw(st.integers(0, 2))), ours(step, case))


@pytest.mark.parametrize("budget", [1, 13, 30])  # rows alone; some groups cut; whole groups
@cases
def test_any_token_budget_gives_the_same_loss_and_gradient(case, budget):
    assert_same(accumulate(EXAMPLE, case, budget=budget), ours(EXAMPLE, case))


@cases
def test_the_first_update_takes_its_own_log_probs_as_the_old_ones(case):
    assert_same(
        accumulate(EXAMPLE, case, first=True), ours(changed(EXAMPLE, old=EXAMPLE.logps), case)
    )


def test_whole_groups_in_micro_batches_add_up_under_one_norm():
    step, s, w = EXAMPLE, scores(EXAMPLE.logps, EXAMPLE, "length"), randn(3, 4).softmax(1)
    active = loss.active_groups(step.rewards, "all")  # two of the three
    for f in (loss.listwise_loss, loss.mle_loss):
        close(
            sum(f(s[x : x + 1], w[x : x + 1], active[x : x + 1], 2) for x in range(3)),
            f(s, w, active, 2),
        )
    close(loss.listwise_loss(s, w, active), loss.listwise_loss(s, w, active, 2))
    parts = [loss.mode_entropy_loss(s[x : x + 1], step.rewards[x : x + 1], 3 * L) for x in range(3)]
    close(sum(parts), loss.mode_entropy_loss(s, step.rewards, 3 * L))


# --- limits


@pytest.mark.parametrize("G", [1, 2, 7, 41])  # float(1/41) * 41 is not 1 in fp32
def test_equal_rewards_give_exactly_zero_gradient(G):
    step = make_step(torch.tensor([[0.1] * G, [1 / 3] * G]), [1 + i % 5 for i in range(2 * G)], 3)
    kept = [
        case
        for case in CASES
        if sensible(step, case)
        and not {"maxent_skip_equal_groups", "unlikeliness_coef"} & set(case)
    ]
    flat = dict(
        objective="maxent", maxent_loss="policy_gradient", maxent_skip_equal_groups="none"
    )  # w - 1/G is 0 where nothing tilts it
    for case in [*kept, flat]:
        found = ours(
            step,
            case
            | {"token_entropy_coef": 0.0}
            | ({} if "xdr_ref_tilt" in case else {"beta": 0.0, "maxent_kl": False}),
        )
        assert found.value == 0 and (found.grad == 0).all(), case


@pytest.mark.parametrize(
    "case",
    [
        *(dict(objective=name) for name in OBJECTIVES),
        dict(objective="maxent", maxent_loss="policy_gradient"),
    ],
    ids=name_of,
)
def test_every_objective_raises_the_best_rows_and_lowers_the_worst(case):
    step = make_step(torch.tensor([[1.0, 0, 0, 0], [0, 0, 0, 1]]), [3] * 8, 1)
    grad = ours(changed(step, logps=step.old), case | {"maxent_tau": 0.2}).grad[0]
    best = (step.rewards == 1).flatten()
    best, worst = grad[best][step.mask[best]], grad[~best][step.mask[~best]]
    assert (best < 0).all()
    # the leave-one-out of pass@k leaves wrong rows alone
    assert (worst == 0).all() if case["objective"] == "pkpo" else (worst > 0).all()


@pytest.mark.parametrize(
    "more", [{}, dict(beta=0.3, delta=1.4), dict(importance_sampling="sequence_mask")], ids=str
)
def test_gspo_with_one_token_rows_is_grpo(more):
    step = make_step(EXAMPLE.rewards, [1] * 12, 7)
    gspo, grpo = (ours(step, dict(objective=name) | more) for name in ("gspo", "grpo"))
    assert_same(gspo, grpo)
    assert gspo.high > 0


def test_gspo_takes_the_geometric_mean_of_the_token_ratios():
    ratios, A = (
        torch.tensor([[0.7, 1.1, 1.2], [1.5, 0.8, 1.0]]),
        torch.tensor([2.0, -1.0]),
    )  # the second row has two tokens
    part = {"old_logps": torch.zeros(2, 3), "lengths": torch.tensor([3, 2]), "advantages": A}
    gain, low, high = learner.surrogate(ratios.log(), part, config(2, dict(objective="gspo")))
    close(gain, [[2 * (0.7 * 1.1 * 1.2) ** (1 / 3)], [-((1.5 * 0.8) ** 0.5)]])
    assert not low.any() and not high.any()  # though every row has a token outside the clip range


def test_gspo_clips_whole_rows():
    step = make_step(torch.tensor([[1.0, 0, 0]]), [3, 2, 2], 3)
    step.old = (
        step.logps - torch.tensor([[0.5], [-0.5], [0.0]]) * step.mask
    )  # the good row rose, one bad row fell
    found = ours(step, dict(objective="gspo", importance_sampling="none"))
    assert (
        (found.grad[0, :2] == 0).all()
        and (found.grad[0, 2, :2] > 0).all()
        and (found.low, found.high) == (2, 3)
    )


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_cispo_on_policy_has_the_gradient_of_dapo_which_is_reinforce(sampling):
    step = changed(EXAMPLE, logps=EXAMPLE.old)
    cispo, dapo = (
        ours(step, dict(objective=name, importance_sampling=sampling)) for name in ("cispo", "dapo")
    )
    close(cispo.grad, dapo.grad)
    if sampling == "none":
        close(
            cispo.grad[0],
            -loss.group_advantages(step.rewards, "group").view(-1, 1)
            * step.mask
            / step.lengths.sum(),
        )


def test_cispo_below_its_cap_has_the_gradient_of_an_unclipped_ratio():
    cispo, dapo = (
        ours(EXAMPLE, dict(objective=name, cispo_epsilon_max=50.0, epsilon=0.99, epsilon_high=49.0))
        for name in ("cispo", "dapo")
    )
    close(cispo.grad, dapo.grad)
    assert (
        cispo.high == dapo.high == dapo.low == 0
        and EXAMPLE.old.sub(EXAMPLE.logps).abs().max() > 0.5
    )


@pytest.mark.parametrize("how", ["truncate", "mask"])
@pytest.mark.parametrize("objective", ["grpo", "dr_grpo", "gspo", "cispo"])
def test_sequence_and_token_sampling_weights_agree_on_one_token_rows(objective, how):
    step = make_step(EXAMPLE.rewards, [1] * 12, 7)
    token, sequence, off = (
        ours(step, dict(objective=objective, importance_sampling=kind))
        for kind in (f"token_{how}", f"sequence_{how}", "none")
    )
    assert same_to_the_bit(token, sequence) and not same_to_the_bit(token, off)


@pytest.mark.parametrize(
    "case, without",
    [
        (dict(objective="seed_grpo", seed_grpo_alpha=0.0), {}),
        (dict(objective="token_entropy", token_entropy_coef=0.0), {}),
        (dict(objective="xdr"), {}),
        (dict(objective="xdr", xdr_utility="surrogate"), {}),
        (dict(objective="xdr", xdr_mode_adaptive_tau=True), {}),
        (TILTED, {"beta": 0.0}),
        (EVERY_XDR, {"beta": 0.0}),
    ],
    ids=lambda case: name_of(case) or "same",
)
@pytest.mark.parametrize(
    "more",
    [
        {},
        dict(beta=0.3),
        dict(
            delta=1.4, policy_entropy_bonus_coef=0.4, mode_entropy_coef=0.3, scale_rewards="group"
        ),
    ],
    ids=str,
)
@pytest.mark.parametrize("G", [6, 41])  # at 41, G * uniform weights would not be exactly 1
def test_switched_off_objectives_are_dr_grpo_to_the_bit(case, without, more, G):
    """`without`: what dr_grpo must not have for that, the KL that a tilt takes out of the loss."""
    step = make_step(randn(2, G), [1 + 7 * i % 5 for i in range(2 * G)], seed=5)
    assert same_to_the_bit(
        ours(step, case | more | {"maxent_tau": INF}),
        ours(step, more | {"objective": "dr_grpo"} | without),
    )
    on = {"maxent_tau": 0.3, "seed_grpo_alpha": 0.5, "token_entropy_coef": 0.5}
    assert not same_to_the_bit(
        ours(step, case | more | on), ours(step, more | {"objective": "dr_grpo"} | without)
    )


@pytest.mark.parametrize("modes, same", [(0, True), (1, True), (2, False)])
def test_mode_adaptive_xdr_is_plain_xdr_at_one_mode(modes, same):
    adaptive = ours(
        changed(EXAMPLE, modes=torch.full((3,), modes)),
        dict(objective="xdr", xdr_mode_adaptive_tau=True),
    )
    assert same_to_the_bit(adaptive, ours(EXAMPLE, dict(objective="xdr"))) == same


def test_mode_adaptive_tau_acts_on_each_group_alone():
    c = config(4, dict(objective="xdr", xdr_mode_adaptive_tau=True))
    w = targets_of(changed(EXAMPLE, modes=torch.tensor([3, 1, 1])), c)["weights"]
    A = loss.group_advantages(EXAMPLE.rewards, "none")
    close(w, torch.cat([(A[:1] / 0.2).softmax(1), (A[1:] / 0.4).softmax(1)]))


def test_surrogate_utility_is_the_advantage_when_all_rows_have_full_length():
    full, short = make_step(EXAMPLE.rewards, [L] * 12, 7), EXAMPLE
    for step, same in ((full, True), (short, False)):
        assert (
            same_to_the_bit(
                ours(step, dict(objective="xdr", xdr_utility="surrogate")),
                ours(step, dict(objective="xdr")),
            )
            == same
        )


def test_xdr_with_binary_rewards_is_dr_grpo_with_negative_advantages_scaled_down():
    """By e^(-1/tau), up to a factor per group: what MATH.md says it is."""
    step = make_step(torch.tensor([[1.0, 0, 0, 1, 0]]), [2] * 5, 3)
    xdr, dr_grpo = (
        targets_of(step, config(5, dict(objective=name)))["advantages"][0]
        for name in ("xdr", "dr_grpo")
    )
    factor = xdr / dr_grpo
    close(factor[1:3] / factor[0], [math.exp(-1 / 0.4)] * 2)
    close(factor[3:], [factor[0], factor[1]])


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_the_entropy_bonus_is_nothing_at_coef_0_or_equal_entropies_and_never_activates_a_group(
    objective,
):
    c = config(4, dict(objective=objective))
    step = EXAMPLE  # its third group has equal rewards
    bonus, plain = dict(policy_entropy_bonus_coef=0.4), targets_of(step, c)
    off = learner.group_targets(group_of(step, c | bonus), 0.4, 0.0, c)
    level = learner.group_targets(
        group_of(step, c) | {"entropies": torch.full((3, 4), 0.3)}, 0.4, 0.0, c | bonus
    )
    for targets in (off, level):
        assert all(torch.equal(targets[key], plain[key]) for key in plain)
    shaped = targets_of(step, c | bonus)
    assert (
        not torch.equal(shaped["advantages"], plain["advantages"])
        and (shaped["advantages"][2] == 0).all()
    )
    assert torch.equal(shaped["active"], plain["active"]) and torch.equal(
        shaped["rewards"], step.rewards
    )


def test_the_entropy_bonus_does_not_hide_a_group_at_the_lowest_reward():
    """maxent_skip_equal_groups="wrong" looks at the rewards as they were given: the bonus puts rows of the other group below them."""
    step = changed(EXAMPLE, rewards=torch.tensor([[0.0] * 4, [0, 0, 1, 1], [1.0] * 4]))
    c = config(
        4, dict(objective="maxent", policy_entropy_bonus_coef=0.4, maxent_skip_equal_groups="wrong")
    )
    assert targets_of(step, c)["active"].tolist() == [False, True, True]


def test_maxent_loss_says_nothing_to_the_mode_entropy_of_other_objectives():
    case = dict(objective="dr_grpo", mode_entropy_coef=0.3)
    for kind in ("policy_gradient", "mle"):
        assert same_to_the_bit(ours(EXAMPLE, case | {"maxent_loss": kind}), ours(EXAMPLE, case)), (
            kind
        )


def test_mle_has_no_baseline_and_listwise_has():
    """A group of equal rewards that is not skipped: mle pushes up all of its rows, a token of a short row more; listwise only balances them."""
    step = make_step(torch.tensor([[1.0] * 4]), [1, 2, 4, 5], 3)
    mle, listwise = (
        ours(
            step, dict(objective="maxent", maxent_loss=kind, maxent_skip_equal_groups="none")
        ).grad[0]
        for kind in ("mle", "listwise")
    )
    close(-mle, step.mask / (4 * step.lengths[:, None]))
    rows = listwise.sum(1)  # d loss / d score, the mean log-prob of a row
    assert rows.sum().abs() < 1e-7 and rows.min() < -0.01 and rows.max() > 0.01
    close(rows, scores(step.logps, step, "length")[0].softmax(0) - 0.25)


def test_maxent_as_policy_gradient_is_the_mean_over_prompts_of_w_minus_one_over_G():
    step = changed(EXAMPLE, logps=EXAMPLE.old)
    case = dict(
        objective="maxent", maxent_loss="policy_gradient", beta=0.1, importance_sampling="none"
    )
    w, active = (targets_of(step, config(4, case))[key] for key in ("weights", "active"))
    close(
        ours(step, case).grad[0], -((w - 1 / 4) * active[:, None]).view(-1, 1) * step.mask / (3 * L)
    )


# --- arms that may dominate: what each of them is


def test_maxrl_is_the_mean_score_of_the_right_rows_with_a_baseline():
    """K of G right: (1/K) sum over right rows of dlogp, the estimator of the first G terms of log p, minus the mean of all rows."""
    for K in range(1, 7):
        r = torch.tensor([[1.0] * K + [0.0] * (7 - K)])
        close(loss.group_advantages(r, "mean")[0] / 7, r[0] / K - (1 / 7 if K < 7 else r[0] / 7))
    assert (loss.group_advantages(torch.tensor([[0.0, 0.0], [-1.0, 0.5]]), "mean") == 0).all()


@pytest.mark.parametrize("K", [1, 3, 7])
def test_maxent_at_tau_zero_without_a_reference_is_maxrl_on_scores_where_p_is_uniform(K):
    """Their gradients by the scores, to the last digit, and maxent's against finite differences of its loss."""
    G = 8
    r = torch.tensor([[1.0] * K + [0.0] * (G - K)], dtype=torch.float64)
    maxrl = -loss.group_advantages(r, "mean") / G
    w = loss.maxent_weights(loss.log_reward_targets(r, 1.0, 0.0), None, 0.0, 0.0)
    active = torch.tensor([True])
    flat = torch.full((1, G), -1.3, dtype=torch.float64)
    _, grad = value_and_grad(loss.listwise_loss, flat, w, active)
    close(grad, maxrl, 1e-12)
    h = 1e-5
    for i in range(G):
        step = torch.zeros_like(flat)
        step[0, i] = h
        up, down = (loss.listwise_loss(flat + e, w, active) for e in (step, -step))
        close((up - down) / (2 * h), maxrl[0, i], 1e-8)
    # a small tau is near, and what p adds is p - 1/G
    near = loss.maxent_weights(loss.log_reward_targets(r, 1.0, 0.0), None, 0.05, 0.0)
    scores = randn(1, G, seed=K).double()
    _, grad = value_and_grad(loss.listwise_loss, scores, near, active)
    close(grad - (scores.softmax(1) - 1 / G), maxrl, 1e-6)


def test_the_pass_at_k_gradient_is_unbiased_by_enumeration_on_a_bandit():
    """Three answers, every sample of G of them: E[sum_i A_i dlogp_i / G] is the gradient of the expected best of k, in float64."""
    logits = torch.tensor([0.3, -0.2, 0.5], dtype=torch.float64)
    p = logits.softmax(0)
    for values in ([1.0, 0.0, 0.0], [1.0, 1.0, 0.0], [1.0, 0.4, -0.5]):
        values = torch.tensor(values, dtype=torch.float64)
        for G in (2, 3, 4):
            samples = torch.tensor(list(itertools.product(range(3), repeat=G)))  # (3^G, G)
            chance = p[samples].prod(1)
            score = torch.eye(3, dtype=torch.float64)[samples] - p  # dlogp / dlogits, (3^G, G, 3)
            for k in range(1, G + 1):
                leaf = logits.clone().requires_grad_()
                sets = torch.tensor(list(itertools.product(range(3), repeat=k)))
                best = values[sets].amax(1)
                pass_at_k = (leaf.softmax(0)[sets].prod(1) * best).sum()
                wanted = torch.autograd.grad(pass_at_k, leaf)[0]
                A = loss.pass_at_k_advantages(values[samples], k)
                found = (chance[:, None] * (A[:, :, None] * score).sum(1)).sum(0) / G
                close(found, wanted, 1e-12)


def test_pass_at_k_of_right_and_wrong_rows_is_the_share_of_sets_without_a_right_one():
    for K, k in ((1, 4), (3, 2), (3, 4), (6, 4), (8, 4)):
        A = loss.pass_at_k_advantages(torch.tensor([[1.0] * K + [0.0] * (8 - K)]), k)[0]
        alone = math.comb(8 - K, k - 1) / math.comb(7, k - 1)
        close(A, [k * alone] * K + [0.0] * (8 - K))


def test_flow_is_at_rest_exactly_where_scores_are_utilities_over_tau():
    r = torch.tensor([[1.0, 0, 0.3, 0], [0, 1.0, 1, 0.1]], dtype=torch.float64)
    l = randn(2, 4, seed=3).double()
    goals = loss.balance_goals(loss.log_reward_targets(r, 0.7, 0.02), l, 0.3, 0.2)
    active = torch.tensor([True, True])
    constant = torch.tensor([[-3.0], [0.5]], dtype=torch.float64)
    value, grad = value_and_grad(loss.balance_loss, goals + constant, goals, active, 2)
    assert value < 1e-24 and grad.abs().max() < 1e-12
    scores = randn(2, 4, seed=4).double()
    _, grad = value_and_grad(loss.balance_loss, scores, goals, active, 2)
    d = scores - goals
    close(grad, (d - d.mean(1, keepdim=True)) / 4 / 2, 1e-12)
    h = 1e-6
    for i in range(4):
        step = torch.zeros_like(scores)
        step[1, i] = h
        up, down = (loss.balance_loss(scores + e, goals, active, 2) for e in (step, -step))
        close((up - down) / (2 * h), grad[1, i], 1e-7)


def test_flow_at_infinite_tau_pulls_all_scores_of_a_group_together():
    flat = loss.balance_goals(torch.tensor([[0.0, -5.0]]), None, INF, 0.0)
    _, grad = value_and_grad(
        loss.balance_loss, torch.tensor([[-1.0, -3.0]]), flat, torch.tensor([True]), 1
    )
    close(grad, [[0.5, -0.5]])


def test_an_unlikely_right_answer_is_worth_more_and_equal_answers_share_a_rank():
    r = torch.tensor([[1.0, 1.0, 1.0, 0.0, -0.5]])
    S = torch.tensor([[-1.0, -4.0, -4.00001, -2.0, -3.0]])  # ranks 0, 3, 3
    close(loss.unlikely_rewards(r, S, 0.25), [[0.75, 0.9, 0.9, 0.0, -0.5]])
    assert torch.equal(loss.unlikely_rewards(r, S, 0.0), r)


# --- the string plant: every string of `length` letters, one of them right, in closed form and by descent


def right_share(letters, length, scale, tau, steps=0, rate=0.0):
    """pi(right) where p = w over all strings, or after `steps` of descent on the listwise loss over all of them from a uniform policy.

    A policy over strings of one length: log-probs (letters^length,), free up to their normalisation; scores scale * S / length."""
    count = letters**length
    r = torch.zeros(1, count, dtype=torch.float64)
    r[0, 0] = 1.0
    w = loss.maxent_weights(loss.log_reward_targets(r, 1.0, 0.0), None, tau, 0.0)
    if not steps:
        return (w.log() * length / scale).softmax(1)[0, 0].item()
    logits = torch.zeros(1, count, dtype=torch.float64)
    for _ in range(steps):
        scores = scale * logits.log_softmax(1) / length
        logits = logits + rate * (w - scores.softmax(1))
    return logits.softmax(1)[0, 0].item()


@pytest.mark.parametrize("letters, length", [(4, 5), (10, 3), (3, 7)])
@pytest.mark.parametrize("scale", [1.0, 2.0, 4.0])
def test_the_limit_of_tau_is_one_over_ln_v_divided_by_the_scale_of_the_scores(
    letters, length, scale
):
    """At the limit one right string has as much mass as all wrong ones together; a tenth above it has less than a third, a tenth below more than two."""
    c = config(16, dict(maxent_score_scale=scale))
    limit = checks.tau_limit(c, letters)
    assert limit == pytest.approx(1 / (scale * math.log(letters)))
    assert right_share(letters, length, scale, limit) == pytest.approx(0.5, abs=0.01)
    assert right_share(letters, length, scale, limit * 1.3) < 1 / 3
    assert right_share(letters, length, scale, limit / 1.3) > 2 / 3


def test_the_string_plant_gets_there_by_descent_too():
    for scale, tau in ((1.0, 0.5), (3.0, 0.5 / 3), (3.0, 0.5)):
        found = right_share(4, 3, scale, tau, steps=30_000, rate=3.0 / scale)
        assert found == pytest.approx(right_share(4, 3, scale, tau), abs=0.01), (scale, tau)
    assert found < 0.15 < 0.85 < right_share(4, 3, 3.0, 0.5 / 3)


def test_summed_scores_have_a_limit_that_falls_with_the_length():
    c = config(16, dict(maxent_score_norm="sum"))
    assert checks.tau_limit(c, 4) == pytest.approx(1 / (L * math.log(4)))


# --- what the comparisons would notice


def wrong_std(rewards, scale):
    return (rewards - rewards.mean(1, keepdim=True)) / (
        rewards.std(1, keepdim=True, unbiased=False) + 1e-4
    )


GRPO, LISTWISE = (
    dict(objective="grpo", beta=0.3, delta=1.4),
    dict(objective="maxent", maxent_tau=0.5, beta=0.3, maxent_q_epsilon=0.02),
)
BONUS, MODES, MLE = (
    dict(objective="dr_grpo", policy_entropy_bonus_coef=0.4),
    dict(objective="dr_grpo", mode_entropy_coef=0.3),
    dict(objective="maxent", maxent_loss="mle", maxent_score_norm="sum"),
)
FLOW = dict(objective="flow", beta=0.3)
K2, SEQUENCE = (
    dict(objective="dr_grpo", beta=0.3, kl_loss_type="k2"),
    dict(objective="dr_grpo", importance_sampling="sequence_truncate"),
)
MASK, GEOMETRIC = (
    dict(objective="dr_grpo", importance_sampling=kind)
    for kind in ("token_mask", "sequence_geometric")
)

MUTATIONS = {  # name: (function of loss.py or learner.py, what to make of it, the case that notices)
    "advantages of the other sign": (
        "group_advantages",
        lambda f: lambda r, scale: -f(r, scale),
        GRPO,
    ),
    "std over G instead of G - 1": ("group_advantages", lambda f: wrong_std, GRPO),
    "no gradient through the ratio": (
        "clipped_surrogate",
        lambda f: lambda d, *a: f(d.detach(), *a),
        GRPO,
    ),
    "ratio the other way round": ("clipped_surrogate", lambda f: lambda d, *a: f(-d, *a), GRPO),
    "clip sides swapped": (
        "clipped_surrogate",
        lambda f: lambda d, A, low, high, delta: f(d, A, high, low, delta),
        GRPO,
    ),
    "no delta": (
        "clipped_surrogate",
        lambda f: lambda d, A, low, high, delta: f(d, A, low, high),
        GRPO,
    ),
    "maximum for negative advantages": (
        "clipped_surrogate",
        lambda f: lambda d, A, *a: (-f(d, -A, *a)[0], *f(d, A, *a)[1:]),
        GRPO,
    ),
    "clip counts swapped": (
        "clipped_surrogate",
        lambda f: lambda *a: tuple(f(*a)[i] for i in (0, 2, 1)),
        GRPO,
    ),
    "KL the other way round": ("k3_kl", lambda f: lambda x, ref: f(ref, x), GRPO),
    "no gradient through KL": ("k3_kl", lambda f: lambda x, ref: f(x.detach(), ref), GRPO),
    "no KL": ("adds_kl", lambda f: lambda c: False, GRPO),
    "k2 without its half": ("k2_kl", lambda f: lambda x, ref: 2 * f(x, ref), K2),
    "k3 for k2": ("k2_kl", lambda f: lambda x, ref: loss.k3_kl(x, ref), K2),
    "padding counted": (
        "token_weights",
        lambda f: lambda kind, mask, *a: f(kind, torch.ones_like(mask), *a),
        GRPO,
    ),
    "per token instead of per row": (
        "token_weights",
        lambda f: lambda kind, *a: f("token_mean", *a),
        GRPO,
    ),
    "no sampler correction": (
        "importance_ratio",
        lambda f: lambda old, mu, T, kind, cap: f(old, mu, T, "none", cap),
        GRPO,
    ),
    "sampler ratio the other way round": (
        "importance_ratio",
        lambda f: lambda old, mu, *a: f(mu, old, *a),
        GRPO,
    ),
    "cap as a floor": (
        "importance_ratio",
        lambda f: lambda old, mu, T, kind, cap: f(old, mu, T, kind, INF).clamp(min=cap),
        GRPO,
    ),
    "no cap": (
        "importance_ratio",
        lambda f: lambda old, mu, T, kind, cap: f(old, mu, T, kind, INF),
        GRPO,
    ),
    "sequence ratio per token": (
        "importance_ratio",
        lambda f: lambda old, mu, T, kind, cap: f(old, mu, T, "token_truncate", cap),
        SEQUENCE,
    ),
    "sequence ratio as a mean": (
        "importance_ratio",
        lambda f: lambda old, mu, T, kind, cap: f(old, mu, T, "sequence_geometric", cap),
        SEQUENCE,
    ),
    "sequence ratio masked": (
        "importance_ratio",
        lambda f: lambda old, mu, T, kind, cap: f(old, mu, T, "sequence_mask", cap),
        SEQUENCE,
    ),
    "geometric ratio as a sum": (
        "importance_ratio",
        lambda f: lambda old, mu, T, kind, cap: f(old, mu, torch.ones_like(T), kind, cap),
        GEOMETRIC,
    ),
    "geometric mean over padding": (
        "importance_ratio",
        lambda f: lambda old, mu, T, kind, cap: f(old, mu, torch.full_like(T, 5), kind, cap),
        GEOMETRIC,
    ),
    "mask keeps what is above the cap": (
        "importance_ratio",
        lambda f: lambda *a: f(*a[:4], INF) - f(*a),
        MASK,
    ),
    "mask truncates": (
        "importance_ratio",
        lambda f: lambda old, mu, T, kind, cap: f(old, mu, T, "token_truncate", cap),
        MASK,
    ),
    "gspo's ratio as a sum": (
        "surrogate",
        lambda f: (
            lambda x, part, A, c: f(x, part | {"lengths": torch.ones_like(part["lengths"])}, A, c)
        ),
        dict(objective="gspo"),
    ),
    "gspo's ratio per token": (
        "surrogate",
        lambda f: lambda x, part, A, c: f(x, part, A, c | {"objective": "grpo"}),
        dict(objective="gspo"),
    ),
    "cispo's ratio not detached": (
        "cispo_surrogate",
        lambda f: (
            lambda x, d, A, cap: (d.exp().clamp(max=cap) * A[:, None] * x, *f(x, d, A, cap)[1:])
        ),
        dict(objective="cispo"),
    ),
    "cispo without gradient above its cap": (
        "cispo_surrogate",
        lambda f: lambda x, d, A, cap: f(torch.where(d.exp() > cap, x.detach(), x), d, A, cap),
        dict(objective="cispo"),
    ),
    "cispo clipped below too": (
        "cispo_surrogate",
        lambda f: lambda x, d, A, cap: f(x, d.clamp(min=math.log(1 - LOW)), A, cap),
        dict(objective="cispo"),
    ),
    "cispo's cap as a floor": (
        "cispo_surrogate",
        lambda f: lambda x, d, A, cap: f(x, d.clamp(min=math.log(cap)), A, INF),
        dict(objective="cispo"),
    ),
    "cispo without a cap": (
        "cispo_surrogate",
        lambda f: lambda x, d, A, cap: (f(x, d, A, INF)[0], *f(x, d, A, cap)[1:]),
        dict(objective="cispo"),
    ),
    "cispo counts bad tokens as clipped": (
        "cispo_surrogate",
        lambda f: lambda x, d, A, cap: (*f(x, d, A, cap)[:2], d.exp() > cap),
        dict(objective="cispo"),
    ),
    "an answer's mass not summed": (
        "semantic_entropy",
        lambda f: lambda clusters, p: f(torch.arange(p.numel()).view(p.shape), p),
        dict(objective="seed_grpo"),
    ),
    "answers counted, not weighed": (
        "semantic_entropy",
        lambda f: lambda clusters, p: f(clusters, p * 0),
        dict(objective="seed_grpo"),
    ),
    "alpha not over log G": (
        "semantic_scale",
        lambda f: lambda H, alpha, G: f(H, alpha * math.log(G), G),
        dict(objective="seed_grpo"),
    ),
    "different answers trusted more": (
        "semantic_scale",
        lambda f: lambda *a: 1 / f(*a),
        dict(objective="seed_grpo"),
    ),
    "entropy detached": (
        "token_loss",
        lambda f: lambda x, entropy, *a: f(x, entropy.detach(), *a),
        dict(objective="token_entropy"),
    ),
    "entropy lowered": (
        "token_loss",
        lambda f: lambda x, entropy, *a: f(x, -entropy, *a),
        dict(objective="token_entropy"),
    ),
    "bonus of the other sign": ("entropy_bonus", lambda f: lambda *a: -f(*a), BONUS),
    "bonus not scaled by the rewards": (
        "entropy_bonus",
        lambda f: lambda r, *a: f(r, *a) / r.std(1, keepdim=True).clamp(min=1e-9),
        BONUS,
    ),
    "bonus without z-scores": (
        "entropy_bonus",
        lambda f: lambda r, H, coef: coef * r.std(1, keepdim=True) * (H - H.mean(1, keepdim=True)),
        BONUS,
    ),
    "bonus in flat groups": (
        "entropy_bonus",
        lambda f: lambda r, H, coef: coef * (H - H.mean(1, keepdim=True)) / H.std(1, keepdim=True),
        BONUS,
    ),
    "surrogate utility without lengths": (
        "xdr_utilities",
        lambda f: lambda A, T, *a: A,
        dict(objective="xdr", xdr_utility="surrogate"),
    ),
    "surrogate utility per row mean": (
        "xdr_utilities",
        lambda f: lambda A, T, kind, cap: A * T / T.max(),
        dict(objective="xdr", xdr_utility="surrogate"),
    ),
    "xdr prefers the worst": ("xdr_utilities", lambda f: lambda *a: -f(*a), dict(objective="xdr")),
    "more modes, more tau": (
        "mode_adaptive_tau",
        lambda f: lambda tau, k: [tau * tau / t for t in f(tau, k)],
        dict(objective="xdr", xdr_mode_adaptive_tau=True),
    ),
    "modes not counted from one": (
        "mode_adaptive_tau",
        lambda f: lambda tau, k: f(tau, k + 1),
        dict(objective="xdr", xdr_mode_adaptive_tau=True),
    ),
    "tilted away from the reference": (
        "xdr_weights",
        lambda f: lambda U, l, *a: f(U, -l, *a),
        TILTED,
    ),
    "no tilt": ("xdr_weights", lambda f: lambda U, l, taus, beta: f(U, l, taus, 0.0), TILTED),
    "a tilt over tau alone": (
        "xdr_weights",
        lambda f: lambda U, l, taus, beta: f(U + beta * l, None, taus, 0.0),
        TILTED,
    ),
    "KL next to the tilt": ("adds_kl", lambda f: lambda c: True, TILTED),
    "weights without the reference": (
        "maxent_weights",
        lambda f: lambda u, l, tau, beta: f(u, None, tau, 0.0),
        LISTWISE,
    ),
    "tau alone as divisor": (
        "maxent_weights",
        lambda f: lambda u, l, tau, beta: f(u + beta * l, None, tau, 0.0),
        LISTWISE,
    ),
    "rewards instead of log targets": (
        "log_reward_targets",
        lambda f: lambda r, T_q, eps: r,
        LISTWISE,
    ),
    "KL next to maxent's weights": ("adds_kl", lambda f: lambda c: True, LISTWISE),
    "equal groups trained": (
        "listwise_loss",
        lambda f: lambda s, w, active, *a: f(s, w, torch.ones_like(active), *a),
        LISTWISE,
    ),
    "mean over all groups": (
        "listwise_loss",
        lambda f: lambda s, w, active, norm, share: f(s, w, active, len(s), share),
        LISTWISE,
    ),
    "scores averaged over padding": (
        "sequence_scores",
        lambda f: lambda x, T, *a: f(x, torch.full_like(T, x.shape[1]), *a),
        LISTWISE,
    ),
    "mle with a baseline": (
        "mle_loss",
        lambda f: lambda s, w, *a: f(s, w - 1 / s.shape[1], *a),
        MLE,
    ),
    "mle of equal groups": (
        "mle_loss",
        lambda f: lambda s, w, active, *a: f(s, w, torch.ones_like(active), *a),
        MLE,
    ),
    "flow without its baseline": (
        "balance_loss",
        lambda f: lambda s, goals, *a: f(torch.cat([s, -s], 1), torch.cat([goals, -goals], 1), *a),
        FLOW,
    ),
    "flow of equal groups": (
        "balance_loss",
        lambda f: lambda s, goals, active, *a: f(s, goals, torch.ones_like(active), *a),
        FLOW,
    ),
    "flow's goals multiplied by tau": (
        "balance_goals",
        lambda f: lambda u, l, tau, beta: f(u, l, 1 / tau, beta),
        FLOW,
    ),
    "flow's reference against it": (
        "balance_goals",
        lambda f: lambda u, l, tau, beta: f(u, -l, tau, beta),
        FLOW,
    ),
    "the target's scores not scaled": (
        "sequence_scores",
        lambda f: lambda x, T, norm, cap, scale: f(x, T, norm, cap),
        dict(objective="maxent", maxent_score_scale=4.0),
    ),
    "all groups weigh the same": (
        "reward_spread",
        lambda f: lambda r: torch.ones(len(r)),
        dict(objective="maxent", maxent_group_weight="spread"),
    ),
    "pass@k of k - 1": (
        "pass_at_k_advantages",
        lambda f: lambda r, k: f(r, k - 1),
        dict(objective="pkpo"),
    ),
    "usual answers worth more": (
        "unlikely_rewards",
        lambda f: lambda r, S, coef: f(r, -S, coef),
        dict(objective="dr_grpo", unlikeliness_coef=0.25),
    ),
    "mle not per token": (
        "scores_of",
        lambda f: lambda x, T, c: loss.sequence_scores(x, T, "sum", L),
        MLE,
    ),
    "mode entropy over all rows": (
        "mode_entropy_loss",
        lambda f: (
            lambda s, r, norm: loss.listwise_loss(s, s * 0 + 1 / 4, ~loss.equal_groups(r), norm)
        ),
        MODES,
    ),
    "mode entropy of equal groups": ("equal_groups", lambda f: lambda r: r[:, 0] == 99, MODES),
    "mode entropy not over L": (
        "mode_entropy_loss",
        lambda f: lambda s, r, norm: f(s, r, norm / L),
        MODES,
    ),
    "mode entropy in another norm": (
        "scores_of",
        lambda f: lambda x, T, c: loss.sequence_scores(x, T, "length", L),
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
    monkeypatch.setattr(module, function, mutate(getattr(module, function)))
    with pytest.raises(AssertionError):
        assert_same(ours(EXAMPLE, case), slow)


CUT_MUTATIONS = {
    "coefficients of the wrong rows": ("group_loss", lambda f: lambda s, *a: f(s.roll(1, 1), *a)),
    "micro-batches count their own groups": (
        "group_loss",
        lambda f: lambda s, targets, c, norm: f(s, targets, c, {key: 1 for key in norm}),
    ),
    "micro-batches count their own tokens": (
        "token_loss",
        lambda f: (
            lambda x, H, part, A, beta, c, norm: f(
                x,
                H,
                part,
                A,
                beta,
                c,
                norm | {"rows": len(x), "tokens": int(part["lengths"].sum())},
            )
        ),
    ),
    "groups with a gradient are idle": (
        "idle_rows",
        lambda f: (
            lambda targets, *a: (
                (targets["rewards"][:, :1] < 1).expand_as(targets["rewards"]).flatten()
            )
        ),
    ),
    "scores of the old policy": (
        "score_rows",
        lambda f: lambda model, batch, *a: batch.get("old_logps", f(model, batch, *a)),
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
    whole, (function, mutate) = ours(EXAMPLE, case), CUT_MUTATIONS[name]
    assert_same(accumulate(EXAMPLE, case, budget=13), whole)
    monkeypatch.setattr(learner, function, mutate(getattr(learner, function)))
    with pytest.raises(AssertionError):
        assert_same(accumulate(EXAMPLE, case, budget=13), whole)


@cases
def test_the_rows_called_idle_have_no_gradient_and_equal_groups_are_called_so_where_nothing_else_acts_on_them(
    case,
):
    c = config(EXAMPLE.G, case)
    idle = learner.idle_rows(targets_of(EXAMPLE, c), c["beta"], c)
    grad = ours(EXAMPLE, case).grad
    assert not grad[:, idle].any()
    for rows in (slice(0, 4), slice(4, 8)):
        # maxrl has no opinion below a mean of 0, pkpo none where no set of k rows fails
        assert idle[rows].all() if not grad[:, rows].any() else not idle[rows].any()
    assert idle[8:].all() or grad[:, 8:].any() or c["mode_entropy_coef"] > 0


def test_inputs_come_back_unchanged():
    step, w = EXAMPLE, randn(3, 4).softmax(1)
    hidden, head, targets = randn(9, 3), randn(11, 3), torch.arange(9)
    inputs = [x for x in vars(step).values() if torch.is_tensor(x)] + [w, hidden, head, targets]
    before = [x.clone() for x in inputs]
    for case in CASES:
        ours(step, case)
    loss.weight_metrics(w, step.rewards, loss.active_groups(step.rewards, "wrong"))
    loss.group_advantages(step.rewards, "batch")
    for u in (w, step.rewards):
        loss.maxent_weights(u, w, 0.0, 0.0), loss.maxent_weights(u, w, 0.5, INF)
    leaf = hidden.clone().requires_grad_()
    sum(x.sum() for x in loss.token_logps(leaf, head, targets, 0.7, 4)).backward()
    loss.token_logps(hidden, head, targets, 0.7, 4)
    assert all(torch.equal(a, b) for a, b in zip(before, inputs))


# --- token log-probs


def full_logps(hidden, weight, targets, temperature):
    """(logps, entropy) with all logits at once."""
    log_p = (hidden @ weight.T / temperature).log_softmax(1)
    return log_p.gather(1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(1)


@pytest.mark.parametrize("chunk", [1, 7, 100])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("use", ["logps", "entropy", "both"])
def test_chunked_logps_equal_the_full_softmax_in_value_and_gradient(chunk, temperature, use):
    """Against float64 autograd: the function itself computes in float32, so gradcheck can't run on it."""
    n, H, V = 23, 5, 37
    hidden, weight, targets = randn(n, H), randn(V, H, seed=1), torch.arange(n) * 5 % V
    up = {"logps": (1, 0), "entropy": (0, 1), "both": (1, 1)}[use]
    up = [randn(n, seed=2 + k, scale=factor) for k, factor in enumerate(up)]

    def run(f, hidden, weight):
        leaves = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        logps, entropy = f(*leaves, targets, temperature)
        total = 0.0
        if use != "entropy":
            total = total + (up[0].to(logps) * logps).sum()
        if use != "logps":
            total = total + (up[1].to(entropy) * entropy).sum()
        return logps, entropy, *torch.autograd.grad(total, leaves)

    ours = run(lambda *a: loss.token_logps(*a, chunk), hidden, weight)
    full = run(full_logps, hidden.double(), weight.double())
    for a, b in zip(ours, full):
        assert a.dtype == torch.float32
        close(a, b)


def test_frozen_head_and_no_entropy_give_the_same_log_probs_and_hidden_gradient():
    hidden, weight, targets = randn(10, 4), randn(20, 4, seed=1), torch.arange(10)
    value, grad = value_and_grad(lambda h: full_logps(h, weight, targets, 1.0)[0].sum(), hidden)
    logps, entropy = loss.token_logps(hidden, weight, targets, 1.0, 3, want_entropy=False)
    assert entropy is None
    close(logps.sum(), value)
    close(
        value_and_grad(
            lambda h: loss.token_logps(h, weight, targets, 1.0, 3, want_entropy=False)[0].sum(),
            hidden,
        )[1],
        grad,
    )


def test_no_tokens_give_empty_log_probs_and_zero_gradients():
    hidden, weight = torch.zeros(0, 4, requires_grad=True), randn(6, 4).requires_grad_()
    logps, entropy = loss.token_logps(hidden, weight, torch.zeros(0, dtype=torch.long), 1.0, 3)
    (logps.sum() + entropy.sum()).backward()
    assert (
        logps.shape == entropy.shape == (0,)
        and hidden.grad.shape == (0, 4)
        and (weight.grad == 0).all()
    )


def test_huge_logits_stay_finite():
    hidden, weight = (
        (randn(5, 3) * 100).requires_grad_(),
        (randn(7, 3, seed=1) * 100).requires_grad_(),
    )
    logps, entropy = loss.token_logps(hidden, weight, torch.arange(5), 1.0, 2)
    for x in (logps, entropy, *torch.autograd.grad(logps.sum() + entropy.sum(), (hidden, weight))):
        assert x.isfinite().all()
    close(logps, full_logps(hidden.double(), weight.double(), torch.arange(5), 1.0)[0])


def test_bfloat16_results_are_float32_and_gradients_bfloat16():
    hidden, weight, targets = randn(30, 16), randn(50, 16, seed=1, scale=0.3), torch.arange(30)
    exact = value_and_grad(lambda h: loss.token_logps(h, weight, targets, 1.0, 8)[0].sum(), hidden)
    h = hidden.bfloat16().requires_grad_()
    logps, _ = loss.token_logps(h, weight.bfloat16(), targets, 1.0, 8)
    logps.sum().backward()
    assert logps.dtype == torch.float32 and h.grad.dtype == torch.bfloat16
    close(logps.sum(), exact[0], 0.01)
    close(h.grad, exact[1], 0.02)  # bfloat16 has 8 bits


# --- softmaxes kept for the backward, and chunks that nobody asks for

KEEPING = {
    "none": 0,
    "two chunks": 2 * 8 * 37 * 4,
    "all": 2**28,
}  # KEPT_BYTES of 29 tokens in chunks of 8, V = 37
ROUNDING = {
    torch.float32: 1e-6,
    torch.bfloat16: 0.02,
}  # bfloat16 has 8 bits: a float32 rounding can move its last one


def head_case(dtype, n=29, H=16, V=37):
    return (
        randn(n, H).to(dtype).requires_grad_(),
        randn(V, H, seed=1, scale=0.5).to(dtype).requires_grad_(),
        torch.arange(n) * 5 % V,
    )


def head_grads(leaves, targets, up, temperature=1.0, **more):
    """Gradients of hidden and weight under up-stream gradients of (logps, entropy or None)."""
    outs = loss.token_logps(*leaves, targets, temperature, 8, want_entropy=up[1] is not None)
    outs, up = zip(*[(out, g) for out, g in zip(outs, up) if g is not None])
    return torch.autograd.grad(outs, leaves, up, **more)


@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("entropy", ["none", "zero", "some"])
def test_kept_and_recomputed_softmaxes_give_the_same_values_and_gradients(
    monkeypatch, dtype, temperature, entropy
):
    *leaves, targets = head_case(dtype)
    up = (
        randn(29, seed=2),
        {"none": None, "zero": torch.zeros(29), "some": randn(29, seed=3)}[entropy],
    )
    found, values, computed, calls, real = {}, {}, {}, [], loss.head_logits
    monkeypatch.setattr(loss, "head_logits", lambda *a: calls.append(1) or real(*a))
    for name, size in KEEPING.items():
        calls.clear()
        monkeypatch.setattr(loss, "KEPT_BYTES", size)
        found[name] = head_grads(leaves, targets, up, temperature)
        values[name], computed[name] = (
            loss.token_logps(*leaves, targets, temperature, 8),
            len(calls),
        )
    assert computed == {
        "none": 4 + 4 + 4,
        "two chunks": 4 + 2 + 4,
        "all": 4 + 4,
    }  # of gradient's forward and backward, and of the values
    for name in KEEPING:
        assert all(map(torch.equal, values[name], values["none"]))
        for a, b in zip(found[name], found["none"]):
            close(a, b, ROUNDING[dtype])
    exact = [x.detach().double().requires_grad_() for x in leaves]
    wanted = sum(
        (out * g).sum()
        for out, g in zip(full_logps(*exact, targets, temperature), up)
        if g is not None
    )
    for a, b in zip(found["two chunks"], torch.autograd.grad(wanted, exact)):
        close(a, b, 10 * ROUNDING[dtype] if dtype == torch.float32 else 0.03)


@pytest.mark.parametrize("size", KEEPING.values(), ids=KEEPING)
@pytest.mark.parametrize("entropy", [False, True])
def test_a_second_backward_through_the_same_graph_gives_the_same_gradients(
    monkeypatch, size, entropy
):
    monkeypatch.setattr(loss, "KEPT_BYTES", size)
    *leaves, targets = head_case(torch.float32)
    logps, H = loss.token_logps(*leaves, targets, 0.6, 8)
    total = (randn(29, seed=2) * logps).sum() + (randn(29, seed=3) * H).sum() * entropy
    first, second, third = (torch.autograd.grad(total, leaves, retain_graph=True) for _ in range(3))
    for a, b, c in zip(first, second, third):
        close(b, a, 1e-6)
        assert torch.equal(b, c)


@pytest.mark.parametrize("size", KEEPING.values(), ids=KEEPING)
@pytest.mark.parametrize("entropy", ["none", "zero", "some", "only"])
def test_rows_and_chunks_without_gradient_contribute_exactly_nothing(monkeypatch, size, entropy):
    """Chunks 0 and 2 of 4 ask for nothing, and in the others every third row does not either; where chunks 0 and 2 are NaN nobody sees it."""
    monkeypatch.setattr(loss, "KEPT_BYTES", size)
    hidden, weight, targets = head_case(torch.float32)
    silent = (torch.arange(29) // 8 % 2 == 0) | (torch.arange(29) % 3 == 0)
    up = (
        randn(29, seed=2).masked_fill(silent | torch.tensor(entropy == "only"), 0),
        randn(29, seed=3).masked_fill(silent, 0),
    )
    up = up[0], {"none": None, "zero": torch.zeros(29)}.get(entropy, up[1])
    grad_hidden, grad_weight = head_grads((hidden, weight), targets, up, 0.6)
    assert (grad_hidden[silent] == 0).all() and (grad_hidden[~silent] != 0).any(1).all()
    odd = torch.arange(29) // 8 % 2 == 1  # chunks 1 and 3, alone
    alone = head_grads(
        (hidden[odd], weight), targets[odd], [g if g is None else g[odd] for g in up], 0.6
    )
    close(grad_hidden[odd], alone[0])
    close(grad_weight, alone[1])
    broken = hidden.detach().masked_fill(~odd[:, None], math.nan).requires_grad_()
    for a, b in zip(head_grads((broken, weight), targets, up, 0.6), (grad_hidden, grad_weight)):
        assert torch.equal(a, b)


@pytest.mark.parametrize("which", [0, 1])
def test_a_nan_gradient_of_one_token_is_not_taken_for_none(which):
    *leaves, targets = head_case(torch.float32)
    up = torch.zeros(29), torch.zeros(29)
    up[which][11] = math.nan
    grad_hidden, grad_weight = head_grads(leaves, targets, up)
    assert grad_hidden[11].isnan().all() and grad_weight.isnan().all()


def test_nothing_is_kept_where_no_gradient_is_asked_for(monkeypatch):
    contexts, real = [], loss.ChunkedLogps.forward
    monkeypatch.setattr(
        loss.ChunkedLogps,
        "forward",
        staticmethod(lambda ctx, *a: (contexts.append(ctx), real(ctx, *a))[1]),
    )
    hidden, weight, targets = head_case(torch.float32)
    with torch.no_grad():
        loss.token_logps(hidden, weight, targets, 1.0, 8)
    loss.token_logps(hidden.detach(), weight.detach(), targets, 1.0, 8)
    loss.token_logps(hidden, weight.detach(), targets, 1.0, 8)
    assert [len(ctx.kept) for ctx in contexts] == [0, 0, 4]


# --- the head on a GPU: its functions, not yet compiled, on a CPU


@pytest.fixture
def as_on_gpu(monkeypatch):
    monkeypatch.setattr(loss, "on_gpu", lambda x: True)
    monkeypatch.setattr(loss, "compiled", lambda function: function)


@pytest.mark.parametrize("size", KEEPING.values(), ids=KEEPING)
@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("entropy", ["none", "zero", "some"])
@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
def test_the_head_of_a_gpu_has_the_values_and_gradients_of_the_full_softmax(
    as_on_gpu, monkeypatch, size, temperature, entropy, dtype
):
    monkeypatch.setattr(loss, "KEPT_BYTES", size)
    *leaves, targets = head_case(dtype)
    up = {"none": None, "zero": torch.zeros(29), "some": randn(29, seed=3)}[entropy]
    up = randn(29, seed=2), up
    found = head_grads(leaves, targets, up, temperature)
    exact = [x.detach().double().requires_grad_() for x in leaves]
    outs = full_logps(*exact, targets, temperature)
    wanted = sum((out * g).sum() for out, g in zip(outs, up) if g is not None)
    tolerance = 1e-5 if dtype == torch.float32 else 0.03
    for a, b in zip(found, torch.autograd.grad(wanted, exact)):
        assert a.dtype == dtype
        close(a, b, tolerance)
    for a, b in zip(loss.token_logps(*leaves, targets, temperature, 8), outs):
        close(a, b, tolerance)


@pytest.mark.parametrize("size", [0, 2**28], ids=["recomputed", "kept"])
def test_a_confident_token_keeps_its_small_gradient_in_16_bits(as_on_gpu, monkeypatch, size):
    """p of the target is 0.9997, which bfloat16 takes for 1: what is left is 1 - p."""
    monkeypatch.setattr(loss, "KEPT_BYTES", size)
    weight = torch.zeros(5, 4)
    weight[0, 0] = 1.0
    hidden = torch.tensor([[9.5, 0.0, 0.0, 0.0]])
    leaves = [x.bfloat16().requires_grad_() for x in (hidden, weight)]
    exact = [x.detach().double().requires_grad_() for x in leaves]
    targets = torch.tensor([0])
    found = torch.autograd.grad(loss.token_logps(*leaves, targets, 1.0, 8)[0].sum(), leaves)
    wanted = torch.autograd.grad(full_logps(*exact, targets, 1.0)[0].sum(), exact)
    for a, b in zip(found, wanted):
        assert (a - b).norm() < 0.01 * b.norm()


def test_the_head_of_a_gpu_is_compiled_a_few_times_for_all_chunks_and_temperatures(monkeypatch):
    counter = CompileCounter()
    monkeypatch.setattr(loss, "on_gpu", lambda x: True)
    made = {}

    def compiled(function):
        if function not in made:
            made[function] = torch.compile(function, backend=counter, dynamic=True, fullgraph=True)
        return made[function]

    monkeypatch.setattr(loss, "compiled", compiled)
    torch._dynamo.reset()
    for size in (0, 2**28):
        monkeypatch.setattr(loss, "KEPT_BYTES", size)
        for n in (29, 30, 17, 23):
            for temperature in (1.0, 0.7, 0.9, 1.1):
                *leaves, targets = head_case(torch.bfloat16, n=n)
                logps, entropy = loss.token_logps(*leaves, targets, temperature, 8)
                (logps.sum() + entropy.sum()).backward()
    assert counter.frame_count <= 2 * 2 * 2  # two functions, kept or not; chunks of 1 apart
    assert counter.frame_count >= 4


def test_kept_probabilities_take_a_quarter_of_what_is_free_on_a_gpu(monkeypatch):
    hidden = SimpleNamespace(is_cuda=True, device="cuda:0")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (6 * 2**30, 80 * 2**30))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 5 * 2**30)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 3 * 2**30)
    assert loss.room_for_softmaxes(hidden) == 2 * 2**30
    assert loss.room_for_softmaxes(torch.zeros(1)) == loss.KEPT_BYTES


MEMORY = """
import sys, torch, loss
torch.set_num_threads(1)
def peak():     # MiB; of this program alone, unlike ru_maxrss, which starts at the parent's
    return int(next(line for line in open("/proc/self/status") if line.startswith("VmHWM")).split()[1]) / 1024
def learn(n, V=16384, H=8, chunk=32):
    hidden, weight = torch.randn(n, H, requires_grad=True), torch.randn(V, H, requires_grad=True)
    logps, entropy = loss.token_logps(hidden, weight, torch.arange(n), 1.0, chunk)
    (logps.sum() + entropy.sum()).backward()
loss.KEPT_BYTES = 0
learn(96)       # three chunks: in the backward of one, tensors of the last are still alive
before = peak()
loss.KEPT_BYTES = int(sys.argv[1]) * 2**20
learn(2048)
print(peak() - before)
"""


@pytest.mark.parametrize("kept", [0, 40])
def test_memory_does_not_grow_with_tokens_times_vocabulary(kept):
    """2,048 tokens need at most 16 MiB and the softmaxes kept more than 3 chunks of 32; keeping their logits even once would take 128 MiB.
    glibc is told to give freed buffers back at once: holes between those that are kept are not what is measured."""
    run = subprocess.run(
        [sys.executable, "-c", MEMORY, str(kept)],
        capture_output=True,
        text=True,
        cwd=Path(loss.__file__).parent,
        timeout=120,
        env={**os.environ, "MALLOC_MMAP_THRESHOLD_": "1000000"},
    )
    assert run.returncode == 0, run.stderr
    assert kept / 2 < float(run.stdout) < 16 + kept
