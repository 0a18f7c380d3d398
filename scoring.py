"""How a batch is scored: reward functions, their weights, the routing of rows to functions, failures.

    columns = columns_of(config["reward_funcs"], config["reward_weights"], rows)
    begin(rollouts, row, columns, config)                               # as soon as a prompt's completions are there; returns at once
    values, failed = measure(rollouts, rows, columns, config)           # (p, G, F): what each function says on this rank
    rewards, metrics = combine(values_of_all_ranks, columns)            # (P, G)

The functions are in rewards.py and in tasks/, and run in the processes of workers.py: reward_workers=0 runs them here, without limits.
"""

import atexit
import json
import math
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch

import tasks
import workers
from common import RunStopped, UserError, quoted
from rewards import LONGEST, REWARDS, resolve, stated_answer
from tasks import countdown
from workers import Failure

TIMEOUT, ERROR = (
    -math.inf,
    math.inf,
)  # in the place of a value, which is always finite; NaN: not asked
SAVED_PER_STEP, SAVED_CHARACTERS = 20, 100_000


class Column(NamedTuple):
    """A reward function of reward_funcs; "auto" becomes one for each task. task: the rows it scores, None for all of them.
    decides: it is the one whose value of at least 1 counts as a correct answer."""

    name: str
    weight: float
    task: str | None
    decides: bool


def check_names(names: list[str]) -> None:
    """A UserError for a name that no function can be found by. Functions of the user's own are first imported by a worker."""
    for name in names:
        if name != "auto" and ":" not in name:
            try:
                resolve(name)
            except ValueError as error:
                raise UserError(str(error)) from None


def columns_of(names: list[str], weights: list[float], rows: list[dict]) -> list[Column]:
    """One Column per function that scores these rows. A UserError under "auto" if a row's task has no reward."""
    found = []
    for i, (name, weight) in enumerate(zip(names, weights)):
        names_of_tasks = sorted({row["task"] for row in rows}) if name == "auto" else []
        for task in names_of_tasks:
            if task not in REWARDS and ":" not in task:
                row = next(row for row in rows if row["task"] == task)
                raise UserError(
                    f"reward_funcs=['auto'] takes the reward from a row's task; row {quoted(row['id'])} has task {quoted(task)}, and rewards.REWARDS "
                    f"has {', '.join(REWARDS)}: add a column `task` to the data, or name the reward in reward_funcs"
                )
        found += [Column(task, weight, task, i == 0) for task in names_of_tasks] or [
            Column(name, weight, None, i == 0)
        ]
    return found


# --- asking the workers


@cache
def make_pool(count: int, timeout: float, memory_gib: float, names: tuple) -> workers.Pool:
    pool = workers.Pool(count, timeout, memory_gib, names)
    atexit.register(pool.close)
    return pool


def pool_of(c: dict) -> workers.Pool | None:
    """The worker processes of this config, started at the first call and kept; None where it wants none."""
    if not c.get("reward_workers"):
        return None
    names = [
        name for entry in c["reward_funcs"] for name in (REWARDS if entry == "auto" else [entry])
    ]
    return make_pool(c["reward_workers"], c["reward_timeout"], c["reward_memory_gib"], tuple(names))


def answers(jobs: dict, c: dict) -> dict:
    """{key: number, text, None or Failure} for jobs {key: (function, text, row)}."""
    if pool := pool_of(c):
        return pool.answers(jobs)
    return {key: workers.believed(job[0], workers.answer(*job)) for key, job in jobs.items()}


def key_of(column: Column, row: dict, r: dict) -> tuple:
    """Equal completions of a row have equal keys and are scored once."""
    return column.name, id(row), r["text"], len(r.get("completion_ids", ()))


def jobs_of(rollouts: list[dict], row: dict, columns: list[Column], c: dict) -> dict:
    """{key: (function, text, row)} for the completions of one row."""
    seen = {name: value for name, value in row.items() if name != "prompt_ids"}
    jobs = {}
    for r in rollouts:
        more = {
            "tokens": len(r.get("completion_ids", ())),
            "max_completion_length": c.get("max_completion_length"),
            "soft_overlong_buffer": c.get("soft_overlong_buffer"),
        }
        for column in columns:
            if column.task in (None, row["task"]):
                jobs[key_of(column, row, r)] = (column.name, r["text"], seen | more)
    return jobs


def begin(rollouts: list[dict], row: dict, columns: list[Column], c: dict) -> None:
    """Lets the workers start on one row's completions while others are still being sampled; measure() collects."""
    if pool := pool_of(c):
        pool.ask(jobs_of(rollouts, row, columns, c))


def measure(
    rollouts: list[dict], rows: list[dict], columns: list[Column], c: dict
) -> tuple[torch.Tensor, list[dict]]:
    """(P, G, F) float32, NaN where a function does not score a row, TIMEOUT or ERROR where it failed; and a record of each failure.

    rollouts: N = P * G, prompt-major, with "text" and "completion_ids"; rows: P."""
    G = len(rollouts) // max(1, len(rows))
    groups = [rollouts[i * G : (i + 1) * G] for i in range(len(rows))]
    found = answers(
        {
            key: job
            for group, row in zip(groups, rows)
            for key, job in jobs_of(group, row, columns, c).items()
        },
        c,
    )
    values, failed = torch.full((len(rows), G, len(columns)), math.nan), []
    for i, (group, row) in enumerate(zip(groups, rows)):
        for j, r in enumerate(group):
            for f, column in enumerate(columns):
                value = found.get(key_of(column, row, r), math.nan)
                if isinstance(value, Failure):
                    failed.append(
                        {
                            "reward": column.name,
                            "id": row["id"],
                            "kind": value.kind,
                            "reason": value.reason,
                            "completion": r["text"],
                        }
                    )
                    value = TIMEOUT if value.kind == "timeout" else ERROR
                values[i, j, f] = value
    return values, failed


def combine(values: torch.Tensor, columns: list[Column]) -> tuple[torch.Tensor, dict]:
    """Rewards (P, G), the weighted sum of what the functions say in values (P, G, F), and {"reward/<name>/mean", "timeouts", "errors"} with
    "reward/failures", the completions on which at least one function failed. A function that failed adds 0."""
    metrics = {"reward/failures": int(values.isinf().any(-1).sum())}
    for value, column in zip(values.unbind(-1), columns):
        metrics |= {
            f"reward/{column.name}/mean": value.nan_to_num(math.nan, 0.0, 0.0).nanmean().item(),
            f"reward/{column.name}/timeouts": int((value == TIMEOUT).sum()),
            f"reward/{column.name}/errors": int((value == ERROR).sum()),
        }
    weights = torch.tensor([column.weight for column in columns])
    return (values.nan_to_num(0.0, 0.0, 0.0) * weights).sum(-1), metrics


def check_failures(metrics: dict, completions: int, limit: float) -> None:
    """RunStopped if more than the share `limit` of a step's completions met a timeout or an error of a reward; metrics: combine()'s."""
    if metrics["reward/failures"] > limit * completions:
        kinds = ", ".join(
            f"{name} {n}"
            for name, n in metrics.items()
            if n and name.endswith(("/timeouts", "/errors"))
        )
        raise RunStopped(
            f"rewards failed on {metrics['reward/failures']} of a step's {completions} completions (max_reward_failures={limit}): "
            f"{kinds}; reward_failures.rank_*.jsonl in output_dir have reasons and texts"
        )


def score(rollouts: list[dict], rows: list[dict], config: dict) -> tuple[torch.Tensor, dict]:
    """measure() and combine() in one process: rewards (P, G) and their metrics."""
    columns = columns_of(config["reward_funcs"], config["reward_weights"], rows)
    return combine(measure(rollouts, rows, columns, config)[0], columns)


def check_answers(columns: list[Column], rows: list[dict], dataset: str, c: dict) -> None:
    """A UserError if a function can't read the answers of its rows: another task's reward on one's own dataset."""
    first_of_task = {row["task"]: row for row in reversed(rows)}
    some = list(first_of_task.values())[
        :20
    ]  # somebody's own column "task" may hold as many values as there are rows
    for column, row in [
        (column, row) for column in columns for row in some if column.task in (None, row["task"])
    ]:
        examples = [{"text": text, "completion_ids": [0]} for text in ("1", "\\boxed{1}")]
        _, failed = measure(examples, [row], [column], c)
        if failed:
            raise UserError(
                f"reward_funcs: {quoted(column.name)} can't score row {quoted(row['id'])} of dataset {dataset!r}, answer {quoted(row['answer'], 60)} "
                f"({failed[0]['reason']})"
            )


def save_failures(folder, failed: list[dict], step: int, rank: int) -> str:
    """Appends a step's failures to reward_failures.rank_R.jsonl, 20 at most, long texts cut; one sentence about them."""
    path = Path(folder) / f"reward_failures.rank_{rank}.jsonl"
    where = f"the text is in {path}"
    try:
        with open(path, "a", encoding="utf-8") as file:
            for record in failed[:SAVED_PER_STEP]:
                text = record["completion"][:SAVED_CHARACTERS]
                file.write(json.dumps({"step": step, **record, "completion": text}) + "\n")
    except FileNotFoundError:  # output_dir is gone, as all ranks hear together at the step's end
        where = f"{path} could not be written"
    first = failed[0]
    return (
        f"step {step}: {len(failed)} reward(s) failed on rank {rank}, the first: {quoted(first['reward'])} on row {quoted(first['id'])}: {first['reason']}; "
        f"{where}"
    )


# --- which completions are right, and whether they differ


def correct(values: torch.Tensor, columns: list[Column]) -> torch.Tensor:
    """(P, G) bool: the first of reward_funcs gave at least 1."""
    decides = values[..., [column.decides for column in columns]]
    return ((decides >= 1) & decides.isfinite()).any(-1)


def modes_of(rollouts: list[dict], rows: list[dict], right: torch.Tensor, c: dict) -> list[list]:
    """Per row a list of G: the key of a correct completion's mode; None for a wrong one and where the task has no modes."""
    G = right.shape[1]
    texts = [
        [
            r["text"] if right[i, j] and tasks.module(row["task"]) else None
            for j, r in enumerate(rollouts[i * G : (i + 1) * G])
        ]
        for i, row in enumerate(rows)
    ]
    jobs = {
        ("mode", id(row), text): ("mode", text, {"answer": row["answer"], "task": row["task"]})
        for i, row in enumerate(rows)
        for text in texts[i]
        if text is not None
    }
    found = {
        key: None if isinstance(value, Failure) else value
        for key, value in answers(jobs, c).items()
    }
    return [
        [found.get(("mode", id(row), text)) for text in group] for row, group in zip(rows, texts)
    ]


def answer_clusters(
    rollouts: list[dict], rows: list[dict], right: torch.Tensor, c: dict
) -> torch.Tensor:
    """(P, G) numbers: completions of a group that gave the same answer share one. Correct ones are told apart by their mode, wrong ones by
    the text of their answer, which may be the bare text unless the task is a reward that reads tags, as math does; one without any answer is a cluster of its own."""
    G, result = right.shape[1], []
    for i, modes in enumerate(modes_of(rollouts, rows, right, c)):
        task = rows[i]["task"]
        seen, bare = (
            {},
            (lambda text: "")
            if task in REWARDS and task not in tasks.NAMES
            else countdown.last_answer,
        )
        for j, r in enumerate(rollouts[i * G : (i + 1) * G]):
            key = (
                (modes[j] or "")
                if right[i, j]
                else (stated_answer(r["text"]) or bare(r["text"])).strip()[:LONGEST]
            )
            result.append(
                seen.setdefault(
                    (bool(right[i, j]), key) if right[i, j] or key else ("none", j), len(seen)
                )
            )
    return torch.tensor(result).view(len(rows), G)


def correct_modes(
    rollouts: list[dict], rows: list[dict], right: torch.Tensor, c: dict
) -> list[tuple[int, set | None]]:
    """Per row (number of correct completions, set of distinct correct answer modes or None for a task without modes)."""
    modes = modes_of(rollouts, rows, right, c)
    return [
        (int(right[i].sum()), set(modes[i]) - {None} if tasks.module(row["task"]) else None)
        for i, row in enumerate(rows)
    ]
