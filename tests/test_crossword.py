"""tasks/crossword.py: letters-only equality, enumerations, hostile text, clues that lead to their
word and to no other."""

import random
import re
from collections import Counter

import pytest

from tasks import crossword
from tasks.crossword import canonical, mode, reward

CONFIGS = list(crossword.CONFIGS)
SILENT = {"answer": "SILENT", "enumeration": "6"}
ICE = {"answer": "ICE CREAM", "enumeration": "3,5"}
ROW = {
    "answer": SILENT,
    "id": "x",
    "task": "crossword",
    "prompt": "",
    "solutions": ["SILENT"],
    "num_modes": 1,
}


def all_rows(config: str) -> list[dict]:
    return crossword.rows("train", -1, 0, config) + crossword.rows("test", -1, 0, config)


# --- what is right


@pytest.mark.parametrize(
    "text",
    [
        "SILENT",
        "silent",
        " Silent\n",
        "Silent.",
        '"silent"',
        "**SILENT**",
        "`silent`",
        "SILENT (6)",
        "<answer>SILENT</answer>",
        "sílént",
        "SILE\N{COMBINING ACUTE ACCENT}NT",
        "\N{FULLWIDTH LATIN CAPITAL LETTER S}ILENT",
        "<think>LISTEN, ENLIST</think>\n<answer> silent </answer> done",
        "<answer>LISTEN</answer><answer>SILENT</answer>",
        "<answer>SILENT</answer> or <answer>LISTEN",
        "<answer>SILENT</answer></answer>",
        "S.I.L.E.N.T",
        "S\u200bILENT",
    ],
    ids=ascii,
)
def test_these_are_right(text):
    for answer in (SILENT, "SILENT", "si-lent", {"answer": "Silent"}):
        assert reward(text, answer) == reward(text, **ROW) == 1.0
        assert mode(text, answer) == "SILENT"


def test_letters_alone_count():
    assert canonical(" Ice-cream!") == canonical("ÍCE CRÈAM") == "ICECREAM"
    assert canonical("42 ?!\0\ud800") == ""
    assert canonical("Straße") == canonical("STRASSE")
    assert canonical("don't") == "DONT"
    assert reward("cafe", "CAFÉ") == reward("café", "CAFE") == reward("o'clock", "O’CLOCK") == 1.0
    assert reward("ЛЕС", "лес") == 1.0
    assert reward("LEC", "ЛЕС") == 0.0  # another script is other letters


@pytest.mark.parametrize(
    "text, enumeration, value",
    [
        ("ICE CREAM", "3,5", 1),
        ("ice-cream", "3,5", 1),
        ("ICECREAM", "3,5", 1),
        ("Ice  Cream!", "(3-5)", 1),
        ("ICE\nCREAM", "3 5", 1),
        ("ICE\N{EN DASH}CREAM", "3\N{EN DASH}5", 1),
        ("ICEC REAM", "3,5", 0),
        ("ICEC\N{EN DASH}REAM", "3,5", 0),
        ("IC ECREAM", "3,5", 0),
        ("I C E C R E A M", "3,5", 0),
        ("ICE C REAM", "3,5", 0),
        ("I-C-E-C-R-E-A-M", "3,5", 0),
        ("ICE CREAM", "8", 0),
        ("ICECREAM", "8", 1),
        ("ICECREAM", 8, 1),
        ("ICE CREAM", "5,3", 0),
        ("ICE - CREAM .", "3,5", 1),
        ("ICE CREAM (3,5)", "3,5", 1),
        ("ICE CREAM", None, 1),
        ("ICE CREAM", "", 1),
        ("ICE CREAM", "two words", 1),
        ("I C E C R E A M", None, 1),
        ("I-C-E-C-R-E-A-M", "", 1),
        ("ICEC REAM", None, 1),
    ],
)
def test_an_enumeration_is_checked_where_there_is_one(text, enumeration, value):
    answer = {"answer": "ice cream", "enumeration": enumeration}
    assert reward(text, "ICE CREAM", enumeration=enumeration) == value  # a column of the row
    assert reward(text, answer, id="x") == value
    assert (mode(text, answer) is not None) == value


def test_an_apostrophe_in_an_enumeration_joins():
    assert reward("SIX O'CLOCK", "SIX O'CLOCK", enumeration="3,1'5") == 1.0
    assert reward("SIX O CLOCK", "SIX O'CLOCK", enumeration="3,1'5") == 0.0


def test_the_answer_s_own_enumeration_goes_before_the_column():
    assert reward("ICE CREAM", ICE, enumeration="8") == 1.0


WRONG = [
    # other words, letters missing or too many
    *"6 LISTEN TINSEL SILEN SILENTS ASILENT SILENTLISTEN SILENT/SILENT TNELIS S1LENT".split(),
    "",
    " ",
    # more than the word
    "SILENT or LISTEN",
    "SILENT, LISTEN, ENLIST",
    "SILENT SILENT",
    "S I L E N T or LISTEN",
    "The answer is SILENT",
    "SILENT because LISTEN is mixed",
    "answer: SILENT",
    "<answer>The answer is SILENT</answer>",
    "[SILENT]<br>",
    r"\boxed{SILENT}",
    "<think>hm</think>SILENT",
    # in other parts than the enumeration says
    "S I L E N T",
    "S-I-L-E-N-T",
    "SI LENT",
    "S\nI\nL\nE\nN\nT",
    # no complete answer, or another one after it
    "SILENT <answer>LISTEN</answer>",
    "<answer></answer>SILENT",
    "<answer>SILENT</answer><answer>LISTEN</answer>",
    "<answer>SILENT",
    "SILENT</answer>",
    "<ANSWER>SILENT</ANSWER>",
    # letters of other scripts that look alike
    "S\N{CYRILLIC CAPITAL LETTER BYELORUSSIAN-UKRAINIAN I}LENT",
    "SI\N{GREEK CAPITAL LETTER LAMDA}ENT",
    "\N{CYRILLIC CAPITAL LETTER ZHE}SILENT",
    "SILENT\N{CYRILLIC SMALL LETTER A}",
    "\N{MATHEMATICAL BOLD CAPITAL S}SILENT",
    # long ones
    "SILENT" + " " * 200 + ".",
    "SILENT" + "." * 195,
    "." * 1_000_000 + "SILENT",
    "SILENT" * 150_000,
    "SILENT " * 140_000,
    "S-" * 500_000,
    "\0" * 1_000_000,
    "\ud800" * 1_000_000,
    "\ufdfa" * 1_000_000,  # 18 characters each, normalised
    "\ufdfa" * 200,
    "-" * 1_000_000,
    "<answer>" * 125_000,
    "</answer>" * 111_000,
    "<answer>SILENT" * 70_000,
    "<answer>" + "SILENT," * 140_000 + "</answer>",
    "E\N{COMBINING ACUTE ACCENT}" * 100,
    "\N{COMBINING ACUTE ACCENT}" * 1_000_000,
]


# a deadline and no measure: see test_countdown.py
@pytest.mark.timeout(60)
@pytest.mark.parametrize("text", WRONG, ids=lambda text: ascii(text[:24]))
def test_these_are_wrong_without_an_exception_and_soon(text):
    assert reward(text, **ROW) == 0.0
    assert mode(text, SILENT) is None
    assert reward(text, ICE) == reward(text, "LEVEL", enumeration="(5)") == 0.0


@pytest.mark.parametrize(
    "text",
    [
        "ASILENT",
        "SILENTS",
        "SILENT or LISTEN",
        "SILENT SILENT",
        "S I L E N T or LISTEN",
        "The answer is SILENT",
        "SILENT because LISTEN is mixed",
        "LISTEN",
        "SILEN",
        "<answer>It is SILENT</answer>",
        "SILENT <answer>LISTEN</answer>",
        "<answer>SILENT",
    ],
)
def test_without_an_enumeration_the_word_among_others_is_wrong_too(text):
    assert reward(text, "SILENT") == 0.0


def test_two_hundred_characters_are_the_limit():
    assert reward("SILENT" + "." * 194, SILENT) == 1.0
    assert reward("SILENT" + "." * 195, SILENT) == 0.0
    assert reward("x" * 1_000_000 + "<answer>silent</answer>", SILENT) == 1.0


def test_random_text_never_raises():
    rng = random.Random(0)
    pieces = ["ICE", "CREAM", " ", "-", "C", "\0", "\ud800", "é", "1", "\u2011", "\n"]
    pieces += ["<answer>", "</answer>"]
    right = 0
    for _ in range(3000):
        text = "".join(rng.choices(pieces, k=rng.randint(0, 6)))
        right += reward(text, ICE)
        assert (mode(text, ICE) is None) == (reward(text, ICE) == 0)
    assert 3 < right < 500


@pytest.mark.parametrize("answer", ["42", "", {"answer": "?"}, {"answer": ""}], ids=repr)
def test_an_answer_without_letters_is_an_error_that_names_it(answer):
    given = answer["answer"] if isinstance(answer, dict) else answer
    message = re.escape(f"crossword: the answer {given!r} has no letters")
    with pytest.raises(ValueError, match=message):
        reward("42", answer)


@pytest.mark.parametrize("enumeration, letters", [("3,4", 7), (9, 9), ("(3,1'5)", 9)])
def test_a_row_that_no_completion_can_solve_is_an_error_with_both_numbers(enumeration, letters):
    words = "the answer 'Ice Cream' has 8 letters but its enumeration "
    words += f"{enumeration!r} adds up to {letters}:"
    with pytest.raises(ValueError, match=re.escape(words)):
        reward("ICE CREAM", "Ice Cream", enumeration=enumeration)


@pytest.mark.parametrize("answer", [42, ["dog", "river"], {"answer": None}], ids=repr)
def test_an_answer_that_is_no_text_is_an_error_that_names_it(answer):
    given = answer["answer"] if isinstance(answer, dict) else answer
    message = re.escape(f"crossword: the answer must be text, not {given!r}")
    with pytest.raises(ValueError, match=message):
        reward("42", answer)


# --- clues


def solves_clue(word: str, kind: str, fodder: str, pattern: str) -> bool:
    """Whether the clue leads to the word, by the kind's own rule, and to no other."""
    letters = word.replace(" ", "")
    n = len(letters)
    if kind == "reversed":
        return "".join(reversed(fodder)) == letters
    if kind == "alternate":
        return fodder[::2] == letters and len(fodder) == 2 * n
    if kind == "initials":
        return "".join(part[0] for part in fodder.split()) == letters
    if kind == "hidden":
        fitting = re.compile(pattern.replace(" ", "").replace("_", "."))
        pieces = [fodder[i : i + n] for i in range(len(fodder) - n + 1)]
        fits = [piece for piece in pieces if fitting.fullmatch(piece)]
        at_an_end = fodder.startswith(letters) or fodder.endswith(letters)
        return fits == [letters] and not at_an_end
    assert kind == "anagram"
    return Counter(fodder) == Counter(letters) and fodder != letters


@pytest.mark.parametrize("config", CONFIGS)
def test_every_clue_leads_to_its_word(config):
    for problems in crossword.problems(config).values():
        for word, kind, fodder, pattern in problems:
            assert solves_clue(word, kind, fodder, pattern), (word, kind, fodder, pattern)


@pytest.mark.parametrize("config", CONFIGS)
def test_half_of_the_letters_are_known_from_crossing_words(config):
    for problems in crossword.problems(config).values():
        for word, _, _, pattern in problems:
            assert len(pattern) == len(word)
            for shown, letter in zip(pattern, word):
                assert shown == letter or (shown == "_" and letter != " ")
            n = len(word.replace(" ", ""))
            assert pattern.count("_") == n - n // 2


def test_no_two_words_of_the_list_are_anagrams():
    words = {row["answer"]["answer"] for row in all_rows("words")}
    assert len({"".join(sorted(word.replace(" ", ""))) for word in words}) == len(words)


PROMPTS = {
    "words": (
        r'Solve the crossword clue ".+ \([0-9,]+\)"\. '
        r"Letters known from crossing words: [A-Z_ ]+\. "
        r"Reason inside <think> </think>, then put only the word or words inside <answer> "
        r"</answer>\."
    ),
    "tiny": r"(reversed|hidden|alternate) [A-Z]{4,12} [A-Z_]{4,6}:",
}


@pytest.mark.parametrize("config", CONFIGS)
def test_prompts_and_solutions_are_well_formed(config):
    for row in all_rows(config):
        assert re.fullmatch(PROMPTS[config], row["prompt"])
        assert row["prompt"].isascii()
        assert config == "words" or len(row["prompt"]) <= 32
        word = row["answer"]["answer"]
        assert mode(row["solutions"][0], row["answer"]) == word.replace(" ", "")
        assert row["answer"]["enumeration"] == ",".join(str(len(part)) for part in word.split())
        assert row["num_modes"] == len(row["solutions"]) == 1
        backwards = word[::-1]
        assert reward(backwards if backwards != word else "X", **row) == 0.0
        assert reward(row["prompt"], **row) == 0.0


@pytest.mark.parametrize("config", CONFIGS)
def test_every_word_has_every_kind_of_clue(config):
    kinds = Counter(row["id"].split("-")[2] for row in all_rows(config))
    assert set(kinds) == set(crossword.CONFIGS[config]["kinds"])
    assert len(set(kinds.values())) == 1


def test_some_answers_have_two_parts():
    rows = crossword.rows("test", -1, 0)
    assert sum("," in row["answer"]["enumeration"] for row in rows) >= 5


# --- splits


def sorted_letters(rows: list[dict]) -> set[str]:
    return {"".join(sorted(row["answer"]["answer"].replace(" ", ""))) for row in rows}


@pytest.mark.parametrize(
    "config, train_count, test_count", [("words", 1200, 320), ("tiny", 5793, 192)]
)
def test_no_test_word_nor_an_anagram_of_one_is_in_training(config, train_count, test_count):
    train = crossword.rows("train", -1, 0, config)
    test = crossword.rows("test", -1, 0, config)
    assert (len(train), len(test)) == (train_count, test_count)
    assert not sorted_letters(train) & sorted_letters(test)
    assert len(sorted_letters(test)) == 64


def test_no_test_word_is_seen_in_training():
    """Made-up words of 4 letters do come up by chance inside longer ones, so "words" only."""
    train = crossword.rows("train", -1, 0, "words")
    seen = " ".join(row["prompt"] + row["solutions"][0] for row in train)
    test_words = {row["answer"]["answer"] for row in crossword.rows("test", -1, 0, "words")}
    assert not set(re.findall("[A-Z]+", seen)) & test_words
