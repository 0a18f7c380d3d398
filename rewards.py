"""Reward functions and how a batch is scored.

A reward is a plain function (completion: str, answer, **row) -> float: the completion's text, the row's answer, the row's other
columns. Register it in REWARDS and name it in reward_funcs. The text comes from a model: treat it as hostile, never eval it.
"""
import math

import torch

from common import UserError
from data import task_module
from tasks import countdown, graph_coloring


def last_boxed(text: str) -> str | None:
    r"""The content of the last complete \boxed{...}, braces matched; None without one."""
    open_braces, start, end = [], -1, -1
    for i, character in enumerate(text):        # one pass: a completion may be nothing but boxes that never close
        if character == "{":
            open_braces.append(i)
        elif character == "}" and open_braces:
            brace = open_braces.pop()
            if brace > start and text.endswith("\\boxed", 0, brace):
                start, end = brace, i
    return text[start + 1:end] if start >= 0 else None


def math_reward(completion: str, answer: str, **row) -> float:
    r"""1.0 if the last \boxed{} of the completion equals `answer` according to math-verify, else 0.0.

    Covered: fractions, roots, sets, intervals, equations, units that math-verify knows; 1/2 equals 0.5.
    Not covered: an answer outside \boxed{} scores 0, whatever else the text says. math-verify gives up after 1 second at each of its steps.
    """
    import math_verify
    boxed = last_boxed(completion[-10_000:])     # what a model boxes last is its answer; bounded, for it may be a megabyte
    if boxed is None or len(boxed) > 1000:
        return 0.0
    gold, found = (math_verify.parse(f"\\boxed{{{text}}}", parsing_timeout=1) for text in (answer, boxed))
    return float(bool(gold) and math_verify.verify(gold, found, timeout_seconds=1))


REWARDS = {"countdown": countdown.reward, "graph_coloring": graph_coloring.reward, "math": math_reward}


def check_names(names: list[str]) -> None:
    for name in names:
        if name not in REWARDS:
            raise UserError(f"reward_funcs: {name!r} is not registered in rewards.REWARDS, which has {', '.join(REWARDS)}")


def check_answers(names: list[str], row: dict, dataset: str) -> None:
    """A UserError if one of the rewards can't read this row's answer: another task's reward on one's own dataset."""
    for name in names:
        try:
            for completion in ("1", "\\boxed{1}"):
                REWARDS[name](completion, **row)
        except Exception as error:
            raise UserError(f"reward_funcs: {name!r} can't score the rows of dataset_name={dataset!r}, such as answer {str(row['answer'])[:60]!r} "
                            f"({type(error).__name__}: {error})") from None


def score(rollouts: list[dict], rows: list[dict], config: dict) -> tuple[torch.Tensor, dict]:
    """(P, G) float32, the weighted sum of reward_funcs, and {"reward/<name>/mean": mean over this rank's rows}.

    rollouts: N = P * G, prompt-major; rows: P. A reward that is not a finite number is a ValueError that names it."""
    G = len(rollouts) // len(rows)
    total, metrics = torch.zeros(len(rows), G), {}
    for name, weight in zip(config["reward_funcs"], config["reward_weights"]):
        values = [float(REWARDS[name](r["text"], **rows[i // G])) for i, r in enumerate(rollouts)]
        if not all(map(math.isfinite, values)):
            worst = next(i for i, v in enumerate(values) if not math.isfinite(v))
            raise ValueError(f"reward {name!r} gave {values[worst]} for row {rows[worst // G]['id']!r}; a reward must be finite")
        total += weight * torch.tensor(values).view(len(rows), G)
        metrics[f"reward/{name}/mean"] = sum(values) / len(values)
    return total, metrics


def answer_clusters(rollouts: list[dict], rows: list[dict], name: str) -> torch.Tensor:
    """(P, G) numbers: completions of a group that gave the same answer share one. Correct ones (reward `name` at least 1) are told apart by
    their mode, wrong ones by the text of their answer; one without any answer is a cluster of its own."""
    G, result = len(rollouts) // len(rows), []
    for i, row in enumerate(rows):
        task, seen = task_module(row["task"]), {}
        for j, text in enumerate(r["text"] for r in rollouts[i * G:(i + 1) * G]):
            right = REWARDS[name](text, **row) >= 1
            key = (task.mode(text, row["answer"]) if task else "") if right else (last_boxed(text) or countdown.last_answer(text)).strip()
            result.append(seen.setdefault((right, key) if right or key else ("none", j), len(seen)))
    return torch.tensor(result).view(len(rows), G)


def correct_modes(rollouts: list[dict], rows: list[dict], name: str) -> list[tuple[int, set | None]]:
    """Per prompt (number of correct completions, set of distinct correct answer modes or None for a task without modes).
    Correct means: reward `name` is at least 1."""
    k, result = len(rollouts) // max(1, len(rows)), []
    for i, row in enumerate(rows):
        right = [r["text"] for r in rollouts[i * k:(i + 1) * k] if REWARDS[name](r["text"], **row) >= 1]
        task = task_module(row["task"])
        result.append((len(right), {task.mode(text, row["answer"]) for text in right} if task else None))
    return result
