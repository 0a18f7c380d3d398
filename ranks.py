"""The processes of a run: how they start, agree and leave together. They talk over gloo on a CPU,
over NCCL on GPUs. A single process is a world of size 1.

    world = start_distributed()             # rank, size, device
    metrics = mean_over_ranks(metrics)      # this rank's metrics -> the run's
    leave_together(sampler)

An error that one rank raises alone would leave the others waiting in the next collective. So every
rank judges what all ranks know (gathered rewards, reduced sums) in the same way, and what only one
rank knows is shared first: by any_rank() and gather_objects(), for servers by all_or_none() and
on_rank_0() of server/engine.py. For everything else (a full disk, a crash, a lost machine) there is
the Heartbeat: the other ranks leave within a minute.
"""

import contextlib
import os
import secrets
import select
import socket
import threading
import time
import warnings
from datetime import timedelta
from itertools import zip_longest
from pathlib import Path
from typing import NamedTuple

import deepspeed
import torch
import torch.distributed as dist
import transformers

from common import (
    DEADLINE,
    RunStopped,
    UserError,
    under_torchrun,
    usable_cores,
    write_stderr,
)

MEETING_SECONDS = 45  # how long ranks started by hand wait for each other
HELLO_SECONDS = 10  # for the one line that a rank sends as soon as it is connected
# How many beats (one a second) without a sign of life make a rank count as dead. Low enough that
# the others leave within a minute; high enough for any call that blocks Python on a living rank.
SILENCE = 45
# Beats between the end of one rank and the end of the others, so that they can print an error of
# their own first.
GRACE = 5

if not torch.cuda.is_available():
    # plain gloo: DeepSpeed's shm_comm needs a C++ compiler and half a minute to build
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def refuse_idle_gpu() -> None:
    """UserError if there is a GPU, or the environment asks for one, but this torch can't use it.
    Otherwise the run would silently use the CPU and take weeks."""
    if torch.cuda.is_available():
        return
    asked = os.environ.get("CUDA_VISIBLE_DEVICES")
    if asked is None:
        why = "there is a GPU, /dev/nvidia0"
        wanted = Path("/dev/nvidia0").exists()  # the driver's file of the first GPU
    else:
        why = f"CUDA_VISIBLE_DEVICES={asked} asks for a GPU"
        wanted = asked not in ("", "-1", "NoDevFiles")  # some versions of Slurm set NoDevFiles
    if wanted:
        raise UserError(
            f"{why}, but torch {torch.__version__} can't use it: torch is built for CPUs (run "
            f"`make env` on a machine with a GPU), the driver is too old, or this job was not "
            f"given the GPU; to run on the CPU, set CUDA_VISIBLE_DEVICES to nothing"
        )


def refuse_too_many_ranks() -> None:
    """UserError if this machine has GPUs, but fewer than ranks."""
    gpus = torch.cuda.device_count()
    if torch.cuda.is_available() and int(os.environ["LOCAL_RANK"]) >= gpus:
        raise UserError(
            f"there are more ranks on this machine than its {gpus} GPU(s): launch with "
            f"--nproc_per_node={gpus}"
        )


def check_environment() -> None:
    """UserError if RANK is set but the variables that belong with it are missing or wrong, as may
    happen when ranks are started by hand."""
    numbers = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_PORT")
    wrong = [name for name in numbers if not os.environ.get(name, "").isdecimal()]  # "-1" too
    if not os.environ.get("MASTER_ADDR"):
        wrong.append("MASTER_ADDR")
    if "MASTER_PORT" not in wrong and int(os.environ["MASTER_PORT"]) > 65535:
        wrong.append("MASTER_PORT")
    if wrong:
        raise UserError(
            f"RANK={os.environ['RANK']!r} is in the environment without a usable "
            f"{', '.join(wrong)}: start the ranks with torchrun, or unset RANK for a single process"
        )


def meet():
    """Waits until all ranks have started. Returns the TCPStore where they met, None for one rank.
    RunStopped, naming the missing ranks, after MEETING_SECONDS.

    Only needed for ranks started by hand: torchrun itself notices when a rank dies and ends the
    others."""
    rank = int(os.environ["RANK"])
    world = int(os.environ["WORLD_SIZE"])
    if world == 1:
        return None
    host = os.environ["MASTER_ADDR"]
    port = int(os.environ["MASTER_PORT"])
    place = f"rank {rank} of {world} waits at {host}:{port} (MASTER_ADDR, MASTER_PORT)"
    end = time.monotonic() + MEETING_SECONDS
    if rank > 0:  # rank 0 is the one that listens
        wait_for_port(host, port, end, place)
    try:
        store = dist.TCPStore(
            host,
            port,
            world,
            is_master=rank == 0,
            timeout=timedelta(seconds=MEETING_SECONDS),  # for each request to the store
            wait_for_workers=False,  # that wait would not say who is missing
            multi_tenant=True,  # lets the process group's own store use the same port
        )
        store.set(f"here/{rank}", "")
        # every rank asks the store itself, so that each can name who is missing
        while missing := [str(i) for i in range(world) if not store.check([f"here/{i}"])]:
            if time.monotonic() > end:
                raise RunStopped(
                    f"{place}; missing after {MEETING_SECONDS} s: {', '.join(missing)}"
                )
            time.sleep(0.2)  # seconds
    except dist.DistError as error:
        raise RunStopped(f"{place}, but lost rank 0: {str(error).splitlines()[0]}") from None
    return store


def wait_for_port(host: str, port: int, end: float, place: str) -> None:
    """Waits until rank 0 listens at host:port. TCPStore itself would wait twice as long and fill
    the screen."""
    while True:
        try:
            socket.create_connection((host, port), timeout=5).close()
            return
        except OSError as error:
            if time.monotonic() > end:
                raise RunStopped(
                    f"{place}, but after {MEETING_SECONDS} s rank 0 is not there ({error})"
                ) from None
        time.sleep(0.2)


class World(NamedTuple):
    """The ranks of a run, as one of them sees them."""

    rank: int
    size: int
    device: torch.device

    def share(self, count: int) -> range:
        """Which of a step's `count` prompts, or groups, are this rank's: every rank has the same
        number, in rank order."""
        local = count // self.size
        return range(self.rank * local, (self.rank + 1) * local)


def start_distributed(silence: int = SILENCE) -> World:
    """Starts the process group and, with several ranks, the heartbeat. A process started without
    torchrun becomes a world of size 1. silence: how many beats (seconds) without a sign of life
    make a rank count as dead."""
    if "RANK" not in os.environ:  # started without torchrun
        be_alone()
    refuse_idle_gpu()
    check_environment()
    refuse_too_many_ranks()
    # kept alive until the process group has a store of its own
    store = None if under_torchrun() else meet()
    if torch.cuda.is_available():
        backend = "nccl"
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)  # else all ranks would use GPU 0
        # barriers use this device too, which torch would otherwise report at every start
        warnings.filterwarnings("ignore", message=r"barrier\(\): using the device")
    else:
        backend = "gloo"
        device = torch.device("cpu")
    # ZeRO's own calls of torch: every rank would report them at every start
    warnings.filterwarnings("ignore", message=r"`torch\.distributed\..*deprecated")
    if "OMP_NUM_THREADS" not in os.environ:
        # torch counts the machine's cores, of which a container may have only a share
        torch.set_num_threads(min(torch.get_num_threads(), usable_cores()))
    deepspeed.utils.logger.setLevel("ERROR")
    # there would be a bar per rank, for files that load in no time
    transformers.utils.logging.disable_progress_bar()
    if not dist.is_initialized():
        # not by DeepSpeed, which binds each of several ranks to its GPU. Every new group, of vLLM's
        # too and even one for CPUs, would then split NCCL's communicator at once: all ranks have to
        # come, and those outside of the group wait with Python locked, without a heartbeat
        dist.init_process_group(backend, timeout=DEADLINE)
    deepspeed.init_distributed(dist_backend=backend, verbose=False)  # takes torch's group
    del store
    if dist.get_world_size() > 1 and not hearts:
        hearts.append(Heartbeat(connect_ranks(), silence))
        threading.Thread(target=hearts[0].run, daemon=True).start()
    return World(dist.get_rank(), dist.get_world_size(), device)


def be_alone() -> None:
    """Sets the environment variables that torchrun sets for a single process, with a free port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))  # 0: the system picks a free port
        port = probe.getsockname()[1]
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", LOCAL_WORLD_SIZE="1")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))


def leave_together(sampler=None) -> None:
    """Ends a script; all ranks call it. No rank leaves while another still writes, and the sampler,
    if there is one, closes before the process group."""
    dist.barrier()
    while hearts:
        hearts.pop().part()
    if sampler is not None:
        sampler.close()
    if dist.is_initialized():  # vLLM's close() may have destroyed it already
        dist.destroy_process_group()


# --- Dead ranks. If one rank dies under NCCL, the others wait in a collective, where Python handles
# --- no signals, until somebody kills them, and nothing says why. The heartbeat, a thread on every
# --- rank, notices the death and ends them with a sentence.


hearts = []  # this process's Heartbeat, from start_distributed to leave_together
FAREWELL = b"bye"


class Peer:
    """A rank at the other end of a connection."""

    def __init__(self, rank: int, connection: socket.socket, place: str):
        self.rank = rank
        self.connection = connection
        self.place = place  # host and process id
        self.silent = 0  # beats of ours since it was last heard
        self.ended = False  # the connection is closed: its process is gone
        self.words = b""  # the beginning of a line whose end has not come yet
        connection.setblocking(False)

    def send(self, line: bytes) -> None:
        # errors are ignored: a broken connection also shows in hear()
        with contextlib.suppress(OSError):
            self.connection.send(line + b"\n")

    def hear(self) -> list[bytes]:
        """The lines that have arrived. An empty line is a beat."""
        self.silent = 0
        try:
            received = self.connection.recv(4096)
        except BlockingIOError:
            return []
        except OSError:  # reset: its process was killed
            received = b""
        if not received:
            self.ended = True
        *lines, self.words = (self.words + received).split(b"\n")
        return lines


class Heartbeat:
    """Rank 0 exchanges beats with every other rank, and passes on the news of a dead rank. Silence
    is counted in this rank's own beats, not in seconds: if the whole run is suspended and then
    continued, no beat is missed."""

    def __init__(self, peers: list[Peer], silence: int):
        self.peers = peers
        self.silence = silence
        self.parted = False

    def run(self) -> None:
        while not self.parted and self.peers:
            verdict = self.listen(1.0) or self.beat()
            if verdict:
                self.leave(verdict)

    def listen(self, seconds: float) -> str:
        """Reads from the peers for `seconds`. Returns a sentence about a dead rank as soon as a
        peer sends one, else ""."""
        end = time.monotonic() + seconds
        left = seconds
        while left > 0:
            awake = {peer.connection.fileno(): peer for peer in self.peers if not peer.ended}
            poll = select.poll()
            for number in awake:
                poll.register(number, select.POLLIN)
            # with no connection registered, poll() only waits
            for number, _ in poll.poll(left * 1000):  # milliseconds
                peer = awake[number]
                for line in peer.hear():
                    if line == FAREWELL:
                        self.peers.remove(peer)
                    elif line:
                        return line.decode()
            left = end - time.monotonic()
        return ""

    def beat(self) -> str:
        """Sends a beat to all peers. Returns a sentence if one of them is dead, else ""."""
        for peer in self.peers:
            peer.send(b"")
            peer.silent += 1
            who = f"rank {peer.rank} ({peer.place})"
            if peer.ended:
                if peer.silent > GRACE:
                    return f"{who} is gone"
            elif peer.silent > self.silence:
                return (
                    f"{who} has not been heard for {self.silence} s: stopped, or its host is lost"
                )
        return ""

    def leave(self, verdict: str) -> None:
        """Ends this process, even in the middle of a collective, and makes the other ranks end."""
        if self.parted:
            return
        for peer in self.peers:
            peer.send(verdict.encode())
        write_stderr(
            f"error: {verdict}; this rank leaves too (the other's own message, if any, is above or "
            f"below)"
        )
        self.see_off()
        os._exit(1)

    def see_off(self) -> None:
        """Waits up to GRACE seconds for the peers to end, so that rank 0 leaves last: if it ended
        first, that would break the others' collective, and they would blame rank 0."""
        end = time.monotonic() + GRACE
        # > 1: the rank that the verdict is about may hang and never end
        while sum(not peer.ended for peer in self.peers) > 1 and time.monotonic() < end:
            self.listen(0.1)

    def part(self) -> None:
        """Says goodbye, so that the peers don't take this rank's regular end for a death."""
        self.parted = True
        for peer in list(self.peers):
            peer.send(FAREWELL)


def connect_ranks() -> list[Peer]:
    """Connects this rank to rank 0, or rank 0 to all others. RunStopped if that fails."""
    place = f"{socket.gethostname()}, process {os.getpid()}"
    listener = None
    message = [None]
    if dist.get_rank() == 0:
        both = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if both else socket.AF_INET
        listener = socket.create_server(("", 0), family=family, dualstack_ipv6=both)
        send_at_once(listener)
        # with a secret, because strangers may reach the port too
        message = [(listener.getsockname()[1], secrets.token_hex(16), place)]
    dist.broadcast_object_list(message)
    port, secret, place_of_0 = message[0]
    if listener:
        with listener:
            return wait_for_peers(listener, secret)
    host = os.environ["MASTER_ADDR"]
    try:
        connection = socket.create_connection((host, port), timeout=MEETING_SECONDS)
        send_at_once(connection)
        connection.sendall(f"{secret} {dist.get_rank()} {place}\n".encode())
    except OSError as error:
        raise RunStopped(
            f"rank {dist.get_rank()} can't reach rank 0 at {host}:{port}, the connection by which "
            f"ranks notice that one has died ({error})"
        ) from None
    return [Peer(0, connection, place_of_0)]


def send_at_once(connection: socket.socket) -> None:
    """Sets TCP_NODELAY on a connection, or on a listener for all that it accepts. Otherwise TCP
    holds a verdict back until the beat before it is acknowledged, and drops it if this process ends
    meanwhile with a beat of the other side unread."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def wait_for_peers(listener: socket.socket, secret: str) -> list[Peer]:
    """Rank 0's connections to the other ranks, as they come in. RunStopped after
    MEETING_SECONDS, however many strangers call."""
    missing = set(range(1, dist.get_world_size()))
    peers = []
    end = time.monotonic() + MEETING_SECONDS
    while missing:
        try:
            listener.settimeout(left(end))
            connection, _ = listener.accept()
        except OSError as error:
            raise RunStopped(
                f"ranks {sorted(missing)} have not reached rank 0 at port "
                f"{listener.getsockname()[1]} of its host, the connection by which ranks notice "
                f"that one has died ({error})"
            ) from None
        hello = read_hello(connection, min(end, time.monotonic() + HELLO_SECONDS))
        said, _, rest = hello.decode(errors="replace").strip().partition(" ")
        rank, _, place = rest.partition(" ")
        if secrets.compare_digest(said.encode(), secret.encode()) and int(rank) in missing:
            missing.remove(int(rank))
            peers.append(Peer(int(rank), connection, place))
        else:
            connection.close()  # a stranger
    return peers


def read_hello(connection: socket.socket, end: float) -> bytes:
    """The line that a rank sends as soon as it is connected; from a stranger, whatever it sends
    before the moment `end`, 500 bytes at most."""
    hello = b""
    with contextlib.suppress(OSError):  # a stranger may send nothing, or hang up
        while len(hello) < 500 and not hello.endswith(b"\n"):
            connection.settimeout(left(end))
            received = connection.recv(1)  # byte by byte: what follows the line is for Peer
            if not received:
                break
            hello += received
    return hello


def left(end: float) -> float:
    """Seconds until the moment `end` of time.monotonic(); TimeoutError, an OSError, if it has
    passed."""
    seconds = end - time.monotonic()
    if seconds <= 0:
        raise TimeoutError("timed out")
    return seconds


# --- how ranks agree: all ranks call these functions together


def wait_for_gpu() -> None:
    """Waits until this rank's GPU, if it has one, has finished all its work, on every stream."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def wait_for_ranks(timer) -> None:
    """Waits until all ranks are here, and counts that time as "time/wait". It is called where ranks
    meet after work of their own, so the metric shows how long a rank waits for slower ones."""
    wait_for_gpu()  # work left on this rank's own GPU must not count as waiting
    with timer("wait"):
        dist.barrier()


def collective_device() -> str:
    """The device on which the backend, NCCL or gloo, wants a tensor."""
    return "cuda" if dist.get_backend() == "nccl" else "cpu"


def across_ranks(tensor, op=dist.ReduceOp.SUM):
    """`tensor` reduced over all ranks, on the CPU. The argument is not changed."""
    reduced = tensor.to(collective_device(), copy=True)
    dist.all_reduce(reduced, op)
    return reduced.cpu()


def mean_over_ranks(metrics: dict) -> dict:
    """The mean over all ranks of each metric. Every rank must have the same keys in the same
    order."""
    # one collective for all metrics
    means = across_ranks(torch.tensor(list(metrics.values()))) / dist.get_world_size()
    return dict(zip(metrics, means.tolist()))


def any_rank(flag: bool) -> bool:
    """Whether `flag` is true on any rank."""
    return bool(across_ranks(torch.tensor(int(flag)), dist.ReduceOp.MAX))


def gather_rows(tensor):
    """(n, ...) of each rank -> (ranks * n, ...) in rank order, as float32 on the CPU; n is the same
    on all ranks. For values per prompt or completion: they are few, so every rank works on all."""
    local = tensor.float().to(collective_device()).contiguous()  # (n, ...)
    parts = [torch.empty_like(local) for _ in range(dist.get_world_size())]  # all_gather fills them
    dist.all_gather(parts, local)
    return torch.cat(parts).cpu()  # (ranks * n, ...)


def gather_objects(value) -> list:
    """The values of all ranks, in rank order; for values that are not tensors."""
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def check_alike(settings: dict) -> None:
    """RunStopped, on all ranks alike, if a rank differs from rank 0 in how it was started or in its
    versions of packages. Such ranks would train different things, or wait for each other in
    different collectives. settings: config, flags, hashes of data, without NaN. All ranks call this
    together."""
    packages = {m.__name__: m.__version__ for m in (torch, transformers, deepspeed)}
    first, *others = gather_objects(settings | packages)
    for rank, other in enumerate(others, start=1):
        for what in first | other:  # a rank with other code has other keys
            if first.get(what) != other.get(what):
                expected, given = differing_parts(repr(first.get(what)), repr(other.get(what)))
                raise RunStopped(
                    f"rank {rank} was started with {what}={given} and rank 0 with {expected}: "
                    f"start all ranks with the same command, code, packages and data"
                )


def differing_parts(one: str, other: str) -> list[str]:
    """Both texts; if one is longer than 400 characters, only 400 of each, around the first that
    differs: a mixture may differ at its end only, and common.die() cuts long errors in the
    middle."""
    start = 0
    if max(len(one), len(other)) > 400:
        pairs = enumerate(zip_longest(one, other))
        same = next((i for i, (a, b) in pairs if a != b), 0)  # characters before the difference
        start = max(0, same - 200)
    parts = []
    for text in (one, other):
        part = text[start : start + 400]
        parts.append("..." * (start > 0) + part + "..." * (start + 400 < len(text)))
    return parts
