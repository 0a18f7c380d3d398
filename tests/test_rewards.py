"""rewards.py: what its functions say of form and length, and how a config names functions."""

import functools
import json
import math
import sys

import datasets
import pytest
import row_files
import torch
from reward_tools import (
    ANSWERS,
    TEN,
    config,
    functions_for,
    measured,
    refusal,
    rollouts_of,
    row_of,
)

import rewards
import scoring
import workers
from common import ROOT

# --- form


@pytest.mark.parametrize(
    "text, right, tags",
    [
        ("<think>a</think><answer>b</answer>", 1, 1),
        (" \n<think>a</think>\n\n<answer>b</answer>\t ", 1, 1),
        ("<think></think><answer></answer>", 1, 1),
        ("<think>a\nb</think><answer>c\nd</answer>", 1, 1),
        ("", 0, 0),
        ("a", 0, 0),
        ("<answer>b</answer>", 0, 0.5),
        ("<think>a</think>", 0, 0.5),
        ("<think>a</think>b", 0, 0.5),
        ("<answer>b</answer><think>a</think>", 0, 1),
        ("x<think>a</think><answer>b</answer>", 0, 1),
        ("<think>a</think>x<answer>b</answer>", 0, 1),
        ("<think>a</think><answer>b</answer>x", 0, 1),
        ("<think>a<answer>b</answer></think>", 0, 1),
        ("<think>a<answer></think>b</answer>", 0, 1),
        ("</think>a<think><answer>b</answer>", 0, 1),
        ("<think>a</think></answer>b<answer>", 0, 1),
        ("<think>a</think><answer>b</answer><answer>c</answer>", 0, 0.5),
        ("<think><think>a</think><answer>b</answer>", 0, 0.75),
        ("<think>a</think><answer>b", 0, 0.75),
        ("<Think>a</Think><answer>b</answer>", 0, 0.5),
        ("<think>a</think><answer>b</answer></answer>", 0, 0.75),
        ("<think>" * 3 + "</think>" * 3, 0, 0),
        ("think answer", 0, 0),
    ],
)
def test_format_wants_both_parts_once_in_order_and_tag_count_gives_a_quarter_for_each_tag(
    text, right, tags
):
    assert rewards.format_reward(text) == right
    assert rewards.tag_count(text) == tags


@pytest.mark.parametrize(
    "tokens, length, overlong, all_of_it",
    [
        (0, 0, 0, 0),
        (1, -0.01, 0, -0.01),
        (50, -0.5, 0, -0.5),
        (79, -0.79, 0, -0.79),
        (80, -0.8, 0, -0.8),
        (81, -0.81, -0.05, -0.81),
        (90, -0.9, -0.5, -0.9),
        (99, -0.99, -0.95, -0.99),
        (100, -1, -1, -1),
        (101, -1, -1, -1),
        (1000, -1, -1, -1),
    ],
)
def test_length_is_a_share_and_soft_overlong_a_line_within_its_buffer(
    tokens, length, overlong, all_of_it
):
    limits = {"tokens": tokens, "max_completion_length": 100}
    assert rewards.length("", **limits, id="x") == pytest.approx(length)
    found = rewards.soft_overlong("", **limits, soft_overlong_buffer=20)
    assert found == pytest.approx(overlong)
    found = rewards.soft_overlong("", **limits, soft_overlong_buffer=100)
    assert found == pytest.approx(all_of_it)


def test_lengths_are_counted_in_tokens_of_the_completion_and_come_from_the_config():
    c = config(
        "length",
        "soft_overlong",
        weights=[-1.0, 3.0],
        reward_workers=0,
        max_completion_length=10,
        soft_overlong_buffer=5,
    )
    rollouts = [{"text": "same", "completion_ids": [0] * n} for n in (0, 5, 6, 10)]
    scores, metrics = rewards.score(rollouts, [row_of("math", "1")], c)
    assert scores.tolist() == [pytest.approx([0.0, 0.5, 0.6 - 0.6, 1.0 - 3.0])]
    assert metrics["reward/length/mean"] == pytest.approx(-0.525)
    assert metrics["reward/soft_overlong/mean"] == pytest.approx(-0.3)


@pytest.mark.parametrize(
    "text, value",
    [
        ("", 0),
        ("a", 0),
        ("a a", 0),
        ("a a a", 0),
        ("a a a a", 1 / 2 - 1),
        ("a b c d e", 0),
        ("a b c a b c", 3 / 4 - 1),
        ("a b c\na\tb  c d", 4 / 5 - 1),
        ("a " * 101, 1 / 99 - 1),
        ("A a a a", 0),
        ("ab " * 3 + "cd", 0),
    ],
)
def test_repetition_is_the_share_of_three_word_sequences_seen_before(text, value):
    assert rewards.repetition(text) == pytest.approx(value)


# --- the last number


@pytest.mark.parametrize(
    "text, number",
    [
        ("7 + 5 = 12.", "12"),
        ("12", "12"),
        ("12.0 apples, I think", "12"),
        ("First 7, then 1,234.50!", "1234.5"),
        ("$1,000,000", "1000000"),
        ("(7, 8, 1,2345)", "2345"),
        ("about .5", "0.5"),
        ("so...5", "5"),
        ("x = -5", "-5"),
        ("x = - 5", "-5"),
        ("7 - 5", "5"),
        ("7-5", "5"),
        ("(3)-5", "5"),
        ("-$5", "-5"),
        ("\N{MINUS SIGN}5 degrees", "-5"),
        ("x = \N{EN DASH}5", "-5"),
        ("7\N{EN DASH}5", "5"),
        ("\\boxed{1{,}000}", "1000"),
        ("\\boxed{10\\,000}", "10000"),
        ("\\boxed{10\\ 000}", "10000"),
        ("10,\\!000", "10000"),
        ("10\\;000", "10000"),
        ("10\\:000", "10000"),
        ("10~000", "10000"),
        ("some 10\N{NO-BREAK SPACE}000 of them", "10000"),
        ("some 10\u202f000 of them", "10000"),
        ("1\\,2", "2"),
        ("(3,\\,125)", "125"),
        ("a loss of -\\$5", "-5"),
        ("a loss of -£5", "-5"),
        ("a loss of -€5", "-5"),
        ("a loss of -¥5", "-5"),
        ("a loss of -₹5", "-5"),
        ("it is: - 5", "-5"),
        ("(- 5", "-5"),
        ("\\boxed{- 5}", "-5"),
        ("x[3]-5", "5"),
        ("x_{3}-5", "5"),
        ("50%-5", "5"),
        ("3.-5", "5"),
        ("x\\approx-12", "-12"),
        ("x \\le-3", "-3"),
        ("is \N{NON-BREAKING HYPHEN}12.", "-12"),
        ("-0.00", "0"),
        ("007", "7"),
        ("\\boxed{12}<|im_end|>", "12"),
        ("9" * 10_000 + ".0", "9" * 10_000),
    ],
)
def test_the_last_number_of_a_text_is_its_answer(text, number):
    for answer in (number, f"some working\n#### {number}", f" {number}.0" * ("." not in number)):
        if answer:
            assert rewards.last_number(text, answer) == 1.0, answer
    assert rewards.last_number(text, "6") == rewards.last_number(text, f"{number}1") == 0.0
    assert rewards.last_number(text, f"1{number.lstrip('-')}") == 0.0


@pytest.mark.parametrize(
    "text", ["", "twelve", "12, no, 13", "1/12 of 3", "\u0661\u0662", "- 12 + 1"]
)
def test_a_text_whose_last_number_is_another_is_wrong(text):
    assert rewards.last_number(text, 12) == rewards.last_number(text, 12.0) == 0.0


@pytest.mark.parametrize("answer", ["1/2", "ten", "", "12 apples", True, "1e-7"])
def test_an_answer_that_is_no_number_is_no_answer_for_it(answer):
    with pytest.raises(ValueError, match="must be a number"):
        rewards.last_number("12", answer)
    with pytest.raises(ValueError, match="must be a finite number"):
        rewards.last_number("12", math.nan)


def test_a_small_number_is_read_without_an_exponent():
    assert rewards.last_number("0.0000001", 1e-7) == 1.0
    assert rewards.last_number("12", 1e-7) == 0.0


# --- names in a config


def test_a_reward_that_does_not_exist_is_refused_by_its_name():
    said = refusal(rewards.check_names, ["countdown", "auto", "magic"])
    assert "'magic'" in said and "countdown" in said and "module:function" in said
    rewards.check_names(["auto", *rewards.REWARDS, "no_such_module:of_mine"])


def test_a_function_that_would_score_rows_twice_is_refused():
    """Both functions would have one name, and one metric."""
    said = refusal(
        rewards.reward_functions, ["auto", "countdown"], [1.0, 0.5], [row_of("countdown")]
    )
    assert "'countdown' twice" in said
    assert "'length' twice" in refusal(
        rewards.reward_functions, ["length", "length"], [1.0, 1.0], []
    )


def test_every_registered_reward_is_found_by_module_and_name():
    for name, function in rewards.REWARDS.items():
        assert workers.imported(rewards.import_path(name)) is function
    assert rewards.import_path("my_rewards:mine") == "my_rewards:mine"


def unweighted(completion, answer, weight, **row):
    return 1.0


@pytest.mark.parametrize(
    "function", [lambda completion, **row: 1.0, functools.partial(unweighted, weight=2)]
)
def test_a_registered_reward_that_no_worker_could_import_is_refused(monkeypatch, function):
    monkeypatch.setitem(rewards.REWARDS, "nameless", function)
    said = refusal(rewards.check_names, ["nameless"])
    assert "rewards.REWARDS['nameless']" in said and "def at the top of a module" in said


def test_a_task_without_a_reward_is_refused_by_its_row():
    rows = [row_of("countdown", TEN), row_of("poetry")]
    said = refusal(rewards.reward_functions, ["auto"], [1.0], rows)
    for word in ("auto", "'poetry'", "'a row of poetry'", "countdown"):
        assert word in said
    rows = [row_of("countdown", TEN), row_of("")]
    said = refusal(rewards.reward_functions, ["countdown", "auto"], [1.0, 1.0], rows)
    assert "'a row of '" in said


def test_a_reward_that_is_named_scores_rows_of_any_task():
    functions = rewards.reward_functions(["countdown"], [1.0], [row_of("poetry")])
    assert functions == [
        scoring.RewardFunction("countdown", 1.0, None, True, "tasks.countdown:reward")
    ]


def test_a_rank_without_rows_has_as_many_functions_as_others():
    functions = rewards.reward_functions(["auto", "length"], [1.0, 1.0], [])
    values, failed = scoring.measure([], [], functions, config("auto", "length", reward_workers=0))
    assert values.shape == (0, 0, 2) and not failed
    assert scoring.correct(values, functions).shape == (0, 0)


# --- rows and the functions that score them

MIXED = [
    row_of("countdown", TEN),
    row_of("math", "10"),
    row_of("graph_coloring", ANSWERS["graph_coloring"]),
    row_of("countdown", {"numbers": [2, 3, 5], "target": 11}),
]
MIXED_TEXTS = ["2*3+4", "RGR", "\\boxed{10}", "2*3+4", "RGR", "RRR", "2*3+5", "2*3+4"]


@pytest.mark.parametrize("count", [0, 2])
def test_auto_scores_every_row_by_its_own_task_alone(count):
    c = config("auto", "length", weights=[2.0, -0.5], reward_workers=count)
    functions = functions_for(c, MIXED)
    assert [
        (function.name, function.weight, function.task, function.decides) for function in functions
    ] == [
        ("countdown", 2.0, "countdown", True),
        ("graph_coloring", 2.0, "graph_coloring", True),
        ("math", 2.0, "math", True),
        ("length", -0.5, None, False),
    ]
    values, failed = scoring.measure(rollouts_of(MIXED_TEXTS), MIXED, functions, c)
    assert not failed
    own = torch.tensor([[1.0, 0], [1, 0], [1, 0], [1, 0]])
    for i, f in enumerate((0, 2, 1, 0)):
        assert torch.equal(values[i, :, f], own[i])
        others = [k for k in range(3) if k != f]
        assert values[i, :, others].isnan().all()
    assert torch.equal(scoring.correct(values, functions), own.bool())

    scores, metrics = scoring.combine(values, functions)
    torch.testing.assert_close(scores, 2 * own + 0.05)
    expected = {"reward/failures": 0}
    means = {"countdown": 0.5, "graph_coloring": 0.5, "math": 0.5, "length": -0.1}
    for name, mean in means.items():
        expected[f"reward/{name}/mean"] = pytest.approx(mean)
        expected[f"reward/{name}/timeouts"] = 0
        expected[f"reward/{name}/errors"] = 0
    assert metrics == expected


def test_a_mean_is_over_the_rows_of_its_task_and_nothing_where_the_batch_has_none():
    c = config("auto", reward_workers=0)
    functions = functions_for(c, MIXED)
    values, _ = scoring.measure(rollouts_of(MIXED_TEXTS[:4]), MIXED[:2], functions, c)
    scores, metrics = scoring.combine(values, functions)
    assert scores.tolist() == [[1.0, 0.0], [1.0, 0.0]]
    assert metrics["reward/countdown/mean"] == metrics["reward/math/mean"] == 0.5
    assert math.isnan(metrics["reward/graph_coloring/mean"])


def test_rewards_are_weighted_prompt_major_and_equal_completions_get_equal_scores(reward_folder):
    functions = ("hostile:act", "hostile:tenfold", "hostile:level")
    c = config(*functions, weights=[1.0, -0.5, 100.0])
    rows = [row_of("", level=1), row_of("", level=2)]
    scores, metrics = rewards.score(rollouts_of(["1", "2", "1", "4", "1", "6"]), rows, c)
    assert scores.tolist() == [[96.0, 92.0, 96.0], [184.0, 196.0, 176.0]]
    assert metrics["reward/hostile:act/mean"] == 2.5
    assert metrics["reward/hostile:tenfold/mean"] == 25
    assert metrics["reward/hostile:level/mean"] == 1.5


def test_a_row_is_routed_to_a_function_of_the_users_own():
    rows = [row_of("hostile:tenfold"), row_of("countdown", TEN)]
    c = config("auto", reward_workers=0)
    scores, _ = rewards.score(rollouts_of(["7", "2*3+4"] * 2), rows, c)
    assert scores.tolist() == [[70.0, 0.0], [0.0, 1.0]]


SPY = "open(__file__ + '.imported', 'w').close()\ndef f(completion, answer, **row): return 1.0\n"


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_what_a_row_of_data_has_as_task_is_never_imported(reward_folder, kind):
    """Only a config names code. The row has no task then, and "auto" says so."""
    (reward_folder / "spy.py").write_text(SPY)
    row = {"prompt": "a", "answer": "1", "task": "spy:f"}
    path = reward_folder / f"data.{kind}"
    if kind == "jsonl":
        path.write_text(json.dumps(row) + "\n")
    else:
        datasets.Dataset.from_list([row]).to_parquet(str(path))

    rows = row_files.load(str(path))
    assert [row["task"] for row in rows] == [""]
    assert "has task ''" in refusal(rewards.reward_functions, ["auto"], [1.0], rows)

    c = config("math", reward_workers=0)
    functions = functions_for(c, rows)
    rollouts = rollouts_of(["\\boxed{1}", "2"])
    values, failed = scoring.measure(rollouts, rows, functions, c)
    assert values[..., 0].tolist() == [[1.0, 0.0]] and not failed
    right = scoring.correct(values, functions)
    assert scoring.correct_modes(rollouts, rows, right, c) == [(1, None)]
    assert scoring.answer_clusters(rollouts, rows, right, c).tolist() == [[0, 1]]
    assert not (reward_folder / "spy.py.imported").exists() and "spy" not in sys.modules

    # as the config may
    rows = row_files.load(str(path), task="spy:f")
    scores, _ = rewards.score(rollouts, rows, config("auto", reward_workers=0))
    assert scores.tolist() == [[1.0, 1.0]] and (reward_folder / "spy.py.imported").exists()
    del sys.modules["spy"]
    (reward_folder / "spy.py.imported").unlink()
    workers.imported.cache_clear()


@pytest.mark.parametrize("prompt", ["say cba", [{"role": "user", "content": "say cba"}]])
def test_a_reward_written_for_trl_goes_on_working_as_the_document_says(
    prompt, tmp_path, monkeypatch
):
    document = (ROOT / "docs" / "from_trl.md").read_text()
    code = document.split("```python\n")[1].split("```")[0]
    (tmp_path / "my_rewards.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    c = config("my_rewards:reward", reward_workers=0)
    row = row_of("own", "cba", level=2) | {"prompt": prompt}
    assert measured([" cba ", "abc"], row, c) == ([1.0, 0.0], [])


def test_a_score_written_for_verl_goes_on_working_as_the_document_says(tmp_path, monkeypatch):
    document = (ROOT / "docs" / "from_trl.md").read_text()
    code = document.split("```python\n")[2].split("```")[0]
    (tmp_path / "my_scores.py").write_text(code)
    scorer = "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
    scorer += "    return float(solution_str == ground_truth and extra_info['level'] == 2)\n"
    (tmp_path / "gsm8k.py").write_text(scorer)
    monkeypatch.syspath_prepend(tmp_path)
    c = config("my_scores:reward", reward_workers=0)
    row = row_of("own", "cba", data_source="gsm8k", extra_info={"level": 2})
    assert measured(["cba", "abc"], row, c) == ([1.0, 0.0], [])
