"""Which prompts a step takes: a pure function of (seed, step); optionally with an easy pool and a
replay of promising prompts, which are answered anew.

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
    """The P rows of a step. inputs: preflight.Inputs; replay: a Replay or None. attempt 1, 2, ...
    gives other rows, which replace those of groups that taught nothing."""
    P = c["prompts_per_step"]  # over all ranks
    sources = inputs.sources
    weights = inputs.weights
    if attempt:  # a stream of its own; no easy pool, no replay: they would often give the same rows
        return prompts_for_step(sources, weights, step, P, f"{c['seed']}/again/{attempt}")
    rows = prompts_for_step(sources, weights, step, P, c["seed"])
    share = scheduled(entries(c, "easy_dataset")["share"], step)
    rows = with_easy_prompts(rows, inputs.easy, step, share, c["seed"])
    if replay is not None:
        rows = replay.mix(rows, entries(c, "replay")["fraction"])
    return rows


# --- the stream


def prompts_for_step(sources: list[list], weights: list, step: int, count: int, seed) -> list[dict]:
    """Prompts step * count to (step + 1) * count - 1 of the stream."""
    first = step * count  # from the step alone, so a resumed run needs no cursor
    return [pick(sources, weights, i, seed) for i in range(first, first + count)]


def pick(sources: list[list], weights: list, i: int, seed) -> dict:
    """The i-th prompt of the stream. Each source is gone through in shuffled passes over all of
    its rows."""
    if len(sources) == 1:  # seeded without the source, so that a mixture of one is the same run
        return row_of_passes(sources[0], i, seed)
    block, slot = divmod(i, BLOCK)
    chosen, earlier, quota = block_of_sources(tuple(weights), seed, block)
    source = chosen[slot]
    place = block * quota[source] + earlier[slot]  # in the source's own stream
    return row_of_passes(sources[source], place, f"{seed}/{source}")


def row_of_passes(rows: list, i: int, seed) -> dict:
    """The i-th row of an endless series of shuffled passes over the rows."""
    epoch, place = divmod(i, len(rows))
    return rows[epoch_order(len(rows), seed, epoch)[place]]


@lru_cache(maxsize=64)
def epoch_order(count: int, seed, epoch: int) -> list[int]:
    # a generator of its own, so that no other draw shifts this one
    return random.Random(f"order/{seed}/{epoch}").sample(range(count), count)


@lru_cache(maxsize=4)
def block_of_sources(weights: tuple, seed, block: int) -> tuple[list[int], list[int], list[int]]:
    """How a mixture chooses the BLOCK prompts from block * BLOCK on: (the source of each prompt,
    how often that source came earlier in this block, how often each source comes in a block)."""
    quota = quotas(weights)
    chosen = []  # the source of each of BLOCK prompts
    for source, count in enumerate(quota):
        chosen += [source] * count
    random.Random(f"mixture/{seed}/{block}").shuffle(chosen)
    counts = [0] * len(weights)  # of each source, so far
    earlier = []
    for source in chosen:
        earlier.append(counts[source])
        counts[source] += 1
    return chosen, earlier, quota


def quotas(weights: tuple) -> list[int]:
    """How many of BLOCK prompts come from each source: its share by weight, rounded. The sources
    with the largest remainders are rounded up, so that the sum is BLOCK."""
    exact = [BLOCK * weight / sum(weights) for weight in weights]
    quota = [int(share) for share in exact]
    by_remainder = sorted(range(len(weights)), key=lambda s: quota[s] - exact[s])
    for source in by_remainder[: BLOCK - sum(quota)]:
        quota[source] += 1
    return quota


# --- the easy pool


def with_easy_prompts(rows: list[dict], easy: list[dict], step: int, share: float, seed):
    """The step's rows, each replaced with probability `share` by a random one of `easy`. With a
    smaller share fewer rows are replaced, but by the same easy ones."""
    if not easy:
        return rows
    rng = random.Random(f"easy/{seed}/{step}")
    mixed = []
    for row in rows:
        luck = rng.random()
        other = easy[rng.randrange(len(easy))]  # drawn even if unused, so that share shifts no draw
        mixed.append(other if luck < share else row)
    return mixed


# --- prompts worth another try


class Replay:
    """Remembers how much each prompt has taught: the gap max r - mean r of its group, which is 0
    if all its rewards were equal. A step takes some of its prompts from the most promising ones.

    state: {"total": visits of all prompts, "prompts": {key: (visits, mean gap, sum of squared
    deviations)}}. It holds only numbers, so that a checkpoint stays small; the rows come from the
    dataset. It is replaced, never changed in place."""

    def __init__(self, rows: list[dict], size: int, ucb: float, state: dict):
        """size: how many prompts are remembered; ucb: C in score(). Prompts of `state` that are no
        longer among the rows are forgotten."""
        self.size = size
        self.ucb = ucb
        self.rows = {}
        for row in rows:
            self.rows.setdefault(prompt_key(row), row)  # of rows with the same prompt, the first
        kept = {}
        for key, numbers in state.get("prompts", {}).items():
            if key in self.rows:
                kept[key] = tuple(numbers)  # JSON has turned tuples into lists
        self.state = {"total": state.get("total", 0), "prompts": kept}

    def score(self, key: str) -> float:
        """Mean gap + C * sqrt(ln total / visits). The second term brings rarely tried prompts back
        (UCB1, Auer et al. 2002)."""
        visits, mean, _ = self.state["prompts"][key]
        return mean + self.ucb * math.sqrt(math.log(self.state["total"]) / visits)

    def mix(self, batch: list[dict], fraction: float) -> list[dict]:
        """A copy of the step's rows in which the last round(fraction * P) are replaced by the
        remembered prompts of highest score that are not in the step yet, as far as there are any.
        With a fraction between 0 and 1 at least one row is replaced and at least one stays, so that
        new prompts always come in."""
        wanted = round(fraction * len(batch))
        if 0 < fraction < 1:
            wanted = min(max(1, wanted), len(batch) - 1)
        # includes the rows to be replaced: some stay if too few prompts are remembered
        present = {prompt_key(row) for row in batch}
        candidates = [key for key in self.state["prompts"] if key not in present]
        # ties are broken by key, so that the order is the same after a restart
        candidates.sort(key=lambda key: (-self.score(key), key))
        remembered = [self.rows[key] for key in candidates[:wanted]]
        first = len(batch) - wanted
        return batch[:first] + remembered + batch[first + len(remembered) :]

    def update(self, batch: list[dict], rewards) -> None:
        """Takes in the rewards (P, G) of these rows, then forgets the least promising prompts over
        `size`."""
        prompts = dict(self.state["prompts"])  # a copy: a checkpoint may hold the old dict
        gaps = rewards.amax(1) - rewards.mean(1)  # (P,)
        for row, gap in zip(batch, gaps.tolist()):
            key = prompt_key(row)
            if key in self.rows:  # prompts of the easy pool are not remembered
                prompts[key] = visited(prompts.get(key, (0, 0.0, 0.0)), gap)
        by_promise = sorted(prompts, key=lambda key: (promise(prompts[key]), key))
        for key in by_promise[: max(0, len(prompts) - self.size)]:
            del prompts[key]
        self.state = {"total": self.state["total"] + len(batch), "prompts": prompts}


def visited(numbers: tuple, gap: float) -> tuple:
    """numbers = (visits, mean gap, sum of squared deviations) after one more visit with this gap,
    by Welford's rule."""
    visits, mean, squares = numbers
    change = gap - mean
    mean += change / (visits + 1)
    return visits + 1, mean, squares + change * (gap - mean)


def promise(numbers: tuple) -> float:
    """Mean gap + standard deviation: lowest for a prompt that has taught nothing every time."""
    visits, mean, squares = numbers
    return mean + math.sqrt(squares / visits)
