"""Commands that must end in time, and leave nothing behind."""

import os
import signal
import subprocess
import tempfile
import time
from contextlib import contextmanager, suppress

from common import ROOT, SIGNALS, listen
from workers import descendants, kill


def run_for(
    command: list[str], limit: float, env: dict | None = None
) -> subprocess.CompletedProcess:
    """Runs a command for `limit` seconds at most; then it is killed, and its returncode is None.
    What it has started ends with it, see kill_all(), also when we are told to end meanwhile."""
    with signals_noted() as heard, text_file() as out, text_file() as err:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            start_new_session=True,  # all that is in it has been started by this command
        )
        try:
            end = time.monotonic() + limit
            while process.poll() is None and not heard and time.monotonic() < end:
                time.sleep(0.1)
            status = process.poll()
        finally:
            kill_all(process)
        return subprocess.CompletedProcess(command, status, text_in(out), text_in(err))


@contextmanager
def signals_noted():
    """A list of the signals that ask this process to end. They do nothing else meanwhile; the first
    one is sent again at the end."""
    before = {number: signal.getsignal(number) for number in SIGNALS}
    heard = []
    # a handler that ended us at once would leave behind what has just been started
    listen(lambda number, frame: heard.append(number))
    try:
        yield heard
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if heard:
            signal.raise_signal(heard[0])


def text_file():
    """For what a process says. Not a pipe: a full one would stop it, and one that a process left
    behind holds open has no end."""
    return tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")


def text_in(file) -> str:
    file.seek(0)
    return file.read()


def kill_all(process: subprocess.Popen) -> None:
    """Ends a process that leads a session, all that is in the session, and all of its descendants:
    a run of train.py, say, which holds a GPU's memory."""
    # Ranks of torchrun are in sessions of their own: looked up first, for only a living parent
    # leads to them. If it has ended by itself they are not found, and end as it did
    pids = descendants(process.pid)
    with suppress(ProcessLookupError):  # none is left
        os.killpg(process.pid, signal.SIGKILL)
    for pid in pids:
        kill(pid)
    process.wait()
