"""Compares arms over their whole training: what they reach, when, and at what cost.

    python -m compare.frontier compare/evidence/countdown_convergence.jsonl --picture=paths.png
    python -m compare.frontier runs/compare_countdown_tiny          a folder of python -m compare
    python -m compare.frontier runs/compare_countdown_tiny --output=runs/evidence.jsonl

A file has a line {"arm", "seed", "step", "mean@8", "pass@8", "coverage@8", "distinct@8", "seconds"}
for each evaluation, without distinct or coverage if right answers can't be told apart or counted.
"seconds" is the time that training had taken until then, without evaluations and checkpoints.

The command's own flags: --picture (a file to draw), --output (such a file to write), --arms (names
separated by commas; default all), --problems (of an evaluation), --k (samples of each problem). A
folder knows the last two; for a file they are 256 and 8 unless given.

Best point of a run: the evaluation with the highest mean@k among those whose pass@k is at least the
start's minus one standard error. This rule was fixed before the runs. The highest of many noisy
figures is biased upwards; the other columns, means over the last evaluations (LAST), are not.
"""

import json
from math import nan, sqrt
from pathlib import Path

import pandas as pd

from common import UserError, default_config, own_flags, read_settings, script
from compare.results import (
    LAST,
    colors_of,
    complete_metrics,
    draw_way,
    markdown,
    metrics_of,
    only_source,
    prepare_file,
    prepare_picture,
    read_evaluation,
    read_objects,
    runs_in,
    smoothed,
    write_lines,
)

OWN = {"picture": "", "output": "", "arms": "", "problems": -1, "k": -1}  # -1: see measured_by()
NEEDED = ("mean", "pass")
OPTIONAL = ("coverage", "distinct")  # shown if all evaluations have them
METRICS = NEEDED + OPTIONAL
# of training, averaged over the steps since the evaluation before, if a file is written
AVERAGED = {"reward": "reward", "entropy": "entropy", "length": "completions/mean_length"}
NOT_TRAINING = ("time/evaluate", "time/checkpoint")  # parts of time/step
DEFAULTS = default_config()


def table_from(records: list[dict], source: Path, k: int) -> pd.DataFrame:
    """One line per arm, seed and evaluation: step, seconds, and METRICS, whose names lose their
    @k. UserError, which names `source`, if a record can't be one."""
    lines = []
    for record in records:
        try:
            line = {"arm": str(record["arm"]), "seed": int(record["seed"])}
            line["step"] = int(record["step"])
            if any(line[key] != record[key] for key in ("seed", "step")):  # 1.5, or a text
                raise ValueError
            line["seconds"] = number(record.get("seconds"))
            line |= {metric: float(record[f"{metric}@{k}"]) for metric in NEEDED}
            if not all(0 <= line[metric] <= 1 for metric in NEEDED):
                raise ValueError
            for metric in OPTIONAL:
                line[metric] = number(record.get(f"{metric}@{k}"))
        except (KeyError, TypeError, ValueError, OverflowError):
            raise UserError(
                f"{source}: {json.dumps(record)[:200]} lacks arm, seed, step or one of "
                f"{', '.join(f'{metric}@{k}' for metric in NEEDED)}, or has no shares from 0 to 1 "
                f"there: another --k?"
            ) from None
        lines.append(line)
    # files that somebody put together may have a step twice
    table = pd.DataFrame(lines).drop_duplicates(["arm", "seed", "step"], keep="last")
    for (arm, seed), run in table.groupby(["arm", "seed"]):
        if run["step"].min() > 0:
            raise UserError(f"{source}: {arm}, seed {seed} has no evaluation of step 0, the start")
    return table.sort_values("step", kind="stable")


def number(value) -> float:
    """NaN for None: what was not measured."""
    return nan if value is None else float(value)


def read_records(source: Path, k: int) -> list[dict]:
    """The evaluations in a file or a folder, as they stand there."""
    records = read_file(source) if source.is_file() else read_folder(source, k)
    if not records:
        raise UserError(f"{source}: no evaluations in it")
    return records


def read_file(source: Path) -> list[dict]:
    try:
        return read_objects(source)
    except (OSError, ValueError) as error:  # ValueError: not JSON, or not UTF-8
        raise UserError(f"{source} can not be read: {error}") from None


def read_folder(source: Path, k: int) -> list[dict]:
    """The evaluations in <source>/<arm>/seed_<n>/metrics.jsonl, written by `python -m compare`."""
    records = []
    for arm, seed, run in runs_in(source):
        seconds = 0.0
        steps = []  # of training, since the last evaluation
        for line in metrics_of(run):
            if f"eval/mean@{k}" not in line:
                steps.append(line)
                continue
            seconds += sum(map(training_seconds, steps))
            record = {"arm": arm, "seed": seed, "step": line["step"], "seconds": round(seconds, 1)}
            names = [f"{metric}@{k}" for metric in METRICS]
            record |= {name: line[f"eval/{name}"] for name in names if f"eval/{name}" in line}
            records.append(record | averages(steps))
            steps = []
    return records


def training_seconds(line: dict) -> float:
    """Seconds of a training step, without an evaluation or a checkpoint that fell into it."""
    return line.get("time/step", nan) - sum(line.get(name, 0.0) for name in NOT_TRAINING)


def averages(steps: list[dict]) -> dict:
    """Means of AVERAGED over training steps; of none, as at the start, nothing."""
    means = {}
    for name, metric in AVERAGED.items():
        # null: it was not finite
        values = [line[metric] for line in steps if line.get(metric) is not None]
        if values:
            means[name] = round(sum(values) / len(values), 5)
    return means


def measured_by(source: Path) -> dict:
    """{"problems", "k"} of the evaluations: those of a folder's first finished run, or 256 and
    8."""
    problems, k = 256, 8
    for _, _, run in runs_in(source, having="config.json"):  # none in a file
        config = DEFAULTS | read_settings(run / "config.json")
        k = config["eval_num_generations"]
        problems = config["eval_max_prompts"]  # at most: the data may have fewer
        if (run / "eval.jsonl").exists():
            problems = len({record["id"] for record in read_evaluation(run / "eval.jsonl")})
            break
    return {"problems": problems, "k": k}


def best_point(run: pd.DataFrame, problems: int) -> pd.Series:
    """The best point by the rule above. run: one run's evaluations, in the order of their steps."""
    start = run.iloc[0]
    error = sqrt(start["pass"] * (1 - start["pass"]) / problems)
    kept = run[run["pass"] >= start["pass"] - error]  # never empty: the start is in it
    return kept.loc[kept["mean"].idxmax()]


def of_arms(evaluations: pd.DataFrame, arms: str) -> pd.DataFrame:
    """The evaluations of these arms, in their order. arms: "a,b"; "" all."""
    if not arms:
        return evaluations
    wanted = list(dict.fromkeys(arm.strip() for arm in arms.split(",")))  # each once
    there = list(dict.fromkeys(evaluations["arm"]))
    missing = [arm for arm in wanted if arm not in there]
    if missing:
        raise UserError(f"--arms: there is no {', '.join(missing)} among {', '.join(there)}")
    return pd.concat([evaluations[evaluations["arm"] == arm] for arm in wanted])


def spread(values: pd.Series) -> str:
    """ "0.322", or for several runs "0.322 (0.310 to 0.335)": mean, smallest, largest."""
    text = f"{values.mean():.3f}"
    if len(values) > 1:
        text += f" ({values.min():.3f} to {values.max():.3f})"
    return text


def last_evaluations(run: pd.DataFrame) -> pd.DataFrame:
    """The last LAST of one run's evaluations, which are in the order of their steps."""
    trained = run[run["step"] > 0] if len(run) > 1 else run  # the start is no result
    return trained.tail(LAST)


def end_of(run: pd.DataFrame, metrics: list[str]) -> pd.Series:
    """Their means."""
    return last_evaluations(run)[metrics].mean()


def row_of_arm(
    arm: str, evaluations: pd.DataFrame, bests: pd.DataFrame, shown: list[str]
) -> list[str]:
    """bests: a line for the best point of each run."""
    lasts = pd.DataFrame([end_of(run, shown) for _, run in evaluations.groupby("seed")])
    steps = evaluations.groupby("seed")["step"].max()
    row = [arm, str(len(bests)), f"{steps.mean():.0f}"]
    row += [spread(lasts[metric]) for metric in shown]
    if (bests["step"] == 0).all():
        return [*row, "the start", "", "", ""]
    row += [f"{bests['step'].mean():.0f}", spread(bests["mean"]), spread(bests["pass"])]
    minutes = bests["seconds"].mean() / 60
    return [*row, "" if minutes != minutes else f"{minutes:.0f}"]


def table_of(evaluations: pd.DataFrame, problems: int, k: int) -> str:
    """A Markdown table: a line for the start and one for each arm, ordered by mean@k at the best
    point, highest first."""
    shown = complete_metrics(evaluations, METRICS)
    head = ["arm", "runs", "steps", *(f"{metric}@{k}" for metric in shown)]
    head += ["best point: step", f"mean@{k}", f"pass@{k}", "minutes to it"]
    start = evaluations[evaluations["step"] == 0]
    rows = [["(start)", "", "0", *(f"{start[m].mean():.3f}" for m in shown), "", "", "", ""]]
    bests = {}  # {arm: a line for the best point of each run}
    for arm, of_arm in evaluations.groupby("arm"):
        bests[arm] = pd.DataFrame([best_point(run, problems) for _, run in of_arm.groupby("seed")])
    for arm in sorted(bests, key=lambda name: -bests[name]["mean"].mean()):
        of_arm = evaluations[evaluations["arm"] == arm]
        rows.append(row_of_arm(arm, of_arm, bests[arm], shown))
    return markdown(head, *rows)


def draw(evaluations: pd.DataFrame, picture: Path, k: int) -> None:
    """Draws pass@k, and coverage@k or else distinct@k where they are known, against mean@k. Each
    run is a path in the colour of its arm, averaged over LAST neighbouring evaluations, from a
    cross at its start to a dot at its end."""
    # not pyplot, which would look for a window
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    shown = complete_metrics(evaluations, METRICS)[1:3]
    figure = Figure(figsize=(6.5 * len(shown), 5), layout="constrained")
    axes = figure.subplots(1, len(shown), squeeze=False)
    colors = colors_of(evaluations["arm"])
    for axis, metric in zip(axes[0], shown, strict=True):
        for (arm, _), run in evaluations.groupby(["arm", "seed"]):
            path = smoothed(run.set_index("step")[["mean", metric]])
            draw_way(axis, path, colors[arm], width=1.2)
        axis.set(title=f"path through training: {metric}@{k} against mean@{k}", xlabel=f"mean@{k}")
        axis.set_ylabel(f"{metric}@{k}")
        axis.grid(alpha=0.3)
    # not beside the dots, because the ends of good arms lie upon each other
    dots = [Line2D([], [], color=color, marker="o") for color in colors.values()]
    figure.legend(dots, list(colors), loc="outside right upper", fontsize=8)
    figure.savefig(picture, dpi=110)


def main(argv) -> None:
    own, words = own_flags(argv, OWN)
    takes = f"python -m compare.frontier takes one file or folder and {', '.join(OWN)}"
    source = only_source(words, takes)
    measured = measured_by(source)
    for key in ("problems", "k"):
        if own[key] == OWN[key]:
            own[key] = measured[key]
        if own[key] < 1:
            raise UserError(f"--{key}={own[key]} must be at least 1")
    if own["picture"]:
        prepare_picture(own["picture"])
    if own["output"]:
        prepare_file("--output", own["output"])
    records = read_records(source, own["k"])
    evaluations = of_arms(table_from(records, source, own["k"]), own["arms"])
    print(table_of(evaluations, own["problems"], own["k"]))
    if own["output"]:
        shown = set(evaluations["arm"])
        write_lines(own["output"], [record for record in records if str(record["arm"]) in shown])
    if own["picture"]:
        draw(evaluations, Path(own["picture"]), own["k"])
        print(f"picture: {own['picture']}")


if __name__ == "__main__":
    script(main)
