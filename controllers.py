"""Feedback rules for tau and beta: state in, new state out, plain floats that survive a JSON round trip.

    state = init_state(config)                      # {"step", "tau", "beta", "entropy", "skipped", "meta"}
    state = update_tau(state, entropy, config)      # once per step, with the step's measure of the weights' entropy
    state = update_beta(state, kl, config)          # once per step, with the step's mean token KL
    state, metrics = meta_step(state, batch, config)        # instead of both, with a controller_meta_method

tau: log tau <- log tau + maxent_tau_lr * (target - EMA of the entropy). More tau, flatter weights, more entropy: negative feedback.
beta: multiplied by 1 + clip(kl/target - 1, +-kl_ctl_step_size) / kl_horizon, the adaptive controller of Ziegler et al. 2019 (arXiv:1909.08593).
meta: both descend Phi = (H - H*)^2 / 2 + (K - KL*)^2 / 2, H the weights' mean entropy, K the mean KL from policy to reference over the group.
"""

import math

from checks import is_on, steers_beta, steers_tau
from common import scheduled

EMA = 0.9  # share of the past in the smoothed entropy
ADAM = (0.9, 0.999, 1e-8)


def steering_entropy(config: dict) -> str:
    """The metric that update_tau is to be given: the one that has a target."""
    return (
        "weights/excess_entropy"
        if is_on(config["maxent_target_excess_entropy"])
        else "weights/entropy"
    )


def entropy_target(step: int, config: dict) -> float:
    """H* at a step: of the one of the two targets that is on."""
    excess, weights = config["maxent_target_excess_entropy"], config["maxent_target_weight_entropy"]
    return scheduled(excess if is_on(excess) else weights, step)


def init_state(config: dict) -> dict:
    """The state of a fresh run: tau and beta from the config, nothing measured yet (None until the first finite entropy), the
    meta-optimizer's number of updates and its two moments of the gradient by (log tau, log beta)."""
    return {
        "step": 0,
        "tau": config["maxent_tau"],
        "beta": config["beta"],
        "entropy": None,
        "steering": steering_entropy(config),
        "skipped": 0,
        "meta": {"updates": 0, "m": [0.0, 0.0], "v": [0.0, 0.0]},
    }


def resume_state(state: dict, config: dict) -> dict:
    """A checkpoint's state under the config of the run that goes on from it. tau and beta: what is steered goes on where the checkpoint was, within
    its bounds, but for 0 and infinity, where nothing can have steered it; what is not is as the config says now. The average of the entropy is kept if
    it is of the entropy that steers."""
    meta, new = config["controller_meta_method"] != "", init_state(config)
    if (meta or steers_tau(config)) and 0 < state["tau"] < math.inf:
        new["tau"] = clip(state["tau"], config["maxent_tau_min"], config["maxent_tau_max"])
    if (meta or steers_beta(config)) and 0 < state["beta"] < math.inf:
        new["beta"] = clip(state["beta"], config["beta_min"], config["beta_max"])
    if state.get("steering", new["steering"]) == new["steering"]:
        new["entropy"] = state["entropy"]
    return {**state, **{key: new[key] for key in ("tau", "beta", "entropy", "steering")}}


def clip(x: float, low: float, high: float) -> float:
    return min(max(x, low), high)


def is_measured(value: float | None) -> bool:
    return value is not None and math.isfinite(value)


def skipped(state: dict) -> dict:
    return {**state, "step": state["step"] + 1, "skipped": state["skipped"] + 1}


def update_tau(state: dict, entropy: float | None, config: dict) -> dict:
    """One step towards entropy_target(). `entropy`: the step's mean over active groups of what steering_entropy() names, None without any.
    The EMA runs from the first step; tau moves only after maxent_tau_warmup_steps. A missing or non-finite entropy changes nothing
    but the counts. Off (no target): the state comes back as it was."""
    if not steers_tau(config):
        return dict(state)
    if not is_measured(entropy):
        return skipped(state)
    smooth = entropy if state["entropy"] is None else EMA * state["entropy"] + (1 - EMA) * entropy
    warmup = (
        config["maxent_tau_warmup_steps"]
        if config["maxent_tau_warmup_steps"] >= 0
        else config["warmup_steps"]
    )
    tau = state["tau"]
    if state["step"] >= warmup:
        move = config["maxent_tau_lr"] * (entropy_target(state["step"], config) - smooth)
        tau = clip(
            tau * math.exp(clip(move, -50, 50)), config["maxent_tau_min"], config["maxent_tau_max"]
        )
    return {**state, "step": state["step"] + 1, "tau": tau, "entropy": smooth}


def update_beta(state: dict, kl: float | None, config: dict) -> dict:
    """One step of beta towards kl_target (nats per token). `kl`: sum of k3 over the step's completion tokens / their number.
    Moves by at most kl_ctl_step_size / kl_horizon of itself; a missing or non-finite KL changes nothing but `skipped`."""
    if not steers_beta(config):
        return dict(state)
    if not is_measured(kl):
        return {**state, "skipped": state["skipped"] + 1}
    error = clip(
        kl / config["kl_target"] - 1, -config["kl_ctl_step_size"], config["kl_ctl_step_size"]
    )
    return {
        **state,
        "beta": clip(
            state["beta"] * (1 + error / config["kl_horizon"]),
            config["beta_min"],
            config["beta_max"],
        ),
    }


# --- the meta-controller, alone in needing torch: checks.py asks the rest, before torch is loaded


def potential(
    log_tau,
    log_beta,
    batch: dict,
    targets: tuple,
    virtual_steps: int,
    virtual_lr: float,
    use_hessian: bool,
) -> tuple:
    """(Phi, H, K), differentiable by log_tau and log_beta. batch: "utilities" u, "scores" s, "ref_scores" l, each (groups, G).

    H is the mean entropy of w = softmax((u + beta * l) / (tau + beta)), K the mean KL(softmax(s) || softmax(l)) after `virtual_steps` steps
    s <- s + virtual_lr * (w - softmax(s)): what training on w would make of the policy. use_hessian=False takes softmax(s) in there as
    a constant. 0 steps: the policy as it was measured, which does not depend on tau and beta."""
    import torch

    u, s, ref = (batch[key].double() for key in ("utilities", "scores", "ref_scores"))
    tau, beta = log_tau.exp(), log_beta.exp()
    w = ((u + beta * ref) / (tau + beta)).softmax(1)
    for _ in range(virtual_steps):
        p = s.softmax(1)
        s = s + virtual_lr * (w - (p if use_hessian else p.detach()))
    H = torch.special.entr(w).sum(1).mean()
    K = (s.softmax(1) * (s.log_softmax(1) - ref.log_softmax(1))).sum(1).mean()
    return 0.5 * (H - targets[0]) ** 2 + 0.5 * (K - targets[1]) ** 2, H, K


def meta_gradient(state: dict, batch: dict, config: dict) -> tuple[float, list[float]]:
    """Phi and what descends it in (log tau, log beta): its gradient through one or controller_meta_truncation_steps virtual steps, or for
    "analytic" the residuals themselves, (H - H*, KL* - K), which need no differentiation."""
    import torch

    targets = (entropy_target(state["step"], config), config["kl_target"])
    steps = {
        "analytic": 0,
        "first_order": 1,
        "truncated_backprop": config["controller_meta_truncation_steps"],
    }[config["controller_meta_method"]]
    logs = [
        torch.tensor(math.log(state[name]), dtype=torch.float64, requires_grad=steps > 0)
        for name in ("tau", "beta")
    ]
    phi, H, K = potential(
        *logs,
        batch,
        targets,
        steps,
        config["controller_meta_virtual_lr"],
        config["controller_meta_use_hessian"],
    )
    gradient = torch.autograd.grad(phi, logs) if steps else (H - targets[0], targets[1] - K)
    return phi.item(), [g.item() for g in gradient]


def meta_step(state: dict, batch: dict, config: dict) -> tuple[dict, dict]:
    """One step of tau and beta by controller_meta_method, every controller_meta_update_interval steps, then clipped to their bounds; and
    meta/* metrics (tau_projected, beta_projected: 1 where a bound acted). batch: see potential(), the active groups of the step, before the
    update; without any, or with a non-finite gradient, nothing changes but the counts."""
    if state["step"] % config["controller_meta_update_interval"]:
        return {**state, "step": state["step"] + 1}, {}
    phi, gradient = (
        meta_gradient(state, batch, config)
        if len(batch["utilities"])
        else (math.nan, [math.nan] * 2)
    )
    if not all(map(is_measured, (phi, *gradient))):
        return skipped(state), {}
    if config["controller_meta_beta_grad_clip"] > 0:
        gradient[1] = clip(
            gradient[1],
            -config["controller_meta_beta_grad_clip"],
            config["controller_meta_beta_grad_clip"],
        )
    meta, moves = descend(state["meta"], gradient, config["controller_meta_optimizer"])
    rates = [
        own if own >= 0 else config["controller_meta_lr"]
        for own in (config["controller_meta_tau_lr"], config["controller_meta_beta_lr"])
    ]
    free = [
        state[name] * math.exp(clip(-rate * move, -50, 50))
        for name, rate, move in zip(("tau", "beta"), rates, moves)
    ]
    tau, beta = (
        clip(x, config[low], config[high])
        for x, low, high in zip(
            free, ("maxent_tau_min", "beta_min"), ("maxent_tau_max", "beta_max")
        )
    )
    metrics = {
        "loss": phi,
        "tau_grad": gradient[0],
        "beta_grad": gradient[1],
        "grad_norm": math.hypot(*gradient),
        "tau_projected": float(tau != free[0]),
        "beta_projected": float(beta != free[1]),
    }
    return {**state, "step": state["step"] + 1, "tau": tau, "beta": beta, "meta": meta}, {
        f"meta/{k}": v for k, v in metrics.items()
    }


def descend(meta: dict, gradient: list[float], optimizer: str) -> tuple[dict, list[float]]:
    """The optimizer's new state and what to subtract, before the learning rate: the gradient ("sgd"), or Adam's step (arXiv:1412.6980)."""
    updates, (b1, b2, eps) = meta["updates"] + 1, ADAM
    if optimizer == "sgd":
        return {**meta, "updates": updates}, gradient
    m = [b1 * old + (1 - b1) * g for old, g in zip(meta["m"], gradient)]
    v = [b2 * old + (1 - b2) * g * g for old, g in zip(meta["v"], gradient)]
    moves = [a / (1 - b1**updates) / (math.sqrt(b / (1 - b2**updates)) + eps) for a, b in zip(m, v)]
    return {"updates": updates, "m": m, "v": v}, moves
