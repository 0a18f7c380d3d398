"""controllers.py against sections 5 and 6 of MATH.md: tables computed by hand, plants that answer to tau and beta, the meta-controller's
potential in plain Python, and wrong variants of the rules that these checks must notice."""

import copy
import json
import math
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import controllers
import loss
from checks import warn_config
from common import UserError, load_config, read_config_file

torch.set_num_threads(1)
DEFAULTS = read_config_file(Path(controllers.__file__).parent / "config" / "default.py")
TAU_ON = DEFAULTS | dict(
    maxent_target_weight_entropy=1.0,
    maxent_tau_lr=0.5,
    maxent_tau=0.2,
    maxent_tau_min=0.01,
    maxent_tau_max=10.0,
    maxent_tau_warmup_steps=0,
)
BETA_ON = DEFAULTS | dict(
    kl_target=0.1, kl_horizon=10.0, kl_ctl_step_size=0.2, beta=0.5, beta_min=1e-3, beta_max=2.0
)
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
    assert run_tau([1.0], TAU_ON | {"maxent_target_weight_entropy": 0.0})[1] == [
        pytest.approx(0.2 * math.exp(-0.5))
    ]


def test_average_starts_at_the_first_finite_entropy_and_tau_follows_the_log_step():
    state, taus = run_tau([None, 1.4, 0.4, math.nan, 0.8], TAU_ON)
    means = [
        1.4,
        0.9 * 1.4 + 0.1 * 0.4,
        0.9 * (0.9 * 1.4 + 0.1 * 0.4) + 0.1 * 0.8,
    ]  # 1.4, 1.30, 1.25
    one, two, three = (
        0.2 * math.exp(0.5 * (k - sum(means[:k]))) for k in (1, 2, 3)
    )  # log tau sums the errors 1 - mean
    assert taus == pytest.approx([0.2, one, two, two, three], rel=1e-12)
    assert state["entropy"] == pytest.approx(means[2], rel=1e-12) and state["skipped"] == 2


@pytest.mark.parametrize(
    "own, learning_rate, still", [(3, 0, 3), (-1, 2, 2), (0, 5, 0), (-1, 0, 0)]
)
def test_tau_holds_still_in_the_warm_up_while_the_average_runs(own, learning_rate, still):
    config = TAU_ON | dict(maxent_tau_warmup_steps=own, warmup_steps=learning_rate)
    state, taus = run_tau([0.2, 0.4, 0.6, 0.8, 1.2, 1.4], config)
    assert taus[:still] == [0.2] * still and len(set([0.2, *taus[still:]])) == 7 - still
    mean = 0.2
    for H in (0.4, 0.6, 0.8, 1.2, 1.4):
        mean = 0.9 * mean + 0.1 * H
    assert state["entropy"] == pytest.approx(mean, rel=1e-12)


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


def test_a_resumed_run_takes_from_the_config_what_nothing_steers_and_keeps_the_rest_within_its_bounds():
    state = controllers.init_state(DEFAULTS) | {"tau": 0.3, "beta": 0.7, "entropy": 1.1, "step": 9}
    assert controllers.resume_state(
        state, DEFAULTS | {"maxent_tau": 0.05, "beta": 0.0}
    ) == state | {"tau": 0.05, "beta": 0.0}
    assert controllers.resume_state(state, TAU_ON | {"beta": 0.1}) == state | {"beta": 0.1}
    assert controllers.resume_state(state, BETA_ON | {"maxent_tau": math.inf}) == state | {
        "tau": math.inf
    }
    meta = TAU_ON | BETA_ON | {"controller_meta_method": "analytic", "maxent_tau_max": 10.0}
    assert controllers.resume_state(state, meta) == state
    for tau in (0.0, math.inf):  # nothing steered it there: the controllers begin as in a fresh run
        assert controllers.resume_state(state | {"tau": tau, "beta": 0.0}, meta) == state | {
            "tau": meta["maxent_tau"],
            "beta": meta["beta"],
        }
    assert controllers.resume_state(state | {"tau": 30.0, "beta": 9.0}, meta) == state | {
        "tau": 10.0,
        "beta": 2.0,
    }
    older = {key: value for key, value in state.items() if key != "steering"}
    assert controllers.resume_state(older, TAU_ON | {"beta": 0.7}) == state
    excess = TAU_ON | {
        "maxent_target_weight_entropy": -1.0,
        "maxent_target_excess_entropy": 0.5,
        "beta": 0.7,
    }
    assert controllers.resume_state(state, excess) == state | {
        "entropy": None,
        "steering": "weights/excess_entropy",
    }


@pytest.mark.parametrize("missing", NOT_MEASURED)
def test_a_missing_measurement_changes_nothing_but_the_counts(missing):
    state, _ = run_tau([0.7, 0.9], TAU_ON)
    after = controllers.update_tau(state, missing, TAU_ON)
    assert after == state | {"step": 3, "skipped": 1}  # the step still counts for the warm-up
    state = controllers.init_state(BETA_ON)
    assert controllers.update_beta(state, missing, BETA_ON) == state | {"skipped": 1}


# --- beta


@pytest.mark.parametrize(
    "kl, factor",
    [
        (0.1, 1.0),
        (0.11, 1.01),
        (0.095, 0.995),
        (0.12, 1.02),
        (0.13, 1.02),
        (1e300, 1.02),
        (0.08, 0.98),
        (0.0, 0.98),
    ],
)
def test_beta_moves_by_the_clipped_relative_error_over_the_horizon(kl, factor):
    state = controllers.init_state(BETA_ON)
    assert controllers.update_beta(state, kl, BETA_ON) == state | {
        "beta": pytest.approx(0.5 * factor, rel=1e-12)
    }


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
    config = BETA_ON | dict(kl_target=target, kl_horizon=horizon, kl_ctl_step_size=step)
    after = controllers.update_beta(controllers.init_state(config | {"beta": beta}), kl, config)[
        "beta"
    ]
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
def test_tau_reaches_the_target_entropy_from_below_and_above_under_noise(
    start, target, rate, steps, band
):
    """At the default rate within 1,000 steps, at ten times the rate within 200; then it stays within `band` nats for 500 steps of noise."""
    config = TAU_ON | dict(
        maxent_target_weight_entropy=target, maxent_tau_lr=rate, maxent_tau=start
    )
    assert abs(weight_entropy(start) - target) > 0.25
    state, entropies = controllers.init_state(config), []
    for noise in NOISE[: steps + 500]:
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
    assert abs(betas[50] / 0.2 - 1) > 0.5  # and no sooner than the limit allows


# --- state


def test_inputs_come_back_unchanged_and_the_new_state_is_another_object():
    for config in (DEFAULTS, TAU_ON, BETA_ON):
        state, settings_before = controllers.init_state(config), dict(config)
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
    assert (
        controllers.init_state(BETA_ON)["meta"] == meta
    )  # nothing is shared between two runs of one process


# --- one plant for all controllers

META = dict(controller_meta_method="analytic", maxent_target_weight_entropy=1.6, kl_target=0.5)
ADAM = dict(controller_meta_optimizer="adam", controller_meta_lr=0.05)
CONTROLLERS = {
    "tau_entropy": dict(maxent_target_weight_entropy=1.6, maxent_tau_lr=0.3),
    "tau_excess": dict(maxent_target_excess_entropy=0.5, maxent_tau_lr=0.3),
    "beta": dict(kl_target=0.5),
    "analytic": META | dict(controller_meta_lr=0.1),
    "first_order": META | ADAM | dict(controller_meta_method="first_order"),
    "truncated_backprop": META | ADAM | dict(controller_meta_method="truncated_backprop"),
}
METHODS = ["analytic", "first_order", "truncated_backprop"]
REACHES = {  # the measures that must arrive, steps allowed (they take 43, 48, 120, 157, 139 and 97 from the slowest start)
    "tau_entropy": (["weights/entropy"], 80),
    "tau_excess": (["weights/excess_entropy"], 80),
    "beta": (["kl"], 150),
    "analytic": (["weights/entropy", "kl"], 200),
    "first_order": (["weights/entropy", "kl"], 200),
    "truncated_backprop": (["weights/entropy", "kl"], 150),
}
AIMS = {
    "weights/entropy": (1.6, 0.1),
    "weights/excess_entropy": (0.5, 0.06),
    "kl": (0.5, 0.08),
}  # target, tolerance
HOLD = 100  # steps that it must then stay there
STARTS = {  # (tau, beta) and whether each measure begins below (-1) or above (+1) its target
    "tau_entropy": [(0.06, 0.2, [-1]), (3.0, 0.2, [1])],
    "tau_excess": [(0.06, 0.2, [-1]), (3.0, 0.2, [1])],
    "beta": [(0.2, 2.0, [-1]), (0.2, 0.06, [1])],
    **{
        method: [(0.06, 0.06, [-1, 1]), (3.0, 0.06, [1, -1]), (0.1, 2.0, [1, -1])]
        for method in METHODS
    },
}


def setting(name, **more):
    return DEFAULTS | CONTROLLERS[name] | more


class Plant:
    """48 groups of 8 answers, rewards 0/1 or graded, a fixed reference, and a policy whose group scores relax to the weights that tau and
    beta ask for. The noise: a step measures 16 of the groups at random, and disturbs all scores."""

    def __init__(self, tau, beta, seed=0):
        self.random = random = torch.Generator().manual_seed(seed)
        rates = torch.rand(24, 8, generator=random), torch.rand(24, 1, generator=random)
        self.rewards = torch.cat(
            [(rates[0] < rates[1]).double(), torch.randint(5, (24, 8), generator=random) / 4.0]
        )
        self.rewards[:, 0], self.rewards[:, 1] = 1.0, 0.0  # no group of equal rewards
        self.ref = torch.randn(48, 8, generator=random, dtype=torch.float64)
        self.utilities = loss.log_reward_targets(self.rewards, 1.0, 0.0)
        self.scores = self.weights(
            tau, beta
        ).log()  # it has been trained for long with the tau and beta of the start

    def weights(self, tau, beta):
        return loss.maxent_weights(self.utilities, self.ref, tau, beta)

    def batch(self, rows):
        return {
            "utilities": self.utilities[rows],
            "scores": self.scores[rows],
            "ref_scores": self.ref[rows],
        }

    def measure(self, tau, beta, rows=slice(None)):
        """The metrics of weights and policy; over all groups, without noise, unless asked for some."""
        w, s, ref = (
            self.weights(tau, beta)[rows],
            self.scores[rows].log_softmax(1),
            self.ref[rows].log_softmax(1),
        )
        return loss.weight_metrics(w, self.rewards[rows], torch.ones(len(w), dtype=torch.bool)) | {
            "kl": (s.exp() * (s - ref)).sum(1).mean().item()
        }

    def step(self, state, config):
        """Part 5 of train.py, then the policy learns from the weights of this step."""
        rows, w = (
            torch.randperm(48, generator=self.random)[:16],
            self.weights(state["tau"], state["beta"]),
        )
        after = control(
            state, self.batch(rows), self.measure(state["tau"], state["beta"], rows), config
        )
        self.scores = (
            self.scores
            + 0.5 * (w - self.scores.softmax(1))
            + 0.05 * torch.randn(48, 8, generator=self.random, dtype=torch.float64)
        )
        return after


def control(state, batch, metrics, config):
    if config["controller_meta_method"]:
        return controllers.meta_step(state, batch, config)[0]
    return controllers.update_beta(
        controllers.update_tau(state, metrics.get(controllers.steering_entropy(config)), config),
        metrics.get("kl"),
        config,
    )


def drive(plant, config, steps, state=None):
    """What all groups measure at every step, with tau and beta; and the last state."""
    state, seen = state or controllers.init_state(config), []
    for _ in range(steps):
        seen.append(
            plant.measure(state["tau"], state["beta"])
            | {"tau": state["tau"], "beta": state["beta"]}
        )
        state = plant.step(state, config)
    return seen, state


def arrival(name, start, steps, hold, aims=AIMS, **more):
    """The step after which every measure stays within its tolerance; at most `steps` means that it arrived. Bounds hold all the way."""
    config = setting(name, maxent_tau=start[0], beta=start[1], **more)
    seen, _ = drive(Plant(*start[:2]), config, steps + hold)
    assert all(
        config["maxent_tau_min"] <= x["tau"] <= config["maxent_tau_max"]
        and config["beta_min"] <= x["beta"] <= config["beta_max"]
        for x in seen
    )
    return max(
        k + 1
        for k, x in [(-1, seen[0]), *enumerate(seen)]
        if k < 0 or any(abs(x[m] - aims[m][0]) >= aims[m][1] for m in REACHES[name][0])
    )


@pytest.mark.parametrize(
    "name, start", [(name, start) for name, starts in STARTS.items() for start in starts]
)
def test_every_controller_reaches_its_targets_from_both_sides_under_noise_and_stays(name, start):
    first = Plant(*start[:2]).measure(*start[:2])
    assert [int(math.copysign(1, first[m] - AIMS[m][0])) for m in REACHES[name][0]] == start[2]
    assert all(abs(first[m] - AIMS[m][0]) > AIMS[m][1] for m in REACHES[name][0])
    assert 0 < arrival(name, start, REACHES[name][1], HOLD) <= REACHES[name][1]


def test_a_start_far_above_traps_first_order_but_not_the_residual_feedback():
    """A known limit (here already from tau = beta = 1, the whole range of u). More beta brings H down to that of softmax(ref), nearer to its target;
    one virtual step from a policy next to the reference hardly moves the KL, so nothing holds beta back, and at large beta all of Phi is flat."""
    assert arrival("analytic", (3.0, 3.0), REACHES["analytic"][1], 50) <= REACHES["analytic"][1]
    seen, _ = drive(Plant(3.0, 3.0), setting("first_order", maxent_tau=3.0, beta=3.0), 300)
    assert seen[-1]["beta"] > 5 and seen[-1]["kl"] < 0.05


# --- bounds

NARROW = dict(
    maxent_tau_min=0.1, maxent_tau_max=1.0, beta_min=0.12, beta_max=0.8, maxent_tau=0.3, beta=0.3
)
EDGES = {"tau": (0.1, 1.0), "beta": (0.12, 0.8)}
FLAT, SHARP = (
    {"entropy": 2.07, "excess": 0.99, "kl": 1e-3},
    {"entropy": 0.5, "excess": 0.01, "kl": 3.0},
)  # targets beyond the narrow bounds


def aim(name, at):
    keys = {
        "maxent_target_weight_entropy": "entropy",
        "maxent_target_excess_entropy": "excess",
        "kl_target": "kl",
    }
    return {key: at[kind] for key, kind in keys.items() if key in CONTROLLERS[name]}


@pytest.mark.parametrize("name", CONTROLLERS)
def test_a_controller_at_its_bounds_comes_back_when_the_error_changes_sign(name):
    """Flat weights close to the reference ask for the largest tau or beta, sharp ones far from it for the smallest."""
    flat, sharp = (setting(name, **NARROW, **aim(name, at)) for at in (FLAT, SHARP))
    moved = [
        key
        for key in ("tau", "beta")
        if key != {"tau_entropy": "beta", "tau_excess": "beta", "beta": "tau"}.get(name)
    ]
    gradients, plant, state = name in METHODS[1:], Plant(0.3, 0.3), None
    for config in (flat, sharp, flat):
        seen, state = drive(plant, config, 100 if gradients else 200, state)
        assert all(low <= x[key] <= high for x in seen for key, (low, high) in EDGES.items())
        if (
            gradients and config is flat
        ):  # they weigh the two errors against each other, and may stop on the way
            assert all(seen[-1][key] > 0.3 for key in moved)
        else:
            assert [seen[-1][key] for key in moved] == [EDGES[key][config is flat] for key in moved]


# --- meta: the potential and its gradient


def softmax(x):
    top = max(x)
    e = [math.exp(a - top) for a in x]
    return [a / sum(e) for a in e]


def literal_potential(tau, beta, batch, targets, steps, rate):
    """Section 6 in plain Python: Phi, H, K."""
    H = K = 0.0
    for u, s, l in zip(*(batch[key].tolist() for key in ("utilities", "scores", "ref_scores"))):
        w = softmax([(a + beta * b) / (tau + beta) for a, b in zip(u, l)])
        for _ in range(steps):
            s = [a + rate * (x - y) for a, x, y in zip(s, w, softmax(s))]
        H -= sum(x * math.log(x) for x in w if x > 0) / len(batch["scores"])
        K += sum(x * math.log(x / y) for x, y in zip(softmax(s), softmax(l))) / len(batch["scores"])
    return 0.5 * (H - targets[0]) ** 2 + 0.5 * (K - targets[1]) ** 2, H, K


def literal_gradient(tau, beta, batch, targets, steps, rate, h=1e-5):
    """Central differences by (log tau, log beta)."""
    up, down = math.exp(h), math.exp(-h)
    pairs = ((tau * up, beta), (tau * down, beta)), ((tau, beta * up), (tau, beta * down))
    return [
        (
            literal_potential(*a, batch, targets, steps, rate)[0]
            - literal_potential(*b, batch, targets, steps, rate)[0]
        )
        / (2 * h)
        for a, b in pairs
    ]


def table(low, high):
    return st.lists(
        st.lists(st.floats(low, high), min_size=4, max_size=4), min_size=2, max_size=2
    ).map(lambda rows: torch.tensor(rows, dtype=torch.float64))


batches = st.fixed_dictionaries(
    {"utilities": table(-3, 0), "scores": table(-2, 2), "ref_scores": table(-2, 2)}
)
temperature = st.floats(0.2, 3.0)
few = settings(derandomize=True, deadline=None, max_examples=40)
ORDINARY = Plant(0.3, 0.3).batch(slice(0, None, 6))


def gradient_errors(batch, tau, beta, method, hessian=True, rate=1.0, truncation=8):
    """How far Phi and its gradient are from the literal ones, relative."""
    config = setting(
        method,
        maxent_tau=tau,
        beta=beta,
        controller_meta_use_hessian=hessian,
        controller_meta_virtual_lr=rate,
        controller_meta_truncation_steps=truncation,
    )
    phi, gradient = controllers.meta_gradient(controllers.init_state(config), batch, config)
    steps = {"first_order": 1, "truncated_backprop": truncation}[method]
    literal = (
        literal_potential(tau, beta, batch, (1.6, 0.5), steps, rate)[0],
        *literal_gradient(tau, beta, batch, (1.6, 0.5), steps, rate),
    )
    return [
        abs(x - y) / (abs(y) + 1e-4) for x, y in zip((phi, *gradient), literal)
    ]  # differences are exact to about 1e-9


@pytest.mark.parametrize(
    "method, hessian", [("first_order", True), ("first_order", False), ("truncated_backprop", True)]
)
@few
@given(batches, temperature, temperature, st.floats(0.1, 3.9), st.integers(1, 8))
def test_gradient_equals_central_differences_of_the_literal_potential(
    method, hessian, batch, tau, beta, rate, truncation
):
    assert max(gradient_errors(batch, tau, beta, method, hessian, rate, truncation)) < 1e-4


def test_without_the_hessian_only_one_virtual_step_has_the_true_gradient():
    assert max(gradient_errors(ORDINARY, 0.3, 0.3, "truncated_backprop")) < 1e-4
    assert (
        max(gradient_errors(ORDINARY, 0.3, 0.3, "truncated_backprop", hessian=False, truncation=1))
        < 1e-4
    )
    phi, by_tau, by_beta = gradient_errors(ORDINARY, 0.3, 0.3, "truncated_backprop", hessian=False)
    assert phi < 1e-12 and by_tau > 0.01 and by_beta > 0.01


@few
@given(batches, temperature, temperature, st.integers(0, 4), st.floats(0.1, 3.9))
def test_potential_entropy_and_kl_are_the_literal_ones(batch, tau, beta, steps, rate):
    found = controllers.potential(
        torch.tensor(tau).log().double(),
        torch.tensor(beta).log().double(),
        batch,
        (1.0, 0.2),
        steps,
        rate,
        True,
    )
    tau, beta = torch.tensor([tau, beta]).log().double().exp().tolist()
    assert [x.item() for x in found] == pytest.approx(
        literal_potential(tau, beta, batch, (1.0, 0.2), steps, rate), rel=1e-9, abs=1e-12
    )


def kl_of_policy(batch, tau=0.3, beta=0.3, steps=0, rate=1.0):
    logs = torch.tensor([tau, beta], dtype=torch.float64).log()
    return controllers.potential(*logs, batch, (1.6, 0.5), steps, rate, True)[2].item()


@few
@given(table(-2, 2), table(-3, 0), temperature, temperature, st.floats(-5, 5))
def test_the_kl_is_zero_where_the_policy_is_the_reference(ref, utilities, tau, beta, shift):
    assert (
        abs(
            kl_of_policy(
                {"utilities": utilities, "scores": ref + shift, "ref_scores": ref}, tau, beta
            )
        )
        < 1e-12
    )  # a common shift is no difference


def entropy_slopes(batch, tau, beta):
    """dH/dtau and dH/dbeta of potential()."""
    logs = [torch.tensor(math.log(x), dtype=torch.float64, requires_grad=True) for x in (tau, beta)]
    found = torch.autograd.grad(
        controllers.potential(*logs, batch, (1.6, 0.5), 1, 1.0, True)[1], logs
    )
    return found[0].item() / tau, found[1].item() / beta


@few
@given(batches, temperature, temperature)
def test_slopes_of_the_entropy_have_their_closed_forms(batch, tau, beta):
    u, l = batch["utilities"], batch["ref_scores"]
    w = loss.maxent_weights(u, l, tau, beta)
    a, b = u + beta * l, tau * l - u
    a, b = (x - (w * x).sum(1, keepdim=True) for x in (a, b))
    variance, covariance = (w * a * a).sum(1).mean().item(), (w * a * b).sum(1).mean().item()
    assert entropy_slopes(batch, tau, beta) == pytest.approx(
        (variance / (tau + beta) ** 3, -covariance / (tau + beta) ** 3), rel=1e-6, abs=1e-9
    )
    assert variance >= 0


def test_more_beta_can_flatten_the_weights_or_sharpen_them():
    slope, zero = (
        torch.tensor([[0.0, -1.0, -2.0, -3.0]], dtype=torch.float64),
        torch.zeros(1, 4, dtype=torch.float64),
    )
    flat_reference = {"utilities": slope, "scores": zero, "ref_scores": zero}
    sharp_reference = {"utilities": zero, "scores": zero, "ref_scores": slope}
    assert (
        entropy_slopes(flat_reference, 0.5, 0.5)[1] > 0.1
        and entropy_slopes(sharp_reference, 0.5, 0.5)[1] < -0.1
    )


# --- meta: steps


@pytest.fixture
def no_differentiation(monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("differentiated")

    monkeypatch.setattr(torch.autograd, "grad", refuse)
    monkeypatch.setattr(torch.autograd, "backward", refuse)


def test_analytic_takes_the_residuals_without_differentiation(no_differentiation):
    config = setting("analytic", maxent_tau=0.4, beta=0.7)
    _, H, K = literal_potential(0.4, 0.7, ORDINARY, (0, 0), 0, 1.0)
    state, metrics = controllers.meta_step(controllers.init_state(config), ORDINARY, config)
    assert (metrics["meta/tau_grad"], metrics["meta/beta_grad"]) == pytest.approx(
        (H - 1.6, 0.5 - K), rel=1e-9
    )
    assert metrics["meta/loss"] == pytest.approx(
        0.5 * (H - 1.6) ** 2 + 0.5 * (K - 0.5) ** 2, rel=1e-9
    )
    assert metrics["meta/grad_norm"] == pytest.approx(math.hypot(H - 1.6, 0.5 - K), rel=1e-9)
    assert (state["tau"], state["beta"]) == pytest.approx(
        (0.4 * math.exp(-0.1 * (H - 1.6)), 0.7 * math.exp(0.1 * (K - 0.5))), rel=1e-9
    )
    with pytest.raises(AssertionError, match="differentiated"):
        controllers.meta_step(state, ORDINARY, setting("first_order"))


def test_the_residuals_are_the_gradient_of_a_convex_function():
    """Why analytic arrives from everywhere: V = mean max_w <w, u> + tau * H(w) - beta * KL(w || ref) is convex in (tau, beta), and once the policy
    is w, V - tau * H* + beta * KL* has the slopes H - H* and KL* - K."""
    u, log_ref = ORDINARY["utilities"], ORDINARY["ref_scores"].log_softmax(1)

    def value(tau, beta):
        return (
            ((tau + beta) * ((u + beta * log_ref) / (tau + beta)).logsumexp(1)).mean().item()
            - 1.6 * tau
            + 0.5 * beta
        )

    for tau, beta in ((0.2, 0.2), (1.0, 0.1), (0.1, 2.0)):
        config, h = setting("analytic", maxent_tau=tau, beta=beta), 1e-5
        settled = ORDINARY | {
            "scores": loss.maxent_weights(u, ORDINARY["ref_scores"], tau, beta).log()
        }
        slopes = (
            (value(tau + h, beta) - value(tau - h, beta)) / (2 * h),
            (value(tau, beta + h) - value(tau, beta - h)) / (2 * h),
        )
        assert controllers.meta_gradient(controllers.init_state(config), settled, config)[
            1
        ] == pytest.approx(slopes, rel=1e-6)


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
@pytest.mark.parametrize("method", METHODS)
def test_every_method_moves_both_tau_and_beta(method, optimizer):
    config = setting(method, controller_meta_optimizer=optimizer, maxent_tau=0.3, beta=0.3)
    state, metrics = controllers.meta_step(controllers.init_state(config), ORDINARY, config)
    assert abs(math.log(state["tau"] / 0.3)) > 1e-4 and abs(math.log(state["beta"] / 0.3)) > 1e-4
    assert set(metrics) == {
        f"meta/{name}"
        for name in (
            "loss",
            "tau_grad",
            "beta_grad",
            "grad_norm",
            "tau_projected",
            "beta_projected",
        )
    }
    for key, slope in (("tau", metrics["meta/tau_grad"]), ("beta", metrics["meta/beta_grad"])):
        assert (state[key] > 0.3) == (slope < 0)  # downhill


def test_sgd_subtracts_the_gradient_and_remembers_only_the_count():
    meta, moves = controllers.descend(
        {"updates": 4, "m": [0.0, 0.0], "v": [0.0, 0.0]}, [0.25, -3.0], "sgd"
    )
    assert moves == [0.25, -3.0] and meta == {"updates": 5, "m": [0.0, 0.0], "v": [0.0, 0.0]}


def test_adam_is_torch_adam_on_the_same_gradients():
    gradients = torch.randn(
        300, 2, generator=torch.Generator().manual_seed(2), dtype=torch.float64
    ) * torch.tensor([1.0, 1e-4])
    gradients[100:200] *= 1e3  # a second regime: both moments and their corrections matter
    x = torch.nn.Parameter(torch.tensor([-1.0, 2.0], dtype=torch.float64))
    optimizer, own, meta = (
        torch.optim.Adam([x], lr=0.05),
        [-1.0, 2.0],
        controllers.init_state(DEFAULTS)["meta"],
    )
    for gradient in gradients:
        x.grad = gradient.clone()
        optimizer.step()
        meta, moves = controllers.descend(meta, gradient.tolist(), "adam")
        own = [a - 0.05 * move for a, move in zip(own, moves)]
        assert max(abs(a - b) for a, b in zip(own, x.tolist())) < 1e-12
    assert meta["updates"] == 300


def one_step(config, batch=ORDINARY, **state):
    before = controllers.init_state(config) | state
    return before, *controllers.meta_step(before, batch, config)


def test_the_gradient_by_log_beta_is_clipped_and_the_one_by_log_tau_is_not():
    free = one_step(setting("analytic", kl_target=3.0, beta=0.3))[2]
    assert free["meta/beta_grad"] > 1 and abs(free["meta/tau_grad"]) > 0.01
    config = setting("analytic", kl_target=3.0, controller_meta_beta_grad_clip=0.01, beta=0.3)
    _, state, metrics = one_step(config)
    assert metrics["meta/beta_grad"] == 0.01 and state["beta"] == pytest.approx(
        0.3 * math.exp(-0.1 * 0.01), rel=1e-12
    )
    assert metrics["meta/tau_grad"] == free["meta/tau_grad"]
    assert one_step(config | dict(kl_target=1e-4))[2]["meta/beta_grad"] == -0.01
    assert (
        one_step(config | dict(controller_meta_beta_grad_clip=5.0))[2]["meta/beta_grad"]
        == free["meta/beta_grad"]
    )


def test_an_update_interval_moves_every_so_many_steps_and_counts_all():
    config = setting("analytic", controller_meta_update_interval=3, maxent_tau=0.3, beta=0.3)
    state, moved = controllers.init_state(config), []
    for step in range(8):
        before, (state, metrics) = state, controllers.meta_step(state, ORDINARY, config)
        moved.append(state["tau"] != before["tau"] and state["beta"] != before["beta"])
        assert (
            state["step"] == step + 1
            and bool(metrics) == moved[-1]
            and (moved[-1] or state == before | {"step": step + 1})
        )
    assert (
        moved == [True, False, False] * 2 + [True, False]
        and state["meta"]["updates"] == 3
        and state["skipped"] == 0
    )


def test_own_learning_rates_override_the_common_one():
    base = setting("analytic", maxent_tau=0.3, beta=0.3)

    def moves(**rates):
        state = one_step(base | rates)[1]
        return math.log(state["tau"] / 0.3), math.log(state["beta"] / 0.3)

    tau, beta = moves()
    assert moves(controller_meta_tau_lr=0.3) == pytest.approx((3 * tau, beta), rel=1e-9)
    assert moves(controller_meta_beta_lr=0.05) == pytest.approx((tau, beta / 2), rel=1e-9)
    assert moves(controller_meta_lr=0.2) == pytest.approx((2 * tau, 2 * beta), rel=1e-9)
    assert moves(controller_meta_tau_lr=0.0) == pytest.approx((0, beta), rel=1e-9, abs=1e-15)


@pytest.mark.parametrize("tau, beta", [(0.2, 0.3), (0.1, 0.05), (10.0, 10.0), (0.01, 1e-4)])
def test_rates_of_zero_hold_tau_and_beta_to_the_bit_and_no_bound_acts(tau, beta):
    _, state, metrics = one_step(
        setting(
            "analytic",
            maxent_tau=tau,
            beta=beta,
            controller_meta_tau_lr=0.0,
            controller_meta_beta_lr=0.0,
        )
    )
    assert (state["tau"], state["beta"]) == (tau, beta) and (
        metrics["meta/tau_projected"],
        metrics["meta/beta_projected"],
    ) == (0.0, 0.0)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    "key, low, high",
    [("tau", "maxent_tau_min", "maxent_tau_max"), ("beta", "beta_min", "beta_max")],
)
def test_projected_is_one_exactly_where_a_bound_acted(method, key, low, high):
    """With a bound where the value stands: pushed out of it the flag is 1 and the value stays, pushed in it is 0 and the value moves."""
    config = setting(method, maxent_tau=0.3, beta=0.3)
    grows = one_step(config)[1][key] > 0.3
    for bound, acted in ((high, grows), (low, not grows)):
        _, state, metrics = one_step(config | {bound: 0.3})
        assert metrics[f"meta/{key}_projected"] == acted and (state[key] == 0.3) == acted
        assert metrics[f"meta/{'beta' if key == 'tau' else 'tau'}_projected"] == 0
    _, state, metrics = one_step(
        config | {f"controller_meta_{key}_lr": 1e9}
    )  # ends at a bound, not in an overflow
    assert metrics[f"meta/{key}_projected"] == 1 and state[key] == config[high if grows else low]


NAN_BATCHES = [{key: value.clone() for key, value in ORDINARY.items()} for _ in range(4)]
for bad, (key, value) in zip(
    NAN_BATCHES,
    [
        ("scores", math.nan),
        ("ref_scores", math.nan),
        ("ref_scores", -math.inf),
        ("utilities", math.nan),
    ],
):
    bad[key][1, 2] = value
EMPTY = {key: value[:0] for key, value in ORDINARY.items()}


@pytest.mark.parametrize(
    "batch",
    [EMPTY, *NAN_BATCHES],
    ids=["no_active_group", "nan_scores", "nan_ref", "inf_ref", "nan_utilities"],
)
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
@pytest.mark.parametrize("method", METHODS)
def test_without_a_measurement_meta_changes_nothing_but_the_counts(method, optimizer, batch):
    config = setting(method, controller_meta_optimizer=optimizer, maxent_tau=0.3, beta=0.3)
    state = one_step(config)[1]
    after, metrics = controllers.meta_step(state, batch, config)
    assert after == state | {"step": 2, "skipped": 1} and metrics == {} and state["tau"] != 0.3


# --- meta: where it works and where it does not


def virtual_kls(rate, w, steps):
    """K after each virtual step of a policy that learns w = softmax(u / tau), from the uniform policy."""
    batch = {
        "utilities": w.log(),
        "scores": torch.tensor([[0.2, -0.1]], dtype=torch.float64),
        "ref_scores": torch.tensor([[1.0, -1.0]], dtype=torch.float64),
    }
    return [kl_of_policy(batch, 1.0, 1e-12, steps=k, rate=rate) for k in range(steps)]


@pytest.mark.parametrize("rate, settles", [(1.0, True), (3.9, True), (4.5, False)])
def test_a_virtual_policy_settles_below_a_rate_of_4_and_oscillates_above(rate, settles):
    """Two answers at 1/2 are the worst case: diag(p) - p p' has the eigenvalue 1/2 there, and steps contract below 2 / (1/2)."""
    half = torch.tensor([[0.5, 0.5]], dtype=torch.float64)
    kls = virtual_kls(rate, half, 200)
    jumps = [abs(b - a) for a, b in zip(kls[-20:], kls[-19:])]
    if settles:
        ref = torch.tensor([1.0, -1.0], dtype=torch.float64).log_softmax(0)
        assert max(jumps) < 1e-3 and kls[-1] == pytest.approx(
            (0.5 * (math.log(0.5) - ref)).sum().item(), abs=1e-3
        )
    else:
        assert min(jumps) > 0.1


WARM = [
    "--controller_meta_method=analytic",
    "--maxent_target_weight_entropy=1.0",
    "--kl_target=0.1",
    "--controller_meta_optimizer=adam",
]


def warns_of_saturation(*flags):
    return any("saturated" in warning for warning in warn_config(load_config([*WARM, *flags]), 100))


@pytest.mark.parametrize("method", ["first_order", "truncated_backprop"])
def test_gradient_methods_are_warned_below_a_twentieth_of_the_range_of_log_q(method):
    flag = f"--controller_meta_method={method}"
    assert warns_of_saturation(flag, "--maxent_tau=0.024", "--beta=0.025")
    assert not warns_of_saturation(
        flag, "--maxent_tau=0.05", "--beta=0.001"
    ) and not warns_of_saturation(flag, "--maxent_tau=0.01", "--beta=0.05")
    assert warns_of_saturation(
        flag, "--maxent_tau=0.049", "--beta=0.049", "--maxent_q_temperature=0.5"
    )  # log q = r / T_q + const
    assert warns_of_saturation(
        flag,
        "--maxent_tau=0.049",
        "--beta=0.049",
        "--reward_funcs=['countdown','countdown']",
        "--reward_weights=[1.0,-1.0]",
    )
    assert not warns_of_saturation(
        "--controller_meta_method=analytic", "--maxent_tau=0.02", "--beta=0.02"
    )
    sgd = warn_config(
        load_config([*WARM, flag, "--beta=0.2", "--controller_meta_optimizer=sgd"]), 100
    )
    assert any("crawls" in warning for warning in sgd) and not any(
        "crawls" in w for w in warn_config(load_config([*WARM, flag, "--beta=0.2"]), 100)
    )


def log_tau_slope(batch, tau, beta, method):
    config = setting(method, maxent_tau=tau, beta=beta)
    return abs(controllers.meta_gradient(controllers.init_state(config), batch, config)[1][0])


@pytest.mark.parametrize("method", ["first_order", "truncated_backprop"])
def test_where_that_warning_is_true_the_gradient_is_gone_and_the_residual_is_not(method):
    """One best answer per group and tau + beta below a twentieth of the range of u (1 here). With one of the two at an ordinary size the weights
    are not saturated: the gradient keeps a fair share."""
    rewards = torch.eye(8, dtype=torch.float64)
    batch = {
        "utilities": loss.log_reward_targets(rewards, 1.0, 0.0),
        "scores": Plant(0.3, 0.3).ref[:8],
        "ref_scores": Plant(0.3, 0.3).ref[:8],
    }
    ordinary = log_tau_slope(batch, 0.3, 0.3, method)
    assert log_tau_slope(batch, 0.024, 0.024, method) < 1e-3 * ordinary
    assert log_tau_slope(batch, 0.024, 0.3, method) > 0.05 * ordinary
    assert log_tau_slope(batch, 0.024, 0.024, "analytic") > 1.5


# --- annealed targets

KINDS = {
    "maxent_target_weight_entropy": ("weights/entropy", 1.9, 1.4),
    "maxent_target_excess_entropy": ("weights/excess_entropy", 0.8, 0.4),
}


@pytest.mark.parametrize("key", KINDS)
def test_a_target_moves_on_a_straight_line_and_stays_at_its_end(key):
    _, start, end = KINDS[key]
    config = DEFAULTS | {key: start, "maxent_target_final": end, "maxent_target_horizon": 40}
    assert controllers.entropy_target(0, config) == start
    for step in range(41):
        assert controllers.entropy_target(step, config) == pytest.approx(
            start + (end - start) * step / 40, rel=1e-12
        )
    assert all(
        abs(controllers.entropy_target(step, config) - end) < 1e-15 for step in (40, 41, 1000)
    )
    assert controllers.entropy_target(20, config) == pytest.approx((start + end) / 2, rel=1e-12)
    up = config | {key: end, "maxent_target_final": start}
    assert controllers.entropy_target(10, up) == pytest.approx(end + (start - end) / 4, rel=1e-12)
    off = config | {"maxent_target_final": -1.0}
    assert {controllers.entropy_target(step, off) for step in (0, 20, 40, 1000)} == {start}


def test_a_target_may_end_at_zero_nats():
    config = DEFAULTS | dict(
        maxent_target_weight_entropy=1.0, maxent_target_final=0.0, maxent_target_horizon=10
    )
    assert [controllers.entropy_target(step, config) for step in (0, 5, 10, 99)] == [
        1.0,
        0.5,
        0.0,
        0.0,
    ]


@pytest.mark.parametrize("key", KINDS)
def test_tau_follows_an_annealed_target_on_the_plant(key):
    """Within a fifth of the way after 60 steps, until 60 steps after the end; a constant target would leave it a whole way off."""
    name, start, end = KINDS[key]
    config = DEFAULTS | {
        key: start,
        "maxent_target_final": end,
        "maxent_target_horizon": 200,
        "maxent_tau_lr": 0.3,
        "maxent_tau": 0.3,
        "beta": 0.2,
    }
    seen, _ = drive(Plant(0.3, 0.2), config, 260)
    assert all(
        abs(x[name] - controllers.entropy_target(step, config)) < 0.2 * abs(start - end)
        for step, x in enumerate(seen)
        if step >= 60
    )
    assert abs(seen[-1][name] - start) > 0.8 * abs(start - end)


@pytest.mark.parametrize("method", METHODS)
def test_meta_takes_the_annealed_target_of_its_step(method):
    config = setting(
        method, maxent_target_final=1.0, maxent_target_horizon=10, maxent_tau=0.3, beta=0.3
    )
    for step in (0, 5, 10, 15):
        fixed = config | dict(
            maxent_target_weight_entropy=1.6 - 0.06 * min(step, 10), maxent_target_final=-1.0
        )
        ours, theirs = (
            controllers.meta_gradient(controllers.init_state(c) | {"step": step}, ORDINARY, c)
            for c in (config, fixed)
        )
        assert ours[1] == pytest.approx(theirs[1], rel=1e-9) and ours[0] == pytest.approx(
            theirs[0], rel=1e-9
        )


def test_the_entropy_that_has_a_target_is_the_one_that_steers():
    rewards = torch.tensor([[1.0, 1.0, 0.0, 0.0], [0.5, 0.25, 0.25, 0.25], [1.0, 1.0, 1.0, 1.0]])
    w = torch.tensor([[0.4, 0.4, 0.1, 0.1], [0.7, 0.1, 0.1, 0.1], [0.25, 0.25, 0.25, 0.25]])
    metrics = loss.weight_metrics(w, rewards, torch.tensor([True, True, False]))
    H = [-sum(x * math.log(x) for x in row) for row in w[:2].tolist()]
    excess = [
        (H[0] - math.log(2)) / (math.log(4) - math.log(2)),
        H[1] / math.log(4),
    ]  # two best answers in the first group, one in the second
    assert metrics[controllers.steering_entropy(setting("tau_entropy"))] == pytest.approx(
        sum(H) / 2, rel=1e-5
    )
    assert metrics[controllers.steering_entropy(setting("tau_excess"))] == pytest.approx(
        sum(excess) / 2, rel=1e-5
    )
    for name, value in (("tau_entropy", sum(H) / 2), ("tau_excess", sum(excess) / 2)):
        config = setting(name, maxent_tau=0.3)
        after = control(controllers.init_state(config), None, metrics, config)
        assert after["entropy"] == pytest.approx(value, rel=1e-5) and after["tau"] != 0.3


# --- state through JSON


def replay(config, resume, cut):
    """(tau, beta) of a run of fixed measurements, some of them missing, whose state passes through `resume` before step `cut`."""
    plant, state, path = Plant(0.3, 0.3), controllers.init_state(config), []
    for step in range(10):
        state = resume(state) if step == cut else state
        rows = torch.arange(step, step + 8) if step != 3 else torch.arange(0)
        batch = plant.batch(rows)
        metrics = plant.measure(0.05 + 0.3 * step, 0.2, rows) if len(rows) else {"kl": math.nan}
        state = control(state, batch, metrics, config)
        path.append(state)
    return path


def through_json(state):
    return json.loads(json.dumps(state, allow_nan=False))


def resumes_exactly(config, resume=through_json):
    straight = replay(config, through_json, None)
    return all(replay(config, resume, cut) == straight for cut in range(10))


BOTH = CONTROLLERS["tau_excess"] | CONTROLLERS["beta"] | dict(maxent_tau_warmup_steps=2)


@pytest.mark.parametrize(
    "config",
    [
        *CONTROLLERS.values(),
        BOTH,
        CONTROLLERS["analytic"] | ADAM,
        CONTROLLERS["analytic"] | dict(controller_meta_update_interval=3),
    ],
)
def test_a_state_through_json_at_any_step_continues_to_the_bit(config):
    config = DEFAULTS | dict(maxent_tau=0.3, beta=0.3) | config
    path = replay(config, through_json, None)
    assert len({(state["tau"], state["beta"]) for state in path}) > 2 and path[-1]["skipped"] >= 1
    assert resumes_exactly(config)


@pytest.mark.parametrize(
    "name, part",
    [
        ("tau_excess", "entropy"),
        ("tau_entropy", "step"),
        ("first_order", "meta"),
        ("truncated_backprop", "meta"),
        *((name, member) for name in METHODS[1:] for member in ("updates", "m", "v")),
    ],
)
def test_every_part_of_the_state_is_needed_to_continue(name, part):
    """So that the test above can fail: a checkpoint that forgets one part goes elsewhere."""
    config = setting(name, maxent_tau=0.3, beta=0.3, maxent_tau_warmup_steps=4)
    fresh = controllers.init_state(config)

    def forget(state):
        if part in state:
            return state | {part: fresh[part]}
        return state | {"meta": state["meta"] | {part: fresh["meta"][part]}}

    assert not resumes_exactly(config, forget)


def test_meta_leaves_its_inputs_as_they_were():
    for method in METHODS:
        config = setting(method, maxent_tau=0.3, beta=0.3)
        state = one_step(config)[1]
        kept = copy.deepcopy((state, config, ORDINARY))
        after, _ = controllers.meta_step(state, ORDINARY, config)
        assert (
            after != state
            and (state, config) == kept[:2]
            and all(torch.equal(ORDINARY[key], kept[2][key]) for key in ORDINARY)
        )


# --- config

ENTROPY, KL, ON = (
    "--maxent_target_weight_entropy=1.0",
    ["--kl_target=0.1", "--beta=0.1"],
    "--controller_meta_method=analytic",
)
REFUSED = [
    ([ENTROPY, "--maxent_target_excess_entropy=0.5"], "both on: choose one"),
    (
        ["--maxent_target_excess_entropy=0.0"],
        "maxent_target_excess_entropy=0.0 must be -1, or greater than 0 and below 1",
    ),
    (
        ["--maxent_target_excess_entropy=1.0"],
        "maxent_target_excess_entropy=1.0 must be -1, or greater than 0 and below 1",
    ),
    (
        ["--maxent_target_final=0.5", "--maxent_target_horizon=10"],
        "maxent_target_final=0.5 needs a target to start from",
    ),
    ([ENTROPY, "--maxent_target_final=0.5"], "needs maxent_target_horizon > 0"),
    (
        [
            "--maxent_target_excess_entropy=0.5",
            "--maxent_target_final=1.5",
            "--maxent_target_horizon=10",
        ],
        "maxent_target_final=1.5 is of an excess entropy",
    ),
    (["--maxent_target_weight_entropy=2.08"], r"2.08, is above ln\(rows of a group\) = 2.079"),
    (
        [ENTROPY, "--maxent_target_final=3.0", "--maxent_target_horizon=10"],
        r"3.0, is above ln\(rows of a group\)",
    ),
    (
        [ON, ENTROPY, *KL, "--objective=xdr"],
        "steers the weights of maxent; objective='xdr' has none",
    ),
    ([ON, *KL], "needs both targets, maxent_target_weight_entropy=-1.0"),
    ([ON, *KL, "--maxent_target_excess_entropy=0.5"], "needs both targets"),
    ([ON, ENTROPY, "--beta=0.1"], "needs both targets.*kl_target=0.0"),
    (
        [ON, ENTROPY, *KL, "--controller_meta_virtual_lr=4.0"],
        "controller_meta_virtual_lr=4.0 must be below 4",
    ),
    (
        [ENTROPY, "--objective=grpo"],
        "an entropy target steers the weights of maxent and xdr; objective='grpo' has none",
    ),
    ([ENTROPY, "--maxent_tau_max=0.01"], "maxent_tau_max=0.01 must be above maxent_tau_min=0.01"),
    ([ENTROPY, "--maxent_tau=20.0"], "maxent_tau=20.0 is steered: start it between"),
    ([ON, ENTROPY, *KL, "--maxent_tau=0.005"], "maxent_tau=0.005 is steered: start it between"),
    (["--kl_target=0.1"], "beta=0.0 with kl_target=0.1: the controller multiplies beta"),
    ([ON, ENTROPY, "--kl_target=0.1"], "the controller multiplies beta"),
    ([*KL, "--beta_max=1e-4"], "beta_max=0.0001 must be above beta_min=0.0001"),
    ([ON, ENTROPY, *KL, "--beta_min=0.2"], "beta=0.1 is steered: start it between beta_min=0.2"),
    (
        ["--kl_target=0.1", "--beta=50.0"],
        "beta=50.0",
    ),  # else its first step is a jump to beta_max, 80% where step / horizon is 2%
    ([*KL, "--kl_horizon=0.2"], "kl_ctl_step_size=0.2 must be below kl_horizon=0.2"),
]


@pytest.mark.parametrize("flags, sentence", REFUSED)
def test_impossible_controllers_are_refused_in_a_sentence(flags, sentence):
    with pytest.raises(UserError, match=sentence):
        load_config(flags)


def test_possible_controllers_load():
    assert load_config([ON, ENTROPY, *KL])["controller_meta_method"] == "analytic"
    assert load_config(
        [
            ON,
            ENTROPY,
            *KL,
            "--controller_meta_virtual_lr=3.99",
            "--controller_meta_method=truncated_backprop",
        ]
    )["controller_meta_enabled"]
    assert (
        load_config([ENTROPY, *KL, "--maxent_target_final=0.0", "--maxent_target_horizon=10"])[
            "maxent_target_final"
        ]
        == 0.0
    )
    assert load_config(
        [
            "--maxent_target_excess_entropy=0.5",
            "--maxent_target_final=0.1",
            "--maxent_target_horizon=10",
            "--objective=xdr",
        ]
    )
    assert (
        load_config([ON, ENTROPY, *KL, "--kl_horizon=0.1"])["kl_horizon"] == 0.1
    )  # of the rule that meta replaces


def test_meta_replaces_both_rules():
    config = setting("analytic")
    state = controllers.init_state(config)
    assert (
        controllers.update_tau(state, 0.1, config)
        == state
        == controllers.update_beta(state, 9.0, config)
    )
    assert not controllers.steers_tau(config) and not controllers.steers_beta(config)


# --- wrong variants must be noticed


def flip(state, after, key):
    """`after` with the step of tau or beta turned around."""
    low, high = {"tau": (0.01, 10.0), "beta": (1e-4, 10.0)}[key]
    return after | {key: controllers.clip(state[key] ** 2 / after[key], low, high)}


def flipped_rule(rule, key):
    return lambda state, value, config: flip(state, rule(state, value, config), key)


def flipped_gradient(index):
    def gradient(state, batch, config, right=controllers.meta_gradient):
        phi, found = right(state, batch, config)
        return phi, [-g if k == index else g for k, g in enumerate(found)]

    return gradient


def detached_entropy(*arguments, right=controllers.potential):
    _, H, K = right(*arguments)
    return (
        0.5 * (H.detach() - arguments[3][0]) ** 2 + 0.5 * (K - arguments[3][1]) ** 2,
        H.detach(),
        K,
    )


def kl_without_reference(
    log_tau, log_beta, batch, targets, steps, rate, hessian, right=controllers.potential
):
    _, H, K = right(log_tau, log_beta, batch, targets, steps, rate, hessian)
    s, w = (
        batch["scores"],
        (
            (batch["utilities"] + log_beta.exp() * batch["ref_scores"])
            / (log_tau.exp() + log_beta.exp())
        ).softmax(1),
    )
    for _ in range(steps):
        s = s + rate * (w - s.softmax(1))
    K = (s.softmax(1) * s.log_softmax(1)).sum(1).mean()
    return 0.5 * (H - targets[0]) ** 2 + 0.5 * (K - targets[1]) ** 2, H, K


MUTANTS = [
    *(
        ("update_tau", flipped_rule(controllers.update_tau, "tau"), name, start)
        for name in ("tau_entropy", "tau_excess")
        for start in STARTS[name]
    ),
    *(
        ("update_beta", flipped_rule(controllers.update_beta, "beta"), "beta", start)
        for start in STARTS["beta"]
    ),
    *(
        ("meta_gradient", flipped_gradient(index), method, STARTS[method][0])
        for method in METHODS
        for index in (0, 1)
    ),
]


@pytest.mark.parametrize("function, wrong, name, start", MUTANTS)
def test_the_plant_notices_a_rule_with_its_sign_flipped(monkeypatch, function, wrong, name, start):
    monkeypatch.setattr(controllers, function, wrong)
    assert arrival(name, start, REACHES[name][1], 20) > REACHES[name][1]


@pytest.mark.parametrize("wrong", [detached_entropy, kl_without_reference])
@pytest.mark.parametrize("method", ["first_order", "truncated_backprop"])
def test_central_differences_notice_a_wrong_potential(monkeypatch, wrong, method):
    assert max(gradient_errors(ORDINARY, 0.3, 0.3, method)) < 1e-4
    monkeypatch.setattr(controllers, "potential", wrong)
    assert max(gradient_errors(ORDINARY, 0.3, 0.3, method)[1:]) > 0.1


def test_the_policy_at_the_reference_notices_a_kl_without_it(monkeypatch):
    monkeypatch.setattr(controllers, "potential", kl_without_reference)
    assert abs(kl_of_policy(ORDINARY | {"scores": ORDINARY["ref_scores"]})) > 0.1


def test_the_round_trip_notices_moments_that_are_not_saved(monkeypatch):
    config = setting("first_order", maxent_tau=0.3, beta=0.3)
    memory = {}

    def forgetful(meta, gradient, optimizer, right=controllers.descend):
        """Keeps its moments in the process instead of the state."""
        known = (
            memory.get(meta["updates"], {"m": [0.0, 0.0], "v": [0.0, 0.0]})
            if meta["updates"]
            else {"m": [0.0, 0.0], "v": [0.0, 0.0]}
        )
        after, moves = right(meta | known, gradient, optimizer)
        memory[after["updates"]] = {"m": after["m"], "v": after["v"]}
        return after | {"m": [0.0, 0.0], "v": [0.0, 0.0]}, moves

    def new_process(state):
        memory.clear()
        return through_json(state)

    assert resumes_exactly(config, new_process)
    monkeypatch.setattr(controllers, "descend", forgetful)
    assert not resumes_exactly(config, new_process)
