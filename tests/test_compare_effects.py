"""The statistics of compare: effects against slow loops, other formulas and simulations; the gain
at equal mean against numbers made by hand."""

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from compare import results

# --- the regression


def outcomes_of(scores: np.ndarray, **others) -> pd.DataFrame:
    """What load_outcomes gives for "mean" scores (arms, seeds, problems); other metrics unknown
    unless given."""
    arm, seed, problem = (index.ravel() for index in np.indices(scores.shape))
    columns = {
        "arm": [f"arm{i}" for i in arm],
        "seed": seed + 1,
        "problem": [f"p{i}" for i in problem],
    }
    for metric in results.METRICS:
        columns[metric] = others[metric].ravel() if metric in others else np.nan
    columns["mean"] = scores.ravel()
    return pd.DataFrame(columns)


def draw_scores(rng, effects, seeds=2, problems=60, luck=0.0) -> np.ndarray:
    """Scores (arms, seeds, problems): problems are easy or hard for all arms, an arm's effect
    varies over problems, runs are noisy and lucky."""
    shape = (len(effects), seeds, problems)
    scores = np.reshape(effects, (-1, 1, 1)) + rng.normal(0, 0.3, problems)
    scores = scores + rng.normal(0, 0.1, (len(effects), 1, problems))
    scores = scores + rng.normal(0, luck, (len(effects), seeds, 1))
    return scores + rng.normal(0, 0.1, shape)


def standard_errors(table: pd.DataFrame, problems: int) -> np.ndarray:
    half = (table["high"] - table["low"]) / 2
    return (half / stats.t.ppf(0.975, problems - 1)).to_numpy()


def test_an_effect_is_the_difference_of_means_also_with_another_number_of_runs():
    scores = draw_scores(np.random.default_rng(0), [0, 0.1, 0.3], seeds=3)
    data = outcomes_of(scores, **{"pass": scores**2})
    data = data[(data["arm"] != "arm1") | (data["seed"] == 2)]
    table = results.effects(data, "arm0").set_index(["arm", "metric"])
    assert len(table) == 4
    for metric, values in (("mean", scores), ("pass", scores**2)):
        effect = table["effect"]
        baseline = values[0].mean()
        assert effect["arm1", metric] == pytest.approx(values[1, 1].mean() - baseline)
        assert effect["arm2", metric] == pytest.approx(values[2].mean() - baseline)
    runs = scores.mean(2)
    differences = [a - b for a in runs[2] for b in runs[0]]
    assert table["run_min"]["arm2", "mean"] == pytest.approx(min(differences))
    assert table["run_max"]["arm2", "mean"] == pytest.approx(max(differences))
    assert table["run_max"]["arm1", "mean"] == pytest.approx(runs[1, 1] - min(runs[0]))


def test_any_arm_can_be_the_baseline():
    data = outcomes_of(draw_scores(np.random.default_rng(1), [0, 0.1]))
    one = results.effects(data, "arm0").iloc[0]
    two = results.effects(data, "arm1").iloc[0]
    assert two["arm"] == "arm0"
    assert two["effect"] == pytest.approx(-one["effect"])
    assert two["low"] == pytest.approx(-one["high"])
    assert two["p"] == pytest.approx(one["p"])


def test_standard_errors_are_the_sandwich_clustered_by_problem():
    data = outcomes_of(draw_scores(np.random.default_rng(2), [0, 0.1, 0.3], seeds=2, problems=20))
    y = data["mean"].to_numpy()
    X = np.array([[1.0, arm == "arm1", arm == "arm2"] for arm in data["arm"]])
    bread = np.linalg.inv(X.T @ X)
    residuals = y - X @ (bread @ X.T @ y)
    meat = np.zeros((3, 3))
    for problem in data["problem"].unique():
        own = (data["problem"] == problem).to_numpy()
        score = X[own].T @ residuals[own]
        meat += np.outer(score, score)
    small = 20 / 19 * (len(y) - 1) / (len(y) - 3)
    clustered = np.sqrt(np.diag(small * bread @ meat @ bread))[1:]
    plain = np.sqrt(np.diag(bread) * (residuals @ residuals) / (len(y) - 3))[1:]
    table = results.effects(data, "arm0")
    assert standard_errors(table, 20) == pytest.approx(clustered)
    # hard problems are hard for all arms: plain errors count that as noise
    assert (plain > 1.5 * clustered).all()
    p = 2 * stats.t.sf(abs(table["effect"] / clustered), 19)
    assert table["p"].to_numpy() == pytest.approx(p)


def test_with_as_many_runs_everywhere_it_is_the_paired_t_test_over_problems():
    scores = draw_scores(np.random.default_rng(3), [0, 0.02], seeds=3)
    table = results.effects(outcomes_of(scores), "arm0")
    differences = scores[1].mean(0) - scores[0].mean(0)
    n = scores.size
    small = ((n - 1) / (n - 2)) ** 0.5
    paired = differences.std(ddof=1) / 60**0.5
    assert standard_errors(table, 60)[0] == pytest.approx(paired * small)
    assert table["p"][0] == pytest.approx(stats.ttest_1samp(differences, 0).pvalue, rel=0.05)


def test_holm_equals_a_slow_loop_over_all_arms_and_metrics():
    rng = np.random.default_rng(4)
    scores = draw_scores(rng, [0, 0.01, 0.03, 0.05])
    passed = draw_scores(rng, [0, 0, 0.02, 0.1])
    table = results.effects(outcomes_of(scores, **{"pass": passed}), "arm0")
    assert len(table) == 6
    so_far = 0.0
    for rank, i in enumerate(table["p"].sort_values().index):
        so_far = max(so_far, min(1.0, (6 - rank) * table["p"][i]))
        assert table["p_holm"][i] == pytest.approx(so_far)


@pytest.fixture
def fast(monkeypatch):
    """statsmodels' Holm collects garbage at every call."""
    monkeypatch.setattr("gc.collect", lambda *_: 0)


def simulated(luck: float, times: int = 300) -> tuple[float, float]:
    """How often the interval covers the true effect, and how often p < 0.05 where there is none."""
    covered = 0
    rejected = 0
    for seed in range(times):
        scores = draw_scores(np.random.default_rng(seed), [0, 0.05, 0], luck=luck)
        table = results.effects(outcomes_of(scores), "arm0")
        covered += table["low"][0] <= 0.05 <= table["high"][0]
        rejected += table["p"][1] < 0.05
    return covered / times, rejected / times


def test_intervals_cover_at_95_percent_and_a_null_arm_is_rejected_at_5(fast):
    covered, rejected = simulated(luck=0.0)
    tolerance = 3 * (0.95 * 0.05 / 300) ** 0.5  # three standard errors of a share of 300: 0.038
    assert abs(covered - 0.95) < tolerance
    assert rejected < 0.05 + tolerance


def test_intervals_do_not_cover_the_luck_of_training_as_results_md_says(fast):
    covered, rejected = simulated(luck=0.05, times=100)
    assert covered < 0.7
    assert rejected > 0.3


def test_outcomes_that_never_vary_and_a_single_problem_give_no_false_alarm(recwarn):
    for value in (0.0, 0.7, 1.0):  # where it is not 0, sums leave rounding
        table = results.effects(outcomes_of(np.full((3, 2, 300), value)), "arm0")
        assert table["effect"].tolist() == [0, 0]
        assert table["p_holm"].tolist() == [1, 1]
    # one problem: nothing to cluster by
    scores = draw_scores(np.random.default_rng(0), [0, 1], problems=1)
    assert results.effects(outcomes_of(scores), "arm0").empty
    # a file that another test has left open is told whenever it is collected
    assert all(issubclass(told.category, ResourceWarning) for told in recwarn)


def test_with_three_runs_each_luck_keeps_zero_out_of_the_range_once_in_ten_as_results_md_says():
    rng = np.random.default_rng(0)
    a, b = rng.normal(size=(2, 20_000, 3))
    outside = (a.min(1) > b.max(1)) | (a.max(1) < b.min(1))
    assert outside.mean() == pytest.approx(0.1, abs=0.01)


# --- at equal mean


def curves_of(**paths) -> pd.DataFrame:
    """{arm: [(mean, pass), ...]} with evaluations at steps 0, 10, ..., of two runs whose average
    this is."""
    lines = []
    for arm, path in paths.items():
        for i, (mean, passed) in enumerate(path):
            for seed, sign in ((1, -1), (2, 1)):
                line = {
                    "arm": arm,
                    "seed": seed,
                    "step": 10 * i,
                    "mean": mean + sign * 0.01,
                    "pass": passed + sign * 0.03,
                }
                lines.append(line)
    return pd.DataFrame(lines)


@pytest.mark.parametrize(
    "end, gain",
    [
        # half-way between .3 and .4, which the path crosses last from .4 down to .3
        ((0.35, 0.70), 0.70 - 0.35),
        ((0.25, 0.70), 0.70 - 0.70),
        ((0.40, 0.70), 0.70 - 0.50),
        ((0.19, 0.70), np.nan),
        ((0.41, 0.70), np.nan),
    ],
)
def test_gain_at_equal_mean_equals_the_number_made_by_hand(end, gain):
    """Each point three times: the average over three neighbours passes through all of them."""
    base = [(0.2, 0.8), (0.3, 0.6), (0.4, 0.5), (0.3, 0.2)]
    path = [point for point in base for _ in range(3)]
    curves = curves_of(base=path, arm=[(0.2, 0.8), end, end, end])
    found = results.at_equal_mean(curves, "arm", "base", "pass")
    assert found == pytest.approx(gain, nan_ok=True)


def test_runs_that_ended_at_different_steps_count_alike_at_the_end():
    """An arm of which one run ended at .9 and the other, later, at .5; the baseline ended at .5."""
    curves = curves_of(base=[(0.2, 0.5)] * 9, arm=[(0.2, 0.5)] * 9)
    early = curves["arm"].eq("arm") & curves["seed"].eq(1)
    curves["pass"] = 0.5
    curves["mean"] = 0.2
    curves.loc[early, "pass"] = 0.9
    curves = curves[~(early & (curves["step"] > 50))]
    end = results.path_of(curves, "arm", "pass").iloc[-1]
    assert end.tolist() == pytest.approx([0.2, 0.7])
    assert results.at_equal_mean(curves, "arm", "base", "pass") == pytest.approx(0.2)
    # of the early run its last three, not its very last
    curves.loc[early & (curves["step"] == 50), "pass"] = 0.3
    end = results.path_of(curves, "arm", "pass", last=3).iloc[-1]
    assert end.tolist() == pytest.approx([0.2, (0.7 + 0.5) / 2])


def test_an_arm_that_is_the_baseline_gains_nothing_at_equal_mean():
    """Though its path goes back: read at its first crossing, the baseline had lost nothing yet. Nor
    if its mean stands still at the end while it goes on losing."""
    rng = np.random.default_rng(3)
    goes_back = [(0.3 + 0.1 * rng.random(), 0.8 - 0.03 * i) for i in range(15)]
    stands_still = [(0.5, 0.8 - 0.03 * i) for i in range(15)]
    for path in (goes_back, stands_still):
        curves = curves_of(base=path, arm=path)
        assert results.at_equal_mean(curves, "arm", "base", "pass") == pytest.approx(0, abs=1e-9)
