"""tasks/mathematics.py: spellings of one answer have one canonical form, and no others do."""

import itertools
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tasks.mathematics import canonical_math, math_exact

EQUAL = [
    (
        "5",
        " 5 ",
        "$5$",
        "{5}",
        "(5)",
        "5.0",
        "5.000",
        "$ 5.0 $",
        "\\left(5\\right)",
        "\\$5",
        "( 5 )",
        "\\,5",
        "5\\ ",
    ),
    ("0", "-0", "-0.0", "0.0", "(-0)", "\u22120", "{0}"),
    ("-5", "\u22125", "\u20135", "- 5", "-5.0", "\uff0d5"),
    ("12", "12.0"),
    ("1 2", "1\\,2", "1  2", "$1$ $2$"),
    ("12000000", "12 000 000", "12\\,000\\;000"),
    (
        "1/2",
        "\\frac{1}{2}",
        "\\frac12",
        "\\dfrac{1}{2}",
        "\\tfrac12",
        "{1/2}",
        "(1/2)",
        "$\\frac{1}{2}$",
        "\\frac{1.0}{2}",
        "\\frac { 1 } { 2 }",
        "1 / 2",
    ),
    ("-1/2", "-\\frac{1}{2}", "-\\frac12"),
    ("2\\pi", "2\u03c0", "2 \\pi", "$2\\pi$", "{2\u03c0}"),
    ("2\\pi/3", "\\frac{2\\pi}{3}", "\\frac{2\u03c0}{3}"),
    ("\\pi/2", "\\frac{\\pi}{2}", "\u03c0/2"),
    ("x^2", "x\u00b2", "x ^ 2"),
    ("90^\\circ", "90\u00b0"),
    ("(-\\infty,3]", "\\left(-\\infty, 3\\right]", "(-\u221e,3]"),
    ("(1,2)", "1,2", "\\left( 1, 2 \\right)", "{1,2}", "(1.0,2)", "(1, 2.00)"),
    ("\\{1,2\\}", "\\left\\{1, 2\\right\\}"),
    ("x\\le5", "x \u2264 5"),
    ("3\\times4", "3\u00d74"),
    ("(a+b)/2", "\\frac{a+b}{2}"),
    ("1/(2x)", "\\frac{1}{2x}"),
    ("1/(1/2)", "\\frac{1}{\\frac{1}{2}}"),
    ("x_1", "x _ 1"),
    ("(1)(2)", "( 1 ) ( 2 )"),
]
DIFFERENT = [
    ("1/2", "12"),
    ("1 2", "12"),
    ("2 3 4", "234"),
    ("1 2000", "12000"),
    ("1/2", "0.5"),
    ("1/2", "2/1"),
    ("-0.5", "0.5"),
    ("-0.5", "0"),
    ("(1)(2)", "1)(2"),
    ("{1}{2}", "1}{2"),
    ("10", "1.0"),
    ("10", "1"),
    ("100", "1.00"),
    ("5.01", "5.1"),
    ("5.01", "5"),
    ("0.05", "5"),
    ("-05", "5"),
    ("1.05", "15"),
    ("1.0x5", "1.05"),
    ("-1", "1"),
    ("x-0", "x0"),
    ("(1,2)", "[1,2]"),
    ("(1,2]", "(1,2)"),
    ("(1,2]", "1,2"),
    ("\\{1,2\\}", "1,2"),
    ("\\{1,2\\}", "(1,2)"),
    ("\\pi", "pi"),
    ("\\pi", "p"),
    ("\\leftarrow", "arrow"),
    ("\\rightarrow", "arrow"),
    ("2\\frac{1}{2}", "21/2"),
    ("2 1/2", "21/2"),
    ("2\\ 1/2", "21/2"),
    ("2\\,1/2", "21/2"),
    ("-2  1/2", "-21/2"),
    ("2\\frac12", "\\frac{21}{2}"),
    ("\\frac123", "1/23"),
    ("\\frac{1}{2}3", "\\frac{1}{23}"),
    ("\\frac{1}{2}x", "\\frac{1}{2x}"),
    ("\\frac{1}{2}\\pi", "\\frac{1}{2\\pi}"),
    ("\\frac{1}{\\frac{2}{3}}", "\\frac{\\frac{1}{2}}{3}"),
    ("x^\\frac{1}{2}", "\\frac{x^1}{2}"),
    ("\\frac{1}{2}^2", "1/2^2"),
    ("1/\\frac{2}{3}", "1/2/3"),
    ("\\sqrt\\frac12", "\\frac{\\sqrt1}{2}"),
    ("\\frac{a+b}{2}", "a+b/2"),
    ("\\frac{1}{a+b}", "1/a+b"),
    ("\\frac{1}{2}.5", "1/2.5"),
    ("x^{2}", "x{2}"),
    ("x_{12}", "x_12"),
    ("5", "five"),
    ("5", "\u0665"),
    ("5", "\uff15"),
    ("5", "5\0"),
    ("5", "5\u200b"),
    ("1_0", "10"),
    ("1,000", "1000"),
    ("", "0"),
    ("((5))", "5"),
    ("50\\%", "50"),
    ("5!", "5"),
    ("--5", "5"),
    ("1.0.0", "1.0"),
    ("0.0", ""),
    ("-0", ""),
    ("-0x", "x"),
    ("2-0", "20"),
    ("a", "A"),
]


@pytest.mark.parametrize("spellings", EQUAL, ids=lambda spellings: spellings[0])
def test_spellings_of_one_answer_have_one_canonical_form(spellings):
    assert {canonical_math(text) for text in spellings} == {canonical_math(spellings[0])}
    for gold, text in itertools.product(spellings, repeat=2):
        assert math_exact(f"<think>7</think><answer>{text}</answer>", gold) == 1.0
        assert math_exact(f"{text} <answer>7</answer> \\boxed{{{text}}}", gold) == 0.0
        assert math_exact(text, gold) == 0.0
        assert math_exact(f"<answer>{text}", gold) == 0.0


@pytest.mark.parametrize("one, other", DIFFERENT)
def test_different_answers_stay_different(one, other):
    assert canonical_math(one) != canonical_math(other)
    assert math_exact(f"<answer>{one}</answer>", other) == 0.0
    assert math_exact(f"<answer>{other}</answer>", one) == 0.0


NUMBERS = {text: Fraction(text) for text in ("1", "2", "12", "21", "1.0", "2.1", "0.5")}


def fractions_of(s: str, a: Fraction, t: str, b: Fraction) -> dict[str, Fraction]:
    """LaTeX that joins the numbers s = a and t = b by a fraction and something beside it."""
    return {
        f"2\\frac{{{s}}}{{{t}}}": 2 + a / b,
        f"\\frac{{{s}}}{{{t}}}2": a / b * 2,
        f"\\frac{{{s}}}{{{t}}}({s})": a / b * a,
        f"({s}){{{t}}}": a * b,
    }


def joined(s: str, a: Fraction, t: str, b: Fraction) -> dict[str, Fraction]:
    """LaTeX that joins the terms s = a and t = b, with the values as a reader sees them."""
    terms = {}
    if b:
        terms[f"\\frac{{{s}}}{{{t}}}"] = a / b
    if s in NUMBERS and t in NUMBERS and "." not in s + t:
        terms |= fractions_of(s, a, t, b)
    is_fraction = t.startswith("\\frac") and t.endswith("}")
    if s in NUMBERS and b and (t in NUMBERS or is_fraction):
        terms[f"{s}/{t}"] = a / b
    if s in NUMBERS:
        terms[f"{s}+{t}"] = a + b
        terms[f"{s}-{s}+{t}"] = b
        terms[f"-({s}-{t})"] = b - a
    return terms


def terms_and_values() -> dict[str, Fraction]:
    terms = dict(NUMBERS)
    for _ in range(2):
        level = list(terms.items())[:120]
        for (s, a), (t, b) in itertools.product(level, repeat=2):
            terms |= joined(s, a, t, b)
    return terms


def test_no_two_terms_of_different_value_share_a_canonical_form():
    """Of 2\\frac{1}{2}, 21/2 and \\frac{21}{2} only the last two are equal."""
    values = terms_and_values()
    assert len(values) > 10_000
    seen = {}
    for text, value in values.items():
        for spelling in (text, text.replace("{", " { "), f"${text}$"):
            assert seen.setdefault(canonical_math(spelling), value) == value, spelling


PARTS = ["1", "0", ".", ".0", "-", "x", "\\pi", "\\frac{1}{2}", "\\frac", "{", "}", "(", ")"]
PARTS += ["\\left", "\\right", "$", " ", "+", "\u03c0", "\u2212", "\\", "a", "\ud800", "\0"]


@settings(max_examples=300)
@given(st.lists(st.sampled_from(PARTS), max_size=30).map("".join))
def test_canonical_math_takes_any_text(text):
    canonical = canonical_math(text)
    assert isinstance(canonical, str) and len(canonical) <= 4 * len(text)


ATOMS = ["1", "0", "-0", "2.0", "0.5", "x", "\\pi", "\u03c0", "10", "1.00", "\u22125"]


def larger(terms):
    return st.one_of(
        st.tuples(terms, terms).map(lambda pair: f"\\frac{{{pair[0]}}}{{{pair[1]}}}"),
        st.tuples(terms, st.sampled_from("+-,/=^"), terms).map("".join),
        terms.map(lambda term: f"\\left({term}\\right)"),
        terms.map(lambda term: f"\\sqrt{{ {term} }}"),
    )


@settings(max_examples=300)
@given(st.recursive(st.sampled_from(ATOMS), larger, max_leaves=8))
def test_a_canonical_form_is_its_own_but_for_the_one_outer_pair(text):
    """Of outer pairs one is taken each time: ((5)) is (5), as the rule says. So there is none."""
    once = canonical_math(f"x={text}")
    assert canonical_math(once) == once


@pytest.mark.parametrize(
    "text",
    [
        "\\frac{" * 166,
        "\\frac{1}{" * 111,
        "\\frac" * 200,
        "(" * 1000,
        "()" * 500,
        "-0" * 500,
        "1.0" * 333,
        "0" * 1000,
        "0." * 500,
        "$" * 1000,
        "\\left" * 200,
        "\\frac{\\a" + "b" * 980 + "!}{2}",
        "\\frac{" + "\\a" * 490 + "!}{2}",
        "\\frac{" + "\\ab" * 300 + "!}{2}",
        "\\frac{1}{" + "a" * 980 + "!}",
        "\\frac{1}{2}" * 90,
        "{" * 500 + "}" * 500,
    ],
    ids=lambda text: text[:12],
)
def test_canonical_math_of_a_thousand_characters_comes_to_an_end(text):
    """A pattern that backtracks would go beyond the time limit of every test."""
    assert len(canonical_math(text)) <= 4 * len(text)
