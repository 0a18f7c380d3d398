"""The config loader, the table of bad values, and the shipped config files."""

import ast
import json
import math
import re
from pathlib import Path

import pytest

from checks import ENTRIES, OBJECTIVES, RANGES, steers_beta, steers_tau, tau_of_excess, warn_config
from common import REPLACED, ROOT, UserError, check_config, load_config, read_config_file, scheduled

CONFIGS = sorted(p.name for p in (ROOT / "config").glob("*.py"))
DEFAULTS = read_config_file(ROOT / "config" / "default.py")


def write(folder: Path, text: str, name: str = "mine.py") -> str:
    path = folder / name
    path.write_bytes(text.encode())
    return str(path)


def refusal(*argv) -> str:
    """The one sentence that load_config refuses argv with."""
    with pytest.raises(UserError) as caught:
        load_config(list(argv))
    assert "\n" not in str(caught.value)
    return str(caught.value)


# --- merging


def test_flags_win_over_files_and_files_over_defaults_whatever_their_order(tmp_path):
    first, second = (
        write(tmp_path, "max_steps = 5\nseed = 1\nmodel = 'a'", "1.py"),
        write(tmp_path, "max_steps = 6\nseed = 2", "2.py"),
    )
    for argv in (
        ["--seed=3", first, second],
        [first, "--seed=3", second],
        [first, second, "--seed=3"],
    ):
        config = load_config(argv)
        assert (config["seed"], config["max_steps"], config["model"]) == (3, 6, "a")
    assert load_config([second, first])["max_steps"] == 5
    assert load_config([]) == DEFAULTS


def test_merging_keeps_every_key_its_order_and_its_type(tmp_path):
    config = load_config([write(tmp_path, "learning_rate = 1\nmax_steps = 7")])
    assert list(config) == list(DEFAULTS)
    assert [type(v) for v in config.values()] == [type(v) for v in DEFAULTS.values()]
    assert config["learning_rate"] == 1.0


@pytest.mark.parametrize(
    "flag, key, value",
    [
        ("--model=runs/a=b", "model", "runs/a=b"),
        ("--model=3", "model", "3"),
        ("--system_prompt=", "system_prompt", ""),
        ("--overwrite_output_dir=True", "overwrite_output_dir", True),
        ("--beta=1e-3", "beta", 0.001),
        ("--delta=-1", "delta", -1.0),
        ("--reward_funcs=['math']", "reward_funcs", ["math"]),
        ("--dataset.config=3", "dataset", {"config": "3"}),
    ],
)
def test_flags_are_read_in_the_type_of_the_default(flag, key, value):
    found = load_config([flag])[key]
    assert found == value and type(found) is type(value)


def test_tau_takes_inf_and_nothing_else_does(tmp_path):
    assert load_config(["--maxent_tau=inf"])["maxent_tau"] == math.inf
    assert load_config([write(tmp_path, "maxent_tau = 'inf'")])["maxent_tau"] == math.inf
    for key in [k for k, v in DEFAULTS.items() if type(v) is float and k != "maxent_tau"]:
        assert key in refusal(f"--{key}=inf") and "inf" in refusal(f"--{key}=inf")


def test_older_names_are_taken_and_said(tmp_path, capsys):
    assert load_config(["--dataset_name=countdown"])["dataset"] == {"name": "countdown"}
    assert capsys.readouterr().err == "command line: dataset_name is now dataset.name\n"
    assert (
        load_config(["--init_kl_coeff=0.25"])["beta"]
        == load_config([write(tmp_path, "init_kl_coeff = 0.25")])["beta"]
        == 0.25
    )


def test_every_older_key_is_taken_or_told_what_has_replaced_it():
    for name, replacement in REPLACED.items():
        assert name not in DEFAULTS
        if " " in replacement:
            assert f"{name} is no key any more: {replacement}" in refusal(f"--{name}=1")
        else:
            key, _, entry = replacement.partition(".")
            assert key in DEFAULTS and (not entry or entry in ENTRIES[key]), name


def test_the_config_of_an_older_run_is_read_with_todays_keys(tmp_path):
    older = {
        "reward_funcs": ["countdown"],
        "dataset_name": "countdown",
        "dataset_config": "tiny",
        "dataset_split": "train",
        "dataset_mixture": [],
        "eval_dataset_name": "",
        "eval_prompt_column": "prompt",
        "replay_size": 0,
        "replay_fraction": 0.25,
        "weight_sync": "disk",
        "weight_sync_dir": "/dev/shm/w",
        "controller_meta_enabled": False,
        "controller_meta_method": "analytic",
        "info_seed_enabled": False,
        "info_seed_num_seeds": 4,
        "vllm_kv_cache_gib": 0.25,
        "sft_steps": 800,
        "maxent_tau": math.inf,
    }
    path = tmp_path / "config.json"
    path.write_text(json.dumps(older))
    changed = {
        key: value for key, value in load_config([str(path)]).items() if value != DEFAULTS[key]
    }
    assert changed == {
        "dataset": {"name": "countdown", "config": "tiny"},
        "weight_sync": "/dev/shm/w",
        "maxent_tau": math.inf,
    }


def test_what_changed_over_time_in_an_older_run_changes_as_it_did(tmp_path):
    older = {
        "reward_funcs": ["countdown"],
        "dataset_mixture": [{"id": "countdown", "columns": {"prompt": "q"}, "weight": 2}],
        "temperature": 0.9,
        "temperature_schedule": {"2": 1.3, "5": 0.6},
        "easy_dataset_name": "crossword",
        "easy_schedule": {"0": 0.5, "3": 0.0},
        "maxent_target_weight_entropy": 1.0,
        "maxent_target_final": 0.5,
        "maxent_target_horizon": 10,
    }
    (tmp_path / "config.json").write_text(json.dumps(older))
    config = load_config([str(tmp_path / "config.json")])
    assert config["dataset"] == [{"name": "countdown", "prompt": "q", "weight": 2.0}]
    share = config["easy_dataset"]["share"]
    assert [scheduled(share, step) for step in (0, 2, 3, 9)] == [0.5, 0.5, 0.0, 0.0]
    assert [scheduled(config["temperature"], step) for step in range(7)] == [
        *(0.9, 0.9, 1.3, 1.3, 1.3, 0.6, 0.6)
    ]
    assert scheduled(config["maxent_target_weight_entropy"], 5) == pytest.approx(0.75)


def test_a_dotted_flag_sets_one_entry(tmp_path):
    path = write(tmp_path, 'dataset = {"name": "countdown", "config": "tiny"}')
    config = load_config([path, "--dataset.config=4", "--vllm_options.enforce_eager=false"])
    assert config["dataset"] == {"name": "countdown", "config": "4"}
    assert config["vllm_options"] == {"enforce_eager": False}
    assert "unknown entry 'confg'" in refusal("--dataset.confg=4")
    assert "has no entries by name" in refusal("--seed.x=4")
    assert "has no entries by name" in refusal("--dataset=[{'name': 'a'}]", "--dataset.name=b")


def test_a_number_may_be_a_line_through_points():
    temperature = load_config(["--temperature={2: 1.2, 6: 1.0}"])["temperature"]
    assert [scheduled(temperature, step) for step in (0, 2, 3, 4, 6, 99)] == pytest.approx(
        [1.2, 1.2, 1.15, 1.1, 1.0, 1.0]
    )
    assert scheduled(0.7, 5) == 0.7
    jump = {99: 1.2, 100: 1.0}
    assert [scheduled(jump, step) for step in (0, 99, 100)] == [1.2, 1.2, 1.0]
    assert "temperature={0: 1.0, 9: 0.0} must be at least 0.01" in refusal(
        "--temperature={0: 1, 9: 0}"
    )
    for points in ("{}", "{-1: 1.0}", "{'a': 1.0}", "{0: '1'}", "{0.5: 1.0}", "{True: 1.0}"):
        assert "temperature" in refusal(f"--temperature={points}")
    assert "beta must be of type float" in refusal("--beta={0: 1.0}")


def test_an_option_of_vllm_that_the_trainer_sets_is_refused():
    assert "seed is set by the trainer itself" in refusal("--vllm_options.seed=1")


@pytest.mark.parametrize(
    "encode",
    [
        lambda s: "\ufeff" + s,
        lambda s: s.replace("\n", "\r\n"),
        lambda s: s.replace(" = ", "\t=\t"),
    ],
)
def test_files_of_other_editors_are_read(tmp_path, encode):
    config = load_config([write(tmp_path, encode("# a comment\nmax_steps = 5\nmodel = 'ü'\n"))])
    assert (config["max_steps"], config["model"]) == (5, "ü")


# --- refusals


def test_an_unknown_key_is_named_with_its_file_and_the_nearest_key(tmp_path):
    path = write(tmp_path, "seed = 1\nlearning_rat = 1e-4")
    assert all(part in refusal(path) for part in (path, "'learning_rat'", "'learning_rate'"))
    assert all(
        part in refusal("--maxent_tua=1")
        for part in ("command line", "'maxent_tua'", "'maxent_tau'")
    )
    assert "config/default.py" in refusal("--xyzzy=1")


@pytest.mark.parametrize(
    "line",
    [
        "seed = 1.5",
        "max_steps = '3'",
        "max_steps = True",
        "allow_leakage = 1",
        "allow_leakage = 'true'",
        "model = 3",
        "model = None",
        "beta = '0.1'",
        "beta = True",
        "reward_funcs = 'math'",
        "reward_funcs = ('math',)",
        "maxent_tau = 'nan'",
        "maxent_tau = '-inf'",
        "maxent_tau = [0.1]",
    ],
)
def test_a_value_of_another_type_is_refused_with_file_key_and_value(tmp_path, line):
    path, (key, value) = write(tmp_path, line), line.split(" = ")
    assert all(part in refusal(path) for part in (path, key, value))


@pytest.mark.parametrize(
    "line",
    [
        "seed = print('ran')",
        "seed = __import__('os').getpid()",
        "seed = 2 ** 40",
        "seed = [x for x in (1,)]",
        "import os",
        "print('ran')",
        "seed: int = 1",
        "a = b = 1",
        "seed += 1",
        "def f(): pass",
        "seed = {[]: 1}",
        "seed =",
        "  seed = 1",
    ],
)
def test_config_files_run_nothing_and_the_refusal_names_file_and_line(tmp_path, capsys, line):
    path = write(tmp_path, "# one\nmax_steps = 3\n" + line)
    assert f"{path}:3" in refusal(path)
    assert "ran" not in capsys.readouterr().out


def test_a_key_set_twice_in_one_file_is_refused(tmp_path):
    path = write(tmp_path, "seed = 1\nseed = 2")
    assert f"{path}:2" in refusal(path) and "seed" in refusal(path)
    path = write(tmp_path, "beta = 0.1\ninit_kl_coeff = 0.2")
    assert "beta" in refusal(path) and "init_kl_coeff" in refusal(path)


def test_files_that_can_not_be_read_are_named(tmp_path):
    assert "nowhere.py" in refusal("nowhere.py")
    assert str(tmp_path) in refusal(str(tmp_path))
    (tmp_path / "binary.py").write_bytes(b"\xff\xfe\x00seed = 1")
    assert "binary.py" in refusal(str(tmp_path / "binary.py"))


def test_a_flag_without_a_value_is_named_even_before_a_stray_word():
    assert "--max_steps" in refusal("--max_steps", "3") and "--max_steps=" in refusal(
        "--max_steps", "3"
    )
    assert "--pack_sequences=" in refusal("--pack_sequences") and "--seed=" in refusal("-seed=3")


BAD = [
    "dtype=float16",
    "long_prompts=cut",
    "rollout_engine=sglang",
    "objective=ppo",
    "scale_rewards=std",
    "importance_sampling=on",
    "maxent_score_norm=mean",
    "maxent_loss=mse",
    "maxent_skip_equal_groups=some",
    "lr_scheduler_type=poly",
    "zero_stage=4",
    "zero_stage=-1",
    "reference_placement=gpu",
    "report_to=tensorboard",
    "wandb_options.mode=disabled",
    "prompts_per_step=0",
    "max_prompt_length=0",
    "max_completion_length=-5",
    "temperature=0.0",
    "temperature=-1.0",
    "maxent_q_temperature=0.0",
    "max_steps=0",
    "learning_rate=0.0",
    "learning_rate=-1.0",
    "max_tokens_per_micro_batch=-1",
    "importance_sampling_cap=0.0",
    "maxent_tau_min=0.0",
    "beta_min=0.0",
    "maxent_tau_lr=0.0",
    "vllm_options.kv_cache_memory_bytes=-1",
    "vllm_options.gpu_memory_utilization=0.0",
    "vllm_options.gpu_memory_utilization=1.0",
    "vllm_options.tensor_parallel_size=0",
    "eval_max_prompts=0",
    "eval_num_generations=0",
    "eval_temperature=0.0",
    "num_iterations=0",
    "beta=-0.1",
    "maxent_tau=-0.2",
    "maxent_q_epsilon=-0.1",
    "mode_entropy_coef=-1.0",
    "epsilon=-0.2",
    "kl_target=-1.0",
    "kl_horizon=-1.0",
    "kl_ctl_step_size=-0.1",
    "warmup_steps=-1",
    "optimizer_options.weight_decay=-0.1",
    "max_grad_norm=-1.0",
    "eval_steps=-1",
    "save_total_limit=-1",
    "log_rollouts_steps=-1",
    "seed=-1",
    "save_steps=-2",
    "maxent_tau_warmup_steps=-2",
    "max_logp_difference=-0.5",
    "maxent_target_weight_entropy=-0.5",
    "epsilon_high=-0.5",
    "delta=0.5",
    "delta=1.1",
    "num_generations=1",
    "num_generations=0",
    "maxent_q_epsilon=0.2",
    "reward_funcs=[]",
    "reward_weights=[]",
    "reward_weights=[1.0, 2.0]",
    "reward_weights=[1e999]",
    "reward_weights=['1']",
    "reward_weights=[True]",
    "output_dir=",
    "output_dir=~/run",
    "model=~/model",
    "learning_rate=1e999",
    "seed=4294967296",
    "seed=18446744073709551616",
    "max_steps=2147483648",
    "beta=1e+31",
    "temperature=0.001",
    "eval_temperature=0.001",
    "reward_timeout=10000000000.0",
    "reward_memory_gib=1000000000000.0",
    "reward_workers=100000",
    "vllm_options.kv_cache_memory_bytes=10000000000000000",
    "reward_funcs=[1]",
    "reward_funcs=[['math']]",
    "weight_sync=~/weights",
]


@pytest.mark.parametrize("setting", BAD)
def test_every_bad_value_is_one_sentence_with_key_and_value(setting):
    key, value = setting.split("=")
    shown = value.replace("1e999", "inf").replace("1e+07", "10000000.0")
    assert key in refusal("--" + setting) and shown in refusal("--" + setting)


def test_every_number_has_a_range_in_the_order_of_the_defaults():
    numbers = []
    for key, value in DEFAULTS.items():
        if type(value) in (int, float):
            numbers.append(key)
        for entry, default in ENTRIES.get(key, {}).items():
            if type(default) in (int, float) and f"{key}.{entry}" != "dataset.weight":
                numbers.append(f"{key}.{entry}")
    assert list(RANGES) == numbers


@pytest.mark.parametrize(
    "setting, bounds",
    [
        ("seed=-1", "at least 0 and below 4294967296: vLLM"),
        ("save_steps=-2", "-1, or at least 0 and at most 2147483647"),
        ("maxent_tau=-1.0", "at least 0 and at most inf"),
        ("optimizer_options.weight_decay=-1.0", "at least 0 and at most 1e30"),
    ],
)
def test_a_number_out_of_its_range_is_refused_with_both_bounds(setting, bounds):
    assert f"{setting} must be {bounds}" in refusal("--" + setting)


MONSTERS = {
    "digits": ("9" * 400, "more than 30 digits"),
    "thousands of digits": ("9" * 5000, ""),
    "more digits than Python prints": ("0x" + "f" * 9000, "more than 30 digits"),
    "brackets": ("[" * 150 + "]" * 150, "nested deeper"),
    "too many brackets": ("[" * 5000 + "]" * 5000, ""),
    "signs": ("-" * 100_000 + "1", "nested deeper"),
    "sums": ("1+" * 50_000 + "1", "nested deeper"),
    "bytes": ("b'x'", "must be"),
    "null byte": (r"'a\0b'", "null byte"),
    "half of a character": (r"'a\udcff'", "not a character"),
}


@pytest.mark.parametrize("text, words", MONSTERS.values(), ids=MONSTERS)
@pytest.mark.parametrize("key", ["seed", "beta", "reward_funcs", "dataset"])
def test_a_value_that_no_library_takes_is_refused_as_it_is_read(tmp_path, key, text, words):
    for where, argument in (
        ("command line", f"--{key}=[{text}]"),
        ("command line", f"--{key}={text}"),
        ("mine.py", write(tmp_path, f"{key} = [{text}]")),
        ("mine.py", write(tmp_path, f"{key} = {{0: {text}}}", "mine.py.2")),
    ):
        message = refusal(argument)
        assert where in message and words in message, message
        assert len(message) < 400


@pytest.mark.parametrize("key", ["output_dir", "model", "system_prompt", "dataset.name"])
@pytest.mark.parametrize("text", ["a\0b", "a\udcff"])
def test_a_text_that_is_none_is_refused_with_its_key(key, text):
    assert key in refusal(f"--{key}={text}") and repr(text) in refusal(f"--{key}={text}")


def test_a_line_of_a_config_file_that_is_no_literal_is_shown_however_deep_it_is(tmp_path):
    path = write(tmp_path, "max_steps = 3\nseed = " + "[" * 150 + "x" + "]" * 150)
    assert f"{path}:2: seed must be a plain literal, not '[[[" in refusal(path)


def test_a_config_file_without_an_end_is_not_read_to_it():
    assert "/dev/zero is longer than 1000000 characters" in refusal("/dev/zero")


@pytest.mark.parametrize(
    "settings, words",
    [
        ("maxent_target_weight_entropy=0.5 objective=grpo", ["objective='grpo'"]),
        ("maxent_target_weight_entropy=2.2 num_generations=8", ["2.2", "2.079"]),
        (
            "maxent_target_weight_entropy=1.0 maxent_tau_max=0.01",
            ["maxent_tau_max=0.01", "maxent_tau_min=0.01"],
        ),
        ("maxent_target_weight_entropy=1.0 maxent_tau=inf", ["maxent_tau=inf"]),
        ("maxent_target_weight_entropy=1.0 maxent_tau=0.0", ["maxent_tau=0.0"]),
        ("kl_target=0.1", ["beta=0.0", "kl_target=0.1"]),
        ("kl_target=0.1 beta=0.1 beta_max=1e-5", ["beta_max=1e-05", "beta_min=0.0001"]),
        ("kl_target=0.1 beta=0.1 kl_horizon=0.1", ["kl_ctl_step_size=0.2", "kl_horizon=0.1"]),
        ("mode_entropy_coef=0.1 objective=maxent", ["mode_entropy_coef", "objective='maxent'"]),
        ("offload_optimizer=True zero_stage=0", ["offload_optimizer=True", "zero_stage"]),
        (
            "info_seed_num_seeds=4 info_seed_loss_type=ce info_seed_lambda=0",
            ["info_seed_loss_type='ce'", "info_seed_lambda"],
        ),
        ("objective=maxent maxent_kl=True", ["maxent_kl=True", "beta=0.0"]),
        ("objective=grpo beta=0.1 maxent_kl=True", ["maxent_kl=True", "objective='grpo'"]),
        ("push_to_hub=me/it save_steps=-1", ["push_to_hub='me/it'", "save_steps=-1"]),
        ("delta=1.1 epsilon_high=0.28", ["delta=1.1", "1.28"]),
        (
            "reward_funcs=['math','countdown'] reward_weights=[1.0]",
            ["reward_weights=[1.0]", "reward_funcs=['math', 'countdown']"],
        ),
        ("num_generations=1 scale_rewards=group", ["num_generations=1", "at least 2", "group"]),
    ],
)
def test_settings_that_contradict_each_other_are_refused(settings, words):
    message = refusal(*("--" + s for s in settings.split()))
    assert all(word in message for word in words), message


@pytest.mark.parametrize(
    "settings",
    [
        "maxent_tau=0.0",
        "maxent_q_epsilon=0.125 num_generations=8",
        "epsilon_high=0.28 delta=1.28",
        "delta=1.2",
        "kl_target=0.1 beta=0.1 kl_horizon=0.0",
        "mode_entropy_coef=0.1 objective=xdr",
        "maxent_target_weight_entropy=2.0",
        "maxent_target_weight_entropy=0.0",
        "max_grad_norm=0.0",
        "save_steps=-1",
        "save_steps=0",
        "max_logp_difference=-1",
        "max_logp_difference=0.0",
        "reward_weights=[0]",
        "reward_weights=[-1]",
        "seed=0",
    ],
)
def test_settings_at_the_edge_are_allowed(settings):
    check_config(load_config(["--" + s for s in settings.split()]))


# --- the shipped files


@pytest.mark.parametrize("name", CONFIGS)
def test_every_shipped_config_loads_and_says_how_to_launch_it(name):
    config = load_config([str(ROOT / "config" / name)])
    text = (ROOT / "config" / name).read_text()
    if name != "default.py":
        assert f"train.py config/{name}" in text.split("\nmodel")[0]
        assert config["model"] and config["output_dir"] == f"runs/{name.removesuffix('.py')}"


def test_every_objective_is_described_in_readme_and_beside_its_formula():
    """The table in checks.py says what is true of an objective, loss.py's docstring its formula,
    the README what it is for."""
    formulas = ast.get_docstring(ast.parse((ROOT / "loss.py").read_text()))
    table = (ROOT / "README.md").read_text().split("| `objective` |")[1].split("\n\n")[0]
    for name in OBJECTIVES:
        assert re.search(rf"\b{name}\b", formulas), name
        assert f"`{name}`" in table, name


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
    assert steers_beta(ours) and ours["beta"] > 0
    assert steers_tau(ours) == (name == "countdown_steered")
    assert {
        key
        for key in differing - {"output_dir", "beta", "kl_target", "reference_placement"}
        if not key.startswith(("maxent_t", "sft_", "warmup_steps"))
    } == set()


def test_the_published_settings_are_those_of_the_issue():
    half = load_config([str(ROOT / "config" / "countdown_0.5b.py")])
    assert [
        half[k]
        for k in (
            "model",
            "num_generations",
            "learning_rate",
            "lr_scheduler_type",
            "max_completion_length",
            "objective",
            "maxent_tau",
        )
    ] == ["Qwen/Qwen2.5-0.5B-Instruct", 16, 2e-7, "constant", 192, "xdr", 0.05]
    maths = load_config([str(ROOT / "config" / "math_maxent.py")])
    assert [
        maths[k]
        for k in (
            "model",
            "dataset",
            "eval_dataset",
            "eval_steps",
            "seed",
        )
    ] == [
        "Qwen/Qwen2.5-1.5B-Instruct",
        {"name": "open-r1/OpenR1-Math-220k", "prompt": "problem"},
        {"name": "HuggingFaceH4/MATH-500", "prompt": "problem"},
        25,
        42,
    ]


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
    return " ".join(warn_config(load_config(list(argv)), vocabulary))


def test_a_target_flatter_than_one_over_ln_v_is_warned_about():
    assert all(
        part in warnings_of(100, "--maxent_tau=0.5") for part in ("maxent_tau", "0.5", "0.217")
    )
    assert "0.217" in warnings_of(100, "--maxent_tau=0.5", "--objective=flow")
    assert "maxent_tau" in warnings_of(100, "--maxent_tau=0.2", "--maxent_q_temperature=2")
    assert warnings_of(100, "--maxent_tau=0.5", "--objective=grpo") == ""


def test_the_limit_of_tau_follows_the_scale_of_the_scores():
    scaled = ["--maxent_score_scale=4", "--maxent_tau=0.1"]
    assert "over maxent_score_scale=4.0 = 0.0543" in warnings_of(100, *scaled)
    assert warnings_of(100, "--maxent_score_scale=4", "--maxent_tau=0.05") == ""
    sums = ["--maxent_score_norm=sum", "--max_completion_length=32"]
    assert "scores are sums" in warnings_of(100, *sums)
    assert warnings_of(100, *sums, "--maxent_tau=0.006") == ""


def test_an_excess_entropy_that_takes_tau_beyond_its_limit_is_warned_about():
    """A group of 16 with 4 right: at the limit of 100 characters, .217, excess .118."""
    assert tau_of_excess(0.118, 16, 4) == pytest.approx(0.217, abs=1e-3)
    target = "--maxent_target_excess_entropy"
    assert warnings_of(100, f"{target}=0.1") == ""
    found = warnings_of(100, f"{target}=0.2")
    assert "0.255" in found and "maxent_tau_max=0.217" in found
    assert warnings_of(100, f"{target}=0.2", "--maxent_tau_max=0.217") == ""
    assert "0.3" in warnings_of(100, f"{target}={{0: 0.1, 10: 0.3}}")
    assert "maxent_tau_max=0.0838" in warnings_of(151936, "--maxent_tau=0.08", f"{target}=0.05")
    assert (
        warnings_of(100, f"{target}=0.2", "--objective=grpo", "--maxent_target_excess_entropy=-1")
        == ""
    )


def test_a_clip_that_never_acts_is_warned_about():
    gspo = ["--objective=gspo", "--num_iterations=2"]
    assert "3e-4" in warnings_of(100, *gspo)
    assert warnings_of(100, *gspo, "--epsilon=3e-4", "--epsilon_high=4e-4") == ""
    assert (
        warnings_of(100, "--objective=gspo") == warnings_of(100, "--objective=grpo", gspo[1]) == ""
    )


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


def test_settings_that_work_against_each_other_are_warned_about():
    seeds = ["--info_seed_num_seeds=4", "--info_seed_reward=0.3"]
    for flags in (["--maxent_skip_equal_groups=wrong"], seeds):
        assert "maxent_target_excess_entropy" in warnings_of(
            100, "--maxent_target_weight_entropy=1.0", *flags
        )
        assert (
            warnings_of(100, *flags)
            == warnings_of(100, "--maxent_target_excess_entropy=0.1", *flags)
            == ""
        )
    assert (
        warnings_of(100, "--maxent_target_weight_entropy=1.0", seeds[0], "--info_seed_reward=0")
        == ""
    )
    assert "scale_rewards='group'" in warnings_of(
        100, *seeds, "--objective=grpo"
    ) and "'group'" in warnings_of(100, *seeds, "--objective=xdr", "--scale_rewards=group")
    for objective, about in OBJECTIVES.items():
        assert ("scale_rewards" in warnings_of(100, *seeds, f"--objective={objective}")) == (
            about.scale == "group"
        ), objective
    assert (
        warnings_of(100, *seeds, "--objective=grpo", "--scale_rewards=none")
        == warnings_of(100, *seeds, "--objective=dr_grpo")
        == ""
    )
