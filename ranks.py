"""The processes of a run: how they start, agree and leave together. gloo on a CPU, NCCL on GPUs;
one process is a world of one.

    world = start_distributed()             # rank, size, device
    metrics = mean_over_ranks(metrics)      # how a local metric becomes one of the run
    leave_together(sampler)
"""

import contextlib
import os
import secrets
import select
import socket
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

import deepspeed
import torch
import torch.distributed as dist
import transformers

import rollout
from checks import entries
from common import DEADLINE, RunStopped, UserError, check_writable, say, under_torchrun
from policy import dtype_of, named_weights

MEETING_SECONDS = 45  # that ranks started by hand wait for each other
HELLO_SECONDS = 10  # for the one line that a rank says as soon as it is connected
# beats of the heartbeat, one a second: the others leave within a minute, and no rank keeps Python
# busy for so long in one call
SILENCE = 45
GRACE = 5  # beats from the end of a rank to that of the others, who may have words of their own

if not torch.cuda.is_available():
    # plain gloo: DeepSpeed's own needs a C++ compiler and half a minute
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def refuse_idle_gpu() -> None:
    """UserError where a GPU is there or asked for that this torch can't use: the run would take
    weeks on the CPU without a word."""
    if torch.cuda.is_available():
        return
    asked = os.environ.get("CUDA_VISIBLE_DEVICES")
    if asked is None:
        why = "there is a GPU, /dev/nvidia0"
        wanted = Path("/dev/nvidia0").exists()  # the driver's file of the first GPU
    else:
        why = f"CUDA_VISIBLE_DEVICES={asked} asks for a GPU"
        wanted = asked not in ("", "-1", "NoDevFiles")  # the last is some Slurms' word for none
    if wanted:
        raise UserError(
            f"{why}, but torch {torch.__version__} can use none: a build for CPUs (run `make env` "
            f"on a machine with a GPU), a driver that is too old, or a GPU that this job was not "
            f"given; to run on the CPU set CUDA_VISIBLE_DEVICES to nothing"
        )


def check_environment() -> None:
    """UserError for a rank that does not know its place, as one that was started by hand may
    not."""
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
    """Waits until all ranks have started. Returns the store that they met at, None for one rank.
    After MEETING_SECONDS it is a RunStopped that names the missing ranks.

    Only for ranks started by hand: torchrun sees a rank that dies, and ends the others."""
    rank = int(os.environ["RANK"])
    world = int(os.environ["WORLD_SIZE"])
    if world == 1:
        return None
    host = os.environ["MASTER_ADDR"]
    port = int(os.environ["MASTER_PORT"])
    place = f"rank {rank} of {world} waits at {host}:{port} (MASTER_ADDR, MASTER_PORT)"
    end = time.monotonic() + MEETING_SECONDS
    if rank > 0:  # rank 0 is who listens
        wait_for_port(host, port, end, place)
    try:
        store = dist.TCPStore(
            host,
            port,
            world,
            is_master=rank == 0,
            timeout=timedelta(seconds=MEETING_SECONDS),  # of each request to the store
            wait_for_workers=False,  # it would wait without saying who is missing
            multi_tenant=True,  # the process group's own store is then on the same port
        )
        store.set(f"here/{rank}", "")
        # every rank looks for itself, so each can name who is missing
        while missing := [str(i) for i in range(world) if not store.check([f"here/{i}"])]:
            if time.monotonic() > end:
                raise RunStopped(
                    f"{place}, and after {MEETING_SECONDS} s missing are: {', '.join(missing)}"
                )
            time.sleep(0.2)  # seconds
    except dist.DistError as error:
        raise RunStopped(f"{place}, and lost rank 0: {str(error).splitlines()[0]}") from None
    return store


def wait_for_port(host: str, port: int, end: float, place: str) -> None:
    """Until rank 0 listens there. TCPStore would wait twice as long, and fill the screen."""
    while True:
        try:
            socket.create_connection((host, port), timeout=5).close()
            return
        except OSError as error:
            if time.monotonic() > end:
                raise RunStopped(
                    f"{place}, and after {MEETING_SECONDS} s rank 0 is not there ({error})"
                ) from None
        time.sleep(0.2)


class World(NamedTuple):
    """The ranks of a run, as one of them sees them."""

    rank: int
    size: int
    device: torch.device


def start_distributed(silence: int = SILENCE) -> World:
    """Starts the process group and the heartbeat beside it; one process without torchrun is a
    world of one. silence: beats (seconds) after which a rank that is not heard counts as dead."""
    if "RANK" not in os.environ:  # started without torchrun
        be_alone()
    refuse_idle_gpu()
    check_environment()
    store = None if under_torchrun() else meet()  # kept until the process group has its own
    if torch.cuda.is_available():
        backend = "nccl"
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)  # else NCCL of all ranks would meet on GPU 0
    else:
        backend = "gloo"
        device = torch.device("cpu")
    deepspeed.utils.logger.setLevel("ERROR")
    # of files that load in a blink, once per rank
    transformers.utils.logging.disable_progress_bar()
    deepspeed.init_distributed(dist_backend=backend, timeout=DEADLINE, verbose=False)
    del store
    if dist.get_world_size() > 1 and not hearts:
        hearts.append(Heartbeat(connect_ranks(), silence))
        threading.Thread(target=hearts[0].run, daemon=True).start()
    return World(dist.get_rank(), dist.get_world_size(), device)


def be_alone() -> None:
    """Tells this process what torchrun would tell a single one, with a port that is free."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))  # 0: the system picks one that is free
        port = probe.getsockname()[1]
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))


def check_tensor_parallel(c: dict, world: int) -> None:
    """UserError where the ranks can't be shared out among the engines."""
    size = entries(c, "vllm_options")["tensor_parallel_size"]
    if world % size:  # an engine is as many ranks as it has parts
        raise UserError(
            f"vllm_options.tensor_parallel_size={size} must divide the number of ranks, {world}"
        )


def start_sampler(c: dict, device):
    """The rollout engine with the weights of config["model"], for scripts that do not train."""
    check_tensor_parallel(c, dist.get_world_size())
    serves = c["rollout_engine"] == "server"
    if serves and "/" in c["weight_sync"]:
        check_writable("weight_sync", c["weight_sync"], folder=True)
    sampler = rollout.start_engine(c, device)
    if serves:  # it may hold the weights of another model
        lm = transformers.AutoModelForCausalLM.from_pretrained(c["model"], dtype=dtype_of(c))
        sampler.sync(named_weights(lm.to(device), 0))
    return sampler


def leave_together(sampler=None) -> None:
    """The end of a script, all ranks: nobody goes while another still writes, and the engine, if
    any, goes before the process group."""
    dist.barrier()
    while hearts:
        hearts.pop().part()
    if sampler is not None:
        sampler.close()
    if dist.is_initialized():  # vLLM takes it down itself
        dist.destroy_process_group()


# --- a rank that is dead: under NCCL the others would wait in a collective, where Python hears no
# --- signal, and be killed without a word


hearts = []  # the heartbeat of this process, from start_distributed to leave_together
FAREWELL = b"bye"


class Peer:
    """A rank at the other end of a connection."""

    def __init__(self, rank: int, connection: socket.socket, place: str):
        self.rank = rank
        self.connection = connection
        self.place = place  # host and process
        self.silent = 0  # beats of ours since it was heard
        self.ended = False  # its process is gone, or it hung up
        self.words = b""  # half a line
        connection.setblocking(False)

    def send(self, line: bytes) -> None:
        # what can't be sent shows when nothing is heard, too
        with contextlib.suppress(OSError):
            self.connection.send(line + b"\n")

    def hear(self) -> list[bytes]:
        """The lines that have come; an empty one is a beat."""
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
    """Rank 0 hears every rank and every rank hears rank 0, which passes on what it finds out. Time
    is counted in own beats: a run that is suspended as a whole, and continued, has missed none."""

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
        """Hears the others for so long. What another rank says of a dead one, else ""."""
        end = time.monotonic() + seconds
        left = seconds
        while left > 0:
            awake = {peer.connection.fileno(): peer for peer in self.peers if not peer.ended}
            poll = select.poll()
            for number in awake:
                poll.register(number, select.POLLIN)
            # without connections it only waits
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
        """One beat to all. A sentence about a rank that is dead, else ""."""
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
        """Ends this process, in the middle of a collective too, and has the others end theirs."""
        if self.parted:
            return
        for peer in self.peers:
            peer.send(verdict.encode())
        say(f"error: {verdict}; this rank leaves too (its own words, if any, are above or below)")
        self.see_off()
        os._exit(1)

    def see_off(self) -> None:
        """Rank 0 leaves last: where its end broke their collective first, others would blame it."""
        end = time.monotonic() + GRACE
        # of the one that the verdict is about no end may come
        while sum(not peer.ended for peer in self.peers) > 1 and time.monotonic() < end:
            self.listen(0.1)

    def part(self) -> None:
        """Before a rank that has done its work goes."""
        self.parted = True
        for peer in list(self.peers):
            peer.send(FAREWELL)


def connect_ranks() -> list[Peer]:
    """Connections of this rank to rank 0, or of rank 0 to all. RunStopped where there is none."""
    place = f"{socket.gethostname()}, process {os.getpid()}"
    listener = None
    message = [None]
    if dist.get_rank() == 0:
        both = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if both else socket.AF_INET
        listener = socket.create_server(("", 0), family=family, dualstack_ipv6=both)
        send_at_once(listener)
        # a secret: strangers may reach the port too
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
            f"rank {dist.get_rank()} can't reach rank 0 at {host}:{port}, by which ranks notice "
            f"that one has died ({error})"
        ) from None
    return [Peer(0, connection, place_of_0)]


def send_at_once(connection: socket.socket) -> None:
    """For a connection, or for all that a listener will accept. Else TCP holds a verdict back until
    the beat before it is acknowledged, and drops it if this process ends before with a beat of the
    other side unread."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def wait_for_peers(listener: socket.socket, secret: str) -> list[Peer]:
    """Rank 0's connections to the others."""
    missing = set(range(1, dist.get_world_size()))
    peers = []
    listener.settimeout(MEETING_SECONDS)
    while missing:
        try:
            connection, _ = listener.accept()
        except OSError as error:
            raise RunStopped(
                f"rank 0 was not reached by {sorted(missing)} at port {listener.getsockname()[1]} "
                f"of its host, by which ranks notice that one has died ({error})"
            ) from None
        hello = b""
        connection.settimeout(HELLO_SECONDS)
        with contextlib.suppress(OSError):  # a stranger says nothing, or hangs up
            hello = connection.makefile("rb", buffering=0).readline(500)
        said, _, rest = hello.decode(errors="replace").strip().partition(" ")
        rank, _, place = rest.partition(" ")
        if secrets.compare_digest(said.encode(), secret.encode()) and int(rank) in missing:
            missing.remove(int(rank))
            peers.append(Peer(int(rank), connection, place))
        else:
            connection.close()  # a stranger
    return peers


# --- how ranks agree: all call these together, and get the same answer


def wait_for_ranks(timer) -> None:
    """Until all ranks are here: "time/wait" is how long this one waits for slower ones, where they
    meet for the first time after work of their own."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()  # what this rank's own GPU has yet to do is no waiting
    with timer("wait"):
        dist.barrier()


def collective_device() -> str:
    """Where NCCL and gloo want a tensor."""
    return "cuda" if dist.get_backend() == "nccl" else "cpu"


def across_ranks(tensor, op=dist.ReduceOp.SUM):
    """`tensor` reduced over all ranks, on the CPU; the argument stays as it is."""
    reduced = tensor.to(collective_device(), copy=True)
    dist.all_reduce(reduced, op)
    return reduced.cpu()


def mean_over_ranks(metrics: dict) -> dict:
    """A rank's own metrics as means over all ranks: how a local metric becomes one of the run."""
    # one collective for all; the keys must be the same, in the same order, on every rank
    means = across_ranks(torch.tensor(list(metrics.values()))) / dist.get_world_size()
    return dict(zip(metrics, means.tolist()))


def any_rank(flag: bool) -> bool:
    """Whether it is true on any rank."""
    return bool(across_ranks(torch.tensor(int(flag)), dist.ReduceOp.MAX))


def gather_groups(tensor):
    """The groups of all ranks: from (P / world, G) on each to (P, G), in rank order, on the CPU.
    Group quantities are small, so every rank works on all of them."""
    local = tensor.float().to(collective_device()).contiguous()  # (P / world, G)
    parts = [torch.empty_like(local) for _ in range(dist.get_world_size())]  # all_gather fills them
    dist.all_gather(parts, local)
    return torch.cat(parts).cpu()  # (P, G)


def gather_objects(value) -> list:
    """What every rank gave, in rank order: for what is no tensor."""
    everyones = [None] * dist.get_world_size()
    dist.all_gather_object(everyones, value)
    return everyones
