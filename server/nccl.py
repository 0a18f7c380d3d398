"""weight_sync="nccl": weights from rank 0 straight into the memory of vLLM servers on other GPUs, by vLLM's own weight transfer.

    transfer = Transfer(engine, model, dtype)
    missing = transfer.send(named_parameters, version)      # all ranks; {url: sentence} of the servers that did not get them

Not run yet: it needs at least two GPUs, of which one belongs to a server (python -m server CONFIG --weight_sync=nccl). What can be tested without is.
"""

import socket
import threading
from contextlib import contextmanager

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from common import RunStopped, leave
from policy import named_weights
from server.engine import Server, ServerEngine, on_each


@contextmanager
def deadline(seconds: float):
    """Ends the process if the work inside takes longer: a broadcast to a server that has died waits for ever, and no exception reaches it."""
    timer = threading.Timer(
        seconds,
        leave,
        (
            f"weight_sync='nccl': the servers did not take the weights in {seconds:.0f} s (rollout_timeout); has one of them died?",
            1,
        ),
    )
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


class Transfer:
    """weight_sync="nccl": vLLM's own weight transfer, from rank 0 to every worker of every server, a few parameters at a time. The group is
    made anew whenever other servers take part than the last time. It is also what vLLM's trainer side calls a client and a source."""

    def __init__(self, engine: ServerEngine, model: str, dtype: torch.dtype):
        from vllm.distributed.weight_transfer.base import ParamMeta

        self.engine, self.members, self.sender, self.stream = engine, [], None, None
        with torch.device("meta"):
            lm = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model))
        self.parameters = [
            ParamMeta(name=name, dtype=dtype, shape=tuple(tensor.shape))
            for name, tensor in named_weights(lm, 0)
        ]

    def send(self, named_parameters, version: str) -> dict:
        """{url: sentence} of the servers that did not get the weights. All ranks together."""
        self.stream = named_parameters
        missing, as_before = self.engine.on_rank_0(self.look)
        members = [server for server in self.engine.servers if server.url not in missing]
        if not members:
            return missing
        with deadline(self.engine.seconds):
            if members != self.members or not as_before:
                self.connect(members)
            self.sender.send_weights()
        late = self.engine.on_rank_0(lambda: on_each(members, lambda server: server.seal(version)))
        return missing | late

    def look(self) -> tuple[dict, bool]:
        """{url: sentence} of the servers that are not there, and whether all others still hold what was sent last: one that was started again since
        is no longer in the group, and a broadcast would wait for it for ever."""
        versions = {}
        missing = on_each(
            self.engine.servers, lambda server: versions.update({server.url: server.version()})
        )
        return missing, set(versions.values()) == {self.engine.version}

    def connect(self, members: list[Server]) -> None:
        from vllm.distributed.weight_transfer.nccl_engine import (
            NCCLTrainerInitInfo,
            NCCLTrainerWeightTransferEngine,
        )
        from vllm.utils.network_utils import get_ip

        self.members = members
        if self.sender is not None:
            self.sender.shutdown()

        def sizes() -> tuple[list[int], str, int]:
            on_each(members, lambda server: server.call("/shutdown_weight_transfer_engine", {}))
            with socket.socket() as probe:
                probe.bind(("", 0))
                port = probe.getsockname()[1]
            own = get_ip()  # the host's own name may lead to 127.0.1.1; but without a default route vLLM finds no address
            return (
                [int(server.call("/get_world_size")["world_size"]) for server in members],
                socket.gethostname() if own == "0.0.0.0" else own,
                port,
            )

        self.sizes, host, port = self.engine.on_rank_0(sizes)
        info = NCCLTrainerInitInfo(
            rank=self.engine.rank,
            master_address=host,
            master_port=port,
            world_size=1 + sum(self.sizes),
        )
        self.sender = NCCLTrainerWeightTransferEngine.trainer_init(info, client=self, source=self)

    # what vLLM's trainer side asks of its source

    def metadata(self) -> list:
        return self.parameters

    def __iter__(self):
        return iter(self.stream)

    # and of its client: the same call to every server, but each has its own place in the group

    def init_weight_transfer_engine(self, init_info: dict) -> None:
        offsets = {server: 1 + sum(self.sizes[:i]) for i, server in enumerate(self.members)}
        self.all(
            lambda server: server.call(
                "/init_weight_transfer_engine",
                {"init_info": init_info | {"rank_offset": offsets[server]}},
            )
        )

    def start_weight_update(self) -> None:
        self.all(lambda server: server.call("/start_weight_update", {}))

    def update_weights(self, update_info: dict) -> None:
        self.all(lambda server: server.call("/update_weights", {"update_info": update_info}))

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self.all(lambda server: server.call("/finish_weight_update", {}))

    def all(self, work) -> None:
        if failed := on_each(self.members, work):
            raise RunStopped(f"weight_sync='nccl': {'; '.join(failed.values())}")
