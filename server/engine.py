"""Rollouts by stock vLLM servers over HTTP: rollout_engine="server".

    python -m server config/countdown_tiny.py --port=8000
    torchrun ... train.py config/countdown_tiny.py --rollout_engine=server \\
        --rollout_server=http://127.0.0.1:8000,http://other:8000

The first line starts such a server with what a config needs. Every rank asks for its own prompts,
/v1/completions with token ids, up to CONCURRENCY at a time, spread over the servers. After
each step the weights go to every server, and each remembers under which name it got them (vLLM's
weight version): an answer counts only if its server still holds the version that was synced last.
A server that dies is left out and its prompts go to the others; the next sync asks it again.

Requests carry X-Request-Id: <tag>-s<step>-p<prompt>, which the server repeats in the header and in
the body: an answer to somebody else's request, as a proxy that mixes clients would deliver, is
dropped and counted. What a server sends is checked like any other input.
"""

import os
import random
import threading
import time
import uuid
from concurrent import futures
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from tqdm import tqdm
from transformers import AutoConfig

from common import RolloutsLost, RunStopped, UserError, progress, quoted
from server.disk import DiskTransfer, run_name
from server.http import Server, ServerError, addresses, completions_in, largest_answer, on_each

CONCURRENCY = 64  # requests that a rank has under way at a time
TRIES = 6  # of one prompt, until all its completions are there
STRIKES = 3  # failures of one server, without a success in between, after which it is left out
COUNTS = ("failed", "foreign", "refilled")  # requests, requests, completions


class ServerEngine:
    """The servers of rollout_server as a rollout engine. Rank 0 looks after them; which of them
    hold the current weights, all ranks know."""

    sleeps = False  # its memory is elsewhere

    def __init__(self, model: str, config: dict, dtype: torch.dtype):
        self.rank = dist.get_rank()
        self.seconds = config["rollout_timeout"]  # for one answer, and for the servers to start
        self.longest_prompt = config["max_prompt_length"]
        self.vocabulary = AutoConfig.from_pretrained(model).vocab_size
        self.tag = client_tag()
        self.servers = [Server(url, self.seconds) for url in addresses(config["rollout_server"])]

        self.live = []  # servers that hold `version`
        self.missing = {}  # {url: why it does not hold it}
        self.version = ""  # the name of the weights that were synced last
        self.updates = 0  # how often there have been new ones
        self.counts = dict.fromkeys(COUNTS, 0)
        self.lock = threading.Lock()  # of live, missing and counts: requests have threads
        # for waits only; a generator of its own leaves the global one, and what is sampled, alone
        self.random = random.Random(self.rank)
        self.ahead = None  # (request, future) of what begin() has started
        # one that stays: a reward worker that it starts would die with it
        self.background = ThreadPoolExecutor(1)

        self.name, models = self.on_rank_0(partial(self.start, config))
        for server, served in zip(self.servers, models):
            server.model = served
        self.transfer = self.make_transfer(model, config, dtype)

    def start(self, config: dict) -> tuple[str, list[str]]:
        """Waits until all servers are there and finds out whether they can be used: the name of
        this run's weights, and each server's name of the model. On rank 0."""
        self.wait_for_servers()
        longest = config["max_prompt_length"] + config["max_completion_length"]
        transfers = config["weight_sync"] == "nccl"
        # at once: each takes seconds to list its settings
        on_each(self.servers, lambda server: server.check(longest, transfers))
        return run_name(uuid.uuid4().hex[:8]), [server.model for server in self.servers]

    def wait_for_servers(self) -> None:
        """UserError with what those say that are not there after rollout_timeout."""
        end = time.monotonic() + self.seconds
        total = len(self.servers)
        waiting = self.servers
        what = "waiting for rollout servers"
        with progress(total=total, unit="server", desc=what, leave=False) as bar:
            while True:
                absent = on_each(waiting, Server.look_alive)
                bar.update(len(waiting) - len(absent))
                if not absent:
                    return
                reasons = list(absent.values())
                if time.monotonic() > end:
                    raise UserError(
                        f"rollout_server: after {self.seconds:.0f} s {len(absent)} of {total} "
                        f"servers are not there (rollout_timeout): {'; '.join(reasons)}"
                    )
                bar.set_postfix_str(reasons[0][:60], refresh=False)
                bar.update(0)
                # one that has answered is not asked again
                waiting = [server for server in waiting if server.url in absent]
                time.sleep(1)

    def make_transfer(self, model: str, config: dict, dtype: torch.dtype):
        """How the weights get to the servers: what has send(named_parameters, version)."""
        if config["weight_sync"] == "nccl":
            from server.nccl import NcclTransfer  # imports vLLM

            return NcclTransfer(self, model, dtype)
        folder = Path(config["output_dir"]) / "weights"
        if config["weight_sync"] != "disk":
            folder = Path(config["weight_sync"])
        return DiskTransfer(self, folder)

    def on_rank_0(self, work):
        """What work() returns or raises on rank 0, on every rank."""
        outcome = [None]
        if self.rank == 0:
            try:
                outcome = [(work(), None)]
            except (UserError, RunStopped, OSError) as error:
                outcome = [(None, error)]
            except ServerError as error:
                outcome = [(None, RunStopped(str(error)))]
        # pickled, so only errors that are a sentence; others end this rank, and torchrun the rest
        dist.broadcast_object_list(outcome)
        result, error = outcome[0]
        if error:
            raise error
        return result

    # --- completions

    def generate(self, prompts_ids: list[list[int]], n: int, sampling: dict, finished=None) -> list:
        """As the other engines; RolloutsLost on all ranks if on one of them no server is left or a
        prompt stays without its completions."""
        request = (prompts_ids, n, sampling)
        # anything else, such as an evaluation, leaves what was begun where it is
        if self.ahead and self.ahead[0] == request:
            work = self.ahead[1].result
            self.ahead = None
        else:
            work = partial(self.ask, *request, finished)
        return all_or_none(work)

    def begin(self, prompts_ids: list[list[int]], n: int, sampling: dict, finished) -> None:
        request = (prompts_ids, n, sampling)
        self.ahead = (request, self.background.submit(self.ask, *request, finished))

    def ask(self, prompts_ids: list[list[int]], n: int, sampling: dict, finished) -> list[dict]:
        """This rank's part of generate()."""
        longest = max(map(len, prompts_ids), default=0)
        if longest > self.longest_prompt:
            raise ValueError(
                f"a prompt of {longest} tokens must not leave: "
                f"max_prompt_length={self.longest_prompt}"
            )
        self.leave_out_changed()
        # of a training step: where in which step a prompt stands
        names = sampling.get("names")
        if not names:  # of an evaluation: no step, but another number after each sync
            names = [f"u{self.updates}-r{self.rank}-p{i}" for i in range(len(prompts_ids))]
        groups = {}
        # max: a rank may have no prompts, and a pool needs a thread
        pool = ThreadPoolExecutor(min(CONCURRENCY, max(1, len(prompts_ids))))
        try:
            asked = {}  # future: index of its prompt
            prompts = zip(prompts_ids, sampling["seeds"], names, strict=True)
            for i, (prompt_ids, seed, name) in enumerate(prompts):
                body = request_body(prompt_ids, n, seed, sampling)
                asked[pool.submit(self.group, i, body, f"{self.tag}-{name}")] = i
            for future in futures.as_completed(asked):
                i = asked[future]
                groups[i] = future.result()
                if finished:
                    finished(i, groups[i])
        finally:
            pool.shutdown(cancel_futures=True)  # of a prompt that is lost the others are too
        # prompt-major, in whatever order the answers came
        return [r for i in sorted(groups) for r in groups[i]]

    def group(self, i: int, body: dict, name: str) -> list[dict]:
        """The completions of prompt i. As far as they are missing they are asked for again, on
        another server and with another seed."""
        n = body["n"]
        rollouts = []
        for attempt in range(TRIES):
            if attempt:  # longer each time, and not all requests at the same moment
                time.sleep(0.25 * 2**attempt * self.random.uniform(0.5, 1.5))
            server = self.choose(i + attempt)
            suffix = f"-a{attempt}" if attempt else ""
            wanted = n - len(rollouts)
            # sample i of a request has seed + i: far from those of the tries before
            seed = (body["seed"] + attempt * 1_000_003) % 2**62
            rest = body | {"model": server.model, "n": wanted, "seed": seed}
            try:
                usable = self.complete(server, rest, name + suffix)
            except ServerError as error:
                failure = error
                self.count("foreign" if error.foreign else "failed", 1)
                self.strike(server, error)
                continue
            rollouts += usable
            if len(rollouts) == n:
                return rollouts
            failure = ServerError(
                f"{server.url} sent {len(usable)} usable completions instead of {wanted}"
            )
            self.count("refilled", wanted - len(usable))
        raise RolloutsLost(
            f"request {name}: {len(rollouts)} of {n} completions after {TRIES} tries: {failure}"
            + cure_of(failure)
        )

    def complete(self, server: Server, body: dict, name: str) -> list[dict]:
        """The usable completions in the answer of a server."""
        headers = {"X-Request-Id": name, "X-VLLM-Client-Tag": self.tag}
        answer = server.call("/v1/completions", body, headers, largest=largest_answer(body))
        rollouts = completions_in(answer, body, self.vocabulary)
        # it may have been started again since, and have sampled by the weights of its start
        self.check_weights(server)
        server.strikes = 0
        return rollouts

    # --- which servers can be asked

    def choose(self, turn: int) -> Server:
        """Servers take turns, and ranks begin with different ones."""
        with self.lock:
            if self.live:
                return self.live[(turn + self.rank) % len(self.live)]
            reasons = "; ".join(self.missing.values())
        urls = ", ".join(server.url for server in self.servers)
        raise RolloutsLost(f"no rollout server is left of {urls}: {reasons}")

    def strike(self, server: Server, error: ServerError) -> None:
        """Leaves a server out until the next sync if it is gone or has failed too often; an answer
        that is not ours may be a proxy's fault."""
        with self.lock:
            if not error.foreign:
                server.strikes += 1
            # the last one has its TRIES
            too_often = server.strikes >= STRIKES and len(self.live) > 1
            if server in self.live and (error.gone or too_often):
                self.live.remove(server)
                self.missing[server.url] = str(error)
                tqdm.write(
                    f"rank {self.rank}: rollout server left out until the next sync: {error}"
                )

    def check_weights(self, server: Server) -> None:
        """ServerError if it does not hold the weights that were synced last."""
        version = server.version()
        if version != self.version:
            raise ServerError(
                f"{server.url} holds weights {quoted(version)}, not {self.version!r}: it was "
                f"started again, or another run uses it",
                gone=True,
            )

    def leave_out_changed(self) -> None:
        """Before anything is sampled by other weights than ours."""
        with self.lock:
            live = list(self.live)
        for server in live:
            try:
                self.check_weights(server)
            except ServerError as error:
                self.strike(server, error)

    # --- weights

    def sync(self, named_parameters) -> None:
        """To every server, also those that were left out before. All ranks together, for ZeRO-3
        gathers here. That no server has taken the weights shows in the next generate()."""
        if self.ahead:  # by the weights that the servers hold now
            futures.wait([self.ahead[1]])
        dist.barrier()  # another rank may still sample
        self.updates += 1
        version = f"{self.name}-{self.updates}"
        missing = self.transfer.send(named_parameters, version)
        self.version = version
        with self.lock:  # those that were left out before have another chance
            self.missing = missing
            self.live = [server for server in self.servers if server.url not in missing]
            for server in self.live:
                server.strikes = 0
        if self.rank == 0:
            for sentence in missing.values():
                tqdm.write(
                    f"rollout server without weights, left out until the next sync: {sentence}"
                )

    def sleep(self) -> None:
        pass  # another machine's, or another GPU's, memory

    def wake(self) -> None:
        pass

    # --- and the rest

    def count(self, what: str, number: int) -> None:
        with self.lock:
            self.counts[what] += number

    def take_counts(self) -> dict:
        """{"rollout/failed", "rollout/foreign", "rollout/refilled", "rollout/servers"}: of all
        ranks since the last time. All ranks together."""
        with self.lock:
            local = self.counts | {"servers": len(self.live)}
            self.counts = dict.fromkeys(COUNTS, 0)
        shares = [None] * dist.get_world_size()
        dist.all_gather_object(shares, local)
        metrics = {}
        for what in COUNTS:
            metrics[f"rollout/{what}"] = sum(share[what] for share in shares)
        # a server that one rank has left out counts as lost
        metrics["rollout/servers"] = min(share["servers"] for share in shares)
        return metrics

    def close(self) -> None:
        self.background.shutdown(wait=False)
        for server in self.servers:
            server.http.close()
        if self.rank == 0:
            self.transfer.close()


def client_tag() -> str:
    """What the ids of this rank's requests begin with."""
    # a tag of the launcher's tells the runs apart that share servers
    usual = f"rank-{dist.get_rank()}-of-{dist.get_world_size()}"
    tag = os.environ.get("VLLM_CLIENT_TAG") or usual
    if not (tag.isascii() and tag.isprintable() and " " not in tag):
        raise UserError(
            f"VLLM_CLIENT_TAG={tag!r} goes into HTTP headers: letters, digits and signs of ASCII, "
            f"no spaces"
        )
    return tag


def request_body(prompt_ids: list[int], n: int, seed: int, sampling: dict) -> dict:
    """A request for n completions by the policy's own distribution, nothing of the server's."""
    return {
        "prompt": prompt_ids,
        "n": n,
        "max_tokens": sampling["max_tokens"],
        "seed": seed,
        "temperature": sampling["temperature"],
        # named one by one: what is missing a server takes from the model's generation_config.json
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "stop_token_ids": sampling["stop_token_ids"],
        # 0: of the sampled token alone
        "logprobs": 0,
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,  # their texts may be of any length
    }


def all_or_none(work) -> list[dict]:
    """The rollouts that work() returns, or RolloutsLost on all ranks if it raises that on one."""
    rollouts = []
    lost = ""
    try:
        rollouts = work()
    except RolloutsLost as error:
        lost = str(error)
    # a rank that went on alone would wait in the next collective
    sentences = [None] * dist.get_world_size()
    dist.all_gather_object(sentences, lost)
    for sentence in sentences:
        if sentence:
            raise RolloutsLost(sentence)
    return rollouts


def cure_of(failure: ServerError) -> str:
    if not failure.foreign:
        return ""
    return (
        "; a proxy or cache in between mixes clients: name the servers themselves in "
        "rollout_server, or have it route by X-Request-Id"
    )
