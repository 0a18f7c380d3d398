"""The tables at convergence and of 64 samples: LOG.md has every arm of the evidence, and
docs/results.md those that matter most; every figure is the evidence's."""

import re

import pytest

from common import ROOT
from compare import frontier, pass_at_k
from compare.claims import EVIDENCE, FILES, LEFT_OUT, difference
from tasks import countdown

PAGE = "docs/results.md"
COMPLETE = "LOG.md"
MOVED = "\n## 2026-11-30, tenth sitting: moved here from docs/results.md\n"
COLUMNS = ["mean", "pass", "distinct", "coverage"]  # in the documents' order
KS = [1, 4, 16, 64]
LEFT_OUT_RUNS = [(FILES[experiment], *run) for experiment, *run in LEFT_OUT]  # it says so too

# a row's name there: its arm in the file
COUNTDOWN = {
    "maxent, τ = .2, cosine": "maxent_cosine",
    "maxrl, cosine": "maxrl_cosine",
    'maxent "floored", τ = .4, cosine': "maxent_floored_40_cosine",
    "xdr, τ = .05, cosine (start .219 / .730)": "xdr_05_cosine",
    "maxrl, lr 1e-4": "maxrl_half",
    "xdr, τ = .05": "xdr_05",
    "maxent, τ = .2": "maxent_20",
    "maxent, τ = .2, lr 5e-5": "maxent_slow",
    "maxent as a policy gradient, τ = 0": "maxent_pg_tau0",
    "maxent, τ = .1": "maxent_10",
    "maxrl": "maxrl",
    "maxent, τ = .2, lr 1e-4": "maxent_half",
    'maxent "floored", τ = .4': "maxent_floored_40",
    "xdr, τ = .8": "xdr_80",
    "maxent, groups weighted by spread": "maxent_spread",
    "pkpo, k = 2": "pkpo_2",
    "dr_grpo, lr 5e-5": "dr_grpo_slow",
    "dr_grpo, cosine": "dr_grpo_cosine",
    "dr_grpo, unlikeliness .25": "unlikely_25",
    "dr_grpo, mode entropy .3 per token": "modes_30_length",
    "dapo": "dapo",
    "pkpo, k from 8 to 1": "pkpo_anneal",
    "grpo": "grpo",
    "dr_grpo": "dr_grpo",
    "dapo, clip-higher .28, two updates a batch": "dapo_high",
    "token entropy .03": "token_entropy_03",
    "token entropy .01": "token_entropy_01",
    "flow, τ = .2": "flow_20",
    "flow, τ = .1": "flow_10",
    "flow, τ = .05": "flow_05",
    "dr_grpo divided by row lengths": "dr_grpo_rowmean",
    "flow, summed scores, τ = .0068: one of three destroyed": "flow_sum_007",
    "flow, summed scores, τ = .02: two of three destroyed": "flow_sum_02",
    "maxent, τ = .4: two of three destroyed": "maxent_40",
    "token entropy .1: destroyed": "token_entropy_10",
}
# the document says so below the tables, or shows their last evaluations instead
COUNTDOWN_LEFT_OUT = {
    "maxent_pg_half",
    "maxent_soft_half",
    "maxent_scale2",
    "maxent_scale4",
    "maxent_scale8",
    "flow_50",
    "flow_100",
}
GRAPHS = {
    "maxent, τ = .2, cosine": "maxent_cosine",
    "maxrl, cosine": "maxrl_cosine",
    'maxent "floored", τ = .4, cosine': "maxent_floored_40_cosine",
    "dr_grpo, cosine": "dr_grpo_cosine",
    "maxent, τ = .2, lr 1e-4": "maxent_half",
    "maxrl, lr 1e-4": "maxrl_half",
    "maxent, τ = .2": "maxent_20",
    "maxent, τ = .2, lr 4e-4": "maxent_double",
    "xdr, τ = .05": "xdr_05",
    "maxrl": "maxrl",
    "maxent as a policy gradient, τ = 0": "maxent_pg_tau0",
    "dr_grpo, lr 5e-5": "dr_grpo_slow",
    "dr_grpo": "dr_grpo",
}
COUNTDOWN_K64 = {
    "start": "start",
    "maxrl, lr 1e-4, three seeds": "maxrl_half",
    "maxent, τ = .2, cosine (start .227, .549, .863, .973)": "maxent_cosine",
    "maxrl, cosine (start .225, pass@8 .727)": "maxrl_cosine",
    'maxent "floored", τ = .4, cosine': "maxent_floored_40_cosine",
    "maxent, τ = .2, lr 2e-4 (start .219, pass@8 .730)": "maxent_20",
    "xdr, τ = .05, cosine (the same start), two seeds": "xdr_05_cosine",
    "xdr, τ = .05, lr 2e-4 (the same start), two seeds": "xdr_05",
    "dr_grpo, lr 2e-4 (start .219, pass@8 .730)": "dr_grpo",
    "maxrl, lr 2e-4 (the same start), two seeds": "maxrl",
    "maxent as a policy gradient, τ = 0, lr 2e-4 (the same start), two seeds": "maxent_pg_tau0",
    "maxent, groups weighted by spread, lr 2e-4, two seeds": "maxent_spread",
    "maxent, τ = .2, lr 1e-4": "maxent_half",
    "the same run and two more seeds, diverging": "maxent_half_1500",
    "maxent, τ = .1, lr 2e-4": "maxent_10",
    "the same (starts .219 and .225), two seeds": "maxent_10_1500",
    "xdr, τ = .8, lr 2e-4": "xdr_80",
    "xdr, τ = .8, lr 2e-4 (start .219, pass@8 .730)": "xdr_80_1500",
    "dapo, lr 2e-4, two seeds": "dapo",
    "dr_grpo, lr 5e-5 (start .219, pass@8 .730)": "dr_grpo_slow",
    "dr_grpo, cosine (start .225, pass@8 .727)": "dr_grpo_cosine",
    "maxent, τ = .2, lr 5e-5 (start .230, .549, .856, .969, also below), two seeds": "maxent_slow",
    'maxent "floored", τ = .4, lr 2e-4, two seeds': "maxent_floored_40",
    "pkpo, k = 2, lr 2e-4": "pkpo_2",
    "pkpo, k from 8 to 1, lr 2e-4, two seeds": "pkpo_anneal",
    "dr_grpo, unlikeliness .25, lr 2e-4, two seeds": "unlikely_25",
    "flow, τ = .2, lr 2e-4": "flow_20",
    "flow, τ = .1, lr 2e-4, two seeds": "flow_10",
    "flow, τ = .05, lr 2e-4, two seeds": "flow_05",
    "dapo, clip-higher, two updates a batch, lr 2e-4": "dapo_high",
    "dr_grpo divided by row lengths, lr 2e-4": "dr_grpo_rowmean",
}
GRAPHS_K64 = {
    "start": "start",
    "maxent, cosine": "maxent_cosine",
    "maxrl, cosine": "maxrl_cosine",
    'maxent "floored", τ = .4, cosine': "maxent_floored_40_cosine",
    "dr_grpo, cosine": "dr_grpo_cosine",
    "maxent, lr 1e-4": "maxent_half",
    "maxent, lr 4e-4": "maxent_double",
    "maxent, lr 2e-4": "maxent_20",
    "maxrl, lr 1e-4": "maxrl_half",
    "xdr, τ = .05, lr 2e-4": "xdr_05",
    "maxrl, lr 2e-4": "maxrl",
    "maxent as a policy gradient, τ = 0, lr 2e-4": "maxent_pg_tau0",
    "dr_grpo, lr 5e-5": "dr_grpo_slow",
    "dr_grpo, lr 2e-4": "dr_grpo",
}


def rows_below(heading: str, first_cells: list[str], document: str) -> dict[str, list[str]]:
    """{name: further cells} of all tables between that heading and the next whose header begins
    with these cells."""
    text = (ROOT / document).read_text()
    if document == COMPLETE:
        text = text.partition(MOVED)[2]
    part = text.partition(f"\n### {heading}\n")[2]
    part = re.split(r"\n##+ ", part)[0]
    rows = {}
    ours = False
    for line in part.splitlines():
        cells = [cell.strip().strip("*") for cell in line.strip("|").split("|")]
        if not line.startswith("|"):
            ours = False
        elif not cells[0] and cells[1 : 1 + len(first_cells)] == first_cells:
            ours = True
        elif ours and not line.startswith("|---"):
            assert cells[0] not in rows, f"twice: {cells[0]}"
            rows[cells[0]] = cells[1:]
    return rows


def numbers(cell: str) -> list[float]:
    """Of ".360 (.355 to .368)"; the range only where there is one."""
    return [float(n) for n in re.findall(r"\d*\.\d+", cell)]


def assert_says(cell: str, values: list[float], where: str) -> None:
    """Mean of the values and, of several, their range, as far as the cell's digits go."""
    wanted = [sum(values) / len(values)]
    said = numbers(cell)
    if len(said) > 1:
        wanted += [min(values), max(values)]
    digits = len(cell.split()[0].partition(".")[2])
    for a, b in zip(said, wanted, strict=True):
        # the evidence is rounded to 5 digits: half of the last digit here may go either way
        assert abs(a - b) <= 0.5 * 10**-digits + 2e-5, f"{where}: {cell}, the evidence has {b:.5f}"


def runs_of(file: str) -> dict[str, list]:
    """{arm: the evaluations of each of its runs}, as compare.frontier reads them."""
    source = EVIDENCE / file
    evaluations = frontier.table_from(frontier.read_file(source), source, 8)
    runs = {}
    for (arm, seed), run in evaluations.groupby(["arm", "seed"]):
        if (file, arm, seed) not in LEFT_OUT_RUNS:
            runs.setdefault(arm, []).append(run)
    return runs


def samples_of(file: str) -> dict[str, list]:
    """{arm: its runs}, 64 samples of each problem."""
    runs = {}
    for run in pass_at_k.read_runs(EVIDENCE / file):
        runs.setdefault(run.arm, []).append(run)
    return runs


AT_CONVERGENCE = pytest.mark.parametrize(
    "heading, task, names, left_out",
    [
        ("Countdown", "countdown", COUNTDOWN, COUNTDOWN_LEFT_OUT),
        ("Graph colouring", "graph_coloring", GRAPHS, set()),
    ],
)


def assert_row_says(name: str, cells: list[str], runs: list) -> None:
    count, steps, *cells = cells
    assert int(count) == len(runs), name
    said = {int(n.replace(",", "")) for n in re.findall(r"[\d,]+", steps)}
    ended = [run["step"].max() for run in runs]
    assert said == {min(ended), max(ended)}, name
    ends = [frontier.end_of(run, COLUMNS) for run in runs]
    for cell, column in zip(cells, COLUMNS, strict=False):  # best point or pass@64 are behind them
        assert_says(cell, [end[column] for end in ends], f"{name}, {column}@8")


@AT_CONVERGENCE
def test_complete_tables_at_convergence(heading, task, names, left_out):
    runs_by_arm = runs_of(f"{task}_convergence.jsonl")
    rows = rows_below(heading, ["runs", "steps", "mean@8"], COMPLETE)
    assert set(runs_by_arm) == set(names.values()) | left_out
    others = {"start", "flow, τ = .5 and τ = 1: destroyed, last evaluations"}
    assert set(rows) - others == set(names)
    for name, arm in names.items():
        assert_row_says(name, rows[name], runs_by_arm[arm])


@AT_CONVERGENCE
def test_the_pages_tables_at_convergence(heading, task, names, left_out):
    runs_by_arm = runs_of(f"{task}_convergence.jsonl")
    sampled = samples_of(f"{task}_k64.jsonl")
    rows = rows_below(heading, ["runs", "steps", "mean@8"], PAGE)
    assert len(rows) == {"countdown": 23, "graph_coloring": 13}[task]
    for name, cells in rows.items():
        arm = name if name == "start" else names[name]
        if arm != "start":
            assert_row_says(name, cells, runs_by_arm[arm])
        runs = sampled.get(f"{arm}_1500", sampled.get(arm))  # a run's end, not its middle
        assert bool(cells[6]) == (runs is not None), name
        if runs:
            values = [pass_at_k.run_pass_at_k(run, 64) for run in runs]
            assert_says(cells[6], values, f"{name}, pass@64")


@pytest.mark.parametrize(
    "heading, file, names, columns",
    [
        ("Countdown", "countdown_k64.jsonl", COUNTDOWN_K64, ["steps", "pass@1"]),
        ("Graph colouring", "graph_coloring_k64.jsonl", GRAPHS_K64, ["pass@1"]),
    ],
)
def test_tables_of_64_samples(heading, file, names, columns):
    runs = samples_of(file)
    rows = rows_below(heading, columns, COMPLETE)
    assert set(rows) == set(names)
    assert set(runs) == set(names.values())
    for name, arm in names.items():
        cells = rows[name][len(columns) - 1 :]
        for cell, k in zip(cells, KS, strict=True):
            values = [pass_at_k.run_pass_at_k(run, k) for run in runs[arm]]
            assert_says(cell, values, f"{name}, pass@{k}")


def test_best_points_of_countdown():
    runs_by_arm = runs_of("countdown_convergence.jsonl")
    checked = 0
    for name, cells in rows_below("Countdown", ["runs", "steps", "mean@8"], COMPLETE).items():
        if len(cells) < 7 or not cells[6]:  # the second table has none, nor has the start
            continue
        runs = runs_by_arm[COUNTDOWN[name]]
        points = [frontier.best_point(run, problems=256) for run in runs]
        mean, right, step = re.match(r"(\S+) / (\S+), (\d,\d{3}|\d+)", cells[6]).groups()
        assert_says(mean, [point["mean"] for point in points], f"{name}, best mean@8")
        assert_says(right, [point["pass"] for point in points], f"{name}, best pass@8")
        where = sum(point["step"] for point in points) / len(points)
        assert int(step.replace(",", "")) == round(where), name
        checked += 1
    assert checked == 12


def test_table_of_other_objectives_on_graph_colouring():
    runs = runs_of("graph_coloring_others.jsonl")
    rows = rows_below("Graph colouring", ["arm", "runs", "mean@8"], COMPLETE)
    arms = {arm for arm, *_ in rows.values()}
    assert arms == set(runs) | {"(start)"}
    for name, (arm, count, *cells) in rows.items():
        if arm == "(start)":
            figures = [runs["dr_grpo"][0].iloc[0]]
        else:
            assert int(count) == len(runs[arm]), name
            figures = [frontier.end_of(run, COLUMNS) for run in runs[arm]]
        for cell, column in zip(cells, COLUMNS, strict=True):
            assert_says(cell, [of_run[column] for of_run in figures], f"{name}, {column}@8")


def test_the_luck_of_sampling():
    """What the page says of evaluations of 8 samples beside 64 of the same checkpoints."""
    text = (ROOT / PAGE).read_text().partition("### The luck of sampling\n")[2]
    text = " ".join(text.partition("\n## ")[0].split())
    gap = {}  # by task: the last evaluations' pass@8 minus that of 64 samples
    for task in ("countdown", "graph_coloring"):
        evaluated = runs_of(f"{task}_convergence.jsonl")
        by_64 = {}
        gaps = []
        for arm, sampled in samples_of(f"{task}_k64.jsonl").items():
            by_64[arm] = [pass_at_k.run_pass_at_k(run, 8) for run in sampled]
            runs = {
                run["seed"].iloc[0]: run for run in evaluated.get(arm.removesuffix("_1500"), [])
            }
            for run, value in zip(sampled, by_64[arm], strict=True):
                if run.seed in runs:  # the start's is 0
                    gaps.append(runs[run.seed]["pass"].iloc[-1] - value)
        gap[task] = sum(gaps) / len(gaps)
    assert abs(gap["countdown"]) < 0.005 and "right on average on Countdown" in text
    assert f"{gap['graph_coloring']:.2f} too high"[1:] in text
    mean = {arm: sum(values) / len(values) for arm, values in by_64.items()}  # graph colouring's
    assert f"at {mean['start']:.3f} by".replace("0.", ".") in text
    assert f"loses {mean['start'] - mean['maxrl']:.3f} of".replace("0.", ".") in text
    assert f"gains {mean['maxent_20'] - mean['start']:.3f} instead".replace("0.", ".") in text
    ends = [run["pass"].tail(3).mean() for run in evaluated["maxent_cosine"]]
    lower = sum(ends) / len(ends) - mean["maxent_cosine"]
    assert f"ends are {lower:.3f} lower".replace("0.", ".") in text
    pairs = [("maxent_cosine", "maxrl_cosine"), ("maxent_20", "maxrl")]
    for arm, other in pairs:
        one, two = (dict(enumerate(by_64[name])) for name in (arm, other))
        change, low, high = (f"{x:.3f}"[1:] for x in difference(one, two, paired=False))
        assert f"{change} ({low} to {high})" in text

    sampled = samples_of("graph_coloring_start_k64.jsonl")
    for k in (8, 64):
        (start,) = (pass_at_k.run_pass_at_k(run, k) for run in sampled["start"])
        ends = {run.seed: pass_at_k.run_pass_at_k(run, k) for run in sampled["maxent_cosine"]}
        starts = dict.fromkeys(ends, start)
        change, low, high = (abs(x) for x in difference(ends, starts, paired=True))
        low, high = sorted((low, high))
        end = sum(ends.values()) / len(ends)
        wanted = f"from {start:.3f} to {end:.3f}, by {change:.3f} ({low:.3f} to {high:.3f})"
        assert wanted.replace("0.", ".") in text


@pytest.mark.parametrize("file", ["README.md", "docs/results.md"])
def test_the_demos_example_is_a_right_answer(file):
    text = (ROOT / file).read_text()
    numbers, target, answer = re.search(r"`([\d,]+)=(\d+):` → `(.+?)`", text).groups()
    problem = {"numbers": list(map(int, numbers.split(","))), "target": int(target)}
    assert countdown.reward(answer, problem) == 1
