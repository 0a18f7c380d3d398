r"""Reward functions: what a completion's text is worth.

A reward is a plain function (completion: str, answer, **row) -> float: the completion's text, the row's answer, the row's other columns and
`tokens` (of the completion, EOS included), `max_completion_length`, `soft_overlong_buffer`. Register it in REWARDS, or write it in a module
of your own and name it "module:function" in reward_funcs. It runs in a worker process (workers.py), which imports this file and no torch,
and sees little of your environment: a key that it needs goes into a variable whose name begins with REWARD_.
The text comes from a model: treat it as hostile, never eval it.
"""

import importlib
import logging
import os
import re
from fractions import Fraction
from functools import lru_cache

import tasks
from tasks import countdown, crossword, graph_coloring, rush_hour

SPACES = r"(?<![0-9])\s+|\s+(?![0-9])"  # all but those between two digits
LONGEST = 1000  # characters of an answer; a longer one is no answer, and none of the work below grows beyond it
SYMBOLS = str.maketrans(
    {
        "\u2212": "-",
        "\u2013": "-",
        "\uff0d": "-",
        "π": "\\pi",
        "∞": "\\infty",
        "×": "\\times",
        "·": "\\cdot",
        "÷": "/",
        "≤": "\\le",
        "≥": "\\ge",
        "≠": "\\ne",
        "°": "^\\circ",
        "²": "^2",
        "³": "^3",
        "θ": "\\theta",
        "α": "\\alpha",
        "β": "\\beta",
    }
)


# --- finding the answer


def last_boxed(text: str) -> str | None:
    r"""The content of the last complete \boxed{...}, braces matched; None without one."""
    found = last_box(text)
    return text[found[0] : found[1]] if found else None


def last_box(text: str) -> tuple[int, int] | None:
    open_braces, start, end = [], -1, -1
    for i, character in enumerate(
        text
    ):  # one pass: a completion may be nothing but boxes that never close
        if character == "{":
            open_braces.append(i)
        elif character == "}" and open_braces:
            brace = open_braces.pop()
            if brace > start and text.endswith("\\boxed", 0, brace):
                start, end = brace, i
    return (start + 1, end) if start >= 0 else None


def answer_block(text: str) -> tuple[int, int] | None:
    """Where the content of the last complete <answer>...</answer> begins and ends."""
    end = text.rfind("</answer>")
    start = text.rfind("<answer>", 0, max(end, 0))
    return (start + len("<answer>"), text.find("</answer>", start)) if start >= 0 else None


def stated_answer(text: str) -> str | None:
    r"""What the text gives as its answer: the last \boxed{} or <answer> block, whichever closes later; a box inside the block stands for it."""
    text = text[-10_000:]  # an answer comes last; a completion may be a megabyte
    box, block = last_box(text), answer_block(text)
    if block and (not box or box[1] < block[1]):
        inner = text[slice(*block)]
        return inner if last_boxed(inner) is None else last_boxed(inner)
    return text[slice(*box)] if box else None


# --- mathematics


@lru_cache(maxsize=4096)  # a group shares its gold answer
def parse_math(text: str) -> list:
    import math_verify

    logging.getLogger("math_verify").setLevel(
        logging.ERROR
    )  # it warns that its own time limits are off: the worker has a better one
    return math_verify.parse(f"\\boxed{{{text}}}", parsing_timeout=None)


def gold_text(answer) -> str:
    if not isinstance(answer, (str, int, float)):
        raise TypeError(
            f"the right answer must be a text or a number, not a {type(answer).__name__}"
        )
    return str(answer).rpartition("#### ")[2]  # GSM8K writes its working before it


def rational(text: str) -> Fraction | None:
    r"""The value of 12, -3.50, 3/4, \frac{3}{4}; None for anything else."""
    found = re.fullmatch(
        r"(-?[0-9]{1,18}(?:\.[0-9]{1,18})?)|(-?)(?:\\[dt]?frac\{(-?[0-9]{1,18})\}\{([0-9]{1,18})\}|(-?[0-9]{1,18})/([0-9]{1,18}))",
        text,
    )
    if not found or not int(found[4] or found[6] or 1):
        return None
    value = (
        Fraction(found[1])
        if found[1]
        else Fraction(int(found[3] or found[5]), int(found[4] or found[6]))
    )
    return -value if found[2] else value


def plainly_equal(gold: str, found: str) -> bool | None:
    """Whether two answers are equal where that takes no algebra, as it is for most; None where it does. What is a rounding away from equal is
    left to math-verify too."""
    if re.sub(SPACES, "", gold) == re.sub(SPACES, "", found):
        return True
    a, b = rational(gold), rational(found)
    if (
        a is None
        or b is None
        or (a != b and abs(a - b) <= max(1, abs(a)) / 1000 and "." in gold + found)
    ):
        return None
    return a == b


@lru_cache(maxsize=4096)  # and often its answers, where algebra takes milliseconds
def same_answer(gold: str, found: str) -> bool:
    equal = plainly_equal(gold, found)
    if equal is None:
        import math_verify

        equal = bool(parse_math(gold)) and math_verify.verify(
            parse_math(gold), parse_math(found), timeout_seconds=None
        )
    return equal


def math_reward(completion: str, answer: str, **row) -> float:
    r"""1.0 if the last \boxed{} or <answer> content equals `answer` according to math-verify, else 0.0.

    Covered: fractions, roots, sets, intervals, equations, units that math-verify knows; 1/2 equals 0.5.
    Not covered: an answer outside \boxed{} and <answer> scores 0, whatever else the text says; so does one of over 1,000 characters."""
    found, gold = (
        (stated_answer(completion) or "").translate(SYMBOLS).strip(),
        gold_text(answer).translate(SYMBOLS).strip(),
    )
    if not found or len(found) > LONGEST:
        return 0.0
    if re.search(
        "[0-9]_", found
    ):  # 1010_2 has a base, which math-verify drops; 1_0 is a number in Python only
        return float(canonical_math(found) == canonical_math(gold))
    return float(same_answer(gold, found))


def canonical_math(text: str) -> str:
    r"""One spelling for answers that differ in how they are written, not in what they say: no spaces, $, \left, \right, no outer pair of
    braces or parentheses, a/b for \frac{a}{b}, \pi for its letter, 0 for -0, 5 for 5.0. No arithmetic: 1/2 and 0.5 stay different."""
    text = re.sub(r"\\left(?![a-z])|\\right(?![a-z])|\\[,;:! ]|[\s$]", "", text.translate(SYMBOLS))
    text = re.sub(r"\\[dt]frac(?![a-z])", r"\\frac", text)
    text = re.sub(r"\\frac([0-9])([0-9])", r"\\frac{\1}{\2}", text)
    for _ in range(20):  # the innermost first; deeper ones stay as they are
        text, changed = re.subn(r"\\frac\{([^{}]*)\}\{([^{}]*)\}", fraction, text)
        if not changed:
            break
    if pairs_up(text):
        text = text[1:-1]
    text = re.sub(r"(?<![0-9.])([0-9]+)\.0+(?![0-9])", r"\1", text)
    return re.sub(r"(?<![0-9a-zA-Z.)}])-0(?![0-9.])", "0", text)


def fraction(found: re.Match) -> str:
    r"""a/b; in parentheses where a, b or a neighbour would make another number of it: 2\frac{1}{2} is not 21/2."""
    a = found[1] if re.fullmatch(r"(\\?[0-9a-zA-Z.])*", found[1]) else f"({found[1]})"
    b = found[2] if re.fullmatch(r"[0-9.]+|[a-zA-Z]|\\[a-z]+", found[2]) else f"({found[2]})"
    before, after = found.string[: found.start()][-1:], found.string[found.end() :][:1]
    return (
        f"({a}/{b})"
        if re.match("[0-9a-zA-Z.^_/]", before) or re.match("[0-9.^_!]", after)
        else f"{a}/{b}"
    )


def pairs_up(text: str) -> bool:
    """Whether the first character opens the brace or parenthesis that the last one closes."""
    if text[:1] + text[-1:] not in ("()", "{}"):
        return False
    depth = 0
    for i, character in enumerate(text):
        depth += (character in "({") - (character in ")}")
        if depth == 0:
            return i == len(text) - 1
    return False


def math_exact(completion: str, answer: str, **row) -> float:
    """1.0 if the content of the last <answer> block is `answer` in another spelling (canonical_math), else 0.0.

    Not covered: equal values written differently (1/2, 0.5); the right answer anywhere else in the text."""
    block, gold = answer_block(completion), canonical_math(gold_text(answer))
    if not block or block[1] - block[0] > LONGEST or not gold:
        return 0.0
    return float(canonical_math(completion[slice(*block)]) == gold)


# --- form

TAGS = ("<think>", "</think>", "<answer>", "</answer>")


def format_reward(completion: str, answer=None, **row) -> float:
    """1.0 for <think>...</think> and <answer>...</answer>, each once, in this order, only spaces around them; else 0.0."""
    text = completion.strip()
    if any(text.count(tag) != 1 for tag in TAGS):
        return 0.0
    a, b, c, d = map(text.find, TAGS)
    return float(
        a == 0 < b < c < d == len(text) - len(TAGS[3]) and not text[b + len(TAGS[1]) : c].strip()
    )


def tag_count(completion: str, answer=None, **row) -> float:
    """A quarter for each of the four tags of format_reward that stands there exactly once: a way to it in steps."""
    return sum(completion.count(tag) == 1 for tag in TAGS) / 4


def length(
    completion: str, answer=None, *, tokens: int, max_completion_length: int, **row
) -> float:
    """-tokens / max_completion_length: 0 for nothing, -1 for all that is allowed. A negative weight asks for long completions."""
    return -min(1.0, tokens / max_completion_length)


def soft_overlong(
    completion: str,
    answer=None,
    *,
    tokens: int,
    max_completion_length: int,
    soft_overlong_buffer: int,
    **row,
) -> float:
    """0 up to max_completion_length - soft_overlong_buffer tokens, from there in a straight line to -1 at max_completion_length.
    Yu et al. 2025 (DAPO), arXiv:2503.14476, eq. 13"""
    return -min(
        1.0,
        max(0.0, (tokens - max_completion_length + soft_overlong_buffer) / soft_overlong_buffer),
    )


def repetition(completion: str, answer=None, **row) -> float:
    """Minus the share of three-word sequences that have occurred before: 0 without any, towards -1 for a loop."""
    words = completion.split()
    grams = list(zip(words, words[1:], words[2:]))
    return len(set(grams)) / len(grams) - 1 if grams else 0.0


REWARDS = {
    "countdown": countdown.reward,
    "graph_coloring": graph_coloring.reward,
    "crossword": crossword.reward,
    "rush_hour": rush_hour.reward,
    "rush_hour_exact": rush_hour.rush_hour_exact,
    "rush_hour_shaped": rush_hour.rush_hour_shaped,
    "math": math_reward,
    "math_exact": math_exact,
    "format": format_reward,
    "tag_count": tag_count,
    "length": length,
    "soft_overlong": soft_overlong,
    "repetition": repetition,
}


@lru_cache
def imported(name: str):
    module, _, function = name.partition(":")
    here = os.stat(".")
    try:
        found = getattr(importlib.import_module(module), function)
    except SystemExit as error:
        raise ValueError(f"its module calls sys.exit({error.code!r}) when it is imported") from None
    except Exception as error:  # whatever somebody's module does
        raise ValueError(f"can't be imported: {type(error).__name__}: {error}") from None
    if not os.path.samestat(here, os.stat(".")):
        raise ValueError(
            f"its module changes the working folder when it is imported: {os.getcwd()}"
        )
    if not callable(found):
        raise ValueError("is not a function")
    return found


def resolve(name: str):
    """The function of a name in REWARDS or of "module:function"; a ValueError for any other name."""
    if name in REWARDS:
        return REWARDS[name]
    if ":" in name:
        return imported(name)
    raise ValueError(
        f"reward_funcs: {name!r} is not registered in rewards.REWARDS, which has {', '.join(REWARDS)}; "
        f"one of your own is written module:function"
    )


def mode(completion: str, answer, task: str, **row) -> str | None:
    """The canonical key of a correct completion according to the row's task."""
    return tasks.module(task).mode(completion, answer)
