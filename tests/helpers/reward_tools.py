"""What the tests of rewards, scoring and workers share: configs, rows and completions."""

import inspect
import time
from pathlib import Path

import psutil
import pytest

import rewards
import scoring
import tasks
from common import UserError, load_config

# seconds on top of what the limits allow: the machine may be busy
SLACK = 60.0


def config(*funcs: str, weights=None, **settings) -> dict:
    """Two workers; rewards may take 1 GiB, and long on a busy machine: a test of what hangs sets a
    limit of its own. Completions have up to 100 tokens."""
    settings = {
        "reward_workers": 2,
        "reward_timeout": 300.0,
        "reward_memory_gib": 1.0,
        "max_completion_length": 100,
        "soft_overlong_buffer": 20,
        "reward_weights": weights or [1.0] * len(funcs),
        **settings,
    }
    flags = [f"--{name}={value}" for name, value in settings.items()]
    return load_config([f"--reward_funcs={list(funcs)}", *flags])


def row_of(task: str, answer="", **columns) -> dict:
    return {"id": f"a row of {task}", "task": task, "prompt": "", "answer": answer, **columns}


def rollouts_of(texts, tokens: int = 10) -> list[dict]:
    return [{"text": text, "completion_ids": [0] * tokens} for text in texts]


TEN = {"numbers": [2, 3, 4], "target": 10}
BOARD = {"board": "AAB...B.........", "size": 4, "moves": 2, "solution": "BD1,AR2"}
LEGS = {"question": "How many legs have 5 spiders and 3 birds?", "answer": "46", "metadata": {}}
# of a row for each reward that reads an answer of its own kind
ANSWERS = {
    "countdown": TEN,
    "graph_coloring": {"n": 3, "edges": [[0, 1], [1, 2]], "partial": "R.."},
    "crossword": {"answer": "SILENT", "enumeration": "6"},
    "rush_hour": BOARD,
    "rush_hour_exact": BOARD,
    "rush_hour_shaped": BOARD,
    "reasoning_gym": {"problem": "leg_counting", "settings": {}, "entry": LEGS},
    "sentence": ["dog", "river"],
    "math": "10",
    "math_exact": "10",
    "last_number": "10",
}
# what scoring.py gives to every reward
GIVEN = ("completion", "answer", "tokens", "max_completion_length", "soft_overlong_buffer")


def row_for(name: str) -> dict:
    """A row that the reward `name` of REWARDS can read, also one that these tests don't know: the
    first of the task whose file it stands in, or else with a 1 in each column that it demands."""
    if name in ANSWERS:
        return row_of(name, ANSWERS[name])
    function = rewards.REWARDS[name]
    task = tasks.module(function.__module__.removeprefix("tasks."))
    if task is not None:
        return task.rows("test", 1, 0)[0] | {"id": f"a row of {name}", "task": name}
    columns = {}
    for parameter in inspect.signature(function).parameters.values():
        is_named = parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        if is_named and parameter.default is parameter.empty and parameter.name not in GIVEN:
            columns[parameter.name] = 1
    return row_of(name, "", **columns)


def rows_for_all() -> list[dict]:
    """One for each reward, to which "auto" gives it."""
    return [row_for(name) for name in rewards.REWARDS]


def function(
    name: str, weight: float = 1.0, task=None, decides: bool = True
) -> scoring.RewardFunction:
    return scoring.RewardFunction(name, weight, task, decides, f"nowhere:{name}")


def functions_for(c: dict, rows: list[dict]) -> list:
    return rewards.reward_functions(c["reward_funcs"], c["reward_weights"], rows)


def measured(texts, row: dict, c: dict) -> tuple[list, list]:
    """What the first function says of each text, and the record of failures."""
    values, failed = scoring.measure(rollouts_of(texts), [row], functions_for(c, [row]), c)
    return values[0, :, 0].tolist(), failed


def job(function: str, text: str, answer="") -> tuple:
    return function, text, {"answer": answer}


def close_pools() -> None:
    for pool in scoring.POOLS.values():
        pool.close()
    scoring.POOLS.clear()


def lines_of(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


def runs(pid: int) -> bool:
    try:
        # an orphan's zombie is its new parent's business
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def come_true(condition, seconds: float = SLACK) -> bool:
    late = time.monotonic() + seconds
    while not condition() and time.monotonic() < late:
        time.sleep(0.02)
    return condition()


def refusal(what, *args) -> str:
    """The one sentence with which what(*args) refuses."""
    with pytest.raises(UserError) as caught:
        what(*args)
    assert "\n" not in str(caught.value)
    return str(caught.value)
