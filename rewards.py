r"""Reward functions: what a completion's text is worth. Add your own here.

    functions = reward_functions(config["reward_funcs"], config["reward_weights"], rows)
    rewards, metrics = score(rollouts, rows, config)    # (P, G), {...}, in one process

A reward is a plain function (completion, answer, **row) -> float:

    completion   the text of a completion. A model wrote it: treat it as hostile, never eval it
    answer       the row's answer
    **row        the row's other columns, plus tokens (the completion's, EOS included),
                 max_completion_length and soft_overlong_buffer

There are two ways to add one: an entry in REWARDS below, or "module:function" in reward_funcs,
which names a module of your own. A worker process (workers.py) imports it by module and name. An
entry of REWARDS must be a `def` at the top of its module; "module:function" may be any callable
there: `half = functools.partial(short, level=0.5)` fixes an argument. A worker sees little of your
environment: a key that a reward needs goes into a variable whose name begins with REWARD_.
"""

import re
from collections import deque

from common import UserError, quoted
from tasks import (
    between,
    countdown,
    crossword,
    graph_coloring,
    mathematics,
    reasoning_gym,
    rush_hour,
    sentence,
)

# matches 12, 1,234,567, 3.50, .5, -4, and "- 4" after =, :, ( or {. The minus in 7-5 is not a sign.
# ASCII digits only
LAST_NUMBER = re.compile(
    r"(?P<minus>(?<![\w.)\]}%])-|(?<=[=:({] )- |(?<=[=:({])- )?(?:\\?\$|[€£¥₹])?"
    r"(?P<whole>[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+|(?<![0-9.])(?=\.[0-9]))"
    r"(?:\.(?P<decimals>[0-9]+))?"
)
# what may stand between thousands instead of a comma: 10\,000, 10,\!000, 10~000, no-break spaces.
# 3,\,125 is two numbers
THOUSANDS = re.compile(r"(?<=[0-9])(?:,?\\!|\\[,;: ]|~|[\u00a0\u202f])(?=[0-9]{3}(?![0-9]))")
# in the order that format_reward requires
TAGS = ("<think>", "</think>", "<answer>", "</answer>")


def last_number(completion: str, answer, **row) -> float:
    r"""1.0 if the last number of the text is the answer: 12 for "7 + 5 = 12.", else 0.0. 1,234 and
    LaTeX's 1{,}234 and 1\,234 are 1234, 3.50 is 3.5, $5 is 5.

    Not covered: fractions, powers, units, a plain space between thousands; "12, no, 13" is 13. A
    row whose answer is not such a number is a ValueError; of a GSM8K answer only the part after
    #### counts."""
    gold = LAST_NUMBER.fullmatch(plain_number(mathematics.gold_text(answer)).strip())
    if not gold or isinstance(answer, bool):
        raise ValueError(f"the right answer must be a number, not {quoted(answer, 40)}")
    # maxlen=1 keeps only the last match: a text of a megabyte holds many
    last = deque(LAST_NUMBER.finditer(plain_number(completion)), maxlen=1)
    return float(bool(last) and digits_of(last[0]) == digits_of(gold))


def plain_number(text: str) -> str:
    text = text.translate(mathematics.MINUS).replace("{,}", ",")
    text = re.sub(r"\\[a-zA-Z]+(?=-)", " ", text)  # \approx-12: after a letter - is not a sign
    return THOUSANDS.sub(",", text)


def digits_of(number: re.Match) -> tuple[bool, str, str]:
    """(is negative, whole digits, decimals) of a match of LAST_NUMBER; equal for equal values. Not
    a float or an int, because there may be a million digits."""
    whole = number["whole"].replace(",", "").lstrip("0")
    decimals = (number["decimals"] or "").rstrip("0")
    is_negative = bool(number["minus"]) and bool(whole or decimals)  # -0 is 0
    return is_negative, whole, decimals


def format_reward(completion: str, answer=None, **row) -> float:
    """1.0 for <think>...</think> then <answer>...</answer>, each once, with nothing but white space
    before, between and after them; else 0.0. If the chat template itself opens <think>, completions
    do not, and this is always 0."""
    text = completion.strip()
    for tag in TAGS:
        if text.count(tag) != 1:
            return 0.0
    # each tag occurs once, so the first that find() finds is the only one
    think, think_end, answer_start, answer_end = map(text.find, TAGS)
    # think == 0: nothing may stand before <think>
    in_order = think == 0 and think_end < answer_start < answer_end
    at_the_end = answer_end == len(text) - len("</answer>")
    gap = text[think_end + len("</think>") : answer_start]
    return float(in_order and at_the_end and not gap.strip())


def tag_count(completion: str, answer=None, **row) -> float:
    """A quarter for each of the four tags that occurs exactly once: format_reward in small
    steps."""
    return sum(completion.count(tag) == 1 for tag in TAGS) / len(TAGS)


def length(
    completion: str, answer=None, *, tokens: int, max_completion_length: int, **row
) -> float:
    """-tokens / max_completion_length: 0 for an empty completion, -1 for one at the limit or
    longer. A negative weight asks for long completions."""
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
    """0 up to max_completion_length - soft_overlong_buffer tokens, from there linearly down to -1
    at max_completion_length. Yu et al. 2025 (DAPO), arXiv:2503.14476, eq. 13."""
    # negative for a completion that ends before the buffer
    too_many = tokens - (max_completion_length - soft_overlong_buffer)
    return -min(1.0, max(0.0, too_many / soft_overlong_buffer))


def repetition(completion: str, answer=None, **row) -> float:
    """Minus the share of three-word sequences that repeat an earlier one: 0 if none does, close to
    -1 for a loop."""
    words = completion.split()
    # all triples, overlapping: a loop of any period repeats some of them
    triples = list(zip(words, words[1:], words[2:]))
    if not triples:  # fewer than three words
        return 0.0
    return len(set(triples)) / len(triples) - 1


# reward_funcs=["auto"] scores each row by the entry that has the name of the row's task
REWARDS = {
    "countdown": countdown.reward,
    "graph_coloring": graph_coloring.reward,
    "crossword": crossword.reward,
    "rush_hour": rush_hour.reward,
    "rush_hour_exact": rush_hour.rush_hour_exact,
    "rush_hour_shaped": rush_hour.rush_hour_shaped,
    "reasoning_gym": reasoning_gym.reward,
    "sentence": sentence.reward,
    "between": between.reward,
    "math": mathematics.math_reward,
    "math_exact": mathematics.math_exact,
    "last_number": last_number,
    # these belong to no task: they shape the reward beside a function that decides
    "format": format_reward,
    "tag_count": tag_count,
    "length": length,
    "soft_overlong": soft_overlong,
    "repetition": repetition,
}


# --- names in a config


def import_path(name: str) -> str:
    """ "module:function" for a name in REWARDS; any other name is returned as it is."""
    if name not in REWARDS:
        return name
    function = REWARDS[name]
    # a functools.partial, for example, has no __qualname__
    own_name = getattr(function, "__qualname__", "<none>")
    if "<" in own_name:  # "<lambda>", "outer.<locals>.inner"
        raise UserError(
            f"rewards.REWARDS[{name!r}] must be a def at the top of a module: a worker imports it "
            f"by name, and this one has none ({quoted(function)})"
        )
    return f"{function.__module__}:{own_name}"


def check_names(names: list[str]) -> None:
    """UserError for a name in reward_funcs that stands for no function. "module:function" is not
    checked here: only a worker imports it, later."""
    for name in names:
        if name in REWARDS:
            import_path(name)
        elif name != "auto" and ":" not in name:
            raise UserError(
                f"reward_funcs: {name!r} is not registered in rewards.REWARDS, which has "
                f"{', '.join(REWARDS)}; one of your own is written module:function"
            )


def check_tasks(rows: list[dict]) -> None:
    """UserError for a row whose task has no reward. A task written "module:function" always comes
    from the config: data.own_task ignores one in a row, because data must not name code to run."""
    for row in rows:
        if row["task"] not in REWARDS and ":" not in row["task"]:
            raise UserError(
                f"reward_funcs=['auto'] takes the reward from a row's task; row "
                f"{quoted(row['id'])} has task {quoted(row['task'])}, and rewards.REWARDS has "
                f"{', '.join(REWARDS)}: add a column `task` with one of these names to the data, "
                "or name the reward in reward_funcs (that of a file in tasks/ is tasks.FILE:reward)"
            )


def reward_functions(names: list[str], weights: list[float], rows: list[dict]) -> list:
    """A scoring.RewardFunction for each function that scores these rows; "auto" becomes one for
    each task among them. UserError if a task has no reward, or if a function is named twice."""
    from scoring import RewardFunction  # here, because workers import this file without torch

    functions = []
    for i, (name, weight) in enumerate(zip(names, weights)):
        # the first of reward_funcs decides what is correct; the others only shape the reward
        decides = i == 0
        # without rows there are no tasks that "auto" could name functions by
        if name != "auto" or not rows:
            functions.append(RewardFunction(name, weight, None, decides, import_path(name)))
            continue
        check_tasks(rows)
        # sorted: a set's order differs between ranks, and the order of functions must not
        for task in sorted({row["task"] for row in rows}):
            functions.append(RewardFunction(task, weight, task, decides, import_path(task)))
    called = [function.name for function in functions]
    for name in called:
        if called.count(name) > 1:  # metrics and generate.py's output have one key per name
            raise UserError(f"reward_funcs={names} scores rows by {name!r} twice: name it once")
    return functions


def score(rollouts: list[dict], rows: list[dict], config: dict):
    """Rewards (P, G) and their metrics, for a process that holds all rollouts. rollouts: P * G,
    prompt-major, with "text" and "completion_ids"; rows: P."""
    import scoring  # here, because workers import this file without torch

    functions = reward_functions(config["reward_funcs"], config["reward_weights"], rows)
    values, _ = scoring.measure(rollouts, rows, functions, config)  # (P, G, F)
    return scoring.combine(values, functions)
