"""What an objective does, on the smallest policy there is: a table of logits, one for each of 24
answers to a single prompt, of which six are right. Takes seconds and needs no model.

    python -m compare.toy
    python -m compare.toy --picture=runs/toy.png
    python -m compare.toy --arms=mine.py --max_completion_length=32

Targets and losses are the trainer's own. In each step groups of G answers are sampled, right ones
are rewarded with 1, and Adam changes the logits.

An answer has max_completion_length tokens (1 unless given), which share its log-prob equally. The
more there are, the less mean log-probs differ, so p = softmax(scores) gets flat and maxent does
what maxrl does (docs/objectives.md). What is missing here: prompts that share weights, where
learning one harms another. So no objective forgets the prompts that are rarely solved. Controllers
and several updates a step are missing too.

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
import loss as L
from checks import uses_ref_scores, uses_scores
from common import ROOT, UserError, read_config_file, scheduled, with_tau
from compare.__main__ import flags_of, read_arm
from compare.frontier import spread
from compare.results import colors_of, markdown, prepare_picture

BASE = {
    "prompts_per_step": 4,  # groups of a step, all of the one prompt
    "num_generations": 16,
    "max_completion_length": 1,
    "learning_rate": 0.05,
    "max_steps": 300,
}
ANSWERS = 24
RIGHT = 6  # of the ANSWERS, the first ones
# likely ones and unlikely ones (by a factor of 12) among the right answers, and among the wrong
START = torch.cat([torch.linspace(2.5, 0, RIGHT), torch.linspace(2.5, 0, ANSWERS - RIGHT)])
# A group whose pushes are drawn: its rows, and how likely their answers are.
GROUP = ("A", "A", "A", "B", "x", "x", "x", "y")
LIKELY = {"A": 0.4, "B": 0.05, "x": 0.4, "y": 0.001}
RIGHT_ROWS = 4  # the first ones


class Step(NamedTuple):
    """A policy before a step: its samples' chance to be right, and the effective number of its
    right answers, exp(their entropy)."""

    right: float
    different: float


class Groups(NamedTuple):
    """Some groups of sampled answers. The policy's figures have a graph."""

    logps: torch.Tensor  # (P, G) of the answers under the policy
    ref_logps: torch.Tensor  # (P, G) under the policy at the start
    rewards: torch.Tensor  # (P, G)
    answers: torch.Tensor  # (P, G) int
    entropy: torch.Tensor  # () of the policy


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
        return logps, (groups.entropy / T).expand(P * G, T)

    _, loss, _ = learner.micro_batch_loss(policy, micro_batch, targets, c["beta"], c, counts)
    pull = None
    if uses_scores(c) and targets.weights is not None:
        scores = learner.maxent_scores(logps.detach(), lengths, c).view(P, G)
        pull = L.pull(scores, targets.weights, targets.active).get("weights/pull")
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
    groups = Groups(logps, logps.detach(), rewards[None], answers[None], torch.zeros(()))
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


def train(c: dict, seed: int) -> tuple[list[Step], float | None]:
    """The policy before each step and after the last one, and weights/pull in the first step."""
    generator = torch.Generator().manual_seed(seed)
    logits = START.clone().requires_grad_()  # (ANSWERS,)
    optimizer = torch.optim.Adam([logits], lr=c["learning_rate"])
    shape = c["prompts_per_step"], c["num_generations"]  # P, G
    path, first_pull = [], None
    for step in range(c["max_steps"]):
        logps = logits.log_softmax(0)
        path.append(state_of(logps))
        probs = logps.detach().exp()
        sampled = torch.multinomial(probs, math.prod(shape), True, generator=generator).view(shape)
        groups = Groups(
            logps=logps[sampled],
            ref_logps=START.log_softmax(0)[sampled],
            rewards=(sampled < RIGHT).float(),
            answers=sampled,
            entropy=-(logps.exp() * logps).sum(),
        )
        at_step = c | {"pkpo_k": round(scheduled(c["pkpo_k"], step))}
        loss, pull = loss_of(groups, at_step)
        first_pull = pull if step == 0 else first_pull
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return [*path, state_of(logits.log_softmax(0))], first_pull


def state_of(logps: torch.Tensor) -> Step:
    probs = logps.detach().exp()  # (ANSWERS,)
    right = probs[:RIGHT].sum()
    shares = probs[:RIGHT] / right
    return Step(right.item(), torch.special.entr(shares).sum().exp().item())


# --- table and picture


def table_of(paths: dict, pulls: dict) -> str:
    """paths: arm -> list of Steps of each seed; pulls: arm -> weights/pull or None."""
    start = next(iter(paths.values()))[0][0]
    rows = [["(start)", "", f"{start.right:.3f}", f"{start.different:.3f}"]]
    for arm, runs in paths.items():
        ends = pd.DataFrame([run[-1] for run in runs])
        pull = "" if pulls[arm] is None else f"{pulls[arm]:.2f}"
        rows.append([arm, pull, spread(ends["right"]), spread(ends["different"])])
    return markdown(["arm", "weights/pull", "right", "different right answers"], *rows)


def draw(configs: dict, paths: dict, picture: Path) -> None:
    """Above: the pushes on the rows of GROUP, a panel for each arm. Below: how much a group counts,
    and the runs, one line for each seed."""
    import matplotlib

    matplotlib.use("Agg")  # draws to a file, needs no window
    import matplotlib.pyplot as plt

    colors = colors_of(configs)
    columns = min(4, len(configs))
    rows = -(-len(configs) // columns)  # rounded up
    figure = plt.figure(figsize=(13, 4.2 + 1.9 * rows), layout="constrained")
    above, below = figure.subfigures(2, 1, height_ratios=[1.9 * rows, 4.2])
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
    weight, right, different = below.subplots(1, 3)
    for i, (arm, c) in enumerate(configs.items()):
        totals = weight_of_groups(c)
        # the first line is the widest, because several arms lie upon each other
        width = 1.5 + 0.8 * (len(configs) - 1 - i)
        counts = range(1, len(totals) + 1)
        weight.plot(counts, totals, color=colors[arm], linewidth=width, label=arm)
        for run in paths[arm]:
            right.plot([step.right for step in run], color=colors[arm], linewidth=1)
            different.plot([step.different for step in run], color=colors[arm], linewidth=1)
    G = max(c["num_generations"] for c in configs.values())
    weight.set(title="How much a group counts", xlabel=f"right rows of {G}")
    right.set(title="Chance of a right answer", xlabel="step")
    different.set(title=f"Different right answers, of {RIGHT}", xlabel="step")
    for panel in (weight, right, different):
        panel.grid(alpha=0.3)
    below.legend(*weight.get_legend_handles_labels(), loc="outside right upper", fontsize=9)
    figure.savefig(picture, dpi=110)
    plt.close(figure)


def read_arms(file, shared: list[str]) -> dict:
    """{arm: its config}. shared: flags of the config, for all arms."""
    configs = {}
    for arm, overrides in read_config_file(file).items():
        _, config = read_arm(file, arm, overrides, [*flags_of(BASE), *shared])
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
    paths, pulls = {}, {}
    for arm, config in configs.items():
        runs = [train(config, seed) for seed in range(1, own["seeds"] + 1)]
        paths[arm] = [path for path, _ in runs]
        pulls[arm] = runs[0][1]
    print(table_of(paths, pulls))
    if own["picture"]:
        draw(configs, paths, Path(own["picture"]))
        print(f"picture: {own['picture']}")


if __name__ == "__main__":
    script(main, flags, others)
