"""Clipped ratios: PPO's, cispo's, gspo's; what a token counts in the loss."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from loss_steps import (
    EXAMPLE,
    HIGH,
    LOW,
    L,
    assert_same,
    changed,
    close,
    config,
    examples,
    make_step,
    ours,
    randn,
    targets_of,
    value_and_grad,
)

import learner
import loss

SAMPLINGS = (
    "token_truncate",
    "token_mask",
    "sequence_truncate",
    "sequence_mask",
    "sequence_geometric",
    "none",
)


@pytest.mark.parametrize(
    "A, log_ratio, delta, value, slope, clipped",
    [
        # good enough: stop pushing up
        (+2, +0.5, -1, 2 * 1.28, 0, "above"),
        # a good token that fell: full pull
        (+2, -0.5, -1, 2 * math.exp(-0.5), 2 * math.exp(-0.5), ""),
        # low enough: stop pushing down
        (-2, -0.5, -1, -2 * 0.8, 0, "below"),
        # a bad token that rose: full push, unbounded
        (-2, +0.5, -1, -2 * math.exp(0.5), -2 * math.exp(0.5), ""),
        # unless delta caps it
        (-2, +0.5, 1.4, -2 * 1.4, 0, ""),
        (-2, +0.3, 1.4, -2 * math.exp(0.3), -2 * math.exp(0.3), ""),
        (+2, +0.5, 1.4, 2 * 1.28, 0, "above"),
        (+2, -0.5, 1.4, 2 * math.exp(-0.5), 2 * math.exp(-0.5), ""),
        (-2, -0.5, 1.4, -2 * 0.8, 0, "below"),
        # the cap does not hide a clipped token
        (+2, +0.5, 1.28, 2 * 1.28, 0, "above"),
        (0, +9.0, -1, 0, 0, ""),
        (+2, +0.1, -1, 2 * math.exp(0.1), 2 * math.exp(0.1), ""),
    ],
)
def test_surrogate_is_ppos_minimum_for_both_signs_with_delta_on_the_unclipped_branch(
    A, log_ratio, delta, value, slope, clipped
):
    d = torch.full((1, 1), log_ratio, requires_grad=True)
    A = torch.tensor([float(A)])
    surrogate, low, high = loss.clipped_surrogate(d, A, LOW, HIGH, delta)
    close(surrogate, [[value]])
    close(torch.autograd.grad(surrogate.sum(), d)[0], [[slope]])
    assert low.item() == (clipped == "below")
    assert high.item() == (clipped == "above")


def test_delta_is_the_dual_clip_of_verl_its_clip_ratio_c():
    """verl: for A < 0 the loss max(-A * c, -A * clip(c)) is at most -A * clip_ratio_c."""
    A = torch.tensor([1.5, -0.3, -2.0])
    limit = 3.0

    def dual_clip(d):
        c = d.exp()
        clipped = torch.maximum(-A[:, None] * c, -A[:, None] * c.clamp(1 - LOW, 1 + HIGH))
        dual = torch.minimum(-A[:, None] * limit, clipped)
        return -torch.where(A[:, None] < 0, dual, clipped).sum()

    log_ratios = randn(3, 200, scale=1.5)
    assert (log_ratios[1:] > math.log(limit)).any()
    theirs, their_grad = value_and_grad(dual_clip, log_ratios)
    value, grad = value_and_grad(
        lambda d: loss.clipped_surrogate(d, A, LOW, HIGH, limit)[0].sum(), log_ratios
    )
    close(value, theirs)
    close(grad, their_grad)


@pytest.mark.parametrize("low, high", [(LOW, HIGH), (0.0, 0.0)])
def test_with_old_equal_to_new_the_gradient_is_reinforce(low, high):
    A = torch.tensor([1.5, -0.3, 0.0])

    def on_policy(x):
        return loss.clipped_surrogate(x - x.detach(), A, low, high)[0].sum()

    _, grad = value_and_grad(on_policy, randn(3, 4, scale=3.0))
    close(grad, A[:, None].expand(3, 4), 1e-6)


@pytest.mark.parametrize("A", [1.0, 0.0])
def test_a_token_whose_ratio_overflows_is_clipped_and_not_nan(A):
    d = torch.tensor([[100.0, -200.0]])  # exp(100) is inf in fp32

    def surrogate(x):
        return loss.clipped_surrogate(x, torch.tensor([A]), LOW, HIGH)[0].sum()

    value, grad = value_and_grad(surrogate, d)
    assert value.item() == pytest.approx(A * (1 + HIGH))
    assert grad.tolist() == [[0.0, 0.0]]


def one_token(f, log_ratio, A):
    """(gradient by the log-prob, clipped below, clipped above) of f(logps, log_ratio, A)."""
    logp = torch.tensor([[-1.0]], requires_grad=True)
    old = torch.tensor([[-1.0 - log_ratio]])
    gain, low, high = f(logp, logp - old, torch.tensor([A]))
    return torch.autograd.grad(gain.sum(), logp)[0].item(), low.item(), high.item()


def cispo(logps, log_ratio, A):
    return loss.cispo_surrogate(logps, log_ratio, A, 3.0)


def ppo(logps, log_ratio, A):
    return loss.clipped_surrogate(log_ratio, A, LOW, HIGH)


def test_cispo_keeps_the_gradient_of_tokens_above_its_cap_where_ppo_has_none():
    assert one_token(cispo, 2.0, A=1.5) == (pytest.approx(3 * 1.5), False, True)
    assert one_token(ppo, 2.0, A=1.5) == (0.0, False, True)


@pytest.mark.parametrize("f", [ppo, cispo])
def test_a_token_may_have_an_advantage_of_its_own(f):
    logps, log_ratio = randn(2, 3), randn(2, 3, seed=1)
    A = randn(2, 3, seed=2)
    of_rows = [f(logps, log_ratio, A[:, t]) for t in range(3)]  # tokens do not see each other
    for i, of_tokens in enumerate(f(logps, log_ratio, A)):
        close(of_tokens, torch.stack([row[i][:, t] for t, row in enumerate(of_rows)], 1))


def test_cispo_has_no_lower_clip():
    assert one_token(cispo, -4.0, A=-1.5) == (pytest.approx(-1.5 * math.exp(-4)), False, False)
    assert one_token(ppo, -4.0, A=-1.5) == (0.0, True, False)


def test_cispo_caps_ratios_of_bad_tokens_too_without_counting_them_as_clipped():
    assert one_token(cispo, 2.0, A=-1.5) == (pytest.approx(-3 * 1.5), False, False)


def test_cispo_does_not_differentiate_the_ratio():
    logps = randn(2, 3)
    d = randn(2, 3, seed=1).requires_grad_()
    A = torch.tensor([1.0, -2.0])
    assert not loss.cispo_surrogate(logps, d, A, 3.0)[0].requires_grad
    old = logps - d.detach()
    _, grad = value_and_grad(lambda x: loss.cispo_surrogate(x, x - old, A, 3.0)[0].sum(), logps)
    close(grad, d.detach().exp().clamp(max=3) * A[:, None])


def test_a_token_whose_cispo_ratio_overflows_is_capped_and_not_nan():
    logps = torch.tensor([[-1.0, -1.0]])
    log_ratio = torch.tensor([[100.0, -200.0]])
    gain, _, _ = loss.cispo_surrogate(logps, log_ratio, torch.tensor([0.0]), 3.0)
    assert (gain == 0).all()  # 0 and not NaN


@examples
@given(st.lists(st.integers(1, 5), min_size=1, max_size=6), st.integers(0, 3))
def test_token_weights_give_every_row_its_share_of_the_loss(lengths, pad):
    T = torch.tensor(lengths)
    mask = (torch.arange(5 + pad) < T[:, None]).float()
    n, tokens = len(T), sum(lengths)
    shares = {
        "row_mean": torch.ones(n) / n,
        "token_mean": T / tokens,
        "constant": T / (n * L),
    }
    for kind, share in shares.items():
        weights = loss.token_weights(kind, mask, n, tokens, L)
        close(weights.sum(1), share, 1e-6)
        close(weights, mask * (share / T)[:, None], 1e-6)
    # one row of a larger step keeps its share
    first = loss.token_weights("row_mean", mask[:1], n, tokens, L)
    close(first, loss.token_weights("row_mean", mask, n, tokens, L)[:1], 1e-7)


@pytest.mark.parametrize(
    "more", [{}, dict(beta=0.3, delta=1.4), dict(importance_sampling="sequence_mask")], ids=str
)
def test_gspo_with_one_token_rows_is_grpo(more):
    step = make_step(EXAMPLE.rewards, [1] * 12, 7)
    gspo = ours(step, {"objective": "gspo"} | more)
    grpo = ours(step, {"objective": "grpo"} | more)
    assert_same(gspo, grpo)
    assert gspo.high > 0


def test_gspo_takes_the_geometric_mean_of_the_token_ratios():
    # the second row has two tokens
    ratios = torch.tensor([[0.7, 1.1, 1.2], [1.5, 0.8, 1.0]])
    A = torch.tensor([2.0, -1.0])
    part = {"old_logps": torch.zeros(2, 3), "lengths": torch.tensor([3, 2]), "advantages": A}
    gain, low, high = learner.surrogate(ratios.log(), part, config(2, dict(objective="gspo")))
    close(gain, [[2 * (0.7 * 1.1 * 1.2) ** (1 / 3)], [-((1.5 * 0.8) ** 0.5)]])
    # though every row has a token outside the clip range
    assert not low.any()
    assert not high.any()


def test_gspo_clips_whole_rows():
    step = make_step(torch.tensor([[1.0, 0, 0]]), [3, 2, 2], 3)
    # the good row rose, one bad row fell
    step.old = step.logps - torch.tensor([[0.5], [-0.5], [0.0]]) * step.mask
    found = ours(step, dict(objective="gspo", importance_sampling="none"))
    assert (found.grad[0, :2] == 0).all()
    assert (found.grad[0, 2, :2] > 0).all()
    assert (found.low, found.high) == (2, 3)


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_cispo_on_policy_has_the_gradient_of_dapo_which_is_reinforce(sampling):
    step = changed(EXAMPLE, logps=EXAMPLE.old)
    cispo = ours(step, dict(objective="cispo", importance_sampling=sampling))
    dapo = ours(step, dict(objective="dapo", importance_sampling=sampling))
    close(cispo.grad, dapo.grad)
    if sampling == "none":
        A = loss.group_advantages(step.rewards, "group").view(-1, 1)
        close(cispo.grad[0], -A * step.mask / step.lengths.sum())


def test_without_an_epsilon_of_its_own_a_ratio_is_clipped_above_as_far_as_below():
    ratios = torch.tensor([[1.05, 1.15, 0.85]])
    part = {"old_logps": torch.zeros(1, 3), "lengths": torch.tensor([3])}
    part["advantages"] = torch.tensor([2.0])
    c = config(2, dict(objective="grpo", epsilon=0.1, epsilon_high=-1.0))
    gain, _, high = learner.surrogate(ratios.log(), part, c)
    close(gain, [[2.1, 2.2, 1.7]])
    assert high.tolist() == [[False, True, False]]


def test_cispo_below_its_cap_has_the_gradient_of_an_unclipped_ratio():
    case = dict(cispo_epsilon_max=50.0, epsilon=0.99, epsilon_high=49.0)
    cispo = ours(EXAMPLE, {"objective": "cispo"} | case)
    dapo = ours(EXAMPLE, {"objective": "dapo"} | case)
    close(cispo.grad, dapo.grad)
    assert cispo.high == dapo.high == dapo.low == 0
    assert EXAMPLE.old.sub(EXAMPLE.logps).abs().max() > 0.5


def test_maxent_as_policy_gradient_is_the_mean_over_prompts_of_w_minus_one_over_G():
    step = changed(EXAMPLE, logps=EXAMPLE.old)
    case = dict(objective="maxent", maxent_loss="policy_gradient")
    case |= dict(beta=0.1, importance_sampling="none")
    targets = targets_of(step, config(4, case))
    A = (targets.weights - 1 / 4) * targets.active[:, None]  # (P, G)
    close(ours(step, case).grad[0], -A.view(-1, 1) * step.mask / (3 * L))
