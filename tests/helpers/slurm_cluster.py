"""A real Slurm of two nodes on this machine: one slurmctld, two slurmd, a munged of its own,
everything in one folder.

    python tests/helpers/slurm_cluster.py start DIR     then `export SLURM_CONF=DIR/slurm.conf`, and
                                                        sbatch, squeue, scancel work
    python tests/helpers/slurm_cluster.py stop DIR      cancels all jobs, ends the daemons, leaves
                                                        no process behind

    with slurm_cluster.cluster(DIR) as env: subprocess.run(["sbatch", ...], env=env)

Needs root (slurmd starts jobs) and Debian's slurm-wlm and munge. Nothing in /etc/slurm is read or
written. Every process of this Slurm and of its jobs carries SLURM_CONF=DIR/slurm.conf in its
environment: that is how stop() finds what is left.
"""

import os
import platform
import shutil
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import child
import psutil
from deadlines import PATIENCE

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch")
CONFIG = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser=root
AuthType=auth/munge
CredType=cred/munge
# a job that is requeued waits until its first credential has expired: 2 minutes by default
AuthInfo=socket={folder}/munge.socket,cred_expire=10
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
ProctrackType=proctrack/pgid
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerType=sched/builtin
SchedulerParameters=sched_interval=1,batch_sched_delay=0
SlurmdParameters=config_overrides
MpiDefault=none
ReturnToService=2
KillWait=300
MinJobAge=86400
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=8
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=8
PartitionName=all Nodes=n1,n2 Default=YES State=UP
"""


def missing() -> str:
    """ "" if this machine can run the cluster, else the reason why not."""
    lost = [name for name in PROGRAMS if not find(name)]
    if lost:
        return f"{', '.join(lost)} not found (Debian: apt-get install slurm-wlm munge)"
    if os.geteuid():
        return "slurmd starts jobs only as root"
    return ""


def find(name: str) -> str | None:
    return shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")


def install(seconds: float = 300) -> None:
    """Debian's packages, where root may do so; missing() then says whether it worked."""
    if os.geteuid() or not shutil.which("apt-get"):
        return
    print("installing slurm-wlm and munge with apt-get", flush=True)
    end = time.monotonic() + seconds
    packages = ["install", "-y", "--no-install-recommends", "slurm-wlm", "munge"]
    for words in (["update"], packages):
        command = ["apt-get", "-o", "DPkg::Lock::Timeout=60", *words]
        env = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
        left = end - time.monotonic()
        try:
            done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=left)
        except subprocess.TimeoutExpired:
            print(f"{' '.join(command)}: no end within {seconds:.0f} s", flush=True)
            return
        if done.returncode:
            print(f"{' '.join(command)}: {done.stderr.strip()[-300:]}", flush=True)


def environment(folder: Path) -> dict:
    """This environment, of no other job, pointed at the cluster of `folder`."""
    env = {"SLURM_CONF": str(folder / "slurm.conf")}
    for key, value in os.environ.items():
        if not key.startswith(("SLURM", "SBATCH", "SRUN", "SALLOC")):
            env[key] = value
    return env


def start(folder) -> dict:
    """Starts the cluster in a new folder and returns the environment for its commands once both
    nodes are idle."""
    folder = Path(folder).resolve()
    for name in ("state", "spool.n1", "spool.n2"):
        (folder / name).mkdir(parents=True)
    (folder / "munge.key").write_bytes(os.urandom(128))
    (folder / "munge.key").chmod(0o600)
    host = platform.node().partition(".")[0]
    config = CONFIG.format(folder=folder, host=host, ports=[child.free_port() for _ in range(3)])
    (folder / "slurm.conf").write_text(config)
    env = environment(folder)
    try:
        start_munged(env, folder)
        daemon(env, folder, "slurmctld", "-D", "-c")
        for node in ("n1", "n2"):
            daemon(env, folder, "slurmd", "-D", "-N", node)
        wait_until(lambda: nodes(env) == "idle\nidle", PATIENCE, lambda: logs(folder))
    except BaseException:
        stop(folder)
        raise
    return env


def start_munged(env: dict, folder: Path) -> None:
    """The daemon by which Slurm's own know each other."""
    flags = ["--foreground", "--force", "--num-threads=2"]
    for name in ("key", "socket", "pid", "log", "seed"):
        flag = name if name == "socket" else f"{name}-file"
        flags.append(f"--{flag}={folder}/munge.{name}")
    daemon(env, folder, "munged", *flags)
    wait_until(
        (folder / "munge.socket").exists,
        PATIENCE,
        lambda: f"munged has made no socket: {tail(folder / 'munged.out')}",
    )


def nodes(env: dict) -> str:
    """The state of each, a line each."""
    return query(env, "sinfo", "-h", "-N", "-o", "%t")


def logs(folder: Path) -> str:
    words = ["the nodes are not idle:"]
    for path in sorted(folder.glob("slurm*.log")):
        words.append(f"{path.name}: {tail(path)}")
    return "\n".join(words)


def daemon(env: dict, folder: Path, name: str, *flags) -> None:
    with open(folder / f"{name}.out", "a") as out:
        subprocess.Popen(
            [find(name), *flags],
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            start_new_session=True,
            cwd=folder,
        )


def query(env: dict, *command, seconds: float = 20) -> str:
    """What a Slurm command prints; "" where it fails, as all of them do before the controller is
    up."""
    try:
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=seconds)
    except subprocess.TimeoutExpired:
        return ""
    return done.stdout.strip()


def processes(**variables) -> list[psutil.Process]:
    """Those whose environment has all of `variables`, and what they have started (some, like
    vLLM's, overwrite their environment with a title); this process and the ones above it are left
    out."""
    own = {os.getpid()}
    own |= {process.pid for process in psutil.Process().parents()}
    matching = {}  # pid: process
    for process in psutil.process_iter():
        try:
            if process.pid in own or not variables.items() <= process.environ().items():
                continue
            for one in (process, *process.children(recursive=True)):
                matching[one.pid] = one
        except (psutil.Error, OSError):
            continue  # gone, or not ours to look at
    return [process for process in matching.values() if alive(process)]


def alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def stop(folder) -> None:
    """Ends jobs and daemons; what has not gone after a while is killed."""
    folder = Path(folder).resolve()
    env = environment(folder)
    left = processes(SLURM_CONF=env["SLURM_CONF"])
    cancel_all(env)
    for number, seconds in ((signal.SIGTERM, 20), (signal.SIGKILL, 10)):
        left = still_there(left, env)
        for process in left:
            try:
                process.send_signal(number)
            except psutil.NoSuchProcess:
                continue
        psutil.wait_procs(left, timeout=seconds)
    left = still_there(left, env)
    if left:
        raise RuntimeError(f"still there: {left}")


def cancel_all(env: dict) -> None:
    """Ends all jobs, and waits a while for it."""
    list_jobs = ("squeue", "-h", "-o", "%A")
    jobs = query(env, *list_jobs).split()
    if not jobs:
        return
    query(env, "scancel", *jobs)
    end = time.monotonic() + PATIENCE
    while query(env, *list_jobs) and time.monotonic() < end:
        time.sleep(0.2)


def still_there(before: list, env: dict) -> list[psutil.Process]:
    """Those of before that live, and those that have come since."""
    together = {*before, *processes(SLURM_CONF=env["SLURM_CONF"])}
    return [process for process in together if alive(process)]


@contextmanager
def cluster(folder):
    try:
        yield start(folder)
    finally:
        stop(folder)


def wait_until(true, seconds: float, sentence) -> None:
    end = time.monotonic() + seconds
    while not true():
        if time.monotonic() > end:
            raise TimeoutError(sentence())
        time.sleep(0.2)


def tail(path: Path, characters: int = 1500) -> str:
    return path.read_text(errors="replace")[-characters:] if path.exists() else f"no {path.name}"


if __name__ == "__main__":
    if len(sys.argv) != 3 or sys.argv[1] not in ("start", "stop"):
        sys.exit(__doc__)
    if sys.argv[1] == "stop":
        stop(sys.argv[2])
    elif reason := missing():
        sys.exit(f"error: {reason}")
    else:
        start(sys.argv[2])
        print(f"export SLURM_CONF={Path(sys.argv[2]).resolve()}/slurm.conf")
