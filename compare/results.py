"""The results of finished runs of python -m compare: a table of the arms, their effects, a picture.

    print(write_results(runs, baseline, output, missing))       # results.md
    draw(runs, output)                                          # comparison.png

A run is a dict with "arm", "seed", "folder", "config" and more: compare.__main__.plan_run makes it.

An effect is the arm's mean minus the baseline's, estimated by a regression of each problem's
outcome on the arm. All runs answer the same problems, so errors are clustered by problem. Interval
and p (with Holm's correction over all arms and metrics) say how THESE checkpoints would do on OTHER
PROBLEMS. They say nothing about other training seeds: for that look at the range over the runs.
"""

import json
from math import comb, nan
from pathlib import Path

import numpy as np
import pandas as pd

from common import UserError, check_writable, in_one_line
from journal import read_metrics

METRICS = ("pass", "mean", "coverage", "distinct")  # eval/<metric>@k, in the order of the table
# keys that `python -m compare` sets itself; an arm that sets one is refused. (save_steps too, but
# only where it is off.)
SET_HERE = ("seed", "output_dir", "overwrite_output_dir", "resume_from_checkpoint")
PICTURES = (".png", ".pdf", ".svg")
# what is read of a line of eval.jsonl, which evaluate.evaluate_problems makes
RECORD = {
    "id": str,
    "seed": int,
    "samples": int,
    "correct": int,
    "distinct": int | None,
    "num_modes": int | float | None,  # a float where pandas wrote the dataset
}
LAST = 3  # neighbouring evaluations that are averaged: one is noisy
REWARDS = 20  # neighbouring training steps whose rewards are averaged in the picture
ROUNDING = 1e-12  # an effect with an error below this is that of equal outcomes
# columns of effects(), so that a table without lines has them too
COLUMNS = ["arm", "metric", "effect", "low", "high", "p", "run_min", "run_max"]

# --- reading the runs' files


def only_source(words: list[str], takes: str) -> Path:
    """The path that must be the only word left by own_flags(). UserError if nothing is at that
    path, or if there is not exactly one; its message then begins with `takes`, which says what the
    command takes."""
    if len(words) != 1 or words[0].startswith("-"):
        raise UserError(f"{takes}, not {' '.join(words) or 'nothing'}")
    source = Path(words[0])
    if not source.exists():
        raise UserError(f"{source} is not there")
    return source


def read_objects(path: Path) -> list[dict]:
    """The objects in a file of JSON lines. OSError or ValueError if it is damaged."""
    objects = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            objects.append(json.loads(line))
        except RecursionError:
            raise ValueError(f"line {number} is nested too deep") from None
        except ValueError:
            raise ValueError(f"line {number} is not JSON: {line[:80]!r}") from None
        if not isinstance(objects[-1], dict):
            raise ValueError(f"line {number} is no object")
    return objects


def write_lines(path: str, records: list[dict]) -> None:
    text = "".join(json.dumps(record) + "\n" for record in records)
    Path(path).write_text(text, encoding="utf-8")


def damaged(path: Path, why) -> UserError:
    return UserError(f"{path} is damaged ({why}): delete it, and the same command makes it again")


def read_evaluation(path: Path) -> list[dict]:
    """The records in a run's eval.jsonl; UserError if it is damaged."""
    try:
        records = read_objects(path)
    except (OSError, ValueError) as error:
        raise damaged(path, error) from None
    for i, record in enumerate(records, 1):
        for name, kind in RECORD.items():
            if name not in record or not isinstance(record[name], kind):
                raise damaged(path, f"line {i} has no {name}, or another kind of value there")
    return records


def metrics_of(run: Path) -> list[dict]:
    """The rows of a run's metrics.jsonl, [] for a run that has only begun. Half a line at the end,
    as a full disk leaves it, is ignored; other damage is a UserError."""
    path = run / "metrics.jsonl"
    lines, broken = read_metrics(path)
    if broken or not path.exists():
        raise damaged_metrics(path, f"line {broken}" if broken else "it is gone")
    return lines


def damaged_metrics(path: Path, why: str) -> UserError:
    return UserError(
        f"{path} is damaged ({why}): delete {path.parent}, and the python -m compare that made it "
        f"makes it again"
    )


def runs_in(folder: Path, having: str = "metrics.jsonl") -> list[tuple[str, int, Path]]:
    """(arm, seed, folder) of every run of `python -m compare` in `folder` that has a file `having`:
    metrics.jsonl if it has begun to train, eval.jsonl if it is finished.
    Folders that are not called seed_<number>, such as a user's copies, are ignored."""
    runs = []
    for file in sorted(folder.glob(f"*/seed_*/{having}")):
        run = file.parent
        seed = run.name.removeprefix("seed_")
        if seed.isdecimal():
            runs.append((run.parent.name, int(seed), run))
    return runs


def k_of(runs: list[dict]) -> int:
    """Samples per problem, the k of pass@k."""
    return runs[0]["config"]["eval_num_generations"]  # plan_runs() makes it the same in all


def load_outcomes(runs: list[dict]) -> pd.DataFrame:
    """One line per arm, seed and problem: mean, pass, coverage and distinct, over all evaluation
    seeds. The last two are NaN if they are unknown."""
    k = k_of(runs)
    records = {run["folder"] / "eval.jsonl": [] for run in runs}
    for file in records:
        records[file] = read_evaluation(file)
    # effects compare means over problems, so the problems must be the same
    check_same_problems(records)
    lines = []
    for run in runs:
        file = run["folder"] / "eval.jsonl"
        for r in records[file]:
            if r["samples"] != k:
                raise damaged(file, f"{r['samples']} samples of a problem, not {k}")
            if not 0 <= r["correct"] <= k:
                raise damaged(file, f"{r['correct']} of {k} answers are right")
            lines.append({"arm": run["arm"], "seed": run["seed"], **outcome_of(r, k)})
    by_problem = pd.DataFrame(lines).groupby(["arm", "seed", "problem"], sort=False)
    outcomes = by_problem.mean()  # more evaluation seeds of a problem are no independent evidence
    # from all samples together: pass@8 from 24 varies less than the mean of three from 8
    samples = by_problem.size() * k
    correct = by_problem["correct"].sum()
    outcomes["pass"] = [pass_at_k(n, c, k) for n, c in zip(samples, correct)]
    return outcomes.drop(columns="correct").reset_index()


def pass_at_k(n: int, correct: int, k: int) -> float:
    """1 - C(n-c, k) / C(n, k): the unbiased estimate from n samples with c correct. Chen et al.
    2021, arXiv:2107.03374"""
    return 1 - comb(n - correct, k) / comb(n, k)


def outcome_of(record: dict, k: int) -> dict:
    """A problem's metrics under one evaluation seed."""
    # num_modes may be None or 0 if it is unknown
    known_modes = bool(record["num_modes"]) and record["distinct"] is not None
    return {
        "problem": record["id"],
        "correct": record["correct"],
        "mean": record["correct"] / k,
        "distinct": nan if record["distinct"] is None else record["distinct"],
        "coverage": record["distinct"] / record["num_modes"] if known_modes else nan,
    }


def check_same_problems(records: dict) -> None:
    """UserError if the files of two runs don't have the same problems and evaluation seeds."""
    asked = {}
    for file, lines in records.items():
        asked[file] = sorted((r["id"], r["seed"]) for r in lines)
    # the likely fault is a file that was cut short, so the longest is taken for whole
    most = max(asked.values(), key=len)
    for file, problems in asked.items():
        if not problems or problems != most:
            raise UserError(
                f"{file} lacks problems that other runs have, or has others: delete it, and the "
                f"same command makes it again"
            )


def load_curves(runs: list[dict]) -> pd.DataFrame:
    """One line per arm, seed and evaluation during training: step, mean, pass, coverage, distinct.
    The runs are finished, so each has some."""
    k = k_of(runs)
    lines = []
    for run in runs:
        # only some steps are evaluated
        evaluated = [line for line in metrics_of(run["folder"]) if "eval/pass@1" in line]
        if not evaluated:
            raise damaged_metrics(run["folder"] / "metrics.jsonl", "it has no evaluation")
        for line in evaluated:
            scores = {m: line.get(f"eval/{m}@{k}", nan) for m in METRICS}
            key = {"arm": run["arm"], "seed": run["seed"], "step": line["step"]}
            lines.append(key | scores)
    # if a step was repeated, the later line counts
    return pd.DataFrame(lines).drop_duplicates(["arm", "seed", "step"], keep="last")


def load_rewards(runs: list[dict]) -> pd.DataFrame:
    """The mean reward of each training step, averaged with the REWARDS - 1 before it: a line per
    step, a column per (arm, seed)."""
    rewards = {}
    for run in runs:
        # if a step was repeated, the later line counts; an evaluation's own line has no reward
        steps = {m["step"]: m["reward"] for m in metrics_of(run["folder"]) if "reward" in m}
        series = pd.Series(steps, dtype=float).sort_index()
        rewards[run["arm"], run["seed"]] = series.rolling(REWARDS, min_periods=1).mean()
    return pd.DataFrame(rewards)


def settled_at(run: dict) -> int | None:
    """The step at which mean@k, averaged over LAST neighbouring evaluations, had set no record for
    run["patience"] steps, so that the run may end. None: not yet, or patience is 0."""
    if not run["patience"]:
        return None
    # lines that can't be read are left out, as train.py leaves them out when it goes on
    lines, _ = read_metrics(run["folder"] / "metrics.jsonl")
    key = f"eval/mean@{k_of([run])}"
    means = pd.Series({line["step"]: line[key] for line in lines if key in line}, dtype=float)
    record, since = -1.0, 0
    for step, mean in means.rolling(LAST).mean().dropna().items():
        if mean > record:
            record, since = mean, step
        elif step - since >= run["patience"]:
            return step
    return None


def complete_metrics(table: pd.DataFrame, metrics=METRICS) -> list[str]:
    """Those of `metrics` that a table has for all of its lines. With gaps, a mean would be over
    other problems than the means of the other metrics."""
    return [m for m in metrics if table[m].notna().all()]


# --- effects


def effects(outcomes: pd.DataFrame, baseline: str) -> pd.DataFrame:
    """Effects, arm minus baseline, one row per arm and metric: the estimate, its 95% interval and p
    from OLS with errors clustered by problem; p after Holm's correction over the whole table
    (p_holm); the smallest and the largest difference between a run of the arm and a run of the
    baseline (run_min, run_max)."""
    from statsmodels.stats.multitest import multipletests

    rows = []
    if outcomes["problem"].nunique() > 1:  # clustering needs two problems at least
        for metric in complete_metrics(outcomes):
            rows += effects_on(metric, outcomes, baseline)
    table = pd.DataFrame(rows, columns=COLUMNS)
    if not len(table):
        return table.assign(p_holm=[])
    # p is NaN if an outcome never varies; that is no evidence, so 1
    return table.assign(p_holm=multipletests(table["p"].fillna(1), method="holm")[1])


def effects_on(metric: str, outcomes: pd.DataFrame, baseline: str) -> list[dict]:
    """The rows of effects() for one metric: one for every arm but the baseline."""
    import statsmodels.api as sm

    arms = [arm for arm in outcomes["arm"].unique() if arm != baseline]
    # no column for the baseline: its mean is the constant
    is_arm = [outcomes["arm"] == arm for arm in arms]
    X = np.column_stack([np.ones(len(outcomes)), *is_arm])  # (lines, 1 + arms)
    clusters = {"groups": pd.factorize(outcomes["problem"])[0]}  # problem ids as numbers
    runs = outcomes.groupby(["arm", "seed"])[metric].mean()
    rows = []
    with np.errstate(all="ignore"):  # an outcome that never varies has p = 0 / 0
        model = sm.OLS(outcomes[metric].to_numpy(), X)
        # use_t: with few problems, intervals by the normal distribution would be too narrow
        fit = model.fit(cov_type="cluster", cov_kwds=clusters, use_t=True)
        for i, arm in enumerate(arms, 1):
            figures = (fit.params[i], *fit.conf_int()[i], fit.pvalues[i])
            if max(abs(fit.params[i]), fit.bse[i]) < ROUNDING:  # equal everywhere
                figures = (0.0, 0.0, 0.0, nan)
            effect, low, high, p = figures
            row = {
                "arm": arm,
                "metric": metric,
                "effect": effect,
                "low": low,
                "high": high,
                "p": p,
                # the worst run of the arm against the best of the baseline, and the reverse
                "run_min": runs[arm].min() - runs[baseline].max(),
                "run_max": runs[arm].max() - runs[baseline].min(),
            }
            rows.append(row)
    return rows


def at_equal_mean(curves: pd.DataFrame, arm: str, baseline: str, metric: str) -> float:
    """How far the arm's end lies above the baseline's path in the plane of mean@k and `metric`: its
    `metric` minus the baseline's at the last moment of its training with the same mean@k. Both are
    averaged over LAST neighbouring evaluations of each run. NaN if there was no such moment; 0 for
    the baseline itself."""
    path = path_of(curves, baseline, metric, LAST)
    end = path_of(curves, arm, metric, LAST).iloc[-1]
    # backwards: a path may pass the arm's mean several times, and the last counts
    for i in reversed(range(1, len(path))):
        before, after = path.iloc[i - 1], path.iloc[i]
        low, high = sorted((before["mean"], after["mean"]))
        if low <= end["mean"] <= high:
            rise = after["mean"] - before["mean"]
            share = (end["mean"] - before["mean"]) / rise if rise else 1.0
            return end[metric] - (before[metric] + share * (after[metric] - before[metric]))
    return nan


def smoothed(path: pd.DataFrame, last: int = LAST) -> pd.DataFrame:
    """Each evaluation averaged with the `last` - 1 before it, as far as there are any."""
    return path.rolling(last, min_periods=1).mean()


def prolonged(runs: pd.DataFrame) -> pd.DataFrame:
    """The steps (lines) of an arm's runs (columns). A run that has ended before others stays where
    it ended: an average of those that are left would jump."""
    return runs.dropna(how="all").ffill()


def path_of(curves: pd.DataFrame, arm: str, metric: str, last: int = 1) -> pd.DataFrame:
    """mean@k and `metric` by step, averaged over the arm's runs, of each run over `last`
    neighbouring evaluations."""
    of_arm = curves[curves["arm"] == arm].set_index(["step", "seed"])[["mean", metric]]
    by_run = of_arm.unstack("seed").sort_index()  # a line per step, a column per metric and run
    paths = prolonged(smoothed(by_run, last).where(by_run.notna()))
    return pd.DataFrame({name: paths[name].mean(axis=1) for name in ("mean", metric)})


# --- results.md


def markdown(*rows) -> str:
    """A table. Names in it may come from a stranger's file, and neither break it nor reach the
    terminal as they are."""
    head, *rest = rows
    lines = []
    for row in (head, ["---"] * len(head), *rest):
        cells = [in_one_line(cell).replace("|", "\\|") for cell in row]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def table_of_arms(outcomes, curves, baseline: str, k: int) -> str:
    shown = complete_metrics(outcomes)
    equal = [m for m in ("pass", "coverage") if m in shown]
    # before training, averaged over all runs
    start = curves[curves["step"] == 0][list(METRICS)].mean()
    head = ["arm", "runs", *(f"{m}@{k}" for m in shown)]
    head += [f"{m}@{k} at equal mean@{k}" for m in equal]
    rows = [["(start, one evaluation)", "", *(number_text(start[m], ".3f") for m in shown)]]
    rows[0] += [""] * len(equal)
    runs = outcomes.groupby(["arm", "seed"], sort=False)[shown].mean()
    for arm, of_arm in runs.groupby("arm", sort=False):
        row = [arm, str(len(of_arm))]
        for m in shown:
            spread = f" ± {of_arm[m].std():.3f}" if len(of_arm) > 1 else ""  # over n - 1
            row.append(f"{of_arm[m].mean():.3f}{spread}")
        for m in equal:
            gain = nan if arm == baseline else at_equal_mean(curves, arm, baseline, m)
            row.append(number_text(gain, "+.3f"))
        rows.append(row)
    return markdown(head, *rows)


def number_text(value: float, form: str) -> str:
    """A number as text; "" for NaN, which was not measured, such as coverage@k without
    num_modes."""
    return "" if np.isnan(value) else format(value, form)


def table_of_effects(outcomes, baseline: str, k: int) -> str:
    rows = []
    for e in effects(outcomes, baseline).itertuples():
        row = [
            e.arm,
            f"{e.metric}@{k}",
            f"{e.effect:+.3f}",
            f"{e.low:+.3f} to {e.high:+.3f}",
            f"{e.p_holm:.2g}",
            f"{e.run_min:+.3f} to {e.run_max:+.3f}",
        ]
        rows.append(row)
    effect = f"effect against {baseline}"
    return markdown(["arm", "metric", effect, "95% interval", "p (Holm)", "range over runs"], *rows)


TEXT = """{problems} held-out problems, k = {k}, {seeds} evaluation seeds (pass@{k} from all
their samples together); mean over training runs ± their standard deviation.
Not finished, so not in here: {missing}.

{arms}

At equal mean@{k}: the end of each arm against {baseline} at the last moment of its training when
its mean@{k} was the same, both averaged over {last} evaluations; empty where it never was.

{effects}

Effects by OLS with errors clustered by problem. Interval and p (Holm over this table) say what
other problems would have given these very checkpoints; **they do not cover the luck of training
seeds**. For that there is only the last column, the smallest and the largest difference between a
run of the arm and a run of {baseline}. Where it includes 0, and always with one run an arm, the
effect could be luck of training, however small p is; with three runs each, luck alone keeps 0 out
of the range once in ten times.
"""


def evaluation_seeds(run: Path) -> int:
    """The number of seeds under which a finished run was evaluated. An earlier command may have
    asked for another number than this one."""
    return len({record["seed"] for record in read_evaluation(run / "eval.jsonl")})


def write_results(runs: list[dict], baseline: str, output: Path, missing: list[dict]) -> str:
    """Writes results.md, with a table of the arms and one of the effects, and returns its text."""
    outcomes, curves = load_outcomes(runs), load_curves(runs)
    k = k_of(runs)
    absent = [f"{run['arm']}/seed_{run['seed']}" for run in missing]
    text = TEXT.format(
        problems=outcomes["problem"].nunique(),
        k=k,
        seeds=evaluation_seeds(runs[0]["folder"]),
        last=LAST,
        missing=", ".join(absent) or "none",
        arms=table_of_arms(outcomes, curves, baseline, k),
        baseline=baseline,
        effects=table_of_effects(outcomes, baseline, k),
    )
    (output / "results.md").write_text(text, encoding="utf-8")
    return text


# --- comparison.png


def doses(runs: list[dict]) -> list[tuple[str, list[tuple]]]:
    """[(key, [(dose, arm), ...]), ...]: the dose-responses among the arms, each of three or more
    arms that differ in one numeric key only, ordered by its value, the dose."""
    configs = {}
    for run in runs:
        configs[run["arm"]] = {k: v for k, v in run["config"].items() if k not in SET_HERE}
    lines = {}
    for arm, config in configs.items():
        for key, value in config.items():
            # type(), not isinstance(): True is an int, and no dose
            if type(value) in (int, float):
                # arms that differ in this key only have the same text
                rest = json.dumps(config | {key: None})
                lines.setdefault((key, rest), []).append((value, arm))
    responses = []
    for (key, _), line in lines.items():
        # two points are no dose-response
        if len({dose for dose, _ in line}) > 2:
            responses.append((key, sorted(line)))
    return responses


def band(axis, x, runs: pd.DataFrame, **style) -> None:
    """Draws the mean over runs (the columns of `runs`) as a line, and their range as an area."""
    (line,) = axis.plot(x, runs.mean(axis=1), **style)
    axis.fill_between(x, runs.min(axis=1), runs.max(axis=1), color=line.get_color(), alpha=0.12)


def width_of(arm: str, color: dict) -> float:
    """The first arm's lines are broad: those of others that lie upon them don't hide them."""
    return 4.0 if arm == next(iter(color)) else 1.5


def draw_curve(axis, curves: pd.DataFrame, metric: str, k: int, color: dict) -> None:
    for arm in color:
        of_arm = curves[curves["arm"] == arm]
        over = prolonged(of_arm.pivot_table(index="step", columns="seed", values=metric))
        width = width_of(arm, color)
        band(axis, over.index, over, color=color[arm], linewidth=width, label=arm)
    axis.set(title=f"{metric}@{k}, range over runs", xlabel="step")


def draw_rewards(axis, rewards: pd.DataFrame, color: dict) -> None:
    for arm in color:
        of_arm = prolonged(rewards[arm])
        band(axis, of_arm.index, of_arm, color=color[arm])
    axis.set(title=f"training reward, {REWARDS} steps averaged", xlabel="step")


def draw_way(axis, path: pd.DataFrame, color, width: float) -> None:
    """Draws the second column of `path` against its first, "mean", from a cross at the start to a
    dot where training ended."""
    mean, metric = path.columns
    axis.plot(path[mean], path[metric], color=color, linewidth=width, alpha=0.7)
    axis.plot(*path.iloc[0], "kx", markersize=9)
    axis.plot(*path.iloc[-1], "o", color=color, markersize=5 + width)


def draw_path(axis, curves: pd.DataFrame, metric: str, k: int, color: dict) -> None:
    for arm in color:
        draw_way(axis, path_of(curves, arm, metric), color[arm], width_of(arm, color))
    axis.set(title=f"path through training: {metric}@{k} against mean@{k}", xlabel=f"mean@{k}")


def draw_doses(axis, outcomes: pd.DataFrame, metrics: list[str], k: int, dosed: tuple) -> None:
    key, line = dosed
    arms = [arm for _, arm in line]
    final = outcomes.groupby(["arm", "seed"])[list(METRICS)].mean().unstack()
    for metric in metrics:
        # distinct is a count; on this axis it would flatten the others, which are shares
        if metric != "distinct":
            label = f"{metric}@{k}"
            band(axis, range(len(line)), final[metric].loc[arms], marker="o", label=label)
    axis.set(title=f"at the end, {arms[0]} to {arms[-1]}", xlabel=key)
    # evenly spaced, so that 0 and inf fit on the axis
    axis.set_xticks(range(len(line)), [f"{dose:g}" for dose, _ in line])
    axis.legend(fontsize=7)


def prepare_picture(path: str) -> None:
    """Makes the folder of a picture that --picture names. UserError if it can't be drawn there."""
    if Path(path).suffix not in PICTURES:
        raise UserError(f"--picture={path} must end in one of {', '.join(PICTURES)}")
    prepare_file("--picture", path)


def prepare_file(flag: str, path: str) -> None:
    """Makes the folder of a file that a flag names. UserError if it can't be written there."""
    check_writable(flag, path, folder=False)
    Path(path).parent.mkdir(parents=True, exist_ok=True)


def colors_of(arms) -> dict:
    """A colour for each arm, the same in all panels; neighbours of up to ten differ in hue."""
    from matplotlib import colormaps

    names = list(dict.fromkeys(arms))
    colors = colormaps["tab10" if len(names) <= 10 else "tab20"]
    return {arm: colors(i % colors.N) for i, arm in enumerate(names)}


def draw(runs: list[dict], output: Path) -> Path:
    """Draws comparison.png: learning curves with the range over runs, the training reward, pass and
    coverage against mean, and the dose-responses. Returns its path."""
    from matplotlib.figure import Figure  # not pyplot, which would look for a window

    outcomes, curves = load_outcomes(runs), load_curves(runs)
    k = k_of(runs)
    shown = complete_metrics(curves)
    planes = [m for m in ("pass", "coverage") if m in shown]
    dosed = doses(runs)
    count = len(shown) + 1 + len(planes) + len(dosed)
    columns = 3 if count <= 6 else 4
    rows = -(-count // columns)  # rounded up
    figure = Figure(figsize=(5 * columns, 4 * rows), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False)
    color = colors_of(curves["arm"])

    free = iter(axes.flat)
    for metric in shown:
        draw_curve(next(free), curves, metric, k, color)
    draw_rewards(next(free), load_rewards(runs), color)
    for metric in planes:
        draw_path(next(free), curves, metric, k, color)
    for line in dosed:
        draw_doses(next(free), outcomes, shown, k, line)
    for i, axis in enumerate(axes.flat):
        axis.grid(alpha=0.3)
        axis.set_visible(i < count)
    figure.legend(*axes.flat[0].get_legend_handles_labels(), loc="outside lower center", ncols=8)
    figure.savefig(output / "comparison.png", dpi=110)
    return output / "comparison.png"
