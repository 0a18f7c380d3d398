"""The config loader: files, flags, older names, values that change during a run."""

import json
import math
import re

import pytest
from configs import DEFAULTS, refusal, write

from checks import ENTRIES
from common import LONGEST_ERROR, NO_KEYS, RENAMED, ROOT, UserError, load_config, scheduled


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
        ("--reward_funcs=math", "reward_funcs", ["math"]),
        ("--reward_funcs=my-mod:Class.f", "reward_funcs", ["my-mod:Class.f"]),
        # what a shell makes of ['a.b:c'] without quotes around it
        ("--reward_funcs=[a.b:c]", "reward_funcs", ["a.b:c"]),
        ("--reward_funcs=~/mine.py:f", "reward_funcs", ["~/mine.py:f"]),
        ("--dataset.config=3", "dataset", {"config": "3"}),
    ],
)
def test_flags_are_read_in_the_type_of_the_default(flag, key, value):
    found = load_config([flag])[key]
    assert found == value and type(found) is type(value)


def test_a_list_needs_no_brackets():
    found = load_config(["--reward_funcs=math,length", "--reward_weights=1,0.1"])
    assert found["reward_funcs"] == ["math", "length"]
    assert found["reward_weights"] == [1.0, 0.1]


@pytest.mark.parametrize(
    "line, flag, value",
    [
        ("temperature = {0: 1.2, 100: 1}", "--temperature=1", 1.0),
        ("temperature = {0: 1.2, 100: 1}", "--temperature={50: 1}", {50: 1.0}),
        ("maxent_target_excess_entropy = {0: 0.2}", "--maxent_target_excess_entropy=-1", -1.0),
        ("dataset = [{'name': 'countdown'}]", "--dataset={'name': 'math'}", {"name": "math"}),
        ("dataset = [{'name': 'countdown'}]", "--dataset=[{'name': 'a'}]", [{"name": "a"}]),
    ],
)
def test_a_flag_takes_the_place_of_a_schedule_or_a_mixture(tmp_path, line, flag, value):
    key = line.partition(" ")[0]
    found = load_config([write(tmp_path, line), flag])[key]
    assert found == value and type(found) is type(value)
    assert load_config([f"--{key}={line.partition(' = ')[2]}", flag])[key] == value


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


def test_a_key_of_another_trainer_has_the_type_of_ours(capsys):
    assert load_config(["--run_name=17"])["wandb_options"]["name"] == "17"
    c = load_config(["--actor_rollout_ref.rollout.n=8", "--data.train_files=1e5"])
    assert c["num_generations"] == 8
    assert c["dataset"] == {"name": "1e5"}


def test_every_older_key_is_taken_or_told_what_has_replaced_it():
    assert not {*RENAMED, *NO_KEYS} & set(DEFAULTS)
    assert not set(RENAMED) & set(NO_KEYS)
    for name, sentence in NO_KEYS.items():
        assert f"{name} is not a key here: {sentence}" in refusal(f"--{name}=1")
    for name, replacement in RENAMED.items():
        key, _, entry = replacement.partition(".")
        assert key in DEFAULTS and (not entry or entry in ENTRIES[key]), name


def test_the_document_for_users_of_verl_knows_what_the_code_does():
    table = (ROOT / "docs" / "from_trl.md").read_text().split("| verl | here |")[1]
    taken, told = table.split("\n\n")[0].split("| | |")
    for rows, sentences in ((taken, False), (told, True)):
        for row in rows.strip().splitlines():
            names, ours = row.strip("|").split("|")[:2]
            for name in re.findall(r"`([a-z][\w.]+)`", names):
                assert name in (NO_KEYS if sentences else RENAMED), name
                assert sentences or f"`{RENAMED[name]}`" in ours, name


@pytest.mark.parametrize(
    "flag, key, value",
    [
        ("--clip_ratio=.1", "epsilon", 0.1),
        ("--clip_ratio_low=.1", "epsilon", 0.1),
        ("--epsilon_low=.1", "epsilon", 0.1),
        ("--clip_ratio_high=.28", "epsilon_high", 0.28),
        ("--actor_rollout_ref.actor.clip_ratio=.1", "epsilon", 0.1),
        ("--clip_ratio_c=3.0", "delta", 3.0),
        ("--actor_rollout_ref.actor.clip_ratio_c=3.0", "delta", 3.0),
    ],
)
def test_a_clip_of_another_trainer_is_ours(flag, key, value):
    assert load_config([flag])[key] == value


@pytest.mark.parametrize(
    "flag, cure",
    [
        ("--entropy_coeff=.01", "--objective=token_entropy with --token_entropy_coef"),
        ("--dynamic_sampling=True", "--resample_equal_groups=N"),
        ("--filter_groups=True", "--resample_equal_groups=N"),
        ("--algorithm.filter_groups.enable=True", "--resample_equal_groups=N"),
        ("--kl_coef=.1", "under maxent and flow it tilts the weights"),
        ("--algorithm.kl_ctrl.kl_coef=.1", "under maxent and flow it tilts the weights"),
        ("--actor_rollout_ref.actor.use_kl_loss=True", "--beta is the weight of a KL"),
        ("--actor_rollout_ref.actor.kl_loss_coef=.1", "--beta is the weight of a KL"),
        ("--algorithm.adv_estimator=grpo", "token-mean is --objective=dapo"),
        ("--actor_rollout_ref.actor.loss_agg_mode=token-mean", "token-mean is --objective=dapo"),
        ("--algorithm.norm_adv_by_std_in_grpo=False", "--scale_rewards=group"),
        ("--custom_reward_function.path=a.py", "--reward_funcs=module:function"),
        ("--reward_model.enable=True", "no reward models: a reward is a Python function"),
        ("--trainer.val_before_train=True", "--eval_steps=N evaluates the start too"),
        ("--config=mine.py", "a config file is named without a flag"),
        ("--use_liger_kernel=True", "logits are never kept"),
        ("--report_to=none", "leave it out, or write --report_to= for"),
        ("--scale_rewards=False", "TRL's False is scale_rewards='none' here"),
        ("--scale_rewards=true", "TRL's True is scale_rewards='group' here"),
    ],
)
def test_a_key_or_value_of_another_trainer_is_told_ours(flag, cure):
    assert cure in refusal(flag)


def test_a_value_of_another_trainer_is_told_ours_in_a_file_too(tmp_path):
    assert "'none' here" in refusal(write(tmp_path, "scale_rewards = False"))


@pytest.mark.parametrize(
    "flag, hint",
    [
        ("--grad_clip_of_mine=1", "config/default.py lists all keys"),
        ("--actor_rollout_ref.actor.grad_clip=1", "names of verl that mean something here"),
        ("--data.shuffle=True", "names of verl that mean something here"),
        ("--datset.name=a", "did you mean 'dataset'?"),
        ("--replays.size=3", "did you mean 'replay'?"),
        ("--learning_rat=3", "did you mean 'learning_rate'?"),
    ],
)
def test_a_name_is_likened_to_a_key_as_a_whole(flag, hint):
    assert refusal(flag).endswith(hint)


@pytest.mark.parametrize(
    "settings, sentence",
    [
        ({"top_p": 0.9}, "top_p is not a key here"),
        ({"lr": 1e-4, "learning_rate": 1e-5}, "learning_rate is set twice"),
    ],
)
def test_a_json_config_is_refused_where_a_py_config_is(tmp_path, settings, sentence):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"reward_funcs": ["math"]} | settings))
    assert sentence in refusal(str(path))


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
    words = refusal("--beta={0: 1.0}")
    assert "beta must be of type float" in words and "temperature, easy_dataset.share" in words


def test_a_key_with_entries_says_how_one_is_set(tmp_path):
    assert "replay=10 has entries, such as --replay.size=..." in refusal("--replay=10")
    assert "such as --optimizer_options.weight_decay=" in refusal("--optimizer_options=0.1")
    assert 'key = {"entry": value}' in refusal(write(tmp_path, "replay.size = 10"))


def test_a_config_that_is_not_there_or_a_runs_folder_is_told_with_what_is_meant(tmp_path):
    write(tmp_path, "beta = 0.0", "mine.py")
    assert f"did you mean '{tmp_path / 'mine.py'}'?" in refusal(str(tmp_path / "mne.py"))
    (tmp_path / "config.json").write_text("{}")
    assert f"a run's config is {tmp_path}/config.json" in refusal(str(tmp_path))
    (tmp_path / "train_config.json").write_text("{}")
    assert refusal(str(tmp_path)).endswith(f"of its run is {tmp_path}/train_config.json")
    (tmp_path / "empty").mkdir()
    assert refusal(str(tmp_path / "empty")).endswith("can't be read: Is a directory")


def test_an_option_of_vllm_that_the_trainer_sets_is_refused():
    assert "seed is set by the trainer itself" in refusal("--vllm_options.seed=1")
    assert "hf_overrides='x' must be a dict" in refusal("--vllm_options.hf_overrides=x")


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


def test_all_unknown_keys_of_a_file_and_of_the_command_line_are_told_at_once(tmp_path):
    file = tmp_path / "trl.py"
    file.write_text("top_p = 0.9\nmax_step = 3\nnum_generations = 8\nlogging_steps = 1\n")
    three = r"trl.py: \(1\) top_p is not .* \(2\) unknown key 'max_step'.* \(3\) logging_steps is"
    with pytest.raises(UserError, match=three):
        load_config([str(file), "--top_k=3"])
    two = r"command line: \(1\) top_k is not a key here: .* \(2\) unknown key 'sed'"
    with pytest.raises(UserError, match=two):
        load_config(["--top_k=3", "--seed=1", "--sed=2"])


# what verl's example of GRPO sets and this project has not
VERL = """algorithm.adv_estimator data.filter_overlong_prompts data.truncation
actor_rollout_ref.model.use_remove_padding actor_rollout_ref.actor.ppo_mini_batch_size
actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu actor_rollout_ref.actor.use_kl_loss
actor_rollout_ref.actor.kl_loss_coef actor_rollout_ref.actor.kl_loss_type
actor_rollout_ref.actor.entropy_coeff actor_rollout_ref.model.enable_gradient_checkpointing
actor_rollout_ref.actor.fsdp_config.param_offload
actor_rollout_ref.actor.fsdp_config.optimizer_offload
actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu
actor_rollout_ref.rollout.tensor_model_parallel_size actor_rollout_ref.rollout.name
actor_rollout_ref.rollout.gpu_memory_utilization
actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu
actor_rollout_ref.ref.fsdp_config.param_offload algorithm.use_kl_in_reward trainer.critic_warmup
trainer.logger trainer.project_name trainer.experiment_name trainer.n_gpus_per_node trainer.nnodes
trainer.total_epochs""".split()


def test_a_whole_script_of_verl_is_told_in_an_error_that_is_not_cut():
    message = refusal(*[f"--{name}=1" for name in VERL * 2])
    assert len(message) < LONGEST_ERROR
    for name in VERL:
        assert message.count(name) == 1
