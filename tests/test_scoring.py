"""scoring.py: weights, failures, which completions are right and whether they differ."""

import itertools
import json
import math
import os
from fractions import Fraction
from types import SimpleNamespace

import pytest
import torch
from hang_clock import Clock
from hypothesis import given, settings
from hypothesis import strategies as st
from reward_tools import (
    TEN,
    config,
    function,
    functions_for,
    lines_of,
    measured,
    rollouts_of,
    row_of,
)

import evaluate
import loss
import rewards
import scoring
import tasks
import workers
from common import RunStopped
from scoring import ERROR, TIMEOUT
from tasks import countdown

pytestmark = pytest.mark.usefixtures("reward_folder")

NAN = math.nan


# --- values, weights, metrics


def slow_combine(values: list, functions: list) -> tuple[list, dict]:
    scores = []
    failures = 0
    for group in values:
        scores.append([])
        for cell in group:
            total = 0.0
            for value, one in zip(cell, functions):
                if math.isfinite(value):
                    total += one.weight * value
            scores[-1].append(total)
            failures += any(value in (TIMEOUT, ERROR) for value in cell)
    metrics = {"reward/failures": failures}
    for f, one in enumerate(functions):
        asked = []
        for group in values:
            asked += [cell[f] for cell in group if not math.isnan(cell[f])]
        total = sum(value for value in asked if math.isfinite(value))
        metrics[f"reward/{one.name}/mean"] = total / len(asked) if asked else NAN
        metrics[f"reward/{one.name}/timeouts"] = asked.count(TIMEOUT)
        metrics[f"reward/{one.name}/errors"] = asked.count(ERROR)
    return scores, metrics


@settings(max_examples=100)
@given(st.data(), st.integers(1, 3), st.integers(1, 4), st.integers(1, 3))
def test_combine_is_the_slow_loop(data, P, G, F):
    numbers = st.sampled_from([0.0, 0.25, 1.0, -2.0, NAN, TIMEOUT, ERROR])
    cells = st.lists(numbers, min_size=F, max_size=F)
    groups = st.lists(cells, min_size=G, max_size=G)
    values = data.draw(st.lists(groups, min_size=P, max_size=P))
    weights = st.sampled_from([0.0, 1.0, -0.5, 3.0])
    functions = [function(f"f{f}", data.draw(weights), None, f == 0) for f in range(F)]

    given_values = torch.tensor(values)
    scores, metrics = scoring.combine(given_values, functions)

    slow_scores, slow_metrics = slow_combine(values, functions)
    torch.testing.assert_close(scores, torch.tensor(slow_scores))
    for name, value in slow_metrics.items():
        slow_metrics[name] = pytest.approx(value, nan_ok=True)
    assert metrics == slow_metrics
    torch.testing.assert_close(given_values, torch.tensor(values), equal_nan=True)


@pytest.mark.parametrize("weights", [(0.3, 0.6, 0.9), (0.1, 0.7, 0.8), (-0.5, -0.1, 0.05)])
def test_rows_that_earn_the_same_by_different_functions_make_an_equal_group(weights):
    """In float32 .3 + .6 is not .9."""
    functions = [function(f"f{f}", weight, None, f == 0) for f, weight in enumerate(weights)]
    levels = [0.0, 0.1, 0.2, 0.5, 0.6, 1.0]
    cells = {}  # exact reward -> the values of functions that earn it
    for cell in itertools.product(levels, repeat=3):
        exact = sum(Fraction(str(w)) * Fraction(str(v)) for w, v in zip(weights, cell))
        cells.setdefault(exact, []).append(cell)
    assert max(map(len, cells.values())) > 1
    for group in cells.values():
        scores, _ = scoring.combine(torch.tensor([group]), functions)
        assert loss.equal_groups(scores).all()


def by_length_and_row(completion, answer, id, **row):
    return len(completion) + 100 * int(id)


def two_rows() -> list[dict]:
    return [row_of("countdown", TEN) | {"id": str(i)} for i in range(2)]


FOUR = ("2*3+4", "2+3+4", r"\boxed{10}", "3*4-2")


def test_score_is_prompt_major_and_weighs_the_rewards(monkeypatch):
    monkeypatch.setitem(rewards.REWARDS, "longer", by_length_and_row)
    c = config("countdown", "longer", weights=[2.0, -0.5], reward_workers=0)
    scores, metrics = rewards.score(rollouts_of(FOUR), two_rows(), c)
    assert torch.equal(scores, torch.tensor([[2 - 2.5, -2.5], [-55.0, 2 - 52.5]]))
    assert scores.dtype == torch.float32
    assert metrics == {
        "reward/failures": 0,
        "reward/countdown/mean": 0.5,
        "reward/countdown/timeouts": 0,
        "reward/countdown/errors": 0,
        "reward/longer/mean": 56.25,
        "reward/longer/timeouts": 0,
        "reward/longer/errors": 0,
    }


def odd(completion, answer, odd_value, **row):
    return odd_value if completion == "3*4-2" else 0.5


@pytest.mark.parametrize(
    "value, said",
    [
        (math.nan, "gave nan"),
        (math.inf, "gave inf"),
        (-math.inf, "gave -inf"),
        (None, "gave None; a reward must be a number"),
        ("good", "gave 'good'; a reward must be a number"),
        ({"score": 1.0}, "neither a number nor a text (a dict, as for verl: docs/from_trl.md)"),
        ((1.0, 0.0), "gave a value of type tuple, neither a number nor a text"),
        ([1.0], "neither a number nor a text (a list, as for TRL: docs/from_trl.md)"),
    ],
)
def test_what_is_no_finite_number_is_an_error_with_reward_value_and_row_and_counts_as_0(
    monkeypatch, value, said
):
    monkeypatch.setitem(rewards.REWARDS, "odd", odd)
    c = config("odd", reward_workers=0)
    rows = [row | {"odd_value": value} for row in two_rows()]
    scores, metrics = rewards.score(rollouts_of(FOUR), rows, c)
    assert scores.tolist() == [[0.5, 0.5], [0.5, 0.0]]
    assert metrics == {
        "reward/failures": 1,
        "reward/odd/mean": 0.375,
        "reward/odd/timeouts": 0,
        "reward/odd/errors": 1,
    }
    _, (failed,) = scoring.measure(rollouts_of(FOUR), rows, functions_for(c, rows), c)
    assert (failed["reward"], failed["id"]) == ("odd", "1")
    assert (failed["kind"], failed["completion"]) == ("error", "3*4-2")
    assert said in failed["reason"]


def test_a_thousand_countdown_rewards_are_the_same_with_and_without_workers():
    c = config("countdown")
    rows = countdown.rows("train", 10, 0)
    texts = []
    for row in rows:
        wrong = "+".join(map(str, row["answer"]["numbers"]))
        for i in range(0, 100, 2):
            texts.append(f"{i} {row['solutions'][0]}")
            texts.append(f"<think>{i + 1}</think><answer>{wrong}</answer>")
    functions = functions_for(c, rows)
    values, failed = scoring.measure(rollouts_of(texts), rows, functions, c)
    assert not failed and (values[:, ::2] == 1).all()
    alone, failed = scoring.measure(rollouts_of(texts), rows, functions, c | {"reward_workers": 0})
    assert not failed and values.equal(alone)


def test_math_is_loaded_before_its_first_completion_is_timed_and_not_where_nobody_asks_for_it():
    """Rows of hostile:act are scored by it under "auto"; it sees what its process has imported."""
    c = config("auto", reward_workers=1)
    row = row_of("hostile:act")
    assert measured(["light", "loaded"], row, c) == ([1.0, 0.0], [])
    assert measured(["\\boxed{10}"], row_of("math", "10"), c) == ([1.0], [])
    assert measured(["light", "loaded"], row, c) == ([0.0, 1.0], [])


# --- failures of a step


def test_more_failures_than_allowed_stop_the_run_and_as_many_do_not():
    metrics = {
        "reward/a/mean": 99.0,
        "reward/a/timeouts": 4,
        "reward/a/errors": 3,
        "reward/b/mean": 0.0,
        "reward/b/timeouts": 0,
        "reward/b/errors": 3,
        "kl": 500.0,
        "reward/failures": 10,
    }
    scoring.check_failures(metrics, 100, 0.1)
    with pytest.raises(RunStopped) as caught:
        scoring.check_failures(metrics | {"reward/failures": 11}, 100, 0.1)
    said = str(caught.value)
    counts = ("reward/a/timeouts 4", "reward/a/errors 3", "reward/b/errors 3")
    for word in ("11 ", "100", "max_reward_failures=0.1", *counts):
        assert word in said
    assert "\n" not in said


def test_with_a_limit_of_zero_one_failure_stops_the_run_and_with_one_nothing_does():
    one = {"reward/a/errors": 1, "reward/failures": 1}
    with pytest.raises(RunStopped):
        scoring.check_failures(one, 1000, 0.0)
    none = {"reward/a/errors": 0, "reward/a/mean": 5.0, "reward/failures": 0}
    scoring.check_failures(none, 1000, 0.0)
    everything = {"reward/a/errors": 64, "reward/b/timeouts": 64, "reward/failures": 64}
    scoring.check_failures(everything, 64, 1.0)


def test_a_step_that_is_lost_to_timeouts_is_not_waited_for_and_an_evaluation_is(
    reward_folder, monkeypatch
):
    """Of 8 x 2 completions an eighth may fail: the third hang is one too many."""
    flags = {"prompts_per_step": 8, "num_generations": 2, "max_reward_failures": 0.125}
    c = config("hostile:act", reward_workers=1, reward_timeout=0.2, **flags)
    scoring.pool_of(c).clock = Clock(scoring.pool_of(c), lambda text: text == "sleep")
    rows = [row_of("own") for _ in range(8)]
    rollouts = rollouts_of(["sleep", "1"] * 8)
    functions = functions_for(c, rows)
    most = scoring.max_timeouts_of_step(rows, functions, c)
    values, failed = scoring.measure(rollouts, rows, functions, c, most)
    assert [record["kind"] for record in failed] == ["timeout"] * len(failed)
    assert sum(record["reason"].startswith("no answer in 0.2 s") for record in failed) == 3
    _, metrics = scoring.combine(values, functions)
    with pytest.raises(RunStopped, match="of a step's 16 completions"):
        scoring.check_failures(metrics, 16, 0.125)

    asked = []
    monkeypatch.setattr(scoring, "run_jobs", lambda jobs, c, most: asked.append(most) or {})
    monkeypatch.setattr(scoring.rollout, "generate", lambda *_: [])
    evaluate.sample_and_measure(evaluate.Exam(None, None, [], rows, []), [], 2, None, c)
    assert asked == [math.inf]


def test_a_step_is_lost_when_more_completions_than_allowed_can_only_have_failed():
    """A completion on which both its functions hang is one; a row of another task has one less."""
    rows = [row_of("own"), row_of("countdown", TEN)]
    functions = [function("a"), function("b", task="countdown")]
    c = config("a:a", prompts_per_step=8, num_generations=4, max_reward_failures=0.25)
    assert scoring.max_timeouts_of_step(rows[:1], functions, c) == 8
    assert scoring.max_timeouts_of_step(rows, functions, c) == 16
    assert scoring.max_timeouts_of_step([], functions, c) == 0
    never = c | {"max_reward_failures": 1.0}
    assert scoring.max_timeouts_of_step(rows, functions, never) == math.inf


def test_a_completion_on_which_three_functions_fail_is_one_failure():
    values = torch.tensor(
        [
            [[ERROR, TIMEOUT, ERROR], [1.0, ERROR, 0.0]],
            [[NAN, 1.0, 0.0], [0.0, 0.0, 0.0]],
        ]
    )
    _, metrics = scoring.combine(values, [function(name) for name in "abc"])
    assert metrics["reward/failures"] == 2


def test_failures_are_saved_with_their_texts_cut_and_not_more_than_twenty_a_step(tmp_path):
    nasty = "\0\ud800\u2028\x1b[2J\n" + "x" * 200_000
    record = {
        "reward": "math",
        "id": "row\n7",
        "kind": "timeout",
        "reason": "no answer",
        "completion": nasty,
    }
    others = [record | {"completion": str(i)} for i in range(24)]
    said = scoring.save_failures(tmp_path, [record, *others], 5, 1)
    assert said.isprintable()
    where = "reward_failures.rank_1.jsonl"
    for word in ("step 5", "25 ", "rank 1", "'math'", "'row\\n7'", "no answer", where):
        assert word in said
    path = tmp_path / where
    found = [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n")[:-1]]
    assert len(found) == 20
    assert found[0] == {"step": 5, **record, "completion": nasty[:100_000]}
    assert found[19]["completion"] == "18"
    assert record["completion"] is nasty
    scoring.save_failures(tmp_path, [record], 6, 1)
    assert len(lines_of(path)) == 21 and os.listdir(tmp_path) == [path.name]


# --- which completions are right


def test_correct_is_what_the_first_function_says_and_a_failure_is_not():
    functions = [
        function("a", 1.0, "a", True),
        function("b", 1.0, "b", True),
        function("format", 1.0, None, False),
    ]
    values = torch.tensor(
        [
            [[1.0, NAN, 0.0], [0.99, NAN, 1.0], [ERROR, NAN, 1.0], [TIMEOUT, NAN, 1.0]],
            [[NAN, 2.0, ERROR], [NAN, 0.0, 5.0], [NAN, -1.0, 0.0], [NAN, 1.0, 0.0]],
        ]
    )
    assert scoring.correct(values, functions).tolist() == [
        [True, False, False, False],
        [True, False, False, True],
    ]


def modes_of_right_answers(rows: list[dict]) -> list:
    texts = ["2*3+4", "4+3*2", "3*4-2", "1", "2", "3", "4", "2+3+4"]
    c = config("countdown", reward_workers=0)
    rollouts = rollouts_of(texts)
    functions = functions_for(c, rows)
    values, _ = scoring.measure(rollouts, rows, functions, c)
    return scoring.correct_modes(rollouts, rows, scoring.correct(values, functions), c)


def test_correct_modes_count_right_answers_and_different_ones():
    rows = two_rows()
    assert modes_of_right_answers(rows) == [(3, {"2*3+4", "3*4-2"}), (0, set())]
    no_task = [row | {"task": ""} for row in rows]
    assert modes_of_right_answers(no_task) == [(3, None), (0, None)]


def test_a_task_needs_no_mode(monkeypatch):
    bare = SimpleNamespace(__name__="tasks.bare", rows=countdown.rows, reward=countdown.reward)
    monkeypatch.setattr(tasks, "module", lambda name: bare)
    assert modes_of_right_answers(two_rows()) == [(3, None), (0, None)]


# --- whether they differ

CLUSTER_ROWS = [row_of("countdown", TEN), row_of("math", "10"), row_of("own data", "10")]
CLUSTER_TEXTS = [
    "<answer>2*3+4</answer>",
    "<answer>4+3*2</answer>",
    "<answer>3*4-2</answer>",
    "<answer>2+3</answer>",
    "so <answer> 2+3 </answer>",
    "",
    "\\boxed{10}",
    "\\boxed{20/2}",
    "\\boxed{7}",
    "<answer>7</answer>",
    "\\boxed{}",
    "\\boxed{ }",
    "10",
    "10 ",
    "\\boxed{7} 10",
    "7",
    " ",
    "<answer>10</answer>",
]
RIGHT = torch.tensor(
    [
        [True, True, True, False, False, False],
        [True, True, False, False, False, False],
        [False] * 6,
    ]
)


@pytest.mark.parametrize("count", [0, 2])
def test_clusters_are_modes_of_the_right_and_texts_of_the_wrong(count):
    c = config("auto", reward_workers=count)
    clusters = scoring.answer_clusters(rollouts_of(CLUSTER_TEXTS), CLUSTER_ROWS, RIGHT, c)
    assert clusters.tolist() == [[0, 0, 1, 2, 2, 3], [0, 0, 1, 1, 2, 3], [0, 0, 1, 1, 2, 0]]


@pytest.mark.parametrize("count", [0, 2])
def test_correct_modes_are_counted_per_row(count):
    c = config("auto", reward_workers=count)
    found = scoring.correct_modes(rollouts_of(CLUSTER_TEXTS), CLUSTER_ROWS, RIGHT, c)
    assert found == [(3, {"2*3+4", "3*4-2"}), (2, None), (0, None)]
    # another reward may decide what is right
    nobody = torch.zeros(1, 6, dtype=torch.bool)
    found = scoring.correct_modes(rollouts_of(CLUSTER_TEXTS[:6]), CLUSTER_ROWS[:1], nobody, c)
    assert found == [(0, set())]


@pytest.mark.parametrize("count", [0, 2])
def test_a_mode_that_fails_is_none_and_said(count, capsys):
    c = config("auto", reward_workers=count)
    rows = [row_of("countdown", {"numbers": None, "target": 10})]
    both = torch.tensor([[True, True]])
    found = scoring.correct_modes(rollouts_of(["2*3+4", "2*3+4"]), rows, both, c)
    assert found == [(2, set())]
    assert (
        "warning: mode() can't name the answers of 2 of 2 right completions"
        in capsys.readouterr().out
    )


@pytest.mark.parametrize(
    "mode, found, said",
    [
        (lambda text, answer: len(text), {"1.0", "2.0"}, ""),
        (lambda text, answer: (len(text),), set(), "of 3 of 3"),
        (lambda text, answer: text if len(text) == 2 else None, {"ab"}, "of 2 of 3"),
    ],
    ids=["a number", "a tuple", "None for a right one"],
)
def test_a_mode_may_be_a_number_and_what_is_none_is_said(mode, found, said, monkeypatch, capsys):
    monkeypatch.setattr(workers, "imported", lambda function: mode)
    rows = [row_of("countdown", "x")]
    right = torch.tensor([[True, True, True]])
    c = config("auto", reward_workers=0)
    assert scoring.correct_modes(rollouts_of(["ab", "c", "d"]), rows, right, c) == [(3, found)]
    assert said in capsys.readouterr().out


def test_a_wrong_completion_that_spells_a_right_mode_is_in_a_cluster_of_its_own():
    c = config("countdown", reward_workers=0)
    rollouts = rollouts_of(["4+2*3", "\\boxed{2*3+4}"])
    right = torch.tensor([[True, False]])
    clusters = scoring.answer_clusters(rollouts, [row_of("countdown", TEN)], right, c)
    assert clusters.tolist() == [[0, 1]]


def test_without_a_task_that_reads_bare_texts_one_without_an_answer_agrees_with_nobody():
    c = config("math", reward_workers=0)
    rollouts = rollouts_of(["again and again and"] * 2 + ["\\boxed{1}"] * 2)
    nobody = torch.zeros(1, 4, dtype=torch.bool)
    clusters = scoring.answer_clusters(rollouts, [row_of("math", "2")], nobody, c)
    assert clusters.tolist() == [[0, 1, 2, 2]]


def test_hostile_texts_have_clusters_too():
    """Who says nothing agrees with nobody."""
    c = config("countdown", reward_workers=0)
    texts = ["\0", "\ud800", "x" * 1_000_000, "x" * 999_999]
    texts += ["<answer>" + "{" * 5000 + "</answer>", "", "", " \n"]
    nobody = torch.zeros(1, 8, dtype=torch.bool)
    clusters = scoring.answer_clusters(rollouts_of(texts), [row_of("countdown", TEN)], nobody, c)
    assert clusters.tolist() == [[0, 1, 2, 2, 3, 4, 5, 6]]
