"""Weights & Biases: what is wrong there is said before anything is loaded or deleted, and a run
that has begun goes on without it. (A run whose service dies: test_faults.py.)"""

import os
import signal
import subprocess
import time
from pathlib import Path

import child
import pytest
from deadlines import PATIENCE
from exact_matrix import error_of, finish, log_of, start, steps_in
from fake_wandb import WANDB

import common
import journal
from common import UserError

CONFIG = common.load_config([])
NOWHERE = {"WANDB_INIT_TIMEOUT": "1", "WANDB_BASE_URL": "http://127.0.0.1:9"}  # a closed port


def with_options(**options) -> dict:
    return CONFIG | {"report_to": "wandb", "wandb_options": options}


def log_to_wandb(folder: Path, project: str = "p", mode: str = "offline") -> journal.MetricsLog:
    return journal.MetricsLog(folder, with_options(project=project, mode=mode), 0)


def test_who_is_not_logged_in_is_told_before_anything_is_loaded_and_keeps_the_older_run(
    tiny_model_dir, tmp_path
):
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "metrics.jsonl").write_text("an older run's")
    flags = ["--report_to=wandb", "--overwrite_output_dir=True"]
    env = {"WANDB_API_KEY": "", "HOME": str(tmp_path)}  # no key in ~/.netrc either
    process = start(tiny_model_dir, folder, *flags, **env)
    assert finish(process) == 2, log_of(folder)[-3000:]
    error = error_of(folder)
    assert "report_to='wandb'" in error and "No API key" in error
    assert error.endswith("log in, or use --wandb_options.mode=offline")
    assert "world_size" not in log_of(folder)  # the ranks have not met yet
    assert (folder / "metrics.jsonl").read_text() == "an older run's"


@pytest.mark.parametrize("mode", ["offline", "online"])
def test_an_option_that_does_not_exist_is_found_before_anyone_logs_in(mode):
    with pytest.raises(UserError, match=r"'colour'.*correct wandb_options"):
        journal.check_wandb(with_options(colour="red", mode=mode))


def test_nobody_needs_to_log_in_for_a_run_that_stays_offline(monkeypatch):
    monkeypatch.setattr("wandb.login", None)
    journal.check_wandb(with_options(mode="offline"))


def test_the_mode_of_the_environment_holds_unless_the_config_names_one(monkeypatch):
    """As WANDB_MODE=offline on a cluster, or "disabled" of somebody who uploads nothing."""
    for mode in ("offline", "disabled"):
        monkeypatch.setenv("WANDB_MODE", mode)
        assert journal.wandb_settings(with_options(project="p"))["mode"] == mode
        assert journal.wandb_settings(with_options(mode="online"))["mode"] == "online"
    logins = []
    monkeypatch.setattr("wandb.login", lambda: logins.append(1))
    journal.check_wandb(with_options(project="p"))
    assert not logins
    monkeypatch.delenv("WANDB_MODE")
    journal.check_wandb(with_options(project="p"))
    assert logins == [1]


def check_with_nobody(folder: Path) -> None:
    os.environ.update(WANDB | NOWHERE)
    common.script(lambda argv: journal.check_wandb(with_options(mode="online")))


def log_to_nobody(folder: Path) -> None:
    os.environ.update(WANDB | NOWHERE)
    common.script(lambda argv: log_to_wandb(folder, mode="online"))


@pytest.mark.parametrize("work", [check_with_nobody, log_to_nobody])
def test_weights_and_biases_out_of_reach_at_the_start_is_one_sentence_that_names_the_cure(
    work, tmp_path
):
    folder = tmp_path / "run"
    folder.mkdir()
    status = child.status(child.start(work, folder, log=Path(f"{folder}.log")))
    assert status == 2, log_of(folder)[-3000:]
    for word in ("report_to='wandb'", "127.0.0.1:9", "--wandb_options.mode=offline"):
        assert word in error_of(folder)


def log_to_a_project_that_can_not_be(folder: Path) -> None:
    os.environ.update(WANDB)
    common.script(lambda argv: log_to_wandb(folder, project="a/project"))


def test_a_project_that_can_not_be_is_not_told_to_go_offline_where_it_is(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    process = child.start(log_to_a_project_that_can_not_be, folder, log=Path(f"{folder}.log"))
    assert child.status(process) == 2, log_of(folder)[-3000:]
    error = error_of(folder)
    assert "a/project" in error and "correct wandb_options" in error
    assert "--wandb_options.mode=offline" not in error


def log_to_a_service_that_dies(folder: Path) -> None:
    log = log_to_wandb(folder)
    log.write(1, {"reward": 1.0})
    command = ["pgrep", "-P", str(os.getpid()), "wandb-core"]
    service = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE).stdout
    os.kill(int(service), signal.SIGKILL)
    for step in range(2, 20):
        log.write(step, {"reward": 1.0})
        time.sleep(0.05)
    log.close()


def test_a_service_of_weights_and_biases_that_is_killed_takes_nothing_with_it(tmp_path):
    log = tmp_path / "log"
    assert child.status(child.start(log_to_a_service_that_dies, tmp_path, log=log)) == 0
    assert len(steps_in(tmp_path)) == 19
    assert log.read_text().count("warning: Weights & Biases failed") == 1


def test_a_run_keeps_its_id_at_weights_and_biases_when_it_is_resumed(tmp_path):
    ids = []
    for name in ("run", "run", "other"):
        folder = tmp_path / name
        folder.mkdir(exist_ok=True)
        log = log_to_wandb(folder)
        assert log.wandb.id == (folder / "wandb_id").read_text()
        ids.append(log.wandb.id)
        log.close()
    assert ids[0] == ids[1] != ids[2]
