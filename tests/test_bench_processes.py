"""bench/processes.py: what must end in time does, with all that it has started, and so it does when
we are told to end. A check of bench.gpu is what is run, by a stand-in for Python."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from deadlines import PATIENCE
from exact_matrix import ROOT

from bench import gpu
from bench.processes import run_for
from workers import kill

TINY = gpu.Setting("cpu", "tiny")
EARLY = '{"what": "early", "good": true, "measured": "", "wanted": "", "seconds": 1.0}'
# a child in its own session, and one in another, as torchrun's ranks are
CHECK = f"""#!/bin/sh
echo 'finding {EARLY}'
sleep 500 &
echo $! >> pids
setsid sleep 500 &
echo $! >> pids
wait
"""


@pytest.fixture
def check(tmp_path):
    """(a stand-in for Python that starts two processes and waits for them, where their pids
    are)."""
    path = tmp_path / "python"
    pids = tmp_path / "pids"
    path.write_text(CHECK.replace("pids", str(pids)))
    path.chmod(0o755)
    yield path, pids
    for pid in pids_in(pids):
        kill(pid)


def pids_in(path: Path) -> list[int]:
    return list(map(int, path.read_text().split())) if path.exists() else []


def lives(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"  # zombie, dead


def all_end(pids: list[int]) -> bool:
    """Within a while: who is killed takes a moment."""
    end = time.monotonic() + 30
    while any(map(lives, pids)) and time.monotonic() < end:
        time.sleep(0.05)
    return not any(map(lives, pids))


def test_a_check_that_takes_too_long_ends_with_all_that_it_has_started(check, monkeypatch):
    path, pids = check
    monkeypatch.setattr(sys, "executable", str(path))
    rows = gpu.rows_of("driver", TINY, 5.0)
    assert [row["state"] for row in rows] == ["ok", "FAIL"]
    assert rows[1]["measured"] == "not done after 5 seconds"
    assert len(pids_in(pids)) == 2
    assert all_end(pids_in(pids))


def test_a_check_that_dies_ends_with_what_it_has_started(check, monkeypatch):
    path, pids = check
    path.write_text(path.read_text().replace("setsid ", "").replace("wait", "kill -9 $$"))
    monkeypatch.setattr(sys, "executable", str(path))
    rows = gpu.rows_of("driver", TINY, PATIENCE)  # not waited for: it is over
    assert [row["state"] for row in rows] == ["ok", "FAIL"]
    assert "stopped with status -9" in rows[1]["measured"]
    assert len(pids_in(pids)) == 2
    assert all_end(pids_in(pids))


CHECKS = """
import sys
from bench import gpu
from common import script
sys.executable = sys.argv[1]
script(lambda argv: gpu.rows_of("driver", gpu.Setting("cpu", "tiny"), 500))
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_told_to_end_we_leave_no_check_behind(check, number):
    path, pids = check
    command = [sys.executable, "-c", CHECKS, str(path)]
    process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)
    try:
        end = time.monotonic() + PATIENCE
        while len(pids_in(pids)) < 2 and process.poll() is None and time.monotonic() < end:
            time.sleep(0.05)
        os.kill(process.pid, number)
        process.wait(PATIENCE)
        assert len(pids_in(pids)) == 2
        assert all_end(pids_in(pids))
        assert process.returncode == 128 + number
        assert process.stderr.read() == f"error: stopped by {number.name}\n"
    finally:
        process.kill()
        process.wait()
        process.stderr.close()


def test_what_a_command_says_is_all_there_with_its_status():
    code = "import os; print('x' * 300_000, os.environ['A']); os.write(2, b'wrong \\xe4')"
    code += "; raise SystemExit(1)"
    before = signal.getsignal(signal.SIGTERM)
    done = run_for([sys.executable, "-c", code], PATIENCE, os.environ | {"A": "b"})
    assert done.returncode == 1
    assert done.stdout == "x" * 300_000 + " b\n"
    assert done.stderr == "wrong \ufffd"
    assert signal.getsignal(signal.SIGTERM) == before
