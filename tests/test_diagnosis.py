"""What a run says in its first steps if it does not learn: which warning, when, how often; and that
a healthy run gets none."""

import math
from types import SimpleNamespace

import in_child
import pytest
import torch

import checks
import common
import experience
import preflight
from experience import (
    CUT_SHARE,
    CUT_STEPS,
    ENTROPY_STEPS,
    EQUAL_STEPS,
    FLAT_STEPS,
    Symptoms,
    against_rising_entropy,
)

WRONG = torch.zeros(3, 4)  # (P, G)
ONE_RIGHT = torch.tensor([[0.0] * 4, [0.0, 0.0, 1.0, 0.0], [0.0] * 4])
HEALTHY = {"clipped_ratio": 0.1, "jaccard": 0.6, "distinct_2": 0.7}


@pytest.fixture(autouse=True)
def only_rank(monkeypatch):
    monkeypatch.setattr(experience, "any_rank", lambda own: own)


class Watched:
    """A run before its first step, as far as its symptoms need it; `said` collects warnings."""

    def __init__(self, *flags: str, beta: float = 0.0, tau: float = 0.2):
        self.config = common.load_config(["--reward_funcs=countdown", *flags])
        self.symptoms = Symptoms(self.config)
        self.step = 0
        self.tau = tau
        self.beta = beta
        self.entropy = 1.0
        self.said = []

    def take_steps(self, rewards, count: int = 1, all_right: bool = False, **shown) -> None:
        """`count` steps with these rewards (P, G + S). shown: metrics beside the healthy ones, by
        their last word."""
        self.config["num_generations"] = rewards.shape[1] - self.config["info_seed_num_seeds"]
        metrics = {f"completions/{name}": value for name, value in (HEALTHY | shown).items()}
        metrics["entropy"] = self.entropy
        right = torch.full(rewards.shape, all_right)
        collected = SimpleNamespace(rewards=rewards, right=right)
        for _ in range(count):
            self.step += 1
            self.said += self.symptoms.warnings(self.step, collected, metrics, self.tau, self.beta)


def test_rewards_that_are_equal_step_after_step_are_spoken_of_once():
    run = Watched("--objective=dr_grpo")
    for _ in range(2):
        run.take_steps(WRONG, EQUAL_STEPS - 1)
        run.take_steps(ONE_RIGHT)
    assert not run.said
    run.take_steps(WRONG, EQUAL_STEPS + 2)
    (warning,) = run.said
    assert "equal rewards (mean 0), from which nothing is learnt" in warning
    maxent = {"objective": "maxent", "maxent_skip_equal_groups": "wrong"}
    cases = [
        ({"unlikeliness_coef": 0.5}, torch.ones(3, 4), False),
        ({"unlikeliness_coef": 0.5}, WRONG, True),
        ({"policy_entropy_bonus_coef": 0.5}, WRONG, True),
        ({"objective": "token_entropy"}, WRONG, True),  # a bonus that knows no right or wrong
        ({"objective": "token_entropy"}, ONE_RIGHT, False),
        ({"objective": "token_entropy", "unlikeliness_coef": 0.5}, torch.ones(3, 4), False),
        (maxent, torch.tensor([[1.0, 1.0], [0.0, 0.0]]), False),
        (maxent, WRONG, True),
        ({"objective": "grpo", "beta": 0.1}, WRONG, True),  # a KL only
        ({"objective": "grpo", "beta": 0.1}, ONE_RIGHT, False),
    ]
    for learns, rewards, warned in cases:
        run = Watched("--objective=dr_grpo", beta=0.1)
        run.config |= learns
        run.take_steps(rewards, EQUAL_STEPS)
        equal = any("equal rewards" in line for line in run.said)
        assert equal == warned, learns  # where groups teach something it would be false


@pytest.mark.parametrize("advantage", ["mine", "own"])
def test_equal_rewards_are_spoken_of_with_a_users_own_advantages_too(advantage, monkeypatch):
    """They may compare groups, which the warning can't know, and most do not."""
    monkeypatch.setitem(checks.OBJECTIVES, "mine", checks.Objective(advantage=advantage))
    run = Watched()
    run.config["objective"] = "mine"
    run.take_steps(ONE_RIGHT, EQUAL_STEPS)
    assert not run.said
    run.take_steps(WRONG, EQUAL_STEPS)
    (warning,) = run.said
    assert "nothing is learnt (unless objective='mine' looks beyond the rewards of" in warning


def equal_rewards_said(run, rewards=WRONG, **shown) -> str:
    run.take_steps(rewards, EQUAL_STEPS, **shown)
    (warning,) = [line for line in run.said if "equal rewards" in line]
    return warning.split("nothing is learnt: ")[1]


def test_the_warning_of_equal_rewards_names_what_the_completions_have_in_common():
    from_the_start = equal_rewards_said(Watched())
    assert from_the_start.endswith("and at reward_funcs=['countdown']")
    # a reward that was learnt from is no suspect
    run = Watched("--learning_rate=0.02")
    run.take_steps(ONE_RIGHT)
    broken = equal_rewards_said(run)
    assert "lower learning_rate=0.02" in broken and "reward_funcs" not in broken
    assert "if they seldom differed, take easier prompts" in broken
    # partly right: nothing was lost
    run = Watched()
    run.take_steps(ONE_RIGHT)
    half = torch.tensor([[0.0, 0.0], [1.0, 1.0]])
    assert equal_rewards_said(run, half) == from_the_start
    for rewards, looks in ((ONE_RIGHT, False), (torch.ones(3, 4), True)):
        run = Watched()
        run.take_steps(rewards, all_right=looks)  # else all were right before anything was learnt
        right = equal_rewards_said(run, torch.ones(3, 4), all_right=True)
        assert "take harder prompts" in right
        assert ("reward_funcs" in right) == looks
    cut = equal_rewards_said(Watched("--max_completion_length=5"), clipped_ratio=0.97)
    assert cut == "97% of the completions are cut off at max_completion_length=5"
    alike = {"jaccard": 1.0, "distinct_2": 0.25}
    assert "raise temperature=0.1" in equal_rewards_said(Watched("--temperature=0.1"), **alike)
    # the same tokens in another order, such as 1+2 and 2+1
    assert equal_rewards_said(Watched(), jaccard=1.0) == from_the_start


def test_all_are_right_only_if_those_of_other_ranks_are_too(monkeypatch):
    monkeypatch.setattr(experience, "any_rank", lambda own: True)  # another has a wrong one
    said = equal_rewards_said(Watched(), torch.ones(3, 4), all_right=True)
    assert "right" not in said and said.startswith("look at a few")


def test_completions_without_an_end_are_spoken_of_once():
    run = Watched("--max_completion_length=9")
    for _ in range(2):  # half of them is not more than half
        run.take_steps(ONE_RIGHT, CUT_STEPS - 1, clipped_ratio=0.9)
        run.take_steps(ONE_RIGHT, clipped_ratio=CUT_SHARE)
    assert not run.said
    for _ in range(2):
        run.take_steps(ONE_RIGHT, CUT_STEPS + 2, clipped_ratio=0.9)
        run.take_steps(ONE_RIGHT)
    (warning,) = run.said
    assert "(now 90%) have been cut off at max_completion_length=9" in warning
    assert "if they ended before, the policy is breaking, so lower learning_rate=1e-06" in warning


def test_completions_that_never_ended_are_no_sign_of_a_broken_policy():
    run = Watched()
    run.take_steps(ONE_RIGHT, CUT_STEPS, clipped_ratio=1.0)
    (warning,) = run.said
    assert "max_completion_length=512: raise it, or see with --dry_run" in warning


@pytest.mark.parametrize(
    "flags, beta, tau, size, warned",
    [
        ((), 0.0, 0.2, 1.0, False),
        ((), 0.0, 0.9, 1.0, False),  # far above the bound, of which checks.tau_warnings warns
        ((), 5.0, 0.2, 1.0, True),
        ((), 0.0, 2.0, 1.0, True),
        ((), 0.0, 2.0, 10.0, False),  # rewards of 0 and 10
        ((), 0.0, 0.2, 0.1, True),  # rewards of 0 and 0.1
        (("--maxent_q_temperature=10",), 0.0, 0.2, 1.0, True),
        (("--maxent_score_scale=0.1",), 0.0, 2.17, 1.0, False),  # default_tau of 100 tokens
        (("--maxent_score_scale=0.1",), 0.0, 12.0, 1.0, True),
        (("--maxent_score_scale=10",), 0.0, 0.2, 1.0, False),
        (("--objective=dr_grpo",), 5.0, 0.2, 1.0, False),  # no weights
        (("--objective=xdr",), 0.0, 5.0, 1.0, False),  # softmax(advantage / tau): flat is dr_grpo
    ],
)
def test_weights_that_rewards_hardly_move_are_spoken_of(flags, beta, tau, size, warned):
    run = Watched(*flags, beta=beta, tau=tau)
    run.take_steps(WRONG)
    run.take_steps(size * ONE_RIGHT, 20)
    assert [line for line in run.said if "hardly tell right from wrong" in line] == (
        run.said if warned else []
    )
    assert len(run.said) == warned


def test_small_differences_are_no_fault_beside_large_ones_nor_late():
    run = Watched()
    run.take_steps(ONE_RIGHT)
    run.take_steps(0.01 * ONE_RIGHT, 20)
    assert not run.said
    late = Watched()
    late.step = FLAT_STEPS  # as after a resume
    late.take_steps(0.01 * ONE_RIGHT, 20)
    assert not late.said
    early = Watched()
    early.step = FLAT_STEPS - 2  # a resume that has not seen the first of these steps
    early.take_steps(0.01 * ONE_RIGHT, 20)
    assert not early.said


def test_rows_with_a_seed_learn_by_themselves_and_are_not_looked_at():
    seeded = torch.tensor([[0.0, 1.0]]).expand(len(WRONG), 2)
    run = Watched("--info_seed_num_seeds=2")
    run.take_steps(torch.cat([WRONG, seeded], 1), EQUAL_STEPS)
    assert not run.said
    run = Watched("--info_seed_num_seeds=2")
    run.take_steps(torch.cat([0.01 * ONE_RIGHT, seeded], 1), FLAT_STEPS)
    (warning,) = run.said
    assert "rewards of a group differed by 0.01 at most" in warning


def test_the_loop_tells_a_user_in_its_fifth_step(tiny_model_dir, tmp_path):
    """An untrained model ends few of its texts; rewards of 0 and 1 mean nothing at beta = 9."""
    flags = {"reward_funcs": "parity_reward:parity", "beta": 9, "max_steps": 5}
    status, words = in_child.run(None, tiny_model_dir, tmp_path / "run", **flags)
    assert status == 0, words
    assert "have been cut off at max_completion_length=12: raise it" in words
    assert "differed by 1 at most, and maxent_q_temperature * (maxent_tau + beta) = 9.2" in words
    assert "equal rewards" not in words


@pytest.mark.parametrize("temperature", [1.0, 0.6, 0.1, 0.05, {0: 1.0, 9: 0.01}])
def test_a_temperature_at_which_a_group_says_one_thing_is_warned_about(temperature):
    defaults = common.default_config()
    config = common.with_tau(defaults | {"temperature": temperature}, 1000)
    said = [line for line in checks.warn_config(config, 1000, defaults) if "temperature" in line]
    cold = temperature in (0.05, {0: 1.0, 9: 0.01})
    assert [line.startswith("temperature=") for line in said] == [True] * cold


@pytest.mark.parametrize("sizes, warned", [([4], False), ([1, 3], False), ([3], True)])
def test_fewer_prompts_than_a_step_takes_are_warned_about(sizes, warned, capsys):
    pools = [[{"id": str(i)} for i in range(size)] for size in sizes]
    preflight.warn_of_few_prompts(pools, {"prompts_per_step": 4})
    said = capsys.readouterr().out
    assert ("dataset has 3 prompt(s), fewer than prompts_per_step=4" in said) == warned
    assert bool(said) == warned


# --- an entropy that rises


def entropies(run: Watched, *values: float) -> list[str]:
    """What a run says over ENTROPY_STEPS steps with each of these entropies."""
    for run.entropy in values:
        run.take_steps(ONE_RIGHT, ENTROPY_STEPS)
    return run.said


@pytest.mark.parametrize(
    "values, told",
    [
        ((3.0, 1.0, 0.3, 0.05), False),  # as most runs: it falls
        ((1.0, 1.9, 1.0, 1.9), False),  # less than twice the lowest
        ((0.1, 0.59), False),  # little, though many times as much
        ((0.1, 0.61), True),
        ((1.0, 2.01), True),
        ((3.0, 1.0, 2.01), True),  # the lowest counts, not the first
        ((1.0, 1.5, 2.01, 4.0, 8.0), True),
        ((math.nan, 1.0, 2.01), True),
        ((1.0, math.nan), False),
    ],
)
def test_an_entropy_far_above_its_lowest_is_told_once(values, told):
    said = entropies(Watched("--objective=dr_grpo"), *values)
    assert len(said) == told
    assert all("the entropy has risen to" in line and "coming apart" in line for line in said)


def test_one_high_step_is_no_rise_and_the_first_ones_have_no_lowest():
    run = Watched("--objective=dr_grpo")
    run.entropy = 0.1
    run.take_steps(ONE_RIGHT, ENTROPY_STEPS // 2)
    assert not entropies(run, 1.0)  # no mean before that of 0.1 and 1.0
    run = Watched("--objective=dr_grpo")
    assert not entropies(run, 1.0)
    run.entropy = 9.0
    run.take_steps(ONE_RIGHT)
    assert not entropies(run, 1.0)


def test_the_rise_is_told_in_figures():
    (said,) = entropies(Watched("--objective=maxent", "--maxent_tau=0.1"), 1.25, 3.75)
    assert "risen to 2.5 nats a token, from 1.25 (means of 16 steps)" in said
    assert "lower maxent_tau=0.1 or learning_rate=1e-06, or use a reference (beta)" in said


@pytest.mark.parametrize(
    "settings, cure",
    [
        (
            "--objective=maxent --maxent_tau=0.25 --beta=0.08",
            "lower maxent_tau=0.25 or learning_rate=1e-06",
        ),
        ("--objective=flow --maxent_tau=0.1", "lower maxent_tau=0.1 or learning_rate=1e-06"),
        ("--objective=token_entropy", "lower token_entropy_coef=0.01 or learning_rate=1e-06"),
        (
            "--objective=grpo --policy_entropy_bonus_coef=0.5",
            "lower policy_entropy_bonus_coef=0.5 or learning_rate=1e-06",
        ),
        (
            "--objective=dr_grpo --mode_entropy_coef=0.3 --num_iterations=1",
            "lower mode_entropy_coef=0.3 or learning_rate=1e-06",
        ),
        ("--objective=dr_grpo", "lower learning_rate=1e-06"),
    ],
)
def test_what_is_advised_is_what_raises_the_entropy(settings, cure):
    c = Watched(*settings.split()).config
    assert against_rising_entropy(c) == cure
