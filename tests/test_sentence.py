"""tasks/sentence.py: what counts as a sentence with both words, and pairs that are held out."""

import json
import subprocess
import sys
from collections import Counter

import pytest
from exact_matrix import ROOT
from test_countdown import WRONG

from tasks import sentence

PAIR = ["dog", "river"]


@pytest.mark.parametrize(
    "text, value",
    [
        ("The dog swims in the river.", 1.0),
        ("  A river, they say, is the dog's friend and a dog's bath, my dog.\n", 1.0),
        ("<think>dog</think><answer>The river has no dog.</answer>", 1.0),
        ("River and dog were old-fashioned.", 1.0),
        ("The dog swims in the river", 0.0),
        ("the dog swims in the river.", 0.0),
        ("The dog swims. It is a river.", 0.0),
        ("The dogs swim in the river.", 0.0),
        ("The dog swims in the riverbed.", 0.0),
        ("The dog swims in the sea.", 0.0),
        ("The dog, river.", 0.0),
        ("River dog - - -.", 0.0),
        ("The dog swims in the river" + " now" * 9 + ".", 0.0),
        ("The dog swims in 2 rivers and a river.", 0.0),
        ('The "dog" swims in the river.', 0.0),
        ("The d\N{CYRILLIC SMALL LETTER O}g swims in the river.", 0.0),
        ("The dog swims in the river." * 300_000, 0.0),
    ],
    ids=lambda x: ascii(x)[:40],
)
def test_one_short_sentence_with_both_words(text, value):
    assert sentence.reward(text, PAIR, id="x", task="sentence") == value


def test_from_5_to_14_words_are_a_short_sentence():
    for words in range(4, 17):
        text = "River dog" + " so" * (words - 2) + "."
        assert sentence.reward(text, PAIR) == float(5 <= words <= 14), words


def test_sentences_of_the_same_words_are_one_mode():
    one = sentence.mode("The dog, it seems, is a river.", PAIR)
    assert one == "the dog it seems is a river"
    assert sentence.mode("<answer>The Dog it seems is a River.</answer>", PAIR) == one
    assert sentence.mode("The dog is a river, it seems.", PAIR) != one


# a deadline and no measure: see test_countdown.py
@pytest.mark.timeout(60)
@pytest.mark.parametrize("text", WRONG, ids=lambda text: ascii(text[:24]))
def test_these_are_wrong_without_an_exception_and_soon(text):
    assert sentence.reward(text, PAIR) == 0.0


# --- problems


def both_splits() -> tuple[list[dict], list[dict]]:
    return sentence.rows("train", -1, 0), sentence.rows("test", -1, 0)


def test_a_row_asks_for_its_words_and_its_solution_is_right():
    for row in sum(both_splits(), []):  # noqa: RUF017
        for word in row["answer"]:
            assert f" {word}" in row["prompt"]
        (solution,) = row["solutions"]
        assert sentence.reward(solution, **row) == 1.0


def test_no_pair_is_in_both_splits_in_either_order():
    train, test = both_splits()
    assert not {frozenset(row["answer"]) for row in train} & {
        frozenset(row["answer"]) for row in test
    }
    assert len(test) == 256 and len(train) > 1000


def shares(rows: list[dict]) -> dict[str, float]:
    """How often each word occurs, as a share of all."""
    counts = Counter()
    for row in rows:
        counts.update(row["answer"])
    return {word: count / len(rows) for word, count in counts.items()}


def test_what_is_held_out_is_of_the_same_distribution():
    train, test = map(shares, both_splits())
    assert train.keys() == test.keys()
    for word, share in train.items():
        # five standard errors of a share in a sample of 256
        assert abs(share - test[word]) < 5 * (share * (1 - share) / 256) ** 0.5
    first = [row for row in sentence.rows("test", -1, 0) if row["answer"] == sorted(row["answer"])]
    assert 90 < len(first) < 166


def test_seed_only_orders_and_a_changed_row_changes_no_other():
    first = sentence.rows("test", -1, 0)
    second = sentence.rows("test", -1, 7)
    assert first != second
    assert sorted(first, key=json.dumps) == sorted(second, key=json.dumps)
    second[0]["answer"].clear()
    assert sentence.rows("test", 1, 7)[0]["answer"]


def test_rows_are_the_same_in_every_process():
    code = "from tasks import sentence; print(sentence.rows('test', -1, 3))"
    outputs = set()
    for hash_seed in ("1", "2"):
        done = subprocess.run(
            [sys.executable, "-c", code],
            cwd=ROOT,
            env={"PYTHONHASHSEED": hash_seed, "PYTHONDONTWRITEBYTECODE": "1"},
            capture_output=True,
            text=True,
            check=True,
        )
        outputs.add(done.stdout)
    assert len(outputs) == 1


def test_the_row_on_top_of_the_file_is_a_real_one():
    row = sentence.rows("test", 1, 0)[0]
    assert "".join(repr(row).split()) in "".join(sentence.__doc__.split())


def test_errors_name_the_value_and_the_choices():
    with pytest.raises(ValueError, match=r"^config 'big' does not exist: choose one of nouns$"):
        sentence.rows("train", 1, 0, "big")
    with pytest.raises(ValueError, match=r"^split 'val' does not exist: choose one of train, test"):
        sentence.rows("val", 1, 0)


@pytest.mark.parametrize(
    "answer",
    [["Dog", "river"], "dog river", [1, 2], [], [""], ["ice cream"], ["moon!"], ["stra\xdfe"]],
)
def test_an_answer_that_nothing_could_match_is_an_error_and_not_0(answer):
    with pytest.raises(ValueError, match=r"^sentence: the answer must"):
        sentence.reward("1", answer)
