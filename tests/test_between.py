"""tasks/between.py: which numbers are right, and what of a hostile text counts as one."""

from collections import Counter

import pytest
from test_countdown import WRONG

from tasks import between

EVEN = {"low": 3, "high": 9, "divisor": 2, "rest": 0}
FULL_WIDTH_FOUR = "\N{FULLWIDTH DIGIT FOUR}"


def test_the_ends_are_not_between():
    assert between.modes(EVEN) == {"4", "6", "8"}
    assert between.modes(EVEN | {"low": 4, "high": 8}) == {"6"}
    assert between.modes(EVEN | {"divisor": 5}) == {"5"}


@pytest.mark.parametrize(
    "text, value",
    [
        ("4", 1.0),
        (" 6.\n", 1.0),
        ("<think>5</think><answer>8</answer>", 1.0),
        ("<answer>5</answer><answer>4</answer>", 1.0),
        ("2", 0.0),
        ("3", 0.0),
        ("5", 0.0),
        ("10", 0.0),
        ("4, 6", 0.0),
        ("4 or 6", 0.0),
        ("four", 0.0),
        ("+4", 0.0),
        ("04", 0.0),
        ("4.0", 0.0),
        ("4..", 0.0),
        (FULL_WIDTH_FOUR, 0.0),
        ("4" * 300_000, 0.0),
    ],
    ids=lambda x: ascii(x)[:24],
)
def test_one_number_of_the_kind_and_nothing_else(text, value):
    assert between.reward(text, EVEN, id="x", task="between") == value


@pytest.mark.timeout(60)
@pytest.mark.parametrize("text", WRONG, ids=lambda text: ascii(text[:24]))
def test_these_are_wrong_without_an_exception_and_soon(text):
    assert between.reward(text, EVEN | {"low": 1000, "high": 1001}) == 0.0


def test_a_prompt_says_what_its_answer_asks_for():
    kinds = {"even": (2, 0), "odd": (2, 1), "multiple of 3": (3, 0), "multiple of 5": (5, 0)}
    for row in between.rows("test", -1, 0):
        kind = next(words for words in kinds if words in row["prompt"])
        answer = row["answer"]
        assert kinds[kind] == (answer["divisor"], answer["rest"])
        assert f"between {answer['low']} and {answer['high']}." in row["prompt"]


def kinds_of(rows: list[dict]) -> dict:
    """The share of each kind, and of the number of right answers."""
    counts = Counter()
    for row in rows:
        counts["divisor", row["answer"]["divisor"], row["answer"]["rest"]] += 1
        counts["modes", row["num_modes"]] += 1
    return {key: count / len(rows) for key, count in counts.items()}


def test_what_is_held_out_is_no_easier_than_what_is_trained_on():
    train = kinds_of(between.rows("train", -1, 0))
    test = kinds_of(between.rows("test", -1, 0))
    assert train.keys() == test.keys()
    for key, share in train.items():
        # four standard errors of a share in a sample of 256
        assert abs(share - test[key]) < 4 * (share * (1 - share) / 256) ** 0.5
