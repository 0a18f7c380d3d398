"""Do the controllers hold their targets? A table of the runs of `python -m compare`.

    python -m compare.targets runs/compare_countdown_steered
    python -m compare.targets runs/compare_countdown_steered --last=100

A row is a run, measured over the second half of its steps, or over the last --last of them. For
entropy and KL it has the mean, the target, and the mean distance between value and target (without
a target only the mean, for comparison). For tau and beta it has the last value, and the share of
those steps at which it was at a bound, where a controller has no effect.

The entropy is that of the weights, or the excess entropy if that is what the target is for. The KL
is per token, or over a group if a meta-controller steers.
"""

import math
from pathlib import Path

import pandas as pd

from checks import moves_beta, moves_tau
from common import UserError, load_config, own_flags, script
from compare.results import markdown, metrics_of, only_source, runs_in
from controllers import entropy_target, steering_metric

OWN = {"last": 0}  # the number of last steps that are measured; 0: half of all
HEAD = ["arm", "seed", "steps", "entropy", "target", "distance", "KL", "target", "distance"]
HEAD += ["tau", "at a bound", "beta", "at a bound"]


def metrics_by_step(run: Path) -> pd.DataFrame:
    """The metrics of a run's finished steps: a line per step, in order, and a column per metric;
    NaN if it was not measured."""
    # an evaluation's own line has no tau; if a step was repeated, the later line counts
    lines = {line["step"]: line for line in metrics_of(run) if "tau" in line}
    steps = pd.DataFrame([lines[step] for step in sorted(lines)])
    return steps.apply(pd.to_numeric, errors="coerce")


def held(measured: pd.Series, targets: pd.Series | None) -> list[str]:
    """Three cells: the mean of the measured values, the last target, the mean distance between
    values and targets."""
    if measured.isna().all():
        return ["", "", ""]
    mean = f"{measured.mean():.4f}"
    if targets is None:
        return [mean, "", ""]
    return [mean, f"{targets.iloc[-1]:g}", f"{(measured - targets).abs().mean():.4f}"]


def bounded(values: pd.Series, moves: bool, low: float, high: float) -> list[str]:
    """Two cells: the last value of tau or beta, and the share of steps that it was at a bound, if a
    controller moves it."""
    last = f"{values.iloc[-1]:.4g}"
    return [last, f"{values.isin([low, high]).mean():.0%}" if moves else ""]


def row_of(arm: str, seed: int, run: Path, steps: pd.DataFrame, last: int) -> list[str]:
    """steps: metrics_by_step(run), at least one."""
    c = load_config([str(run / "config.json")])
    count = len(steps)
    steps = steps.tail(last or (count + 1) // 2)
    tau = steps["tau"].fillna(math.inf)  # metrics.jsonl has null for infinity
    meta = c["controller_meta_method"] != ""
    entropy_targets = None
    kl_targets = None
    if moves_tau(c):
        # step - 1: metrics.jsonl counts steps from 1, controllers from 0
        entropy_targets = steps["step"].map(lambda step: entropy_target(step - 1, c))
    if moves_beta(c):
        kl_targets = pd.Series(c["kl_target"], steps.index)
    # a metric that was never measured has no column
    nothing = pd.Series(float("nan"), steps.index)
    return [
        arm,
        str(seed),
        str(count),
        *held(steps.get(steering_metric(c), nothing), entropy_targets),
        *held(steps.get("meta/kl" if meta else "kl", nothing), kl_targets),
        *bounded(tau, moves_tau(c), c["maxent_tau_min"], c["maxent_tau_max"]),
        *bounded(steps["beta"], moves_beta(c), c["beta_min"], c["beta_max"]),
    ]


def main(argv) -> None:
    own, words = own_flags(argv, OWN)
    takes = "python -m compare.targets takes one folder of python -m compare and --last"
    folder = only_source(words, takes)
    if own["last"] < 0:
        raise UserError(f"--last={own['last']} must be at least 1, or 0 for half of the steps")
    rows = []
    for arm, seed, run in runs_in(folder):
        steps = metrics_by_step(run)
        if len(steps):  # it has not only begun
            rows.append(row_of(arm, seed, run, steps, own["last"]))
    if not rows:
        raise UserError(f"{folder}: no <arm>/seed_<n>/metrics.jsonl in it has a finished step")
    print(markdown(HEAD, *rows))


if __name__ == "__main__":
    script(main)
