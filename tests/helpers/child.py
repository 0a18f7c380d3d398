"""Work in a child process that may hang, be killed or spoil itself: child.start(function,
argument, ...), then child.status(process); child.start_ranks for several that meet.

It is forked from a server of multiprocessing's that has imported the tests and runs no Python
thread. A fork of pytest's own process would be as quick, but may inherit a lock that another
thread (a progress bar's, an HTTP server's) held at that instant, and then waits for it for ever.
"""

import functools
import itertools
import multiprocessing
import os
import socket
import subprocess
import sys
from multiprocessing import forkserver
from pathlib import Path

import pytest
from deadlines import PATIENCE

WORKER = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:])
PORTS = itertools.count(20_000 + 1000 * (WORKER % 10) + os.getpid() % 500)

context = multiprocessing.get_context("forkserver")
context.set_forkserver_preload(
    ["test_resume", "test_checkpoint", "test_experience", "test_server_weights", "test_faults"]
)


# that of before the first test: one that starts torch.distributed or vLLM in this process writes
# into it
ENVIRONMENT = dict(os.environ)


@functools.cache
def start_server() -> None:
    """Starts the server, whose environment all children have."""
    before = dict(os.environ)
    try:
        os.environ.clear()
        # Python 3.11's server does not take over sys.path
        os.environ.update(ENVIRONMENT, PYTHONPATH=os.pathsep.join(sys.path))
        forkserver.ensure_running()
    finally:
        os.environ.clear()
        os.environ.update(before)


def start(work, *args, log: Path | str = os.devnull) -> multiprocessing.Process:
    """A child that does work(*args), a function of a module with arguments that can be pickled;
    what it prints goes to `log`."""
    start_server()
    process = context.Process(target=logged, args=(work, args, str(log)), daemon=True)
    process.start()
    return process


def logged(work, args: tuple, log: str) -> None:
    with open(log, "ab", buffering=0) as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    work(*args)


def free_port() -> int:
    """Where nobody listens. Below those that a connection or a server that asks for any is given,
    and of another thousand in each of pytest's processes (from another one on in each suite):
    nobody takes it before it is used."""
    while True:
        port = next(PORTS)
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        return port


def start_ranks(size: int, work, *args, logs: list) -> list[multiprocessing.Process]:
    """Children that do work(*args), each as one rank of `size`; what rank i prints goes to
    logs[i]."""
    if size == 1:  # as without torchrun
        return [start(work, *args, log=logs[0])]
    meeting = {"WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    processes = []
    for rank, log in enumerate(logs):
        place = meeting | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        processes.append(start(as_rank, place, work, args, log=log))
    return processes


def as_rank(place: dict, work, args: tuple) -> None:
    os.environ.update(place)
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


def statuses(processes: list[multiprocessing.Process]) -> list[int]:
    return [status(process) for process in processes]


def ended_well(done: subprocess.CompletedProcess) -> None:
    """Asserts status 0, or shows the last words of the process or of its ranks: not torchrun's
    summary of them, which is longer than they are."""
    words = done.stderr.partition('Traceback (most recent call last):\n  File "<frozen runpy>"')[0]
    if done.returncode:
        pytest.fail(f"status {done.returncode}: {words[-3000:]}", pytrace=False)
