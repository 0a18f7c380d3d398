"""tasks/countdown.py: the pinned counts, modes against a naive search, hostile text."""

import math
import operator
import random
from fractions import Fraction

import pytest

from tasks import countdown

TEN = {"numbers": [2, 3, 4], "target": 10}
# what rewards.score passes on
ROW = {
    "answer": TEN,
    "id": "x",
    "task": "countdown",
    "prompt": "",
    "solutions": [],
    "num_modes": 2,
}


def answer_of(numbers, target) -> dict:
    return {"numbers": list(numbers), "target": int(target)}


# --- the rules


def test_two_three_four_to_ten_has_exactly_two_modes():
    assert countdown.modes([2, 3, 4], 10) == {"2*3+4", "3*4-2"}


def test_problem_counts_are_the_pinned_ones():
    counts = {}
    for config in countdown.CONFIGS:
        problems = countdown.problems(config)
        counts[config] = len(problems["train"]) + len(problems["test"])
    assert counts == {"3": 787, "4": 5426, "tiny": 10745}


def test_exactly_256_problems_are_held_out_or_128_of_a_small_variant():
    counts = {config: len(countdown.rows("test", -1, 0, config)) for config in countdown.CONFIGS}
    assert counts == {"3": 128, "4": 256, "tiny": 256}


def test_tiny_prompts_are_short():
    rows = countdown.rows("train", -1, 0, "tiny") + countdown.rows("test", -1, 0, "tiny")
    assert max(len(row["prompt"]) for row in rows) <= 12


def test_order_of_operands_is_no_mode_but_grouping_is():
    for text in ("4+3*2", "2*3+4", "((3) * 2) + 4"):
        assert countdown.mode(text, TEN) == "2*3+4"
    nine = answer_of([2, 3, 4], 9)
    texts = ("(2+3)+4", "2+(3+4)", "4+(3+2)", "2+3+4", "(4+2)+3")
    assert len({countdown.mode(text, nine) for text in texts}) == 3


@pytest.mark.parametrize(
    "text, numbers, target",
    [
        ("8/(3-8/3)", [3, 3, 8, 8], 24),
        ("(2+3-5)*7+9", [2, 3, 5, 7, 9], 9),
        ("2-3+4", [2, 3, 4], 3),
        ("12*2/3", [2, 3, 12], 8),
        ("2/3*12", [2, 3, 12], 8),
        ("2*(3-4)+12", [2, 3, 4, 12], 10),
    ],
)
def test_zero_negative_and_fractional_intermediates_are_fine(text, numbers, target):
    assert countdown.reward(text, answer_of(numbers, target)) == 1.0


def test_division_by_zero_is_wrong():
    assert countdown.reward("9/(2+3-5)", answer_of([2, 3, 5, 9], 9)) == 0.0
    assert countdown.reward("2*3+4/(5-5)", answer_of([2, 3, 4, 5, 5], 6)) == 0.0


# --- a second definition of everything: expressions as nested tuples, all of them tried


OPERATIONS = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv}


def random_tree(rng: random.Random, numbers: list) -> tuple[str, Fraction | None, object]:
    """(fully parenthesised text with spaces, value or None, key as nested tuples)."""
    if len(numbers) == 1:
        return str(numbers[0]), Fraction(numbers[0]), numbers[0]
    cut = rng.randrange(1, len(numbers))
    op = rng.choice("+-*/")
    return combine(op, random_tree(rng, numbers[:cut]), random_tree(rng, numbers[cut:]))


def combine(op: str, left: tuple, right: tuple) -> tuple:
    """The tree of two trees; its value is None if something is divided by zero."""
    left_text, a, left_key = left
    right_text, b, right_key = right
    undefined = a is None or b is None or (op == "/" and b == 0)
    value = None if undefined else OPERATIONS[op](a, b)
    key = (op, left_key, right_key)
    if op in "+*":
        # the same key for either order of the operands
        key = (op, frozenset([left_key, right_key]) if left_key != right_key else left_key)
    return f"({left_text} {op} {right_text})", value, key


def naive_answers(numbers: list) -> list[tuple]:
    """Every (text, value, key), through postfix notation: push a number or combine the two on top,
    until all are used."""
    complete = []
    states = [((), tuple(numbers))]
    while states:
        stack, rest = states.pop()
        if not rest and len(stack) == 1:
            complete.append(stack[0])
        for i, n in enumerate(rest):
            pushed = (*stack, (str(n), Fraction(n), n))
            states.append((pushed, rest[:i] + rest[i + 1 :]))
        if len(stack) >= 2:
            for op in OPERATIONS:
                states.append(((*stack[:-2], combine(op, stack[-2], stack[-1])), rest))
    return [answer for answer in complete if answer[1] is not None]


@pytest.mark.parametrize(
    "numbers",
    [[2, 3, 4], [1, 2, 12], [5, 5, 5], [2, 2, 4], [3, 6, 9], [7, 1, 20], [2, 3, 5, 6]],
    ids=str,
)
def test_modes_equals_a_naive_search_and_mode_maps_onto_it(numbers):
    texts = {}  # {value: {key: text}}
    for text, value, key in naive_answers(numbers):
        # one text of each tree is enough; random_tree tries the others
        texts.setdefault(value, {}).setdefault(key, text)
    for value, by_key in texts.items():
        if value.denominator == 1:
            answer = answer_of(numbers, value)
            modes = {countdown.mode(text, answer) for text in by_key.values()}
            assert modes == countdown.modes(numbers, answer["target"])
            assert len(modes) == len(by_key)
    assert countdown.modes(numbers, 10**9) == set()


def test_every_correct_random_expression_has_a_mode_that_is_in_modes():
    rng = random.Random(0)
    hands = [(2, 3, 4), (4, 7, 11), (2, 2, 3, 8), (5, 7, 9, 12)]
    tables = {numbers: countdown.expressions(numbers) for numbers in hands}
    tried = 0
    for _ in range(4000):
        numbers = rng.choice(hands)
        text, value, _ = random_tree(rng, rng.sample(numbers, len(numbers)))
        if value is None or value.denominator != 1:
            continue
        answer = answer_of(numbers, value)
        key = countdown.mode(f"<answer>{text}</answer>", answer)
        assert key in {written for written, _ in tables[numbers][value]}
        assert countdown.mode(key, answer) == key
        assert countdown.reward(text, answer_of(numbers, value + 1)) == 0.0
        tried += 1
    assert tried > 1000


def test_a_thousand_solutions_and_random_formulas_are_told_apart():
    rows = countdown.rows("train", 1000, 0, "4")
    for i, row in enumerate(rows[::2]):
        assert countdown.reward(row["solutions"][0], **row) == 1.0, i
    rewards = set()
    for i, row in enumerate(rows[1::2]):
        text, value, _ = random_tree(random.Random(i), row["answer"]["numbers"])
        assert countdown.reward(text, **row) == (value == row["answer"]["target"])
        rewards.add(countdown.reward(text, **row))
    assert rewards == {0.0, 1.0}


# --- hostile text


@pytest.mark.parametrize(
    "text",
    [
        "2*3+4",
        " 2*3+4\n",
        "(2*3)+4",
        "4 + 2*3",
        "<answer>2*3+4</answer>",
        "<think>4*5</think><answer>\n 3*4-2 \n</answer> bye",
        "<answer>1</answer> no: <answer>2*3+4</answer>",
        "<answer>2*3+4</answer> and <answer>",
        "<answer>2*3+4</answer> </answer>",
        "<answer><answer>2*3+4</answer>",
    ],
)
def test_these_are_right(text):
    assert countdown.reward(text, **ROW) == 1.0


WRONG = [
    # other values, other numbers
    *"10 3*4 2*3+4+0 2*3+4*1 2*3+2*2 2*3-4 2+3+4 24-3".split(),
    # nothing, or no complete answer, or another one after it
    "",
    " ",
    *"<answer>2*3+4 2*3+4</answer> <answer></answer>2*3+4 <ANSWER>2*3+4</ANSWER>".split(),
    "<answer>2*3+4</answer><answer>9</answer>",
    # equations, signs and operations that are not among the four
    *"2*3+4=10 10=2*3+4 -(2*3+4) +2*3+4 2*3--4 2*3+-(-4) 2**3+4-2 3**2+4".split(),
    *"4//2*3 2*3+4//1 2*3|4 4<<2*3 2*3@4".split(),
    # other ways to write a number, which Python reads
    *"2.0*3+4 2e0*3+4 0x2*3+4 02*3+4 2_*3+4 0_2*3+4 2j*3+4".split(),
    # calls, tuples and the like
    *"2(3)+4 (2,3,4) [2*3+4] {2*3+4} __import__('os').abort() (lambda:10)()".split(),
    "2 3 4",
    "2*3+4 if 1 else 0",
    "2*3+4or 9",
    # comments, line breaks and what else ends or hides an expression
    *"2*3+4# 2*3+4;".split(),
    "2*3+4 # 10",
    "2*3\n+4",
    "2*3+\\\n4",
    "2*3\t+4",
    "2*3\r+4",
    "2*3+4\0",
    "\0",
    "2*3+4\ud800",
    "\udfff",
    # other scripts' digits and signs
    "\N{ARABIC-INDIC DIGIT TWO}*3+4",
    "\N{FULLWIDTH DIGIT TWO}*3+4",
    "2\N{MULTIPLICATION SIGN}3+4",
    "2*3\u22124",
    "2*3+\N{SUPERSCRIPT FOUR}",
    "2\u200b*3+4",
    # parentheses
    *"( ) (2*3+4 2*3+4) () 2*()3+4".split(),
    "(" * 10_000 + "2*3+4" + ")" * 10_000,
    "-" * 10_000 + "2*3+4",
    "(" * 50 + "2*3+4" + ")" * 51,
    "2*3+4" + " " * 100 + "(",
    # long ones
    "9**9**9**9",
    "1" * 1_000_000,
    "9" * 90 + "*2+3",
    "2*3+4+" * 200_000,
    "<answer>" * 125_000,
    "</answer>" * 111_000,
    "<answer>" + "a" * 1_000_000 + "</answer>",
    "<answer>2*3+4" * 70_000,
    "\0" * 1_000_000,
    "\ud800" * 1_000_000,
    "</answe" * 140_000,
    "answer>" * 140_000,
]


# a deadline and no measure: each takes milliseconds, and would take hours if its time grew with
# the square of its length
@pytest.mark.timeout(60)
@pytest.mark.parametrize("text", WRONG, ids=lambda text: ascii(text[:24]))
def test_these_are_wrong_without_an_exception_and_soon(text):
    assert countdown.reward(text, **ROW) == 0.0


def test_random_text_never_raises():
    rng = random.Random(0)
    for _ in range(5000):
        length = rng.randint(0, 40)
        text = "".join(rng.choices("223344+-*/() \n.,_=\0\ud800<answer></answer>", k=length))
        assert countdown.reward(text, TEN) in (0.0, 1.0)


@pytest.mark.filterwarnings("error::SyntaxWarning")
def test_nothing_warns_about_odd_expressions():
    for text in ("2(3)+4", "2 (3) (4)", "(2)(3)(4)", "2*3+(4)()"):
        assert countdown.reward(text, TEN) == 0.0


def test_a_hundred_characters_of_parentheses_are_the_limit():
    assert countdown.reward("(" * 47 + "2*3+4" + ")" * 47, TEN) == 1.0
    assert countdown.reward("(" * 48 + "2*3+4" + ")" * 48, TEN) == 0.0


@pytest.mark.parametrize(
    "answer",
    [
        {"numbers": ["2", "3", "4"], "target": 10},
        {"numbers": [2, 3, 4], "target": "10"},
        {"numbers": "2,3,4", "target": 10},
        {"numbers": [], "target": 10},
        {"numbers": [-1, 2], "target": 1},
        {"numbers": [1.5, 2], "target": 3},
        {"numbers": [math.nan, 2], "target": 3},
        {"numbers": [math.inf, 2], "target": 3},
        {"target": 3},
        "24",
    ],
)
def test_an_answer_that_nothing_could_match_is_an_error_and_not_0(answer):
    with pytest.raises(ValueError, match=r"^countdown: the answer must"):
        countdown.reward("1", answer)
