"""Configs that between them use every objective and every choice of the losses."""

import pytest
from loss_steps import INF

import checks

TILTED = dict(objective="xdr", beta=0.3, xdr_ref_tilt=True)
EVERY_XDR = TILTED | dict(xdr_utility="surrogate", xdr_mode_adaptive_tau=True)
CASES = [
    # each objective as it is
    dict(objective="grpo"),
    dict(objective="dapo"),
    dict(objective="dr_grpo"),
    dict(objective="gspo"),
    dict(objective="cispo"),
    dict(objective="seed_grpo"),
    dict(objective="token_entropy"),
    dict(objective="xdr"),
    dict(objective="maxent"),
    dict(objective="maxrl"),
    dict(objective="pkpo"),
    dict(objective="flow"),
    # and with what changes it
    dict(objective="maxrl", beta=0.3, delta=1.4),
    dict(objective="maxrl", mode_entropy_coef=0.3),
    dict(objective="grpo", scale_rewards="mean"),
    dict(objective="pkpo", pkpo_k=1),
    dict(objective="pkpo", pkpo_k=2),
    dict(objective="pkpo", pkpo_k=3),
    dict(objective="pkpo", beta=0.3, policy_entropy_bonus_coef=0.4),
    dict(objective="flow", beta=0.3, maxent_q_epsilon=0.02),
    dict(objective="flow", maxent_score_norm="sum", maxent_tau=3.0, maxent_score_scale=0.5),
    dict(objective="flow", maxent_score_norm="constant", beta=0.3, maxent_kl=True),
    dict(objective="flow", maxent_tau=INF, maxent_skip_equal_groups="none"),
    dict(objective="flow", maxent_group_weight="spread"),
    dict(objective="maxent", maxent_group_weight="spread", beta=0.3),
    dict(objective="maxent", maxent_group_weight="spread", maxent_loss="policy_gradient"),
    dict(objective="maxent", maxent_group_weight="spread", maxent_loss="mle"),
    dict(objective="maxent", maxent_score_scale=4.0, beta=0.3, maxent_tau=0.1),
    dict(objective="maxent", maxent_score_scale=2.0, unlikeliness_coef=0.5),
    dict(objective="dr_grpo", unlikeliness_coef=0.25),
    dict(objective="grpo", unlikeliness_coef=0.25, policy_entropy_bonus_coef=0.4),
    dict(objective="grpo", beta=0.3, delta=1.4),
    dict(objective="grpo", importance_sampling="sequence_truncate", scale_rewards="batch"),
    dict(objective="dapo", beta=0.3),
    dict(objective="dapo", importance_sampling="token_mask"),
    dict(objective="dapo", importance_sampling="sequence_geometric", delta=1.4),
    dict(objective="dr_grpo", beta=0.3, importance_sampling="none"),
    dict(objective="dr_grpo", beta=0.3, kl_loss_type="k2", importance_sampling="sequence_mask"),
    dict(objective="gspo", beta=0.3, delta=1.4),
    dict(objective="gspo", importance_sampling="sequence_truncate"),
    dict(objective="gspo", importance_sampling="sequence_mask", beta=0.3, kl_loss_type="k2"),
    dict(objective="cispo", beta=0.3, kl_loss_type="k2"),
    dict(objective="cispo", importance_sampling="token_mask"),
    dict(objective="cispo", importance_sampling="sequence_truncate"),
    dict(objective="seed_grpo", beta=0.3, scale_rewards="group"),
    dict(objective="token_entropy", beta=0.3, delta=1.4),
    dict(objective="xdr", beta=0.3),
    dict(objective="xdr", maxent_tau=0.1, delta=1.4),
    dict(objective="xdr", maxent_tau=0.0),
    dict(objective="xdr", maxent_tau=INF, beta=0.3),
    dict(objective="xdr", xdr_utility="surrogate"),
    dict(objective="xdr", xdr_mode_adaptive_tau=True, beta=0.3, kl_loss_type="k2"),
    TILTED,
    TILTED | dict(maxent_tau=0.0, maxent_score_norm="sum"),
    EVERY_XDR,
    EVERY_XDR
    | dict(
        maxent_score_norm="constant",
        scale_rewards="group",
        importance_sampling="sequence_mask",
        mode_entropy_coef=0.3,
    ),
    dict(objective="dr_grpo", policy_entropy_bonus_coef=0.4),
    dict(objective="grpo", policy_entropy_bonus_coef=0.4, beta=0.3),
    dict(objective="xdr", policy_entropy_bonus_coef=0.4),
    dict(objective="maxent", policy_entropy_bonus_coef=0.4, maxent_skip_equal_groups="none"),
    dict(objective="dr_grpo", mode_entropy_coef=0.3),
    dict(objective="grpo", mode_entropy_coef=0.3, mode_entropy_score_norm="length", beta=0.3),
    dict(objective="gspo", mode_entropy_coef=0.3, mode_entropy_score_norm="constant"),
    dict(objective="token_entropy", mode_entropy_coef=0.3, policy_entropy_bonus_coef=0.4),
    dict(objective="maxent", beta=0.3, maxent_q_epsilon=0.02),
    dict(objective="maxent", maxent_score_norm="constant", beta=0.3, maxent_tau=0.0),
    dict(
        objective="maxent",
        maxent_score_norm="sum",
        beta=0.3,
        maxent_tau=3.0,
        maxent_skip_equal_groups="wrong",
    ),
    dict(objective="maxent", beta=0.3, maxent_kl=True),
    dict(
        objective="maxent",
        beta=0.3,
        maxent_kl=True,
        kl_loss_type="k2",
        maxent_skip_equal_groups="none",
    ),
    dict(objective="maxent", maxent_loss="floored"),
    dict(objective="maxent", maxent_loss="floored", beta=0.3, maxent_score_norm="sum"),
    dict(objective="maxent", maxent_loss="mle"),
    dict(
        objective="maxent",
        maxent_loss="mle",
        maxent_score_norm="sum",
        beta=0.3,
        maxent_skip_equal_groups="none",
    ),
    dict(objective="maxent", maxent_loss="policy_gradient"),
    dict(
        objective="maxent",
        maxent_loss="policy_gradient",
        beta=0.3,
        maxent_kl=True,
        delta=1.4,
        importance_sampling="sequence_truncate",
    ),
]
OBJECTIVES = tuple(checks.OBJECTIVES)


def name_of(case):
    parts = []
    for key, value in case.items():
        parts.append(value if isinstance(value, str) else f"{key}={value}")
    return "-".join(parts)


cases = pytest.mark.parametrize("case", CASES, ids=name_of)


def sensible(step, case):
    """The config refuses groups of one; only these two would notice, which divide by log G and by a
    std."""
    if step.G > 1:
        return True
    return case["objective"] != "seed_grpo" and "policy_entropy_bonus_coef" not in case
