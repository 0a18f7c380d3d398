"""tasks/crossword.py: letters-only equality, enumerations, hostile text, clues that lead to their word and to no other."""

import json
import random
import re
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from tasks import crossword
from tasks.crossword import canonical, mode, reward

ROOT = Path(__file__).resolve().parent.parent
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
        assert reward(text, answer) == reward(text, **ROW) == 1.0 and mode(text, answer) == "SILENT"


def test_letters_alone_count():
    assert (
        canonical(" Ice-cream!") == canonical("ÍCE CRÈAM") == "ICECREAM"
        and canonical("42 ?!\0\ud800") == ""
    )
    assert canonical("Straße") == canonical("STRASSE") and canonical("don't") == "DONT"
    assert reward("cafe", "CAFÉ") == reward("café", "CAFE") == reward("o'clock", "O’CLOCK") == 1.0
    assert (
        reward("ЛЕС", "лес") == 1.0 and reward("LEC", "ЛЕС") == 0.0
    )  # another script is other letters


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
        ("ICECREAM", "3,4", 0),
        ("ICECREAM", "7", 0),
        ("ICE CREAM", "3,4", 0),
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
    assert reward(text, "ICE CREAM", enumeration=enumeration) == value  # a column of the row
    assert reward(text, {"answer": "ice cream", "enumeration": enumeration}, id="x") == value
    assert (mode(text, {"answer": "ice cream", "enumeration": enumeration}) is not None) == value


def test_an_apostrophe_in_an_enumeration_joins_and_the_answer_s_own_enumeration_goes_before_the_column():
    assert (
        reward("SIX O'CLOCK", "SIX O'CLOCK", enumeration="3,1'5") == 1.0
        and reward("SIX O CLOCK", "SIX O'CLOCK", enumeration="3,1'5") == 0.0
    )
    assert reward("ICE CREAM", ICE, enumeration="8") == 1.0


@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        "6",
        "LISTEN",
        "TINSEL",
        "SILEN",
        "SILENTS",
        "ASILENT",
        "SILENTLISTEN",
        "SILENT or LISTEN",
        "SILENT, LISTEN, ENLIST",
        "SILENT SILENT",
        "SILENT/SILENT",
        "S I L E N T",
        "S-I-L-E-N-T",
        "S I L E N T or LISTEN",
        "SI LENT",
        "S\nI\nL\nE\nN\nT",
        "The answer is SILENT",
        "SILENT because LISTEN is mixed",
        "answer: SILENT",
        "TNELIS",
        "<answer>The answer is SILENT</answer>",
        "SILENT <answer>LISTEN</answer>",
        "<answer></answer>SILENT",
        "<answer>SILENT</answer><answer>LISTEN</answer>",
        "<answer>SILENT",
        "SILENT</answer>",
        "<ANSWER>SILENT</ANSWER>",
        "<think>hm</think>SILENT",
        "[SILENT]<br>",
        r"\boxed{SILENT}",
        "S1LENT",
        "SІLENT",
        "SI\N{GREEK CAPITAL LETTER LAMDA}ENT",
        "ЖSILENT",
        "SILENT\N{CYRILLIC SMALL LETTER A}",
        "\N{MATHEMATICAL BOLD CAPITAL S}SILENT",
        "SILENT" + " " * 200 + ".",
        "SILENT" + "." * 195,
        "." * 1_000_000 + "SILENT",
        "SILENT" * 150_000,
        "SILENT " * 140_000,
        "S-" * 500_000,
        "\0" * 1_000_000,
        "\ud800" * 1_000_000,
        "\ufdfa" * 1_000_000,
        "\ufdfa" * 200,
        "-" * 1_000_000,
        "<answer>" * 125_000,
        "</answer>" * 111_000,
        "<answer>SILENT" * 70_000,
        "<answer>" + "SILENT," * 140_000 + "</answer>",
        "E\N{COMBINING ACUTE ACCENT}" * 100,
        "\N{COMBINING ACUTE ACCENT}" * 1_000_000,
    ],
    ids=lambda text: ascii(text[:24]),
)
def test_these_are_wrong_without_an_exception_and_soon(text):
    start = time.process_time()
    assert reward(text, **ROW) == 0.0 and mode(text, SILENT) is None
    assert reward(text, ICE) == reward(text, "LEVEL", enumeration="(5)") == 0.0
    assert time.process_time() - start < 10


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
    assert (
        reward("SILENT" + "." * 194, SILENT) == 1.0 and reward("SILENT" + "." * 195, SILENT) == 0.0
    )
    assert reward("x" * 1_000_000 + "<answer>silent</answer>", SILENT) == 1.0


def test_random_text_never_raises():
    rng, right = random.Random(0), 0
    for _ in range(3000):
        text = "".join(
            rng.choices(
                [
                    "ICE",
                    "CREAM",
                    " ",
                    "-",
                    "C",
                    "\0",
                    "\ud800",
                    "é",
                    "1",
                    "<answer>",
                    "</answer>",
                    "\u2011",
                    "\n",
                ],
                k=rng.randint(0, 6),
            )
        )
        right += reward(text, ICE)
        assert (mode(text, ICE) is None) == (reward(text, ICE) == 0)
    assert 3 < right < 500


@pytest.mark.parametrize("answer", ["42", "", 42, {"answer": "?"}, {"answer": ""}], ids=repr)
def test_an_answer_without_letters_is_an_error_that_names_it(answer):
    given = answer["answer"] if isinstance(answer, dict) else answer
    with pytest.raises(
        ValueError, match=re.escape(f"crossword: the answer {given!r} has no letters")
    ):
        reward("42", answer)


# --- clues


@pytest.mark.parametrize("config", CONFIGS)
def test_every_clue_leads_to_its_word_and_its_crossing_letters_fit(config):
    words = {row["answer"]["answer"] for row in all_rows(config)}
    for word, kind, fodder, pattern in (
        problem for split in crossword.problems(config).values() for problem in split
    ):
        letters, n = word.replace(" ", ""), len(word.replace(" ", ""))
        assert len(pattern) == len(word) and all(
            p in (c, "_" if c != " " else c) for p, c in zip(pattern, word)
        )
        assert pattern.count("_") == n - n // 2
        fitting = re.compile(pattern.replace(" ", "").replace("_", "."))
        if kind == "reversed":
            assert "".join(reversed(fodder)) == letters
        elif kind == "alternate":
            assert fodder[::2] == letters and len(fodder) == 2 * n
        elif kind == "initials":
            assert "".join(w[0] for w in fodder.split()) == letters
        elif kind == "hidden":
            assert [
                fodder[i : i + n]
                for i in range(len(fodder) - n + 1)
                if fitting.fullmatch(fodder[i : i + n])
            ] == [letters]
            assert not fodder.startswith(letters) and not fodder.endswith(letters)
        else:
            assert kind == "anagram" and Counter(fodder) == Counter(letters) and fodder != letters
            assert [w for w in words if Counter(w.replace(" ", "")) == Counter(letters)] == [
                word
            ]  # no other answer in the list


@pytest.mark.parametrize(
    "config, prompt",
    [
        (
            "words",
            r'Solve the crossword clue ".+ \([0-9,]+\)"\. Letters known from crossing words: [A-Z_ ]+\. Reason inside <think> </think>, then put '
            r"only the word or words inside <answer> </answer>\.",
        ),
        ("tiny", r"(reversed|hidden|alternate) [A-Z]{4,12} [A-Z_]{4,6}:"),
    ],
)
def test_prompts_and_solutions_are_well_formed(config, prompt):
    for row in all_rows(config):
        assert (
            re.fullmatch(prompt, row["prompt"])
            and row["prompt"].isascii()
            and (config == "words" or len(row["prompt"]) <= 32)
        )
        solution, word = row["solutions"][0], row["answer"]["answer"]
        assert reward(solution, **row) == 1.0 and mode(solution, row["answer"]) == word.replace(
            " ", ""
        )
        assert (
            row["answer"]["enumeration"] == ",".join(str(len(part)) for part in word.split())
            and row["num_modes"] == len(row["solutions"]) == 1
        )
        assert (
            reward(word[::-1] if word != word[::-1] else "X", **row) == 0.0
            and reward(row["prompt"], **row) == 0.0
        )


def test_every_word_has_every_kind_of_clue_and_some_have_two_parts():
    for config in CONFIGS:
        kinds = Counter(row["id"].split("-")[2] for row in all_rows(config))
        assert (
            set(kinds) == set(crossword.CONFIGS[config]["kinds"]) and len(set(kinds.values())) == 1
        )
    assert sum("," in row["answer"]["enumeration"] for row in crossword.rows("test", -1, 0)) >= 5


# --- splits


@pytest.mark.parametrize(
    "config, train_count, test_count", [("words", 1200, 320), ("tiny", 5793, 192)]
)
def test_no_test_word_nor_an_anagram_of_one_is_in_training(config, train_count, test_count):
    train, test = (crossword.rows(split, -1, 0, config) for split in ("train", "test"))
    assert (len(train), len(test)) == (train_count, test_count)
    letters = [
        {"".join(sorted(row["answer"]["answer"].replace(" ", ""))) for row in rows}
        for rows in (train, test)
    ]
    assert not letters[0] & letters[1] and len(letters[1]) == 64
    ids = [row["id"] for row in train + test]
    assert len(set(ids)) == len(ids)
    if config == "words":  # made-up words of 4 letters do come up by chance inside longer ones
        seen = set(
            re.findall("[A-Z]+", " ".join(row["prompt"] + row["solutions"][0] for row in train))
        )
        assert not seen & {row["answer"]["answer"] for row in test}


@pytest.mark.parametrize("config", CONFIGS)
def test_seed_only_orders(config):
    test, again = crossword.rows("test", -1, 0, config), crossword.rows("test", -1, 7, config)
    assert (
        again != test
        and sorted(again, key=json.dumps) == sorted(test, key=json.dumps)
        and crossword.rows("test", 5, 7, config) == again[:5]
    )


def test_changing_a_row_does_not_change_the_next_caller_s():
    for config in CONFIGS:
        row = crossword.rows("test", 1, 0, config)[0]
        before = json.dumps(row)
        row["answer"].clear()
        row["solutions"].clear()
        assert json.dumps(crossword.rows("test", 1, 0, config)[0]) == before


def test_rows_are_the_same_in_every_process():
    script = (
        "import hashlib, json; from tasks import crossword as t; rows = [t.rows(s, -1, 3, c) for c in t.CONFIGS for s in ('train', 'test')]; "
        "print(hashlib.sha256(json.dumps(rows).encode()).hexdigest())"
    )
    outputs = {
        subprocess.run(
            [sys.executable, "-c", script],
            cwd=ROOT,
            env={"PYTHONHASHSEED": seed, "PYTHONDONTWRITEBYTECODE": "1"},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(outputs) == 1


def test_the_row_on_top_of_the_file_is_a_real_one():
    assert "".join(repr(crossword.rows("test", 1, 0)[0]).split()) in "".join(
        crossword.__doc__.split()
    )


def test_errors_name_the_value_and_the_choices():
    with pytest.raises(
        ValueError, match=r"^config 'big' does not exist: choose one of words, tiny$"
    ):
        crossword.rows("train", 1, 0, "big")
    with pytest.raises(
        ValueError, match=r"^split 'val' does not exist: choose one of train, test$"
    ):
        crossword.rows("val", 1, 0)
    with pytest.raises(ValueError, match="n=321 rows asked for, but this split has 320 "):
        crossword.rows("test", 321, 0)
