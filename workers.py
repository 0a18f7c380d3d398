"""Processes for work that may hang, crash or eat the memory, because a model wrote its input.

    pool = Pool(count=2, timeout=5.0, memory_gib=2.0)
    pool.ask({key: (function, text, row)})        # starts the work, doesn't wait
    pool.answers({key: (function, text, row)})    # {key: number, text, None or Failure}

A job is function(text, **row); a function is "module:function", which a worker imports before its
first job of that function. Every job ends within `timeout`, the import not counted.
`python workers.py <socket> <parent>` is two processes:

    the worker   computes: no torch, no GPU, no process group, so that killing it harms nobody
    its keeper   waits until the worker ends, the trainer is gone, or the trainer asks for the end;
                 then kills all that has come of the worker, whatever session it hides in

The worker gets jobs as pickles and answers in lines of JSON, which is all that is believed of it.
One that gives no answer for `timeout` seconds, dies, or is out of memory loses the job it was at;
another one takes its place and the rest of its jobs. What it prints is printed by its keeper,
quoted. Nothing here waits for another rank.

A worker's environment is its own: ENVIRONMENT and what begins with one of PREFIXES. Tokens and keys
of the run (HF_TOKEN, WANDB_API_KEY, ...) are not in it. A reward that needs a key of its own gets
it under a name that begins with REWARD_. This is no sandbox: a reward may read what you may read.
"""

import ctypes
import functools
import importlib
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

from common import RunStopped, UserError, quoted

START_SECONDS = 120  # to import what a job needs, on a machine that is busy loading models
END_SECONDS = 10  # for a keeper to end all that came of its worker; it takes milliseconds
CHUNK = 64  # jobs that are handed to a worker at a time, at most
BIGGEST = 1e38  # of a number, so that it is finite in float32 too
LONGEST_TEXT = 1000  # of a function's answer
LONGEST_REASON = 200  # characters of an error, without its place
LONGEST_REFUSAL = 300  # of why a function can't be had
LONGEST_LINE = 20_000  # bytes that may come without a newline before a worker is given up
CLOSED = "closed its socket"
SAID_TOO_MUCH = "sent a malformed reply"
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
    # the GPU and the other cores belong to the training
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
    """One process, its keeper, and the keys of jobs that it has not answered yet, oldest first.
    hello: the search path of modules, and the GiB that its jobs may take; now: by the pool's
    clock."""

    def __init__(self, hello: tuple[list, float], now: float):
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
        self.functions = set()  # that it has imported, or was told to
        self.received = b""
        self.ready = False  # for jobs; not while it starts and while it imports
        self.loading = ""  # the function whose module it is at
        self.doing = ""  # and what it does with it, as an error goes on
        self.since = now  # when it was told or said something last
        self.answered = 0  # messages of it
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
        # what comes behind the last newline is kept for the next time
        *whole, self.received = (self.received + more).split(b"\n")
        if not more or len(self.received) > LONGEST_LINE:
            self.fault = SAID_TOO_MUCH if more else CLOSED
        return whole


class Pool:
    """`count` workers, and the jobs that were asked for. All of it may be called from two threads:
    rollouts that are made ahead come with their jobs from a thread of their own."""

    def __init__(self, count: int, timeout: float, memory_gib: float):
        self.timeout = timeout
        self.clock = time.monotonic  # by which a job is late
        self.hello = (sys.path, memory_gib)
        self.asked = {}  # key: job
        self.waiting = deque()  # keys of jobs that no worker has
        self.found = {}  # key: answer
        self.loaded = set()  # functions that some worker has imported
        self.failed_starts = 0  # since a worker was ready
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
        """Queues jobs {key: (function, text, row)} that were not asked before, and sees to the
        workers without waiting."""
        with self.lock:
            new = {key: job for key, job in jobs.items() if key not in self.asked}
            self.asked |= new
            self.waiting.extend(new)
            self.attend(0)

    def answers(self, jobs: dict) -> dict:
        """{key: answer} of these jobs, each a number, a text, None or a Failure; everything asked
        so far is then forgotten."""
        self.ask(jobs)
        while any(key not in self.found for key in jobs):
            with self.lock:
                self.attend(0.1)
        with self.lock:
            found = {key: self.found[key] for key in jobs}
            if len(self.found) == len(self.asked):  # what else is under way may not be cut off
                self.asked = {}
                self.found = {}
        return found

    def attend(self, seconds: float) -> None:
        """Hands out jobs, takes in answers, replaces workers that died or are late; waits at most
        `seconds` for something to happen."""
        for worker in self.workers:
            if worker.ready and not worker.jobs and self.waiting:
                self.hand_out(worker)
        # late is who had not answered by now: to bury others takes a while, in which answers come
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
        """A few jobs at a time, so that no worker is left with a long queue at the end, and the
        functions that it has to import first."""
        # a quarter of an equal share: towards the end of a queue the portions shrink
        count = max(1, min(CHUNK, len(self.waiting) // (4 * len(self.workers))))
        worker.jobs = deque(self.waiting.popleft() for _ in range(count))
        jobs = [self.asked[key] for key in worker.jobs]
        new = {function for function, _, _ in jobs} - worker.functions
        worker.functions |= new
        worker.since = self.clock()
        # for a worker that does not read, whose socket is full
        worker.socket.settimeout(self.timeout + 10)
        try:
            worker.send((sorted(new), jobs))
        except OSError:  # it is gone or deaf: nothing was computed, so nobody is to blame
            self.take_back(worker)
            worker.fault = CLOSED
        else:
            worker.ready = not new

    def take_back(self, worker: Worker) -> None:
        """Its jobs go to the front of the queue."""
        # extendleft() turns the order round
        self.waiting.extendleft(reversed(worker.jobs))
        worker.jobs = deque()

    def take_in(self, worker: Worker) -> None:
        for line in worker.lines():
            try:
                number, message = json.loads(line)
            except (ValueError, TypeError, RecursionError):
                number = None
            if number != worker.answered or (worker.ready and not worker.jobs):
                # something else wrote into its socket: nothing more of it is believed
                worker.fault = SAID_TOO_MUCH
                return
            worker.answered += 1
            if not worker.ready:
                self.take_start(worker, message)
                continue
            found = believed(message)
            self.found[worker.jobs.popleft()] = found
            worker.since = self.clock()
            if isinstance(found, Failure) and "MemoryError" in found.reason:
                # earlier jobs may have filled it, and then it would fail on all that come
                self.take_back(worker)
                worker.fault = "is out of memory"
                return

    def take_start(self, worker: Worker, message) -> None:
        """What a worker says until it is ready: what it is about to do, or that it can't."""
        match message:
            case "ready":
                worker.ready = True
                worker.loading = worker.doing = ""
                worker.since = self.clock()
                self.loaded |= worker.functions
                self.failed_starts = 0
            case ["importing", str(name)]:
                worker.loading = name
                worker.doing = f"when the module of {quoted(name)} was imported"
            case ["trying", name]:
                worker.doing = f"when {quoted(name)} was called for the first time"
            case ["refused", name, reason]:
                raise UserError(f"reward_funcs: {quoted(name)}: {quoted(reason, LONGEST_REFUSAL)}")
            case _:
                worker.fault = SAID_TOO_MUCH

    def cause_of_death(self, worker: Worker) -> str:
        # a dying process closes its socket first, and its keeper has to clear up after it
        patience = 5 if worker.fault == CLOSED else 0
        try:
            status = worker.process.wait(patience)
        except subprocess.TimeoutExpired:
            return worker.fault
        how = signal.strsignal(-status) if status < 0 else f"exit status {status}"
        return f"died ({how})"

    def replace(self, worker: Worker, kind: str, reason: str) -> None:
        """The job it was at is lost, the others go to the front of the queue."""
        if worker.ready and worker.jobs:
            self.found[worker.jobs.popleft()] = Failure(kind, reason)
        self.take_back(worker)
        if not worker.ready:
            self.count_failed_start(worker, reason)
        self.workers.remove(worker)
        self.selector.unregister(worker.socket)
        worker.kill()
        self.start()

    def count_failed_start(self, worker: Worker, reason: str) -> None:
        """Somebody's own code that fails before any worker has imported it would fail again; later
        on it may be the machine that is too busy, or out of memory."""
        self.failed_starts += 1
        if worker.loading and worker.loading not in self.loaded:
            raise UserError(
                f"reward_funcs: {reason} {worker.doing}; "
                "a module must do its work when it is called"
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


def believed(message):
    """A worker's answer to a job, as far as it can be one: a number, a text, None or a Failure."""
    if isinstance(message, dict) and set(message) == {"error"}:
        return Failure("error", quoted(message["error"], LONGEST_REASON + 50))  # and its place
    if message is None or isinstance(message, str):
        return message
    # type(), because True is an int
    if type(message) in (int, float) and abs(message) < BIGGEST:  # and no NaN
        return message
    return Failure("error", f"the worker {SAID_TOO_MUCH}")


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
    children = {}  # pid: pids
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
        pids = children.get(ahead.pop(), [])
        found += pids
        ahead += pids
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
        time.sleep(0.005)  # killed ones take a moment to leave /proc
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
    # these two can be neither handled nor blocked: there is nothing to undo
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

    # a reward that crashes would leave gigabytes on the disk each time
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def limit(memory_gib: float) -> None:
    """No more memory than now plus `memory_gib`; inf lifts the limit."""
    import resource

    if sys.platform != "linux":
        return
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    soft = hard
    if memory_gib < math.inf:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        # on top of what imports took, which the jobs are not to pay for
        soft = pages * resource.getpagesize() + int(memory_gib * 2**30)
        if hard != resource.RLIM_INFINITY:
            soft = min(soft, hard)
    resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


@functools.cache
def imported(name: str):
    """The function "module:function"; ValueError with the reason why it can't be had."""
    module, _, function = name.partition(":")
    here = os.stat(".")
    try:
        found = attrgetter(function)(importlib.import_module(module))
    except SystemExit as error:
        raise ValueError(f"its module calls sys.exit({error.code!r}) when it is imported") from None
    except Exception as error:  # whatever somebody's module does
        raise ValueError(f"can't be imported: {type(error).__name__}: {error}") from None
    if not os.path.samestat(here, os.stat(".")):
        folder = os.getcwd()
        raise ValueError(f"its module changes the working folder when it is imported: {folder}")
    if not callable(found):
        raise ValueError("is not a function")
    return found


def answer(function: str, text: str, row: dict):
    """What function(text, **row) gives, as a JSON value: a finite number, a text or None;
    {"error": sentence} for anything else."""
    try:
        value = imported(function)(text, **row)
        if isinstance(value, str) and len(value) > LONGEST_TEXT:
            return {"error": f"gave a text of {len(value)} characters"}
        if value is None or isinstance(value, str):
            return value
        number = float(value)
    except (Exception, SystemExit) as error:  # whatever somebody's reward raises
        reason = f"{type(error).__name__}: {error}"[:LONGEST_REASON]
        return {"error": reason + place_of(error, function)}
    if abs(number) < BIGGEST:
        return number
    return {"error": f"gave {number}; a reward must be finite, in float32 too"}


def place_of(error: BaseException, function: str) -> str:
    """The line of the function's own file from which an error came, as " (file.py:12)"; "" for
    none."""
    own = getattr(sys.modules.get(function.partition(":")[0]), "__file__", None)
    found = ""
    # not extract_tb, which reads the source of every frame: a reward may fail thousands of times
    for frame, line in traceback.walk_tb(error.__traceback__):
        if frame.f_code.co_filename == own:
            found = f" ({os.path.basename(own)}:{line})"
    return found


def announce(module: str) -> None:
    """Tells our keeper what is imported from here on; "" for nothing."""
    with suppress(AttributeError, OSError, ValueError):  # it may have closed or replaced its stdout
        sys.stdout.flush()
        os.write(1, f"\n\0{module}\n".encode())


def load(function: str, say) -> bool:
    """Imports a function and calls it once, for its own imports and first parse: whether its answer
    fits is not asked here. False if it can't be had, which is said."""
    say(["importing", function])
    announce(function)
    try:
        imported(function)
    except ValueError as error:
        say(["refused", function, str(error)[:LONGEST_REFUSAL]])
        return False
    announce("")
    say(["trying", function])
    answer(function, "\\boxed{1}", {"answer": "x"})
    return True


def serve(file) -> None:
    """Reads pickles from our own parent: first a hello, then pairs of functions to import and jobs
    to do. Says what it imports and when it is ready, then the answer to each job as it is done:
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
            # an import may need more than a job is allowed
            limit(math.inf)
            for function in functions:
                if not load(function, say):
                    return
            limit(memory_gib)
            say("ready")
        for job in jobs:
            say(answer(*job))


def let_go(held: list[int]) -> None:
    """Closes them in the first process that is forked; in its own children the numbers are
    others'."""
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
    # what a reward starts and leaves behind must not hold the socket: the parent would not see
    # us die
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
