"""Rollouts by stock vLLM servers over HTTP: rollout_engine="server".

    python -m server config/countdown_tiny.py --port=8000
    torchrun ... train.py config/countdown_tiny.py --rollout_engine=server \\
        --rollout_server=http://127.0.0.1:8000,http://other:8000

The first line starts such a server with the settings that a config needs. Every rank sends its own
prompts, as token ids to /v1/completions, up to CONCURRENCY at a time, spread over the servers.
After each step the weights go to every server under a new name, which the server remembers (vLLM's
weight version). An answer counts only if its server still holds the version that was synced last. A
server that dies is left out, and the others take over its prompts; it is tried again at the next
sync.

Requests carry an X-Request-Id, such as <tag>-s<step>-p<prompt> (all forms: docs/servers.md),
which the server repeats in the header and the body of its answer. So an answer to somebody else's
request, which a proxy that mixes clients might deliver, is noticed, dropped and counted. What a
server sends is checked like any untrusted input.
"""

import os
import random
import threading
import time
from concurrent import futures
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from tqdm import tqdm
from transformers import AutoConfig

from checks import max_sequence_length
from common import RolloutsLost, RunStopped, UserError, progress, quoted
from rollout import Engine, Sampling, in_prompt_order
from server.disk import DiskTransfer, run_name
from server.http import Server, ServerError, addresses, completions_in, largest_answer, on_each

CONCURRENCY = 64  # requests that a rank has under way at a time
TRIES = 6  # requests for one prompt, at most, until all its completions are there
STRIKES = 3  # failures in a row after which a server is left out
# counted: failed requests, answers to somebody else's request, completions asked for again
COUNTS = ("failed", "foreign", "refilled")


class ServerEngine(Engine):
    """The servers of rollout_server as a rollout engine. Rank 0 waits for them, checks them and
    sends them the weights; every rank knows which of them hold the current weights."""

    def __init__(self, model: str, config: dict, dtype: torch.dtype):
        self.rank = dist.get_rank()
        self.seconds = config["rollout_timeout"]  # limit for one answer, and for servers to start
        self.longest_prompt = config["max_prompt_length"]
        self.longest = max_sequence_length(config)
        self.uses_nccl = config["weight_sync"] == "nccl"  # else the servers read files
        self.vocabulary = AutoConfig.from_pretrained(model, trust_remote_code=False).vocab_size
        self.tag = client_tag()
        self.servers = [Server(url, self.seconds) for url in addresses(config["rollout_server"])]

        self.live = []  # servers that hold the weights `version`
        self.missing = {}  # {url: why the server does not hold them}
        self.absent = {}  # self.missing after the last sync, of which the user was told
        self.version = ""  # the name of the weights that were synced last
        self.updates = 0  # number of syncs
        self.counts = dict.fromkeys(COUNTS, 0)
        self.lock = threading.Lock()  # guards live, missing and counts: requests run in threads
        # for waiting times only; its own generator, so that the global one is not disturbed
        self.random = random.Random(self.rank)
        self.ahead = None  # (request, future) that begin() has started
        # one thread for the whole run: reward workers that it starts die when it ends
        self.background = ThreadPoolExecutor(1)

        self.name, models = self.on_rank_0(self.start)
        for server, served in zip(self.servers, models):
            server.model = served
        self.transfer = self.make_transfer(model, config, dtype)

    def start(self) -> tuple[str, list[str]]:
        """Waits until all servers answer, and checks their settings. Returns the name of this run's
        weights, and each server's name for the model. Runs on rank 0."""
        self.wait_for_servers()
        # all servers at once: each takes seconds to list its settings
        on_each(self.servers, self.check)
        return run_name(), [server.model for server in self.servers]

    def check(self, server: Server) -> None:
        """UserError if the server's settings don't fit."""
        server.check(self.longest, self.uses_nccl)

    def checked_version(self, server: Server) -> str:
        """The name of the weights that the server holds. If these are not what was synced last, the
        server may have been started again: ServerError if its settings don't fit any more, because
        its log-probs may be of another distribution."""
        version = server.version()
        if self.version and version != self.version:
            try:
                self.check(server)
            except UserError as error:
                raise ServerError(str(error)) from None
        return version

    def wait_for_servers(self) -> None:
        """Waits until every server answers. UserError after rollout_timeout, with the reason for
        each that does not."""
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
                # a server that has answered is not asked again
                waiting = [server for server in waiting if server.url in absent]
                time.sleep(1)

    def make_transfer(self, model: str, config: dict, dtype: torch.dtype):
        """The object whose send(named_parameters, version) takes the weights to the servers."""
        if self.uses_nccl:
            from server.nccl import NcclTransfer  # imports vLLM

            return NcclTransfer(self, model, dtype)
        folder = Path(config["output_dir"]) / "weights"
        if config["weight_sync"] != "disk":
            folder = Path(config["weight_sync"])
        return DiskTransfer(self, folder)

    def on_rank_0(self, work):
        """Runs work() on rank 0. Every rank returns its result, or raises its error."""
        outcome = [None]
        if self.rank == 0:
            try:
                outcome = [(work(), None)]
            except (UserError, RunStopped, OSError) as error:
                outcome = [(None, error)]
            except ServerError as error:
                outcome = [(None, RunStopped(str(error)))]
        # only the errors above, which can be pickled, are passed on. Any other error ends rank 0
        # here, and torchrun then ends the others
        dist.broadcast_object_list(outcome)
        result, error = outcome[0]
        if error:
            raise error
        return result

    # --- completions

    def generate(
        self, prompts_ids: list[list[int]], n: int, sampling: Sampling, group_done=None
    ) -> list:
        """As in other engines (rollout.py). RolloutsLost on all ranks if on any of them no server
        is left or a prompt does not get its completions."""
        request = (prompts_ids, n, sampling)
        # another request, such as an evaluation's, leaves self.ahead as it is
        if self.ahead and self.ahead[0] == request:
            work = self.ahead[1].result
            self.ahead = None
        else:
            work = partial(self.ask, *request, group_done)
        return all_or_none(work)

    def begin(self, prompts_ids: list[list[int]], n: int, sampling: Sampling, group_done) -> None:
        """Starts generate() in the background; generate() with the same arguments then returns what
        came."""
        request = (prompts_ids, n, sampling)
        self.ahead = (request, self.background.submit(self.ask, *request, group_done))

    def ask(
        self, prompts_ids: list[list[int]], n: int, sampling: Sampling, group_done
    ) -> list[dict]:
        """This rank's part of generate()."""
        longest = max(map(len, prompts_ids), default=0)
        if longest > self.longest_prompt:
            raise ValueError(
                f"a prompt of {longest} tokens must not leave: "
                f"max_prompt_length={self.longest_prompt}"
            )
        self.leave_out_changed()
        # a training step gives names, made of its number and the prompt's place in it
        names = sampling.names
        if not names:  # an evaluation: names with the number of syncs
            names = [f"u{self.updates}-r{self.rank}-p{i}" for i in range(len(prompts_ids))]
        groups = {}
        # max: a rank may have no prompts, and a pool needs at least one thread
        pool = ThreadPoolExecutor(min(CONCURRENCY, max(1, len(prompts_ids))))
        try:
            asked = {}  # future: index of its prompt
            prompts = zip(prompts_ids, sampling.seeds, names, strict=True)
            for i, (prompt_ids, seed, name) in enumerate(prompts):
                body = request_body(prompt_ids, n, seed, sampling)
                asked[pool.submit(self.group, i, body, f"{self.tag}-{name}")] = i
            for future in futures.as_completed(asked):
                i = asked[future]
                groups[i] = future.result()
                if group_done:
                    group_done(i, groups[i])
        finally:
            pool.shutdown(cancel_futures=True)  # after an error the other prompts are useless
        return in_prompt_order(groups)

    def group(self, i: int, body: dict, name: str) -> list[dict]:
        """The completions of prompt i. Missing ones are asked for again, from another server and
        with another seed."""
        n = body["n"]
        rollouts = []
        for attempt in range(TRIES):
            if attempt:  # wait longer each time; random, so that requests don't come all at once
                time.sleep(0.25 * 2**attempt * self.random.uniform(0.5, 1.5))
            server = self.choose(i + attempt)
            suffix = f"-a{attempt}" if attempt else ""
            wanted = n - len(rollouts)
            # sample i of a request has seed + i, so this seed must be far from the earlier ones
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
        """The usable completions in a server's answer to one request."""
        headers = {"X-Request-Id": name, "X-VLLM-Client-Tag": self.tag}
        answer = server.call("/v1/completions", body, headers, largest=largest_answer(body))
        rollouts = completions_in(answer, body, self.vocabulary)
        # a server that was restarted meanwhile has sampled with the weights of its start
        self.check_weights(server)
        server.strikes = 0
        return rollouts

    # --- which servers can be asked

    def choose(self, turn: int) -> Server:
        """The live server for this turn. Servers take turns; each rank starts with a different one.
        RolloutsLost if none is left."""
        with self.lock:
            if self.live:
                return self.live[(turn + self.rank) % len(self.live)]
            reasons = "; ".join(self.missing.values())
        urls = ", ".join(server.url for server in self.servers)
        raise RolloutsLost(f"no rollout server is left of {urls}: {reasons}")

    def strike(self, server: Server, error: ServerError) -> None:
        """Counts a server's failure, unless the answer was to another request: that may be a
        proxy's fault. Leaves the server out until the next sync if it is gone, or has failed
        STRIKES times in a row."""
        with self.lock:
            if not error.foreign:
                server.strikes += 1
            # the last live server stays in for all TRIES
            too_often = server.strikes >= STRIKES and len(self.live) > 1
            if server in self.live and (error.gone or too_often):
                self.live.remove(server)
                self.missing[server.url] = str(error)
                tqdm.write(
                    f"rank {self.rank}: rollout server left out until the next sync: {error}"
                )

    def check_weights(self, server: Server) -> None:
        """ServerError if a server does not hold the weights that were synced last."""
        version = server.version()
        if version != self.version:
            raise ServerError(
                f"{server.url} holds weights {quoted(version)}, not {self.version!r}: it was "
                f"started again, or another run uses it",
                gone=True,
            )

    def leave_out_changed(self) -> None:
        """Leaves out the live servers that no longer hold our weights, before they sample."""
        with self.lock:
            live = list(self.live)
        for server in live:
            try:
                self.check_weights(server)
            except ServerError as error:
                self.strike(server, error)

    # --- weights

    def sync(self, named_parameters) -> None:
        """Sends the weights to every server, also to those that were left out before. All ranks
        call it together, because ZeRO-3 gathers the weights here. If no server takes them, the next
        generate() fails."""
        self.wait()  # a batch sampled ahead must have the weights that the servers still hold
        dist.barrier()  # other ranks may still be sampling
        self.updates += 1
        version = f"{self.name}-{self.updates}"
        missing = self.transfer.send(named_parameters, version)
        self.version = version
        with self.lock:  # servers that were left out get another chance
            self.missing = missing
            self.live = [server for server in self.servers if server.url not in missing]
            for server in self.live:
                server.strikes = 0
        if self.rank == 0:
            self.tell_absent(missing)

    def tell_absent(self, missing: dict) -> None:
        """Prints which servers a sync has newly missed, or for another reason than the last one,
        and which have come back. One that stays away would otherwise fill the log, step by step."""
        for url, sentence in missing.items():
            if self.absent.get(url) != sentence:
                tqdm.write(
                    f"rollout server without weights, left out until a sync reaches it: {sentence}"
                )
        for url in self.absent.keys() - missing.keys():
            tqdm.write(f"rollout server in use again: {url}")
        self.absent = dict(missing)  # a copy: strike() adds to the other

    def wait(self) -> None:
        """Until the batch that is being sampled ahead is done, if there is one."""
        if self.ahead:
            futures.wait([self.ahead[1]])

    # --- counts and the end

    def count(self, what: str, number: int) -> None:
        with self.lock:
            self.counts[what] += number

    def take_metrics(self) -> dict:
        """{"rollout/failed", "rollout/foreign", "rollout/refilled"}, summed over all ranks since
        the last call, and "rollout/servers", the number of live ones. All ranks call it
        together."""
        with self.lock:
            local = self.counts | {"servers": len(self.live)}
            self.counts = dict.fromkeys(COUNTS, 0)
        shares = [None] * dist.get_world_size()
        dist.all_gather_object(shares, local)
        metrics = {}
        for what in COUNTS:
            metrics[f"rollout/{what}"] = sum(share[what] for share in shares)
        # min: a server that one rank has left out counts as lost
        metrics["rollout/servers"] = min(share["servers"] for share in shares)
        return metrics

    def close(self) -> None:
        self.background.shutdown(wait=False)
        for server in self.servers:
            server.http.close()
        if self.rank == 0:
            self.transfer.close()


def client_tag() -> str:
    """The beginning of this rank's request ids."""
    # a launcher may set a tag, to tell apart runs that share servers
    usual = f"rank-{dist.get_rank()}-of-{dist.get_world_size()}"
    tag = os.environ.get("VLLM_CLIENT_TAG") or usual
    if not (tag.isascii() and tag.isprintable() and " " not in tag):
        raise UserError(
            f"VLLM_CLIENT_TAG={tag!r} goes into HTTP headers: letters, digits and signs of ASCII, "
            f"no spaces"
        )
    return tag


def request_body(prompt_ids: list[int], n: int, seed: int, sampling: Sampling) -> dict:
    """A request for n completions from the policy's own distribution, whatever the server's
    defaults are."""
    return {
        "prompt": prompt_ids,
        "n": n,
        "max_tokens": sampling.max_tokens,
        "seed": seed,
        "temperature": sampling.temperature,
        # all of them, because for a missing one the server may use generation_config.json
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "stop_token_ids": sampling.stop_token_ids,
        "logprobs": 0,  # the sampled token's only
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,  # instead of their texts, which may be of any length
    }


def all_or_none(work) -> list[dict]:
    """The rollouts that work() returns; RolloutsLost on all ranks if work() raises it on one."""
    rollouts = []
    lost = ""
    try:
        rollouts = work()
    except RolloutsLost as error:
        lost = str(error)
    # every rank must know, because one that went on alone would hang in the next collective
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
