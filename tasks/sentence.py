"""Sentence: use two given words in one short sentence. A small pretrained model succeeds some of
the time, and the number of right answers is unlimited.

One row, rows("test", 1, seed=0):
  {'id': 'sentence-nouns-moon-school', 'task': 'sentence',
   'prompt': 'Write a short sentence with the words moon and school.',
   'answer': ['moon', 'school'], 'solutions': ['The moon and the school are mine.']}

Problems: every pair of NOUNS, which are common nouns; a hash decides which word comes first. 256
pairs are held out, chosen by a hash too, so that they have the same distribution as those for
training; their words occur in training in other pairs. A mode is the sentence itself: its words in
lower case. Their number is unknown, so a row has no num_modes and coverage@k is not measured.

reward() covers: the last complete <answer>...</answer> or, without one, the whole text; one
sentence of 5 to 14 words that begins with a capital letter, ends with a full stop and has both
words in it, exactly as given (not "horses"); ASCII letters, commas, apostrophes and hyphens.
It does not cover: digits, quotes and other marks, which give 0; grammar and sense, which are not
checked.
"""

import re
import zlib
from functools import cache
from itertools import combinations

from tasks import SPLITS, check_choice, hold_out, last_answer, take

DEFAULT = "nouns"
HELD_OUT = 256  # pairs
SHORTEST = 5  # words of a sentence
LONGEST = 14
WORD = r"[a-z'-]*[a-z][a-z'-]*"  # in lower case; a lone hyphen is not a word
LONGEST_TEXT = 200  # characters; a longer text scores 0 unread
NOUNS = """
apple bird boat book bread bridge car cat chair child city clock cloud coat coffee cow dog door
farm field fire fish flower forest friend garden girl grass hat hill horse house island king lake
letter moon mountain music night park river road room school ship shoe snow star stone street
summer table teacher train tree village wall window winter
"""
CONFIGS = {
    "nouns": dict(words=NOUNS.split()),
}


# --- modes and the reward


def mode(completion: str, answer: list) -> str | None:
    """The words of a correct completion in lower case, None for a wrong completion."""
    text = last_answer(completion)
    if len(text) > LONGEST_TEXT or not re.fullmatch(r"[A-Z][A-Za-z ,'-]*\.", text):
        return None
    words = re.findall(WORD, text.lower())
    if not SHORTEST <= len(words) <= LONGEST or not set(answer) <= set(words):
        return None
    return " ".join(words)


def reward(completion: str, answer: list, **row) -> float:
    """1.0 for a correct completion, else 0.0. Covered and not covered: see the top of this file.
    ValueError for an answer that is not a list of words in lower case."""
    known = isinstance(answer, list) and all(isinstance(word, str) for word in answer)
    if not known or not answer or not all(re.fullmatch(WORD, word) for word in answer):
        raise ValueError(
            f"sentence: the answer must be a list of words in lower case, not {answer!r:.100}"
        )
    return float(mode(completion, answer) is not None)


# --- problems


@cache
def problems(config: str) -> dict[str, list[list]]:
    """{"train": pairs of words, "test": pairs}, all different."""
    classes = {}
    for pair in combinations(CONFIGS[config]["words"], 2):
        # unlike hash(), the same in every process
        key = zlib.crc32(" ".join(pair).encode())
        # otherwise the words would always stand in alphabetical order
        ordered = pair[::-1] if key % 2 else pair
        classes.setdefault(key, []).append(ordered)
    return hold_out(classes, HELD_OUT)


def to_row(config: str, pair: tuple) -> dict:
    """The row of a problem, with one solution of many."""
    first, second = pair
    return {
        "id": f"sentence-{config}-{first}-{second}",
        "task": "sentence",
        "prompt": f"Write a short sentence with the words {first} and {second}.",
        "answer": [first, second],
        "solutions": [f"The {first} and the {second} are mine."],
    }


def rows(split: str, n: int, seed: int, config: str = DEFAULT) -> list[dict]:
    """n rows (-1: all) of "train" or "test"; `seed` only orders them."""
    check_choice("config", config, CONFIGS)
    check_choice("split", split, SPLITS)
    chosen = take(problems(config)[split], n, seed)
    return [to_row(config, pair) for pair in chosen]
