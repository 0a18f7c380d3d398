"""Processes for work that may hang, crash or eat the memory, because a model wrote its input.

    pool = Pool(count=2, timeout=5.0, memory_gib=2.0)
    pool.ask({key: (function, text, arguments)})        # starts the work, doesn't wait
    pool.collect({key: (function, text, arguments)})    # {key: number, text, None or Failure}

A job calls function(text, **arguments). A function is given as "module:function"; a worker imports
it before its first job with that function. Every job ends within `timeout`, not counting the
import; all jobs that are waited for together end within WAIT_SECONDS.
`python workers.py <socket> <parent>` becomes two processes:

    the worker   runs the jobs. It has no torch, no GPU and no process group, so that killing it
                 harms nobody
    its keeper   waits until the worker ends, the trainer dies, or the trainer sends END; then
                 kills the worker and all its descendants, even in sessions of their own

Neither reacts to the signals that ask a run to stop, which may be sent to all its processes at
once: the trainer still wants the rewards of its last step. The exception is SIGINT in a worker,
which interrupts the job that it is running.

The worker receives jobs as pickles and answers in lines of JSON; the trainer trusts nothing else
from it. A worker that gives no answer for `timeout` seconds, dies or runs out of memory loses the
job it was doing; a new worker replaces it and its other jobs go back into the queue. The keeper
prints what the worker prints, quoted. Nothing here waits for another rank.

A worker's environment holds only the variables in ENVIRONMENT and those that begin with one of
PREFIXES. The run's tokens and keys (HF_TOKEN, WANDB_API_KEY, ...) are not among them. A reward that
needs a key gets it in a variable whose name begins with REWARD_. This is no sandbox: a reward may
read every file that you may read.
"""

import ctypes
import functools
import importlib
import inspect
import itertools
import json
import math
import os
import pickle
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections import deque
from contextlib import suppress
from operator import attrgetter
from pathlib import Path
from typing import NamedTuple

from common import SIGNALS, RunStopped, UserError, listen, quoted

START_SECONDS = 120  # to import what a job needs, on a machine that is busy loading models
# for all jobs that collect() waits for. Other ranks wait meanwhile, up to common.DEADLINE
WAIT_SECONDS = 3600
END_SECONDS = 10  # for a keeper to kill its worker's descendants; it takes milliseconds
CHUNK = 64  # most jobs that a worker is given at a time
BIGGEST = 1e12  # rewards must be smaller, so that their weighted squares are finite in float32
LONGEST_TEXT = 1000  # characters of a text that a function may return
LONGEST_REASON = 200  # characters of an error message, without its file and line
LONGEST_REFUSAL = 300  # characters of the reason why a function can't be imported
LONGEST_LINE = 20_000  # a worker that sends more bytes without a newline is given up
SOUGHT = (  # where a user's function comes from
    "it is looked for beside train.py and in the folders of PYTHONPATH, by its name without .py "
    "and without a folder"
)
CLOSED = "closed its socket"
MALFORMED = "sent a malformed reply"
LINES_SHOWN = 100  # lines of a worker's output that are printed

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
    "HF_HOME",  # where models and datasets are, for a reward that needs a tokenizer
    "HF_HUB_CACHE",
    "HF_HUB_OFFLINE",
)
PREFIXES = ("LC_", "PYTHON", "REWARD_")


def own_environment() -> dict:
    """The part of our environment that a reward may see."""
    # the GPU and the other cores are for training
    kept = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    for name, value in os.environ.items():
        if name in ENVIRONMENT or name.startswith(PREFIXES):
            kept[name] = value
    return kept


class Failure(NamedTuple):
    """Why a job has no result. kind: "timeout" or "error"."""

    kind: str
    reason: str


# --- in the training process


class Worker:
    """A worker process with its keeper, as the trainer sees them: the socket, the keys of jobs not
    answered yet (oldest first), and what the worker said last. hello: sys.path, and the GiB that
    jobs may take; now: the time by the pool's clock."""

    def __init__(self, hello: tuple[list, float], now: float):
        self.socket, theirs = socket.socketpair()
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, __file__, str(theirs.fileno()), str(os.getpid())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env=own_environment(),
                start_new_session=True,  # Ctrl-C must not reach it
            )
        self.jobs = deque()
        self.functions = set()  # names it has imported, or was told to import
        self.received = b""  # the beginning of a line whose end has not come yet
        self.ready = False  # False while it starts or imports, True when it can run jobs
        self.loading = ""  # name of the function that it is importing
        self.doing = ""  # what it does with that function, as a clause for error messages
        self.since = now  # time of the last message to or from it
        self.answered = 0  # messages received from it
        self.fault = ""  # why it must be replaced
        self.socket.settimeout(START_SECONDS)
        try:
            self.send(hello)
        except OSError:  # it is gone already (out of memory, for example): attend() replaces it
            self.fault = CLOSED

    def send(self, message) -> None:
        self.socket.sendall(pickle.dumps(message))

    def kill(self) -> None:
        """Kills the worker and everything that it started, and waits until they are gone."""
        self.socket.close()
        self.process.send_signal(END)  # to the keeper: it kills the others, then exits
        try:
            self.process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:  # a reward sent the keeper a SIGSTOP
            for pid in [*descendants(self.process.pid), self.process.pid]:
                kill(pid)
            self.process.wait()

    def lines(self) -> list[bytes]:
        """The complete lines that have arrived. Sets `fault` if there will be no more."""
        try:
            received = self.socket.recv(1 << 16)
        except ConnectionError:
            received = b""
        # what follows the last newline is kept until its line is complete
        *whole, self.received = (self.received + received).split(b"\n")
        if not received or len(self.received) > LONGEST_LINE:
            self.fault = MALFORMED if received else CLOSED
        return whole


class Pool:
    """`count` workers, and the jobs that were asked for. Two threads use a pool: rollouts that are
    sampled ahead (rollout_ahead) call ask() in a thread of their own, and the main thread collects
    with collect()."""

    def __init__(self, count: int, timeout: float, memory_gib: float):
        self.timeout = timeout
        self.clock = time.monotonic  # decides when a job is late
        self.hello = (sys.path, memory_gib)
        self.asked = {}  # key: job
        self.waiting = deque()  # keys of jobs that are not with a worker
        self.results = {}  # {key: result}
        self.late = set()  # keys of jobs that have timed out
        self.loaded = set()  # names of functions that some worker has imported
        # {function: arguments of its first job}: every worker tries the function with these, since
        # it might hang with those of another job
        self.trial_arguments = {}
        self.failed_starts = 0  # since a worker was last ready with functions
        self.lock = threading.RLock()
        self.selector = selectors.DefaultSelector()
        self.workers = []
        for _ in range(count):
            self.start()

    def start(self) -> None:
        worker = Worker(self.hello, self.clock())
        self.workers.append(worker)
        self.selector.register(worker.socket, selectors.EVENT_READ, worker)

    def ask(self, jobs: dict) -> None:
        """Queues the jobs {key: (function, text, arguments)} that were not asked before, then
        calls attend() without waiting."""
        with self.lock:
            new = {key: job for key, job in jobs.items() if key not in self.asked}
            self.asked |= new
            self.waiting.extend(new)
            self.attend(0)

    def collect(self, jobs: dict, max_timeouts: float = math.inf) -> dict:
        """{key: result} of these jobs; a result is a number, a text, None or a Failure. Waits for
        them, but gives up the rest once more than `max_timeouts` of them have timed out, or after
        WAIT_SECONDS. The pool then forgets them; those that were only asked for wait."""
        self.ask(jobs)
        end = self.clock() + WAIT_SECONDS
        while any(key not in self.results for key in jobs):
            with self.lock:
                self.attend(0.1)
                late = sum(key in jobs for key in self.late)
                if late > max_timeouts:
                    self.give_up(jobs, f"{late} others gave no answer in {self.timeout:g} s")
                elif self.clock() > end:
                    self.give_up(jobs, f"{len(jobs)} together took over {WAIT_SECONDS} s")
        with self.lock:
            results = {key: self.results.pop(key) for key in jobs}
            for key in jobs:
                del self.asked[key]
            self.late.difference_update(jobs)
        return results

    def attend(self, seconds: float) -> None:
        """Hands out jobs, takes in results, replaces workers that died or are late. Waits at most
        `seconds` for something to happen."""
        for worker in self.workers:
            if worker.ready and not worker.jobs and self.waiting:
                self.hand_out(worker)
        # a worker is late if it has not answered by now. replace() below takes a while, and answers
        # that arrive meanwhile are not late
        now = self.clock()
        for event, _ in self.selector.select(seconds):
            self.take_in(event.data)
        for worker in list(self.workers):
            if worker.fault:
                self.replace(worker, "error", f"the worker {self.cause_of_death(worker)}")
                continue
            busy = worker.jobs or not worker.ready
            limit = self.timeout if worker.ready else START_SECONDS
            if busy and now - worker.since > limit:
                reason = f"not ready in {limit:g} s"
                if worker.ready:
                    reason = f"no answer in {limit:g} s (reward_timeout)"
                self.replace(worker, "timeout", reason)

    def hand_out(self, worker: Worker) -> None:
        """Sends a worker a few jobs, with the functions that it has to import first. Only a few, so
        that no worker has a long queue at the end while others have none."""
        # a quarter of an equal share, so that portions shrink towards the end of the queue
        count = max(1, min(CHUNK, len(self.waiting) // (4 * len(self.workers))))
        worker.jobs = deque(self.waiting.popleft() for _ in range(count))
        jobs = [self.asked[key] for key in worker.jobs]
        for function, _, arguments in jobs:
            self.trial_arguments.setdefault(function, arguments)
        new = {function for function, _, _ in jobs} - worker.functions
        worker.functions |= new
        worker.since = self.clock()
        # if the worker does not read, its socket fills up and send() blocks
        worker.socket.settimeout(self.timeout + 10)
        try:
            worker.send(([(name, self.trial_arguments[name]) for name in sorted(new)], jobs))
        except OSError:  # it is gone or does not read; no job has started, so none is to blame
            self.take_back(worker)
            worker.fault = CLOSED
        else:
            worker.ready = not new

    def take_back(self, worker: Worker) -> None:
        """Puts a worker's jobs at the front of the queue."""
        # extendleft() reverses the order
        self.waiting.extendleft(reversed(worker.jobs))
        worker.jobs = deque()

    def take_in(self, worker: Worker) -> None:
        for line in worker.lines():
            try:
                number, message = json.loads(line)
            except (ValueError, TypeError, RecursionError):
                number = None
            if number != worker.answered or (worker.ready and not worker.jobs):
                # something else wrote into its socket: trust nothing more that comes from it
                worker.fault = MALFORMED
                return
            worker.answered += 1
            if not worker.ready:
                self.take_start(worker, message)
                continue
            result = checked_result(message)
            self.results[worker.jobs.popleft()] = result
            worker.since = self.clock()
            if isinstance(result, Failure) and lacked_memory(result.reason):
                # earlier jobs may have filled its memory; then all later ones would fail too
                self.take_back(worker)
                worker.fault = "is out of memory"
                return

    def take_start(self, worker: Worker, message) -> None:
        """Handles a message from a worker that is not ready yet: what it is about to do, that it is
        ready, or why it can't import a function (UserError)."""
        worker.since = self.clock()
        match message:
            case "ready":
                worker.ready = True
                worker.loading = worker.doing = ""
                self.loaded |= worker.functions
                if worker.functions:  # else it has only started
                    self.failed_starts = 0
            case ["importing", str(name)]:
                worker.loading = name
                worker.doing = (
                    f"when the module of {quoted(name)} was imported; an import must not do the "
                    f"work of a call"
                )
            case ["trying", name]:
                worker.doing = (
                    f"when {quoted(name)} was called for the first time; this call may load what "
                    f"the function needs, but must return"
                )
            case ["refused", name, reason]:
                raise refused(name, reason)
            case _:
                worker.fault = MALFORMED

    def cause_of_death(self, worker: Worker) -> str:
        # a dying worker closes its socket first; its keeper exits only after cleaning up
        patience = 5 if worker.fault == CLOSED else 0
        try:
            status = worker.process.wait(patience)
        except subprocess.TimeoutExpired:
            return worker.fault
        how = signal.strsignal(-status) if status < 0 else f"exit status {status}"
        return f"died ({how})"

    def replace(self, worker: Worker, kind: str, reason: str) -> None:
        """Replaces a worker. The job that it was doing becomes a Failure; its other jobs go to the
        front of the queue."""
        if worker.ready and worker.jobs:
            key = worker.jobs.popleft()
            self.results[key] = Failure(kind, reason)
            if kind == "timeout":
                self.late.add(key)
        self.take_back(worker)
        if not worker.ready:
            self.count_failed_start(worker, reason)
        self.renew(worker)

    def renew(self, worker: Worker) -> None:
        """Kills a worker, which has no jobs any more, and starts another."""
        self.workers.remove(worker)
        self.selector.unregister(worker.socket)
        worker.kill()
        self.start()

    def give_up(self, jobs: dict, reason: str) -> None:
        """Makes every one of the jobs that has no result yet a Failure by timeout."""
        keys = jobs.keys() - self.results.keys()
        for worker in list(self.workers):
            if not keys.isdisjoint(worker.jobs):
                self.take_back(worker)
                self.renew(worker)
        self.waiting = deque(key for key in self.waiting if key not in keys)
        self.results |= dict.fromkeys(keys, Failure("timeout", f"given up: {reason}"))

    def count_failed_start(self, worker: Worker, reason: str) -> None:
        """UserError if the worker was importing a function that no worker has imported yet: that
        code would fail again. Otherwise the machine may be too busy or out of memory, so workers
        are started again; RunStopped after too many failed starts in a row."""
        self.failed_starts += 1
        if worker.loading and worker.loading not in self.loaded:
            raise UserError(f"reward_funcs: {reason} {worker.doing}")
        if self.failed_starts > 2 * len(self.workers):
            raise RunStopped(
                f"reward workers don't start: {reason} {worker.doing}; their own messages are above"
            )

    def close(self) -> None:
        for worker in self.workers:
            worker.process.send_signal(END)  # tell all of them before waiting for any
        for worker in self.workers:
            worker.kill()
        self.workers = []
        self.selector.close()


def lacked_memory(reason: str) -> bool:
    """Whether a Failure's reason names a MemoryError. Only the type before the colon counts, since
    the rest may be a model's text."""
    return "MemoryError" in reason.partition(":")[0]


def checked_result(message):
    """A worker's message as the result of a job: a number, a text, None or a Failure. A message
    that is none of these becomes a Failure too."""
    if isinstance(message, dict) and set(message) == {"error"}:
        return Failure("error", quoted(message["error"], LONGEST_REASON + 50))  # + file and line
    if message is None or isinstance(message, str):
        return message
    # type(), not isinstance(): True is an int
    if type(message) in (int, float) and abs(message) < BIGGEST:  # False for NaN
        return message
    return Failure("error", f"the worker {MALFORMED}")


# --- in a keeper


def end_with_parent(parent: int, number: int) -> None:
    """Makes the kernel send this process the signal `number` when its parent dies, however it
    dies."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, number)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:  # the parent died before prctl()
        os._exit(0)


def adopt_orphans() -> None:
    """Makes this process, not init, the new parent of our worker's descendants whose own parent
    dies, so that descendants() finds them."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(36, 1)  # PR_SET_CHILD_SUBREAPER


def kill(pid: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.kill(pid, signal.SIGKILL)


def descendants(ancestor: int) -> list[int]:
    """Pids of the living descendants of `ancestor`, according to /proc."""
    children = {}  # pid: pids
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            # "pid (name) state parent ..."; rpartition: a name may hold brackets and spaces
            state, parent = (folder / "stat").read_bytes().rpartition(b")")[2].split()[:2]
        except OSError:  # the process has ended meanwhile
            continue
        if state not in (b"Z", b"X"):  # zombie, dead
            children.setdefault(int(parent), []).append(int(folder.name))
    living = []
    pending = [ancestor]
    while pending:
        pids = children.get(pending.pop(), [])
        living += pids
        pending += pids
    return living


def reap(worker: int) -> int | None:
    """Reaps the children that have ended. Returns the worker's exit status (negative: a signal) if
    the worker is among them, else None."""
    status = None
    with suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            if ended[0] == worker:
                status = os.waitstatus_to_exitcode(ended[1])
    return status


def keep(worker: int) -> int:
    """Waits until the worker ends or END comes, then kills the worker and all its descendants.
    Returns the worker's exit status (negative: a signal), or END's number."""
    status = None
    while status is None and signal.sigwait(KEEPER_SIGNALS) == signal.SIGCHLD:
        status = reap(worker)
    with suppress(ProcessLookupError):
        os.killpg(worker, signal.SIGKILL)  # without /proc this is all that can be done
    deadline = time.monotonic() + END_SECONDS / 2
    # a loop, because others may be started while some are killed
    while (left := descendants(os.getpid())) and time.monotonic() < deadline:
        for pid in left:
            kill(pid)
        time.sleep(0.005)  # a killed process takes a moment to leave /proc
    reap(worker)
    return END if status is None else status


def show(output) -> None:
    """Prints what the worker and its children write. A line that begins with NUL is not printed: it
    comes from announce() and names the module that is being imported."""
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
    with suppress(OSError):  # stderr is closed
        print(f"{who}: {quoted(text, 1000)}", file=sys.stderr, flush=True)


def leave_as(status: int) -> None:
    """Ends this process as the worker ended: with a status, or by a signal (status < 0)."""
    # SIGKILL and SIGSTOP can be neither handled nor blocked, so there is nothing to reset
    if status < 0 and -status not in (signal.SIGKILL, signal.SIGSTOP):
        signal.signal(-status, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {-status})
    if status < 0:
        os.kill(os.getpid(), -status)
    os._exit(abs(status))


def ignore(number: int, frame) -> None:
    """A signal handler that does nothing. Unlike SIG_IGN, it is not inherited by programs."""


END = signal.SIGUSR2  # ends a keeper; not one of the signals that ask a run to stop
KEEPER_SIGNALS = {END, signal.SIGCHLD}


def main(channel: int, parent: int) -> None:
    """Runs the keeper, which forks the worker; both processes end in this function."""
    signal.signal(signal.SIGCHLD, ignore)  # sigwait never gets a signal that is ignored
    before = signal.pthread_sigmask(signal.SIG_BLOCK, KEEPER_SIGNALS)
    listen(ignore)  # before the fork: for the worker, too
    end_with_parent(parent, END)
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
    os.close(channel)  # else the trainer would not notice when the worker closes its end
    os.close(sink)
    shower = threading.Thread(target=show, args=(os.fdopen(source, "rb"),), daemon=True)
    shower.start()
    status = keep(worker)
    shower.join(1.0)  # time to print the last lines
    leave_as(status)


# --- in a worker process


def no_core_dumps() -> None:
    import resource

    # a reward that crashes would leave gigabytes on the disk each time it crashes
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def limit_memory(memory_gib: float) -> None:
    """Limits this process's memory to what it has now plus `memory_gib`; inf lifts the limit."""
    import resource

    if sys.platform != "linux":
        return
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    soft = hard
    if memory_gib < math.inf:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        # what imports have taken is not counted against the jobs
        soft = pages * resource.getpagesize() + int(memory_gib * 2**30)
        if hard != resource.RLIM_INFINITY:
            soft = min(soft, hard)
    resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def refused(name: str, reason: str) -> UserError:
    """The error for a function that can't be imported."""
    return UserError(f"reward_funcs: {quoted(name)}: {quoted(reason, LONGEST_REFUSAL)}")


@functools.cache
def imported(name: str):
    """The function named "module:function"; ValueError with the reason if it can't be imported."""
    module, _, function = name.partition(":")
    if "/" in module:
        raise ValueError(f"can't be imported by its path: {SOUGHT}")
    here = os.stat(".")
    try:
        target = attrgetter(function)(importlib.import_module(module))
    except SystemExit as error:
        raise ValueError(f"its module calls sys.exit({error.code!r}) when it is imported") from None
    except Exception as error:  # a user's module may raise anything
        reason = f"can't be imported: {type(error).__name__}: {error}"
        # the module itself was not found, not one that it imports
        if isinstance(error, ModuleNotFoundError) and f"{module}.".startswith(f"{error.name}."):
            reason += f"; {SOUGHT}"
        raise ValueError(reason) from None
    if not os.path.samestat(here, os.stat(".")):
        folder = os.getcwd()
        raise ValueError(f"its module changes the working folder when it is imported: {folder}")
    if not callable(target):
        raise ValueError("is not a function")
    if inspect.isclass(target):
        raise ValueError("is a class: name an instance of it, or a function")
    if inspect.iscoroutinefunction(target):
        raise ValueError("is async: write a plain function")
    return target


def run_job(function: str, text: str, arguments: dict):
    """What function(text, **arguments) returns, as a JSON value: a finite number, a text or None.
    {"error": sentence} if it returns anything else or raises."""
    try:
        # A copy, because a reward may change what it is given, and jobs that came together share
        # it. By pickle: deepcopy takes twenty times as long
        copy = pickle.loads(pickle.dumps(arguments))
        value = imported(function)(text, **copy)
        if isinstance(value, str) and len(value) > LONGEST_TEXT:
            return {"error": f"gave a text of {len(value)} characters"}
        if value is None or isinstance(value, str):
            return value
        number = number_of(value)
        if number is None:
            kind = type(value).__name__
            trainer = {"list": "TRL", "dict": "verl"}.get(kind)
            hint = f" (a {kind}, as for {trainer}: docs/from_trl.md)" if trainer else ""
            return {"error": f"gave a value of type {kind}, neither a number nor a text{hint}"}
    except (Exception, SystemExit) as error:  # a reward may raise anything
        reason = f"{type(error).__name__}: {error}"[:LONGEST_REASON]
        return {"error": reason + line_of(error, function)}
    if abs(number) < BIGGEST:
        return number
    return {"error": f"gave {number}; a reward must be finite and below {BIGGEST:g}"}


def number_of(value) -> float | None:
    """What a function returned as a number, which may be numpy's or torch's; None if it is not
    one."""
    try:
        return float(value)
    except (TypeError, ValueError):  # a dict, a tuple, an array of several numbers
        return None


def line_of(error: BaseException, function: str) -> str:
    """The line of the function's own file that an error came from, as " (file.py:12)"; "" if the
    traceback does not pass through that file."""
    own_file = getattr(sys.modules.get(function.partition(":")[0]), "__file__", None)
    where = ""
    # not extract_tb, which reads the source of every frame: a reward may fail thousands of times
    for frame, line in traceback.walk_tb(error.__traceback__):
        if frame.f_code.co_filename == own_file:
            where = f" ({os.path.basename(own_file)}:{line})"
    return where


def announce(module: str) -> None:
    """Tells our keeper which module is about to be imported; "" when that is over."""
    with suppress(AttributeError, OSError, ValueError):  # a module may close or replace stdout
        sys.stdout.flush()
        os.write(1, f"\n\0{module}\n".encode())


def load(function: str, arguments: dict, say) -> bool:
    """Imports a function and calls it twice, so that the time of what it imports or builds at its
    first call is not counted as a job's; the results are ignored. arguments: those of its first
    job. Returns False, after a "refused" message, if the function can't be imported."""
    say(["importing", function])
    announce(function)
    try:
        imported(function)
    except ValueError as error:
        say(["refused", function, str(error)[:LONGEST_REFUSAL]])
        return False
    announce("")
    say(["trying", function])
    # "x" is not a number, so that math_reward loads math-verify
    run_job(function, "\\boxed{1}", {"answer": "x"})
    # a job's own: a function may read columns before it loads
    run_job(function, "\\boxed{1}", arguments)
    return True


def serve(file) -> None:
    """The worker's loop. Reads pickles from the trainer: first the hello, then pairs ([(a function
    to import, arguments to try it with), ...], jobs). Writes numbered lines of JSON: what it
    imports, when it is ready, then the result of each job as soon as it is done:
    [0, "ready"], [1, ["importing", ...]], ... [3, "ready"], [4, 0.5], ..."""
    numbers = itertools.count()

    def say(message) -> None:
        file.write(json.dumps([next(numbers), message]).encode() + b"\n")
        file.flush()

    sys.path[:], memory_gib = pickle.load(file)
    say("ready")
    while True:
        try:
            functions, jobs = pickle.load(file)
        except EOFError:
            return
        if functions:
            # an import may need more memory than a job is allowed
            limit_memory(math.inf)
            for function, arguments in functions:
                if not load(function, arguments, say):
                    return
            limit_memory(memory_gib)
            say("ready")
        for job in jobs:
            say(run_job(*job))


def let_go(held: list[int]) -> None:
    """Runs in a process that a reward has forked: closes the file descriptors in `held` and empties
    the list, because a process forked from that one may use the same numbers for other files. It
    also lets signals end the process again, as a reward may want to end it by one."""
    while held:
        os.close(held.pop())
    for number in SIGNALS:
        if signal.getsignal(number) is ignore:  # else it is the reward's own
            signal.signal(number, signal.SIG_DFL)
    release_signals()


FORKING = threading.local()  # .mask: the signals that this thread blocked before its fork


def hold_signals() -> None:
    """Runs before a fork, so that no signal is lost that reaches the child before let_go() has run
    there."""
    FORKING.mask = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)


def release_signals() -> None:
    """Runs after a fork, in the parent and in the child."""
    signal.pthread_sigmask(signal.SIG_SETMASK, FORKING.mask)


def work(channel: int, keeper: int, output: int) -> None:
    """Runs the worker, in the process that main() has forked for it."""
    os.setsid()  # so that a signal to the worker's own process group does not reach the keeper
    if signal.getsignal(signal.SIGINT) is ignore:  # a timer of a reward may call interrupt_main()
        signal.signal(signal.SIGINT, signal.default_int_handler)
    # a worker that hangs would not notice that its socket is closed
    end_with_parent(keeper, signal.SIGKILL)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    sys.stdout.reconfigure(line_buffering=True)
    sys.setrecursionlimit(2000)
    # processes that a reward leaves behind must not hold the socket: the trainer would not notice
    # that we died
    os.set_inheritable(channel, False)
    held = [channel]
    os.register_at_fork(
        before=hold_signals,
        after_in_parent=release_signals,
        after_in_child=functools.partial(let_go, held),
    )
    try:
        with socket.socket(fileno=channel) as connection:
            serve(connection.makefile("rwb"))
    except OSError:
        pass  # the trainer is gone, or this is a copy of us that a reward has forked


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
