r"""Mathematics: an answer in \boxed{} or <answer> tags, right if it says the same as the row's.

Rows come from a file or a Hugging Face dataset; this file has none of its own. One row:
  {"prompt": "What is 1/2 + 1/3?", "answer": "5/6"}
The answer may be a whole solution: "2 + 3 = 5\n#### 5" as in GSM8K, or with a \boxed{} as in MATH.

math_reward compares values (math-verify does the algebra); math_exact compares spellings, which
takes microseconds. The docstring of each says what it covers and what it does not.
"""

import logging
import math
import re
from decimal import Decimal
from fractions import Fraction
from functools import lru_cache

from tasks import answer_block

# the `task` of rows that these rewards score; neither takes text outside box and tags for an answer
NAMES = ("math", "math_exact")

MAX_CHARACTERS = 1000  # a longer answer counts as none, which bounds all the work below
TAIL = 10_000  # stated_answer() looks only at this many last characters

# the minus sign of typography, two hyphens, the en dash, the full-width hyphen
MINUS = dict.fromkeys((0x2212, 0x2010, 0x2011, 0x2013, 0xFF0D), "-")
SYMBOLS = MINUS | str.maketrans(
    {
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
        "∅": "\\emptyset",
        "½": "\\frac{1}{2}",
        "¼": "\\frac{1}{4}",
        "¾": "\\frac{3}{4}",
        "€": "",
        "£": "",
    }
)
BRACES = re.compile(r"\\.|[{}]", re.DOTALL)  # \{ matches as \\. and so does not count as a brace
# an answer that a dataset keeps within JSON; {"x": 2, "y": 3} may be an answer itself
WRAPPED = re.compile(r'\s*\{\s*"(?:ground_truth|answer)"\s*:')


# --- finding the answer


def last_box(text: str) -> tuple[int, int] | None:
    r"""(begin, end) of the content of the last complete \boxed{...}. Braces must match, except \{
    and \}, which print a brace."""
    open_braces = []
    start = -1
    end = -1
    # in one pass, because a completion may be full of boxes that never close
    for found in BRACES.finditer(text):
        i = found.start()
        if found[0] == "{":
            open_braces.append(i)
        elif found[0] == "}" and open_braces:
            brace = open_braces.pop()  # where the brace that closes here was opened
            before = text[max(0, brace - 10) : brace].rstrip()  # LaTeX allows \boxed {5}
            if brace > start and before.endswith("\\boxed"):
                start = brace
                end = i
    return (start + 1, end) if start >= 0 else None


def last_boxed(text: str) -> str | None:
    r"""The content of the last complete \boxed{...}; None if there is none."""
    span = last_box(text)
    return text[slice(*span)] if span else None


def stated_answer(text: str) -> str | None:
    r"""What the text gives as its answer: the content of the last \boxed{} or <answer> block,
    whichever closes later; for a block with a box inside, the box's content. None without
    either."""
    text = text[-TAIL:]  # a completion may be a megabyte
    box = last_box(text)
    block = answer_block(text)
    if block and (not box or box[1] < block[1]):
        inner = text[slice(*block)]
        boxed = last_boxed(inner)
        return inner if boxed is None else boxed
    return text[slice(*box)] if box else None


def gold_text(answer) -> str:
    """The row's answer as text. TypeError unless it is a text or a number, ValueError for NaN,
    infinity and an answer inside a JSON object, which no answer would equal."""
    if not isinstance(answer, (str, int, float)):
        kind = type(answer).__name__
        raise TypeError(f"the right answer must be a text or a number, not a {kind}")
    if isinstance(answer, float):
        if not math.isfinite(answer):
            raise ValueError(f"the right answer must be a finite number, not {answer}")
        return format(Decimal(repr(float(answer))), "f")  # 0.00001, not 1e-05
    text = str(answer).rpartition("####")[2]  # GSM8K has the reasoning before this mark
    stated = stated_answer(text)  # in a whole solution, as in the column `solution` of MATH
    right = text if stated is None else stated
    if WRAPPED.match(right):  # as in SYNTHETIC-1
        raise ValueError("the right answer must be bare, not inside a JSON object")
    return right


# --- by value

SPACES = re.compile(r"(?<![0-9])\s+|\s+(?![0-9])")  # all spaces except between two digits
NUMBER = re.compile(r"-?[0-9]{1,400}(?:\.[0-9]{1,400})?")  # any float, as gold_text() writes it
# groups: minus sign, numerator, denominator
LATEX_FRACTION = re.compile(r"(-?)\\[dt]?frac\{(-?[0-9]{1,18})\}\{([0-9]{1,18})\}")
PLAIN_FRACTION = re.compile(r"(-?)(-?[0-9]{1,18})/([0-9]{1,18})")
# a number with a base, 1010_2, whose base math-verify would drop; and Python would read 1_0 as 10
BASE = re.compile(r"(?<![\^0-9])[0-9]+_")  # not x^2_1
BASE_IN_BRACES = re.compile(r"(?<=[0-9])_\{([0-9]+)\}")
# groups: mantissa, exponent; of 1.6\times10^{-19}, 1e5 and 10^{-7}
SCIENTIFIC = re.compile(
    r"(-?[0-9]{1,18}(?:\.[0-9]{1,18})?(?=e|\\times|\\cdot)|-?(?=10\^))"
    r"(?:e|(?:\\times|\\cdot)?10\^)\{?([+-]?[0-9]{1,3})\}?"
)
# 10\,000 and 10 000, which math-verify takes for the product 10 * 000
THOUSANDS = re.compile(r"(?<![0-9.])[0-9]{1,3}(?:(?:\\[,;: ]|~|\s)[0-9]{3})+(?![0-9])")
ROOT = re.compile(r"√(?:([0-9]+(?:\.[0-9]+)?(?!\.?[0-9])|[a-z])|\(([^()]*)\))")  # √12, √(x+1)
IN_WORDS = r"\\(?:text[a-z]*|mathrm|mbox)"  # \text, before its brace
# a word, perhaps in \text{}: math-verify would take its letters for factors, in any order
WORD = re.compile(rf"(?:{IN_WORDS}\{{\s*)?([^\W\d_]{{2,}})\s*\}}?")
# a second guess in words, 5\text{ or 6}, of which math-verify reads only the 5. Numbers that belong
# to units are not guesses: cm^2, m2, (mod 7)
GUESS = re.compile(
    IN_WORDS + r"\s*\{[^{}]*"
    r"(?:(?<![\^_A-Za-z])(?<!mod )(?<!base )[0-9]|\bor\s+[^\s}]|\(\s*or\b)"
)
# signs that make what is beside them another answer: not 5, 7 or 5, 13 mod 8, 6 to 5, 1, ...
OTHER = re.compile(
    r"\\(?:neq?|not|neg|lor|vee|cup|mid|bmod|[lc]?dots|to|(?:long)?rightarrow|Rightarrow|implies)"
    r"(?![a-z])|\?"
)
ALL_WORDS = re.compile(IN_WORDS + r"\{[^{}]*\}")  # \text{June 20}
RELATION = re.compile(r"\\[gl]eq?(?![a-z])|[<>]")
# groups: hour, minutes, half of the day; of 3:30\text{ PM} and 3 p.m.
TIME_OF_DAY = re.compile(
    rf"([0-9]{{1,2}})(?::([0-9]{{2}}))?\s*(?:{IN_WORDS}\{{)?\s*([ap])\.?\s?m\.?\s*\}}?", re.I
)
MAGNITUDES = {"dozen": 12, "hundred": 10**2, "thousand": 10**3}
MAGNITUDES |= {"million": 10**6, "billion": 10**9, "trillion": 10**12}
# groups: number, \text{, word, the brace that closes after it; of 5\text{ million}
MAGNITUDE = re.compile(
    rf"(?<![0-9.,])([0-9]{{1,18}}(?:\.[0-9]{{1,18}})?)\s*({IN_WORDS}\{{)?\s*"
    rf"({'|'.join(MAGNITUDES)})(?![a-z])\s*(\}})?"
)
# 5\text{ feet }7\text{ inches}, of which math-verify reads only the 5
TWO_UNITS = re.compile(
    rf"[0-9]\s*{IN_WORDS}\{{\s*(?!and\b|or\b|if\b|for\b|to\b)[a-z.]+\s*\}}\s*[0-9]"
)
ANGLE = re.compile(r"\\angle\s*\{?([A-Z])([A-Z])([A-Z])\}?")
ASSIGNMENT = re.compile(r"([A-Za-z])=(.+)")
CHOICE = re.compile(r"\(([A-Z])\)|[Oo]ption\s+([A-Z])(?![A-Za-z])")  # (A), Option A
LISTED_CHOICE = re.compile(r"(?<![A-Za-z.])([A-Z])[.:)](?![A-Za-z])")  # A. 12, A) 12, A: 12
CLOCK_OR_DATE = re.compile(r"[0-9]{1,2}:[0-9]{2}|[0-9]+(?:-[0-9]+)+")  # not a ratio or difference
# LaTeX's white space at the ends of an answer
MARGIN = re.compile(r"^(?:\\[ ,;:!]|~|\{\}|\s)+|(?:\\[ ,;:!]|~|\{\}|\s)+$")
# what may stand between two numbers
GAP = r"(?:\s|\\[,;:! ]|[$~])+"
NEXT_NUMBER = "\0"  # stands for a gap in canonical text
# punctuation after the answer, which is no part of it; in 5\, the comma belongs to the backslash
FULL_STOP = re.compile(r"(?<![\\.,;])[.,;。]$")


@lru_cache(maxsize=4096)  # a group shares its gold answer
def parse_math(text: str) -> list:
    """An answer as math-verify parses it; empty if it can't."""
    import math_verify

    # silences its warning that its time limits are off: the worker process has a better one
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    return math_verify.parse(f"\\boxed{{{text}}}", parsing_timeout=None)


def rational(text: str) -> Fraction | None:
    r"""The value of 12, -3.50, 3/4, \frac{3}{4}, 1.6\times10^{-19}, 1e5; None for anything else."""
    if NUMBER.fullmatch(text):
        return Fraction(text)
    if found := SCIENTIFIC.fullmatch(text.replace(" ", "")):
        mantissa, exponent = found.groups()
        one = mantissa in ("", "-")  # 10^5, -10^5
        return Fraction(mantissa + "1" if one else mantissa) * Fraction(10) ** int(exponent)
    found = LATEX_FRACTION.fullmatch(text) or PLAIN_FRACTION.fullmatch(text)
    if not found or int(found[3]) == 0:
        return None
    value = Fraction(int(found[2]), int(found[3]))
    return -value if found[1] else value


def plainly_equal(gold: str, given: str) -> bool | None:
    """Whether two answers are equal, if that can be told without algebra, as is usual; otherwise
    None. Also None for decimals that are equal except for rounding, which are left to
    math-verify."""
    if SPACES.sub("", gold) == SPACES.sub("", given):
        return True
    in_words = ALL_WORDS.fullmatch(gold) or ALL_WORDS.fullmatch(given)
    if in_words and without_text(gold) == without_text(given):
        return True
    a = rational(gold)
    b = rational(given)
    if a is None or b is None:
        return None
    is_near = abs(a - b) <= abs(a) / 1000
    if a != b and is_near and "." in gold + given:
        return None
    return a == b


@lru_cache(maxsize=4096)  # a group often repeats an answer, and algebra takes milliseconds
def same_answer(gold: str, given: str) -> bool:
    """Whether two answers, as cleaned() gives them, are equal in value. What can be told without
    algebra comes first, then what math-verify would get wrong, then math-verify."""
    equal = plainly_equal(gold, given)
    if equal is not None:
        return equal
    gold_word, given_word = WORD.fullmatch(gold), WORD.fullmatch(given)
    if gold_word and given_word:
        if gold_word[1].casefold() == given_word[1].casefold():
            return True
        if not is_product(gold_word[1]):
            return False
    equal = equal_in_kind(gold, given)
    if equal is not None:
        return equal
    if hedges(given) and not hedges(gold):
        return False
    if OTHER.search(given) and not OTHER.search(gold):
        return False
    if rational(gold) is not None and RELATION.search(given):
        return False
    if CLOCK_OR_DATE.fullmatch(gold):  # otherwise 10:30 would be a third, and 1990-1995 a number
        return canonical_math(gold) == canonical_math(given)
    import math_verify

    right, answer = parse_math(gold), parse_math(given)
    if not right:
        return False
    if math_verify.verify(right, answer, timeout_seconds=None):
        return True
    # x>=1 is the interval [1,\infty), but math-verify sees this only with the inequality first. The
    # order is not swapped for other answers: lists would then be compared as sets
    is_inequality = RELATION.search(given) and without_sizes(gold).endswith((")", "]"))
    return bool(is_inequality) and math_verify.verify(answer, right, timeout_seconds=None)


def equal_in_kind(gold: str, given: str) -> bool | None:
    """Whether two answers are equal, for the kinds that math-verify would mix up: times of day, two
    units, angles, letters of choices, named values, sets and pairs. Otherwise None."""
    time = TIME_OF_DAY.fullmatch(gold)
    if time and re.search(r"[\\.:\s]", gold):  # 3am alone is a product
        if other := TIME_OF_DAY.fullmatch(given):
            return time_of(time) == time_of(other)
        return time[2] is not None and given == f"{time[1]}:{time[2]}"
    if TWO_UNITS.search(gold):
        return without_text(gold) == without_text(given)
    angle, other = ANGLE.fullmatch(gold), ANGLE.fullmatch(given)
    if angle and other:
        return angle[2] == other[2] and {angle[1], angle[3]} == {other[1], other[3]}
    letters = {a or b for a, b in CHOICE.findall(given)} or set(LISTED_CHOICE.findall(given))
    if letters and re.fullmatch("[A-Z]", gold):
        return letters == {gold}
    values = assignments(gold)
    if len(values) > 1:
        return same_values(values, given)
    if (is_set(gold) and is_ordered(given)) or (is_ordered(gold) and is_set(given)):
        return False
    return None


def time_of(found: re.Match) -> tuple:
    return int(found[1]), int(found[2] or 0), found[3].lower()


def without_text(text: str) -> str:
    r"""canonical_math() without the \text{} around words, in lower case."""
    return canonical_math(re.sub(IN_WORDS + r"\{([^{}]*)\}", r"\1", text)).lower()


def without_sizes(text: str) -> str:
    r"""The text without spaces, \left and \right."""
    return re.sub(r"\\left(?![a-z])|\\right(?![a-z])|\s", "", text)


def parts_of(text: str) -> list[str]:
    """The parts that commas, semicolons and "and" separate, outside brackets of any kind."""
    text = re.sub(rf"{IN_WORDS}\{{\s*and\s*\}}|(?<![A-Za-z])and(?![A-Za-z])", ",", text)
    text = re.sub(r"\s|\\[,;:! ]|\\quad", "", text).replace(";", ",")
    parts = [""]
    depth = 0
    for character in text:
        depth += (character in "({[") - (character in ")}]")
        if character == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return parts


def assignments(text: str) -> dict[str, str]:
    """{name: value} of x=1, y=2, and of (x,y)=(1,2); {} for anything else, such as x=1, x=2."""
    names, _, values = text.replace(" ", "").partition("=")
    if is_one_pair(names) and is_one_pair(values):
        names, values = parts_of(names[1:-1]), parts_of(values[1:-1])
        return dict(zip(names, values)) if len(names) == len(values) else {}
    found = [ASSIGNMENT.fullmatch(part) for part in parts_of(text)]
    if not all(found):
        return {}
    named = {each[1]: each[2] for each in found}
    return named if len(named) == len(found) else {}


def same_values(values: dict[str, str], given: str) -> bool:
    """Whether an answer has these values, under the same names or, without names, in this order."""
    named = assignments(given)
    if named:
        return named.keys() == values.keys() and all(
            same_answer(values[name], named[name]) for name in values
        )
    given = without_sizes(given)
    if given.startswith("\\{"):  # a set has no order
        return False
    parts = parts_of(given[1:-1] if is_one_pair(given) else given)
    return len(parts) == len(values) and all(map(same_answer, values.values(), parts))


def is_set(text: str) -> bool:
    """Whether the text lists values: \\{1,2\\}, \\pm 2, x=1 or x=2."""
    names = re.findall(r"([A-Za-z])\s*=", text)
    return text.startswith(("\\{", "\\pm")) or (len(names) > 1 and len(set(names)) == 1)


def is_ordered(text: str) -> bool:
    """Whether the text is a pair, which may also be an open interval: (1,2), or a chain 1<x<2."""
    text = without_sizes(text)
    return (is_one_pair(text) and text[0] == "(") or len(RELATION.findall(text)) == 2


def is_product(word: str) -> bool:
    """Whether a word may be a product of variables, such as xyz, which equals zyx."""
    return len(word) <= 3 and not word.isupper()


def hedges(text: str) -> bool:
    """Whether words after an answer give another one."""
    return any(text[: found.start()].strip(" $\\({") for found in GUESS.finditer(text))


def math_reward(completion: str, answer: str, **row) -> float:
    r"""1.0 if the content of the last \boxed{} or <answer> equals `answer` in value, else 0.0.

    Covered: fractions, roots, sets, intervals, equations, units that math-verify knows; 1/2 equals
    0.5; 10\,000 and 10 000 are 10000, 5\text{ million} is 5000000; x=1, y=2 is (1,2) but not (2,1);
    a pair or open interval is not a set; words of four letters or more are compared as words; a
    full stop, comma or semicolon at the end is ignored. Not covered, so 0: an answer outside
    \boxed{} and <answer>, an answer of over 1,000 characters, the mixed number 1 1/2, the bold
    **12**, 52 for 52_8, 1/3 for 0.\overline{3}, some units that are not in \text{} (18 dollars), a
    number in \text{} after the answer, 5\text{ or 6}. Numbers after the first unit are not read:
    3\text{ hours }40\text{ minutes} is 3, unless the right answer has two units."""
    right = gold_text(answer)
    given = stated_answer(completion) or ""
    if len(given) > MAX_CHARACTERS:
        return 0.0
    given = cleaned(given)
    gold = cleaned(right)
    if not given:
        return 0.0
    if BASE.search(given) or BASE.search(gold):
        return float(canonical_base(given) == canonical_base(gold))
    return float(same_answer(gold, given))


def cleaned(text: str) -> str:
    """An answer without punctuation at its end, without separators of thousands, and with LaTeX
    instead of symbols."""
    text = MARGIN.sub("", FULL_STOP.sub("", MARGIN.sub("", text.translate(SYMBOLS))))
    text = ROOT.sub(lambda found: f"\\sqrt{{{found[1] or found[2]}}}", text)
    text = re.sub(r"\\mathbb\s+([A-Z])", r"\\mathbb{\1}", text)
    text = MAGNITUDE.sub(in_digits, text.replace("\\varnothing", "\\emptyset"))
    text = THOUSANDS.sub(lambda found: re.sub("[^0-9]", "", found[0]), text)
    return text.replace("~", " ")  # 5~\mathrm{kg}: math-verify can't read ~


def in_digits(found: re.Match) -> str:
    """5000000 for 5\\text{ million}, 5000000\\text{ dollars} for 5\\text{ million dollars}."""
    number, opening, word, closing = found.groups()
    value = Decimal(number) * MAGNITUDES[word]
    if opening and not closing:
        return f"{value.normalize():f}{opening} "
    return f"{value.normalize():f}{'' if opening else closing or ''}"


def canonical_base(text: str) -> str:
    """canonical_math(), and 52_8 for 52_{8}."""
    return BASE_IN_BRACES.sub(r"_\1", canonical_math(text))


# --- by spelling


def canonical_math(text: str) -> str:
    r"""One spelling for answers that differ only in how they are written: no spaces, $, \left,
    \right, no outer pair of braces or parentheses, a/b for \frac{a}{b}, \pi for its letter, 0 for
    -0, 5 for 5.0. It does no arithmetic (1/2 and 0.5 stay different) and keeps a full stop."""
    text = text.translate(SYMBOLS)
    # 1 1/2 becomes 1+1/2: without its space it would be 11/2
    text = re.sub(rf"(?<=[0-9]){GAP}(?=[0-9]+/[0-9])", "+", text)
    # 1 2 becomes 1\0 2. Not 12 000, whose space the next line removes
    text = re.sub(rf"(?<=[0-9]){GAP}(?=[0-9])(?![0-9]{{3}}(?![0-9]))", NEXT_NUMBER, text)
    text = re.sub(r"\\left(?![a-z])|\\right(?![a-z])|\\[,;:! $]|[\s$~]", "", text)
    text = re.sub(r"\\[dt]frac(?![a-z])", r"\\frac", text)
    text = re.sub(r"\\frac([0-9])([0-9])", r"\\frac{\1}{\2}", text)  # \frac12
    for _ in range(20):  # innermost first; fractions nested beyond 20 levels stay as they are
        text, changed = re.subn(r"\\frac\{([^{}]*)\}\{([^{}]*)\}", plain_fraction, text)
        if not changed:
            break
    if is_one_pair(text):
        text = text[1:-1]
    text = re.sub(r"(?<![0-9.])([0-9]+)\.0+(?![0-9])", r"\1", text)  # 5.0
    return re.sub(r"(?<![0-9a-zA-Z.)}])-0(?![0-9.])", "0", text)  # -0


def plain_fraction(found: re.Match) -> str:
    r"""a/b for a match of \frac{a}{b}. a, b or the whole get parentheses where the meaning would
    change without them: 2\frac{1}{2} is not 21/2."""
    a, b = found.groups()
    if not re.fullmatch(r"(\\?[0-9a-zA-Z.])*", a):
        a = f"({a})"
    if not re.fullmatch(r"[0-9.]+|[a-zA-Z]|\\[a-z]+", b):
        b = f"({b})"
    before = found.string[: found.start()][-1:]
    after = found.string[found.end() :][:1]
    if re.match("[0-9a-zA-Z.^_/]", before) or re.match("[0-9.^_!]", after):
        return f"({a}/{b})"
    return f"{a}/{b}"


def is_one_pair(text: str) -> bool:
    """Whether the first character opens the brace or parenthesis that the last character closes."""
    if text[:1] + text[-1:] not in ("()", "{}"):
        return False
    depth = 0
    for i, character in enumerate(text):
        if character in "({":
            depth += 1
        elif character in ")}":
            depth -= 1
        if depth == 0:
            return i == len(text) - 1
    return False


def math_exact(completion: str, answer: str, **row) -> float:
    """1.0 if the content of the last <answer> is `answer`, perhaps spelled differently, else 0.0.

    Covered: the differences that canonical_math removes. Not covered, so 0: equal values in
    different forms (1/2, 0.5); the right answer anywhere else in the text; an answer of over 1,000
    characters."""
    block = answer_block(completion)
    gold = canonical_math(gold_text(answer))
    if not block or not gold or block[1] - block[0] > MAX_CHARACTERS:
        return 0.0
    return float(canonical_math(completion[slice(*block)]) == gold)
