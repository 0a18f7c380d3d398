r"""Countdown: reach a target with + - * / and parentheses, using every given number exactly once.
Many answers are right.

One row, rows("test", 1, seed=0, config="3"):
  {'id': 'countdown-3-5,8,9=22', 'task': 'countdown',
   'prompt': 'Use the numbers 5, 8, 9, each exactly once, with + - * / and parentheses to make 22.
   Reason inside <think> </think>, then put only the expression inside <answer> </answer>.',
   'answer': {'numbers': [5, 8, 9], 'target': 22},
   'solutions': [
   '<think>5+8+9 uses 5, 8, 9 once each and gives 22.</think>\n<answer>5+8+9</answer>',
   '<think>5+9+8 uses 5, 8, 9 once each and gives 22.</think>\n<answer>5+9+8</answer>',
   '<think>8+9+5 uses 5, 8, 9 once each and gives 22.</think>\n<answer>8+9+5</answer>'],
   'num_modes': 3}

Rules. Numbers are distinct. Arithmetic is exact and any intermediate value is allowed (0, negative,
fractions), except division by zero. A mode is an expression regardless of the order of the operands
of + and *: 2*3+4 and 4+3*2 are one mode, (2+3)+4 and 2+(3+4) are two. Its key is the expression
without needless parentheses, with the longer operand of + and * first: "2*3+4". mode() of a right
answer is one of modes().

Problems. A problem is its sorted numbers and its target. The variants:
  "3"     787: 3 numbers of 2..12, a target of 1..36 that is not one of them, 2 to 8 modes
  "4"     5,426: 4 numbers of 2..12, a target of 1..48 that is not one of them, 2 to 8 modes
  "tiny"  10,745, for a character-level model: 3 numbers of 1..20, any target of 1..60
The problems with the smallest SHA-256 are held out, separately in each variant: a test problem of
one variant may be a training problem of another.

reward() covers: the last complete <answer>...</answer> or, without one, the whole text; spaces and
needless parentheses.
It does not cover: the reasoning, an equation ("2*3+4=10"), a leading minus, x for *, LaTeX, lines
broken inside the answer: all 0.
"""

import ast
import hashlib
import re
from collections.abc import Iterator
from fractions import Fraction
from functools import cache, lru_cache
from itertools import combinations, product

from tasks import SPLITS, check_choice, hold_out, last_answer, take, worked_solution

DEFAULT = "3"
WORDS = (
    "Use the numbers {numbers}, each exactly once, with + - * / and parentheses to make {target}. "
    "Reason inside <think> </think>, then put only the expression inside <answer> </answer>."
)
CONFIGS = {
    "3": dict(
        count=3,  # numbers in a problem
        low=2,  # the smallest number and
        high=12,  # the largest one
        max_target=36,
        target_among_numbers=False,  # whether the target may be one of the numbers
        min_modes=2,  # problems with fewer or
        max_modes=8,  # more modes are left out
        words=True,  # prompt and solutions in words: "Use the numbers ..."
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
        max_modes=10**6,  # no limit
        words=False,  # "5,8,9=22:" and "5+8+9"
    ),
}
# binding strength: an operand that binds less tightly than its operation needs parentheses
BINDS = {"+": 0, "-": 0, "*": 1, "/": 1}
NUMBER_BINDS = 2
SIGNS = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/"}
# the only texts that reach ast.parse: too short to nest deeply, no names, no newline
EXPRESSION = re.compile(r"[0-9+\-*/() ]{1,100}")


# --- expressions: a value (int or Fraction) and how it is written, (text, binding strength)


def apply(op: str, a: int | Fraction, b: int | Fraction) -> int | Fraction:
    """a op b, exactly. Whole results of whole numbers stay int, ten times faster than Fraction."""
    if op == "+":
        return a + b
    if op == "-":
        return a - b
    if op == "*":
        return a * b
    return a // b if a % b == 0 else Fraction(a) / b


def write(op: str, x: tuple, y: tuple) -> tuple[str, int]:
    """(text, binding strength) of x op y without needless parentheses."""
    left, left_binds = x  # "2+3", 0
    right, right_binds = y
    if left_binds < BINDS[op]:
        left = f"({left})"
    # <=, unlike on the left: a-(b-c) and a+(b+c) keep their parentheses
    if right_binds <= BINDS[op]:
        right = f"({right})"
    return f"{left}{op}{right}", BINDS[op]


def join(op: str, x: tuple, y: tuple) -> tuple[str, int]:
    """x op y or y op x, whichever is canonical. The text parses back into the same tree."""
    swap = op in "+*" and (-len(x[0]), x[0]) > (-len(y[0]), y[0])
    return write(op, y, x) if swap else write(op, x, y)


def spellings(node: ast.expr) -> set[tuple[str, int]]:
    """All (text, binding strength) of one mode: the operands of + and * in either order."""
    if isinstance(node, ast.Constant):
        return {(str(node.value), NUMBER_BINDS)}
    op = SIGNS[type(node.op)]
    spelled = set()
    for x, y in product(spellings(node.left), spellings(node.right)):
        spelled.add(write(op, x, y))
        if op in "+*":  # the operations whose operands may be swapped
            spelled.add(write(op, y, x))
    return spelled


def splits(numbers: tuple[int, ...]) -> set[tuple]:
    """All ways (left, right) to divide the sorted numbers into two parts, both sorted."""
    places = range(len(numbers))
    divided = set()  # a set: either 5 of 5, 5, 8 gives the same parts
    for size in range(1, len(numbers)):
        for part in combinations(places, size):
            left = tuple(numbers[i] for i in part)
            right = tuple(numbers[i] for i in places if i not in part)
            divided.add((left, right))
    return divided


def joined_values(numbers: tuple[int, ...]) -> Iterator[tuple]:
    """(op, value, texts of the left operand, texts of the right one), for all ways to make a value
    from two parts of the numbers."""
    for left, right in splits(numbers):
        # splits() has every pair in both orders, and + and * need only one
        signs = "+-*/" if left <= right else "-/"
        for (a, xs), (b, ys) in product(part_of(left).items(), part_of(right).items()):
            for op in signs:
                if op != "/" or b != 0:  # b may be 0, as in 8/(5-5)
                    yield op, apply(op, a, b), xs, ys


def expressions(numbers: tuple[int, ...], wanted=None) -> dict[int | Fraction, set]:
    """{value: {(text, binding strength), ...}} of all expressions of the sorted numbers; `wanted`:
    only those whose value is in this set of whole numbers. 4 numbers have ~3,000 expressions."""
    if len(numbers) == 1:
        return {numbers[0]: {(str(numbers[0]), NUMBER_BINDS)}}
    by_value = {}  # holds sets, because with equal numbers a text may occur twice
    for op, value, xs, ys in joined_values(numbers):
        # checks the denominator first, because fractions are slow to look up in a set
        if wanted is None or (value.denominator == 1 and value in wanted):
            texts = by_value.setdefault(value, set())
            for x, y in product(xs, ys):
                texts.add(join(op, x, y))
    return by_value


@lru_cache(maxsize=300)
def part_of(numbers: tuple[int, ...]) -> dict[int | Fraction, set]:
    """expressions() with a cache: the same parts recur in thousands of problems."""
    return expressions(numbers)


# --- modes and the reward


def modes(numbers, target: int) -> set[str]:
    """The keys of all correct answers; modes([2, 3, 4], 10) is {"2*3+4", "3*4-2"}."""
    by_value = expressions(tuple(sorted(numbers)), {target})
    return {text for text, _ in by_value.get(target, ())}


def evaluate(node: ast.expr) -> tuple[int | Fraction, tuple[str, int]]:
    """(exact value, canonical (text, binding strength)) of a parsed expression.

    ValueError for anything but whole numbers and the four operations."""
    if isinstance(node, ast.Constant):
        return node.value, (str(node.value), NUMBER_BINDS)
    if not isinstance(node, ast.BinOp) or type(node.op) not in SIGNS:
        raise ValueError(f"{type(node).__name__} is not allowed")
    op = SIGNS[type(node.op)]
    a, x = evaluate(node.left)
    b, y = evaluate(node.right)
    return apply(op, a, b), join(op, x, y)


def mode(completion: str, answer: dict) -> str | None:
    """The canonical key of a correct completion, None for a wrong one."""
    text = last_answer(completion)
    if not EXPRESSION.fullmatch(text):
        return None
    numbers = [int(digits) for digits in re.findall("[0-9]+", text)]
    if sorted(numbers) != sorted(answer["numbers"]):
        return None
    # The tree has as many leaves as there are numbers, so it is small. The text may still not be an
    # expression ("2 3 4"), or have a call, a sign or a power in it.
    try:
        value, (key, _) = evaluate(ast.parse(text, mode="eval").body)
    except (SyntaxError, ValueError, ZeroDivisionError):
        return None
    return key if value == answer["target"] else None


def is_whole(value) -> bool:
    """Whether a completion can write this number: its digits have no sign and no point."""
    return type(value) in (int, float) and value >= 0 and value % 1 == 0


def reward(completion: str, answer: dict, **row) -> float:
    """1.0 for a correct completion, else 0.0. Covered and not covered: see the top of this file.
    ValueError for an answer that no completion could match, such as numbers given as text."""
    given = answer if isinstance(answer, dict) else {}
    numbers = given.get("numbers")
    known = isinstance(numbers, (list, tuple)) and len(numbers) > 0
    known = known and type(given.get("target")) in (int, float)
    if not known or not all(map(is_whole, numbers)):
        raise ValueError(
            'countdown: the answer must be {"numbers": whole numbers from 0 up, "target": a number}'
            f", not {answer!r:.100}"
        )
    return float(mode(completion, answer) is not None)


# --- problems


@cache
def problems(config: str) -> dict[str, list[tuple]]:
    """{"train": [(numbers, target, sorted modes), ...], "test": ...}. "test" has 256 problems, or
    128 in a variant of at most 1,000."""
    c = CONFIGS[config]
    targets = range(1, c["max_target"] + 1)
    classes = {}  # of one problem each
    for numbers in combinations(range(c["low"], c["high"] + 1), c["count"]):
        by_value = expressions(numbers, set(targets))  # all targets in one search
        for target in targets:
            if target in numbers and not c["target_among_numbers"]:
                continue
            keys = sorted(text for text, _ in by_value.get(target, ()))
            if c["min_modes"] <= len(keys) <= c["max_modes"]:
                # unlike hash(), the same in every process
                digest = hashlib.sha256(f"{numbers}={target}".encode()).hexdigest()
                classes[digest] = [(numbers, target, keys)]
    return hold_out(classes, 256 if len(classes) > 1000 else 128)


def to_row(config: str, numbers: tuple, target: int, keys: list[str]) -> dict:
    """The row of a problem. keys: its modes, each of which gives one or more solutions."""
    short = f"{','.join(map(str, numbers))}={target}"  # 5,8,9=22
    solutions = []
    if CONFIGS[config]["words"]:
        listed = ", ".join(map(str, numbers))  # 5, 8, 9
        prompt = WORDS.format(numbers=listed, target=target)
        for key in keys:
            reasoning = f"{key} uses {listed} once each and gives {target}."
            solutions.append(worked_solution(reasoning, key))
    else:
        # the colon separates the target from the completion's first number
        prompt = short + ":"
        for key in keys:
            tree = ast.parse(key, mode="eval").body
            # all spellings of a mode, so that a warm start learns no preference
            for text, _ in sorted(spellings(tree)):
                solutions.append(text)
    return {
        "id": f"countdown-{config}-{short}",
        "task": "countdown",
        "prompt": prompt,
        "answer": {"numbers": list(numbers), "target": target},
        "solutions": solutions,
        "num_modes": len(keys),
    }


def rows(split: str, n: int, seed: int, config: str = DEFAULT) -> list[dict]:
    """n rows (-1: all) of "train" or "test"; `seed` only orders them."""
    check_choice("config", config, CONFIGS)
    check_choice("split", split, SPLITS)
    chosen = take(problems(config)[split], n, seed)
    return [to_row(config, *problem) for problem in chosen]
