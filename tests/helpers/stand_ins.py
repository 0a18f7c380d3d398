"""What the tests of server/ put in the place of a vLLM server, of the network in between and of
torch.distributed, to misbehave on purpose.

StandIn   a made-up vLLM server: nothing is sampled, the tokens of a completion tell which prompt
          and seed were asked for
Proxy     a reverse proxy in front of servers, real or made up: it records, delays, and mixes up
          clients
FakeWorld torch.distributed for ranks that are threads of this process
"""

import json
import pickle
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

import httpx
from deadlines import PATIENCE


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def setup(self):
        super().setup()
        self.server.connections.add(self.connection)

    def do_GET(self):
        data = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        request = SimpleNamespace(
            path=self.path,
            body=json.loads(data) if data else None,
            headers=self.headers,
            data=data,
            method=self.command,
        )
        answer = self.server.answer(request)
        if callable(answer):  # writes by itself, badly; nothing more can come over this connection
            self.close_connection = True
            answer(self)
            return
        status, content, headers = answer
        if not isinstance(content, bytes):
            content = json.dumps(content).encode()
        self.send_response(status)
        for key, value in {"Content-Length": len(content), **headers}.items():
            self.send_header(key, str(value))
        self.end_headers()
        self.wfile.write(content)

    do_POST = do_GET

    def log_message(self, *args):
        pass


class Quiet(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128
    allow_reuse_address = True

    def handle_error(self, request, address):
        pass  # a client that went away


class Listening:
    """answer(request) in a thread for each connection, until close()."""

    def __init__(self, port: int = 0):
        self.http = Quiet(("127.0.0.1", port), Handler)
        self.http.answer = self.answer
        self.http.connections = set()
        self.url = f"http://127.0.0.1:{self.http.server_port}"
        self.lock = threading.Lock()
        threading.Thread(target=self.http.serve_forever, args=(0.02,), daemon=True).start()

    def close(self) -> None:
        """As if it was killed: open connections break too."""
        self.http.shutdown()
        self.http.server_close()
        for connection in list(self.http.connections):  # a thread may add one
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)


def choice(body: dict, i: int, **changes) -> dict:
    """Completion i of a request: two to max_tokens tokens that begin with the prompt's first token
    and a piece of the seed."""
    rest = range(1, body["max_tokens"] - 1 - i % 3)
    ids = [body["prompt"][0], (body["seed"] + i) % 89, *rest]
    ids = ids[: body["max_tokens"]]
    usual = {
        "index": i,
        "token_ids": ids,
        "logprobs": {"token_logprobs": [-0.5] * len(ids)},
        "finish_reason": "stop",
        "prompt_token_ids": body["prompt"],
    }
    return usual | changes


def with_choices(make, count: int | None = None):
    """A server whose choice i is make(body, i); `count` of them instead of those asked for."""

    def answer(request):
        name = request.headers["X-Request-Id"]
        choices = [make(request.body, i) for i in range(count or request.body["n"])]
        return 200, {"id": f"cmpl-{name}", "choices": choices}, {"X-Request-Id": name}

    return answer


usual = with_choices(choice)  # what a healthy server sends


def together(count: int) -> list:
    """A plan for the first `count` requests: each is answered when all of them are there."""
    all_there = threading.Barrier(count, timeout=PATIENCE)

    def answer(request):
        all_there.wait()
        return usual(request)

    return [answer] * count


class StandIn(Listening):
    """`plan`: answers to the first completions that are asked for, as functions of the request;
    then `completion` for all others, each after `seconds`. `other`: {path: function of the request}
    for what is not as usual elsewhere."""

    def __init__(self, port: int = 0, completion=usual, other=(), seconds: float = 0.0):
        self.plan = []
        self.completion = completion
        self.other = dict(other)
        self.seconds = seconds
        self.version = "default"  # of its weights
        self.log = []  # (path, body, headers) in order of arrival
        self.now = 0  # completions under way
        self.most = 0  # at a time
        self.settings = {
            "model_config": {"logprobs_mode": "processed_logprobs"},
            "weight_transfer_config": {"backend": "nccl"},
        }
        super().__init__(port)

    def paths(self, *wanted) -> list[str]:
        return [path for path, _, _ in self.log if path in wanted or not wanted]

    def bodies(self, wanted: str) -> list[dict]:
        return [body for path, body, _ in self.log if path == wanted]

    def completions(self) -> list:
        """(body, headers) of every request for completions."""
        return [(body, headers) for path, body, headers in self.log if path == "/v1/completions"]

    def request_ids(self) -> list[str]:
        return [headers["X-Request-Id"] for _, headers in self.completions()]

    def answer(self, request):
        path = request.path.partition("?")[0]
        with self.lock:
            self.log.append((path, request.body, dict(request.headers)))
        if path in self.other:
            return self.other[path](request)
        if path == "/v1/completions":
            return self.complete(request)
        if path == "/update_weight_version":
            self.version = request.body["new_version"]
        content = {
            "/weight_info": {"weight_version": self.version},
            "/v1/models": {"data": [{"id": "policy", "max_model_len": 64}]},
            "/get_world_size": {"world_size": 2},
            "/server_info": {"vllm_config": self.settings},
            "/reset_prefix_cache": {"success": True},
            "/health": b"",
        }
        return 200, content.get(path, {}), {}

    def complete(self, request):
        with self.lock:
            self.now += 1
            self.most = max(self.most, self.now)
            answer = self.plan.pop(0) if self.plan else self.completion
        time.sleep(self.seconds)
        try:
            return answer(request)
        finally:
            with self.lock:
                self.now -= 1
                self.log.append(("answered", None, {}))


class Proxy(Listening):
    """Passes everything on to `targets` in turn. `mixes`: two requests that are under way at the
    same time get each other's answers; a request that stays alone for `patience` seconds gets its
    own."""

    patience = 0.5

    PASSED_ON = ("content-type", "x-request-id", "x-vllm-client-tag")

    def __init__(self, *targets: str, mixes: bool = False):
        self.clients = [
            httpx.Client(base_url=url, timeout=PATIENCE, trust_env=False) for url in targets
        ]
        self.mixes = mixes
        self.log = []  # (path, body, headers) in order of arrival
        self.answers = {}  # {request id: bytes}
        self.waiting = None  # whose answer is held back, for the next one
        super().__init__()

    def answer(self, request):
        with self.lock:
            self.log.append((request.path, request.body, dict(request.headers)))
            client = self.clients[len(self.log) % len(self.clients)]
        headers = {}
        for name, value in request.headers.items():
            if name.lower() in self.PASSED_ON:
                headers[name] = value
        found = client.request(request.method, request.path, content=request.data, headers=headers)
        echo = {}
        if "x-request-id" in found.headers:
            echo["x-request-id"] = found.headers["x-request-id"]
        answer = (found.status_code, found.content, echo)
        if request.path != "/v1/completions":
            return answer
        self.answers[request.headers["X-Request-Id"]] = found.content
        return self.exchange(answer) if self.mixes else answer

    def exchange(self, answer: tuple) -> tuple:
        mine = {"answer": answer, "met": threading.Event()}
        with self.lock:
            partner = self.waiting
            if partner is not None:
                theirs = partner["answer"]
                partner["answer"] = answer
                self.waiting = None
                partner["met"].set()
                return theirs
            self.waiting = mine
        mine["met"].wait(self.patience)
        with self.lock:
            if self.waiting is mine:
                self.waiting = None
            return mine["answer"]

    def close(self) -> None:
        super().close()
        for client in self.clients:
            client.close()


class FakeWorld:
    """What server/engine.py uses of torch.distributed; objects are pickled as they would be
    there."""

    def __init__(self, size: int):
        self.size = size
        self.here = threading.local()
        self.meet = threading.Barrier(size)
        self.table = [b""] * size

    def get_rank(self) -> int:
        return getattr(self.here, "rank", 0)

    def get_world_size(self) -> int:
        return self.size

    def barrier(self) -> None:
        self.meet.wait(PATIENCE)

    def all_gather_object(self, found: list, value) -> None:
        self.table[self.get_rank()] = pickle.dumps(value)
        self.meet.wait(PATIENCE)
        found[:] = map(pickle.loads, self.table)
        self.meet.wait(PATIENCE)

    def broadcast_object_list(self, values: list) -> None:
        shares = [None] * self.size
        self.all_gather_object(shares, values)
        values[:] = shares[0]

    def run(self, work) -> list:
        """What work(rank) has returned on each rank, all at once; where one raises, that comes
        out."""
        found = self.outcomes(work)
        for outcome in found:
            if isinstance(outcome, Exception):
                raise outcome
        return found

    def outcomes(self, work) -> list:
        """As run(), with the exceptions in their places."""

        def one(rank):
            self.here.rank = rank
            try:
                return work(rank)
            except Exception as error:
                return error

        with ThreadPoolExecutor(self.size) as pool:
            return list(pool.map(one, range(self.size)))
