"""One stock vLLM server over HTTP: its requests, and the limits and checks of what it answers.

server = Server("http://127.0.0.1:8000", seconds=600)
server.call("/v1/completions", {...}, {"X-Request-Id": "me-s1-p0"})      # ServerError unless it is JSON, in time, and an answer to this request
"""

import json
import math
import os
import time

import httpx

from common import UserError

LARGEST_ANSWER = 2**28  # bytes


class ServerError(RuntimeError):
    """A request that failed; gone: nobody answers there any more."""

    def __init__(self, sentence: str, gone: bool = False, foreign: bool = False):
        super().__init__(sentence)
        self.gone, self.foreign = gone, foreign


class Server:
    """One vLLM server. Calls may come from many threads."""

    def __init__(self, url: str, seconds: float):
        self.url, self.seconds, self.strikes = url, seconds, 0
        # no proxy of the environment: these are machines next door
        self.http = httpx.Client(
            base_url=url,
            timeout=httpx.Timeout(seconds, connect=min(10.0, seconds)),
            trust_env=False,
            # idle ones go before vLLM closes them, after 5 s: it could do so just when the next request leaves
            limits=httpx.Limits(
                max_connections=None, max_keepalive_connections=64, keepalive_expiry=2.0
            ),
        )

    def call(
        self,
        path: str,
        body: dict | None = None,
        headers: dict | None = None,
        seconds: float | None = None,
    ):
        """The JSON that a GET, or with a body a POST, brings (None if it is empty); ServerError after `seconds`, or if it is anything else."""
        end = time.monotonic() + (seconds or self.seconds)
        data = bytearray()
        try:
            with self.http.stream(
                "GET" if body is None else "POST",
                path,
                json=body,
                headers=headers,
                timeout=seconds or httpx.USE_CLIENT_DEFAULT,
            ) as answer:
                for piece in answer.iter_bytes():
                    data += piece
                    if len(data) > LARGEST_ANSWER or time.monotonic() > end:
                        raise ServerError(
                            f"{self.url}{path} sent {len(data)} bytes and no end within {seconds or self.seconds:.0f} s or {LARGEST_ANSWER} bytes"
                        )
        except httpx.TimeoutException:
            raise ServerError(
                f"{self.url}{path} did not answer within {seconds or self.seconds:.0f} s"
            ) from None
        except httpx.ConnectError as error:
            raise ServerError(
                f"{self.url} is not there: {error or type(error).__name__}", gone=True
            ) from None
        except (httpx.HTTPError, OSError) as error:
            raise ServerError(
                f"{self.url}{path} broke off: {error or type(error).__name__}"
            ) from None
        if answer.status_code != 200:
            raise ServerError(
                f"{self.url}{path} answered {answer.status_code}: {bytes(data[:300]).decode(errors='replace')}"
            )
        try:
            found = json.loads(data) if data else None
        except (ValueError, RecursionError):
            raise ServerError(
                f"{self.url}{path} sent {len(data)} bytes that are not JSON"
            ) from None
        if headers:
            echoes = {
                str(found.get("id") if isinstance(found, dict) else None).removeprefix("cmpl-"),
                answer.headers.get("X-Request-Id", headers["X-Request-Id"]),
            }
            if echoes != {headers["X-Request-Id"]}:
                raise ServerError(
                    f"{self.url} answered request {headers['X-Request-Id']} with an answer to {max(echoes - {headers['X-Request-Id']})}",
                    foreign=True,
                )
        return found

    def version(self) -> str:
        found = self.call("/weight_info", seconds=min(30.0, self.seconds))
        if not isinstance(found, dict):
            raise ServerError(f"{self.url}/weight_info names no weight_version")
        return str(found.get("weight_version"))

    def seal(self, version: str) -> None:
        """After new weights: what it has cached for the old ones goes, and it remembers the name of these."""
        if self.call("/reset_prefix_cache", {}) != {"success": True}:
            raise ServerError(f"{self.url} could not forget what it had cached for the old weights")
        self.call("/update_weight_version", {"new_version": version})

    def check(self, longest: int, transfers: bool) -> None:
        """UserError if this is not a server that can be used; sets the name of its model."""
        try:
            self.version()
            (model,) = self.call("/v1/models")["data"][:1]
            self.model, limit = str(model["id"]), int(model["max_model_len"])
            settings = self.call("/server_info?config_format=json")["vllm_config"]
            mode, transfer = (
                settings["model_config"]["logprobs_mode"],
                settings["weight_transfer_config"],
            )
        except (ServerError, KeyError, TypeError, ValueError) as error:
            raise UserError(
                f"rollout_server: {self.url} does not speak vLLM's development API ({error}); start it with python serve.py, or with "
                f"VLLM_SERVER_DEV_MODE=1"
            ) from None
        if limit < longest:
            raise UserError(
                f"rollout_server: {self.url} has max_model_len={limit}, max_prompt_length + max_completion_length is {longest}"
            )
        if mode != "processed_logprobs":
            raise UserError(
                f"rollout_server: {self.url} has logprobs_mode={mode!r}: start it with --logprobs-mode processed_logprobs, as python serve.py does"
            )
        if transfers and not transfer:
            raise UserError(
                f'rollout_server: {self.url} takes no weights over NCCL: start it with --weight-transfer-config \'{{"backend": "nccl"}}\', '
                f"as python serve.py --weight_sync=nccl does"
            )


def addresses(setting: str) -> list[str]:
    """The URLs of rollout_server; "auto" stands for what a launcher, such as slurm/train.sh, has put into ROLLOUT_SERVER."""
    if setting == "auto" and not os.environ.get("ROLLOUT_SERVER"):
        raise UserError(
            "rollout_server='auto': no launcher has set ROLLOUT_SERVER; name the servers: --rollout_server=http://host:8000,http://other:8000"
        )
    urls = [
        url.strip().rstrip("/")
        for url in (os.environ["ROLLOUT_SERVER"] if setting == "auto" else setting).split(",")
        if url.strip()
    ]
    for url in urls:
        if not url.startswith(("http://", "https://")):
            raise UserError(
                f"rollout_server={setting!r}: {url!r} must begin with http:// or https://"
            )
        try:
            found = httpx.URL(url)
        except httpx.InvalidURL as error:
            raise UserError(f"rollout_server={setting!r}: {url!r}: {error}") from None
        if not found.host:
            raise UserError(f"rollout_server={setting!r}: {url!r} names no host")
        if found.port is not None and not 1 <= found.port <= 65535:
            raise UserError(
                f"rollout_server={setting!r}: {url!r}: port {found.port} can't exist, ports are 1 to 65535"
            )
    if not urls:
        raise UserError(
            "rollout_engine='server' needs rollout_server='http://host:port', several separated by commas; python serve.py starts one"
        )
    return list(dict.fromkeys(urls))


def completions_in(
    answer: dict, prompt_ids: list[int], most: int, tokens: int, vocabulary: int
) -> list[dict]:
    """At most `most` rollouts of an answer of /v1/completions, those that are whole: 1 to `tokens` token ids below `vocabulary` with a
    finite log-prob each. Others are left out: they are asked for again."""
    found = []
    for choice in answer["choices"][:most] if isinstance(answer.get("choices"), list) else ():
        try:
            ids, logps = choice["token_ids"], choice["logprobs"]["token_logprobs"]
            whole = (
                0 < len(ids) <= tokens
                and len(ids) == len(logps)
                and all(type(i) is int and 0 <= i < vocabulary for i in ids)
                and all(type(x) in (int, float) and math.isfinite(x) and x <= 0 for x in logps)
                and choice["finish_reason"] in ("stop", "length")
                and choice.get("prompt_token_ids") in (None, prompt_ids)
            )
        except (KeyError, TypeError, OverflowError):
            continue
        if whole:
            found.append(
                {
                    "prompt_ids": prompt_ids,
                    "completion_ids": ids,
                    "logprobs": logps,
                    "finish_reason": choice["finish_reason"],
                }
            )
    return found
