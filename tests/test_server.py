"""rollout_engine="server": real vLLM CPU servers that are killed and come back, and stand-ins that misbehave in every other way."""

import json
import math
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import wait
from copy import deepcopy
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import child
import httpx
import pytest
import torch
from engine_worker import PROMPTS, difference, perturb, sampling
from safetensors.torch import load_file
from stand_ins import FakeWorld, Proxy, StandIn, choice, usual, with_choices
from transformers import AutoModelForCausalLM, AutoTokenizer

import checkpoint
import rollout
import sft
import workers
from checkpoint import in_background
from common import RunStopped, UserError, load_config
from policy import Policy, named_weights
from server import __main__ as serve
from server import engine as server
from server import http as vllm_http
from server import nccl as transfer
from server.engine import RolloutsLost, ServerEngine

ROOT = Path(__file__).resolve().parent.parent
FLAGS = [
    "--prompts_per_step=8",
    "--num_generations=4",
    "--max_completion_length=16",
    "--eval_steps=0",
    "--learning_rate=3e-3",
    "--max_steps=3",
    "--max_logp_difference=2e-5",
    "--reward_funcs=['parity_reward:parity']",
    "--rollout_concurrency=2",
    "--rollout_timeout=120",
    "--report_to=",
]


@pytest.fixture(scope="module")
def untied_model_dir(tmp_path_factory):
    folder, tokenizer = tmp_path_factory.mktemp("untied"), sft.tiny_tokenizer()
    sft.tiny_model(len(tokenizer), seed=0, layers=2, tied=False).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def environment() -> dict:
    """Without what torch.distributed of this process, or of an outer one, has left there."""
    own = {
        key: value
        for key, value in os.environ.items()
        if key
        not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "VLLM_CLIENT_TAG")
    }
    return own | {"PYTHONPATH": str(ROOT / "tests" / "helpers")}


class Fleet:
    """Two vLLM servers: 0 has the tied model, 1 the untied one, whose head takes the tied weights too."""

    def __init__(self, models: list, folder: Path):
        self.models, self.folder, self.processes = models, folder, {}
        with socket.socket() as one, socket.socket() as two:
            one.bind(("127.0.0.1", 0))
            two.bind(("127.0.0.1", 0))
            self.ports = [probe.getsockname()[1] for probe in (one, two)]
        self.urls = [f"http://127.0.0.1:{port}" for port in self.ports]

    def start(self, i: int) -> None:
        log = open(self.folder / f"server_{i}.log", "a")
        self.processes[i] = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "server",
                "config/countdown_tiny.py",
                f"--model={self.models[i]}",
                f"--port={self.ports[i]}",
            ],
            cwd=ROOT,
            stdout=log,
            stderr=log,
            env=environment(),
            start_new_session=True,
        )

    def ready(self, *which, seconds: float = 240) -> str:
        """Waits for these servers; their URLs as rollout_server takes them."""
        end = time.monotonic() + seconds
        for i in which:
            while True:
                log = (self.folder / f"server_{i}.log").read_text()[-3000:]
                assert time.monotonic() < end and self.processes[i].poll() is None, log
                try:
                    if httpx.get(self.urls[i] + "/health", timeout=10).status_code == 200:
                        break
                except httpx.HTTPError:
                    time.sleep(0.2)
        return ",".join(self.urls[i] for i in which)

    def signal(self, i: int, number: int) -> None:
        os.killpg(self.processes[i].pid, number)
        if number == signal.SIGKILL:
            self.processes[i].wait(30)


@pytest.fixture(scope="module", autouse=True)
def launched(request, tiny_model_dir, untied_model_dir, tmp_path_factory):
    """The servers start with the module, if a test of it wants them: the stand-ins have their turn meanwhile."""
    fleet = Fleet([tiny_model_dir, untied_model_dir], tmp_path_factory.mktemp("servers"))
    if any(
        item.module is request.module and "fleet" in item.fixturenames
        for item in request.session.items
    ):
        fleet.start(0)
        fleet.start(1)
    yield fleet
    for i, process in fleet.processes.items():
        if process.poll() is None:
            fleet.signal(i, signal.SIGKILL)


@pytest.fixture(scope="module", autouse=True)
def certificates_are_read_once():
    """Not for every client: there are hundreds here, and it takes a tenth of a second."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(httpx, "Client", partial(httpx.Client, verify=httpx.create_ssl_context()))
        yield


@pytest.fixture(scope="module")
def fleet(launched):
    return launched


@pytest.fixture(scope="module")
def lm(tiny_model_dir):
    return AutoModelForCausalLM.from_pretrained(tiny_model_dir)


@pytest.fixture
def world(monkeypatch):
    monkeypatch.setattr(server, "dist", FakeWorld(1))
    return server.dist


@pytest.fixture
def naps(monkeypatch):
    """The seconds that the engine would have slept before each new try: here they cost a hundredth."""
    found = []

    def sleep(seconds):
        found.append(seconds)
        time.sleep(seconds / 100)

    monkeypatch.setattr(server, "time", SimpleNamespace(sleep=sleep, monotonic=time.monotonic))
    return found


@pytest.fixture
def short_wait(naps, monkeypatch):
    """A clock that stands still but for naps: a minute's wait for servers is over in a second."""
    clock = SimpleNamespace(sleep=server.time.sleep, monotonic=lambda: sum(naps))
    monkeypatch.setattr(server, "time", clock)


@pytest.fixture
def make(tiny_model_dir, tmp_path):
    """make(urls or stand-ins, key=value, ...): an engine; everything is closed in the end."""
    opened = []

    def engine(*servers, synced=True, model=tiny_model_dir, **settings):
        urls = ",".join(s if isinstance(s, str) else s.url for s in servers)
        settings = {
            "rollout_server": urls,
            "rollout_timeout": 60.0,
            "output_dir": str(tmp_path / "run"),
            "max_prompt_length": 16,
            "max_completion_length": 16,
        } | settings
        made = ServerEngine(
            str(model), load_config([]) | settings, torch.float32, torch.device("cpu")
        )
        opened.append(made)
        if synced:
            made.sync(WEIGHTS())
        return made

    yield engine
    for made in opened:
        made.close()


@pytest.fixture
def stand_in():
    opened = []

    def one(*args, kind=StandIn, **kwargs):
        opened.append(kind(*args, **kwargs))
        return opened[-1]

    yield one
    for each in opened:
        each.close()


def WEIGHTS():
    """Any, for stand-ins."""
    head = torch.arange(6.0).view(2, 3)
    yield from (("embedding", head), ("layer", torch.ones(4)), ("lm_head.weight", head))


def request(prompts: int, seed: int = 0) -> dict:
    """What a training step asks an engine for."""
    return sampling(seed, prompts) | {"names": [f"s1-p{i}" for i in range(prompts)]}


def bare(rollouts: list[dict]) -> list:
    return [(r["prompt_ids"], r["completion_ids"], r["finish_reason"]) for r in rollouts]


def expected(body_of, prompts=PROMPTS, n: int = 2, seed: int = 0) -> list:
    """What healthy stand-ins answer to prompts with the seeds of sampling(seed, ...)."""
    asked = [
        {"prompt": ids, "seed": s, "max_tokens": 12}
        for ids, s in zip(prompts, sampling(seed, len(prompts))["seeds"])
    ]
    return [
        (body["prompt"], body_of(body, j)["token_ids"], "stop") for body in asked for j in range(n)
    ]


# --- one answer, as a stand-in sends it


def raw(content: bytes, status: bytes = b"200 OK", length: int | None = None, pause: float = 0.0):
    """Writes `content` as it is, byte by byte if there is a pause between them."""

    def write(handler):
        head = (
            b"HTTP/1.1 "
            + status
            + b"\r\nContent-Type: application/json\r\n"
            + (f"Content-Length: {len(content) if length is None else length}\r\n\r\n").encode()
        )
        handler.wfile.write(head)
        for i in range(0, len(content), 1 if pause else max(1, len(content))):
            handler.wfile.write(content[i : i + (1 if pause else len(content))])
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


def echo(body: str | None, header: str | None):
    """An answer with these ids; "own" is the right one, None leaves it out."""

    def answer(request):
        status, found, _ = usual(request)
        name = request.headers["X-Request-Id"]
        body_id = f"cmpl-{name}" if body == "own" else body
        found = {key: value for key, value in found.items() if key != "id"} | (
            {} if body is None else {"id": body_id}
        )
        return (
            status,
            found,
            {} if header is None else {"X-Request-Id": name if header == "own" else header},
        )

    return answer


def choices(value):
    """An answer whose "choices" are this."""
    return lambda request: (
        200,
        {"id": "cmpl-" + request.headers["X-Request-Id"], "choices": value},
        {},
    )


def logps(value):
    """Log-probs of a choice replaced by value, at one place or as a whole."""
    return with_choices(
        lambda body, i: choice(
            body,
            i,
            logprobs={
                "token_logprobs": value
                if not callable(value)
                else value(choice(body, i)["token_ids"])
            },
        )
    )


def ids(change):
    return with_choices(
        lambda body, i: choice(body, i, token_ids=change(choice(body, i)["token_ids"]))
    )


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
    "token ids null": ids(lambda x: None),
    "token ids a number": ids(lambda x: 3),
    "token ids text": ids(lambda x: "ab"),
    "token ids floats": ids(lambda x: [1.0] * len(x)),
    "token ids true": ids(lambda x: [True] * len(x)),
    "no token": with_choices(
        lambda body, i: choice(body, i, token_ids=[], logprobs={"token_logprobs": []})
    ),
    "a token id out of the vocabulary": ids(lambda x: [*x[:-1], 100_000]),
    "a negative token id": ids(lambda x: [-1, *x[1:]]),
    "more tokens than asked for": with_choices(
        lambda body, i: choice({**body, "max_tokens": 16}, 0)
    ),
    "a token more than log-probs": ids(lambda x: x[:-1]),
    "log-probs null": logps(None),
    "no log-probs": with_choices(lambda body, i: choice(body, i, logprobs=None)),
    "one log-prob null": logps(lambda x: [None, *[-1.0] * (len(x) - 1)]),
    "one NaN": logps(lambda x: [math.nan, *[-1.0] * (len(x) - 1)]),
    "minus infinity": logps(lambda x: [-math.inf] * len(x)),
    "a positive log-prob": logps(lambda x: [0.5, *[-1.0] * (len(x) - 1)]),
    "log-probs as text": logps(lambda x: ["-1.0"] * len(x)),
    "a log-prob of 400 digits": logps(lambda x: [-(10**400)] * len(x)),
    "another prompt": with_choices(lambda body, i: choice(body, i, prompt_token_ids=[1, 2])),
    "abort": with_choices(lambda body, i: choice(body, i, finish_reason="abort")),
    "no finish reason": with_choices(lambda body, i: choice(body, i, finish_reason=None)),
    "the connection cut off": raw(b'{"id": ', length=1000),
    "not HTTP": lambda request: lambda handler: handler.wfile.write(b"hello\r\n\r\n"),
}


@pytest.mark.parametrize("kind", BAD)
def test_a_bad_answer_is_thrown_away_and_asked_for_again(kind, world, naps, make, stand_in):
    """Twice from each of two servers, in all four requests for two prompts; then they behave. Nothing of it comes through, all is complete."""
    one, two = stand_in(), stand_in()
    engine = make(one, two)
    one.plan, two.plan = [BAD[kind]], [BAD[kind]]
    found = engine.generate(PROMPTS[:2], 2, request(2))
    assert [r["prompt_ids"] for r in found] == [PROMPTS[0]] * 2 + [PROMPTS[1]] * 2
    for r in found:
        assert (
            r["completion_ids"][0] == r["prompt_ids"][0]
            and len(r["logprobs"]) == len(r["completion_ids"]) <= 12
            and set(r["logprobs"]) == {-0.5}
        )
    counts = engine.take_counts()
    assert counts["rollout/failed"] + counts["rollout/foreign"] + counts["rollout/refilled"] > 0
    assert (counts["rollout/foreign"] > 0) == (
        kind
        in (
            "a foreign echo in the header",
            "a foreign echo in the body",
            "no echo in the body",
            "an echo that is no text",
            "a list",
            "null",
            "no bytes at all",
        )
    )
    assert len(naps) >= 1


@pytest.mark.parametrize(
    "kind",
    [
        "500",
        "truncated JSON",
        "token ids null",
        "abort",
        "a foreign echo in the header",
        "no echo in the body",
    ],
)
def test_a_server_that_never_does_better_ends_the_run_with_a_sentence_after_a_bounded_number_of_tries(
    kind, world, naps, make, stand_in
):
    one, two = stand_in(completion=BAD[kind]), stand_in(completion=BAD[kind])
    engine = make(one, two)
    with pytest.raises(RolloutsLost) as caught:
        engine.generate(PROMPTS[:1], 2, request(1))
    asked, sentence = len(one.completions()) + len(two.completions()), str(caught.value)
    assert (
        2 <= asked <= server.TRIES
        and len(naps) == asked - 1
        and "\n" not in sentence
        and (one.url in sentence or two.url in sentence)
    )
    assert (
        "a proxy" in sentence
        and "name the servers themselves" in sentence
        and "rank-0-of-1-s1-p0" in sentence
    ) == ("echo" in kind), sentence
    nominal = [min(10.0, 0.25 * 2 ** (i + 1)) for i in range(len(naps))]
    assert all(0.5 * a <= nap <= 1.5 * a for nap, a in zip(naps, nominal)) and len(
        {nap / a for nap, a in zip(naps, nominal)}
    ) == len(naps)  # grows, with jitter


def test_only_what_is_missing_is_asked_for_again_with_other_seeds(world, naps, make, stand_in):
    one = stand_in()
    engine = make(one)
    short = with_choices(
        lambda body, i: choice(body, i) if i % 2 else choice(body, i, finish_reason="abort")
    )  # half of them usable
    one.plan = [short, short]
    found = engine.generate(PROMPTS[:1], 8, request(1))
    bodies = [body for body, _ in one.completions()]
    assert (
        [body["n"] for body in bodies] == [8, 4, 2]
        and len(found) == 8
        and engine.take_counts()["rollout/refilled"] == 6
    )
    seeds = [
        (body["seed"] + i) % 2**32 for body in bodies for i in range(body["n"])
    ]  # torch's CPU generator reads no more of a seed
    assert len(set(seeds)) == len(seeds)
    assert [headers["X-Request-Id"] for _, headers in one.completions()] == [
        "rank-0-of-1-s1-p0",
        "rank-0-of-1-s1-p0-a1",
        "rank-0-of-1-s1-p0-a2",
    ]


def test_more_completions_than_asked_for_are_cut(world, make, stand_in):
    one = stand_in(
        completion=lambda request: (
            200,
            {
                "id": "cmpl-" + request.headers["X-Request-Id"],
                "choices": [choice(request.body, i) for i in range(9)],
            },
            {},
        )
    )
    assert bare(make(one).generate(PROMPTS, 2, request(3))) == expected(choice)


def test_what_is_asked_for(world, make, stand_in, monkeypatch):
    """Token ids and the policy's own distribution, nothing of the server's defaults; the tag of the config, of the launcher, or of the rank."""
    one = stand_in()
    given = request(3) | {"names": ["s7-p4", "s7-p5", "s7-p6"]}
    make(one).generate(PROMPTS, 2, given)
    monkeypatch.setenv("VLLM_CLIENT_TAG", "job-9")
    make(one).generate(PROMPTS, 2, given)
    make(one, client_tag="mine").generate(PROMPTS, 2, given)
    asked = one.completions()
    assert sorted(h["X-Request-Id"] for _, h in asked) == sorted(
        f"{tag}-s7-p{i}" for tag in ("rank-0-of-1", "job-9", "mine") for i in (4, 5, 6)
    )
    assert all(h["X-Request-Id"].startswith(h["X-VLLM-Client-Tag"] + "-s7-p") for _, h in asked)
    for body, headers in asked:
        i = int(headers["X-Request-Id"][-1]) - 4
        assert body == {
            "model": "policy",
            "prompt": PROMPTS[i],
            "n": 2,
            "max_tokens": 12,
            "seed": given["seeds"][i],
            "temperature": 0.8,
            "top_p": 1.0,
            "top_k": 0,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "stop_token_ids": [0],
            "logprobs": 0,
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
        }


def test_a_prompt_that_is_too_long_never_leaves(world, make, stand_in):
    one = stand_in()
    engine = make(one)
    with pytest.raises(ValueError, match="17 tokens must not leave: max_prompt_length=16"):
        engine.generate([[1] * 16, [1] * 17], 2, request(2))
    assert not one.completions() and len(engine.generate([[1] * 16], 2, request(1))) == 2


def test_never_more_requests_at_a_time_than_the_window_and_prompts_keep_their_order(
    world, make, stand_in
):
    one, two = stand_in(seconds=0.03), stand_in(seconds=0.03)
    engine, done = make(one, two, rollout_concurrency=3), []
    prompts = [[i + 1] for i in range(20)]
    found = engine.generate(
        prompts, 2, request(20), lambda i, group: done.append((i, [r["prompt_ids"] for r in group]))
    )
    assert [r["prompt_ids"] for r in found] == [ids for ids in prompts for _ in range(2)]
    assert sorted(done) == [(i, [ids, ids]) for i, ids in enumerate(prompts)]
    assert 2 <= one.most + two.most <= 6 and max(one.most, two.most) <= 3
    assert len(one.completions()) == len(two.completions()) == 10
    alone = stand_in(seconds=0.03)
    make(alone, rollout_concurrency=3).generate(prompts, 2, request(20))
    assert alone.most == 3
    assert make(alone).generate([], 2, request(0)) == []


@pytest.mark.parametrize(
    "answer, words",
    [
        (raw(b" " * 1000, pause=0.02), "no end within 1 s"),
        (dripped_head(pause=0.1), "did not answer within 1 s"),
        (lambda request: lambda handler: time.sleep(3), "did not answer within 1 s"),
        (raw(b" " * 300_000), r"\d{5,6} bytes and no end"),
    ],
)
def test_a_slow_or_endless_answer_is_cut_off(answer, words, world, naps, make, stand_in):
    slow, good = stand_in(), stand_in()
    engine = make(slow, good)
    slow.completion, impatient = answer, engine.servers[0]
    impatient.seconds = impatient.http.timeout = 1.0
    assert bare(engine.generate(PROMPTS[:1], 2, request(1)))[0][0] == PROMPTS[0]
    assert engine.take_counts()["rollout/failed"] == 1
    with pytest.raises(vllm_http.ServerError, match=words):
        engine.servers[0].call(
            "/v1/completions",
            {"prompt": [1], "n": 1, "seed": 0, "max_tokens": 3},
            {"X-Request-Id": "x"},
        )


def test_an_answer_may_be_as_large_as_its_request_allows_and_no_larger(world, naps, make, stand_in):
    """Thirty megabytes of JSON take over a gigabyte to parse."""
    body = {"prompt": [1, 2], "n": 2, "max_tokens": 12}
    longest = vllm_http.largest_answer(body)
    assert longest < 80_000

    def padded(size):
        def answer(request):
            status, found, headers = usual(request)
            missing = size - len(json.dumps(found | {"more": ""}))
            return status, json.dumps(found | {"more": "x" * missing}).encode(), headers

        return answer

    one = stand_in()
    engine = make(one)
    one.plan = [padded(longest)]
    engine.servers[0].call(
        "/v1/completions", body | {"seed": 0}, {"X-Request-Id": "x"}, None, longest
    )
    one.plan = [padded(longest + 1)]
    with pytest.raises(vllm_http.ServerError, match=f"more than the {longest} that"):
        engine.servers[0].call(
            "/v1/completions", body | {"seed": 0}, {"X-Request-Id": "x"}, None, longest
        )
    one.plan = [lambda request: (200, b"[" + b"[]," * 10_000_000 + b"[]]", {})]
    found = engine.generate(PROMPTS[:1], 2, request(1))
    assert len(found) == 2 and engine.take_counts()["rollout/failed"] == 1


def test_a_real_answer_is_much_smaller_than_what_is_allowed():
    """Ids of seven digits, log-probs of full length, and a text that JSON has to escape."""
    body = {"prompt": [1_234_567] * 50, "n": 3, "max_tokens": 400}
    count = body["max_tokens"]
    logps = [-0.12345678901234567e-10] * count
    each = {
        "text": "\n\n\n\n\0" * count,
        "prompt_token_ids": body["prompt"],
        "token_ids": [1_234_567] * count,
        "logprobs": {
            "token_logprobs": logps,
            "tokens": ["token_id:1234567"] * count,
            "top_logprobs": [{"token_id:1234567": logps[0]}] * count,
            "text_offset": [1_000_000] * count,
        },
    }
    assert len(json.dumps({"choices": [each] * 3})) < 0.8 * vllm_http.largest_answer(body)


def test_large_answers_of_a_server_are_parsed_one_at_a_time(world, make, stand_in, monkeypatch):
    """Sixty-four of them may come at once."""
    now, most = [], []

    def loads(data):
        now.append(1)
        most.append(len(now))
        time.sleep(0.01)  # time for others to come in
        now.pop()
        return json.loads(data)

    one = stand_in()
    engine = make(one, rollout_concurrency=8)
    monkeypatch.setattr(engine, "check_weights", lambda server: None)
    parser = SimpleNamespace(loads=loads, dumps=json.dumps)
    monkeypatch.setattr(vllm_http, "json", parser)
    prompts = [[i + 1] for i in range(24)]
    assert len(engine.generate(prompts, 2, request(24))) == 48
    assert one.most > 1 and len(most) == 24 and max(most) == 1


ESCAPES = "\x1b[2J\x1b[31m\r\nerror: forged \u202e"


@pytest.mark.parametrize(
    "answer",
    [
        lambda request: (500, ESCAPES.encode(), {}),
        lambda request: lambda handler: handler.wfile.write(ESCAPES.encode()),
        echo(ESCAPES, "own"),
        lambda request: (
            lambda handler: handler.wfile.write(
                b"HTTP/1.1 200 OK\r\nContent-Length: \x1b[2J\r\n\r\n"
            )
        ),
    ],
    ids=["an error body", "no HTTP", "an id", "a header"],
)
def test_what_a_server_says_is_quoted(answer, world, naps, make, stand_in, capfd):
    one, two = stand_in(completion=answer), stand_in(completion=answer)
    engine = make(one, two)
    capfd.readouterr()  # its progress bar
    with pytest.raises(RolloutsLost) as caught:
        engine.generate(PROMPTS[:1], 2, request(1))
    said = str(caught.value) + "".join(capfd.readouterr()).replace("\n", "")
    assert said.isprintable(), said


def test_weights_and_settings_with_odd_names_are_quoted(world, make, stand_in, capfd):
    one = stand_in()
    engine = make(one)
    one.version = ESCAPES
    capfd.readouterr()  # its progress bar
    with pytest.raises(RolloutsLost) as caught:
        engine.generate(PROMPTS[:1], 2, request(1))
    printed = "".join(capfd.readouterr()).replace("\n", "")
    odd = stand_in()
    odd.settings["model_config"]["logprobs_mode"] = ESCAPES
    with pytest.raises(UserError) as refused:
        make(odd)
    said = f"{caught.value}{refused.value}{printed}"
    assert said.isprintable() and "logprobs_mode='" in said, said


def test_a_server_that_nobody_answers_at_any_more_is_left_out_and_comes_back_with_the_next_sync(
    world, naps, make, stand_in, capsys
):
    one, two = stand_in(), stand_in()
    engine = make(one, two)
    port = one.http.server_port
    one.close()
    assert len(engine.generate(PROMPTS, 2, request(3))) == 6
    assert (
        engine.take_counts()["rollout/servers"] == 1
        and "left out until the next sync" in capsys.readouterr().out
    )
    asked = len(two.completions())
    assert asked == 3
    engine.sync(WEIGHTS())
    assert list(engine.missing) == [one.url] and bare(
        engine.generate(PROMPTS, 2, request(3))
    ) == expected(choice)
    again = stand_in(port)
    engine.sync(WEIGHTS())
    assert (
        not engine.missing
        and bare(engine.generate(PROMPTS, 2, request(3))) == expected(choice)
        and again.completions()
    )
    again.close()
    two.close()
    with pytest.raises(
        RolloutsLost, match=f"no rollout server is left of {one.url}, {two.url}"
    ) as caught:
        engine.generate(PROMPTS, 2, request(3))
    assert str(caught.value).count(one.url) >= 2  # the sentence says why


def test_a_connection_that_breaks_once_does_not_cost_the_only_server(world, naps, make, stand_in):
    one = stand_in()
    engine = make(one)
    one.plan = [BAD["the connection cut off"]]
    assert len(engine.generate(PROMPTS, 2, request(3))) == 6


def test_a_hiccup_that_many_requests_meet_at_once_does_not_cost_the_only_server(
    world, naps, make, stand_in
):
    one = stand_in(seconds=0.05)
    engine = make(one)
    one.plan = [BAD["503, empty"]] * 6
    assert len(engine.generate([[i + 1] for i in range(6)], 2, request(6))) == 12


def test_a_server_that_fails_three_times_in_a_row_is_left_out_while_there_is_another(
    world, naps, make, stand_in
):
    bad, good = stand_in(completion=BAD["500"]), stand_in()
    engine = make(bad, good, rollout_concurrency=1)
    found = engine.generate([[i + 1] for i in range(12)], 2, request(12))
    assert (
        len(found) == 24
        and len(bad.completions()) == server.STRIKES
        and engine.take_counts()
        == {"rollout/failed": 3, "rollout/foreign": 0, "rollout/refilled": 0, "rollout/servers": 1}
    )
    assert engine.take_counts()["rollout/failed"] == 0


@pytest.mark.parametrize(
    "plan",
    [["500", None] * 4, ["a foreign echo in the header"] * 5],
    ids=["now and then", "not ours"],
)
def test_a_server_is_not_left_out_for_failures_with_successes_in_between_or_for_foreign_answers(
    plan, world, naps, make, stand_in
):
    one, two = stand_in(), stand_in()
    engine = make(one, two, rollout_concurrency=1)
    one.plan = [BAD[kind] if kind else usual for kind in plan]
    assert len(engine.generate([[i + 1] for i in range(20)], 2, request(20))) == 40
    assert len(engine.live) == 2 and not one.plan


def test_a_proxy_that_mixes_clients_never_gets_a_foreign_answer_through(
    world, naps, make, stand_in
):
    """It swaps the answers of requests that are under way together: ours with those of another run, which asks for the same prompt, and ours among
    each other. Either all is right in the end, after more tries, or the run ends with a sentence about who is to blame."""
    behind = stand_in()
    mixer = stand_in(behind.url, kind=Proxy, mixes=True)
    engine = make(mixer, client_tag="ours", rollout_concurrency=8)
    stop, theirs = threading.Event(), httpx.Client(base_url=mixer.url, timeout=30, trust_env=False)

    def other():
        while not stop.is_set():
            theirs.post(
                "/v1/completions",
                json={"prompt": PROMPTS[0], "n": 2, "seed": 5, "max_tokens": 12},
                headers={"X-Request-Id": "theirs-s1-p0"},
            )

    def ask(prompts) -> str:
        try:
            found = engine.generate(prompts, 2, request(len(prompts)))
            assert all(
                r["completion_ids"][0] == r["prompt_ids"][0] and r["completion_ids"][1] != 5
                for r in found
            ) and len(found) == 2 * len(prompts)
            return ""
        except RolloutsLost as error:
            return str(error)

    threads = [threading.Thread(target=other) for _ in range(3)]
    for thread in threads:
        thread.start()
    sentence = ask(PROMPTS[:1])
    stop.set()
    for thread in threads:
        thread.join()
    theirs.close()
    assert all(
        words in sentence
        for words in ("ours-s1-p0", "theirs-s1-p0", "a proxy", "rollout_server", "X-Request-Id")
    ), sentence
    assert engine.take_counts()["rollout/foreign"] == server.TRIES
    sentence = ask([[i + 1] for i in range(5)])
    assert engine.take_counts()["rollout/foreign"] > 0 and (not sentence or "a proxy" in sentence)
    assert ask(PROMPTS[:1]) == ""  # alone


def test_no_thread_and_no_socket_is_left_behind(world, naps, make, stand_in):
    def sockets():
        return sum(
            os.readlink(f"/proc/self/fd/{fd}").startswith("socket")
            for fd in os.listdir("/proc/self/fd")
            if os.path.exists(f"/proc/self/fd/{fd}")
        )

    one = stand_in()
    time.sleep(0.1)
    before = threading.active_count(), sockets()
    for _ in range(3):
        engine = make(one)
        one.plan = [BAD["500"], BAD["truncated JSON"]]
        engine.generate(PROMPTS, 2, request(3))
        engine.result(engine.begin(PROMPTS, 2, request(3), None))
        one.completion = BAD["500"]
        with pytest.raises(RolloutsLost):
            engine.generate(PROMPTS, 2, request(3))
        one.completion = usual
        engine.close()
    end = time.monotonic() + 60
    while (threading.active_count(), sockets()) != before:
        assert time.monotonic() < end, (threading.enumerate(), before, sockets())
        time.sleep(0.05)


# --- the start


def dead_url() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{probe.getsockname()[1]}"


def test_servers_that_do_not_come_are_named_after_a_deadline(world, short_wait, make, stand_in):
    one, dead, ill = (
        stand_in(),
        dead_url(),
        stand_in(other={"/health": lambda request: (503, b"", {})}),
    )
    with pytest.raises(UserError, match="after 60 s 2 of 3 servers are not there") as caught:
        make(one, dead, ill)
    assert (
        dead in str(caught.value)
        and ill.url in str(caught.value)
        and one.url not in str(caught.value)
    )


def test_servers_that_come_late_are_waited_for(world, make, stand_in, capsys):
    url, one = dead_url(), stand_in()
    late = threading.Timer(0.5, lambda: stand_in(int(url.rpartition(":")[2])))
    late.start()
    assert len(make(one, url).live) == 2
    assert "waiting for rollout servers" in capsys.readouterr().err


def info(mode: str) -> dict:
    return {
        "/server_info": lambda request: (
            200,
            {
                "vllm_config": {
                    "model_config": {"logprobs_mode": mode},
                    "weight_transfer_config": None,
                }
            },
            {},
        )
    }


@pytest.mark.parametrize(
    "other, settings, words",
    [
        (
            {"/weight_info": lambda request: (404, {"detail": "Not Found"}, {})},
            {},
            "does not speak vLLM's development API .*python -m server",
        ),
        (
            {"/server_info": lambda request: (200, {"vllm_config": "a text"}, {})},
            {},
            "does not speak vLLM's development API",
        ),
        (
            {"/server_info": lambda request: (200, [], {})},
            {},
            "does not speak vLLM's development API",
        ),
        (
            {"/weight_info": lambda request: (200, [1], {})},
            {},
            "does not speak vLLM's development API",
        ),
        (
            {"/v1/models": lambda request: (200, {"data": []}, {})},
            {},
            "does not speak vLLM's development API",
        ),
        (
            {},
            {"max_completion_length": 60},
            r"max_model_len=64, max_prompt_length \+ max_completion_length is 76",
        ),
        (
            info("raw_logprobs"),
            {},
            "logprobs_mode='raw_logprobs': start it with --logprobs-mode processed_logprobs",
        ),
        (
            info("processed_logprobs"),
            {"weight_sync": "nccl"},
            "takes no weights over NCCL: start it with --weight-transfer-config",
        ),
    ],
)
def test_a_server_that_can_not_be_used_is_refused_by_name_with_the_cure(
    other, settings, words, world, make, stand_in
):
    good, bad = stand_in(), stand_in(other=other)
    with pytest.raises(UserError, match=words) as caught:
        make(good, bad, synced=False, **settings)
    assert bad.url in str(caught.value) or "max_model_len" in words


@pytest.mark.parametrize(
    "setting, launcher, words",
    [
        ("", "", "python -m server starts one"),
        (" , ", "", "python -m server starts one"),
        ("auto", "", "no launcher has set ROLLOUT_SERVER"),
        ("auto", ",", "needs rollout_server"),
        ("localhost:8000", "", "must begin with http:// or https://"),
        ("auto", "a:1", "must begin with http"),
        ("http://a:port", "", "rollout_server"),
        ("http://", "", "rollout_server"),
    ],
)
def test_addresses_that_can_not_be_any_are_refused(
    setting, launcher, words, world, make, monkeypatch
):
    monkeypatch.setenv("ROLLOUT_SERVER", launcher)
    with pytest.raises(UserError, match=words):
        make(setting, rollout_timeout=0.1)


def test_addresses_are_those_of_the_config_or_for_auto_of_the_launcher(monkeypatch):
    monkeypatch.setenv("ROLLOUT_SERVER", "http://b:2/")
    assert vllm_http.addresses("http://a:1/, http://c:3 ,http://a:1") == [
        "http://a:1",
        "http://c:3",
    ] and vllm_http.addresses("auto") == ["http://b:2"]


def test_settings_that_do_not_go_together_are_refused():
    for flags, words in (
        (["--rollout_ahead=1"], "rollout_ahead=1 needs rollout_engine='server'"),
        (["--rollout_ahead=2", "--rollout_engine=server"], "must be at least 0 and at most 1"),
        (["--weight_sync=tape"], "'disk', 'nccl'"),
        (["--rollout_concurrency=0"], "greater than 0"),
        (["--rollout_timeout=0"], "greater than 0"),
    ):
        with pytest.raises(UserError, match=re.escape(words)):
            load_config(flags)
    assert load_config(["--rollout_ahead=1", "--rollout_engine=server"])["rollout_ahead"] == 1


@pytest.mark.parametrize("tag", ["two\nlines", "Mädchen", "a b"])
def test_a_tag_that_is_no_header_is_refused(tag, world, make, stand_in):
    with pytest.raises(UserError, match="client_tag"):
        make(stand_in(), client_tag=tag, synced=False)


# --- weights


def test_weights_are_written_once_read_by_every_server_and_then_removed(
    world, make, stand_in, tmp_path
):
    one, two = stand_in(), stand_in()
    seen = []

    def reload(request):
        folder = Path(request.body["kwargs"]["weights_path"])
        seen.append(
            (
                folder,
                {
                    name: tensor
                    for file in sorted(folder.glob("*.safetensors"))
                    for name, tensor in load_file(file).items()
                },
            )
        )
        return 200, {}, {}

    one.other["/collective_rpc"] = two.other["/collective_rpc"] = reload
    engine = make(one, two, weight_sync_dir=str(tmp_path / "shm"))
    engine.sync(WEIGHTS())
    folders = [folder for folder, _ in seen]
    assert (
        len(seen) == 4
        and folders[0] == folders[1] != folders[2] == folders[3]
        and not any((tmp_path / "shm").iterdir())  # a run that is killed now leaves none behind
    )
    for _, weights in seen:
        assert weights.keys() == dict(WEIGHTS()).keys() and all(
            torch.equal(weights[name], tensor) for name, tensor in WEIGHTS()
        )
    for each in (one, two):  # nothing is asked for between new weights and their name
        order = [
            path
            for path in each.paths()
            if path not in ("/health", "/v1/models", "/server_info", "/weight_info")
        ]
        assert (
            order == ["/collective_rpc", "/reset_prefix_cache", "/update_weight_version"] * 2
            and each.version == engine.version == folders[2].name
        )
    engine.close()
    assert not (tmp_path / "shm").exists()


def test_large_weights_come_in_several_files(monkeypatch, tmp_path):
    monkeypatch.setattr(server, "SHARD", 100)
    tensors = [
        (f"t{i}", torch.full((n,), float(i))) for i, n in enumerate((10, 10, 10, 100, 1))
    ]  # 40, 40, 40, 400, 4 bytes
    assert server.write_shards(iter(tensors), tmp_path / "w") == ""
    files = [sorted(load_file(file)) for file in sorted((tmp_path / "w").iterdir())]
    assert files == [["t0", "t1"], ["t2"], ["t3"], ["t4"]]
    taken = iter(tensors)
    assert (
        server.write_shards(taken, None) == ""
        and next(taken, None) is None
        and len(list(tmp_path.iterdir())) == 1
    )


@pytest.mark.parametrize(
    "path, answer",
    [
        ("/collective_rpc", (500, {"error": "no space"}, {})),
        ("/reset_prefix_cache", (200, {"success": False}, {})),
        ("/reset_prefix_cache", (200, [1], {})),
        ("/update_weight_version", (500, {}, {})),
    ],
)
def test_a_server_that_refuses_the_weights_is_left_out_and_the_other_used(
    path, answer, world, make, stand_in, capsys
):
    good, bad = stand_in(), stand_in(other={path: lambda request: answer})
    engine = make(bad, good)
    assert (
        list(engine.missing) == [bad.url]
        and "left out until the next sync" in capsys.readouterr().out
    )
    assert (
        bare(engine.generate(PROMPTS, 2, request(3))) == expected(choice)
        and not bad.completions()
        and engine.take_counts()["rollout/servers"] == 1
    )
    del bad.other[path]
    engine.sync(WEIGHTS())
    engine.generate(PROMPTS, 2, request(3))
    assert bad.completions()


def test_weights_that_somebody_else_has_changed_are_noticed_before_and_after_sampling(
    world, naps, make, stand_in, capsys
):
    one, two = stand_in(), stand_in()
    engine = make(one, two)
    httpx.post(one.url + "/update_weight_version", json={"new_version": "theirs"})
    assert (
        bare(engine.generate(PROMPTS, 2, request(3))) == expected(choice) and not one.completions()
    )
    assert re.search(
        f"{one.url} holds weights 'theirs', not .*another run uses it", capsys.readouterr().out
    )
    engine.sync(WEIGHTS())

    def meanwhile(request):  # its weights change while it samples
        one.version = "theirs"
        return usual(request)

    one.plan = [meanwhile]
    found = engine.generate(PROMPTS[:2], 2, request(2))
    assert (
        len(one.completions()) == 1
        and len(found) == 4
        and engine.take_counts()["rollout/failed"] == 1
    )
    two.version = "theirs"
    with pytest.raises(RolloutsLost, match=r"no rollout server is left.*holds weights 'theirs'"):
        engine.generate(PROMPTS, 2, request(3))


def write_shards_with_room_for_30_kb(folder: Path, sentence: Path) -> None:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, 30_000))
    tensors = iter([("large", torch.ones(100_000)), ("small", torch.ones(1))])
    problem = server.write_shards(tensors, folder / "w")
    sentence.write_text(
        f"{problem}\n{next(tensors, 'used up')}\n{sorted(p.name for p in folder.iterdir())}"
    )


def test_a_full_disk_stops_the_run_with_a_sentence(world, make, stand_in, tmp_path):
    """A limit on file size stands in for it. The iterator is used up all the same: other ranks gather with it."""
    sentence = tmp_path / "sentence"
    assert child.status(child.start(write_shards_with_room_for_30_kb, tmp_path, sentence)) == 0
    problem, rest, left = sentence.read_text().rsplit("\n", 2)
    assert (
        str(tmp_path / "w") in problem
        and "\n" not in problem
        and rest == "used up"
        and left == "[]"
    )
    blocked = tmp_path / "file"
    blocked.touch()
    with pytest.raises(
        RunStopped, match=r"weight_sync_dir: the weights could not be written: .*file"
    ):
        make(stand_in(), weight_sync_dir=str(blocked))


def test_what_a_killed_process_left_is_removed_at_the_start_and_that_of_a_living_one_kept(
    world, make, stand_in, tmp_path
):
    folder, host = tmp_path / "run" / "weights", socket.gethostname()
    gone = subprocess.Popen(["true"])
    gone.wait()
    names = {
        "dead": f"{host}-{gone.pid}-0123abcd-7",
        "half": f"{host}-{gone.pid}-0123abcd-8.tmp",
        "living": f"{host}-{os.getpid()}-89abcdef-7",
        "far": "elsewhere-1-0123abcd-7",
    }
    for name in names.values():
        (folder / name).mkdir(parents=True)
    make(stand_in(), synced=False)
    assert {p.name for p in folder.iterdir()} == {names["living"], names["far"]}


# --- several ranks


@pytest.fixture
def two_ranks(monkeypatch):
    monkeypatch.setattr(server, "dist", FakeWorld(2))
    return server.dist


def test_ranks_spread_over_the_servers_with_tags_of_their_own_and_add_up_their_counts(
    two_ranks, naps, make, stand_in
):
    one, two = stand_in(), stand_in()
    engines = two_ranks.run(lambda rank: make(one, two))
    two.plan = [BAD["500"]]
    found = two_ranks.run(lambda rank: engines[rank].generate([PROMPTS[rank]], 2, request(1)))
    assert [r["prompt_ids"] for rank in found for r in rank] == [PROMPTS[0]] * 2 + [PROMPTS[1]] * 2
    first = {
        headers["X-VLLM-Client-Tag"]: i
        for i, each in enumerate((one, two))
        for _, headers in each.completions()[:1]
    }
    assert first == {"rank-0-of-2": 0, "rank-1-of-2": 1}
    assert (
        two_ranks.run(lambda rank: engines[rank].take_counts())
        == [
            {"rollout/failed": 1, "rollout/foreign": 0, "rollout/refilled": 0, "rollout/servers": 2}
        ]
        * 2
    )
    assert (
        len(one.paths("/collective_rpc")) == 1 and engines[0].version == engines[1].version
    )  # rank 0 hands the weights over


def test_request_ids_of_an_evaluation_differ_between_ranks_and_from_one_time_to_the_next(
    two_ranks, make, stand_in
):
    one = stand_in()
    engines = two_ranks.run(lambda rank: make(one, client_tag="shared"))
    for _ in range(2):
        two_ranks.run(lambda rank: engines[rank].sync(WEIGHTS()))
        two_ranks.run(lambda rank: engines[rank].generate(PROMPTS, 2, sampling(0, 3)))
    assert len({headers["X-Request-Id"] for _, headers in one.completions()}) == 12


def test_what_is_lost_on_one_rank_is_lost_on_all(two_ranks, short_wait, make, stand_in):
    one = stand_in()
    engines = two_ranks.run(lambda rank: make(one))
    one.completion = lambda request: (
        BAD["500"] if request.headers["X-VLLM-Client-Tag"] == "rank-1-of-2" else usual
    )(request)
    found = two_ranks.run(lambda rank: engines[rank].generate(PROMPTS, 2, request(3)))
    assert all(isinstance(error, RolloutsLost) for error in found) and str(found[0]) == str(
        found[1]
    )
    refused = two_ranks.run(lambda rank: make(dead_url()))
    assert all(isinstance(error, UserError) for error in refused) and str(refused[0]) == str(
        refused[1]
    )
    full = two_ranks.run(lambda rank: make(one, weight_sync_dir="/dev/null/x"))
    assert all(isinstance(error, RunStopped) for error in full)


def test_no_server_gets_new_weights_while_another_rank_still_samples(two_ranks, make, stand_in):
    """rollout_ahead: each rank waits for its own rollouts and then syncs; rank 1 has a slow prompt."""
    one = stand_in(
        completion=lambda request: (
            time.sleep(0.6 * (request.body["prompt"] == PROMPTS[1])) or usual(request)
        )
    )
    engines = two_ranks.run(lambda rank: make(one))

    def step(rank):
        begun = engines[rank].begin([PROMPTS[rank]], 2, request(1), None)
        begun.exception()  # waits
        engines[rank].sync(WEIGHTS())
        return bare(engines[rank].result(begun))

    assert two_ranks.run(step) == [
        expected(choice, PROMPTS[:1]),
        [(p, t, f) for p, t, f in expected(choice, [PROMPTS[1]])],
    ]
    order = [path for path in one.paths("/collective_rpc", "answered")]
    assert (
        order == ["/collective_rpc", "answered", "answered", "/collective_rpc"]
        and not engines[0].missing
    )


def test_rollouts_of_the_next_step_are_made_while_this_one_is_learnt_from(world, make, stand_in):
    gate, done = threading.Event(), []
    engine = make(stand_in(completion=lambda request: gate.wait(60) and usual(request)))
    begun = engine.begin(PROMPTS, 2, request(3), lambda i, group: done.append(i))
    assert not begun.done()  # begin has not waited: the answers are behind the gate
    gate.set()
    wait([begun], timeout=60)  # learning, while nobody asks for the result
    assert begun.done() and sorted(done) == [0, 1, 2]
    assert bare(engine.result(begun)) == expected(choice)


def test_rewards_may_be_asked_for_by_rollouts_made_ahead_while_others_are_awaited():
    """From a thread of its own: answers must neither be lost nor be read by the other."""
    pool, stop, asked = workers.Pool(2, 20.0, 2.0, ("parity_reward:parity",)), threading.Event(), {}

    def come_ahead():
        while not stop.is_set() and len(asked) < 5000:
            job = {
                ("ahead", len(asked)): (
                    "parity_reward:parity",
                    "x" * (len(asked) % 7),
                    {"answer": ""},
                )
            }
            pool.ask(job)
            asked.update(job)

    pool.answers({"ready": ("parity_reward:parity", "", {"answer": ""})})
    thread = in_background(come_ahead)
    try:
        for step in range(30):
            found = pool.answers(
                {
                    ("now", step, i): ("parity_reward:parity", "x" * i, {"answer": ""})
                    for i in range(6)
                }
            )
            assert list(found.values()) == [0, 1, 0, 1, 0, 1]
    finally:
        stop.set()
    thread.result(10)
    assert all(value == len(asked[key][1]) % 2 for key, value in pool.answers(asked).items())
    pool.close()


def test_seed_rows_of_infoseed_are_all_asked_for_with_ids_of_their_own(
    world, make, stand_in, tiny_model_dir
):
    import infoseed

    one, tokenizer = stand_in(), AutoTokenizer.from_pretrained(tiny_model_dir)
    c = load_config(
        ["--info_seed_num_seeds=4", "--info_seed_num_seeds=3", "--max_prompt_length=48"]
    )
    rows = [
        {"prompt": "1 2 = 3", "prompt_ids": [1, 2], "system_prompt": ""},
        {"prompt": "2 2 = 4", "prompt_ids": [3, 4], "system_prompt": ""},
    ]
    engine = make(one, max_prompt_length=48)
    asked = request(2) | {"names": ["x", "y"]}
    found = infoseed.add_completions(engine, tokenizer, rows, [], asked, c)
    assert len(found) == 6 and [r["seed_id"] for r in found] == [0, 1, 2] * 2
    assert len({headers["X-Request-Id"] for _, headers in one.completions()}) == 6


# --- server/__main__.py


def test_serve_starts_stock_vllm_with_what_the_config_needs(monkeypatch, capfd):
    started = []
    monkeypatch.setattr(serve.os, "execve", lambda *args: started.append(args))
    monkeypatch.setattr(serve, "load_model_files", lambda *args: None)  # there is no model here
    monkeypatch.delenv("VLLM_CPU_OMP_THREADS_BIND", raising=False)
    serve.main(
        [
            "config/countdown_tiny.py",
            "--port=8123",
            "--host=0.0.0.0",
            "--tp=2",
            "--dp=3",
            "--model=here",
            "--dtype=float32",
            "--",
            "--max-num-seqs",
            "512",
        ]
    )
    (_, argv, environment), text = started[0], " ".join(started[0][1])
    assert argv[:3] == [sys.executable, "-m", "vllm.entrypoints.openai.api_server"] and argv[
        -2:
    ] == ["--max-num-seqs", "512"]
    for flags in (
        "--model here",
        "--port 8123",
        "--host 0.0.0.0",
        "--tensor-parallel-size 2",
        "--data-parallel-size 3",
        "--max-model-len 64",
        "--dtype float32",
        "--seed 42",
        "--logprobs-mode processed_logprobs",
        "--enable-request-id-headers",
        "--generation-config vllm",
    ):
        assert f" {flags} " in f"{text} "
    assert (
        "--weight-transfer-config" not in text
        and environment["VLLM_SERVER_DEV_MODE"] == "1"
        and f"--kv-cache-memory-bytes {2**28}" in text
    )
    assert "--enforce-eager" in argv and environment["TORCHDYNAMO_DISABLE"] == "1"
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0-1")
    monkeypatch.setenv(
        "CXX", sys.executable
    )  # a compiler that is there, also on a machine without g++
    serve.main(
        ["config/countdown_tiny.py", "--weight_sync=nccl", "--vllm_options.enforce_eager=False"]
    )
    assert "--enforce-eager" not in started[1][1] and "TORCHDYNAMO_DISABLE" not in started[1][2]
    assert (
        '--weight-transfer-config {"backend": "nccl"}' in " ".join(started[1][1])
        and started[1][2]["VLLM_CPU_OMP_THREADS_BIND"] == "0-1"
    )
    assert " --host 127.0.0.1 --port 8000 " in " ".join(started[1][1])


@pytest.mark.parametrize(
    "flags, words",
    [
        (["--port=0"], "--port=0"),
        (["--port=http"], "--port=http"),
        (["--port="], "--port="),
        (["--port=70000"], "--port=70000"),
        (["--tp=-1"], "--tp=-1"),
        (["--model="], "model is empty"),
        (["--prot=1"], "unknown key 'prot'"),
    ],
)
def test_serve_refuses_what_can_not_work(flags, words, monkeypatch):
    monkeypatch.setattr(serve.os, "execve", lambda *args: pytest.fail("started"))
    with pytest.raises(UserError, match=re.escape(words)):
        serve.main(["config/countdown_tiny.py", *flags])


# --- weight_sync="nccl": the control calls; the broadcast itself needs GPUs


@pytest.mark.parametrize("kind", ["tied", "untied"])
def test_every_server_gets_its_place_in_the_group_and_the_calls_come_in_order(
    kind, world, make, stand_in, tiny_model_dir, untied_model_dir, monkeypatch
):
    """vLLM's own trainer side, with a fake communicator in place of NCCL."""
    from vllm.distributed.weight_transfer import nccl_engine

    sent, opened, closed, model = [], [], [], tiny_model_dir if kind == "tied" else untied_model_dir
    monkeypatch.setattr(
        nccl_engine,
        "open_trainer_endpoint",
        lambda info: opened.append(info) or SimpleNamespace(destroy=lambda: closed.append(info)),
    )
    monkeypatch.setattr(
        nccl_engine,
        "packed_nccl_broadcast_producer",
        lambda iterator, group, **_: sent.append([(name, tuple(t.shape)) for name, t in iterator]),
    )
    monkeypatch.setattr(
        nccl_engine.NCCLTrainerWeightTransferEngine, "_post_send_sync", lambda self: None
    )
    lm, servers = (
        AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32),
        [stand_in() for _ in range(3)],
    )
    servers[0].other["/get_world_size"] = lambda request: (200, {"world_size": 3}, {})
    engine = make(*servers, synced=False, model=model, weight_sync="nccl")
    weights = lambda: named_weights(lm, 0)  # noqa: E731
    named = [(name, tuple(tensor.shape)) for name, tensor in weights()]
    assert (
        [(meta.name, meta.shape) for meta in engine.transfer.metadata()] == named
        and ("lm_head.weight" in dict(named))
        and len(dict(named)) == len(named)
    )

    engine.sync(weights())
    calls = [
        "/init_weight_transfer_engine",
        "/start_weight_update",
        "/update_weights",
        "/finish_weight_update",
        "/reset_prefix_cache",
        "/update_weight_version",
    ]
    places = [
        next(body["init_info"]["rank_offset"] for path, body, _ in each.log if path == calls[0])
        for each in servers
    ]
    assert places == [1, 4, 6] and opened[0].world_size == 8 and opened[0].rank == 0
    assert all(each.paths(*calls) == calls and each.version == engine.version for each in servers)
    told = next(
        body["update_info"] for path, body, _ in servers[1].log if path == "/update_weights"
    )
    assert (
        sent == [named]
        and list(zip(told["names"], map(tuple, told["shapes"]))) == named
        and set(told["dtype_names"]) == {"float32"}
    )
    assert bare(engine.generate(PROMPTS, 2, request(3))) == expected(choice)

    engine.sync(weights())  # the group stays
    assert len(opened) == 1 and servers[2].paths(*calls) == calls + calls[1:]
    servers[0].close()
    engine.sync(weights())  # and is made anew without a server that is gone
    assert (
        len(opened) == 2 and opened[1].world_size == 5 and list(engine.missing) == [servers[0].url]
    )
    assert [
        next(
            body["init_info"]["rank_offset"]
            for path, body, _ in reversed(each.log)
            if path == calls[0]
        )
        for each in servers[1:]
    ] == [1, 3]
    servers[
        1
    ].version = "default"  # was started again: it is no longer in the group, a broadcast would wait for it for ever
    engine.sync(weights())
    assert len(opened) == 3 and not set(engine.missing) - {servers[0].url}
    for each in servers[1:]:
        each.close()
    engine.sync(weights())
    assert len(engine.missing) == 3 and len(sent) == 4 and closed == opened[:2]
    with pytest.raises(RolloutsLost, match="no rollout server is left"):
        engine.generate(PROMPTS, 2, request(3))


def wait_for_ever() -> None:
    with transfer.deadline(0.2):
        time.sleep(100)


def test_a_broadcast_that_nobody_takes_ends_the_process_with_a_sentence(tmp_path):
    assert child.status(child.start(wait_for_ever, log=tmp_path / "log")) == 1
    assert (
        "error: weight_sync='nccl'" in (tmp_path / "log").read_text()
        and "0 s (rollout_timeout)" in (tmp_path / "log").read_text()
    )
    before = threading.active_count()
    with transfer.deadline(60):
        assert threading.active_count() == before + 1
    end = time.monotonic() + 60  # and one that is done leaves the process alone
    while threading.active_count() > before:
        assert time.monotonic() < end
        time.sleep(0.01)


# --- real servers


@pytest.fixture(scope="module")
def survivor(fleet, tiny_model_dir, tmp_path_factory):
    """An engine on both servers that outlives the death of one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(server, "dist", FakeWorld(1))
        engine = ServerEngine(
            str(tiny_model_dir),
            load_config([])
            | {
                "rollout_server": fleet.ready(0, 1),
                "rollout_timeout": 60.0,
                "output_dir": str(tmp_path_factory.mktemp("survivor")),
                "max_prompt_length": 16,
                "max_completion_length": 48,
            },
            torch.float32,
            torch.device("cpu"),
        )
    yield engine
    engine.close()


def test_log_probs_and_tokens_of_servers_are_those_of_the_trainer_and_of_the_engine_in_process(
    survivor, world, tiny_model_dir
):
    lm, tokenizer = (
        AutoModelForCausalLM.from_pretrained(tiny_model_dir),
        AutoTokenizer.from_pretrained(tiny_model_dir),
    )
    found = []
    for i in range(2):
        perturb(lm, i)
        survivor.sync(named_weights(lm, 0))
        found.append(rollout.generate(survivor, tokenizer, PROMPTS, 8, sampling(i, 3)))
        assert difference(lm, found[-1]) < 2e-5
    assert survivor.take_counts() == {
        "rollout/failed": 0,
        "rollout/foreign": 0,
        "rollout/refilled": 0,
        "rollout/servers": 2,
    }
    perturb(lm, 9)
    assert (
        difference(lm, found[-1]) > 2e-3
    )  # the tolerance would notice weights that did not arrive
    done = subprocess.run(
        [sys.executable, ROOT / "tests" / "helpers" / "server_worker.py", tiny_model_dir],
        capture_output=True,
        text=True,
        timeout=240,
        env=environment(),
    )
    assert done.returncode == 0, done.stderr[-3000:]
    for ours, theirs in zip(found, json.loads(done.stdout.splitlines()[-1])):
        assert [
            (r["prompt_ids"], r["completion_ids"], r["finish_reason"], r["text"]) for r in ours
        ] == [(r["prompt_ids"], r["completion_ids"], r["finish_reason"], r["text"]) for r in theirs]
        assert (
            max(
                abs(a - b)
                for one, two in zip(ours, theirs)
                for a, b in zip(one["logprobs"], two["logprobs"])
            )
            < 2e-5
        )


def test_log_probs_of_an_untied_model_equal_the_trainers(fleet, world, make, untied_model_dir):
    lm, tokenizer = (
        AutoModelForCausalLM.from_pretrained(untied_model_dir),
        AutoTokenizer.from_pretrained(untied_model_dir),
    )
    engine = make(fleet.ready(1), synced=False, model=untied_model_dir)
    for i in range(2):
        perturb(lm, i)
        engine.sync(named_weights(lm, 0))
        assert (
            difference(lm, rollout.generate(engine, tokenizer, PROMPTS, 8, sampling(i, 3))) < 2e-5
        )


def test_a_server_killed_in_mid_request_is_left_out_and_the_groups_come_complete_from_the_other(
    survivor, fleet, world, lm, capsys
):
    """It is stopped first, so that it certainly has requests that it did not answer when it is killed. Its successor starts meanwhile."""
    monkeypatch = pytest.MonkeyPatch()
    survivor.sync(named_weights(lm, 0))
    prompts, given = [[7, 20 + i] for i in range(8)], request(8) | {"max_tokens": 40}
    fresh = survivor.generate(prompts, 4, given)
    call, asked = survivor.servers[0].call, threading.Event()

    def stopped(path, *args, **kwargs):
        if path == "/v1/completions":
            fleet.signal(0, signal.SIGSTOP)
            asked.set()
        return call(path, *args, **kwargs)

    monkeypatch.setattr(survivor.servers[0], "call", stopped)
    begun = survivor.begin(prompts, 4, given, None)
    assert asked.wait(120)
    time.sleep(0.5)
    monkeypatch.undo()
    assert not begun.done()
    fleet.signal(0, signal.SIGKILL)
    fleet.start(0)
    found = survivor.result(begun)
    assert [r["prompt_ids"] for r in found] == [r["prompt_ids"] for r in fresh] and difference(
        lm, found
    ) < 2e-5
    assert [
        bare(found[i * 4 : (i + 1) * 4]) == bare(fresh[i * 4 : (i + 1) * 4]) for i in range(8)
    ] == [False, True] * 4  # asked again with other seeds
    counts = survivor.take_counts()
    assert (
        counts["rollout/failed"] >= 4
        and counts["rollout/servers"] == 1
        and "left out until the next sync" in capsys.readouterr().out
    )


# --- whole runs


def train(model: Path, folder: Path, *flags, ranks: int = 0) -> subprocess.Popen:
    launcher = (
        ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks)]
        if ranks
        else []
    )
    log = open(f"{folder}.log", "a")
    return subprocess.Popen(
        [
            sys.executable,
            *launcher,
            "train.py",
            "config/countdown_tiny.py",
            *FLAGS,
            f"--model={model}",
            f"--output_dir={folder}",
            *flags,
        ],
        cwd=ROOT,
        stdout=log,
        stderr=log,
        env=environment(),
        start_new_session=True,
    )


def finish(process: subprocess.Popen, folder: Path, seconds: float = 200) -> tuple[int, str]:
    try:
        return process.wait(seconds), Path(f"{folder}.log").read_text()
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)


def steps_in(folder: Path) -> list[dict]:
    path = folder / "metrics.jsonl"
    return (
        [
            json.loads(line)
            for line in path.read_text().splitlines(keepends=True)
            if line.endswith("\n")
        ]
        if path.exists()
        else []
    )


@pytest.fixture(scope="module")
def ahead(fleet, tiny_model_dir, tmp_path_factory):
    """Three steps with rollout_ahead=1 on one rank; a proxy in front of the server has recorded them."""
    folder, proxy = tmp_path_factory.mktemp("ahead") / "run", Proxy(fleet.ready(1))
    process = train(
        tiny_model_dir,
        folder,
        "--rollout_engine=server",
        f"--rollout_server={proxy.url}",
        "--rollout_ahead=1",
        "--save_steps=1",
        "--save_total_limit=0",
        "--max_logp_difference=-1",
    )
    status, log = finish(process, folder)
    proxy.close()
    assert status == 0, log[-3000:]
    return folder, proxy


def test_a_run_asks_under_its_own_ids_and_tag(ahead):
    asked = [(body, headers) for path, body, headers in ahead[1].log if path == "/v1/completions"]
    assert sorted(headers["X-Request-Id"] for _, headers in asked) == sorted(
        f"rank-0-of-1-s{step}-p{i}" for step in (1, 2, 3) for i in range(8)
    )
    assert {headers["X-VLLM-Client-Tag"] for _, headers in asked} == {"rank-0-of-1"} and all(
        type(i) is int for body, _ in asked for i in body["prompt"]
    )
    synced = [i for i, (path, _, _) in enumerate(ahead[1].log) if path == "/collective_rpc"]
    steps = [
        [
            int(re.search(r"-s(\d)-", headers["X-Request-Id"])[1])
            for path, _, headers in ahead[1].log[a:b]
            if path == "/v1/completions"
        ]
        for a, b in zip(synced, [*synced[1:], None])
    ]
    assert steps == [[1] * 8 + [2] * 8, [3] * 8, [], []]  # steps 1 and 2 by the first weights


def test_rollouts_made_ahead_are_by_weights_exactly_one_step_old(ahead, tiny_model_dir):
    """The log-probs that the server sent are those of the policy after one step less, and of no other."""
    folder, proxy = ahead
    policies = [
        Policy(AutoModelForCausalLM.from_pretrained(path), 1.0, 64)
        for path in (tiny_model_dir, folder / "step_000001", folder / "step_000002")
    ]
    for step, by in ((1, 0), (2, 0), (3, 1)):
        sent = [
            one
            for name, answer in proxy.answers.items()
            if f"-s{step}-" in name
            for one in json.loads(answer)["choices"]
        ]
        batch = rollout.to_batch(
            [
                {
                    "prompt_ids": one["prompt_token_ids"],
                    "completion_ids": one["token_ids"],
                    "logprobs": one["logprobs"]["token_logprobs"],
                }
                for one in sent
            ],
            "cpu",
        )
        with torch.no_grad():
            worst = [
                (
                    policy(batch["ids"], batch["prompt_lengths"], batch["lengths"])[0]
                    - batch["sampler_logps"]
                )
                .abs()
                .max()
                .item()
                for policy in policies
            ]
        assert (
            len(sent) == 32
            and worst[by] < 2e-5
            and all(w > 1e-3 for i, w in enumerate(worst) if i != by)
        ), (step, worst)


@pytest.mark.slow
def test_a_server_that_was_started_again_is_used_again_after_a_sync_and_left_out_when_somebody_else_changes_its_weights(
    survivor, fleet, world, lm
):
    fleet.ready(0, 1)
    survivor.sync(named_weights(lm, 0))
    fleet.signal(0, signal.SIGKILL)
    fleet.start(0)
    survivor.generate(PROMPTS, 8, sampling(2, 3))
    fleet.ready(0)
    assert [s.url for s in survivor.live] == [fleet.urls[1]]
    perturb(copy := deepcopy(lm), 5)
    survivor.sync(named_weights(copy, 0))
    assert len(survivor.live) == 2
    assert (
        difference(copy, survivor.generate(PROMPTS, 8, sampling(3, 3))) < 2e-5
        and survivor.take_counts()["rollout/servers"] == 2
    )
    httpx.post(
        fleet.urls[0] + "/update_weight_version", json={"new_version": "theirs"}
    ).raise_for_status()
    assert difference(copy, survivor.generate(PROMPTS, 8, sampling(4, 3))) < 2e-5 and [
        s.url for s in survivor.live
    ] == [fleet.urls[1]]


@pytest.fixture(scope="module")
def on_policy(fleet, tiny_model_dir, tmp_path_factory):
    """Three steps on two ranks and two servers, ZeRO 2."""
    folder = tmp_path_factory.mktemp("on_policy") / "run"
    status, log = finish(
        train(
            tiny_model_dir,
            folder,
            "--rollout_engine=server",
            f"--rollout_server={fleet.ready(0, 1)}",
            "--zero_stage=2",
            ranks=2,
        ),
        folder,
    )
    assert status == 0, log[-3000:]
    return folder


@pytest.mark.slow
def test_a_run_by_two_servers_is_the_run_by_the_engine_in_process(
    on_policy, tiny_model_dir, tmp_path
):
    """Rewards and lengths to the digit: the same tokens; what depends on log-probs to the rounding of other batches in vLLM."""
    folder = tmp_path / "run"
    status, log = finish(train(tiny_model_dir, folder, "--zero_stage=2", ranks=2), folder)
    assert status == 0, log[-3000:]
    for ours, theirs in zip(steps_in(on_policy), steps_in(folder), strict=True):
        same = [
            key
            for key in theirs
            if not key.startswith(("time/", "mismatch", "sampling", "logp"))
            and key != "tokens_per_second"
        ]
        assert {key: ours[key] for key in same} == pytest.approx(
            {key: theirs[key] for key in same}, rel=1e-4, abs=1e-6
        )
        assert (ours["reward"], ours["completions/mean_length"]) == (
            theirs["reward"],
            theirs["completions/mean_length"],
        ) and ours["rollout/servers"] == 2
    assert not (on_policy / "weights").exists()


@pytest.mark.slow
def test_the_first_step_of_a_run_ahead_is_that_of_a_run_on_policy(ahead, on_policy):
    first, same = steps_in(on_policy)[0], steps_in(ahead[0])[0]
    assert {key: same[key] for key in ("reward", "completions/mean_length")} == {
        key: first[key] for key in ("reward", "completions/mean_length")
    }
    assert {key: same[key] for key in ("loss", "grad_norm", "entropy")} == pytest.approx(
        {key: first[key] for key in ("loss", "grad_norm", "entropy")}, rel=1e-3
    )


@pytest.mark.slow
def test_a_run_whose_servers_all_die_saves_and_exits_with_a_sentence_and_goes_on_when_there_are_others(
    fleet, tiny_model_dir, tmp_path
):
    folder = tmp_path / "run"
    flags = [
        "--rollout_engine=server",
        f"--rollout_server={fleet.ready(0, 1)}",
        "--max_logp_difference=-1",
        "--save_steps=0",
    ]
    process, end = train(tiny_model_dir, folder, *flags, "--max_steps=400"), time.monotonic() + 120
    while len(steps_in(folder)) < 2:
        assert time.monotonic() < end and process.poll() is None, Path(f"{folder}.log").read_text()[
            -3000:
        ]
        time.sleep(0.05)
    for i in (0, 1):
        fleet.signal(i, signal.SIGKILL)
    status, log = finish(process, folder, 60)
    errors = re.findall("error: .*", log)
    assert (
        status == 1
        and len(errors) == 1
        and "no rollout server is left" in errors[0]
        and "Traceback" not in log
    ), log[-3000:]
    last = checkpoint.latest(folder)
    step = int(last.name[5:])
    assert checkpoint.verify(last) == "" and step == len(steps_in(folder)) >= 2 and str(last) in log
    others = [StandIn(port) for port in fleet.ports]
    status, log = finish(
        train(
            tiny_model_dir,
            folder,
            *flags,
            f"--max_steps={step + 1}",
            "--resume_from_checkpoint=latest",
        ),
        folder,
        60,
    )
    for each in others:
        each.close()
    assert status == 0 and [line["step"] for line in steps_in(folder)] == list(
        range(1, step + 2)
    ), log[-3000:]
