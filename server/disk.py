"""weight_sync="disk", or a folder: the weights as files that every server reads, at the same path.

    transfer = DiskTransfer(engine, folder)
    missing = transfer.send(named_parameters, version)

All ranks together; {url: sentence} of the servers that did not get the weights.
"""

import os
import re
import shutil
import socket
from functools import partial
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file

from common import RunStopped
from server.http import Server, on_each

SHARD = 2**31  # bytes of weights in memory and in a file at a time


def run_name(token: str) -> str:
    """Names the weights of this process: host, process, and a token, for numbers come again."""
    return f"{socket.gethostname()}-{os.getpid()}-{token}"


class DiskTransfer:
    """engine: the ServerEngine that this belongs to."""

    def __init__(self, engine, folder: Path):
        self.engine = engine
        self.folder = folder.resolve()
        engine.on_rank_0(self.remove_leftovers)

    def remove_leftovers(self) -> None:
        """What a process on this machine left there, half written or not yet read, when it was
        killed."""
        # of this host only: whether a process lives elsewhere can't be told from here
        host = re.escape(socket.gethostname())
        for folder in self.folder.glob("*"):
            # another host may be called as this one and go on, with a dash of its own
            ours = re.fullmatch(host + r"-(\d+)-[^-]+-[^-]+", folder.name)
            if ours and not Path(f"/proc/{ours[1]}").exists():
                shutil.rmtree(folder)

    def send(self, named_parameters, version: str) -> dict[str, str]:
        folder = self.folder / version
        # all ranks go through the weights: ZeRO-3 gathers them on the way
        problem = write_shards(named_parameters, folder if self.engine.rank == 0 else None)
        return self.engine.on_rank_0(partial(self.hand_over, folder, version, problem))

    def hand_over(self, folder: Path, version: str, problem: str) -> dict[str, str]:
        """Has every server read the folder. On rank 0."""
        if problem:  # no server could do better later
            raise RunStopped(f"weight_sync: the weights could not be written: {problem}")
        body = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}

        def reload(server: Server) -> None:
            server.look_alive()  # a dead one must not hold up the others for long
            server.call("/collective_rpc", body)
            server.seal(version)

        missing = on_each(self.engine.servers, reload)
        shutil.rmtree(folder)  # at once: a run that is killed leaves none behind
        return missing

    def close(self) -> None:
        """Removes what a sync that failed has left. On rank 0."""
        for folder in self.folder.glob(f"{self.engine.name}-*"):
            shutil.rmtree(folder, ignore_errors=True)
        if self.folder.is_dir() and not any(self.folder.iterdir()):
            self.folder.rmdir()


def write_shards(named_parameters, folder: Path | None) -> str:
    """Writes the weights to `folder`, which appears whole or not at all; None: only takes part in
    gathering them. "" or what went wrong: the iterator is used up either way, for other ranks
    gather with us."""
    weights = iter(named_parameters)
    problem = ""
    if folder is not None:
        unfinished = folder.parent / f"{folder.name}.tmp"
        try:
            write_files(weights, unfinished)
            unfinished.rename(folder)  # a server never sees half of it
        except (OSError, SafetensorError) as error:
            problem = f"{unfinished}: {error}"
            shutil.rmtree(unfinished, ignore_errors=True)
    for _ in weights:  # the rest of them, after a problem
        pass
    return problem


def write_files(weights, folder: Path) -> None:
    """Safetensors files of at most SHARD bytes, or of one tensor that is larger."""
    folder.mkdir(parents=True, exist_ok=True)
    files = 0
    shard = {}
    size = 0
    for name, tensor in weights:
        # a shard at a time is in CPU memory, not the model
        if shard and size + tensor.nbytes > SHARD:
            save_file(shard, folder / f"model-{files:05d}.safetensors")
            files += 1
            shard = {}
            size = 0
        tied = any(tensor is other for other in shard.values())  # safetensors refuses these
        shard[name] = tensor.cpu().clone() if tied else tensor.cpu()
        size += tensor.nbytes
    save_file(shard, folder / f"model-{files:05d}.safetensors")
