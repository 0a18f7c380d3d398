"""One stock vLLM server over HTTP: requests to it, and limits and checks of its answers.

    server = Server("http://127.0.0.1:8000", seconds=600)
    server.call("/v1/completions", {...}, {"X-Request-Id": "me-s1-p0"})

call() raises a ServerError unless the answer is JSON, comes in time, and belongs to this request.

A call has one deadline, from connecting to the last byte of the answer, and a limit for the size of
the answer. A server's large answers are read one at a time. Text from a server is quoted in errors.
"""

import json
import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext

import httpcore
import httpx

from common import UserError, quoted

CONNECT_SECONDS = 10  # for connecting: servers are nearby, so a live one accepts at once
BODY_SECONDS = 60  # for the bytes of an answer after its headers
PIECE = 4096  # bytes of a request that are written with one timeout
LEAST_LOGP = -1e4  # no sampled token is less likely than this
LARGEST_ANSWER = 2**16  # bytes, unless a call says otherwise
LARGEST_SETTINGS = 2**22  # bytes of a server's list of its settings
# Sizes of an answer with completions. For each token its JSON has the id three times (up to 7
# digits, twice as text), the log-prob twice (up to 24 digits), the text, and where it begins.
BYTES_PER_TOKEN = 256  # of a completion
BYTES_PER_PROMPT_TOKEN = 16
BYTES_PER_COMPLETION = 2**10
BYTES_AROUND = 2**16


def largest_answer(body: dict) -> int:
    """The most bytes that an answer to a request for completions can have."""
    each = BYTES_PER_COMPLETION
    each += BYTES_PER_TOKEN * body["max_tokens"]
    each += BYTES_PER_PROMPT_TOKEN * len(body["prompt"])
    return BYTES_AROUND + body["n"] * each


class ServerError(RuntimeError):
    """A request that failed. gone: the server is lost to us until the next sync: nobody answers
    there, or it holds other weights. foreign: the answer belongs to somebody else's request."""

    def __init__(self, sentence: str, gone: bool = False, foreign: bool = False):
        super().__init__(sentence)
        self.gone = gone
        self.foreign = foreign


# --- Deadlines. httpcore passes `timeout` to every single wait, so a server that sends a byte now
# and then could make a call last for ever. In this file `timeout` is not a span of time but the
# moment (of time.monotonic) at which the call must be over.


def left(end: float) -> float:
    """Seconds until the moment `end`; ReadTimeout if it has passed."""
    seconds = end - time.monotonic()
    if seconds <= 0:
        raise httpcore.ReadTimeout
    return seconds


class Network(httpcore.NetworkBackend):
    """Makes TCP connections whose `timeout` is a moment."""

    def __init__(self):
        self.tcp = httpcore.SyncBackend()

    def connect_tcp(self, host, port, timeout=None, local_address=None, socket_options=None):
        seconds = min(CONNECT_SECONDS, left(timeout))
        return Stream(self.tcp.connect_tcp(host, port, seconds, local_address, socket_options))


class Stream(httpcore.NetworkStream):
    """A connection whose `timeout` is a moment."""

    def __init__(self, stream: httpcore.NetworkStream):
        self.stream = stream

    def read(self, max_bytes, timeout=None):
        return self.stream.read(max_bytes, left(timeout))

    def write(self, buffer, timeout=None):
        # in pieces, because in one large write every wait for a slow reader gets the whole time
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
        self.seconds = seconds  # limit for a call
        self.strikes = 0  # failures since the last success
        self.model = ""  # the server's name for its model
        self.reading = threading.Lock()  # held while a large answer is read and parsed
        # httpcore ignores proxies in the environment, which is right: servers are nearby
        self.http = httpcore.ConnectionPool(
            max_connections=None,  # the engine limits the number of requests
            max_keepalive_connections=64,
            # vLLM closes idle connections after 5 s. We do so earlier, or it could close one just
            # when we send the next request
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
        """The JSON that a GET, or with a body a POST, returns; None if the answer is empty.
        ServerError after `seconds`, after `largest` bytes, or if the answer is not valid."""
        seconds = seconds or self.seconds
        # answers of the default size don't wait for each other
        turn = self.turn if largest else nullcontext
        largest = largest or LARGEST_ANSWER
        end = time.monotonic() + seconds
        data = bytearray()
        answered = False  # whether the answer's headers have come
        try:
            with self.exchange(path, body, headers, end) as (answer, timeouts):
                answered = True
                with turn(end):
                    # what comes after the headers has a limit of its own, which the error names
                    seconds = min(BODY_SECONDS, left(end))
                    timeouts["read"] = time.monotonic() + seconds
                    for piece in answer.iter_stream():
                        data += piece
                        # count the bytes: a Content-Length may be wrong or missing
                        if len(data) > largest:
                            raise ServerError(
                                f"{self.url}{path} sent {len(data)} bytes and no end, more "
                                f"than the {largest} that an answer to this can have"
                            )
                    return self.checked(path, answer, data, headers)
        except httpcore.ConnectTimeout:
            limit = min(CONNECT_SECONDS, seconds)
            raise ServerError(f"{self.url} took no connection in {limit:.0f} s") from None
        except httpcore.TimeoutException:
            said = f"sent {len(data)} bytes and no end" if answered else "did not answer"
            raise ServerError(f"{self.url}{path} {said} within {seconds:.0f} s") from None
        except httpcore.ConnectError as error:
            # nobody listens there, so don't try again before the next sync
            raise ServerError(f"{self.url} is not there: {quoted(error)}", gone=True) from None
        except (httpcore.NetworkError, httpcore.ProtocolError, OSError) as error:
            words = quoted(error) if str(error) else type(error).__name__
            raise ServerError(f"{self.url}{path} broke off: {words}") from None

    @contextmanager
    def exchange(self, path: str, body: dict | None, headers: dict | None, end: float) -> Iterator:
        """Sends a request. Yields (answer, timeouts): the answer's body has not been read yet, and
        timeouts is a dict of moments that the caller may change."""
        url = httpx.URL(self.url + path)  # splits the URL for httpcore
        target = httpcore.URL(
            scheme=url.raw_scheme, host=url.raw_host, port=url.port, target=url.raw_path
        )
        sent = dict(headers or {})
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
        """Waits until no other large answer of this server is being read."""
        if not self.reading.acquire(timeout=left(end)):
            raise httpcore.ReadTimeout
        try:
            yield
        finally:
            self.reading.release()

    def checked(self, path: str, answer: httpcore.Response, data: bytearray, headers: dict | None):
        """The parsed answer; ServerError unless it is a JSON answer to our request."""
        if answer.status != 200:  # redirects too: nobody else may get our prompts
            words = bytes(data[:300]).decode(errors="replace")
            raise ServerError(f"{self.url}{path} answered {answer.status}: {quoted(words)}")
        try:
            parsed = json.loads(data) if data else None
        except (ValueError, RecursionError):  # RecursionError: nested too deeply
            raise ServerError(
                f"{self.url}{path} sent {len(data)} bytes that are not JSON"
            ) from None
        if headers:
            self.check_echo(parsed, answer, headers["X-Request-Id"])
        return parsed

    def check_echo(self, parsed, answer: httpcore.Response, asked: str) -> None:
        """ServerError if the body or the header names another request than ours."""
        in_body = parsed.get("id") if isinstance(parsed, dict) else None
        echoes = [str(in_body).removeprefix("cmpl-")]
        # the body must have the id; the header is checked if there is one
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
        """The name of the weights that the server holds."""
        info = self.call("/weight_info", seconds=min(30.0, self.seconds))
        if not isinstance(info, dict):
            raise ServerError(f"{self.url}/weight_info names no weight_version")
        return str(info.get("weight_version"))

    def seal(self, version: str) -> None:
        """To call after new weights: the server forgets what it has cached for the old ones, and
        remembers the name of the new ones."""
        if self.call("/reset_prefix_cache", {}) != {"success": True}:
            raise ServerError(f"{self.url} could not forget what it had cached for the old weights")
        # last: a server that reports this name holds the new weights and no older cache
        self.call("/update_weight_version", {"new_version": version})

    def look_alive(self) -> None:
        """ServerError, within seconds, if the server does not answer or is not healthy."""
        self.call("/health", seconds=min(10.0, self.seconds))

    def check(self, longest: int, nccl: bool) -> None:
        """UserError if the server's settings don't fit: it must take sequences of `longest` tokens
        and, if `nccl`, weights over NCCL. Stores the server's name for its model."""
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
        except (ServerError, LookupError, TypeError, ValueError, OverflowError) as error:
            problem = str(error) if isinstance(error, ServerError) else quoted(repr(error))
            raise UserError(
                f"rollout_server: {self.url} does not speak vLLM's development API ({problem}); "
                f"start it with python -m server, or with VLLM_SERVER_DEV_MODE=1"
            ) from None
        # checked here, because wrong settings would show late or not at all
        if limit < longest:
            raise UserError(
                f"rollout_server: {self.url} has max_model_len={limit}, max_prompt_length + "
                f"max_completion_length is {longest}"
            )
        # another mode gives log-probs of another distribution than the one sampled from
        if mode != "processed_logprobs":
            raise UserError(
                f"rollout_server: {self.url} has logprobs_mode={quoted(mode)}: start it with "
                f"--logprobs-mode processed_logprobs, as python -m server does"
            )
        if nccl and not transfer:
            raise UserError(
                f"rollout_server: {self.url} takes no weights over NCCL: start it with "
                f'--weight-transfer-config \'{{"backend": "nccl"}}\', as python -m server '
                f"--weight_sync=nccl does"
            )


def on_each(servers: list[Server], work) -> dict[str, str]:
    """Calls work(server) for all servers at once. Returns {url: sentence} for those where it raised
    a ServerError; any other error is raised here."""
    with ThreadPoolExecutor(len(servers)) as pool:
        futures = {server.url: pool.submit(work, server) for server in servers}
    failed = {}
    for url, future in futures.items():
        try:
            future.result()
        except ServerError as error:
            failed[url] = str(error)
    return failed


def addresses(setting: str) -> list[str]:
    """The URLs in rollout_server. "auto" stands for the environment variable ROLLOUT_SERVER, which
    a launcher such as slurm/train.sh sets."""
    launched = os.environ.get("ROLLOUT_SERVER", "")
    if setting == "auto" and not launched:
        raise UserError(
            "rollout_server='auto': no launcher has set ROLLOUT_SERVER; name the servers: "
            "--rollout_server=http://host:8000,http://other:8000"
        )
    urls = {}  # a dict keeps the order and drops repetitions
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
    """UserError if a URL can't be a server's address."""
    if not url.startswith(("http://", "https://")):
        raise UserError(f"{where} must begin with http:// or https://")
    try:
        parsed = httpx.URL(url)
    except httpx.InvalidURL as error:
        raise UserError(f"{where}: {error}") from None
    if not parsed.host:
        raise UserError(f"{where} names no host")
    if parsed.userinfo:  # not shown here either
        raise UserError(
            f"rollout_server: the address of {parsed.host} has a user or a password in it, which "
            f"config.json, messages and Weights & Biases would show: servers are asked without"
        )
    if parsed.path.rstrip("/").endswith("/v1"):
        raise UserError(f"{where}: leave out /v1, the server is asked for other paths too")
    if parsed.port is not None and not 1 <= parsed.port <= 65535:
        raise UserError(f"{where}: port {parsed.port} can't exist, ports are 1 to 65535")


def completions_in(answer: dict, body: dict, vocabulary: int) -> list[dict]:
    """The valid completions in an answer, at most body["n"], as rollouts without text. Invalid ones
    are left out; the engine asks for them again. body: the request."""
    choices = answer.get("choices")
    if not isinstance(choices, list):
        return []
    rollouts = []
    for choice in choices[: body["n"]]:  # more were not asked for
        try:
            if is_valid(choice, body, vocabulary):
                rollouts.append(
                    {
                        "prompt_ids": body["prompt"],
                        "completion_ids": choice["token_ids"],
                        "logprobs": choice["logprobs"]["token_logprobs"],
                        "finish_reason": choice["finish_reason"],
                    }
                )
        except (KeyError, TypeError, OverflowError):
            continue  # not even shaped like a completion
    return rollouts


def is_valid(choice: dict, body: dict, vocabulary: int) -> bool:
    """Whether a completion consists of 1 to max_tokens token ids below `vocabulary`, each with a
    log-prob above LEAST_LOGP, and belongs to the prompt that we sent."""
    ids = choice["token_ids"]
    logps = choice["logprobs"]["token_logprobs"]
    if not 0 < len(ids) <= body["max_tokens"] or len(ids) != len(logps):
        return False
    for token, logp in zip(ids, logps):
        if type(token) is not int or not 0 <= token < vocabulary:  # True is no token
            return False
        if type(logp) not in (int, float) or not LEAST_LOGP < logp <= 0:  # NaN is refused too
            return False
    if choice["finish_reason"] not in ("stop", "length"):  # such as "abort"
        return False
    # None: older servers do not repeat the prompt
    return choice.get("prompt_token_ids") in (None, body["prompt"])
