"""Feedback rules for tau and beta: state in, new state out, plain floats that survive a JSON
round trip.

    state = init_state(config)          # step, tau, beta, entropy, steering, skipped, meta
    state = update_tau(state, entropy, config)      # each step, with its steering_metric()
    state = update_beta(state, kl, config)          # each step, with its mean KL per token
    state, metrics = meta_step(state, groups, config)    # instead of both: controller_meta_method

Call update_tau even where nothing steers tau: it counts the step for both. meta_step counts it
itself.

tau: log tau <- log tau + maxent_tau_lr * (target - EMA of the entropy). A larger tau makes the
weights flatter and their entropy larger, so the feedback is negative.

beta: multiplied by 1 + clip(kl / target - 1, +-kl_ctl_step_size) / kl_horizon, the adaptive
controller of Ziegler et al. 2019 (arXiv:1909.08593).

meta: "first_order" and "truncated_backprop" descend Phi = (H - H*)^2 / 2 + (K - KL*)^2 / 2, where H
is the weights' mean entropy and K the mean KL from policy to reference over the group. "analytic"
feeds the two residuals back instead, so Phi may rise for a while.
"""

import math
from typing import NamedTuple

from checks import is_on, moves_beta, moves_tau, steers_beta, steers_tau
from common import scheduled

EMA = 0.9  # share of the past in the smoothed entropy: it remembers about ten steps
# for controller_meta_optimizer="adam"; the defaults of its paper and of torch
ADAM_BETA1 = 0.9
ADAM_BETA2 = 0.999
ADAM_EPSILON = 1e-8
LARGEST_MOVE = 50  # of log tau or log beta in one step: exp() of much more would overflow


def steering(config: dict) -> tuple:
    """(the metric that steers tau, its target), by which of the two targets is on."""
    excess = config["maxent_target_excess_entropy"]
    if is_on(excess):
        return "weights/excess_entropy", excess
    return "weights/entropy", config["maxent_target_weight_entropy"]


def steering_metric(config: dict) -> str:
    """The metric that steers tau."""
    metric, _ = steering(config)
    return metric


def entropy_target(step: int, config: dict) -> float:
    """H*, the target of steering_metric(), at a step."""
    _, target = steering(config)
    return scheduled(target, step)


# --- state


def init_state(config: dict) -> dict:
    """The state of a fresh run."""
    return {
        "step": 0,
        "tau": config["maxent_tau"],
        "beta": config["beta"],
        "steering": steering_metric(config),  # a metric's name
        "entropy": None,  # the moving average (EMA) of that metric; None before a finite value
        "skipped": 0,  # number of missing or non-finite measurements; up to two in a step
        # meta-optimizer: number of updates, two moments of the gradient by (log tau, log beta)
        "meta": {"updates": 0, "m": [0.0, 0.0], "v": [0.0, 0.0]},
    }


def resume_state(state: dict, config: dict) -> dict:
    """A checkpoint's state under the config of the run that goes on from it.

    If tau or beta is steered, it goes on from the checkpoint's value, clipped to its bounds;
    otherwise it is what the config says now. A checkpoint's value of 0 or infinity is ignored: no
    controller can have led there. The average of the entropy is kept if the same metric still
    steers."""
    # the rest (step, counts, Adam's moments) stays the checkpoint's
    new = {**state, "tau": config["maxent_tau"], "beta": config["beta"]}
    # controllers move the logarithm, so they never reach 0 or infinity, and never leave them
    if moves_tau(config) and 0 < state["tau"] < math.inf:
        new["tau"] = clip(state["tau"], config["maxent_tau_min"], config["maxent_tau_max"])
    if moves_beta(config) and 0 < state["beta"] < math.inf:
        new["beta"] = clip(state["beta"], config["beta_min"], config["beta_max"])
    new["steering"] = steering_metric(config)
    if new["steering"] != state["steering"]:
        new["entropy"] = None
    return new


def clip(x: float, low: float, high: float) -> float:
    return min(max(x, low), high)


def is_measured(value: float | None) -> bool:
    return value is not None and math.isfinite(value)


def next_step(state: dict) -> dict:
    """The state one step later, nothing else changed."""
    return {**state, "step": state["step"] + 1}


def unmeasured_step(state: dict) -> dict:
    """The state one step later, after a step without a measurement."""
    return {**next_step(state), "skipped": state["skipped"] + 1}


# --- the two rules


def update_tau(state: dict, entropy: float | None, config: dict) -> dict:
    """Moves tau one step towards entropy_target(). `entropy`: this step's value of the metric that
    steering_metric() names, a mean over active groups; None without an active group.

    The EMA runs from the first step; tau moves only after maxent_tau_warmup_steps. A missing or
    non-finite entropy changes nothing but the counts. Without a target the step is counted all the
    same: the run may be resumed with a target that depends on the step."""
    if not steers_tau(config):
        return next_step(state)
    if not is_measured(entropy):
        return unmeasured_step(state)
    # the average starts at the first entropy: from 0 it would need ten steps to get there
    smooth = entropy
    if state["entropy"] is not None:
        smooth = EMA * state["entropy"] + (1 - EMA) * entropy
    warmup = config["maxent_tau_warmup_steps"]
    # -1: as long as the learning rate's warm-up
    if warmup < 0:
        warmup = config["warmup_steps"]
    tau = state["tau"]
    if state["step"] >= warmup:
        move = config["maxent_tau_lr"] * (entropy_target(state["step"], config) - smooth)
        tau = clip(moved(tau, move), config["maxent_tau_min"], config["maxent_tau_max"])
    return {**next_step(state), "tau": tau, "entropy": smooth}


def moved(x: float, move: float) -> float:
    """x after its logarithm has moved by `move`."""
    return x * math.exp(clip(move, -LARGEST_MOVE, LARGEST_MOVE))


def update_beta(state: dict, kl: float | None, config: dict) -> dict:
    """Moves beta so that the KL nears kl_target (nats per token). `kl`: the mean of k3 over the
    step's completion tokens.

    beta changes by at most kl_ctl_step_size / kl_horizon of itself. Without a finite KL it stays,
    and `skipped` counts that. The step is counted by update_tau()."""
    if not steers_beta(config):
        return dict(state)
    if not is_measured(kl):
        return {**state, "skipped": state["skipped"] + 1}
    # the error is relative to the target and clipped, so that an outlier moves beta little
    most = config["kl_ctl_step_size"]
    error = clip(kl / config["kl_target"] - 1, -most, most)
    beta = state["beta"] * (1 + error / config["kl_horizon"])
    return {**state, "beta": clip(beta, config["beta_min"], config["beta_max"])}


# --- the meta-controller, which alone needs torch and imports it


class Virtual(NamedTuple):
    """Virtual training steps: how far potential() looks ahead. The policy is reduced to its group
    scores s, which move towards the weights."""

    steps: int
    lr: float
    use_hessian: bool  # False: softmax(s) counts as a constant in the gradient


class Setpoints(NamedTuple):
    """What the meta-controller steers to."""

    entropy: float  # H*, of w, nats
    kl: float  # KL*, of the policy's scores from the reference's over a group, nats


def potential(log_tau, log_beta, groups: dict, setpoints: Setpoints, virtual: Virtual) -> tuple:
    """(Phi, H, K), differentiable in log_tau and log_beta. groups: "utilities" u, "scores" s,
    "ref_scores" l, each (groups, G).

    H is the mean entropy of w = softmax((u + beta * l) / (tau + beta)). K is the mean
    KL(softmax(s) || softmax(l)) after virtual.steps steps s <- s + virtual.lr * (w - softmax(s)),
    which stand for training on w. With 0 steps K is that of the measured policy and does not
    depend on tau and beta."""
    u = groups["utilities"].double()  # (groups, G), like s, ref and w below
    s = groups["scores"].double()
    ref = groups["ref_scores"].double()
    tau = log_tau.exp()
    beta = log_beta.exp()
    log_w = ((u + beta * ref) / (tau + beta)).log_softmax(1)
    w = log_w.exp()
    for _ in range(virtual.steps):
        p = s.softmax(1)
        if not virtual.use_hessian:
            # leaves out the derivative of softmax(s), which is the Hessian
            p = p.detach()
        s = s + virtual.lr * (w - p)
    # in nats. Not entr(w), whose slope is infinite where w underflows to 0
    H = -(w * log_w).sum(1).mean()
    K = (s.softmax(1) * (s.log_softmax(1) - ref.log_softmax(1))).sum(1).mean()
    return 0.5 * (H - setpoints.entropy) ** 2 + 0.5 * (K - setpoints.kl) ** 2, H, K


def virtual_policy(config: dict) -> Virtual:
    """The virtual steps that controller_meta_method takes."""
    steps = {
        "analytic": 0,
        "first_order": 1,
        "truncated_backprop": config["controller_meta_truncation_steps"],
    }
    return Virtual(
        steps[config["controller_meta_method"]],
        config["controller_meta_virtual_lr"],
        config["controller_meta_use_hessian"],
    )


def meta_gradient(state: dict, groups: dict, config: dict) -> tuple[tuple, list[float]]:
    """((Phi, H, K), the slopes in log tau and log beta, for descend()). The slopes are the gradient
    of Phi through the virtual steps; for "analytic" they are the residuals (H - H*, KL* - K), which
    need no differentiation."""
    import torch

    setpoints = Setpoints(entropy_target(state["step"], config), config["kl_target"])
    virtual = virtual_policy(config)
    differentiates = virtual.steps > 0
    logs = []
    for name in ("tau", "beta"):
        # the logarithm is what moves, so that neither can become negative
        log = math.log(state[name])
        logs.append(torch.tensor(log, dtype=torch.float64, requires_grad=differentiates))
    phi, H, K = potential(*logs, groups, setpoints, virtual)
    # signs: a larger tau means more entropy, a larger beta less KL
    gradient = (H - setpoints.entropy, setpoints.kl - K)
    if differentiates:
        gradient = torch.autograd.grad(phi, logs)
    return (phi.item(), H.item(), K.item()), [slope.item() for slope in gradient]


def meta_step(state: dict, groups: dict, config: dict) -> tuple[dict, dict]:
    """Moves tau and beta by controller_meta_method, every controller_meta_update_interval steps,
    and clips them to their bounds. Returns (state, meta/* metrics); tau_projected and
    beta_projected are 1 where a bound acted.

    groups: see potential(); the active groups of the step, measured before the update. Without an
    active group, or with a non-finite gradient, nothing changes but the counts."""
    # between two updates
    if state["step"] % config["controller_meta_update_interval"]:
        return next_step(state), {}
    if len(groups["utilities"]) == 0:
        return unmeasured_step(state), {}
    (phi, H, K), (tau_grad, beta_grad) = meta_gradient(state, groups, config)
    if not (is_measured(phi) and is_measured(tau_grad) and is_measured(beta_grad)):
        return unmeasured_step(state), {}
    most = config["controller_meta_beta_grad_clip"]
    if most > 0:
        beta_grad = clip(beta_grad, -most, most)

    gradient = [tau_grad, beta_grad]
    meta, (tau_move, beta_move) = descend(
        state["meta"], gradient, config["controller_meta_optimizer"]
    )
    tau_lr = rate(config["controller_meta_tau_lr"], config)
    beta_lr = rate(config["controller_meta_beta_lr"], config)
    unclipped_tau = moved(state["tau"], -tau_lr * tau_move)
    unclipped_beta = moved(state["beta"], -beta_lr * beta_move)
    tau = clip(unclipped_tau, config["maxent_tau_min"], config["maxent_tau_max"])
    beta = clip(unclipped_beta, config["beta_min"], config["beta_max"])
    metrics = {
        "meta/loss": phi,
        "meta/entropy": H,
        "meta/kl": K,
        "meta/tau_grad": tau_grad,
        "meta/beta_grad": beta_grad,
        "meta/grad_norm": math.hypot(*gradient),
        "meta/tau_projected": float(tau != unclipped_tau),
        "meta/beta_projected": float(beta != unclipped_beta),
    }
    return {**next_step(state), "tau": tau, "beta": beta, "meta": meta}, metrics


def rate(own: float, config: dict) -> float:
    """The learning rate of log tau or log beta: `own`, or controller_meta_lr if `own` is -1."""
    return own if own >= 0 else config["controller_meta_lr"]


def descend(meta: dict, gradient: list[float], optimizer: str) -> tuple[dict, list[float]]:
    """(the optimizer's new state, the move that the caller multiplies by the learning rate and
    subtracts): the gradient itself ("sgd"), or Adam's step (arXiv:1412.6980)."""
    if optimizer == "sgd":
        return meta, gradient
    updates = meta["updates"] + 1
    # Adam's bias correction: both moments start at 0, and dividing by this makes up for it
    m_share = 1 - ADAM_BETA1**updates
    v_share = 1 - ADAM_BETA2**updates
    # a new dict: states are never changed in place, because a checkpoint may still hold the old one
    new = {"updates": updates, "m": [], "v": []}
    moves = []
    for g, old_m, old_v in zip(gradient, meta["m"], meta["v"]):
        m = ADAM_BETA1 * old_m + (1 - ADAM_BETA1) * g
        v = ADAM_BETA2 * old_v + (1 - ADAM_BETA2) * g * g
        new["m"].append(m)
        new["v"].append(v)
        moves.append(m / m_share / (math.sqrt(v / v_share) + ADAM_EPSILON))
    return new, moves
