"""A run folder belongs to one run at a time, however the runs are started and however they end."""

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import child
import pytest
from deadlines import PATIENCE
from exact_matrix import ROOT

import common
import journal
import sft
import train
from common import UserError

CONFIG = common.load_config([])


def hold(folder: Path, said: Path) -> None:
    """A run that holds its folder, and has started a process and forked another, until it is
    killed."""
    with journal.hold_folder(folder):
        started = subprocess.Popen(["sleep", "600"], close_fds=False)
        source, sink = os.pipe()
        forked = os.fork()
        if not forked:
            os.write(sink, b".")
            time.sleep(600)
        os.read(source, 1)  # it runs, and has closed its copy of the lock
        said.write_text(f"{started.pid} {forked}")
        time.sleep(600)


def wait_for(path: Path, process=None) -> None:
    end = time.monotonic() + PATIENCE
    while not path.exists():
        assert time.monotonic() < end and (process is None or process.exitcode is None)
        time.sleep(0.01)


@pytest.fixture
def holder(tmp_path):
    """(process, folder) of a run that holds its folder."""
    folder, said = tmp_path / "run", tmp_path / "said"
    process = child.start(hold, folder, said)
    wait_for(said, process)
    while not said.read_text():
        time.sleep(0.01)
    yield process, folder
    process.kill()
    process.join()
    for pid in said.read_text().split():
        os.kill(int(pid), 9)


def test_a_folder_that_is_held_is_refused_by_pid_and_host_until_its_holder_is_killed(holder):
    """Also when what the holder has started and forked lives on: workers, servers, eval_command."""
    process, folder = holder
    name = f"process {process.pid} on {socket.gethostname()}"
    with pytest.raises(UserError, match=f"{folder}.* is in use by {name}.*--output_dir"):
        with journal.hold_folder(folder):
            pass
    with journal.hold_folder(folder, rank=1):
        pass  # rank 0 holds it for all
    process.kill()
    process.join()
    with journal.hold_folder(folder):
        # and of the one before no name is left
        said = f"process {os.getpid()} on {socket.gethostname()}\n"
        assert (folder / ".lock").read_text() == said


@pytest.mark.parametrize(
    "flag", ["--resume_from_checkpoint=latest", "--overwrite_output_dir=True", "--max_steps=9"]
)
def test_train_leaves_the_folder_of_a_living_run_alone(flag, holder, tiny_model_dir, tmp_path):
    process, folder = holder
    for name in ("config.json", "metrics.jsonl"):
        (folder / name).write_text("the living run's")
    config = str(ROOT / "config" / "countdown_tiny.py")
    words = [config, f"--model={tiny_model_dir}", f"--output_dir={folder}", flag]
    assert child.status(child.start(run, train.main, *words, log=tmp_path / "log")) == 2
    assert f"is in use by process {process.pid} on " in (tmp_path / "log").read_text()
    assert {path.name for path in folder.iterdir()} == {".lock", "config.json", "metrics.jsonl"}
    assert (folder / "metrics.jsonl").read_text() == "the living run's"


def test_a_warm_start_does_so_too(holder, tmp_path):
    process, folder = holder
    config = str(ROOT / "config" / "countdown_tiny.py")
    words = [config, "--model=tiny", f"--output_dir={folder}"]
    assert child.status(child.start(run, sft.main, *words, log=tmp_path / "log")) == 2
    assert f"is in use by process {process.pid} on " in (tmp_path / "log").read_text()


def test_what_other_ranks_try_a_folder_with_does_not_make_it_used(tmp_path):
    """On a file system without files that have no name, such as NFS."""
    for name in (".writable-x1", ".nfs0001", "logs"):
        (tmp_path / name).touch()
    assert journal.is_empty(tmp_path)
    (tmp_path / "notes.txt").touch()
    assert not journal.is_empty(tmp_path)


def run(main, *argv: str) -> None:
    sys.argv = ["a script", *argv]
    common.script(main, common.load_config(argv))


def start_a_run(folder: Path, go: Path, said: Path) -> None:
    """As far as the folder is concerned: waits for `go`, then holds it, and ends with it held."""
    wait_for(go)
    with journal.hold_folder(folder):
        journal.check_run_folder(CONFIG | {"output_dir": str(folder)}, resuming=False)
        journal.make_run_folder({"output_dir": str(folder)}, {"pid": os.getpid()}, False)
        said.write_text("began")
        wait_for(go.with_name("end"))


def test_of_runs_that_start_at_the_same_time_in_one_folder_one_begins(tmp_path):
    folder, go = tmp_path / "run", tmp_path / "go"
    said = [tmp_path / f"said_{i}" for i in range(6)]
    runs = [child.start(start_a_run, folder, go, path) for path in said]
    go.touch()
    end = time.monotonic() + PATIENCE
    while sum(run.exitcode is None for run in runs) > 1:  # the others have been refused
        assert time.monotonic() < end
        time.sleep(0.01)
    (tmp_path / "end").touch()
    assert sorted(child.status(run) for run in runs) == [0, 1, 1, 1, 1, 1]
    assert sum(path.exists() for path in said) == 1
    assert len((folder / "launches.jsonl").read_text().splitlines()) == 1


@pytest.mark.parametrize("resuming", [True, False])
def test_a_stop_that_is_asked_for_while_a_run_starts_is_heard_and_an_earlier_runs_is_not(
    resuming, tmp_path
):
    names = {"stop", "done", "metrics.jsonl"}
    for name in names:
        (tmp_path / name).touch()
    c = {"output_dir": str(tmp_path)}
    with journal.hold_folder(tmp_path):
        journal.make_run_folder(c, {}, resuming)
        left = {path.name for path in tmp_path.iterdir()} & names
        assert left == ({"metrics.jsonl"} if resuming else set())
        held = (tmp_path / ".lock").stat().st_mtime_ns
        (tmp_path / "stop").touch()
        os.utime(tmp_path / "stop", ns=(held + 1, held + 1))  # some disks have coarse clocks
        journal.make_run_folder(c, {}, resuming)
        assert (tmp_path / "stop").exists()


def test_a_run_that_overwrites_an_earlier_one_holds_the_folder_all_the_while(tmp_path):
    folder = tmp_path / "run"
    c = CONFIG | {"output_dir": str(folder), "overwrite_output_dir": True}
    (folder / "logs").mkdir(parents=True)
    (folder / "metrics.jsonl").write_text('{"step": 1}\n')
    with journal.hold_folder(folder):
        journal.check_run_folder(c, resuming=False)
        journal.make_run_folder(c, {}, resuming=False)
        assert {p.name for p in folder.iterdir()} == {
            ".lock",
            "config.json",
            "launches.jsonl",
            "logs",
        }
        with pytest.raises(UserError, match="is in use"):
            with journal.hold_folder(folder):
                pass
    assert not (folder / ".lock").exists()


def test_what_ends_before_it_has_written_anything_leaves_no_folder(tmp_path):
    with pytest.raises(UserError, match="no data"):
        with journal.hold_folder(tmp_path / "runs" / "new"):
            raise UserError("no data")
    assert not (tmp_path / "runs" / "new").exists()
    (tmp_path / "mine").mkdir()
    with journal.hold_folder(tmp_path / "mine"):
        pass
    assert (tmp_path / "mine").exists()  # it was there before


def test_a_folder_that_was_moved_away_takes_its_lock_along(tmp_path):
    """And its run, when it ends, leaves the lock of the next one alone."""
    with journal.hold_folder(tmp_path / "run"):
        (tmp_path / "run").rename(tmp_path / "moved")
        second = journal.hold_folder(tmp_path / "run")
        second.__enter__()
    assert (tmp_path / "run" / ".lock").exists()
    with pytest.raises(UserError, match="is in use"):
        with journal.hold_folder(tmp_path / "run"):
            pass
    second.__exit__(None, None, None)


def test_a_lock_that_its_holder_deletes_while_we_take_it_is_none(tmp_path, monkeypatch):
    """We have locked a file that nobody finds any more: another one is made."""
    real, gone = journal.try_lock, []

    def try_lock(lock) -> bool:
        if not gone:
            gone.append((tmp_path / ".lock").unlink())
        return real(lock)

    monkeypatch.setattr(journal, "try_lock", try_lock)
    with journal.hold_folder(tmp_path):
        with pytest.raises(UserError, match="is in use"):
            with journal.hold_folder(tmp_path):
                pass


def test_every_launch_of_a_run_has_a_line(tmp_path):
    for i in range(3):
        journal.make_run_folder({"output_dir": str(tmp_path)}, {"launch": i}, resuming=i > 0)
    lines = (tmp_path / "launches.jsonl").read_text().splitlines()
    assert lines == [f'{{"launch": {i}}}' for i in range(3)]


def test_a_lock_that_is_a_link_does_not_lead_us_to_other_files(tmp_path):
    (tmp_path / "theirs").mkdir()
    (tmp_path / "diary").write_text("mine")
    (tmp_path / "theirs" / ".lock").symlink_to(tmp_path / "diary")
    with pytest.raises(UserError, match="can't be written to"):
        with journal.hold_folder(tmp_path / "theirs"):
            pass
    assert (tmp_path / "diary").read_text() == "mine"


def test_a_file_system_without_locks_is_a_warning(tmp_path, monkeypatch, capsys):
    """A stand-in for Lustre mounted without `flock`."""

    def flock(file, how):
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(journal.fcntl, "flock", flock)
    with journal.hold_folder(tmp_path / "run"):
        assert "warning: " in capsys.readouterr().out
