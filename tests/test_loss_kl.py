"""KL estimators, and the weights for a sampler that is not quite the policy."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from loss_steps import (
    CAP,
    EXAMPLE,
    INF,
    close,
    examples,
    make_step,
    ours,
    randn,
    same_to_the_bit,
    value_and_grad,
)

import loss
from policy import completion_mask


def test_k3_is_the_formula_never_negative_and_clamped():
    logps, ref = randn(50), randn(50, seed=1)
    kl = loss.k3_kl(logps, ref)
    close(kl, [math.exp(-d) + d - 1 for d in (logps.double() - ref.double()).tolist()])
    assert (kl >= 0).all()
    assert loss.k3_kl(logps, logps).abs().max() == 0
    extreme = loss.k3_kl(torch.tensor([0.0, -500.0]), torch.tensor([-500.0, 0.0]))
    close(extreme, [19.0, math.exp(20) - 21])


def test_k3_averages_to_the_kl_from_policy_to_reference_under_the_policy():
    p, q = randn(6).double().log_softmax(0), randn(6, seed=1).double().log_softmax(0)
    close((p.exp() * loss.k3_kl(p, q)).sum(), (p.exp() * (p - q)).sum(), 1e-9)


def test_k2_is_half_the_square_and_clamped():
    logps, ref = randn(50), randn(50, seed=1)
    close(loss.k2_kl(logps, ref), [d**2 / 2 for d in (logps.double() - ref.double()).tolist()])
    extreme = loss.k2_kl(torch.tensor([0.0, -500.0]), torch.tensor([-500.0, 0.0]))
    assert extreme.tolist() == [200.0, 200.0]


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
    """Over all 5 outcomes of a categorical policy, each sampled with its probability: as a loss
    sees it, samples held fixed."""
    logits, q = randn(5, seed=seed).double(), randn(5, seed=seed + 1).double().log_softmax(0)
    p = logits.softmax(0)
    estimate = getattr(loss, estimator)
    _, expected = value_and_grad(lambda x: (p * estimate(x.log_softmax(0), q)).sum(), logits)
    _, exact = value_and_grad(lambda x: kl(x.log_softmax(0), q).sum(), logits)
    close(expected, exact, 1e-9)


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
    old = torch.zeros(1, 2)
    sampler = torch.full((1, 2), -math.log(2.0) / 2)
    lengths = torch.tensor([2])
    ratio = loss.importance_ratio(old, sampler, lengths, "sequence_truncate", INF).item()
    assert ratio == pytest.approx(2)
    assert loss.importance_ratio(old, sampler, lengths, "sequence_mask", ratio).item() == ratio


@pytest.mark.parametrize("how", ["truncate", "mask"])
def test_the_sequence_ratio_of_one_token_rows_is_the_token_ratio(how):
    old = randn(20, 1)
    sampler = randn(20, 1, seed=1)
    ones = torch.ones(20)
    token = loss.importance_ratio(old, sampler, ones, f"token_{how}", CAP)
    sequence = loss.importance_ratio(old, sampler, ones, f"sequence_{how}", CAP)
    assert torch.equal(token, sequence)
    assert (token == {"truncate": CAP, "mask": 0}[how]).any()
    assert (token < 1).any()


def test_the_geometric_ratio_of_equal_tokens_is_the_token_ratio_however_long_the_row():
    lengths, per_row = torch.tensor([5, 2, 1, 4]), torch.tensor([[0.3], [-0.7], [9.0], [0.1]])
    sampler = -per_row * completion_mask(lengths)
    old = torch.zeros(4, 5)
    ratio = loss.importance_ratio(old, sampler, lengths, "sequence_geometric", CAP)
    token = loss.importance_ratio(old, sampler, lengths, "token_truncate", CAP)
    close(ratio, token[:, :1])
    assert ratio[2] == CAP


@pytest.mark.parametrize("how", ["truncate", "mask"])
@pytest.mark.parametrize("objective", ["grpo", "dr_grpo", "gspo", "cispo"])
def test_sequence_and_token_sampling_weights_agree_on_one_token_rows(objective, how):
    step = make_step(EXAMPLE.rewards, [1] * 12, 7)

    def under(kind):
        return ours(step, dict(objective=objective, importance_sampling=kind))

    token = under(f"token_{how}")
    assert same_to_the_bit(token, under(f"sequence_{how}"))
    assert not same_to_the_bit(token, under("none"))
