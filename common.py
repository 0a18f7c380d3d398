"""Configuration, the run header, the metrics log and the phase timer: what every script here shares.

    config = load_config(sys.argv[1:])     # config/default.py <- file(s) <- --key=value
"""
import ast
import difflib
import errno
import json
import math
import os
import platform
import shutil
import subprocess
import sys
import time
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path

from controllers import steers_beta, steers_tau

ROOT = Path(__file__).resolve().parent
WANDB_FINISH_SECONDS = 300      # that a run that is done waits until Weights & Biases has the rest; what is left can be handed in by `wandb sync`
ALIASES = {"init_kl_coeff": "beta"}     # older names of the research code -> ours

CHOICES = {
    "dtype": ("auto", "float32", "bfloat16"),
    "long_prompts": ("error", "drop", "truncate"),
    "rollout_engine": ("vllm", "server", "hf"),
    "rollout_ahead": (0, 1),
    "vllm_enforce_eager": ("auto", "yes", "no"),
    "weight_sync": ("disk", "nccl"),
    "objective": ("maxent", "xdr", "grpo", "dr_grpo", "dapo", "gspo", "cispo", "seed_grpo", "token_entropy"),
    "scale_rewards": ("", "group", "batch", "none"),
    "importance_sampling": ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask", "sequence_geometric", "none"),
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
POSITIVE = ("prompts_per_step", "max_prompt_length", "max_completion_length", "temperature", "maxent_q_temperature", "max_steps",
            "learning_rate", "reward_timeout", "reward_memory_gib", "soft_overlong_buffer", "max_tokens_per_micro_batch",
            "logprob_chunk_size", "max_skipped_steps", "importance_sampling_cap", "cispo_epsilon_max", "maxent_tau_min", "beta_min",
            "maxent_tau_lr", "controller_meta_lr", "info_seed_temperature", "controller_meta_update_interval",
            "controller_meta_truncation_steps", "controller_meta_virtual_lr", "vllm_kv_cache_gib", "vllm_gpu_memory_utilization",
            "vllm_tensor_parallel_size", "eval_max_prompts", "eval_num_generations", "eval_seeds", "eval_temperature", "sft_steps",
            "sft_batch_size", "sft_learning_rate", "num_iterations", "rollout_concurrency", "rollout_timeout")
NOT_NEGATIVE = ("info_seed_lambda", "info_seed_reward", "beta", "maxent_tau", "maxent_q_epsilon", "mode_entropy_coef",
                "policy_entropy_bonus_coef", "token_entropy_coef", "seed_grpo_alpha", "epsilon", "kl_target", "kl_horizon",
                "kl_ctl_step_size", "maxent_target_horizon", "controller_meta_beta_grad_clip", "warmup_steps", "weight_decay",
                "max_grad_norm", "eval_steps", "save_total_limit", "log_rollouts_steps", "seed", "reward_workers", "generate_max_prompts", "keep_every",
                "replay_size", "replay_ucb", "resample_equal_groups")


class UserError(ValueError):
    """Something the user can put right. Scripts print it as one sentence and exit with status 2."""


class RunStopped(RuntimeError):
    """A run that must not go on, for a reason that is not a bug of the program: one sentence, exit status 1."""


def script(main) -> None:
    """Runs main(argv) of a script; errors that are meant for a person come without a stack of library frames."""
    if {"-h", "--help"} & set(sys.argv[1:]):
        return print(f"{main.__globals__['__doc__']}\nconfig/default.py lists every key with its meaning; --key=value sets one.")
    try:
        main(sys.argv[1:])
    except (UserError, RunStopped) as error:
        sys.stdout.flush()
        print(f"error: {error}", file=sys.stderr, flush=True)
        # not sys.exit: other ranks may be in a collective, and the atexit handlers of the libraries would wait for them
        os._exit(2 if isinstance(error, UserError) else 1)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        print(f"error: {error.filename or 'a file of the run'} could not be written: {error.strerror}", file=sys.stderr, flush=True)
        os._exit(1)
    except RuntimeError as error:
        if not any(word in str(error) for word in ("gloo", "NCCL", "Connection closed by peer")):
            raise
        print(f"error: another rank has died or left (its own words are above or below): {str(error).splitlines()[0]}", file=sys.stderr, flush=True)
        os._exit(1)


# --- config

def read_config_file(path) -> dict:
    """The `key = value` lines of a config file as a dict; literals only, so reading a stranger's file runs nothing."""
    try:
        tree = ast.parse(Path(path).read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise UserError(f"config file {path} can't be read: {error.strerror}") from None
    except (SyntaxError, ValueError) as error:
        raise UserError(f"{path}:{getattr(error, 'lineno', 0)}: not a config file of `key = value` lines: {error}") from None
    values = {}
    for node in tree.body:
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            continue    # a docstring
        if not (isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name)):
            raise UserError(f"{path}:{node.lineno}: expected `key = value`, found {ast.unparse(node)[:60]!r}")
        key = node.targets[0].id
        try:
            value = ast.literal_eval(node.value)
        except (ValueError, TypeError):
            raise UserError(f"{path}:{node.lineno}: {key} must be a plain literal, not {ast.unparse(node.value)[:60]!r}") from None
        if key in values:
            raise UserError(f"{path}:{node.lineno}: {key} is set twice")
        values[key] = value
    return values


def merge(config: dict, values: dict, source: str) -> dict:
    """A copy of `config` with `values` on top; a key it does not know or a value of another type is a UserError naming `source`."""
    merged = dict(config)
    for name, value in values.items():
        key = ALIASES.get(name, name)
        if name != key and key in values:
            raise UserError(f"{source}: {key} is set twice, once by its older name {name}")
        if key not in config:
            near = difflib.get_close_matches(key, config, n=1)
            raise UserError(f"{source}: unknown key {name!r}" + (f"; did you mean {near[0]!r}?" if near else "; config/default.py lists all keys"))
        merged[key] = coerce(value, config[key], f"{source}: {name}")
    return merged


def coerce(value, default, where: str):
    """`value` in the type of `default`: ints may stand for floats, "inf" is a float, True is not a number."""
    kind = type(default)
    if kind is float and isinstance(value, str) and value in ("inf", "Infinity"):
        return math.inf
    if kind is float and type(value) is int:
        return float(value)
    if kind is dict and type(value) is dict:        # JSON, such as a run's config.json, turns the steps of a schedule into text
        return {int(k) if isinstance(k, str) and k.isdecimal() else k: v for k, v in value.items()}
    if type(value) is not kind:
        raise UserError(f"{where} must be of type {kind.__name__} like {default!r}, not {type(value).__name__} {value!r}")
    if kind is float and math.isnan(value):
        raise UserError(f"{where} is not a number")
    return value


def read_flag(argument: str, defaults: dict) -> dict:
    """{key: value} of one --key=value; strings need no quotes."""
    key, equals, text = argument[2:].partition("=")
    if not equals or not argument.startswith("--"):
        raise UserError(f"{argument}: write --key=value, in one word: --{argument.lstrip('-').partition('=')[0] or 'key'}=...")
    if isinstance(defaults.get(ALIASES.get(key, key)), str):
        return {key: text}
    try:
        return {key: ast.literal_eval(text)}
    except (ValueError, SyntaxError, TypeError):
        return {key: text}      # merge() says which type was expected


def load_config(argv) -> dict:
    """The resolved and checked config: config/default.py, then the files of `argv`, then its --key=value, whatever their order."""
    defaults = read_config_file(ROOT / "config" / "default.py")
    config = dict(defaults)
    flags = [read_flag(a, defaults) for a in argv if a.startswith("-")]     # before the files: in "--seed 3" the 3 is no file
    for path in [a for a in argv if not a.startswith("-")]:
        config = merge(config, read_config_file(path), path)
    for flag in flags:
        config = merge(config, flag, "command line")
    check_config(config)
    return config


def check_config(c: dict) -> None:
    """One sentence about the first value that can't work, before anything is loaded."""
    def need(ok, sentence):
        if not ok:
            raise UserError(sentence)
    for key, choices in CHOICES.items():
        need(c[key] in choices, f"{key}={c[key]!r} must be one of {', '.join(map(repr, choices))}")
    for key in POSITIVE:
        need(c[key] > 0, f"{key}={c[key]} must be greater than 0")
    for key in NOT_NEGATIVE:
        need(c[key] >= 0, f"{key}={c[key]} must not be negative")
    for key in [k for k, v in c.items() if v == math.inf and k != "maxent_tau"]:
        raise UserError(f"{key}=inf must be finite")
    need(not c["eval_command"] or "{checkpoint}" in c["eval_command"], f"eval_command={c['eval_command']!r} must hold {{checkpoint}}, its path")
    need(c["output_dir"].strip() != "", f"output_dir={c['output_dir']!r} is empty")
    for key in ("output_dir", "model", "dataset_name", "eval_dataset_name", "resume_from_checkpoint"):
        need(not c[key].startswith("~"), f"{key}={c[key]!r}: no shell has replaced the ~; write $HOME or the whole path")
    for key in ("adam_beta1", "adam_beta2"):
        need(0 <= c[key] < 1, f"{key}={c[key]} must be at least 0 and below 1")
    for key in ("max_logp_difference", "maxent_target_weight_entropy", "maxent_target_excess_entropy", "maxent_target_final",
                "maxent_tau_warmup_steps", "save_steps", "controller_meta_tau_lr", "controller_meta_beta_lr"):
        need(c[key] == -1 or c[key] >= 0, f"{key}={c[key]} must be -1 or not negative")
    G = c["num_generations"]
    need(G >= 2, f"num_generations={G} must be at least 2: a completion is compared with its group (the group's mean, its standard deviation "
                 f"under scale_rewards={c['scale_rewards']!r}), and alone it has advantage 0")
    if c["info_seed_enabled"]:
        need("{seed}" in c["info_seed_prompt_template"], f"info_seed_prompt_template={c['info_seed_prompt_template']!r} must hold {{seed}}")
        need(c["info_seed_num_seeds"] >= 2, f"info_seed_num_seeds={c['info_seed_num_seeds']} must be at least 2: one seed can't be told from another")
        need(c["prompts_per_step"] >= 2, "info_seed_enabled=True needs prompts_per_step of at least 2: a seed's completions are compared over prompts")
        G += c["info_seed_num_seeds"]
    need(c["maxent_q_epsilon"] * G <= 1, f"maxent_q_epsilon={c['maxent_q_epsilon']} must be at most 1 / (rows of a group) = {1 / G:.4f}")
    need(c["epsilon_high"] == -1 or c["epsilon_high"] >= 0, f"epsilon_high={c['epsilon_high']} must be -1 (as epsilon) or not negative")
    ceiling = 1 + (c["epsilon"] if c["epsilon_high"] == -1 else c["epsilon_high"])
    need(c["delta"] == -1 or c["delta"] >= ceiling, f"delta={c['delta']} must be -1 (off) or at least 1 + epsilon_high = {ceiling}")
    need(c["vllm_gpu_memory_utilization"] < 1,
         f"vllm_gpu_memory_utilization={c['vllm_gpu_memory_utilization']} must be below 1: the learner needs memory too")
    need(len(c["reward_funcs"]) > 0, "reward_funcs=[] names no reward function")
    need(len(c["reward_funcs"]) == len(c["reward_weights"]),
         f"reward_weights={c['reward_weights']} must hold one weight for each of reward_funcs={c['reward_funcs']}")
    need(all(type(w) in (int, float) and math.isfinite(w) for w in c["reward_weights"]),
         f"reward_weights={c['reward_weights']} must be finite numbers")
    for key, lowest in (("temperature_schedule", 1e-6), ("easy_schedule", 0)):
        need(all(type(step) is int and step >= 0 and type(value) in (int, float) and lowest <= value < math.inf for step, value in c[key].items()),
             f"{key}={c[key]!r} must be {{step: value}} with whole steps from 0 on and values of at least {lowest}")
    need(all(value <= 1 for value in c["easy_schedule"].values()), f"easy_schedule={c['easy_schedule']!r}: a share of prompts is at most 1")
    need(bool(c["easy_schedule"]) == bool(c["easy_dataset_name"]),
         f"easy_schedule={c['easy_schedule']!r} and easy_dataset_name={c['easy_dataset_name']!r} need each other")
    need(not c["rollout_ahead"] or c["rollout_engine"] == "server",
         f"rollout_ahead=1 needs rollout_engine='server': with {c['rollout_engine']!r} sampling and learning share a process")
    need(not (c["dataset_mixture"] and c["dataset_name"]),
         f"dataset_mixture and dataset_name={c['dataset_name']!r} are both set: put the dataset into the mixture, with --dataset_name= empty")
    need(0 <= c["replay_fraction"] <= 1, f"replay_fraction={c['replay_fraction']} is a share of a step's prompts, between 0 and 1")
    need(0 <= c["max_reward_failures"] <= 1, f"max_reward_failures={c['max_reward_failures']} is a share of a step, between 0 and 1")
    need("soft_overlong" not in c["reward_funcs"] or c["soft_overlong_buffer"] <= c["max_completion_length"],
         f"soft_overlong_buffer={c['soft_overlong_buffer']} must not be above max_completion_length={c['max_completion_length']}")
    need(not (c["offload_optimizer"] and c["zero_stage"] == 0), "offload_optimizer=True needs zero_stage 1, 2 or 3")
    need(c["mode_entropy_coef"] == 0 or c["objective"] != "maxent", "mode_entropy_coef belongs to the policy-gradient objectives; "
         "maxent already makes equally rewarded answers equally likely: set it to 0 or change objective='maxent'")
    need(not c["xdr_ref_tilt"] or (c["objective"] == "xdr" and c["beta"] > 0),
         f"xdr_ref_tilt=True needs objective='xdr' and beta > 0, not objective={c['objective']!r} and beta={c['beta']}")
    need(not c["xdr_mode_adaptive_tau"] or c["objective"] == "xdr", f"xdr_mode_adaptive_tau=True needs objective='xdr', not {c['objective']!r}")
    check_controllers(c, G, need)


def check_controllers(c: dict, G: int, need) -> None:
    """The targets of tau and beta must be reachable, and their start inside the bounds. G: rows of a group."""
    meta = c["controller_meta_enabled"]
    entropy, excess = c["maxent_target_weight_entropy"], c["maxent_target_excess_entropy"]
    need(entropy == -1 or excess == -1, f"maxent_target_weight_entropy={entropy} and maxent_target_excess_entropy={excess} are both on: choose one")
    need(excess == -1 or 0 < excess < 1, f"maxent_target_excess_entropy={excess} must lie between 0 and 1")
    if c["maxent_target_final"] >= 0:
        need(entropy >= 0 or excess >= 0, f"maxent_target_final={c['maxent_target_final']} needs a target to start from")
        need(c["maxent_target_horizon"] > 0, f"maxent_target_final={c['maxent_target_final']} needs maxent_target_horizon > 0, in how many steps to get there")
        need(excess == -1 or 0 < c["maxent_target_final"] < 1, f"maxent_target_final={c['maxent_target_final']} is of an excess entropy: between 0 and 1")
    highest = max(entropy, c["maxent_target_final"] if entropy >= 0 else -1)
    need(highest <= math.log(G), f"maxent_target_weight_entropy or maxent_target_final, {highest}, is above ln(rows of a group) = {math.log(G):.3f}, "
                                 f"which no weights can reach")
    if meta:
        need(c["objective"] == "maxent", f"controller_meta_enabled=True steers the weights of maxent; objective={c['objective']!r} has none that it knows")
        need(entropy >= 0 and c["kl_target"] > 0, f"controller_meta_enabled=True needs both targets, maxent_target_weight_entropy={entropy} and "
                                                  f"kl_target={c['kl_target']}")
        need(c["controller_meta_virtual_lr"] < 4, f"controller_meta_virtual_lr={c['controller_meta_virtual_lr']} must be below 4, or virtual steps overshoot for ever")
    if meta or steers_tau(c):
        need(c["objective"] in ("maxent", "xdr"), f"an entropy target steers the weights of maxent and xdr; objective={c['objective']!r} has none")
        need(c["maxent_tau_max"] > c["maxent_tau_min"],
             f"maxent_tau_max={c['maxent_tau_max']} must be above maxent_tau_min={c['maxent_tau_min']} when tau is steered")
        need(c["maxent_tau_min"] <= c["maxent_tau"] <= c["maxent_tau_max"],
             f"maxent_tau={c['maxent_tau']} is steered: start it between maxent_tau_min={c['maxent_tau_min']} and maxent_tau_max={c['maxent_tau_max']}")
    if meta or steers_beta(c):
        need(c["beta"] > 0, f"beta={c['beta']} with kl_target={c['kl_target']}: the controller multiplies beta, so it must start above 0")
        need(c["beta_max"] > c["beta_min"], f"beta_max={c['beta_max']} must be above beta_min={c['beta_min']} when beta is steered")
        need(c["beta_min"] <= c["beta"] <= c["beta_max"],
             f"beta={c['beta']} is steered: start it between beta_min={c['beta_min']} and beta_max={c['beta_max']}")
    need(not steers_beta(c) or c["kl_ctl_step_size"] < c["kl_horizon"],
         f"kl_ctl_step_size={c['kl_ctl_step_size']} must be below kl_horizon={c['kl_horizon']}, or beta could turn negative")


def warn_config(c: dict, vocabulary: int) -> list[str]:
    """Settings that run but are known to hurt, a sentence each."""
    warnings = []
    product, limit = c["maxent_q_temperature"] * c["maxent_tau"], 1 / math.log(vocabulary)
    if c["objective"] == "maxent" and product > limit * 1.001:
        warnings.append(f"maxent_q_temperature * maxent_tau = {product:.3f} is above 1/ln(vocabulary {vocabulary}) = {limit:.3f}: the wrong answers "
                        f"of a group outnumber the right ones and a target this flat feeds them; expect a policy that gets worse")
    if c["objective"] == "maxent" and c["maxent_loss"] == "listwise" and c["maxent_score_norm"] == "sum":
        warnings.append("maxent_score_norm='sum' has destroyed policies (held-out accuracy to 0 in 50 steps); 'length' is the safe choice")
    if steers_tau(c) and c["maxent_tau_lr"] > 0.3:
        warnings.append(f"maxent_tau_lr={c['maxent_tau_lr']} is above 0.3: tau will overshoot its target")
    if steers_tau(c) and c["objective"] == "xdr":
        warnings.append("under objective='xdr' a larger tau means less diversity: an entropy target pushes the wrong way")
    reach = sum(map(abs, c["reward_weights"])) / c["maxent_q_temperature"]      # range of log q, if a reward is in 0..1
    if c["controller_meta_enabled"] and c["controller_meta_method"] != "analytic":
        if c["maxent_tau"] + c["beta"] < 0.05 * reach:
            warnings.append(f"maxent_tau={c['maxent_tau']} + beta={c['beta']} is below 0.05 * the range of log q = {0.05 * reach:.3f}: the weights are "
                            f"saturated and controller_meta_method={c['controller_meta_method']!r} has no gradient to follow; start both higher")
        if c["controller_meta_optimizer"] == "sgd":
            warnings.append(f"controller_meta_method={c['controller_meta_method']!r} with 'sgd' crawls where its gradient is small: use "
                            f"controller_meta_optimizer='adam'")
    return warnings


# --- run folder, metrics, timing

def run_header(world: int) -> dict:
    """What another person needs to repeat this run: command, commit, versions, machine."""
    commit = ""
    if shutil.which("git"):
        commit = subprocess.run(["git", "-C", ROOT, "describe", "--always", "--dirty"], capture_output=True, text=True).stdout.strip()
    return {"time": time.strftime("%Y-%m-%d %H:%M:%S"), "command": " ".join(sys.argv), "commit": commit or "not a git checkout",
            "host": platform.node(), "cpus": os.cpu_count(), "world_size": world, "python": platform.python_version(),
            **{name: version(name) for name in ("torch", "transformers", "deepspeed", "datasets")}}


def check_run_folder(config: dict, resuming: bool) -> None:
    """UserError if output_dir holds something that this run may not touch."""
    folder = Path(config["output_dir"])
    there = next(path for path in (folder.resolve(), *folder.resolve().parents) if path.exists())
    if not there.is_dir() or not os.access(there, os.W_OK):
        raise UserError(f"output_dir={str(folder)!r} can't be made: {str(there)!r} is {'not writable' if there.is_dir() else 'a file'}")
    if resuming or not folder.exists() or all(path.name == "logs" for path in folder.iterdir()):     # those of a batch script are there first
        return
    if not config["overwrite_output_dir"]:
        raise UserError(f"output_dir={str(folder)!r} is not empty: continue it with --resume_from_checkpoint=latest, "
                        f"replace it with --overwrite_output_dir=True, or choose another --output_dir")
    if not (folder / "metrics.jsonl").exists():
        raise UserError(f"output_dir={str(folder)!r} holds files but no metrics.jsonl, so it is not a run of this program and will not be deleted")
    for key in ("model", "dataset_name", "eval_dataset_name"):
        if config[key] and Path(config[key]).resolve().is_relative_to(folder.resolve()):
            raise UserError(f"{key}={config[key]!r} lies in output_dir={str(folder)!r}, which overwrite_output_dir=True would delete: "
                            f"choose another --output_dir")


def make_run_folder(config: dict, header: dict, resuming: bool) -> None:
    """output_dir with config.json and a line in launches.jsonl; an earlier run is deleted unless this one continues it. Rank 0 only."""
    folder = Path(config["output_dir"])
    folder.mkdir(parents=True, exist_ok=True)
    for path in [] if resuming else folder.iterdir():
        if path.name != "logs":
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
    for name in ("stop", "done"):
        (folder / name).unlink(missing_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    with open(folder / "launches.jsonl", "a") as file:
        file.write(json.dumps(header) + "\n")


class MetricsLog:
    """metrics.jsonl, one JSON object per call, and Weights & Biases when asked for. Only rank 0 makes one."""

    def __init__(self, folder: Path, config: dict, step: int):
        """`step`: where this run begins. What a run that died left after its last checkpoint is dropped: later steps, half a line."""
        path = folder / "metrics.jsonl"
        whole = [line for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")] if path.exists() else []
        kept = [line for line in whole if json.loads(line)["step"] <= step]
        path.write_text("".join(kept))
        self.file = open(path, "a", buffering=1)
        self.wandb = None
        if config["report_to"] == "wandb":
            import wandb
            try:
                self.wandb = wandb.init(project=config["wandb_project"], name=config["wandb_name"] or folder.name, config=config,
                                        mode=config["wandb_mode"], dir=folder, settings=wandb.Settings(finish_timeout=WANDB_FINISH_SECONDS))
            except wandb.errors.Error as error:
                raise UserError(f"report_to='wandb' with wandb_mode={config['wandb_mode']!r}: {' '.join(str(error).split())}; log in, "
                                f"or use --wandb_mode=offline") from None

    def write(self, step: int, metrics: dict) -> None:
        # NaN and infinity are not JSON: they become null, so that any reader can parse the file
        row = {"step": step, **{k: (v if math.isfinite(v) else None) for k, v in metrics.items()}}
        self.file.write(json.dumps(row) + "\n")
        self.tell_wandb(lambda run: run.log(metrics, step=step))

    def close(self) -> None:
        self.file.close()
        self.tell_wandb(lambda run: run.finish())

    def tell_wandb(self, act) -> None:
        """act(run) if there is one. It is a copy: that its service has died, out of memory for example, is no reason to end a run."""
        try:
            if self.wandb:
                act(self.wandb)
        except Exception as error:
            print(f"warning: Weights & Biases is gone ({type(error).__name__}: {error}); metrics.jsonl goes on alone", flush=True)
            self.wandb = None


class Timer:
    """Seconds per phase of one step: `with timer("rollout"): ...`, then timer.take()."""

    def __init__(self):
        self.seconds, self.started = {}, time.perf_counter()

    @contextmanager
    def __call__(self, phase: str):
        start = time.perf_counter()
        yield
        self.seconds[phase] = self.seconds.get(phase, 0.0) + time.perf_counter() - start

    def take(self) -> dict:
        """{"time/<phase>": s, ..., "time/step": s} since the last take, and starts over."""
        now = time.perf_counter()
        taken = {f"time/{phase}": s for phase, s in self.seconds.items()} | {"time/step": now - self.started}
        self.seconds, self.started = {}, now
        return taken
