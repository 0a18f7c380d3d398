"""What the tests of controllers.py share: a config for each controller, and a plant that answers to
tau and beta."""

import json

import torch

import controllers
import loss
from common import load_config

DEFAULTS = load_config([])
TAU_ON = DEFAULTS | {
    "maxent_target_weight_entropy": 1.0,
    "maxent_tau_lr": 0.5,
    "maxent_tau": 0.2,
    "maxent_tau_min": 0.01,
    "maxent_tau_max": 10.0,
    "maxent_tau_warmup_steps": 0,
}
BETA_ON = DEFAULTS | {
    "kl_target": 0.1,
    "kl_horizon": 10.0,
    "kl_ctl_step_size": 0.2,
    "beta": 0.5,
    "beta_min": 1e-3,
    "beta_max": 2.0,
}

TARGETS = {"maxent_target_weight_entropy": 1.6, "kl_target": 0.5}
ANALYTIC = TARGETS | {"controller_meta_method": "analytic", "controller_meta_lr": 0.1}
# the gradient shrinks where the weights are sharp, and Adam makes up for it
ADAM = {"controller_meta_optimizer": "adam", "controller_meta_lr": 0.05}
METHODS = ["analytic", "first_order", "truncated_backprop"]
CONTROLLERS = {
    "tau_entropy": {"maxent_target_weight_entropy": 1.6, "maxent_tau_lr": 0.3},
    "tau_excess": {"maxent_target_excess_entropy": 0.5, "maxent_tau_lr": 0.3},
    "beta": {"kl_target": 0.5},
    "analytic": ANALYTIC,
    "first_order": TARGETS | ADAM | {"controller_meta_method": "first_order"},
    "truncated_backprop": TARGETS | ADAM | {"controller_meta_method": "truncated_backprop"},
}


def setting(name: str, **changes) -> dict:
    """The config of one of CONTROLLERS."""
    return DEFAULTS | {"maxent_tau": 0.2, "maxent_tau_max": 10.0} | CONTROLLERS[name] | changes


class Plant:
    """48 groups of 8 answers, rewards 0/1 or graded, a fixed reference, and a policy whose group
    scores relax to the weights that tau and beta ask for. The noise: a step measures 16 of the
    groups at random, and disturbs all scores."""

    def __init__(self, tau: float, beta: float, seed: int = 0):
        """The policy has been trained for long with this tau and beta."""
        self.random = torch.Generator().manual_seed(seed)
        chances = torch.rand(24, 8, generator=self.random)
        rates = torch.rand(24, 1, generator=self.random)
        graded = torch.randint(5, (24, 8), generator=self.random) / 4.0
        self.rewards = torch.cat([(chances < rates).double(), graded])  # (48, 8)
        self.rewards[:, 0] = 1.0  # no group of equal rewards
        self.rewards[:, 1] = 0.0
        self.ref = torch.randn(48, 8, generator=self.random, dtype=torch.float64)
        self.utilities = loss.log_reward_targets(self.rewards, 1.0, 0.0)
        self.scores = self.weights(tau, beta).log()

    def weights(self, tau: float, beta: float):
        return loss.maxent_weights(self.utilities, self.ref, tau, beta)

    def batch(self, rows) -> dict:
        """What meta_step is given of some groups."""
        return {
            "utilities": self.utilities[rows],
            "scores": self.scores[rows],
            "ref_scores": self.ref[rows],
        }

    def measure(self, tau: float, beta: float, rows=slice(None)) -> dict:
        """The metrics of weights and policy; over all groups, without noise, unless asked for
        some."""
        w = self.weights(tau, beta)[rows]
        s = self.scores[rows].log_softmax(1)
        ref = self.ref[rows].log_softmax(1)
        active = torch.ones(len(w), dtype=torch.bool)
        metrics = loss.weight_metrics(w, self.rewards[rows], active)
        metrics["kl"] = (s.exp() * (s - ref)).sum(1).mean().item()
        return metrics

    def step(self, state: dict, config: dict) -> dict:
        """Step 8 of the loop in train.py, then the policy learns from the weights of this step."""
        rows = torch.randperm(48, generator=self.random)[:16]
        w = self.weights(state["tau"], state["beta"])
        metrics = self.measure(state["tau"], state["beta"], rows)
        after = control(state, self.batch(rows), metrics, config)
        noise = torch.randn(48, 8, generator=self.random, dtype=torch.float64)
        self.scores = self.scores + 0.5 * (w - self.scores.softmax(1)) + 0.05 * noise
        return after


def control(state: dict, batch: dict, metrics: dict, config: dict) -> dict:
    """The next state, by whichever controllers are on."""
    if config["controller_meta_method"]:
        return controllers.meta_step(state, batch, config)[0]
    entropy = metrics.get(controllers.steering_metric(config))
    state = controllers.update_tau(state, entropy, config)
    return controllers.update_beta(state, metrics.get("kl"), config)


def drive(plant: Plant, config: dict, steps: int, state: dict | None = None) -> tuple:
    """What all groups measure at every step, with tau and beta; and the last state."""
    state = state or controllers.init_state(config)
    measures = []
    for _ in range(steps):
        now = {"tau": state["tau"], "beta": state["beta"]}
        measures.append(plant.measure(**now) | now)
        state = plant.step(state, config)
    return measures, state


ORDINARY = Plant(0.3, 0.3).batch(slice(0, None, 6))  # 8 groups


def through_json(state: dict) -> dict:
    return json.loads(json.dumps(state, allow_nan=False))


def replay(config: dict, resume, cut: int | None) -> list[dict]:
    """The states of a run of fixed measurements, some of them missing, whose state passes through
    `resume` before step `cut`."""
    plant = Plant(0.3, 0.3)
    state = controllers.init_state(config)
    path = []
    for step in range(10):
        if step == cut:
            state = resume(state)
        rows = torch.arange(step, step + 8)
        metrics = plant.measure(0.05 + 0.3 * step, 0.2, rows)
        if step == 3:  # nothing is measured
            rows = torch.arange(0)
            metrics = {"kl": float("nan")}
        state = control(state, plant.batch(rows), metrics, config)
        path.append(state)
    return path


def resumes_exactly(config: dict, resume=through_json) -> bool:
    straight = replay(config, through_json, None)
    return all(replay(config, resume, cut) == straight for cut in range(10))
