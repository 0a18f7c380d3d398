"""The real scripts as a user runs them: torchrun, vLLM, DeepSpeed, Weights & Biases offline."""

import json
import math
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from child import ended_well
from exact_matrix import SMALL_DATA
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

import checkpoint
import evaluate
import train
from common import UserError, load_config, progress
from journal import MetricsLog

ROOT = Path(__file__).resolve().parent.parent
SMALL = [
    *SMALL_DATA,
    "--prompts_per_step=4",
    "--num_generations=4",
    "--max_completion_length=12",
    "--eval_max_prompts=6",
    "--eval_num_generations=4",
    "--learning_rate=1e-3",
    "--reward_funcs=['parity_reward:parity']",
]


def run(
    script: str, *flags, ranks: int = 0, patch: str = "", folder: Path | None = None
) -> subprocess.CompletedProcess:
    """A script of this project on config/countdown_tiny.py; `patch` is code that runs first, from a file in `folder`."""
    launcher = (
        ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks)]
        if ranks
        else []
    )
    if patch:
        patched = folder / f"patched_{script}"
        patched.write_text(
            f"import sys\nsys.path.insert(0, {str(ROOT)!r})\n{patch}\nimport {script[:-3]} as main\nmain.script(main.main, main.script(main.load_config))\n"
        )
        script = str(patched)
    return subprocess.run(
        [sys.executable, *launcher, script, "config/countdown_tiny.py", *map(str, flags)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=240,
        env={**os.environ, "PYTHONPATH": str(ROOT / "tests" / "helpers")},
    )  # for parity_reward


def metrics_of(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def without_times(line: dict) -> dict:
    return {k: v for k, v in line.items() if not k.startswith("time/") and k != "tokens_per_second"}


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


def test_three_steps_on_two_ranks_with_vllm_write_every_metric(two_ranks):
    lines = metrics_of(two_ranks[0])
    assert [line["step"] for line in lines] == [0, 1, 2, 2, 3, 3]  # evaluations at 0, 2 and the end
    step = lines[-2]
    for name in """reward reward_std frac_reward_zero_std entropy kl clip_ratio/low clip_ratio/high grad_norm weights/entropy weights/entropy_norm
                   weights/effective_rollouts weights/incorrect_mass weights/max tau beta delta_tau delta_beta completions/mean_length
                   completions/max_length completions/clipped_ratio completions/distinct_1 completions/distinct_2 completions/jaccard time/rollout
                   time/reward time/score time/learn time/sync time/step tokens_per_second reward/parity_reward:parity/mean
                   reward/parity_reward:parity/timeouts reward/parity_reward:parity/errors
                   sampling/sampling_logp_difference/mean sampling/importance_sampling_ratio/max meta/loss meta/tau_grad meta/beta_grad""".split():
        assert name in step, name
    assert (
        step["controller/skipped"] == 0
        and lines[1]["delta_tau"] != 0
        and lines[1]["delta_beta"] != 0
    )
    assert {"eval/mean@4", "eval/pass@4", "eval/distinct@4", "eval/coverage@4"} <= set(lines[0])
    assert all(
        line["sampling/sampling_logp_difference/mean"] < 1e-5 for line in lines if "reward" in line
    )
    assert (
        lines[1]["kl"] < 1e-5 < step["kl"] and step["grad_norm"] > 0
    )  # at first the policy is the reference


def test_a_run_shows_its_header_its_first_prompt_and_two_rollouts(two_ranks):
    folder, text, _ = two_ranks
    assert (
        "world_size=2" in text
        and "prompt (" in text
        and text.count("  reward ") == 4
        and "held-out problems" in text
    )
    assert (folder / "curves.png").stat().st_size > 10_000
    assert (
        json.loads((folder / "config.json").read_text())["maxent_tau"] == 0.2
        and len((folder / "launches.jsonl").read_text().splitlines()) == 1
    )


def test_vllm_does_not_start_without_a_word(two_ranks):
    words = two_ranks[2]
    for line in ("starting vLLM: importing it", "starting vLLM: loading ", "is ready after "):
        assert words.count(line) == 1, words[-3000:]  # by one of the two ranks


def test_rollouts_of_a_step_are_logged_by_every_rank(two_ranks):
    rows = [
        json.loads(line)
        for path in sorted((two_ranks[0] / "rollouts").glob("step_000002*"))
        for line in path.read_text().splitlines()
    ]
    assert len(rows) == 16 and {"prompt", "completion", "reward", "finish_reason"} <= set(rows[0])


def test_wandb_offline_holds_the_run(two_ranks):
    kept = (two_ranks[0] / "wandb_id").read_text()
    assert list((two_ranks[0] / "wandb").glob(f"offline-run-*/run-{kept}.wandb"))


def test_a_checkpoint_is_whole_and_a_hugging_face_model(two_ranks):
    folder = two_ranks[0]
    assert [p.name for p in checkpoint.steps_of(folder)] == [
        "step_000002",
        "step_000003",
    ] and checkpoint.verify(folder / "step_000003") == ""
    assert AutoModelForCausalLM.from_pretrained(folder / "step_000003").config.model_type == "qwen2"
    assert AutoTokenizer.from_pretrained(folder / "step_000003").eos_token_id == 0
    assert checkpoint.latest(folder).name == "step_000003"


def test_a_damaged_checkpoint_is_noticed_and_passed_over(two_ranks, tmp_path):
    folder = shutil.copytree(two_ranks[0], tmp_path / "copy")
    file = folder / "step_000003" / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-5] ^= 1
    file.write_bytes(data)
    assert (
        "has changed" in checkpoint.verify(folder / "step_000003")
        and checkpoint.latest(folder).name == "step_000002"
    )


@pytest.mark.slow
def test_a_run_resumed_from_a_checkpoint_goes_on_as_if_never_stopped(two_ranks, tmp_path):
    whole = two_ranks[0]
    part = shutil.copytree(whole, tmp_path / "part")
    shutil.rmtree(part / "step_000003")  # as if killed during step 3
    config = json.loads((whole / "config.json").read_text())
    flags = [
        f"--{key}={value}"
        for key, value in config.items()
        if key not in ("output_dir", "report_to")
    ]
    done = run(
        "train.py", *flags, f"--output_dir={part}", "--resume_from_checkpoint=latest", ranks=2
    )
    assert done.returncode == 0 and "step_000002, 2 steps done" in done.stdout, done.stderr[-3000:]
    last, same = (
        without_times(
            next(line for line in metrics_of(folder) if line["step"] == 3 and "reward" in line)
        )
        for folder in (whole, part)
    )
    assert same == last  # to the bit, with vLLM
    assert [line["step"] for line in metrics_of(part)] == [0, 1, 2, 2, 3, 3]
    one, two = (load_file(folder / "step_000003" / "model.safetensors") for folder in (whole, part))
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_evaluate_scores_a_checkpoint(two_ranks, tmp_path):
    output = tmp_path / "not there yet" / "problems.jsonl"
    done = run(
        "evaluate.py",
        *SMALL,
        f"--model={two_ranks[0] / 'step_000003'}",
        "--rollout_engine=hf",
        f"--output={output}",
    )
    ended_well(done)
    assert (
        json.loads(done.stdout.splitlines()[-1])["problems"]
        == len(output.read_text().splitlines())
        == 6
    )


def test_a_sync_that_never_arrives_stops_the_run_with_a_sentence(tiny_model_dir, tmp_path):
    done = run(
        "train.py",
        *SMALL,
        f"--model={tiny_model_dir}",
        f"--output_dir={tmp_path / 'run'}",
        "--rollout_engine=hf",
        "--eval_steps=0",
        "--max_steps=9",
        patch="import rollout\nrollout.HfEngine.sync = lambda self, named_parameters: list(named_parameters)",
        folder=tmp_path,
    )
    assert (
        done.returncode == 1
        and "does not hold the policy's weights" in done.stderr
        and "Traceback" not in done.stderr
    )
    assert 1 <= len(metrics_of(tmp_path / "run")) < 9


def test_nan_losses_stop_the_run_after_max_skipped_steps(tiny_model_dir, tmp_path):
    done = run(
        "train.py",
        *SMALL,
        f"--model={tiny_model_dir}",
        f"--output_dir={tmp_path / 'run'}",
        "--rollout_engine=hf",
        "--eval_steps=0",
        "--max_steps=9",
        "--max_skipped_steps=2",
        patch="import loss\nold = loss.maxent_weights\nloss.maxent_weights = lambda *a: old(*a) * float('nan')",
        folder=tmp_path,
    )
    assert (
        done.returncode == 1
        and "2 steps in a row had a non-finite loss" in done.stderr
        and "Traceback" not in done.stderr
    )
    assert [line["skipped_steps"] for line in metrics_of(tmp_path / "run")] == [1, 2]
    assert checkpoint.latest(tmp_path / "run").name == "step_000002"


def test_a_tiny_model_is_built_and_learns_from_demonstrations(tmp_path):
    done = run(
        "sft.py",
        "--model=tiny",
        f"--output_dir={tmp_path / 'sft'}",
        "--steps=30",
        "--batch_size=64",
        ranks=2,
    )
    ended_well(done)
    assert (
        json.loads((tmp_path / "sft" / "sft.json").read_text())["loss"] < 3.0
    )  # ln(101 tokens) = 4.6 before
    assert (
        0.5e6
        < sum(
            p.numel() for p in AutoModelForCausalLM.from_pretrained(tmp_path / "sft").parameters()
        )
        < 1.5e6
    )


def test_metrics_of_a_killed_run_lose_later_steps_and_half_a_line_only(tmp_path):
    config = load_config([])
    (tmp_path / "metrics.jsonl").write_text(
        '{"step": 1}\n{"step": 2}\n{"step": 3}\n{"step": 4, "rew'
    )
    log = MetricsLog(tmp_path, config, step=2)
    log.write(3, {"reward": math.inf})
    log.close()
    assert (
        tmp_path / "metrics.jsonl"
    ).read_text() == '{"step": 1}\n{"step": 2}\n{"step": 3, "reward": null}\n'


def test_progress_in_a_log_file_is_a_few_lines(capsys):
    bar = progress(total=300, unit="step")
    for i in range(300):
        bar.set_postfix_str(f"reward {i}", refresh=False)
        bar.update()
        time.sleep(0.001)
    bar.close()
    lines = [line for line in capsys.readouterr().err.splitlines() if line]
    assert len(lines) <= 3 and "300/300" in lines[-1] and "reward 299" in lines[-1]


def test_curves_are_drawn_of_a_run_whose_tau_is_infinite(tmp_path):
    lines = [{"step": i, "tau": None, "reward": 0.5, "entropy": 1.0} for i in range(3)]
    evaluate.draw_curves(lines, tmp_path / "curves.png")
    assert (tmp_path / "curves.png").stat().st_size > 10_000


def test_the_report_compares_what_both_evaluations_have(tmp_path, capsys):
    lines = [
        {"step": 0, "eval/mean@8": 0.25, "eval/reward_failures": 1.0},
        {"step": 1, "reward": 0.5},
        {"step": 2, "eval/mean@8": 0.5, "eval/pass@8": 0.75},
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    evaluate.report(tmp_path)
    out = capsys.readouterr().out
    assert (
        "mean@8                  0.250      0.500     +0.250" in out
        and "reward_failures" not in out
        and (tmp_path / "curves.png").exists()
    )


def test_an_eval_command_is_started_with_the_checkpoint_as_no_rank_of_this_run_and_one_that_can_not_be_costs_a_line(
    tmp_path, capsys, monkeypatch
):
    monkeypatch.setenv("RANK", "3")
    path = tmp_path / "a run" / "step_000001"
    path.mkdir(parents=True)
    evaluate.start_command("sh -c 'echo rank=$RANK > \"$0/seen\"' {checkpoint}", path)
    end = time.monotonic() + 120
    while not (path / "seen").exists() or not (path / "seen").read_text().endswith("\n"):
        assert time.monotonic() < end
        time.sleep(0.02)
    assert (path / "seen").read_text() == "rank=\n"
    evaluate.start_command("no-such-program {checkpoint}", path)
    assert "could not be started" in capsys.readouterr().out
    for command, words in (
        ("sbatch slurm/evaluate.sh", "must hold"),
        ("sh -c 'echo {checkpoint}", "not closed"),
    ):
        with pytest.raises(UserError, match=words):
            load_config([f"--eval_command={command}"])


def test_adamw_is_fused_on_a_gpu_only():
    c = load_config([])
    assert train.adamw_settings(c, torch.device("cuda"))["fused"] is True
    assert train.adamw_settings(c, torch.device("cpu"))["fused"] is False
