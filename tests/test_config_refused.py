"""The table of bad values: what a config may not say is one sentence with key and value."""

import pytest
from configs import DEFAULTS, refusal, write

from checks import ENTRIES, RANGES
from common import check_config, load_config


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
    "dataset.name=[a.parquet]",
    "reward_funcs=[]",
    "reward_weights=[]",
    "reward_weights=[1.0, 2.0]",
    "reward_weights=[1e999]",
    "reward_weights=[1e+07]",
    "reward_weights=[-1e-07]",
    "maxent_q_temperature=1e-07",
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
        ("maxent_tau=-2.0", "-1, or at least 0 and at most inf"),
        ("optimizer_options.weight_decay=-1.0", "at least 0 and at most 1e30"),
    ],
)
def test_a_number_out_of_its_range_is_refused_with_both_bounds(setting, bounds):
    assert f"{setting} must be {bounds}" in refusal("--" + setting)


def test_replay_leaves_room_for_new_prompts():
    assert "replay.fraction=1.0" in refusal("--replay.size=9", "--replay.fraction=1.0")
    assert "needs prompts_per_step" in refusal("--replay.size=9", "--prompts_per_step=1")
    load_config(["--replay.size=9", "--replay.fraction=0.99"])


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


def test_a_json_config_has_the_same_limits(tmp_path):
    endless = tmp_path / "endless.json"
    endless.symlink_to("/dev/zero")
    assert f"{str(endless)!r} is longer than 1000000 characters" in refusal(str(endless))
    twice = write(tmp_path, '{"reward_funcs": ["math"], "seed": 1, "seed": 2}', "twice.json")
    assert refusal(twice) == f"{twice!r}: 'seed' is set twice"
    inside = '{"reward_funcs": ["math"], "temperature": {"0": 1.0, "0": 0.5}}'
    assert "'0' is set twice" in refusal(write(tmp_path, inside, "inside.json"))
    deep = write(tmp_path, "[" * 100_000, "deep.json")
    assert "no settings that this program wrote" in refusal(deep)


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
        ("dataset=[]", ["dataset=[] names no source of rows"]),
        (
            "objective=pkpo pkpo_k={0:9,5:2} num_generations=8",
            ["pkpo_k={0: 9, 5: 2}", "at most num_generations=8"],
        ),
        ("objective=xdr xdr_ref_tilt=True", ["xdr_ref_tilt=True", "beta=0.0"]),
        ("beta=0.1 xdr_ref_tilt=True", ["xdr_ref_tilt=True", "objective='maxent'"]),
        ("xdr_mode_adaptive_tau=True", ["xdr_mode_adaptive_tau=True", "not 'maxent'"]),
        ("push_to_hub=False", ["push_to_hub must be of type str, not bool False"]),
        ("eval_command=true", ["eval_command must be of type str", "not bool True"]),
        ("dataset.name=False", ["dataset", "of type str", "not bool False"]),
        ("scale_rewards=std", ["scale_rewards='std' must be one of '', 'group'"]),
        ("push_to_hub=me/it save_steps=-1", ["push_to_hub='me/it'", "save_steps=-1"]),
        ("dataset.name=x.jsonl dataset.more=tokens", ["dataset.more=['tokens']", "another name"]),
        ("eval_command=a:{checkpoint} save_steps=-1", ["eval_command='a:", "save_steps=-1"]),
        ("rollout_server=http://a:1", ["rollout_server='http://a:1'", "rollout_engine=server"]),
        ("objective=flow maxent_tau=1e-7", ["maxent_tau=1e-07", "at least 1e-6"]),
        (
            "reward_funcs=['rewards:soft_overlong'] soft_overlong_buffer=999",
            ["soft_overlong_buffer=999", "max_completion_length=512"],
        ),
        ("delta=1.1 epsilon_high=0.28", ["delta=1.1", "1.28"]),
        (
            "objective=grpo importance_sampling=sequence_mask importance_sampling_cap=1.0",
            ["'sequence_mask'", "importance_sampling_cap=1.0", "must be above 1"],
        ),
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
        "objective=grpo importance_sampling=token_mask importance_sampling_cap=1.01",
        "importance_sampling=token_mask importance_sampling_cap=1.0",  # maxent reads neither
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
        "reward_weights=[-1e-5]",
        "seed=0",
    ],
)
def test_settings_at_the_edge_are_allowed(settings):
    check_config(load_config(["--" + s for s in settings.split()]))
