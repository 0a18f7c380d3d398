"""Which prompts a step takes: a pure function of (seed, step), with an easy pool and a replay buffer if wanted.

There is no cursor to save, and another number of ranks sees the same prompts.
"""

import hashlib
import math
import random
from functools import lru_cache

from checks import entries
from common import scheduled
from data import BLOCK
from preflight import Inputs

# --- the stream


@lru_cache(maxsize=64)
def epoch_order(count: int, seed, epoch: int) -> list[int]:
    return random.Random(f"order/{seed}/{epoch}").sample(range(count), count)


@lru_cache(maxsize=4)
def block_of_sources(weights: tuple, seed, block: int) -> tuple[list[int], list[int], list[int]]:
    """A mixture's choice for prompts block * BLOCK and on: the source of each, how often that source has come before within the block, and
    how often each source comes in every block: its share of the weights, to the row."""
    exact = [BLOCK * w / sum(weights) for w in weights]
    quota = [int(x) for x in exact]
    for s in sorted(range(len(weights)), key=lambda s: quota[s] - exact[s])[: BLOCK - sum(quota)]:
        quota[s] += 1
    chosen = [s for s, n in enumerate(quota) for _ in range(n)]
    random.Random(f"mixture/{seed}/{block}").shuffle(chosen)
    counts = [0] * len(weights)
    before = []
    for s in chosen:
        before.append(counts[s])
        counts[s] += 1
    return chosen, before, quota


def pick(rows: list, i: int, seed, weights) -> dict:
    """The i-th prompt of the training stream: a shuffled pass over all rows of its source, then the next."""
    if weights is not None and len(weights) > 1:
        block, slot = divmod(i, BLOCK)
        chosen, before, quota = block_of_sources(tuple(weights), seed, block)
        source = chosen[slot]
        rows, i, seed = rows[source], block * quota[source] + before[slot], f"{seed}/{source}"
    elif weights is not None:
        rows = rows[0]
    return rows[epoch_order(len(rows), seed, i // len(rows))[i % len(rows)]]


def prompts_for_step(
    rows: list, step: int, prompts_per_step: int, seed, rank: int, world: int, weights=None
) -> list[dict]:
    """This rank's share of the step's prompts, prompts_per_step / world rows. rows: a list of rows, or with `weights` a list of such lists,
    one for each source of a mixture."""
    share = prompts_per_step // world
    first = step * prompts_per_step + rank * share
    return [pick(rows, i, seed, weights) for i in range(first, first + share)]


def with_easy_prompts(
    batch: list[dict], easy: list[dict], step: int, probability: float, seed
) -> list[dict]:
    """The whole step's rows, each replaced by a random one of `easy` with that probability; a pure function, like the stream itself."""
    rng = random.Random(f"easy/{seed}/{step}")
    draws = [(rng.random(), rng.randrange(len(easy))) for _ in batch] if easy else []
    return (
        [easy[i] if x < probability else row for row, (x, i) in zip(batch, draws)]
        if easy
        else batch
    )


# --- prompts worth another try


def prompt_key(row: dict) -> str:
    """The same for prompts that differ in spaces and case only."""
    return hashlib.sha256(
        " ".join(row["prompt"].lower().split()).encode("utf-8", "surrogatepass")
    ).hexdigest()[:16]


class Replay:
    def __init__(self, rows: list[dict], size: int, ucb: float, state: dict):
        """`state` holds numbers only, {"total": visits of all prompts, "prompts": {key: [visits, mean gap, sum of squared deviations]}};
        the rows come from the dataset. A prompt that is no longer in it is forgotten."""
        self.size, self.ucb, self.rows = size, ucb, {}
        for row in rows:
            self.rows.setdefault(prompt_key(row), row)
        kept = {
            key: tuple(value) for key, value in state.get("prompts", {}).items() if key in self.rows
        }
        self.state = {"total": state.get("total", 0), "prompts": kept}

    def score(self, key: str) -> float:
        visits, mean, _ = self.state["prompts"][key]
        return mean + self.ucb * math.sqrt(math.log(self.state["total"]) / visits)

    def promise(self, key: str) -> float:
        """Mean gap plus its standard deviation: lowest for a prompt that has reliably taught nothing."""
        visits, mean, squares = self.state["prompts"][key]
        return mean + math.sqrt(squares / visits)

    def mix(self, batch: list[dict], fraction: float) -> list[dict]:
        """A copy of the whole step's rows whose last round(fraction * P), but with a fraction between 0 and 1 at least one and not all, are the
        highest scores of the buffer, as far as there are any that the step does not have already."""
        wanted = round(fraction * len(batch))
        if 0 < fraction < 1:
            wanted = min(
                max(1, wanted), len(batch) - 1
            )  # all of them again and again would let nothing new in
        fresh = batch[: len(batch) - wanted]
        there = {
            prompt_key(row) for row in batch
        }  # also those that give way: they may stay if too few are remembered
        best = sorted(
            (key for key in self.state["prompts"] if key not in there),
            key=lambda key: (-self.score(key), key),
        )[:wanted]
        return fresh + [self.rows[key] for key in best] + batch[len(fresh) + len(best) :]

    def update(self, batch: list[dict], rewards) -> None:
        """Takes in rewards (P, G) of the whole step's rows. Welford's running mean and variance; then the least promising go."""
        prompts = dict(self.state["prompts"])
        gaps = (rewards.amax(1) - rewards.mean(1)).tolist()
        for row, gap in zip(batch, gaps):
            key = prompt_key(row)
            if key in self.rows:  # not one of the easy pool
                visits, mean, squares = prompts.get(key, (0, 0.0, 0.0))
                change = gap - mean
                mean += change / (visits + 1)
                prompts[key] = (visits + 1, mean, squares + change * (gap - mean))
        self.state = {"total": self.state["total"] + len(batch), "prompts": prompts}
        for key in sorted(prompts, key=lambda key: (self.promise(key), key))[
            : max(0, len(prompts) - self.size)
        ]:
            del prompts[key]


# --- a step


def step_rows(inputs: Inputs, buffer, step: int, c: dict, attempt: int = 0) -> list[dict]:
    """The P rows of a step, the same list on every rank; attempt 1, 2, ...: other rows, to replace groups that taught nothing."""
    seed = f"{c['seed']}/again/{attempt}" if attempt else c["seed"]
    rows = prompts_for_step(inputs.sources, step, c["prompts_per_step"], seed, 0, 1, inputs.weights)
    if attempt:
        return rows
    rows = with_easy_prompts(
        rows, inputs.easy, step, scheduled(entries(c, "easy_dataset")["share"], step), c["seed"]
    )
    return rows if buffer is None else buffer.mix(rows, entries(c, "replay")["fraction"])
