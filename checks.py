"""Validation of a config: errors and warnings, every rule that looks at values alone, one sentence each.

for holds, sentence in claims(config): ...      # common.load_config raises the first that does not hold
for sentence in warn_config(config, vocabulary): ...
"""

import math
import shlex
from typing import NamedTuple

from controllers import steers_beta, steers_tau


class Objective(NamedTuple):
    """All that is true of an objective but its formula, which is in loss.py. The defaults are those of dr_grpo."""

    tokens: str = "constant"  # how terms of tokens are summed: "constant", "row_mean", "token_mean"
    scale: str = "none"  # its own scale_rewards
    ratio: str = "token"  # "token" and "sequence" are clipped, "cispo" is capped
    group_loss: str = ""  # its loss over the scores of a whole group: "listwise"; "" it has none
    weights: str = ""  # what w by tau are: the "target" of the policy, or those of the "rows"
    beta: str = "loss"  # where the reference acts: a KL in the "loss", or it tilts the "weights"
    term: str = ""  # what it adds to dr_grpo: "answer_entropy", "token_entropy"


OBJECTIVES = {
    "maxent": Objective(group_loss="listwise", weights="target", beta="weights"),
    "xdr": Objective(weights="rows"),
    "grpo": Objective(tokens="row_mean", scale="group"),
    "dr_grpo": Objective(),
    "dapo": Objective(tokens="token_mean", scale="group"),
    "gspo": Objective(tokens="row_mean", scale="group", ratio="sequence"),
    "cispo": Objective(tokens="token_mean", scale="group", ratio="cispo"),
    "seed_grpo": Objective(term="answer_entropy"),
    "token_entropy": Objective(term="token_entropy"),
}


def names(wanted) -> str:
    """The objectives of which `wanted` is true, as they stand in sentences."""
    return " and ".join(name for name, objective in OBJECTIVES.items() if wanted(objective))


CHOICES = {
    "dtype": ("auto", "float32", "bfloat16"),
    "long_prompts": ("error", "drop", "truncate"),
    "rollout_engine": ("vllm", "server", "hf"),
    "rollout_ahead": (0, 1),
    "vllm_enforce_eager": ("auto", "yes", "no"),
    "weight_sync": ("disk", "nccl"),
    "objective": tuple(OBJECTIVES),
    "scale_rewards": ("", "group", "batch", "none"),
    "importance_sampling": (
        "token_truncate",
        "token_mask",
        "sequence_truncate",
        "sequence_mask",
        "sequence_geometric",
        "none",
    ),
    "kl_loss_type": ("k3", "k2"),
    "maxent_score_norm": ("length", "constant", "sum"),
    "mode_entropy_score_norm": ("length", "constant", "sum"),
    "maxent_loss": ("listwise", "policy_gradient", "mle"),
    "xdr_utility": ("advantage", "surrogate"),
    "maxent_skip_equal_groups": ("all", "wrong", "none"),
    "controller_meta_method": ("analytic", "first_order", "truncated_backprop"),
    "controller_meta_optimizer": ("sgd", "adam"),
    "info_seed_loss_type": ("infonce", "ce"),
    "info_seed_pooling": ("mean", "last"),
    "lr_scheduler_type": ("constant", "linear", "cosine"),
    "zero_stage": (0, 1, 2, 3),
    "reference_placement": ("device", "sharded", "cpu"),
    "checkpoint_mode": ("full", "shallow"),
    "report_to": ("", "wandb"),
    "wandb_mode": ("online", "offline"),
}
POSITIVE = (
    "prompts_per_step",
    "max_prompt_length",
    "max_completion_length",
    "temperature",
    "maxent_q_temperature",
    "max_steps",
    "learning_rate",
    "reward_timeout",
    "reward_memory_gib",
    "soft_overlong_buffer",
    "max_tokens_per_micro_batch",
    "logprob_chunk_size",
    "max_skipped_steps",
    "importance_sampling_cap",
    "cispo_epsilon_max",
    "maxent_tau_min",
    "beta_min",
    "maxent_tau_lr",
    "controller_meta_lr",
    "info_seed_temperature",
    "controller_meta_update_interval",
    "controller_meta_truncation_steps",
    "controller_meta_virtual_lr",
    "vllm_kv_cache_gib",
    "vllm_gpu_memory_utilization",
    "vllm_tensor_parallel_size",
    "eval_max_prompts",
    "eval_num_generations",
    "eval_seeds",
    "eval_temperature",
    "sft_steps",
    "sft_batch_size",
    "sft_learning_rate",
    "num_iterations",
    "rollout_concurrency",
    "rollout_timeout",
)
NOT_NEGATIVE = (
    "info_seed_lambda",
    "info_seed_reward",
    "beta",
    "maxent_tau",
    "maxent_q_epsilon",
    "mode_entropy_coef",
    "policy_entropy_bonus_coef",
    "token_entropy_coef",
    "seed_grpo_alpha",
    "epsilon",
    "kl_target",
    "kl_horizon",
    "kl_ctl_step_size",
    "maxent_target_horizon",
    "controller_meta_beta_grad_clip",
    "warmup_steps",
    "weight_decay",
    "max_grad_norm",
    "eval_steps",
    "save_total_limit",
    "log_rollouts_steps",
    "seed",
    "reward_workers",
    "generate_max_prompts",
    "keep_every",
    "replay_size",
    "replay_ucb",
    "resample_equal_groups",
)


def claims(c: dict):
    """(whether it holds, the sentence if it doesn't) of one thing after the other; a later one may rely on those before it."""
    yield from value_claims(c)
    yield from group_claims(c)
    yield from data_claims(c)
    yield from objective_claims(c)
    yield from controller_claims(c)


def is_a_command(text: str) -> bool:
    try:
        shlex.split(text)
    except ValueError:
        return False
    return True


def value_claims(c: dict):
    """Each key by itself."""
    for key, choices in CHOICES.items():
        yield (
            c[key] in choices,
            f"{key}={c[key]!r} must be one of {', '.join(map(repr, choices))}",
        )
    for key in POSITIVE:
        yield (c[key] > 0, f"{key}={c[key]} must be greater than 0")
    for key in NOT_NEGATIVE:
        yield (c[key] >= 0, f"{key}={c[key]} must not be negative")
    for key, value in c.items():
        yield (value != math.inf or key == "maxent_tau", f"{key}=inf must be finite")
    yield (
        not c["eval_command"] or "{checkpoint}" in c["eval_command"],
        f"eval_command={c['eval_command']!r} must hold {{checkpoint}}, its path",
    )
    yield (
        is_a_command(c["eval_command"]),
        f"eval_command={c['eval_command']!r} has a quote that is not closed",
    )
    yield (c["output_dir"].strip() != "", f"output_dir={c['output_dir']!r} is empty")
    for key in (
        "output_dir",
        "model",
        "dataset_name",
        "eval_dataset_name",
        "resume_from_checkpoint",
    ):
        yield (
            not c[key].startswith("~"),
            f"{key}={c[key]!r}: no shell has replaced the ~; write $HOME or the whole path",
        )
    for key in ("output_dir", "model", "weight_sync_dir", "resume_from_checkpoint"):
        yield (
            not set(c[key]) & set("*?["),
            f"{key}={c[key]!r}: DeepSpeed and vLLM read the signs * ? [ in a path as a pattern and would "
            f"not find the files there: choose, or rename it to, a name without them",
        )
    for key in ("adam_beta1", "adam_beta2"):
        yield (0 <= c[key] < 1, f"{key}={c[key]} must be at least 0 and below 1")
    for key in (
        "max_logp_difference",
        "maxent_target_weight_entropy",
        "maxent_target_excess_entropy",
        "maxent_target_final",
        "maxent_tau_warmup_steps",
        "save_steps",
        "controller_meta_tau_lr",
        "controller_meta_beta_lr",
    ):
        yield (c[key] == -1 or c[key] >= 0, f"{key}={c[key]} must be -1 or not negative")
    yield (
        c["vllm_gpu_memory_utilization"] < 1,
        f"vllm_gpu_memory_utilization={c['vllm_gpu_memory_utilization']} must be below 1: the learner needs memory too",
    )


def rows_of_a_group(c: dict) -> int:
    """With the seeded rows of InfoSeed."""
    return c["num_generations"] + (c["info_seed_num_seeds"] if c["info_seed_enabled"] else 0)


def group_claims(c: dict):
    """Sizes of groups, and what engine and optimizer can do together."""
    G = c["num_generations"]
    yield (
        G >= 2,
        f"num_generations={G} must be at least 2: a completion is compared with its group (the group's mean, its standard deviation "
        f"under scale_rewards={c['scale_rewards']!r}), and alone it has advantage 0",
    )
    if c["info_seed_enabled"]:
        yield (
            "{seed}" in c["info_seed_prompt_template"],
            f"info_seed_prompt_template={c['info_seed_prompt_template']!r} must hold {{seed}}",
        )
        yield (
            c["info_seed_loss_type"] != "ce" or c["info_seed_lambda"] > 0,
            "info_seed_loss_type='ce' needs info_seed_lambda > 0: its head would never be "
            "trained and stay random; 'infonce' has none",
        )
        yield (
            c["info_seed_num_seeds"] >= 2,
            f"info_seed_num_seeds={c['info_seed_num_seeds']} must be at least 2: one seed can't be told from another",
        )
        yield (
            c["prompts_per_step"] >= 2,
            "info_seed_enabled=True needs prompts_per_step of at least 2: a seed's completions are compared over prompts",
        )
    G = rows_of_a_group(c)
    yield (
        c["maxent_q_epsilon"] * G <= 1,
        f"maxent_q_epsilon={c['maxent_q_epsilon']} must be at most 1 / (rows of a group) = {1 / G:.4f}",
    )
    yield (
        not c["rollout_ahead"] or c["rollout_engine"] == "server",
        f"rollout_ahead=1 needs rollout_engine='server': with {c['rollout_engine']!r} sampling and learning share a process",
    )
    yield (
        c["rollout_timeout"] <= 1500,
        f"rollout_timeout={c['rollout_timeout']} must be at most 1500 seconds: a prompt is tried up to six times, and ranks "
        f"give up on each other after three hours",
    )
    yield (
        not (c["offload_optimizer"] and c["zero_stage"] == 0),
        "offload_optimizer=True needs zero_stage 1, 2 or 3",
    )


def data_claims(c: dict):
    """Prompts and rewards."""
    yield (len(c["reward_funcs"]) > 0, "reward_funcs=[] names no reward function")
    yield (
        len(c["reward_funcs"]) == len(c["reward_weights"]),
        f"reward_weights={c['reward_weights']} must hold one weight for each of reward_funcs={c['reward_funcs']}",
    )
    yield (
        all(type(w) in (int, float) and math.isfinite(w) for w in c["reward_weights"]),
        f"reward_weights={c['reward_weights']} must be finite numbers",
    )
    yield (
        all(type(name) is str for name in c["dataset_more_columns"]),
        f"dataset_more_columns={c['dataset_more_columns']} must be a list of names",
    )
    for key, lowest in (("temperature_schedule", 1e-6), ("easy_schedule", 0)):
        yield (
            all(
                type(step) is int
                and step >= 0
                and type(value) in (int, float)
                and lowest <= value < math.inf
                for step, value in c[key].items()
            ),
            f"{key}={c[key]!r} must be {{step: value}} with whole steps from 0 on and values of at least {lowest}",
        )
    yield (
        all(value <= 1 for value in c["easy_schedule"].values()),
        f"easy_schedule={c['easy_schedule']!r}: a share of prompts is at most 1",
    )
    yield (
        not c["push_to_hub"] or c["save_steps"] >= 0,
        f"push_to_hub={c['push_to_hub']!r} uploads checkpoints, and save_steps=-1 makes none",
    )
    yield (
        bool(c["easy_schedule"]) == bool(c["easy_dataset_name"]),
        f"easy_schedule={c['easy_schedule']!r} and easy_dataset_name={c['easy_dataset_name']!r} need each other",
    )
    yield (
        not (c["dataset_mixture"] and c["dataset_name"]),
        f"dataset_mixture and dataset_name={c['dataset_name']!r} are both set: put the dataset into the mixture, with --dataset_name= empty",
    )
    yield (
        0 <= c["replay_fraction"] <= 1,
        f"replay_fraction={c['replay_fraction']} is a share of a step's prompts, between 0 and 1",
    )
    yield (
        0 <= c["max_reward_failures"] <= 1,
        f"max_reward_failures={c['max_reward_failures']} is a share of a step, between 0 and 1",
    )
    yield (
        "soft_overlong" not in c["reward_funcs"]
        or c["soft_overlong_buffer"] <= c["max_completion_length"],
        f"soft_overlong_buffer={c['soft_overlong_buffer']} must not be above max_completion_length={c['max_completion_length']}",
    )


def objective_claims(c: dict):
    """Terms of the loss that exclude or need each other."""
    yield (
        c["epsilon_high"] == -1 or c["epsilon_high"] >= 0,
        f"epsilon_high={c['epsilon_high']} must be -1 (as epsilon) or not negative",
    )
    ceiling = 1 + (c["epsilon"] if c["epsilon_high"] == -1 else c["epsilon_high"])
    yield (
        c["delta"] == -1 or c["delta"] >= ceiling,
        f"delta={c['delta']} must be -1 (off) or at least 1 + epsilon_high = {ceiling}",
    )
    objective = OBJECTIVES[c["objective"]]
    yield (
        c["mode_entropy_coef"] == 0 or not objective.group_loss,
        f"mode_entropy_coef={c['mode_entropy_coef']} belongs to the policy-gradient objectives: set it to 0, "
        f"or change objective={c['objective']!r}, whose loss compares the answers of a group already",
    )
    yield (
        not c["xdr_ref_tilt"] or (objective.weights == "rows" and c["beta"] > 0),
        f"xdr_ref_tilt=True needs objective='xdr' and beta > 0, not objective={c['objective']!r} and beta={c['beta']}",
    )
    yield (
        not c["maxent_kl"] or (objective.beta == "weights" and c["beta"] > 0),
        f"maxent_kl=True needs objective='maxent' and beta > 0, not objective={c['objective']!r} and beta={c['beta']}",
    )
    yield (
        not c["xdr_mode_adaptive_tau"] or objective.weights == "rows",
        f"xdr_mode_adaptive_tau=True needs objective='xdr', not {c['objective']!r}",
    )


def controller_claims(c: dict):
    """The targets of tau and beta must be reachable, and their start inside the bounds."""
    G = rows_of_a_group(c)
    meta = c["controller_meta_enabled"]
    entropy, excess = c["maxent_target_weight_entropy"], c["maxent_target_excess_entropy"]
    yield (
        entropy == -1 or excess == -1,
        f"maxent_target_weight_entropy={entropy} and maxent_target_excess_entropy={excess} are both on: choose one",
    )
    yield (
        excess == -1 or 0 < excess < 1,
        f"maxent_target_excess_entropy={excess} must lie between 0 and 1",
    )
    if c["maxent_target_final"] >= 0:
        yield (
            entropy >= 0 or excess >= 0,
            f"maxent_target_final={c['maxent_target_final']} needs a target to start from",
        )
        yield (
            c["maxent_target_horizon"] > 0,
            f"maxent_target_final={c['maxent_target_final']} needs maxent_target_horizon > 0, in how many steps to get there",
        )
        yield (
            excess == -1 or 0 < c["maxent_target_final"] < 1,
            f"maxent_target_final={c['maxent_target_final']} is of an excess entropy: between 0 and 1",
        )
    highest = max(entropy, c["maxent_target_final"] if entropy >= 0 else -1)
    yield (
        highest <= math.log(G),
        f"maxent_target_weight_entropy or maxent_target_final, {highest}, is above ln(rows of a group) = {math.log(G):.3f}, "
        f"which no weights can reach",
    )
    if meta:
        yield (
            OBJECTIVES[c["objective"]].weights == "target",
            f"controller_meta_enabled=True steers the weights of maxent; objective={c['objective']!r} has none that it knows",
        )
        yield (
            entropy >= 0 and c["kl_target"] > 0,
            f"controller_meta_enabled=True needs both targets, maxent_target_weight_entropy={entropy} and "
            f"kl_target={c['kl_target']}",
        )
        yield (
            c["controller_meta_virtual_lr"] < 4,
            f"controller_meta_virtual_lr={c['controller_meta_virtual_lr']} must be below 4, or virtual steps overshoot for ever",
        )
    if meta or steers_tau(c):
        yield (
            OBJECTIVES[c["objective"]].weights != "",
            f"an entropy target steers the weights of {names(lambda o: o.weights)}; objective={c['objective']!r} has none",
        )
        yield (
            c["maxent_tau_max"] > c["maxent_tau_min"],
            f"maxent_tau_max={c['maxent_tau_max']} must be above maxent_tau_min={c['maxent_tau_min']} when tau is steered",
        )
        yield (
            c["maxent_tau_min"] <= c["maxent_tau"] <= c["maxent_tau_max"],
            f"maxent_tau={c['maxent_tau']} is steered: start it between maxent_tau_min={c['maxent_tau_min']} and maxent_tau_max={c['maxent_tau_max']}",
        )
    if meta or steers_beta(c):
        yield (
            c["beta"] > 0,
            f"beta={c['beta']} with kl_target={c['kl_target']}: the controller multiplies beta, so it must start above 0",
        )
        yield (
            c["beta_max"] > c["beta_min"],
            f"beta_max={c['beta_max']} must be above beta_min={c['beta_min']} when beta is steered",
        )
        yield (
            c["beta_min"] <= c["beta"] <= c["beta_max"],
            f"beta={c['beta']} is steered: start it between beta_min={c['beta_min']} and beta_max={c['beta_max']}",
        )
    yield (
        not steers_beta(c) or c["kl_ctl_step_size"] < c["kl_horizon"],
        f"kl_ctl_step_size={c['kl_ctl_step_size']} must be below kl_horizon={c['kl_horizon']}, or beta could turn negative",
    )


def warn_config(c: dict, vocabulary: int) -> list[str]:
    """Settings that run but are known to hurt, a sentence each."""
    warnings = []
    product, limit = c["maxent_q_temperature"] * c["maxent_tau"], 1 / math.log(vocabulary)
    if c["objective"] == "maxent" and product > limit * 1.001:
        warnings.append(
            f"maxent_q_temperature * maxent_tau = {product:.3f} is above 1/ln(vocabulary {vocabulary}) = {limit:.3f}: the wrong answers "
            f"of a group outnumber the right ones and a target this flat feeds them; expect a policy that gets worse"
        )
    if (
        c["objective"] == "maxent"
        and c["maxent_loss"] == "listwise"
        and c["maxent_score_norm"] == "sum"
    ):
        warnings.append(
            "maxent_score_norm='sum' has destroyed policies (held-out accuracy to 0 in 50 steps); 'length' is the safe choice"
        )
    if steers_tau(c) and c["maxent_tau_lr"] > 0.3:
        warnings.append(
            f"maxent_tau_lr={c['maxent_tau_lr']} is above 0.3: tau will overshoot its target"
        )
    if steers_tau(c) and OBJECTIVES[c["objective"]].weights == "rows":
        warnings.append(
            "under objective='xdr' a larger tau means less diversity: an entropy target pushes the wrong way"
        )
    seed_reward = c["info_seed_enabled"] and c["info_seed_reward"] > 0
    if c["maxent_target_weight_entropy"] >= 0 and (
        c["maxent_skip_equal_groups"] != "all" or seed_reward
    ):
        warnings.append(
            "maxent_target_weight_entropy counts every active group, and here those whose answers are all equally good are active, with flat weights at "
            "any tau: the target may be out of reach; maxent_target_excess_entropy leaves them out"
        )
    objective = OBJECTIVES[c["objective"]]
    scale = c["scale_rewards"] or objective.scale
    if seed_reward and scale == "group" and not objective.group_loss:
        warnings.append(
            "info_seed_reward > 0 with scale_rewards='group': in a group of equal task rewards the small seed rewards are blown up to standard deviation 1; "
            "use scale_rewards='none'"
        )
    reach = (
        sum(map(abs, c["reward_weights"])) / c["maxent_q_temperature"]
    )  # range of log q, if a reward is in 0..1
    if c["controller_meta_enabled"] and c["controller_meta_method"] != "analytic":
        if c["maxent_tau"] + c["beta"] < 0.05 * reach:
            warnings.append(
                f"maxent_tau={c['maxent_tau']} + beta={c['beta']} is below 0.05 * the range of log q = {0.05 * reach:.3f}: the weights are "
                f"saturated and controller_meta_method={c['controller_meta_method']!r} has no gradient to follow; start both higher"
            )
        if c["controller_meta_optimizer"] == "sgd":
            warnings.append(
                f"controller_meta_method={c['controller_meta_method']!r} with 'sgd' crawls where its gradient is small: use "
                f"controller_meta_optimizer='adam'"
            )
    return warnings
