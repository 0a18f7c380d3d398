"""The learner on one rank with real DeepSpeed: what reaches the gradient and what does not."""

import itertools
import math
import random
from operator import attrgetter
from types import SimpleNamespace

import pytest
import torch
from deepspeed.runtime.engine import DeepSpeedEngine
from reward_tools import TEN, rollouts_of, row_of

import checks
import infoseed
import learner
import ranks
import rollout
import train
from common import RunStopped, load_config
from learner import (
    GroupMeasures,
    GroupTargets,
    accumulate_gradients,
    group_targets,
    resting_rows,
    sampler_mismatch,
    step_counts,
)
from policy import Policy, completion_mask
from ranks import start_distributed

P = 3
G = 4
L = 8


def meet() -> None:
    """A world of one rank, once in this process."""
    if not torch.distributed.is_initialized():
        start_distributed()


def config(model, *flags) -> dict:
    common = [
        f"--model={model}",
        f"--num_generations={G}",
        "--max_prompt_length=8",
        f"--max_completion_length={L}",
        "--learning_rate=1e-3",
        "--max_tokens_per_micro_batch=16384",  # a run's default follows its memory
        "--maxent_tau=0.2",
        "--pkpo_k=2",
    ]
    return load_config([*common, *flags])


def batch_of(seed: int = 0) -> dict:
    rng = random.Random(seed)
    rollouts = []
    for i in range(P * G):
        completion = [rng.randrange(5, 100) for _ in range(rng.randint(1, L - 1))] + [0]
        rollouts.append(
            {
                "prompt_ids": [5 + i // G, 7, 9],
                "completion_ids": completion,
                "logprobs": [-1.0] * len(completion),
            }
        )
    return rollout.to_batch(rollouts, "cpu")


def gradients(model, rewards, *flags, batch=None) -> tuple[dict, dict]:
    """({name: gradient}, metrics) of one accumulation, no step."""
    meet()
    c = config(model, *flags)
    engine = train.load_policy(c, torch.device("cpu"))
    batch = batch or batch_of()
    lengths = batch["lengths"].view(P, G)
    group = GroupMeasures(
        rewards,
        rewards,
        lengths,
        # for seed_grpo: every answer another one, equally likely
        clusters=torch.arange(G).expand(P, G),
        mean_logps=torch.zeros(P, G),
    )
    targets = group_targets(group, c["maxent_tau"], 0.0, c)
    norm = step_counts(targets, lengths)
    metrics = accumulate_gradients(engine, batch, targets, 0.0, c, norm)
    return {name: p.grad.clone() for name, p in engine.module.lm.named_parameters()}, metrics


REWARDS = torch.tensor([[1.0, 0, 0, 1], [0, 0, 0.5, 1], [0, 0, 0, 0]])
OBJECTIVES = list(checks.OBJECTIVES)


def all_terms(objective: str) -> list[str]:
    """The flags of an objective, with the mode-entropy term where it can have that."""
    if checks.OBJECTIVES[objective].group_loss:
        return [f"--objective={objective}"]
    return [f"--objective={objective}", "--mode_entropy_coef=0.5"]


def test_ranks_wait_for_each_other_longer_than_one_of_them_may_be_busy(tiny_model_dir):
    """DeepSpeed's own limit is ten minutes, which is a server's rollout_timeout."""
    meet()
    backend = torch.distributed.group.WORLD._get_backend(torch.device("cpu"))
    assert backend.options._timeout == ranks.DEADLINE


@pytest.mark.parametrize(
    "flags, has_pull, has_weights",
    [
        (["--objective=maxent"], True, True),
        (["--objective=maxent", "--maxent_loss=floored"], True, True),
        (["--objective=maxent", "--maxent_loss=policy_gradient"], False, True),
        (["--objective=maxent", "--maxent_loss=mle"], False, True),
        (["--objective=xdr"], False, True),
        (["--objective=dr_grpo"], False, False),
    ],
)
def test_only_a_loss_over_the_shares_of_a_group_has_a_pull(
    tiny_model_dir, flags, has_pull, has_weights
):
    """As it is computed here, of mean log-probs."""
    meet()
    c = config(tiny_model_dir, *flags)
    batch = batch_of()
    batch["old_logps"] = batch["sampler_logps"] * torch.rand(P * G, 1)
    lengths = batch["lengths"].view(P, G)
    targets = group_targets(GroupMeasures(REWARDS, REWARDS, lengths), 0.2, 0.0, c)
    metrics = learner.weight_metrics(targets, batch, c)
    assert ("weights/pull" in metrics, "weights/entropy" in metrics) == (has_pull, has_weights)
    if has_weights:  # of the groups with a target alone
        entropies = torch.special.entr(targets.weights[:2]).sum(1)
        assert metrics["weights/entropy"] == pytest.approx(entropies.mean().item())
    if has_pull:
        means = (batch["old_logps"].sum(1) / batch["lengths"]).view(P, G)
        p, w = means.softmax(1), targets.weights
        shares = (p - 1 / G).norm(dim=1) / (w - 1 / G).norm(dim=1)
        assert metrics["weights/pull"] == pytest.approx(shares[:2].mean().item(), rel=1e-5)


@pytest.mark.parametrize("objective", ["maxent", "dr_grpo"])
def test_what_infoseed_adds_to_rewards_shapes_the_target_and_not_what_is_correct(
    tiny_model_dir, objective
):
    c = config(tiny_model_dir, f"--objective={objective}")
    bonus = torch.tensor([0.0, 0, 0, 0.1])
    group = GroupMeasures(REWARDS + bonus, REWARDS, torch.ones(3, 4))
    targets = group_targets(group, 0.2, 0.0, c)
    assert torch.equal(targets.task_rewards, REWARDS)
    assert targets.active.all()
    shaped = attrgetter("weights" if objective == "maxent" else "advantages")
    assert shaped(targets)[2, 3] > shaped(targets)[2].mean()
    shaped_only = group_targets(group._replace(task_rewards=REWARDS + bonus), 0.2, 0.0, c)
    assert torch.equal(shaped(shaped_only), shaped(targets))
    if objective == "maxent":  # and how much a group counts
        spread = group_targets(group, 0.2, 0.0, c | {"maxent_group_weight": "spread"})
        assert (spread.group_weight > 0).tolist() == spread.active.tolist() == [True] * 3


@pytest.mark.parametrize("objective", ["maxent", "flow"])
def test_weighted_by_spread_groups_of_equal_rewards_do_not_count_in_the_mean(
    tiny_model_dir, objective
):
    flags = [f"--objective={objective}", "--maxent_group_weight=spread", "--unlikeliness_coef=0.25"]
    equal = torch.ones(1, 4)
    likelihoods = torch.arange(4.0).repeat(4, 1)  # they tell equally right answers apart
    group = GroupMeasures(*[torch.cat([REWARDS, equal])] * 2, torch.ones(4, 4))
    group = group._replace(seq_logps=likelihoods)
    for skip in ("all", "wrong", "none"):
        c = config(tiny_model_dir, *flags, f"--maxent_skip_equal_groups={skip}")
        targets = group_targets(group, 0.2, 0.0, c)
        assert (
            targets.active.tolist()
            == (targets.group_weight > 0).tolist()
            == [True, True, False, False]
        )
        assert learner.step_counts(targets, group.lengths)["active"] == 2


@pytest.mark.parametrize("objective", ["seed_grpo", "xdr"])
def test_answers_are_told_apart_row_by_row(objective):
    """In the first group two orders of one sum, a wrong answer and one that says nothing; in the
    second a wrong answer three times."""
    meet()
    texts = ["2*3+4", "4+3*2", "2+3+4", "", "2+3+4", "2*3+4", "2+3+4", "2+3+4"]
    c = load_config([f"--objective={objective}", "--num_generations=4", "--reward_workers=0"])
    collected = SimpleNamespace(
        prompts=[row_of("countdown", TEN), row_of("countdown", TEN)],
        rollouts=rollouts_of(texts),
        right=torch.tensor([[True, True, False, False], [False, True, False, False]]),
        rewards=torch.zeros(2, 4),
    )
    lengths = torch.arange(1, 9)
    batch = {"sampler_logps": -completion_mask(lengths).float(), "lengths": lengths}
    c["xdr_mode_adaptive_tau"] = objective == "xdr"
    measured = learner.measure_groups(None, None, batch, collected, collected.rewards, c)
    if objective == "xdr":
        assert measured.correct_modes.tolist() == [1, 1]
    else:
        assert measured.clusters.tolist() == [[0, 0, 1, 2], [0, 1, 0, 0]]
        assert measured.mean_logps.tolist() == [[-1.0] * 4] * 2


def test_the_entropy_of_a_row_is_that_of_its_own_tokens_on_average(monkeypatch):
    meet()
    c = load_config(["--policy_entropy_bonus_coef=0.1"])
    entropies = torch.tensor([[2.0, 1, 3], [4, 0, 0], [1, 1, 0], [0, 0, 0]])
    monkeypatch.setattr(learner, "agree_on_plan", lambda *args: None)
    monkeypatch.setattr(learner, "forward_rows", lambda *args, entropy: entropies)
    collected = SimpleNamespace(prompts=[{}] * 2, rollouts=None, right=None, rewards=None)
    batch = {"lengths": torch.tensor([3, 1, 2, 1])}
    measured = learner.measure_groups(None, None, batch, collected, None, c)
    assert measured.entropies.tolist() == [[2.0, 4.0], [1.0, 0.0]]


def largest(grads: dict) -> float:
    return max(g.abs().max().item() for g in grads.values())


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_equal_rewards_give_exactly_zero_gradient_and_mixed_ones_do_not(tiny_model_dir, objective):
    # the fp32 mean of four 0.1 need not be 0.1
    equal = torch.tensor([[0.1] * G, [0.0] * G, [1.0] * G])
    flags = all_terms(objective)
    no_bonus = ["--token_entropy_coef=0"]  # it is meant to act everywhere
    assert largest(gradients(tiny_model_dir, equal, *flags, *no_bonus)[0]) == 0.0
    assert largest(gradients(tiny_model_dir, REWARDS, *flags)[0]) > 1e-5


@pytest.mark.parametrize(
    "flags, rewards, expected",
    [
        ("--objective=maxent", REWARDS, (2, 1)),
        ("--objective=maxent", REWARDS[:2].repeat(2, 1)[:3], (1, 1)),
        ("--objective=maxent", REWARDS * 0, (2, 1)),
        ("--objective=maxent --max_tokens_per_micro_batch=40", REWARDS, (3, 2)),
        ("--objective=dr_grpo", REWARDS, (2, 1)),
        ("--objective=dr_grpo --mode_entropy_coef=0.5", REWARDS, (2, 1)),
        ("--objective=token_entropy", REWARDS, (1, 1)),
        (
            "--objective=maxent --maxent_loss=policy_gradient --maxent_skip_equal_groups=none",
            REWARDS,
            (2, 1),
        ),
    ],
    ids=str,
)
def test_groups_that_the_loss_does_not_depend_on_go_forward_only(
    tiny_model_dir, monkeypatch, flags, rewards, expected
):
    """(forwards, backwards) of a step with three groups."""
    calls = []

    def count(name: str) -> None:
        real = getattr(DeepSpeedEngine, name)

        def counted(self, *args, **kwargs):
            calls.append(name)
            return real(self, *args, **kwargs)

        monkeypatch.setattr(DeepSpeedEngine, name, counted)

    count("forward")
    count("backward")
    gradients(tiny_model_dir, rewards, *flags.split())
    assert (calls.count("forward"), calls.count("backward")) == expected


# what agree_on_plan's all_reduce brings of a second rank: whether it has a split group, and how
# many of its micro-batches rest and learn
ALIKE = [0, 1, 1]
ALL_LEARN = [0, 0, 2]  # two micro-batches, and nothing at rest


@pytest.mark.parametrize("objective", ["maxent", "dr_grpo"])
@pytest.mark.parametrize("other", [ALIKE, ALL_LEARN], ids=["alike", "all_learn"])
@pytest.mark.parametrize("at_rest", [1, 2, 3])
def test_what_goes_backward_are_the_tokens_of_groups_with_a_gradient(
    tiny_model_dir, monkeypatch, objective, other, at_rest
):
    """Whatever the other rank does; but for one group, or one row, for each backward of the other
    rank that this one lacks. Losses and gradients are those of all groups backward."""
    rewards = REWARDS.clone()
    rewards[3 - at_rest :] = 0.0
    batch = batch_of()
    backward = []
    real = Policy.forward

    def forward(self, ids, prompt_lengths, lengths, **kwargs):
        if torch.is_grad_enabled():
            backward.append(int(lengths.sum()))
        return real(self, ids, prompt_lengths, lengths, **kwargs)

    def with_other(tensor, op=torch.distributed.ReduceOp.SUM):
        is_plan = op == torch.distributed.ReduceOp.MAX and tensor.shape == (3,)
        return tensor.maximum(torch.tensor(other)) if is_plan else tensor

    flag = f"--objective={objective}"
    with monkeypatch.context() as patch:
        patch.setattr(learner, "resting_rows", lambda *_: torch.zeros(P * G, dtype=torch.bool))
        everything, metrics = gradients(tiny_model_dir, rewards, flag, batch=dict(batch))
    monkeypatch.setattr(Policy, "forward", forward)
    monkeypatch.setattr(learner, "across_ranks", with_other)
    grads, same = gradients(tiny_model_dir, rewards, flag, batch=dict(batch))
    tokens = batch["lengths"].view(P, G)
    unit = G if objective == "maxent" else 1
    active = 3 - at_rest
    lacking = max(0, other[2] - active * G // unit)
    along = batch["lengths"].view(-1, unit).sum(1)[-lacking:].sum() if lacking else 0
    assert sum(backward) == tokens[:active].sum() + along
    assert len(backward) == max(1, other[2])
    for name in ("loss", "entropy", "clip_ratio/low", "clip_ratio/high"):
        assert same[name] == pytest.approx(metrics[name], rel=1e-5, abs=1e-9), name
    for name, grad in grads.items():
        torch.testing.assert_close(grad, everything[name], rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("objective", ["gspo", "maxent"])
def test_a_later_update_leaves_out_rows_that_rest(tiny_model_dir, monkeypatch, objective):
    batch = batch_of()
    flag = f"--objective={objective}"
    grads, metrics = gradients(tiny_model_dir, REWARDS, flag, batch=batch)
    seen = []
    real = Policy.forward

    def forward(self, ids, *lengths):
        seen.append(len(ids))
        return real(self, ids, *lengths)

    monkeypatch.setattr(Policy, "forward", forward)
    same, later = gradients(tiny_model_dir, REWARDS, flag, batch=batch)  # no step in between
    assert sum(seen) == 2 * G  # the third group's rewards are equal
    assert later["loss"] == pytest.approx(metrics["loss"], abs=1e-7)
    for name, grad in grads.items():
        torch.testing.assert_close(same[name], grad, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("objective", ["dr_grpo", "maxent", "flow"])
@pytest.mark.parametrize("budget", [10_000, 40])
@pytest.mark.parametrize("factor", [1, 0], ids=["one group at rest", "all"])
def test_a_row_that_is_not_finite_spoils_the_gradient_also_where_it_goes_forward_only(
    tiny_model_dir, monkeypatch, objective, budget, factor
):
    real = Policy.forward

    def forward(self, ids, *lengths):
        logps, entropy = real(self, ids, *lengths)
        third_group = ids[:, :1] == 7  # of equal rewards
        return logps * torch.where(third_group, math.nan, 1.0), entropy

    monkeypatch.setattr(Policy, "forward", forward)
    grads, metrics = gradients(
        tiny_model_dir,
        REWARDS * factor,
        f"--objective={objective}",
        f"--max_tokens_per_micro_batch={budget}",
    )
    # maxent and flow leave the group out
    assert all(g.isnan().any() for g in grads.values())
    assert math.isnan(metrics["loss"]) == (objective == "dr_grpo")


def test_a_reference_in_cpu_memory_is_on_the_device_for_its_forwards_only(monkeypatch):
    moves = []
    reference = SimpleNamespace(to=lambda device: moves.append(torch.device(device).type))
    monkeypatch.setattr(learner, "forward_rows", lambda *args: moves.append("scored"))
    batch = {"ids": torch.zeros(1, device="meta")}
    for place, wanted in (("cpu", ["meta", "scored", "cpu"]), ("device", ["scored"])):
        moves.clear()
        learner.reference_logps(reference, batch, None, {"reference_placement": place})
        assert moves == wanted


def test_a_kl_term_leaves_no_row_idle():
    active = torch.tensor([True, True, False])
    targets = GroupTargets(REWARDS, active, advantages=REWARDS - REWARDS.mean(1, keepdim=True))
    for flags, beta, some in (
        (["--objective=dr_grpo"], 0.1, False),
        (["--objective=dr_grpo"], 0.0, True),
        (["--objective=maxent"], 0.1, True),
        (["--objective=maxent", "--maxent_kl=True"], 0.1, False),
        (["--objective=xdr"], 0.1, False),
        (["--objective=xdr", "--xdr_ref_tilt=True"], 0.1, True),
    ):
        plain = ["--model=none", f"--num_generations={G}", "--beta=0.1"]
        c = load_config([*plain, "--max_tokens_per_micro_batch=16384", *flags])
        rests = resting_rows(targets, beta, c)
        assert rests.tolist() == [False] * 8 + [some] * 4, flags


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_micro_batches_of_any_size_give_the_same_gradient(tiny_model_dir, objective):
    flags = all_terms(objective)
    whole, metrics = gradients(tiny_model_dir, REWARDS, *flags)
    for budget in (16, 30, 60):  # 16 cuts every group, 60 holds one
        limit = f"--max_tokens_per_micro_batch={budget}"
        split, same = gradients(tiny_model_dir, REWARDS, *flags, limit)
        assert same["loss"] == pytest.approx(metrics["loss"], rel=1e-5, abs=1e-7)
        atol = 1e-5 * largest(whole)
        for name, gradient in whole.items():
            assert torch.allclose(split[name], gradient, rtol=1e-4, atol=atol), name


def test_gradient_checkpointing_gives_the_same_gradient(tiny_model_dir):
    plain, _ = gradients(tiny_model_dir, REWARDS)
    recomputed, _ = gradients(tiny_model_dir, REWARDS, "--gradient_checkpointing=True")
    for name, gradient in plain.items():
        assert torch.allclose(recomputed[name], gradient, rtol=1e-5, atol=1e-7), name


def test_xdr_at_infinite_tau_is_dr_grpo_to_the_bit(tiny_model_dir):
    infinite, _ = gradients(tiny_model_dir, REWARDS, "--objective=xdr", "--maxent_tau=inf")
    plain, _ = gradients(tiny_model_dir, REWARDS, "--objective=dr_grpo")
    finite, _ = gradients(tiny_model_dir, REWARDS, "--objective=xdr", "--maxent_tau=0.3")
    assert all(torch.equal(infinite[name], plain[name]) for name in plain)
    assert not all(torch.equal(finite[name], plain[name]) for name in plain)


def test_the_first_gradient_is_reinforce(tiny_model_dir):
    """dr_grpo on policy: -sum_i A_i * d sum_t logp / (N * L), computed here with full logits and
    plain autograd."""
    from transformers import AutoModelForCausalLM

    flags = ["--objective=dr_grpo", "--importance_sampling=none"]
    ours, _ = gradients(tiny_model_dir, REWARDS, *flags)
    lm = AutoModelForCausalLM.from_pretrained(tiny_model_dir, dtype=torch.float32)
    batch = batch_of()
    advantages = (REWARDS - REWARDS.mean(1, keepdim=True)).flatten()
    loss = 0.0
    for i in range(P * G):
        n = int(batch["prompt_lengths"][i])
        t = int(batch["lengths"][i])
        ids = batch["ids"][i, : n + t]
        logps = lm(ids[None]).logits[0].log_softmax(1)[:-1].gather(1, ids[1:, None])[:, 0]
        # prompt tokens have no loss, the EOS has
        loss = loss - advantages[i] * logps[n - 1 :].sum() / (P * G * L)
    loss.backward()
    for name, p in lm.named_parameters():
        assert torch.allclose(ours[name], p.grad, rtol=1e-4, atol=1e-7), name


def test_padding_is_not_trained(tiny_model_dir):
    base, _ = gradients(tiny_model_dir, REWARDS, "--objective=maxent")
    padded = batch_of()
    padded["ids"] = torch.nn.functional.pad(padded["ids"], (0, 5), value=77)
    padded["sampler_logps"] = torch.nn.functional.pad(padded["sampler_logps"], (0, 5), value=3.0)
    same, _ = gradients(tiny_model_dir, REWARDS, "--objective=maxent", batch=padded)
    assert all(torch.equal(same[name], base[name]) for name in base)


def test_a_batch_is_not_changed_but_for_its_old_logps(tiny_model_dir):
    batch, before = batch_of(), batch_of()
    gradients(tiny_model_dir, REWARDS, "--objective=maxent", batch=batch)
    assert set(batch) == {*before, "old_logps"}
    assert all(torch.equal(batch[k], before[k]) for k in before)


def test_a_sampler_with_other_weights_stops_the_run(tiny_model_dir):
    batch = batch_of()
    gradients(tiny_model_dir, REWARDS, "--objective=maxent", batch=batch)
    batch["sampler_logps"] = batch["old_logps"].clone()
    assert sampler_mismatch(batch, 0.001)["sampling/sampling_logp_difference/mean"] == 0
    batch["sampler_logps"] = batch["old_logps"] - 0.2
    with pytest.raises(RunStopped, match=r"0\.2 nats"):
        sampler_mismatch(batch, 0.1)
    batch["sampler_logps"][0, 0] = math.nan  # no comparison with it is true
    with pytest.raises(RunStopped, match="nan nats"):
        sampler_mismatch(batch, 0.1)


def test_a_limit_of_0_which_is_not_off_shows_the_rounding_that_it_stops_for(tiny_model_dir):
    batch = batch_of()
    gradients(tiny_model_dir, REWARDS, "--objective=maxent", batch=batch)
    batch["sampler_logps"] = batch["old_logps"] * (1 - 1e-6)
    with pytest.raises(RunStopped, match=r"by \d\.\d+e-0[67] nats .*; -1, not 0, turns"):
        sampler_mismatch(batch, 0.0)


def test_a_resume_says_that_the_rate_is_another(monkeypatch):
    c = {"learning_rate": 1.0, "warmup_steps": 0, "max_steps": 8, "lr_scheduler_type": "linear"}
    monkeypatch.setattr(train.checkpoint, "settings_of", lambda path: c)
    said = train.rate_change("it", 8, {**c, "max_steps": 16})
    assert said == "the learning rate goes on at 0.5, where it would have had 0"
    assert train.rate_change("it", 4, c) == ""
    assert train.rate_change("it", 8, c) == ""
    assert train.rate_change("it", 4, {**c, "max_steps": 4}) == ""  # no step is left
    c = {**c, "lr_scheduler_type": "of a stranger"}
    assert train.rate_change("it", 8, {**c, "max_steps": 16}) == ""


def test_learning_rate_warms_up_and_decays():
    c = {"learning_rate": 1.0, "warmup_steps": 4, "max_steps": 12, "lr_scheduler_type": "cosine"}
    rates = [train.learning_rate_at(step, c) for step in range(13)]
    assert rates[:5] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert rates[8] == pytest.approx(0.5)
    assert rates[12] == pytest.approx(0.0)
    linear = {**c, "lr_scheduler_type": "linear"}
    assert [train.learning_rate_at(step, linear) for step in (4, 8, 12)] == [1.0, 0.5, 0.0]
    assert train.learning_rate_at(11, {**c, "lr_scheduler_type": "constant"}) == 1.0
    with pytest.raises(ValueError, match="no lr_scheduler_type='inverse_sqrt'"):  # not constant
        train.learning_rate_at(11, {**c, "lr_scheduler_type": "inverse_sqrt"})


# --- InfoSeed

# 3 prompts x 2 seeds
SEEDED = [
    {"completion_ids": [20 + 7 * i % 50, 30 + i, 0][i % 2 :], "logprobs": [-1.0] * (3 - i % 2)}
    for i in range(6)
]
PROMPTS = [{"prompt_ids": [5 + x] * (2 + x)} for x in range(3)]
LIVED = SimpleNamespace(
    prompts=PROMPTS,
    rollouts=[{**r, "seed_id": i % 2} for i, r in enumerate(SEEDED)],
    rewards=torch.zeros(3, 2),
)


def seed_gradients(model, *flags) -> tuple[dict, dict]:
    meet()
    torch.manual_seed(0)
    c = load_config(
        [
            f"--model={model}",
            "--info_seed_num_seeds=2",
            "--info_seed_lambda=1",
            *flags,
        ]
    )
    engine = train.load_policy(c, torch.device("cpu"))
    metrics = infoseed.Seeds(engine, LIVED, c, "cpu").accumulate_gradients(update=0)
    grads = {}
    for name, p in engine.module.named_parameters():
        if p.grad is not None:
            grads[name] = p.grad.clone()
    return grads, metrics


@pytest.mark.parametrize(
    "kind, pooling", list(itertools.product(("infonce", "ce"), ("mean", "last")))
)
def test_the_loss_reaches_the_policy_and_micro_batches_do_not_change_it(
    tiny_model_dir, kind, pooling
):
    flags = [f"--info_seed_loss_type={kind}", f"--info_seed_pooling={pooling}"]
    whole, metrics = seed_gradients(tiny_model_dir, *flags)
    split, same = seed_gradients(tiny_model_dir, *flags, "--max_tokens_per_micro_batch=8")
    # these take the rows by their length, and each feature goes back to its row
    unpacked = [*flags, "--pack_sequences=False", "--max_tokens_per_micro_batch=8"]
    padded, again = seed_gradients(tiny_model_dir, *unpacked)
    for other in (same, again):
        assert other["seed/loss"] == pytest.approx(metrics["seed/loss"], rel=1e-5)
    assert whole["lm.model.layers.0.mlp.up_proj.weight"].abs().max() > 1e-4
    assert ("seed_head.weight" in whole) == (kind == "ce")
    for name, gradient in whole.items():
        atol = 1e-5 * gradient.abs().max().item()
        torch.testing.assert_close(split[name], gradient, rtol=1e-4, atol=atol)
        torch.testing.assert_close(padded[name], gradient, rtol=1e-4, atol=atol)


def test_a_second_update_contrasts_the_features_of_the_weights_as_they_are_now(tiny_model_dir):
    meet()
    c = load_config([f"--model={tiny_model_dir}", "--info_seed_num_seeds=2"])
    c |= {"info_seed_lambda": 1.0, "info_seed_loss_type": "infonce"}
    engine = train.load_policy(c, torch.device("cpu"))
    seeds = infoseed.Seeds(engine, LIVED, c, "cpu")
    with torch.no_grad():
        for i, parameter in enumerate(engine.module.parameters()):
            parameter += 0.1 * torch.randn(parameter.shape, generator=torch.manual_seed(i))
    moved = infoseed.features(engine, seeds.batch, c)[0]
    wanted = infoseed.info_nce(moved, 2, c["info_seed_temperature"]).item()
    before = seeds.accumulate_gradients(update=0)["seed/loss"]
    assert seeds.accumulate_gradients(update=1)["seed/loss"] == pytest.approx(wanted, rel=1e-5)
    assert abs(before - wanted) > 0.01


@pytest.mark.parametrize("kind", ["infonce", "ce"])
def test_the_gradient_is_that_of_the_loss(tiny_model_dir, kind):
    """A step against it lowers the loss by about its squared length: nothing detached, no sign
    turned, no factor lost."""
    meet()
    torch.manual_seed(0)
    c = load_config(
        [
            f"--model={tiny_model_dir}",
            "--info_seed_num_seeds=2",
            "--info_seed_lambda=2",
            f"--info_seed_loss_type={kind}",
        ]
    )
    engine = train.load_policy(c, torch.device("cpu"))
    seeds = infoseed.Seeds(engine, LIVED, c, "cpu")

    def loss():
        h, log_q = infoseed.features(engine, seeds.batch, c)
        if kind == "infonce":
            return infoseed.info_nce(h, 2, 0.1).item()
        seed = torch.arange(6) % 2
        return -log_q.gather(1, seed[:, None]).mean().item()

    before = loss()
    seeds.accumulate_gradients(update=0)
    parameters = [p for p in engine.module.parameters() if p.grad is not None]
    squared = sum(p.grad.square().sum().item() for p in parameters)
    rate = 0.002 * before / squared
    with torch.no_grad():
        for p in parameters:
            p -= rate * p.grad
    # lambda = 2: the gradient is twice that of the loss
    assert before - loss() == pytest.approx(rate * squared / 2, rel=0.15)
