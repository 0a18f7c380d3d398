"""One stock vLLM server over HTTP: its requests, and the limits and checks of what it answers.

    server = Server("http://127.0.0.1:8000", seconds=600)
    server.call("/v1/completions", {...}, {"X-Request-Id": "me-s1-p0"})

A ServerError unless what comes is JSON, in time, and an answer to this request.

A call has one deadline, from connecting to the last byte of the answer, and a size that its answer
may have. The large answers of a server are read one at a time. What a server says is quoted.
"""

import base64
import json
import math
import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext

import httpcore
import httpx

from common import UserError, quoted

CONNECT_SECONDS = 10  # a server next door that is there is there at once
BODY_SECONDS = 60  # for the bytes of an answer once its headers are there
PIECE = 4096  # bytes of a request that a socket takes at once or not at all
LARGEST_ANSWER = 2**16  # bytes, unless a call says otherwise
LARGEST_SETTINGS = 2**22  # of a server's list of its settings
# of an answer with completions. A token of it: its id three times (of up to 7 digits, twice as
# text), its log-prob twice (of up to 24), where its text begins, and the text, as JSON writes it
BYTES_PER_TOKEN = 256  # of a completion
BYTES_PER_PROMPT_TOKEN = 16
BYTES_PER_COMPLETION = 2**10
BYTES_AROUND = 2**16


def largest_answer(body: dict) -> int:
    """Bytes that the answer to a request for completions can have."""
    each = BYTES_PER_COMPLETION
    each += BYTES_PER_TOKEN * body["max_tokens"]
    each += BYTES_PER_PROMPT_TOKEN * len(body["prompt"])
    return BYTES_AROUND + body["n"] * each


class ServerError(RuntimeError):
    """A request that failed; gone: nobody answers there any more; foreign: the answer is to
    somebody else's request."""

    def __init__(self, sentence: str, gone: bool = False, foreign: bool = False):
        super().__init__(sentence)
        self.gone = gone
        self.foreign = foreign


# --- waiting. httpcore hands `timeout` down to each single wait, which a server that sends a byte
# now and then begins anew; here it is not a span but the moment at which the call must be over


def left(end: float) -> float:
    """Seconds until `end`."""
    seconds = end - time.monotonic()
    if seconds <= 0:
        raise httpcore.ReadTimeout  # as if the wait had begun and ended
    return seconds


class Network(httpcore.NetworkBackend):
    """TCP connections whose `timeout` is a moment."""

    def __init__(self):
        self.tcp = httpcore.SyncBackend()

    def connect_tcp(self, host, port, timeout=None, local_address=None, socket_options=None):
        seconds = min(CONNECT_SECONDS, left(timeout))
        return Stream(self.tcp.connect_tcp(host, port, seconds, local_address, socket_options))


class Stream(httpcore.NetworkStream):
    def __init__(self, stream: httpcore.NetworkStream):
        self.stream = stream

    def read(self, max_bytes, timeout=None):
        return self.stream.read(max_bytes, left(timeout))

    def write(self, buffer, timeout=None):
        # in pieces, or a server that reads slowly would have the whole time again for each
        for i in range(0, len(buffer), PIECE):
            self.stream.write(buffer[i : i + PIECE], left(timeout))

    def start_tls(self, ssl_context, server_hostname=None, timeout=None):
        return Stream(self.stream.start_tls(ssl_context, server_hostname, left(timeout)))

    def get_extra_info(self, info):
        return self.stream.get_extra_info(info)

    def close(self):
        self.stream.close()


class Server:
    """One vLLM server. Calls may come from many threads."""

    def __init__(self, url: str, seconds: float):
        self.url = url
        self.seconds = seconds  # that a call may take
        self.strikes = 0  # failures without a success in between
        self.model = ""  # the name that it has for its model
        self.reading = threading.Lock()  # held by who reads and parses a large answer
        # nothing of the environment, such as a proxy: these are machines next door
        self.http = httpcore.ConnectionPool(
            max_connections=None,  # the engine says how many requests are under way
            max_keepalive_connections=64,
            # idle ones go before vLLM closes them, after 5 s: it could do so just when the next
            # request leaves
            keepalive_expiry=2.0,
            network_backend=Network(),
        )

    def call(
        self,
        path: str,
        body: dict | None = None,
        headers: dict | None = None,
        seconds: float | None = None,
        largest: int | None = None,
    ):
        """The JSON that a GET, or with a body a POST, brings (None if it is empty); ServerError
        after `seconds`, after `largest` bytes, or if it is anything else."""
        seconds = seconds or self.seconds
        # small ones need not wait for each other
        turn = self.turn if largest else nullcontext
        largest = largest or LARGEST_ANSWER
        end = time.monotonic() + seconds
        data = bytearray()
        answered = False  # whether the headers of an answer are there
        try:
            with self.exchange(path, body, headers, end) as (answer, timeouts):
                answered = True
                with turn(end):
                    # sampling is over: what takes longer from now on is no vLLM at work
                    seconds = min(BODY_SECONDS, left(end))
                    timeouts["read"] = time.monotonic() + seconds
                    for piece in answer.iter_stream():
                        data += piece
                        # counted as it comes: a Content-Length may lie or be missing
                        if len(data) > largest:
                            raise ServerError(
                                f"{self.url}{path} sent {len(data)} bytes and no end, more "
                                f"than the {largest} that an answer to this can have"
                            )
                    return self.checked(path, answer, data, headers)
        except httpcore.TimeoutException:
            said = f"sent {len(data)} bytes and no end" if answered else "did not answer"
            raise ServerError(f"{self.url}{path} {said} within {seconds:.0f} s") from None
        except httpcore.ConnectError as error:
            # nobody listens: no use in trying again before the next sync
            raise ServerError(f"{self.url} is not there: {quoted(error)}", gone=True) from None
        except (httpcore.NetworkError, httpcore.ProtocolError, OSError) as error:
            words = quoted(error) if str(error) else type(error).__name__
            raise ServerError(f"{self.url}{path} broke off: {words}") from None

    @contextmanager
    def exchange(self, path: str, body: dict | None, headers: dict | None, end: float) -> Iterator:
        """(answer, timeouts): its body not read yet; the moments at which waits end, to be
        changed."""
        url = httpx.URL(self.url + path)  # parses what httpcore wants in parts
        target = httpcore.URL(
            scheme=url.raw_scheme, host=url.raw_host, port=url.port, target=url.raw_path
        )
        sent = dict(headers or {})
        if url.userinfo:  # http://user:password@host
            password = f"{url.username}:{url.password}"
            sent["Authorization"] = "Basic " + base64.b64encode(password.encode()).decode()
        method = "GET"
        content = None
        if body is not None:
            method = "POST"
            content = json.dumps(body).encode()
            sent["Content-Type"] = "application/json"
        timeouts = dict.fromkeys(("connect", "read", "write"), end)
        extensions = {"timeout": timeouts}
        with self.http.stream(
            method, target, headers=sent, content=content, extensions=extensions
        ) as answer:
            yield answer, timeouts

    @contextmanager
    def turn(self, end: float) -> Iterator:
        """Waits for the large answer that is being read to be done."""
        if not self.reading.acquire(timeout=left(end)):
            raise httpcore.ReadTimeout
        try:
            yield
        finally:
            self.reading.release()

    def checked(self, path: str, answer: httpcore.Response, data: bytearray, headers: dict | None):
        """What an answer says, parsed, if it is one to our request."""
        if answer.status != 200:  # redirects too: nobody else is to get our prompts
            words = bytes(data[:300]).decode(errors="replace")
            raise ServerError(f"{self.url}{path} answered {answer.status}: {quoted(words)}")
        try:
            found = json.loads(data) if data else None
        except (ValueError, RecursionError):  # the second for what is nested too deeply
            raise ServerError(
                f"{self.url}{path} sent {len(data)} bytes that are not JSON"
            ) from None
        if headers:
            self.check_echo(found, answer, headers["X-Request-Id"])
        return found

    def check_echo(self, found, answer: httpcore.Response, asked: str) -> None:
        """ServerError if the body or the header names another request than ours."""
        in_body = found.get("id") if isinstance(found, dict) else None
        echoes = [str(in_body).removeprefix("cmpl-")]
        # the header is checked where it is there; the body must always say it
        for name, value in answer.headers:
            if name.lower() == b"x-request-id":
                echoes.append(value.decode(errors="replace"))
        for echo in echoes:
            if echo != asked:
                raise ServerError(
                    f"{self.url} answered request {asked} with an answer to {quoted(echo)}",
                    foreign=True,
                )

    def version(self) -> str:
        """The name of the weights that it holds."""
        found = self.call("/weight_info", seconds=min(30.0, self.seconds))
        if not isinstance(found, dict):
            raise ServerError(f"{self.url}/weight_info names no weight_version")
        return str(found.get("weight_version"))

    def seal(self, version: str) -> None:
        """After new weights: what it has cached for the old ones goes, and it remembers the name of
        these."""
        if self.call("/reset_prefix_cache", {}) != {"success": True}:
            raise ServerError(f"{self.url} could not forget what it had cached for the old weights")
        # last: a server that has this name holds the weights and nothing older
        self.call("/update_weight_version", {"new_version": version})

    def look_alive(self) -> None:
        """ServerError, soon, if it is not there or not well."""
        self.call("/health", seconds=min(10.0, self.seconds))

    def check(self, longest: int, transfers: bool) -> None:
        """UserError if this server can't be used for sequences of `longest` tokens, or takes no
        weights over NCCL although it should; learns the name of its model."""
        try:
            self.version()
            models = self.call("/v1/models", largest=LARGEST_SETTINGS)
            model = models["data"][0]
            self.model = str(model["id"])
            limit = int(model["max_model_len"])
            info = self.call("/server_info?config_format=json", largest=LARGEST_SETTINGS)
            settings = info["vllm_config"]
            mode = settings["model_config"]["logprobs_mode"]
            transfer = settings["weight_transfer_config"]
        except (ServerError, LookupError, TypeError, ValueError) as error:
            problem = str(error) if isinstance(error, ServerError) else quoted(repr(error))
            raise UserError(
                f"rollout_server: {self.url} does not speak vLLM's development API ({problem}); "
                f"start it with python -m server, or with VLLM_SERVER_DEV_MODE=1"
            ) from None
        # a wrong setting of the server would show late, or not at all
        if limit < longest:
            raise UserError(
                f"rollout_server: {self.url} has max_model_len={limit}, max_prompt_length + "
                f"max_completion_length is {longest}"
            )
        # log-probs of another distribution than the one that is sampled from
        if mode != "processed_logprobs":
            raise UserError(
                f"rollout_server: {self.url} has logprobs_mode={quoted(mode)}: start it with "
                f"--logprobs-mode processed_logprobs, as python -m server does"
            )
        if transfers and not transfer:
            raise UserError(
                f"rollout_server: {self.url} takes no weights over NCCL: start it with "
                f'--weight-transfer-config \'{{"backend": "nccl"}}\', as python -m server '
                f"--weight_sync=nccl does"
            )


def on_each(servers: list[Server], work) -> dict[str, str]:
    """work(server) for all at once; {url: sentence} of those where it failed."""
    with ThreadPoolExecutor(len(servers)) as pool:
        futures = {server.url: pool.submit(work, server) for server in servers}
    # all have ended by now; another error than theirs is a bug, or meant for the user
    failed = {}
    for url, future in futures.items():
        try:
            future.result()
        except ServerError as error:
            failed[url] = str(error)
    return failed


def addresses(setting: str) -> list[str]:
    """The URLs of rollout_server; "auto" stands for what a launcher, such as slurm/train.sh, has
    put into ROLLOUT_SERVER."""
    launched = os.environ.get("ROLLOUT_SERVER", "")
    if setting == "auto" and not launched:
        raise UserError(
            "rollout_server='auto': no launcher has set ROLLOUT_SERVER; name the servers: "
            "--rollout_server=http://host:8000,http://other:8000"
        )
    urls = {}  # in order, each once
    for part in (launched if setting == "auto" else setting).split(","):
        url = part.strip().rstrip("/")
        if url:
            check_address(url, f"rollout_server={setting!r}: {url!r}")
            urls[url] = None
    if not urls:
        raise UserError(
            "rollout_engine='server' needs rollout_server='http://host:port', several separated by "
            "commas; python -m server starts one"
        )
    return list(urls)


def check_address(url: str, where: str) -> None:
    """UserError for what can't be the address of a server."""
    if not url.startswith(("http://", "https://")):
        raise UserError(f"{where} must begin with http:// or https://")
    try:
        parsed = httpx.URL(url)
    except httpx.InvalidURL as error:
        raise UserError(f"{where}: {error}") from None
    if not parsed.host:
        raise UserError(f"{where} names no host")
    if parsed.port is not None and not 1 <= parsed.port <= 65535:
        raise UserError(f"{where}: port {parsed.port} can't exist, ports are 1 to 65535")


def completions_in(answer: dict, body: dict, vocabulary: int) -> list[dict]:
    """The whole completions in the answer to a request for body["n"] of them, as rollouts without
    text, at most n. Others are left out: they are asked for again."""
    choices = answer.get("choices")
    if not isinstance(choices, list):
        return []
    rollouts = []
    for choice in choices[: body["n"]]:  # what is too much was not asked for
        try:
            if is_whole(choice, body, vocabulary):
                rollouts.append(
                    {
                        "prompt_ids": body["prompt"],
                        "completion_ids": choice["token_ids"],
                        "logprobs": choice["logprobs"]["token_logprobs"],
                        "finish_reason": choice["finish_reason"],
                    }
                )
        except (KeyError, TypeError, OverflowError):
            continue  # something else than a completion
    return rollouts


def is_whole(choice: dict, body: dict, vocabulary: int) -> bool:
    """Whether it is 1 to max_tokens token ids below `vocabulary`, each with a finite log-prob, that
    follow the prompt we sent."""
    ids = choice["token_ids"]
    logps = choice["logprobs"]["token_logprobs"]
    if not 0 < len(ids) <= body["max_tokens"] or len(ids) != len(logps):
        return False
    for token, logp in zip(ids, logps):
        if type(token) is not int or not 0 <= token < vocabulary:  # True is no token
            return False
        if type(logp) not in (int, float) or not math.isfinite(logp) or logp > 0:
            return False
    if choice["finish_reason"] not in ("stop", "length"):  # such as "abort"
        return False
    # older servers do not repeat the prompt
    return choice.get("prompt_token_ids") in (None, body["prompt"])
