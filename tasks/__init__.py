"""Tasks, one per file. A file here is a task if it defines

    rows(split, n, seed, config)        its problems: dicts with id, task, prompt, answer; optional
                                        num_modes (how many right answers there are) and solutions
                                        (right completions, to warm a model up). `config` may be
                                        left out of the arguments
    reward(completion, answer, **row)   0.0 to 1.0
    mode(completion, answer)            a text that is the same for right completions that say the
                                        same; None for a wrong completion. Optional

This file has what the tasks share. It imports a task only when that task is asked for.
"""

import importlib
import random
import re
from pathlib import Path

SPLITS = ("train", "test")  # test: held out


def is_task(path: Path) -> bool:
    """Whether a file defines rows(): tasks/mathematics.py has rewards but no rows."""
    # not files that an editor (.#reverse.py) or a Mac (._reverse.py) leaves
    if not path.stem.isidentifier():
        return False
    text = path.read_text(encoding="utf-8", errors="replace")
    return re.search(r"^def rows\(", text, re.MULTILINE) is not None


NAMES = sorted(path.stem for path in Path(__file__).parent.glob("*.py") if is_task(path))


def module(name: str):
    """tasks/<name>.py, or None if there is no such task."""
    # only NAMES: `name` may come from a row of somebody's data
    return importlib.import_module(f"tasks.{name}") if name in NAMES else None


def with_modes(name: str):
    """module(name), or None if the task has no mode() to tell its right answers apart."""
    task = module(name)
    return task if hasattr(task, "mode") else None


class NoSuchRows(ValueError):
    """Rows were asked for that a task does not have. The user sees this message as it is; for any
    other error in rows(), the type and the line of code too."""


def check_choice(what: str, value: str, choices) -> None:
    """NoSuchRows that lists the choices, unless `value` is one of them."""
    if value not in choices:
        raise NoSuchRows(f"{what} {value!r} does not exist: choose one of {', '.join(choices)}")


def answer_block(text: str) -> tuple[int, int] | None:
    """(begin, end) of the content of the last complete <answer>...</answer>."""
    last_close = text.rfind("</answer>")
    # the last opening tag with a closing tag after it
    start = text.rfind("<answer>", 0, max(last_close, 0))
    if start < 0:
        return None
    # not last_close: more closing tags may follow the one that closes this opening tag
    return start + len("<answer>"), text.find("</answer>", start)


def last_answer(text: str) -> str:
    """The content of the last complete <answer>...</answer>, or all of the text if there is none;
    stripped."""
    block = answer_block(text)
    return (text[slice(*block)] if block else text).strip()


def worked_solution(reasoning: str, answer: str) -> str:
    """A right completion for prompts in words, as training data for a warm start (sft.py)."""
    return f"<think>{reasoning}</think>\n<answer>{answer}</answer>"


def hold_out(classes: dict, count: int) -> dict[str, list]:
    """{"train": problems, "test": problems}, from {key of a class: its problems}.

    Problems of one class are the same in disguise, so whole classes are held out: the `count` with
    the smallest keys (which are hashes, so large classes are not preferred). "test" has the first
    problem of each; their other problems are in neither split."""
    keys = sorted(classes)  # the same in every process
    test = [classes[key][0] for key in keys[:count]]
    train = [problem for key in keys[count:] for problem in classes[key]]
    return {"train": train, "test": test}


def take(problems: list, n: int, seed: int) -> list:
    """The first n problems (-1: all) in an order that depends on `seed`."""
    size = len(problems)
    if not -1 <= n <= size:
        raise NoSuchRows(f"n={n} rows asked for, but this split has {size} (-1 means all)")
    # all are drawn, whatever n is: sample(problems, n) begins differently for each n
    ordered = random.Random(f"rows/{seed}").sample(problems, size)
    return ordered if n == -1 else ordered[:n]
