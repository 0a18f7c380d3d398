"""controllers.py against section 5 of MATH.md: tables computed by hand, then plants that answer to tau and beta."""
import json
import math
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import controllers
import loss
from common import read_config_file

torch.set_num_threads(1)
DEFAULTS = read_config_file(Path(controllers.__file__).parent / "config" / "default.py")
TAU_ON = DEFAULTS | dict(maxent_target_weight_entropy=1.0, maxent_tau_lr=0.5, maxent_tau=0.2, maxent_tau_min=0.01, maxent_tau_max=10.0, maxent_tau_warmup_steps=0)
BETA_ON = DEFAULTS | dict(kl_target=0.1, kl_horizon=10.0, kl_ctl_step_size=0.2, beta=0.5, beta_min=1e-3, beta_max=2.0)
examples = settings(derandomize=True, deadline=None, max_examples=100)
NOT_MEASURED = [None, math.nan, math.inf, -math.inf]


def run_tau(entropies, config, state=None):
    """tau after each step."""
    state, taus = state or controllers.init_state(config), []
    for H in entropies:
        state = controllers.update_tau(state, H, config)
        taus.append(state["tau"])
    return state, taus


# --- tau

def test_off_controllers_return_the_state_as_it_was_whatever_is_measured():
    state = controllers.init_state(DEFAULTS)
    for measured in (0.0, 5.0, *NOT_MEASURED):
        assert controllers.update_tau(state, measured, DEFAULTS) == state
        assert controllers.update_beta(state, measured, DEFAULTS) == state


@pytest.mark.parametrize("off", ["kl_target", "kl_horizon", "kl_ctl_step_size"])
def test_beta_is_off_unless_target_horizon_and_step_are_all_positive(off):
    state = controllers.init_state(BETA_ON)
    assert controllers.update_beta(state, 5.0, BETA_ON)["beta"] != 0.5
    assert controllers.update_beta(state, 5.0, BETA_ON | {off: 0.0}) == state


def test_a_target_entropy_of_zero_is_on():
    assert run_tau([1.0], TAU_ON | {"maxent_target_weight_entropy": 0.0})[1] == [pytest.approx(0.2 * math.exp(-0.5))]


def test_average_starts_at_the_first_finite_entropy_and_tau_follows_the_log_step():
    state, taus = run_tau([None, 1.4, 0.4, math.nan, 0.8], TAU_ON)
    means = [1.4, 0.9 * 1.4 + 0.1 * 0.4, 0.9 * (0.9 * 1.4 + 0.1 * 0.4) + 0.1 * 0.8]      # 1.4, 1.30, 1.25
    one, two, three = (0.2 * math.exp(0.5 * (k - sum(means[:k]))) for k in (1, 2, 3))     # log tau sums the errors 1 - mean
    assert taus == pytest.approx([0.2, one, two, two, three], rel=1e-12)
    assert state["weight_entropy"] == pytest.approx(means[2], rel=1e-12) and state["skipped"] == 2


@pytest.mark.parametrize("own, learning_rate, still", [(3, 0, 3), (-1, 2, 2), (0, 5, 0), (-1, 0, 0)])
def test_tau_holds_still_in_the_warm_up_while_the_average_runs(own, learning_rate, still):
    config = TAU_ON | dict(maxent_tau_warmup_steps=own, warmup_steps=learning_rate)
    state, taus = run_tau([0.2, 0.4, 0.6, 0.8, 1.2, 1.4], config)
    assert taus[:still] == [0.2] * still and len(set([0.2, *taus[still:]])) == 7 - still
    mean = 0.2
    for H in (0.4, 0.6, 0.8, 1.2, 1.4):
        mean = 0.9 * mean + 0.1 * H
    assert state["weight_entropy"] == pytest.approx(mean, rel=1e-12)


@pytest.mark.parametrize("H, direction", [(0.3, +1), (1.7, -1), (1.0, 0)])
def test_too_little_entropy_raises_tau_and_too_much_lowers_it(H, direction):
    tau = run_tau([H], TAU_ON)[1][0]
    assert (tau > 0.2) - (tau < 0.2) == direction


def test_tau_stays_inside_its_bounds_and_comes_back_from_them():
    config = TAU_ON | dict(maxent_tau_lr=25.0, maxent_tau_min=0.05, maxent_tau_max=0.4)
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
    assert after == state | {"step": 3, "skipped": 1}       # the step still counts for the warm-up
    state = controllers.init_state(BETA_ON)
    assert controllers.update_beta(state, missing, BETA_ON) == state | {"skipped": 1}


# --- beta

@pytest.mark.parametrize("kl, factor", [(0.1, 1.0), (0.11, 1.01), (0.095, 0.995), (0.12, 1.02), (0.13, 1.02), (1e300, 1.02), (0.08, 0.98), (0.0, 0.98)])
def test_beta_moves_by_the_clipped_relative_error_over_the_horizon(kl, factor):
    state = controllers.init_state(BETA_ON)
    assert controllers.update_beta(state, kl, BETA_ON) == state | {"beta": pytest.approx(0.5 * factor, rel=1e-12)}


@examples
@given(st.floats(0, 1e6), st.floats(1e-3, 2.0), st.floats(1e-6, 10), st.floats(1.0, 1e4), st.floats(1e-3, 0.9))
def test_beta_changes_by_at_most_step_over_horizon_and_keeps_its_bounds(kl, beta, target, horizon, step):
    config = BETA_ON | dict(kl_target=target, kl_horizon=horizon, kl_ctl_step_size=step)
    after = controllers.update_beta(controllers.init_state(config | {"beta": beta}), kl, config)["beta"]
    assert abs(after - beta) <= beta * step / horizon * (1 + 1e-9) and 1e-3 <= after <= 2.0
    assert (after >= beta) if kl >= target else (after <= beta)


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
def test_tau_reaches_the_target_entropy_from_below_and_above_under_noise(start, target, rate, steps, band):
    """At the default rate within 1,000 steps, at ten times the rate within 200; then it stays within `band` nats for 500 steps of noise."""
    config = TAU_ON | dict(maxent_target_weight_entropy=target, maxent_tau_lr=rate, maxent_tau=start)
    assert abs(weight_entropy(start) - target) > 0.25
    state, entropies = controllers.init_state(config), []
    for noise in NOISE[:steps + 500]:
        entropies.append(weight_entropy(state["tau"]))
        state = controllers.update_tau(state, entropies[-1] + noise, config)
    assert max(abs(H - target) for H in entropies[steps:]) < band


@pytest.mark.parametrize("rate, settles", [(3.0, True), (20.0, True), (60.0, False)])
def test_the_tau_loop_is_stable_below_a_rate_of_about_30(rate, settles):
    config = TAU_ON | dict(maxent_target_weight_entropy=1.2, maxent_tau_lr=rate)
    state, entropies = controllers.init_state(config), []
    for _ in range(600):
        entropies.append(weight_entropy(state["tau"]))
        state = controllers.update_tau(state, entropies[-1], config)
    assert (max(abs(H - 1.2) for H in entropies[-50:]) < 1e-3) == settles


@pytest.mark.parametrize("start", [0.02, 1.8])
def test_beta_reaches_the_target_kl_from_below_and_above_under_noise(start):
    """KL = 0.02 / beta, so beta must settle at 0.2: a factor of 10 at 2% a step takes 116 steps; within 10% from step 150 on."""
    state, betas = controllers.init_state(BETA_ON | {"beta": start}), []
    for noise in NOISE[:500]:
        state = controllers.update_beta(state, 0.02 / state["beta"] * (1 + noise), BETA_ON)
        betas.append(state["beta"])
    assert all(abs(beta / 0.2 - 1) < 0.1 for beta in betas[150:])
    assert abs(betas[50] / 0.2 - 1) > 0.5       # and no sooner than the limit allows


# --- state

def test_a_json_round_trip_in_the_middle_of_a_run_continues_to_the_bit():
    config = TAU_ON | BETA_ON | dict(maxent_target_weight_entropy=1.0, maxent_tau_warmup_steps=3)
    inputs = [(None, 0.3), (0.2, math.nan), (0.31, 0.07), (1.9, 0.11), (math.inf, None), (1 / 3, 0.1)] * 3
    for cut in range(len(inputs)):
        straight = resumed = controllers.init_state(config)
        for step, (H, kl) in enumerate(inputs):
            if step == cut:
                resumed = json.loads(json.dumps(resumed, allow_nan=False))
            straight, resumed = (controllers.update_beta(controllers.update_tau(s, H, config), kl, config) for s in (straight, resumed))
        assert straight == resumed and straight["tau"] != 0.2 and straight["beta"] != 0.5


def test_inputs_come_back_unchanged_and_the_new_state_is_another_object():
    for config in (DEFAULTS, TAU_ON, BETA_ON):
        state, settings_before = controllers.init_state(config), dict(config)
        before = dict(state)
        for measured in (0.4, None):
            for update in (controllers.update_tau, controllers.update_beta):
                assert update(state, measured, config) is not state
        assert state == before and config == settings_before


def test_a_fresh_state_takes_tau_and_beta_from_the_config():
    state = controllers.init_state(BETA_ON | {"maxent_tau": 0.7})
    assert state == {"step": 0, "tau": 0.7, "beta": 0.5, "weight_entropy": None, "skipped": 0}
