"""weight_sync="nccl": rank 0 sends the weights straight into the memory of vLLM servers on other
GPUs, by vLLM's own weight transfer.

    transfer = NcclTransfer(engine, model, dtype)
    missing = transfer.send(named_parameters, version)

All ranks call send() together. It returns {url: sentence} for the servers that did not get the
weights. This has not been run on GPUs yet: it needs at least two, one of them a server's (python -m
server CONFIG --weight_sync=nccl). Tests cover what can be tested without GPUs.
"""

import socket
import threading
from contextlib import contextmanager

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from common import RunStopped, die, quoted
from policy import named_weights
from ranks import wait_for_gpu
from server.http import Server, on_each

# Bytes sent at a time, instead of vLLM's 1 GiB. A server needs room for three such parts in the
# tenth of its GPU that vLLM leaves beside weights and cache; on 24 or 40 GB 3 GiB don't fit there
PART = 2**28


@contextmanager
def deadline(seconds: float):
    """Ends the process if the work inside takes longer. A broadcast to a server that has died waits
    for ever, and no exception can interrupt it."""
    sentence = (
        f"weight_sync='nccl': the servers did not take the weights in {seconds:.0f} s "
        f"(rollout_timeout); has one of them died?"
    )
    timer = threading.Timer(seconds, die, (sentence, 1))
    timer.daemon = True  # otherwise a process that ends for another reason would wait for the timer
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def own_address() -> tuple[str, int]:
    """(host, port) at which the servers can reach this process."""
    from vllm.utils.network_utils import get_ip

    # not the host name at first: it may resolve to 127.0.1.1. But without a default route get_ip()
    # finds no address
    host = get_ip()
    if host == "0.0.0.0":
        host = socket.gethostname()
    # a free port; nothing reserves it until the group is made
    with socket.socket() as probe:
        probe.bind(("", 0))
        return host, probe.getsockname()[1]


class NcclTransfer:
    """Broadcasts the weights from rank 0 to every worker of every server, a few parameters at a
    time, in an NCCL group. The group is made anew whenever other servers take part than before. To
    vLLM's trainer side this object is both the client (it makes requests to the servers) and the
    source (it yields the weights). engine: the ServerEngine that this belongs to."""

    def __init__(self, engine, model: str, dtype: torch.dtype):
        from vllm.distributed.weight_transfer.base import ParamMeta

        self.engine = engine
        self.members = []  # servers in the group
        self.sizes = []  # number of workers of each
        self.sender = None  # vLLM's object for this process's end of the group
        self.weights = None  # the iterator that is being sent
        # servers must know names and shapes before the weights come. meta: takes no memory
        with torch.device("meta"):
            lm = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model))
        self.parameters = []
        for name, tensor in named_weights(lm, 0):
            self.parameters.append(ParamMeta(name=name, dtype=dtype, shape=tuple(tensor.shape)))

    def send(self, named_parameters, version: str) -> dict[str, str]:
        self.weights = named_parameters
        missing, unchanged = self.engine.on_rank_0(self.look)
        members = [server for server in self.engine.servers if server.url not in missing]
        if not members:
            return missing
        with deadline(self.engine.seconds):
            # a group can't change its members, so a new one is made
            if members != self.members or not unchanged:
                self.connect(members)
            self.sender.send_weights()

        def seal() -> dict[str, str]:
            return on_each(members, lambda server: server.seal(version))

        return missing | self.engine.on_rank_0(seal)

    def look(self) -> tuple[dict[str, str], bool]:
        """Returns {url: sentence} for the servers that don't answer, and whether all others still
        hold the weights that were sent last. A server that was restarted meanwhile does not: it is
        no longer in the group, and a broadcast would wait for it for ever."""
        versions = set()

        def ask(server: Server) -> None:
            versions.add(self.engine.checked_version(server))

        missing = on_each(self.engine.servers, ask)
        return missing, versions == {self.engine.version}

    def connect(self, members: list[Server]) -> None:
        """Makes a group of rank 0 and the workers of these servers."""
        from vllm.distributed.weight_transfer.nccl_engine import (
            NCCLTrainerInitInfo,
            NCCLTrainerWeightTransferEngine,
        )

        self.members = members
        if self.sender is not None:
            self.sender.shutdown()
        self.sizes, host, port = self.engine.on_rank_0(self.prepare)
        info = NCCLTrainerInitInfo(
            rank=self.engine.rank,
            master_address=host,
            master_port=port,
            world_size=1 + sum(self.sizes),
            packed_buffer_size_bytes=PART,
        )
        self.sender = NCCLTrainerWeightTransferEngine.trainer_init(info, client=self, source=self)

    def prepare(self) -> tuple[list[int], str, int]:
        """Makes the servers leave their old group. Returns the number of workers of each, and the
        host and port of the new group."""
        # errors are ignored: a server may not be in a group
        on_each(self.members, lambda server: server.call("/shutdown_weight_transfer_engine", {}))
        sizes = []
        for server in self.members:
            answer = server.call("/get_world_size")
            try:
                sizes.append(int(answer["world_size"]))
            except (LookupError, TypeError, ValueError):
                raise RunStopped(
                    f"weight_sync='nccl': {server.url}/get_world_size gave {quoted(answer)}, which "
                    f"is no number of workers"
                ) from None
        return sizes, *own_address()

    def close(self) -> None:
        pass  # the group ends with the process

    # --- the methods that vLLM's trainer side calls on its source

    def metadata(self) -> list:
        return self.parameters

    def __iter__(self):
        """Yields the weights. vLLM reads them in CUDA streams of its own, which don't wait for
        ours: a weight must be computed before it is yielded. And vLLM keeps some until they make
        up a part, so each needs memory of its own, which policy.whole() sees to under ZeRO 3."""
        weights = iter(self.weights)
        while True:
            wait_for_gpu()
            item = next(weights, None)
            if item is None:
                return
            wait_for_gpu()
            yield item

    # --- and on its client: each makes the same request to every server. The first and third are
    # called in a thread, while this process waits for the servers in NCCL

    def init_weight_transfer_engine(self, init_info: dict) -> None:
        bodies = {}
        offset = 1  # a server's first rank in the group, in which rank 0 of the run is rank 0
        for server, size in zip(self.members, self.sizes):
            bodies[server.url] = {"init_info": init_info | {"rank_offset": offset}}
            offset += size
        self.tell_all_or_die("/init_weight_transfer_engine", bodies)

    def start_weight_update(self) -> None:
        self.tell_all("/start_weight_update", {})

    def update_weights(self, update_info: dict) -> None:
        body = {"update_info": update_info}
        bodies = {server.url: body for server in self.members}
        self.tell_all_or_die("/update_weights", bodies)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self.tell_all("/finish_weight_update", {})

    def tell_all(self, path: str, bodies: dict[str, dict]) -> None:
        """POSTs to all servers at once; bodies: {url: body}, an empty body for those not in it.
        RunStopped if a request fails."""
        failed = on_each(self.members, lambda server: server.call(path, bodies.get(server.url, {})))
        if failed:
            raise RunStopped(f"weight_sync='nccl': {'; '.join(failed.values())}")

    def tell_all_or_die(self, path: str, bodies: dict[str, dict]) -> None:
        """tell_all(), but if a request fails the process ends at once: in NCCL it would wait for
        that server until the deadline, and hear of the error only then."""
        try:
            self.tell_all(path, bodies)
        except RunStopped as error:
            die(f"{error}; start the servers again: they may hold a part of the new weights", 1)
