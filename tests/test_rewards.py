r"""rewards.py, rewards.py, workers.py: right scores for hostile text, and functions that hang, crash or eat memory, in real worker processes."""

import functools
import itertools
import json
import math
import os
import random
import signal
import subprocess
import sys
import time
from fractions import Fraction
from pathlib import Path

import psutil
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import rewards
import scoring
import workers
from common import RunStopped, UserError
from rewards import canonical_math, math_exact, math_reward
from tasks import countdown

ROOT = Path(__file__).resolve().parent.parent
SLACK = 30.0  # seconds on top of what the limits allow: the machine may be busy, and a new worker takes a second to start
LIMITS = {
    "reward_workers": 2,
    "reward_timeout": 15.0,
    "reward_memory_gib": 1.0,
    "max_completion_length": 100,
    "soft_overlong_buffer": 20,
}
TIMEOUT, ERROR, INF, NAN = scoring.TIMEOUT, scoring.ERROR, math.inf, math.nan

# A module of somebody who writes rewards; what it does is said by the completion.
HOSTILE = r"""
import ctypes, os, re, signal, subprocess, sys, threading, time
from pathlib import Path

FOLDER = Path(__file__).parent


def note(name, line):
    with open(FOLDER / name, "a") as file:
        file.write(f"{line}\n")


def forever():
    while True:
        try:
            time.sleep(1000)
        except BaseException:
            pass


def spin():
    while True:
        pass


def fork(then):
    pid = os.fork()
    note("children", pid or os.getpid())
    return then() if pid else forever()


def daemon():  # a process in a session of its own, whose parent has gone
    pid = os.fork()
    if not pid:
        os.setsid()
        if not os.fork():
            os.setsid()
            note("daemons", os.getpid())
            forever()
        os._exit(0)
    os.waitpid(pid, 0)
    while not (FOLDER / "daemons").exists():
        time.sleep(0.01)
    return 1.0


def write(data):
    for fd in range(3, 1000):
        try:
            os.write(fd, data)
        except OSError:
            pass
    return 1.0


def raises(error):
    raise error


def grow():
    found = []
    while True:
        found.append(bytearray(1 << 20))


def dive(n):
    return dive(n + 1) + 1


class Mute(Exception):
    def __str__(self):
        raise ValueError("no words")


ACTS = {
    "sleep": forever, "spin": spin, "spin_in_c": lambda: any(iter(int, 1)), "power": lambda: float(9**9**9 % 7),
    "regex": lambda: re.match("(a+)+$", "a" * 60 + "b"),
    "deaf": lambda: [signal.signal(s, signal.SIG_IGN) for s in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)] and forever(),
    "threads": lambda: [threading.Thread(target=forever).start() for _ in range(3)] and forever(),
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "lock": lambda: (lock := threading.Lock()).acquire() and lock.acquire(),
    "fork": lambda: fork(forever), "fork_and_leave": lambda: fork(lambda: os._exit(3)),
    "system_and_leave": lambda: os.system(f"sleep 1000 & echo $! >> '{FOLDER}/children'") or os._exit(3),
    "fork_and_answer": lambda: fork(lambda: 1.0),
    "daemon": daemon, "daemon_and_leave": lambda: daemon() and os._exit(0),
    "freeze_keeper": lambda: daemon() and (os.kill(os.getppid(), signal.SIGSTOP) or 1.0),
    "fork_and_return": lambda: os.fork() * 0 + 1.0,
    "subprocess": lambda: note("children", (p := subprocess.Popen(["sleep", "1000"])).pid) or p.wait(),
    "raise": lambda: raises(ValueError("this one")), "mute": lambda: raises(Mute()), "interrupt": lambda: raises(KeyboardInterrupt()),
    "unprintable": lambda: raises(ValueError("\ud800 \x1b[2J\nnext line \x00" + "x" * 10_000)),
    "sys.exit": lambda: sys.exit(0), "os._exit": lambda: os._exit(0), "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "kill_group": lambda: os.kill(0, signal.SIGKILL), "realtime": lambda: os.kill(os.getpid(), 40), "abort": os.abort, "segfault": lambda: ctypes.string_at(8),
    "recursion": lambda: dive(0), "stack": lambda: sys.setrecursionlimit(10**9) or dive(0),
    "nan": lambda: float("nan"), "inf": lambda: float("inf"), "-inf": lambda: float("-inf"), "huge": lambda: -1e300, "long": lambda: 10**400,
    "none": lambda: None, "text": lambda: "good", "complex": lambda: 1j, "list": lambda: [1.0],
    "allocate": lambda: len(bytearray(100 << 30)), "grow": grow,
    "garbage": lambda: write(b"garbage\n"), "bytes": lambda: write(b"\xff\xfe\x00\n"), "forged": lambda: write(b"1.0\n"), "others": lambda: write(b"[7777, 1.0]\n"),
    "pairs": lambda: write(b'{"error": 1}\n[]\n[1]\n[[0], 1]\nnull\n'), "flood": lambda: write(b"x" * 100_000),
    "endless": lambda: any(write(b"x" * 50_000) > 1 for _ in iter(int, 1)), "close": lambda: os.closerange(0, 1000),
    "print": lambda: print("garbage", flush=True) or bool(sys.stderr.write("more garbage\n")), "close_stdout": lambda: sys.stdout.close() or 1.0,
    "chdir": lambda: os.chdir("/") or 1.0, "run": lambda: float(subprocess.run(["true"]).returncode == 0),
    "true": lambda: True, "integer": lambda: 3, "stdin": lambda: float(sys.stdin.read() == ""),
    "light": lambda: float(not any(name in sys.modules for name in ("torch", "vllm", "transformers", "numpy", "math_verify"))),
    "loaded": lambda: float(__import__("rewards").parse_math.cache_info().currsize > 0),
}


def act(completion, answer, **row):
    if completion.startswith("nap "):
        time.sleep(0.45)
        return 1.0
    if completion.startswith("count "):
        note("counted", completion)
        return 1.0
    return ACTS[completion]() if completion in ACTS else float(completion)


def level(completion, answer, level, **row):
    return level


def tenfold(completion, answer, **row):
    return 10 * float(completion)


not_a_function = 5
"""


def config(*funcs, weights=None, **limits) -> dict:
    return {
        "reward_funcs": list(funcs),
        "reward_weights": weights or [1.0] * len(funcs),
        **LIMITS,
        **limits,
    }


def row_of(task: str, answer="", **more) -> dict:
    return {"id": f"a row of {task}", "task": task, "prompt": "", "answer": answer, **more}


def rollouts_of(texts, tokens: int = 10) -> list[dict]:
    return [{"text": text, "completion_ids": [0] * tokens} for text in texts]


def columns_for(c: dict, rows: list[dict]) -> list:
    return scoring.columns_of(c["reward_funcs"], c["reward_weights"], rows)


def measured(texts, row: dict, c: dict) -> tuple[list, list]:
    """What the first function says of each text, and the record of failures."""
    values, failed = scoring.measure(rollouts_of(texts), [row], columns_for(c, [row]), c)
    return values[0, :, 0].tolist(), failed


def lines_of(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


def runs(pid: int) -> bool:
    try:
        return (
            psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
        )  # an orphan's zombie is its new parent's business
    except psutil.NoSuchProcess:
        return False


def come_true(condition, seconds: float = SLACK) -> bool:
    late = time.monotonic() + seconds
    while not condition() and time.monotonic() < late:
        time.sleep(0.02)
    return condition()


def refusal(what, *args) -> str:
    start = time.monotonic()
    with pytest.raises(UserError) as caught:
        what(*args)
    assert "\n" not in str(caught.value) and time.monotonic() - start < SLACK
    return str(caught.value)


@pytest.fixture(scope="module", autouse=True)
def folder(tmp_path_factory):
    """Where hostile.py lies; the workers that the tests start are stopped in the end."""
    path, pools, make = tmp_path_factory.mktemp("hostile"), [], scoring.make_pool.__wrapped__
    (path / "hostile.py").write_text(HOSTILE)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(path))
        patch.setattr(
            scoring,
            "make_pool",
            functools.cache(lambda *args: pools.append(make(*args)) or pools[-1]),
        )
        yield path
    for pool in pools:
        pool.close()


@pytest.fixture(autouse=True)
def no_test_hangs():
    def stop(*_):
        raise TimeoutError("a test took over 100 s")

    signal.signal(signal.SIGALRM, stop)
    signal.alarm(100)
    yield
    signal.alarm(0)


# --- hostile text, through the workers, for every reward

TEN = {"numbers": [2, 3, 4], "target": 10}
BOARD = {"board": "AAB...B.........", "size": 4, "moves": 2, "solution": "BD1,AR2"}
ANSWERS = {
    "countdown": TEN,
    "graph_coloring": {"n": 3, "edges": [[0, 1], [1, 2]], "partial": "R.."},
    "crossword": {"answer": "SILENT", "enumeration": "6"},
    "rush_hour": BOARD,
    "rush_hour_exact": BOARD,
    "rush_hour_shaped": BOARD,
    "math": "10",
    "math_exact": "10",
}
EVERY = [
    row_of(name, ANSWERS.get(name, "")) for name in rewards.REWARDS
]  # a row for each reward, which "auto" gives to that reward
MEGABYTE = 1_000_000
PWNED = Path("/tmp") / f"pwned_{os.getpid()}"
LOOP = 1 / 499_998 - 1  # of 500,000 times one word


def judged(texts, c: dict) -> tuple[dict, list]:
    """{reward: [what it says of each text]}, failures; and no reward says anything of another's row."""
    columns = columns_for(c, EVERY)
    values, failed = scoring.measure(rollouts_of(list(texts) * len(EVERY)), EVERY, columns, c)
    place = {column.name: f for f, column in enumerate(columns)}
    own = torch.tensor([place[row["task"]] for row in EVERY])
    assert (values.isnan().sum((1, 2)) == len(texts) * (len(columns) - 1)).all()
    return {row["task"]: values[i, :, own[i]].tolist() for i, row in enumerate(EVERY)}, failed


def check_judgement(texts, expected: dict) -> None:
    """`expected` names what is not 0; length is -0.1 for all, they have 10 of 100 tokens."""
    start, c = time.monotonic(), config("auto")
    found, failed = judged(texts, c)
    assert not failed and not PWNED.exists()
    zero = [0.0] * len(texts)
    assert found == {
        name: pytest.approx(
            expected.get(name, [-0.1] * len(texts) if name == "length" else zero), abs=1e-6
        )
        for name in rewards.REWARDS
    }
    assert time.monotonic() - start < c["reward_timeout"] + SLACK


# what a payload is worth as it is, as <answer>payload</answer> and as \boxed{payload}; it has no tags
PAYLOADS = {
    "power": ("9**9**9", {}),
    "two powers": ("99**98**97", {}),
    "power of latex": ("9^{9^{9}}" + "1" * 1000, {}),
    "parentheses": ("(" * 10_000 + "5" + ")" * 10_000, {}),
    "parentheses around gold": ("(" * 10_000 + "10" + ")" * 10_000, {}),
    "open parentheses": ("(" * 10_000, {}),
    "braces": ("{" * 500 + "10" + "}" * 500, {}),
    "minuses": ("-" * 10_000 + "10", {}),
    "signs": ("+-" * 99 + "10", {}),
    "megabyte of words": (
        "10 " * 500_000,
        {"repetition": [LOOP, 3 / 499_999 - 1, 3 / 499_999 - 1]},
    ),
    "megabyte without a space": ("1" * MEGABYTE, {}),
    "megabyte of spaces": (" " * MEGABYTE, {}),
    "megabyte of braces": ("{" * MEGABYTE, {}),
    "megabyte of closing braces": ("}" * MEGABYTE, {}),
    "megabyte of boxes": ("\\boxed{" * (MEGABYTE // 7), {}),
    "megabyte before gold": (" " * MEGABYTE + "10", {}),
    "empty": ("", {}),
    "spaces": (" \t\n\r ", {}),
    "gold": ("10", {"math": [0, 1, 1], "math_exact": [0, 1, 0]}),
    "gold with spaces": (" \n10\t", {"math": [0, 1, 1], "math_exact": [0, 1, 0]}),
    "gold in dollars": ("$10$", {"math": [0, 1, 1], "math_exact": [0, 1, 0]}),
    "gold as a fraction": ("\\frac{20}{2}", {"math": [0, 1, 1]}),
    "gold in words": ("ten", {}),
    "import": (f"__import__('os').system('touch {PWNED}')", {}),
    "import in parentheses": (f"(__import__('os').system('touch {PWNED}'), 7)[1]", {}),
    "no mathematics": ("7 ? 10", {"math": [0, 1, 1]}),
    "no mathematics, the last number wrong": ("10 ? 7", {}),  # math-verify reads the last number
    "classes": ("().__class__.__bases__[0].__subclasses__()", {}),
    "eval": (f"eval(\"__import__('os').system('touch {PWNED}')\")", {}),
    "lambda": (f"(lambda: open('{PWNED}', 'w'))()", {}),
    "operatorname": (
        f"\\operatorname{{__import__}}(\\text{{os}}).system(\\text{{touch {PWNED}}})",
        {},
    ),
    "shell": (f"$(touch {PWNED}) `touch {PWNED}` ; touch {PWNED} | touch {PWNED}", {}),
    "tex": (f"\\input{{|touch {PWNED}}} \\write18{{touch {PWNED}}}", {}),
    "template": ("{{7*7}} {answer} {0.__class__} %s%n%x", {}),
    "pickle": (f"cos\nsystem\n(S'touch {PWNED}'\ntR.", {}),
    "arabic digits": ("\u0661\u0660", {}),
    "fullwidth digits": ("\uff11\uff10", {}),
    "bold digits": ("\U0001d7cf\U0001d7ce", {}),
    "circled": ("\u2469", {}),
    "roman": ("\u2169", {}),
    "minus sign": ("\u221210", {}),
    "two minus signs": ("\u2212\u221210", {"math": [0, 1, 1]}),
    "fullwidth countdown": ("\uff12*\uff13+\uff14", {}),
    "countdown with a dash": ("2*3\u2212\u22124", {"math": [0, 1, 1]}),
    "unicode operators": ("2\u00d73+4", {"math": [0, 1, 1]}),
    "underscore": ("1_0", {}),
    "underscores": ("1_0_", {}),
    "hexadecimal": ("0xA", {}),
    "exponent": ("1e1", {}),
    "complex": ("10+1j", {}),
    "leading zero": ("0b1010", {}),
    "nested empty box": ("\\boxed{\\boxed{}}", {}),
    "nested box": ("\\boxed{\\boxed{10}}", {"math": [1, 1, 1]}),
    "box that never closes": ("\\boxed{10", {"math": [0, 1, 1]}),
    "box closed too soon": ("10} \\boxed{", {}),
    "substring": ("110", {}),
    "gold and more": ("10 is not it, 7 is", {}),
    "gold among others": ("7, 8, 9, 10, 11", {}),
    "or": ("7 or 10", {}),
    "set": ("\\{7, 10\\}", {}),
    "gold times": ("10x", {}),
    "gold plus": ("10+", {}),
    "decimals": ("10.5", {}),
    "nearly": ("10.0000001", {}),
    "pair": ("(10, 10)", {}),
    "not": ("x \\neq 10", {}),
    "NUL": ("\0", {}),
    "NUL after": ("10\0", {}),
    "NUL within": ("1\x000", {}),
    "NULs": ("\0" * 900, {}),
    "surrogate": ("\ud800", {}),
    "surrogate after": ("10\udfff", {}),
    "surrogates": ("\udcff\ud800" * 400, {}),
    "right to left": ("\u202e01", {}),
    "zero width": ("1\u200b0", {}),
    "byte order": ("\ufeff10", {}),
    "combining": ("10\u0301", {}),
    "escape sequences": ("\x1b[2J\x1b]0;10\x07", {}),
    "infinite": ("\\infty", {}),
    "nan": ("nan", {}),
    "inf": ("1e999", {}),
    "long number": ("1" * 5000, {}),
    "number of 999 digits": ("9" * 999, {}),
    "fractions": ("\\frac{1}{" * 5 + "10" + "}" * 5, {}),
    "open fractions": ("\\frac{" * 160, {}),
    "roots": ("\\sqrt{" * 30 + "10" + "}" * 30, {}),
    "zeros": ("-0" * 150, {}),
    "dots": ("1.0" * 100, {}),
    "dollars": ("$" * 950, {}),
    "lefts": ("\\left(" * 15, {}),
    "backslashes": ("\\" * 999, {}),
    "division by zero": ("1/0", {}),
    "division by zero in latex": ("\\frac{10}{0}", {}),
    "zero power": ("0^{-1}", {}),
    "ready": ('[0, "ready"]', {}),
    "answer of a worker": ("[1, 1.0]", {}),
    "error of a worker": ('{"error": "x"}', {}),
    "countdown": ("2*3+4", {"countdown": [1, 1, 0], "math": [0, 1, 1]}),
    "countdown of an assignment": ("(x:=2)*3+4", {}),
    "countdown as a call": ("2*3+4()", {}),
    "countdown with a comment": ("2*3+4#", {}),
    "countdown in two lines": ("2*3\n+4", {"math": [0, 1, 1]}),
    "floor division": ("2*3//1+4", {}),
    "moves": (
        "BD1,AR2",
        {"rush_hour": [1, 1, 0], "rush_hour_exact": [1, 1, 0], "rush_hour_shaped": [1, 1, 0]},
    ),
    "many moves": ("BD1," * 90 + "AR2", {}),
    "colours": ("RGR", {"graph_coloring": [1, 1, 0]}),
    "cyrillic colours": ("R\u0413R", {}),
    "letters": ("silent", {"crossword": [1, 1, 0]}),
}


@pytest.mark.parametrize("name", PAYLOADS)
def test_a_hostile_payload_gets_its_score_in_time_and_nothing_of_it_runs(name):
    payload, expected = PAYLOADS[name]
    check_judgement(
        [payload, f"<answer>{payload}</answer>", f"\\boxed{{{payload}}}"],
        {"tag_count": [0, 0.5, 0], **expected},
    )


# texts with tags; (text, what is not 0)
THINK = "<think></think>"
TEXTS = {
    "unclosed answer": ("<answer>10", {"tag_count": 0.25}),
    "unclosed thought": (
        "<think><answer>10</answer>",
        {"tag_count": 0.75, "math": 1, "math_exact": 1},
    ),
    "answer never opened": ("10</answer>", {"tag_count": 0.25}),
    "tags the wrong way round": ("</answer>10<answer>", {"tag_count": 0.5}),
    "opened twice": (
        "<answer>7<answer>10</answer>",
        {"tag_count": 0.25, "math": 1, "math_exact": 1},
    ),
    "closed twice": (
        "<answer>10</answer>7</answer>",
        {"tag_count": 0.25, "math": 1, "math_exact": 1},
    ),
    "another after it that never closes": (
        "<answer>10</answer><answer>7",
        {"tag_count": 0.25, "math": 1, "math_exact": 1},
    ),
    "two answers, the second right": (
        "<answer>7</answer><answer>10</answer>",
        {"math": 1, "math_exact": 1},
    ),
    "two answers, the first right": ("<answer>10</answer><answer>7</answer>", {}),
    "two countdowns, the second right": (
        "<answer>2+3+4</answer> <answer>2*3+4</answer>",
        {"countdown": 1, "math": 1},
    ),
    "two countdowns, the first right": ("<answer>2*3+4</answer> <answer>2+3+4</answer>", {}),
    "two boxes, the second right": ("\\boxed{7} \\boxed{10}", {"math": 1}),
    "two boxes, the first right": ("\\boxed{10} \\boxed{7}", {}),
    "box after the answer": ("<answer>7</answer> \\boxed{10}", {"math": 1, "tag_count": 0.5}),
    "answer after the box": ("\\boxed{10} <answer>7</answer>", {"tag_count": 0.5}),
    "box in the answer": ("<answer>\\boxed{10}</answer>", {"math": 1, "tag_count": 0.5}),
    "box in the answer, wrong": ("<answer>10 \\boxed{7}</answer>", {"tag_count": 0.5}),
    "answer in a box": ("\\boxed{<answer>10</answer>}", {"tag_count": 0.5, "math_exact": 1}),
    "two attempts in one answer": ("<answer>10} \\boxed{7</answer>", {"tag_count": 0.5}),
    "the other way round": ("<answer>7} \\boxed{10</answer>", {"tag_count": 0.5}),
    "gold in the thought only": (
        "<think>10 10</think><answer>7</answer>",
        {"tag_count": 1, "format": 1},
    ),
    "gold around a wrong answer": ("10 <answer>7</answer> 10", {"tag_count": 0.5}),
    "no answer in the right form": (f"{THINK}<answer></answer>", {"tag_count": 1, "format": 1}),
    "all right": (
        f"{THINK}<answer>10</answer>",
        {"tag_count": 1, "format": 1, "math": 1, "math_exact": 1},
    ),
    "NUL between": (f"{THINK}\0<answer>10</answer>", {"tag_count": 1, "math": 1, "math_exact": 1}),
    "a tag with a space": ("<answer >10</answer>", {"tag_count": 0.25}),
    "a tag in capitals": ("<ANSWER>10</ANSWER>", {}),
    "a megabyte of opening tags": ("<answer>" * (MEGABYTE // 8), {}),
    "a megabyte of closing tags": ("</answer>" * (MEGABYTE // 9), {}),
    "a megabyte of answers": (
        "<answer>7</answer>" * (MEGABYTE // 18) + "<answer>10</answer>",
        {"math": 1, "math_exact": 1},
    ),
    "a megabyte of boxes": ("\\boxed{7}" * (MEGABYTE // 9) + "\\boxed{10}", {"math": 1}),
    "a megabyte after the answer": (
        "<answer>10</answer>" + "x" * MEGABYTE,
        {"tag_count": 0.5, "math_exact": 1},
    ),
    "a megabyte of thought": (
        "<think>" + "y" * MEGABYTE + "</think><answer>10</answer>",
        {"tag_count": 1, "format": 1, "math": 1, "math_exact": 1},
    ),
    "nested boxes": ("\\boxed{" * 140_000 + "10" + "}" * 140_000, {}),
}


@pytest.mark.parametrize("name", TEXTS)
def test_tags_in_any_order_get_their_score_in_time(name):
    text, expected = TEXTS[name]
    check_judgement([text], {reward: [value] for reward, value in expected.items()})


def test_gold_with_underscore_minus_and_base():
    texts = [
        "\\boxed{1_0}",
        "\\boxed{1010_2}",
        "\\boxed{1010_3}",
        "\\boxed{\u22125}",
        "\\boxed{\u066a5}",
    ]
    for gold, right in (("10", []), ("1010_2", [1]), ("-5", [3])):
        assert [math_reward(text, gold) for text in texts] == [
            float(i in right) for i in range(len(texts))
        ]
    assert (
        countdown.reward("1_0", {"numbers": [10], "target": 10})
        == countdown.reward("\u0661\u0660", {"numbers": [10], "target": 10})
        == 0.0
    )


BOMBS = [
    "9^{9^{9}}",
    "(" * 400 + "5" + ")" * 400,
    "\\sum_{k=1}^{10^{9}} k^{k}",
    "\\int_0^1 x^{x^{x}} dx",
]


def test_sympy_bombs_score_zero_and_what_stands_beside_them_its_own(folder):
    """Each may time out; 100000000! and the like are the same."""
    c, start = config("math", reward_workers=4, reward_timeout=2.0), time.monotonic()
    texts = [f"\\boxed{{{text}}}" for bomb in BOMBS for text in (bomb, "10", "7")]
    values, _ = measured(texts, row_of("math", "10"), c)
    assert values[1::3] == [1.0] * len(BOMBS) and values[2::3] == [0.0] * len(BOMBS)
    assert set(values[0::3]) <= {0.0, TIMEOUT, ERROR} and TIMEOUT in values
    assert scoring.score(rollouts_of(texts[1:3]), [row_of("math", "10")], c)[0].tolist() == [
        [1.0, 0.0]
    ]
    assert time.monotonic() - start < len(BOMBS) * c["reward_timeout"] + SLACK


FRAGMENTS = [
    "<answer>",
    "</answer>",
    "<think>",
    "</think>",
    "\\boxed{",
    "\\frac{",
    "{",
    "}",
    "(",
    ")",
    "10",
    "2*3+4",
    "RGR",
    "BD1,AR2",
    "SILENT",
    "-",
    "0",
    ".",
    ".0",
    "$",
    " ",
    "\n",
    "\\left",
    "\\right",
    "\\",
    "\\{",
    "\u2212",
    "\u03c0",
    "\0",
    "\ud800",
    "_",
    "/",
    "12",
    "\\pi",
    "x",
    ",",
]


@settings(derandomize=True, deadline=None, max_examples=150)
@given(st.lists(st.sampled_from(FRAGMENTS), max_size=25).map("".join))
def test_no_text_makes_a_reward_raise_or_give_anything_but_a_small_number(text):
    for row in EVERY:
        value = workers.answer(
            row["task"],
            text,
            {**row, "tokens": 10, "max_completion_length": 100, "soft_overlong_buffer": 20},
        )
        assert isinstance(value, float) and -1 <= value <= 1


# --- finding the answer


def slow_box(text: str) -> str | None:
    """The content of the complete box that opens last, by counting from each opening."""
    for start in reversed([i for i in range(len(text)) if text.startswith("\\boxed{", i)]):
        depth = 1
        for i in range(start + 7, len(text)):
            depth += (text[i] == "{") - (text[i] == "}")
            if depth == 0:
                return text[start + 7 : i]
    return None


def slow_block(text: str) -> str | None:
    for start in reversed([i for i in range(len(text)) if text.startswith("<answer>", i)]):
        if "</answer>" in text[start:]:
            return text[start + 8 : text.index("</answer>", start)]
    return None


@settings(derandomize=True, deadline=None, max_examples=500)
@given(
    st.lists(
        st.sampled_from(["\\boxed{", "\\boxed", "{", "}", "<answer>", "</answer>", "1", "2"]),
        max_size=14,
    ).map("".join)
)
def test_boxes_and_answers_are_those_that_a_slow_search_finds(text):
    assert rewards.last_boxed(text) == slow_box(text)
    block = rewards.answer_block(text)
    assert (text[slice(*block)] if block else None) == slow_block(text)
    assert rewards.stated_answer(text) in (
        slow_box(text),
        slow_block(text),
        slow_box(slow_block(text) or ""),
    )


@pytest.mark.parametrize(
    "text, answer",
    [
        ("", None),
        ("5", None),
        ("\\boxed{5}", "5"),
        ("<answer>5</answer>", "5"),
        ("\\boxed{4} <answer>5</answer>", "5"),
        ("<answer>4</answer> \\boxed{5}", "5"),
        ("<answer>so \\boxed{5}.</answer>", "5"),
        ("<answer>\\boxed{4}\\boxed{5}</answer>", "5"),
        ("<answer>\\boxed{5</answer>", "\\boxed{5"),
        ("<answer></answer>", ""),
        ("\\boxed{{5}}", "{5}"),
        ("\\boxed{\\frac{1}{2}}", "\\frac{1}{2}"),
        ("\\boxed{4}" + "x" * 10_000, None),
        ("<answer>" + "5" * 10_000 + "</answer>", None),
    ],
)
def test_the_stated_answer_is_the_box_or_block_that_closes_last(text, answer):
    assert rewards.stated_answer(text) == answer


# --- mathematics


@pytest.mark.parametrize(
    "reward, text", [(math_reward, "\\boxed{1,080}"), (rewards.math_exact, "<answer>1080</answer>")]
)
def test_an_answer_of_gsm8k_is_what_follows_its_working(reward, text):
    gold = "Natalia sold 48/2 = <<48/2=24>>24 clips in May.\nTogether that is 1080.\n#### " + (
        "1,080" if reward is math_reward else "1080"
    )
    assert (
        reward(text, gold) == 1.0
        and reward(text.replace("1", "2", 1), gold) == 0.0
        and reward("\\boxed{24}<answer>24</answer>", gold) == 0.0
    )


@pytest.mark.parametrize(
    "box, gold, value",
    [
        ("5", "5", 1),
        ("5.0", "5", 1),
        ("05", "5", 1),
        ("-0", "0", 1),
        ("1/2", "0.5", 1),
        ("\\frac12", "1/2", 1),
        ("\\dfrac{2}{4}", "0.5", 1),
        ("2\\frac{1}{2}", "5/2", 1),
        ("-\\frac{1}{2}", "\\frac{-1}{2}", 1),
        ("\\sqrt{2}/2", "\\frac{1}{\\sqrt{2}}", 1),
        ("2\u03c0r", "2\\pi r", 1),
        ("x\u2264y", "x \\le y", 1),
        ("x=5", "5", 1),
        ("50\\%", "0.5", 1),
        ("5\\text{ cm}", "5", 1),
        ("1{,}000", "1000", 1),
        ("10,000", "10000", 1),
        ("\\{1,2\\}", "\\{2,1\\}", 1),
        ("(1,2)", "(1, 2)", 1),
        ("[0,1)", "[0,1)", 1),
        ("(-\\infty, 3]", "(-\\infty,3]", 1),
        ("(x+1)^2", "x^2+2x+1", 1),
        ("3+2i", "2i+3", 1),
        ("\\text{yes}", "yes", 1),
        ("  5  ", " 5 ", 1),
        ("1010_2", "1010_2", 1),
        ("50", "5", 0),
        ("5", "-5", 0),
        ("2\\frac{1}{2}", "21/2", 0),
        ("1/2", "2", 0),
        ("1/2", "12", 0),
        ("0.33", "1/3", 0),
        ("(1,2)", "(2,1)", 0),
        ("(1,2)", "[1,2]", 0),
        ("[0,1)", "[0,1]", 0),
        ("\\{1,2\\}", "\\{1,2,3\\}", 0),
        ("\\{1\\}", "\\{1,2\\}", 0),
        ("5,6", "5", 0),
        ("5 \\text{ or } 6", "5", 0),
        ("x<5", "x>5", 0),
        ("x^2", "x^3", 0),
        ("5", "", 0),
        ("", "5", 0),
        ("5", "five", 0),
        ("5.001", "5", 0),
        ("1010_2", "1010_3", 0),
        ("10", "1010_2", 0),
        ("10_2", "1010_2", 0),
    ],
)
def test_math_compares_values(box, gold, value):
    for text in (
        f"\\boxed{{{box}}}",
        f"So <answer>{box}</answer>",
        f"<answer>$\\boxed{{{box}}}$.</answer>",
        f"\\boxed{{99}} \\boxed{{{box}}}",
        f"\\boxed{{\\boxed{{{box}}}}}",
    ):
        assert math_reward(text, gold) == value
    for text in (
        box,
        f"${box}$",
        f"The answer is {box}.",
        f"\\boxed{{{box}",
        f"<answer>{box}",
        f"\\boxed{{{box}}} \\boxed{{99}}",
        f"<think>\\boxed{{{box}}}</think><answer>99</answer>",
    ):
        assert math_reward(text, gold) == 0.0


def test_a_number_as_gold_and_an_answer_of_1000_characters_are_fine():
    assert (
        math_reward("\\boxed{5}", 5)
        == math_reward("\\boxed{0.5}", 0.5)
        == math_exact("<answer>5</answer>", 5)
        == 1.0
    )
    assert (
        math_exact(f"<answer>{' ' * 999}5</answer>", "5") == 1.0
        and math_exact(f"<answer>{' ' * 1000}5</answer>", "5") == 0.0
    )
    assert (
        math_exact("<answer></answer>", "")
        == math_exact("<answer>$</answer>", "{}")
        == math_reward("\\boxed{}", "")
        == 0.0
    )
    assert (
        math_reward("\\boxed{" + "0" * 999 + "5}", "5") == 1.0
        and math_reward("\\boxed{" + "0" * 1000 + "5}", "5") == 0.0
    )


EQUAL = [
    (
        "5",
        " 5 ",
        "$5$",
        "{5}",
        "(5)",
        "5.0",
        "5.000",
        "$ 5.0 $",
        "\\left(5\\right)",
        "( 5 )",
        "\\,5",
        "5\\ ",
    ),
    ("0", "-0", "-0.0", "0.0", "(-0)", "\u22120", "{0}"),
    ("-5", "\u22125", "\u20135", "- 5", "-5.0", "\uff0d5"),
    ("12", "1 2", "12.0"),
    (
        "1/2",
        "\\frac{1}{2}",
        "\\frac12",
        "\\dfrac{1}{2}",
        "\\tfrac12",
        "{1/2}",
        "(1/2)",
        "$\\frac{1}{2}$",
        "\\frac{1.0}{2}",
        "\\frac { 1 } { 2 }",
        "1 / 2",
    ),
    ("-1/2", "-\\frac{1}{2}", "-\\frac12"),
    ("2\\pi", "2\u03c0", "2 \\pi", "$2\\pi$", "{2\u03c0}"),
    ("2\\pi/3", "\\frac{2\\pi}{3}", "\\frac{2\u03c0}{3}"),
    ("\\pi/2", "\\frac{\\pi}{2}", "\u03c0/2"),
    ("x^2", "x\u00b2", "x ^ 2"),
    ("90^\\circ", "90\u00b0"),
    ("(-\\infty,3]", "\\left(-\\infty, 3\\right]", "(-\u221e,3]"),
    ("(1,2)", "1,2", "\\left( 1, 2 \\right)", "{1,2}", "(1.0,2)", "(1, 2.00)"),
    ("\\{1,2\\}", "\\left\\{1, 2\\right\\}"),
    ("x\\le5", "x \u2264 5"),
    ("3\\times4", "3\u00d74"),
    ("(a+b)/2", "\\frac{a+b}{2}"),
    ("1/(2x)", "\\frac{1}{2x}"),
    ("1/(1/2)", "\\frac{1}{\\frac{1}{2}}"),
    ("x_1", "x _ 1"),
    ("(1)(2)", "( 1 ) ( 2 )"),
]
DIFFERENT = [
    ("1/2", "12"),
    ("1/2", "0.5"),
    ("1/2", "2/1"),
    ("-0.5", "0.5"),
    ("-0.5", "0"),
    ("(1)(2)", "1)(2"),
    ("{1}{2}", "1}{2"),
    ("10", "1.0"),
    ("10", "1"),
    ("100", "1.00"),
    ("5.01", "5.1"),
    ("5.01", "5"),
    ("0.05", "5"),
    ("-05", "5"),
    ("1.05", "15"),
    ("1.0x5", "1.05"),
    ("-1", "1"),
    ("x-0", "x0"),
    ("(1,2)", "[1,2]"),
    ("(1,2]", "(1,2)"),
    ("(1,2]", "1,2"),
    ("\\{1,2\\}", "1,2"),
    ("\\{1,2\\}", "(1,2)"),
    ("\\pi", "pi"),
    ("\\pi", "p"),
    ("\\leftarrow", "arrow"),
    ("\\rightarrow", "arrow"),
    ("2\\frac{1}{2}", "21/2"),
    ("2\\frac12", "\\frac{21}{2}"),
    ("\\frac123", "1/23"),
    ("\\frac{1}{2}3", "\\frac{1}{23}"),
    ("\\frac{1}{2}x", "\\frac{1}{2x}"),
    ("\\frac{1}{2}\\pi", "\\frac{1}{2\\pi}"),
    ("\\frac{1}{\\frac{2}{3}}", "\\frac{\\frac{1}{2}}{3}"),
    ("x^\\frac{1}{2}", "\\frac{x^1}{2}"),
    ("\\frac{1}{2}^2", "1/2^2"),
    ("1/\\frac{2}{3}", "1/2/3"),
    ("\\sqrt\\frac12", "\\frac{\\sqrt1}{2}"),
    ("\\frac{a+b}{2}", "a+b/2"),
    ("\\frac{1}{a+b}", "1/a+b"),
    ("\\frac{1}{2}.5", "1/2.5"),
    ("x^{2}", "x{2}"),
    ("x_{12}", "x_12"),
    ("5", "five"),
    ("5", "\u0665"),
    ("5", "\uff15"),
    ("5", "5\0"),
    ("5", "5\u200b"),
    ("1_0", "10"),
    ("1,000", "1000"),
    ("", "0"),
    ("((5))", "5"),
    ("50\\%", "50"),
    ("5!", "5"),
    ("--5", "5"),
    ("1.0.0", "1.0"),
    ("0.0", ""),
    ("-0", ""),
    ("-0x", "x"),
    ("2-0", "20"),
    ("a", "A"),
]


@pytest.mark.parametrize("spellings", EQUAL, ids=lambda spellings: spellings[0])
def test_spellings_of_one_answer_have_one_canonical_form(spellings):
    assert {canonical_math(text) for text in spellings} == {canonical_math(spellings[0])}
    for gold, text in itertools.product(spellings, repeat=2):
        assert math_exact(f"<think>7</think><answer>{text}</answer>", gold) == 1.0
        assert (
            math_exact(f"{text} <answer>7</answer> \\boxed{{{text}}}", gold)
            == math_exact(text, gold)
            == math_exact(f"<answer>{text}", gold)
            == 0.0
        )


@pytest.mark.parametrize("one, other", DIFFERENT)
def test_different_answers_stay_different(one, other):
    assert canonical_math(one) != canonical_math(other)
    assert (
        math_exact(f"<answer>{one}</answer>", other)
        == math_exact(f"<answer>{other}</answer>", one)
        == 0.0
    )


def numbers_and_values() -> dict[str, Fraction]:
    """LaTeX of many small terms, with their values as a reader sees them."""
    atoms = {
        "1": 1,
        "2": 2,
        "12": 12,
        "21": 21,
        "1.0": 1,
        "2.1": Fraction("2.1"),
        "0.5": Fraction("0.5"),
    }
    atoms = {text: Fraction(value) for text, value in atoms.items()}
    found = dict(atoms)
    for _ in range(2):
        level = dict(list(found.items())[:120])
        for (s, a), (t, b) in itertools.product(level.items(), repeat=2):
            found[f"\\frac{{{s}}}{{{t}}}"] = a / b if b else None
            if s in atoms and t in atoms and "." not in s + t:
                found[f"2\\frac{{{s}}}{{{t}}}"], found[f"\\frac{{{s}}}{{{t}}}2"] = (
                    2 + a / b,
                    a / b * 2,
                )
                found[f"\\frac{{{s}}}{{{t}}}({s})"] = a / b * a
                found[f"({s}){{{t}}}"] = a * b
            if s in atoms and (t in atoms or (t.startswith("\\frac") and t.endswith("}"))):
                found[f"{s}/{t}"] = a / b if b else None
            if s in atoms:
                found[f"{s}+{t}"], found[f"{s}-{s}+{t}"], found[f"-({s}-{t})"] = a + b, b, b - a
    return {text: value for text, value in found.items() if value is not None}


def test_no_two_terms_of_different_value_share_a_canonical_form():
    """Of 2\\frac{1}{2}, 21/2 and \\frac{21}{2} only the last two are equal."""
    values, seen = numbers_and_values(), {}
    assert len(values) > 10_000
    for text, value in values.items():
        for spelling in (text, text.replace("{", " { "), f"${text}$"):
            assert seen.setdefault(canonical_math(spelling), value) == value, spelling


@settings(derandomize=True, deadline=None, max_examples=300)
@given(
    st.lists(
        st.sampled_from(
            [
                "1",
                "0",
                ".",
                ".0",
                "-",
                "x",
                "\\pi",
                "\\frac{1}{2}",
                "\\frac",
                "{",
                "}",
                "(",
                ")",
                "\\left",
                "\\right",
                "$",
                " ",
                "+",
                "\u03c0",
                "\u2212",
                "\\",
                "a",
                "\ud800",
                "\0",
            ]
        ),
        max_size=30,
    ).map("".join)
)
def test_canonical_math_takes_any_text(text):
    assert isinstance(canonical_math(text), str) and len(canonical_math(text)) <= 4 * len(text)


@settings(derandomize=True, deadline=None, max_examples=300)
@given(
    st.recursive(
        st.sampled_from(
            ["1", "0", "-0", "2.0", "0.5", "x", "\\pi", "\u03c0", "10", "1.00", "\u22125"]
        ),
        lambda terms: st.one_of(
            st.tuples(terms, terms).map(lambda p: f"\\frac{{{p[0]}}}{{{p[1]}}}"),
            st.tuples(terms, st.sampled_from("+-,/=^"), terms).map("".join),
            terms.map(lambda t: f"\\left({t}\\right)"),
            terms.map(lambda t: f"\\sqrt{{ {t} }}"),
        ),
        max_leaves=8,
    )
)
def test_a_canonical_form_is_its_own_but_for_the_one_outer_pair(text):
    once = canonical_math(
        f"x={text}"
    )  # without an outer pair, of which one is taken each time: ((5)) is (5), as the rule says
    assert canonical_math(once) == once


@pytest.mark.parametrize(
    "text",
    [
        "\\frac{" * 166,
        "\\frac{1}{" * 111,
        "\\frac" * 200,
        "(" * 1000,
        "()" * 500,
        "-0" * 500,
        "1.0" * 333,
        "0" * 1000,
        "0." * 500,
        "$" * 1000,
        "\\left" * 200,
        "\\frac{\\a" + "b" * 980 + "!}{2}",
        "\\frac{" + "\\a" * 490 + "!}{2}",
        "\\frac{" + "\\ab" * 300 + "!}{2}",
        "\\frac{1}{" + "a" * 980 + "!}",
        "\\frac{1}{2}" * 90,
        "{" * 500 + "}" * 500,
    ],
    ids=lambda text: text[:12],
)
def test_canonical_math_of_a_thousand_characters_takes_no_time(text):
    start = time.process_time()
    canonical_math(text)
    assert time.process_time() - start < 10


# --- form


@pytest.mark.parametrize(
    "text, right, tags",
    [
        ("<think>a</think><answer>b</answer>", 1, 1),
        (" \n<think>a</think>\n\n<answer>b</answer>\t ", 1, 1),
        ("<think></think><answer></answer>", 1, 1),
        ("<think>a\nb</think><answer>c\nd</answer>", 1, 1),
        ("", 0, 0),
        ("a", 0, 0),
        ("<answer>b</answer>", 0, 0.5),
        ("<think>a</think>", 0, 0.5),
        ("<think>a</think>b", 0, 0.5),
        ("<answer>b</answer><think>a</think>", 0, 1),
        ("x<think>a</think><answer>b</answer>", 0, 1),
        ("<think>a</think>x<answer>b</answer>", 0, 1),
        ("<think>a</think><answer>b</answer>x", 0, 1),
        ("<think>a<answer>b</answer></think>", 0, 1),
        ("<think>a<answer></think>b</answer>", 0, 1),
        ("</think>a<think><answer>b</answer>", 0, 1),
        ("<think>a</think></answer>b<answer>", 0, 1),
        ("<think>a</think><answer>b</answer><answer>c</answer>", 0, 0.5),
        ("<think><think>a</think><answer>b</answer>", 0, 0.75),
        ("<think>a</think><answer>b", 0, 0.75),
        ("<Think>a</Think><answer>b</answer>", 0, 0.5),
        ("<think>a</think><answer>b</answer></answer>", 0, 0.75),
        ("<think>" * 3 + "</think>" * 3, 0, 0),
        ("think answer", 0, 0),
    ],
)
def test_format_wants_both_parts_once_in_order_and_tag_count_gives_a_quarter_for_each_tag(
    text, right, tags
):
    assert rewards.format_reward(text, None) == right and rewards.tag_count(text, None) == tags


@pytest.mark.parametrize(
    "tokens, length, overlong, all_of_it",
    [
        (0, 0, 0, 0),
        (1, -0.01, 0, -0.01),
        (50, -0.5, 0, -0.5),
        (79, -0.79, 0, -0.79),
        (80, -0.8, 0, -0.8),
        (81, -0.81, -0.05, -0.81),
        (90, -0.9, -0.5, -0.9),
        (99, -0.99, -0.95, -0.99),
        (100, -1, -1, -1),
        (101, -1, -1, -1),
        (1000, -1, -1, -1),
    ],
)
def test_length_is_a_share_and_soft_overlong_a_line_within_its_buffer(
    tokens, length, overlong, all_of_it
):
    assert rewards.length(
        "", None, tokens=tokens, max_completion_length=100, id="x"
    ) == pytest.approx(length)
    assert rewards.soft_overlong(
        "", None, tokens=tokens, max_completion_length=100, soft_overlong_buffer=20
    ) == pytest.approx(overlong)
    assert rewards.soft_overlong(
        "", None, tokens=tokens, max_completion_length=100, soft_overlong_buffer=100
    ) == pytest.approx(all_of_it)


def test_lengths_are_counted_in_tokens_of_the_completion_and_come_from_the_config():
    c, row = (
        config(
            "length",
            "soft_overlong",
            weights=[-1.0, 3.0],
            reward_workers=0,
            max_completion_length=10,
            soft_overlong_buffer=5,
        ),
        row_of("math", "1"),
    )
    rewards, metrics = scoring.score(
        [{"text": "same", "completion_ids": [0] * n} for n in (0, 5, 6, 10)], [row], c
    )
    assert rewards.tolist() == [pytest.approx([0.0, 0.5, 0.6 - 0.6, 1.0 - 3.0])]
    assert metrics["reward/length/mean"] == pytest.approx(-0.525) and metrics[
        "reward/soft_overlong/mean"
    ] == pytest.approx(-0.3)


@pytest.mark.parametrize(
    "text, value",
    [
        ("", 0),
        ("a", 0),
        ("a a", 0),
        ("a a a", 0),
        ("a a a a", 1 / 2 - 1),
        ("a b c d e", 0),
        ("a b c a b c", 3 / 4 - 1),
        ("a b c\na\tb  c d", 4 / 5 - 1),
        ("a " * 101, 1 / 99 - 1),
        ("A a a a", 0),
        ("ab " * 3 + "cd", 0),
    ],
)
def test_repetition_is_the_share_of_three_word_sequences_seen_before(text, value):
    assert rewards.repetition(text, None) == pytest.approx(value)


# --- routing and weights

MIXED = [
    row_of("countdown", TEN),
    row_of("math", "10"),
    row_of("graph_coloring", ANSWERS["graph_coloring"]),
    row_of("countdown", {"numbers": [2, 3, 5], "target": 11}),
]
MIXED_TEXTS = ["2*3+4", "RGR", "\\boxed{10}", "2*3+4", "RGR", "RRR", "2*3+5", "2*3+4"]


@pytest.mark.parametrize("count", [0, 2])
def test_auto_scores_every_row_by_its_own_task_alone(count):
    c = config("auto", "length", weights=[2.0, -0.5], reward_workers=count)
    columns = columns_for(c, MIXED)
    assert [(column.name, column.weight, column.task, column.decides) for column in columns] == [
        ("countdown", 2.0, "countdown", True),
        ("graph_coloring", 2.0, "graph_coloring", True),
        ("math", 2.0, "math", True),
        ("length", -0.5, None, False),
    ]
    values, failed = scoring.measure(rollouts_of(MIXED_TEXTS), MIXED, columns, c)
    own = torch.tensor([[1.0, 0], [1, 0], [1, 0], [1, 0]])
    for i, f in enumerate((0, 2, 1, 0)):
        assert (
            torch.equal(values[i, :, f], own[i])
            and values[i, :, [k for k in range(3) if k != f]].isnan().all()
        )
    assert not failed and torch.equal(scoring.correct(values, columns), own.bool())
    rewards, metrics = scoring.combine(values, columns)
    torch.testing.assert_close(rewards, 2 * own + 0.05)
    expected = {"countdown": 0.5, "graph_coloring": 0.5, "math": 0.5, "length": -0.1}
    assert {name: value for name, value in metrics.items() if name.endswith("/mean")} == {
        f"reward/{name}/mean": pytest.approx(value) for name, value in expected.items()
    }
    assert (
        all(
            metrics[f"reward/{name}/{kind}"] == 0
            for name in expected
            for kind in ("timeouts", "errors")
        )
        and metrics["reward/failures"] == 0
        and len(metrics) == 13
    )


def test_a_mean_is_over_the_rows_of_its_task_and_nothing_where_the_batch_has_none():
    c = config("auto", reward_workers=0)
    columns = columns_for(c, MIXED)
    values, _ = scoring.measure(rollouts_of(MIXED_TEXTS[:4]), MIXED[:2], columns, c)
    rewards, metrics = scoring.combine(values, columns)
    assert rewards.tolist() == [[1.0, 0.0], [1.0, 0.0]]
    assert metrics["reward/countdown/mean"] == metrics["reward/math/mean"] == 0.5 and math.isnan(
        metrics["reward/graph_coloring/mean"]
    )


def slow_combine(values: list, columns: list) -> tuple[list, dict]:
    rewards = [
        [
            sum((column.weight * v for v, column in zip(cell, columns) if math.isfinite(v)), 0.0)
            for cell in group
        ]
        for group in values
    ]
    metrics = {
        "reward/failures": sum(
            any(v in (TIMEOUT, ERROR) for v in cell) for group in values for cell in group
        )
    }
    for f, column in enumerate(columns):
        asked = [cell[f] for group in values for cell in group if not math.isnan(cell[f])]
        metrics[f"reward/{column.name}/mean"] = (
            sum(v for v in asked if math.isfinite(v)) / len(asked) if asked else NAN
        )
        metrics |= {
            f"reward/{column.name}/timeouts": asked.count(TIMEOUT),
            f"reward/{column.name}/errors": asked.count(ERROR),
        }
    return rewards, metrics


@settings(derandomize=True, deadline=None, max_examples=100)
@given(st.data(), st.integers(1, 3), st.integers(1, 4), st.integers(1, 3))
def test_combine_is_the_slow_loop(data, P, G, F):
    cell = st.lists(
        st.sampled_from([0.0, 0.25, 1.0, -2.0, NAN, TIMEOUT, ERROR]), min_size=F, max_size=F
    )
    values = data.draw(st.lists(st.lists(cell, min_size=G, max_size=G), min_size=P, max_size=P))
    columns = [
        scoring.Column(f"f{f}", data.draw(st.sampled_from([0.0, 1.0, -0.5, 3.0])), None, f == 0)
        for f in range(F)
    ]
    before = torch.tensor(values)
    rewards, metrics = scoring.combine(given_values := before.clone(), columns)
    slow_rewards, slow_metrics = slow_combine(values, columns)
    torch.testing.assert_close(rewards, torch.tensor(slow_rewards))
    assert metrics == {
        name: pytest.approx(value, nan_ok=True) for name, value in slow_metrics.items()
    }
    torch.testing.assert_close(given_values, before, equal_nan=True)


def test_rewards_are_weighted_prompt_major_and_equal_completions_get_equal_scores():
    c, rows = (
        config("hostile:act", "hostile:tenfold", "hostile:level", weights=[1.0, -0.5, 100.0]),
        [row_of("", level=1), row_of("", level=2)],
    )
    rewards, metrics = scoring.score(rollouts_of(["1", "2", "1", "4", "1", "6"]), rows, c)
    assert rewards.tolist() == [[96.0, 92.0, 96.0], [184.0, 196.0, 176.0]]
    assert (
        metrics["reward/hostile:act/mean"] == 2.5
        and metrics["reward/hostile:tenfold/mean"] == 25
        and metrics["reward/hostile:level/mean"] == 1.5
    )


def test_a_row_is_routed_to_a_function_of_the_users_own():
    c, rows = config("auto"), [row_of("hostile:tenfold"), row_of("countdown", TEN)]
    assert scoring.score(rollouts_of(["7", "2*3+4"] * 2), rows, {**c, "reward_workers": 0})[
        0
    ].tolist() == [[70.0, 0.0], [0.0, 1.0]]


def test_a_task_without_a_reward_is_refused_by_its_row():
    said = refusal(
        scoring.columns_of, ["auto"], [1.0], [row_of("countdown", TEN), row_of("poetry")]
    )
    assert all(word in said for word in ("auto", "'poetry'", "'a row of poetry'", "countdown"))
    assert "'a row of '" in refusal(
        scoring.columns_of,
        ["countdown", "auto"],
        [1.0, 1.0],
        [row_of("countdown", TEN), row_of("")],
    )
    assert scoring.columns_of(["countdown"], [1.0], [row_of("poetry")]) == [
        scoring.Column("countdown", 1.0, None, True)
    ]


def test_a_reward_that_does_not_exist_is_refused_by_its_name():
    said = refusal(scoring.check_names, ["countdown", "auto", "magic"])
    assert "'magic'" in said and "countdown" in said and "module:function" in said
    scoring.check_names(["auto", *rewards.REWARDS, "no_such_module:of_mine"])


@pytest.mark.parametrize(
    "name, word",
    [
        ("no_such_module:f", "no_such_module"),
        ("hostile:no_such_function", "no_such_function"),
        ("hostile:not_a_function", "not a function"),
        ("hostile:", "''"),
        (":act", "can't be imported"),
        (".hostile:act", "can't be imported"),
        ("broken:f", "SyntaxError"),
        ("raising:f", "ZeroDivisionError: no"),
        ("leaving:f", "sys.exit(0)"),
        ("moving:f", "changes the working folder when it is imported: /"),
    ],
)
@pytest.mark.parametrize("count", [0, 1])
def test_a_module_or_function_that_can_not_be_had_is_one_sentence_and_no_hang(
    folder, name, word, count, monkeypatch
):
    monkeypatch.chdir(folder)  # and back, after the module that moves
    for module, text in {
        "broken": "def f(:",
        "raising": "raise ZeroDivisionError('no\\nnews')",
        "leaving": "import sys; sys.exit(0)",
        "moving": "import os; os.chdir('/'); f = float",
    }.items():
        (folder / f"{module}.py").write_text(text + "\n")
    c, row = config(name, reward_workers=count), row_of("math", "1")
    said = refusal(scoring.check_answers, columns_for(c, [row]), [row], "data", c)
    assert "reward_funcs" in said and repr(name) in said and word in said


SLEEPS = "import os, time\nopen(__file__ + '.started', 'a').write('.')\ntime.sleep(1000)\n"
AT_FIRST_CALL = "import time\ndef f(completion, answer, **row): time.sleep(1000)\n"


@pytest.mark.parametrize(
    "name, code, words",
    [
        ("stuck", SLEEPS, "not ready in 0.3 s when the module of 'stuck:f' was imported"),
        ("slow", AT_FIRST_CALL, "not ready in 0.3 s when 'slow:f' was called for the first time"),
        (
            "gone",
            "import os\nos._exit(7)\n",
            "the worker died (exit status 7) when the module of 'gone:f' was imported",
        ),
        (
            "killed",
            "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)\n",
            "the worker died (Killed) when the module of 'killed:f' was imported",
        ),
    ],
)
def test_a_module_that_never_comes_to_an_end_or_ends_its_process_is_named_after_one_try(
    folder, monkeypatch, name, code, words
):
    (folder / f"{name}.py").write_text(code)
    pool = workers.Pool(1, 5.0, 1.0, (f"{name}:f",))
    monkeypatch.setattr(pool, "start", lambda: pytest.fail("another worker was started"))
    if "not ready" in words:
        phase = words.partition(" s ")[2]
        assert come_true(lambda: pool.attend(0.05) or pool.workers[0].doing == phase)
        monkeypatch.setattr(workers, "START_SECONDS", 0.3)
    said = refusal(pool.answers, {1: (f"{name}:f", "1", {"answer": ""})})
    pool.close()
    assert words in said and "when it is called" in said


def test_what_rewards_print_is_quoted_and_what_a_module_prints_at_import_names_it(folder, capfd):
    """Nothing of it can steer the terminal or look like a line of ours."""
    forged = "hello \x1b[2J\rerror: the run is lost"
    (folder / "noisy.py").write_text(
        f"import os, sys\nprint({forged!r})\nsys.stderr.write('to stderr')\nos.write(1, b'\\xff')\n"
        "def f(completion, answer, **row): print('inside', completion); return 1.0\n"
    )
    pool = workers.Pool(1, SLACK, 1.0, ("noisy:f",))
    assert pool.answers({1: ("noisy:f", "\x1b[31mred", {"answer": ""})}) == {1: 1.0}
    pool.close()
    out, err = capfd.readouterr()
    lines = [line for line in err.splitlines() if "debug" not in line]
    at_import = "reward_funcs: the module of 'noisy:f' prints when it is imported: "
    assert out == "" and "\x1b" not in err and "\r" not in err
    assert at_import + repr(forged) in lines
    assert any(line.startswith(at_import) and "to stderr" in line for line in lines)
    assert "reward worker: 'inside \\x1b[31mred'" in lines
    assert all(line.startswith((at_import, "reward worker: ")) for line in lines)


def test_of_a_worker_that_prints_without_end_a_thousand_lines_are_shown(folder, capfd):
    (folder / "wordy.py").write_text(
        "def f(completion, answer, **row):\n    print('x\\n' * 5000)\n    return 1.0\n"
    )
    pool = workers.Pool(1, SLACK, 1.0, ("wordy:f",))
    assert pool.answers({1: ("wordy:f", "1", {"answer": ""})}) == {1: 1.0}
    pool.close()
    lines = capfd.readouterr().err.splitlines()
    assert len(lines) == workers.LINES_SHOWN + 1 and "more is not shown" in lines[-1]


def test_a_reward_sees_nothing_of_the_environment_but_what_is_listed(folder, monkeypatch):
    secrets = ("HF_TOKEN", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY", "VLLM_API_KEY", "PASSWORD")
    for name in secrets:
        monkeypatch.setenv(name, "a secret")
    monkeypatch.setenv("REWARD_JUDGE_KEY", "meant for it")
    monkeypatch.setenv("LC_TIME", "C")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    (folder / "curious.py").write_text(
        "import json, os\nfrom pathlib import Path\n"
        "Path(__file__ + '.seen').write_text(json.dumps(dict(os.environ)))\n"
        "def f(completion, answer, **row): return 1.0\n"
    )
    pool = workers.Pool(1, SLACK, 1.0, ("curious:f",))
    assert pool.answers({1: ("curious:f", "1", {"answer": ""})}) == {1: 1.0}
    pool.close()
    seen = json.loads((folder / "curious.py.seen").read_text())
    assert not {*secrets} & {*seen} and "a secret" not in seen.values()
    assert seen["REWARD_JUDGE_KEY"] == "meant for it" and seen["LC_TIME"] == "C"
    assert seen["CUDA_VISIBLE_DEVICES"] == "" and seen["OMP_NUM_THREADS"] == "1"
    assert seen["PATH"] == os.environ["PATH"] and "HOME" in seen


@pytest.mark.parametrize(
    "name, message, value",
    [
        ("f", 0.5, 0.5),
        ("f", 2, 2),
        ("f", math.nan, None),
        ("f", math.inf, None),
        ("f", 1e39, None),
        ("f", "text", None),
        ("f", [1.0], None),
        ("f", None, None),
        ("f", {"a": 1}, None),
        ("f", {"error": [1]}, None),
        ("mode", "1+2", "1+2"),
        ("mode", None, None),
    ],
)
def test_of_an_answer_only_what_can_be_one_is_believed(name, message, value):
    """A reward may write into the socket of its worker."""
    found = workers.believed(name, message)
    if value is None and name == "f":
        assert isinstance(found, workers.Failure) and found.reason.isprintable()
    else:
        assert found == value


# --- containment

HANGS = [
    "sleep",
    "spin",
    "spin_in_c",
    "power",
    "regex",
    "deaf",
    "threads",
    "stop",
    "lock",
    "fork",
    "subprocess",
]
FAILS = [
    "fork_and_leave",
    "system_and_leave",
    "raise",
    "mute",
    "interrupt",
    "unprintable",
    "sys.exit",
    "os._exit",
    "kill",
    "realtime",
    "abort",
    "segfault",
    "recursion",
    "nan",
    "inf",
    "-inf",
    "huge",
    "long",
    "none",
    "text",
    "complex",
    "list",
    "allocate",
    "grow",
    "garbage",
    "bytes",
    "forged",
    "others",
    "pairs",
    "flood",
    "endless",
    "close",
]
WORKS = {
    "fork_and_answer": 1,
    "fork_and_return": 1,
    "print": 1,
    "close_stdout": 1,
    "chdir": 1,
    "run": 1,
    "true": 1,
    "integer": 3,
    "stdin": 1,
    "light": 1,
}
TAME = [
    "raise",
    "unprintable",
    "sys.exit",
    "recursion",
    "nan",
    "inf",
    "-inf",
    "huge",
    "long",
    "none",
    "text",
    "complex",
    "list",
    "print",
    "run",
    "true",
    "integer",
]


@pytest.fixture(scope="module")
def battle(folder) -> dict:
    """All of hostile.py at once on six workers, numbers in between."""
    c = config("hostile:act", reward_workers=6, reward_timeout=3.0, reward_memory_gib=0.125)
    row, pool, me = row_of("own"), scoring.pool_of(c), psutil.Process()
    assert measured(["1", "2"], row, c) == ([1.0, 2.0], [])
    texts = [*HANGS, *FAILS, *WORKS, "stack", *map(str, range(100, 150))]
    random.Random(0).shuffle(texts)
    known, fds, start = (
        {p.pid for p in me.children()} - {w.process.pid for w in pool.workers},
        me.num_fds(),
        time.monotonic(),
    )
    values, failed = measured(texts, row, c)
    return {
        "c": c,
        "pool": pool,
        "row": row,
        "values": dict(zip(texts, values)),
        "failed": {record["completion"]: record for record in failed},
        "texts": texts,
        "seconds": time.monotonic() - start,
        "fds": me.num_fds() - fds,
        "children": [p for p in me.children() if p.pid not in known],
    }


def test_what_hangs_is_a_timeout_and_what_breaks_is_an_error(battle):
    assert {name: battle["values"][name] for name in HANGS} == dict.fromkeys(HANGS, TIMEOUT)
    assert {name: battle["values"][name] for name in FAILS} == dict.fromkeys(FAILS, ERROR)
    assert battle["values"]["stack"] in (TIMEOUT, ERROR)  # memory or time, whichever is less
    _, metrics = scoring.combine(
        torch.tensor([[[battle["values"][text]] for text in battle["texts"]]]),
        [scoring.Column("act", 1.0, None, True)],
    )
    assert (
        metrics["reward/act/timeouts"] - len(HANGS) + metrics["reward/act/errors"] - len(FAILS) == 1
    )  # and the stack


def test_what_works_works_beside_them(battle):
    assert {name: battle["values"][name] for name in WORKS} == WORKS
    assert all(battle["values"][str(n)] == n for n in range(100, 150))


def test_failures_are_recorded_with_reward_row_kind_reason_and_text(battle):
    assert set(battle["failed"]) == {*HANGS, *FAILS, "stack"}
    for name, record in battle["failed"].items():
        assert (record["reward"], record["id"], record["completion"]) == (
            "hostile:act",
            "a row of own",
            name,
        )
        assert record["kind"] == {TIMEOUT: "timeout", ERROR: "error"}[battle["values"][name]]
        assert record["reason"].isprintable() and 0 < len(record["reason"]) <= 300
    for name, word in {
        "sleep": "reward_timeout",
        "raise": "ValueError: this one",
        "recursion": "RecursionError",
        "allocate": "MemoryError",
        "os._exit": "exit status 0",
        "kill": "Killed",
        "sys.exit": "SystemExit",
        "nan": "nan",
        "huge": "finite",
        "interrupt": "Interrupt",
        "segfault": "Segmentation fault",
        "forged": "malformed reply",
        "close": "worker",
    }.items():
        assert word in battle["failed"][name]["reason"]


def test_hanging_takes_no_longer_than_the_limits_say(battle):
    assert (
        battle["seconds"] < math.ceil((len(HANGS) + 1) / 6) * battle["c"]["reward_timeout"] + SLACK
    )


def test_the_pool_is_as_large_as_before_and_nothing_is_left_behind(battle, folder):
    assert len(battle["pool"].workers) == 6 and battle["fds"] == 0
    assert sorted(p.pid for p in battle["children"]) == sorted(
        w.process.pid for w in battle["pool"].workers
    )  # no zombie of a killed one
    children = {int(pid) for pid in lines_of(folder / "children")}
    kept = {
        p.pid
        for worker in battle["pool"].workers
        for p in psutil.Process(worker.process.pid).children(recursive=True)
    }  # of fork_and_answer, until its worker goes
    assert len(children) >= 4 and come_true(lambda: not any(map(runs, children - kept)))


@pytest.mark.parametrize("act", ["daemon", "daemon_and_leave", "freeze_keeper"])
def test_what_a_reward_starts_in_a_session_of_its_own_does_not_outlive_its_worker(
    folder, act, monkeypatch
):
    monkeypatch.setattr(workers, "END_SECONDS", 1.0)  # for a keeper that is stopped
    (folder / "daemons").unlink(missing_ok=True)
    pool = workers.Pool(1, SLACK, 1.0, ("hostile:act",))
    pool.answers({1: ("hostile:act", act, {"answer": ""})})
    (pid,) = map(int, lines_of(folder / "daemons"))
    if act != "daemon_and_leave":
        assert runs(pid)
        pool.close()
    assert come_true(lambda: not runs(pid))
    pool.close()


def test_many_hangs_in_a_row_and_the_pool_still_works(battle):
    start = time.monotonic()
    values, _ = measured(
        [f"{i}" if i % 2 else f"{i:03}" for i in range(20)], battle["row"], battle["c"]
    )
    assert values == list(range(20))
    rows = [
        row_of("own"),
        row_of("own"),
        row_of("own"),
    ]  # the same text on another row is another job
    values, failed = scoring.measure(
        rollouts_of(["sleep", "spin", "5"] * 3), rows, columns_for(battle["c"], rows), battle["c"]
    )
    assert values[..., 0].tolist() == [[TIMEOUT, TIMEOUT, 5.0]] * 3 and len(failed) == 6
    assert (
        measured(["1", "2", "3"], battle["row"], battle["c"]) == ([1.0, 2.0, 3.0], [])
        and len(battle["pool"].workers) == 6
    )
    assert time.monotonic() - start < 2 * battle["c"]["reward_timeout"] + SLACK


def test_failures_of_a_chunk_cost_the_others_of_it_nothing_and_each_has_its_own_time():
    pool = workers.Pool(1, 2.5, 0.25, ("hostile:act",))
    special = {
        3: "sleep",
        20: "os._exit",
        21: "raise",
        22: "garbage",
        50: "fork_and_return",
        70: "kill",
    } | {i: f"nap {i}" for i in range(30, 36)}
    texts = [
        special.get(i, str(i)) for i in range(200)
    ]  # the first chunk has 50 of them; six naps take 2.7 s
    found = pool.answers({i: ("hostile:act", text, {"answer": ""}) for i, text in enumerate(texts)})
    pid = pool.workers[0].process.pid
    pool.close()
    assert not psutil.pid_exists(pid)
    assert {i: value.kind for i, value in found.items() if isinstance(value, workers.Failure)} == {
        3: "timeout",
        20: "error",
        21: "error",
        22: "error",
        70: "error",
    }
    assert all(
        found[i] == (1 if i in special else i)
        for i in found
        if not isinstance(found[i], workers.Failure)
    ) and list(found) == list(range(200))


def test_an_answer_that_comes_while_another_worker_is_replaced_is_in_time(battle, monkeypatch):
    pool = workers.Pool(2, 5.0, 0.25, ("hostile:act",))
    assert come_true(lambda: pool.attend(0.1) or all(worker.ready for worker in pool.workers))
    monkeypatch.setattr(pool, "cause_of_death", lambda worker: time.sleep(5.5) or "died slowly")
    found = pool.answers(
        {text: ("hostile:act", text, {"answer": ""}) for text in ("kill", "nap 1")}
    )
    pool.close()
    assert found == {"kill": workers.Failure("error", "the worker died slowly"), "nap 1": 1.0}


def test_a_worker_that_dies_while_it_has_nothing_to_do_is_replaced_and_nobody_is_blamed(battle):
    for worker in battle["pool"].workers:
        os.kill(worker.process.pid, signal.SIGKILL)
        assert come_true(lambda w=worker: not runs(w.process.pid))
    assert (
        measured(["1", "2", "3"], battle["row"], battle["c"]) == ([1.0, 2.0, 3.0], [])
        and len(battle["pool"].workers) == 6
    )


def test_begin_returns_at_once_and_measure_computes_nothing_twice(battle, folder):
    c, columns = battle["c"], columns_for(battle["c"], [battle["row"]])
    measured(["1"], battle["row"], c)
    rows, texts = [row_of("own"), row_of("own")], ["count a", "sleep", "count b", "count a"]
    start = time.monotonic()
    for row in rows:
        scoring.begin(rollouts_of(texts), row, columns, c)
    assert not scoring.pool_of(c).found.get("sleep")  # nobody has waited until it was cut off
    assert come_true(
        lambda: scoring.pool_of(c).attend(0) or len(lines_of(folder / "counted")) == 4
    )  # they run while nobody waits for them
    scoring.begin(rollouts_of(texts), rows[0], columns, c)
    values, failed = scoring.measure(rollouts_of(texts * 2), rows, columns, c)
    assert values[..., 0].tolist() == [[1.0, TIMEOUT, 1.0, 1.0]] * 2 and len(failed) == 2
    assert sorted(lines_of(folder / "counted")) == ["count a", "count a", "count b", "count b"]
    assert time.monotonic() - start < c["reward_timeout"] + SLACK
    assert (
        scoring.pool_of(c).asked == scoring.pool_of(c).found == {}
        and not scoring.pool_of(c).waiting
    )


def test_answers_that_are_asked_for_while_others_are_under_way_are_their_own(battle, folder):
    c, columns = battle["c"], columns_for(battle["c"], [battle["row"]])
    rows = [row_of("countdown", TEN), row_of("countdown", {"numbers": [2, 3, 4], "target": 9})]
    scoring.begin(rollouts_of(["count c", "sleep"]), battle["row"], columns, c)
    assert come_true(
        lambda: scoring.pool_of(c).attend(0) or "count c" in lines_of(folder / "counted")
    )
    right = torch.tensor([[True]])
    assert [
        scoring.correct_modes(rollouts_of(["2*3+4"]), [row], right, c)[0][1] for row in rows
    ] == [
        {"2*3+4"},
        set(),
    ]
    assert measured(["count c", "sleep", "7"], battle["row"], c)[0] == [1.0, TIMEOUT, 7.0]
    assert lines_of(folder / "counted").count("count c") == 1


def test_without_workers_the_scores_are_the_same_and_no_process_starts(battle):
    before = len(psutil.Process().children())
    texts = [*TAME, "100", "101"]
    values, failed = measured(texts, battle["row"], battle["c"] | {"reward_workers": 0})
    assert values == [battle["values"][text] for text in texts]
    assert [(r["completion"], r["kind"], r["reason"]) for r in failed] == [
        (t, "error", battle["failed"][t]["reason"]) for t in texts if t in FAILS
    ]
    scoring.begin(rollouts_of(["sleep"]), battle["row"], [], battle["c"] | {"reward_workers": 0})
    assert len(psutil.Process().children()) == before


def test_what_auto_may_need_is_loaded_before_the_first_completion_is_timed(battle):
    assert measured(["light", "loaded"], row_of("hostile:act"), config("auto")) == ([0.0, 1.0], [])
    assert measured(["light"], battle["row"], battle["c"])[0] == [
        1.0
    ]  # and what isn't needed is not


OWNER = """
import sys, time
sys.path[:0] = {path!r}
import workers

def main():
    pool = workers.Pool(2, 60.0, 0.5, ("hostile:act",))
    ask = lambda *texts: list(pool.answers({{text: ("hostile:act", text, {{"answer": ""}}) for text in texts}}).values())
    pids = lambda: [worker.process.pid for worker in pool.workers]
    ask("1", "2", "daemon")
    stuck = workers.Pool(1, 60.0, 0.5, ("stuck_too:f",))
    try:
        print(*pids(), *[worker.process.pid for worker in stuck.workers], flush=True)
        time.sleep(60)
    except KeyboardInterrupt:
        print(*pids(), *ask("4", "5"), flush=True)
    failure, = ask("kill_group")
    print(failure.kind, failure.reason, flush=True)
    pool.ask({{text: ("hostile:act", text, {{"answer": ""}}) for text in ("power", "sleep")}})
    while not all(worker.jobs for worker in pool.workers):
        pool.attend(0.1)
    print(*pids(), flush=True)
    time.sleep(60)

main()
"""


def test_ctrl_c_does_not_reach_workers_and_they_die_with_a_trainer_that_is_killed_even_while_they_hang(
    folder,
):
    (folder / "stuck_too.py").write_text(
        f"import time\nopen({str(folder / 'stuck_too.started')!r}, 'w').close()\ntime.sleep(1000)\n"
    )
    (folder / "daemons").unlink(missing_ok=True)
    script = OWNER.format(path=[str(ROOT), str(folder)])
    owner = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        *pids, stuck = map(int, owner.stdout.readline().split())
        os.killpg(owner.pid, signal.SIGINT)
        assert owner.stdout.readline().split() == [*map(str, pids), "4.0", "5.0"]
        assert (
            owner.stdout.readline() == "error the worker died (Killed)\n"
        )  # its own group has no one else in it
        (daemon,) = map(int, lines_of(folder / "daemons"))
        pids = [*map(int, owner.stdout.readline().split()), stuck]
        assert len(pids) == 3 and come_true((folder / "stuck_too.started").exists)
        time.sleep(0.3)  # both are at their jobs
        assert all(map(runs, pids))
        owner.kill()
        assert come_true(lambda: not any(map(runs, [*pids, daemon])))
    finally:
        owner.kill()
        owner.wait()
        owner.stdout.close()


def test_a_worker_whose_trainer_was_gone_before_it_looked_ends_at_once(folder):
    start = "import workers; workers.Worker((sys.path, 1.0, ('stuck_at_once:f',))); os._exit(0)"
    script = f"import os, sys; sys.path[:0] = {[str(ROOT), str(folder)]!r}; {start}"
    (folder / "stuck_at_once.py").write_text(
        "import os, time\nopen(__file__ + '.pid', 'w').write(str(os.getpid()))\ntime.sleep(1000)\n"
    )
    for _ in range(3):
        subprocess.run([sys.executable, "-c", script], check=True)
    assert come_true(
        lambda: not any(runs(int(pid)) for pid in lines_of(folder / "stuck_at_once.py.pid"))
    )


def test_nothing_here_knows_of_other_ranks_and_workers_of_no_torch():
    for module in (rewards, workers):
        assert "import torch" not in Path(module.__file__).read_text()
    for module in (rewards, workers, scoring):
        assert not {"distributed", "all_reduce", "barrier", "gather_groups"} & set(
            Path(module.__file__).read_text().replace(".", " ").replace("(", " ").split()
        )


# --- failures of a step, answers of a dataset


def test_more_failures_than_allowed_stop_the_run_and_as_many_do_not():
    metrics = {
        "reward/a/mean": 99.0,
        "reward/a/timeouts": 4,
        "reward/a/errors": 3,
        "reward/b/mean": 0.0,
        "reward/b/timeouts": 0,
        "reward/b/errors": 3,
        "kl": 500.0,
        "reward/failures": 10,
    }
    scoring.check_failures(metrics, 100, 0.1)
    with pytest.raises(RunStopped) as caught:
        scoring.check_failures(metrics | {"reward/failures": 11}, 100, 0.1)
    said = str(caught.value)
    assert (
        all(
            word in said
            for word in (
                "11 ",
                "100",
                "max_reward_failures=0.1",
                "reward/a/timeouts 4",
                "reward/a/errors 3",
                "reward/b/errors 3",
            )
        )
        and "\n" not in said
    )
    with pytest.raises(RunStopped):
        scoring.check_failures({"reward/a/errors": 1, "reward/failures": 1}, 1000, 0.0)
    scoring.check_failures(
        {"reward/a/errors": 0, "reward/a/mean": 5.0, "reward/failures": 0}, 1000, 0.0
    )


def test_with_a_limit_of_one_nothing_stops_the_run():
    scoring.check_failures(
        {"reward/a/errors": 64, "reward/b/timeouts": 64, "reward/failures": 64}, 64, 1.0
    )


def test_a_completion_on_which_three_functions_fail_is_one_failure():
    values = torch.tensor(
        [
            [[scoring.ERROR, scoring.TIMEOUT, scoring.ERROR], [1.0, scoring.ERROR, 0.0]],
            [[math.nan, 1.0, 0.0], [0.0, 0.0, 0.0]],
        ]
    )
    assert (
        scoring.combine(values, [scoring.Column(name, 1.0, None, True) for name in "abc"])[1][
            "reward/failures"
        ]
        == 2
    )


def test_failures_are_saved_with_their_texts_cut_and_not_more_than_twenty_a_step(tmp_path):
    nasty = "\0\ud800\u2028\x1b[2J\n" + "x" * 200_000
    record = {
        "reward": "math",
        "id": "row\n7",
        "kind": "timeout",
        "reason": "no answer",
        "completion": nasty,
    }
    said = scoring.save_failures(
        tmp_path, [record] + [record | {"completion": str(i)} for i in range(24)], 5, 1
    )
    assert said.isprintable() and all(
        word in said
        for word in (
            "step 5",
            "25 ",
            "rank 1",
            "'math'",
            "'row\\n7'",
            "no answer",
            "reward_failures.rank_1.jsonl",
        )
    )
    path = tmp_path / "reward_failures.rank_1.jsonl"
    found = [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n")[:-1]]
    assert (
        len(found) == 20
        and found[0] == {"step": 5, **record, "completion": nasty[:100_000]}
        and found[19]["completion"] == "18"
    )
    assert record["completion"] is nasty
    scoring.save_failures(tmp_path, [record], 6, 1)
    assert len(lines_of(path)) == 21 and os.listdir(tmp_path) == [path.name]


@pytest.mark.parametrize("reward", [name for name in ANSWERS if name != "rush_hour"])
def test_answers_of_another_task_are_refused_in_one_sentence(reward):
    c = config(reward, reward_workers=0)
    for row in [*EVERY[: len(ANSWERS)], row_of("list", [1, 2])]:
        check = (scoring.check_answers, columns_for(c, [row]), [row], "my_data", c)
        readable = {"math": ("math", "math_exact"), "math_exact": ("math", "math_exact")}.get(
            reward, (reward,)
        )
        if row["task"] in readable or (
            reward.startswith("rush_hour") and row["task"].startswith("rush_hour")
        ):
            check[0](*check[1:])
        else:
            said = refusal(*check)
            assert all(
                word in said for word in (repr(reward), repr(row["id"]), "my_data", "reward_funcs")
            )


def test_own_answers_are_fine_through_workers_too():
    c = config("auto")
    scoring.check_answers(columns_for(c, EVERY), EVERY, "my_data", c)
    c, rows = config("countdown"), [*EVERY[: len(ANSWERS)]]
    assert all(
        word in refusal(scoring.check_answers, columns_for(c, rows), rows, "my_data", c)
        for word in ("'countdown'", "my_data")
    )  # not its first task, but another
    c, rows = config("countdown"), [row_of("", "42")]
    assert all(
        word in refusal(scoring.check_answers, columns_for(c, rows), rows, "my_data", c)
        for word in ("'countdown'", "'42'", "'a row of '")
    )


# --- speed


def test_a_thousand_countdown_rewards_are_the_same_with_and_without_workers():
    rows, c = countdown.rows("train", 10, 0), config("countdown")
    wrong = ["+".join(map(str, row["answer"]["numbers"])) for row in rows]
    texts = [
        f"<think>{i}</think><answer>{sums}</answer>" if i % 2 else f"{i} {row['solutions'][0]}"
        for row, sums in zip(rows, wrong)
        for i in range(100)
    ]
    columns = columns_for(c, rows)

    values, failed = scoring.measure(rollouts_of(texts), rows, columns, c)
    assert not failed and (values[:, ::2] == 1).all()
    alone, failed = scoring.measure(rollouts_of(texts), rows, columns, c | {"reward_workers": 0})
    assert not failed and values.equal(alone)


# --- which completions are right, and whether they differ


def test_correct_is_what_the_first_function_says_and_a_failure_is_not():
    columns = [
        scoring.Column("a", 1.0, "a", True),
        scoring.Column("b", 1.0, "b", True),
        scoring.Column("format", 1.0, None, False),
    ]
    values = torch.tensor(
        [
            [[1.0, NAN, 0.0], [0.99, NAN, 1.0], [ERROR, NAN, 1.0], [TIMEOUT, NAN, 1.0]],
            [[NAN, 2.0, ERROR], [NAN, 0.0, 5.0], [NAN, -1.0, 0.0], [NAN, 1.0, 0.0]],
        ]
    )
    assert scoring.correct(values, columns).tolist() == [
        [True, False, False, False],
        [True, False, False, True],
    ]


CLUSTER_ROWS = [row_of("countdown", TEN), row_of("math", "10"), row_of("own data", "10")]
CLUSTER_TEXTS = [
    "<answer>2*3+4</answer>",
    "<answer>4+3*2</answer>",
    "<answer>3*4-2</answer>",
    "<answer>2+3</answer>",
    "so <answer> 2+3 </answer>",
    "",
    "\\boxed{10}",
    "\\boxed{20/2}",
    "\\boxed{7}",
    "<answer>7</answer>",
    "\\boxed{}",
    "\\boxed{ }",
    "10",
    "10 ",
    "\\boxed{7} 10",
    "7",
    " ",
    "<answer>10</answer>",
]
RIGHT = torch.tensor(
    [[True, True, True, False, False, False], [True, True, False, False, False, False], [False] * 6]
)


@pytest.mark.parametrize("count", [0, 2])
def test_clusters_are_modes_of_the_right_and_texts_of_the_wrong(count):
    clusters = scoring.answer_clusters(
        rollouts_of(CLUSTER_TEXTS), CLUSTER_ROWS, RIGHT, config("auto", reward_workers=count)
    )
    assert clusters.tolist() == [[0, 0, 1, 2, 2, 3], [0, 0, 1, 1, 2, 3], [0, 0, 1, 1, 2, 0]]


@pytest.mark.parametrize("count", [0, 2])
def test_correct_modes_are_counted_per_row(count):
    found = scoring.correct_modes(
        rollouts_of(CLUSTER_TEXTS), CLUSTER_ROWS, RIGHT, config("auto", reward_workers=count)
    )
    assert found == [(3, {"2*3+4", "3*4-2"}), (2, None), (0, None)]
    none = scoring.correct_modes(
        rollouts_of(CLUSTER_TEXTS[:6]),
        CLUSTER_ROWS[:1],
        torch.zeros(1, 6, dtype=torch.bool),
        config("auto", reward_workers=count),
    )
    assert none == [(0, set())]  # another reward may decide what is right


@pytest.mark.parametrize("count", [0, 2])
def test_a_mode_that_fails_is_none(count):
    rows = [row_of("countdown", {"numbers": None, "target": 10})]
    assert scoring.correct_modes(
        rollouts_of(["2*3+4", "2*3+4"]),
        rows,
        torch.tensor([[True, True]]),
        config("auto", reward_workers=count),
    ) == [(2, set())]


def test_a_wrong_completion_that_spells_a_right_mode_is_in_a_cluster_of_its_own():
    texts, right = ["4+2*3", "\\boxed{2*3+4}"], torch.tensor([[True, False]])
    assert scoring.answer_clusters(
        rollouts_of(texts), [row_of("countdown", TEN)], right, config("countdown", reward_workers=0)
    ).tolist() == [[0, 1]]


def test_without_a_task_that_reads_bare_texts_one_without_an_answer_agrees_with_nobody():
    texts = ["again and again and"] * 2 + ["\\boxed{1}"] * 2
    assert scoring.answer_clusters(
        rollouts_of(texts),
        [row_of("math", "2")],
        torch.zeros(1, 4, dtype=torch.bool),
        config("math", reward_workers=0),
    ).tolist() == [[0, 1, 2, 2]]


def test_hostile_texts_have_clusters_too():
    texts = [
        "\0",
        "\ud800",
        "x" * MEGABYTE,
        "x" * (MEGABYTE - 1),
        "<answer>" + "{" * 5000 + "</answer>",
        "",
        "",
        " \n",
    ]
    clusters = scoring.answer_clusters(
        rollouts_of(texts),
        [row_of("countdown", TEN)],
        torch.zeros(1, 8, dtype=torch.bool),
        config("countdown", reward_workers=0),
    )
    assert clusters.tolist() == [[0, 1, 2, 2, 3, 4, 5, 6]]  # who says nothing agrees with nobody
