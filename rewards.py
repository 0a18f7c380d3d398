r"""Reward functions: what a completion's text is worth. Add your own here.

    columns = columns_of(config["reward_funcs"], config["reward_weights"], rows)    # for scoring.py
    rewards, metrics = score(rollouts, rows, config)                                # (P, G), {...}

A reward is a plain function (completion, answer, **row) -> float:

    completion   the text of a completion. A model wrote it: treat it as hostile, never eval it
    answer       the answer of the row
    **row        the row's other columns, and tokens (of the completion, EOS included),
                 max_completion_length, soft_overlong_buffer

It has two ways in: an entry of REWARDS below, or a module of your own, named "module:function" in
reward_funcs. Either way a worker process (workers.py) imports it by module and name, so it must be
a `def` at the top of its module. There it sees little of your environment: a key that it needs goes
into a variable whose name begins with REWARD_.
"""

import re
from collections import deque

from common import UserError, quoted
from tasks import (
    countdown,
    crossword,
    graph_coloring,
    mathematics,
    reasoning_gym,
    rush_hour,
    sentence,
)

# 12, 1,234,567, 3.50, .5, -4; in 7-5 the sign is no part of a number. No digits but ASCII's
LAST_NUMBER = re.compile(
    r"(?P<minus>(?<![\w.)\]}%])-)?\$?"
    r"(?P<whole>[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+|(?<![0-9.])(?=\.[0-9]))"
    r"(?:\.(?P<decimals>[0-9]+))?"
)
# in the order in which format_reward wants them
TAGS = ("<think>", "</think>", "<answer>", "</answer>")


def last_number(completion: str, answer, **row) -> float:
    """1.0 if the last number of the text is the answer: 12 for "7 + 5 = 12.", else 0.0. 1,234 and
    LaTeX's 1{,}234 are 1234, 3.50 is 3.5, $5 is 5.

    Not covered: fractions, powers, units; "12, no, 13" is 13. An answer that is no such number is a
    ValueError; of GSM8K's it is what stands behind ####."""
    gold = LAST_NUMBER.fullmatch(plain_number(mathematics.gold_text(answer)).strip())
    if not gold or isinstance(answer, bool):
        raise ValueError(f"the right answer must be a number, not {quoted(answer, 40)}")
    # a text of a megabyte holds many: only the last is kept
    last = deque(LAST_NUMBER.finditer(plain_number(completion)), maxlen=1)
    return float(bool(last) and digits_of(last[0]) == digits_of(gold))


def plain_number(text: str) -> str:
    return text.translate(mathematics.MINUS).replace("{,}", ",")


def digits_of(number: re.Match) -> tuple[bool, str, str]:
    """A match of LAST_NUMBER, equal for equal values. Not as a float or int: there may be a million
    digits."""
    whole = number["whole"].replace(",", "").lstrip("0")
    decimals = (number["decimals"] or "").rstrip("0")
    is_negative = bool(number["minus"]) and bool(whole or decimals)  # -0 is 0
    return is_negative, whole, decimals


def format_reward(completion: str, answer=None, **row) -> float:
    """1.0 for <think>...</think> and <answer>...</answer>, each once, in this order, only spaces
    around them; else 0.0."""
    text = completion.strip()
    for tag in TAGS:
        if text.count(tag) != 1:
            return 0.0
    # each is there once, so the first that find() meets is the only one
    think, think_end, answer_start, answer_end = map(text.find, TAGS)
    # 0: nothing may stand before <think>
    in_order = think == 0 < think_end < answer_start < answer_end
    at_the_end = answer_end == len(text) - len("</answer>")
    between = text[think_end + len("</think>") : answer_start]
    return float(in_order and at_the_end and not between.strip())


def tag_count(completion: str, answer=None, **row) -> float:
    """A quarter for each of the four tags that is there exactly once: format_reward in steps."""
    return sum(completion.count(tag) == 1 for tag in TAGS) / len(TAGS)


def length(
    completion: str, answer=None, *, tokens: int, max_completion_length: int, **row
) -> float:
    """-tokens / max_completion_length: 0 for nothing, -1 for all that is allowed. A negative weight
    asks for long completions."""
    # a length over the limit counts as the limit
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
    """0 up to max_completion_length - soft_overlong_buffer tokens, from there in a straight line to
    -1 at max_completion_length. Yu et al. 2025 (DAPO), arXiv:2503.14476, eq. 13."""
    # below 0 for a completion that ends in time
    too_many = tokens - (max_completion_length - soft_overlong_buffer)
    return -min(1.0, max(0.0, too_many / soft_overlong_buffer))


def repetition(completion: str, answer=None, **row) -> float:
    """Minus the share of three-word sequences that have occurred before: 0 without any, towards -1
    for a loop."""
    words = completion.split()
    # overlapping: a loop of any period repeats some
    triples = list(zip(words, words[1:], words[2:]))
    # fewer than three words
    if not triples:
        return 0.0
    return len(set(triples)) / len(triples) - 1


# under "auto" a row is scored by the entry that has the name of its task
REWARDS = {
    "countdown": countdown.reward,
    "graph_coloring": graph_coloring.reward,
    "crossword": crossword.reward,
    "rush_hour": rush_hour.reward,
    "rush_hour_exact": rush_hour.rush_hour_exact,
    "rush_hour_shaped": rush_hour.rush_hour_shaped,
    "reasoning_gym": reasoning_gym.reward,
    "sentence": sentence.reward,
    "math": mathematics.math_reward,
    "math_exact": mathematics.math_exact,
    "last_number": last_number,
    # of no task: these shape the reward, beside one that decides
    "format": format_reward,
    "tag_count": tag_count,
    "length": length,
    "soft_overlong": soft_overlong,
    "repetition": repetition,
}


# --- names in a config


def function_of(name: str) -> str:
    """ "module:function" of a name in REWARDS; what is written so already stays as it is."""
    if name not in REWARDS:
        return name
    function = REWARDS[name]
    # a functools.partial, say, has no name
    own_name = getattr(function, "__qualname__", "<none>")
    if "<" in own_name:  # "<lambda>", "outer.<locals>.inner"
        raise UserError(
            f"rewards.REWARDS[{name!r}] must be a def at the top of a module: a worker imports it "
            f"by name, and this one has none ({quoted(function)})"
        )
    return f"{function.__module__}:{own_name}"


def check_names(names: list[str]) -> None:
    """UserError for a name in reward_funcs that no function can be found by. What is written
    module:function is imported by a worker only, later."""
    for name in names:
        if name in REWARDS:
            function_of(name)
        elif name != "auto" and ":" not in name:
            raise UserError(
                f"reward_funcs: {name!r} is not registered in rewards.REWARDS, which has "
                f"{', '.join(REWARDS)}; one of your own is written module:function"
            )


def check_tasks(rows: list[dict]) -> None:
    """UserError for a row whose task has no reward. A task is module:function only if the config
    has named it so: data.own_task takes none from a row of somebody's data, which names no code."""
    for row in rows:
        if row["task"] not in REWARDS and ":" not in row["task"]:
            raise UserError(
                f"reward_funcs=['auto'] takes the reward from a row's task; row "
                f"{quoted(row['id'])} has task {quoted(row['task'])}, and rewards.REWARDS has "
                f"{', '.join(REWARDS)}: add a column `task` with one of these names to the data, "
                "or name the reward in reward_funcs"
            )


def columns_of(names: list[str], weights: list[float], rows: list[dict]) -> list:
    """A scoring.Column for each function that scores these rows; "auto" becomes one for each task
    that they have. UserError if a task has no reward, or a function stands there twice."""
    from scoring import Column  # here: workers import this file, but no torch

    columns = []
    for i, (name, weight) in enumerate(zip(names, weights)):
        # the first of reward_funcs says what is correct; the others only shape the reward
        decides = i == 0
        # without rows there are no tasks to make columns of
        if name != "auto" or not rows:
            columns.append(Column(name, weight, None, decides, function_of(name)))
            continue
        check_tasks(rows)
        # sorted: the order of a set differs between ranks, and that of the columns must not
        for task in sorted({row["task"] for row in rows}):
            columns.append(Column(task, weight, task, decides, function_of(task)))
    called = [column.name for column in columns]
    for name in called:
        if called.count(name) > 1:  # a metric, and an entry of generate.py, is called after it
            raise UserError(f"reward_funcs={names} scores rows by {name!r} twice: name it once")
    return columns


def score(rollouts: list[dict], rows: list[dict], config: dict):
    """Rewards (P, G) and their metrics, in one process. rollouts: P * G, prompt-major, with "text"
    and "completion_ids"; rows: P."""
    import scoring  # here: workers import this file, but no torch

    columns = columns_of(config["reward_funcs"], config["reward_weights"], rows)
    values, _ = scoring.measure(rollouts, rows, columns, config)  # (P, G, F)
    return scoring.combine(values, columns)
