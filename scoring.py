"""How completions are scored: the value of each function, failures, weights, answer modes.

    functions = rewards.reward_functions(config["reward_funcs"], config["reward_weights"], rows)
    begin(group, row, functions, config)    # as soon as one prompt's group is complete
    values, failed = measure(rollouts, rows, functions, config)    # (p, G, F), this rank's
    rewards, metrics = combine(values_of_all_ranks, functions)    # (P, G)

p is the number of prompts on this rank, P on all ranks; G completions per prompt; F functions.
rollouts are p * G dicts with "text" and "completion_ids", prompt-major.

The functions run in the processes of workers.py. This file and the workers know a function only by
its name, "module:function". reward_workers=0 runs the functions in this process, without limits.
"""

import atexit
import json
import math
from pathlib import Path
from typing import NamedTuple

import torch

import rollout
import tasks
import workers
from checks import completions_per_prompt
from common import RewardsFailed, UserError, print_above_bar, quoted
from prompts import without_added
from tasks import last_answer, mathematics
from workers import Failure

# What measure() writes where a function failed. No function can return these, because only finite
# values are accepted. NaN marks a function that does not score the row.
TIMEOUT = -math.inf
ERROR = math.inf

# a reward that always fails must not fill the disk
SAVED_PER_STEP = 20
SAVED_CHARACTERS = 100_000  # per completion
CHECKED_ROWS = 20  # of each function: every row of a user may have other columns, or another task


class RewardFunction(NamedTuple):
    """A reward function of reward_funcs; "auto" becomes one for each task."""

    name: str  # as metrics call it
    weight: float
    task: str | None  # scores only the rows of this task; None: all rows
    decides: bool  # whether a value of at least 1 makes the completion count as correct
    path: str  # "module:function", which a worker imports

    def applies_to(self, row: dict) -> bool:
        return self.task is None or self.task == row["task"]


def by_name(functions: list[RewardFunction], values) -> dict:
    """{name: value} of the values (F,) of one completion, for JSON: None for NaN (does not apply)
    and infinity (failed)."""
    named = {}
    for function, value in zip(functions, values.tolist()):
        named[function.name] = value if math.isfinite(value) else None
    return named


# --- jobs: calls of reward functions, in the worker processes

POOLS = {}  # (processes, timeout, memory): workers.Pool; a run has one


def pool_of(c: dict) -> workers.Pool | None:
    """The worker processes of this config, started at the first call and kept; None with
    reward_workers=0."""
    if not c["reward_workers"]:
        return None
    settings = (c["reward_workers"], c["reward_timeout"], c["reward_memory_gib"])
    if settings not in POOLS:
        # kept: a worker's start and imports take seconds
        POOLS[settings] = workers.Pool(*settings)
        atexit.register(POOLS[settings].close)
    return POOLS[settings]


def run_jobs(jobs: dict, c: dict, max_timeouts: float = math.inf) -> dict:
    """{key: result}, a number, text, None or Failure, of these jobs, see jobs_of(). Once more than
    `max_timeouts` have timed out, the workers give up on the others."""
    if pool := pool_of(c):
        return pool.collect(jobs, max_timeouts)
    for path in {path for path, _, _ in jobs.values()}:
        try:
            workers.imported(path)
        except ValueError as error:
            raise workers.refused(path, str(error)) from None
    return {key: workers.checked_result(workers.run_job(*job)) for key, job in jobs.items()}


def job_key(function: RewardFunction, row: dict, r: dict) -> tuple:
    """The key of one job. Equal completions of a row have equal keys, so they are scored once.

    id(row): begin() and measure() must get the same dict; a copy would be scored again. The number
    of tokens: one text may be tokenised in two ways, and some rewards count tokens."""
    return function.path, id(row), r["text"], len(r["completion_ids"])


def jobs_of(group: list[dict], row: dict, functions: list[RewardFunction], c: dict) -> dict:
    """{key: (function, text, arguments)} for the completions of one row."""
    # leaves out what no reward needs, because every job pickles its arguments
    shared = without_added(row)
    shared["max_completion_length"] = c["max_completion_length"]
    shared["soft_overlong_buffer"] = c["soft_overlong_buffer"]
    jobs = {}
    for r in group:
        arguments = shared | {"tokens": len(r["completion_ids"])}
        for function in functions:
            if function.applies_to(row):
                jobs[job_key(function, row, r)] = (function.path, r["text"], arguments)
    return jobs


def begin(group: list[dict], row: dict, functions: list[RewardFunction], c: dict) -> None:
    """Lets the workers start on one row's completions while others are still being sampled.
    measure() collects the values."""
    if pool := pool_of(c):
        pool.ask(jobs_of(group, row, functions, c))


def measure(
    rollouts: list[dict],
    rows: list[dict],
    functions: list[RewardFunction],
    c: dict,
    max_timeouts: float = math.inf,
) -> tuple[torch.Tensor, list[dict]]:
    """The values (p, G, F) float32, NaN where a function does not score a row, TIMEOUT or ERROR
    where it failed; and a record of each failure. Once more than `max_timeouts` jobs have timed
    out, what has no result yet is a TIMEOUT too."""
    groups = list(zip(rows, rollout.groups_of(rollouts, len(rows))))
    jobs = {}
    for row, group in groups:
        jobs |= jobs_of(group, row, functions, c)
    results = run_jobs(jobs, c, max_timeouts)
    G = len(groups[0][1]) if groups else 0
    # (p, G, F)
    values = torch.full((len(rows), G, len(functions)), math.nan)
    failed = []
    for i, (row, group) in enumerate(groups):
        for j, r in enumerate(group):
            for f, function in enumerate(functions):
                if not function.applies_to(row):
                    continue
                value = as_reward(results[job_key(function, row, r)])
                if isinstance(value, Failure):
                    failed.append(failure_record(value, function, row, r))
                    value = TIMEOUT if value.kind == "timeout" else ERROR
                values[i, j, f] = value
    return values, failed


def max_timeouts_of_step(rows: list[dict], functions: list[RewardFunction], c: dict) -> float:
    """For measure(): how many of a rank's jobs may time out before it is certain that
    check_failures() will stop the run, whatever the other ranks find."""
    if c["max_reward_failures"] == 1:  # nothing will stop it
        return math.inf
    completions = c["prompts_per_step"] * completions_per_prompt(c)  # of all ranks
    # the most jobs of one completion, which count as one failure
    jobs = max((sum(f.applies_to(row) for f in functions) for row in rows), default=0)
    return c["max_reward_failures"] * completions * jobs


def as_reward(result) -> float | Failure:
    """A job's result as a reward: a number or a Failure. A text or None becomes a Failure."""
    if isinstance(result, (int, float, Failure)):
        return result
    said = "None" if result is None else quoted(result, 40)
    return Failure("error", f"gave {said}; a reward must be a number")


def failure_record(failure: Failure, function: RewardFunction, row: dict, r: dict) -> dict:
    return {
        "reward": function.name,
        "id": row["id"],
        "kind": failure.kind,
        "reason": failure.reason,
        "completion": r["text"],
    }


def combine(values: torch.Tensor, functions: list[RewardFunction]) -> tuple[torch.Tensor, dict]:
    """Rewards (P, G): the weighted sum of values (P, G, F), where a failed function adds 0, rounded
    to six decimals. And metrics: "reward/<name>/mean", ".../timeouts" and ".../errors" of each
    function over the rows that it scores; "reward/failures", the number of completions on which a
    function failed."""
    # any(-1): two failed functions on one completion count once
    metrics = {"reward/failures": int(values.isinf().any(-1).sum())}
    for f, function in enumerate(functions):
        scores = values[..., f]  # (P, G)
        metrics |= {
            # nanmean skips the NaN of other tasks' rows; a failure counts as 0, as it does in the
            # reward
            f"reward/{function.name}/mean": scores.nan_to_num(math.nan, 0.0, 0.0).nanmean().item(),
            f"reward/{function.name}/timeouts": int((scores == TIMEOUT).sum()),
            f"reward/{function.name}/errors": int((scores == ERROR).sum()),
        }
    # In float32 .3 + .6 is not .9: rows that earn the same by different functions would make their
    # group an unequal one, which maxent and flow count. Six decimals are what float32 has near 1.
    weights = torch.tensor([function.weight for function in functions], dtype=torch.float64)  # (F,)
    rewards = (values.nan_to_num(0.0, 0.0, 0.0).double() * weights).sum(-1)  # (P, G)
    return rewards.round(decimals=6).float(), metrics


# --- failures


def failure_counts(metrics: dict) -> dict:
    """The counts of failures among the metrics of combine()."""
    ends = ("/failures", "/timeouts", "/errors")
    return {name: count for name, count in metrics.items() if name.endswith(ends)}


def check_failures(metrics: dict, completions: int, limit: float) -> None:
    """RewardsFailed if functions failed on more than the share `limit` of a step's completions.
    metrics: from combine()."""
    failures = metrics["reward/failures"]
    # counted over all ranks, so that all of them stop or none does
    if failures <= limit * completions:
        return
    kinds = []
    for name, count in failure_counts(metrics).items():
        if count and name != "reward/failures":
            kinds.append(f"{name} {count}")
    raise RewardsFailed(
        f"rewards failed on {failures} of a step's {completions} completions "
        f"(max_reward_failures={limit}): {', '.join(kinds)}; "
        "reward_failures.rank_*.jsonl in output_dir have reasons and texts"
    )


def check_answers(functions: list[RewardFunction], rows: list[dict], dataset: str, c: dict) -> None:
    """UserError if a function can't read the answers of its rows, as when another task's reward is
    used on one's own dataset. Tries one row for each combination of task and columns, at most
    CHECKED_ROWS for a function."""
    firsts = {}
    for row in rows:
        firsts.setdefault((row["task"], frozenset(row)), row)
    # "\\boxed{1}" too: the rewards of mathematics find no answer in a bare text
    examples = [{"text": text, "completion_ids": [0]} for text in ("1", "\\boxed{1}")]
    for function in functions:
        rows_of_function = [row for row in firsts.values() if function.applies_to(row)]
        for row in rows_of_function[:CHECKED_ROWS]:
            _, failed = measure(examples, [row], [function], c)
            if failed:
                raise UserError(
                    f"reward_funcs: {quoted(function.name)} can't score row {quoted(row['id'])} of "
                    f"dataset {dataset!r}, answer {quoted(row['answer'], 60)}, when it is tried "
                    f"on the completion {failed[0]['completion']!r} ({failed[0]['reason']}): "
                    f"{cure_for(function, row, failed[0])}"
                )


def cure_for(function: RewardFunction, row: dict, failure: dict) -> str:
    if failure["kind"] == "timeout":
        return "raise reward_timeout, or make it faster"
    if workers.lacked_memory(failure["reason"]):
        return "raise reward_memory_gib, or let it take less memory"
    if "a reward must be" in failure["reason"]:  # None, NaN
        return "let it return a number for every completion, 0 where it has nothing to say"
    if ":" not in function.name:
        return "name a reward that reads such answers, or another column as the answer"
    # a user's own function may expect other columns, as one written for TRL does
    columns = ", ".join(sorted(without_added(row)))
    more = '; the entry "more" of dataset adds columns'
    if isinstance(row["answer"], dict):
        more += f", and {quoted(', '.join(map(str, row['answer'])))} are inside of the answer"
    return (
        f"it is called with one completion, a text, as f(completion, answer, **row), and this row "
        f"has {quoted(columns)} (beside tokens, max_completion_length, soft_overlong_buffer){more}"
    )


def save_failures(folder, failed: list[dict], step: int, rank: int) -> str:
    """Appends at most SAVED_PER_STEP of a step's failures to reward_failures.rank_R.jsonl, with
    long texts cut. Returns one sentence about them."""
    path = Path(folder) / f"reward_failures.rank_{rank}.jsonl"
    where = f"the text is in {path}"
    try:
        with open(path, "a", encoding="utf-8") as file:
            for record in failed[:SAVED_PER_STEP]:
                text = record["completion"][:SAVED_CHARACTERS]
                file.write(json.dumps({"step": step, **record, "completion": text}) + "\n")
    except FileNotFoundError:  # output_dir is gone; all ranks find out at the step's end
        where = f"{path} could not be written"
    return (
        f"step {step}: {len(failed)} reward(s) failed on rank {rank}, the first: "
        f"{describe_failure(failed[0])}; {where}"
    )


def describe_failure(record: dict) -> str:
    return f"{quoted(record['reward'])} on row {quoted(record['id'])}: {record['reason']}"


# --- which completions are right, and whether they differ


def correct(values: torch.Tensor, functions: list[RewardFunction]) -> torch.Tensor:
    """(p, G) bool: whether the first of reward_funcs gave at least 1."""
    deciding = [f for f, function in enumerate(functions) if function.decides]
    scores = values[..., deciding]  # (p, G, 1); under "auto" (p, G, number of tasks)
    # isfinite: ERROR is +inf, which is at least 1 too
    return ((scores >= 1) & scores.isfinite()).any(-1)


def modes_of(rollouts: list[dict], rows: list[dict], right: torch.Tensor, c: dict) -> list[list]:
    """For each row a list of G modes. The mode of a correct completion is a text, equal for all
    completions that the task considers the same answer. It is None for a wrong completion, for a
    task without modes and, with a warning, where mode() fails. right: (p, G) bool."""
    jobs = {}
    asked = []  # of each right completion: (key of its job, index of its row, index in the group)
    modes = [[None] * right.shape[1] for _ in rows]
    for i, (row, group) in enumerate(zip(rows, rollout.groups_of(rollouts, len(rows)))):
        task = tasks.with_modes(row["task"])
        if task is None:
            continue
        for j, r in enumerate(group):
            if right[i, j]:
                key = ("mode", id(row), r["text"])
                jobs[key] = (f"{task.__name__}:mode", r["text"], {"answer": row["answer"]})
                asked.append((key, i, j))
    results = run_jobs(jobs, c)
    unnamed = []  # a clause for each right completion without a mode
    for key, i, j in asked:
        mode = results[key]
        if mode is None or isinstance(mode, Failure):
            reason = mode.reason if mode else "gave None, as for a wrong completion"
            unnamed.append(
                f"{jobs[key][0]} on {quoted(key[2], 60)} of row {quoted(rows[i]['id'])} {reason}"
            )
        else:
            modes[i][j] = str(mode)  # a number is a mode too
    if unnamed:
        print_above_bar(
            f"warning: mode() can't name the answers of {len(unnamed)} of {len(asked)} right "
            f"completions, which do not count as different ones: {unnamed[0]}"
        )
    return modes


def correct_modes(
    rollouts: list[dict], rows: list[dict], right: torch.Tensor, c: dict
) -> list[tuple[int, set | None]]:
    """For each row the number of correct completions and the set of their modes, or None instead of
    the set if the task has no modes. right: (p, G) bool."""
    counts = []
    for i, modes in enumerate(modes_of(rollouts, rows, right, c)):
        has_modes = tasks.with_modes(rows[i]["task"]) is not None
        distinct = {mode for mode in modes if mode is not None}
        counts.append((int(right[i].sum()), distinct if has_modes else None))
    return counts


def answer_clusters(
    rollouts: list[dict], rows: list[dict], right: torch.Tensor, c: dict
) -> torch.Tensor:
    """(p, G) cluster numbers: completions of a group that gave the same answer share one. Correct
    completions are compared by their mode (without modes they all share one), wrong ones by the
    text of their answer. A completion without any answer is alone in its cluster. right: (p, G)
    bool."""
    clusters = torch.zeros(right.shape, dtype=torch.int64)
    all_modes = modes_of(rollouts, rows, right, c)
    for i, (row, group) in enumerate(zip(rows, rollout.groups_of(rollouts, len(rows)))):
        numbers = {}
        for j, r in enumerate(group):
            if right[i, j]:
                answer = (True, all_modes[i][j])
            else:
                # j if there is no answer: a number, which equals no text
                answer = (False, wrong_answer(r["text"], row["task"]) or j)
            clusters[i, j] = numbers.setdefault(answer, len(numbers))
    return clusters


def wrong_answer(text: str, task: str) -> str:
    r"""The answer of a wrong completion: the content of its \boxed{} or <answer>. Without either it
    is the whole text, or "" in mathematics, whose rewards read only those two."""
    answer = mathematics.stated_answer(text)
    if not answer and task not in mathematics.NAMES:
        answer = last_answer(text)
    return (answer or "").strip()[: mathematics.MAX_CHARACTERS]
