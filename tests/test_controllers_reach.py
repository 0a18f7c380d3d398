"""Every controller on one plant that answers to tau and beta: it reaches its targets, stays there,
stops at its bounds and comes back; and a rule that is wrong is noticed."""

import math

import pytest
import torch
from controlled import CONTROLLERS, DEFAULTS, METHODS, Plant, control, drive, setting

import controllers
import loss

# measures that must arrive, steps allowed: from the slowest start they take 43, 48, 120, 157, 139
# and 97
REACHES = {
    "tau_entropy": (["weights/entropy"], 80),
    "tau_excess": (["weights/excess_entropy"], 80),
    "beta": (["kl"], 150),
    "analytic": (["weights/entropy", "kl"], 200),
    "first_order": (["weights/entropy", "kl"], 200),
    "truncated_backprop": (["weights/entropy", "kl"], 150),
}
AIMS = {  # target, tolerance
    "weights/entropy": (1.6, 0.1),
    "weights/excess_entropy": (0.5, 0.06),
    "kl": (0.5, 0.08),
}
HOLD = 100  # steps that it must then stay there
# (tau, beta) and whether each measure begins below (-1) or above (+1) its target
META_STARTS = [(0.06, 0.06, [-1, 1]), (3.0, 0.06, [1, -1]), (0.1, 2.0, [1, -1])]
STARTS = {
    "tau_entropy": [(0.06, 0.2, [-1]), (3.0, 0.2, [1])],
    "tau_excess": [(0.06, 0.2, [-1]), (3.0, 0.2, [1])],
    "beta": [(0.2, 2.0, [-1]), (0.2, 0.06, [1])],
    "analytic": META_STARTS,
    "first_order": META_STARTS,
    "truncated_backprop": META_STARTS,
}


def misses(measure: dict, name: str) -> bool:
    """Whether anything that this controller steers is outside its tolerance."""
    for metric in REACHES[name][0]:
        target, tolerance = AIMS[metric]
        if abs(measure[metric] - target) >= tolerance:
            return True
    return False


def arrival(name: str, start: tuple, steps: int, hold: int) -> int:
    """The step after which every measure stays within its tolerance; at most `steps` means that it
    arrived. Bounds hold all the way."""
    config = setting(name, maxent_tau=start[0], beta=start[1])
    measures, _ = drive(Plant(*start[:2]), config, steps + hold)
    for measure in measures:
        assert config["maxent_tau_min"] <= measure["tau"] <= config["maxent_tau_max"]
        assert config["beta_min"] <= measure["beta"] <= config["beta_max"]
    late = [step for step, measure in enumerate(measures) if misses(measure, name)]
    return late[-1] + 1 if late else 0


@pytest.mark.parametrize(
    "name, start", [(name, start) for name, starts in STARTS.items() for start in starts]
)
def test_every_controller_reaches_its_targets_from_both_sides_under_noise_and_stays(name, start):
    first = Plant(*start[:2]).measure(*start[:2])
    for metric, side in zip(REACHES[name][0], start[2], strict=True):
        target, tolerance = AIMS[metric]
        assert math.copysign(1, first[metric] - target) == side
        assert abs(first[metric] - target) > tolerance
    assert 0 < arrival(name, start, REACHES[name][1], HOLD) <= REACHES[name][1]


def test_a_start_far_above_traps_first_order_but_not_the_residual_feedback():
    """A known limit (here already from tau = beta = 1, the whole range of u). More beta brings H
    down to that of softmax(ref), nearer to its target; one virtual step from a policy next to the
    reference hardly moves the KL, so nothing holds beta back, and at large beta all of Phi is
    flat."""
    assert arrival("analytic", (3.0, 3.0), REACHES["analytic"][1], 50) <= REACHES["analytic"][1]
    config = setting("first_order", maxent_tau=3.0, beta=3.0)
    measures, _ = drive(Plant(3.0, 3.0), config, 300)
    assert measures[-1]["beta"] > 5 and measures[-1]["kl"] < 0.05


# --- bounds

EDGES = {"tau": (0.1, 1.0), "beta": (0.12, 0.8)}
NARROW = {
    "maxent_tau_min": 0.1,
    "maxent_tau_max": 1.0,
    "beta_min": 0.12,
    "beta_max": 0.8,
    "maxent_tau": 0.3,
    "beta": 0.3,
}
# targets beyond the narrow bounds
FLAT = {
    "maxent_target_weight_entropy": 2.07,
    "maxent_target_excess_entropy": 0.99,
    "kl_target": 1e-3,
}
SHARP = {
    "maxent_target_weight_entropy": 0.5,
    "maxent_target_excess_entropy": 0.01,
    "kl_target": 3.0,
}
MOVES = {"tau_entropy": ["tau"], "tau_excess": ["tau"], "beta": ["beta"]}  # the others both


def aimed(name: str, targets: dict) -> dict:
    """The config of a controller with other targets of those that it has."""
    own = {key: target for key, target in targets.items() if key in CONTROLLERS[name]}
    return setting(name, **NARROW, **own)


@pytest.mark.parametrize("name", CONTROLLERS)
def test_a_controller_at_its_bounds_comes_back_when_the_error_changes_sign(name):
    """Flat weights close to the reference ask for the largest tau or beta, sharp ones far from it
    for the smallest. Methods by gradient weigh the two errors against each other, and may stop on
    the way up."""
    by_gradient = name in METHODS[1:]
    plant = Plant(0.3, 0.3)
    state = None
    for targets in (FLAT, SHARP, FLAT):
        config = aimed(name, targets)
        measures, state = drive(plant, config, 100 if by_gradient else 200, state)
        for key, (low, high) in EDGES.items():
            assert all(low <= measure[key] <= high for measure in measures)
        for key in MOVES.get(name, ["tau", "beta"]):
            if by_gradient and targets is FLAT:
                assert measures[-1][key] > 0.3
            else:
                assert measures[-1][key] == EDGES[key][targets is FLAT]


# --- a target that moves

KINDS = {
    "maxent_target_weight_entropy": ("weights/entropy", 1.9, 1.4),
    "maxent_target_excess_entropy": ("weights/excess_entropy", 0.8, 0.4),
}


@pytest.mark.parametrize("key", KINDS)
def test_tau_follows_an_annealed_target_on_the_plant(key):
    """Within a fifth of the way after 60 steps, until 60 steps after the end; a constant target
    would leave it a whole way off."""
    metric, start, end = KINDS[key]
    config = DEFAULTS | {key: {0: start, 200: end}, "maxent_tau_lr": 0.3}
    config |= {"maxent_tau": 0.3, "beta": 0.2}
    measures, _ = drive(Plant(0.3, 0.2), config, 260)
    for step in range(60, 260):
        target = controllers.entropy_target(step, config)
        assert abs(measures[step][metric] - target) < 0.2 * abs(start - end)
    assert abs(measures[-1][metric] - start) > 0.8 * abs(start - end)


def test_the_entropy_that_has_a_target_is_the_one_that_steers():
    rewards = torch.tensor([[1.0, 1.0, 0.0, 0.0], [0.5, 0.25, 0.25, 0.25], [1.0, 1.0, 1.0, 1.0]])
    w = torch.tensor([[0.4, 0.4, 0.1, 0.1], [0.7, 0.1, 0.1, 0.1], [0.25, 0.25, 0.25, 0.25]])
    metrics = loss.weight_metrics(w, rewards, torch.tensor([True, True, False]))
    first, second = (-sum(x * math.log(x) for x in row) for row in w[:2].tolist())
    # two best answers in the first group, one in the second
    excess = (first - math.log(2)) / (math.log(4) - math.log(2)) + second / math.log(4)
    means = {"tau_entropy": (first + second) / 2, "tau_excess": excess / 2}
    for name, mean in means.items():
        config = setting(name, maxent_tau=0.3)
        assert metrics[controllers.steering_metric(config)] == pytest.approx(mean, rel=1e-5)
        after = control(controllers.init_state(config), None, metrics, config)
        assert after["entropy"] == pytest.approx(mean, rel=1e-5) and after["tau"] != 0.3


# --- wrong variants must be noticed


def flipped_rule(rule, key: str, low: float, high: float):
    """`rule` with its step of tau or beta turned around."""

    def wrong(state, value, config):
        after = rule(state, value, config)
        return after | {key: controllers.clip(state[key] ** 2 / after[key], low, high)}

    return wrong


def flipped_gradient(index: int):
    right = controllers.meta_gradient  # before it is replaced

    def wrong(state, batch, config):
        measured, gradient = right(state, batch, config)
        gradient[index] *= -1
        return measured, gradient

    return wrong


WRONG_TAU = flipped_rule(controllers.update_tau, "tau", 0.01, 10.0)
WRONG_BETA = flipped_rule(controllers.update_beta, "beta", 1e-4, 10.0)
MUTANTS = []
for name in ("tau_entropy", "tau_excess"):
    MUTANTS += [("update_tau", WRONG_TAU, name, start) for start in STARTS[name]]
MUTANTS += [("update_beta", WRONG_BETA, "beta", start) for start in STARTS["beta"]]
for name in METHODS:
    for index in (0, 1):
        MUTANTS.append(("meta_gradient", flipped_gradient(index), name, STARTS[name][0]))


@pytest.mark.parametrize("function, wrong, name, start", MUTANTS)
def test_the_plant_notices_a_rule_with_its_sign_flipped(monkeypatch, function, wrong, name, start):
    monkeypatch.setattr(controllers, function, wrong)
    assert arrival(name, start, REACHES[name][1], 20) > REACHES[name][1]
