"""tasks/mathematics.py: the answer that a text states, and whether it has the right value."""

import math
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tasks
from tasks.mathematics import answer_block, last_boxed, math_exact, math_reward, stated_answer


def test_mathematics_has_rewards_and_is_no_dataset():
    assert "mathematics" not in tasks.NAMES and tasks.module("mathematics") is None
    assert "countdown" in tasks.NAMES


# --- finding the answer


def slow_box(text: str) -> str | None:
    """The content of the complete box that opens last, by counting from each opening."""
    for opening in reversed(list(re.finditer(r"\\boxed *\{", text))):
        start = opening.end()
        depth = 1
        for i in range(start, len(text)):
            before = text[:i]
            backslashes = len(before) - len(before.rstrip("\\"))
            if backslashes % 2 == 0:  # an odd one is the brace's own
                depth += (text[i] == "{") - (text[i] == "}")
            if depth == 0:
                return text[start:i]
    return None


def slow_block(text: str) -> str | None:
    starts = [i for i in range(len(text)) if text.startswith("<answer>", i)]
    for start in reversed(starts):
        if "</answer>" in text[start:]:
            return text[start + 8 : text.index("</answer>", start)]
    return None


PARTS = ["\\boxed{", "\\boxed ", "{", "}", "\\{", "\\}", "\\\\", "<answer>", "</answer>", "1", "2"]


@settings(max_examples=500)
@given(st.lists(st.sampled_from(PARTS), max_size=14).map("".join))
def test_boxes_and_answers_are_those_that_a_slow_search_finds(text):
    assert last_boxed(text) == slow_box(text)
    span = answer_block(text)
    block = text[slice(*span)] if span else None
    assert block == slow_block(text)
    assert stated_answer(text) in (slow_box(text), block, slow_box(block or ""))


@pytest.mark.parametrize(
    "text, answer",
    [
        ("", None),
        ("5", None),
        ("\\boxed{5}", "5"),
        ("<answer>5</answer>", "5"),
        ("\\boxed{4} <answer>5</answer>", "5"),
        ("<answer>4</answer> \\boxed{5}", "5"),
        ("<answer>so \\boxed{5}.</answer>", "5"),
        ("<answer>\\boxed{4}\\boxed{5}</answer>", "5"),
        ("<answer>\\boxed{5</answer>", "\\boxed{5"),
        ("<answer></answer>", ""),
        ("\\boxed{{5}}", "{5}"),
        ("\\boxed{\\frac{1}{2}}", "\\frac{1}{2}"),
        ("\\boxed{4}" + "x" * 10_000, None),
        ("<answer>" + "5" * 10_000 + "</answer>", None),
    ],
)
def test_the_stated_answer_is_the_box_or_block_that_closes_last(text, answer):
    assert stated_answer(text) == answer


@pytest.mark.parametrize(
    "text, content",
    [
        (r"so \boxed{4}", "4"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{1} then \boxed{2}", "2"),
        (r"\boxed{a{b{c}}d} end}", "a{b{c}}d"),
        (r"\boxed{1} and \boxed{2", "1"),
        (r"\boxed{never", None),
        ("4", None),
        (r"\boxed 4", None),
        (r"\boxed{4} or \boxed {5}", "5"),
        ("\\boxed\n{5}", "5"),
        (r"\boxed{}", ""),
        (r"\boxed{\left\{ x > 1 \right.}", r"\left\{ x > 1 \right."),
        (r"\boxed{1 \\}", r"1 \\"),
        (r"\boxed{\boxed{3}}", "3"),
        ("", None),
    ],
)
def test_the_last_complete_box_counts(text, content):
    assert last_boxed(text) == content


def test_a_megabyte_of_open_boxes_is_answered():
    """A scan that is quadratic would take hours: beyond the time limit of every test."""
    for text in (
        r"\boxed{" * 100_000,
        "{" * 500_000,
        r"\boxed{" + "}" * 500_000,
        r"\boxed{" + "9" * 500_000 + "}",
    ):
        assert math_reward(text, "4") == 0.0


# --- the right value


WORKING = "Natalia sold 48/2 = <<48/2=24>>24 clips in May.\nTogether that is 1080.\n#### "


@pytest.mark.parametrize(
    "reward, text, gold",
    [
        (math_reward, "\\boxed{1,080}", "1,080"),
        (math_exact, "<answer>1080</answer>", "1080"),
    ],
)
def test_an_answer_of_gsm8k_is_what_follows_its_working(reward, text, gold):
    assert reward(text, WORKING + gold) == 1.0
    assert reward(text.replace("1", "2", 1), WORKING + gold) == 0.0
    assert reward("\\boxed{24}<answer>24</answer>", WORKING + gold) == 0.0


@pytest.mark.parametrize("reward", [math_reward, math_exact])
@pytest.mark.parametrize(
    "solution, right, wrong",
    [
        ("Suppose $a = 10_3 = 3$. Then $1010_2 = \\boxed{10}$.", "10", "3"),
        ("We have $x = 2$ and $x = 3$, so the pair is $\\boxed{(1,2)}$.", "(1,2)", "(2,3)"),
        ("First \\boxed{3}, in all <answer>18</answer>", "18", "3"),
        ("2 + 2 = 4\n####4", "4", "2"),
    ],
)
def test_an_answer_may_be_a_whole_solution(reward, solution, right, wrong):
    for said, value in ((right, 1.0), (wrong, 0.0)):
        # math_exact reads the tags
        assert reward(f"\\boxed{{{said}}} <answer>{said}</answer>", solution) == value


@pytest.mark.parametrize(
    "box, gold, value",
    [
        ("5", "5", 1),
        ("4", 4, 1),
        ("5.0", "5", 1),
        ("05", "5", 1),
        ("-0", "0", 1),
        ("1/2", "0.5", 1),
        ("\\frac12", "1/2", 1),
        ("\\dfrac{2}{4}", "0.5", 1),
        ("2\\frac{1}{2}", "5/2", 1),
        ("-\\frac{1}{2}", "\\frac{-1}{2}", 1),
        ("\\sqrt{2}/2", "\\frac{1}{\\sqrt{2}}", 1),
        ("2\u03c0r", "2\\pi r", 1),
        ("x\u2264y", "x \\le y", 1),
        ("x=5", "5", 1),
        ("50\\%", "0.5", 1),
        ("5\\text{ cm}", "5", 1),
        ("1{,}000", "1000", 1),
        ("10,000", "10000", 1),
        ("\\{1,2\\}", "\\{2,1\\}", 1),
        ("(1,2)", "(1, 2)", 1),
        ("[0,1)", "[0,1)", 1),
        ("(-\\infty, 3]", "(-\\infty,3]", 1),
        ("(x+1)^2", "x^2+2x+1", 1),
        ("3+2i", "2i+3", 1),
        ("\\text{yes}", "yes", 1),
        ("  5  ", " 5 ", 1),
        ("1010_2", "1010_2", 1),
        ("52_{8}", "52_8", 1),
        ("52_8", "52_{8}", 1),
        ("12.", "12", 1),
        ("12", "12.", 1),
        ("1,234;", "1234", 1),
        ("3/4 .", "3/4", 1),
        ("(1,2),", "(1,2)", 1),
        ("Paris.", "Paris", 1),
        ("5\\,", "5", 1),
        ("2\\sqrt{3}", "\\sqrt{12}", 1),
        ("x+1", "1+x", 1),
        ("-3", "3", 0),
        ("50", "5", 0),
        ("5", "-5", 0),
        ("2\\frac{1}{2}", "21/2", 0),
        ("1/2", "2", 0),
        ("1/2", "12", 0),
        ("0.33", "1/3", 0),
        ("(1,2)", "(2,1)", 0),
        ("(1,2)", "[1,2]", 0),
        ("[0,1)", "[0,1]", 0),
        ("\\{1,2\\}", "\\{1,2,3\\}", 0),
        ("\\{1\\}", "\\{1,2\\}", 0),
        ("5,6", "5", 0),
        ("5 \\text{ or } 6", "5", 0),
        ("x<5", "x>5", 0),
        ("x^2", "x^3", 0),
        ("5", "", 0),
        ("", "5", 0),
        ("5", "five", 0),
        ("5.001", "5", 0),
        ("1010_2", "1010_3", 0),
        ("52_{8}", "52_{9}", 0),
        ("12.", "1.2", 0),
        ("0.333", "0.333...", 0),
        (".", "5", 0),
        (".", ".", 0),
        ("10", "1010_2", 0),
        ("10_2", "1010_2", 0),
        ("10101", "10101_2", 0),
        # thousands
        ("10\\,000", "10000", 1),
        ("10 000", "10000", 1),
        ("10~000", "10000", 1),
        ("10\u202f000", "10000", 1),
        ("10\\,000", "0", 0),
        ("25\\,000", "10\\,000", 0),
        # small numbers, powers of ten
        ("1e5", "100000", 1),
        ("10^{-7}", "0.0000001", 1),
        ("-10^5", "-100000", 1),
        ("1.6 \\cdot 10^{-19}", "1.6\\times 10^{-19}", 1),
        ("3.2\\times10^{-19}", "1.6\\times10^{-19}", 0),
        ("0.0", "6.63 \\times 10^{-34}", 0),
        ("0.0000001", "0.0000005", 0),
        # words are no products of letters
        ("alice", "Alice", 1),
        ("\\mathrm{even}", "even", 1),
        ("Celia", "Alice", 0),
        ("ABC", "BAC", 0),
        ("VI", "IV", 0),
        ("yx", "xy", 1),
        ("zyx", "xyz", 1),
        ("Ah", "hA", 1),
        # numbers in units are no guesses
        ("9.8\\,\\mathrm{m/s^2}", "9.8", 1),
        ("12\\text{ cm$^2$}", "12", 1),
        ("x\\equiv 3\\text{ (mod 7)}", "3", 1),
        ("(\\text{5})", "5", 1),
        # no bases
        ("x_1^2+x_2^2", "x^2_1+x^2_2", 1),
        # symbols
        ("\u221a1.44", "1.2", 1),
        ("\u221a1.44", "0.44", 0),
        ("\u221a12", "2\\sqrt3", 1),
        ("\u221a(3)/2", "\\frac{\\sqrt{3}}{2}", 1),
        ("\u20ac18", "18", 1),
        # words, with or without \text
        ("\\text{All real numbers}", "All real numbers", 1),
        ("\\text{12 apples}", "12 apples", 1),
        ("\\text{12 pears}", "Type II", 0),
        # a choice listed with its text
        ("B. 12", "B", 1),
        ("B) 12", "B", 1),
        ("\\text{B) }12", "B", 1),
        ("C. 12", "B", 0),
        ("B: 5, A: 6", "B", 0),
        ("\\mathbb R", "\\mathbb{R}", 1),
        ("\\mathbb Z", "\\mathbb{R}", 0),
        ("5\u3002", "5", 1),
    ],
)
def test_math_compares_values(box, gold, value):
    for text in (
        f"\\boxed{{{box}}}",
        f"I get \\boxed{{{box}}}.",
        f"So <answer>{box}</answer>",
        f"<answer>$\\boxed{{{box}}}$.</answer>",
        f"\\boxed{{99}} \\boxed{{{box}}}",
        f"\\boxed{{\\boxed{{{box}}}}}",
    ):
        assert math_reward(text, gold) == value
    for text in (
        box,
        f"${box}$",
        f"The answer is {box}.",
        f"\\boxed{{{box}",
        f"<answer>{box}",
        f"\\boxed{{{box}}} \\boxed{{99}}",
        f"<think>\\boxed{{{box}}}</think><answer>99</answer>",
    ):
        assert math_reward(text, gold) == 0.0


@pytest.mark.parametrize(
    "box, gold",
    [
        ("12\\text{ or 13 or 14}", "12"),
        ("5\\text{, 6, 7 or 8}", "5"),
        ("\\frac12\\mbox{ or 2/3}", "\\frac12"),
        ("12\\textit{ or 13}", "12"),
        ("x+1\\text{ or x-1}", "x+1"),
        ("5\\text{(or }6\\text{)}", "5"),
    ],
)
def test_a_second_guess_in_words_makes_an_answer_wrong(box, gold):
    assert math_reward(f"\\boxed{{{box}}}", gold) == 0.0
    assert math_reward(f"\\boxed{{{box}}}", box) == 1.0
    assert math_reward("\\boxed{1\\text{ or }2}", "1,2") == 1.0


@pytest.mark.parametrize(
    "box, gold",
    [
        ("\\ne 5", "5"),
        ("\\neg 5", "5"),
        ("x \\not= 5", "5"),
        ("\\geq 5", "5"),
        ("x < 5", "5"),
        ("13 \\bmod 8", "5"),
        ("7 \\lor 13", "13"),
        ("7 \\cup 13", "13"),
        ("7? 13", "13"),
        ("5:15", "10:30"),
        ("1/3", "10:30"),
        ("2022", "2025-01-02"),
        ("-5", "1990-1995"),
    ],
)
def test_what_is_said_of_a_number_is_not_the_number(box, gold):
    assert math_reward(f"\\boxed{{{box}}}", gold) == 0.0


@pytest.mark.parametrize(
    "box, gold",
    [
        ("5\\ ", "5"),
        ("~5~", "5"),
        ("{}5", "5"),
        ("5", "5\\ "),
        ("10:30", "10:30"),
        ("2025-01-02", "2025-01-02"),
        ("x \\le 5", "x \\le 5"),
        ("(-\\infty,5)", "x<5"),
        ("[1,2) \\cup (3,4]", "[1,2)\\cup(3,4]"),
    ],
)
def test_margins_are_ignored_and_signs_compared_where_gold_has_them(box, gold):
    assert math_reward(f"\\boxed{{{box}}}", gold) == 1.0


def test_a_number_may_be_gold():
    assert math_reward("\\boxed{5}", 5) == 1.0
    assert math_reward("\\boxed{0.5}", 0.5) == 1.0
    assert math_exact("<answer>5</answer>", 5) == 1.0
    # Python writes them 1e-05 and 1e+16
    assert math_reward("\\boxed{0.00001}", 0.00001) == 1.0
    assert math_reward("\\boxed{e-5}", 0.00001) == 0.0
    assert math_reward("\\boxed{10000000000000000}", 1e16) == 1.0
    for right in ("1e21", "1e+21", "1{,}000{,}000{,}000{,}000{,}000{,}000{,}000", "10^{21}"):
        assert math_reward(f"\\boxed{{{right}}}", 1e21) == 1.0
    for wrong in ("1e20", "1000000000000000000001", "1e-21"):
        assert math_reward(f"\\boxed{{{wrong}}}", 1e21) == 0.0
    assert math_reward("\\boxed{1.5e-30}", 1.5e-30) == 1.0


@pytest.mark.parametrize(
    "given, gold",
    [
        ("\\{-1,5\\}", "(-1,5)"),
        ("x=-1\\text{ or }x=5", "(-1,5)"),
        ("x=-1 \\text{ or } x=5", "-1<x<5"),
        ("\\pm 2", "-2<x<2"),
        ("(0,1)", "\\{0,1\\}"),
        ("(0,1)", "x=0\\text{ or }x=1"),
        ("(-2,2)", "\\pm 2"),
        ("(4,3)", "x=3,y=4"),
        ("4,3", "x=3,y=4"),
        ("\\{4,3\\}", "x=3,y=4"),
        ("(3,2,1)", "a=1,b=2,c=3"),
        ("(3,-2)", "x=-2, y=3"),
        ("(4,3)", "x=3 \\text{ and } y=4"),
        ("(x,y)=(4,3)", "x=3,y=4"),
        ("x=4,y=3", "x=3,y=4"),
        ("0.1", "3:30\\text{ PM}"),
        ("3:30\\text{ AM}", "3:30\\text{ PM}"),
        ("3\\text{ p.m.}", "3\\text{ a.m.}"),
        ("5\\text{ million}", "5"),
        ("5\\text{ billion}", "5\\text{ million}"),
        ("5\\text{ thousand}", "5"),
        ("5\\text{ dozen}", "5"),
        ("5\\text{ feet }6\\text{ inches}", "5\\text{ feet }7\\text{ inches}"),
        ("5\\text{ h }30\\text{ min}", "5\\text{ h }40\\text{ min}"),
        ("1,2,3,\\ldots", "1,2,3"),
        ("1,2,\\ldots,10", "1,2,10"),
        ("5\\ldots", "5"),
        ("6 \\to 5", "5"),
        ("6 \\rightarrow 5", "5"),
        ("6 \\longrightarrow 5", "5"),
        ("6\\Rightarrow 5", "5"),
        ("x=5 \\implies y=6", "6"),
        ("\\angle BAC", "\\angle ABC"),
        ("(A) or (B)", "A"),
        ("2,1", "(1,2)"),
        ("x=2,y=1", "(1,2)"),
        ("x=-5, y=2", "(2,-5)"),
        ("31,6,-1", "(6,31,-1)"),
        ("1 \\text{ and } -1", "(-1,1)"),
        ("5<x<6", "5,6"),
        ("-2<x<7", "[-2,7]"),
        ("x>5", "[5,\\infty)"),
        ("June 21", "\\text{June 20}"),
    ],
)
def test_answers_of_another_kind_or_order_are_wrong(given, gold):
    assert math_reward(f"\\boxed{{{given}}}", gold) == 0.0


@pytest.mark.parametrize(
    "given, gold",
    [
        ("(3,4)", "x=3,y=4"),
        ("3,4", "x=3,y=4"),
        ("y=4, x=3", "x=3,y=4"),
        ("(x,y)=(3,4)", "x=3,y=4"),
        ("x=3\\text{ and }y=4", "x=3,y=4"),
        ("x=3,\\quad y=4", "x=3,y=4"),
        ("x=3,\\;y=4", "x=3,y=4"),
        ("(x,y)=(3,4)", "(x,y)=(3,4)"),
        ("(3,4)", "(x,y)=(3,4)"),
        ("x=\\frac{1}{2}, y=4", "x=0.5,y=4"),
        ("3:30\\text{ p.m.}", "3:30\\text{ PM}"),
        ("3:30", "3:30\\text{ PM}"),
        ("5\\text{ million}", "5000000"),
        ("2.5\\text{ million dollars}", "2500000"),
        ("5,000,000", "5\\text{ million}"),
        ("5\\text{ ft }7\\text{ in}", "5\\text{ ft }7\\text{ in}"),
        ("5 ft 7 in", "5\\text{ ft }7\\text{ in}"),
        ("1,2,3,\\ldots", "1,2,3,\\ldots"),
        ("\\angle CBA", "\\angle ABC"),
        ("\\text{(A) } 5", "A"),
        ("\\textbf{(A)}\\ 5", "A"),
        ("\\text{Option A}", "A"),
        ("(A)", "A"),
        ("A", "A"),
        ("\\varnothing", "\\emptyset"),
        ("½", "1/2"),
        ("1/2", "½"),
        ("\\{1,2\\}", "\\{2,1\\}"),
        ("(1,2)", "(1,2)"),
        ("1<x<2", "(1,2)"),
        ("(1,2)", "1<x<2"),
        ("3,4", "(3,4)"),
        ("x=1,x=2", "\\{1,2\\}"),
        ("1,2", "\\{1,2\\}"),
        ("x=1\\text{ or }x=2", "1,2"),
        ("5", "5 "),
        ("\\left(1,2\\right)", "(1,2)"),
        ("‑12", "-12"),
        ("x=2", "2"),
        ("\\pm 2", "\\{-2,2\\}"),
        ("x=1,y=2", "(1,2)"),
        ("x \\ge 0", "[0,\\infty)"),
        ("-2 \\le x \\le 7", "[-2,7]"),
        ("0 \\le x < 1", "\\left[0,1\\right)"),
        ("x \\le 5", "(-\\infty,5]"),
        ("5~\\mathrm{kg}", "5"),
        ("8", "8~\\mathrm{cm}"),
        ("June 20", "\\text{June 20}"),
        ("2 red, 3 blue", "\\text{2 red, 3 blue}"),
    ],
)
def test_times_names_magnitudes_and_choices_are_read(given, gold):
    assert math_reward(f"\\boxed{{{given}}}", gold) == 1.0


@pytest.mark.parametrize("gold", [math.nan, math.inf])
def test_no_number_is_no_gold(gold):
    for reward in (math_reward, math_exact):
        with pytest.raises(ValueError, match="must be a finite number"):
            reward(f"\\boxed{{{gold}}}<answer>{gold}</answer>", gold)


def test_an_answer_inside_of_a_json_object_is_refused():
    """As SYNTHETIC-1 has it: compared as mathematics it would equal nothing. A list is read."""
    for gold in ('{"ground_truth": "4"}', '{"answer": 4}', ' {\n  "answer" : 4\n}'):
        for reward in (math_reward, math_exact):
            with pytest.raises(ValueError, match="JSON object"):
                reward("\\boxed{4}<answer>4</answer>", gold)
    assert math_reward("\\boxed{4}", '["4"]') == 1
    assert math_reward("\\boxed{4}", '{"thought": "2 + 2"}\n#### 4') == 1
    assert math_reward("\\boxed{4}", '{"ground_truth": "it is \\boxed{4}"}') == 1
    assert math_reward('<answer>{"x": 2, "y": 3}</answer>', '{"x":2, "y":3}') == 1
    assert math_reward("\\boxed{\\{1,2\\}}", "\\{1,2\\}") == 1


def test_an_answer_of_1000_characters_is_fine_and_one_of_1001_is_none():
    assert math_exact(f"<answer>{' ' * 999}5</answer>", "5") == 1.0
    assert math_exact(f"<answer>{' ' * 1000}5</answer>", "5") == 0.0
    assert math_reward("\\boxed{" + "0" * 999 + "5}", "5") == 1.0
    assert math_reward("\\boxed{" + "0" * 1000 + "5}", "5") == 0.0


def test_an_empty_answer_is_never_right():
    assert math_exact("<answer></answer>", "") == 0.0
    assert math_exact("<answer>$</answer>", "{}") == 0.0
    assert math_reward("\\boxed{}", "") == 0.0


@pytest.mark.parametrize(
    "gold, right",
    [
        ("10", []),
        ("1010_2", ["\\boxed{1010_2}"]),
        ("-5", ["\\boxed{\u22125}"]),
    ],
)
def test_an_underscore_is_a_base_and_a_minus_sign_a_minus(gold, right):
    for text in (
        "\\boxed{1_0}",
        "\\boxed{1010_2}",
        "\\boxed{1010_3}",
        "\\boxed{\u22125}",
        "\\boxed{\u066a5}",
    ):
        assert math_reward(text, gold) == float(text in right)


def test_math_reward_survives_hostile_text():
    for box in (
        "__import__('os').system('false')",
        "\x00",
        r"\frac{1}{0}",
        "(" * 9,
        "\ud83d",
        r"\text{" * 9,
        "9" * 1000,
        "None",
    ):
        assert math_reward(f"\\boxed{{{box}}}", "4") == 0.0
