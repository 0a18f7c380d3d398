"""How a process is asked to end: signals from its first moment on, a closed terminal, a torchrun
that is gone. (That a run saves first: test_resume.py.)"""

import os
import pty
import signal
import subprocess
import sys
import time
from pathlib import Path

import child
import pytest
from deadlines import PATIENCE
from exact_matrix import ROOT

import common
from common import SIGNALS, Stop

# A shell's background job and nohup start a process deaf to some of them, and so may whoever
# started pytest
HEARING = f"""
import signal, sys
for number in {[int(number) for number in SIGNALS]}:
    signal.signal(number, signal.SIG_DFL)
sys.path.insert(0, {str(ROOT)!r})
"""

# As a library that loads: it takes its time, and what is raised meanwhile does not concern it
LOADS = """
import pathlib, time
from common import script
def load(argv):
    pathlib.Path("loading").touch()
    while True:
        try:
            time.sleep(0.05)
        except BaseException:
            pass
script(load)
"""

# As the loop of train.py: prints, hears, saves
TRAINS = """
import pathlib, time
from common import script
from common import Stop
def train(argv):
    stop = Stop(".", 0)
    pathlib.Path("training").touch()
    while not stop.asked():
        print("a step", flush=True)
        pathlib.Path("printed").touch()
        time.sleep(0.05)
    time.sleep(0.5)                 # the rest of the step, in which a second SIGHUP may come
    print("saving", flush=True)
    pathlib.Path("saved").touch()
script(train)
"""


def start(code: str, folder: Path, **kwargs) -> subprocess.Popen:
    return subprocess.Popen([sys.executable, "-c", code], cwd=folder, **kwargs)


def wait_for(path: Path, process: subprocess.Popen) -> None:
    end = time.monotonic() + PATIENCE
    while not path.exists():
        assert time.monotonic() < end and process.poll() is None
        time.sleep(0.01)


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_before_the_first_step_is_one_sentence_and_never_lost(number, tmp_path):
    process = start(HEARING + LOADS, tmp_path, stderr=subprocess.PIPE, text=True)
    wait_for(tmp_path / "loading", process)
    process.send_signal(number)
    _, words = process.communicate(timeout=PATIENCE)
    assert words == f"error: stopped by {number.name}\n" and process.returncode == 128 + number


def test_one_rank_speaks_for_all_and_torchrun_for_itself(tmp_path):
    """It sends SIGTERM to the others when one rank has failed, and that one has said why."""
    for environment in ({"RANK": "1"}, {"RANK": "0", "TORCHELASTIC_RUN_ID": "1"}):
        (tmp_path / "loading").unlink(missing_ok=True)
        env = os.environ | environment
        process = start(HEARING + LOADS, tmp_path, stderr=subprocess.PIPE, text=True, env=env)
        wait_for(tmp_path / "loading", process)
        process.terminate()
        assert process.communicate(timeout=PATIENCE)[1] == "" and process.returncode == 143


def test_nohup_is_respected(tmp_path):
    deaf = HEARING + "signal.signal(signal.SIGHUP, signal.SIG_IGN)\n"
    for code, there in ((LOADS, "loading"), (TRAINS, "training")):
        process = start(deaf + code, tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        wait_for(tmp_path / there, process)
        for _ in range(3):
            process.send_signal(signal.SIGHUP)
        process.send_signal(signal.SIGINT)
        assert process.wait(PATIENCE) == (130 if there == "loading" else 0)


def test_a_closed_terminal_ends_a_run_after_a_save(tmp_path):
    """Nothing may be written to that terminal from then on. The shell sends the signal again."""
    pid, terminal = pty.fork()
    if not pid:
        os.chdir(tmp_path)
        os.execv(sys.executable, [sys.executable, "-c", HEARING + TRAINS])
    end = time.monotonic() + PATIENCE
    while not (tmp_path / "training").exists():
        assert time.monotonic() < end and os.waitpid(pid, os.WNOHANG) == (0, 0)
        time.sleep(0.01)
    os.close(terminal)
    os.kill(pid, signal.SIGHUP)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0 and (tmp_path / "saved").exists()


def test_what_is_printed_between_the_end_of_a_terminal_and_its_signal_is_dropped(tmp_path):
    """The kernel makes writing an error before it sends SIGHUP. Here it sends none: this terminal
    controls nobody."""
    ours, theirs = pty.openpty()
    streams = {"stdout": theirs, "stderr": theirs}
    process = start(HEARING + TRAINS, tmp_path, start_new_session=True, **streams)
    os.close(theirs)
    wait_for(tmp_path / "training", process)
    os.close(ours)
    for _ in range(2):  # the first may have been printed before
        (tmp_path / "printed").unlink(missing_ok=True)
        wait_for(tmp_path / "printed", process)
    process.terminate()
    assert process.wait(PATIENCE) == 0 and (tmp_path / "saved").exists()


@pytest.fixture
def own_handlers():
    """pytest's handlers of signals come back afterwards."""
    handlers = {number: signal.getsignal(number) for number in SIGNALS}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("own_handlers")
def test_the_first_signal_is_answered_at_once_by_rank_0_alone(tmp_path, capfd):
    Stop(tmp_path, 1).hear(signal.SIGINT, None)
    assert capfd.readouterr().err == ""
    Stop(tmp_path, 0).hear(signal.SIGINT, None)
    assert "SIGINT: the run saves and ends after this step" in capfd.readouterr().err


def listen(folder: Path) -> None:
    for number in SIGNALS:  # whoever started pytest may have made it deaf to some
        signal.signal(number, signal.SIG_DFL)
    stop = Stop(folder, 1)
    while True:
        (folder / ("heard" if stop.asked() else "ready")).touch()
        time.sleep(0.01)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_a_signal_is_heard_and_a_second_one_ends_the_process_at_once(number, tmp_path):
    process = child.start(listen, tmp_path)
    end = time.monotonic() + PATIENCE
    for name in ("ready", "heard"):
        while not (tmp_path / name).exists():
            assert time.monotonic() < end
            time.sleep(0.01)
        os.kill(process.pid, number)
    assert child.status(process) == 128 + number


@pytest.mark.usefixtures("own_handlers")
def test_a_signal_that_torchrun_passes_on_is_no_second_one(tmp_path, monkeypatch):
    """Slurm and systemd may send it to every process, and torchrun sends its ranks what it gets."""
    now, left = [100.0], []
    monkeypatch.setattr(common.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(os, "_exit", left.append)
    for launcher in ("TORCHELASTIC_RUN_ID", "NONE"):
        monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
        monkeypatch.setenv(launcher, "1")
        for waits, ended in ((0.0, launcher == "NONE"), (9.0, True)):
            stop = Stop(tmp_path, 1)
            stop.hear(signal.SIGTERM, None)
            now[0] += waits
            stop.hear(signal.SIGTERM, None)
            assert bool(left) == ended
            stop.hear(signal.SIGTERM, None)  # one more is the user's
            assert left and stop.asked()
            left.clear()


@pytest.mark.usefixtures("own_handlers")
def test_only_rank_0_looks_for_the_file(tmp_path):
    (tmp_path / "stop").touch()
    assert Stop(tmp_path, 0).asked()
    assert not Stop(tmp_path, 1).asked()
    assert not Stop(tmp_path / "other", 0).asked()


# --- torchrun

# As torchrun: starts a rank, and can't end it when it is killed itself
LAUNCHES = """
import subprocess, sys, time
rank = subprocess.Popen([sys.executable, "-c", sys.argv[1]], start_new_session=True)
time.sleep(600)
"""

# As a rank in the middle of a step: it looks at nothing, and says when nobody looks after it any
# more
WORKS = """
import os, pathlib, time
from common import script
def work(argv):
    parent = os.getppid()
    pathlib.Path("pid").write_text(str(os.getpid()))
    pathlib.Path("working").touch()
    while os.getppid() == parent:
        time.sleep(0.01)
    time.sleep(20 if "TORCHELASTIC_RUN_ID" in os.environ else 3)
    pathlib.Path("orphan").touch()
script(work)
"""


def killed_launcher(folder: Path, **environment) -> str:
    """The words of a rank whose launcher was killed, when it has ended."""
    known = {k: v for k, v in os.environ.items() if k not in ("RANK", "TORCHELASTIC_RUN_ID")}
    read, write = os.pipe()
    process = subprocess.Popen(
        [sys.executable, "-c", LAUNCHES, HEARING + WORKS],
        cwd=folder,
        stderr=write,
        env=known | environment,
    )
    os.close(write)
    wait_for(folder / "working", process)
    process.kill()
    process.wait()
    with open(read) as words:  # its end is the rank's end
        return words.read()


def test_a_rank_ends_with_its_torchrun_in_the_middle_of_a_step(tmp_path):
    words = killed_launcher(tmp_path, TORCHELASTIC_RUN_ID="1", RANK="0", LOCAL_RANK="0")
    assert not (tmp_path / "orphan").exists()
    assert words.startswith("error: torchrun (process ") and words.count("\n") == 1


def test_without_torchrun_a_run_outlives_the_shell_that_has_started_it(tmp_path):
    assert killed_launcher(tmp_path) == "" and (tmp_path / "orphan").exists()
