"""What finished runs of compare.py say: a table of the arms, their effects, a picture.

    print(write_results(runs, baseline, output, missing))       # results.md
    draw(runs, output)                                          # comparison.png

A run is compare.py's {"arm", "seed", "folder", "config"}.

An effect is the arm's mean minus the baseline's, by a regression of each problem's outcome on the arm. All runs answer the same problems, so errors
are clustered by problem: interval and p (Holm over all arms and metrics) say what OTHER PROBLEMS would have given THESE checkpoints. They know
nothing of other training seeds: for that look at the range over the runs.
"""

import json
from math import nan
from pathlib import Path

import numpy as np
import pandas as pd

from common import UserError

EVAL_SEEDS = 3  # of the last evaluation of every run
METRICS = ("pass", "mean", "coverage", "distinct")
SET_HERE = (
    "seed",
    "output_dir",
    "overwrite_output_dir",
    "resume_from_checkpoint",
)  # by compare.py, never by an arm


def read_lines(path: Path) -> list[dict]:
    try:
        return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    except (OSError, ValueError) as error:
        raise UserError(
            f"{path} is damaged ({error}): delete {path if path.name == 'eval.jsonl' else path.parent}, and the same command makes it again"
        ) from None


def load_outcomes(runs: list[dict]) -> pd.DataFrame:
    """One line per arm, seed and problem: mean, pass, coverage, distinct, averaged over the evaluation seeds; the last two NaN where unknown."""
    lines, k, found = (
        [],
        runs[0]["config"]["eval_num_generations"],
        {run["folder"] / "eval.jsonl": run for run in runs},
    )
    records = {file: read_lines(file) for file in found}
    asked = {file: sorted((r["id"], r["seed"]) for r in records[file]) for file in found}
    for file in [
        file for file in found if not asked[file] or asked[file] != max(asked.values(), key=len)
    ]:
        raise UserError(
            f"{file} lacks problems that other runs have, or has others: delete it, and the same command makes it again"
        )
    for file, run in found.items():
        lines += [
            {
                "arm": run["arm"],
                "seed": run["seed"],
                "problem": r["id"],
                "mean": r["correct"] / k,
                "pass": float(r["correct"] > 0),  # of k answers: pass@k
                "distinct": nan if r["distinct"] is None else r["distinct"],
                "coverage": r["distinct"] / r["num_modes"] if r["num_modes"] else nan,
            }
            for r in records[file]
        ]
    return (
        pd.DataFrame(lines).groupby(["arm", "seed", "problem"], sort=False, as_index=False).mean()
    )


def load_curves(runs: list[dict]) -> pd.DataFrame:
    """One line per arm, seed and evaluation during training: step, mean, pass, coverage, distinct."""
    k = runs[0]["config"]["eval_num_generations"]
    return pd.DataFrame(
        [
            {
                "arm": run["arm"],
                "seed": run["seed"],
                "step": line["step"],
                **{m: line.get(f"eval/{m}@{k}", nan) for m in METRICS},
            }
            for run in runs
            for line in read_lines(run["folder"] / "metrics.jsonl")
            if "eval/pass@1" in line
        ]
    )


def known(table: pd.DataFrame) -> list[str]:
    return [m for m in METRICS if table[m].notna().all()]


def effects(outcomes: pd.DataFrame, baseline: str) -> pd.DataFrame:
    """Arm minus baseline, per metric: estimate, 95% interval and p from OLS with errors clustered by problem, p after Holm's correction over
    the table, and the smallest and the largest difference between a run of the arm and a run of the baseline."""
    import statsmodels.api as sm
    from statsmodels.stats.multitest import multipletests

    arms, found, problems = (
        [arm for arm in outcomes["arm"].unique() if arm != baseline],
        [],
        pd.factorize(outcomes["problem"])[0],
    )
    X = np.column_stack([np.ones(len(outcomes)), *(outcomes["arm"] == arm for arm in arms)])
    for metric in (
        known(outcomes) if problems.max() > 0 else []
    ):  # one problem is nothing to cluster by
        runs = outcomes.groupby(["arm", "seed"])[metric].mean()
        with np.errstate(all="ignore"):  # an outcome that never varies has p = 0 / 0
            fit = sm.OLS(outcomes[metric].to_numpy(), X).fit(
                cov_type="cluster", cov_kwds={"groups": problems}, use_t=True
            )
            for i, arm in enumerate(arms, 1):
                found.append(
                    {
                        "arm": arm,
                        "metric": metric,
                        "effect": fit.params[i],
                        "low": fit.conf_int()[i, 0],
                        "high": fit.conf_int()[i, 1],
                        "p": fit.pvalues[i],
                        "run_min": runs[arm].min() - runs[baseline].max(),
                        "run_max": runs[arm].max() - runs[baseline].min(),
                    }
                )
    table = pd.DataFrame(
        found, columns=["arm", "metric", "effect", "low", "high", "p", "run_min", "run_max"]
    )
    return table.assign(
        p_holm=multipletests(table["p"].fillna(1), method="holm")[1] if len(table) else []
    )


def at_equal_mean(curves: pd.DataFrame, arm: str, baseline: str, metric: str) -> float:
    """How much better the arm's last evaluation is than the baseline at the moment when it had the same mean@k: a point above the
    baseline's path in the plane of mean@k and `metric`. NaN where the baseline never was there."""
    path, own = (
        curves[curves["arm"] == name].groupby("step")[["mean", metric]].mean()
        for name in (baseline, arm)
    )
    last, highest = own.iloc[-1], path["mean"].cummax()
    if not highest.iloc[0] <= last["mean"] <= highest.iloc[-1]:
        return nan
    risen = path[
        path["mean"] > highest.shift(fill_value=-1)
    ]  # interpolation needs a mean that rises: new heights only
    return last[metric] - np.interp(last["mean"], risen["mean"], risen[metric])


def markdown(*rows) -> str:
    return "\n".join(
        f"| {' | '.join(row)} |" for row in (rows[0], ["---"] * len(rows[0]), *rows[1:])
    )


def write_results(runs: list[dict], baseline: str, output: Path, missing: list[dict]) -> str:
    """results.md: a table of the arms and one of the effects; also returned."""
    outcomes, curves, k = (
        load_outcomes(runs),
        load_curves(runs),
        runs[0]["config"]["eval_num_generations"],
    )
    shown, start = known(outcomes), curves[curves["step"] == 0][list(METRICS)].mean()
    equal, arms = [m for m in ("pass", "coverage") if m in shown], []
    for arm, own in (
        outcomes.groupby(["arm", "seed"], sort=False)[shown].mean().groupby("arm", sort=False)
    ):
        gains = [nan if arm == baseline else at_equal_mean(curves, arm, baseline, m) for m in equal]
        arms.append(
            [
                arm,
                str(len(own)),
                *(
                    f"{own[m].mean():.3f}" + (f" ± {own[m].std():.3f}" if len(own) > 1 else "")
                    for m in shown
                ),
                *("" if np.isnan(gain) else f"{gain:+.3f}" for gain in gains),
            ]
        )
    tests = [
        [
            e.arm,
            f"{e.metric}@{k}",
            f"{e.effect:+.3f}",
            f"{e.low:+.3f} to {e.high:+.3f}",
            f"{e.p_holm:.2g}",
            f"{e.run_min:+.3f} to {e.run_max:+.3f}",
        ]
        for e in effects(outcomes, baseline).itertuples()
    ]
    text = f"""{outcomes["problem"].nunique()} held-out problems, k = {k}, {
        EVAL_SEEDS
    } evaluation seeds; mean over training runs ± their standard deviation.
Not finished, so not in here: {
        ", ".join(f"{run['arm']}/seed_{run['seed']}" for run in missing) or "none"
    }.

{
        markdown(
            [
                "arm",
                "runs",
                *(f"{m}@{k}" for m in shown),
                *(f"{m}@{k} at equal mean@{k}" for m in equal),
            ],
            [
                "(start, one evaluation)",
                "",
                *(f"{start[m]:.3f}" for m in shown),
                *("" for _ in equal),
            ],
            *arms,
        )
    }

At equal mean@{k}: against {baseline} at the moment of its training when its mean@{
        k
    } was the same; empty where it never was.

{
        markdown(
            [
                "arm",
                "metric",
                f"effect against {baseline}",
                "95% interval",
                "p (Holm)",
                "range over runs",
            ],
            *tests,
        )
    }

Effects by OLS with errors clustered by problem. Interval and p (Holm over this table) say what other problems would have given these very checkpoints;
**they do not cover the luck of training seeds**. For that there is only the last column, the smallest and the largest difference between a run of the arm
and a run of {
        baseline
    }. Where it includes 0, and always with one run an arm, the effect could be luck of training, however small p is; with three runs each,
luck alone keeps 0 out of the range once in ten times.
"""
    (output / "results.md").write_text(text, encoding="utf-8")
    return text


def doses(runs: list[dict]) -> list[tuple[str, list[tuple]]]:
    """[(key, [(dose, arm), ...]), ...]: three or more arms that differ in one numeric key only, ordered by it."""
    found, configs = (
        {},
        {run["arm"]: {k: v for k, v in run["config"].items() if k not in SET_HERE} for run in runs},
    )
    for arm, config in configs.items():
        for key in [key for key, value in config.items() if type(value) in (int, float)]:
            found.setdefault((key, json.dumps(config | {key: None})), []).append((config[key], arm))
    return [
        (key, sorted(line))
        for (key, _), line in found.items()
        if len({dose for dose, _ in line}) > 2
    ]


def band(axis, x, runs: pd.DataFrame, **style) -> None:
    """The mean over runs, one a column, as a line; their range as an area."""
    (line,) = axis.plot(x, runs.mean(axis=1), **style)
    axis.fill_between(x, runs.min(axis=1), runs.max(axis=1), color=line.get_color(), alpha=0.12)


def draw(runs: list[dict], output: Path) -> Path:
    """comparison.png: learning curves with the range over runs, pass and coverage against mean, and the dose-responses."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    outcomes, curves, dosed, k = (
        load_outcomes(runs),
        load_curves(runs),
        doses(runs),
        runs[0]["config"]["eval_num_generations"],
    )
    shown, planes = known(curves), [m for m in ("pass", "coverage") if m in known(curves)]
    count = len([*shown, *planes, *dosed])
    figure, axes = plt.subplots(
        -(-count // 4), 4, figsize=(20, 4 * -(-count // 4)), layout="constrained", squeeze=False
    )
    color = {arm: plt.get_cmap("tab20")(i % 20) for i, arm in enumerate(curves["arm"].unique())}
    for axis, metric in zip(axes.flat, shown):
        for arm in color:
            over = curves[curves["arm"] == arm].pivot_table(
                index="step", columns="seed", values=metric
            )
            band(axis, over.index, over, color=color[arm], label=arm)
        axis.set(title=f"{metric}@{k}, range over runs", xlabel="step")
    for axis, metric in zip(axes.flat[len(shown) :], planes):
        for arm in color:
            path = curves[curves["arm"] == arm].groupby("step")[["mean", metric]].mean()
            axis.plot(path["mean"], path[metric], color=color[arm], linewidth=1, alpha=0.7)
            axis.plot(*path.iloc[-1], "o", color=color[arm])
            axis.annotate(arm, path.iloc[-1], fontsize=7)
        axis.set(title=f"path through training: {metric}@{k} against mean@{k}", xlabel=f"mean@{k}")
    final = outcomes.groupby(["arm", "seed"])[list(METRICS)].mean().unstack()
    for axis, (key, line) in zip(axes.flat[len(shown) + len(planes) :], dosed):
        for metric in [m for m in shown if m != "distinct"]:
            band(
                axis,
                range(len(line)),
                final[metric].loc[[arm for _, arm in line]],
                marker="o",
                label=f"{metric}@{k}",
            )
        axis.set(title=f"at the end, {line[0][1]} to {line[-1][1]}", xlabel=key)
        axis.set_xticks(
            range(len(line)), [f"{dose:g}" for dose, _ in line]
        )  # evenly spaced: 0 and inf have a place
        axis.legend(fontsize=7)
    for i, axis in enumerate(axes.flat):
        axis.grid(alpha=0.3)
        axis.set_visible(i < count)
    figure.legend(*axes.flat[0].get_legend_handles_labels(), loc="outside lower center", ncols=8)
    figure.savefig(output / "comparison.png", dpi=110)
    plt.close(figure)
    return output / "comparison.png"
