"""What a run writes about itself, in a folder that may be a stranger's."""

import os
import subprocess
from pathlib import Path

import pytest
import torch

import checkpoint
import common
import journal
from common import UserError

CONFIG = common.load_config([])


def take_up(folder) -> None:
    journal.make_run_folder(CONFIG | {"output_dir": str(folder)}, {}, resuming=True)


WRITES = {
    "config.tmp": take_up,
    "launches.jsonl": take_up,
    "metrics.tmp": lambda folder: journal.MetricsLog(folder, CONFIG, 0),
    "wandb_id": journal.wandb_id,
    "trial.tmp": checkpoint.trial_seconds,
}


@pytest.mark.parametrize("name, write", WRITES.items(), ids=WRITES)
def test_a_link_in_a_run_folder_leads_no_run_that_goes_on_there_to_other_files(
    name, write, tmp_path
):
    run, diary = tmp_path / "run", tmp_path / "diary"
    run.mkdir()
    for there in (True, False):  # a link that leads nowhere would make the file
        if there:
            diary.write_text("mine")
        (run / name).unlink(missing_ok=True)
        (run / name).symlink_to(diary)
        with pytest.raises(UserError, match=r"symbolic link|could not be written"):
            write(run)
        assert diary.exists() == there
        if there:
            assert diary.read_text() == "mine"
            diary.unlink()


@pytest.mark.parametrize("read", [False, True])
@pytest.mark.parametrize("name, write", WRITES.items(), ids=WRITES)
def test_a_pipe_in_a_run_folder_stops_a_run_that_goes_on_there_instead_of_holding_it(
    name, write, read, tmp_path
):
    run = tmp_path / "run"
    run.mkdir()
    os.mkfifo(run / name)
    reader = os.open(run / name, os.O_RDONLY | os.O_NONBLOCK) if read else None
    with pytest.raises(UserError, match=r"is not a regular file|could not be written"):
        write(run)
    if read:
        os.close(reader)


@pytest.mark.parametrize(
    "name",
    [
        "curves.png",
        "evaluations",
        "rollouts",
        "rollouts/step_000009.jsonl",
        "reward_failures.rank_0.jsonl",
        "wandb",
    ],
)
def test_a_run_does_not_go_on_where_a_link_would_lead_it_out_of_its_folder(name, tmp_path):
    run, theirs = tmp_path / "run", tmp_path / "theirs"
    theirs.mkdir()
    c = CONFIG | {"output_dir": str(run)}
    take_up(run)
    journal.check_run_folder(c, resuming=True)
    (run / name).parent.mkdir(exist_ok=True)
    (run / name).symlink_to(theirs)
    with pytest.raises(UserError, match=f"{name}' is a symbolic link"):
        journal.check_run_folder(c, resuming=True)


def test_a_config_is_whole_or_absent(tmp_path, monkeypatch):
    def killed(self, target) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "rename", killed)
    with pytest.raises(KeyboardInterrupt):
        take_up(tmp_path)
    assert not (tmp_path / "config.json").exists()
    monkeypatch.undo()
    journal.check_run_folder(CONFIG | {"output_dir": str(tmp_path)}, resuming=False)


def test_a_file_of_metrics_that_is_a_device_is_not_read(tmp_path):
    (tmp_path / "metrics.jsonl").symlink_to("/dev/zero")
    assert journal.read_metrics(tmp_path / "metrics.jsonl") == ([], "")


def test_a_config_that_is_a_link_becomes_a_file_of_the_runs_own(tmp_path):
    run, diary = tmp_path / "run", tmp_path / "diary"
    run.mkdir()
    diary.write_text("mine")
    (run / "config.json").symlink_to(diary)
    take_up(run)
    assert diary.read_text() == "mine" and not (run / "config.json").is_symlink()


def test_metrics_that_are_a_link_become_a_file_of_the_runs_own(tmp_path):
    run, theirs = tmp_path / "run", tmp_path / "metrics.jsonl"
    run.mkdir()
    theirs.write_text('{"step": 1}\n')
    (run / "metrics.jsonl").symlink_to(theirs)
    log = journal.MetricsLog(run, CONFIG, 1)
    log.write(2, {"reward": 1.0})
    log.close()
    assert theirs.read_text() == '{"step": 1}\n'
    rows, _ = journal.read_metrics(run / "metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2]


@pytest.mark.parametrize("value", [torch.tensor(0.5), None, "0.5"], ids=repr)
def test_a_metric_that_is_no_number_is_named(tmp_path, value):
    log = journal.MetricsLog(tmp_path, CONFIG, 0)
    with pytest.raises(UserError, match=r"the metric 'mine/gap' of step 3 is .*, not a number"):
        log.write(3, {"reward": 1.0, "mine/gap": value})
    log.close()


def test_no_metric_takes_the_place_of_the_number_of_its_step(tmp_path):
    log = journal.MetricsLog(tmp_path, CONFIG, 0)
    with pytest.raises(UserError, match="can't be called 'step'"):
        log.write(3, {"reward": 1.0, "step": 0.25})
    log.close()


def test_tokens_a_second_are_those_of_a_step_without_its_evaluation_and_checkpoint(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(journal.time, "perf_counter", lambda: now[0])
    timer = journal.Timer()
    for phase, seconds in (("learn", 2), ("checkpoint", 8), ("evaluate", 16), ("rollout", 3)):
        with timer(phase):
            now[0] += seconds
    assert timer.take(tokens=10)["tokens_per_second"] == 2.0


def test_a_phase_that_fails_has_taken_its_time_all_the_same(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(journal.time, "perf_counter", lambda: now[0])
    timer = journal.Timer()
    with pytest.raises(OSError):
        with timer("evaluate"):
            now[0] += 5
            raise OSError
    assert timer.take()["time/evaluate"] == 5.0


class Run:
    """In place of one at Weights & Biases."""

    def __init__(self, **settings):
        self.settings = settings
        self.logged = []

    def log(self, metrics, step):
        self.logged.append((step, metrics))

    def finish(self):
        pass


def test_weights_and_biases_gets_every_metric_under_its_step_and_goes_on_with_the_run(
    tmp_path, monkeypatch
):
    monkeypatch.setattr("wandb.init", Run)
    log = journal.MetricsLog(tmp_path, CONFIG | {"report_to": "wandb"}, 0)
    log.write(0, {"eval/mean@8": 0.5})
    log.write(1, {"reward": 1.0})
    log.close()
    assert log.wandb.logged == [(0, {"eval/mean@8": 0.5}), (1, {"reward": 1.0})]
    assert log.wandb.settings["resume"] == "allow"
    assert log.wandb.settings["id"] == (tmp_path / "wandb_id").read_text()


def make_checkout(folder) -> None:
    git = ["git", "-C", str(folder), "-c", "user.name=me", "-c", "user.email=me@x"]
    (folder / "train.py").write_text("1")
    for words in (["init", "-q"], ["add", "."], ["commit", "-qm", "first"]):
        subprocess.run([*git, *words], check=True)


def test_a_run_of_changed_code_does_not_name_a_clean_commit(tmp_path, monkeypatch):
    make_checkout(tmp_path)
    monkeypatch.setattr(journal, "ROOT", tmp_path)
    clean = journal.git_commit()
    assert clean and "dirty" not in clean
    (tmp_path / "train.py").write_text("2")
    assert journal.git_commit() == f"{clean}-dirty"


def test_a_checkout_of_another_user_has_a_commit(tmp_path, monkeypatch):
    make_checkout(tmp_path)
    monkeypatch.setattr(journal, "ROOT", tmp_path)
    own = journal.git_commit()
    monkeypatch.setenv("GIT_TEST_ASSUME_DIFFERENT_OWNER", "1")  # git's own, for its tests
    assert own and journal.git_commit() == own


def test_a_git_that_hangs_does_not_hold_up_a_run(tmp_path, monkeypatch):
    git = tmp_path / "git"
    git.write_text("#!/bin/sh\nexec sleep 60\n")
    git.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(journal, "GIT_SECONDS", 0.2)
    assert journal.git_commit() == "unknown: git gave no answer in 0.2 seconds"


@pytest.mark.parametrize("name", ["weights", "wandb"])
def test_a_folder_of_a_run_that_ended_before_its_first_step_is_free(name, tmp_path):
    take_up(tmp_path)
    (tmp_path / name).mkdir()
    journal.check_run_folder(CONFIG | {"output_dir": str(tmp_path)}, resuming=False)


def test_a_folder_of_a_run_that_was_killed_while_it_converted_shards_is_free(tmp_path):
    (tmp_path / journal.CONVERTED / "engine").mkdir(parents=True)
    c = CONFIG | {"output_dir": str(tmp_path)}
    with journal.hold_folder(tmp_path):
        journal.check_run_folder(c, resuming=False)
        journal.make_run_folder(c, {}, resuming=False)
    checkpoint.tidy(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"config.json", "launches.jsonl"}


def test_a_step_is_evaluated_once_its_evaluation_is_written_not_its_own_line(tmp_path):
    lines = '{"step": 1, "reward": 1.0, "eval/mine": 2.0}\n{"step": 2, "reward": 1.0}\n'
    (tmp_path / "metrics.jsonl").write_text(lines + '{"step": 2, "eval/mean@8": 0.5}\n')
    assert [journal.has_evaluation(tmp_path, step) for step in (1, 2, 3)] == [False, True, False]


def test_a_rewind_removes_what_came_after_its_step_and_leaves_what_is_somebodys_own(tmp_path):
    for name in ("rollouts/step_{}.rank_0.jsonl", "evaluations/step_{}.jsonl"):
        for step in ("000100", "000300", "by_step"):
            path = tmp_path / name.format(step)
            path.parent.mkdir(exist_ok=True)
            path.touch()
    jobs = "job_step_000300.json", "job_step_000300.jsonl", "job_step_000300.abandoned.json"
    for name in jobs:  # of slurm/evaluate.sh
        (tmp_path / "evaluations" / name).touch()
    journal.rewind(tmp_path, 100)
    left = {str(path.relative_to(tmp_path)) for path in tmp_path.glob("*/*")}
    assert left == {
        "rollouts/step_000100.rank_0.jsonl",
        "rollouts/step_by_step.rank_0.jsonl",
        "evaluations/step_000100.jsonl",
        "evaluations/step_by_step.jsonl",
        "evaluations/job_step_000300.abandoned.json",
    }
