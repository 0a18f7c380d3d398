"""How a run is asked to end early: SIGTERM, SIGINT, SIGHUP (a closed terminal) or SIGUSR1 to any of
its ranks, or a file `stop` in its folder.

    listen(end_now)             # first of all: whoever is still loading has nothing to save
    end_with_torchrun()         # a rank does not outlive the torchrun that has started it
    stop = Stop(folder, rank)   # from here on a signal waits for the end of the step
    asked = stop.asked()        # on this rank; all ranks then agree, save together and exit with 0

The file is what a scheduler uses: torchrun passes SIGTERM, SIGINT and SIGHUP on but then returns 1,
and dies of SIGUSR1 itself. A run that starts removes it; a run that is finished writes `done`, so
`stop` without `done` means: not finished, may go on. A second signal ends the process at once.
Imports nothing slow: it is there before anything that takes time.
"""

import os
import signal
import stat
import threading
import time
from functools import cache
from pathlib import Path

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)


def listen(hear) -> None:
    """hear(number, frame) for every signal that asks to end. What was ignored at the start stays
    so: nohup means that a closed terminal is not our concern."""
    for number in SIGNALS:
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, hear)


def end_now(number: int, frame) -> None:
    """Ends the process with one sentence. No exception: libraries swallow it while they load."""
    name = signal.Signals(number).name
    by_torchrun = under_torchrun() and number == signal.SIGTERM  # which says why itself
    if os.environ.get("RANK", "0") == "0" and not by_torchrun:
        say(f"error: stopped by {name}")
    os._exit(128 + number)


def say(sentence: str) -> None:
    """From a signal handler or a thread that ends the process: print() may be half-way elsewhere."""
    try:
        os.write(2, f"{sentence}\n".encode())
    except OSError:
        pass  # the terminal is gone, and with it whoever would read this


def leave_terminal() -> None:
    """What goes to a terminal goes nowhere from now on: writing to one that is closed is an error,
    which would end the run before it has saved."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        if stat.S_ISCHR(os.fstat(stream).st_mode):
            os.dup2(nowhere, stream)
    os.close(nowhere)


class Stop:
    def __init__(self, folder, rank: int):
        self.file = Path(folder) / "stop" if rank == 0 else None
        self.heard = 0
        listen(self.hear)

    def hear(self, number: int, frame) -> None:
        if number == signal.SIGHUP:
            leave_terminal()
            self.heard = self.heard or number  # shell and kernel both send it: two are no haste
        elif self.heard in (0, signal.SIGHUP):
            self.heard = number
        else:  # checkpoints are renamed when they are whole: nothing to tidy up
            os._exit(128 + number)

    def asked(self) -> bool:
        return bool(self.heard) or (self.file is not None and self.file.exists())


# --- torchrun


def under_torchrun() -> bool:
    return "TORCHELASTIC_RUN_ID" in os.environ


@cache  # once in a process
def end_with_torchrun() -> None:
    """Ends this rank within seconds, in the middle of a step too, when the torchrun that has started
    it is gone: killed itself, it can't end its ranks, and they would train on unseen. Without
    torchrun the end of a parent means nothing: it is a shell that somebody has left."""
    if under_torchrun():
        threading.Thread(target=follow, args=[os.getppid()], daemon=True).start()


def follow(parent: int) -> None:
    # not PR_SET_PDEATHSIG: that one tells of the parent's thread, not of the parent
    while os.getppid() == parent:
        time.sleep(1)
    if os.environ.get("LOCAL_RANK", "0") == "0":
        say(
            f"error: torchrun (process {parent}) is gone, and its ranks leave with it; "
            "go on with --resume_from_checkpoint=latest"
        )
    os._exit(1)
