"""The loss of a whole step: against slow loops, finite differences, any split of its rows; its
limits. See helpers/loss_steps.py."""

import itertools

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from loss_cases import CASES, EVERY_XDR, OBJECTIVES, TILTED, cases, name_of, sensible
from loss_steps import (
    EXAMPLE,
    INF,
    L,
    accumulate,
    assert_same,
    changed,
    compare,
    config,
    examples,
    make_step,
    ours,
    randn,
    same_to_the_bit,
    step_loss,
    steps,
    targets_of,
)
from slow_loss import TABLE

import checks
import learner
import loss

NORMS = ("length", "constant", "sum")
CHOICES = (
    "importance_sampling",
    "kl_loss_type",
    "maxent_score_norm",
    "mode_entropy_score_norm",
    "maxent_loss",
    "xdr_utility",
    "maxent_skip_equal_groups",
    "maxent_group_weight",
)
# cispo's detached ratio and a floor under p are not the derivative of anything
DIFFERENTIABLE = [
    case for case in CASES if case["objective"] != "cispo" and case.get("maxent_loss") != "floored"
]


def test_the_cases_cover_every_objective_and_choice():
    # one that is its advantages alone may do without: a slow loop would be the same line again
    for name, objective in checks.OBJECTIVES.items():
        covered = name in TABLE or objective.has_custom_advantages
        assert covered, f"{name} needs a line in helpers/slow_loss.py:TABLE"
    assert set(TABLE) <= set(OBJECTIVES)
    for key in CHOICES:
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
    case = dict(
        objective="maxent",
        maxent_tau=tau,
        beta=beta,
        maxent_q_epsilon=eps,
        maxent_score_norm=norm,
    )
    compare(step, case)


SMALL = make_step(torch.tensor([[1.0, 0, 1], [0, 0.1, 0.1]]), [3, 1, 2, 3, 2, 1], 5)


@pytest.mark.parametrize("case", DIFFERENTIABLE, ids=name_of)
def test_gradients_are_those_of_finite_differences(case):
    step = changed(SMALL)
    for key, value in vars(SMALL).items():
        if torch.is_tensor(value) and value.is_floating_point():
            setattr(step, key, value.double())
    leaves = [x.clone().requires_grad_() for x in (step.logps, step.entropy)]
    c = config(step.G, case)
    assert torch.autograd.gradcheck(lambda *x: step_loss(*x, step, c)[0], leaves, atol=1e-6)


@cases
@settings(examples, max_examples=8)
@given(steps(), st.data())
def test_any_order_split_and_padding_of_the_rows_gives_the_same_loss_and_gradient(case, step, data):
    """Through learner.accumulate_gradients; a plan that cuts groups makes it take a scoring pass
    and row coefficients."""
    assume(sensible(step, case))
    N = step.P * step.G
    order = data.draw(st.permutations(range(N)))
    cuts = data.draw(st.lists(st.integers(0, N), max_size=4))
    plan = []
    for a, b in itertools.pairwise([0, *sorted(cuts), N]):
        if a < b:
            plan.append(torch.tensor(order[a:b]))
    assert_same(accumulate(step, case, plan, pad=data.draw(st.integers(0, 2))), ours(step, case))


@pytest.mark.parametrize("budget", [1, 13, 30])  # rows alone; some groups cut; whole groups
@cases
def test_any_token_budget_gives_the_same_loss_and_gradient(case, budget):
    assert_same(accumulate(EXAMPLE, case, budget=budget), ours(EXAMPLE, case))


@cases
def test_the_first_update_takes_its_own_log_probs_as_the_old_ones(case):
    on_policy = changed(EXAMPLE, old=EXAMPLE.logps)
    assert_same(accumulate(EXAMPLE, case, first=True), ours(on_policy, case))


@pytest.mark.parametrize("G", [1, 2, 7, 41])  # float(1/41) * 41 is not 1 in fp32
def test_equal_rewards_give_exactly_zero_gradient(G):
    step = make_step(torch.tensor([[0.1] * G, [1 / 3] * G]), [1 + i % 5 for i in range(2 * G)], 3)
    # w - 1/G is 0 where nothing tilts it
    flat = dict(objective="maxent", maxent_loss="policy_gradient", maxent_skip_equal_groups="none")
    kept = [flat]
    for case in CASES:
        acts_on_equal_rewards = {"maxent_skip_equal_groups", "unlikeliness_coef"} & set(case)
        if sensible(step, case) and not acts_on_equal_rewards:
            kept.append(case)
    for case in kept:
        off = {"token_entropy_coef": 0.0}
        if "xdr_ref_tilt" not in case:
            off |= {"beta": 0.0, "maxent_kl": False}
        result = ours(step, case | off)
        assert result.value == 0, case
        assert (result.grad == 0).all(), case


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
    right = (step.rewards == 1).flatten()
    best = grad[right][step.mask[right]]
    worst = grad[~right][step.mask[~right]]
    assert (best < 0).all()
    if case["objective"] == "pkpo":  # its leave-one-out leaves wrong rows alone
        assert (worst == 0).all()
    else:
        assert (worst > 0).all()


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
    dr_grpo = ours(step, more | {"objective": "dr_grpo"} | without)
    assert same_to_the_bit(ours(step, case | more | {"maxent_tau": INF}), dr_grpo)
    on = {"maxent_tau": 0.3, "seed_grpo_alpha": 0.5, "token_entropy_coef": 0.5}
    assert not same_to_the_bit(ours(step, case | more | on), dr_grpo)


@pytest.mark.parametrize("modes, same", [(0, True), (1, True), (2, False)])
def test_mode_adaptive_xdr_is_plain_xdr_at_one_mode(modes, same):
    step = changed(EXAMPLE, modes=torch.full((3,), modes))
    adaptive = ours(step, dict(objective="xdr", xdr_mode_adaptive_tau=True))
    assert same_to_the_bit(adaptive, ours(EXAMPLE, dict(objective="xdr"))) == same


def test_surrogate_utility_is_the_advantage_when_all_rows_have_full_length():
    full = make_step(EXAMPLE.rewards, [L] * 12, 7)
    for step, same in ((full, True), (EXAMPLE, False)):
        surrogate = ours(step, dict(objective="xdr", xdr_utility="surrogate"))
        advantage = ours(step, dict(objective="xdr"))
        assert same_to_the_bit(surrogate, advantage) == same


def test_maxent_loss_says_nothing_to_the_mode_entropy_of_other_objectives():
    case = dict(objective="dr_grpo", mode_entropy_coef=0.3)
    plain = ours(EXAMPLE, case)
    for kind in ("policy_gradient", "mle"):
        assert same_to_the_bit(ours(EXAMPLE, case | {"maxent_loss": kind}), plain), kind


@cases
def test_resting_rows_have_no_gradient_and_equal_groups_are_idle_where_nothing_else_acts(case):
    c = config(EXAMPLE.G, case)
    rests = learner.resting_rows(targets_of(EXAMPLE, c), c["beta"], c)
    grad = ours(EXAMPLE, case).grad
    assert not grad[:, rests].any()
    for rows in (slice(0, 4), slice(4, 8)):
        # maxrl has no opinion below a mean of 0, pkpo none where no set of k rows fails
        if grad[:, rows].any():
            assert not rests[rows].any()
        else:
            assert rests[rows].all()
    assert rests[8:].all() or grad[:, 8:].any() or c["mode_entropy_coef"] > 0


def test_inputs_come_back_unchanged():
    step = EXAMPLE
    w = randn(3, 4).softmax(1)
    hidden = randn(9, 3)
    head = randn(11, 3)
    targets = torch.arange(9)
    inputs = [x for x in vars(step).values() if torch.is_tensor(x)] + [w, hidden, head, targets]
    before = [x.clone() for x in inputs]
    for case in CASES:
        ours(step, case)
    loss.weight_metrics(w, step.rewards, loss.active_groups(step.rewards, "wrong"))
    loss.group_advantages(step.rewards, "batch")
    for u in (w, step.rewards):
        loss.maxent_weights(u, w, 0.0, 0.0)
        loss.maxent_weights(u, w, 0.5, INF)
    leaf = hidden.clone().requires_grad_()
    sum(x.sum() for x in loss.token_logps(leaf, head, targets, 0.7, 4)).backward()
    loss.token_logps(hidden, head, targets, 0.7, 4)
    assert all(torch.equal(a, b) for a, b in zip(before, inputs))
