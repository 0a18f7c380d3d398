"""tasks/between.py: what counts as a number between two, and what is held out."""

import pytest
from test_countdown import WRONG

from tasks import between

ENDS = {"low": 28, "high": 38}


@pytest.mark.parametrize(
    "text, value",
    [
        ("29", 1.0),
        (" 37\n", 1.0),
        ("0033", 1.0),
        ("28", 0.0),
        ("38", 0.0),
        ("-30", 0.0),
        ("30.0", 0.0),
        ("30 31", 0.0),
        ("It is 30.", 0.0),
        ("thirty", 0.0),
        ("\N{ARABIC-INDIC DIGIT THREE}\N{ARABIC-INDIC DIGIT ONE}", 0.0),
        ("3" * 5000, 0.0),  # int() refuses so many digits
    ],
    ids=lambda x: ascii(x)[:40],
)
def test_only_a_number_strictly_between_the_two_is_right(text, value):
    assert between.reward(text, ENDS, id="x", task="between") == value


def test_a_number_is_one_mode_however_it_is_written():
    assert between.mode("033", ENDS) == between.mode("33", ENDS) == "33"
    assert {between.mode(str(n), ENDS) for n in range(100)} == {*between.modes(ENDS), None}


# a deadline and no measure: see test_countdown.py
@pytest.mark.timeout(60)
@pytest.mark.parametrize("text", WRONG, ids=lambda text: ascii(text[:24]))
def test_these_are_wrong_without_an_exception_and_soon(text):
    assert between.reward(text, ENDS) == 0.0


@pytest.mark.parametrize(
    "answer",
    [
        [28, 38],
        {"low": 28},
        {"low": "28", "high": 38},
        None,
        {"low": 5, "high": 6},
        {"low": 9, "high": 5},
        {"low": -9, "high": 0},
        {"low": 10**12, "high": 10**12 + 5},
    ],
)
def test_an_answer_that_nothing_could_match_is_an_error_and_not_0(answer):
    with pytest.raises(ValueError, match=r"^between: the answer must"):
        between.reward("30", answer)


def test_the_examples_are_right_and_no_problem_repeats_one():
    pairs = sum(between.problems("tens").values(), [])  # noqa: RUF017
    for pair, number in between.EXAMPLES:
        assert between.reward(number, dict(zip(("low", "high"), pair, strict=True))) == 1.0
        assert pair not in pairs


def test_what_is_held_out_is_of_the_same_distribution():
    """Five standard errors of a mean over the 256 that are held out."""
    train, test = (between.rows(split, -1, 0) for split in ("train", "test"))
    assert len(test) == 256 and len(train) == 899
    for measure, deviation in (
        (lambda row: row["num_modes"], 4.4),
        (lambda row: row["answer"]["low"], 23),
    ):
        means = [sum(map(measure, rows)) / len(rows) for rows in (train, test)]
        assert abs(means[0] - means[1]) < 5 * deviation / 256**0.5
