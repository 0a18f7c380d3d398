"""Processes for work that may hang, crash or eat the memory, because a model wrote its input.

    pool = Pool(count=2, timeout=5.0, memory_gib=2.0, setup=("countdown",))
    pool.ask({key: (name, text, row)})          # starts the work, doesn't wait
    pool.answers({key: (name, text, row)})      # {key: number, text, None or Failure}

Every job ends within `timeout`. `python workers.py <socket> <parent>` is two processes:

    the worker   computes: no torch, no GPU, no process group, so that killing it harms nobody
    its keeper   waits until the worker ends, the trainer is gone, or the trainer asks for the end;
                 then kills all that has come of the worker, whatever session it hides in

The worker gets jobs as pickles and answers in lines of JSON, which is all that is believed of it.
One that gives no answer for `timeout` seconds, or dies, loses the job it was at; another one takes
its place and the rest of its jobs. What it prints is printed by its keeper, quoted. Nothing here
waits for another rank.

A worker's environment is its own: ENVIRONMENT and what begins with one of PREFIXES. Tokens and keys
of the run (HF_TOKEN, WANDB_API_KEY, ...) are not in it. A reward that needs a key of its own gets
it under a name that begins with REWARD_. This is no sandbox: a reward may read what you may read.
"""

import ctypes
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
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from common import RunStopped, UserError, quoted

START_SECONDS = 120  # to import what the jobs need, on a machine that is busy loading models
END_SECONDS = 10  # for a keeper to end all that came of its worker; it takes milliseconds
LONGEST_LINE = 20_000
CLOSED, SAID_TOO_MUCH = "closed its socket", "sent a malformed reply"
LINES_SHOWN = 1000  # of what a worker prints

ENVIRONMENT = (
    "PATH",
    "HOME",
    "USER",
    "LANG",
    "TZ",
    "TMPDIR",
    "LD_LIBRARY_PATH",
    "VIRTUAL_ENV",
    "CONDA_PREFIX",
    "HF_HOME",  # where models and datasets lie, for a reward that needs a tokenizer
    "HF_HUB_CACHE",
    "HF_HUB_OFFLINE",
)
PREFIXES = ("LC_", "PYTHON", "REWARD_")


def own_environment() -> dict:
    """What of our environment a reward gets to see."""
    kept = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    for name, value in os.environ.items():
        if name in ENVIRONMENT or name.startswith(PREFIXES):
            kept[name] = value
    return kept


class Failure(NamedTuple):
    """What became of a job without an answer. kind: "timeout" or "error"."""

    kind: str
    reason: str


# --- in the training process


class Worker:
    """One process, its keeper, and the jobs that it has not answered yet, oldest first."""

    def __init__(self, hello: tuple):
        self.socket, theirs = socket.socketpair()
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, __file__, str(theirs.fileno()), str(os.getpid())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env=own_environment(),
                start_new_session=True,  # Ctrl-C is not for it
            )
        self.jobs = deque()
        self.received = b""
        self.ready = False
        self.doing = ""  # what it is at before it is ready, if that is somebody's own code
        self.since = time.monotonic()
        self.answered = 0
        self.fault = ""  # why it can't go on
        self.socket.settimeout(START_SECONDS)
        self.send(hello)

    def send(self, message) -> None:
        self.socket.sendall(pickle.dumps(message))

    def kill(self) -> None:
        """Ends it and everything that it has started, and waits for that."""
        self.socket.close()
        self.process.terminate()  # its keeper kills the others, then goes
        try:
            self.process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:  # the keeper was stopped, by what it keeps
            for pid in [*descendants(self.process.pid), self.process.pid]:
                kill(pid)
            self.process.wait()

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
        self.worked = False  # whether any worker has ever become ready
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
            worker.answered += 1
            if not worker.ready:
                self.take_start(worker, message)
                continue
            key = worker.jobs.popleft()
            self.found[key] = believed(self.asked[key][0], message)
            worker.since = time.monotonic()

    def take_start(self, worker: Worker, message) -> None:
        """What a worker says until it is ready: what it is about to do, or that it can't."""
        match message:
            case "ready":
                worker.ready, worker.doing = True, ""
                worker.since = time.monotonic()
                self.worked, self.failed_starts = True, 0
            case ["importing", name]:
                worker.doing = f"when the module of {quoted(name)} was imported"
            case ["trying", name]:
                worker.doing = f"when {quoted(name)} was called for the first time"
            case ["refused", name, reason]:
                raise UserError(f"reward_funcs: {quoted(name)}: {quoted(reason, 300)}")
            case _:
                worker.fault = SAID_TOO_MUCH

    def cause_of_death(self, worker: Worker) -> str:
        try:
            status = worker.process.wait(
                5 if worker.fault == CLOSED else 0
            )  # a dying process closes its socket first, and its keeper has to clear up after it
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
            self.count_failed_start(worker, reason)
        self.workers.remove(worker)
        self.selector.unregister(worker.socket)
        worker.kill()
        self.start()

    def count_failed_start(self, worker: Worker, reason: str) -> None:
        """Somebody's own code that fails before any worker is ready would fail again; later on it
        may be the machine that is too busy, or out of memory."""
        self.failed_starts += 1
        if worker.doing and not self.worked:
            raise UserError(
                f"reward_funcs: {reason} {worker.doing}; a module must do its work when it is called"
            )
        if self.failed_starts > 2 * len(self.workers):
            raise RunStopped(
                f"reward workers don't start: {reason} {worker.doing}; their own words are above"
            )

    def close(self) -> None:
        for worker in self.workers:
            worker.process.terminate()  # all at once
        for worker in self.workers:
            worker.kill()
        self.workers = []
        self.selector.close()


def believed(name: str, message):
    """A worker's answer to a job, as far as it can be one: the value, or a Failure."""
    if isinstance(message, dict) and set(message) == {"error"}:
        return Failure("error", quoted(message["error"]))
    if name == "mode":
        fits = message is None or isinstance(message, str)
    else:
        fits = type(message) in (int, float) and abs(message) < 1e38  # and no NaN
    return message if fits else Failure("error", f"the worker {SAID_TOO_MUCH}")


# --- in a keeper


def end_with_parent(parent: int, number: int) -> None:
    """This process gets the signal `number` when its parent dies, however it dies."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, number)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:  # it was gone before that
        os._exit(0)


def adopt_orphans() -> None:
    """What comes of our worker and loses its parent becomes our child, not init's."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(36, 1)  # PR_SET_CHILD_SUBREAPER


def kill(pid: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.kill(pid, signal.SIGKILL)


def descendants(ancestor: int) -> list[int]:
    """The living processes that have come of `ancestor`, according to /proc."""
    children = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            # "pid (name) state parent ..."; a name may hold anything
            state, parent = (folder / "stat").read_bytes().rpartition(b")")[2].split()[:2]
        except OSError:  # it has ended meanwhile
            continue
        if state not in (b"Z", b"X"):
            children.setdefault(int(parent), []).append(int(folder.name))
    found = []
    ahead = [ancestor]
    while ahead:
        own = children.get(ahead.pop(), [])
        found += own
        ahead += own
    return found


def reap(worker: int) -> int | None:
    """Buries children that have ended; how the worker ended, None if it was not among them."""
    status = None
    with suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            if ended[0] == worker:
                status = os.waitstatus_to_exitcode(ended[1])
    return status


def keep(worker: int) -> int:
    """Waits until the worker has ended, or we are to end it. Then nothing of it is left."""
    status = None
    while status is None and signal.sigwait(KEEPER_SIGNALS) == signal.SIGCHLD:
        status = reap(worker)
    with suppress(ProcessLookupError):
        os.killpg(worker, signal.SIGKILL)  # all there is to do where there is no /proc
    late = time.monotonic() + END_SECONDS / 2
    while (left := descendants(os.getpid())) and time.monotonic() < late:
        for pid in left:  # while some are killed, others may be started
            kill(pid)
        time.sleep(0.005)
    reap(worker)
    return signal.SIGTERM if status is None else status


def show(output) -> None:
    """Prints what the worker and its children write. A line after NUL says what it imports."""
    module, shown = "", 0
    while line := output.readline(LONGEST_LINE):
        text = line.decode(errors="replace").rstrip("\n")
        if text.startswith("\0"):
            module = text[1:]
        elif text and shown <= LINES_SHOWN:
            shown += 1
            print_line(text if shown <= LINES_SHOWN else "(more is not shown)", module)


def print_line(text: str, module: str) -> None:
    who = "reward worker"
    if module:
        who = f"reward_funcs: the module of {quoted(module)} prints when it is imported"
    with suppress(OSError):  # nobody listens any more
        print(f"{who}: {quoted(text, 1000)}", file=sys.stderr, flush=True)


def leave_as(status: int) -> None:
    """Ends this process as the worker was ended: with a status, or by a signal (below 0)."""
    if status < 0 and -status not in (signal.SIGKILL, signal.SIGSTOP):
        signal.signal(-status, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {-status})
    if status < 0:
        os.kill(os.getpid(), -status)
    os._exit(abs(status))


KEEPER_SIGNALS = {signal.SIGTERM, signal.SIGCHLD}


def main(channel: int, parent: int) -> None:
    """The keeper, until it forks the worker; both end here."""
    signal.signal(signal.SIGCHLD, lambda *_: None)  # some may be ignored, then none would come
    before = signal.pthread_sigmask(signal.SIG_BLOCK, KEEPER_SIGNALS)
    end_with_parent(parent, signal.SIGTERM)
    adopt_orphans()
    no_core_dumps()
    source, sink = os.pipe()
    keeper = os.getpid()
    worker = os.fork()
    if not worker:
        os.close(source)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        return work(channel, keeper, sink)
    os.close(channel)  # the parent is to see when the worker has closed it
    os.close(sink)
    shower = threading.Thread(target=show, args=(os.fdopen(source, "rb"),), daemon=True)
    shower.start()
    status = keep(worker)
    shower.join(1.0)  # the last lines
    leave_as(status)


# --- in a worker process


def no_core_dumps() -> None:
    import resource

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def limit(memory_gib: float) -> None:
    """No more memory than now plus `memory_gib`."""
    import resource

    if sys.platform == "linux":
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        most, hard = used + int(memory_gib * 2**30), resource.getrlimit(resource.RLIMIT_AS)[1]
        resource.setrlimit(
            resource.RLIMIT_AS, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard)
        )


def answer(name: str, text: str, row: dict):
    """A JSON value: the reward as a finite number or a mode's key; {"error": sentence} for anything else."""
    import rewards

    try:
        if name == "mode":
            found = rewards.mode(text, **row)
            return (
                found
                if found is None or len(found) <= 1000
                else {"error": f"a mode of {len(found)} characters"}
            )
        value = float(rewards.resolve(name)(text, **row))
        return (
            value
            if abs(value) < 1e38
            else {"error": f"gave {value}; a reward must be finite, in float32 too"}
        )
    except (
        Exception,
        SystemExit,
    ) as error:  # whatever somebody's reward raises is counted against that reward
        return {"error": f"{type(error).__name__}: {error}"[:500]}


def announce(module: str) -> None:
    """Tells our keeper what is imported from here on; "" for nothing."""
    with suppress(AttributeError, OSError, ValueError):  # it may have closed or replaced its stdout
        sys.stdout.flush()
        os.write(1, f"\n\0{module}\n".encode())


def load(name: str, say) -> bool:
    """Imports the module of a reward; False if it can't be had, which is said."""
    import rewards

    if ":" in name:
        say(["importing", name])
        announce(name)
    try:
        rewards.resolve(name)
    except ValueError as error:
        say(["refused", name, str(error)[:500]])
        return False
    if ":" in name:
        announce("")
    return True


def serve(file) -> None:
    """Reads pickled lists of jobs from our own parent; says what it does until it is ready, then
    the answer to each job as it is done: [0, ["importing", ...]], [1, "ready"], [2, 0.5], ..."""

    def say(message) -> None:
        file.write(json.dumps([next(numbers), message]).encode() + b"\n")
        file.flush()

    numbers = itertools.count()
    sys.path[:], memory_gib, setup = pickle.load(file)
    for name in setup:
        if not load(name, say):
            return
    for name in setup:
        if ":" in name:
            say(["trying", name])
        # for its imports and first parse: whether it fits is not asked here
        answer(name, "\\boxed{1}", {"answer": "x"})
    limit(memory_gib)
    say("ready")
    while True:
        try:
            jobs = pickle.load(file)
        except EOFError:
            return
        for job in jobs:
            say(answer(*job))


def let_go(held: list[int]) -> None:
    """Closes them in the first process that is forked; in its own children the numbers are others'."""
    while held:
        os.close(held.pop())


def work(channel: int, keeper: int, output: int) -> None:
    """The worker."""
    os.setsid()  # a signal to its own group does not reach the keeper
    end_with_parent(keeper, signal.SIGKILL)  # it would not see its socket close while it hangs
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    sys.stdout.reconfigure(line_buffering=True)
    sys.setrecursionlimit(2000)
    # what a reward starts and leaves behind must not hold the socket: the parent would not see us die
    os.set_inheritable(channel, False)
    held = [channel]
    os.register_at_fork(after_in_child=functools.partial(let_go, held))
    try:
        with socket.socket(fileno=channel) as connection:
            serve(connection.makefile("rwb"))
    except OSError:
        pass  # the parent has gone, or a reward has forked and this is the copy


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
