"""Processes for work that may hang, crash or eat the memory, because a model wrote its input.

    pool = Pool(count=2, timeout=5.0, memory_gib=2.0, setup=("countdown",))
    pool.ask({key: (name, text, row)})          # starts the work, doesn't wait
    pool.answers({key: (name, text, row)})      # {key: number, text, None or Failure}: every job ends within `timeout`

A worker is `python workers.py <socket> <parent>`: a fresh interpreter without torch, GPU or process group, so that killing it harms nobody. It gets
jobs as pickles and answers in lines of JSON, which is all that is believed of it. One that gives no answer for `timeout` seconds, or dies,
loses the job it was at; another one takes its place and the rest of its jobs. Nothing here waits for another rank.
"""

import functools
import itertools
import json
import os
import pickle
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from pathlib import Path
from typing import NamedTuple

START_SECONDS = 120  # to import what the jobs need, on a machine that is busy loading models
LONGEST_LINE = 20_000
CLOSED, SAID_TOO_MUCH = "closed its socket", "sent a malformed reply"


class Failure(NamedTuple):
    """What became of a job without an answer. kind: "timeout" or "error"."""

    kind: str
    reason: str


# --- in the training process


class Worker:
    """One process and the jobs that it has not answered yet, oldest first."""

    def __init__(self, hello: tuple):
        self.socket, theirs = socket.socketpair()
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, __file__, str(theirs.fileno()), str(os.getpid())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                start_new_session=True,
            )  # its own session: Ctrl-C is not for it
        self.jobs, self.received, self.ready, self.since, self.answered = (
            deque(),
            b"",
            False,
            time.monotonic(),
            0,
        )
        self.fault = ""  # why it can't go on
        self.socket.settimeout(START_SECONDS)
        self.send(hello)

    def send(self, message) -> None:
        self.socket.sendall(pickle.dumps(message))

    def kill(self) -> None:
        try:
            os.killpg(self.process.pid, signal.SIGKILL)  # with everything that it has started
        except ProcessLookupError:
            pass
        self.socket.close()

    def lines(self) -> list[bytes]:
        """Whole lines that have come in."""
        try:
            more = self.socket.recv(1 << 16)
        except ConnectionError:
            more = b""
        *whole, self.received = (self.received + more).split(b"\n")
        if not more or len(self.received) > LONGEST_LINE:
            self.fault = SAID_TOO_MUCH if more else CLOSED
        return whole


class Pool:
    def __init__(self, count: int, timeout: float, memory_gib: float, setup: tuple = ()):
        """`setup`: names of rewards that a worker loads before its first job's clock runs."""
        self.timeout, self.hello = timeout, (sys.path, memory_gib, setup)
        self.waiting, self.found, self.asked = (
            deque(),
            {},
            {},
        )  # keys to do; key -> answer; key -> job
        self.selector, self.failed_starts = selectors.DefaultSelector(), 0
        self.lock = (
            threading.RLock()
        )  # rollouts made ahead come with their jobs from a thread of their own
        self.workers = []
        for _ in range(count):
            self.start()

    def start(self) -> None:
        worker = Worker(self.hello)
        self.workers.append(worker)
        self.selector.register(worker.socket, selectors.EVENT_READ, worker)

    def ask(self, jobs: dict) -> None:
        """Queues jobs {key: (name, text, row)} that were not asked before, and sees to the workers without waiting."""
        with self.lock:
            new = {key: job for key, job in jobs.items() if key not in self.asked}
            self.asked |= new
            self.waiting.extend(new)
            self.attend(0)

    def answers(self, jobs: dict) -> dict:
        """{key: answer} of these jobs, each a number, a text, None or a Failure; everything asked so far is then forgotten."""
        self.ask(jobs)
        while any(key not in self.found for key in jobs):
            with self.lock:
                self.attend(0.1)
        with self.lock:
            found = {key: self.found[key] for key in jobs}
            if len(self.found) == len(self.asked):  # what else is under way may not be cut off
                self.asked, self.found = {}, {}
        return found

    def attend(self, seconds: float) -> None:
        """Hands out jobs, takes in answers, replaces workers that died or are late; waits at most `seconds` for something to happen."""
        for worker in self.workers:
            if worker.ready and not worker.jobs and self.waiting:
                self.hand_out(worker)
        now = time.monotonic()  # late is who had not answered by now; to bury others takes a while, in which answers come in
        for event, _ in self.selector.select(seconds):
            self.take_in(event.data)
        for worker in list(self.workers):
            if worker.fault:
                self.replace(worker, "error", f"the worker {self.cause_of_death(worker)}")
            elif (worker.jobs or not worker.ready) and now - worker.since > (
                self.timeout if worker.ready else START_SECONDS
            ):
                self.replace(
                    worker,
                    "timeout",
                    f"no answer in {self.timeout:g} s (reward_timeout)"
                    if worker.ready
                    else f"not ready in {START_SECONDS:g} s",
                )

    def hand_out(self, worker: Worker) -> None:
        # a few jobs at a time, so that no worker is left with a long queue at the end
        n = max(1, min(64, len(self.waiting) // (4 * len(self.workers))))
        worker.jobs = deque(self.waiting.popleft() for _ in range(min(n, len(self.waiting))))
        worker.since = time.monotonic()
        worker.socket.settimeout(self.timeout + 10)
        try:
            worker.send([self.asked[key] for key in worker.jobs])
        except OSError:  # it is gone or deaf: nothing was computed, so nobody is to blame
            self.waiting.extendleft(reversed(worker.jobs))
            worker.jobs, worker.fault = deque(), CLOSED

    def take_in(self, worker: Worker) -> None:
        for line in worker.lines():
            try:
                number, message = json.loads(line)
            except (ValueError, TypeError):
                number, message = None, None
            if number != worker.answered or (worker.ready and not worker.jobs):
                worker.fault = SAID_TOO_MUCH  # something else wrote into its socket: nothing more of it is believed
                return
            if worker.ready:
                self.found[worker.jobs.popleft()] = (
                    Failure("error", message["error"]) if isinstance(message, dict) else message
                )
            elif message != "ready":
                raise ValueError(message)
            else:
                worker.ready, self.failed_starts = True, 0
            worker.since, worker.answered = time.monotonic(), worker.answered + 1

    def cause_of_death(self, worker: Worker) -> str:
        try:
            status = worker.process.wait(
                1 if worker.fault == CLOSED else 0
            )  # a dying process closes its socket first
        except subprocess.TimeoutExpired:
            return worker.fault
        return (
            "died (" + (signal.strsignal(-status) if status < 0 else f"exit status {status}") + ")"
        )

    def replace(self, worker: Worker, kind: str, reason: str) -> None:
        """The job it was at is lost, the others go to the front of the queue."""
        if worker.jobs:
            self.found[worker.jobs.popleft()] = Failure(kind, reason)
            self.waiting.extendleft(reversed(worker.jobs))
        elif not worker.ready:
            self.failed_starts += 1
            if self.failed_starts > 2 * len(self.workers):
                raise RuntimeError(
                    f"reward workers don't start: {reason}; their own words are above"
                )
        self.workers.remove(worker)
        self.selector.unregister(worker.socket)
        worker.kill()
        worker.process.wait()
        self.start()

    def close(self) -> None:
        for worker in self.workers:
            worker.kill()
            worker.process.wait()
        self.workers = []
        self.selector.close()


# --- in a worker process


def die_with_parent(parent: int) -> None:
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(
            1, signal.SIGKILL
        )  # PR_SET_PDEATHSIG: a worker that hangs would not see its socket close
    if os.getppid() != parent:  # it was gone before that
        sys.exit()


def limit(memory_gib: float) -> None:
    """No more memory than now plus `memory_gib`."""
    import resource

    if sys.platform == "linux":
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        most, hard = used + int(memory_gib * 2**30), resource.getrlimit(resource.RLIMIT_AS)[1]
        resource.setrlimit(
            resource.RLIMIT_AS, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard)
        )
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def answer(name: str, text: str, row: dict):
    """A JSON value: the reward as a finite number or a mode's key; {"error": sentence} for anything else."""
    import graders

    try:
        if name == "mode":
            found = graders.mode(text, **row)
            return (
                found
                if found is None or len(found) <= 1000
                else {"error": f"a mode of {len(found)} characters"}
            )
        value = float(graders.resolve(name)(text, **row))
        return (
            value
            if abs(value) < 1e38
            else {"error": f"gave {value}; a reward must be finite, in float32 too"}
        )
    except (
        Exception,
        SystemExit,
    ) as error:  # whatever somebody's reward raises is counted against that reward
        return {"error": printable(f"{type(error).__name__}: {error}")}


def printable(text: str) -> str:
    """What may quote the model, for a console: no newline, no escape sequence, no half of a character."""
    return "".join(c if c.isprintable() else "?" for c in text[:300])


def serve(file) -> None:
    """Reads pickled lists of jobs from our own parent; says that it is ready, then the answer to each job as it is done: [0, "ready"], [1, ...], ..."""

    def say(message) -> None:
        file.write(json.dumps([next(numbers), message]).encode() + b"\n")
        file.flush()

    numbers = itertools.count()
    sys.path[:], memory_gib, setup = pickle.load(file)
    import graders

    try:
        for name in setup:
            graders.resolve(name)
    except ValueError as error:
        return say(printable(str(error)))
    for name in setup:
        answer(
            name, "\\boxed{1}", {"answer": "x"}
        )  # for its imports and first parse: whether it fits is not asked here
    limit(memory_gib)
    say("ready")
    while True:
        try:
            jobs = pickle.load(file)
        except EOFError:
            return
        for job in jobs:
            say(answer(*job))


if __name__ == "__main__":
    sys.setrecursionlimit(2000)
    die_with_parent(int(sys.argv[2]))
    try:
        with socket.socket(fileno=int(sys.argv[1])) as channel:
            channel.set_inheritable(
                False
            )  # or what a reward starts and leaves behind would keep it open, and the parent would not see us die
            os.register_at_fork(after_in_child=functools.partial(os.close, channel.fileno()))
            serve(channel.makefile("rwb"))
    except OSError:
        pass  # the parent has gone, or a reward has forked and this is the copy
