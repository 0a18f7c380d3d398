"""Feedback rules for tau and beta: state in, new state out, plain floats that survive a JSON round trip.

    state = init_state(config)                      # {"step", "tau", "beta", "weight_entropy", "skipped"}
    state = update_tau(state, entropy, config)      # once per step, with the step's mean weight entropy
    state = update_beta(state, kl, config)          # once per step, with the step's mean token KL

tau: log tau <- log tau + maxent_tau_lr * (target - EMA of the entropy). More tau, flatter weights, more entropy: negative feedback.
beta: multiplied by 1 + clip(kl/target - 1, +-kl_ctl_step_size) / kl_horizon, the adaptive controller of Ziegler et al. 2019 (arXiv:1909.08593).
"""
import math

EMA = 0.9      # share of the past in the smoothed entropy


def steers_tau(config: dict) -> bool:
    return config["maxent_target_weight_entropy"] >= 0


def steers_beta(config: dict) -> bool:
    return config["kl_target"] > 0 and config["kl_horizon"] > 0 and config["kl_ctl_step_size"] > 0


def init_state(config: dict) -> dict:
    """The state of a fresh run: tau and beta from the config, nothing measured yet (None until the first finite entropy)."""
    return {"step": 0, "tau": config["maxent_tau"], "beta": config["beta"], "weight_entropy": None, "skipped": 0}


def clip(x: float, low: float, high: float) -> float:
    return min(max(x, low), high)


def is_measured(value: float | None) -> bool:
    return value is not None and math.isfinite(value)


def update_tau(state: dict, entropy: float | None, config: dict) -> dict:
    """One step towards maxent_target_weight_entropy (nats). `entropy`: mean H(w) over the step's active groups, None without any.
    The EMA runs from the first step; tau moves only after maxent_tau_warmup_steps. A missing or non-finite entropy changes nothing
    but `skipped`. Off (target -1): the state comes back as it was."""
    if not steers_tau(config):
        return dict(state)
    if not is_measured(entropy):
        return {**state, "step": state["step"] + 1, "skipped": state["skipped"] + 1}
    smooth = entropy if state["weight_entropy"] is None else EMA * state["weight_entropy"] + (1 - EMA) * entropy
    warmup = config["maxent_tau_warmup_steps"] if config["maxent_tau_warmup_steps"] >= 0 else config["warmup_steps"]
    tau = state["tau"]
    if state["step"] >= warmup:
        moved = math.log(tau) + config["maxent_tau_lr"] * (config["maxent_target_weight_entropy"] - smooth)
        tau = clip(math.exp(clip(moved, -50, 50)), config["maxent_tau_min"], config["maxent_tau_max"])
    return {**state, "step": state["step"] + 1, "tau": tau, "weight_entropy": smooth}


def update_beta(state: dict, kl: float | None, config: dict) -> dict:
    """One step of beta towards kl_target (nats per token). `kl`: sum of k3 over the step's completion tokens / their number.
    Moves by at most kl_ctl_step_size / kl_horizon of itself; a missing or non-finite KL changes nothing but `skipped`."""
    if not steers_beta(config):
        return dict(state)
    if not is_measured(kl):
        return {**state, "skipped": state["skipped"] + 1}
    error = clip(kl / config["kl_target"] - 1, -config["kl_ctl_step_size"], config["kl_ctl_step_size"])
    return {**state, "beta": clip(state["beta"] * (1 + error / config["kl_horizon"]), config["beta_min"], config["beta_max"])}
