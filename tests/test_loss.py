"""loss.py against literal loops written from MATH.md, in float64, one token or row at a time.

make_step builds one training step (rewards with ties, ragged rows, four kinds of log-probs); policy_gradient and
maxent compose the loss of some of its rows as the trainer does; slow_policy_gradient and slow_maxent are the page's
formulas. Values and gradients must agree to 1e-5 (fp32), under any order, split and padding of the rows.
"""
import itertools
import math
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import loss

torch.set_num_threads(1)
INF = math.inf
LOW, HIGH, CAP, L = 0.2, 0.28, 1.5, 8       # clip range, cap of the sampler's ratio, max_completion_length
examples = settings(derandomize=True, deadline=None, max_examples=40)
REWARDS = st.sampled_from([0.0, 0.1, 1.0, 1.0, -0.5])       # drawn often enough for ties and all-equal groups
SCALES, NORMS = ("group", "batch", "none"), ("length", "constant", "sum")
groups = st.tuples(st.integers(1, 3), st.integers(1, 5)).flatmap(
    lambda PG: st.lists(st.lists(REWARDS, min_size=PG[1], max_size=PG[1]), min_size=PG[0], max_size=PG[0])).map(torch.tensor)


def close(a, b, tolerance=1e-5):
    """Equal up to `tolerance` relative to the largest entry of b, NaN never equal."""
    a, b = torch.as_tensor(a).double(), torch.as_tensor(b).double()
    assert b.isfinite().all()
    torch.testing.assert_close(a, b, rtol=0, atol=tolerance * max(1e-3, b.abs().max().item() if b.numel() else 0))


def randn(*shape, seed=0, scale=1.0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale


# --- the page, literally

def slow_softmax(x):
    top = max(x)
    e = [math.exp(v - top) for v in x]
    return [v / sum(e) for v in e]


def slow_std(x):
    return math.sqrt(sum((v - sum(x) / len(x)) ** 2 for v in x) / (len(x) - 1)) if len(x) > 1 else 0.0


def slow_advantages(rewards, scale):
    r = rewards.double().tolist()
    A = []
    for group in r:
        divisor = {"group": slow_std(group) + 1e-4, "batch": slow_std([v for other in r for v in other]) + 1e-4, "none": 1.0}[scale]
        A.append([0.0 if max(group) == min(group) else (v - sum(group) / len(group)) / divisor for v in group])
    return A


def slow_targets(group, T_q, eps):
    return [(1 - len(group) * eps) * p + eps for p in slow_softmax([r / T_q for r in group])]


def slow_policy_gradient(logps, step, objective, tau=INF, beta=0.0, delta=-1.0, sampling="token_truncate"):
    """Minus the rows of the table in section 3, plus beta * k3 aggregated like the tokens and not multiplied by any weight."""
    A, N, tokens, total = slow_advantages(step.rewards, loss.OWN_SCALE[objective]), step.P * step.G, sum(step.lengths.tolist()), 0.0
    old, ref, mu = step.old.double(), step.ref.double(), step.sampler.double()
    for x in range(step.P):
        if objective == "xdr" and tau == 0:
            a = [float(v == max(A[x])) / A[x].count(max(A[x])) for v in A[x]]
        elif objective == "xdr":
            a = slow_softmax([v / tau for v in A[x]])
        for i in range(step.G):
            n, T = x * step.G + i, int(step.lengths[x * step.G + i])
            for t in range(T):
                c, d = (logps[n, t] - old[n, t]).exp(), logps[n, t] - ref[n, t]
                unclipped = min(c, delta) if delta > 0 else c
                surrogate = min(unclipped * A[x][i], min(max(c, 1 - LOW), 1 + HIGH) * A[x][i])
                ratio = math.exp(old[n, t] - mu[n, t])
                ratio = {"none": 1.0, "token_truncate": min(ratio, CAP), "token_mask": ratio if ratio <= CAP else 0.0}[sampling]
                share = {"grpo": 1 / T / N, "dapo": 1 / tokens, "dr_grpo": 1 / (N * L), "xdr": 1 / (N * L)}[objective]
                weight = a[i] / L / step.P if objective == "xdr" else share      # xdr: mean over prompts of sum_i a_i * Ubar_i
                total = total - weight * ratio * surrogate + beta * share * ((-d).exp() + d - 1)
    return total


def slow_maxent(logps, step, tau, beta, norm, T_q=0.7, eps=0.0):
    """Section 2: mean over groups with unequal rewards of -sum_i w_i * log softmax_i(s)."""
    total, active = (logps * 0).sum(), 0
    for x, group in enumerate(step.rewards.double().tolist()):
        s, z = [], []
        for i, q in enumerate(slow_targets(group, T_q, eps)):
            n, T = x * step.G + i, int(step.lengths[x * step.G + i])
            divisor = {"length": T, "constant": L, "sum": 1}[norm]
            s.append(sum(logps[n, t] for t in range(T)) / divisor)
            z.append((math.log(q) + beta * sum(step.ref[n, t].item() for t in range(T)) / divisor) / (tau + beta))
        if max(group) != min(group):
            active += 1
            log_normaliser = sum(v.exp() for v in s).log()
            total = total - sum(w * (v - log_normaliser) for w, v in zip(slow_softmax(z), s))
    return total / max(1, active)


# --- one step, and the loss of some of its rows as the trainer composes it

def make_step(rewards, lengths, seed):
    """rewards (P, G); log-probs (N, T) of policy, old policy, reference and sampler, 0 outside the completions."""
    lengths = torch.tensor(lengths)
    N, T = len(lengths), int(lengths.max())
    mask = torch.arange(T) < lengths[:, None]
    logps = (randn(N, T, seed=seed, scale=0.5) - 1.5) * mask
    old, ref = (logps + randn(N, T, seed=seed + k, scale=0.4) * mask for k in (1, 2))
    return SimpleNamespace(rewards=rewards, P=rewards.shape[0], G=rewards.shape[1], lengths=lengths, mask=mask, logps=logps,
                           old=old, ref=ref, sampler=old + randn(N, T, seed=seed + 3, scale=0.4) * mask)


@st.composite
def steps(draw):
    rewards = draw(groups)
    lengths = draw(st.lists(st.integers(1, 5), min_size=rewards.numel(), max_size=rewards.numel()))
    return make_step(rewards, lengths, draw(st.integers(0, 10_000)))


EXAMPLE = make_step(torch.tensor([[1.0, 0, 0, 1], [0, 0.1, 0.1, -1], [0.1, 0.1, 0.1, 0.1]]), [3, 1, 4, 2, 5, 5, 1, 2, 3, 3, 1, 5], 7)


def policy_gradient(logps, step, objective, tau=INF, beta=0.0, delta=-1.0, sampling="token_truncate", rows=slice(None), weights=None):
    N, width = step.mask.shape[0], logps.shape[1]
    old, ref, sampler, mask = (x[rows, :width] for x in (step.old, step.ref, step.sampler, step.mask))
    A = loss.objective_advantages(objective, step.rewards, loss.OWN_SCALE[objective], tau, weights).flatten()[rows]
    share = loss.token_weights(loss.AGGREGATION[objective], mask, N, int(step.mask.sum()), L)
    surrogate, _, _ = loss.clipped_surrogate(logps, old, A, LOW, HIGH, delta)
    total = -(share * loss.importance_ratio(old, sampler, sampling, CAP) * surrogate).sum()
    return total + beta * (share * loss.k3_kl(logps, ref)).sum()


def scores(logps, step, norm):
    return loss.sequence_scores(logps * step.mask, step.lengths, norm, L).view(step.P, step.G)


def target_weights(step, tau, beta, norm, T_q=0.7, eps=0.0):
    return loss.maxent_weights(loss.log_reward_targets(step.rewards, T_q, eps), scores(step.ref, step, norm), tau, beta)


def maxent(logps, step, tau, beta, norm, T_q=0.7, eps=0.0):
    w = target_weights(step, tau, beta, norm, T_q, eps)
    return loss.listwise_loss(scores(logps, step, norm), w, loss.active_groups(step.rewards, "all"))


def mode_entropy(logps, step):
    return loss.mode_entropy_loss(scores(logps, step, "sum"), step.rewards, step.P * L)


def value_and_grad(f, x, *args, **kwargs):
    leaf = x.clone().requires_grad_()
    value = f(leaf, *args, **kwargs)
    return value.detach(), torch.autograd.grad(value, leaf)[0]


def assert_same(ours, literal):
    """(value, gradient) twice, equal to 1e-5 of the largest gradient entry, and of the loss or of what its terms add up to."""
    close(ours[1], literal[1])
    assert abs(float(ours[0]) - float(literal[0])) <= 1e-5 * max(abs(float(literal[0])), literal[1].abs().sum().item())


def compare(fast, slow, step, **case):
    assert_same(value_and_grad(fast, step.logps, step, **case), value_and_grad(slow, step.logps.double(), step, **case))


# --- advantages and targets

@examples
@given(groups, st.sampled_from(SCALES))
def test_advantages_equal_the_slow_loop(rewards, scale):
    close(loss.group_advantages(rewards, scale), slow_advantages(rewards, scale))


@pytest.mark.parametrize("scale", SCALES)
def test_equal_rewards_have_advantage_exactly_zero_though_their_mean_is_inexact(scale):
    for G in range(1, 33):
        rewards = torch.tensor([[value] * G for value in (0.1, 1 / 3, 1e-8, 12345.678)])
        assert torch.equal(loss.group_advantages(rewards, scale), torch.zeros(4, G))
    assert (torch.full((7,), 0.1) - torch.full((7,), 0.1).mean()).abs().max() > 0      # the naive formula does leak


@pytest.mark.parametrize("scale", SCALES)
def test_a_batch_of_one_row_has_advantage_zero(scale):
    assert loss.group_advantages(torch.tensor([[0.7]]), scale).tolist() == [[0.0]]


def test_unknown_scale_is_an_error():
    with pytest.raises(ValueError, match="scale_rewards='std'"):
        loss.group_advantages(torch.zeros(2, 2), "std")


@examples
@given(groups, st.sampled_from([0.05, 1.0, 30.0]), st.sampled_from([0.0, 0.3, 1.0]))
def test_targets_equal_the_formula_and_sum_to_one(rewards, T_q, share):
    eps = share / rewards.shape[1]      # 0, something, the largest allowed 1/G
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
    close(loss.log_reward_targets(rewards, 1e-4, 0.01), [[math.log(0.98), math.log(0.01), math.log(0.01)]], 1e-6)
    assert loss.reward_targets(rewards, 1e-40, 0.0).tolist() == [[1.0, 0.0, 0.0]]


def test_adding_a_constant_to_the_rewards_of_a_group_changes_nothing():
    rewards = torch.tensor([[1.0, 0.125, 0.0, 1.0], [0.25, 0.0, 0.0, 0.5]])
    shifted = rewards + torch.tensor([[4096.0], [-3.0]])        # exact in fp32, so the answer can be too
    for T_q, eps in ((0.03, 0.0), (1.0, 0.1), (7.0, 0.25)):
        u, v = (loss.log_reward_targets(r, T_q, eps) for r in (rewards, shifted))
        assert torch.equal(u, v)
        assert torch.equal(loss.maxent_weights(u, None, 0.2, 0.0), loss.maxent_weights(v, None, 0.2, 0.0))


# --- weights

@examples
@given(st.integers(0, 10_000), st.integers(1, 6), st.sampled_from([0.01, 0.3, 5.0]), st.sampled_from([0.0, 0.02, 1.0, 50.0]))
def test_weights_equal_the_closed_form_and_rows_sum_to_one(seed, G, tau, beta):
    u, l = randn(3, G, seed=seed), randn(3, G, seed=seed + 1, scale=3.0)
    w = loss.maxent_weights(u, l, tau, beta)
    slow = [slow_softmax([(a + beta * b) / (tau + beta) for a, b in zip(*pair)]) for pair in zip(u.double().tolist(), l.double().tolist())]
    close(w, slow, 1e-4 if tau == 0.01 else 1e-5)       # exponents up to 500 at the smallest tau + beta
    close(w.sum(1), torch.ones(3), 1e-6)


@examples
@given(st.integers(0, 10_000), st.sampled_from([0.0, 0.3, 2.0]), st.sampled_from([0.05, 0.4]))
def test_weights_maximise_utility_plus_entropy_minus_kl(seed, beta, tau):
    u, l = randn(1, 5, seed=seed).double(), randn(1, 5, seed=seed + 1).double()

    def J(w):
        return (w * u).sum(1) + tau * torch.special.entr(w).sum(1) - beta * (w * (w.log() - l.log_softmax(1))).sum(1)

    w = loss.maxent_weights(u, l, tau, beta)
    other = (randn(200, 5, seed=seed + 2).double() * 3).softmax(1)
    for share in (1.0, 0.1, 1e-3):      # far away and next to w
        assert (J(w) > J((1 - share) * w + share * other)).all()


def test_tau_inf_gives_uniform_weights_and_wins_over_beta():
    u, l = randn(2, 4), torch.full((2, 4), math.nan)
    for beta in (0.0, 3.0, 1e30):
        assert torch.equal(loss.maxent_weights(u, l, INF, beta), torch.full((2, 4), 0.25))


def test_beta_inf_gives_the_reference_and_both_infinite_is_an_error():
    u, l = randn(2, 4), randn(2, 4, seed=1)
    close(loss.maxent_weights(u, l, 0.5, INF), l.softmax(1))
    close(loss.maxent_weights(u, l, 0.5, 1e7), l.softmax(1), 1e-4)       # and it is the limit
    with pytest.raises(ValueError, match="infinite"):
        loss.maxent_weights(u, l, INF, INF)


def test_tau_plus_beta_zero_is_uniform_over_the_exact_argmax_of_the_rewards():
    rewards = torch.tensor([[0.1, 0.1, 0.0, 0.1], [0.3, 0.3 + 1e-6, 0.0, 0.0], [0.7] * 4])
    for u in (rewards, loss.log_reward_targets(rewards, 0.5, 0.0), loss.log_reward_targets(rewards, 1.0, 0.05)):
        w = loss.maxent_weights(u, torch.full((3, 4), math.nan), 0.0, 0.0)
        close(w, [[1 / 3, 1 / 3, 0, 1 / 3], [0, 1, 0, 0], [0.25] * 4], 1e-7)


@pytest.mark.parametrize("tau", [1e-6, 1e-30, 1e-46, 1e-300])
def test_tiny_tau_is_the_limit_and_not_nan(tau):
    close(loss.maxent_weights(torch.tensor([[1.0, 0.0, 1.0]]), None, tau, 0.0), [[0.5, 0, 0.5]], 1e-7)


def test_beta_zero_ignores_the_reference_and_beta_without_one_is_an_error():
    u = randn(2, 3)
    for l in (torch.full((2, 3), math.nan), torch.full((2, 3), INF), torch.full((2, 3), -INF)):
        assert torch.equal(loss.maxent_weights(u, l, 0.5, 0.0), loss.maxent_weights(u, None, 0.5, 0.0))
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
    w, r = torch.tensor([[0.5, 0.25, 0.25], [1.0, 0.0, 0.0], [0.2, 0.3, 0.5]]), torch.tensor([[0.5, 1, 0], [1, 1, 0], [0, 0, 0]])
    H = 1.5 * math.log(2)
    expected = {"entropy": H / 2, "entropy_norm": H / 2 / math.log(3), "effective_rollouts": (math.exp(H) + 1) / 2, "max": 0.75, "incorrect_mass": 0.375}
    metrics = loss.weight_metrics(w, r, torch.tensor([True, True, False]))
    assert metrics == {f"weights/{k}": pytest.approx(v, rel=1e-6) for k, v in expected.items()}
    assert loss.weight_metrics(w, r, torch.zeros(3, dtype=torch.bool)) == {}


# --- losses

def test_sequence_scores_divide_by_length_or_constant_or_nothing():
    logps, lengths = torch.tensor([[-1.0, -2.0, -3.0], [-4.0, 0.0, 0.0]]), torch.tensor([3, 1])
    for norm, expected in (("length", [-2, -4]), ("constant", [-0.75, -0.5]), ("sum", [-6, -4])):
        close(loss.sequence_scores(logps, lengths, norm, L), expected)


@examples
@given(st.integers(0, 10_000), st.lists(st.booleans(), min_size=4, max_size=4), st.sampled_from([None, 10.0]))
def test_listwise_gradient_is_p_minus_w_and_exactly_zero_in_inactive_groups(seed, active, norm):
    s, w, active = randn(4, 5, seed=seed, scale=4.0), randn(4, 5, seed=seed + 1).softmax(1), torch.tensor(active)
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
def test_mode_entropy_equals_the_slow_loop_and_pulls_correct_rows_to_equal_likelihood(rewards, seed):
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
    close(grad, slow_grad, 1e-4)        # fp32 of p at scores near 20
    assert (grad[slow_grad == 0] == 0).all()        # wrong rows, single correct rows, all-equal groups: exactly 0


def test_mode_entropy_gradient_vanishes_at_equal_likelihood_and_in_all_equal_groups():
    S = torch.tensor([[-3.0, -3.0, -9.0, -3.0], [-1.0, -2.0, -3.0, -4.0]])
    value, grad = value_and_grad(loss.mode_entropy_loss, S, torch.tensor([[1.0, 1, 0, 1], [0.1] * 4]), 2 * L)
    close(value, math.log(3) / (2 * L), 1e-6)
    assert grad.abs().max() < 1e-8


@pytest.mark.parametrize("A, log_ratio, delta, value, slope, low, high", [
    (+2, +0.5, -1, 2 * 1.28, 0, False, True),                                   # good enough: stop pushing up
    (+2, -0.5, -1, 2 * math.exp(-0.5), 2 * math.exp(-0.5), False, False),       # a good token that fell: full pull
    (-2, -0.5, -1, -2 * 0.8, 0, True, False),                                   # low enough: stop pushing down
    (-2, +0.5, -1, -2 * math.exp(0.5), -2 * math.exp(0.5), False, False),       # a bad token that rose: full push, unbounded
    (-2, +0.5, 1.4, -2 * 1.4, 0, False, False),                                 # unless delta caps it
    (-2, +0.3, 1.4, -2 * math.exp(0.3), -2 * math.exp(0.3), False, False),
    (+2, +0.5, 1.4, 2 * 1.28, 0, False, True),
    (+2, -0.5, 1.4, 2 * math.exp(-0.5), 2 * math.exp(-0.5), False, False),
    (-2, -0.5, 1.4, -2 * 0.8, 0, True, False),
    (+2, +0.5, 1.28, 2 * 1.28, 0, False, True),                                 # the cap does not hide a clipped token
    (0, +9.0, -1, 0, 0, False, False),
    (+2, +0.1, -1, 2 * math.exp(0.1), 2 * math.exp(0.1), False, False),
])
def test_surrogate_is_ppos_minimum_for_both_signs_with_delta_on_the_unclipped_branch(A, log_ratio, delta, value, slope, low, high):
    logps = torch.full((1, 1), log_ratio - 1, requires_grad=True)
    surrogate, is_low, is_high = loss.clipped_surrogate(logps, torch.tensor([[-1.0]]), torch.tensor([float(A)]), LOW, HIGH, delta)
    close(surrogate, [[value]])
    close(torch.autograd.grad(surrogate.sum(), logps)[0], [[slope]])
    assert (is_low.item(), is_high.item()) == (low, high)


@pytest.mark.parametrize("low, high", [(LOW, HIGH), (0.0, 0.0)])
def test_with_old_equal_to_new_the_gradient_is_reinforce(low, high):
    A = torch.tensor([1.5, -0.3, 0.0])
    _, grad = value_and_grad(lambda x: loss.clipped_surrogate(x, x.detach(), A, low, high)[0].sum(), randn(3, 4, scale=3.0))
    close(grad, A[:, None].expand(3, 4), 1e-6)


@pytest.mark.parametrize("A", [1.0, 0.0])
def test_a_token_whose_ratio_overflows_is_clipped_and_not_nan(A):
    logps = torch.tensor([[100.0, -200.0]])     # exp(100) is inf in fp32
    value, grad = value_and_grad(lambda x: loss.clipped_surrogate(x, torch.zeros(1, 2), torch.tensor([A]), LOW, HIGH)[0].sum(), logps)
    assert value.item() == pytest.approx(A * (1 + HIGH)) and grad.tolist() == [[0.0, 0.0]]


@examples
@given(st.lists(st.integers(1, 5), min_size=1, max_size=6), st.integers(0, 3))
def test_token_weights_give_every_row_its_share_of_the_loss(lengths, pad):
    T = torch.tensor(lengths)
    mask = (torch.arange(5 + pad) < T[:, None]).float()
    n, tokens = len(T), sum(lengths)
    for kind, share in (("row_mean", torch.ones(n) / n), ("token_mean", T / tokens), ("constant", T / (n * L))):
        weights = loss.token_weights(kind, mask, n, tokens, L)
        close(weights.sum(1), share, 1e-6)
        close(weights, mask * (share / T)[:, None], 1e-6)
    first = loss.token_weights("row_mean", mask[:1], n, tokens, L)      # one row of a larger step keeps its share
    close(first, loss.token_weights("row_mean", mask, n, tokens, L)[:1], 1e-7)


def test_k3_is_the_formula_never_negative_and_clamped():
    logps, ref = randn(50), randn(50, seed=1)
    close(loss.k3_kl(logps, ref), [math.exp(-d) + d - 1 for d in (logps.double() - ref.double()).tolist()])
    assert (loss.k3_kl(logps, ref) >= 0).all() and loss.k3_kl(logps, logps).abs().max() == 0
    close(loss.k3_kl(torch.tensor([0.0, -500.0]), torch.tensor([-500.0, 0.0])), [19.0, math.exp(20) - 21])


def test_k3_averages_to_the_kl_from_policy_to_reference_under_the_policy():
    p, q = randn(6).double().log_softmax(0), randn(6, seed=1).double().log_softmax(0)
    close((p.exp() * loss.k3_kl(p, q)).sum(), (p.exp() * (p - q)).sum(), 1e-9)


def test_importance_ratio_truncates_or_masks_or_is_off_and_carries_no_gradient():
    old, sampler = torch.tensor([[0.0, -1.0, -1.0, 0.0]], requires_grad=True), torch.tensor([[0.0, -0.5, -3.0, -500.0]])
    for kind, expected in (("token_truncate", [1, math.exp(-0.5), 3, 3]), ("token_mask", [1, math.exp(-0.5), 0, 0]), ("none", [1] * 4)):
        ratio = loss.importance_ratio(old, sampler, kind, 3.0)
        close(ratio, [expected], 1e-6)
        assert not ratio.requires_grad


# --- whole objectives

CASES = [dict(objective="grpo"), dict(objective="grpo", beta=0.3, delta=1.4), dict(objective="dapo", beta=0.3), dict(objective="dapo", sampling="token_mask"),
         dict(objective="dr_grpo"), dict(objective="dr_grpo", beta=0.3, sampling="none"), dict(objective="xdr"), dict(objective="xdr", tau=0.4, beta=0.3),
         dict(objective="xdr", tau=0.1, delta=1.4), dict(objective="xdr", tau=0.0)]


@pytest.mark.parametrize("case", CASES, ids=str)
@settings(examples, max_examples=15)
@given(steps())
def test_policy_gradient_objectives_equal_the_slow_loop(case, step):
    compare(policy_gradient, slow_policy_gradient, step, **case)


@settings(examples, max_examples=60)
@given(steps(), st.sampled_from(NORMS), st.sampled_from([(0.2, 0.0, 0.0), (0.5, 0.3, 0.02), (0.0, 1.0, 0.0), (3.0, 0.0, 0.1)]))
def test_maxent_equals_the_slow_loop(step, norm, target):
    tau, beta, eps = target
    compare(maxent, slow_maxent, step, tau=tau, beta=beta, norm=norm, eps=eps)


@examples
@given(steps())
def test_maxent_as_policy_gradient_is_the_mean_over_prompts_of_w_minus_one_over_G(step):
    w = target_weights(step, 0.3, 0.1, "length")
    _, grad = value_and_grad(policy_gradient, step.old, step, "maxent", weights=w, sampling="none")
    close(grad, -(w - 1 / step.G).reshape(-1, 1) * step.mask / (step.P * L))


@pytest.mark.parametrize("G", [6, 41])      # at 41, G * uniform weights would not be exactly 1
def test_xdr_at_tau_inf_is_dr_grpo_to_the_bit(G):
    step = make_step(randn(2, G), [1 + 7 * i % 5 for i in range(2 * G)], seed=5)
    xdr, dr_grpo = (value_and_grad(policy_gradient, step.logps, step, name, beta=0.1) for name in ("xdr", "dr_grpo"))
    assert torch.equal(xdr[0], dr_grpo[0]) and torch.equal(xdr[1], dr_grpo[1])


def micro_batches(step, f, order, cuts):
    """Sum of values and gradients of f(leaf of the rows, rows), every micro-batch trimmed to its own longest row."""
    leaf, total = step.logps.clone().requires_grad_(), 0.0
    for a, b in itertools.pairwise([0, *sorted(cuts), len(order)]):
        rows = torch.tensor(order[a:b], dtype=torch.long)
        if len(rows):
            part = f(leaf[rows, :int(step.lengths[rows].max())], rows)
            part.backward()
            total += part.item()
    return total, leaf.grad


@pytest.mark.parametrize("case", CASES, ids=str)
@settings(examples, max_examples=15)
@given(steps(), st.data())
def test_any_order_and_split_of_the_rows_gives_the_same_policy_gradient(case, step, data):
    N = step.P * step.G
    order, cuts = data.draw(st.permutations(range(N))), data.draw(st.lists(st.integers(0, N), max_size=4))
    split = micro_batches(step, lambda x, rows: policy_gradient(x, step, rows=rows, **case), order, cuts)
    assert_same(split, value_and_grad(policy_gradient, step.logps, step, **case))


@pytest.mark.parametrize("norm", [*NORMS, "modes"])
@examples
@given(steps(), st.data())
def test_cut_groups_train_as_whole_ones_through_row_coefficients(norm, step, data):
    """dL/ds of all scores, detached, times the scores of some rows: for the listwise and the mode entropy loss."""
    N = step.P * step.G
    order, cuts = data.draw(st.permutations(range(N))), data.draw(st.lists(st.integers(0, N), max_size=4))
    if norm == "modes":
        norm = "sum"
        _, whole = value_and_grad(mode_entropy, step.logps, step)
        _, coefficients = value_and_grad(loss.mode_entropy_loss, scores(step.logps, step, norm), step.rewards, step.P * L)
    else:
        w, active = target_weights(step, 0.3, 0.1, norm), loss.active_groups(step.rewards, "all")
        _, whole = value_and_grad(maxent, step.logps, step, 0.3, 0.1, norm)
        _, coefficients = value_and_grad(loss.listwise_loss, scores(step.logps, step, norm), w, active)

    def surrogate(x, rows):
        masked = x * step.mask[rows, :x.shape[1]]
        return (coefficients.flatten()[rows] * loss.sequence_scores(masked, step.lengths[rows], norm, L)).sum()

    close(micro_batches(step, surrogate, order, cuts)[1], whole)


def test_whole_groups_in_micro_batches_add_up_under_one_norm():
    step, w, s = EXAMPLE, target_weights(EXAMPLE, 0.3, 0.1, "length"), scores(EXAMPLE.logps, EXAMPLE, "length")
    active = loss.active_groups(step.rewards, "all")        # two of the three
    parts = [loss.listwise_loss(s[x:x + 1], w[x:x + 1], active[x:x + 1], norm=2) for x in range(3)]
    close(sum(parts), loss.listwise_loss(s, w, active))
    parts = [loss.mode_entropy_loss(s[x:x + 1], step.rewards[x:x + 1], 3 * L) for x in range(3)]
    close(sum(parts), loss.mode_entropy_loss(s, step.rewards, 3 * L))


@pytest.mark.parametrize("case", CASES, ids=str)
@settings(examples, max_examples=10)
@given(steps(), st.integers(1, 4))
def test_more_padding_changes_nothing(case, step, pad):
    wide = SimpleNamespace(**vars(step))
    for name in ("mask", "logps", "old", "ref", "sampler"):
        setattr(wide, name, torch.nn.functional.pad(getattr(step, name), (0, pad)))
    for f, arguments in ((policy_gradient, case), (maxent, dict(tau=0.3, beta=0.1, norm="length"))):
        value, grad = value_and_grad(f, wide.logps, wide, **arguments)
        assert_same((value, grad[:, :-pad]), value_and_grad(f, step.logps, step, **arguments))
        assert (grad[:, -pad:] == 0).all()


@pytest.mark.parametrize("G", [1, 2, 7, 41])      # float(1/41) * 41 is not 1 in fp32
def test_equal_rewards_give_exactly_zero_gradient(G):
    step = make_step(torch.tensor([[0.1] * G, [1 / 3] * G]), [1 + i % 5 for i in range(2 * G)], 3)
    as_advantages = dict(objective="maxent", weights=target_weights(step, 0.3, 0.0, "length"))
    for case in [*CASES, as_advantages]:
        value, grad = value_and_grad(policy_gradient, step.logps, step, **case | {"beta": 0.0})
        assert value == 0 and (grad == 0).all()
    for f, arguments in ((maxent, dict(tau=0.3, beta=0.1, norm="length")), (mode_entropy, {})):
        value, grad = value_and_grad(f, step.logps, step, **arguments)
        assert value == 0 and (grad == 0).all()


@pytest.mark.parametrize("objective", ["grpo", "dapo", "dr_grpo", "xdr", "maxent", "listwise"])
def test_every_objective_raises_the_best_rows_and_lowers_the_worst(objective):
    step = make_step(torch.tensor([[1.0, 0, 0, 0], [0, 0, 0, 1]]), [3] * 8, 1)
    if objective == "listwise":
        _, grad = value_and_grad(maxent, step.old, step, 0.2, 0.0, "length")
    else:
        _, grad = value_and_grad(policy_gradient, step.old, step, objective, tau=0.5, weights=target_weights(step, 0.2, 0.0, "length"))
    best = (step.rewards == 1).flatten()
    assert (grad[best][step.mask[best]] < 0).all() and (grad[~best][step.mask[~best]] > 0).all()


def wrong_std(rewards, scale):
    return (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True, unbiased=False) + 1e-4)


MUTATIONS = {
    "advantages of the other sign": ("group_advantages", lambda f: lambda r, scale: -f(r, scale)),
    "std over G instead of G - 1": ("group_advantages", lambda f: wrong_std),
    "no gradient through the ratio": ("clipped_surrogate", lambda f: lambda x, *a: f(x.detach(), *a)),
    "clip sides swapped": ("clipped_surrogate", lambda f: lambda x, old, A, low, high, delta: f(x, old, A, high, low, delta)),
    "no delta": ("clipped_surrogate", lambda f: lambda x, old, A, low, high, delta: f(x, old, A, low, high)),
    "maximum for negative advantages": ("clipped_surrogate", lambda f: lambda x, old, A, *a: (-f(x, old, -A, *a)[0], None, None)),
    "KL the other way round": ("k3_kl", lambda f: lambda x, ref: f(ref, x)),
    "no gradient through KL": ("k3_kl", lambda f: lambda x, ref: f(x.detach(), ref)),
    "padding counted": ("token_weights", lambda f: lambda kind, mask, *a: f(kind, torch.ones_like(mask), *a)),
    "per token instead of per row": ("token_weights", lambda f: lambda kind, *a: f("token_mean", *a)),
    "no sampler correction": ("importance_ratio", lambda f: lambda old, mu, kind, cap: f(old, mu, "none", cap)),
}


def check_mutation(monkeypatch, mutation, check, **case):
    """The comparison passes, and fails once one function of loss.py is replaced by a wrong one."""
    check(step=EXAMPLE, **case)
    function, mutate = mutation
    monkeypatch.setattr(loss, function, mutate(getattr(loss, function)))
    with pytest.raises(AssertionError):
        check(step=EXAMPLE, **case)


@pytest.mark.parametrize("name", MUTATIONS)
def test_the_slow_loop_notices(name, monkeypatch):
    check_mutation(monkeypatch, MUTATIONS[name], partial(compare, policy_gradient, slow_policy_gradient), objective="grpo", beta=0.3, delta=1.4)


LISTWISE_MUTATIONS = {
    "weights without the reference": ("maxent_weights", lambda f: lambda u, l, tau, beta: f(u, None, tau, 0.0)),
    "tau alone as divisor": ("maxent_weights", lambda f: lambda u, l, tau, beta: f(u + beta * l, None, tau, 0.0)),
    "rewards instead of log targets": ("log_reward_targets", lambda f: lambda r, T_q, eps: r),
    "equal groups trained": ("listwise_loss", lambda f: lambda s, w, active: f(s, w, torch.ones_like(active))),
    "mean over all groups": ("listwise_loss", lambda f: lambda s, w, active: f(s, w, active, len(s))),
    "scores averaged over padding": ("sequence_scores", lambda f: lambda x, lengths, *a: f(x, torch.full_like(lengths, x.shape[1]), *a)),
}


@pytest.mark.parametrize("name", LISTWISE_MUTATIONS)
def test_the_slow_listwise_loop_notices(name, monkeypatch):
    check_mutation(monkeypatch, LISTWISE_MUTATIONS[name], partial(compare, maxent, slow_maxent), tau=0.5, beta=0.3, norm="length", eps=0.02)


def test_inputs_come_back_unchanged():
    step, w = EXAMPLE, target_weights(EXAMPLE, 0.3, 0.1, "length")
    hidden, head, targets = randn(9, 3), randn(11, 3), torch.arange(9)
    inputs = [x for x in vars(step).values() if torch.is_tensor(x)] + [w, hidden, head, targets]
    before = [x.clone() for x in inputs]
    for case in CASES:
        policy_gradient(step.logps, step, **case)
    for norm in NORMS:
        maxent(step.logps, step, 0.3, 0.1, norm, eps=0.1)
    mode_entropy(step.logps, step)
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
    close(value_and_grad(lambda h: loss.token_logps(h, weight, targets, 1.0, 3, want_entropy=False)[0].sum(), hidden)[1], grad)


def test_no_tokens_give_empty_log_probs_and_zero_gradients():
    hidden, weight = torch.zeros(0, 4, requires_grad=True), randn(6, 4).requires_grad_()
    logps, entropy = loss.token_logps(hidden, weight, torch.zeros(0, dtype=torch.long), 1.0, 3)
    (logps.sum() + entropy.sum()).backward()
    assert logps.shape == entropy.shape == (0,) and hidden.grad.shape == (0, 4) and (weight.grad == 0).all()


def test_huge_logits_stay_finite():
    hidden, weight = (randn(5, 3) * 100).requires_grad_(), (randn(7, 3, seed=1) * 100).requires_grad_()
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
    close(h.grad, exact[1], 0.02)       # bfloat16 has 8 bits


MEMORY = """
import torch, loss
torch.set_num_threads(1)
def peak():     # MiB; of this program alone, unlike ru_maxrss, which starts at the parent's
    return int(next(line for line in open("/proc/self/status") if line.startswith("VmHWM")).split()[1]) / 1024
def learn(n, V=16384, H=8, chunk=32):
    hidden, weight = torch.randn(n, H, requires_grad=True), torch.randn(V, H, requires_grad=True)
    logps, entropy = loss.token_logps(hidden, weight, torch.arange(n), 1.0, chunk)
    (logps.sum() + entropy.sum()).backward()
learn(96)       # three chunks: in the backward of one, tensors of the last are still alive
before = peak()
learn(2048)
print(peak() - before)
"""


def test_memory_does_not_grow_with_tokens_times_vocabulary():
    """2,048 tokens need at most 32 MiB more than 3 chunks of 32; keeping their logits even once would take 128 MiB."""
    run = subprocess.run([sys.executable, "-c", MEMORY], capture_output=True, text=True, cwd=Path(loss.__file__).parent, timeout=120)
    assert run.returncode == 0, run.stderr
    assert float(run.stdout) < 32
