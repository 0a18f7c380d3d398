"""Objectives of a user's own: what they are given, and what a forgotten line does."""

import re

import pytest
import torch

import checks
import learner
import loss
import preflight
from checks import Objective, warn_config
from common import UserError, default_config, load_config
from learner import GroupMeasures

REWARDS = torch.tensor([[1.0, 0.0, 0.0], [1.0, 1.0, 1.0]])  # (P, G)


@pytest.fixture
def config(monkeypatch):
    """config(objective, *flags): a config whose objective is one that checks.OBJECTIVES lacks, and
    whose names may be new to checks.Objective too."""

    def make(objective: Objective, *flags: str) -> dict:
        monkeypatch.setitem(checks.OBJECTIVES, "mine", objective)
        return load_config(["--num_generations=3", *flags]) | {"objective": "mine"}

    return make


def test_a_group_loss_without_a_formula_does_not_train_on_nothing(config):
    c = config(Objective(group_loss="pairs"))
    lengths = torch.ones(2, 3)
    measured = GroupMeasures(REWARDS, REWARDS, lengths)
    targets = learner.group_targets(measured, 0.1, 0.0, c)
    counts = learner.step_counts(targets, lengths)
    with pytest.raises(ValueError, match="no group_loss='pairs'"):
        learner.group_loss(torch.zeros(2, 3), targets, c, counts)


def test_beta_tilts_a_group_loss_that_has_weights_or_goals_and_weighs_a_kl_beside_any_other(config):
    for kind, tilts in (("weights", True), ("balance", True), ("pairs", False), ("", False)):
        c = config(Objective(group_loss=kind), "--beta=0.1")
        assert checks.uses_ref_scores(c) == tilts
        assert checks.adds_kl(c) != tilts


def test_a_ratio_and_a_sum_without_a_formula_do_not_train_another_objective(config):
    c = config(Objective(ratio="mine"))
    part = {"old_logps": torch.zeros(3, 2), "advantages": torch.ones(3, 1)}
    with pytest.raises(ValueError, match="no ratio='mine'"):
        learner.surrogate(torch.zeros(3, 2), part, c)
    with pytest.raises(ValueError, match="no token_sum='prompt_mean'"):
        loss.token_weights("prompt_mean", torch.ones(3, 2), 3, 6, 2)


def test_a_ratio_that_forgets_the_shape_of_advantages_is_not_summed(config, monkeypatch):
    c = config(Objective())

    def rows_by_rows(log_ratio, advantages, *clips):
        gain = log_ratio.exp() * advantages  # (n, 1) * (n,): every row with every advantage
        return gain, gain > 9, gain > 9

    monkeypatch.setattr(loss, "clipped_surrogate", rows_by_rows)
    part = {name: torch.zeros(3, 1) for name in ("old_logps", "sampler_logps")}
    part |= {"advantages": torch.ones(3), "lengths": torch.ones(3, dtype=torch.long)}
    with pytest.raises(ValueError, match=r"surrogate gives \(3, 3\), not"):
        learner.token_loss(torch.zeros(3, 1), None, part, 0.0, c, {"rows": 3, "tokens": 3})


def test_advantages_of_ones_own_may_use_scale_and_k_and_compare_groups(config, monkeypatch):
    def whole_step(rewards, scale: str, k: int):
        return (rewards - rewards.mean()) * k

    monkeypatch.setitem(loss.ADVANTAGES, "whole_step", whole_step)
    c = config(Objective(advantage="whole_step"))
    assert c["pkpo_k"] > c["num_generations"]  # the default of k is no reason to refuse it
    assert all(holds for holds, _ in checks.objective_claims(c))
    c = config(Objective(advantage="whole_step"), "--scale_rewards=group", "--pkpo_k=3")
    warnings = " ".join(warn_config(c, 100, default_config()))
    assert "scale_rewards" not in warnings and "pkpo_k" not in warnings
    # the second group's rewards are equal, and yet it teaches
    targets = learner.group_targets(GroupMeasures(REWARDS, REWARDS, torch.ones(2, 3)), 0.1, 0.0, c)
    assert targets.advantages[1, 0] == pytest.approx(3 * (1 - 4 / 6))
    assert learner.may_have_gradient(REWARDS, 0.0, c).tolist() == [True, True]
    usual = load_config(["--objective=dr_grpo"])
    assert learner.may_have_gradient(REWARDS, 0.0, usual).tolist() == [True, False]


@pytest.mark.parametrize(
    "formula, words",
    [
        (lambda r, k: r, "fails with TypeError"),
        (lambda r, scale, k: r.flatten(), "gives (6,), not a tensor of their shape (P, G)"),
        (lambda r, scale, k: r.mean(1, keepdim=True) - r.mean(), "gives (2, 1), not a tensor"),
        (lambda r, scale, k: r.tolist(), "not a tensor of their shape"),
        # the groups' spread without a word on 0
        (
            lambda r, scale, k: (r - r.mean(1, keepdim=True)) / r.std(1, keepdim=True),
            "gives NaN or",
        ),
    ],
)
def test_a_formula_that_gives_no_advantages_is_one_sentence_before_the_run(
    config, monkeypatch, formula, words
):
    monkeypatch.setitem(loss.ADVANTAGES, "odd", formula)
    c = config(Objective(advantage="odd"))
    with pytest.raises(UserError, match=re.escape("loss.ADVANTAGES['odd'], tried on")) as refused:
        preflight.try_formula(c)
    assert words in str(refused.value)


def test_a_branch_that_is_not_there_is_named_before_anything_loads(config):
    c = config(Objective(advantage="own"), "--pkpo_k={0: 1, 9: 3}")
    with pytest.raises(UserError, match="row_advantages has no branch for objective='mine'"):
        preflight.load_inputs(c, 1)


def test_a_branch_that_needs_more_than_rewards_and_lengths_is_not_judged(config, monkeypatch):
    seen = []

    def own_branch(measured, c: dict):
        seen.append(c["pkpo_k"])  # that of a step
        return measured.seq_logps / measured.lengths  # None / a tensor, before a run

    monkeypatch.setattr(learner, "row_advantages", own_branch)
    preflight.try_formula(config(Objective(advantage="own"), "--pkpo_k={0: 2, 9: 3}"))
    assert seen == [2]


@pytest.mark.parametrize(
    "objective, words",
    [
        (Objective(ratio="mine"), "ValueError: learner.surrogate has no ratio='mine'"),
        (Objective(token_sum="mine"), "no token_sum='mine'"),
    ],
)
def test_a_ratio_or_a_sum_without_a_branch_is_one_sentence_before_the_run(config, objective, words):
    with pytest.raises(UserError, match=words):
        preflight.load_inputs(config(objective), 1)


@pytest.mark.parametrize(
    "flags, read",
    [
        ([], lambda part: part["ids"].sum() + part["prompt_lengths"].sum()),
        (["--beta=0.1"], lambda part: part["ref_logps"].sum()),
        ([], lambda part: part["of_mine"].sum()),  # added to the batch in learner.measure_groups
    ],
)
def test_a_ratio_that_reads_more_of_its_rows_is_not_refused(config, monkeypatch, flags, read):
    seen = []

    def surrogate(logps, micro_batch: dict, c: dict) -> tuple:
        seen.append(c["objective"])
        gain = logps * micro_batch["advantages"][:, None] + read(micro_batch)
        return gain, gain > 9, gain > 9

    monkeypatch.setattr(learner, "surrogate", surrogate)
    preflight.try_loss(config(Objective(ratio="mine"), *flags))
    assert seen == ["mine"]


def test_every_formula_of_ours_passes():
    for name in checks.OBJECTIVES:
        c = load_config([f"--objective={name}", "--pkpo_k=4"])
        preflight.try_formula(c)
        preflight.try_loss(c)
