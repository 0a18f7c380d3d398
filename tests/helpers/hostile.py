"""Rewards of somebody who means no good, or can't do better: hang, crash, eat memory, leave
processes behind, write where they should not. What `act` does is said by the completion. Notes of
what it has done lie in the folder REWARD_TEST_FOLDER."""

import ctypes
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

FOLDER = Path(os.environ.get("REWARD_TEST_FOLDER", "."))
ACTS = {}  # word: function
not_a_function = 5


def act(completion, answer, **row):
    if completion.startswith("nap "):
        time.sleep(0.45)
        return 1.0
    if completion.startswith("count "):
        note("counted", completion)
        return 1.0
    if completion in ACTS:
        return ACTS[completion]()
    return float(completion)


def level(completion, answer, level, **row):
    return level


def tenfold(completion, answer, **row):
    return 10 * float(completion)


def greedy(completion, answer, **row):
    """Eats from what it is given."""
    return float(answer["numbers"].pop())


def known_as(word):
    def add(function):
        ACTS[word] = function
        return function

    return add


def note(name, line):
    with open(FOLDER / name, "a") as file:
        file.write(f"{line}\n")


# --- hangs


@known_as("sleep")
def forever():
    while True:
        try:
            time.sleep(1000)
        except BaseException:
            pass


@known_as("spin")
def spin():
    while True:
        pass


@known_as("spin_in_c")
def spin_in_c():
    return any(iter(int, 1))


@known_as("power")
def power():
    huge = 9**9
    return float(9**huge % 7)


@known_as("regex")
def regex():
    return re.match("(a+)+$", "a" * 60 + "b")


@known_as("deaf")
def deaf():
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    forever()


@known_as("threads")
def threads():
    for _ in range(3):
        threading.Thread(target=forever).start()
    forever()


@known_as("stop")
def stop():
    os.kill(os.getpid(), signal.SIGSTOP)


@known_as("lock")
def lock():
    held = threading.Lock()
    held.acquire()
    held.acquire()


@known_as("subprocess")
def wait_for_another():
    process = subprocess.Popen(["sleep", "1000"])
    note("children", process.pid)
    process.wait()


# --- processes


def fork(then):
    """The child sleeps; the parent does what is to come then."""
    pid = os.fork()
    note("children", pid or os.getpid())
    return then() if pid else forever()


@known_as("fork")
def fork_and_hang():
    return fork(forever)


@known_as("fork_and_leave")
def fork_and_leave():
    return fork(lambda: os._exit(3))


@known_as("fork_and_answer")
def fork_and_answer():
    return fork(lambda: 1.0)


@known_as("fork_and_return")
def fork_and_return():
    """Both the parent and the child go on as the worker."""
    os.fork()
    return 1.0


@known_as("fork_and_terminate")
def fork_and_terminate():
    child = os.fork()
    if not child:
        time.sleep(1000)
        os._exit(0)
    os.kill(child, signal.SIGTERM)
    os.waitpid(child, 0)
    return 1.0


@known_as("system_and_leave")
def system_and_leave():
    os.system(f"sleep 1000 & echo $! >> '{FOLDER}/children'")
    os._exit(3)


@known_as("daemon")
def daemon():
    """A process in a session of its own, whose parent has gone."""
    pid = os.fork()
    if not pid:
        os.setsid()
        if not os.fork():
            os.setsid()
            note("daemons", os.getpid())
            forever()
        os._exit(0)
    os.waitpid(pid, 0)
    written = FOLDER / "daemons"
    while not (written.exists() and written.read_text()):
        time.sleep(0.01)
    return 1.0


@known_as("daemon_and_leave")
def daemon_and_leave():
    daemon()
    os._exit(0)


@known_as("freeze_keeper")
def freeze_keeper():
    daemon()
    os.kill(os.getppid(), signal.SIGSTOP)
    return 1.0


# --- breaks


class Mute(Exception):
    def __str__(self):
        raise ValueError("no words")


def raising(word, error):
    def raises():
        raise error

    ACTS[word] = raises


raising("raise", ValueError("this one"))
raising("mute", Mute())
raising("interrupt", KeyboardInterrupt())
raising("unprintable", ValueError("\ud800 \x1b[2J\nnext line \x00" + "x" * 10_000))


@known_as("sys.exit")
def exits():
    sys.exit(0)


@known_as("os._exit")
def leaves():
    os._exit(0)


@known_as("wait for a death")
def wait_for_a_death():
    while not (FOLDER / "buried").exists():
        time.sleep(0.01)
    return 1.0


@known_as("kill")
def kill():
    os.kill(os.getpid(), signal.SIGKILL)


@known_as("kill_group")
def kill_group():
    os.kill(0, signal.SIGKILL)


@known_as("realtime")
def realtime():
    os.kill(os.getpid(), 40)


ACTS["abort"] = os.abort


@known_as("segfault")
def segfault():
    ctypes.string_at(8)


def dive(n):
    return dive(n + 1) + 1


@known_as("recursion")
def recursion():
    return dive(0)


@known_as("stack")
def stack():
    sys.setrecursionlimit(10**9)
    return dive(0)


@known_as("allocate")
def allocate():
    return len(bytearray(100 << 30))


@known_as("grow")
def grow():
    held = []
    while True:
        held.append(bytearray(1 << 20))


LEAKED = []


@known_as("leak")
def leak():
    """Does no harm until a few of them have been called."""
    LEAKED.append(bytearray(40 << 20))
    return 1.0


# --- what is no reward

VALUES = {
    "nan": float("nan"),
    "inf": float("inf"),
    "-inf": float("-inf"),
    "huge": -1e300,
    "long": 10**400,
    "none": None,
    "text": "good",
    "long text": "good" * 1000,
    "complex": 1j,
    "list": [1.0],
    "true": True,
    "integer": 3,
}


def giving(word):
    ACTS[word] = lambda: VALUES[word]


for word in VALUES:
    giving(word)


# --- what is written into the worker's socket


def write(data):
    for fd in range(3, 1000):
        try:
            os.write(fd, data)
        except OSError:
            pass
    return 1.0


def writing(word, data):
    ACTS[word] = lambda: write(data)


writing("garbage", b"garbage\n")
writing("bytes", b"\xff\xfe\x00\n")
writing("forged", b"1.0\n")
writing("others", b"[7777, 1.0]\n")
writing("pairs", b'{"error": 1}\n[]\n[1]\n[[0], 1]\nnull\n')
writing("flood", b"x" * 100_000)


@known_as("endless")
def endless():
    while True:
        write(b"x" * 50_000)


@known_as("close")
def close():
    os.closerange(0, 1000)


# --- odd, but it works


@known_as("print")
def prints():
    print("garbage", flush=True)
    return bool(sys.stderr.write("more garbage\n"))


@known_as("close_stdout")
def close_stdout():
    sys.stdout.close()
    return 1.0


@known_as("chdir")
def chdir():
    os.chdir("/")
    return 1.0


@known_as("run")
def run():
    return float(subprocess.run(["true"]).returncode == 0)


@known_as("stdin")
def stdin():
    return float(sys.stdin.read() == "")


@known_as("light")
def light():
    """Whether nothing heavy was imported."""
    heavy = ("torch", "vllm", "transformers", "numpy", "math_verify", "rewards")
    return float(not any(name in sys.modules for name in heavy))


@known_as("loaded")
def loaded():
    """Whether math-verify has parsed something in this process."""
    mathematics = sys.modules.get("tasks.mathematics")
    return float(mathematics is not None and mathematics.parse_math.cache_info().currsize > 0)
