"""Nothing is lost: checkpoints under kill -9, full disks and damage; runs that are stopped, killed,
resumed, on another number of ranks."""

import json
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import child
import exact_matrix
import in_child
import pytest
import torch
from deadlines import PATIENCE
from exact_matrix import finish, first_difference, log_of, steps_in
from strangers import RunsCode, replaced
from transformers import AutoModelForCausalLM

import checkpoint
import common
import train
from common import UserError, load_config
from journal import make_run_folder, read_metrics
from prompts import read_trained
from ranks import start_distributed


def start(model: Path, folder: Path, *flags, ranks: int = 1) -> subprocess.Popen:
    flags = [*exact_matrix.Case("hf", 3, ranks).flags(), *flags]
    return exact_matrix.start(model, folder, *flags, ranks=ranks)


def wait_for_step(
    folder: Path, step: int, process: subprocess.Popen, seconds: float = PATIENCE
) -> None:
    end = time.monotonic() + seconds
    while not any(line["step"] >= step for line in steps_in(folder)):
        assert time.monotonic() < end and process.poll() is None, log_of(folder)[-3000:]
        time.sleep(0.05)


# --- whole runs


@pytest.fixture(scope="module")
def whole(tiny_model_dir, tmp_path_factory):
    """Four steps on two ranks, ZeRO 3, nothing in the way."""
    folder = tmp_path_factory.mktemp("resume") / "whole"
    assert set(on_two_ranks(tiny_model_dir, folder)) == {0}, log_of(folder)[-3000:]
    return folder


def on_two_ranks(model: Path, folder: Path, *flags, patch=None) -> list[int]:
    """The exit statuses of a run's ranks."""
    flags = [*exact_matrix.Case("hf", 3, 2).flags(), *flags]
    return child.statuses(in_child.start(model, folder, *flags, patch=patch, ranks=2))


def test_a_run_killed_between_two_updates_of_a_step_goes_on_bit_for_bit(
    whole, tiny_model_dir, tmp_path
):
    """Metrics, weights, optimizer, controllers, replay buffer, random state. exact_matrix.py does
    the same under torchrun for every engine, stage and number of ranks."""
    folder = tmp_path / "killed"
    statuses = on_two_ranks(tiny_model_dir, folder, patch=exact_matrix.die_between_two_updates)
    # the one that dies first may end the other one's barrier
    assert -signal.SIGKILL in statuses and 0 not in statuses, log_of(folder)[-3000:]
    assert [line["step"] for line in steps_in(folder)] == [1, 2]
    assert [path.name for path in folder.glob("step_*")] == ["step_000002"]
    resumed = on_two_ranks(tiny_model_dir, folder, "--resume_from_checkpoint=latest")
    assert resumed == [0, 0], log_of(folder)[-3000:]
    assert "step_000002, 2 steps done" in log_of(folder)
    assert first_difference(whole, folder) == ""
    assert (folder / "done").exists()


@pytest.mark.slow
def test_so_does_a_run_on_one_rank_at_stage_2(tiny_model_dir, tmp_path):
    """test_train.py has vLLM, two ranks, stage 0; exact_matrix.py all twelve."""
    assert exact_matrix.compare(tiny_model_dir, tmp_path, exact_matrix.Case("hf", 2, 1)) == ""


def third_step(folder: Path) -> dict:
    (line,) = [line for line in steps_in(folder) if line["step"] == 3]
    return line


def test_a_checkpoint_of_two_ranks_goes_on_with_one_to_rounding(whole, tiny_model_dir, tmp_path):
    folder = tmp_path / "one"
    folder.mkdir()
    shutil.copytree(whole / "step_000002", folder / "step_000002")
    shutil.copy(whole / "metrics.jsonl", folder)
    flags = [*exact_matrix.Case("hf", 3, 1).flags(), "--resume_from_checkpoint=latest"]
    run = in_child.start(tiny_model_dir, folder, *flags)
    assert child.statuses(run) == [0], log_of(folder)[-3000:]
    two_ranks = third_step(whole)
    one_rank = third_step(folder)
    for key in ("reward", "tau", "beta", "kl"):
        assert one_rank[key] == pytest.approx(two_ranks[key], rel=1e-4, abs=1e-6), key
    assert one_rank["loss"] == pytest.approx(two_ranks["loss"], rel=1e-5, abs=1e-6)
    assert one_rank["grad_norm"] == pytest.approx(two_ranks["grad_norm"], rel=1e-3)
    assert not list(folder.glob("*.tmp"))


def test_a_checkpoint_of_one_rank_goes_on_with_two(tiny_model_dir, tmp_path):
    folder = tmp_path / "grown"
    flags = exact_matrix.Case("hf", 0, 1).flags()
    run = in_child.start(tiny_model_dir, folder, *flags, "--max_steps=2")
    assert child.statuses(run) == [0], log_of(folder)[-3000:]
    flags.append("--resume_from_checkpoint=latest")
    run = in_child.start(tiny_model_dir, folder, *flags, ranks=2)
    assert child.statuses(run) == [0, 0], log_of(folder)[-3000:]
    assert "step_000002, 2 steps done" in log_of(folder)
    assert [line["step"] for line in steps_in(folder)] == [1, 2, 3, 4]
    # other data are noticed, the same are not
    changed = "warning: the training prompts are not those of"
    assert changed not in log_of(folder)
    run = in_child.start(tiny_model_dir, folder, *flags, "--max_steps=5", "--dataset.config=4")
    assert child.statuses(run) == [0], log_of(folder)[-3000:]
    assert f"{changed} {folder}/step_000004" in log_of(folder)
    # a checkpoint hands on what the run learnt before
    assert set() < read_trained(folder / "step_000004") < read_trained(folder / "step_000005")


def weights_of(path: Path) -> dict:
    return AutoModelForCausalLM.from_pretrained(path).state_dict()


def test_a_shallow_checkpoint_is_exported_and_the_last_one_is_a_model_anyway(whole, tmp_path):
    assert not (whole / "step_000002" / "model.safetensors").exists()
    assert read_trained(whole / "step_000002") == read_trained(whole / "step_000004") != set()
    for name in ("step_000002", "step_000004"):
        # by the command, which test_slurm.py's evaluation of a checkpoint runs
        checkpoint.main(["export", str(whole / name), str(tmp_path / name)])
    saved = weights_of(whole / "step_000004")
    exported = weights_of(tmp_path / "step_000004")
    earlier = weights_of(tmp_path / "step_000002")
    assert all(torch.equal(exported[name], saved[name]) for name in saved)
    assert any(not torch.equal(earlier[name], saved[name]) for name in saved)
    stops = (whole / "step_000002" / "generation_config.json").read_text()
    assert (tmp_path / "step_000002" / "generation_config.json").read_text() == stops
    with pytest.raises(UserError, match="exists already"):
        checkpoint.export(whole / "step_000004", tmp_path / "step_000004")


def with_a_file_stop_in_step_2() -> None:
    real = train.log_step

    def log_step(run, *args) -> None:
        real(run, *args)
        if run.step == 2:
            (run.folder / "stop").touch()

    train.log_step = log_step


def evaluated_in(folder: Path) -> list[int]:
    lines, _ = read_metrics(folder / "metrics.jsonl")
    return [line["step"] for line in lines if "eval/pass@1" in line]


def test_a_file_stop_ends_a_run_after_a_save_and_the_next_start_removes_it(
    tiny_model_dir, tmp_path
):
    """That a run goes on from there is in test_slurm.py."""
    folder = tmp_path / "run"
    flags = {"max_steps": 400, "save_steps": 0}
    status, words = in_child.run(with_a_file_stop_in_step_2, tiny_model_dir, folder, **flags)
    assert status == 0, words
    (last,) = checkpoint.checkpoints_in(folder)
    assert last.name == "step_000002" and checkpoint.verify(last) == ""
    assert (folder / "stop").exists() and not (folder / "done").exists()
    assert "stopped as asked after step 2 of 400; go on with" in words
    config = json.loads((folder / "config.json").read_text())
    make_run_folder(config, {}, resuming=True)
    assert not (folder / "stop").exists() and last.exists()


def test_an_evaluation_that_a_stop_left_out_is_made_where_the_run_goes_on(tiny_model_dir, tmp_path):
    folder = tmp_path / "run"
    flags = {"max_steps": 3, "save_steps": 0, "eval_steps": 2, "eval_max_prompts": 2}
    in_child.run(with_a_file_stop_in_step_2, tiny_model_dir, folder, **flags)
    assert evaluated_in(folder) == [0]
    for _ in range(2):  # the second start finds nothing to do
        flags["resume_from_checkpoint"] = "latest"
        status, words = in_child.run(None, tiny_model_dir, folder, **flags)
        assert status == 0, words
        assert evaluated_in(folder) == [0, 2, 3]


def test_a_shallow_run_that_is_declared_done_where_it_stopped_gets_its_model(
    tiny_model_dir, tmp_path
):
    folder = tmp_path / "run"
    flags = {"max_steps": 400, "save_steps": 0, "checkpoint_mode": "shallow"}
    status, words = in_child.run(with_a_file_stop_in_step_2, tiny_model_dir, folder, **flags)
    assert status == 0, words
    (last,) = checkpoint.checkpoints_in(folder)
    assert not checkpoint.holds_model(last)
    flags |= {"max_steps": 2, "resume_from_checkpoint": "latest"}
    for _ in range(2):  # the second start finds nothing to do
        status, words = in_child.run(None, tiny_model_dir, folder, **flags)
        assert status == 0, words
        assert checkpoint.checkpoints_in(folder) == [last] and checkpoint.verify(last) == ""
        assert weights_of(last)
        saved = last.stat().st_mtime_ns
    assert saved == last.stat().st_mtime_ns and (folder / "done").exists()


def test_a_stop_in_the_last_step_leaves_a_run_that_is_done(tiny_model_dir, tmp_path):
    """So its upload is waited for, which a run that was asked to stop does not do."""
    folder = tmp_path / "run"
    flags = {"max_steps": 2, "save_steps": 0}
    status, words = in_child.run(with_a_file_stop_in_step_2, tiny_model_dir, folder, **flags)
    assert status == 0, words
    assert (folder / "done").exists() and "stopped as asked" not in words


@pytest.mark.slow
def test_a_file_stop_ends_all_ranks(tiny_model_dir, tmp_path):
    folder = tmp_path / "stopped"
    process = start(tiny_model_dir, folder, "--save_steps=0", "--max_steps=400", ranks=2)
    wait_for_step(folder, 1, process)
    (folder / "stop").touch()
    assert finish(process) == 0, log_of(folder)[-3000:]
    (last,) = checkpoint.checkpoints_in(folder)
    assert checkpoint.verify(last) == "" and "stopped as asked" in log_of(folder)


@pytest.mark.slow
def test_a_signal_lets_the_step_finish_saves_and_exits_with_0(tiny_model_dir, tmp_path):
    """As a file does, above; below and in test_stop.py a loop like train.py's hears each signal."""
    folder = tmp_path / "signal"
    process = start(tiny_model_dir, folder, "--save_steps=0", "--max_steps=400", "--zero_stage=0")
    wait_for_step(folder, 1, process)
    process.send_signal(signal.SIGUSR1)
    assert finish(process) == 0, log_of(folder)[-3000:]
    assert checkpoint.verify(checkpoint.latest(folder)) == "" and not (folder / "done").exists()


def pgrep(*words: str) -> list[str]:
    """The numbers of processes."""
    return subprocess.run(["pgrep", *words], capture_output=True, text=True).stdout.split()


@pytest.mark.slow
def test_one_dead_rank_ends_the_others_with_a_sentence(tiny_model_dir, tmp_path):
    """Under torchrun; test_heartbeat.py has ranks that are killed and stopped."""
    folder = tmp_path / "dead"
    process = start(tiny_model_dir, folder, "--max_steps=400", "--zero_stage=0", ranks=2)
    wait_for_step(folder, 1, process)
    ranks = pgrep("-P", str(process.pid), "-f", "train.py")
    os.kill(int(ranks[-1]), signal.SIGKILL)
    assert finish(process, 180) != 0
    assert "another rank" in log_of(folder), log_of(folder)[-3000:]
    assert not pgrep("-f", f"output_dir={folder}")


# --- a stranger's folder


def find(c: dict) -> None:
    common.script(lambda argv: start_distributed() and checkpoint.find(c))


def test_going_on_in_a_strangers_run_folder_runs_no_code_of_his(whole, tmp_path):
    theirs = tmp_path / "theirs"
    trace = tmp_path / "trace"
    shutil.copytree(whole / "step_000004", theirs / "step_000004")
    replaced(theirs / "step_000004", RunsCode(trace))
    c = load_config([f"--output_dir={theirs}", "--zero_stage=3"])
    c |= {"resume_from_checkpoint": "latest"}
    assert checkpoint.resumes_in_place(c) is True
    assert child.status(child.start(find, c, log=tmp_path / "log")) == 2
    words = (tmp_path / "log").read_text()
    assert "'posix.mkdir' would run as code" in words and not trace.exists()
    assert "Traceback" not in words
