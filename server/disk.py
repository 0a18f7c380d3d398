"""weight_sync="disk", or a folder: rank 0 writes the weights to files, and every server reads them
at the same path.

    transfer = DiskTransfer(engine, folder)
    missing = transfer.send(named_parameters, version)

All ranks call send() together. It returns {url: sentence} for the servers that did not get the
weights.
"""

import os
import re
import shutil
import socket
import uuid
from contextlib import suppress
from functools import partial
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file

from common import RunStopped
from server.http import Server, on_each

SHARD = 2**31  # bytes of weights per file, and in CPU memory at a time


def run_name() -> str:
    """A name for this process's weights: host, process id, and a random token, because process ids
    are reused."""
    return f"{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:8]}"


class DiskTransfer:
    """engine: the ServerEngine that this belongs to."""

    def __init__(self, engine, folder: Path):
        self.engine = engine
        self.folder = folder.resolve()
        self.made = not self.folder.exists()  # otherwise it is the user's
        engine.on_rank_0(self.remove_leftovers)

    def remove_leftovers(self) -> None:
        """Removes weights, half written or not yet read, that processes on this machine left when
        they were killed."""
        # this host's only: we can't tell whether a process on another host is alive
        host = re.escape(socket.gethostname())
        for folder in self.folder.glob("*"):
            # fullmatch: another host's name may begin with this one's and a dash
            ours = re.fullmatch(host + r"-(\d+)-[^-]+-[^-]+", folder.name)
            if ours and not Path(f"/proc/{ours[1]}").exists():
                shutil.rmtree(folder, ignore_errors=True)  # it may be another user's

    def send(self, named_parameters, version: str) -> dict[str, str]:
        """Writes the weights and has every server read them; version: their new name."""
        folder = self.folder / version
        # every rank iterates over the weights, because ZeRO-3 gathers them on the way
        problem = write_shards(named_parameters, folder if self.engine.rank == 0 else None)
        return self.engine.on_rank_0(partial(self.hand_over, folder, version, problem))

    def hand_over(self, folder: Path, version: str, problem: str) -> dict[str, str]:
        """Makes every server read the folder. Runs on rank 0."""
        if problem:  # no server is to blame, so the run must stop
            raise RunStopped(f"weight_sync: the weights could not be written: {problem}")
        body = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}

        def reload(server: Server) -> None:
            server.look_alive()  # a dead server is noticed here, within seconds
            self.engine.checked_version(server)
            server.call("/collective_rpc", body)
            server.seal(version)

        missing = on_each(self.engine.servers, reload)
        # at once, so that a run that is killed later leaves none behind
        shutil.rmtree(folder, ignore_errors=True)
        return missing

    def close(self) -> None:
        """Removes what a failed sync has left, and the folder if it is ours and empty. Runs on
        rank 0."""
        for folder in self.folder.glob(f"{self.engine.name}-*"):
            shutil.rmtree(folder, ignore_errors=True)
        if self.made:
            with suppress(OSError):  # other runs use it too, or nothing was ever written
                self.folder.rmdir()


def write_shards(named_parameters, folder: Path | None) -> str:
    """Writes the weights to `folder`, which appears whole or not at all. With folder=None it only
    takes part in gathering them. Returns "" or what went wrong. The iterator is used up in any
    case, because the other ranks gather with us."""
    weights = iter(named_parameters)
    problem = ""
    if folder is not None:
        unfinished = folder.parent / f"{folder.name}.tmp"
        try:
            write_files(weights, unfinished)
            unfinished.rename(folder)  # servers never see half of it
        except (OSError, SafetensorError) as error:
            problem = f"{unfinished}: {error}"
            shutil.rmtree(unfinished, ignore_errors=True)
    for _ in weights:  # use up the rest
        pass
    return problem


def write_files(weights, folder: Path) -> None:
    """Writes safetensors files of at most SHARD bytes; a larger tensor gets a file of its own."""
    folder.mkdir(parents=True, exist_ok=True)
    files = 0
    shard = {}
    size = 0
    for name, tensor in weights:
        # written as soon as it is full, so that CPU memory holds a shard and not the model
        if shard and size + tensor.nbytes > SHARD:
            save_file(shard, folder / f"model-{files:05d}.safetensors")
            files += 1
            shard = {}
            size = 0
        # safetensors refuses one tensor under two names, so a tied one is copied
        tied = any(tensor is other for other in shard.values())
        shard[name] = tensor.cpu().clone() if tied else tensor.cpu()
        size += tensor.nbytes
    save_file(shard, folder / f"model-{files:05d}.safetensors")
