"""The rules for tau and beta against tables computed by hand and small plants, and their state."""

import copy
import math

import pytest
import torch
from controlled import (
    ADAM,
    BETA_ON,
    CONTROLLERS,
    DEFAULTS,
    METHODS,
    TAU_ON,
    replay,
    resumes_exactly,
    setting,
    through_json,
)
from hypothesis import given, settings
from hypothesis import strategies as st

import controllers
import loss

examples = settings(max_examples=100)
NOT_MEASURED = [None, math.nan, math.inf, -math.inf]


def run_tau(entropies, config, state=None):
    """The last state, and tau after each step."""
    state = state or controllers.init_state(config)
    taus = []
    for H in entropies:
        state = controllers.update_tau(state, H, config)
        taus.append(state["tau"])
    return state, taus


# --- tau


def test_off_controllers_only_count_the_step_whatever_is_measured():
    state = controllers.init_state(DEFAULTS)
    for measured in (0.0, 5.0, *NOT_MEASURED):
        assert controllers.update_tau(state, measured, DEFAULTS) == state | {"step": 1}
        assert controllers.update_beta(state, measured, DEFAULTS) == state


def test_a_target_that_comes_with_a_resumed_run_is_the_one_of_the_run_s_step():
    state = controllers.init_state(DEFAULTS)
    for _ in range(5):
        state = controllers.update_tau(state, 1.0, DEFAULTS)
    annealed = TAU_ON | {"maxent_target_weight_entropy": {0: 0.0, 5: 2.0}}
    state = controllers.resume_state(state, annealed)
    assert controllers.update_tau(state, 1.0, annealed)["tau"] > state["tau"]  # 2.0 - 1.0


@pytest.mark.parametrize("off", ["kl_target", "kl_horizon", "kl_ctl_step_size"])
def test_beta_is_off_unless_target_horizon_and_step_are_all_positive(off):
    state = controllers.init_state(BETA_ON)
    assert controllers.update_beta(state, 5.0, BETA_ON)["beta"] != 0.5
    assert controllers.update_beta(state, 5.0, BETA_ON | {off: 0.0}) == state


def test_a_target_entropy_of_zero_is_on():
    _, taus = run_tau([1.0], TAU_ON | {"maxent_target_weight_entropy": 0.0})
    assert taus == [pytest.approx(0.2 * math.exp(-0.5))]


def test_average_starts_at_the_first_finite_entropy_and_tau_follows_the_log_step():
    state, taus = run_tau([None, 1.4, 0.4, math.nan, 0.8], TAU_ON)
    first = 1.4
    second = 0.9 * first + 0.1 * 0.4  # 1.30
    third = 0.9 * second + 0.1 * 0.8  # 1.25
    # log tau sums the errors, 1 - mean
    one = 0.2 * math.exp(0.5 * (1 - first))
    two = 0.2 * math.exp(0.5 * (2 - first - second))
    three = 0.2 * math.exp(0.5 * (3 - first - second - third))
    assert taus == pytest.approx([0.2, one, two, two, three], rel=1e-12)
    assert state["entropy"] == pytest.approx(third, rel=1e-12)
    assert state["skipped"] == 2


@pytest.mark.parametrize(
    "own, learning_rate, still", [(3, 0, 3), (-1, 2, 2), (0, 5, 0), (-1, 0, 0)]
)
def test_tau_holds_still_in_the_warm_up_while_the_average_runs(own, learning_rate, still):
    config = TAU_ON | {"maxent_tau_warmup_steps": own, "warmup_steps": learning_rate}
    state, taus = run_tau([0.2, 0.4, 0.6, 0.8, 1.2, 1.4], config)
    assert taus[:still] == [0.2] * still
    assert len({0.2, *taus[still:]}) == 7 - still
    mean = 0.2
    for H in (0.4, 0.6, 0.8, 1.2, 1.4):
        mean = 0.9 * mean + 0.1 * H
    assert state["entropy"] == pytest.approx(mean, rel=1e-12)


@pytest.mark.parametrize("H, direction", [(0.3, +1), (1.7, -1), (1.0, 0)])
def test_too_little_entropy_raises_tau_and_too_much_lowers_it(H, direction):
    tau = run_tau([H], TAU_ON)[1][0]
    assert (tau > 0.2) - (tau < 0.2) == direction


def test_tau_stays_inside_its_bounds_and_comes_back_from_them():
    config = TAU_ON | {"maxent_tau_lr": 25.0, "maxent_tau_min": 0.05, "maxent_tau_max": 0.4}
    state, taus = run_tau([0.0] * 5, config)
    assert taus == [0.4] * 5
    state, taus = run_tau([2.0] * 30, config, state)
    assert taus[-1] == 0.05 and min(taus) == 0.05
    assert run_tau([0.0] * 30, config, state)[1][-1] == 0.4


def test_an_absurd_learning_rate_ends_at_a_bound_and_not_in_an_overflow():
    for H, bound in ((0.0, 10.0), (2.0, 0.01)):
        assert run_tau([H], TAU_ON | {"maxent_tau_lr": 1e9})[1] == [bound]


@pytest.mark.parametrize("missing", NOT_MEASURED)
def test_a_missing_measurement_changes_nothing_but_the_counts(missing):
    state, _ = run_tau([0.7, 0.9], TAU_ON)
    after = controllers.update_tau(state, missing, TAU_ON)
    assert after == state | {"step": 3, "skipped": 1}  # the step still counts for the warm-up
    state = controllers.init_state(BETA_ON)
    assert controllers.update_beta(state, missing, BETA_ON) == state | {"skipped": 1}


# --- beta

CLIPPED = {
    0.1: 1.0,
    0.11: 1.01,
    0.095: 0.995,
    0.12: 1.02,
    0.13: 1.02,
    1e300: 1.02,
    0.08: 0.98,
    0.0: 0.98,
}


@pytest.mark.parametrize("kl, factor", CLIPPED.items())
def test_beta_moves_by_the_clipped_relative_error_over_the_horizon(kl, factor):
    state = controllers.init_state(BETA_ON)
    beta = pytest.approx(0.5 * factor, rel=1e-12)
    assert controllers.update_beta(state, kl, BETA_ON) == state | {"beta": beta}


@examples
@given(
    st.floats(0, 1e6),
    st.floats(1e-3, 2.0),
    st.floats(1e-6, 10),
    st.floats(1.0, 1e4),
    st.floats(1e-3, 0.9),
)
def test_beta_changes_by_at_most_step_over_horizon_and_keeps_its_bounds(
    kl, beta, target, horizon, step
):
    config = BETA_ON | {"beta": beta, "kl_target": target, "kl_horizon": horizon}
    config["kl_ctl_step_size"] = step
    after = controllers.update_beta(controllers.init_state(config), kl, config)["beta"]
    assert abs(after - beta) <= beta * step / horizon * (1 + 1e-9)
    assert 1e-3 <= after <= 2.0
    assert after >= beta if kl >= target else after <= beta


@pytest.mark.parametrize("kl, start, bound", [(9.0, 1.99, 2.0), (0.0, 0.00101, 0.001)])
def test_beta_stops_at_its_bounds(kl, start, bound):
    state = controllers.init_state(BETA_ON | {"beta": start})
    for _ in range(3):
        state = controllers.update_beta(state, kl, BETA_ON)
    assert state["beta"] == bound


# --- plants: the controlled thing answers

UTILITIES = torch.randn(16, 8, generator=torch.Generator().manual_seed(0)) * 0.5
NOISE = (torch.randn(1500, generator=torch.Generator().manual_seed(1)) * 0.1).tolist()


def weight_entropy(tau):
    w = loss.maxent_weights(UTILITIES, None, tau, 0.0)
    return torch.special.entr(w).sum(1).mean().item()


@pytest.mark.parametrize("start", [0.02, 9.0])
@pytest.mark.parametrize("target", [0.8, 1.7])
@pytest.mark.parametrize("rate, steps, band", [(0.03, 1000, 0.05), (0.3, 200, 0.2)])
def test_tau_reaches_the_target_entropy_from_below_and_above_under_noise(
    start, target, rate, steps, band
):
    """At the default rate within 1,000 steps, at ten times the rate within 200; then it stays
    within `band` nats for 500 steps of noise."""
    config = TAU_ON | {"maxent_target_weight_entropy": target, "maxent_tau_lr": rate}
    config["maxent_tau"] = start
    assert abs(weight_entropy(start) - target) > 0.25
    state = controllers.init_state(config)
    entropies = []
    for noise in NOISE[: steps + 500]:
        entropies.append(weight_entropy(state["tau"]))
        state = controllers.update_tau(state, entropies[-1] + noise, config)
    assert max(abs(H - target) for H in entropies[steps:]) < band


@pytest.mark.parametrize("rate, settles", [(3.0, True), (20.0, True), (60.0, False)])
def test_the_tau_loop_is_stable_below_a_rate_of_about_30(rate, settles):
    config = TAU_ON | {"maxent_target_weight_entropy": 1.2, "maxent_tau_lr": rate}
    state = controllers.init_state(config)
    entropies = []
    for _ in range(600):
        entropies.append(weight_entropy(state["tau"]))
        state = controllers.update_tau(state, entropies[-1], config)
    assert (max(abs(H - 1.2) for H in entropies[-50:]) < 1e-3) == settles


@pytest.mark.parametrize("start", [0.02, 1.8])
def test_beta_reaches_the_target_kl_from_below_and_above_under_noise(start):
    """KL = 0.02 / beta, so beta must settle at 0.2: a factor of 10 at 2% a step takes 116 steps;
    within 10% from step 150 on."""
    state = controllers.init_state(BETA_ON | {"beta": start})
    betas = []
    for noise in NOISE[:500]:
        state = controllers.update_beta(state, 0.02 / state["beta"] * (1 + noise), BETA_ON)
        betas.append(state["beta"])
    assert all(abs(beta / 0.2 - 1) < 0.1 for beta in betas[150:])
    assert abs(betas[50] / 0.2 - 1) > 0.5  # and no sooner than the limit allows


# --- a target that moves

KINDS = {  # key: start, end
    "maxent_target_weight_entropy": (1.9, 1.4),
    "maxent_target_excess_entropy": (0.8, 0.4),
}


@pytest.mark.parametrize("key", KINDS)
def test_a_target_moves_on_a_straight_line_and_stays_at_its_end(key):
    start, end = KINDS[key]
    config = DEFAULTS | {key: {0: start, 40: end}}
    assert controllers.entropy_target(0, config) == start
    for step in range(41):
        expected = pytest.approx(start + (end - start) * step / 40, rel=1e-12)
        assert controllers.entropy_target(step, config) == expected
    for step in (40, 41, 1000):
        assert abs(controllers.entropy_target(step, config) - end) < 1e-15
    half = pytest.approx((start + end) / 2, rel=1e-12)
    assert controllers.entropy_target(20, config) == half
    up = config | {key: {0: end, 40: start}}
    quarter = pytest.approx(end + (start - end) / 4, rel=1e-12)
    assert controllers.entropy_target(10, up) == quarter
    constant = config | {key: start}
    assert {controllers.entropy_target(step, constant) for step in (0, 20, 40, 1000)} == {start}


def test_a_target_may_end_at_zero_nats():
    config = DEFAULTS | {"maxent_target_weight_entropy": {0: 1.0, 10: 0.0}}
    targets = [controllers.entropy_target(step, config) for step in (0, 5, 10, 99)]
    assert targets == [1.0, 0.5, 0.0, 0.0]


@pytest.mark.parametrize("step", [0, 5, 10])
def test_tau_moves_towards_the_target_of_its_own_step(step):
    key = "maxent_target_weight_entropy"
    state = controllers.init_state(TAU_ON) | {"step": step}
    annealed, constant = TAU_ON | {key: {0: 1.0, 10: 0.0}}, TAU_ON | {key: 1 - step / 10}
    moved = controllers.update_tau(state, 0.4, annealed)
    assert moved["tau"] == pytest.approx(controllers.update_tau(state, 0.4, constant)["tau"])
    assert moved["tau"] != state["tau"]


# --- state


def test_inputs_come_back_unchanged_and_the_new_state_is_another_object():
    for config in (DEFAULTS, TAU_ON, BETA_ON):
        settings_before = dict(config)
        state = controllers.init_state(config)
        before = copy.deepcopy(state)
        for measured in (0.4, None):
            for update in (controllers.update_tau, controllers.update_beta):
                assert update(state, measured, config) is not state
        assert state == before and config == settings_before


def test_a_fresh_state_takes_tau_and_beta_from_the_config():
    state = controllers.init_state(BETA_ON | {"maxent_tau": 0.7})
    meta = {"updates": 0, "m": [0.0, 0.0], "v": [0.0, 0.0]}
    assert state == {
        "step": 0,
        "tau": 0.7,
        "beta": 0.5,
        "entropy": None,
        "steering": "weights/entropy",
        "skipped": 0,
        "meta": meta,
    }
    state["meta"]["m"][0] = 1.0
    # nothing is shared between two runs of one process
    assert controllers.init_state(BETA_ON)["meta"] == meta


def test_a_resumed_run_takes_what_nothing_steers_from_the_config_and_keeps_the_rest_in_its_bounds():
    resume = controllers.resume_state
    state = controllers.init_state(DEFAULTS) | {"tau": 0.3, "beta": 0.7, "entropy": 1.1, "step": 9}
    new = {"maxent_tau": 0.05, "beta": 0.0}
    assert resume(state, DEFAULTS | new) == state | {"tau": 0.05, "beta": 0.0}
    assert resume(state, TAU_ON | {"beta": 0.1}) == state | {"beta": 0.1}
    assert resume(state, BETA_ON | {"maxent_tau": math.inf}) == state | {"tau": math.inf}

    meta = TAU_ON | BETA_ON | {"controller_meta_method": "analytic", "maxent_tau_max": 10.0}
    assert resume(state, meta) == state
    fresh = {"tau": meta["maxent_tau"], "beta": meta["beta"]}
    for tau in (0.0, math.inf):  # nothing steered it there: the controllers begin as in a fresh run
        assert resume(state | {"tau": tau, "beta": 0.0}, meta) == state | fresh
    outside = state | {"tau": 30.0, "beta": 9.0}
    assert resume(outside, meta) == state | {"tau": 10.0, "beta": 2.0}

    excess = TAU_ON | {"maxent_target_weight_entropy": -1.0, "beta": 0.7}
    excess["maxent_target_excess_entropy"] = 0.5
    forgotten = {"entropy": None, "steering": "weights/excess_entropy"}
    assert resume(state, excess) == state | forgotten


# --- state through JSON

BOTH = CONTROLLERS["tau_excess"] | CONTROLLERS["beta"] | {"maxent_tau_warmup_steps": 2}
SELDOM = CONTROLLERS["analytic"] | {"controller_meta_update_interval": 3}


@pytest.mark.parametrize(
    "config", [*CONTROLLERS.values(), BOTH, CONTROLLERS["analytic"] | ADAM, SELDOM]
)
def test_a_state_through_json_at_any_step_continues_to_the_bit(config):
    config = DEFAULTS | {"maxent_tau": 0.3, "beta": 0.3} | config
    path = replay(config, through_json, None)
    assert len({(state["tau"], state["beta"]) for state in path}) > 2
    assert path[-1]["skipped"] >= 1
    assert resumes_exactly(config)


PARTS = [
    ("tau_excess", "entropy"),
    ("tau_entropy", "step"),
    ("first_order", "meta"),
    ("truncated_backprop", "meta"),
]
for method in METHODS[1:]:
    PARTS += [(method, "updates"), (method, "m"), (method, "v")]


@pytest.mark.parametrize("name, part", PARTS)
def test_every_part_of_the_state_is_needed_to_continue(name, part):
    """So that the test above can fail: a checkpoint that forgets one part goes elsewhere."""
    config = setting(name, maxent_tau=0.3, beta=0.3, maxent_tau_warmup_steps=4)
    fresh = controllers.init_state(config)

    def forget(state):
        if part in state:
            return state | {part: fresh[part]}
        return state | {"meta": state["meta"] | {part: fresh["meta"][part]}}

    assert not resumes_exactly(config, forget)


def test_meta_replaces_both_rules():
    config = setting("analytic")
    state = controllers.init_state(config)
    assert controllers.update_tau(state, 0.1, config) == state | {"step": 1}
    assert controllers.update_beta(state, 9.0, config) == state
    assert not controllers.steers_tau(config) and not controllers.steers_beta(config)
