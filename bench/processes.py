"""Runs commands that must end in time and leave nothing behind."""

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
    """Runs a command for at most `limit` seconds; then it is killed, and its returncode is None.
    Whatever it has started ends with it (see kill_all()), also if we are told to end meanwhile."""
    with signals_noted() as heard, text_file() as out, text_file() as err:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            start_new_session=True,  # so all that is in it was started by this command
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
    """Yields a list that collects the signals that ask this process to end. Meanwhile they do
    nothing else; the first one is sent again at the end."""
    before = {number: signal.getsignal(number) for number in SIGNALS}
    heard = []
    # a handler that ended us at once would leave behind a process that has just started
    listen(lambda number, frame: heard.append(number))
    try:
        yield heard
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if heard:
            signal.raise_signal(heard[0])


def text_file():
    """A file for a process's output. Not a pipe: a full one would stop the process, and one that a
    leftover process holds open never ends."""
    return tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")


def text_in(file) -> str:
    file.seek(0)
    return file.read()


def kill_all(process: subprocess.Popen) -> None:
    """Ends a process that leads a session, everything in the session, and all its descendants, such
    as a run of train.py that holds a GPU's memory."""
    # Ranks of torchrun are in sessions of their own. They are looked up first, because only a
    # living parent leads to them. If it has ended by itself, they are not found, and end as it did
    pids = descendants(process.pid)
    with suppress(ProcessLookupError):  # nothing is left
        os.killpg(process.pid, signal.SIGKILL)
    for pid in pids:
        kill(pid)
    process.wait()
