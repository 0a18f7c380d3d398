"""The claims of docs/results.md, computed from compare/evidence: how far two arms lie apart, how
sure that is, and whether a run refutes it.

    python -m compare.claims
    python -m compare.claims --picture=assets/claims.png      differences and intervals, drawn

An arm is one setting, trained with several seeds: its runs. A line of claims.csv compares a metric
of an arm with that of another arm, or with "start", the models its own runs began with. Each run
counts once: with its evaluation at `step`, or, for "last", with the mean of its last three.
pass@64 is of 64 samples by the last checkpoint, which not every run has (an arm with a namesake in
_1500 was sampled before its end, the namesake at it). "refuted by" has limits: a single run beyond
one of them refutes the claim, and the table then says so.

Intervals are of 95% by Student's t: beside "start" over each run's own change, else over the runs
of both arms, by Welch; bold where 0 lies outside. There is none with a single run, or where no run
differs from another. They cover the luck of training, and assume that runs scatter normally. With
two or three runs they are wide. They do not cover
- the choice of held-out problems, which is the same everywhere,
- the luck of sampling as far as runs share it: evaluations of a task use the same seeds, and runs a
  start (docs/results.md, "The luck of sampling": up to .05 of pass@8),
- that runs of two arms may have begun with other starts (compare/evidence/README.md says which).
They are not corrected for the number of lines: one in twenty misses by chance.
"""

import csv
from functools import cache
from math import isfinite, nan
from numbers import Real
from pathlib import Path
from statistics import mean
from typing import NamedTuple

import pandas as pd

from common import ROOT, UserError, own_flags, script
from compare.frontier import last_evaluations, read_file
from compare.pass_at_k import read_runs, run_pass_at_k
from compare.results import LAST, ROUNDING, markdown, prepare_picture

CLAIMS = ROOT / "compare" / "claims.csv"
EVIDENCE = ROOT / "compare" / "evidence"
FILES = {  # the letter of an experiment in docs/results.md: its evaluations
    "N": "smollm2_between.jsonl",
    "S": "smollm2_sentence.jsonl",
    "C": "countdown_convergence.jsonl",
    "G": "graph_coloring_convergence.jsonl",
    "O": "graph_coloring_others.jsonl",
    "D": "demo.jsonl",
    "T": "countdown_steered.jsonl",
}
# 64 samples of each problem by the last checkpoints
SAMPLED = {"C": "countdown_k64.jsonl", "G": "graph_coloring_k64.jsonl"}
# these ended after 250 and 450 steps, with no end in sight
LEFT_OUT = [("C", "maxent_20", 2), ("C", "maxent_spread", 1)]

NAME = ["arm", "seed", "step"]  # of an evaluation
HEAD = ["claim", "experiment", "step", "metric", "arm", "beside", "refuted by"]  # of claims.csv
PANELS = {  # of the picture: the metrics of each, and its title
    "mean": "share of right answers",
    "pass": "share of problems solved in k tries",
    "distinct": "different right answers in k tries",
}


class Limit(NamedTuple):
    """A run of `arm` below (or above) `value` refutes a claim."""

    arm: str
    side: str  # "below" or "above"
    value: float

    def is_passed(self, value: float) -> bool:
        return value < self.value if self.side == "below" else value > self.value


class Claim(NamedTuple):
    text: str
    experiment: str  # a key of FILES
    step: str  # a number, or "last"
    metric: str
    arm: str
    beside: str  # another arm, or "start"
    limits: list[Limit]


def read_claims() -> list[Claim]:
    try:
        with CLAIMS.open(encoding="utf-8", newline="") as file:
            lines = csv.reader(file, strict=True)
            rows = [(f"{CLAIMS}, line {lines.line_num}", row) for row in lines if row]
    except (OSError, ValueError, csv.Error) as error:  # ValueError: not UTF-8
        raise UserError(f"{CLAIMS} can not be read: {error}") from None
    if not rows or rows[0][1] != HEAD:
        raise UserError(f"{CLAIMS} must begin with the line {','.join(HEAD)}")
    if len(rows) == 1:
        raise UserError(f"{CLAIMS} has no claim below its first line")
    return [claim_from(row, where) for where, row in rows[1:]]


def claim_from(row: list[str], where: str) -> Claim:
    """where: the file and the line, for messages"""
    if len(row) != len(HEAD):
        raise UserError(
            f"{where} has {len(row)} cells, not {len(HEAD)}: a cell with a comma needs quotes"
        )
    *cells, refuted_by = row
    claim = Claim(*cells, read_limits(refuted_by, where))
    if claim.experiment not in FILES:
        raise UserError(f"{where}: experiment {claim.experiment!r} is none of {', '.join(FILES)}")
    if claim.arm == claim.beside:
        raise UserError(f"{where} compares {claim.arm} with itself")
    if claim.step != "last" and not claim.step.isdecimal():
        raise UserError(f"{where}: step {claim.step!r} must be a whole number, or last")
    if claim.metric == "pass@64" and (claim.step != "last" or claim.beside == "start"):
        # a start's samples are none of the run's
        raise UserError(f"{where}: pass@64 is of last checkpoints only, beside another arm")
    if claim.metric == "pass@64" and claim.experiment not in SAMPLED:
        raise UserError(f"{where}: pass@64 was measured in {', '.join(SAMPLED)} only")
    for limit in claim.limits:
        if limit.arm not in (claim.arm, claim.beside):
            raise UserError(
                f"{where}: the limit is about {limit.arm}, the claim about {claim.arm} and "
                f"{claim.beside}"
            )
    return claim


def read_limits(text: str, where: str) -> list[Limit]:
    """Of "maxent below 2, dr_grpo above 1.5"."""
    limits = []
    for limit in text.split(", "):
        try:
            arm, side, value = limit.split()
            limits.append(Limit(arm, side, float(value)))
        except ValueError:
            side = ""
        if side not in ("below", "above") or not isfinite(limits[-1].value):
            raise UserError(f"{where}: {limit!r} must be like 'maxent below 2'")
    return limits


# --- the evidence


@cache
def evaluations(experiment: str) -> dict[tuple, pd.DataFrame]:
    """{(arm, seed): the run's evaluations, in the order of their steps}"""
    path = EVIDENCE / FILES[experiment]
    records = read_file(path)
    check_names(path, records)
    table = pd.DataFrame(records, columns=None if records else NAME).sort_values("step")
    runs = dict(iter(table.groupby(["arm", "seed"])))
    return {name: run for name, run in runs.items() if (experiment, *name) not in LEFT_OUT}


def check_names(path: Path, records: list[dict]) -> None:
    """UserError for an evaluation that is no run's, which pandas would leave out, or that is there
    twice, which would count twice."""
    lines = {}  # {(arm, seed, step): the line it is in}
    for number, record in enumerate(records, 1):
        name = tuple(record.get(key) for key in NAME)
        if [type(part) for part in name] != [str, int, int]:
            raise UserError(
                f"{path}, line {number} must have a text as arm and whole numbers as seed and "
                f"step, not {name[0]!r}, {name[1]!r} and {name[2]!r}"
            )
        if name in lines:
            raise UserError(
                f"{path}: lines {lines[name]} and {number} are both of {name[0]}, seed {name[1]}, "
                f"step {name[2]}: delete one"
            )
        lines[name] = number


@cache
def samples(experiment: str) -> dict[tuple, float]:
    """{(arm, seed): pass@64}"""
    path = EVIDENCE / SAMPLED[experiment]
    runs = read_runs(path)
    if runs[0].samples < 64:  # equal in all
        raise UserError(f"{path} has {runs[0].samples} samples of a problem: pass@64 needs 64")
    values = {(run.arm, run.seed): run_pass_at_k(run, 64) for run in runs}
    return {name: value for name, value in values.items() if (experiment, *name) not in LEFT_OUT}


def values_of(arm: str, claim: Claim) -> dict[int, float]:
    """{seed: the claim's metric} of the arm's runs. UserError if there are none."""
    sampled = claim.metric == "pass@64"
    runs = samples(claim.experiment) if sampled else evaluations(claim.experiment)
    path = EVIDENCE / (SAMPLED if sampled else FILES)[claim.experiment]
    of_arm = {seed: run for (name, seed), run in runs.items() if name == arm}
    if not of_arm:
        arms = ", ".join(dict.fromkeys(name for name, _ in runs)) or "none"
        raise UserError(
            f"{CLAIMS}: {claim.text!r}: no runs of arm {arm!r} in {path}, whose arms are {arms}"
        )
    if sampled:
        return of_arm
    return {
        seed: metric_at(claim.step, run, claim.metric, f"{path}: {arm}, seed {seed}")
        for seed, run in of_arm.items()
    }


def metric_at(step: str, run: pd.DataFrame, metric: str, where: str) -> float:
    """run: one run's evaluations, in the order of their steps. where: which, for messages"""
    if step == "last":
        counted = last_evaluations(run)
        if len(counted) < LAST:
            raise UserError(
                f"{where} has fewer than {LAST} evaluations after its start: 'last' is their mean, "
                f"let the claim name a step"
            )
    else:
        counted = run[run["step"] == int(step)]
        if counted.empty:
            steps = ", ".join(map(str, run["step"]))
            raise UserError(f"{where} has no evaluation at step {step}, only at {steps}")
    share = metric.startswith(("mean@", "pass@", "coverage@"))
    for evaluation in counted.to_dict("records"):
        value = evaluation.get(metric)
        # a mean would leave out what is no number
        if not isinstance(value, Real) or not isfinite(value) or (share and not 0 <= value <= 1):
            wanted = "share from 0 to 1" if share else "number"
            raise UserError(f"{where} has no {wanted} as {metric} at step {evaluation['step']}")
    return float(counted[metric].mean())


# --- one claim


def difference(values: dict, beside: dict, paired: bool) -> tuple[float, float, float]:
    """The mean of `values` minus that of `beside`, both by seed, and the ends of its 95% interval,
    NaN if there is none. paired: a seed's two values are of one run."""
    from statsmodels.stats.weightstats import CompareMeans, DescrStatsW

    if paired:
        scatter = [DescrStatsW([values[seed] - beside[seed] for seed in values])]
        change = scatter[0].mean
    else:
        scatter = [DescrStatsW(list(values.values())), DescrStatsW(list(beside.values()))]
        change = scatter[0].mean - scatter[1].mean
    # one run doesn't scatter, and nor do equal ones, whose luck is then unknown rather than 0
    if min(runs.nobs for runs in scatter) < 2 or max(runs.std for runs in scatter) < ROUNDING:
        return change, nan, nan
    if paired:
        return change, *scatter[0].tconfint_mean()
    return change, *CompareMeans(*scatter).tconfint_diff(usevar="unequal")


class Measured(NamedTuple):
    values: dict[str, dict]  # {arm or "start": {seed: the claim's metric}}, two of them
    change: float  # the mean of the first minus that of the second
    low: float  # the ends of its interval
    high: float

    @property
    def decided(self) -> bool:
        return self.low > 0 or self.high < 0


def measure(claim: Claim) -> Measured:
    paired = claim.beside == "start"
    values = values_of(claim.arm, claim)
    if paired:
        beside = values_of(claim.arm, claim._replace(step="0"))
    else:
        beside = values_of(claim.beside, claim)
    by_arm = {claim.arm: values, claim.beside: beside}
    return Measured(by_arm, *difference(values, beside, paired))


def measure_claims() -> list[tuple[Claim, Measured]]:
    return [(claim, measure(claim)) for claim in read_claims()]


def verdict(limits: list[Limit], values: dict[str, dict]) -> str:
    """What refutes a claim, after the runs that do. values: {arm: {seed: value}}"""
    text = " or ".join(f"{limit.arm} {limit.side} {limit.value:g}" for limit in limits)
    beyond = [
        f"{limit.arm}, seed {seed}: {value:.3g}"
        for limit in limits
        for seed, value in values[limit.arm].items()
        if limit.is_passed(value)
    ]
    return f"**REFUTED** by {'; '.join(beyond)}; limit: {text}" if beyond else text


# --- showing


def row_of(claim: Claim, measured: Measured) -> list[str]:
    # the unit of distinct@k is answers, of entropy nats; the others are shares
    digits = 2 if claim.metric.startswith(("distinct", "entropy")) else 3
    change, low, high = (f"{x:+.{digits}f}" for x in measured[1:])
    interval = (
        f"{change} ({low} to {high})" if isfinite(measured.low) else f"{change} (no interval)"
    )
    where = f"{claim.experiment}, {claim.step if claim.step == 'last' else 'step ' + claim.step}"
    means = [
        f"{arm} {mean(by_seed.values()):.{digits}f} ({len(by_seed)})"
        for arm, by_seed in measured.values.items()
    ]
    return [
        claim.text,
        where,
        claim.metric,
        ", ".join(means),
        f"**{interval}**" if measured.decided else interval,
        verdict(claim.limits, measured.values),
    ]


def table(claims: list[tuple[Claim, Measured]]) -> str:
    head = ["claim", "from", "metric", "means (runs)", "difference", "refuted by a run of"]
    return markdown(head, *(row_of(*claim) for claim in claims))


def draw(claims: list[tuple[Claim, Measured]], picture: str) -> None:
    """Draws the differences with their intervals, a panel for each of PANELS; grey where 0 lies
    inside."""
    from matplotlib.figure import Figure  # not pyplot, which would look for a window

    figure = Figure(figsize=(6 * len(PANELS), 6.5), layout="constrained")
    for axis, (prefix, title) in zip(figure.subplots(1, len(PANELS)), PANELS.items(), strict=True):
        names = []
        for claim, measured in claims:
            if not claim.metric.startswith(prefix):
                continue
            y = len(names)
            color = "tab:blue" if measured.decided else "tab:gray"
            axis.plot([measured.low, measured.high], [y, y], color=color, linewidth=2)
            axis.plot(measured.change, y, "o", color=color)
            names.append(f"{claim.arm} − {claim.beside}, {claim.metric} ({claim.experiment})")
        axis.axvline(0, color="black", linewidth=0.8)
        axis.set_yticks(range(len(names)), names, fontsize=8)
        axis.invert_yaxis()  # in the order of the table
        axis.set_title(title)
        axis.grid(axis="x", alpha=0.3)
    figure.savefig(picture, dpi=110)


def main(argv) -> None:
    own, words = own_flags(argv, {"picture": ""})
    if words:
        raise UserError(f"python -m compare.claims takes --picture, not {' '.join(words)}")
    if own["picture"]:
        prepare_picture(own["picture"])
    claims = measure_claims()
    print(table(claims))
    if own["picture"]:
        draw(claims, own["picture"])
        print(f"picture: {own['picture']}")


if __name__ == "__main__":
    script(main)
