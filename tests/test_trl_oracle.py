"""Losses of the policy-gradient family are those of TRL 1.16's GRPOTrainer, value and gradient, on
the same batch.

TRL's own code runs: GRPOTrainer._generate_and_score_completions (advantages, sampler correction)
and then _compute_loss, unbound, on a stand-in for `self`. Replaced by fixed tensors are the things
around the algorithm: generation (token ids and the sampler's log-probs), the reward functions, the
forward passes (_get_per_token_logps_and_entropies returns log-probs of the policy, the old policy
or the reference, depending on the model it is given) and the accelerator of a single process. Our
side is loss_steps.ours: learner.group_targets and token_loss with a config. What TRL calls
otherwise or does otherwise: - gspo is loss_type "grpo" with importance_sampling_level "sequence";
cispo's cap is epsilon_high itself, not 1 + epsilon_high. - bnpo is dapo in one micro-batch; with
several it divides each by its own tokens, which ours never does. - gspo's clip ratio is a share of
rows there, of tokens here (each row counts with its length). - delta caps the ratio before the clip
counts are taken: they agree only for delta above 1 + epsilon_high. -
sampling/importance_sampling_ratio/* are of the ratio after the cap there, before it here. - Groups
of equal rewards have rounding noise as advantages there (see the last test). TRL's KL has, by
default (use_bias_correction_kl), the value of k3 and on policy the gradient of k2.
sequence_geometric and all of maxent, xdr, seed_grpo and mode entropy have no counterpart in TRL;
its entropy bonus is a mean over the tokens of a micro-batch, not over N * L as in token_entropy."""

from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch
from loss_steps import (
    CAP,
    CISPO,
    HIGH,
    LOW,
    L,
    assert_same,
    changed,
    close,
    config,
    make_step,
    ours,
    targets_of,
    value_and_grad,
)

import checks
import learner
import loss
from ranks import start_distributed

STEP = make_step(
    torch.tensor([[1.0, 0, 0, 1], [0, 0.5, 0.5, -1], [1, 1, 1, 1]]),
    [3, 1, 4, 2, 5, 5, 1, 2, 3, 3, 1, 5],
    10,
)
NAMES = {  # objective: TRL's (loss_type, importance_sampling_level)
    "grpo": ("grpo", "token"),
    "dr_grpo": ("dr_grpo", "token"),
    "dapo": ("dapo", "token"),
    "bnpo": ("bnpo", "token"),
    "gspo": ("grpo", "sequence"),
    "cispo": ("cispo", "token"),
}
SAMPLINGS = ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")


def grpo_trainer():
    """TRL's class. Imported when it is called: it brings vLLM into every worker of pytest."""
    from trl.trainer.grpo_trainer import GRPOTrainer

    return GRPOTrainer


def trl_trainer(step, objective, scale, case, off_policy=True):
    """A stand-in for GRPOTrainer that generates, rewards and scores exactly the rows of `step`.
    case: beta, delta, importance_sampling, where they are not off."""
    beta = case.get("beta", 0.0)
    delta = case.get("delta", -1.0)
    importance_sampling = case.get("importance_sampling", "none")
    policy = SimpleNamespace(training=True, is_gradient_checkpointing=False)
    reference = SimpleNamespace(training=True, is_gradient_checkpointing=False)
    args = SimpleNamespace(
        per_device_train_batch_size=12,
        gradient_accumulation_steps=1,
        steps_per_generation=1,
        gradient_checkpointing_kwargs=None,
        delta=delta if delta > 0 else None,
        use_bias_correction_kl=False,
    )
    loss_type, level = NAMES[objective]
    corrected = importance_sampling != "none"

    def generate(prompts):
        completions = [[5] * n for n in step.lengths.tolist()]
        sampler = [row[:n].tolist() for row, n in zip(step.sampler, step.lengths)]
        prompt_ids = [[1, 2]] * len(prompts)
        texts = ["x"] * len(prompts)
        return prompt_ids, completions, None, texts, sampler, {}, None, None

    def forward(model, *args, **kwargs):
        logps = step.old if model is policy else step.ref
        if torch.is_tensor(model):  # in _compute_loss, which differentiates by it
            logps = model
        return logps, torch.zeros_like(step.old), None

    return SimpleNamespace(
        _generate=generate,
        _calculate_rewards=lambda *a: step.rewards.reshape(-1, 1),
        _get_per_token_logps_and_entropies=forward,
        accelerator=SimpleNamespace(
            device="cpu",
            process_index=0,
            num_processes=1,
            gather=lambda x: x,
            reduce=lambda x, reduction: x,
        ),
        model=policy,
        ref_model=reference,
        args=args,
        loss_type=loss_type,
        importance_sampling_level=level,
        scale_rewards=scale,
        beta=beta,
        epsilon_low=LOW,
        epsilon_high=CISPO if objective == "cispo" else HIGH,
        num_generations=step.G,
        num_iterations=2 if off_policy else 1,
        max_completion_length=L,
        current_gradient_accumulation_steps=1,
        use_vllm=corrected,
        vllm_importance_sampling_correction=corrected,
        vllm_importance_sampling_mode=importance_sampling,
        vllm_importance_sampling_clip_min=None,
        vllm_importance_sampling_clip_max=CAP,
        multi_objective_aggregation="sum_then_normalize",
        reward_weights=torch.ones(1),
        reward_funcs=[None],
        reward_func_names=["r"],
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        mask_truncated_completions=False,
        aux_loss_enabled=False,
        log_multimodal=False,
        _entropy_bonus_enabled=False,
        environment_factories=None,
        environments=None,
        tools=None,
        pad_to_multiple_of=None,
        _tokenizer=SimpleNamespace(pad_token_id=0),
        eos_token_ids=[5],
        _metrics={"train": defaultdict(list)},
        _logs=defaultdict(list, rewards=defaultdict(list), extra=defaultdict(list)),
        _pending_extra_logs={},
        _pending_metrics={},
    )


def trl_batch(trainer, step=STEP):
    prompts = [{"prompt": "p"}] * step.rewards.numel()
    return grpo_trainer()._generate_and_score_completions(trainer, prompts)


def trl_loss(trainer, logps, batch):
    return grpo_trainer()._compute_loss(trainer, logps, batch)


CASES = [
    dict(),
    dict(beta=0.3),
    dict(delta=1.4),
    dict(importance_sampling="token_truncate"),
    dict(importance_sampling="token_mask"),
    dict(importance_sampling="sequence_truncate"),
    dict(importance_sampling="sequence_mask"),
    dict(beta=0.3, delta=1.4, importance_sampling="token_truncate"),
    dict(beta=0.3, delta=1.4, importance_sampling="sequence_mask"),
]


def name_of(case):
    return "-".join(map(str, case.values())) or "plain"


@pytest.mark.parametrize("case", CASES, ids=name_of)
@pytest.mark.parametrize("objective", NAMES)
@pytest.mark.parametrize("off_policy", [False, True], ids=["on-policy", "off-policy"])
def test_loss_gradient_and_metrics_equal_trl(objective, case, off_policy):
    name = "dapo" if objective == "bnpo" else objective
    step = STEP if off_policy else changed(STEP, logps=STEP.old)
    case = {"importance_sampling": "none", **case}
    trainer = trl_trainer(step, objective, checks.OBJECTIVES[name].scale, case, off_policy)
    batch = trl_batch(trainer)
    needs_old = off_policy or case["importance_sampling"] != "none"
    assert ("old_per_token_logps" in batch) == needs_old
    value, grad = value_and_grad(lambda x: trl_loss(trainer, x, batch), step.logps)
    assert grad.abs().max() > 1e-3

    metrics = {key: values[0] for key, values in trainer._metrics["train"].items()}
    tokens = int(step.lengths.sum())
    result = ours(step, {"objective": name, **case})
    theirs = SimpleNamespace(
        value=value.item(),
        grad=torch.stack([grad, torch.zeros_like(grad)]),
        low=result.low,  # compared below, as shares
        high=result.high,
        kl=metrics.get("kl", 0.0) * tokens,
    )
    assert_same(result, theirs)

    low = result.low / tokens
    high = result.high / tokens
    if objective == "gspo":  # rows, before the learner counts them by their tokens
        c = config(step.G, {"objective": name, **case})
        advantages = targets_of(step, c).advantages.flatten()
        part = {"old_logps": step.old, "lengths": step.lengths, "advantages": advantages}
        _, below, above = learner.surrogate(step.logps, part, c)
        low = below.float().mean()
        high = above.float().mean()
    if objective == "cispo":
        close(high, metrics["cispo_clip_ratio"])
        assert low == 0
        assert (high > 0) == off_policy
    else:
        close(low, metrics["clip_ratio/low_mean"])
        close(high, metrics["clip_ratio/high_mean"])
        assert (low > 0) == (high > 0) == off_policy  # off-policy, both sides do clip


@pytest.mark.parametrize("objective", ["grpo", "dr_grpo", "dapo"])
def test_trls_default_kl_has_the_gradient_of_k2_on_policy(objective):
    step = changed(STEP, logps=STEP.old)
    trainer = trl_trainer(step, objective, checks.OBJECTIVES[objective].scale, {"beta": 0.3}, False)
    trainer.args.use_bias_correction_kl = True
    batch = trl_batch(trainer)
    _, grad = value_and_grad(lambda x: trl_loss(trainer, x, batch), step.logps)
    case = {"objective": objective, "beta": 0.3, "importance_sampling": "none"}
    close(ours(step, case | {"kl_loss_type": "k2"}).grad[0], grad)
    assert (ours(step, case).grad[0] - grad).abs().max() > 1e-3  # k3, our default


def test_every_case_drives_another_branch_of_trl():
    """Else the comparisons above would prove less than they say. Known to be the same: bnpo and
    dapo, and delta does nothing to cispo."""
    by_value = defaultdict(list)
    for objective in NAMES:
        for case in CASES:
            trainer = trl_trainer(STEP, objective, "group", case)
            value = trl_loss(trainer, STEP.logps, trl_batch(trainer)).item()
            by_value[round(value, 7)].append((objective, *case))
    same = [group for group in by_value.values() if len(group) > 1]
    assert [("cispo",), ("cispo", "delta")] in same
    for group in same:
        names = [name for name, *_ in group]
        assert names == ["dapo", "bnpo"] or names[0] == "cispo"
    assert len(same) == len(CASES) + 1


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_advantages_equal_trl(scale):
    theirs = trl_batch(trl_trainer(STEP, "grpo", scale, {}))["advantages"]
    close(loss.group_advantages(STEP.rewards, scale).flatten(), theirs)


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_sampler_correction_equals_trl(sampling):
    trainer = trl_trainer(STEP, "grpo", "group", {"importance_sampling": sampling})
    theirs = trl_batch(trainer)["importance_sampling_ratio"]
    ratio = loss.importance_ratio(STEP.old, STEP.sampler, STEP.lengths, sampling, CAP)
    assert ratio.shape == theirs.shape == (12, 5 if sampling.startswith("token") else 1)
    if sampling.startswith("token"):
        ratio = ratio[STEP.mask]
        theirs = theirs[STEP.mask]
    at_the_cap = CAP if sampling.endswith("truncate") else 0
    assert (ratio == at_the_cap).any()
    assert (ratio < 1).any()
    close(ratio, theirs)


def test_the_measured_mismatch_equals_trls():
    if not torch.distributed.is_initialized():
        start_distributed()
    trainer = trl_trainer(STEP, "grpo", "group", {"importance_sampling": "token_truncate"})
    trainer.vllm_importance_sampling_clip_max = 1e9  # ours is measured before the cap
    trl_batch(trainer)
    batch = {"old_logps": STEP.old, "sampler_logps": STEP.sampler, "lengths": STEP.lengths}
    metrics = learner.sampler_mismatch(batch, -1)
    theirs = trainer._metrics["train"]
    assert set(metrics) == {key for key in theirs if key.startswith("sampling/")}
    assert len(metrics) == 5
    for key, value in metrics.items():
        close(value, theirs[key][0])


def test_equal_rewards_are_exactly_zero_here_and_rounding_noise_in_trl():
    step = make_step(torch.tensor([[0.1] * 7]), [3] * 7, 0)
    theirs = trl_batch(trl_trainer(step, "grpo", "group", {}), step)["advantages"]
    assert 0 < theirs.abs().max() < 1e-3
    assert (loss.group_advantages(step.rewards, "group") == 0).all()
