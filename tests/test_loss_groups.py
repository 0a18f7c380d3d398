"""Losses over the scores of a group: listwise, mle, flow, mode entropy; what each has as its
fixed point, and where the limit of tau lies."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from loss_steps import (
    EXAMPLE,
    INF,
    L,
    close,
    config,
    examples,
    groups,
    make_step,
    ours,
    randn,
    scores,
    value_and_grad,
)
from slow_loss import slow_softmax

import checks
import common
import learner
import loss


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
    s = randn(4, 5, seed=seed, scale=4.0)
    w = randn(4, 5, seed=seed + 1).softmax(1)
    active = torch.tensor(active)
    value, grad = value_and_grad(loss.listwise_loss, s, w, active, norm)
    divisor = norm or max(1, sum(active.tolist()))
    close(grad, (s.softmax(1) - w) * active[:, None] / divisor)
    assert (grad[~active] == 0).all()
    slow = 0.0
    for x in range(4):
        p = slow_softmax(s[x].double().tolist())
        slow -= sum(w[x, i].item() * math.log(p[i]) for i in range(5)) * active[x].item() / divisor
    close(value, slow)


@examples
@given(st.integers(0, 10_000), st.lists(st.booleans(), min_size=10, max_size=10))
def test_floored_rows_are_pushed_down_by_1_over_g_at_least_and_others_as_before(seed, below):
    s = randn(2, 5, seed=seed, scale=2.0)
    w = randn(2, 5, seed=seed + 1, scale=2.0).softmax(1)
    below = torch.tensor(below).view(2, 5)
    active = torch.tensor([True, False])
    plain, plain_grad = value_and_grad(loss.listwise_loss, s, w, active)
    value, grad = value_and_grad(loss.listwise_loss, s, w, active, floored=below)
    assert value == plain
    p = s.softmax(1)
    close(grad, (torch.where(below, p.clamp(min=1 / 5), p) - w) * active[:, None])
    same = ~below | (p >= 1 / 5 + 1e-6)
    assert torch.equal(grad[same], plain_grad[same])


def test_listwise_gradient_vanishes_where_the_policy_matches_the_weights():
    s = randn(3, 6, scale=3.0)
    _, grad = value_and_grad(loss.listwise_loss, s, s.softmax(1), torch.ones(3, dtype=torch.bool))
    assert grad.abs().max() < 1e-7


@examples
@given(groups(), st.integers(0, 10_000))
def test_mode_entropy_equals_the_slow_loop_and_pulls_correct_rows_to_equal_likelihood(
    rewards, seed
):
    P, G = rewards.shape
    S = randn(P, G, seed=seed, scale=5.0) - 20
    value, grad = value_and_grad(loss.mode_entropy_loss, S, rewards, P * L)
    slow = 0.0
    slow_grad = torch.zeros(P, G)
    for x in range(P):
        r = rewards[x].tolist()
        s = S[x].double().tolist()
        C = [i for i in range(G) if r[i] == max(r)]
        if len(C) >= 2 and max(r) != min(r):
            p = slow_softmax([s[i] for i in C])
            slow -= sum(math.log(v) for v in p) / len(C) / (P * L)
            slow_grad[x, C] = torch.tensor([(v - 1 / len(C)) / (P * L) for v in p])
    close(value, slow)
    close(grad, slow_grad, 1e-4)  # fp32 of p at scores near 20
    # wrong rows, single correct rows, all-equal groups: exactly 0
    assert (grad[slow_grad == 0] == 0).all()


def test_mode_entropy_gradient_vanishes_at_equal_likelihood_and_in_all_equal_groups():
    S = torch.tensor([[-3.0, -3.0, -9.0, -3.0], [-1.0, -2.0, -3.0, -4.0]])
    rewards = torch.tensor([[1.0, 1, 0, 1], [0.1] * 4])
    value, grad = value_and_grad(loss.mode_entropy_loss, S, rewards, 2 * L)
    close(value, math.log(3) / (2 * L), 1e-6)
    assert grad.abs().max() < 1e-8


def test_mode_entropy_is_finite_though_a_wrong_row_is_impossible():
    S = torch.tensor([[-math.inf, -1.0, -2.0, -3.0]])
    rewards = torch.tensor([[0.0, 1, 1, 1]])
    value, grad = value_and_grad(loss.mode_entropy_loss, S, rewards, L)
    known = value_and_grad(loss.mode_entropy_loss, S.clamp(min=-9.0), rewards, L)
    assert value == known[0] and torch.equal(grad, known[1])


def test_whole_groups_in_micro_batches_add_up_under_one_norm():
    step = EXAMPLE
    s = scores(EXAMPLE.logps, EXAMPLE, "length")
    w = randn(3, 4).softmax(1)
    active = loss.active_groups(step.rewards, "all")  # two of the three
    alone = [slice(x, x + 1) for x in range(3)]
    for f in (loss.listwise_loss, loss.mle_loss):
        parts = [f(s[x], w[x], active[x], 2) for x in alone]
        close(sum(parts), f(s, w, active, 2))
    close(loss.listwise_loss(s, w, active), loss.listwise_loss(s, w, active, 2))
    parts = [loss.mode_entropy_loss(s[x], step.rewards[x], 3 * L) for x in alone]
    close(sum(parts), loss.mode_entropy_loss(s, step.rewards, 3 * L))


def test_mle_has_no_baseline_and_listwise_has():
    """A group of equal rewards that is not skipped: mle pushes up all of its rows, a token of a
    short row more; listwise only balances them."""
    step = make_step(torch.tensor([[1.0] * 4]), [1, 2, 4, 5], 3)
    case = dict(objective="maxent", maxent_skip_equal_groups="none")
    mle = ours(step, case | {"maxent_loss": "mle"}).grad[0]
    listwise = ours(step, case | {"maxent_loss": "listwise"}).grad[0]
    close(-mle, step.mask / (4 * step.lengths[:, None]))
    rows = listwise.sum(1)  # d loss / d score, the mean log-prob of a row
    assert rows.sum().abs() < 1e-7
    assert rows.min() < -0.01
    assert rows.max() > 0.01
    close(rows, scores(step.logps, step, "length")[0].softmax(0) - 0.25)


@pytest.mark.parametrize("K", [1, 3, 7])
def test_maxent_at_tau_zero_without_a_reference_is_maxrl_on_scores_where_p_is_uniform(K):
    """Their gradients by the scores, to the last digit, and maxent's against finite differences of
    its loss."""
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
    scores = torch.tensor([[-1.0, -3.0]])
    _, grad = value_and_grad(loss.balance_loss, scores, flat, torch.tensor([True]), 1)
    close(grad, [[0.5, -0.5]])


def right_share(letters, length, scale, tau, steps=0, rate=0.0):
    """pi(right) where p = w over all strings, or after `steps` of descent on the listwise loss over
    all of them from a uniform policy.

    A policy over strings of one length: log-probs (letters^length,), free up to their
    normalisation; scores scale * S / length."""
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
    """At the limit one right string has as much mass as all wrong ones together; where tau is 1.3
    times as high it has less than a third, where it is as much lower more than two."""
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


@pytest.mark.parametrize("epsilon, unlikely, T_q", [(0, 0.5, 1), (0.05, 0, 1), (0.02, 0.25, 0.3)])
def test_the_limit_of_tau_falls_with_what_q_leaves_of_the_lead_of_right_rows(
    epsilon, unlikely, T_q
):
    changes = dict(maxent_q_epsilon=epsilon, unlikeliness_coef=unlikely, maxent_q_temperature=T_q)
    rewards = torch.tensor([[1.0 - unlikely] * 4 + [0.0] * 12])
    u = loss.log_reward_targets(rewards, T_q, epsilon)[0]
    limit = checks.tau_limit(config(16, changes), 10)
    assert limit == pytest.approx(T_q * (u[0] - u[-1]).item() / math.log(10), rel=1e-5)
    assert limit < 0.8 * checks.tau_limit(config(16, {}), 10)


def test_summed_scores_have_a_limit_that_falls_with_the_length():
    c = config(16, dict(maxent_score_norm="sum"))
    assert checks.tau_limit(c, 4) == pytest.approx(1 / (L * math.log(4)))


def pushed(reward: float, *flags) -> torch.Tensor:
    """(8,): how far a step raises the scores of eight rows, from the least to the most likely. The
    fifth has this reward, the others 0. Advantages are divided by G, as the loss does."""
    c = common.load_config([f"--{flag}" for flag in flags])
    rewards = torch.zeros(1, 8, dtype=torch.float64)
    rewards[0, 4] = reward
    scores = torch.linspace(-1.6, -0.1, 8, dtype=torch.float64)[None].requires_grad_()
    group = learner.GroupMeasures(rewards, rewards, torch.ones(1, 8))
    targets = learner.group_targets(group, 0.08, 0.0, c)
    if targets.advantages is not None:
        return targets.advantages[0] / 8
    counts = learner.step_counts(targets, group.lengths)
    learner.group_loss(scores, targets, c, counts).backward()
    return -scores.grad[0]


def test_a_small_reward_among_wrong_answers_is_worth_what_docs_rewards_says():
    small = pushed(0.01, "objective=maxent")
    assert small[0] == pytest.approx(0.07, abs=2e-3) and small[4] == pytest.approx(0.016, abs=1e-3)
    assert pushed(1, "objective=maxent")[4] == pytest.approx(0.88, abs=5e-3)
    assert pushed(0.01, "objective=flow")[0] > 0.05
    for objective in ("maxent", "flow"):
        by_spread = [f"objective={objective}", "maxent_group_weight=spread"]
        assert pushed(0.01, *by_spread).abs().max() < 1e-5
        # a group with 1 of 8 right keeps .44 of its weight
        kept = pushed(1, *by_spread) / pushed(1, by_spread[0])
        assert torch.allclose(kept, torch.full_like(kept, 0.4375))
    for objective in ("dr_grpo", "pkpo"):  # in proportion
        one = pushed(1, f"objective={objective}")
        assert torch.allclose(pushed(0.01, f"objective={objective}"), one / 100)
    for objective in ("maxrl", "grpo", "dapo", "gspo", "cispo"):  # as much as a right answer
        name = f"objective={objective}"
        assert torch.allclose(pushed(0.01, name), pushed(1, name), rtol=0.03)
        assert pushed(0.01, name, "scale_rewards=none")[4] < 0.002
