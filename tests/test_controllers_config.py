"""What a config may not say of the controllers, and what it is warned of."""

import pytest
import torch
from controlled import Plant, setting

import controllers
import loss
from checks import warn_config
from common import UserError, default_config, load_config

ENTROPY = "--maxent_target_weight_entropy=1.0"
EXCESS = "--maxent_target_excess_entropy=0.5"
KL = ["--kl_target=0.1", "--beta=0.1"]
ON = "--controller_meta_method=analytic"
REFUSED = [
    ([ENTROPY, EXCESS], "both on: choose one"),
    (
        ["--maxent_target_excess_entropy=0.0"],
        "maxent_target_excess_entropy=0.0 must be -1, or greater than 0 and below 1",
    ),
    (
        ["--maxent_target_excess_entropy=1.0"],
        "maxent_target_excess_entropy=1.0 must be -1, or greater than 0 and below 1",
    ),
    (
        ["--maxent_target_excess_entropy={0: 0.5, 10: 1.5}"],
        "must be greater than 0 and below 1",
    ),
    (
        ["--maxent_target_weight_entropy={0: -1, 10: 0.5}"],
        "must be at least 0",
    ),
    ([ENTROPY, "--maxent_target_final=0.5"], "can be a line through points"),
    (["--maxent_target_weight_entropy=2.08"], r"2.08, is above ln\(rows of a group\) = 2.079"),
    (
        ["--maxent_target_weight_entropy={0: 1.0, 10: 3.0}"],
        r"3.0, is above ln\(rows of a group\)",
    ),
    (
        [ON, ENTROPY, *KL, "--objective=xdr"],
        "steers the weights of maxent; objective='xdr' has none",
    ),
    ([ON, *KL], "needs both targets, maxent_target_weight_entropy=-1.0"),
    ([ON, *KL, EXCESS], "needs both targets"),
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
    # else its first step is a jump to beta_max, 80% where step / horizon is 2%
    (["--kl_target=0.1", "--beta=50.0"], "beta=50.0"),
    ([*KL, "--kl_horizon=0.2"], "kl_ctl_step_size=0.2 must be below kl_horizon=0.2"),
]


@pytest.mark.parametrize("flags, sentence", REFUSED)
def test_impossible_controllers_are_refused_in_a_sentence(flags, sentence):
    with pytest.raises(UserError, match=sentence):
        load_config(flags)


def test_possible_controllers_load():
    meta = [ON, ENTROPY, *KL]
    assert load_config(meta)["controller_meta_method"] == "analytic"
    method = "--controller_meta_method=truncated_backprop"
    assert load_config([*meta, method, "--controller_meta_virtual_lr=3.99"])
    to_zero = "--maxent_target_weight_entropy={0: 1.0, 10: 0.0}"
    assert load_config([to_zero, *KL])["maxent_target_weight_entropy"] == {0: 1.0, 10: 0.0}
    assert load_config(["--maxent_target_excess_entropy={0: 0.5, 10: 0.1}", "--objective=xdr"])
    # of the rule that meta replaces
    assert load_config([*meta, "--kl_horizon=0.1"])["kl_horizon"] == 0.1


# --- warnings

WARM = [
    ENTROPY,
    "--kl_target=0.1",
    "--controller_meta_optimizer=adam",
]


def warns(word: str, *flags: str) -> bool:
    warnings = warn_config(load_config([*WARM, *flags]), 100, default_config())
    return any(word in warning for warning in warnings)


@pytest.mark.parametrize("method", ["first_order", "truncated_backprop"])
def test_gradient_methods_are_warned_below_a_twentieth_of_the_range_of_log_q(method):
    flag = f"--controller_meta_method={method}"
    assert warns("saturated", flag, "--maxent_tau=0.024", "--beta=0.025")
    assert not warns("saturated", flag, "--maxent_tau=0.05", "--beta=0.001")
    assert not warns("saturated", flag, "--maxent_tau=0.01", "--beta=0.05")
    small = [flag, "--maxent_tau=0.049", "--beta=0.049"]
    assert warns("saturated", *small, "--maxent_q_temperature=0.5")  # log q = r / T_q + const
    two = ["--reward_funcs=['countdown','countdown']", "--reward_weights=[1.0,-1.0]"]
    assert warns("saturated", *small, *two)
    assert not warns("saturated", ON, "--maxent_tau=0.02", "--beta=0.02")
    assert warns("crawls", flag, "--beta=0.2", "--controller_meta_optimizer=sgd")
    assert not warns("crawls", flag, "--beta=0.2")


def log_tau_slope(batch: dict, tau: float, beta: float, method: str) -> float:
    config = setting(method, maxent_tau=tau, beta=beta)
    _, gradient = controllers.meta_gradient(controllers.init_state(config), batch, config)
    return abs(gradient[0])


@pytest.mark.parametrize("method", ["first_order", "truncated_backprop"])
def test_where_that_warning_is_true_the_gradient_is_gone_and_the_residual_is_not(method):
    """One best answer per group and tau + beta below a twentieth of the range of u (1 here). With
    one of the two at an ordinary size the weights are not saturated: the gradient keeps a fair
    share."""
    rewards = torch.eye(8, dtype=torch.float64)
    ref = Plant(0.3, 0.3).ref[:8]
    batch = {
        "utilities": loss.log_reward_targets(rewards, 1.0, 0.0),
        "scores": ref,
        "ref_scores": ref,
    }
    ordinary = log_tau_slope(batch, 0.3, 0.3, method)
    assert log_tau_slope(batch, 0.024, 0.024, method) < 1e-3 * ordinary
    assert log_tau_slope(batch, 0.024, 0.3, method) > 0.05 * ordinary
    assert log_tau_slope(batch, 0.024, 0.024, "analytic") > 1.5
