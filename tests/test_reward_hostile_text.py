"""Every entry of rewards.REWARDS has the right score for hostile text, through real workers."""

import math
import os
from pathlib import Path

import pytest
from hang_clock import Clock
from hypothesis import given, settings
from hypothesis import strategies as st
from reward_tools import (
    ANSWERS,
    config,
    functions_for,
    measured,
    refusal,
    rollouts_of,
    row_for,
    row_of,
    rows_for_all,
)

import rewards
import scoring
import workers

pytestmark = pytest.mark.usefixtures("reward_folder")

MEGABYTE = 1_000_000
PWNED = Path("/tmp") / f"pwned_{os.getpid()}"
LOOP = 1 / 499_998 - 1  # of 500,000 times one word
# What a text of 10 of 100 tokens gets that has nothing in it for the reward. Of a reward that is
# not here the tests below ask only for a finite number.
WORTHLESS = {
    "countdown": 0.0,
    "graph_coloring": 0.0,
    "crossword": 0.0,
    "rush_hour": 0.0,
    "rush_hour_exact": 0.0,
    "rush_hour_shaped": 0.0,
    "sentence": 0.0,
    "math": 0.0,
    "math_exact": 0.0,
    "format": 0.0,
    "tag_count": 0.0,
    "length": -0.1,
    "soft_overlong": 0.0,
    "repetition": 0.0,
}


def judged(texts: list[str], c: dict) -> tuple[dict, list]:
    """{reward: [what it says of each text]}, failures; and no reward says anything of another's
    row."""
    rows = rows_for_all()
    functions = functions_for(c, rows)
    values, failed = scoring.measure(rollouts_of(texts * len(rows)), rows, functions, c)
    names = [function.name for function in functions]
    said = {}
    for i, row in enumerate(rows):
        own = names.index(row["task"])
        said[row["task"]] = values[i, :, own].tolist()
        others = [f for f in range(len(names)) if f != own]
        assert values[i][:, others].isnan().all()
    return said, failed


def check_judgement(texts: list[str], expected: dict, c: dict | None = None) -> None:
    """`expected`: {reward: [its score of each text]} where a text has something in it for it."""
    said, failed = judged(texts, c or config("auto"))
    assert not failed and not PWNED.exists()
    for name in rewards.REWARDS:
        if name in WORTHLESS:
            scores = expected.get(name, [WORTHLESS[name]] * len(texts))
            assert said[name] == pytest.approx(scores, abs=1e-6), name
        else:
            assert all(math.isfinite(value) for value in said[name]), name


def test_the_scores_below_are_of_rewards_that_there_are():
    assert set(WORTHLESS) <= set(rewards.REWARDS)


def a_new_reward(completion, answer, level, *, tokens, depth, **row):
    return 0.5 * level * depth * tokens


def test_a_new_reward_needs_its_function_and_its_line_and_no_test_of_the_others(monkeypatch):
    monkeypatch.setitem(rewards.REWARDS, "new", a_new_reward)
    row = row_for("new")
    assert (row["level"], row["depth"]) == (1, 1)
    check_judgement(["", "10"], {}, config("auto", reward_workers=0))


# what a payload is worth as it is, as <answer>payload</answer> and as \boxed{payload}; it has no
# tags
PAYLOADS = {
    "power": ("9**9**9", {}),
    "two powers": ("99**98**97", {}),
    "power of latex": ("9^{9^{9}}" + "1" * 1000, {}),
    "parentheses": ("(" * 10_000 + "5" + ")" * 10_000, {}),
    "parentheses around gold": ("(" * 10_000 + "10" + ")" * 10_000, {}),
    "open parentheses": ("(" * 10_000, {}),
    "braces": ("{" * 500 + "10" + "}" * 500, {}),
    "minuses": ("-" * 10_000 + "10", {}),
    "signs": ("+-" * 99 + "10", {}),
    "megabyte of words": (
        "10 " * 500_000,
        {"repetition": [LOOP, 3 / 499_999 - 1, 3 / 499_999 - 1]},
    ),
    "megabyte without a space": ("1" * MEGABYTE, {}),
    "megabyte of spaces": (" " * MEGABYTE, {}),
    "megabyte of braces": ("{" * MEGABYTE, {}),
    "megabyte of closing braces": ("}" * MEGABYTE, {}),
    "megabyte of boxes": ("\\boxed{" * (MEGABYTE // 7), {}),
    "megabyte before gold": (" " * MEGABYTE + "10", {}),
    "empty": ("", {}),
    "spaces": (" \t\n\r ", {}),
    "gold": ("10", {"math": [0, 1, 1], "math_exact": [0, 1, 0]}),
    "gold with spaces": (" \n10\t", {"math": [0, 1, 1], "math_exact": [0, 1, 0]}),
    "gold in dollars": ("$10$", {"math": [0, 1, 1], "math_exact": [0, 1, 0]}),
    "gold as a fraction": ("\\frac{20}{2}", {"math": [0, 1, 1]}),
    "gold in words": ("ten", {}),
    "import": (f"__import__('os').system('touch {PWNED}')", {}),
    "import in parentheses": (f"(__import__('os').system('touch {PWNED}'), 7)[1]", {}),
    "no mathematics": ("7 ? 10", {}),
    "no mathematics, the last number wrong": ("10 ? 7", {}),
    "classes": ("().__class__.__bases__[0].__subclasses__()", {}),
    "eval": (f"eval(\"__import__('os').system('touch {PWNED}')\")", {}),
    "lambda": (f"(lambda: open('{PWNED}', 'w'))()", {}),
    "operatorname": (
        f"\\operatorname{{__import__}}(\\text{{os}}).system(\\text{{touch {PWNED}}})",
        {},
    ),
    "shell": (f"$(touch {PWNED}) `touch {PWNED}` ; touch {PWNED} | touch {PWNED}", {}),
    "tex": (f"\\input{{|touch {PWNED}}} \\write18{{touch {PWNED}}}", {}),
    "template": ("{{7*7}} {answer} {0.__class__} %s%n%x", {}),
    "pickle": (f"cos\nsystem\n(S'touch {PWNED}'\ntR.", {}),
    "arabic digits": ("\u0661\u0660", {}),
    "fullwidth digits": ("\uff11\uff10", {}),
    "bold digits": ("\U0001d7cf\U0001d7ce", {}),
    "circled": ("\u2469", {}),
    "roman": ("\u2169", {}),
    "minus sign": ("\u221210", {}),
    "two minus signs": ("\u2212\u221210", {"math": [0, 1, 1]}),
    "fullwidth countdown": ("\uff12*\uff13+\uff14", {}),
    "countdown with a dash": ("2*3\u2212\u22124", {"math": [0, 1, 1]}),
    "unicode operators": ("2\u00d73+4", {"math": [0, 1, 1]}),
    "underscore": ("1_0", {}),
    "underscores": ("1_0_", {}),
    "hexadecimal": ("0xA", {}),
    "exponent": ("1e1", {"math": [0, 1, 1]}),
    "complex": ("10+1j", {}),
    "leading zero": ("0b1010", {}),
    "nested empty box": ("\\boxed{\\boxed{}}", {}),
    "nested box": ("\\boxed{\\boxed{10}}", {"math": [1, 1, 1]}),
    "box that never closes": ("\\boxed{10", {"math": [0, 1, 1]}),
    "box closed too soon": ("10} \\boxed{", {}),
    "substring": ("110", {}),
    "gold and more": ("10 is not it, 7 is", {}),
    "gold among others": ("7, 8, 9, 10, 11", {}),
    "or": ("7 or 10", {}),
    "set": ("\\{7, 10\\}", {}),
    "gold times": ("10x", {}),
    "gold plus": ("10+", {}),
    "decimals": ("10.5", {}),
    "nearly": ("10.0000001", {}),
    "pair": ("(10, 10)", {}),
    "not": ("x \\neq 10", {}),
    "NUL": ("\0", {}),
    "NUL after": ("10\0", {}),
    "NUL within": ("1\x000", {}),
    "NULs": ("\0" * 900, {}),
    "surrogate": ("\ud800", {}),
    "surrogate after": ("10\udfff", {}),
    "surrogates": ("\udcff\ud800" * 400, {}),
    "right to left": ("\u202e01", {}),
    "zero width": ("1\u200b0", {}),
    "byte order": ("\ufeff10", {}),
    "combining": ("10\u0301", {}),
    "escape sequences": ("\x1b[2J\x1b]0;10\x07", {}),
    "infinite": ("\\infty", {}),
    "nan": ("nan", {}),
    "inf": ("1e999", {}),
    "long number": ("1" * 5000, {}),
    "number of 999 digits": ("9" * 999, {}),
    "fractions": ("\\frac{1}{" * 5 + "10" + "}" * 5, {}),
    "open fractions": ("\\frac{" * 160, {}),
    "roots": ("\\sqrt{" * 30 + "10" + "}" * 30, {}),
    "zeros": ("-0" * 150, {}),
    "dots": ("1.0" * 100, {}),
    "dollars": ("$" * 950, {}),
    "lefts": ("\\left(" * 15, {}),
    "backslashes": ("\\" * 999, {}),
    "division by zero": ("1/0", {}),
    "division by zero in latex": ("\\frac{10}{0}", {}),
    "zero power": ("0^{-1}", {}),
    "ready": ('[0, "ready"]', {}),
    "answer of a worker": ("[1, 1.0]", {}),
    "error of a worker": ('{"error": "x"}', {}),
    "countdown": ("2*3+4", {"countdown": [1, 1, 0], "math": [0, 1, 1]}),
    "countdown of an assignment": ("(x:=2)*3+4", {}),
    "countdown as a call": ("2*3+4()", {}),
    "countdown with a comment": ("2*3+4#", {}),
    "countdown in two lines": ("2*3\n+4", {"math": [0, 1, 1]}),
    "floor division": ("2*3//1+4", {}),
    "moves": (
        "BD1,AR2",
        {"rush_hour": [1, 1, 0], "rush_hour_exact": [1, 1, 0], "rush_hour_shaped": [1, 1, 0]},
    ),
    "many moves": ("BD1," * 90 + "AR2", {}),
    "colours": ("RGR", {"graph_coloring": [1, 1, 0]}),
    "cyrillic colours": ("R\u0413R", {}),
    "letters": ("silent", {"crossword": [1, 1, 0]}),
}


@pytest.mark.parametrize("name", PAYLOADS)
def test_a_hostile_payload_gets_its_score_in_time_and_nothing_of_it_runs(name):
    payload, expected = PAYLOADS[name]
    texts = [payload, f"<answer>{payload}</answer>", f"\\boxed{{{payload}}}"]
    check_judgement(texts, {"tag_count": [0, 0.5, 0], **expected})


# texts with tags; (text, what is not 0)
THINK = "<think></think>"
TEXTS = {
    "unclosed answer": ("<answer>10", {"tag_count": 0.25}),
    "unclosed thought": (
        "<think><answer>10</answer>",
        {"tag_count": 0.75, "math": 1, "math_exact": 1},
    ),
    "answer never opened": ("10</answer>", {"tag_count": 0.25}),
    "tags the wrong way round": ("</answer>10<answer>", {"tag_count": 0.5}),
    "opened twice": (
        "<answer>7<answer>10</answer>",
        {"tag_count": 0.25, "math": 1, "math_exact": 1},
    ),
    "closed twice": (
        "<answer>10</answer>7</answer>",
        {"tag_count": 0.25, "math": 1, "math_exact": 1},
    ),
    "another after it that never closes": (
        "<answer>10</answer><answer>7",
        {"tag_count": 0.25, "math": 1, "math_exact": 1},
    ),
    "two answers, the second right": (
        "<answer>7</answer><answer>10</answer>",
        {"math": 1, "math_exact": 1},
    ),
    "two answers, the first right": ("<answer>10</answer><answer>7</answer>", {}),
    "two countdowns, the second right": (
        "<answer>2+3+4</answer> <answer>2*3+4</answer>",
        {"countdown": 1, "math": 1},
    ),
    "two countdowns, the first right": ("<answer>2*3+4</answer> <answer>2+3+4</answer>", {}),
    "two boxes, the second right": ("\\boxed{7} \\boxed{10}", {"math": 1}),
    "two boxes, the first right": ("\\boxed{10} \\boxed{7}", {}),
    "box after the answer": ("<answer>7</answer> \\boxed{10}", {"math": 1, "tag_count": 0.5}),
    "answer after the box": ("\\boxed{10} <answer>7</answer>", {"tag_count": 0.5}),
    "box in the answer": ("<answer>\\boxed{10}</answer>", {"math": 1, "tag_count": 0.5}),
    "box in the answer, wrong": ("<answer>10 \\boxed{7}</answer>", {"tag_count": 0.5}),
    "answer in a box": ("\\boxed{<answer>10</answer>}", {"tag_count": 0.5, "math_exact": 1}),
    "two attempts in one answer": ("<answer>10} \\boxed{7</answer>", {"tag_count": 0.5}),
    "the other way round": ("<answer>7} \\boxed{10</answer>", {"tag_count": 0.5}),
    "gold in the thought only": (
        "<think>10 10</think><answer>7</answer>",
        {"tag_count": 1, "format": 1},
    ),
    "gold around a wrong answer": ("10 <answer>7</answer> 10", {"tag_count": 0.5}),
    "no answer in the right form": (f"{THINK}<answer></answer>", {"tag_count": 1, "format": 1}),
    "all right": (
        f"{THINK}<answer>10</answer>",
        {"tag_count": 1, "format": 1, "math": 1, "math_exact": 1},
    ),
    "NUL between": (f"{THINK}\0<answer>10</answer>", {"tag_count": 1, "math": 1, "math_exact": 1}),
    "a tag with a space": ("<answer >10</answer>", {"tag_count": 0.25}),
    "a tag in capitals": ("<ANSWER>10</ANSWER>", {}),
    "a megabyte of opening tags": ("<answer>" * (MEGABYTE // 8), {}),
    "a megabyte of closing tags": ("</answer>" * (MEGABYTE // 9), {}),
    "a megabyte of answers": (
        "<answer>7</answer>" * (MEGABYTE // 18) + "<answer>10</answer>",
        {"math": 1, "math_exact": 1},
    ),
    "a megabyte of boxes": ("\\boxed{7}" * (MEGABYTE // 9) + "\\boxed{10}", {"math": 1}),
    "a megabyte after the answer": (
        "<answer>10</answer>" + "x" * MEGABYTE,
        {"tag_count": 0.5, "math_exact": 1},
    ),
    "a megabyte of thought": (
        "<think>" + "y" * MEGABYTE + "</think><answer>10</answer>",
        {"tag_count": 1, "format": 1, "math": 1, "math_exact": 1},
    ),
    "nested boxes": ("\\boxed{" * 140_000 + "10" + "}" * 140_000, {}),
}


@pytest.mark.parametrize("name", TEXTS)
def test_tags_in_any_order_get_their_score_in_time(name):
    text, expected = TEXTS[name]
    check_judgement([text], {reward: [value] for reward, value in expected.items()})


BOMBS = [
    "9^{9^{9}}",
    "(" * 400 + "5" + ")" * 400,
    "\\sum_{k=1}^{10^{9}} k^{k}",
    "\\int_0^1 x^{x^{x}} dx",
]


def test_sympy_bombs_score_zero_and_what_stands_beside_them_its_own():
    """Each may time out; 100000000! and the like are the same."""
    c = config("math", reward_workers=4, reward_timeout=2.0)
    texts = []
    for bomb in BOMBS:
        texts += [f"\\boxed{{{text}}}" for text in (bomb, "10", "7")]
    row = row_of("math", "10")
    pool = scoring.pool_of(c)
    pool.clock = Clock(pool, lambda text: text in texts[0::3])
    values, _ = measured(texts, row, c)
    assert values[1::3] == [1.0] * len(BOMBS) and values[2::3] == [0.0] * len(BOMBS)
    assert set(values[0::3]) <= {0.0, scoring.TIMEOUT, scoring.ERROR}
    assert scoring.TIMEOUT in values
    scores, _ = rewards.score(rollouts_of(texts[1:3]), [row], c)
    assert scores.tolist() == [[1.0, 0.0]]


FRAGMENTS = ["<answer>", "</answer>", "<think>", "</think>", "\\boxed{", "\\frac{", "{", "}", "("]
FRAGMENTS += [")", "10", "2*3+4", "RGR", "BD1,AR2", "SILENT", "-", "0", ".", ".0", "$", " ", "\n"]
FRAGMENTS += ["\\left", "\\right", "\\", "\\{", "\u2212", "\u03c0", "\0", "\ud800", "_", "/", "12"]
FRAGMENTS += ["\\pi", "x", ","]
LENGTHS = {"tokens": 10, "max_completion_length": 100, "soft_overlong_buffer": 20}


@settings(max_examples=150)
@given(st.lists(st.sampled_from(FRAGMENTS), max_size=25).map("".join))
def test_no_text_makes_a_reward_raise_or_give_anything_but_a_small_number(text):
    for name in WORTHLESS:
        function = rewards.import_path(name)
        arguments = {key: value for key, value in row_for(name).items() if key != "prompt_ids"}
        value = workers.run_job(function, text, arguments | LENGTHS)
        assert isinstance(value, float) and -1 <= value <= 1


# --- answers of a dataset

# rewards that can read each other's answers
ALIKE = [
    {"math", "math_exact", "last_number"},
    {"rush_hour", "rush_hour_exact", "rush_hour_shaped"},
]


@pytest.mark.parametrize("reward", [name for name in ANSWERS if name != "rush_hour"])
def test_answers_of_another_task_are_refused_in_one_sentence(reward):
    c = config(reward, reward_workers=0)
    for row in [*map(row_for, ANSWERS), row_of("list", [1, 2])]:
        functions = functions_for(c, [row])
        readable = any({reward, row["task"]} <= alike for alike in [*ALIKE, {reward}])
        if readable:
            scoring.check_answers(functions, [row], "my_data", c)
            continue
        said = refusal(scoring.check_answers, functions, [row], "my_data", c)
        for word in (repr(reward), repr(row["id"]), "my_data", "reward_funcs"):
            assert word in said


def test_own_answers_are_fine_through_workers_too():
    c = config("auto")
    rows = rows_for_all()
    scoring.check_answers(functions_for(c, rows), rows, "my_data", c)


def test_answers_are_looked_at_for_every_task_of_the_rows_not_its_first_alone():
    c = config("countdown")
    rows = [row_for(name) for name in ANSWERS]
    said = refusal(scoring.check_answers, functions_for(c, rows), rows, "my_data", c)
    assert "'countdown'" in said and "my_data" in said
    rows = [row_of("", "42")]
    said = refusal(scoring.check_answers, functions_for(c, rows), rows, "my_data", c)
    assert "'countdown'" in said and "'42'" in said and "'a row of '" in said


def test_rows_with_many_sets_of_columns_do_not_hide_another_tasks():
    c = config("auto", reward_workers=0)
    rows = [row_of("math", "10", **{f"column_{i}": 1}) for i in range(scoring.CHECKED_ROWS)]
    rows += [row_of("countdown", "42")]
    said = refusal(scoring.check_answers, functions_for(c, rows), rows, "my_data", c)
    assert "'countdown'" in said and "'a row of countdown'" in said
