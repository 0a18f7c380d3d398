"""Which prompts a step takes: a pure function of (seed, step), so there is no cursor to save, and
any number of ranks sees the same prompts. Two options: some prompts from an easy pool, and a replay
of prompts that have taught much, which are answered anew; checkpoints save the replay's state.

    rows = step_rows(inputs, replay, step, config)      # P rows, the same on every rank

A pool is the list of rows of a source; a mixture has several pools, each with a weight.
"""

import math
import random
from functools import lru_cache

from checks import entries
from common import scheduled
from data import BLOCK
from loss import equal_groups
from prompts import prompt_key

# A prompt's mean gap (see Replay): a plain mean over this many visits, then a moving average (EMA)
# in which the newest visit weighs 1 / MEAN_VISITS.
MEAN_VISITS = 4

# --- a step


def step_rows(inputs, replay, step: int, c: dict, attempt: int = 0) -> list[dict]:
    """The P rows of a step. inputs: preflight.Inputs; replay: a Replay or None. attempt 1, 2, ...
    gives other rows, to replace those of groups that taught nothing."""
    P = c["prompts_per_step"]  # over all ranks
    pools = inputs.pools
    weights = inputs.pool_weights
    if attempt:  # a stream of its own; no easy pool, no replay: they would often give the same rows
        return prompts_for_step(pools, weights, step, P, f"{c['seed']}/again/{attempt}")
    rows = prompts_for_step(pools, weights, step, P, c["seed"])
    share = scheduled(entries(c, "easy_dataset")["share"], step)
    rows = with_easy_prompts(rows, inputs.easy, step, share, c["seed"])
    if replay is not None:
        rows = replay.mix(rows, entries(c, "replay")["fraction"])
    return rows


# --- the stream


def prompts_for_step(pools: list[list], weights: list, step: int, count: int, seed) -> list[dict]:
    """Prompts step * count to (step + 1) * count - 1 of the stream."""
    first = step * count  # from the step alone, so a resumed run needs no cursor
    return [pick(pools, weights, i, seed) for i in range(first, first + count)]


def pick(pools: list[list], weights: list, i: int, seed) -> dict:
    """The i-th prompt of the stream. Each pool is read in shuffled passes over all of its rows."""
    # no pool number in the seed, so that a mixture of one source is the same run as that source
    if len(pools) == 1:
        return row_of_passes(pools[0], i, seed)
    # in each block of BLOCK prompts, every pool has exactly its share, in random order
    block, slot = divmod(i, BLOCK)
    chosen, earlier, quota = block_of_pools(tuple(weights), seed, block)
    pool = chosen[slot]  # a number
    chosen_before = block * quota[pool] + earlier[slot]  # how often this pool was
    return row_of_passes(pools[pool], chosen_before, f"{seed}/{pool}")


def row_of_passes(rows: list, i: int, seed) -> dict:
    """The i-th row of an endless series of shuffled passes over the rows."""
    epoch, position = divmod(i, len(rows))
    return rows[epoch_order(len(rows), seed, epoch)[position]]


@lru_cache(maxsize=64)
def epoch_order(count: int, seed, epoch: int) -> list[int]:
    """The row numbers 0..count-1 in the order of one pass."""
    # a generator of its own, so that no other draw shifts this one
    return random.Random(f"order/{seed}/{epoch}").sample(range(count), count)


@lru_cache(maxsize=4)
def block_of_pools(weights: tuple, seed, block: int) -> tuple[list[int], list[int], list[int]]:
    """How a mixture chooses the BLOCK prompts from block * BLOCK on: (the pool of each prompt, how
    often that pool came before it in this block, how often each pool comes in a block)."""
    quota = quotas(weights)
    chosen = []  # the pool of each of BLOCK prompts
    for pool, count in enumerate(quota):
        chosen += [pool] * count
    random.Random(f"mixture/{seed}/{block}").shuffle(chosen)
    counts = [0] * len(weights)  # of each pool, so far
    earlier = []
    for pool in chosen:
        earlier.append(counts[pool])
        counts[pool] += 1
    return chosen, earlier, quota


def quotas(weights: tuple) -> list[int]:
    """How many of BLOCK prompts come from each pool: its share by weight, rounded. The pools with
    the largest remainders are rounded up, so that the sum is BLOCK."""
    exact = [BLOCK * weight / sum(weights) for weight in weights]
    quota = [int(share) for share in exact]
    by_remainder = sorted(range(len(weights)), key=lambda pool: quota[pool] - exact[pool])
    for pool in by_remainder[: BLOCK - sum(quota)]:
        quota[pool] += 1
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


# --- replay: prompts worth another try


class Replay:
    """Remembers how much each prompt has taught: the gap max r - mean r of its group, which is 0
    if all its rewards were equal. A step takes some prompts from here, highest ucb_score() first.

    state: {"total": visits of all prompts, "prompts": {key: (visits, mean gap, variance)}}. It
    holds only numbers, so that a checkpoint stays small; the rows come from the dataset. It is
    replaced, never changed in place."""

    def __init__(self, rows: list[dict], size: int, ucb: float, state: dict):
        """size: how many prompts are remembered; ucb: C in ucb_score(). Prompts of `state` that are
        no longer among the rows are forgotten."""
        self.size = size
        self.ucb = ucb
        self.rows = {}  # {prompt_key: row}
        for row in rows:
            self.rows.setdefault(prompt_key(row), row)  # the first of rows with the same prompt
        kept = {}
        for key, stats in state.get("prompts", {}).items():
            if key in self.rows:
                kept[key] = tuple(stats)  # JSON has turned tuples into lists
        self.state = {"total": state.get("total", 0), "prompts": kept}

    def ucb_score(self, key: str) -> float:
        """Mean gap + C * sqrt(ln total / visits). The second term brings rarely tried prompts back
        (UCB1, Auer et al. 2002)."""
        visits, mean, _ = self.state["prompts"][key]
        return mean + self.ucb * math.sqrt(math.log(self.state["total"]) / visits)

    def mix(self, rows: list[dict], fraction: float) -> list[dict]:
        """A copy of the step's rows in which the last round(fraction * P) are replaced by the
        remembered prompts of highest ucb_score() that are not in the step yet, or by as many as
        there are. With a fraction between 0 and 1 at least one row stays, so that new prompts
        always come in, and if there are two or more at least one is replaced."""
        wanted = round(fraction * len(rows))
        if 0 < fraction < 1:
            wanted = min(max(1, wanted), len(rows) - 1)
        # includes the rows to be replaced: some stay if too few prompts are remembered
        present = {prompt_key(row) for row in rows}
        candidates = [key for key in self.state["prompts"] if key not in present]
        # ties are broken by key, so that the order is the same after a restart
        candidates.sort(key=lambda key: (-self.ucb_score(key), key))
        remembered = [self.rows[key] for key in candidates[:wanted]]
        first = len(rows) - wanted
        return rows[:first] + remembered + rows[first + len(remembered) :]

    def update(self, rows: list[dict], rewards) -> None:
        """Takes in the rewards (rows, G) of these rows. If there are then more than `size` prompts,
        forgets those of lowest keep_value()."""
        prompts = dict(self.state["prompts"])  # a copy: a checkpoint may hold the old dict
        gaps = rewards.amax(1) - rewards.mean(1)  # (rows,)
        # exactly 0, not the rounding of the mean, if all rewards are equal
        gaps = gaps.masked_fill(equal_groups(rewards), 0.0)
        for row, gap in zip(rows, gaps.tolist()):
            key = prompt_key(row)
            if key in self.rows:  # prompts of the easy pool are not remembered
                prompts[key] = visited_again(prompts.get(key, (0, 0.0, 0.0)), gap)
        by_keep_value = sorted(prompts, key=lambda key: (keep_value(prompts[key]), key))
        for key in by_keep_value[: max(0, len(prompts) - self.size)]:
            del prompts[key]
        self.state = {"total": self.state["total"] + len(rows), "prompts": prompts}


def visited_again(stats: tuple, gap: float) -> tuple:
    """stats = (visits, mean gap, variance of the gaps) after one more visit with this gap. Visits
    before the last MEAN_VISITS fade, because the policy changes: prompts that it has learnt
    meanwhile would otherwise stay attractive for ever."""
    visits, mean, variance = stats
    share = 1 / min(visits + 1, MEAN_VISITS)
    change = gap - mean
    mean += share * change
    return visits + 1, mean, (1 - share) * (variance + share * change**2)


def keep_value(stats: tuple) -> float:
    """Mean gap + standard deviation: lowest for a prompt that has taught nothing every time."""
    _, mean, variance = stats
    return mean + math.sqrt(variance)
