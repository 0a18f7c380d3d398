"""Rewards to advantages, targets and weights, against slow loops and in their limits."""

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from loss_cases import OBJECTIVES
from loss_steps import (
    EXAMPLE,
    INF,
    L,
    changed,
    close,
    config,
    examples,
    group_of,
    groups,
    make_step,
    randn,
    targets_of,
)
from slow_loss import slow_advantages, slow_bonus, slow_semantic_entropy, slow_softmax, slow_targets

import learner
import loss

SCALES = ("group", "batch", "mean", "none")
pairs = groups(least=2)


@examples
@given(groups(), st.sampled_from(SCALES))
def test_advantages_equal_the_slow_loop(rewards, scale):
    close(loss.group_advantages(rewards, scale), slow_advantages(rewards.double().tolist(), scale))


@pytest.mark.parametrize("scale", SCALES)
def test_equal_rewards_have_advantage_exactly_zero_though_their_mean_is_inexact(scale):
    for G in range(1, 33):
        rewards = torch.tensor([[value] * G for value in (0.1, 1 / 3, 1e-8, 12345.678)])
        assert torch.equal(loss.group_advantages(rewards, scale), torch.zeros(4, G))
    equal = torch.full((7,), 0.1)
    assert (equal - equal.mean()).abs().max() > 0  # the naive formula does leak


@pytest.mark.parametrize("scale", SCALES)
def test_a_batch_of_one_row_has_advantage_zero(scale):
    assert loss.group_advantages(torch.tensor([[0.7]]), scale).tolist() == [[0.0]]


def test_unknown_scale_is_an_error():
    with pytest.raises(ValueError, match="scale_rewards='std'"):
        loss.group_advantages(torch.zeros(2, 2), "std")


@examples
@given(groups(), st.sampled_from([0.05, 1.0, 30.0]), st.sampled_from([0.0, 0.3, 1.0]))
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
    floor = math.log(0.01)
    close(loss.log_reward_targets(rewards, 1e-4, 0.01), [[math.log(0.98), floor, floor]], 1e-6)
    assert loss.reward_targets(rewards, 1e-40, 0.0).tolist() == [[1.0, 0.0, 0.0]]


def test_adding_a_constant_to_the_rewards_of_a_group_changes_nothing():
    rewards = torch.tensor([[1.0, 0.125, 0.0, 1.0], [0.25, 0.0, 0.0, 0.5]])
    shifted = rewards + torch.tensor([[4096.0], [-3.0]])  # exact in fp32, so the answer can be too
    for T_q, eps in ((0.03, 0.0), (1.0, 0.1), (7.0, 0.25)):
        u = loss.log_reward_targets(rewards, T_q, eps)
        v = loss.log_reward_targets(shifted, T_q, eps)
        assert torch.equal(u, v)
        w = loss.maxent_weights(u, None, 0.2, 0.0)
        assert torch.equal(w, loss.maxent_weights(v, None, 0.2, 0.0))


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
    slow = []
    for us, ls in zip(u.double().tolist(), l.double().tolist()):
        slow.append(slow_softmax([(a + beta * b) / (tau + beta) for a, b in zip(us, ls)]))
    close(w, slow, 1e-4 if tau == 0.01 else 1e-5)  # exponents up to 500 at the smallest tau + beta
    close(w.sum(1), torch.ones(3), 1e-6)


@examples
@given(st.integers(0, 10_000), st.sampled_from([0.0, 0.3, 2.0]), st.sampled_from([0.05, 0.4]))
def test_weights_maximise_utility_plus_entropy_minus_kl(seed, beta, tau):
    u, l = randn(1, 5, seed=seed).double(), randn(1, 5, seed=seed + 1).double()

    def J(w):
        entropy = torch.special.entr(w).sum(1)
        kl = (w * (w.log() - l.log_softmax(1))).sum(1)
        return (w * u).sum(1) + tau * entropy - beta * kl

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
    sharp = loss.log_reward_targets(rewards, 0.5, 0.0)
    lifted = loss.log_reward_targets(rewards, 1.0, 0.05)
    for u in (rewards, sharp, lifted):
        w = loss.maxent_weights(u, torch.full((3, 4), math.nan), 0.0, 0.0)
        close(w, [[1 / 3, 1 / 3, 0, 1 / 3], [0, 1, 0, 0], [0.25] * 4], 1e-7)


@pytest.mark.parametrize("tau", [1e-6, 1e-30, 1e-46, 1e-300])
def test_tiny_tau_is_the_limit_and_not_nan(tau):
    w = loss.maxent_weights(torch.tensor([[1.0, 0.0, 1.0]]), None, tau, 0.0)
    close(w, [[0.5, 0, 0.5]], 1e-7)


def test_beta_zero_ignores_the_reference_and_beta_without_one_is_an_error():
    u = randn(2, 3)
    without = loss.maxent_weights(u, None, 0.5, 0.0)
    for value in (math.nan, INF, -INF):
        l = torch.full((2, 3), value)
        assert torch.equal(loss.maxent_weights(u, l, 0.5, 0.0), without)
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
    # the lowest reward need not be 0
    for shift in (-2.0, 2.0):
        assert loss.active_groups(rewards + shift, "wrong").tolist() == [True, True, True, False]


def test_weight_metrics_are_means_over_active_groups():
    w = torch.tensor([[0.5, 0.25, 0.25], [1.0, 0.0, 0.0], [0.2, 0.3, 0.5]])
    r = torch.tensor([[0.5, 1, 0], [1, 1, 0], [0, 0, 0]])
    H = 1.5 * math.log(2)  # of the first group; that of the second is 0
    # excess: one row at the top, then two, and below 0 if w is on one of them
    room = math.log(3) - math.log(2)
    expected = {
        "entropy": H / 2,
        "entropy_norm": H / 2 / math.log(3),
        "effective_rollouts": (math.exp(H) + 1) / 2,
        "max": 0.75,
        "incorrect_mass": 0.375,
        "excess_entropy": (H / math.log(3) - math.log(2) / room) / 2,
    }
    metrics = loss.weight_metrics(w, r, torch.tensor([True, True, False]))
    assert metrics == {f"weights/{k}": pytest.approx(v, rel=1e-6) for k, v in expected.items()}
    # with one that has no row below its best
    whole = loss.weight_metrics(w, r, torch.tensor([True, True, True]))
    assert whole["weights/incorrect_mass"] == metrics["weights/incorrect_mass"]
    assert whole["weights/entropy"] != metrics["weights/entropy"]
    assert loss.weight_metrics(w, r, torch.zeros(3, dtype=torch.bool)) == {}


def test_the_pull_is_the_share_of_p_beside_w_by_hand():
    w = torch.tensor([[1.0, 0.0], [0.75, 0.25], [0.5, 0.5]])
    flat = torch.zeros(3, 2)
    assert loss.pull(flat, w, torch.tensor([True, True, False])) == {"weights/pull": 0.0}
    # p = (0.75, 0.25): half of what the first group's w asks for, all of what the second's does
    scores = torch.tensor([[math.log(3.0), 0.0]] * 3)
    metrics = loss.pull(scores, w, torch.tensor([True, True, False]))
    assert metrics == {"weights/pull": pytest.approx(0.75)}
    # uniform weights ask for nothing that could be shared
    assert loss.pull(scores, w, torch.ones(3, dtype=torch.bool)) == metrics
    assert loss.pull(scores, w, torch.zeros(3, dtype=torch.bool)) == {}


def excess_entropy(w, r):
    metrics = loss.weight_metrics(w, r, torch.ones(len(r), dtype=torch.bool))
    return metrics.get("weights/excess_entropy")


@examples
@given(pairs, st.integers(0, 10_000))
def test_excess_entropy_equals_the_slow_loop(rewards, seed):
    w = randn(*rewards.shape, seed=seed).softmax(1)
    excess = []
    for r, v in zip(rewards.tolist(), w.double().tolist()):
        top = math.log(r.count(max(r)))
        room = math.log(len(r)) - top
        if room > 0:  # not where all rows are best
            H = -sum(x * math.log(x) for x in v)
            excess.append((H - top) / room)
    if excess:
        expected = sum(excess) / len(excess)
        assert excess_entropy(w, rewards) == pytest.approx(expected, abs=1e-5)
    else:
        assert excess_entropy(w, rewards) is None


def test_excess_entropy_is_0_with_equally_likely_best_rows_and_1_with_uniform_weights():
    r = torch.tensor([[1.0, 1, 0, 0.5], [0.1, 0, 0, 0]])
    only_best = loss.maxent_weights(r, None, 0.0, 0.0)
    assert excess_entropy(only_best, r) == pytest.approx(0, abs=1e-6)
    assert excess_entropy(torch.full((2, 4), 0.25), r) == pytest.approx(1, abs=1e-6)


def test_excess_entropy_leaves_out_groups_with_all_rows_at_the_best_reward():
    r, w = torch.tensor([[1.0, 0, 0], [0.1] * 3]), torch.tensor([[0.6, 0.2, 0.2], [0.9, 0.1, 0.0]])
    assert excess_entropy(w, r) == pytest.approx(excess_entropy(w[:1], r[:1]), rel=1e-6)
    assert excess_entropy(w[1:], r[1:]) is None


@examples
@given(pairs, st.integers(0, 10_000), st.sampled_from([1, 3, 1000]))
def test_the_entropy_bonus_equals_the_slow_loop_and_is_exactly_zero_in_flat_groups(
    rewards, seed, kinds
):
    """`kinds` of entropies: with few of them there are ties, with 1 all are equal."""
    generator = torch.Generator().manual_seed(seed)
    entropies = torch.randint(kinds, rewards.shape, generator=generator) / 7 + 0.1
    bonus = loss.entropy_bonus(rewards, entropies, 0.4)
    slow = []
    flat = []
    for r, h in zip(rewards.double().tolist(), entropies.double().tolist()):
        slow.append(slow_bonus(r, h, 0.4))
        flat.append(len(set(r)) == 1 or len(set(h)) == 1)
    close(bonus, slow)
    assert (bonus[flat] == 0).all()
    assert torch.equal(loss.entropy_bonus(rewards, entropies, 0.0), torch.zeros_like(rewards))


def test_the_entropy_bonus_is_coef_times_the_std_of_the_rewards_at_one_std_of_entropy():
    rewards, entropies = torch.tensor([[0.0, 3, 0, 3]]), torch.tensor([[1.0, 1, 2, 2]])
    one = rewards.std(1).item() * 0.5 / entropies.std(1).item()
    close(loss.entropy_bonus(rewards, entropies, 0.2), [[-0.2 * one] * 2 + [0.2 * one] * 2])
    assert torch.full((7,), 0.1).std() > 0  # in fp32, and yet the bonus of equal rewards is
    assert (loss.entropy_bonus(torch.full((1, 7), 0.1), torch.arange(7.0)[None], 1.0) == 0).all()
    shifted = loss.entropy_bonus(rewards, 100 * entropies + 7, 0.2)
    close(shifted, loss.entropy_bonus(rewards, entropies, 0.2))


def test_surrogate_utility_is_the_advantage_of_rows_of_full_length_and_less_of_shorter_ones():
    A = randn(2, 3)
    assert torch.equal(loss.xdr_utilities(A, torch.full((2, 3), float(L)), "surrogate", L), A)
    assert torch.equal(loss.xdr_utilities(A, torch.full((2, 3), 2.0), "advantage", L), A)
    shorter = loss.xdr_utilities(A, torch.tensor([[1.0, 2, 4], [8, 6, 3]]), "surrogate", L)
    close(shorter, A * torch.tensor([[0.125, 0.25, 0.5], [1, 0.75, 0.375]]))


def test_mode_adaptive_tau_is_tau_up_to_one_mode_and_falls_with_more():
    taus = loss.mode_adaptive_tau(0.3, torch.tensor([0.0, 1, 2, 3, 7]))
    assert taus[:2] == [0.3, 0.3] and taus[2] > taus[3] > taus[4]
    # log 4 and log 8 in units of log 2
    assert taus[3] == pytest.approx(0.15)
    assert taus[4] == pytest.approx(0.1)
    assert loss.mode_adaptive_tau(INF, torch.tensor([5.0])) == [INF]


def test_semantic_entropy_is_0_with_one_answer_and_ln_G_with_all_different_and_equally_likely():
    one = loss.semantic_entropy(torch.zeros(1, 4), randn(1, 4))
    assert one.item() == pytest.approx(0, abs=1e-6)
    equally_likely = torch.full((1, 4), -1.7)
    different = loss.semantic_entropy(torch.tensor([[3.0, 1, 0, 2]]), equally_likely)
    assert different.item() == pytest.approx(math.log(4))
    two = loss.semantic_entropy(torch.tensor([[0.0, 1, 0, 1]]), equally_likely)
    assert two.item() == pytest.approx(math.log(2))


def test_semantic_entropy_of_a_row_that_is_impossible_next_to_the_others_is_not_nan():
    """exp(-120) is 0 in fp32, and 0 * log 0 would be NaN: in H_sem, so in every advantage of the
    group."""
    mean_logps = torch.tensor([[-0.1, -0.1, -120.0]])
    entropy = loss.semantic_entropy(torch.tensor([[0.0, 1, 2]]), mean_logps)
    assert entropy.item() == pytest.approx(math.log(2))


@examples
@given(st.integers(0, 10_000), st.integers(2, 6), st.integers(1, 6))
def test_semantic_entropy_equals_the_slow_loop(seed, G, answers):
    clusters = torch.randint(answers, (2, G), generator=torch.Generator().manual_seed(seed))
    mean_logps = randn(2, G, seed=seed)
    slow = []
    for group_clusters, group_logps in zip(clusters.tolist(), mean_logps.double().tolist()):
        slow.append(slow_semantic_entropy(group_clusters, group_logps))
    H = loss.semantic_entropy(clusters, mean_logps)
    expected = torch.tensor(slow, dtype=torch.float64)
    torch.testing.assert_close(H.double(), expected, rtol=0, atol=1e-6)
    scale = loss.semantic_scale(H, 0.7, G)
    close(scale[:, 0], [1 / (1 + 0.7 / math.log(G) * h) for h in slow])
    assert (scale <= 1.00001).all()
    assert (scale > 1 / 1.70001).all()  # 1 / (1 + alpha) where all answers differ


def test_an_unlikely_right_answer_is_worth_more_and_equal_answers_share_a_rank():
    r = torch.tensor([[1.0, 1.0, 1.0, 0.0, -0.5]])
    S = torch.tensor([[-1.0, -4.0, -4.00001, -2.0, -3.0]])  # ranks 0, 3, 3
    close(loss.unlikely_rewards(r, S, 0.25), [[0.75, 0.9, 0.9, 0.0, -0.5]])
    # sums of long answers are rounded by more
    long = loss.unlikely_rewards(torch.ones(1, 2), torch.tensor([[-2000.0, -2000.001]]), 0.25)
    close(long, [[0.75, 0.75]])
    assert torch.equal(loss.unlikely_rewards(r, S, 0.0), r)


def test_xdr_with_binary_rewards_is_dr_grpo_with_negative_advantages_scaled_down():
    """By e^(-1/tau), up to a factor per group: softmax(A / tau) of advantages 1 apart."""
    step = make_step(torch.tensor([[1.0, 0, 0, 1, 0]]), [2] * 5, 3)
    xdr = targets_of(step, config(5, dict(objective="xdr"))).advantages[0]
    dr_grpo = targets_of(step, config(5, dict(objective="dr_grpo"))).advantages[0]
    factor = xdr / dr_grpo
    close(factor[1:3] / factor[0], [math.exp(-1 / 0.4)] * 2)
    close(factor[3:], [factor[0], factor[1]])


def test_mode_adaptive_tau_acts_on_each_group_alone():
    c = config(4, dict(objective="xdr", xdr_mode_adaptive_tau=True))
    w = targets_of(changed(EXAMPLE, modes=torch.tensor([3, 1, 1])), c).weights
    A = loss.group_advantages(EXAMPLE.rewards, "none")
    close(w, torch.cat([(A[:1] / 0.2).softmax(1), (A[1:] / 0.4).softmax(1)]))


def test_maxrl_is_the_mean_score_of_the_right_rows_with_a_baseline():
    """K of G right: (1/K) sum over right rows of dlogp minus the mean of all rows."""
    for K in range(1, 7):
        r = torch.tensor([[1.0] * K + [0.0] * (7 - K)])
        close(loss.group_advantages(r, "mean")[0] / 7, r[0] / K - 1 / 7)
    assert (loss.group_advantages(torch.tensor([[0.0, 0.0], [-1.0, -0.5]]), "mean") == 0).all()


LOGITS = torch.tensor([0.3, -0.2, 0.5], dtype=torch.float64)  # of a bandit's three answers


def samples_of_a_bandit(G: int) -> tuple:
    """(every sample of G answers (3^G, G), its chance (3^G,), dlogp / dlogits (3^G, G, 3))"""
    p = LOGITS.softmax(0)
    samples = torch.tensor(list(itertools.product(range(3), repeat=G)))
    return samples, p[samples].prod(1), torch.eye(3, dtype=torch.float64)[samples] - p


def test_maxrl_is_the_gradient_of_the_first_terms_of_log_p_by_enumeration_on_a_bandit():
    """Three answers, one right, every sample of G of them: G - 1 terms of -sum_k (1 - p)^k / k."""
    right = torch.tensor([1.0, 0.0, 0.0], dtype=torch.float64)
    for G in (2, 3, 5):
        samples, chance, score = samples_of_a_bandit(G)
        A = loss.group_advantages(right[samples], "mean")
        found = (chance[:, None] * (A[:, :, None] * score).sum(1)).sum(0) / G
        leaf = LOGITS.clone().requires_grad_()
        wrong = 1 - leaf.softmax(0)[0]
        series = -sum(wrong**k / k for k in range(1, G))
        close(found, torch.autograd.grad(series, leaf)[0], 1e-12)


def test_maxrl_stays_bounded_where_rewards_cancel():
    """A mean of nearly 0 made advantages of thousands of rewards that other functions lower."""
    r = torch.tensor(
        [
            [1.0, -0.99] + [0.0] * 6,
            [0.05, -0.03, -0.04, 0.0201, 0, 0, 0, 0],
            [0.01] + [-1.0] * 7,  # right, but too long
        ]
    )
    A = loss.group_advantages(r, "mean")
    spread = r.amax(1, keepdim=True) - r.amin(1, keepdim=True)
    close(A, (r - r.mean(1, keepdim=True)) * 8 / spread)
    assert A.abs().max() <= 8


def test_the_pass_at_k_gradient_is_unbiased_by_enumeration_on_a_bandit():
    """Three answers, every sample of G of them: E[sum_i A_i dlogp_i / G] is the gradient of the
    expected best of k, in float64."""
    for values in ([1.0, 0.0, 0.0], [1.0, 1.0, 0.0], [1.0, 0.4, -0.5]):
        values = torch.tensor(values, dtype=torch.float64)
        for G in (2, 3, 4):
            samples, chance, score = samples_of_a_bandit(G)
            for k in range(1, G + 1):
                leaf = LOGITS.clone().requires_grad_()
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


@pytest.mark.parametrize("G, k", [(128, 64), (1024, 512)])
def test_more_sets_than_a_tensor_can_count_are_no_hindrance(G, k):
    """C(128, 64) is 2.4e37, beyond the integers of torch."""
    A = loss.pass_at_k_advantages(torch.tensor([[1.0] + [0.0] * (G - 1)]), k)[0]
    close(A, [float(k)] + [0.0] * (G - 1), 1e-3)


def test_the_entropy_bonus_does_not_hide_a_group_at_the_lowest_reward():
    """maxent_skip_equal_groups="wrong" looks at the rewards as they were given: the bonus puts rows
    of the other group below them."""
    step = changed(EXAMPLE, rewards=torch.tensor([[0.0] * 4, [0, 0, 1, 1], [1.0] * 4]))
    case = dict(objective="maxent", policy_entropy_bonus_coef=0.4)
    c = config(4, case | {"maxent_skip_equal_groups": "wrong"})
    assert targets_of(step, c).active.tolist() == [False, True, True]


def test_a_group_whose_equal_rewards_unlikeliness_tells_apart_counts_as_active():
    """xdr's weights of it are measured, and steer tau."""
    step = changed(EXAMPLE, rewards=torch.ones(3, 4))
    case = dict(objective="xdr", maxent_tau=0.5)
    assert not targets_of(step, config(4, case)).active.any()
    assert targets_of(step, config(4, case | {"unlikeliness_coef": 0.25})).active.all()


def changed_fields(targets, plain) -> set[str]:
    """The names of the targets that differ; both have the same ones."""
    there = {name for name, value in plain._asdict().items() if value is not None}
    assert there == {name for name, value in targets._asdict().items() if value is not None}
    return {name for name in there if not torch.equal(getattr(targets, name), getattr(plain, name))}


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_the_entropy_bonus_is_nothing_at_coef_0_or_equal_entropies_and_never_activates_a_group(
    objective,
):
    c = config(4, dict(objective=objective))
    step = EXAMPLE  # its third group has equal rewards
    bonus = dict(policy_entropy_bonus_coef=0.4)
    plain = targets_of(step, c)
    off = learner.group_targets(group_of(step, c | bonus), 0.4, 0.0, c)
    level_group = group_of(step, c)._replace(entropies=torch.full((3, 4), 0.3))
    level = learner.group_targets(level_group, 0.4, 0.0, c | bonus)
    assert changed_fields(off, plain) == changed_fields(level, plain) == set()
    shaped = targets_of(step, c | bonus)
    found = changed_fields(shaped, plain)
    assert found
    assert found <= {"advantages", "weights", "goals", "utilities"}
    if shaped.advantages is not None:
        assert (shaped.advantages[2] == 0).all()
    assert torch.equal(shaped.active, plain.active)
    assert torch.equal(shaped.task_rewards, step.rewards)
