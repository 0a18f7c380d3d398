"""The real scripts as a user runs them: torchrun, vLLM, DeepSpeed, Weights & Biases offline."""

import json
import logging
import math
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import child
import in_child
import pytest
import torch
from child import ended_well
from deadlines import PATIENCE
from exact_matrix import ROOT, SMALL_DATA, without_seconds
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

import checkpoint
import checks
import common
import evaluate
import learner
import loss
import preflight
import rollout
import sft
import train
from common import UserError, load_config, progress
from journal import MetricsLog
from prompts import leakage_warning, prompt_keys, read_trained

SMALL = [
    *SMALL_DATA,
    "--prompts_per_step=4",
    "--num_generations=4",
    "--max_completion_length=12",
    "--eval_max_prompts=6",
    "--eval_num_generations=4",
    "--learning_rate=1e-3",
    "--reward_timeout=300",
    "--reward_funcs=['parity_reward:parity']",
]


def run(script: str, *flags, ranks: int = 0) -> subprocess.CompletedProcess:
    """A script of this project on config/countdown_tiny.py."""
    command = [sys.executable]
    if ranks:
        command += ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    command += [script, "config/countdown_tiny.py", *map(str, flags)]
    env = os.environ | {"PYTHONPATH": str(ROOT / "tests" / "helpers")}  # for parity_reward
    return subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE, env=env
    )


def metrics_of(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def step_of(folder: Path, step: int) -> dict:
    """What training measured in a step, without seconds."""
    (line,) = [line for line in metrics_of(folder) if line["step"] == step and "reward" in line]
    return without_seconds(line)


@pytest.fixture(scope="module")
def two_ranks(tiny_model_dir, tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "run"
    done = run(
        "train.py",
        *SMALL,
        f"--model={tiny_model_dir}",
        f"--output_dir={folder}",
        "--max_steps=3",
        "--eval_steps=2",
        "--save_steps=2",
        "--log_rollouts_steps=2",
        "--report_to=wandb",
        "--wandb_options.mode=offline",
        "--maxent_target_weight_entropy=1.0",
        "--beta=0.05",
        "--kl_target=0.05",
        "--num_iterations=2",
        "--controller_meta_method=analytic",
        "--max_tokens_per_micro_batch=100",
        ranks=2,
    )
    ended_well(done)
    return folder, done.stdout, done.stderr


METRICS = """
reward reward_std frac_reward_zero_std entropy kl clip_ratio/low clip_ratio/high grad_norm
weights/entropy weights/entropy_norm weights/effective_rollouts weights/incorrect_mass weights/max
tau beta delta_tau delta_beta
completions/mean_length completions/max_length completions/clipped_ratio completions/distinct_1
completions/distinct_2 completions/jaccard
time/rollout time/reward time/score time/learn time/sync time/wait time/step tokens_per_second
reward/parity_reward:parity/mean reward/parity_reward:parity/timeouts
reward/parity_reward:parity/errors
sampling/sampling_logp_difference/mean sampling/importance_sampling_ratio/max
meta/loss meta/entropy meta/kl meta/tau_grad meta/beta_grad
"""


def test_three_steps_on_two_ranks_with_vllm_write_every_metric(two_ranks):
    lines = metrics_of(two_ranks[0])
    assert [line["step"] for line in lines] == [0, 1, 2, 2, 3, 3]  # evaluations at 0, 2 and the end
    before = lines[0]
    first = lines[1]
    last = lines[-2]
    for name in METRICS.split():
        assert name in last, name
    assert last["controller/skipped"] == 0
    assert first["delta_tau"] != 0 and first["delta_beta"] != 0
    assert {"eval/mean@4", "eval/pass@4", "eval/distinct@4", "eval/coverage@4"} <= set(before)
    for line in lines:
        if "reward" in line:
            assert line["sampling/sampling_logp_difference/mean"] < 1e-5
    assert first["kl"] < 1e-5 < last["kl"]  # at first the policy is the reference
    assert first["meta/kl"] < 1e-9 < last["meta/kl"]
    for line in (first, last):  # the meta-controller sees the weights that were trained
        assert line["meta/entropy"] == pytest.approx(line["weights/entropy"], rel=1e-4)
    assert last["grad_norm"] > 0


def test_a_run_shows_its_header_its_first_prompt_and_two_rollouts(two_ranks):
    folder, text, _ = two_ranks
    for words in ("world_size=2", "prompt (", "held-out problems"):
        assert words in text
    assert text.count("  reward ") == 4
    assert (folder / "curves.png").stat().st_size > 10_000
    assert json.loads((folder / "config.json").read_text())["maxent_tau"] == 0.2
    assert len((folder / "launches.jsonl").read_text().splitlines()) == 1


def test_vllm_does_not_start_without_a_word(two_ranks):
    words = two_ranks[2]
    for line in ("starting vLLM: importing it", "starting vLLM: loading ", "is ready after "):
        assert words.count(line) == 1, words[-3000:]  # by one of the two ranks


def test_no_library_talks_at_the_start_of_a_run(two_ranks):
    said = two_ranks[1] + two_ranks[2]
    for word in ("get_accelerator", "Triton", "NUMA", "checkpoint shards"):
        assert word not in said, said[:3000]


def test_what_a_library_says_of_an_error_is_still_heard(monkeypatch):
    monkeypatch.delenv("TORCH_CPP_LOG_LEVEL", raising=False)
    common.set_up_libraries()
    heard = []
    logger = logging.getLogger("DeepSpeed")
    handler = logging.Handler()
    handler.emit = lambda record: heard.append(record.getMessage())
    logger.addHandler(handler)
    logger.warning("no GPU")
    logger.error("broken")
    logger.removeHandler(handler)
    assert heard == ["broken"] and os.environ["TORCH_CPP_LOG_LEVEL"] == "ERROR"


@pytest.mark.parametrize("theirs", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_a_gpus_memory_stays_in_one_piece_unless_the_user_says_how(monkeypatch, theirs):
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    common.set_up_libraries()
    assert os.environ["PYTORCH_CUDA_ALLOC_CONF"] == "expandable_segments:True"
    assert os.environ["NCCL_GRAPH_REGISTER"] == "0"
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF")
    monkeypatch.setenv(theirs, "max_split_size_mb:128")
    common.set_up_libraries()
    assert os.environ[theirs] == "max_split_size_mb:128"
    assert len([name for name in os.environ if name.endswith("ALLOC_CONF")]) == 1


def test_rollouts_of_a_step_are_logged_by_every_rank(two_ranks):
    rows = []
    for path in (two_ranks[0] / "rollouts").glob("step_000002*"):
        rows += [json.loads(line) for line in path.read_text().splitlines()]
    assert len(rows) == 16
    assert {"prompt", "completion", "finish_reason"} <= set(rows[0])
    for row in rows:
        (value,) = row["rewards"].values()
        assert value == row["reward"] and row["correct"] == (value >= 1)
    for path in (two_ranks[0] / f"evaluations/step_{step:06d}.jsonl" for step in (0, 2, 3)):
        assert len(path.read_text().splitlines()) == 6


def test_logged_rollouts_have_the_weights_of_their_group(two_ranks):
    lines = []
    for rank in range(2):  # each writes its own groups
        text = (two_ranks[0] / f"rollouts/step_000002.rank_{rank}.jsonl").read_text()
        lines += [json.loads(line) for line in text.splitlines()]
    weights = torch.tensor([line["weight"] for line in lines]).view(-1, 4)  # (P, G)
    torch.testing.assert_close(weights.sum(1), torch.ones(4))
    right = torch.tensor([line["correct"] for line in lines]).view(-1, 4)
    mixed = right.any(1) & ~right.all(1)
    assert mixed[:2].any() and mixed[2:].any()
    lightest = weights.masked_fill(~right, 1.0).amin(1)  # of the right rows
    assert (lightest > weights.mul(~right).amax(1))[mixed].all()


def test_the_document_makes_a_curve_of_several_runs(two_ranks, tmp_path, monkeypatch):
    for name in ("a", "b"):
        (tmp_path / "runs" / name).mkdir(parents=True)
        shutil.copy(two_ranks[0] / "metrics.jsonl", tmp_path / "runs" / name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MPLBACKEND", "Agg")
    document = (ROOT / "docs/metrics.md").read_text().split("## One prompt, two runs")[1]
    made = {}
    exec(document.split("```python\n")[1].split("```")[0], made)
    assert list(made["table"].index) == [1, 2, 3]
    assert (tmp_path / "two.png").exists()


def test_wandb_offline_holds_the_run(two_ranks):
    kept = (two_ranks[0] / "wandb_id").read_text()
    assert list((two_ranks[0] / "wandb").glob(f"offline-run-*/run-{kept}.wandb"))


def test_a_checkpoint_is_whole_and_a_hugging_face_model(two_ranks):
    folder = two_ranks[0]
    last = folder / "step_000003"
    assert checkpoint.checkpoints_in(folder) == [folder / "step_000002", last]
    assert checkpoint.verify(last) == ""
    assert checkpoint.latest(folder) == last
    assert AutoModelForCausalLM.from_pretrained(last).config.model_type == "qwen2"
    assert AutoTokenizer.from_pretrained(last).eos_token_id == 0
    inputs = preflight.load_inputs(checkpoint.settings_of(last), 2)
    assert read_trained(last) == prompt_keys(inputs.pools[0])
    assert leakage_warning(inputs.eval_rows, last) == ""


def test_a_damaged_checkpoint_is_noticed_and_passed_over(two_ranks, tmp_path):
    folder = shutil.copytree(two_ranks[0], tmp_path / "copy")
    file = folder / "step_000003" / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-5] ^= 1
    file.write_bytes(data)
    assert "has changed" in checkpoint.verify(folder / "step_000003")
    assert checkpoint.latest(folder).name == "step_000002"


@pytest.mark.slow
def test_a_run_resumed_from_a_checkpoint_goes_on_as_if_never_stopped(two_ranks, tmp_path):
    whole = two_ranks[0]
    part = shutil.copytree(whole, tmp_path / "part")
    shutil.rmtree(part / "step_000003")  # as if killed during step 3
    flags = [part / "config.json", f"--output_dir={part}", "--resume_from_checkpoint=latest"]
    done = run("train.py", *flags, "--report_to=", ranks=2)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "step_000002, 2 steps done" in done.stdout
    assert step_of(part, 3) == step_of(whole, 3)  # to the bit, with vLLM
    assert [line["step"] for line in metrics_of(part)] == [0, 1, 2, 2, 3, 3]
    one = load_file(whole / "step_000003" / "model.safetensors")
    two = load_file(part / "step_000003" / "model.safetensors")
    assert all(torch.equal(one[name], two[name]) for name in one)


def watched_evaluation(config, own) -> None:
    """evaluate.py, which says how many lines its file has when it gets its name. Written in place,
    a file of a run that was killed would pass for done."""
    rename = Path.rename

    def told(self, target):
        assert not Path(target).exists()
        print(f"renamed with {len(self.read_text().splitlines())} lines", flush=True)
        return rename(self, target)

    Path.rename = told  # in this process, a child's
    common.script(evaluate.main, config, own)


def test_evaluate_scores_a_checkpoint(two_ranks, tmp_path):
    output = tmp_path / "not there yet" / "problems.jsonl"
    model = two_ranks[0] / "step_000003"
    flags = [*SMALL, f"--model={model}", "--rollout_engine=hf", f"--output={output}"]
    argv = ["config/countdown_tiny.py", *flags]
    own, config = common.load_with_flags(argv, checks.FLAGS["evaluate"])
    own["seeds"] = 2
    log = tmp_path / "log"
    # forked: it has imported all this already; test_slurm.py runs the script
    evaluated = child.start(watched_evaluation, config, own, log=log)
    assert child.status(evaluated) == 0, log.read_text()[-3000:]
    assert "renamed with 12 lines" in log.read_text()
    (summary,) = [line for line in log.read_text().splitlines() if line.startswith("{")]
    summary = json.loads(summary)
    assert summary["problems"] == 6
    records = [json.loads(line) for line in output.read_text().splitlines()]
    assert [record["seed"] for record in records] == [0] * 6 + [1] * 6


NINE_STEPS = {"reward_funcs": ["parity_reward:parity"], "max_steps": 9}


def with_a_sync_that_breaks() -> None:
    """After the first two, with which a run proves that weights arrive (test_sync.py)."""
    real = rollout.HfEngine.sync
    calls = []

    def sync(self, named_parameters) -> None:
        calls.append(1)
        if len(calls) <= 2:  # copies: HfEngine would share the policy's own weights
            real(self, [(name, tensor.clone()) for name, tensor in named_parameters])

    rollout.HfEngine.sync = sync


def test_a_sync_that_never_arrives_stops_the_run_with_a_sentence(tiny_model_dir, tmp_path):
    folder = tmp_path / "run"
    flags = NINE_STEPS | {"learning_rate": 1e-2, "max_logp_difference": 0.05}
    status, words = in_child.run(with_a_sync_that_breaks, tiny_model_dir, folder, **flags)
    assert status == 1
    assert "does not hold the policy's weights" in words
    assert "Traceback" not in words
    assert 1 <= len(metrics_of(folder)) < 9


def with_nan_weights() -> None:
    train.MAX_SKIPPED_STEPS = 2
    real = loss.maxent_weights
    loss.maxent_weights = lambda *a: real(*a) * math.nan


def with_nan_log_probs() -> None:
    train.MAX_SKIPPED_STEPS = 2
    real = learner.micro_batch_loss

    def micro_batch_loss(engine, part, *args):
        result = real(engine, part, *args)
        part["old_logps"] = part["old_logps"] * math.nan
        return result[0], result[1], result[2] * math.nan

    learner.micro_batch_loss = micro_batch_loss


def test_nan_log_probs_of_the_trainer_skip_steps_and_do_not_blame_the_sampler(
    tiny_model_dir, tmp_path
):
    folder = tmp_path / "run"
    flags = NINE_STEPS | {"save_steps": 0, "max_logp_difference": 0.05}
    status, words = in_child.run(with_nan_log_probs, tiny_model_dir, folder, **flags)
    assert status == 1
    assert "2 steps in a row had a non-finite loss" in words
    assert words.count("the loss or its gradient is not finite") == 1  # at the first
    assert "weights" not in words.splitlines()[-1]
    assert checkpoint.latest(folder).name == "step_000002"


def test_nan_losses_stop_the_run_after_max_skipped_steps(tiny_model_dir, tmp_path):
    folder = tmp_path / "run"
    flags = NINE_STEPS | {"save_steps": 0}
    status, words = in_child.run(with_nan_weights, tiny_model_dir, folder, **flags)
    assert status == 1
    assert "2 steps in a row had a non-finite loss" in words
    assert "Traceback" not in words
    assert [line["skipped_steps"] for line in metrics_of(folder)] == [1, 2]
    assert checkpoint.latest(folder).name == "step_000002"
    flags |= {"resume_from_checkpoint": "latest"}
    status, words = in_child.run(with_nan_weights, tiny_model_dir, folder, **flags)
    assert "3 steps in a row had a non-finite loss" in words  # a resumed run counts on


def test_different_answers_are_counted_where_their_number_is_unknown(monkeypatch):
    """Such a task has no coverage."""
    record = {"correct": 2, "failures": 0, "distinct": 2, "num_modes": None}
    unknown = evaluate.summarize([record, record | {"distinct": 1}], 4)
    assert unknown == {
        "eval/mean@4": 0.5,
        "eval/pass@4": 1.0,
        "eval/pass@1": 0.5,
        "eval/distinct@4": 1.5,
    }
    both = evaluate.summarize([record, record | {"num_modes": 8}], 4)
    assert both["eval/distinct@4"] == 2.0
    assert both["eval/coverage@4"] == 0.25
    no_modes = evaluate.summarize([record | {"distinct": None}], 4)
    assert "eval/distinct@4" not in no_modes


@pytest.mark.parametrize(
    "there, refused",
    [
        ('{"id": "a", "samples": 8, "correct": 3}\n', False),
        ("", False),
        ('{"step": 1, "reward": 0.5}\n', True),
        ("[]\n", True),
        ("no json", True),
        ("[" * 100_000, True),
    ],
)
def test_an_evaluation_replaces_no_file_of_another_kind(there, refused, tmp_path):
    path = tmp_path / "out.jsonl"
    evaluate.check_output(path)  # nothing there
    path.write_text(there)
    if not refused:
        return evaluate.check_output(path)
    for look in (
        lambda: evaluate.check_output(path),
        lambda: evaluate.main({}, {"seeds": 1, "output": str(path)}),  # before anything else
    ):
        with pytest.raises(common.UserError, match="exists and is not an evaluation"):
            look()
    assert path.read_text() == there


def test_flags_of_training_that_another_script_does_not_read_are_warned_about(capsys):
    instead = checks.INSTEAD["evaluate"]
    read = ["config/a.py", "--model=m", "--eval_temperature=0.1", "seed=9"]
    assert common.unused_flags(read, instead) == ""
    said = common.unused_flags(["config/a.py", "--temperature=0.1"], instead)
    assert "--temperature=0.1 is for training runs" in said and "--eval_temperature" in said
    for script, table in checks.INSTEAD.items():
        for key, cure in table.items():
            assert key in common.default_config()
            assert cure in common.default_config() or cure in checks.FLAGS[script]
            assert f"set --{cure}" in common.unused_flags([f"--{key}=9"], table)
    common.load_with_flags(["--temperature=0.1"], checks.FLAGS["evaluate"], instead)
    assert said in capsys.readouterr().err
    # each of several, and by another trainer's name
    several = common.unused_flags(["--temperature=0.1", "--num_generations=4"], instead)
    assert [line.split()[1] for line in several.splitlines()] == [
        "--temperature=0.1",
        "--num_generations=4",
    ]
    assert "--batch_size" in common.unused_flags(
        ["--data.train_batch_size=8"], checks.INSTEAD["sft"]
    )


def test_a_scripts_own_flag_is_known_by_other_trainers_names_too():
    own, config = common.load_with_flags(["--lr=2e-3"], checks.FLAGS["sft"])
    assert own["learning_rate"] == 2e-3
    assert config["learning_rate"] == common.default_config()["learning_rate"]


def warm_start(folder: Path, ranks: int, *flags: str) -> float:
    """Trains the tiny model with sft.py, and returns the loss that it reports."""
    argv = ["config/countdown_tiny.py", "--model=tiny", f"--output_dir={folder}"]
    argv += ["--batch_size=32", "--learning_rate=2e-3", *flags]
    own, config = common.load_with_flags(argv, checks.FLAGS["sft"])
    log = folder.with_suffix(".log")
    started = child.start_ranks(ranks, common.script, sft.main, config, own, logs=[log] * ranks)
    assert child.statuses(started) == [0] * ranks, log.read_text()[-3000:]
    return json.loads((folder / "sft.json").read_text())["loss"]


def test_a_tiny_model_is_built_and_learns_from_demonstrations(tmp_path):
    folder = tmp_path / "sft"
    assert warm_start(folder, 2, "--steps=30") < 3.0  # ln(101 tokens) before: 4.6
    parameters = AutoModelForCausalLM.from_pretrained(folder).parameters()
    assert 0.5e6 < sum(parameter.numel() for parameter in parameters) < 1.5e6
    assert len(read_trained(folder)) > 100


@pytest.mark.slow
def test_a_warm_start_that_diverges_is_a_sentence_and_leaves_no_model(tmp_path):
    flags = ["--steps=30", "--batch_size=8", "--model=tiny", f"--output_dir={tmp_path / 'sft'}"]
    flags = ["config/countdown_tiny.py", *flags, "--learning_rate=1e28"]
    own, config = common.load_with_flags(flags, checks.FLAGS["sft"])
    log = tmp_path / "log"
    assert child.status(child.start(common.script, sft.main, config, own, log=log)) == 1
    words = log.read_text()
    assert "the gradient is not finite; lower --learning_rate=1e+28" in words
    assert not (tmp_path / "sft").exists()


@pytest.mark.slow
def test_the_loss_of_a_warm_start_is_that_of_the_batch_on_all_ranks(tmp_path):
    losses = [warm_start(tmp_path / str(n), n, "--steps=2") for n in (1, 2)]
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)


def test_metrics_of_a_killed_run_lose_later_steps_and_half_a_line_only(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n{"step": 3}\n{"step": 4, "rew')
    log = MetricsLog(tmp_path, load_config([]), step=2)
    log.write(3, {"reward": math.inf})
    log.close()
    assert path.read_text() == '{"step": 1}\n{"step": 2}\n{"step": 3, "reward": null}\n'


def test_progress_in_a_log_file_is_a_few_lines(capsys):
    bar = progress(total=300, unit="step")
    for i in range(300):
        bar.set_postfix_str(f"reward {i}", refresh=False)
        bar.update()
        time.sleep(0.001)
    bar.close()
    lines = [line for line in capsys.readouterr().err.splitlines() if line]
    assert len(lines) <= 3 and "300/300" in lines[-1] and "reward 299" in lines[-1]


def test_a_sentence_beside_the_bar_is_one_plain_line_of_a_log_file(tmp_path):
    """`train.py > log 2>&1`: no blanks over the bar's last line, and no second copy of it."""
    code = (
        "from common import progress, print_above_bar; bar = progress(total=9); "
        "[(bar.update(), print_above_bar(f'sentence {i}')) for i in range(3)]"
    )
    with open(tmp_path / "log", "wb") as log:
        subprocess.run([sys.executable, "-c", code], cwd=ROOT, stdout=log, stderr=log, check=True)
    lines = (tmp_path / "log").read_bytes().decode().splitlines()
    assert [line for line in lines if "sentence" in line] == [f"sentence {i}" for i in range(3)]
    assert sum("/9" in line for line in lines) <= 2  # the first and the last


def test_curves_are_drawn_of_a_run_whose_tau_is_infinite(tmp_path):
    lines = [{"step": i, "tau": None, "reward": 0.5, "entropy": 1.0} for i in range(3)]
    evaluate.draw_curves(lines, tmp_path / "curves.png")
    assert (tmp_path / "curves.png").stat().st_size > 10_000


def test_curves_have_no_empty_panels():
    lines = [{"step": 0, "eval/mean@8": 0.5, "eval/pass@1": 0.5}]
    lines += [{"step": 1, "reward": 0.5, "tau": None, "loss": 3.0}, {"step": 2, "reward": 1.0}]
    assert evaluate.panels_of(lines) == {
        "training reward": {"reward": ((1, 2), (0.5, 1.0))},
        "held-out accuracy": {"eval/mean@8": ((0,), (0.5,))},
    }
    # nor one with the line of a tau that nothing moves
    still = [{"step": 1, "tau": 0.2}, {"step": 2, "tau": 0.2}]
    assert evaluate.panels_of(still) == {}
    moved = evaluate.panels_of(still + [{"step": 3, "tau": 0.3}])
    assert moved == {"weights over the group": {"tau": ((1, 2, 3), (0.2, 0.2, 0.3))}}


def test_curves_say_that_they_are_smoothed_and_the_distances_have_an_axis_of_their_own(drawn):
    apart = "sampling/sampling_logp_difference/mean"
    lines = [{"step": i, "reward": 0.5, "grad_norm": 9.0 + i, apart: 1e-7 * i} for i in (1, 2, 3)]
    evaluate.draw_curves(lines, None)
    reward, left, right = drawn
    assert "bold: running mean" in reward.figure.get_supxlabel()
    assert [line.get_ydata()[-1] for line in left.lines][1] == 12.0
    assert right.get_ylim()[1] < 1e-6 and right.get_ylim()[0] == 0
    names = [text.get_text() for text in right.get_legend().get_texts()]
    assert names == ["grad_norm", "sampling_logp_difference/mean (right)"]
    assert left.lines[0].get_color() != right.lines[0].get_color()
    drawn.clear()
    evaluate.draw_curves([{"step": 0, "eval/mean@8": 0.5}], None)  # nothing is smoothed
    assert drawn[0].figure.get_supxlabel() == ""


def test_the_report_compares_what_both_evaluations_have(tmp_path, capsys):
    lines = [
        {"step": 0, "eval/mean@8": 0.25, "eval/coverage@8": None, "eval/reward_failures": 1.0},
        {"step": 1, "reward": 0.5},
        {"step": 2, "eval/mean@8": 0.5, "eval/coverage@8": None, "eval/pass@8": 0.75},
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    evaluate.report(tmp_path)
    table = capsys.readouterr().out
    assert "mean@8                  0.250      0.500     +0.250" in table
    assert "reward_failures" not in table and "coverage" not in table
    assert (tmp_path / "curves.png").exists()


def test_one_evaluation_is_not_compared_with_itself(tmp_path, capsys):
    lines = [{"step": 0, "eval/mean@8": 0.25}, {"step": 1, "reward": 0.5}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    evaluate.report(tmp_path)
    table = capsys.readouterr().out
    assert "mean@8                  0.250\n" in table and "change" not in table


def test_an_eval_command_is_started_in_a_shell_as_no_rank_of_this_run(tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("LOCAL_SCRATCH", "/scratch")  # a cluster's
    monkeypatch.setattr(evaluate, "CHOSEN_WAITING", "GOMP_SPINCOUNT")  # not the user's
    monkeypatch.setenv("GOMP_SPINCOUNT", "10000")
    path = tmp_path / "a run" / "step_000001"
    path.mkdir(parents=True)
    seen = path / "seen"
    evaluate.start_command(
        "cd {checkpoint} && echo rank=$RANK$GOMP_SPINCOUNT $LOCAL_SCRATCH > seen", path
    )
    end = time.monotonic() + PATIENCE
    while not seen.exists() or not seen.read_text().endswith("\n"):
        assert time.monotonic() < end
        time.sleep(0.02)
    assert seen.read_text() == "rank= /scratch\n"


def test_an_eval_command_that_can_not_be_started_costs_a_line(tmp_path, capsys, monkeypatch):
    def no_memory(*arguments, **settings):
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(evaluate.subprocess, "Popen", no_memory)
    evaluate.start_command("ls {checkpoint}", tmp_path)
    assert "eval_command could not be started" in capsys.readouterr().out


@pytest.mark.parametrize(
    "command, words",
    [
        ("sbatch slurm/evaluate.sh", "must hold"),
        ("sh -c 'echo {checkpoint}", "not closed"),
    ],
)
def test_an_eval_command_that_could_not_run_is_refused(command, words):
    with pytest.raises(UserError, match=words):
        load_config([f"--eval_command={command}"])


def test_an_eval_command_may_be_anything_that_a_shell_reads():
    for command in (
        "sh -c 'ls {checkpoint} > $HOME/log'",
        "curl http://host/?a=1&b={checkpoint}",
        "python e.py --model={checkpoint} --a=b",
        "cd /tmp && X=1 ls {checkpoint} 2>eval.log",
    ):
        assert load_config([f"--eval_command={command}"])["eval_command"] == command
