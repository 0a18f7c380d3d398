"""What an objective does, on the smallest policies there are, in half a minute and without a model.

    python -m compare.toy
    python -m compare.toy --picture=runs/toy.png
    python -m compare.toy --arms=mine.py --max_completion_length=32

Targets and losses are the trainer's own. A policy is a matrix: features of a prompt times weights
gives a logit for each of 24 answers. There are two worlds:

    one prompt      six answers are right, likely ones and unlikely ones. Which of them survive?
    128 prompts     with 8 features, so they share weights, and learning one may harm another; two
                    answers of each are right. Which prompts survive?

In each step groups of G answers are sampled, right ones are rewarded with 1, and Adam changes the
weights. An answer has max_completion_length tokens (1 unless given), which share its log-prob
equally. The more there are, the less mean log-probs differ, so p = softmax(scores) gets flat
(docs/objectives.md). Not in here, even if a flag names them: controllers, several updates a step,
schedules of the rate, another optimizer, limits of gradients, a temperature, InfoSeed.

The command's own flags: --arms (a file with a line `name = {"key": value, ...}` for each arm, by
default compare/toy_arms.py), --seeds (runs of each arm), --picture (a file to draw). Every other
--key=value goes to all arms. BASE below has the settings that differ from config/default.py.
"""

from common import own_flags, script

# Before the other imports: script() silences what they would print.
if __name__ == "__main__":
    flags, others = script(lambda argv: own_flags(argv, {"arms": "", "seeds": 3, "picture": ""}))

import math
from pathlib import Path
from typing import NamedTuple

import pandas as pd
import torch

import learner
import loss as losses  # `loss` is a value here
from checks import uses_ref_scores, uses_scores
from common import ROOT, UserError, read_config_file, scheduled, with_tau
from compare.__main__ import flags_of, read_arm
from compare.frontier import spread
from compare.results import colors_of, draw_way, markdown, prepare_picture
from preflight import try_formula

BASE = {
    "prompts_per_step": 8,
    "num_generations": 16,
    "max_completion_length": 1,
    "learning_rate": 0.05,
    "max_steps": 300,
}
ANSWERS = 24
POINTS = 30  # measurements on the way of a run
# A group whose pushes are drawn: its rows, and how likely their answers are.
GROUP = ("A", "A", "A", "B", "x", "x", "x", "y")
LIKELY = {"A": 0.4, "B": 0.05, "x": 0.4, "y": 0.001}
RIGHT_ROWS = 4  # the first ones
SHOWN = ("mean", "different"), ("mean", "solved")  # figures of one prompt, of many; see Point


class World(NamedTuple):
    features: torch.Tensor  # (Q, D) of Q prompts
    right: torch.Tensor  # (Q, ANSWERS) bool
    weights: torch.Tensor  # (D, ANSWERS) of the policy at the start


class Groups(NamedTuple):
    """Sampled answers of a step. The policy's figures have a graph."""

    logps: torch.Tensor  # (P, G) under the policy
    ref_logps: torch.Tensor  # (P, G) under the policy at the start
    rewards: torch.Tensor  # (P, G)
    answers: torch.Tensor  # (P, G) int
    entropies: torch.Tensor  # (P,) of the policy


class Point(NamedTuple):
    """A policy at some step: means over the prompts."""

    mean: float  # the chance of a right answer
    solved: float  # the chance of at least one among 64, pass@64
    different: float  # the effective number of right answers, exp(their entropy)


# --- the worlds


def one_prompt() -> World:
    """Six of the answers are right; their logits, and those of the others, go from 2.5 to 0."""
    right = torch.arange(ANSWERS) < 6
    logits = torch.cat([torch.linspace(2.5, 0, 6), torch.linspace(2.5, 0, ANSWERS - 6)])
    return World(torch.ones(1, 1), right[None], logits[None])


def many_prompts(prompts: int = 128, features: int = 8, right_answers: int = 2) -> World:
    """Random features and right answers, and weights that a short supervised warm start has
    learnt."""
    generator = torch.Generator().manual_seed(0)
    X = torch.randn(prompts, features, generator=generator) / math.sqrt(features)
    right = torch.zeros(prompts, ANSWERS, dtype=torch.bool)
    for row in right:
        row[torch.randperm(ANSWERS, generator=generator)[:right_answers]] = True
    weights = torch.zeros(features, ANSWERS, requires_grad=True)
    optimizer = torch.optim.Adam([weights], lr=0.05)
    for _ in range(20):
        optimizer.zero_grad()
        loss = -(X @ weights).log_softmax(1)[right].mean()
        loss.backward()
        optimizer.step()
    return World(X, right, weights.detach())


# --- the trainer's loss, and what it pushes


def loss_of(groups: Groups, c: dict) -> tuple:
    """The trainer's loss, (), and weights/pull (None without weights and scores)."""
    P, G = groups.rewards.shape
    T = c["max_completion_length"]
    lengths = torch.full((P * G,), T)
    logps = (groups.logps.flatten() / T)[:, None].expand(-1, T)  # (N, T)
    ref_logps = (groups.ref_logps.flatten() / T)[:, None].expand(-1, T)  # (N, T)
    ref_scores = None
    if uses_ref_scores(c):
        ref_scores = learner.maxent_scores(ref_logps, lengths, c).view(P, G)
    measured = learner.GroupMeasures(
        rewards=groups.rewards,
        task_rewards=groups.rewards,
        lengths=lengths.view(P, G).float(),
        ref_scores=ref_scores,
        seq_logps=groups.logps.detach(),
        mean_logps=groups.logps.detach() / T,
        clusters=groups.answers,
        correct_modes=different_right(groups),
    )
    targets = learner.group_targets(measured, c["maxent_tau"], c["beta"], c)
    micro_batch = {
        "ids": None,
        "prompt_lengths": None,
        "lengths": lengths,
        "row": torch.arange(P * G),
        "sampler_logps": logps.detach(),
    }
    if targets.advantages is not None:
        micro_batch["advantages"] = targets.advantages.flatten()
    if c["beta"] > 0:
        micro_batch["ref_logps"] = ref_logps
    counts = learner.step_counts(targets, measured.lengths)

    def policy(*_):  # in the place of a model
        per_row = groups.entropies.repeat_interleave(G)  # (N,)
        return logps, (per_row / T)[:, None].expand(-1, T)

    _, loss, _ = learner.micro_batch_loss(policy, micro_batch, targets, c["beta"], c, counts)
    pull = None
    if uses_scores(c) and targets.weights is not None:
        scores = learner.maxent_scores(logps.detach(), lengths, c).view(P, G)
        pull = losses.pull(scores, targets.weights, targets.active).get("weights/pull")
    return loss, pull


def different_right(groups: Groups) -> torch.Tensor:
    """(P,): the number of different right answers in each group."""
    counts = []
    for answers, rewards in zip(groups.answers, groups.rewards, strict=True):
        counts.append(len(set(answers[rewards > 0].tolist())))
    return torch.tensor(counts)


def pushes(logps, rewards, answers, c: dict) -> torch.Tensor:
    """How much one gradient step would raise the log-prob of each row of a group, (G,): the
    negative gradient of the loss. logps, rewards, answers (G,)."""
    logps = logps.clone()[None].requires_grad_()  # (1, G)
    groups = Groups(logps, logps.detach(), rewards[None], answers[None], torch.zeros(1))
    loss, _ = loss_of(groups, c)
    return -torch.autograd.grad(loss, logps)[0][0]


def pushes_on_group(c: dict) -> torch.Tensor:
    """The pushes on the rows of GROUP, (G,), as shares of their sum without signs."""
    logps = torch.tensor([math.log(LIKELY[answer]) for answer in GROUP])
    rewards = (torch.arange(len(GROUP)) < RIGHT_ROWS).float()
    answers = torch.tensor([sorted(LIKELY).index(answer) for answer in GROUP])
    pushed = pushes(logps, rewards, answers, c)
    return pushed / pushed.abs().sum().clamp(min=1e-30)  # an arm may push nothing


def weight_of_groups(c: dict) -> torch.Tensor:
    """(G - 1,): the pushes on all right rows of a group together, if 1, 2, ... G - 1 of its equally
    likely rows are right; as shares of the largest."""
    G = c["num_generations"]
    logps = torch.full((G,), -math.log(G))
    totals = []
    for right in range(1, G):
        rewards = (torch.arange(G) < right).float()
        totals.append(pushes(logps, rewards, torch.arange(G), c)[:right].sum())
    totals = torch.stack(totals)
    return totals / totals.abs().max().clamp(min=1e-30)


# --- training


def train(world: World, c: dict, seed: int) -> tuple[list[Point], float | None]:
    """The policy at POINTS moments of a run and at its end, and weights/pull in the first step."""
    generator = torch.Generator().manual_seed(seed)
    weights = world.weights.clone().requires_grad_()  # (D, ANSWERS)
    optimizer = torch.optim.Adam([weights], lr=c["learning_rate"])
    points, first_pull = [], None
    for step in range(c["max_steps"]):
        if step % max(1, c["max_steps"] // POINTS) == 0:
            points.append(measure(world, weights.detach()))
        groups = sample(world, weights, c, generator)
        at_step = c | {"pkpo_k": round(scheduled(c["pkpo_k"], step))}
        loss, pull = loss_of(groups, at_step)
        first_pull = pull if step == 0 else first_pull
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return [*points, measure(world, weights.detach())], first_pull


def sample(world: World, weights: torch.Tensor, c: dict, generator) -> Groups:
    prompts = torch.randint(len(world.features), (c["prompts_per_step"],), generator=generator)
    features = world.features[prompts]  # (P, D)
    logps = (features @ weights).log_softmax(1)  # (P, ANSWERS)
    start_logps = (features @ world.weights).log_softmax(1)
    probs = logps.detach().exp()
    answers = torch.multinomial(probs, c["num_generations"], True, generator=generator)  # (P, G)
    return Groups(
        logps=logps.gather(1, answers),
        ref_logps=start_logps.gather(1, answers),
        rewards=world.right[prompts].gather(1, answers).float(),
        answers=answers,
        entropies=-(logps.exp() * logps).sum(1),
    )


def measure(world: World, weights: torch.Tensor) -> Point:
    right_probs = (world.features @ weights).softmax(1) * world.right  # (Q, ANSWERS)
    p = right_probs.sum(1)  # (Q,)
    entropies = torch.special.entr(right_probs / p[:, None]).sum(1)
    figures = p, 1 - (1 - p) ** 64, entropies.exp()
    return Point(*[figure.mean().item() for figure in figures])


# --- table and picture


def cells_of(runs: list[list[Point]], shown: tuple) -> list[str]:
    ends = pd.DataFrame([run[-1] for run in runs])
    return [spread(ends[name]) for name in shown]


def table_of(runs: dict, pulls: dict) -> str:
    """runs: arm -> (runs in the world of one prompt, of many), each the Points of each seed; pulls:
    arm -> weights/pull or None."""
    head = ["arm", "weights/pull", "one prompt: right", "different", "many: right", "pass@64"]
    first = next(iter(runs.values()))
    rows = [["(start)", ""]]
    for seeds, shown in zip(first, SHOWN, strict=True):
        rows[0] += cells_of([seeds[0][:1]], shown)  # all runs start alike
    for arm, (one, many) in runs.items():
        pull = "" if pulls[arm] is None else f"{pulls[arm]:.2f}"
        rows.append([arm, pull, *cells_of(one, SHOWN[0]), *cells_of(many, SHOWN[1])])
    return markdown(head, *rows)


def draw(configs: dict, runs: dict, picture: Path) -> None:
    """Above: the pushes on the rows of GROUP, a panel for each arm. Below: how much a group counts,
    and the way of each run from a cross to a dot."""
    from matplotlib.figure import Figure  # not pyplot, which would look for a window

    colors = colors_of(configs)
    columns = min(5, len(configs))
    rows = -(-len(configs) // columns)  # rounded up
    figure = Figure(figsize=(14, 4.4 + 1.9 * rows), layout="constrained")
    above, below = figure.subfigures(2, 1, height_ratios=[1.9 * rows, 4.4])
    above.suptitle(
        "Push on each row of one group (shares): A and B are right, x and y wrong; "
        "A and x likely, B and y not"
    )
    panels = above.subplots(rows, columns, sharey=True, squeeze=False).flatten()
    for panel in panels[len(configs) :]:
        panel.set_axis_off()
    for panel, (arm, c) in zip(panels, configs.items(), strict=False):
        panel.bar(range(len(GROUP)), pushes_on_group(c).tolist(), color=colors[arm])
        panel.set_xticks(range(len(GROUP)), GROUP)
        panel.axhline(0, color="black", linewidth=0.8)
        panel.set_title(arm, fontsize=10)
    weight, *ways = below.subplots(1, 3)
    for i, (arm, c) in enumerate(configs.items()):
        totals = weight_of_groups(c)
        # the first line is the widest, because several arms lie upon each other
        width = 1.5 + 0.7 * (len(configs) - 1 - i)
        counts = range(1, len(totals) + 1)
        weight.plot(counts, totals, color=colors[arm], linewidth=width, label=arm)
        for panel, seeds, shown in zip(ways, runs[arm], SHOWN, strict=True):
            for run in seeds:
                draw_way(panel, pd.DataFrame(run)[list(shown)], colors[arm], width=1)
    G = max(c["num_generations"] for c in configs.values())
    weight.set(title="How much a group counts", xlabel=f"right rows of {G}")
    ways[0].set(title="One prompt: effective number of right answers")
    ways[1].set(title="128 prompts that share weights: pass@64")
    for panel in ways:
        panel.set_xlabel("chance of a right answer")
    for panel in (weight, *ways):
        panel.grid(alpha=0.3)
    below.legend(*weight.get_legend_handles_labels(), loc="outside right upper", fontsize=9)
    figure.savefig(picture, dpi=110)


def read_arms(file, shared: list[str]) -> dict:
    """{arm: its config}. shared: flags of the config, for all arms."""
    configs = {}
    for arm, overrides in read_config_file(file).items():
        _, config = read_arm(file, arm, overrides, [*flags_of(BASE), *shared])
        try_formula(config)  # a user's own
        configs[arm] = with_tau(config, vocabulary=ANSWERS)
    if not configs:
        raise UserError(f"--arms={file} names no arm")
    return configs


def main(own: dict, shared: list[str]) -> None:
    if own["seeds"] < 1:
        raise UserError(f"--seeds={own['seeds']} must be at least 1")
    if own["picture"]:
        prepare_picture(own["picture"])
    configs = read_arms(own["arms"] or ROOT / "compare" / "toy_arms.py", shared)
    torch.set_num_threads(1)  # for so few numbers a second thread only costs
    worlds = one_prompt(), many_prompts()
    runs, pulls = {}, {}
    for arm, config in configs.items():
        runs[arm] = []
        for world in worlds:
            trained = [train(world, config, seed) for seed in range(1, own["seeds"] + 1)]
            runs[arm].append([points for points, _ in trained])
            pulls.setdefault(arm, trained[0][1])  # of the one prompt
    print(table_of(runs, pulls))
    if own["picture"]:
        draw(configs, runs, Path(own["picture"]))
        print(f"picture: {own['picture']}")


if __name__ == "__main__":
    script(main, flags, others)
