r"""Countdown: reach a target with + - * / and parentheses, using every given number exactly once. Many answers are right.

One row, rows("test", 1, seed=0, config="3"):
  {'id': 'countdown-3-5,8,9=22', 'task': 'countdown', 'prompt': 'Use the numbers 5, 8, 9, each exactly once, with + - * / and
   parentheses to make 22. Reason inside <think> </think>, then put only the expression inside <answer> </answer>.',
   'answer': {'numbers': [5, 8, 9], 'target': 22}, 'solutions': ['<think>5+8+9 uses 5, 8, 9 once each and gives
   22.</think>\n<answer>5+8+9</answer>', '<think>5+9+8 uses 5, 8, 9 once each and gives 22.</think>\n<answer>5+9+8</answer>',
   '<think>8+9+5 uses 5, 8, 9 once each and gives 22.</think>\n<answer>8+9+5</answer>'], 'num_modes': 3}

Rules. Numbers are distinct; any intermediate value is fine (0, negative, fractions: exact arithmetic), only division by zero is not.
A mode is an expression up to the order of operands of + and *: 2*3+4 and 4+3*2 are one mode, (2+3)+4 and 2+(3+4) are two. Its key
is the expression without needless parentheses, longer operand of + and * first: "2*3+4". So mode() of a right answer is in modes().
Problems: variant "3" has the 787 with 3 numbers of 2..12, a target of 1..36 (12 per number) that is not one of them, and 2 to 8
modes; "4" the 5,426 with 4 numbers, target 1..48; "tiny" (for a character-level model) all 10,745 with 3 numbers of 1..20 and a
target of 1..60 that have an answer. A problem is its sorted numbers and its target; the held-out ones are those with the smallest
SHA-256. Variants hold out each for itself: a test problem of one may be a training problem of another.

reward() covers: the last complete <answer>...</answer> or, without one, the whole text; spaces and needless parentheses.
It does not cover: the reasoning, an equation ("2*3+4=10"), a leading minus, x for *, LaTeX, lines broken inside the answer: all 0.
"""

import ast
import hashlib
import random
import re
from fractions import Fraction
from functools import cache, lru_cache
from itertools import combinations

DEFAULT = "3"
WORDS = (
    "Use the numbers {numbers}, each exactly once, with + - * / and parentheses to make {target}. "
    "Reason inside <think> </think>, then put only the expression inside <answer> </answer>."
)
CONFIGS = {
    "3": dict(
        count=3,
        low=2,
        high=12,
        max_target=36,
        target_among_numbers=False,
        min_modes=2,
        max_modes=8,
        words=True,
    ),
    "4": dict(
        count=4,
        low=2,
        high=12,
        max_target=48,
        target_among_numbers=False,
        min_modes=2,
        max_modes=8,
        words=True,
    ),
    "tiny": dict(
        count=3,
        low=1,
        high=20,
        max_target=60,
        target_among_numbers=True,
        min_modes=1,
        max_modes=10**6,
        words=False,
    ),
}
BINDS = {"+": 0, "-": 0, "*": 1, "/": 1}  # a number binds 2
SIGNS = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/"}
EXPRESSION = re.compile(
    r"[0-9+\-*/() ]{1,100}"
)  # what ast.parse may see: too short to nest deep, no names, no newline


def check_choice(what: str, value: str, choices) -> None:
    if value not in choices:
        raise ValueError(f"{what} {value!r} does not exist: choose one of {', '.join(choices)}")


def last_answer(text: str) -> str:
    """The content of the last complete <answer>...</answer>, or all of the text; stripped."""
    start = text.rfind("<answer>", 0, max(text.rfind("</answer>"), 0))
    return (text if start < 0 else text[start + 8 : text.find("</answer>", start)]).strip()


def apply(op: str, a: int | Fraction, b: int | Fraction) -> int | Fraction:
    """Exact, whole numbers as int: Python's are ten times faster than its fractions."""
    return (
        a + b
        if op == "+"
        else a - b
        if op == "-"
        else a * b
        if op == "*"
        else a // b
        if a % b == 0
        else Fraction(a) / b
    )


def write(op: str, x: tuple, y: tuple) -> tuple[str, int]:
    """(text, binding strength) of x op y without needless parentheses."""
    left = f"({x[0]})" if x[1] < BINDS[op] else x[0]
    right = f"({y[0]})" if y[1] <= BINDS[op] else y[0]  # <=: a-(b-c) and a+(b+c) keep theirs
    return f"{left}{op}{right}", BINDS[op]


def join(op: str, x: tuple, y: tuple) -> tuple[str, int]:
    """The canonical one of x op y and y op x. Text and tree determine each other, as Python reads it."""
    swap = op in "+*" and (-len(x[0]), x[0]) > (-len(y[0]), y[0])
    return write(op, y, x) if swap else write(op, x, y)


def spellings(node: ast.expr) -> set:
    """All (text, binding strength) of one mode: the operands of + and * in either order."""
    if isinstance(node, ast.Constant):
        return {(str(node.value), 2)}
    op, pairs = (
        SIGNS[type(node.op)],
        [(x, y) for x in spellings(node.left) for y in spellings(node.right)],
    )
    return {write(op, x, y) for x, y in pairs + [(y, x) for x, y in pairs if op in "+*"]}


def expressions(numbers: tuple[int, ...], wanted=None) -> dict[int | Fraction, set]:
    """{value: {(text, binding strength), ...}} of all expressions of the sorted numbers, or of those with a value in the set `wanted` of
    whole numbers. Grows fast: 4 numbers have ~3,000."""
    if len(numbers) == 1:
        return {numbers[0]: {(str(numbers[0]), 2)}}
    places, found = range(len(numbers)), {}
    parts = [part for size in range(1, len(numbers)) for part in combinations(places, size)]
    splits = {
        (tuple(numbers[i] for i in part), tuple(numbers[i] for i in places if i not in part))
        for part in parts
    }
    for left, right in splits:
        for a, xs in part_of(left).items():
            for b, ys in part_of(right).items():
                for op in "+-*/" if left <= right else "-/":  # + and * meet the mirrored split too
                    value = apply(op, a, b) if op != "/" or b != 0 else None
                    if value is not None and (
                        wanted is None or (value.denominator == 1 and value in wanted)
                    ):  # fractions are slow to look up
                        found.setdefault(value, set()).update(
                            join(op, x, y) for x in xs for y in ys
                        )
    return found


part_of = lru_cache(maxsize=300)(
    expressions
)  # all parts of 2..12 or 1..20, which recur in thousands of problems


def modes(numbers, target: int) -> set[str]:
    """The canonical keys of all correct answers; modes([2, 3, 4], 10) is {"2*3+4", "3*4-2"}."""
    return {text for text, _ in expressions(tuple(sorted(numbers)), {target}).get(target, ())}


def evaluate(node: ast.expr) -> tuple[int | Fraction, tuple[str, int]]:
    """(exact value, canonical (text, binding strength)) of a parsed expression; ValueError for anything but the four operations."""
    if isinstance(node, ast.Constant):
        return node.value, (str(node.value), 2)
    if not isinstance(node, ast.BinOp) or type(node.op) not in SIGNS:
        raise ValueError(f"{type(node).__name__} is not allowed")
    (a, x), (b, y), op = evaluate(node.left), evaluate(node.right), SIGNS[type(node.op)]
    return apply(op, a, b), join(op, x, y)


def mode(completion: str, answer: dict) -> str | None:
    """The canonical key of a correct completion, None for a wrong one."""
    text = last_answer(completion)
    if not EXPRESSION.fullmatch(text) or sorted(map(int, re.findall("[0-9]+", text))) != sorted(
        answer["numbers"]
    ):
        return None  # from here on there are as many leaves as numbers, so the tree is small
    try:
        value, (key, _) = evaluate(ast.parse(text, mode="eval").body)
    except (SyntaxError, ValueError, ZeroDivisionError):
        return None
    return key if value == answer["target"] else None


def reward(completion: str, answer: dict, **row) -> float:
    """1.0 for a correct completion, else 0.0. Covered and not covered: see the top of this file."""
    return float(mode(completion, answer) is not None)


@cache
def problems(config: str) -> list[tuple]:
    """All (SHA-256, numbers, target, sorted modes) of a variant, smallest SHA-256 first."""
    c, found = CONFIGS[config], []
    targets = range(1, c["max_target"] + 1)
    for numbers in combinations(range(c["low"], c["high"] + 1), c["count"]):
        values = expressions(numbers, set(targets))
        for target in targets:
            keys = sorted(text for text, _ in values.get(target, ()))
            if c["min_modes"] <= len(keys) <= c["max_modes"] and (
                c["target_among_numbers"] or target not in numbers
            ):
                digest = hashlib.sha256(f"{numbers}={target}".encode()).hexdigest()
                found.append((digest, numbers, target, keys))
    return sorted(found)


def take(found: list, n: int, seed: int) -> list:
    """n of the problems (-1: all) in the order that `seed` gives."""
    if not -1 <= n <= len(found):
        raise ValueError(f"n={n} rows asked for, but this split has {len(found)} (-1 means all)")
    return random.Random(f"rows/{seed}").sample(found, len(found))[
        : None if n == -1 else n
    ]  # sample(found, n) orders others for each n


def to_row(config: str, numbers: tuple, target: int, keys: list) -> dict:
    short, spelled = f"{','.join(map(str, numbers))}={target}", ", ".join(map(str, numbers))
    if CONFIGS[config]["words"]:
        prompt = WORDS.format(numbers=spelled, target=target)
        solutions = [
            f"<think>{key} uses {spelled} once each and gives {target}.</think>\n<answer>{key}</answer>"
            for key in keys
        ]
    else:
        prompt = short + ":"  # or the target would run into the completion's first number
        solutions = [
            text for key in keys for text, _ in sorted(spellings(ast.parse(key, mode="eval").body))
        ]
    return {
        "id": f"countdown-{config}-{short}",
        "task": "countdown",
        "prompt": prompt,
        "answer": {"numbers": list(numbers), "target": target},
        "solutions": solutions,
        "num_modes": len(keys),
    }


def rows(split: str, n: int, seed: int, config: str = DEFAULT) -> list[dict]:
    """n rows (-1: all) of "train" or "test" (256 problems, or 128 of a variant with at most 1,000); `seed` only orders them."""
    check_choice("config", config, CONFIGS)
    check_choice("split", split, ("train", "test"))
    found = problems(config)
    held_out = 256 if len(found) > 1000 else 128
    return [
        to_row(config, *problem[1:])
        for problem in take(found[:held_out] if split == "test" else found[held_out:], n, seed)
    ]
