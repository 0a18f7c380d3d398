"""Work in a child process that may hang, be killed or spoil itself: child.start(function,
argument, ...), then child.status(process).

It is forked from a server of multiprocessing's that has imported the tests and runs no Python
thread. A fork of pytest's own process would be as quick, but may inherit a lock that another
thread (a progress bar's, an HTTP server's) held at that instant, and then waits for it for ever.
"""

import multiprocessing
import os
import subprocess
import sys
from multiprocessing import forkserver
from pathlib import Path

import pytest
from deadlines import PATIENCE

context = multiprocessing.get_context("forkserver")
context.set_forkserver_preload(
    ["test_resume", "test_experience", "test_server_weights", "test_faults"]
)


def start(work, *args, log: Path | str = os.devnull) -> multiprocessing.Process:
    """A child that does work(*args), a function of a module with arguments that can be pickled;
    what it prints goes to `log`."""
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(
        sys.path
    )  # Python 3.11's server does not take over sys.path
    try:
        forkserver.ensure_running()
    finally:
        os.environ.pop("PYTHONPATH") if before is None else os.environ.update(PYTHONPATH=before)
    process = context.Process(target=logged, args=(work, args, str(log)), daemon=True)
    process.start()
    return process


def logged(work, args: tuple, log: str) -> None:
    with open(log, "ab", buffering=0) as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    work(*args)


def status(process: multiprocessing.Process, seconds: float = PATIENCE) -> int:
    """Its exit status, minus the signal that ended it. One that has not ended by itself in
    `seconds` is killed."""
    process.join(seconds)
    late = process.exitcode is None
    process.kill()
    process.join()
    assert not late, f"no end within {seconds} s"
    return process.exitcode


def ended_well(done: subprocess.CompletedProcess) -> None:
    """Asserts status 0, or shows the last words of the process or of its ranks: not torchrun's
    summary of them, which is longer than they are."""
    words = done.stderr.partition('Traceback (most recent call last):\n  File "<frozen runpy>"')[0]
    if done.returncode:
        pytest.fail(f"status {done.returncode}: {words[-3000:]}", pytrace=False)
