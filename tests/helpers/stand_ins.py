"""What test_server.py puts in the place of a vLLM server, of the network in between and of torch.distributed, to misbehave on purpose.

StandIn   a made-up vLLM server: nothing is sampled, the tokens of a completion tell which prompt and seed were asked for
Proxy     a reverse proxy in front of servers, real or made up: it records, delays, and mixes up clients
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
            return answer(self)
        status, content, headers = answer
        content = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        for key, value in {"Content-Length": len(content), **headers}.items():
            self.send_header(key, str(value))
        self.end_headers()
        self.wfile.write(content)

    do_POST = do_GET

    def log_message(self, *args):
        pass


class Listening:
    """answer(request) in a thread for each connection, until close()."""

    def __init__(self, port: int = 0):
        class Quiet(ThreadingHTTPServer):
            daemon_threads, request_queue_size, allow_reuse_address = True, 128, True

            def handle_error(self, request, address):
                pass  # a client that went away

        self.http = Quiet(("127.0.0.1", port), Handler)
        self.http.answer, self.http.connections = self.answer, set()
        self.url = f"http://127.0.0.1:{self.http.server_port}"
        self.lock = threading.Lock()
        threading.Thread(target=self.http.serve_forever, args=(0.02,), daemon=True).start()

    def close(self) -> None:
        """As if it was killed: open connections break too."""
        self.http.shutdown()
        self.http.server_close()
        for connection in self.http.connections:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)


def choice(body: dict, i: int, **changes) -> dict:
    """Completion i of a request: two to max_tokens tokens that begin with the prompt's first token and a piece of the seed."""
    ids = [body["prompt"][0], (body["seed"] + i) % 89, *range(1, body["max_tokens"] - 1 - i % 3)][
        : body["max_tokens"]
    ]
    return {
        "index": i,
        "token_ids": ids,
        "logprobs": {"token_logprobs": [-0.5] * len(ids)},
        "finish_reason": "stop",
        "prompt_token_ids": body["prompt"],
    } | changes


def usual(request) -> tuple:
    """What a healthy server sends."""
    name = request.headers["X-Request-Id"]
    return (
        200,
        {
            "id": f"cmpl-{name}",
            "choices": [choice(request.body, i) for i in range(request.body["n"])],
        },
        {"X-Request-Id": name},
    )


def with_choices(make):
    """A server whose choice i is make(body, i)."""

    def answer(request):
        status, found, headers = usual(request)
        return (
            status,
            found | {"choices": [make(request.body, i) for i in range(request.body["n"])]},
            headers,
        )

    return answer


class StandIn(Listening):
    """`plan`: answers to the first completions that are asked for, as functions of the request; then `completion` for all others. `other`: {path:
    function of the request} for what is not as usual elsewhere."""

    def __init__(self, port: int = 0, completion=usual, other=(), seconds: float = 0.0):
        self.plan, self.completion, self.other, self.seconds = [], completion, dict(other), seconds
        self.version, self.log, self.now, self.most = (
            "default",
            [],
            0,
            0,
        )  # log: (path, body or headers) in order of arrival
        self.settings = {
            "model_config": {"logprobs_mode": "processed_logprobs"},
            "weight_transfer_config": {"backend": "nccl"},
        }
        super().__init__(port)

    def paths(self, *wanted) -> list[str]:
        return [path for path, _, _ in self.log if path in wanted or not wanted]

    def completions(self) -> list:
        """(body, headers) of every request for completions."""
        return [(body, headers) for path, body, headers in self.log if path == "/v1/completions"]

    def answer(self, request):
        path = request.path.partition("?")[0]
        with self.lock:
            self.log.append((path, request.body, dict(request.headers)))
        if path in self.other:
            return self.other[path](request)
        if path == "/v1/completions":
            with self.lock:
                self.now, self.most = self.now + 1, max(self.most, self.now + 1)
                answer = self.plan.pop(0) if self.plan else self.completion
            time.sleep(self.seconds)
            try:
                return answer(request)
            finally:
                with self.lock:
                    self.now -= 1
                    self.log.append(("answered", None, {}))
        if path == "/update_weight_version":
            self.version = request.body["new_version"]
        found = {
            "/weight_info": {"weight_version": self.version},
            "/v1/models": {"data": [{"id": "policy", "max_model_len": 64}]},
            "/get_world_size": {"world_size": 2},
            "/server_info": {"vllm_config": self.settings},
            "/reset_prefix_cache": {"success": True},
            "/health": b"",
        }
        return 200, found.get(path, {}), {}


class Proxy(Listening):
    """Passes everything on to `targets` in turn, after `seconds` for completions. `mixes`: two requests that are under way at the same time get
    each other's answers; a request that stays alone for half a second gets its own."""

    def __init__(self, *targets: str, mixes: bool = False, seconds: float = 0.0):
        self.clients = [httpx.Client(base_url=url, timeout=60, trust_env=False) for url in targets]
        self.mixes, self.seconds, self.log, self.answers, self.waiting = (
            mixes,
            seconds,
            [],
            {},
            None,
        )  # answers: {request id: bytes}
        super().__init__()

    def answer(self, request):
        completion = request.path == "/v1/completions"
        with self.lock:
            self.log.append((request.path, request.body, dict(request.headers)))
            client = self.clients[len(self.log) % len(self.clients)]
        headers = {
            key: value
            for key, value in request.headers.items()
            if key.lower() in ("content-type", "x-request-id", "x-vllm-client-tag")
        }
        found = client.request(request.method, request.path, content=request.data, headers=headers)
        own = (
            found.status_code,
            found.content,
            {key: found.headers[key] for key in ("x-request-id",) if key in found.headers},
        )
        if completion:
            self.answers[request.headers["X-Request-Id"]] = found.content
            time.sleep(self.seconds)
        return self.exchange(own) if completion and self.mixes else own

    def exchange(self, own: tuple) -> tuple:
        with self.lock:
            partner, mine = self.waiting, {"answer": own, "met": threading.Event()}
            if partner is None:
                self.waiting = mine
            else:
                theirs, partner["answer"], self.waiting = partner["answer"], own, None
                partner["met"].set()
                return theirs
        mine["met"].wait(0.5)
        with self.lock:
            self.waiting = None if self.waiting is mine else self.waiting
            return mine["answer"]

    def close(self) -> None:
        super().close()
        for client in self.clients:
            client.close()


class FakeWorld:
    """What server.py uses of torch.distributed; objects are pickled as they would be there."""

    def __init__(self, size: int):
        self.size, self.here, self.meet, self.table = (
            size,
            threading.local(),
            threading.Barrier(size),
            [b""] * size,
        )

    def get_rank(self) -> int:
        return getattr(self.here, "rank", 0)

    def get_world_size(self) -> int:
        return self.size

    def barrier(self) -> None:
        self.meet.wait(60)

    def all_gather_object(self, found: list, value) -> None:
        self.table[self.get_rank()] = pickle.dumps(value)
        self.meet.wait(60)
        found[:] = map(pickle.loads, self.table)
        self.meet.wait(60)

    def broadcast_object_list(self, values: list) -> None:
        everyone = [None] * self.size
        self.all_gather_object(everyone, values)
        values[:] = everyone[0]

    def run(self, work) -> list:
        """work(rank) on all ranks at once: what each has returned, or the exception that it has raised."""

        def one(rank):
            self.here.rank = rank
            try:
                return work(rank)
            except Exception as error:
                return error

        with ThreadPoolExecutor(self.size) as pool:
            return list(pool.map(one, range(self.size)))
