"""results.md and comparison.png: what they hold, which arms are doses of each other, and that what
is damaged is named."""

import numpy as np
import pandas as pd
import pytest
from compare_runs import K, plan, read_lines, write_lines, write_run
from matplotlib.figure import Figure

from common import UserError
from compare import __main__ as compare
from compare import results


def text_of(folder) -> str:
    return (folder / "out" / "results.md").read_text()


def test_the_table_holds_means_deviations_and_only_finished_runs(tmp_path, capsys):
    runs, argv = plan(tmp_path, "a = {}\nb = {}\nc = {}", seeds=3)
    finished = [run for run in runs if run["arm"] == "a" or (run["arm"], run["seed"]) == ("b", 2)]
    for run in finished:
        write_run(run, correct={"a": 3, "b": 5}[run["arm"]])
    compare.main([*argv, "--report_only=True"])
    text = text_of(tmp_path)
    assert text in capsys.readouterr().out
    assert (tmp_path / "out" / "comparison.png").stat().st_size > 10_000
    means = []
    for run in finished:
        if run["arm"] == "a":
            lines = read_lines(run["folder"] / "eval.jsonl")
            means.append(np.mean([line["correct"] / K for line in lines]))
    assert f"{np.mean(means):.3f} ± {np.std(means, ddof=1):.3f}" in text
    assert "| a | 3 |" in text
    assert "| c |" not in text
    one_run = text.split("| b | 1 |")[1].splitlines()[0]
    assert "±" not in one_run
    assert "not in here: b/seed_1, c/seed_1, c/seed_2, b/seed_3, c/seed_3." in text
    assert "6 held-out problems, k = 8, 3 evaluation seeds" in text
    assert "do not cover the luck of training" in text


def test_a_baseline_whose_first_seed_is_missing_still_is_the_baseline(tmp_path):
    runs, argv = plan(tmp_path, "a = {}\nb = {}", seeds=2)
    for run in runs[1:]:
        write_run(run)
    compare.main([*argv, "--report_only=True"])
    assert "effect against a" in text_of(tmp_path)


def test_what_training_did_not_evaluate_is_empty_at_the_start(tmp_path):
    """As where nobody knows how many answers there are, but a checkpoint's different ones count."""
    (run,), argv = plan(tmp_path, "a = {}")
    write_run(run, modes=False)
    whole = [line | {"distinct": 2} for line in read_lines(run["folder"] / "eval.jsonl")]
    write_lines(run["folder"] / "eval.jsonl", whole)
    compare.main([*argv, "--report_only=True"])
    (start,) = [line for line in text_of(tmp_path).splitlines() if "(start" in line]
    assert start == "| (start, one evaluation) |  | 0.900 | 0.375 |  |  |"


def cells_of(table: str, start: str) -> list[str]:
    (row,) = [line for line in table.splitlines() if line.startswith(start)]
    return row.strip("| ").split(" | ")


def test_the_tables_cells_are_what_their_heads_say(tmp_path):
    runs, _ = plan(tmp_path, "a = {}\nb = {}\nc = {}", seeds=2)
    for run in runs:
        write_run(run, correct={"a": 3, "b": 5, "c": 4}[run["arm"]] + run["seed"] % 2)
    outcomes = results.load_outcomes(runs)
    of_effects = results.table_of_effects(outcomes, "a", K)
    for e in results.effects(outcomes, "a").itertuples():
        cells = cells_of(of_effects, f"| {e.arm} | {e.metric}@8 |")
        assert cells[2] == f"{e.effect:+.3f}"
        assert cells[3] == f"{e.low:+.3f} to {e.high:+.3f}" and e.low < e.high
        assert cells[4] == f"{e.p_holm:.2g}"
        assert cells[5] == f"{e.run_min:+.3f} to {e.run_max:+.3f}" and e.run_min < e.run_max
    # the baseline goes from (mean .2, pass .6) to (.4, .5); b ends at .3, where a was halfway
    ways = {"a": [(0.2, 0.6), (0.4, 0.5)], "b": [(0.2, 0.6), (0.3, 0.7)], "c": [(0.2, 0.6)] * 2}
    lines = []
    for arm, points in ways.items():
        # twice three times: what is averaged over three evaluations is then the point itself
        for step, (mean, passed) in enumerate([points[0]] * 3 + [points[1]] * 3):
            for seed in (1, 2):
                known = {"coverage": passed / 2, "distinct": 1.0}
                line = {"arm": arm, "seed": seed, "step": step, "mean": mean, "pass": passed}
                lines.append(line | known)
    of_arms = results.table_of_arms(outcomes, pd.DataFrame(lines), "a", K)
    assert cells_of(of_arms, "| (start")[2:] == ["0.600", "0.200", "0.300", "1.000"]
    assert cells_of(of_arms, "| b |")[-2:] == ["+0.150", "+0.075"]
    assert cells_of(of_arms, "| c |")[-2:] == ["+0.000", "+0.000"]


def test_a_path_is_drawn_with_its_mean_to_the_right(tmp_path):
    lines = [
        {"arm": "a", "seed": 1, "step": step, "mean": 0.1 * step, "pass": 0.9} for step in (1, 2)
    ]
    axis = Figure().subplots()
    results.draw_path(axis, pd.DataFrame(lines), "pass", K, {"a": "blue"})
    assert axis.lines[0].get_xdata() == pytest.approx([0.1, 0.2])
    assert axis.lines[0].get_ydata() == pytest.approx([0.9, 0.9])
    ends = [line.get_xdata()[0] for line in axis.lines[1:]]  # a cross at the start, a dot
    assert ends == pytest.approx([0.1, 0.2])


def test_the_first_arm_shows_below_one_that_lies_upon_it():
    lines = [
        {"arm": arm, "seed": 1, "step": step, "mean": 0.1 * step, "pass": 0.9}
        for arm in ("a", "b")
        for step in (1, 2)
    ]
    axes = Figure().subplots(1, 2)
    for axis, panel in zip(axes, (results.draw_curve, results.draw_path), strict=True):
        panel(axis, pd.DataFrame(lines), "pass", K, {"a": "blue", "b": "red"})
        widths = {line.get_color(): line.get_linewidth() for line in axis.lines[::-1]}
        assert widths["blue"] > 2 * widths["red"]


def test_a_curve_is_the_mean_of_the_runs_of_its_metric_and_the_area_their_range():
    lines = []
    for seed, shift in ((1, -0.1), (2, 0.1)):
        for step, passed in ((0, 0.5), (10, 0.7), (20, 1.0)):
            line = {"arm": "a", "seed": seed, "step": step, "mean": 0.2, "pass": passed + shift}
            lines.append(line)
    lines.pop()  # the second run ends before the first, and stays where it ended
    lines.append({"arm": "b", "seed": 1, "step": 30, "mean": 0.2, "pass": 0.1})
    axis = Figure().subplots()
    results.draw_curve(axis, pd.DataFrame(lines), "pass", K, {"a": "blue"})
    assert axis.lines[0].get_xdata() == pytest.approx([0, 10, 20])
    assert axis.lines[0].get_ydata() == pytest.approx([0.5, 0.7, 0.85])
    area = axis.collections[0].get_paths()[0].vertices[:, 1]
    assert (area.min(), area.max()) == pytest.approx((0.4, 0.9))


def test_each_arm_is_drawn_with_its_own_rewards_up_to_its_last_step():
    columns = pd.MultiIndex.from_tuples([("a", 1), ("b", 1), ("b", 2)])
    nan = float("nan")
    values = [[0.1, 0.2, 0.4], [0.2, 0.4, 0.6], [nan, 0.5, nan]]
    rewards = pd.DataFrame(values, index=[1, 2, 3], columns=columns)
    axis = Figure().subplots()
    results.draw_rewards(axis, rewards, {"a": "blue", "b": "red"})
    drawn = {line.get_color(): line.get_ydata() for line in axis.lines}
    assert drawn["blue"] == pytest.approx([0.1, 0.2])
    assert drawn["red"] == pytest.approx([0.3, 0.5, 0.55])


def test_doses_are_drawn_in_their_order_with_the_outcomes_of_their_arms():
    lines = []
    for arm, passed in (("a", 0.3), ("b", 0.1), ("c", 0.2)):
        line = {"arm": arm, "seed": 1, "problem": "p", "mean": 0.0, "pass": passed}
        lines.append(line | {"coverage": 0.0, "distinct": 0.0})
    dosed = ("maxent_tau", [(0.1, "b"), (0.2, "c"), (0.4, "a")])
    axis = Figure().subplots()
    results.draw_doses(axis, pd.DataFrame(lines), ["pass"], K, dosed)
    assert axis.lines[0].get_ydata() == pytest.approx([0.1, 0.2, 0.3])
    assert [label.get_text() for label in axis.get_xticklabels()] == ["0.1", "0.2", "0.4"]


def test_outcomes_are_those_of_all_evaluation_seeds_together_by_hand(tmp_path):
    (run,), _ = plan(tmp_path, "a = {}")
    write_run(run)
    keys = ("id", "seed", "correct", "distinct", "num_modes")
    records = [
        ("007", 0, 0, 0, 4),
        ("007", 1, 8, 4, 4),
        ("007", 2, 4, 1, 4.0),  # as pandas writes a column that lacks one
        ("x", 0, 2, 2, None),
        ("x", 1, 2, 1, None),
        ("x", 2, 2, 0, None),
    ]
    lines = [dict(zip(keys, record)) | {"samples": 8} for record in records]
    write_lines(run["folder"] / "eval.jsonl", lines)
    outcomes = results.load_outcomes([run])
    table = outcomes.set_index("problem")
    shown = ["mean", "pass", "distinct", "coverage"]
    # pass@8: 1 - C(wrong, 8) / C(24, 8), with 12 and 18 wrong answers of 24
    by_hand = [0.5, 1 - 495 / 735_471, 5 / 3, 5 / 12]
    assert table.loc["007", shown].tolist() == pytest.approx(by_hand)
    by_hand = [0.25, 1 - 43_758 / 735_471, 1]
    assert table.loc["x", shown[:3]].tolist() == pytest.approx(by_hand)
    assert np.isnan(table["coverage"]["x"])
    unknown = dict(zip(keys, ("x", 0, 2, 2, 0)))
    assert np.isnan(results.outcome_of(unknown, K)["coverage"])
    # a metric of some problems is no metric of the set
    assert results.complete_metrics(outcomes) == ["pass", "mean", "distinct"]


def test_the_training_reward_is_averaged_over_neighbouring_steps_by_hand(tmp_path):
    runs, _ = plan(tmp_path, "a = {}\nb = {}")
    for run in runs:
        write_run(run)
    # step 2 was repeated after a resume, and put before step 1; the evaluations of step 2 are no
    # steps of their own
    lines = [{"step": 2, "reward": 9.0}, {"step": 2, "reward": 0.5}, {"step": 1, "reward": 0.1}]
    for value in (0.1, 0.7):
        lines.append({"step": 2, "eval/pass@1": value, "eval/mean@8": value})
    write_lines(runs[1]["folder"] / "metrics.jsonl", lines)
    rewards = results.load_rewards(runs)
    assert rewards["b", 1].tolist() == pytest.approx([0.1, 0.3])
    curves = results.load_curves(runs)
    of_b = curves[curves["arm"] == "b"]
    assert of_b[of_b["step"] == 2]["mean"].tolist() == [0.7]
    assert rewards["a", 1].dropna().tolist() == [0.1]  # it has one step with a reward


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text[:-20],
        lambda text: "".join(text.splitlines(keepends=True)[:-3]),
        lambda text: "".join(text.splitlines(keepends=True)[:-1]),
        lambda text: "",
        lambda text: text.replace('"000"', '"other"'),
        lambda text: text.replace('"correct": ', '"correct": 9'),
        lambda text: text.replace('"samples": 8', '"samples": 64'),
        lambda text: text.replace('"seed": 1', '"sead": 1'),
        lambda text: text + "{}\n",
        lambda text: text.replace('"correct": ', '"correct": null, "was": '),
        lambda text: text.replace('"distinct": ', '"distinct": "x", "was": '),
        lambda text: text.replace('"id": "000"', '"id": null'),
    ],
    ids=[
        "cut within a line",
        "lines missing",
        "a line missing",
        "empty",
        "another problem",
        "too many are right",
        "more samples than the training's evaluations",
        "a key missing",
        "an empty record",
        "no number of right answers",
        "a text for a number",
        "a problem without a name",
    ],
)
def test_a_damaged_evaluation_is_named_not_averaged(tmp_path, damage):
    runs, argv = plan(tmp_path, "a = {}\nb = {}")
    for run in runs:
        write_run(run)
    file = runs[1]["folder"] / "eval.jsonl"
    file.write_text(damage(file.read_text()))
    with pytest.raises(UserError, match=r"delete .*eval.jsonl|delete it") as caught:
        compare.main([*argv, "--report_only=True"])
    assert str(file) in str(caught.value)
    assert not (tmp_path / "out" / "results.md").exists()


def test_half_a_last_line_of_metrics_is_none_and_a_damaged_one_is_named(tmp_path):
    (run,), argv = plan(tmp_path, "a = {}")
    write_run(run)
    path = run["folder"] / "metrics.jsonl"
    with open(path, "a") as file:
        file.write('{"step": 20, "eval/me')  # as a full disk leaves it
    compare.main([*argv, "--report_only=True"])
    path.write_text(path.read_text() + "\n")
    with pytest.raises(UserError, match=r"metrics.jsonl is damaged \(line 5\)"):
        compare.main([*argv, "--report_only=True"])
    path.write_text("")
    with pytest.raises(UserError, match=r"metrics.jsonl is damaged \(it has no evaluation\)"):
        compare.main([*argv, "--report_only=True"])


def test_the_evaluation_seeds_are_those_of_the_files(tmp_path):
    """Not those that this command would have asked for."""
    (run,), argv = plan(tmp_path, "a = {}")
    write_run(run)
    compare.main([*argv, "--report_only=True", "--eval_seeds=7"])
    assert "k = 8, 3 evaluation seeds" in text_of(tmp_path)


DOSES = """
base = {"objective": "dr_grpo"}
x3 = {"objective": "xdr", "maxent_tau": "inf"}
x1 = {"objective": "xdr", "maxent_tau": 0.05}
x2 = {"objective": "xdr", "maxent_tau": 0.8}
m1 = {"maxent_tau": 0.1}
m2 = {"maxent_tau": 0.4}
m3 = {"maxent_tau": 0.4, "learning_rate": 1e-5}
e1 = {"objective": "dr_grpo", "mode_entropy_coef": 0.1}
e2 = {"objective": "dr_grpo", "mode_entropy_coef": 0.3}
l1 = {"objective": "dr_grpo", "mode_entropy_coef": 0.1, "mode_entropy_score_norm": "length"}
l2 = {"objective": "dr_grpo", "mode_entropy_coef": 0.2, "mode_entropy_score_norm": "length"}
l3 = {"objective": "dr_grpo", "mode_entropy_coef": 0.3, "mode_entropy_score_norm": "length"}
"""


def test_doses_are_arms_that_differ_in_one_number(tmp_path):
    runs, _ = plan(tmp_path, DOSES, seeds=2)
    # two doses of maxent are no curve
    assert sorted(results.doses(runs)) == [
        ("maxent_tau", [(0.05, "x1"), (0.8, "x2"), (float("inf"), "x3")]),
        ("mode_entropy_coef", [(0.0, "base"), (0.1, "e1"), (0.3, "e2")]),
        ("mode_entropy_coef", [(0.1, "l1"), (0.2, "l2"), (0.3, "l3")]),
    ]
    twice = [{"arm": arm, "config": {"maxent_tau": tau}} for arm, tau in zip("abc", (1, 1, 2))]
    assert results.doses(twice) == []


def test_a_default_tau_is_a_dose_with_its_number(tmp_path, monkeypatch, tiny_model_dir):
    arms = 'a = {}\nb = {"maxent_tau": 0.05}\nc = {"maxent_tau": 0.4}'
    runs, argv = plan(tmp_path, arms, f"--model={tiny_model_dir}", "--maxent_tau=-1")
    for run in runs:
        write_run(run | {"config": compare.with_known_tau(run["config"])})
    drawn = []
    monkeypatch.setattr(compare, "draw", lambda runs, output: drawn.extend(results.doses(runs)))
    compare.main([*argv, "--report_only=True"])
    ((key, doses),) = drawn
    assert key == "maxent_tau" and [arm for _, arm in doses] == ["b", "a", "c"]
    assert 0.05 < doses[1][0] < 0.4


MANY = "".join(f'a{i} = {{"maxent_tau": {0.1 * (i + 1)}}}\n' for i in range(25))
INFINITE = """
x0 = {"objective": "xdr", "maxent_tau": 0.0}
x1 = {"objective": "xdr", "maxent_tau": 0.5}
x2 = {"objective": "xdr", "maxent_tau": "inf"}
"""


@pytest.mark.parametrize(
    "arms, seeds, modes",
    [
        ("a = {}", 1, True),
        ("a = {}\nb = {}", 2, False),
        (MANY, 1, True),
        (INFINITE, 3, True),
    ],
    ids=["one arm", "no modes", "many arms", "tau = inf"],
)
def test_a_picture_for(tmp_path, arms, seeds, modes):
    runs, _ = plan(tmp_path, arms, seeds=seeds)
    for i, run in enumerate(runs):
        write_run(run, correct=1 + i % 6, modes=modes)
    path = results.draw(runs, tmp_path / "out")
    assert path.read_bytes()[:4] == b"\x89PNG"
    assert path.stat().st_size > 10_000
    text = results.write_results(runs, runs[0]["arm"], tmp_path / "out", [])
    assert ("coverage" in text) == modes
    assert "nan" not in text
