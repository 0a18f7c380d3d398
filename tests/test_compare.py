"""compare.py: its statistics against slow loops and simulations, what it does with folders it finds, what it refuses; and once for real."""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from scipy import stats

import checkpoint
import journal
from common import SIGNALS, RunStopped, UserError
from compare import __main__ as compare
from compare import results

ROOT = Path(__file__).resolve().parent.parent
TINY = str(ROOT / "config" / "countdown_tiny.py")
K = 8


# --- the regression


def outcomes_of(scores: np.ndarray, **others) -> pd.DataFrame:
    """What load_outcomes gives for "mean" scores (arms, seeds, problems); other metrics unknown unless given."""
    a, s, p = (index.ravel() for index in np.indices(scores.shape))
    known = {m: others[m].ravel() if m in others else np.nan for m in results.METRICS} | {
        "mean": scores.ravel()
    }
    return pd.DataFrame(
        {"arm": [f"arm{i}" for i in a], "seed": s + 1, "problem": [f"p{i}" for i in p], **known}
    )


def draw_scores(rng, effects, seeds=2, problems=60, luck=0.0) -> np.ndarray:
    """Scores (arms, seeds, problems): problems are easy or hard for all arms, an arm's effect varies over problems, runs are noisy and lucky."""
    shape = (len(effects), seeds, problems)
    return (
        np.reshape(effects, (-1, 1, 1))
        + rng.normal(0, 0.3, problems)
        + rng.normal(0, 0.1, (len(effects), 1, problems))
        + rng.normal(0, luck, (len(effects), seeds, 1))
        + rng.normal(0, 0.1, shape)
    )


def standard_errors(table: pd.DataFrame, problems: int) -> np.ndarray:
    return ((table["high"] - table["low"]) / 2 / stats.t.ppf(0.975, problems - 1)).to_numpy()


def test_an_effect_is_the_difference_of_means_also_with_another_number_of_runs():
    scores = draw_scores(np.random.default_rng(0), [0, 0.1, 0.3], seeds=3)
    data = outcomes_of(scores, **{"pass": scores**2})
    data = data[(data["arm"] != "arm1") | (data["seed"] == 2)]
    table = results.effects(data, "arm0").set_index(["arm", "metric"])
    assert len(table) == 4
    for metric, values in (("mean", scores), ("pass", scores**2)):
        assert table["effect"]["arm1", metric] == pytest.approx(
            values[1, 1].mean() - values[0].mean()
        )
        assert table["effect"]["arm2", metric] == pytest.approx(values[2].mean() - values[0].mean())
    runs = scores.mean(2)
    assert table["run_min"]["arm2", "mean"] == pytest.approx(
        min(a - b for a in runs[2] for b in runs[0])
    )
    assert table["run_max"]["arm2", "mean"] == pytest.approx(
        max(a - b for a in runs[2] for b in runs[0])
    )
    assert table["run_max"]["arm1", "mean"] == pytest.approx(max(runs[1, 1] - b for b in runs[0]))


def test_any_arm_can_be_the_baseline():
    data = outcomes_of(draw_scores(np.random.default_rng(1), [0, 0.1]))
    one, two = results.effects(data, "arm0").iloc[0], results.effects(data, "arm1").iloc[0]
    assert (two["arm"], two["effect"], two["low"], two["p"]) == (
        "arm0",
        pytest.approx(-one["effect"]),
        pytest.approx(-one["high"]),
        pytest.approx(one["p"]),
    )


def test_standard_errors_are_the_sandwich_clustered_by_problem():
    data = outcomes_of(draw_scores(np.random.default_rng(2), [0, 0.1, 0.3], seeds=2, problems=20))
    y, X = (
        data["mean"].to_numpy(),
        np.array([[1.0, arm == "arm1", arm == "arm2"] for arm in data["arm"]]),
    )
    bread = np.linalg.inv(X.T @ X)
    residuals, meat = y - X @ (bread @ X.T @ y), np.zeros((3, 3))
    for problem in data["problem"].unique():
        own = (data["problem"] == problem).to_numpy()
        score = X[own].T @ residuals[own]
        meat += np.outer(score, score)
    small = 20 / 19 * (len(y) - 1) / (len(y) - 3)
    clustered = np.sqrt(np.diag(small * bread @ meat @ bread))[1:]
    plain = np.sqrt(np.diag(bread) * (residuals @ residuals) / (len(y) - 3))[1:]
    table = results.effects(data, "arm0")
    assert standard_errors(table, 20) == pytest.approx(clustered)
    assert (
        plain > 1.5 * clustered
    ).all()  # hard problems are hard for all arms: plain errors count that as noise
    assert table["p"].to_numpy() == pytest.approx(
        2 * stats.t.sf(abs(table["effect"] / clustered), 19)
    )


def test_with_as_many_runs_everywhere_it_is_the_paired_t_test_over_problems():
    scores = draw_scores(np.random.default_rng(3), [0, 0.02], seeds=3)
    table, differences = (
        results.effects(outcomes_of(scores), "arm0"),
        scores[1].mean(0) - scores[0].mean(0),
    )
    n = scores.size
    assert standard_errors(table, 60)[0] == pytest.approx(
        differences.std(ddof=1) / 60**0.5 * ((n - 1) / (n - 2)) ** 0.5
    )
    assert table["p"][0] == pytest.approx(stats.ttest_1samp(differences, 0).pvalue, rel=0.05)


def test_holm_equals_a_slow_loop_over_all_arms_and_metrics():
    rng = np.random.default_rng(4)
    scores = draw_scores(rng, [0, 0.01, 0.03, 0.05])
    table = results.effects(
        outcomes_of(scores, **{"pass": draw_scores(rng, [0, 0, 0.02, 0.1])}), "arm0"
    )
    assert len(table) == 6
    so_far = 0.0
    for rank, i in enumerate(table["p"].sort_values().index):
        so_far = max(so_far, min(1.0, (6 - rank) * table["p"][i]))
        assert table["p_holm"][i] == pytest.approx(so_far)


@pytest.fixture
def fast(monkeypatch):
    monkeypatch.setattr(
        "gc.collect", lambda *_: 0
    )  # statsmodels' Holm collects garbage at every call


def simulated(luck: float, times: int = 300) -> tuple[float, float]:
    """How often the interval covers the true effect, and how often p < 0.05 where there is none."""
    covered, rejected = 0, 0
    for seed in range(times):
        table = results.effects(
            outcomes_of(draw_scores(np.random.default_rng(seed), [0, 0.05, 0], luck=luck)), "arm0"
        )
        covered += table["low"][0] <= 0.05 <= table["high"][0]
        rejected += table["p"][1] < 0.05
    return covered / times, rejected / times


def test_intervals_cover_at_95_percent_and_a_null_arm_is_rejected_at_5(fast):
    covered, rejected = simulated(luck=0.0)
    tolerance = 3 * (0.95 * 0.05 / 300) ** 0.5  # three standard errors of a share of 300: 0.038
    assert abs(covered - 0.95) < tolerance and rejected < 0.05 + tolerance


def test_intervals_do_not_cover_the_luck_of_training_as_results_md_says(fast):
    covered, rejected = simulated(luck=0.05, times=100)
    assert covered < 0.7 and rejected > 0.3


def test_outcomes_that_never_vary_and_a_single_problem_give_no_false_alarm(recwarn):
    table = results.effects(outcomes_of(np.zeros((3, 2, 5))), "arm0")
    assert table["effect"].tolist() == [0, 0] and table["p_holm"].tolist() == [1, 1]
    assert results.effects(
        outcomes_of(draw_scores(np.random.default_rng(0), [0, 1], problems=1)), "arm0"
    ).empty  # nothing to cluster by
    assert not recwarn.list


# --- at equal mean


def curves_of(**paths) -> pd.DataFrame:
    """{arm: [(mean, pass), ...]} with evaluations at steps 0, 10, ..., of two runs whose average this is."""
    return pd.DataFrame(
        [
            {
                "arm": arm,
                "seed": seed,
                "step": 10 * i,
                "mean": mean + (-1) ** seed * 0.01,
                "pass": passed + (-1) ** seed * 0.03,
            }
            for arm, path in paths.items()
            for i, (mean, passed) in enumerate(path)
            for seed in (1, 2)
        ]
    )


@pytest.mark.parametrize(
    "last, gain",
    [
        (
            (0.35, 0.70),
            0.70 - 0.55,
        ),  # half-way between .3 and .4; step 20, back at .28, is passed over
        ((0.20, 0.70), 0.70 - 0.80),
        ((0.40, 0.70), 0.70 - 0.50),
        ((0.28, 0.70), 0.70 - 0.64),
        ((0.19, 0.70), np.nan),
        ((0.41, 0.70), np.nan),
    ],
)
def test_gain_at_equal_mean_equals_the_number_made_by_hand(last, gain):
    curves = curves_of(
        base=[(0.2, 0.8), (0.3, 0.6), (0.28, 0.9), (0.3, 0.1), (0.4, 0.5), (0.37, 0.2)],
        arm=[(0.2, 0.8), (0.5, 0.5), last],
    )
    assert results.at_equal_mean(curves, "arm", "base", "pass") == pytest.approx(gain, nan_ok=True)


# --- folders


def plan(folder: Path, arms: str, *flags, seeds: int = 1) -> tuple[list[dict], list[str]]:
    """The runs of an arms file, and the arguments of compare.py that mean them."""
    file = folder / "arms.py"
    file.write_text(arms)
    argv = [
        TINY,
        f"--arms={file}",
        f"--seeds={seeds}",
        f"--output={folder / 'out'}",
        f"--model={folder}",
        "--ranks=1",
        "--max_steps=20",
        "--eval_steps=10",
        *flags,
    ]
    return compare.plan_runs(*compare.read_own(argv)), argv


def write_checkpoint(run: dict, step: int) -> None:
    path = run["folder"] / f"step_{step:06d}"
    path.mkdir(parents=True)
    (path / "weights").write_text("these are the weights")
    (path / "manifest.json").write_text(json.dumps(checkpoint.manifest_of(path)))


def write_run(run: dict, correct=3, modes=True, evaluated=True, problems=6) -> None:
    """The folder of a run that is trained and, if `evaluated`, done: the arm answers `correct` of 8, give or take, with half as many modes."""
    run["folder"].mkdir(parents=True, exist_ok=True)
    (run["folder"] / "config.json").write_text(json.dumps(run["config"]))
    known = {f"eval/coverage@{K}": 0.5, f"eval/distinct@{K}": 1.5} if modes else {}
    measured = {
        f"eval/mean@{K}": correct / K,
        f"eval/pass@{K}": 0.9,
        "eval/pass@1": correct / K,
        **known,
    }
    lines = [
        {"step": 0, **measured},
        {"step": 1, "reward": 0.1, "tau": None},
        {"step": 10, **measured},
        {"step": 20, **measured},
    ]
    (run["folder"] / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    write_checkpoint(run, 20)
    if evaluated:
        write_evaluation(run, correct, modes, problems)


def write_evaluation(run: dict, correct=3, modes=True, problems=6) -> None:
    rng = np.random.default_rng([run["seed"], *run["arm"].encode()])
    lines = []
    for i in range(problems):
        right = int(np.clip(correct + rng.integers(-2, 3), 0, K))
        lines += [
            {
                "id": f"{i:03d}",
                "seed": s,
                "correct": right,
                "distinct": (right + 1) // 2 if modes else None,
                "num_modes": 8 if modes else None,
            }
            for s in range(3)
        ]
    (run["folder"] / "eval.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_a_run_is_new_interrupted_trained_or_done(tmp_path):
    (run,), _ = plan(tmp_path, "a = {}")
    assert compare.state_of(run) == "new"
    write_run(run, evaluated=False)
    shutil.rmtree(run["folder"] / "step_000020")
    assert compare.state_of(run) == "new"  # it started and never saved
    write_checkpoint(run, 10)
    assert compare.state_of(run) == "interrupted"
    write_checkpoint(run, 20)
    assert compare.state_of(run) == "trained"
    (run["folder"] / "step_000020" / "weights").write_text("cut of")
    assert compare.state_of(run) == "interrupted"  # a damaged checkpoint is none
    write_evaluation(run)
    assert compare.state_of(run) == "done"


def test_an_interrupted_run_can_be_continued_from_every_evaluation(tmp_path):
    (run,), _ = plan(tmp_path, "a = {}")
    assert run["config"]["save_steps"] == 10
    (run,), _ = plan(tmp_path, "a = {}", "--save_steps=5")
    assert run["config"]["save_steps"] == 5 and "--save_steps=5" in run["flags"]


def test_a_folder_with_a_run_of_another_config_is_refused_in_one_sentence(tmp_path):
    (run,), argv = plan(tmp_path, "a = {}")
    write_run(run)
    plan(tmp_path, 'a = {"learning_rate": 1e-5}')
    with pytest.raises(UserError, match=r"learning_rate=0.0003 instead of 1e-05") as caught:
        compare.main(argv)
    assert str(run["folder"]) in str(caught.value) and "\n" not in str(caught.value)


def test_a_run_made_before_a_key_existed_is_still_the_same_run(tmp_path):
    (run, other), _ = plan(tmp_path, 'a = {}\nb = {"maxent_loss": "mle"}')
    for r in (run, other):
        write_run(r)
        (r["folder"] / "config.json").write_text(
            json.dumps({k: v for k, v in r["config"].items() if k != "maxent_loss"})
        )
    assert compare.state_of(run) == "done"
    with pytest.raises(UserError, match="maxent_loss='listwise' instead of 'mle'"):
        compare.state_of(other)


def test_a_folder_that_was_moved_holds_the_same_runs(tmp_path):
    (run,), _ = plan(tmp_path, "a = {}")
    write_run(run)
    shutil.move(tmp_path / "out", tmp_path / "archive")
    (run,), argv = plan(tmp_path, "a = {}", f"--output={tmp_path / 'archive'}")
    assert compare.state_of(run) == "done"
    compare.main([*argv, "--report_only=True"])


def test_an_infinite_tau_is_the_same_after_a_round_trip_through_the_folder(tmp_path):
    (run,), _ = plan(tmp_path, 'a = {"objective": "xdr", "maxent_tau": "inf"}')
    write_run(run)
    assert compare.state_of(run) == "done" and run["config"]["maxent_tau"] == float("inf")


def test_overrides_reach_the_scripts_as_they_were_written(tmp_path):
    overrides = {
        "reward_weights": [0.5],
        "system_prompt": """it's "quoted", $HOME = 5""",
        "learning_rate": 1e-5,
        "beta": 0,
        "wandb_options.name": "5",
        "zero_stage": 1,
        "gradient_checkpointing": True,
        "maxent_tau": "inf",
    }
    (run,), _ = plan(tmp_path, f"τ_hoch = {overrides!r}")
    resolved = compare.load_config(run["flags"])
    assert resolved == run["config"] and run["arm"] == "τ_hoch"
    assert {k: resolved[k] for k in overrides} == overrides | {"maxent_tau": float("inf")}


# --- what is carried out


@pytest.fixture
def own_signals():
    before = {s: signal.getsignal(s) for s in SIGNALS}
    for s in before:  # a shell's background job and nohup start a process deaf to some of them
        signal.signal(s, signal.default_int_handler if s == signal.SIGINT else signal.SIG_DFL)
    yield
    for s, handler in before.items():
        signal.signal(s, handler)


@pytest.fixture
def launched(monkeypatch, own_signals):
    """Runs are made up instead of started: a list of (arm, seed, state) in order. An arm `bad` fails; an arm `slow` sleeps."""
    started = []

    def start(run, ranks, locked):
        state = compare.state_of(run)
        started.append((run["arm"], run["seed"], state))
        if run["arm"] == "bad":
            return subprocess.Popen(["false"])
        if run["arm"] == "slow":
            return subprocess.Popen(["sleep", "100"], start_new_session=True)
        if state == "trained":
            write_evaluation(run)
        else:
            shutil.rmtree(run["folder"], ignore_errors=True)
            write_run(run, evaluated=False)
        return subprocess.Popen(["true"])

    monkeypatch.setattr(compare, "start", start)
    return started


def test_every_run_is_trained_then_evaluated_and_a_finished_one_is_left_alone(tmp_path, launched):
    runs, argv = plan(tmp_path, "a = {}\nb = {}\nc = {}\nd = {}")
    write_run(runs[1])
    write_run(runs[2], evaluated=False)
    write_run(runs[3], evaluated=False)
    (runs[3]["folder"] / "step_000020").rename(runs[3]["folder"] / "step_000010")
    compare.main(argv)
    assert launched == [
        ("a", 1, "new"),
        ("a", 1, "trained"),
        ("c", 1, "trained"),
        ("d", 1, "interrupted"),
        ("d", 1, "trained"),
    ]
    launched.clear()
    compare.main(argv)
    assert launched == []


def test_all_arms_get_one_seed_before_any_gets_two(tmp_path, launched):
    _, argv = plan(tmp_path, "a = {}\nb = {}", seeds=2)
    compare.main(argv)
    assert [run[:2] for run in launched if run[2] == "new"] == [
        ("a", 1),
        ("b", 1),
        ("a", 2),
        ("b", 2),
    ]


def test_a_run_that_fails_is_named_and_the_others_go_on(tmp_path, launched, capsys):
    _, argv = plan(tmp_path, "a = {}\nbad = {}\nc = {}")
    with pytest.raises(RunStopped, match=r"1 of 3 runs failed.*bad/seed_1.log"):
        compare.main(argv)
    assert ("c", 1, "trained") in launched and "bad/seed_1.log" in capsys.readouterr().err
    text = (tmp_path / "out" / "results.md").read_text()
    assert "| c |" in text and "| bad |" not in text and "not in here: bad/seed_1." in text


def test_without_a_run_of_the_baseline_there_is_no_table(tmp_path, launched):
    _, argv = plan(tmp_path, "bad = {}\nb = {}")
    with pytest.raises(
        RunStopped, match="1 of 2 runs are finished, none of them of the baseline bad"
    ):
        compare.main(argv)
    assert not (tmp_path / "out" / "results.md").exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_stops_what_was_started(tmp_path, launched, number):
    _, argv = plan(tmp_path, "slow = {}\nb = {}\nc = {}", "--jobs=1")

    def kill_what_has_started() -> None:
        end = time.monotonic() + 60
        while not launched and time.monotonic() < end:
            time.sleep(0.01)
        os.kill(os.getpid(), number)

    threading.Thread(target=kill_what_has_started).start()
    with pytest.raises(RunStopped, match=f"stopped by {number.name}: the same command goes on"):
        compare.main(argv)
    assert launched == [("slow", 1, "new")]
    assert (
        "sleep 100"
        not in subprocess.run(
            ["ps", "--ppid", str(os.getpid()), "-o", "args"], capture_output=True, text=True
        ).stdout
    )


def test_two_at_once_in_one_folder_is_refused_but_looking_is_not(tmp_path, launched):
    runs, argv = plan(tmp_path, "a = {}")
    write_run(runs[0])
    with journal.hold_folder(tmp_path / "out"):
        with pytest.raises(UserError, match=rf"process {os.getpid()} on .*--report_only=True"):
            compare.main(argv)
        compare.main([*argv, "--report_only=True"])


# --- the results


def test_the_table_holds_means_deviations_and_only_finished_runs(tmp_path, capsys):
    runs, argv = plan(tmp_path, "a = {}\nb = {}\nc = {}", seeds=3)
    for run in runs:
        if run["arm"] == "a" or (run["arm"], run["seed"]) == ("b", 2):
            write_run(run, correct={"a": 3, "b": 5}[run["arm"]])
    compare.main([*argv, "--report_only=True"])
    text = (tmp_path / "out" / "results.md").read_text()
    assert (
        text in capsys.readouterr().out
        and (tmp_path / "out" / "comparison.png").stat().st_size > 10_000
    )
    means = [
        np.mean(
            [
                json.loads(line)["correct"] / K
                for line in (run["folder"] / "eval.jsonl").read_text().splitlines()
            ]
        )
        for run in runs
        if run["arm"] == "a"
    ]
    assert f"{np.mean(means):.3f} ± {np.std(means, ddof=1):.3f}" in text
    assert (
        "| a | 3 |" in text
        and "| b | 1 |" in text
        and "| c |" not in text
        and "±" not in text.split("| b | 1 |")[1].splitlines()[0]
    )
    assert "not in here: b/seed_1, c/seed_1, c/seed_2, b/seed_3, c/seed_3." in text
    assert (
        "6 held-out problems, k = 8, 3 evaluation seeds" in text
        and "do not cover the luck of training seeds" in text
    )


def test_a_baseline_whose_first_seed_is_missing_still_is_the_baseline(tmp_path):
    runs, argv = plan(tmp_path, "a = {}\nb = {}", seeds=2)
    for run in runs[1:]:
        write_run(run)
    compare.main([*argv, "--report_only=True"])
    assert "effect against a" in (tmp_path / "out" / "results.md").read_text()


def test_outcomes_are_averaged_over_the_evaluation_seeds_by_hand(tmp_path):
    (run,), _ = plan(tmp_path, "a = {}")
    write_run(run)
    records = [
        ("007", 0, 0, 0, 4),
        ("007", 1, 8, 4, 4),
        ("007", 2, 4, 1, 4),
        ("x", 0, 2, 2, None),
        ("x", 1, 2, 1, None),
        ("x", 2, 2, 0, None),
    ]
    (run["folder"] / "eval.jsonl").write_text(
        "".join(
            json.dumps(dict(zip(("id", "seed", "correct", "distinct", "num_modes"), r))) + "\n"
            for r in records
        )
    )
    table = results.load_outcomes([run]).set_index("problem")
    assert table.loc["007", ["mean", "pass", "distinct", "coverage"]].tolist() == pytest.approx(
        [0.5, 2 / 3, 5 / 3, 5 / 12]
    )
    assert table.loc["x", ["mean", "pass", "distinct"]].tolist() == pytest.approx(
        [0.25, 1, 1]
    ) and np.isnan(table["coverage"]["x"])
    assert results.known(results.load_outcomes([run])) == [
        "pass",
        "mean",
        "distinct",
    ]  # a metric of some problems is no metric of the set


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text[:-20],
        lambda text: "".join(text.splitlines(keepends=True)[:-3]),
        lambda text: "",
        lambda text: text.replace('"000"', '"other"'),
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
    assert str(file) in str(caught.value) and not (tmp_path / "out" / "results.md").exists()


def test_a_half_written_metrics_line_is_named(tmp_path):
    (run,), argv = plan(tmp_path, "a = {}")
    write_run(run)
    with open(run["folder"] / "metrics.jsonl", "a") as file:
        file.write('{"step": 20, "eval/me')
    with pytest.raises(UserError, match=r"metrics.jsonl is damaged"):
        compare.main([*argv, "--report_only=True"])


def test_with_three_runs_each_luck_alone_keeps_zero_out_of_the_range_once_in_ten_as_results_md_says():
    rng = np.random.default_rng(0)
    a, b = rng.normal(size=(2, 20_000, 3))
    outside = (a.min(1) > b.max(1)) | (a.max(1) < b.min(1))
    assert outside.mean() == pytest.approx(0.1, abs=0.01)


def test_doses_are_arms_that_differ_in_one_number(tmp_path):
    runs, _ = plan(
        tmp_path,
        """
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
""",
        seeds=2,
    )
    assert sorted(results.doses(runs)) == [
        (
            "maxent_tau",
            [(0.05, "x1"), (0.8, "x2"), (float("inf"), "x3")],
        ),  # two doses of maxent are no curve
        ("mode_entropy_coef", [(0.0, "base"), (0.1, "e1"), (0.3, "e2")]),
        ("mode_entropy_coef", [(0.1, "l1"), (0.2, "l2"), (0.3, "l3")]),
    ]


@pytest.mark.parametrize(
    "arms, seeds, modes",
    [
        ("a = {}", 1, True),
        ("a = {}\nb = {}", 2, False),
        ("".join(f'a{i} = {{"maxent_tau": {0.1 * (i + 1)}}}\n' for i in range(25)), 1, True),
        (
            "".join(
                f'x{i} = {{"objective": "xdr", "maxent_tau": {tau!r}}}\n'
                for i, tau in enumerate((0.0, 0.5, "inf"))
            ),
            3,
            True,
        ),
    ],
    ids=["one arm", "no modes", "many arms", "tau = inf"],
)
def test_a_picture_for(tmp_path, arms, seeds, modes):
    runs, _ = plan(tmp_path, arms, seeds=seeds)
    for i, run in enumerate(runs):
        write_run(run, correct=1 + i % 6, modes=modes)
    path = results.draw(runs, tmp_path / "out")
    assert path.read_bytes()[:4] == b"\x89PNG" and path.stat().st_size > 10_000
    text = results.write_results(runs, runs[0]["arm"], tmp_path / "out", [])
    assert ("coverage" in text) == modes and "nan" not in text


# --- what is refused


@pytest.mark.parametrize(
    "arms, flags, words",
    [
        (None, ["--arms=nowhere.py"], ["nowhere.py", "can't be read"]),
        (None, [], ["--arms=FILE is missing"]),
        ("", [], ["names no arm"]),
        ("a = 5", [], ["arms.py: a must be a dict", "5"]),
        ("a = {5: 1}", [], ["arms.py: a must be a dict"]),
        ("a b = {}", [], ["arms.py:1"]),
        ("a = {}\na = {}", [], ["arms.py:2", "a is set twice"]),
        ('a = {}\nb = {"learning_rat": 1.0}', [], ["arms.py: b", "learning_rat", "learning_rate"]),
        ('a = {}\nb = {"learning_rate": "1e-5"}', [], ["arms.py: b", "learning_rate", "float"]),
        ('a = {}\nb = {"maxent_tau": -1}', [], ["maxent_tau=-1", "(arm b)"]),
        ('a = {"seed": 3}', [], ["--seed=3", "compare itself"]),
        ('a = {}\nb = {"eval_num_generations": 4}', [], ["arms.py: b", "eval_*"]),
        ('a = {}\nb = {"reward_funcs": ["graph_coloring"]}', [], ["arms.py: b", "reward_funcs"]),
        ("a = {}", ["--seeds=0"], ["--seeds=0"]),
        ("a = {}", ["--seeds=abc"], ["seeds", "int", "'abc'"]),
        ("a = {}", ["--seeds", "3"], ["--seeds=..."]),
        ("a = {}", ["--jobs=0"], ["--jobs=0"]),
        ("a = {}", ["--ranks=True"], ["ranks", "int"]),
        ("a = {}", ["--report_only=1"], ["report_only", "bool"]),
        ("a = {}", ["--seed=3"], ["--seed=3", "compare itself"]),
        ("a = {}", ["--max_step=3"], ["max_step", "max_steps"]),
        ("a = {}", ["--eval_steps=0"], ["eval_steps above 0"]),
        ("a = {}", ["--output=/etc/passwd"], ["'/etc/passwd'", "is a file"]),
    ],
)
def test_what_can_not_work_is_one_sentence_before_any_run_starts(
    tmp_path, monkeypatch, arms, flags, words
):
    monkeypatch.setattr(compare, "carry_out", lambda *args: pytest.fail("runs started"))
    file = tmp_path / "arms.py"
    if arms is not None:
        file.write_text(arms)
        flags = [f"--arms={file}", *flags]
    with pytest.raises(UserError) as caught:
        compare.main(
            [TINY, f"--output={tmp_path / 'out'}", "--max_steps=20", "--eval_steps=10", *flags]
        )
    assert all(word in str(caught.value) for word in words) and "\n" not in str(caught.value), (
        caught.value
    )
    assert not (tmp_path / "out").exists()


def test_exit_status_is_2_for_what_a_user_can_put_right_and_1_for_a_run_that_failed(
    tmp_path, launched, monkeypatch, capsys
):
    codes, (_, argv) = [], plan(tmp_path, "a = {}\nbad = {}")
    monkeypatch.setattr(os, "_exit", codes.append)
    for more in ([], ["--seeds=0"]):
        monkeypatch.setattr(sys, "argv", ["compare.py", *argv, *more])
        compare.script(compare.main)
    assert (
        codes == [1, 2]
        and capsys.readouterr().err.splitlines()[-1] == "error: --seeds=0 must be at least 1"
    )


# --- for real


@pytest.mark.slow
def test_two_arms_for_real_then_two_seeds_after_an_interruption(
    tiny_model_dir, tmp_path, own_signals, capsys
):
    flags = [
        "--jobs=2",
        "--rollout_engine=hf",
        "--max_steps=2",
        "--eval_steps=1",
        "--prompts_per_step=2",
        "--num_generations=2",
        "--eval_max_prompts=4",
        "--max_completion_length=8",
        f"--model={tiny_model_dir}",
    ]
    arms = 'plain = {"objective": "dr_grpo", "system_prompt": "it\'s here"}\nmaxent = {"maxent_tau": 0.1, "reward_weights": [0.5]}\n'
    runs, argv = plan(tmp_path, arms, *flags)
    compare.main(argv)
    out, text = tmp_path / "out", (tmp_path / "out" / "results.md").read_text()
    assert (
        "4 held-out problems" in text
        and "| plain | 1 |" in text
        and "| maxent | mean@8 |" in text
        and (out / "comparison.png").stat().st_size > 10_000
    )
    assert all(len((run["folder"] / "eval.jsonl").read_text().splitlines()) == 12 for run in runs)

    for arm in ("plain", "maxent"):  # training takes long: second seeds are copies of the first
        copy = shutil.copytree(out / arm / "seed_1", out / arm / "seed_2")
        (copy / "config.json").write_text(
            (copy / "config.json").read_text().replace('"seed": 1', '"seed": 2')
        )
    cut = out / "maxent" / "seed_1"
    evaluation = (cut / "eval.jsonl").read_text()
    (cut / "eval.jsonl").unlink()
    shutil.rmtree(cut / "step_000002")
    before = {path: path.stat().st_mtime_ns for path in out.glob("*/seed_*/**/*") if path.is_file()}
    capsys.readouterr()
    _, argv = plan(tmp_path, arms, *flags, seeds=2)
    compare.main(argv)
    assert (
        "4 runs, 1 of them to do" in capsys.readouterr().out
        and "resumed from" in cut.with_suffix(".log").read_text()
    )
    changed = [
        path for path in before if not path.exists() or path.stat().st_mtime_ns != before[path]
    ]
    assert changed and all(cut in path.parents for path in changed)
    assert (cut / "eval.jsonl").read_text() == evaluation  # continued, it is the same run
    assert "| maxent | 2 |" in (out / "results.md").read_text()
