"""What a vLLM server may send in the place of completions: BAD, and what it is made of. An answer
is a function of the request, as StandIn takes it."""

import json
import math
import time

from stand_ins import choice, usual, with_choices


def raw(content: bytes, length: int | None = None, pause: float = 0.0):
    """Writes `content` as it is, byte by byte if there is a pause between them."""
    length = len(content) if length is None else length
    head = f"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {length}\r\n\r\n"
    piece = 1 if pause else max(1, len(content))

    def write(handler):
        handler.wfile.write(head.encode())
        for i in range(0, len(content), piece):
            handler.wfile.write(content[i : i + piece])
            handler.wfile.flush()
            time.sleep(pause)

    return lambda request: write


def dripped_head(pause: float):
    """Sends a header now and then, and never the last one."""

    def write(handler):
        handler.wfile.write(b"HTTP/1.1 200 OK\r\n")
        for i in range(1000):
            handler.wfile.write(b"X-%d: 1\r\n" % i)
            handler.wfile.flush()
            time.sleep(pause)

    return lambda request: write


def no_http(content: bytes):
    return lambda request: lambda handler: handler.wfile.write(content)


def echo(body: str | None, header: str | None):
    """An answer with these ids; "own" is the right one, None leaves it out."""

    def answer(request):
        status, found, headers = usual(request)
        if body != "own":
            found["id"] = body
        if body is None:
            del found["id"]
        if header != "own":
            headers["X-Request-Id"] = header
        if header is None:
            headers = {}
        return status, found, headers

    return answer


def choices(value):
    """An answer whose "choices" are this."""

    def answer(request):
        return 200, {"id": "cmpl-" + request.headers["X-Request-Id"], "choices": value}, {}

    return answer


def changed(**changes):
    """Choices with these entries instead of theirs."""
    return with_choices(lambda body, i: choice(body, i, **changes))


def ids(change):
    """Choices with the token ids change(token ids)."""

    def make(body, i):
        right = choice(body, i)
        return right | {"token_ids": change(right["token_ids"])}

    return with_choices(make)


def logps(change):
    """Choices with the log-probs change(token ids)."""

    def make(body, i):
        right = choice(body, i)
        return right | {"logprobs": {"token_logprobs": change(right["token_ids"])}}

    return with_choices(make)


def first(value):
    """Log-probs of which the first is this."""
    return logps(lambda ids: [value] + [-1.0] * (len(ids) - 1))


BAD = {
    "500": lambda request: (500, {"error": "out of memory"}, {}),
    "503, empty": lambda request: (503, b"", {}),
    "404": lambda request: (404, {"error": "no such model"}, {}),
    "a redirect": lambda request: (307, b"", {"Location": "/elsewhere"}),
    "no bytes at all": lambda request: (200, b"", {}),
    "truncated JSON": lambda request: (200, json.dumps(usual(request)[1]).encode()[:-20], {}),
    "not text": lambda request: (200, b"\xff\xfe\x00", {}),
    "deeply nested": lambda request: (200, b"[" * 200_000, {}),
    "a list": lambda request: (200, [1, 2], {}),
    "null": lambda request: (200, None, {}),
    "a foreign echo in the header": echo("own", "somebody-s1-p0"),
    "a foreign echo in the body": echo("cmpl-somebody-s1-p0", "own"),
    "no echo in the body": echo(None, None),
    "an echo that is no text": echo([1], None),
    "no choices": lambda request: (200, {"id": "cmpl-" + request.headers["X-Request-Id"]}, {}),
    "choices null": choices(None),
    "choices of another kind": choices({"a": 1}),
    "choices that are numbers": choices([1, None, "x", [], {}]),
    "token ids null": ids(lambda right: None),
    "token ids a number": ids(lambda right: 3),
    "token ids text": ids(lambda right: "ab"),
    "token ids floats": ids(lambda right: [1.0] * len(right)),
    "token ids true": ids(lambda right: [True] * len(right)),
    "no token": changed(token_ids=[], logprobs={"token_logprobs": []}),
    "a token id out of the vocabulary": ids(lambda right: [*right[:-1], 100_000]),
    "a negative token id": ids(lambda right: [-1, *right[1:]]),
    "more tokens than asked for": with_choices(
        lambda body, i: choice(body | {"max_tokens": 16}, 0)
    ),
    "a token more than log-probs": ids(lambda right: right[:-1]),
    "log-probs null": logps(lambda ids: None),
    "no log-probs": changed(logprobs=None),
    "one log-prob null": first(None),
    "one NaN": first(math.nan),
    "minus infinity": logps(lambda ids: [-math.inf] * len(ids)),
    "a positive log-prob": first(0.5),
    "a log-prob that float32 can not hold": first(-1e300),
    "log-probs as text": logps(lambda ids: ["-1.0"] * len(ids)),
    "a log-prob of 400 digits": logps(lambda ids: [-(10**400)] * len(ids)),
    "another prompt": changed(prompt_token_ids=[1, 2]),
    "abort": changed(finish_reason="abort"),
    "no finish reason": changed(finish_reason=None),
    "the connection cut off": raw(b'{"id": ', length=1000),
    "not HTTP": no_http(b"hello\r\n\r\n"),
}
# those that are an answer to another request than ours
FOREIGN = (
    "a foreign echo in the header",
    "a foreign echo in the body",
    "no echo in the body",
    "an echo that is no text",
    "a list",
    "null",
    "no bytes at all",
)
