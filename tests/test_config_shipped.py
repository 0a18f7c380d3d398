"""The shipped config files, the defaults with their comments, and what a config is warned about."""

import ast
import json
import math
import re
import subprocess
from pathlib import Path

import pytest
from configs import DEFAULTS

from checks import OBJECTIVES, SWITCHES, USED, steers_beta, steers_tau, tau_of_excess, warn_config
from common import ROOT, load_config, with_tau


def shipped_configs() -> list[str]:
    """Not those of a user's own beside them, where git can tell."""
    names = [path.name for path in (ROOT / "config").glob("*.py")]
    tracked = subprocess.run(
        ["git", "ls-files", "config"], cwd=ROOT, capture_output=True, text=True
    ).stdout
    return sorted(name for name in names if f"config/{name}" in tracked or not tracked)


CONFIGS = shipped_configs()


@pytest.mark.parametrize("name", CONFIGS)
def test_every_shipped_config_loads_and_says_how_to_launch_it(name):
    config = load_config([str(ROOT / "config" / name)])
    text = (ROOT / "config" / name).read_text()
    if name != "default.py":
        assert f"train.py config/{name}" in text.split("\nmodel")[0]
        assert config["model"] and config["output_dir"] == f"runs/{name.removesuffix('.py')}"


def test_every_objective_has_a_formula_in_loss_and_readme_names_no_other():
    """The table in checks.py says what is true of an objective; loss.py's docstring, or ADVANTAGES
    for one that is its advantages alone, the formula; the README what the shipped ones are for."""
    formulas = ast.get_docstring(ast.parse((ROOT / "loss.py").read_text()))
    for name, objective in OBJECTIVES.items():
        named = re.search(rf"\b{name}\b", formulas)
        assert named or objective.has_custom_advantages, (
            f"{name} needs its name and formula in the docstring of loss.py"
        )
    table = (ROOT / "README.md").read_text().split("| `objective` |")[1].split("\n\n")[0]
    lines = table.splitlines()[1:]
    listed = re.findall(r"`(\w+)`", " ".join(line.split("|")[1] for line in lines if line))
    assert set(SHIPPED) <= set(listed) <= set(OBJECTIVES)


def test_the_math_pair_differs_in_the_keys_of_the_objective_only():
    grpo, maxent = (
        load_config([str(ROOT / "config" / f"math_{name}.py")]) for name in ("grpo", "maxent")
    )
    differing = {key for key in grpo if grpo[key] != maxent[key]}
    assert {"objective", "output_dir"} <= differing
    assert {
        key for key in differing - {"objective", "output_dir"} if not key.startswith("maxent_")
    } == set()
    assert (grpo["objective"], maxent["objective"]) == ("grpo", "maxent")


@pytest.mark.parametrize("name", ["countdown_steered", "math_steered"])
def test_a_steered_recipe_differs_from_its_plain_one_in_the_keys_of_steering_only(name):
    plain = name.replace("steered", "tiny" if "countdown" in name else "maxent")
    ours, base = (load_config([str(ROOT / "config" / f"{n}.py")]) for n in (name, plain))
    differing = {key for key in ours if ours[key] != base[key]}
    # the demo's rate falls; targets of Countdown were measured at a constant one
    schedule = {"lr_scheduler_type", "max_steps"} if "countdown" in name else set()
    assert steers_beta(ours) and ours["beta"] > 0
    assert steers_tau(ours) == (name == "countdown_steered")
    assert {
        key
        for key in differing - {"output_dir", "beta", "kl_target", "reference_placement"} - schedule
        if not key.startswith(("maxent_t", "warmup_steps"))
    } == set()


def used_keys(path: Path) -> set:
    """The keys that a file reads as c["key"], config["key"], c.get("key") or entries(c, "key")."""
    tree = ast.parse(path.read_text())
    read = [(node.value, node.slice) for node in ast.walk(tree) if isinstance(node, ast.Subscript)]
    read += [
        (node.func.value, node.args[0])
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "get"
        and node.args
    ]
    read += [
        node.args
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == "entries"
    ]
    return {
        key.value
        for name, key in read
        if isinstance(name, ast.Name)
        and name.id in ("c", "config")
        and isinstance(key, ast.Constant)
    }


def test_every_key_is_used_and_every_key_that_is_used_exists():
    used = set().union(
        *(used_keys(path) for path in [*ROOT.glob("*.py"), *ROOT.glob("server/*.py")])
    )
    assert set(DEFAULTS) - used == set(), "keys that nothing reads"
    assert used - set(DEFAULTS) == set(), "keys that config/default.py does not list"


SPEAK_FOR_THEMSELVES = {
    "maxent_tau_min",
    "maxent_tau_max",
    "beta_min",
    "beta_max",
    "max_steps",
    "learning_rate",
    "eval_temperature",
    "eval_max_prompts",
}


def test_every_key_stands_once_in_a_group_and_says_what_it_means():
    lines = (ROOT / "config" / "default.py").read_text().splitlines()
    keys = [line for line in lines if re.match(r"\w+ = ", line)]
    assert len(keys) == len(DEFAULTS) and lines.index(keys[0]) > next(
        i for i, line in enumerate(lines) if line.startswith("# --- ")
    )
    assert {
        line.split(" = ")[0] for line in keys if not re.search(r" {2}# \S", line)
    } <= SPEAK_FOR_THEMSELVES


@pytest.mark.parametrize("name", CONFIGS)
def test_a_resolved_config_survives_json(name):
    config = load_config(
        [
            str(ROOT / "config" / name),
            "--maxent_tau=inf",
            "--maxent_target_excess_entropy=-1",  # what is steered starts within bounds
            "--reward_funcs=['math','countdown']",
            "--reward_weights=[1.0,0.5]",
        ]
    )
    again = json.loads(json.dumps(config))
    assert (
        again == config
        and list(again) == list(config)
        and [type(v) for v in again.values()] == [type(v) for v in config.values()]
    )


# --- warnings


def warnings_of(vocabulary: int, *argv) -> str:
    c = with_tau(load_config(list(argv)), vocabulary)
    return " ".join(warn_config(c, vocabulary, DEFAULTS))


def tau_for(vocabulary: int, *argv) -> float:
    """What maxent_tau is in a run, which writes it into its config.json."""
    config = with_tau(load_config(list(argv)), vocabulary)
    again = json.loads(json.dumps(config))
    assert with_tau(again, vocabulary) == again == config
    return config["maxent_tau"]


def test_tau_is_the_largest_that_is_not_warned_about_unless_it_is_set():
    assert DEFAULTS["maxent_tau"] == -1
    assert tau_for(100) == 1 / math.log(100)
    assert tau_for(151936) == 1 / math.log(151936)
    assert tau_for(100, "--maxent_tau=0.2") == 0.2
    scale = ["--maxent_q_temperature=2", "--maxent_score_scale=4"]
    assert tau_for(100, *scale) == pytest.approx(1 / math.log(100) / 8)
    sums = ["--maxent_score_norm=sum", "--max_completion_length=32"]
    for flags in ([], scale, sums):
        assert warnings_of(100, *flags) == ""
        assert warnings_of(100, *flags, f"--maxent_tau={1.01 * tau_for(100, *flags)}") != ""


def test_a_tau_that_is_steered_starts_within_its_bounds():
    steered = "--maxent_target_excess_entropy=0.1"
    assert tau_for(100, steered) == 1 / math.log(100)
    assert tau_for(100, steered, "--maxent_tau_max=0.1") == 0.1
    assert tau_for(100, steered, "--maxent_tau_min=0.3") == 0.3
    assert tau_for(100, "--maxent_tau_max=0.1") == 1 / math.log(100)


def test_a_target_flatter_than_one_over_ln_v_is_warned_about():
    assert all(
        part in warnings_of(100, "--maxent_tau=0.5") for part in ("maxent_tau", "0.5", "0.217")
    )
    assert "0.217" in warnings_of(100, "--maxent_tau=0.5", "--objective=flow")
    assert "maxent_tau" in warnings_of(100, "--maxent_tau=0.2", "--maxent_q_temperature=2")
    assert "0.217" not in warnings_of(100, "--maxent_tau=0.5", "--objective=grpo")


def test_floored_may_be_twice_as_flat():
    floored = "--maxent_loss=floored"
    assert warnings_of(100, floored, "--maxent_tau=0.43") == ""
    assert "2/ln(vocabulary 100) = 0.434" in warnings_of(100, floored, "--maxent_tau=0.45")
    # flow has no floor
    assert "= 0.217" in warnings_of(100, floored, "--maxent_tau=0.43", "--objective=flow")


def test_a_lower_bound_of_tau_takes_a_start_above_it_along():
    steered = ["--maxent_target_weight_entropy=0.3", "--maxent_q_temperature=2"]
    said = warnings_of(100, *steered, "--maxent_tau=0.2")
    assert said.endswith("set maxent_tau_max=0.109 and maxent_tau no higher")
    assert warnings_of(100, *steered, "--maxent_tau_max=0.109", "--maxent_tau=0.109") == ""


# those of this repository: who adds an objective need not say here what it reads
SHIPPED = "maxent xdr grpo dr_grpo dapo gspo cispo seed_grpo token_entropy maxrl pkpo flow".split()
# key: a value that is not its default, and the objectives that read it
READERS = {
    "scale_rewards": (
        "batch",
        "xdr grpo dr_grpo dapo gspo cispo seed_grpo token_entropy maxrl",
    ),
    "epsilon": (0.001, "xdr grpo dr_grpo dapo gspo seed_grpo token_entropy maxrl pkpo"),
    "epsilon_high": (0.28, "xdr grpo dr_grpo dapo gspo seed_grpo token_entropy maxrl pkpo"),
    "delta": (5.0, "xdr grpo dr_grpo dapo gspo seed_grpo token_entropy maxrl pkpo"),
    "cispo_epsilon_max": (3.0, "cispo"),
    "importance_sampling": (
        "sequence_mask",
        "xdr grpo dr_grpo dapo gspo cispo seed_grpo token_entropy maxrl pkpo",
    ),
    "importance_sampling_cap": (
        2.0,
        "xdr grpo dr_grpo dapo gspo cispo seed_grpo token_entropy maxrl pkpo",
    ),
    "token_entropy_coef": (0.1, "token_entropy"),
    "seed_grpo_alpha": (0.5, "seed_grpo"),
    "pkpo_k": (2, "pkpo"),
    "maxent_tau": (0.1, "maxent flow xdr"),
    "maxent_q_temperature": (0.5, "maxent flow"),
    "maxent_q_epsilon": (0.01, "maxent flow"),
    "maxent_score_norm": ("constant", "maxent flow"),
    "maxent_score_scale": (0.5, "maxent flow"),
    "maxent_group_weight": ("spread", "maxent flow"),
    "maxent_loss": ("mle", "maxent"),
    "maxent_skip_equal_groups": ("wrong", "maxent flow"),
    "xdr_utility": ("surrogate", "xdr"),
    "kl_loss_type": ("k2", ""),  # without beta
    # without a meta-controller
    "maxent_tau_lr": (0.1, " ".join(SHIPPED)),
    "maxent_tau_warmup_steps": (5, " ".join(SHIPPED)),
    "kl_horizon": (50, " ".join(SHIPPED)),
    "kl_ctl_step_size": (0.1, " ".join(SHIPPED)),
    # by these values under some methods only, see below
    "controller_meta_virtual_lr": (2.0, " ".join(SHIPPED)),
    "controller_meta_use_hessian": (False, " ".join(SHIPPED)),
    "controller_meta_truncation_steps": (9, " ".join(SHIPPED)),
    "info_seed_temperature": (0.5, " ".join(SHIPPED)),
}


@pytest.mark.parametrize("key", USED)
def test_a_setting_that_the_objective_does_not_read_is_warned_about(key):
    assert key in READERS, f"{key}: add it to READERS, with a value and the objectives that read it"
    value, readers = READERS[key]
    for objective in SHIPPED:
        flags = [f"--{key}={value}", f"--objective={objective}", "--num_iterations=2"]
        said = warnings_of(100, *flags)
        words = f"{key}={value!r}: not used by objective={objective!r} with the other keys as"
        assert (words in said) == (objective not in readers.split()), objective


# a setting -> the switch that it needs, and flags that turn the switch on
SWITCHED = {
    "info_seed_reward=0.5": ("info_seed_num_seeds=0", "--info_seed_num_seeds=4"),
    "info_seed_pooling='last'": ("info_seed_num_seeds=0", "--info_seed_num_seeds=4"),
    "controller_meta_lr=0.1": (
        "controller_meta_method=''",
        "--controller_meta_method=analytic --maxent_target_weight_entropy=1 --kl_target=1 --beta=1",
    ),
    "maxent_tau_max=0.1": (
        "maxent_target_excess_entropy=-1.0",
        "--maxent_target_excess_entropy=.03",
    ),
    "kl_horizon=50.0": ("kl_target=0.0", "--kl_target=0.1 --beta=0.1"),
    "beta_max=0.5": ("kl_target=0.0", "--kl_target=0.1 --beta=0.1"),
    "reference_placement='cpu'": ("beta=0.0", "--beta=0.1"),
    "epsilon=0.1": ("num_iterations=1", "--num_iterations=2 --objective=grpo"),
    "rollout_timeout=60.0": ("rollout_engine='vllm'", "--rollout_engine=server"),
    "weight_sync='nccl'": ("rollout_engine='vllm'", "--rollout_engine=server"),
    "vllm_options={'max_num_seqs': 8}": ("rollout_engine='hf'", "--rollout_engine=server"),
    "wandb_options={'mode': 'offline'}": ("report_to=''", "--report_to=wandb"),
    "mode_entropy_score_norm='length'": (
        "mode_entropy_coef=0.0",
        "--mode_entropy_coef=0.1 --objective=dr_grpo",
    ),
}


@pytest.mark.parametrize("setting", SWITCHED)
def test_a_setting_whose_switch_is_off_is_warned_about(setting):
    switch, on = SWITCHED[setting]
    flag = "--" + (setting if "{" in setting else setting.replace("'", ""))
    off = "--" + switch.replace("'", "")
    # dr_grpo: one that reads the setting, if it is a clip of policy gradients
    reader = ["--objective=dr_grpo"] * setting.startswith("epsilon")
    assert f"{setting}: not used with {switch}" in warnings_of(100, flag, off, *reader)
    assert "not used" not in warnings_of(100, flag, *on.split())


def test_replay_without_a_size_is_warned_about():
    assert "replay={'fraction': 0.5}: not used" in warnings_of(100, "--replay.fraction=0.5")
    assert warnings_of(100, "--replay.fraction=0.5", "--replay.size=9") == ""
    assert warnings_of(100, "--replay.size=0") == ""


@pytest.mark.parametrize("key", USED)
def test_a_setting_that_nothing_reads_is_told_once(key):
    for objective in SHIPPED:
        said = warnings_of(100, f"--{key}={READERS[key][0]}", f"--objective={objective}")
        assert said.count(f"{key}=") <= 1, said


def test_a_switch_that_is_off_is_told_only_where_it_would_help():
    assert "with num_iterations=1" not in warnings_of(100, "--epsilon_high=.28")
    seeds = ["--info_seed_temperature=.5", "--info_seed_loss_type=ce"]
    assert warnings_of(100, *seeds).count("not used") == 1


def test_every_switch_is_tried():
    for beginnings, _, switch in SWITCHES:
        tried = [key.partition("=")[0] for key, (off, _) in SWITCHED.items() if switch in off]
        assert any(key.startswith(beginnings) for key in tried), switch
        assert all(any(key.startswith(start) for key in DEFAULTS) for start in beginnings)


def test_a_meta_controller_takes_the_place_of_the_two_rules():
    _, meta = SWITCHED["controller_meta_lr=0.1"]
    for key in ("maxent_tau_lr", "maxent_tau_warmup_steps", "kl_horizon", "kl_ctl_step_size"):
        assert f"{key}=" in warnings_of(100, f"--{key}={READERS[key][0]}", *meta.split())


@pytest.mark.parametrize(
    "key, wanted",
    [
        ("controller_meta_virtual_lr", "first_order truncated_backprop"),
        ("controller_meta_use_hessian", "first_order truncated_backprop"),
        ("controller_meta_truncation_steps", "truncated_backprop"),
    ],
)
def test_a_meta_controller_without_virtual_steps_does_not_read_what_they_need(key, wanted):
    _, meta = SWITCHED["controller_meta_lr=0.1"]
    for method in ("analytic", "first_order", "truncated_backprop"):
        flags = meta.replace("=analytic", f"={method}").split()
        said = warnings_of(100, f"--{key}={READERS[key][0]}", *flags)
        assert (f"{key}=" in said) == (method not in wanted.split())


def test_a_trained_head_and_a_controller_that_may_not_move_read_nothing():
    seeds = ["--info_seed_num_seeds=4", "--info_seed_temperature=0.5"]
    assert "not used" not in warnings_of(100, *seeds)
    said = warnings_of(100, *seeds, "--info_seed_loss_type=ce")
    assert "info_seed_temperature=0.5: not used" in said
    steered = ["--kl_target=0.1", "--beta=0.1"]
    assert "not used" not in warnings_of(100, *steered)
    for key in ("kl_horizon", "kl_ctl_step_size"):
        said = warnings_of(100, *steered, f"--{key}=0")
        assert f"kl_target=0.1: not used with {key}=0" in said


def test_settings_of_policy_gradients_are_used_by_maxent_as_one():
    assert "epsilon=0.1, delta=5.0: not used" in warnings_of(100, "--epsilon=0.1", "--delta=5")
    gradient = ["--maxent_loss=policy_gradient", "--epsilon=0.1", "--delta=5"]
    assert warnings_of(100, *gradient, "--num_iterations=2") == ""
    tilted = ["--objective=xdr", "--xdr_ref_tilt=True", "--beta=0.1", "--maxent_score_norm=sum"]
    assert warnings_of(100, *tilted) == ""


def test_clips_are_warned_about_where_each_batch_has_one_update():
    """The ratio is 1 there, whatever the clip."""
    dapo = ["--objective=dapo", "--epsilon_high=0.28"]
    assert "epsilon_high=0.28: not used" in warnings_of(100, *dapo)
    cispo = ["--objective=cispo", "--cispo_epsilon_max=3"]
    assert "cispo_epsilon_max=3.0: not used" in warnings_of(100, *cispo)
    assert warnings_of(100, "--objective=cispo", "--cispo_epsilon_max=0.5") == ""


def test_a_setting_is_used_where_another_one_turns_it_on():
    assert warnings_of(100, "--objective=grpo", "--beta=0.1", "--kl_loss_type=k2") == ""
    tilted = ["--objective=maxent", "--beta=0.1", "--kl_loss_type=k2"]
    assert "kl_loss_type='k2': not used" in warnings_of(100, *tilted)
    assert warnings_of(100, *tilted, "--maxent_kl=True") == ""
    modes = ["--objective=grpo", "--mode_entropy_score_norm=length", "--mode_entropy_coef=0.1"]
    assert warnings_of(100, *modes) == ""


def test_a_loss_without_scores_does_not_follow_their_scale():
    for loss in ("policy_gradient", "mle"):
        scaled = [f"--maxent_loss={loss}", "--maxent_score_norm=sum", "--maxent_score_scale=4"]
        assert tau_for(100, *scaled) == 1 / math.log(100)
        assert "maxent_score_norm='sum', maxent_score_scale=4.0: not" in warnings_of(100, *scaled)
        assert warnings_of(100, *scaled, "--beta=0.1") == ""  # scores of the reference


def test_an_excess_entropy_of_shaped_rewards_is_warned_about():
    target = "--maxent_target_excess_entropy=0.05"
    assert "until wrong answers win" in warnings_of(100, target, "--unlikeliness_coef=0.5")
    assert warnings_of(100, target) == ""


def test_what_the_scores_are_scaled_by_does_not_move_the_temperature_of_xdr():
    scale = ["--objective=xdr", "--maxent_q_temperature=2", "--maxent_score_scale=4"]
    assert tau_for(100, *scale) == 1 / math.log(100)


def test_the_limit_of_tau_follows_the_scale_of_the_scores():
    scaled = ["--maxent_score_scale=4", "--maxent_tau=0.1"]
    assert "over maxent_score_scale=4.0 = 0.0543" in warnings_of(100, *scaled)
    assert warnings_of(100, "--maxent_score_scale=4", "--maxent_tau=0.05") == ""
    sums = ["--maxent_score_norm=sum", "--max_completion_length=32"]
    assert "scores are sums" in warnings_of(100, *sums, "--maxent_tau=0.2")
    assert warnings_of(100, *sums, "--maxent_tau=0.006") == ""


def test_an_excess_entropy_that_takes_tau_beyond_its_limit_is_warned_about():
    """A group of 16 with 4 right: at the limit of 100 characters, .217, excess .118."""
    assert tau_of_excess(0.118, 16, 4) == pytest.approx(0.217, abs=1e-3)
    target = "--maxent_target_excess_entropy"
    assert warnings_of(100, f"{target}=0.1") == ""
    found = warnings_of(100, f"{target}=0.2")
    assert "0.255" in found and "maxent_tau_max=0.217" in found
    assert warnings_of(100, f"{target}=0.2", "--maxent_tau_max=0.217") == ""
    assert "0.3" in warnings_of(100, f"{target}={{0: 0.1, 5: 0.3, 10: 0.2}}")
    assert "maxent_tau_max=0.0838" in warnings_of(151936, "--maxent_tau=0.08", f"{target}=0.05")
    assert (
        warnings_of(100, f"{target}=0.2", "--objective=grpo", "--maxent_target_excess_entropy=-1")
        == ""
    )


def test_a_clip_that_hardly_ever_acts_is_warned_about():
    gspo = ["--objective=gspo", "--num_iterations=2"]
    warnings = warnings_of(100, *gspo)
    assert "3e-4" in warnings
    # rows of a few tokens are clipped: see docs/objectives.md
    assert "hardly ever clips long rows" in warnings
    assert warnings_of(100, *gspo, "--epsilon=3e-4", "--epsilon_high=4e-4") == ""
    assert (
        warnings_of(100, "--objective=gspo") == warnings_of(100, "--objective=grpo", gspo[1]) == ""
    )


def test_likelihoods_of_rows_that_answered_different_prompts_are_warned_about():
    for flag in ("--unlikeliness_coef=0.1", "--objective=seed_grpo"):
        words = warnings_of(100, flag, "--info_seed_num_seeds=2", "--info_seed_lambda=0.1")
        assert "answered another prompt" in words
        assert warnings_of(100, flag) == ""


def test_the_shipped_configs_raise_no_warning():
    for name, vocabulary in (
        ("countdown_tiny", 100),
        ("countdown_steered", 100),
        ("math_maxent", 151936),
        ("math_steered", 151936),
        ("math_grpo", 151936),
        ("countdown_0.5b", 151936),
    ):
        assert warnings_of(vocabulary, str(ROOT / "config" / f"{name}.py")) == ""


def test_settings_known_to_destroy_or_to_overshoot_are_warned_about():
    assert "maxent_tau_lr=0.5" in warnings_of(
        100, "--maxent_target_weight_entropy=1.0", "--maxent_tau_lr=0.5"
    )
    assert "xdr" in warnings_of(
        100, "--objective=xdr", "--maxent_target_weight_entropy=1.0", "--maxent_tau=0.1"
    )


def test_beta_is_part_of_the_temperature_that_an_excess_entropy_takes():
    flags = ["--maxent_target_excess_entropy=0.05", "--maxent_tau_max=1.0"]
    assert "takes maxent_q_temperature * maxent_tau to about 0.177" in warnings_of(150_000, *flags)
    assert warnings_of(150_000, *flags, "--beta=0.1") == ""


STEERED = ["--beta=0.01", "--kl_target=0.05", "--maxent_tau=0.1"]


@pytest.mark.parametrize(
    "flags, words",
    [
        ([], ""),
        (["--maxent_loss=floored"], ""),
        (["--objective=dr_grpo"], ""),
        (["--maxent_loss=policy_gradient"], "with maxent_loss='policy_gradient' beta changes the"),
        (["--maxent_loss=mle"], "kl_target=0.05 will not be held"),
        (["--maxent_loss=mle", "--maxent_kl=True"], ""),
        (["--objective=xdr"], ""),
        (["--objective=xdr", "--xdr_ref_tilt=True"], "with xdr_ref_tilt=True beta changes"),
        (["--objective=flow"], "beta may be 10, above maxent_tau=0.1"),
        (["--objective=flow", "--beta_max=0.1"], ""),
        (["--objective=flow", "--kl_target=0.0"], ""),
        (["--objective=flow", "--kl_target=0.0", "--beta=0.5"], "beta may be 0.5, above"),
    ],
)
def test_a_beta_that_holds_no_kl_is_warned_about(flags, words):
    found = warnings_of(100, *STEERED, *flags)
    kl = [word for word in ("kl_target", "beta may") if word in found]
    assert words in found
    assert bool(kl) == bool(words), found


def test_a_controller_that_may_take_tau_to_where_wrong_answers_win_is_warned_about():
    entropy = "--maxent_target_weight_entropy=1.0"
    meta = ["--controller_meta_method=first_order", "--beta=0.1", "--kl_target=0.1"]
    for flags in ([entropy], [entropy, *meta]):
        said = warnings_of(100, *flags)
        assert "to 1, above 1/ln(vocabulary 100) = 0.217" in said
        assert "set maxent_tau_max=0.217" in said
        assert "may take" not in warnings_of(100, *flags, "--maxent_tau_max=0.217")
        assert "to 0.4," in warnings_of(
            100, *flags, "--maxent_q_temperature=2.0", "--maxent_tau_max=0.2"
        )
    # who writes what it says to is not warned again, however that was rounded
    for vocabulary in range(90, 130):
        (cure,) = re.findall(r"set (maxent_tau_max=[\d.]+)", warnings_of(vocabulary, entropy))
        assert "may take" not in warnings_of(vocabulary, entropy, f"--{cure}")
    # xdr has no such bound, and a target of excess entropy a sentence of its own
    assert "may take" not in warnings_of(100, entropy, "--objective=xdr")
    assert "may take" not in warnings_of(100, "--maxent_target_excess_entropy=0.1")


def test_settings_that_work_against_each_other_are_warned_about():
    seeds = ["--info_seed_num_seeds=4", "--info_seed_reward=0.3"]
    excess = "--maxent_target_excess_entropy=0.1"
    for flags in (["--maxent_skip_equal_groups=wrong"], seeds):
        said = warnings_of(100, "--maxent_target_weight_entropy=1.0", *flags)
        assert "the target may be out of reach" in said
        assert ("use maxent_target_excess_entropy" in said) == (flags != seeds)
        assert warnings_of(100, *flags) == ""
    assert warnings_of(100, excess, "--maxent_skip_equal_groups=wrong") == ""
    # these leave equal groups out whatever that key says
    for flags in (["--maxent_group_weight=spread"], ["--objective=xdr"]):
        weight = "--maxent_target_weight_entropy=1.0"
        said = warnings_of(100, weight, "--maxent_skip_equal_groups=none", *flags)
        assert "not used" in said and "out of reach" not in said
    assert "takes the excess entropy below 0" in warnings_of(100, excess, *seeds)
    again = "--resample_equal_groups=2"
    said = warnings_of(100, again, "--maxent_skip_equal_groups=none")
    assert "maxent_skip_equal_groups='none' would learn from them" in said
    shaped = ["--objective=dr_grpo", "--unlikeliness_coef=0.25"]
    assert "unlikeliness_coef=0.25 would learn from them" in warnings_of(100, again, *shaped)
    assert warnings_of(100, again) == warnings_of(100, *shaped) == ""
    entropy = ["--maxent_target_weight_entropy=1.0", "--maxent_tau_max=0.2"]
    assert warnings_of(100, *entropy, seeds[0], "--info_seed_reward=0") == ""
    assert "scale_rewards='group'" in warnings_of(
        100, *seeds, "--objective=grpo"
    ) and "'group'" in warnings_of(100, *seeds, "--objective=xdr", "--scale_rewards=group")
    for objective, about in OBJECTIVES.items():
        assert ("scale_rewards" in warnings_of(100, *seeds, f"--objective={objective}")) == (
            about.scale in ("group", "mean")
        ), objective
    assert (
        warnings_of(100, *seeds, "--objective=grpo", "--scale_rewards=none")
        == warnings_of(100, *seeds, "--objective=dr_grpo")
        == ""
    )


def test_a_smaller_reward_that_may_make_wrong_groups_count_fully_is_warned_about():
    two = ["--reward_funcs=math,format", "--reward_weights=1,0.1"]
    for objective, about in OBJECTIVES.items():
        said = warnings_of(100, *two, f"--objective={objective}")
        assert ("maxent_group_weight='spread'" in said) == bool(about.group_loss), objective
    # its own cure, a metric, a single reward; and who lets every group count has asked for it
    for flags in (
        [*two, "--maxent_group_weight=spread"],
        [*two, "--reward_weights=1,0"],
        ["--reward_funcs=math"],
        [*two, "--maxent_skip_equal_groups=none"],
    ):
        assert warnings_of(100, *flags) == ""
    for name in CONFIGS:
        assert "counts as fully" not in warnings_of(100, str(ROOT / "config" / name))


@pytest.mark.parametrize("name", ["grpo", "infoseed", "maxent", "steered"])
def test_mathematics_sends_gradients_once_a_step(name):
    """ZeRO 2 and 3 reduce them in every backward."""
    assert load_config([str(ROOT / "config" / f"math_{name}.py")])["zero_stage"] == 1


def test_checkpoints_to_keep_that_are_never_saved_are_warned_about():
    assert "keep_every=5 keeps no checkpoint" in warnings_of(100, "--keep_every=5")
    assert warnings_of(100, "--keep_every=5", "--save_steps=5") == ""


def test_checkpoints_to_keep_between_two_saves_are_warned_about():
    assert "only every 35th step's" in warnings_of(100, "--keep_every=7", "--save_steps=5")
    assert warnings_of(100, "--keep_every=10", "--save_steps=5") == ""
    assert warnings_of(100, "--save_steps=5") == ""


def test_a_warm_up_that_does_not_end_is_warned_about():
    warning = "warmup_steps=20 is more than max_steps=3"
    assert warning in warnings_of(100, "--warmup_steps=20", "--max_steps=3")
    assert warnings_of(100, "--warmup_steps=20", "--max_steps=20") == ""
