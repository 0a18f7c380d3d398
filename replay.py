"""A bounded memory of prompts worth another try, and how informative each has been.

    buffer = Replay(rows, size, ucb, state)              # state: {} or what .state was at a checkpoint
    batch = buffer.mix(batch, fraction)                  # some of the step's prompts replaced by remembered ones
    buffer.update(batch, rewards)                        # after scoring, with the whole step's rewards (P, G)

What a group can teach is the gap between its best and its mean reward: 0 where all answers are right or all are wrong. A prompt's score is
mean gap + C * sqrt(ln n_total / n_prompt), the upper confidence bound of Auer et al. 2002 (UCB1): prompts that have taught much, and now
and then one that was hardly tried. Every rank keeps the same buffer from the same rewards, so nothing is exchanged.
"""

import hashlib
import math


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
