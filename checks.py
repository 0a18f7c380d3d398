"""Validation of a config: every rule that needs only the config's values, as an error or a warning
of one sentence.

    for holds, sentence in claims(config): ...    # common.check_config raises the first that fails
    for sentence in warn_config(config, vocabulary, default_config()): ...

To add a key, write its line in config/default.py. Then add it here: to RANGES (a number) or CHOICES
(a word), to USED or SWITCHES if only some configs read it, to SCHEDULED if it may change during a
run. If it excludes another key, write a claim. Only tests (test_config*.py) notice what is missing:
a key without a range takes any number.
"""

# No torch here: a wrong config must be reported before libraries load, which takes ten seconds.
import math
import operator
import shlex
from typing import Literal, NamedTuple, get_args, get_type_hints

# --- objectives and optimizers


class Objective(NamedTuple):
    """Everything about an objective except its formula, which is in loss.py. The defaults are those
    of dr_grpo."""

    # how token terms are summed; "constant": divided by N * L
    token_sum: Literal["constant", "row_mean", "token_mean"] = "constant"
    # how a row compares with its group: a name in loss.ADVANTAGES, or "own" for a branch in
    # learner.row_advantages
    advantage: str = "centred"
    # its default for scale_rewards: the divisor of "centred" advantages
    scale: Literal["group", "batch", "mean", "none"] = "none"
    # "token" and "sequence" ratios are clipped, "cispo" ratios capped
    ratio: Literal["token", "sequence", "cispo"] = "token"
    # a loss over a group's sequence scores: "weights" pulls their softmax towards w, "balance" is
    # flow's, "" is none
    group_loss: Literal["", "weights", "balance"] = ""
    row_weights: bool = False  # advantages are multiplied by weights of the rows
    # "semantic_entropy" shrinks advantages, "token_entropy" adds a bonus per token
    term: Literal["", "semantic_entropy", "token_entropy"] = ""

    @property
    def has_weights(self) -> bool:
        """Whether the rows of a group get weights w, which depend on tau and beta."""
        return self.row_weights or self.group_loss == "weights"

    @property
    def tilts_by_reference(self) -> bool:
        """Whether beta tilts the group's weights or goals by the reference, instead of weighting a
        KL in the loss. xdr_ref_tilt and maxent_kl change this, see adds_kl()."""
        return self.group_loss in ("weights", "balance")

    @property
    def has_custom_advantages(self) -> bool:
        """Whether the advantages come from a user's formula, which may compare rows of different
        groups: those of this project compare a row with its group only."""
        return self.advantage not in ("centred", "pass_at_k")


OBJECTIVES = {
    "maxent": Objective(group_loss="weights"),
    "xdr": Objective(row_weights=True),
    "grpo": Objective(token_sum="row_mean", scale="group"),
    "dr_grpo": Objective(),
    "dapo": Objective(token_sum="token_mean", scale="group"),
    "gspo": Objective(token_sum="row_mean", scale="group", ratio="sequence"),
    "cispo": Objective(token_sum="token_mean", scale="group", ratio="cispo"),
    "seed_grpo": Objective(term="semantic_entropy"),
    "token_entropy": Objective(term="token_entropy"),
    "maxrl": Objective(scale="mean"),  # groups count by how rarely they succeed
    "pkpo": Objective(advantage="pass_at_k"),
    "flow": Objective(group_loss="balance"),  # maxent's target, with a squared loss
}


# field of Objective -> its allowed values; preflight, which may import loss.py, checks `advantage`
FIELDS = {
    field: get_args(hint) for field, hint in get_type_hints(Objective).items() if get_args(hint)
}


class Optimizer(NamedTuple):
    """What the trainer must know about an optimizer. All take the arguments lr and weight_decay."""

    cls: str  # its name in torch.optim
    state_bytes: int  # of its state, per parameter
    # stages it works with: from stage 1 on ZeRO hands it flat vectors instead of matrices
    zero_stages: tuple = (0, 1, 2, 3)


OPTIMIZERS = {
    "adamw": Optimizer("AdamW", state_bytes=8),
    # state_bytes=0: its state is only one row and one column per matrix
    "adafactor": Optimizer("Adafactor", state_bytes=0, zero_stages=(0,)),
    "sgd": Optimizer("SGD", state_bytes=0),
}


def uses_scores(c: dict) -> bool:
    """Whether the loss compares the sequence scores that maxent_score_norm and maxent_score_scale
    define."""
    group_loss = OBJECTIVES[c["objective"]].group_loss
    if group_loss == "weights":
        return c["maxent_loss"] in ("listwise", "floored")
    return group_loss != ""


def uses_ref_scores(c: dict) -> bool:
    """Whether scores under a reference model tilt weights or goals."""
    tilts = OBJECTIVES[c["objective"]].tilts_by_reference
    return c["xdr_ref_tilt"] or (tilts and c["beta"] > 0)


def adds_kl(c: dict) -> bool:
    """Whether beta * KL is a term of the loss. In maxent, flow and a tilted xdr beta acts on the
    weights or goals instead."""
    if OBJECTIVES[c["objective"]].tilts_by_reference:
        return c["maxent_kl"]
    return not c["xdr_ref_tilt"]


def max_sequence_length(c: dict) -> int:
    """The most tokens that a prompt and its completion may have together."""
    return c["max_prompt_length"] + c["max_completion_length"]


def completions_per_prompt(c: dict) -> int:
    """G + S: completions of a prompt, InfoSeed's included."""
    return c["num_generations"] + c["info_seed_num_seeds"]


def rewards_seeds(c: dict) -> bool:
    """Whether InfoSeed adds to rewards, which makes equal ones unequal."""
    return c["info_seed_num_seeds"] > 0 and c["info_seed_reward"] > 0


def state_bytes(c: dict, itemsize: int) -> int:
    """Bytes of optimizer state for each trained parameter. itemsize: bytes of its weight. Beside
    16-bit weights, and under ZeRO also beside float32 ones, DeepSpeed keeps a float32 copy."""
    copy = 4 if itemsize == 2 or c["zero_stage"] > 0 else 0
    return OPTIMIZERS[c["optimizer"]].state_bytes + copy


def skipped_groups(c: dict) -> str:
    """Which groups maxent and flow leave out, see loss.active_groups(). If groups are weighted by
    the spread of their rewards, all equal ones: they weigh 0, and must not count in the mean."""
    return "all" if c["maxent_group_weight"] == "spread" else c["maxent_skip_equal_groups"]


def scale_of(c: dict) -> str:
    """What advantages are divided by: scale_rewards or, where that is "", the objective's own."""
    return c["scale_rewards"] or OBJECTIVES[c["objective"]].scale


def is_policy_gradient(c: dict) -> bool:
    """Whether the loss is a policy gradient: advantages times log-probs of tokens. Otherwise it is
    a loss over the scores of groups."""
    group_loss = OBJECTIVES[c["objective"]].group_loss
    return not group_loss or (group_loss == "weights" and c["maxent_loss"] == "policy_gradient")


def objectives_where(wanted) -> str:
    """The names of the objectives for which `wanted` is true, joined for a sentence."""
    return " and ".join(name for name, objective in OBJECTIVES.items() if wanted(objective))


# --- flags of commands; entries, choices and ranges of keys

# script -> {key of a training run that it does not read: what to set instead}
INSTEAD = {
    "evaluate": {
        "temperature": "eval_temperature",
        "num_generations": "eval_num_generations",
        "seed": "seeds",
    },
    "sft": {"max_steps": "steps", "prompts_per_step": "batch_size"},
}
# script -> its own flags, --flag=value, with their defaults. They are no keys of the config, except
# for the learning_rate of sft.py, which overrides the config's: that one is for RL.
FLAGS = {
    "train": {"dry_run": False},  # True: check everything, print what would run, load no weights
    # steps: optimizer steps; batch_size: demonstrations per step
    "sft": {"steps": 1000, "batch_size": 64, "learning_rate": 1e-5},
    "evaluate": {
        "output": "",  # a .jsonl file with one line per problem and seed; "" none
        "seeds": 1,  # how often every problem is sampled, with seeds 0, 1, ...
    },
    "generate": {
        "output": "",  # the .jsonl file to write
        "max_prompts": 0,  # take only this many prompts; 0 all
        "num_generations": 0,  # completions of each, which may be 1 here; 0: the config's
    },
}
# Keys that may be {step: value}, to change during a run: those marked (steps) in default.py.
SCHEDULED = (
    "temperature",
    "easy_dataset.share",
    "maxent_target_weight_entropy",
    "maxent_target_excess_entropy",
    "pkpo_k",
)
# The entries of a source of rows, with their defaults.
SOURCE = {
    "name": "",
    "config": "",
    "split": "train",
    "prompt": "prompt",
    "answer": "answer",
    "more": [],  # further columns that rewards want to see
    "task": "",  # the task of rows that name none themselves
}
# key of default.py that is a dict -> its known entries, with their defaults
ENTRIES = {
    "dataset": SOURCE | {"weight": 1.0},  # share in a mixture, relative to the other sources
    "easy_dataset": SOURCE | {"share": 0.0},  # share of a step's prompts; 0 off
    "eval_dataset": SOURCE | {"split": "test"},
    "chat_template_kwargs": {},
    "replay": {"size": 0, "fraction": 0.25, "ucb": 0.5},  # size in prompts, 0 off
    "vllm_options": {
        "gpu_memory_utilization": 0.3,  # share of the GPU's memory
        "kv_cache_memory_bytes": 0,  # 0: chosen by rollout.plan_cache on a CPU, by vLLM on a GPU
        "tensor_parallel_size": 1,
        "enable_sleep_mode": True,
    },
    "optimizer_options": {"weight_decay": 0.0},  # 0 off
    "wandb_options": {"project": "maxent-grpo", "name": "", "mode": "online"},
}
# keys whose dicts take further entries, which a library reads
OPEN_KEYS = ("chat_template_kwargs", "vllm_options", "optimizer_options", "wandb_options")
# options of vLLM that the user may not set: they follow from other keys, or completions would be
# wrong
VLLM_SET_HERE = (
    "model",
    "tokenizer",
    "dtype",  # the policy's
    "seed",
    "max_model_len",  # max_prompt_length + max_completion_length
    "logprobs_mode",  # log-probs after the temperature, as the learner computes them
    "generation_config",  # a model's own penalties would change what is sampled
    "distributed_executor_backend",
    "enable_chunked_prefill",  # on a CPU a partial prefill crashes if requests have seeds
    "trust_remote_code",
)
# arguments of a reward function that do not come from the row
REWARD_ARGUMENTS = ("completion", "tokens", "max_completion_length", "soft_overlong_buffer")
# arguments of apply_chat_template that the user may not set: they are not for the template, or are
# chosen by prompts.py
TEMPLATE_SET_HERE = (
    "conversation",
    "messages",
    "tools",
    "documents",
    "chat_template",
    "add_generation_prompt",
    "continue_final_message",
    "tokenize",
    "padding",
    "truncation",
    "max_length",
    "return_tensors",
    "return_dict",
    "return_assistant_tokens_mask",
    "tokenizer_kwargs",
)
TILDE = "no shell has replaced the ~; write $HOME or the whole path"
# key -> the values that it may have
CHOICES = {
    "dtype": ("auto", "float32", "bfloat16"),
    "long_prompts": ("error", "drop", "truncate"),
    "rollout_engine": ("vllm", "server", "hf"),
    "objective": tuple(OBJECTIVES),
    "scale_rewards": ("", *FIELDS["scale"]),  # "" the objective's own
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
    "maxent_loss": ("listwise", "floored", "policy_gradient", "mle"),
    "xdr_utility": ("advantage", "surrogate"),
    "maxent_skip_equal_groups": ("all", "wrong", "none"),
    "controller_meta_method": ("", "analytic", "first_order", "truncated_backprop"),  # "" off
    "maxent_group_weight": ("equal", "spread"),
    "controller_meta_optimizer": ("sgd", "adam"),
    "info_seed_loss_type": ("infonce", "ce"),
    "info_seed_pooling": ("mean", "last"),
    "lr_scheduler_type": ("constant", "linear", "cosine"),
    "optimizer": tuple(OPTIMIZERS),
    "reference_placement": ("device", "sharded", "cpu"),
    "checkpoint_mode": ("full", "shallow"),
    "report_to": ("", "wandb"),  # "" metrics.jsonl only
}
# Every number of default.py, in its order: (lower bound, upper bound). None: that in UPPER_BOUNDS.
# dataset.weight is not here: a dataset may be a list, see data_claims().
RANGES = {
    # run
    "seed": (">= 0", "< 4294967296"),  # 2**32
    # model
    "lora_rank": (">= 0", "<= 1024"),
    # data
    "easy_dataset.share": (">= 0", "<= 1"),
    "max_prompt_length": ("> 0", None),
    "replay.size": (">= 0", None),
    "replay.fraction": (">= 0", "< 1"),
    "replay.ucb": (">= 0", None),
    "resample_equal_groups": (">= 0", None),
    # rollouts
    "prompts_per_step": ("> 0", None),
    "num_generations": (">= 2", None),
    "max_completion_length": ("> 0", None),
    "temperature": (">= 0.01", None),
    "max_logp_difference": ("-1 or >= 0", None),  # nats a token
    "vllm_options.gpu_memory_utilization": ("> 0", "< 1"),
    "vllm_options.kv_cache_memory_bytes": (">= 0", "<= 1e15"),
    "vllm_options.tensor_parallel_size": ("> 0", None),
    "rollout_timeout": ("> 0", "<= 1500"),  # seconds; six tries are 2.5 hours, below DEADLINE
    "rollout_ahead": (">= 0", "<= 1"),
    # rewards
    "reward_workers": (">= 0", "<= 1024"),
    "reward_timeout": ("> 0", "<= 3600"),  # seconds, far below common.DEADLINE
    "reward_memory_gib": ("> 0", "<= 1000000"),
    "max_reward_failures": (">= 0", "<= 1"),
    "soft_overlong_buffer": ("> 0", None),
    # objective
    "num_iterations": ("> 0", None),
    "epsilon": (">= 0", None),
    "epsilon_high": ("-1 or >= 0", None),
    "delta": ("-1 or >= 1", None),  # the whole claim, with epsilon_high, is in objective_claims
    "cispo_epsilon_max": ("> 0", None),
    "importance_sampling_cap": ("> 0", None),
    "beta": (">= 0", None),
    "policy_entropy_bonus_coef": (">= 0", None),
    "token_entropy_coef": (">= 0", None),
    "seed_grpo_alpha": (">= 0", None),
    "unlikeliness_coef": (">= 0", "<= 1"),
    "pkpo_k": ("> 0", None),
    "maxent_tau": ("-1 or >= 0", "<= inf"),  # -1: by the vocabulary; inf: uniform weights
    "maxent_q_temperature": (">= 1e-6", "<= 1e6"),  # in between float32 tells rewards apart
    "maxent_q_epsilon": (">= 0", None),  # at most 1 / rows of a group: group_claims
    "maxent_score_scale": ("> 0", None),
    "mode_entropy_coef": (">= 0", None),
    # controllers
    "maxent_target_weight_entropy": ("-1 or >= 0", None),  # nats
    "maxent_target_excess_entropy": ("-1 or > 0", "< 1"),  # 1: weights are uniform over all rows
    "maxent_tau_lr": ("> 0", None),
    "maxent_tau_min": ("> 0", None),  # a controller moves log tau
    "maxent_tau_max": ("> 0", None),
    "maxent_tau_warmup_steps": ("-1 or >= 0", None),
    "kl_target": (">= 0", None),
    "kl_horizon": (">= 0", None),
    "kl_ctl_step_size": (">= 0", None),
    "beta_min": ("> 0", None),  # at 0 a controller that multiplies would stay there
    "beta_max": ("> 0", None),
    "controller_meta_lr": ("> 0", None),
    "controller_meta_tau_lr": ("-1 or >= 0", None),
    "controller_meta_beta_lr": ("-1 or >= 0", None),
    "controller_meta_beta_grad_clip": (">= 0", None),
    "controller_meta_update_interval": ("> 0", None),
    "controller_meta_virtual_lr": ("> 0", None),
    "controller_meta_truncation_steps": ("> 0", None),
    # InfoSeed
    "info_seed_num_seeds": (">= 0", None),
    "info_seed_lambda": (">= 0", None),
    "info_seed_temperature": ("> 0", None),
    "info_seed_reward": (">= 0", None),
    # optimizer
    "max_steps": ("> 0", None),
    "learning_rate": ("> 0", None),
    "warmup_steps": (">= 0", None),
    "optimizer_options.weight_decay": (">= 0", None),
    "max_grad_norm": (">= 0", None),
    "max_tokens_per_micro_batch": (">= 0", None),
    "zero_stage": (">= 0", "<= 3"),
    # evaluation
    "eval_steps": (">= 0", None),
    "eval_max_prompts": ("> 0", None),
    "eval_num_generations": ("> 0", None),
    "eval_temperature": (">= 0.01", None),
    # checkpoints and logs
    "save_steps": ("-1 or >= 0", None),
    "save_total_limit": (">= 0", None),
    "keep_every": (">= 0", None),
    "log_rollouts_steps": (">= 0", None),
}
# Upper bounds for numbers without one in RANGES: counts must fit into 32 bits, floats into float32.
UPPER_BOUNDS = {int: "<= 2147483647", float: "<= 1e30"}
REASONS = {  # appended to the error where a range does not explain itself
    "seed": "vLLM takes no larger one",
    "num_generations": "a completion is compared with its group, and alone it has advantage 0",
    "temperature": "vLLM samples at 0.01 instead of anything lower",
    "eval_temperature": "vLLM samples at 0.01 instead of anything lower",
    "vllm_options.gpu_memory_utilization": "the learner needs memory too",
    "rollout_timeout": "a prompt is tried up to six times, and ranks give up on each other after "
    "three hours",
    "reward_timeout": "ranks give up on each other after three hours",
    "easy_dataset.share": "it is a share of a step's prompts",
    "replay.fraction": "it is a share of a step's prompts, and new ones must come in",
    "max_reward_failures": "it is a share of a step",
}
SIGNS = {  # sign -> (the comparison, its words)
    ">": (operator.gt, "greater than"),
    ">=": (operator.ge, "at least"),
    "<": (operator.lt, "below"),
    "<=": (operator.le, "at most"),
}


# --- what several keys say together


def entries(c: dict, key: str) -> dict:
    """All entries of a key that is a dict: the config's, and the defaults for those left out."""
    return ENTRIES[key] | c[key]


def sources(c: dict) -> list[dict]:
    """Where training rows come from: the one source, or those of a mixture, with all entries."""
    given = c["dataset"] if isinstance(c["dataset"], list) else [c["dataset"]]
    return [ENTRIES["dataset"] | source for source in given]


def keyed_sources(c: dict):
    """(key, source) of every source of rows that a config names."""
    for source in sources(c):
        yield "dataset", source
    for key in ("easy_dataset", "eval_dataset"):
        yield key, entries(c, key)


PATH_KEYS = ("output_dir", "model", "resume_from_checkpoint", "weight_sync")


def paths(c: dict):
    """(key, value) of every key that may hold a path."""
    for key in PATH_KEYS:
        yield key, c[key]
    for key, source in keyed_sources(c):
        yield f"{key}.name", source["name"]


def eval_source(c: dict) -> dict | None:
    """Where evaluation rows come from. That is eval_dataset if it has a name, else the training
    dataset's test split, with the entries that eval_dataset has. None if the training data is a
    mixture, which has no test split of its own."""
    given = entries(c, "eval_dataset")
    if given["name"]:
        return given
    if isinstance(c["dataset"], list):
        return None
    source = sources(c)[0]
    return source | c["eval_dataset"] | {"name": source["name"], "split": given["split"]}


def holds_out_rows(c: dict) -> bool:
    """Whether evaluation rows are loaded and left out of training: if the run evaluates, or if it
    names an eval_dataset for a later evaluation. With allow_leakage=True an eval_dataset for later
    is not loaded, so it may be missing."""
    named = entries(c, "eval_dataset")["name"] != ""
    return c["eval_steps"] > 0 or (named and not c["allow_leakage"])


def values_of(value) -> list:
    """The numbers that a setting takes during a run: the values of {step: value}, or the number
    itself."""
    return list(value.values()) if isinstance(value, dict) else [value]


def is_on(value) -> bool:
    """Whether a setting that -1 turns off is on; {step: value} always is."""
    return isinstance(value, dict) or value >= 0


def has_entropy_target(c: dict) -> bool:
    return is_on(c["maxent_target_weight_entropy"]) or is_on(c["maxent_target_excess_entropy"])


def steers_tau(c: dict) -> bool:
    """Whether the entropy controller moves tau. A meta-controller takes its place."""
    return c["controller_meta_method"] == "" and has_entropy_target(c)


def steers_beta(c: dict) -> bool:
    """Whether the KL controller moves beta. A meta-controller takes its place."""
    return (
        c["controller_meta_method"] == ""
        and c["kl_target"] > 0
        and c["kl_horizon"] > 0
        and c["kl_ctl_step_size"] > 0
    )


def moves_tau(c: dict) -> bool:
    """Whether any controller moves tau."""
    return c["controller_meta_method"] != "" or steers_tau(c)


def moves_beta(c: dict) -> bool:
    """Whether any controller moves beta."""
    return c["controller_meta_method"] != "" or steers_beta(c)


# --- claims


def claims(c: dict):
    """Yields (whether a claim holds, the sentence if it doesn't), claim by claim. A claim may rely
    on the ones before it, so a caller stops at the first that fails."""
    yield from value_claims(c)
    yield from library_claims(c)
    yield from info_seed_claims(c)
    yield from group_claims(c)
    yield from reward_claims(c)
    yield from data_claims(c)
    yield from save_claims(c)
    yield from objective_claims(c)
    yield from controller_claims(c)


def closes_its_quotes(command: str) -> bool:
    try:
        shlex.split(command)
    except ValueError:
        return False
    return True


def range_claim(key: str, value) -> tuple[bool, str]:
    """The claim that a number, or every value of {step: value}, lies in the key's range of RANGES:
    whether it does, and the sentence if it doesn't."""
    lower, upper = RANGES[key]
    may_be_off = lower.startswith("-1 or ") and not isinstance(value, dict)
    if may_be_off and value == -1:
        return True, ""
    lower = lower.removeprefix("-1 or ")
    for number in values_of(value):
        lower_holds, lower_words = check_bound(number, lower)
        # common.coerce() has given the number the type of its default
        upper_holds, upper_words = check_bound(number, upper or UPPER_BOUNDS[type(number)])
        if not (lower_holds and upper_holds):
            words = f"{'-1, or ' if may_be_off else ''}{lower_words} and {upper_words}"
            reason = f": {REASONS[key]}" if key in REASONS else ""
            return False, f"{key}={value} must be {words}{reason}"
    return True, ""


def check_bound(value, bound: str) -> tuple[bool, str]:
    """Whether `value` is on the right side of a bound such as "> 0", and the bound in words."""
    sign, number = bound.split()
    holds, words = SIGNS[sign]
    return holds(value, float(number)), f"{words} {number}"


def numbers_in(value):
    """The floats in a value of lists and dicts."""
    if isinstance(value, float):
        yield value
    elif isinstance(value, dict):
        for content in value.values():
            yield from numbers_in(content)
    elif isinstance(value, (list, tuple)):
        for content in value:
            yield from numbers_in(content)


def value_claims(c: dict):
    """Claims about one key each."""
    for key, choices in CHOICES.items():
        yield (
            c[key] in choices,
            f"{key}={c[key]!r} must be one of {', '.join(map(repr, choices))}",
        )
    for field, values in FIELDS.items():  # a typo in OBJECTIVES would train another objective
        value = getattr(OBJECTIVES[c["objective"]], field)
        yield (
            value in values,
            f"checks.OBJECTIVES: {c['objective']!r} has {field}={value!r}, which must be one of "
            f"{', '.join(map(repr, values))}",
        )
    for key in RANGES:
        name, _, entry = key.partition(".")
        yield range_claim(key, entries(c, name)[entry] if entry else c[key])
    yield (
        not c["eval_command"] or "{checkpoint}" in c["eval_command"],
        f"eval_command={c['eval_command']!r} must hold {{checkpoint}}, its path",
    )
    yield (
        closes_its_quotes(c["eval_command"]),
        f"eval_command={c['eval_command']!r} has a quote that is not closed",
    )
    yield (c["output_dir"].strip() != "", f"output_dir={c['output_dir']!r} is empty")
    for key, path in paths(c):
        yield (not path.startswith("~"), f"{key}={path!r}: {TILDE}")
    for key in PATH_KEYS:
        yield (
            # DeepSpeed would fail only when the run is resumed
            not set(c[key]) & set("*?["),
            f"{key}={c[key]!r}: DeepSpeed and vLLM read the signs * ? [ in a path as a pattern "
            "and would not find the files there: choose, or rename it to, a name without them",
        )
    yield (
        c["weight_sync"] in ("disk", "nccl") or "/" in c["weight_sync"],
        f"weight_sync={c['weight_sync']!r} must be 'disk', 'nccl', or a folder with a / in it",
    )


def library_claims(c: dict):
    """Claims about the entries that a library reads: vLLM, an optimizer, a chat template, W&B."""
    for key in OPEN_KEYS:
        yield (
            all(math.isfinite(value) for value in numbers_in(c[key])),
            f"{key}={c[key]} must hold finite numbers",
        )
    overrides = c["vllm_options"].get("hf_overrides", {})
    yield (
        isinstance(overrides, dict),
        f"vllm_options.hf_overrides={overrides!r} must be a dict",
    )
    for option in c["vllm_options"]:
        yield (
            option not in VLLM_SET_HERE,
            f"vllm_options: {option} is set by the trainer itself, and can't be set there",
        )
    for option in ("block_size", "max_num_seqs"):
        value = c["vllm_options"].get(option, 1)
        yield (
            type(value) is int and value > 0,
            f"vllm_options.{option}={value!r} must be a whole number above 0",
        )
    yield (
        "lr" not in c["optimizer_options"],
        "optimizer_options.lr would not be used: the rate of every step comes from learning_rate",
    )
    yield (
        not c["optimizer_options"].get("maximize"),
        "optimizer_options.maximize=True would make the loss larger: to flip the sign of a reward, "
        "there is reward_weights",
    )
    for option in ("capturable", "differentiable"):
        yield (
            not c["optimizer_options"].get(option),
            f"optimizer_options.{option} would fail in the first step or do nothing: it is for "
            "CUDA graphs or gradients through a step, and nothing here uses these",
        )
    for name in c["chat_template_kwargs"]:
        yield (
            type(name) is str and name.isidentifier() and name not in TEMPLATE_SET_HERE,
            f"chat_template_kwargs: {name!r} is not for the template to read, or is set by the "
            "trainer itself",
        )
    mode = entries(c, "wandb_options")["mode"]
    yield (
        mode in ("online", "offline"),
        f"wandb_options.mode={mode!r} must be 'online' or 'offline'; report_to='' turns W&B off",
    )


def info_seed_claims(c: dict):
    """Claims about InfoSeed. Without seeds it is off, and its other keys mean nothing."""
    if c["info_seed_num_seeds"] == 0:
        return
    yield (
        "{seed}" in c["info_seed_prompt_template"],
        f"info_seed_prompt_template={c['info_seed_prompt_template']!r} must hold {{seed}}",
    )
    yield (
        c["info_seed_prompt_template"].count("{prompt}") <= 1,
        f"info_seed_prompt_template={c['info_seed_prompt_template']!r} may hold {{prompt}} "
        "once: a second one would reach the model as it is",
    )
    yield (
        c["info_seed_loss_type"] != "ce" or c["info_seed_lambda"] > 0,
        "info_seed_loss_type='ce' needs info_seed_lambda > 0: its head would never be "
        "trained and stay random; 'infonce' has none",
    )
    yield (
        c["info_seed_num_seeds"] >= 2,
        f"info_seed_num_seeds={c['info_seed_num_seeds']} must be at least 2: one seed can't "
        "be told from another",
    )
    yield (
        c["prompts_per_step"] >= 2,
        f"info_seed_num_seeds={c['info_seed_num_seeds']} needs prompts_per_step of at least "
        "2: a seed's completions are compared over prompts",
    )


def group_claims(c: dict):
    """Claims about groups, and about what samples and trains them: engine, optimizer, ZeRO."""
    rows = completions_per_prompt(c)  # of a group
    yield (
        c["maxent_q_epsilon"] * rows <= 1,  # q = (1 - G * eps) * softmax + eps: no negative share
        f"maxent_q_epsilon={c['maxent_q_epsilon']} must be at most 1 / (rows of a group) = "
        f"{1 / rows:.4f}",
    )
    yield (
        not c["rollout_server"] or c["rollout_engine"] == "server",
        f"rollout_server={c['rollout_server']!r} is not asked by rollout_engine="
        f"{c['rollout_engine']!r}: set --rollout_engine=server, or --rollout_server= for none",
    )
    yield (
        not c["rollout_ahead"] or c["rollout_engine"] == "server",
        f"rollout_ahead=1 needs rollout_engine='server': with {c['rollout_engine']!r} sampling "
        "and learning share a process",
    )
    yield (
        not c["rollout_ahead"] or c["info_seed_num_seeds"] == 0,
        "rollout_ahead=1 does not go with info_seed_num_seeds > 0: only the completions without a "
        "seed would be sampled ahead, by weights a step older than those of the others",
    )
    yield (
        # offloading is a feature of ZeRO's stages 1 to 3
        not (c["offload_optimizer"] and c["zero_stage"] == 0),
        "offload_optimizer=True needs zero_stage 1, 2 or 3",
    )
    yield (
        c["lora_rank"] == 0 or c["reference_placement"] == "device",
        f"lora_rank={c['lora_rank']} has no second model to place, its reference is the policy "
        f"with adapters off: leave out reference_placement={c['reference_placement']!r}",
    )
    stages = OPTIMIZERS[c["optimizer"]].zero_stages
    yield (
        c["zero_stage"] in stages,
        f"optimizer={c['optimizer']!r} needs zero_stage {' or '.join(map(str, stages))}, not "
        f"{c['zero_stage']}: from stage 1 on ZeRO cuts the matrices that it works on",
    )


def reward_claims(c: dict):
    """Claims about reward functions and their weights."""
    yield (len(c["reward_funcs"]) > 0, "reward_funcs=[] names no reward function")
    yield (
        len(c["reward_funcs"]) == len(c["reward_weights"]),
        f"reward_weights={c['reward_weights']} must hold one weight for each of "
        f"reward_funcs={c['reward_funcs']}",
    )
    yield (
        all(abs(weight) <= 1e6 for weight in c["reward_weights"]),
        f"reward_weights={c['reward_weights']} must be finite numbers, at most 1e6",
    )
    yield (
        all(weight == 0 or abs(weight) >= 1e-5 for weight in c["reward_weights"]),
        f"reward_weights={c['reward_weights']} must be 0 or at least 1e-5, because rewards are "
        "rounded to six decimals",
    )
    yield (
        not {"soft_overlong", "rewards:soft_overlong"} & set(c["reward_funcs"])
        or c["soft_overlong_buffer"] <= c["max_completion_length"],
        f"soft_overlong_buffer={c['soft_overlong_buffer']} must not be above "
        f"max_completion_length={c['max_completion_length']}",
    )


def data_claims(c: dict):
    """Claims about where prompts come from."""
    for key, source in keyed_sources(c):
        yield (
            not source["name"].startswith("["),  # a list in a string, as in verl's data.train_files
            f"{key}.name={source['name']!r} names one source: several are a list in a config file, "
            "dataset = [{'name': ...}, {'name': ...}]",
        )
        yield (
            all(type(name) is str for name in source["more"]),
            f"{key}.more={source['more']} must be a list of names",
        )
        yield (
            not set(source["more"]) & set(REWARD_ARGUMENTS),
            f"{key}.more={source['more']}: a reward gets {', '.join(REWARD_ARGUMENTS)} from the "
            "trainer, so a column must have another name",
        )
    yield (c["dataset"] != [], "dataset=[] names no source of rows")
    if isinstance(c["dataset"], list):
        for i, source in enumerate(sources(c)):
            yield (source["name"] != "", f"dataset: source {i} has no name: {c['dataset'][i]!r}")
            yield (
                0 < source["weight"] <= 1e30,
                f"dataset: source {i}: weight={source['weight']} must be a number above 0, at most "
                "1e30",
            )
    yield (
        entries(c, "replay")["size"] == 0 or c["prompts_per_step"] >= 2,
        f"replay.size={entries(c, 'replay')['size']} needs prompts_per_step of at least 2: at "
        "least one of a step's prompts is new",
    )
    easy = c["easy_dataset"]
    yield (
        not easy or (easy.get("name") and "share" in easy),
        f"easy_dataset={easy!r}: its name and its share of a step's prompts need each other, "
        "such as --easy_dataset.share='{0: 0.5, 100: 0.0}'",
    )


def save_claims(c: dict):
    """Claims about what happens after a save."""
    yield (
        not c["push_to_hub"] or c["save_steps"] >= 0,
        f"push_to_hub={c['push_to_hub']!r} uploads checkpoints, and save_steps=-1 makes none",
    )
    yield (
        not c["eval_command"] or c["save_steps"] >= 0,
        f"eval_command={c['eval_command']!r} is started after a save, and save_steps=-1 makes none",
    )


def objective_claims(c: dict):
    """Claims about terms of the loss that exclude or need each other."""
    # for A < 0 the loss takes the larger of the capped and the clipped ratio, so a delta below the
    # clip would never act
    ceiling = 1 + (c["epsilon"] if c["epsilon_high"] == -1 else c["epsilon_high"])
    yield (
        c["delta"] == -1 or c["delta"] >= ceiling,
        f"delta={c['delta']} must be -1 (off) or at least 1 + epsilon_high = {ceiling}",
    )
    masks = is_policy_gradient(c) and c["importance_sampling"].endswith("_mask")
    yield (
        # at 1 too: where they agree, rounding puts about half of the ratios above 1
        not masks or c["importance_sampling_cap"] > 1,
        f"importance_sampling={c['importance_sampling']!r} leaves out what has a ratio above "
        f"importance_sampling_cap={c['importance_sampling_cap']}: it must be above 1, or rows or "
        f"tokens on which sampler and trainer agree are left out",
    )
    objective = OBJECTIVES[c["objective"]]
    G = c["num_generations"]
    yield (
        objective.advantage != "pass_at_k" or max(values_of(c["pkpo_k"])) <= G,  # k of G are drawn
        f"pkpo_k={c['pkpo_k']} must be at most num_generations={G}",
    )
    yield (
        objective.group_loss != "balance" or c["maxent_tau"] == -1 or c["maxent_tau"] >= 1e-6,
        f"objective={c['objective']!r} divides by maxent_tau={c['maxent_tau']}: it must be at "
        "least 1e-6",
    )
    yield (
        c["mode_entropy_coef"] == 0 or not objective.group_loss,
        f"mode_entropy_coef={c['mode_entropy_coef']} is not for "
        f"{objectives_where(lambda o: o.group_loss)}, which compare the answers of a group "
        f"already: set it to 0, or change objective={c['objective']!r}",
    )
    yield (
        not c["xdr_ref_tilt"] or (objective.row_weights and c["beta"] > 0),
        f"xdr_ref_tilt=True needs objective='xdr' and beta > 0, not objective={c['objective']!r} "
        f"and beta={c['beta']}",
    )
    yield (
        # all other objectives already have beta * KL in the loss
        not c["maxent_kl"] or (objective.tilts_by_reference and c["beta"] > 0),
        f"maxent_kl=True needs one of {objectives_where(lambda o: o.tilts_by_reference)} as "
        f"objective and beta > 0, not objective={c['objective']!r} and beta={c['beta']}",
    )
    yield (
        not c["xdr_mode_adaptive_tau"] or objective.row_weights,
        f"xdr_mode_adaptive_tau=True needs objective='xdr', not {c['objective']!r}",
    )


def controller_claims(c: dict):
    """Claims about controllers: their targets, which must be reachable, and what they move."""
    rows = completions_per_prompt(c)  # of a group
    entropy, excess = c["maxent_target_weight_entropy"], c["maxent_target_excess_entropy"]
    yield (
        not (is_on(entropy) and is_on(excess)),
        f"maxent_target_weight_entropy={entropy} and maxent_target_excess_entropy={excess} are "
        "both on: choose one",
    )
    highest = max(values_of(entropy))
    yield (
        highest <= math.log(rows),  # nats: the entropy of uniform weights
        f"maxent_target_weight_entropy, {highest}, is above ln(rows of a group) = "
        f"{math.log(rows):.3f}, which no weights can reach",
    )
    if c["controller_meta_method"]:
        yield from meta_claims(c)
    if moves_tau(c):
        yield from moved_tau_claims(c)
    if moves_beta(c):
        yield from moved_beta_claims(c)


def meta_claims(c: dict):
    """Claims about a meta-controller."""
    method = c["controller_meta_method"]
    entropy = c["maxent_target_weight_entropy"]
    yield (
        OBJECTIVES[c["objective"]].group_loss == "weights",
        f"controller_meta_method={method!r} steers the weights of maxent; "
        f"objective={c['objective']!r} has none that it knows",
    )
    yield (
        is_on(entropy) and c["kl_target"] > 0,
        f"controller_meta_method={method!r} needs both targets, "
        f"maxent_target_weight_entropy={entropy} and kl_target={c['kl_target']}",
    )
    yield (
        # 4 = 2 / (1/2): eigenvalues of the softmax's Jacobian are at most 1/2, the value for two
        # answers of probability 1/2
        c["controller_meta_virtual_lr"] < 4,
        f"controller_meta_virtual_lr={c['controller_meta_virtual_lr']} must be below 4, or "
        "virtual steps overshoot for ever",
    )


def moved_tau_claims(c: dict):
    """Claims about a tau that a controller moves."""
    yield (
        OBJECTIVES[c["objective"]].has_weights,
        f"an entropy target steers the weights of {objectives_where(lambda o: o.has_weights)}; "
        f"objective={c['objective']!r} has none",
    )
    yield (
        c["maxent_tau_max"] > c["maxent_tau_min"],
        f"maxent_tau_max={c['maxent_tau_max']} must be above "
        f"maxent_tau_min={c['maxent_tau_min']} when tau is steered",
    )
    yield (
        # -1: see default_tau
        c["maxent_tau"] == -1 or c["maxent_tau_min"] <= c["maxent_tau"] <= c["maxent_tau_max"],
        f"maxent_tau={c['maxent_tau']} is steered: start it between "
        f"maxent_tau_min={c['maxent_tau_min']} and maxent_tau_max={c['maxent_tau_max']}",
    )


def moved_beta_claims(c: dict):
    """Claims about a beta that a controller moves."""
    yield (
        c["beta"] > 0,
        f"beta={c['beta']} with kl_target={c['kl_target']}: the controller multiplies beta, so it "
        "must start above 0",
    )
    yield (
        c["beta_max"] > c["beta_min"],
        f"beta_max={c['beta_max']} must be above beta_min={c['beta_min']} when beta is steered",
    )
    yield (
        c["beta_min"] <= c["beta"] <= c["beta_max"],
        f"beta={c['beta']} is steered: start it between beta_min={c['beta_min']} and "
        f"beta_max={c['beta_max']}",
    )
    yield (
        # a step multiplies beta by 1 - step_size / horizon or more
        not steers_beta(c) or c["kl_ctl_step_size"] < c["kl_horizon"],
        f"kl_ctl_step_size={c['kl_ctl_step_size']} must be below kl_horizon={c['kl_horizon']}, or "
        "beta could turn negative",
    )


# --- how large tau may be


def tau_limit(c: dict, vocabulary: int) -> float:
    """The largest maxent_q_temperature * maxent_tau with which a policy that has reached its
    target is right at least half of the time.

    Assume rewards 0 and 1 and beta = 0, and let tau be that product. At the target the scores of
    right and wrong rows differ by lead / tau, see lead_of_right(). So the log-probs of strings of T
    tokens differ by lead * T / (scale * tau) if scores are means, by lead / (scale * tau) if they
    are sums. There are V^T wrong strings, so the difference must be at least T * ln V. For sums T
    is taken to be max_completion_length. A loss without scores, maxent's policy gradient, gets the
    same limit as means."""
    lead = lead_of_right(c)
    if not uses_scores(c):
        return lead / math.log(vocabulary)
    per_token = c["maxent_score_scale"]
    if c["maxent_score_norm"] == "sum":
        per_token *= c["max_completion_length"]  # the score is the sum of so many log-probs
    return lead / (per_token * math.log(vocabulary))


LEAST_LEAD = 0.01  # lead_of_right() would be 0 where a target no longer tells right from wrong


def assumed_right(G: int) -> int:
    """How many of G rows are assumed to be right where limits of tau are worked out: a quarter."""
    return max(1, G // 4)


def lead_of_right(c: dict) -> float:
    """maxent_q_temperature * (log q of a right row - log q of a wrong one), with rewards 0 and 1
    and a quarter of the group right: 1, or what unlikeliness_coef and maxent_q_epsilon leave of
    it."""
    reward = 1 - c["unlikeliness_coef"]  # of the likeliest right row
    epsilon = c["maxent_q_epsilon"]
    if epsilon == 0:
        return max(reward, LEAST_LEAD)
    G = completions_per_prompt(c)
    temperature = c["maxent_q_temperature"]
    odds = math.exp(-reward / temperature)  # of a wrong row to a right one, in the softmax
    right = assumed_right(G)
    share = (1 - G * epsilon) / (right + (G - right) * odds)
    lead = temperature * math.log((share + epsilon) / (share * odds + epsilon))
    return max(lead, LEAST_LEAD)


def default_tau(c: dict, vocabulary: int) -> float:
    """What maxent_tau=-1 stands for: the largest tau at which the plain loss is safe. If a
    controller steers tau, it is clamped to the controller's bounds."""
    tau = 1 / math.log(vocabulary)  # xdr compares advantages, not scores
    if OBJECTIVES[c["objective"]].group_loss:
        tau = tau_limit(c, vocabulary) / c["maxent_q_temperature"]
    if moves_tau(c):
        tau = min(max(tau, c["maxent_tau_min"]), c["maxent_tau_max"])
    return tau


def tau_of_excess(excess: float, G: int, right: int) -> float:
    """The maxent_q_temperature * maxent_tau at which the weights w of a group have this excess
    entropy. The group: `right` of G rows have reward 1, the others 0."""
    low, high = 1e-3, 1e3  # bounds for tau. The entropy grows with tau, so bisection works
    for _ in range(60):  # each round halves ln(high / low), down to the last digit of a float
        tau = math.sqrt(low * high)  # the middle on a log scale
        odds = math.exp(-1 / tau)  # w of a wrong row, relative to that of a right one
        w_right = 1 / (right + (G - right) * odds)
        w_wrong = odds * w_right
        entropy = -right * w_right * math.log(w_right)
        if w_wrong > 0:  # else exp() has underflowed
            entropy -= (G - right) * w_wrong * math.log(w_wrong)
        reached = (entropy - math.log(right)) / (math.log(G) - math.log(right))  # 0 to 1
        if reached < excess:
            low = tau
        else:
            high = tau
    return low


def tau_warnings(c: dict, vocabulary: int) -> list[str]:
    """Sentences about a maxent_tau so high that wrong answers win, whether it is set or a
    controller will reach it."""
    warnings = []
    # limit, now, highest and needed are all values of maxent_q_temperature * maxent_tau
    q_temperature = c["maxent_q_temperature"]
    # "floored" pushes wrong rows down whatever the target: it did well at twice the bound
    floored = c["maxent_loss"] == "floored" and OBJECTIVES[c["objective"]].group_loss == "weights"
    slack = 2 if floored else 1
    limit = slack * tau_limit(c, vocabulary)
    bound = f"{limit_in_words(c, vocabulary, slack)} = {limit:.3g}"
    # the sentences below round the limit to three digits: a user who sets that is not warned again
    highest_allowed = limit * 1.005
    now = q_temperature * c["maxent_tau"]
    if now > highest_allowed:
        warnings.append(
            f"maxent_q_temperature * maxent_tau = {now:.3g} is above {bound}: "
            "the wrong answers of a group outnumber the right ones and a target this flat feeds "
            "them; expect a policy that gets worse"
        )
    highest = q_temperature * c["maxent_tau_max"]  # where a controller may take it
    cure = f"maxent_tau_max={limit / q_temperature:.3g}"
    if now > highest_allowed:  # tau must start within its bounds
        cure += " and maxent_tau no higher"
    if steers_tau(c) and is_on(c["maxent_target_excess_entropy"]):
        target = max(values_of(c["maxent_target_excess_entropy"]))
        G = completions_per_prompt(c)
        # the temperature of w is tau + beta
        tilt = q_temperature * c["beta"]
        needed = min(highest, lead_of_right(c) * tau_of_excess(target, G, assumed_right(G)) - tilt)
        if needed > highest_allowed:
            warnings.append(
                f"an excess entropy of {target} takes maxent_q_temperature * maxent_tau to "
                f"about {needed:.3g} (a quarter of a group right), above {bound}: "
                f"lower the target, or set {cure}"
            )
    elif moves_tau(c) and highest > highest_allowed:
        # how far a target of plain entropy moves tau depends on the share of right answers
        warnings.append(
            f"a controller may take maxent_q_temperature * maxent_tau to {highest:.3g}, above "
            f"{bound}, where wrong answers win: set {cure}"
        )
    return warnings


def limit_in_words(c: dict, vocabulary: int, slack: int) -> str:
    """slack * tau_limit() as a formula for a sentence, such as "1/ln(vocabulary 100)"."""
    lead = lead_of_right(c)
    divisor = f"ln(vocabulary {vocabulary})"
    if uses_scores(c) and c["maxent_score_norm"] == "sum":
        divisor = f"(max_completion_length * {divisor}), as scores are sums,"
    words = f"{slack * lead:.3g}/{divisor}"
    if uses_scores(c) and c["maxent_score_scale"] != 1:
        words += f" over maxent_score_scale={c['maxent_score_scale']}"
    if lead < 0.995:
        words += f" (less than {slack} by maxent_q_epsilon or unlikeliness_coef)"
    return words


# --- warnings


def clips(objective: Objective, c: dict) -> bool:
    """Whether ratios are clipped. Those of cispo are capped."""
    return objective.ratio != "cispo" and is_policy_gradient(c)


# (prefixes of keys, whether these keys have any effect, the key that turns them on). From this
# table and the next, unused() warns about keys that are set in vain.
SWITCHES = (
    (("info_seed_",), lambda c: c["info_seed_num_seeds"] > 0, "info_seed_num_seeds"),
    (("controller_meta_",), lambda c: c["controller_meta_method"] != "", "controller_meta_method"),
    (("maxent_tau_",), has_entropy_target, "maxent_target_excess_entropy"),
    (("kl_horizon", "kl_ctl", "beta_"), lambda c: c["kl_target"] > 0, "kl_target"),
    (("reference_",), lambda c: c["beta"] > 0, "beta"),
    (("mode_entropy_",), lambda c: c["mode_entropy_coef"] > 0, "mode_entropy_coef"),
    (
        ("rollout_timeout", "weight_sync"),
        lambda c: c["rollout_engine"] == "server",
        "rollout_engine",
    ),
    # servers: python -m server reads them
    (("vllm_options",), lambda c: c["rollout_engine"] != "hf", "rollout_engine"),
    (("wandb_options",), lambda c: c["report_to"] == "wandb", "report_to"),
    # in the first update of a batch the old policy is the current one: nothing to clip
    (("epsilon", "delta"), lambda c: c["num_iterations"] > 1, "num_iterations"),
)
# key -> whether it has any effect with this objective and config
USED = {
    # a user's own formula for advantages gets both scale_rewards and pkpo_k
    "scale_rewards": lambda o, c: o.advantage != "pass_at_k" and not o.group_loss,
    "epsilon": clips,
    "epsilon_high": clips,
    "delta": clips,
    "cispo_epsilon_max": lambda o, c: (
        o.ratio == "cispo" and (c["num_iterations"] > 1 or c["cispo_epsilon_max"] < 1)
    ),
    "importance_sampling": lambda o, c: is_policy_gradient(c),
    "importance_sampling_cap": lambda o, c: (
        is_policy_gradient(c) and c["importance_sampling"] != "none"
    ),
    "token_entropy_coef": lambda o, c: o.term == "token_entropy",
    "seed_grpo_alpha": lambda o, c: o.term == "semantic_entropy",
    "pkpo_k": lambda o, c: o.advantage != "centred" and not o.group_loss,
    "maxent_tau": lambda o, c: o.group_loss != "" or o.row_weights,
    "maxent_q_temperature": lambda o, c: o.group_loss != "",
    "maxent_q_epsilon": lambda o, c: o.group_loss != "",
    "maxent_score_norm": lambda o, c: uses_scores(c) or uses_ref_scores(c),
    "maxent_score_scale": lambda o, c: uses_scores(c) or uses_ref_scores(c),
    "maxent_group_weight": lambda o, c: o.group_loss != "",
    "maxent_loss": lambda o, c: o.group_loss == "weights",
    "maxent_skip_equal_groups": lambda o, c: (
        o.group_loss != "" and c["maxent_group_weight"] != "spread"
    ),
    "xdr_utility": lambda o, c: o.row_weights,
    "kl_loss_type": lambda o, c: c["beta"] > 0 and adds_kl(c),
    "maxent_tau_lr": lambda o, c: not c["controller_meta_method"],
    "maxent_tau_warmup_steps": lambda o, c: not c["controller_meta_method"],
    "kl_horizon": lambda o, c: not c["controller_meta_method"],
    "kl_ctl_step_size": lambda o, c: not c["controller_meta_method"],
    # "analytic" takes no virtual steps, "first_order" one
    "controller_meta_virtual_lr": lambda o, c: c["controller_meta_method"] != "analytic",
    "controller_meta_use_hessian": lambda o, c: c["controller_meta_method"] != "analytic",
    "controller_meta_truncation_steps": lambda o, c: (
        c["controller_meta_method"] in ("", "truncated_backprop")
    ),
    # true without seeds, too: then SWITCHES warns, and one warning is enough
    "info_seed_temperature": lambda o, c: (
        c["info_seed_num_seeds"] == 0 or c["info_seed_loss_type"] == "infonce"
    ),
}


def unused(c: dict, defaults: dict) -> list[str]:
    """Sentences about changed settings that nothing reads, by SWITCHES and USED: one for each
    switch that is off, and one for the objective. Each setting is in one of them only."""
    changed = [key for key in c if key in defaults and c[key] != defaults[key]]
    objective = OBJECTIVES[c["objective"]]
    unread = [key for key in changed if key in USED and not USED[key](objective, c)]
    sentences = []
    for prefixes, is_read, switch in SWITCHES:
        vain = [key for key in changed if key.startswith(prefixes) and key != switch]
        # what the objective does not read has no effect with the switch on, either
        vain = [key for key in vain if key not in unread]
        if vain and not is_read(c):
            sentences.append(f"{settings_text(vain, c)}: not used with {switch}={c[switch]!r}")
    if unread:
        sentences.append(
            f"{settings_text(unread, c)}: not used by objective={c['objective']!r} with the other "
            f"keys as they are"
        )
    return sentences


def settings_text(keys: list[str], c: dict) -> str:
    return ", ".join(f"{key}={c[key]!r}" for key in keys)


def warn_config(c: dict, vocabulary: int, defaults: dict) -> list[str]:
    """A sentence for each setting that is allowed but does nothing or is known to hurt. c: with
    maxent_tau filled in, see common.with_tau."""
    objective = OBJECTIVES[c["objective"]]
    warnings = unused(c, defaults | {"maxent_tau": default_tau(c, vocabulary)})
    if objective.group_loss:
        warnings += tau_warnings(c, vocabulary)
    if objective.ratio == "sequence" and c["num_iterations"] > 1 and c["epsilon"] > 0.01:
        warnings.append(
            f"epsilon={c['epsilon']} hardly ever clips long rows under "
            f"objective={c['objective']!r}, whose ratio is a mean over the tokens of a row: its "
            "paper has epsilon=3e-4, epsilon_high=4e-4"
        )
    if c["kl_target"] > 0 and not moves_beta(c):
        off = [f"{key}=0" for key in ("kl_horizon", "kl_ctl_step_size") if c[key] == 0]
        warnings.append(f"kl_target={c['kl_target']}: not used with {' and '.join(off)}")
    if c["warmup_steps"] > c["max_steps"]:
        warnings.append(
            f"warmup_steps={c['warmup_steps']} is more than max_steps={c['max_steps']}: the "
            f"learning rate ends on its way up to learning_rate={c['learning_rate']}"
        )
    if min(values_of(c["temperature"])) < 0.1:
        warnings.append(
            f"temperature={c['temperature']} goes below 0.1: the completions of a group are then "
            f"nearly the same, and nothing is learnt from equal rewards; 0.6 to 1.0 is usual"
        )
    if c["keep_every"] and c["save_steps"] <= 0:
        warnings.append(
            f"keep_every={c['keep_every']} keeps no checkpoint that save_steps={c['save_steps']} "
            "does not save"
        )
    elif c["keep_every"] % max(1, c["save_steps"]):
        both = math.lcm(c["keep_every"], c["save_steps"])
        warnings.append(
            f"keep_every={c['keep_every']} is no multiple of save_steps={c['save_steps']}: of the "
            f"checkpoints saved on the way it keeps only every {both}th step's"
        )
    if c["replay"].keys() - {"size"} and entries(c, "replay")["size"] == 0:
        warnings.append(f"replay={c['replay']}: not used without replay.size, such as 1000 prompts")
    # 0.3 is ten times the default; from about 30 on the control loop is unstable
    if steers_tau(c) and c["maxent_tau_lr"] > 0.3:
        warnings.append(
            f"maxent_tau_lr={c['maxent_tau_lr']} is above 0.3: tau will overshoot its target"
        )
    if steers_tau(c) and objective.row_weights:
        warnings.append(
            "under objective='xdr' a larger tau means less diversity: an entropy target pushes "
            "the wrong way"
        )
    by_likelihood = c["unlikeliness_coef"] > 0 or objective.term == "semantic_entropy"
    if c["info_seed_num_seeds"] > 0 and by_likelihood:
        warnings.append(
            "info_seed_num_seeds > 0 with unlikeliness_coef > 0 or objective='seed_grpo': these "
            "compare the likelihoods of a group's rows, and rows with a seed answered another "
            "prompt"
        )
    return warnings + kl_warnings(c) + reward_warnings(c) + meta_warnings(c)


def kl_warnings(c: dict) -> list[str]:
    """Sentences about a beta that acts on weights or goals, where a larger one does not mean a
    smaller KL to the reference."""
    objective = OBJECTIVES[c["objective"]]
    if adds_kl(c) or c["beta"] == 0:
        return []
    if objective.group_loss == "balance":
        largest = c["beta_max"] if moves_beta(c) else c["beta"]
        if largest <= c["maxent_tau"]:
            return []
        return [
            f"under objective='flow' beta may be {largest:g}, above "
            f"maxent_tau={c['maxent_tau']:.3g}: the reference is then sharpened beyond itself, and "
            f"the KL rises with beta; keep beta, or beta_max, below maxent_tau"
        ]
    pulls_back = uses_scores(c)  # "listwise", "floored"
    if not moves_beta(c) or pulls_back:
        return []
    how = f"maxent_loss={c['maxent_loss']!r}" if objective.group_loss else "xdr_ref_tilt=True"
    return [
        f"with {how} beta changes the weights and nothing pulls the policy back to the reference: "
        f"kl_target={c['kl_target']} will not be held by it"
    ]


def reward_warnings(c: dict) -> list[str]:
    """Sentences about keys that make rewards unequal, or learn from equal ones, where another key
    expects the opposite."""
    objective = OBJECTIVES[c["objective"]]
    warnings = []
    seed_reward = rewards_seeds(c)
    shaped = c["unlikeliness_coef"] > 0 or c["policy_entropy_bonus_coef"] > 0 or seed_reward
    if shaped and is_on(c["maxent_target_excess_entropy"]):
        warnings.append(
            "maxent_target_excess_entropy with unlikeliness_coef, policy_entropy_bonus_coef or "
            "info_seed_reward > 0: these make right rows unequal, which takes the excess entropy "
            "below 0, and tau rises for it until wrong answers win"
        )
    several = sum(weight != 0 for weight in c["reward_weights"]) > 1
    # "none" makes every group count, whatever its rewards
    selects = c["maxent_group_weight"] == "equal" and c["maxent_skip_equal_groups"] != "none"
    if objective.group_loss and several and selects:
        warnings.append(
            f"reward_weights={c['reward_weights']} with objective={c['objective']!r}: a group "
            "without a right answer counts as fully as one with, if the other rewards differ in "
            "it; set maxent_group_weight='spread' (docs/rewards.md has other cures)"
        )
    # whether groups in which all rewards are equal teach something by these rewards
    learns_equal = objective.group_loss != "" and skipped_groups(c) != "all"
    unlikely = not objective.group_loss and c["unlikeliness_coef"] > 0
    if c["resample_equal_groups"] and (learns_equal or unlikely):
        key = "maxent_skip_equal_groups" if objective.group_loss else "unlikeliness_coef"
        warnings.append(
            f"resample_equal_groups replaces groups of equal rewards, and {key}={c[key]!r} would "
            f"learn from them"
        )
    if is_on(c["maxent_target_weight_entropy"]) and (learns_equal or seed_reward):
        if seed_reward:
            cure = ""
        elif c["controller_meta_method"]:  # which knows no other target
            cure = "; set maxent_skip_equal_groups='all'"
        else:
            cure = "; use maxent_target_excess_entropy"
        warnings.append(
            "maxent_target_weight_entropy counts every active group, and here those whose answers "
            "are all equally good are active, with flat weights at any tau: the target may be out "
            f"of reach{cure}"
        )
    scale = scale_of(c)
    if seed_reward and scale in ("group", "mean") and not objective.group_loss:
        size = "standard deviation 1" if scale == "group" else "advantages of up to G"
        warnings.append(
            f"info_seed_reward > 0 with scale_rewards={scale!r}: in a group of equal task rewards "
            f"the small seed rewards are blown up to {size}; use scale_rewards='none' (of maxrl "
            f"that makes dr_grpo) or info_seed_reward=0"
        )
    return warnings


def meta_warnings(c: dict) -> list[str]:
    """Sentences about a meta-controller that follows a gradient and would find too small a one."""
    if c["controller_meta_method"] in ("", "analytic"):
        return []
    warnings = []
    # range of log q, if every reward function gives 0 to 1
    reach = sum(map(abs, c["reward_weights"])) / c["maxent_q_temperature"]
    # at half this bound the slope in log tau is less than a thousandth of an ordinary one
    # (tests/test_controllers_config.py)
    if c["maxent_tau"] + c["beta"] < 0.05 * reach:
        warnings.append(
            f"maxent_tau={c['maxent_tau']} + beta={c['beta']} is below 0.05 * the range of "
            f"log q = {0.05 * reach:.3f}: the weights are saturated and "
            f"controller_meta_method={c['controller_meta_method']!r} has no gradient to follow; "
            "start both higher"
        )
    if c["controller_meta_optimizer"] == "sgd":
        warnings.append(
            f"controller_meta_method={c['controller_meta_method']!r} with 'sgd' crawls where its "
            "gradient is small: use controller_meta_optimizer='adam'"
        )
    return warnings
