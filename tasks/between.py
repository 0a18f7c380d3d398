"""Between: name a number of a kind between two others. A small pretrained model can half do it, and
many answers are right.

One row, rows("test", 1, seed=0):
  {'id': 'between-two_digits-18-32-5-0', 'task': 'between', 'prompt': 'Name a multiple of 5 between
   18 and 32. Answer with the number only.', 'answer': {'low': 18, 'high': 32, 'divisor': 5,
   'rest': 0}, 'solutions': ['20', '25', '30'], 'num_modes': 3}

"answer" says which numbers are right: those strictly between "low" and "high" that leave "rest"
when divided by "divisor". A mode is the number itself.

Problems: every low from 10 to 89, every distance of 6 to 15 from low to high, every kind of KINDS,
if 2 to 7 numbers are right. 256 of them are held out, chosen by a hash of the problem, so that they
are of the same distribution as those for training.

reward() covers: the last complete <answer>...</answer> or, without one, the whole text; digits of
ASCII alone, a full stop behind them or none.
It does not cover: numbers in words, several numbers, sentences around a number: all 0.
"""

import re
import zlib
from functools import cache

from tasks import SPLITS, check_choice, hold_out, last_answer, take

DEFAULT = "two_digits"
HELD_OUT = 256
MIN_MODES = 2  # problems with fewer or
MAX_MODES = 7  # more right answers are left out
# words: (divisor, rest)
KINDS = {
    "an even number": (2, 0),
    "an odd number": (2, 1),
    "a multiple of 3": (3, 0),
    "a multiple of 5": (5, 0),
}
CONFIGS = {
    "two_digits": dict(lows=range(10, 90), distances=range(6, 16)),
}


# --- modes and the reward


def modes(answer: dict) -> set[str]:
    """All right answers; of the even numbers between 3 and 9 {"4", "6", "8"}."""
    right = set()
    for number in range(answer["low"] + 1, answer["high"]):
        if number % answer["divisor"] == answer["rest"]:
            right.add(str(number))
    return right


def mode(completion: str, answer: dict) -> str | None:
    """The correct completion's number, None for a wrong completion."""
    text = last_answer(completion).removesuffix(".")
    # no sign, no leading zero, and no digits of other scripts, which int() would read
    if not re.fullmatch("[1-9][0-9]{0,5}", text):
        return None
    return text if text in modes(answer) else None


def reward(completion: str, answer: dict, **row) -> float:
    """1.0 for a correct completion, else 0.0. Covered and not covered: see the top of this file."""
    return float(mode(completion, answer) is not None)


# --- problems


@cache
def problems(config: str) -> dict[str, list[dict]]:
    """{"train": answers, "test": answers}, all different."""
    c = CONFIGS[config]
    classes = {}
    for divisor, rest in KINDS.values():
        for low in c["lows"]:
            for distance in c["distances"]:
                answer = {"low": low, "high": low + distance, "divisor": divisor, "rest": rest}
                if MIN_MODES <= len(modes(answer)) <= MAX_MODES:
                    key = zlib.crc32(repr(answer).encode())  # unlike hash(), the same everywhere
                    classes.setdefault(key, []).append(answer)
    return hold_out(classes, HELD_OUT)


def to_row(config: str, answer: dict) -> dict:
    """The row of a problem, with all of its solutions."""
    low, high, divisor, rest = answer.values()
    kinds = {value: words for words, value in KINDS.items()}
    words = kinds[divisor, rest]
    solutions = sorted(modes(answer), key=int)
    return {
        "id": f"between-{config}-{low}-{high}-{divisor}-{rest}",
        "task": "between",
        "prompt": f"Name {words} between {low} and {high}. Answer with the number only.",
        # a new dict, or a caller who changes a row would change what problems() remembers
        "answer": dict(answer),
        "solutions": solutions,
        "num_modes": len(solutions),
    }


def rows(split: str, n: int, seed: int, config: str = DEFAULT) -> list[dict]:
    """n rows (-1: all) of "train" or "test"; `seed` only orders them."""
    check_choice("config", config, CONFIGS)
    check_choice("split", split, SPLITS)
    chosen = take(problems(config)[split], n, seed)
    return [to_row(config, answer) for answer in chosen]
