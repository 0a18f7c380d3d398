"""weight_sync="nccl": weights from rank 0 straight into the memory of vLLM servers on other GPUs,
by vLLM's own weight transfer.

    transfer = NcclTransfer(engine, model, dtype)
    missing = transfer.send(named_parameters, version)

All ranks together; {url: sentence} of the servers that did not get the weights. Not run yet: it
needs at least two GPUs, of which one belongs to a server (python -m server CONFIG
--weight_sync=nccl). What can be tested without is.
"""

import socket
import threading
from contextlib import contextmanager

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from common import RunStopped, leave
from policy import named_weights
from server.http import Server, on_each


@contextmanager
def deadline(seconds: float):
    """Ends the process if the work inside takes longer: a broadcast to a server that has died waits
    for ever, and no exception reaches it."""
    sentence = (
        f"weight_sync='nccl': the servers did not take the weights in {seconds:.0f} s "
        f"(rollout_timeout); has one of them died?"
    )
    timer = threading.Timer(seconds, leave, (sentence, 1))
    timer.daemon = True  # or a process that ends for another reason would wait for it
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def own_address() -> tuple[str, int]:
    """Where the servers meet this process."""
    from vllm.utils.network_utils import get_ip

    # the host's own name may lead to 127.0.1.1; but without a default route vLLM finds no address
    host = get_ip()
    if host == "0.0.0.0":
        host = socket.gethostname()
    # a free port, which nobody else should take until the group is there
    with socket.socket() as probe:
        probe.bind(("", 0))
        return host, probe.getsockname()[1]


def wait_for_gpu() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


class NcclTransfer:
    """From rank 0 to every worker of every server, a few parameters at a time. The group is made
    anew whenever other servers take part than the last time. It is also what vLLM's trainer side
    calls a client and a source. engine: the ServerEngine that this belongs to."""

    def __init__(self, engine, model: str, dtype: torch.dtype):
        from vllm.distributed.weight_transfer.base import ParamMeta

        self.engine = engine
        self.members = []  # servers of the group
        self.sizes = []  # workers of each
        self.sender = None  # vLLM's side of the group in this process
        self.weights = None  # the iterator that is being sent
        # the servers are told names and shapes before the weights come; no memory is taken for it
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
            # a group can't lose or take in members: another one is made
            if members != self.members or not unchanged:
                self.connect(members)
            self.sender.send_weights()

        def seal() -> dict[str, str]:
            return on_each(members, lambda server: server.seal(version))

        return missing | self.engine.on_rank_0(seal)

    def look(self) -> tuple[dict[str, str], bool]:
        """{url: sentence} of the servers that are not there, and whether all others still hold what
        was sent last: one that was started again since is no longer in the group, and a broadcast
        would wait for it for ever."""
        versions = set()
        missing = on_each(self.engine.servers, lambda server: versions.add(server.version()))
        return missing, versions == {self.engine.version}

    def connect(self, members: list[Server]) -> None:
        """A group of rank 0 and the workers of these servers."""
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
        )
        self.sender = NCCLTrainerWeightTransferEngine.trainer_init(info, client=self, source=self)

    def prepare(self) -> tuple[list[int], str, int]:
        """Has the servers leave the group they are in; how many workers each has, and where they
        are to meet."""
        # whether they were in one or not
        on_each(self.members, lambda server: server.call("/shutdown_weight_transfer_engine", {}))
        sizes = []
        for server in self.members:
            sizes.append(int(server.call("/get_world_size")["world_size"]))
        return sizes, *own_address()

    def close(self) -> None:
        pass  # the group goes with the process

    # what vLLM's trainer side asks of its source

    def metadata(self) -> list:
        return self.parameters

    def __iter__(self):
        """vLLM copies in CUDA streams of its own, which wait for nothing: what it is given must be
        there, and must stay (ZeRO-3 reuses the memory) until it is copied."""
        weights = iter(self.weights)
        while True:
            wait_for_gpu()
            item = next(weights, None)
            if item is None:
                return
            wait_for_gpu()
            yield item

    # and of its client: the same call to every server, but each has its own place in the group

    def init_weight_transfer_engine(self, init_info: dict) -> None:
        bodies = {}
        place = 1  # rank 0 of the run has place 0
        for server, size in zip(self.members, self.sizes):
            bodies[server.url] = {"init_info": init_info | {"rank_offset": place}}
            place += size
        self.tell_all("/init_weight_transfer_engine", bodies)

    def start_weight_update(self) -> None:
        self.tell_all("/start_weight_update", {})

    def update_weights(self, update_info: dict) -> None:
        body = {"update_info": update_info}
        self.tell_all("/update_weights", {server.url: body for server in self.members})

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self.tell_all("/finish_weight_update", {})

    def tell_all(self, path: str, bodies: dict[str, dict]) -> None:
        """A POST to every server at once, of its body or an empty one. RunStopped if one fails."""
        failed = on_each(self.members, lambda server: server.call(path, bodies.get(server.url, {})))
        if failed:
            raise RunStopped(f"weight_sync='nccl': {'; '.join(failed.values())}")
