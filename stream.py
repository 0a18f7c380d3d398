"""Which prompts a step takes: a pure function of (seed, step), with an easy pool and a replay buffer
if wanted.

    rows = step_rows(inputs, replay, step, config)      # P rows, the same on every rank

There is no cursor to save, and any number of ranks sees the same prompts. A source is a list of
rows; a mixture has several, each with a weight.
"""

import math
import random
from functools import lru_cache

from checks import entries
from common import scheduled
from data import BLOCK
from prompts import prompt_key

# --- a step


def step_rows(inputs, replay, step: int, c: dict, attempt: int = 0) -> list[dict]:
    """The P rows of a step. inputs: preflight.Inputs; replay: a Replay or None; attempt 1, 2, ...:
    other rows, to replace those of groups that taught nothing."""
    P = c["prompts_per_step"]
    sources = inputs.sources
    weights = inputs.weights
    if attempt:
        return prompts_for_step(sources, weights, step, P, f"{c['seed']}/again/{attempt}")
    rows = prompts_for_step(sources, weights, step, P, c["seed"])
    share = scheduled(entries(c, "easy_dataset")["share"], step)
    rows = with_easy_prompts(rows, inputs.easy, step, share, c["seed"])
    if replay is not None:
        rows = replay.mix(rows, entries(c, "replay")["fraction"])
    return rows


# --- the stream


def prompts_for_step(sources: list[list], weights: list, step: int, count: int, seed) -> list[dict]:
    """Prompts step * count, step * count + 1, ... of the stream."""
    first = step * count
    return [pick(sources, weights, i, seed) for i in range(first, first + count)]


def pick(sources: list[list], weights: list, i: int, seed) -> dict:
    """The i-th prompt of the stream: a shuffled pass over all rows of its source, then the next."""
    if len(sources) == 1:
        return row_of_passes(sources[0], i, seed)
    block, slot = divmod(i, BLOCK)
    chosen, earlier, quota = block_of_sources(tuple(weights), seed, block)
    source = chosen[slot]
    place = block * quota[source] + earlier[slot]  # in the source's own stream
    return row_of_passes(sources[source], place, f"{seed}/{source}")


def row_of_passes(rows: list, i: int, seed) -> dict:
    """The i-th of shuffled passes over the rows."""
    epoch, place = divmod(i, len(rows))
    return rows[epoch_order(len(rows), seed, epoch)[place]]


@lru_cache(maxsize=64)
def epoch_order(count: int, seed, epoch: int) -> list[int]:
    return random.Random(f"order/{seed}/{epoch}").sample(range(count), count)


@lru_cache(maxsize=4)
def block_of_sources(weights: tuple, seed, block: int) -> tuple[list[int], list[int], list[int]]:
    """A mixture's choice for the prompts from block * BLOCK on: (the source of each, how often that
    source has come earlier in the block, how often each source comes in every block)."""
    quota = quotas(weights)
    chosen = []
    for source, count in enumerate(quota):
        chosen += [source] * count
    random.Random(f"mixture/{seed}/{block}").shuffle(chosen)
    counts = [0] * len(weights)
    earlier = []
    for source in chosen:
        earlier.append(counts[source])
        counts[source] += 1
    return chosen, earlier, quota


def quotas(weights: tuple) -> list[int]:
    """How many of BLOCK prompts come from each source: its share, to the row. The largest remainders
    are rounded up."""
    exact = [BLOCK * weight / sum(weights) for weight in weights]
    quota = [int(share) for share in exact]
    by_remainder = sorted(range(len(weights)), key=lambda s: quota[s] - exact[s])
    for source in by_remainder[: BLOCK - sum(quota)]:
        quota[source] += 1
    return quota


# --- the easy pool


def with_easy_prompts(rows: list[dict], easy: list[dict], step: int, share: float, seed):
    """The step's rows, each replaced by a random one of `easy` with probability `share`. A smaller
    share keeps some of the easy prompts of a larger one, and exchanges none."""
    if not easy:
        return rows
    rng = random.Random(f"easy/{seed}/{step}")
    mixed = []
    for row in rows:
        luck = rng.random()
        other = easy[rng.randrange(len(easy))]  # drawn in any case, see above
        mixed.append(other if luck < share else row)
    return mixed


# --- prompts worth another try


class Replay:
    """Remembers what each prompt has taught: the gap max r - mean r of its group, which is 0 where
    all answers were alike. A step takes some of its prompts from the most promising ones.

    state: {"total": visits of all prompts, "prompts": {key: [visits, mean gap, sum of squared
    deviations]}}, numbers only, for a checkpoint; the rows come from the dataset. It is replaced,
    never changed."""

    def __init__(self, rows: list[dict], size: int, ucb: float, state: dict):
        """size: prompts remembered; ucb: C of `score`. A prompt of `state` that is not among the
        rows any more is forgotten."""
        self.size = size
        self.ucb = ucb
        self.rows = {}
        for row in rows:
            self.rows.setdefault(prompt_key(row), row)
        kept = {}
        for key, numbers in state.get("prompts", {}).items():
            if key in self.rows:
                kept[key] = tuple(numbers)
        self.state = {"total": state.get("total", 0), "prompts": kept}

    def score(self, key: str) -> float:
        """Mean gap + C * sqrt(ln total / visits): what is hardly tried comes back too (UCB1, Auer
        et al. 2002)."""
        visits, mean, _ = self.state["prompts"][key]
        return mean + self.ucb * math.sqrt(math.log(self.state["total"]) / visits)

    def mix(self, batch: list[dict], fraction: float) -> list[dict]:
        """A copy of the step's rows whose last round(fraction * P) are the highest scores of the
        buffer, as far as there are any that the step does not have already. With a fraction between
        0 and 1 at least one is replaced, and not all: the same again and again would let nothing
        new in."""
        wanted = round(fraction * len(batch))
        if 0 < fraction < 1:
            wanted = min(max(1, wanted), len(batch) - 1)
        # also those that give way: they may stay, if too few are remembered
        present = {prompt_key(row) for row in batch}
        candidates = [key for key in self.state["prompts"] if key not in present]
        candidates.sort(key=lambda key: (-self.score(key), key))
        remembered = [self.rows[key] for key in candidates[:wanted]]
        first = len(batch) - wanted
        return batch[:first] + remembered + batch[first + len(remembered) :]

    def update(self, batch: list[dict], rewards) -> None:
        """Takes in rewards (P, G) of the step's rows; then the least promising go."""
        prompts = dict(self.state["prompts"])
        gaps = rewards.amax(1) - rewards.mean(1)  # (P,)
        for row, gap in zip(batch, gaps.tolist()):
            key = prompt_key(row)
            if key in self.rows:  # not one of the easy pool
                prompts[key] = visited(prompts.get(key, (0, 0.0, 0.0)), gap)
        by_promise = sorted(prompts, key=lambda key: (promise(prompts[key]), key))
        for key in by_promise[: max(0, len(prompts) - self.size)]:
            del prompts[key]
        self.state = {"total": self.state["total"] + len(batch), "prompts": prompts}


def visited(numbers: tuple, gap: float) -> tuple:
    """(visits, mean gap, sum of squared deviations) after one more visit, by Welford's rule."""
    visits, mean, squares = numbers
    change = gap - mean
    mean += change / (visits + 1)
    return visits + 1, mean, squares + change * (gap - mean)


def promise(numbers: tuple) -> float:
    """Mean gap plus its standard deviation: lowest for a prompt that has reliably taught nothing."""
    visits, mean, squares = numbers
    return mean + math.sqrt(squares / visits)
