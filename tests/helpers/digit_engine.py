"""A rollout engine without a model, a reward that its completions can earn, rows to ask of it."""

import random

import prompts
import scoring
import sft
from common import load_config

TOKENIZER = sft.tiny_tokenizer()
FAKE_REWARD = scoring.RewardFunction("fake", 1.0, None, True, f"{__name__}:fake_reward")


def completion_of(prompt_ids: list[int], text: str) -> dict:
    tokens = TOKENIZER(text, add_special_tokens=False)["input_ids"]
    return {
        "prompt_ids": prompt_ids,
        "completion_ids": [*tokens, 0],
        "logprobs": [-1.0] * 5,
        "finish_reason": "stop",
    }


def request_of(prompts_ids, n: int, sampling) -> dict:
    """What an engine was asked for."""
    return {"prompts_ids": prompts_ids, "n": n, **sampling._asdict()}


class FakeEngine:
    """No model: completion j of a prompt is the digit j and three more that the seed decides; the
    last prompt is finished first. A completion asked alone, as InfoSeed does, begins with 9."""

    def __init__(self):
        self.calls = []
        self.begun = []
        self.naps = 0

    def generate(self, prompts_ids, n, sampling, group_done=None):
        self.calls.append(request_of(prompts_ids, n, sampling))
        groups = []
        for ids, seed in zip(prompts_ids, sampling.seeds, strict=True):
            rng = random.Random(seed)
            group = []
            for j in range(n):
                text = str(9 if n == 1 else j) + "".join(rng.choices("0123456789", k=3))
                group.append(completion_of(ids, text))
            groups.append(group)
        for i in reversed(range(len(groups)) if group_done else range(0)):
            group_done(i, groups[i])
        return [r for group in groups for r in group]

    def begin(self, prompts_ids, n, sampling, group_done):
        self.begun.append(request_of(prompts_ids, n, sampling))

    def sleep(self):
        self.naps += 1

    def take_metrics(self):
        return {}


def fake_reward(completion: str, answer, **row) -> float:
    """By the row's answer: "same" is 1 for all of a group's ordinary completions, "differ" 0 and 1
    in turns, "luck" either; "broken" fails."""
    first = int(completion[0])
    last = int(completion[-1])
    if answer == "broken":
        raise RuntimeError("no idea")
    worth = {"same": first < 9, "differ": first % 2, "luck": last < 2}
    return float(worth[answer])


def rows_of(*answers, name: str = "q") -> list[dict]:
    rows = []
    for i, answer in enumerate(answers):
        rows.append({"id": f"{name}{i}", "task": "", "prompt": f"{name} {i}", "answer": answer})
    return prompts.encode_prompts(rows, TOKENIZER, load_config([]))
