"""Between: name a number that lies between two given ones. SmolLM2-135M succeeds about every sixth
time, with a few favourite numbers, although every other number between the two is right too.

One row, rows("test", 1, seed=0). Its prompt is a conversation, three examples and the question:
  {'id': 'between-tens-48-54', 'task': 'between',
   'prompt': [{'role': 'user', 'content': 'A number between 12 and 16?'},
              {'role': 'assistant', 'content': '15'},
              {'role': 'user', 'content': 'A number between 44 and 48?'},
              {'role': 'assistant', 'content': '45'},
              {'role': 'user', 'content': 'A number between 77 and 81?'},
              {'role': 'assistant', 'content': '79'},
              {'role': 'user', 'content': 'A number between 48 and 54?'}],
   'answer': {'low': 48, 'high': 54}, 'num_modes': 5,
   'solutions': ['49', '50', '51', '52', '53']}

Problems: all pairs of two-digit numbers that are 6 to 20 apart. A hash chooses 256 to hold out, so
they have the same distribution as those for training. A mode is the number.

reward() covers: a whole number strictly between the two, of nine digits at most, and nothing else.
It does not cover: words ("thirty"), fractions, signs, a sentence around the number: all 0.
"""

import re
import zlib
from functools import cache

from tasks import SPLITS, check_choice, hold_out, take

DEFAULT = "tens"
HELD_OUT = 256  # pairs
CONFIGS = {
    "tens": dict(lowest=10, highest=99, nearest=6, farthest=20),
}
# Questions and answers that every prompt begins with: they show the form of an answer, which a
# small model does not find by itself. No problem repeats one, because these pairs are 4 apart.
EXAMPLES = [((12, 16), "15"), ((44, 48), "45"), ((77, 81), "79")]


# --- modes and the reward


def modes(answer: dict) -> list[str]:
    """All right numbers, in order."""
    return [str(number) for number in range(answer["low"] + 1, answer["high"])]


def mode(completion: str, answer: dict) -> str | None:
    """The number without leading zeros, None for a wrong completion."""
    found = re.fullmatch(r"[0-9]{1,9}", completion.strip())
    if not found or not answer["low"] < int(found[0]) < answer["high"]:
        return None
    return str(int(found[0]))


def reward(completion: str, answer: dict, **row) -> float:
    """1.0 for a correct completion, else 0.0. Covered and not covered: see the top of this file.
    ValueError for an answer that is not {"low": an int, "high": an int} with a number between."""
    known = isinstance(answer, dict) and {"low", "high"} <= answer.keys()
    known = known and all(type(answer[end]) is int for end in ("low", "high"))
    if not known or max(answer["low"], -1) + 1 >= min(answer["high"], 10**9):
        raise ValueError(
            'between: the answer must be {"low": an int, "high": an int} with a number of nine '
            f"digits or less between them, not {answer!r:.100}"
        )
    return float(mode(completion, answer) is not None)


# --- problems


@cache
def problems(config: str) -> dict[str, list[tuple]]:
    """{"train": pairs (low, high), "test": pairs}, all different."""
    c = CONFIGS[config]
    classes = {}
    for low in range(c["lowest"], c["highest"] + 1):
        for high in range(low + c["nearest"], low + c["farthest"] + 1):
            if high <= c["highest"]:
                # unlike hash(), the same in every process
                key = zlib.crc32(f"{low} {high}".encode())
                classes.setdefault(key, []).append((low, high))
    return hold_out(classes, HELD_OUT)


def question(pair: tuple) -> dict:
    """The user's message."""
    return {"role": "user", "content": f"A number between {pair[0]} and {pair[1]}?"}


def to_row(config: str, pair: tuple) -> dict:
    """The row of a problem. Its prompt is a conversation: the examples, then the question."""
    low, high = pair
    answer = {"low": low, "high": high}
    right = modes(answer)
    messages = []
    for example, number in EXAMPLES:
        messages += [question(example), {"role": "assistant", "content": number}]
    return {
        "id": f"between-{config}-{low}-{high}",
        "task": "between",
        "prompt": [*messages, question(pair)],
        "answer": answer,
        "num_modes": len(right),
        "solutions": right,
    }


def rows(split: str, n: int, seed: int, config: str = DEFAULT) -> list[dict]:
    """n rows (-1: all) of "train" or "test"; `seed` only orders them."""
    check_choice("config", config, CONFIGS)
    check_choice("split", split, SPLITS)
    chosen = take(problems(config)[split], n, seed)
    return [to_row(config, pair) for pair in chosen]
