"""The losses of grpo, dr_grpo and dapo are those of TRL 1.16's GRPOTrainer, value and gradient, on the same batch.

TRL's own code runs: GRPOTrainer._generate_and_score_completions (advantages, sampler correction) and then _compute_loss,
unbound, on a stand-in for `self`. Replaced by fixed tensors are the things around the algorithm: generation (token ids and
the sampler's log-probs), the reward functions, the forward passes (_get_per_token_logps_and_entropies returns log-probs of
the policy, the old policy or the reference, depending on the model it is given) and the accelerator of a single process.
Our side is test_loss.policy_gradient. One difference is meant: groups of equal rewards (see the last test).
"""
from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch
from test_loss import CAP, HIGH, LOW, L, assert_same, close, make_step, policy_gradient, value_and_grad
from trl.trainer.grpo_trainer import GRPOTrainer

import loss

STEP = make_step(torch.tensor([[1.0, 0, 0, 1], [0, 0.5, 0.5, -1], [1, 1, 1, 1]]), [3, 1, 4, 2, 5, 5, 1, 2, 3, 3, 1, 5], 7)


def trl_trainer(step, loss_type, scale, beta=0.0, delta=-1.0, sampling="none", off_policy=True):
    """A stand-in for GRPOTrainer that generates, rewards and scores exactly the rows of `step`."""
    policy, reference = (SimpleNamespace(training=True, is_gradient_checkpointing=False) for _ in range(2))
    args = SimpleNamespace(per_device_train_batch_size=12, gradient_accumulation_steps=1, steps_per_generation=1, gradient_checkpointing_kwargs=None,
                           delta=delta if delta > 0 else None, use_bias_correction_kl=False)

    def generate(prompts):
        completions = [[5] * n for n in step.lengths.tolist()]
        sampler = [row[:n].tolist() for row, n in zip(step.sampler, step.lengths)]
        return [[1, 2]] * len(prompts), completions, None, ["x"] * len(prompts), sampler, {}, None, None

    def forward(model, *args, **kwargs):
        return (model if torch.is_tensor(model) else step.old if model is policy else step.ref), torch.zeros_like(step.old), None

    return SimpleNamespace(
        _generate=generate, _calculate_rewards=lambda *a: step.rewards.reshape(-1, 1), _get_per_token_logps_and_entropies=forward,
        accelerator=SimpleNamespace(device="cpu", process_index=0, num_processes=1, gather=lambda x: x, reduce=lambda x, reduction: x),
        model=policy, ref_model=reference, args=args, loss_type=loss_type, scale_rewards=scale, beta=beta, epsilon_low=LOW, epsilon_high=HIGH,
        num_generations=step.G, num_iterations=2 if off_policy else 1, max_completion_length=L, current_gradient_accumulation_steps=1,
        use_vllm=sampling != "none", vllm_importance_sampling_correction=sampling != "none", vllm_importance_sampling_mode=sampling,
        vllm_importance_sampling_clip_min=None, vllm_importance_sampling_clip_max=CAP, importance_sampling_level="token",
        multi_objective_aggregation="sum_then_normalize", reward_weights=torch.ones(1), reward_funcs=[None], reward_func_names=["r"],
        top_entropy_quantile=1.0, off_policy_mask_threshold=None, mask_truncated_completions=False, aux_loss_enabled=False, log_multimodal=False,
        _entropy_bonus_enabled=False, environment_factories=None, environments=None, tools=None, pad_to_multiple_of=None,
        _tokenizer=SimpleNamespace(pad_token_id=0), eos_token_ids=[5], _metrics={"train": defaultdict(list)},
        _logs=defaultdict(list, rewards=defaultdict(list), extra=defaultdict(list)), _pending_extra_logs={}, _pending_metrics={})


def trl_batch(trainer):
    return GRPOTrainer._generate_and_score_completions(trainer, [{"prompt": "p"}] * STEP.rewards.numel())


CASES = [dict(), dict(beta=0.3), dict(delta=1.4), dict(sampling="token_truncate"), dict(sampling="token_mask"),
         dict(beta=0.3, delta=1.4, sampling="token_truncate")]


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(case) or "plain")
@pytest.mark.parametrize("objective", ["grpo", "dr_grpo", "dapo", "bnpo"])
@pytest.mark.parametrize("off_policy", [False, True], ids=["on-policy", "off-policy"])
def test_loss_and_gradient_equal_trl(objective, case, off_policy):
    ours = "dapo" if objective == "bnpo" else objective     # the same in one micro-batch
    trainer = trl_trainer(STEP, objective, loss.OWN_SCALE[ours], off_policy=off_policy, **case)
    batch = trl_batch(trainer)
    assert ("old_per_token_logps" in batch) == (off_policy or "sampling" in case)
    logps = STEP.logps if off_policy else STEP.old
    theirs = value_and_grad(lambda x: GRPOTrainer._compute_loss(trainer, x, batch), logps)
    assert theirs[1].abs().max() > 1e-3
    assert_same(value_and_grad(policy_gradient, logps, STEP, ours, **{"sampling": "none"} | case), theirs)

    A = loss.group_advantages(STEP.rewards, loss.OWN_SCALE[ours]).flatten()
    _, low, high = loss.clipped_surrogate(logps, STEP.old, A, LOW, HIGH, case.get("delta", -1.0))
    metrics = trainer._metrics["train"]
    assert low.any().item() == high.any().item() == off_policy      # off-policy, both sides do clip
    for clipped, name in ((low, "clip_ratio/low_mean"), (high, "clip_ratio/high_mean")):
        close((clipped & STEP.mask).sum() / STEP.mask.sum(), metrics[name][0])
    if "beta" in case:
        close((loss.k3_kl(logps, STEP.ref) * STEP.mask).sum() / STEP.mask.sum(), metrics["kl"][0])


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_advantages_equal_trl(scale):
    close(loss.group_advantages(STEP.rewards, scale).flatten(), trl_batch(trl_trainer(STEP, "grpo", scale))["advantages"])


@pytest.mark.parametrize("sampling", ["token_truncate", "token_mask"])
def test_sampler_correction_equals_trl(sampling):
    theirs = trl_batch(trl_trainer(STEP, "grpo", "group", sampling=sampling))["importance_sampling_ratio"]
    ours = loss.importance_ratio(STEP.old, STEP.sampler, sampling, CAP)
    assert (ours[STEP.mask] == (CAP if sampling == "token_truncate" else 0)).any()
    close(ours[STEP.mask], theirs[STEP.mask])


def test_equal_rewards_are_exactly_zero_here_and_rounding_noise_in_trl():
    step = make_step(torch.tensor([[0.1] * 7]), [3] * 7, 0)
    trainer = trl_trainer(step, "grpo", "group")
    theirs = GRPOTrainer._generate_and_score_completions(trainer, [{"prompt": "p"}] * 7)["advantages"]
    assert 0 < theirs.abs().max() < 1e-3
    assert (loss.group_advantages(step.rewards, "group") == 0).all()
