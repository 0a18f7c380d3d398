"""Rollouts by stock vLLM servers over HTTP: rollout_engine="server", rollout_server="http://a:8000,http://b:8000".

    python -m server config/countdown_tiny.py --port=8000            starts such a server with what a config needs
    torchrun ... train.py config/countdown_tiny.py --rollout_engine=server --rollout_server=http://127.0.0.1:8000

Every rank asks for its own prompts, /v1/completions with token ids, up to CONCURRENCY at a time, spread over the servers. After each step
the weights go to every server, and each server remembers under which name it got them (vLLM's weight version): an answer counts only if its server
still holds the version that was synced last. A server that dies is left out and its prompts go to the others; it is asked again at the next sync.

Requests carry X-Request-Id: <tag>-s<step>-p<prompt>, which the server repeats in the header and in the body: an answer to somebody else's request,
as a proxy that mixes clients would deliver, is dropped and counted. What a server sends is checked like any other input.
"""

import os
import random
import shutil
import socket
import threading
import time
import uuid
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from tqdm import tqdm
from transformers import AutoConfig

from common import RolloutsLost, RunStopped, UserError, progress, quoted
from server.http import Server, ServerError, addresses, completions_in, largest_answer

CONCURRENCY = 64  # prompts that a rank has under way at a time
TRIES = 6  # of one prompt, without a usable answer in between
STRIKES = 3  # failures of one server, without a success in between, after which it is left out
SHARD = 2**31  # bytes of weights in memory and in a file at a time


class ServerEngine:
    """The servers of rollout_server as a rollout engine. Rank 0 looks after them; which of them hold the current weights, all ranks know."""

    def __init__(self, model: str, config: dict, dtype: torch.dtype, device: torch.device):
        self.rank, world = dist.get_rank(), dist.get_world_size()
        self.seconds, self.window, self.longest_prompt = (
            config["rollout_timeout"],
            CONCURRENCY,
            config["max_prompt_length"],
        )
        self.vocabulary = AutoConfig.from_pretrained(model).get_text_config().vocab_size
        self.tag = os.environ.get("VLLM_CLIENT_TAG") or f"rank-{self.rank}-of-{world}"
        if not (self.tag.isascii() and self.tag.isprintable() and " " not in self.tag):
            raise UserError(
                f"VLLM_CLIENT_TAG={self.tag!r} goes into HTTP headers: letters, digits and signs of ASCII, no spaces"
            )
        self.servers = [Server(url, self.seconds) for url in addresses(config["rollout_server"])]
        self.live, self.missing, self.version, self.updates = (
            [],
            {},
            "",
            0,
        )  # servers that hold `version`, the updates-th of this run; why others don't
        folder = config["weight_sync"]  # or a word: they go into the run's own
        if "/" not in folder:
            folder = Path(config["output_dir"]) / "weights"
        self.folder = Path(folder).resolve()
        self.counts, self.lock, self.random = {}, threading.Lock(), random.Random(self.rank)
        self.ahead = None  # (request, future) of what begin() has started
        self.background = ThreadPoolExecutor(
            1
        )  # one that stays: a reward worker that it starts would die with it
        longest, nccl = (
            config["max_prompt_length"] + config["max_completion_length"],
            config["weight_sync"] == "nccl",
        )
        self.name, models = self.on_rank_0(
            lambda: (
                f"{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:8]}",
                self.start(longest, nccl),
            )
        )
        for server, served in zip(self.servers, models):
            server.model = served
        self.transfer = None
        if nccl:
            from server.nccl import Transfer

            self.transfer = Transfer(self, model, dtype)

    def start(self, longest: int, transfers: bool) -> list[str]:
        """Waits until all servers are there, and returns each one's name of the model. On rank 0."""
        end, waiting = time.monotonic() + self.seconds, {server: "" for server in self.servers}
        bar = progress(
            total=len(self.servers), unit="server", desc="waiting for rollout servers", leave=False
        )
        while True:
            for server in list(waiting):
                try:
                    server.call("/health", seconds=min(10.0, self.seconds))
                    del waiting[server]
                    bar.update()
                except ServerError as error:
                    waiting[server] = str(error)
            if not waiting:
                break
            if time.monotonic() > end:
                raise UserError(
                    f"rollout_server: after {self.seconds:.0f} s {len(waiting)} of {len(self.servers)} servers are not there (rollout_timeout): "
                    + "; ".join(waiting.values())
                )
            bar.set_postfix_str(next(iter(waiting.values()))[:60], refresh=False)
            bar.update(0)
            time.sleep(1)
        bar.close()
        on_each(
            self.servers, lambda server: server.check(longest, transfers)
        )  # at once: each takes seconds to list its settings
        for old in self.folder.glob(
            f"{socket.gethostname()}-*-*-*"
        ):  # of a process here that was killed
            if not Path(f"/proc/{old.name.split('-')[-3]}").exists():
                shutil.rmtree(old)
        return [server.model for server in self.servers]

    def on_rank_0(self, work):
        """What `work` returns or raises on rank 0, on every rank."""
        found = [None]
        if self.rank == 0:
            try:
                found = [(work(), None)]
            except (UserError, RunStopped, OSError) as error:
                found = [(None, error)]
            except ServerError as error:
                found = [(None, RunStopped(str(error)))]
        dist.broadcast_object_list(found)
        value, error = found[0]
        if error:
            raise error
        return value

    # --- completions

    def generate(
        self, prompts_ids: list[list[int]], n: int, sampling: dict, finished=None
    ) -> list[dict]:
        """As the other engines; RolloutsLost on all ranks if on one of them no server is left or a prompt stays without its completions."""
        request = (prompts_ids, n, sampling)
        if self.ahead and self.ahead[0] == request:
            (_, begun), self.ahead = self.ahead, None
            return self.result(begun)
        return self.together(lambda: self.ask(prompts_ids, n, sampling, finished))

    def begin(self, prompts_ids: list[list[int]], n: int, sampling: dict, finished) -> Future:
        """generate() in the background: kept for the call that asks for the same, or for result()."""
        begun = self.background.submit(self.ask, prompts_ids, n, sampling, finished)
        self.ahead = ((prompts_ids, n, sampling), begun)
        return begun

    def result(self, begun: Future) -> list[dict]:
        return self.together(begun.result)

    def together(self, work) -> list[dict]:
        try:
            found, lost = work(), ""
        except RolloutsLost as error:
            found, lost = None, str(error)
        everyone = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, lost)
        if any(everyone):
            raise RolloutsLost(next(sentence for sentence in everyone if sentence))
        return found

    def ask(self, prompts_ids: list[list[int]], n: int, sampling: dict, finished) -> list[dict]:
        """This rank's part of generate()."""
        if (longest := max(map(len, prompts_ids), default=0)) > self.longest_prompt:
            raise ValueError(
                f"a prompt of {longest} tokens must not leave: max_prompt_length={self.longest_prompt}"
            )
        with self.lock:
            live = list(self.live)
        for server in live:
            try:
                self.check_weights(server)
            except ServerError as error:
                self.strike(server, error)
        names = sampling.get("names") or [
            f"u{self.updates}-r{self.rank}-p{i}" for i in range(len(prompts_ids))
        ]
        groups, pool = {}, ThreadPoolExecutor(min(self.window, max(1, len(prompts_ids))))
        try:
            asked = {
                pool.submit(self.group, i, ids, n, seed, f"{self.tag}-{name}", sampling): i
                for i, (ids, seed, name) in enumerate(
                    zip(prompts_ids, sampling["seeds"], names, strict=True)
                )
            }
            for future in as_completed(asked):
                groups[asked[future]] = future.result()
                if finished:
                    finished(asked[future], groups[asked[future]])
        finally:
            pool.shutdown(cancel_futures=True)
        return [r for i in sorted(groups) for r in groups[i]]

    def group(
        self, i: int, prompt_ids: list[int], n: int, seed: int, name: str, sampling: dict
    ) -> list[dict]:
        """n completions of prompt i: asked for again, on another server and with another seed, as far as they are missing."""
        group, failures, attempt = [], [], 0
        while len(group) < n:
            server = self.choose(i + attempt)
            if server is None:
                raise RolloutsLost(
                    f"no rollout server is left of {', '.join(s.url for s in self.servers)}: {'; '.join(self.missing.values())}"
                )
            again = f"-a{attempt}" if attempt else ""
            body = {
                "model": server.model,
                "prompt": prompt_ids,
                "n": n - len(group),
                "max_tokens": sampling["max_tokens"],
                "seed": (seed + attempt * 1_000_003) % 2**62,
                "temperature": sampling["temperature"],
                "top_p": 1.0,
                "top_k": 0,
                "min_p": 0.0,
                "repetition_penalty": 1.0,  # not the server's own
                "stop_token_ids": sampling["stop_token_ids"],
                "logprobs": 0,
                "return_token_ids": True,
                "return_tokens_as_token_ids": True,  # their texts may be of any length
            }
            try:
                # the answer itself is not kept while we wait for the next one
                found = completions_in(
                    server.call(
                        "/v1/completions",
                        body,
                        {"X-Request-Id": name + again, "X-VLLM-Client-Tag": self.tag},
                        largest=largest_answer(body),
                    ),
                    prompt_ids,
                    n - len(group),
                    sampling["max_tokens"],
                    self.vocabulary,
                )
                self.check_weights(server)  # it may have been started again since
                server.strikes = 0
                if len(found) < n - len(group):
                    failures.append(
                        ServerError(
                            f"{server.url} sent {len(found)} usable completions instead of {n - len(group)}"
                        )
                    )
                    self.count("refilled", n - len(group) - len(found))
                group += found
            except ServerError as error:
                failures.append(error)
                self.count("foreign" if error.foreign else "failed")
                self.strike(server, error)
            attempt += 1
            if len(group) < n and len(failures) >= TRIES:
                cure = "; a proxy or cache in between mixes clients: name the servers themselves in rollout_server, or have it route by X-Request-Id"
                raise RolloutsLost(
                    f"request {name}: {len(group)} of {n} completions after {TRIES} tries: {failures[-1]}{cure if failures[-1].foreign else ''}"
                )
            if len(group) < n:
                time.sleep(0.25 * 2 ** len(failures) * self.random.uniform(0.5, 1.5))
        return group

    def choose(self, turn: int) -> Server | None:
        with self.lock:
            return self.live[(turn + self.rank) % len(self.live)] if self.live else None

    def strike(self, server: Server, error: ServerError) -> None:
        """Leaves a server out until the next sync if it is gone or has failed too often; an answer that is not ours may be a proxy's fault."""
        with self.lock:
            server.strikes += not error.foreign
            if server in self.live and (
                error.gone or (server.strikes >= STRIKES and len(self.live) > 1)
            ):  # the last one has its TRIES
                self.live.remove(server)
                self.missing[server.url] = str(error)
                tqdm.write(
                    f"rank {self.rank}: rollout server left out until the next sync: {error}"
                )

    def check_weights(self, server: Server) -> None:
        """ServerError if it does not hold the weights that were synced last."""
        if (found := server.version()) != self.version:
            raise ServerError(
                f"{server.url} holds weights {quoted(found)}, not {self.version!r}: it was started again, or another run uses it",
                gone=True,
            )

    def count(self, what: str, n: int = 1) -> None:
        with self.lock:
            self.counts[what] = self.counts.get(what, 0) + n

    # --- weights

    def sync(self, named_parameters) -> None:
        """The weights of the iterator of (name, tensor) to every server, also those that were left out before. All ranks together, for ZeRO-3
        gathers here. That no server has taken them shows in the next generate()."""
        if self.ahead:  # by the weights that the servers hold now
            futures.wait([self.ahead[1]])
        dist.barrier()  # another rank may still sample
        self.updates += 1
        version = f"{self.name}-{self.updates}"
        if self.transfer:
            missing = self.transfer.send(named_parameters, version)
        else:
            new = self.folder / version
            problem = write_shards(named_parameters, new if self.rank == 0 else None)
            missing = self.on_rank_0(lambda: self.hand_over(new, version, problem))
        self.version = version
        with self.lock:
            self.live, self.missing = (
                [server for server in self.servers if server.url not in missing],
                missing,
            )
            for server in self.live:
                server.strikes = 0
        if self.rank == 0:
            for sentence in missing.values():
                tqdm.write(
                    f"rollout server without weights, left out until the next sync: {sentence}"
                )

    def hand_over(self, folder: Path, version: str, problem: str) -> dict:
        """Has every server read the folder; {url: sentence} of those that did not. On rank 0."""
        if problem:
            raise RunStopped(f"weight_sync: the weights could not be written: {problem}")

        def reload(server: Server) -> None:
            server.call(
                "/health", seconds=min(10.0, self.seconds)
            )  # a dead one must not hold up the others for long
            server.call(
                "/collective_rpc",
                {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}},
            )
            server.seal(version)

        missing = on_each(self.servers, reload)
        shutil.rmtree(folder)  # at once: a run that is killed leaves none behind
        return missing

    def take_counts(self) -> dict:
        """{"rollout/failed", "rollout/foreign", "rollout/refilled", "rollout/servers"}: of all ranks since the last time. All ranks together."""
        names = ("failed", "foreign", "refilled")
        with self.lock:
            mine, self.counts = [self.counts.get(name, 0) for name in names], {}
        shares = [None] * dist.get_world_size()
        dist.all_gather_object(shares, [*mine, len(self.live)])
        return {
            f"rollout/{name}": sum(share[i] for share in shares) for i, name in enumerate(names)
        } | {"rollout/servers": min(share[-1] for share in shares)}

    def sleep(self) -> None:
        pass  # another machine's, or another GPU's, memory

    def wake(self) -> None:
        pass

    def close(self) -> None:
        self.background.shutdown(wait=False)
        for server in self.servers:
            server.http.close()
        if self.rank == 0:
            for folder in self.folder.glob(f"{self.name}-*"):
                shutil.rmtree(folder, ignore_errors=True)
            if self.folder.is_dir() and not any(self.folder.iterdir()):
                self.folder.rmdir()


def on_each(servers: list[Server], work) -> dict:
    """work(server) for all at once; {url: sentence} of those where it failed."""
    with ThreadPoolExecutor(len(servers)) as pool:
        done: dict[Server, Future] = {server: pool.submit(work, server) for server in servers}
    found = {server.url: done[server].exception() for server in servers}
    for error in found.values():
        if error and not isinstance(error, ServerError):
            raise error
    return {url: str(error) for url, error in found.items() if error}


def write_shards(named_parameters, folder: Path | None) -> str:
    """Safetensors files of at most SHARD bytes, or one tensor, in `folder`; None: only takes part in gathering. "" or what went wrong: the
    iterator is used up either way, for other ranks gather with us. The folder appears whole or not at all."""
    problem, shard, size, files = "", {}, 0, 0
    tmp = folder and folder.with_suffix(".tmp")

    def flush() -> str:
        nonlocal shard, size, files
        try:
            tmp.mkdir(parents=True, exist_ok=True)
            save_file(shard, tmp / f"model-{files:05d}.safetensors")
        except Exception as error:  # safetensors has its own for a full disk
            shutil.rmtree(tmp, ignore_errors=True)
            return f"{tmp}: {error}"
        shard, size, files = {}, 0, files + 1
        return ""

    for name, tensor in named_parameters:
        if folder is None or problem:
            continue
        if shard and size + tensor.nbytes > SHARD:
            problem = flush()
        shard[name] = (
            tensor.cpu().clone()
            if any(tensor is other for other in shard.values())
            else tensor.cpu()
        )
        size += tensor.nbytes
    if folder and not problem and not (problem := flush()):
        tmp.rename(folder)
    return problem
