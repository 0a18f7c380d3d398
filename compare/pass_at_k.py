"""pass@k of several models against k: what each can still do if it may try more often.

    python -m compare.pass_at_k runs/compare_countdown_tiny --picture=pass_at_k.png
    python -m compare.pass_at_k runs/k64 --output=runs/k64.jsonl
    python -m compare.pass_at_k runs/k64.jsonl

A folder has files <arm>/seed_<n>/eval.jsonl, which evaluate.py writes with --output, for example at
the end of `python -m compare`: 8 samples under 3 evaluation seeds are 24 of each problem. For more:

    python evaluate.py config/countdown_tiny.py --model=runs/demo/maxent/seed_1/step_000200 \\
        --eval_num_generations=64 --output=runs/k64/maxent/seed_1/eval.jsonl

A file has only what is needed of these: a line {"arm", "seed", "samples", "problems"} for each run,
where problems[c] is the number of problems with c right answers among the samples. The command's
own flags: --output (such a file to write), --picture (a file to draw).
"""

from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import pandas as pd

from common import UserError, own_flags, script
from compare.results import (
    colors_of,
    markdown,
    only_source,
    pass_at_k,
    prepare_file,
    prepare_picture,
    read_objects,
    runs_in,
    write_lines,
)

OWN = {"output": "", "picture": ""}
MOST_SAMPLES = 10_000  # per problem; with some millions a single binomial coefficient takes minutes


class Counts(NamedTuple):
    """The answers of one model."""

    arm: str
    seed: int
    samples: int  # per problem
    problems: dict[int, int]  # number of right answers -> number of problems


def run_pass_at_k(run: Counts, k: int) -> float:
    """pass@k, averaged over a run's problems."""
    solved = [n * pass_at_k(run.samples, correct, k) for correct, n in run.problems.items()]
    return sum(solved) / sum(run.problems.values())


# --- reading


def read_runs(source: Path) -> list[Counts]:
    runs = []
    asked = {}  # the ids of each file's problems
    if source.is_file():
        with usable(source, "this command's --output"):
            runs = [read_line(line) for line in read_objects(source)]
    else:
        for arm, seed, folder in runs_in(source, having="eval.jsonl"):
            file = folder / "eval.jsonl"
            with usable(file, "evaluate.py --output"):
                records = read_objects(file)
                runs.append(count(arm, seed, records))
                asked[file] = {record["id"] for record in records}
    if not runs:
        raise UserError(f"{source} has no <arm>/seed_<n>/eval.jsonl, and is no file of counts")
    check_comparable(runs, source)
    check_equal_ids(asked)
    return runs


@contextmanager
def usable(file: Path, writer: str):
    """UserError in place of what a file of somebody else may raise inside this context."""
    try:
        yield
    except (OSError, KeyError, TypeError, ValueError, OverflowError, AttributeError) as error:
        raise UserError(
            f"{file} can't be used, it must be what {writer} writes: "
            f"{type(error).__name__}: {error}"
        ) from None


def check_comparable(runs: list[Counts], source: Path) -> None:
    samples = {run.samples for run in runs}
    if len(samples) > 1:
        raise UserError(
            f"{source}: runs have {min(samples)} to {max(samples)} samples of each problem; "
            f"evaluate them with the same --eval_num_generations and --seeds"
        )
    problems = {sum(run.problems.values()) for run in runs}
    if len(problems) > 1:
        raise UserError(
            f"{source}: runs have {min(problems)} to {max(problems)} problems; evaluate them on "
            f"the same ones"
        )
    names = [(run.arm, run.seed) for run in runs]
    twice = [name for name in names if names.count(name) > 1]
    if twice:
        raise UserError(f"{source} has arm {twice[0][0]}, seed {twice[0][1]} twice")


def check_equal_ids(asked: dict[Path, set]) -> None:
    first = next(iter(asked), None)
    for file, ids in asked.items():
        if ids != asked[first]:
            raise UserError(f"{file} has other problems than {first}: evaluate them on the same")


def read_line(line: dict) -> Counts:
    problems = {int(correct): int(n) for correct, n in line["problems"].items()}
    run = Counts(str(line["arm"]), int(line["seed"]), int(line["samples"]), problems)
    # hostile or damaged: comb() refuses negative numbers, and a mean over none has no value
    if not 1 <= run.samples <= MOST_SAMPLES:
        raise ValueError(f"{run.samples} samples, 1 to {MOST_SAMPLES} can be counted")
    if not 0 <= min(problems) <= max(problems) <= run.samples:
        raise ValueError(f"{run.samples} samples, right answers {sorted(problems)}")
    if min(problems.values()) < 1:
        raise ValueError(f"numbers of problems {sorted(problems.values())}")
    return run


def count(arm: str, seed: int, records: list[dict]) -> Counts:
    """Records of evaluate.py, one for each problem and evaluation seed, as one line of counts."""
    if not all("samples" in record for record in records):
        raise ValueError("records without `samples`, as older versions wrote them: evaluate again")
    if not all(isinstance(record.get("id"), str) for record in records):
        raise ValueError("an id that is no text")
    table = pd.DataFrame(records, columns=["id", "samples", "correct"]).groupby("id").sum()
    samples = set(table["samples"])
    if len(samples) != 1:
        raise ValueError(f"numbers of samples per problem are {sorted(samples)}: is it cut short?")
    problems = table["correct"].value_counts().sort_index().to_dict()
    line = {"arm": arm, "seed": seed, "samples": samples.pop(), "problems": problems}
    return read_line(line)


# --- showing


def table_of(runs: list[Counts]) -> pd.DataFrame:
    """pass@k: a line for each arm and seed, a column for each k = 1, 2, 4, ..., samples."""
    samples = runs[0].samples
    ks = [2**i for i in range(samples.bit_length())]
    ks += [samples] if samples not in ks else []
    lines = {(run.arm, run.seed): {k: run_pass_at_k(run, k) for k in ks} for run in runs}
    return pd.DataFrame.from_dict(lines, orient="index").rename_axis(["arm", "seed"])


def show(table: pd.DataFrame) -> str:
    """A Markdown table: each arm's mean over its runs, and the range of the last column."""
    means = table.groupby(level="arm").mean()
    rows = []
    for arm in means.sort_values(means.columns[-1], ascending=False).index:
        last = table.loc[arm].iloc[:, -1]
        cells = [f"{value:.3f}" for value in means.loc[arm]]
        if len(last) > 1:
            cells[-1] += f" ({last.min():.3f} to {last.max():.3f})"
        rows.append([arm, str(len(last)), *cells])
    return markdown(["arm", "runs", *(f"pass@{k}" for k in table.columns)], *rows)


def draw(table: pd.DataFrame, picture: Path) -> None:
    """Draws each arm's mean against k, and the range over its runs."""
    from matplotlib.figure import Figure  # not pyplot, which would look for a window

    figure = Figure(figsize=(8, 5), layout="constrained")
    axis = figure.subplots()
    by_arm = table.groupby(level="arm", sort=False)
    means, low, high = by_arm.mean(), by_arm.min(), by_arm.max()
    colors = colors_of(means.index)
    for arm in means.index:
        axis.plot(means.columns, means.loc[arm], "o-", markersize=3, color=colors[arm], label=arm)
        axis.fill_between(means.columns, low.loc[arm], high.loc[arm], color=colors[arm], alpha=0.15)
    axis.set_xscale("log", base=2)
    axis.set_xticks(means.columns, map(str, means.columns))
    axis.set(xlabel="k, tries", ylabel="pass@k", title="problems solved within k tries")
    axis.grid(alpha=0.3)
    axis.legend(fontsize=8)
    figure.savefig(picture, dpi=110)


def main(argv) -> None:
    own, words = own_flags(argv, OWN)
    takes = f"python -m compare.pass_at_k takes one file or folder and {', '.join(OWN)}"
    runs = read_runs(only_source(words, takes))
    if own["picture"]:
        prepare_picture(own["picture"])
    if own["output"]:
        prepare_file("--output", own["output"])
    table = table_of(runs)
    print(show(table))
    if own["output"]:
        write_lines(own["output"], [run._asdict() for run in runs])
    if own["picture"]:
        draw(table, Path(own["picture"]))
        print(f"picture: {own['picture']}")


if __name__ == "__main__":
    script(main)
