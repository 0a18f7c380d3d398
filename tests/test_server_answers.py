"""rollout_engine="server": whatever a server answers, only whole completions of our own requests
come through, within limits of time and size, and what it says can't steer a terminal."""

import json
import re
import time
from contextlib import contextmanager
from types import SimpleNamespace

import httpcore
import pytest
from bad_answers import BAD, FOREIGN, dripped_head, echo, no_http, raw
from engine_worker import PROMPTS
from servers import bare, expected, request
from stand_ins import choice, together, usual, with_choices

from common import RolloutsLost, UserError
from server import engine as server_engine
from server import http as server_http

pytest_plugins = ["server_fixtures"]


@pytest.mark.parametrize("kind", BAD)
def test_a_bad_answer_is_thrown_away_and_asked_for_again(kind, world, naps, make, stand_in):
    """Twice from each of two servers, in all four requests for two prompts; then they behave.
    Nothing of it comes through, all is complete."""
    one = stand_in()
    two = stand_in()
    engine = make(one, two)
    one.plan = [BAD[kind]]
    two.plan = [BAD[kind]]
    rollouts = engine.generate(PROMPTS[:2], 2, request(2))
    assert [r["prompt_ids"] for r in rollouts] == [PROMPTS[0]] * 2 + [PROMPTS[1]] * 2
    for r in rollouts:
        assert r["completion_ids"][0] == r["prompt_ids"][0]
        assert len(r["logprobs"]) == len(r["completion_ids"]) <= 12
        assert set(r["logprobs"]) == {-0.5}
    counts = engine.take_metrics()
    assert counts["rollout/failed"] + counts["rollout/foreign"] + counts["rollout/refilled"] > 0
    assert (counts["rollout/foreign"] > 0) == (kind in FOREIGN)
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
def test_a_server_that_never_does_better_ends_the_run_after_a_bounded_number_of_tries(
    kind, world, naps, make, stand_in
):
    one = stand_in(completion=BAD[kind])
    two = stand_in(completion=BAD[kind])
    engine = make(one, two)
    with pytest.raises(RolloutsLost) as caught:
        engine.generate(PROMPTS[:1], 2, request(1))
    asked = len(one.completions()) + len(two.completions())
    assert 2 <= asked <= server_engine.TRIES
    sentence = str(caught.value)
    assert "\n" not in sentence
    assert one.url in sentence or two.url in sentence
    told_the_cure = "name the servers themselves" in sentence and "rank-0-of-1-s1-p0" in sentence
    assert told_the_cure == ("a proxy" in sentence) == ("echo" in kind), sentence
    # pauses grow, with jitter
    assert len(naps) == asked - 1
    jitters = [nap / (0.25 * 2 ** (i + 1)) for i, nap in enumerate(naps)]
    assert min(jitters) >= 0.5
    assert max(jitters) <= 1.5
    assert len(set(jitters)) == len(jitters)


def test_only_what_is_missing_is_asked_for_again_with_other_seeds(world, naps, make, stand_in):
    def half(body, i):
        return choice(body, i) if i % 2 else choice(body, i, finish_reason="abort")

    one = stand_in()
    engine = make(one)
    one.plan = [with_choices(half)] * 2
    assert len(engine.generate(PROMPTS[:1], 8, request(1))) == 8
    bodies = one.bodies("/v1/completions")
    assert [body["n"] for body in bodies] == [8, 4, 2]
    assert engine.take_metrics()["rollout/refilled"] == 6
    seeds = []
    for body in bodies:
        # torch's CPU generator reads no more of a seed
        seeds += [(body["seed"] + i) % 2**32 for i in range(body["n"])]
    assert len(set(seeds)) == len(seeds)
    name = "rank-0-of-1-s1-p0"
    assert one.request_ids() == [name, f"{name}-a1", f"{name}-a2"]


@pytest.mark.parametrize("reason", ["stop", "length"])
def test_the_first_and_the_last_token_certain_ones_and_a_full_length_count(reason):
    logps = {"token_logprobs": [0.0, 0, -1.0]}  # what is certain has no minus
    choice = {"token_ids": [0, 5, 9], "logprobs": logps, "finish_reason": reason}
    body = {"prompt": [1], "n": 1, "max_tokens": 3}
    assert len(server_http.completions_in({"choices": [choice]}, body, vocabulary=10)) == 1
    assert server_http.completions_in({"choices": [choice]}, body, vocabulary=9) == []


def test_more_completions_than_asked_for_are_cut(world, make, stand_in):
    one = stand_in(completion=with_choices(choice, count=9))
    assert bare(make(one).generate(PROMPTS, 2, request(3))) == expected()


@pytest.mark.parametrize(
    "answer, words",
    [
        (raw(b" " * 1000, pause=0.02), "no end within 3 s"),
        (dripped_head(pause=0.3), "did not answer within 3 s"),
        (lambda request: lambda handler: time.sleep(9), "did not answer within 3 s"),
        (raw(b" " * 300_000), r"\d{5,6} bytes and no end"),
    ],
)
def test_a_slow_or_endless_answer_is_cut_off(answer, words, world, naps, make, stand_in):
    slow = stand_in()
    engine = make(slow, stand_in())
    slow.completion = answer
    impatient = engine.servers[0]
    impatient.seconds = 3.0
    rollouts = engine.generate(PROMPTS[:1], 2, request(1))
    assert rollouts[0]["prompt_ids"] == PROMPTS[0]
    assert engine.take_metrics()["rollout/failed"] == 1
    body = {"prompt": [1], "n": 1, "seed": 0, "max_tokens": 3}
    with pytest.raises(server_http.ServerError, match=words):
        impatient.call("/v1/completions", body, {"X-Request-Id": "x"})


def test_once_an_answer_has_begun_its_bytes_must_come_soon(world, make, stand_in, monkeypatch):
    """Whatever rollout_timeout is, which is for sampling."""
    one = stand_in(completion=raw(b" " * 1000, pause=0.02))
    server = make(one, rollout_timeout=600).servers[0]
    monkeypatch.setattr(server_http, "BODY_SECONDS", 0.5)
    body = {"prompt": [1], "n": 1, "seed": 0, "max_tokens": 3}
    with pytest.raises(server_http.ServerError, match="bytes and no end within"):
        server.call("/v1/completions", body, {"X-Request-Id": "x"})


def test_a_server_that_hangs_is_noticed_in_seconds_where_nothing_is_sampled(monkeypatch):
    given = {}

    def call(self, path, seconds=None):
        given[path] = seconds
        return {}

    monkeypatch.setattr(server_http.Server, "call", call)
    server = server_http.Server("http://a:1", 3600.0)
    server.look_alive()
    server.version()
    assert given == {"/health": 10.0, "/weight_info": 30.0}


def test_connecting_has_a_limit_of_its_own_within_that_of_the_call(monkeypatch):
    monkeypatch.setattr(server_http, "time", SimpleNamespace(monotonic=lambda: 100.0))
    given = []
    network = server_http.Network()
    network.tcp = SimpleNamespace(
        connect_tcp=lambda host, port, seconds, *more: given.append(seconds)
    )
    for seconds in (3600, 3):
        network.connect_tcp("a", 1, timeout=100.0 + seconds)
    assert given == [server_http.CONNECT_SECONDS, 3]


@pytest.mark.parametrize("limit, named", [(3600.0, "10"), (3.0, "3")])
def test_a_server_that_takes_no_connection_is_told_with_the_limit_that_held(
    limit, named, monkeypatch
):
    def connect_tcp(self, *given, **more):
        raise httpcore.ConnectTimeout

    monkeypatch.setattr(server_http.Network, "connect_tcp", connect_tcp)
    with pytest.raises(server_http.ServerError, match=f"a:1 took no connection in {named} s$"):
        server_http.Server("http://a:1", limit).call("/v1/completions", {})


def test_a_request_that_is_read_slowly_is_cut_off_too(monkeypatch):
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(server_http, "time", SimpleNamespace(monotonic=lambda: clock.now))

    def write(piece, seconds):
        clock.now += 4  # of the time that each wait has

    stream = server_http.Stream(SimpleNamespace(write=write))
    with pytest.raises(httpcore.ReadTimeout):
        stream.write(b"x" * 100_000, timeout=10.0)
    assert clock.now == 12


def test_waiting_for_another_large_answer_to_be_read_takes_nothing_from_ones_own_time(
    world, make, stand_in, monkeypatch
):
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(server_http, "time", SimpleNamespace(monotonic=lambda: clock.now))

    @contextmanager
    def after_another(self, end):
        clock.now += 2 * server_http.BODY_SECONDS
        yield

    one = stand_in()
    server = make(one, rollout_timeout=600).servers[0]
    one.plan = [lambda request: (200, json.dumps({"id": "x", "more": "x" * 10**6}).encode(), {})]
    monkeypatch.setattr(server_http.Server, "turn", after_another)
    body = {"prompt": [1], "n": 1, "seed": 0, "max_tokens": 3}
    assert server.call("/v1/completions", body, {"X-Request-Id": "x"}, largest=2**21)["id"] == "x"


def test_an_answer_may_be_as_large_as_its_request_allows_and_no_larger(world, naps, make, stand_in):
    """Thirty megabytes of JSON take over a gigabyte to parse."""
    body = {"prompt": [1, 2], "n": 2, "max_tokens": 12, "seed": 0}
    longest = server_http.largest_answer(body)
    assert longest < 80_000

    def padded(size):
        def answer(request):
            status, found, headers = usual(request)
            missing = size - len(json.dumps(found | {"more": ""}))
            return status, json.dumps(found | {"more": "x" * missing}).encode(), headers

        return answer

    one = stand_in()
    engine = make(one)

    def call():
        headers = {"X-Request-Id": "x"}
        return engine.servers[0].call("/v1/completions", body, headers, largest=longest)

    one.plan = [padded(longest)]
    call()
    one.plan = [padded(longest + 1)]
    with pytest.raises(server_http.ServerError, match=f"more than the {longest} that"):
        call()
    one.plan = [lambda request: (200, b"[" + b"[]," * 10_000_000 + b"[]]", {})]
    assert len(engine.generate(PROMPTS[:1], 2, request(1))) == 2
    assert engine.take_metrics()["rollout/failed"] == 1


def test_a_real_answer_is_much_smaller_than_what_is_allowed():
    """Ids of seven digits, log-probs of full length, and a text that JSON has to escape."""
    tokens = 400
    logp = -0.12345678901234567e-10
    choice = {
        "text": "\n\n\n\n\0" * tokens,
        "prompt_token_ids": [1_234_567] * 50,
        "token_ids": [1_234_567] * tokens,
        "logprobs": {
            "token_logprobs": [logp] * tokens,
            "tokens": ["token_id:1234567"] * tokens,
            "top_logprobs": [{"token_id:1234567": logp}] * tokens,
            "text_offset": [1_000_000] * tokens,
        },
    }
    body = {"prompt": choice["prompt_token_ids"], "n": 3, "max_tokens": tokens}
    real = len(json.dumps({"choices": [choice] * 3}))
    assert real < 0.8 * server_http.largest_answer(body)


def test_large_answers_of_a_server_are_parsed_one_at_a_time(world, make, stand_in, monkeypatch):
    """Sixty-four of them may come at once."""
    now = []
    most = []

    def loads(data):
        now.append(1)
        most.append(len(now))
        time.sleep(0.01)  # time for others to come in
        now.pop()
        return json.loads(data)

    one = stand_in()
    one.plan = together(8)
    engine = make(one)
    monkeypatch.setattr(server_engine, "CONCURRENCY", 8)
    monkeypatch.setattr(engine, "check_weights", lambda server: None)
    monkeypatch.setattr(server_http, "json", SimpleNamespace(loads=loads, dumps=json.dumps))
    prompts = [[i + 1] for i in range(24)]
    assert len(engine.generate(prompts, 2, request(24))) == 48
    assert len(most) == 24
    assert max(most) == 1


ESCAPES = "\x1b[2J\x1b[31m\r\nerror: forged \u202e"


def printed(capfd) -> str:
    return "".join(capfd.readouterr()).replace("\n", "")


@pytest.mark.parametrize(
    "answer",
    [
        lambda request: (500, ESCAPES.encode(), {}),
        no_http(ESCAPES.encode()),
        echo(ESCAPES, "own"),
        no_http(b"HTTP/1.1 200 OK\r\nContent-Length: \x1b[2J\r\n\r\n"),
    ],
    ids=["an error body", "no HTTP", "an id", "a header"],
)
def test_what_a_server_says_is_quoted(answer, world, naps, make, stand_in, capfd):
    engine = make(stand_in(completion=answer), stand_in(completion=answer))
    capfd.readouterr()  # its progress bar
    with pytest.raises(RolloutsLost) as caught:
        engine.generate(PROMPTS[:1], 2, request(1))
    said = str(caught.value) + printed(capfd)
    assert said.isprintable(), said


def test_weights_and_settings_with_odd_names_are_quoted(world, make, stand_in, capfd):
    one = stand_in()
    engine = make(one)
    one.version = ESCAPES
    capfd.readouterr()  # its progress bar
    with pytest.raises(RolloutsLost) as caught:
        engine.generate(PROMPTS[:1], 2, request(1))
    said = str(caught.value) + printed(capfd)
    assert said.isprintable(), said
    odd = stand_in()
    odd.settings["model_config"]["logprobs_mode"] = ESCAPES
    with pytest.raises(UserError) as refused:
        make(odd)
    assert str(refused.value).isprintable()
    assert re.search("logprobs_mode='", str(refused.value))
